#ifndef KVS_KERNELS_PAGE_COPY_H
#define KVS_KERNELS_PAGE_COPY_H

/* Page copy: many short pieces between pinned host memory and device memory by a kernel, where a copy engine would spend
 * more time on each piece than on its bytes.
 *
 * Knows addresses and lengths.  Does not know blocks, planes or queues.
 * Threads: any; the stream decides the order.
 * Ownership: what the pieces point to stays as it is until the stream has passed the launch. */

#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum {
    KVS_PAGE_COPY_PIECES = 1024,       /* of a call: they travel as a kernel's parameters */
    KVS_PAGE_COPY_TILE = 4096,         /* bytes a warp has on their way at once: 32 lanes x 8 x 16 bytes */
    KVS_PAGE_COPY_MAX_BYTES = 1 << 30, /* of a piece */
};

typedef struct kvs_page_piece {
    void *dst;
    const void *src;
    uint32_t bytes;
    uint32_t first_tile; /* set by kvs_page_copy_plan */
} kvs_page_piece;

/* Number the tiles of all pieces.  Returns how many there are; 0: a piece that a kernel cannot copy (an address or a
 * length that is no multiple of 16, or too long), or nothing to copy. */
uint32_t kvs_page_copy_plan(kvs_page_piece *pieces, uint32_t n);

/* dst[0..bytes) = src[0..bytes) for each of the pieces [n], n <= KVS_PAGE_COPY_PIECES, planned, by at most n_blocks thread
 * blocks, in no order.  pieces: the host's, read before the call returns; sources and destinations are pinned host memory or
 * device memory.  Does not wait.
 * E_INVALID: n or n_blocks is 0 or too large; E_DEVICE: a launch was refused; a part of the pieces may be queued. */
kvs_status kvs_page_copy_cuda(const kvs_page_piece *pieces, uint32_t n, uint32_t n_tiles, uint32_t n_blocks,
                              struct CUstream_st *stream, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
