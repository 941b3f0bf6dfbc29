/* The rate that the ends of requests tell: exact whatever the stretch, and nothing where there is nothing to tell. */
#include "proto/ctl/bench_ends.h"

#include <criterion/criterion.h>
#include <string.h>

enum { MB = 1000000 };
static bench_ends e;

static void setup(void)
{
    memset(&e, 0, sizeof e);
}

TestSuite(bench_ends, .init = setup);

/* 450 MB every 9 ms are 50 GB/s, though a stretch of 150 ms holds 16 or 17 of them. */
Test(bench_ends, is_not_rounded_to_whole_requests)
{
    double gbs;

    for (uint64_t i = 0; i < 100; i++)
        bench_ends_add(&e, 9 * MB * i, 450 * MB);
    for (uint64_t from = 100 * MB; from < 120 * MB; from += MB) {
        uint64_t n = bench_ends_gbs(&e, from, from + 150 * MB, &gbs);

        cr_assert(n == 16 || n == 17, "%d", (int)n);
        cr_assert_float_eq(gbs, 50, 1e-9, "%.6f from %d ms on", gbs, (int)(from / MB));
    }
}

Test(bench_ends, leaves_out_the_bytes_of_the_first_and_what_ended_elsewhere)
{
    double gbs;

    bench_ends_add(&e, 1000, 999);
    bench_ends_add(&e, 2000, 999); /* moved before the stretch, at least in part */
    bench_ends_add(&e, 3000, 3000);
    bench_ends_add(&e, 4000, 1000);
    bench_ends_add(&e, 5000, 999);
    cr_assert_eq(bench_ends_gbs(&e, 2000, 4000, &gbs), 3);
    cr_assert_float_eq(gbs, 2, 1e-9);
}

Test(bench_ends, tells_nothing_from_one_end)
{
    double gbs = 7;

    cr_assert_eq(bench_ends_gbs(&e, 0, UINT64_MAX, &gbs), 0);
    cr_assert_eq(gbs, 0);
    bench_ends_add(&e, 1000, 10);
    cr_assert_eq(bench_ends_gbs(&e, 0, 5000, &gbs), 1);
    cr_assert_eq(gbs, 0);
    bench_ends_add(&e, 1000, 10);
    cr_assert_eq(bench_ends_gbs(&e, 0, 5000, &gbs), 2);
    cr_assert_eq(gbs, 0, "two at the same time");
}

Test(bench_ends, remembers_the_last_ones)
{
    double gbs;

    for (uint64_t i = 0; i < 3 * BENCH_ENDS; i++)
        bench_ends_add(&e, 10 * i, i < 2 * BENCH_ENDS ? 1 : 30);
    cr_assert_eq(bench_ends_gbs(&e, 0, UINT64_MAX, &gbs), BENCH_ENDS / 2);
    cr_assert_float_eq(gbs, 3, 1e-9);
}
