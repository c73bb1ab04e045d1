// The recurrence where many blocks hold the matrices together: forward and backward.
//
// A block owns W *slices* of 16 hidden units, in all gates, for the whole sequence; the blocks of a *group* (one
// direction, up to `tiles` tiles of 8 rows of the batch) own all units between them. Each phase of a step is a product:
// every block needs a whole vector (the state, r*h, or gradients) of which it has made only its own slices. So blocks
// write what they have made into an exchange in global memory, which stays in the L2 cache, and read the rest from
// there. They do so for R tiles at a time, a *stack*: a weight that is read (and split) once serves all of these, and
// whatever must be waited for is waited for once.
//
// A block has two kinds of warps:
//
//   product warps  wait for the vector, multiply it on the tensor cores (WARPS of them share the columns), and leave
//                  partial sums in shared memory;
//   cell warps     add these up, compute the cell, publish the next vector, and write the results. An item of a
//                  thread is one hidden unit (two in 16 bits) of one row of the stack.
//
// While cell warps work on one stack, product warps multiply the next.
//
// **Nobody waits at a barrier across blocks.** A word of the exchange that is not there yet holds EMPTY, bits that no
// published word has; a reader reads until it finds something else. The vector read in phase f lies in slot f mod 4.
// Having published for phase f+1, a cell thread empties its own words of slot f+3, the same as f-1. For every word X,
// with its writer and a reader of it (which are the same two threads in every phase):
//
//   - No word is emptied before it is read. The writer acts after all of the vector of phase f has come, and each block
//     published its part of that after it had used all of the vector of phase f-1 (of this stack).
//   - No old word is read for a new one. The writer empties X in phase f, passes a fence, and publishes another word Y
//     in phase f+1; the reader reads Y in phase f+2, passes a fence, and only then looks at X, in phase f+3. So it
//     sees X empty, or what the writer wrote after that.
//
// All blocks of a group must run at once; a cooperative launch sees to that.
//
// Products. Words are 32 bits: one float32, or two neighbouring units in 16 bits. For the tensor cores, columns are
// taken in *pairs* of tiles of 8 words. Lane 4*g + c of a warp reads the words 4c to 4c+3 of a pair for row g of the
// batch at once; as the weights are laid out likewise ("fragments", see `large_prepare`), the order does not matter.
// float32 is split as x = high + low in two tf32, and the product taken as high*high + high*low + low*high, which is as
// good as float32; TF32=1 keeps only the first.
//
// There are some kernels for each pass: the narrow one has the fewest slices a block that the GPU can do with, and takes
// each tile alone; the wide ones may have more slices, so that there are more groups with fewer tiles each and a word
// that is read serves more products, and take up to STACK tiles at a time. Which is fastest depends on the batch.
//
// Set by the compiler's options: HIDDEN, NARROW and WIDE (slices a block), STACK, STORAGE, TF32, RESET, PHI, HELD_R,
// HELD_U, HELD_C, KEPT.
//
// Shapes: as in small.cu.

#include "numbers.cuh"

// Where a block holds the fragments of a gate's matrix.
#define REGISTERS 0
#define SHARED 1
#define GLOBAL 2

#define PACK (STORAGE == FLOAT32 ? 1 : 2)
#define SPLIT (STORAGE == FLOAT32 && !TF32)
#define SLICES ((HIDDEN + 15) / 16)
#define PAIRS ((SLICES + PACK - 1) / PACK)
#define WARPS (PAIRS < 8 ? PAIRS : 8)  // each has a pair to wait for, so that none runs ahead
#define SHARE ((PAIRS + WARPS - 1) / WARPS)  // pairs a warp

#define EMPTY 0xffffffffu
#define SLOTS 4
#define PARTIAL_ROW 20  // 16 units, and room that keeps the lanes of a warp on different banks
#define PARTIAL (8 * PARTIAL_ROW)
#define FULL 1  // named barriers: partial sums are there (2 of them), have been read (2 of them)
#define FREE 3
#define LOADED 5  // the product warps have the matrices
#define KNOWN 6   // the cell warps have the biases

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int max_of(int a, int b) { return a < b ? b : a; }

__host__ __device__ constexpr int held(int gate) {
    return GATES == 1 || gate == 2 ? HELD_C : (gate == 1 ? HELD_U : HELD_R);
}

__host__ __device__ constexpr int count_held(int where, int gates) {
    int count = 0;
    for (int gate = 0; gate < gates; ++gate) count += held(gate) == where;
    return count;
}

// Of a matrix in registers a warp keeps the first KEPT pairs of its share there; the rest is in shared memory.
#define IN_REGISTERS count_held(REGISTERS, GATES)

__host__ __device__ constexpr int first_shared(int gate) {
    return held(gate) == REGISTERS ? min_of(KEPT * WARPS, PAIRS) : 0;
}

__host__ __device__ constexpr int shared_pairs(int gate) {
    return held(gate) == GLOBAL ? 0 : PAIRS - first_shared(gate);
}

__host__ __device__ constexpr int shared_before(int gate) {
    return gate == 0 ? 0 : shared_before(gate - 1) + shared_pairs(gate - 1);
}

#define SHARED_PAIRS shared_before(GATES)

// A stack of some tiles is read a few pairs at a time, and asked for so many reads ahead.
__host__ __device__ constexpr int chunk_of(int tiles) {
    return min_of(SHARE, max_of(1, (IN_REGISTERS ? 2 : 4) / tiles));
}

__host__ __device__ constexpr int chunks_of(int tiles) { return (SHARE + chunk_of(tiles) - 1) / chunk_of(tiles); }

#define AHEAD (PACK == 2 ? 3 : 2)

// Rooms for the partial sums of a stack. Cell threads give one back as soon as they have read it, so all that a second
// one saves is a barrier, where there is a single stack.
__host__ __device__ constexpr int rooms_of(int tiles) { return tiles == 1 ? 2 : 1; }

#define ADDED(W) ((GATES + 1) * (W) * 16)

// A *square* is one slice of one tile. A cell thread has the same place in several squares: PACK neighbouring units of
// one row.
#define PLACES (128 / PACK)  // of a square
__host__ __device__ constexpr int cell_threads(int squares) { return min_of(128, squares * PLACES); }
__host__ __device__ constexpr int at_once(int squares) { return cell_threads(squares) / PLACES; }
__host__ __device__ constexpr int items_of(int squares) { return (squares + at_once(squares) - 1) / at_once(squares); }
__host__ __device__ constexpr int threads_of(int squares) { return 32 * WARPS + cell_threads(squares); }

// What a launch is about: of D `directions` the `first_direction` and as many after it as the grid is deep, and of the
// batch the tiles from `first` on, at most `tiles` a group.
struct Task {
    index_t steps, batch, directions, reverse;
    int first_direction, first, tiles;
};

// This block's part of the task.
struct Part {
    int direction, slice, tile, tiles;  // the first slice; first and number of tiles
    int stacks;                         // of R tiles, the last of which may have fewer
    int end;                            // the first row that is not the group's
    index_t group;
    bool backwards;

    __device__ Part(const Task& task, int slices, int tiles_of_stack) {
        direction = task.first_direction + blockIdx.z;
        slice = blockIdx.x * slices;
        int all = static_cast<int>((task.batch + 7) / 8);
        tile = task.first + blockIdx.y * task.tiles;
        tiles = min(task.tiles, all - tile);
        stacks = (tiles + tiles_of_stack - 1) / tiles_of_stack;
        end = static_cast<int>(min(task.batch, static_cast<index_t>(tile + tiles) * 8));
        group = static_cast<index_t>(blockIdx.z) * gridDim.y + blockIdx.y;
        backwards = task.directions == 2 ? direction == 1 : task.reverse != 0;
    }

    __device__ index_t time(index_t step, index_t steps) const { return backwards ? steps - 1 - step : step; }
};

// The words of all vectors of this group: [SLOTS, VECTORS, tiles, PAIRS, 32 lanes, 4].
template <int VECTORS>
struct Exchange {
    unsigned* words;
    int tiles;

    __device__ Exchange(unsigned* all, const Part& part, int most_tiles) : tiles(most_tiles) {
        words = all + part.group * SLOTS * VECTORS * tiles * PAIRS * 128;
    }

    __device__ unsigned* at(index_t phase, int vector, int tile) const {
        return words + ((static_cast<int>(phase & (SLOTS - 1)) * VECTORS + vector) * tiles + tile) * (PAIRS * 128);
    }
};

// ------------------------------------------------------------------------------------------------------------ items

// An item of a cell thread at one step of one stack: PACK neighbouring units of one row.
struct Cell {
    int square;  // of the stack
    int place;   // of the first unit in the partial sums of the square
    int word;    // in the stack of a vector
    bool there;  // the slice and the tile exist
    int unit;    // the first
    int row;
    bool over;     // the row has ended before this step
    index_t line;  // of [T, B, D]

    template <int W, int R>
    __device__ static __forceinline__ Cell make(
        const Part& part, const Task& task, const index_t* lengths, int stack, int item, index_t t) {
        constexpr int squares = W * R, together = at_once(squares);
        const int thread = threadIdx.x - 32 * WARPS;
        const int row_of_tile = thread % PLACES / (16 / PACK), unit_of_slice = thread % (16 / PACK) * PACK;
        Cell at;
        at.square = together == 1 ? item : item * together + thread / PLACES;
        at.there = squares % together == 0 || at.square < squares;
        if (!at.there) at.square = 0;
        int tile_of_stack = at.square / W, slice = part.slice + at.square % W, tile = stack * R + tile_of_stack;
        at.there = at.there && slice < SLICES && tile < part.tiles;
        at.place = row_of_tile * PARTIAL_ROW + unit_of_slice;
        at.word = (tile_of_stack * PAIRS + slice / PACK) * 128 + row_of_tile * 16 + slice % PACK * 8;
        at.word += unit_of_slice / PACK;
        at.unit = slice * 16 + unit_of_slice;
        at.row = at.there ? (part.tile + tile) * 8 + row_of_tile : part.end;
        at.over = at.row >= part.end || t >= (lengths ? lengths[at.row] : task.steps);
        at.line = t * task.batch * task.directions + part.direction + at.row * task.directions;
        return at;
    }

    __device__ __forceinline__ bool real(int k, const Part& part) const {
        return row < part.end && (HIDDEN % PACK == 0 ? unit : unit + k) < HIDDEN;
    }

    __device__ __forceinline__ index_t state() const { return line * HIDDEN + unit; }
    __device__ __forceinline__ index_t gate(int i) const { return line * (GATES * HIDDEN) + i * HIDDEN + unit; }
    __device__ __forceinline__ index_t start(const Part& part, const Task& task) const {
        return (part.direction * task.batch + row) * HIDDEN + unit;
    }
};

// All items of a cell thread, worked out before it waits.
template <int W, int R>
struct Cells {
    Cell of[items_of(W * R)];

    __device__ __forceinline__ Cells(const Part& part, const Task& task, const index_t* lengths, int stack, index_t t) {
#pragma unroll
        for (int item = 0; item < items_of(W * R); ++item)
            of[item] = Cell::make<W, R>(part, task, lengths, stack, item, t);
    }
};

// ---------------------------------------------------------------------------------------------------- product warps

__device__ __forceinline__ int share_pair(int i) { return i * WARPS + static_cast<int>(threadIdx.x) / 32; }

// Whether this warp's share has that many pairs; known to the compiler for all but the last one.
__device__ __forceinline__ bool in_share(int i) {
    return i + 1 < SHARE || (i < SHARE && (PAIRS % WARPS == 0 || share_pair(i) < PAIRS));
}

// Whether any block makes the words that this lane reads of a pair.
__device__ __forceinline__ bool exists(int pair) {
    return SLICES % PACK == 0 || pair * PACK + (PACK == 2 ? threadIdx.x % 4 / 2 : 0) < SLICES;
}

__device__ __forceinline__ bool is_empty(const uint4& x) {
    return x.x == EMPTY || x.y == EMPTY || x.z == EMPTY || x.w == EMPTY;
}

// This lane's words of some pairs of a vector, for R tiles. What nobody makes is 0.
template <int R>
struct Words {
    uint4 of[chunk_of(R)][R];
    const uint4* from;  // this lane's first word of them

    __device__ __forceinline__ void load(int i, int tile) {
        of[i][tile] = load_relaxed(from + (i * WARPS + tile * PAIRS) * 32);
    }

    // Ask for the words of the share's pairs from `first` on and of the first `tiles` tiles, without waiting.
    __device__ __forceinline__ void request(const unsigned* vector, int first, int tiles) {
        from = reinterpret_cast<const uint4*>(vector) + share_pair(first) * 32 + threadIdx.x % 32;
#pragma unroll
        for (int tile = 0; tile < R; ++tile)
#pragma unroll
            for (int i = 0; i < chunk_of(R); ++i) {
                of[i][tile] = make_uint4(0, 0, 0, 0);
                if (tile < tiles && in_share(first + i) && exists(share_pair(first + i))) load(i, tile);
            }
    }

    __device__ __forceinline__ bool missing() const {
        bool any = false;
#pragma unroll
        for (int i = 0; i < chunk_of(R) * R; ++i) any = any || is_empty(of[i / R][i % R]);
        return any;
    }

    // Ask again for what has not come.
    __device__ __forceinline__ void renew() {
#pragma unroll
        for (int i = 0; i < chunk_of(R) * R; ++i)
            if (is_empty(of[i / R][i % R])) load(i / R, i % R);
    }
};

// The fragments of this warp's share of the block's matrices.
template <int W>
struct Matrices {
    unsigned kept[max_of(1, IN_REGISTERS)][W][max_of(1, KEPT)][2][4];
    const uint4* shared;  // gate after gate [W, shared pairs, 2, 32 lanes]
    const uint4* global;  // [GATES, W * blocks, PAIRS, 2, 32 lanes], from the block's first slice on
    int stride;           // from gate to gate there

    __device__ Matrices(const uint4* fragments, uint4* room, const Part& part) : shared(room + threadIdx.x % 32) {
        stride = W * gridDim.x * PAIRS * 64;
        global = fragments + static_cast<index_t>(part.direction) * GATES * stride + part.slice * PAIRS * 64 +
                 threadIdx.x % 32;
        if constexpr (GATES == 3) {
            fetch<0>(room);
            fetch<GATES - 2>(room);
        }
        fetch<GATES - 1>(room);
        barrier_sync(LOADED, 32 * WARPS);
    }

    template <int GATE>
    __device__ __forceinline__ void fetch(uint4* room) {
        constexpr int pairs = shared_pairs(GATE), place = count_held(REGISTERS, GATE);
        const uint4* matrix = global + GATE * stride;
        if constexpr (held(GATE) == REGISTERS) {
#pragma unroll
            for (int i = 0; i < W * KEPT * 2; ++i) {
                int w = i / 2 / KEPT, of_share = i / 2 % KEPT;
                uint4 x = make_uint4(0, 0, 0, 0);
                if (in_share(of_share)) x = matrix[((w * PAIRS + share_pair(of_share)) * 2 + i % 2) * 32];
                unsigned(&to)[4] = kept[place][w][of_share][i % 2];
                to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
            }
        }
        const uint4* from = matrix - threadIdx.x % 32;
        for (int i = threadIdx.x; i < W * pairs * 64; i += 32 * WARPS) {
            int w = i / max_of(1, pairs * 64);
            room[shared_before(GATE) * W * 64 + i] = from[i + (w + 1) * first_shared(GATE) * 64];
        }
    }

    // Both halves of the `i`-th pair of the share, of the slice `w`.
    template <int GATE>
    __device__ __forceinline__ void read(unsigned (&a)[2][4], int w, int i) const {
        constexpr int where = held(GATE), place = count_held(REGISTERS, GATE);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (where == REGISTERS && i < KEPT) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    a[half][k] = kept[place][w][i][half][k];
                    // High and low would take twice the registers.
                    if (SPLIT && W * IN_REGISTERS * KEPT > 6) hide(a[half][k]);
                }
            } else {
                int there = ((w * PAIRS + share_pair(i)) * 2 + half) * 32;
                int here = there - ((w + 1) * first_shared(GATE) - shared_before(GATE) * W) * 64;
                uint4 x = where == GLOBAL ? global[GATE * stride + there] : shared[here];
                a[half][0] = x.x, a[half][1] = x.y, a[half][2] = x.z, a[half][3] = x.w;
            }
        }
    }
};

// x = high + low, each with the 11 significant bits of tf32 (Veltkamp's way: rounding to tf32 by the machine's own
// instruction takes many times as long). NaN stays NaN.
template <int COUNT>
__device__ __forceinline__ void split(const unsigned (&x)[COUNT], unsigned (&high)[COUNT], unsigned (&low)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        float value = __uint_as_float(x[k]), scaled = __fmul_rn(value, 8193.0f);
        float upper = __fsub_rn(scaled, __fsub_rn(scaled, value));
        high[k] = __float_as_uint(upper);
        low[k] = __float_as_uint(__fsub_rn(value, upper));
    }
}

// Partial sums of this warp; COUNT of these are under way at once.
//
// The tensor cores cut off what they add to a sum, where a processor rounds. So where float32 is wanted, they sum the
// products of one pair only, the small ones first, and these sums are added up outside. A lone sum keeps the small
// products apart all along, so that there are chains enough that do not wait for each other.
template <int COUNT>
struct Sums {
    static constexpr bool LONE = COUNT == 1;
    float of[LONE ? 2 : 1][4], rest[2][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            of[0][k] = of[LONE][k] = 0.0f;
            rest[0][k] = rest[1][k] = 0.0f;
        }
    }

    __device__ __forceinline__ void add(const unsigned (&a)[2][4], const unsigned (&b)[2][2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float(&chain)[4] = of[half * LONE];
#if STORAGE == BFLOAT16
            mma_bfloat16(chain, a[half], b[half]);
#elif STORAGE == FLOAT16
            mma_float16(chain, a[half], b[half]);
#else
            mma_tf32(chain, a[half], b[half]);
#endif
        }
    }

    // Both are split already.
    __device__ __forceinline__ void add_split(
        const unsigned (&a)[2][4], const unsigned (&a_low)[2][4], const unsigned (&b)[2][2],
        const unsigned (&b_low)[2][2]) {
        float pair[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mma_tf32(LONE ? rest[half] : pair, a_low[half], b[half]);
            mma_tf32(LONE ? rest[half] : pair, a[half], b_low[half]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) mma_tf32(pair, a[half], b[half]);
#pragma unroll
        for (int k = 0; k < 4; ++k) of[0][k] += pair[k];
    }

    __device__ __forceinline__ float total(int k) const {
        if (!LONE) return of[0][k];
        return SPLIT ? of[0][k] + (rest[0][k] + rest[1][k]) : of[0][k] + of[LONE][k];
    }
};

template <int COUNT, int W, int R>
struct AllSums {
    Sums<COUNT * W * R> of[COUNT][W][R];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < COUNT * W * R; ++i) of[i / (W * R)][i / R % W][i % R].clear();
    }
};

// Add to the sums [m][w] the products of the matrix of gate FIRST+m and slice w with a chunk of the words, from the
// share's pair AT on.
template <int FIRST, int AT, int COUNT, int W, int R>
__device__ __forceinline__ void multiply(
    AllSums<COUNT, W, R>& sums, const Matrices<W>& matrices, const uint4 (&words)[chunk_of(R)][R]) {
#pragma unroll
    for (int i = 0; i < chunk_of(R); ++i) {
        if (!in_share(AT + i)) continue;
        unsigned b[R][2][2], low[R][2][2];  // [tile, half, word]; b is high once it is split
#pragma unroll
        for (int k = 0; k < 2 * R; ++k) {
            const uint4& x = words[i][k / 2];
            unsigned(&all)[2] = b[k / 2][k % 2];
            all[0] = k % 2 ? x.z : x.x, all[1] = k % 2 ? x.w : x.y;
            if constexpr (SPLIT) split(all, all, low[k / 2][k % 2]);
        }
        auto add = [&](int m, int w, unsigned(&a)[2][4]) {
            unsigned a_low[2][4];
            if constexpr (SPLIT) split(a[0], a[0], a_low[0]), split(a[1], a[1], a_low[1]);
#pragma unroll
            for (int r = 0; r < R; ++r) {
                Sums<COUNT * W * R>& sum = sums.of[m][w][r];
                if constexpr (SPLIT) sum.add_split(a, a_low, b[r], low[r]);
                else sum.add(a, b[r]);
            }
        };
#pragma unroll
        for (int w = 0; w < W; ++w) {
            unsigned a[2][4];
            matrices.template read<FIRST>(a, w, AT + i);
            add(0, w, a);
            if constexpr (COUNT > 1) {
                matrices.template read<FIRST + 1>(a, w, AT + i);
                add(1, w, a);
            }
            if constexpr (COUNT > 2) {
                matrices.template read<FIRST + 2>(a, w, AT + i);
                add(2, w, a);
            }
        }
    }
}

// The partial sums of one stack: [rooms, COUNT, squares, WARPS, PARTIAL].
template <int COUNT, int W, int R>
struct Partials {
    static constexpr int THREADS = threads_of(W * R), ROOMS = rooms_of(R);
    static constexpr int SIZE = ROOMS * COUNT * W * R * WARPS * PARTIAL;
    float* room;
    int turn = 0;
    bool waits;  // for the room; with two of them, a single stack's turns are phases apart

    __device__ Partials(float* shared, const Part& part) : room(shared), waits(ROOMS == 1 || part.stacks > 1) {}

    __device__ __forceinline__ float* of(int m, int square) const {
        return room + ((turn % ROOMS * COUNT + m) * (W * R) + square) * (WARPS * PARTIAL);
    }

    // A product warp leaves its sums.
    template <int USED>
    __device__ __forceinline__ void leave(const AllSums<USED, W, R>& sums) {
        if (waits) barrier_sync(FREE + turn % ROOMS, THREADS);
        int at = threadIdx.x / 32 * PARTIAL + threadIdx.x % 4 * (2 * PARTIAL_ROW) + threadIdx.x % 32 / 4;
#pragma unroll
        for (int m = 0; m < USED; ++m)
#pragma unroll
            for (int square = 0; square < W * R; ++square) {
                const Sums<USED * W * R>& sum = sums.of[m][square % W][square / W];
                float* to = of(m, square) + at;
                to[0] = sum.total(0), to[PARTIAL_ROW] = sum.total(1);
                to[8] = sum.total(2), to[PARTIAL_ROW + 8] = sum.total(3);
            }
        barrier_arrive(FULL + turn % ROOMS, THREADS);
        ++turn;
    }

    // Neighbouring units of an item, which are read at once.
    struct __align__(4 * PACK) Units {
        float of[PACK];
    };

    // In pairs, for a shorter wait.
    template <int TERMS>
    __device__ __forceinline__ static Units sum(const float* from) {
        constexpr int half = TERMS / 2;
        if constexpr (half == 0) {
            return *reinterpret_cast<const Units*>(from);
        } else {
            Units first = sum<TERMS - half>(from);
            const Units second = sum<half>(from + (TERMS - half) * PARTIAL);
#pragma unroll
            for (int k = 0; k < PACK; ++k) first.of[k] += second.of[k];
            return first;
        }
    }

    // A cell thread waits for the sums of its items, reads them, and gives the room back.
    template <int USED>
    __device__ __forceinline__ void take(float (&sums)[USED][items_of(W * R)][PACK], const Cells<W, R>& at) {
        barrier_sync(FULL + turn % ROOMS, THREADS);
#pragma unroll
        for (int m = 0; m < USED; ++m)
#pragma unroll
            for (int item = 0; item < items_of(W * R); ++item) {
                const Units found = sum<WARPS>(of(m, at.of[item].square) + at.of[item].place);
#pragma unroll
                for (int k = 0; k < PACK; ++k) sums[m][item][k] = found.of[k];
            }
        if (waits) barrier_arrive(FREE + turn % ROOMS, THREADS);
        ++turn;
    }

    __device__ void begin() const {
        if (!waits) return;
#pragma unroll
        for (int i = 0; i < ROOMS; ++i) barrier_arrive(FREE + i, THREADS);
    }
};

// The products of one phase, for every tile of the group. `Product` says what they are: COUNT gates from gate
// `first(i)` on times vector `vector(i)`, for i < VECTORS, all added up.
//
// Words are asked for AHEAD reads ahead, across stacks too.
template <typename Product, int W, int R, int SLOT_VECTORS, int PARTIAL_COUNT>
struct Phase {
    static constexpr int CHUNKS = chunks_of(R), READS = Product::VECTORS * CHUNKS;  // of a stack
    const Matrices<W>& matrices;
    const Exchange<SLOT_VECTORS>& exchange;
    const Part& part;
    index_t phase;
    Words<R> ahead[AHEAD];

    template <int READ>
    __device__ __forceinline__ void request(Words<R>& words, int stack) {
        constexpr int vector = READ % READS / CHUNKS, chunk = READ % CHUNKS;
        int tile = (stack + READ / READS) * R;
        if (tile < part.tiles)
            words.request(exchange.at(phase, Product::vector(vector), tile), chunk * chunk_of(R), part.tiles - tile);
        else words = {};
    }

    template <int READ>
    __device__ __forceinline__ void add(AllSums<Product::COUNT, W, R>& sums, int stack) {
        if constexpr (READ < READS) {
            while (any_lane(ahead[0].missing())) ahead[0].renew();
            const Words<R> now = ahead[0];
#pragma unroll
            for (int i = 0; i + 1 < AHEAD; ++i) ahead[i] = ahead[i + 1];
            if (READS > 1 && part.stacks == 1) ahead[0].renew();  // asked for before it could have come
            request<READ + AHEAD>(ahead[AHEAD - 1], stack);
            multiply<Product::first(READ / CHUNKS), READ % CHUNKS * chunk_of(R)>(sums, matrices, now.of);
            add<READ + 1>(sums, stack);
        }
    }

    template <int READ>
    __device__ __forceinline__ void begin() {
        if constexpr (READ < AHEAD) {
            request<READ>(ahead[READ], 0);
            begin<READ + 1>();
        }
    }

    __device__ __forceinline__ void run(Partials<PARTIAL_COUNT, W, R>& partials) {
        begin<0>();
        for (int stack = 0; stack < part.stacks; ++stack) {
            AllSums<Product::COUNT, W, R> sums;
            sums.clear();
            add<0>(sums, stack);
            partials.leave(sums);
        }
        fence();  // before looking at words that were emptied two phases ago
    }
};

template <typename Product, int W, int R, int SLOT_VECTORS, int PARTIAL_COUNT>
__device__ __forceinline__ void run_phase(
    const Matrices<W>& matrices, const Exchange<SLOT_VECTORS>& exchange, const Part& part,
    Partials<PARTIAL_COUNT, W, R>& partials, index_t phase) {
    Phase<Product, W, R, SLOT_VECTORS, PARTIAL_COUNT>{matrices, exchange, part, phase, {}}.run(partials);
}

// ------------------------------------------------------------------------------------------------------- cell warps

__device__ __forceinline__ unsigned word_of(const float (&x)[PACK]) {
#if STORAGE == FLOAT32
    unsigned word = TF32 ? round_tf32(x[0]) : __float_as_uint(x[0]);
#else
    unsigned word = store(x[0]) | static_cast<unsigned>(store(x[1])) << 16;
#endif
    return word == EMPTY ? 0x7fffffffu : word;  // another NaN
}

template <typename T>
struct __align__(2 * sizeof(T)) Two {
    T first, second;
};

template <typename T>
__device__ __forceinline__ T store_as(float x) {
    if constexpr (sizeof(T) == sizeof(float)) return x;
    else return store(x);
}

// Neighbouring numbers of an item lie in one word of PACK numbers, where all do.
template <typename T>
__device__ __forceinline__ void write(T* to, const float (&x)[PACK], const Cell& at, const Part& part) {
    if (!at.real(0, part)) return;
    if constexpr (PACK == 1) {
        *to = store_as<T>(x[0]);
    } else if constexpr (HIDDEN % 2) {
        to[0] = store_as<T>(x[0]);
        if (at.real(1, part)) to[1] = store_as<T>(x[1]);
    } else {
        *reinterpret_cast<Two<T>*>(to) = {store_as<T>(x[0]), store_as<T>(x[1])};
    }
}

__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ unsigned bits_of(unsigned short x) { return x; }

// Numbers of an item as they lie in memory. What looks at a number waits for it, and turning 16 bits into a float is to look
// at it: so that is done where it is used, long after it was asked for.
template <typename T>
struct Asked {
    static constexpr bool joined = sizeof(T) == 2 && HIDDEN % 2 == 0;  // both in one word
    unsigned words[joined ? 1 : PACK];

    // 0 where there is nothing.
    __device__ __forceinline__ void ask(const T* from, const Cell& at, const Part& part, bool wanted = true) {
#pragma unroll
        for (unsigned& word : words) word = 0;
        if (!wanted || !at.real(0, part)) return;
        if constexpr (joined) {
            words[0] = *reinterpret_cast<const unsigned*>(from);
        } else if constexpr (PACK == 2 && HIDDEN % 2 == 0) {
            const Two<T> two = *reinterpret_cast<const Two<T>*>(from);
            words[0] = bits_of(two.first), words[PACK - 1] = bits_of(two.second);
        } else {
            words[0] = bits_of(from[0]);
            if (PACK == 2 && at.real(1, part)) words[PACK - 1] = bits_of(from[1]);
        }
    }

    __device__ __forceinline__ float operator[](int k) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[k]);
        } else {
            const stored x = static_cast<stored>(joined ? words[0] >> 16 * k : words[joined ? 0 : k]);
            return load(&x);
        }
    }
};

// What cell threads remember of each stack from phase to phase: [fields, stacks, items, PACK, cell threads].
template <int W, int R>
struct Memory {
    float* room;
    int stacks;

    __device__ __forceinline__ float& operator()(int field, int stack, int item, int k) const {
        int index = ((field * stacks + stack) * items_of(W * R) + item) * PACK + k;
        return room[index * cell_threads(W * R) + threadIdx.x - 32 * WARPS];
    }
};

template <int VECTORS>
struct Publisher {
    Exchange<VECTORS> exchange;

    __device__ __forceinline__ void publish(
        const Cell& at, int tile, index_t phase, int vector, const float (&x)[PACK]) const {
        if (at.there) store_relaxed(exchange.at(phase, vector, tile) + at.word, word_of(x));
    }

    __device__ __forceinline__ void empty(const Cell& at, int tile, index_t phase, int vector) const {
        if (at.there) store_relaxed(exchange.at(phase, vector, tile) + at.word, EMPTY);
    }
};

// ---------------------------------------------------------------------------------------------------------- forward

struct Forward {
    const stored* projected;
    const float* initial;
    const uint4* fragments;
    Biases biases;  // of the block's direction
    const index_t* lengths;
    float* hidden;
    stored* gates;
    stored* output;  // the states as they are stored, or null
    stored* last;    // the last of them, or null
    unsigned* exchange;
};

#define FORWARD_PRODUCTS (RESET == BEFORE ? 2 : GATES)
enum { STATE, UPDATE, CANDIDATE };

// All the products with the state: r and u ("before"), r, u and c ("after"), or c.
struct OfState {
    static constexpr int VECTORS = 1, COUNT = FORWARD_PRODUCTS;
    __host__ __device__ static constexpr int vector(int) { return 0; }
    __host__ __device__ static constexpr int first(int) { return 0; }
};

// W_c (r*h).
struct OfGated {
    static constexpr int VECTORS = 1, COUNT = 1;
    __host__ __device__ static constexpr int vector(int) { return 0; }
    __host__ __device__ static constexpr int first(int) { return GATES - 1; }
};

// The projected input of one stack at one step, asked for long before it is needed.
template <int W, int R>
struct ProjectedAhead {
    Asked<stored> p[GATES][items_of(W * R)];

    // Padding may hold anything, NaN included.
    __device__ __forceinline__ void ask(const Part& part, const Task& task, const Forward& x, int stack, index_t step) {
        const Cells<W, R> at(part, task, x.lengths, stack, part.time(step, task.steps));
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
#pragma unroll
            for (int item = 0; item < items_of(W * R); ++item) {
                const Cell& here = at.of[item];
                p[gate][item].ask(x.projected + here.gate(gate), here, part, step < task.steps && !here.over);
            }
    }
};

template <int W, int R>
struct ForwardCells {
    static constexpr int ITEMS = items_of(W * R);
    typedef float Numbers[ITEMS][PACK];
    const Part& part;
    const Task& task;
    const Forward& x;
    Partials<FORWARD_PRODUCTS, W, R>& partials;
    const Memory<W, R> memory;
    float* added;  // [GATES + 1, W * 16]: the biases of the block's units, and modReLU's threshold
    const Publisher<1> out;
    index_t phase;

    __device__ void start() {
        partials.begin();
        for (int i = threadIdx.x - 32 * WARPS; i < ADDED(W); i += cell_threads(W * R)) {
            const int gate = i / (W * 16), unit = part.slice * 16 + i % (W * 16);
            const bool real = unit < HIDDEN;
            added[i] = !real ? 0.0f : gate < GATES ? x.biases.of(gate, unit) : x.biases.threshold(unit);
        }
        barrier_sync(KNOWN, cell_threads(W * R));
        for (int stack = 0; stack < part.stacks; ++stack) {
            const Cells<W, R> at(part, task, x.lengths, stack, 0);
#pragma unroll
            for (int item = 0; item < ITEMS; ++item) {
                const Cell& here = at.of[item];
                Asked<float> initial;
                initial.ask(x.initial + here.start(part, task), here, part, x.initial != nullptr);
                float h[PACK];
#pragma unroll
                for (int k = 0; k < PACK; ++k) memory(STATE, stack, item, k) = h[k] = initial[k];
                out.publish(here, stack * R, 0, 0, h);
            }
        }
    }

    // Publish for the next phase, make room two phases further on, and let that be known.
    __device__ __forceinline__ void publish(const Cells<W, R>& at, int stack, const Numbers& next) {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) out.publish(at.of[item], stack * R, phase + 1, 0, next[item]);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) out.empty(at.of[item], stack * R, phase + 3, 0);
        if (part.stacks == 1) fence();
    }

    __device__ __forceinline__ void next_phase() {
        if (part.stacks > 1) fence();
        ++phase;
    }

    __device__ __forceinline__ void recall(Numbers& into, int field, int stack) const {
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) into[i / PACK][i % PACK] = memory(field, stack, i / PACK, i % PACK);
    }

    template <typename Found>
    __device__ __forceinline__ void keep(const Found& from, int field, int stack) const {
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) memory(field, stack, i / PACK, i % PACK) = from[i / PACK][i % PACK];
    }

    template <typename T>
    __device__ __forceinline__ void save(T* to, int gate, const Numbers& from, const Cells<W, R>& at) const {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) write(to + at.of[item].gate(gate), from[item], at.of[item], part);
    }

    // What is added to a gate; the one behind them all is modReLU's threshold.
    __device__ __forceinline__ void recall_added(Numbers& into, int gate, const Cells<W, R>& at) const {
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i)
            into[i / PACK][i % PACK] = added[(gate * W - part.slice) * 16 + at.of[i / PACK].unit + i % PACK];
    }

    __device__ __forceinline__ void new_state(
        const Cells<W, R>& at, int stack, const Numbers& c, const Numbers& u, const Numbers& before) {
        Numbers h;
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) {
            int item = i / PACK, k = i % PACK;
            float old = before[item][k];
            h[item][k] = at.of[item].over ? old : old + u[item][k] * (c[item][k] - old);
        }
        publish(at, stack, h);
        keep(h, STATE, stack);
        save(x.gates, GATES - 1, c, at);
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            write(x.hidden + at.of[item].state(), h[item], at.of[item], part);
            if (PACK == 2 && x.output) write(x.output + at.of[item].state(), h[item], at.of[item], part);
        }
    }

    // What follows on the products with the state.
    __device__ __forceinline__ void on_state(const Cells<W, R>& at, int stack, const Asked<stored> (&p)[GATES][ITEMS]) {
        Numbers before, r, u, next, sums[FORWARD_PRODUCTS], bias[GATES], threshold;
        recall(before, STATE, stack);
        if constexpr (RESET != BEFORE) recall_added(threshold, GATES, at);
#pragma unroll
        for (int gate = 0; gate < GATES; ++gate) recall_added(bias[gate], gate, at);
        partials.take(sums, at);
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) {
            int item = i / PACK, k = i % PACK;
            float first = p[0][item][k] + bias[0][item][k] + sums[0][item][k];
            if constexpr (RESET == NONE) {
                next[item][k] = activate(first, threshold[item][k]);
                u[item][k] = 1.0f;
            } else {
                r[item][k] = logistic(first);
                float second = p[GATES - 2][item][k] + bias[GATES - 2][item][k] + sums[GATES - 2][item][k];
                u[item][k] = at.of[item].over ? 0.0f : logistic(second);
            }
            if constexpr (RESET == AFTER) {
                float product = r[item][k] * sums[FORWARD_PRODUCTS - 1][item][k];
                float rest = p[GATES - 1][item][k] + bias[GATES - 1][item][k];
                next[item][k] = activate(rest + product, threshold[item][k]);
            }
            if constexpr (RESET == BEFORE) next[item][k] = r[item][k] * before[item][k];
        }
        if constexpr (RESET == BEFORE) {
            publish(at, stack, next);
            keep(u, UPDATE, stack);
            keep(p[GATES - 1], CANDIDATE, stack);
        } else {
            new_state(at, stack, next, u, before);
        }
        if constexpr (RESET != NONE) {
            save(x.gates, 0, r, at);
            save(x.gates, GATES - 2, u, at);
        }
    }

    // What follows on W_c (r*h).
    __device__ __forceinline__ void on_gated(const Cells<W, R>& at, int stack) {
        Numbers before, u, z, c, sums[1], bias, threshold;
        recall(before, STATE, stack), recall(u, UPDATE, stack), recall(z, CANDIDATE, stack);
        recall_added(bias, GATES - 1, at), recall_added(threshold, GATES, at);
        partials.take(sums, at);
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) {
            int item = i / PACK, k = i % PACK;
            c[item][k] = activate(z[item][k] + bias[item][k] + sums[0][item][k], threshold[item][k]);
        }
        new_state(at, stack, c, u, before);
    }

    __device__ void run() {
        start();
        ProjectedAhead<W, R> now, ahead;
        ahead.ask(part, task, x, 0, 0);
        for (index_t step = 0; step < task.steps; ++step) {
            const index_t t = part.time(step, task.steps);
            for (int stack = 0; stack < part.stacks; ++stack) {
                now = ahead;
                bool last = stack + 1 == part.stacks;
                ahead.ask(part, task, x, last ? 0 : stack + 1, last ? step + 1 : step);
                on_state(Cells<W, R>(part, task, x.lengths, stack, t), stack, now.p);
            }
            next_phase();
            if constexpr (RESET == BEFORE) {
                for (int stack = 0; stack < part.stacks; ++stack)
                    on_gated(Cells<W, R>(part, task, x.lengths, stack, t), stack);
                next_phase();
            }
        }
        if (x.last) finish();
    }

    __device__ void finish() const {
        for (int stack = 0; stack < part.stacks; ++stack) {
            const Cells<W, R> at(part, task, x.lengths, stack, 0);
            Numbers h;
            recall(h, STATE, stack);
#pragma unroll
            for (int item = 0; item < ITEMS; ++item)
                write(x.last + at.of[item].start(part, task), h[item], at.of[item], part);
        }
    }
};

template <int W, int R>
__device__ __forceinline__ void forward(const Forward& x, const Task& task) {
    const Part part(task, W, R);
    uint4* matrix_room = reinterpret_cast<uint4*>(dynamic_shared());
    float* added = reinterpret_cast<float*>(matrix_room + SHARED_PAIRS * W * 64);
    float* partial_room = added + ADDED(W);
    Partials<FORWARD_PRODUCTS, W, R> partials(partial_room, part);
    if (threadIdx.x >= 32 * WARPS) {
        const Memory<W, R> memory = {partial_room + partials.SIZE, part.stacks};
        const Publisher<1> out = {Exchange<1>(x.exchange, part, task.tiles)};
        ForwardCells<W, R>{part, task, x, partials, memory, added, out, 0}.run();
        return;
    }
    const Matrices<W> matrices(x.fragments, matrix_room, part);
    const Exchange<1> in(x.exchange, part, task.tiles);
    index_t phase = 0;
    for (index_t step = 0; step < task.steps; ++step) {
        run_phase<OfState, W, R>(matrices, in, part, partials, phase++);
        if constexpr (RESET == BEFORE) run_phase<OfGated, W, R>(matrices, in, part, partials, phase++);
    }
}

// --------------------------------------------------------------------------------------------------------- backward

struct Backward {
    const float* grad_hidden;
    const stored* grad_output;  // as the states are stored, in the place of `grad_hidden`
    const float* initial;
    const uint4* fragments;
    const index_t* lengths;
    const float* hidden;
    const stored* gates;
    const float* products;
    stored* d_projected;
    stored* factors;
    float* d_initial;
    float* d_threshold;
    unsigned* exchange;
};

// Vectors in a slot. "before": 0 is dL/dz_c in even phases and dL/dz_r in odd ones, 1 (odd phases) dL/dz_u, which is
// published with dL/dz_c. "after": dL/dz_r, dL/dz_u, dL/dm. "none": dL/dz_c.
#define BACKWARD_VECTORS (RESET == BEFORE ? 2 : GATES)

// W_c' dL/dz_c, which is dL/d(r*h).
struct OfCandidate {
    static constexpr int VECTORS = 1, COUNT = 1;
    __host__ __device__ static constexpr int vector(int) { return 0; }
    __host__ __device__ static constexpr int first(int) { return GATES - 1; }
};

// All that goes back to the state. "before": dL/dz_u has been there for a while, and its product fills the wait for
// dL/dz_r.
struct OfGradients {
    static constexpr int VECTORS = RESET == BEFORE ? 2 : GATES, COUNT = 1;
    __host__ __device__ static constexpr int vector(int i) { return RESET == BEFORE ? 1 - i : i; }
    __host__ __device__ static constexpr int first(int i) { return RESET == BEFORE ? 1 - i : i; }
};

// What a step saved, for one stack.
template <int W, int R>
struct SavedAhead {
    struct Item {
        Asked<float> grad, before, product;
        Asked<stored> narrow, r, u, c;  // `narrow` is the gradient where it comes as the states are stored
    } of[items_of(W * R)];

    __device__ __forceinline__ void ask(
        const Part& part, const Task& task, const Backward& x, int stack, index_t step) {
        if (step >= task.steps) return;
        const Cells<W, R> at(part, task, x.lengths, stack, part.time(task.steps - 1 - step, task.steps));
        const bool first = step == task.steps - 1;
        const index_t back = (part.backwards ? 1 : -1) * task.batch * task.directions * HIDDEN;
#pragma unroll
        for (int i = 0; i < items_of(W * R); ++i) {
            const Cell& here = at.of[i];
            Item& item = of[i];
            const bool narrow = PACK == 2 && x.grad_output;
            item.narrow.ask(x.grad_output + here.state(), here, part, narrow);
            item.grad.ask(x.grad_hidden + here.state(), here, part, !narrow);
            item.c.ask(x.gates + here.gate(GATES - 1), here, part);
            item.r.ask(x.gates + here.gate(0), here, part, GATES == 3);
            item.u.ask(x.gates + here.gate(GATES == 3), here, part, GATES == 3);
            const float* before = first ? x.initial + here.start(part, task) : x.hidden + here.state() + back;
            item.before.ask(before, here, part, !first || x.initial);
            item.product.ask(x.products + here.state(), here, part, RESET == AFTER);
        }
    }
};

// CARRIED: the part of the gradient of the state before the step that no product brings.
enum { CARRIED, OPENED, GATED, TO_THRESHOLD };

template <int W, int R>
struct BackwardCells {
    static constexpr int ITEMS = items_of(W * R);
    typedef float Numbers[ITEMS][PACK];
    const Part& part;
    const Task& task;
    const Backward& x;
    Partials<1, W, R>& partials;
    const Memory<W, R> memory;
    const Publisher<BACKWARD_VECTORS> out;
    index_t phase;

    __device__ __forceinline__ void publish(
        const Cells<W, R>& at, int stack, index_t to_phase, int vector, const Numbers& next) const {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) out.publish(at.of[item], stack * R, to_phase, vector, next[item]);
    }

    // Having published: make room two phases further on, and let that be known.
    __device__ __forceinline__ void make_room(const Cells<W, R>& at, int stack) const {
        if (phase < 0) return;
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const Cell& here = at.of[item];
            const int tile = stack * R;
            out.empty(here, tile, phase + 3, 0);
            if (RESET == AFTER || (RESET == BEFORE && phase % 2 == 0))
                out.empty(here, tile, phase + 3, BACKWARD_VECTORS > 1);
            if (RESET == AFTER) out.empty(here, tile, phase + 3, BACKWARD_VECTORS - 1);
        }
        if (part.stacks == 1) fence();
    }

    __device__ __forceinline__ void next_phase() {
        if (part.stacks > 1) fence();
        ++phase;
    }

    // Write what is behind `to` and at these places of a line of `width` numbers.
    template <typename T>
    __device__ __forceinline__ void save(T* to, int width, const Numbers& from, const Cells<W, R>& at) const {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const Cell& here = at.of[item];
            write(to + here.line * width + here.unit, from[item], here, part);
        }
    }

    // With the gradient `e` that later steps send to a step's state: publish what the products need, and write what is
    // known.
    __device__ __forceinline__ void start_step(
        const Cells<W, R>& at, int stack, const SavedAhead<W, R>& saved, Numbers& e) {
        Numbers d_c, d_u, d_r, second;
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) {
            const int item = i / PACK, k = i % PACK;
            const bool over = at.of[item].over;
            const auto& now = saved.of[item];
            const float sent = e[item][k] + (PACK == 2 && x.grad_output ? now.narrow[k] : now.grad[k]);
            const float r = now.r[k], u = now.u[k], c = now.c[k];
            if (RESET == NONE) {
                d_c[item][k] = over ? 0.0f : sent * slope(c);
                e[item][k] = over ? sent : 0.0f;
            } else {
                d_c[item][k] = sent * u * slope(c);
                d_u[item][k] = sent * (c - now.before[k]) * u * (1.0f - u);
                e[item][k] = sent * (1.0f - u);
            }
            if (RESET == BEFORE) second[item][k] = r * now.before[k];
            if (RESET == AFTER) {
                second[item][k] = d_c[item][k] * r;
                d_r[item][k] = d_c[item][k] * now.product[k] * r * (1.0f - r);
            }
        }
        if constexpr (RESET == AFTER) {
            publish(at, stack, phase + 1, 0, d_r);
            publish(at, stack, phase + 1, BACKWARD_VECTORS > 1, d_u);
            publish(at, stack, phase + 1, BACKWARD_VECTORS - 1, second);
        } else {
            publish(at, stack, phase + 1, 0, d_c);
            if (RESET == BEFORE) publish(at, stack, phase + 2, BACKWARD_VECTORS - 1, d_u);
        }
        make_room(at, stack);
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) {
            const int item = i / PACK, k = i % PACK;
            memory(CARRIED, stack, item, k) = e[item][k];
            memory(TO_THRESHOLD, stack, item, k) += sign(saved.of[item].c[k]) * d_c[item][k];
            if (RESET != BEFORE) continue;
            memory(OPENED, stack, item, k) = saved.of[item].r[k];
            memory(GATED, stack, item, k) = second[item][k];
        }
        constexpr int width = GATES * HIDDEN;
        save(x.d_projected + (GATES - 1) * HIDDEN, width, d_c, at);
        if constexpr (RESET != NONE) {
            save(x.d_projected + (GATES == 3) * HIDDEN, width, d_u, at);
            save(x.factors, HIDDEN, second, at);
        }
        if constexpr (RESET == AFTER) save(x.d_projected, width, d_r, at);
    }

    // What follows on W_c' dL/dz_c.
    __device__ __forceinline__ void on_candidate(const Cells<W, R>& at, int stack) {
        Numbers d_r, sums[1];
        partials.take(sums, at);
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) {
            const int item = i / PACK, k = i % PACK;
            const float d_gated = sums[0][item][k], r = memory(OPENED, stack, item, k);
            d_r[item][k] = d_gated * memory(GATED, stack, item, k) * (1.0f - r);
            memory(CARRIED, stack, item, k) += d_gated * r;
        }
        publish(at, stack, phase + 1, 0, d_r);
        make_room(at, stack);
        save(x.d_projected, GATES * HIDDEN, d_r, at);
    }

    __device__ __forceinline__ void finish(const Cells<W, R>& at, int stack, const Numbers& e) const {
#pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            const Cell& here = at.of[item];
            if (x.d_initial) write(x.d_initial + here.start(part, task), e[item], here, part);
            float to_threshold[PACK];
#pragma unroll
            for (int k = 0; k < PACK; ++k) to_threshold[k] = memory(TO_THRESHOLD, stack, item, k);
            const index_t line = static_cast<index_t>(here.row) * task.directions + part.direction;
            write(x.d_threshold + line * HIDDEN + here.unit, to_threshold, here, part);
        }
    }

    __device__ __forceinline__ index_t time(index_t step) const {
        return part.time(task.steps - 1 - step, task.steps);
    }

    __device__ void start() {
        partials.begin();
        SavedAhead<W, R> saved;
        for (int stack = 0; stack < part.stacks; ++stack) {
            saved.ask(part, task, x, stack, 0);
            Numbers e;
#pragma unroll
            for (int i = 0; i < ITEMS * PACK; ++i)
                memory(TO_THRESHOLD, stack, i / PACK, i % PACK) = e[i / PACK][i % PACK] = 0.0f;
            start_step(Cells<W, R>(part, task, x.lengths, stack, time(0)), stack, saved, e);
        }
        ++phase;
    }

    // What follows on all products that go back to the state.
    __device__ __forceinline__ void on_gradients(
        const Cells<W, R>& at, int stack, bool more, const SavedAhead<W, R>& saved) {
        Numbers e, sums[1];
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) e[i / PACK][i % PACK] = memory(CARRIED, stack, i / PACK, i % PACK);
        partials.take(sums, at);
#pragma unroll
        for (int i = 0; i < ITEMS * PACK; ++i) e[i / PACK][i % PACK] += sums[0][i / PACK][i % PACK];
        if (more) start_step(at, stack, saved, e);
        else finish(at, stack, e);
    }

    __device__ void run() {
        start();
        SavedAhead<W, R> now, ahead;
        ahead.ask(part, task, x, 0, 1);
        for (index_t step = 0; step < task.steps; ++step) {
            if constexpr (RESET == BEFORE) {
                for (int stack = 0; stack < part.stacks; ++stack)
                    on_candidate(Cells<W, R>(part, task, x.lengths, stack, time(step)), stack);
                next_phase();
            }
            for (int stack = 0; stack < part.stacks; ++stack) {
                now = ahead;
                bool last = stack + 1 == part.stacks;
                ahead.ask(part, task, x, last ? 0 : stack + 1, last ? step + 2 : step + 1);
                const bool more = step + 1 < task.steps;
                on_gradients(Cells<W, R>(part, task, x.lengths, stack, time(more ? step + 1 : step)), stack, more, now);
            }
            next_phase();
        }
    }
};

template <int W, int R>
__device__ __forceinline__ void backward(const Backward& x, const Task& task) {
    const Part part(task, W, R);
    uint4* matrix_room = reinterpret_cast<uint4*>(dynamic_shared());
    float* partial_room = reinterpret_cast<float*>(matrix_room + SHARED_PAIRS * W * 64) + ADDED(W);
    Partials<1, W, R> partials(partial_room, part);
    if (threadIdx.x >= 32 * WARPS) {
        const Memory<W, R> memory = {partial_room + partials.SIZE, part.stacks};
        const Publisher<BACKWARD_VECTORS> out = {Exchange<BACKWARD_VECTORS>(x.exchange, part, task.tiles)};
        BackwardCells<W, R>{part, task, x, partials, memory, out, -1}.run();
        return;
    }
    const Matrices<W> matrices(x.fragments, matrix_room, part);
    const Exchange<BACKWARD_VECTORS> in(x.exchange, part, task.tiles);
    index_t phase = 0;
    for (index_t step = 0; step < task.steps; ++step) {
        if constexpr (RESET == BEFORE) run_phase<OfCandidate, W, R>(matrices, in, part, partials, phase++);
        run_phase<OfGradients, W, R>(matrices, in, part, partials, phase++);
    }
}

// ---------------------------------------------------------------------------------------------------------- kernels

#define KERNELS(NAME, W, R)                                                                                            \
    extern "C" __global__ void __launch_bounds__(threads_of(W * R), 1) large_forward_##NAME(                           \
        const stored* projected, const float* initial, const uint4* fragments, const void* bias_first,                 \
        const void* bias_second, const float* thresholds, float offset, index_t narrow, const index_t* lengths,        \
        float* hidden, stored* gates, stored* output, stored* last, unsigned* exchange, index_t steps, index_t batch,  \
        index_t directions, index_t reverse, index_t first_direction, index_t first, index_t tiles) {                  \
        const int direction = static_cast<int>(first_direction) + blockIdx.z;                                          \
        const Biases biases = {{direction ? bias_second : bias_first, narrow != 0},                                    \
                               thresholds ? thresholds + direction * HIDDEN : nullptr, offset};                        \
        forward<W, R>({projected, initial, fragments, biases, lengths, hidden, gates, output, last, exchange},         \
                   {steps, batch, directions, reverse, static_cast<int>(first_direction), static_cast<int>(first),     \
                    static_cast<int>(tiles)});                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(threads_of(W * R), 1) large_backward_##NAME(                          \
        const float* grad_hidden, const stored* grad_output, const float* initial, const uint4* fragments,             \
        const index_t* lengths, const float* hidden, const stored* gates, const float* products, stored* d_projected,  \
        stored* factors, float* d_initial, float* d_threshold, unsigned* exchange, index_t steps, index_t batch,       \
        index_t directions, index_t reverse, index_t first_direction, index_t first, index_t tiles) {                  \
        backward<W, R>({grad_hidden, grad_output, initial, fragments, lengths, hidden, gates, products, d_projected,   \
                     factors, d_initial, d_threshold, exchange},                                                       \
                    {steps, batch, directions, reverse, static_cast<int>(first_direction), static_cast<int>(first),    \
                     static_cast<int>(tiles)});                                                                        \
    }

KERNELS(narrow, NARROW, 1)
#if WIDE > NARROW
KERNELS(wide_1, WIDE, 1)
#endif
#if STACK >= 2
KERNELS(wide_2, WIDE, 2)
#endif
#if STACK == 3
KERNELS(wide_3, WIDE, 3)
#elif STACK == 4
KERNELS(wide_4, WIDE, 4)
#endif

// ------------------------------------------------------------------------------------------------------ preparation

__device__ __forceinline__ unsigned weight_word(const Array& matrix, int row, int column, bool transposed) {
    float x[PACK];
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        int i = transposed ? column + k : row, j = transposed ? row : column + k;
        x[k] = row < HIDDEN && column + k < HIDDEN ? matrix[i * HIDDEN + j] : 0.0f;
    }
#if STORAGE == FLOAT32
    return TF32 ? round_tf32(x[0]) : __float_as_uint(x[0]);
#else
    return store(x[0]) | static_cast<unsigned>(store(x[1])) << 16;
#endif
}

// Fill `fragments` [D, GATES, slices, PAIRS, 2, 32 lanes, 4] from the weights, and empty the exchange. There may be more
// slices than units need: those of the last block. Everything fits into 32 bits, in which a division takes a fraction of
// the time.
extern "C" __global__ void large_prepare(
    const float* matrices, const void* free_first, const void* free_second, index_t made, index_t narrow,
    unsigned* fragments, unsigned* exchange, index_t directions, index_t slices, index_t words, index_t transposed) {
    const bool thin = narrow != 0;
    const Weights weights = {matrices, {free_first, thin}, {free_second, thin}, static_cast<int>(made)};
    const unsigned stride = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned rows = static_cast<unsigned>(slices), all = static_cast<unsigned>(directions) * GATES * rows * PAIRS * 256;
    for (unsigned i = thread; i < all; i += stride) {
        int k = i % 4, lane = i / 4 % 32, half = i / 128 % 2, pair = i / 256 % PAIRS;
        unsigned line = i / (256 * PAIRS), matrix = line / rows;
        int row = 16 * static_cast<int>(line - matrix * rows) + lane / 4 + 8 * (k % 2);
        int word = 16 * pair + 4 * (lane % 4) + 2 * half + k / 2;
        fragments[i] = weight_word(weights.of(matrix / GATES, matrix % GATES), row, word * PACK, transposed != 0);
    }
    for (unsigned i = thread; i < static_cast<unsigned>(words); i += stride) exchange[i] = EMPTY;
}
