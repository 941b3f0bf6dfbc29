#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <string.h>

#include "tests/support/random.h"

/* Clients that name any slot at any moment: their own, another one's, one that the daemon has just chosen for a job of theirs,
 * with the generation that it has, had or is about to have.  What becomes of their bytes is their own affair; the daemon's
 * books stay right, everything is answered once, and everything ends. */

enum {
    CLIENTS = 3, /* the first two share a region; the last one's is on the other device, and exchanges with theirs */
    SLOTS = 16,
    KEYS = 24,
    POOL = 16,
    OPEN = 6,
    MOST = 12, /* of a list */
    STEPS = 4000,
    HELD_US = 5000, /* after which nothing is held for its twin any more */
};

typedef struct ask {
    uint64_t id; /* 0: none */
    bool is_load;
} ask;

typedef struct user {
    fx_client c;
    fx_region g;
    uint32_t ns, region;
    ask open[OPEN];
    uint64_t raised;
} user;

typedef struct world {
    fx f;
    fx_client admin;
    user u[CLIENTS];
    uint32_t gen[2][SLOTS]; /* the latest that was seen, of each region */
    device *dev[2];
    rnd r;
    unsigned answered, ok, refused;
} world;

static uint64_t below(world *w, uint64_t n)
{
    return rnd_below(&w->r, n);
}

static uint32_t index_of(const world *w, const user *u)
{
    return (uint32_t)(u - w->u);
}

static uint32_t *gens_of(world *w, const user *u)
{
    return w->gen[index_of(w, u) == CLIENTS - 1];
}

static void learn(world *w, const user *u, uint32_t slot, uint32_t gen)
{
    uint32_t *seen = &gens_of(w, u)[slot];

    *seen = gen > *seen ? gen : *seen;
}

static void guess(world *w, const user *u, wire_slot_ref *ret, uint32_t n)
{
    uint32_t from = (uint32_t)below(w, SLOTS);

    for (uint32_t i = 0; i < n; i++) {
        ret[i].slot = (from + i) % SLOTS;
        ret[i].gen = gens_of(w, u)[ret[i].slot] + (below(w, 4) == 0);
    }
}

/* ---- clients ---- */

static void sit_down(world *w, user *u)
{
    wire_region_attach_req q = {.ns = u->ns, .mode = WIRE_ATTACH_TOKEN};
    wire_region_rep rep;
    fx_body *b = fx_new();
    fx_answer a;

    memcpy(q.token, w->u[0].g.token, sizeof q.token);
    wire_put_region_attach_req(&b->out, &q);
    a = fx_call(&u->c, WIRE_REGION_ATTACH, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    u->region = rep.region;
    fx_done(&a);
}

static void join(world *w, user *u)
{
    wire_slot_ref all[SLOTS];

    *u = (user){.raised = 0};
    fx_client_open(&u->c, &w->f);
    u->ns = fx_ns(&u->c, "m");
    if (index_of(w, u) == 1) {
        sit_down(w, u);
        return;
    }
    u->g = fx_slots_on(&u->c, index_of(w, u) == CLIENTS - 1, u->ns, SLOTS);
    u->region = u->g.id;
    fx_take(&u->c, &u->g, SLOTS, all);
    for (uint32_t i = 0; i < SLOTS; i++)
        gens_of(w, u)[all[i].slot] = all[i].gen;
}

static void leave(user *u)
{
    if (u->g.base != NULL)
        fx_unmap(&u->g);
    fx_gone(&u->c);
}

/* ---- the weather ---- */

static void release(world *w)
{
    for (int i = 0; i < 2; i++)
        fault_device_release(w->dev[i]);
}

static void change_faults(world *w)
{
    fault_plan p = {.call = below(w, 2) ? FAULT_COPY : FAULT_WAIT,
                    .nth = 1 + below(w, 6),
                    .count = 1,
                    .action = FAULT_FAIL,
                    .status = KVS_E_DEVICE};

    if (below(w, 3) == 0)
        p.action = FAULT_SWALLOW;
    if (below(w, 3) == 0)
        fault_device_set_lazy(w->dev[below(w, 2)], below(w, 2));
    else
        fault_device_plan(w->dev[below(w, 2)], &p);
}

static void raise_all(user *u)
{
    fx_raise(&u->c, 0, ++u->raised);
}

/* ---- requests ---- */

static void send(world *w, user *u, uint16_t op, fx_body *b)
{
    uint64_t deadline = below(w, 3) == 0 ? 1 + below(w, 300) : 1000000;

    for (int i = 0; i < OPEN; i++)
        if (u->open[i].id == 0) {
            u->open[i] = (ask){fx_send_deadline(&u->c, op, deadline, b), op == WIRE_LOAD};
            return;
        }
    free(b);
}

/* Short ones: with one bad slot all of a list is refused. */
static uint32_t draw_n(world *w)
{
    return 1 + (uint32_t)below(w, below(w, 4) == 0 ? MOST : 2);
}

static fx_move draw(world *w, user *u, wire_slot_ref *refs)
{
    fx_move m = {.ns = u->ns, .region = u->region, .n = draw_n(w), .first = below(w, KEYS)};

    guess(w, u, refs, m.n);
    if (below(w, 2)) {
        m.after_counter = 1;
        m.after_value = u->raised + 1;
    }
    if (below(w, 2)) {
        m.signal_counter = 1;
        m.signal_value = u->raised;
    }
    return m;
}

static void load(world *w, user *u)
{
    wire_slot_ref refs[MOST];
    fx_move m = draw(w, u, refs);

    if (below(w, 2))
        m.slots = refs;
    send(w, u, WIRE_LOAD, fx_load_body(&m));
}

/* The same onto both devices. */
static void load_twice(world *w)
{
    wire_slot_ref refs[MOST];
    fx_move m = draw(w, &w->u[0], refs);

    m.n = MOST;
    m.after_counter = 0;
    for (uint32_t i = 0; i < CLIENTS; i += CLIENTS - 1) {
        m.ns = w->u[i].ns;
        m.region = w->u[i].region;
        send(w, &w->u[i], WIRE_LOAD, fx_load_body(&m));
    }
}

static void store(world *w, user *u)
{
    wire_slot_ref refs[MOST];
    fx_move m = draw(w, u, refs);

    m.slots = refs;
    m.flags = below(w, 2) ? WIRE_STORE_KEEP : 0;
    send(w, u, WIRE_STORE, fx_store_body(&m));
}

static void drop(world *w, user *u)
{
    wire_slot_ref refs[MOST];
    uint32_t n = draw_n(w);
    wire_slot_drop_req q = {.region = u->region, .n = n, .after_counter = WIRE_NONE32};
    fx_body *b = fx_new();

    if (below(w, 3) == 0) {
        q.after_counter = 0;
        q.after_value = u->raised + 1;
    }
    guess(w, u, refs, n);
    wire_put_slot_drop_req(&b->out, &q);
    for (uint32_t i = 0; i < n; i++)
        wire_put_slot_ref(&b->out, &refs[i]);
    send(w, u, WIRE_SLOT_DROP, b);
}

static void take(world *w, user *u)
{
    fx_body *b = fx_new();
    wire_slot_take_rep rep;
    fx_answer a;

    wire_put_slot_take_req(&b->out, &(wire_slot_take_req){u->region, 1 + (uint32_t)below(w, 3)});
    a = fx_call(&u->c, WIRE_SLOT_TAKE, b);
    if (a.status == KVS_OK)
        wire_get_slot_take_rep(&a.in, &rep);
    for (uint32_t i = 0; a.status == KVS_OK && i < rep.n; i++) {
        wire_slot_ref ref;

        wire_get_slot_ref(&a.in, &ref);
        learn(w, u, ref.slot, ref.gen);
    }
    fx_done(&a);
}

static void cancel(world *w, user *u)
{
    const ask *x = &u->open[below(w, OPEN)];
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){x->id});
    if (x->id == 0)
        free(b);
    else
        send(w, u, WIRE_CANCEL, b);
}

static void forget_keys(world *w, user *u)
{
    fx_body *b = fx_new();

    if (below(w, 8) == 0) {
        wire_put_reset_req(&b->out, &(wire_reset_req){u->ns, 0});
        (void)fx_status(&u->c, WIRE_RESET, b);
        return;
    }
    free(b);
    (void)fx_status(&u->c, WIRE_DROP, fx_keys_body(u->ns, below(w, KEYS), 3));
}

/* ---- answers ---- */

static void hear(world *w, user *u, ask *x)
{
    fx_answer a = fx_wait(&u->c, x->id);
    wire_load_rep rep = {0};

    w->answered++;
    w->ok += a.status == KVS_OK;
    w->refused += a.status == KVS_E_STATE || a.status == KVS_E_STALE || a.status == KVS_E_BUSY;
    if (x->is_load && a.in.len > a.in.pos)
        wire_get_load_rep(&a.in, &rep);
    for (uint32_t i = 0; i < rep.n; i++) {
        wire_load_result r;

        wire_get_load_result(&a.in, &r);
        if (r.status == KVS_OK)
            learn(w, u, r.slot, r.gen);
    }
    x->id = 0;
    fx_done(&a);
}

static void go_on(world *w)
{
    unsigned n = sink_posted(&w->f.sink) - w->f.sink.done;

    if (n > 0)
        fx_run(&w->f, n);
    for (int i = 0; i < CLIENTS; i++)
        for (int k = 0; k < OPEN; k++)
            if (w->u[i].open[k].id != 0 && fx_has_reply(&w->u[i].c, w->u[i].open[k].id))
                hear(w, &w->u[i], &w->u[i].open[k]);
}

static void step(world *w)
{
    user *u = &w->u[below(w, CLIENTS)];

    switch (below(w, 16)) {
    case 0:
        change_faults(w);
        break;
    case 1:
        release(w);
        break;
    case 2:
    case 3:
        raise_all(u);
        break;
    case 4:
        fx_advance(&w->f, below(w, 200));
        break;
    case 5:
        take(w, u);
        break;
    case 6:
        cancel(w, u);
        break;
    case 7:
        forget_keys(w, u);
        break;
    case 8:
    case 9:
        drop(w, u);
        break;
    case 10:
    case 11:
        store(w, u);
        break;
    case 12:
        load_twice(w);
        break;
    default:
        load(w, u);
    }
    if (below(w, 2))
        go_on(w);
}

static void settle(world *w)
{
    for (int i = 0; i < 2; i++) {
        fault_device_clear(w->dev[i], FAULT_COPY);
        fault_device_clear(w->dev[i], FAULT_WAIT);
    }
    while (!core_is_idle(w->f.core)) {
        release(w);
        for (int i = 0; i < CLIENTS; i++)
            raise_all(&w->u[i]);
        fx_advance(&w->f, HELD_US);
        if (!core_is_idle(w->f.core))
            fx_run(&w->f, 1);
    }
    go_on(w);
    for (int i = 0; i < CLIENTS; i++)
        for (int k = 0; k < OPEN; k++)
            cr_assert_eq(w->u[i].open[k].id, 0, "client %d has no answer", i);
}

Test(op_guess, whatever_slots_clients_name_the_books_are_right, .timeout = 120)
{
    static world w;

    w.r = rnd_open("op_guess", 3);
    fx_config(&w.f);
    w.f.cfg.pool_max_slots = POOL;
    fx_open_exchanging(&w.f);
    w.dev[0] = w.f.dev;
    w.dev[1] = w.f.second;
    fx_admin_open(&w.admin, &w.f);
    for (int i = 0; i < CLIENTS; i++)
        join(&w, &w.u[i]);
    for (int n = 0; n < STEPS; n++) {
        step(&w);
        if (n % 20 == 0)
            cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1, "at step %d", n);
        if (n % 1000 == 999) { /* the one who does not own the region comes and goes, with whatever it has open */
            release(&w);
            leave(&w.u[1]);
            join(&w, &w.u[1]);
        }
    }
    settle(&w);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    cr_assert(w.answered > 500 && w.ok > 50 && w.refused > 50, "%u answered, %u of them OK, %u refused", w.answered,
              w.ok, w.refused);
    for (int i = 0; i < CLIENTS; i++)
        leave(&w.u[i]);
    fx_gone(&w.admin);
    fx_close(&w.f);
}
