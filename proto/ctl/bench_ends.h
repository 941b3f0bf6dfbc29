#ifndef KVS_CTL_BENCH_ENDS_H
#define KVS_CTL_BENCH_ENDS_H

/* When requests ended and what they moved, and the rate in a stretch of time that follows from it.
 *
 * Knows times and bytes.  Does not know requests.
 * Threads: one adds, others may ask at the same time.  Plain values; all zeros is empty. */

#include <stdatomic.h>
#include <stdint.h>

enum { BENCH_ENDS = 4096 /* the last half of them is remembered for sure */ };

typedef struct bench_ends {
    struct {
        uint64_t at_ns, bytes;
    } ends[BENCH_ENDS]; /* end i is at i % BENCH_ENDS */
    _Atomic uint64_t n;
} bench_ends;

/* at_ns: no earlier than the one before. */
void bench_ends_add(bench_ends *e, uint64_t at_ns, uint64_t bytes);

/* What those say that ended between two times, both included: the bytes of all but the first, over the time from the first
 * one's end to the last one's.  So nothing is rounded to whole requests, and what is under way at either side of the stretch
 * does not count.  Returns how many ended; *ret_gbs is 0 if no two of them did so at different times. */
uint64_t bench_ends_gbs(const bench_ends *e, uint64_t from_ns, uint64_t to_ns, double *ret_gbs);

#endif
