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

#include "kernels/view_site.h"

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
#ifdef KVS_MUTATION
    uint32_t mutant_site, mutant_kinds; /* a site and a set of enum kvs_mutant: what that site gets wrong */
    uint64_t mutant_offset;             /* of the base in its region, for KVS_MUTANT_BASE */
#endif
} kvs_view;

/* A strided [T][h][n] operand: byte strides, any alignment that is a multiple of its element. */
typedef struct kvs_strided {
    uint8_t *base;
    uint64_t token_stride, head_stride;
} kvs_strided;

#ifdef KVS_MUTATION
static inline KVS_HD int kvs_mutated(const kvs_view *v, kvs_site site, uint32_t kind)
{
    return v->mutant_site == (uint32_t)site && (v->mutant_kinds & kind) != 0;
}
#endif

/* What kernels/ asks of a view, each with the place that asks (view_site.h).  Tokens, pages and lengths come from here
 * and nowhere else, so that the mutation build can answer wrongly at one place and see whether a test notices. */

/* Token `index` of a list of pages, or of a slot mapping: index / tokens_per_block, index % tokens_per_block. */
typedef struct kvs_view_place {
    uint64_t page;
    uint32_t token;
} kvs_view_place;

static inline KVS_HD uint32_t kvs_view_tokens(const kvs_view *v, kvs_site site)
{
#ifdef KVS_MUTATION
    if (kvs_mutated(v, site, KVS_MUTANT_TOKENS))
        return (uint32_t)(v->block_stride / v->row_bytes);
#endif
    (void)site;
    return v->tokens_per_block;
}

static inline KVS_HD kvs_view_place kvs_view_split(const kvs_view *v, uint64_t index, kvs_site site)
{
    const uint32_t tokens = kvs_view_tokens(v, site), small = (uint32_t)index;
    kvs_view_place p = {small / tokens, small % tokens};

    if (index > UINT32_MAX) { /* rare, and many times as slow on a GPU */
        p.page = index / tokens;
        p.token = (uint32_t)(index % tokens);
    }
    return p;
}

/* First byte of page `block` (< n_blocks).  64-bit throughout. */
static inline KVS_HD uint8_t *kvs_view_page(const kvs_view *v, uint64_t block, kvs_site site)
{
#ifdef KVS_MUTATION
    if (kvs_mutated(v, site, KVS_MUTANT_PACKED))
        return v->base + block * v->page_bytes;
    if (kvs_mutated(v, site, KVS_MUTANT_PRODUCT32))
        return v->base + (uint32_t)((uint32_t)block * (uint32_t)v->block_stride);
    if (kvs_mutated(v, site, KVS_MUTANT_BASE))
        return v->base - v->mutant_offset + block * v->block_stride;
#endif
    (void)site;
    return v->base + block * v->block_stride;
}

/* Row `token` (< tokens_per_block) of page `block`. */
static inline KVS_HD uint8_t *kvs_view_row(const kvs_view *v, uint64_t block, uint32_t token, kvs_site site)
{
    return kvs_view_page(v, block, site) + (uint64_t)token * v->row_bytes;
}

/* Block-wise formats keep a second array behind the rows of a page: entry `token` of it, entry_bytes each. */
static inline KVS_HD uint8_t *kvs_view_tail(const kvs_view *v, uint64_t block, uint32_t token, uint32_t entry_bytes,
                                            kvs_site site)
{
    return kvs_view_page(v, block, site) + (uint64_t)kvs_view_tokens(v, site) * v->row_bytes +
           (uint64_t)token * entry_bytes;
}

/* Bytes of a page that a whole-page operation may touch. */
static inline KVS_HD uint64_t kvs_view_length(const kvs_view *v, kvs_site site)
{
#ifdef KVS_MUTATION
    if (kvs_mutated(v, site, KVS_MUTANT_LENGTH))
        return v->block_stride;
#endif
    (void)site;
    return v->page_bytes;
}

#ifdef __cplusplus
}
#endif
#endif
