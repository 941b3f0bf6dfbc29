/* Indexer write on a GPU: 8 threads take a token, 16 values each; a token's maximum goes round among its threads. */
#include "kernels/cuda_kernels.h"
#include "kernels/indexer.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { LANES = KVS_INDEXER_DIMS / 16, ROWS = ROWS_THREADS / LANES };

struct params {
    kvs_indexer_write_args a;
    uint32_t *bad;
    uint32_t whole; /* rows of k are aligned to 16 bytes */
};

/* Where a token goes; NULL: nowhere. */
struct target {
    uint8_t *key;
    float *scale;
};

__device__ inline target target_of(const params &p, uint64_t t)
{
    const int64_t slot = t < p.a.n_tokens ? p.a.slot_mapping[t] : -1;
    kvs_view_place at;

    if (!slot_of(p.a.view, slot, p.bad))
        return {nullptr, nullptr};
    at = kvs_view_split(&p.a.view, (uint64_t)slot, KVS_SITE_INDEXER_WRITE_KEY);
    return {kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_INDEXER_WRITE_KEY),
            reinterpret_cast<float *>(
                kvs_view_tail(&p.a.view, at.page, at.token, KVS_INDEXER_SCALE_BYTES, KVS_SITE_INDEXER_WRITE_SCALE))};
}

/* By the 8 threads of a token; a warp has four. */
template <uint32_t TYPE>
__device__ inline void write_token(const params &p, const sixteen &raw, const target &to, uint32_t lane)
{
    float v[16], amax = 0, scale;

    unpack16<TYPE>(raw, v);
#pragma unroll
    for (int i = 0; i < 16; i++)
        amax = amax_of(amax, v[i]);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        amax = amax_of(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (to.key == nullptr)
        return;
    scale = kvs_indexer_scale(amax, p.a.scale_kind);
    divide<TYPE, true>(v, divisor_of(scale)); /* what is not ordinary has an infinity in it */
    reinterpret_cast<uint4 *>(to.key)[lane] = pack16_e4m3(v);
    if (lane == 0)
        *to.scale = scale;
}

template <uint32_t TYPE> __global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params p)
{
    __shared__ target to[ROWS];
    const uint64_t first = (uint64_t)blockIdx.x * ROWS;
    const uint32_t lane = threadIdx.x % LANES, mine = threadIdx.x / LANES;
    const uint64_t t = first + mine;
    const sixteen raw =
        t < p.a.n_tokens ? load16<TYPE>(p.a.k + t * p.a.k_stride + lane * 2 * CHUNK, p.whole) : sixteen{};

    if (threadIdx.x < ROWS)
        to[threadIdx.x] = target_of(p, first + threadIdx.x);
    __syncthreads();
    write_token<TYPE>(p, raw, to[mine], lane);
}

} // namespace

extern "C" kvs_status kvs_indexer_write_cuda_init(kvs_err *err)
{
    kvs_status s = rows_load(write_kernel<KVS_VALUE_BF16>, "cudaFuncGetAttributes(indexer_write)", err);

    return s == KVS_OK ? rows_load(write_kernel<KVS_VALUE_FP16>, "cudaFuncGetAttributes(indexer_write)", err) : s;
}

extern "C" kvs_status kvs_indexer_write_cuda(const kvs_indexer_write_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                             kvs_err *err)
{
    const params p = {*a, ret_bad, aligned(a->k, a->k_stride, CHUNK)};
    unsigned blocks = 0;
    kvs_status s = kvs_indexer_write_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->n_tokens, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    if (a->k_type == KVS_VALUE_BF16)
        write_kernel<KVS_VALUE_BF16><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    else
        write_kernel<KVS_VALUE_FP16><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("indexer_write launch", err);
}
