// The recurrence where many blocks hold the matrices together: forward and backward.
//
// A block owns W *slices* of 16 hidden units, in all gates, for the whole sequence; the blocks of a *group* (one
// direction, up to `tiles` tiles of 8 rows of the batch) own all units between them. Each phase of a step is a product:
// every block needs a whole vector (the state, r*h, or gradients) of which it has made only its own slices. So blocks
// write what they have made into an exchange in global memory, which stays in the L2 cache, and read the rest from there.
//
// A block has two kinds of warps:
//
//   product warps  wait for the vector, multiply it on the tensor cores (WARPS of them share the columns), and leave
//                  partial sums in shared memory;
//   cell warps     add these up, compute the cell, publish the next vector, and write the results. A thread has one
//                  hidden unit (two in 16 bits) of one row of a tile.
//
// **Nobody waits at a barrier across blocks.** A word of the exchange that is not there yet holds EMPTY, bits that no
// published word has; a reader reads until it finds something else. The vector read in phase f lies in slot f mod 4.
// Having published for phase f+1, a cell thread empties its own words of slot f+3, the same as f-1. For every word X,
// with its writer and a reader of it (which are the same two threads in every phase):
//
//   - No word is emptied before it is read. The writer acts after all of the vector of phase f has come, and each block
//     published its part of that after it had used all of the vector of phase f-1 (of this tile).
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
// There are two kernels for each pass: the narrow one has the fewest slices a block that the GPU can do with, which is
// fastest where a group has one tile; the wide one has more, so that there are more groups with fewer tiles each, and a
// word that is read serves more products.
//
// Set by the compiler's options: HIDDEN, NARROW and WIDE (slices a block), STORAGE, TF32, RESET, PHI, HELD_R, HELD_U,
// HELD_C.
//
// Shapes: as in small.cu.

#include "numbers.cuh"

// Where a block holds the fragments of a gate's matrix.
#define REGISTERS 0
#define SHARED 1
#define GLOBAL 2

#define GATES (RESET == NONE ? 1 : 3)
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

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

__host__ __device__ constexpr int held(int gate) {
    return GATES == 1 || gate == 2 ? HELD_C : (gate == 1 ? HELD_U : HELD_R);
}

__host__ __device__ constexpr int count_held(int where, int gates) {
    int count = 0;
    for (int gate = 0; gate < gates; ++gate) count += held(gate) == where;
    return count;
}

#define IN_REGISTERS count_held(REGISTERS, GATES)
#define IN_SHARED count_held(SHARED, GATES)
#define CHUNK (SHARE < 2 || IN_REGISTERS ? min_of(SHARE, 2) : min_of(SHARE, 4))  // pairs of a read
#define CHUNKS ((SHARE + CHUNK - 1) / CHUNK)

// A cell thread has ITEMS places of PACK neighbouring units of one row, each in another slice.
#define ALL_ITEMS (128 / PACK)  // of a slice
__host__ __device__ constexpr int cell_threads(int slices) { return min_of(128, slices * ALL_ITEMS); }
__host__ __device__ constexpr int items_of(int slices) { return slices * ALL_ITEMS / cell_threads(slices); }
__host__ __device__ constexpr int threads_of(int slices) { return 32 * WARPS + cell_threads(slices); }

// What a launch is about: of D `directions` the `first_direction` and as many after it as the grid is deep, and of the
// batch the tiles from `first` on, at most `tiles` a group.
struct Task {
    index_t steps, batch, directions, reverse;
    int first_direction, first, tiles;
};

// This block's part of the task.
struct Part {
    int direction, slice, tile, tiles;  // the first slice; first and number of tiles
    index_t group;
    bool backwards;

    __device__ Part(const Task& task, int slices) {
        direction = task.first_direction + blockIdx.z;
        slice = blockIdx.x * slices;
        int all = static_cast<int>((task.batch + 7) / 8);
        tile = task.first + blockIdx.y * task.tiles;
        tiles = min(task.tiles, all - tile);
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

// ---------------------------------------------------------------------------------------------------- product warps

__device__ __forceinline__ int share_pair(int i) { return i * WARPS + static_cast<int>(threadIdx.x) / 32; }

// Whether any block makes the words that this lane reads of a pair.
__device__ __forceinline__ bool exists(int pair) {
    int slice = pair * PACK + (PACK == 2 ? threadIdx.x % 4 / 2 : 0);
    return slice < SLICES;
}

__device__ __forceinline__ bool is_empty(const uint4& x) {
    return x.x == EMPTY || x.y == EMPTY || x.z == EMPTY || x.w == EMPTY;
}

// This lane's words of CHUNK pairs of a vector.
struct Words {
    uint4 of[CHUNK];
    const uint4* from;
    int first;  // the first of the pairs in the warp's share

    __device__ __forceinline__ bool has(int i) const { return first + i < SHARE && share_pair(first + i) < PAIRS; }

    __device__ __forceinline__ void load(int i) {
        int pair = share_pair(first + i);
        if (exists(pair)) of[i] = load_relaxed(from + pair * 32);
    }

    // Ask for the words, without waiting.
    __device__ __forceinline__ void request(const unsigned* vector, int first_pair) {
        from = reinterpret_cast<const uint4*>(vector) + threadIdx.x % 32;
        first = first_pair;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            of[i] = make_uint4(0, 0, 0, 0);
            if (has(i)) load(i);
        }
    }

    // Ask again for what has not come; true if that was anything.
    __device__ __forceinline__ bool renew() {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (has(i) && any_lane(is_empty(of[i]))) {
                load(i);
                missing = true;
            }
        return missing;
    }
};

// The fragments of this warp's share of the block's matrices.
template <int W>
struct Matrices {
    unsigned kept[IN_REGISTERS ? IN_REGISTERS : 1][W][SHARE][2][4];
    const uint4* shared;  // [IN_SHARED, W, PAIRS, 2, 32 lanes]
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
        constexpr int where = held(GATE), place = count_held(where, GATE);
        const uint4* matrix = global + GATE * stride;
        if constexpr (where == REGISTERS) {
#pragma unroll
            for (int i = 0; i < W * SHARE * 2; ++i) {
                int pair = share_pair(i / 2 % SHARE);
                uint4 x = make_uint4(0, 0, 0, 0);
                if (pair < PAIRS) x = matrix[((i / 2 / SHARE * PAIRS + pair) * 2 + i % 2) * 32];
                unsigned(&to)[4] = kept[place][i / 2 / SHARE][i / 2 % SHARE][i % 2];
                to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
            }
        }
        if constexpr (where == SHARED)
            for (int i = threadIdx.x; i < W * PAIRS * 64; i += 32 * WARPS)
                room[place * W * PAIRS * 64 + i] = matrix[i - static_cast<int>(threadIdx.x) % 32];
    }

    // Of the slice `w`, the `i`-th pair of the share.
    template <int GATE>
    __device__ __forceinline__ void read(unsigned (&a)[4], int w, int i, int half) const {
        constexpr int where = held(GATE), place = count_held(where, GATE);
        if constexpr (where == REGISTERS) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                a[k] = kept[place][w][i][half][k];
                if (SPLIT && W * IN_REGISTERS * SHARE > 6) hide(a[k]);  // high and low would take twice the registers
            }
        } else {
            int at = ((w * PAIRS + share_pair(i)) * 2 + half) * 32;
            uint4 x = where == SHARED ? shared[place * W * PAIRS * 64 + at] : global[GATE * stride + at];
            a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
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
// products of high parts over one pair only, and these sums are added up outside; the small rest they may keep.
template <int COUNT>
struct Sums {
    static constexpr int HALVES = COUNT == 1 ? 2 : 1;  // chains that do not wait for each other
    float of[HALVES][4], rest[HALVES][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < 4 * HALVES; ++k) of[k / 4][k % 4] = rest[k / 4][k % 4] = 0.0f;
    }

    __device__ __forceinline__ void add(const unsigned (&a)[4], const unsigned (&b)[2], int half) {
        float(&chain)[4] = of[half % HALVES];
#if STORAGE == BFLOAT16
        mma_bfloat16(chain, a, b);
#elif STORAGE == FLOAT16
        mma_float16(chain, a, b);
#else
        mma_tf32(chain, a, b);
#endif
    }

    // b is split already; `pair` collects the high products of both halves of a pair.
    __device__ __forceinline__ void add_split(
        float (&pair)[4], const unsigned (&a)[4], const unsigned (&b_high)[2], const unsigned (&b_low)[2], int half) {
        unsigned high[4], low[4];
        split(a, high, low);
        mma_tf32(rest[half % HALVES], low, b_high);
        mma_tf32(rest[half % HALVES], high, b_low);
        mma_tf32(pair, high, b_high);
        if (half == 0) return;
#pragma unroll
        for (int k = 0; k < 4; ++k) of[0][k] += pair[k];
    }

    __device__ __forceinline__ float total(int k) const {
        float sum = of[0][k];
        if constexpr (!SPLIT && HALVES == 2) sum += of[HALVES - 1][k];
        if constexpr (SPLIT) sum += HALVES == 2 ? rest[0][k] + rest[HALVES - 1][k] : rest[0][k];
        return sum;
    }
};

// sums[m][w] += the matrix of gate FIRST+m and slice w times the words of CHUNK pairs, from the share's pair AT on.
template <int FIRST, int AT, int COUNT, int W>
__device__ __forceinline__ void multiply(
    Sums<COUNT * W> (&sums)[COUNT][W], const Matrices<W>& matrices, const uint4 (&words)[CHUNK]) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (AT + i >= SHARE || share_pair(AT + i) >= PAIRS) continue;
        const unsigned all[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
        float pairs[COUNT][W][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned b[2] = {all[2 * half], all[2 * half + 1]};
            unsigned high[2], low[2];
            if constexpr (SPLIT) split(b, high, low);
#pragma unroll
            for (int w = 0; w < W; ++w) {
                auto add = [&](int m, const unsigned(&a)[4]) {
                    if constexpr (SPLIT) sums[m][w].add_split(pairs[m][w], a, high, low, half);
                    else sums[m][w].add(a, b, half);
                };
                unsigned a[4];
                matrices.template read<FIRST>(a, w, AT + i, half);
                add(0, a);
                if constexpr (COUNT > 1) {
                    matrices.template read<FIRST + 1>(a, w, AT + i, half);
                    add(1, a);
                }
                if constexpr (COUNT > 2) {
                    matrices.template read<FIRST + 2>(a, w, AT + i, half);
                    add(2, a);
                }
            }
        }
    }
}

// The partial sums of one tile: [2 turns, COUNT, W, WARPS, PARTIAL].
template <int COUNT, int W>
struct Partials {
    float* room;
    int turn = 0;
    bool several;  // tiles take turns with the two rooms; a single one's turns are phases apart

    __device__ Partials(float* shared, const Part& part) : room(shared), several(part.tiles > 1) {}

    __device__ float* of(int m, int w) const { return room + ((turn % 2 * COUNT + m) * W + w) * (WARPS * PARTIAL); }

    // A product warp leaves its sums.
    template <int USED>
    __device__ __forceinline__ void leave(const Sums<USED * W> (&sums)[USED][W]) {
        if (several) barrier_sync(FREE + turn % 2, threads_of(W));
        int at = threadIdx.x / 32 * PARTIAL + threadIdx.x % 4 * (2 * PARTIAL_ROW) + threadIdx.x % 32 / 4;
#pragma unroll
        for (int m = 0; m < USED; ++m)
#pragma unroll
            for (int w = 0; w < W; ++w) {
                float* to = of(m, w) + at;
                to[0] = sums[m][w].total(0), to[PARTIAL_ROW] = sums[m][w].total(1);
                to[8] = sums[m][w].total(2), to[PARTIAL_ROW + 8] = sums[m][w].total(3);
            }
        barrier_arrive(FULL + turn % 2, threads_of(W));
        ++turn;
    }

    // A cell thread waits for sums, reads them, and gives the room back.
    __device__ __forceinline__ void open() { barrier_sync(FULL + turn % 2, threads_of(W)); }

    __device__ __forceinline__ float sum(int m, int w, int place) const {
        const float* from = of(m, w) + place;
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += from[warp * PARTIAL];
        return total;
    }

    __device__ __forceinline__ void close() {
        if (several) barrier_arrive(FREE + turn % 2, threads_of(W));
        ++turn;
    }

    __device__ void begin() const {
        if (!several) return;
        barrier_arrive(FREE, threads_of(W));
        barrier_arrive(FREE + 1, threads_of(W));
    }
};

// The products of one phase, for every tile of the group. `Product` says what they are: COUNT gates from gate
// `first(i)` on times vector `vector(i)`, for i < VECTORS, all added up.
//
// Words are asked for two reads ahead, across tiles too.
template <typename Product, int W, int SLOT_VECTORS, int PARTIAL_COUNT>
struct Phase {
    static constexpr int READS = Product::VECTORS * CHUNKS;  // of a tile
    const Matrices<W>& matrices;
    const Exchange<SLOT_VECTORS>& exchange;
    const Part& part;
    index_t phase;
    Words next, after_next;

    template <int READ>
    __device__ __forceinline__ void request(Words& words, int tile) {
        constexpr int vector = READ % READS / CHUNKS, chunk = READ % CHUNKS;
        tile += READ / READS;
        words.first = SHARE;
        if (tile < part.tiles) words.request(exchange.at(phase, Product::vector(vector), tile), chunk * CHUNK);
    }

    template <int READ>
    __device__ __forceinline__ void add(Sums<Product::COUNT * W> (&sums)[Product::COUNT][W], int tile) {
        if constexpr (READ < READS) {
            while (next.renew()) {}
            const Words now = next;
            next = after_next;
            if (READS > 1 && part.tiles == 1) next.renew();  // asked for before it could have come
            request<READ + 2>(after_next, tile);
            multiply<Product::first(READ / CHUNKS), READ % CHUNKS * CHUNK, Product::COUNT, W>(sums, matrices, now.of);
            add<READ + 1>(sums, tile);
        }
    }

    __device__ __forceinline__ void run(Partials<PARTIAL_COUNT, W>& partials) {
        request<0>(next, 0);
        request<1>(after_next, 0);
        for (int tile = 0; tile < part.tiles; ++tile) {
            Sums<Product::COUNT * W> sums[Product::COUNT][W];
#pragma unroll
            for (auto& gate : sums)
#pragma unroll
                for (auto& slice : gate) slice.clear();
            add<0>(sums, tile);
            partials.leave(sums);
        }
        fence();  // before looking at words that were emptied two phases ago
    }
};

template <typename Product, int W, int SLOT_VECTORS, int PARTIAL_COUNT>
__device__ __forceinline__ void run_phase(
    const Matrices<W>& matrices, const Exchange<SLOT_VECTORS>& exchange, const Part& part,
    Partials<PARTIAL_COUNT, W>& partials, index_t phase) {
    Phase<Product, W, SLOT_VECTORS, PARTIAL_COUNT>{matrices, exchange, part, phase, {}, {}}.run(partials);
}

// ------------------------------------------------------------------------------------------------------- cell warps

// One place of a cell thread at one step of one tile: PACK neighbouring units of one row.
struct Cell {
    int slice;   // of the block's
    int place;   // of the first unit in the partial sums
    int word;    // in a tile of a vector
    bool there;  // the slice exists
    int unit;    // the first
    index_t row;
    index_t length;  // the steps before it are alive
    index_t state, gate;  // where the first unit lies in hidden and in gates
    index_t start;        // and in the initial state

    template <int W>
    __device__ static Cell make(const Part& part, const Task& task, const index_t* lengths, int tile, int item, index_t t) {
        Cell at;
        int index = item * cell_threads(W) + threadIdx.x - 32 * WARPS;
        int row_of_tile = index % ALL_ITEMS / (16 / PACK), unit_of_slice = index % (16 / PACK) * PACK;
        at.slice = index / ALL_ITEMS;
        int slice = part.slice + at.slice;
        at.there = slice < SLICES;
        at.place = row_of_tile * PARTIAL_ROW + unit_of_slice;
        at.word = slice / PACK * 128 + row_of_tile * 16 + slice % PACK * 8 + unit_of_slice / PACK;
        at.unit = slice * 16 + unit_of_slice;
        at.row = static_cast<index_t>(part.tile + tile) * 8 + row_of_tile;
        at.length = at.row >= task.batch ? 0 : (lengths ? lengths[at.row] : task.steps);
        index_t line = (t * task.batch + at.row) * task.directions + part.direction;
        at.state = line * HIDDEN + at.unit;
        at.gate = line * (GATES * HIDDEN) + at.unit;
        at.start = (static_cast<index_t>(part.direction) * task.batch + at.row) * HIDDEN + at.unit;
        return at;
    }

    __device__ bool real(int k, const Task& task) const { return row < task.batch && unit + k < HIDDEN; }
};

// All places of a cell thread, worked out before it waits.
template <int W>
struct Cells {
    Cell of[items_of(W)];

    __device__ Cells(const Part& part, const Task& task, const index_t* lengths, int tile, index_t t) {
#pragma unroll
        for (int item = 0; item < items_of(W); ++item) of[item] = Cell::make<W>(part, task, lengths, tile, item, t);
    }
};

__device__ __forceinline__ unsigned word_of(const float (&x)[PACK]) {
#if STORAGE == FLOAT32
    unsigned word = TF32 ? round_tf32(x[0]) : __float_as_uint(x[0]);
#else
    unsigned word = store(x[0]) | static_cast<unsigned>(store(x[1])) << 16;
#endif
    return word == EMPTY ? 0x7fffffffu : word;  // another NaN
}

template <typename T>
__device__ __forceinline__ void write(T* to, const float (&x)[PACK], const Cell& at, const Task& task) {
#pragma unroll
    for (int k = 0; k < PACK; ++k)
        if (at.real(k, task)) {
            if constexpr (sizeof(T) == sizeof(float)) to[k] = x[k];
            else to[k] = store(x[k]);
        }
}

// What cell threads remember of each tile from phase to phase: [FIELDS, tiles, items, PACK, cell threads].
template <int W>
struct Memory {
    float* room;
    int tiles;

    __device__ float& operator()(int field, int tile, int item, int k) const {
        int index = ((field * tiles + tile) * items_of(W) + item) * PACK + k;
        return room[index * cell_threads(W) + threadIdx.x - 32 * WARPS];
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
    const float* threshold;
    const index_t* lengths;
    float* hidden;
    stored* gates;
    unsigned* exchange;
};

#define FORWARD_PRODUCTS (RESET == BEFORE ? 2 : GATES)
enum { STATE, UPDATE, CANDIDATE, BIAS, FIELDS };

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

// The projected input of one tile at one step, asked for long before it is needed.
template <int W>
struct ProjectedAhead {
    float p[items_of(W)][GATES][PACK];

    // Padding may hold anything, NaN included.
    __device__ __forceinline__ void read(const Part& part, const Task& task, const Forward& x, int tile, index_t step) {
        index_t t = part.time(step, task.steps);
#pragma unroll
        for (int item = 0; item < items_of(W); ++item) {
            const Cell at = Cell::make<W>(part, task, x.lengths, tile, item, t);
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate)
#pragma unroll
                for (int k = 0; k < PACK; ++k)
                    p[item][gate][k] = step < task.steps && at.real(k, task) && t < at.length
                                           ? load(x.projected + at.gate + gate * HIDDEN + k)
                                           : 0.0f;
        }
    }
};

template <int W>
struct ForwardCells {
    const Part& part;
    const Task& task;
    const Forward& x;
    Partials<FORWARD_PRODUCTS, W>& partials;
    const Memory<W> memory;
    const Publisher<1> out;
    index_t phase;

    __device__ void start() {
        partials.begin();
        for (int tile = 0; tile < part.tiles; ++tile)
            for (int item = 0; item < items_of(W); ++item) {
                const Cell at = Cell::make<W>(part, task, x.lengths, tile, item, 0);
                float h[PACK];
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    const float* bias = x.threshold + part.direction * HIDDEN + at.unit + k;
                    memory(STATE, tile, item, k) = h[k] = x.initial && at.real(k, task) ? x.initial[at.start + k] : 0.0f;
                    memory(BIAS, tile, item, k) = x.threshold && at.unit + k < HIDDEN ? *bias : 0.0f;
                }
                out.publish(at, tile, 0, 0, h);
            }
    }

    // Having published for the next phase: make room two phases further on, and let that be known.
    __device__ __forceinline__ void make_room(const Cell& at, int tile) {
        out.empty(at, tile, phase + 3, 0);
        if (part.tiles == 1 && items_of(W) == 1) fence();
    }

    __device__ __forceinline__ void next_phase() {
        if (part.tiles > 1 || items_of(W) > 1) fence();
        ++phase;
    }

    __device__ __forceinline__ void new_state(
        const Cell& at, int tile, int item, bool over, const float (&c)[PACK], const float (&u)[PACK]) {
        float h[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            float before = memory(STATE, tile, item, k);
            h[k] = over ? before : before + u[k] * (c[k] - before);
            memory(STATE, tile, item, k) = h[k];
        }
        out.publish(at, tile, phase + 1, 0, h);
        make_room(at, tile);
        write(x.gates + at.gate + (GATES - 1) * HIDDEN, c, at, task);
        write(x.hidden + at.state, h, at, task);
    }

    // What follows on the products with the state.
    __device__ __forceinline__ void on_state(const Cell& at, int tile, int item, bool over, const float (&p)[GATES][PACK]) {
        float r[PACK], u[PACK], c[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            float first = p[0][k] + partials.sum(0, at.slice, at.place + k);
            if constexpr (RESET == NONE) {
                c[k] = activate(first, memory(BIAS, tile, item, k));
                u[k] = 1.0f;
            } else {
                r[k] = logistic(first);
                float second = p[GATES - 2][k] + partials.sum(GATES - 2, at.slice, at.place + k);
                u[k] = over ? 0.0f : logistic(second);
            }
            if constexpr (RESET == AFTER) {
                float product = partials.sum(FORWARD_PRODUCTS - 1, at.slice, at.place + k);
                c[k] = activate(p[GATES - 1][k] + r[k] * product, memory(BIAS, tile, item, k));
            }
        }
        if constexpr (RESET == BEFORE) {
            float gated[PACK];
#pragma unroll
            for (int k = 0; k < PACK; ++k) {
                gated[k] = r[k] * memory(STATE, tile, item, k);
                memory(UPDATE, tile, item, k) = u[k];
                memory(CANDIDATE, tile, item, k) = p[GATES - 1][k];
            }
            out.publish(at, tile, phase + 1, 0, gated);
            make_room(at, tile);
        } else {
            new_state(at, tile, item, over, c, u);
        }
        if constexpr (RESET != NONE) {
            write(x.gates + at.gate, r, at, task);
            write(x.gates + at.gate + (GATES - 2) * HIDDEN, u, at, task);
        }
    }

    // What follows on W_c (r*h).
    __device__ __forceinline__ void on_gated(const Cell& at, int tile, int item, bool over) {
        float u[PACK], c[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            float z = memory(CANDIDATE, tile, item, k) + partials.sum(0, at.slice, at.place + k);
            c[k] = activate(z, memory(BIAS, tile, item, k));
            u[k] = memory(UPDATE, tile, item, k);
        }
        new_state(at, tile, item, over, c, u);
    }

    __device__ void run() {
        start();
        ProjectedAhead<W> now, ahead;
        ahead.read(part, task, x, 0, 0);
        for (index_t step = 0; step < task.steps; ++step) {
            const index_t t = part.time(step, task.steps);
            for (int tile = 0; tile < part.tiles; ++tile) {
                now = ahead;
                bool last = tile + 1 == part.tiles;
                ahead.read(part, task, x, last ? 0 : tile + 1, last ? step + 1 : step);
                const Cells<W> at(part, task, x.lengths, tile, t);
                partials.open();
#pragma unroll
                for (int item = 0; item < items_of(W); ++item)
                    on_state(at.of[item], tile, item, t >= at.of[item].length, now.p[item]);
                partials.close();
            }
            next_phase();
            if constexpr (RESET == BEFORE) {
                for (int tile = 0; tile < part.tiles; ++tile) {
                    const Cells<W> at(part, task, x.lengths, tile, t);
                    partials.open();
#pragma unroll
                    for (int item = 0; item < items_of(W); ++item)
                        on_gated(at.of[item], tile, item, t >= at.of[item].length);
                    partials.close();
                }
                next_phase();
            }
        }
    }
};

template <int W>
__device__ __forceinline__ void forward(const Forward& x, const Task& task) {
    const Part part(task, W);
    uint4* matrix_room = reinterpret_cast<uint4*>(dynamic_shared());
    float* partial_room = reinterpret_cast<float*>(matrix_room + IN_SHARED * W * PAIRS * 64);
    Partials<FORWARD_PRODUCTS, W> partials(partial_room, part);
    if (threadIdx.x >= 32 * WARPS) {
        const Memory<W> memory = {partial_room + 2 * FORWARD_PRODUCTS * W * WARPS * PARTIAL, part.tiles};
        const Publisher<1> out = {Exchange<1>(x.exchange, part, task.tiles)};
        ForwardCells<W>{part, task, x, partials, memory, out, 0}.run();
        return;
    }
    const Matrices<W> matrices(x.fragments, matrix_room, part);
    const Exchange<1> in(x.exchange, part, task.tiles);
    index_t phase = 0;
    for (index_t step = 0; step < task.steps; ++step) {
        run_phase<OfState, W>(matrices, in, part, partials, phase++);
        if constexpr (RESET == BEFORE) run_phase<OfGated, W>(matrices, in, part, partials, phase++);
    }
}

// --------------------------------------------------------------------------------------------------------- backward

struct Backward {
    const float* grad_hidden;
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

// What a step saved, for one tile.
template <int W>
struct SavedAhead {
    struct Item {
        float grad[PACK], r[PACK], u[PACK], c[PACK], before[PACK], product[PACK];
    } of[items_of(W)];

    __device__ __forceinline__ void read(const Part& part, const Task& task, const Backward& x, int tile, index_t step) {
        if (step >= task.steps) return;
        const index_t t = part.time(task.steps - 1 - step, task.steps);
        const bool first = step == task.steps - 1;
        const index_t back = (part.backwards ? 1 : -1) * task.batch * task.directions * HIDDEN;
#pragma unroll
        for (int item = 0; item < items_of(W); ++item) {
            const Cell at = Cell::make<W>(part, task, x.lengths, tile, item, t);
            const float* before = !first ? x.hidden + at.state + back : x.initial ? x.initial + at.start : nullptr;
#pragma unroll
            for (int k = 0; k < PACK; ++k) {
                bool real = at.real(k, task);
                of[item].grad[k] = real ? x.grad_hidden[at.state + k] : 0.0f;
                of[item].c[k] = real ? load(x.gates + at.gate + (GATES - 1) * HIDDEN + k) : 0.0f;
                of[item].r[k] = real && GATES == 3 ? load(x.gates + at.gate + k) : 0.0f;
                of[item].u[k] = real && GATES == 3 ? load(x.gates + at.gate + (GATES == 3) * HIDDEN + k) : 0.0f;
                of[item].before[k] = real && before ? before[k] : 0.0f;
                of[item].product[k] = real && RESET == AFTER ? x.products[at.state + k] : 0.0f;
            }
        }
    }
};

// CARRIED: the part of the gradient of the state before the step that no product brings.
enum { CARRIED, OPENED, GATED, TO_THRESHOLD };

template <int W>
struct BackwardCells {
    const Part& part;
    const Task& task;
    const Backward& x;
    Partials<1, W>& partials;
    const Memory<W> memory;
    const Publisher<BACKWARD_VECTORS> out;
    index_t phase;

    __device__ __forceinline__ void make_room(const Cell& at, int tile) {
        if (phase < 0) return;
        out.empty(at, tile, phase + 3, 0);
        if (RESET == AFTER || (RESET == BEFORE && phase % 2 == 0)) out.empty(at, tile, phase + 3, BACKWARD_VECTORS > 1);
        if (RESET == AFTER) out.empty(at, tile, phase + 3, BACKWARD_VECTORS - 1);
        if (part.tiles == 1 && items_of(W) == 1) fence();
    }

    __device__ __forceinline__ void next_phase() {
        if (part.tiles > 1 || items_of(W) > 1) fence();
        ++phase;
    }

    // With the gradient `e` that later steps send to a step's state: publish what the products need, and write what is
    // known.
    __device__ __forceinline__ void start_step(
        const Cell& at, int tile, int item, bool over, const typename SavedAhead<W>::Item& saved, float (&e)[PACK]) {
        float d_c[PACK], d_u[PACK], d_r[PACK], second[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            e[k] += saved.grad[k];
            float r = saved.r[k], u = saved.u[k], c = saved.c[k];
            if (RESET == NONE) {
                d_c[k] = over ? 0.0f : e[k] * slope(c);
                memory(CARRIED, tile, item, k) = over ? e[k] : 0.0f;
            } else {
                d_c[k] = e[k] * u * slope(c);
                d_u[k] = e[k] * (c - saved.before[k]) * u * (1.0f - u);
                memory(CARRIED, tile, item, k) = e[k] * (1.0f - u);
            }
            if (RESET == BEFORE) {
                second[k] = r * saved.before[k];
                memory(OPENED, tile, item, k) = r;
                memory(GATED, tile, item, k) = second[k];
            }
            if (RESET == AFTER) {
                second[k] = d_c[k] * r;
                d_r[k] = d_c[k] * saved.product[k] * r * (1.0f - r);
            }
            memory(TO_THRESHOLD, tile, item, k) += sign(c) * d_c[k];
        }
        if constexpr (RESET == AFTER) {
            out.publish(at, tile, phase + 1, 0, d_r);
            out.publish(at, tile, phase + 1, BACKWARD_VECTORS > 1, d_u);
            out.publish(at, tile, phase + 1, BACKWARD_VECTORS - 1, second);
        } else {
            out.publish(at, tile, phase + 1, 0, d_c);
            if (RESET == BEFORE) out.publish(at, tile, phase + 2, BACKWARD_VECTORS - 1, d_u);
        }
        make_room(at, tile);
        stored* gradient = x.d_projected + at.gate;
        write(gradient + (GATES - 1) * HIDDEN, d_c, at, task);
        if constexpr (RESET != NONE) {
            write(gradient + (GATES == 3) * HIDDEN, d_u, at, task);
            write(x.factors + at.state, second, at, task);
        }
        if constexpr (RESET == AFTER) write(gradient, d_r, at, task);
    }

    // What follows on W_c' dL/dz_c.
    __device__ __forceinline__ void on_candidate(const Cell& at, int tile, int item) {
        float d_r[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            float d_gated = partials.sum(0, at.slice, at.place + k), r = memory(OPENED, tile, item, k);
            d_r[k] = d_gated * memory(GATED, tile, item, k) * (1.0f - r);
            memory(CARRIED, tile, item, k) += d_gated * r;
        }
        out.publish(at, tile, phase + 1, 0, d_r);
        make_room(at, tile);
        write(x.d_projected + at.gate, d_r, at, task);
    }

    __device__ __forceinline__ void finish(const Cell& at, int tile, int item, const float (&e)[PACK]) {
        if (x.d_initial) write(x.d_initial + at.start, e, at, task);
        float to_threshold[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) to_threshold[k] = memory(TO_THRESHOLD, tile, item, k);
        write(x.d_threshold + (at.row * task.directions + part.direction) * HIDDEN + at.unit, to_threshold, at, task);
    }

    __device__ __forceinline__ index_t time(index_t step) const {
        return part.time(task.steps - 1 - step, task.steps);
    }

    __device__ void start() {
        partials.begin();
        SavedAhead<W> saved;
        for (int tile = 0; tile < part.tiles; ++tile) {
            saved.read(part, task, x, tile, 0);
#pragma unroll
            for (int item = 0; item < items_of(W); ++item) {
                const Cell at = Cell::make<W>(part, task, x.lengths, tile, item, time(0));
                float e[PACK];
#pragma unroll
                for (int k = 0; k < PACK; ++k) memory(TO_THRESHOLD, tile, item, k) = e[k] = 0.0f;
                start_step(at, tile, item, time(0) >= at.length, saved.of[item], e);
            }
        }
        ++phase;
    }

    __device__ void run() {
        start();
        SavedAhead<W> now, ahead;
        ahead.read(part, task, x, 0, 1);
        for (index_t step = 0; step < task.steps; ++step) {
            if constexpr (RESET == BEFORE) {
                for (int tile = 0; tile < part.tiles; ++tile) {
                    const Cells<W> at(part, task, x.lengths, tile, time(step));
                    partials.open();
#pragma unroll
                    for (int item = 0; item < items_of(W); ++item) on_candidate(at.of[item], tile, item);
                    partials.close();
                }
                next_phase();
            }
            for (int tile = 0; tile < part.tiles; ++tile) {
                now = ahead;
                bool last = tile + 1 == part.tiles;
                ahead.read(part, task, x, last ? 0 : tile + 1, last ? step + 2 : step + 1);
                const bool more = step + 1 < task.steps;
                const index_t t = time(more ? step + 1 : step);
                const Cells<W> at(part, task, x.lengths, tile, t);
                partials.open();
#pragma unroll
                for (int item = 0; item < items_of(W); ++item) {
                    const Cell& here = at.of[item];
                    float e[PACK];
#pragma unroll
                    for (int k = 0; k < PACK; ++k)
                        e[k] = memory(CARRIED, tile, item, k) + partials.sum(0, here.slice, here.place + k);
                    if (more) start_step(here, tile, item, t >= here.length, now.of[item], e);
                    else finish(here, tile, item, e);
                }
                partials.close();
            }
            next_phase();
        }
    }
};

template <int W>
__device__ __forceinline__ void backward(const Backward& x, const Task& task) {
    const Part part(task, W);
    uint4* matrix_room = reinterpret_cast<uint4*>(dynamic_shared());
    float* partial_room = reinterpret_cast<float*>(matrix_room + IN_SHARED * W * PAIRS * 64);
    Partials<1, W> partials(partial_room, part);
    if (threadIdx.x >= 32 * WARPS) {
        const Memory<W> memory = {partial_room + 2 * W * WARPS * PARTIAL, part.tiles};
        const Publisher<BACKWARD_VECTORS> out = {Exchange<BACKWARD_VECTORS>(x.exchange, part, task.tiles)};
        BackwardCells<W>{part, task, x, partials, memory, out, -1}.run();
        return;
    }
    const Matrices<W> matrices(x.fragments, matrix_room, part);
    const Exchange<BACKWARD_VECTORS> in(x.exchange, part, task.tiles);
    index_t phase = 0;
    for (index_t step = 0; step < task.steps; ++step) {
        if constexpr (RESET == BEFORE) run_phase<OfCandidate, W>(matrices, in, part, partials, phase++);
        run_phase<OfGradients, W>(matrices, in, part, partials, phase++);
    }
}

// ---------------------------------------------------------------------------------------------------------- kernels

#define KERNELS(NAME, W)                                                                                               \
    extern "C" __global__ void __launch_bounds__(threads_of(W), 1) large_forward_##NAME(                               \
        const stored* projected, const float* initial, const uint4* fragments, const float* threshold,                 \
        const index_t* lengths, float* hidden, stored* gates, unsigned* exchange, index_t steps, index_t batch,        \
        index_t directions, index_t reverse, index_t first_direction, index_t first, index_t tiles) {                  \
        forward<W>({projected, initial, fragments, threshold, lengths, hidden, gates, exchange},                       \
                   {steps, batch, directions, reverse, static_cast<int>(first_direction), static_cast<int>(first),     \
                    static_cast<int>(tiles)});                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(threads_of(W), 1) large_backward_##NAME(                              \
        const float* grad_hidden, const float* initial, const uint4* fragments, const index_t* lengths,                \
        const float* hidden, const stored* gates, const float* products, stored* d_projected, stored* factors,         \
        float* d_initial, float* d_threshold, unsigned* exchange, index_t steps, index_t batch, index_t directions,    \
        index_t reverse, index_t first_direction, index_t first, index_t tiles) {                                      \
        backward<W>({grad_hidden, initial, fragments, lengths, hidden, gates, products, d_projected, factors,          \
                     d_initial, d_threshold, exchange},                                                                \
                    {steps, batch, directions, reverse, static_cast<int>(first_direction), static_cast<int>(first),    \
                     static_cast<int>(tiles)});                                                                        \
    }

KERNELS(narrow, NARROW)
#if WIDE > NARROW
KERNELS(wide, WIDE)
#endif

// ------------------------------------------------------------------------------------------------------ preparation

__device__ __forceinline__ unsigned weight_word(const float* matrix, int row, int column, bool transposed) {
    float x[PACK];
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        int i = transposed ? column + k : row, j = transposed ? row : column + k;
        x[k] = row < HIDDEN && column + k < HIDDEN ? matrix[static_cast<index_t>(i) * HIDDEN + j] : 0.0f;
    }
#if STORAGE == FLOAT32
    return TF32 ? round_tf32(x[0]) : __float_as_uint(x[0]);
#else
    return store(x[0]) | static_cast<unsigned>(store(x[1])) << 16;
#endif
}

// Fill `fragments` [D, GATES, slices, PAIRS, 2, 32 lanes, 4] from `weight` [D, GATES, H, H], and empty the exchange.
// There may be more slices than units need: those of the last block.
extern "C" __global__ void large_prepare(
    const float* weight, unsigned* fragments, unsigned* exchange, index_t matrices, index_t slices, index_t words,
    index_t transposed) {
    const index_t stride = static_cast<index_t>(gridDim.x) * blockDim.x;
    const index_t thread = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (index_t i = thread; i < matrices * slices * PAIRS * 256; i += stride) {
        int k = static_cast<int>(i % 4), lane = static_cast<int>(i / 4 % 32), half = static_cast<int>(i / 128 % 2);
        int pair = static_cast<int>(i / 256 % PAIRS), slice = static_cast<int>(i / (256 * PAIRS) % slices);
        index_t matrix = i / (256 * PAIRS * slices);
        int row = 16 * slice + lane / 4 + 8 * (k % 2);
        int word = 16 * pair + 4 * (lane % 4) + 2 * half + k / 2;
        fragments[i] = weight_word(weight + matrix * HIDDEN * HIDDEN, row, word * PACK, transposed != 0);
    }
    for (index_t i = thread; i < words; i += stride) exchange[i] = EMPTY;
}
