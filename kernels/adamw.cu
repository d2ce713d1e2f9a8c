// AdamW on one leaf, in place, in one pass over its gradient, moments, parameter and master.
//
//     mu = b1 mu + (1 - b1) g          nu = b2 nu + (1 - b2) g^2          with g = clip * grad
//     p  = p - rate ((mu / (1 - b1^t)) / (sqrt(nu / (1 - b2^t)) + eps) + decay p)
//
// p is the float32 master where there is one, whose rounded copy goes to the parameter in the same
// pass; else it is the parameter. Everything that changes from step to step is read from memory, so
// that the host never waits for the device and a captured graph can be replayed.
//
// Element types are data: there are 54 combinations of them, and a pass over memory has time to
// choose. Loads of either width are predicated, so all of a thread's are in flight at once.
#include "numeric.cuh"

constexpr int THREADS = 256;
constexpr int QUAD = 4;  // consecutive elements of a thread: 16 bytes of float32

enum Type : i64 { FLOAT = 0, HALF = 1, BFLOAT16 = 2 };  // as in functron/ops/adamw.py

// Four elements as they lie in memory; of 16-bit ones the first two words are used.
struct Bits {
    unsigned word[QUAD];
};

__device__ inline Bits fetch(const void* base, i64 type, i64 at, i64 count, bool packed) {
    Bits out = {};
    if (packed && count >= QUAD) {
        if (type == FLOAT) {
            const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const float*>(base) + at);
            out.word[0] = v.x, out.word[1] = v.y, out.word[2] = v.z, out.word[3] = v.w;
        } else {
            const uint2 v = *reinterpret_cast<const uint2*>(static_cast<const unsigned short*>(base) + at);
            out.word[0] = v.x, out.word[1] = v.y;
        }
        return out;
    }
#pragma unroll
    for (int k = 0; k < QUAD; ++k) {
        if (k >= count) continue;
        if (type == FLOAT) out.word[k] = static_cast<const unsigned*>(base)[at + k];
        else out.word[k / 2] |= (unsigned)static_cast<const unsigned short*>(base)[at + k] << (k % 2 * 16);
    }
    return out;
}

__device__ inline void put(void* base, i64 type, i64 at, i64 count, bool packed, const Bits& bits) {
    if (packed && count >= QUAD) {
        if (type == FLOAT)
            *reinterpret_cast<uint4*>(static_cast<float*>(base) + at) =
                make_uint4(bits.word[0], bits.word[1], bits.word[2], bits.word[3]);
        else
            *reinterpret_cast<uint2*>(static_cast<unsigned short*>(base) + at) =
                make_uint2(bits.word[0], bits.word[1]);
        return;
    }
#pragma unroll
    for (int k = 0; k < QUAD; ++k) {
        if (k >= count) continue;
        if (type == FLOAT) static_cast<unsigned*>(base)[at + k] = bits.word[k];
        else static_cast<unsigned short*>(base)[at + k] = (unsigned short)(bits.word[k / 2] >> (k % 2 * 16));
    }
}

__device__ inline float widen(const Bits& bits, i64 type, int k) {
    if (type == FLOAT) return __uint_as_float(bits.word[k]);
    const unsigned short half = (unsigned short)(bits.word[k / 2] >> (k % 2 * 16));
    return type == HALF ? __half2float(__ushort_as_half(half)) : __uint_as_float((unsigned)half << 16);
}

// Sets element k, rounded to nearest.
__device__ inline void narrow(Bits& bits, i64 type, int k, float value) {
    if (type == FLOAT) {
        bits.word[k] = __float_as_uint(value);
        return;
    }
    const unsigned half = type == HALF ? __half_as_ushort(__float2half_rn(value))
                                       : __bfloat16_as_ushort(__float2bfloat16_rn(value));
    bits.word[k / 2] |= half << (k % 2 * 16);
}

// One of the two neighbours of `value`, the farther from 0 with the probability that makes the mean
// `value`; `random` has 16 bits. What is not finite is rounded to nearest.
__device__ inline void narrow_randomly(Bits& bits, i64 type, int k, float value, unsigned random) {
    const unsigned whole = __float_as_uint(value), size = whole & 0x7fffffffu;
    if (type == FLOAT || size >= 0x7f800000u) return narrow(bits, type, k, value);
    unsigned half;
    if (type == BFLOAT16) {
        half = (whole + random) >> 16;
    } else if (size >= 0x38800000u) {  // 2^-14 and more: 13 bits of the significand are dropped
        half = __half_as_ushort(__float2half_rn(__uint_as_float((whole + (random & 0x1fffu)) & ~0x1fffu)));
    } else {  // an even grid of 2^-24
        const unsigned steps = (unsigned)(__uint_as_float(size) * 0x1p40f);
        half = whole >> 31 << 15 | (steps + random) >> 16;
    }
    bits.word[k / 2] |= half << (k % 2 * 16);
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

// size: elements. packed: every operand can be accessed QUAD elements at a time. found_inf (or
// null): where it is not 0 nothing is touched. key (or null): round the parameter stochastically.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw(void* __restrict__ param, float* __restrict__ master, void* __restrict__ mu, void* __restrict__ nu,
      const void* __restrict__ grad, i64 param_type, i64 mu_type, i64 nu_type, i64 grad_type,
      i64 size, i64 packed,
      const float* rate, const float* clip, const float* found_inf, const i64* count,
      float c1, float c2, float eps, float decay,
      const i64* key, i64 salt, i64 offset, i64 n0, i64 p1, i64 n1, i64 p2, i64 n2, i64 p3) {
    if (found_inf && *found_inf != 0.f) return;
    __shared__ Scalars shared;
    if (threadIdx.x == 0) shared = scalars(rate, clip, count, key, salt, c1, c2);
    __syncthreads();
    const Scalars s = shared;
    const float b1 = (float)(1 - (double)c1), b2 = (float)(1 - (double)c2);
    const Place place = {offset, n0, p1, n1, p2, n2, p3};
    const i64 stride = (i64)gridDim.x * THREADS * QUAD;
    for (i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * QUAD; at < size; at += stride) {
        const i64 left = size - at;
        const Bits g4 = fetch(grad, grad_type, at, left, packed);
        const Bits m4 = fetch(mu, mu_type, at, left, packed);
        const Bits v4 = fetch(nu, nu_type, at, left, packed);
        const Bits p4 = master ? fetch(master, FLOAT, at, left, packed) : fetch(param, param_type, at, left, packed);
        Bits new_m = {}, new_v = {}, new_p = {}, new_master = {};
        const bool together = key && (at + QUAD <= n0 || at % n0 + QUAD <= n0);
        const i64 first = together ? place.at(at) : 0;
#pragma unroll
        for (int k = 0; k < QUAD; ++k) {
            const float g = s.clip * widen(g4, grad_type, k);
            const float m = fmaf(b1, widen(m4, mu_type, k), c1 * g);
            const float v = fmaf(b2, widen(v4, nu_type, k), c2 * g * g);
            const float p = widen(p4, master ? FLOAT : param_type, k);
            const float direction = m * s.bias1 / (sqrtf(v * s.bias2) + eps);
            const float value = fmaf(-s.rate, fmaf(decay, p, direction), p);
            narrow(new_m, mu_type, k, m);
            narrow(new_v, nu_type, k, v);
            if (master) narrow(new_master, FLOAT, k, value);
            if (key) {
                const i64 position = together ? first + k : place.at(at + k);
                const uint2 words = threefry(s.key, (unsigned)(position >> 32), (unsigned)position);
                narrow_randomly(new_p, param_type, k, value, (words.x ^ words.y) & 0xffffu);
            } else {
                narrow(new_p, param_type, k, value);
            }
        }
        put(mu, mu_type, at, left, packed, new_m);
        put(nu, nu_type, at, left, packed, new_v);
        if (master) put(master, FLOAT, at, left, packed, new_master);
        put(param, param_type, at, left, packed, new_p);
    }
}
