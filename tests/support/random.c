#include "tests/support/random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

rnd rnd_open(const char *test, uint64_t fallback)
{
    const char *text = getenv("KVS_TEST_SEED");
    rnd r = {text != NULL ? strtoull(text, NULL, 0) : fallback};

    (void)fprintf(stderr, "%s: KVS_TEST_SEED=%" PRIu64 "\n", test, r.state);
    return r;
}

/* A counter through a mixing function: every state has one successor and no seed is weak. */
uint64_t rnd_u64(rnd *r)
{
    uint64_t x = r->state += UINT64_C(0x9E3779B97F4A7C15);

    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

uint64_t rnd_below(rnd *r, uint64_t n)
{
    return rnd_u64(r) % n;
}

double rnd_real(rnd *r)
{
    return (double)(int64_t)(rnd_u64(r) >> 11) * 0x1p-52 - 1.0;
}

/* The sum of twelve uniform numbers is near enough to a bell for test data. */
double rnd_normal(rnd *r)
{
    double sum = 0;

    for (int i = 0; i < 12; i++)
        sum += rnd_real(r);
    return sum / 2;
}

void rnd_bytes(rnd *r, void *p, size_t n)
{
    uint8_t *at = p;

    while (n > 0) {
        uint64_t x = rnd_u64(r);
        size_t part = n < sizeof x ? n : sizeof x;

        memcpy(at, &x, part);
        at += part;
        n -= part;
    }
}
