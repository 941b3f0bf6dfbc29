/* Bytes and lifetimes under attack: the real daemon, libkvstride, engines that are killed, and many layouts. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/kvstride.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"
#include "tests/support/storm.h"

#define OK(call)         check((call), KVS_OK, #call)
#define IS(status, call) check((call), (status), #call)

enum { MAX_SLOTS = 64, MAX_BATCH = 1000 };

static daemon_fixture d;
static kvs_err err;

static void check(kvs_status s, kvs_status want, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? err.msg : "",
                 kvs_status_name(want));
}

static void init(void)
{
    daemon_init(&d);
}

static void fini(void)
{
    daemon_fini(&d);
}

TestSuite(integrity, .init = init, .fini = fini);

/* ---- storms ---- */

/* A storm, then the books, then a refill of `n_slots` blocks of the last layout. */
static void survive(const char *config, const storm_plan *p, uint32_t n_slots)
{
    storm_result r = {0};
    char why[512];
    unsigned fds, mappings;

    cr_assert(daemon_start(&d, config));
    fds = daemon_fds(&d);
    mappings = storm_mappings(&d);
    cr_assert(storm_run(&d, p, &r), "%s", r.why);
    cr_assert(r.loads > p->ops / 100 && r.stores > p->ops / 100, "%llu blocks compared, %llu stored",
              (unsigned long long)r.loads, (unsigned long long)r.stores);
    cr_assert(storm_left_nothing(&d, why, sizeof why), "%s", why);
    cr_assert(storm_refill(&d, p->layouts - 1, n_slots, why, sizeof why), "%s", why);
    cr_assert(daemon_wait_fds(&d, fds, 10000), "%u descriptors where %u were", daemon_fds(&d), fds);
    cr_assert(storm_wait_mappings(&d, mappings), "%u mappings where %u were", storm_mappings(&d), mappings);
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
}

/* Symptom: after clients had been killed, slots, leases and memory were missing, and an empty pool had no free block. */
Test(integrity, killed_and_hostile_engines_leave_nothing_behind)
{
    storm_plan p = {
        .seed = 1, .ops = 8000, .engines = 8, .layouts = 3, .chains = 12, .kills = 40, .pauses = 20, .hostile = true};

    survive("{\"pool\": {\"max_bytes\": \"1MiB\", \"extent_bytes\": \"128KiB\"}}", &p,
            6 * (uint32_t)(131072 / storm_slot_bytes(2)));
}

/* Symptom: memory that went from one layout to another was read as the block that had been there before. */
Test(integrity, layouts_that_fight_for_memory_mix_up_no_byte)
{
    storm_plan p = {.seed = 2, .ops = 6000, .engines = 6, .layouts = 4, .chains = 6};

    survive("{\"pool\": {\"max_bytes\": \"256KiB\", \"extent_bytes\": \"32KiB\"}}", &p,
            5 * (uint32_t)(32768 / storm_slot_bytes(3)));
}

Test(integrity, a_cap_of_slots_holds_for_every_layout)
{
    storm_plan p = {.seed = 3, .ops = 3000, .engines = 6, .layouts = 2, .chains = 4, .kills = 10};

    survive("{\"pool\": {\"max_bytes\": \"1MiB\", \"extent_bytes\": \"128KiB\", \"max_slots\": 7}}", &p, 7);
}

Test(integrity, a_pool_of_one_block_serves_everybody)
{
    storm_plan p = {.seed = 4, .ops = 2000, .engines = 4, .layouts = 1, .chains = 1, .kills = 5};

    survive("{\"pool\": {\"max_bytes\": \"8KiB\", \"extent_bytes\": \"8KiB\"}}", &p, 1);
}

/* Symptom: a worker died without a trace on touching the vanished pool; elsewhere old handles were taken for new ones. */
Test(integrity, engines_outlive_a_daemon_that_is_killed_under_load)
{
    storm_plan p = {.seed = 5, .ops = 4000, .engines = 6, .layouts = 2, .chains = 6, .kills = 6, .daemon_kills = 6};

    survive("{\"pool\": {\"max_bytes\": \"1MiB\", \"extent_bytes\": \"128KiB\"}}", &p,
            7 * (uint32_t)(131072 / storm_slot_bytes(1)));
}

/* ---- one engine ---- */

typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *g;
    uint8_t *base;
    uint64_t slot_bytes;
    kvs_slot slots[MAX_SLOTS];
} engine;

/* A raw layout of one plane unless the caller has another one. */
static kvs_namespace plain(kvs_plane *plane, uint32_t tokens, uint32_t row_bytes)
{
    kvs_namespace n = {.model = "m", .weights = "r", .tokens_per_block = tokens, .n_planes = 1, .planes = plane};

    *plane = (kvs_plane){.name = "latent", .format = KVS_FORMAT_raw, .row_bytes = row_bytes};
    plane->page_bytes = ((uint64_t)tokens * row_bytes + 15) / 16 * 16;
    return n;
}

static void engine_open(engine *e, const kvs_namespace *n, uint32_t n_slots, uint32_t n_take)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_ns_info info;
    uint64_t bytes;
    void *base;

    o.path = d.socket;
    OK(kvs_connect(&e->c, &o, &err));
    OK(kvs_open(e->c, n, &e->ns, 0, &err));
    kvs_ns_get(e->ns, &info);
    e->slot_bytes = info.slot_bytes;
    OK(kvs_region_create(e->ns, 0, n_slots, &e->g, 0, &err));
    OK(kvs_region_map(e->g, &base, &bytes, &err));
    e->base = base;
    OK(kvs_slot_take(e->g, n_take, e->slots, 0, &err));
}

static void key_put(uint8_t *key, uint64_t n)
{
    memset(key, 0, KVS_KEY_BYTES);
    memcpy(key, &n, sizeof n);
    key[31] = 1;
}

/* For one call. */
static uint8_t *key(uint64_t n)
{
    static uint8_t keys[4][KVS_KEY_BYTES];
    static unsigned turn;

    key_put(keys[++turn % 4], n);
    return keys[turn % 4];
}

static uint8_t *block(const engine *e, uint32_t i)
{
    return e->base + e->slots[i].slot * e->slot_bytes;
}

static void content(const engine *e, uint64_t n, uint8_t *to)
{
    for (uint64_t i = 0; i < e->slot_bytes; i++)
        to[i] = (uint8_t)(n * 31 + i * 7 + (i >> 8));
}

static kvs_status store(engine *e, uint64_t n)
{
    kvs_status result = KVS_E_INVALID;
    kvs_store_args a = {.ns = e->ns, .region = e->g, .n = 1, .keys = key(n), .slots = e->slots, .results = &result};
    kvs_status s;

    content(e, n, block(e, 0));
    s = kvs_store(&a, 0, &err);
    return s == KVS_E_PARTIAL ? result : s;
}

static kvs_status load(engine *e, uint64_t n)
{
    kvs_load_result result = {.status = KVS_E_INVALID};
    kvs_load_args a = {.ns = e->ns, .region = e->g, .n = 1, .keys = key(n), .slots = e->slots, .results = &result};
    uint8_t want[65536];
    kvs_status s;

    memset(block(e, 0), 0, e->slot_bytes);
    s = kvs_load(&a, 0, &err);
    if (s == KVS_E_PARTIAL)
        return result.status;
    content(e, n, want);
    if (s == KVS_OK)
        cr_assert_eq(memcmp(block(e, 0), want, e->slot_bytes), 0, "wrong bytes for key %llu", (unsigned long long)n);
    return s;
}

static bool has(engine *e, uint64_t n)
{
    uint32_t hits = 0;

    OK(kvs_lookup(e->ns, key(n), 1, &hits, NULL, 0, &err));
    return hits == 1;
}

/* ---- formats ---- */

/* Case 029.  Symptom: equal size hid that the bytes meant something else, and garbage was loaded. */
Test(integrity, blocks_of_another_format_of_equal_size_are_never_found)
{
    kvs_plane p[2], q[2];
    kvs_namespace base, n;
    engine x = {0}, same = {0};

    cr_assert(daemon_start(&d, NULL));
    base = plain(p, 16, 1024);
    strcpy(p[0].name, "k");
    p[0].format = KVS_FORMAT_kv_bf16;
    p[1] = p[0];
    strcpy(p[1].name, "v");
    base.n_planes = 2;
    base.shard = KVS_SHARD_HEADS;
    base.shard_b = 1;
    base.shard_n = 2;
    engine_open(&x, &base, 2, 1);
    OK(store(&x, 1));
    engine_open(&same, &base, 2, 1);
    OK(load(&same, 1));
    for (int change = 0; change < 9; change++) {
        engine y = {0};

        n = base;
        memcpy(q, p, sizeof q);
        n.planes = q;
        switch (change) {
        case 0:
            q[0].format = q[1].format = KVS_FORMAT_kv_fp16;
            break;
        case 1:
            strcpy(q[0].name, "v"), strcpy(q[1].name, "k");
            break;
        case 2:
            q[0].layer = 1;
            break;
        case 3:
            n.tokens_per_block = 8, q[0].row_bytes = q[1].row_bytes = 2048;
            break;
        case 4:
            strcpy(n.model, "m2");
            break;
        case 5:
            strcpy(n.weights, "rope=2");
            break;
        case 6:
            n.shard_n = 4;
            break;
        case 7:
            n.shard_a = 1, n.shard_b = 2;
            break;
        default:
            n.shard = KVS_SHARD_LAYERS;
            break;
        }
        engine_open(&y, &n, 2, 1);
        cr_assert_eq(y.slot_bytes, x.slot_bytes);
        cr_assert_not(has(&y, 1), "change %d", change);
        IS(KVS_E_NOT_FOUND, load(&y, 1));
        kvs_close(y.c);
    }
    kvs_close(x.c);
    kvs_close(same.c);
}

/* Case 030.  Symptom: one process normalised the name of the format, another did not, and nothing was shared. */
Test(integrity, one_format_under_two_names_is_found)
{
    const char *const names[] = {"mla_fp8", "fp8"};
    engine e[2] = {{0}};
    uint32_t format;

    cr_assert(daemon_start(&d, NULL));
    for (int i = 0; i < 2; i++) {
        kvs_plane p[1];
        kvs_namespace n;

        OK(kvs_format_parse(names[i], &format, &err));
        OK(kvs_namespace_mla("m", "r", format, 1, 16, p, &n, &err));
        engine_open(&e[i], &n, 2, 1);
    }
    OK(store(&e[0], 7));
    OK(load(&e[1], 7));
    IS(KVS_E_UNSUPPORTED, kvs_format_parse("auto", &format, &err));
    kvs_close(e[0].c);
    kvs_close(e[1].c);
}

/* Case 038.  Symptom: engine and daemon disagreed on tokens a block, and names or bytes were wrong. */
Test(integrity, every_number_of_tokens_a_block_is_a_layout_of_its_own)
{
    static const uint32_t tokens[] = {16, 64, 256, 48, 1};
    engine e[5] = {{0}};

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"8MiB\", \"extent_bytes\": \"1MiB\"}}"));
    for (uint32_t i = 0; i < 5; i++) {
        kvs_plane p;
        kvs_namespace n = plain(&p, tokens[i], i < 4 ? 100 : 2048);

        engine_open(&e[i], &n, 2, 1);
        for (uint32_t k = 0; k < i; k++)
            cr_assert_not(has(&e[i], k));
        OK(store(&e[i], i));
    }
    for (uint32_t i = 0; i < 5; i++) {
        OK(load(&e[i], i));
        kvs_close(e[i].c);
    }
}

/* Symptom: a region was closed while a request of an earlier step still used it; the handle was gone, and the daemon kept
 * the memory for as long as the engine lived. */
Test(integrity, a_region_that_a_request_still_uses_is_closed_at_the_second_try)
{
    engine e = {0};
    kvs_plane p;
    kvs_namespace n = plain(&p, 16, 256);
    kvs_status result;
    kvs_mark never = {3, 0, 1};
    kvs_request *r;

    cr_assert(daemon_start(&d, NULL));
    engine_open(&e, &n, 2, 1);
    uint8_t *one = key(1);
    kvs_store_args a = {
        .ns = e.ns, .region = e.g, .n = 1, .keys = one, .slots = e.slots, .after = &never, .results = &result};
    OK(kvs_submit_store(&a, &r, 0, &err));
    IS(KVS_E_BUSY, kvs_region_close(e.g, 0, &err));
    memset(block(&e, 0), 1, e.slot_bytes); /* still mapped */
    OK(kvs_cancel(r, NULL, 0, &err));
    IS(KVS_E_CANCELLED, kvs_request_end(r, &err));
    OK(kvs_region_close(e.g, 0, &err));
    cr_assert_eq(storm_number(&d, KVS_SECTION_SUMMARY, "regions"), 0);
    cr_assert_eq(storm_number(&d, KVS_SECTION_SUMMARY, "region_bytes"), 0);
    kvs_close(e.c);
}

/* Symptom: a deadline cut a large block in two, and its first half was found under its key. */
Test(integrity, blocks_that_a_deadline_cuts_are_never_found)
{
    engine e = {0};
    kvs_plane p;
    kvs_namespace n = plain(&p, 1024, 48 * 1024);
    uint32_t late = 0;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"128MiB\", \"extent_bytes\": \"64MiB\"}}"));
    engine_open(&e, &n, 1, 1);
    for (uint64_t k = 1; k <= 20; k++) {
        kvs_status result;
        kvs_load_result loaded;
        uint8_t one[KVS_KEY_BYTES];
        kvs_store_args s = {.ns = e.ns, .region = e.g, .n = 1, .keys = one, .slots = e.slots, .results = &result};
        kvs_load_args l = {.ns = e.ns, .region = e.g, .n = 1, .keys = one, .slots = e.slots, .results = &loaded};
        kvs_status got;

        key_put(one, k);
        memset(block(&e, 0), (int)k, e.slot_bytes);
        got = kvs_store(&s, 1 + (uint32_t)k % 8, &err);
        late += got == KVS_E_DEADLINE;
        OK(kvs_settle(e.c, 0, &err));
        if (!has(&e, k))
            continue;
        memset(block(&e, 0), 0, e.slot_bytes);
        OK(kvs_load(&l, 0, &err));
        cr_assert_eq(block(&e, 0)[0], k);
        cr_assert_eq(memcmp(block(&e, 0), block(&e, 0) + 1, e.slot_bytes - 1), 0);
    }
    cr_assert_gt(late, 0);
    cr_assert_eq(storm_number(&d, KVS_SECTION_SUMMARY, "pool.quarantined_bytes"), 0);
    cr_assert_eq(storm_number(&d, KVS_SECTION_SUMMARY, "pool.writing_bytes"), 0);
    cr_assert_eq(storm_number(&d, KVS_SECTION_FSCK, "ok"), 1);
    kvs_close(e.c);
}

/* ---- pressure ---- */

/* Case 013.  Symptom: everything was pinned, and the allocator tried for ever. */
Test(integrity, a_pool_that_is_all_pinned_refuses_at_once_and_stays_calm)
{
    engine x = {0}, y = {0};
    kvs_plane p;
    kvs_namespace n = plain(&p, 16, 256);
    kvs_health_info health;
    uint64_t began, cpu;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"1MiB\", \"extent_bytes\": \"1MiB\", \"max_slots\": 4}}"));
    engine_open(&x, &n, 2, 1);
    engine_open(&y, &n, 2, 1);
    for (uint64_t k = 1; k <= 4; k++) {
        OK(store(&x, k));
        OK(kvs_pin(x.ns, key(k), 1, NULL, 0, &err));
    }
    began = raw_now_ms();
    cpu = daemon_cpu_ms(&d);
    for (int i = 0; i < 20; i++)
        IS(KVS_E_NO_SPACE, store(&y, 5));
    OK(kvs_health(y.c, &health, 0, &err));
    cr_assert_lt(raw_now_ms() - began, 1000);
    cr_assert_lt(daemon_cpu_ms(&d) - cpu, 200);
    kvs_close(x.c); /* pins are durable: they do not go with their client */
    IS(KVS_E_NO_SPACE, store(&y, 5));
    OK(kvs_unpin(y.ns, key(3), 1, NULL, 0, &err));
    OK(store(&y, 5));
    cr_assert_not(has(&y, 3));
    OK(load(&y, 5));
    kvs_close(y.c);
}

/* Case 010.  Symptom: one way to read a block did not count as use of it. */
Test(integrity, every_way_to_load_a_block_renews_it)
{
    engine e = {0};
    kvs_plane p;
    kvs_namespace n = plain(&p, 16, 256);

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"1MiB\", \"extent_bytes\": \"1MiB\", \"max_slots\": 4}}"));
    engine_open(&e, &n, 4, 1);
    for (int way = 0; way < 4; way++) {
        kvs_load_result r[2];
        kvs_lease lease;
        uint8_t one[KVS_KEY_BYTES];
        kvs_load_args a = {.ns = e.ns, .region = e.g, .n = 1, .keys = one, .results = r};
        kvs_reserve_args q = {.ns = &e.ns, .n_ns = 1, .n = 1, .keys = one, .max_loads = 1, .ttl_ms = 1000};

        key_put(one, 1);
        OK(kvs_reset(e.c, NULL, 0, NULL, 0, &err));
        for (uint64_t k = 1; k <= 4; k++)
            OK(store(&e, k));
        switch (way) {
        case 0:
            OK(load(&e, 1));
            break;
        case 1: /* by lease, into a slot of the daemon's choice */
            OK(kvs_reserve(&q, &lease, 0, &err));
            a.lease = &lease;
            OK(kvs_load(&a, 0, &err));
            OK(kvs_release(e.c, &lease, 0, &err));
            OK(kvs_slot_drop(e.g, &r[0].slot, 1, NULL, NULL, 0, &err));
            break;
        default: /* a copy, then without one */
            for (int i = 0; i <= way - 2; i++) {
                OK(kvs_load(&a, 0, &err));
                OK(kvs_slot_drop(e.g, &r[0].slot, 1, NULL, NULL, 0, &err));
                if (i == 0 && way == 3)
                    for (uint64_t k = 2; k <= 4; k++)
                        OK(load(&e, k));
            }
        }
        for (int i = 0; i < 100; i++)
            cr_assert(has(&e, 2)); /* looking is no use */
        OK(store(&e, 5));
        cr_assert(has(&e, 1), "way %d", way);
        cr_assert_not(has(&e, 2), "way %d", way);
    }
    kvs_close(e.c);
}

/* Case 048.  Symptom: memory grew for hours although the pool is fixed, and the hit rate fell. */
Test(integrity, memory_stays_while_blocks_come_and_go)
{
    enum { POOL = 1000, SET = 900 };
    const char *soak = getenv("KVS_TEST_SOAK"); /* how many blocks; 2000000 by hand */
    uint64_t blocks = soak ? strtoull(soak, NULL, 0) : 60000, early = 0, mark = blocks / 10;
    static uint8_t keys[MAX_BATCH * KVS_KEY_BYTES];
    kvs_slot slots[MAX_BATCH];
    kvs_status results[MAX_BATCH];
    engine e = {0};
    kvs_plane p;
    kvs_namespace n = plain(&p, 1, 1024);
    kvs_store_args a;

    cr_assert(
        daemon_start(&d, "{\"pool\": {\"max_bytes\": \"2MiB\", \"extent_bytes\": \"2MiB\", \"max_slots\": 1000}}"));
    engine_open(&e, &n, 2, 1);
    a = (kvs_store_args){.ns = e.ns, .region = e.g, .n = 500, .keys = keys, .slots = slots, .results = results};
    for (uint32_t i = 0; i < a.n; i++)
        slots[i] = e.slots[0];
    for (uint64_t done = 0; done < blocks; done += a.n) {
        for (uint32_t i = 0; i < a.n; i++)
            key_put(keys + (size_t)i * KVS_KEY_BYTES, 1000000 + done + i);
        OK(kvs_store(&a, 0, &err));
        if (done >= mark && early == 0)
            early = daemon_private_kib(&d);
    }
#ifndef __SANITIZE_ADDRESS__ /* which keeps freed memory */
    cr_assert_leq(daemon_private_kib(&d), early + early / 50 + 64, "%llu KiB, then %llu", (unsigned long long)early,
                  (unsigned long long)daemon_private_kib(&d));
#endif
    for (int round = 0; round < 3; round++)
        for (uint64_t k = 0; k < SET; k++) {
            if (round == 0)
                OK(store(&e, k));
            else
                cr_assert(has(&e, k), "round %d key %llu", round, (unsigned long long)k);
        }
    cr_assert_eq(storm_number(&d, KVS_SECTION_SUMMARY, "directory.ready"), POOL);
    cr_assert_eq(storm_number(&d, KVS_SECTION_FSCK, "ok"), 1);
    kvs_close(e.c);
}

/* ---- resets ---- */

enum { READERS = 3, VERSIONS = 400, MOST_VERSIONS = 100 * VERSIONS, LOADS = 51 };

typedef struct reset_race {
    _Atomic uint64_t version; /* no block of an earlier one may be loaded any more */
    _Atomic bool over;
    kvs_namespace *n;
    uint8_t token[16];
    _Atomic unsigned loaded[READERS];
    unsigned stale[READERS], torn[READERS], failed[READERS];
} reset_race;

typedef struct reader {
    reset_race *race;
    unsigned i;
} reader;

/* All words of a block are its version. */
static void judge(const reader *r, const uint8_t *p, uint64_t bytes, uint64_t least)
{
    uint64_t first;

    memcpy(&first, p, 8);
    r->race->loaded[r->i]++;
    r->race->stale[r->i] += first < least;
    r->race->torn[r->i] += memcmp(p, p + 8, bytes - 8) != 0;
}

static void *read_on(void *ud)
{
    const reader *r = ud;
    engine e = {0};
    kvs_options o = KVS_OPTIONS_INIT;
    uint8_t one[KVS_KEY_BYTES];
    kvs_ns_info info;
    uint64_t bytes;
    void *base;

    o.path = d.socket;
    key_put(one, 1);
    /* Two read where the writer keeps its blocks, one in a region of its own. */
    if (kvs_connect(&e.c, &o, NULL) != KVS_OK || kvs_open(e.c, r->race->n, &e.ns, 0, NULL) != KVS_OK ||
        (r->i > 0 ? kvs_region_attach(e.c, e.ns, r->race->token, &e.g, 0, NULL)
                  : kvs_region_create(e.ns, 0, 4, &e.g, 0, NULL)) != KVS_OK ||
        kvs_region_map(e.g, &base, &bytes, NULL) != KVS_OK) {
        r->race->failed[r->i]++;
        return NULL;
    }
    kvs_ns_get(e.ns, &info);
    while (!r->race->over) {
        kvs_load_result result;
        kvs_load_args a = {.ns = e.ns, .region = e.g, .n = 1, .keys = one, .results = &result};
        uint64_t least = r->race->version;

        if (kvs_load(&a, 0, NULL) != KVS_OK)
            continue;
        judge(r, (uint8_t *)base + result.slot.slot * info.slot_bytes, info.slot_bytes, least);
        r->race->failed[r->i] += kvs_slot_drop(e.g, &result.slot, 1, NULL, NULL, 0, NULL) != KVS_OK;
    }
    kvs_close(e.c);
    return NULL;
}

static unsigned loads(const reset_race *race)
{
    unsigned n = 0;

    for (unsigned i = 0; i < READERS; i++)
        n += race->loaded[i];
    return n;
}

/* As many as it takes for the readers to get their turn: on a busy machine that is more than VERSIONS. */
static void write_versions(engine *e, reset_race *race)
{
    uint8_t one[KVS_KEY_BYTES];
    kvs_status result;
    kvs_store_args a = {.ns = e->ns, .region = e->g, .n = 1, .keys = one, .slots = e->slots, .results = &result};

    key_put(one, 1);
    for (uint64_t v = 1; v <= VERSIONS || (loads(race) < LOADS && v <= MOST_VERSIONS); v++) {
        OK(kvs_reset(e->c, e->ns, 0, NULL, 0, &err));
        race->version = v;
        for (uint64_t i = 0; i < e->slot_bytes / 8; i++)
            memcpy(block(e, 0) + 8 * i, &v, 8);
        a.flags = v % 2 ? KVS_STORE_KEEP : 0;
        OK(kvs_store(&a, 0, &err));
        OK(kvs_slot_drop(e->g, e->slots, 1, NULL, NULL, 0, &err));
        OK(kvs_slot_take(e->g, 1, e->slots, 0, &err));
    }
}

/* Case 039.  Symptom: after a weight update the reset was answered, and old blocks were loaded still. */
Test(integrity, no_load_after_a_reset_brings_a_block_of_before)
{
    kvs_plane p;
    kvs_namespace n = plain(&p, 16, 2048);
    reset_race race = {.n = &n};
    kvs_region_info info;
    pthread_t t[READERS];
    reader r[READERS];
    engine e = {0};

    cr_assert(daemon_start(&d, NULL));
    engine_open(&e, &n, 8, 1);
    kvs_region_get(e.g, &info);
    memcpy(race.token, info.token, sizeof race.token);
    for (unsigned i = 0; i < READERS; i++) {
        r[i] = (reader){&race, i};
        cr_assert_eq(pthread_create(&t[i], NULL, read_on, &r[i]), 0);
    }
    write_versions(&e, &race);
    race.over = true;
    for (unsigned i = 0; i < READERS; i++) {
        (void)pthread_join(t[i], NULL);
        cr_assert_eq(race.failed[i], 0, "reader %u", i);
        cr_assert_eq(race.stale[i], 0, "reader %u had %u old blocks of %u", i, race.stale[i], race.loaded[i]);
        cr_assert_eq(race.torn[i], 0, "reader %u had %u mixed blocks of %u", i, race.torn[i], race.loaded[i]);
    }
    cr_assert_geq(loads(&race), LOADS);
    kvs_close(e.c);
}

/* ---- large requests ---- */

/* Symptom: one client's largest request stopped the loop, and everybody else waited. */
Test(integrity, requests_of_the_largest_size_hold_up_nobody)
{
    kvs_plane p;
    kvs_namespace n = plain(&p, 1, 1024);
    engine e = {0}, other = {0};
    kvs_server server;
    kvs_request *r[3];
    kvs_store_args a;
    kvs_load_args l;
    kvs_lease lease;
    uint32_t hits = 0;
    uint64_t began;

    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"8MiB\", \"extent_bytes\": \"1MiB\"}}"));
    engine_open(&e, &n, 2, 1);
    engine_open(&other, &n, 2, 1);
    kvs_server_get(e.c, &server);
    uint8_t *keys = malloc(((size_t)server.max_keys + 1) * KVS_KEY_BYTES);
    kvs_slot *slots = malloc((server.max_keys + 1) * sizeof *slots);
    kvs_status *results = malloc((server.max_keys + 1) * sizeof *results);
    kvs_load_result *loaded = malloc((server.max_keys + 1) * sizeof *loaded);
    cr_assert(keys && slots && results && loaded);
    for (uint32_t i = 0; i <= server.max_keys; i++) {
        key_put(keys + (size_t)i * KVS_KEY_BYTES, i);
        slots[i] = e.slots[0];
    }
    a = (kvs_store_args){
        .ns = e.ns, .region = e.g, .n = server.max_keys, .keys = keys, .slots = slots, .results = results};
    l = (kvs_load_args){.ns = e.ns, .region = e.g, .n = server.max_keys, .keys = keys, .results = loaded};
    kvs_reserve_args q = {.ns = &e.ns, .n_ns = 1, .n = server.max_keys, .keys = keys, .max_loads = 1};
    OK(kvs_submit_store(&a, &r[0], 0, &err));
    OK(kvs_submit_load(&l, &r[1], 0, &err));
    OK(kvs_submit_reserve(&q, &lease, &r[2], 0, &err));
    began = raw_now_ms();
    OK(kvs_ping(other.c, 0, &err));
    cr_assert_lt(raw_now_ms() - began, 1000);
    for (int i = 0; i < 3; i++) {
        OK(kvs_wait(r[i], 0, &err));
        (void)kvs_request_end(r[i], &err);
    }
    cr_assert_eq(results[0], KVS_OK);
    cr_assert_eq(results[server.max_keys - 1], KVS_E_NO_SPACE);
    OK(kvs_lookup(e.ns, keys, server.max_keys, &hits, NULL, 0, &err));
    cr_assert_eq(hits, 8 * 1024);
    a.n = server.max_keys + 1;
    cr_assert_neq(kvs_store(&a, 0, &err), KVS_OK);
    OK(kvs_ping(e.c, 0, &err)); /* refused, and nothing lost */
    cr_assert_eq(storm_number(&d, KVS_SECTION_FSCK, "ok"), 1);
    kvs_close(e.c);
    kvs_close(other.c);
    free(keys);
    free(slots);
    free(results);
    free(loaded);
}
