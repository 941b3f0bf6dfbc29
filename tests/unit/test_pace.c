/* When a waiter of libkvstride is awake: the functions are inside of the library, so their file is a part of this one. */
#include "proto/client/pace.c"

#include <criterion/criterion.h>

enum { BLOCK = 4497408 };

static void took(pace *p, uint16_t op, uint64_t bytes, int64_t ns)
{
    kvs_request r = {.op = op, .status = KVS_OK};

    pace_begin(p, &r, bytes, 1000);
    pace_end(p, &r, 1000 + ns);
}

static kvs_request next(pace *p, uint16_t op, uint64_t bytes)
{
    kvs_request r = {.op = op};

    pace_begin(p, &r, bytes, 0);
    return r;
}

static bool is_awake(const kvs_request *r, int64_t at)
{
    for (uint32_t i = 0; i < r->due.n; i++)
        if (at >= r->due.at[i].from && at <= r->due.at[i].to)
            return true;
    return false;
}

static int64_t polled(const kvs_request *r)
{
    int64_t sum = 0;

    for (uint32_t i = 0; i < r->due.n; i++) {
        cr_assert_lt(r->due.at[i].from, r->due.at[i].to);
        cr_assert(i == 0 || r->due.at[i].from > r->due.at[i - 1].to, "in order, and apart");
        sum += r->due.at[i].to - r->due.at[i].from;
    }
    return sum;
}

Test(pace, knows_nothing_at_first_and_nothing_of_other_sizes_and_directions)
{
    pace p = {.active = true};

    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due.n, 0);
    took(&p, WIRE_LOAD, BLOCK, 120000);
    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due.n, 1);
    cr_assert_eq(next(&p, WIRE_STORE, BLOCK).due.n, 0);
    cr_assert_eq(next(&p, WIRE_LOAD, 200 * (uint64_t)BLOCK).due.n, 0);
    cr_assert_eq(next(&p, WIRE_PING, BLOCK).due.n, 0);
    cr_assert_eq(next(&p, WIRE_LOAD, 0).due.n, 0);
}

/* A block that is there after 120 us: to sleep in between would be too late. */
Test(pace, polls_all_the_time_for_a_short_one)
{
    pace p = {.active = true};
    kvs_request r;

    took(&p, WIRE_LOAD, BLOCK, 120000);
    took(&p, WIRE_LOAD, BLOCK, 130000);
    r = next(&p, WIRE_LOAD, BLOCK);
    cr_assert_eq(r.due.n, 1);
    cr_assert_eq(r.due.at[0].from, 0);
    cr_assert(is_awake(&r, 120000) && is_awake(&r, 130000));
    cr_assert_not(is_awake(&r, 250000));
}

/* Alone on the link, and beside others. */
Test(pace, is_awake_around_each_of_the_times_that_the_latest_took)
{
    uint64_t bytes = 200 * (uint64_t)BLOCK;
    pace p = {.active = true};
    kvs_request r;

    took(&p, WIRE_LOAD, bytes, 18400000);
    took(&p, WIRE_LOAD, bytes, 16600000);
    r = next(&p, WIRE_LOAD, bytes);
    cr_assert(is_awake(&r, 16550000) && is_awake(&r, 16600000) && is_awake(&r, 16640000));
    cr_assert(is_awake(&r, 18350000) && is_awake(&r, 18400000) && is_awake(&r, 18440000));
    cr_assert_not(is_awake(&r, 17500000));
    cr_assert_not(is_awake(&r, 1000));
    for (int i = 0; i < PACE_KEPT; i++)
        took(&p, WIRE_LOAD, bytes, 20000000 + i);
    r = next(&p, WIRE_LOAD, bytes);
    cr_assert_not(is_awake(&r, 16600000), "of long ago");
    cr_assert(is_awake(&r, 20000000));
    cr_assert_eq(r.due.n, 1);
}

Test(pace, polls_for_a_millisecond_in_all_at_most)
{
    uint64_t bytes = 4000 * (uint64_t)BLOCK;
    pace p = {.active = true};
    kvs_request r;

    for (int64_t i = 0; i < PACE_KEPT; i++)
        took(&p, WIRE_STORE, bytes, 320000000 + 7000000 * i);
    r = next(&p, WIRE_STORE, bytes);
    cr_assert_eq(r.due.n, PACE_KEPT);
    cr_assert_leq(polled(&r), 1000000);
    for (int64_t i = 0; i < PACE_KEPT; i++)
        cr_assert(is_awake(&r, 320000000 + 7000000 * i));
}

Test(pace, learns_nothing_from_failures_and_where_it_is_off)
{
    pace p = {.active = true};
    kvs_request r = {.op = WIRE_LOAD, .status = KVS_E_PARTIAL};

    pace_begin(&p, &r, BLOCK, 0);
    pace_end(&p, &r, 5000);
    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due.n, 0);
    p.active = false;
    took(&p, WIRE_LOAD, BLOCK, 120000);
    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due.n, 0);
}
