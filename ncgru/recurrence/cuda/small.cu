// The recurrence where one block holds the matrices in its registers: forward and backward, exact float32.
//
// A block runs ROWS rows of the batch (of one direction) through all time steps. A group of LANES neighbouring lanes
// owns UNITS hidden units in all gates; each lane holds COLUMNS columns of their matrix rows, and the vector that the
// matrices act on lies in shared memory. So a product is
//
//   1. each lane's part of each dot product, from registers;
//   2. a transposing reduction over the group: lanes exchange halves of what they hold, until each holds one sum.
//
// A lane's place in its group then says which sum it holds (its `Role`): the high bits the unit, the next the row of
// the batch. Lanes that differ in the remaining bits hold the same, and do the same with it; the first of them writes.
//
// What bounds a step is, beside the products' instructions, the shared memory's port: a lane takes COLUMNS numbers for
// each vector, which makes COLUMNS cycles a warp, and one cycle for each shuffle. More UNITS for a lane means fewer
// numbers read and more shuffles; more registers for each thread (fewer threads) means fewer of both.
//
// reset="before" has two products a step that depend on each other, so two barriers. Forward, the product for u is
// needed late, and backward W_u^T dL/dz_u early: both stand where they fill the time in which a lane waits for
// shuffles. The other two resets have one product; two rooms for its vector take turns, so one barrier will do.
//
// Values of the next step are read as soon as those of this one are used up, and were brought into the second-level
// cache AHEAD steps before.
//
// Set by the compiler's options: HIDDEN, LANES, UNITS, STORAGE, RESET, PHI.
//
// Shapes: D directions, the second one (or the only one, if `reverse`) from the last step to the first; G gates:
// r, u, c or c alone.

#include "numbers.cuh"

#define COLUMNS ((HIDDEN + LANES - 1) / LANES)
#define WIDTH (COLUMNS * LANES)
#define GROUPS ((HIDDEN + UNITS - 1) / UNITS)
#define THREADS ((GROUPS * LANES + 31) / 32 * 32)
#define AHEAD 6

static_assert(LANES >= 4 && LANES <= 32, "vectors are read in fours, and a group lies in one warp");

constexpr int log2_of(int x) { return x == 1 ? 0 : 1 + log2_of(x / 2); }

template <int ROWS>
struct Role {
    static_assert(UNITS * ROWS <= LANES, "each lane of a group ends with one sum");
    static constexpr int unit_shift = log2_of(LANES) - log2_of(UNITS);
    static constexpr int row_shift = unit_shift - log2_of(ROWS);
    int unit;    // of all hidden units
    int row;     // of the block's rows
    bool first;  // of the lanes that hold the same

    __device__ Role() {
        int lane = threadIdx.x % LANES;
        unit = threadIdx.x / LANES * UNITS + (lane >> unit_shift);
        row = (lane >> row_shift) % ROWS;
        first = lane % (1 << row_shift) == 0;
    }
};

// ------------------------------------------------------------------------------------------------------- a product

// Which column is a lane's k-th: fours of neighbours, then two, then one, so that a lane reads wide words and the
// lanes of a group read neighbouring ones.
__device__ __forceinline__ int column_of(int k) {
    int lane = threadIdx.x % LANES, fours = COLUMNS / 4 * 4, pairs = COLUMNS / 2 * 2;
    if (k < fours) return k / 4 * 4 * LANES + 4 * lane + k % 4;
    if (k < pairs) return fours * LANES + 2 * lane + k % 2;
    return pairs * LANES + lane;
}

// A lane's share of its units' matrix rows, or of the transposed matrix's.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_share(float (&share)[UNITS][COLUMNS], const Array matrix) {
    int first = threadIdx.x / LANES * UNITS;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            int column = column_of(k);
            bool there = first + unit < HIDDEN && column < HIDDEN;
            int at = TRANSPOSED ? column * HIDDEN + first + unit : (first + unit) * HIDDEN + column;
            share[unit][k] = there ? as_operand(matrix[at]) : 0.0f;
        }
}

// A lane's numbers of a vector of WIDTH in shared memory.
__device__ __forceinline__ void read_vector(float (&x)[COLUMNS], const float* vector) {
#pragma unroll
    for (int k = 0; k + 3 < COLUMNS; k += 4) {
        float4 four = *reinterpret_cast<const float4*>(vector + column_of(k));
        x[k] = four.x;
        x[k + 1] = four.y;
        x[k + 2] = four.z;
        x[k + 3] = four.w;
    }
    if constexpr (COLUMNS / 2 % 2 == 1) {
        constexpr int k = COLUMNS / 4 * 4;
        float2 two = *reinterpret_cast<const float2*>(vector + column_of(k));
        x[k] = two.x;
        x[k + 1] = two.y;
    }
    if constexpr (COLUMNS % 2 == 1) x[COLUMNS - 1] = vector[column_of(COLUMNS - 1)];
}

template <int ROWS>
struct Vectors {
    float of_row[ROWS][COLUMNS];

    __device__ __forceinline__ explicit Vectors(const float* vectors) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) read_vector(of_row[row], vectors + row * WIDTH);
    }
};

// sums[unit*ROWS + row] += a lane's part of matrix row `unit` times vector `row`. An addition waits four cycles for the one
// before it, and a small block has one warp a scheduler: two sums alone are taken in two halves each.
template <int ROWS>
__device__ __forceinline__ void multiply(
    float (&sums)[UNITS * ROWS], const float (&share)[UNITS][COLUMNS], const Vectors<ROWS>& x) {
    constexpr bool halved = UNITS * ROWS < 4;
    float odd[UNITS * ROWS] = {};
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k)
#pragma unroll
        for (int i = 0; i < UNITS * ROWS; ++i) {
            float& sum = halved && k % 2 ? odd[i] : sums[i];
            sum = fmaf(share[i / ROWS][k], x.of_row[i % ROWS][k], sum);
        }
    if constexpr (halved)
#pragma unroll
        for (int i = 0; i < UNITS * ROWS; ++i) sums[i] += odd[i];
}

// The sum over the group of the one of the `COUNT` values that this lane's place stands for.
template <int COUNT, int MASK = LANES / 2>
__device__ __forceinline__ float reduce(float (&values)[COUNT]) {
    if constexpr (MASK == 0) {
        return values[0];
    } else if constexpr (COUNT == 1) {
        values[0] += shuffle_xor(values[0], MASK);
        return reduce<1, MASK / 2>(values);
    } else {
        float half[COUNT / 2];
        bool upper = threadIdx.x & MASK;
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            float kept = upper ? values[i + COUNT / 2] : values[i];
            float sent = upper ? values[i] : values[i + COUNT / 2];
            half[i] = kept + shuffle_xor(sent, MASK);
        }
        return reduce<COUNT / 2, MASK / 2>(half);
    }
}

// 0, but only when all values are there: what uses it cannot be moved before them, nor they behind it.
template <int COUNT>
__device__ __forceinline__ int after(const float (&values)[COUNT], int never) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) bits ^= __float_as_uint(values[i]);
    return static_cast<int>(bits) & never;
}

template <int ROWS>
__device__ __forceinline__ float product(const float (&share)[UNITS][COLUMNS], const Vectors<ROWS>& x) {
    float sums[UNITS * ROWS] = {};
    multiply(sums, share, x);
    return reduce(sums);
}

// ------------------------------------------------------------------------------------------------------ a sequence

// Where a lane finds its unit and row in the arrays, and at which steps they are alive. A lane without a unit or row
// reads those of a neighbour, so that it needs no case of its own; it writes nothing.
struct Place {
    bool real;           // unit and row exist
    bool backwards;      // time runs from the last step to the first
    int length;          // the steps before it are alive
    int unit;
    index_t at_initial;  // in [D, B, H]
    index_t at_state;    // in [B, D, H]; with n numbers of H each instead, at n times (this - unit) + unit
    index_t step;        // from one time to the next in [T, B, D, H]

    __device__ Place(int own_unit, index_t own_row, index_t steps, index_t batch, bool reverse, const index_t* lengths) {
        index_t direction = blockIdx.y, directions = gridDim.y;
        index_t row = own_row < batch ? own_row : batch - 1;
        unit = own_unit < HIDDEN ? own_unit : HIDDEN - 1;
        real = own_unit < HIDDEN && own_row < batch;
        backwards = directions == 2 ? direction == 1 : reverse;
        length = static_cast<int>(lengths ? max(index_t{0}, min(lengths[row], steps)) : steps);
        at_initial = (direction * batch + row) * HIDDEN + unit;
        at_state = (row * directions + direction) * HIDDEN + unit;
        step = batch * directions * HIDDEN;
    }

    __device__ __forceinline__ bool alive(int t) const {
        return static_cast<unsigned>(t) < static_cast<unsigned>(length);
    }
};

// A number that the compiler must keep rather than work out again at every step.
__device__ __forceinline__ index_t keep_at_hand(index_t x) {
    unsigned low = static_cast<unsigned>(x), high = static_cast<unsigned>(x >> 32);
    hide(low);
    hide(high);
    return static_cast<index_t>(static_cast<unsigned long long>(high) << 32 | low);
}

// One thread's part in bringing the block's rows of some arrays [T, B, D, n] into the second-level cache: each thread
// asks for one sector a step.
struct Ahead {
    static constexpr int sector = 32;
    const char* at = nullptr;
    index_t stride = 0;
    bool on = false;
    int free_threads = 0;  // threads before the one that takes the next sector

    // `n` numbers a row; the first sector is that of step `t`, the following those of steps `forth` on from it.
    template <int ROWS, class T>
    __device__ __forceinline__ void add(const T* array, int n, index_t batch, int t, int forth) {
        constexpr int bytes = sizeof(T);
        int sectors = (n * bytes + sector - 1) / sector + 1, mine = static_cast<int>(threadIdx.x) - free_threads;
        index_t row = static_cast<index_t>(blockIdx.x) * ROWS + mine / sectors, directions = gridDim.y;
        free_threads += ROWS * sectors;
        if (mine < 0 || mine >= ROWS * sectors || row >= batch) return;
        int within = mine % sectors * sector;
        index_t start = ((t * batch + row) * directions + blockIdx.y) * n * bytes;
        at = reinterpret_cast<const char*>(array) + start + (within < n * bytes ? within : n * bytes - 1);
        stride = keep_at_hand(forth * batch * directions * n * bytes);
        on = true;
    }

    __device__ __forceinline__ void step(bool there) {
        if (there && on) prefetch(at);
        at += stride;
    }
};

// ---------------------------------------------------------------------------------------------------------- forward

template <int ROWS>
__device__ __forceinline__ void forward(
    const stored* __restrict__ projected, const float* __restrict__ initial, const Weights& weights,
    const Biases& biases, const index_t* __restrict__ lengths, float* __restrict__ hidden, stored* __restrict__ gates,
    stored* __restrict__ output, stored* __restrict__ last, index_t steps, index_t batch, index_t reverse) {
    __shared__ __align__(16) float room[2][ROWS * WIDTH];  // "before": h and r*h; otherwise h, in turns
    Role<ROWS> role;
    index_t row = static_cast<index_t>(blockIdx.x) * ROWS + role.row;
    Place place(role.unit, row, steps, batch, reverse, lengths);
    const bool writer = place.real && role.first;
    const int mine = role.row * WIDTH + role.unit;

    float share[GATES][UNITS][COLUMNS];
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) load_share<false>(share[gate], weights.of(blockIdx.y, gate));
    for (int i = threadIdx.x; i < 2 * ROWS * WIDTH; i += THREADS) room[i / (ROWS * WIDTH)][i % (ROWS * WIDTH)] = 0.0f;
    __syncthreads();
    float h = initial ? initial[place.at_initial] : 0.0f;
    const float threshold = biases.threshold(place.unit);
    float bias[GATES];
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) bias[gate] = biases.of(gate, place.unit);
    if (writer) room[0][mine] = as_operand(h);
    __syncthreads();

    const int forth = place.backwards ? -1 : 1;
    int t = place.backwards ? static_cast<int>(steps) - 1 : 0;
    const index_t stride = keep_at_hand(forth * place.step);
    index_t at = t * place.step + place.at_state;
    // p of a step, whatever where the row is over, but no number of the padding: it may hold anything, NaN included. What
    // looks at it waits for it, so its bias is added, and 16 bits are made a float, where it is used.
    auto read_gate = [&](int gate, bool alive) {
        stored p = 0;
        if (alive) p = projected[GATES * (at - place.unit) + place.unit + gate * HIDDEN];
        return p;
    };
    auto biased = [&](const stored& p, int gate) { return load(&p) + bias[gate]; };
    bool alive = place.alive(t);
    stored p_r = RESET == NONE ? stored(0) : read_gate(0, alive);
    stored p_u = RESET == NONE ? stored(0) : read_gate(GATES - 2, alive);
    stored p_c = read_gate(GATES - 1, alive);
    Ahead ahead;
    ahead.add<ROWS>(projected, GATES * HIDDEN, batch, t + forth * AHEAD, forth);
    Vectors<ROWS> states(room[0]);

    for (int left = static_cast<int>(steps); left > 0; --left) {
        const bool over = !alive;
        ahead.step(left > AHEAD);
        float* shown = hidden + at;
        stored* kept = gates + GATES * (at - place.unit) + place.unit;
        t += forth;
        at += stride;
        alive = place.alive(t);
        // Two products a step leave room 0 free for the next state; one product reads it still.
        const int turn = RESET == BEFORE ? 0 : (steps - left) % 2;
        float r = 1.0f, u = 1.0f, z;
        if constexpr (RESET == NONE) {
            z = biased(p_c, 0) + product<ROWS>(share[0], states);
        } else {
            r = logistic(biased(p_r, 0) + product<ROWS>(share[0], states));
            p_r = read_gate(0, alive);
            if constexpr (RESET == BEFORE) {
                if (writer) room[1][mine] = as_operand(r * h);
            }
            u = logistic(biased(p_u, GATES - 2) + product<ROWS>(share[GATES - 2], states));
            p_u = read_gate(GATES - 2, alive);
            if constexpr (RESET == BEFORE) {
                __syncthreads();
                z = biased(p_c, GATES - 1) + product<ROWS>(share[GATES - 1], Vectors<ROWS>(room[1]));
            } else {
                z = biased(p_c, GATES - 1) + r * product<ROWS>(share[GATES - 1], states);
            }
        }
        p_c = read_gate(GATES - 1, alive);
        const float c = activate(z, threshold);
        u = over ? 0.0f : u;
        h = over ? h : (RESET == NONE ? c : h + u * (c - h));
        float* next = room[RESET == BEFORE ? 0 : 1 - turn];
        if (writer) next[mine] = as_operand(h);
        __syncthreads();
        states = Vectors<ROWS>(next);
        if (writer) {  // while the vector is on its way
            *shown = h;
            if (STORAGE != FLOAT32 && output) output[at - stride] = store(h);
            if constexpr (RESET != NONE) kept[0] = store(r);
            if constexpr (RESET != NONE) kept[HIDDEN] = store(u);
            kept[(GATES - 1) * HIDDEN] = store(c);
        }
    }
    if (last && writer) last[place.at_initial] = store(h);
}

// --------------------------------------------------------------------------------------------------------- backward

// What a step saved, and the gradient that arrives at it.
struct Saved {
    float grad, r, u, c, before, product;
    stored narrow;  // the gradient as it came, where it comes as the states are stored: what looks at it waits for it
};

// The gradient of the states comes in float32 or as they are stored. `products` [T, B, D, H] is W_c h, for reset="after" alone. `factors` [T, B, D, H] is filled with what the gradient of
// W_c is made of, beside dL/dz_c or the state before the step: r*h ("before") or dL/d(W_c h) ("after"). `d_bias`
// [B, D, G, H] has its gradient for each row, `d_initial` [D, B, H] may be null.
template <int ROWS>
__device__ __forceinline__ void backward(
    const float* __restrict__ grad_hidden, const stored* __restrict__ grad_output, const float* __restrict__ initial,
    const Weights& weights, const index_t* __restrict__ lengths, const float* __restrict__ hidden, const stored* __restrict__ gates,
    const float* __restrict__ products, stored* __restrict__ d_projected, stored* __restrict__ factors,
    float* __restrict__ d_initial, float* __restrict__ d_bias, index_t steps, index_t batch, index_t reverse) {
    constexpr int ROOM = ROWS * WIDTH;
    // "before": dL/dz of c, u and r; "after": of r, u and dL/d(W_c h), in turns; "none": of c, in turns.
    __shared__ __align__(16) float room[RESET == AFTER ? 6 : RESET == BEFORE ? 3 : 2][ROOM];
    constexpr int ROOMS = sizeof(room) / sizeof(room[0]);
    Role<ROWS> role;
    index_t row = static_cast<index_t>(blockIdx.x) * ROWS + role.row;
    Place place(role.unit, row, steps, batch, reverse, lengths);
    const bool writer = place.real && role.first;
    const int mine = role.row * WIDTH + role.unit;

    float share[GATES][UNITS][COLUMNS];
#pragma unroll
    for (int gate = 0; gate < GATES; ++gate) load_share<true>(share[gate], weights.of(blockIdx.y, gate));
    for (int i = threadIdx.x; i < ROOMS * ROOM; i += THREADS) room[i / ROOM][i % ROOM] = 0.0f;
    __syncthreads();

    const int forth = place.backwards ? 1 : -1;  // from a step to the one that was before it
    int t = place.backwards ? 0 : static_cast<int>(steps) - 1;
    const index_t stride = keep_at_hand(forth * place.step);
    index_t at = t * place.step + place.at_state;
    // The step at `at`; `first` says that it was the first of all.
    auto read_saved = [&](bool first) {
        const stored* kept = gates + GATES * (at - place.unit) + place.unit;
        Saved x = {};
        if (STORAGE != FLOAT32 && grad_output) x.narrow = grad_output[at];
        else x.grad = grad_hidden[at];
        x.c = load(kept + (GATES - 1) * HIDDEN);
        if constexpr (RESET != NONE) x.r = load(kept);
        if constexpr (RESET != NONE) x.u = load(kept + HIDDEN);
        if constexpr (RESET == AFTER) x.product = products[at];
        x.before = !first ? hidden[at + stride] : initial ? initial[place.at_initial] : 0.0f;
        return x;
    };
    Ahead ahead;
    ahead.add<ROWS>(gates, GATES * HIDDEN, batch, t + forth * AHEAD, forth);
    if (STORAGE != FLOAT32 && grad_output) ahead.add<ROWS>(grad_output, HIDDEN, batch, t + forth * AHEAD, forth);
    else ahead.add<ROWS>(grad_hidden, HIDDEN, batch, t + forth * AHEAD, forth);
    ahead.add<ROWS>(hidden, HIDDEN, batch, t + forth * AHEAD, forth);
    if constexpr (RESET == AFTER) ahead.add<ROWS>(products, HIDDEN, batch, t + forth * AHEAD, forth);

    const int never = static_cast<int>(steps >> 32);  // 0, which the compiler cannot know
    Saved x = read_saved(steps == 1);
    float e = 0.0f, to_r = 0.0f, to_u = 0.0f, to_c = 0.0f;
    for (int left = static_cast<int>(steps); left > 0; --left) {
        const bool over = !place.alive(t);
        stored* gradient = d_projected + GATES * (at - place.unit) + place.unit;
        stored* factor = factors + at;
        t += forth;
        at += stride;
        const int turn = (steps - left) % 2;
        const float before = x.before, r = x.r, keep = RESET == NONE ? (over ? 1.0f : 0.0f) : 1.0f - x.u;
        const float open_c = (RESET == NONE ? 1.0f - keep : x.u) * slope(x.c), open_u = (x.c - before) * x.u * keep;
        const float open_r = (RESET == AFTER ? x.product : before * r) * (1.0f - r);
        const bool negative = x.c < 0.0f;
        e += STORAGE != FLOAT32 && grad_output ? load(&x.narrow) : x.grad;
        const float d_c = e * open_c, d_u = e * open_u, d_m = d_c * r;
        float d_r = d_m * open_r, sums[UNITS * ROWS] = {};
        float* shown = room[RESET == BEFORE ? 0 : turn * GATES];
        if constexpr (RESET == AFTER) {
            if (writer) shown[mine] = as_operand(d_r);
            if (writer) shown[ROOM + mine] = as_operand(d_u);
            if (writer) shown[2 * ROOM + mine] = as_operand(d_m);
        } else {
            if (writer) shown[mine] = as_operand(d_c);
            if (RESET == BEFORE && writer) shown[ROOM + mine] = as_operand(d_u);
        }
        if (left > 1) x = read_saved(left == 2);
        ahead.step(left > AHEAD);
        __syncthreads();
        float d_gated = 0.0f;
        if constexpr (RESET == BEFORE) {
            float partial[UNITS * ROWS] = {};
            multiply<ROWS>(partial, share[GATES - 1], Vectors<ROWS>(shown));
            multiply<ROWS>(sums, share[GATES - 2], Vectors<ROWS>(shown + ROOM));
            d_gated = reduce(partial);
            d_r = d_gated * open_r;
            if (writer) shown[2 * ROOM + mine + after(sums, never)] = as_operand(d_r);
            __syncthreads();
        }
        multiply<ROWS>(sums, share[0], Vectors<ROWS>(shown + (RESET == BEFORE ? 2 * ROOM : 0)));
        if constexpr (RESET == AFTER) {
            multiply<ROWS>(sums, share[GATES - 2], Vectors<ROWS>(shown + ROOM));
            multiply<ROWS>(sums, share[GATES - 1], Vectors<ROWS>(shown + 2 * ROOM));
        }
        to_r += d_r;
        to_u += d_u;
        to_c += PHI == MODRELU && negative ? -d_c : d_c;  // d_c is 0 where modReLU's c is
        if (writer) {
            gradient[(GATES - 1) * HIDDEN] = store(d_c);
            if constexpr (RESET != NONE) gradient[0] = store(d_r);
            if constexpr (RESET != NONE) gradient[HIDDEN] = store(d_u);
            if constexpr (RESET != NONE) *factor = store(RESET == BEFORE ? r * before : d_m);
        }
        e = e * keep + d_gated * r + reduce(sums);
    }
    if (!writer) return;
    if (d_initial) d_initial[place.at_initial] = e;
    float* to = d_bias + GATES * (place.at_state - place.unit) + place.unit;
    to[(GATES - 1) * HIDDEN] = to_c;
    if constexpr (RESET != NONE) to[0] = to_r;
    if constexpr (RESET != NONE) to[HIDDEN] = to_u;
}

// ---------------------------------------------------------------------------------------------------------- kernels

#define FORWARD(ROWS)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) small_forward_##ROWS(                                        \
        const stored* projected, const float* initial, const float* matrices, const void* free_first,                  \
        const void* free_second, index_t made, index_t narrow, const void* bias_first, const void* bias_second,        \
        const float* thresholds, float offset, const index_t* lengths, float* hidden, stored* gates, stored* output,   \
        stored* last, index_t steps, index_t batch, index_t reverse) {                                                 \
        const bool thin = narrow != 0;                                                                                 \
        const Weights weights = {matrices, {free_first, thin}, {free_second, thin}, static_cast<int>(made)};           \
        const float* own = thresholds ? thresholds + blockIdx.y * HIDDEN : nullptr;                                    \
        const Biases biases = {{blockIdx.y ? bias_second : bias_first, thin}, own, offset};                            \
        forward<ROWS>(projected, initial, weights, biases, lengths, hidden, gates, output, last, steps, batch,         \
                      reverse);                                                                                        \
    }

#define BACKWARD(ROWS)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) small_backward_##ROWS(                                       \
        const float* grad_hidden, const stored* grad_output, const float* initial, const float* matrices,              \
        const void* free_first, const void* free_second, index_t made, index_t narrow, const index_t* lengths,         \
        const float* hidden, const stored* gates, const float* products, stored* d_projected, stored* factors,         \
        float* d_initial, float* d_bias, index_t steps, index_t batch, index_t reverse) {                              \
        const bool thin = narrow != 0;                                                                                 \
        const Weights weights = {matrices, {free_first, thin}, {free_second, thin}, static_cast<int>(made)};           \
        backward<ROWS>(grad_hidden, grad_output, initial, weights, lengths, hidden, gates, products, d_projected,      \
                       factors, d_initial, d_bias, steps, batch, reverse);                                             \
    }

FORWARD(1)
FORWARD(2)
BACKWARD(1)
BACKWARD(2)
