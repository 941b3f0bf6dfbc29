#ifndef KVS_TESTS_KERNELS_KT_POOL_H
#define KVS_TESTS_KERNELS_KT_POOL_H

/* A pool of blocks of any shape, and views of its planes.
 *
 *   | front | slot 0 | slot 1 | ... | slot n-1 | tail |
 *   slot:   | layer 0: plane 0, gap, plane 1, gap, ... | layer 1: ... | slot_pad |      (or the last layer first)
 *
 * Every byte of it is random and compared: planes of other layers, gaps, padding of rows and pages, front and tail. 
 * The addresses here are the test's own arithmetic and not that of kernels/view.h.
 *
 * Knows views and formats.  Single thread; memory is the case's. */

#include "tests/kernels/kt.h"

enum { KT_MAX_PLANES = 3, KT_FAR_IDS = 8 };

typedef struct kt_plane {
    uint32_t format;
    uint32_t row_bytes; /* pitch of the rows */
    uint64_t page_bytes;
} kt_plane;

typedef struct kt_shape {
    uint32_t n_layers, layer; /* of the layers, the one that a case looks at */
    uint32_t n_blocks, tokens;
    uint32_t n_planes; /* of each layer */
    kt_plane plane[KT_MAX_PLANES];
    uint64_t gap, slot_pad, front; /* bytes, multiples of 16 */
    bool descending;               /* the last layer comes first */
    bool far;                      /* blocks beyond 2^32 bytes: n_blocks and slot_pad are chosen, memory is sparse */
} kt_shape;

typedef struct kt_pool {
    kt_shape shape;
    kt_buf buf;
    uint64_t slot_bytes;
    uint32_t far_id[KT_FAR_IDS]; /* far: the blocks that exist */
} kt_pool;

/* A random shape with `format` as plane 0 (row pitch: the format's, or row_bytes where that is open), sometimes with a
 * foreign plane beside it, of any number of layers and tokens, at most about max_bytes long. */
kt_shape kt_shape_random(kt *k, uint32_t format, uint32_t row_bytes, uint64_t max_bytes);
/* The smallest shape: one layer, no padding. */
kt_shape kt_shape_plain(uint32_t format, uint32_t row_bytes, uint32_t tokens, uint32_t n_blocks);
/* 61 layers, blocks up to 4.5 GB from the first, the view in the last layer. */
kt_shape kt_shape_far(uint32_t format, uint32_t row_bytes, uint32_t tokens);
/* Add a plane to each layer, pages of tokens * row (+ tail), rounded up to 16; returns its number. */
uint32_t kt_shape_add(kt_shape *s, uint32_t format, uint32_t row_bytes);

kt_pool kt_pool_make(kt *k, const kt_shape *s);
/* The view that an operation gets, in the operation's memory. */
kvs_view kt_view(kt *k, const kt_pool *p, uint32_t layer, uint32_t plane);
/* Page `block` in buf.want, and its offset there. */
uint8_t *kt_page(const kt_pool *p, uint32_t layer, uint32_t plane, uint64_t block);
uint8_t *kt_row(const kt_pool *p, uint32_t layer, uint32_t plane, uint64_t block, uint32_t token);
uint64_t kt_plane_offset(const kt_pool *p, uint32_t layer, uint32_t plane); /* in a slot */

/* Any block that exists. */
uint32_t kt_block(kt *k, const kt_pool *p);
/* n different slots (block * tokens + token); with_bad: among them negative ones and ones past the end; *ret_bad is the
 * number of the latter. */
int64_t *kt_slots(kt *k, const kt_pool *p, uint32_t n, bool with_bad, uint32_t *ret_bad);
bool kt_slot_good(const kt_pool *p, int64_t slot);

#endif
