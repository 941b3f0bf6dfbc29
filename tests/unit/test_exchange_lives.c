#include "daemon/core.h"
#include "proto/backend.h"
#include "tests/support/core_fixture.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Random lives of LOADs that may have twins: two tenants whose keys are the same and whose blocks are not, with a client on each
 * of three devices and one more, an engine with memory of its own, on the first one; slots that clients name and slots that the daemon
 * chooses; counters, deadlines, cancels,
 * clients that go, keys that are dropped, slots that are given back, a configuration that changes; devices that are slow and that fail.
 *
 * Whatever an answer or a counter says is there must be there, and from then on the slots are the client's, who overwrites them
 * at once: a twin that still reads from them hands on what was written. */

enum {
    TENANTS = 2,
    OF_TENANT = 4,
    RANKS = TENANTS * OF_TENANT,
    N = 24,
    SPARE = 4,
    STRIDE = 2,
    FIRST = 100,
    BLANK = 0x99
};

typedef struct rank {
    uint32_t tenant, device;
    bool chooses;  /* the daemon does: its slots are shared */
    bool imported; /* its memory is its own, with gaps between the slots */
    fx_client c;
    fx_region g;
    wire_slot_ref slots[N]; /* that it names */
    /* Its LOAD. */
    bool out, counts, waits, is_cancelled, has_signalled;
    uint64_t id, cancel_id, deadline_us, value;
    uint32_t n, shift; /* the first block that it names */
    bool given_back;   /* the last of its slots */
} rank;

typedef struct world {
    fx f;
    fx_client admin;
    device *dev[3];
    rank r[RANKS];
    uint32_t ns[TENANTS];
    uint64_t n_ok, n_partial, n_cancelled, n_deadline, n_lost;
} world;

/* The pattern of a tenant's block; the k-th that it names at present. */
static uint64_t seed_of(const rank *r, uint32_t k)
{
    return FIRST + r->shift + k + r->tenant * UINT64_C(100000);
}

/* Where the slot is in its memory, in slots. */
static uint32_t place_of(const rank *r, uint32_t slot)
{
    return r->imported ? slot * STRIDE : slot;
}

static bool holds(const rank *r, uint32_t slot, uint32_t k)
{
    return fx_holds(&r->g, place_of(r, slot), seed_of(r, k));
}

static void wipe(const rank *r)
{
    for (uint32_t k = 0; k < N && !r->chooses; k++)
        memset(r->g.base + (size_t)place_of(r, r->slots[k].slot) * FX_SLOT, BLANK, FX_SLOT);
}

static void import(world *w, rank *r)
{
    const wire_plane_map map = {0, KVS_BACKEND_UNSAID, 0, STRIDE * FX_SLOT};
    uint64_t id = r->c.next_id++;
    fx_body *b = fx_new();
    wire_region_rep rep;
    fx_answer a;
    int fd;

    r->g =
        (fx_region){.n_slots = N, .bytes = (uint64_t)N * STRIDE * FX_SLOT, .fd = memfd_create("e", MFD_ALLOW_SEALING)};
    cr_assert(r->g.fd >= 0 && fallocate(r->g.fd, 0, 0, (off_t)r->g.bytes) == 0 &&
              fcntl(r->g.fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    r->g.base = mmap(NULL, r->g.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, r->g.fd, 0);
    cr_assert(r->g.base != MAP_FAILED);
    fd = dup(r->g.fd);
    wire_put_region_import_req(
        &b->out, &(wire_region_import_req){.ns = w->ns[r->tenant], .device = r->device, .n_slots = N, .n_maps = 1});
    wire_put_plane_map(&b->out, &map);
    cr_assert_eq(fx_send_frame(&r->c, WIRE_REGION_IMPORT, id, 0, b, &fd, 1), KVS_OK);
    a = fx_wait(&r->c, id);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    r->g.id = rep.region;
    fx_done(&a);
    for (uint32_t k = 0; k < N; k++)
        r->slots[k] = (wire_slot_ref){N - 1 - k, 0};
}

static void join(world *w, rank *r)
{
    fx_client_open_tenant(&r->c, &w->f, r->tenant);
    w->ns[r->tenant] = fx_ns(&r->c, "m");
    if (r->imported)
        import(w, r);
    else
        r->g = fx_slots_on(&r->c, r->device, w->ns[r->tenant], N + SPARE);
    if (!r->chooses && !r->imported)
        fx_take(&r->c, &r->g, N, r->slots);
    wipe(r);
    r->value = r->shift = 0;
    r->out = false;
}

/* A turn of the loop. */
static void turn(world *w, uint64_t us)
{
    fx_run(&w->f, sink_posted(&w->f.sink) - w->f.sink.done);
    fx_advance(&w->f, us);
    (void)usleep(50);
}

static void leave(world *w, rank *r)
{
    fx_unmap(&r->g);
    peer_gone(r->c.peer, w->f.now_us);
    while (!r->c.closed)
        turn(w, 100);
    fx_forget(&r->c);
    r->out = false;
}

/* Blocks that a failure or a DROP has cost are stored again, by a client that names its slots. */
static void store(world *w, uint32_t tenant)
{
    rank *r = &w->r[tenant * OF_TENANT];
    fx_move m = {.ns = w->ns[tenant], .region = r->g.id, .n = N, .first = FIRST, .slots = r->slots};

    if (fx_lookup(&r->c, m.ns, FIRST, N) == N)
        return;
    for (uint32_t k = 0; k < N; k++)
        fx_fill(&r->g, r->slots[k].slot, seed_of(r, k));
    (void)fx_store(&r->c, &m, NULL);
    cr_assert_eq(fx_lookup(&r->c, m.ns, FIRST, N), N);
    wipe(r);
}

static void start(world *w)
{
    fx_config(&w->f);
    w->f.cfg.pool_max_bytes = CONFIG_MIB(2);
    w->f.cfg.n_tenants = TENANTS;
    w->f.cfg.tenants[1] = w->f.cfg.tenants[0];
    strcpy(w->f.cfg.tenants[1].name, "other");
    fx_open_exchanging_three(&w->f);
    w->dev[0] = w->f.dev;
    w->dev[1] = w->f.second;
    w->dev[2] = w->f.third;
    fx_admin_open(&w->admin, &w->f);
    for (uint32_t i = 0; i < RANKS; i++) {
        w->r[i].tenant = i / OF_TENANT;
        w->r[i].device = i % OF_TENANT % 3;
        w->r[i].chooses = i % OF_TENANT == 2;
        w->r[i].imported = i % OF_TENANT == 3;
        join(w, &w->r[i]);
    }
}

static void all_leave(world *w)
{
    for (uint32_t i = 0; i < RANKS; i++)
        leave(w, &w->r[i]);
}

static void stop(world *w)
{
    all_leave(w);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_gone(&w->admin);
    fx_close(&w->f);
}

/* ---- what happens ---- */

static void plan_faults(world *w, rnd *r)
{
    static const fault_call CALLS[] = {FAULT_COPY, FAULT_WAIT};

    for (int i = 0; i < 3; i++) {
        fault_plan p = {.call = CALLS[rnd_below(r, 2)],
                        .action = rnd_below(r, 4) ? FAULT_DELAY : FAULT_FAIL,
                        .nth = 1 + rnd_below(r, 5),
                        .count = rnd_below(r, 4),
                        .status = KVS_E_DEVICE,
                        .delay_us = (uint32_t)rnd_below(r, 1200)};

        fault_device_clear(w->dev[i], FAULT_COPY);
        fault_device_clear(w->dev[i], FAULT_WAIT);
        fault_device_set_lazy(w->dev[i], rnd_below(r, 2));
        if (rnd_below(r, 3))
            fault_device_plan(w->dev[i], &p);
    }
}

static void send(world *w, rank *r, rnd *x)
{
    fx_move m = {.ns = w->ns[r->tenant], .region = r->g.id, .first = FIRST, .slots = r->chooses ? NULL : r->slots};

    r->counts = rnd_below(x, 2);
    r->waits = !rnd_below(x, 4);
    r->deadline_us = rnd_below(x, 3) ? 0 : 200 + rnd_below(x, 4000);
    r->n = rnd_below(x, 4) ? N : N - 1;
    r->shift = r->n < N ? (uint32_t)rnd_below(x, 2) : 0;
    m.first += r->shift;
    r->out = true;
    r->is_cancelled = r->has_signalled = r->given_back = false;
    r->value++;
    m.n = r->n;
    m.signal_counter = r->counts ? 1 : 0;
    m.signal_value = r->value;
    m.after_counter = r->waits ? 3 : 0;
    m.after_value = r->value;
    *(uint64_t *)(void *)(r->c.counters + WIRE_COUNTER_HALF_BYTES + 8) = 0; /* the error word */
    r->id = fx_send_deadline(&r->c, WIRE_LOAD, r->deadline_us, fx_load_body(&m));
}

static void cancel(rank *r)
{
    fx_body *b;

    if (r->is_cancelled)
        return;
    r->is_cancelled = true;
    b = fx_new();
    wire_put_cancel_req(&b->out, &(wire_cancel_req){.target = r->id});
    r->cancel_id = fx_send(&r->c, WIRE_CANCEL, b);
}

static void drop_slots(rank *r, uint32_t n, const wire_slot_ref *slots)
{
    fx_body *b = fx_new();

    wire_put_slot_drop_req(&b->out, &(wire_slot_drop_req){.region = r->g.id, .n = n, .after_counter = WIRE_NONE32});
    for (uint32_t i = 0; i < n; i++)
        wire_put_slot_ref(&b->out, &slots[i]);
    (void)fx_status(&r->c, WIRE_SLOT_DROP, b);
}

/* Refused, unless all that used it has been dropped. */
static void close_region(world *w, rank *r)
{
    fx_body *b = fx_new();

    wire_put_region_close_req(&b->out, &(wire_region_close_req){r->g.id, 0});
    if (fx_status(&r->c, WIRE_REGION_CLOSE, b) == KVS_E_BUSY)
        return;
    leave(w, r);
    join(w, r);
}

static void forget(world *w, rank *r, rnd *x)
{
    uint32_t from = (uint32_t)rnd_below(x, N);
    fx_body *b;

    if (rnd_below(x, 3)) {
        (void)fx_status(&r->c, WIRE_DROP, fx_keys_body(w->ns[r->tenant], FIRST + from, 1));
        return;
    }
    b = fx_new();
    wire_put_reset_req(&b->out, &(wire_reset_req){.ns = w->ns[r->tenant]});
    (void)fx_status(&r->c, WIRE_RESET, b);
}

static void configure(world *w, rnd *x)
{
    strcpy(w->f.cfg.mover_exchange, rnd_below(x, 3) ? "on" : "off");
    core_configured(w->f.core);
}

static void disturb(world *w, rnd *x)
{
    rank *r = &w->r[rnd_below(x, RANKS)];

    switch (rnd_below(x, 9)) {
    case 0:
    case 1:
        if (r->out)
            cancel(r);
        break;
    case 2:
        leave(w, r);
        join(w, r);
        break;
    case 3:
        forget(w, r, x);
        break;
    case 4:
        if (r->out && !r->chooses && !r->imported && !r->given_back && !r->has_signalled &&
            !fx_has_reply(&r->c, r->id)) {
            r->given_back = true;
            drop_slots(r, 1, &r->slots[N - 1]);
        }
        break;
    case 5:
        if (r->out && !fx_has_reply(&r->c, r->id))
            close_region(w, r);
        break;
    case 6:
        configure(w, x);
        break;
    case 7:
        peer_dismiss(r->c.peer);
        break;
    default:
        break;
    }
}

/* ---- what is said ---- */

/* Its counter is there, its reply may still come: if the error word is clean, so are the blocks, and now the slots are the
 * client's. */
static void look_at_counter(rank *r)
{
    if (!r->counts || r->has_signalled || fx_counter(&r->c, 0) < r->value)
        return;
    r->has_signalled = true;
    if (r->chooses)
        return;
    for (uint32_t k = 0; k < r->n && fx_counter_error(&r->c, 0) == 0; k++)
        cr_assert(holds(r, r->slots[k].slot, k), "block %u, as the counter says", k);
    if (!r->given_back)
        wipe(r);
}

static void look_at_blocks(rank *r, fx_answer *a)
{
    wire_slot_ref got[N];
    wire_load_rep head;
    uint32_t n = 0;

    wire_get_load_rep(&a->in, &head);
    cr_assert_eq(head.n, r->n);
    for (uint32_t k = 0; k < r->n; k++) {
        wire_load_result x;

        wire_get_load_result(&a->in, &x);
        if (x.status == KVS_OK && !(r->has_signalled && !r->chooses))
            cr_assert(holds(r, x.slot, k), "block %u", k);
        if (x.status == KVS_OK && r->chooses)
            got[n++] = (wire_slot_ref){x.slot, x.gen};
        cr_assert(a->status != KVS_OK || x.status == KVS_OK);
    }
    if (n > 0)
        drop_slots(r, n, got);
}

/* After its last word. */
static void settle(rank *r)
{
    if (r->counts)
        cr_assert_geq(fx_counter(&r->c, 0), r->value, "its counter");
    if (r->given_back) {
        fx_take(&r->c, &r->g, 1, &r->slots[N - 1]);
        r->given_back = false;
    }
    wipe(r);
    r->out = false;
    r->shift = 0;
}

/* Its answer, if it is there; after a deadline its CANCEL's comes when the slots are the client's again. */
static void look_at_answer(world *w, rank *r)
{
    bool is_ours = true;
    fx_answer a;

    if (!fx_has_reply(&r->c, r->id))
        return;
    if (r->counts)
        look_at_counter(r);
    a = fx_wait(&r->c, r->id);
    w->n_ok += a.status == KVS_OK;
    w->n_partial += a.status == KVS_E_PARTIAL;
    w->n_cancelled += a.status == KVS_E_CANCELLED;
    w->n_deadline += a.status == KVS_E_DEADLINE;
    w->n_lost += a.status == KVS_E_DEVICE_LOST;
    cr_assert(a.status == KVS_OK || a.status == KVS_E_PARTIAL || a.status == KVS_E_CANCELLED ||
                  a.status == KVS_E_DEADLINE || (a.status == KVS_E_DEVICE_LOST && core_lost(w->f.core) != KVS_OK),
              "%u %s", a.status, a.msg);
    if (a.status != KVS_E_DEADLINE)
        look_at_blocks(r, &a);
    else
        cancel(r);
    if (r->waits)
        fx_raise(&r->c, 2, r->value);
    if (r->is_cancelled) {
        fx_answer c;

        while (!fx_has_reply(&r->c, r->cancel_id))
            turn(w, 100);
        c = fx_wait(&r->c, r->cancel_id);
        is_ours = c.status == KVS_OK;
        cr_assert(is_ours || core_lost(w->f.core) != KVS_OK);
        fx_done(&c);
    }
    fx_done(&a);
    if (is_ours)
        settle(r);
    r->out = false;
}

static bool all_over(const world *w)
{
    for (uint32_t i = 0; i < RANKS; i++)
        if (w->r[i].out)
            return false;
    return true;
}

static void send_some(world *w, rnd *x)
{
    uint32_t at = (uint32_t)rnd_below(x, RANKS), stride = 1 + 2 * (uint32_t)rnd_below(x, RANKS / 2);

    for (uint32_t i = 0; i < RANKS; i++)
        if (rnd_below(x, 6))
            send(w, &w->r[(at + i * stride) % RANKS], x);
}

static void look(world *w, rnd *x, uint64_t step)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        rank *r = &w->r[i];

        if (r->out && r->waits && (step > 30 || !rnd_below(x, 8)))
            fx_raise(&r->c, 2, r->value);
        if (r->out)
            look_at_counter(r);
        if (r->out)
            look_at_answer(w, r);
    }
    turn(w, rnd_below(x, 200));
}

static void one_life(world *w, rnd *x)
{
    send_some(w, x);
    for (uint64_t step = 0; !all_over(w); step++) {
        if (!rnd_below(x, 6))
            disturb(w, x);
        look(w, x, step);
    }
}

static double exchanged(world *w, uint32_t i)
{
    char path[64];

    (void)snprintf(path, sizeof path, "devices.%u.load.exchange_bytes", i);
    return fx_number(&w->admin, WIRE_SECTION_SUMMARY, path) / FX_SLOT;
}

/* Symptom: a slot was used again while another device read from it, or a block was called there that was not. */
Test(exchange_lives, leave_what_they_say_and_no_trace, .timeout = 120)
{
    rnd x = rnd_open("exchange_lives", 3);
    world w = {.n_ok = 0};

    start(&w);
    for (int i = 0; i < 150; i++) {
        for (uint32_t t = 0; t < TENANTS; t++)
            store(&w, t);
        plan_faults(&w, &x);
        one_life(&w, &x);
        for (uint32_t k = 0; k < 3; k++) {
            fault_device_clear(w.dev[k], FAULT_COPY);
            fault_device_clear(w.dev[k], FAULT_WAIT);
        }
        strcpy(w.f.cfg.mover_exchange, "on");
        core_configured(w.f.core);
        cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
        cr_assert_null(w.f.core->held);
        for (uint32_t t = 0; t < TENANTS; t++)
            cr_assert_null(w.f.core->tenants[t].lone);
    }
    for (uint32_t i = 0; i < 3; i++)
        cr_assert_gt(exchanged(&w, i), 0);
    cr_assert(w.n_ok > 0 && w.n_partial > 0 && w.n_cancelled > 0 && w.n_deadline > 0);
    stop(&w);
}

/* ---- the last of them ---- */

static void last_life(world *w, rnd *x, void (*end)(world *w))
{
    uint64_t when = rnd_below(x, 15);

    send_some(w, x);
    for (uint64_t step = 0; step <= when || !all_over(w); step++) {
        if (step == when && end)
            end(w);
        look(w, x, step);
    }
}

/* Symptom: a LOAD was not answered, or not ended, because its twin's device was lost. */
Test(exchange_lives, end_all_when_devices_are_lost, .timeout = 120)
{
    rnd x = rnd_open("exchange_lives", 4);
    uint64_t n_lost = 0;

    for (int i = 0; i < 40; i++) {
        world w = {.n_ok = 0};

        start(&w);
        store(&w, 0);
        store(&w, 1);
        plan_faults(&w, &x);
        for (int k = 0; k < 3; k++)
            if (rnd_below(&x, 2))
                fault_device_plan(w.dev[k], &(fault_plan){.call = rnd_below(&x, 2) ? FAULT_COPY : FAULT_WAIT,
                                                          .action = FAULT_FAIL,
                                                          .nth = 1 + rnd_below(&x, 6),
                                                          .status = KVS_E_DEVICE_LOST});
        last_life(&w, &x, NULL);
        n_lost += w.n_lost;
        /* A CANCEL is refused at once now, so that its LOAD may be over a little later than its answer. */
        for (int k = 0; k < 10000 && w.f.core->held != NULL; k++)
            turn(&w, 100);
        cr_assert_null(w.f.core->held);
        all_leave(&w);
        fx_gone(&w.admin);
        fx_close(&w.f);
    }
    cr_assert_gt(n_lost, 0);
}

static void drain(world *w)
{
    core_drain(w->f.core);
}

Test(exchange_lives, end_when_the_daemon_does, .timeout = 120)
{
    rnd x = rnd_open("exchange_lives", 5);

    for (int i = 0; i < 40; i++) {
        world w = {.n_ok = 0};

        start(&w);
        store(&w, 0);
        store(&w, 1);
        plan_faults(&w, &x);
        last_life(&w, &x, drain);
        cr_assert(core_is_idle(w.f.core));
        all_leave(&w);
        fx_gone(&w.admin);
        fx_close(&w.f);
    }
}

/* A reload has taken tenant 1 out: its blocks are dropped, and the server closes its connections. */
static void take_out(world *w)
{
    w->f.cfg.tenants[1].gone = true;
    core_configured(w->f.core);
    for (uint32_t i = OF_TENANT; i < RANKS; i++)
        leave(w, &w->r[i]);
}

Test(exchange_lives, end_with_their_tenant, .timeout = 120)
{
    rnd x = rnd_open("exchange_lives", 6);

    for (int i = 0; i < 40; i++) {
        world w = {.n_ok = 0};

        start(&w);
        store(&w, 0);
        store(&w, 1);
        plan_faults(&w, &x);
        last_life(&w, &x, take_out);
        cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
        for (uint32_t k = 0; k < OF_TENANT; k++)
            leave(&w, &w.r[k]);
        cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
        fx_gone(&w.admin);
        fx_close(&w.f);
    }
}
