// Splits matrices for the products of `product.cu`; see `split.cuh`.
#include "split.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define PIECES 6
#define HELD 4  // pieces of a row that a thread keeps between measuring and splitting

// A matrix in memory [rows, columns], and where it goes. Numbers that lie together at addresses which are multiples of as
// many: `width` (1, 2 or 4). `scales` and `planes` are places in the room, in bytes; `pitch` and `to_pitch` distances of
// rows, in numbers. `padded` is K with the zeros that are written behind it. Where lines are rows, `warps` of a block
// share one; else `warps` is 0, and there are `before` zeros along K in front.
struct Piece {
    index_t pitch, rows, columns, width, scales, planes, to_pitch, padded, warps, before, first;
};
struct Pieces {
    Piece of[PIECES];
};

// `left` of four neighbours are there; the others are 0.
__device__ __forceinline__ float4 read(const float* from, int width, int left) {
    if (left >= 4) {
        if (width == 4) return *reinterpret_cast<const float4*>(from);
        if (width == 2) {
            const float2 a = *reinterpret_cast<const float2*>(from), b = *reinterpret_cast<const float2*>(from + 2);
            return make_float4(a.x, a.y, b.x, b.y);
        }
        return make_float4(from[0], from[1], from[2], from[3]);
    }
    return make_float4(left > 0 ? from[0] : 0.0f, left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f, 0.0f);
}

__device__ __forceinline__ unsigned size_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Two scaled numbers as two words: of their high parts, and of what is left.
__device__ __forceinline__ uint2 split(float x, float y) {
    const unsigned high = pack_float16(x, y);
    const float x_low = x - from_float16(static_cast<unsigned short>(high));
    const float y_low = y - from_float16(static_cast<unsigned short>(high >> 16));
    return make_uint2(high, pack_float16(x_low, y_low));
}

__device__ __forceinline__ void write(unsigned short* high, unsigned short* low, float4 x, float4 scale) {
    const uint2 first = split(x.x * scale.x, x.y * scale.y), second = split(x.z * scale.z, x.w * scale.w);
    *reinterpret_cast<uint2*>(high) = make_uint2(first.x, second.x);
    *reinterpret_cast<uint2*>(low) = make_uint2(first.y, second.y);
}

__device__ __forceinline__ int left_of(index_t all, index_t first) {
    const index_t left = all - first;
    return left < 4 ? static_cast<int>(left) : 4;
}

__device__ __forceinline__ uint4 largest(uint4 a, uint4 b) {
    return make_uint4(max(a.x, b.x), max(a.y, b.y), max(a.z, b.z), max(a.w, b.w));
}

__device__ __forceinline__ uint4 sizes_of(float4 x) {
    return make_uint4(size_of(x.x), size_of(x.y), size_of(x.z), size_of(x.w));
}

// A row by some warps of the block, `lane` counting their lanes. What a thread does not hold it reads again.
__device__ __forceinline__ void split_row(
    const Piece& piece, const float* source, char* room, index_t row, int lane, int first_warp) {
    __shared__ unsigned found[WARPS];
    const bool there = row < piece.rows;
    const float* from = source + row * piece.pitch;
    const int width = static_cast<int>(piece.width), step = static_cast<int>(piece.warps) * 128;
    const index_t end = there ? piece.columns : 0;
    float4 held[HELD];
    uint4 sizes = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const index_t k = 4 * lane + i * step;
        held[i] = k < end ? read(from + k, width, left_of(end, k)) : make_float4(0, 0, 0, 0);
        sizes = largest(sizes, sizes_of(held[i]));
    }
#pragma unroll 4
    for (index_t k = 4 * lane + HELD * step; k < end; k += step)
        sizes = largest(sizes, sizes_of(read(from + k, width, left_of(end, k))));
    unsigned most = max(max(sizes.x, sizes.y), max(sizes.z, sizes.w));
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        most = max(most, __float_as_uint(shuffle_xor(__uint_as_float(most), mask)));
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < piece.warps; ++warp) most = max(most, found[first_warp + warp]);
    if (!there) return;
    if (lane == 0) reinterpret_cast<unsigned*>(room + piece.scales)[row] = most;
    const float s = scale_of(most);
    unsigned short* to = reinterpret_cast<unsigned short*>(room + piece.planes) + row * piece.to_pitch;
    auto put = [&](index_t k, float4 x) {
        unsigned short* high = to + k / CHUNK * (2 * CHUNK) + k % CHUNK;
        write(high, high + CHUNK, x, make_float4(s, s, s, s));
    };
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const index_t k = 4 * lane + i * step;
        if (k < piece.padded) put(k, held[i]);
    }
#pragma unroll 4
    for (index_t k = 4 * lane + HELD * step; k < piece.padded; k += step)
        put(k, read(from + k, width, left_of(piece.columns, k)));
}

// A chunk of 128 lines that are columns.
__device__ __forceinline__ void split_chunk(const Piece& piece, const float* source, char* room, index_t block) {
    __shared__ uint4 found[WARPS][32];
    const index_t across = (piece.columns + 127) / 128, chunk = block / across;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = static_cast<int>(piece.width);
    const index_t column = block % across * 128 + lane * 4, first = chunk * CHUNK + warp;
    const int left = left_of(piece.columns, column);
    const float* from = source + column;
    float4 held[CHUNK / WARPS];
    uint4 most = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; ++i) {
        const index_t row = first + i * WARPS - piece.before;
        const bool there = left > 0 && row >= 0 && row < piece.rows;
        held[i] = there ? read(from + row * piece.pitch, width, left) : make_float4(0, 0, 0, 0);
        most = largest(most, sizes_of(held[i]));
    }
    found[warp][lane] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = largest(most, found[i][lane]);
    if (left <= 0) return;
    if (warp == 0) {
        float* scales = reinterpret_cast<float*>(room + piece.scales) + chunk * piece.to_pitch + column;
        *reinterpret_cast<float4*>(scales) = make_float4(
            scale_back_of(most.x), scale_back_of(most.y), scale_back_of(most.z), scale_back_of(most.w));
    }
    const float4 scale = make_float4(scale_of(most.x), scale_of(most.y), scale_of(most.z), scale_of(most.w));
    unsigned short* to = reinterpret_cast<unsigned short*>(room + piece.planes) + column;
#pragma unroll
    for (int i = 0; i < CHUNK / WARPS; ++i) {
        unsigned short* high = to + 2 * (first + i * WARPS) * piece.to_pitch;
        write(high, high + piece.to_pitch, held[i], scale);
    }
}

template <class... Others>
__device__ __forceinline__ const float* choose(int number, const float* first, Others... others) {
    if constexpr (sizeof...(others) == 0) return first;
    else return number == 0 ? first : choose(number - 1, others...);
}

// Blocks of pieces follow each other; those beyond the last piece begin nowhere. A block has WARPS / `warps` rows, or a
// chunk of some columns.
extern "C" __global__ void __launch_bounds__(THREADS) split_all(
    const float* first, const float* second, const float* third, const float* fourth, const float* fifth, const float* sixth,
    char* room, Pieces pieces) {
    int number = 0;
#pragma unroll
    for (int i = 1; i < PIECES; ++i) number += blockIdx.x >= pieces.of[i].first;
    const Piece& piece = pieces.of[number];
    const float* source = choose(number, first, second, third, fourth, fifth, sixth);
    const index_t block = blockIdx.x - piece.first;
    if (piece.warps == 0) {
        split_chunk(piece, source, room, block);
        return;
    }
    const int warps = static_cast<int>(piece.warps), threads = 32 * warps, part = threadIdx.x / threads;
    split_row(piece, source, room, block * (WARPS / warps) + part, threadIdx.x % threads, part * warps);
}
