#ifndef KVS_DAEMON_WORKER_H
#define KVS_DAEMON_WORKER_H

/* Worker: the thread under mover and decoder.  It takes jobs, keeps those that wait for a counter aside, runs
 * the others in submit order of their tenant and posts each exactly once.
 *
 * Knows jobs and the sink.  Does not know what a job does: that is `run`.
 * Threads: create, submit, drop, kick, destroy on the loop thread; get_stats on any; the callbacks on the worker
 * thread. Ownership: jobs are borrowed from submit until they are posted; `ud` is the caller's and outlives
 * the worker.
 *
 *   submit --> inbox --(due)----------------------> ready (submit order) --claim, run, signal--> post
 *                 `--(after not reached)--> waiting --(due)--^   dropped ones leave both lists as E_CANCELLED
 *
 * The thread sleeps when nothing is there.  An eager one, where there are processors enough, not at once: for a moment after a
 * job, and after worker_expect, it looks out for the next one.
 *
 * Fair between tenants: jobs run in turns (a job may need several), and the next turn is that of the tenant with ready jobs
 * who has had the least for its share so far.  One that comes back from a pause begins at what the others have now: nobody
 * saves up turns. */

#include "daemon/job.h"

typedef struct worker worker;

enum { WORKER_TENANTS = 64, WORKER_SHARE = 100 /* of a tenant that was given none */ };

typedef struct worker_ops {
    const char *name;                            /* of the thread, at most 15 bytes */
    kvs_status (*start)(void *ud, kvs_err *err); /* before the first job; a failure is create's failure */
    /* One turn: true if the job has ended, else it gets another.  shared: other tenants have ready jobs, keep it short.
     * *ret_bytes: what it moved (0: its time counts).  Notes failures with job_note; status and err start clean. */
    bool (*run)(void *ud, job *j, bool shared, uint64_t *ret_bytes);
    void (*stop)(void *ud); /* after the last job, if start succeeded */
    bool eager;             /* waking up late would be felt: see above */
} worker_ops;

typedef struct worker_stats {
    uint64_t jobs, failed; /* that ran; of these, with a status other than OK and E_CANCELLED */
    uint64_t queued;       /* submitted and not yet running */
    uint64_t busy_us;      /* time in run, of jobs that have ended */
    uint64_t oldest_us;    /* age of the run in progress; 0 if none */
} worker_stats;

kvs_status worker_create(worker **ret, const worker_ops *ops, void *ud, work_sink sink, kvs_err *err);
void worker_submit(worker *w, job *j);
/* A job follows within a moment: wake up, and look out for it without sleeping.  Any thread; cheap if it is awake. */
void worker_expect(worker *w);
/* Loop: true if the job had not started and never will; its on_done still comes.  Any number of times before that. */
bool worker_drop(worker *w, job *j);
void worker_kick(worker *w);                                   /* a `stop` was set */
void worker_share(worker *w, uint32_t tenant, uint32_t share); /* any thread; at least 1 */
void worker_destroy(worker *w);                                /* NULL is fine */
void worker_get_stats(const worker *w, worker_stats *ret);

/* For `run`, which is about to wait for the end of its own job: the one that has the next turn, and has begun by that; it
 * keeps its place.  NULL: none is ready, or those of several tenants are. */
job *worker_next(worker *w);

#endif
