#ifndef KVS_DAEMON_MAILBOX_H
#define KVS_DAEMON_MAILBOX_H

/* Mailbox: the way back from worker threads to the loop.
 *
 * Knows works as list links and one wake-up of the loop.  Does not know what a work is.
 * Threads: post (through the sink) from any; everything else on the loop.
 * Borrows the works; owns its queue and its handle.
 *
 *   worker: post -> [queue, mutex] -> wake-up -> loop: on_done of each, in the order of posting */

#include <uv.h>

#include "daemon/work.h"
#include "proto/status.h"

typedef struct mailbox mailbox;

kvs_status mailbox_create(mailbox **ret, uv_loop_t *loop, kvs_err *err);

work_sink mailbox_sink(mailbox *m);

/* Run on_done of what has been posted so far, now: before a request is handled, so that a completion whose
 * counter the client has seen already is not news to that request. */
void mailbox_drain(mailbox *m);

/* Nobody posts any more: drained once more, freed when the loop has closed the handle. */
void mailbox_close(mailbox *m);

#endif
