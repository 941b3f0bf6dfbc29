#ifndef KVS_KERNELS_BLOCK_COPY_H
#define KVS_KERNELS_BLOCK_COPY_H

/* Copies of blocks: one layer's pages, or whole slots.
 *
 *   a layer:     view.base = its page 0, page_bytes = its page
 *   whole slots: view.base = slot 0,     page_bytes = the slot            (format raw)
 *
 * Base, pitch and length are three numbers: a copy of page_bytes never grows to the pitch, where the next layer is.
 *
 * Knows views.  Knows no formats: bytes are moved.  Any thread; all memory is the caller's. */

#include "kernels/view.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* page(pair[1]) of `to` = page(pair[0]) of `from`, page_bytes of it, for each pair.
 *   from, to   of any format and any pitch; equal page_bytes; usually the same view
 *   pairs      [n_pairs][2] int32: a block of `from`, a block of `to`; one of them negative: the pair is skipped
 *   ret_bad    pairs with a block that is not below n_blocks: skipped and counted here
 * The C function copies in the order of the list.  On a GPU there is none: where a block is written twice, or written
 * and read, it holds a mixture.
 * E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_block_copy_args {
    kvs_view from, to;
    const int32_t *pairs;
    uint32_t n_pairs;
} kvs_block_copy_args;
kvs_status kvs_block_copy(const kvs_block_copy_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.  ret_bad: one word of
 * device memory, set by the call; NULL: not counted. */
kvs_status kvs_block_copy_cuda(const kvs_block_copy_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                               kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_block_copy_check(const kvs_block_copy_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
