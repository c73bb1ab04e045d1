// What plain C++ cannot say: the machine's own instructions, one function each.
#pragma once

// ---- numbers of 16 bits, and tf32: float32 with 10 bits of mantissa

__device__ __forceinline__ unsigned short to_bfloat16(float x) {
    unsigned short y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned short to_float16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float from_float16(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

// Two numbers as one word, the first in its lower half.
__device__ __forceinline__ unsigned pack_float16(float first, float second) {
    unsigned y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}

__device__ __forceinline__ unsigned round_tf32(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// Hide where a word comes from, so that nothing computed from it is kept in registers beside it.
__device__ __forceinline__ void hide(unsigned& x) { asm volatile("" : "+r"(x)); }

// ---- within a warp and within a block

__device__ __forceinline__ float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// Named barriers 1 to 15: `threads` counts all who wait and all who only arrive.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ char* dynamic_shared() {
    extern __shared__ __align__(16) char memory[];
    return memory;
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

// ---- words that other blocks write and read while this one runs; every 32 bits are one access of their own

__device__ __forceinline__ uint4 load_relaxed(const uint4* from) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
}

__device__ __forceinline__ void store_relaxed(unsigned* to, unsigned x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Four matrices [8, 8] of 16 bits from shared memory: lane l names row l % 8 of matrix l / 8, and lane 4*g + c gets the
// words that hold [g][2c], [g][2c+1] of each; of the transposed matrices, where these are asked for.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const char* row) {
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void load_transposed(unsigned (&x)[4], const char* row) {
    unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}

// ---- products of a warp: sums [16, 8] += a [16, K] b [K, 8], K = 8 for tf32 and 16 for 16 bits
//
// Lane l = 4*g + c holds sums[g][2c], [g][2c+1], [g+8][2c], [g+8][2c+1]. A word is one tf32 or two neighbouring numbers
// of 16 bits along K; in words (8 of them along K) the lane holds a[g][c], a[g+8][c], a[g][c+4], a[g+8][c+4] and
// b[c][g], b[c+4][g].

__device__ __forceinline__ void mma_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_bfloat16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_float16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
