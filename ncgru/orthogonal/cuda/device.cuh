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

// A word that other blocks write while this one runs.
__device__ __forceinline__ unsigned load_relaxed(const unsigned* from) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// What the thread, or one it met at a barrier, wrote before comes before what it writes later; likewise what it reads.
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// A product of a warp: sums [16, 8] += a [16, 8] b [8, 8].
//
// Lane l = 4*g + c holds sums[g][2c], [g][2c+1], [g+8][2c], [g+8][2c+1], a[g][c], a[g+8][c], a[g][c+4], a[g+8][c+4] and
// b[c][g], b[c+4][g]. One instruction does all of it from 9.0 on; before, each does a quarter.
__device__ __forceinline__ void mma_float64(double (&sums)[4], const double (&a)[4], const double (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
    for (int i = 0; i < 4; ++i)
        asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
            : "+d"(sums[i % 2 * 2]), "+d"(sums[i % 2 * 2 + 1])
            : "d"(a[i]), "d"(b[i / 2]));
#endif
}

// Copies WIDTH neighbours in float32 to shared memory, or zeros unless they are `inside`, while the thread goes on. What it
// has copied since the last commit_copies is there once await_copies<LEFT> leaves no more than LEFT such sets under way.
template <int WIDTH>
__device__ __forceinline__ void copy_async(float* to, const float* from, bool inside) {
    unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
    int read = inside ? 4 * WIDTH : 0;
    if (WIDTH == 4)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(read) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from), "n"(4 * WIDTH), "r"(read) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
