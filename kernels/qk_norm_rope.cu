// RMSNorm of queries and keys per head, and rotary position embedding, of all heads of q and k in one launch:
//     n = x r (scale + shift), r = 1 / sqrt(mean(x^2) + eps)           (without a scale: n = x)
//     y_a = n_a cos - n_b sin,  y_b = n_b cos + n_a sin                 for each rotated pair (a, b) of dims
// Pairs are (i, i + pairs), or (2i, 2i + 1) where interleaved, of the first 2 pairs dims; the others are not rotated.
// Everything is computed in float32 and rounded once. Results may be written over what they are made of: each element
// is read before it is written, by the thread that writes it. Queries, keys and values that one product has made are read
// where they are, and their gradients written there; of values a copy is all there is to do.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "rows.cuh"

using T = ELEMENT;
constexpr int SIZE = Pack<T>::size;

// Heads [batch, seq, heads, head_dim]; head_dim is contiguous.
template <class E> struct Heads {
    E* at;
    i64 batch_stride, seq_stride, head_stride;

    __device__ E* of(i64 batch, i64 place, int head) const {
        return at + batch * batch_stride + place * seq_stride + head * head_stride;
    }
};

enum Kind { QUERY, KEY, VALUE };

struct Head {
    int number, kind, index;  // of all heads; of which tensor; which of that
};

// The heads of a token: queries, then keys; or, where `group` is not 0, by key head: its group of queries, itself, its value.
struct Order {
    int q_heads, k_heads, group;

    __device__ int count() const { return group ? k_heads * (group + 2) : q_heads + k_heads; }
    __device__ Head at(int number) const {
        if (group == 0) return number < q_heads ? Head{number, QUERY, number} : Head{number, KEY, number - q_heads};
        const int own = number / (group + 2), place = number % (group + 2);
        if (place < group) return {number, QUERY, own * group + place};
        return {number, place == group ? KEY : VALUE, own};
    }
};

// Tensors that have a head each; where they are one (`joined`), q is it.
template <class E> struct Parts {
    Heads<E> q, k, v;
    bool joined;

    __device__ E* of(i64 batch, i64 place, const Head& head) const {
        if (joined) return q.of(batch, place, head.number);
        return head.kind == QUERY ? q.of(batch, place, head.index)
               : head.kind == KEY ? k.of(batch, place, head.index)
                                  : v.of(batch, place, head.index);
    }
    __device__ bool has(const Head& head) const { return head.kind != VALUE || joined || v.at != nullptr; }
};

struct Scales {
    Shared<T> q, k;

    __device__ Shared<T> of(const Head& head) const {
        return {head.kind == QUERY ? q.from : head.kind == KEY ? k.from : nullptr, head.kind == QUERY ? q.wide : k.wide};
    }
};

// Where a head's dims are. A unit is SIZE pairs of dims, two packs, which one thread has: so a warp holds a head of up to
// 64 SIZE dims. Units of dims that are not rotated pair them in the order of memory.
struct Geometry {
    int head_dim, pairs;
    bool interleaved;

    __device__ int rotated_units() const { return (pairs + SIZE - 1) / SIZE; }
    __device__ int units() const { return rotated_units() + (head_dim - 2 * pairs + 2 * SIZE - 1) / (2 * SIZE); }
};

struct Unit {
    int first, first_end, second, second_end;  // where its packs start, and the dims end that they may cover
    int pair;                                  // the number of its first pair; negative where it is not rotated
    bool crossed;                              // pairs lie side by side

    __device__ Unit(const Geometry& g, int number) {
        const int rotated = g.rotated_units();
        pair = number < rotated ? number * SIZE : -1;
        crossed = pair >= 0 && g.interleaved;
        if (pair >= 0 && !g.interleaved) {
            first = pair, first_end = g.pairs, second = g.pairs + pair, second_end = 2 * g.pairs;
        } else {
            first = pair >= 0 ? 2 * pair : 2 * g.pairs + 2 * SIZE * (number - rotated);
            second = first + SIZE;
            first_end = second_end = pair >= 0 ? 2 * g.pairs : g.head_dim;
        }
    }
};

// The two dims of each of a unit's pairs.
struct Pairs {
    Floats<T> a, b;

    // From the packs' order, and back to it.
    __device__ void uncross() {
        const Pairs from = *this;
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
            a.at[k] = 2 * k < SIZE ? from.a.at[2 * k % SIZE] : from.b.at[2 * k % SIZE];
            b.at[k] = 2 * k < SIZE ? from.a.at[2 * k % SIZE + 1] : from.b.at[2 * k % SIZE + 1];
        }
    }
    __device__ void cross() {
        const Pairs from = *this;
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
            a.at[k] = k % 2 ? from.b.at[k / 2] : from.a.at[k / 2];
            b.at[k] = k % 2 ? from.b.at[(SIZE + k) / 2] : from.a.at[(SIZE + k) / 2];
        }
    }
};

template <bool PACKED> __device__ inline Pairs load_pairs(const T* head, const Unit& unit) {
    Pairs out{floats_of(load_part<PACKED>(head, unit.first, unit.first_end)),
              floats_of(load_part<PACKED>(head, unit.second, unit.second_end))};
    if (unit.crossed) out.uncross();
    return out;
}
template <bool PACKED> __device__ inline Pairs load_pairs(const Shared<T>& weights, const Unit& unit) {
    Pairs out{weights.part<PACKED>(unit.first, unit.first_end), weights.part<PACKED>(unit.second, unit.second_end)};
    if (unit.crossed) out.uncross();
    return out;
}
template <bool PACKED> __device__ inline void store_pairs(T* head, const Unit& unit, Pairs out) {
    if (unit.crossed) out.cross();
    store_part<PACKED>(head, unit.first, unit.first_end, rounded<T>(out.a));
    store_part<PACKED>(head, unit.second, unit.second_end, rounded<T>(out.b));
}

struct Angles {
    Floats<T> cosine, sine;
};
// Every pair turned by its angle, or back by it: `way` is 1 or -1.
__device__ inline Pairs turned(const Pairs& x, const Angles& angles, float way) {
    Pairs out;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) {
        const float cosine = angles.cosine.at[i], sine = way * angles.sine.at[i];
        out.a.at[i] = x.a.at[i] * cosine - x.b.at[i] * sine;
        out.b.at[i] = x.b.at[i] * cosine + x.a.at[i] * sine;
    }
    return out;
}

// Tables [seq, pairs], or with a batch dim in front.
struct Table {
    Shared<T> cosine, sine;
    i64 batch_stride, seq_stride;
    int pairs;

    template <bool PACKED> __device__ Angles of(i64 batch, i64 place, const Unit& unit) const {
        const i64 start = batch * batch_stride + place * seq_stride;
        Angles out;
        if (unit.pair >= 0) return {row<PACKED>(cosine, start, unit), row<PACKED>(sine, start, unit)};
#pragma unroll
        for (int k = 0; k < SIZE; ++k) out.cosine.at[k] = 1.f, out.sine.at[k] = 0.f;
        return out;
    }

  private:
    template <bool PACKED> __device__ Floats<T> row(const Shared<T>& table, i64 start, const Unit& unit) const {
        const void* from = table.wide ? static_cast<const void*>(static_cast<const float*>(table.from) + start)
                                      : static_cast<const void*>(static_cast<const T*>(table.from) + start);
        return Shared<T>{from, table.wide}.part<PACKED>(unit.pair, pairs);
    }
};

// Sums over the `lanes` threads of a head, a power of two of them; every thread of the warp calls it.
__device__ inline float head_sum(float x, int lanes) {
    for (int other = lanes / 2; other > 0; other >>= 1) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

// What this thread does of a block that takes one token at a time: heads `group`, `group + groups`, ... of q, then of k.
struct Place {
    int lanes, lane, group, groups;

    __device__ explicit Place(i64 lanes)
        : lanes((int)lanes), lane(threadIdx.x % (int)lanes), group(threadIdx.x / (int)lanes), groups(blockDim.x / (int)lanes) {}
};

// compute(batch, place) for the block's tokens.
template <class Compute> __device__ inline void each_token(i64 batch, i64 seq, Compute compute) {
    const unsigned tokens = (unsigned)(batch * seq), width = (unsigned)seq;
    for (unsigned token = blockIdx.x; token < tokens; token += gridDim.x) compute(token / width, token % width);
}

struct Forward {
    Parts<const T> in;
    Parts<T> out;
    Scales scales;
    Table table;
    Geometry geometry;
    i64 batch, seq;
    Order order;
    float shift, eps;

    template <bool PACKED> __device__ void run(const Place own) const {
        const bool inside = own.lane < geometry.units();
        const Unit unit(geometry, own.lane);
        each_token(batch, seq, [&](i64 b, i64 s) {
            Angles angles;
            if (inside) angles = table.of<PACKED>(b, s, unit);
            // all threads of a warp take as many turns, since they sum together
            for (int start = 0; start < order.count(); start += own.groups) {
                const Head head = order.at(start + own.group);
                const bool mine = inside && head.number < order.count() && out.has(head);
                const Shared<T> scale = scales.of(head);
                Pairs x;
                float squares = 0.f;
                if (mine) {
                    x = load_pairs<PACKED>(in.of(b, s, head), unit);
#pragma unroll
                    for (int i = 0; i < SIZE; ++i) squares += x.a.at[i] * x.a.at[i] + x.b.at[i] * x.b.at[i];
                }
                const float r = rsqrtf(head_sum(squares, own.lanes) / geometry.head_dim + eps);
                if (!mine) continue;
                if (scale.from != nullptr) {
                    const Pairs w = load_pairs<PACKED>(scale, unit);
#pragma unroll
                    for (int i = 0; i < SIZE; ++i) x.a.at[i] *= r * (w.a.at[i] + shift), x.b.at[i] *= r * (w.b.at[i] + shift);
                }
                store_pairs<PACKED>(out.of(b, s, head), unit, head.kind == VALUE ? x : turned(x, angles, 1.f));
            }
        });
    }
};

// No scale: not normalised. `lanes` threads share a head.
extern "C" __global__ void __launch_bounds__(256)
qk_norm_rope_forward(const T* q, const T* k, T* q_out, T* k_out, T* v_out, const void* q_scale, const void* k_scale,
                     const void* cosine, const void* sine, i64 batch, i64 seq, i64 q_heads, i64 k_heads, i64 group, i64 head_dim,
                     i64 pairs, i64 q_batch, i64 q_seq, i64 q_head, i64 k_batch, i64 k_seq, i64 k_head, i64 q_out_batch,
                     i64 q_out_seq, i64 q_out_head, i64 k_out_batch, i64 k_out_seq, i64 k_out_head, i64 v_out_batch,
                     i64 v_out_seq, i64 v_out_head, i64 table_batch, i64 table_seq, i64 wide_q_scale, i64 wide_k_scale,
                     i64 wide_table, i64 interleaved, i64 lanes, i64 packed, float shift, float eps) {
    const Forward task{{{q, q_batch, q_seq, q_head}, {k, k_batch, k_seq, k_head}, {}, group != 0},
                       {{q_out, q_out_batch, q_out_seq, q_out_head},
                        {k_out, k_out_batch, k_out_seq, k_out_head},
                        {v_out, v_out_batch, v_out_seq, v_out_head},
                        false},
                       {{q_scale, wide_q_scale != 0}, {k_scale, wide_k_scale != 0}},
                       {{cosine, wide_table != 0}, {sine, wide_table != 0}, table_batch, table_seq, (int)pairs},
                       {(int)head_dim, (int)pairs, interleaved != 0},
                       batch,
                       seq,
                       {(int)q_heads, (int)k_heads, (int)group},
                       shift,
                       eps};
    if (packed) task.run<true>(Place(lanes));
    else task.run<false>(Place(lanes));
}

// g = the cotangent turned back;  d_scale = sum of g x r;  dx = r (w g - x r mean(w g x r)),  without a scale g.
struct Backward {
    Parts<const T> given, in;
    Parts<T> out;
    Scales scales;
    Table table;
    Geometry geometry;
    i64 batch, seq;
    Order order;
    float shift, eps;
    float* sums;  // of q's scale, then of k's, this thread's own: [2][2 SIZE][blockDim.x]

    template <bool PACKED> __device__ void run(const Place own) const {
        const bool inside = own.lane < geometry.units();
        const Unit unit(geometry, own.lane);
        each_token(batch, seq, [&](i64 b, i64 s) {
            Angles angles;
            if (inside) angles = table.of<PACKED>(b, s, unit);
            for (int start = 0; start < order.count(); start += own.groups) {
                const Head head = order.at(start + own.group);
                const bool mine = inside && head.number < order.count();
                const Shared<T> scale = scales.of(head);
                const bool normed = mine && scale.from != nullptr;
                Pairs g, x, w;
                float squares = 0.f, dot = 0.f;
                if (mine) g = load_pairs<PACKED>(given.of(b, s, head), unit);
                if (mine && head.kind != VALUE) g = turned(g, angles, -1.f);
                if (normed) {
                    x = load_pairs<PACKED>(in.of(b, s, head), unit);
                    w = load_pairs<PACKED>(scale, unit);
#pragma unroll
                    for (int i = 0; i < SIZE; ++i) {
                        w.a.at[i] += shift, w.b.at[i] += shift;
                        squares += x.a.at[i] * x.a.at[i] + x.b.at[i] * x.b.at[i];
                        dot += g.a.at[i] * w.a.at[i] * x.a.at[i] + g.b.at[i] * w.b.at[i] * x.b.at[i];
                    }
                }
                const float r = rsqrtf(head_sum(squares, own.lanes) / geometry.head_dim + eps);
                const float along = head_sum(dot, own.lanes) * r * r * r / geometry.head_dim;
                if (normed) {
                    float* sum = sums + (head.kind == QUERY ? 0 : 2 * SIZE * (int)blockDim.x) + threadIdx.x;
#pragma unroll
                    for (int i = 0; i < SIZE; ++i) {
                        sum[i * (int)blockDim.x] += g.a.at[i] * x.a.at[i] * r;
                        sum[(SIZE + i) * (int)blockDim.x] += g.b.at[i] * x.b.at[i] * r;
                        g.a.at[i] = r * g.a.at[i] * w.a.at[i] - x.a.at[i] * along;
                        g.b.at[i] = r * g.b.at[i] * w.b.at[i] - x.b.at[i] * along;
                    }
                }
                if (mine) store_pairs<PACKED>(out.of(b, s, head), unit, g);
            }
        });
    }
};

// Without scales x is not read. `partials` has a row for each block: [2, 2 SIZE, lanes], sums of the block's heads.
extern "C" __global__ void __launch_bounds__(256, 2)
qk_norm_rope_backward(const T* d_q, const T* d_k, const T* d_v, const T* q, const T* k, T* q_out, T* k_out, const void* q_scale,
                      const void* k_scale, const void* cosine, const void* sine, float* partials, i64 batch, i64 seq,
                      i64 q_heads, i64 k_heads, i64 group, i64 head_dim, i64 pairs, i64 d_q_batch, i64 d_q_seq, i64 d_q_head,
                      i64 d_k_batch, i64 d_k_seq, i64 d_k_head, i64 d_v_batch, i64 d_v_seq, i64 d_v_head, i64 q_batch, i64 q_seq, i64 q_head, i64 k_batch, i64 k_seq, i64 k_head,
                      i64 q_out_batch, i64 q_out_seq, i64 q_out_head, i64 k_out_batch, i64 k_out_seq, i64 k_out_head,
                      i64 table_batch, i64 table_seq, i64 wide_q_scale, i64 wide_k_scale, i64 wide_table, i64 interleaved,
                      i64 lanes, i64 packed, float shift, float eps) {
    extern __shared__ float shared[];
    if (partials != nullptr)
        for (int i = 0; i < 4 * SIZE; ++i) shared[i * blockDim.x + threadIdx.x] = 0.f;
    const bool joined = group != 0;
    const Backward task{{{d_q, d_q_batch, d_q_seq, d_q_head},
                         {d_k, d_k_batch, d_k_seq, d_k_head},
                         {d_v, d_v_batch, d_v_seq, d_v_head},
                         false},
                        {{q, q_batch, q_seq, q_head}, {k, k_batch, k_seq, k_head}, {}, joined},
                        {{q_out, q_out_batch, q_out_seq, q_out_head}, {k_out, k_out_batch, k_out_seq, k_out_head}, {}, joined},
                        {{q_scale, wide_q_scale != 0}, {k_scale, wide_k_scale != 0}},
                        {{cosine, wide_table != 0}, {sine, wide_table != 0}, table_batch, table_seq, (int)pairs},
                        {(int)head_dim, (int)pairs, interleaved != 0},
                        batch,
                        seq,
                        {(int)q_heads, (int)k_heads, (int)group},
                        shift,
                        eps,
                        shared};
    const Place own(lanes);
    if (packed) task.run<true>(own);
    else task.run<false>(own);
    if (partials == nullptr) return;
    __syncthreads();
    const int size = 4 * SIZE * own.lanes;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const float* from = shared + i / own.lanes * blockDim.x + i % own.lanes;
        float total = 0.f;
        for (int group = 0; group < own.groups; ++group) total += from[group * own.lanes];
        partials[(i64)blockIdx.x * size + i] = total;
    }
}

// The gradients of the scales from the rows of `partials`; a null one is not wanted.
extern "C" __global__ void __launch_bounds__(1024)
qk_norm_rope_scale_gradient(const float* partials, void* d_q_scale, void* d_k_scale, i64 blocks, i64 head_dim, i64 pairs,
                            i64 wide_q_scale, i64 wide_k_scale, i64 interleaved, i64 lanes) {
    const int width = (int)lanes, half = 2 * SIZE * width, place = blockIdx.x * 32 + (threadIdx.x & 31);
    const float total = column_total(partials, blocks, 2 * half, place);
    if (threadIdx.x >= 32 || place >= 2 * half) return;
    const bool of_q = place < half;
    const int inside = place % half, number = inside % width, k = inside / width;
    const Geometry geometry{(int)head_dim, (int)pairs, interleaved != 0};
    if (number >= geometry.units()) return;
    const Unit unit(geometry, number);
    const bool of_a = k < SIZE;
    int column = of_a ? unit.first + k : unit.second + k - SIZE;
    if (unit.crossed) column = unit.first + (of_a ? 2 * k : 2 * (k - SIZE) + 1);
    void* to = of_q ? d_q_scale : d_k_scale;
    if (column < (of_a || unit.crossed ? unit.first_end : unit.second_end) && to != nullptr)
        store_number<T>(to, column, total, of_q ? wide_q_scale : wide_k_scale);
}
