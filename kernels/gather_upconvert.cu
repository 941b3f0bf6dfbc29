/* Gather and upconvert on a GPU: a thread block takes ROWS destination rows; ROWS of its threads find their records,
 * all of them then make 8 values of a row at a time: 64 units of e4m3, 8 of the rope part. */
#include "kernels/gather_upconvert.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum {
    ROWS = 32,
    UNDER_WAY = 4,
    LATENT = 512,
    ROPE = 528,
    UNITS = KVS_UPCONVERT_VALUES / 8,
    LATENT_UNITS = LATENT / 8
};

struct params {
    kvs_gather_upconvert_args a;
    uint32_t *bad;
    uint32_t whole; /* destination rows are aligned to 16 bytes */
};

struct unit {
    uint4 bytes;
    float scale;
};

__device__ inline unit read_unit(const uint8_t *record, uint32_t i)
{
    if (i >= LATENT_UNITS)
        return {*reinterpret_cast<const uint4 *>(record + ROPE + (i - LATENT_UNITS) * CHUNK), 0};
    const uint2 v = reinterpret_cast<const uint2 *>(record)[i];
    return {make_uint4(v.x, v.y, 0, 0), reinterpret_cast<const float *>(record + LATENT)[i / 16]};
}

__global__ void __launch_bounds__(ROWS_THREADS) upconvert_kernel(const __grid_constant__ params p)
{
    __shared__ const uint8_t *from[ROWS];
    const uint32_t first = blockIdx.x * ROWS;

    if (threadIdx.x < ROWS) {
        kvs_view_place at;
        const bool found = gather_row(p.a.list, p.a.view, first + threadIdx.x, KVS_SITE_GATHER_UPCONVERT, p.bad, &at);

        from[threadIdx.x] = found ? kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_GATHER_UPCONVERT) : nullptr;
    }
    __syncthreads();
    for_units<UNDER_WAY, unit>(
        ROWS * UNITS,
        [&](uint32_t i) {
            const uint8_t *record = from[i / UNITS];

            return record != nullptr ? read_unit(record, i % UNITS) : unit{};
        },
        [&](uint32_t i, const unit &u) {
            if (from[i / UNITS] != nullptr)
                put16(p.a.dst + (uint64_t)(first + i / UNITS) * p.a.dst_stride + i % UNITS * CHUNK, p.whole,
                      i % UNITS < LATENT_UNITS ? widen8_bf16(make_uint2(u.bytes.x, u.bytes.y), u.scale) : u.bytes);
        });
}

} // namespace

extern "C" kvs_status kvs_gather_upconvert_cuda_init(kvs_err *err)
{
    return rows_load(upconvert_kernel, "cudaFuncGetAttributes(gather_upconvert)", err);
}

extern "C" kvs_status kvs_gather_upconvert_cuda(const kvs_gather_upconvert_args *a, uint32_t *ret_bad,
                                                CUstream_st *stream, kvs_err *err)
{
    const params p = {*a, ret_bad, aligned(a->dst, a->dst_stride, CHUNK)};
    unsigned blocks = 0;
    kvs_status s = kvs_gather_upconvert_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->list.n_rows, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    upconvert_kernel<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("gather_upconvert launch", err);
}
