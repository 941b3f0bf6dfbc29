#include "proto/ctl/bench_busy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/engine_cuda.h"
#include "proto/ctl/clock.h"

enum { STEPS = 1 << 16, START_MS = 30000, WARM_STEPS = 50, NAP_MS = 5 };

typedef struct step {
    uint64_t ended_ns;
    double ms;
} step;

struct bench_busy {
    pid_t pid;   /* 0: inside */
    FILE *lines; /* of the process */
    enum engine_cuda_work work;
    _Atomic bool stop;
    pthread_t thread;     /* reads its lines, or is the engine */
    pthread_mutex_t lock; /* steps, n, ended */
    step steps[STEPS];    /* the last ones: step i is at i % STEPS */
    uint64_t n;
    bool ended;
};

/* ---- the engine ---- */

static kvs_status find_work(const char *work, enum engine_cuda_work *ret, kvs_err *err)
{
    static const char *const NAMES[ENGINE_CUDA_WORKS] = {"compute", "memory", "latency"};

    for (int i = 0; i < ENGINE_CUDA_WORKS; i++)
        if (strcmp(work, NAMES[i]) == 0) {
            *ret = (enum engine_cuda_work)i;
            return KVS_OK;
        }
    return kvs_fail(err, KVS_E_INVALID, "--engine %.20s: is none of compute, memory, latency", work);
}

kvs_status bench_busy_run(const char *work, kvs_err *err)
{
    engine_cuda *e = NULL;
    enum engine_cuda_work which = ENGINE_CUDA_COMPUTE;
    kvs_status s = find_work(work, &which, err);

    if (s == KVS_OK && engine_cuda_open(&e, err) != KVS_OK)
        s = KVS_E_UNSUPPORTED;
    while (s == KVS_OK) {
        double ms = 0;

        s = engine_cuda_step(e, which, &ms, err);
        if (s == KVS_OK && (printf("%" PRIu64 " %.6f\n", clock_ns(), ms) < 0 || fflush(stdout) != 0))
            break; /* nobody reads any more */
    }
    engine_cuda_close(e);
    return s;
}

/* ---- who looks at it ---- */

static void keep(bench_busy *b, step x)
{
    (void)pthread_mutex_lock(&b->lock);
    b->steps[b->n++ % STEPS] = x;
    (void)pthread_mutex_unlock(&b->lock);
}

static void has_ended(bench_busy *b)
{
    (void)pthread_mutex_lock(&b->lock);
    b->ended = true;
    (void)pthread_mutex_unlock(&b->lock);
}

static void *read_lines(void *arg)
{
    bench_busy *b = arg;
    char line[128];
    step x;

    while (fgets(line, sizeof line, b->lines) != NULL)
        if (sscanf(line, "%" SCNu64 " %lf", &x.ended_ns, &x.ms) == 2)
            keep(b, x);
    has_ended(b);
    return NULL;
}

static void *work_inside(void *arg)
{
    bench_busy *b = arg;
    engine_cuda *e = NULL;
    kvs_status s = engine_cuda_open(&e, NULL);

    while (s == KVS_OK && !atomic_load(&b->stop)) {
        double ms = 0;

        s = engine_cuda_step(e, b->work, &ms, NULL);
        if (s == KVS_OK)
            keep(b, (step){clock_ns(), ms});
    }
    engine_cuda_close(e);
    has_ended(b);
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
    (void)nanosleep(&(struct timespec){.tv_nsec = NAP_MS * 1000000L}, NULL);
}

static void end_process(bench_busy *b)
{
    if (b->pid <= 0)
        return;
    (void)kill(b->pid, SIGKILL);
    (void)waitpid(b->pid, NULL, 0);
}

static void destroy(bench_busy *b)
{
    if (b->lines != NULL)
        (void)fclose(b->lines);
    (void)pthread_mutex_destroy(&b->lock);
    free(b);
}

void bench_busy_stop(bench_busy *b)
{
    if (b == NULL)
        return;
    end_process(b);
    atomic_store(&b->stop, true);
    (void)pthread_join(b->thread, NULL); /* the pipe has ended with the process */
    destroy(b);
}

static kvs_status start_process(bench_busy *b, const char *work, kvs_err *err)
{
    int fds[2];

    if (pipe2(fds, O_CLOEXEC) != 0)
        return kvs_fail(err, KVS_E_SYS, "engine: pipe: %s", strerror(errno));
    (void)fflush(NULL);
    b->pid = fork();
    if (b->pid == 0)
        run_child(work, fds[1]);
    (void)close(fds[1]);
    b->lines = b->pid > 0 ? fdopen(fds[0], "r") : NULL;
    if (b->lines == NULL)
        (void)close(fds[0]);
    return b->lines != NULL ? KVS_OK : kvs_fail(err, KVS_E_SYS, "engine: no process: %s", strerror(errno));
}

static kvs_status wait_warm(bench_busy *b, const char *work, kvs_err *err)
{
    bool ended = false;

    for (int waited = 0; !is_warm(b, &ended); waited += NAP_MS) {
        if (ended || waited > START_MS)
            return kvs_fail(err, KVS_E_AWAY, "the %s-bound engine did not start", work);
        nap();
    }
    return KVS_OK;
}

kvs_status bench_busy_start(bench_busy **ret, const char *work, bool inside, kvs_err *err)
{
    bench_busy *b = calloc(1, sizeof *b);
    kvs_status s;

    if (b == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "engine: no memory");
    (void)pthread_mutex_init(&b->lock, NULL);
    s = find_work(work, &b->work, err);
    if (s == KVS_OK && !inside)
        s = start_process(b, work, err);
    if (s == KVS_OK && pthread_create(&b->thread, NULL, inside ? work_inside : read_lines, b) != 0)
        s = kvs_fail(err, KVS_E_SYS, "engine: no thread");
    if (s != KVS_OK) {
        end_process(b);
        destroy(b);
        return s;
    }
    s = wait_warm(b, work, err);
    if (s != KVS_OK) {
        bench_busy_stop(b);
        return s;
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
