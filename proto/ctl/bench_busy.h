#ifndef KVS_CTL_BENCH_BUSY_H
#define KVS_CTL_BENCH_BUSY_H

/* A busy engine beside a measurement: this program once more, as "bench --engine WORK", which keeps the GPU busy and prints
 * a line a step, or a thread that does the same; and what that says about its speed in a stretch of time.
 *
 * Knows processes, pipes and engine_cuda.  Does not know what is measured.
 * One thread, and one of its own that reads the lines.  Owns the process; it dies with this one. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

typedef struct bench_busy bench_busy;

/* work: "compute", "memory" or "latency".  inside: a thread of this process, as the engine is whose memory a client packs; else a process
 * of its own.  Waits until it runs. */
kvs_status bench_busy_start(bench_busy **ret, const char *work, bool inside, kvs_err *err);
void bench_busy_stop(bench_busy *b); /* NULL is fine */

/* Mean ms of the steps that began and ended between two times of clock_ns.  E_AWAY: it has ended, or had no such step. */
kvs_status bench_busy_ms(bench_busy *b, uint64_t from_ns, uint64_t to_ns, double *ret, kvs_err *err);

/* The other side: steps until nobody reads them.  E_INVALID: no such work; E_UNSUPPORTED: no GPU that it can have. */
kvs_status bench_busy_run(const char *work, kvs_err *err);

#endif
