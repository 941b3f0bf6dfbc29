#ifndef KVS_DAEMON_ROUTE_H
#define KVS_DAEMON_ROUTE_H

/* Route: by which means a batch of copies goes, the copy engines or a kernel, and what tells that a GPU is busy.
 *
 * Knows a card's copy table and the configuration.  Does not know blocks, regions or devices' insides.
 * Threads: rules are plain values, made anywhere; a route is one thread's.
 *
 *   long pieces            the engines: the link's speed, and other work on the GPU hardly notices
 *   short pieces, idle     whatever the table says is faster; without a table a kernel below 48 KiB
 *   short pieces, busy     what is faster and leaves a busy process nine tenths of its speed; without a table the engines
 *
 * A GPU is busy when a kernel gets much less out of the link than it can, or its checksums take much longer than they do alone:
 * then the next kernels stay away for a while, longer and longer, and one batch tries again. */

#include <stdbool.h>
#include <stdint.h>

#include "config/config.h"
#include "config/copy_table.h"
#include "kernels/device.h"

typedef struct route_rule {
    uint64_t below; /* for pieces shorter than this that no earlier rule has taken */
    device_how idle, busy;
    double expected; /* GB/s by kernel on an idle device; 0: the best that was seen */
} route_rule;

typedef struct route_rules {
    uint32_t n; /* longer pieces than the last rule's: by engine */
    route_rule rules[COPY_TABLE_ROWS];
} route_rules;

typedef struct route {
    double best; /* GB/s by kernel, as seen */
    uint64_t busy_until_us, pause_us;
    uint32_t n_late, n_in_time; /* calls for checksums, in a row */
} route;

/* For one direction (0 load, 1 store).  table: NULL, there is none.  by_kernel: the device has more than one means. */
void route_rules_make(route_rules *ret, const config *c, const copy_table *table, int dir, bool by_kernel);

device_how route_choose(const route *p, const route_rules *r, uint64_t piece_bytes, uint64_t now_us);
/* A batch of `bytes` took `us` by `how`. */
void route_saw(route *p, const route_rules *r, device_how how, uint64_t piece_bytes, uint64_t bytes, uint64_t us,
               uint64_t now_us);
/* The checksums of `bytes` took `us`, UINT64_MAX: failed; up to most_us, and what so many bytes take, is in time.  On an H200 16 MiB took 53..60 us,
 * launch included, and up to 130 where calls are rare; beside another process 195 at least, for the GPU changes from one to the
 * other and back, and most calls a millisecond.  A process that waits for each of its kernels lost three quarters of its speed
 * to calls that were let go on at 250 us.  One late call tells that somebody was there: an engine that waits for its store has
 * just ended its kernels; two in a row, that somebody is.  Calm: many in a row were in time. */
enum { ROUTE_SUMS_US = 150 };
void route_saw_sums(route *p, uint64_t most_us, uint64_t bytes, uint64_t us, uint64_t now_us);
bool route_is_calm(const route *p);
bool route_is_busy(const route *p, uint64_t now_us);

#endif
