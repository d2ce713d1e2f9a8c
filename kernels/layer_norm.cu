// LayerNorm of rows, of x or of x + residual, and its backward:
//     s = x + residual (rounded)       m = mean(s)       r = 1 / sqrt(mean((s - m)^2) + eps)       n = (s - m) r
//     y = n w + bias,  w = scale + shift
//     dx = r (w dy - mean(w dy) - n mean(w dy n)) + d_sum
//     dscale = sum over rows of dy n          dbias = sum over rows of dy
// The variance is that of centred numbers: a second pass over what a thread keeps in registers. See rms_norm.cu.
// build: ELEMENT = float, __half, __nv_bfloat16
#include "rows.cuh"

using T = ELEMENT;
using Vector = Part<T>;
constexpr int SIZE = Pack<T>::size;

template <class X> constexpr bool is_half = false;
template <> constexpr bool is_half<__half> = true;

struct Forward {
    const T *x, *residual;
    Shared<T> scale, bias;
    T *sum, *y;
    float *mean, *rstd;
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
        float total = 0.f;
        const auto add = [&](const Vector& x_part, const Vector& residual_part, int column, bool kept) {
            Floats<T> s = floats_of(x_part);
            Vector part = x_part;
            if (residual != nullptr) {
                const Floats<T> more = floats_of(residual_part);
#pragma unroll
                for (int k = 0; k < SIZE; ++k) s.at[k] += more.at[k];
                part = rounded<T>(s);
                // kept packs are stored as a whole without being told; told, there would be too few registers, as for
                // other packs of float16 on sm_80
                if (PACKED && (kept || is_half<T>)) *reinterpret_cast<uint4*>(sum_row + column) = part.words;
                else store_part<PACKED>(sum_row, column, dim, part);
                s = floats_of(part);
            }
#pragma unroll
            for (int k = 0; k < SIZE; ++k) total += s.at[k];
            return part;
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n)
            if (own.column_of<T>(n) < dim) now.x[n] = add(now.x[n], now.residual[n], own.column_of<T>(n), true);
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE) {
            Vector other;
            if (residual != nullptr) other = load_part<PACKED>(residual_row, at, dim);
            add(load_part<PACKED>(x_row, at, dim), other, at, false);
        }
        const float m = row_sum(total, own) / dim;
        // the sum at these columns was written by this thread
        const T* source = residual != nullptr ? sum_row : x_row;
        float squares = 0.f;
        const auto add_squares = [&](const Vector& part, int column) {
            if (column >= dim) return;
            const Floats<T> s = floats_of(part);
#pragma unroll
            for (int k = 0; k < SIZE; ++k)
                if (PACKED || column + k < dim) squares += (s.at[k] - m) * (s.at[k] - m);
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n) add_squares(now.x[n], own.column_of<T>(n));
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE) add_squares(load_part<PACKED>(source, at, dim), at);
        const float r = rsqrtf(row_sum(squares, own) / dim + eps);
        if (own.lane == 0) mean[row] = m, rstd[row] = r;

        const auto write = [&](const Vector& part, int column) {
            if (column >= dim) return;
            Floats<T> out = floats_of(part);
            const Floats<T> w = scale.part<PACKED>(column, dim), b = bias.part<PACKED>(column, dim);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) out.at[k] = (out.at[k] - m) * r * (w.at[k] + shift) + b.at[k];
            store_part<PACKED>(y_row, column, dim, rounded<T>(out));
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n) write(now.x[n], own.column_of<T>(n));
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE) write(load_part<PACKED>(source, at, dim), at);
    }
};

// `lanes` threads share a row; a null residual is none, and there is no sum then.
extern "C" __global__ void __launch_bounds__(1024)
layer_norm_forward(const T* __restrict__ x, const T* __restrict__ residual, const void* __restrict__ scale,
                   const void* __restrict__ bias, T* __restrict__ sum, T* __restrict__ y, float* __restrict__ mean,
                   float* __restrict__ rstd, i64 rows, i64 dim, i64 x_stride, i64 residual_stride, i64 lanes, i64 packed,
                   i64 wide_scale, i64 wide_bias, float shift, float eps) {
    const Forward task{x,    residual, {scale, wide_scale != 0}, {bias, wide_bias != 0}, sum,      y,     mean,
                       rstd, rows,     x_stride,                 residual_stride,        (int)dim, shift, eps};
    if (packed) task.run<true>(Lanes(lanes));
    else task.run<false>(Lanes(lanes));
}

struct Backward {
    const T *dy, *d_sum, *s;
    Shared<T> scale;
    const float *mean, *rstd;
    T* dx;
    i64 rows, dy_stride, d_sum_stride, s_stride;
    int dim;
    float shift;

    template <int KEPT> struct Row {
        Vector s[KEPT + 1], dy[KEPT + 1];
        float m, r;
    };
    template <bool PACKED, int KEPT> __device__ Row<KEPT> load(const Lanes& own, i64 row) const {
        Row<KEPT> out;
#pragma unroll
        for (int n = 0; n < KEPT; ++n) {
            out.s[n] = load_part<PACKED>(s + row * s_stride, own.column_of<T>(n), dim);
            out.dy[n] = load_part<PACKED>(dy + row * dy_stride, own.column_of<T>(n), dim);
        }
        out.m = mean[row], out.r = rstd[row];
        return out;
    }

    template <bool PACKED> __device__ void run(const Lanes& own, const ColumnSums<T>& sums, const ColumnSums<T>& bias_sums) const {
        constexpr int KEPT = PACKED ? 2 : 0;
        each_row(
            own, rows, [&](i64 row) { return load<PACKED, KEPT>(own, row); },
            [&](i64 row, const Row<KEPT>& now) { differentiate<PACKED, KEPT>(own, row, now, sums, bias_sums); });
    }

    template <bool PACKED, int KEPT>
    __device__ void differentiate(const Lanes& own, i64 row, const Row<KEPT>& now, const ColumnSums<T>& sums,
                                  const ColumnSums<T>& bias_sums) const {
        const T *s_row = s + row * s_stride, *dy_row = dy + row * dy_stride, *d_sum_row = d_sum + row * d_sum_stride;
        T* dx_row = dx + row * dim;
        float2 dots = make_float2(0.f, 0.f);
        const auto add_dot = [&](const Vector& s_part, const Vector& dy_part, int column) {
            if (column >= dim) return;
            const Floats<T> w = scale.part<PACKED>(column, dim), x = floats_of(s_part), g = floats_of(dy_part);
#pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                const float moved = g.at[k] * (w.at[k] + shift);  // zero beyond the row
                dots.x += moved;
                dots.y += moved * (x.at[k] - now.m);
            }
        };
#pragma unroll
        for (int n = 0; n < KEPT; ++n) add_dot(now.s[n], now.dy[n], own.column_of<T>(n));
#pragma unroll 1
        for (int at = own.column_of<T>(KEPT); at < dim; at += own.count * SIZE)
            add_dot(load_part<PACKED>(s_row, at, dim), load_part<PACKED>(dy_row, at, dim), at);
        dots = row_sums(dots, own);
        const float mean_moved = dots.x / dim, mean_dot = dots.y * now.r / dim;

        const auto write = [&](const Vector& s_part, const Vector& dy_part, int n) {
            const int column = own.column_of<T>(n);
            if (column >= dim) return;
            const Floats<T> w = scale.part<PACKED>(column, dim), x = floats_of(s_part), g = floats_of(dy_part);
            float *sum = sums.of(own, n), *bias_sum = bias_sums.of(own, n);
            Floats<T> out;
#pragma unroll
            for (int k = 0; k < SIZE; ++k) {
                const float normed = (x.at[k] - now.m) * now.r;
                out.at[k] = now.r * (g.at[k] * (w.at[k] + shift) - mean_moved - normed * mean_dot);
                sum[k * own.count] += g.at[k] * normed;
                bias_sum[k * own.count] += g.at[k];
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

// `partials` has two rows for each block, of sums for the scale and for the bias in the order of column_at; shared memory
// two for each of a block's rows.
extern "C" __global__ void __launch_bounds__(512)
layer_norm_backward(const T* __restrict__ dy, const T* __restrict__ d_sum, const T* __restrict__ s,
                    const void* __restrict__ scale, const float* __restrict__ mean, const float* __restrict__ rstd,
                    T* __restrict__ dx, float* __restrict__ partials, i64 rows, i64 dim, i64 dy_stride, i64 d_sum_stride,
                    i64 s_stride, i64 lanes, i64 packed, i64 wide_scale, float shift) {
    extern __shared__ float shared[];
    const Lanes own(lanes);
    const ColumnSums<T> sums(shared, own, (int)dim);
    const ColumnSums<T> bias_sums(shared + own.rows * sums.size, own, (int)dim);
    for (int i = threadIdx.x; i < 2 * own.rows * sums.size; i += blockDim.x) shared[i] = 0.f;
    __syncthreads();
    const Backward task{dy,   d_sum, s,         {scale, wide_scale != 0}, mean,     rstd,
                        dx,   rows,  dy_stride, d_sum_stride,             s_stride, (int)dim, shift};
    if (packed) task.run<true>(own, sums, bias_sums);
    else task.run<false>(own, sums, bias_sums);
    float* mine = partials + (i64)blockIdx.x * 2 * sums.size;
    write_partials(sums.at, sums.size, own.rows, mine);
    write_partials(bias_sums.at, sums.size, own.rows, mine + sums.size);
}

// dscale and dbias from the rows of `partials` that the blocks of layer_norm_backward wrote, each of twice `size` sums.
extern "C" __global__ void __launch_bounds__(1024)
layer_norm_scale_gradient(const float* __restrict__ partials, void* __restrict__ dscale, void* __restrict__ dbias, i64 blocks,
                          i64 size, i64 dim, i64 lanes, i64 wide_scale, i64 wide_bias) {
    const i64 place = (i64)blockIdx.x * 32 + (threadIdx.x & 31);
    const float total = column_total(partials, blocks, 2 * size, place);
    const bool of_scale = place < size;
    const int column = column_at<T>((int)(of_scale ? place : place - size), (int)lanes);
    if (threadIdx.x >= 32 || place >= 2 * size || column >= dim) return;
    if (of_scale) store_number<T>(dscale, column, total, wide_scale);
    else store_number<T>(dbias, column, total, wide_bias);
}
