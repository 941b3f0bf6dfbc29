#include "proto/ctl/bench_busy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/engine_cuda.h"
#include "proto/ctl/clock.h"

enum { STEPS = 1 << 16, START_MS = 30000, WARM_STEPS = 50 };

typedef struct step {
    uint64_t ended_ns;
    double ms;
} step;

struct bench_busy {
    pid_t pid;
    FILE *lines;
    pthread_t reader;
    pthread_mutex_t lock; /* steps, n, ended */
    step steps[STEPS];    /* the last ones: step i is at i % STEPS */
    uint64_t n;
    bool ended;
};

/* ---- the engine ---- */

kvs_status bench_busy_run(const char *work, kvs_err *err)
{
    static const char *const NAMES[ENGINE_CUDA_WORKS] = {"compute", "memory"};
    engine_cuda *e = NULL;
    int which = 0;
    kvs_status s;

    while (which < ENGINE_CUDA_WORKS && strcmp(work, NAMES[which]) != 0)
        which++;
    if (which == ENGINE_CUDA_WORKS)
        return kvs_fail(err, KVS_E_INVALID, "--engine %.20s: is neither compute nor memory", work);
    s = engine_cuda_open(&e, err);
    while (s == KVS_OK) {
        double ms = 0;

        s = engine_cuda_step(e, (enum engine_cuda_work)which, &ms, err);
        if (s == KVS_OK && (printf("%" PRIu64 " %.6f\n", clock_ns(), ms) < 0 || fflush(stdout) != 0))
            break; /* nobody reads any more */
    }
    engine_cuda_close(e);
    return s;
}

/* ---- who looks at it ---- */

static void *read_lines(void *arg)
{
    bench_busy *b = arg;
    char line[128];

    while (fgets(line, sizeof line, b->lines) != NULL) {
        step x;

        if (sscanf(line, "%" SCNu64 " %lf", &x.ended_ns, &x.ms) != 2)
            continue;
        (void)pthread_mutex_lock(&b->lock);
        b->steps[b->n++ % STEPS] = x;
        (void)pthread_mutex_unlock(&b->lock);
    }
    (void)pthread_mutex_lock(&b->lock);
    b->ended = true;
    (void)pthread_mutex_unlock(&b->lock);
    return NULL;
}

static void run_child(const char *work, int fd)
{
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)dup2(fd, STDOUT_FILENO);
    if (n > 0) {
        self[n] = '\0';
        (void)execl(self, "kvstridectl", "bench", "--engine", work, (char *)NULL);
    }
    _exit(127);
}

static bool is_warm(bench_busy *b, bool *ret_ended)
{
    bool warm;

    (void)pthread_mutex_lock(&b->lock);
    warm = b->n >= WARM_STEPS;
    *ret_ended = b->ended;
    (void)pthread_mutex_unlock(&b->lock);
    return warm;
}

static void nap(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
}

void bench_busy_stop(bench_busy *b)
{
    if (b == NULL)
        return;
    (void)kill(b->pid, SIGKILL);
    (void)waitpid(b->pid, NULL, 0);
    (void)pthread_join(b->reader, NULL); /* the pipe has ended with the process */
    (void)fclose(b->lines);
    (void)pthread_mutex_destroy(&b->lock);
    free(b);
}

kvs_status bench_busy_start(bench_busy **ret, const char *work, kvs_err *err)
{
    bench_busy *b = calloc(1, sizeof *b);
    bool ended = false;
    int fds[2];

    if (b == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "engine: no memory");
    if (pipe2(fds, O_CLOEXEC) != 0) {
        free(b);
        return kvs_fail(err, KVS_E_SYS, "engine: pipe: %s", strerror(errno));
    }
    (void)fflush(NULL);
    b->pid = fork();
    if (b->pid == 0)
        run_child(work, fds[1]);
    (void)close(fds[1]);
    b->lines = fdopen(fds[0], "r");
    (void)pthread_mutex_init(&b->lock, NULL);
    if (b->pid < 0 || b->lines == NULL || pthread_create(&b->reader, NULL, read_lines, b) != 0) {
        if (b->pid > 0) {
            (void)kill(b->pid, SIGKILL);
            (void)waitpid(b->pid, NULL, 0);
        }
        if (b->lines != NULL)
            (void)fclose(b->lines);
        else
            (void)close(fds[0]);
        free(b);
        return kvs_fail(err, KVS_E_SYS, "engine: cannot start a process or a thread");
    }
    for (int waited = 0; !is_warm(b, &ended); waited += 5) {
        if (ended || waited > START_MS) {
            bench_busy_stop(b);
            return kvs_fail(err, KVS_E_AWAY, "the %s-bound engine did not start", work);
        }
        nap();
    }
    *ret = b;
    return KVS_OK;
}

kvs_status bench_busy_ms(bench_busy *b, uint64_t from_ns, uint64_t to_ns, double *ret, kvs_err *err)
{
    double *ms = malloc(STEPS * sizeof *ms);
    size_t n = 0;

    if (ms == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "engine: no memory");
    (void)pthread_mutex_lock(&b->lock);
    for (uint64_t i = b->n > STEPS ? b->n - STEPS : 0; i < b->n; i++) {
        const step *x = &b->steps[i % STEPS];

        if (x->ms > 0 && x->ended_ns <= to_ns && (double)x->ended_ns - x->ms * 1e6 >= (double)from_ns)
            ms[n++] = x->ms;
    }
    (void)pthread_mutex_unlock(&b->lock);
    if (n > 0) {
        double sum = 0;

        for (size_t i = 0; i < n; i++)
            sum += ms[i];
        *ret = sum / (double)n; /* not the median: what is slow for a moment counts as well */
    }
    free(ms);
    return n > 0 ? KVS_OK
                 : kvs_fail(err, KVS_E_AWAY, "the engine made no step within %.0f ms", (double)(to_ns - from_ns) / 1e6);
}
