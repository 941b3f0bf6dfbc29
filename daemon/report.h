#ifndef KVS_DAEMON_REPORT_H
#define KVS_DAEMON_REPORT_H

/* Report: the one line by which "systemctl status" says how the daemon is doing.
 *
 * Knows what the line says, and that it need not be said more than once a second.  Does not know who is told or how
 * the facts come about.  Main thread only.  A plain value; `note` is borrowed during the call. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { REPORT_BYTES = 400, REPORT_EVERY_US = 1000000 };

typedef struct report {
    char line[REPORT_BYTES]; /* the latest one told; "": none */
    uint64_t told_us;
} report;

typedef struct report_facts {
    uint64_t usable_bytes, max_bytes; /* of the arena */
    uint32_t health;                  /* enum wire_health */
    uint32_t reasons;                 /* bits of health_reason */
    const char *note;                 /* for the operator, or "" */
} report_facts;

/* The reasons in words, separated by commas, "" for none; cut to fit. */
void report_reasons(char *buf, size_t cap, uint32_t reasons);

/* Compose the line into r->line.  True: it is new, and worth telling now.  False leaves *r as it was; a line that only
 * shows progress may wait for the next call, one that shows the end of it never does. */
bool report_update(report *r, const report_facts *f, uint64_t now_us);

#endif
