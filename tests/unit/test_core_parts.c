#include <criterion/criterion.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/core.h"
#include "proto/cpus.h"
#include "tests/support/core_fixture.h"
#include "tests/support/random.h"

/* Jobs that begin while their later keys are still looked up, under a random life: a fast device that fails, is slow or keeps
 * copies to itself, lists that name keys twice or that are nowhere, a pool and a quota too small for them, leases, and the
 * end of requests and clients at any moment.  Every loaded byte is compared, and nothing is left behind. */

enum {
    CLIENTS = 3, /* of two tenants: the last one's has a quota */
    LAYERS = 16,
    TOKENS = 64,
    WORDS = LAYERS * TOKENS * 1152 / 8, /* 1.1 MiB: some seven blocks are a first part */
    MOST = 20,                          /* keys of a list that may be copied */
    PAD = 100,                          /* of others behind each, so that a list takes its time */
    OPEN = 2,                           /* requests of a client at a time, each with slots of its own */
    OWN = OPEN * MOST,
    SPARE = 6, /* slots for the daemon to choose from */
    KEYS = 40,
    NOWHERE = KEYS, /* a key that nobody stores */
    POOL = 28,
    QUOTA = 12, /* blocks */
    STEPS = 1500,
};

/* Jobs begin early only where there are processors enough. */
static unsigned cpus = 4;

unsigned cpus_usable(void)
{
    return cpus;
}

typedef struct ask {
    uint64_t id; /* 0: none */
    bool is_load, stuck;
    uint32_t n, counter; /* counter: that it waits for, plus one; 0: none */
    uint32_t group;      /* a key and what is behind it */
    uint64_t key[MOST * (1 + PAD)];
    bool any[MOST * (1 + PAD)]; /* the daemon chooses the slot */
} ask;

typedef struct user {
    fx_client c;
    uint32_t tenant, ns;
    fx_region g;
    wire_slot_ref own[OWN];
    ask open[OPEN];
    uint64_t raised; /* of all its counters */
} user;

typedef struct world {
    fx f;
    fx_client admin;
    user u[CLIENTS];
    rnd r;
    device *dev[2]; /* [1]: NULL, or the one of client 1's slots, with which the first exchanges what it loads */
    unsigned loaded, leased, stored, failed, cancelled, overdue, full, absent;
} world;

static bool one_in(world *w, uint64_t n)
{
    return rnd_below(&w->r, n) == 0;
}

/* ---- the loop stumbles ---- */

static timer_t stumbles;

static void walk_on(void)
{
    struct itimerspec t = {.it_value = {0, 40000}};

    (void)timer_settime(stumbles, 0, &t, NULL);
}

/* At some moment of whatever the loop does it stands for a while, and the movers go on. */
static void stumble(int sig)
{
    struct timespec t = {0, 100000};
    int e = errno;

    (void)sig;
    (void)nanosleep(&t, NULL);
    walk_on();
    errno = e;
}

static void begin_to_stumble(void)
{
    struct sigaction a = {.sa_handler = stumble, .sa_flags = SA_RESTART};
    struct sigevent to = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};

    to._sigev_un._tid = gettid();
    cr_assert_eq(sigaction(SIGUSR1, &a, NULL), 0);
    cr_assert_eq(timer_create(CLOCK_MONOTONIC, &to, &stumbles), 0);
    walk_on();
}

/* ---- blocks ---- */

static uint64_t *slot_at(const user *u, uint32_t slot)
{
    return (uint64_t *)(void *)u->g.base + (size_t)slot * WORDS;
}

static void fill(const user *u, uint32_t slot, uint64_t key)
{
    for (uint32_t i = 0; i < WORDS; i += 64)
        slot_at(u, slot)[i] = key * 1000003 + i;
}

static void check_holds(const user *u, uint32_t slot, uint64_t key)
{
    for (uint32_t i = 0; i < WORDS; i += 64) {
        uint64_t is = slot_at(u, slot)[i];

        cr_assert_eq(is, key * 1000003 + i, "key %llu: word %u of %u in slot %u is %llu: of key %llu?",
                     (unsigned long long)key, i, WORDS, slot, (unsigned long long)is, (unsigned long long)is / 1000003);
    }
}

/* ---- clients ---- */

static uint32_t open_ns(user *u)
{
    kvs_plane planes[LAYERS];
    kvs_namespace ns;
    wire_open_rep rep;
    fx_body *b = fx_new();
    fx_answer a;

    cr_assert_eq(kvs_namespace_mla("m", "", KVS_FORMAT_mla_bf16, LAYERS, TOKENS, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_encode(&ns, b->bytes, sizeof b->bytes, &b->out.len, NULL), KVS_OK);
    a = fx_call(&u->c, WIRE_OPEN, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_open_rep(&a.in, &rep);
    cr_assert_eq(rep.slot_bytes, WORDS * 8);
    fx_done(&a);
    return rep.ns;
}

static void join(world *w, uint32_t i)
{
    user *u = &w->u[i];

    *u = (user){.tenant = i == CLIENTS - 1};
    fx_client_open_tenant(&u->c, &w->f, u->tenant);
    u->ns = open_ns(u);
    u->g = fx_slots_on(&u->c, w->dev[1] != NULL && i == 1, u->ns, OWN + SPARE);
    fx_take(&u->c, &u->g, OWN, u->own);
}

static void forget_replies(fx_client *c)
{
    while (c->first != NULL) {
        reply *next = c->first->next;

        reply_destroy(c->first);
        c->first = next;
    }
}

static void leave(user *u)
{
    fx_unmap(&u->g);
    fx_gone(&u->c);
    forget_replies(&u->c);
}

/* ---- the weather ---- */

static device *one_device(world *w)
{
    return w->dev[w->dev[1] != NULL && one_in(w, 2)];
}

static void release(world *w)
{
    for (int i = 0; i < 2 && w->dev[i] != NULL; i++)
        fault_device_release(w->dev[i]);
}

static uint32_t n_held(const world *w)
{
    return fault_device_held(w->dev[0]) + (w->dev[1] != NULL ? fault_device_held(w->dev[1]) : 0);
}

static void change_faults(world *w)
{
    device *d = one_device(w);
    fault_plan p = {.call = one_in(w, 2) ? FAULT_COPY : FAULT_WAIT,
                    .nth = 1 + rnd_below(&w->r, 6),
                    .count = 1 + rnd_below(&w->r, 3),
                    .status = KVS_OK};

    switch (rnd_below(&w->r, 4)) {
    case 0:
        p.action = FAULT_FAIL;
        p.status = KVS_E_DEVICE;
        break;
    case 1:
        p.action = FAULT_DELAY;
        p.delay_us = (uint32_t)rnd_below(&w->r, 500);
        break;
    case 2:
        p.action = FAULT_SWALLOW;
        p.status = one_in(w, 2) ? KVS_OK : KVS_E_DEVICE;
        break;
    default:
        fault_device_set_lazy(d, one_in(w, 2));
        return;
    }
    fault_device_plan(d, &p);
}

static void clear_faults(world *w)
{
    for (int i = 0; i < 2 && w->dev[i] != NULL; i++) {
        fault_device_clear(w->dev[i], FAULT_COPY);
        fault_device_clear(w->dev[i], FAULT_WAIT);
    }
}

static void raise_all(user *u)
{
    u->raised++;
    for (uint32_t i = 0; i < OPEN; i++)
        fx_raise(&u->c, i, u->raised);
}

/* Nothing is held any more, by the device or by a counter; what is to fail may still fail. */
static void let_go(world *w)
{
    release(w);
    for (int i = 0; i < CLIENTS; i++)
        raise_all(&w->u[i]);
}

/* ---- requests ---- */

static wire_slot_ref slot_of(const user *u, const ask *x, uint32_t i)
{
    return u->own[(x - u->open) * MOST + i / x->group];
}

static void put_key(wire_out *o, uint64_t n)
{
    uint8_t key[32];

    fx_key(key, n);
    wire_put_bytes(o, key, sizeof key);
}

static void put_list(user *u, const ask *x, wire_out *o, bool keys)
{
    for (uint32_t i = 0; i < x->n && keys; i++)
        put_key(o, x->key[i]);
    for (uint32_t i = 0; i < x->n; i++) {
        wire_slot_ref own = slot_of(u, x, i);

        wire_put_slot_ref(o, x->any[i] ? &(wire_slot_ref){WIRE_NONE32, 0} : &own);
    }
}

/* Anything goes: twice the same, what nobody has, runs of a chain.  Behind each key come such as are nowhere, or in a store
 * the same again, from the same slot. */
static void draw_keys(world *w, ask *x)
{
    uint64_t at = rnd_below(&w->r, KEYS);
    bool twice = one_in(w, 3);

    for (uint32_t i = 0; i < x->n; i++) {
        x->any[i] = x->is_load && i % x->group != 0;
        x->key[i] = x->is_load ? NOWHERE : at;
        if (i % x->group != 0)
            continue;
        at = one_in(w, 4) ? rnd_below(&w->r, KEYS) : (at + 1) % KEYS;
        if (twice && i > 0 && one_in(w, 4))
            at = x->key[rnd_below(&w->r, i / x->group) * x->group];
        x->key[i] = at;
    }
}

static void draw_after(world *w, user *u, ask *x)
{
    x->counter = one_in(w, 4) ? 1 + (uint32_t)(x - u->open) : 0;
}

static uint64_t draw_deadline(world *w)
{
    return one_in(w, 3) ? 1 + rnd_below(&w->r, 300) : 1000000;
}

static void begin_store(world *w, user *u, ask *x)
{
    fx_body *b = fx_new();
    wire_store_req q = {.ns = u->ns,
                        .region = u->g.id,
                        .n = x->n,
                        .after_counter = x->counter - 1,
                        .signal_counter = (uint32_t)(x - u->open),
                        .after_value = u->raised + 1,
                        .signal_value = x->id};

    for (uint32_t i = 0; i < x->n; i += x->group)
        fill(u, slot_of(u, x, i).slot, x->key[i]);
    wire_put_store_req(&b->out, &q);
    put_list(u, x, &b->out, true);
    x->id = fx_send_deadline(&u->c, WIRE_STORE, draw_deadline(w), b);
}

static wire_load_req load_head(user *u, const ask *x)
{
    return (wire_load_req){.ns = u->ns,
                           .region = u->g.id,
                           .n = x->n,
                           .after_counter = x->counter - 1,
                           .signal_counter = (uint32_t)(x - u->open),
                           .after_value = u->raised + 1};
}

static void begin_load(world *w, user *u, ask *x, bool some_anywhere)
{
    fx_body *b = fx_new();
    wire_load_req q = load_head(u, x);

    for (uint32_t i = 0; i < x->n; i++) {
        if (i % x->group != 0)
            continue;
        x->any[i] = some_anywhere && one_in(w, 5);
        slot_at(u, slot_of(u, x, i).slot)[0] = ~UINT64_C(0);
    }
    wire_put_load_req(&b->out, &q);
    put_list(u, x, &b->out, true);
    x->id = fx_send_deadline(&u->c, WIRE_LOAD, draw_deadline(w), b);
}

/* Of the leading keys that are there.  False: of none. */
static bool reserve(user *u, ask *x, uint8_t lease[16])
{
    fx_body *b = fx_new();
    wire_reserve_rep rep = {0};
    fx_answer a;

    wire_put_reserve_req(&b->out, &(wire_reserve_req){.n_ns = 1, .n_keys = x->n, .max_loads = 1, .ttl_ms = 1000});
    wire_put_u32(&b->out, u->ns);
    wire_put_pad8(&b->out);
    for (uint32_t i = 0; i < x->n; i++)
        put_key(&b->out, x->key[i]);
    a = fx_call(&u->c, WIRE_RESERVE, b);
    if (a.status == KVS_OK)
        wire_get_reserve_rep(&a.in, &rep);
    fx_done(&a);
    x->n = rep.n_leased;
    memcpy(lease, rep.lease, 16);
    return x->n > 0;
}

static void begin_leased(world *w, user *u, ask *x)
{
    wire_load_req q;
    uint8_t lease[16];
    fx_body *b;

    if (!reserve(u, x, lease))
        return;
    w->leased++;
    b = fx_new();
    q = load_head(u, x);
    q.flags = WIRE_LOAD_BY_LEASE;
    memcpy(q.lease, lease, 16);
    wire_put_load_req(&b->out, &q);
    put_list(u, x, &b->out, false);
    x->id = fx_send_deadline(&u->c, WIRE_LOAD, draw_deadline(w), b);
    if (one_in(w, 2)) { /* it holds its blocks itself by now */
        b = fx_new();
        wire_put_release_req(&b->out, (const wire_release_req *)(const void *)lease);
        (void)fx_status(&u->c, WIRE_RELEASE, b);
    }
}

static void begin(world *w, user *u, ask *x)
{
    uint64_t kind = rnd_below(&w->r, 5);

    *x = (ask){.is_load = kind<3, .group = kind> 0 && one_in(w, 2) ? 1 + PAD : 1};
    x->n = (uint32_t)rnd_below(&w->r, MOST + 1) * x->group;
    draw_keys(w, x);
    draw_after(w, u, x);
    if (kind == 0)
        begin_leased(w, u, x);
    else if (x->is_load)
        begin_load(w, u, x, true);
    else
        begin_store(w, u, x);
}

/* The same blocks onto both devices. */
static void begin_pair(world *w)
{
    uint32_t k = (uint32_t)rnd_below(&w->r, OPEN), first = (uint32_t)rnd_below(&w->r, 2);
    ask *x[2] = {&w->u[first].open[k], &w->u[1 - first].open[k]};

    if (w->dev[1] == NULL || x[0]->id != 0 || x[1]->id != 0)
        return;
    *x[0] = (ask){.is_load = true, .group = 1, .n = (uint32_t)rnd_below(&w->r, MOST + 1)};
    draw_keys(w, x[0]);
    *x[1] = *x[0];
    for (int i = 0; i < 2; i++) {
        draw_after(w, &w->u[i == 0 ? first : 1 - first], x[i]);
        begin_load(w, &w->u[i == 0 ? first : 1 - first], x[i], false);
    }
}

/* ---- answers ---- */

static void drop_slot(user *u, uint32_t slot, uint32_t gen)
{
    fx_body *b = fx_new();

    wire_put_slot_drop_req(&b->out, &(wire_slot_drop_req){.region = u->g.id, .n = 1, .after_counter = WIRE_NONE32});
    wire_put_slot_ref(&b->out, &(wire_slot_ref){slot, gen});
    cr_assert_eq(fx_status(&u->c, WIRE_SLOT_DROP, b), KVS_OK);
}

static void note(world *w, ask *x, kvs_status s)
{
    w->failed += s == KVS_E_DEVICE;
    w->cancelled += s == KVS_E_CANCELLED;
    w->full += s == KVS_E_NO_SPACE;
    w->absent += s == KVS_E_NOT_FOUND;
    x->stuck |= s == KVS_E_BUSY;
    cr_assert(s != KVS_E_CORRUPT && s != KVS_E_RANGE && s != KVS_E_INVALID, "%s", kvs_status_name(s));
}

static void check_load(world *w, user *u, ask *x, wire_in *in)
{
    wire_load_rep rep;

    wire_get_load_rep(in, &rep);
    cr_assert_eq(rep.n, x->n);
    for (uint32_t i = 0; i < rep.n; i++) {
        uint32_t own = slot_of(u, x, i).slot;
        wire_load_result r;

        wire_get_load_result(in, &r);
        note(w, x, r.status);
        w->loaded += r.status == KVS_OK;
        if (r.status == KVS_OK)
            check_holds(u, r.slot, x->key[i]);
        if (r.status == KVS_E_NOT_FOUND && !x->any[i])
            cr_assert_eq(slot_at(u, own)[0], ~UINT64_C(0), "nothing was found, but the slot was written");
        if (r.status == KVS_OK && x->any[i])
            drop_slot(u, r.slot, r.gen);
    }
}

static void check_store(world *w, ask *x, wire_in *in)
{
    wire_key_rep rep;
    const uint8_t *list;

    wire_get_key_rep(in, &rep);
    cr_assert_eq(rep.n, x->n);
    list = wire_get_array(in, rep.n, 4);
    for (uint32_t i = 0; i < rep.n; i++) {
        note(w, x, (kvs_status)wire_at_u32(list, i));
        w->stored += wire_at_u32(list, i) == KVS_OK;
    }
}

static fx_body *cancel_body(uint64_t target)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){target});
    return b;
}

static void finish(world *w, user *u, ask *x)
{
    uint64_t id = x->id;
    fx_answer a = fx_wait(&u->c, id);

    cr_assert(a.status == KVS_OK || a.status == KVS_E_PARTIAL || a.status == KVS_E_DEADLINE ||
                  a.status == KVS_E_CANCELLED || a.status == KVS_E_BUSY || a.status == KVS_E_STATE ||
                  a.status == KVS_E_NOT_FOUND,
              "%s: %s", kvs_status_name(a.status), a.msg);
    if (a.in.len > a.in.pos && x->is_load)
        check_load(w, u, x, &a.in);
    else if (a.in.len > a.in.pos)
        check_store(w, x, &a.in);
    x->id = 0;
    fx_done(&a);
    if (a.status != KVS_E_DEADLINE)
        return;
    w->overdue += x->stuck;
    let_go(w); /* its slots are the daemon's until a CANCEL has been answered */
    cr_assert_eq(fx_status(&u->c, WIRE_CANCEL, cancel_body(id)), KVS_OK);
}

/* A LOAD that is back and held for a twin that has not begun ends by a tick: no completion need come. */
enum { HELD_US = 5000 };

static void push_to_the_end(world *w, user *u, ask *x)
{
    while (!fx_has_reply(&u->c, x->id)) {
        if (n_held(w) > 0 && one_in(w, 2))
            fx_advance(&w->f, 2000000); /* past every deadline */
        else
            let_go(w);
        fx_advance(&w->f, HELD_US);
        if (!fx_has_reply(&u->c, x->id))
            fx_run(&w->f, 1);
    }
    finish(w, u, x);
}

static void cancel(world *w, user *u, ask *x)
{
    uint64_t id = fx_send(&u->c, WIRE_CANCEL, cancel_body(x->id));
    fx_answer a;

    if (one_in(w, 2))
        let_go(w);
    push_to_the_end(w, u, x);
    let_go(w);
    a = fx_wait(&u->c, id);
    fx_done(&a);
}

static fx_body *keys_body(world *w, user *u)
{
    fx_body *b = fx_new();
    uint32_t n = 1 + (uint32_t)rnd_below(&w->r, 4);

    wire_put_keys_req(&b->out, &(wire_keys_req){u->ns, n});
    while (n-- > 0)
        put_key(&b->out, rnd_below(&w->r, KEYS));
    return b;
}

static void drain(world *w, uint32_t on)
{
    fx_body *b = fx_new();

    wire_put_drain_req(&b->out, &(wire_drain_req){on, 0});
    cr_assert_eq(fx_status(&w->admin, WIRE_DRAIN, b), KVS_OK);
}

/* Nobody can open a namespace meanwhile: its requests are refused, each with a reply. */
static void drain_a_while(world *w, user *u)
{
    fx_body *b = fx_new();

    drain(w, 1);
    wire_put_load_req(&b->out, &(wire_load_req){.after_counter = WIRE_NONE32, .signal_counter = WIRE_NONE32});
    cr_assert_eq(fx_status(&u->c, WIRE_LOAD, b), KVS_E_STATE);
    for (int i = 0; i < OPEN; i++)
        if (u->open[i].id != 0 && one_in(w, 2))
            push_to_the_end(w, u, &u->open[i]);
    drain(w, 0);
}

static void reset(user *u)
{
    fx_body *b = fx_new();

    wire_put_reset_req(&b->out, &(wire_reset_req){u->ns, 0});
    cr_assert_eq(fx_status(&u->c, WIRE_RESET, b), KVS_OK);
}

static void come_again(world *w, uint32_t i)
{
    if (one_in(w, 2))
        peer_dismiss(w->u[i].c.peer); /* its tenant was removed */
    if (one_in(w, 2))
        let_go(w);
    else
        release(w);
    leave(&w->u[i]);
    join(w, i);
}

static void step(world *w)
{
    uint32_t i = (uint32_t)rnd_below(&w->r, CLIENTS);
    user *u = &w->u[i];
    ask *x = &u->open[rnd_below(&w->r, OPEN)];

    switch (rnd_below(&w->r, 24)) {
    case 0:
    case 1:
        change_faults(w);
        break;
    case 2:
        fx_advance(&w->f, rnd_below(&w->r, 200));
        break;
    case 3:
        release(w);
        break;
    case 4:
        (void)fx_status(&u->c, WIRE_DROP, keys_body(w, u));
        break;
    case 5:
        if (one_in(w, 6))
            reset(u);
        break;
    case 6:
        if (one_in(w, 6))
            come_again(w, i);
        break;
    case 7:
        if (one_in(w, 4))
            drain_a_while(w, u);
        break;
    case 8:
        raise_all(u);
        break;
    case 11:
    case 12:
    case 13:
    case 14:
    case 15:
        begin_pair(w);
        break;
    case 9:
    case 10:
        if (x->id != 0)
            cancel(w, u, x);
        break;
    default:
        if (x->id == 0)
            begin(w, u, x);
        else if (fx_has_reply(&u->c, x->id))
            finish(w, u, x);
        else if (one_in(w, 2))
            push_to_the_end(w, u, x);
    }
}

static void open_world(world *w, bool two)
{
    fx_config(&w->f);
    w->f.depth = 2;
    w->f.cfg.pool_max_bytes = CONFIG_MIB(64);
    w->f.cfg.pool_max_slots = POOL;
    w->f.cfg.device_max_region_bytes = CONFIG_GIB(1);
    w->f.cfg.n_tenants = 2;
    w->f.cfg.tenants[1] = w->f.cfg.tenants[0];
    (void)snprintf(w->f.cfg.tenants[1].name, sizeof w->f.cfg.tenants[1].name, "other");
    w->f.cfg.tenants[1].quota_bytes = QUOTA * (WORDS * 8);
    if (two)
        fx_open_exchanging(&w->f);
    else
        fx_open(&w->f);
    w->dev[0] = w->f.dev;
    w->dev[1] = two ? w->f.second : NULL;
    fx_admin_open(&w->admin, &w->f);
    for (uint32_t i = 0; i < CLIENTS; i++)
        join(w, i);
}

static void settle(world *w)
{
    static const char *const zeros[] = {"directory.held", "pool.writing_bytes", "pool.draining_bytes",
                                        "pool.quarantined_bytes"};

    clear_faults(w);
    let_go(w);
    for (int i = 0; i < CLIENTS; i++)
        for (int k = 0; k < OPEN; k++)
            if (w->u[i].open[k].id != 0)
                push_to_the_end(w, &w->u[i], &w->u[i].open[k]);
    while (!core_is_idle(w->f.core)) {
        fx_advance(&w->f, HELD_US);
        if (!core_is_idle(w->f.core))
            fx_run(&w->f, 1);
    }
    for (size_t i = 0; i < sizeof zeros / sizeof zeros[0]; i++)
        cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_SUMMARY, zeros[i]), 0, "%s", zeros[i]);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
}

static void close_world(world *w)
{
    for (int i = 0; i < CLIENTS; i++)
        leave(&w->u[i]);
    fx_gone(&w->admin);
    forget_replies(&w->admin);
    fx_close(&w->f);
}

static void live(world *w)
{
    begin_to_stumble();
    for (int n = 0; n < STEPS; n++) {
        step(w);
        if (n % 100 == 0)
            cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1, "at step %d", n);
    }
    settle(w);
    cr_assert(w->loaded > 50 && w->leased > 0 && w->stored > 50 && w->failed > 0 && w->full > 0 && w->absent > 20 &&
                  w->cancelled > 0, /* late ones are a matter of the machine */
              "%u loaded, %u leases, %u stored, %u failed, %u late, %u found no space, %u were nowhere, %u cancelled",
              w->loaded, w->leased, w->stored, w->failed, w->overdue, w->full, w->absent, w->cancelled);
}

Test(core_parts, whatever_ends_a_job_that_began_early_nothing_is_wrong_or_left)
{
    static world w;

    w.r = rnd_open("core_parts", 5);
    open_world(&w, false);
    live(&w);
    close_world(&w);
}

/* Some of them are of two clients, and wait for each other. */
Test(core_parts, whatever_ends_one_of_two_that_exchange_nothing_is_wrong_or_left)
{
    static world w;

    w.r = rnd_open("core_parts_two", 9);
    open_world(&w, true);
    live(&w);
    close_world(&w);
}

/* The device goes at some moment of such jobs: all of them end, with one status, and nothing is published. */
Test(core_parts, every_job_ends_when_the_device_is_lost)
{
    static world w;
    rnd r = rnd_open("core_parts_lost", 7);
    unsigned lost = 0;

    begin_to_stumble();

    for (int round = 0; round < 12; round++) {
        memset(&w, 0, sizeof w);
        w.r = r;
        open_world(&w, false);
        for (int n = 0; n < 40; n++)
            step(&w);
        let_go(&w);
        fault_device_plan(w.dev[0], &(fault_plan){.call = one_in(&w, 2) ? FAULT_COPY : FAULT_WAIT,
                                                  .action = FAULT_FAIL,
                                                  .nth = 1 + rnd_below(&w.r, 6),
                                                  .status = KVS_E_DEVICE_LOST});
        for (int i = 0; i < CLIENTS; i++)
            for (int k = 0; k < OPEN; k++)
                if (w.u[i].open[k].id == 0 && w.f.core->lost == KVS_OK)
                    begin(&w, &w.u[i], &w.u[i].open[k]);
        for (int i = 0; i < CLIENTS; i++)
            raise_all(&w.u[i]);
        while (!core_is_idle(w.f.core))
            fx_run(&w.f, 1);
        lost += w.f.core->lost == KVS_E_DEVICE_LOST;
        r = w.r;
        close_world(&w);
    }
    cr_assert_gt(lost, 2, "in %u rounds of 12", lost);
}
