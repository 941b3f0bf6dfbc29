#ifndef KVS_DAEMON_LOG_H
#define KVS_DAEMON_LOG_H

/* Log: one line an event on stderr, "<priority>event key=value ..." as journald reads it, or "warn event
 * key=value ..." for people.
 *
 * Knows levels and rate limits (at most 20 lines of one event a second; then one line says how many were left
 * out). Does not know who logs or why.  Any thread; a line is one write(2), and a reader of stderr that has
 * gone away costs the line, not the process.  Keeps the pointers to event names: they are literals.
 * Client-supplied bytes are escaped with log_quote before they get here; a control character that still comes,
 * or a byte that is no UTF-8, is written as '?'. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

enum {
    LOG_LINE_BYTES = 1024, /* a longer line is cut and ends with "..." */
    LOG_LINES_A_SECOND = 20
};

void log_open(enum log_level least, bool with_priority); /* before any thread; priority prefix under journald only */
void log_set_level(enum log_level least);
/* event: a literal such as "client_closed"; fmt: " key=%d ..." facts with units in the key names.  Keeps
 * errno. */
__attribute__((format(printf, 3, 4))) void log_event(enum log_level level, const char *event, const char *fmt, ...);
/* Say what was left out and not said yet: from a housekeeping timer and before exit.  now: without waiting
 * for the end of the second. */
void log_flush(bool now);
/* Since the start: lines written, by level (error, warn, info, debug), and lines that the limit left out. */
void log_get_counts(uint64_t ret_lines[4], uint64_t *ret_left_out);
/* `n` bytes as a quoted, escaped word of ASCII in buf, cut to fit; returns buf. */
const char *log_quote(char *buf, size_t cap, const void *bytes, size_t n);

/* The clock of the rate limit, in nanoseconds; NULL = CLOCK_MONOTONIC.  Before any thread; for tests. */
void log_use_clock(uint64_t (*now_ns)(void));

#endif
