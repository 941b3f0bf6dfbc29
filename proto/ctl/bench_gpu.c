#include "proto/ctl/bench_gpu.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "config/json.h"
#include "proto/ctl/bench_side.h"
#include "proto/ctl/bench_user.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/private.h"

enum { TOKENS = 64, WHOLE_LAYERS = 61, SMALL_LAYERS = 16, WHOLE_BLOCKS = 200, SMALL_BLOCKS = 763, MAX_ROUNDS = 9 };
enum { STORE, LOAD, BOTH, WAYS };
static const char *const WAY_NAMES[WAYS] = {"STORE", "LOAD", "both"};

/* GB/s of each round, and of the raw copies right before. */
typedef struct rates {
    double gbs[WAYS][MAX_ROUNDS], raw[WAYS][MAX_ROUNDS];
    int n; /* rounds */
} rates;

/* One timed step: a STORE, a LOAD, or the raw copy of as many bytes. */
typedef struct step {
    bench_user *u;
    bench_raw *raw; /* NULL: through the socket */
    int lane;
    bool load;
    uint64_t first_id, bytes;
    uint64_t began, ended;
    kvs_status status;
    kvs_err err;
} step;

static void *step_run(void *arg)
{
    step *x = arg;

    x->bytes = x->u->n * x->u->slot_bytes;
    if (x->raw != NULL && x->bytes > BENCH_RAW_BYTES)
        x->bytes = BENCH_RAW_BYTES;
    bench_user_name(x->u, x->first_id);
    x->began = clock_ns();
    if (x->raw != NULL)
        x->status = bench_raw_copy(x->raw, x->lane, x->load, x->bytes, &x->err);
    else
        x->status = x->load ? bench_user_load(x->u, x->first_id, x->u->n, &x->err)
                            : bench_user_store(x->u, x->first_id, &x->err);
    x->ended = clock_ns();
    return NULL;
}

static kvs_status timed(step *x, double *ret_gbs, kvs_err *err)
{
    (void)step_run(x);
    if (x->status != KVS_OK)
        return kvs_fail(err, x->status, "%s", x->err.msg);
    *ret_gbs = (double)x->bytes / (double)(x->ended - x->began);
    return KVS_OK;
}

/* Both at once: bytes of both over the time from the first begin to the last end. */
static kvs_status timed_both(step *a, step *b, double *ret_gbs, kvs_err *err)
{
    pthread_t t;
    uint64_t began, ended;

    if (pthread_create(&t, NULL, step_run, b) != 0)
        return kvs_fail(err, KVS_E_SYS, "cannot start a thread");
    (void)step_run(a);
    (void)pthread_join(t, NULL);
    if (a->status != KVS_OK || b->status != KVS_OK)
        return kvs_fail(err, a->status != KVS_OK ? a->status : b->status, "%s%s", a->err.msg, b->err.msg);
    began = a->began < b->began ? a->began : b->began;
    ended = a->ended > b->ended ? a->ended : b->ended;
    *ret_gbs = (double)(a->bytes + b->bytes) / (double)(ended - began);
    return KVS_OK;
}

/* Each way right behind its raw copy.  The raw copy is one of at least 128 MiB: a small one would not show the link. */
static kvs_status one_round(bench_user *u, bench_user *other, bench_raw *raw, double gbs[WAYS], double plain[WAYS],
                            kvs_err *err)
{
    bench_user large = {.n = 1, .slot_bytes = u->n * u->slot_bytes}; /* only its size counts */
    kvs_status s = kvs_reset(u->client, u->ns, 0, NULL, BENCH_CALL_MS, err);

    if (large.slot_bytes < UINT64_C(128) << 20)
        large.slot_bytes = UINT64_C(128) << 20;
    large.named_id = 1;
    for (int load = 0; load < 2 && s == KVS_OK; load++) {
        s = timed(&(step){.u = &large, .load = load != 0, .raw = raw}, &plain[load], err);
        if (s == KVS_OK)
            s = timed(&(step){.u = u, .load = load != 0}, &gbs[load], err);
    }
    if (s == KVS_OK)
        s = timed_both(&(step){.u = &large, .load = true, .raw = raw}, &(step){.u = &large, .raw = raw, .lane = 1},
                       &plain[BOTH], err);
    if (s == KVS_OK)
        s = timed_both(&(step){.u = u, .load = true}, &(step){.u = other, .first_id = 1000000}, &gbs[BOTH], err);
    return s;
}

static kvs_status measure(rates *r, const char *socket, const bench_shape *shape, bench_raw *raw, int rounds,
                          uint64_t *ret_slot_bytes, kvs_err *err)
{
    bench_user u = {0}, other = {0};
    kvs_status s = bench_user_open(&u, socket, shape, err);

    r->n = rounds;
    if (s == KVS_OK)
        s = bench_user_open(&other, socket, shape, err);
    for (int i = -1; i < rounds && s == KVS_OK; i++) {
        double gbs[WAYS] = {0}, plain[WAYS] = {0};

        s = one_round(&u, &other, raw, gbs, plain, err);
        for (int w = 0; w < WAYS && i >= 0; w++) {
            r->gbs[w][i] = gbs[w];
            r->raw[w][i] = plain[w];
        }
    }
    *ret_slot_bytes = u.slot_bytes;
    if (u.client != NULL && s == KVS_OK)
        s = kvs_reset(u.client, u.ns, 0, NULL, BENCH_CALL_MS, err); /* room for the next shape */
    bench_user_close(&other);
    bench_user_close(&u);
    return s;
}

static void fractions(const rates *r, int way, double *ret)
{
    for (int i = 0; i < r->n; i++)
        ret[i] = r->gbs[way][i] / r->raw[way][i];
}

/* ---- the sweep ---- */

typedef struct sweep_row {
    const char *path;
    enum { AS_IT_CHOOSES, BY_ENGINE, BY_KERNEL, ROUTES } route; /* of the daemon's movers */
    bench_shape shape;                                          /* n: most blocks; fewer if they are large */
    bool in_quick;
} sweep_row;

#define DAEMON_SLOTS "daemon slots, whole blocks"
#define OWN_BLOCKS   "engine memory, whole blocks"
#define OWN_PAGES    "engine memory, one tensor a layer"
#define PAGES_ENGINE "the same, by copy engine"
#define PAGES_KERNEL "the same, by kernel"
#define PACKED       "the same, packed by the client"
enum { MOST = 6000, SWEEP_BYTES = 450 << 20 };
static const char *const ROUTE_SETTINGS[ROUTES] = {"mover.path=auto", "mover.path=engine", "mover.path=kernel"};
static const sweep_row SWEEP[] = {
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 1, 4, MOST}, false},
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 1, 16, MOST}, true},
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 1, 64, MOST}, true},
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 4, 64, MOST}, false},
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 16, 64, MOST}, false},
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 61, 64, MOST}, true},
    {DAEMON_SLOTS, AS_IT_CHOOSES, {BENCH_DAEMON, 227, 64, MOST}, false},
    {OWN_BLOCKS, AS_IT_CHOOSES, {BENCH_BLOCKS, 1, 64, MOST}, false},
    {OWN_BLOCKS, AS_IT_CHOOSES, {BENCH_BLOCKS, 16, 64, MOST}, false},
    {OWN_BLOCKS, AS_IT_CHOOSES, {BENCH_BLOCKS, 61, 64, MOST}, true},
    {OWN_PAGES, AS_IT_CHOOSES, {BENCH_PAGES, 61, 4, MOST}, false},
    {OWN_PAGES, AS_IT_CHOOSES, {BENCH_PAGES, 61, 16, MOST}, true},
    {OWN_PAGES, AS_IT_CHOOSES, {BENCH_PAGES, 61, 64, MOST}, true},
    {OWN_PAGES, AS_IT_CHOOSES, {BENCH_PAGES, 61, 256, MOST}, false},
    {OWN_PAGES, AS_IT_CHOOSES, {BENCH_PAGES, 16, 1024, MOST}, false},
    {PACKED, AS_IT_CHOOSES, {BENCH_PACK, 61, 4, MOST}, false},
    {PACKED, AS_IT_CHOOSES, {BENCH_PACK, 61, 16, MOST}, true},
    {PACKED, AS_IT_CHOOSES, {BENCH_PACK, 61, 64, MOST}, true},
    {PACKED, AS_IT_CHOOSES, {BENCH_PACK, 61, 256, MOST}, false},
    {PAGES_ENGINE, BY_ENGINE, {BENCH_PAGES, 61, 4, MOST}, false},
    {PAGES_ENGINE, BY_ENGINE, {BENCH_PAGES, 61, 16, MOST}, false},
    {PAGES_ENGINE, BY_ENGINE, {BENCH_PAGES, 61, 64, MOST}, false},
    {PAGES_ENGINE, BY_ENGINE, {BENCH_PAGES, 61, 256, MOST}, false},
    {PAGES_KERNEL, BY_KERNEL, {BENCH_PAGES, 61, 4, MOST}, false},
    {PAGES_KERNEL, BY_KERNEL, {BENCH_PAGES, 61, 16, MOST}, false},
    {PAGES_KERNEL, BY_KERNEL, {BENCH_PAGES, 61, 64, MOST}, false},
    {PAGES_KERNEL, BY_KERNEL, {BENCH_PAGES, 61, 256, MOST}, false},
};
enum { N_SWEEP = sizeof SWEEP / sizeof *SWEEP };

static void add_points(bench_list *l, const sweep_row *row, const bench_shape *shape, uint64_t slot_bytes, rates *r)
{
    for (int w = 0; w < WAYS; w++) {
        double f[MAX_ROUNDS];
        bench_point *p = bench_add_point(l);

        fractions(r, w, f);
        p->path = row->path;
        p->way = WAY_NAMES[w];
        p->piece_bytes = shape->place >= BENCH_PAGES ? slot_bytes / shape->layers : slot_bytes;
        p->block_bytes = slot_bytes;
        p->n_blocks = shape->n;
        p->gbs = clock_percentile(r->gbs[w], (size_t)r->n, 50);
        p->raw = clock_percentile(r->raw[w], (size_t)r->n, 50);
        p->fraction = clock_percentile(f, (size_t)r->n, 50);
        p->low = clock_percentile(f, (size_t)r->n, 25);
        p->high = clock_percentile(f, (size_t)r->n, 75);
    }
}

static kvs_status sweep_one(bench_list *l, const sweep_row *row, const char *socket, bench_raw *raw, bool quick,
                            kvs_err *err)
{
    bench_shape shape = row->shape;
    uint64_t block = (uint64_t)shape.layers * shape.tokens * 1152, slot_bytes = 0;
    rates r;
    kvs_status s;

    if (shape.n > SWEEP_BYTES / block)
        shape.n = (uint32_t)(SWEEP_BYTES / block);
    s = measure(&r, socket, &shape, raw, quick ? 3 : 7, &slot_bytes, err);
    if (s == KVS_OK)
        add_points(l, row, &shape, slot_bytes, &r);
    return s;
}

/* A daemon a route, for its rows. */
static kvs_status sweep(bench_list *l, bench_raw *raw, bool quick, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (int route = 0; route < (quick ? 1 : ROUTES) && s == KVS_OK; route++) {
        const char *const settings[] = {"pool.max_bytes=3GiB", "device.max_region_bytes=8GiB", ROUTE_SETTINGS[route]};
        private_daemon d = {0};

        s = private_start(&d, settings, 3, err);
        for (int i = 0; i < N_SWEEP && s == KVS_OK; i++)
            if ((int)SWEEP[i].route == route && (SWEEP[i].in_quick || !quick))
                s = sweep_one(l, &SWEEP[i], d.socket, raw, quick, err);
        private_stop(&d);
    }
    return s;
}

/* ---- what was promised ---- */

/* Of blocks in one place, moved by one setting of the daemon; NAN: nothing is promised. */
typedef struct promise {
    const char *what, *setting;
    bench_shape shape;
    double each, both;
    bool in_quick;
} promise;

static const promise PROMISES[] = {
    {"checksum on", "pool.checksum=true", {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS}, 0.98, 0.96, true},
    {"checksum on", "pool.checksum=true", {BENCH_DAEMON, SMALL_LAYERS, TOKENS, SMALL_BLOCKS}, 0.96, 0.96, true},
    {"checksum off", "pool.checksum=false", {BENCH_DAEMON, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS}, 0.98, 0.96, false},
    {"checksum off", "pool.checksum=false", {BENCH_DAEMON, SMALL_LAYERS, TOKENS, SMALL_BLOCKS}, 0.96, 0.96, false},
    {"72 KiB pages by kernel", "mover.path=kernel", {BENCH_PAGES, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS}, 0.90, NAN, true},
    {"18 KiB pages by kernel", "mover.path=kernel", {BENCH_PAGES, WHOLE_LAYERS, 16, SMALL_BLOCKS}, 0.86, NAN, true},
};
enum { N_PROMISES = sizeof PROMISES / sizeof *PROMISES };

static void add_rates(bench_list *l, const promise *p, uint64_t slot_bytes, const rates *r)
{
    for (int w = 0; w < WAYS; w++) {
        double f[MAX_ROUNDS], gbs[MAX_ROUNDS], plain[MAX_ROUNDS];
        bench_figure *x =
            bench_add(l, "GB/s", true, w == BOTH ? p->both : p->each, "GPU: %s, %" PRIu32 " x %" PRIu64 " bytes, %s",
                      w == BOTH ? "both at once" : WAY_NAMES[w], p->shape.n, slot_bytes, p->what);

        fractions(r, w, f);
        memcpy(gbs, r->gbs[w], sizeof gbs);
        memcpy(plain, r->raw[w], sizeof plain);
        x->value = clock_percentile(gbs, (size_t)r->n, 50);
        x->plain = clock_percentile(plain, (size_t)r->n, 50);
        x->plain_is = w == BOTH ? "two raw copies" : "one raw copy";
        bench_judge(x, f, (size_t)r->n);
    }
}

/* Promises of one setting follow one another, and share a daemon. */
static kvs_status promised(bench_list *l, bench_raw *raw, bool quick, kvs_err *err)
{
    private_daemon d = {0};
    const char *runs = "";
    kvs_status s = KVS_OK;

    for (int i = 0; i < N_PROMISES && s == KVS_OK; i++) {
        const promise *p = &PROMISES[i];
        const char *const settings[] = {"pool.max_bytes=3GiB", "device.max_region_bytes=8GiB", p->setting};
        uint64_t slot_bytes = 0;
        rates r;

        if (quick && !p->in_quick)
            continue;
        if (strcmp(runs, p->setting) != 0) {
            private_stop(&d);
            runs = p->setting;
            s = private_start(&d, settings, 3, err);
        }
        if (s == KVS_OK)
            s = measure(&r, d.socket, &p->shape, raw, quick ? 5 : MAX_ROUNDS, &slot_bytes, err);
        if (s == KVS_OK)
            add_rates(l, p, slot_bytes, &r);
    }
    private_stop(&d);
    return s;
}

/* ---- all of it ---- */

/* The card's name, as the daemon gives it.  E_UNSUPPORTED: it works on something else. */
static kvs_status ask_card(const private_daemon *d, char card[64], kvs_err *err)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;
    kvs_status s;

    o.path = d->socket;
    s = kvs_connect(&c, &o, err);
    if (s == KVS_OK)
        s = kvs_report_alloc(c, &a, &text, &len, BENCH_CALL_MS, err);
    if (s == KVS_OK)
        s = json_parse(text, len, &doc, err);
    if (s == KVS_OK) {
        const json_node *name = json_member(json_root(doc), "device_name");

        if (name != NULL && json_string(name)[0] != '\0')
            (void)snprintf(card, 64, "%.63s", json_string(name));
        else
            s = kvs_fail(err, KVS_E_UNSUPPORTED, "the daemon works without a GPU here");
    }
    json_destroy(doc);
    kvs_free(text);
    kvs_close(c);
    return s;
}

kvs_status bench_gpu(bench_list *l, bool quick, kvs_err *err)
{
    static const char *const SMALL[] = {"pool.max_bytes=16MiB"};
    private_daemon d = {0};
    bench_raw raw = {0};
    kvs_status s = private_start(&d, SMALL, 1, err);

    if (s == KVS_OK)
        s = ask_card(&d, l->card, err);
    private_stop(&d);
    if (s == KVS_OK)
        s = bench_raw_open(&raw, err);
    if (s == KVS_OK)
        s = promised(l, &raw, quick, err);
    if (s == KVS_OK)
        s = bench_latencies(l, &raw, quick, err);
    if (s == KVS_OK)
        s = bench_engines(l, &raw, quick, err);
    if (s == KVS_OK)
        s = sweep(l, &raw, quick, err);
    bench_raw_close(&raw);
    if (s == KVS_OK)
        s = bench_two(l, quick, err);
    return s == KVS_OK ? bench_pinning(l, quick, err) : s;
}
