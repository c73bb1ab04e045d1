// What the kernels for small and for large matrices share: skew-symmetric access, sums, barriers, exact inversion.
//
// Set by the including file: CLUSTER, 1 where the blocks of a group are a hardware cluster; 0 where they wait for each
// other through a counter in memory, which takes a cooperative launch.
#pragma once

#include "device.cuh"

typedef long long index_t;

// Called, not inlined: used in several places, and large.
#define OUT_OF_LINE __attribute__((noinline))

#define THREADS 512
#define WARPS (THREADS / 32)
#define PROBES 8

#define EXACT 0
#define NEUMANN 1
#define HYPERPOWER 2

// As in ncgru/orthogonal/inverse.py: tolerances of the guard.
#define EPSILON 1.1920929e-7f
#define HYPERPOWER_TOLERANCE (2.0f * EPSILON)
#define NEUMANN_TOLERANCE 0.1f
// A residual that is lost in the rounding of the inverse: what leaves it counts as exact.
#define NEGLIGIBLE (EPSILON / 64.0f)
// From a residual within this, passes of the series of order 2 reach a negligible one, in this many at most.
#define REFINABLE 0.1f
#define MOST_PASSES 4
#define REFINING_ORDER 2

__device__ __forceinline__ index_t packed_size(int n) { return static_cast<index_t>(n) * (n - 1) / 2; }

// Where row `row` would have its diagonal in the packed upper triangle: element (row, column) is `column` further on.
__device__ __forceinline__ index_t packed_row(int n, int row) {
    return static_cast<index_t>(row) * n - static_cast<index_t>(row) * (row + 1) / 2 - row - 1;
}

// A[row, column] of the packed A.
__device__ __forceinline__ float skew_element(const float* packed, int n, int row, int column) {
    if (row == column) return 0.0f;
    return row < column ? packed[packed_row(n, row) + column] : -packed[packed_row(n, column) + row];
}

// Z[row, probe]: the fixed signs of the guard, 8^(-1/2) in size.
__device__ __forceinline__ float probe_sign(int row, int probe) {
    unsigned long long k = static_cast<unsigned long long>(row) * PROBES + probe + 1;
    return (k * k * 2654435761ull >> 24 & 1) ? 0.35355338f : -0.35355338f;
}

__device__ __forceinline__ float unit(float sign) { return sign < 0.0f ? -1.0f : 1.0f; }

__device__ __forceinline__ double widen(float x) { return x; }

__device__ __forceinline__ index_t bits(float x) { return __float_as_int(x); }

// The blocks that work together, and their barrier.
struct Group {
    int rank, size;
    unsigned* counter;  // 0 but for its highest bit when the kernel starts, and at its end; a cluster needs none

    Group() = default;
    __device__ Group(int rank, int size, unsigned* counter) : rank(rank), size(size), counter(counter) {}

    // In a cluster all blocks have to be there before one writes to another's shared memory: each says so once, and
    // later waits for the others.
    __device__ void greet() {
#if CLUSTER
        cluster_arrive();
#endif
    }
    __device__ void meet() {
#if CLUSTER
        cluster_wait();
#endif
    }

    // Where block `to` of a cluster has what this block has at `mine`, in shared memory.
    template <class T>
    __device__ T* copy(T* mine, int to) const {
#if CLUSTER
        return static_cast<T*>(shared_of_block(mine, to));
#else
        return mine;
#endif
    }

    // All threads of all blocks come here; what any of them wrote before, all see afterwards.
    __device__ void wait() const {
#if CLUSTER
        cluster_arrive();
        cluster_wait();
#else
        __syncthreads();
        if (size == 1) return;
        if (threadIdx.x == 0) {
            // What all blocks add turns the highest bit, and leaves the others as they were.
            fence();
            unsigned before = atomicAdd(counter, rank ? 1u : 0x80000000u - (size - 1));
            while (!((load_relaxed(counter) ^ before) >> 31)) {}
            fence();
        }
        __syncthreads();
#endif
    }

    __device__ index_t first() const { return static_cast<index_t>(rank) * THREADS + threadIdx.x; }
    __device__ index_t stride() const { return static_cast<index_t>(size) * THREADS; }
};

// The sum over the block of one number a thread, in a fixed order; all threads get it. `room` holds WARPS numbers.
template <class Number>
__device__ Number block_sum(Number x, Number* room) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    Number sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += room[warp];
    return sum;
}

// ‖Y'Y‖_F^(1/2) of Y [n, PROBES] with rows `pitch` apart: the guard's size of what was probed; all threads get it.
// `room` holds WARPS numbers.
template <class Number>
__device__ float probed_size(const Number* probed, int pitch, int n, double* room) {
    constexpr int LANES = THREADS / (PROBES * PROBES);  // that share one element of Y'Y
    int left = threadIdx.x / LANES / PROBES, right = threadIdx.x / LANES % PROBES;
    double dot = 0.0;
    for (int row = threadIdx.x % LANES; row < n; row += LANES)
        dot += static_cast<double>(probed[row * pitch + left]) * static_cast<double>(probed[row * pitch + right]);
#pragma unroll
    for (int mask = LANES / 2; mask; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
    double square = threadIdx.x % LANES ? 0.0 : dot * dot;
    return static_cast<float>(sqrt(sqrt(block_sum(square, room))));
}

// Part of the seal: of the words of a state that this thread looks at, before and after an update.
struct SealPart {
    index_t sum = 0;
    __device__ void anchor(float x) { sum += 3 * bits(x); }
    __device__ void sign(float x) { sum += 5 * bits(x); }
    __device__ void inverse(float x) { sum += 7 * bits(x); }
    __device__ void matrix(float x) { sum += 11 * bits(x); }
};

// What the state says before anything is done: this thread's part of its seal, and whether its part of A has moved.
template <int AT_A_TIME = 4>
__device__ __forceinline__ index_t survey_state(
    const float* packed, const float* anchor, const float* inverse, const float* matrix, const float* signs, int n,
    index_t first, index_t stride, bool& moved) {
    SealPart seal;
    moved = false;
    for (index_t i = first; i < packed_size(n); i += stride) {
        float old = anchor[i];
        moved |= packed[i] != old;
        seal.anchor(old);
    }
    for (index_t i = first; i < n; i += stride) seal.sign(signs[i]);
#pragma unroll AT_A_TIME
    for (index_t i = first; i < static_cast<index_t>(n) * n; i += stride) {
        seal.inverse(inverse[i]);
        seal.matrix(matrix[i]);
    }
    return seal.sum;
}

// (I+A)^-1 in place of I+A: Gauss and Jordan's elimination, without pivoting.
//
// None is needed: every Schur complement of I+A is again I plus a positive semidefinite plus a skew matrix, so that no
// pivot is below 1 in size, and none is larger than 1 + ‖A‖ + ‖A‖² in norm.
// Each block owns some of the columns: `columns` has how many are `owned`, the `number` of each in the matrix, which may be
// beyond n, and its elements `at` each row. A step takes the column of the pivot as it was, which its owner shows to all
// (`show`, `shown`). `row` holds the pivot's row in shared memory, one number for each column that the block owns.
template <class Columns>
__device__ void gauss_jordan(const Group& group, const Columns& columns, double* row, int n) {
    int owned = columns.owned;
    for (int at = threadIdx.x; at < n * owned; at += THREADS)
        if (columns.number(at % owned) == 0) columns.show(0, at / owned, columns.at(at / owned, at % owned));
    group.wait();
    for (int pivot = 0; pivot < n; ++pivot) {
        const double* shown = columns.shown(pivot % 2);
        double inverse = 1.0 / shown[pivot];
        for (int own = threadIdx.x; own < owned; own += THREADS) {
            int j = columns.number(own);
            if (j < n) row[own] = j == pivot ? inverse : columns.at(pivot, own) * inverse;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < n * owned; at += THREADS) {
            int i = at / owned, own = at % owned, j = columns.number(own);
            if (j >= n) continue;
            double old = j == pivot ? 0.0 : columns.at(i, own);
            double now = i == pivot ? row[own] : old - shown[i] * row[own];
            columns.at(i, own) = now;
            if (j == pivot + 1) columns.show((pivot + 1) % 2, i, now);
        }
        group.wait();
    }
}
