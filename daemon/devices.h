#ifndef KVS_DAEMON_DEVICES_H
#define KVS_DAEMON_DEVICES_H

/* Devices: those that the daemon serves, opened as the configuration says: every GPU that this process sees, or the cpu.
 *
 * Knows device.kind and the drivers.  Does not know who uses them.  Loop thread, at the start and at the end. */

#include "config/config.h"
#include "kernels/device.h"
#include "proto/wire.h"

typedef struct devices {
    device *dev[WIRE_MAX_DEVICES]; /* owned */
    uint32_t n;
} devices;

/* E_SYS: device.kind is cuda and no GPU can be used.  On failure some may be open. */
kvs_status devices_open(devices *ret, const config *c, kvs_err *err);
void devices_close(devices *d); /* any number of times */

#endif
