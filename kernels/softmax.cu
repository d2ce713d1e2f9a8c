// Softmax over rows of scores that are scaled, masked and joined by a logit of their own (a sink), and cotangents:
//     s_j = scale x_j, or -inf where hidden;  lse = log(sum_j exp(s_j) + exp(sink));  p_j = exp(s_j - lse).
// One block per row of [batch, heads, rows]. A mask has strides of its own, 0 where it is the same for all heads.
// Rows that see nothing give 0 and -inf. Every result may be written over the operand of its shape: an element is read
// and written by one thread, in this order.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "log_sum_exp.cuh"

constexpr int THREADS = 512;
using Vector = Pack<ELEMENT>;
constexpr int PACK = Vector::size;

struct alignas(PACK) Flags {
    bool at[PACK];
};

// A row of scores before softmax.
struct Scores {
    const ELEMENT* x;
    const bool* hidden;  // null: nothing is
    int width;           // keys from here on come after the query
    float scale;

    __device__ Scores(const ELEMENT* x, const bool* mask, i64 batch_stride, i64 head_stride, i64 row_stride, i64 heads,
                      i64 rows, i64 columns, i64 causal, float scale)
        : x(x), hidden(mask), width((int)columns), scale(scale) {
        const unsigned at = blockIdx.x, r = (unsigned)rows, h = (unsigned)heads;  // 64-bit division is slow
        const i64 row = at % r, head = at / r % h, batch = at / r / h;
        if (hidden != nullptr) hidden += batch * batch_stride + head * head_stride + row * row_stride;
        if (causal && row + 1 < columns) width = (int)row + 1;
    }
    __device__ float one(int column) const {
        const bool seen = column < width && (hidden == nullptr || !hidden[column]);
        return seen ? scale * to_float(x[column]) : -CUDART_INF_F;
    }
    // The scores of the pack at `first`, a boundary of x.
    __device__ void pack(float (&s)[PACK], int first) const {
        Flags masked{};
        if (first < width && hidden != nullptr) {
            if (reinterpret_cast<unsigned long long>(hidden + first) % PACK == 0) {
                masked = *reinterpret_cast<const Flags*>(hidden + first);
            } else {
#pragma unroll
                for (int k = 0; k < PACK; ++k) masked.at[k] = hidden[first + k];
            }
        }
        Vector vector{};
        if (first < width) vector = load_pack(x + first);
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            s[k] = first + k < width && !masked.at[k] ? scale * to_float(vector.at[k]) : -CUDART_INF_F;
    }
};

// p: [.., columns], rows `p_stride` apart; lse: [batch, heads, rows]; sinks: [heads] or null.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_forward(const ELEMENT* x, const bool* hidden, const float* sinks, ELEMENT* p, float* lse, i64 heads, i64 rows,
                i64 columns, i64 x_stride, i64 p_stride, i64 hidden_batch, i64 hidden_head, i64 hidden_row, i64 causal,
                float scale) {
    const i64 row = blockIdx.x;
    const Scores scores(x + row * x_stride, hidden, hidden_batch, hidden_head, hidden_row, heads, rows, columns, causal,
                        scale);
    ELEMENT* out = p + row * p_stride;
    const int n = (int)columns, head = before_boundary(scores.x, n, out), packs = (n - head) / PACK;
    ExpSum sum = no_terms();
    for (int i = threadIdx.x; i < packs && head + i * PACK < scores.width; i += blockDim.x) {
        float s[PACK];
        scores.pack(s, head + i * PACK);
        add_terms(sum, s);
    }
    for (int i = threadIdx.x; i < n - packs * PACK; i += blockDim.x) {
        const float s[1] = {scores.one(i < head ? i : i + packs * PACK)};
        add_terms(sum, s);
    }
    if (sinks != nullptr && threadIdx.x == 0) {
        const float s[1] = {sinks[blockIdx.x / (unsigned)rows % (unsigned)heads]};
        add_terms(sum, s);
    }
    sum = block_exp_sum(sum);
    const float shift = exponent_shift(sum.top), over = sum.total == 0.f ? 0.f : 1.f / sum.total;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        float s[PACK];
        scores.pack(s, head + i * PACK);
        Vector vector;
#pragma unroll
        for (int k = 0; k < PACK; ++k) vector.at[k] = from_float<ELEMENT>(__expf(s[k] - shift) * over);
        store_pack(out + head + i * PACK, vector);
    }
    for (int i = threadIdx.x; i < n - packs * PACK; i += blockDim.x) {
        const int column = i < head ? i : i + packs * PACK;
        out[column] = from_float<ELEMENT>(__expf(scores.one(column) - shift) * over);
    }
    if (threadIdx.x == 0) lse[row] = log_of(sum);
}

// d x_j = scale p_j (d_p_j + rest), where rest = d_lse - sum_k p_k d_p_k, one per row, is that of a sink besides exp.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward(const ELEMENT* d_p, const float* d_lse, const ELEMENT* p, ELEMENT* d_x, float* rests, i64 columns,
                 i64 d_p_stride, i64 p_stride, i64 d_x_stride, float scale) {
    const i64 row = blockIdx.x;
    const ELEMENT *given = d_p + row * d_p_stride, *weights = p + row * p_stride;
    ELEMENT* out = d_x + row * d_x_stride;
    const int n = (int)columns, head = before_boundary(given, n, weights, out), packs = (n - head) / PACK;
    float dot = 0.f;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Vector a = load_pack(given + head + i * PACK), b = load_pack(weights + head + i * PACK);
#pragma unroll
        for (int k = 0; k < PACK; ++k) dot += to_float(a.at[k]) * to_float(b.at[k]);
    }
    for (int i = threadIdx.x; i < n - packs * PACK; i += blockDim.x) {
        const int column = i < head ? i : i + packs * PACK;
        dot += to_float(given[column]) * to_float(weights[column]);
    }
    const float rest = d_lse[row] - block_sum(dot);
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Vector a = load_pack(given + head + i * PACK);
        const Vector b = load_pack(weights + head + i * PACK);
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            a.at[k] = from_float<ELEMENT>(scale * to_float(b.at[k]) * (to_float(a.at[k]) + rest));
        store_pack(out + head + i * PACK, a);
    }
    for (int i = threadIdx.x; i < n - packs * PACK; i += blockDim.x) {
        const int column = i < head ? i : i + packs * PACK;
        out[column] = from_float<ELEMENT>(scale * to_float(weights[column]) * (to_float(given[column]) + rest));
    }
    if (threadIdx.x == 0) rests[row] = rest;
}

// Of one block of keys among several, from the lse over all and delta = the row sum of the result times its cotangent:
//     p_j = exp(s_j - lse),  d x_j = scale p_j (d_p_j - delta).
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_block_backward(const ELEMENT* x, const bool* hidden, const ELEMENT* d_p, const float* lse, const float* delta,
                       ELEMENT* p, ELEMENT* d_x, i64 heads, i64 rows, i64 columns, i64 x_stride, i64 d_p_stride,
                       i64 p_stride, i64 d_x_stride, i64 hidden_batch, i64 hidden_head, i64 hidden_row, i64 causal,
                       float scale) {
    const i64 row = blockIdx.x;
    const Scores scores(x + row * x_stride, hidden, hidden_batch, hidden_head, hidden_row, heads, rows, columns, causal,
                        scale);
    const ELEMENT* given = d_p + row * d_p_stride;
    ELEMENT *weights = p + row * p_stride, *out = d_x + row * d_x_stride;
    const float log_sum = lse[row] == -CUDART_INF_F ? 0.f : lse[row], less = delta[row];
    const int n = (int)columns, head = before_boundary(scores.x, n, given, weights, out), packs = (n - head) / PACK;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const int first = head + i * PACK;
        float s[PACK];
        scores.pack(s, first);
        Vector a = load_pack(given + first), b;
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            const float weight = __expf(s[k] - log_sum);
            b.at[k] = from_float<ELEMENT>(weight);
            a.at[k] = from_float<ELEMENT>(scale * weight * (to_float(a.at[k]) - less));
        }
        store_pack(weights + first, b);
        store_pack(out + first, a);
    }
    for (int i = threadIdx.x; i < n - packs * PACK; i += blockDim.x) {
        const int column = i < head ? i : i + packs * PACK;
        const float weight = __expf(scores.one(column) - log_sum), moved = to_float(given[column]);
        weights[column] = from_float<ELEMENT>(weight);
        out[column] = from_float<ELEMENT>(scale * weight * (moved - less));
    }
}
