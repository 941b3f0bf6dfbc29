#ifndef KVS_TESTS_KERNELS_KT_WRITES_H
#define KVS_TESTS_KERNELS_KT_WRITES_H

/* The cases that every write through a slot mapping has: they differ in their arguments and in what a token becomes.
 *
 * Knows pools and slots.  Single thread; memory is the case's. */

#include "tests/kernels/kt_pool.h"

/* A case under way. */
typedef struct kt_write {
    kt_pool pool;
    kvs_view view;  /* of plane 0 in the shape's layer */
    int64_t *slots; /* the test's copy; `n` of them are tokens, more may follow */
    const int64_t *dev_slots;
    uint32_t n, bad, *word;
    uint8_t *rows; /* the operation's own: what is written, on the test's side */
    void *args;    /* the operation's argument struct */
    uint64_t extra[8];
} kt_write;

typedef struct kt_write_op {
    kt_shape (*shape)(kt *k, uint64_t max_bytes); /* random */
    void (*fit)(kt *k, kt_shape *s);              /* make the pages of any shape the operation's; NULL: nothing to do */
    uint32_t format, row_bytes;                   /* of the fixed shapes */
    void (*make)(kt *k, kt_write *w);             /* rows and args, from pool, view and slots */
    void (*expect)(const kt_write *w, uint32_t token, uint64_t block, uint32_t at); /* a token into the pool's `want` */
    kvs_status (*launch)(kt *k, void *write, kvs_err *err);
} kt_write_op;

/* Sources: n rows of row_bytes at a pitch of their own, `align` bytes aligned or exactly 16; *ret_host is row 0 in the
 * test's memory, filled by the caller before kt_source_put, which returns it in the operation's. */
typedef struct kt_source {
    uint8_t *host, *all;
    uint64_t stride, front, bytes;
} kt_source;
kt_source kt_source_make(kt *k, uint32_t n, uint64_t row_bytes, uint32_t align);
uint8_t *kt_source_put(kt *k, const kt_source *s);

bool kt_write_random(kt *k, const kt_write_op *op);
bool kt_write_every_layer(kt *k, const kt_write_op *op);
bool kt_write_far(kt *k, const kt_write_op *op);
bool kt_write_nothing(kt *k, const kt_write_op *op);
bool kt_write_replayed(kt *k, const kt_write_op *op);
bool kt_write_shape(kt *k, const kt_write_op *op, const kt_shape *s, uint32_t n, bool with_bad);

/* The five cases above as kt_op's own, for operation `op` (a kt_write_op). */
#define KT_WRITE_CASES(op)                                                                                             \
    static bool random_shape(kt *k)                                                                                    \
    {                                                                                                                  \
        return kt_write_random(k, &(op));                                                                              \
    }                                                                                                                  \
    static bool every_layer(kt *k)                                                                                     \
    {                                                                                                                  \
        return kt_write_every_layer(k, &(op));                                                                         \
    }                                                                                                                  \
    static bool beyond_4_gib(kt *k)                                                                                    \
    {                                                                                                                  \
        return kt_write_far(k, &(op));                                                                                 \
    }                                                                                                                  \
    static bool no_tokens(kt *k)                                                                                       \
    {                                                                                                                  \
        return kt_write_nothing(k, &(op));                                                                             \
    }                                                                                                                  \
    static bool replayed_with_other_slots(kt *k)                                                                       \
    {                                                                                                                  \
        return kt_write_replayed(k, &(op));                                                                            \
    }
#define KT_WRITE_FIXED                                                                                                 \
    {"every layer of 1, 3 and 61", every_layer, false}, {"beyond 4 GiB", beyond_4_gib, true},                          \
        {"no tokens", no_tokens, false},                                                                               \
    {                                                                                                                  \
        "replayed with other slots", replayed_with_other_slots, false                                                  \
    }

#endif
