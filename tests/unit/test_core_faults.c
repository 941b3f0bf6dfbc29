#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/random.h"

/* A device that is slow, that fails and that keeps copies to itself, under a random life whose every loaded byte is
 * compared: what a status promises holds, and nothing is left behind. */

enum { CLIENTS = 3, SLOTS = 8, OWN = 3, KEYS = 20, POOL = 10, STEPS = 8000, MAX_OPEN = 6, BLANK = 0x77 };

typedef struct flight {
    uint64_t id;
    bool is_load, cancelled;
    uint64_t first;
    uint32_t n;
} flight;

typedef struct user {
    fx_client c;
    fx_region g;
    wire_slot_ref own[OWN];
    flight open; /* the one data request of this client; id 0: none */
    bool stuck;  /* answered, but its slots are still the daemon's */
} user;

typedef struct world {
    fx f;
    fx_client admin;
    user u[CLIENTS];
    uint32_t ns;
    rnd r;
    unsigned loaded, stored, failed, overdue;
} world;

static void join(world *w, user *u)
{
    fx_client_open(&u->c, &w->f);
    w->ns = fx_ns(&u->c, "m");
    u->g = fx_slots(&u->c, w->ns, SLOTS);
    fx_take(&u->c, &u->g, OWN, u->own);
    u->open.id = 0;
    u->stuck = false;
}

static void leave(user *u)
{
    fx_unmap(&u->g);
    fx_gone(&u->c);
    while (u->c.first) { /* an answer that nobody has waited for */
        reply *next = u->c.first->next;

        reply_destroy(u->c.first);
        u->c.first = next;
    }
}

/* ---- the weather ---- */

static void change_faults(world *w)
{
    static const fault_call calls[] = {FAULT_COPY, FAULT_WAIT};
    fault_plan p = {
        .call = calls[rnd_below(&w->r, 2)], .nth = 1 + rnd_below(&w->r, 4), .count = 1 + rnd_below(&w->r, 2)};

    switch (rnd_below(&w->r, 4)) {
    case 0:
        p.action = FAULT_FAIL;
        p.status = KVS_E_DEVICE;
        break;
    case 1:
        p.action = FAULT_DELAY;
        p.delay_us = (uint32_t)rnd_below(&w->r, 300);
        break;
    case 2:
        p.action = FAULT_SWALLOW;
        p.status = rnd_below(&w->r, 2) ? KVS_OK : KVS_E_DEVICE;
        break;
    default:
        fault_device_set_lazy(w->f.dev, rnd_below(&w->r, 2) == 0);
    }
    fault_device_plan(w->f.dev, &p);
}

static void calm(world *w)
{
    fault_device_clear(w->f.dev, FAULT_COPY);
    fault_device_clear(w->f.dev, FAULT_WAIT);
    fault_device_release(w->f.dev);
}

/* ---- requests ---- */

static fx_move move_of(const world *w, const user *u)
{
    return (fx_move){.ns = w->ns, .region = u->g.id, .n = u->open.n, .first = u->open.first, .slots = u->own};
}

static void begin(world *w, user *u)
{
    uint64_t limit = rnd_below(&w->r, 4) == 0 ? 1 + rnd_below(&w->r, 200) : 1000000;
    fx_move m;

    u->open = (flight){.is_load = rnd_below(&w->r, 2) == 0,
                       .first = 1 + rnd_below(&w->r, KEYS),
                       .n = 1 + (uint32_t)rnd_below(&w->r, OWN)};
    m = move_of(w, u);
    for (uint32_t i = 0; i < m.n; i++) {
        if (u->open.is_load)
            memset(u->g.base + (size_t)u->own[i].slot * FX_SLOT, BLANK, FX_SLOT);
        else
            fx_fill(&u->g, u->own[i].slot, m.first + i);
    }
    u->open.id = u->open.is_load ? fx_send_deadline(&u->c, WIRE_LOAD, limit, fx_load_body(&m))
                                 : fx_send_deadline(&u->c, WIRE_STORE, limit, fx_store_body(&m));
}

static bool is_blank(const user *u, uint32_t i)
{
    const uint8_t *p = u->g.base + (size_t)u->own[i].slot * FX_SLOT;

    return p[0] == BLANK && memcmp(p, p + 1, FX_SLOT - 1) == 0;
}

static void check_load(world *w, user *u, wire_in *in)
{
    wire_load_rep rep;

    wire_get_load_rep(in, &rep);
    for (uint32_t i = 0; i < rep.n; i++) {
        wire_load_result r;

        wire_get_load_result(in, &r);
        w->failed += r.status == KVS_E_DEVICE;
        u->stuck |= r.status == KVS_E_BUSY;
        w->loaded += r.status == KVS_OK;
        if (r.status == KVS_OK)
            cr_assert(fx_holds(&u->g, u->own[i].slot, u->open.first + i), "wrong bytes for key %llu",
                      (unsigned long long)u->open.first + i);
        if (r.status == KVS_E_NOT_FOUND || r.status == KVS_E_DEADLINE)
            cr_assert(is_blank(u, i), "%s, but the slot was written", kvs_status_name(r.status));
        cr_assert(r.status != KVS_E_CORRUPT);
    }
}

static void check_store(world *w, user *u, wire_in *in)
{
    wire_key_rep rep;
    const uint8_t *list;

    wire_get_key_rep(in, &rep);
    list = wire_get_array(in, rep.n, 4);
    for (uint32_t i = 0; i < rep.n; i++) {
        uint32_t s = wire_at_u32(list, i);

        w->stored += s == KVS_OK;
        w->failed += s == KVS_E_DEVICE;
        u->stuck |= s == KVS_E_BUSY;
    }
}

/* Slots named by an overdue request are the daemon's until a CANCEL of it has been answered. */
static void take_back(world *w, user *u, uint64_t id)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){id});
    if (u->stuck)
        w->overdue++;
    fault_device_release(w->f.dev);
    cr_assert_eq(fx_status(&u->c, WIRE_CANCEL, b), KVS_OK);
    u->stuck = false;
}

static void finish(world *w, user *u)
{
    uint64_t id = u->open.id;
    fx_answer a = fx_wait(&u->c, id);

    if (a.status == KVS_OK || a.status == KVS_E_PARTIAL || a.status == KVS_E_DEADLINE || a.status == KVS_E_CANCELLED) {
        if (u->open.is_load)
            check_load(w, u, &a.in);
        else
            check_store(w, u, &a.in);
    } else {
        cr_assert(false, "%s: %s", kvs_status_name(a.status), a.msg);
    }
    u->open.id = 0;
    fx_done(&a);
    if (a.status == KVS_E_DEADLINE)
        take_back(w, u, id);
}

/* The request is answered whether the device moves on or not: by its end or by its deadline. */
static void push_to_the_end(world *w, user *u)
{
    while (!fx_has_reply(&u->c, u->open.id)) {
        if (fault_device_held(w->f.dev) > 0 && rnd_below(&w->r, 2) == 0)
            fx_advance(&w->f, 2000000); /* past every deadline */
        else
            calm(w);
        if (!fx_has_reply(&u->c, u->open.id))
            fx_run(&w->f, 1);
    }
    finish(w, u);
}

static void step(world *w)
{
    user *u = &w->u[rnd_below(&w->r, CLIENTS)];
    fx_body *b;

    switch (rnd_below(&w->r, 12)) {
    case 0:
        change_faults(w);
        break;
    case 1:
        fx_advance(&w->f, rnd_below(&w->r, 150));
        break;
    case 2:
        fault_device_release(w->f.dev);
        break;
    case 3:
        (void)fx_status(&u->c, WIRE_DROP, fx_keys_body(w->ns, 1 + rnd_below(&w->r, KEYS), 2));
        break;
    case 4:
        b = fx_new();
        wire_put_reset_req(&b->out, &(wire_reset_req){w->ns, 0});
        if (rnd_below(&w->r, 6) == 0)
            (void)fx_status(&u->c, WIRE_RESET, b);
        else
            free(b);
        break;
    case 5:
        if (rnd_below(&w->r, 16) == 0) { /* with whatever it has on its way */
            calm(w);
            leave(u);
            join(w, u);
        }
        break;
    default:
        if (u->open.id == 0)
            begin(w, u);
        else if (fx_has_reply(&u->c, u->open.id))
            finish(w, u);
        else
            push_to_the_end(w, u);
    }
}

/* Symptom: a timed-out or failed copy landed later in memory that belonged to somebody else by then. */
Test(core_faults, whatever_the_device_does_no_loaded_byte_is_wrong)
{
    static const char *const zeros[] = {"directory.held", "pool.writing_bytes", "pool.draining_bytes",
                                        "pool.quarantined_bytes"};
    world w = {.r = rnd_open("core_faults", 3)};

    fx_config(&w.f);
    w.f.cfg.pool_max_slots = POOL;
    fx_open(&w.f);
    fx_admin_open(&w.admin, &w.f);
    for (int i = 0; i < CLIENTS; i++)
        join(&w, &w.u[i]);
    for (int n = 0; n < STEPS; n++) {
        step(&w);
        if (n % 250 == 0)
            cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1, "at step %d", n);
    }
    calm(&w);
    for (int i = 0; i < CLIENTS; i++)
        if (w.u[i].open.id != 0)
            push_to_the_end(&w, &w.u[i]);
    while (!core_is_idle(w.f.core))
        fx_run(&w.f, 1);
    for (size_t i = 0; i < sizeof zeros / sizeof zeros[0]; i++)
        cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, zeros[i]), 0, "%s", zeros[i]);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    cr_assert(w.loaded > 50 && w.stored > 50 && w.failed > 10 && w.overdue > 5,
              "%u loaded, %u stored, %u failed, %u late", w.loaded, w.stored, w.failed, w.overdue);
    for (int i = 0; i < CLIENTS; i++)
        leave(&w.u[i]);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

/* Symptom: a failed load was reported as done, or the same key failed again and again. */
Test(core_faults, the_reply_names_exactly_the_blocks_whose_copies_failed)
{
    world w = {0};
    user *u = &w.u[0];
    wire_slot_ref slots[8];
    wire_load_result r[8];
    fx_move m;

    fx_config(&w.f);
    fx_open(&w.f);
    fx_client_open(&u->c, &w.f);
    w.ns = fx_ns(&u->c, "m");
    u->g = fx_slots(&u->c, w.ns, 8);
    fx_take(&u->c, &u->g, 8, slots);
    m = (fx_move){.ns = w.ns, .region = u->g.id, .n = 8, .first = 1, .slots = slots};
    for (uint32_t i = 0; i < 8; i++)
        fx_fill(&u->g, slots[i].slot, 1 + i);
    cr_assert_eq(fx_store(&u->c, &m, NULL), KVS_OK);
    for (uint32_t k = 0; k < 2; k++) { /* blocks 2 and 5, one after the other: the second load has 7 copies */
        for (uint32_t i = 0; i < 8; i++)
            fx_fill(&u->g, slots[i].slot, 99);
        fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, k == 0 ? 2 : 4, 1, KVS_E_DEVICE, 0});
        cr_assert_eq(fx_load(&u->c, &m, r), KVS_E_PARTIAL);
        for (uint32_t i = 0; i < 8; i++) {
            bool lost = i == 1 || (k == 1 && i == 4);

            cr_assert_eq(r[i].status,
                         !lost              ? KVS_OK
                         : k == 1 && i == 1 ? KVS_E_NOT_FOUND
                                            : KVS_E_DEVICE,
                         "block %u: %s", i, kvs_status_name(r[i].status));
            cr_assert(fx_holds(&u->g, slots[i].slot, lost ? 99 : 1 + i), "block %u", i);
        }
    }
    cr_assert_eq(fx_lookup(&u->c, w.ns, 1, 8), 1); /* 2 is gone, so that no retry can loop */
    leave(u);
    fx_close(&w.f);
}

/* Symptom: a completion was lost, its block was held for ever, and nobody could see why. */
Test(core_faults, a_lost_completion_is_seen_publishes_nothing_and_holds_up_no_load)
{
    world w = {0};
    user *u = &w.u[0];
    wire_slot_ref slots[4];
    wire_load_result r;
    fx_move m;
    fx_answer a;
    uint64_t id;

    fx_config(&w.f);
    fx_open(&w.f);
    fx_admin_open(&w.admin, &w.f);
    fx_client_open(&u->c, &w.f);
    w.ns = fx_ns(&u->c, "m");
    u->g = fx_slots(&u->c, w.ns, 4);
    fx_take(&u->c, &u->g, 4, slots);
    m = (fx_move){.ns = w.ns, .region = u->g.id, .n = 1, .first = 1, .slots = slots};
    for (; m.first <= 10; m.first++) {
        fx_fill(&u->g, slots[0].slot, m.first);
        cr_assert_eq(fx_store(&u->c, &m, NULL), KVS_OK);
    }
    m.slots = slots + 1;
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_SWALLOW, 1, 1, KVS_E_DEVICE, 0});
    id = fx_send_deadline(&u->c, WIRE_STORE, 1000000, fx_store_body(&m));
    fault_device_await_held(w.f.dev, 1);
    cr_assert_gt(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "store.oldest_us"), 0);
    m.slots = slots;
    for (m.first = 1; m.first <= 10; m.first++) {
        cr_assert_eq(fx_load(&u->c, &m, &r), KVS_OK);
        cr_assert(fx_holds(&u->g, slots[0].slot, m.first));
    }
    fx_advance(&w.f, 1000001);
    a = fx_wait(&u->c, id);
    cr_assert_eq(a.status, KVS_E_DEADLINE);
    fx_done(&a);
    cr_assert_eq(fx_lookup(&u->c, w.ns, 11, 1), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.quarantined_bytes"), FX_SLOT);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    take_back(&w, u, id);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.quarantined_bytes"), 0);
    cr_assert_eq(fx_lookup(&u->c, w.ns, 11, 1), 0);
    leave(u);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

static fx_body *close_body(uint32_t region)
{
    fx_body *b = fx_new();

    wire_put_region_close_req(&b->out, &(wire_region_close_req){region, 0});
    return b;
}

static uint64_t send_cancel(fx_client *c, uint64_t target)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){target});
    return fx_send(c, WIRE_CANCEL, b);
}

/* Symptom: a job was dropped, its client closed the region at once, and the job's way back led through freed memory. */
Test(core_faults, a_region_closed_right_after_its_jobs_were_dropped_is_not_touched_again)
{
    world w = {0};
    user *u = &w.u[0];
    fx_move m;
    uint64_t store, load, gone;
    fx_answer a;

    fx_config(&w.f);
    fx_open(&w.f);
    join(&w, u);
    m = (fx_move){.ns = w.ns, .region = u->g.id, .n = 2, .first = 1, .slots = u->own, .flags = WIRE_STORE_KEEP};
    cr_assert_eq(fx_store(&u->c, &m, NULL), KVS_OK);
    m = (fx_move){
        .ns = w.ns, .region = u->g.id, .n = 1, .first = 7, .slots = u->own + 2, .after_counter = 1, .after_value = 1};
    store = fx_send_deadline(&u->c, WIRE_STORE, 100, fx_store_body(&m));
    m.n = 2;
    m.first = 2; /* key 2 is on the device already: a hold without a copy; key 3 is nowhere */
    m.slots = NULL;
    load = fx_send_deadline(&u->c, WIRE_LOAD, 200, fx_load_body(&m));
    gone = send_cancel(&u->c, load);
    fx_advance(&w.f, 150); /* the store is answered; nothing of either has come back */
    cr_assert(fx_has_reply(&u->c, store) && !fx_has_reply(&u->c, load));
    store = fx_send(&u->c, WIRE_REGION_CLOSE, close_body(u->g.id));
    fx_advance(&w.f, 150); /* now the deadline of the load has passed too */
    a = fx_wait(&u->c, load);
    cr_assert(a.status == KVS_E_DEADLINE || a.status == KVS_E_CANCELLED);
    fx_done(&a);
    a = fx_wait(&u->c, gone);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    a = fx_wait(&u->c, store);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    fx_done(&a);
    leave(u);
    fx_close(&w.f);
}

/* A load that is cancelled before it began leaves no hold on a slot that its reply does not name. */
Test(core_faults, a_cancelled_load_holds_nothing)
{
    world w = {0};
    user *u = &w.u[0];
    wire_load_result r;
    wire_load_rep rep;
    fx_move m;
    uint64_t load, gone;
    fx_answer a;

    fx_config(&w.f);
    fx_open(&w.f);
    fx_admin_open(&w.admin, &w.f);
    join(&w, u);
    m = (fx_move){.ns = w.ns, .region = u->g.id, .n = 1, .first = 1, .slots = u->own, .flags = WIRE_STORE_KEEP};
    cr_assert_eq(fx_store(&u->c, &m, NULL), KVS_OK);
    m = (fx_move){.ns = w.ns, .region = u->g.id, .n = 1, .first = 1, .after_counter = 1, .after_value = 1};
    load = fx_send(&u->c, WIRE_LOAD, fx_load_body(&m));
    gone = send_cancel(&u->c, load);
    a = fx_wait(&u->c, load);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    wire_get_load_rep(&a.in, &rep);
    wire_get_load_result(&a.in, &r);
    cr_assert_eq(rep.n_ok, 0);
    cr_assert_eq(r.status, KVS_E_CANCELLED);
    cr_assert_eq(r.slot, WIRE_NONE32);
    cr_assert_eq(r.flags, 0);
    fx_done(&a);
    a = fx_wait(&u->c, gone);
    fx_done(&a);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    leave(u);
    fx_gone(&w.admin);
    fx_close(&w.f);
}
