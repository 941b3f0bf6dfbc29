#ifndef KVS_CTL_CALIBRATE_H
#define KVS_CTL_CALIBRATE_H

/* Calibrate: measure how fast a device copies pieces of several sizes, by its engines and by a kernel, alone and beside a
 * busy process, and whole blocks from the other devices, if they come over right.
 *
 * Knows kernels/device.h and the table that it fills.  Does not know daemons or files.
 * One thread, and the busy process.  Owns device, memory and process while it runs. */

#include "config/copy_table.h"
#include "kernels/device.h"
#include "proto/ctl/busy.h"

typedef struct calibrate_plan {
    kvs_status (*open)(void *ud, device **ret, kvs_err *err);
    /* The i-th other device; E_NOT_FOUND: there are no more.  NULL: there is none. */
    kvs_status (*open_peer)(void *ud, uint32_t i, device **ret, kvs_err *err);
    busy_run busy;      /* what the busy process does; NULL: there is none */
    void *ud;           /* of these */
    uint64_t bytes;     /* that one measurement copies, at most */
    uint32_t beside_ms; /* how long one beside the busy process takes, at least */
    void (*on_step)(uint32_t done, uint32_t of);
    void (*on_wrong)(const uint8_t uuid[16]); /* copies from that device bring other bytes; or NULL */
} calibrate_plan;

/* *ret gets all but the date. */
kvs_status calibrate_measure(const calibrate_plan *p, copy_table *ret, kvs_err *err);

#endif
