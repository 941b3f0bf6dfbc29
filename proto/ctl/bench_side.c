#include "proto/ctl/bench_side.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "proto/ctl/bench_busy.h"
#include "proto/ctl/bench_flood.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/private.h"

enum {
    WHOLE_LAYERS = 61,
    TOKENS = 64,
    TRIPS = 400,
    GROUP = 40,
    GROUPS = TRIPS / GROUP,
    MAX_ROUNDS = 9,
    FEWEST_ENDS = 8, /* of requests within a stretch */
};
#define CHUNK_BYTES (UINT64_C(16) << 20)

static const char *const SETTINGS[] = {"pool.max_bytes=4GiB", "device.max_region_bytes=16GiB"};
static const bench_shape ONE = {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, 1};
static const bench_shape WHOLE = {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, 100};

static void nap_ms(long ms)
{
    (void)nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

kvs_status bench_raw_gbs(bench_raw *raw, bool load, double *ret, kvs_err *err)
{
    double gbs[5];

    for (int i = 0; i < 5; i++) {
        uint64_t at = clock_ns();
        kvs_status s = bench_raw_copy(raw, 0, load, BENCH_RAW_BYTES, err);

        if (s != KVS_OK)
            return s;
        gbs[i] = (double)BENCH_RAW_BYTES / (double)(clock_ns() - at);
    }
    *ret = clock_percentile(gbs, 5, 50);
    return KVS_OK;
}

/* ---- one block ---- */

typedef struct trips {
    double us[TRIPS], plain[TRIPS]; /* in the order of time */
} trips;

/* LOADs of one block; raw: NULL, or each right behind a raw copy of as many bytes. */
static kvs_status one_block(trips *t, bench_user *u, bench_raw *raw, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (int i = 0; i < TRIPS && s == KVS_OK; i++) {
        uint64_t at = clock_ns();

        if (raw != NULL)
            s = bench_raw_copy(raw, 0, true, u->slot_bytes, err);
        t->plain[i] = (double)(clock_ns() - at) / 1e3;
        at = clock_ns();
        if (s == KVS_OK)
            s = bench_user_load(u, 0, 1, err);
        t->us[i] = (double)(clock_ns() - at) / 1e3;
    }
    return s;
}

/* Sorts what it is given, group by group and then altogether. */
static void judge_groups(bench_figure *f, trips *t, double limit)
{
    double judged[GROUPS];

    for (int g = 0; g < GROUPS; g++) {
        double us = clock_percentile(t->us + g * GROUP, GROUP, 50);

        judged[g] = limit > 0 ? us / limit : us - clock_percentile(t->plain + g * GROUP, GROUP, 50);
    }
    bench_judge(f, judged, GROUPS);
    f->value = clock_percentile(t->us, TRIPS, 50);
    f->p99 = clock_percentile(t->us, TRIPS, 99);
}

static kvs_status beside_flood(bench_list *l, bench_user *u, bench_flood *flood, const char *what, const char *limit_is,
                               double limit, kvs_err *err)
{
    static trips t;
    bench_figure *f;
    kvs_status s;

    bench_flood_run(flood);
    nap_ms(100);
    s = one_block(&t, u, NULL, err);
    bench_flood_rest(flood);
    if (s != KVS_OK)
        return s;
    f = bench_add(l, "us", false, 1, "GPU: LOAD of one block beside %s", what);
    judge_groups(f, &t, limit);
    f->plain = limit;
    f->plain_is = limit_is;
    return KVS_OK;
}

static kvs_status alone(bench_list *l, bench_user *u, bench_raw *raw, double *ret_us, kvs_err *err)
{
    static trips t;
    bench_figure *f;
    kvs_status s = one_block(&t, u, raw, err); /* to warm up */

    if (s == KVS_OK)
        s = one_block(&t, u, raw, err);
    if (s != KVS_OK)
        return s;
    f = bench_add(l, "us", false, 40, "GPU: LOAD of one block, above the raw copy");
    judge_groups(f, &t, 0);
    f->plain = clock_percentile(t.plain, TRIPS, 50);
    f->plain_p99 = clock_percentile(t.plain, TRIPS, 99);
    f->plain_is = "one raw copy";
    f->judged_is = "a difference, in us";
    *ret_us = f->value;
    return KVS_OK;
}

kvs_status bench_latencies(bench_list *l, bench_raw *raw, bool quick, kvs_err *err)
{
    static bench_flood store, load;
    private_daemon d = {0};
    bench_user one = {0};
    double idle_us = 0, gbs = 0;
    kvs_err late = {0};
    kvs_status s = private_start_tenant(&d, SETTINGS, sizeof SETTINGS / sizeof *SETTINGS, err), end;

    memset(&store, 0, sizeof store);
    memset(&load, 0, sizeof load);
    (void)quick;
    if (s == KVS_OK)
        s = bench_user_open(&one, d.socket, &ONE, err);
    if (s == KVS_OK)
        s = bench_user_store(&one, 0, err);
    if (s == KVS_OK)
        s = kvs_pin(one.ns, one.keys, 1, NULL, BENCH_CALL_MS, err);
    if (s == KVS_OK)
        s = bench_raw_gbs(raw, true, &gbs, err);
    if (s == KVS_OK)
        s = alone(l, &one, raw, &idle_us, err);
    if (s == KVS_OK)
        s = bench_flood_start(&store, d.socket, &WHOLE, false, UINT64_C(1) << 40, err);
    if (s == KVS_OK)
        s = beside_flood(l, &one, &store, "a store flood", "1.5 x alone + 100 us", 1.5 * idle_us + 100, err);
    if (s == KVS_OK)
        s = bench_flood_start(&load, d.other, &WHOLE, true, UINT64_C(2) << 40, err);
    if (s == KVS_OK)
        s = beside_flood(l, &one, &load, "another tenant's load flood", "alone + two chunks",
                         idle_us + 2 * (double)CHUNK_BYTES / gbs / 1e3, err);
    end = bench_flood_stop(&store, &late);
    if (bench_flood_stop(&load, &late) != KVS_OK || end != KVS_OK)
        s = s == KVS_OK ? kvs_fail(err, late.status, "%s", late.msg) : s;
    bench_user_close(&one);
    private_stop(&d);
    return s;
}

/* ---- engines ---- */

typedef struct traffic {
    const char *name;
    bench_shape shape;
    bool load, store, in_quick;
    double target; /* of its own rate; NAN: none */
} traffic;

enum { TRAFFICS = 11, FLOODS = 2 };
static const traffic TRAFFIC[TRAFFICS] = {
    {"STORE of whole blocks", {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, 100}, false, true, true, NAN},
    {"LOAD of whole blocks", {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, 100}, true, false, true, NAN},
    {"LOAD and STORE of whole blocks", {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, 100}, true, true, true, NAN},
    {"STORE of 72 KiB pages", {BENCH_PAGES, WHOLE_LAYERS, TOKENS, 100}, false, true, false, NAN},
    {"LOAD of 72 KiB pages", {BENCH_PAGES, WHOLE_LAYERS, TOKENS, 100}, true, false, false, NAN},
    {"STORE of 18 KiB pages", {BENCH_PAGES, WHOLE_LAYERS, 16, 200}, false, true, false, NAN},
    {"LOAD of 18 KiB pages", {BENCH_PAGES, WHOLE_LAYERS, 16, 200}, true, false, false, NAN},
    {"packed STORE of 72 KiB pages", {BENCH_PACK, WHOLE_LAYERS, TOKENS, 200}, false, true, true, 0.90},
    {"packed LOAD of 72 KiB pages", {BENCH_PACK, WHOLE_LAYERS, TOKENS, 200}, true, false, true, 0.90},
    {"packed STORE of 18 KiB pages", {BENCH_PACK, WHOLE_LAYERS, 16, 800}, false, true, false, 0.90},
    {"packed LOAD of 18 KiB pages", {BENCH_PACK, WHOLE_LAYERS, 16, 800}, true, false, false, 0.90},
};

/* A traffic's floods, and what the rounds gave. */
typedef struct lane {
    bench_flood floods[FLOODS];
    uint32_t n;
    double speed[MAX_ROUNDS], idle_ms[MAX_ROUNDS], busy_ms[MAX_ROUNDS], gbs[MAX_ROUNDS];
} lane;

static kvs_status lane_start(lane *x, const traffic *t, const bench_tune *tune, const char *socket, uint64_t first_id,
                             kvs_err *err)
{
    kvs_status s = KVS_OK;

    memset(x, 0, sizeof *x);
    for (int load = 0; load < 2 && s == KVS_OK; load++)
        if (load ? t->load : t->store) {
            bench_flood *f = &x->floods[x->n++];

            f->user.tune = *tune;
            s = bench_flood_start(f, socket, &t->shape, load != 0, first_id + ((uint64_t)load << 40), err);
        }
    return s;
}

static kvs_status lane_stop(lane *x, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < x->n; i++) {
        kvs_status e = bench_flood_stop(&x->floods[i], err);

        s = s == KVS_OK ? e : s;
    }
    x->n = 0;
    return s;
}

/* GB/s of all floods since then.  False: one of them has ended too few requests to tell. */
static bool moved(const lane *x, uint64_t from, uint64_t to, double *ret_gbs)
{
    bool enough = true;

    *ret_gbs = 0;
    for (uint32_t i = 0; i < x->n; i++) {
        double gbs;

        enough = bench_ends_gbs(&x->floods[i].ends, from, to, &gbs) >= FEWEST_ENDS && enough;
        *ret_gbs += gbs;
    }
    return enough;
}

/* The engine alone, and right after that beside the traffic: in a stretch that holds enough requests. */
static kvs_status engine_round(lane *x, bench_busy *busy, int round, kvs_err *err)
{
    const long settle_ms = 30, window_ms = 150;
    const uint64_t longest_ns = UINT64_C(5000000000);
    uint64_t from, to;
    kvs_status s;

    nap_ms(settle_ms);
    from = clock_ns();
    nap_ms(window_ms);
    s = bench_busy_ms(busy, from, clock_ns(), &x->idle_ms[round], err);
    for (uint32_t i = 0; i < x->n; i++)
        bench_flood_run(&x->floods[i]);
    nap_ms(settle_ms);
    from = clock_ns();
    do {
        nap_ms(window_ms);
        to = clock_ns();
    } while (!moved(x, from, to, &x->gbs[round]) && to - from < longest_ns);
    if (s == KVS_OK)
        s = bench_busy_ms(busy, from, to, &x->busy_ms[round], err);
    for (uint32_t i = 0; i < x->n; i++)
        bench_flood_rest(&x->floods[i]);
    x->speed[round] = x->idle_ms[round] / x->busy_ms[round];
    return s;
}

static const char STEP_IS[] = "mean of the steps that began and ended within a stretch of at least 150 ms";
static const char RATE_IS[] =
    "bytes of the requests that ended within that stretch but the first, over the time from its "
    "end to the last one's";

/* The last one waits for each of its kernels, and so feels a link that is full and a GPU that goes to and fro: that is shown, and
 * nothing is promised. */
typedef struct engine_kind {
    const char *work;
    bool inside, whole_only;
} engine_kind;

enum { KINDS = 5 };
static const engine_kind ENGINES[KINDS] = {
    {"compute", false, false}, {"memory", false, false}, {"latency", false, true},
    {"compute", true, false},  {"memory", true, false},
};

static void add_engine(bench_list *l, const traffic *t, lane *x, const engine_kind *k, int rounds, const double gbs[2])
{
    const double raw =
        t->load && t->store ? NAN : gbs[t->load]; /* both at once: no simple raw figure beside an engine */
    double fractions[MAX_ROUNDS];
    const bool promised = !k->whole_only && (t->shape.place == BENCH_DAEMON || t->shape.place == BENCH_PACK);
    bench_figure *f =
        bench_add(l, "ms", true, promised ? 0.95 : NAN, "GPU: a %s-bound engine's speed beside %s", k->work, t->name);

    f->plain = clock_percentile(x->idle_ms, (size_t)rounds, 50);
    f->value = clock_percentile(x->busy_ms, (size_t)rounds, 50);
    f->plain_is = "a step alone";
    f->value_is = STEP_IS;
    bench_judge(f, x->speed, (size_t)rounds);
    f = bench_add(l, "GB/s", true, t->target, "GPU: %s beside a %s-bound engine", t->name, k->work);
    for (int r = 0; r < rounds; r++)
        fractions[r] = x->gbs[r] / raw;
    f->value = clock_percentile(x->gbs, (size_t)rounds, 50);
    f->plain = raw;
    f->plain_is = isnan(raw) ? "" : "raw copy, GPU idle";
    f->value_is = RATE_IS;
    if (!isnan(raw))
        bench_judge(f, fractions, (size_t)rounds);
}

/* An engine whose pages are packed does that itself: there it is a thread of this process. */
static bool is_inside(const traffic *t)
{
    return t->shape.place == BENCH_PACK;
}

static bool concerns(const engine_kind *k, const lane *x, const traffic *t)
{
    return x->n > 0 && is_inside(t) == k->inside && (!k->whole_only || t->shape.place == BENCH_DAEMON);
}

static kvs_status one_engine(bench_list *l, lane *lanes, const engine_kind *k, int rounds, const double gbs[2],
                             kvs_err *err)
{
    bench_busy *busy = NULL;
    kvs_status s = bench_busy_start(&busy, k->work, k->inside, err);

    for (int r = 0; r < rounds && s == KVS_OK; r++)
        for (int i = 0; i < TRAFFICS && s == KVS_OK; i++)
            if (concerns(k, &lanes[i], &TRAFFIC[i]))
                s = engine_round(&lanes[i], busy, r, err);
    bench_busy_stop(busy);
    for (int i = 0; i < TRAFFICS && s == KVS_OK; i++)
        if (concerns(k, &lanes[i], &TRAFFIC[i]))
            add_engine(l, &TRAFFIC[i], &lanes[i], k, rounds, gbs);
    return s;
}

/* Which rows, and how their packs are opened. */
typedef struct selection {
    bool quick, packed_only;
    int rounds;
    bench_tune tune;
} selection;

static bool is_selected(const selection *x, const traffic *t)
{
    return (!x->quick || t->in_quick) && (!x->packed_only || is_inside(t));
}

static kvs_status engines(bench_list *l, const char *socket, const selection *x, const double gbs[2], kvs_err *err)
{
    static lane lanes[TRAFFICS];
    kvs_err late = {0};
    kvs_status s = KVS_OK;

    for (int i = 0; i < TRAFFICS && s == KVS_OK; i++)
        if (is_selected(x, &TRAFFIC[i]))
            s = lane_start(&lanes[i], &TRAFFIC[i], &x->tune, socket, (uint64_t)(i + 1) << 44, err);
    for (int k = 0; k < KINDS && s == KVS_OK; k++)
        if (ENGINES[k].inside || !x->packed_only)
            s = one_engine(l, lanes, &ENGINES[k], x->rounds, gbs, err);
    for (int i = 0; i < TRAFFICS; i++)
        if (lane_stop(&lanes[i], &late) != KVS_OK && s == KVS_OK)
            s = kvs_fail(err, late.status, "%s", late.msg);
    return s;
}

kvs_status bench_packed(bench_list *l, const char *socket, const bench_tune *tune, int rounds, const double gbs[2],
                        kvs_err *err)
{
    const selection packed = {.packed_only = true, .rounds = rounds < MAX_ROUNDS ? rounds : MAX_ROUNDS, .tune = *tune};

    return engines(l, socket, &packed, gbs, err);
}

kvs_status bench_engines(bench_list *l, bench_raw *raw, bool quick, kvs_err *err)
{
    const selection all = {.quick = quick, .rounds = quick ? 3 : 5};
    private_daemon d = {0};
    double gbs[2] = {0, 0}; /* store, load */
    kvs_status s = private_start(&d, SETTINGS, sizeof SETTINGS / sizeof *SETTINGS, err);

    for (int load = 0; load < 2 && s == KVS_OK; load++)
        s = bench_raw_gbs(raw, load != 0, &gbs[load], err);
    if (s == KVS_OK)
        s = engines(l, d.socket, &all, gbs, err);
    private_stop(&d);
    return s;
}
