// Kernels that show what launching does: arguments, shared memory, blocks that wait for each other, time.
#include "arithmetic.cuh"

// y[i] = FACTOR * (scale * x[i] + offset); x may be null, then it counts as 1.
extern "C" __global__ void scale(const float* x, float* y, long long count, float scale, long long offset) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        y[i] = FACTOR * (scale * (x ? x[i] : 1.0f) + offset);
}

// y[0] = the sum of 0 .. words-1, through dynamic shared memory; one block.
extern "C" __global__ void through_shared(long long* y, long long words) {
    extern __shared__ int room[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) room[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) {
        y[0] = 0;
        for (int i = 0; i < words; ++i) y[0] += room[i];
    }
}

// Every block counts itself and waits for all others, `rounds` times; `counter` starts at 0.
extern "C" __global__ void wait_for_all(unsigned* counter, long long rounds) {
    for (long long round = 1; round <= rounds; ++round) {
        __syncthreads();
        if (threadIdx.x == 0) {
            atomicAdd(counter, 1u);
            while (atomicAdd(counter, 0u) < round * gridDim.x) {}
        }
        __syncthreads();
    }
}

extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}

// Needs more registers than a small --maxrregcount leaves.
extern "C" __global__ void hungry(float* x) {
    float values[doubled(32)];
#pragma unroll
    for (int i = 0; i < doubled(32); ++i) values[i] = x[i * 32 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < doubled(32); ++i) x[i * 32 + threadIdx.x] = values[doubled(32) - 1 - i] * values[(i + 5) % 64];
}
