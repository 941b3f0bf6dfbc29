#include "kernels/kv_write.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/view_check.h"

static uint32_t cache_value_bytes(uint32_t format)
{
    return format == KVS_FORMAT_kv_fp8 ? 1 : 2;
}

/* The type that a format keeps bit for bit; kv_fp8 takes all. */
static bool takes(uint32_t format, uint32_t type)
{
    return format == KVS_FORMAT_kv_fp8 || (format == KVS_FORMAT_kv_bf16 && type == KVS_VALUE_BF16) ||
           (format == KVS_FORMAT_kv_fp16 && type == KVS_VALUE_FP16);
}

/* Heads of a page: [tokens][heads] pieces of dim values, in either order, without overlap. */
static kvs_status page_check(const char *name, const kvs_kv_side *d, uint32_t n_heads, kvs_err *err)
{
    const uint32_t value = cache_value_bytes(d->view.format);
    const uint64_t piece = (uint64_t)d->dim * value,
                   rows = (uint64_t)(d->view.tokens_per_block - 1) * d->view.row_bytes;
    uint64_t heads = 0;

    if (d->head_stride % value != 0 || d->head_stride >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_INVALID,
                        "%s head_stride: %" PRIu64 " is not a multiple of %" PRIu32 " below %" PRIu64, name,
                        d->head_stride, value, (uint64_t)KVS_MAX_OFFSET);
    heads = (n_heads - 1) * d->head_stride;
    if ((n_heads > 1 && d->head_stride < piece) || (d->view.tokens_per_block > 1 && d->view.row_bytes < piece) ||
        (n_heads > 1 && d->view.tokens_per_block > 1 && d->head_stride < rows + piece &&
         d->view.row_bytes < heads + piece))
        return kvs_fail(err, KVS_E_INVALID,
                        "%s: heads of %" PRIu64 " bytes overlap with row_bytes %" PRIu32 " and head_stride %" PRIu64,
                        name, piece, d->view.row_bytes, d->head_stride);
    return kvs_view_check(&d->view, KVS_FORMAT_BIT(kv_bf16) | KVS_FORMAT_BIT(kv_fp16) | KVS_FORMAT_BIT(kv_fp8),
                          heads + piece, err);
}

static kvs_status side_check(const char *name, const kvs_kv_side *d, const kvs_kv_write_args *a, kvs_err *err)
{
    const uint32_t value = kvs_value_bytes(a->src_type);
    kvs_status s = kvs_range_check("dim", d->dim, 1, KVS_KV_MAX_DIM, err);

    if (s == KVS_OK)
        s = kvs_view_check(&d->view, KVS_FORMAT_BIT(kv_bf16) | KVS_FORMAT_BIT(kv_fp16) | KVS_FORMAT_BIT(kv_fp8), 0,
                           err);
    if (s == KVS_OK)
        s = page_check(name, d, a->n_heads, err);
    if (s == KVS_OK && (value == 0 || !takes(d->view.format, a->src_type)))
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "%s: src_type %" PRIu32 " does not go into %s", name, a->src_type,
                     kvs_format_name(d->view.format));
    if (s == KVS_OK)
        s = kvs_strided_check(name, &d->src, a->n_tokens, a->n_heads, (uint64_t)d->dim * value, value, false, err);
    if (s == KVS_OK && d->view.format == KVS_FORMAT_kv_fp8)
        s = kvs_rows_check("scale", (const uint8_t *)d->scale, a->head_scales ? a->n_heads : 1, sizeof *d->scale,
                           sizeof *d->scale, sizeof *d->scale, err);
    return s;
}

kvs_status kvs_kv_write_check(const kvs_kv_write_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("n_heads", a->n_heads, 1, KVS_KV_MAX_HEADS, err);

    if (s == KVS_OK)
        s = kvs_range_check("head_scales", a->head_scales, 0, 1, err);
    if (s == KVS_OK)
        s = side_check("k", &a->k, a, err);
    if (s == KVS_OK)
        s = side_check("v", &a->v, a, err);
    if (s == KVS_OK &&
        (a->k.view.n_blocks != a->v.view.n_blocks || a->k.view.tokens_per_block != a->v.view.tokens_per_block))
        s = kvs_fail(err, KVS_E_INVALID,
                     "views: k has %" PRIu32 " blocks of %" PRIu32 " tokens, v %" PRIu32 " of %" PRIu32,
                     a->k.view.n_blocks, a->k.view.tokens_per_block, a->v.view.n_blocks, a->v.view.tokens_per_block);
    if (s == KVS_OK)
        s = kvs_rows_check("slot_mapping", (const uint8_t *)a->slot_mapping, a->n_tokens, sizeof *a->slot_mapping,
                           sizeof *a->slot_mapping, sizeof *a->slot_mapping, err);
    return s;
}

static void write_side(const kvs_kv_side *d, const kvs_kv_write_args *a, uint32_t t, uint64_t slot, kvs_site site)
{
    const kvs_view_place at = kvs_view_split(&d->view, slot, site);
    uint8_t *row = kvs_view_row(&d->view, at.page, at.token, site);

    for (uint32_t h = 0; h < a->n_heads; h++) {
        const uint8_t *src = d->src.base + t * d->src.token_stride + h * d->src.head_stride;
        uint8_t *dst = row + h * d->head_stride;

        if (d->view.format != KVS_FORMAT_kv_fp8) {
            memcpy(dst, src, (size_t)d->dim * 2);
            continue;
        }
        for (uint32_t i = 0; i < d->dim; i++)
            dst[i] = kvs_e4m3_quantise(kvs_value_get(src, a->src_type, i), d->scale[a->head_scales ? h : 0]);
    }
}

kvs_status kvs_kv_write(const kvs_kv_write_args *a, uint32_t *ret_bad, kvs_err *err)
{
    const uint64_t n_slots = (uint64_t)a->k.view.n_blocks * a->k.view.tokens_per_block;
    kvs_status s = kvs_kv_write_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t t = 0; t < a->n_tokens; t++) {
        int64_t slot = a->slot_mapping[t];

        if (slot < 0)
            continue;
        if ((uint64_t)slot >= n_slots) {
            bad++;
            continue;
        }
        write_side(&a->k, a, t, (uint64_t)slot, KVS_SITE_KV_WRITE_KEY);
        write_side(&a->v, a, t, (uint64_t)slot, KVS_SITE_KV_WRITE_VALUE);
    }
    *ret_bad = bad;
    return KVS_OK;
}
