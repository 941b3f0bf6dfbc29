#ifndef KVS_CTL_CLOCK_H
#define KVS_CTL_CLOCK_H

/* Monotonic time for measurements, and order statistics of them.  Any thread; plain values. */

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

static inline uint64_t clock_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline int clock_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The value below which `percent` of the n samples lie; sorts them.  n > 0. */
static inline double clock_percentile(double *samples, size_t n, double percent)
{
    size_t i = (size_t)((double)n * percent / 100.0);

    qsort(samples, n, sizeof *samples, clock_compare);
    return samples[i < n ? i : n - 1];
}

#endif
