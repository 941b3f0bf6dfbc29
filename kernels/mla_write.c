#include <inttypes.h>
#include <string.h>

#include "kernels/mla_check.h"
#include "kernels/stop.h"

enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, TILE = 128, TILES = LATENT / TILE };

static void quantise(uint8_t *dst, const uint8_t *src, uint32_t type, uint32_t first, uint32_t n, float scale)
{
    for (uint32_t i = 0; i < n; i++)
        dst[i] = kvs_e4m3_quantise(kvs_value_get(src, type, first + i), scale);
}

/* 512 e4m3, 4 scales, 64 bf16. */
static void put_record(uint8_t *row, const uint8_t *kv_c, const uint8_t *k_pe)
{
    float scale[TILES];

    for (uint32_t k = 0; k < TILES; k++) {
        float amax = 0;

        for (uint32_t i = 0; i < TILE; i++)
            amax = kvs_amax(amax, kvs_value_get(kv_c, KVS_VALUE_BF16, k * TILE + i));
        scale[k] = kvs_fp8_record_scale(amax);
        quantise(row + (size_t)k * TILE, kv_c, KVS_VALUE_BF16, k * TILE, TILE, scale[k]);
    }
    memcpy(row + LATENT, scale, sizeof scale);
    memcpy(row + LATENT + sizeof scale, k_pe, ROPE * sizeof(uint16_t));
}

/* Lengths that the compiler knows. */
static void put_copy(uint8_t *row, const uint8_t *kv_c, const uint8_t *k_pe, uint32_t type)
{
    if (type == KVS_VALUE_FP32) {
        memcpy(row, kv_c, LATENT * sizeof(float));
        memcpy(row + LATENT * sizeof(float), k_pe, ROPE * sizeof(float));
    } else {
        memcpy(row, kv_c, LATENT * sizeof(uint16_t));
        memcpy(row + LATENT * sizeof(uint16_t), k_pe, ROPE * sizeof(uint16_t));
    }
}

static void put_row(uint8_t *row, const kvs_mla_write_args *a, uint32_t type, uint64_t t)
{
    const uint8_t *kv_c = a->kv_c + t * a->kv_c_stride, *k_pe = a->k_pe + t * a->k_pe_stride;

    if (a->view.format == KVS_FORMAT_fp8_ds_mla)
        put_record(row, kv_c, k_pe);
    else if (a->view.format == KVS_FORMAT_mla_fp8) {
        quantise(row, kv_c, type, 0, LATENT, *a->scale);
        quantise(row + LATENT, k_pe, type, 0, ROPE, *a->scale);
    } else
        put_copy(row, kv_c, k_pe, type);
}

/* Returns how many tokens it came to, all if it was not stopped.  *ret_bad: bad slots among them. */
static uint32_t write_rows(const kvs_mla_write_args *a, uint32_t type, kvs_site site, uint32_t *ret_bad)
{
    const uint64_t n_slots = (uint64_t)a->view.n_blocks * a->view.tokens_per_block;
    uint32_t bad = 0, t;

    for (t = 0; t < a->n_tokens && !kvs_is_stopped(a->stop); t++) {
        const int64_t slot = a->slot_mapping[t];
        kvs_view_place at;

        if (slot < 0)
            continue;
        if ((uint64_t)slot >= n_slots) {
            bad++;
            continue;
        }
        at = kvs_view_split(&a->view, (uint64_t)slot, site);
        put_row(kvs_view_row(&a->view, at.page, at.token, site), a, type, t);
    }
    *ret_bad = bad;
    return t;
}

kvs_status kvs_mla_write(const kvs_mla_write_args *a, uint32_t *ret_bad, kvs_err *err)
{
    uint32_t type = 0, bad, n;
    kvs_status s = kvs_mla_write_check(a, &type, err);

    if (s != KVS_OK)
        return s;
    n = write_rows(a, type, KVS_SITE_MLA_WRITE, &bad);
    if (n < a->n_tokens)
        return kvs_fail(err, KVS_E_CANCELLED, "stopped at token %" PRIu32 " of %" PRIu32, n, a->n_tokens);
    *ret_bad = bad;
    return KVS_OK;
}

kvs_status kvs_mla_write_layers(const kvs_mla_write_layers_args *a, uint32_t *ret_bad, kvs_err *err)
{
    uint32_t type = 0, bad = 0;
    kvs_status s = kvs_mla_write_layers_check(a, &type, err);

    if (s != KVS_OK)
        return s;
    for (uint32_t layer = 0; layer < a->n_layers; layer++) {
        const kvs_mla_write_args one = kvs_mla_write_layer(a, layer);
        uint32_t here;

        (void)write_rows(&one, type, KVS_SITE_MLA_WRITE_LAYERS, &here);
        bad += here;
    }
    *ret_bad = bad;
    return KVS_OK;
}
