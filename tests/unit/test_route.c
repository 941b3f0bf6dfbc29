/* Which means a batch of copies goes by. */
#include "daemon/route.h"

#include <criterion/criterion.h>
#include <string.h>

static config conf;

static void setup(void)
{
    config_default(&conf);
}

TestSuite(route, .init = setup);

/* As measured on one H200, roughly. */
static copy_table table(void)
{
    static const copy_row rows[] = {
        {4608, 2.4, 48, 2.4, 27, 0.97, 0.45, 32},  {18432, 4.5, 50, 4.5, 28, 0.97, 0.95, 32},
        {73728, 34, 51, 33, 28, 0.97, 0.45, 16},   {294912, 51, 51.5, 50, 28, 0.96, 0.45, 8},
        {1179648, 54, 51, 54, 28, 0.96, 0.45, 16},
    };
    copy_table t = {.card = "fake", .n = {5, 1}};

    memcpy(t.rows[0], rows, sizeof rows);
    t.rows[1][0] = rows[4];
    return t;
}

static route_rules rules(const copy_table *t, int dir, bool by_kernel)
{
    route_rules r;

    route_rules_make(&r, &conf, t, dir, by_kernel);
    return r;
}

/* Thread blocks; 0: the copy engines. */
static uint32_t blocks(const route *p, const route_rules *r, uint64_t piece, uint64_t now)
{
    device_how how = route_choose(p, r, piece, now);

    return how.means == DEVICE_BY_KERNEL ? how.n_blocks : 0;
}

Test(route, without_a_table_takes_the_kernel_for_short_pieces)
{
    route_rules r = rules(NULL, 0, true);
    route p = {0};

    cr_assert_eq(blocks(&p, &r, 4608, 0), 16);
    cr_assert_eq(blocks(&p, &r, 18432, 0), 16);
    cr_assert_eq(blocks(&p, &r, 73728, 0), 0);
    cr_assert_eq(blocks(&p, &r, 4497408, 0), 0);
}

Test(route, of_a_device_with_one_means_is_that)
{
    copy_table t = table();
    route_rules r = rules(&t, 0, false);
    route p = {0};

    cr_assert_eq(blocks(&p, &r, 4608, 0), 0);
    strcpy(conf.mover_path, "kernel");
    r = rules(&t, 0, false);
    cr_assert_eq(blocks(&p, &r, 4608, 0), 0);
}

Test(route, goes_by_what_was_measured_at_the_nearest_size)
{
    copy_table t = table();
    route_rules load = rules(&t, 0, true), store = rules(&t, 1, true);
    route p = {0};

    cr_assert_eq(blocks(&p, &load, 16, 0), 32);
    cr_assert_eq(blocks(&p, &load, 18432, 0), 32);
    cr_assert_eq(blocks(&p, &load, 36000, 0), 32, "below the geometric mean of 18,432 and 73,728");
    cr_assert_eq(blocks(&p, &load, 37500, 0), 16);
    cr_assert_eq(blocks(&p, &load, 294912, 0), 8, "half a GB/s faster");
    cr_assert_eq(blocks(&p, &load, 1179648, 0), 0);
    cr_assert_eq(blocks(&p, &load, UINT64_C(1) << 30, 0), 0);
    cr_assert_eq(blocks(&p, &store, 4608, 0), 0, "the other direction has a table of its own");
}

Test(route, can_be_told_by_the_configuration)
{
    copy_table t = table();
    route_rules r;
    route p = {0};

    conf.mover_kernel_blocks = 5;
    r = rules(&t, 0, true);
    cr_assert_eq(blocks(&p, &r, 73728, 0), 5);
    strcpy(conf.mover_path, "engine");
    r = rules(&t, 0, true);
    cr_assert_eq(blocks(&p, &r, 4608, 0), 0);
    strcpy(conf.mover_path, "kernel");
    r = rules(&t, 0, true);
    cr_assert_eq(blocks(&p, &r, 4497408, 0), 5);
    conf.mover_kernel_blocks = 0;
    r = rules(NULL, 0, true);
    cr_assert_eq(blocks(&p, &r, 4497408, 0), 16);
}

static void saw_pieces(route *p, const route_rules *r, uint64_t piece, double gbs, uint64_t now)
{
    device_how how = {DEVICE_BY_KERNEL, 16};
    uint64_t bytes = 16 << 20;

    route_saw(p, r, how, piece, bytes, (uint64_t)((double)bytes / gbs / 1e3), now);
}

static void saw(route *p, const route_rules *r, double gbs, uint64_t now)
{
    saw_pieces(p, r, 73728, gbs, now);
}

/* n calls of a batch each. */
static void sums_took(route *p, uint64_t us, int n, uint64_t now)
{
    for (int i = 0; i < n; i++)
        route_saw_sums(p, ROUTE_SUMS_US, 16 << 20, us, now);
}

Test(route, two_late_sums_tell_that_a_gpu_is_busy)
{
    route p = {0};
    uint64_t now = 1000000, pause = 0;

    sums_took(&p, 55, 1, now);
    sums_took(&p, 130, 1, now);
    cr_assert_not(route_is_busy(&p, now));
    route_saw_sums(&p, ROUTE_SUMS_US, UINT64_C(512) << 20, 600, now);
    cr_assert_not(route_is_busy(&p, now), "it takes longer to sum half a GB");
    for (int i = 0; i < 5; i++) {
        sums_took(&p, 195, 1, now);
        sums_took(&p, 55, 1, now);
    }
    cr_assert_not(route_is_busy(&p, now), "each time somebody had just been there");
    sums_took(&p, 195, 2, now);
    cr_assert(route_is_busy(&p, now), "a GPU that goes to and fro between two processes takes so long");
    now += 2000000;
    p = (route){0};
    for (int i = 0; i < 8; i++) {
        uint64_t until = now;

        sums_took(&p, 55, 3, now); /* it is not calm yet */
        sums_took(&p, 1100, 2, now);
        while (route_is_busy(&p, until))
            until += 1000;
        cr_assert(until - now >= pause && until - now >= 50000 && until - now <= 2000000);
        pause = until - now;
        now = until;
    }
    cr_assert_geq(pause, 1000000);
    cr_assert_not(route_is_calm(&p));
    sums_took(&p, 60, 8, now);
    cr_assert(route_is_calm(&p));
    sums_took(&p, 1100, 2, now);
    cr_assert_not(route_is_calm(&p));
    cr_assert(route_is_busy(&p, now + 40000));
    cr_assert_not(route_is_busy(&p, now + 60000), "calm was long enough to begin anew");
    now += 2000000;
    sums_took(&p, UINT64_MAX, 1, now);
    cr_assert(route_is_busy(&p, now), "one that fails is enough");
}

Test(route, leaves_a_busy_gpu_to_the_engines_for_longer_and_longer)
{
    copy_table t = table();
    route_rules r = rules(&t, 0, true);
    route p = {0};
    uint64_t now = 1000000, pause = 0;

    saw(&p, &r, 45, now);
    cr_assert_eq(blocks(&p, &r, 73728, now), 16);
    for (int i = 0; i < 8; i++) {
        uint64_t until = now;

        saw(&p, &r, 27, now);
        while (blocks(&p, &r, 73728, until) == 0)
            until += 1000;
        cr_assert_geq(until - now, pause);
        cr_assert_leq(until - now, 2000000);
        pause = until - now;
        now = until;
    }
    cr_assert_geq(pause, 1000000);
    saw(&p, &r, 50, now);
    saw(&p, &r, 27, now);
    cr_assert_eq(blocks(&p, &r, 73728, now + 60000), 16, "after a good one it begins with a short pause again");
}

Test(route, takes_the_kernel_beside_others_where_the_table_says_that_it_harms_them_little)
{
    copy_table t = table();
    route_rules r = rules(&t, 0, true);
    route p = {0};

    saw(&p, &r, 10, 5);
    cr_assert(route_is_busy(&p, 6));
    cr_assert_eq(blocks(&p, &r, 18432, 6), 32);
    cr_assert_eq(blocks(&p, &r, 73728, 6), 0);
}

Test(route, without_a_table_learns_what_to_expect)
{
    route_rules r = rules(NULL, 0, true);
    route p = {0};

    saw_pieces(&p, &r, 18432, 27, 100);
    cr_assert_eq(blocks(&p, &r, 18432, 101), 16, "nothing better was seen yet");
    saw_pieces(&p, &r, 18432, 51, 200);
    saw_pieces(&p, &r, 18432, 27, 300);
    cr_assert_eq(blocks(&p, &r, 18432, 301), 0);
}

Test(route, does_not_judge_by_little_bytes_or_by_engines)
{
    copy_table t = table();
    route_rules r = rules(&t, 0, true);
    route p = {0};

    route_saw(&p, &r, (device_how){DEVICE_BY_KERNEL, 16}, 73728, 73728, 1000, 5);
    route_saw(&p, &r, (device_how){DEVICE_BY_ENGINE, 0}, 73728, 16 << 20, 100000, 5);
    route_saw(&p, &r, (device_how){DEVICE_BY_KERNEL, 16}, 73728, 16 << 20, 0, 5);
    cr_assert_not(route_is_busy(&p, 6));
}
