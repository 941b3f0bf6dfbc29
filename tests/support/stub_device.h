#ifndef KVS_TESTS_STUB_DEVICE_H
#define KVS_TESTS_STUB_DEVICE_H

/* Stub device: a device table whose calls are counted and made to fail or hang by the test.  Copies are
 * memcpy inside copy(); write and decode only give back what the test put in.
 *
 * Knows the device table.  Does not know memory: mem_* and host_* are absent.
 * Threads: plans are made before the workers run, or under the lock through the functions here; any number of
 * queues. Ownership: embedded in the test; open queues are counted. */

#include <pthread.h>
#include <stdbool.h>

#include "kernels/device.h"

enum stub_call { STUB_OPEN, STUB_COPY, STUB_WAIT, STUB_WRITE, STUB_DECODE, STUB_EXTEND, STUB_CALLS };
enum { STUB_MAX_FAULTS = 8, STUB_MAX_RECORDED = 4096 };

typedef struct stub_fault {
    enum stub_call call;
    unsigned nth; /* from 1, over all queues */
    kvs_status status;
} stub_fault;

typedef struct stub_device {
    device dev; /* first */
    device_ops ops;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned calls[STUB_CALLS]; /* begun */
    stub_fault faults[STUB_MAX_FAULTS];
    unsigned n_faults;
    unsigned hold_nth; /* the wait that hangs until stub_release; 0: none */
    bool held;
    unsigned open_queues;
    unsigned bad; /* what write and decode report as skipped */
    /* in the order of the copy calls */
    uint64_t batch_bytes[STUB_MAX_RECORDED];
    size_t batch_copies[STUB_MAX_RECORDED];
    device_how batch_how[STUB_MAX_RECORDED];
} stub_device;

void stub_init(stub_device *d);
void stub_fini(stub_device *d);
void stub_fail(stub_device *d, enum stub_call call, unsigned nth, kvs_status status);
void stub_hold(stub_device *d, unsigned nth_wait);
void stub_await_held(stub_device *d); /* until that wait hangs */
void stub_release(stub_device *d);
unsigned stub_count(stub_device *d, enum stub_call call);

#endif
