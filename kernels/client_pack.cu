/* The packing kernel of libkvstride: pages of blocks from an engine's tensors, one a layer, into contiguous slots, or back.
 *
 * It runs beside an engine's own kernels, which it must not delay.  One thread block a multiprocessor, few registers, and the
 * same work for each: where the engine fills the GPU, every multiprocessor then has the same part of it left to do, and none
 * keeps the engine's next kernel waiting for the last of its blocks.
 *
 * A warp copies a tile at a time; consecutive warps take consecutive tiles of a block, so that the side of the slots is one
 * run.  The bytes pass once, so they are marked as the first to leave the caches.
 * Ids and slots were checked by the one who launches it. */
#include "kernels/client_pack_params.h"

namespace
{

enum {
    LANES = 32,
    WARPS = CLIENT_PACK_THREADS / LANES,
    DEEP = 8,
    ON_SM = 4 /* there would be room for: few registers */
};

/* n: of 16 bytes. */
__device__ void copy(uint4 *dst, const uint4 *src, uint32_t n, uint32_t lane)
{
    for (uint32_t at = lane; at < n; at += LANES * DEEP) {
        uint4 v[DEEP];

#pragma unroll
        for (uint32_t k = 0; k < DEEP; k++)
            if (at + k * LANES < n)
                v[k] = __ldcs(src + at + k * LANES);
#pragma unroll
        for (uint32_t k = 0; k < DEEP; k++)
            if (at + k * LANES < n)
                __stcs(dst + at + k * LANES, v[k]);
    }
}

/* Tile i of all pages: those of a pair follow one another, and so do the tiles of a page. */
__device__ void copy_tile(const client_pack_params &p, uint32_t i, uint32_t lane)
{
    uint32_t page_no = i / p.tiles, pair_no = page_no / p.n_planes;
    uint64_t at = (i - (uint64_t)page_no * p.tiles) * p.tile_bytes;
    client_pack_pair pair = p.pairs[pair_no];
    client_pack_plane plane = p.planes[page_no - pair_no * p.n_planes];
    uint64_t page = plane.base + pair.block * plane.stride + at;
    uint64_t slot = p.staging + pair.slot * p.slot_stride + plane.offset + at;
    uint64_t left = at < plane.bytes ? plane.bytes - at : 0; /* other planes may have longer pages */

    copy(reinterpret_cast<uint4 *>(p.gather ? slot : page), reinterpret_cast<uint4 *>(p.gather ? page : slot),
         (uint32_t)((left < p.tile_bytes ? left : p.tile_bytes) / sizeof(uint4)), lane);
}

} // namespace

extern "C" __global__ void __launch_bounds__(CLIENT_PACK_THREADS, ON_SM)
    kvs_client_pack(const __grid_constant__ client_pack_params p)
{
    uint32_t n = p.n_pairs * p.n_planes * p.tiles;

    for (uint32_t i = blockIdx.x * WARPS + threadIdx.x / LANES; i < n; i += gridDim.x * WARPS)
        copy_tile(p, i, threadIdx.x % LANES);
}
