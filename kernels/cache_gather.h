#ifndef KVS_KERNELS_CACHE_GATHER_H
#define KVS_KERNELS_CACHE_GATHER_H

/* Cache gather: rows of paged sequences into a dense array, bit for bit.
 *
 * Knows views and gather lists.  Knows no number formats.  Any thread; all memory is the caller's. */

#include "kernels/gather.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t and CUstream are pointers to this */

/* Copy the first entry_bytes of a token's row into each destination row that has a token.
 *   view         any format whose pages hold rows alone (no indexer_fp8, fp8_blk*: kvs_indexer_gather,
 *                kvs_blockwise_gather)
 *   list         which token goes where (gather.h)
 *   dst          [list.n_rows] rows, dst_stride bytes apart; any alignment
 *   entry_bytes  1..view.row_bytes; never taken from a pitch
 *   ret_bad      rows that the tables gave no place for: left as they are and counted here
 * dst[r][0..entry_bytes) = view.row(place of r).  Rows of padding are left as they are.
 * E_UNSUPPORTED: the format.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_cache_gather_args {
    kvs_view view;
    kvs_gather_list list;
    uint8_t *dst;
    uint64_t dst_stride;
    uint32_t entry_bytes;
} kvs_cache_gather_args;
kvs_status kvs_cache_gather(const kvs_cache_gather_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.  16 bytes at a time where
 * base, pitches and entry are multiples of 16.  ret_bad: one word of device memory, set by the call; NULL: not
 * counted. */
kvs_status kvs_cache_gather_cuda(const kvs_cache_gather_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                 kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_cache_gather_check(const kvs_cache_gather_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
