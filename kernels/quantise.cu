// Quantisation to 8-bit floating point, by blocks of 1x32, 1x128 or 128x128 elements or by whole
// tensors, of a matrix and, in the same pass, of its transpose; and back.
//
// A product of matrices in FP8 wants both operands with the contracted dim last. The gradients of
// a weight contract the other dim than the forward pass, so the transpose is needed as well, and
// where blocks lie along one dim it has other scales: it cannot be made of the quantised matrix.
//
// One thread block has a tile of 128x128, which it reads once, into shared memory.
//
// build: ELEMENT = float, __half, __nv_bfloat16
// build: FORMAT = __NV_E4M3, __NV_E5M2
#include <cuda_fp8.h>
#include "numeric.cuh"

constexpr int TILE = 128, THREADS = 256, WARPS = THREADS / 32;
constexpr int PITCH = TILE + 4 / sizeof(ELEMENT);  // an odd number of words: columns meet all banks
constexpr int AHEAD = 4;                           // rows that a warp asks for before it uses the first
constexpr float MOST = FORMAT == __NV_E4M3 ? 448.f : 57344.f;
constexpr float LARGEST = 3.40282347e38f;
constexpr unsigned INFINITE = 0x7f800000u;

typedef unsigned char byte;

struct alignas(4 * sizeof(ELEMENT)) Quad {
    ELEMENT at[4];
};

// Elements [col, col + 4) of a row of `cols`, zeros beyond its end.
__device__ inline Quad read(const ELEMENT* row, i64 col, i64 cols, bool packed) {
    if (packed && col + 4 <= cols) return *reinterpret_cast<const Quad*>(row + col);
    Quad out;
#pragma unroll
    for (int k = 0; k < 4; ++k) out.at[k] = col + k < cols ? row[col + k] : from_float<ELEMENT>(0.f);
    return out;
}

// Into and out of the tile in words, as its rows are aligned to no more.
__device__ inline void stash(ELEMENT* to, const Quad& quad) {
    const unsigned* words = reinterpret_cast<const unsigned*>(&quad);
#pragma unroll
    for (int k = 0; k < (int)sizeof(ELEMENT); ++k) reinterpret_cast<unsigned*>(to)[k] = words[k];
}
__device__ inline Quad stashed(const ELEMENT* from) {
    Quad out;
    unsigned* words = reinterpret_cast<unsigned*>(&out);
#pragma unroll
    for (int k = 0; k < (int)sizeof(ELEMENT); ++k) words[k] = reinterpret_cast<const unsigned*>(from)[k];
    return out;
}

// The bits of |x|, ordered as magnitudes are, with infinity and then NaN the largest.
__device__ inline unsigned magnitude(ELEMENT x) { return __float_as_uint(to_float(x)) & 0x7fffffffu; }
__device__ inline unsigned magnitude(const Quad& x) {
    return max(max(magnitude(x.at[0]), magnitude(x.at[1])), max(magnitude(x.at[2]), magnitude(x.at[3])));
}

// The largest among groups of 8 or all 32 lanes of a warp.
__device__ inline unsigned largest(unsigned value, bool all) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, 1));
    value = max(value, __shfl_xor_sync(0xffffffffu, value, 2));
    value = max(value, __shfl_xor_sync(0xffffffffu, value, 4));
    return all ? __reduce_max_sync(0xffffffffu, value) : value;
}

struct Scale {
    float by, back;  // quantised = x * by; x = quantised * back
};

// Of the block whose largest magnitude has these bits: 1 where all are 0; NaN, which makes all of
// its elements NaN, where one is not finite. power: the least power of two that does not saturate.
__device__ inline Scale scale_of(unsigned bits, bool power) {
    if (bits == 0) return {1.f, 1.f};
    if (bits >= INFINITE) return {CUDART_NAN_F, CUDART_NAN_F};
    const float amax = __uint_as_float(bits);
    if (!power) {
        const float by = fminf(MOST / amax, LARGEST);
        return {by, 1 / by};
    }
    const unsigned ratio = __float_as_uint(amax / MOST);
    const unsigned exponent = max(1u, (ratio >> 23) + ((ratio & 0x7fffffu) != 0));
    return {__uint_as_float((254 - exponent) << 23), __uint_as_float(exponent << 23)};
}

// Rounded to nearest, ties to even; beyond the largest number it is that; what is not finite is NaN.
__device__ inline unsigned quantised(float x, float y, Scale scale) {
    const float2 pair = make_float2(fmaf(x, scale.by, x * 0.f), fmaf(y, scale.by, y * 0.f));
    return __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, FORMAT);
}

__device__ inline void put(byte* to, const Quad& x, Scale scale, i64 left, bool packed) {
    const unsigned word = quantised(to_float(x.at[0]), to_float(x.at[1]), scale) |
                          quantised(to_float(x.at[2]), to_float(x.at[3]), scale) << 16;
    if (packed && left >= 4) {
        *reinterpret_cast<unsigned*>(to) = word;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (k < left) to[k] = (byte)(word >> 8 * k);
}

// Scales are float32, or bytes that are their exponents (E8M0).
__device__ inline void put_scale(void* scales, i64 at, float scale, bool e8m0) {
    if (e8m0) static_cast<byte*>(scales)[at] = (byte)(__float_as_uint(scale) >> 23);
    else static_cast<float*>(scales)[at] = scale;
}

__device__ inline float power_of_two(byte e8m0) {
    if (e8m0 == 255) return CUDART_NAN_F;
    return __uint_as_float(e8m0 ? (unsigned)e8m0 << 23 : 0x400000u);  // 2^-127 is subnormal
}

__device__ inline float widened(byte x) { return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, FORMAT))); }

// x: [batch, rows, cols], elements of a row together; y: the same shape, and turned: [batch, cols,
// rows], or null, both without gaps. block: 32 or 128 elements of a row of y (of turned: of its
// rows); 0: whole tiles where `given` is null, with scales [batch, row tiles, column tiles] for y
// and transposed for turned; else whole matrices, scaled by given[batch] as it is, whose largest
// magnitudes are collected in amax[batch], zeros so far. Grid: batch * tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
quantise(const ELEMENT* __restrict__ x, const float* __restrict__ given, byte* __restrict__ y,
         void* __restrict__ scales, byte* __restrict__ turned, void* __restrict__ turned_scales,
         float* __restrict__ amax, i64 rows, i64 cols, i64 batch_stride, i64 row_stride, i64 block,
         i64 power, i64 e8m0, i64 packed, i64 packed_out) {
    extern __shared__ ELEMENT tile[];
    __shared__ unsigned warp_most[WARPS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 row_tiles = (rows + TILE - 1) / TILE, col_tiles = (cols + TILE - 1) / TILE;
    const i64 batch = blockIdx.x / (row_tiles * col_tiles), number = blockIdx.x % (row_tiles * col_tiles);
    const i64 row0 = number / col_tiles * TILE, col0 = number % col_tiles * TILE;
    const int num_rows = rows - row0 < TILE ? (int)(rows - row0) : TILE;
    const int num_cols = cols - col0 < TILE ? (int)(cols - col0) : TILE;
    const i64 col = col0 + 4 * lane;
    x += batch * batch_stride + row0 * row_stride;
    y += (batch * rows + row0) * cols + col;

    // Rows: read, and where blocks lie along them, written at once.
    const int shift = block == TILE ? 7 : 5;
    const i64 per_row = ((cols - 1) >> shift) + 1;
    unsigned most = 0;
#pragma unroll 1
    for (int first = warp; first < TILE; first += WARPS * AHEAD) {
        Quad ahead[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int row = first + WARPS * j;
            ahead[j] = read(x + row * row_stride, col, row < num_rows ? cols : 0, packed);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int row = first + WARPS * j;
            stash(tile + row * PITCH + 4 * lane, ahead[j]);
            unsigned here = magnitude(ahead[j]);
            if (!block) {
                most = max(most, here);
                continue;
            }
            const Scale scale = scale_of(largest(here, block == TILE), power);
            if (row >= num_rows || col >= cols) continue;
            put(y + row * cols, ahead[j], scale, cols - col, packed_out);
            if (4 * lane % (1 << shift) == 0)
                put_scale(scales, (batch * rows + row0 + row) * per_row + (col >> shift), scale.back, e8m0);
        }
    }
    Scale one = {1.f, 1.f};  // of the tile
    if (!block) {
        most = largest(most, true);
        if (lane == 0) warp_most[warp] = most;
    }
    __syncthreads();
    if (!block) {
#pragma unroll
        for (int other = 0; other < WARPS; ++other) most = max(most, warp_most[other]);
        one = given ? Scale{given[batch], 1.f} : scale_of(most, power);
        if (threadIdx.x == 0 && given) atomicMax(reinterpret_cast<unsigned*>(amax) + batch, most);
        if (threadIdx.x == 0 && !given) {
            put_scale(scales, blockIdx.x, one.back, e8m0);
            const i64 across = (batch * col_tiles + col0 / TILE) * row_tiles + row0 / TILE;
            if (turned) put_scale(turned_scales, across, one.back, e8m0);
        }
#pragma unroll 1
        for (int row = warp; row < num_rows; row += WARPS)
            if (col < cols) put(y + row * cols, stashed(tile + row * PITCH + 4 * lane), one, cols - col, packed_out);
    }
    if (!turned) return;

    // Columns: lane l has rows l, l + 32, ...
    const i64 per_col = ((rows - 1) >> shift) + 1;
    turned += (batch * cols + col0) * rows + row0;
#pragma unroll 1
    for (int c = warp; c < num_cols; c += WARPS) {
        ELEMENT value[4];
        unsigned here[4], all = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            value[k] = tile[(lane + 32 * k) * PITCH + c];
            here[k] = magnitude(value[k]);
            all = max(all, here[k]);
        }
        if (block == TILE) all = __reduce_max_sync(0xffffffffu, all);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            Scale scale = one;
            if (block == TILE) scale = scale_of(all, power);
            else if (block) scale = scale_of(__reduce_max_sync(0xffffffffu, here[k]), power);
            const int row = lane + 32 * k;
            if (row >= num_rows) continue;
            turned[c * rows + row] = (byte)quantised(to_float(value[k]), 0.f, scale);
            if (block && row % (1 << shift) == 0)
                put_scale(turned_scales, (batch * cols + col0 + c) * per_col + ((row0 + row) >> shift),
                          scale.back, e8m0);
        }
    }
}

// y = x times its block's scale, rounded to nearest. x: [rows, cols] without gaps; blocks of
// 2^row_shift x 2^col_shift elements, at least 4 in a row. Grid: any.
extern "C" __global__ void __launch_bounds__(THREADS)
dequantise(const byte* __restrict__ x, const void* __restrict__ scales, ELEMENT* __restrict__ y,
           i64 rows, i64 cols, i64 row_shift, i64 col_shift, i64 e8m0, i64 packed) {
    const i64 per_row = ((cols - 1) >> col_shift) + 1;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        for (i64 col = threadIdx.x * 4; col < cols; col += THREADS * 4) {
            const i64 where = (row >> row_shift) * per_row + (col >> col_shift), left = cols - col;
            const float scale = e8m0 ? power_of_two(static_cast<const byte*>(scales)[where])
                                     : static_cast<const float*>(scales)[where];
            const byte* from = x + row * cols + col;
            ELEMENT* to = y + row * cols + col;
            unsigned word = 0;
            if (packed) word = *reinterpret_cast<const unsigned*>(from);
            else
                for (int k = 0; k < 4 && k < left; ++k) word |= (unsigned)from[k] << 8 * k;
            Quad out;
#pragma unroll
            for (int k = 0; k < 4; ++k) out.at[k] = from_float<ELEMENT>(widened((byte)(word >> 8 * k)) * scale);
            if (packed) *reinterpret_cast<Quad*>(to) = out;
            else
                for (int k = 0; k < 4 && k < left; ++k) to[k] = out.at[k];
        }
    }
}
