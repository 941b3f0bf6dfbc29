/* Block-wise write on a GPU: a warp takes a token, 16 values a thread, and several tokens one after another whose
 * loads are under way together; a tile's maximum goes round among its 2 or 4 threads. */
#include "kernels/blockwise.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { LANES = KVS_BLOCKWISE_VALUES / 16, AT_ONCE = ROWS_THREADS / LANES };

/* Tokens of a warp, one after another: fewer of fp32, which take more registers. */
template <uint32_t TYPE> struct turns {
    static constexpr uint32_t N = TYPE == KVS_VALUE_FP32 ? 2 : 4, ROWS = AT_ONCE * N;
};

struct params {
    kvs_blockwise_write_args a;
    uint32_t *bad;
    uint32_t whole; /* rows of x are aligned to 16 bytes */
};

/* Eight values that are bf16 already, bit for bit. */
__device__ inline uint4 pack8_bf16(const float *v)
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

/* By the warp of a token. */
template <uint32_t FORMAT, uint32_t TYPE>
__device__ inline void write_token(const sixteen &raw, const target &to, uint32_t lane)
{
    constexpr uint32_t QUANTISED = FORMAT == KVS_FORMAT_fp8_blk584 ? 448 : 512;
    constexpr uint32_t TILE_LANES = FORMAT == KVS_FORMAT_fp8_blk584 ? 4 : 2;
    const bool quantised = lane < QUANTISED / 16;
    float v[16], amax = 0;
    uint32_t code;

    unpack16<TYPE>(raw, v);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (TYPE == KVS_VALUE_FP32)
            v[i] = kvs_bf16_to_f32(kvs_f32_to_bf16(v[i]));
        amax = amax_of(amax, v[i]);
    }
#pragma unroll
    for (uint32_t step = TILE_LANES / 2; step > 0; step /= 2)
        amax = amax_of(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (to.row == nullptr)
        return;
    code = quantised ? kvs_blockwise_code(amax) : 0; /* behind the codes of 584 lies a zero */
    if (quantised) {
        const float factor = kvs_ue8m0_reciprocal((uint8_t)code);

#pragma unroll
        for (int i = 0; i < 16; i++)
            v[i] = v[i] * factor;
        reinterpret_cast<uint4 *>(to.row)[lane] = pack16_e4m3(v);
    } else {
        uint4 *rope = reinterpret_cast<uint4 *>(to.row + QUANTISED) + 2 * (lane - QUANTISED / 16);

        rope[0] = pack8_bf16(v);
        rope[1] = pack8_bf16(v + 8);
    }
    if (lane % TILE_LANES == 0)
        to.tail[lane / TILE_LANES] = (uint8_t)code;
}

template <uint32_t FORMAT, uint32_t TYPE>
__global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params p)
{
    constexpr uint32_t TAIL = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 16;
    constexpr uint32_t TURNS = turns<TYPE>::N, ROWS = turns<TYPE>::ROWS, UNIT = TYPE == KVS_VALUE_FP32 ? 64 : 32;
    __shared__ target to[ROWS];
    const uint64_t first = (uint64_t)blockIdx.x * ROWS;
    const uint32_t lane = threadIdx.x % LANES, mine = threadIdx.x / LANES;
    sixteen raw[TURNS];

#pragma unroll
    for (uint32_t i = 0; i < TURNS; i++) {
        const uint64_t t = first + mine + i * AT_ONCE;

        raw[i] = t < p.a.n_tokens ? load16<TYPE>(p.a.x + t * p.a.x_stride + lane * UNIT, p.whole) : sixteen{};
    }
    if (threadIdx.x < ROWS)
        to[threadIdx.x] = target_of<TAIL>(p, first + threadIdx.x);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < TURNS; i++)
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
    const uint32_t rows = a->x_type == KVS_VALUE_FP32 ? turns<KVS_VALUE_FP32>::ROWS : turns<KVS_VALUE_BF16>::ROWS;
    unsigned blocks = 0;
    kvs_status s = kvs_blockwise_write_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->n_tokens, rows, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    kernel_for(a->view.format, a->x_type)<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("blockwise_write launch", err);
}
