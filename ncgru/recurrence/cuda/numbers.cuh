// Numbers of the recurrence: how they are stored, rounded and activated.
//
// Set by the compiler's options: HIDDEN, STORAGE, RESET, PHI (see below).
#pragma once

#include "device.cuh"

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#define BEFORE 0
#define AFTER 1
#define NONE 2

#define MODRELU 0
#define TANH 1
#define RELU 2

#define GATES (RESET == NONE ? 1 : 3)

typedef long long index_t;

// The dtype of `projected`, of the saved gates and of the gradient of `projected`.
#if STORAGE == FLOAT32
typedef float stored;
__device__ __forceinline__ float load(const stored* x) { return *x; }
__device__ __forceinline__ stored store(float x) { return x; }
#elif STORAGE == BFLOAT16
typedef unsigned short stored;
__device__ __forceinline__ float load(const stored* x) { return __uint_as_float(static_cast<unsigned>(*x) << 16); }
__device__ __forceinline__ stored store(float x) { return to_bfloat16(x); }
#else
typedef unsigned short stored;
__device__ __forceinline__ float load(const stored* x) { return from_float16(*x); }
__device__ __forceinline__ stored store(float x) { return to_float16(x); }
#endif

// An operand of a product as the product sees it: 16-bit storage rounds it, float32 does not.
__device__ __forceinline__ float as_operand(float x) {
#if STORAGE == FLOAT32
    return x;
#else
    stored y = store(x);
    return load(&y);
#endif
}

__device__ __forceinline__ float logistic(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// phi(z); NaN stays NaN.
__device__ __forceinline__ float activate(float z, float threshold) {
#if PHI == TANH
    return tanhf(z);
#elif PHI == RELU
    return z <= 0.0f ? 0.0f : z;
#else
    float size = fabsf(z) + threshold;
    float kept = size <= 0.0f ? 0.0f : size;
    return z == 0.0f ? 0.0f : copysignf(kept, z);
#endif
}

// phi'(z), from c = phi(z).
__device__ __forceinline__ float slope(float c) {
#if PHI == TANH
    return 1.0f - c * c;
#else
    return c == 0.0f ? 0.0f : 1.0f;
#endif
}

__device__ __forceinline__ float sign(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f); }

// Parameters: of float32, or, where `narrow`, as `projected` is stored.
struct Array {
    const void* first;
    bool narrow;

    __device__ __forceinline__ float operator[](int i) const {
        // Nobody writes to parameters meanwhile, which says too that they are in global memory.
        if (STORAGE != FLOAT32 && narrow) {
            const stored x = __ldg(static_cast<const stored*>(first) + i);
            return load(&x);
        }
        return __ldg(static_cast<const float*>(first) + i);
    }

    __device__ __forceinline__ Array from(int i) const {
        const int bytes = narrow ? sizeof(stored) : sizeof(float);
        return {static_cast<const char*>(first) + static_cast<index_t>(i) * bytes, narrow};
    }

    __device__ __forceinline__ explicit operator bool() const { return first != nullptr; }
};

// Where the matrices of all gates and directions are, each [HIDDEN, HIDDEN] row-major: the gates of which `made` has the
// bit set lie in `matrices`, directions outermost, the others in one array for each direction.
struct Weights {
    const float* matrices;
    Array free_first;
    Array free_second;
    int made;

    __device__ Array of(int direction, int gate) const {
        const int before = __popc(made & ((1 << gate) - 1)), square = HIDDEN * HIDDEN;
        if (made >> gate & 1) return {matrices + (direction * __popc(made) + before) * square, false};
        return (direction ? free_second : free_first).from((gate - before) * square);
    }
};

// What is added for one unit in one gate. The last block of `bias` [G, HIDDEN] is modReLU's threshold, where it has one
// and `thresholds` [HIDDEN] do not say it.
struct Biases {
    Array bias;
    const float* thresholds;
    float offset;

    // To the projected input.
    __device__ __forceinline__ float of(int gate, int unit) const {
        if (PHI == MODRELU && gate == GATES - 1) return 0.0f;
        return bias ? bias[gate * HIDDEN + unit] : 0.0f;
    }

    __device__ __forceinline__ float threshold(int unit) const {
        if (PHI != MODRELU) return 0.0f;
        if (thresholds) return offset + thresholds[unit];
        return bias ? offset + bias[(GATES - 1) * HIDDEN + unit] : offset;
    }
};
