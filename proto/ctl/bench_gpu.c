#include "proto/ctl/bench_gpu.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/json.h"
#include "kernels/busy_cuda.h"
#include "proto/ctl/bench_user.h"
#include "proto/ctl/busy.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/private.h"

enum {
    TOKENS = 64,
    WHOLE_LAYERS = 61, /* 4,497,408 bytes a block */
    SMALL_LAYERS = 16, /* 1,179,648 */
    WHOLE_BLOCKS = 200,
    SMALL_BLOCKS = 763, /* about as many bytes */
    ROUNDS = 9,
    TRIPS = 400,
    SHORT_TOKENS = 16, /* 18,432 bytes a page */
    SHORT_BLOCKS = 800,
    ALONE_MS = 500,
    BESIDE_MS = 1000,
    CALL_MS = 60000,
};

/* One timed step: a STORE, a LOAD, or the raw copy of as many bytes. */
typedef struct step {
    bench_user *u;
    bool load, raw;
    uint64_t first_id;
    uint64_t began, ended;
    kvs_status status;
    kvs_err err;
} step;

static void *step_run(void *arg)
{
    step *x = arg;

    if (!x->raw)
        bench_user_name(x->u, x->first_id);
    x->began = clock_ns();
    if (x->raw)
        x->status = bench_user_raw(x->u, x->load, x->u->n * x->u->slot_bytes, &x->err);
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
    *ret_gbs = (double)(x->u->n * x->u->slot_bytes) / (double)(x->ended - x->began);
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
    *ret_gbs = (double)(a->u->n * a->u->slot_bytes + b->u->n * b->u->slot_bytes) / (double)(ended - began);
    return KVS_OK;
}

/* ---- figures ---- */

static gpu_figure *add(bench_gpu_result *r, const char *unit, bool at_least, double target)
{
    gpu_figure *f = &r->figures[r->n < BENCH_GPU_FIGURES ? r->n++ : BENCH_GPU_FIGURES - 1];

    *f = (gpu_figure){.unit = unit, .plain_is = "one raw copy", .p99 = NAN, .target = target, .at_least = at_least};
    return f;
}

static void add_rates(bench_gpu_result *r, const char *name, double *rates, double *plain, double target)
{
    double ratios[ROUNDS];
    gpu_figure *f = add(r, "GB/s", true, target);

    for (int i = 0; i < ROUNDS; i++)
        ratios[i] = rates[i] / plain[i];
    (void)snprintf(f->name, sizeof f->name, "%s", name);
    f->value = clock_percentile(rates, ROUNDS, 50);
    f->plain = clock_percentile(plain, ROUNDS, 50);
    f->judged = clock_percentile(ratios, ROUNDS, 50);
}

/* STORE and LOAD of whole blocks, each right after the raw copy of the same bytes. */
static kvs_status rates_of(bench_gpu_result *r, bench_user *u, const char *how, double target, kvs_err *err)
{
    double rate[2][ROUNDS], plain[2][ROUNDS];
    char name[72];

    for (int i = -2; i < ROUNDS; i++) {
        kvs_status s = kvs_reset(u->client, u->ns, 0, NULL, CALL_MS, err);

        for (int load = 0; load < 2 && s == KVS_OK; load++) {
            double raw_gbs = 0, gbs = 0;

            s = timed(&(step){.u = u, .load = load != 0, .raw = true}, &raw_gbs, err);
            if (s == KVS_OK)
                s = timed(&(step){.u = u, .load = load != 0}, &gbs, err);
            if (i >= 0) {
                rate[load][i] = gbs;
                plain[load][i] = raw_gbs;
            }
        }
        if (s != KVS_OK)
            return s;
    }
    (void)snprintf(name, sizeof name, "GPU: STORE, %" PRIu32 " x %" PRIu64 " bytes, %s", u->n, u->slot_bytes, how);
    add_rates(r, name, rate[0], plain[0], target);
    (void)snprintf(name, sizeof name, "GPU: LOAD, %" PRIu32 " x %" PRIu64 " bytes, %s", u->n, u->slot_bytes, how);
    add_rates(r, name, rate[1], plain[1], target);
    return KVS_OK;
}

static kvs_status both_ways(bench_gpu_result *r, bench_user *a, bench_user *b, const char *how, kvs_err *err)
{
    double rate[ROUNDS], plain[ROUNDS];
    char name[72];

    for (int i = -2; i < ROUNDS; i++) {
        double raw_gbs = 0, gbs = 0;
        kvs_status s = kvs_reset(a->client, a->ns, 0, NULL, CALL_MS, err);

        if (s == KVS_OK)
            s = bench_user_store(a, 0, err);
        if (s == KVS_OK)
            s = timed_both(&(step){.u = a, .load = true, .raw = true}, &(step){.u = b, .raw = true}, &raw_gbs, err);
        if (s == KVS_OK)
            s = timed_both(&(step){.u = a, .load = true}, &(step){.u = b, .first_id = 1000000}, &gbs, err);
        if (s != KVS_OK)
            return s;
        if (i >= 0) {
            rate[i] = gbs;
            plain[i] = raw_gbs;
        }
    }
    (void)snprintf(name, sizeof name, "GPU: LOAD and STORE at once, %s", how);
    add_rates(r, name, rate, plain, 0.96);
    r->figures[r->n - 1].plain_is = "two raw copies";
    return KVS_OK;
}

/* One block over the socket, in turn with the raw copy of one block. */
static kvs_status latency(bench_gpu_result *r, bench_user *u, const char *how, kvs_err *err)
{
    static double trips[TRIPS], plain[TRIPS];
    gpu_figure *f;
    kvs_status s = bench_user_store(u, 0, err);

    if (s == KVS_E_PARTIAL) /* they are there already */
        s = KVS_OK;
    for (int i = 0; i < TRIPS && s == KVS_OK; i++) {
        uint64_t at = clock_ns();

        s = bench_user_raw(u, true, u->slot_bytes, err);
        plain[i] = (double)(clock_ns() - at) / 1e3;
        if (s != KVS_OK)
            return s;
        at = clock_ns();
        s = bench_user_load(u, 0, 1, err);
        trips[i] = (double)(clock_ns() - at) / 1e3;
    }
    if (s != KVS_OK)
        return s;
    f = add(r, "us", false, 40);
    (void)snprintf(f->name, sizeof f->name, "GPU: LOAD of one block, above the raw copy, %s", how);
    f->p99 = clock_percentile(trips, TRIPS, 99);
    f->value = clock_percentile(trips, TRIPS, 50);
    f->plain = clock_percentile(plain, TRIPS, 50);
    f->judged = f->value - f->plain;
    return KVS_OK;
}

/* Stores new blocks as fast as it can, until it is told to stop. */
typedef struct flood {
    bench_user *u;
    _Atomic bool stop, failed;
    kvs_err err;
} flood;

static void *flood_run(void *arg)
{
    flood *f = arg;

    for (uint64_t id = 5000000; !f->stop; id += f->u->n)
        if (bench_user_store(f->u, id, &f->err) != KVS_OK) {
            f->failed = true;
            break;
        }
    return NULL;
}

static kvs_status trips_of(bench_user *u, double *ret, double *ret_p99, kvs_err *err)
{
    static double trips[TRIPS];
    kvs_status s = KVS_OK;

    for (int i = 0; i < TRIPS && s == KVS_OK; i++) {
        uint64_t at = clock_ns();

        s = bench_user_load(u, 0, 1, err);
        trips[i] = (double)(clock_ns() - at) / 1e3;
    }
    if (s != KVS_OK)
        return s;
    *ret_p99 = clock_percentile(trips, TRIPS, 99);
    *ret = clock_percentile(trips, TRIPS, 50);
    return KVS_OK;
}

/* One block loaded again and again while the other direction is as busy as it can be. */
static kvs_status latency_in_flood(bench_gpu_result *r, bench_user *u, bench_user *other, const char *how, kvs_err *err)
{
    flood x = {.u = other};
    double idle = 0, beside = 0, p99 = 0;
    pthread_t t;
    gpu_figure *f;
    kvs_status s = trips_of(u, &idle, &p99, err);

    if (s != KVS_OK)
        return s;
    if (pthread_create(&t, NULL, flood_run, &x) != 0)
        return kvs_fail(err, KVS_E_SYS, "cannot start a thread");
    s = trips_of(u, &beside, &p99, err);
    x.stop = true;
    (void)pthread_join(t, NULL);
    if (s == KVS_OK && x.failed)
        s = kvs_fail(err, x.err.status, "flood: %.150s", x.err.msg);
    if (s != KVS_OK)
        return s;
    f = add(r, "us", false, 1.5 * idle + 100);
    (void)snprintf(f->name, sizeof f->name, "GPU: LOAD of one block in a STORE flood, %s", how);
    f->plain_is = "the same, idle";
    f->value = f->judged = beside;
    f->p99 = p99;
    f->plain = idle;
    return KVS_OK;
}

/* ---- what it costs others ---- */

static kvs_status attend(void *ud, bool (*on_call)(void *call_ud), void *call_ud, kvs_err *err)
{
    static const busy_cuda_shape SHAPE = {128, 128, 1024, 64};

    (void)ud;
    return busy_cuda_run(0, &SHAPE, on_call, call_ud, err);
}

/* How fast the busy process is alone, and while blocks go out and come back. */
static kvs_status slow_down(bench_gpu_result *r, bench_user *u, busy *b, const char *how, kvs_err *err)
{
    kvs_status s = busy_go(b, err);
    double alone = 0;

    if (s == KVS_OK)
        s = busy_speed(b, ALONE_MS, &alone, err);
    for (int load = 0; load < 2 && s == KVS_OK; load++) {
        uint64_t began = clock_ns(), calls = busy_calls(b);
        gpu_figure *f;
        double beside;

        while (s == KVS_OK && clock_ns() - began < BESIDE_MS * UINT64_C(1000000)) {
            if (load == 0)
                s = kvs_reset(u->client, u->ns, 0, NULL, CALL_MS, err);
            if (s == KVS_OK)
                s = load == 0 ? bench_user_store(u, 0, err) : bench_user_load(u, 0, u->n, err);
        }
        beside = (double)(busy_calls(b) - calls) / (double)(clock_ns() - began) * 1e9;
        f = add(r, "calls a second", true, 0.95);
        (void)snprintf(f->name, sizeof f->name, "GPU: a busy process beside %s of %" PRIu32 " x %" PRIu64 " bytes, %s",
                       load == 0 ? "STORE" : "LOAD", u->n, u->slot_bytes, how);
        f->plain_is = "it alone";
        f->value = beside;
        f->plain = alone;
        f->judged = beside / alone;
    }
    return s;
}

/* ---- daemons ---- */

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
        s = kvs_report_alloc(c, &a, &text, &len, CALL_MS, err);
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

static kvs_status run_daemon(bench_gpu_result *r, bool checksum, kvs_err *err)
{
    const char *const settings[] = {"pool.max_bytes=3GiB", checksum ? "pool.checksum=true" : "pool.checksum=false",
                                    "device.max_region_bytes=8GiB"};
    const char *how = checksum ? "checksum on" : "checksum off";
    private_daemon d = {0};
    bench_user whole = {0}, other = {0}, small = {0};
    kvs_status s = private_start(&d, settings, 3, err);

    if (s == KVS_OK)
        s = bench_user_open(&whole, d.socket, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS, false, err);
    if (s == KVS_OK)
        s = rates_of(r, &whole, how, 0.98, err);
    if (s == KVS_OK)
        s = latency(r, &whole, how, err);
    if (s == KVS_OK)
        s = bench_user_open(&other, d.socket, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS, false, err);
    if (s == KVS_OK)
        s = latency_in_flood(r, &whole, &other, how, err);
    if (s == KVS_OK)
        s = both_ways(r, &whole, &other, how, err);
    if (s == KVS_OK)
        s = kvs_reset(whole.client, NULL, 0, NULL, CALL_MS, err);
    if (s == KVS_OK)
        s = bench_user_open(&small, d.socket, SMALL_LAYERS, TOKENS, SMALL_BLOCKS, false, err);
    if (s == KVS_OK)
        s = rates_of(r, &small, how, 0.96, err);
    bench_user_close(&small);
    bench_user_close(&other);
    bench_user_close(&whole);
    private_stop(&d);
    return s;
}

/* One tensor a layer, by the daemon's kernel, on a GPU that does nothing else. */
static kvs_status run_pages(bench_gpu_result *r, kvs_err *err)
{
    static const char *const settings[] = {"pool.max_bytes=3GiB", "device.max_region_bytes=8GiB",
                                           "device.max_import_bytes=8GiB", "mover.path=kernel",
                                           "mover.kernel_blocks=8"};
    static const char *const how = "pages of 72 KiB by 8 CTAs", *const how_short = "pages of 18 KiB by 8 CTAs";
    private_daemon d = {0};
    bench_user pages = {0}, shorter = {0};
    kvs_status s = private_start(&d, settings, 5, err);

    if (s == KVS_OK)
        s = bench_user_open(&pages, d.socket, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS, true, err);
    if (s == KVS_OK)
        s = rates_of(r, &pages, how, 0.90, err);
    if (s == KVS_OK)
        s = kvs_reset(pages.client, NULL, 0, NULL, CALL_MS, err);
    if (s == KVS_OK)
        s = bench_user_open(&shorter, d.socket, WHOLE_LAYERS, SHORT_TOKENS, SHORT_BLOCKS, true, err);
    if (s == KVS_OK)
        s = rates_of(r, &shorter, how_short, 0.86, err);
    bench_user_close(&shorter);
    bench_user_close(&pages);
    private_stop(&d);
    return s;
}

static kvs_status run_beside(bench_gpu_result *r, busy *b, kvs_err *err)
{
    static const char *const settings[] = {"pool.max_bytes=3GiB", "device.max_region_bytes=8GiB"};
    private_daemon d = {0};
    bench_user whole = {0};
    kvs_status s = private_start(&d, settings, 2, err);

    if (s == KVS_OK)
        s = bench_user_open(&whole, d.socket, WHOLE_LAYERS, TOKENS, WHOLE_BLOCKS, false, err);
    if (s == KVS_OK)
        s = slow_down(r, &whole, b, "checksum on", err);
    bench_user_close(&whole);
    private_stop(&d);
    return s;
}

kvs_status bench_gpu(bench_gpu_result *ret, kvs_err *err)
{
    static const char *const SMALL[] = {"pool.max_bytes=16MiB"};
    private_daemon d = {0};
    busy b = {0};
    kvs_status s = private_start(&d, SMALL, 1, err);

    *ret = (bench_gpu_result){.n = 0};
    if (s == KVS_OK)
        s = ask_card(&d, ret->card, err);
    private_stop(&d);
    if (s == KVS_OK)
        s = busy_start(&b, attend, NULL, err); /* before this process knows the GPU */
    if (s == KVS_OK)
        s = run_daemon(ret, true, err);
    if (s == KVS_OK)
        s = run_daemon(ret, false, err);
    if (s == KVS_OK)
        s = run_pages(ret, err);
    if (s == KVS_OK)
        s = run_beside(ret, &b, err);
    busy_stop(&b);
    return s;
}
