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

/* --- fp8 --- */

/* By its definition. */
static double e4m3_value(uint32_t code)
{
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);

    if ((code & 127) == 127)
        return (double)NAN;
    return (code & 128) != 0 ? -magnitude : magnitude;
}

/* Search for the nearest of all codes; of two that are as near the even one. */
static uint8_t e4m3_nearest(double value)
{
    uint32_t best = 0;

    if (isnan(value))
        return 0x7F;
    for (uint32_t code = 1; code < 127; code++) {
        const double now = fabs(fabs(value) - e4m3_value(code)), old = fabs(fabs(value) - e4m3_value(best));

        if (now < old || (now == old && code % 2 == 0))
            best = code;
    }
    if (isinf(value))
        best = 126;
    return (uint8_t)(best | (signbit(value) ? 128u : 0u));
}

Test(numeric, widens_every_e4m3_exactly_and_gives_it_back)
{
    for (uint32_t code = 0; code < 256; code++) {
        const float got = kvs_e4m3_to_f32((uint8_t)code);

        if ((code & 127) == 127) {
            cr_assert_eq(kvs_f32_bits(got), 0x7FFFFFFFu);
            continue;
        }
        cr_assert((double)got == e4m3_value(code) && !signbit(got) == ((code & 128) == 0), "%#x: %a", code,
                  (double)got);
        cr_assert_eq(kvs_f32_to_e4m3(got), code);
    }
    cr_assert_eq(kvs_f32_to_e4m3(kvs_e4m3_to_f32(0xFF)), 0x7F);
}

static void check_e4m3(uint32_t u)
{
    const float f = kvs_f32_from_bits(u);

    cr_assert_eq(kvs_f32_to_e4m3(f), e4m3_nearest((double)f), "%a: %#x", (double)f, kvs_f32_to_e4m3(f));
}

/* Every float whose low half is one of these, which has every bf16 value in it; every fp16 value; and every float beside
 * the middle of two codes. */
Test(numeric, rounds_to_the_nearest_even_e4m3)
{
    static const uint32_t low[] = {0, 1, 0x7FFF, 0x8000, 0xFFFF};

    for (uint32_t high = 0; high < 65536; high++) {
        for (int i = 0; i < (high % 16 == 0 ? 5 : 1); i++)
            check_e4m3(high << 16 | low[i]);
        check_e4m3(kvs_f32_bits(kvs_f16_to_f32((uint16_t)high)));
    }
    for (uint32_t code = 0; code < 127; code++) {
        const double next = code == 126 ? 480.0 : e4m3_value(code + 1);
        const uint32_t middle = kvs_f32_bits((float)((e4m3_value(code) + next) / 2));

        for (uint32_t u = middle - 2; u != middle + 3; u++) {
            check_e4m3(u & 0x7FFFFFFFu);
            check_e4m3(u | 0x80000000u);
        }
    }
}

Test(numeric, fp8_of_zero_infinity_and_nan)
{
    cr_assert_eq(kvs_f32_to_e4m3(0.0f), 0x00);
    cr_assert_eq(kvs_f32_to_e4m3(-0.0f), 0x80);
    cr_assert_eq(kvs_f32_to_e4m3(INFINITY), 0x7E);
    cr_assert_eq(kvs_f32_to_e4m3(-INFINITY), 0xFE);
    cr_assert_eq(kvs_f32_to_e4m3(kvs_f32_from_bits(0xFFC00000u)), 0x7F);
    cr_assert_eq(kvs_f32_to_e4m3(kvs_f32_from_bits(0x7F800001u)), 0x7F);
    cr_assert_eq(kvs_e4m3_quantise(0.0f, 0.0f), 0x7F);
    cr_assert_eq(kvs_e4m3_quantise(-3.0f, 0.0f), 0xFE);
}

/* fp64 holds enough of a quotient of two fp32 that rounding it again does no harm (53 >= 2 * 24 + 2). */
Test(numeric, quantises_by_division)
{
    const float scale = 0.07f;
    uint32_t n_different = 0;

    for (uint32_t i = 0; i < 65536; i++) {
        const float x = kvs_f16_to_f32((uint16_t)i);

        cr_assert_eq(kvs_e4m3_quantise(x, scale), e4m3_nearest((double)(float)((double)x / (double)scale)));
    }
    /* Middles of two codes, times a scale: a product with its reciprocal falls to the other side of some. */
    for (uint32_t code = 8; code < 126; code++)
        for (int odd = 1; odd < 100; odd += 2) {
            const float s = (float)odd;
            const float x = (kvs_e4m3_to_f32((uint8_t)code) + kvs_e4m3_to_f32((uint8_t)(code + 1))) / 2 * s;

            cr_assert_eq(kvs_e4m3_quantise(x, s), code + code % 2);
            n_different += kvs_f32_to_e4m3(x * (1.0f / s)) != kvs_e4m3_quantise(x, s);
        }
    cr_assert(n_different > 0);
}

Test(numeric, dequantises_with_one_product_and_one_nan)
{
    cr_assert_eq(kvs_e4m3_dequantise(0x7E, 0.5f), 224.0f);
    cr_assert_eq(kvs_f32_bits(kvs_e4m3_dequantise(0xFF, 2.0f)), 0x7FFFFFFFu);
    cr_assert_eq(kvs_f32_bits(kvs_e4m3_dequantise(0x00, INFINITY)), 0x7FFFFFFFu);
    cr_assert_eq(kvs_f32_bits(kvs_e4m3_dequantise(0x38, kvs_f32_from_bits(0xFFC00001u))), 0x7FFFFFFFu);
}

Test(numeric, amax_passes_over_nan)
{
    cr_assert_eq(kvs_amax(1.0f, -2.0f), 2.0f);
    cr_assert_eq(kvs_amax(1.0f, NAN), 1.0f);
    cr_assert_eq(kvs_amax(0.0f, -0.0f), 0.0f);
    cr_assert_eq(kvs_amax(1.0f, -INFINITY), INFINITY);
}

Test(numeric, every_ue8m0_is_its_power_of_two)
{
    for (uint32_t code = 0; code < 255; code++) {
        const float f = kvs_ue8m0_to_f32((uint8_t)code);

        cr_assert_eq((double)f, ldexp(1.0, (int)code - 127));
        cr_assert_eq((double)kvs_ue8m0_reciprocal((uint8_t)code), ldexp(1.0, 127 - (int)code));
        cr_assert_eq(kvs_f32_to_ue8m0_up(f), code);
        cr_assert_eq(kvs_f32_to_ue8m0_up(kvs_f32_from_bits(kvs_f32_bits(f) + 1)), code + 1);
    }
    cr_assert(isnan(kvs_ue8m0_to_f32(255)));
}

/* Against the definition, for every float whose low half is one of these. */
Test(numeric, ue8m0_rounds_up)
{
    static const uint32_t low[] = {0, 1, 0x8000, 0xFFFF};

    for (uint32_t high = 0; high < 0x7F80; high++)
        for (int i = 0; i < 4; i++) {
            const float s = kvs_f32_from_bits(high << 16 | low[i]);
            int e;
            const double fraction = frexp((double)s, &e); /* s = fraction * 2^e, fraction in [0.5, 1) */
            const int code = s == 0.0f ? 0 : (fraction == 0.5 ? e - 1 : e) + 127;

            cr_assert_eq(kvs_f32_to_ue8m0_up(s), code < 0 ? 0 : code > 255 ? 255 : code, "%a", (double)s);
        }
    cr_assert_eq(kvs_f32_to_ue8m0_up(INFINITY), 255);
    cr_assert_eq(kvs_f32_to_ue8m0_up(NAN), 255);
}
