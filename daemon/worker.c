#include "daemon/worker.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/beat.h"
#include "daemon/thread.h"

enum {
    SPIN_US = 20,        /* a counter is often reached within a few us of the submit */
    FIRST_SLEEP_US = 50, /* then sleep, doubling ... */
    LONGEST_SLEEP_US = 1000,
    /* Waiting jobs looked at between two runs.  A full pass would let a client with very many stuck jobs tax
     * every job of the others. */
    POLL_SLICE = 64,
};

typedef struct job_list {
    job *head, **tail; /* tail: where the next link goes */
} job_list;

struct worker {
    const worker_ops *ops;
    void *ud;
    work_sink sink;
    pthread_t thread;

    pthread_mutex_t lock; /* inbox, kicked, closing, start_status */
    pthread_cond_t wake;
    job_list inbox;
    uint64_t next_seq;
    bool kicked, closing, started;
    kvs_status start_status;
    kvs_err start_err;
    _Atomic bool mail; /* something above changed; spares the lock in the polling loop */

    /* the thread's own */
    job_list ready, waiting;
    uint64_t n_waiting, polled; /* polled: since the last pause */
    uint64_t idle_since_us, sleep_us;

    _Atomic uint64_t jobs, failed, queued, busy_us, run_since_us;
};

static void list_init(job_list *l)
{
    l->head = NULL;
    l->tail = &l->head;
}

static void list_push(job_list *l, job *j)
{
    j->next_wait = NULL;
    *l->tail = j;
    l->tail = &j->next_wait;
}

static job *list_remove(job_list *l, job **at)
{
    job *j = *at;

    *at = j->next_wait;
    if (*at == NULL)
        l->tail = at;
    j->next_wait = NULL;
    return j;
}

static job *list_pop(job_list *l)
{
    return l->head == NULL ? NULL : list_remove(l, &l->head);
}

/* Into submit order.  A job that had to wait is older than most, so the place is near the head. */
static void list_insert(job_list *l, job *j)
{
    job **at = &l->head;

    while (*at != NULL && (*at)->seq < j->seq)
        at = &(*at)->next_wait;
    j->next_wait = *at;
    *at = j;
    if (j->next_wait == NULL)
        l->tail = &j->next_wait;
}

static void add(_Atomic uint64_t *n, uint64_t by)
{
    (void)atomic_fetch_add_explicit(n, by, memory_order_relaxed);
}

static uint64_t get(const _Atomic uint64_t *n)
{
    return atomic_load_explicit(n, memory_order_relaxed);
}

static void post_cancelled(worker *w, job *j)
{
    j->status = KVS_E_CANCELLED;
    (void)kvs_fail(&j->err, KVS_E_CANCELLED, "cancelled before it started");
    add(&w->queued, UINT64_MAX);
    w->sink.post(w->sink.ud, &j->work);
}

/* The job is the submitter's again with the post, so everything that counts or signals comes before it. */
static void run_and_post(worker *w, job *j)
{
    uint64_t began = thread_now_us();

    add(&w->queued, UINT64_MAX);
    atomic_store_explicit(&w->run_since_us, began, memory_order_relaxed);
    j->status = KVS_OK;
    j->err.status = KVS_OK;
    w->ops->run(w->ud, j);
    if (j->signal_by_worker && j->status == KVS_OK)
        job_signal(j, KVS_OK);
    add(&w->busy_us, thread_now_us() - began);
    add(&w->jobs, 1);
    if (j->status != KVS_OK && j->status != KVS_E_CANCELLED)
        add(&w->failed, 1);
    atomic_store_explicit(&w->run_since_us, 0, memory_order_relaxed);
    w->sink.post(w->sink.ud, &j->work);
}

static void finish(worker *w, job *j)
{
    if (job_claim(j))
        run_and_post(w, j);
    else
        post_cancelled(w, j);
}

/* Post the dropped jobs of a list; `all`: drop the others too. */
static uint64_t sweep(worker *w, job_list *l, bool all)
{
    uint64_t n = 0;

    for (job **at = &l->head; *at != NULL;) {
        if (all)
            (void)job_drop(*at);
        if (atomic_load_explicit(&(*at)->state, memory_order_acquire) == JOB_DROPPED) {
            post_cancelled(w, list_remove(l, at));
            n++;
        } else {
            at = &(*at)->next_wait;
        }
    }
    return n;
}

static void sort_in(worker *w, job *j)
{
    if (job_is_due(j)) {
        list_push(&w->ready, j);
    } else {
        list_push(&w->waiting, j);
        w->n_waiting++;
    }
}

static void be_eager(worker *w)
{
    w->idle_since_us = 0;
    w->sleep_us = FIRST_SLEEP_US;
}

/* Take what the loop left: new jobs, a kick, the end.  Returns true at the end. */
static bool collect(worker *w)
{
    job_list in;
    bool kicked, closing;
    job *j;

    if (!atomic_load_explicit(&w->mail, memory_order_acquire))
        return false;
    list_init(&in);
    pthread_mutex_lock(&w->lock);
    if (w->inbox.head != NULL) {
        in = w->inbox;
        list_init(&w->inbox);
    }
    kicked = w->kicked;
    w->kicked = false;
    closing = w->closing;
    atomic_store_explicit(&w->mail, closing, memory_order_relaxed);
    pthread_mutex_unlock(&w->lock);

    while ((j = in.head) != NULL) {
        in.head = j->next_wait;
        sort_in(w, j);
    }
    if (kicked || closing) {
        (void)sweep(w, &w->ready, closing);
        w->n_waiting -= sweep(w, &w->waiting, closing);
    }
    be_eager(w);
    return closing;
}

/* Look at up to a slice of the waiting jobs; those still not due go to the back of the list. */
static void poll_waiting(worker *w)
{
    uint64_t n = w->n_waiting < POLL_SLICE ? w->n_waiting : POLL_SLICE;

    w->polled += n;
    for (; n > 0; n--) {
        job *j = list_pop(&w->waiting);

        if (job_is_due(j)) {
            w->n_waiting--;
            list_insert(&w->ready, j);
        } else {
            list_push(&w->waiting, j);
        }
    }
}

/* Nothing to run.  Without a waiting job: until someone calls.  With one: spin, then sleep in growing steps.
 */
static void pause_worker(worker *w)
{
    w->polled = 0;
    if (w->n_waiting > 0) {
        uint64_t now = thread_now_us();

        if (w->idle_since_us == 0)
            w->idle_since_us = now;
        if (now - w->idle_since_us < SPIN_US)
            return;
    }
    beat_mark(BEAT_PARKED);
    pthread_mutex_lock(&w->lock);
    if (!atomic_load_explicit(&w->mail, memory_order_relaxed)) {
        if (w->n_waiting == 0)
            pthread_cond_wait(&w->wake, &w->lock);
        else
            thread_cond_wait_us(&w->wake, &w->lock, w->sleep_us);
    }
    pthread_mutex_unlock(&w->lock);
    beat_mark(BEAT_RUNNING);
    w->sleep_us = w->sleep_us * 2 < LONGEST_SLEEP_US ? w->sleep_us * 2 : LONGEST_SLEEP_US;
}

static void serve(worker *w)
{
    for (;;) {
        bool closing = collect(w);
        job *j;

        poll_waiting(w);
        j = list_pop(&w->ready);
        if (j != NULL) {
            beat_mark(BEAT_RUNNING);
            finish(w, j);
            be_eager(w);
        } else if (closing) {
            return;
        } else if (w->polled >= w->n_waiting) {
            pause_worker(w);
        }
    }
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    kvs_err err = {.status = KVS_OK};
    kvs_status s;

    (void)beat_join(w->ops->name);
    beat_mark(BEAT_IN_CALL); /* it opens a queue of the device */
    s = w->ops->start(w->ud, &err);
    beat_mark(BEAT_RUNNING);
    pthread_mutex_lock(&w->lock);
    w->start_status = s;
    w->start_err = err;
    w->started = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    if (s == KVS_OK) {
        serve(w);
        beat_mark(BEAT_IN_CALL);
        w->ops->stop(w->ud);
    }
    beat_leave();
    return NULL;
}

static void worker_free(worker *w)
{
    (void)pthread_cond_destroy(&w->wake);
    (void)pthread_mutex_destroy(&w->lock);
    free(w);
}

static kvs_status wait_for_start(worker *w, kvs_err *err)
{
    kvs_status s;

    pthread_mutex_lock(&w->lock);
    while (!w->started)
        pthread_cond_wait(&w->wake, &w->lock);
    s = w->start_status;
    pthread_mutex_unlock(&w->lock);
    if (s == KVS_OK)
        return KVS_OK;
    (void)pthread_join(w->thread, NULL);
    if (err != NULL)
        *err = w->start_err;
    return s;
}

kvs_status worker_create(worker **ret, const worker_ops *ops, void *ud, work_sink sink, kvs_err *err)
{
    worker *w = calloc(1, sizeof *w);
    kvs_status s;

    if (w == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "worker %s: no memory", ops->name);
    w->ops = ops;
    w->ud = ud;
    w->sink = sink;
    list_init(&w->inbox);
    list_init(&w->ready);
    list_init(&w->waiting);
    be_eager(w);
    (void)pthread_mutex_init(&w->lock, NULL);
    if (thread_cond_init(&w->wake) != 0) {
        (void)pthread_mutex_destroy(&w->lock);
        free(w);
        return kvs_fail(err, KVS_E_SYS, "worker %s: no condition variable", ops->name);
    }
    s = thread_start(&w->thread, ops->name, worker_main, w, err);
    if (s == KVS_OK)
        s = wait_for_start(w, err);
    if (s != KVS_OK) {
        worker_free(w);
        return s;
    }
    *ret = w;
    return KVS_OK;
}

/* Caller holds the lock. */
static void wake(worker *w)
{
    atomic_store_explicit(&w->mail, true, memory_order_release);
    pthread_cond_signal(&w->wake);
}

void worker_submit(worker *w, job *j)
{
    add(&w->queued, 1);
    pthread_mutex_lock(&w->lock);
    j->seq = w->next_seq++;
    list_push(&w->inbox, j);
    wake(w);
    pthread_mutex_unlock(&w->lock);
}

void worker_kick(worker *w)
{
    pthread_mutex_lock(&w->lock);
    w->kicked = true;
    wake(w);
    pthread_mutex_unlock(&w->lock);
}

void worker_destroy(worker *w)
{
    if (w == NULL)
        return;
    pthread_mutex_lock(&w->lock);
    w->closing = true;
    wake(w);
    pthread_mutex_unlock(&w->lock);
    (void)pthread_join(w->thread, NULL);
    worker_free(w);
}

void worker_get_stats(const worker *w, worker_stats *ret)
{
    uint64_t since = get(&w->run_since_us), now = thread_now_us();

    *ret = (worker_stats){
        .jobs = get(&w->jobs), .failed = get(&w->failed), .queued = get(&w->queued), .busy_us = get(&w->busy_us)};
    /* A run that began within this microsecond is still a run. */
    if (since != 0)
        ret->oldest_us = now > since ? now - since : 1;
}
