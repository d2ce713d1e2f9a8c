// Gated activations and their backward:
//     hidden = act(gate) lift(up)      d_gate = d_hidden lift(up) act'(gate)      d_up = d_hidden act(gate) lift'(up)
// and with these hidden again, for who has not kept it. lift is the identity but for clamped_swiglu. Rows have strides of their own: gate and up may be halves of one
// tensor, and so may their gradients. Rows from *count on, where it is given, stay as they are. Everything is computed in float32 and rounded once.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "rows.cuh"

using T = ELEMENT;
constexpr int SIZE = Pack<T>::size;

// The numbers by which host code names them.
enum Activation { SILU, GELU, GELU_TANH, RELU, RELU2, CLAMPED_SWIGLU, ANY };

constexpr float LIMIT = 7.f, SLOPE = 1.702f;  // of clamped_swiglu

// A function's value and its derivative.
struct Jet {
    float value, slope;
};

__device__ inline float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

// x sigmoid(scale x)
__device__ inline Jet swish(float x, float scale) {
    const float s = sigmoid(scale * x);
    return {x * s, s + scale * x * s * (1.f - s)};
}
__device__ inline Jet gelu(float x) {
    const float below = 0.5f + 0.5f * erff(x * 0.70710678118654752f);
    return {x * below, below + x * 0.39894228040143268f * expf(-0.5f * x * x)};
}
// x (1 + tanh(u)) / 2 = x sigmoid(2 u)
__device__ inline Jet gelu_tanh(float x) {
    constexpr float twice = 1.5957691216057308f, cubic = 0.044715f;  // 2 sqrt(2 / pi)
    const float s = sigmoid(twice * x * (1.f + cubic * x * x));
    return {x * s, s + x * s * (1.f - s) * twice * (1.f + 3.f * cubic * x * x)};
}

// Comparisons are such that NaN goes through. KIND is ANY where only `kind` says.
template <int KIND> __device__ inline Jet act(float gate, int kind) {
    switch (KIND == ANY ? kind : KIND) {
        case SILU: return swish(gate, 1.f);
        case GELU: return gelu(gate);
        case GELU_TANH: return gelu_tanh(gate);
        case RELU: return gate <= 0.f ? Jet{0.f, 0.f} : Jet{gate, 1.f};
        case RELU2: return gate <= 0.f ? Jet{0.f, 0.f} : Jet{gate * gate, 2.f * gate};
        default:
            if (gate > LIMIT) return {swish(LIMIT, SLOPE).value, 0.f};
            return swish(gate, SLOPE);
    }
}
template <int KIND> __device__ inline Jet lift(float up, int kind) {
    if ((KIND == ANY ? kind : KIND) != CLAMPED_SWIGLU) return {up, 1.f};
    if (up > LIMIT) return {LIMIT + 1.f, 0.f};
    if (up < -LIMIT) return {1.f - LIMIT, 0.f};
    return {up + 1.f, 1.f};
}

// compute(row, column) for every place of all rows that is a multiple of STEP, by threads in the order of memory.
template <int STEP, class Compute> __device__ inline void each_place(i64 lanes, i64 rows, int dim, Compute compute) {
    const Lanes own(lanes);
    for (i64 row = (i64)blockIdx.x * own.rows + own.row; row < rows; row += (i64)gridDim.x * own.rows)
#pragma unroll 1
        for (int turn = blockIdx.y; (own.lane + turn * own.count) * STEP < dim; turn += gridDim.y)
            compute(row, (own.lane + turn * own.count) * STEP);
}

struct Forward {
    const T *gate, *up;
    T* hidden;
    i64 rows, gate_stride, up_stride, lanes;
    int dim, kind;

    template <int KIND> __device__ float of(float g, float u) const { return act<KIND>(g, kind).value * lift<KIND>(u, kind).value; }

    template <int KIND> __device__ void packs() const {
        each_place<SIZE>(lanes, rows, dim, [&](i64 row, int at) {
            const Floats<T> g = floats_of(load_part<true>(gate + row * gate_stride, at, dim));
            const Floats<T> u = floats_of(load_part<true>(up + row * up_stride, at, dim));
            Floats<T> out;
#pragma unroll
            for (int k = 0; k < SIZE; ++k) out.at[k] = of<KIND>(g.at[k], u.at[k]);
            store_part<true>(hidden + row * dim, at, dim, rounded<T>(out));
        });
    }
    __device__ void elements() const {
        each_place<1>(lanes, rows, dim, [&](i64 row, int at) {
            const float g = to_float(gate[row * gate_stride + at]), u = to_float(up[row * up_stride + at]);
            hidden[row * dim + at] = from_float<T>(of<ANY>(g, u));
        });
    }
};

struct Backward {
    const T *d_hidden, *gate, *up;
    T *d_gate, *d_up, *hidden;  // null: not wanted
    i64 rows, d_hidden_stride, gate_stride, up_stride, out_stride, lanes;
    int dim, kind;

    // (d_gate, d_up, hidden)
    template <int KIND> __device__ float3 of(float d, float g, float u) const {
        const Jet a = act<KIND>(g, kind), b = lift<KIND>(u, kind);
        return make_float3(d * b.value * a.slope, d * a.value * b.slope, a.value * b.value);
    }

    template <int KIND> __device__ void packs() const {
        each_place<SIZE>(lanes, rows, dim, [&](i64 row, int at) {
            const Floats<T> d = floats_of(load_part<true>(d_hidden + row * d_hidden_stride, at, dim));
            const Floats<T> g = floats_of(load_part<true>(gate + row * gate_stride, at, dim));
            const Floats<T> u = floats_of(load_part<true>(up + row * up_stride, at, dim));
            Floats<T> of_gate, of_up, again;
#pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                const float3 all = of<KIND>(d.at[k], g.at[k], u.at[k]);
                of_gate.at[k] = all.x, of_up.at[k] = all.y, again.at[k] = all.z;
            }
            store_part<true>(d_gate + row * out_stride, at, dim, rounded<T>(of_gate));
            store_part<true>(d_up + row * out_stride, at, dim, rounded<T>(of_up));
            if (hidden != nullptr) store_part<true>(hidden + row * dim, at, dim, rounded<T>(again));
        });
    }
    __device__ void elements() const {
        each_place<1>(lanes, rows, dim, [&](i64 row, int at) {
            const float d = to_float(d_hidden[row * d_hidden_stride + at]);
            const float g = to_float(gate[row * gate_stride + at]), u = to_float(up[row * up_stride + at]);
            const float3 all = of<ANY>(d, g, u);
            d_gate[row * out_stride + at] = from_float<T>(all.x), d_up[row * out_stride + at] = from_float<T>(all.y);
            if (hidden != nullptr) hidden[row * dim + at] = from_float<T>(all.z);
        });
    }
};

// Each activation has a loop of its own; one for all does where rows are not packed.
template <class Task> __device__ inline void dispatch(const Task& task, bool packed) {
    if (!packed) return task.elements();
    switch (task.kind) {
        case SILU: return task.template packs<SILU>();
        case GELU: return task.template packs<GELU>();
        case GELU_TANH: return task.template packs<GELU_TANH>();
        case RELU: return task.template packs<RELU>();
        case RELU2: return task.template packs<RELU2>();
        default: return task.template packs<CLAMPED_SWIGLU>();
    }
}

// The rows that there are: of experts fewer may be real than there is room for.
__device__ inline i64 real(i64 rows, const i64* count) { return count != nullptr && *count < rows ? *count : rows; }

// Blocks are numbered by rows in x and by columns in y.
extern "C" __global__ void __launch_bounds__(256)
glu_forward(const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ hidden, i64 rows, i64 dim, i64 gate_stride,
            i64 up_stride, i64 lanes, i64 kind, i64 packed, const i64* __restrict__ count) {
    dispatch(Forward{gate, up, hidden, real(rows, count), gate_stride, up_stride, lanes, (int)dim, (int)kind}, packed != 0);
}

extern "C" __global__ void __launch_bounds__(256)
glu_backward(const T* __restrict__ d_hidden, const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ d_gate,
             T* __restrict__ d_up, T* __restrict__ hidden, i64 rows, i64 dim, i64 d_hidden_stride, i64 gate_stride,
             i64 up_stride, i64 out_stride, i64 lanes, i64 kind, i64 packed, const i64* __restrict__ count) {
    dispatch(Backward{d_hidden, gate, up, d_gate, d_up, hidden, real(rows, count), d_hidden_stride, gate_stride, up_stride,
                      out_stride, lanes, (int)dim, (int)kind},
             packed != 0);
}
