#ifndef KVS_DAEMON_JOB_H
#define KVS_DAEMON_JOB_H

/* Job: what mover and decoder have in common: wait for a counter, run, signal a counter, come back once.
 *
 * Knows a client's counter page and four states.  Does not know copies or kernels.
 * Threads: the loop submits, drops and reads `status` after on_done; the worker runs it.  `state` is the only
 * field both touch at the same time. Ownership: embedded in the request; the counter page outlives the job
 * (the peer keeps it until its jobs are back).
 *
 *   WAITING --worker: after is reached, claims it--> RUNNING --worker posts--> on_done (status of the run)
 *      `-----loop: job_drop---------------------> DROPPED --worker posts--> on_done (status E_CANCELLED,
 * nothing touched)
 *
 * Exactly one on_done follows each submit.  No worker ever blocks on `after`: jobs that wait stay on a list
 * that the worker polls (acquire load; brief spin, then sleeps of 50 us growing to 1 ms), and others overtake
 * them. */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/work.h"
#include "proto/status.h"
#include "proto/wire.h"

enum job_state { JOB_WAITING, JOB_RUNNING, JOB_DROPPED };

typedef struct job {
    work work;                        /* first: on_done is set by the submitter */
    struct job *next_wait, **at_wait; /* the worker's: its place in a list; at_wait NULL: in none */
    struct job *next_dropped;         /* the worker's */
    uint64_t seq;                     /* the worker's: place in submit order */
    bool begun;                       /* the worker's: it has had a turn */
    bool waits;                       /* the worker's: among those that wait for their counters */
    bool given_back;                  /* the loop's: dropped, and the worker knows */
    uint32_t tenant;                  /* whose turn it takes; below CONFIG_MAX_TENANTS */
    _Atomic uint32_t state;
    _Atomic bool stop; /* set by the loop while RUNNING: give up before the next item, or within it where that can be,
                          report E_CANCELLED for the rest */
    uint8_t *counters; /* the client's counter page, or NULL; 8,192 bytes, see proto/wire.h */
    uint32_t after_counter, signal_counter; /* WIRE_NONE32: none; ranges were checked at admission */
    uint64_t after_value, signal_value;
    bool signal_by_worker; /* LOAD, WRITE, DECODE, EXTEND: as soon as the bytes are there.  STORE: the loop, once
                              published */
    bool signalled;
    kvs_status status; /* of the run, valid in on_done */
    kvs_err err;
} job;

void job_init(job *j, void (*on_done)(work *w));
bool job_is_due(const job *j); /* any thread: the after counter has been reached, or there is none */
/* True if the job had not started and never will.  Its on_done comes if the worker is told: see worker_drop. */
bool job_drop(job *j);
/* Worker: true if it is ours to run. */
bool job_claim(job *j);
/* `stop` for a kernel, see kernels/stop.h. */
const bool *job_stop_flag(const job *j);
/* Write `status` to the error word if it is not OK, then advance the value (release).  At most once; none:
 * nothing. */
void job_signal(job *j, kvs_status status);
/* Worker: one of the job's parts ended with `s`.  `status` keeps the worst (lost device > device > data >
 * cancelled), `err` the text of the first.  OK changes nothing. */
void job_note(job *j, kvs_status s, const kvs_err *err);

#endif
