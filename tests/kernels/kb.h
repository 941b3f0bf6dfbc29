#ifndef KVS_TESTS_KERNELS_KB_H
#define KVS_TESTS_KERNELS_KB_H

/* What kernels-bench offers to the operations that it measures: a pool of at least 64 GiB, views of it in both layouts,
 * and a clock.
 *
 *   strided:     block b of layer l at (b * 61 + l) * page        as the pool has it
 *   contiguous:  block b of layer l at (l * n_blocks + b) * page  as one tensor a layer has it
 *
 * A figure is the median time of one call out of graphs of several, each with blocks and a layer of its own, so that
 * nothing is in the cache; the two layouts take turns.  The bound is what the bytes take at the rate of a plain copy
 * that was measured in the same run, or the operations at 790 TFLOP/s, whichever is more.
 *
 * Knows CUDA's memory and streams.  Knows no operation.  Single thread; a failing CUDA call ends the program. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/view.h"
#include "proto/status.h"
#include "tests/support/random.h"

struct CUstream_st;

enum { KB_LAYERS = 61, KB_TOKENS = 64, KB_NAME = 64 };

typedef struct kb {
    struct CUstream_st *stream;
    uint8_t *pool; /* filled with random bf16 */
    uint64_t pool_bytes;
    double copy_rate, flop_rate; /* a second */
    rnd r;
    bool json;
    uint32_t n_rows;
    void *taken[256]; /* by kb_alloc */
    uint32_t n_taken;
} kb;

typedef struct kb_op {
    const char *name;
    void (*run)(kb *b);
} kb_op;

/* Device memory until the operation is through; kb_in: with a copy of host memory. */
void *kb_alloc(kb *b, uint64_t bytes);
void *kb_in(kb *b, const void *host, uint64_t bytes);
void *kb_random(kb *b, uint64_t bytes); /* bf16 of -1.7..1.7 */

uint64_t kb_page_bytes(uint32_t format); /* 64 tokens, rounded up as the format wants it */
uint32_t kb_n_blocks(const kb *b, uint32_t format);
/* A layer of the pool as if it held 61 layers of that format. */
kvs_view kb_view(const kb *b, uint32_t format, uint32_t layer, bool strided);
/* Layer of a turn: no two that follow one another are neighbours. */
uint32_t kb_layer(uint32_t turn);
/* n random numbers below `below`, no two the same: the caller's, by malloc; and in device memory. */
uint64_t *kb_pick(kb *b, uint32_t n, uint64_t below);
int32_t *kb_ids(kb *b, uint32_t n, uint32_t below);
int64_t *kb_slots(kb *b, uint32_t n, uint64_t below);

/* Queue call `turn` on b->stream. */
typedef kvs_status (*kb_call)(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err);
typedef struct kb_work {
    const char *op;
    char shape[KB_NAME];
    kb_call call;
    void *args;
    uint32_t turns; /* calls of a graph */
    uint64_t bytes; /* that one call reads and writes */
    double flop;
    bool no_view; /* there is one layout only */
} kb_work;
void kb_measure(kb *b, const kb_work *w);

__attribute__((noreturn, format(printf, 1, 2))) void kb_die(const char *fmt, ...);

#endif
