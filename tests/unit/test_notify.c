/* What the service manager hears, and when there is none: cases 145 and 152. */
#include "daemon/notify.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static char dir[64];

static void init(void)
{
    (void)snprintf(dir, sizeof dir, "/tmp/kvs-notify-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
}

static void fini(void)
{
    char path[96];

    (void)snprintf(path, sizeof path, "%s/n", dir);
    (void)unlink(path);
    (void)rmdir(dir);
}

TestSuite(notify, .init = init, .fini = fini);

/* A manager that listens at `name` (@... is abstract). */
static int listen_at(const char *name)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", name);
    if (name[0] == '@')
        a.sun_path[0] = '\0';
    cr_assert_eq(
        bind(fd, (const struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(name))), 0);
    cr_assert_eq(setenv("NOTIFY_SOCKET", name, 1), 0);
    return fd;
}

static const char *hear(int fd)
{
    static char text[NOTIFY_BYTES + 1];
    ssize_t n = recv(fd, text, sizeof text - 1, 0);

    text[n > 0 ? n : 0] = '\0';
    return text;
}

static unsigned long long now_us(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (unsigned long long)t.tv_sec * 1000000ULL + (unsigned long long)t.tv_nsec / 1000;
}

static void tell_all(notify *n)
{
    notify_ready(n, "x");
    notify_status(n, "y");
    notify_reloading(n);
    notify_stopping(n, "z");
    notify_alive(n);
    notify_store(n, "kvs-arena", 0);
}

Test(notify, without_a_manager_to_tell_nothing_is_an_error)
{
    char too_long[200];
    const char *const names[] = {"", "/", "@", "relative/path", "/nonexistent-folder/notify", too_long};

    memset(too_long, 'x', sizeof too_long - 1);
    too_long[0] = '/';
    too_long[sizeof too_long - 1] = '\0';
    for (size_t i = 0; i <= sizeof names / sizeof names[0]; i++) {
        notify n;

        if (i == 0)
            (void)unsetenv("NOTIFY_SOCKET");
        else
            cr_assert_eq(setenv("NOTIFY_SOCKET", names[i - 1], 1), 0);
        notify_open(&n);
        tell_all(&n);
        cr_assert_not(notify_retry(&n), "%zu", i);
        notify_close(&n);
        notify_close(&n);
    }
}

Test(notify, speaks_to_a_path_and_to_an_abstract_name)
{
    char names[2][96];

    (void)snprintf(names[0], sizeof names[0], "%s/n", dir);
    (void)snprintf(names[1], sizeof names[1], "@kvs-notify-test-%d", (int)getpid());
    for (int i = 0; i < 2; i++) {
        int fd = listen_at(names[i]);
        notify n;

        notify_open(&n);
        notify_ready(&n, "serving");
        cr_assert_str_eq(hear(fd), "READY=1\nSTATUS=serving");
        notify_status(&n, "more");
        cr_assert_str_eq(hear(fd), "STATUS=more");
        notify_alive(&n);
        cr_assert_str_eq(hear(fd), "WATCHDOG=1");
        notify_stopping(&n, "bye");
        cr_assert_str_eq(hear(fd), "STOPPING=1\nSTATUS=bye");
        notify_close(&n);
        (void)close(fd);
    }
}

Test(notify, a_reload_carries_the_monotonic_time_and_is_followed_by_ready)
{
    unsigned long long before, told = 0, after;
    char name[96];
    notify n;
    int fd;

    (void)snprintf(name, sizeof name, "%s/n", dir);
    fd = listen_at(name);
    notify_open(&n);
    before = now_us();
    notify_reloading(&n);
    after = now_us();
    notify_ready(&n, "again");
    cr_assert_eq(sscanf(hear(fd), "RELOADING=1\nMONOTONIC_USEC=%llu", &told), 1);
    cr_assert(before <= told && told <= after, "%llu is not in %llu..%llu", told, before, after);
    cr_assert_str_eq(hear(fd), "READY=1\nSTATUS=again");
    notify_close(&n);
    (void)close(fd);
}

/* The queue of a manager that does not read is soon full: nothing blocks, and the latest state gets through. */
Test(notify, the_latest_state_waits_for_a_manager_that_does_not_read)
{
    char name[96], status[32];
    const char *last = "";
    unsigned i = 0;
    notify n;
    int fd;

    (void)snprintf(name, sizeof name, "%s/n", dir);
    fd = listen_at(name);
    notify_open(&n);
    do {
        (void)snprintf(status, sizeof status, "%u", i);
        notify_ready(&n, status);
    } while (!notify_retry(&n) && ++i < 10000);
    cr_assert_lt(i, 10000, "the queue has no end");
    notify_stopping(&n, "bye");
    cr_assert(notify_retry(&n));
    while (strncmp(last, "STOPPING", 8) != 0) {
        last = hear(fd);
        cr_assert(last[0] != '\0' || notify_retry(&n) || n.late[0] == '\0', "it is lost");
    }
    cr_assert_str_eq(last, "STOPPING=1\nSTATUS=bye");
    cr_assert_not(notify_retry(&n));
    notify_close(&n);
    (void)close(fd);
}
