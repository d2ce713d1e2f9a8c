// AdamW on one leaf, in place, in one pass over its gradient, moments, parameter and master.
//
//     mu = b1 mu + (1 - b1) g          nu = b2 nu + (1 - b2) g^2          with g = clip * grad
//     p  = p - rate ((mu / (1 - b1^t)) / (sqrt(nu / (1 - b2^t)) + eps) + decay p)
//
// p is the float32 master where there is one, whose rounded copy goes to the parameter in the same
// pass; else it is the parameter. Everything that changes from step to step is read from memory, so
// that the host never waits for the device and a captured graph can be replayed.
//
// Element types are known when it is compiled, and every operand is read and written 16 bytes at a time: a thread has as
// many elements as fit into one access of the narrowest operand, and asks for all of them before it computes.
// build: PARAM = float, __half, __nv_bfloat16
// build: GRAD = float, __half, __nv_bfloat16
// build: MU = float, __half, __nv_bfloat16
// build: NU = float, __half, __nv_bfloat16
// build: MASTER = 0, 1
#include "rows.cuh"

constexpr int THREADS = 256;
constexpr bool NARROW = sizeof(PARAM) == 2 || sizeof(GRAD) == 2 || sizeof(MU) == 2 || sizeof(NU) == 2;
constexpr int SIZE = NARROW ? 8 : 4;  // consecutive elements of a thread

struct Numbers {
    float at[SIZE];
};

// A thread's elements of one operand.
template <class T> struct Lot {
    static constexpr int PARTS = SIZE / Pack<T>::size;
    Part<T> part[PARTS];

    __device__ Numbers numbers() const {
        Numbers out;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            const Floats<T> some = floats_of(part[i]);
#pragma unroll
            for (int k = 0; k < Pack<T>::size; ++k) out.at[i * Pack<T>::size + k] = some.at[k];
        }
        return out;
    }
};

// The first `left` elements at `from`; zeros after them.
template <bool PACKED, class T> __device__ inline Lot<T> fetch(const T* from, int left) {
    Lot<T> out;
#pragma unroll
    for (int i = 0; i < Lot<T>::PARTS; ++i) out.part[i] = load_part<PACKED>(from, i * Pack<T>::size, left);
    return out;
}
template <bool PACKED, class T> __device__ inline void put(T* to, int left, const Numbers& values) {
#pragma unroll
    for (int i = 0; i < Lot<T>::PARTS; ++i) {
        Floats<T> some;
#pragma unroll
        for (int k = 0; k < Pack<T>::size; ++k) some.at[k] = values.at[i * Pack<T>::size + k];
        store_part<PACKED>(to, i * Pack<T>::size, left, rounded<T>(some));
    }
}

// That of the two neighbours of `value` among numbers of the type, the farther from 0 with the probability that makes the
// mean `value`; `random` has 16 bits. What is not finite stays.
__device__ inline float rounded_randomly(float value, unsigned, float) { return value; }
__device__ inline float rounded_randomly(float value, unsigned random, __nv_bfloat16) {
    const unsigned whole = __float_as_uint(value);
    return (whole & 0x7fffffffu) >= 0x7f800000u ? value : __uint_as_float((whole + random) & 0xffff0000u);
}
__device__ inline float rounded_randomly(float value, unsigned random, __half) {
    const unsigned whole = __float_as_uint(value), size = whole & 0x7fffffffu;
    if (size >= 0x7f800000u) return value;
    if (size >= 0x38800000u)  // 2^-14 and more: 13 bits of the significand are dropped
        return __uint_as_float((whole + (random & 0x1fffu)) & ~0x1fffu);
    const unsigned steps = (unsigned)(__uint_as_float(size) * 0x1p40f);  // an even grid of 2^-24
    return copysignf((float)((steps + random) >> 16) * 0x1p-24f, value);
}

// Threefry-2x32 with 20 rounds of a counter, as functron/threefry.py computes it.
__device__ inline uint2 threefry(uint2 key, unsigned hi, unsigned lo) {
    const unsigned keys[3] = {key.x, key.y, key.x ^ key.y ^ 0x1BD11BDAu};
    constexpr int ROTATIONS[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    unsigned x = hi + keys[0], y = lo + keys[1];
#pragma unroll
    for (int block = 0; block < 5; ++block) {
#pragma unroll
        for (int turn = 0; turn < 4; ++turn) {
            const int by = ROTATIONS[block % 2][turn];
            x += y;
            y = (y << by | y >> (32 - by)) ^ x;
        }
        x += keys[(block + 1) % 3];
        y += keys[(block + 2) % 3] + block + 1;
    }
    return make_uint2(x, y);
}

// Where the elements of a shard lie in the whole array: element i has the digits i0, i1, i2, i3 of
// i in the mixed base (n0, n1, n2, ..), and the position offset + i0 + i1 p1 + i2 p2 + i3 p3.
struct Place {
    i64 offset, n0, p1, n1, p2, n2, p3;

    __device__ i64 at(i64 i) const {
        if (i < n0) return offset + i;
        i64 rest = i / n0, position = offset + (i - rest * n0);
        if (rest < n1) return position + rest * p1;
        i64 next = rest / n1;
        position += (rest - next * n1) * p1;
        return position + next % n2 * p2 + next / n2 * p3;
    }
};

__device__ inline double power(double base, i64 exponent) {
    double out = 1;
    for (; exponent > 0; exponent >>= 1, base *= base)
        if (exponent & 1) out *= base;
    return out;
}

// What is the same for all elements.
struct Scalars {
    float rate, clip, bias1, bias2;  // bias: 1 / (1 - b^t)
    uint2 key;
};

// c1, c2: 1 - b1 and 1 - b2, whose digits float32 would lose in b. count: of updates, this included.
// The key of this leaf and update is fold_in(fold_in(key, count), salt).
__device__ inline Scalars scalars(const float* rate, const float* clip, const i64* count, const i64* key,
                                  i64 salt, float c1, float c2) {
    Scalars out;
    out.rate = *rate;
    out.clip = clip ? *clip : 1.f;
    out.bias1 = (float)(1 / (1 - power(1 - (double)c1, *count)));
    out.bias2 = (float)(1 / (1 - power(1 - (double)c2, *count)));
    out.key = make_uint2(0, 0);
    if (key) {
        const uint2 step = threefry(make_uint2((unsigned)key[0], (unsigned)key[1]), 0, (unsigned)*count);
        out.key = threefry(step, 0, (unsigned)salt);
    }
    return out;
}

// The operands, and what is the same for all of their elements.
struct Task {
    PARAM* param;
    float* master;
    MU* mu;
    NU* nu;
    const GRAD* grad;
    float c1, c2, eps, decay;
    Place place;

    // Elements [at, at + left), at most SIZE.
    template <bool PACKED, bool RANDOM> __device__ void step(const Scalars& s, i64 at, int left) const {
        const auto grads = fetch<PACKED>(grad + at, left);
        const auto means = fetch<PACKED>(mu + at, left);
        const auto squares = fetch<PACKED>(nu + at, left);
#if MASTER
        const auto own = fetch<PACKED>(master + at, left);
#else
        const auto own = fetch<PACKED>(param + at, left);
#endif
        const Numbers g4 = grads.numbers(), m4 = means.numbers(), v4 = squares.numbers(), p4 = own.numbers();
        const float b1 = (float)(1 - (double)c1), b2 = (float)(1 - (double)c2);
        const bool together = RANDOM && (at + SIZE <= place.n0 || at % place.n0 + SIZE <= place.n0);
        const i64 first = together ? place.at(at) : 0;
        Numbers new_m, new_v, new_p, result;
#pragma unroll
        for (int k = 0; k < SIZE; ++k) {
            const float g = s.clip * g4.at[k], p = p4.at[k];
            const float m = fmaf(b1, m4.at[k], c1 * g);
            const float v = fmaf(b2, v4.at[k], c2 * g * g);
            const float direction = m * s.bias1 / (sqrtf(v * s.bias2) + eps);
            const float value = fmaf(-s.rate, fmaf(decay, p, direction), p);
            new_m.at[k] = m, new_v.at[k] = v, new_p.at[k] = result.at[k] = value;
            if constexpr (RANDOM) {
                const i64 position = together ? first + k : place.at(at + k);
                const uint2 words = threefry(s.key, (unsigned)(position >> 32), (unsigned)position);
                result.at[k] = rounded_randomly(value, (words.x ^ words.y) & 0xffffu, PARAM());
            }
        }
        put<PACKED>(mu + at, left, new_m);
        put<PACKED>(nu + at, left, new_v);
#if MASTER
        put<PACKED>(master + at, left, new_p);
#endif
        put<PACKED>(param + at, left, result);
    }
};

// A block's part of all elements. size: elements. packed: every operand is aligned to 16 bytes. found_inf (or null):
// where it is not 0 nothing is touched. key: of stochastic rounding.
template <bool RANDOM> __device__ inline void run(const Task& task, i64 size, bool packed, const float* rate, const float* clip,
                                                  const float* found_inf, const i64* count, const i64* key, i64 salt) {
    if (found_inf && *found_inf != 0.f) return;
    __shared__ Scalars shared;
    if (threadIdx.x == 0) shared = scalars(rate, clip, count, key, salt, task.c1, task.c2);
    __syncthreads();
    const Scalars s = shared;
    const i64 stride = (i64)gridDim.x * THREADS * SIZE;
    for (i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * SIZE; at < size; at += stride) {
        if (packed && size - at >= SIZE) task.step<true, RANDOM>(s, at, SIZE);
        else task.step<false, RANDOM>(s, at, (int)min(size - at, (i64)SIZE));
    }
}

// Rounds the parameter to nearest. As many blocks per processor as the launcher counts on.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
adamw(PARAM* __restrict__ param, float* __restrict__ master, MU* __restrict__ mu, NU* __restrict__ nu,
      const GRAD* __restrict__ grad, i64 size, i64 packed, const float* rate, const float* clip, const float* found_inf,
      const i64* count, float c1, float c2, float eps, float decay) {
    run<false>({param, master, mu, nu, grad, c1, c2, eps, decay, {}}, size, packed != 0, rate, clip, found_inf, count, nullptr, 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
adamw_stochastic(PARAM* __restrict__ param, float* __restrict__ master, MU* __restrict__ mu, NU* __restrict__ nu,
                 const GRAD* __restrict__ grad, i64 size, i64 packed, const float* rate, const float* clip,
                 const float* found_inf, const i64* count, float c1, float c2, float eps, float decay,
                 const i64* key, i64 salt, i64 offset, i64 n0, i64 p1, i64 n1, i64 p2, i64 n2, i64 p3) {
    run<true>({param, master, mu, nu, grad, c1, c2, eps, decay, {offset, n0, p1, n1, p2, n2, p3}}, size, packed != 0, rate,
              clip, found_inf, count, key, salt);
}
