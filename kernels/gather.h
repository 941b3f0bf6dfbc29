#ifndef KVS_KERNELS_GATHER_H
#define KVS_KERNELS_GATHER_H

/* Which token of the cache belongs into which row of a dense destination: what all gathers have in common.
 *
 *   destination rows   | sequence 0 ...... | sequence 1 ... |      row_starts = {0, 6, 10}
 *   tokens             | first_token[0]... | first_token[1].|
 *   pages              block_table[0][...]   block_table[1][...]
 *
 * Knows lists, tables and their bounds.  Knows no formats.  Any thread; all memory is the caller's; usable from device
 * code, where every pointer is device memory.  Contents of the lists are never trusted: a row whose place they do not
 * give is left as it is. */

#include <stddef.h>
#include <stdint.h>

#include "kernels/view.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/*   row_starts   [n_seqs + 1], or [n_seqs] with open_end: first destination row of each sequence, not decreasing, and
 *                where the last one ends (open_end: at n_rows)
 *   first_token  [n_seqs] token of the sequence that goes into its first row; NULL: 0
 *   block_table  [n_seqs] rows of table_width block ids, table_stride entries apart
 *   n_rows       rows of the destination.  Those before the first sequence and behind the last one are padding
 * A row is bad and left as it is if its token is negative, lies past the table's width or on a block outside
 * 0..n_blocks-1. */
typedef struct kvs_gather_list {
    const int32_t *row_starts, *first_token, *block_table;
    uint64_t table_stride;
    uint32_t n_seqs, table_width, n_rows;
    uint32_t open_end; /* 0 or 1 */
} kvs_gather_list;

typedef enum kvs_gather_found { KVS_GATHER_PADDING, KVS_GATHER_BAD, KVS_GATHER_TOKEN } kvs_gather_found;

/* Sequences that start at or before `row`: the last of them is the one that has it. */
static inline KVS_HD uint32_t kvs_gather_begun(const kvs_gather_list *g, uint32_t row)
{
    uint32_t low = 0, high = g->n_seqs;

    while (low < high) {
        uint32_t mid = low + (high - low) / 2;

        if ((int64_t)g->row_starts[mid] <= (int64_t)row)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

/* Where row `row` (< n_rows) comes from; *ret is written for KVS_GATHER_TOKEN only, its page is a block id. */
static inline KVS_HD kvs_gather_found kvs_gather_find(const kvs_gather_list *g, const kvs_view *v, uint32_t row,
                                                      kvs_site site, kvs_view_place *ret)
{
    uint32_t seq = kvs_gather_begun(g, row);
    kvs_view_place at;
    int64_t token;
    int32_t id;

    if (seq == 0 || (!g->open_end && (int64_t)row >= (int64_t)g->row_starts[g->n_seqs]))
        return KVS_GATHER_PADDING;
    seq--;
    token = (int64_t)row - g->row_starts[seq] + (g->first_token != NULL ? g->first_token[seq] : 0);
    if (token < 0)
        return KVS_GATHER_BAD;
    at = kvs_view_split(v, (uint64_t)token, site);
    if (at.page >= g->table_width)
        return KVS_GATHER_BAD;
    id = g->block_table[seq * g->table_stride + at.page];
    if (id < 0 || (uint32_t)id >= v->n_blocks)
        return KVS_GATHER_BAD;
    ret->page = (uint32_t)id;
    ret->token = at.token;
    return KVS_GATHER_TOKEN;
}

/* E_INVALID, E_LIMIT: a list that is missing or cannot be addressed; no memory behind the pointers is read. */
kvs_status kvs_gather_list_check(const kvs_gather_list *g, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
