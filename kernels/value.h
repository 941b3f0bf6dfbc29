#ifndef KVS_KERNELS_VALUE_H
#define KVS_KERNELS_VALUE_H

/* Types of the plain values beside the cache: rows to be written, rows that were gathered.
 *
 * Knows bits.  Knows no views.  Any thread; plain values; usable from device code. */

#include <string.h>

#include "kernels/numeric.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kvs_value { KVS_VALUE_BF16 = 1, KVS_VALUE_FP16 = 2, KVS_VALUE_FP32 = 3 };

/* Bytes of one value; 0 for a number that is no type. */
static inline KVS_HD uint32_t kvs_value_bytes(uint32_t type)
{
    return type == KVS_VALUE_BF16 || type == KVS_VALUE_FP16 ? 2 : type == KVS_VALUE_FP32 ? 4 : 0;
}

/* Value `i` of a row as fp32: exact. */
static inline KVS_HD float kvs_value_get(const uint8_t *row, uint32_t type, uint64_t i)
{
    uint16_t half;
    float f;

    if (type == KVS_VALUE_FP32) {
        memcpy(&f, row + i * sizeof f, sizeof f);
        return f;
    }
    memcpy(&half, row + i * sizeof half, sizeof half);
    return type == KVS_VALUE_BF16 ? kvs_bf16_to_f32(half) : kvs_f16_to_f32(half);
}

/* The other way: one rounding, to nearest, ties to even. */
static inline KVS_HD void kvs_value_put(uint8_t *row, uint32_t type, uint64_t i, float f)
{
    uint16_t half;

    if (type == KVS_VALUE_FP32) {
        memcpy(row + i * sizeof f, &f, sizeof f);
        return;
    }
    half = type == KVS_VALUE_BF16 ? kvs_f32_to_bf16(f) : kvs_f32_to_f16(f);
    memcpy(row + i * sizeof half, &half, sizeof half);
}

#ifdef __cplusplus
}
#endif
#endif
