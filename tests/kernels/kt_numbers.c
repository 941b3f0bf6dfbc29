#include "tests/kernels/kt_numbers.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/value.h"

static float from_bits(uint32_t u)
{
    float f;

    memcpy(&f, &u, sizeof f);
    return f;
}

/* sign, `e` bits of exponent, `m` of fraction, the usual bias, subnormals; infinities and NaN are the caller's. */
static double small_float(uint32_t h, int e, int m)
{
    const uint32_t exponent = h >> m & ((1u << e) - 1), fraction = h & ((1u << m) - 1);
    const int bias = (1 << (e - 1)) - 1;
    const double value =
        exponent == 0 ? ldexp(fraction, 1 - bias - m) : ldexp(1.0 + ldexp(fraction, -m), (int)exponent - bias);

    return h >> (e + m) & 1 ? -value : value;
}

double kt_e4m3_value(uint8_t h)
{
    return (h & 0x7F) == 0x7F ? NAN : small_float(h, 4, 3);
}

double kt_bf16_value(uint16_t h)
{
    if ((h & 0x7F80) == 0x7F80)
        return h & 0x7F ? NAN : h & 0x8000 ? -INFINITY : INFINITY;
    return small_float(h, 8, 7);
}

double kt_fp16_value(uint16_t h)
{
    if ((h & 0x7C00) == 0x7C00)
        return h & 0x3FF ? NAN : h & 0x8000 ? -INFINITY : INFINITY;
    return small_float(h, 5, 10);
}

double kt_ue8m0_value(uint8_t code)
{
    return code == 255 ? NAN : ldexp(1.0, (int)code - 127);
}

/* Values of the codes 0..last of a format, and the one behind them, where infinity or saturation begins. */
typedef struct scale_of {
    double *value;
    uint32_t last;
} scale_of;

static scale_of scale_make(uint32_t last, double (*value)(uint16_t), double next)
{
    scale_of s = {malloc((last + 2) * sizeof *s.value), last};

    if (s.value == NULL)
        abort();
    for (uint32_t i = 0; i <= last; i++)
        s.value[i] = value((uint16_t)i);
    s.value[last + 1] = next;
    return s;
}

/* The greatest code whose value is not above x, or the next one if that is nearer, or as near and even. */
static uint32_t nearest(double x, const scale_of *s)
{
    uint32_t low = 0, high = s->last;
    double below, above;

    while (low < high) {
        const uint32_t mid = (low + high + 1) / 2;

        if (s->value[mid] <= x)
            low = mid;
        else
            high = mid - 1;
    }
    below = s->value[low];
    above = s->value[low + 1];
    return low + (x - below > above - x || (x - below == above - x && low % 2 == 1));
}

static double e4m3_positive(uint16_t h)
{
    return small_float(h, 4, 3);
}

uint8_t kt_e4m3_of(float f)
{
    static scale_of s;

    if (s.value == NULL)
        s = scale_make(0x7E, e4m3_positive, 480.0);
    if (isnan(f))
        return 0x7F;
    return (uint8_t)((signbit(f) ? 0x80 : 0) | (fabs(f) >= 448.0 ? 0x7E : nearest(fabs(f), &s)));
}

uint16_t kt_bf16_of(float f)
{
    static scale_of s;

    if (s.value == NULL)
        s = scale_make(0x7F7F, kt_bf16_value, ldexp(1, 128));
    if (isnan(f))
        return 0x7FFF;
    return (uint16_t)((signbit(f) ? 0x8000 : 0) | (isinf(f) ? 0x7F80 : nearest(fabs(f), &s)));
}

uint16_t kt_fp16_of(float f)
{
    static scale_of s;

    if (s.value == NULL)
        s = scale_make(0x7BFF, kt_fp16_value, 65536.0);
    if (isnan(f))
        return 0x7FFF;
    return (uint16_t)((signbit(f) ? 0x8000 : 0) | (fabs(f) >= 65536.0 ? 0x7C00 : nearest(fabs(f), &s)));
}

uint8_t kt_quantised(double x, float scale)
{
    return kt_e4m3_of((float)x / scale);
}

float kt_dequantised(uint8_t h, float scale)
{
    const float f = (float)kt_e4m3_value(h) * scale;

    return isnan(f) ? from_bits(0x7FFFFFFF) : f;
}

double kt_value(const uint8_t *row, uint32_t type, uint64_t i)
{
    uint16_t half;
    float f;

    if (type == KVS_VALUE_FP32) {
        memcpy(&f, row + i * sizeof f, sizeof f);
        return f;
    }
    memcpy(&half, row + i * sizeof half, sizeof half);
    return type == KVS_VALUE_BF16 ? kt_bf16_value(half) : kt_fp16_value(half);
}

void kt_value_set(uint8_t *row, uint32_t type, uint64_t i, float f)
{
    const uint16_t half = type == KVS_VALUE_BF16 ? kt_bf16_of(f) : kt_fp16_of(f);

    if (type == KVS_VALUE_FP32)
        memcpy(row + i * sizeof f, &f, sizeof f);
    else
        memcpy(row + i * sizeof half, &half, sizeof half);
}

void kt_values_fill(kt *k, uint8_t *row, uint32_t type, uint32_t n)
{
    const uint32_t kind = (uint32_t)rnd_below(&k->r, 8);
    const double size = ldexp(1.0, (int)rnd_below(&k->r, 24) - 12);

    if (kind == 0) {
        rnd_bytes(&k->r, row, (size_t)n * kvs_value_bytes(type));
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        double x = rnd_normal(&k->r) * size;

        if (kind == 1)
            x = rnd_below(&k->r, 2) ? 0.0 : -0.0;
        else if (kind ==
                 2) /* with a maximum of 448 or 224 times a power of two these fall between two e4m3, or on one */
            x = (kt_e4m3_value((uint8_t)rnd_below(&k->r, 0x7E)) + kt_e4m3_value((uint8_t)rnd_below(&k->r, 0x7E))) / 2 *
                size;
        else if (kind == 3 && rnd_below(&k->r, 40) == 0)
            x = rnd_below(&k->r, 2) ? NAN : rnd_below(&k->r, 2) ? INFINITY : -INFINITY;
        kt_value_set(row, type, i, (float)x);
    }
    if (kind == 2)
        kt_value_set(row, type, rnd_below(&k->r, n), (float)((rnd_below(&k->r, 2) ? 448 : 224) * size));
}

void kt_values_near(kt *k, uint8_t *row, uint32_t type, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t h = (uint8_t)rnd_below(&k->r, 0x7E);
        float x = (float)((kt_e4m3_value(h) + kt_e4m3_value((uint8_t)(h + 1))) / 2 * scale);
        uint32_t bits;

        memcpy(&bits, &x, sizeof bits);
        bits += (uint32_t)rnd_below(&k->r, 5) - 2;
        memcpy(&x, &bits, sizeof x);
        kt_value_set(row, type, i, rnd_below(&k->r, 2) ? x : -x);
    }
}
