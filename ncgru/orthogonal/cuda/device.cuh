// What plain C++ cannot say, one function each. The CPU emulator of the tests puts its own in this file's place.
#pragma once

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}

// The barrier of a cluster, in two halves, and where another of its blocks has what this one has in its shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ void cluster_arrive() { __cluster_barrier_arrive(); }
__device__ __forceinline__ void cluster_wait() { __cluster_barrier_wait(); }
__device__ __forceinline__ void* shared_of_block(const void* mine, int block) { return __cluster_map_shared_rank(mine, block); }
#endif
