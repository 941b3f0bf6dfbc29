#ifndef KVS_DAEMON_EXCHANGE_H
#define KVS_DAEMON_EXCHANGE_H

/* Exchange: may LOADs of the same blocks onto two devices share the way from the host (twin.h)?
 *
 * Knows the configuration, both devices' copy tables and whether they reach each other's memory.  Does not know loads.
 * Loop thread, at the start and at a reload.  Plain values. */

#include <stdbool.h>
#include <stdint.h>

#include "config/config.h"
#include "daemon/calibration.h"

typedef struct exchange {
    bool on;
    double gbs;      /* from the other device, as measured; 0: not measured */
    const char *why; /* it is off, in words; "" if it is on */
} exchange;

/* One of the two devices. */
typedef struct exchange_end {
    const calibration *calibration;
    const device_about *about;
} exchange_end;

/* Do the devices reach each other's memory?  Asked at the start only, and of those that shall exchange: it costs time for all
 * memory that is made later. */
typedef enum exchange_reach { EXCHANGE_NOT_ASKED, EXCHANGE_OUT_OF_REACH, EXCHANGE_REACH } exchange_reach;

/* As far as configuration and figures go. */
bool exchange_is_wanted(const config *c, exchange_end own, exchange_end other);

/* How `own` sees `other`; on is the same from both ends. */
void exchange_decide(exchange *ret, const config *c, exchange_end own, exchange_end other, exchange_reach reach);

#endif
