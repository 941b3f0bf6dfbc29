#include "kernels/mla_record.h"

#include <string.h>

#include "kernels/numeric.h"
#include "proto/layout.h"

uint32_t mla_record_dims(uint32_t format)
{
    return format == KVS_FORMAT_fp8_blk584 || format == KVS_FORMAT_fp8_blk528 ? 512 : 576;
}

static void widen(float *dst, const uint8_t *src, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n; i++)
        dst[i] = kvs_e4m3_dequantise(src[i], scale);
}

static void copy_bf16(float *dst, const uint8_t *src, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;

        memcpy(&h, src + 2 * (uint64_t)i, sizeof h);
        dst[i] = kvs_bf16_to_f32(h);
    }
}

/* 512 e4m3 with 4 fp32 scales, 64 bf16. */
static void load_ds_mla(const uint8_t *row, float *dst)
{
    for (uint32_t k = 0; k < 4; k++) {
        float scale;

        memcpy(&scale, row + 512 + 4 * (uint64_t)k, sizeof scale);
        widen(dst + (uint64_t)k * 128, row + (uint64_t)k * 128, 128, scale);
    }
    copy_bf16(dst + 512, row + 528, 64);
}

/* 448 e4m3 in 7 tiles, 64 bf16. */
static void load_blk584(const uint8_t *row, const uint8_t *tail, float *dst)
{
    for (uint32_t k = 0; k < 7; k++)
        widen(dst + (uint64_t)k * 64, row + (uint64_t)k * 64, 64, kvs_ue8m0_to_f32(tail[k]));
    copy_bf16(dst + 448, row + 448, 64);
}

/* 512 e4m3 in 16 tiles. */
static void load_blk528(const uint8_t *row, const uint8_t *tail, float *dst)
{
    for (uint32_t k = 0; k < 16; k++)
        widen(dst + (uint64_t)k * 32, row + (uint64_t)k * 32, 32, kvs_ue8m0_to_f32(tail[k]));
}

void mla_record_load(uint32_t format, const uint8_t *row, const uint8_t *tail, float dst[MLA_RECORD_VALUES])
{
    if (format == KVS_FORMAT_fp8_ds_mla) {
        load_ds_mla(row, dst);
        return;
    }
    if (format == KVS_FORMAT_mla_fp8) {
        widen(dst, row, 576, 1.0f);
        return;
    }
    if (format == KVS_FORMAT_fp8_blk584)
        load_blk584(row, tail, dst);
    else
        load_blk528(row, tail, dst);
    memset(dst + 512, 0, 64 * sizeof *dst);
}
