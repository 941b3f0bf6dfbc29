#ifndef KVS_DAEMON_MAILBOX_H
#define KVS_DAEMON_MAILBOX_H

/* Mailbox: the way back from worker threads to the loop.
 *
 * Knows works as list links and one wake-up of the loop.  Does not know what a work is.
 * Threads: post (through the sink) from any; everything else on the loop.
 * Borrows the works; owns its queue and its handle.
 *
 * Waking up takes as long as a short copy.  So where there are processors enough the loop stays awake for a bounded moment
 * when something is known to come: a post that was announced, a request of a client that asks in quick succession.
 *
 *   worker: post -> [queue, mutex] -> wake-up -> loop: on_done of each, in the order of posting */

#include <stdint.h>
#include <uv.h>

#include "daemon/work.h"
#include "proto/status.h"

typedef struct mailbox mailbox;

kvs_status mailbox_create(mailbox **ret, uv_loop_t *loop, kvs_err *err);

work_sink mailbox_sink(mailbox *m);

/* Run on_done of what has been posted so far, now: before a request is handled, so that a completion whose
 * counter the client has seen already is not news to that request. */
void mailbox_drain(mailbox *m);

/* The loop does not sleep before `us` from now: something is likely to come within that time. */
void mailbox_stay_awake(mailbox *m, uint64_t us);

/* Nobody posts any more: drained once more, freed when the loop has closed the handle. */
void mailbox_close(mailbox *m);

#endif
