#include <criterion/criterion.h>

#include <math.h>

#include "kernels/numeric.h"
#include "proto/layout.h"
#include "kernels/mla_oracle.h"
#include "tests/support/random.h"

Test(numeric, widens_every_half_exactly)
{
    for (uint32_t i = 0; i < 65536; i++) {
        double bf = oracle_value(KVS_FORMAT_mla_bf16, (uint16_t)i), fp = oracle_value(KVS_FORMAT_mla_fp16, (uint16_t)i);
        float got_bf = kvs_bf16_to_f32((uint16_t)i), got_fp = kvs_f16_to_f32((uint16_t)i);

        cr_assert(isnan(bf) ? isnan(got_bf) : (double)got_bf == bf && !signbit(got_bf) == !signbit(bf), "bf16 %#x", i);
        cr_assert(isnan(fp) ? isnan(got_fp) : (double)got_fp == fp && !signbit(got_fp) == !signbit(fp), "fp16 %#x", i);
    }
}

Test(numeric, gives_every_half_back)
{
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t bf = kvs_f32_to_bf16(kvs_bf16_to_f32((uint16_t)i)), fp = kvs_f32_to_f16(kvs_f16_to_f32((uint16_t)i));

        /* A signalling NaN comes back quiet; all else as it was. */
        cr_assert_eq(bf, isnan(kvs_bf16_to_f32((uint16_t)i)) ? (i | 0x0040) : i);
        cr_assert_eq(fp, isnan(kvs_f16_to_f32((uint16_t)i)) ? (i | 0x0200) : i);
    }
}

static void check_rounding(float f)
{
    if (isnan(f)) {
        cr_assert(isnan(kvs_bf16_to_f32(kvs_f32_to_bf16(f))) && isnan(kvs_f16_to_f32(kvs_f32_to_f16(f))));
        return;
    }
    cr_assert_eq(kvs_f32_to_bf16(f), oracle_bits(KVS_FORMAT_mla_bf16, (double)f), "bf16 of %a", (double)f);
    cr_assert_eq(kvs_f32_to_f16(f), oracle_bits(KVS_FORMAT_mla_fp16, (double)f), "fp16 of %a", (double)f);
}

Test(numeric, rounds_random_numbers_to_nearest_even)
{
    rnd r = rnd_open("rounding", 1);

    for (int i = 0; i < 100000; i++) {
        check_rounding(kvs_f32_from_bits((uint32_t)rnd_u64(&r)));
        /* Exponents of the fp16 range, where most random patterns are not. */
        check_rounding(
            kvs_f32_from_bits((uint32_t)(rnd_u64(&r) & 0x807FFFFF) | (uint32_t)(100 + rnd_below(&r, 45)) << 23));
    }
}

Test(numeric, rounds_ties_and_edges_to_nearest_even)
{
    const float edges[] = {0.0f,         65504.0f,        65519.996f,  65520.0f,    0x1p-24f,
                           0x1p-25f,     0x1.000002p-25f, 0x1.8p-24f,  0x1p-14f,    0x1.ffcp-15f,
                           0x1.ffep-15f, 0x1.ffffffp-15f, 0x1.01p0f,   0x1.03p0f,   0x1.002p0f,
                           0x1.006p0f,   0x1.fffffep127f, 0x1.ffp127f, 0x1.fep127f, INFINITY,
                           0x1p-149f,    0x1p-133f,       0x1p-134f,   0x1.8p-133f};

    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        check_rounding(edges[i]);
        check_rounding(-edges[i]);
    }
}

Test(numeric, keeps_the_sign_and_payload_of_a_nan)
{
    cr_assert_eq(kvs_f32_to_bf16(kvs_f32_from_bits(0xFFC10000u)), 0xFFC1);
    cr_assert_eq(kvs_f32_to_bf16(kvs_f32_from_bits(0x7F800001u)), 0x7FC0);
    cr_assert_eq(kvs_f32_to_f16(kvs_f32_from_bits(0xFFC02000u)), 0xFE01);
    cr_assert_eq(kvs_f32_to_f16(kvs_f32_from_bits(0x7F800001u)), 0x7E00);
}

Test(numeric, exponential_is_within_two_units_of_the_last_place)
{
    double worst = 0;

    for (uint32_t u = kvs_f32_bits(-1e-10f); u < kvs_f32_bits(-87.0f); u += 997) {
        float x = kvs_f32_from_bits(u), got = kvs_exp_nonpos(x);
        double want = exp((double)x), unit = (double)(nextafterf((float)want, INFINITY) - (float)want);

        worst = fmax(worst, fabs((double)got - want) / unit);
    }
    cr_assert(worst <= 2.0, "%f units", worst);
}

Test(numeric, exponential_of_edges)
{
    cr_assert_eq(kvs_exp_nonpos(0.0f), 1.0f);
    cr_assert_eq(kvs_exp_nonpos(-0.0f), 1.0f);
    cr_assert_eq(kvs_exp_nonpos(-INFINITY), 0.0f);
    cr_assert_eq(kvs_exp_nonpos(-1000.0f), 0.0f);
    cr_assert(kvs_exp_nonpos(-87.0f) > 0.0f);
    cr_assert(isnan(kvs_exp_nonpos(NAN)));
}
