#ifndef KVS_KERNELS_INDEX_H
#define KVS_KERNELS_INDEX_H

/* Token indices, of which two kinds are in use, as two types: one taken for the other reads a wrong token without any
 * sign of it, so the compiler refuses to.
 *
 *   logical   block * tokens_per_block + token: what slot mappings and sparse attention carry; the kernel applies the
 *             block stride
 *   physical  block * (block_stride / row_bytes) + token: the row of a flat [rows][row_bytes] array over the pool, for
 *             kernels that know nothing of blocks.  Exists only where block_stride is a whole number of rows
 *
 * Knows pitches and tokens.  Makes no addresses (view.h does).  Any thread; plain values; usable from device code. */

#include "kernels/view.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvs_logical_index {
    int32_t at; /* below 0: no token */
} kvs_logical_index;

typedef struct kvs_physical_row {
    int64_t at; /* below 0: no token */
} kvs_physical_row;

/* Indices of a view: 0 .. this - 1.  Those above 2^31 - 1 cannot be said. */
static inline KVS_HD uint64_t kvs_logical_indices(const kvs_view *v)
{
    return (uint64_t)v->n_blocks * v->tokens_per_block;
}

static inline KVS_HD int kvs_logical_is_good(const kvs_view *v, kvs_logical_index i)
{
    return i.at >= 0 && (uint64_t)i.at < kvs_logical_indices(v);
}

/* No token for a block or a token outside the view, or an index above 2^31 - 1. */
static inline KVS_HD kvs_logical_index kvs_logical_of(const kvs_view *v, uint32_t block, uint32_t token)
{
    const uint64_t at = (uint64_t)block * v->tokens_per_block + token;
    const kvs_logical_index i = {block < v->n_blocks && token < v->tokens_per_block && at <= INT32_MAX ? (int32_t)at
                                                                                                       : -1};

    return i;
}

/* Rows from block to block; 0: block_stride is not a whole number of them, and there are no physical rows. */
static inline KVS_HD uint64_t kvs_physical_rows_a_block(const kvs_view *v)
{
    return v->row_bytes > 0 && v->block_stride % v->row_bytes == 0 ? v->block_stride / v->row_bytes : 0;
}

/* Rows of the flat array: the last block may end before the next one would begin. */
static inline KVS_HD uint64_t kvs_physical_rows(const kvs_view *v)
{
    const uint64_t step = kvs_physical_rows_a_block(v);

    return v->n_blocks == 0 || step == 0 ? 0 : (v->n_blocks - UINT64_C(1)) * step + v->tokens_per_block;
}

/* No token for an index that is not good, or where there are no physical rows. */
static inline KVS_HD kvs_physical_row kvs_physical_of_logical(const kvs_view *v, kvs_logical_index i)
{
    const uint64_t step = kvs_physical_rows_a_block(v);
    kvs_physical_row r = {-1};

    if (step != 0 && kvs_logical_is_good(v, i))
        r.at = (int64_t)((uint64_t)i.at / v->tokens_per_block * step + (uint64_t)i.at % v->tokens_per_block);
    return r;
}

/* No token for a row between the blocks or behind the last one. */
static inline KVS_HD kvs_logical_index kvs_logical_of_physical(const kvs_view *v, kvs_physical_row r)
{
    const uint64_t step = kvs_physical_rows_a_block(v);
    const kvs_logical_index none = {-1};

    if (step == 0 || r.at < 0 || (uint64_t)r.at / step >= v->n_blocks || (uint64_t)r.at % step >= v->tokens_per_block)
        return none;
    return kvs_logical_of(v, (uint32_t)((uint64_t)r.at / step), (uint32_t)((uint64_t)r.at % step));
}

#ifdef __cplusplus
}
#endif
#endif
