#include "daemon/log.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- helpers: stderr goes into a pipe or file, time stands still until it is moved ---- */

static uint64_t fake_ns = UINT64_C(5000000000);
static int saved_stderr = -1;

static uint64_t fake_clock(void)
{
    return fake_ns;
}

static int capture(enum log_level least, bool with_priority)
{
    char path[] = "/tmp/kvs-log-XXXXXX";
    int fd = mkstemp(path);

    cr_assert_geq(fd, 0);
    unlink(path);
    cr_assert_eq(fcntl(fd, F_SETFL, O_APPEND), 0);
    saved_stderr = dup(STDERR_FILENO);
    cr_assert_geq(dup2(fd, STDERR_FILENO), 0);
    log_open(least, with_priority);
    log_use_clock(fake_clock);
    return fd;
}

/* Everything logged since capture; stderr is as before. */
static char *captured(int fd)
{
    off_t n = lseek(fd, 0, SEEK_END);
    char *text = calloc(1, (size_t)n + 1);

    (void)dup2(saved_stderr, STDERR_FILENO);
    cr_assert_not_null(text);
    cr_assert_eq(pread(fd, text, (size_t)n, 0), (ssize_t)n);
    close(fd);
    return text;
}

static size_t count(const char *text, const char *what)
{
    size_t n = 0;

    for (const char *p = text; (p = strstr(p, what)) != NULL; p += strlen(what))
        n++;
    return n;
}

/* ---- lines ---- */

Test(log, writes_priority_for_journald_and_a_word_for_people)
{
    int fd = capture(LOG_LEVEL_DEBUG, true);
    char *text;

    log_event(LOG_LEVEL_ERROR, "a", " n=%d", 1);
    log_event(LOG_LEVEL_WARN, "b", " n=%d", 2);
    log_event(LOG_LEVEL_INFO, "c", "%s", "");
    log_event(LOG_LEVEL_DEBUG, "d", " n=%d", 4);
    log_open(LOG_LEVEL_INFO, false);
    log_event(LOG_LEVEL_WARN, "e", " n=%d", 5);
    text = captured(fd);
    cr_assert_str_eq(text, "<3>a n=1\n<4>b n=2\n<6>c\n<7>d n=4\nwarn e n=5\n");
    free(text);
}

Test(log, leaves_out_what_is_below_the_level)
{
    int fd = capture(LOG_LEVEL_WARN, true);
    char *text;

    log_event(LOG_LEVEL_INFO, "no", " n=%d", 1);
    log_event(LOG_LEVEL_WARN, "yes", " n=%d", 2);
    log_set_level(LOG_LEVEL_ERROR);
    log_event(LOG_LEVEL_WARN, "no", " n=%d", 3);
    log_set_level(LOG_LEVEL_INFO);
    log_event(LOG_LEVEL_INFO, "yes", " n=%d", 4);
    text = captured(fd);
    cr_assert_str_eq(text, "<4>yes n=2\n<6>yes n=4\n");
    free(text);
}

Test(log, one_event_is_one_line_whatever_is_in_it)
{
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text;

    log_event(LOG_LEVEL_INFO, "e", " s=%s", "a\nb\r\x1b[31m\x7F\t<3>forged \302\23331m \303\251");
    text = captured(fd);
    cr_assert_str_eq(text, "<6>e s=a?b?"
                           "?[31m?"
                           "?<3>forged ??31m \303\251\n");
    free(text);
}

Test(log, long_line_is_cut_and_says_so)
{
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text, fact[LOG_LINE_BYTES * 2];

    memset(fact, 'x', sizeof fact - 1);
    fact[sizeof fact - 1] = '\0';
    log_event(LOG_LEVEL_INFO, "e", " s=%s", fact);
    log_event(LOG_LEVEL_INFO, "f", " s=%d", 1);
    text = captured(fd);
    cr_assert_eq(strcspn(text, "\n"), LOG_LINE_BYTES - 1);
    cr_assert_not_null(strstr(text, "xxx...\n<6>f s=1\n"));
    free(text);
}

Test(log, keeps_errno)
{
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text;

    close(STDERR_FILENO);
    errno = ENOSPC;
    log_event(LOG_LEVEL_INFO, "e", " err=%m%s", "");
    log_flush(true);
    cr_assert_eq(errno, ENOSPC);
    cr_assert_geq(dup2(fd, STDERR_FILENO), 0);
    errno = ENOSPC;
    log_event(LOG_LEVEL_INFO, "e", " err=\"%m\"%s", "");
    text = captured(fd);
    cr_assert_str_eq(text, "<6>e err=\"No space left on device\"\n");
    free(text);
}

/* ---- the limit ---- */

Test(log, a_flood_of_one_event_is_twenty_lines_and_one_summary)
{
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text;

    for (int i = 0; i < 1000; i++)
        log_event(LOG_LEVEL_INFO, "flood", " i=%d", i);
    log_event(LOG_LEVEL_INFO, "other", " i=%d", 1);
    log_flush(false); /* the second is not over */
    fake_ns += UINT64_C(999999999);
    log_event(LOG_LEVEL_INFO, "flood", " i=%d", 1000);
    fake_ns += 1;
    log_event(LOG_LEVEL_INFO, "flood", " i=%d", 1001);
    text = captured(fd);
    cr_assert_eq(count(text, ">flood "), LOG_LINES_A_SECOND + 1);
    cr_assert_eq(count(text, "\n"), LOG_LINES_A_SECOND + 3);
    cr_assert_not_null(
        strstr(text, "<6>flood i=19\n<6>other i=1\n<6>log_left_out of=flood lines=981\n<6>flood i=1001\n"), "%s", text);
    free(text);
}

Test(log, what_was_left_out_is_said_without_another_event)
{
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text;

    for (int i = 0; i < 21; i++)
        log_event(LOG_LEVEL_INFO, "first", " i=%d", i);
    fake_ns += UINT64_C(1000000000);
    log_flush(false);
    log_flush(false); /* said once */
    for (int i = 0; i < 22; i++)
        log_event(LOG_LEVEL_WARN, "second", " i=%d", i);
    log_flush(true); /* at exit */
    text = captured(fd);
    cr_assert_eq(count(text, "log_left_out"), 2);
    cr_assert_not_null(strstr(text, "<6>log_left_out of=first lines=1\n"));
    cr_assert_not_null(strstr(text, "<4>log_left_out of=second lines=2\n"));
    free(text);
}

Test(log, summary_is_as_severe_as_the_worst_line_left_out)
{
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text;

    for (int i = 0; i < 25; i++)
        log_event(i == 23 ? LOG_LEVEL_ERROR : LOG_LEVEL_INFO, "mixed", " i=%d", i);
    log_flush(true);
    text = captured(fd);
    cr_assert_not_null(strstr(text, "<3>log_left_out of=mixed lines=5\n"), "%s", text);
    free(text);
}

Test(log, more_events_than_the_table_holds_lose_no_count)
{
    enum { EVENTS = 200, LINES = 30 };
    static char names[EVENTS][8];
    int fd = capture(LOG_LEVEL_INFO, true);
    char *text;

    for (int e = 0; e < EVENTS; e++) {
        (void)snprintf(names[e], sizeof names[e], "ev%03d", e);
        fake_ns++;
        for (int i = 0; i < LINES; i++)
            log_event(LOG_LEVEL_INFO, names[e], " i=%d", i);
    }
    log_flush(true);
    text = captured(fd);
    cr_assert_eq(count(text, ">ev"), EVENTS * LOG_LINES_A_SECOND);
    cr_assert_eq(count(text, "lines=10\n"), EVENTS);
    free(text);
}

/* ---- stderr ---- */

Test(log, a_reader_of_stderr_that_went_away_does_not_kill_the_process)
{
    int ends[2], saved = dup(STDERR_FILENO);
    sigset_t pending, blocked;

    cr_assert_eq(pipe(ends), 0);
    cr_assert_neq(signal(SIGPIPE, SIG_DFL), SIG_ERR);
    cr_assert_geq(dup2(ends[1], STDERR_FILENO), 0);
    close(ends[0]);
    close(ends[1]);
    log_open(LOG_LEVEL_INFO, true);
    for (int i = 0; i < 3; i++)
        log_event(LOG_LEVEL_INFO, "e", " i=%d", i);
    (void)dup2(saved, STDERR_FILENO);
    cr_assert_eq(sigpending(&pending), 0);
    cr_assert_eq(sigismember(&pending, SIGPIPE), 0, "the signal is taken back");
    cr_assert_eq(pthread_sigmask(SIG_BLOCK, NULL, &blocked), 0);
    cr_assert_eq(sigismember(&blocked, SIGPIPE), 0, "the mask is as before");
}

enum { THREADS = 4, LINES_A_THREAD = 2000 };

static void *flood(void *arg)
{
    static const char *const EVENTS[THREADS] = {"ta", "tb", "tc", "shared"};
    const char *event = EVENTS[*(int *)arg];

    for (int i = 0; i < LINES_A_THREAD; i++) {
        log_event(LOG_LEVEL_INFO, event, " i=%d fact=%s", i, "0123456789012345678901234567890123456789");
        log_event(LOG_LEVEL_INFO, "shared", " i=%d fact=%s", i, "0123456789012345678901234567890123456789");
    }
    return NULL;
}

Test(log, lines_of_many_threads_are_whole_and_all_counted)
{
    int fd = capture(LOG_LEVEL_INFO, true), ids[THREADS];
    pthread_t threads[THREADS];
    char *text, *rest, *line;
    uint64_t lines = 0, left_out = 0;

    for (int i = 0; i < THREADS; i++) {
        ids[i] = i;
        cr_assert_eq(pthread_create(&threads[i], NULL, flood, &ids[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    log_flush(true);
    text = rest = captured(fd);
    while ((line = strsep(&rest, "\n")) != NULL && *line != '\0') {
        const char *n = strstr(line, " lines=");

        cr_assert_eq(strncmp(line, "<6>", 3), 0, "%s", line);
        if (n != NULL)
            left_out += strtoull(n + 7, NULL, 10);
        else
            cr_assert_str_eq(strstr(line, " fact="), " fact=0123456789012345678901234567890123456789");
        lines += n == NULL;
    }
    cr_assert_eq(lines, THREADS * LOG_LINES_A_SECOND);
    cr_assert_eq(lines + left_out, (uint64_t)THREADS * LINES_A_THREAD * 2);
    free(text);
}

/* ---- quoting ---- */

Test(log, quotes_client_bytes_as_one_ascii_word)
{
    char buf[64];

    cr_assert_str_eq(log_quote(buf, sizeof buf, "plain text", 10), "\"plain text\"");
    cr_assert_str_eq(log_quote(buf, sizeof buf, "", 0), "\"\"");
    cr_assert_str_eq(log_quote(buf, sizeof buf, "a\"b\\c", 5), "\"a\\\"b\\\\c\"");
    cr_assert_str_eq(log_quote(buf, sizeof buf, "\n\0\x1b\x7f\x80\xff", 6), "\"\\x0a\\x00\\x1b\\x7f\\x80\\xff\"");
}

/* Where a walk over whole characters and escapes first reaches `n`. */
static size_t whole_escapes(const char *text, size_t n)
{
    size_t i = 0;

    while (i < n)
        i += text[i] != '\\' ? 1 : text[i + 1] == 'x' ? 4 : 2;
    return i;
}

Test(log, cuts_a_quoted_word_to_every_room_without_half_an_escape)
{
    static const char *const BYTES[] = {"abcdefghijkl", "\n\n\n\n\n\n", "a\"\\\n\"b\"\"cd", "ab"};

    for (size_t b = 0; b < sizeof BYTES / sizeof *BYTES; b++) {
        char full[64];
        size_t len = strlen(log_quote(full, sizeof full, BYTES[b], strlen(BYTES[b])));

        for (size_t cap = 0; cap < sizeof full; cap++) {
            char buf[64], *heap = malloc(cap + 1); /* exact room, for the sanitizer */
            size_t kept;

            cr_assert_not_null(heap);
            heap[cap] = '~';
            cr_assert_eq(log_quote(heap, cap, BYTES[b], strlen(BYTES[b])), heap);
            cr_assert_eq(heap[cap], '~');
            (void)snprintf(buf, sizeof buf, "%.*s", (int)cap, cap > 0 ? heap : "");
            free(heap);
            if (cap < 6) {
                cr_assert_str_eq(buf, "");
            } else if (cap > len) {
                cr_assert_str_eq(buf, full);
            } else {
                kept = strlen(buf) - 4;
                cr_assert_str_eq(buf + kept, "...\"");
                cr_assert_eq(strncmp(buf, full, kept), 0);
                cr_assert_eq(whole_escapes(buf, kept), kept, "%s", buf);
            }
        }
    }
}
