/* libkvstride against the real daemon. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/kvstride.h"
#include "tests/support/daemon_fixture.h"

#define OK(call)            check((call), KVS_OK, #call)
#define FAILS(status, call) check((call), (status), #call)

enum { TOKENS = 4, LAYERS = 2, SLOTS = 8 };

static const char CONFIG[] = "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"device\": {\"kind\": \"cpu\"}}";
static kvs_err err;

static void check(kvs_status s, kvs_status want, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? err.msg : "",
                 kvs_status_name(want));
}

typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region;
    kvs_slot slots[SLOTS];
    uint8_t *base;
    kvs_region_info info;
    kvs_ns_info ns_info;
} engine;

static kvs_client *connect_to(const daemon_fixture *d)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;

    o.path = d->socket;
    o.name = "test engine";
    o.timeout_ms = 10000;
    o.backoff_min_ms = 5;
    o.backoff_max_ms = 50;
    OK(kvs_connect(&c, &o, &err));
    return c;
}

static void engine_open(engine *e, const daemon_fixture *d)
{
    static kvs_plane planes[LAYERS];
    kvs_namespace desc;
    uint64_t bytes;
    void *base;

    e->c = connect_to(d);
    OK(kvs_namespace_mla("m", "r", KVS_FORMAT_mla_bf16, LAYERS, TOKENS, planes, &desc, &err));
    OK(kvs_open(e->c, &desc, &e->ns, 0, &err));
    OK(kvs_region_create(e->ns, 0, SLOTS, &e->region, 0, &err));
    OK(kvs_region_map(e->region, &base, &bytes, &err));
    e->base = base;
    kvs_region_get(e->region, &e->info);
    kvs_ns_get(e->ns, &e->ns_info);
    OK(kvs_slot_take(e->region, 4, e->slots, 0, &err));
}

static uint8_t *slot_at(const engine *e, kvs_slot s)
{
    return e->base + s.slot * e->info.slot_stride;
}

static void keys_fill(uint8_t *keys, uint32_t n, uint8_t seed)
{
    memset(keys, seed, (size_t)n * 32);
    for (uint32_t i = 0; i < n; i++)
        keys[(size_t)i * 32] = (uint8_t)(i + 1);
}

static void store(engine *e, const uint8_t *keys, uint32_t n, uint8_t fill)
{
    kvs_status results[SLOTS];
    kvs_store_args a = {.ns = e->ns, .region = e->region, .n = n, .keys = keys, .slots = e->slots, .results = results};

    for (uint32_t i = 0; i < n; i++)
        memset(slot_at(e, e->slots[i]), fill + (int)i, e->ns_info.slot_bytes);
    OK(kvs_store(&a, 0, &err));
    for (uint32_t i = 0; i < n; i++)
        cr_assert_eq(results[i], KVS_OK);
}

static void load_and_compare(engine *e, const uint8_t *keys, uint32_t n, uint8_t fill)
{
    kvs_load_result results[SLOTS];
    kvs_load_args a = {.ns = e->ns, .region = e->region, .n = n, .keys = keys, .slots = e->slots, .results = results};

    for (uint32_t i = 0; i < n; i++)
        memset(slot_at(e, e->slots[i]), 0, e->ns_info.slot_bytes);
    OK(kvs_load(&a, 0, &err));
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *p = slot_at(e, e->slots[i]);

        for (uint64_t k = 0; k < e->ns_info.slot_bytes; k++)
            cr_assert_eq(p[k], (uint8_t)(fill + i), "block %u byte %llu", i, (unsigned long long)k);
    }
}

Test(client_e2e, stores_finds_and_loads_blocks)
{
    daemon_fixture d;
    engine a = {0}, b = {0};
    uint8_t keys[4 * 32], states[4];
    uint32_t hits = 0;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&a, &d);
    engine_open(&b, &d);
    keys_fill(keys, 4, 3);
    store(&a, keys, 3, 0x30);
    OK(kvs_lookup(b.ns, keys, 4, &hits, states, 0, &err));
    cr_assert_eq(hits, 3);
    cr_assert_eq(states[3], KVS_KEY_ABSENT);
    load_and_compare(&b, keys, 3, 0x30);
    kvs_close(a.c);
    kvs_close(b.c);
    daemon_fini(&d);
}

Test(client_e2e, leases_pins_and_resets)
{
    daemon_fixture d;
    engine e = {0};
    uint8_t keys[4 * 32];
    kvs_status results[4];
    kvs_lease lease;
    kvs_load_result loaded[2];
    kvs_reset_result reset;
    kvs_health_info health;
    kvs_report_args summary = KVS_REPORT_SUMMARY;
    char *text;
    size_t len;
    uint32_t hits;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    keys_fill(keys, 4, 5);
    store(&e, keys, 4, 0x50);
    kvs_reserve_args r = {.ns = &e.ns, .n_ns = 1, .n = 4, .keys = keys, .max_loads = 1, .ttl_ms = 10000};
    OK(kvs_reserve(&r, &lease, 0, &err));
    cr_assert_eq(lease.n_leased, 4);
    kvs_load_args l = {.ns = e.ns, .region = e.region, .n = 2, .lease = &lease, .lease_first = 1, .results = loaded};
    OK(kvs_load(&l, 0, &err)); /* into slots of the daemon's choice */
    cr_assert(loaded[0].flags & KVS_LOADED_SHARED);
    cr_assert_eq(slot_at(&e, loaded[0].slot)[7], 0x51);
    OK(kvs_slot_drop(e.region, &loaded[0].slot, 1, NULL, results, 0, &err));
    FAILS(KVS_E_PARTIAL, kvs_drop(e.ns, keys, 1, results, 0, &err)); /* leased */
    cr_assert_str_eq(err.msg,
                     "DROP: 1 of 1 failed, the first is [0]: in use, being written, or over the granted credit");
    cr_assert_eq(results[0], KVS_E_BUSY);
    OK(kvs_release(e.c, &lease, 0, &err));
    OK(kvs_pin(e.ns, keys, 2, results, 0, &err));
    FAILS(KVS_E_PARTIAL, kvs_reset(e.c, e.ns, 0, &reset, 0, &err)); /* pinned ones are left */
    cr_assert_eq(reset.kept, 2);
    OK(kvs_unpin(e.ns, keys, 2, NULL, 0, &err));
    OK(kvs_lookup(e.ns, keys, 4, &hits, NULL, 0, &err));
    cr_assert_eq(hits, 2);
    OK(kvs_health(e.c, &health, 0, &err));
    cr_assert_eq(health.state, KVS_HEALTH_OK);
    OK(kvs_report_alloc(e.c, &summary, &text, &len, 0, &err));
    cr_assert_eq(text[0], '{');
    kvs_free(text);
    kvs_close(e.c);
    daemon_fini(&d);
}

Test(client_e2e, waits_for_a_counter_before_it_stores_and_signals_another)
{
    daemon_fixture d;
    engine e = {0};
    uint8_t key[32] = {9};
    kvs_status result;
    kvs_mark after = {4, 0, 10}, signal = {6, 0, 3};
    kvs_request *r;
    uint32_t hits;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    kvs_store_args a = {.ns = e.ns,
                        .region = e.region,
                        .n = 1,
                        .keys = key,
                        .slots = e.slots,
                        .after = &after,
                        .signal = &signal,
                        .results = &result};
    OK(kvs_submit_store(&a, &r, 0, &err));
    FAILS(KVS_E_DEADLINE, kvs_counter_wait(e.c, 0, signal, 30, &err));
    OK(kvs_lookup(e.ns, key, 1, &hits, NULL, 0, &err));
    cr_assert_eq(hits, 0); /* nothing is read before the mark */
    OK(kvs_counter_set(e.c, 4, 10, &err));
    OK(kvs_counter_wait(e.c, 0, signal, 0, &err));
    OK(kvs_wait(r, 0, &err));
    OK(kvs_request_end(r, &err));
    OK(kvs_lookup(e.ns, key, 1, &hits, NULL, 0, &err));
    cr_assert_eq(hits, 1);
    kvs_close(e.c);
    daemon_fini(&d);
}

Test(client_e2e, cancels_a_store_that_waits_for_ever)
{
    daemon_fixture d;
    engine e = {0};
    uint8_t key[32] = {9};
    kvs_status result;
    kvs_mark after = {4, 0, 10};
    kvs_request *r;
    uint32_t outcome = 9;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    kvs_store_args a = {
        .ns = e.ns, .region = e.region, .n = 1, .keys = key, .slots = e.slots, .after = &after, .results = &result};
    OK(kvs_submit_store(&a, &r, 0, &err));
    OK(kvs_cancel(r, &outcome, 0, &err));
    cr_assert_eq(outcome, KVS_CANCEL_STOPPED);
    FAILS(KVS_E_CANCELLED, kvs_request_end(r, &err));
    FAILS(KVS_E_DEADLINE, kvs_store(&a, 40, &err)); /* the daemon's own deadline */
    OK(kvs_settle(e.c, 0, &err));
    kvs_close(e.c);
    daemon_fini(&d);
}

Test(client_e2e, outlives_a_daemon_that_is_killed_and_started_again)
{
    daemon_fixture d;
    engine e = {0};
    uint8_t keys[4 * 32];
    kvs_server before, now;
    uint32_t hits = 7;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    keys_fill(keys, 4, 8);
    store(&e, keys, 3, 0x10);
    for (uint64_t life = 1; life <= 3; life++) {
        kvs_server_get(e.c, &before);
        (void)daemon_stop(&d, SIGKILL);
        memset(slot_at(&e, e.slots[3]), 0x66, 16); /* the mapping is ours */
        OK(kvs_lookup(e.ns, keys, 3, &hits, NULL, 0, &err));
        cr_assert_eq(hits, 0);
        FAILS(KVS_E_AWAY, kvs_ping(e.c, 0, &err));
        cr_assert(daemon_start(&d, CONFIG));
        OK(kvs_wait_up(e.c, before.generation, 0, &err));
        kvs_server_get(e.c, &now);
        cr_assert_neq(memcmp(before.boot_id, now.boot_id, 16), 0);
        kvs_region_get(e.region, &e.info);
        cr_assert_eq(e.info.state, KVS_OK);
        store(&e, keys, 3, (uint8_t)(0x20 * life)); /* the private slots were taken back as they were */
        load_and_compare(&e, keys, 3, (uint8_t)(0x20 * life));
    }
    kvs_close(e.c);
    daemon_fini(&d);
}

/* Two users of a slot, each with a hold: the first one's drop must not give the second one's block away. */
Test(client_e2e, keeps_each_hold_of_a_slot_over_a_restart)
{
    daemon_fixture d;
    engine e = {0};
    uint8_t key[32];
    kvs_load_result loaded[2];
    kvs_load_args a = {.n = 1, .keys = key};

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    keys_fill(key, 1, 8);
    store(&e, key, 1, 0x10);
    a.ns = e.ns;
    a.region = e.region;
    for (int i = 0; i < 2; i++) {
        a.results = &loaded[i];
        OK(kvs_load(&a, 0, &err));
    }
    cr_assert_eq(loaded[0].slot.slot, loaded[1].slot.slot);
    (void)daemon_stop(&d, SIGKILL);
    cr_assert(daemon_start(&d, CONFIG));
    OK(kvs_wait_up(e.c, 1, 0, &err));
    for (int i = 0; i < 2; i++)
        OK(kvs_slot_drop(e.region, &loaded[i].slot, 1, NULL, NULL, 0, &err));
    cr_assert_neq(kvs_slot_drop(e.region, &loaded[0].slot, 1, NULL, NULL, 0, &err), KVS_OK);
    kvs_close(e.c);
    daemon_fini(&d);
}

Test(client_e2e, reports_busy_while_the_daemon_is_stopped_and_works_again_after)
{
    daemon_fixture d;
    engine e = {0};
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *late = NULL;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    cr_assert_eq(kill(d.pid, SIGSTOP), 0);
    FAILS(KVS_E_DEADLINE, kvs_ping(e.c, 50, &err));
    o.path = d.socket;
    o.connect_timeout_ms = 50;
    FAILS(KVS_E_BUSY, kvs_connect(&late, &o, &err));
    cr_assert_eq(kill(d.pid, SIGCONT), 0);
    OK(kvs_ping(e.c, 0, &err));
    OK(kvs_settle(e.c, 0, &err));
    kvs_close(e.c);
    daemon_fini(&d);
}

/* ---- many users ---- */

typedef struct user {
    kvs_client *c;
    kvs_ns *ns;
    unsigned rounds, bad;
} user;

static void *use(void *ud)
{
    user *u = ud;
    uint8_t keys[3 * 32];

    keys_fill(keys, 3, 4);
    for (unsigned i = 0; i < u->rounds; i++) {
        uint32_t hits = 0;

        keys[2 * 32] = i % 2 ? 3 : 77;
        if (kvs_lookup(u->ns, keys, 3, &hits, NULL, 0, NULL) != KVS_OK || hits != (i % 2 ? 3u : 2u))
            u->bad++;
    }
    return NULL;
}

Test(client_e2e, serves_eight_threads_on_one_handle)
{
    enum { N = 8 };
    daemon_fixture d;
    engine e = {0};
    uint8_t keys[3 * 32];
    pthread_t t[N];
    user u[N];

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    keys_fill(keys, 3, 4);
    store(&e, keys, 3, 0x40);
    for (unsigned i = 0; i < N; i++) {
        u[i] = (user){e.c, e.ns, 200, 0};
        cr_assert_eq(pthread_create(&t[i], NULL, use, &u[i]), 0);
    }
    for (unsigned i = 0; i < N; i++) {
        (void)pthread_join(t[i], NULL);
        cr_assert_eq(u[i].bad, 0);
    }
    kvs_close(e.c);
    daemon_fini(&d);
}

/* An engine that says whose kernels attend: whole blocks are for backends that were verified with them. */
Test(client_e2e, a_cross_layer_view_is_refused_for_a_backend_that_was_not_verified_with_one)
{
    daemon_fixture d;
    engine e = {0};
    kvs_plane_map map = {.stride = LAYERS * TOKENS * UINT64_C(1152)};
    kvs_import in = {.n_slots = 2, .n_fds = 1, .n_maps = 1, .maps = &map};
    kvs_region *mine;
    int fd;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    OK(kvs_memfd_create("engine", 2 * map.stride, &fd, &err));
    in.fds = &fd;
    map.backend = kvs_backend_parse("FLASHMLA");
    OK(kvs_region_import(e.ns, &in, &mine, 0, &err));
    OK(kvs_region_close(mine, 0, &err));
    map.backend = kvs_backend_parse("ROCM_AITER_MLA");
    cr_assert_eq(kvs_region_import(e.ns, &in, &mine, 0, &err), KVS_E_UNSUPPORTED);
    cr_assert(strstr(err.msg, "backend OTHER: plane latent of layer 0: stride 9216, page 4608") != NULL, "%s", err.msg);
    map.backend |= KVS_BACKEND_OVERRIDE;
    OK(kvs_region_import(e.ns, &in, &mine, 0, &err));
    OK(kvs_region_close(mine, 0, &err));
    (void)close(fd);
    kvs_close(e.c);
    daemon_fini(&d);
}

Test(client_e2e, imports_memory_of_its_own)
{
    daemon_fixture d;
    engine e = {0};
    uint8_t keys[2 * 32];
    kvs_region *mine;
    kvs_status results[2];
    kvs_slot slots[2] = {{0, 0}, {1, 0}};
    kvs_plane_map maps[LAYERS];
    int fd;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    keys_fill(keys, 2, 6);
    OK(kvs_memfd_create("engine", 65536, &fd, &err));
    for (uint32_t i = 0; i < LAYERS; i++) /* one tensor a layer */
        maps[i] = (kvs_plane_map){0, 0, i * UINT64_C(32768), TOKENS * 1152};
    kvs_import in = {.n_slots = 2, .n_fds = 1, .fds = &fd, .n_maps = LAYERS, .maps = maps};
    OK(kvs_region_import(e.ns, &in, &mine, 0, &err));
    for (uint32_t i = 0; i < 2 * LAYERS; i++) {
        uint8_t page[TOKENS * 1152];

        memset(page, 0xa0 + (int)(i % 2), sizeof page); /* slot 0: a0, slot 1: a1 */
        cr_assert_eq(pwrite(fd, page, sizeof page, (off_t)(maps[i / 2].base + (i % 2) * sizeof page)), sizeof page);
    }
    kvs_store_args a = {.ns = e.ns, .region = mine, .n = 2, .keys = keys, .slots = slots, .results = results};
    OK(kvs_store(&a, 0, &err));
    load_and_compare(&e, keys, 2, 0xa0);
    OK(kvs_region_close(mine, 0, &err));
    (void)close(fd);
    kvs_close(e.c);
    daemon_fini(&d);
}
