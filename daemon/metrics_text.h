#ifndef KVS_DAEMON_METRICS_TEXT_H
#define KVS_DAEMON_METRICS_TEXT_H

/* Metrics as text: Prometheus' exposition format 0.0.4, JSON, and a page for people.
 *
 * Knows the three formats and their escapes.  Does not know who asks.  Any thread; texts are the caller's to free().
 *
 * JSON: {"families": [{"name", "type", "help", "samples": [{"suffix"?, "labels": {..}, "value": number}]}]}.  There is
 * no ratio in either, so no value is ever not a number. */

#include <stddef.h>

#include "config/json.h"
#include "daemon/metrics.h"

/* E_NO_MEMORY. */
kvs_status metrics_text(const metrics_snapshot *s, char **ret, size_t *ret_len);
kvs_status metrics_page(const metrics_snapshot *s, char **ret, size_t *ret_len);
void metrics_json(const metrics_snapshot *s, json_writer *w); /* one object, as a root */

#endif
