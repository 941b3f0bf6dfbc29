#ifndef KVS_CTL_BENCH_GPU_H
#define KVS_CTL_BENCH_GPU_H

/* The GPU part of kvstridectl bench: blocks through the socket, beside raw copies of pinned memory in the same run.
 *
 * Knows libkvstride, client_cuda and private daemons.  Does not know how figures are shown.
 * Two threads for copies in both directions. */

#include "proto/ctl/bench_list.h"

/* All GPU figures and the sweep.  E_UNSUPPORTED: the daemon finds no GPU here; nothing was added. */
kvs_status bench_gpu(bench_list *l, bool quick, kvs_err *err);

#endif
