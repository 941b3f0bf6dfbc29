#ifndef KVS_TESTS_SINK_H
#define KVS_TESTS_SINK_H

/* Sink: where workers post in tests, in place of the loop.  The test thread plays the loop and runs the
 * callbacks.
 *
 * Knows a queue of completions.  Does not know jobs.  post: any thread; the rest: the test's thread.
 * Ownership: the work is borrowed from post to its on_done. */

#include <pthread.h>
#include <stdbool.h>

#include "daemon/work.h"

typedef struct sink {
    pthread_mutex_t lock;
    pthread_cond_t posted_one;
    work *head, **tail;
    unsigned posted, done; /* since init */
} sink;

void sink_init(sink *s);
void sink_fini(sink *s);
work_sink sink_face(sink *s);
/* Run callbacks until `count` have run since init.  False if that takes longer than 30 s. */
bool sink_run_until(sink *s, unsigned count);
unsigned sink_posted(sink *s); /* since init, run or not */

#endif
