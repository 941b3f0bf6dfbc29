#include "daemon/sums.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include <xxhash.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
/* The same sums from the widest vectors of this machine: the plain build of the library knows SSE2 only,
 * which costs a third of a copy's speed. */
#include <xxh_x86dispatch.h>
#endif

#include "daemon/thread.h"

enum { MAX_THREADS = 16, RING = 256 };

typedef struct item {
    const void *at;
    uint64_t bytes;
    uint64_t *ret;
} item;

struct sums {
    pthread_t threads[MAX_THREADS];
    unsigned n_threads;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t work, done;
    item ring[RING];
    uint64_t put, taken, finished; /* ever; ring[taken % RING] is the next one to take */
    bool closing;
};

uint64_t sums_one(const void *at, uint64_t bytes)
{
    return XXH3_64bits(at, bytes);
}

/* The next one.  The lock is held before and after. */
static void take(sums *s)
{
    item it = s->ring[s->taken++ % RING];

    pthread_mutex_unlock(&s->lock);
    *it.ret = sums_one(it.at, it.bytes);
    pthread_mutex_lock(&s->lock);
    if (++s->finished == s->put)
        pthread_cond_signal(&s->done);
}

static void *sums_main(void *arg)
{
    sums *s = arg;

    pthread_mutex_lock(&s->lock);
    while (!s->closing) {
        if (s->taken < s->put)
            take(s);
        else
            pthread_cond_wait(&s->work, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
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
    n_threads = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    while (s->n_threads < n_threads && st == KVS_OK) {
        st = thread_start(&s->threads[s->n_threads], "kvs-sum", sums_main, s, err);
        s->n_threads += st == KVS_OK;
    }
    if (st != KVS_OK) {
        sums_destroy(s);
        return st;
    }
    *ret = s;
    return KVS_OK;
}

void sums_put(sums *s, const void *at, uint64_t bytes, uint64_t *ret)
{
    pthread_mutex_lock(&s->lock);
    while (s->put - s->taken == RING) /* the others are too slow: lend a hand */
        take(s);
    s->ring[s->put++ % RING] = (item){at, bytes, ret};
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
}

void sums_finish(sums *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->taken < s->put)
        take(s);
    while (s->finished < s->put)
        pthread_cond_wait(&s->done, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

void sums_destroy(sums *s)
{
    if (s == NULL)
        return;
    pthread_mutex_lock(&s->lock);
    s->closing = true;
    pthread_cond_broadcast(&s->work);
    pthread_mutex_unlock(&s->lock);
    for (unsigned i = 0; i < s->n_threads; i++)
        (void)pthread_join(s->threads[i], NULL);
    (void)pthread_cond_destroy(&s->done);
    (void)pthread_cond_destroy(&s->work);
    (void)pthread_mutex_destroy(&s->lock);
    free(s);
}
