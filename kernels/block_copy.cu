/* Block copies on a GPU: a thread block moves one part of one page, several loads of 16 bytes under way before the
 * first store; the bytes after the last whole 16 go one by one. */
#include "kernels/block_copy.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { UNDER_WAY = 4, PART = UNDER_WAY * ROWS_THREADS * CHUNK };

struct params {
    kvs_block_copy_args a;
    uint32_t *bad;
    uint32_t parts; /* of a page */
};

/* Threads of a whole block see the same pair. */
__device__ inline bool find_pages(const params &p, uint64_t pair, bool counts, const uint8_t **from, uint8_t **to)
{
    const int32_t f = p.a.pairs[2 * pair], t = p.a.pairs[2 * pair + 1];

    if (f < 0 || t < 0)
        return false;
    if ((uint32_t)f >= p.a.from.n_blocks || (uint32_t)t >= p.a.to.n_blocks) {
        if (counts && p.bad != nullptr)
            atomicAdd(p.bad, 1u);
        return false;
    }
    *from = kvs_view_page(&p.a.from, (uint32_t)f, KVS_SITE_BLOCK_COPY_SOURCE);
    *to = kvs_view_page(&p.a.to, (uint32_t)t, KVS_SITE_BLOCK_COPY_TARGET);
    return true;
}

__global__ void __launch_bounds__(ROWS_THREADS) copy_kernel(const __grid_constant__ params p)
{
    const uint64_t pair = blockIdx.x / p.parts, at = (uint64_t)(blockIdx.x % p.parts) * PART;
    uint64_t length = kvs_view_length(&p.a.from, KVS_SITE_BLOCK_COPY_SOURCE);
    const bool last = at / PART + 1 == p.parts;
    const uint8_t *from;
    uint8_t *to;

    if (!find_pages(p, pair, at == 0 && threadIdx.x == 0, &from, &to))
        return;
    if (!last)
        length = at + PART;
    for (uint64_t part = at; part < length; part += PART) { /* once, unless the length is not what the launch knew */
        const uint64_t n = length - part < PART ? length - part : PART;
        const uint4 *src = reinterpret_cast<const uint4 *>(from + part);
        uint4 *dst = reinterpret_cast<uint4 *>(to + part);

        for_units<UNDER_WAY, uint4>((uint32_t)(n / CHUNK), [&](uint32_t i) { return src[i]; },
                                    [&](uint32_t i, const uint4 &v) { dst[i] = v; });
        if (threadIdx.x < n % CHUNK)
            to[part + n / CHUNK * CHUNK + threadIdx.x] = from[part + n / CHUNK * CHUNK + threadIdx.x];
    }
}

} // namespace

extern "C" kvs_status kvs_block_copy_cuda_init(kvs_err *err)
{
    return rows_load(copy_kernel, "cudaFuncGetAttributes(block_copy)", err);
}

extern "C" kvs_status kvs_block_copy_cuda(const kvs_block_copy_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                          kvs_err *err)
{
    const uint64_t parts = (a->from.page_bytes + PART - 1) / PART;
    unsigned blocks = 0;
    kvs_status s = kvs_block_copy_check(a, err);

    if (s == KVS_OK)
        s = rows_begin((uint64_t)a->n_pairs * parts, 1, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    copy_kernel<<<blocks, ROWS_THREADS, 0, stream>>>(params{*a, ret_bad, (uint32_t)parts});
    return rows_end("block_copy launch", err);
}
