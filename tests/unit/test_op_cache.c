#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <string.h>

#include "daemon/directory.h"

/* LOOKUP, RESERVE, LOAD, STORE and residency, through frames. */

typedef struct world {
    fx f;
    fx_client c, admin;
    uint32_t ns;
    fx_region g;
    wire_slot_ref slots[8];
} world;

static void start(world *w, int64_t pool_slots, uint32_t region_slots)
{
    fx_config(&w->f);
    w->f.cfg.pool_max_slots = pool_slots;
    fx_open(&w->f);
    fx_client_open(&w->c, &w->f);
    fx_admin_open(&w->admin, &w->f);
    w->ns = fx_ns(&w->c, "m");
    w->g = fx_slots(&w->c, w->ns, region_slots);
}

static void stop(world *w)
{
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_unmap(&w->g);
    fx_gone(&w->c);
    fx_gone(&w->admin);
    fx_close(&w->f);
}

/* Take n slots, fill them with keys first.., store them. */
static kvs_status store_keys(world *w, uint64_t first, uint32_t n, uint32_t flags, uint32_t *status)
{
    fx_move m = {.ns = w->ns, .region = w->g.id, .n = n, .flags = flags, .first = first, .slots = w->slots};

    fx_take(&w->c, &w->g, n, w->slots);
    for (uint32_t i = 0; i < n; i++)
        fx_fill(&w->g, w->slots[i].slot, first + i);
    return fx_store(&w->c, &m, status);
}

static void drop_slots(world *w, const wire_slot_ref *refs, uint32_t n)
{
    fx_body *b = fx_new();

    wire_put_slot_drop_req(&b->out, &(wire_slot_drop_req){.region = w->g.id, .n = n, .after_counter = WIRE_NONE32});
    for (uint32_t i = 0; i < n; i++)
        wire_put_slot_ref(&b->out, &refs[i]);
    cr_assert_eq(fx_status(&w->c, WIRE_SLOT_DROP, b), KVS_OK);
}

Test(op_cache, a_stored_block_loads_back_byte_for_byte)
{
    world w;
    wire_load_result r[4];
    fx_move load;

    start(&w, 0, 8);
    cr_assert_eq(store_keys(&w, 1, 4, 0, NULL), KVS_OK);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 5), 4);
    for (int i = 0; i < 4; i++)
        fx_fill(&w.g, w.slots[i].slot, 99);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 4, .first = 1, .slots = w.slots};
    cr_assert_eq(fx_load(&w.c, &load, r), KVS_OK);
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(r[i].flags, 0, "a named slot stays private");
        cr_assert(fx_holds(&w.g, w.slots[i].slot, 1 + i));
    }
    stop(&w);
}

Test(op_cache, the_daemon_chooses_a_slot_once_and_shares_it_afterwards)
{
    world w;
    wire_load_result a, b;
    fx_move load;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &load, &a), KVS_OK);
    cr_assert_eq(a.flags, WIRE_LOADED_SHARED);
    cr_assert(fx_holds(&w.g, a.slot, 1));
    cr_assert_eq(fx_load(&w.c, &load, &b), KVS_OK);
    cr_assert_eq(b.flags, WIRE_LOADED_SHARED | WIRE_LOADED_NO_COPY);
    cr_assert_eq(b.slot, a.slot);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "load.blocks"), 1);
    stop(&w);
}

Test(op_cache, two_loads_of_one_key_in_flight_end_in_one_shared_slot)
{
    world w;
    fx_move load;
    fx_answer x, y;
    wire_load_rep rep;
    wire_load_result a, b;
    uint64_t one, two;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    one = fx_send(&w.c, WIRE_LOAD, fx_load_body(&load));
    two = fx_send(&w.c, WIRE_LOAD, fx_load_body(&load));
    x = fx_wait(&w.c, one);
    y = fx_wait(&w.c, two);
    wire_get_load_rep(&x.in, &rep);
    wire_get_load_result(&x.in, &a);
    wire_get_load_rep(&y.in, &rep);
    wire_get_load_result(&y.in, &b);
    cr_assert_eq(a.slot, b.slot);
    cr_assert_eq(a.gen, b.gen);
    cr_assert(fx_holds(&w.g, a.slot, 1));
    drop_slots(&w, (wire_slot_ref[]){{a.slot, a.gen}, {b.slot, b.gen}}, 2);
    fx_done(&x);
    fx_done(&y);
    stop(&w);
}

/* Symptom: a batch larger than the pool had more results than requests, and ended the engine. */
Test(op_cache, a_batch_larger_than_the_pool_has_one_status_a_key)
{
    world w;
    uint32_t status[6];

    start(&w, 4, 8);
    cr_assert_eq(store_keys(&w, 1, 6, 0, status), KVS_E_PARTIAL);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(status[i], i < 4 ? KVS_OK : KVS_E_NO_SPACE, "key %d: %s", i, kvs_status_name(status[i]));
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 6), 4);
    drop_slots(&w, w.slots, 6);
    cr_assert_eq(fx_status(&w.c, WIRE_PIN, fx_keys_body(w.ns, 1, 3)), KVS_OK);
    cr_assert_eq(store_keys(&w, 11, 6, 0, status), KVS_E_PARTIAL);
    cr_assert_eq(status[0], KVS_OK);
    cr_assert_eq(status[1], KVS_E_NO_SPACE);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.ready"), 4);
    stop(&w);
}

/* Symptom: everything was pinned, and the allocator spun. */
Test(op_cache, a_store_into_a_pinned_pool_is_told_no_space_at_once)
{
    world w;
    uint32_t status;

    start(&w, 4, 8);
    cr_assert_eq(store_keys(&w, 1, 4, 0, NULL), KVS_OK);
    cr_assert_eq(fx_status(&w.c, WIRE_PIN, fx_keys_body(w.ns, 1, 4)), KVS_OK);
    drop_slots(&w, w.slots, 4);
    cr_assert_eq(store_keys(&w, 9, 1, 0, &status), KVS_E_PARTIAL);
    cr_assert_eq(status, KVS_E_NO_SPACE);
    cr_assert_eq(fx_status(&w.c, WIRE_UNPIN, fx_keys_body(w.ns, 4, 1)), KVS_OK);
    drop_slots(&w, w.slots, 1);
    cr_assert_eq(store_keys(&w, 9, 1, 0, &status), KVS_OK);
    stop(&w);
}

Test(op_cache, a_second_store_is_told_exists_and_may_keep_the_slot)
{
    world w;
    uint32_t status;
    wire_load_result r;
    fx_move load;

    start(&w, 0, 8);
    cr_assert_eq(store_keys(&w, 1, 1, 0, &status), KVS_OK);
    cr_assert_eq(store_keys(&w, 1, 1, WIRE_STORE_KEEP, &status), KVS_OK);
    cr_assert_eq(status, KVS_E_EXISTS);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &load, &r), KVS_OK);
    cr_assert_eq(r.flags, WIRE_LOADED_SHARED | WIRE_LOADED_NO_COPY);
    cr_assert_eq(r.slot, w.slots[0].slot);
    load.slots = w.slots;
    cr_assert_eq(fx_load(&w.c, &load, &r), KVS_E_PARTIAL, "nobody loads into a shared slot");
    cr_assert_eq(r.status, KVS_E_STATE);
    stop(&w);
}

/* Symptom: a reset said done, and a kept copy on the device was still served. */
/* Symptom: the slot was shared under the STORE's key, and then the LOAD wrote another block into it. */
Test(op_cache, a_slot_that_is_still_to_be_loaded_into_is_not_kept)
{
    world w;
    wire_load_result r;
    fx_move load, store;
    fx_answer a;
    uint64_t id;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load = (fx_move){
        .ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots, .after_counter = 1, .after_value = 1};
    id = fx_send(&w.c, WIRE_LOAD, fx_load_body(&load));
    fx_fill(&w.g, w.slots[0].slot, 2);
    store = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 2, .slots = w.slots, .flags = WIRE_STORE_KEEP};
    cr_assert_eq(fx_store(&w.c, &store, NULL), KVS_OK);
    fx_raise(&w.c, 0, 1);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 2};
    cr_assert_eq(fx_load(&w.c, &load, &r), KVS_OK);
    cr_assert(fx_holds(&w.g, r.slot, 2), "key 2 has the bytes of another");
    drop_slots(&w, w.slots, 1);
    stop(&w);
}

Test(op_cache, a_reset_reaches_blocks_that_are_kept_on_the_device)
{
    world w;
    wire_load_result r;
    fx_move load;
    fx_body *b;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, WIRE_STORE_KEEP, NULL), KVS_OK);
    b = fx_new();
    wire_put_reset_req(&b->out, &(wire_reset_req){.ns = w.ns});
    cr_assert_eq(fx_status(&w.c, WIRE_RESET, b), KVS_OK);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &load, &r), KVS_E_PARTIAL);
    cr_assert_eq(r.status, KVS_E_NOT_FOUND);
    drop_slots(&w, w.slots, 1);
    stop(&w);
}

Test(op_cache, a_reset_during_a_load_leaves_no_key_on_the_device)
{
    world w;
    fx_move load = {0};
    fx_answer a;
    wire_load_rep rep;
    wire_load_result r;
    uint64_t id;
    fx_body *b;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .after_counter = 1, .after_value = 1};
    id = fx_send(&w.c, WIRE_LOAD, fx_load_body(&load));
    b = fx_new();
    wire_put_reset_req(&b->out, &(wire_reset_req){.ns = w.ns});
    cr_assert_eq(fx_status(&w.c, WIRE_RESET, b), KVS_OK);
    fx_raise(&w.c, 0, 1);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_OK);
    wire_get_load_rep(&a.in, &rep);
    wire_get_load_result(&a.in, &r);
    fx_done(&a);
    load.after_counter = 0;
    cr_assert_eq(fx_load(&w.c, &load, &r), KVS_E_PARTIAL);
    cr_assert_eq(r.status, KVS_E_NOT_FOUND);
    stop(&w);
}

Test(op_cache, reset_says_partial_while_pinned_blocks_are_kept)
{
    world w;
    fx_body *b = fx_new();

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 2, 0, NULL), KVS_OK);
    cr_assert_eq(fx_status(&w.c, WIRE_PIN, fx_keys_body(w.ns, 1, 1)), KVS_OK);
    wire_put_reset_req(&b->out, &(wire_reset_req){.ns = w.ns});
    cr_assert_eq(fx_status(&w.c, WIRE_RESET, b), KVS_E_PARTIAL);
    b = fx_new();
    wire_put_reset_req(&b->out, &(wire_reset_req){.ns = w.ns, .flags = WIRE_RESET_PINNED});
    cr_assert_eq(fx_status(&w.c, WIRE_RESET, b), KVS_OK);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 2), 0);
    stop(&w);
}

static kvs_status reserve(world *w, uint64_t first, uint32_t n, uint32_t ttl_ms, wire_reserve_rep *rep)
{
    fx_body *b = fx_new();
    fx_answer a;
    uint8_t key[32];

    wire_put_reserve_req(&b->out, &(wire_reserve_req){.n_ns = 1, .n_keys = n, .max_loads = 1, .ttl_ms = ttl_ms});
    wire_put_u32(&b->out, w->ns);
    wire_put_pad8(&b->out);
    for (uint32_t i = 0; i < n; i++) {
        fx_key(key, first + i);
        wire_put_bytes(&b->out, key, 32);
    }
    a = fx_call(&w->c, WIRE_RESERVE, b);
    if (a.status == KVS_OK)
        wire_get_reserve_rep(&a.in, rep);
    fx_done(&a);
    return a.status;
}

static fx_body *lease_body(world *w, const uint8_t lease[16], uint32_t n)
{
    fx_body *b = fx_new();
    wire_load_req q = {.ns = w->ns,
                       .region = w->g.id,
                       .n = n,
                       .flags = WIRE_LOAD_BY_LEASE,
                       .after_counter = WIRE_NONE32,
                       .signal_counter = WIRE_NONE32};

    memcpy(q.lease, lease, 16);
    wire_put_load_req(&b->out, &q);
    for (uint32_t i = 0; i < n; i++)
        wire_put_slot_ref(&b->out, &(wire_slot_ref){WIRE_NONE32, 0});
    return b;
}

/* Symptom: a lease that was sent without its flag, or a generation without a slot, was left out without a word. */
Test(op_cache, fields_that_would_be_ignored_are_refused)
{
    world w;
    wire_load_req load = {.n = 1, .after_counter = WIRE_NONE32, .signal_counter = WIRE_NONE32};
    wire_store_req store = {.n = 0, .after_counter = WIRE_NONE32, .signal_counter = WIRE_NONE32};
    uint8_t key[32];

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load.ns = store.ns = w.ns;
    load.region = store.region = w.g.id;
    for (int i = 0; i < 4; i++) {
        wire_load_req q = load;
        fx_body *b = fx_new();

        q.lease[15] = i == 0;
        q.lease_first = i == 1;
        wire_put_load_req(&b->out, &q);
        fx_key(key, 1);
        wire_put_bytes(&b->out, key, 32);
        wire_put_slot_ref(&b->out, &(wire_slot_ref){WIRE_NONE32, i == 2});
        cr_assert_eq(fx_status(&w.c, WIRE_LOAD, b), i < 3 ? KVS_E_INVALID : KVS_OK, "case %d", i);
    }
    for (int i = 0; i < 3; i++) {
        fx_body *b = fx_new();

        store.first_depth = i == 1;
        store.parent[31] = i < 2;
        wire_put_store_req(&b->out, &store);
        cr_assert_eq(fx_status(&w.c, WIRE_STORE, b), i == 0 ? KVS_E_INVALID : KVS_OK, "case %d", i);
    }
    stop(&w);
}

Test(op_cache, a_lease_loads_its_blocks_once_and_ends_in_time)
{
    world w;
    wire_reserve_rep rep;

    start(&w, 0, 8);
    cr_assert_eq(store_keys(&w, 1, 3, 0, NULL), KVS_OK);
    cr_assert_eq(reserve(&w, 1, 5, 500, &rep), KVS_OK);
    cr_assert_eq(rep.n_leased, 3);
    cr_assert_eq(rep.bytes, 3 * FX_SLOT);
    cr_assert_eq(fx_status(&w.c, WIRE_LOAD, lease_body(&w, rep.lease, 3)), KVS_OK);
    cr_assert_eq(fx_status(&w.c, WIRE_LOAD, lease_body(&w, rep.lease, 3)), KVS_E_STATE);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_LEASES, "leases"), 1);
    cr_assert_leq(core_next_due(w.f.core), w.f.now_us + 500000);
    fx_advance(&w.f, 500001);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_LEASES, "leases"), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.leased"), 0);
    cr_assert_eq(reserve(&w, 9, 2, 500, &rep), KVS_OK);
    cr_assert_eq(rep.n_leased, 0);
    cr_assert_eq(rep.ttl_ms, 0, "there is no lease");
    stop(&w);
}

Test(op_cache, leases_of_a_client_end_with_it)
{
    world w;
    wire_reserve_rep rep;

    start(&w, 0, 8);
    cr_assert_eq(store_keys(&w, 1, 3, 0, NULL), KVS_OK);
    cr_assert_eq(reserve(&w, 1, 3, 0, &rep), KVS_OK);
    fx_unmap(&w.g);
    fx_gone(&w.c);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.leases"), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.evictable"), 3);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "regions"), 0);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

/* Of keys 1 to 8, again and again, n in all. */
static kvs_status reserve_again_and_again(world *w, uint32_t n)
{
    fx_body *b = fx_new();
    uint8_t key[32];

    wire_put_reserve_req(&b->out, &(wire_reserve_req){.n_ns = 1, .n_keys = n, .max_loads = 1});
    wire_put_u32(&b->out, w->ns);
    wire_put_pad8(&b->out);
    for (uint32_t i = 0; i < n; i++) {
        fx_key(key, 1 + i % 8);
        wire_put_bytes(&b->out, key, 32);
    }
    return fx_status(&w->c, WIRE_RESERVE, b);
}

Test(op_cache, leases_of_very_many_blocks_end_with_their_client_and_soon)
{
    world w;
    wire_reserve_rep rep;
    const uint32_t n = 100;

    start(&w, 0, 8);
    cr_assert_eq(store_keys(&w, 1, 8, 0, NULL), KVS_OK);
    cr_assert_eq(reserve(&w, 1, 8, 0, &rep), KVS_OK);
    for (uint32_t i = 0; i <= DIRECTORY_MAX_RESERVED / n; i++)
        cr_assert_eq(reserve_again_and_again(&w, n), KVS_OK);
    while (core_next_due(w.f.core) <= w.f.now_us)
        fx_advance(&w.f, 0);
    fx_unmap(&w.g);
    peer_gone(w.c.peer, w.f.now_us);
    cr_assert_gt(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.leases"), 0);
    cr_assert_leq(core_next_due(w.f.core), w.f.now_us, "it goes on at once");
    while (core_next_due(w.f.core) <= w.f.now_us)
        fx_advance(&w.f, 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.leases"), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "directory.evictable"), 8);
    fx_run(&w.f, 1); /* the region's memory */
    cr_assert(w.c.closed);
    fx_forget(&w.c);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

Test(op_cache, two_blocks_into_one_slot_are_refused_and_signalled)
{
    world w;
    wire_slot_ref twice[2];
    fx_move load;
    fx_answer a;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 2, 0, NULL), KVS_OK);
    twice[0] = twice[1] = w.slots[0];
    load = (fx_move){
        .ns = w.ns, .region = w.g.id, .n = 2, .first = 1, .slots = twice, .signal_counter = 6, .signal_value = 7};
    a = fx_call(&w.c, WIRE_LOAD, fx_load_body(&load));
    cr_assert_eq(a.status, KVS_E_INVALID);
    cr_assert(strstr(a.msg, "slot[1]"), "%s", a.msg);
    fx_done(&a);
    cr_assert_eq(fx_counter(&w.c, 5), 7);
    cr_assert_eq(fx_counter_error(&w.c, 5), KVS_E_INVALID);
    stop(&w);
}

Test(op_cache, stale_foreign_and_absurd_slots_are_told_apart)
{
    world w;
    wire_slot_ref bad[3];
    wire_load_result r[3];
    fx_move m;

    start(&w, 0, 8);
    cr_assert_eq(store_keys(&w, 1, 3, 0, NULL), KVS_OK);
    memcpy(bad, w.slots, sizeof(bad));
    bad[1].gen++;
    bad[2].slot = 7; /* free */
    bad[2].gen = w.slots[2].gen;
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 3, .first = 1, .slots = bad};
    cr_assert_eq(fx_load(&w.c, &m, r), KVS_E_PARTIAL);
    cr_assert_eq(r[0].status, KVS_OK);
    cr_assert_eq(r[1].status, KVS_E_STALE);
    cr_assert_eq(r[2].status, KVS_E_STATE);
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_E_STALE);
    bad[1].slot = 8;
    cr_assert_eq(fx_load(&w.c, &m, r), KVS_E_RANGE);
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_E_RANGE);
    stop(&w);
}

/* Symptom: a block that could not be read was found and tried again without end. */
Test(op_cache, a_block_that_cannot_be_loaded_is_no_longer_found)
{
    world w;
    wire_load_result r;
    fx_move load;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &load, &r), KVS_E_PARTIAL);
    cr_assert_eq(r.status, KVS_E_DEVICE);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    stop(&w);
}

/* Symptom: with a block that was gone already its key was dropped, by which another one was found meanwhile. */
Test(op_cache, a_block_that_was_stored_anew_is_not_lost_with_the_old_one)
{
    world w;
    wire_load_rep rep;
    wire_load_result r;
    fx_move load;
    fx_answer a;
    uint64_t id;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .after_counter = 1, .after_value = 1};
    id = fx_send(&w.c, WIRE_LOAD, fx_load_body(&load));
    cr_assert_eq(fx_status(&w.c, WIRE_DROP, fx_keys_body(w.ns, 1, 1)), KVS_OK);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    fx_raise(&w.c, 0, 1);
    a = fx_wait(&w.c, id);
    wire_get_load_rep(&a.in, &rep);
    wire_get_load_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_E_DEVICE);
    fx_done(&a);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 1);
    stop(&w);
}

Test(op_cache, a_store_that_fails_publishes_nothing_and_keeps_no_memory)
{
    world w;
    uint32_t status;

    start(&w, 0, 4);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    cr_assert_eq(store_keys(&w, 1, 1, WIRE_STORE_KEEP, &status), KVS_E_PARTIAL);
    cr_assert_eq(status, KVS_E_DEVICE);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.writing_bytes"), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.quarantined_bytes"), 0);
    stop(&w);
}

/* Symptom: an engine stored from a slot whose load had failed, and others read garbage under a good key. */
Test(op_cache, a_slot_whose_load_failed_is_no_source_for_a_store)
{
    world w;
    wire_load_result r;
    fx_move m;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots};
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_E_PARTIAL);
    m.first = 5;
    m.after_counter = WIRE_COUNTER_DAEMON + 1; /* counter 0, of the daemon's half: the load's */
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_E_STATE);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 5, 1), 0);
    stop(&w);
}

/* Symptom: after a load had failed, the engine computed the block itself, and its stores were refused from then on. */
Test(op_cache, a_slot_whose_load_failed_is_a_source_again_when_its_client_has_filled_it)
{
    world w;
    wire_load_result r;
    fx_move m;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots};
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_E_PARTIAL);
    fx_fill(&w.g, w.slots[0].slot, 5);
    m.first = 5;
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK);
    memset(w.g.base, 0, w.g.bytes);
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_OK);
    cr_assert(fx_holds(&w.g, w.slots[0].slot, 5));
    stop(&w);
}

Test(op_cache, a_lost_device_publishes_nothing_and_refuses_everything_but_health)
{
    world w;
    uint32_t status;
    wire_health_rep h;
    fx_answer a;

    start(&w, 0, 4);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_FAIL, 1, 0, KVS_E_DEVICE_LOST, 0});
    cr_assert_eq(store_keys(&w, 1, 1, 0, &status), KVS_E_DEVICE_LOST);
    cr_assert_eq(core_lost(w.f.core), KVS_E_DEVICE_LOST);
    cr_assert_eq(fx_status(&w.c, WIRE_LOOKUP, fx_keys_body(w.ns, 1, 1)), KVS_E_DEVICE_LOST);
    cr_assert_eq(fx_status(&w.c, WIRE_PING, fx_new()), KVS_E_DEVICE_LOST);
    a = fx_call(&w.c, WIRE_HEALTH, fx_new());
    cr_assert_eq(a.status, KVS_OK);
    wire_get_health_rep(&a.in, &h);
    cr_assert_eq(h.state, WIRE_HEALTH_DEGRADED);
    cr_assert(h.reasons & HEALTH_DEVICE_LOST);
    fx_done(&a);
    fx_unmap(&w.g);
    fx_gone(&w.c);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

/* ---- deadlines, cancel, end of a client, with a copy that does not end ---- */

static uint64_t send_cancel(fx_client *c, uint64_t target)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){target});
    return fx_send(c, WIRE_CANCEL, b);
}

static uint32_t cancel_outcome(fx_client *c, uint64_t id)
{
    fx_answer a = fx_wait(c, id);
    wire_cancel_rep rep;

    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_cancel_rep(&a.in, &rep);
    fx_done(&a);
    return rep.outcome;
}

/* Symptom: a timed-out load gave its slot back, and the late copy wrote into memory of someone else. */
Test(op_cache, the_slot_of_a_timed_out_load_stays_busy_until_the_copy_is_over)
{
    world w;
    fx_move m, other;
    fx_answer a;
    wire_load_rep rep;
    wire_load_result r;
    uint64_t id, cancel;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    m = (fx_move){
        .ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots, .signal_counter = 1, .signal_value = 3};
    id = fx_send_deadline(&w.c, WIRE_LOAD, 1000000, fx_load_body(&m));
    fault_device_await_held(w.f.dev, 1);
    fx_advance(&w.f, 1000001);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_DEADLINE);
    wire_get_load_rep(&a.in, &rep);
    wire_get_load_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_E_BUSY);
    fx_done(&a);
    cr_assert_eq(peer_in_flight(w.c.peer), 0);
    cr_assert(!core_is_idle(w.f.core));
    other = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 9, .slots = w.slots};
    cr_assert_eq(fx_store(&w.c, &other, NULL), KVS_E_BUSY);
    cr_assert_eq(fx_send_frame(&w.c, WIRE_PING, id, 0, fx_new(), NULL, 0), KVS_OK);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_INVALID, "its id is still in use");
    fx_done(&a);
    cancel = send_cancel(&w.c, id);
    cr_assert(!fx_has_reply(&w.c, cancel), "the copy still runs");
    fault_device_release(w.f.dev);
    (void)cancel_outcome(&w.c, cancel);
    cr_assert_eq(fx_counter(&w.c, 0), 3);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 1);
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_OK);
    cr_assert(fx_holds(&w.g, w.slots[0].slot, 1));
    stop(&w);
}

Test(op_cache, the_host_slot_of_a_timed_out_store_is_quarantined_until_it_is_over)
{
    world w;
    fx_move m;
    fx_answer a;
    uint64_t id;

    start(&w, 1, 4);
    fx_take(&w.c, &w.g, 1, w.slots);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    m = (fx_move){.ns = w.ns,
                  .region = w.g.id,
                  .n = 1,
                  .flags = WIRE_STORE_KEEP,
                  .first = 1,
                  .slots = w.slots,
                  .signal_counter = 1,
                  .signal_value = 1};
    id = fx_send_deadline(&w.c, WIRE_STORE, 1000, fx_store_body(&m));
    fault_device_await_held(w.f.dev, 1);
    fx_advance(&w.f, 2000);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_DEADLINE);
    fx_done(&a);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.quarantined_bytes"), FX_SLOT);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    fault_device_release(w.f.dev);
    (void)cancel_outcome(&w.c, send_cancel(&w.c, id));
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.quarantined_bytes"), 0);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0, "a key that was given up is not published late");
    cr_assert_eq(fx_counter(&w.c, 0), 1);
    cr_assert_eq(fx_counter_error(&w.c, 0), KVS_E_DEADLINE);
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK, "the only slot of the pool is free again");
    stop(&w);
}

Test(op_cache, a_deadline_before_the_counter_is_reached_touches_nothing)
{
    world w;
    fx_move m;
    fx_answer a;
    wire_load_rep rep;
    wire_load_result r;
    uint64_t id;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fx_fill(&w.g, w.slots[0].slot, 99);
    m = (fx_move){.ns = w.ns,
                  .region = w.g.id,
                  .n = 1,
                  .first = 1,
                  .slots = w.slots,
                  .after_counter = 3,
                  .after_value = 1,
                  .signal_counter = 2,
                  .signal_value = 4};
    id = fx_send_deadline(&w.c, WIRE_LOAD, 1000, fx_load_body(&m));
    fx_advance(&w.f, 1001);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_DEADLINE);
    wire_get_load_rep(&a.in, &rep);
    wire_get_load_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_E_DEADLINE);
    fx_done(&a);
    while (!core_is_idle(w.f.core))
        fx_run(&w.f, 1);
    cr_assert_eq(fx_counter(&w.c, 1), 4);
    cr_assert_eq(fx_counter_error(&w.c, 1), KVS_E_DEADLINE);
    cr_assert(fx_holds(&w.g, w.slots[0].slot, 99));
    m.first = 7;
    m.after_counter = 0;
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK, "the slot is as good as before");
    stop(&w);
}

Test(op_cache, cancel_of_a_waiting_store_is_answered_after_it)
{
    world w;
    fx_move m;
    fx_answer a;
    uint64_t id, cancel;

    start(&w, 0, 4);
    fx_take(&w.c, &w.g, 1, w.slots);
    m = (fx_move){.ns = w.ns,
                  .region = w.g.id,
                  .n = 1,
                  .first = 1,
                  .slots = w.slots,
                  .after_counter = 1,
                  .after_value = 5,
                  .signal_counter = 1,
                  .signal_value = 1};
    id = fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    cancel = send_cancel(&w.c, id);
    a = fx_wait(&w.c, cancel);
    cr_assert(fx_has_reply(&w.c, id), "the target's reply comes first");
    fx_done(&a);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    fx_done(&a);
    cr_assert_eq(fx_counter_error(&w.c, 0), KVS_E_CANCELLED);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0);
    cr_assert_eq(cancel_outcome(&w.c, send_cancel(&w.c, id)), WIRE_CANCEL_GONE);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.writing_bytes"), 0);
    stop(&w);
}

/* A LOAD that was given up before it began, however: nothing is held, named or moved. */
static void check_nothing_held(world *w, fx_answer *a, kvs_status why)
{
    wire_load_rep rep;
    wire_load_result r;

    cr_assert_eq(a->status, why, "%s", a->msg);
    wire_get_load_rep(&a->in, &rep);
    cr_assert_eq(rep.n, 2);
    cr_assert_eq(rep.n_ok, 0);
    for (int i = 0; i < 2; i++) {
        wire_get_load_result(&a->in, &r);
        cr_assert_eq(r.status, why, "block %d", i);
        cr_assert_eq(r.flags, 0, "block %d", i);
        cr_assert_eq(r.slot, WIRE_NONE32, "block %d", i);
        cr_assert_eq(r.gen, 0, "block %d", i);
    }
    fx_done(a);
    while (core_next_due(w->f.core) <= w->f.now_us)
        fx_advance(&w->f, 1);
    fx_take(&w->c, &w->g, 4, w->slots); /* every slot is to be had */
    drop_slots(w, w->slots, 4);
}

/* Key 1 is on the device already, key 2 is not; the LOAD waits for a counter. */
static uint64_t send_waiting_load(world *w, uint64_t deadline_us)
{
    fx_move m = {.ns = w->ns, .region = w->g.id, .n = 1, .first = 1};
    wire_load_result r;

    cr_assert_eq(fx_load(&w->c, &m, &r), KVS_OK);
    drop_slots(w, &(wire_slot_ref){r.slot, r.gen}, 1);
    m = (fx_move){.ns = w->ns,
                  .region = w->g.id,
                  .n = 2,
                  .first = 1,
                  .after_counter = 1,
                  .after_value = 1,
                  .signal_counter = 1,
                  .signal_value = 1};
    return fx_send_deadline(&w->c, WIRE_LOAD, deadline_us, fx_load_body(&m));
}

/* Symptom: the reply was E_CANCELLED, and blocks that lay on the device were held all the same. */
Test(op_cache, a_load_that_was_given_up_holds_nothing_and_names_no_slot)
{
    world w;
    fx_answer a;
    uint64_t id, cancel;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 2, 0, NULL), KVS_OK);
    drop_slots(&w, w.slots, 2);
    id = send_waiting_load(&w, 1000000);
    cancel = send_cancel(&w.c, id);
    a = fx_wait(&w.c, id);
    check_nothing_held(&w, &a, KVS_E_CANCELLED);
    cr_assert_eq(cancel_outcome(&w.c, cancel), WIRE_CANCEL_STOPPED);
    id = send_waiting_load(&w, 1000);
    cancel = send_cancel(&w.c, id);
    fx_advance(&w.f, 1001); /* both at once: the holds are given back once */
    a = fx_wait(&w.c, id);
    check_nothing_held(&w, &a, KVS_E_DEADLINE);
    (void)cancel_outcome(&w.c, cancel);
    id = send_waiting_load(&w, 1000);
    fx_advance(&w.f, 1001);
    a = fx_wait(&w.c, id);
    check_nothing_held(&w, &a, KVS_E_DEADLINE);
    stop(&w);
}

/* A LOAD of key 1 that waits for a counter, into a slot that the daemon chose; which one is easy to guess: the only one. */
static uint64_t send_guessable_load(world *w, wire_slot_ref *ret)
{
    fx_move m = {.ns = w->ns, .region = w->g.id, .n = 1, .first = 1, .after_counter = 1, .after_value = 1};

    cr_assert_eq(store_keys(w, 1, 1, 0, NULL), KVS_OK);
    drop_slots(w, w->slots, 1);
    *ret = (wire_slot_ref){w->slots[0].slot, w->slots[0].gen + 1};
    return fx_send(&w->c, WIRE_LOAD, fx_load_body(&m));
}

static void check_guessed_load(world *w, uint64_t id, wire_slot_ref chosen)
{
    wire_load_rep rep;
    wire_load_result r;
    fx_answer a;

    fx_raise(&w->c, 0, 1);
    a = fx_wait(&w->c, id);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_load_rep(&a.in, &rep);
    wire_get_load_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_OK);
    cr_assert_eq(r.slot, chosen.slot);
    cr_assert_eq(r.gen, chosen.gen, "the guess was right");
    cr_assert(fx_holds(&w->g, r.slot, 1));
    drop_slots(w, &chosen, 1);
    fx_done(&a);
}

/* Symptom: the daemon wrote far outside its memory when such a LOAD ended. */
Test(op_cache, a_slot_that_the_daemon_chose_cannot_be_dropped_before_it_is_named)
{
    world w;
    wire_slot_ref chosen;
    uint64_t id;
    fx_body *b = fx_new();

    start(&w, 0, 1);
    id = send_guessable_load(&w, &chosen);
    wire_put_slot_drop_req(&b->out, &(wire_slot_drop_req){.region = w.g.id, .n = 1, .after_counter = WIRE_NONE32});
    wire_put_slot_ref(&b->out, &chosen);
    cr_assert_eq(fx_status(&w.c, WIRE_SLOT_DROP, b), KVS_E_PARTIAL);
    check_guessed_load(&w, id, chosen);
    stop(&w);
}

Test(op_cache, a_slot_that_the_daemon_chose_cannot_be_kept_for_another_key_before_it_is_named)
{
    world w;
    wire_slot_ref chosen;
    fx_move m;
    uint64_t id;

    start(&w, 0, 1);
    id = send_guessable_load(&w, &chosen);
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .flags = WIRE_STORE_KEEP, .first = 7, .slots = &chosen};
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_E_STATE);
    check_guessed_load(&w, id, chosen);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 7, 1), 0);
    stop(&w);
}

/* Key 1 is found on the device by a LOAD whose second key waits; its hold is dropped under it, and the slot is somebody else's
 * when the LOAD is given up. */
Test(op_cache, a_hold_that_was_dropped_under_a_load_is_not_given_back_twice)
{
    world w;
    wire_slot_ref all[2];
    wire_load_result r;
    fx_answer a;
    uint64_t id, cancel;
    fx_move m;

    start(&w, 0, 2);
    cr_assert_eq(store_keys(&w, 1, 2, 0, NULL), KVS_OK);
    drop_slots(&w, w.slots, 2);
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_OK);
    drop_slots(&w, &(wire_slot_ref){r.slot, r.gen}, 1);
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 2, .first = 1, .after_counter = 1, .after_value = 1};
    id = fx_send(&w.c, WIRE_LOAD, fx_load_body(&m));
    drop_slots(&w, &(wire_slot_ref){r.slot, r.gen}, 1); /* the LOAD's */
    fx_take(&w.c, &w.g, 1, all);
    cr_assert_eq(all[0].slot, r.slot);
    cancel = send_cancel(&w.c, id);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    fx_done(&a);
    cr_assert_eq(cancel_outcome(&w.c, cancel), WIRE_CANCEL_STOPPED);
    drop_slots(&w, all, 1); /* it is still the client's */
    stop(&w);
}

Test(op_cache, a_failed_block_of_a_load_names_no_slot_that_the_daemon_chose)
{
    world w;
    wire_load_result r;
    fx_move m;

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_COPY, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_E_PARTIAL);
    cr_assert_eq(r.status, KVS_E_DEVICE);
    cr_assert_eq(r.slot, WIRE_NONE32);
    cr_assert_eq(r.gen, 0);
    m.slots = w.slots;
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_E_PARTIAL);
    cr_assert_eq(r.status, KVS_E_NOT_FOUND);
    cr_assert_eq(r.slot, w.slots[0].slot, "its own slot is named");
    stop(&w);
}

/* Symptom: who slept on the counter was told later than who read the socket, or never, if it went away then. */
Test(op_cache, a_job_that_will_never_run_is_signalled_before_its_deadline_is_answered)
{
    world w;
    fx_move m;
    fx_answer a;
    uint64_t id[2];

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .slots = w.slots, .after_counter = 3, .after_value = 1};
    m.signal_value = 4;
    m.signal_counter = 1;
    m.first = 1;
    id[0] = fx_send_deadline(&w.c, WIRE_LOAD, 1000, fx_load_body(&m));
    m.signal_counter = 2;
    m.first = 2;
    id[1] = fx_send_deadline(&w.c, WIRE_STORE, 1000, fx_store_body(&m));
    fx_advance(&w.f, 1001); /* no completion has run */
    for (uint32_t i = 0; i < 2; i++) {
        cr_assert(fx_has_reply(&w.c, id[i]));
        cr_assert_eq(fx_counter(&w.c, i), 4);
        cr_assert_eq(fx_counter_error(&w.c, i), KVS_E_DEADLINE);
        a = fx_wait(&w.c, id[i]);
        cr_assert_eq(a.status, KVS_E_DEADLINE);
        fx_done(&a);
    }
    stop(&w);
}

/* Symptom: the load was given up, its counter let the store behind it go, and old bytes got a good key. */
Test(op_cache, a_store_behind_a_load_that_was_given_up_publishes_nothing)
{
    world w;
    fx_move load, m;
    fx_answer a;
    uint64_t id[2];

    start(&w, 0, 4);
    cr_assert_eq(store_keys(&w, 1, 1, 0, NULL), KVS_OK);
    load = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots, .after_counter = 1};
    load.after_value = load.signal_value = load.signal_counter = 1;
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 5, .slots = w.slots, .after_value = 1};
    m.after_counter = WIRE_COUNTER_DAEMON + 1;
    id[0] = fx_send_deadline(&w.c, WIRE_LOAD, 1000, fx_load_body(&load));
    id[1] = fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    fx_advance(&w.f, 1001);
    for (int i = 0; i < 2; i++) {
        a = fx_wait(&w.c, id[i]);
        cr_assert_eq(a.status, i == 0 ? KVS_E_DEADLINE : KVS_E_PARTIAL);
        fx_done(&a);
    }
    cr_assert_eq(fx_lookup(&w.c, w.ns, 5, 1), 0);
    stop(&w);
}

/* Symptom: a load that waited for a counter kept the daemon alive until its drain timed out, and was never answered. */
Test(op_cache, draining_answers_what_has_not_begun_and_lets_a_running_copy_finish)
{
    world w;
    uint64_t running, load, store, drop;
    fx_answer a;
    fx_body *b;
    fx_move m;

    start(&w, 0, 6);
    cr_assert_eq(store_keys(&w, 1, 2, 0, NULL), KVS_OK);
    drop_slots(&w, w.slots, 2);
    fx_take(&w.c, &w.g, 2, w.slots);
    load = send_waiting_load(&w, 0);
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 9, .slots = w.slots, .after_counter = 1};
    m.after_value = 1;
    store = fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    b = fx_new();
    wire_put_slot_drop_req(&b->out, &(wire_slot_drop_req){.region = w.g.id, .n = 1, .after_value = 1});
    wire_put_slot_ref(&b->out, &w.slots[1]);
    drop = fx_send(&w.c, WIRE_SLOT_DROP, b);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 2, .slots = &w.slots[1]};
    running = fx_send(&w.c, WIRE_LOAD, fx_load_body(&m));
    fault_device_await_held(w.f.dev, 1);
    core_drain(w.f.core);
    a = fx_wait(&w.c, store);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    fx_done(&a);
    cr_assert(!fx_has_reply(&w.c, running));
    fault_device_release(w.f.dev);
    a = fx_wait(&w.c, running);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    fx_done(&a);
    a = fx_wait(&w.c, load);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    fx_done(&a);
    cr_assert_eq(fx_counter(&w.c, 0), 1);
    cr_assert_eq(fx_counter_error(&w.c, 0), KVS_E_CANCELLED);
    a = fx_wait(&w.c, drop);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    fx_done(&a);
    cr_assert(core_is_idle(w.f.core));
    stop(&w);
}

Test(op_cache, a_client_that_dies_with_a_copy_running_leaves_nothing_behind)
{
    world w;
    fx_move m;

    start(&w, 0, 4);
    fx_take(&w.c, &w.g, 2, w.slots);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots};
    (void)fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    fault_device_await_held(w.f.dev, 1);
    m = (fx_move){
        .ns = w.ns, .region = w.g.id, .n = 1, .first = 2, .slots = &w.slots[1], .after_counter = 1, .after_value = 1};
    (void)fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    fx_unmap(&w.g);
    peer_gone(w.c.peer, w.f.now_us);
    cr_assert(!w.c.closed, "the memory is still being read");
    fault_device_release(w.f.dev);
    while (!w.c.closed)
        fx_run(&w.f, 1);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "in_flight"), 1, "but for this STATUS");
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "pool.writing_bytes"), 0);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_gone(&w.admin);
    fx_close(&w.f);
}

Test(op_cache, credit_bytes_bound_what_is_in_flight)
{
    world w;
    fx_move m;
    uint64_t id;
    fx_answer a;

    fx_config(&w.f);
    w.f.cfg.credit_bytes = 3 * FX_SLOT;
    fx_open(&w.f);
    fx_client_open(&w.c, &w.f);
    fx_admin_open(&w.admin, &w.f);
    w.ns = fx_ns(&w.c, "m");
    w.g = fx_slots(&w.c, w.ns, 8);
    fx_take(&w.c, &w.g, 8, w.slots);
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 4, .first = 1, .slots = w.slots};
    a = fx_call(&w.c, WIRE_STORE, fx_store_body(&m));
    cr_assert_eq(a.status, KVS_E_LIMIT, "more than could ever be admitted");
    cr_assert_not_null(strstr(a.msg, "(limits.credit_bytes)"), "what to change: %s", a.msg);
    fx_done(&a);
    m.n = 2;
    m.after_counter = 1;
    m.after_value = 1;
    id = fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    m.after_counter = 0;
    m.first = 5;
    m.slots = &w.slots[4];
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_E_BUSY);
    fx_raise(&w.c, 0, 1);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK);
    stop(&w);
}
