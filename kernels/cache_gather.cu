/* Cache gather on a GPU: a thread block takes ROWS destination rows; ROWS of its threads find their tokens, all of
 * them then move the rows in the largest unit that every address allows. */
#include "kernels/cache_gather.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { ROWS = 32, UNDER_WAY = 4 };

struct params {
    kvs_cache_gather_args a;
    uint32_t *bad;
};

template <typename V> __global__ void __launch_bounds__(ROWS_THREADS) copy_kernel(const __grid_constant__ params p)
{
    __shared__ const uint8_t *from[ROWS];
    const uint32_t first = blockIdx.x * ROWS, units = p.a.entry_bytes / (uint32_t)sizeof(V);

    if (threadIdx.x < ROWS) {
        kvs_view_place at;
        const bool found = gather_row(p.a.list, p.a.view, first + threadIdx.x, KVS_SITE_CACHE_GATHER, p.bad, &at);

        from[threadIdx.x] = found ? kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_CACHE_GATHER) : nullptr;
    }
    __syncthreads();
    for_units<UNDER_WAY, V>(
        ROWS * units,
        [&](uint32_t i) {
            const uint8_t *row = from[i / units];

            return row != nullptr ? reinterpret_cast<const V *>(row)[i % units] : V{};
        },
        [&](uint32_t i, V v) {
            if (from[i / units] != nullptr)
                reinterpret_cast<V *>(p.a.dst + (uint64_t)(first + i / units) * p.a.dst_stride)[i % units] = v;
        });
}

template <typename V> bool fits(const kvs_cache_gather_args *a)
{
    return aligned(a->dst, a->dst_stride, sizeof(V)) && a->entry_bytes % sizeof(V) == 0; /* views are aligned to 16 */
}

} // namespace

extern "C" kvs_status kvs_cache_gather_cuda_init(kvs_err *err)
{
    kvs_status s = rows_load(copy_kernel<uint4>, "cudaFuncGetAttributes(cache_gather)", err);

    if (s == KVS_OK)
        s = rows_load(copy_kernel<uint32_t>, "cudaFuncGetAttributes(cache_gather)", err);
    if (s == KVS_OK)
        s = rows_load(copy_kernel<uint8_t>, "cudaFuncGetAttributes(cache_gather)", err);
    return s;
}

extern "C" kvs_status kvs_cache_gather_cuda(const kvs_cache_gather_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                            kvs_err *err)
{
    const params p = {*a, ret_bad};
    unsigned blocks = 0;
    kvs_status s = kvs_cache_gather_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->list.n_rows, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    if (fits<uint4>(a))
        copy_kernel<uint4><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    else if (fits<uint32_t>(a))
        copy_kernel<uint32_t><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    else
        copy_kernel<uint8_t><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("cache_gather launch", err);
}
