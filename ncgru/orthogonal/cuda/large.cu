// The orthogonal update of larger matrices, and its gradient: one cooperative launch each.
//
// All blocks share every product, by tiles, and wait for each other before the next:
//
//   1. survey     has A moved, does the seal hold? A, and the step of Algorithm 1, as whole matrices. If all is as it
//                 was, the state is copied to the caller, and done.
//   2. series     R = I - (I+A) Ã, R + ... + R^p, Ã (I + R + ... + R^p); beside them R^(p+1) Z for the guard
//   3. exact      only where the guard, the seal or a reset wants it: 2 again until nothing is left of the residual (it is
//                 measured anew each time, so this is the exact inverse but for its rounding); where the residual is too
//                 large for that, Gauss and Jordan's elimination in float64, slow but never wrong
//   4. commit     the state, its copies for the caller, the counts and the seal
//
// Products are summed in float64, and rounded to float32 where they are stored: see products.cuh. The copies for the
// caller have room for R and for inverses until they are written.
//
// Sizes: K matrices of n rows; K at most MOST_MATRICES, the caller splits larger batches.

#define CLUSTER 0
#include "products.cuh"

#define MOST_MATRICES 16
#define PROBED 8     // rows that a block probes at a time
#define STRIP 4      // neighbouring columns that one block eliminates
#define IN_FLIGHT 8  // elements that a thread has asked for before it uses the first of them

// A launch takes all the shared memory of its multiprocessors, so that no two are under way together: one word for all of
// them is enough for their barriers.
__device__ unsigned arrivals;

// What is known of a matrix before its series is judged, and what follows.
struct Verdict {
    bool moved, tampered, due, broken, exact, in_state;  // the last: where the inverse is that comes out
    index_t count, sealed;
    __device__ bool changed() const { return moved || tampered; }
};

// Where matrices lie, or vectors [n, PROBES].
enum Room {
    INVERSE,         // of the state
    COPY, RATIO,     // the caller's: the inverse after the series, and R, or Algorithm 1's M and then U before its signs
    TOTALS, OTHERS,  // sums of powers in turn, or Algorithm 1's step
    SKEW,            // A
    Z, PROBED_Z,     // the guard's probes, the same for all, and what has become of them
    ROOMS,
    NOWHERE = ROOMS
};

struct Factors {
    float unit, of_start, of_sum;
};
#define SUM Factors{0.0f, 1.0f, 1.0f}

// out = unit I + of_start start + of_sum left right
struct Product : Task {
    Factors factors;
};

// What the launch works on, in shared memory, for there it costs no registers.
struct Work {
    Group group;
    int n, batch, shares;  // a pass over the elements of a matrix is shared out between so many blocks
    Batch rooms[ROOMS];
    const float *packed, *signs;
    float *anchor, *matrix;
    double *grams, *column;  // [K, units, PROBES * PROBES], [2, n]
    index_t* notes;          // [K, shares, 2]
    Product product;         // the one under way

    __device__ __forceinline__ index_t square() const { return static_cast<index_t>(n) * n; }
    __device__ __forceinline__ index_t triangle() const { return packed_size(n); }
    __device__ __forceinline__ int units() const { return (n + PROBED - 1) / PROBED; }
    __device__ __forceinline__ float* room(int which, int number) const { return rooms[which].of(number); }

    // `scratch_words` in large.py knows how much there is.
    __device__ void give_rooms(float* inverse, float* read_matrix, float* read_inverse, double* scratch) {
        grams = scratch;
        column = grams + static_cast<index_t>(batch) * units() * PROBES * PROBES;
        notes = reinterpret_cast<index_t*>(column + 2 * n);
        float* vectors = reinterpret_cast<float*>(notes + 2 * batch * shares);
        float* squares = vectors + static_cast<index_t>(1 + batch) * n * PROBES;
        rooms[INVERSE] = {inverse, square()};
        rooms[COPY] = {read_inverse, square()};
        rooms[RATIO] = {read_matrix, square()};
        rooms[TOTALS] = {squares, 2 * square()};  // of each matrix these two are beside each other: room for one in float64
        rooms[OTHERS] = {squares + square(), 2 * square()};
        rooms[SKEW] = {squares + 2 * batch * square(), square()};
        rooms[Z] = {vectors, 0};
        rooms[PROBED_Z] = {vectors + n * PROBES, n * PROBES};
    }
};

// use(row, column, load(row, column)) for the elements of a matrix that a block has a share of; a warp takes neighbours
// from TALL rows.
template <int TALL, class Load, class Use>
__device__ __forceinline__ void each_element(int n, int share, int shares, const Load& load, const Use& use) {
    constexpr int ACROSS = 32 / TALL, HIGHEST = WARPS * TALL, WIDEST = ACROSS * IN_FLIGHT;
    int across = (n + WIDEST - 1) / WIDEST, units = (n + HIGHEST - 1) / HIGHEST * across;
#pragma unroll 1
    for (int unit = share; unit < units; unit += shares) {
        int row = unit / across * HIGHEST + threadIdx.x / ACROSS, column = unit % across * WIDEST + threadIdx.x % ACROSS;
        if (row >= n) continue;
        decltype(load(0, 0)) loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) loaded[i] = load(row, min(column + i * ACROSS, n - 1));
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (column + i * ACROSS < n) use(row, column + i * ACROSS, loaded[i]);
    }
}

// `to` = the skew-symmetric matrix of `packed`, or of `packed` - `subtracted`. By patches, as half of it lies across.
__device__ OUT_OF_LINE void unpack(const float* packed, const float* subtracted, float* to, int n, int share, int shares) {
    each_element<4>(
        n, share, shares,
        [=](int i, int j) {
            int low = min(i, j), high = max(i, j);
            index_t at = low == high ? 0 : packed_row(n, low) + high;
            float x = subtracted ? packed[at] - subtracted[at] : packed[at];
            return low == high ? 0.0f : i < j ? x : -x;
        },
        [=](int i, int j, float x) { to[static_cast<index_t>(i) * n + j] = x; });
}

// The first look at the state; and what products start from, which costs less than to ask first whether it is needed.
__device__ OUT_OF_LINE void survey(const Work& work, const float* matrix, bool literal) {
    index_t* room = reinterpret_cast<index_t*>(dynamic_shared());
    const Group& group = work.group;
    int n = work.n;
    for (int unit = group.rank; unit < work.batch * work.shares; unit += group.size) {
        int number = unit / work.shares, share = unit % work.shares;
        const float *packed = work.packed + number * work.triangle(), *anchor = work.anchor + number * work.triangle();
        index_t first = static_cast<index_t>(share) * THREADS + threadIdx.x, stride = static_cast<index_t>(work.shares) * THREADS;
        bool here;
        index_t part = survey_state<IN_FLIGHT>(
            packed, anchor, work.room(INVERSE, number), matrix + number * work.square(), work.signs + static_cast<index_t>(number) * n,
            n, first, stride, here);
        unpack(packed, nullptr, work.room(SKEW, number), n, share, work.shares);
        if (literal) unpack(anchor, packed, work.room(TOTALS, number), n, share, work.shares);
        part = block_sum(part, room);
        index_t somewhere = block_sum(static_cast<index_t>(here), room);
        if (threadIdx.x == 0) {
            work.notes[2 * unit] = part;
            work.notes[2 * unit + 1] = somewhere;
        }
    }
    for (index_t at = group.first(); at < n * PROBES; at += group.stride())
        work.room(Z, 0)[at] = probe_sign(static_cast<int>(at / PROBES), static_cast<int>(at % PROBES));
}

// By a warp.
__device__ Verdict first_verdict(const index_t* notes, int shares, index_t sealed, index_t updates, index_t reset_every) {
    index_t part = 0, movements = 0;
    for (int share = threadIdx.x % 32; share < shares; share += 32) {
        part += notes[2 * share];
        movements += notes[2 * share + 1];
    }
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
        part += __shfl_xor_sync(0xffffffffu, part, mask);
        movements += __shfl_xor_sync(0xffffffffu, movements, mask);
    }
    Verdict verdict;
    verdict.sealed = sealed;
    verdict.tampered = part != sealed;
    verdict.moved = movements != 0;
    verdict.count = updates + verdict.moved;
    verdict.due = verdict.moved && reset_every && verdict.count % reset_every == 0;
    verdict.broken = verdict.tampered;
    verdict.exact = verdict.in_state = false;
    return verdict;
}

// The end of a product.
struct Combined {
    const float* start;
    float* out;
    Factors factors;
    int n;

    __device__ __forceinline__ Combined(const Product& product, int number)
        : start(product.start.of(number)), out(product.out.of(number)), factors(product.factors), n(product.n) {}
    __device__ __forceinline__ float load(int i, int j) const {
        return factors.of_start == 0.0f ? 0.0f : start[static_cast<index_t>(i) * n + j];
    }
    __device__ __forceinline__ float value(int i, int j, float before, double sum) const {
        double all = (i == j ? factors.unit : 0.0f) + factors.of_start * static_cast<double>(before) + factors.of_sum * sum;
        return static_cast<float>(all);
    }
};

// out = unit I + of_start start + of_sum left right, for the matrices from `begin` to `end`.
__device__ OUT_OF_LINE void combine(Work& work, int begin, int end, int out, Factors factors, int start, int left, int right) {
    __syncthreads();  // all are through with the product before
    if (threadIdx.x == 0) {
        Product& product = work.product;
        product.begin = begin;
        product.end = end;
        product.left = work.rooms[left];
        product.right = work.rooms[right];
        product.start = work.rooms[start == NOWHERE ? left : start];
        product.out = work.rooms[out];
        product.factors = factors;
    }
    __syncthreads();
    multiply<Along, Across, Combined>(work.product);
}

// The sums over the lanes of 32 numbers each: lane l gets the l-th.
__device__ __forceinline__ float sum_of_lanes(float (&x)[32]) {
#pragma unroll
    for (int half = 16; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            bool upper = threadIdx.x & half;
            float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
            x[i] = kept + __shfl_xor_sync(0xffffffffu, given, half);
        }
    return x[0];
}

// (left - without) from, or base - from - left from where there is a base: to `to`, or if that is nowhere Y'Y of it to
// work.grams, a part for each unit of rows.
//
// Blocks are asked in reverse order, so that those without a tile of the product beside come first.
__device__ OUT_OF_LINE void probe(const Work& work, int begin, int end, int left, int without, int from, int base, int to) {
    constexpr int ROWS = 4, ABREAST = WARPS / (PROBED / ROWS);  // rows of a warp, and warps that share them
    float(*parts)[32] = reinterpret_cast<float(*)[32]>(dynamic_shared());
    float(*made)[PROBES] = reinterpret_cast<float(*)[PROBES]>(parts + WARPS);
    int n = work.n, units = work.units(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int unit = begin * units + work.group.size - 1 - work.group.rank; unit < end * units; unit += work.group.size) {
        int number = unit / units, top = unit % units * PROBED;
        const float *vectors = work.room(from, number), *rows[ROWS], *others[ROWS];
        const float4* halves = reinterpret_cast<const float4*>(vectors);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            index_t row = min(top + warp / ABREAST * ROWS + i, n - 1);
            rows[i] = work.room(left, number) + row * n;
            others[i] = without == NOWHERE ? nullptr : work.room(without, number) + row * n;
        }
        float sums[ROWS * PROBES] = {};
#pragma unroll 4
        for (int k = warp % ABREAST * 32 + lane; k < n; k += 32 * ABREAST) {
            float elements[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) elements[i] = others[i] ? rows[i][k] - others[i][k] : rows[i][k];
            float4 low = halves[2 * k], high = halves[2 * k + 1];
            float vector[PROBES] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < PROBES; ++j) sums[i * PROBES + j] += elements[i] * vector[j];
        }
        float sum = sum_of_lanes(sums);
        __syncthreads();
        parts[warp][lane] = sum;
        __syncthreads();
        int i = threadIdx.x / PROBES, j = threadIdx.x % PROBES;
        if (i < PROBED) {
            float y = 0.0f;
#pragma unroll
            for (int part = 0; part < ABREAST; ++part) y += parts[i / ROWS * ABREAST + part][i % ROWS * PROBES + j];
            bool inside = top + i < n;
            int at = (top + i) * PROBES + j;
            if (inside && base != NOWHERE) y = work.room(base, number)[at] - vectors[at] - y;
            if (inside && to != NOWHERE) work.room(to, number)[at] = y;
            made[i][j] = inside ? y : 0.0f;
        }
        if (to != NOWHERE) continue;
        __syncthreads();
        if (i < PROBES) {
            double dot = 0.0;
#pragma unroll
            for (int k = 0; k < PROBED; ++k) dot += static_cast<double>(made[k][i]) * made[k][j];
            work.grams[static_cast<index_t>(unit) * PROBES * PROBES + threadIdx.x] = dot;
        }
    }
}

// The size of what was probed of a matrix last, ‖Y'Y‖_F^(1/2); all threads get it.
__device__ OUT_OF_LINE float measured(const Work& work, int number) {
    constexpr int ELEMENTS = PROBES * PROBES;
    double *room = reinterpret_cast<double*>(dynamic_shared()), *parts = room + WARPS;
    const double* grams = work.grams + static_cast<index_t>(number) * work.units() * ELEMENTS + threadIdx.x % ELEMENTS;
    double dot = 0.0;
#pragma unroll 8
    for (int unit = threadIdx.x / ELEMENTS; unit < work.units(); unit += THREADS / ELEMENTS) dot += grams[unit * ELEMENTS];
    __syncthreads();
    parts[threadIdx.x] = dot;
    __syncthreads();
    dot = 0.0;
    if (threadIdx.x < ELEMENTS)
        for (int part = 0; part < THREADS / ELEMENTS; ++part) dot += parts[part * ELEMENTS + threadIdx.x];
    return static_cast<float>(sqrt(sqrt(block_sum(dot * dot, room))));
}

// to = Ã (I + R + ... + R^order) with Ã = `from`, and R^(order+1) Z to be measured, for the matrices from `begin` to `end`.
__device__ OUT_OF_LINE void follow_residual(Work& work, int begin, int end, int from, int to, int order) {
    combine(work, begin, end, RATIO, {1.0f, -1.0f, -1.0f}, from, SKEW, from);
    work.group.wait();
    int total = RATIO, before = NOWHERE;  // R + ... + R^power, and without the last of them
    for (int power = 2; power <= order; ++power) {
        int next = power % 2 ? TOTALS : OTHERS;
        combine(work, begin, end, next, SUM, RATIO, RATIO, total);
        if (power == 2) probe(work, begin, end, RATIO, NOWHERE, Z, NOWHERE, PROBED_Z);
        before = total;
        total = next;
        work.group.wait();
    }
    combine(work, begin, end, to, SUM, from, from, total);
    if (order == 1) {
        probe(work, begin, end, RATIO, NOWHERE, Z, NOWHERE, PROBED_Z);
        work.group.wait();
    }
    probe(work, begin, end, total, before, PROBED_Z, NOWHERE, NOWHERE);
    work.group.wait();
}

// Ã (I-A), which is U but for its signs, for the matrices from `begin` to `end`.
__device__ __forceinline__ void multiply_out(Work& work, int begin, int end, int inverse) {
    combine(work, begin, end, RATIO, {0.0f, 1.0f, -1.0f}, inverse, inverse, SKEW);
}

// Algorithm 1 from its step: the inverses to COPY, U but for its signs to RATIO, and Z - (I+A) Ã Z to be measured.
__device__ OUT_OF_LINE void follow_step(Work& work, int order) {
    combine(work, 0, work.batch, RATIO, {0.0f, 0.0f, 1.0f}, NOWHERE, INVERSE, TOTALS);
    work.group.wait();
    int total = INVERSE;
    for (int left = order - 1; left >= 0; --left) {
        int next = left % 2 ? OTHERS : COPY;
        combine(work, 0, work.batch, next, SUM, INVERSE, RATIO, total);
        total = next;
        work.group.wait();
    }
    multiply_out(work, 0, work.batch, COPY);
    probe(work, 0, work.batch, COPY, NOWHERE, Z, NOWHERE, PROBED_Z);
    work.group.wait();
    probe(work, 0, work.batch, SKEW, NOWHERE, PROBED_Z, Z, NOWHERE);
    work.group.wait();
}

// The columns of a matrix [n, n] that a block eliminates: every so many strips one.
struct Strips {
    double *system, *column;  // [n, n], [2, n]
    int n, rank, size, owned;

    __device__ Strips(const Group& group, double* system, double* column, int n)
        : system(system), column(column), n(n), rank(group.rank), size(group.size) {
        int strips = (n + STRIP - 1) / STRIP;
        owned = (strips - rank + size - 1) / size * STRIP;
    }
    __device__ int number(int own) const { return (own / STRIP * size + rank) * STRIP + own % STRIP; }
    __device__ double& at(int i, int own) const { return system[static_cast<index_t>(i) * n + number(own)]; }
    __device__ const double* shown(int half) const { return column + half * n; }
    __device__ void show(int half, int i, double x) const { column[half * n + i] = x; }
};

// The exact inverse of one matrix to COPY, whatever lies there.
__device__ OUT_OF_LINE void eliminate(const Work& work, int number) {
    const Group& group = work.group;
    int n = work.n;
    double* system = reinterpret_cast<double*>(work.room(TOTALS, number));
    const float* skew = work.room(SKEW, number);
    float* to = work.room(COPY, number);
    for (index_t at = group.first(); at < work.square(); at += group.stride()) system[at] = (at / n == at % n ? 1.0 : 0.0) + skew[at];
    group.wait();
    gauss_jordan(group, Strips(group, system, work.column, n), reinterpret_cast<double*>(dynamic_shared()), n);
    for (index_t at = group.first(); at < work.square(); at += group.stride()) to[at] = static_cast<float>(system[at]);
}

// The exact inverse of one matrix, from that in COPY and the size of what it leaves; true if it has gone to the state.
__device__ OUT_OF_LINE bool make_exact(Work& work, int number, float left) {
    bool in_state = false;
    for (int pass = 0; left <= REFINABLE && pass < MOST_PASSES; ++pass) {
        follow_residual(work, number, number + 1, in_state ? INVERSE : COPY, in_state ? COPY : INVERSE, REFINING_ORDER);
        in_state = !in_state;
        left = measured(work, number);
        if (left <= NEGLIGIBLE) return in_state;
    }
    eliminate(work, number);
    return false;
}

// Completes the verdict on a matrix whose series leaves so much.
__device__ __forceinline__ void judge(Verdict& verdict, float left, int method) {
    bool sound = method == EXACT || left <= (method == NEUMANN ? NEUMANN_TOLERANCE : HYPERPOWER_TOLERANCE);
    verdict.broken = (verdict.moved && !verdict.due && !sound) || verdict.tampered;
    verdict.exact = method == EXACT || verdict.due || verdict.broken;
}

// What is read of the state, or for it.
struct Loaded {
    float inverse, matrix, moved, sign;
};

// Brings this block's share of a matrix up to date and copies it out; this thread's part of the new seal.
__device__ OUT_OF_LINE index_t commit(const Work& work, int number, int share, bool in_state, bool literal) {
    int n = work.n;
    const float *packed = work.packed + number * work.triangle(), *signs = work.signs + static_cast<index_t>(number) * n;
    const float* latest = work.room(in_state ? INVERSE : COPY, number);
    float *read_inverse = work.room(COPY, number), *read_matrix = work.room(RATIO, number), *inverse = work.room(INVERSE, number);
    float *anchor = work.anchor + number * work.triangle(), *matrix = work.matrix + number * work.square();
    SealPart part;
    each_element<1>(
        n, share, work.shares,
        [=](int i, int j) {
            index_t at = static_cast<index_t>(i) * n + j;
            return Loaded{latest[at], literal ? read_matrix[at] : 0.0f, i < j ? packed[packed_row(n, i) + j] : 0.0f, signs[j]};
        },
        [&](int i, int j, const Loaded& x) {
            index_t at = static_cast<index_t>(i) * n + j;
            float u = (literal ? x.matrix : 2.0f * x.inverse - (i == j ? 1.0f : 0.0f)) * unit(x.sign);
            inverse[at] = read_inverse[at] = x.inverse;
            matrix[at] = read_matrix[at] = u;
            part.inverse(x.inverse);
            part.matrix(u);
            if (i < j) {
                anchor[packed_row(n, i) + j] = x.moved;
                part.anchor(x.moved);
            }
            if (i == 0) part.sign(x.sign);
        });
    return part.sum;
}

// This block's share of a state that is as it was.
__device__ OUT_OF_LINE void copy_state(const Work& work, int number, int share) {
    int n = work.n;
    const float *inverse = work.room(INVERSE, number), *matrix = work.matrix + number * work.square();
    float *read_inverse = work.room(COPY, number), *read_matrix = work.room(RATIO, number);
    each_element<1>(
        n, share, work.shares,
        [=](int i, int j) {
            index_t at = static_cast<index_t>(i) * n + j;
            return Loaded{inverse[at], matrix[at], 0.0f, 0.0f};
        },
        [=](int i, int j, const Loaded& x) {
            index_t at = static_cast<index_t>(i) * n + j;
            read_inverse[at] = x.inverse;
            read_matrix[at] = x.matrix;
        });
}

// Brings a batch of matrices up to date, as `follow_inverse` in ncgru/orthogonal/inverse.py says, and copies them out.
//
// Grid: (blocks), all at the same time, with all the shared memory that there is.
extern "C" __global__ void __launch_bounds__(THREADS, 1) follow_large(
    const float* packed, float* anchor, float* inverse, float* matrix, const float* signs, index_t* updates,
    index_t* refreshes, index_t* seal, float* read_matrix, float* read_inverse, double* scratch, index_t rows,
    index_t matrices, index_t which, index_t order, index_t reset_every) {
    __shared__ Work work;
    __shared__ Verdict verdicts[MOST_MATRICES];
    int batch = static_cast<int>(matrices), method = static_cast<int>(which), warp = threadIdx.x / 32;
    bool literal = method == NEUMANN;
    if (threadIdx.x == 0) {
        work.group = work.product.group = Group(blockIdx.x, gridDim.x, &arrivals);
        work.n = work.product.n = static_cast<int>(rows);
        work.batch = batch;
        work.shares = max(1, static_cast<int>(gridDim.x) / batch);
        work.packed = packed;
        work.signs = signs;
        work.anchor = anchor;
        work.matrix = matrix;
        work.give_rooms(inverse, read_matrix, read_inverse, scratch);
    }
    __syncthreads();
    survey(work, matrix, literal);
    work.group.wait();
    for (int k = warp; k < batch; k += WARPS) {
        Verdict verdict = first_verdict(work.notes + 2 * k * work.shares, work.shares, seal[k], updates[k], reset_every);
        if (threadIdx.x % 32 == 0) verdicts[k] = verdict;
    }
    __syncthreads();
    bool changed = false, waits = false;
    for (int k = 0; k < batch; ++k) changed |= verdicts[k].changed();
    if (changed) {
        if (literal) follow_step(work, static_cast<int>(order));
        else follow_residual(work, 0, batch, INVERSE, COPY, method == EXACT ? REFINING_ORDER : static_cast<int>(order));
    }
    for (int k = 0; k < batch; ++k) {
        if (!verdicts[k].changed()) continue;
        float left = measured(work, k);
        if (threadIdx.x == 0) judge(verdicts[k], left, method);
        __syncthreads();
        if (!verdicts[k].exact || (!literal && left <= NEGLIGIBLE)) continue;
        bool in_state = make_exact(work, k, left);
        if (threadIdx.x == 0) verdicts[k].in_state = in_state;
        work.group.wait();
        if (literal) multiply_out(work, k, k + 1, in_state ? INVERSE : COPY);
        waits = literal;
    }
    if (waits) work.group.wait();

    for (int unit = work.group.rank; unit < batch * work.shares; unit += work.group.size) {
        int k = unit / work.shares, share = unit % work.shares;
        if (!verdicts[k].changed()) {
            copy_state(work, k, share);
            continue;
        }
        index_t part = commit(work, k, share, verdicts[k].in_state, literal);
        part = block_sum(part, reinterpret_cast<index_t*>(dynamic_shared()));
        if (threadIdx.x) continue;
        // All have read the old seal; from it, whatever the order, the sum becomes the new one.
        if (share == 0) part -= verdicts[k].sealed;
        atomicAdd(reinterpret_cast<unsigned long long*>(seal + k), static_cast<unsigned long long>(part));
        if (share) continue;
        updates[k] = verdicts[k].count;
        refreshes[k] += verdicts[k].broken;
    }
}

struct GradientTask : Task {
    const float* signs;
};

// G D + G U'
struct ThroughSigns {
    const float *grad, *signs;
    float* out;
    int n;

    __device__ __forceinline__ ThroughSigns(const GradientTask& task, int number)
        : grad(task.start.of(number)), signs(task.signs + static_cast<index_t>(number) * task.n), out(task.out.of(number)),
          n(task.n) {}
    __device__ __forceinline__ float load(int i, int j) const { return grad[static_cast<index_t>(i) * n + j] * unit(signs[j]); }
    __device__ __forceinline__ float value(int, int, float before, double sum) const { return static_cast<float>(before + sum); }
};

struct Plain {
    float* out;

    __device__ __forceinline__ Plain(const GradientTask& task, int number) : out(task.out.of(number)) {}
    __device__ __forceinline__ float load(int, int) const { return 0.0f; }
    __device__ __forceinline__ float value(int, int, float, double sum) const { return static_cast<float>(sum); }
};

// The gradient in the packed A's: V'-V above the diagonal, V = Ã' (G (D+U')).
//
// Grid: (blocks), all at the same time, with all the shared memory that there is. `rooms` [2, K, n, n] is for products.
extern "C" __global__ void __launch_bounds__(THREADS, 1) gradient_large(
    const float* grad_matrix, const float* matrix, const float* inverse, const float* signs, float* gradient, float* rooms,
    index_t rows, index_t matrices) {
    int n = static_cast<int>(rows), batch = static_cast<int>(matrices);
    index_t square = rows * rows;
    Group group(blockIdx.x, gridDim.x, &arrivals);
    float *right = rooms, *v = rooms + batch * square;
    __shared__ GradientTask through_signs;
    __shared__ GradientTask through_inverse;
    if (threadIdx.x == 0) {
        const auto batch_of = [=](const float* first) { return Batch{const_cast<float*>(first), square}; };
        Batch grads = batch_of(grad_matrix), products = batch_of(right);
        through_signs = {{group, n, 0, batch, grads, batch_of(matrix), grads, products}, signs};
        through_inverse = {{group, n, 0, batch, batch_of(inverse), products, products, batch_of(v)}, signs};
    }
    __syncthreads();
    multiply<Along, Along, ThroughSigns>(through_signs);
    group.wait();
    multiply<Across, Across, Plain>(through_inverse);
    group.wait();
    int shares = max(1, group.size / batch);
    for (int unit = group.rank; unit < batch * shares; unit += group.size) {
        int number = unit / shares;
        const float* from = v + number * square;
        float* packed = gradient + number * packed_size(n);
        each_element<4>(
            n, unit % shares, shares, [=](int i, int j) { return i < j ? from[j * rows + i] - from[i * rows + j] : 0.0f; },
            [=](int i, int j, float x) {
                if (i < j) packed[packed_row(n, i) + j] = x;
            });
    }
}
