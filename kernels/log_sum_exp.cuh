// log sum exp in one pass over a row, and rows that need not begin at a 16-byte boundary.
#pragma once
#include "numeric.cuh"

// A sum of exponentials, as total * exp(top), where top is the greatest term's exponent.
struct ExpSum {
    float top, total;
};

__device__ inline ExpSum no_terms() { return {-CUDART_INF_F, 0.f}; }

// What to subtract from exponents: 0 for a top that is infinite, so that no difference is nan.
__device__ inline float exponent_shift(float top) { return fabsf(top) < CUDART_INF_F ? top : 0.f; }

// Adds exp(x) for each x. The total is scaled only where top grows: seldom, after the first few.
template <int N> __device__ inline void add_terms(ExpSum& sum, const float (&x)[N]) {
    float top = x[0];
#pragma unroll
    for (int k = 1; k < N; ++k) top = fmaxf(top, x[k]);
    if (top > sum.top) {
        sum.total *= __expf(sum.top - top);
        sum.top = top;
    }
    const float shift = exponent_shift(sum.top);
#pragma unroll
    for (int k = 0; k < N; ++k) sum.total += __expf(x[k] - shift);
}

// The sum over all threads of a block of whole warps, in a fixed order; every thread gets it.
__device__ inline ExpSum block_exp_sum(ExpSum sum) {
    const float top = block_max(sum.top);
    const float mine = sum.top < top ? sum.total * __expf(sum.top - top) : sum.total;
    return {top, block_sum(mine)};
}

// -inf where there are no terms but exp(-inf).
__device__ inline float log_of(ExpSum sum) { return exponent_shift(sum.top) + logf(sum.total); }

// How many of `count` elements lie before the first 16-byte boundary.
template <class T> __device__ inline int before_boundary(const T* x, int count) {
    const int bytes = (int)(reinterpret_cast<unsigned long long>(x) & 15);
    return min(bytes ? (16 - bytes) / (int)sizeof(T) : 0, count);
}

// As before_boundary, of rows that are read and written together: all of them, if their boundaries are not at the
// same elements.
template <class T, class... Rows> __device__ inline int before_boundary(const T* x, int count, const Rows*... others) {
    const unsigned long long at = reinterpret_cast<unsigned long long>(x);
    const unsigned long long apart = ((reinterpret_cast<unsigned long long>(others) ^ at) | ...);
    return apart & 15 ? count : before_boundary(x, count);
}
