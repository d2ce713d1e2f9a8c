// Rows of any width, read and written 16 bytes at a time where their layout allows it (PACKED), by elements otherwise.
//
// A row belongs to `lanes` threads: a warp, of which a block has several with a row each, or a whole block. Thread i of
// them has the packs i, i + lanes, i + 2 lanes, ... of the row: the nth of these starts at column_of(n).
#pragma once
#include "numeric.cuh"

struct Lanes {
    int count;  // threads of a row: 32, or all of the block
    int lane;   // this thread among them
    int row;    // this thread's row among the block's
    int rows;   // rows of the block

    __device__ explicit Lanes(i64 lanes)
        : count((int)lanes), lane(threadIdx.x % (int)lanes), row(threadIdx.x / (int)lanes), rows(blockDim.x / (int)lanes) {}
    template <class T> __device__ int column_of(int n) const { return (lane + n * count) * Pack<T>::size; }
};

// compute(row, load(row)) for every row of these lanes; the next row arrives while one is computed.
template <class Load, class Compute> __device__ inline void each_row(const Lanes& own, i64 rows, Load load, Compute compute) {
    const i64 step = (i64)gridDim.x * own.rows;
    i64 row = (i64)blockIdx.x * own.rows + own.row;
    if (row >= rows) return;
    auto next = load(row);
    for (; row < rows; row += step) {
        auto now = next;
        if (row + step < rows) next = load(row + step);
        compute(row, now);
    }
}

// The 16 bytes of a pack, as what a thread keeps of a row: elements of two bytes would take a register each.
template <class T> struct Part {
    uint4 words;
};

// The pack of a row at `at`; zeros from `end` on. Where PACKED, a pack is whole or not there at all.
template <bool PACKED, class T> __device__ inline Part<T> load_part(const T* from, int at, int end) {
    if constexpr (PACKED) {
        return {at < end ? *reinterpret_cast<const uint4*>(from + at) : uint4{0, 0, 0, 0}};
    } else {
        Pack<T> part;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k) part.at[k] = at + k < end ? from[at + k] : from_float<T>(0.f);
        return {*reinterpret_cast<const uint4*>(&part)};
    }
}
// To global memory.
template <bool PACKED, class T> __device__ inline void store_part(T* to, int at, int end, const Part<T>& part) {
    if constexpr (PACKED) {
        // a plain store of what was computed word by word, with nothing between, becomes four stores of a word
        if (at < end) __stwb(reinterpret_cast<uint4*>(to + at), part.words);
    } else {
        const Pack<T> elements = *reinterpret_cast<const Pack<T>*>(&part);
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k)
            if (at + k < end) to[at + k] = elements.at[k];
    }
}

// As many float32 numbers as a pack of T has elements.
template <class T> struct Floats {
    static constexpr int size = Pack<T>::size;
    float at[size];
};
__device__ inline void unpack(unsigned word, float* to, __nv_bfloat16) {
    to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ inline void unpack(unsigned word, float* to, __half) {
    const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&word));
    to[0] = two.x, to[1] = two.y;
}
__device__ inline void unpack(unsigned word, float* to, float) { to[0] = __uint_as_float(word); }
template <class T> __device__ inline Floats<T> floats_of(const Part<T>& part) {
    Floats<T> out;
    constexpr int step = Floats<T>::size / 4;
    unpack(part.words.x, out.at, T());
    unpack(part.words.y, out.at + step, T());
    unpack(part.words.z, out.at + 2 * step, T());
    unpack(part.words.w, out.at + 3 * step, T());
    return out;
}

// Rounded to nearest, ties to even.
__device__ inline unsigned pack(const float* from, __nv_bfloat16) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(from[0], from[1]);
    return *reinterpret_cast<const unsigned*>(&two);
}
__device__ inline unsigned pack(const float* from, __half) {
    const __half2 two = __floats2half2_rn(from[0], from[1]);
    return *reinterpret_cast<const unsigned*>(&two);
}
__device__ inline unsigned pack(const float* from, float) { return __float_as_uint(*from); }
template <class T> __device__ inline Part<T> rounded(const Floats<T>& values) {
    constexpr int step = Floats<T>::size / 4;
    return {uint4{pack(values.at, T()), pack(values.at + step, T()), pack(values.at + 2 * step, T()), pack(values.at + 3 * step, T())}};
}

// A vector that all rows share (weights, tables): of float32 where `wide`, else of T.
template <class T> struct Shared {
    const void* from;
    bool wide;

    template <bool PACKED> __device__ Floats<T> part(int at, int end) const {
        if (!wide) return floats_of(load_part<PACKED>(static_cast<const T*>(from), at, end));
        Floats<T> out;
#pragma unroll
        for (int k = 0; k < Floats<T>::size; k += 4) {
            const Floats<float> four = floats_of(load_part<PACKED>(static_cast<const float*>(from), at + k, end));
#pragma unroll
            for (int j = 0; j < 4; ++j) out.at[k + j] = four.at[j];
        }
        return out;
    }
};

// Sums over the threads of a row, in a fixed order; all of the block's threads call them.
__device__ inline float row_sum(float x, const Lanes& lanes) { return lanes.count == 32 ? warp_sum(x) : block_sum(x); }
__device__ inline float2 row_sums(float2 x, const Lanes& lanes) {
    x = make_float2(warp_sum(x.x), warp_sum(x.y));
    if (lanes.count == 32) return x;
    __shared__ float2 parts_of_two[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    __syncthreads();  // an earlier call may still be reading
    if (lane == 0) parts_of_two[warp] = x;
    __syncthreads();
    x = lane < (int)(blockDim.x >> 5) ? parts_of_two[lane] : make_float2(0.f, 0.f);
    return make_float2(warp_sum(x.x), warp_sum(x.y));
}

// Sums over rows, of every column, in shared memory: each thread adds what its own packs give, without barriers. Where a
// column is kept is such that the threads of a warp meet different banks.
template <class T> struct ColumnSums {
    float* at;
    int size;  // floats for each of the block's rows

    __device__ ColumnSums(float* shared, const Lanes& lanes, int dim) : at(shared), size(padded(lanes.count, dim)) {}
    __device__ static int padded(int lanes, int dim) {
        const int width = lanes * Pack<T>::size;
        return (dim + width - 1) / width * width;
    }
    // The elements of the thread's nth pack are `lanes.count` apart.
    __device__ float* of(const Lanes& lanes, int n) const {
        return at + lanes.row * size + n * lanes.count * Pack<T>::size + lanes.lane;
    }
};
// The column that is kept at place i of a row of sums.
template <class T> __device__ inline int column_at(int i, int lanes) {
    const int width = lanes * Pack<T>::size, inside = i % width;
    return i - inside + inside % lanes * Pack<T>::size + inside / lanes;
}

// Each column's sum over a block's rows of sums, to the block's row of `partials`. All threads call it, once.
__device__ inline void write_partials(const float* sums, int size, int rows, float* partials) {
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        float total = sums[i];
        for (int row = 1; row < rows; ++row) total += sums[row * size + i];
        partials[i] = total;
    }
}

// Sums over rows of `partials` [rows, size], one column for each lane of a block's warps; the first warp gets them.
__device__ inline float column_total(const float* partials, i64 rows, i64 size, i64 column) {
    __shared__ float parts_of_columns[32][33];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    float total = 0.f;
    if (column < size)
#pragma unroll 4
        for (i64 row = warp; row < rows; row += warps) total += partials[row * size + column];
    parts_of_columns[warp][lane] = total;
    __syncthreads();
    total = 0.f;
    if (warp == 0)
        for (int i = 0; i < warps; ++i) total += parts_of_columns[i][lane];
    return total;
}

// Writes x as float32 where `wide`, else as T.
template <class T> __device__ inline void store_number(void* to, i64 at, float x, bool wide) {
    if (wide) static_cast<float*>(to)[at] = x;
    else static_cast<T*>(to)[at] = from_float<T>(x);
}
