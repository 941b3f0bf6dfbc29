#ifndef KVS_TESTS_KERNELS_KT_GATHERS_H
#define KVS_TESTS_KERNELS_KT_GATHERS_H

/* The cases that every gather has: they differ in their arguments and in what a token becomes.
 *
 * Knows pools, lists and destinations.  Single thread; memory is the case's. */

#include "tests/kernels/kt_list.h"

enum { KT_GATHER_OUTPUTS = 2 };

/* A case under way: what the common part made, and what the operation made of it. */
typedef struct kt_gather {
    kt_pool pool;
    kt_list list;
    kvs_view view;
    kt_rows out[KT_GATHER_OUTPUTS];
    uint32_t n_out, *word;
    void *args;        /* the operation's argument struct */
    uint64_t extra[4]; /* the operation's own choices */
} kt_gather;

typedef struct kt_gather_op {
    /* A shape of this operation: random, at most max_bytes; or, shape != NULL, that one with this format and its page.
     * */
    kt_shape (*shape)(kt *k, uint64_t max_bytes);
    void (*fit)(kt_shape *s);          /* make the pages of any shape those of the format; NULL: nothing to do */
    uint32_t format, row_bytes;        /* of the fixed shapes */
    void (*make)(kt *k, kt_gather *g); /* outputs and args, from pool, list and view */
    void (*expect)(const kt_gather *g, uint32_t row, kt_place at); /* a token into the outputs' `want` */
    kvs_status (*launch)(kt *k, void *gather, kvs_err *err);
} kt_gather_op;

/* One case: at most n_seqs sequences of up to max_len tokens. */
bool kt_gather_shape(kt *k, const kt_gather_op *op, const kt_shape *s, uint32_t n_seqs, uint32_t max_len,
                     bool with_bad);
bool kt_gather_random(kt *k, const kt_gather_op *op);
bool kt_gather_every_layer(kt *k, const kt_gather_op *op);
bool kt_gather_far(kt *k, const kt_gather_op *op);
bool kt_gather_nothing(kt *k, const kt_gather_op *op);
bool kt_gather_replayed(kt *k, const kt_gather_op *op);

/* The five cases above as kt_op's own, for operation `op` (a kt_gather_op). */
#define KT_GATHER_CASES(op)                                                                                            \
    static bool random_shape(kt *k)                                                                                    \
    {                                                                                                                  \
        return kt_gather_random(k, &(op));                                                                             \
    }                                                                                                                  \
    static bool every_layer(kt *k)                                                                                     \
    {                                                                                                                  \
        return kt_gather_every_layer(k, &(op));                                                                        \
    }                                                                                                                  \
    static bool beyond_4_gib(kt *k)                                                                                    \
    {                                                                                                                  \
        return kt_gather_far(k, &(op));                                                                                \
    }                                                                                                                  \
    static bool no_rows(kt *k)                                                                                         \
    {                                                                                                                  \
        return kt_gather_nothing(k, &(op));                                                                            \
    }                                                                                                                  \
    static bool replayed_with_other_lists(kt *k)                                                                       \
    {                                                                                                                  \
        return kt_gather_replayed(k, &(op));                                                                           \
    }
#define KT_GATHER_FIXED                                                                                                \
    {"every layer of 1, 3 and 61", every_layer, false}, {"beyond 4 GiB", beyond_4_gib, true},                          \
        {"no rows, no sequences", no_rows, false},                                                                     \
    {                                                                                                                  \
        "replayed with other lists", replayed_with_other_lists, false                                                  \
    }

#endif
