/* Page copy: a warp moves a tile of one piece at a time, 8 x 16 bytes a lane in flight, which hides the latency of the
 * link with few thread blocks.  Each block takes an equal run of tiles, whatever pieces they are of.
 *
 * The list of pieces is the kernel's parameter.  In host memory it would come over the link first, once for each thread block,
 * while nothing else does: of batches of 16 MiB that took 1 % in pages of 72 KiB with 16 blocks, and 8 % in pages of 18 KiB
 * with 32.
 * Drivers before 12.1 take 4 KiB of parameters; with them long lists are several launches. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/page_copy.h"

namespace
{

enum { THREADS = 512, LANES = 32, WARPS = THREADS / LANES, IN_FLIGHT = 8, CHUNK = 16, MOST_BLOCKS = 1024 };
enum { SHORT = 160 };
#define LONG_PARAMETERS 12010 /* version of compilers and drivers that take a long list */

static_assert(LANES * IN_FLIGHT * CHUNK == KVS_PAGE_COPY_TILE, "a tile is what a warp has in flight");

template <uint32_t MOST> struct piece_list {
    uint32_t n, n_tiles;
    kvs_page_piece pieces[MOST];
};
static_assert(sizeof(piece_list<SHORT>) <= 4096, "parameters of every driver");

bool takes_long; /* set when the kernels are loaded */

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

template <uint32_t MOST>
__global__ void __launch_bounds__(THREADS) page_copy_kernel(const __grid_constant__ piece_list<MOST> list)
{
    uint32_t first = (uint32_t)((uint64_t)list.n_tiles * blockIdx.x / gridDim.x);
    uint32_t end = (uint32_t)((uint64_t)list.n_tiles * (blockIdx.x + 1) / gridDim.x);
    uint32_t tile = first + threadIdx.x / LANES, at;

    if (tile >= end)
        return;
    for (at = find_piece(list.pieces, list.n, tile); tile < end; tile += WARPS) {
        while (at + 1 < list.n && list.pieces[at + 1].first_tile <= tile)
            at++;
        copy_tile(&list.pieces[at], tile, threadIdx.x % LANES);
    }
}

/* Pieces [n], n <= MOST, in one launch.  Their tiles are numbered from those of the first one on. */
template <uint32_t MOST>
cudaError_t launch(const kvs_page_piece *pieces, uint32_t n, uint32_t n_tiles, uint32_t n_blocks, cudaStream_t stream)
{
    uint32_t useful = (n_tiles + WARPS - 1) / WARPS, grid = n_blocks < useful ? n_blocks : useful;
    piece_list<MOST> list;

    if (n_tiles == 0)
        return cudaSuccess;
    list.n = n;
    list.n_tiles = n_tiles;
    for (uint32_t i = 0; i < n; i++) {
        list.pieces[i] = pieces[i];
        list.pieces[i].first_tile -= pieces[0].first_tile;
    }
    page_copy_kernel<MOST><<<grid, THREADS, 0, stream>>>(list);
    return cudaGetLastError();
}

cudaError_t launch_all(const kvs_page_piece *pieces, uint32_t n, uint32_t n_tiles, uint32_t n_blocks,
                       cudaStream_t stream)
{
    cudaError_t e = cudaSuccess;

#if CUDART_VERSION >= LONG_PARAMETERS
    if (takes_long && n > SHORT)
        return launch<KVS_PAGE_COPY_PIECES>(pieces, n, n_tiles, n_blocks, stream);
#endif
    for (uint32_t at = 0; at < n && e == cudaSuccess; at += SHORT) {
        uint32_t k = n - at < (uint32_t)SHORT ? n - at : (uint32_t)SHORT,
                 end = at + k < n ? pieces[at + k].first_tile : n_tiles;

        e = launch<SHORT>(pieces + at, k, end - pieces[at].first_tile, n_blocks, stream);
    }
    return e;
}

} // namespace

extern "C" kvs_status kvs_page_copy_cuda_init(kvs_err *err)
{
    cudaFuncAttributes attributes;
    int version = 0;
    cudaError_t e = cudaFuncGetAttributes(&attributes, page_copy_kernel<SHORT>);

#if CUDART_VERSION >= LONG_PARAMETERS
    if (e == cudaSuccess)
        e = cudaDriverGetVersion(&version);
    takes_long = version >= LONG_PARAMETERS;
    if (e == cudaSuccess && takes_long)
        e = cudaFuncGetAttributes(&attributes, page_copy_kernel<KVS_PAGE_COPY_PIECES>);
#endif
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(page_copy)", e);
}

extern "C" kvs_status kvs_page_copy_cuda(const kvs_page_piece *pieces, uint32_t n, uint32_t n_tiles, uint32_t n_blocks,
                                         CUstream_st *stream, kvs_err *err)
{
    cudaError_t e;

    if (n == 0 || n > KVS_PAGE_COPY_PIECES || n_tiles == 0)
        return kvs_fail(err, KVS_E_INVALID, "page_copy: %" PRIu32 " pieces of %" PRIu32 " tiles are not 1..%d", n,
                        n_tiles, KVS_PAGE_COPY_PIECES);
    if (n_blocks == 0 || n_blocks > MOST_BLOCKS)
        return kvs_fail(err, KVS_E_INVALID, "page_copy: %" PRIu32 " thread blocks are not 1..%d", n_blocks,
                        MOST_BLOCKS);
    e = launch_all(pieces, n, n_tiles, n_blocks, stream);
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "page_copy launch", e);
}
