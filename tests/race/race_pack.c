/* Client pack under ThreadSanitizer: threads on one pack, waiting, polling, cancelling and giving up, while the daemon
 * restarts. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/client/kvstride_pack.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/random.h"

enum { THREADS = 4, RESTARTS = 6, EACH = 16, BLOCKS = THREADS * EACH, PAGE = 1152 };

typedef struct shared {
    kvs_client *c;
    kvs_pack *pack;
    atomic_bool stop;
    atomic_uint calls, bad, next;
} shared;

static void count(shared *s, kvs_status got)
{
    atomic_fetch_add(&s->calls, 1);
    if (got != KVS_OK && got != KVS_E_AWAY && got != KVS_E_STALE && got != KVS_E_CANCELLED && got != KVS_E_BUSY)
        atomic_fetch_add(&s->bad, 1);
}

static void one_move(shared *s, rnd *r, uint32_t index)
{
    uint8_t keys[EACH][KVS_KEY_BYTES];
    uint32_t blocks[EACH];
    kvs_status results[EACH];
    kvs_pack_move m = {.n = 1 + (uint32_t)rnd_below(r, EACH), .keys = keys[0], .blocks = blocks, .results = results};
    kvs_request *q;
    kvs_status got;

    memset(keys, 1, sizeof keys);
    for (uint32_t i = 0; i < EACH; i++)
        blocks[i] = index * EACH + i;
    got = rnd_below(r, 2) ? kvs_pack_store(s->pack, &m, &q, 0, NULL) : kvs_pack_load(s->pack, &m, &q, 0, NULL);
    if (got != KVS_OK) {
        count(s, got);
        return;
    }
    switch (rnd_below(r, 4)) {
    case 0:
        (void)kvs_cancel(q, NULL, 0, NULL);
        break;
    case 1:
        break; /* given up */
    case 2:
        while (!kvs_done(q))
            ;
        break;
    default:
        (void)kvs_wait(q, 0, NULL);
    }
    count(s, kvs_request_end(q, NULL));
}

static void *work(void *ud)
{
    shared *s = ud;
    uint32_t index = atomic_fetch_add(&s->next, 1);
    rnd r = {.state = index + 1};

    while (!atomic_load(&s->stop)) {
        kvs_server v;

        one_move(s, &r, index);
        kvs_server_get(s->c, &v);
        if (!v.up)
            (void)kvs_wait_up(s->c, 0, 1000, NULL);
    }
    return NULL;
}

static int open_all(shared *s, const fake *f, uint8_t *memory)
{
    static kvs_plane planes[2];
    kvs_pack_plane tensors[2] = {{memory + BLOCKS * PAGE, PAGE}, {memory, PAGE}};
    kvs_pack_args a = {.n_planes = 2, .planes = tensors, .n_blocks = BLOCKS, .chunk = 3, .n_staging = 8};
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;

    o.path = f->path;
    o.timeout_ms = 20000;
    o.backoff_min_ms = 2;
    o.backoff_max_ms = 10;
    return kvs_connect(&s->c, &o, NULL) != KVS_OK ||
           kvs_namespace_mla("race", "", KVS_FORMAT_mla_bf16, 2, 1, planes, &desc, NULL) != KVS_OK ||
           kvs_open(s->c, &desc, &a.ns, 0, NULL) != KVS_OK || kvs_pack_open(s->c, &a, &s->pack, 0, NULL) != KVS_OK;
}

int main(void)
{
    static fake f;
    static shared s;
    uint8_t *memory = aligned_alloc(16, 2 * BLOCKS * PAGE);
    pthread_t t[THREADS];
    unsigned done = 0;

    if (memory == NULL)
        return 1;
    memset(memory, 0, 2 * BLOCKS * PAGE);
    fake_init(&f);
    f.credit_requests = 6;
    fake_start(&f);
    if (open_all(&s, &f, memory) != 0)
        return 1;
    for (int i = 0; i < THREADS; i++)
        (void)pthread_create(&t[i], NULL, work, &s);
    for (unsigned i = 1; i <= RESTARTS; i++) {
        while (atomic_load(&s.calls) < done + 100) {
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
    for (int i = 0; i < THREADS; i++)
        (void)pthread_join(t[i], NULL);
    if (kvs_settle(s.c, 0, NULL) != KVS_OK)
        atomic_fetch_add(&s.bad, 1);
    kvs_pack_close(s.pack);
    kvs_close(s.c);
    fake_stop(&f);
    fake_fini(&f);
    free(memory);
    (void)printf("%u calls, %u bad\n%d passed, %d failed\n", atomic_load(&s.calls), atomic_load(&s.bad),
                 atomic_load(&s.bad) == 0, atomic_load(&s.bad) != 0);
    return atomic_load(&s.bad) != 0;
}
