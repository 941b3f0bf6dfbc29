#include "tests/kernels/kt_oracle.h"

#include <math.h>
#include <string.h>

#include "kernels/mla_oracle.h"
#include "kernels/value.h"
#include "proto/layout.h"

double kt_value(const uint8_t *row, uint32_t type, uint64_t i)
{
    uint16_t half;
    float f;

    if (type == KVS_VALUE_FP32) {
        memcpy(&f, row + i * sizeof f, sizeof f);
        return (double)f;
    }
    memcpy(&half, row + i * sizeof half, sizeof half);
    return oracle_value(type == KVS_VALUE_FP16 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16, half);
}

double kt_e4m3_value(uint8_t code)
{
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);

    if ((code & 127) == 127)
        return (double)NAN;
    return (code & 128) != 0 ? -magnitude : magnitude;
}

uint8_t kt_e4m3(double x)
{
    static double value[127];
    const double a = fabs(x);
    uint8_t low = 0, high = 126;

    if (isnan(x))
        return 0x7F;
    if (value[126] == 0)
        for (int i = 0; i < 127; i++)
            value[i] = kt_e4m3_value((uint8_t)i);
    if (a >= value[126])
        low = 126;
    else {
        while (high - low > 1) {
            const uint8_t middle = (uint8_t)((low + high) / 2);

            if (value[middle] <= a)
                low = middle;
            else
                high = middle;
        }
        if (a - value[low] > value[high] - a || (a - value[low] == value[high] - a && low % 2 == 1))
            low = high;
    }
    return (uint8_t)(low | (signbit(x) ? 0x80 : 0));
}

uint8_t kt_quantised(double x, float scale)
{
    return kt_e4m3((double)(float)(x / (double)scale)); /* 53 bits: rounded twice is rounded once */
}

/* Bits of an ordinary number: exponents around that of 1. */
static uint32_t ordinary(uint32_t type, uint32_t x)
{
    const uint32_t near = x >> 24 & 15;

    switch (type) {
    case KVS_VALUE_BF16:
        return (x & 0x807F) | (116 + near) << 7;
    case KVS_VALUE_FP16:
        return (x & 0x83FF) | (5 + near) << 10;
    default:
        return (x & 0x807FFFFF) | (116 + near) << 23;
    }
}

void kt_fill_values(kt *k, uint8_t *row, uint32_t type, uint32_t n)
{
    const uint64_t kind = rnd_below(&k->r, 20), size = kvs_value_bytes(type), tiny = rnd_below(&k->r, n);

    for (uint32_t i = 0; i < n; i++) {
        const uint64_t x = rnd_u64(&k->r);
        uint32_t bits = ordinary(type, (uint32_t)(x >> 32));

        if (kind == 0 || (kind == 1 && i != tiny))
            bits = (uint32_t)(x & 1) << (8 * size - 1);
        else if (kind == 1)
            bits = type == KVS_VALUE_FP16 ? 1 : type == KVS_VALUE_BF16 ? 0x0DA2 : 0x0DA24260; /* 1e-30; fp16: 2^-24 */
        else if (kind == 2)
            bits = (uint32_t)x;
        memcpy(row + i * size, &bits, size); /* little-endian: the low bytes */
    }
}
