#include "kernels/blockwise.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/view_check.h"

kvs_status kvs_blockwise_view_check(const kvs_view *v, kvs_err *err)
{
    const uint32_t align = kvs_format_page_align(v->format);
    kvs_status s = kvs_view_check(v, KVS_FORMAT_BIT(fp8_blk584) | KVS_FORMAT_BIT(fp8_blk528), 0, err);

    if (s == KVS_OK && v->page_bytes % align != 0)
        s = kvs_fail(err, KVS_E_INVALID,
                     "view page_bytes: %" PRIu64 " is not a multiple of %" PRIu32 ", as pages of %s are", v->page_bytes,
                     align, kvs_format_name(v->format));
    return s;
}

kvs_status kvs_blockwise_write_check(const kvs_blockwise_write_args *a, kvs_err *err)
{
    const uint32_t bytes = kvs_value_bytes(a->x_type);
    kvs_status s = kvs_blockwise_view_check(&a->view, err);

    if (s == KVS_OK && a->x_type != KVS_VALUE_BF16 && a->x_type != KVS_VALUE_FP32)
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "x_type: %" PRIu32 " is neither bf16 (%d) nor fp32 (%d)", a->x_type,
                     (int)KVS_VALUE_BF16, (int)KVS_VALUE_FP32);
    if (s == KVS_OK)
        s = kvs_rows_check("x", a->x, a->n_tokens, a->x_stride, (uint64_t)KVS_BLOCKWISE_VALUES * bytes, bytes, err);
    if (s == KVS_OK)
        s = kvs_rows_check("slot_mapping", (const uint8_t *)a->slot_mapping, a->n_tokens, sizeof *a->slot_mapping,
                           sizeof *a->slot_mapping, sizeof *a->slot_mapping, err);
    return s;
}

/* Value `i` as the cache sees it: rounded to bf16, whatever it came in. */
static uint16_t rounded(const kvs_blockwise_write_args *a, const uint8_t *x, uint32_t i)
{
    uint16_t half;

    if (a->x_type == KVS_VALUE_FP32)
        return kvs_f32_to_bf16(kvs_value_get(x, KVS_VALUE_FP32, i));
    memcpy(&half, x + (size_t)i * sizeof half, sizeof half);
    return half;
}

static void write_token(const kvs_blockwise_write_args *a, uint32_t t, kvs_view_place at)
{
    const kvs_blockwise_shape shape = kvs_blockwise_shape_of(a->view.format);
    const uint8_t *x = a->x + t * a->x_stride;
    uint8_t *row = kvs_view_row(&a->view, at.page, at.token, KVS_SITE_BLOCKWISE_WRITE_DATA);
    uint8_t tail[KVS_BLOCKWISE_MAX_TAIL] = {0};

    for (uint32_t first = 0; first < shape.quantised; first += shape.tile) {
        float amax = 0, factor;

        for (uint32_t i = first; i < first + shape.tile; i++)
            amax = kvs_amax(amax, kvs_bf16_to_f32(rounded(a, x, i)));
        tail[first / shape.tile] = kvs_blockwise_code(amax);
        factor = kvs_ue8m0_reciprocal(tail[first / shape.tile]);
        for (uint32_t i = first; i < first + shape.tile; i++)
            row[i] = kvs_f32_to_e4m3(kvs_bf16_to_f32(rounded(a, x, i)) * factor);
    }
    for (uint32_t i = shape.quantised; i < KVS_BLOCKWISE_VALUES; i++) {
        uint16_t half = rounded(a, x, i);

        memcpy(row + shape.quantised + (size_t)(i - shape.quantised) * sizeof half, &half, sizeof half);
    }
    memcpy(kvs_view_tail(&a->view, at.page, at.token, shape.tail, KVS_SITE_BLOCKWISE_WRITE_SCALE), tail, shape.tail);
}

kvs_status kvs_blockwise_write(const kvs_blockwise_write_args *a, uint32_t *ret_bad, kvs_err *err)
{
    const uint64_t n_slots = (uint64_t)a->view.n_blocks * a->view.tokens_per_block;
    kvs_status s = kvs_blockwise_write_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t t = 0; t < a->n_tokens; t++) {
        int64_t slot = a->slot_mapping[t];

        if (slot >= 0 && (uint64_t)slot >= n_slots)
            bad++;
        else if (slot >= 0)
            write_token(a, t, kvs_view_split(&a->view, (uint64_t)slot, KVS_SITE_BLOCKWISE_WRITE_DATA));
    }
    *ret_bad = bad;
    return KVS_OK;
}
