#ifndef KVS_KERNELS_VIEW_H
#define KVS_KERNELS_VIEW_H

/* A view: one plane of every slot of a region, and the only place where an address is made of a block id.
 *
 *   slot b of the region:  | plane 0 | plane 1 | ... |        view of plane 1: base = region + offset of plane 1,
 *                          ^ block_stride ^                   page(b) = base + b * block_stride
 *
 * Knows strides and bounds.  Knows no keys, no layouts of whole blocks, no device.  Any thread; borrowed memory.
 * Nothing about a view may be derived from anything else in it: not the tokens of a page from its pitch, not the pitch
 * from the page's bytes. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__CUDACC__)
#define KVS_HD __host__ __device__
#else
#define KVS_HD
#endif

typedef struct kvs_view {
    uint8_t *base;             /* first byte of page 0; 16-byte aligned */
    uint64_t block_stride;     /* bytes from page b to page b + 1; multiple of 16, below 2^40 */
    uint64_t page_bytes;       /* bytes of one page that belong to this view */
    uint32_t n_blocks;         /* ids are 0..n_blocks-1 */
    uint32_t tokens_per_block; /* rows of a page */
    uint32_t row_bytes;        /* bytes from row to row inside a page */
    uint32_t format;           /* kvs_format */
} kvs_view;

/* Row `token` (< tokens_per_block) of page `block` (< n_blocks).  64-bit throughout. */
static inline KVS_HD uint8_t *kvs_view_row(const kvs_view *v, uint32_t block, uint32_t token)
{
    return v->base + (uint64_t)block * v->block_stride + (uint64_t)token * v->row_bytes;
}

#ifdef __cplusplus
}
#endif
#endif
