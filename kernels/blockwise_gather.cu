/* Block-wise gather on a GPU: a thread block takes ROWS destination rows; ROWS of its threads find their tokens, all
 * of them then make 8 values of a row at a time. */
#include "kernels/blockwise.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { ROWS = 32, UNDER_WAY = 4, UNITS = KVS_BLOCKWISE_VALUES / 8 };

struct params {
    kvs_blockwise_gather_args a;
    uint32_t *bad;
    uint32_t whole; /* destination rows are aligned to 16 bytes */
};

struct unit {
    uint4 bytes;
    uint32_t code;
};

template <uint32_t FORMAT>
__global__ void __launch_bounds__(ROWS_THREADS) gather_kernel(const __grid_constant__ params p)
{
    constexpr uint32_t QUANTISED = FORMAT == KVS_FORMAT_fp8_blk584 ? 448 : 512;
    constexpr uint32_t TAIL = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 16;
    constexpr uint32_t TILE_UNITS = FORMAT == KVS_FORMAT_fp8_blk584 ? 8 : 4;
    __shared__ const uint8_t *from[ROWS], *codes[ROWS];
    const uint32_t first = blockIdx.x * ROWS;

    if (threadIdx.x < ROWS) {
        kvs_view_place at;
        const bool found =
            gather_row(p.a.list, p.a.view, first + threadIdx.x, KVS_SITE_BLOCKWISE_GATHER_DATA, p.bad, &at);

        from[threadIdx.x] =
            found ? kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_BLOCKWISE_GATHER_DATA) : nullptr;
        codes[threadIdx.x] =
            found ? kvs_view_tail(&p.a.view, at.page, at.token, TAIL, KVS_SITE_BLOCKWISE_GATHER_SCALE) : nullptr;
    }
    __syncthreads();
    for_units<UNDER_WAY, unit>(
        ROWS * UNITS,
        [&](uint32_t i) {
            const uint8_t *row = from[i / UNITS];
            const uint32_t u = i % UNITS;

            if (row == nullptr)
                return unit{};
            if (u >= QUANTISED / 8)
                return unit{reinterpret_cast<const uint4 *>(row + QUANTISED)[u - QUANTISED / 8], 0};
            const uint2 v = reinterpret_cast<const uint2 *>(row)[u];
            return unit{make_uint4(v.x, v.y, 0, 0), codes[i / UNITS][u / TILE_UNITS]};
        },
        [&](uint32_t i, const unit &v) {
            if (from[i / UNITS] != nullptr)
                put16(p.a.dst + (uint64_t)(first + i / UNITS) * p.a.dst_stride + i % UNITS * CHUNK, p.whole,
                      i % UNITS < QUANTISED / 8
                          ? widen8_bf16(make_uint2(v.bytes.x, v.bytes.y), kvs_ue8m0_to_f32((uint8_t)v.code))
                          : v.bytes);
        });
}

} // namespace

extern "C" kvs_status kvs_blockwise_gather_cuda_init(kvs_err *err)
{
    kvs_status s = rows_load(gather_kernel<KVS_FORMAT_fp8_blk584>, "cudaFuncGetAttributes(blockwise_gather)", err);

    if (s == KVS_OK)
        s = rows_load(gather_kernel<KVS_FORMAT_fp8_blk528>, "cudaFuncGetAttributes(blockwise_gather)", err);
    return s;
}

extern "C" kvs_status kvs_blockwise_gather_cuda(const kvs_blockwise_gather_args *a, uint32_t *ret_bad,
                                                CUstream_st *stream, kvs_err *err)
{
    const params p = {*a, ret_bad, aligned(a->dst, a->dst_stride, CHUNK)};
    unsigned blocks = 0;
    kvs_status s = kvs_blockwise_gather_check(a, err);

    if (s == KVS_OK)
        s = rows_begin(a->list.n_rows, ROWS, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    if (a->view.format == KVS_FORMAT_fp8_blk584)
        gather_kernel<KVS_FORMAT_fp8_blk584><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    else
        gather_kernel<KVS_FORMAT_fp8_blk528><<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("blockwise_gather launch", err);
}
