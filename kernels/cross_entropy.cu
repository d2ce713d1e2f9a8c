// Cross-entropy over one rank's columns of the vocabulary: a row's log sum exp and its target's logit in one pass over
// the logits, and the logits' cotangent
//     d x_j = d_lse exp(x_j - lse) + d_target [j = id].
// One block per row. Rows may have any stride: what lies before the first 16-byte boundary and after the last is
// read by elements. Only the first `valid` columns count, the others are padding.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "log_sum_exp.cuh"

constexpr int THREADS = 512;
using Vector = Pack<ELEMENT>;
constexpr int PACK = Vector::size;

// exp(x - lse) must be 0 for the finite lse of any rank whose columns count.
constexpr float NOTHING = -3.4028234663852886e38f / 4;

// How many columns of a row count.
__device__ inline int counted(const i64* valid, i64 valid_stride, i64 row, i64 columns) {
    return (int)(valid == nullptr ? columns : max(0ll, min(columns, valid[row * valid_stride])));
}

__device__ inline void add_pack(ExpSum& sum, const Vector& pack) {
    float terms[PACK];
#pragma unroll
    for (int k = 0; k < PACK; ++k) terms[k] = to_float(pack.at[k]);
    add_terms(sum, terms);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_forward(const ELEMENT* logits, const i64* ids, const i64* valid, float* lse, float* target, i64 columns,
                      i64 logits_stride, i64 valid_stride) {
    const i64 row = blockIdx.x;
    const ELEMENT* x = logits + row * logits_stride;
    const int width = counted(valid, valid_stride, row, columns);
    const int head = before_boundary(x, width), packs = (width - head) / PACK, tail = head + packs * PACK;
    ExpSum sum = no_terms();
    // two at a time, both on their way before the first is added: its exponentials wait for a maximum
    for (int i = threadIdx.x; i < packs; i += 2 * blockDim.x) {
        const int next = i + blockDim.x;
        const Vector pack = load_pack(x + head + i * PACK);
        const Vector after = next < packs ? load_pack(x + head + next * PACK) : pack;
        add_pack(sum, pack);
        if (next < packs) add_pack(sum, after);
    }
    // fewer than a pack before and after; blocks have at least a warp
    if (threadIdx.x < head) {
        const float term[1] = {to_float(x[threadIdx.x])};
        add_terms(sum, term);
    }
    if (threadIdx.x < width - tail) {
        const float term[1] = {to_float(x[tail + threadIdx.x])};
        add_terms(sum, term);
    }
    sum = block_exp_sum(sum);
    if (threadIdx.x == 0) {
        lse[row] = sum.total == 0.f && width < columns ? NOTHING : log_of(sum);
        const i64 id = ids[row];
        target[row] = 0 <= id && id < columns ? to_float(x[id]) : 0.f;
    }
}

// What a row's elements are computed from.
struct Row {
    float lse, d_lse, d_target;
    i64 id;
    int width;

    __device__ float moved(float x, int column) const {
        const float share = column < width ? __expf(x - lse) * d_lse : 0.f;
        return column == id ? share + d_target : share;
    }
    __device__ void move(Vector& pack, int first) const {
#pragma unroll
        for (int k = 0; k < PACK; ++k) pack.at[k] = from_float<ELEMENT>(moved(to_float(pack.at[k]), first + k));
    }
};

// `out` may be `logits`: every element is read and written by one thread, in this order.
extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_backward(const float* d_lse, const float* d_target, const ELEMENT* logits, const i64* ids, const float* lse,
                       const i64* valid, ELEMENT* out, i64 columns, i64 logits_stride, i64 out_stride, i64 valid_stride) {
    const i64 at = blockIdx.x;
    const ELEMENT* x = logits + at * logits_stride;
    ELEMENT* y = out + at * out_stride;
    Row row{lse[at] == -CUDART_INF_F ? 0.f : lse[at], d_lse[at], d_target[at], ids[at], 0};
    // an ignored token's logits are not read
    row.width = row.d_lse == 0.f ? 0 : counted(valid, valid_stride, at, columns);
    const int n = (int)columns, head = before_boundary(x, n, y), packs = (n - head) / PACK, tail = head + packs * PACK;
    // two at a time, as above; a pack of padding alone is not read
    const unsigned gap = blockDim.x * PACK, end = tail, read = min(tail, row.width);
    for (unsigned first = head + threadIdx.x * PACK; first < end; first += 2 * gap) {
        const unsigned second = first + gap;
        Vector pack = {}, after = {};
        if (second < read) {
            pack = load_pack(x + first), after = load_pack(x + second);
        } else if (first < read) {
            pack = load_pack(x + first);
        }
        row.move(pack, first);
        store_pack(y + first, pack);
        if (second >= end) break;
        row.move(after, second);
        store_pack(y + second, after);
    }
    for (int i = threadIdx.x; i < head; i += blockDim.x) y[i] = from_float<ELEMENT>(row.moved(to_float(x[i]), i));
    for (int i = tail + threadIdx.x; i < n; i += blockDim.x) y[i] = from_float<ELEMENT>(row.moved(to_float(x[i]), i));
}

extern "C" __device__ void __assertfail(const char* message, const char* file, unsigned line, const char* function, size_t width);

// A device-side assertion that ids are 0 to size - 1, or `ignored` where there is one.
extern "C" __global__ void __launch_bounds__(THREADS)
check_ids(const i64* ids, i64 count, i64 size, i64 ignored, i64 ignores) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        const bool inside = 0 <= ids[i] && ids[i] < size;
        if (inside || (ignores && ids[i] == ignored)) continue;
        if (ignores) __assertfail("targets are in the vocabulary, or ignored", __FILE__, __LINE__, __func__, 1);
        else __assertfail("tokens are in the vocabulary", __FILE__, __LINE__, __func__, 1);
    }
}
