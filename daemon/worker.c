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
    LINGER_US = 100,         /* awake after a job: waking up takes as long as a short copy */
    EXPECTED_US = 300,       /* awake after worker_expect: some hundred keys are being looked up meanwhile */
    BYTES_OF_A_US = 1 << 14, /* what time counts for where no bytes are moved: about a link's speed */
    /* Waiting jobs looked at between two runs.  A full pass would let a client with very many stuck jobs tax
     * every job of the others. */
    POLL_SLICE = 64,
};

typedef struct job_list {
    job *head, **tail; /* tail: where the next link goes */
    job *latest;       /* that was inserted, while it is in there: the next one's place is often behind it */
} job_list;

/* Ready jobs of one tenant. */
typedef struct job_queue {
    job_list jobs;
    uint64_t used;          /* what it has had, over its share; grows for ever */
    _Atomic uint32_t share; /* set by the loop */
} job_queue;

struct worker {
    const worker_ops *ops;
    void *ud;
    work_sink sink;
    pthread_t thread;

    pthread_mutex_t lock; /* inbox, dropped, closing, start_status */
    pthread_cond_t wake;
    job_list inbox;
    job *dropped, **dropped_tail; /* by next_dropped: the only ones in that state that are posted */
    uint64_t next_seq;
    bool closing, started;
    kvs_status start_status;
    kvs_err start_err;
    _Atomic bool mail;               /* something above changed; spares the lock in the polling loop */
    _Atomic bool parked;             /* the thread sleeps, or is about to */
    _Atomic uint64_t awake_until_us; /* it does not before then */
    bool may_linger;

    /* the thread's own */
    job_list waiting;
    job_queue ready[WORKER_TENANTS];
    uint32_t n_queues;          /* those from here on were never used */
    uint32_t n_active;          /* tenants with ready jobs */
    uint64_t used_now;          /* of the tenant that had the latest turn, before it */
    uint64_t n_waiting, polled; /* polled: since the last pause */
    uint64_t idle_since_us, sleep_us;

    _Atomic uint64_t jobs, failed, queued, busy_us, run_since_us;
};

static void list_init(job_list *l)
{
    l->head = l->latest = NULL;
    l->tail = &l->head;
}

static void list_put(job_list *l, job **at, job *j)
{
    j->next_wait = *at;
    j->at_wait = at;
    if (j->next_wait != NULL)
        j->next_wait->at_wait = &j->next_wait;
    else
        l->tail = &j->next_wait;
    *at = j;
}

static void list_push(job_list *l, job *j)
{
    list_put(l, l->tail, j);
}

static void list_remove(job_list *l, job *j)
{
    *j->at_wait = j->next_wait;
    if (j->next_wait != NULL)
        j->next_wait->at_wait = j->at_wait;
    else
        l->tail = j->at_wait;
    if (l->latest == j)
        l->latest = NULL;
    j->next_wait = NULL;
    j->at_wait = NULL;
}

static job *list_pop(job_list *l)
{
    job *j = l->head;

    if (j != NULL)
        list_remove(l, j);
    return j;
}

/* Into submit order.  A job that had to wait is older than most, so the place is near the head; and those that become due
 * together come in that order, each behind the one before. */
static void list_insert(job_list *l, job *j)
{
    job **at = l->latest != NULL && l->latest->seq < j->seq ? &l->latest->next_wait : &l->head;

    while (*at != NULL && (*at)->seq < j->seq)
        at = &(*at)->next_wait;
    list_put(l, at, j);
    l->latest = j;
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

/* ---- ready jobs ---- */

static job_queue *queue_of(worker *w, const job *j)
{
    return &w->ready[j->tenant < WORKER_TENANTS ? j->tenant : 0];
}

/* Before the queue's first job: it begins where the others are. */
static void activate(worker *w, job_queue *q)
{
    uint32_t at = (uint32_t)(q - w->ready);

    if (q->jobs.head != NULL)
        return;
    w->n_active++;
    if (at >= w->n_queues)
        w->n_queues = at + 1;
    if (q->used < w->used_now)
        q->used = w->used_now;
}

/* newest: it was submitted after all that are there. */
static void make_ready(worker *w, job *j, bool newest)
{
    job_queue *q = queue_of(w, j);

    activate(w, q);
    if (newest)
        list_push(&q->jobs, j);
    else
        list_insert(&q->jobs, j);
}

static void put_back(worker *w, job_queue *q, job *j)
{
    activate(w, q);
    list_put(&q->jobs, &q->jobs.head, j);
}

/* The next job, of the tenant who has had least; NULL: none is ready. */
static job *next_job(worker *w, job_queue **ret)
{
    job_queue *best = NULL;
    job *j;

    for (uint32_t i = 0; i < w->n_queues; i++) {
        job_queue *q = &w->ready[i];

        if (q->jobs.head != NULL && (best == NULL || q->used < best->used))
            best = q;
    }
    if (best == NULL)
        return NULL;
    j = list_pop(&best->jobs);
    w->n_active -= best->jobs.head == NULL;
    w->used_now = best->used;
    *ret = best;
    return j;
}

/* ---- a turn ---- */

static void begin(worker *w, job *j)
{
    add(&w->queued, UINT64_MAX);
    j->begun = true;
    j->status = KVS_OK;
    j->err.status = KVS_OK;
}

/* The job is the submitter's again with the post, so everything that counts or signals comes before it. */
static void end(worker *w, job *j)
{
    if (j->signal_by_worker && j->status == KVS_OK)
        job_signal(j, KVS_OK);
    add(&w->jobs, 1);
    if (j->status != KVS_OK && j->status != KVS_E_CANCELLED)
        add(&w->failed, 1);
    atomic_store_explicit(&w->run_since_us, 0, memory_order_relaxed);
    w->sink.post(w->sink.ud, &j->work);
}

static void stay_awake(worker *w, uint64_t us)
{
    if (w->may_linger)
        atomic_store(&w->awake_until_us, thread_now_us() + us);
}

static void take_turn(worker *w, job_queue *q, job *j)
{
    uint64_t began = thread_now_us(), bytes = 0, us;
    uint32_t share = atomic_load_explicit(&q->share, memory_order_relaxed);
    bool shared = w->n_active > (q->jobs.head != NULL ? 1U : 0U), ended;

    atomic_store_explicit(&w->run_since_us, began, memory_order_relaxed);
    ended = w->ops->run(w->ud, j, shared, &bytes);
    us = thread_now_us() - began;
    add(&w->busy_us, us);
    q->used += (bytes != 0 ? bytes : us * BYTES_OF_A_US + 1) * WORKER_SHARE / share;
    if (ended) {
        end(w, j);
        stay_awake(w, LINGER_US);
        return;
    }
    atomic_store_explicit(&w->run_since_us, 0, memory_order_relaxed);
    put_back(w, q, j);
}

static void serve_one(worker *w, job_queue *q, job *j)
{
    if (!j->begun && !job_claim(j))
        return; /* dropped: collect posts it */
    if (!j->begun)
        begin(w, j);
    take_turn(w, q, j);
}

/* Out of the list that it is in, if it is in one. */
static void take_out(worker *w, job *j)
{
    job_list *l = j->waits ? &w->waiting : &queue_of(w, j)->jobs;

    if (j->at_wait == NULL)
        return;
    list_remove(l, j);
    w->n_waiting -= j->waits;
    w->n_active -= !j->waits && l->head == NULL;
}

static void post_dropped(worker *w, job *j)
{
    while (j != NULL) {
        job *next = j->next_dropped;

        take_out(w, j);
        post_cancelled(w, j);
        j = next;
    }
}

/* The end: what has not begun never will. */
static void drop_all(worker *w, job_list *l)
{
    for (job *j = l->head, *next; j != NULL; j = next) {
        next = j->next_wait;
        if (job_drop(j)) {
            take_out(w, j);
            post_cancelled(w, j);
        }
    }
}

static void sort_in(worker *w, job *j)
{
    j->begun = false;
    j->waits = !job_is_due(j);
    if (!j->waits) {
        make_ready(w, j, true);
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

/* Take what the loop left: new jobs, dropped ones, the end.  Returns true at the end. */
static bool collect(worker *w)
{
    job *j, *in, *dropped;
    bool closing;

    if (!atomic_load_explicit(&w->mail, memory_order_acquire))
        return false;
    pthread_mutex_lock(&w->lock);
    in = w->inbox.head;
    list_init(&w->inbox);
    dropped = w->dropped;
    w->dropped = NULL;
    w->dropped_tail = &w->dropped;
    closing = w->closing;
    atomic_store_explicit(&w->mail, closing, memory_order_relaxed);
    pthread_mutex_unlock(&w->lock);

    while ((j = in) != NULL) {
        in = j->next_wait;
        sort_in(w, j);
    }
    post_dropped(w, dropped); /* were submitted before: each is sorted in, or was met by serve_one */
    for (uint32_t i = 0; closing && i < w->n_queues; i++)
        drop_all(w, &w->ready[i].jobs);
    if (closing)
        drop_all(w, &w->waiting);
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
            j->waits = false;
            make_ready(w, j, false);
        } else {
            list_push(&w->waiting, j);
        }
    }
}

/* The next job is likely to come at once: look out for it. */
static bool lingers(worker *w)
{
    if (!w->may_linger || thread_now_us() >= atomic_load(&w->awake_until_us))
        return false;
    for (int i = 0; i < 16 && !atomic_load_explicit(&w->mail, memory_order_relaxed); i++)
        thread_relax();
    return true;
}

static void park(worker *w)
{
    pthread_mutex_lock(&w->lock);
    atomic_store(&w->parked, true);
    /* Either worker_expect sees that we are parked, or we see what it has written before it looked. */
    if (!atomic_load_explicit(&w->mail, memory_order_relaxed) && !lingers(w)) {
        if (w->n_waiting == 0)
            pthread_cond_wait(&w->wake, &w->lock);
        else
            thread_cond_wait_us(&w->wake, &w->lock, w->sleep_us);
    }
    atomic_store(&w->parked, false);
    pthread_mutex_unlock(&w->lock);
}

/* Nothing to run.  Without a waiting job: until someone calls.  With one: spin, then sleep in growing steps. */
static void pause_worker(worker *w)
{
    w->polled = 0;
    if (lingers(w)) {
        beat_mark(BEAT_RUNNING); /* it may look out for as long as jobs are announced, also where none comes */
        return;
    }
    if (w->n_waiting > 0) {
        uint64_t now = thread_now_us();

        if (w->idle_since_us == 0)
            w->idle_since_us = now;
        if (now - w->idle_since_us < SPIN_US)
            return;
    }
    beat_mark(BEAT_PARKED);
    park(w);
    beat_mark(BEAT_RUNNING);
    w->sleep_us = w->sleep_us * 2 < LONGEST_SLEEP_US ? w->sleep_us * 2 : LONGEST_SLEEP_US;
}

job *worker_next(worker *w)
{
    job *j = NULL;

    (void)collect(w); /* the end shows again */
    poll_waiting(w);
    if (w->n_active != 1)
        return NULL;
    for (uint32_t i = 0; i < w->n_queues && j == NULL; i++)
        j = w->ready[i].jobs.head;
    if (j == NULL || j->begun)
        return j;
    if (!job_claim(j))
        return NULL; /* dropped */
    begin(w, j);
    return j;
}

static void serve(worker *w)
{
    for (;;) {
        bool closing = collect(w);
        job_queue *q = NULL;
        job *j;

        poll_waiting(w);
        j = next_job(w, &q);
        if (j != NULL) {
            beat_mark(BEAT_RUNNING);
            serve_one(w, q, j);
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
    if (w->may_linger)
        thread_exact_timers();
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
    w->dropped_tail = &w->dropped;
    for (uint32_t i = 0; i < WORKER_TENANTS; i++) {
        list_init(&w->ready[i].jobs);
        atomic_init(&w->ready[i].share, WORKER_SHARE);
    }
    list_init(&w->waiting);
    be_eager(w);
    w->may_linger = ops->eager && thread_may_spin();
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

void worker_expect(worker *w)
{
    if (!w->may_linger)
        return;
    stay_awake(w, EXPECTED_US);
    if (!atomic_load(&w->parked))
        return;
    pthread_mutex_lock(&w->lock);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

bool worker_drop(worker *w, job *j)
{
    if (!job_drop(j))
        return false;
    if (j->given_back)
        return true;
    j->given_back = true;
    pthread_mutex_lock(&w->lock);
    *w->dropped_tail = j;
    w->dropped_tail = &j->next_dropped;
    wake(w);
    pthread_mutex_unlock(&w->lock);
    return true;
}

void worker_kick(worker *w)
{
    pthread_mutex_lock(&w->lock);
    wake(w);
    pthread_mutex_unlock(&w->lock);
}

void worker_share(worker *w, uint32_t tenant, uint32_t share)
{
    atomic_store_explicit(&w->ready[tenant].share, share, memory_order_relaxed);
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
