/* kvstridectl bench: every figure beside a plain one of the same run, as a ratio.  Both are taken in turn, round
 * after round, and the median of the rounds' ratios counts: other load on the machine meets both alike.
 *
 *   GPU      where there is one: blocks through the socket  /  raw copies of pinned memory, see bench_gpu.h; engines
 *            beside them, see bench_side.h
 *   copy     STORE and LOAD of whole blocks  /  memcpy of the same blocks on one thread, in turn
 *   trip     PING through libkvstride        /  a bare epoll echo, in turn
 *   lookup   LOOKUP of 1,000 random keys of a million resident  /  that echo; and the tails of both under a store flood
 *   memory   bookkeeping bytes a slot
 *   idle     wake-ups a second of a daemon that nobody talks to
 *
 * Private daemons, gone afterwards.  The targets are those of the project; a figure that misses one says so. */
#include "proto/ctl/ctl.h"

#include <dirent.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/json.h"
#include "proto/ctl/bench_busy.h"
#include "proto/ctl/bench_gpu.h"
#include "proto/ctl/bench_list.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/echo.h"
#include "proto/ctl/pattern.h"
#include "proto/ctl/private.h"
#include "proto/ctl/progress.h"
#include "proto/ctl/replay.h"
#include "proto/text.h"

enum {
    COPY_BLOCKS = 32,
    COPY_ROUNDS = 21,
    MAX_ROUNDS = 64,
    TRIP_ROUNDS = 60,
    TRIPS = 100,
    RESIDENT = 1000000,
    FILL_KEYS = 8000,
    LOOKUP_KEYS = 1000,
    LOOKUPS = 2000,
    TAIL_SAMPLES = 10000,
    TAIL_ROUND = 2000, /* samples */
    TURN = 20,         /* samples of one kind between those of the other */
    SETTLE_US = 1000,
    FLOODERS = 2,
    FLOOD_BLOCKS = 8,
    IDLE_SECONDS = 8,
    CALL_MS = 60000,
};

typedef struct bench {
    const ctl *c;
    bench_list *list;
    cpu_set_t cpus; /* where this process may run */
    kvs_err err;
} bench;

/* The ratio is of the same percentile of both, round by round, and of all rounds the median: a neighbour that wakes up
 * for one of them does not decide.  Sorts the samples within their rounds, then altogether. */
static void add_latency(bench *b, const char *name, double *us, double *plain, size_t n, size_t per_round,
                        double percent, double target)
{
    double ratios[MAX_ROUNDS];
    size_t rounds = n / per_round < MAX_ROUNDS ? n / per_round : MAX_ROUNDS;
    bench_figure *f = bench_add(b->list, "us", false, target, "%s", name);

    for (size_t r = 0; r < rounds; r++)
        ratios[r] = clock_percentile(us + r * per_round, per_round, percent) /
                    clock_percentile(plain + r * per_round, per_round, percent);
    bench_judge(f, ratios, rounds);
    f->value = clock_percentile(us, n, 50);
    f->p99 = clock_percentile(us, n, 99);
    f->plain = clock_percentile(plain, n, 50);
    f->plain_p99 = clock_percentile(plain, n, 99);
    f->plain_is = "epoll echo, in turns";
}

/* A client with one region of `n` private slots. */
typedef struct user {
    kvs_client *client;
    kvs_ns *ns;
    kvs_region *region;
    kvs_slot *slots;
    uint8_t *base;
    uint64_t slot_bytes;
    uint32_t n;
} user;

static kvs_status user_open(user *u, const char *socket, uint32_t format, uint32_t layers, uint32_t tokens, uint32_t n,
                            kvs_err *err)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_plane *planes = calloc(layers, sizeof *planes);
    kvs_namespace desc;
    kvs_ns_info info;
    void *base = NULL;
    uint64_t bytes;
    kvs_status s;

    *u = (user){.n = n, .slots = calloc(n, sizeof *u->slots)};
    if (planes == NULL || u->slots == NULL) {
        free(planes);
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %u layers or %u slots", layers, n);
    }
    o.path = socket;
    o.name = "kvstridectl bench";
    s = kvs_connect(&u->client, &o, err);
    if (s == KVS_OK)
        s = kvs_namespace_mla("bench", "", format, layers, tokens, planes, &desc, err);
    if (s == KVS_OK)
        s = kvs_open(u->client, &desc, &u->ns, 0, err);
    if (s == KVS_OK)
        s = kvs_region_create(u->ns, 0, n, &u->region, 0, err);
    if (s == KVS_OK)
        s = kvs_region_map(u->region, &base, &bytes, err);
    if (s == KVS_OK)
        s = kvs_slot_take(u->region, n, u->slots, 0, err);
    free(planes);
    if (s != KVS_OK)
        return s;
    kvs_ns_get(u->ns, &info);
    u->slot_bytes = info.slot_bytes;
    u->base = base;
    return KVS_OK;
}

static void user_close(user *u)
{
    kvs_close(u->client);
    free(u->slots);
    *u = (user){0};
}

static kvs_status store(user *u, uint64_t first_id, uint32_t n, kvs_err *err)
{
    uint8_t *keys = malloc((size_t)n * KVS_KEY_BYTES);
    kvs_status *results = malloc(n * sizeof *results);
    kvs_slot *slots = malloc(n * sizeof *slots);
    kvs_store_args a = {.ns = u->ns, .region = u->region, .n = n};
    kvs_status s = KVS_E_NO_MEMORY;

    if (keys != NULL && results != NULL && slots != NULL) {
        for (uint32_t i = 0; i < n; i++) {
            pattern_key(first_id + i, keys + (size_t)i * KVS_KEY_BYTES);
            slots[i] = u->slots[i % u->n];
        }
        a.keys = keys;
        a.slots = slots;
        a.results = results;
        s = kvs_store(&a, CALL_MS, err);
    }
    free(keys);
    free(results);
    free(slots);
    return s;
}

static kvs_status load(user *u, uint64_t first_id, uint32_t n, kvs_err *err)
{
    uint8_t *keys = malloc((size_t)n * KVS_KEY_BYTES);
    kvs_load_result *results = malloc(n * sizeof *results);
    kvs_load_args a = {.ns = u->ns, .region = u->region, .n = n};
    kvs_status s = KVS_E_NO_MEMORY;

    if (keys != NULL && results != NULL) {
        for (uint32_t i = 0; i < n; i++)
            pattern_key(first_id + i, keys + (size_t)i * KVS_KEY_BYTES);
        a.keys = keys;
        a.slots = u->slots;
        a.results = results;
        s = kvs_load(&a, CALL_MS, err);
    }
    free(keys);
    free(results);
    return s;
}

/* ---- copy ---- */

/* GB/s of each round, and each over the plain copy right before it: whatever else the machine does meets both. */
typedef struct copies {
    double plain[2 * COPY_ROUNDS], store[COPY_ROUNDS], load[COPY_ROUNDS];
    double store_ratio[COPY_ROUNDS], load_ratio[COPY_ROUNDS];
} copies;

static double gbs(const user *u, uint64_t began)
{
    return (double)COPY_BLOCKS * (double)u->slot_bytes / (double)(clock_ns() - began);
}

static double plain_copy(user *u, const uint8_t *from)
{
    uint64_t at = clock_ns();

    for (uint32_t i = 0; i < COPY_BLOCKS; i++)
        memcpy(u->base + u->slots[i].slot * u->slot_bytes, from + i * u->slot_bytes, u->slot_bytes);
    return gbs(u, at);
}

static kvs_status copy_round(user *u, const uint8_t *from, double rates[4], kvs_err *err)
{
    kvs_status s = kvs_reset(u->client, u->ns, 0, NULL, 0, err);
    uint64_t at;

    if (s != KVS_OK)
        return s;
    rates[0] = plain_copy(u, from);
    at = clock_ns();
    s = store(u, 0, COPY_BLOCKS, err);
    rates[1] = gbs(u, at);
    if (s != KVS_OK)
        return s;
    rates[2] = plain_copy(u, from);
    at = clock_ns();
    s = load(u, 0, COPY_BLOCKS, err);
    rates[3] = gbs(u, at);
    return s;
}

static kvs_status copy_rounds(bench *b, user *u, copies *ret)
{
    uint8_t *from = malloc(COPY_BLOCKS * u->slot_bytes);
    kvs_status s = KVS_OK;

    if (from == NULL)
        return kvs_fail(&b->err, KVS_E_NO_MEMORY, "no memory for %d blocks", COPY_BLOCKS);
    memset(from, 1, COPY_BLOCKS * u->slot_bytes);
    /* The first round touches every page of the arena and does not count. */
    for (int r = -1; r < COPY_ROUNDS && s == KVS_OK; r++) {
        double rates[4];

        s = copy_round(u, from, rates, &b->err);
        if (r < 0 || s != KVS_OK)
            continue;
        ret->plain[2 * r] = rates[0];
        ret->plain[2 * r + 1] = rates[2];
        ret->store[r] = rates[1];
        ret->load[r] = rates[3];
        ret->store_ratio[r] = rates[1] / rates[0];
        ret->load_ratio[r] = rates[3] / rates[2];
    }
    free(from);
    return s;
}

static void add_copy(bench *b, const char *op, uint64_t slot, bool checksum, double *rates, double *ratios,
                     double plain)
{
    bench_figure *f = bench_add(b->list, "GB/s", true, 0.85, "%s, %" PRIu64 "-byte blocks, checksum %s", op, slot,
                                checksum ? "on" : "off");

    f->value = clock_percentile(rates, COPY_ROUNDS, 50);
    f->plain = plain;
    f->plain_is = "memcpy, one thread";
    bench_judge(f, ratios, COPY_ROUNDS);
}

static kvs_status bench_copy(bench *b, bool checksum)
{
    static copies all;
    uint32_t layers = b->c->layers ? (uint32_t)b->c->layers : 61, tokens = b->c->tokens ? (uint32_t)b->c->tokens : 64;
    uint64_t slot = (uint64_t)layers * ((tokens * UINT64_C(1152) + 15) / 16 * 16), max, extent;
    char settings[4][64];
    const char *const list[] = {settings[0], settings[1], settings[2], settings[3], "device.kind=cpu"};
    private_daemon d = {0};
    user u = {0};
    kvs_status s = replay_pool_size(COPY_BLOCKS, slot, &max, &extent, &b->err);

    if (s != KVS_OK)
        return s;
    (void)snprintf(settings[0], 64, "pool.max_bytes=%" PRIu64, max);
    (void)snprintf(settings[1], 64, "pool.extent_bytes=%" PRIu64, extent);
    (void)snprintf(settings[2], 64, "pool.checksum=%s", checksum ? "true" : "false");
    (void)snprintf(settings[3], 64, "pool.max_slots=%d", COPY_BLOCKS);
    s = private_start(&d, list, 5, &b->err);
    if (s == KVS_OK)
        s = user_open(&u, d.socket, KVS_FORMAT_mla_bf16, layers, tokens, COPY_BLOCKS, &b->err);
    if (s == KVS_OK)
        s = copy_rounds(b, &u, &all);
    if (s == KVS_OK) {
        double plain = clock_percentile(all.plain, 2 * (size_t)COPY_ROUNDS, 50);

        add_copy(b, "STORE", slot, checksum, all.store, all.store_ratio, plain);
        add_copy(b, "LOAD", slot, checksum, all.load, all.load_ratio, plain);
    }
    user_close(&u);
    private_stop(&d);
    return s;
}

/* ---- round trips ---- */

/* The daemon, which shares a CPU with the echo server, stays awake for a moment behind a request: no echo counts until that is
 * over. */
static kvs_status echo_turn(bench *b, const echo *e, double *us, size_t n)
{
    uint64_t began = clock_ns();
    size_t i = 0;

    while (i < n) {
        uint64_t at = clock_ns();

        if (!echo_trip(e))
            return kvs_fail(&b->err, KVS_E_SYS, "the echo server died");
        us[i] = (double)(clock_ns() - at) / 1e3;
        i += at - began > SETTLE_US * UINT64_C(1000);
    }
    return KVS_OK;
}

static kvs_status ping_turn(bench *b, user *u, double *us, size_t n)
{
    kvs_status s = kvs_ping(u->client, 0, &b->err); /* nor the first one behind echoes */

    for (size_t i = 0; i < n && s == KVS_OK; i++) {
        uint64_t at = clock_ns();

        s = kvs_ping(u->client, 0, &b->err);
        us[i] = (double)(clock_ns() - at) / 1e3;
    }
    return s;
}

static kvs_status bench_trip(bench *b, user *u, const echo *e)
{
    static double pings[TRIP_ROUNDS * TRIPS], echoes[TRIP_ROUNDS * TRIPS];
    size_t n = 0;

    for (int r = 0; r < TRIP_ROUNDS; r++, n += TRIPS) {
        kvs_status s = ping_turn(b, u, pings + n, TRIPS);

        if (s == KVS_OK)
            s = echo_turn(b, e, echoes + n, TRIPS);
        if (s != KVS_OK)
            return s;
    }
    add_latency(b, "PING through libkvstride", pings, echoes, n, TRIPS, 50, 2);
    return KVS_OK;
}

/* ---- lookups ---- */

static kvs_status fill(bench *b, user *u)
{
    kvs_status s = KVS_OK;

    for (uint64_t id = 0; id < RESIDENT && s == KVS_OK; id += FILL_KEYS) {
        uint32_t n = RESIDENT - id < FILL_KEYS ? (uint32_t)(RESIDENT - id) : FILL_KEYS;

        s = store(u, id, n, &b->err);
        if (progress_wanted(b->c->quiet))
            progress_show("bench: storing a million keys", id + n, RESIDENT);
    }
    if (progress_wanted(b->c->quiet))
        progress_end();
    return s;
}

static kvs_status one_lookup(bench *b, user *u, uint64_t *seed, double *ret_us)
{
    static uint8_t keys[LOOKUP_KEYS * KVS_KEY_BYTES];
    static uint8_t states[LOOKUP_KEYS];
    uint32_t hits = 0;
    uint64_t at;
    kvs_status s;

    for (int k = 0; k < LOOKUP_KEYS; k++) {
        *seed = *seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        pattern_key((*seed >> 33) % RESIDENT, keys + (size_t)k * KVS_KEY_BYTES);
    }
    at = clock_ns();
    s = kvs_lookup(u->ns, keys, LOOKUP_KEYS, &hits, states, 0, &b->err);
    *ret_us = (double)(clock_ns() - at) / 1e3;
    if (s == KVS_OK && hits != LOOKUP_KEYS)
        return kvs_fail(&b->err, KVS_E_NOT_FOUND, "%u of %d resident keys were found", hits, LOOKUP_KEYS);
    return s;
}

/* LOOKUPs and echoes in turn, so that both see the same load; n is a multiple of TURN. */
static kvs_status lookups(bench *b, user *u, const echo *e, double *look, double *echoes, size_t n)
{
    uint64_t seed = 1;
    double first;

    for (size_t i = 0; i < n; i += TURN) {
        kvs_status s = one_lookup(b, u, &seed, &first);

        for (size_t k = i; k < i + TURN && s == KVS_OK; k++)
            s = one_lookup(b, u, &seed, &look[k]);
        if (s == KVS_OK)
            s = echo_turn(b, e, echoes + i, TURN);
        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

typedef struct flood {
    user u;
    _Atomic bool stop;
    kvs_status status;
    kvs_err err;
    uint64_t first_id; /* nobody else's */
    cpu_set_t cpus;    /* where it may run */
} flood;

static kvs_status drop(user *u, uint64_t first_id, uint32_t n, kvs_err *err)
{
    uint8_t keys[FLOOD_BLOCKS][KVS_KEY_BYTES];

    for (uint32_t i = 0; i < n; i++)
        pattern_key(first_id + i, keys[i]);
    return kvs_drop(u->ns, keys[0], n, NULL, CALL_MS, err);
}

/* Stores of ever new 4.3 MiB blocks, one request after the other.  They are dropped again: a full pool would take the
 * coldest extent from the million keys that must stay. */
static void *flood_main(void *arg)
{
    flood *f = arg;

    (void)sched_setaffinity(0, sizeof f->cpus, &f->cpus); /* not where the client that made it is */
    for (uint64_t id = f->first_id; !atomic_load(&f->stop) && f->status == KVS_OK; id += FLOOD_BLOCKS) {
        f->status = store(&f->u, id, FLOOD_BLOCKS, &f->err);
        if (f->status == KVS_OK)
            f->status = drop(&f->u, id, FLOOD_BLOCKS, &f->err);
    }
    return NULL;
}

static kvs_status under_flood(bench *b, user *u, const echo *e, const char *socket)
{
    static double look[TAIL_SAMPLES], echoes[TAIL_SAMPLES];
    static flood f[FLOODERS];
    pthread_t thread[FLOODERS];
    uint32_t n = 0;
    kvs_status s = KVS_OK;

    for (; n < FLOODERS && s == KVS_OK; n += s == KVS_OK) {
        f[n].first_id = (UINT64_C(1) << 40) * (n + 1);
        f[n].cpus = b->cpus;
        s = user_open(&f[n].u, socket, KVS_FORMAT_mla_bf16, 61, 64, FLOOD_BLOCKS, &b->err);
        if (s == KVS_OK && pthread_create(&thread[n], NULL, flood_main, &f[n]) != 0)
            s = kvs_fail(&b->err, KVS_E_SYS, "cannot start a thread");
        if (s != KVS_OK)
            user_close(&f[n].u);
    }
    if (s == KVS_OK)
        s = lookups(b, u, e, look, echoes, TAIL_SAMPLES);
    for (uint32_t i = 0; i < n; i++) {
        atomic_store(&f[i].stop, true);
        (void)pthread_join(thread[i], NULL);
        if (s == KVS_OK && f[i].status != KVS_OK)
            s = kvs_fail(&b->err, f[i].status, "store flood: %s", f[i].err.msg);
        user_close(&f[i].u);
    }
    if (s == KVS_OK)
        add_latency(b, "LOOKUP under a store flood, ratio of p99", look, echoes, TAIL_SAMPLES, TAIL_ROUND, 99, 3);
    return s;
}

static kvs_status metadata(bench *b, user *u)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;
    kvs_status s = kvs_report_alloc(u->client, &a, &text, &len, 0, &b->err);

    if (s == KVS_OK)
        s = json_parse(text, len, &doc, &b->err);
    if (s == KVS_OK) {
        const json_node *dir = json_member(json_root(doc), "directory");
        const json_node *bytes = dir != NULL ? json_member(dir, "metadata_bytes") : NULL;

        if (bytes != NULL)
            bench_add(b->list, "bytes", false, 160, "metadata a slot, a million resident")->value =
                json_number(bytes) / RESIDENT;
        else
            s = kvs_fail(&b->err, KVS_E_PROTO, "status has no directory.metadata_bytes");
    }
    json_destroy(doc);
    kvs_free(text);
    return s;
}

/* Where the kernel puts a server decides its round trips: beside the client they cost 10 us, on a CPU that must be woken
 * several times that.  So both servers share a CPU and the client has another, as an engine and its daemon do; everything
 * else runs where it likes. */
static void place(const cpu_set_t *all, pid_t daemon, pid_t plain)
{
    int first = -1, last = -1;
    cpu_set_t one;

    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, all)) {
            first = first < 0 ? i : first;
            last = i;
        }
    if (first == last)
        return;
    CPU_ZERO(&one);
    CPU_SET(last, &one);
    (void)sched_setaffinity(daemon, sizeof one, &one); /* its first thread: the loop */
    (void)sched_setaffinity(plain, sizeof one, &one);
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    (void)sched_setaffinity(0, sizeof one, &one);
}

static kvs_status bench_million(bench *b, user *u, const echo *e, const char *socket)
{
    static double look[LOOKUPS], echoes[LOOKUPS];
    kvs_status s = fill(b, u);

    if (s == KVS_OK)
        s = lookups(b, u, e, look, echoes, LOOKUPS);
    if (s == KVS_OK)
        add_latency(b, "LOOKUP of 1,000 random keys of a million", look, echoes, LOOKUPS, TRIPS, 50, 25);
    if (s == KVS_OK)
        s = metadata(b, u);
    return s == KVS_OK ? under_flood(b, u, e, socket) : s;
}

static kvs_status bench_lookup(bench *b)
{
    static const char *const SETTINGS[] = {"pool.max_bytes=2560MiB", "pool.extent_bytes=256MiB",
                                           "device.max_region_bytes=512MiB", "pool.checksum=true", "device.kind=cpu"};
    private_daemon d = {0};
    user u = {0};
    echo e = {0};
    kvs_status s = private_start(&d, SETTINGS, 5, &b->err);

    CPU_ZERO(&b->cpus);
    (void)sched_getaffinity(0, sizeof b->cpus, &b->cpus);
    if (s == KVS_OK)
        s = user_open(&u, d.socket, KVS_FORMAT_mla_bf16, 1, 1, 64, &b->err);
    if (s == KVS_OK)
        s = echo_start(&e, &b->err);
    if (s == KVS_OK)
        place(&b->cpus, d.pid, e.pid);
    if (s == KVS_OK)
        s = bench_trip(b, &u, &e);
    if (s == KVS_OK && !b->c->quick)
        s = bench_million(b, &u, &e, d.socket);
    (void)sched_setaffinity(0, sizeof b->cpus, &b->cpus);
    echo_stop(&e);
    user_close(&u);
    private_stop(&d);
    return s;
}

/* ---- idle ---- */

/* Voluntary context switches of all threads: how often the process went back to sleep. */
static uint64_t wakeups(pid_t pid)
{
    char path[300], line[128];
    uint64_t sum = 0, v;
    struct dirent *t;
    DIR *dir;

    (void)snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    dir = opendir(path);
    if (dir == NULL)
        return 0;
    while ((t = readdir(dir)) != NULL) {
        FILE *f;

        if (t->d_name[0] == '.')
            continue;
        (void)snprintf(path, sizeof path, "/proc/%d/task/%s/status", (int)pid, t->d_name);
        f = fopen(path, "r");
        if (f == NULL)
            continue;
        while (fgets(line, sizeof line, f) != NULL)
            if (sscanf(line, "voluntary_ctxt_switches: %" SCNu64, &v) == 1)
                sum += v;
        (void)fclose(f);
    }
    (void)closedir(dir);
    return sum;
}

static kvs_status bench_idle(bench *b)
{
    static const char *const SETTINGS[] = {"pool.max_bytes=16MiB", "device.kind=cpu"};
    private_daemon d = {0};
    user u = {0};
    uint64_t before;
    kvs_status s = private_start(&d, SETTINGS, 2, &b->err);

    if (s == KVS_OK)
        s = user_open(&u, d.socket, KVS_FORMAT_mla_bf16, 2, 1, 4, &b->err); /* connected, silent */
    if (s == KVS_OK) {
        (void)sleep(1);
        before = wakeups(d.pid);
        (void)sleep(IDLE_SECONDS);
        bench_add(b->list, "a second", false, 1, "wake-ups of an idle daemon")->value =
            (double)(wakeups(d.pid) - before) / IDLE_SECONDS;
    }
    user_close(&u);
    private_stop(&d);
    return s;
}

/* ---- all of it ---- */

/* Where there is a GPU.  All other figures are those of the cpu device, on every machine. */
static kvs_status bench_card(bench *b)
{
    kvs_status s = bench_gpu(b->list, b->c->quick, &b->err);

    return s == KVS_E_UNSUPPORTED && b->list->n == 0 ? KVS_OK : s;
}

static kvs_status run_all(bench *b)
{
    kvs_status s = bench_card(b);

    if (s == KVS_OK)
        s = bench_copy(b, true);
    if (s == KVS_OK && !b->c->quick)
        s = bench_copy(b, false);
    if (s == KVS_OK)
        s = bench_lookup(b);
    if (s == KVS_OK && !b->c->quick)
        s = bench_idle(b);
    return s;
}

static int show(const bench *b)
{
    json_writer *w;

    if (!b->c->json) {
        bench_print(b->list, stdout);
        return CTL_OK;
    }
    w = json_writer_create();
    json_begin_object(w, NULL);
    bench_put(b->list, w);
    json_end(w);
    return ctl_put(w, CTL_OK);
}

static int run_engine(const char *work)
{
    kvs_err err = {0};
    kvs_status s = bench_busy_run(work, &err);

    if (s == KVS_E_INVALID)
        return ctl_usage("%s", err.msg);
    if (s != KVS_OK) {
        text_tame(err.msg);
        (void)fprintf(stderr, "kvstridectl: bench --engine: %s\n", err.msg);
    }
    return s == KVS_OK ? CTL_OK : s == KVS_E_UNSUPPORTED ? CTL_UNABLE : CTL_FAILED;
}

int ctl_bench(const ctl *c)
{
    static bench_list list;
    bench b = {.c = c, .list = &list};
    kvs_status s;
    int code;

    if (c->engine != NULL)
        return run_engine(c->engine);
    if (c->svg != NULL && bench_svg_try(c->svg, &b.err) != KVS_OK)
        return ctl_usage("bench: --svg: %s", b.err.msg);
    s = run_all(&b);
    if (s != KVS_OK)
        return ctl_fail(c, "bench", s, &b.err);
    code = show(&b); /* first: no drawing is worth the figures */
    if (c->svg == NULL || bench_svg(b.list, c->svg, &b.err) == KVS_OK)
        return code;
    text_tame(b.err.msg);
    (void)fprintf(stderr, "kvstridectl: bench: --svg: %s\n", b.err.msg);
    return CTL_FAILED;
}
