#ifndef KVS_DAEMON_CALIBRATION_H
#define KVS_DAEMON_CALIBRATION_H

/* Calibration: which copy table the daemon goes by, and why.
 *
 * Knows the configuration, the device's name and the table's file.  Does not know movers.
 * Loop thread, at the start and at a reload: it reads one small file.  Plain values. */

#include <stdbool.h>

#include "config/config.h"
#include "config/copy_table.h"
#include "kernels/device.h"

typedef struct calibration {
    bool is_measured; /* table is there and in use where mover.path is auto */
    copy_table table;
    char why[KVS_ERR_MSG_BYTES]; /* it is not; "" */
} calibration;

/* A table of another card, or measured with another driver, is as good as none. */
void calibration_read(calibration *ret, const config *c, const device *d);

/* One word for people: what decides.  "table", "defaults", "configuration", or "device" where there is one means only. */
const char *calibration_source(const calibration *x, const config *c, const device *d);

#endif
