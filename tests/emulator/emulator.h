// What CUDA C++ has and C++ lacks, for kernels that run in tests without a GPU; see __init__.py.
//
// Included before the kernel's source. `__global__` and `__shared__` stay words of their own: __init__.py replaces them
// once the preprocessor has run.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#define __host__
#define __device__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict

struct uint3 {
    unsigned x, y, z;
};
typedef uint3 dim3;
struct float2 {
    float x, y;
} __align__(8);
struct float4 {
    float x, y, z, w;
} __align__(16);
struct uint2 {
    unsigned x, y;
} __align__(8);
struct uint4 {
    unsigned x, y, z, w;
} __align__(16);
struct int2 {
    int x, y;
} __align__(8);
struct int4 {
    int x, y, z, w;
} __align__(16);
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

// Ends the launch; Python raises the message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// What a lane brings to an operation of its warp, and takes from it.
struct Words {
    uint32_t in[20];
    uint32_t out[8];
};

// Waits until all lanes of `mask` are here; the last to come does the work of all, `lanes` being those of the mask.
void collective(const char* name, uint32_t mask, Words& mine, void (*work)(Words* (&lanes)[32], uint32_t mask));

void barrier(int number, int threads, bool wait);

// Lets others run: called wherever a thread may wait for what another block writes.
void poll();

// Words that other blocks read and write at the same time. Another block sees a store after a while, and two stores to
// different words in any order, unless a fence of the storing block lies between; a block sees its own at once.
unsigned load_relaxed(const unsigned* from);
void store_relaxed(unsigned* to, unsigned x);
void fence();

// Said wherever something happens that another thread may wait for.
void progress();

// The block's own array for the declaration that `site` stands for.
void* shared_array(const void* site, size_t bytes);

char* dynamic_shared();

// Copies to shared memory that a thread waits for later; the first `bytes` of `size` are read, and the others 0.
void copy_async(void* to, const void* from, int bytes, int size);
void commit_copies();
void await_copies(size_t batches);

// The blocks that differ in blockIdx.x alone as a cluster, in a launch that has all blocks under way together.
void cluster_arrive();
void cluster_wait();
void* shared_of_block(const void* mine, unsigned block);

uint32_t random_number();

template <class T>
T bits(const uint32_t* words) {
    T x;
    memcpy(&x, words, sizeof x);
    return x;
}

template <class T>
T shuffle(uint32_t mask, T x, int source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    Words words = {};
    memcpy(words.in, &x, sizeof x);
    words.in[2] = source;
    collective("shuffle", mask, words, [](Words* (&lanes)[32], uint32_t all) {
        for (int lane = 0; lane < 32; ++lane) {
            if (!(all >> lane & 1)) continue;
            Words* from = lanes[lanes[lane]->in[2]];
            if (!from) fail("shuffle: lane %d reads lane %u, which takes no part", lane, lanes[lane]->in[2]);
            memcpy(lanes[lane]->out, from->in, 8);
        }
    });
    return bits<T>(words.out);
}

inline int lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32; }

// The lanes of `mask` whose `x` is not 0.
inline uint32_t ballot(uint32_t mask, int x) {
    Words words = {};
    words.in[0] = x != 0;
    collective("vote", mask, words, [](Words* (&lanes)[32], uint32_t all) {
        uint32_t sum = 0;
        for (int lane = 0; lane < 32; ++lane)
            if (all >> lane & 1) sum |= lanes[lane]->in[0] << lane;
        for (int lane = 0; lane < 32; ++lane)
            if (all >> lane & 1) lanes[lane]->out[0] = sum;
    });
    return words.out[0];
}

// How Python knows what a kernel's parameter is: its kind (i integer, f float, P pointer to floats, p other pointer, s struct),
// and its size; for a pointer the size of one element, or 0 for a vector or void.
template <class T>
struct Parameter {
    static constexpr char kind = std::is_integral_v<T> ? 'i' : std::is_floating_point_v<T> ? 'f' : 's';
    static constexpr int size = sizeof(T);
};
template <class T>
struct Parameter<T*> {
    static constexpr char kind = std::is_floating_point_v<T> ? 'P' : 'p';
    static constexpr int size = [] {
        if constexpr (std::is_arithmetic_v<T>) return static_cast<int>(sizeof(T));
        else return 0;
    }();
};

template <class... P, size_t... I>
void call(void (*kernel)(P...), void** arguments, std::integer_sequence<size_t, I...>) {
    kernel(*static_cast<std::remove_reference_t<P>*>(arguments[I])...);
}

template <class... P>
void call(void (*kernel)(P...), void** arguments) {
    call(kernel, arguments, std::make_integer_sequence<size_t, sizeof...(P)>());
}

template <class... P>
int describe(void (*)(P...), char* kinds, int* sizes) {
    ((*kinds++ = Parameter<P>::kind), ...);
    ((*sizes++ = Parameter<P>::size), ...);
    return sizeof...(P);
}

}  // namespace emulator

// ---- the block and the warp

inline void __syncthreads() { emulator::barrier(0, blockDim.x * blockDim.y * blockDim.z, true); }
inline void __threadfence() { emulator::fence(); }
inline void __threadfence_block() {}

inline uint32_t __ballot_sync(uint32_t mask, int x) { return emulator::ballot(mask, x); }
inline int __any_sync(uint32_t mask, int x) { return emulator::ballot(mask, x) != 0; }
inline int __all_sync(uint32_t mask, int x) { return emulator::ballot(mask, x) == mask; }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { emulator::ballot(mask, 0); }

// `width` splits the warp into parts of that many lanes.
template <class T>
T __shfl_sync(uint32_t mask, T x, int source, int width = 32) {
    return emulator::shuffle(mask, x, (emulator::lane() & -width) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int with, int width = 32) {
    int source = emulator::lane() ^ with;
    return emulator::shuffle(mask, x, source / width <= emulator::lane() / width ? source : emulator::lane());
}
template <class T>
T __shfl_down_sync(uint32_t mask, T x, int distance, int width = 32) {
    int place = emulator::lane() & (width - 1);
    return emulator::shuffle(mask, x, emulator::lane() + (place + distance < width ? distance : 0));
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, int distance, int width = 32) {
    int place = emulator::lane() & (width - 1);
    return emulator::shuffle(mask, x, emulator::lane() - (place >= distance ? distance : 0));
}

// ---- atomic operations: a thread is never interrupted between two scheduling points

template <class T, class Operation>
T emulated_atomic(T* at, Operation operation) {
    emulator::poll();
    T old = *at;
    *at = operation(old);
    if (memcmp(&old, at, sizeof old)) emulator::progress();
    return old;
}
template <class T>
T atomicAdd(T* at, std::common_type_t<T> x) {
    return emulated_atomic(at, [=](T old) { return old + x; });
}
template <class T>
T atomicExch(T* at, std::common_type_t<T> x) {
    return emulated_atomic(at, [=](T) { return x; });
}
template <class T>
T atomicMax(T* at, std::common_type_t<T> x) {
    return emulated_atomic(at, [=](T old) { return old < x ? x : old; });
}
template <class T>
T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> x) {
    return emulated_atomic(at, [=](T old) { return old == expected ? x : old; });
}

// ---- numbers

template <class T>
T min(T x, std::common_type_t<T> y) {
    return y < x ? y : x;
}
template <class T>
T max(T x, std::common_type_t<T> y) {
    return x < y ? y : x;
}
template <class T>
T __ldg(const T* from) {
    return *from;
}
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(&x); }
inline float __int_as_float(int x) { return __uint_as_float(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) {
    unsigned y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline float __fdividef(float x, float y) { return fabsf(y) > 0x1p126f ? x * 0.0f : x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
