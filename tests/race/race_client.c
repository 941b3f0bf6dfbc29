/* libkvstride under ThreadSanitizer: threads on one handle, blocking and pipelined, while the daemon restarts. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "proto/client/kvstride.h"
#include "tests/support/fake_daemon.h"

enum { THREADS = 4, RESTARTS = 6, DEPTH = 8 };

typedef struct shared {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region;
    atomic_bool stop;
    atomic_uint calls, bad;
} shared;

static void count(shared *s, kvs_status got)
{
    atomic_fetch_add(&s->calls, 1);
    if (got != KVS_OK && got != KVS_E_AWAY && got != KVS_E_STALE)
        atomic_fetch_add(&s->bad, 1);
}

static void blocking(shared *s)
{
    uint8_t keys[4 * 32] = {1};
    uint32_t hits = 99;
    kvs_slot slots[2];
    kvs_status results[2];

    count(s, kvs_lookup(s->ns, keys, 4, &hits, NULL, 0, NULL));
    if (hits > 1)
        atomic_fetch_add(&s->bad, 1);
    count(s, kvs_ping(s->c, 0, NULL));
    if (kvs_slot_take(s->region, 2, slots, 0, NULL) == KVS_OK)
        count(s, kvs_slot_drop(s->region, slots, 2, NULL, results, 0, NULL));
}

static void pipelined(shared *s)
{
    uint8_t keys[4 * 32] = {1};
    uint32_t hits[DEPTH];
    kvs_request *r[DEPTH];
    unsigned n = 0;

    while (n < DEPTH && kvs_submit_lookup(s->ns, keys, 4, &hits[n], NULL, &r[n], 0, NULL) == KVS_OK)
        n++;
    for (unsigned i = 0; i < n; i++) {
        count(s, kvs_wait(r[i], 0, NULL));
        count(s, kvs_request_end(r[i], NULL));
    }
    (void)kvs_poll(s->c, r, 0, 0);
}

static void *work(void *ud)
{
    shared *s = ud;

    while (!atomic_load(&s->stop)) {
        kvs_server v;

        blocking(s);
        pipelined(s);
        kvs_server_get(s->c, &v);
        if (!v.up)
            (void)kvs_wait_up(s->c, 0, 1000, NULL);
    }
    return NULL;
}

static void *wait_counter(void *ud)
{
    shared *s = ud;

    while (!atomic_load(&s->stop)) {
        kvs_status got = kvs_counter_wait(s->c, 0, (kvs_mark){1, 0, 1}, 5, NULL);

        if (got != KVS_E_DEADLINE && got != KVS_E_AWAY)
            atomic_fetch_add(&s->bad, 1);
        (void)kvs_counter_set(s->c, 2, 7, NULL);
    }
    return NULL;
}

static int open_all(shared *s, const fake *f)
{
    static kvs_plane planes[1];
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;

    o.path = f->path;
    o.timeout_ms = 20000;
    o.backoff_min_ms = 2;
    o.backoff_max_ms = 10;
    return kvs_connect(&s->c, &o, NULL) != KVS_OK ||
           kvs_namespace_mla("race", "", KVS_FORMAT_mla_bf16, 1, 1, planes, &desc, NULL) != KVS_OK ||
           kvs_open(s->c, &desc, &s->ns, 0, NULL) != KVS_OK ||
           kvs_region_create(s->ns, 0, 8, &s->region, 0, NULL) != KVS_OK;
}

int main(void)
{
    static fake f;
    static shared s;
    pthread_t t[THREADS + 1];
    unsigned done = 0;

    fake_init(&f);
    f.credit_requests = 6;
    fake_start(&f);
    if (open_all(&s, &f) != 0)
        return 1;
    for (int i = 0; i < THREADS; i++)
        (void)pthread_create(&t[i], NULL, work, &s);
    (void)pthread_create(&t[THREADS], NULL, wait_counter, &s);
    for (unsigned i = 1; i <= RESTARTS; i++) {
        while (atomic_load(&s.calls) < done + 200) {
            struct timespec pause = {0, 1000000};

            (void)nanosleep(&pause, NULL);
        }
        done = atomic_load(&s.calls);
        fake_stop(&f);
        fake_start(&f);
        if (kvs_wait_up(s.c, i, 20000, NULL) != KVS_OK)
            atomic_fetch_add(&s.bad, 1);
    }
    atomic_store(&s.stop, true);
    for (int i = 0; i <= THREADS; i++)
        (void)pthread_join(t[i], NULL);
    kvs_close(s.c);
    fake_stop(&f);
    fake_fini(&f);
    (void)printf("%u calls, %u bad\n%d passed, %d failed\n", atomic_load(&s.calls), atomic_load(&s.bad),
                 atomic_load(&s.bad) == 0, atomic_load(&s.bad) != 0);
    return atomic_load(&s.bad) != 0;
}
