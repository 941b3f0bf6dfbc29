#ifndef KVS_CTL_BENCH_GPU_H
#define KVS_CTL_BENCH_GPU_H

/* The GPU part of kvstridectl bench: blocks through the socket, beside raw copies of pinned memory in the same run.
 *
 * Knows libkvstride, client_cuda and a private daemon.  Does not know how figures are shown.
 * Two threads for copies in both directions, and a busy process beside.  Figures are plain values. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

enum { BENCH_GPU_FIGURES = 24 };

typedef struct gpu_figure {
    char name[72];
    const char *unit, *plain_is;
    double value, plain; /* medians */
    double p99;          /* of latencies; NAN else */
    double judged;       /* a ratio; of latencies the difference in us */
    double target;
    bool at_least;
} gpu_figure;

typedef struct bench_gpu_result {
    char card[64];
    gpu_figure figures[BENCH_GPU_FIGURES];
    uint32_t n;
} bench_gpu_result;

/* E_UNSUPPORTED: the daemon finds no GPU here. */
kvs_status bench_gpu(bench_gpu_result *ret, kvs_err *err);

#endif
