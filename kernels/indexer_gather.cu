/* Indexer gather on a GPU: a thread block takes ROWS destination rows; ROWS of its threads find their tokens and move
 * the scales, all of them then move the keys. */
#include "kernels/cuda_kernels.h"
#include "kernels/indexer.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { ROWS = 128, UNDER_WAY = 4 };

struct params {
    kvs_indexer_gather_args a;
    uint32_t *bad;
};

template <typename V> __global__ void __launch_bounds__(ROWS_THREADS) gather_kernel(const __grid_constant__ params p)
{
    enum { UNITS = KVS_INDEXER_DIMS / sizeof(V) };
    __shared__ const uint8_t *from[ROWS];
    const uint32_t first = blockIdx.x * ROWS;

    if (threadIdx.x < ROWS) {
        const uint32_t r = first + threadIdx.x;
        kvs_view_place at;
        const bool found = gather_row(p.a.list, p.a.view, r, KVS_SITE_INDEXER_GATHER_KEY, p.bad, &at);

        from[threadIdx.x] = found ? kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_INDEXER_GATHER_KEY) : nullptr;
        if (found)
            *reinterpret_cast<uint32_t *>(p.a.scale + (uint64_t)r * p.a.scale_stride) =
                *reinterpret_cast<const uint32_t *>(kvs_view_tail(&p.a.view, at.page, at.token, KVS_INDEXER_SCALE_BYTES,
                                                                  KVS_SITE_INDEXER_GATHER_SCALE));
    }
    __syncthreads();
    for_units<UNDER_WAY, V>(
        ROWS * UNITS,
        [&](uint32_t i) {
            const uint8_t *row = from[i / UNITS];

            return row != nullptr ? reinterpret_cast<const V *>(row)[i % UNITS] : V{};
        },
        [&](uint32_t i, V v) {
            if (from[i / UNITS] != nullptr)
                reinterpret_cast<V *>(p.a.k + (uint64_t)(first + i / UNITS) * p.a.k_stride)[i % UNITS] = v;
        });
}

} // namespace

extern "C" kvs_status kvs_indexer_gather_cuda_init(kvs_err *err)
{
    kvs_status s = rows_load(gather_kernel<uint4>, "cudaFuncGetAttributes(indexer_gather)", err);

    return s == KVS_OK ? rows_load(gather_kernel<uint8_t>, "cudaFuncGetAttributes(indexer_gather)", err) : s;
}

extern "C" kvs_status kvs_indexer_gather_cuda(const kvs_indexer_gather_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                              kvs_err *err)
{
    const params p = {*a, ret_bad};
    unsigned blocks = 0;
    kvs_status s = kvs_indexer_gather_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->list.n_rows, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    if (aligned(a->k, a->k_stride, CHUNK))
        gather_kernel<uint4><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    else
        gather_kernel<uint8_t><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("indexer_gather launch", err);
}
