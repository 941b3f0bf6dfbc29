#ifndef KVS_KERNELS_INDEX_CONVERT_H
#define KVS_KERNELS_INDEX_CONVERT_H

/* Token ids of a request, as an indexer chooses them, into indices of the cache.
 *
 *   token of the request --block table--> (block, token of the page) --> logical index or physical row (index.h)
 *
 * Knows tables and bounds of a view.  Makes no addresses and reads no cache.  Any thread; all memory is the
 * caller's. */

#include "kernels/index.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* Convert n_tokens lists of topk token ids each.
 *   view         of the cache; physical: its block_stride is a whole number of its rows
 *   request      [n_tokens] row of the block table that a list is of
 *   tokens       [n_tokens] lists of topk ids, token_stride entries apart; below 0: no token
 *   block_table  [n_requests] rows of table_width block ids, table_stride entries apart
 *   workspace    [n_tokens] or NULL; physical only.  From 0 up: the list's tokens lie in a gathered workspace, one row
 *                a token, from this row on; the block table is not asked.  Below 0: as without it
 *   logical, physical  [n_tokens] lists of topk, out_stride entries apart: one of them, the other NULL
 *   ret_bad      ids that have no place: request, page or block out of bounds.  They become -1 and are counted here
 * logical = block * tokens_per_block + token; physical = block * (block_stride / row_bytes) + token; -1 stays -1.
 * E_UNSUPPORTED: a stride that is no whole number of rows.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_index_convert_args {
    kvs_view view;
    const int32_t *request, *tokens, *block_table, *workspace;
    kvs_logical_index *logical;
    kvs_physical_row *physical;
    uint64_t token_stride, table_stride, out_stride;
    uint32_t n_tokens, topk, n_requests, table_width;
} kvs_index_convert_args;
kvs_status kvs_index_convert(const kvs_index_convert_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.
 * ret_bad: one word of device memory, set by the call; NULL: not counted. */
kvs_status kvs_index_convert_cuda(const kvs_index_convert_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                  kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_index_convert_check(const kvs_index_convert_args *a, kvs_err *err);

/* Where token `id` (>= 0) of list `t` is, as a logical index; none if it has no place. */
static inline KVS_HD kvs_logical_index kvs_index_convert_one(const kvs_index_convert_args *a, uint32_t t, int32_t id)
{
    const kvs_view_place at = kvs_view_split(&a->view, (uint32_t)id, KVS_SITE_INDEX_CONVERT);
    const int32_t request = a->request[t];
    kvs_logical_index none = {-1};
    int32_t block;

    if (request < 0 || (uint32_t)request >= a->n_requests || at.page >= a->table_width)
        return none;
    block = a->block_table[(uint32_t)request * a->table_stride + at.page];
    return block < 0 ? none : kvs_logical_of(&a->view, (uint32_t)block, at.token);
}

#ifdef __cplusplus
}
#endif
#endif
