/* What being watched costs: times of LOAD and LOOKUP against a daemon that holds a million keys, without scrapes and with
 * ten a second, by turns, so that another load on the machine meets both.  The rise of the 99th percentile is the figure. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/thread.h"
#include "proto/client/kvstride.h"
#include "proto/ctl/clock.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/prom.h"

enum { KEYS = 1000000, BATCH = 4000, TURNS = 6, TURN_MS = 2500, MAX_SAMPLES = 2000000, ASKED = 8 };

typedef struct times {
    double *us;
    size_t n;
} times;

static daemon_fixture d;
static kvs_ns *ns;
static kvs_region *region;
static kvs_slot slots[BATCH];
static uint8_t keys[BATCH][32];
static atomic_bool watched, over;
static _Atomic uint64_t n_scrapes, scrape_us;

static void die(const char *what, const kvs_err *err)
{
    fprintf(stderr, "%s: %s\n", what, err->msg);
    daemon_fini(&d);
    exit(1);
}

static void name_keys(uint32_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = first + i;

        memset(keys[i], 1, 32);
        memcpy(keys[i], &id, sizeof id);
    }
}

static void fill(void)
{
    static kvs_status results[BATCH];
    kvs_store_args a = {.ns = ns, .region = region, .n = BATCH, .keys = keys[0], .slots = slots, .results = results};
    kvs_err err = {0};

    for (uint32_t i = 0; i < KEYS; i += BATCH) {
        name_keys(i, BATCH);
        if (kvs_store(&a, 0, &err) != KVS_OK)
            die("store", &err);
    }
}

static void open_all(void)
{
    static kvs_plane plane[1];
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    kvs_client *c;
    kvs_err err = {0};

    o.path = d.socket;
    if (kvs_connect(&c, &o, &err) != KVS_OK ||
        kvs_namespace_mla("bench", "", KVS_FORMAT_mla_bf16, 1, 1, plane, &desc, &err) != KVS_OK ||
        kvs_open(c, &desc, &ns, 0, &err) != KVS_OK || kvs_region_create(ns, 0, BATCH, &region, 0, &err) != KVS_OK ||
        kvs_slot_take(region, BATCH, slots, 0, &err) != KVS_OK)
        die("open", &err);
}

/* The daemon is ready with its first piece; the keys need all of them. */
static void await_pool(void)
{
    struct timespec step = {.tv_nsec = 20000000};
    double usable = 0, max = 1;

    while (usable < max) {
        prom p;

        if (!prom_scrape(&p, d.metrics))
            die("scrape", &(kvs_err){0});
        usable = prom_get(&p, "kvstride_pool_arena_bytes", NULL, NULL);
        max = prom_get(&p, "kvstride_pool_max_bytes", NULL, NULL);
        prom_free(&p);
        (void)nanosleep(&step, NULL);
    }
}

/* Ten scrapes a second while `watched`. */
static void *scrape(void *arg)
{
    (void)arg;
    while (!atomic_load(&over)) {
        struct timespec step = {.tv_nsec = 100000000};

        if (atomic_load(&watched)) {
            uint64_t began = thread_now_us();
            int code;

            free(http_get(d.metrics, "/metrics", &code));
            atomic_fetch_add(&scrape_us, thread_now_us() - began);
            atomic_fetch_add(&n_scrapes, 1);
        }
        (void)nanosleep(&step, NULL);
    }
    return NULL;
}

static void turn(times load[2], times look[2], int with)
{
    uint64_t end = thread_now_us() + TURN_MS * 1000;
    kvs_load_result results[ASKED];
    kvs_load_args a = {.ns = ns, .region = region, .n = ASKED, .keys = keys[0], .slots = slots, .results = results};
    kvs_err err = {0};
    uint32_t hits;

    atomic_store(&watched, with != 0);
    for (uint32_t i = 0; thread_now_us() < end && load[with].n < MAX_SAMPLES; i++) {
        uint64_t began = thread_now_ns(), between;

        name_keys(i * 7919 % (KEYS - ASKED), ASKED);
        if (kvs_load(&a, 0, &err) != KVS_OK)
            die("load", &err);
        between = thread_now_ns();
        if (kvs_lookup(ns, keys[0], ASKED, &hits, NULL, 0, &err) != KVS_OK || hits != ASKED)
            die("lookup", &err);
        load[with].us[load[with].n++] = (double)(between - began) / 1e3;
        look[with].us[look[with].n++] = (double)(thread_now_ns() - between) / 1e3;
    }
    atomic_store(&watched, false);
}

static double report(const char *what, times t[2])
{
    double p[2][3];

    for (int w = 0; w < 2; w++) {
        p[w][0] = clock_percentile(t[w].us, t[w].n, 50);
        p[w][1] = clock_percentile(t[w].us, t[w].n, 99);
        p[w][2] = clock_percentile(t[w].us, t[w].n, 99.9);
        printf("  %-6s %-16s %8zu times  p50 %7.1f us  p99 %7.1f us  p99.9 %7.1f us\n", what,
               w == 0 ? "unwatched" : "10 scrapes a s", t[w].n, p[w][0], p[w][1], p[w][2]);
    }
    printf("  %-6s p99 rises by %.3f ms\n", what, (p[1][1] - p[0][1]) / 1e3);
    return p[1][1] - p[0][1];
}

int main(void)
{
    times load[2] = {{0}}, look[2] = {{0}};
    pthread_t t;
    double rise;
    prom p;

    daemon_init(&d);
    for (int w = 0; w < 2; w++) {
        load[w].us = malloc(MAX_SAMPLES * sizeof(double));
        look[w].us = malloc(MAX_SAMPLES * sizeof(double));
        if (load[w].us == NULL || look[w].us == NULL)
            return 1;
    }
    if (!daemon_start(&d, "{\"pool\": {\"max_bytes\": \"1280MiB\"}, \"device\": {\"kind\": \"cpu\"}}")) {
        fprintf(stderr, "the daemon does not start\n");
        return 1;
    }
    await_pool();
    open_all();
    fill();
    if (pthread_create(&t, NULL, scrape, NULL) != 0)
        return 1;
    for (int i = 0; i < TURNS; i++)
        turn(load, look, i % 2);
    atomic_store(&over, true);
    (void)pthread_join(t, NULL);
    printf("scrapes of a daemon that holds %d keys\n", KEYS);
    rise = report("load", load);
    (void)report("lookup", look);
    if (prom_scrape(&p, d.metrics))
        printf("  a scrape takes %.2f ms, the loop %.1f us of it; %zu series, %zu bytes, %.0f blocks resident\n",
               (double)scrape_us / 1e3 / (double)(n_scrapes > 0 ? n_scrapes : 1),
               prom_get(&p, "kvstride_snapshot_seconds_total", NULL, NULL) * 1e6 /
                   prom_get(&p, "kvstride_snapshots_total", NULL, NULL),
               p.n, p.bytes, prom_get(&p, "kvstride_resident_blocks", NULL, NULL));
    daemon_fini(&d);
    return rise < 1000 ? 0 : 1;
}
