#include "tests/support/mla_token.h"

#include <string.h>

#include "kernels/mla.h"
#include "kernels/numeric.h"
#include "proto/layout.h"

enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE };

uint32_t mla_token_row_bytes(uint32_t format)
{
    return format == KVS_FORMAT_fp8_blk584 ? 576 : format == KVS_FORMAT_fp8_blk528 ? 512 : kvs_format_row_bytes(format);
}

uint32_t mla_token_tail_bytes(uint32_t format)
{
    return format == KVS_FORMAT_fp8_blk584 ? 8 : format == KVS_FORMAT_fp8_blk528 ? 16 : 0;
}

/* Value k of a random word: 8 bits of it, unit variance. */
static double value_of(uint64_t x, uint32_t k)
{
    return ((double)((x >> (16 * k)) & 0xFF) - 127.5) / 73.9;
}

void mla_token_put_values(rnd *r, uint32_t format, uint8_t *row, uint32_t n, double scale)
{
    for (uint32_t i = 0; i < n; i += 4) {
        uint64_t x = rnd_u64(r);

        for (uint32_t k = 0; k < 4; k++) {
            float f = (float)(value_of(x, k) * scale);
            uint16_t bits = format == KVS_FORMAT_mla_bf16 ? kvs_f32_to_bf16(f) : kvs_f32_to_f16(f);

            memcpy(row + (uint64_t)(i + k) * 2, &bits, sizeof bits);
        }
    }
}

static void put_bytes(rnd *r, uint8_t *row, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n; i += 4) {
        uint64_t x = rnd_u64(r);

        for (uint32_t k = 0; k < 4; k++)
            row[i + k] = kvs_f32_to_e4m3((float)value_of(x, k) / scale);
    }
}

static void put_ds_mla(rnd *r, uint8_t *row)
{
    for (uint32_t k = 0; k < 4; k++) {
        float scale = 0.004f + 0.01f * (float)rnd_below(r, 1000) / 1000.0f;

        put_bytes(r, row + (uint64_t)k * 128, 128, scale);
        memcpy(row + 512 + 4 * (uint64_t)k, &scale, sizeof scale);
    }
    mla_token_put_values(r, KVS_FORMAT_mla_bf16, row + 528, ROPE, 1);
}

/* n tiles of `tile` values, a power of two each. */
static void put_tiles(rnd *r, uint8_t *row, uint8_t *tail, uint32_t n, uint32_t tile)
{
    for (uint32_t k = 0; k < n; k++) {
        tail[k] = (uint8_t)(119 + rnd_below(r, 3));
        put_bytes(r, row + (uint64_t)k * tile, tile, kvs_ue8m0_to_f32(tail[k]));
    }
}

void mla_token_put(rnd *r, uint32_t format, uint8_t *row, uint8_t *tail)
{
    switch (format) {
    case KVS_FORMAT_mla_fp8:
        put_bytes(r, row, LATENT + ROPE, MLA_TOKEN_KV_SCALE);
        break;
    case KVS_FORMAT_fp8_ds_mla:
        put_ds_mla(r, row);
        break;
    case KVS_FORMAT_fp8_blk584:
        put_tiles(r, row, tail, 7, 64);
        mla_token_put_values(r, KVS_FORMAT_mla_bf16, row + 448, ROPE, 1);
        tail[7] = 0xFF;
        break;
    case KVS_FORMAT_fp8_blk528:
        put_tiles(r, row, tail, 16, 32);
        break;
    default:
        mla_token_put_values(r, format, row, LATENT + ROPE, 1);
    }
}
