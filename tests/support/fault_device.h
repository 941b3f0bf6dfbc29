#ifndef KVS_TESTS_FAULT_DEVICE_H
#define KVS_TESTS_FAULT_DEVICE_H

/* A device that wraps another one and misbehaves when told to: delays, fails or swallows chosen calls.
 *
 * Knows kernels/device.h.  Does not know what the calls are for.
 * Threads: plans, counts and release may be used from any thread while the device works on others.
 * Ownership: takes the inner device; close() of the wrapper closes it too (release swallowed calls before).
 */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/device.h"

typedef enum fault_call {
    FAULT_COPY,
    FAULT_WAIT,
    FAULT_SUM,
    FAULT_MEM_CREATE,
    FAULT_MEM_IMPORT,
    FAULT_MEM_CLOSE,
    FAULT_HOST_REGISTER,
    FAULT_QUEUE_OPEN,
    FAULT_MLA_WRITE,
    FAULT_MLA_DECODE,
    FAULT_MLA_EXTEND,
    FAULT_CALLS,
} fault_call;

typedef enum fault_action {
    FAULT_FAIL,    /* return `status` at once; the inner device is not called (mem_close: it is, a void cannot
                      fail) */
    FAULT_DELAY,   /* sleep delay_us, then go on */
    FAULT_SWALLOW, /* stay inside until fault_device_release; then go on, or return `status` if it is not
                      KVS_OK */
} fault_action;

typedef struct fault_plan {
    fault_call call;
    fault_action action;
    uint64_t nth;   /* 1: the next call of this kind */
    uint64_t count; /* how many in a row; 0 = all from then on */
    kvs_status status;
    uint32_t delay_us;
} fault_plan;

kvs_status fault_device_open(device *inner, device **ret, kvs_err *err);

/* One plan a kind of call: a new one replaces the old one. */
void fault_device_plan(device *d, const fault_plan *p);
void fault_device_clear(device *d, fault_call call);

/* Before anyone uses it: what it says of itself as device_ops does.  Whatever it says, all copies are memcpy. */
void fault_device_pretend(device *d, uint32_t depth, bool copies_by_kernel);
/* The same of checksums: from now on it makes them, by libxxhash, of what is in its memory. */
void fault_device_pretend_sums(device *d);
uint64_t fault_device_by_kernel(device *d); /* copy calls so far that asked for a kernel */

/* From now on copies move their bytes in wait() and not before, as on a device that is slow. */
void fault_device_set_lazy(device *d, bool lazy);

/* From now on the last byte of each batch from another device comes over wrong. */
void fault_device_set_lying(device *d, bool lying);

/* Let all calls that are held now go on.  A plan stays until its count is used up or it is cleared. */
void fault_device_release(device *d);

/* Calls of a kind so far, swallowed and failed ones included; calls that are held now; block until n are
 * held. */
uint64_t fault_device_calls(device *d, fault_call call);
uint32_t fault_device_held(device *d);
void fault_device_await_held(device *d, uint32_t n);

#endif
