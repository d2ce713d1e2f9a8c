// Sums of squares in a fixed order, and whether every element is finite: for the norm of gradients.
//
// A row is cut into chunks of CHUNK elements, one block each, and a second kernel adds up what the
// chunks gave. Who adds what to what depends on the size of a row only: not on how many processors
// there are, nor on alignment. So every run, and every GPU, gives the same bits.
//
// build: ELEMENT = float, __half, __nv_bfloat16
#include "numeric.cuh"

constexpr int THREADS = 256;
constexpr i64 CHUNK = 32768;  // as in functron/ops/global_norm.py
constexpr int AHEAD = 4;      // packs that a thread asks for before it uses the first

// Elements [at, at + Pack<ELEMENT>::size) of a row of `dim`, zeros beyond its end.
__device__ inline Pack<ELEMENT> read(const ELEMENT* row, i64 at, i64 dim, bool packed) {
    if (packed && at + Pack<ELEMENT>::size <= dim) return load_pack(row + at);
    Pack<ELEMENT> out;
#pragma unroll
    for (int k = 0; k < Pack<ELEMENT>::size; ++k) out.at[k] = at + k < dim ? row[at + k] : from_float<ELEMENT>(0.f);
    return out;
}

// sums[row * chunks + chunk] = the sum of squares of that chunk; flags: 1 where it has an infinity
// or NaN, else 0. x: [rows, dim], rows `stride` elements apart. Grid: rows * chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_of_squares(const ELEMENT* __restrict__ x, float* __restrict__ sums, float* __restrict__ flags,
               i64 dim, i64 stride, i64 chunks, i64 packed) {
    const ELEMENT* row = x + blockIdx.x / chunks * stride;
    const i64 start = blockIdx.x % chunks * CHUNK;
    const i64 end = start + CHUNK < dim ? start + CHUNK : dim;
    float sum = 0.f, taint = 0.f;  // taint: 0, or NaN from 0 times infinity or NaN
    constexpr i64 STEP = THREADS * Pack<ELEMENT>::size;
    for (i64 at = start + threadIdx.x * Pack<ELEMENT>::size; at < end; at += AHEAD * STEP) {
        Pack<ELEMENT> ahead[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) ahead[j] = read(row, at + j * STEP, end, packed);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
#pragma unroll
            for (int k = 0; k < Pack<ELEMENT>::size; ++k) {
                const float value = to_float(ahead[j].at[k]);
                sum = fmaf(value, value, sum);
                taint = fmaf(value, 0.f, taint);
            }
    }
    sum = block_sum(sum);
    const float flag = block_max(taint == 0.f ? 0.f : 1.f);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = sum;
        flags[blockIdx.x] = flag;
    }
}

// The sums and flags of rows from those of their chunks. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
finish(const float* __restrict__ parts, const float* __restrict__ part_flags, float* __restrict__ sums,
       float* __restrict__ flags, i64 chunks) {
    const i64 first = blockIdx.x * chunks;
    double sum = 0;  // of up to thousands of terms, few of which are computed at a time
    float flag = 0.f;
    for (i64 chunk = threadIdx.x; chunk < chunks; chunk += THREADS) {
        sum += parts[first + chunk];
        flag = fmaxf(flag, part_flags[first + chunk]);
    }
    const float total = block_sum((float)sum);
    flag = block_max(flag);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = total;
        flags[blockIdx.x] = flag;
    }
}
