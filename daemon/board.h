#ifndef KVS_DAEMON_BOARD_H
#define KVS_DAEMON_BOARD_H

/* Board: how other threads come to see a snapshot without ever holding up the loop.
 *
 * Knows three snapshots and who may touch which.  Does not know what is in one, or who reads.
 * Threads: create, turned, close, destroy on the loop; read and turn_age on any other.
 * Owns the snapshots; borrows the sink and the callback's argument.
 *
 *   reader: ask -> [sink] -> loop: fill the spare one, swap it in, wake the reader -> reader: swap it out, copy
 *
 * The loop takes no lock and waits for nobody: readers have one among themselves.  A reader waits for the loop for a
 * bounded time and then takes the newest picture there is, with its age.  While nobody reads, nothing is done. */

#include "daemon/metrics.h"
#include "daemon/work.h"

typedef struct board board;

/* fill: on the loop, everything but seq, fill_ns and age_us.  Called once before create returns. */
kvs_status board_create(board **ret, work_sink sink, void (*fill)(void *ud, metrics_snapshot *s), void *ud,
                        kvs_err *err);
void board_turned(board *b, uint64_t now_us); /* the loop has turned */
void board_close(board *b);                   /* from now on reads do not wait, and fill is not called */
void board_destroy(board *b);                 /* no reader, and the sink is drained; NULL is fine */

/* A picture taken after the call began, or, if the loop has not answered in wait_us, the latest one. */
void board_read(board *b, uint64_t wait_us, metrics_snapshot *ret);
uint64_t board_turn_age_us(const board *b); /* since the loop has last turned */

#endif
