#ifndef KVS_DAEMON_SUMS_H
#define KVS_DAEMON_SUMS_H

/* Sums: checksums of many blocks by several threads, while their owner goes on and while the blocks still come in.
 *
 * Knows XXH3-64 and memory.  Does not know blocks' meaning, devices or what a sum is for.
 * Threads: begin, reach and finish by one thread; the sums are taken by others, which sleep in between, and by finish.  A
 * link to a GPU is faster than one thread can read what came over it.  Two thirds of the threads take part, and one more each
 * time that they are late.
 * Ownership: memory and results are borrowed from begin until finish returns.
 *
 * The sum of up to SUMS_PART bytes is their XXH3-64.  That of more is the XXH3-64 of the sums of its parts in order, as
 * little-endian words: parts of SUMS_PART bytes, of a multiple of it if there would be more than SUMS_PARTS.  So several
 * threads share one block, and the last block of a job is waited for no longer than others. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

enum { SUMS_PART = 256 << 10, SUMS_PARTS = 64, SUMS_BLOCKS = 256 /* at once */ };
#define SUMS_NONE UINT32_MAX

typedef struct sums sums;

kvs_status sums_create(sums **ret, unsigned n_threads, kvs_err *err);
/* Take the sum of `bytes` at `at` some time before finish returns, but look at no byte before it was reached.  Returns a
 * handle that is good until `bytes` are reached.  SUMS_NONE: every place is taken by a block that is still coming in. */
uint32_t sums_begin(sums *s, const void *at, uint64_t bytes, uint64_t *ret);
/* The first `bytes` of a block are there; from now on they do not change. */
void sums_reach(sums *s, uint32_t handle, uint64_t bytes);
/* It will not be there: its result stays as it is. */
void sums_forget(sums *s, uint32_t handle);
void sums_finish(sums *s);      /* all that was reached to its end is there */
unsigned sums_at_work(sums *s); /* threads that take part now; any thread */
void sums_destroy(sums *s);     /* NULL is fine */

/* The sum of one, in the calling thread. */
uint64_t sums_one(const void *at, uint64_t bytes);

/* The same from the XXH3-64 of its parts, whoever has made them: sums_n_parts of sums_part_bytes, the last one shorter. */
uint64_t sums_part_bytes(uint64_t bytes);
uint32_t sums_n_parts(uint64_t bytes);
uint64_t sums_join(const uint64_t *parts, uint32_t n_parts);

#endif
