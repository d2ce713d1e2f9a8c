// Quantisation to 8-bit floating point, by blocks of 1x32, 1x128 or 128x128 elements, by rows or by whole
// tensors, of a matrix and, in the same pass, of its transpose.
//
// A product of matrices in FP8 wants both operands with the contracted dim last. The gradients of
// a weight contract the other dim than the forward pass, so the transpose is needed as well, and
// where blocks lie along one dim it has other scales: it cannot be made of the quantised matrix.
//
// One thread block has a tile of 128x128, which it reads once, into shared memory. Bytes of the transpose are turned
// there too, and leave 16 at a time.
//
// Scales lie as products of matrices want them (`torch.nn.functional.scaled_mm`): those of blocks of 1x128 column by
// column, so that neighbouring rows' are neighbours; rows of those of 128x128 padded with zeros to a multiple of 4.
//
// build: ELEMENT = float, __half, __nv_bfloat16
// build: FORMAT = __NV_E4M3, __NV_E5M2
// build: ROWS = 0, 1
#include <cuda_fp8.h>
#include "rows.cuh"

constexpr int TILE = 128, THREADS = 256, WARPS = THREADS / 32;
constexpr int PITCH = TILE + 4 / sizeof(ELEMENT);  // an odd number of words: columns meet all banks
using Lot = Pack<ELEMENT>;                         // what a lane reads of a row at a time
constexpr int LOT = Lot::size, LANES = TILE / LOT, TURN = THREADS / LANES;  // elements; lanes of a row; rows at a time
constexpr int AHEAD = 4;                           // rows that a lane asks for before it uses the first
constexpr int MX = 32, PAD = 4;
constexpr float MOST = FORMAT == __NV_E4M3 ? 448.f : 57344.f;
constexpr float LARGEST = 3.40282347e38f;
constexpr unsigned INFINITE = 0x7f800000u;

typedef unsigned char byte;

// Elements [col, col + LOT) of a row of `cols`, zeros beyond its end.
__device__ inline Lot read(const ELEMENT* row, i64 col, i64 cols, bool packed) {
    if (packed && col + LOT <= cols) return load_pack(row + col);
    Lot out;
#pragma unroll
    for (int k = 0; k < LOT; ++k) out.at[k] = col + k < cols ? row[col + k] : from_float<ELEMENT>(0.f);
    return out;
}

// Into and out of the tile in words, as its rows are aligned to no more.
__device__ inline void stash(ELEMENT* to, const Lot& lot) {
    const unsigned* words = reinterpret_cast<const unsigned*>(&lot);
#pragma unroll
    for (int k = 0; k < 4; ++k) reinterpret_cast<unsigned*>(to)[k] = words[k];
}
__device__ inline Lot stashed(const ELEMENT* from) {
    Lot out;
    unsigned* words = reinterpret_cast<unsigned*>(&out);
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = reinterpret_cast<const unsigned*>(from)[k];
    return out;
}

// The bits of |x|, ordered as magnitudes are, with infinity and then NaN the largest.
__device__ inline unsigned magnitude(ELEMENT x) { return __float_as_uint(to_float(x)) & 0x7fffffffu; }
__device__ inline unsigned magnitude(const Lot& x) {
    unsigned most = 0;
#pragma unroll
    for (int k = 0; k < LOT; ++k) most = max(most, magnitude(x.at[k]));
    return most;
}

// The largest among groups of so many lanes of a warp, a power of two.
__device__ inline unsigned largest(unsigned value, int lanes) {
#pragma unroll
    for (int other = 1; other < 32; other *= 2)
        if (other < lanes) value = max(value, __shfl_xor_sync(0xffffffffu, value, other));
    return value;
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

__device__ inline void put(byte* to, const Lot& x, Scale scale, i64 left, bool packed) {
    unsigned words[LOT / 4];
#pragma unroll
    for (int k = 0; k < LOT / 4; ++k)
        words[k] = quantised(to_float(x.at[4 * k]), to_float(x.at[4 * k + 1]), scale) |
                   quantised(to_float(x.at[4 * k + 2]), to_float(x.at[4 * k + 3]), scale) << 16;
    if (packed) {
        if constexpr (LOT == 8) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[LOT / 4 - 1]);
        else *reinterpret_cast<unsigned*>(to) = words[0];
        return;
    }
#pragma unroll
    for (int k = 0; k < LOT; ++k)
        if (k < left) to[k] = (byte)(words[k / 4] >> 8 * (k % 4));
}

__device__ inline byte exponent(float power) { return (byte)(__float_as_uint(power) >> 23); }  // E8M0

// x: [batch, rows, cols], elements of a row together; y: the same shape, and turned: [batch, cols, rows], or null, both
// without gaps. block: 32 or 128 elements of a row of y (of turned: of its rows); 0: whole tiles where `given` is null;
// else whole matrices, scaled by what the magnitude given[batch] makes, whose inverse is scales[batch]; compiled with
// ROWS by that of each row of the one result that is wanted: of y given[batch, rows], or where there is turned, of it
// and not of y, given[batch, cols]. Scales of y, and transposed those of turned: of 32, bytes [batch, rows, blocks]; of
// 128, [batch, blocks, rows]; of tiles [batch, row tiles, column tiles padded]. Grid: batch * tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
quantise(const ELEMENT* __restrict__ x, const float* __restrict__ given, byte* __restrict__ y,
         void* __restrict__ scales, byte* __restrict__ turned, void* __restrict__ turned_scales,
         i64 rows, i64 cols, i64 batch_stride, i64 row_stride, i64 block, i64 power, i64 packed, i64 packed_out,
         i64 packed_turned) {
    extern __shared__ ELEMENT tile[];
    __shared__ unsigned warp_most[WARPS];
    __shared__ float of_rows[TILE], of_cols[TILE];  // scales of blocks of 128
    __shared__ uint4 columns[WARPS][4][TILE / 16];  // bytes of the transpose
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 row_tiles = (rows + TILE - 1) / TILE, col_tiles = (cols + TILE - 1) / TILE;
    const i64 batch = blockIdx.x / (row_tiles * col_tiles), number = blockIdx.x % (row_tiles * col_tiles);
    const i64 row_tile = number / col_tiles, col_tile = number % col_tiles;
    const i64 row0 = row_tile * TILE, col0 = col_tile * TILE;
    const int num_rows = rows - row0 < TILE ? (int)(rows - row0) : TILE;
    const int num_cols = cols - col0 < TILE ? (int)(cols - col0) : TILE;
    const int own = threadIdx.x / LANES, place = threadIdx.x % LANES * LOT;  // of this lane in the tile
    const i64 col = col0 + place, left = cols - col;
    x += batch * batch_stride + row0 * row_stride;
    y += (batch * rows + row0) * cols + col;
    if constexpr (ROWS) {  // of_rows: what rows of the result are multiplied by
        const i64 at = (turned ? col0 : row0) + threadIdx.x, all = turned ? cols : rows;
        if (threadIdx.x < TILE && at < all) {
            const Scale scale = scale_of(__float_as_uint(given[batch * all + at]), power);
            of_rows[threadIdx.x] = scale.by;
            if (!(turned ? row_tile : col_tile)) static_cast<float*>(scales)[batch * all + at] = scale.back;
        }
        __syncthreads();
    }

    // Rows: read, and where blocks lie along them, written at once.
    const i64 per_row = (cols + MX - 1) / MX, per_col = (rows + MX - 1) / MX;
    unsigned most = 0;
#pragma unroll 1
    for (int first = own; first < TILE; first += TURN * AHEAD) {
        Lot ahead[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int row = first + TURN * j;
            ahead[j] = read(x + row * row_stride, col, row < num_rows ? cols : 0, packed);
        }
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int row = first + TURN * j;
            stash(tile + row * PITCH + place, ahead[j]);
            const unsigned here = magnitude(ahead[j]);
            if constexpr (ROWS) {
                if (turned || row >= num_rows || left <= 0) continue;
                put(y + row * cols, ahead[j], {of_rows[row], 1.f}, left, packed_out);
                continue;
            }
            if (!block) {
                most = max(most, here);
                continue;
            }
            const Scale scale = scale_of(largest(here, (int)block / LOT), power);
            if (row >= num_rows || left <= 0) continue;
            put(y + row * cols, ahead[j], scale, left, packed_out);
            if (block == TILE && place == 0) of_rows[row] = scale.back;
            if (block == MX && place % MX == 0)
                static_cast<byte*>(scales)[(batch * rows + row0 + row) * per_row + col / MX] = exponent(scale.back);
        }
    }
    Scale one = {1.f, 1.f};  // of the tile
    if (!ROWS && !block) {
        most = largest(most, 32);
        if (lane == 0) warp_most[warp] = most;
    }
    __syncthreads();
    if (block == TILE && threadIdx.x < num_rows)
        static_cast<float*>(scales)[(batch * col_tiles + col_tile) * rows + row0 + threadIdx.x] = of_rows[threadIdx.x];
    if (!ROWS && !block) {
#pragma unroll
        for (int other = 0; other < WARPS; ++other) most = max(most, warp_most[other]);
        one = scale_of(given ? __float_as_uint(given[batch]) : most, power);
        if (threadIdx.x == 0 && given && !number) static_cast<float*>(scales)[batch] = one.back;
        if (threadIdx.x < PAD && !given) {  // the last tile of a row of them writes the padding
            const i64 across = (col_tiles + PAD - 1) / PAD * PAD, down = (row_tiles + PAD - 1) / PAD * PAD;
            const i64 at_col = col_tile + threadIdx.x, at_row = row_tile + threadIdx.x;
            const float mine = threadIdx.x == 0 ? one.back : 0.f;
            if (threadIdx.x == 0 || (col_tile + 1 == col_tiles && at_col < across))
                static_cast<float*>(scales)[(batch * row_tiles + row_tile) * across + at_col] = mine;
            if (turned && (threadIdx.x == 0 || (row_tile + 1 == row_tiles && at_row < down)))
                static_cast<float*>(turned_scales)[(batch * col_tiles + col_tile) * down + at_row] = mine;
        }
#pragma unroll 1
        for (int row = own; row < num_rows; row += TURN)
            if (left > 0) put(y + row * cols, stashed(tile + row * PITCH + place), one, left, packed_out);
    }
    if (!turned) return;

    // Columns, four of a warp at a time: lane l has rows l, l + 32, ...
    turned += (batch * cols + col0) * rows + row0;
#pragma unroll 1
    for (int first = 4 * warp; first < num_cols; first += 4 * WARPS) {
#pragma unroll 1
        for (int j = 0; j < 4 && first + j < num_cols; ++j) {
            const int c = first + j;
            ELEMENT value[4];
            unsigned here[4], all = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                value[k] = tile[(lane + 32 * k) * PITCH + c];
                here[k] = magnitude(value[k]);
                all = max(all, here[k]);
            }
            Scale scale = block == TILE ? scale_of(__reduce_max_sync(0xffffffffu, all), power) : one;
            if (ROWS) scale.by = of_rows[c];
            if (block == TILE && lane == 0) of_cols[c] = scale.back;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (block == MX) scale = scale_of(__reduce_max_sync(0xffffffffu, here[k]), power);
                reinterpret_cast<byte*>(columns[warp][j])[lane + 32 * k] = (byte)quantised(to_float(value[k]), 0.f, scale);
                if (block == MX && lane == 0 && MX * k < num_rows)
                    static_cast<byte*>(turned_scales)[(batch * cols + col0 + c) * per_col + row0 / MX + k] =
                        exponent(scale.back);
            }
        }
        __syncwarp();
        if (packed_turned) {
            const int j = lane / 8, part = lane % 8;
            if (first + j < num_cols && 16 * part < num_rows)
                *reinterpret_cast<uint4*>(turned + (first + j) * rows + 16 * part) = columns[warp][j][part];
        } else {
            for (int j = 0; j < 4 && first + j < num_cols; ++j)
                for (int row = lane; row < num_rows; row += 32)
                    turned[(first + j) * rows + row] = reinterpret_cast<const byte*>(columns[warp][j])[row];
        }
        __syncwarp();  // the next four are written where these have been read
    }
    if (block != TILE) return;
    __syncthreads();
    if (threadIdx.x < num_cols)
        static_cast<float*>(turned_scales)[(batch * row_tiles + row_tile) * cols + col0 + threadIdx.x] = of_cols[threadIdx.x];
}
