#ifndef KVS_DAEMON_PINNER_H
#define KVS_DAEMON_PINNER_H

/* Pinner: the thread for what may block for long: allocating and registering the arena's pieces, making and
 * unmapping regions.  Urgent tasks (a client waits) go before others (the arena grows).
 *
 * Knows nothing but functions to run.  Threads: submit on the loop; run on its own.  The task is borrowed
 * until on_done. */

#include <stdbool.h>

#include "daemon/work.h"
#include "proto/status.h"

typedef struct pinner pinner;

typedef struct pinner_task {
    work work; /* first */
    void (*run)(struct pinner_task *t);
} pinner_task;

kvs_status pinner_create(pinner **ret, work_sink sink, kvs_err *err);
void pinner_submit(pinner *p, pinner_task *t, bool urgent);
void pinner_destroy(pinner *p); /* runs what is queued first */

#endif
