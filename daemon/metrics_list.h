#ifndef KVS_DAEMON_METRICS_LIST_H
#define KVS_DAEMON_METRICS_LIST_H

/* The list of metrics: every family with name, type, help and samples, told to a visitor in one fixed order.
 *
 * Knows names, labels and units.  Does not know how they are written down: text and JSON say the same because both are
 * visitors.  Any thread; strings are borrowed during the call.
 *
 * Label sets are bounded: states, ops, statuses, causes and reasons are closed lists, layouts and tenants have "other"
 * behind METRICS_LAYOUTS and METRICS_TENANTS, and nothing that a client says is a label. */

#include "daemon/metrics.h"

enum metric_type { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };

typedef struct metric_label {
    const char *name, *value; /* value: any bytes */
} metric_label;

typedef struct metric_value {
    enum { METRIC_WHOLE, METRIC_SIGNED, METRIC_MICROS, METRIC_NANOS } kind; /* the last two: seconds, as their parts */
    union {
        uint64_t u;
        int64_t i;
    };
} metric_value;

typedef struct metrics_visitor {
    void (*family)(void *ud, const char *name, enum metric_type type, const char *help);
    /* Of the family before.  suffix: "", or a histogram's "_bucket", "_sum", "_count". */
    void (*sample)(void *ud, const char *suffix, const metric_label *labels, uint32_t n_labels, metric_value v);
} metrics_visitor;

void metrics_walk(const metrics_snapshot *s, const metrics_visitor *v, void *ud);

#endif
