#ifndef KVS_DAEMON_WORK_H
#define KVS_DAEMON_WORK_H

/* Work that left the loop thread and comes back as one completion.
 *
 * Knows a list link and a callback.  Does not know what the work is.  The worker thread posts, the loop thread runs
 * on_done; between submit and on_done the object belongs to the worker, except for atomic fields that say otherwise.
 * Embedded in the job; never allocated by itself. */

typedef struct work {
    struct work *next;
    void (*on_done)(struct work *w); /* loop thread; the object is the submitter's again */
} work;

/* Where completions go: daemon/mailbox.c over uv_async in the daemon, a plain queue in tests.  post: any thread, never
 * blocks, never calls on_done itself. */
typedef struct work_sink {
    void (*post)(void *ud, work *w);
    void *ud;
    /* A post follows within some tens of microseconds: it is worth being awake.  Any thread, never blocks; NULL: nobody
     * cares. */
    void (*soon)(void *ud);
} work_sink;

#endif
