#ifndef KVS_DAEMON_SUMS_H
#define KVS_DAEMON_SUMS_H

/* Sums: checksums of several blocks at once, by threads that sleep in between.
 *
 * Knows XXH3-64 and memory.  Does not know blocks, devices or what a sum is for.
 * Threads: one caller at a time; it takes part, and returns when all are done.  A link to a GPU is faster than one
 * thread can read what came over it.
 * Ownership: items and the memory they name are borrowed for the call. */

#include <stdint.h>

#include "proto/status.h"

typedef struct sums sums;

typedef struct sums_item {
    const void *at;
    uint64_t bytes;
    uint64_t sum; /* out */
} sums_item;

kvs_status sums_create(sums **ret, unsigned n_threads, kvs_err *err);
void sums_run(sums *s, sums_item *items, uint32_t n);
void sums_destroy(sums *s); /* NULL is fine */

/* The sum of one, in the calling thread. */
uint64_t sums_one(const void *at, uint64_t bytes);

#endif
