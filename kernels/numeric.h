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

/* The only NaN that comes out of a product or a quotient here: what a GPU makes of any NaN, and a processor not. */
static inline KVS_HD float kvs_f32_one_nan(float f)
{
    return (kvs_f32_bits(f) & 0x7FFFFFFFu) > 0x7F800000u ? kvs_f32_from_bits(0x7FFFFFFFu) : f;
}

/* e4m3: sign, 4 bits of exponent (bias 7), 3 of fraction; no infinities; 0x7F and 0xFF are NaN, 448 is the greatest.
 * As in kvs_f16_to_f32, one exact product mends the exponent.  A NaN comes out as 0x7FFFFFFF. */
static inline KVS_HD float kvs_e4m3_to_f32(uint8_t h)
{
    float scaled = kvs_f32_from_bits((uint32_t)(h & 0x7Fu) << 20) * 0x1p120f;
    uint32_t u = kvs_f32_bits(scaled) | (uint32_t)(h & 0x80u) << 24;

    return kvs_f32_from_bits((h & 0x7Fu) == 0x7Fu ? 0x7FFFFFFFu : u);
}

/* Round to nearest, ties to even; what is greater than 448, infinities too, is +-448; a NaN of either sign is 0x7F. */
static inline KVS_HD uint8_t kvs_f32_to_e4m3(float f)
{
    uint32_t u = kvs_f32_bits(f);
    uint32_t sign = (u >> 24) & 0x80u, a = u & 0x7FFFFFFFu;

    if (a > 0x7F800000u)
        return 0x7Fu;
    if (a >= 0x43E00000u)
        return (uint8_t)(sign | 0x7Eu);
    if (a < 0x3C800000u) /* below 2^-6: beside 2^14 the adder itself rounds to the 2^-9 of a subnormal e4m3 */
        return (uint8_t)(sign | (kvs_f32_bits(kvs_f32_from_bits(a) + 16384.0f) - 0x46800000u));
    a += 0x7FFFFu + ((a >> 20) & 1u);
    return (uint8_t)(sign | ((a - 0x3C000000u) >> 20));
}

/* The one way to quantise and back: divide (never by a reciprocal), then round; widen, then multiply. */
static inline KVS_HD uint8_t kvs_e4m3_quantise(float x, float scale)
{
    return kvs_f32_to_e4m3(x / scale);
}

static inline KVS_HD float kvs_e4m3_dequantise(uint8_t h, float scale)
{
    return kvs_f32_one_nan(kvs_e4m3_to_f32(h) * scale);
}

/* The greater of `amax` and |x|; a NaN x is passed over. */
static inline KVS_HD float kvs_amax(float amax, float x)
{
    float a = kvs_f32_from_bits(kvs_f32_bits(x) & 0x7FFFFFFFu);

    return a > amax ? a : amax;
}

/* Scale of a tile of an fp8_ds_mla record: as it is, not a power of two, and never a subnormal or 0. */
static inline KVS_HD float kvs_fp8_record_scale(float amax)
{
    const float scale = amax / 448.0f;

    return scale > 0x1p-126f ? scale : 0x1p-126f;
}

/* ue8m0: a power of two by its exponent alone, 2^(code - 127); 255 is NaN.  Code 0 is the subnormal 2^-127. */
static inline KVS_HD float kvs_ue8m0_to_f32(uint8_t code)
{
    if (code == 255u)
        return kvs_f32_from_bits(0x7FFFFFFFu);
    return kvs_f32_from_bits(code == 0u ? 0x00400000u : (uint32_t)code << 23);
}

/* 1 / kvs_ue8m0_to_f32(code), exact, for codes 0..254. */
static inline KVS_HD float kvs_ue8m0_reciprocal(uint8_t code)
{
    return kvs_f32_from_bits(code >= 254u ? 0x00400000u : (uint32_t)(254u - code) << 23);
}

/* Code of the least power of two that is not below s: clamp(ceil(log2 s) + 127, 0, 255) by s's own exponent, for s >=
 * 0. Infinity and NaN give 255. */
static inline KVS_HD uint8_t kvs_f32_to_ue8m0_up(float s)
{
    uint32_t a = kvs_f32_bits(s) & 0x7FFFFFFFu, fraction = a & 0x7FFFFFu;

    if (a >= 0x7F800000u)
        return 255u;
    if (a < 0x00800000u)
        return fraction > 0x400000u;
    return (uint8_t)((a >> 23) + (fraction != 0u));
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
