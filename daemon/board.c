#include "daemon/board.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "daemon/thread.h"

enum { FRESH = 4 }; /* bit of `middle`: nobody has read it yet */

struct board {
    work ask; /* first; on its way to the loop while `asked` */
    work_sink sink;
    void (*fill)(void *ud, metrics_snapshot *s);
    void *ud;
    _Atomic bool asked, closed;
    _Atomic uint64_t turned_us;
    /* Three snapshots: the loop's, the readers', and the one in the middle that they swap theirs for. */
    metrics_snapshot of[3];
    uint32_t back;
    _Atomic uint32_t middle;
    uint32_t front; /* under the lock */
    uint64_t seq, fill_ns;
    sem_t filled;
    pthread_mutex_t lock; /* of the readers */
};

static void publish(board *b)
{
    uint64_t began = thread_now_ns();
    metrics_snapshot *s = &b->of[b->back];

    b->fill(b->ud, s);
    s->seq = ++b->seq;
    s->fill_ns = b->fill_ns;
    b->back = atomic_exchange(&b->middle, b->back | FRESH) & ~(uint32_t)FRESH;
    b->fill_ns += thread_now_ns() - began;
}

static void on_asked(work *w)
{
    board *b = (board *)(void *)w;

    atomic_store(&b->asked, false); /* before: who asks from here on gets another one */
    if (atomic_load(&b->closed))
        return;
    publish(b);
    (void)sem_post(&b->filled);
}

kvs_status board_create(board **ret, work_sink sink, void (*fill)(void *ud, metrics_snapshot *s), void *ud,
                        kvs_err *err)
{
    board *b = calloc(1, sizeof *b);

    if (b == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "metrics: no memory for %zu bytes of snapshots", sizeof *b);
    if (sem_init(&b->filled, 0, 0) != 0) {
        free(b);
        return kvs_fail(err, KVS_E_SYS, "metrics: no semaphore");
    }
    (void)pthread_mutex_init(&b->lock, NULL);
    b->ask.on_done = on_asked;
    b->sink = sink;
    b->fill = fill;
    b->ud = ud;
    b->middle = 1;
    b->front = 2;
    board_turned(b, thread_now_us());
    publish(b);
    *ret = b;
    return KVS_OK;
}

void board_turned(board *b, uint64_t now_us)
{
    atomic_store_explicit(&b->turned_us, now_us, memory_order_relaxed);
}

uint64_t board_turn_age_us(const board *b)
{
    uint64_t turned = atomic_load_explicit(&b->turned_us, memory_order_relaxed), now = thread_now_us();

    return now > turned ? now - turned : 0;
}

void board_close(board *b)
{
    atomic_store(&b->closed, true);
    (void)sem_post(&b->filled);
}

void board_destroy(board *b)
{
    if (b == NULL)
        return;
    (void)sem_destroy(&b->filled);
    (void)pthread_mutex_destroy(&b->lock);
    free(b);
}

/* Ask, and wait until the loop has answered or the time is up.  One reader at a time. */
static void refresh(board *b, uint64_t wait_us)
{
    struct timespec until;
    uint64_t ns;
    int rc;

    while (sem_trywait(&b->filled) == 0)
        ; /* answers to those who did not wait for them */
    if (atomic_load(&b->closed))
        return;
    if (!atomic_exchange(&b->asked, true))
        b->sink.post(b->sink.ud, &b->ask);
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    ns = (uint64_t)until.tv_nsec + wait_us % 1000000 * 1000;
    until.tv_sec += (time_t)(wait_us / 1000000 + ns / 1000000000);
    until.tv_nsec = (long)(ns % 1000000000);
    do
        rc = sem_clockwait(&b->filled, CLOCK_MONOTONIC, &until);
    while (rc != 0 && errno == EINTR);
}

void board_read(board *b, uint64_t wait_us, metrics_snapshot *ret)
{
    uint64_t now;

    (void)pthread_mutex_lock(&b->lock);
    refresh(b, wait_us);
    if (atomic_load(&b->middle) & FRESH)
        b->front = atomic_exchange(&b->middle, b->front) & ~(uint32_t)FRESH;
    *ret = b->of[b->front];
    (void)pthread_mutex_unlock(&b->lock);
    now = thread_now_us();
    ret->age_us = now > ret->taken_us ? now - ret->taken_us : 0;
}
