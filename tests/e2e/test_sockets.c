#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/options.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"

static daemon_fixture d;

static void init(void)
{
    daemon_init(&d);
}

static void fini(void)
{
    daemon_fini(&d);
}

TestSuite(sockets, .init = init, .fini = fini);

static bool serves(const char *path)
{
    raw_client c;
    bool ok = raw_connect(&c, path) && raw_hello(&c) && raw_ping(&c, 5);

    raw_close(&c);
    return ok;
}

Test(sockets, serve_engines_and_the_operator)
{
    struct stat st;

    cr_assert(daemon_start(&d, NULL));
    cr_assert(serves(d.socket));
    cr_assert(serves(d.admin));
    cr_assert_eq(stat(d.socket, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0660);
    cr_assert_eq(stat(d.admin, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0600);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

Test(sockets, are_taken_over_after_a_kill)
{
    for (unsigned i = 0; i < 20; i++) {
        cr_assert(daemon_start(&d, NULL), "start %u", i);
        cr_assert_eq(daemon_stop(&d, SIGKILL), 128 + SIGKILL);
        cr_assert_eq(access(d.socket, F_OK), 0, "the kill leaves the file");
    }
    cr_assert(daemon_start(&d, NULL));
    cr_assert(serves(d.socket));
}

Test(sockets, of_a_live_daemon_are_left_alone)
{
    daemon_fixture second;
    char out[2048];

    cr_assert(daemon_start(&d, NULL));
    daemon_init(&second);
    cr_assert_eq(daemon_run(&second,
                            (const char *[]){"--config", second.config, "--socket", d.socket, "--admin-socket",
                                             second.admin, NULL},
                            out, sizeof out),
                 EXIT_CODE_BUSY, "%s", out);
    cr_assert_not_null(strstr(out, d.socket), "%s", out);
    cr_assert(serves(d.socket));
    (void)kill(d.pid, SIGSTOP); /* busy, with a full backlog, is not dead */
    {
        raw_client c[600];
        unsigned n = 0;

        for (; n < 600; n++) {
            struct sockaddr_un a = {.sun_family = AF_UNIX};

            raw_init(&c[n], socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
            (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", d.socket);
            if (c[n].fd < 0 || connect(c[n].fd, (const struct sockaddr *)&a, sizeof a) != 0)
                break;
        }
        cr_assert_lt(n, 600, "the backlog is full");
        cr_assert_eq(daemon_run(&second,
                                (const char *[]){"--config", second.config, "--socket", d.socket, "--admin-socket",
                                                 second.admin, NULL},
                                out, sizeof out),
                     EXIT_CODE_BUSY, "%s", out);
        for (unsigned i = 0; i <= n; i++)
            raw_close(&c[i]);
    }
    (void)kill(d.pid, SIGCONT);
    cr_assert(serves(d.socket));
    daemon_fini(&second);
}

Test(sockets, with_a_path_too_long_are_refused_with_the_limit)
{
    char out[2048], path[256];

    (void)snprintf(path, sizeof path, "%s/%0150d", d.dir, 0);
    cr_assert_eq(daemon_run(&d, (const char *[]){"--config", d.config, "--socket", path, NULL}, out, sizeof out),
                 EXIT_CODE_CONFIG);
    cr_assert_not_null(strstr(out, "107"), "%s", out);
}

Test(sockets, with_an_abstract_name_are_refused)
{
    char out[2048];

    cr_assert_eq(
        daemon_run(&d, (const char *[]){"--config", d.config, "--socket", "@kvstrided", NULL}, out, sizeof out),
        EXIT_CODE_CONFIG, "%s", out);
    cr_assert_not_null(strstr(out, "@kvstrided"), "%s", out);
}

Test(sockets, in_a_folder_that_is_not_there_are_a_system_fault)
{
    char out[2048];

    cr_assert_eq(daemon_run(&d,
                            (const char *[]){"--config", d.config, "--socket", "/nonexistent/s", "--admin-socket",
                                             d.admin, NULL},
                            out, sizeof out),
                 EXIT_CODE_SYSTEM, "%s", out);
    cr_assert_not_null(strstr(out, "/nonexistent/s"), "%s", out);
    cr_assert_neq(access(d.admin, F_OK), 0);
}

/* A listening socket where the daemon's would be, out of the way of descriptors 3 and 4. */
static int listening(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), high = fcntl(fd, F_DUPFD_CLOEXEC, 10);

    (void)close(fd);
    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    cr_assert_eq(bind(high, (const struct sockaddr *)&a, sizeof a), 0);
    cr_assert_eq(listen(high, 16), 0);
    return high;
}

Test(sockets, are_taken_from_the_service_manager)
{
    d.listen_fd[0] = listening(d.socket);
    d.listen_fd[1] = listening(d.admin);
    cr_assert(daemon_start(&d, NULL));
    cr_assert(serves(d.socket));
    cr_assert(serves(d.admin));
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    cr_assert_eq(access(d.socket, F_OK), 0, "the file is the service manager's");
    cr_assert_eq(access(d.admin, F_OK), 0);
}

Test(sockets, wake_nobody_while_nobody_asks)
{
    uint64_t before;
    raw_client c;

    cr_assert(daemon_start(&d, NULL));
    cr_assert(raw_connect(&c, d.socket));
    cr_assert(raw_hello(&c));
    cr_assert(!raw_wait_end(&c, 200), "what the start began has come to rest");
    before = daemon_sleeps(&d);
    cr_assert(!raw_wait_end(&c, 1000));
    cr_assert_leq(daemon_sleeps(&d) - before, 1, "at most once a second");
    raw_close(&c);
}
