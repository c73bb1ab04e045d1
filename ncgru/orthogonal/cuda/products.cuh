// Products of matrices in float32, summed in float64 by the tensor cores.
//
// A block takes a tile of HIGH by WIDE elements. Each of its warps has 32 by 32 of them and, as there are more warps than
// that needs, a slice of the inner rows: of every 8 * SLICES of them 8. What the slices have summed comes together at the
// end.
//
// Operands are float32 in shared memory too, where they are copied without passing through registers, DEPTH inner rows at
// a time, two such stages ahead; a warp widens them as it takes them to the tensor cores. This halves what the L2 cache and
// shared memory have to deliver, and leaves the registers to the sums.
//
// Set by the including file: HIGH and WIDE, multiples of 32, of together at most WARPS times 32 by 32 elements.
#pragma once

#include "matrices.cuh"

#define PARTS (HIGH / 32 * (WIDE / 32))  // of 32 by 32 elements
#define SLICES (WARPS / PARTS)
#define KEEPING (SLICES / 2)  // slices that take the sums of another each before all come together
#define DEPTH (SLICES < 4 ? 32 : 8 * SLICES)
#define STAGES 3
#define OWN (HIGH * WIDE / THREADS)  // elements that a thread has in the end

// A matrix for each of a batch; without a first there are none.
struct Batch {
    float* first;
    index_t apart;
    __device__ __forceinline__ float* of(int number) const { return first + number * apart; }
};

// How an operand lies in global and in shared memory. Its lines are rows of the left one or columns of the right one. Four
// neighbours are copied at a time, by neighbouring lanes, and no lanes read the same bank at once.
//
// `mma_float64` takes lines in blocks of eight, one of each for every group of four lanes, and of eight inner rows two for
// every lane of a group. Which these are is free as long as both operands agree on the inner rows: two neighbours.

// A line's elements are neighbours.
template <int LINES>
struct Along {
    static constexpr int PITCH = DEPTH + 8, SIZE = LINES * PITCH, FOURS = DEPTH / 4;
    static constexpr int COUNT = LINES * FOURS / THREADS, LINE_STEP = THREADS / FOURS, INNER_STEP = 0, SUMS_PITCH = 36;
    static constexpr bool LINES_NEIGHBOUR = false;
    static constexpr __device__ __forceinline__ int place(int line, int inner) { return line * PITCH + inner; }
    static __device__ __forceinline__ index_t index(int n, int line, int inner) { return static_cast<index_t>(line) * n + inner; }
    static __device__ __forceinline__ index_t stage(int) { return DEPTH; }
    static __device__ __forceinline__ int line() { return threadIdx.x / FOURS; }
    static __device__ __forceinline__ int inner() { return threadIdx.x % FOURS * 4; }

    // Which of a warp's 32 lines is the one of block `block` that group `group` has, and back.
    static constexpr __device__ __forceinline__ int line_of(int block, int group) { return block * 8 + group; }
    static constexpr __device__ __forceinline__ int block_of(int line) { return line / 8; }
    static constexpr __device__ __forceinline__ int group_of(int line) { return line % 8; }
    // The lane's two inner rows of its line in each block, from that of block 0.
    static __device__ __forceinline__ void read(float (&x)[4][2], const float* from) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
            float2 pair = *reinterpret_cast<const float2*>(from + place(block * 8, 0));
            x[block][0] = pair.x;
            x[block][1] = pair.y;
        }
    }
};

// An inner row's elements are neighbours.
template <int LINES>
struct Across {
    static constexpr int PITCH = LINES + 4, SIZE = DEPTH * PITCH, FOURS = LINES / 4;
    static constexpr int COUNT = DEPTH * FOURS / THREADS, LINE_STEP = 0, INNER_STEP = THREADS / FOURS, SUMS_PITCH = 34;
    static constexpr bool LINES_NEIGHBOUR = true;
    static constexpr __device__ __forceinline__ int place(int line, int inner) { return inner * PITCH + line; }
    static __device__ __forceinline__ index_t index(int n, int line, int inner) { return static_cast<index_t>(inner) * n + line; }
    static __device__ __forceinline__ index_t stage(int n) { return static_cast<index_t>(DEPTH) * n; }
    static __device__ __forceinline__ int line() { return threadIdx.x % FOURS * 4; }
    static __device__ __forceinline__ int inner() { return threadIdx.x / FOURS; }

    static constexpr __device__ __forceinline__ int line_of(int block, int group) { return group * 4 + block; }
    static constexpr __device__ __forceinline__ int block_of(int line) { return line % 4; }
    static constexpr __device__ __forceinline__ int group_of(int line) { return line / 4; }
    static __device__ __forceinline__ void read(float (&x)[4][2], const float* from) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            float4 four = *reinterpret_cast<const float4*>(from + place(0, k));
            x[0][k] = four.x;
            x[1][k] = four.y;
            x[2][k] = four.z;
            x[3][k] = four.w;
        }
    }
};

// What a thread copies of an operand, DEPTH inner rows after the others.
template <class Layout>
struct Incoming {
    const float* from;
    int lines, inners;  // that are left of the matrix from this thread's first on

    __device__ __forceinline__ Incoming(const float* matrix, int n, int first_line)
        : from(matrix + Layout::index(n, first_line + Layout::line(), Layout::inner())),
          lines(n - first_line - Layout::line()), inners(n - Layout::inner()) {}

    // WIDTH numbers at a time, where that many lie together; zeros beyond the matrix.
    template <int WIDTH>
    __device__ __forceinline__ void copy(float* stage, int n) const {
        float* to = stage + Layout::place(Layout::line(), Layout::inner());
#pragma unroll
        for (int m = 0; m < Layout::COUNT; ++m)
#pragma unroll
            for (int i = 0; i < 4; i += WIDTH) {
                int line = m * Layout::LINE_STEP + (Layout::LINES_NEIGHBOUR ? i : 0);
                int inner = m * Layout::INNER_STEP + (Layout::LINES_NEIGHBOUR ? 0 : i);
                bool inside = line < lines && inner < inners;
                copy_async<WIDTH>(to + Layout::place(line, inner), from + Layout::index(n, line, inner), inside);
            }
    }
    __device__ __forceinline__ void advance(int n) {
        from += Layout::stage(n);
        inners -= DEPTH;
    }
};

// How many numbers of a matrix with n columns, up to four, can be copied at a time wherever these start.
__device__ __forceinline__ int copied_at_a_time(const float* left, const float* right, int n) {
    index_t places = reinterpret_cast<index_t>(left) | reinterpret_cast<index_t>(right) | static_cast<index_t>(n) * 4;
    return places % 16 == 0 ? 4 : places % 8 == 0 ? 2 : 1;
}

// This thread's part of the tile's sums over its slice of the inner rows: [rows by 16][columns by 8][as `mma_float64`].
typedef double Sums[2][4][4];

template <class Left, class Right>
__device__ __forceinline__ void sum_tile(Sums& sums, const float* left, const float* right, int n, int top, int side) {
    float* stages = reinterpret_cast<float*>(dynamic_shared());
    constexpr int STAGE = Left::SIZE + Right::SIZE;
    int part = threadIdx.x / 32 % PARTS, inner = threadIdx.x / 32 / PARTS * 8 + threadIdx.x % 4 * 2, group = threadIdx.x % 32 / 4;
    int rows = Left::place(part / (WIDE / 32) * 32 + Left::line_of(0, group), inner);
    int columns = Left::SIZE + Right::place(part % (WIDE / 32) * 32 + Right::line_of(0, group), inner);
    int width = copied_at_a_time(left, right, n);
    Incoming<Left> some(left, n, top);
    Incoming<Right> others(right, n, side);
    const auto fetch = [&](float* stage, int first) {
        if (first < n) {
            if (width == 4) {
                some.template copy<4>(stage, n);
                others.template copy<4>(stage + Left::SIZE, n);
            } else if (width == 2) {
                some.template copy<2>(stage, n);
                others.template copy<2>(stage + Left::SIZE, n);
            } else {
                some.template copy<1>(stage, n);
                others.template copy<1>(stage + Left::SIZE, n);
            }
            some.advance(n);
            others.advance(n);
        }
        commit_copies();
    };
    __syncthreads();  // all are through with what was in shared memory
    const auto after = [=](float* stage) { return stage == stages + (STAGES - 1) * STAGE ? stages : stage + STAGE; };
    float *now = stages, *free = stages;
#pragma unroll 1
    for (; free != stages + (STAGES - 1) * STAGE; free += STAGE) fetch(free, (free - stages) / STAGE * DEPTH);
#pragma unroll 1
    for (int first = 0; first < n; first += DEPTH) {
        await_copies<STAGES - 2>();
        __syncthreads();  // the copies of all are there, and all are through with the stage before
        fetch(free, first + (STAGES - 1) * DEPTH);
#pragma unroll
        for (int step = 0; step < DEPTH; step += 8 * SLICES) {
            float a[4][2], b[4][2];
            Right::read(b, now + columns + Right::place(0, step));
            Left::read(a, now + rows + Left::place(0, step));
            double wide[4][2];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                wide[j][0] = widen(b[j][0]);
                wide[j][1] = widen(b[j][1]);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                double high[4] = {widen(a[2 * i][0]), widen(a[2 * i + 1][0]), widen(a[2 * i][1]), widen(a[2 * i + 1][1])};
#pragma unroll
                for (int j = 0; j < 4; ++j) mma_float64(sums[i][j], high, wide[j]);
            }
        }
        free = now;
        now = after(now);
    }
}

// finish.out[row, column] = finish.value(row, column, finish.load(row, column), sum of all slices) for the elements of the
// tile that are in the matrix.
template <class Left, class Right, class Finish>
__device__ __forceinline__ void hand_out(const Sums& sums, int n, int top, int side, const Finish& finish) {
    constexpr int PITCH = Right::SUMS_PITCH;  // for which neighbours in a row are in different banks
    double* room = reinterpret_cast<double*>(dynamic_shared());
    int slice = threadIdx.x / 32 / PARTS, warp = threadIdx.x / 32 % (KEEPING * PARTS);
    double* mine = room + warp * 32 * PITCH + threadIdx.x % 32;
    float x[OWN];
    int first_row = threadIdx.x / WIDE % (THREADS / WIDE), column = threadIdx.x % WIDE, j = side + column;
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int i = top + first_row + m * (THREADS / WIDE);
        x[m] = i < n && j < n ? finish.load(i, j) : 0.0f;
    }
#pragma unroll
    for (int keeps = 0; keeps < 2; ++keeps) {
        __syncthreads();
        if (keeps == (slice < KEEPING)) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                double sum = sums[i / 16][i % 8 / 2][i / 8 % 2 * 2 + i % 2];
                mine[i * PITCH] = keeps ? mine[i * PITCH] + sum : sum;
            }
        }
    }
    __syncthreads();
    int block = Right::block_of(column % 32), group = Right::group_of(column % 32);
    const double* from = room + (column / 32 * 32 + block * 2 + group % 2) * PITCH + group / 2;
#pragma unroll
    for (int m = 0; m < OWN; ++m) {
        int row = first_row + m * (THREADS / WIDE);
        int at = (row / 32 * (WIDE / 32) * 32 + Left::block_of(row % 32) * 8) * PITCH + Left::group_of(row % 32) * 4;
        double sum = 0.0;
#pragma unroll
        for (int s = 0; s < KEEPING; ++s) sum += from[at + s * PARTS * 32 * PITCH];
        x[m] = finish.value(top + row, j, x[m], sum);
    }
    float* to = finish.out + static_cast<index_t>(top + first_row) * n + j;
#pragma unroll
    for (int m = 0; m < OWN; ++m)
        if (top + first_row + m * (THREADS / WIDE) < n && j < n) to[static_cast<index_t>(m * (THREADS / WIDE)) * n] = x[m];
}

// Products of some of a batch of matrices with n rows: from `begin` to `end`. In shared memory: the sums leave no registers
// for what is needed again only at the end of a tile, and a word on the stack is read from the L2 cache, as shared memory
// leaves no room for another.
struct Task {
    Group group;
    int n, begin, end;
    Batch left, right, start, out;
};

// The sums over k of left[row, k] right[k, column], shared out between the blocks; Finish(task, number) is what `hand_out`
// does with those of a matrix. `Left` and `Right` say how the rows of the left operand and the columns of the right one lie
// in memory.
template <template <int> class Left, template <int> class Right, class Finish, class Its>
__device__ OUT_OF_LINE void multiply(const Its& task) {
    int n = task.n, across = (n + WIDE - 1) / WIDE, tiles = (n + HIGH - 1) / HIGH * across;
#pragma unroll 1
    for (int unit = task.begin * tiles + task.group.rank; unit < task.end * tiles; unit += task.group.size) {
        int number = unit / tiles, top = unit % tiles / across * HIGH, side = unit % tiles % across * WIDE;
        Sums sums = {};
        sum_tile<Left<HIGH>, Right<WIDE>>(sums, task.left.of(number), task.right.of(number), n, top, side);
        hand_out<Left<HIGH>, Right<WIDE>>(sums, n, top, side, Finish(task, number));
    }
}
