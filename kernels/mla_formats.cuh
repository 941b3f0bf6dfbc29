#ifndef KVS_KERNELS_MLA_FORMATS_CUH
#define KVS_KERNELS_MLA_FORMATS_CUH

/* Quantised rows of the cache on a GPU: how many bytes, and how they become bf16.
 *
 * Knows formats.  Does not know views or queries. */

#include <cuda_fp16.h>

#include "kernels/mma.cuh"
#include "proto/layout.h"

namespace
{

using namespace kvs_mma;

/* A format: values of a row, bytes of it in the cache (ROW, then TAIL from the page's second array), groups of 128 values
 * whose fp32 scales lie at byte 512 and are applied to scores and weights, and how chunk c of 8 values is widened. */
template <uint32_t FORMAT> struct record;

/* Two e4m3 in the low bytes to fp32. */
__device__ __forceinline__ float2 widen_pair(uint32_t pair)
{
#if __CUDA_ARCH__ >= 890
    uint32_t halves;

    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)pair));
    return __half22float2(*reinterpret_cast<const __half2 *>(&halves));
#else
    uint32_t low = pair & 0xFF, high = pair >> 8 & 0xFF;
    float2 v =
        make_float2(__uint_as_float((low & 0x7F) << 20) * 0x1p120f, __uint_as_float((high & 0x7F) << 20) * 0x1p120f);

    v.x = __uint_as_float((low & 0x7F) == 0x7F ? 0x7FFFFFFF : __float_as_uint(v.x) | (low & 0x80) << 24);
    v.y = __uint_as_float((high & 0x7F) == 0x7F ? 0x7FFFFFFF : __float_as_uint(v.y) | (high & 0x80) << 24);
    return v;
#endif
}

__device__ __forceinline__ uint32_t widen_scaled(uint32_t pair, float scale)
{
    float2 v = widen_pair(pair);

    return pack<false>(v.x * scale, v.y * scale);
}

/* 8 bytes to 8 bf16. */
__device__ __forceinline__ uint4 widen_chunk(const uint8_t *src, float scale)
{
    uint2 raw = *reinterpret_cast<const uint2 *>(src);

    return make_uint4(widen_scaled(raw.x & 0xFFFF, scale), widen_scaled(raw.x >> 16, scale),
                      widen_scaled(raw.y & 0xFFFF, scale), widen_scaled(raw.y >> 16, scale));
}

__device__ __forceinline__ float power_of_two(uint32_t code)
{
    return __uint_as_float(code == 255 ? 0x7FFFFFFF : code == 0 ? 0x00400000 : code << 23);
}

/* 512 latent, 64 rope, all e4m3; one scale a tensor, not applied here. */
template <> struct record<KVS_FORMAT_mla_fp8> {
    enum { DIMS = 576, ROW = 576, TAIL = 0, GROUPS = 0 };
    static __device__ __forceinline__ uint4 chunk(const uint8_t *raw, uint32_t c)
    {
        return widen_chunk(raw + c * 8, 1);
    }
};

/* 512 e4m3 in tiles of 128, 4 fp32 scales, 64 bf16. */
template <> struct record<KVS_FORMAT_fp8_ds_mla> {
    enum { DIMS = 576, ROW = 656, TAIL = 0, GROUPS = 4 };
    static __device__ __forceinline__ uint4 chunk(const uint8_t *raw, uint32_t c)
    {
        if (c >= 64)
            return *reinterpret_cast<const uint4 *>(raw + 528 + (c - 64) * CHUNK);
        return widen_chunk(raw + c * 8, 1);
    }
};

/* 448 e4m3 in tiles of 64, 64 bf16; 7 ue8m0 and a byte of padding in the tail. */
template <> struct record<KVS_FORMAT_fp8_blk584> {
    enum { DIMS = 512, ROW = 576, TAIL = 8, GROUPS = 0 };
    static __device__ __forceinline__ uint4 chunk(const uint8_t *raw, uint32_t c)
    {
        if (c >= 56)
            return *reinterpret_cast<const uint4 *>(raw + 448 + (c - 56) * CHUNK);
        return widen_chunk(raw + c * 8, power_of_two(raw[ROW + c / 8]));
    }
};

/* 512 e4m3 in tiles of 32; 16 ue8m0 in the tail. */
template <> struct record<KVS_FORMAT_fp8_blk528> {
    enum { DIMS = 512, ROW = 512, TAIL = 16, GROUPS = 0 };
    static __device__ __forceinline__ uint4 chunk(const uint8_t *raw, uint32_t c)
    {
        return widen_chunk(raw + c * 8, power_of_two(raw[ROW + c / 4]));
    }
};

} // namespace

#endif
