#include "daemon/exchange.h"
#include "tests/support/core_fixture.h"
#include "tests/support/random.h"

#include <criterion/criterion.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Two clients load the same blocks onto two devices: what one of them has landed the other one takes from there, whoever
 * fails, stops or goes meanwhile.  A batch is of seven blocks. */

enum { N = 40, BATCH = 7, FIRST = 100, BLANK = 0x99 };

typedef struct rank {
    fx_client c;
    fx_region g;
    wire_slot_ref slots[N];
    uint64_t id;
} rank;

typedef struct world {
    fx f;
    fx_client admin;
    rank r[2];
    device *dev[2];
    uint32_t ns;
} world;

static void wipe(rank *r)
{
    memset(r->g.base, BLANK, (size_t)r->g.n_slots * FX_SLOT);
}

static void start(world *w)
{
    fx_config(&w->f);
    fx_open_exchanging(&w->f);
    w->dev[0] = w->f.dev;
    w->dev[1] = w->f.second;
    fx_admin_open(&w->admin, &w->f);
    for (uint32_t i = 0; i < 2; i++) {
        rank *r = &w->r[i];

        fx_client_open(&r->c, &w->f);
        w->ns = fx_ns(&r->c, "m");
        r->g = fx_slots_on(&r->c, i, w->ns, N + 3);
        fx_take(&r->c, &r->g, N, r->slots);
    }
    for (uint32_t k = 0; k < N; k++)
        fx_fill(&w->r[0].g, w->r[0].slots[k].slot, FIRST + k);
    cr_assert_eq(
        fx_store(&w->r[0].c,
                 &(fx_move){.ns = w->ns, .region = w->r[0].g.id, .n = N, .first = FIRST, .slots = w->r[0].slots}, NULL),
        KVS_OK);
    wipe(&w->r[0]);
    wipe(&w->r[1]);
}

static void leave(world *w)
{
    for (int i = 0; i < 2; i++) {
        fx_unmap(&w->r[i].g);
        if (!w->r[i].c.closed)
            fx_gone(&w->r[i].c);
    }
}

static void stop(world *w)
{
    leave(w);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_gone(&w->admin);
    fx_close(&w->f);
}

static fx_move all_of(const world *w, const rank *r)
{
    return (fx_move){.ns = w->ns, .region = r->g.id, .n = N, .first = FIRST, .slots = r->slots};
}

static void send_until(world *w, rank *r, uint64_t deadline_us)
{
    fx_move m = all_of(w, r);

    r->id = fx_send_deadline(&r->c, WIRE_LOAD, deadline_us, fx_load_body(&m));
}

static void send(world *w, rank *r)
{
    send_until(w, r, 0);
}

static kvs_status ended(rank *r)
{
    fx_answer a = fx_wait(&r->c, r->id);

    fx_done(&a);
    return a.status;
}

static bool all_there(const rank *r)
{
    for (uint32_t k = 0; k < N; k++)
        if (!fx_holds(&r->g, r->slots[k].slot, FIRST + k))
            return false;
    return true;
}

static double exchanged(world *w, int i)
{
    char path[64];

    (void)snprintf(path, sizeof path, "devices.%d.load.exchange_bytes", i);
    return fx_number(&w->admin, WIRE_SECTION_SUMMARY, path) / FX_SLOT;
}

static void hold_copy(world *w, int i, uint64_t nth)
{
    fault_device_plan(w->dev[i], &(fault_plan){.call = FAULT_COPY, .action = FAULT_SWALLOW, .nth = nth, .count = 1});
}

static void fail(world *w, int i, fault_call call, uint64_t nth, kvs_status s)
{
    fault_device_plan(w->dev[i],
                      &(fault_plan){.call = call, .action = FAULT_FAIL, .nth = nth, .count = 1, .status = s});
}

/* Completions, until `n` more have come. */
static void await_posts(world *w, unsigned n)
{
    unsigned goal = w->f.sink.done + n;

    while (sink_posted(&w->f.sink) < goal)
        (void)usleep(100);
    fx_run(&w->f, n);
}

/* Device `slow` hangs in its first copy while the other one loads all it can, which is everything; the answer to that is held
 * back: the slow one is about to read from there. */
static void one_is_held_until(world *w, int slow, uint64_t deadline_us)
{
    rank *a = &w->r[slow], *b = &w->r[1 - slow];

    hold_copy(w, slow, 1);
    send(w, a);
    fault_device_await_held(w->dev[slow], 1);
    send_until(w, b, deadline_us);
    await_posts(w, 1);
    cr_assert(all_there(b));
    fx_advance(&w->f, 1);
    cr_assert_not(fx_has_reply(&b->c, b->id));
}

static void one_is_held(world *w, int slow)
{
    one_is_held_until(w, slow, 0);
}

/* Device 0 goes on, and hangs for a while with reads from its twin that have begun. */
static void go_on_to_a_read(world *w)
{
    uint64_t copies = fault_device_calls(w->dev[0], FAULT_COPY), waits = fault_device_calls(w->dev[0], FAULT_WAIT);

    fault_device_set_lazy(w->dev[0], true);
    fault_device_plan(w->dev[0],
                      &(fault_plan){.call = FAULT_WAIT, .action = FAULT_DELAY, .nth = 1, .delay_us = 300000});
    fault_device_release(w->dev[0]);
    while (fault_device_calls(w->dev[0], FAULT_COPY) == copies || fault_device_calls(w->dev[0], FAULT_WAIT) == waits)
        (void)usleep(100);
}

/* ---- both go on ---- */

Test(exchange, both_get_every_block_whatever_their_order)
{
    for (int round = 0; round < 20; round++) {
        world w;

        start(&w);
        for (int i = 0; i < 2; i++) {
            hold_copy(&w, i, 1);
            fault_device_plan(w.dev[i],
                              &(fault_plan){.call = FAULT_WAIT, .action = FAULT_DELAY, .nth = 1, .delay_us = 400});
        }
        fault_device_set_lazy(w.dev[0], round % 2);
        fault_device_set_lazy(w.dev[1], round % 4 / 2);
        send(&w, &w.r[round % 2]);
        send(&w, &w.r[1 - round % 2]);
        for (int i = 0; i < 2; i++)
            fault_device_await_held(w.dev[i], 1);
        for (int i = 0; i < 2; i++)
            fault_device_release(w.dev[i]);
        cr_assert_eq(ended(&w.r[0]), KVS_OK);
        cr_assert_eq(ended(&w.r[1]), KVS_OK);
        cr_assert(all_there(&w.r[0]) && all_there(&w.r[1]));
        cr_assert_gt(exchanged(&w, 0) + exchanged(&w, 1), 0);
        for (int i = 0; i < 2; i++)
            cr_assert_eq(
                fx_number(&w.admin, WIRE_SECTION_SUMMARY, i ? "devices.1.load.blocks" : "devices.0.load.blocks"), N);
        stop(&w);
    }
}

Test(exchange, what_the_first_has_landed_is_not_loaded_again)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    cr_assert_eq(exchanged(&w, 0), N - BATCH); /* all but what it had in hand */
    cr_assert_eq(exchanged(&w, 1), 0);
    stop(&w);
}

Test(exchange, the_second_may_be_the_slow_one)
{
    world w;

    start(&w);
    hold_copy(&w, 1, 1);
    fault_device_plan(w.dev[0], &(fault_plan){.call = FAULT_WAIT, .action = FAULT_DELAY, .nth = 1, .delay_us = 20000});
    send(&w, &w.r[0]);
    send(&w, &w.r[1]);
    fault_device_await_held(w.dev[1], 1);
    await_posts(&w, 1);
    cr_assert(all_there(&w.r[0]));
    cr_assert_not(fx_has_reply(&w.r[0].c, w.r[0].id));
    fault_device_release(w.dev[1]);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[1]));
    cr_assert_gt(exchanged(&w, 1), 0);
    stop(&w);
}

/* ---- nobody waits for ever ---- */

/* Symptom: a rank's answer came when its neighbour, which hung, had ended. */
Test(exchange, an_answer_is_held_back_for_a_moment_only)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    fx_advance(&w.f, 1000000);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    wipe(&w.r[1]); /* its slots are its own again */
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    cr_assert_eq(exchanged(&w, 0), 0);
    stop(&w);
}

/* Symptom: a slot was overwritten while the other GPU read from it. */
Test(exchange, a_read_that_has_begun_is_waited_for)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    go_on_to_a_read(&w);
    fx_advance(&w.f, 1000000);
    fx_advance(&w.f, 1000000);
    cr_assert_not(fx_has_reply(&w.r[1].c, w.r[1].id));
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    cr_assert_gt(exchanged(&w, 0), 0);
    stop(&w);
}

/* One whose counter is not reached has begun nothing: nobody waits for it. */
Test(exchange, a_load_that_waits_for_its_counter_holds_up_nobody)
{
    world w;
    fx_move m;

    start(&w);
    m = all_of(&w, &w.r[0]);
    m.after_counter = 1;
    m.after_value = 5;
    w.r[0].id = fx_send(&w.r[0].c, WIRE_LOAD, fx_load_body(&m));
    send(&w, &w.r[1]);
    await_posts(&w, 1);
    fx_advance(&w.f, 1);
    cr_assert(fx_has_reply(&w.r[1].c, w.r[1].id));
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    wipe(&w.r[1]);
    fx_raise(&w.r[0].c, 0, 5);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    stop(&w);
}

Test(exchange, an_answer_with_a_counter_signals_when_it_is_free)
{
    world w;
    fx_move m;

    start(&w);
    hold_copy(&w, 0, 1);
    send(&w, &w.r[0]);
    fault_device_await_held(w.dev[0], 1);
    m = all_of(&w, &w.r[1]);
    m.signal_counter = 1;
    m.signal_value = 9;
    w.r[1].id = fx_send(&w.r[1].c, WIRE_LOAD, fx_load_body(&m));
    await_posts(&w, 1);
    cr_assert(all_there(&w.r[1]));
    cr_assert_eq(fx_counter(&w.r[1].c, 0), 0);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    cr_assert_eq(fx_counter(&w.r[1].c, 0), 9);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    stop(&w);
}

/* ---- failures ---- */

Test(exchange, a_failed_copy_of_one_is_loaded_by_the_other)
{
    world w;

    start(&w);
    hold_copy(&w, 0, 1);
    send(&w, &w.r[0]);
    fault_device_await_held(w.dev[0], 1);
    send(&w, &w.r[1]);
    fail(&w, 0, FAULT_WAIT, 1, KVS_E_DEVICE);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    cr_assert(all_there(&w.r[1]));
    cr_assert_eq(ended(&w.r[0]), KVS_E_PARTIAL);
    stop(&w);
}

/* Symptom: a GPU that could not read from the other one lost blocks that were in host memory. */
Test(exchange, a_failed_read_from_the_twin_is_made_good_from_the_host)
{
    static const fault_call CALLS[] = {FAULT_COPY, FAULT_WAIT};

    for (int i = 0; i < 2; i++) {
        world w;

        start(&w);
        one_is_held(&w, 0);
        fail(&w, 0, CALLS[i], i == 0 ? 1 : 2, KVS_E_DEVICE); /* the first wait is for its own batch */
        fault_device_release(w.dev[0]);
        cr_assert_eq(ended(&w.r[0]), KVS_OK);
        cr_assert_eq(ended(&w.r[1]), KVS_OK);
        cr_assert(all_there(&w.r[0]));
        cr_assert_lt(exchanged(&w, 0), N - BATCH);
        cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "devices.0.load.exchange_failed"), 1);
        cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "load.failed"), 0, "the job is none the worse for it");
        stop(&w);
    }
}

Test(exchange, a_lost_device_leaves_the_other_load_answered)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    fail(&w, 0, FAULT_WAIT, 2, KVS_E_DEVICE_LOST); /* of a batch from the twin */
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_E_DEVICE_LOST);
    cr_assert_eq(ended(&w.r[1]), KVS_E_DEVICE_LOST); /* the daemon ends, for everybody */
    leave(&w);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

/* ---- one side stops ---- */

static void cancel(world *w, rank *r)
{
    fx_body *b = fx_new();

    (void)w;
    wire_put_cancel_req(&b->out, &(wire_cancel_req){.target = r->id});
    (void)fx_send(&r->c, WIRE_CANCEL, b);
}

Test(exchange, a_cancelled_one_is_answered_and_the_other_loads_the_rest)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    cancel(&w, &w.r[1]);
    fx_advance(&w.f, 1);
    cr_assert(fx_has_reply(&w.r[1].c, w.r[1].id));
    cr_assert_eq(ended(&w.r[1]), KVS_OK); /* it was there already */
    wipe(&w.r[1]);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    stop(&w);
}

Test(exchange, one_that_is_cancelled_while_it_runs_holds_up_nobody)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    cancel(&w, &w.r[0]);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    cr_assert_eq(ended(&w.r[0]), KVS_E_CANCELLED);
    cr_assert(all_there(&w.r[1]));
    stop(&w);
}

Test(exchange, a_client_that_goes_leaves_its_memory_until_it_is_read)
{
    for (int who = 0; who < 2; who++) {
        world w;

        start(&w);
        one_is_held(&w, 0);
        go_on_to_a_read(&w);
        peer_gone(w.r[who].c.peer, w.f.now_us);
        fx_advance(&w.f, 1000000);
        cr_assert_not(w.r[who].c.closed);
        cr_assert_eq(ended(&w.r[1 - who]), KVS_OK);
        cr_assert(all_there(&w.r[1 - who]));
        fx_advance(&w.f, 1000);
        while (!w.r[who].c.closed)
            fx_run(&w.f, 1);
        munmap(w.r[who].c.counters, WIRE_COUNTER_PAGE_BYTES);
        stop(&w);
    }
}

Test(exchange, a_held_one_that_goes_leaves_at_once_if_nobody_reads)
{
    world w;

    start(&w);
    one_is_held(&w, 0);
    fx_gone(&w.r[1].c);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    stop(&w);
}

Test(exchange, one_that_is_dropped_before_it_begins_leaves_the_other_alone)
{
    world w;
    fx_move m;

    start(&w);
    m = all_of(&w, &w.r[1]);
    m.after_counter = 1;
    m.after_value = 5;
    hold_copy(&w, 0, 1);
    send(&w, &w.r[0]);
    fault_device_await_held(w.dev[0], 1);
    w.r[1].id = fx_send(&w.r[1].c, WIRE_LOAD, fx_load_body(&m));
    cancel(&w, &w.r[1]);
    cr_assert_eq(ended(&w.r[1]), KVS_E_CANCELLED);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    stop(&w);
}

/* Symptom: a LOAD whose blocks were all there ran into its deadline, for the sake of another one. */
Test(exchange, a_deadline_ends_that_it_is_held)
{
    world w;

    start(&w);
    one_is_held_until(&w, 0, 500);
    fx_advance(&w.f, 600);
    cr_assert(fx_has_reply(&w.r[1].c, w.r[1].id));
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    wipe(&w.r[1]);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    cr_assert_eq(exchanged(&w, 0), 0);
    stop(&w);
}

Test(exchange, a_deadline_while_it_is_read_from_is_a_deadline)
{
    world w;

    start(&w);
    one_is_held_until(&w, 0, 500);
    go_on_to_a_read(&w);
    fx_advance(&w.f, 600);
    cr_assert(fx_has_reply(&w.r[1].c, w.r[1].id));
    cr_assert_eq(ended(&w.r[1]), KVS_E_DEADLINE);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert(all_there(&w.r[0]));
    cr_assert_gt(exchanged(&w, 0), 0);
    stop(&w);
}

/* ---- random lives ---- */

static void rejoin(world *w, uint32_t i)
{
    rank *r = &w->r[i];

    fx_unmap(&r->g);
    fx_gone(&r->c);
    fx_client_open(&r->c, &w->f);
    (void)fx_ns(&r->c, "m");
    r->g = fx_slots_on(&r->c, i, w->ns, N + 3);
    fx_take(&r->c, &r->g, N, r->slots);
}

/* What a failure has cost is stored again. */
static void store_again(world *w)
{
    fx_move m = all_of(w, &w->r[0]);

    for (uint32_t k = 0; k < N; k++)
        fx_fill(&w->r[0].g, w->r[0].slots[k].slot, FIRST + k);
    (void)fx_store(&w->r[0].c, &m, NULL);
    cr_assert_eq(fx_lookup(&w->r[0].c, w->ns, FIRST, N), N);
}

static void plan_faults(world *w, rnd *r)
{
    static const fault_call CALLS[] = {FAULT_COPY, FAULT_WAIT};

    for (int i = 0; i < 2; i++) {
        fault_plan p = {.call = CALLS[rnd_below(r, 2)],
                        .action = rnd_below(r, 3) ? FAULT_DELAY : FAULT_FAIL,
                        .nth = 1 + rnd_below(r, 5),
                        .count = 1 + rnd_below(r, 3),
                        .status = KVS_E_DEVICE,
                        .delay_us = (uint32_t)rnd_below(r, 1500)};

        fault_device_clear(w->dev[i], FAULT_COPY);
        fault_device_clear(w->dev[i], FAULT_WAIT);
        fault_device_set_lazy(w->dev[i], rnd_below(r, 2));
        if (rnd_below(r, 3))
            fault_device_plan(w->dev[i], &p);
    }
}

/* Its answer is there: what it says is true, and from now on the slots are the client's. */
static bool ends(world *w, rank *r)
{
    wire_load_rep head;
    fx_answer a;

    (void)w;
    if (!fx_has_reply(&r->c, r->id))
        return false;
    a = fx_wait(&r->c, r->id);
    cr_assert(a.status == KVS_OK || a.status == KVS_E_PARTIAL || a.status == KVS_E_CANCELLED, "%s", a.msg);
    wire_get_load_rep(&a.in, &head);
    cr_assert_eq(head.n, N);
    for (uint32_t k = 0; k < N; k++) {
        wire_load_result x;

        wire_get_load_result(&a.in, &x);
        cr_assert(x.status != KVS_OK || fx_holds(&r->g, r->slots[k].slot, FIRST + k), "block %u", k);
    }
    fx_done(&a);
    wipe(r);
    return true;
}

static void one_life(world *w, rnd *r)
{
    uint32_t first = (uint32_t)rnd_below(r, 2), whom = (uint32_t)rnd_below(r, 2);
    uint64_t act = rnd_below(r, 4), when = rnd_below(r, 12);
    bool over[2] = {false, false};

    send(w, &w->r[first]);
    if (rnd_below(r, 2))
        (void)usleep((useconds_t)rnd_below(r, 300));
    send(w, &w->r[1 - first]);
    for (uint64_t step = 0; !over[0] || !over[1]; step++) {
        if (step == when && act == 1 && !over[whom])
            cancel(w, &w->r[whom]);
        if (step == when && act == 2 && !over[whom]) {
            rejoin(w, whom);
            over[whom] = true;
        }
        fx_run(&w->f, sink_posted(&w->f.sink) - w->f.sink.done);
        fx_advance(&w->f, rnd_below(r, 200));
        for (int i = 0; i < 2; i++)
            over[i] = over[i] || ends(w, &w->r[i]);
        (void)usleep(50);
    }
}

/* Symptom: a slot was used again while the other device read from it, or a block was called there that was not. */
Test(exchange, whatever_happens_what_is_said_to_be_there_is_there)
{
    rnd r = rnd_open("exchange", 7);
    world w;

    start(&w);
    for (int i = 0; i < 250; i++) {
        plan_faults(&w, &r);
        one_life(&w, &r);
        for (int k = 0; k < 2; k++) {
            fault_device_clear(w.dev[k], FAULT_COPY);
            fault_device_clear(w.dev[k], FAULT_WAIT);
        }
        store_again(&w);
        wipe(&w.r[0]);
    }
    cr_assert_gt(exchanged(&w, 0), 0);
    cr_assert_gt(exchanged(&w, 1), 0);
    stop(&w);
}

/* ---- where it is on ---- */

typedef struct card {
    calibration calibration;
    device_about about;
} card;

/* Of a link of 50 GB/s, `gbs` from the other card. */
static card card_of(uint8_t number, uint8_t other, double gbs)
{
    card x = {.about = {.uuid = {number}}, .calibration = {.is_measured = gbs > 0}};

    x.calibration.table = (copy_table){.n = {1, 1}, .n_peers = 1, .peers = {{.uuid = {other}, .gbs = gbs}}};
    x.calibration.table.rows[0][0].engine = 50;
    return x;
}

static const char *decided(const char *word, double a_gbs, double b_gbs, exchange_reach reach)
{
    card a = card_of(1, 2, a_gbs), b = card_of(2, 1, b_gbs);
    exchange_end own = {&a.calibration, &a.about}, other = {&b.calibration, &b.about};
    exchange x, back;
    config c;

    config_default(&c);
    strcpy(c.mover_exchange, word);
    exchange_decide(&x, &c, own, other, reach);
    exchange_decide(&back, &c, other, own, reach);
    cr_assert_eq(x.on, back.on);
    cr_assert_eq(x.on, x.why[0] == '\0');
    cr_assert_eq(x.gbs, a_gbs);
    return x.why;
}

Test(exchange, is_on_where_both_cards_have_shown_a_gain)
{
    cr_assert_str_eq(decided("auto", 360, 350, EXCHANGE_REACH), "");
    cr_assert_str_eq(decided("auto", 100, 100, EXCHANGE_REACH), "");
    cr_assert_str_eq(decided("auto", 99, 100, EXCHANGE_REACH), "no gain");
    cr_assert_str_eq(decided("auto", 100, 30, EXCHANGE_REACH), "no gain");
    cr_assert_not_null(strstr(decided("auto", 0, 360, EXCHANGE_REACH), "not measured"));
    cr_assert_not_null(strstr(decided("auto", 360, 0, EXCHANGE_REACH), "not measured"));
    cr_assert_str_eq(decided("on", 0, 0, EXCHANGE_REACH), "");
    cr_assert_str_eq(decided("on", 360, 360, EXCHANGE_OUT_OF_REACH), "no access to each other's memory");
    cr_assert_str_eq(decided("auto", 360, 360, EXCHANGE_NOT_ASKED), "takes a restart");
    cr_assert_str_eq(decided("off", 360, 360, EXCHANGE_REACH), "configuration");
}

/* ---- what is no twin ---- */

Test(exchange, other_blocks_another_order_or_few_of_them_are_loaded_alone)
{
    for (int i = 0; i < 3; i++) {
        world w;
        fx_move m;

        start(&w);
        m = all_of(&w, &w.r[1]);
        m.n = i == 0 ? 7 : N - 1;
        m.first = i == 2 ? FIRST + 1 : FIRST;
        hold_copy(&w, 0, 1);
        send(&w, &w.r[0]);
        fault_device_await_held(w.dev[0], 1);
        w.r[1].id = fx_send(&w.r[1].c, WIRE_LOAD, fx_load_body(&m));
        cr_assert_eq(ended(&w.r[1]), KVS_OK);
        fault_device_release(w.dev[0]);
        cr_assert_eq(ended(&w.r[0]), KVS_OK);
        cr_assert_eq(exchanged(&w, 0) + exchanged(&w, 1), 0);
        stop(&w);
    }
}

Test(exchange, is_off_where_the_configuration_says_so)
{
    world w;

    start(&w);
    strcpy(w.f.cfg.mover_exchange, "off");
    core_configured(w.f.core);
    hold_copy(&w, 0, 1);
    send(&w, &w.r[0]);
    fault_device_await_held(w.dev[0], 1);
    send(&w, &w.r[1]);
    cr_assert_eq(ended(&w.r[1]), KVS_OK);
    fault_device_release(w.dev[0]);
    cr_assert_eq(ended(&w.r[0]), KVS_OK);
    cr_assert_eq(exchanged(&w, 0), 0);
    stop(&w);
}
