// Rows of tokens to experts, and back: gathers in both directions, each result written once by one block.
//
// Sums are accumulated in float32 in the order of a token's choices, and rounded once.
// Rows are read and written 16 bytes at a time where `packed`, else by elements; the results are the same.
//
// build: ELEMENT = float, __half, __nv_bfloat16
#include "numeric.cuh"

typedef ELEMENT T;

constexpr int THREADS = 128;
constexpr int AHEAD = 4;  // rows that a thread asks for before it uses the first
constexpr unsigned ALL = 0xffffffffu;

// By a whole block.
__device__ inline void write_zeros(T* row, int dim, bool packed) {
    Pack<T> zeros;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k) zeros.at[k] = from_float<T>(0.f);
    for (int at = threadIdx.x * Pack<T>::size; at < dim; at += THREADS * Pack<T>::size) write_pack(row, at, dim, packed, zeros);
}

// y[r] = x[source[r]], zeros where source[r] < 0. y: [rows, dim]; rows of x are `stride` apart. Grid: rows.
extern "C" __global__ void __launch_bounds__(THREADS)
permute(const T* __restrict__ x, const i64* __restrict__ source, T* __restrict__ y, i64 dim, i64 stride, i64 packed) {
    const i64 from = source[blockIdx.x];
    T* to = y + blockIdx.x * dim;
    if (from < 0) return write_zeros(to, (int)dim, packed);
    const T* row = x + from * stride;
#pragma unroll 4
    for (int at = threadIdx.x * Pack<T>::size; at < (int)dim; at += THREADS * Pack<T>::size)
        write_pack(to, at, (int)dim, packed, read_pack(row, at, (int)dim, packed));
}

// y[n] = sum over j of weights[n, j] rows[slots[n, j]], without those with slots[n, j] < 0; null weights are 1.
// y: [tokens, dim], slots, weights: [tokens, choices]; rows are `stride` apart. Grid: tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
unpermute(const T* __restrict__ rows, const float* __restrict__ weights, const i64* __restrict__ slots,
          T* __restrict__ y, i64 dim, i64 choices, i64 stride, i64 packed) {
    const int lane = threadIdx.x % 32;
    slots += blockIdx.x * choices;
    if (weights) weights += blockIdx.x * choices;
    for (int first = threadIdx.x - lane; first * Pack<T>::size < (int)dim; first += THREADS) {  // a warp together
        const int at = (first + lane) * Pack<T>::size;
        float sum[Pack<T>::size];
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k) sum[k] = 0.f;
        for (int base = 0; base < (int)choices; base += 32) {
            const i64 slot = base + lane < (int)choices ? slots[base + lane] : -1;
            const float weight = slot < 0 ? 0.f : weights ? weights[base + lane] : 1.f;
            unsigned left = __ballot_sync(ALL, slot >= 0);
            while (left) {
                const int found = __popc(left);
                Pack<T> packs[AHEAD];
                float scale[AHEAD];
#pragma unroll
                for (int j = 0; j < AHEAD; ++j) {
                    const int choice = j < found ? __ffs(left) - 1 : 0;
                    const i64 row = __shfl_sync(ALL, slot, choice);
                    scale[j] = __shfl_sync(ALL, weight, choice);
                    if (j < found && at < (int)dim) packs[j] = read_pack(rows + row * stride, at, (int)dim, packed);
                    left &= left - 1;
                }
#pragma unroll
                for (int j = 0; j < AHEAD; ++j)
                    if (j < found && at < (int)dim)
#pragma unroll
                        for (int k = 0; k < Pack<T>::size; ++k) sum[k] = fmaf(scale[j], to_float(packs[j].at[k]), sum[k]);
            }
        }
        Pack<T> out;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k) out.at[k] = from_float<T>(sum[k]);
        if (at < (int)dim) write_pack(y + blockIdx.x * dim, at, (int)dim, packed, out);
    }
}

// Of `unpermute`, where y has the derivative dy: d_rows[r] = weights[a] dy[n] and d_weights[a] = dy[n] . rows[r], with
// the row's assignment a = assignment[r] and token n = a / choices; d_rows[r] is 0 where a < 0. No assignment twice.
// d_rows: [num_rows, dim]; the rows of dy and rows are their strides apart. Grid: num_rows.
extern "C" __global__ void __launch_bounds__(THREADS)
unpermute_backward(const T* __restrict__ dy, const T* __restrict__ rows, const float* __restrict__ weights,
                   const i64* __restrict__ assignment, T* __restrict__ d_rows, float* __restrict__ d_weights, i64 dim,
                   i64 choices, i64 dy_stride, i64 rows_stride, i64 packed) {
    const i64 of = assignment[blockIdx.x];
    T* to = d_rows + blockIdx.x * dim;
    if (of < 0) return write_zeros(to, (int)dim, packed);
    const float weight = weights[of];
    const T* from = dy + of / choices * dy_stride;
    const T* row = rows + blockIdx.x * rows_stride;
    float dot = 0.f;
#pragma unroll 2
    for (int at = threadIdx.x * Pack<T>::size; at < (int)dim; at += THREADS * Pack<T>::size) {
        const Pack<T> cotangent = read_pack(from, at, (int)dim, packed), value = read_pack(row, at, (int)dim, packed);
        Pack<T> out;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k) {
            const float g = to_float(cotangent.at[k]);
            dot = fmaf(g, to_float(value.at[k]), dot);
            out.at[k] = from_float<T>(weight * g);
        }
        write_pack(to, at, (int)dim, packed, out);
    }
    dot = block_sum(dot);
    if (threadIdx.x == 0) d_weights[of] = dot;
}
