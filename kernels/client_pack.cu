/* The packing kernel of libkvstride: pages of blocks from an engine's tensors, one a layer, into contiguous slots, or back.
 *
 * A warp takes a page, 4 KiB at a time; consecutive warps take consecutive planes of a block, so that the side of the slots
 * is one run.  Few thread blocks of few registers: it fits in beside an engine's own kernels, which it must not delay.  The
 * bytes pass once, so they are marked as the first to leave the caches.
 * Ids and slots were checked by the one who launches it. */
#include "kernels/client_pack_params.h"

namespace
{

enum { LANES = 32, WARPS = CLIENT_PACK_THREADS / LANES, DEEP = 8 };

__device__ void copy_page(uint4 *dst, const uint4 *src, uint32_t n, uint32_t lane)
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

} // namespace

extern "C" __global__ void __launch_bounds__(CLIENT_PACK_THREADS)
    kvs_client_pack(const __grid_constant__ client_pack_params p)
{
    uint32_t lane = threadIdx.x % LANES, n = p.n_pairs * p.n_planes;

    for (uint32_t i = blockIdx.x * WARPS + threadIdx.x / LANES; i < n; i += gridDim.x * WARPS) {
        client_pack_pair pair = p.pairs[i / p.n_planes];
        client_pack_plane plane = p.planes[i % p.n_planes];
        uint64_t page = plane.base + pair.block * plane.stride;
        uint64_t slot = p.staging + pair.slot * p.slot_stride + plane.offset;

        copy_page(reinterpret_cast<uint4 *>(p.gather ? slot : page), reinterpret_cast<uint4 *>(p.gather ? page : slot),
                  (uint32_t)(plane.bytes / sizeof(uint4)), lane);
    }
}
