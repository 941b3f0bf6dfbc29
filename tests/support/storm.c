#include "tests/support/storm.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "config/json.h"
#include "proto/client/kvstride.h"
#include "tests/support/random.h"
#include "tests/support/raw_client.h"

enum {
    OWN = 4,    /* private slots of an engine in each layout */
    SLOTS = 10, /* of its region: the rest is for blocks of the daemon's choice */
    CHAIN = 8,
    TOKENS = 4,
    ROW = 1152,
    PAGE = TOKENS * ROW,
    MAX_ENGINES = 32,
    MAX_THREADS = 8,
    HUNG_MS = 60000,
    SCRATCH = 1 << 16,
    EMPTY = 0x99,
};

typedef struct board { /* shared by all processes */
    atomic_ullong ops, loads, stores;
    atomic_bool stop, failed;
    char why[512];
    /* Tokens of somebody's regions, for others to sit down in.  Written without order: half of one and half of another
     * is the token of none. */
    _Atomic uint64_t token[STORM_MAX_LAYOUTS][2];
} board;

typedef struct yard { /* an engine's things in one layout */
    kvs_ns *ns;
    kvs_region *g;
    uint8_t *base;
    uint64_t slot_bytes, stride;
    kvs_slot own[OWN];
    bool bare; /* it may have lost its slots: to be made anew */
} yard;

typedef struct engine {
    const storm_plan *plan;
    board *board;
    const char *socket;
    rnd r;
    bool hostile, failed, lost; /* lost: the daemon was away, or does not know our things any more */
    kvs_client *c;
    uint64_t generation, tick;
    uint32_t n_layouts;
    yard yards[STORM_MAX_LAYOUTS];
    kvs_region *scratch;
    uint8_t *paper;
    kvs_err err;
} engine;

/* ---- keys and what they name ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

/* The same keys in every layout, so that a mix-up of namespaces would be found. */
static void key_of(uint8_t *key, uint64_t n)
{
    for (uint64_t i = 0; i < 4; i++) {
        uint64_t word = mix(n * 4 + i + 1);

        memcpy(key + 8 * i, &word, 8);
    }
}

static void keys_of(uint8_t *keys, uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        key_of(keys + (size_t)i * KVS_KEY_BYTES, first + i);
}

static uint64_t word_of(uint32_t layout, uint64_t key, uint64_t i)
{
    return mix((key << 20) + ((uint64_t)layout << 60) + i);
}

static void content_put(uint8_t *at, uint64_t bytes, uint32_t layout, uint64_t key)
{
    for (uint64_t i = 0; i < bytes / 8; i++) {
        uint64_t word = word_of(layout, key, i);

        memcpy(at + 8 * i, &word, 8);
    }
}

/* The first word that differs; UINT64_MAX: none. */
static uint64_t content_differs(const uint8_t *at, uint64_t bytes, uint32_t layout, uint64_t key)
{
    for (uint64_t i = 0; i < bytes / 8; i++) {
        uint64_t word = word_of(layout, key, i);

        if (memcmp(at + 8 * i, &word, 8) != 0)
            return i;
    }
    return UINT64_MAX;
}

/* Layouts 0..3 have 1..4 planes. */
uint64_t storm_slot_bytes(uint32_t layout)
{
    return (uint64_t)(layout + 1) * PAGE;
}

static kvs_status open_layout(kvs_client *c, uint32_t layout, bool hostile, kvs_ns **ret, kvs_err *err)
{
    kvs_plane planes[STORM_MAX_LAYOUTS];
    kvs_namespace desc;
    kvs_status s = kvs_namespace_mla(hostile ? "hostile" : "storm", "r", KVS_FORMAT_mla_bf16, layout + 1, TOKENS,
                                     planes, &desc, err);

    return s == KVS_OK ? kvs_open(c, &desc, ret, 0, err) : s;
}

/* ---- an engine ---- */

static void fail(engine *e, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail(engine *e, const char *format, ...)
{
    va_list ap;

    e->failed = true;
    if (atomic_exchange(&e->board->failed, true))
        return; /* the first one is told */
    va_start(ap, format);
    (void)vsnprintf(e->board->why, sizeof e->board->why, format, ap);
    va_end(ap);
}

/* E_STATE is the answer of a daemon that is shutting down. */
static bool is_away(const engine *e, kvs_status s)
{
    return s == KVS_E_AWAY || s == KVS_E_STALE ||
           (s == KVS_E_STATE && e->plan->daemon_kills > 0 && strstr(e->err.msg, "shutting down") != NULL);
}

/* True: the reply has results.  Everything that a random life may meet is taken as it is, anything else is a fault. */
static bool answered(engine *e, kvs_status s, const char *what)
{
    switch (is_away(e, s) ? KVS_E_AWAY : s) {
    case KVS_OK:
    case KVS_E_PARTIAL:
        return true;
    case KVS_E_DEADLINE: /* the slots are the daemon's until the hardware has stopped */
        s = kvs_settle(e->c, HUNG_MS / 2, &e->err);
        if (s != KVS_OK && s != KVS_E_AWAY)
            fail(e, "%s: settle: %s %s", what, kvs_status_name(s), e->err.msg);
        return false;
    case KVS_E_BUSY:
    case KVS_E_CANCELLED:
        return false;
    case KVS_E_AWAY:
        e->lost = true;
        if (e->plan->daemon_kills == 0)
            fail(e, "%s: %s %s", what, kvs_status_name(s), e->err.msg);
        return false;
    default:
        if (!e->hostile)
            fail(e, "%s: %s %s", what, kvs_status_name(s), e->err.msg);
        return false;
    }
}

static bool is_one_of(kvs_status s, const kvs_status *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s == list[i])
            return true;
    return false;
}
#define ONE_OF(s, ...)                                                                                                 \
    is_one_of((s), (const kvs_status[]){__VA_ARGS__}, sizeof((const kvs_status[]){__VA_ARGS__}) / sizeof(kvs_status))

/* Status of an item.  A region that came back after a restart may have lost slots. */
static void check_item(engine *e, const char *what, kvs_status s, bool expected)
{
    if (expected || e->hostile)
        return;
    if (e->plan->daemon_kills > 0 && ONE_OF(s, KVS_E_STALE, KVS_E_STATE, KVS_E_AWAY))
        e->lost = true;
    else
        fail(e, "%s: an item is %s", what, kvs_status_name(s));
}

static uint8_t *at(const yard *y, kvs_slot s)
{
    return y->base + s.slot * y->stride;
}

static uint32_t some_timeout(engine *e)
{
    return rnd_below(&e->r, 8) == 0 ? 1 + (uint32_t)rnd_below(&e->r, 3) : 0;
}

static kvs_status yard_open(engine *e, uint32_t layout)
{
    yard *y = &e->yards[layout];
    kvs_region_info info;
    uint64_t bytes;
    void *base;
    kvs_status s = open_layout(e->c, layout, e->hostile, &y->ns, &e->err);

    y->bare = true; /* until all of it is there */
    if (s == KVS_OK)
        s = kvs_region_create(y->ns, 0, SLOTS, &y->g, 0, &e->err);
    if (s == KVS_OK)
        s = kvs_region_map(y->g, &base, &bytes, &e->err);
    if (s == KVS_OK)
        s = kvs_slot_take(y->g, OWN, y->own, 0, &e->err);
    if (s != KVS_OK)
        return s;
    y->base = base;
    kvs_region_get(y->g, &info);
    for (int i = 0; i < 2 && !e->hostile; i++) {
        uint64_t half;

        memcpy(&half, info.token + 8 * i, 8);
        atomic_store(&e->board->token[layout][i], half);
    }
    y->stride = info.slot_stride;
    y->slot_bytes = storm_slot_bytes(layout);
    y->bare = false;
    return KVS_OK;
}

/* A request that is over may be on its way back still: then once more. */
static void close_region(engine *e, kvs_region *g, const char *what)
{
    uint64_t end = raw_now_ms() + HUNG_MS / 4;
    kvs_status s;

    while ((s = kvs_region_close(g, 0, &e->err)) == KVS_E_BUSY && raw_now_ms() < end)
        (void)kvs_settle(e->c, HUNG_MS / 4, NULL);
    if (s == KVS_E_BUSY)
        fail(e, "%s stays in use: %s", what, e->err.msg);
    else
        (void)answered(e, s, what);
}

static void yard_close(engine *e, uint32_t layout)
{
    yard *y = &e->yards[layout];

    if (y->g)
        close_region(e, y->g, "region_close");
    y->g = NULL;
}

static kvs_status settle_down(engine *e)
{
    kvs_status s = KVS_OK;
    uint64_t bytes;
    void *paper;

    for (uint32_t i = 0; i < e->n_layouts && s == KVS_OK; i++) {
        if (e->yards[i].bare)
            yard_close(e, i);
        s = e->yards[i].g ? KVS_OK : yard_open(e, i);
    }
    if (s == KVS_OK && !e->scratch) {
        s = kvs_scratch_create(e->c, 0, SCRATCH, &e->scratch, 0, &e->err);
        if (s == KVS_OK)
            s = kvs_region_map(e->scratch, &paper, &bytes, &e->err); /* memory of ours, whatever the daemon does */
        if (s == KVS_OK)
            e->paper = paper;
    }
    return s;
}

static kvs_status connect_engine(engine *e)
{
    kvs_options o = KVS_OPTIONS_INIT;

    o.path = e->socket;
    o.name = e->hostile ? "hostile" : "engine";
    o.backoff_min_ms = 2;
    o.backoff_max_ms = 20;
    o.flags = KVS_CONNECT_LAZY;
    return kvs_connect(&e->c, &o, &e->err);
}

/* A handle of its own, unless it works on another one's. */
static bool engine_open(engine *e)
{
    kvs_status s = e->c ? KVS_OK : connect_engine(e);

    if (s == KVS_OK)
        s = kvs_wait_up(e->c, 0, HUNG_MS / 2, &e->err);
    e->generation = s == KVS_OK ? kvs_generation(e->c) : 0;
    if (s == KVS_OK)
        s = settle_down(e);
    e->lost = s != KVS_OK && is_away(e, s);
    if (s != KVS_OK && !(e->lost && e->plan->daemon_kills > 0))
        fail(e, "open: %s %s", kvs_status_name(s), e->err.msg);
    return !e->failed;
}

/* The daemon was away: what it takes back is used on, what it does not is made anew. */
static void come_back(engine *e)
{
    kvs_region_info info;
    kvs_status s;

    for (int tries = 0; tries < 5000 && e->lost && !e->failed && !atomic_load(&e->board->stop); tries++) {
        s = kvs_wait_up(e->c, 0, HUNG_MS / 2, &e->err);
        if (s != KVS_OK) {
            fail(e, "the daemon is not found again: %s %s", kvs_status_name(s), e->err.msg);
            return;
        }
        e->lost = false;
        if (e->generation == kvs_generation(e->c)) /* not away, but something of ours is stale */
            for (uint32_t i = 0; i < e->n_layouts; i++)
                yard_close(e, i);
        e->generation = kvs_generation(e->c);
        for (uint32_t i = 0; i < e->n_layouts; i++) {
            if (!e->yards[i].g)
                continue;
            kvs_region_get(e->yards[i].g, &info);
            if (info.state != KVS_OK || e->yards[i].bare)
                yard_close(e, i);
        }
        if (e->scratch) {
            kvs_region_get(e->scratch, &info);
            if (info.state != KVS_OK) {
                (void)kvs_region_close(e->scratch, 0, NULL);
                e->scratch = NULL;
            }
        }
        s = settle_down(e);
        e->lost = s != KVS_OK && is_away(e, s);
        if (s == KVS_E_STATE && e->lost)
            (void)nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL); /* it ends soon */
        else if (e->lost)
            continue;
        else if (s != KVS_OK)
            fail(e, "the daemon is back, but: %s %s", kvs_status_name(s), e->err.msg);
    }
}

/* ---- what engines do ---- */

typedef struct pick { /* n keys of one chain */
    uint32_t layout, n, depth;
    uint64_t first;
    uint8_t keys[OWN * KVS_KEY_BYTES], parent[KVS_KEY_BYTES];
} pick;

static yard *pick_keys(engine *e, pick *p)
{
    uint64_t chain = rnd_below(&e->r, e->plan->chains);

    p->layout = (uint32_t)rnd_below(&e->r, e->n_layouts);
    p->depth = (uint32_t)rnd_below(&e->r, CHAIN);
    p->n = 1 + (uint32_t)rnd_below(&e->r, OWN);
    p->n = p->n < CHAIN - p->depth ? p->n : CHAIN - p->depth;
    p->first = chain * CHAIN + p->depth;
    keys_of(p->keys, p->first, p->n);
    key_of(p->parent, p->first - 1);
    return &e->yards[p->layout];
}

static kvs_store_args store_args(const pick *p, const yard *y, kvs_region *g, const kvs_slot *slots,
                                 kvs_status *results)
{
    return (kvs_store_args){.ns = y->ns,
                            .region = g,
                            .n = p->n,
                            .first_depth = p->depth,
                            .parent = p->depth > 0 ? p->parent : NULL,
                            .keys = p->keys,
                            .slots = slots,
                            .results = results};
}

static void check_stored(engine *e, const pick *p, const kvs_status *results)
{
    for (uint32_t i = 0; i < p->n; i++) {
        check_item(
            e, "store", results[i],
            ONE_OF(results[i], KVS_OK, KVS_E_EXISTS, KVS_E_BUSY, KVS_E_NO_SPACE, KVS_E_CANCELLED, KVS_E_DEADLINE));
        if (results[i] == KVS_OK)
            atomic_fetch_add(&e->board->stores, 1);
    }
}

static void fill(const pick *p, const yard *y, const kvs_slot *slots)
{
    for (uint32_t i = 0; i < p->n; i++)
        content_put(at(y, slots[i]), y->slot_bytes, p->layout, p->first + i);
}

static void compare(engine *e, const pick *p, uint32_t i, const uint8_t *bytes, const char *what)
{
    uint64_t word = content_differs(bytes, storm_slot_bytes(p->layout), p->layout, p->first + i);

    atomic_fetch_add(&e->board->loads, 1);
    if (word != UINT64_MAX && !e->hostile)
        fail(e, "%s: layout %u key %" PRIu64 ": wrong bytes at word %" PRIu64, what, p->layout, p->first + i, word);
}

static void reseat(engine *e, yard *y)
{
    kvs_status results[OWN];
    kvs_status s = kvs_slot_drop(y->g, y->own, OWN, NULL, results, 0, &e->err);

    y->bare = true;
    if (!answered(e, s, "slot_drop")) {
        e->lost = true; /* whose they are is not known: come_back makes the yard anew */
        return;
    }
    for (uint32_t i = 0; i < OWN; i++)
        check_item(e, "slot_drop", results[i], results[i] == KVS_OK);
    if (e->failed || e->lost)
        return;
    s = kvs_slot_take(y->g, OWN, y->own, 0, &e->err);
    y->bare = !answered(e, s, "slot_take");
    e->lost = e->lost || y->bare;
}

static void do_store(engine *e)
{
    kvs_status results[OWN];
    pick p;
    yard *y = pick_keys(e, &p);
    kvs_store_args a = store_args(&p, y, y->g, y->own, results);
    bool keep = rnd_below(&e->r, 8) == 0;

    fill(&p, y, y->own);
    a.flags = keep ? KVS_STORE_KEEP : 0;
    if (answered(e, kvs_store(&a, keep ? 0 : some_timeout(e), &e->err), "store"))
        check_stored(e, &p, results);
    if (keep && !e->lost && !e->failed)
        reseat(e, y);
}

static kvs_load_args load_args(const pick *p, const yard *y, kvs_load_result *results)
{
    return (kvs_load_args){.ns = y->ns,
                           .region = y->g,
                           .n = p->n,
                           .first_depth = p->depth,
                           .keys = p->keys,
                           .slots = y->own,
                           .results = results};
}

static void check_loaded(engine *e, const pick *p, const yard *y, const kvs_load_result *results)
{
    for (uint32_t i = 0; i < p->n; i++) {
        kvs_status s = results[i].status;
        const uint8_t *to = at(y, y->own[i]);

        check_item(e, "load", s, ONE_OF(s, KVS_OK, KVS_E_NOT_FOUND, KVS_E_BUSY, KVS_E_CANCELLED, KVS_E_DEADLINE));
        if (s == KVS_OK)
            compare(e, p, i, to, "load");
        for (uint64_t k = 0; s == KVS_E_NOT_FOUND && !e->hostile && k < y->slot_bytes; k++)
            if (to[k] != EMPTY) {
                fail(e, "load: a slot was written although its key was not found");
                return;
            }
    }
}

static void empty(const pick *p, const yard *y)
{
    for (uint32_t i = 0; i < p->n; i++)
        memset(at(y, y->own[i]), EMPTY, y->slot_bytes);
}

static void do_load(engine *e)
{
    kvs_load_result results[OWN];
    pick p;
    yard *y = pick_keys(e, &p);
    kvs_load_args a = load_args(&p, y, results);

    empty(&p, y);
    if (answered(e, kvs_load(&a, some_timeout(e), &e->err), "load"))
        check_loaded(e, &p, y, results);
}

/* Slots that the daemon chose: compared, then given back. */
static void take_chosen(engine *e, const pick *p, const yard *y, const kvs_load_result *results)
{
    for (uint32_t i = 0; i < p->n; i++) {
        kvs_status s = results[i].status, dropped = KVS_OK;

        check_item(e, "load any", s,
                   ONE_OF(s, KVS_OK, KVS_E_NOT_FOUND, KVS_E_BUSY, KVS_E_NO_SPACE, KVS_E_CANCELLED, KVS_E_DEADLINE));
        if (s != KVS_OK)
            continue;
        compare(e, p, i, at(y, results[i].slot), "load any");
        if (answered(e, kvs_slot_drop(y->g, &results[i].slot, 1, NULL, &dropped, 0, &e->err), "slot_drop"))
            check_item(e, "slot_drop of a shared one", dropped, dropped == KVS_OK);
    }
}

static void do_load_any(engine *e)
{
    kvs_load_result results[OWN];
    pick p;
    yard *y = pick_keys(e, &p);
    kvs_load_args a = load_args(&p, y, results);

    a.slots = NULL;
    if (answered(e, kvs_load(&a, some_timeout(e), &e->err), "load any"))
        take_chosen(e, &p, y, results);
}

static void do_lookup(engine *e)
{
    uint8_t states[OWN];
    uint32_t hits = 0;
    pick p;
    const yard *y = pick_keys(e, &p);

    if (answered(e, kvs_lookup(y->ns, p.keys, p.n, &hits, states, 0, &e->err), "lookup") && hits > p.n)
        fail(e, "lookup: %u hits of %u keys", hits, p.n);
}

static void do_lease(engine *e)
{
    kvs_load_result results[OWN];
    kvs_lease lease;
    pick p;
    yard *y = pick_keys(e, &p);
    kvs_ns *ns[1] = {y->ns};
    kvs_reserve_args r = {.ns = ns, .n_ns = 1, .n = p.n, .keys = p.keys, .max_loads = 1, .ttl_ms = 5000};
    kvs_load_args a = load_args(&p, y, results);
    kvs_status s = kvs_reserve(&r, &lease, 0, &e->err);

    if (s == KVS_E_LIMIT || !answered(e, s, "reserve") || lease.n_leased == 0)
        return;
    p.n = a.n = lease.n_leased;
    a.lease = &lease;
    empty(&p, y);
    s = kvs_load(&a, 0, &e->err);
    if (s != KVS_E_NOT_FOUND && answered(e, s, "load by lease")) /* a RESET ends leases */
        check_loaded(e, &p, y, results);
    if (rnd_below(&e->r, 4) == 0)
        return; /* left to its time or to the end of the connection */
    s = kvs_release(e->c, &lease, 0, &e->err);
    if (s != KVS_E_NOT_FOUND)
        (void)answered(e, s, "release");
}

static void do_residency(engine *e)
{
    kvs_reset_result reset;
    kvs_status results[OWN];
    pick p;
    yard *y = pick_keys(e, &p);

    switch (rnd_below(&e->r, 8)) {
    case 0:
        (void)answered(e, kvs_pin(y->ns, p.keys, 1, results, 0, &e->err), "pin");
        break;
    case 1:
    case 2:
        (void)answered(e, kvs_unpin(y->ns, p.keys, p.n, results, 0, &e->err), "unpin");
        break;
    case 3:
    case 4:
    case 5:
    case 6:
        (void)answered(e, kvs_drop(y->ns, p.keys, p.n, results, 0, &e->err), "drop");
        break;
    default:
        if (rnd_below(&e->r, 8) == 0)
            (void)answered(e, kvs_reset(e->c, y->ns, (uint32_t)rnd_below(&e->r, 2), &reset, 0, &e->err), "reset");
    }
}

/* A store and a load behind counters that may be reached, be cancelled, or never come. */
static void do_cancel(engine *e)
{
    kvs_load_result loaded[OWN];
    kvs_status stored[OWN];
    kvs_request *r = NULL;
    uint32_t outcome;
    pick p;
    yard *y = pick_keys(e, &p);
    bool load = rnd_below(&e->r, 2) == 0;
    kvs_mark after = {(uint32_t)rnd_below(&e->r, 4), 0, ++e->tick},
             signal = {(uint32_t)rnd_below(&e->r, 4), 0, e->tick};
    kvs_store_args sa = store_args(&p, y, y->g, y->own, stored);
    kvs_load_args la = load_args(&p, y, loaded);
    kvs_status s;

    if (load)
        empty(&p, y);
    else
        fill(&p, y, y->own);
    sa.after = la.after = rnd_below(&e->r, 2) ? &after : NULL;
    sa.signal = la.signal = &signal;
    s = load ? kvs_submit_load(&la, &r, 0, &e->err) : kvs_submit_store(&sa, &r, 0, &e->err);
    if (!answered(e, s, "submit"))
        return;
    if (rnd_below(&e->r, 2) == 0)
        (void)kvs_counter_set(e->c, after.counter, after.value, NULL);
    if (sa.after != NULL || rnd_below(&e->r, 2) == 0) {
        s = kvs_cancel(r, &outcome, 0, &e->err);
        (void)answered(e, s, "cancel");
    } else {
        (void)answered(e, kvs_wait(r, 0, &e->err), "wait");
    }
    s = kvs_request_end(r, &e->err);
    (void)kvs_counter_set(e->c, after.counter, after.value, NULL); /* a counter only grows */
    if (!answered(e, s, "end"))
        return;
    if (load)
        check_loaded(e, &p, y, loaded);
    else
        check_stored(e, &p, stored);
}

/* The same keys twice at once, from two slots, and a load of them behind the second. */
static void do_pipeline(engine *e)
{
    kvs_status first[OWN], second[OWN];
    kvs_load_result loaded[OWN];
    kvs_request *r[3] = {NULL, NULL, NULL};
    kvs_status s[3];
    pick p;
    yard *y = pick_keys(e, &p);
    kvs_slot other[1] = {y->own[OWN - 1]};
    kvs_mark signal = {7, 0, ++e->tick}, after = {7 | KVS_COUNTER_DAEMON, 0, e->tick};
    kvs_store_args a, b;
    kvs_load_args l;

    p.n = 1;
    a = store_args(&p, y, y->g, y->own, first);
    b = store_args(&p, y, y->g, other, second);
    l = load_args(&p, y, loaded);
    l.slots = NULL;
    b.signal = &signal;
    l.after = &after;
    fill(&p, y, y->own);
    fill(&p, y, other);
    s[0] = kvs_submit_store(&a, &r[0], 0, &e->err);
    s[1] = kvs_submit_store(&b, &r[1], 0, &e->err);
    s[2] = kvs_submit_load(&l, &r[2], 0, &e->err);
    for (int i = 0; i < 3; i++) {
        if (s[i] == KVS_OK)
            (void)answered(e, kvs_wait(r[i], 0, &e->err), "wait");
        s[i] = s[i] == KVS_OK ? kvs_request_end(r[i], &e->err) : s[i];
    }
    if (answered(e, s[0], "pipelined store"))
        check_stored(e, &p, first);
    if (answered(e, s[1], "pipelined store"))
        check_stored(e, &p, second);
    if (answered(e, s[2], "pipelined load"))
        take_chosen(e, &p, y, loaded);
}

/* The last two of the block's tokens ask, and see ones. */
static void do_extend(engine *e, const yard *y, const kvs_decode_call *call, int32_t length, int32_t table,
                      uint16_t *out)
{
    const int32_t starts[2] = {0, 2};
    kvs_call_result extended;
    kvs_extend_args a = {.ns = y->ns,
                         .region = y->g,
                         .n_seqs = 1,
                         .table_width = 1,
                         .n_tokens = 2,
                         .h_q = 1,
                         .n_calls = 1,
                         .q_start = starts,
                         .seq_len = &length,
                         .block_table = &table,
                         .calls = call,
                         .results = &extended};

    memset(out, 0, 2048);
    if (!answered(e, kvs_extend(&a, some_timeout(e), &e->err), "extend") || extended.status != KVS_OK)
        return;
    for (uint32_t i = 0; i < 1024 && !e->hostile; i++)
        if (out[i] != 0x3f80) {
            fail(e, "extend of ones: value %u is %#x", i, out[i]);
            return;
        }
}

/* All rows of a block are ones: whatever the queries are, the answer is ones. */
static void do_compute(engine *e)
{
    enum { ONE = 0x3f80, OUT = 8192, LSE = 16384 };
    uint32_t layout = e->n_layouts > 1 ? 1 : 0;
    yard *y = &e->yards[layout];
    uint16_t *kv = (uint16_t *)(void *)e->paper, *out = (uint16_t *)(void *)(e->paper + OUT);
    int64_t mapping[TOKENS];
    int32_t length = TOKENS, table = (int32_t)y->own[0].slot;
    kvs_call_result wrote, decoded;
    kvs_write_call wc = {
        .plane = layout, .scratch = e->scratch, .kv_c_stride = 1024, .k_pe_offset = 1024 * TOKENS, .k_pe_stride = 128};
    kvs_write_args w = {.ns = y->ns,
                        .region = y->g,
                        .n_tokens = TOKENS,
                        .n_calls = 1,
                        .slot_mapping = mapping,
                        .calls = &wc,
                        .results = &wrote};
    kvs_decode_call dc = {.plane = layout,
                          .scratch = e->scratch,
                          .sm_scale = 0.1f,
                          .q_nope = {0, 1024, 1024},
                          .q_pe = {1024, 128, 128},
                          .out = {OUT, 1024, 1024},
                          .lse = {LSE, 4, 4}};
    kvs_decode_args d = {.ns = y->ns,
                         .region = y->g,
                         .n_seqs = 1,
                         .table_width = 1,
                         .s_q = 1,
                         .h_q = 1,
                         .n_calls = 1,
                         .seq_len = &length,
                         .block_table = &table,
                         .calls = &dc,
                         .results = &decoded};

    for (uint32_t i = 0; i < TOKENS * 576; i++)
        kv[i] = ONE;
    memset(out, 0, 1024);
    for (uint32_t i = 0; i < TOKENS; i++)
        mapping[i] = (int64_t)y->own[0].slot * TOKENS + i;
    if (!answered(e, kvs_write(&w, some_timeout(e), &e->err), "write") || wrote.status != KVS_OK)
        return;
    if (!answered(e, kvs_decode(&d, some_timeout(e), &e->err), "decode") || decoded.status != KVS_OK)
        return;
    for (uint32_t i = 0; i < 512 && !e->hostile; i++)
        if (out[i] != ONE) {
            fail(e, "decode of ones: value %u is %#x", i, out[i]);
            return;
        }
    do_extend(e, y, &dc, length, table, out);
}

static void do_import(engine *e)
{
    enum { BYTES = STORM_MAX_LAYOUTS * 2 * 8192 };
    kvs_status results[OWN];
    kvs_plane_map maps[STORM_MAX_LAYOUTS];
    kvs_slot slots[2] = {{0, 0}, {1, 0}};
    kvs_region *mine = NULL;
    uint8_t block[STORM_MAX_LAYOUTS * PAGE];
    int fd = -1;
    pick p;
    yard *y = pick_keys(e, &p);

    p.n = p.n > 2 ? 2 : p.n;
    if (kvs_memfd_create("engine", BYTES, &fd, &e->err) != KVS_OK) {
        fail(e, "memfd: %s", e->err.msg);
        return;
    }
    for (uint32_t l = 0; l <= p.layout; l++) /* one tensor a layer */
        maps[l] = (kvs_plane_map){0, 0, l * UINT64_C(16384), 8192};
    for (uint32_t i = 0; i < p.n; i++) {
        content_put(block, y->slot_bytes, p.layout, p.first + i);
        for (uint32_t l = 0; l <= p.layout; l++)
            (void)!pwrite(fd, block + (size_t)l * PAGE, PAGE, (off_t)(maps[l].base + i * maps[l].stride));
    }
    kvs_import in = {.n_slots = 2, .n_fds = 1, .fds = &fd, .n_maps = p.layout + 1, .maps = maps};
    if (answered(e, kvs_region_import(y->ns, &in, &mine, 0, &e->err), "import")) {
        kvs_store_args a = store_args(&p, y, mine, slots, results);

        if (e->hostile)
            (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, BYTES);
        if (e->hostile && ftruncate(fd, 0) == 0)
            fail(e, "an import could be cut");
        if (answered(e, kvs_store(&a, some_timeout(e), &e->err), "store of an import"))
            check_stored(e, &p, results);
        close_region(e, mine, "close of an import");
    }
    (void)close(fd);
}

/* Blocks in a region that several engines share: held for a while, and compared again before they are given up. */
static void use_shared(engine *e, const pick *p, const yard *there)
{
    kvs_load_result results[OWN];
    kvs_load_args a = load_args(p, there, results);
    kvs_status dropped[OWN];
    kvs_slot held[OWN];
    uint32_t n = 0;

    a.slots = NULL;
    if (!answered(e, kvs_load(&a, 0, &e->err), "load into a shared region"))
        return;
    for (int pass = 0; pass < 2 && !e->lost && !e->failed; pass++) {
        for (uint32_t i = 0; i < p->n; i++)
            if (results[i].status == KVS_OK)
                compare(e, p, i, at(there, results[i].slot), pass == 0 ? "shared" : "shared, a while later");
        if (pass == 0)
            do_load(e);
    }
    for (uint32_t i = 0; i < p->n; i++)
        if (results[i].status == KVS_OK)
            held[n++] = results[i].slot;
    if (n > 0 && rnd_below(&e->r, 2) == 0 && !e->lost && !e->failed)
        (void)answered(e, kvs_slot_drop(there->g, held, n, NULL, dropped, 0, &e->err), "slot_drop in a shared region");
}

static void do_attach(engine *e)
{
    uint8_t token[16];
    uint64_t bytes;
    void *base;
    pick p;
    yard there = *pick_keys(e, &p);
    kvs_status s;

    for (int i = 0; i < 2; i++) {
        uint64_t half = atomic_load(&e->board->token[p.layout][i]);

        memcpy(token + 8 * i, &half, 8);
    }
    s = kvs_region_attach(e->c, there.ns, token, &there.g, 0, &e->err);
    if (ONE_OF(s, KVS_E_NOT_FOUND, KVS_E_EXISTS, KVS_E_INVALID)) /* its maker is gone; it is ours; hostile ones' */
        return;
    if (!answered(e, s, "attach"))
        return;
    s = kvs_region_map(there.g, &base, &bytes, &e->err);
    there.base = base;
    if (s == KVS_OK)
        use_shared(e, &p, &there);
    else if (e->plan->daemon_kills == 0)
        fail(e, "map of a shared region: %s", e->err.msg);
    close_region(e, there.g, "close of a shared region");
}

static void do_rebuild(engine *e)
{
    uint32_t layout = (uint32_t)rnd_below(&e->r, e->n_layouts);

    yard_close(e, layout);
    if (!e->lost && !e->failed)
        (void)answered(e, yard_open(e, layout), "a new region");
}

/* ---- what hostile ones do besides ---- */

static void scribble(engine *e)
{
    kvs_counters page;
    yard *y = &e->yards[rnd_below(&e->r, e->n_layouts)];
    int fd = kvs_region_fd(y->g, 0);
    off_t size = (off_t)(SLOTS * y->stride);

    switch (rnd_below(&e->r, 6)) {
    case 0:
        rnd_bytes(&e->r, y->base, SLOTS * y->stride);
        break;
    case 1: /* sealed: it must not shrink */
        if (ftruncate(fd, 0) == 0)
            fail(e, "a region could be cut");
        break;
    case 2:
        (void)fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size);
        break;
    case 3: /* both halves, the daemon's too */
        if (kvs_counter_page(e->c, &page, NULL) == KVS_OK)
            for (uint32_t i = 0; i < 32; i++) {
                kvs_counter_entry *half = rnd_below(&e->r, 2) ? page.client : page.daemon;

                atomic_store((_Atomic uint64_t *)&half[i].value, rnd_u64(&e->r));
                atomic_store((_Atomic uint64_t *)&half[i].error, rnd_u64(&e->r));
            }
        break;
    case 4:
        rnd_bytes(&e->r, e->paper, SCRATCH);
        break;
    default:
        (void)fallocate(kvs_region_fd(e->scratch, 0), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SCRATCH);
    }
}

/* Jobs in flight whose slots change under them; some never begin. */
static void do_harm(engine *e)
{
    kvs_status stored[OWN];
    kvs_load_result loaded[OWN];
    kvs_request *r[2] = {NULL, NULL};
    pick p, q;
    yard *y = pick_keys(e, &p), *z = pick_keys(e, &q);
    kvs_mark never = {9, 0, (UINT64_C(1) << 61) + ++e->tick};
    kvs_store_args a = store_args(&p, y, y->g, y->own, stored);
    kvs_load_args l = load_args(&q, z, loaded);

    a.after = rnd_below(&e->r, 4) == 0 ? &never : NULL;
    l.slots = NULL;
    (void)kvs_submit_store(&a, &r[0], 0, &e->err);
    (void)kvs_submit_load(&l, &r[1], 0, &e->err);
    for (int i = 0; i < 4; i++)
        scribble(e);
    for (int i = 0; i < 2; i++) {
        if (r[i] && rnd_below(&e->r, 2) == 0)
            (void)kvs_wait(r[i], 2, NULL);
        if (r[i])
            (void)kvs_request_end(r[i], NULL);
    }
    (void)answered(e, kvs_settle(e->c, HUNG_MS / 2, &e->err), "settle");
}

static void (*const DEEDS[])(engine *e) = {
    do_store,    do_store,     do_store,   do_store,  do_load,      do_load,   do_load,   do_load,
    do_load_any, do_load_any,  do_lookup,  do_lease,  do_lease,     do_cancel, do_cancel, do_pipeline,
    do_pipeline, do_residency, do_compute, do_import, do_residency, do_attach, do_attach,
};

static void live(engine *e)
{
    if (!engine_open(e))
        return;
    while (!e->failed && !atomic_load(&e->board->stop)) {
        if (e->lost)
            come_back(e);
        else if (e->hostile && rnd_below(&e->r, 2) == 0)
            do_harm(e);
        else if (rnd_below(&e->r, 64) == 0)
            do_rebuild(e);
        else
            DEEDS[rnd_below(&e->r, sizeof DEEDS / sizeof DEEDS[0])](e);
        if (atomic_fetch_add(&e->board->ops, 1) >=
            e->plan->ops) /* enough: leave the machine to those who count kills */
            (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void *live_thread(void *ud)
{
    live(ud);
    return NULL;
}

/* One process: engines on threads, all on the first one's handle. */
static bool live_together(engine *e, uint32_t n)
{
    pthread_t t[MAX_THREADS];
    bool failed = false;

    if (connect_engine(&e[0]) != KVS_OK) {
        fail(&e[0], "connect: %s", e[0].err.msg);
        return false;
    }
    for (uint32_t i = 1; i < n; i++) {
        e[i] = e[0];
        e[i].r.state = mix(e[0].r.state + i);
        if (pthread_create(&t[i], NULL, live_thread, &e[i]) != 0)
            abort();
    }
    live(&e[0]);
    for (uint32_t i = 1; i < n; i++)
        (void)pthread_join(t[i], NULL);
    for (uint32_t i = 0; i < n; i++)
        failed |= e[i].failed;
    kvs_close(e[0].c);
    return !failed;
}

/* ---- the weather ---- */

typedef struct crew {
    const storm_plan *plan;
    daemon_fixture *d;
    board *board;
    rnd r;
    uint64_t born, kills;
    pid_t pid[MAX_ENGINES];
    bool stopped[MAX_ENGINES];
} crew;

static void hire(crew *c, uint32_t i)
{
    uint64_t n = c->born++;

    c->stopped[i] = false;
    c->pid[i] = fork();
    if (c->pid[i] == 0) {
        static engine e[MAX_THREADS];

        e[0] = (engine){.plan = c->plan,
                        .board = c->board,
                        .socket = c->d->socket,
                        .r = {mix(c->plan->seed * 1000003 + n)},
                        .hostile = c->plan->hostile && i % 2 == 1,
                        .n_layouts = c->plan->layouts};
        _exit(live_together(e, c->plan->threads) ? 0 : 1);
    }
}

static void complain(crew *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void complain(crew *c, const char *format, ...)
{
    va_list ap;

    if (atomic_exchange(&c->board->failed, true))
        return;
    va_start(ap, format);
    (void)vsnprintf(c->board->why, sizeof c->board->why, format, ap);
    va_end(ap);
}

/* Wait for engine i; `killed`: by us. */
static void bury(crew *c, uint32_t i, bool killed)
{
    uint64_t end = raw_now_ms() + HUNG_MS;
    int status = 0;
    pid_t got;

    while ((got = waitpid(c->pid[i], &status, WNOHANG)) == 0 && raw_now_ms() < end)
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (got == 0) {
        complain(c, "an engine hangs");
        (void)kill(c->pid[i], SIGKILL);
        (void)waitpid(c->pid[i], &status, 0);
    } else if (WIFSIGNALED(status) && !(killed && WTERMSIG(status) == SIGKILL)) {
        complain(c, "an engine died of signal %d", WTERMSIG(status));
    } else if (WIFEXITED(status) && WEXITSTATUS(status) != 0) {
        complain(c, "an engine ended with status %d", WEXITSTATUS(status));
    }
    c->pid[i] = 0;
}

static void strike(crew *c)
{
    uint32_t i = (uint32_t)rnd_below(&c->r, c->plan->engines);

    if (!c->stopped[i] && rnd_below(&c->r, 3) == 0) { /* asleep until it is struck again */
        (void)kill(c->pid[i], SIGSTOP);
        c->stopped[i] = true;
        return;
    }
    (void)kill(c->pid[i], SIGKILL);
    bury(c, i, true);
    c->kills++;
    hire(c, i);
}

/* Killed, or asked to end while everybody works. */
static void strike_daemon(crew *c)
{
    bool kindly = rnd_below(&c->r, 2) == 0;
    int status = daemon_stop(c->d, kindly ? SIGTERM : SIGKILL);

    if (status != (kindly ? 0 : 128 + SIGKILL))
        complain(c, "the daemon ended with status %d after a %s", status, kindly ? "SIGTERM" : "SIGKILL");
    if (!daemon_start(c->d, NULL))
        complain(c, "the daemon does not start again");
}

static void pause_daemon(crew *c)
{
    (void)kill(c->d->pid, SIGSTOP);
    (void)nanosleep(&(struct timespec){.tv_nsec = (long)(1 + rnd_below(&c->r, 8)) * 1000000}, NULL);
    (void)kill(c->d->pid, SIGCONT);
}

static void blow(crew *c)
{
    const storm_plan *p = c->plan;
    uint64_t seen = 0, since = raw_now_ms(), daemon_kills = 0, pauses = 0, ops;

    while (!atomic_load(&c->board->failed)) {
        ops = atomic_load(&c->board->ops);
        if (ops >= p->ops && c->kills >= p->kills && daemon_kills >= p->daemon_kills)
            return;
        if (ops != seen)
            since = raw_now_ms();
        seen = ops;
        if (raw_now_ms() - since > HUNG_MS)
            complain(c, "no engine has done anything for %d ms", HUNG_MS);
        if (!daemon_alive(c->d))
            complain(c, "the daemon has ended");
        else if (daemon_kills < p->daemon_kills && ops * (p->daemon_kills + 1) > (daemon_kills + 1) * p->ops) {
            strike_daemon(c);
            daemon_kills++;
        } else if (pauses < p->pauses && ops * (p->pauses + 1) > (pauses + 1) * p->ops) {
            pause_daemon(c);
            pauses++;
        } else if (c->kills < p->kills && ops * (p->kills + 1) > (c->kills + 1) * p->ops) {
            strike(c);
        } else {
            (void)nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
        }
    }
}

bool storm_run(daemon_fixture *d, const storm_plan *p, storm_result *ret)
{
    storm_plan plan = *p;
    crew c = {.plan = &plan, .d = d, .r = {mix(p->seed)}};

    plan.threads = p->threads > 0 ? p->threads : 1;

    c.board = mmap(NULL, sizeof *c.board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c.board == MAP_FAILED || p->engines > MAX_ENGINES || p->threads > MAX_THREADS ||
        p->layouts > STORM_MAX_LAYOUTS) {
        (void)snprintf(ret->why, sizeof ret->why, "the storm cannot begin");
        return false;
    }
    for (uint32_t i = 0; i < p->engines; i++)
        hire(&c, i);
    blow(&c);
    atomic_store(&c.board->stop, true);
    for (uint32_t i = 0; i < p->engines; i++) {
        if (c.stopped[i])
            (void)kill(c.pid[i], SIGKILL);
        bury(&c, i, c.stopped[i]);
    }
    *ret = (storm_result){.ops = atomic_load(&c.board->ops),
                          .loads = atomic_load(&c.board->loads),
                          .stores = atomic_load(&c.board->stores),
                          .kills = c.kills};
    memcpy(ret->why, c.board->why, sizeof ret->why);
    (void)munmap(c.board, sizeof *c.board);
    return ret->why[0] == '\0';
}

/* ---- the books afterwards ---- */

static kvs_client *operator_open(const daemon_fixture *d)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;

    o.path = d->admin;
    o.timeout_ms = HUNG_MS;
    return kvs_connect(&c, &o, NULL) == KVS_OK ? c : NULL;
}

static double number_in(const char *text, size_t len, const char *path)
{
    const json_node *n;
    json *doc = NULL;
    double v = -1;

    if (json_parse(text, len, &doc, NULL) != KVS_OK)
        return -1;
    n = json_root(doc);
    while (n && *path) {
        char word[64];
        size_t k = strcspn(path, ".");

        (void)snprintf(word, sizeof word, "%.*s", (int)k, path);
        n = json_member(n, word);
        path += k + (path[k] == '.');
    }
    if (n && json_type_of(n) == JSON_NUMBER)
        v = json_number(n);
    else if (n && json_type_of(n) == JSON_BOOL)
        v = json_bool(n);
    else if (n && json_type_of(n) == JSON_ARRAY)
        v = (double)json_size(n);
    json_destroy(doc);
    return v;
}

static double ask(kvs_client *c, uint32_t section, const char *path)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    char *text = NULL;
    size_t len = 0;
    double v = -1;

    a.section = section;
    if (kvs_report_alloc(c, &a, &text, &len, 0, NULL) == KVS_OK)
        v = number_in(text, len, path);
    kvs_free(text);
    return v;
}

double storm_number(const daemon_fixture *d, uint32_t section, const char *path)
{
    kvs_client *c = operator_open(d);
    double v = c ? ask(c, section, path) : -1;

    kvs_close(c);
    return v;
}

static bool await(kvs_client *c, const char *path, double want)
{
    uint64_t end = raw_now_ms() + HUNG_MS / 4;

    while (ask(c, KVS_SECTION_SUMMARY, path) != want) {
        if (raw_now_ms() > end)
            return false;
        (void)nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return true;
}

/* The question itself is one request in flight. */
static bool is_zero(kvs_client *c, const char *const *paths, char *why, size_t cap)
{
    for (; *paths; paths++)
        if (!await(c, *paths, strcmp(*paths, "in_flight") == 0 ? 1 : 0)) {
            (void)snprintf(why, cap, "%s is %.0f", *paths, ask(c, KVS_SECTION_SUMMARY, *paths));
            return false;
        }
    if (ask(c, KVS_SECTION_FSCK, "ok") == 1)
        return true;
    (void)snprintf(why, cap, "fsck found a difference");
    return false;
}

bool storm_left_nothing(const daemon_fixture *d, char *why, size_t cap)
{
    static const char *const gone[] = {"clients",
                                       "in_flight",
                                       "regions",
                                       "region_bytes",
                                       "directory.leases",
                                       "directory.leased",
                                       "directory.held",
                                       "pool.writing_bytes",
                                       "pool.draining_bytes",
                                       "load.queued",
                                       "store.queued",
                                       "decode.queued",
                                       "pool.quarantined_bytes",
                                       NULL};
    static const char *const empty_pool[] = {"directory.ready",     "directory.pinned",   "pool.ready_bytes",
                                             "pool.draining_bytes", "pool.writing_bytes", NULL};
    kvs_client *c = operator_open(d);
    bool ok = c != NULL;

    why[0] = '\0';
    if (!ok)
        (void)snprintf(why, cap, "the operator is not let in");
    ok = ok && is_zero(c, gone, why, cap);
    if (ok && kvs_reset(c, NULL, KVS_RESET_PINNED, NULL, 0, NULL) != KVS_OK) {
        (void)snprintf(why, cap, "reset of everything is refused");
        ok = false;
    }
    ok = ok && is_zero(c, empty_pool, why, cap);
    kvs_close(c);
    return ok;
}

bool storm_refill(const daemon_fixture *d, uint32_t layout, uint32_t n_slots, char *why, size_t cap)
{
    enum { FRESH = 1 << 20 };
    storm_plan plan = {.engines = 1, .layouts = layout + 1, .chains = 1};
    board b = {0};
    engine e = {.plan = &plan, .board = &b, .socket = d->socket, .n_layouts = layout + 1, .r = {1}};
    uint32_t hits = 0;

    if (engine_open(&e)) {
        for (int pass = 0; pass < 2; pass++)
            for (uint32_t i = 0; i < n_slots && !e.failed; i++) {
                kvs_load_result loaded[OWN];
                kvs_status stored[OWN];
                yard *y = &e.yards[layout];
                pick p = {.layout = layout, .n = 1, .first = FRESH + i};
                kvs_store_args s = store_args(&p, y, y->g, y->own, stored);
                kvs_load_args l = load_args(&p, y, loaded);

                keys_of(p.keys, p.first, 1);
                if (pass == 0)
                    fill(&p, y, y->own);
                else
                    empty(&p, y);
                if ((pass == 0 ? kvs_store(&s, 0, &e.err) : kvs_load(&l, 0, &e.err)) != KVS_OK)
                    fail(&e, "%s of block %u of %u: %s", pass == 0 ? "store" : "load", i, n_slots, e.err.msg);
                else if (pass == 1)
                    compare(&e, &p, 0, at(y, y->own[0]), "refill");
                hits += pass;
            }
    }
    kvs_close(e.c);
    (void)snprintf(why, cap, "%s", b.why);
    return !e.failed && hits == n_slots;
}

unsigned storm_mappings(const daemon_fixture *d)
{
    char path[64], line[512];
    unsigned n = 0;
    FILE *f;

    (void)snprintf(path, sizeof path, "/proc/%d/maps", (int)d->pid);
    f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        n += strstr(line, "/memfd:") != NULL;
    if (f)
        (void)fclose(f);
    return n;
}

bool storm_wait_mappings(const daemon_fixture *d, unsigned n)
{
    uint64_t end = raw_now_ms() + HUNG_MS / 4;

    while (storm_mappings(d) > n) {
        if (raw_now_ms() > end)
            return false;
        (void)nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return true;
}
