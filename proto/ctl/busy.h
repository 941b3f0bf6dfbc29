#ifndef KVS_CTL_BUSY_H
#define KVS_CTL_BUSY_H

/* Busy: a second process that keeps a device at work as an engine would, with attention over a paged cache, and counts what
 * it gets done: how much of its speed is left is what copies beside it cost.
 *
 * Knows kernels/device.h and mla.h.  Does not know what runs beside it.
 * One thread.  Owns the process: it ends with busy_stop, and with this process. */

#include <stdint.h>
#include <sys/types.h>

#include "kernels/device.h"

typedef kvs_status (*busy_open)(void *ud, device **ret, kvs_err *err);

typedef struct busy_shape { /* of one call; 0 everywhere: no second process */
    uint32_t n_seqs, heads, blocks, blocks_a_seq;
} busy_shape;

typedef struct busy {
    pid_t pid; /* 0: not there */
    struct busy_shared *shared;
} busy;

/* Before this process has opened a device itself: what a driver keeps does not survive a fork.  It sleeps until busy_go. */
kvs_status busy_start(busy *b, const busy_shape *shape, busy_open open, void *ud, kvs_err *err);
/* Returns when it is at work; the reason if it cannot be. */
kvs_status busy_go(busy *b, kvs_err *err);
uint64_t busy_calls(const busy *b); /* done so far */
void busy_stop(busy *b);            /* any number of times */

#endif
