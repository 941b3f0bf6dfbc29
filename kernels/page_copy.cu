/* Page copy: a warp moves a tile of one piece at a time, 8 x 16 bytes a lane in flight, which hides the latency of the
 * link with few thread blocks.  Each block takes an equal run of tiles, whatever pieces they are of. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/page_copy.h"

namespace
{

enum { THREADS = 512, LANES = 32, WARPS = THREADS / LANES, IN_FLIGHT = 8, CHUNK = 16, MOST_BLOCKS = 1024 };

static_assert(LANES * IN_FLIGHT * CHUNK == KVS_PAGE_COPY_TILE, "a tile is what a warp has in flight");

/* The last piece that begins at or before the tile.  Pieces without bytes share their first tile with the next one. */
__device__ uint32_t find_piece(const kvs_page_piece *pieces, uint32_t n, uint32_t tile)
{
    uint32_t low = 0, high = n;

    while (high - low > 1) {
        uint32_t mid = (low + high) / 2;

        if (pieces[mid].first_tile <= tile)
            low = mid;
        else
            high = mid;
    }
    return low;
}

__device__ void copy_tile(const kvs_page_piece *p, uint32_t tile, uint32_t lane)
{
    uint64_t at = (uint64_t)(tile - p->first_tile) * KVS_PAGE_COPY_TILE;
    const uint4 *src = reinterpret_cast<const uint4 *>(static_cast<const uint8_t *>(p->src) + at) + lane;
    uint4 *dst = reinterpret_cast<uint4 *>(static_cast<uint8_t *>(p->dst) + at) + lane;
    uint32_t left = (uint32_t)((p->bytes - at) / CHUNK);
    uint4 v[IN_FLIGHT];

#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        if (i * LANES + lane < left)
            v[i] = __ldcs(src + i * LANES);
#pragma unroll
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        if (i * LANES + lane < left)
            __stcs(dst + i * LANES, v[i]);
}

__global__ void __launch_bounds__(THREADS) page_copy_kernel(const kvs_page_piece *pieces, uint32_t n, uint32_t n_tiles)
{
    __shared__ kvs_page_piece list[KVS_PAGE_COPY_PIECES];
    uint32_t first = (uint32_t)((uint64_t)n_tiles * blockIdx.x / gridDim.x);
    uint32_t end = (uint32_t)((uint64_t)n_tiles * (blockIdx.x + 1) / gridDim.x);
    uint32_t tile = first + threadIdx.x / LANES, at;

    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        list[i] = pieces[i];
    __syncthreads();
    if (tile >= end)
        return;
    for (at = find_piece(list, n, tile); tile < end; tile += WARPS) {
        while (at + 1 < n && list[at + 1].first_tile <= tile)
            at++;
        copy_tile(&list[at], tile, threadIdx.x % LANES);
    }
}

} // namespace

extern "C" kvs_status kvs_page_copy_cuda_init(kvs_err *err)
{
    cudaFuncAttributes attributes;
    cudaError_t e = cudaFuncGetAttributes(&attributes, page_copy_kernel);

    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(page_copy)", e);
}

extern "C" kvs_status kvs_page_copy_cuda(const kvs_page_piece *pieces, uint32_t n, uint32_t n_tiles, uint32_t n_blocks,
                                         CUstream_st *stream, kvs_err *err)
{
    uint32_t useful = (n_tiles + WARPS - 1) / WARPS, grid = n_blocks < useful ? n_blocks : useful;
    cudaError_t e;

    if (n == 0 || n > KVS_PAGE_COPY_PIECES || n_tiles == 0)
        return kvs_fail(err, KVS_E_INVALID, "page_copy: %" PRIu32 " pieces of %" PRIu32 " tiles are not 1..%d", n,
                        n_tiles, KVS_PAGE_COPY_PIECES);
    if (n_blocks == 0 || n_blocks > MOST_BLOCKS)
        return kvs_fail(err, KVS_E_INVALID, "page_copy: %" PRIu32 " thread blocks are not 1..%d", n_blocks,
                        MOST_BLOCKS);
    page_copy_kernel<<<grid, THREADS, 0, stream>>>(pieces, n, n_tiles);
    e = cudaGetLastError();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "page_copy launch", e);
}
