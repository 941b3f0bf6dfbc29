/* Gather and dequantise on a GPU: a thread block takes ROWS destination rows; ROWS of its threads find their tokens,
 * all of them then make 16 bytes of a destination row at a time, of 8 or 4 bytes of e4m3 or of 16 copied ones. */
#include "kernels/gather_dequant.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { ROWS = 32, UNDER_WAY = 4 };

struct params {
    kvs_gather_dequant_args a;
    uint32_t *bad;
    uint32_t whole; /* destination rows are aligned to 16 bytes */
};

/* Raw bytes of a unit as they are in the cache. */
template <uint32_t DST, bool COPY> __device__ inline uint4 read_unit(const uint8_t *row, uint32_t unit)
{
    if (COPY)
        return reinterpret_cast<const uint4 *>(row)[unit];
    if (DST == KVS_VALUE_FP32)
        return make_uint4(reinterpret_cast<const uint32_t *>(row)[unit], 0, 0, 0);
    const uint2 v = reinterpret_cast<const uint2 *>(row)[unit];
    return make_uint4(v.x, v.y, 0, 0);
}

template <uint32_t DST> __device__ inline uint4 widen(uint4 v, float scale)
{
    if constexpr (DST == KVS_VALUE_BF16)
        return widen8_bf16(make_uint2(v.x, v.y), scale);
    else if constexpr (DST == KVS_VALUE_FP16)
        return widen8_f16(make_uint2(v.x, v.y), scale);
    else {
        const float2 a = e4m3x2_to_f32((uint16_t)v.x), b = e4m3x2_to_f32((uint16_t)(v.x >> 16));

        return make_uint4(kvs_f32_bits(a.x * scale), kvs_f32_bits(a.y * scale), kvs_f32_bits(b.x * scale),
                          kvs_f32_bits(b.y * scale));
    }
}

template <uint32_t DST, bool COPY>
__global__ void __launch_bounds__(ROWS_THREADS) dequant_kernel(const __grid_constant__ params p)
{
    __shared__ const uint8_t *from[ROWS];
    const uint32_t first = blockIdx.x * ROWS, units = p.a.width * (DST == KVS_VALUE_FP32 ? 4 : 2) / CHUNK;
    const float scale = COPY ? 1.0f : *p.a.scale;

    if (threadIdx.x < ROWS) {
        kvs_view_place at;
        const bool found = gather_row(p.a.list, p.a.view, first + threadIdx.x, KVS_SITE_GATHER_DEQUANT, p.bad, &at);

        from[threadIdx.x] = found ? kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_GATHER_DEQUANT) : nullptr;
    }
    __syncthreads();
    for_units<UNDER_WAY, uint4>(
        ROWS * units,
        [&](uint32_t i) {
            const uint8_t *row = from[i / units];

            return row != nullptr ? read_unit<DST, COPY>(row, i % units) : uint4{};
        },
        [&](uint32_t i, uint4 v) {
            if (from[i / units] != nullptr)
                put16(p.a.dst + (uint64_t)(first + i / units) * p.a.dst_stride + i % units * CHUNK, p.whole,
                      COPY ? v : widen<DST>(v, scale));
        });
}

using kernel = void (*)(params);

kernel kernel_for(uint32_t dst_type, bool copy)
{
    switch (dst_type) {
    case KVS_VALUE_BF16:
        return copy ? dequant_kernel<KVS_VALUE_BF16, true> : dequant_kernel<KVS_VALUE_BF16, false>;
    case KVS_VALUE_FP16:
        return copy ? dequant_kernel<KVS_VALUE_FP16, true> : dequant_kernel<KVS_VALUE_FP16, false>;
    default:
        return copy ? dequant_kernel<KVS_VALUE_FP32, true> : dequant_kernel<KVS_VALUE_FP32, false>;
    }
}

} // namespace

extern "C" kvs_status kvs_gather_dequant_cuda_init(kvs_err *err)
{
    for (uint32_t type = KVS_VALUE_BF16; type <= KVS_VALUE_FP32; type++)
        for (int copy = 0; copy < 2; copy++) {
            kvs_status s = rows_load(kernel_for(type, copy != 0), "cudaFuncGetAttributes(gather_dequant)", err);

            if (s != KVS_OK)
                return s;
        }
    return KVS_OK;
}

extern "C" kvs_status kvs_gather_dequant_cuda(const kvs_gather_dequant_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                              kvs_err *err)
{
    const params p = {*a, ret_bad, aligned(a->dst, a->dst_stride, CHUNK)};
    uint32_t type = 0;
    unsigned blocks = 0;
    kvs_status s = kvs_gather_dequant_check(a, &type, err);

    if (s == KVS_OK)
        s = rows_begin(a->list.n_rows, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    kernel_for(a->dst_type, type != 0)<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("gather_dequant launch", err);
}
