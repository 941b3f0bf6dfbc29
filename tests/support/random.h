#ifndef KVS_TESTS_RANDOM_H
#define KVS_TESTS_RANDOM_H

/* Random numbers for tests, the same on every machine for the same seed.
 *
 * Knows nothing of what is tested.  Any thread with a state of its own; plain values. */

#include <stddef.h>
#include <stdint.h>

typedef struct rnd {
    uint64_t state;
} rnd;

/* Seed of a random test: KVS_TEST_SEED if set, else `fallback`; printed, so that a failure can be had again.
 */
rnd rnd_open(const char *test, uint64_t fallback);

uint64_t rnd_u64(rnd *r);
uint64_t rnd_below(rnd *r, uint64_t n); /* 0..n-1; n > 0 */
double rnd_real(rnd *r);                /* -1..1 */
double rnd_normal(rnd *r);              /* mean 0, variance 1 */
void rnd_bytes(rnd *r, void *p, size_t n);

#endif
