#include "daemon/disposal.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/log.h"
#include "daemon/thread.h"

enum {
    IDLE_US = 500 * 1000, /* a thread with nothing to do waits for more before it ends */
    MANY = 256,           /* so many behind closes that do not return: an operator should know */
    STEP_US = 1000,
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* everything below */
static pthread_cond_t wake;
static bool has_wake;
static int *queue; /* in no order */
static size_t n_queued, cap;
static uint32_t n_threads, n_idle;

/* A socket that lingers would keep this thread.  That it is the client's own, which it may still use, is its own fault. */
static void close_now(int fd)
{
    const struct linger none = {0, 0};

    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
    (void)close(fd);
}

/* The next one, for which the caller waits with the lock held; -1: none has come for a while. */
static int next_fd(void)
{
    uint64_t until = thread_now_us() + IDLE_US;

    n_idle++;
    for (uint64_t now = thread_now_us(); n_queued == 0 && now < until; now = thread_now_us())
        thread_cond_wait_us(&wake, &lock, until - now);
    n_idle--;
    return n_queued > 0 ? queue[--n_queued] : -1;
}

static void *disposal_main(void *arg)
{
    int fd;

    (void)pthread_mutex_lock(&lock);
    while ((fd = next_fd()) >= 0) {
        (void)pthread_mutex_unlock(&lock);
        close_now(fd);
        (void)pthread_mutex_lock(&lock);
    }
    n_threads--;
    (void)pthread_mutex_unlock(&lock);
    return arg;
}

/* Under the lock: somebody will look at the queue. */
static bool has_hands(void)
{
    pthread_t t;

    if (n_idle >= n_queued || n_threads >= DISPOSAL_THREADS) {
        (void)pthread_cond_signal(&wake);
        return true;
    }
    if (!has_wake)
        has_wake = thread_cond_init(&wake) == 0;
    if (!has_wake || thread_start(&t, "kvs-close", disposal_main, NULL, NULL) != KVS_OK)
        return n_threads > 0;
    (void)pthread_detach(t);
    n_threads++;
    return true;
}

static bool push(int fd)
{
    if (n_queued == cap) {
        size_t more = cap != 0 ? cap * 2 : 64;
        int *p = realloc(queue, more * sizeof *p);

        if (p == NULL)
            return false;
        queue = p;
        cap = more;
    }
    queue[n_queued++] = fd;
    return true;
}

void disposal_close(int fd)
{
    bool taken, many;

    (void)pthread_mutex_lock(&lock);
    taken = push(fd);
    if (taken && !has_hands()) {
        n_queued--;
        taken = false;
    }
    many = taken && n_queued == MANY && n_idle == 0;
    (void)pthread_mutex_unlock(&lock);
    if (!taken)
        close_now(fd);
    if (many)
        log_event(LOG_LEVEL_WARN, "closes_hang",
                  " n=%d msg=\"descriptors of clients wait behind closes that do not return\"", (int)MANY);
}

bool disposal_wait(uint32_t timeout_ms)
{
    uint64_t until = thread_now_us() + (uint64_t)timeout_ms * 1000;
    bool done = false;

    for (;;) {
        (void)pthread_mutex_lock(&lock);
        done = n_queued == 0 && n_idle == n_threads;
        (void)pthread_mutex_unlock(&lock);
        if (done || thread_now_us() >= until)
            return done;
        (void)usleep(STEP_US);
    }
}
