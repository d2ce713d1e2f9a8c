// What kernels share: types and their conversions, 16-byte packs, sums over warps and blocks.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

typedef long long i64;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds to nearest, ties to even.
template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// One 16-byte access to global memory: as many elements as fit.
template <class T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T at[size];
};

template <class T> __device__ inline Pack<T> load_pack(const T* from) {
    return *reinterpret_cast<const Pack<T>*>(from);
}
template <class T> __device__ inline void store_pack(T* to, const Pack<T>& pack) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
}
// Elements [at, at + Pack<T>::size) of a row of `dim`, which is a multiple of that where `packed`; zeros beyond its end.
template <class T> __device__ inline Pack<T> read_pack(const T* row, int at, int dim, bool packed) {
    if (packed) return load_pack(row + at);
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k) pack.at[k] = at + k < dim ? row[at + k] : from_float<T>(0.f);
    return pack;
}
template <class T> __device__ inline void write_pack(T* row, int at, int dim, bool packed, const Pack<T>& pack) {
    if (packed) return store_pack(row + at, pack);
#pragma unroll
    for (int k = 0; k < Pack<T>::size; ++k)
        if (at + k < dim) row[at + k] = pack.at[k];
}

// Sums over the lanes of a warp; every lane gets the result.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int other = 16; other > 0; other >>= 1) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int other = 16; other > 0; other >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, other));
    return x;
}

// Over a block of whole warps, in a fixed order; every thread gets the result.
__device__ inline float block_sum(float x) {
    __shared__ float parts[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = warp_sum(x);
    __syncthreads();  // an earlier call may still be reading
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return warp_sum(lane < (int)(blockDim.x >> 5) ? parts[lane] : 0.f);
}
__device__ inline float block_max(float x) {
    __shared__ float parts[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return warp_max(lane < (int)(blockDim.x >> 5) ? parts[lane] : -CUDART_INF_F);
}
