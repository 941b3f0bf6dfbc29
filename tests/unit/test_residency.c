#include "daemon/directory.h"

#include <criterion/criterion.h>
#include <string.h>
#include <time.h>

#include "tests/support/dir_fixture.h"

static fixture f;

static kvs_status pin(uint64_t id)
{
    return directory_pin(f.dir, f.ns, fixture_keys(id, 1));
}

static kvs_status unpin(uint64_t id)
{
    return directory_unpin(f.dir, f.ns, fixture_keys(id, 1));
}

static kvs_status drop(uint64_t id)
{
    return directory_drop(f.dir, f.ns, fixture_keys(id, 1));
}

static directory_reset_result reset(uint32_t tenant, uint32_t ns, bool pinned_too)
{
    directory_reset_result r;

    fixture_reset(f.dir, tenant, ns, pinned_too, &r);
    fixture_check(&f);
    return r;
}

/* ---- pins ---- */

Test(residency, keeps_a_pinned_block_whatever_is_stored)
{
    fixture_init(&f, 4, 4);
    fixture_store(&f, f.ns, 1, 4, 0, 0);
    cr_assert_eq(pin(2), KVS_OK);
    cr_assert_eq(pin(2), KVS_OK, "once is enough");
    cr_assert_eq(fixture_stats(&f).n_pinned, 1);
    cr_assert_eq(fixture_stats(&f).pinned_bytes, FIXTURE_SLOT_BYTES);
    for (uint64_t id = 10; id < 100; id++)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1, 0, 0), 1);
    cr_assert(fixture_has(&f, f.ns, 2));
    cr_assert_eq(unpin(2), KVS_OK);
    cr_assert_eq(unpin(2), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 100, 1, 0, 0), 1);
    cr_assert_not(fixture_has(&f, f.ns, 2), "a pin is no use: it is still the longest unused one");
    cr_assert_eq(unpin(2), KVS_E_NOT_FOUND);
    cr_assert_eq(pin(2), KVS_E_NOT_FOUND);
    fixture_admit(&f, f.ns, 2, 1, 0, 0);
    cr_assert_eq(pin(2), KVS_E_NOT_FOUND, "its bytes are not there yet");
    directory_abort(f.dir, f.slot[0]);
    fixture_fini(&f);
}

/* Case 142 without the reload: counts stay right when everything is pinned, held, or both. */
Test(residency, counts_a_block_once_that_is_pinned_held_and_leased)
{
    directory_lease lease;
    pool_slot slot;

    fixture_init(&f, 2, 2);
    fixture_store(&f, f.ns, 1, 2, 0, 0);
    cr_assert_eq(pin(1), KVS_OK);
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &slot), KVS_OK);
    cr_assert_eq(fixture_reserve(&f, f.ns, 1, 1, 1, 1000, &lease), KVS_OK);
    cr_assert_eq(fixture_stats(&f).evictable, 1);
    cr_assert_eq(unpin(1), KVS_OK);
    cr_assert_eq(fixture_stats(&f).evictable, 1);
    directory_unhold(f.dir, slot);
    cr_assert_eq(fixture_stats(&f).evictable, 1);
    cr_assert_eq(directory_release(f.dir, 1, lease.id, NULL), KVS_OK);
    cr_assert_eq(fixture_stats(&f).evictable, 2);
    fixture_fini(&f);
}

/* ---- drop ---- */

Test(residency, drops_what_nobody_keeps)
{
    directory_lease lease;

    fixture_init(&f, 4, 4);
    fixture_store(&f, f.ns, 1, 3, 0, 0);
    cr_assert_eq(drop(9), KVS_E_NOT_FOUND);
    cr_assert_eq(drop(3), KVS_OK);
    cr_assert_eq(f.last[3].cause, WIRE_CAUSE_DROPPED);
    cr_assert_eq(drop(3), KVS_E_NOT_FOUND);
    cr_assert_eq(pin(2), KVS_OK);
    cr_assert_eq(drop(2), KVS_E_BUSY);
    cr_assert_eq(fixture_reserve(&f, f.ns, 1, 1, 1, 1000, &lease), KVS_OK);
    cr_assert_eq(drop(1), KVS_E_BUSY);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 2);
    fixture_fini(&f);
}

Test(residency, takes_the_key_of_a_block_being_read_at_once_and_its_memory_later)
{
    pool_slot slot;
    pool_bytes b;

    fixture_init(&f, 1, 1);
    fixture_store(&f, f.ns, 1, 1, 0, 0);
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &slot), KVS_OK);
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &slot), KVS_OK);
    cr_assert_eq(drop(1), KVS_OK);
    fixture_check(&f);
    cr_assert_not(fixture_has(&f, f.ns, 1));
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.draining, FIXTURE_SLOT_BYTES);
    directory_unhold(f.dir, slot);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 0, 0), 0, "one copy still reads it");
    directory_unhold(f.dir, slot);
    cr_assert_eq(fixture_store(&f, f.ns, 2, 1, 0, 0), 1);
    fixture_fini(&f);
}

Test(residency, cancels_a_store_whose_key_was_dropped_meanwhile)
{
    pool_slot first;

    fixture_init(&f, 2, 2);
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    first = f.slot[0];
    cr_assert_eq(drop(1), KVS_OK);
    cr_assert_eq(drop(1), KVS_E_NOT_FOUND);
    fixture_admit(&f, f.ns, 1, 1, 0, 0);
    cr_assert_eq(f.status[0], KVS_OK, "a new store need not wait for the old one");
    cr_assert_eq(directory_commit(f.dir, first, 0), KVS_E_CANCELLED);
    cr_assert_not(fixture_has(&f, f.ns, 1));
    cr_assert_eq(directory_commit(f.dir, f.slot[0], 0), KVS_OK);
    cr_assert(fixture_has(&f, f.ns, 1));
    cr_assert_eq(f.n_events, 1);
    fixture_admit(&f, f.ns, 2, 1, 0, 0);
    cr_assert_eq(drop(2), KVS_OK);
    directory_abort(f.dir, f.slot[0]);
    fixture_admit(&f, f.ns, 2, 1, 0, 0);
    cr_assert_eq(drop(2), KVS_OK);
    directory_suspect(f.dir, f.slot[0]);
    directory_settle(f.dir, f.slot[0]);
    cr_assert_eq(fixture_stats(&f).n_ready, 1);
    fixture_fini(&f);
}

/* ---- reset (case 039) ---- */

Test(residency, resets_everything_when_nothing_is_in_flight)
{
    directory_reset_result r;

    fixture_init(&f, 128, 64);
    fixture_store(&f, f.ns, 1, 100, 0, 0);
    r = reset(1, f.ns, false);
    cr_assert_eq(r.dropped, 100);
    cr_assert_eq(r.aborted + r.kept + r.leases, 0);
    cr_assert_eq(f.n_events, 101, "told as one");
    cr_assert_eq(f.last[100 % 64].type, WIRE_EVENT_RESET);
    for (uint64_t id = 1; id <= 100; id++)
        cr_assert_not(fixture_has(&f, f.ns, id));
    cr_assert_eq(fixture_store(&f, f.ns, 200, 128, 0, 0), 128);
    fixture_fini(&f);
}

Test(residency, says_what_a_reset_left_because_it_is_pinned)
{
    directory_reset_result r;

    fixture_init(&f, 128, 64);
    fixture_store(&f, f.ns, 1, 10, 0, 0);
    cr_assert_eq(pin(4), KVS_OK);
    r = reset(1, f.ns, false);
    cr_assert_eq(r.dropped, 9);
    cr_assert_eq(r.kept, 1);
    cr_assert(fixture_has(&f, f.ns, 4));
    cr_assert_eq(f.n_events, 19, "told block by block");
    r = reset(1, f.ns, true);
    cr_assert_eq(r.dropped, 1);
    cr_assert_not(fixture_has(&f, f.ns, 4));
    cr_assert_eq(fixture_stats(&f).n_pinned, 0);
    fixture_fini(&f);
}

Test(residency, aborts_stores_and_ends_leases_by_reset)
{
    directory_reset_result r;
    directory_lease lease;
    pool_slot held;
    kvs_err err = {0};

    fixture_init(&f, 8, 8);
    fixture_store(&f, f.ns, 1, 4, 0, 0);
    cr_assert_eq(fixture_reserve(&f, f.ns, 1, 3, 1, 1000, &lease), KVS_OK);
    cr_assert_eq(fixture_hold(&f, f.ns, 4, &held), KVS_OK);
    fixture_admit(&f, f.ns, 5, 1, 4, 4);
    r = reset(WIRE_NONE32, WIRE_NONE32, false);
    cr_assert_eq(r.dropped, 4);
    cr_assert_eq(r.aborted, 1);
    cr_assert_eq(r.leases, 1);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 5), 0);
    cr_assert_eq(directory_commit(f.dir, f.slot[0], 0), KVS_E_CANCELLED);
    cr_assert_eq(directory_release(f.dir, 1, lease.id, &err), KVS_E_NOT_FOUND);
    directory_unhold(f.dir, held);
    cr_assert_eq(fixture_store(&f, f.ns, 11, 8, 0, 0), 8);
    fixture_fini(&f);
}

Test(residency, resets_no_more_than_it_was_asked_to)
{
    directory_lease lease;
    uint32_t second, theirs;

    fixture_init(&f, 16, 16);
    second = fixture_open(&f, 1, "second", 2);
    theirs = fixture_open(&f, 2, "model", 2);
    fixture_store(&f, f.ns, 1, 2, 0, 0);
    fixture_store(&f, second, 1, 2, 0, 0);
    fixture_store(&f, theirs, 1, 2, 0, 0);
    cr_assert_eq(fixture_reserve(&f, theirs, 1, 2, 1, 1000, &lease), KVS_OK);
    cr_assert_eq(reset(2, f.ns, true).dropped, 0, "somebody else's namespace");
    cr_assert_eq(reset(1, f.ns, true).dropped, 2);
    cr_assert_eq(fixture_lookup(&f, second, 1, 2), 2);
    cr_assert_eq(reset(1, WIRE_NONE32, true).dropped, 2);
    cr_assert_eq(fixture_lookup(&f, theirs, 1, 2), 2);
    cr_assert_eq(reset(WIRE_NONE32, WIRE_NONE32, true).leases, 1);
    cr_assert_eq(fixture_stats(&f).n_ready, 0);
    fixture_fini(&f);
}

/* A client may ask for it as often as it likes, and the loop serves everybody. */
Test(residency, a_reset_of_little_does_not_look_at_all_that_others_have)
{
    enum { PER_LIST = 4000, LISTS = 50, RESETS = 5000 };
    directory_reset_result r;
    struct timespec begin, end;
    uint32_t own;

    fixture_init(&f, PER_LIST * (LISTS + 1), PER_LIST);
    own = fixture_open(&f, 2, "own", 2);
    cr_assert_eq(fixture_store(&f, own, 1, 2, 0, 0), 2);
    for (uint32_t i = 0; i < LISTS; i++)
        cr_assert_eq(fixture_store(&f, f.ns, 1 + i * PER_LIST, PER_LIST, 0, 0), PER_LIST);
    cr_assert_eq(directory_pin(f.dir, own, fixture_keys(2, 1)), KVS_OK);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    for (uint32_t i = 0; i < RESETS; i++) {
        fixture_reset(f.dir, 2, i % 2 == 0 ? own : WIRE_NONE32, false, &r);
        cr_assert(r.dropped == (i == 0) && r.kept == 1);
    }
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    cr_assert_lt(end.tv_sec - begin.tv_sec, 2, "%d resets beside %d blocks", RESETS, PER_LIST * LISTS);
    r = reset(1, f.ns, false);
    cr_assert_eq(r.dropped, PER_LIST * LISTS);
    fixture_fini(&f);
}

/* ---- a reset in parts ---- */

static directory_sweep begin(uint32_t tenant, uint32_t ns, bool pinned_too)
{
    directory_sweep w = {.tenant = tenant, .ns = ns, .pinned_too = pinned_too};

    directory_reset_begin(f.dir, &w);
    fixture_check(&f);
    return w;
}

/* True: there is more. */
static bool step(directory_sweep *w, uint32_t budget)
{
    const uint32_t given = budget;
    const uint64_t before = w->sum.dropped + w->sum.aborted + w->sum.kept;
    bool more = directory_reset_step(f.dir, w, &budget);

    fixture_check(&f);
    cr_assert_leq(w->sum.dropped + w->sum.aborted + w->sum.kept - before, given - budget);
    cr_assert(!more || budget == 0, "it went on while it could");
    return more;
}

static void finish(directory_sweep *w)
{
    while (step(w, 7))
        ;
    directory_reset_end(f.dir, w);
    fixture_check(&f);
}

Test(residency, a_reset_in_parts_takes_no_more_than_it_may_at_a_time)
{
    directory_sweep w;
    uint32_t n = 0;

    fixture_init(&f, 128, 64);
    fixture_store(&f, f.ns, 1, 100, 0, 0);
    w = begin(1, f.ns, false);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 100), 100, "what is not gone is found");
    while (step(&w, 16)) {
        cr_assert_geq(fixture_stats(&f).n_ready, 100 - 16 * ++n);
        cr_assert_eq(f.n_events, 100, "told when it is over");
    }
    cr_assert_eq(n, 6);
    directory_reset_end(f.dir, &w);
    cr_assert_eq(w.sum.dropped, 100);
    cr_assert_eq(f.n_events, 101, "told as one");
    cr_assert_eq(f.last[100 % 64].type, WIRE_EVENT_RESET);
    cr_assert_eq(fixture_stats(&f).n_ready, 0);
    fixture_fini(&f);
}

/* The sweep ends when it has come by as many blocks as there were.  Those that came since must not be taken for them. */
Test(residency, what_is_stored_meanwhile_does_not_save_what_was_there_before)
{
    directory_sweep w;
    uint32_t n = 0;

    fixture_init(&f, 128, 64);
    fixture_store(&f, f.ns, 1, 70, 0, 0);
    for (uint64_t id = 11; id <= 60; id++)
        cr_assert_eq(drop(id), KVS_OK);
    w = begin(1, f.ns, false);
    cr_assert(step(&w, 5));
    cr_assert_eq(fixture_store(&f, f.ns, 101, 50, 0, 0), 50);
    fixture_admit(&f, f.ns, 200, 1, 0, 0);
    finish(&w);
    for (uint64_t id = 1; id <= 70; id++)
        cr_assert_not(fixture_has(&f, f.ns, id), "block %lu", (unsigned long)id);
    for (uint64_t id = 101; id <= 150; id++)
        n += fixture_has(&f, f.ns, id);
    cr_assert_eq(w.sum.dropped, 20 + 50 - n);
    cr_assert_eq(directory_commit(f.dir, f.slot[0], 0), w.sum.aborted == 1 ? KVS_E_CANCELLED : KVS_OK);
    fixture_fini(&f);
}

Test(residency, a_block_whose_store_ends_during_a_reset_goes_too)
{
    directory_sweep w;
    pool_slot slot[2];

    fixture_init(&f, 16, 16);
    fixture_store(&f, f.ns, 1, 8, 0, 0);
    fixture_admit(&f, f.ns, 9, 2, 8, 8);
    memcpy(slot, f.slot, sizeof slot);
    w = begin(1, f.ns, false);
    cr_assert(step(&w, 5));
    cr_assert_eq(directory_commit(f.dir, slot[0], 0), KVS_OK);
    finish(&w);
    cr_assert_eq(w.sum.dropped, 9);
    cr_assert_eq(w.sum.aborted, 1);
    cr_assert_eq(directory_commit(f.dir, slot[1], 0), KVS_E_CANCELLED);
    cr_assert_eq(fixture_stats(&f).n_ready, 0);
    fixture_fini(&f);
}

Test(residency, two_resets_at_once_leave_nothing_of_either)
{
    directory_sweep a, b;
    uint32_t other, theirs;

    fixture_init(&f, 128, 32);
    other = fixture_open(&f, 1, "other", 2);
    theirs = fixture_open(&f, 2, "model", 2);
    fixture_store(&f, f.ns, 1, 30, 0, 0);
    fixture_store(&f, other, 1, 30, 0, 0);
    fixture_store(&f, theirs, 1, 30, 0, 0);
    a = begin(1, f.ns, false);
    cr_assert(step(&a, 10));
    b = begin(1, WIRE_NONE32, true);
    cr_assert(step(&b, 40));
    finish(&a);
    cr_assert(directory_n_namespaces(f.dir) == 3 && fixture_lookup(&f, f.ns, 1, 30) == 0);
    finish(&b);
    cr_assert_eq(a.sum.dropped + b.sum.dropped, 60);
    cr_assert_eq(fixture_lookup(&f, other, 1, 30), 0);
    cr_assert_eq(fixture_lookup(&f, theirs, 1, 30), 30);
    fixture_fini(&f);
}

/* A block that went without an event, because none was pinned then, would be looked for by who watches for ever. */
Test(residency, a_pin_during_a_reset_is_kept_and_hides_nothing_that_went)
{
    directory_sweep w;

    fixture_init(&f, 32, 32);
    fixture_store(&f, f.ns, 1, 20, 0, 0);
    w = begin(1, f.ns, false);
    cr_assert(step(&w, 10));
    cr_assert_eq(f.n_events, 20);
    cr_assert_eq(pin(15), KVS_OK);
    finish(&w);
    cr_assert_eq(w.sum.dropped, 19);
    cr_assert_eq(w.sum.kept, 1);
    cr_assert(fixture_has(&f, f.ns, 15));
    cr_assert_eq(f.n_events, 20 + 9 + 1, "nine one by one, and ten as one");
    cr_assert_eq(f.last[29].type, WIRE_EVENT_RESET);
    cr_assert_eq(reset(1, f.ns, false).kept, 1);
    cr_assert_eq(f.n_events, 30, "nothing went");
    fixture_fini(&f);
}

Test(residency, leases_end_with_the_beginning_of_a_reset_and_none_is_made_before_its_end)
{
    directory_lease lease[2], none;
    directory_sweep w;
    kvs_err err = {0};
    uint32_t theirs;

    fixture_init(&f, 64, 64);
    theirs = fixture_open(&f, 2, "model", 2);
    fixture_store(&f, f.ns, 1, 20, 0, 0);
    fixture_store(&f, theirs, 1, 2, 0, 0);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(fixture_reserve(&f, f.ns, 1 + 5 * i, 10, 1, 1000, &lease[i]), KVS_OK);
    w = begin(1, WIRE_NONE32, false);
    cr_assert_eq(w.sum.leases, 2);
    cr_assert_eq(directory_release(f.dir, 1, lease[0].id, &err), KVS_E_NOT_FOUND);
    cr_assert_eq(fixture_stats(&f).n_leases, 0);
    cr_assert_eq(fixture_stats(&f).n_leased, 0);
    cr_assert_eq(fixture_stats(&f).n_ready, 22);
    cr_assert(step(&w, 4));
    cr_assert_eq(fixture_stats(&f).n_ready, 18);
    cr_assert_eq(fixture_reserve(&f, f.ns, 1, 10, 1, 1000, &none), KVS_OK);
    cr_assert_eq(none.n_leased, 0, "it would be gone at once");
    cr_assert_eq(fixture_reserve(&f, theirs, 1, 2, 2, 1000, &none), KVS_OK);
    cr_assert_eq(none.n_leased, 2);
    finish(&w);
    cr_assert_eq(w.sum.dropped, 20);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 2, 0, 0), 2);
    cr_assert_eq(fixture_reserve(&f, f.ns, 1, 2, 1, 1000, &none), KVS_OK);
    cr_assert_eq(none.n_leased, 2);
    fixture_fini(&f);
}

Test(residency, a_reset_that_is_ended_in_the_middle_leaves_the_rest_and_tells_of_what_went)
{
    directory_lease lease;
    directory_sweep w;

    fixture_init(&f, 32, 32);
    fixture_store(&f, f.ns, 1, 20, 0, 0);
    w = begin(1, f.ns, false);
    directory_reset_end(f.dir, &w);
    cr_assert_eq(f.n_events, 20, "nothing went");
    w = begin(1, f.ns, false);
    cr_assert(step(&w, 5));
    directory_reset_end(f.dir, &w);
    cr_assert_eq(f.n_events, 21);
    cr_assert_eq(fixture_stats(&f).n_ready, 15);
    cr_assert_eq(fixture_reserve(&f, f.ns, 6, 15, 1, 1000, &lease), KVS_OK);
    cr_assert_eq(lease.n_leased, 15);
    w = begin(1, f.ns, false);
    cr_assert(step(&w, 10)); /* five free rows first */
    directory_reset_end(f.dir, &w);
    fixture_check(&f);
    cr_assert_eq(fixture_stats(&f).n_leased, 0, "the lease has ended with the beginning");
    cr_assert_eq(fixture_stats(&f).n_ready, 10);
    cr_assert_eq(fixture_stats(&f).evictable, 10);
    fixture_fini(&f);
}
