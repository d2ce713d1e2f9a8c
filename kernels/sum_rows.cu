// The derivative of a look-up: the rows of x that belong to each row of a table, added up.
//
// x's rows are taken in the order of a stable sort of their ids, in chunks of CHUNK: a block adds up a chunk, and writes
// the rows of the table that begin and end in it. What of the others is in this chunk goes to `parts`, which `finish`
// adds up. So sums are in float32, in an order that the ids alone decide, rounded once, and no block has more than
// CHUNK rows and the number of chunks to add, also where most ids are equal.
//
// build: ELEMENT = float, __half, __nv_bfloat16
#include "numeric.cuh"

typedef ELEMENT T;

constexpr int THREADS = 128;
constexpr int CHUNK = 32;
constexpr int AHEAD = 4;  // rows that a thread asks for before it uses the first

__device__ inline void write(T* row, int at, int dim, bool packed, const float* sum) {
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k) pack.at[k] = from_float<T>(sum[k]);
    write_pack(row, at, dim, packed, pack);
}

// y[v] = sum of x[order[p]] over p with ids[p] == v, where all such p are in one chunk; else the sum over those of the
// chunk, in row 2 c of parts if there are some before chunk c, in row 2 c + 1 if there are none. ids rise; those that
// are no row of y are left out. x: rows `stride` apart, y: [rows, dim], parts: [2 chunks, dim].
// Grid: chunks, and the columns by blocks of THREADS packs.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_chunks(const T* __restrict__ x, const i64* __restrict__ order, const i64* __restrict__ ids, T* __restrict__ y,
           float* __restrict__ parts, i64 count, i64 rows, i64 dim, i64 stride, i64 packed) {
    __shared__ i64 from[CHUNK], id[CHUNK + 1];
    const i64 begin = (i64)blockIdx.x * CHUNK;
    const int size = (int)(count - begin < CHUNK ? count - begin : CHUNK);
    for (int p = threadIdx.x; p < size; p += THREADS) from[p] = order[begin + p];
    for (int p = threadIdx.x; p <= size; p += THREADS) id[p] = begin + p < count ? ids[begin + p] : rows;
    __syncthreads();
    const int at = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * Pack<T>::size;
    if (at >= (int)dim) return;
    bool before = begin > 0 && ids[begin - 1] == id[0];
    float sum[Pack<T>::size];
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k) sum[k] = 0.f;
    for (int base = 0; base < size; base += AHEAD) {
        Pack<T> packs[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; ++j)
            if (base + j < size && id[base + j] >= 0 && id[base + j] < rows)
                packs[j] = read_pack(x + from[base + j] * stride, at, (int)dim, packed);
#pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
            const int p = base + j;
            if (p >= size) break;
            if (id[p] < 0 || id[p] >= rows) {
                before = false;
                continue;
            }
#pragma unroll
            for (int k = 0; k < Pack<T>::size; ++k) sum[k] += to_float(packs[j].at[k]);
            const bool after = p + 1 == size && id[p + 1] == id[p];
            if (!after && p + 1 < size && id[p + 1] == id[p]) continue;
            if (before || after) {
                float* part = parts + (2 * (i64)blockIdx.x + (before ? 0 : 1)) * dim;
#pragma unroll
                for (int k = 0; k < Pack<T>::size; ++k)
                    if (at + k < (int)dim) part[at + k] = sum[k];
            } else {
                write(y + id[p] * dim, at, (int)dim, packed, sum);
            }
            before = false;
#pragma unroll
            for (int k = 0; k < Pack<T>::size; ++k) sum[k] = 0.f;
        }
    }
}

// The rows of y that begin in a chunk and end in another, from `parts`. Grid: as of sum_chunks.
extern "C" __global__ void __launch_bounds__(THREADS)
finish(const i64* __restrict__ ids, T* __restrict__ y, const float* __restrict__ parts, i64 count, i64 rows, i64 dim,
       i64 packed) {
    const i64 begin = (i64)blockIdx.x * CHUNK, end = begin + CHUNK;
    if (end >= count) return;
    const i64 id = ids[end];
    const bool begins = ids[end - 1] == id && (begin == 0 || ids[begin - 1] != id);
    const int at = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * Pack<T>::size;
    if (!begins || id < 0 || id >= rows || at >= (int)dim) return;
    float sum[Pack<T>::size];
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k)
        sum[k] = at + k < (int)dim ? parts[(2 * (i64)blockIdx.x + 1) * dim + at + k] : 0.f;
    for (i64 chunk = blockIdx.x + 1; chunk * CHUNK < count && ids[chunk * CHUNK] == id; ++chunk)
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k)
            if (at + k < (int)dim) sum[k] += parts[2 * chunk * dim + at + k];
    write(y + id * dim, at, (int)dim, packed, sum);
}
