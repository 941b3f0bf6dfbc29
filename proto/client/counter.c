/* Counter pages: 64-bit values that one process writes and the other reads. */
#include "proto/client/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static kvs_counter_entry *client_half(const counter_page *p)
{
    return (kvs_counter_entry *)(void *)p->base;
}

static kvs_counter_entry *daemon_half(const counter_page *p)
{
    return (kvs_counter_entry *)(void *)(p->base + WIRE_COUNTER_HALF_BYTES);
}

static counter_page *page_of(kvs_client *c, uint64_t generation)
{
    for (uint32_t i = 0; i < CLIENT_PAGES; i++)
        if (c->pages[i].base != NULL && c->pages[i].generation == generation)
            return &c->pages[i];
    return NULL;
}

static counter_page *page_now(kvs_client *c)
{
    return c->n_pages == 0 ? NULL : &c->pages[(c->n_pages - 1) % CLIENT_PAGES];
}

counter_page *counters_page_of(kvs_client *c, uint64_t generation)
{
    return generation == 0 ? page_now(c) : page_of(c, generation);
}

/* A file that could shrink under a mapping would end this process by SIGBUS. */
kvs_status memfd_check(int fd, uint64_t bytes, kvs_err *err)
{
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat st;

    if (seals < 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "descriptor: not a memfd (%s)", strerror(errno));
    if (!(seals & F_SEAL_SHRINK))
        return kvs_fail(err, KVS_E_PROTO, "descriptor of the daemon: a memfd that is not sealed against shrinking");
    if (fstat(fd, &st) != 0)
        return kvs_fail(err, KVS_E_SYS, "fstat: %s", strerror(errno));
    if (st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return kvs_fail(err, KVS_E_PROTO, "descriptor of the daemon: %lld bytes where %llu were promised",
                        (long long)st.st_size, (unsigned long long)bytes);
    return KVS_OK;
}

kvs_status counters_map(int fd, uint32_t n, counter_page *ret, kvs_err *err)
{
    kvs_status s = memfd_check(fd, WIRE_COUNTER_PAGE_BYTES, err);
    void *p;

    if (s != KVS_OK)
        return s;
    p = mmap(NULL, WIRE_COUNTER_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return kvs_fail(err, KVS_E_SYS, "counter page: mmap: %s", strerror(errno));
    *ret = (counter_page){.base = p, .n = n};
    return KVS_OK;
}

/* A stream may have a wait for it in its queue, however old it is. */
static void page_retire(kvs_client *c, counter_page *p)
{
    counter_page *kept = p->words == NULL ? NULL : malloc(sizeof *kept);

    if (kept != NULL) {
        *kept = *p;
        kept->next = c->aside;
        c->aside = kept;
    } else if (p->words == NULL) {
        counters_unmap(p);
    } /* else: no memory for its name; it stays mapped without one */
    *p = (counter_page){.base = NULL};
}

void counters_publish(kvs_client *c, const counter_page *p)
{
    counter_page *place = &c->pages[c->n_pages % CLIENT_PAGES], *old = page_now(c);

    /* What streams have reached stays reached. */
    for (uint32_t i = 0; old != NULL && i < old->n && i < p->n; i++)
        __atomic_store_n(&client_half(p)[i].value, __atomic_load_n(&client_half(old)[i].value, __ATOMIC_ACQUIRE),
                         __ATOMIC_RELEASE);
    page_retire(c, place);
    *place = *p;
    c->n_pages++;
}

void counters_abort(kvs_client *c)
{
    counter_page *p = page_now(c);

    for (uint32_t i = 0; p != NULL && i < p->n; i++) {
        kvs_counter_entry *e = &daemon_half(p)[i];

        __atomic_store_n(&e->error, (uint64_t)KVS_E_AWAY, __ATOMIC_RELAXED);
        __atomic_store_n(&e->value, (uint64_t)KVS_COUNTER_ABORT, __ATOMIC_RELEASE);
    }
}

void counters_release(kvs_client *c, uint64_t generation, uint32_t entry, uint64_t value, kvs_status why)
{
    counter_page *p = page_of(c, generation);
    kvs_counter_entry *e;

    if (p == NULL || entry >= p->n)
        return;
    e = &daemon_half(p)[entry];
    if (__atomic_load_n(&e->value, __ATOMIC_ACQUIRE) >= value)
        return;
    __atomic_store_n(&e->error, (uint64_t)why, __ATOMIC_RELAXED);
    __atomic_store_n(&e->value, value, __ATOMIC_RELEASE);
}

void counters_unmap(counter_page *p)
{
    if (p->base != NULL)
        (void)munmap(p->base, WIRE_COUNTER_PAGE_BYTES);
    p->base = NULL;
}

static void page_end(const kvs_client *c, counter_page *p)
{
    if (p->words != NULL && client_is_child(c))
        return; /* the registration is the parent's */
    if (p->words != NULL && c->pages_stuck) {
        client_words_forget(p->words); /* a stream that reads unmapped memory would cost the program its GPU */
        return;
    }
    client_words_close(p->words);
    counters_unmap(p);
}

void counters_fini(kvs_client *c)
{
    for (uint32_t i = 0; i < CLIENT_PAGES; i++)
        page_end(c, &c->pages[i]);
    while (c->aside != NULL) {
        counter_page *p = c->aside;

        c->aside = p->next;
        page_end(c, p);
        free(p);
    }
}

kvs_status kvs_counter_page(kvs_client *c, kvs_counters *ret, kvs_err *err)
{
    kvs_status s = GIVEN(err, "counter_page", {"c", c}, {"ret", ret});
    counter_page *p;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    (void)pthread_mutex_lock(&c->mu);
    p = page_now(c);
    if (p == NULL)
        s = kvs_fail(err, KVS_E_AWAY, "counters: never connected yet");
    else
        *ret = (kvs_counters){p->generation, p->n, client_half(p), daemon_half(p)};
    (void)pthread_mutex_unlock(&c->mu);
    return s;
}

kvs_status kvs_counter_set(kvs_client *c, uint32_t counter, uint64_t value, kvs_err *err)
{
    kvs_status s = GIVEN(err, "counter_set", {"c", c});
    counter_page *p;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    (void)pthread_mutex_lock(&c->mu); /* else the page could be an old one by now, and its value not be carried over */
    p = page_now(c);
    if (p == NULL)
        s = kvs_fail(err, KVS_E_AWAY, "counters: never connected yet");
    else if (counter >= p->n)
        s = kvs_fail(err, KVS_E_RANGE, "counter: %u is outside 0..%u", counter, p->n - 1);
    else if (value > WIRE_COUNTER_MAX)
        s = kvs_fail(err, KVS_E_RANGE, "counter %u: value %llu is 2^62 or more", counter, (unsigned long long)value);
    else
        __atomic_store_n(&client_half(p)[counter].value, value, __ATOMIC_RELEASE);
    (void)pthread_mutex_unlock(&c->mu);
    return s;
}

/* A page that is looked at must not be unmapped meanwhile, so each look is under the lock; mu is not held outside. */
static kvs_status look(kvs_client *c, uint64_t generation, const kvs_mark *m, bool *ret_reached, kvs_err *err)
{
    kvs_status s = KVS_OK;
    counter_page *p;

    (void)pthread_mutex_lock(&c->mu);
    p = page_of(c, generation);
    if (p != NULL && m->counter >= p->n) {
        s = kvs_fail(err, KVS_E_RANGE, "counter: %u is outside 0..%u", m->counter, p->n - 1);
    } else if (p != NULL && __atomic_load_n(&daemon_half(p)[m->counter].value, __ATOMIC_ACQUIRE) >= m->value) {
        *ret_reached = true;
        s = (kvs_status)__atomic_load_n(&daemon_half(p)[m->counter].error, __ATOMIC_RELAXED);
        if (s != KVS_OK)
            (void)kvs_fail(err, s, "counter %u: %s", m->counter, s == KVS_E_AWAY ? c->why : kvs_status_text(s));
    } else if (p == NULL || generation != c->server.generation || c->state != LINK_UP) {
        s = kvs_fail(err, KVS_E_AWAY, "counter %u: its connection is gone", m->counter);
    }
    (void)pthread_mutex_unlock(&c->mu);
    return s;
}

kvs_status kvs_counter_wait(kvs_client *c, uint64_t generation, kvs_mark mark, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = GIVEN(err, "counter_wait", {"c", c});
    int64_t deadline, pause = 20000;
    bool reached = false;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    if (mark.value > WIRE_COUNTER_MAX)
        return kvs_fail(err, KVS_E_RANGE, "counter %u: value %llu is 2^62 or more", mark.counter,
                        (unsigned long long)mark.value);
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    if (generation == 0)
        generation = kvs_generation(c);
    for (;;) {
        int64_t now;

        s = look(c, generation, &mark, &reached, err);
        now = clock_ns();
        if (reached || s != KVS_OK)
            return s;
        if (now >= deadline)
            return kvs_fail(err, KVS_E_DEADLINE, "counter %u has not reached %llu in time", mark.counter,
                            (unsigned long long)mark.value);
        (void)poll_until(NULL, 0, now + pause < deadline ? now + pause : deadline);
        pause = pause < 500000 ? pause * 2 : 1000000;
    }
}
