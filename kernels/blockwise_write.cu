/* Block-wise write on a GPU: 64 threads take a token, 8 values each; a tile's maximum goes round among its 4 or 8 threads, and
 * the first thread of a warp writes the codes of the warp's tiles together. */
#include "kernels/blockwise.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { LANES = KVS_BLOCKWISE_VALUES / 8, ROWS = ROWS_THREADS / LANES, WARP = 32 };

struct params {
    kvs_blockwise_write_args a;
    uint32_t *bad;
    uint32_t whole; /* rows of x are aligned to 16 bytes */
};

/* Codes of the warp's tiles, the first in the lowest byte. */
template <int TILE_LANES> __device__ inline uint64_t warp_codes(uint32_t code)
{
    uint64_t codes = 0;

#pragma unroll
    for (int tile = 0; tile < WARP / TILE_LANES; tile++)
        codes |= (uint64_t)__shfl_sync(0xFFFFFFFFu, code, tile * TILE_LANES) << 8 * tile;
    return codes;
}

/* Eight values that are bf16 already, bit for bit. */
__device__ inline uint4 pack8_bf16(const float v[8])
{
    uint32_t w[4];

#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = kvs_f32_bits(v[2 * i]) >> 16 | (kvs_f32_bits(v[2 * i + 1]) & 0xFFFF0000u);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

template <uint32_t FORMAT, uint32_t TYPE>
__global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params p)
{
    constexpr uint32_t QUANTISED = FORMAT == KVS_FORMAT_fp8_blk584 ? 448 : 512;
    constexpr uint32_t TAIL = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 16;
    constexpr int TILE_LANES = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 4;
    const uint64_t t = (uint64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
    const uint32_t lane = threadIdx.x % LANES, value = TYPE == KVS_VALUE_FP32 ? 4 : 2;
    const bool here = t < p.a.n_tokens, quantised = lane < QUANTISED / 8;
    const int64_t slot = here ? p.a.slot_mapping[t] : -1;
    const uint8_t *x = p.a.x + t * p.a.x_stride + (uint64_t)lane * 8 * value;
    float v[8] = {0}, amax = 0;
    kvs_view_place at;
    uint32_t code;
    uint64_t codes;
    uint8_t *row;

    if (here)
        read8<TYPE>(x, p.whole, v);
    if (TYPE == KVS_VALUE_FP32) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = kvs_bf16_to_f32(kvs_f32_to_bf16(v[i]));
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        amax = kvs_amax(amax, v[i]);
#pragma unroll
    for (int step = TILE_LANES / 2; step > 0; step /= 2)
        amax = kvs_amax(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    code = quantised ? kvs_blockwise_code(amax) : 0;
    codes = warp_codes<TILE_LANES>(code);
    if (!slot_of(p.a.view, slot, lane == 0 ? p.bad : nullptr))
        return;
    at = kvs_view_split(&p.a.view, (uint64_t)slot, KVS_SITE_BLOCKWISE_WRITE_DATA);
    row = kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_BLOCKWISE_WRITE_DATA);
    if (quantised) {
        const float factor = kvs_ue8m0_reciprocal((uint8_t)code);

#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = v[i] * factor;
        reinterpret_cast<uint2 *>(row)[lane] = pack8_e4m3(v);
    } else {
        reinterpret_cast<uint4 *>(row + QUANTISED)[lane - QUANTISED / 8] = pack8_bf16(v);
    }
    if (lane % WARP == 0) {
        uint8_t *tail = kvs_view_tail(&p.a.view, at.page, at.token, TAIL, KVS_SITE_BLOCKWISE_WRITE_SCALE);

        if (FORMAT == KVS_FORMAT_fp8_blk584)
            reinterpret_cast<uint32_t *>(tail)[lane / WARP] = (uint32_t)codes;
        else
            reinterpret_cast<uint64_t *>(tail)[lane / WARP] = codes;
    }
}

using kernel = void (*)(params);

kernel kernel_for(uint32_t format, uint32_t type)
{
    if (format == KVS_FORMAT_fp8_blk584)
        return type == KVS_VALUE_FP32 ? write_kernel<KVS_FORMAT_fp8_blk584, KVS_VALUE_FP32>
                                      : write_kernel<KVS_FORMAT_fp8_blk584, KVS_VALUE_BF16>;
    return type == KVS_VALUE_FP32 ? write_kernel<KVS_FORMAT_fp8_blk528, KVS_VALUE_FP32>
                                  : write_kernel<KVS_FORMAT_fp8_blk528, KVS_VALUE_BF16>;
}

} // namespace

extern "C" kvs_status kvs_blockwise_write_cuda_init(kvs_err *err)
{
    const uint32_t formats[] = {KVS_FORMAT_fp8_blk584, KVS_FORMAT_fp8_blk528};
    kvs_status s = KVS_OK;

    for (int i = 0; i < 4 && s == KVS_OK; i++)
        s = rows_load(kernel_for(formats[i / 2], i % 2 == 0 ? KVS_VALUE_BF16 : KVS_VALUE_FP32),
                      "cudaFuncGetAttributes(blockwise_write)", err);
    return s;
}

extern "C" kvs_status kvs_blockwise_write_cuda(const kvs_blockwise_write_args *a, uint32_t *ret_bad,
                                               CUstream_st *stream, kvs_err *err)
{
    const params p = {*a, ret_bad, aligned(a->x, a->x_stride, CHUNK)};
    unsigned blocks = 0;
    kvs_status s = kvs_blockwise_write_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->n_tokens, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    kernel_for(a->view.format, a->x_type)<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("blockwise_write launch", err);
}
