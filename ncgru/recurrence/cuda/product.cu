// C = A B in float32 on the tensor cores, from operands that `split.cu` has split: A [M, K], B [K, N], C [M, N].
//
// Of x = high + low the products high*high, high*low and low*high are taken. The tensor cores cut off what they add to a
// sum, where a processor rounds. So they sum a chunk of 32 numbers along K only, the small products first, and these sums
// are added up outside of them, in registers. Where a line has a scale for each chunk, this is where it is taken back.
//
// A block makes one tile of C from a slice of K; where there are several slices, C is left in parts, and `product_sum`
// adds these up, always in the same order. Tiles of A and B come to shared memory STAGES stages, of a chunk each, ahead.
// Of four warps each makes a quarter of the tile, PASS columns at a time.
//
// Set by the compiler's options: A_ALONG_K and B_ALONG_K (1 where lines are rows in memory; not B's alone), TILE_N (64 or 128), STAGES,
// BLOCKS (of a multiprocessor).

#include "split.cuh"

static_assert(A_ALONG_K || !B_ALONG_K, "sums would be of numbers of A and of scaled ones of B, which is a wide range");

#define TILE_M 128
#define WARP_M (TILE_M / 2)
#define WARP_N (TILE_N / 2)
#define THREADS 128
#define PASS 32
#define DEPTH CHUNK  // of a stage, along K
#define GROUP 16
#define GROUPS (DEPTH / GROUP)
#define AHEAD (STAGES - 1)
#define PROBLEMS 6

__device__ __forceinline__ int clamp(index_t x, int most) {
    return x < 0 ? 0 : (x < most ? static_cast<int>(x) : most);
}

// An operand's tile in shared memory, as 16 bytes each: [LINES][2 parts][4] or [2 parts][32][LINES / 8], in either case
// with a row's pieces in another order for each of 8 rows, so that eight rows are read without meeting in a bank.
template <bool ALONG_K, int LINES>
struct Tile {
    static constexpr int SIZE = LINES * DEPTH * 4, ROW = ALONG_K ? DEPTH * 4 : LINES * 2;
};

// What a block reads of an operand: LINES lines, from some place of K on.
template <bool ALONG_K, int LINES>
struct Source {
    typedef Tile<ALONG_K, LINES> Room;
    static constexpr int ACROSS = Room::ROW / 16, APART = THREADS / ACROSS, COPIES = Room::SIZE / 16 / THREADS;
    static_assert(THREADS % ACROSS == 0 && APART % 8 == 0 && (ALONG_K || DEPTH % APART == 0 || APART % DEPTH == 0), "");
    const char* from;
    index_t pitch;  // of rows in memory, in bytes

    __device__ Source(const char* planes, index_t to_pitch, index_t line, index_t k) : pitch(2 * to_pitch) {
        const index_t row = threadIdx.x / ACROSS, piece = threadIdx.x % ACROSS * 16;
        if (ALONG_K) from = planes + (line + row) * pitch + k * 4 + piece;
        else from = planes + 2 * (k + row % DEPTH) * pitch + row / DEPTH * pitch + line * 2 + piece;
    }

    // Ask for the next stage.
    __device__ __forceinline__ void load(char* to) {
        const int row = threadIdx.x / ACROSS, piece = threadIdx.x % ACROSS;
        to += row * Room::ROW + (piece ^ row % 8) * 16;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int down = ALONG_K ? i * APART : 2 * (i * APART % DEPTH) + i * APART / DEPTH;
            copy_async<4>(reinterpret_cast<float*>(to + i * APART * Room::ROW),
                           reinterpret_cast<const float*>(from + down * pitch), true);
        }
        from += ALONG_K ? 4 * DEPTH : 2 * DEPTH * pitch;
    }
};

// Where a lane reads fragments of 16 lines and 16 numbers along K from a tile. The four matrices of a fragment are read in
// another order for B than for A.
template <bool ALONG_K, int LINES, bool IS_B>
struct Fragments {
    typedef Tile<ALONG_K, LINES> Room;
    int at;

    __device__ __forceinline__ explicit Fragments(int line) {
        const int lane = threadIdx.x % 32;
        const bool columns_first = ALONG_K == IS_B;
        const int row = columns_first ? lane % 8 + lane / 16 * 8 : lane % 16;
        const int piece = columns_first ? lane / 8 % 2 : lane / 16;
        if (ALONG_K) at = (line + row) * Room::ROW + (piece ^ lane % 8) * 16;
        else at = row * Room::ROW + ((line / 8 + piece) ^ lane % 8) * 16;
    }

    __device__ __forceinline__ void read(unsigned (&x)[4], const char* tile, int i, int group, int part) const {
        if (ALONG_K) load_matrices(x, tile + ((at + i * 16 * Room::ROW) ^ (part * 64 + group * 32)));
        else load_transposed(x, tile + ((at + (part * DEPTH + group * GROUP) * Room::ROW) ^ (i * 32)));
    }
};

// The scales of the lines of an operand's tile for one chunk; where a line has one for all of K, `write` takes it back.
template <bool ALONG_K, int LINES>
struct Scales {
    static constexpr int SIZE = ALONG_K ? 0 : LINES * 4;
    const float* from;
    index_t pitch;

    // The threads from `first_thread` on copy them.
    __device__ Scales(const char* scales, index_t to_pitch, index_t line, index_t chunk, int first_thread)
        : from(nullptr), pitch(to_pitch) {
        const int piece = static_cast<int>(threadIdx.x) - first_thread;
        if (!ALONG_K && piece >= 0 && piece < LINES / 4)
            from = reinterpret_cast<const float*>(scales) + chunk * pitch + line + piece * 4;
    }

    __device__ __forceinline__ void load(char* to) {
        if (!from) return;
        copy_async<4>(reinterpret_cast<float*>(to) + threadIdx.x % (LINES / 4) * 4, from, true);
        from += pitch;
    }
};

__device__ __forceinline__ float added(float to, float sum, float a_scale, float b_scale) {
    if (A_ALONG_K) return B_ALONG_K ? to + sum : fmaf(sum, b_scale, to);
    return fmaf(sum * b_scale, a_scale, to);
}

// A warp's part of a tile of C: [fragments of A][half fragments of B].
struct Sums {
    float of[WARP_M / 16][WARP_N / 8][4];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int i = 0; i < WARP_M / 16 * (WARP_N / 8) * 4; ++i) of[i / 4 / (WARP_N / 8)][i / 4 % (WARP_N / 8)][i % 4] = 0;
    }

    // A chunk along K, of PASS columns. Scales are those of this lane's first row and columns.
    template <class A, class B>
    __device__ __forceinline__ void add(
        const char* a_tile, const A& a_fragments, const char* b_tile, const B& b_fragments, const float* a_scales,
        const float* b_scales, int pass) {
        unsigned b[2][GROUPS][PASS / 16][4];
        float2 columns[PASS / 8];
#pragma unroll
        for (int j = 0; j < PASS / 16; ++j)
#pragma unroll
            for (int k = 0; k < 2 * GROUPS; ++k)
                b_fragments.read(b[k % 2][k / 2][j], b_tile, pass * (PASS / 16) + j, k / 2, k % 2);
#pragma unroll
        for (int j = 0; j < PASS / 8; ++j)
            columns[j] = B_ALONG_K ? make_float2(1, 1) : reinterpret_cast<const float2*>(b_scales)[(pass * PASS + 8 * j) / 2];
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i) {
            unsigned a[2][GROUPS][4];
#pragma unroll
            for (int k = 0; k < 2 * GROUPS; ++k) a_fragments.read(a[k % 2][k / 2], a_tile, i, k / 2, k % 2);
            const float first = A_ALONG_K ? 1.0f : a_scales[16 * i], second = A_ALONG_K ? 1.0f : a_scales[16 * i + 8];
            add_row(&of[i][pass * (PASS / 8)], a, b, first, second, columns);
        }
    }

    // The small products first; neighbours do not wait for each other.
    __device__ __forceinline__ static void add_row(
        float (*to)[4], const unsigned (&a)[2][GROUPS][4], const unsigned (&b)[2][GROUPS][PASS / 16][4], float first,
        float second, const float2 (&columns)[PASS / 8]) {
        float sum[PASS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < 3 * GROUPS; ++k) {
            const int step = k < 2 * GROUPS ? k / 2 : k - 2 * GROUPS;
            const int of_a = k < 2 * GROUPS && k % 2 == 0, of_b = k < 2 * GROUPS && k % 2 == 1;
#pragma unroll
            for (int j = 0; j < PASS / 8; ++j) {
                const unsigned half[2] = {b[of_b][step][j / 2][j % 2 * 2], b[of_b][step][j / 2][j % 2 * 2 + 1]};
                mma_float16(sum[j], a[of_a][step], half);
            }
        }
#pragma unroll
        for (int j = 0; j < PASS / 8; ++j) {
            to[j][0] = added(to[j][0], sum[j][0], first, columns[j].x);
            to[j][1] = added(to[j][1], sum[j][1], first, columns[j].y);
            to[j][2] = added(to[j][2], sum[j][2], second, columns[j].x);
            to[j][3] = added(to[j][3], sum[j][3], second, columns[j].y);
        }
    }
};

// Places in the room are in bytes. `a_pitch`, `b_pitch` and `c_pitch` are distances of rows, in numbers; `c_width` says
// how many numbers (1, 2 or 4) lie together in C at addresses that are multiples of as many. `first` is the first tile.
struct Problem {
    index_t a, a_scales, a_pitch, b, b_scales, b_pitch, rows, columns, c_pitch, c_width, parts, first;
};
struct Problems {
    Problem of[PROBLEMS];
    index_t stages, slice, more;  // stages along K in all, and of a slice; whether the products are added to C
};

template <class... Others>
__device__ __forceinline__ float* choose(int number, float* first, Others... others) {
    if constexpr (sizeof...(others) == 0) return first;
    else return number == 0 ? first : choose(number - 1, others...);
}

template <bool ALONG_K>
__device__ __forceinline__ float root_at(const char* room, index_t scales, index_t line) {
    return ALONG_K ? root_of(reinterpret_cast<const unsigned*>(room + scales)[line]) : 1.0f;
}

// Writes a warp's sums to C [rows, columns] from `row` and `column` on.
__device__ __forceinline__ void write(
    const Sums& sums, const char* room, const Problem& p, float* out, bool more, index_t row, index_t column) {
    row += threadIdx.x % 32 / 4, column += threadIdx.x % 4 * 2;
    float row_roots[WARP_M / 8];
#pragma unroll
    for (int i = 0; i < WARP_M / 8; ++i)
        row_roots[i] = row + 8 * i < p.rows ? root_at<A_ALONG_K>(room, p.a_scales, row + 8 * i) : 0.0f;
#pragma unroll
    for (int j = 0; j < WARP_N / 8; ++j) {
        const index_t n = column + 8 * j;
        const int left = clamp(p.columns - n, 2);
        if (left == 0) continue;
        float roots[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) roots[k] = k < left ? root_at<B_ALONG_K>(room, p.b_scales, n + k) : 0.0f;
#pragma unroll
        for (int i = 0; i < WARP_M / 8; ++i) {
            const index_t m = row + 8 * i;
            if (m >= p.rows) continue;
            float* to = out + m * p.c_pitch + n;
            float x[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                x[k] = scaled_back(sums.of[i / 2][j][i % 2 * 2 + k], row_roots[i] * roots[k]);
                if (more && k < left) x[k] += to[k];
            }
            if (left == 2 && p.c_width >= 2) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
            else {
                to[0] = x[0];
                if (left == 2) to[1] = x[1];
            }
        }
    }
}

// Leaves a warp's sums as they are, for `product_sum`.
__device__ __forceinline__ void leave(const Sums& sums, const Problem& p, float* parts, index_t row, index_t column) {
    const index_t pitch = (p.columns + 3) / 4 * 4;
    row += threadIdx.x % 32 / 4, column += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < WARP_M / 8; ++i) {
        const index_t m = row + 8 * i;
        if (m >= p.rows) continue;
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j) {
            const float* x = &sums.of[i / 2][j][i % 2 * 2];
            if (column + 8 * j < pitch)
                *reinterpret_cast<float2*>(parts + m * pitch + column + 8 * j) = make_float2(x[0], x[1]);
        }
    }
}

// Grid: (tiles of all problems, columns first; slices of K).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) product(
    char* room, float* first_out, float* second_out, float* third_out, float* fourth_out, float* fifth_out,
    float* sixth_out, Problems problems) {
    typedef Tile<A_ALONG_K, TILE_M> ATile;
    typedef Tile<B_ALONG_K, TILE_N> BTile;
    typedef Scales<A_ALONG_K, TILE_M> AScales;
    typedef Scales<B_ALONG_K, TILE_N> BScales;
    constexpr int B_AT = ATile::SIZE, A_SCALES_AT = B_AT + BTile::SIZE, B_SCALES_AT = A_SCALES_AT + AScales::SIZE;
    constexpr int SIZE = B_SCALES_AT + BScales::SIZE;
    char* shared = dynamic_shared();
    int number = 0;
#pragma unroll
    for (int i = 1; i < PROBLEMS; ++i) number += blockIdx.x >= problems.of[i].first;
    const Problem& p = problems.of[number];
    const unsigned across = static_cast<unsigned>((p.columns + TILE_N - 1) / TILE_N);
    const unsigned tile = blockIdx.x - static_cast<unsigned>(p.first);
    const index_t row = static_cast<index_t>(tile / across) * TILE_M, column = static_cast<index_t>(tile % across) * TILE_N;
    const index_t first = blockIdx.y * problems.slice;
    int left = static_cast<int>(min(problems.slice, problems.stages - first));  // stages that have not been asked for

    Source<A_ALONG_K, TILE_M> a_source(room + p.a, p.a_pitch, row, first * DEPTH);
    Source<B_ALONG_K, TILE_N> b_source(room + p.b, p.b_pitch, column, first * DEPTH);
    AScales a_scales(room + p.a_scales, p.a_pitch, row, first, 0);
    BScales b_scales(room + p.b_scales, p.b_pitch, column, first, THREADS / 2);
    auto request = [&](int stage) {
        if (left > 0) {
            char* to = shared + stage * SIZE;
            a_source.load(to);
            b_source.load(to + B_AT);
            a_scales.load(to + A_SCALES_AT);
            b_scales.load(to + B_SCALES_AT);
        }
        --left;
        commit_copies();
    };

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m = warp / 2 * WARP_M, n = warp % 2 * WARP_N;
    const Fragments<A_ALONG_K, TILE_M, false> a_fragments(m);
    const Fragments<B_ALONG_K, TILE_N, true> b_fragments(n);
#pragma unroll 1
    for (int stage = 0; stage < AHEAD; ++stage) request(stage);
    Sums sums;
    for (int stage = 0; left > -AHEAD; stage = stage == AHEAD ? 0 : stage + 1) {
        await_copies<AHEAD - 1>();
        __syncthreads();
        request(stage == 0 ? AHEAD : stage - 1);
        const char* tiles = shared + stage * SIZE;
        const float* of_a = reinterpret_cast<const float*>(tiles + A_SCALES_AT) + m + lane / 4;
        const float* of_b = reinterpret_cast<const float*>(tiles + B_SCALES_AT) + n + lane % 4 * 2;
#pragma unroll
        for (int pass = 0; pass < WARP_N / PASS; ++pass)
            sums.add(tiles, a_fragments, tiles + B_AT, b_fragments, of_a, of_b, pass);
    }
    if (gridDim.y == 1) {
        float* out = choose(number, first_out, second_out, third_out, fourth_out, fifth_out, sixth_out);
        write(sums, room, p, out, problems.more != 0, row + m, column + n);
        return;
    }
    const index_t part = p.rows * ((p.columns + 3) / 4 * 4);
    leave(sums, p, reinterpret_cast<float*>(room + p.parts) + blockIdx.y * part, row + m, column + n);
}

// Adds up the parts of C in their order. A thread has 4 neighbours of a row.
extern "C" __global__ void __launch_bounds__(256) product_sum(
    char* room, float* first_out, float* second_out, float* third_out, float* fourth_out, float* fifth_out,
    float* sixth_out, Problems problems, index_t slices) {
    index_t number = (static_cast<index_t>(blockIdx.x) * 256 + threadIdx.x) * 4;
#pragma unroll 1
    for (int i = 0; i < PROBLEMS; ++i) {
        const Problem& p = problems.of[i];
        const index_t pitch = (p.columns + 3) / 4 * 4, part = p.rows * pitch;
        if (number >= part) {
            number -= part;
            continue;
        }
        const index_t row = number / pitch, column = number - row * pitch;
        const float* from = reinterpret_cast<const float*>(room + p.parts) + number;
        float sum[4] = {};
#pragma unroll 8
        for (index_t slice = 0; slice < slices; ++slice) {
            const float4 x = *reinterpret_cast<const float4*>(from + slice * part);
            sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
        }
        const int left = clamp(p.columns - column, 4);
        const float root = root_at<A_ALONG_K>(room, p.a_scales, row);
        float* to = choose(i, first_out, second_out, third_out, fourth_out, fifth_out, sixth_out) + row * p.c_pitch + column;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k >= left) continue;
            sum[k] = scaled_back(sum[k], root * root_at<B_ALONG_K>(room, p.b_scales, column + k));
            if (problems.more) sum[k] += to[k];
        }
        if (left == 4 && p.c_width == 4) *reinterpret_cast<float4*>(to) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        else {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (k < left) to[k] = sum[k];
        }
        return;
    }
}
