/* Block-wise write on a GPU: 64 threads take a token, 8 values each, and several tokens one after another whose loads are under
 * way together; a tile's maximum goes round among its 4 or 8 threads, and the first thread of a warp writes the codes of the
 * warp's tiles together. */
#include "kernels/blockwise.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { LANES = KVS_BLOCKWISE_VALUES / 8, AT_ONCE = ROWS_THREADS / LANES, TURNS = 4, ROWS = AT_ONCE * TURNS, WARP = 32 };

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

/* Where a token goes; NULL: nowhere. */
struct target {
    uint8_t *row, *tail;
};

template <uint32_t TAIL> __device__ inline target target_of(const params &p, uint64_t t)
{
    const int64_t slot = t < p.a.n_tokens ? p.a.slot_mapping[t] : -1;
    kvs_view_place at;

    if (!slot_of(p.a.view, slot, p.bad))
        return {nullptr, nullptr};
    at = kvs_view_split(&p.a.view, (uint64_t)slot, KVS_SITE_BLOCKWISE_WRITE_DATA);
    return {kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_BLOCKWISE_WRITE_DATA),
            kvs_view_tail(&p.a.view, at.page, at.token, TAIL, KVS_SITE_BLOCKWISE_WRITE_SCALE)};
}

/* By the 64 threads of a token, two warps. */
template <uint32_t FORMAT, uint32_t TYPE>
__device__ inline void write_token(const eight &raw, const target &to, uint32_t lane)
{
    constexpr uint32_t QUANTISED = FORMAT == KVS_FORMAT_fp8_blk584 ? 448 : 512;
    constexpr int TILE_LANES = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 4;
    const bool quantised = lane < QUANTISED / 8;
    float v[8], amax = 0;
    uint64_t codes;
    uint32_t code;

    unpack8<TYPE>(raw, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (TYPE == KVS_VALUE_FP32)
            v[i] = kvs_bf16_to_f32(kvs_f32_to_bf16(v[i]));
        amax = amax_of(amax, v[i]);
    }
#pragma unroll
    for (int step = TILE_LANES / 2; step > 0; step /= 2)
        amax = amax_of(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    code = quantised ? kvs_blockwise_code(amax) : 0;
    codes = warp_codes<TILE_LANES>(code);
    if (to.row == nullptr)
        return;
    if (quantised) {
        const float factor = kvs_ue8m0_reciprocal((uint8_t)code);

#pragma unroll
        for (int i = 0; i < 8; i++)
            v[i] = v[i] * factor;
        reinterpret_cast<uint2 *>(to.row)[lane] = pack8_e4m3(v);
    } else {
        reinterpret_cast<uint4 *>(to.row + QUANTISED)[lane - QUANTISED / 8] = pack8_bf16(v);
    }
    if (lane % WARP == 0 && FORMAT == KVS_FORMAT_fp8_blk584)
        reinterpret_cast<uint32_t *>(to.tail)[lane / WARP] = (uint32_t)codes;
    else if (lane % WARP == 0)
        reinterpret_cast<uint64_t *>(to.tail)[lane / WARP] = codes;
}

template <uint32_t FORMAT, uint32_t TYPE>
__global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params p)
{
    constexpr uint32_t TAIL = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 16;
    __shared__ target to[ROWS];
    const uint64_t first = (uint64_t)blockIdx.x * ROWS;
    const uint32_t lane = threadIdx.x % LANES, mine = threadIdx.x / LANES,
                   unit = TYPE == KVS_VALUE_FP32 ? 2 * CHUNK : CHUNK;
    eight raw[TURNS];

#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        const uint64_t t = first + mine + i * AT_ONCE;

        raw[i] = t < p.a.n_tokens ? load8<TYPE>(p.a.x + t * p.a.x_stride + lane * unit, p.whole) : eight{};
    }
    if (threadIdx.x < ROWS)
        to[threadIdx.x] = target_of<TAIL>(p, first + threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TURNS; i++)
        write_token<FORMAT, TYPE>(raw[i], to[mine + i * AT_ONCE], lane);
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
