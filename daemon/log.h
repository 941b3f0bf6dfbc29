#ifndef KVS_DAEMON_LOG_H
#define KVS_DAEMON_LOG_H

/* Log: one line an event on stderr, "<priority>event key=value ..." as journald reads it.
 *
 * Knows levels and rate limits (at most 20 lines of one event a second; then one line says how many were left out).
 * Any thread.  Client-supplied bytes are escaped with log_quote before they get here. */

#include <stdbool.h>
#include <stddef.h>

enum log_level { LOG_LEVEL_ERROR = 3, LOG_LEVEL_WARN = 4, LOG_LEVEL_INFO = 6, LOG_LEVEL_DEBUG = 7 };

void log_open(enum log_level least, bool with_priority); /* before any thread; priority prefix under journald only */
void log_set_level(enum log_level least);
/* event: a literal such as "client_closed"; fmt: " key=%d ..." facts with units in the key names */
__attribute__((format(printf, 3, 4))) void log_event(enum log_level level, const char *event, const char *fmt, ...);
/* `n` bytes as a quoted, escaped word in buf, cut to fit; returns buf. */
const char *log_quote(char *buf, size_t cap, const void *bytes, size_t n);

#endif
