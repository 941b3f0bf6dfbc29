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

Test(pace, knows_nothing_at_first_and_nothing_of_other_sizes_and_directions)
{
    pace p = {.active = true};

    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due_to, 0);
    took(&p, WIRE_LOAD, BLOCK, 120000);
    cr_assert_gt(next(&p, WIRE_LOAD, BLOCK).due_to, 0);
    cr_assert_eq(next(&p, WIRE_STORE, BLOCK).due_to, 0);
    cr_assert_eq(next(&p, WIRE_LOAD, 200 * (uint64_t)BLOCK).due_to, 0);
    cr_assert_eq(next(&p, WIRE_PING, BLOCK).due_to, 0);
    cr_assert_eq(next(&p, WIRE_LOAD, 0).due_to, 0);
}

/* The first request of a process is slow: the second one already has the right hour. */
Test(pace, is_awake_around_the_time_that_a_quick_one_took)
{
    uint64_t bytes = 200 * (uint64_t)BLOCK;
    pace p = {.active = true};
    kvs_request r;

    took(&p, WIRE_LOAD, bytes, 60000000);
    took(&p, WIRE_LOAD, bytes, 16600000);
    r = next(&p, WIRE_LOAD, bytes);
    cr_assert_leq(r.due_from, 16500000);
    cr_assert_geq(r.due_to, 16700000);
    cr_assert_leq(r.due_to - r.due_from, 500000, "half a millisecond at most");
    for (int i = 0; i < 100; i++)
        took(&p, WIRE_LOAD, bytes, 20000000);
    cr_assert_leq(next(&p, WIRE_LOAD, bytes).due_from, 20000000, "what stays slow is believed in the end");
    cr_assert_geq(next(&p, WIRE_LOAD, bytes).due_to, 20000000);
}

Test(pace, learns_nothing_from_failures_and_where_it_is_off)
{
    pace p = {.active = true};
    kvs_request r = {.op = WIRE_LOAD, .status = KVS_E_PARTIAL};

    pace_begin(&p, &r, BLOCK, 0);
    pace_end(&p, &r, 5000);
    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due_to, 0);
    p.active = false;
    took(&p, WIRE_LOAD, BLOCK, 120000);
    cr_assert_eq(next(&p, WIRE_LOAD, BLOCK).due_to, 0);
}
