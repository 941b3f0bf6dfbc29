#ifndef KVS_KERNELS_ROWS_CUH
#define KVS_KERNELS_ROWS_CUH

/* What the kernels that move or convert rows share: a thread block takes a run of rows, some of its threads find where
 * they are, then all of them move units of a few bytes.
 *
 * Knows launches, alignment and the hardware's conversions.  Knows no operation. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/gather.h"
#include "kernels/value.h"

namespace kvs
{

enum { ROWS_THREADS = 256, CHUNK = 16 };

inline bool aligned(const void *base, uint64_t stride, uint64_t align)
{
    return (reinterpret_cast<uintptr_t>(base) | stride) % align == 0;
}

/* Clear the status word and say how many thread blocks n rows need.  E_LIMIT: more than a launch can have. */
inline kvs_status rows_begin(uint64_t n_rows, uint32_t rows_per_block, uint32_t *ret_bad, CUstream_st *stream,
                             unsigned *ret_blocks, kvs_err *err)
{
    const uint64_t blocks = (n_rows + rows_per_block - 1) / rows_per_block;

    if (blocks > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT, "rows: %" PRIu64 " need more than %d thread blocks", n_rows, INT32_MAX);
    if (ret_bad != nullptr) {
        const cudaError_t e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);

        if (e != cudaSuccess)
            return kvs_cuda_fail(err, "cudaMemsetAsync", e);
    }
    *ret_blocks = (unsigned)blocks;
    return KVS_OK;
}

inline kvs_status rows_end(const char *what, kvs_err *err)
{
    const cudaError_t e = cudaGetLastError();

    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, what, e);
}

/* Load a kernel now: at its first launch it would wait for work that may wait for it. */
template <typename K> kvs_status rows_load(K *kernel, const char *what, kvs_err *err)
{
    cudaFuncAttributes attributes;
    const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel);

    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, what, e);
}

/* Token of a slot mapping: false if it is skipped; a bad one is counted. */
__device__ inline bool slot_of(const kvs_view &v, int64_t slot, uint32_t *bad)
{
    if (slot < 0)
        return false;
    if ((uint64_t)slot < (uint64_t)v.n_blocks * v.tokens_per_block)
        return true;
    if (bad != nullptr)
        atomicAdd(bad, 1u);
    return false;
}

/* The greater of `greatest` and |x|; a NaN x is passed over, as by kvs_amax. */
__device__ inline float amax_of(float greatest, float x)
{
    return fmaxf(greatest, fabsf(x));
}

/* Division of numbers below 2^23 by one of 1..2^16 that is known at the launch: n * ceil(2^40 / by) is above the true
 * product by less than 2^40 / by, so that the quotient is right. */
struct fast_divisor {
    uint64_t times;
    uint32_t by;
};

inline fast_divisor fast_divisor_of(uint32_t by)
{
    return {((UINT64_C(1) << 40) + by - 1) / by, by};
}

/* n / d.by; the rest goes to *ret_rest. */
__device__ inline uint32_t fast_divide(uint32_t n, const fast_divisor &d, uint32_t *ret_rest)
{
    const uint32_t q = (uint32_t)(n * d.times >> 40);

    *ret_rest = n - q * d.by;
    return q;
}

/* Row of a gather list: false if it stays as it is; a bad one is counted. */
__device__ inline bool gather_row(const kvs_gather_list &list, const kvs_view &v, uint32_t row, kvs_site site,
                                  uint32_t *bad, kvs_view_place *ret)
{
    const kvs_gather_found found = row < list.n_rows ? kvs_gather_find(&list, &v, row, site, ret) : KVS_GATHER_PADDING;

    if (found == KVS_GATHER_BAD && bad != nullptr)
        atomicAdd(bad, 1u);
    return found == KVS_GATHER_TOKEN;
}

/* Units 0..n-1 by all threads of the block, several loads under way before the first store. */
template <int UNDER_WAY, typename V, typename Load, typename Store>
__device__ inline void for_units(uint32_t n, Load load, Store store)
{
    for (uint32_t first = threadIdx.x; first < n; first += UNDER_WAY * ROWS_THREADS) {
        V v[UNDER_WAY];

#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++)
            if (first + u * ROWS_THREADS < n)
                v[u] = load(first + u * ROWS_THREADS);
#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++)
            if (first + u * ROWS_THREADS < n)
                store(first + u * ROWS_THREADS, v[u]);
    }
}

/* ---- conversions: the bits of numeric.h, by the hardware where it has them ---- */

/* Two e4m3, the first in the low byte. */
__device__ inline float2 e4m3x2_to_f32(uint16_t pair)
{
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    float2 f;

    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(halves));
    return f;
#else
    return make_float2(kvs_e4m3_to_f32((uint8_t)pair), kvs_e4m3_to_f32((uint8_t)(pair >> 8)));
#endif
}

__device__ inline uint16_t f32_to_e4m3x2(float first, float second)
{
#if __CUDA_ARCH__ >= 890
    uint16_t pair;

    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return (uint16_t)(kvs_f32_to_e4m3(first) | kvs_f32_to_e4m3(second) << 8);
#endif
}

/* Two values in 32 bits, the first in the low half; a NaN becomes 0x7FFF. */
__device__ inline uint32_t f32_to_bf16x2(float first, float second)
{
    uint32_t pair;

    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ inline uint32_t f32_to_f16x2(float first, float second)
{
    uint32_t pair;

    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

/* Eight values as they came: 16 bytes of a 2-byte type, 32 of fp32. */
struct eight {
    uint4 low, high;
};

/* Eight values from `row` on: loads of 16 bytes if `whole`, else value by value. */
template <uint32_t TYPE> __device__ inline eight load8(const uint8_t *row, bool whole)
{
    uint32_t w[8] = {0};

    if (whole) {
        const uint4 *at = reinterpret_cast<const uint4 *>(row);

        return {at[0], TYPE == KVS_VALUE_FP32 ? at[1] : uint4{}};
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (TYPE == KVS_VALUE_FP32)
            w[i] = reinterpret_cast<const uint32_t *>(row)[i];
        else
            w[i / 2] |= (uint32_t) reinterpret_cast<const uint16_t *>(row)[i] << 16 * (i % 2);
    }
    return {make_uint4(w[0], w[1], w[2], w[3]), make_uint4(w[4], w[5], w[6], w[7])};
}

template <uint32_t TYPE> __device__ inline void unpack8(const eight &e, float *ret)
{
    const uint32_t w[8] = {e.low.x, e.low.y, e.low.z, e.low.w, e.high.x, e.high.y, e.high.z, e.high.w};

    if constexpr (TYPE == KVS_VALUE_FP32) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            ret[i] = kvs_f32_from_bits(w[i]);
    } else if constexpr (TYPE == KVS_VALUE_BF16) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ret[2 * i] = kvs_f32_from_bits(w[i] << 16);
            ret[2 * i + 1] = kvs_f32_from_bits(w[i] & 0xFFFF0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
                : "=f"(ret[2 * i]), "=f"(ret[2 * i + 1])
                : "r"(w[i]));
    }
}

/* Sixteen values as they came, and as fp32. */
struct sixteen {
    eight half[2];
};

template <uint32_t TYPE> __device__ inline sixteen load16(const uint8_t *row, bool whole)
{
    return {{load8<TYPE>(row, whole), load8<TYPE>(row + (TYPE == KVS_VALUE_FP32 ? 32 : 16), whole)}};
}

template <uint32_t TYPE> __device__ inline void unpack16(const sixteen &s, float (&ret)[16])
{
    unpack8<TYPE>(s.half[0], ret);
    unpack8<TYPE>(s.half[1], ret + 8);
}

template <uint32_t TYPE> __device__ inline void read8(const uint8_t *row, bool whole, float ret[8])
{
    unpack8<TYPE>(load8<TYPE>(row, whole), ret);
}

/* Division by one number many times, for e4m3 only: a guess by the reciprocal, corrected by its remainder.  The
 * corrected quotient has the right last bit for every value of 16 bits (kernels-test tries all that lie near an edge
 * of e4m3, with the scales that put them there); for fp32 a second correction makes it so (Markstein).  Remainders must
 * not be subnormal: scales from 2^-60 to 2^60 keep them from it for all quotients that are not 0 in e4m3. */
struct divisor {
    float scale, reciprocal;
    bool ordinary;
};

__device__ inline divisor divisor_of(float scale)
{
    const float size = fabsf(scale);

    return {scale, 1.0f / scale, size >= 0x1p-60f && size <= 0x1p60f};
}

template <uint32_t TYPE> __device__ inline float corrected(float x, float guess, const divisor &d)
{
    const float q = __fmaf_rn(__fmaf_rn(-guess, d.scale, x), d.reciprocal, guess);

    return TYPE == KVS_VALUE_FP32 ? __fmaf_rn(__fmaf_rn(-q, d.scale, x), d.reciprocal, q) : q;
}

/* v[i] / scale, as far as e4m3 can tell.  BOUNDED: no quotient is above 1024.  Others are 448 or NaN as the guess has
 * it: it has no remainder if it is infinite.  A quotient of 0 keeps its sign. */
template <uint32_t TYPE, bool BOUNDED, int N> __device__ inline void divide(float (&v)[N], const divisor &d)
{
    if (!d.ordinary) {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = v[i] / d.scale;
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float guess = v[i] * d.reciprocal, q = corrected<TYPE>(v[i], guess, d);

        if (BOUNDED)
            v[i] = copysignf(q, guess);
        else
            v[i] = fabsf(guess) > 0x1p-12f && fabsf(guess) < 1024.0f ? q : guess;
    }
}

/* One quotient, of any type. */
__device__ inline float divide(float x, const divisor &d)
{
    float v[1] = {x};

    divide<KVS_VALUE_FP32, false>(v, d);
    return v[0];
}

/* Eight e4m3 in 8 bytes, sixteen in 16. */
__device__ inline uint2 pack8_e4m3(const float *v)
{
    return make_uint2(f32_to_e4m3x2(v[0], v[1]) | (uint32_t)f32_to_e4m3x2(v[2], v[3]) << 16,
                      f32_to_e4m3x2(v[4], v[5]) | (uint32_t)f32_to_e4m3x2(v[6], v[7]) << 16);
}

__device__ inline uint4 pack16_e4m3(const float (&v)[16])
{
    const uint2 low = pack8_e4m3(v), high = pack8_e4m3(v + 8);

    return make_uint4(low.x, low.y, high.x, high.y);
}

/* Eight e4m3 times `scale`, as bf16 and as fp16. */
__device__ inline uint4 widen8_bf16(uint2 bytes, float scale)
{
    const float2 a = e4m3x2_to_f32((uint16_t)bytes.x), b = e4m3x2_to_f32((uint16_t)(bytes.x >> 16)),
                 c = e4m3x2_to_f32((uint16_t)bytes.y), d = e4m3x2_to_f32((uint16_t)(bytes.y >> 16));

    return make_uint4(f32_to_bf16x2(a.x * scale, a.y * scale), f32_to_bf16x2(b.x * scale, b.y * scale),
                      f32_to_bf16x2(c.x * scale, c.y * scale), f32_to_bf16x2(d.x * scale, d.y * scale));
}

__device__ inline uint4 widen8_f16(uint2 bytes, float scale)
{
    const float2 a = e4m3x2_to_f32((uint16_t)bytes.x), b = e4m3x2_to_f32((uint16_t)(bytes.x >> 16)),
                 c = e4m3x2_to_f32((uint16_t)bytes.y), d = e4m3x2_to_f32((uint16_t)(bytes.y >> 16));

    return make_uint4(f32_to_f16x2(a.x * scale, a.y * scale), f32_to_f16x2(b.x * scale, b.y * scale),
                      f32_to_f16x2(c.x * scale, c.y * scale), f32_to_f16x2(d.x * scale, d.y * scale));
}

/* 16 bytes to a row that is aligned to them (`whole`) or to its 2-byte values only. */
__device__ inline void put16(uint8_t *row, bool whole, uint4 v)
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};

    if (whole) {
        *reinterpret_cast<uint4 *>(row) = v;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        reinterpret_cast<uint16_t *>(row)[2 * i] = (uint16_t)w[i];
        reinterpret_cast<uint16_t *>(row)[2 * i + 1] = (uint16_t)(w[i] >> 16);
    }
}

} // namespace kvs

#endif
