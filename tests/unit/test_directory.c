#include "daemon/directory.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/support/dir_fixture.h"

static fixture f;

static kvs_status commit(uint32_t i)
{
    return directory_commit(f.dir, f.slot[i], 0);
}

/* ---- namespaces ---- */

Test(directory, opens_equal_descriptions_once_a_tenant)
{
    uint32_t a, b, c;

    fixture_init(&f, 4, 4);
    a = fixture_open(&f, 1, "model", 2);
    b = fixture_open(&f, 2, "model", 2);
    c = fixture_open(&f, 1, "other", 2);
    cr_assert_eq(a, f.ns);
    cr_assert(a != b && b != c && a != c);
    cr_assert_eq(directory_namespace(f.dir, a)->layout, directory_namespace(f.dir, b)->layout);
    cr_assert_eq(directory_namespace(f.dir, a)->layout, directory_namespace(f.dir, c)->layout, "shape, not model");
    cr_assert_neq(directory_namespace(f.dir, a)->layout,
                  directory_namespace(f.dir, fixture_open(&f, 1, "model", 3))->layout);
    cr_assert_eq(directory_namespace(f.dir, a)->slot_bytes, FIXTURE_SLOT_BYTES);
    cr_assert_eq(directory_namespace(f.dir, a)->desc.n_planes, 2);
    cr_assert_null(directory_namespace(f.dir, 4));
    cr_assert_null(directory_namespace(f.dir, WIRE_NONE32));
    fixture_fini(&f);
}

Test(directory, refuses_descriptions_that_are_none)
{
    uint8_t junk[64] = {1, 2, 3};
    uint32_t ns = 77;

    fixture_init(&f, 4, 4);
    cr_assert_neq(directory_open(f.dir, 1, junk, 0, &ns, NULL), KVS_OK);
    cr_assert_neq(directory_open(f.dir, 1, junk, sizeof junk, &ns, NULL), KVS_OK);
    cr_assert_eq(ns, 77);
    cr_assert_eq(directory_n_namespaces(f.dir), 1);
    fixture_fini(&f);
}

Test(directory, keeps_tenants_and_models_with_equal_keys_apart)
{
    uint32_t other;

    fixture_init(&f, 8, 8);
    other = fixture_open(&f, 2, "model", 2);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 3, 0, 0), 3);
    cr_assert_eq(fixture_lookup(&f, other, 1, 3), 0);
    cr_assert_eq(fixture_store(&f, other, 1, 3, 0, 0), 3);
    cr_assert_eq(directory_drop(f.dir, other, fixture_keys(2, 1)), KVS_OK);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 3);
    cr_assert_eq(fixture_lookup(&f, other, 1, 3), 1);
    fixture_fini(&f);
}

/* ---- visibility ---- */

Test(directory, finds_a_key_only_when_its_bytes_are_there)
{
    uint8_t states[3];

    fixture_init(&f, 4, 4);
    fixture_admit(&f, f.ns, 1, 2, 0, 0);
    cr_assert_eq(directory_lookup(f.dir, f.ns, fixture_keys(1, 3), 3, states), 0);
    cr_assert_eq(states[0], WIRE_KEY_WRITING);
    cr_assert_eq(states[2], WIRE_KEY_ABSENT);
    cr_assert_eq(commit(1), KVS_OK);
    cr_assert_eq(directory_lookup(f.dir, f.ns, fixture_keys(1, 3), 3, states), 0, "a hole in front");
    cr_assert_eq(states[1], WIRE_KEY_READY);
    cr_assert_eq(commit(0), KVS_OK);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 2);
    cr_assert_eq(fixture_stats(&f).hits, 2);
    cr_assert_eq(fixture_stats(&f).misses, 3 + 3 + 1);
    fixture_fini(&f);
}

Test(directory, forgets_an_aborted_write_and_frees_its_slot)
{
    fixture_init(&f, 1, 1);
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    directory_abort(f.dir, f.slot[0]);
    fixture_check(&f);
    cr_assert_not(fixture_has(&f, f.ns, 1));
    cr_assert_eq(fixture_store(&f, f.ns, 1, 1, 0, 0), 1);
    fixture_fini(&f);
}

Test(directory, tells_a_second_store_of_the_same_key)
{
    uint8_t twice[3][32];
    static const uint8_t none[32];

    fixture_init(&f, 8, 8);
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    pool_slot first = f.slot[0];
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    cr_assert_eq(f.status[0], KVS_E_BUSY);
    cr_assert_eq(f.slot[0], POOL_NONE);
    cr_assert_eq(directory_commit(f.dir, first, 0), KVS_OK);
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    cr_assert_eq(f.status[0], KVS_E_EXISTS);
    fixture_key(5, twice[0]);
    fixture_key(6, twice[1]);
    fixture_key(5, twice[2]);
    directory_admit(f.dir, f.ns, 0, none, twice[0], 3, f.status, f.slot);
    cr_assert_eq(f.status[0], KVS_OK);
    cr_assert_eq(f.status[1], KVS_OK);
    cr_assert_eq(f.status[2], KVS_E_BUSY, "the same key twice in one list");
    fixture_check(&f);
    cr_assert_eq(commit(0), KVS_OK);
    cr_assert_eq(commit(1), KVS_OK);
    fixture_fini(&f);
}

Test(directory, tells_watchers_what_appears_and_what_goes)
{
    fixture_init(&f, 2, 2);
    fixture_admit(&f, f.ns, 1, 2, 0, 0);
    cr_assert_eq(f.n_events, 0);
    cr_assert_eq(commit(0), KVS_OK);
    cr_assert_eq(f.last[0].type, WIRE_EVENT_STORED);
    cr_assert_eq(f.last[0].id, 1);
    cr_assert_eq(commit(1), KVS_OK);
    cr_assert_eq(f.last[1].depth, 1);
    fixture_store(&f, f.ns, 9, 1, 0, 0);
    cr_assert_eq(f.n_events, 4);
    cr_assert_eq(f.last[2].type, WIRE_EVENT_REMOVED);
    cr_assert_eq(f.last[2].cause, WIRE_CAUSE_EVICTED);
    cr_assert_eq(f.last[2].id, 2);
    fixture_fini(&f);
}

/* ---- space ---- */

/* Case 007. */
Test(directory, answers_every_key_of_a_batch_larger_than_the_pool)
{
    fixture_init(&f, 4, 4);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 6, 0, 0), 4);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(f.status[i], i < 4 ? KVS_OK : KVS_E_NO_SPACE);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 6), 4);
    for (uint64_t id = 1; id <= 3; id++)
        cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(id, 1)), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 6, 0, 0), 0);
    for (int i = 0; i < 6; i++)
        cr_assert_eq(f.status[i], i < 4 ? KVS_E_EXISTS : KVS_E_NO_SPACE, "key %d", i);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 6), 4, "a batch never evicts its own shallower blocks");
    cr_assert_eq(fixture_store(&f, f.ns, 11, 6, 0, 0), 1, "one block was not pinned");
    cr_assert_eq(f.status[0], KVS_OK);
    cr_assert_eq(fixture_stats(&f).n_ready, 4);
    fixture_fini(&f);
}

Test(directory, does_not_evict_the_chain_above_for_its_own_tail)
{
    fixture_init(&f, 4, 4);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 3, 0, 0), 3);
    cr_assert_eq(fixture_store(&f, f.ns, 4, 3, 3, 3), 1);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 6), 4);
    fixture_fini(&f);
}

/* Case 008. */
Test(directory, evicts_the_deepest_block_of_a_prefix_first)
{
    fixture_init(&f, 3, 3);
    for (uint64_t round = 0; round < 100; round++) {
        cr_assert_geq(fixture_store(&f, f.ns, 1, 3, 0, 0), 1);
        cr_assert_eq(fixture_store(&f, f.ns, 1000 + round, 1, 0, 0), 1);
        cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 2);
    }
    fixture_fini(&f);
}

Test(directory, evicts_the_deepest_first_whatever_order_the_copies_end_in)
{
    fixture_init(&f, 4, 4);
    fixture_admit(&f, f.ns, 1, 4, 0, 0);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(commit(i ^ 1), KVS_OK);
    for (uint32_t left = 3; left > 0; left--) {
        cr_assert_eq(fixture_store(&f, f.ns, 100 + left, 1, 0, 0), 1);
        cr_assert_eq(fixture_lookup(&f, f.ns, 1, 4), left);
    }
    fixture_fini(&f);
}

/* A long prompt that comes block by block. */
Test(directory, a_chain_that_grows_block_by_block_is_not_renewed_as_a_whole_each_time)
{
    enum { CHAIN = 16384, OTHERS = 5 * CHAIN / 4000 * 4000, OTHER = 1000000 };
    pool_config c = {.max_bytes = (uint64_t)(OTHERS + CHAIN / 2) * FIXTURE_SLOT_BYTES, .extent_bytes = 16 << 20};
    uint32_t left = 0;

    fixture_init_counted(&f, &c);
    for (uint32_t i = 0; i < OTHERS; i += 4000)
        (void)fixture_store(&f, f.ns, OTHER + i, 4000, 0, 0);
    for (uint32_t i = 0; i < CHAIN; i++) /* from its middle on others must go for it */
        cr_assert_eq(fixture_store(&f, f.ns, 1 + i, 1, i, i), 1);
    cr_assert_lt(fixture_touches(), 100 * CHAIN);
    fixture_check(&f);
    for (uint32_t i = 0; i < CHAIN; i += 4096)
        cr_assert_eq(fixture_lookup(&f, f.ns, 1 + i, 4096), 4096, "none of it went");
    /* As it cools down it goes from its end, but for the part that its head was not renewed for. */
    for (uint64_t id = 2 * OTHER; fixture_has(&f, f.ns, CHAIN / 2); id += 1000)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1000, 0, 0), 1000);
    for (uint32_t i = 0; i < CHAIN; i++)
        left += fixture_has(&f, f.ns, 1 + i);
    cr_assert_gt(left, CHAIN / 4);
    cr_assert_geq(fixture_lookup(&f, f.ns, 1, 4096), 4096);
    for (uint32_t i = 0; i < CHAIN / 2 && fixture_has(&f, f.ns, 1 + i); i++)
        left--;
    cr_assert_leq(left, CHAIN / 16, "%u stay that nobody finds", left);
    fixture_fini(&f);
}

/* What is colder than such a chain may not go, what is as warm may: then it does. */
Test(directory, a_long_chain_that_grows_keeps_nothing_but_itself)
{
    enum { CHAIN = 1600, OTHERS = 8000, WARM = 200, OTHER = 1000000 };
    const uint64_t bytes = (uint64_t)(OTHERS + CHAIN + 1 + WARM + 20) * FIXTURE_SLOT_BYTES / 4096 * 4096;
    pool_config c = {.max_bytes = bytes, .extent_bytes = bytes};
    uint32_t at = CHAIN + 1;

    fixture_init_with(&f, &c);
    for (uint32_t i = 0; i < OTHERS; i += 4000)
        cr_assert_eq(fixture_store(&f, f.ns, OTHER + i, 4000, 0, 0), 4000);
    for (uint64_t i = 0; i < OTHERS; i++)
        cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(OTHER + i, 1)), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 1, CHAIN, 0, 0), CHAIN);
    cr_assert_eq(fixture_store(&f, f.ns, CHAIN + 1, 1, CHAIN, CHAIN), 1);
    cr_assert_eq(fixture_store(&f, f.ns, 2 * OTHER, WARM, 0, 0), WARM);
    for (uint32_t i = 0; i < 90; i++, at++)
        cr_assert_eq(fixture_store(&f, f.ns, at + 1, 1, at, at), 1, "%u", i);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, at), at, "and none of the chain");
    cr_assert_lt(fixture_lookup(&f, f.ns, 2 * OTHER, WARM), WARM);
    fixture_fini(&f);
}

Test(directory, renews_the_chain_up_to_its_head_with_every_store)
{
    fixture_init(&f, 6, 6);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 1, 0, 0), 1);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 1, 1), 1);
    cr_assert_eq(fixture_store(&f, f.ns, 50, 3, 0, 0), 3);
    cr_assert_eq(fixture_store(&f, f.ns, 3, 1, 2, 2), 1);  /* renews 2 and 1 */
    cr_assert_eq(fixture_store(&f, f.ns, 60, 3, 0, 0), 3); /* evicts 52, 51, 50 */
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 3);
    cr_assert_eq(fixture_lookup(&f, f.ns, 50, 3), 0);
    cr_assert_eq(fixture_store(&f, f.ns, 70, 1, 0, 0), 1);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 2);
    fixture_fini(&f);
}

/* A client may name a parent that lies deeper, or the block itself: nothing goes in circles. */
Test(directory, follows_no_circle_of_parents)
{
    fixture_init(&f, 8, 8);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 1, 5, 2), 1);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 5, 1), 1);
    fixture_store(&f, f.ns, 1, 1, 5, 2);
    fixture_store(&f, f.ns, 1, 1, 5, 1);
    cr_assert_eq(fixture_store(&f, f.ns, 3, 3, UINT32_MAX - 1, 1), 3, "depth does not wrap");
    fixture_store(&f, f.ns, 4, 1, 7, 5);
    fixture_fini(&f);
}

/* Case 010. */
Test(directory, renews_a_block_by_load_and_store_but_not_by_lookup)
{
    fixture_init(&f, 3, 3);
    for (uint64_t id = 1; id <= 3; id++)
        fixture_store(&f, f.ns, id, 1, 0, 0);
    cr_assert_eq(fixture_load(&f, f.ns, 1), KVS_OK);
    fixture_store(&f, f.ns, 4, 1, 0, 0);
    cr_assert_not(fixture_has(&f, f.ns, 2));
    for (int i = 0; i < 500; i++)
        cr_assert(fixture_has(&f, f.ns, 3));
    fixture_store(&f, f.ns, 5, 1, 0, 0);
    cr_assert_not(fixture_has(&f, f.ns, 3), "looking at it 500 times is no use of it");
    fixture_store(&f, f.ns, 1, 1, 0, 0); /* exists: renewed */
    fixture_store(&f, f.ns, 6, 1, 0, 0);
    cr_assert(fixture_has(&f, f.ns, 1));
    cr_assert_not(fixture_has(&f, f.ns, 4));
    fixture_fini(&f);
}

/* Case 013. */
Test(directory, says_no_space_at_once_when_everything_is_held)
{
    pool_slot slot[4];

    fixture_init(&f, 4, 4);
    fixture_store(&f, f.ns, 1, 4, 0, 0);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(fixture_hold(&f, f.ns, 1 + i, &slot[i]), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 9, 1, 0, 0), 0);
    cr_assert_eq(f.status[0], KVS_E_NO_SPACE);
    fixture_check(&f);
    for (uint32_t i = 0; i < 4; i++)
        directory_unhold(f.dir, slot[i]);
    cr_assert_eq(fixture_stats(&f).evictable, 4);
    cr_assert_eq(fixture_store(&f, f.ns, 9, 1, 0, 0), 1);
    cr_assert_eq(fixture_lookup(&f, f.ns, 2, 3), 3, "1 was the longest unused one, also after the wait");
    fixture_fini(&f);
}

/* Case 047. */
Test(directory, stores_an_evicted_block_anew_in_its_old_place)
{
    fixture_init(&f, 9, 9);
    fixture_store(&f, f.ns, 1, 8, 0, 0);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(3, 1)), KVS_OK);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 8), 2);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 8, 0, 0), 1);
    for (int i = 0; i < 8; i++)
        cr_assert_eq(f.status[i], i == 2 ? KVS_OK : KVS_E_EXISTS);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 8), 8);
    fixture_store(&f, f.ns, 20, 2, 0, 0);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 8), 7, "and the chain hangs together again");
    fixture_fini(&f);
}

/* Case 014. */
Test(directory, counts_finished_blocks_as_evictable_without_another_request)
{
    fixture_init(&f, 8, 8);
    fixture_store(&f, f.ns, 1, 8, 0, 0);
    cr_assert_eq(fixture_stats(&f).evictable, 8);
    cr_assert_eq(fixture_stats(&f).n_pinned + fixture_stats(&f).n_held, 0);
    fixture_fini(&f);
}

/* ---- holds ---- */

Test(directory, counts_holds_up_to_their_limit)
{
    pool_slot slot, other;

    fixture_init(&f, 1, 1);
    fixture_store(&f, f.ns, 1, 1, 0, 0);
    for (int i = 0; i < 65535; i++)
        cr_assert_eq(fixture_hold(&f, f.ns, 1, &slot), KVS_OK);
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &other), KVS_E_BUSY);
    cr_assert_eq(other, POOL_NONE);
    for (int i = 0; i < 65535; i++)
        directory_unhold(f.dir, slot);
    cr_assert_eq(fixture_stats(&f).evictable, 1);
    cr_assert_eq(fixture_hold(&f, f.ns, 2, &other), KVS_E_NOT_FOUND);
    fixture_fini(&f);
}

Test(directory, quarantines_a_suspect_write_until_the_hardware_has_stopped)
{
    pool_bytes b;

    fixture_init(&f, 2, 2);
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    directory_suspect(f.dir, f.slot[0]);
    pool_slot suspect = f.slot[0];
    fixture_check(&f);
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.quarantined, FIXTURE_SLOT_BYTES);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 1, 0, 0), 1, "the key is free for another try");
    cr_assert_neq(f.slot[0], suspect);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 2, 1, 1), 0, "its memory is not");
    directory_settle(f.dir, suspect);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 1, 1), 1);
    fixture_fini(&f);
}

Test(directory, keeps_a_block_under_a_suspect_read_until_it_is_settled)
{
    pool_slot slot;

    fixture_init(&f, 1, 1);
    fixture_store(&f, f.ns, 1, 1, 0, 0);
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &slot), KVS_OK);
    directory_suspect(f.dir, slot);
    cr_assert(fixture_has(&f, f.ns, 1), "its bytes are right");
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 0, 0), 0);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(1, 1)), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 0, 0), 0);
    directory_settle(f.dir, slot);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 0, 0), 1);
    fixture_fini(&f);
}

/* ---- several layouts ---- */

static void init_two_layouts(uint32_t n_extents, uint32_t *other)
{
    fixture_init_with(&f, &(pool_config){.max_bytes = n_extents * 16384, .extent_bytes = 16384});
    *other = fixture_open(&f, 1, "other", 4); /* 3 of 4,608 an extent; the first layout: 7 of 2,304 */
}

Test(directory, gives_a_new_layout_the_coldest_extent_of_another)
{
    uint32_t other;

    init_two_layouts(3, &other);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 21, 0, 0), 21);
    for (uint64_t id = 1; id <= 7; id++) /* which extent they are in does not matter: make them the newest */
        cr_assert_eq(fixture_load(&f, f.ns, id), KVS_OK);
    cr_assert_eq(fixture_store(&f, other, 100, 3, 0, 0), 3);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 7), 7);
    cr_assert_eq(fixture_stats(&f).rebound, 7);
    cr_assert_eq(fixture_stats(&f).n_ready, 14 + 3);
    fixture_check(&f);
    fixture_fini(&f);
}

Test(directory, takes_extents_of_a_layout_that_is_colder_but_leaves_it_one)
{
    uint32_t other;

    init_two_layouts(4, &other);
    fixture_store(&f, f.ns, 1, 28, 0, 0);
    for (uint64_t id = 100; id < 140; id++)
        cr_assert_eq(fixture_store(&f, other, id, 1, 0, 0), 1);
    cr_assert_eq(fixture_stats(&f).n_ready, 9 + 7);
    cr_assert_eq(directory_namespace(f.dir, f.ns)->n_ready, 7, "an active layout keeps an extent");
    for (uint64_t id = 1; id <= 28; id++)
        if (fixture_has(&f, f.ns, id))
            cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(id, 1)), KVS_OK);
    for (uint64_t id = 200; id < 240; id++)
        cr_assert_eq(fixture_store(&f, other, id, 1, 0, 0), 1);
    cr_assert_eq(fixture_stats(&f).n_ready, 12, "one that holds nothing does not");
    fixture_fini(&f);
}

Test(directory, prefers_its_own_cold_block_to_anothers_warm_extent)
{
    uint32_t other;

    init_two_layouts(3, &other);
    fixture_store(&f, f.ns, 1, 7, 0, 0);
    fixture_store(&f, other, 100, 6, 0, 0);
    fixture_store(&f, f.ns, 50, 1, 0, 0);
    cr_assert_eq(fixture_stats(&f).rebound, 0);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 7), 6);
    cr_assert_eq(fixture_lookup(&f, other, 100, 6), 6);
    fixture_fini(&f);
}

Test(directory, never_takes_an_extent_with_a_hold_lease_pin_or_write_in_it)
{
    directory_lease lease;
    uint32_t other;
    pool_slot held;

    init_two_layouts(4, &other);
    fixture_store(&f, f.ns, 1, 28, 0, 0);
    /* One busy slot in each extent, each of another kind. */
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &held), KVS_OK);
    cr_assert_eq(fixture_reserve(&f, f.ns, 8, 1, 1, 1000, &lease), KVS_OK);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(15, 1)), KVS_OK);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(22, 1)), KVS_OK);
    fixture_admit(&f, f.ns, 22, 1, 0, 0);
    cr_assert_eq(f.status[0], KVS_OK);
    pool_slot writing = f.slot[0];
    cr_assert_eq(fixture_store(&f, other, 100, 3, 0, 0), 0);
    cr_assert_eq(fixture_stats(&f).n_ready, 27, "and nothing was evicted in vain");
    directory_unhold(f.dir, held);
    cr_assert_eq(fixture_store(&f, other, 100, 3, 0, 0), 3);
    cr_assert_eq(directory_commit(f.dir, writing, 0), KVS_OK);
    cr_assert_eq(fixture_lookup(&f, f.ns, 8, 1) + fixture_lookup(&f, f.ns, 15, 1) + fixture_lookup(&f, f.ns, 22, 1), 3);
    fixture_fini(&f);
}

/* A large extent is emptied a step at a time; meanwhile its blocks can be read, and the one that is read goes
 * last. */
Test(directory, empties_a_large_extent_in_steps)
{
    uint32_t n = 20000, other, steps = 1;
    pool_slot held;

    fixture_init_with(&f, &(pool_config){.max_bytes = (uint64_t)n * 2304, .extent_bytes = (uint64_t)n * 2304});
    for (uint64_t id = 1; id <= n; id += 1000)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1000, 0, 0), 1000);
    other = fixture_open(&f, 1, "other", 3);
    cr_assert_eq(fixture_store(&f, other, 1, 2, 0, 0), 0, "not at once");
    cr_assert_eq(f.status[1], KVS_E_NO_SPACE);
    cr_assert_eq(fixture_hold(&f, f.ns, 10, &held), KVS_OK);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(11, 1)), KVS_E_NOT_FOUND, "too late for a pin");
    while (directory_step(f.dir)) {
        fixture_check(&f);
        steps++;
    }
    cr_assert_gt(steps, 3);
    cr_assert_eq(fixture_stats(&f).n_ready, 1);
    cr_assert_eq(fixture_store(&f, other, 1, 2, 0, 0), 0);
    directory_unhold(f.dir, held);
    cr_assert_eq(fixture_stats(&f).n_ready, 0);
    cr_assert_eq(fixture_store(&f, other, 1, 2, 0, 0), 2);
    fixture_fini(&f);
}

Test(directory, stops_emptying_an_extent_that_a_reset_has_emptied)
{
    directory_reset_result r;
    uint32_t n = 20000, other;

    fixture_init_with(&f, &(pool_config){.max_bytes = (uint64_t)n * 2304, .extent_bytes = (uint64_t)n * 2304});
    for (uint64_t id = 1; id <= n; id += 1000)
        fixture_store(&f, f.ns, id, 1000, 0, 0);
    other = fixture_open(&f, 1, "other", 3);
    cr_assert_eq(fixture_store(&f, other, 1, 2, 0, 0), 0);
    cr_assert(directory_step(f.dir));
    fixture_reset(f.dir, 1, f.ns, false, &r);
    for (uint64_t id = 1; id <= 10000; id += 1000)
        cr_assert_eq(fixture_store(&f, other, id, 1000, 0, 0), 1000);
    while (directory_step(f.dir))
        fixture_check(&f);
    cr_assert_eq(fixture_stats(&f).n_ready, 10000, "they belong to the next layout");
    fixture_fini(&f);
}

/* ---- memory ---- */

static uint64_t resident_kib(void)
{
    FILE *m = fopen("/proc/self/statm", "r");
    unsigned long size = 0, res = 0;

    cr_assert_not_null(m);
    cr_assert_eq(fscanf(m, "%lu %lu", &size, &res), 2);
    (void)fclose(m);
    return res * (uint64_t)sysconf(_SC_PAGESIZE) / 1024;
}

/* Case 048, shortened: what grew per cycle would show as well. */
Test(directory, does_not_grow_with_the_number_of_stores)
{
    uint64_t before = 0, metadata = 0;

    fixture_init(&f, 1000, 1000);
    for (uint64_t i = 0; i < 300000; i++) {
        fixture_store(&f, f.ns, 1 + i, 1, 0, 0);
        if (i == 30000) {
            before = resident_kib();
            metadata = fixture_stats(&f).metadata_bytes;
        }
    }
    cr_assert_eq(fixture_stats(&f).metadata_bytes, metadata);
#ifndef __SANITIZE_ADDRESS__
    cr_assert_leq(resident_kib(), before + before / 50 + 64);
#else
    (void)before;
#endif
    for (uint64_t i = 0; i < 9000; i++)
        fixture_store(&f, f.ns, 1000000 + i % 900, 1, 0, 0);
    for (uint64_t i = 0; i < 900; i++)
        cr_assert(fixture_has(&f, f.ns, 1000000 + i));
    fixture_fini(&f);
}

Test(directory, costs_at_most_160_bytes_a_slot)
{
    enum { N = 200000 };
    uint64_t worst = 0;

    fixture_init(&f, N, 50000);
    for (uint64_t id = 1; id < N; id += 1000) {
        fixture_store(&f, f.ns, id, 1000, 0, 0);
        if (id > N / 2) { /* the fixed part is spread over enough slots */
            uint64_t each = fixture_stats(&f).metadata_bytes / (id + 999);

            worst = each > worst ? each : worst;
        }
    }
    for (uint64_t id = 1; id < N; id += 1000) /* evict and take again: now the free links exist as well */
        fixture_store(&f, f.ns, N + id, 1000, 0, 0);
    cr_assert_leq(fixture_stats(&f).metadata_bytes / N, 160);
    cr_assert_leq(worst, 160);
    fixture_fini(&f);
}

#ifndef __SANITIZE_ADDRESS__
static uint64_t mapped_bytes(void)
{
    FILE *m = fopen("/proc/self/statm", "r");
    unsigned long pages = 0;

    cr_assert_not_null(m);
    cr_assert_eq(fscanf(m, "%lu", &pages), 1);
    (void)fclose(m);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* The table of keys cannot grow: it is filled a little further, then keys are refused, and nothing is lost.
 */
Test(directory, refuses_keys_when_there_is_no_memory_for_them)
{
    struct rlimit old, tight;
    uint32_t refused = 0;

    fixture_init(&f, 1000, 1000);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 380, 0, 0), 380);
    cr_assert_eq(getrlimit(RLIMIT_AS, &old), 0);
    tight = (struct rlimit){mapped_bytes(), old.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_AS, &tight), 0);
    fixture_admit(&f, f.ns, 381, 100, 380, 380);
    cr_assert_eq(setrlimit(RLIMIT_AS, &old), 0);
    for (int i = 0; i < 100; i++) {
        cr_assert(f.status[i] == KVS_OK || f.status[i] == KVS_E_NO_MEMORY);
        refused += f.status[i] != KVS_OK;
        if (f.status[i] == KVS_OK)
            cr_assert_eq(commit((uint32_t)i), KVS_OK);
    }
    cr_assert(refused > 0 && refused < 100, "%u", refused);
    fixture_check(&f);
    cr_assert_eq(fixture_store(&f, f.ns, 381, 620, 380, 380), 520 + refused);
    fixture_fini(&f);
}
#endif

/* ---- listing ---- */

typedef struct listing {
    uint32_t n, pinned, writing;
    uint64_t ids;
} listing;

static void on_key(void *ud, const directory_key_info *k)
{
    listing *l = ud;

    l->n++;
    l->pinned += k->pinned;
    l->writing += k->state == POOL_WRITING;
    l->ids += fixture_id(k->key);
}

Test(directory, lists_taken_slots_page_by_page)
{
    listing l = {0};
    uint64_t cursor = 0;
    uint32_t other, pages = 0;

    init_two_layouts(4, &other);
    fixture_store(&f, f.ns, 1, 10, 0, 0);
    fixture_store(&f, other, 100, 2, 0, 0);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(3, 1)), KVS_OK);
    fixture_admit(&f, f.ns, 11, 1, 0, 0);
    while (cursor != UINT64_MAX && pages < 100) {
        cursor = directory_each_key(f.dir, f.ns, cursor, 3, on_key, &l);
        pages++;
    }
    cr_assert_eq(l.n, 11);
    cr_assert_eq(l.ids, 66);
    cr_assert_eq(l.pinned, 1);
    cr_assert_eq(l.writing, 1);
    cr_assert_geq(pages, 4);
    l = (listing){0};
    cr_assert_eq(directory_each_key(f.dir, WIRE_NONE32, 0, 1000, on_key, &l), UINT64_MAX);
    cr_assert_eq(l.n, 13);
    cr_assert_eq(directory_each_key(f.dir, f.ns, UINT64_MAX - 1, 10, on_key, &l), UINT64_MAX);
    cr_assert_eq(commit(0), KVS_OK);
    fixture_fini(&f);
}

Test(directory, notices_when_its_books_are_wrong)
{
    kvs_err err = {0};
    pool_row *r;

    fixture_init(&f, 4, 4);
    fixture_store(&f, f.ns, 1, 2, 0, 0);
    r = (pool_row *)(uintptr_t)pool_row_of(f.pool, f.slot[1]); /* a wild pointer would */
    r->key[5] ^= 1;
    cr_assert_eq(directory_check(f.dir, &err), KVS_E_CORRUPT);
    r->key[5] ^= 1;
    r->state = POOL_FREE;
    cr_assert_eq(directory_check(f.dir, &err), KVS_E_CORRUPT);
    cr_assert_gt(strlen(err.msg), 0);
    r->state = POOL_READY;
    fixture_fini(&f);
}
