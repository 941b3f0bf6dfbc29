#ifndef KVS_DAEMON_SUMS_H
#define KVS_DAEMON_SUMS_H

/* Sums: checksums of many blocks by several threads, while their owner goes on.
 *
 * Knows XXH3-64 and memory.  Does not know blocks, devices or what a sum is for.
 * Threads: put and finish by one thread; the sums are taken by others, which sleep in between, and by finish.  A link to a
 * GPU is faster than one thread can read what came over it.
 * Ownership: memory and results are borrowed from put until finish returns. */

#include <stdint.h>

#include "proto/status.h"

typedef struct sums sums;

kvs_status sums_create(sums **ret, unsigned n_threads, kvs_err *err);
/* Take the sum of `bytes` at `at` some time before finish returns. */
void sums_put(sums *s, const void *at, uint64_t bytes, uint64_t *ret);
void sums_finish(sums *s);  /* all that was put is there */
void sums_destroy(sums *s); /* NULL is fine */

/* The sum of one, in the calling thread. */
uint64_t sums_one(const void *at, uint64_t bytes);

#endif
