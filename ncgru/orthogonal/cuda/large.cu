// The orthogonal update of larger matrices, and its gradient: what goes before and after the products.
//
// The products themselves are torch's, in float64: exact enough for everything, never tf32, and on GPUs made for science
// as fast as float32. Between them and the state stand four kernels:
//
//   survey_large    has A moved, does the seal hold? And the operands in float64
//   conclude_large  the guard, the exact inverse where it is wanted, the state, its copies for the caller
//   widen_large     the operands of the gradient in float64
//   narrow_large    the gradient, packed
//
// `conclude_large` is one cooperative launch. The exact inverse is a rare matter: more passes of the residual series, by
// a plain product of tiles, or Gauss and Jordan's elimination, slow but never wrong.
//
// Sizes: K matrices of n rows; K at most MOST_MATRICES, the caller splits larger batches.

#define CLUSTER 0
#include "matrices.cuh"

#define MOST_MATRICES 16
#define TILE 64
#define DEPTH 16     // inner rows of a product that are in shared memory at a time
#define STAGED 1024  // rows of Z, or of what has become of it, in shared memory at a time
#define STRIP 4      // neighbouring columns that one block eliminates

// What is done with the first look at the state.
//
// Grid: (blocks, K). Fills `system` = -(I+A), `wide` = Ã, and `other` = I, or old A - new A for Algorithm 1, all
// [K, n, n]; `probed` [K, n, PROBES] = Z; `notes` [K, blocks, 2] for `conclude_large`, whose `counter` is set to 0.
extern "C" __global__ void __launch_bounds__(THREADS, 1) survey_large(
    const float* packed, const float* anchor, const float* inverse, const float* matrix, const float* signs,
    double* system, double* wide, double* other, float* probed, index_t* notes, unsigned* counter, index_t n,
    index_t literal) {
    __shared__ index_t sums[WARPS];
    index_t number = blockIdx.y, square = n * n, triangle = packed_size(static_cast<int>(n));
    index_t first = static_cast<index_t>(blockIdx.x) * THREADS + threadIdx.x, stride = static_cast<index_t>(gridDim.x) * THREADS;
    packed += number * triangle;
    anchor += number * triangle;
    inverse += number * square;
    bool here;
    index_t part = survey_state(packed, anchor, inverse, matrix + number * square, signs + number * n, static_cast<int>(n), first, stride, here);
    part = block_sum(part, sums);
    index_t somewhere = block_sum(static_cast<index_t>(here), sums);
    if (threadIdx.x == 0) {
        index_t* note = notes + (number * gridDim.x + blockIdx.x) * 2;
        note[0] = part;
        note[1] = somewhere;
        if (number == 0 && blockIdx.x == 0) *counter = 0;
    }
    for (index_t at = first; at < square; at += stride) {
        int i = static_cast<int>(at / n), j = static_cast<int>(at % n);
        double unit_element = i == j ? 1.0 : 0.0;
        float now = skew_element(packed, static_cast<int>(n), i, j);
        index_t place = number * square + at;
        system[place] = -unit_element - now;
        wide[place] = inverse[at];
        other[place] = literal ? skew_element(anchor, static_cast<int>(n), i, j) - now : unit_element;
    }
    for (index_t at = first; at < n * PROBES; at += stride)
        probed[number * n * PROBES + at] = probe_sign(static_cast<int>(at / PROBES), static_cast<int>(at % PROBES));
}

// What is known of a matrix before its series is judged, and what follows.
struct Verdict {
    bool moved, tampered, due, broken, exact;
    index_t count;
};

struct Matrices {
    int n, batch;
    index_t square;
    double *system, *wide, *residual, *candidate, *spare;  // [K, n, n] each
    float *probed, *scratch;                               // [K, n, PROBES] each
    double *sizes, *column;                                // [K], [2, n]
};

// to[row] = use(number, row, probe, sum over k of left[number, row, k] from[number, k, probe]), all rows of the matrices
// from `number` to `end`, a warp each.
template <class Use>
__device__ void probe(
    const Group& group, const Matrices& all, const double* left, const float* from, int number, int end, const Use& use) {
    float* staged = reinterpret_cast<float*>(dynamic_shared());
    int n = all.n, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (; number < end; ++number) {
        const float* vectors = from + static_cast<index_t>(number) * n * PROBES;
        for (int high = group.rank * WARPS; high < n; high += group.size * WARPS) {
            int row = high + warp;
            double sums[PROBES] = {};
            for (int first = 0; first < n; first += STAGED) {
                int count = min(STAGED, n - first);
                __syncthreads();
                for (int at = threadIdx.x; at < count * PROBES; at += THREADS) staged[at] = vectors[first * PROBES + at];
                __syncthreads();
                if (row >= n) continue;
                const double* elements = left + number * all.square + static_cast<index_t>(row) * n + first;
                for (int k = lane; k < count; k += 32) {
                    double element = elements[k];
#pragma unroll
                    for (int j = 0; j < PROBES; ++j) sums[j] += element * staged[k * PROBES + j];
                }
            }
#pragma unroll
            for (int j = 0; j < PROBES; ++j)
#pragma unroll
                for (int mask = 16; mask; mask /= 2) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], mask);
            if (row < n && lane == 0)
#pragma unroll
                for (int j = 0; j < PROBES; ++j) use((static_cast<index_t>(number) * n + row) * PROBES + j, sums[j]);
        }
    }
}

// out = factor * start + left right, or I + left right where there is no start; one matrix of n rows each.
__device__ OUT_OF_LINE void multiply(
    const Group& group, int n, double* out, const double* start, double factor, const double* left, const double* right) {
    __shared__ __align__(16) double rows[DEPTH][TILE + 2];
    __shared__ __align__(16) double columns[DEPTH][TILE + 2];
    int across = (n + TILE - 1) / TILE;
    int y = threadIdx.x / 32 * 4, x = threadIdx.x % 32 * 2;  // 4 by 2 elements a thread
    for (int tile = group.rank; tile < across * across; tile += group.size) {
        int top = tile / across * TILE, side = tile % across * TILE;
        double sums[4][2] = {};
        for (int first = 0; first < n; first += DEPTH) {
            __syncthreads();
            for (int at = threadIdx.x; at < TILE * DEPTH; at += THREADS) {
                int i = top + at / DEPTH, k = first + at % DEPTH;
                rows[at % DEPTH][at / DEPTH] = i < n && k < n ? left[static_cast<index_t>(i) * n + k] : 0.0;
                k = first + at / TILE;
                int j = side + at % TILE;
                columns[at / TILE][at % TILE] = j < n && k < n ? right[static_cast<index_t>(k) * n + j] : 0.0;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < DEPTH; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i)
#pragma unroll
                    for (int j = 0; j < 2; ++j) sums[i][j] += rows[k][y + i] * columns[k][x + j];
        }
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 2; ++j) {
                int row = top + y + i, column = side + x + j;
                if (row >= n || column >= n) continue;
                index_t at = static_cast<index_t>(row) * n + column;
                out[at] = (start ? factor * start[at] : (row == column ? 1.0 : 0.0)) + sums[i][j];
            }
    }
}

// The size of what was probed for the matrices from `number` to `end`, to all.sizes; all blocks see it.
__device__ void measure(Group& group, const Matrices& all, const float* probed, int number, int end) {
    __shared__ double sums[WARPS];
    group.wait();
    for (int k = number + group.rank; k < end; k += group.size) {
        float size = probed_size(probed + static_cast<index_t>(k) * all.n * PROBES, PROBES, all.n, sums);
        if (threadIdx.x == 0) all.sizes[k] = size;
    }
    group.wait();
}

// The sizes of residual^(order+1).
__device__ OUT_OF_LINE void measure_power(Group& group, const Matrices& all, int order, int number, int end) {
    float *from = all.probed, *to = all.scratch;
    for (int power = 0; power <= order; ++power) {
        float* out = to;
        probe(group, all, all.residual, from, number, end, [=](index_t at, double sum) { out[at] = static_cast<float>(sum); });
        if (power < order) group.wait();
        to = from;
        from = out;
    }
    measure(group, all, from, number, end);
}

// The sizes of what Algorithm 1 leaves: Z - (I+A) Ã Z.
__device__ OUT_OF_LINE void measure_literal(Group& group, const Matrices& all) {
    float *z = all.probed, *scratch = all.scratch;
    probe(group, all, all.candidate, z, 0, all.batch, [=](index_t at, double sum) { scratch[at] = static_cast<float>(sum); });
    group.wait();
    probe(group, all, all.system, scratch, 0, all.batch, [=](index_t at, double sum) { z[at] += static_cast<float>(sum); });
    measure(group, all, z, 0, all.batch);
}

__device__ void fill_probes(const Group& group, const Matrices& all, int number) {
    float* z = all.probed + static_cast<index_t>(number) * all.n * PROBES;
    for (index_t at = group.first(); at < static_cast<index_t>(all.n) * PROBES; at += group.stride())
        z[at] = probe_sign(static_cast<int>(at / PROBES), static_cast<int>(at % PROBES));
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

// The exact inverse of one matrix to `candidate`, in float64, from what lies there and the size of what it leaves.
__device__ OUT_OF_LINE void make_exact(Group& group, const Matrices& all, int number, float left) {
    int n = all.n;
    index_t at = number * all.square;
    double *system = all.system + at, *residual = all.residual + at, *total = all.spare + at;
    double *from = all.candidate + at, *to = all.wide + at;
    bool done = false;
    for (int pass = 0; !done && left <= REFINABLE && pass < MOST_PASSES; ++pass) {
        group.wait();
        fill_probes(group, all, number);
        multiply(group, n, residual, nullptr, 1.0, system, from);
        group.wait();
        multiply(group, n, total, residual, 1.0, residual, residual);
        group.wait();
        multiply(group, n, to, from, 1.0, from, total);
        measure_power(group, all, REFINING_ORDER, number, number + 1);
        left = static_cast<float>(all.sizes[number]);
        done = left <= NEGLIGIBLE;
        double* swapped = from;
        from = to;
        to = swapped;
    }
    if (!done) {
        for (index_t i = group.first(); i < all.square; i += group.stride()) residual[i] = -system[i];
        group.wait();
        gauss_jordan(group, Strips(group, residual, all.column, n), reinterpret_cast<double*>(dynamic_shared()), n);
        from = residual;
    }
    if (from != all.candidate + at)
        for (index_t i = group.first(); i < all.square; i += group.stride()) all.candidate[at + i] = from[i];
    group.wait();
}

__device__ Verdict first_verdict(
    const index_t* notes, int blocks, index_t seal, index_t updates, index_t reset_every, index_t* room) {
    index_t part = 0, movements = 0;
    for (int block = threadIdx.x; block < blocks; block += THREADS) {
        part += notes[2 * block];
        movements += notes[2 * block + 1];
    }
    Verdict verdict;
    verdict.tampered = block_sum(part, room) != seal;
    verdict.moved = block_sum(movements, room) != 0;
    verdict.count = updates + verdict.moved;
    verdict.due = verdict.moved && reset_every && verdict.count % reset_every == 0;
    verdict.broken = verdict.tampered;
    verdict.exact = false;
    return verdict;
}

// Takes the verdict on every matrix, brings its state up to date and copies it out.
//
// Grid: (blocks), all at the same time, with dynamic shared memory of STAGED * PROBES floats. `candidate` holds the inverses after the series, `residual` what the series was
// taken in; for Algorithm 1 it holds U before its signs. `commits` [K, blocks] is room for sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1) conclude_large(
    const float* packed, float* anchor, float* inverse, float* matrix, const float* signs, index_t* updates,
    index_t* refreshes, index_t* seal, float* read_matrix, float* read_inverse, double* system, double* wide,
    double* residual, double* candidate, double* spare, float* probed, double* sizes, const index_t* notes,
    index_t* commits, unsigned* counter, index_t rows, index_t matrices, index_t survey_blocks, index_t method,
    index_t order, index_t reset_every) {
    __shared__ index_t sums[WARPS];
    __shared__ Verdict verdicts[MOST_MATRICES];
    int n = static_cast<int>(rows), batch = static_cast<int>(matrices);
    index_t square = rows * rows, triangle = packed_size(n);
    bool literal = method == NEUMANN;
    Group group(blockIdx.x, gridDim.x, counter);
    Matrices all = {n, batch, square, system, wide, residual, candidate, spare, probed, probed + batch * rows * PROBES, sizes, sizes + batch};

    bool changed = false;
    for (int k = 0; k < batch; ++k) {
        Verdict verdict = first_verdict(notes + k * survey_blocks * 2, static_cast<int>(survey_blocks), seal[k], updates[k], reset_every, sums);
        if (threadIdx.x == 0) verdicts[k] = verdict;
        changed |= verdict.moved || verdict.tampered;
    }
    __syncthreads();
    if (changed) {
        if (literal) measure_literal(group, all);
        else measure_power(group, all, method == EXACT ? REFINING_ORDER : static_cast<int>(order), 0, batch);
    }
    for (int k = 0; changed && k < batch; ++k) {
        Verdict verdict = verdicts[k];
        if (!verdict.moved && !verdict.tampered) continue;
        float left = static_cast<float>(sizes[k]);
        bool sound = method == EXACT || left <= (literal ? NEUMANN_TOLERANCE : HYPERPOWER_TOLERANCE);
        verdict.broken = (verdict.moved && !verdict.due && !sound) || verdict.tampered;
        verdict.exact = method == EXACT || verdict.due || verdict.broken;
        __syncthreads();
        if (threadIdx.x == 0) verdicts[k] = verdict;
        if (!verdict.exact || (!literal && left <= NEGLIGIBLE)) continue;
        make_exact(group, all, k, left);
        if (literal) multiply(group, n, residual + k * square, candidate + k * square, 2.0, candidate + k * square, system + k * square);
    }
    if (changed) group.wait();

    for (int k = 0; k < batch; ++k) {
        index_t at = k * square;
        bool here = verdicts[k].moved || verdicts[k].tampered;
        SealPart part;
        for (index_t i = group.first(); i < square; i += group.stride()) {
            if (here) {
                int row = static_cast<int>(i / n), column = static_cast<int>(i % n);
                float value = static_cast<float>(candidate[at + i]);
                float cayley = literal ? static_cast<float>(residual[at + i]) : 2.0f * value - (row == column ? 1.0f : 0.0f);
                inverse[at + i] = value;
                matrix[at + i] = cayley * unit(signs[k * rows + column]);
                part.inverse(value);
                part.matrix(matrix[at + i]);
            }
            read_inverse[at + i] = inverse[at + i];
            read_matrix[at + i] = matrix[at + i];
        }
        if (!here) continue;
        for (index_t i = group.first(); i < triangle; i += group.stride()) {
            anchor[k * triangle + i] = packed[k * triangle + i];
            part.anchor(packed[k * triangle + i]);
        }
        for (index_t i = group.first(); i < n; i += group.stride()) part.sign(signs[k * rows + i]);
        index_t sum = block_sum(part.sum, sums);
        if (threadIdx.x == 0) commits[static_cast<index_t>(k) * group.size + group.rank] = sum;
    }
    if (!changed) return;
    group.wait();
    for (int k = group.rank; k < batch; k += group.size) {
        if (!verdicts[k].moved && !verdicts[k].tampered) continue;
        index_t part = 0;
        for (int block = threadIdx.x; block < group.size; block += THREADS) part += commits[static_cast<index_t>(k) * group.size + block];
        part = block_sum(part, sums);
        if (threadIdx.x) continue;
        seal[k] = part;
        updates[k] = verdicts[k].count;
        refreshes[k] += verdicts[k].broken;
    }
}

// The operands of the gradient in float64, [3, K, n, n]: G, U + D and Ã. Grid: any number of blocks.
extern "C" __global__ void __launch_bounds__(THREADS, 1) widen_large(
    const float* grad_matrix, const float* matrix, const float* inverse, const float* signs, double* wide, index_t n,
    index_t matrices) {
    index_t total = matrices * n * n, stride = static_cast<index_t>(gridDim.x) * THREADS;
    for (index_t at = static_cast<index_t>(blockIdx.x) * THREADS + threadIdx.x; at < total; at += stride) {
        index_t row = at / n, column = at % n;
        wide[at] = grad_matrix[at];
        wide[total + at] = static_cast<double>(matrix[at]) + (row % n == column ? unit(signs[row]) : 0.0f);
        wide[2 * total + at] = inverse[at];
    }
}

// The gradient: V'-V above the diagonal. Grid: (tiles, tiles, K) of 32 by 32 elements.
extern "C" __global__ void __launch_bounds__(THREADS, 1) narrow_large(const double* v, float* gradient, index_t n) {
    __shared__ float mirrored[32][33];
    int row = blockIdx.y * 32, column = blockIdx.x * 32, x = threadIdx.x % 32;
    if (row > column) return;
    v += blockIdx.z * n * n;
    gradient += blockIdx.z * packed_size(static_cast<int>(n));
    for (int y = threadIdx.x / 32; y < 32; y += WARPS)
        if (column + y < n && row + x < n) mirrored[y][x] = static_cast<float>(v[(column + y) * n + row + x]);
    __syncthreads();
    for (int y = threadIdx.x / 32; y < 32; y += WARPS) {
        int i = row + y, j = column + x;
        if (i < j && j < n) gradient[packed_row(static_cast<int>(n), i) + j] = mirrored[x][y] - static_cast<float>(v[i * n + j]);
    }
}
