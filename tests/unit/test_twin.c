#include "daemon/twin.h"

#include <criterion/criterion.h>
#include <string.h>
#include <time.h>

/* Which block goes which way, and when a side is free. */

enum { N = 10, CHUNK = 4 };

static twin *t;
static uint8_t places[2][N];

static void make(bool joined)
{
    t = twin_create(N, CHUNK);
    cr_assert_not_null(t);
    for (unsigned s = 0; s < 2; s++)
        for (uint32_t b = 0; b < N; b++)
            twin_place(t, s, b, &places[s][b]);
    cr_assert(!joined || twin_join(t));
}

static void setup(void)
{
    make(true);
}

static void teardown(void)
{
    twin_unref(t);
}

TestSuite(twin, .init = setup, .fini = teardown);

/* The block, or -1. */
static int take(unsigned side, twin_from from)
{
    const uint8_t *at = NULL;
    uint32_t block = 0;

    if (!twin_take(t, side, from, &block, &at))
        return -1;
    cr_assert(at == (from == TWIN_FROM_TWIN ? &places[1 - side][block] : NULL));
    return (int)block;
}

static int own(unsigned side)
{
    return take(side, TWIN_FROM_HOST);
}

static int other(unsigned side)
{
    return take(side, TWIN_FROM_TWIN);
}

Test(twin, goes_from_both_ends_until_they_meet)
{
    static const int BACK[] = {6, 7, 8, 9, 2, 3, 4, 5, 0, 1};

    for (int i = 0; i < 5; i++) {
        cr_assert_eq(own(0), i < 2 ? i : i == 2 ? 2 : i == 3 ? 3 : 4);
        if (i < 4)
            cr_assert_eq(own(1), BACK[i]);
    }
    cr_assert_eq(twin_open(t), 1);
    cr_assert_eq(own(1), 5);
    cr_assert_eq(own(1), -1);
    cr_assert_eq(own(0), -1);
    cr_assert_eq(twin_missing(t, 0), 5);
    cr_assert_eq(twin_missing(t, 1), 5);
}

Test(twin, one_alone_takes_all_in_its_order)
{
    static const int BACK[N] = {6, 7, 8, 9, 2, 3, 4, 5, 0, 1};

    for (int i = 0; i < N; i++)
        cr_assert_eq(own(1), BACK[i]);
    cr_assert_eq(twin_missing(t, 1), 0);
    cr_assert_eq(twin_missing(t, 0), N);
}

Test(twin, takes_from_the_other_what_has_landed_there)
{
    cr_assert_eq(own(1), 6);
    cr_assert_eq(own(1), 7);
    cr_assert_eq(other(0), -1);
    twin_landed(t, 1, 6);
    cr_assert_eq(other(0), 6);
    cr_assert_eq(other(0), -1, "once");
    twin_landed(t, 1, 7);
    cr_assert_eq(other(0), 7);
    cr_assert_eq(other(1), -1, "its own");
    twin_read_over(t, 0);
    twin_read_over(t, 0);
}

Test(twin, gives_a_failed_block_to_whoever_comes)
{
    cr_assert_eq(own(1), 6);
    for (int i = 0; i < 6; i++)
        (void)own(0);
    for (int i = 7; i < N; i++)
        cr_assert_eq(own(0), i);
    cr_assert_eq(own(0), -1);
    twin_failed(t, 1, 6);
    cr_assert_eq(own(1), -1, "the one that has failed does not try again");
    cr_assert_eq(own(0), 6);
    twin_landed(t, 0, 6);
}

Test(twin, takes_a_block_anyway_that_does_not_come)
{
    for (int i = 0; i < N; i++)
        (void)own(1);
    cr_assert(twin_may_hope(t, 0));
    cr_assert_eq(take(0, TWIN_ANYWAY), 0);
    twin_landed(t, 0, 0); /* it is the other's all the same */
    twin_landed(t, 1, 0);
    cr_assert_eq(other(1), -1);
    twin_back(t, 1);
    cr_assert_not(twin_may_hope(t, 0));
    for (int i = 1; i < N; i++)
        cr_assert_eq(take(0, TWIN_ANYWAY), i);
    cr_assert_eq(take(0, TWIN_ANYWAY), -1);
}

Test(twin, does_not_read_again_after_a_read_has_failed)
{
    for (int i = 0; i < N; i++)
        (void)own(1);
    for (uint32_t b = 0; b < N; b++)
        twin_landed(t, 1, b);
    cr_assert_eq(other(0), 6);
    twin_again(t, 0, 6);
    twin_read_over(t, 0);
    cr_assert_eq(other(0), -1);
    cr_assert_not(twin_may_hope(t, 0));
    cr_assert_eq(twin_missing(t, 0), N);
    for (int i = 0; i < N; i++)
        cr_assert_eq(take(0, TWIN_ANYWAY), i);
}

Test(twin, is_free_when_the_gate_is_closed_and_the_last_read_is_over)
{
    cr_assert_eq(own(1), 6);
    twin_landed(t, 1, 6);
    cr_assert_eq(other(0), 6);
    cr_assert_not(twin_end(t, 1));
    cr_assert_not(twin_is_free(t, 1));
    twin_close(t, 1);
    cr_assert_not(twin_is_free(t, 1), "a read is going on");
    twin_read_over(t, 0);
    cr_assert(twin_is_free(t, 1));
}

Test(twin, lets_nobody_in_through_a_closed_gate)
{
    cr_assert_eq(own(1), 6);
    cr_assert_eq(own(1), 7);
    twin_landed(t, 1, 6);
    twin_landed(t, 1, 7);
    cr_assert_eq(other(0), 6);
    twin_close(t, 1);
    cr_assert_eq(other(0), -1);
    cr_assert_not(twin_may_hope(t, 0));
    twin_read_over(t, 0);
    cr_assert(twin_is_free(t, 1));
    cr_assert_not(twin_is_free(t, 0), "the other way is open");
}

Test(twin, is_free_when_the_other_has_ended)
{
    cr_assert_not(twin_end(t, 0));
    cr_assert_not(twin_is_free(t, 0));
    cr_assert(twin_end(t, 1));
    cr_assert(twin_is_free(t, 0));
    cr_assert(twin_is_free(t, 1));
}

Test(twin, may_read_from_its_first_block_on)
{
    cr_assert_not(twin_may_read(t, 0));
    (void)own(0);
    cr_assert(twin_may_read(t, 0));
    cr_assert_not(twin_may_read(t, 1));
}

/* Symptom: an answer was held back for a device that misses nothing any more. */
Test(twin, is_free_when_the_other_has_taken_all_and_its_last_read_is_over)
{
    cr_assert_eq(own(1), 6);
    twin_landed(t, 1, 6);
    cr_assert_eq(other(0), 6);
    for (int i = 0; i < N - 1; i++)
        (void)own(0);
    cr_assert_eq(twin_missing(t, 0), 0);
    cr_assert_not(twin_may_read(t, 0));
    cr_assert_not(twin_is_free(t, 1), "a read is going on");
    twin_read_over(t, 0);
    cr_assert(twin_is_free(t, 1));
    cr_assert_not(twin_is_free(t, 0), "the other way is open");
    cr_assert(twin_end(t, 1), "it ends as such");
}

/* Symptom: an answer was held back for a device whose copies from the other one fail. */
Test(twin, is_free_when_the_other_cannot_read_from_it)
{
    cr_assert_eq(own(1), 6);
    cr_assert_eq(own(1), 7);
    twin_landed(t, 1, 6);
    twin_landed(t, 1, 7);
    cr_assert_eq(other(0), 6);
    cr_assert_eq(other(0), 7);
    twin_again(t, 0, 6);
    twin_read_over(t, 0);
    cr_assert_not(twin_may_read(t, 0));
    cr_assert_not(twin_is_free(t, 1), "a read is going on");
    twin_read_over(t, 0);
    cr_assert(twin_is_free(t, 1));
}

/* Symptom: a mover was busy for half a minute with finding the next one of 400,000 blocks. */
Test(twin, finds_each_of_many_blocks_at_once, .timeout = 60)
{
    enum { MANY = 400000 };
    const uint8_t *at;
    clock_t began = clock();
    uint32_t block = 0;

    twin_unref(t);
    t = twin_create(MANY, CHUNK);
    cr_assert(t != NULL && twin_join(t));
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert(twin_take(t, 1, TWIN_FROM_HOST, &block, &at));
    for (uint32_t b = MANY; b-- > MANY / 2;)
        twin_failed(t, 1, b);
    for (uint32_t i = 0; i < MANY / 2; i++)
        cr_assert(twin_take(t, 0, TWIN_FROM_HOST, &block, &at));
    cr_assert_not(twin_take(t, 0, TWIN_FROM_HOST, &block, &at));
    for (uint32_t i = 0; i < MANY / 2; i++) {
        cr_assert(twin_take(t, 0, TWIN_ANYWAY, &block, &at));
        cr_assert_eq(block, i);
    }
    cr_assert_eq(twin_missing(t, 0), 0);
    cr_assert_lt((double)(clock() - began) / CLOCKS_PER_SEC, 5);
}

Test(twin, takes_again_what_failed_before_what_comes_behind_it)
{
    for (int i = 0; i < N; i++)
        (void)own(1);
    twin_landed(t, 1, 6);
    cr_assert_eq(other(0), 6);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(take(0, TWIN_ANYWAY), i);
    for (int i = 4; i < N; i++)
        if (i != 6)
            cr_assert_eq(take(0, TWIN_ANYWAY), i);
    cr_assert_eq(take(0, TWIN_ANYWAY), -1);
    twin_again(t, 0, 6);
    cr_assert_eq(twin_missing(t, 0), 1);
    cr_assert_eq(take(0, TWIN_ANYWAY), 6);
    cr_assert_eq(twin_missing(t, 0), 0);
}

Test(twin, nobody_joins_one_that_has_ended)
{
    twin_unref(t);
    make(false);
    cr_assert(twin_is_free(t, 0));
    for (int i = 0; i < N; i++)
        cr_assert_eq(own(0), i);
    cr_assert(twin_end(t, 0), "alone to the end");
    cr_assert_not(twin_join(t));
    cr_assert(twin_is_free(t, 0));
}

Test(twin, lives_until_the_last_has_let_go)
{
    twin_ref(t);
    twin_unref(t);
    cr_assert_eq(own(0), 0);
    twin_unref(NULL);
}
