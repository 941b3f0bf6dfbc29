#include "daemon/sums.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define XXH_STATIC_LINKING_ONLY /* for a state on the stack */
#include <xxhash.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
/* The same sums from the widest vectors of this machine: the plain build of the library knows SSE2 only,
 * which costs a third of a copy's speed. */
#include <xxh_x86dispatch.h>
#endif

#include "daemon/thread.h"

enum {
    MAX_THREADS = 16,
    SPIN_US = 100, /* before a thread sleeps: the next batch lands soon, and waking up takes as long */
    LATE_US = 200, /* of a batch's 300: what became ready then is not all taken yet, and more has come */
    CALM_JOBS = 64,
    PAGE = 4096,
    AHEAD = 2 * PAGE, /* that is fetched while this much before it is summed */
    LINE = 64,
};
#define NONE UINT32_MAX

typedef struct block {
    const uint8_t *at;
    uint64_t bytes, part_bytes, *ret;
    uint32_t n_parts, ready, taken, finished;
    uint32_t next; /* in the list that it is in: free, or runnable */
    bool runnable, forgotten;
    uint64_t parts[SUMS_PARTS];
} block;

typedef struct worker_thread {
    sums *sums;
    unsigned index;
    pthread_t thread;
} worker_thread;

struct sums {
    worker_thread threads[MAX_THREADS];
    unsigned n_threads, few; /* few: at work at least */
    pthread_mutex_t lock;    /* everything below but tick */
    pthread_cond_t work, done, more;
    unsigned at_work, calm; /* threads that take parts, the others sleep; jobs since one was late */
    uint64_t since_us;      /* some block has been runnable all the time */
    block blocks[SUMS_BLOCKS];
    uint32_t free, first, last; /* first..last: runnable, those with parts that are ready and not taken */
    _Atomic uint32_t in_work;   /* parts that somebody sums now; changes under the lock */
    unsigned sleeping;
    bool closing, may_spin;
    _Atomic uint32_t tick; /* something became ready */
};

/* ---- sums ---- */

uint64_t sums_part_bytes(uint64_t bytes)
{
    uint64_t n = (bytes + SUMS_PART - 1) / SUMS_PART;

    return n == 0 ? SUMS_PART : (n + SUMS_PARTS - 1) / SUMS_PARTS * SUMS_PART;
}

static uint64_t one_part(const uint8_t *at, uint64_t bytes, uint64_t part, uint32_t i)
{
    uint64_t left = bytes - i * part;

    return XXH3_64bits(at + i * part, left < part ? left : part);
}

/* The same of memory that another device has just written, in small pages: no processor fetches ahead across their ends, and
 * with us it reads half as much again. */
static uint64_t one_part_ahead(const uint8_t *at, uint64_t bytes, uint64_t part, uint32_t i)
{
    uint64_t left = bytes - i * part, n = left < part ? left : part;
    XXH3_state_t state;

    at += i * part;
    (void)XXH3_64bits_reset(&state);
    for (uint64_t p = 0; p < n; p += PAGE) {
        for (uint64_t l = 0; l < PAGE && p + AHEAD + l < n; l += LINE)
            __builtin_prefetch(at + p + AHEAD + l, 0, 2);
        (void)XXH3_64bits_update(&state, at + p, n - p < PAGE ? n - p : PAGE);
    }
    return XXH3_64bits_digest(&state);
}

uint64_t sums_join(const uint64_t *parts, uint32_t n)
{
    uint8_t text[SUMS_PARTS * 8];

    if (n == 1)
        return parts[0];
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t b = 0; b < 8; b++)
            text[8 * i + b] = (uint8_t)(parts[i] >> 8 * b);
    return XXH3_64bits(text, (size_t)n * 8);
}

uint32_t sums_n_parts(uint64_t bytes)
{
    const uint64_t part = sums_part_bytes(bytes);

    return bytes == 0 ? 1 : (uint32_t)((bytes + part - 1) / part);
}

uint64_t sums_one(const void *at, uint64_t bytes)
{
    uint64_t parts[SUMS_PARTS], part = sums_part_bytes(bytes);
    uint32_t n = sums_n_parts(bytes);

    for (uint32_t i = 0; i < n; i++)
        parts[i] = one_part(at, bytes, part, i);
    return sums_join(parts, n);
}

/* ---- blocks; the lock is held ---- */

static uint32_t index_of(const sums *s, const block *b)
{
    return (uint32_t)(b - s->blocks);
}

static void make_runnable(sums *s, block *b)
{
    if (b->runnable || b->taken == b->ready)
        return;
    b->runnable = true;
    b->next = NONE;
    if (s->first == NONE) {
        s->first = index_of(s, b);
        s->since_us = thread_now_us();
    } else {
        s->blocks[s->last].next = index_of(s, b);
    }
    s->last = index_of(s, b);
}

/* More comes in before what there was is taken: one thread more.  How many it takes is a matter of the machine, of whose
 * memory they are near to, and of what else reads it. */
static void look_whether_late(sums *s)
{
    uint64_t now = thread_now_us();

    if (s->first == NONE || now - s->since_us < LATE_US)
        return;
    s->since_us = now;
    s->calm = 0;
    if (s->at_work == s->n_threads)
        return;
    s->at_work++;
    (void)pthread_cond_broadcast(&s->more);
}

/* A job has ended.  None was late for a long time: try with one less. */
static void look_whether_calm(sums *s)
{
    if (++s->calm < CALM_JOBS || s->at_work == s->few)
        return;
    s->calm = 0;
    s->at_work--;
}

static void release(sums *s, block *b)
{
    b->next = s->free;
    s->free = index_of(s, b);
}

static void part_done(sums *s, block *b)
{
    b->finished++;
    if (b->forgotten && b->finished == b->taken)
        release(s, b);
    if (b->forgotten || b->finished < b->n_parts)
        return;
    *b->ret = sums_join(b->parts, b->n_parts);
    release(s, b);
}

/* Sum the next part, if there is one.  The lock is held before and after, not meanwhile. */
static bool take(sums *s)
{
    block *b;
    uint32_t i;
    uint64_t sum;

    if (s->first == NONE)
        return false;
    b = &s->blocks[s->first];
    i = b->taken++;
    if (b->taken == b->ready) {
        s->first = b->next;
        b->runnable = false;
    }
    s->in_work++;
    if (s->first != NONE && s->sleeping > 0) /* each wakes one more: the owner shall not wake them all */
        (void)pthread_cond_signal(&s->work);
    (void)pthread_mutex_unlock(&s->lock);
    sum = one_part_ahead(b->at, b->bytes, b->part_bytes, i);
    (void)pthread_mutex_lock(&s->lock);
    b->parts[i] = sum;
    part_done(s, b);
    if (--s->in_work == 0)
        (void)pthread_cond_signal(&s->done);
    return true;
}

/* ---- threads ---- */

/* True: something became ready.  The lock is not held. */
static bool spin(const sums *s, uint32_t seen)
{
    uint64_t end = thread_now_us() + SPIN_US;

    do {
        for (int i = 0; i < 16; i++) {
            if (atomic_load_explicit(&s->tick, memory_order_relaxed) != seen)
                return true;
            thread_relax();
        }
    } while (thread_now_us() < end);
    return false;
}

/* Nothing can be taken. */
static void rest(sums *s)
{
    uint32_t seen = atomic_load_explicit(&s->tick, memory_order_relaxed);
    bool more;

    (void)pthread_mutex_unlock(&s->lock);
    more = s->may_spin && spin(s, seen);
    (void)pthread_mutex_lock(&s->lock);
    if (more || s->first != NONE || s->closing)
        return;
    s->sleeping++;
    (void)pthread_cond_wait(&s->work, &s->lock);
    s->sleeping--;
}

/* Until it takes one more again. */
static void stand_by(sums *s)
{
    if (s->first != NONE && s->sleeping > 0) /* it may be we who were woken for that */
        (void)pthread_cond_signal(&s->work);
    (void)pthread_cond_wait(&s->more, &s->lock);
}

static void *sums_main(void *arg)
{
    const worker_thread *me = arg;
    sums *s = me->sums;

    (void)pthread_mutex_lock(&s->lock);
    while (!s->closing)
        if (me->index >= s->at_work)
            stand_by(s);
        else if (!take(s))
            rest(s);
    (void)pthread_mutex_unlock(&s->lock);
    return NULL;
}

kvs_status sums_create(sums **ret, unsigned n_threads, kvs_err *err)
{
    sums *s = calloc(1, sizeof *s);
    kvs_status st = KVS_OK;

    if (s == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "sums: no memory");
    /* The library looks at the processor once, at its first sum, and without a lock: not in several threads. */
    (void)sums_one(s, sizeof *s);
    (void)pthread_mutex_init(&s->lock, NULL);
    (void)pthread_cond_init(&s->work, NULL);
    (void)pthread_cond_init(&s->done, NULL);
    (void)pthread_cond_init(&s->more, NULL);
    s->may_spin = thread_may_spin();
    s->free = s->first = NONE;
    for (uint32_t i = SUMS_BLOCKS; i-- > 0;)
        release(s, &s->blocks[i]);
    n_threads = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    s->at_work = s->few = (2 * n_threads + 2) / 3;
    while (s->n_threads < n_threads && st == KVS_OK) {
        worker_thread *t = &s->threads[s->n_threads];

        *t = (worker_thread){.sums = s, .index = s->n_threads};
        st = thread_start(&t->thread, "kvs-sum", sums_main, t, err);
        s->n_threads += st == KVS_OK;
    }
    if (st != KVS_OK) {
        sums_destroy(s);
        return st;
    }
    *ret = s;
    return KVS_OK;
}

/* ---- the owner's side ---- */

uint32_t sums_begin(sums *s, const void *at, uint64_t bytes, uint64_t *ret)
{
    block *b;

    (void)pthread_mutex_lock(&s->lock);
    while (s->free == NONE && (take(s) || s->in_work > 0)) /* the others are too slow: lend a hand */
        if (s->free == NONE && s->first == NONE && s->in_work > 0)
            (void)pthread_cond_wait(&s->done, &s->lock);
    if (s->free == NONE) { /* what is there waits for us */
        (void)pthread_mutex_unlock(&s->lock);
        return SUMS_NONE;
    }
    b = &s->blocks[s->free];
    s->free = b->next;
    b->at = at;
    b->bytes = bytes;
    b->part_bytes = sums_part_bytes(bytes);
    b->ret = ret;
    b->n_parts = sums_n_parts(bytes);
    b->ready = b->taken = b->finished = 0;
    b->runnable = b->forgotten = false;
    (void)pthread_mutex_unlock(&s->lock);
    return index_of(s, b);
}

void sums_reach(sums *s, uint32_t handle, uint64_t bytes)
{
    block *b = &s->blocks[handle];

    (void)pthread_mutex_lock(&s->lock);
    look_whether_late(s);
    b->ready = bytes == b->bytes ? b->n_parts : (uint32_t)(bytes / b->part_bytes);
    make_runnable(s, b);
    (void)atomic_fetch_add_explicit(&s->tick, 1, memory_order_relaxed);
    if (s->first != NONE && s->sleeping > 0)
        (void)pthread_cond_signal(&s->work);
    (void)pthread_mutex_unlock(&s->lock);
}

void sums_forget(sums *s, uint32_t handle)
{
    block *b = &s->blocks[handle];

    (void)pthread_mutex_lock(&s->lock);
    while (b->runnable && take(s)) /* what is ready is taken: the list has no other way out */
        ;
    b->forgotten = true;
    if (b->finished == b->taken)
        release(s, b);
    (void)pthread_mutex_unlock(&s->lock);
}

/* The last parts are with others: some 20 us each, less than it takes to wake up. */
static void await_others(sums *s)
{
    uint64_t end = thread_now_us() + SPIN_US;

    if (s->may_spin) {
        (void)pthread_mutex_unlock(&s->lock);
        while (atomic_load_explicit(&s->in_work, memory_order_relaxed) > 0 && thread_now_us() < end)
            thread_relax();
        (void)pthread_mutex_lock(&s->lock);
    }
    if (s->first == NONE && s->in_work > 0)
        (void)pthread_cond_wait(&s->done, &s->lock);
}

void sums_finish(sums *s)
{
    (void)pthread_mutex_lock(&s->lock);
    while (take(s) || s->in_work > 0)
        if (s->first == NONE && s->in_work > 0)
            await_others(s);
    look_whether_calm(s);
    (void)pthread_mutex_unlock(&s->lock);
}

unsigned sums_at_work(sums *s)
{
    unsigned n;

    (void)pthread_mutex_lock(&s->lock);
    n = s->at_work;
    (void)pthread_mutex_unlock(&s->lock);
    return n;
}

void sums_destroy(sums *s)
{
    if (s == NULL)
        return;
    (void)pthread_mutex_lock(&s->lock);
    s->closing = true;
    (void)atomic_fetch_add_explicit(&s->tick, 1, memory_order_relaxed);
    (void)pthread_cond_broadcast(&s->work);
    (void)pthread_cond_broadcast(&s->more);
    (void)pthread_mutex_unlock(&s->lock);
    for (unsigned i = 0; i < s->n_threads; i++)
        (void)pthread_join(s->threads[i].thread, NULL);
    (void)pthread_cond_destroy(&s->more);
    (void)pthread_cond_destroy(&s->done);
    (void)pthread_cond_destroy(&s->work);
    (void)pthread_mutex_destroy(&s->lock);
    free(s);
}
