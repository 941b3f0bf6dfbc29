#ifndef KVS_TESTS_KERNELS_KT_LIST_H
#define KVS_TESTS_KERNELS_KT_LIST_H

/* Gather lists of any shape over a pool, and what must come of each destination row, found by walking the sequences.
 *
 * Knows kernels/gather.h's arguments and pools.  Single thread; memory is the case's. */

#include "kernels/gather.h"
#include "tests/kernels/kt_pool.h"

typedef struct kt_place {
    bool token; /* else the row is left as it is */
    uint32_t block, at;
} kt_place;

typedef struct kt_list {
    kvs_gather_list args; /* in the operation's memory */
    kt_place *want;       /* [n_rows] */
    uint32_t bad;         /* rows that must be counted */
    uint32_t max_len;     /* rows of the longest sequence that a refill may have */
} kt_list;

/* At most n_seqs sequences of 0..max_len rows; padding before, behind; garbage in the table past each sequence;
 * with_bad: in it too, and starts beyond its width. */
kt_list kt_list_make(kt *k, const kt_pool *p, uint32_t n_seqs, uint32_t max_len, bool with_bad);
/* Other contents in the same memory, for a replay. */
void kt_list_refill(kt *k, const kt_pool *p, kt_list *l, bool with_bad);

/* A destination: rows of row_bytes at a pitch of its own, `align` bytes aligned or exactly 16, random before the call.
 * */
typedef struct kt_rows {
    kt_buf buf;
    uint64_t front, stride;
} kt_rows;
kt_rows kt_rows_make(kt *k, const char *name, uint32_t n_rows, uint64_t row_bytes, uint32_t align);
uint8_t *kt_rows_dev(const kt_rows *r);
uint8_t *kt_rows_want(const kt_rows *r, uint32_t row);

#endif
