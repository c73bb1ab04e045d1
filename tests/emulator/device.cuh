// The emulator's own device.cuh: what the kernels' one says in the machine's instructions, said in C++.
//
// Both define the same functions, which a test checks.
#pragma once

// ---- numbers of 16 bits, and tf32

inline unsigned short to_bfloat16(float x) {
    unsigned word = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return static_cast<unsigned short>((word + 0x7fffu + (word >> 16 & 1)) >> 16);
}

inline float from_float16(unsigned short x) {
    float size = ldexpf(static_cast<float>(x & 0x3ff), -24);
    int exponent = x >> 10 & 31;
    if (exponent == 31) size = x & 0x3ff ? NAN : INFINITY;
    else if (exponent) size = ldexpf(static_cast<float>((x & 0x3ff) + 1024), exponent - 25);
    return x & 0x8000 ? -size : size;
}

inline unsigned short to_float16(float x) {
    unsigned short sign = __float_as_uint(x) >> 16 & 0x8000;
    if (x != x) return 0x7fff;
    float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    // In units of the last place, rounded to the nearest, half to even; a carry into the exponent is right as it is.
    int exponent = size < 0x1p-14f ? -14 : ilogbf(size);
    unsigned units = static_cast<unsigned>(rintf(ldexpf(size, 10 - exponent)));
    return sign | static_cast<unsigned short>(((exponent + 14) << 10) + units);
}

inline unsigned pack_float16(float first, float second) {
    return to_float16(first) | static_cast<unsigned>(to_float16(second)) << 16;
}

inline unsigned round_tf32(float x) { return (__float_as_uint(x) + 0x1000u) & 0xffffe000u; }

inline void hide(unsigned& x) { static_cast<void>(x); }

// ---- within a warp and within a block

inline float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

inline bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

inline void barrier_sync(int barrier, int threads) { emulator::barrier(barrier, threads, true); }

inline void barrier_arrive(int barrier, int threads) { emulator::barrier(barrier, threads, false); }

inline char* dynamic_shared() { return emulator::dynamic_shared(); }

// ---- within a cluster

inline void cluster_arrive() { emulator::cluster_arrive(); }

inline void cluster_wait() { emulator::cluster_wait(); }

inline void* shared_of_block(const void* mine, int block) { return emulator::shared_of_block(mine, block); }

// ---- words that other blocks write and read while this one runs

// The four words are accesses of their own: others may write between them.
inline uint4 load_relaxed(const uint4* from) {
    const unsigned* words = reinterpret_cast<const unsigned*>(from);
    unsigned x[4];
    unsigned first = emulator::random_number();
    for (unsigned i = 0; i < 4; ++i) {
        if (i == 0 || emulator::random_number() % 8 == 0) emulator::poll();
        unsigned place = (first + i) % 4;
        x[place] = emulator::load_relaxed(words + place);
    }
    return make_uint4(x[0], x[1], x[2], x[3]);
}

inline unsigned load_relaxed(const unsigned* from) {
    emulator::poll();
    return emulator::load_relaxed(from);
}

inline void store_relaxed(unsigned* to, unsigned x) { emulator::store_relaxed(to, x); }

inline void fence() { emulator::fence(); }

inline void prefetch(const void* from) { static_cast<void>(from); }

// ---- copies to shared memory that the thread does not wait for

template <int WIDTH>
inline void copy_async(float* to, const float* from, bool inside) {
    emulator::copy_async(to, from, inside ? 4 * WIDTH : 0, 4 * WIDTH);
}

inline void commit_copies() { emulator::commit_copies(); }

template <int LEFT>
inline void await_copies() {
    emulator::await_copies(LEFT);
}

// ---- products of a warp

// Fragments as the kernels' device.cuh describes them; a word holds WORD numbers along K.
template <int WORD, float (*NUMBER)(unsigned word, int place)>
void emulated_mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emulator::Words words;
    memcpy(words.in, a, sizeof a);
    memcpy(words.in + 4, b, sizeof b);
    memcpy(words.in + 6, sums, sizeof sums);
    emulator::collective("mma", 0xffffffffu, words, [](emulator::Words* (&lanes)[32], uint32_t) {
        float left[16][8 * WORD], right[8][8 * WORD];
        for (int lane = 0; lane < 32; ++lane)
            for (int word = 0; word < 6; ++word)
                for (int place = 0; place < WORD; ++place) {
                    float x = NUMBER(lanes[lane]->in[word], place);
                    int high = word < 4 ? word / 2 : word - 4;
                    int k = (lane % 4 + 4 * high) * WORD + place;
                    if (word < 4) left[lane / 4 + word % 2 * 8][k] = x;
                    else right[lane / 4][k] = x;
                }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                double sum = emulator::bits<float>(lanes[lane]->in + 6 + i);
                const float *row = left[lane / 4 + i / 2 * 8], *column = right[lane % 4 * 2 + i % 2];
                for (int k = 0; k < 8 * WORD; ++k) sum += static_cast<double>(row[k]) * column[k];
                lanes[lane]->out[i] = __float_as_uint(static_cast<float>(sum));
            }
    });
    memcpy(sums, words.out, sizeof sums);
}

template <bool TRANSPOSED>
void emulated_load(unsigned (&x)[4], const char* row) {
    emulator::Words words = {};
    memcpy(words.in, &row, sizeof row);
    emulator::collective("ldmatrix", 0xffffffffu, words, [](emulator::Words* (&lanes)[32], uint32_t) {
        unsigned short all[32][8];
        for (int lane = 0; lane < 32; ++lane) memcpy(all[lane], emulator::bits<const char*>(lanes[lane]->in), 16);
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                unsigned word = 0;
                for (int k = 0; k < 2; ++k) {
                    int g = lane / 4, c = lane % 4 * 2 + k;
                    word |= static_cast<unsigned>(TRANSPOSED ? all[8 * i + c][g] : all[8 * i + g][c]) << 16 * k;
                }
                lanes[lane]->out[i] = word;
            }
    });
    memcpy(x, words.out, sizeof x);
}

inline void load_matrices(unsigned (&x)[4], const char* row) { emulated_load<false>(x, row); }
inline void load_transposed(unsigned (&x)[4], const char* row) { emulated_load<true>(x, row); }

inline float number_tf32(unsigned word, int) { return __uint_as_float(word & 0xffffe000u); }
inline float number_bfloat16(unsigned word, int place) { return __uint_as_float(word >> 16 * place << 16); }
inline float number_float16(unsigned word, int place) { return from_float16(static_cast<unsigned short>(word >> 16 * place)); }

inline void mma_tf32(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emulated_mma<1, number_tf32>(sums, a, b);
}

inline void mma_bfloat16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emulated_mma<2, number_bfloat16>(sums, a, b);
}

inline void mma_float16(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    emulated_mma<2, number_float16>(sums, a, b);
}

inline void mma_float64(double (&sums)[4], const double (&a)[4], const double (&b)[2]) {
    emulator::Words words;
    memcpy(words.in, a, sizeof a);
    memcpy(words.in + 8, b, sizeof b);
    memcpy(words.in + 12, sums, sizeof sums);
    emulator::collective("mma", 0xffffffffu, words, [](emulator::Words* (&lanes)[32], uint32_t) {
        double left[16][8], right[8][8];
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i)
                left[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = emulator::bits<double>(lanes[lane]->in + 2 * i);
            for (int i = 0; i < 2; ++i) right[lane / 4][lane % 4 + i * 4] = emulator::bits<double>(lanes[lane]->in + 8 + 2 * i);
        }
        for (int lane = 0; lane < 32; ++lane)
            for (int i = 0; i < 4; ++i) {
                double sum = emulator::bits<double>(lanes[lane]->in + 12 + 2 * i);
                const double *row = left[lane / 4 + i / 2 * 8], *column = right[lane % 4 * 2 + i % 2];
                for (int k = 0; k < 8; ++k) sum += row[k] * column[k];
                memcpy(lanes[lane]->out + 2 * i, &sum, sizeof sum);
            }
    });
    memcpy(sums, words.out, sizeof sums);
}
