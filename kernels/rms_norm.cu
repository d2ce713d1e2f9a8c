// RMSNorm of rows, of x or of x + residual, and its backward:
//     s = x + residual (rounded)       r = 1 / sqrt(mean(s^2) + eps)       y = s r w,  w = scale + shift
//     dx = r (w dy - s r mean(w dy s r)) + d_sum                           dscale = sum over rows of dy s r
// Each byte of x is read once: a thread keeps its packs in registers. Only what goes beyond them, or is not packed, is
// read again (from a cache). Everything is computed in float32; `shift` is 1 where the scale is centred on zero, a sum
// that would lose digits in ELEMENT.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "rows.cuh"

using T = ELEMENT;
using Vector = Part<T>;
constexpr int SIZE = Pack<T>::size;

struct Forward {
    const T *x, *residual;
    Shared<T> scale;
    T *sum, *y;
    float* rstd;
    i64 rows, x_stride, residual_stride;
    int dim;
    float shift, eps;

    // What is read of a row, KEPT packs by each thread; an array is never empty.
    template <int KEPT> struct Row {
        Vector x[KEPT + 1], residual[KEPT + 1];
    };
    template <bool PACKED, int KEPT> __device__ Row<KEPT> load(const Lanes& own, i64 row) const {
        Row<KEPT> out;
#pragma unroll
        for (int n = 0; n < KEPT; ++n) {
            const int column = own.column_of<T>(n);
            out.x[n] = load_part<PACKED>(x + row * x_stride, column, dim);
            if (residual != nullptr) out.residual[n] = load_part<PACKED>(residual + row * residual_stride, column, dim);
        }
        return out;
    }

    template <bool PACKED> __device__ void run(const Lanes& own) const {
        constexpr int KEPT = PACKED ? 2 : 0;
        each_row(
            own, rows, [&](i64 row) { return load<PACKED, KEPT>(own, row); },
            [&](i64 row, Row<KEPT>& now) { normalise<PACKED, KEPT>(own, row, now); });
    }

    template <bool PACKED, int KEPT> __device__ void normalise(const Lanes& own, i64 row, Row<KEPT>& now) const {
        const T *x_row = x + row * x_stride, *residual_row = residual + row * residual_stride;
        T *sum_row = sum + row * dim, *y_row = y + row * dim;
        float squares = 0.f;
        const auto add = [&](const Vector& x_part, const Vector& residual_part, int column) {
            Floats<T> s = floats_of(x_part);
            Vector part = x_part;
            if (residual != nullptr) {
                const Floats<T> more = floats_of(residual_part);
#pragma unroll
                for (int k = 0; k < SIZE; ++k) s.at[k] += more.at[k];
                part = rounded<T>(s);
                store_part<PACKED>(sum_row, column, dim, part);
                s = floats_of(part);
            }
#pragma unroll
            for (int k = 0; k < SIZE; ++k) squares += s.at[k] * s.at[k];
            return part;
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n)
            if (own.column_of<T>(n) < dim) now.x[n] = add(now.x[n], now.residual[n], own.column_of<T>(n));
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE) {
            Vector other;
            if (residual != nullptr) other = load_part<PACKED>(residual_row, at, dim);
            add(load_part<PACKED>(x_row, at, dim), other, at);
        }
        const float r = rsqrtf(row_sum(squares, own) / dim + eps);
        if (own.lane == 0) rstd[row] = r;

        const auto write = [&](const Vector& part, int column) {
            if (column >= dim) return;
            Floats<T> out = floats_of(part);
            const Floats<T> w = scale.part<PACKED>(column, dim);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) out.at[k] *= r * (w.at[k] + shift);
            store_part<PACKED>(y_row, column, dim, rounded<T>(out));
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n) write(now.x[n], own.column_of<T>(n));
        // the sum at these columns was written by this thread
        const T* source = residual != nullptr ? sum_row : x_row;
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE) write(load_part<PACKED>(source, at, dim), at);
    }
};

// `lanes` threads share a row; a null residual is none, and there is no sum then.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_forward(const T* __restrict__ x, const T* __restrict__ residual, const void* __restrict__ scale, T* __restrict__ sum,
                 T* __restrict__ y, float* __restrict__ rstd, i64 rows, i64 dim, i64 x_stride, i64 residual_stride, i64 lanes,
                 i64 packed, i64 wide_scale, float shift, float eps) {
    const Forward task{x,    residual, {scale, wide_scale != 0}, sum,      y,     rstd,
                       rows, x_stride, residual_stride,          (int)dim, shift, eps};
    if (packed) task.run<true>(Lanes(lanes));
    else task.run<false>(Lanes(lanes));
}

struct Backward {
    const T *dy, *d_sum, *s;
    Shared<T> scale;
    const float* rstd;
    T* dx;
    i64 rows, dy_stride, d_sum_stride, s_stride;
    int dim;
    float shift;

    template <int KEPT> struct Row {
        Vector s[KEPT + 1], dy[KEPT + 1];
        float r;
    };
    template <bool PACKED, int KEPT> __device__ Row<KEPT> load(const Lanes& own, i64 row) const {
        Row<KEPT> out;
#pragma unroll
        for (int n = 0; n < KEPT; ++n) {
            out.s[n] = load_part<PACKED>(s + row * s_stride, own.column_of<T>(n), dim);
            out.dy[n] = load_part<PACKED>(dy + row * dy_stride, own.column_of<T>(n), dim);
        }
        out.r = rstd[row];
        return out;
    }

    template <bool PACKED> __device__ void run(const Lanes& own, const ColumnSums<T>& sums) const {
        constexpr int KEPT = PACKED ? 2 : 0;
        each_row(
            own, rows, [&](i64 row) { return load<PACKED, KEPT>(own, row); },
            [&](i64 row, const Row<KEPT>& now) { differentiate<PACKED, KEPT>(own, row, now, sums); });
    }

    template <bool PACKED, int KEPT>
    __device__ void differentiate(const Lanes& own, i64 row, const Row<KEPT>& now, const ColumnSums<T>& sums) const {
        const T *s_row = s + row * s_stride, *dy_row = dy + row * dy_stride, *d_sum_row = d_sum + row * d_sum_stride;
        T* dx_row = dx + row * dim;
        float dot = 0.f;
        const auto add_dot = [&](const Vector& s_part, const Vector& dy_part, int column) {
            if (column >= dim) return;
            const Floats<T> w = scale.part<PACKED>(column, dim), x = floats_of(s_part), g = floats_of(dy_part);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) dot += x.at[k] * g.at[k] * (w.at[k] + shift);
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n) add_dot(now.s[n], now.dy[n], own.column_of<T>(n));
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE)
            add_dot(load_part<PACKED>(s_row, at, dim), load_part<PACKED>(dy_row, at, dim), at);
        const float mean = row_sum(dot, own) * now.r / dim;

        const auto write = [&](const Vector& s_part, const Vector& dy_part, int n) {
            const int column = own.column_of<T>(n);
            if (column >= dim) return;
            const Floats<T> w = scale.part<PACKED>(column, dim), x = floats_of(s_part), g = floats_of(dy_part);
            float* sum = sums.of(own, n);
            Floats<T> out;
#pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                const float normed = x.at[k] * now.r;
                out.at[k] = now.r * (g.at[k] * (w.at[k] + shift) - normed * mean);
                sum[k * own.count] += g.at[k] * normed;
            }
            if (d_sum != nullptr) {
                const Floats<T> more = floats_of(load_part<PACKED>(d_sum_row, column, dim));
#pragma unroll
                for (int k = 0; k < SIZE; ++k) out.at[k] += more.at[k];
            }
            store_part<PACKED>(dx_row, column, dim, rounded<T>(out));
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n) write(now.s[n], now.dy[n], n);
#pragma unroll 1
        for (int n = KEPT; own.column_of<T>(n) < dim; ++n) {
            const int at = own.column_of<T>(n);
            write(load_part<PACKED>(s_row, at, dim), load_part<PACKED>(dy_row, at, dim), n);
        }
    }
};

// `partials` has a row for each block, of sums in the order of column_at; shared memory one for each of a block's rows.
extern "C" __global__ void __launch_bounds__(512)
rms_norm_backward(const T* __restrict__ dy, const T* __restrict__ d_sum, const T* __restrict__ s, const void* __restrict__ scale,
                  const float* __restrict__ rstd, T* __restrict__ dx, float* __restrict__ partials, i64 rows, i64 dim,
                  i64 dy_stride, i64 d_sum_stride, i64 s_stride, i64 lanes, i64 packed, i64 wide_scale, float shift) {
    extern __shared__ float shared[];
    const Lanes own(lanes);
    const ColumnSums<T> sums(shared, own, (int)dim);
    for (int i = threadIdx.x; i < own.rows * sums.size; i += blockDim.x) shared[i] = 0.f;
    __syncthreads();
    const Backward task{dy,   d_sum,     s,            {scale, wide_scale != 0}, rstd,     dx,
                        rows, dy_stride, d_sum_stride, s_stride,                 (int)dim, shift};
    if (packed) task.run<true>(own, sums);
    else task.run<false>(own, sums);
    write_partials(sums.at, sums.size, own.rows, partials + (i64)blockIdx.x * sums.size);
}

// dscale from the rows of `partials` that the blocks of rms_norm_backward wrote, each of `size` sums.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_scale_gradient(const float* __restrict__ partials, void* __restrict__ dscale, i64 blocks, i64 size, i64 dim, i64 lanes,
                        i64 wide_scale) {
    const i64 place = (i64)blockIdx.x * 32 + (threadIdx.x & 31);
    const float total = column_total(partials, blocks, size, place);
    const int column = column_at<T>((int)place, (int)lanes);
    if (threadIdx.x < 32 && place < size && column < dim) store_number<T>(dscale, column, total, wide_scale);
}
