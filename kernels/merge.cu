/* Merge on a GPU: a warp has a row of one token and head and moves 8 values a lane where every address is aligned to
 * them.
 *
 * Built without contraction of products into sums, so that it has the bits of the C function. */
#include "kernels/merge.h"

#include <cmath>

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { WARP = 32, WARPS = ROWS_THREADS / WARP, EIGHT = 8 };

struct params {
    kvs_merge_args a;
    uint32_t wide; /* 8 values at a time */
};

__device__ inline uint8_t *at(const kvs_strided &o, uint64_t t, uint64_t h)
{
    return o.base + t * o.token_stride + h * o.head_stride;
}

template <uint32_t TYPE> __device__ inline void put8(uint8_t *row, const float v[EIGHT])
{
    if constexpr (TYPE == KVS_VALUE_FP32) {
        reinterpret_cast<float4 *>(row)[0] = make_float4(v[0], v[1], v[2], v[3]);
        reinterpret_cast<float4 *>(row)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        union {
            uint4 all;
            uint16_t two[EIGHT];
        } u;

#pragma unroll
        for (int i = 0; i < EIGHT; i++)
            u.two[i] = TYPE == KVS_VALUE_BF16 ? kvs_f32_to_bf16(v[i]) : kvs_f32_to_f16(v[i]);
        *reinterpret_cast<uint4 *>(row) = u.all;
    }
}

__device__ inline float weighed(const kvs_merge_weights &w, float p, float s)
{
    return w.uses_prefix && w.uses_suffix ? p * w.prefix + s * w.suffix : w.uses_prefix ? p : w.uses_suffix ? s : 0.0f;
}

template <uint32_t SRC, uint32_t OUT>
__device__ inline void merge_wide(const kvs_merge_weights &w, uint32_t dim, const uint8_t *prefix,
                                  const uint8_t *suffix, uint8_t *out)
{
    constexpr uint32_t src = EIGHT * (SRC == KVS_VALUE_FP32 ? 4 : 2), dst = EIGHT * (OUT == KVS_VALUE_FP32 ? 4 : 2);

    for (uint32_t c = threadIdx.x % WARP; c < dim / EIGHT; c += WARP) {
        float p[EIGHT] = {}, s[EIGHT] = {};

        if (w.uses_prefix)
            unpack8<SRC>(load8<SRC>(prefix + c * src, true), p);
        if (w.uses_suffix)
            unpack8<SRC>(load8<SRC>(suffix + c * src, true), s);
#pragma unroll
        for (int i = 0; i < EIGHT; i++)
            p[i] = weighed(w, p[i], s[i]);
        put8<OUT>(out + c * dst, p);
    }
}

template <uint32_t SRC, uint32_t OUT>
__device__ inline void merge_narrow(const kvs_merge_weights &w, uint32_t dim, const uint8_t *prefix,
                                    const uint8_t *suffix, uint8_t *out)
{
    for (uint32_t i = threadIdx.x % WARP; i < dim; i += WARP)
        kvs_value_put(out, OUT, i,
                      weighed(w, w.uses_prefix ? kvs_value_get(prefix, SRC, i) : 0.0f,
                              w.uses_suffix ? kvs_value_get(suffix, SRC, i) : 0.0f));
}

template <uint32_t SRC, uint32_t OUT>
__global__ void __launch_bounds__(ROWS_THREADS) merge_kernel(const __grid_constant__ params p)
{
    const kvs_merge_args &a = p.a;
    const uint64_t row = (uint64_t)blockIdx.x * WARPS + threadIdx.x / WARP, t = row / a.n_heads, h = row % a.n_heads;
    const bool has_prefix = t < a.n_context;

    if (t >= a.n_tokens)
        return;
    const float lp = has_prefix ? *reinterpret_cast<const float *>(at(a.prefix_lse, t, h)) : -INFINITY,
                ls = *reinterpret_cast<const float *>(at(a.suffix_lse, t, h));
    const kvs_merge_weights w = kvs_merge_weigh(lp, ls);
    const uint8_t *suffix = at(a.suffix, t, h), *prefix = has_prefix ? at(a.prefix, t, h) : suffix;

    __syncwarp(); /* out_lse may be one of the two that were just read */
    if (p.wide)
        merge_wide<SRC, OUT>(w, a.dim, prefix, suffix, at(a.out, t, h));
    else
        merge_narrow<SRC, OUT>(w, a.dim, prefix, suffix, at(a.out, t, h));
    if (threadIdx.x % WARP == 0 && a.out_lse.base != nullptr)
        *reinterpret_cast<float *>(at(a.out_lse, t, h)) = w.sum == 1 ? w.m : w.m + (float)log((double)w.sum);
}

struct entry {
    uint32_t src, out;
    void (*kernel)(params);
};

#define PAIR(s, o)                                                                                                     \
    {                                                                                                                  \
        KVS_VALUE_##s, KVS_VALUE_##o, merge_kernel<KVS_VALUE_##s, KVS_VALUE_##o>                                       \
    }
const entry KERNELS[] = {PAIR(BF16, BF16), PAIR(BF16, FP16), PAIR(BF16, FP32), PAIR(FP16, BF16), PAIR(FP16, FP16),
                         PAIR(FP16, FP32), PAIR(FP32, BF16), PAIR(FP32, FP16), PAIR(FP32, FP32)};

bool aligned16(const kvs_strided &o)
{
    return aligned(o.base, o.token_stride | o.head_stride, CHUNK);
}

} // namespace

extern "C" kvs_status kvs_merge_cuda_init(kvs_err *err)
{
    for (const entry &e : KERNELS) {
        const kvs_status s = rows_load(e.kernel, "cudaFuncGetAttributes(merge)", err);

        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

extern "C" kvs_status kvs_merge_cuda(const kvs_merge_args *a, CUstream_st *stream, kvs_err *err)
{
    const uint32_t wide =
        a->dim % EIGHT == 0 && aligned16(a->out) && aligned16(a->suffix) && (a->n_context == 0 || aligned16(a->prefix));
    unsigned blocks = 0;
    kvs_status s = kvs_merge_check(a, err);

    if (s == KVS_OK)
        s = rows_begin((uint64_t)a->n_tokens * a->n_heads, WARPS, nullptr, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    for (const entry &e : KERNELS)
        if (e.src == a->src_type && e.out == a->out_type)
            e.kernel<<<blocks, ROWS_THREADS, 0, stream>>>(params{*a, wide});
    return rows_end("merge launch", err);
}
