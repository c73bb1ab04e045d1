// The orthogonal update of matrices up to some 256 rows, and its gradient: one launch each.
//
// A group of GROUP blocks has one matrix. Each block computes whole panels of `width` columns, so that a series needs
// nothing from other blocks but the matrix that it is taken in: the residual R (or Algorithm 1's M), once a pass. What
// the blocks exchange goes through global memory, which at these sizes means the L2 cache, between two barriers.
//
//   1. survey     has A moved, does the seal hold? If all is as it was, the state is copied to the caller, and done.
//   2. residual   R = I - (I+A) Ã, summed in float64
//   3. series     Ã (I + R + ... + R^p), and beside it R^(p+1) Z for the guard
//   4. exact      only where the guard, the seal or a reset wants it: 2 and 3 again until nothing is left of the residual
//                 (it is measured anew each time, so this is the exact inverse but for its rounding); where the residual
//                 is too large for that, Gauss and Jordan's elimination in float64
//   5. commit     the state, its copies for the caller, the counts and the seal
//
// A product sums `slices` parts of the inner dimension in as many sets of threads, adds them in a fixed order, and hands
// each element to a function of the caller. The left matrix is staged in shared memory, transposed, in chunks of `chunk`
// inner rows; where one chunk is all of it, it stays for the next product.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER 1
#else
#define CLUSTER 0
#endif
#include "matrices.cuh"

#define GROUP 8  // also the number of the guard's probes: each block has one
#define TILE 4   // rows and columns of a product that one thread sums
#if GROUP != PROBES
#error "each block of a group probes with one column of Z"
#endif

struct __align__(16) Shape {
    int n, width, slices, chunk;
    __device__ int rows() const { return (n + TILE - 1) / TILE * TILE; }
    // The pitch of staged rows: 4 modulo 32, for stores and loads without bank conflicts.
    __device__ int pitch() const { return (n + 27) / 32 * 32 + 4; }
    __device__ int panels() const { return (n + width - 1) / width; }
};

// The shared memory of a block.
struct Room {
    double* partial;  // [slices, rows, width]: parts of sums
    double* panel;    // [n, width]: the right operand; also as floats
    double* sums;     // [WARPS]
    float* probes;    // [n, TILE]: the right operand where the guard probes; one column counts
    double* stage;    // [chunk, pitch]: the left operand; also as floats, [2 chunk, pitch]

    __device__ explicit Room(const Shape& shape) {
        partial = reinterpret_cast<double*>(dynamic_shared());
        panel = partial + shape.slices * shape.rows() * shape.width;
        sums = panel + shape.n * shape.width;
        probes = reinterpret_cast<float*>(sums + WARPS);
        stage = reinterpret_cast<double*>(probes + shape.n * TILE);
    }
};

template <class Real>
__device__ __forceinline__ int chunk_of(const Shape& shape) {
    return min(shape.n, shape.chunk * static_cast<int>(sizeof(double) / sizeof(Real)));
}

// stage[k, i] = element(i, first + k) of the left operand for `count` inner rows, zero for rows beyond n.
template <class Real, class Element>
__device__ void fill_stage(Real* stage, const Shape& shape, int first, int count, const Element& element) {
    int lane = threadIdx.x % 32, high = shape.rows() / TILE, pitch = shape.pitch();
    int blocks = (count + 7) / 8 * high;
#pragma unroll 8
    for (int block = threadIdx.x / 32; block < blocks; block += WARPS) {
        int k = block / high * 8 + lane % 8, i = block % high * TILE + lane / 8;
        if (k < count) stage[k * pitch + i] = i < shape.n ? static_cast<Real>(element(i, first + k)) : Real(0);
    }
}

// panel[k, j] = element(k, first + j), zero for columns beyond n.
template <class Real, class Element>
__device__ void fill_panel(Real* panel, int n, int width, int first, const Element& element) {
#pragma unroll 4
    for (int at = threadIdx.x; at < n * width; at += THREADS) {
        int k = at / width, j = first + at % width;
        panel[at] = j < n ? static_cast<Real>(element(k, j)) : Real(0);
    }
}

// sums += stage' panel for one tile, over the inner rows slice, slice + slices, ...
template <class Real>
__device__ __forceinline__ void multiply_tile(
    Real (&sums)[TILE][TILE], const Real* stage, int pitch, const Real* panel, int width, int slice, int slices, int count) {
    struct __align__(16) Four {
        Real x[TILE];
    };
#pragma unroll 4
    for (int k = slice; k < count; k += slices) {
        Four left = *reinterpret_cast<const Four*>(stage + k * pitch);
        Four right = *reinterpret_cast<const Four*>(panel + k * width);
#pragma unroll
        for (int i = 0; i < TILE; ++i)
#pragma unroll
            for (int j = 0; j < TILE; ++j) sums[i][j] += left.x[i] * right.x[j];
    }
}

// use(i, j, sum over k of element(i, k) panel[k, j]) for all rows i and the columns j of a panel. `staged` says that the
// stage still holds the left operand, from a product before this one. `use` may write to the panel.
template <class Real, class Element, class Use>
__device__ void product(
    const Room& room, const Shape& shape, bool staged, const Element& element, const Real* panel, int width, const Use& use) {
    Real* stage = reinterpret_cast<Real*>(room.stage);
    Real* partial = reinterpret_cast<Real*>(room.partial);
    int high = shape.rows() / TILE, tiles = high * (width / TILE), pitch = shape.pitch();
    int slices = min(shape.slices, THREADS / tiles), slice = threadIdx.x / tiles;
    int row = threadIdx.x % tiles % high * TILE, column = threadIdx.x % tiles / high * TILE;
    int chunk = chunk_of<Real>(shape);
    Real sums[TILE][TILE] = {};
    __syncthreads();
    for (int first = 0; first < shape.n; first += chunk) {
        int count = min(chunk, shape.n - first);
        if (!staged || chunk < shape.n) {
            if (first) __syncthreads();
            fill_stage(stage, shape, first, count, element);
            __syncthreads();
        }
        if (slice < slices)
            multiply_tile(sums, stage + row, pitch, panel + first * width + column, width, slice, slices, count);
    }
    if (slice < slices) {
#pragma unroll
        for (int i = 0; i < TILE; ++i)
#pragma unroll
            for (int j = 0; j < TILE; ++j)
                partial[(slice * shape.rows() + row + i) * width + column + j] = sums[i][j];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < shape.n * width; at += THREADS) {
        Real sum = 0;
        for (int part = 0; part < slices; ++part) sum += partial[part * shape.rows() * width + at];
        use(at / width, at % width, sum);
    }
}

// What a group works on: one matrix, its state, and room in global memory.
struct Update {
    const float *packed, *signs;
    float *anchor, *inverse, *matrix;   // the state
    float *read_matrix, *read_inverse;  // its copies for the caller
    float *residual, *spare, *probed;   // [n, n], [n, n], [n, PROBES]
    double *system, *column;            // [n, n], [2, n]
    index_t* notes;                     // [3, GROUP]
};

struct Worker {
    const Shape& shape;
    const Update& update;
    Group& group;

    __device__ Worker(const Shape& shape, const Update& update, Group& group)
        : shape(shape), update(update), group(group) {}

    // R of `inverse`, in float64 and rounded, to update.residual.
    __device__ void residual_of(const float* inverse) {
        Room room(shape);
        int n = shape.n, width = shape.width;
        const float* packed = update.packed;
        for (int number = group.rank; number < shape.panels(); number += group.size) {
            int first = number * width;
            __syncthreads();
            fill_panel(room.panel, n, width, first, [=](int k, int j) { return inverse[k * n + j]; });
            const double* panel = room.panel;
            float* residual = update.residual;
            product(room, shape, number != group.rank, [=](int i, int k) { return skew_element(packed, n, i, k); }, panel, width,
                    [=](int i, int j, double sum) {
                        if (first + j >= n) return;
                        double all = panel[i * width + j] + sum;
                        residual[i * n + first + j] = static_cast<float>((i == first + j ? 1.0 : 0.0) - all);
                    });
        }
    }

    // This block's column of Z, and zeros beside it.
    __device__ void fill_probes() {
        Room room(shape);
        for (int at = threadIdx.x; at < shape.n * TILE; at += THREADS)
            room.probes[at] = at % TILE ? 0.0f : probe_sign(at / TILE, group.rank);
    }

    // The guard's size of what the columns of all blocks have become.
    __device__ float size_of_probes() {
        Room room(shape);
        __syncthreads();
        for (int row = threadIdx.x; row < shape.n; row += THREADS)
            update.probed[row * PROBES + group.rank] = room.probes[row * TILE];
        group.wait();
        constexpr int PITCH = PROBES + 1;
        float* probed = reinterpret_cast<float*>(room.partial);
        for (int at = threadIdx.x; at < shape.n * PROBES; at += THREADS)
            probed[at / PROBES * PITCH + at % PROBES] = update.probed[at];
        __syncthreads();
        return probed_size(probed, PITCH, shape.n, room.sums);
    }

    // One pass of the residual series from one inverse to another; the guard's size of what it leaves.
    __device__ OUT_OF_LINE float refine(const float* from, float* to, int order) {
        Room room(shape);
        int n = shape.n, width = shape.width;
        residual_of(from);
        group.wait();
        const float* residual = update.residual;
        auto ratio = [=](int i, int k) { return residual[i * n + k]; };
        bool staged = false;
        fill_probes();
        float* probes = room.probes;
        for (int power = 0; power <= order; ++power) {
            product(room, shape, staged, ratio, static_cast<const float*>(probes), TILE,
                    [=](int i, int j, float sum) { probes[i * TILE + j] = sum; });
            staged = true;
        }
        float* panel = reinterpret_cast<float*>(room.panel);
        for (int number = group.rank; number < shape.panels(); number += group.size) {
            int first = number * width;
            __syncthreads();
            fill_panel(panel, n, width, first, ratio);
            for (int power = 1; power < order; ++power) {
                add_product(staged, ratio, panel, first, ratio);
                staged = true;
            }
            finish_series(from, panel, first, to);
            staged = false;
        }
        return size_of_probes();
    }

    // panel = start + left panel.
    template <class Left, class Start>
    __device__ void add_product(bool staged, const Left& left, float* panel, int first, const Start& start) {
        Room room(shape);
        int n = shape.n, width = shape.width;
        product(room, shape, staged, left, static_cast<const float*>(panel), width, [=](int i, int j, float sum) {
            panel[i * width + j] = first + j < n ? start(i, first + j) + sum : 0.0f;
        });
    }

    // Columns of to = from + from panel.
    __device__ void finish_series(const float* from, const float* panel, int first, float* to) {
        Room room(shape);
        int n = shape.n, width = shape.width;
        auto left = [=](int i, int k) { return from[i * n + k]; };
        product(room, shape, false, left, panel, width, [=](int i, int j, float sum) {
            if (first + j < n) to[i * n + first + j] = from[i * n + first + j] + sum;
        });
    }

    // Algorithm 1 from the state's inverse to another; the guard's size of the residual that it leaves.
    __device__ OUT_OF_LINE float neumann(float* to, int order) {
        Room room(shape);
        int n = shape.n, width = shape.width;
        const float *old = update.inverse, *packed = update.packed, *anchor = update.anchor;
        float* panel = reinterpret_cast<float*>(room.panel);
        float* residual = update.residual;
        auto inverse = [=](int i, int k) { return old[i * n + k]; };
        auto ratio = [=](int i, int k) { return residual[i * n + k]; };
        for (int number = group.rank; number < shape.panels(); number += group.size) {
            int first = number * width;
            __syncthreads();
            fill_panel(panel, n, width, first, [=](int k, int j) {
                return skew_element(anchor, n, k, j) - skew_element(packed, n, k, j);
            });
            product(room, shape, number != group.rank, inverse, static_cast<const float*>(panel), width, [=](int i, int j, float sum) {
                if (first + j < n) residual[i * n + first + j] = sum;
            });
        }
        group.wait();
        bool staged = false;
        for (int number = group.rank; number < shape.panels(); number += group.size) {
            int first = number * width;
            __syncthreads();
            fill_panel(panel, n, width, first, inverse);
            for (int power = 0; power < order; ++power) {
                add_product(staged, ratio, panel, first, inverse);
                staged = true;
            }
            __syncthreads();
            for (int at = threadIdx.x; at < n * width; at += THREADS)
                if (first + at % width < n) to[at / width * n + first + at % width] = panel[at];
        }
        group.wait();
        return neumann_remainder(to);
    }

    // The size of Z - (I+A) (inverse Z).
    __device__ OUT_OF_LINE float neumann_remainder(const float* inverse) {
        Room room(shape);
        int n = shape.n, rank = group.rank;
        const float* packed = update.packed;
        float* probes = room.probes;
        fill_probes();
        product(room, shape, false, [=](int i, int k) { return inverse[i * n + k]; }, static_cast<const float*>(probes), TILE,
                [=](int i, int j, float sum) { probes[i * TILE + j] = sum; });
        product(room, shape, false, [=](int i, int k) { return skew_element(packed, n, i, k); },
                static_cast<const float*>(probes), TILE, [=](int i, int j, float sum) {
                    if (j == 0) probes[i * TILE] = probe_sign(i, rank) - probes[i * TILE] - sum;
                });
        return size_of_probes();
    }

    // The exact inverse to update.read_inverse.
    __device__ OUT_OF_LINE void eliminate() {
        Room room(shape);
        int n = shape.n, width = shape.width;
        for (int number = group.rank; number < shape.panels(); number += group.size)
            for (int at = threadIdx.x; at < n * width; at += THREADS) {
                int i = at / width, j = number * width + at % width;
                if (j < n) update.system[i * n + j] = (i == j ? 1.0 : 0.0) + skew_element(update.packed, n, i, j);
            }
        group.wait();
        gauss_jordan(group, update.system, update.column, room.partial, n, width);
        for (int number = group.rank; number < shape.panels(); number += group.size)
            for (int at = threadIdx.x; at < n * width; at += THREADS) {
                int i = at / width, j = number * width + at % width;
                if (j < n) update.read_inverse[i * n + j] = static_cast<float>(update.system[i * n + j]);
            }
        group.wait();
    }

    // The exact inverse, from the latest one and the size of its residual's remainder; where it is.
    __device__ const float* make_exact(const float* latest, float left, bool done) {
        for (int pass = 0; !done && left <= REFINABLE && pass < MOST_PASSES; ++pass) {
            float* to = latest == update.read_inverse ? update.spare : update.read_inverse;
            left = refine(latest, to, REFINING_ORDER);
            latest = to;
            done = left <= NEGLIGIBLE;
        }
        if (done) return latest;
        eliminate();
        return update.read_inverse;
    }

    __device__ void commit_element(const float* latest, int i, int j, float orthogonal, SealPart& seal) {
        int at = i * shape.n + j;
        float value = latest[at], u = orthogonal * unit(update.signs[j]);
        update.inverse[at] = value;
        if (latest != update.read_inverse) update.read_inverse[at] = value;
        update.matrix[at] = update.read_matrix[at] = u;
        seal.inverse(value);
        seal.matrix(u);
    }

    // Store the new state and the caller's copies; this thread's part of the seal.
    __device__ index_t commit(const float* latest, int method) {
        Room room(shape);
        int n = shape.n, width = shape.width;
        const float* packed = update.packed;
        SealPart seal;
        SealPart* part = &seal;
        Worker* worker = this;
        float* panel = reinterpret_cast<float*>(room.panel);
        for (int number = group.rank; number < shape.panels(); number += group.size) {
            int first = number * width;
            __syncthreads();
            if (method == NEUMANN) {
                fill_panel(panel, n, width, first, [=](int k, int j) { return (k == j ? 1.0f : 0.0f) - skew_element(packed, n, k, j); });
                product(room, shape, number != group.rank, [=](int i, int k) { return latest[i * n + k]; },
                        static_cast<const float*>(panel), width, [=](int i, int j, float sum) { panel[i * width + j] = sum; });
                __syncthreads();
            }
            for (int at = threadIdx.x; at < n * width; at += THREADS) {
                int i = at / width, j = first + at % width;
                if (j >= n) continue;
                float cayley = method == NEUMANN ? panel[at] : 2.0f * latest[i * n + j] - (i == j ? 1.0f : 0.0f);
                worker->commit_element(latest, i, j, cayley, *part);
            }
        }
        for (index_t i = group.first(); i < packed_size(n); i += group.stride()) {
            update.anchor[i] = packed[i];
            seal.anchor(packed[i]);
        }
        for (index_t i = group.first(); i < n; i += group.stride()) seal.sign(update.signs[i]);
        return seal.sum;
    }
};

// The place of matrix `number` of a batch in the workspace, which has `pitch` doubles for each.
__device__ __forceinline__ Update update_of(
    index_t number, int n, const float* packed, float* anchor, float* inverse, float* matrix, const float* signs,
    float* read_matrix, float* read_inverse, double* workspace, index_t pitch) {
    index_t square = static_cast<index_t>(n) * n;
    Update update;
    update.packed = packed + number * packed_size(n);
    update.anchor = anchor + number * packed_size(n);
    update.signs = signs + number * n;
    update.inverse = inverse + number * square;
    update.matrix = matrix + number * square;
    update.read_matrix = read_matrix + number * square;
    update.read_inverse = read_inverse + number * square;
    update.system = workspace + number * pitch;
    update.column = update.system + square;
    update.notes = reinterpret_cast<index_t*>(update.column + 2 * n);
    update.residual = reinterpret_cast<float*>(update.notes + 3 * GROUP);
    update.spare = update.residual + square;
    update.probed = update.spare + square;
    return update;
}

__device__ __forceinline__ void copy_state(const Group& group, const Update& update, index_t square) {
#pragma unroll 4
    for (index_t at = group.first(); at < square; at += group.stride()) {
        update.read_matrix[at] = update.matrix[at];
        update.read_inverse[at] = update.inverse[at];
    }
}

#if CLUSTER
#define IN_GROUPS __cluster_dims__(GROUP, 1, 1)
#else
#define IN_GROUPS
#endif

// Brings a batch of matrices up to date, as `follow_inverse` in ncgru/orthogonal/inverse.py says, and copies them out.
//
// Grid: (GROUP, matrices). `counters` [matrices] are 0, and may be null in a cluster.
extern "C" __global__ void IN_GROUPS __launch_bounds__(THREADS, 1) follow_small(
    const float* packed, float* anchor, float* inverse, float* matrix, const float* signs, index_t* updates,
    index_t* refreshes, index_t* seal, float* read_matrix, float* read_inverse, double* workspace, index_t pitch,
    unsigned* counters, index_t n, index_t width, index_t slices, index_t chunk, index_t method, index_t order,
    index_t reset_every) {
    Shape shape = {static_cast<int>(n), static_cast<int>(width), static_cast<int>(slices), static_cast<int>(chunk)};
    index_t number = blockIdx.y;
    Group group(blockIdx.x, GROUP, counters + number);
    Update update = update_of(number, shape.n, packed, anchor, inverse, matrix, signs, read_matrix, read_inverse, workspace, pitch);
    Worker worker(shape, update, group);
    index_t* sums = reinterpret_cast<index_t*>(Room(shape).sums);

    bool here;
    index_t part = survey_state(update.packed, update.anchor, update.inverse, update.matrix, update.signs, shape.n,
                                group.first(), group.stride(), here);
    part = block_sum(part, sums);
    index_t somewhere = block_sum(static_cast<index_t>(here), sums);
    if (threadIdx.x == 0) {
        update.notes[group.rank] = part;
        update.notes[GROUP + group.rank] = somewhere;
    }
    group.wait();
    index_t all = 0, movements = 0;
    for (int block = 0; block < GROUP; ++block) {
        all += update.notes[block];
        movements += update.notes[GROUP + block];
    }
    bool moved = movements != 0, tampered = all != seal[number];
    if (!moved && !tampered) {
        copy_state(group, update, n * n);
        return;
    }

    index_t count = updates[number] + moved;
    bool due = moved && reset_every && count % reset_every == 0;
    const float* latest = update.inverse;
    bool broken = tampered, exact = true, done = false;
    float left = 0.0f;
    if (method != EXACT) {
        bool literal = method == NEUMANN;
        left = literal ? worker.neumann(update.read_inverse, static_cast<int>(order)) : worker.refine(latest, update.read_inverse, static_cast<int>(order));
        latest = update.read_inverse;
        bool sound = left <= (literal ? NEUMANN_TOLERANCE : HYPERPOWER_TOLERANCE);
        broken = (moved && !due && !sound) || tampered;
        exact = due || broken;
        done = !literal && left <= NEGLIGIBLE;
    }
    if (exact) latest = worker.make_exact(latest, left, done);

    part = block_sum(worker.commit(latest, static_cast<int>(method)), sums);
    if (threadIdx.x == 0) update.notes[2 * GROUP + group.rank] = part;
    group.wait();
    if (group.rank || threadIdx.x) return;
    all = 0;
    for (int block = 0; block < GROUP; ++block) all += update.notes[2 * GROUP + block];
    seal[number] = all;
    updates[number] = count;
    refreshes[number] += broken;
}

// The gradient in the packed A's: V'-V above the diagonal, V = Ã' (G (D+U')).
//
// Grid: (GROUP, matrices). `products` [matrices, n, n] is room for V.
extern "C" __global__ void IN_GROUPS __launch_bounds__(THREADS, 1) gradient_small(
    const float* grad_matrix, const float* matrix, const float* inverse, const float* signs, float* gradient,
    float* products, unsigned* counters, index_t n, index_t width, index_t slices, index_t chunk) {
    Shape shape = {static_cast<int>(n), static_cast<int>(width), static_cast<int>(slices), static_cast<int>(chunk)};
    index_t number = blockIdx.y;
    Group group(blockIdx.x, GROUP, counters + number);
    Room room(shape);
    int size = shape.n, columns = shape.width;
    const float *g = grad_matrix + number * n * n, *u = matrix + number * n * n, *old = inverse + number * n * n;
    const float* sign = signs + number * n;
    float* v = products + number * n * n;
    float* panel = reinterpret_cast<float*>(room.panel);
    for (int tile = group.rank; tile < shape.panels(); tile += GROUP) {
        int first = tile * columns;
        __syncthreads();
        fill_panel(panel, size, columns, first, [=](int k, int j) { return u[j * size + k] + (k == j ? unit(sign[j]) : 0.0f); });
        product(room, shape, false, [=](int i, int k) { return g[i * size + k]; }, static_cast<const float*>(panel), columns,
                [=](int i, int j, float sum) { panel[i * columns + j] = sum; });
        product(room, shape, false, [=](int i, int k) { return old[k * size + i]; }, static_cast<const float*>(panel), columns,
                [=](int i, int j, float sum) {
                    if (first + j < size) v[i * size + first + j] = sum;
                });
    }
    group.wait();
    float* packed = gradient + number * packed_size(size);
    for (int i = group.rank * WARPS + threadIdx.x / 32; i < size; i += GROUP * WARPS)
        for (int j = i + 1 + threadIdx.x % 32; j < size; j += 32)
            packed[packed_row(size, i) + j] = v[j * size + i] - v[i * size + j];
}
