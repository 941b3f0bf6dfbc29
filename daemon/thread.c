#include "daemon/thread.h"

#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "proto/cpus.h"

enum { SPIN_CPUS = 4 }; /* the loop, a mover, a client, and whoever else there is */

uint64_t thread_now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

uint64_t thread_now_us(void)
{
    return thread_now_ns() / 1000;
}

bool thread_may_spin(void)
{
    return cpus_usable() >= SPIN_CPUS;
}

void thread_exact_timers(void)
{
    (void)prctl(PR_SET_TIMERSLACK, 1UL);
}

int thread_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    int r = pthread_condattr_init(&attr);

    if (r != 0)
        return r;
    r = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (r == 0)
        r = pthread_cond_init(c, &attr);
    (void)pthread_condattr_destroy(&attr);
    return r;
}

void thread_cond_wait_us(pthread_cond_t *c, pthread_mutex_t *m, uint64_t us)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    us += (uint64_t)t.tv_nsec / 1000;
    t.tv_sec += (time_t)(us / 1000000);
    t.tv_nsec = (long)(us % 1000000 * 1000);
    (void)pthread_cond_timedwait(c, m, &t);
}

/* But for faults of the thread itself: blocked, they end the process before a sanitizer or a debugger's handler has said where. */
static void all_that_may_wait(sigset_t *ret)
{
    static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};

    (void)sigfillset(ret);
    for (size_t i = 0; i < sizeof FAULTS / sizeof FAULTS[0]; i++)
        (void)sigdelset(ret, FAULTS[i]);
}

kvs_status thread_start(pthread_t *ret, const char *name, void *(*fn)(void *), void *arg, kvs_err *err)
{
    sigset_t all, before;
    int r;

    /* The new thread inherits the mask, so there is no instant at which it could take a signal. */
    all_that_may_wait(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    r = pthread_create(ret, NULL, fn, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (r != 0)
        return kvs_fail(err, KVS_E_SYS, "thread %s: pthread_create: %s", name, strerror(r));
    (void)pthread_setname_np(*ret, name);
    return KVS_OK;
}
