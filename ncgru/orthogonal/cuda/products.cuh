// Products of matrices in float32, summed in float64 by the tensor cores.
//
// A block takes a tile of HIGH by WIDE elements. Each of its warps has 32 by 32 of them and, as there are more warps than
// that needs, a slice of the inner rows: of every DEPTH inner rows in shared memory 8. What the slices have summed comes
// together at the end.
//
// Operands stay in float32 wherever they lie, which halves what the L2 cache has to deliver, and become float64 on their
// way into shared memory. While the tensor cores work on some inner rows, the next are put beside them, and the ones after
// these are on their way.
//
// Set by the including file: HIGH and WIDE, multiples of 32, of together at most WARPS times 32 by 32 elements.
#pragma once

#include "matrices.cuh"

#define PARTS (HIGH / 32 * (WIDE / 32))  // of 32 by 32 elements
#define SLICES (WARPS / PARTS)
#define KEEPING (SLICES / 2)  // slices that take the sums of another each before all come together
#define DEPTH (8 * SLICES)
#define SUMS_PITCH 36
#define OWN (HIGH * WIDE / THREADS)  // elements that a thread has in the end

struct __align__(16) Pair {
    double x, y;
};

// A matrix for each of a batch; without a first there are none.
struct Batch {
    float* first;
    index_t apart;
    __device__ __forceinline__ float* of(int number) const { return first + number * apart; }
};

// How an operand lies in shared memory: its lines are rows of the left one or columns of the right one. A lane reads two
// numbers at a time as `mma_float64` takes them beside each other, and no two lanes the same bank.

// Two neighbouring rows, inner row by inner row.
struct Rows {
    static constexpr int LINES = HIGH, PITCH = 2 * (DEPTH + 1), SIZE = HIGH / 2 * PITCH;
    static constexpr int TOGETHER = 2, PATCH = 16;  // lines that neighbouring lanes write along and across, to different banks
    static constexpr __device__ __forceinline__ int place(int line, int inner) { return line / 2 * PITCH + inner * 2 + line % 2; }
};

// A column after the other.
struct Columns {
    static constexpr int LINES = WIDE, PITCH = DEPTH + 2, SIZE = WIDE * PITCH;
    static constexpr int TOGETHER = 1, PATCH = 8;
    static constexpr __device__ __forceinline__ int place(int line, int inner) { return line * PITCH + inner; }
};

#define STAGE (Rows::SIZE + Columns::SIZE)

// How the lines of an operand lie in global memory, and which of their elements a thread fetches: some, LINE_STEP lines
// and INNER_STEP inner rows from each other.

// A line's elements are neighbours.
template <class Stage>
struct Along {
    static constexpr int LINE_STEP = THREADS / DEPTH, INNER_STEP = 0;
    static __device__ __forceinline__ int line() {
        return threadIdx.x / (DEPTH * Stage::TOGETHER) * Stage::TOGETHER + threadIdx.x % Stage::TOGETHER;
    }
    static __device__ __forceinline__ int inner() { return threadIdx.x / Stage::TOGETHER % DEPTH; }
    static __device__ __forceinline__ index_t place(int n, int line, int inner) { return static_cast<index_t>(line) * n + inner; }
    // From the last of the elements to the first beyond all that are fetched with it.
    static __device__ __forceinline__ index_t next(int n, int count) { return DEPTH - static_cast<index_t>(count * LINE_STEP) * n; }
};

// An inner row's elements are neighbours. A warp takes PATCH of them from some inner rows: whole sectors.
template <class Stage>
struct Across {
    static constexpr int LINE_STEP = 0, INNER_STEP = THREADS / Stage::LINES, PATCHES = Stage::LINES / Stage::PATCH;
    static __device__ __forceinline__ int line() { return threadIdx.x / 32 % PATCHES * Stage::PATCH + threadIdx.x % Stage::PATCH; }
    static __device__ __forceinline__ int inner() {
        return threadIdx.x / 32 / PATCHES * (32 / Stage::PATCH) + threadIdx.x % 32 / Stage::PATCH;
    }
    static __device__ __forceinline__ index_t place(int n, int line, int inner) { return static_cast<index_t>(inner) * n + line; }
    static __device__ __forceinline__ index_t next(int, int) { return 0; }
};

// What a thread fetches of an operand, DEPTH inner rows after the others.
template <class Stage, class Layout>
struct Fetched {
    static constexpr int COUNT = Stage::LINES * DEPTH / THREADS;
    const float* from;
    int lines, inners;  // that are left of the matrix from this thread's first on
    float x[COUNT];

    __device__ __forceinline__ Fetched(const float* matrix, int n, int first_line)
        : from(matrix + Layout::place(n, first_line + Layout::line(), Layout::inner())),
          lines(n - first_line - Layout::line()), inners(n - Layout::inner()) {}

    __device__ __forceinline__ void fetch(int n) {
#pragma unroll
        for (int m = 0; m < COUNT; ++m) {
            bool inside = lines > m * Layout::LINE_STEP && inners > m * Layout::INNER_STEP;
            x[m] = inside ? *from : 0.0f;
            from += static_cast<index_t>(Layout::LINE_STEP + Layout::INNER_STEP) * n;
        }
        from += Layout::next(n, COUNT);
        inners -= DEPTH;
    }
    __device__ __forceinline__ void put(double* stage) const {
        stage += Stage::place(Layout::line(), Layout::inner());
#pragma unroll
        for (int m = 0; m < COUNT; ++m) stage[Stage::place(m * Layout::LINE_STEP, m * Layout::INNER_STEP)] = x[m];
    }
};

__device__ __forceinline__ Pair pair_at(const double* from) { return *reinterpret_cast<const Pair*>(from); }

// The column, of eight, that the lanes of `group` have: so that neighbouring groups read different banks.
__device__ __forceinline__ int column_of(int group) { return group / 2 + group % 2 * 4; }

// This thread's part of the tile's sums over its slice of the inner rows: [rows by 16][columns by 8][as `mma_float64`].
typedef double Sums[2][4][4];

template <template <class> class Left, template <class> class Right>
__device__ __forceinline__ void sum_tile(Sums& sums, const float* left, const float* right, int n, int top, int side) {
    double* stage = reinterpret_cast<double*>(dynamic_shared());
    int part = threadIdx.x / 32 % PARTS, inner = threadIdx.x / 32 / PARTS * 8 + threadIdx.x % 4 * 2, group = threadIdx.x % 32 / 4;
    int rows = Rows::place(part / (WIDE / 32) * 32 + 2 * group, inner);
    int columns = Rows::SIZE + Columns::place(part % (WIDE / 32) * 32 + column_of(group), inner);
    Fetched<Rows, Left<Rows>> some(left, n, top);
    Fetched<Columns, Right<Columns>> others(right, n, side);
    some.fetch(n);
    others.fetch(n);
    __syncthreads();  // all are through with what was in shared memory
    some.put(stage);
    others.put(stage + Rows::SIZE);
    some.fetch(n);
    others.fetch(n);
    __syncthreads();
    double *now = stage, *next = stage + STAGE;
#pragma unroll 1
    for (int first = 0; first < n; first += DEPTH) {
        double b[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            Pair pair = pair_at(now + columns + Columns::place(j * 8, 0));
            b[j][0] = pair.x;
            b[j][1] = pair.y;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Pair even = pair_at(now + rows + Rows::place(i * 16, 0)), odd = pair_at(now + rows + Rows::place(i * 16, 1));
            double a[4] = {even.x, even.y, odd.x, odd.y};
#pragma unroll
            for (int j = 0; j < 4; ++j) mma_float64(sums[i][j], a, b[j]);
            if (i == 0) {  // while the tensor cores are busy
                some.put(next);
                others.put(next + Rows::SIZE);
                some.fetch(n);
                others.fetch(n);
            }
        }
        __syncthreads();
        double* swapped = now;
        now = next;
        next = swapped;
    }
}

// use(row, column, load(row, column), sum of all slices) for the elements of the tile that are in the matrix.
template <class Load, class Use>
__device__ __forceinline__ void hand_out(const Sums& sums, int n, int top, int side, const Load& load, const Use& use) {
    double* room = reinterpret_cast<double*>(dynamic_shared());
    int slice = threadIdx.x / 32 / PARTS, warp = threadIdx.x / 32 % (KEEPING * PARTS);
    double* mine = room + warp * 32 * SUMS_PITCH + threadIdx.x % 32;
#pragma unroll
    for (int keeps = 0; keeps < 2; ++keeps) {
        if (keeps == (slice < KEEPING)) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                double sum = sums[i / 16][i % 8 / 2][i / 8 % 2 * 2 + i % 2];
                mine[i * SUMS_PITCH] = keeps ? mine[i * SUMS_PITCH] + sum : sum;
            }
        }
        if (keeps == 0) __syncthreads();
    }
    float loaded[OWN];
    int first_row = threadIdx.x / WIDE, column = threadIdx.x % WIDE;
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int i = top + first_row + m * (THREADS / WIDE), j = side + column;
        loaded[m] = i < n && j < n ? load(i, j) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int row = first_row + m * (THREADS / WIDE), i = top + row, j = side + column;
        if (i >= n || j >= n) continue;
        int part = row / 32 * (WIDE / 32) + column / 32, lane = row % 16 / 2 * 4 + column % 4;
        int number = (row % 32 / 16 * 2 + row % 2) * 8 + column % 32 / 4;
        const double* from = room + (part * 32 + number) * SUMS_PITCH + lane;
        double sum = 0.0;
#pragma unroll
        for (int s = 0; s < KEEPING; ++s) sum += from[s * PARTS * 32 * SUMS_PITCH];
        use(i, j, loaded[m], sum);
    }
}

// use(number, row, column, load(number, row, column), sum over k of left[row, k] right[k, column]) for the elements of the
// matrices from `begin` to `end`, shared out between the blocks. `Left` and `Right` say how the rows of the left operand
// and the columns of the right one lie in memory.
template <template <class> class Left, template <class> class Right, class Load, class Use>
__device__ __forceinline__ void multiply(
    const Group& group, int n, int begin, int end, const Batch& left, const Batch& right, const Load& load, const Use& use) {
    int across = (n + WIDE - 1) / WIDE, tiles = (n + HIGH - 1) / HIGH * across;
#pragma unroll 1
    for (int unit = begin * tiles + group.rank; unit < end * tiles; unit += group.size) {
        int number = unit / tiles, top = unit % tiles / across * HIGH, side = unit % tiles % across * WIDE;
        Sums sums = {};
        sum_tile<Left, Right>(sums, left.of(number), right.of(number), n, top, side);
        hand_out(
            sums, n, top, side, [&](int i, int j) { return load(number, i, j); },
            [&](int i, int j, auto loaded, double sum) { use(number, i, j, loaded, sum); });
    }
}
