#ifndef KVS_CTL_BUSY_H
#define KVS_CTL_BUSY_H

/* Busy: a second process that does something again and again and counts: how much of its speed is left is what copies beside
 * it cost.
 *
 * Does not know what it does: that is `run`.
 * One thread.  Owns the process: it ends with busy_stop, and with this process. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/status.h"

/* In the other process: on_call after each call, until that returns false. */
typedef kvs_status (*busy_run)(void *ud, bool (*on_call)(void *call_ud), void *call_ud, kvs_err *err);

typedef struct busy {
    pid_t pid; /* 0: not there */
    struct busy_shared *shared;
} busy;

/* Before this process has used a GPU itself: what a driver keeps does not survive a fork.  It sleeps until busy_go. */
kvs_status busy_start(busy *b, busy_run run, void *ud, kvs_err *err);
/* Returns when it is at work; the reason if it cannot be. */
kvs_status busy_go(busy *b, kvs_err *err);
uint64_t busy_calls(const busy *b); /* done so far */
/* Its calls a second for the next `ms`, and on until it has done some.  E_DEADLINE: it does nothing. */
kvs_status busy_speed(const busy *b, uint32_t ms, double *ret, kvs_err *err);
void busy_stop(busy *b); /* any number of times */

#endif
