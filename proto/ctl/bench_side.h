#ifndef KVS_CTL_BENCH_SIDE_H
#define KVS_CTL_BENCH_SIDE_H

/* What a GPU bench says of others: one block's latency, alone and beside floods; an engine's speed beside transfers, and
 * theirs beside it; two GPUs at once; and what pinning costs.
 *
 * Beside an engine both speeds are of the same stretch of time, at least 150 ms behind 30 ms to settle.  The engine's is the
 * mean of its whole steps, against those of a stretch alone right before; the traffic's is exact, see bench_ends.h.
 *
 * Knows private daemons, floods and busy engines.  One thread; floods and engines have their own. */

#include "proto/ctl/bench_list.h"
#include "proto/ctl/bench_user.h"

/* GB/s of a large raw copy, of a few the median. */
kvs_status bench_raw_gbs(bench_raw *raw, bool load, double *ret, kvs_err *err);

kvs_status bench_latencies(bench_list *l, bench_raw *raw, bool quick, kvs_err *err);
kvs_status bench_engines(bench_list *l, bench_raw *raw, bool quick, kvs_err *err);
/* Of these the rows of packed pages, at a daemon that runs already.  gbs: raw, of store and load. */
kvs_status bench_packed(bench_list *l, const char *socket, const bench_tune *tune, int rounds, const double gbs[2],
                        kvs_err *err);
kvs_status bench_pinning(bench_list *l, bool quick, kvs_err *err);
kvs_status bench_two(bench_list *l, bool quick, kvs_err *err); /* no figures where there is one GPU */

#endif
