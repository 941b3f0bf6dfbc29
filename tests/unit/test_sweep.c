#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "daemon/core.h"
#include "tests/support/core_fixture.h"

/* A RESET of many blocks, and a DROP of many keys: part by part, everybody else served in between, whatever becomes of who asked for it. */

enum { BLOCKS = 5000, A_STEP = SWEEP_STEP, LIST = 1000 };

typedef struct world {
    fx f;
    fx_client c, other, admin;
    uint32_t ns, few, red; /* BLOCKS, two and BLOCKS of tenant 1 */
} world;

/* What a client would store, without the copies. */
static void fill(world *w, uint32_t ns, uint64_t first, uint32_t n)
{
    static uint8_t keys[LIST][32];
    static kvs_status status[LIST];
    static pool_slot slot[LIST];

    for (; n > 0; n -= LIST, first += LIST) {
        uint32_t m = n < LIST ? n : LIST;

        for (uint32_t i = 0; i < m; i++)
            fx_key(keys[i], first + i);
        directory_admit(w->f.core->dir, ns, 0, NULL, keys[0], m, status, slot);
        for (uint32_t i = 0; i < m; i++) {
            cr_assert_eq(status[i], KVS_OK);
            cr_assert_eq(directory_commit(w->f.core->dir, slot[i], 1), KVS_OK);
        }
        if (m < LIST)
            break;
    }
}

static void start(world *w)
{
    fx_config(&w->f);
    w->f.cfg.pool_max_bytes = CONFIG_MIB(128);
    w->f.cfg.device_max_region_bytes = CONFIG_MIB(32);
    w->f.cfg.n_tenants = 2;
    (void)snprintf(w->f.cfg.tenants[1].name, sizeof w->f.cfg.tenants[1].name, "red");
    w->f.cfg.tenants[1].ops = w->f.cfg.tenants[0].ops;
    fx_open(&w->f);
    fx_client_open(&w->c, &w->f);
    fx_client_open(&w->other, &w->f);
    fx_admin_open(&w->admin, &w->f);
    w->ns = fx_ns(&w->c, "many");
    w->few = fx_ns(&w->c, "few");
    fill(w, w->few, 1, 2);
    fill(w, w->ns, 1, BLOCKS);
}

static void check(world *w)
{
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
}

static void stop(world *w)
{
    cr_assert_null(core_next_sweep(w->f.core));
    check(w);
    fx_gone(&w->other);
    fx_gone(&w->admin);
    fx_close(&w->f);
}

static uint64_t send_reset(fx_client *c, uint32_t ns, uint32_t flags, uint64_t deadline_us)
{
    fx_body *b = fx_new();

    wire_put_reset_req(&b->out, &(wire_reset_req){.ns = ns, .flags = flags});
    return fx_send_deadline(c, WIRE_RESET, deadline_us, b);
}

static wire_reset_rep wait_reset(fx_client *c, uint64_t id, kvs_status want)
{
    wire_reset_rep rep = {0};
    fx_answer a = fx_wait(c, id);

    cr_assert_eq(a.status, want, "%s", a.msg);
    if (want == KVS_OK || want == KVS_E_PARTIAL)
        wire_get_reset_rep(&a.in, &rep);
    cr_assert(wire_in_done(&a.in));
    fx_done(&a);
    return rep;
}

static uint64_t send_cancel(fx_client *c, uint64_t target)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){target});
    return fx_send(c, WIRE_CANCEL, b);
}

static uint32_t wait_cancel(fx_client *c, uint64_t id)
{
    wire_cancel_rep rep;
    fx_answer a = fx_wait(c, id);

    cr_assert_eq(a.status, KVS_OK);
    wire_get_cancel_rep(&a.in, &rep);
    fx_done(&a);
    return rep.outcome;
}

static uint64_t n_ready(const world *w)
{
    directory_stats st;

    directory_get_stats(w->f.core->dir, w->f.now_us, &st);
    return st.n_ready;
}

static void one_turn(world *w)
{
    cr_assert_leq(core_next_due(w->f.core), w->f.now_us, "it goes on by itself");
    fx_advance(&w->f, 0);
}

Test(sweep, others_are_answered_between_the_parts_of_a_reset)
{
    world w;
    wire_reset_rep rep;
    uint64_t id, had;
    int turns = 0;

    start(&w);
    had = n_ready(&w);
    id = send_reset(&w.c, w.ns, 0, 0);
    cr_assert_eq(n_ready(&w), had, "not within the request");
    for (; !fx_has_reply(&w.c, id); turns++, had = n_ready(&w)) {
        fx_body *b = fx_new();
        uint64_t ping = fx_send(&w.other, WIRE_PING, b);

        cr_assert(fx_has_reply(&w.other, ping));
        cr_assert_eq(fx_lookup(&w.other, w.few, 1, 2), 2);
        check(&w);
        one_turn(&w);
        cr_assert_leq(had - n_ready(&w), A_STEP);
    }
    cr_assert_geq(turns, BLOCKS / A_STEP + 1);
    rep = wait_reset(&w.c, id, KVS_OK);
    cr_assert(rep.dropped == BLOCKS && rep.aborted == 0 && rep.kept == 0 && rep.leases == 0);
    cr_assert_eq(n_ready(&w), 2);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, what_is_pinned_is_kept_and_said)
{
    world w;
    wire_reset_rep rep;

    start(&w);
    cr_assert_eq(fx_status(&w.c, WIRE_PIN, fx_keys_body(w.ns, BLOCKS - 1, 2)), KVS_OK);
    rep = wait_reset(&w.c, send_reset(&w.c, w.ns, 0, 0), KVS_E_PARTIAL);
    cr_assert(rep.dropped == BLOCKS - 2 && rep.kept == 2);
    cr_assert_eq(fx_lookup(&w.c, w.ns, BLOCKS - 1, 2), 2);
    rep = wait_reset(&w.c, send_reset(&w.c, w.ns, WIRE_RESET_PINNED, 0), KVS_OK);
    cr_assert(rep.dropped == 2 && rep.kept == 0);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, a_small_reset_does_not_wait_for_the_end_of_a_large_one)
{
    world w;
    uint64_t large, small;

    start(&w);
    large = send_reset(&w.c, WIRE_NONE32, 0, 0);
    one_turn(&w);
    small = send_reset(&w.other, w.few, 0, 0);
    (void)wait_reset(&w.other, small, KVS_OK);
    cr_assert_not(fx_has_reply(&w.c, large));
    check(&w);
    (void)wait_reset(&w.c, large, KVS_OK);
    cr_assert_eq(n_ready(&w), 0);
    fx_gone(&w.c);
    stop(&w);
}

/* Symptom: 15,000 RESETs of one tenant made that of another one, and the operator's, wait for a minute. */
Test(sweep, many_resets_of_a_tenant_have_the_turn_of_one)
{
    enum { MANY_RESETS = 40 };
    world w;
    fx_client red;
    uint64_t id[MANY_RESETS], of_red, of_admin;

    start(&w);
    fx_client_open_tenant(&red, &w.f, 1);
    w.red = fx_ns(&red, "theirs");
    fill(&w, w.red, 1, 3);
    for (int i = 0; i < MANY_RESETS; i++)
        id[i] = send_reset(&w.c, WIRE_NONE32, 0, 0);
    one_turn(&w);
    of_red = send_reset(&red, w.red, 0, 0);
    of_admin = send_reset(&w.admin, w.red, 0, 0);
    for (int i = 0; i < 3 * (BLOCKS / A_STEP + 2); i++) /* theirs may lie behind all the others */
        one_turn(&w);
    cr_assert(fx_has_reply(&red, of_red) && fx_has_reply(&w.admin, of_admin));
    cr_assert_not(fx_has_reply(&w.c, id[0]));
    (void)wait_reset(&red, of_red, KVS_OK);
    (void)wait_reset(&w.admin, of_admin, KVS_OK);
    for (int i = 0; i < MANY_RESETS; i++)
        (void)wait_reset(&w.c, id[i], KVS_OK);
    cr_assert_eq(n_ready(&w), 0);
    fx_gone(&red);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, who_leaves_in_the_middle_of_its_reset_leaves_the_rest_of_the_blocks)
{
    world w;
    uint64_t left;

    start(&w);
    (void)send_reset(&w.c, w.ns, 0, 0);
    (void)send_reset(&w.c, w.few, 0, 0);
    one_turn(&w);
    left = n_ready(&w);
    cr_assert_lt(left, BLOCKS);
    fx_gone(&w.c);
    cr_assert_eq(n_ready(&w), left);
    stop(&w);
}

Test(sweep, cancel_stops_a_reset_where_it_is)
{
    world w;
    uint64_t id, cancel, left;

    start(&w);
    id = send_reset(&w.c, w.ns, 0, 0);
    cancel = send_cancel(&w.c, id);
    (void)wait_reset(&w.c, id, KVS_E_CANCELLED);
    cr_assert_eq(wait_cancel(&w.c, cancel), WIRE_CANCEL_STOPPED);
    cr_assert_eq(n_ready(&w), BLOCKS + 2, "it had not begun");
    id = send_reset(&w.c, w.ns, 0, 0);
    one_turn(&w);
    left = n_ready(&w);
    cancel = send_cancel(&w.c, id);
    cr_assert(!fx_has_reply(&w.c, id) && !fx_has_reply(&w.c, cancel));
    (void)wait_reset(&w.c, id, KVS_E_CANCELLED);
    cr_assert_eq(wait_cancel(&w.c, cancel), WIRE_CANCEL_STOPPED);
    cr_assert(left < BLOCKS && n_ready(&w) == left);
    check(&w);
    cr_assert_eq(wait_reset(&w.c, send_reset(&w.c, w.ns, 0, 0), KVS_OK).dropped, left - 2);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, a_reset_whose_deadline_passes_is_answered_once_and_stops)
{
    world w;
    uint64_t id, left;

    start(&w);
    id = send_reset(&w.c, w.ns, 0, 1000);
    one_turn(&w);
    left = n_ready(&w);
    fx_advance(&w.f, 1000);
    (void)wait_reset(&w.c, id, KVS_E_DEADLINE);
    cr_assert_eq(n_ready(&w), left);
    fx_advance(&w.f, 0);
    cr_assert_null(w.c.first, "a second reply");
    cr_assert_eq(wait_cancel(&w.c, send_cancel(&w.c, id)), WIRE_CANCEL_GONE);
    fx_gone(&w.c);
    stop(&w);
}

/* As with jobs: what has begun goes on to its end and is answered. */
Test(sweep, a_shutdown_lets_a_reset_that_has_begun_end)
{
    world w;
    uint64_t begun, waits;

    start(&w);
    begun = send_reset(&w.c, w.ns, 0, 0);
    one_turn(&w);
    waits = send_reset(&w.c, w.few, 0, 0);
    core_drain(w.f.core);
    cr_assert(!core_is_idle(w.f.core));
    (void)wait_reset(&w.c, waits, KVS_E_CANCELLED);
    cr_assert_eq(wait_reset(&w.c, begun, KVS_OK).dropped, BLOCKS);
    cr_assert(core_is_idle(w.f.core));
    cr_assert_eq(n_ready(&w), 2);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, who_watches_is_told_once_it_is_over)
{
    world w;
    uint64_t watch, id;
    fx_body *b = fx_new();
    wire_event head;
    wire_event_item item;
    fx_answer a;

    start(&w);
    wire_put_watch_req(&b->out, &(wire_watch_req){.mask = 1u << WIRE_EVENT_REMOVED | 1u << WIRE_EVENT_RESET});
    watch = fx_send(&w.other, WIRE_WATCH, b);
    a = fx_wait(&w.other, watch);
    fx_done(&a);
    id = send_reset(&w.c, w.ns, 0, 0);
    for (; !fx_has_reply(&w.c, id); one_turn(&w))
        cr_assert_null(w.other.first);
    (void)wait_reset(&w.c, id, KVS_OK);
    a = fx_wait(&w.other, watch);
    wire_get_event(&a.in, &head);
    wire_get_event_item(&a.in, &item);
    cr_assert(head.n == 1 && item.type == WIRE_EVENT_RESET && item.ns == w.ns);
    fx_done(&a);
    cr_assert_null(w.other.first);
    fx_gone(&w.c);
    stop(&w);
}

/* ---- regions ---- */

/* What is kept on a device, without the copies: n slots of a region of that client. */
static region *keep(fx_client *c, fx_region *g, uint32_t n)
{
    region_seat *seat = c->peer->seats;
    uint8_t key[32];
    uint32_t slot;

    cr_assert_eq(seat->region->id, g->id);
    for (uint32_t i = 0; i < n; i++) {
        fx_key(key, i);
        cr_assert_eq(region_take(seat, &slot), KVS_OK);
        cr_assert(region_share(seat, slot, key, 0));
    }
    return seat->region;
}

Test(sweep, keys_of_a_large_region_are_forgotten_in_parts)
{
    enum { KEPT = 800 };
    world w;
    region *r[3];
    fx_region g[3];
    uint64_t id;
    uint32_t had = 2 * KEPT, has;

    start(&w);
    cr_assert_eq(wait_reset(&w.c, send_reset(&w.c, w.ns, 0, 0), KVS_OK).dropped, BLOCKS);
    for (int i = 0; i < 3; i++) {
        g[i] = fx_slots(&w.other, i < 2 ? w.ns : w.few, i < 2 ? KEPT : 2);
        r[i] = keep(&w.other, &g[i], i < 2 ? KEPT : 2);
    }
    id = send_reset(&w.c, w.ns, 0, 0);
    for (; !fx_has_reply(&w.c, id); had = has) {
        one_turn(&w);
        has = r[0]->n_keys + r[1]->n_keys;
        cr_assert_leq(had - has, A_STEP);
    }
    (void)wait_reset(&w.c, id, KVS_OK);
    cr_assert(r[0]->n_keys == 0 && r[1]->n_keys == 0);
    cr_assert_eq(r[2]->n_keys, 2, "of another namespace");
    for (int i = 0; i < 3; i++)
        fx_unmap(&g[i]);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, a_region_that_closes_while_it_is_looked_at_is_left_out)
{
    enum { KEPT = 250 };
    world w;
    fx_client third;
    fx_region first, second;
    region *stays;
    uint64_t id;
    fx_body *b = fx_new();

    start(&w);
    fx_client_open(&third, &w.f);
    second = fx_slots(&third, fx_ns(&third, "few"), KEPT);
    stays = keep(&third, &second, KEPT);
    first = fx_slots(&w.other, w.few, KEPT); /* the latest is looked at first */
    (void)keep(&w.other, &first, KEPT);
    fill(&w, w.few, 100, A_STEP - 100);
    id = send_reset(&w.c, w.few, 0, 0);
    while (core_next_sweep(w.f.core)->region == NULL) /* the blocks first */
        one_turn(&w);
    cr_assert_eq(core_next_sweep(w.f.core)->region->id, first.id);
    wire_put_region_close_req(&b->out, &(wire_region_close_req){.region = first.id});
    (void)fx_send(&w.other, WIRE_REGION_CLOSE, b);
    cr_assert_eq(core_next_sweep(w.f.core)->region, stays);
    (void)wait_reset(&w.c, id, KVS_OK);
    cr_assert_eq(stays->n_keys, 0);
    fx_unmap(&first);
    fx_unmap(&second);
    fx_gone(&third);
    fx_gone(&w.c);
    stop(&w);
}

/* ---- a DROP of many keys from many regions ---- */

enum { REGIONS = 6, NAMED = 400 };

/* The keys 0..NAMED - 1 in each of the regions; the host pool has all but the first one. */
static void keep_everywhere(world *w, fx_region g[REGIONS], region *r[REGIONS])
{
    for (int i = 0; i < REGIONS; i++) {
        g[i] = fx_slots(&w->other, w->ns, NAMED);
        r[i] = keep(&w->other, &g[i], NAMED);
    }
}

static uint32_t n_kept(region *const r[REGIONS])
{
    uint32_t n = 0;

    for (int i = 0; i < REGIONS; i++)
        n += r[i]->n_keys;
    return n;
}

static void unmap_all(fx_region g[REGIONS])
{
    for (int i = 0; i < REGIONS; i++)
        fx_unmap(&g[i]);
}

Test(sweep, a_drop_of_many_keys_from_many_regions_goes_in_parts)
{
    enum { PINNED = 5 };
    world w;
    region *r[REGIONS];
    fx_region g[REGIONS];
    uint8_t key[32];
    uint64_t id;
    uint32_t had = REGIONS * NAMED, has;
    wire_key_rep rep;
    fx_answer a;

    start(&w);
    keep_everywhere(&w, g, r);
    cr_assert_eq(fx_status(&w.c, WIRE_PIN, fx_keys_body(w.ns, PINNED, 1)), KVS_OK);
    id = fx_send(&w.c, WIRE_DROP, fx_keys_body(w.ns, 0, NAMED));
    cr_assert_eq(n_ready(&w), BLOCKS + 2 - (NAMED - 2), "from host memory at once, but for the pinned one");
    cr_assert_eq(n_kept(r), had, "the rest not within the request");
    for (; !fx_has_reply(&w.c, id); had = has) {
        uint64_t ping = fx_send(&w.other, WIRE_PING, fx_new());

        cr_assert(fx_has_reply(&w.other, ping));
        one_turn(&w);
        has = n_kept(r);
        cr_assert_leq(had - has, A_STEP);
    }
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_PARTIAL);
    wire_get_key_rep(&a.in, &rep);
    cr_assert(rep.n == NAMED && rep.n_ok == NAMED - 1);
    for (uint32_t i = 0; i < NAMED; i++)
        cr_assert_eq(wire_get_u32(&a.in), i == PINNED ? KVS_E_BUSY : KVS_OK, "%u", i);
    fx_done(&a);
    cr_assert_eq(n_kept(r), REGIONS);
    fx_key(key, PINNED);
    for (int i = 0; i < REGIONS; i++)
        cr_assert_neq(region_find(r[i], key), REGION_NONE);
    unmap_all(g);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, a_drop_of_few_searches_is_answered_at_once)
{
    world w;
    region *r[REGIONS];
    fx_region g[REGIONS];
    uint64_t id;

    start(&w);
    keep_everywhere(&w, g, r);
    id = fx_send(&w.c, WIRE_DROP, fx_keys_body(w.ns, 0, A_STEP / REGIONS)); /* 1,020 searches */
    cr_assert(fx_has_reply(&w.c, id));
    cr_assert_eq(n_kept(r), REGIONS * NAMED - A_STEP / REGIONS * REGIONS);
    cr_assert_null(core_next_sweep(w.f.core));
    unmap_all(g);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, a_drop_is_stopped_by_cancel_and_by_the_end_of_its_client_and_not_by_a_shutdown)
{
    world w;
    fx_client third;
    region *r[REGIONS];
    fx_region g[REGIONS];
    uint64_t id, cancel;
    uint32_t has;
    fx_answer a;

    start(&w);
    keep_everywhere(&w, g, r);
    fx_client_open(&third, &w.f);
    (void)fx_send(&third, WIRE_DROP, fx_keys_body(fx_ns(&third, "many"), 0, NAMED));
    one_turn(&w);
    fx_gone(&third);
    has = n_kept(r);
    cr_assert(has > 0 && has < REGIONS * NAMED);
    id = fx_send(&w.c, WIRE_DROP, fx_keys_body(w.ns, 0, NAMED));
    cancel = send_cancel(&w.c, id);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    fx_done(&a);
    cr_assert_eq(wait_cancel(&w.c, cancel), WIRE_CANCEL_STOPPED);
    cr_assert_eq(n_kept(r), has);
    id = fx_send(&w.c, WIRE_DROP, fx_keys_body(w.ns, 0, NAMED));
    core_drain(w.f.core);
    cr_assert(!core_is_idle(w.f.core));
    a = fx_wait(&w.c, id);
    fx_done(&a);
    cr_assert_eq(n_kept(r), 0);
    unmap_all(g);
    fx_gone(&w.c);
    stop(&w);
}

/* ---- a tenant that is gone ---- */

Test(sweep, a_tenant_that_a_reload_has_taken_out_is_emptied_in_parts)
{
    world w;
    fx_client red;
    directory_tenant t;
    uint64_t had;
    int turns = 0;

    start(&w);
    fx_client_open_tenant(&red, &w.f, 1);
    w.red = fx_ns(&red, "theirs");
    fill(&w, w.red, 1, BLOCKS);
    cr_assert_eq(fx_status(&red, WIRE_PIN, fx_keys_body(w.red, 1, 2)), KVS_OK);
    fx_gone(&red);
    w.f.cfg.tenants[1].gone = true;
    core_configured(w.f.core);
    had = n_ready(&w);
    cr_assert_eq(had, 2 * BLOCKS + 2, "not within the reload");
    for (; core_next_sweep(w.f.core); turns++, had = n_ready(&w)) {
        core_configured(w.f.core); /* another reload meanwhile: it goes on as it was */
        one_turn(&w);
        cr_assert_leq(had - n_ready(&w), A_STEP);
        check(&w);
    }
    cr_assert_geq(turns, BLOCKS / A_STEP);
    directory_get_tenant(w.f.core->dir, 1, &t);
    cr_assert(t.used_bytes == 0 && t.pinned_bytes == 0);
    cr_assert_eq(n_ready(&w), BLOCKS + 2);
    fx_gone(&w.c);
    stop(&w);
}

static void set_red(world *w, bool gone)
{
    w->f.cfg.tenants[1].gone = gone;
    core_configured(w->f.core);
}

/* Symptom: whoever had the name next found all of them, and what it stored meanwhile went with them. */
Test(sweep, a_tenant_that_comes_back_finds_nothing_of_what_it_had_and_keeps_what_it_stores)
{
    world w;
    fx_client red;
    directory_tenant t;
    uint32_t before;

    start(&w);
    fx_client_open_tenant(&red, &w.f, 1);
    before = fx_ns(&red, "theirs");
    fill(&w, before, 1, BLOCKS);
    cr_assert_eq(fx_status(&red, WIRE_PIN, fx_keys_body(before, 1, 2)), KVS_OK);
    fx_gone(&red);
    set_red(&w, true);
    set_red(&w, false);
    fx_client_open_tenant(&red, &w.f, 1);
    cr_assert_eq(fx_status(&red, WIRE_PIN, fx_keys_body(before, 1, 1)), KVS_E_NOT_FOUND, "by its old number");
    w.red = fx_ns(&red, "theirs");
    cr_assert_neq(w.red, before);
    cr_assert_eq(fx_lookup(&red, w.red, 1, 2), 0);
    fill(&w, w.red, 1, 3);
    cr_assert_eq(fx_lookup(&red, w.red, 1, 3), 3);
    while (core_next_sweep(w.f.core)) {
        one_turn(&w);
        check(&w);
        cr_assert_eq(fx_lookup(&red, w.red, 1, 3), 3);
    }
    cr_assert_eq(n_ready(&w), BLOCKS + 2 + 3);
    directory_get_tenant(w.f.core->dir, 1, &t);
    cr_assert(t.n_ready == 3 && t.n_namespaces == 1 && t.pinned_bytes == 0);
    (void)wait_reset(&red, send_reset(&red, WIRE_NONE32, 0, 0), KVS_OK);
    fx_gone(&red);
    fx_gone(&w.c);
    stop(&w);
}

/* Its client of before is still there, for a copy that runs. */
Test(sweep, a_tenant_that_comes_back_cannot_attach_to_a_region_of_what_it_left)
{
    world w;
    fx_client red, back;
    fx_region g;
    wire_slot_ref refs[2];
    wire_region_attach_req q = {.kind = WIRE_REGION_SLOTS};
    fx_body *b = fx_new();

    start(&w);
    fx_client_open_tenant(&red, &w.f, 1);
    q.ns = fx_ns(&red, "theirs");
    g = fx_slots(&red, q.ns, 4);
    fx_take(&red, &g, 2, refs);
    set_red(&w, true);
    set_red(&w, false);
    fx_client_open_tenant(&back, &w.f, 1);
    memcpy(q.token, g.token, sizeof q.token);
    wire_put_region_attach_req(&b->out, &q);
    cr_assert_eq(fx_status(&back, WIRE_REGION_ATTACH, b), KVS_E_NOT_FOUND);
    fx_unmap(&g);
    fx_gone(&back);
    fx_gone(&red);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, a_tenant_that_goes_again_before_it_was_emptied_leaves_nothing)
{
    world w;
    fx_client red;
    directory_tenant t;

    start(&w);
    for (int i = 0; i < 3; i++) {
        fx_client_open_tenant(&red, &w.f, 1);
        w.red = fx_ns(&red, "theirs");
        fill(&w, w.red, 1, 2000);
        fx_gone(&red);
        set_red(&w, true);
        one_turn(&w);
        set_red(&w, i == 2);
    }
    while (core_next_sweep(w.f.core))
        one_turn(&w);
    directory_get_tenant(w.f.core->dir, 1, &t);
    cr_assert(t.used_bytes == 0 && t.n_namespaces == 0);
    cr_assert_eq(n_ready(&w), BLOCKS + 2);
    fx_gone(&w.c);
    stop(&w);
}

Test(sweep, the_daemon_may_end_while_a_tenant_is_being_emptied)
{
    world w;
    fx_client red;

    start(&w);
    fx_client_open_tenant(&red, &w.f, 1);
    w.red = fx_ns(&red, "theirs");
    fill(&w, w.red, 1, BLOCKS);
    fx_gone(&red);
    w.f.cfg.tenants[1].gone = true;
    core_configured(w.f.core);
    one_turn(&w);
    core_drain(w.f.core);
    cr_assert(core_is_idle(w.f.core), "nobody waits for it");
    fx_gone(&w.c);
    fx_gone(&w.other);
    fx_gone(&w.admin);
    fx_close(&w.f);
}
