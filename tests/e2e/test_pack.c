/* Client pack against the real daemon on a CPU: tensors with gaps and in any order, chunks, refusals, ends of all kinds. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/client/kvstride_pack.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/random.h"

#define OK(call)            check((call), KVS_OK, #call)
#define FAILS(status, call) check((call), (status), #call)

enum { TOKENS = 4, PLANES = 5, BLOCKS = 64, CHUNK = 3, STAGING = 8, CALL_MS = 20000, CANARY = 0xc5 };

static const char CONFIG[] = "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"device\": {\"kind\": \"cpu\"}}";
static const uint32_t ROW[PLANES] = {1152, 64, 1152, 132,
                                     2048}; /* of different sizes: no plane is like its neighbour */
static kvs_err err;

static void check(kvs_status s, kvs_status want, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? err.msg : "",
                 kvs_status_name(want));
}

/* An engine with a tensor a layer, the last layer first in memory, gaps between pages and tensors. */
typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_pack *pack;
    kvs_plane planes[PLANES];
    kvs_pack_plane tensors[PLANES];
    uint8_t *memory;
    size_t bytes;
} engine;

static void model(engine *e, kvs_namespace *desc)
{
    *desc = (kvs_namespace){.model = "packed", .tokens_per_block = TOKENS, .n_planes = PLANES, .planes = e->planes};
    for (uint32_t i = 0; i < PLANES; i++) {
        e->planes[i] = (kvs_plane){.layer = i,
                                   .format = KVS_FORMAT_raw,
                                   .row_bytes = ROW[i],
                                   .page_bytes = (uint64_t)(ROW[i] * TOKENS + 15) / 16 * 16};
        (void)snprintf(e->planes[i].name, sizeof e->planes[i].name, "p%u", i);
    }
}

static void tensors(engine *e)
{
    size_t at = 4096;

    for (uint32_t k = PLANES; k-- > 0;) {
        e->tensors[k].stride = e->planes[k].page_bytes + 16 * (k + 1);
        e->tensors[k].base = (void *)at;
        at += e->tensors[k].stride * BLOCKS + 4096;
    }
    e->bytes = at;
    e->memory = aligned_alloc(4096, (at + 4095) / 4096 * 4096);
    cr_assert_not_null(e->memory);
    memset(e->memory, CANARY, e->bytes);
    for (uint32_t k = 0; k < PLANES; k++)
        e->tensors[k].base = e->memory + (size_t)e->tensors[k].base;
}

static kvs_client *connect_to(const daemon_fixture *d)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;

    o.path = d->socket;
    o.timeout_ms = CALL_MS;
    o.backoff_min_ms = 5;
    o.backoff_max_ms = 50;
    OK(kvs_connect(&c, &o, &err));
    return c;
}

static kvs_pack_args args_of(const engine *e)
{
    return (kvs_pack_args){.ns = e->ns,
                           .n_planes = PLANES,
                           .planes = e->tensors,
                           .n_blocks = BLOCKS,
                           .first_counter = 10,
                           .chunk = CHUNK,
                           .n_staging = STAGING};
}

static void engine_open(engine *e, const daemon_fixture *d)
{
    kvs_namespace desc;
    kvs_pack_args a;

    model(e, &desc);
    tensors(e);
    e->c = connect_to(d);
    OK(kvs_open(e->c, &desc, &e->ns, 0, &err));
    a = args_of(e);
    OK(kvs_pack_open(e->c, &a, &e->pack, 0, &err));
}

static void engine_close(engine *e)
{
    kvs_pack_close(e->pack);
    kvs_close(e->c);
    free(e->memory);
}

static uint8_t *page_at(const engine *e, uint32_t plane, uint32_t block)
{
    return (uint8_t *)e->tensors[plane].base + block * e->tensors[plane].stride;
}

/* Block `id` of content `seed`. */
static void block_fill(const engine *e, uint32_t id, uint64_t seed)
{
    rnd r = {.state = seed * 0x9e3779b97f4a7c15u + 1};

    for (uint32_t p = 0; p < PLANES; p++)
        rnd_bytes(&r, page_at(e, p, id), e->planes[p].page_bytes);
}

static bool block_is(const engine *e, uint32_t id, uint64_t seed)
{
    static _Thread_local uint8_t want[2048 * TOKENS];
    rnd r = {.state = seed * 0x9e3779b97f4a7c15u + 1};

    for (uint32_t p = 0; p < PLANES; p++) {
        rnd_bytes(&r, want, e->planes[p].page_bytes);
        if (memcmp(page_at(e, p, id), want, e->planes[p].page_bytes) != 0)
            return false;
    }
    return true;
}

static void block_wipe(const engine *e, uint32_t id)
{
    for (uint32_t p = 0; p < PLANES; p++)
        memset(page_at(e, p, id), CANARY, e->planes[p].page_bytes);
}

static void key_of(uint64_t id, uint8_t *key)
{
    memset(key, 0x11, KVS_KEY_BYTES);
    memcpy(key, &id, sizeof id);
}

typedef struct list {
    uint32_t n;
    uint8_t keys[BLOCKS][KVS_KEY_BYTES];
    uint32_t blocks[BLOCKS];
    kvs_status results[BLOCKS];
} list;

/* Keys first..first+n-1 in blocks at, at + step, ... */
static list list_of(uint64_t first, uint32_t n, uint32_t at, uint32_t step)
{
    list l = {.n = n};

    for (uint32_t i = 0; i < n; i++) {
        key_of(first + i, l.keys[i]);
        l.blocks[i] = (at + i * step) % BLOCKS;
    }
    return l;
}

static kvs_pack_move move_of(list *l)
{
    return (kvs_pack_move){.n = l->n, .keys = l->keys[0], .blocks = l->blocks, .results = l->results};
}

static kvs_status run(engine *e, list *l, bool load)
{
    kvs_pack_move m = move_of(l);
    kvs_request *r = NULL;
    kvs_status s = load ? kvs_pack_load(e->pack, &m, &r, 0, &err) : kvs_pack_store(e->pack, &m, &r, 0, &err);

    if (s != KVS_OK)
        return s;
    OK(kvs_wait(r, 0, &err));
    return kvs_request_end(r, &err);
}

Test(pack, brings_every_byte_there_and_back_and_touches_no_other)
{
    daemon_fixture d;
    engine e = {0};
    list out = list_of(1, 41, 7, 5), in = list_of(1, 41, 63, 3);
    uint8_t *image;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    for (uint32_t i = 0; i < out.n; i++)
        block_fill(&e, out.blocks[i], 100 + i);
    image = malloc(e.bytes);
    memcpy(image, e.memory, e.bytes);
    OK(run(&e, &out, false));
    cr_assert_arr_eq(image, e.memory, e.bytes, "a store changes nothing");
    for (uint32_t i = 0; i < BLOCKS; i++)
        block_wipe(&e, i);
    OK(run(&e, &in, true));
    for (uint32_t i = 0; i < in.n; i++) {
        cr_assert_eq(in.results[i], KVS_OK);
        cr_assert(block_is(&e, in.blocks[i], 100 + i), "block %u", i);
        block_wipe(&e, in.blocks[i]);
    }
    for (size_t i = 0; i < e.bytes; i++)
        cr_assert_eq(e.memory[i], CANARY, "byte %zu lies outside the blocks of the load", i);
    free(image);
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, stores_blocks_as_any_other_client_stores_them)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(50, 4, 9, 1);
    kvs_region *region;
    kvs_slot slots[4];
    kvs_load_result results[4];
    kvs_load_args a;
    kvs_region_info info;
    kvs_ns_info ns;
    void *base;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    for (uint32_t i = 0; i < l.n; i++)
        block_fill(&e, l.blocks[i], i);
    OK(run(&e, &l, false));
    OK(kvs_region_create(e.ns, 0, 4, &region, 0, &err));
    OK(kvs_region_map(region, &base, NULL, &err));
    OK(kvs_slot_take(region, 4, slots, 0, &err));
    a = (kvs_load_args){.ns = e.ns, .region = region, .n = 4, .keys = l.keys[0], .slots = slots, .results = results};
    OK(kvs_load(&a, 0, &err));
    kvs_region_get(region, &info);
    kvs_ns_get(e.ns, &ns);
    for (uint32_t i = 0; i < 4; i++) {
        const uint8_t *at = (const uint8_t *)base + slots[i].slot * info.slot_stride;

        for (uint32_t p = 0; p < PLANES; p++, at += e.planes[p - 1].page_bytes)
            cr_assert_arr_eq(at, page_at(&e, p, l.blocks[i]), e.planes[p].page_bytes, "block %u plane %u", i, p);
    }
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, says_for_each_block_what_became_of_it)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(10, 7, 0, 1), all = list_of(8, 11, 20, 1);

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    for (uint32_t i = 0; i < l.n; i++)
        block_fill(&e, l.blocks[i], i);
    OK(run(&e, &l, false));
    OK(run(&e, &l, false));
    for (uint32_t i = 0; i < l.n; i++)
        cr_assert_eq(l.results[i], KVS_E_EXISTS);
    FAILS(KVS_E_PARTIAL, run(&e, &all, true));
    cr_assert_not_null(strstr(err.msg, "load by a pack: 4 of 11 failed, the first is [0]: "), "%s", err.msg);
    for (uint32_t i = 0; i < all.n; i++) {
        bool there = i >= 2 && i < 9;

        cr_assert_eq(all.results[i], there ? KVS_OK : KVS_E_NOT_FOUND, "block %u: %s", i,
                     kvs_status_name(all.results[i]));
        if (there)
            cr_assert(block_is(&e, all.blocks[i], i - 2));
        else
            cr_assert_eq(page_at(&e, 0, all.blocks[i])[0], CANARY, "nothing comes for a block that is not there");
    }
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, refuses_what_it_cannot_do_before_anything_moves)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(1, 3, 0, 1), twice = list_of(1, 3, 5, 0);
    kvs_pack_move m;
    kvs_pack_args a;
    kvs_pack *p;
    kvs_request *r;
    uint32_t hits;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    l.blocks[2] = BLOCKS;
    FAILS(KVS_E_RANGE, run(&e, &l, false));
    cr_assert(strstr(err.msg, "blocks[2]") && strstr(err.msg, "0..63"), "%s", err.msg);
    FAILS(KVS_E_RANGE, run(&e, &l, true));
    FAILS(KVS_E_INVALID, run(&e, &twice, true));
    OK(kvs_lookup(e.ns, l.keys[0], 3, &hits, NULL, 0, &err));
    cr_assert_eq(hits, 0);
    m = move_of(&twice);
    m.n = 0;
    FAILS(KVS_E_RANGE, kvs_pack_store(e.pack, &m, &r, 0, &err));
    m.n = 1;
    m.first_depth = 3;
    FAILS(KVS_E_INVALID, kvs_pack_store(e.pack, &m, &r, 0, &err));
    m.first_depth = 0;
    m.parent = l.keys[0];
    FAILS(KVS_E_INVALID, kvs_pack_store(e.pack, &m, &r, 0, &err));
    cr_assert_str_eq(err.msg, "parent: is not zeros, but first_depth is 0");
    m.parent = NULL;
    m.flags = 8;
    FAILS(KVS_E_INVALID, kvs_pack_store(e.pack, &m, &r, 0, &err));
    m.flags = 0;
    m.parent = l.keys[0];
    FAILS(KVS_E_INVALID, kvs_pack_load(e.pack, &m, &r, 0, &err));

#define REFUSED(status, field, value)                                                                                  \
    a = args_of(&e);                                                                                                   \
    a.field = (value);                                                                                                 \
    FAILS(status, kvs_pack_open(e.c, &a, &p, 0, &err))
    REFUSED(KVS_E_INVALID, n_planes, PLANES - 1);
    REFUSED(KVS_E_RANGE, n_blocks, 0);
    REFUSED(KVS_E_RANGE, chunk, 257);
    REFUSED(KVS_E_RANGE, n_staging, CHUNK - 1);
    REFUSED(KVS_E_RANGE, ctas, 1025);
    REFUSED(KVS_E_RANGE, first_counter, 255);
    REFUSED(KVS_E_INVALID, reserved, 1);
    REFUSED(KVS_E_INVALID, ns, NULL);
    e.tensors[2].stride -= e.planes[2].page_bytes;
    REFUSED(KVS_E_INVALID, chunk, 1);
    cr_assert(strstr(err.msg, "planes[2].stride"), "%s", err.msg);
    e.tensors[2].stride += e.planes[2].page_bytes + 8;
    REFUSED(KVS_E_INVALID, chunk, 1);
    e.tensors[2].stride -= 8;
    e.tensors[1].base = (uint8_t *)e.tensors[1].base + 4;
    REFUSED(KVS_E_INVALID, chunk, 1);
    e.tensors[1].base = (uint8_t *)e.tensors[1].base - 4;
    e.tensors[4].stride = (KVS_MAX_OFFSET - 16);
    REFUSED(KVS_E_RANGE, n_blocks, UINT32_MAX);
    engine_close(&e);
    daemon_fini(&d);
}

static void is_named(kvs_status s, const char *want)
{
    cr_assert_eq(s, KVS_E_INVALID, "%s: %s", want, kvs_status_name(s));
    cr_assert_str_eq(err.msg, want);
}

Test(pack, refuses_a_null_by_its_name)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(1, 3, 0, 1);
    kvs_pack_move m = move_of(&l);
    kvs_request *r = NULL;
    kvs_pack_args a;
    kvs_pack *p = NULL;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    a = args_of(&e);
    is_named(kvs_pack_open(NULL, &a, &p, 0, &err), "pack_open: c is NULL");
    is_named(kvs_pack_open(e.c, NULL, &p, 0, &err), "pack_open: a is NULL");
    is_named(kvs_pack_open(e.c, &a, NULL, 0, &err), "pack_open: ret is NULL");
    a.planes = NULL;
    is_named(kvs_pack_open(e.c, &a, &p, 0, &err), "pack_open: planes is NULL");
    a.ns = NULL;
    is_named(kvs_pack_open(e.c, &a, &p, 0, &err), "pack_open: ns is NULL");
    is_named(kvs_pack_store(NULL, &m, &r, 0, &err), "pack_store: p is NULL");
    is_named(kvs_pack_store(e.pack, NULL, &r, 0, &err), "pack_store: m is NULL");
    is_named(kvs_pack_load(e.pack, &m, NULL, 0, &err), "pack_load: ret is NULL");
    m.keys = NULL;
    is_named(kvs_pack_load(e.pack, &m, &r, 0, &err), "pack_load: keys is NULL");
    m = move_of(&l);
    m.blocks = NULL;
    is_named(kvs_pack_store(e.pack, &m, &r, 0, &err), "pack_store: blocks is NULL");
    cr_assert(p == NULL && r == NULL);
    m = move_of(&l);
    m.results = NULL;
    OK(kvs_pack_store(e.pack, &m, &r, 0, &err));
    OK(kvs_wait(r, 0, &err));
    OK(kvs_request_end(r, &err));
    kvs_pack_close(NULL);
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, shows_its_own_requests_and_none_of_those_behind_them)
{
    daemon_fixture d;
    engine e = {0};
    list a = list_of(1, 20, 0, 1), b = list_of(100, 20, 20, 1);
    kvs_pack_move ma = move_of(&a), mb = move_of(&b);
    kvs_request *ra, *rb, *got[8];
    uint32_t n = 0;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    OK(kvs_pack_store(e.pack, &ma, &ra, 0, &err));
    OK(kvs_pack_store(e.pack, &mb, &rb, 0, &err));
    kvs_request_set_tag(ra, 1);
    kvs_request_set_tag(rb, 2);
    while (n < 2)
        n += kvs_poll(e.c, got + n, 8 - n, CALL_MS);
    cr_assert_eq(n, 2);
    cr_assert_eq(kvs_request_tag(got[0]), 1, "in the order in which they were given");
    cr_assert_eq(kvs_request_tag(got[1]), 2);
    cr_assert_eq(kvs_poll(e.c, got, 8, 50), 0);
    cr_assert(kvs_done(ra) && kvs_done(rb));
    OK(kvs_request_end(ra, &err));
    OK(kvs_request_end(rb, &err));
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, ends_a_request_unanswered_and_settles)
{
    daemon_fixture d;
    engine e = {0};

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    for (uint64_t i = 0; i < 50; i++) {
        list *l = malloc(sizeof *l); /* the sanitizer sees if a result is written after the end */
        kvs_pack_move m;
        kvs_request *r;
        kvs_status s;

        *l = list_of(1 + i * 100, BLOCKS, 0, 1);
        m = move_of(l);
        OK(i % 2 ? kvs_pack_store(e.pack, &m, &r, 0, &err) : kvs_pack_load(e.pack, &m, &r, 0, &err));
        s = kvs_request_end(r, &err);
        free(l);
        cr_assert(s == KVS_E_BUSY || s == KVS_OK || s == KVS_E_PARTIAL, "%s", kvs_status_name(s));
        OK(kvs_settle(e.c, 0, &err));
    }
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, cancels)
{
    daemon_fixture d;
    engine e = {0};
    unsigned stopped = 0;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    for (uint64_t i = 0; i < 20; i++) {
        list l = list_of(1 + i * 100, BLOCKS, 0, 1);
        kvs_pack_move m = move_of(&l);
        kvs_request *r;
        uint32_t outcome = 9;
        kvs_status s;
        bool seen_bad = false;

        OK(kvs_pack_store(e.pack, &m, &r, 0, &err));
        OK(kvs_cancel(r, &outcome, 0, &err));
        s = kvs_request_end(r, &err);
        cr_assert_eq(outcome, s == KVS_E_CANCELLED ? KVS_CANCEL_STOPPED : KVS_CANCEL_FINISHED);
        stopped += s == KVS_E_CANCELLED;
        for (uint32_t k = 0; k < l.n; k++)
            seen_bad = seen_bad || l.results[k] == KVS_E_CANCELLED;
        cr_assert_eq(seen_bad, s == KVS_E_CANCELLED);
    }
    cr_assert_gt(stopped, 0, "no cancel was in time: nothing was tried");
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, closes_with_requests_under_way)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(1, BLOCKS, 0, 1);
    kvs_pack_move m = move_of(&l);
    kvs_request *r, *left;
    kvs_status s;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    OK(kvs_pack_store(e.pack, &m, &r, 0, &err));
    kvs_pack_close(e.pack);
    cr_assert(kvs_done(r));
    s = kvs_request_end(r, &err);
    cr_assert(s == KVS_OK || s == KVS_E_CANCELLED, "%s", kvs_status_name(s));
    e.pack = NULL;
    {
        kvs_pack_args a = args_of(&e);

        OK(kvs_pack_open(e.c, &a, &e.pack, 0, &err));
    }
    OK(kvs_pack_load(e.pack, &m, &left, 0, &err));
    kvs_close(e.c); /* with the pack and the request */
    free(e.memory);
    daemon_fini(&d);
}

Test(pack, goes_on_with_a_restarted_daemon)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(1, 20, 0, 1);
    uint64_t generation;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < l.n; i++)
            block_fill(&e, l.blocks[i], 7 + i);
        OK(run(&e, &l, false));
        for (uint32_t i = 0; i < l.n; i++)
            block_wipe(&e, l.blocks[i]);
        OK(run(&e, &l, true));
        for (uint32_t i = 0; i < l.n; i++)
            cr_assert(block_is(&e, l.blocks[i], 7 + i));
        generation = kvs_generation(e.c);
        (void)daemon_stop(&d, SIGKILL);
        FAILS(KVS_E_AWAY, run(&e, &l, true));
        for (uint32_t i = 0; i < l.n; i++)
            cr_assert_eq(l.results[i], KVS_E_AWAY);
        cr_assert(daemon_start(&d, NULL));
        OK(kvs_wait_up(e.c, generation, 0, &err));
    }
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, says_that_the_pool_is_full_and_stores_the_rest)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(1, BLOCKS, 0, 1);
    uint32_t stored = 0;

    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"1MiB\"}, \"device\": {\"kind\": \"cpu\"}}"));
    engine_open(&e, &d);
    (void)run(&e, &l, false);
    for (uint32_t i = 0; i < l.n; i++) {
        stored += l.results[i] == KVS_OK;
        cr_assert(l.results[i] == KVS_OK || l.results[i] == KVS_E_NO_SPACE, "%s", kvs_status_name(l.results[i]));
    }
    cr_assert(stored > 0);
    engine_close(&e);
    daemon_fini(&d);
}

/* ---- both directions, many threads ---- */

enum { WORKERS = 4, PER_WORKER = BLOCKS / WORKERS, ROUNDS = 60 };

typedef struct worker {
    engine *e;
    uint32_t index;
    unsigned wrong;
} worker;

static kvs_status run_quietly(engine *e, list *l, bool load)
{
    kvs_pack_move m = move_of(l);
    kvs_request *r = NULL;
    kvs_status s = load ? kvs_pack_load(e->pack, &m, &r, 0, NULL) : kvs_pack_store(e->pack, &m, &r, 0, NULL);

    if (s == KVS_OK)
        s = kvs_wait(r, 0, NULL);
    return r != NULL ? kvs_request_end(r, NULL) : s;
}

static void *work(void *arg)
{
    worker *w = arg;
    rnd r = rnd_open("pack workers", w->index);

    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint32_t n = 1 + rnd_below(&r, PER_WORKER);
        uint64_t first = w->index * 100000u + round * 100 + 1;
        list l = list_of(first, n, w->index * PER_WORKER, 1);

        for (uint32_t i = 0; i < n; i++)
            block_fill(w->e, l.blocks[i], first + i);
        if (run_quietly(w->e, &l, false) != KVS_OK)
            w->wrong++;
        for (uint32_t i = 0; i < n; i++)
            block_wipe(w->e, l.blocks[i]);
        if (run_quietly(w->e, &l, true) != KVS_OK)
            w->wrong++;
        for (uint32_t i = 0; i < n; i++)
            w->wrong += !block_is(w->e, l.blocks[i], first + i);
    }
    return NULL;
}

Test(pack, serves_threads_at_the_same_time)
{
    daemon_fixture d;
    engine e = {0};
    pthread_t threads[WORKERS];
    worker workers[WORKERS];

    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"256MiB\"}, \"device\": {\"kind\": \"cpu\"}}"));
    engine_open(&e, &d);
    for (uint32_t i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.e = &e, .index = i};
        cr_assert_eq(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < WORKERS; i++) {
        (void)pthread_join(threads[i], NULL);
        cr_assert_eq(workers[i].wrong, 0, "worker %u: %u wrong", i, workers[i].wrong);
    }
    engine_close(&e);
    daemon_fini(&d);
}

/* ---- death ---- */

/* Stores for ever, each block under a key that tells what is in it. */
static void store_until_killed(const daemon_fixture *d, uint64_t first, int tell)
{
    engine e = {0};

    engine_open(&e, d);
    for (;; first += BLOCKS) {
        list l = list_of(first, BLOCKS, 0, 1);

        for (uint32_t i = 0; i < BLOCKS; i++)
            block_fill(&e, i, first + i);
        if (run_quietly(&e, &l, false) == KVS_OK)
            (void)!write(tell, "", 1);
    }
}

/* How many blocks from `first` on are there; each must be what its key says. */
static uint32_t count_found(engine *e, uint64_t first)
{
    uint32_t found = 0, before;

    do {
        list l = list_of(first, BLOCKS, 0, 1);

        before = found;
        (void)run_quietly(e, &l, true);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            if (l.results[i] != KVS_OK)
                continue;
            found++;
            cr_assert(block_is(e, i, first + i), "key %llu has other bytes", (unsigned long long)first + i);
        }
        first += BLOCKS;
    } while (found > before);
    return found;
}

Test(pack, leaves_no_key_without_its_bytes_when_its_engine_is_killed)
{
    daemon_fixture d;
    engine e = {0};
    struct timespec nap = {.tv_nsec = 2000000};
    enum { KILLS = 8 };

    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"1GiB\"}, \"device\": {\"kind\": \"cpu\"}}"));
    for (uint64_t k = 1; k <= KILLS; k++) {
        int told[2];
        char c;
        pid_t pid;

        cr_assert_eq(pipe(told), 0);
        pid = fork();
        if (pid == 0) {
            store_until_killed(&d, k * 1000000, told[1]);
            _exit(0);
        }
        cr_assert_eq(read(told[0], &c, 1), 1);
        nap.tv_nsec += 3100000;
        (void)nanosleep(&nap, NULL);
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, NULL, 0);
        (void)close(told[0]);
        (void)close(told[1]);
    }
    engine_open(&e, &d);
    for (uint64_t k = 1; k <= KILLS; k++)
        cr_assert_gt(count_found(&e, k * 1000000), 0, "nothing was stored before kill %llu", (unsigned long long)k);
    engine_close(&e);
    daemon_fini(&d);
}

Test(pack, is_of_no_use_to_a_child_of_fork_and_no_harm)
{
    daemon_fixture d;
    engine e = {0};
    list l = list_of(1, 3, 0, 1);
    int status;
    pid_t pid;

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    engine_open(&e, &d);
    pid = fork();
    if (pid == 0) {
        kvs_pack_move m = move_of(&l);
        kvs_request *r;
        bool good = kvs_pack_store(e.pack, &m, &r, 0, NULL) == KVS_E_STATE;

        kvs_pack_close(e.pack);
        kvs_close(e.c);
        _exit(good ? 0 : 1);
    }
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(run(&e, &l, false));
    engine_close(&e);
    daemon_fini(&d);
}
