#include "tests/support/daemon_fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/loop_fixture.h"
#include "tests/support/raw_client.h"

enum { START_MS = 30000, STOP_MS = 30000, MAX_ARGS = 32, STEP_US = 2000 };

static void die(const char *what)
{
    perror(what);
    abort();
}

static void nap(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = STEP_US * 1000}, NULL);
}

/* BUILD/kvstrided, for a program BUILD/tests/KIND/test_x. */
static void program_path(char *buf, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", buf, cap - 16);

    if (n <= 0)
        die("readlink");
    buf[n] = '\0';
    for (int up = 0; up < 3; up++)
        *strrchr(buf, '/') = '\0';
    (void)strcat(buf, "/kvstrided");
}

void daemon_init(daemon_fixture *d)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    *d = (daemon_fixture){.listen_fd = {-1, -1}};
    (void)snprintf(d->dir, sizeof d->dir, "/tmp/kvs-e2e-XXXXXX");
    if (mkdtemp(d->dir) == NULL)
        die("mkdtemp");
    (void)snprintf(d->socket, sizeof d->socket, "%s/s.sock", d->dir);
    (void)snprintf(d->admin, sizeof d->admin, "%s/a.sock", d->dir);
    (void)snprintf(d->metrics, sizeof d->metrics, "%s/m.sock", d->dir);
    (void)snprintf(d->config, sizeof d->config, "%s/config.json", d->dir);
    (void)snprintf(d->log, sizeof d->log, "%s/log", d->dir);
    d->notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s/notify", d->dir);
    if (d->notify_fd < 0 || bind(d->notify_fd, (const struct sockaddr *)&a, sizeof a) != 0)
        die("notify socket");
    daemon_configure(d, "{\"pool\": {\"max_bytes\": \"16MiB\"}}");
}

void daemon_fini(daemon_fixture *d)
{
    DIR *dir;

    if (d->pid != 0)
        (void)daemon_stop(d, SIGKILL);
    (void)close(d->notify_fd);
    dir = opendir(d->dir);
    if (dir == NULL)
        return;
    for (const struct dirent *e; (e = readdir(dir)) != NULL;)
        (void)unlinkat(dirfd(dir), e->d_name, 0);
    (void)closedir(dir);
    (void)rmdir(d->dir);
}

void daemon_configure(const daemon_fixture *d, const char *json)
{
    FILE *f = fopen(d->config, "we");

    if (f == NULL || fputs(json, f) < 0 || fclose(f) != 0)
        die(d->config);
}

/* From here on asking for memory in advance fails as it does when there is none. */
static void refuse_memory(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MADV_POPULATE_WRITE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        die("seccomp");
}

/* What the service manager does with FDSTORE=1 and FDSTOREREMOVE=1.  Takes fd. */
static void store_fd(const daemon_fixture *d, const char *text, int fd)
{
    const int at = strstr(text, "FDNAME=kvs-arena") != NULL ? 0 : strstr(text, "FDNAME=kvs-table") != NULL ? 1 : -1;

    if (d->stored_fd != NULL && at >= 0 && strstr(text, "FDSTOREREMOVE=1") != NULL && d->stored_fd[at] >= 0) {
        (void)close(d->stored_fd[at]);
        d->stored_fd[at] = -1;
    }
    if (d->stored_fd != NULL && at >= 0 && fd >= 0 && d->stored_fd[at] < 0)
        d->stored_fd[at] = fcntl(fd, F_DUPFD_CLOEXEC, 20);
    if (fd >= 0)
        (void)close(fd);
}

/* The next notification, or false. */
static bool hear(const daemon_fixture *d, char *text, size_t cap)
{
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec v = {text, cap - 1};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(d->notify_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    int fd = -1;

    if (n <= 0)
        return false;
    text[n] = '\0';
    if (c != NULL && c->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
    store_fd(d, text, fd);
    return true;
}

static void close_some(const daemon_fixture *d)
{
    for (int fd = 0; fd < 3; fd++)
        if ((d->closed_fds >> fd & 1) != 0)
            (void)close(fd);
}

/* In the child: everything but the program itself. */
static void prepare(const daemon_fixture *d)
{
    static const char *const NAMES[] = {"client", "admin", "kvs-arena", "kvs-table"};
    char text[128], names[128] = "";
    int log = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600), n = 0;
    sigset_t none;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves no daemon behind */
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)dup2(log, STDOUT_FILENO);
    (void)dup2(log, STDERR_FILENO);
    (void)close(log);
    (void)snprintf(text, sizeof text, "%s/notify", d->dir);
    (void)setenv("NOTIFY_SOCKET", text, 1);
    if (d->max_fds != 0)
        (void)setrlimit(RLIMIT_NOFILE, &(struct rlimit){d->max_fds, d->max_fds});
    if (d->max_file_bytes != 0)
        (void)setrlimit(RLIMIT_FSIZE, &(struct rlimit){d->max_file_bytes, d->max_file_bytes});
    if (d->no_memory)
        refuse_memory();
    for (int i = 0; i < 4; i++) {
        int fd = i < 2 ? d->listen_fd[i] : d->stored_fd != NULL ? d->stored_fd[i - 2] : -1;

        if (fd < 0)
            continue;
        (void)dup2(fd, 3 + n); /* clears close-on-exec; the fixture takes fds from 10 on */
        (void)snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", n > 0 ? ":" : "", NAMES[i]);
        n++;
    }
    if (n == 0)
        return;
    (void)snprintf(text, sizeof text, "%d", n);
    (void)setenv("LISTEN_FDS", text, 1);
    (void)setenv("LISTEN_FDNAMES", names, 1);
    (void)snprintf(text, sizeof text, "%d", (int)getpid());
    (void)setenv("LISTEN_PID", text, 1);
}

void daemon_spawn(daemon_fixture *d, const char *const *more)
{
    char program[4096], drained[1024];
    char metrics[128];
    const char *args[MAX_ARGS] = {"kvstrided",      "--config", d->config, "--socket", d->socket,
                                  "--admin-socket", d->admin,   "--set",   metrics};
    int n = 9;

    (void)snprintf(metrics, sizeof metrics, "metrics.path=%s", d->metrics);
    while (more != NULL && *more != NULL && n < MAX_ARGS - 1)
        args[n++] = *more++;
    while (hear(d, drained, sizeof drained))
        ; /* of an earlier life */
    program_path(program, sizeof program);
    d->pid = fork();
    if (d->pid == 0) {
        prepare(d);
        close_some(d);
        (void)execv(program, (char *const *)(uintptr_t)args);
        _exit(127);
    }
    for (int i = 0; i < 2; i++) {
        if (d->listen_fd[i] >= 0)
            (void)close(d->listen_fd[i]);
        d->listen_fd[i] = -1;
    }
}

bool daemon_start(daemon_fixture *d, const char *json)
{
    if (json != NULL)
        daemon_configure(d, json);
    daemon_spawn(d, NULL);
    return daemon_wait_notified(d, "READY=1", START_MS);
}

bool daemon_alive(const daemon_fixture *d)
{
    siginfo_t info = {0};

    return waitid(P_PID, (id_t)d->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
}

bool daemon_wait_notified(const daemon_fixture *d, const char *word, int timeout_ms)
{
    uint64_t end = raw_now_ms() + (uint64_t)timeout_ms;

    for (;;) {
        struct pollfd p = {.fd = d->notify_fd, .events = POLLIN};
        char text[1024];

        if (hear(d, text, sizeof text)) {
            if (strstr(text, word) != NULL)
                return true;
            continue;
        }
        if (raw_now_ms() >= end || !daemon_alive(d))
            return false;
        (void)poll(&p, 1, 20);
    }
}

int daemon_wait(daemon_fixture *d, int timeout_ms)
{
    uint64_t end = raw_now_ms() + (uint64_t)timeout_ms;
    int status;

    while (waitpid(d->pid, &status, WNOHANG) == 0) {
        if (raw_now_ms() >= end)
            return -1;
        nap();
    }
    d->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int daemon_stop(daemon_fixture *d, int signum)
{
    if (d->pid <= 0) /* it does not run: kill would take that for a group */
        return -1;
    (void)kill(d->pid, signum);
    return daemon_wait(d, STOP_MS);
}

/* A file of unknown length as text; the caller frees it. */
static char *slurp(const char *path)
{
    FILE *f = fopen(path, "re");
    size_t len = 0, cap = 4096;
    char *text = malloc(cap);

    if (text == NULL)
        die("slurp");
    while (f != NULL) {
        len += fread(text + len, 1, cap - 1 - len, f);
        if (len + 1 < cap)
            break;
        text = realloc(text, cap *= 2);
        if (text == NULL)
            die("slurp");
    }
    text[len] = '\0';
    if (f != NULL)
        (void)fclose(f);
    return text;
}

unsigned daemon_log_count(const daemon_fixture *d, const char *text)
{
    char *all = slurp(d->log);
    unsigned n = 0;

    for (const char *p = all; (p = strstr(p, text)) != NULL; p++)
        n++;
    free(all);
    return n;
}

bool daemon_wait_log(const daemon_fixture *d, const char *text, unsigned n, int timeout_ms)
{
    uint64_t end = raw_now_ms() + (uint64_t)timeout_ms;

    while (daemon_log_count(d, text) < n) {
        if (raw_now_ms() >= end)
            return false;
        nap();
    }
    return true;
}

unsigned daemon_fds(const daemon_fixture *d)
{
    return count_fds(d->pid);
}

bool daemon_wait_fds(const daemon_fixture *d, unsigned n, int timeout_ms)
{
    uint64_t end = raw_now_ms() + (uint64_t)timeout_ms;

    while (daemon_fds(d) > n) {
        if (raw_now_ms() >= end)
            return false;
        nap();
    }
    return true;
}

static char *proc_file(const daemon_fixture *d, const char *name)
{
    char path[320];

    (void)snprintf(path, sizeof path, "/proc/%d/%s", (int)d->pid, name);
    return slurp(path);
}

uint64_t daemon_private_kib(const daemon_fixture *d)
{
    char *text = proc_file(d, "status");
    const char *line = strstr(text, "RssAnon:");
    uint64_t kib = line != NULL ? strtoull(line + strlen("RssAnon:"), NULL, 10) : 0;

    free(text);
    return kib;
}

uint64_t daemon_cpu_ms(const daemon_fixture *d)
{
    char *text = proc_file(d, "stat");
    const char *p = strrchr(text, ')');
    unsigned long long user = 0, sys = 0;

    /* Fields 14 and 15; the name in parentheses is field 2. */
    if (p != NULL)
        (void)sscanf(p + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user, &sys);
    free(text);
    return (user + sys) * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);
}

uint64_t daemon_sleeps(const daemon_fixture *d)
{
    static const char FIELD[] = "\nvoluntary_ctxt_switches:";
    char path[64];
    uint64_t n = 0;
    DIR *tasks;

    (void)snprintf(path, sizeof path, "/proc/%d/task", (int)d->pid);
    tasks = opendir(path);
    if (tasks == NULL)
        die(path);
    for (const struct dirent *e; (e = readdir(tasks)) != NULL;) {
        char name[sizeof "task//status" + sizeof e->d_name], *text;
        const char *line;

        if (e->d_name[0] == '.')
            continue;
        (void)snprintf(name, sizeof name, "task/%s/status", e->d_name);
        text = proc_file(d, name);
        line = strstr(text, FIELD);
        n += line != NULL ? strtoull(line + strlen(FIELD), NULL, 10) : 0;
        free(text);
    }
    (void)closedir(tasks);
    return n;
}

int daemon_run(const daemon_fixture *d, const char *const *args, char *out, size_t cap)
{
    const char *argv[MAX_ARGS] = {"kvstrided"};
    char program[4096], path[96], *text;
    int n = 1, status = -1;
    pid_t pid;

    (void)snprintf(path, sizeof path, "%s/out", d->dir);
    while (*args != NULL && n < MAX_ARGS - 1)
        argv[n++] = *args++;
    program_path(program, sizeof program);
    pid = fork();
    if (pid == 0) {
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

        (void)dup2(fd, STDOUT_FILENO);
        (void)dup2(fd, STDERR_FILENO);
        (void)close(fd);
        close_some(d);
        (void)execv(program, (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    (void)waitpid(pid, &status, 0);
    text = slurp(path);
    if (cap > 0)
        (void)snprintf(out, cap, "%s", text);
    free(text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
