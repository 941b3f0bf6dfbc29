#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/core.h"
#include "tests/support/random.h"

/* A long random life with several clients, and the end of the daemon at bad moments: nothing may be left behind. */

enum { CLIENTS = 4, KEYS = 24, POOL = 8, SLOTS = 8, STEPS = 4000 };

typedef struct life {
    fx f;
    fx_client admin, c[CLIENTS];
    fx_region g[CLIENTS];
    wire_slot_ref slot[CLIENTS][3];
    uint32_t ns;
    uint64_t last[CLIENTS]; /* id of a request, for CANCEL */
    rnd r;
} life;

static void join(life *l, uint32_t i)
{
    fx_client_open(&l->c[i], &l->f);
    l->ns = fx_ns(&l->c[i], "m");
    l->g[i] = fx_slots(&l->c[i], l->ns, SLOTS);
    fx_take(&l->c[i], &l->g[i], 3, l->slot[i]);
}

static void leave(life *l, uint32_t i)
{
    fx_unmap(&l->g[i]);
    fx_gone(&l->c[i]);
}

/* Replies that nobody waits for. */
static void forget_replies(fx_client *c)
{
    while (c->first) {
        reply *next = c->first->next;

        reply_destroy(c->first);
        c->first = next;
    }
    c->last = &c->first;
}

static fx_body *reset_body(uint32_t ns, uint32_t flags)
{
    fx_body *b = fx_new();

    wire_put_reset_req(&b->out, &(wire_reset_req){ns, flags});
    return b;
}

static fx_body *cancel_body(uint64_t target)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){target});
    return b;
}

static void step(life *l)
{
    uint32_t i = (uint32_t)rnd_below(&l->r, CLIENTS);
    fx_client *c = &l->c[i];
    uint64_t first = 1 + rnd_below(&l->r, KEYS), limit = 1 + rnd_below(&l->r, 400);
    fx_move m = {.ns = l->ns,
                 .region = l->g[i].id,
                 .n = (uint32_t)rnd_below(&l->r, 4),
                 .first = first,
                 .slots = l->slot[i],
                 .after_counter = (uint32_t)rnd_below(&l->r, 2),
                 .after_value = rnd_below(&l->r, 3)};

    switch (rnd_below(&l->r, 12)) {
    case 0:
    case 1:
    case 2:
        l->last[i] = fx_send_deadline(c, WIRE_STORE, limit, fx_store_body(&m));
        break;
    case 3:
    case 4:
        m.slots = rnd_below(&l->r, 2) ? NULL : m.slots;
        l->last[i] = fx_send_deadline(c, WIRE_LOAD, limit, fx_load_body(&m));
        break;
    case 5:
        (void)fx_send(c, WIRE_CANCEL, cancel_body(l->last[i]));
        break;
    case 6:
        (void)fx_send(c, rnd_below(&l->r, 2) ? WIRE_PIN : WIRE_UNPIN, fx_keys_body(l->ns, first, 2));
        break;
    case 7:
        (void)fx_send(c, WIRE_DROP, fx_keys_body(l->ns, first, 1));
        break;
    case 8:
        if (rnd_below(&l->r, 8) == 0)
            (void)fx_send(c, WIRE_RESET, reset_body(l->ns, (uint32_t)rnd_below(&l->r, 2)));
        break;
    case 9:
        fx_raise(c, 0, rnd_below(&l->r, 3));
        fx_advance(&l->f, rnd_below(&l->r, 200));
        break;
    case 10:
        if (rnd_below(&l->r, 16) == 0) {
            leave(l, i);
            join(l, i);
        }
        break;
    default:
        if (sink_posted(&l->f.sink) > l->f.sink.done)
            fx_run(&l->f, 1);
    }
    forget_replies(c);
}

/* Without the clock: nothing waits for a time. */
static void come_to_rest(fx *f)
{
    while (!core_is_idle(f->core)) {
        if (f->core->n_sweeps > 0)
            fx_advance(f, 0);
        else
            fx_run(f, 1);
    }
}

static void settle(life *l)
{
    for (uint32_t i = 0; i < CLIENTS; i++)
        fx_raise(&l->c[i], 0, 100);
    come_to_rest(&l->f);
}

/* Symptom: counters of free blocks drifted, and later "no free block" came from an empty pool. */
Test(core_life, a_random_life_of_several_clients_leaves_every_sum_right)
{
    life l = {.r = rnd_open("core_life", 1)};
    uint32_t status[3];

    fx_config(&l.f);
    l.f.cfg.pool_max_slots = POOL;
    fx_open(&l.f);
    fx_admin_open(&l.admin, &l.f);
    for (uint32_t i = 0; i < CLIENTS; i++)
        join(&l, i);
    for (int n = 0; n < STEPS; n++) {
        step(&l);
        if (n % 500 == 0)
            cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_FSCK, "ok"), 1, "at step %d", n);
    }
    settle(&l);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_FSCK, "ok"), 1);
    (void)fx_status(&l.admin, WIRE_RESET, reset_body(WIRE_NONE32, WIRE_RESET_PINNED));
    while (core_next_due(l.f.core) <= l.f.now_us)
        fx_advance(&l.f, 1);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "directory.ready"), 0);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "directory.held"), 0);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "pool.writing_bytes"), 0);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "pool.draining_bytes"), 0);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "pool.quarantined_bytes"), 0);
    leave(&l, 0);
    join(&l, 0);
    for (uint32_t i = 0; i < 3; i++)
        cr_assert_eq(
            fx_store(
                &l.c[0],
                &(fx_move){
                    .ns = l.ns, .region = l.g[0].id, .n = i < 2 ? 3 : 2, .first = 1000 + 3 * i, .slots = l.slot[0]},
                status),
            KVS_OK, "a full refill");
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "directory.ready"), POOL);
    for (uint32_t i = 0; i < CLIENTS; i++)
        leave(&l, i);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_SUMMARY, "regions"), 0);
    fx_gone(&l.admin);
    fx_close(&l.f);
}

/* Symptom: who waited for a counter when the daemon was told to end was never answered. */
Test(core_life, draining_in_the_middle_of_a_life_answers_everybody_without_a_counter_or_the_clock)
{
    life l = {.r = rnd_open("core_life", 2)};

    fx_config(&l.f);
    l.f.cfg.pool_max_slots = POOL;
    fx_open(&l.f);
    fx_admin_open(&l.admin, &l.f);
    for (uint32_t i = 0; i < CLIENTS; i++)
        join(&l, i);
    for (int n = 0; n < STEPS / 8; n++)
        step(&l);
    core_drain(l.f.core);
    come_to_rest(&l.f);
    for (uint32_t i = 0; i < CLIENTS; i++)
        cr_assert_eq(peer_in_flight(l.c[i].peer), 0);
    cr_assert_eq(fx_number(&l.admin, WIRE_SECTION_FSCK, "ok"), 1);
    for (uint32_t i = 0; i < CLIENTS; i++)
        leave(&l, i);
    fx_gone(&l.admin);
    fx_close(&l.f);
}

/* The movers make longer batches while nobody else could come in between. */
Test(core_life, knows_of_how_many_tenants_there_are_clients)
{
    fx f;
    fx_client a, again, b, admin;

    fx_config(&f);
    f.cfg.n_tenants = 2;
    (void)snprintf(f.cfg.tenants[1].name, sizeof f.cfg.tenants[1].name, "other");
    fx_open(&f);
    cr_assert_eq(f.core->n_present, 0);
    fx_connect_tenant(&a, &f, 0);
    fx_connect(&admin, &f, true);
    fx_connect_tenant(&again, &f, 0);
    cr_assert_eq(f.core->n_present, 1);
    fx_connect_tenant(&b, &f, 1);
    cr_assert_eq(f.core->n_present, 2);
    fx_gone(&a);
    cr_assert_eq(f.core->n_present, 2);
    fx_gone(&again);
    cr_assert_eq(f.core->n_present, 1);
    fx_gone(&admin);
    cr_assert_eq(f.core->n_present, 1);
    fx_gone(&b);
    cr_assert_eq(f.core->n_present, 0);
    fx_close(&f);
}

Test(core_life, a_daemon_that_stops_with_jobs_on_their_way_frees_everything)
{
    fx f;
    fx_client c;
    fx_region g;
    wire_slot_ref slot[2];
    fx_move m;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    m = (fx_move){.ns = fx_ns(&c, "m"), .n = 2, .first = 1, .slots = slot, .after_counter = 1, .after_value = 1};
    g = fx_slots(&c, m.ns, 2);
    m.region = g.id;
    fx_take(&c, &g, 2, slot);
    (void)fx_send(&c, WIRE_STORE, fx_store_body(&m));
    fx_unmap(&g);
    peer_gone(c.peer, f.now_us);
    core_stop(f.core);
    while (f.sink.done < sink_posted(&f.sink)) /* what runs may unmap, and post again */
        fx_run(&f, 1);
    cr_assert(c.closed);
    munmap(c.counters, WIRE_COUNTER_PAGE_BYTES);
    cr_assert(core_is_idle(f.core));
    core_destroy(f.core);
    f.dev->ops->close(f.dev);
    sink_fini(&f.sink);
    cr_assert_eq(fx_count_fds(), f.fds_before);
}
