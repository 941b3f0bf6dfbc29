/* Indexer write on a GPU: 16 threads take a token, 8 values each; its maximum goes round among them. */
#include "kernels/cuda_kernels.h"
#include "kernels/indexer.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { LANES = KVS_INDEXER_DIMS / 8, ROWS = ROWS_THREADS / LANES };

struct params {
    kvs_indexer_write_args a;
    uint32_t *bad;
    uint32_t whole; /* rows of k are aligned to 16 bytes */
};

template <uint32_t TYPE> __global__ void __launch_bounds__(ROWS_THREADS) write_kernel(const __grid_constant__ params p)
{
    const uint64_t t = (uint64_t)blockIdx.x * ROWS + threadIdx.x / LANES;
    const uint32_t lane = threadIdx.x % LANES;
    const bool here = t < p.a.n_tokens;
    const int64_t slot = here ? p.a.slot_mapping[t] : -1;
    float v[8] = {0}, amax = 0, scale;
    kvs_view_place at;

    if (here)
        read8<TYPE>(p.a.k + t * p.a.k_stride + lane * CHUNK, p.whole, v);
#pragma unroll
    for (int i = 0; i < 8; i++)
        amax = kvs_amax(amax, v[i]);
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        amax = kvs_amax(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, step));
    if (!slot_of(p.a.view, slot, lane == 0 ? p.bad : nullptr))
        return;
    scale = kvs_indexer_scale(amax, p.a.scale_kind);
#pragma unroll
    for (int i = 0; i < 8; i++)
        v[i] = v[i] / scale;
    at = kvs_view_split(&p.a.view, (uint64_t)slot, KVS_SITE_INDEXER_WRITE_KEY);
    reinterpret_cast<uint2 *>(kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_INDEXER_WRITE_KEY))[lane] =
        pack8_e4m3(v);
    if (lane == 0)
        *reinterpret_cast<float *>(
            kvs_view_tail(&p.a.view, at.page, at.token, KVS_INDEXER_SCALE_BYTES, KVS_SITE_INDEXER_WRITE_SCALE)) = scale;
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
