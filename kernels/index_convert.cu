/* Token ids into indices on a GPU: a thread an id. */
#include "kernels/index_convert.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

struct params {
    kvs_index_convert_args a;
    uint32_t *bad;
};

__global__ void __launch_bounds__(ROWS_THREADS) convert_kernel(const __grid_constant__ params p)
{
    const kvs_index_convert_args &a = p.a;
    const uint64_t n = (uint64_t)blockIdx.x * ROWS_THREADS + threadIdx.x, t = n / a.topk, i = n % a.topk;
    kvs_physical_row physical = {-1};
    kvs_logical_index at = {-1};
    int64_t row;
    int32_t id;

    if (t >= a.n_tokens)
        return;
    id = a.tokens[t * a.token_stride + i];
    row = a.workspace != nullptr ? a.workspace[t] : -1;
    if (id >= 0 && row < 0)
        at = kvs_index_convert_one(&a, (uint32_t)t, id);
    if (id >= 0 && row < 0 && at.at < 0 && p.bad != nullptr)
        atomicAdd(p.bad, 1u);
    if (a.physical == nullptr) {
        a.logical[t * a.out_stride + i] = at;
        return;
    }
    if (id >= 0 && row >= 0)
        physical.at = row + id;
    else
        physical = kvs_physical_of_logical(&a.view, at);
    a.physical[t * a.out_stride + i] = physical;
}

} // namespace

extern "C" kvs_status kvs_index_convert_cuda_init(kvs_err *err)
{
    return rows_load(convert_kernel, "cudaFuncGetAttributes(index_convert)", err);
}

extern "C" kvs_status kvs_index_convert_cuda(const kvs_index_convert_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                             kvs_err *err)
{
    const params p = {*a, ret_bad};
    unsigned blocks = 0;
    kvs_status s = kvs_index_convert_check(a, err);

    if (s == KVS_OK)
        s = rows_begin((uint64_t)a->n_tokens * a->topk, ROWS_THREADS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    convert_kernel<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("index_convert launch", err);
}
