#include "proto/ctl/private.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config/json.h"
#include "proto/client/kvstride.h"
#include "proto/ctl/clock.h"

enum { MAX_SETTINGS = 32, READY_MS = 60000, STEP_MS = 20, STOP_MS = 15000 };

/* What a signal that ends this program takes along: the daemon dies with us anyway, its folder would stay.  Filled before
 * the handler is set, and only read after. */
static struct {
    pid_t owner;
    _Atomic pid_t pid;
    char dir[64], files[8][96];
} litter;

static const char *const LEFT[] = {
    "client.sock", "admin.sock", "client.sock.lock", "admin.sock.lock", "other.sock.lock", "other.sock",
    "log",         "config"};
static const int ENDING[] = {SIGINT, SIGTERM, SIGHUP};
enum { N_LEFT = sizeof LEFT / sizeof *LEFT, N_ENDING = sizeof ENDING / sizeof *ENDING };

static void on_end(int signum)
{
    if (getpid() == litter.owner) { /* not in a fork of ours */
        if (litter.pid > 0) {
            (void)kill(litter.pid, SIGKILL);
            (void)waitpid(litter.pid, NULL, 0);
        }
        for (size_t i = 0; i < N_LEFT; i++)
            (void)unlink(litter.files[i]);
        (void)rmdir(litter.dir);
    }
    (void)raise(signum); /* SA_RESETHAND: now it ends us */
}

static void watch_for_end(const private_daemon *d)
{
    struct sigaction a = {.sa_handler = on_end, .sa_flags = (int)SA_RESETHAND};

    litter.owner = getpid();
    litter.pid = 0;
    (void)snprintf(litter.dir, sizeof litter.dir, "%s", d->dir);
    for (size_t i = 0; i < N_LEFT; i++)
        (void)snprintf(litter.files[i], sizeof litter.files[i], "%s/%s", d->dir, LEFT[i]);
    for (size_t i = 0; i < N_ENDING; i++) {
        struct sigaction was;

        if (sigaction(ENDING[i], NULL, &was) == 0 && was.sa_handler == SIG_DFL) /* nohup's SIG_IGN stays */
            (void)sigaction(ENDING[i], &a, NULL);
    }
}

/* kvstrided lies beside this program; else the PATH decides. */
static void daemon_path(char *buf, size_t cap)
{
    ssize_t n = readlink("/proc/self/exe", buf, cap - 1);
    char *slash;

    if (n > 0) {
        buf[n] = '\0';
        slash = strrchr(buf, '/');
        if (slash != NULL && (size_t)(slash - buf) + sizeof "/kvstrided" <= cap) {
            (void)memcpy(slash, "/kvstrided", sizeof "/kvstrided");
            if (access(buf, X_OK) == 0)
                return;
        }
    }
    (void)snprintf(buf, cap, "kvstrided");
}

static void child(const private_daemon *d, const char *const *settings, uint32_t n, pid_t parent)
{
    const char *argv[10 + 2 * MAX_SETTINGS];
    char program[4096];
    uint32_t a = 0;
    int fd;

    daemon_path(program, sizeof program);
    argv[a++] = program;
    argv[a++] = "--socket";
    argv[a++] = d->socket;
    argv[a++] = "--admin-socket";
    argv[a++] = d->admin;
    argv[a++] = "--config"; /* of its own: the host's file is not for us */
    argv[a++] = d->config;
    argv[a++] = "--set";
    argv[a++] = "metrics.enabled=false";
    for (uint32_t i = 0; i < n && i < MAX_SETTINGS; i++) {
        argv[a++] = "--set";
        argv[a++] = settings[i];
    }
    argv[a] = NULL;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127); /* the parent died before the line above */
    fd = open(d->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0)
        (void)dup2(fd, STDERR_FILENO);
    fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fd >= 0) {
        (void)dup2(fd, STDIN_FILENO);
        (void)dup2(fd, STDOUT_FILENO);
    }
    (void)unsetenv("NOTIFY_SOCKET");
    (void)unsetenv("LISTEN_FDS");
    (void)execvp(program, (char *const *)(uintptr_t)argv);
    (void)fprintf(stderr, "%s: %s\n", program, strerror(errno));
    _exit(127);
}

/* The last line the daemon wrote. */
static void last_words(const private_daemon *d, char *buf, size_t cap)
{
    FILE *f = fopen(d->log, "r");
    char line[512];

    (void)snprintf(buf, cap, "it said nothing");
    if (f == NULL)
        return;
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (line[0] != '\0')
            (void)snprintf(buf, cap, "%.150s", line);
    }
    (void)fclose(f);
}

/* True once HEALTH is ok and every piece of the arena is usable. */
static bool is_ready(const private_daemon *d)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;
    kvs_health_info h;
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;
    bool ready = false;

    o.path = d->admin;
    o.connect_timeout_ms = 1000;
    if (kvs_connect(&c, &o, NULL) != KVS_OK)
        return false;
    if (kvs_health(c, &h, 1000, NULL) == KVS_OK && h.state == KVS_HEALTH_OK &&
        kvs_report_alloc(c, &a, &text, &len, 1000, NULL) == KVS_OK && json_parse(text, len, &doc, NULL) == KVS_OK) {
        const json_node *pool = json_member(json_root(doc), "pool");
        const json_node *growing = pool != NULL ? json_member(pool, "growing") : NULL;

        ready = growing != NULL && json_type_of(growing) == JSON_BOOL && !json_bool(growing);
    }
    json_destroy(doc);
    kvs_free(text);
    kvs_close(c);
    return ready;
}

static void end_process(private_daemon *d)
{
    struct timespec step = {0, STEP_MS * 1000000L};
    int waited = 0;

    if (d->pid <= 0)
        return;
    (void)kill(d->pid, SIGTERM);
    while (waitpid(d->pid, NULL, WNOHANG) == 0 && waited < STOP_MS) {
        (void)nanosleep(&step, NULL);
        waited += STEP_MS;
    }
    if (waited >= STOP_MS) {
        (void)kill(d->pid, SIGKILL);
        (void)waitpid(d->pid, NULL, 0);
    }
    d->pid = 0;
    litter.pid = 0;
}

/* A process, until it is ready.  On failure nothing is left of the daemon, its folder included. */
static kvs_status launch(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err)
{
    struct timespec step = {0, STEP_MS * 1000000L};
    char words[160];
    pid_t parent = getpid();
    int status = 0;

    (void)fflush(NULL);
    d->pid = fork();
    if (d->pid == 0)
        child(d, settings, n, parent);
    if (d->pid < 0) {
        d->pid = 0;
        private_stop(d);
        return kvs_fail(err, KVS_E_SYS, "fork: %s", strerror(errno));
    }
    litter.pid = d->pid;
    for (int waited = 0; waited < READY_MS; waited += STEP_MS) {
        if (is_ready(d))
            return KVS_OK;
        if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
            d->pid = 0;
            litter.pid = 0;
            last_words(d, words, sizeof words);
            private_stop(d);
            return kvs_fail(err, KVS_E_AWAY, "the private daemon ended with status %d: %s",
                            WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), words);
        }
        (void)nanosleep(&step, NULL);
    }
    last_words(d, words, sizeof words);
    private_stop(d);
    return kvs_fail(err, KVS_E_AWAY, "the private daemon was not ready after %d s: %s", READY_MS / 1000, words);
}

/* The folder with its paths, and a configuration: the host's file is not for us. */
static kvs_status make(private_daemon *d, bool has_tenant, kvs_err *err)
{
    const char *tmp = getenv("TMPDIR");
    FILE *f;

    *d = (private_daemon){0};
    if (tmp == NULL || tmp[0] != '/' || strlen(tmp) > 40)
        tmp = "/tmp"; /* socket paths are short */
    (void)snprintf(d->dir, sizeof d->dir, "%s/kvstride-XXXXXX", tmp);
    if (mkdtemp(d->dir) == NULL)
        return kvs_fail(err, KVS_E_SYS, "temporary folder %s: %s", d->dir, strerror(errno));
    watch_for_end(d);
    (void)snprintf(d->socket, sizeof d->socket, "%s/client.sock", d->dir);
    (void)snprintf(d->admin, sizeof d->admin, "%s/admin.sock", d->dir);
    (void)snprintf(d->other, sizeof d->other, "%s/other.sock", d->dir);
    (void)snprintf(d->log, sizeof d->log, "%s/log", d->dir);
    (void)snprintf(d->config, sizeof d->config, "%s/config", d->dir);
    f = fopen(d->config, "w");
    if (f == NULL ||
        (has_tenant ? fprintf(f, "{\"tenants\": [{\"name\": \"other\", \"path\": \"%s\"}]}\n", d->other)
                    : fputs("{}\n", f)) < 0 ||
        fclose(f) != 0) {
        private_stop(d);
        return kvs_fail(err, KVS_E_SYS, "%s: %s", d->config, strerror(errno));
    }
    return KVS_OK;
}

kvs_status private_start(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err)
{
    kvs_status s = make(d, false, err);

    return s == KVS_OK ? launch(d, settings, n, err) : s;
}

kvs_status private_start_tenant(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err)
{
    kvs_status s = make(d, true, err);

    return s == KVS_OK ? launch(d, settings, n, err) : s;
}

kvs_status private_restart(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err)
{
    end_process(d);
    return launch(d, settings, n, err);
}

void private_stop(private_daemon *d)
{
    char path[160];

    end_process(d);
    if (d->dir[0] != '\0') {
        for (size_t i = 0; i < N_LEFT; i++) {
            (void)snprintf(path, sizeof path, "%s/%s", d->dir, LEFT[i]);
            (void)unlink(path);
        }
        (void)rmdir(d->dir);
        for (size_t i = 0; i < N_ENDING; i++) {
            struct sigaction is;

            if (sigaction(ENDING[i], NULL, &is) == 0 && is.sa_handler == on_end)
                (void)signal(ENDING[i], SIG_DFL);
        }
    }
    *d = (private_daemon){0};
}
