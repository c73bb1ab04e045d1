// Float32 matrices in two parts of float16, for the products of `product.cu`.
//
// A *line* is what a product sums along: a row of A or a column of B. A line is scaled by a power of two and each number
// x of it is then split as high + low. The largest number of what has one scale comes to lie in [2^13, 2^15): numbers
// down to 2^-16 of it keep 22 bits, and of smaller ones what is left out is 2^-39 of the largest at most.
//
// Lines that are rows in memory, as they are a time step's numbers, have one scale each. Lines that are columns go
// through all time steps, over which gradients may fall by many powers of ten: they have one for each CHUNK of their
// numbers. So an early gradient of 1e-12 is not lost beside a late one of 1.
//
// An infinity is split as infinity and NaN: where a product of float32 would have an infinity or a NaN because an operand
// has one, this one has a NaN, and nowhere else. Columns with numbers beyond 1e30 may overflow on the way.
//
// Both parts lie side by side in memory. Lines along rows: [line][K / 32][2][32]; lines along columns: [K][2][lines].
#pragma once

#include "device.cuh"

typedef long long index_t;

#define CHUNK 32  // numbers of a line

// Half the exponent of a line's scale, from the bits of its largest size.
__device__ __forceinline__ int half_exponent(unsigned most) {
    const int half = (141 - static_cast<int>(most >> 23)) >> 1;
    return half < 63 ? half : 63;
}

__device__ __forceinline__ float scale_of(unsigned most) {
    return __uint_as_float(static_cast<unsigned>(127 + 2 * half_exponent(most)) << 23);
}

// 1 / `scale_of`.
__device__ __forceinline__ float scale_back_of(unsigned most) {
    return __uint_as_float(static_cast<unsigned>(127 - 2 * half_exponent(most)) << 23);
}

// Its square root: two of them make a number that is squared in turn, so that nothing overflows.
__device__ __forceinline__ float root_of(unsigned most) {
    return __uint_as_float(static_cast<unsigned>(127 - half_exponent(most)) << 23);
}

__device__ __forceinline__ float scaled_back(float sum, float root) { return sum * root * root; }
