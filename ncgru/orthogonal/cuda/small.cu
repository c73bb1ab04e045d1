// The orthogonal update of matrices up to ROWS rows, and its gradient: one launch each.
//
// A group of GROUP blocks has one matrix, and each of its blocks WIDTH columns of all products. A series needs nothing
// from other blocks, then, but the matrix that it is taken in: the residual R (or Algorithm 1's M), once a pass. That goes
// through global memory, which at these sizes means the L2 cache: the caller's copies have room for it until they are
// written. All else that blocks tell each other is little, and goes from shared memory to shared memory in a cluster.
//
//   1. survey     has A moved, does the seal hold? If all is as it was, the state is copied to the caller, and done.
//   2. residual   R = I - (I+A) Ã, summed in float64
//   3. series     R^(p+1) Z for the guard, and Ã (I + R + ... + R^p)
//   4. exact      only where the guard, the seal or a reset wants it: 2 and 3 again until nothing is left of the residual
//                 (it is measured anew each time, so this is the exact inverse but for its rounding); where the residual
//                 is too large for that, Gauss and Jordan's elimination in float64
//   5. commit     the state, its copies for the caller, the counts and the seal
//
// Everything has room for ROWS rows, a multiple of 32, with zeros beyond n where they count, so that the loops but for
// the inner ones of products are known to the compiler. The left operand of a product is staged in shared memory, CHUNK
// of its columns at a time; it is fetched into registers before it is needed. Where one chunk is all of it, it stays for
// the next product.

#ifndef CLUSTER
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CLUSTER 1
#else
#define CLUSTER 0
#endif
#endif
#include "matrices.cuh"

#define GROUP 8  // also the number of the guard's probes: each block has one
#if GROUP != PROBES
#error "each block of a group probes with one column of Z"
#endif
// Where blocks see each other's shared memory each has a copy of what all know; else there is one in global memory.
#define COPIES (CLUSTER ? GROUP : 1)

#define WIDTH (ROWS / GROUP)
#define CHUNKS ((ROWS + CHUNK - 1) / CHUNK)
#define TILE 4  // rows and columns of a product that one thread sums
// A product is shared out between threads by tile and, SLICES times, by inner rows.
#define TILES (ROWS / TILE * WIDTH / TILE)
#define SLICES (THREADS / TILES < CHUNK / TILE ? THREADS / TILES : CHUNK / TILE)
// Of a chunk a thread fetches HIGH times ACROSS elements.
#define HIGH (ROWS / WARPS)
#define ACROSS (CHUNK / 32)
#define OWNED ((ROWS * WIDTH + THREADS - 1) / THREADS)

// As many numbers as one instruction loads.
template <class Real>
struct __align__(16) Vector {
    static constexpr int SIZE = 16 / static_cast<int>(sizeof(Real));
    Real x[SIZE];
};

// The pitch of staged rows: eight neighbouring rows' vectors lie in different banks.
template <class Real>
constexpr int PITCH = CHUNK + Vector<Real>::SIZE;

// What each block tells all of its group.
struct Mail {
    double column[2 * ROWS];           // of elimination
    index_t notes[2 * GROUP];          // of the survey
    float probed[ROWS * (PROBES + 1)];  // what has become of Z
};

// The shared memory of a block; `shared_bytes` in small.py knows its size.
struct Room {
    static constexpr int PARTS = SLICES * ROWS * WIDTH;
    static constexpr int WIDE = ROWS * PITCH<double> * 8 > PARTS * 8 ? ROWS * PITCH<double> * 8 : PARTS * 8;
    static constexpr int NARROW = (ROWS * PITCH<float> + PARTS) * 4;
    static constexpr int STAGE = WIDE > NARROW ? WIDE : NARROW;

    // [ROWS, PITCH]: a chunk of the left operand, then parts of sums. In float64 these take its place.
    char* stage;
    double* wide;   // [CHUNK, WIDTH]: a chunk of the right operand, where it is in float64
    Mail* mail;
    double* sums;   // [WARPS]
    float* panel;   // [ROWS, WIDTH]: the right operand
    float* own;     // [ROWS, WIDTH]: this block's columns of the inverse
    float* probe;   // [2, ROWS]: what has become of this block's column of Z

    __device__ Room() {
        stage = dynamic_shared();
        wide = reinterpret_cast<double*>(stage + STAGE);
        mail = reinterpret_cast<Mail*>(wide + CHUNK * WIDTH);
        sums = reinterpret_cast<double*>(mail + 1);
        panel = reinterpret_cast<float*>(sums + WARPS);
        own = panel + ROWS * WIDTH;
        probe = own + ROWS * WIDTH;
    }
    template <class Real>
    __device__ Real* left() const { return reinterpret_cast<Real*>(stage); }
    template <class Real>
    __device__ Real* partial() const { return left<Real>() + (sizeof(Real) == 8 ? 0 : ROWS * PITCH<Real>); }
};

// ---- left operands: where their elements are, and which of them a thread fetches

// A matrix. A warp takes a row's neighbours.
struct Plain {
    const float* from;
    __device__ __forceinline__ float element(int n, int i, int k) const { return from[i * n + k]; }
    static __device__ __forceinline__ int row(int r) { return threadIdx.x / 32 + r * WARPS; }
    static __device__ __forceinline__ int inner(int c) { return threadIdx.x % 32 + c * 32; }
};

// A warp takes 8 rows by 4 inner ones: sectors of global memory whichever way they lie, and one bank of shared memory
// each. Two warps beside each other have 16 rows, eight such pairs 32 inner rows.
struct Patches {
    static __device__ __forceinline__ int row(int r) { return r * 16 + threadIdx.x / 32 % 2 * 8 + threadIdx.x % 8; }
    static __device__ __forceinline__ int inner(int c) { return c * 32 + threadIdx.x / 64 * 4 + threadIdx.x % 32 / 8; }
};

// The transpose of a matrix.
struct Transposed : Patches {
    const float* from;
    __device__ __forceinline__ explicit Transposed(const float* from) : from(from) {}
    __device__ __forceinline__ float element(int n, int i, int k) const { return from[k * n + i]; }
};

// A, from the packed one.
struct Skew : Patches {
    const float* from;
    __device__ __forceinline__ explicit Skew(const float* from) : from(from) {}
    __device__ __forceinline__ float element(int n, int i, int k) const {
        int low = min(i, k), high = max(i, k);
        if (low == high) return 0.0f;
        float x = from[low * n - low * (low + 1) / 2 - low - 1 + high];
        return i < k ? x : -x;
    }
};

// A left operand: a chunk of it is on its way to registers, or is there, or is staged.
template <class Source>
struct Operand {
    Source source;
    int n;
    float x[HIGH][ACROSS];

    __device__ __forceinline__ Operand(const Source& source, int n) : source(source), n(n) {}

    __device__ __forceinline__ void fetch(int chunk) {
#pragma unroll
        for (int r = 0; r < HIGH; ++r)
#pragma unroll
            for (int c = 0; c < ACROSS; ++c) {
                int i = Source::row(r), k = chunk * CHUNK + Source::inner(c);
                x[r][c] = i < n && k < n ? source.element(n, i, k) : 0.0f;
            }
    }
    // Before products: where one chunk is all of it, it goes to the stage, for all of them.
    template <class Real>
    __device__ __forceinline__ void begin() const {
        __syncthreads();
        if (CHUNKS == 1) put(Room().left<Real>());
    }
    // Within a product otherwise: the chunk that has been fetched goes to the stage, and the next is on its way.
    template <class Real>
    __device__ __forceinline__ void next(int chunk) {
        if (CHUNKS == 1) return;
        __syncthreads();
        put(Room().left<Real>());
        fetch((chunk + 1) % CHUNKS);
    }
    template <class Real>
    __device__ __forceinline__ void put(Real* stage) const {
        stage += Source::row(0) * PITCH<Real> + Source::inner(0);
        int high = Source::row(1) - Source::row(0);
#pragma unroll
        for (int r = 0; r < HIGH; ++r)
#pragma unroll
            for (int c = 0; c < ACROSS; ++c) stage[r * high * PITCH<Real> + c * 32] = x[r][c];
    }
};

// sums += left right for this thread's tile, rows 8 apart, and slice, over `count` inner rows. Eight neighbouring threads
// have neighbouring rows.
template <class Real>
__device__ __forceinline__ void multiply_tile(
    Real (&sums)[TILE][TILE], const Real* left, const Real* right, int row, int column, int slice, int count) {
    constexpr int SIZE = Vector<Real>::SIZE;
#pragma unroll 1
    for (int k = slice * SIZE; k < count; k += SLICES * SIZE) {
        Vector<Real> rows[TILE];
#pragma unroll
        for (int i = 0; i < TILE; ++i) rows[i] = *reinterpret_cast<const Vector<Real>*>(left + (row + 8 * i) * PITCH<Real> + k);
#pragma unroll
        for (int inner = 0; inner < SIZE; ++inner) {
            Vector<Real> columns[TILE / SIZE];
#pragma unroll
            for (int part = 0; part < TILE / SIZE; ++part)
                columns[part] = *reinterpret_cast<const Vector<Real>*>(right + (k + inner) * WIDTH + column + part * SIZE);
#pragma unroll
            for (int i = 0; i < TILE; ++i)
#pragma unroll
                for (int j = 0; j < TILE; ++j) sums[i][j] += rows[i].x[inner] * columns[j / SIZE].x[j % SIZE];
        }
    }
}

__device__ __forceinline__ const float* right_chunk(const Room&, const float* right, int chunk, float) {
    return right + chunk * CHUNK * WIDTH;
}
__device__ __forceinline__ const double* right_chunk(const Room& room, const float* right, int chunk, double) {
    for (int at = threadIdx.x; at < CHUNK * WIDTH; at += THREADS)
        room.wide[at] = chunk * CHUNK + at / WIDTH < ROWS ? right[chunk * CHUNK * WIDTH + at] : 0.0f;
    return room.wide;
}

// use(i, j, sum over k of left[i, k] right[k, j]) for the rows below n and all columns of a panel; the left one has
// been fetched and begun. The stage is lost where Real is double. `use` may write to the right one.
template <class Real, class Source, class Use>
__device__ __forceinline__ void product(const Room& room, int n, Operand<Source>& operand, const float* right, const Use& use) {
    constexpr int SIZE = Vector<Real>::SIZE, ACROSS_TILES = WIDTH / TILE;
    Real* partial = room.partial<Real>();
    int row = threadIdx.x / (8 * ACROSS_TILES) % (ROWS / 32) * 32 + threadIdx.x % 8, column = threadIdx.x / 8 % ACROSS_TILES * TILE;
    int slice = threadIdx.x / TILES;
    Real sums[TILE][TILE] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        operand.template next<Real>(chunk);
        const Real* some = right_chunk(room, right, chunk, Real());
        __syncthreads();
        if (slice < SLICES) multiply_tile(sums, room.left<Real>(), some, row, column, slice, min(n - chunk * CHUNK, CHUNK));
    }
    if (sizeof(Real) == 8) __syncthreads();
    if (slice < SLICES) {
#pragma unroll
        for (int i = 0; i < TILE; ++i)
#pragma unroll
            for (int part = 0; part < TILE / SIZE; ++part) {
                Vector<Real> some;
#pragma unroll
                for (int j = 0; j < SIZE; ++j) some.x[j] = sums[i][part * SIZE + j];
                Real* to = partial + (slice * ROWS + row + 8 * i) * WIDTH + column + part * SIZE;
                *reinterpret_cast<Vector<Real>*>(to) = some;
            }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OWNED; ++m) {
        int at = threadIdx.x + m * THREADS;
        if (at >= n * WIDTH) break;
        Real sum = 0;
#pragma unroll
        for (int part = 0; part < SLICES; ++part) sum += partial[part * ROWS * WIDTH + at];
        use(at / WIDTH, at % WIDTH, sum);
    }
}

// Calls use(i, j) for the elements of a panel, rows beyond n included.
template <class Use>
__device__ __forceinline__ void each_owned(const Use& use) {
#pragma unroll
    for (int m = 0; m < OWNED; ++m) {
        int at = threadIdx.x + m * THREADS;
        if (at < ROWS * WIDTH) use(at / WIDTH, at % WIDTH);
    }
}

// What a group works on: one matrix and its state.
struct Update {
    const float *packed, *signs;
    float *anchor, *inverse, *matrix;   // the state
    float *read_matrix, *read_inverse;  // its copies for the caller; until these are written, room for R and for inverses
    Mail* mail;                         // this block's, or the group's
};

// This block's columns of a matrix that is being eliminated.
struct Columns {
    const Group& group;
    Mail* mail;
    double* system;  // [ROWS, WIDTH], shared
    int first;
    static constexpr int owned = WIDTH;
    __device__ __forceinline__ int number(int own) const { return first + own; }
    __device__ __forceinline__ double& at(int i, int own) const { return system[i * WIDTH + own]; }
    __device__ __forceinline__ const double* shown(int half) const { return mail->column + half * ROWS; }
    __device__ __forceinline__ void show(int half, int i, double x) const {
        for (int to = 0; to < COPIES; ++to) group.copy(mail, to)->column[half * ROWS + i] = x;
    }
};

struct Worker {
    const Update& update;
    Group& group;
    int n, first;  // rows; the first of this block's columns

    __device__ __forceinline__ Worker(const Update& update, Group& group, int n)
        : update(update), group(group), n(n), first(group.rank * WIDTH) {}

    __device__ __forceinline__ bool inside(int i, int j) const { return i < n && first + j < n; }

    // This block's columns of R of `inverse`, summed in float64 and rounded, to update.read_matrix; those of the inverse
    // stay in room.own. `staged` says that A is in the stage, in float64.
    __device__ OUT_OF_LINE void residual_of(const float* inverse, bool staged) {
        Room room;
        Operand<Skew> skew(Skew(update.packed), n);
        if (!staged) skew.fetch(0);
        each_owned([&](int i, int j) { room.own[i * WIDTH + j] = inside(i, j) ? inverse[i * n + first + j] : 0.0f; });
        if (!staged) skew.begin<double>();
        product<double>(room, n, skew, room.own, [&](int i, int j, double sum) {
            double all = room.own[i * WIDTH + j] + sum;
            if (inside(i, j)) update.read_matrix[i * n + first + j] = static_cast<float>((i == first + j ? 1.0 : 0.0) - all);
        });
    }

    // probe' = left probe, for the block's column of Z, which goes from one half of room.probe to the other.
    template <class Source>
    __device__ __forceinline__ void apply(Operand<Source>& left, int half) {
        Room room;
        const float* stage = room.left<float>();
        constexpr int PASSES = (ROWS + 8 * WARPS - 1) / (8 * WARPS);
        float sums[PASSES] = {};
        int row = threadIdx.x / 32 * 8 + threadIdx.x % 8, part = threadIdx.x % 32 / 8;
#pragma unroll 1
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const float* from = room.probe + half * ROWS + chunk * CHUNK;
            left.template next<float>(chunk);
            __syncthreads();
            int count = min(n - chunk * CHUNK, CHUNK);
#pragma unroll
            for (int pass = 0; pass < PASSES; ++pass) {
                int i = row + pass * 8 * WARPS;
                if (i >= ROWS) break;  // whole warps
#pragma unroll 2
                for (int k = part * 4; k < count; k += 16) {
                    Vector<float> x = *reinterpret_cast<const Vector<float>*>(stage + i * PITCH<float> + k);
                    Vector<float> y = *reinterpret_cast<const Vector<float>*>(from + k);
#pragma unroll
                    for (int inner = 0; inner < 4; ++inner) sums[pass] += x.x[inner] * y.x[inner];
                }
            }
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            int i = row + pass * 8 * WARPS;
            float sum = sums[pass];
            sum += __shfl_xor_sync(0xffffffffu, sum, 8);
            sum += __shfl_xor_sync(0xffffffffu, sum, 16);
            if (part == 0 && i < ROWS) room.probe[(1 - half) * ROWS + i] = i < n ? sum : 0.0f;
        }
    }

    __device__ __forceinline__ void fill_probe() {
        Room room;
        for (int i = threadIdx.x; i < ROWS; i += THREADS) room.probe[i] = i < n ? probe_sign(i, group.rank) : 0.0f;
    }

    __device__ __forceinline__ void show_probe(int half) {
        Room room;
        __syncthreads();
        for (int at = threadIdx.x; at < n * COPIES; at += THREADS) {
            int i = at / COPIES;
            group.copy(update.mail, at % COPIES)->probed[i * (PROBES + 1) + group.rank] = room.probe[half * ROWS + i];
        }
    }

    // The guard's size of what all blocks have shown; a barrier.
    __device__ __forceinline__ float size_of_probes() {
        group.wait();
        return probed_size(update.mail->probed, PROBES + 1, n, Room().sums);
    }

    // One pass of the residual series from an inverse to room.own; the guard's size of what it leaves. `staged`: see
    // residual_of.
    __device__ __forceinline__ float refine(const float* from, bool staged, int order) {
        Room room;
        residual_of(from, staged);
        fill_probe();
        group.wait();
        Operand<Plain> ratio({update.read_matrix}, n), inverse({from}, n);
        ratio.fetch(0);
        ratio.begin<float>();
        float* panel = room.panel;
        each_owned([&](int i, int j) { panel[i * WIDTH + j] = inside(i, j) ? update.read_matrix[i * n + first + j] : 0.0f; });
        apply(ratio, 0);
        if (CHUNKS == 1) inverse.fetch(0);  // on its way while R is at work
        for (int power = 1; power <= order; ++power) apply(ratio, power % 2);
        show_probe((order + 1) % 2);
        for (int power = 1; power < order; ++power)
            product<float>(room, n, ratio, panel, [&](int i, int j, float sum) {
                if (inside(i, j)) panel[i * WIDTH + j] = update.read_matrix[i * n + first + j] + sum;
            });
        if (CHUNKS > 1) inverse.fetch(0);
        inverse.begin<float>();
        product<float>(room, n, inverse, panel, [&](int i, int j, float sum) { room.own[i * WIDTH + j] += sum; });
        return size_of_probes();
    }

    // room.own to update.read_inverse; all blocks see it.
    __device__ __forceinline__ void publish() {
        Room room;
        __syncthreads();
        each_owned([&](int i, int j) {
            if (inside(i, j)) update.read_inverse[i * n + first + j] = room.own[i * WIDTH + j];
        });
        group.wait();
    }

    // Algorithm 1 from the state's inverse to room.own and update.read_inverse; the guard's size of the residual that it
    // leaves.
    __device__ __forceinline__ float neumann(int order) {
        Room room;
        const float *packed = update.packed, *anchor = update.anchor, *old = update.inverse;
        float *panel = room.panel, *own = room.own;
        Operand<Plain> inverse({old}, n), ratio({update.read_matrix}, n);
        inverse.fetch(0);
        each_owned([&](int i, int j) {
            int at = i * WIDTH + j;
            panel[at] = own[at] = 0.0f;
            if (!inside(i, j)) return;
            panel[at] = skew_element(anchor, n, i, first + j) - skew_element(packed, n, i, first + j);
            own[at] = old[i * n + first + j];
        });
        inverse.begin<float>();
        product<float>(room, n, inverse, panel, [&](int i, int j, float sum) {
            if (inside(i, j)) update.read_matrix[i * n + first + j] = sum;
        });
        group.wait();
        ratio.fetch(0);
        ratio.begin<float>();
        each_owned([&](int i, int j) { panel[i * WIDTH + j] = own[i * WIDTH + j]; });
        for (int power = 0; power < order; ++power)
            product<float>(room, n, ratio, panel, [&](int i, int j, float sum) { panel[i * WIDTH + j] = own[i * WIDTH + j] + sum; });
        __syncthreads();
        each_owned([&](int i, int j) { own[i * WIDTH + j] = panel[i * WIDTH + j]; });
        publish();
        return neumann_remainder();
    }

    // The size of Z - (I+A) (Ã Z), with Ã = update.read_inverse.
    __device__ __forceinline__ float neumann_remainder() {
        Room room;
        Operand<Plain> inverse({update.read_inverse}, n);
        inverse.fetch(0);
        fill_probe();
        inverse.begin<float>();
        apply(inverse, 0);
        Operand<Skew> skew(Skew(update.packed), n);
        skew.fetch(0);
        skew.begin<float>();
        apply(skew, 1);
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) room.probe[i] = probe_sign(i, group.rank) - room.probe[ROWS + i] - room.probe[i];
        show_probe(0);
        return size_of_probes();
    }

    // The exact inverse to room.own. This block's columns of I+A are in the stage.
    __device__ __forceinline__ void eliminate() {
        Room room;
        double* system = room.left<double>();
        __syncthreads();
        each_owned([&](int i, int j) {
            if (inside(i, j)) system[i * WIDTH + j] = (i == first + j ? 1.0 : 0.0) + skew_element(update.packed, n, i, first + j);
        });
        __syncthreads();
        gauss_jordan(group, Columns{group, update.mail, system, first}, room.wide, n);
        each_owned([&](int i, int j) {
            if (inside(i, j)) room.own[i * WIDTH + j] = static_cast<float>(system[i * WIDTH + j]);
        });
    }

    // Ã (I-A) for this block's columns, to room.panel.
    __device__ __forceinline__ void literal_cayley() {
        Room room;
        float* panel = room.panel;
        publish();
        Operand<Plain> inverse({update.read_inverse}, n);
        inverse.fetch(0);
        each_owned([&](int i, int j) {
            panel[i * WIDTH + j] = inside(i, j) ? (i == first + j ? 1.0f : 0.0f) - skew_element(update.packed, n, i, first + j) : 0.0f;
        });
        inverse.begin<float>();
        product<float>(room, n, inverse, panel, [&](int i, int j, float sum) { panel[i * WIDTH + j] = sum; });
    }

    // Store the new state and the caller's copies; this thread's part of the seal.
    __device__ __forceinline__ index_t commit(bool literal) {
        Room room;
        SealPart seal;
        if (literal) literal_cayley();
        __syncthreads();
        each_owned([&](int i, int j) {
            if (!inside(i, j)) return;
            int column = first + j, at = i * n + column;
            float value = room.own[i * WIDTH + j];
            float cayley = literal ? room.panel[i * WIDTH + j] : 2.0f * value - (i == column ? 1.0f : 0.0f);
            float u = cayley * unit(update.signs[column]);
            update.inverse[at] = update.read_inverse[at] = value;
            update.matrix[at] = update.read_matrix[at] = u;
            seal.inverse(value);
            seal.matrix(u);
        });
        for (int i = static_cast<int>(group.first()); i < n * (n - 1) / 2; i += GROUP * THREADS) {
            float value = update.packed[i];
            update.anchor[i] = value;
            seal.anchor(value);
        }
        for (int i = static_cast<int>(group.first()); i < n; i += GROUP * THREADS) seal.sign(update.signs[i]);
        return seal.sum;
    }
};

__device__ __forceinline__ Update update_of(
    index_t number, int n, const float* packed, float* anchor, float* inverse, float* matrix, const float* signs,
    float* read_matrix, float* read_inverse, Mail* mails) {
    index_t square = static_cast<index_t>(n) * n;
    Update update;
    update.packed = packed + number * packed_size(n);
    update.anchor = anchor + number * packed_size(n);
    update.signs = signs + number * n;
    update.inverse = inverse + number * square;
    update.matrix = matrix + number * square;
    update.read_matrix = read_matrix + number * square;
    update.read_inverse = read_inverse + number * square;
    update.mail = CLUSTER ? Room().mail : mails + number;
    return update;
}

__device__ __forceinline__ void copy_state(const Group& group, const Update& update, int square) {
#pragma unroll 4
    for (int at = static_cast<int>(group.first()); at < square; at += GROUP * THREADS) {
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
// Grid: (GROUP, matrices). `counters` [matrices] are 0, and `mails` has room for as many; in a cluster both may be null.
extern "C" __global__ void IN_GROUPS __launch_bounds__(THREADS, 1) follow_small(
    const float* packed, float* anchor, float* inverse, float* matrix, const float* signs, index_t* updates,
    index_t* refreshes, index_t* seal, float* read_matrix, float* read_inverse, unsigned* counters, void* mails,
    index_t rows, index_t method, index_t order, index_t reset_every) {
    int n = static_cast<int>(rows);
    index_t number = blockIdx.y;
    Group group(blockIdx.x, GROUP, counters + number);
    group.greet();
    __shared__ Update update;  // leaves registers to what is calculated
    if (threadIdx.x == 0)
        update = update_of(number, n, packed, anchor, inverse, matrix, signs, read_matrix, read_inverse, static_cast<Mail*>(mails));
    Worker worker(update, group, n);
    index_t* sums = reinterpret_cast<index_t*>(Room().sums);

    Operand<Skew> skew(Skew(packed + number * packed_size(n)), n);
    if (CHUNKS == 1) skew.fetch(0);  // on its way while the state is looked at
    index_t sealed = seal[number], count = updates[number];
    __syncthreads();
    bool here;
    index_t part = survey_state(update.packed, update.anchor, update.inverse, update.matrix, update.signs, n, group.first(), GROUP * THREADS, here);
    if (CHUNKS == 1) skew.begin<double>();
    part = block_sum(part, sums);
    index_t somewhere = block_sum(static_cast<index_t>(here), sums);
    group.meet();
    if (threadIdx.x < COPIES) {
        index_t* notes = group.copy(update.mail, threadIdx.x)->notes;
        notes[group.rank] = part;
        notes[GROUP + group.rank] = somewhere;
    }
    group.wait();
    index_t all = 0, movements = 0;
#pragma unroll
    for (int block = 0; block < GROUP; ++block) {
        all += update.mail->notes[block];
        movements += update.mail->notes[GROUP + block];
    }
    bool moved = movements != 0, tampered = all != sealed;
    if (!moved && !tampered) {
        copy_state(group, update, n * n);
        return;
    }

    count += moved;
    bool due = moved && reset_every && count % reset_every == 0;
    bool literal = method == NEUMANN, exact = method == EXACT, broken = tampered;
    const float* latest = update.inverse;
    float left = 0.0f;
    if (literal) {
        left = worker.neumann(static_cast<int>(order));
        latest = update.read_inverse;
        broken = (moved && !due && !(left <= NEUMANN_TOLERANCE)) || tampered;
        exact = due || broken;
    }
    // The series, and where the exact inverse is wanted more of it, or elimination.
    for (int pass = 0;; ++pass) {
        bool following = method == HYPERPOWER && pass == 0;
        if (!following && !exact) break;
        if (!(left <= REFINABLE) || pass > MOST_PASSES) {
            worker.eliminate();
            break;
        }
        left = worker.refine(latest, CHUNKS == 1 && !pass && !literal, following ? static_cast<int>(order) : REFINING_ORDER);
        if (following) {
            broken = (moved && !due && !(left <= HYPERPOWER_TOLERANCE)) || tampered;
            exact = due || broken;
        }
        if (!exact || left <= NEGLIGIBLE) break;
        worker.publish();
        latest = update.read_inverse;
    }

    part = block_sum(worker.commit(literal), sums);
    if (threadIdx.x) return;
    // All have read the old seal; from it, whatever the order, the sum becomes the new one.
    if (group.rank == 0) part -= sealed;
    atomicAdd(reinterpret_cast<unsigned long long*>(seal + number), static_cast<unsigned long long>(part));
    if (group.rank) return;
    updates[number] = count;
    refreshes[number] += broken;
}

// The gradient in the packed A's: V'-V above the diagonal, V = Ã' (G (D+U')).
//
// Grid: (GROUP, matrices). `products` [matrices, GROUP, ROWS, WIDTH] is room for V; in a cluster it may be null.
extern "C" __global__ void IN_GROUPS __launch_bounds__(THREADS, 1) gradient_small(
    const float* grad_matrix, const float* matrix, const float* inverse, const float* signs, float* gradient,
    unsigned* counters, float* products, index_t rows) {
    int n = static_cast<int>(rows);
    index_t number = blockIdx.y, square = rows * rows;
    Group group(blockIdx.x, GROUP, counters + number);
    Room room;
    const float *u = matrix + number * square, *sign = signs + number * n;
    float* panel = room.panel;
    int own = group.rank * WIDTH;
    Operand<Plain> grad({grad_matrix + number * square}, n);
    grad.fetch(0);
#pragma unroll
    for (int m = 0; m < OWNED; ++m) {
        // Four rows of U by eight columns a warp.
        int some = threadIdx.x / 32 + m * WARPS;
        int j = some % (WIDTH / 4) * 4 + threadIdx.x % 32 / 8, k = some / (WIDTH / 4) * 8 + threadIdx.x % 8;
        bool inside = own + j < n && k < n;
        if (k < ROWS) panel[k * WIDTH + j] = inside ? u[(own + j) * n + k] + (k == own + j ? unit(sign[k]) : 0.0f) : 0.0f;
    }
    Operand<Transposed> transposed(Transposed(inverse + number * square), n);
    if (CHUNKS == 1) transposed.fetch(0);
    grad.begin<float>();
    product<float>(room, n, grad, panel, [&](int i, int j, float sum) { panel[i * WIDTH + j] = sum; });
    if (CHUNKS > 1) transposed.fetch(0);
    transposed.begin<float>();
    float* v = CLUSTER ? panel : products + (number * GROUP + group.rank) * ROWS * WIDTH;
    product<float>(room, n, transposed, panel, [&](int i, int j, float sum) { v[i * WIDTH + j] = sum; });
    group.wait();
    // The rows that this block has the columns of: the rest of them lies with all.
    float* packed = gradient + number * packed_size(n);
    for (int at = threadIdx.x; at < WIDTH * ROWS; at += THREADS) {
        int i = own + at / ROWS, j = at % ROWS, to = j / WIDTH;
        if (i >= n || j >= n || j <= i) continue;
        const float* theirs = CLUSTER ? group.copy(panel, to) : products + (number * GROUP + to) * ROWS * WIDTH;
        packed[i * n - i * (i + 1) / 2 - i - 1 + j] = v[j * WIDTH + i - own] - theirs[i * WIDTH + j % WIDTH];
    }
#if CLUSTER
    group.wait();  // nobody leaves while others read its shared memory
#endif
}
