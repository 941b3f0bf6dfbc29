#ifndef KVS_KERNELS_NUMERIC_H
#define KVS_KERNELS_NUMERIC_H

/* Number formats of the cache, and one exponential that is the same everywhere.
 *
 * Knows bits.  Knows no views and no kernels.  Any thread; plain values; usable from device code.
 * No libm here: its functions come in variants that differ in the last bit from machine to machine, and a
 * decode must give the same bits on every one.  Relies on subnormals not being flushed and on products not
 * being contracted into sums (-ffp-contract=off). */

#include <stdint.h>
#include <string.h>

#include "kernels/view.h"

#if defined(__FAST_MATH__)
#error "the kernels promise bits: build them without -ffast-math"
#endif

#ifdef __cplusplus
extern "C" {
#endif

static inline KVS_HD uint32_t kvs_f32_bits(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof u);
    return u;
}

static inline KVS_HD float kvs_f32_from_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof f);
    return f;
}

static inline KVS_HD float kvs_bf16_to_f32(uint16_t h)
{
    return kvs_f32_from_bits((uint32_t)h << 16);
}

/* Round to nearest, ties to even; a NaN stays a NaN with its sign and the upper bits of its payload. */
static inline KVS_HD uint16_t kvs_f32_to_bf16(float f)
{
    uint32_t u = kvs_f32_bits(f);

    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)((u >> 16) | 0x0040u);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

/* Read as if it were fp32 with the same fields, a half is 2^112 too small, subnormals included: one exact
 * product mends that.  Only infinities and NaNs need their exponent set. */
static inline KVS_HD float kvs_f16_to_f32(uint16_t h)
{
    float scaled = kvs_f32_from_bits((h & 0x7FFFu) << 13) * 0x1p112f;
    uint32_t u = kvs_f32_bits(scaled) | ((uint32_t)(h & 0x8000u) << 16);

    return kvs_f32_from_bits((h & 0x7C00u) == 0x7C00u ? u | 0x7F800000u : u);
}

/* Round to nearest, ties to even; from 65520 on infinity; NaN as in kvs_f32_to_bf16. */
static inline KVS_HD uint16_t kvs_f32_to_f16(float f)
{
    uint32_t u = kvs_f32_bits(f);
    uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;

    if (a > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u | ((a >> 13) & 0x3FFu));
    if (a >= 0x477FF000u)
        return (uint16_t)(sign | 0x7C00u);
    if (a < 0x38800000u) /* below 2^-14: beside 0.5 the adder itself rounds to the 2^-24 of a subnormal half */
        return (uint16_t)(sign | (kvs_f32_bits(kvs_f32_from_bits(a) + 0.5f) - 0x3F000000u));
    a += 0xFFFu + ((a >> 13) & 1u);
    return (uint16_t)(sign | ((a - 0x38000000u) >> 13));
}

/* e^x for x <= 0 (and NaN), within 2 units of the last place; below -87 it is 0, so no subnormal comes out.
 * x = n ln 2 + r with |r| <= ln(2)/2, a polynomial for e^r, 2^n by its exponent.  Free of branches and calls:
 * a loop over it becomes vector code. */
static inline KVS_HD float kvs_exp_nonpos(float x)
{
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the integer */
    float xc = x < -87.0f ? -87.0f : x;
    float shifted = xc * 1.44269504f + round_to_int;
    float n = shifted - round_to_int;
    float r = (xc - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.0f / 5040.0f;

    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    p = p * kvs_f32_from_bits((kvs_f32_bits(shifted) - 0x4B400000u + 127u) << 23);
    return x < -87.0f ? 0.0f : p;
}

#ifdef __cplusplus
}
#endif
#endif
