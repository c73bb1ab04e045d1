// What plain C++ cannot say, one function each. The CPU emulator of the tests puts its own in this file's place.
#pragma once

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}
