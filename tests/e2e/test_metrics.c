/* What the real daemon says of itself: exact counts, sums that agree, bounded series, and no wrong word at any time. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/client/kvstride.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/prom.h"
#include "tests/support/raw_client.h"

enum { TOKENS = 4, LAYERS = 2, SLOTS = 16, BLOCK_BYTES = LAYERS * TOKENS * 1152, MAX_BLOCKS = 64 };

static const char CONFIG[] = "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"device\": {\"kind\": \"cpu\"},"
                             " \"limits\": {\"out_high_bytes\": \"16MiB\"}}"; /* reads on from who does not */
static daemon_fixture d;
static kvs_err err;

#define OK(call) cr_assert_eq((call), KVS_OK, "%s: %s", #call, err.msg)

typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region;
    kvs_slot slots[SLOTS];
} engine;

static void engine_open_at(engine *e, const char *path, const char *name, const char *model)
{
    static kvs_plane planes[LAYERS];
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;

    o.path = path;
    o.name = name;
    o.timeout_ms = 20000;
    OK(kvs_connect(&e->c, &o, &err));
    OK(kvs_namespace_mla(model, "r", KVS_FORMAT_mla_bf16, LAYERS, TOKENS, planes, &desc, &err));
    OK(kvs_open(e->c, &desc, &e->ns, 0, &err));
    OK(kvs_region_create(e->ns, 0, SLOTS, &e->region, 0, &err));
    OK(kvs_slot_take(e->region, SLOTS, e->slots, 0, &err));
}

static void engine_open(engine *e, const char *name, const char *model)
{
    engine_open_at(e, d.socket, name, model);
}

/* Key i of a test. */
static const uint8_t *keys_from(uint32_t i, uint32_t n)
{
    static uint8_t keys[MAX_BLOCKS][32];

    for (uint32_t k = 0; k < n; k++) {
        memset(keys[k], 7, 32);
        keys[k][0] = (uint8_t)(i + k);
        keys[k][1] = (uint8_t)((i + k) >> 8);
    }
    return keys[0];
}

static kvs_status store_in(const engine *e, kvs_region *region, const kvs_slot *slots, uint32_t first, uint32_t n)
{
    kvs_status results[MAX_BLOCKS];
    kvs_store_args a = {
        .ns = e->ns, .region = region, .n = n, .keys = keys_from(first, n), .slots = slots, .results = results};

    return kvs_store(&a, 0, &err);
}

static kvs_status load_in(const engine *e, kvs_region *region, const kvs_slot *slots, uint32_t first, uint32_t n)
{
    kvs_load_result results[MAX_BLOCKS];
    kvs_load_args a = {
        .ns = e->ns, .region = region, .n = n, .keys = keys_from(first, n), .slots = slots, .results = results};

    return kvs_load(&a, 0, &err);
}

static uint32_t lookup(const engine *e, uint32_t first, uint32_t n)
{
    uint32_t hits = 0;

    OK(kvs_lookup(e->ns, keys_from(first, n), n, &hits, NULL, 0, &err));
    return hits;
}

/* A scrape that must be right in itself, whatever else goes on. */
static prom scrape(void)
{
    static const char *const RULES[] = {"arena",   "layouts",  "resident", "lookups",
                                        "tenants", "requests", "replies",  "latency"};
    static const char *const STATES[] = {"free", "writing", "ready", "draining", "quarantined"};
    prom p;

    cr_assert(prom_scrape(&p, d.metrics), "%s", p.why);
    for (size_t i = 0; i < sizeof RULES / sizeof RULES[0]; i++) {
        char label[32];

        (void)snprintf(label, sizeof label, "rule=\"%s\"", RULES[i]);
        cr_assert_eq(prom_get(&p, "kvstride_conservation_error", label, NULL), 0, "%s", label);
    }
    /* The stated rules again, from the samples themselves. */
    cr_assert_eq(prom_get(&p, "kvstride_pool_bytes", NULL, NULL),
                 prom_get(&p, "kvstride_pool_arena_bytes", NULL, NULL));
    cr_assert_eq(prom_get(&p, "kvstride_lookup_keys_total", NULL, NULL),
                 prom_get(&p, "kvstride_lookup_hits_total", NULL, NULL) +
                     prom_get(&p, "kvstride_lookup_misses_total", NULL, NULL));
    cr_assert_eq(prom_get(&p, "kvstride_blocks_adopted_total", NULL, NULL) +
                     prom_get(&p, "kvstride_blocks_stored_total", NULL, NULL) -
                     prom_get(&p, "kvstride_blocks_removed_total", NULL, NULL),
                 prom_get(&p, "kvstride_resident_blocks", NULL, NULL));
    cr_assert_eq(prom_get(&p, "kvstride_tenant_resident_blocks", NULL, NULL),
                 prom_get(&p, "kvstride_resident_blocks", NULL, NULL));
    cr_assert_eq(prom_get(&p, "kvstride_requests_received_total", NULL, NULL),
                 prom_get(&p, "kvstride_requests_total", NULL, NULL) +
                     prom_get(&p, "kvstride_requests_in_flight", NULL, NULL));
    cr_assert_eq(prom_get(&p, "kvstride_request_duration_seconds_count", NULL, NULL),
                 prom_get(&p, "kvstride_requests_total", NULL, NULL));
    for (size_t i = 0; i < sizeof STATES / sizeof STATES[0]; i++) {
        char label[32];

        (void)snprintf(label, sizeof label, "state=\"%s\"", STATES[i]);
        if (prom_get(&p, "kvstride_layout_bytes", NULL, NULL) >= 0)
            cr_assert_eq(prom_get(&p, "kvstride_layout_bytes", label, NULL),
                         prom_get(&p, "kvstride_pool_bytes", label, NULL), "%s", label);
    }
    return p;
}

static void expect(const prom *p, const char *name, const char *label, const char *label2, double value)
{
    double is = prom_get(p, name, label, label2);

    cr_assert_eq(is, value, "%s{%s %s}: %f, not %f", name, label != NULL ? label : "", label2 != NULL ? label2 : "", is,
                 value);
}

static void begin(void)
{
    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
}

static void end(void)
{
    if (d.pid != 0)
        cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    cr_assert_eq(daemon_log_count(&d, "Sanitizer"), 0);
    daemon_fini(&d);
}

TestSuite(metrics, .init = begin, .fini = end);

/* ---- counts ---- */

Test(metrics, are_valid_at_the_start_and_all_zero)
{
    prom p = scrape();
    char *json;
    int code;

    expect(&p, "kvstride_ready", NULL, NULL, 1);
    expect(&p, "kvstride_health", "state=\"ok\"", NULL, 1);
    expect(&p, "kvstride_health", NULL, NULL, 1);
    expect(&p, "kvstride_requests_received_total", NULL, NULL, 0);
    expect(&p, "kvstride_transfer_bytes_total", NULL, NULL, 0);
    expect(&p, "kvstride_pool_arena_bytes", NULL, NULL, 16 << 20);
    expect(&p, "kvstride_pool_bytes", "state=\"unassigned\"", NULL, 16 << 20);
    expect(&p, "kvstride_build_info", "device=\"cpu\"", NULL, 1);
    cr_assert_gt(prom_get(&p, "kvstride_start_time_seconds", NULL, NULL), 1.6e9);
    prom_free(&p);
    json = http_get(d.metrics, "/metrics.json", &code);
    cr_assert_eq(code, 200);
    cr_assert_null(strstr(json, "null"));
    free(json);
}

Test(metrics, count_ten_stores_and_ten_loads_as_ten_and_ten_however_often_they_are_read)
{
    engine e;
    prom p;

    engine_open(&e, "ten", "m");
    for (uint32_t i = 0; i < 10; i++)
        OK(store_in(&e, e.region, e.slots, i, 1));
    for (uint32_t i = 0; i < 10; i++)
        OK(load_in(&e, e.region, e.slots, i, 1));
    for (int i = 0; i < 100; i++) {
        p = scrape();
        expect(&p, "kvstride_blocks_stored_total", NULL, NULL, 10);
        expect(&p, "kvstride_transfer_blocks_total", "direction=\"store\"", NULL, 10);
        expect(&p, "kvstride_transfer_blocks_total", "direction=\"load\"", NULL, 10);
        expect(&p, "kvstride_transfer_bytes_total", "direction=\"store\"", NULL, 10 * BLOCK_BYTES);
        expect(&p, "kvstride_transfer_bytes_total", "direction=\"load\"", NULL, 10 * BLOCK_BYTES);
        expect(&p, "kvstride_requests_total", "op=\"STORE\"", "status=\"OK\"", 10);
        expect(&p, "kvstride_requests_total", "op=\"LOAD\"", "status=\"OK\"", 10);
        expect(&p, "kvstride_request_duration_seconds_count", "class=\"load\"", NULL, 10);
        expect(&p, "kvstride_request_duration_seconds_count", "class=\"store\"", NULL, 10);
        expect(&p, "kvstride_requests_in_flight", NULL, NULL, 0);
        expect(&p, "kvstride_clients", "socket=\"client\"", NULL, 1);
        prom_free(&p);
    }
    kvs_close(e.c);
}

Test(metrics, count_each_direction_and_path_as_it_was_sent)
{
    static const char *const PATHS[] = {"path=\"daemon_region\"", "path=\"engine_blocks\"", "path=\"engine_pages\""};
    const uint64_t page = TOKENS * 1152;
    kvs_plane_map whole[] = {{0}}, maps[LAYERS] = {{0}};
    kvs_slot slots[SLOTS];
    kvs_region *regions[3];
    engine e;
    prom p;
    int fd[2];

    engine_open(&e, "paths", "m");
    for (uint32_t i = 0; i < SLOTS; i++)
        slots[i] = (kvs_slot){.slot = i};
    OK(kvs_memfd_create("blocks", SLOTS * BLOCK_BYTES, &fd[0], &err));
    OK(kvs_memfd_create("pages", SLOTS * BLOCK_BYTES, &fd[1], &err));
    whole[0].stride = BLOCK_BYTES;
    for (uint32_t i = 0; i < LAYERS; i++) {
        maps[i].stride = page;
        maps[i].base = i * SLOTS * page;
    }
    regions[0] = e.region;
    OK(kvs_region_import(e.ns, &(kvs_import){.n_slots = SLOTS, .n_fds = 1, .fds = &fd[0], .n_maps = 1, .maps = whole},
                         &regions[1], 0, &err));
    OK(kvs_region_import(e.ns,
                         &(kvs_import){.n_slots = SLOTS, .n_fds = 1, .fds = &fd[1], .n_maps = LAYERS, .maps = maps},
                         &regions[2], 0, &err));
    for (uint32_t i = 0; i < 3; i++) { /* in one batch of 4, and one by one */
        const kvs_slot *at = i == 0 ? e.slots : slots;

        OK(store_in(&e, regions[i], at, 100 * i, 4));
        for (uint32_t k = 4; k < 7; k++)
            OK(store_in(&e, regions[i], at + k, 100 * i + k, 1));
        OK(load_in(&e, regions[i], at, 100 * i, 3));
        for (uint32_t k = 3; k < 5; k++)
            OK(load_in(&e, regions[i], at + k, 100 * i + k, 1));
    }
    p = scrape();
    for (uint32_t i = 0; i < 3; i++) {
        expect(&p, "kvstride_transfer_blocks_total", "direction=\"store\"", PATHS[i], 7);
        expect(&p, "kvstride_transfer_bytes_total", "direction=\"store\"", PATHS[i], 7 * BLOCK_BYTES);
        expect(&p, "kvstride_transfer_blocks_total", "direction=\"load\"", PATHS[i], 5);
        expect(&p, "kvstride_transfer_bytes_total", "direction=\"load\"", PATHS[i], 5 * BLOCK_BYTES);
    }
    cr_assert_gt(prom_get(&p, "kvstride_transfer_seconds_total", NULL, NULL), 0);
    expect(&p, "kvstride_regions", NULL, NULL, 3);
    expect(&p, "kvstride_import_bytes", NULL, NULL, 2 * SLOTS * BLOCK_BYTES);
    prom_free(&p);
    kvs_close(e.c);
    (void)close(fd[0]);
    (void)close(fd[1]);
}

Test(metrics, tell_hits_misses_leases_pins_and_what_went_why)
{
    kvs_lease lease;
    kvs_status one;
    engine e;
    prom p;

    engine_open(&e, "books", "m");
    OK(store_in(&e, e.region, e.slots, 0, 12));
    cr_assert_eq(lookup(&e, 0, 20), 12);
    cr_assert_eq(lookup(&e, 300, 5), 0);
    (void)store_in(&e, e.region, e.slots, 0, 3); /* there already */
    OK(kvs_pin(e.ns, keys_from(0, 2), 2, NULL, 0, &err));
    OK(kvs_reserve(
        &(kvs_reserve_args){.ns = &e.ns, .n_ns = 1, .n = 4, .keys = keys_from(0, 4), .max_loads = 1, .ttl_ms = 60000},
        &lease, 0, &err));
    p = scrape();
    expect(&p, "kvstride_lookup_keys_total", NULL, NULL, 25);
    expect(&p, "kvstride_lookup_hits_total", "tenant=\"default\"", NULL, 12);
    expect(&p, "kvstride_lookup_misses_total", "tenant=\"default\"", NULL, 13);
    expect(&p, "kvstride_blocks_exists_total", NULL, NULL, 3);
    expect(&p, "kvstride_pinned_blocks", NULL, NULL, 2);
    expect(&p, "kvstride_pinned_bytes", NULL, NULL, 2 * BLOCK_BYTES);
    expect(&p, "kvstride_leases", NULL, NULL, 1);
    expect(&p, "kvstride_leased_bytes", NULL, NULL, 4 * BLOCK_BYTES);
    cr_assert_gt(prom_get(&p, "kvstride_lease_oldest_seconds", NULL, NULL), 0);
    prom_free(&p);
    OK(kvs_release(e.c, &lease, 0, &err));
    OK(kvs_drop(e.ns, keys_from(5, 1), 1, &one, 0, &err));
    /* 16 MiB hold 1,820 blocks at most: store more, and the coldest go. */
    for (uint32_t i = 0; i < 2000; i += SLOTS)
        (void)store_in(&e, e.region, e.slots, 1000 + i, SLOTS);
    p = scrape();
    expect(&p, "kvstride_leases", NULL, NULL, 0);
    expect(&p, "kvstride_lease_oldest_seconds", NULL, NULL, 0);
    expect(&p, "kvstride_blocks_removed_total", "cause=\"dropped\"", NULL, 1);
    cr_assert_gt(prom_get(&p, "kvstride_blocks_removed_total", "cause=\"evicted\"", NULL), 100);
    expect(&p, "kvstride_blocks_stored_total", NULL, NULL, 2012);
    prom_free(&p);
    kvs_close(e.c);
}

Test(metrics, stay_valid_after_errors_and_count_them)
{
    static const char GARBAGE[] = "GET / HTTP/1.1\r\nHost: this is no frame\r\n\r\n";
    raw_client bad;
    engine e;
    prom p;

    engine_open(&e, "errors", "m");
    cr_assert_neq(load_in(&e, e.region, e.slots, 500, 2), KVS_OK); /* not there: E_PARTIAL */
    cr_assert_neq(store_in(&e, e.region, &(kvs_slot){.slot = 9999}, 1, 1), KVS_OK);
    for (int i = 0; i < 3; i++) {
        cr_assert(raw_connect(&bad, d.socket));
        cr_assert(raw_write(&bad, GARBAGE, sizeof GARBAGE - 1, NULL, 0));
        cr_assert(raw_wait_end(&bad, 5000));
        raw_close(&bad);
    }
    cr_assert(raw_connect(&bad, d.socket));
    cr_assert(raw_hello(&bad));
    cr_assert(raw_send(&bad, 999, 1, NULL, 0, NULL, 0)); /* no op of this daemon */
    cr_assert(raw_recv(&bad, &(frame){0}, 5000));
    raw_close(&bad);
    p = scrape();
    expect(&p, "kvstride_requests_total", "op=\"LOAD\"", "status=\"E_PARTIAL\"", 1);
    expect(&p, "kvstride_requests_total", "op=\"STORE\"", "status=\"E_RANGE\"", 1);
    expect(&p, "kvstride_requests_total", "op=\"other\"", "status=\"E_UNSUPPORTED\"", 1);
    expect(&p, "kvstride_clients_dropped_total", "reason=\"protocol\"", NULL, 3);
    expect(&p, "kvstride_clients_accepted_total", "socket=\"client\"", NULL, 5);
    expect(&p, "kvstride_transfer_failed_jobs_total", NULL, NULL, 0);
    cr_assert_geq(prom_get(&p, "kvstride_log_lines_total", "level=\"warn\"", NULL), 3);
    prom_free(&p);
    kvs_close(e.c);
}

Test(metrics, count_reloads_by_their_result)
{
    prom p;

    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_log(&d, "info reloaded", 1, 5000));
    daemon_configure(&d, "{\"pool\": {\"max_bytes\": 17}}");
    (void)kill(d.pid, SIGHUP);
    cr_assert(daemon_wait_log(&d, "reload_refused", 1, 5000));
    p = scrape();
    expect(&p, "kvstride_reloads_total", "result=\"applied\"", NULL, 1);
    expect(&p, "kvstride_reloads_total", "result=\"refused\"", NULL, 1);
    prom_free(&p);
}

/* Says HELLO and PING, takes whatever comes, and leaves. */
static void short_client(const char *name)
{
    uint8_t hello[WIRE_hello_req_BYTES + 64] = {0};
    wire_out o = {hello, 0, sizeof hello, false};
    uint32_t n = (uint32_t)strlen(name);
    raw_client c;

    wire_put_hello_req(&o, &(wire_hello_req){.version_min = 1, .version_max = 1, .name_len = n});
    wire_put_bytes(&o, name, n);
    wire_put_pad8(&o);
    cr_assert(raw_connect(&c, d.socket));
    cr_assert(raw_send(&c, WIRE_HELLO, 1, hello, (uint32_t)o.len, NULL, 0));
    cr_assert(raw_send(&c, WIRE_PING, 2, NULL, 0, NULL, 0));
    for (int k = 0; k < 2; k++) {
        frame f;

        cr_assert(raw_recv(&c, &f, 10000));
        for (uint32_t j = 0; j < f.head.n_fds; j++)
            (void)close(f.fds[j]);
    }
    raw_close(&c);
}

static void numbered_client(uint32_t i)
{
    char name[32];

    (void)snprintf(name, sizeof name, "client %u", i);
    short_client(name);
}

Test(metrics, are_readable_whatever_clients_call_themselves_and_their_models)
{
    static const char *const NAMES[] = {"a\"b", "a\\b", "{", "}", "\xF0\x9F\x98\x80", "#", "kvstride_x 1"};
    engine e[sizeof NAMES / sizeof NAMES[0]];
    prom p, before = scrape();

    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        engine_open(&e[i], NAMES[i], NAMES[i]);
        OK(store_in(&e[i], e[i].region, e[i].slots, 0, 2));
    }
    short_client("a\nb\x01\xFF"); /* which the library would not even send */
    p = scrape();
    expect(&p, "kvstride_namespaces", NULL, NULL, sizeof NAMES / sizeof NAMES[0]);
    expect(&p, "kvstride_blocks_stored_total", NULL, NULL, 2 * sizeof NAMES / sizeof NAMES[0]);
    /* Ten of one layout's two families, two of the refused HELLO and PING, and no label that a client chose. */
    cr_assert_eq(p.n, before.n + 12, "%zu series, %zu before", p.n, before.n);
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++)
        kvs_close(e[i].c);
    prom_free(&before);
    prom_free(&p);
}

Test(metrics, are_kept_for_each_tenant_and_add_up_to_all)
{
    char config[512], blue[96];
    engine mine, theirs;
    prom p;

    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    (void)snprintf(blue, sizeof blue, "%s/blue.sock", d.dir);
    (void)snprintf(config, sizeof config,
                   "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"tenants\": [{\"name\": \"blue\", \"path\": \"%s\", "
                   "\"quota_bytes\": %d}]}",
                   blue, 5 * BLOCK_BYTES);
    cr_assert(daemon_start(&d, config));
    engine_open(&mine, "default's", "m");
    engine_open_at(&theirs, blue, "blue's", "m");
    OK(store_in(&mine, mine.region, mine.slots, 0, 8));
    for (uint32_t i = 0; i < 8; i++)
        (void)store_in(&theirs, theirs.region, theirs.slots, i, 1);
    cr_assert_eq(lookup(&mine, 0, 10), 8);
    p = scrape();
    expect(&p, "kvstride_tenant_resident_blocks", "tenant=\"default\"", NULL, 8);
    expect(&p, "kvstride_tenant_resident_blocks", "tenant=\"blue\"", NULL, 5);
    expect(&p, "kvstride_tenant_used_bytes", "tenant=\"blue\"", NULL, 5 * BLOCK_BYTES);
    expect(&p, "kvstride_tenant_quota_bytes", "tenant=\"blue\"", NULL, 5 * BLOCK_BYTES);
    expect(&p, "kvstride_tenant_quota_bytes", "tenant=\"default\"", NULL, 0);
    expect(&p, "kvstride_tenant_clients", "tenant=\"blue\"", NULL, 1);
    expect(&p, "kvstride_blocks_stored_total", "tenant=\"blue\"", NULL, 8);
    expect(&p, "kvstride_blocks_removed_total", "tenant=\"blue\"", "cause=\"evicted\"", 3);
    expect(&p, "kvstride_blocks_removed_total", "tenant=\"default\"", NULL, 0);
    expect(&p, "kvstride_lookup_hits_total", "tenant=\"default\"", NULL, 8);
    expect(&p, "kvstride_lookup_hits_total", "tenant=\"blue\"", NULL, 0);
    prom_free(&p);
    kvs_close(mine.c);
    kvs_close(theirs.c);
}

Test(metrics, add_up_over_a_restart_that_keeps_the_blocks)
{
    char config[256], kept[64] = "/dev/shm/kvs-metrics-XXXXXX", command[128];
    engine e;
    prom p;

    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    cr_assert_not_null(mkdtemp(kept));
    (void)snprintf(config, sizeof config, "{\"pool\": {\"max_bytes\": \"16MiB\", \"path\": \"%s\"}}", kept);
    cr_assert(daemon_start(&d, config));
    engine_open(&e, "before", "m");
    OK(store_in(&e, e.region, e.slots, 0, 10));
    kvs_close(e.c);
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    cr_assert(daemon_start(&d, config));
    p = scrape();
    expect(&p, "kvstride_blocks_adopted_total", "tenant=\"default\"", NULL, 10);
    expect(&p, "kvstride_blocks_stored_total", NULL, NULL, 0);
    expect(&p, "kvstride_unverified_blocks", NULL, NULL, 10);
    prom_free(&p);
    engine_open(&e, "after", "m");
    OK(load_in(&e, e.region, e.slots, 0, 4));
    OK(store_in(&e, e.region, e.slots, 20, 3));
    p = scrape();
    expect(&p, "kvstride_resident_blocks", NULL, NULL, 13);
    expect(&p, "kvstride_unverified_blocks", NULL, NULL, 6);
    prom_free(&p);
    kvs_close(e.c);
    (void)snprintf(command, sizeof command, "rm -r %s", kept);
    cr_assert_eq(system(command), 0);
}

/* ---- bounds ---- */

Test(metrics, stay_small_after_5000_clients_and_keep_what_those_did)
{
    enum { CLIENTS = 5000 };
    prom p, before;
    uint64_t kib;
    engine e;

    engine_open(&e, "one that leaves", "m");
    OK(store_in(&e, e.region, e.slots, 0, 5));
    OK(load_in(&e, e.region, e.slots, 0, 5));
    kvs_close(e.c);
    for (uint32_t i = 0; i < 200; i++)
        numbered_client(i);
    before = scrape();
    kib = daemon_private_kib(&d);
    cr_assert_gt(kib, 0);
    for (uint32_t i = 200; i < CLIENTS; i++)
        numbered_client(i);
    p = scrape();
    expect(&p, "kvstride_clients_accepted_total", "socket=\"client\"", NULL, CLIENTS + 1);
    expect(&p, "kvstride_requests_total", "op=\"HELLO\"", "status=\"OK\"", CLIENTS + 1);
    expect(&p, "kvstride_requests_total", "op=\"PING\"", "status=\"OK\"", CLIENTS);
    expect(&p, "kvstride_transfer_blocks_total", "direction=\"store\"", NULL, 5);
    expect(&p, "kvstride_transfer_blocks_total", "direction=\"load\"", NULL, 5);
    cr_assert_eq(p.n, before.n, "%zu series became %zu", before.n, p.n);
    cr_assert_lt(p.bytes, before.bytes + 200, "%zu bytes became %zu", before.bytes, p.bytes);
#ifndef __SANITIZE_ADDRESS__ /* which keeps what was freed for a while */
    cr_assert_lt(daemon_private_kib(&d), kib + 2048, "%llu KiB became %llu", (unsigned long long)kib,
                 (unsigned long long)daemon_private_kib(&d));
#endif
    prom_free(&before);
    prom_free(&p);
}

/* ---- under load ---- */

static atomic_bool enough;

static void *work_on(void *arg)
{
    engine e;
    unsigned *n = arg;

    engine_open(&e, "busy", "m");
    while (!atomic_load(&enough)) {
        (void)store_in(&e, e.region, e.slots, 40 + *n % 8 * 4, 4);
        (void)load_in(&e, e.region, e.slots, 40 + *n % 8 * 4, 4);
        (void)kvs_drop(e.ns, keys_from(40 + *n % 8 * 4, 1), 1, (kvs_status[1]){0}, 0, &err);
        ++*n;
    }
    kvs_close(e.c);
    return NULL;
}

Test(metrics, agree_with_each_other_at_any_moment_under_load)
{
    pthread_t t;
    unsigned rounds = 0;

    atomic_store(&enough, false);
    cr_assert_eq(pthread_create(&t, NULL, work_on, &rounds), 0);
    for (int i = 0; i < 200; i++) {
        prom p = scrape();

        prom_free(&p);
    }
    atomic_store(&enough, true);
    (void)pthread_join(t, NULL);
    cr_assert_gt(rounds, 0);
}

/* ---- health and readiness ---- */

Test(metrics, say_not_ready_and_healthy_while_the_daemon_drains)
{
    static const uint8_t BODY[64];
    raw_client deaf;
    char *text;
    int code;

    /* More replies than the kernel holds for one who does not read: the drain waits for them. */
    cr_assert(raw_connect(&deaf, d.socket));
    cr_assert(raw_hello(&deaf));
    for (uint64_t i = 0; i < 6000; i++)
        cr_assert(raw_send(&deaf, WIRE_PING, 10 + i, BODY, sizeof BODY, NULL, 0));
    (void)kill(d.pid, SIGTERM);
    cr_assert(daemon_wait_log(&d, "info draining", 1, 5000));
    text = http_get(d.metrics, "/readyz", &code);
    cr_assert_not_null(text);
    cr_assert_eq(code, 503, "%s", text);
    cr_assert_not_null(strstr(text, "draining"));
    free(text);
    text = http_get(d.metrics, "/healthz", &code);
    cr_assert_eq(code, 200, "%s", text);
    free(text);
    raw_close(&deaf);
    cr_assert_eq(daemon_wait(&d, 10000), 0);
    cr_assert_neq(access(d.metrics, F_OK), 0, "the socket's file is left");
}

/* Symptom: /readyz said "ready" while every client was answered that the operator had drained the daemon. */
Test(metrics, say_not_ready_while_the_operator_has_drained_the_daemon)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *admin = NULL;
    char *text;
    int code;

    o.path = d.admin;
    cr_assert_eq(kvs_connect(&admin, &o, NULL), KVS_OK);
    for (int on = 1; on >= 0; on--) {
        cr_assert_eq(kvs_drain(admin, on == 1, 0, NULL), KVS_OK);
        text = http_get(d.metrics, "/readyz", &code);
        cr_assert_eq(code, on ? 503 : 200, "%s", text);
        cr_assert_not_null(strstr(text, on ? "draining" : "ready"));
        free(text);
        text = http_get(d.metrics, "/metrics", &code);
        cr_assert_not_null(strstr(text, on ? "\nkvstride_ready 0\n" : "\nkvstride_ready 1\n"));
        free(text);
        text = http_get(d.metrics, "/healthz", &code);
        cr_assert_eq(code, 200, "%s", text);
        free(text);
    }
    kvs_close(admin);
}

Test(metrics, leave_the_daemon_serving_where_their_socket_cannot_be_made)
{
    char set[160], where[160];

    (void)snprintf(where, sizeof where, " metrics=%s metrics_port=-\n", d.metrics);
    cr_assert(daemon_wait_log(&d, where, 1, 5000), "where they are, when it is ready");
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    (void)snprintf(set, sizeof set, "metrics.path=%s/none/m.sock", d.dir);
    daemon_spawn(&d, (const char *[]){"--set", set, NULL});
    cr_assert(daemon_wait_notified(&d, "READY=1", 20000));
    cr_assert_eq(daemon_log_count(&d, "warn no_metrics"), 1);
    cr_assert(daemon_wait_log(&d, " metrics=- metrics_port=-\n", 1, 5000));
}

/* Symptom: a port that another program had turned off the UNIX socket too. */
Test(metrics, are_at_their_socket_where_their_port_is_taken_and_at_the_port_once_it_is_free)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), code;
    char set[64], says[256], *text;
    socklen_t len = sizeof a;

    cr_assert(bind(fd, (const struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 1) == 0);
    cr_assert_eq(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    (void)snprintf(set, sizeof set, "metrics.port=%u", ntohs(a.sin_port));
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    daemon_spawn(&d, (const char *[]){"--set", set, NULL});
    cr_assert(daemon_wait_notified(&d, "READY=1", 20000));
    text = http_get(d.metrics, "/readyz", &code);
    cr_assert_not_null(text);
    cr_assert_eq(code, 200, "%s", text);
    free(text);
    (void)snprintf(says, sizeof says,
                   "warn no_metrics_port status=E_BUSY msg=\"metrics.port: 127.0.0.1:%u: Address already in use\" "
                   "hint=\"the UNIX socket serves them all the same\"\n",
                   ntohs(a.sin_port));
    cr_assert_eq(daemon_log_count(&d, says), 1);
    cr_assert_eq(daemon_log_count(&d, "warn no_metrics "), 0);
    (void)snprintf(says, sizeof says, " metrics=%s metrics_port=-\n", d.metrics);
    cr_assert(daemon_wait_log(&d, says, 2, 5000), "with the daemon of before");
    (void)close(fd);
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    daemon_spawn(&d, (const char *[]){"--set", set, NULL});
    cr_assert(daemon_wait_notified(&d, "READY=1", 20000));
    (void)snprintf(says, sizeof says, " metrics=%s metrics_port=%u\n", d.metrics, ntohs(a.sin_port));
    cr_assert(daemon_wait_log(&d, says, 1, 5000));
}

Test(metrics, cost_an_idle_daemon_next_to_nothing)
{
    uint64_t sleeps = daemon_sleeps(&d), began = raw_now_ms();

    while (raw_now_ms() - began < 2000)
        (void)usleep(100000); /* idleness is what is measured */
    cr_assert_leq(daemon_sleeps(&d) - sleeps, 4, "it woke up %llu times in 2 s",
                  (unsigned long long)(daemon_sleeps(&d) - sleeps));
}

/* ---- others who read it ---- */

/* Debian's python3-prometheus-client, where it is installed. */
Test(metrics, are_read_by_a_standard_parser)
{
    static const char PROGRAM[] =
        "import sys\nfrom prometheus_client.parser import text_string_to_metric_families as parse\n"
        "text = sys.stdin.read()\nn = 0\n"
        "for f in parse(text):\n"
        "    assert f.type in ('counter', 'gauge', 'histogram'), f\n"
        "    n += len(f.samples)\n"
        "assert n == sum(1 for l in text.splitlines() if not l.startswith('#')), n\nprint(n)\n";
    static const char *const PYTHONS[] = {"python3", "/usr/bin/python3"};
    char command[256], path[96];
    bool found = false;
    engine e;

    engine_open(&e, "a\"b\\c", "m");
    OK(store_in(&e, e.region, e.slots, 0, 3));
    (void)load_in(&e, e.region, e.slots, 1, 5);
    (void)snprintf(path, sizeof path, "%s/parse.py", d.dir);
    {
        FILE *f = fopen(path, "w");

        cr_assert_not_null(f);
        (void)fputs(PROGRAM, f);
        (void)fclose(f);
    }
    for (size_t i = 0; i < 2 && !found; i++) {
        char *text;
        int code;
        FILE *to;

        (void)snprintf(command, sizeof command, "%s -c 'import prometheus_client' 2>/dev/null", PYTHONS[i]);
        if (system(command) != 0)
            continue;
        found = true;
        text = http_get(d.metrics, "/metrics", &code);
        cr_assert_not_null(text);
        (void)snprintf(command, sizeof command, "%s %s >/dev/null", PYTHONS[i], path);
        to = popen(command, "w");
        cr_assert_not_null(to);
        (void)fputs(text, to);
        cr_assert_eq(pclose(to), 0, "the parser refuses it");
        free(text);
    }
    kvs_close(e.c);
    if (!found)
        cr_skip_test("python3-prometheus-client is not installed");
}

/* kvstridectl, beside the daemon. */
static int run_ctl(const char *args, char *out, size_t cap)
{
    char command[512];
    size_t n;
    FILE *f;
    int status;

    (void)snprintf(command, sizeof command, "%s/kvstridectl stats %s 2>&1",
                   getenv("KVS_BUILD") != NULL ? getenv("KVS_BUILD") : "build/release", args);
    f = popen(command, "r");
    cr_assert_not_null(f);
    n = fread(out, 1, cap - 1, f);
    out[n] = '\0';
    while (fgetc(f) != EOF)
        ;
    status = pclose(f);
    return WEXITSTATUS(status);
}

Test(metrics, are_shown_by_kvstridectl_stats_with_exit_codes_that_tell)
{
    char args[256], *out = malloc(1 << 20);
    engine e;

    engine_open(&e, "shown", "m");
    OK(store_in(&e, e.region, e.slots, 0, 10));
    cr_assert_eq(lookup(&e, 0, 20), 10);
    (void)snprintf(args, sizeof args, "--socket %s", d.admin);
    cr_assert_eq(run_ctl(args, out, 1 << 20), 0, "%s", out);
    cr_assert_not_null(strstr(out, "10 resident; 10 stored"), "%s", out);
    cr_assert_not_null(strstr(out, "20 keys, 10 hits (50.0 %)"), "%s", out);
    (void)snprintf(args, sizeof args, "--socket %s --json", d.admin);
    cr_assert_eq(run_ctl(args, out, 1 << 20), 0);
    cr_assert_eq(strncmp(out, "{\"families\":[", 13), 0, "%.80s", out);
    (void)snprintf(args, sizeof args, "--socket %s --interval 1 --seconds 1", d.admin);
    cr_assert_eq(run_ctl(args, out, 1 << 20), 0);
    cr_assert_not_null(strstr(out, "requests/s"), "%s", out);
    (void)snprintf(args, sizeof args, "--socket %s", d.socket);
    cr_assert_eq(run_ctl(args, out, 1 << 20), 4, "refused on the clients' socket: %s", out);
    (void)snprintf(args, sizeof args, "--socket %s/nobody", d.dir);
    cr_assert_eq(run_ctl(args, out, 1 << 20), 3, "nobody is there: %s", out);
    cr_assert_eq(run_ctl("--interval 0", out, 1 << 20), 2);
    free(out);
    kvs_close(e.c);
}
