#include "daemon/log.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/text.h"

enum { MAX_EVENTS = 64 }; /* events that are limited at the same time */

#define SECOND_NS UINT64_C(1000000000)

/* The lines of one event in its current second. */
typedef struct limit {
    const char *event; /* NULL: unused */
    enum log_level level;
    uint64_t since_ns;
    unsigned lines;
    uint64_t left_out;
} limit;

/* What a call owes besides its own line: it is written outside the lock, so that a slow stderr holds up one
 * thread. */
typedef struct summary {
    const char *event; /* NULL: nothing */
    enum log_level level;
    uint64_t left_out;
} summary;

static atomic_int least_level = LOG_LEVEL_INFO;
static atomic_bool priority_prefix;
static uint64_t (*clock_ns)(void);
static _Atomic uint64_t n_lines[4], n_left_out; /* error, warn, info, debug */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards limits */
static limit limits[MAX_EVENTS];

void log_open(enum log_level least, bool with_priority)
{
    atomic_store(&least_level, (int)least);
    atomic_store(&priority_prefix, with_priority);
}

void log_set_level(enum log_level least)
{
    atomic_store(&least_level, (int)least);
}

void log_use_clock(uint64_t (*now_ns)(void))
{
    clock_ns = now_ns;
}

static uint64_t now(void)
{
    struct timespec ts;

    if (clock_ns != NULL)
        return clock_ns();
    (void)clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * SECOND_NS + (uint64_t)ts.tv_nsec;
}

/* ---- writing ---- */

/* A dead reader of stderr must not kill the daemon, and the process may not have SIGPIPE ignored yet: block
 * it around the write and take back the one that this write raised. */
static void write_line(const char *line, size_t n)
{
    const struct timespec at_once = {0, 0};
    sigset_t pipe_only, before, pending;
    bool was_pending, failed;

    (void)sigemptyset(&pipe_only);
    (void)sigaddset(&pipe_only, SIGPIPE);
    (void)pthread_sigmask(SIG_BLOCK, &pipe_only, &before);
    (void)sigpending(&pending);
    was_pending = sigismember(&pending, SIGPIPE) == 1;
    do
        failed = write(STDERR_FILENO, line, n) < 0;
    while (failed && errno == EINTR);
    if (failed && errno == EPIPE && !was_pending)
        (void)sigtimedwait(&pipe_only, NULL, &at_once);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static const char *level_word(enum log_level level)
{
    switch (level) {
    case LOG_LEVEL_ERROR:
        return "error";
    case LOG_LEVEL_WARN:
        return "warn";
    case LOG_LEVEL_INFO:
        return "info";
    case LOG_LEVEL_DEBUG:
        return "debug";
    }
    return "info";
}

static int level_index(enum log_level level)
{
    switch (level) {
    case LOG_LEVEL_ERROR:
        return 0;
    case LOG_LEVEL_WARN:
        return 1;
    case LOG_LEVEL_INFO:
        return 2;
    case LOG_LEVEL_DEBUG:
        return 3;
    }
    return 2;
}

void log_get_counts(uint64_t ret_lines[4], uint64_t *ret_left_out)
{
    for (int i = 0; i < 4; i++)
        ret_lines[i] = atomic_load_explicit(&n_lines[i], memory_order_relaxed);
    *ret_left_out = atomic_load_explicit(&n_left_out, memory_order_relaxed);
}

/* snprintf's wish cut to what is there, with room kept for the newline. */
static size_t written(size_t at, int wish)
{
    size_t end = wish < 0 ? at : at + (size_t)wish;

    return end < LOG_LINE_BYTES - 1 ? end : LOG_LINE_BYTES - 1;
}

__attribute__((format(printf, 3, 0))) static void put_line(enum log_level level, const char *event, const char *fmt,
                                                           va_list ap)
{
    char line[LOG_LINE_BYTES + 1];
    size_t n;

    (void)atomic_fetch_add_explicit(&n_lines[level_index(level)], 1, memory_order_relaxed);
    if (atomic_load(&priority_prefix))
        n = written(0, snprintf(line, LOG_LINE_BYTES, "<%d>%s", (int)level, event));
    else
        n = written(0, snprintf(line, LOG_LINE_BYTES, "%s %s", level_word(level), event));
    n = written(n, vsnprintf(line + n, LOG_LINE_BYTES - n, fmt, ap));
    if (n == LOG_LINE_BYTES - 1)
        memcpy(line + n - 3, "...", 3);
    line[n] = '\0';
    text_tame(line);
    n = strlen(line);
    line[n++] = '\n';
    write_line(line, n);
}

__attribute__((format(printf, 3, 4))) static void put_event(enum log_level level, const char *event, const char *fmt,
                                                            ...)
{
    va_list ap;

    va_start(ap, fmt);
    put_line(level, event, fmt, ap);
    va_end(ap);
}

static void put_summary(const summary *s)
{
    if (s->event != NULL)
        put_event(s->level, "log_left_out", " of=%s lines=%" PRIu64, s->event, s->left_out);
}

/* ---- the rate limit; all of it under the lock ---- */

static summary take_summary(limit *l)
{
    summary s = {.event = l->left_out > 0 ? l->event : NULL, .level = l->level, .left_out = l->left_out};

    l->left_out = 0;
    return s;
}

/* The entry of `event`; a new event takes a free entry, or else the one whose second began first. */
static limit *find(const char *event)
{
    limit *oldest = limits;

    for (limit *l = limits; l < limits + MAX_EVENTS; l++) {
        if (l->event == NULL || strcmp(l->event, event) == 0)
            return l;
        if (l->since_ns < oldest->since_ns)
            oldest = l;
    }
    return oldest;
}

static bool admit(enum log_level level, const char *event, uint64_t at_ns, summary *ret_owed)
{
    limit *l = find(event);
    bool other = l->event == NULL || strcmp(l->event, event) != 0;

    *ret_owed = (summary){0};
    if (other || at_ns - l->since_ns >= SECOND_NS) {
        *ret_owed = take_summary(l);
        *l = (limit){.event = event, .level = level, .since_ns = at_ns};
    }
    if (l->lines < LOG_LINES_A_SECOND) {
        l->lines++;
        return true;
    }
    l->left_out++;
    (void)atomic_fetch_add_explicit(&n_left_out, 1, memory_order_relaxed);
    if (level < l->level)
        l->level = level; /* the summary is as severe as the worst line in it */
    return false;
}

/* ---- the doors ---- */

void log_event(enum log_level level, const char *event, const char *fmt, ...)
{
    int saved = errno;
    summary owed;
    va_list ap;
    bool admitted;

    if ((int)level > atomic_load(&least_level))
        return;
    (void)pthread_mutex_lock(&lock); /* before the clock is read: time must not go back between two threads */
    admitted = admit(level, event, now(), &owed);
    (void)pthread_mutex_unlock(&lock);
    put_summary(&owed);
    errno = saved; /* for %m */
    va_start(ap, fmt);
    if (admitted)
        put_line(level, event, fmt, ap);
    va_end(ap);
    errno = saved;
}

void log_flush(bool at_once)
{
    int saved = errno;
    summary owed;

    for (limit *l = limits; l < limits + MAX_EVENTS; l++) {
        (void)pthread_mutex_lock(&lock);
        owed = (summary){0};
        if (at_once || now() - l->since_ns >= SECOND_NS)
            owed = take_summary(l);
        (void)pthread_mutex_unlock(&lock);
        put_summary(&owed);
    }
    errno = saved;
}

/* One byte as it stands inside the quotes. */
static size_t escape(char piece[8], unsigned char c)
{
    if (c == '"' || c == '\\')
        return (size_t)snprintf(piece, 8, "\\%c", c);
    return (size_t)snprintf(piece, 8, c < 0x20 || c >= 0x7F ? "\\x%02x" : "%c", c);
}

const char *log_quote(char *buf, size_t cap, const void *bytes, size_t n)
{
    const unsigned char *p = bytes;
    char piece[8];
    size_t at = 0, len, cut = 1; /* cut: the last end of a piece behind which ..." and a zero have room */

    if (cap < 6) {
        if (cap > 0)
            buf[0] = '\0';
        return buf;
    }
    buf[at++] = '"';
    for (size_t i = 0; i < n; i++) {
        if (at + 5 <= cap)
            cut = at;
        len = escape(piece, p[i]);
        if (at + len + 2 > cap) {
            (void)snprintf(buf + cut, cap - cut, "...\"");
            return buf;
        }
        memcpy(buf + at, piece, len);
        at += len;
    }
    (void)snprintf(buf + at, cap - at, "\"");
    return buf;
}
