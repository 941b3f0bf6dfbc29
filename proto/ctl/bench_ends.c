#include "proto/ctl/bench_ends.h"

void bench_ends_add(bench_ends *e, uint64_t at_ns, uint64_t bytes)
{
    uint64_t i = atomic_load_explicit(&e->n, memory_order_relaxed);

    e->ends[i % BENCH_ENDS].at_ns = at_ns;
    e->ends[i % BENCH_ENDS].bytes = bytes;
    atomic_store_explicit(&e->n, i + 1, memory_order_release);
}

uint64_t bench_ends_gbs(const bench_ends *e, uint64_t from_ns, uint64_t to_ns, double *ret_gbs)
{
    uint64_t all = atomic_load_explicit(&e->n, memory_order_acquire), n = 0, bytes = 0, first = 0, last = 0;

    for (uint64_t i = all > BENCH_ENDS / 2 ? all - BENCH_ENDS / 2 : 0; i < all; i++) {
        uint64_t at = e->ends[i % BENCH_ENDS].at_ns;

        if (at < from_ns || at > to_ns)
            continue;
        first = n == 0 ? at : first;
        last = at;
        bytes += n == 0 ? 0 : e->ends[i % BENCH_ENDS].bytes;
        n++;
    }
    *ret_gbs = last > first ? (double)bytes / (double)(last - first) : 0;
    return n;
}
