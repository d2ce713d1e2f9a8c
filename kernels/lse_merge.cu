// Attention over two sets of keys from that over each, and the cotangents: per row, with a warp per row,
//     lse = log(exp(lse1) + exp(lse2)),  out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse).
// A set of which a row sees nothing has lse -inf and counts nothing; if both are so, the result is -inf and 0.
// The first set is what has been joined so far, in float32.
// Rows lie anywhere: [outer, middle, inner] of them, a stride for each, and elements side by side.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "numeric.cuh"

constexpr int THREADS = 256;
constexpr int QUAD = 4;

template <class T> struct alignas(QUAD * sizeof(T)) Quad {
    T at[QUAD];
};

// Elements [at, at + QUAD) of a row of `dim`, zeros beyond its end; `packed` where they are one aligned access.
template <class T> __device__ inline void read(float (&x)[QUAD], const T* row, int at, int dim, bool packed) {
    if (packed) {
        const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(row + at);
#pragma unroll
        for (int k = 0; k < QUAD; ++k) x[k] = to_float(quad.at[k]);
    } else {
#pragma unroll
        for (int k = 0; k < QUAD; ++k) x[k] = at + k < dim ? to_float(row[at + k]) : 0.f;
    }
}
template <class T> __device__ inline void write(T* row, int at, int dim, bool packed, const float (&x)[QUAD]) {
    if (packed) {
        Quad<T> quad;
#pragma unroll
        for (int k = 0; k < QUAD; ++k) quad.at[k] = from_float<T>(x[k]);
        *reinterpret_cast<Quad<T>*>(row + at) = quad;
    } else {
#pragma unroll
        for (int k = 0; k < QUAD; ++k)
            if (at + k < dim) row[at + k] = from_float<T>(x[k]);
    }
}

// Where a row lies, of its place among [outer, middle, inner].
struct Place {
    i64 outer, middle, inner;

    __device__ Place(i64 row, i64 middles, i64 inners) {
        const unsigned n = (unsigned)row, i = (unsigned)inners, m = (unsigned)middles;  // rows < 2^31
        inner = n % i;
        middle = n / i % m;
        outer = n / i / m;
    }
    __device__ i64 at(i64 outer_stride, i64 middle_stride, i64 inner_stride) const {
        return outer * outer_stride + middle * middle_stride + inner * inner_stride;
    }
};

// What the two sets weigh, and the logarithm of both.
struct Weights {
    float first, second, lse;

    __device__ Weights(float lse1, float lse2) {
        const float top = fmaxf(lse1, lse2), shift = top == -CUDART_INF_F ? 0.f : top;
        first = expf(lse1 - shift);
        second = expf(lse2 - shift);
        const float total = first + second;
        lse = shift + logf(total);  // log 0 = -inf
        const float scale = total == 0.f ? 0.f : 1.f / total;
        first *= scale;
        second *= scale;
    }
};

// out: [rows, dim] and lse: [rows], contiguous. s: the strides of the rows of out1, lse1, out2 and lse2.
extern "C" __global__ void __launch_bounds__(THREADS)
lse_merge_forward(const float* __restrict__ out1, const float* __restrict__ lse1, const ELEMENT* __restrict__ out2,
                  const float* __restrict__ lse2, float* __restrict__ out, float* __restrict__ lse, i64 rows, i64 dim,
                  i64 middles, i64 inners, i64 o1a, i64 o1b, i64 o1c, i64 l1a, i64 l1b, i64 l1c, i64 o2a, i64 o2b,
                  i64 o2c, i64 l2a, i64 l2b, i64 l2c, i64 packed) {
    const i64 row = blockIdx.x * (i64)(THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    const Place place(row, middles, inners);
    const Weights weights(lse1[place.at(l1a, l1b, l1c)], lse2[place.at(l2a, l2b, l2c)]);
    const float* x = out1 + place.at(o1a, o1b, o1c);
    const ELEMENT* y = out2 + place.at(o2a, o2b, o2c);
    const int lane = threadIdx.x % 32, n = (int)dim;
    if (lane == 0) lse[row] = weights.lse;
    for (int i = lane * QUAD; i < n; i += 32 * QUAD) {
        float a[QUAD], b[QUAD];
        read(a, x, i, n, packed);
        read(b, y, i, n, packed);
#pragma unroll
        for (int k = 0; k < QUAD; ++k) a[k] = weights.first * a[k] + weights.second * b[k];
        write(out + row * dim, i, n, packed, a);
    }
}

// d_out: [rows, dim] and d_lse: [rows], contiguous, as are the results.
extern "C" __global__ void __launch_bounds__(THREADS)
lse_merge_backward(const float* __restrict__ d_out, const float* __restrict__ d_lse, const float* __restrict__ out1,
                   const float* __restrict__ lse1, const ELEMENT* __restrict__ out2, const float* __restrict__ lse2,
                   float* __restrict__ d_out1, float* __restrict__ d_lse1, ELEMENT* __restrict__ d_out2,
                   float* __restrict__ d_lse2, i64 rows, i64 dim, i64 middles, i64 inners, i64 o1a, i64 o1b, i64 o1c,
                   i64 l1a, i64 l1b, i64 l1c, i64 o2a, i64 o2b, i64 o2c, i64 l2a, i64 l2b, i64 l2c, i64 packed) {
    const i64 row = blockIdx.x * (i64)(THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;  // a whole warp
    const Place place(row, middles, inners);
    const Weights weights(lse1[place.at(l1a, l1b, l1c)], lse2[place.at(l2a, l2b, l2c)]);
    const float* x = out1 + place.at(o1a, o1b, o1c);
    const ELEMENT* y = out2 + place.at(o2a, o2b, o2c);
    const int lane = threadIdx.x % 32, n = (int)dim;
    float apart = 0.f;  // the cotangent of out times out1 - out2
    for (int i = lane * QUAD; i < n; i += 32 * QUAD) {
        float a[QUAD], b[QUAD], given[QUAD];
        read(a, x, i, n, packed);
        read(b, y, i, n, packed);
        read(given, d_out + row * dim, i, n, packed);
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            apart += given[k] * (a[k] - b[k]);
            a[k] = weights.first * given[k];
            b[k] = weights.second * given[k];
        }
        write(d_out1 + row * dim, i, n, packed, a);
        write(d_out2 + row * dim, i, n, packed, b);
    }
    apart = warp_sum(apart);
    if (lane == 0) {
        d_lse1[row] = weights.first * (d_lse[row] + weights.second * apart);
        d_lse2[row] = weights.second * (d_lse[row] - weights.first * apart);
    }
}
