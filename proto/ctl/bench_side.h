#ifndef KVS_CTL_BENCH_SIDE_H
#define KVS_CTL_BENCH_SIDE_H

/* What a GPU bench says of others: one block's latency, alone and beside floods; an engine's speed beside transfers, and
 * theirs beside it; two GPUs at once; and what pinning costs.
 *
 * Knows private daemons, floods and busy engines.  One thread; floods and engines have their own. */

#include "proto/ctl/bench_list.h"
#include "proto/ctl/bench_user.h"

kvs_status bench_latencies(bench_list *l, bench_raw *raw, bool quick, kvs_err *err);
kvs_status bench_engines(bench_list *l, bench_raw *raw, bool quick, kvs_err *err);
kvs_status bench_pinning(bench_list *l, bool quick, kvs_err *err);
kvs_status bench_two(bench_list *l, bool quick, kvs_err *err); /* no figures where there is one GPU */

#endif
