#ifndef KVS_CTL_BENCH_FLOOD_H
#define KVS_CTL_BENCH_FLOOD_H

/* A client that stores or loads as fast as it can: two requests in flight, one behind the other, while it is let.
 *
 * Knows libkvstride through bench_user.  Does not know what is measured meanwhile.
 * Threads: one of its own moves; start, run, rest and stop are the caller's, who may look at `ends`.  Owns its user. */

#include <pthread.h>
#include <stdatomic.h>

#include "proto/ctl/bench_ends.h"
#include "proto/ctl/bench_user.h"

typedef struct bench_flood {
    bench_user user;
    bool load, started;
    pthread_t thread;
    _Atomic bool stop, wanted, resting;
    bench_ends ends; /* of its requests */
    uint64_t next_id;
    kvs_status status; /* of the thread, once it has been joined */
    kvs_err err;
} bench_flood;

/* Blocks of `shape`; first_id: nobody else's from there on.  A load flood stores its blocks first, and pins them.  It rests
 * until bench_flood_run.  Also after a failure it is to be stopped. */
kvs_status bench_flood_start(bench_flood *f, const char *socket, const bench_shape *shape, bool load, uint64_t first_id,
                             kvs_err *err);
/* The same with slots of the daemon on its device `device`. */
kvs_status bench_flood_start_on(bench_flood *f, const char *socket, uint32_t device, const bench_shape *shape,
                                bool load, uint64_t first_id, kvs_err *err);
void bench_flood_run(bench_flood *f);
void bench_flood_rest(bench_flood *f); /* returns when nothing of it is in flight */
/* E_*: what it died of. */
kvs_status bench_flood_stop(bench_flood *f, kvs_err *err);

#endif
