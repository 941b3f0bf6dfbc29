#include "proto/ctl/busy.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/ctl/clock.h"

enum { START_MS = 30000, STEP_MS = 2, FEWEST_CALLS = 8 };
enum busy_state { BUSY_SLEEPS, BUSY_STARTS, BUSY_WORKS, BUSY_FAILED };
#define PATIENCE_NS UINT64_C(10000000000)

struct busy_shared {
    _Atomic uint32_t state, stop;
    _Atomic uint64_t calls;
    kvs_err err; /* of FAILED */
};

static void step(void)
{
    (void)nanosleep(&(struct timespec){0, STEP_MS * 1000000L}, NULL);
}

/* ---- the other process ---- */

static bool on_call(void *ud)
{
    struct busy_shared *m = ud;

    atomic_store(&m->state, BUSY_WORKS);
    (void)atomic_fetch_add(&m->calls, 1);
    return !atomic_load(&m->stop);
}

_Noreturn static void child(busy_run run, void *ud, struct busy_shared *m, pid_t parent)
{
    kvs_err err = {.msg = ""};

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1); /* it died before the line above */
    while (atomic_load(&m->state) == BUSY_SLEEPS)
        step();
    if (run(ud, on_call, m, &err) != KVS_OK) {
        m->err = err;
        atomic_store(&m->state, BUSY_FAILED);
    }
    _exit(0);
}

/* ---- this process ---- */

kvs_status busy_start(busy *b, busy_run run, void *ud, kvs_err *err)
{
    pid_t parent = getpid();
    void *p = mmap(NULL, sizeof *b->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    *b = (busy){0};
    if (p == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, "busy process: mmap: %s", strerror(errno));
    b->shared = p;
    b->pid = fork();
    if (b->pid == 0)
        child(run, ud, b->shared, parent);
    if (b->pid < 0) {
        b->pid = 0;
        busy_stop(b);
        return kvs_fail(err, KVS_E_SYS, "busy process: fork: %s", strerror(errno));
    }
    return KVS_OK;
}

kvs_status busy_go(busy *b, kvs_err *err)
{
    atomic_store(&b->shared->state, BUSY_STARTS);
    for (int waited = 0; waited < START_MS; waited += STEP_MS) {
        bool ended = waitpid(b->pid, NULL, WNOHANG) == b->pid;
        uint32_t state = atomic_load(&b->shared->state); /* the last one, if it has ended */

        if (ended)
            b->pid = 0;
        if (state == BUSY_FAILED)
            return kvs_fail(err, b->shared->err.status, "busy process: %.150s", b->shared->err.msg);
        if (ended)
            return kvs_fail(err, KVS_E_SYS, "busy process: it has ended");
        if (state == BUSY_WORKS)
            return KVS_OK;
        step();
    }
    return kvs_fail(err, KVS_E_DEADLINE, "busy process: not at work after %d s", START_MS / 1000);
}

uint64_t busy_calls(const busy *b)
{
    return atomic_load(&b->shared->calls);
}

kvs_status busy_speed(const busy *b, uint32_t ms, double *ret, kvs_err *err)
{
    uint64_t began = clock_ns(), calls = busy_calls(b), ns = 0;

    while (ns < ms * UINT64_C(1000000) || busy_calls(b) < calls + FEWEST_CALLS) {
        if (ns > PATIENCE_NS)
            return kvs_fail(err, KVS_E_DEADLINE, "busy process: it has done nothing for 10 s");
        step();
        ns = clock_ns() - began;
    }
    *ret = (double)(busy_calls(b) - calls) / (double)ns * 1e9;
    return KVS_OK;
}

void busy_stop(busy *b)
{
    if (b->pid > 0) {
        atomic_store(&b->shared->stop, 1);
        (void)kill(b->pid, SIGKILL);
        (void)waitpid(b->pid, NULL, 0);
    }
    if (b->shared != NULL)
        (void)munmap(b->shared, sizeof *b->shared);
    *b = (busy){0};
}
