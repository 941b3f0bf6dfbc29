#include <criterion/criterion.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/options.h"
#include "proto/ctl/ctl.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/raw_client.h"

/* kvstridectl against a daemon that is stopped, hangs up or speaks another version: it ends in time, with its exit code. */
static daemon_fixture d;

static void init(void)
{
    daemon_init(&d);
}

static void fini(void)
{
    daemon_fini(&d);
}

TestSuite(ctl_odd, .init = init, .fini = fini);

enum { OUT_BYTES = 65536, MAX_WORDS = 12, END_MS = 10000 };

typedef struct outcome {
    int code;
    char out[OUT_BYTES], err[OUT_BYTES];
} outcome;

static outcome o; /* of the latest run; too large for the stack */

#define KEY "0000000000000000000000000000000000000000000000000000000000000000"
static const char TRACE[] = "{\"hash_ids\": [1, 2, 3]}\n";

/* Every command that talks to a running daemon.  %T: a trace file. */
static const char *const COMMANDS[][4] = {
    {"status"},
    {"stats"},
    {"ping"},
    {"health"},
    {"ls"},
    {"namespaces"},
    {"leases"},
    {"clients"},
    {"tenants"},
    {"fsck"},
    {"reload"},
    {"drain"},
    {"reset"},
    {"watch", "--seconds", "1"},
    {"drop", "--ns", "0", KEY},
    {"replay", "--trace", "%T"},
};
enum { N_COMMANDS = sizeof COMMANDS / sizeof *COMMANDS, REPLAY = N_COMMANDS - 1 /* has no time-out to set */ };

static void program_path(char *buf, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", buf, cap - 16);

    cr_assert(n > 0);
    buf[n] = '\0';
    for (int up = 0; up < 3; up++)
        *strrchr(buf, '/') = '\0';
    (void)strcat(buf, "/kvstridectl");
}

static void read_into(const char *path, char *buf)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, buf, OUT_BYTES - 1) : 0;

    buf[n > 0 ? n : 0] = '\0';
    if (fd >= 0)
        (void)close(fd);
}

static uid_t run_as; /* 0: as we are */

/* Run it and wait for its end. */
static void run_words(const char *const *words)
{
    char program[4096], out[96], err[96];
    uint64_t end = raw_now_ms() + END_MS;
    int status = 0;
    pid_t pid;

    program_path(program, sizeof program);
    (void)snprintf(out, sizeof out, "%s/out", d.dir);
    (void)snprintf(err, sizeof err, "%s/err", d.dir);
    pid = fork();
    if (pid == 0) {
        int fd = open(program, O_RDONLY | O_CLOEXEC); /* the tree may lie where that user cannot look */

        if (run_as != 0 && (setgid(run_as) != 0 || setuid(run_as) != 0))
            _exit(126);
        (void)dup2(open(out, O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
        (void)dup2(open(err, O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
        (void)signal(SIGPIPE, SIG_DFL);
        (void)fexecve(fd, (char *const *)(uintptr_t)words, environ);
        _exit(127);
    }
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (raw_now_ms() > end)
            (void)kill(pid, SIGKILL);
        (void)usleep(2000);
    }
    o.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    read_into(out, o.out);
    read_into(err, o.err);
}

/* Command `i` against a socket, with a short time-out. */
static void run_command(unsigned i, const char *socket)
{
    const char *words[MAX_WORDS] = {"kvstridectl", "--socket", socket};
    static char trace[96];
    unsigned n = 3;

    (void)snprintf(trace, sizeof trace, "%s/trace", d.dir);
    if (i != REPLAY) {
        words[n++] = "--timeout-ms";
        words[n++] = "300";
    }
    for (unsigned k = 0; k < 4 && COMMANDS[i][k] != NULL; k++)
        words[n++] = strcmp(COMMANDS[i][k], "%T") == 0 ? trace : COMMANDS[i][k];
    run_words(words);
}

static void write_trace(void)
{
    char path[96];
    FILE *f;

    (void)snprintf(path, sizeof path, "%s/trace", d.dir);
    f = fopen(path, "we");
    cr_assert(f != NULL && fputs(TRACE, f) >= 0 && fclose(f) == 0);
}

/* Every command ends with this code, says why on stderr, and keeps stdout for results. */
static void expect_all(const char *socket, unsigned n, int code, const char *says)
{
    write_trace();
    for (unsigned i = 0; i < n; i++) {
        run_command(i, socket);
        cr_assert_eq(o.code, code, "%s: %d, not %d: %s", COMMANDS[i][0], o.code, code, o.err);
        cr_assert_not_null(strstr(o.err, says), "%s: %s", COMMANDS[i][0], o.err);
        cr_assert_str_empty(o.out, "%s: %s", COMMANDS[i][0], o.out);
    }
}

static int listening(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    cr_assert(fd >= 0 && bind(fd, (const struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 16) == 0);
    return fd;
}

/* Nothing there; a file of a daemon that was killed; a file that this user may not open. */
Test(ctl_odd, calls_a_daemon_unreachable_that_is_not_there_or_not_for_us)
{
    static const char *const MINE[] = {"trace", "out", "err"};
    int fd;

    expect_all(d.admin, N_COMMANDS, CTL_UNREACHABLE,
               "nothing listens there (No such file or directory); is kvstrided running?\n");
    fd = listening(d.admin);
    (void)close(fd);
    expect_all(d.admin, N_COMMANDS, CTL_UNREACHABLE,
               "nothing listens there (Connection refused); is kvstrided running?\n");
    cr_assert_eq(unlink(d.admin), 0);
    if (getuid() != 0)
        cr_skip_test("needs root to become a user who may not");
    fd = listening(d.admin);
    cr_assert_eq(chmod(d.admin, 0600), 0);
    for (int i = 0; i < 3; i++) {
        char path[96];

        (void)snprintf(path, sizeof path, "%s/%s", d.dir, MINE[i]);
        cr_assert_eq(unlink(path), 0);
    }
    cr_assert_eq(chown(d.dir, 65000, 65000), 0);
    run_as = 65000;
    expect_all(d.admin, N_COMMANDS, CTL_UNREACHABLE, "ermission denied");
    run_as = 0;
    (void)close(fd);
    cr_assert_eq(unlink(d.admin), 0);
}

/* Not after the minutes that a bench takes, and without its figures. */
Test(ctl_odd, says_at_once_that_the_plot_of_a_bench_cannot_be_written)
{
    static const char *const words[] = {"kvstridectl", "bench", "--quick", "--svg", "/nonexistent/x.svg", NULL};

    run_words(words);
    cr_assert_eq(o.code, CTL_USAGE, "%d: %s", o.code, o.err);
    cr_assert_not_null(strstr(o.err, "/nonexistent/x.svg: No such file"), "%s", o.err);
    cr_assert_str_empty(o.out, "%s", o.out);
}

Test(ctl_odd, gives_up_in_time_on_a_daemon_that_is_stopped)
{
    uint64_t start;

    cr_assert(daemon_start(&d, NULL));
    (void)kill(d.pid, SIGSTOP);
    start = raw_now_ms();
    expect_all(d.admin, REPLAY, CTL_UNREACHABLE, "no answer");
    cr_assert_lt(raw_now_ms() - start, N_COMMANDS * 2000U);
    (void)kill(d.pid, SIGCONT);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
}

/* ---- a daemon that is odd ---- */
/* Answers HELLO with this status and message, then hangs up; status OK: hangs up at once. */
static pid_t odd_daemon(const char *path, uint16_t status, const char *message)
{
    int fd = listening(path);
    pid_t pid = fork();

    if (pid == 0)
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int c; pid == 0 && (c = accept(fd, NULL, NULL)) >= 0;) {
        uint8_t body[264] = {(uint8_t)strlen(message)};
        uint32_t len = 8 + (uint32_t)((strlen(message) + 7) & ~(size_t)7);
        raw_client r;
        frame f;

        raw_init(&r, c);
        if (raw_recv(&r, &f, 5000) && status != KVS_OK) {
            wire_header h = {.op = WIRE_HELLO, .status = status, .id = f.head.id, .body_len = len};
            uint8_t head[WIRE_HEADER_BYTES];

            memcpy(body + 8, message, strlen(message));
            wire_header_encode(&h, head);
            (void)raw_write(&r, head, sizeof head, NULL, 0);
            (void)raw_write(&r, body, len, NULL, 0);
            (void)raw_wait_end(&r, 5000);
        }
        raw_close(&r);
    }
    if (pid == 0)
        _exit(0);
    (void)close(fd);
    return pid;
}

static void end(pid_t pid)
{
    (void)kill(pid, SIGKILL);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
}

Test(ctl_odd, calls_a_daemon_unreachable_that_hangs_up_at_hello)
{
    pid_t pid = odd_daemon(d.admin, KVS_OK, "");

    expect_all(d.admin, N_COMMANDS, CTL_UNREACHABLE, "closed before HELLO");
    end(pid);
}

Test(ctl_odd, calls_a_daemon_of_another_version_unreachable_and_hands_on_its_words)
{
    pid_t pid = odd_daemon(d.admin, KVS_E_VERSION, "this daemon speaks 7");

    expect_all(d.admin, N_COMMANDS, CTL_UNREACHABLE, "this daemon speaks 7");
    end(pid);
}

/* ---- how long it waits ---- */

static bool note_deadline(fake *f, fake_conn *c, frame *q)
{
    (void)c;
    if (q->head.op == WIRE_RESET)
        atomic_store((atomic_ullong *)f->ud, q->head.deadline_us);
    return false;
}

static uint64_t deadline_of(const fake *f, atomic_ullong *noted, const char *option)
{
    const char *words[] = {"kvstridectl", "--socket", f->path, "reset", option, option != NULL ? "300" : NULL, NULL};

    run_words(words);
    cr_assert_eq(o.code, CTL_OK, "%s", o.err);
    return atomic_load(noted);
}

/* It goes in parts, beside others' work. */
Test(ctl_odd, gives_a_reset_a_minute_or_what_it_is_told)
{
    atomic_ullong noted = 0;
    uint64_t us;
    fake f;

    fake_init(&f);
    f.hook = note_deadline;
    f.ud = &noted;
    fake_start(&f);
    us = deadline_of(&f, &noted, NULL);
    cr_assert(us > 50000000 && us <= 60000000, "%" PRIu64, us);
    us = deadline_of(&f, &noted, "--timeout-ms");
    cr_assert(us > 0 && us <= 300000, "%" PRIu64, us);
    fake_stop(&f);
    fake_fini(&f);
}
