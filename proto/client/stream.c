/* Streams of the caller's GPU: they raise counters of the client's half and wait for the daemon's half.
 *
 *   client half [first]              one stream-ordered number: each signal is one more
 *   daemon half [first .. first+n)   one entry for each LOAD in flight, as they end in any order
 *
 * mu is never held around a driver call: that may wait until a stream has room, which a stream that waits for a counter
 * gets only when somebody who holds mu says that the daemon is gone. */
#include "proto/client/internal.h"

#include <stdlib.h>

enum { DRAIN_MS = 2000 };

struct kvs_stream {
    kvs_client *c;
    kvs_stream *next;
    void *cuda;
    uint32_t first, n;
    pthread_mutex_t order; /* numbers reach the stream in the order in which they were given */
    uint64_t given;
    bool used; /* something on the stream may still look at a page */
};

static uint64_t offset_of(bool daemon, uint32_t entry)
{
    return (daemon ? WIRE_COUNTER_HALF_BYTES : 0) + entry * sizeof(kvs_counter_entry);
}

static kvs_counter_entry *entry_at(const counter_page *p, bool daemon, uint32_t entry)
{
    return (kvs_counter_entry *)(void *)(p->base + offset_of(daemon, entry));
}

/* ---- pages ---- */

/* The page of a connection as streams see it.  Once made known to the GPU it stays so until kvs_close. */
static kvs_status find_words(kvs_client *c, uint64_t generation, client_words **ret, uint8_t **ret_base, kvs_err *err)
{
    counter_page *p;
    kvs_status s = KVS_OK;

    (void)pthread_mutex_lock(&c->mu);
    p = counters_page_of(c, generation);
    if (p == NULL || p->generation != c->server.generation || c->state != LINK_UP)
        s = kvs_fail(err, KVS_E_AWAY, "stream: %s", c->why[0] != '\0' ? c->why : "not connected");
    else {
        *ret = p->words;
        *ret_base = p->base;
    }
    (void)pthread_mutex_unlock(&c->mu);
    return s;
}

static kvs_status make_words(kvs_stream *st, uint64_t generation, client_words **ret, kvs_err *err)
{
    kvs_client *c = st->c;
    client_words *w = NULL;
    counter_page *p;
    uint8_t *base = NULL;
    kvs_status s;

    (void)pthread_mutex_lock(&c->gpu_mu);
    s = find_words(c, generation, ret, &base, err);
    if (s == KVS_OK && *ret == NULL) {
        s = client_words_open(&w, base, WIRE_COUNTER_PAGE_BYTES, st->cuda, err);
        (void)pthread_mutex_lock(&c->mu);
        p = counters_page_of(c, generation);
        if (s == KVS_OK && p != NULL && p->base == base) {
            p->words = *ret = w;
            w = NULL;
        } else if (s == KVS_OK) {
            s = kvs_fail(err, KVS_E_AWAY, "stream: its connection is gone");
        }
        (void)pthread_mutex_unlock(&c->mu);
        client_words_close(w);
    }
    (void)pthread_mutex_unlock(&c->gpu_mu);
    return s;
}

static kvs_status words_of(kvs_stream *st, uint64_t generation, client_words **ret, kvs_err *err)
{
    uint8_t *base;
    kvs_status s = find_words(st->c, generation, ret, &base, err);

    return s == KVS_OK && *ret == NULL ? make_words(st, generation, ret, err) : s;
}

/* ---- life ---- */

static kvs_status range_check(uint32_t first, uint32_t n, kvs_err *err)
{
    if (n == 0 || n > WIRE_COUNTERS || first > WIRE_COUNTERS - n)
        return kvs_fail(err, KVS_E_RANGE, "stream: counters %u..%u + %u are outside 0..%d", first, first, n,
                        WIRE_COUNTERS - 1);
    return KVS_OK;
}

/* mu is held. */
static kvs_status enlist(kvs_client *c, kvs_stream *s, kvs_err *err)
{
    const counter_page *p = counters_page_of(c, 0);

    for (const kvs_stream *o = c->streams; o != NULL; o = o->next)
        if (s->first < o->first + o->n && o->first < s->first + s->n)
            return kvs_fail(err, KVS_E_BUSY, "stream: counters %u..%u are in use by another one", o->first,
                            o->first + o->n - 1);
    if (p != NULL) /* whoever had it before */
        s->given = __atomic_load_n(&entry_at(p, false, s->first)->value, __ATOMIC_ACQUIRE);
    s->next = c->streams;
    c->streams = s;
    return KVS_OK;
}

kvs_status kvs_stream_open(kvs_client *c, void *cuda_stream, uint32_t first_counter, uint32_t n_counters,
                           kvs_stream **ret, kvs_err *err)
{
    kvs_status s = GIVEN(err, "stream_open", {"c", c}, {"ret", ret});
    kvs_stream *st;

    if (s == KVS_OK)
        s = range_check(first_counter, n_counters, err);
    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s == KVS_OK)
        s = client_stream_check(cuda_stream, err);
    if (s != KVS_OK)
        return s;
    st = calloc(1, sizeof *st);
    if (st == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "stream: no memory");
    *st = (kvs_stream){.c = c, .cuda = cuda_stream, .first = first_counter, .n = n_counters};
    (void)pthread_mutex_init(&st->order, NULL);
    (void)pthread_mutex_lock(&c->mu);
    s = enlist(c, st, err);
    (void)pthread_mutex_unlock(&c->mu);
    if (s != KVS_OK) {
        (void)pthread_mutex_destroy(&st->order);
        free(st);
        return s;
    }
    *ret = st;
    return KVS_OK;
}

/* Not in anybody's list any more. */
static void destroy(kvs_stream *s, bool drain)
{
    if (drain && s->used && !client_stream_drain(s->cuda, DRAIN_MS)) {
        (void)pthread_mutex_lock(&s->c->mu);
        s->c->pages_stuck = true;
        (void)pthread_mutex_unlock(&s->c->mu);
    }
    (void)pthread_mutex_destroy(&s->order);
    free(s);
}

void kvs_stream_close(kvs_stream *s)
{
    kvs_stream **p;

    if (s == NULL || client_is_child(s->c))
        return;
    (void)pthread_mutex_lock(&s->c->mu);
    for (p = &s->c->streams; *p != NULL && *p != s;)
        p = &(*p)->next;
    if (*p == s)
        *p = s->next;
    (void)pthread_mutex_unlock(&s->c->mu);
    destroy(s, true);
}

void streams_close(kvs_client *c, bool drain)
{
    while (c->streams != NULL) {
        kvs_stream *s = c->streams;

        c->streams = s->next;
        destroy(s, drain);
    }
}

/* ---- signals and waits ---- */

/* s->order is held. */
static kvs_status signal_in_order(kvs_stream *s, uint64_t generation, kvs_mark *ret, kvs_err *err)
{
    client_words *w = NULL;
    kvs_status st = words_of(s, generation, &w, err);

    if (st != KVS_OK)
        return st;
    st = client_stream_write(w, s->cuda, offset_of(false, s->first), s->given + 1, err);
    if (st != KVS_OK)
        return st;
    s->used = true;
    *ret = (kvs_mark){.counter = s->first, .value = ++s->given};
    return KVS_OK;
}

kvs_status kvs_stream_signal(kvs_stream *s, kvs_mark *ret, kvs_err *err)
{
    kvs_status st = GIVEN(err, "stream_signal", {"s", s}, {"ret", ret});

    if (st == KVS_OK)
        st = client_check_own(s->c, err);
    if (st != KVS_OK)
        return st;
    (void)pthread_mutex_lock(&s->order);
    st = signal_in_order(s, kvs_generation(s->c), ret, err);
    (void)pthread_mutex_unlock(&s->order);
    return st;
}

kvs_status kvs_stream_wait(kvs_stream *s, uint64_t generation, kvs_mark mark, kvs_err *err)
{
    client_words *w = NULL;
    kvs_status st = GIVEN(err, "stream_wait", {"s", s});

    if (st == KVS_OK)
        st = client_check_own(s->c, err);
    if (st != KVS_OK)
        return st;
    if (mark.counter >= WIRE_COUNTERS || mark.value > WIRE_COUNTER_MAX)
        return kvs_fail(err, KVS_E_RANGE, "stream: counter %u, value %llu: outside 0..%d, 0..2^62-1", mark.counter,
                        (unsigned long long)mark.value, WIRE_COUNTERS - 1);
    st = words_of(s, generation != 0 ? generation : kvs_generation(s->c), &w, err);
    if (st == KVS_OK)
        st = client_stream_wait(w, s->cuda, offset_of(true, mark.counter), mark.value, err);
    if (st == KVS_OK) {
        (void)pthread_mutex_lock(&s->order);
        s->used = true;
        (void)pthread_mutex_unlock(&s->order);
    }
    return st;
}

/* ---- requests on a stream ---- */

/* An entry of the daemon's half that no job will signal and no stream waits for, its error word clean. */
static kvs_status entry_take(kvs_stream *s, uint64_t generation, kvs_mark *ret, kvs_err *err)
{
    kvs_client *c = s->c;
    const counter_page *p;
    kvs_status st = KVS_OK;
    uint32_t i = s->first;

    (void)pthread_mutex_lock(&c->mu);
    p = counters_page_of(c, generation);
    while (i < s->first + s->n && c->entry_used[i])
        i++;
    if (p == NULL || generation != c->server.generation || c->state != LINK_UP) {
        st = kvs_fail(err, KVS_E_AWAY, "stream: its connection is gone");
    } else if (i == s->first + s->n) {
        st = kvs_fail(err, KVS_E_BUSY, "stream: its %u counters are all in use by loads in flight", s->n);
    } else {
        kvs_counter_entry *e = entry_at(p, true, i);

        c->entry_used[i] = true;
        __atomic_store_n(&e->error, 0, __ATOMIC_RELAXED);
        *ret = (kvs_mark){.counter = i, .value = __atomic_load_n(&e->value, __ATOMIC_ACQUIRE) + 1};
    }
    (void)pthread_mutex_unlock(&c->mu);
    return st;
}

/* s->order is held; the signal is on the stream. */
static kvs_status join_in_order(call *k, kvs_stream *s, kvs_mark *ret, kvs_err *err)
{
    client_words *w = NULL;
    kvs_status st = words_of(s, k->generation, &w, err);

    if (st == KVS_OK)
        st = entry_take(s, k->generation, ret, err);
    if (st != KVS_OK)
        return st;
    k->entry = ret->counter; /* from here on call_drop gives it back */
    k->entry_value = ret->value;
    return client_stream_wait(w, s->cuda, offset_of(true, ret->counter), ret->value, err);
}

void *stream_cuda(const kvs_stream *s)
{
    return s->cuda;
}

kvs_client *stream_client(const kvs_stream *s)
{
    return s->c;
}

kvs_status stream_join(kvs_stream *s, uint64_t generation, kvs_mark *ret, kvs_err *err)
{
    client_words *w = NULL;
    kvs_status st;

    (void)pthread_mutex_lock(&s->order);
    st = words_of(s, generation, &w, err);
    if (st == KVS_OK)
        st = entry_take(s, generation, ret, err);
    if (st == KVS_OK) {
        st = client_stream_wait(w, s->cuda, offset_of(true, ret->counter), ret->value, err);
        s->used = true;
        if (st != KVS_OK) {
            (void)pthread_mutex_lock(&s->c->mu);
            stream_unjoin(s->c, generation, *ret, st);
            (void)pthread_mutex_unlock(&s->c->mu);
        }
    }
    (void)pthread_mutex_unlock(&s->order);
    return st;
}

void stream_unjoin(kvs_client *c, uint64_t generation, kvs_mark mark, kvs_status why)
{
    counters_release(c, generation, mark.counter, mark.value, why);
    if (generation == c->server.generation)
        c->entry_used[mark.counter] = false;
}

kvs_status stream_enter(call *k, kvs_stream *s, bool join, kvs_mark *ret_after, kvs_mark *ret_signal, kvs_err *err)
{
    kvs_status st;

    if (s->c != k->c)
        return kvs_fail(err, KVS_E_INVALID, "stream of another handle");
    (void)pthread_mutex_lock(&s->order);
    st = signal_in_order(s, k->generation, ret_after, err);
    if (st == KVS_OK && join)
        st = join_in_order(k, s, ret_signal, err);
    (void)pthread_mutex_unlock(&s->order);
    return st;
}

kvs_status stream_settle(const kvs_region *r, const kvs_mark *after, const kvs_stream *s, kvs_err *err)
{
    if (after != NULL || s != NULL || r->info.memory == KVS_MEMORY_MEMFD)
        return KVS_OK;
    return client_stream_settle(err);
}
