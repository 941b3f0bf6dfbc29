#include <criterion/criterion.h>

#include <math.h>
#include <string.h>

#include "kernels/mla.h"
#include "tests/support/random.h"

enum { N = KVS_MLA_LATENT };

static void fill(rnd *r, float *p)
{
    for (int i = 0; i < N; i++)
        p[i] = (float)rnd_normal(r);
}

Test(merge, weighs_two_states_by_their_sums)
{
    rnd r = rnd_open("merge", 2);

    for (int round = 0; round < 200; round++) {
        float a[N], b[N], merged[N], la = (float)(40 * rnd_real(&r)), lb = (float)(40 * rnd_real(&r)), l = la;
        double m = fmax((double)la, (double)lb), wa = exp((double)la - m), wb = exp((double)lb - m);

        fill(&r, a);
        fill(&r, b);
        memcpy(merged, a, sizeof a);
        kvs_merge_states(merged, &l, b, lb, N);
        cr_assert(fabs((double)l - (m + log(wa + wb))) < 1e-5);
        for (int i = 0; i < N; i++)
            cr_assert(fabs((double)merged[i] - ((double)a[i] * wa + (double)b[i] * wb) / (wa + wb)) < 2e-6);
    }
}

Test(merge, two_empty_states_stay_empty)
{
    float a[N], b[N], l = -INFINITY;

    for (int i = 0; i < N; i++)
        a[i] = b[i] = NAN;
    kvs_merge_states(a, &l, b, -INFINITY, N);
    cr_assert_eq(l, -INFINITY);
    for (int i = 0; i < N; i++)
        cr_assert_eq(a[i], 0.0f);
}

Test(merge, an_empty_state_changes_no_bit_of_the_other)
{
    rnd r = rnd_open("merge empty", 3);
    float full[N], nan[N], got[N], l = 1.25f;

    fill(&r, full);
    for (int i = 0; i < N; i++)
        nan[i] = NAN;
    memcpy(got, full, sizeof got);
    kvs_merge_states(got, &l, nan, -INFINITY, N);
    cr_assert_eq(l, 1.25f);
    cr_assert_eq(memcmp(got, full, sizeof got), 0);

    memcpy(got, nan, sizeof got);
    l = -INFINITY;
    kvs_merge_states(got, &l, full, 1.25f, N);
    cr_assert_eq(l, 1.25f);
    cr_assert_eq(memcmp(got, full, sizeof got), 0);
}

Test(merge, an_infinite_lse_counts_as_empty)
{
    float a[2] = {1, 2}, b[2] = {NAN, NAN}, l = 0.5f;

    kvs_merge_states(a, &l, b, INFINITY, 2);
    cr_assert_eq(l, 0.5f);
    cr_assert_eq(a[1], 2.0f);
}

Test(merge, does_not_overflow_with_huge_sums)
{
    float a[1] = {1}, b[1] = {3}, l = 3e38f;

    kvs_merge_states(a, &l, b, 3e38f, 1);
    cr_assert_eq(a[0], 2.0f);
    cr_assert_eq(l, 3e38f);
    l = 500;
    a[0] = 1;
    kvs_merge_states(a, &l, b, -500, 1);
    cr_assert_eq(a[0], 1.0f);
    cr_assert_eq(l, 500.0f);
}

Test(merge, a_nan_stays_visible)
{
    float a[1] = {1}, b[1] = {2}, l = NAN;

    kvs_merge_states(a, &l, b, 0, 1);
    cr_assert(isnan(a[0]) && isnan(l));
    a[0] = 1;
    l = 0;
    kvs_merge_states(a, &l, b, NAN, 1);
    cr_assert(isnan(a[0]) && isnan(l));
}
