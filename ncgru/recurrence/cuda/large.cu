// The recurrence where many blocks hold the matrices together: forward and backward.
//
// A block owns SLICES_A_BLOCK slices of 16 hidden units, in all gates, for the whole sequence; the blocks of a *group*
// (one direction, up to `tiles` tiles of 8 rows of the batch) own all units between them. Each phase of a step is a product: every block
// needs a whole vector (the state, r*h, or gradients) of which it has made only its own slices. So blocks write what
// they have made into an exchange in global memory, which stays in the L2 cache, and read the rest from there.
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
// Set by the compiler's options: HIDDEN, SLICES_A_BLOCK, STORAGE, TF32, RESET, PHI, HELD_R, HELD_U, HELD_C.
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
#define CELL_THREADS (128 / PACK)
#define THREADS (32 * WARPS + CELL_THREADS)

#define SLICES ((HIDDEN + 15) / 16)
#define PAIRS ((SLICES + PACK - 1) / PACK)
#define WARPS (PAIRS < 8 ? PAIRS : 8)  // each has a pair to wait for, so that none runs ahead
#define SHARE ((PAIRS + WARPS - 1) / WARPS)  // pairs a warp
#define CHUNK (SHARE < 8 ? SHARE : 8)        // of them read at once

#define EMPTY 0xffffffffu
#define SLOTS 4
#define PARTIAL_ROW 20  // 16 units, and room that keeps the lanes of a warp on different banks
#define PARTIAL (8 * PARTIAL_ROW)
#define FULL 1  // named barriers: partial sums are there (2 of them), have been read (2 of them)
#define FREE 3
#define LOADED 5  // the product warps have the matrices

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

// What a launch is about: of D `directions` the `first_direction` and as many after it as the grid is deep, and of the
// batch the tiles from `first` on, at most `tiles` a group.
struct Task {
    index_t steps, batch, directions, reverse;
    int first_direction, first, tiles;
};

// This block's part of the task.
struct Part {
    int direction, slice, slices, tile, tiles, parts;  // first and number of slices; first and number of tiles
    index_t group;
    bool backwards;

    __device__ explicit Part(const Task& task) {
        direction = task.first_direction + blockIdx.z;
        slice = blockIdx.x * SLICES_A_BLOCK;
        slices = min(SLICES_A_BLOCK, SLICES - slice);
        int all = static_cast<int>((task.batch + 7) / 8);
        tile = task.first + blockIdx.y * task.tiles;
        tiles = min(task.tiles, all - tile);
        parts = slices * tiles;
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

// This lane's words of `CHUNK` pairs of a vector, from the `first`-th of the warp's share on, when they have come.
template <int FIRST>
__device__ __forceinline__ void receive(uint4 (&words)[CHUNK], const unsigned* vector) {
    const uint4* from = reinterpret_cast<const uint4*>(vector) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        words[i] = make_uint4(0, 0, 0, 0);
        int pair = share_pair(FIRST + i);
        if (FIRST + i < SHARE && pair < PAIRS && exists(pair)) words[i] = load_relaxed(from + pair * 32);
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        int pair = share_pair(FIRST + i);
        if (FIRST + i < SHARE && pair < PAIRS)
            while (any_lane(is_empty(words[i])))
                if (exists(pair)) words[i] = load_relaxed(from + pair * 32);
    }
}

// The fragments of this warp's share of the block's matrices.
struct Matrices {
    unsigned kept[IN_REGISTERS ? IN_REGISTERS : 1][SHARE][2][4];
    const uint4* shared;  // [IN_SHARED, slices, PAIRS, 2, 32 lanes]
    const uint4* global;  // [GATES, SLICES, PAIRS, 2, 32 lanes]
    int slice, slices;

    __device__ Matrices(const uint4* fragments, uint4* room, const Part& part) : shared(room) {
        slice = part.slice, slices = part.slices;
        global = fragments + static_cast<index_t>(part.direction) * GATES * SLICES * PAIRS * 64 + threadIdx.x % 32;
        if constexpr (GATES == 3) {
            fetch<0>(room);
            fetch<GATES - 2>(room);
        }
        fetch<GATES - 1>(room);
        shared += threadIdx.x % 32;
        barrier_sync(LOADED, 32 * WARPS);
    }

    template <int GATE>
    __device__ __forceinline__ void fetch(uint4* room) {
        constexpr int where = held(GATE), place = count_held(where, GATE);
        const uint4* matrix = global + (GATE * SLICES + slice) * PAIRS * 64;
        if constexpr (where == REGISTERS) {
#pragma unroll
            for (int i = 0; i < SHARE; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint4 x = make_uint4(0, 0, 0, 0);
                    if (share_pair(i) < PAIRS) x = matrix[(share_pair(i) * 2 + half) * 32];
                    kept[place][i][half][0] = x.x, kept[place][i][half][1] = x.y;
                    kept[place][i][half][2] = x.z, kept[place][i][half][3] = x.w;
                }
        }
        if constexpr (where == SHARED)
            for (int i = threadIdx.x; i < slices * PAIRS * 64; i += 32 * WARPS)
                room[place * slices * PAIRS * 64 + i] = matrix[i - static_cast<int>(threadIdx.x) % 32];
    }

    template <int GATE>
    __device__ __forceinline__ void read(unsigned (&a)[4], int i, int half, int of_slice) const {
        constexpr int where = held(GATE), place = count_held(where, GATE);
        if constexpr (where == REGISTERS) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                a[k] = kept[place][i][half][k];
                if (SPLIT && IN_REGISTERS * SHARE > 6) hide(a[k]);  // high and low would take twice the registers
            }
        } else {
            int pair = share_pair(i);
            uint4 x = where == SHARED
                          ? shared[(((place * slices + of_slice) * PAIRS + pair) * 2 + half) * 32]
                          : global[(((GATE * SLICES + slice + of_slice) * PAIRS + pair) * 2 + half) * 32];
            a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
        }
    }
};

template <int COUNT>
__device__ __forceinline__ void split(const unsigned (&x)[COUNT], unsigned (&high)[COUNT], unsigned (&low)[COUNT]) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
        high[k] = round_tf32(__uint_as_float(x[k]));
        low[k] = round_tf32(__uint_as_float(x[k]) - __uint_as_float(high[k]));
    }
}

// Partial sums of this warp: chains that do not wait for each other.
#define CHAINS 4
struct Sums {
    float of[CHAINS][4];

    __device__ __forceinline__ void add(const unsigned (&a)[4], const unsigned (&b)[2], int half) {
#if STORAGE == BFLOAT16
        mma_bfloat16(of[half], a, b);
#elif STORAGE == FLOAT16
        mma_float16(of[half], a, b);
#else
        mma_tf32(of[half], a, b);
#endif
    }

    __device__ __forceinline__ float total(int k) const { return (of[0][k] + of[1][k]) + (of[2][k] + of[3][k]); }
};

// sums[m] += matrix of gate FIRST+m times a vector.
template <int FIRST, int COUNT, int FROM = 0>
__device__ __forceinline__ void multiply(
    Sums (&sums)[COUNT], const Matrices& matrices, int of_slice, const unsigned* vector) {
    uint4 words[CHUNK];
    receive<FROM>(words, vector);
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if (FROM + i >= SHARE || share_pair(FROM + i) >= PAIRS) continue;
        const unsigned all[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned b[2] = {all[2 * half], all[2 * half + 1]};
            unsigned high[2], low[2];
            if constexpr (SPLIT) split(b, high, low);
            auto gate = [&](Sums& sum, const unsigned (&a)[4]) {
                if constexpr (SPLIT) {
                    unsigned a_high[4], a_low[4];
                    split(a, a_high, a_low);
                    sum.add(a_low, high, 2 + half);
                    sum.add(a_high, low, 2 + half);
                    sum.add(a_high, high, half);
                } else {
                    sum.add(a, b, half);
                }
            };
            unsigned a[4];
            matrices.read<FIRST>(a, FROM + i, half, of_slice);
            gate(sums[0], a);
            if constexpr (COUNT > 1) {
                matrices.read<FIRST + 1>(a, FROM + i, half, of_slice);
                gate(sums[1], a);
            }
            if constexpr (COUNT > 2) {
                matrices.read<FIRST + 2>(a, FROM + i, half, of_slice);
                gate(sums[2], a);
            }
        }
    }
    if constexpr (FROM + CHUNK < SHARE) multiply<FIRST, COUNT, FROM + CHUNK>(sums, matrices, of_slice, vector);
}

// The partial sums of COUNT products of one part: [2 turns, COUNT, WARPS, PARTIAL].
template <int COUNT>
struct Partials {
    float* room;
    int turn = 0;
    bool several;  // parts take turns with the two rooms; a single one's turns are phases apart

    __device__ Partials(float* shared, const Part& part) : room(shared), several(part.parts > 1) {}

    __device__ float* here() const { return room + turn % 2 * (COUNT * WARPS * PARTIAL); }

    // A product warp leaves its sums.
    template <int USED>
    __device__ __forceinline__ void leave(const Sums (&sums)[USED]) {
        if (several) barrier_sync(FREE + turn % 2, THREADS);
        int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < USED; ++m) {
            float* to = here() + (m * WARPS + threadIdx.x / 32) * PARTIAL + 2 * c * PARTIAL_ROW + g;
            to[0] = sums[m].total(0), to[PARTIAL_ROW] = sums[m].total(1);
            to[8] = sums[m].total(2), to[PARTIAL_ROW + 8] = sums[m].total(3);
        }
        barrier_arrive(FULL + turn % 2, THREADS);
        ++turn;
    }

    // A cell thread waits for sums, reads them, and gives the room back.
    __device__ __forceinline__ void open() { barrier_sync(FULL + turn % 2, THREADS); }

    __device__ __forceinline__ float sum(int m, int place) const {
        const float* from = here() + m * WARPS * PARTIAL + place;
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) total += from[warp * PARTIAL];
        return total;
    }

    __device__ __forceinline__ void close() {
        if (several) barrier_arrive(FREE + turn % 2, THREADS);
        ++turn;
    }

    __device__ void begin() const {
        if (!several) return;
        barrier_arrive(FREE, THREADS);
        barrier_arrive(FREE + 1, THREADS);
    }
};

template <int COUNT>
__device__ __forceinline__ void clear(Sums (&sums)[COUNT]) {
#pragma unroll
    for (int m = 0; m < COUNT; ++m)
#pragma unroll
        for (int k = 0; k < 4 * CHAINS; ++k) sums[m].of[k / 4][k % 4] = 0.0f;
}

// All products of a pass. `product(sums, part's slice, tile, phase)` takes one.
template <int PHASES, int COUNT, typename Product>
__device__ __forceinline__ void run_products(
    const Part& part, index_t steps, Partials<COUNT>& partials, Product product) {
    for (index_t phase = 0; phase < steps * PHASES; ++phase) {
        for (int j = 0; j < part.parts; ++j) product(j % part.slices, j / part.slices, phase);
        fence();  // before looking at words that were emptied two phases ago
    }
}

// ------------------------------------------------------------------------------------------------------- cell warps

// A cell thread's place in one part: PACK neighbouring units of one row.
struct Cell {
    int place;       // of the first unit in the partial sums
    int word;        // in a tile of a vector
    int tile;        // of the group's
    index_t row;     // of the batch
    int unit;        // the first
    index_t length;  // 0 where the row does not exist

    __device__ Cell(const Part& part, int j, const Task& task, const index_t* lengths) {
        int thread = threadIdx.x - 32 * WARPS;
        int row_of_tile = thread / (16 / PACK), unit_of_slice = thread % (16 / PACK) * PACK;
        int slice = part.slice + j % part.slices;
        place = row_of_tile * PARTIAL_ROW + unit_of_slice;
        tile = j / part.slices;
        word = slice / PACK * 128 + row_of_tile * 16 + (slice % PACK) * 8 + unit_of_slice / PACK;
        if (PACK == 1) word = slice * 128 + row_of_tile * 16 + unit_of_slice;
        row = static_cast<index_t>(part.tile + tile) * 8 + row_of_tile;
        unit = slice * 16 + unit_of_slice;
        length = row >= task.batch ? 0 : (lengths ? lengths[row] : task.steps);
    }

    __device__ bool real(int k, const Task& task) const { return row < task.batch && unit + k < HIDDEN; }
};

__device__ __forceinline__ unsigned word_of(const float (&x)[PACK]) {
#if STORAGE == FLOAT32
    unsigned word = TF32 ? round_tf32(x[0]) : __float_as_uint(x[0]);
#else
    unsigned word = store(x[0]) | static_cast<unsigned>(store(x[1])) << 16;
#endif
    return word == EMPTY ? 0x7fffffffu : word;  // another NaN
}

// What cell threads remember of each part from phase to phase: [FIELDS, parts, PACK, CELL_THREADS].
struct Memory {
    float* room;
    int parts;

    __device__ float& operator()(int field, int j, int k) const {
        return room[((field * parts + j) * PACK + k) * CELL_THREADS + threadIdx.x - 32 * WARPS];
    }
};

template <int VECTORS>
struct Publisher {
    Exchange<VECTORS> exchange;

    __device__ __forceinline__ void publish(const Cell& at, index_t phase, int vector, const float (&x)[PACK]) const {
        store_relaxed(exchange.at(phase, vector, at.tile) + at.word, word_of(x));
    }

    __device__ __forceinline__ void empty(const Cell& at, index_t phase, int vector) const {
        store_relaxed(exchange.at(phase, vector, at.tile) + at.word, EMPTY);
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
#define FORWARD_PHASES (RESET == BEFORE ? 2 : 1)

// A cell thread's view of one part at one step.
struct ForwardCell {
    Cell at;
    index_t state, gate;  // where hidden and gates of the first unit lie
    bool over;

    __device__ ForwardCell(const Part& part, int j, const Task& task, const Forward& x, index_t t)
        : at(part, j, task, x.lengths) {
        state = ((t * task.batch + at.row) * task.directions + part.direction) * HIDDEN + at.unit;
        gate = ((t * task.batch + at.row) * task.directions + part.direction) * (GATES * HIDDEN) + at.unit;
        over = t >= at.length;
    }

    // Padding may hold anything, NaN included.
    __device__ void read(float (&p)[PACK], const Forward& x, const Task& task, int of_gate) const {
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            p[k] = at.real(k, task) && !over ? load(x.projected + gate + of_gate * HIDDEN + k) : 0.0f;
    }

    __device__ void write_gate(const float (&y)[PACK], const Forward& x, const Task& task, int of_gate) const {
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            if (at.real(k, task)) x.gates[gate + of_gate * HIDDEN + k] = store(y[k]);
    }

    __device__ void write_state(const float (&h)[PACK], const Forward& x, const Task& task) const {
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            if (at.real(k, task)) x.hidden[state + k] = h[k];
    }
};

enum { STATE, UPDATE, CANDIDATE, BIAS, FORWARD_FIELDS };

__device__ void forward_cells(
    const Part& part, const Task& task, const Forward& x, Partials<FORWARD_PRODUCTS>& partials, const Memory& memory) {
    Publisher<1> out = {Exchange<1>(x.exchange, part, task.tiles)};
    partials.begin();
    for (int j = 0; j < part.parts; ++j) {
        Cell at(part, j, task, x.lengths);
        float h[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            index_t unit = static_cast<index_t>(part.direction) * HIDDEN + at.unit + k;
            index_t start = (static_cast<index_t>(part.direction) * task.batch + at.row) * HIDDEN + at.unit + k;
            memory(STATE, j, k) = h[k] = at.real(k, task) ? x.initial[start] : 0.0f;
            memory(BIAS, j, k) = x.threshold && at.unit + k < HIDDEN ? x.threshold[unit] : 0.0f;
        }
        out.publish(at, 0, 0, h);
    }

    index_t phase = 0;
    // Having published for the next phase: make room two phases further on, and let that be known.
    auto make_room = [&](const Cell& at) {
        out.empty(at, phase + 3, 0);
        if (part.parts == 1) fence();
    };
    auto next_phase = [&] {
        if (part.parts > 1) fence();
        ++phase;
    };
    auto new_state = [&](const ForwardCell& cell, int j, const float (&c)[PACK], const float (&u)[PACK]) {
        float h[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            float before = memory(STATE, j, k);
            h[k] = cell.over ? before : before + u[k] * (c[k] - before);
            memory(STATE, j, k) = h[k];
        }
        out.publish(cell.at, phase + 1, 0, h);
        make_room(cell.at);
        cell.write_gate(c, x, task, GATES - 1);
        cell.write_state(h, x, task);
    };
    for (index_t step = 0; step < task.steps; ++step) {
        index_t t = part.time(step, task.steps);
        for (int j = 0; j < part.parts; ++j) {
            ForwardCell cell(part, j, task, x, t);
            float p[3][PACK], r[PACK], u[PACK], c[PACK];
#pragma unroll
            for (int gate = 0; gate < GATES; ++gate) cell.read(p[gate], x, task, gate);
            partials.open();
            if constexpr (RESET == NONE) {
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    c[k] = activate(p[0][k] + partials.sum(0, cell.at.place + k), memory(BIAS, j, k));
                    u[k] = 1.0f;
                }
                partials.close();
                new_state(cell, j, c, u);
                continue;
            } else {
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    r[k] = logistic(p[0][k] + partials.sum(0, cell.at.place + k));
                    u[k] = cell.over ? 0.0f : logistic(p[1][k] + partials.sum(1, cell.at.place + k));
                }
            }
            if constexpr (RESET == BEFORE) {
                float gated[PACK];
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    gated[k] = r[k] * memory(STATE, j, k);
                    memory(UPDATE, j, k) = u[k];
                    memory(CANDIDATE, j, k) = p[GATES - 1][k];
                }
                out.publish(cell.at, phase + 1, 0, gated);
                partials.close();
                make_room(cell.at);
            } else if constexpr (RESET == AFTER) {
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    float product = partials.sum(FORWARD_PRODUCTS - 1, cell.at.place + k);
                    c[k] = activate(p[GATES - 1][k] + r[k] * product, memory(BIAS, j, k));
                }
                partials.close();
                new_state(cell, j, c, u);
            }
            cell.write_gate(r, x, task, 0);
            cell.write_gate(u, x, task, GATES == 1 ? 0 : 1);
        }
        next_phase();
        if constexpr (RESET == BEFORE) {
            for (int j = 0; j < part.parts; ++j) {
                ForwardCell cell(part, j, task, x, t);
                float u[PACK], c[PACK];
                partials.open();
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    float z = memory(CANDIDATE, j, k) + partials.sum(0, cell.at.place + k);
                    c[k] = activate(z, memory(BIAS, j, k));
                    u[k] = memory(UPDATE, j, k);
                }
                partials.close();
                new_state(cell, j, c, u);
            }
            next_phase();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) large_forward(
    const stored* projected, const float* initial, const uint4* fragments, const float* threshold,
    const index_t* lengths, float* hidden, stored* gates, unsigned* exchange, index_t steps, index_t batch,
    index_t directions, index_t reverse, index_t first_direction, index_t first, index_t tiles) {
    const Forward x = {projected, initial, fragments, threshold, lengths, hidden, gates, exchange};
    const Task task = {
        steps, batch, directions, reverse, static_cast<int>(first_direction), static_cast<int>(first), static_cast<int>(tiles)};
    const Part part(task);
    uint4* matrix_room = reinterpret_cast<uint4*>(dynamic_shared());
    float* partial_room = reinterpret_cast<float*>(matrix_room + IN_SHARED * SLICES_A_BLOCK * PAIRS * 64);
    Partials<FORWARD_PRODUCTS> partials(partial_room, part);
    if (threadIdx.x >= 32 * WARPS) {
        forward_cells(part, task, x, partials, Memory{partial_room + 2 * FORWARD_PRODUCTS * WARPS * PARTIAL, part.parts});
        return;
    }
    const Matrices matrices(fragments, matrix_room, part);
    const Exchange<1> in(exchange, part, task.tiles);
    run_products<FORWARD_PHASES>(part, steps, partials, [&](int slice, int tile, index_t phase) {
        const unsigned* vector = in.at(phase, 0, tile);
        if (RESET == BEFORE && phase % 2 == 1) {
            Sums sums[1];
            clear(sums);
            multiply<GATES - 1, 1>(sums, matrices, slice, vector);
            partials.leave(sums);
        } else {
            Sums sums[FORWARD_PRODUCTS];
            clear(sums);
            multiply<0, FORWARD_PRODUCTS>(sums, matrices, slice, vector);
            partials.leave(sums);
        }
    });
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
    stored* operands;
    float* d_initial;
    float* d_threshold;
    unsigned* exchange;
};

// Vectors in a slot. "before": 0 is dL/dz_c in even phases and dL/dz_r in odd ones, 1 (odd phases) dL/dz_u, which is
// published with dL/dz_c. "after": dL/dz_r, dL/dz_u, dL/dm. "none": dL/dz_c.
#define BACKWARD_VECTORS (RESET == BEFORE ? 2 : GATES)
#define BACKWARD_PHASES (RESET == BEFORE ? 2 : 1)

// What a step saved, for one part.
struct Saved {
    float grad[PACK], r[PACK], u[PACK], c[PACK], before[PACK], product[PACK];
};

struct BackwardCell {
    Cell at;
    index_t t, state, gate, start;

    __device__ BackwardCell(const Part& part, int j, const Task& task, const Backward& x, index_t step)
        : at(part, j, task, x.lengths) {
        t = part.backwards ? step : task.steps - 1 - step;
        state = ((t * task.batch + at.row) * task.directions + part.direction) * HIDDEN + at.unit;
        gate = ((t * task.batch + at.row) * task.directions + part.direction) * (GATES * HIDDEN) + at.unit;
        start = (static_cast<index_t>(part.direction) * task.batch + at.row) * HIDDEN + at.unit;
    }

    __device__ void read(Saved& saved, const Part& part, const Task& task, const Backward& x) const {
        const index_t stride = task.batch * task.directions * HIDDEN;
        const bool first = t == (part.backwards ? task.steps - 1 : 0);
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            bool real = at.real(k, task);
            saved.grad[k] = real ? x.grad_hidden[state + k] : 0.0f;
            saved.c[k] = real ? load(x.gates + gate + (GATES - 1) * HIDDEN + k) : 0.0f;
            saved.r[k] = real && GATES == 3 ? load(x.gates + gate + k) : 0.0f;
            saved.u[k] = real && GATES == 3 ? load(x.gates + gate + (GATES == 3) * HIDDEN + k) : 0.0f;
            const float* from = first ? x.initial + start : x.hidden + (part.backwards ? state + stride : state - stride);
            saved.before[k] = real ? from[k] : 0.0f;
            saved.product[k] = real && RESET == AFTER ? x.products[state + k] : 0.0f;
        }
    }

    __device__ void write_gradient(const float (&d)[PACK], const Backward& x, const Task& task, int of_gate) const {
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            if (at.real(k, task)) x.d_projected[gate + of_gate * HIDDEN + k] = store(d[k]);
    }

    __device__ void write_operand(const float (&y)[PACK], const Backward& x, const Task& task, int which) const {
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            if (at.real(k, task)) x.operands[2 * (state - at.unit) + which * HIDDEN + at.unit + k] = store(y[k]);
    }
};

// CARRIED: the part of the gradient of the state before the step that no product brings.
enum { CARRIED, OPENED, GATED, TO_THRESHOLD, BACKWARD_FIELDS };

__device__ void backward_cells(
    const Part& part, const Task& task, const Backward& x, Partials<1>& partials, const Memory& memory) {
    Publisher<BACKWARD_VECTORS> out = {Exchange<BACKWARD_VECTORS>(x.exchange, part, task.tiles)};
    partials.begin();
    index_t phase = -1;
    auto make_room = [&](const Cell& at) {
        if (phase >= 0) {
            out.empty(at, phase + 3, 0);
            if (RESET == AFTER || (RESET == BEFORE && phase % 2 == 0)) out.empty(at, phase + 3, BACKWARD_VECTORS > 1);
            if (RESET == AFTER) out.empty(at, phase + 3, BACKWARD_VECTORS - 1);
            if (part.parts == 1) fence();
        }
    };
    auto next_phase = [&] {
        if (part.parts > 1) fence();
        ++phase;
    };
    // With the whole gradient of a step's state: publish what the products need, and write what is known.
    auto start_step = [&](const BackwardCell& cell, const Saved& saved, int j, float (&e)[PACK]) {
        float d_c[PACK], d_u[PACK], d_r[PACK], second[PACK];
        bool over = cell.t >= cell.at.length;
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            e[k] += saved.grad[k];
            float r = saved.r[k], u = saved.u[k], c = saved.c[k];
            if (RESET == NONE) {
                d_c[k] = over ? 0.0f : e[k] * slope(c);
                memory(CARRIED, j, k) = over ? e[k] : 0.0f;
            } else {
                d_c[k] = e[k] * u * slope(c);
                d_u[k] = e[k] * (c - saved.before[k]) * u * (1.0f - u);
                memory(CARRIED, j, k) = e[k] * (1.0f - u);
            }
            if (RESET == BEFORE) {
                second[k] = r * saved.before[k];
                memory(OPENED, j, k) = r;
                memory(GATED, j, k) = second[k];
            }
            if (RESET == AFTER) {
                second[k] = d_c[k] * r;
                d_r[k] = d_c[k] * saved.product[k] * r * (1.0f - r);
            }
            memory(TO_THRESHOLD, j, k) += sign(c) * d_c[k];
        }
        if constexpr (RESET == AFTER) {
            out.publish(cell.at, phase + 1, 0, d_r);
            out.publish(cell.at, phase + 1, BACKWARD_VECTORS > 1, d_u);
            out.publish(cell.at, phase + 1, BACKWARD_VECTORS - 1, second);
        } else {
            out.publish(cell.at, phase + 1, 0, d_c);
            if (RESET == BEFORE) out.publish(cell.at, phase + 2, BACKWARD_VECTORS - 1, d_u);
        }
        make_room(cell.at);
        cell.write_gradient(d_c, x, task, GATES - 1);
        cell.write_operand(saved.before, x, task, 0);
        if constexpr (RESET != NONE) {
            cell.write_gradient(d_u, x, task, GATES == 3);
            cell.write_operand(second, x, task, 1);
        }
        if constexpr (RESET == AFTER) cell.write_gradient(d_r, x, task, 0);
    };
    for (int j = 0; j < part.parts; ++j) {
        BackwardCell cell(part, j, task, x, 0);
        Saved saved;
        float e[PACK];
        cell.read(saved, part, task, x);
#pragma unroll
        for (int k = 0; k < PACK; ++k) memory(TO_THRESHOLD, j, k) = e[k] = 0.0f;
        start_step(cell, saved, j, e);
    }
    ++phase;
    for (index_t step = 0; step < task.steps; ++step) {
        if constexpr (RESET == BEFORE) {
            for (int j = 0; j < part.parts; ++j) {
                BackwardCell cell(part, j, task, x, step);
                float d_r[PACK];
                partials.open();
#pragma unroll
                for (int k = 0; k < PACK; ++k) {
                    float d_gated = partials.sum(0, cell.at.place + k), r = memory(OPENED, j, k);
                    d_r[k] = d_gated * memory(GATED, j, k) * (1.0f - r);
                    memory(CARRIED, j, k) += d_gated * r;
                }
                partials.close();
                out.publish(cell.at, phase + 1, 0, d_r);
                make_room(cell.at);
                cell.write_gradient(d_r, x, task, 0);
            }
            next_phase();
        }
        for (int j = 0; j < part.parts; ++j) {
            BackwardCell cell(part, j, task, x, min(step + 1, task.steps - 1));
            Saved saved;
            float e[PACK];
            cell.read(saved, part, task, x);
            partials.open();
#pragma unroll
            for (int k = 0; k < PACK; ++k) e[k] = memory(CARRIED, j, k) + partials.sum(0, cell.at.place + k);
            partials.close();
            if (step + 1 < task.steps) {
                start_step(cell, saved, j, e);
                continue;
            }
#pragma unroll
            for (int k = 0; k < PACK; ++k)
                if (cell.at.real(k, task)) {
                    index_t row = (cell.at.row * task.directions + part.direction) * HIDDEN + cell.at.unit + k;
                    x.d_initial[cell.start + k] = e[k];
                    x.d_threshold[row] = memory(TO_THRESHOLD, j, k);
                }
        }
        next_phase();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) large_backward(
    const float* grad_hidden, const float* initial, const uint4* fragments, const index_t* lengths,
    const float* hidden, const stored* gates, const float* products, stored* d_projected, stored* operands,
    float* d_initial, float* d_threshold, unsigned* exchange, index_t steps, index_t batch, index_t directions,
    index_t reverse, index_t first_direction, index_t first, index_t tiles) {
    const Backward x = {grad_hidden, initial,  fragments,   lengths,  hidden,    gates,
                        products,    d_projected, operands, d_initial, d_threshold, exchange};
    const Task task = {
        steps, batch, directions, reverse, static_cast<int>(first_direction), static_cast<int>(first), static_cast<int>(tiles)};
    const Part part(task);
    uint4* matrix_room = reinterpret_cast<uint4*>(dynamic_shared());
    float* partial_room = reinterpret_cast<float*>(matrix_room + IN_SHARED * SLICES_A_BLOCK * PAIRS * 64);
    Partials<1> partials(partial_room, part);
    if (threadIdx.x >= 32 * WARPS) {
        backward_cells(part, task, x, partials, Memory{partial_room + 2 * WARPS * PARTIAL, part.parts});
        return;
    }
    const Matrices matrices(fragments, matrix_room, part);
    const Exchange<BACKWARD_VECTORS> in(exchange, part, task.tiles);
    run_products<BACKWARD_PHASES>(part, steps, partials, [&](int slice, int tile, index_t phase) {
        Sums sums[1];
        clear(sums);
        if constexpr (RESET == NONE) {
            multiply<0, 1>(sums, matrices, slice, in.at(phase, 0, tile));
        } else if constexpr (RESET == AFTER) {
            multiply<0, 1>(sums, matrices, slice, in.at(phase, 0, tile));
            multiply<GATES - 2, 1>(sums, matrices, slice, in.at(phase, BACKWARD_VECTORS > 1, tile));
            multiply<GATES - 1, 1>(sums, matrices, slice, in.at(phase, BACKWARD_VECTORS - 1, tile));
        } else if (phase % 2 == 0) {
            multiply<GATES - 1, 1>(sums, matrices, slice, in.at(phase, 0, tile));
        } else {  // dL/dz_u has been there for a while: its product fills the wait for dL/dz_r
            multiply<GATES - 2, 1>(sums, matrices, slice, in.at(phase, BACKWARD_VECTORS - 1, tile));
            multiply<0, 1>(sums, matrices, slice, in.at(phase, 0, tile));
        }
        partials.leave(sums);
    });
}

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

// Fill `fragments` [D, GATES, SLICES, PAIRS, 2, 32 lanes, 4] from `weight` [D, GATES, H, H], and empty the exchange.
extern "C" __global__ void large_prepare(
    const float* weight, unsigned* fragments, unsigned* exchange, index_t matrices, index_t words, index_t transposed) {
    const index_t stride = static_cast<index_t>(gridDim.x) * blockDim.x;
    const index_t thread = static_cast<index_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (index_t i = thread; i < matrices * SLICES * PAIRS * 256; i += stride) {
        int k = static_cast<int>(i % 4), lane = static_cast<int>(i / 4 % 32), half = static_cast<int>(i / 128 % 2);
        int pair = static_cast<int>(i / 256 % PAIRS), slice = static_cast<int>(i / (256 * PAIRS) % SLICES);
        index_t matrix = i / (256 * PAIRS * SLICES);
        int row = 16 * slice + lane / 4 + 8 * (k % 2);
        int word = 16 * pair + 4 * (lane % 4) + 2 * half + k / 2;
        fragments[i] = weight_word(weight + matrix * HIDDEN * HIDDEN, row, word * PACK, transposed != 0);
    }
    for (index_t i = thread; i < words; i += stride) exchange[i] = EMPTY;
}
