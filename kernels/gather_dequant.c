#include "kernels/gather_dequant.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/view_check.h"

/* Type of a format's plain values; 0: e4m3. */
static uint32_t value_of(uint32_t format)
{
    switch (format) {
    case KVS_FORMAT_mla_bf16:
    case KVS_FORMAT_kv_bf16:
        return KVS_VALUE_BF16;
    case KVS_FORMAT_mla_fp16:
    case KVS_FORMAT_kv_fp16:
        return KVS_VALUE_FP16;
    case KVS_FORMAT_mla_fp32:
        return KVS_VALUE_FP32;
    default:
        return 0;
    }
}

kvs_status kvs_gather_dequant_check(const kvs_gather_dequant_args *a, uint32_t *ret_type, kvs_err *err)
{
    const uint64_t formats = KVS_FORMAT_BIT(mla_fp8) | KVS_FORMAT_BIT(kv_fp8) | KVS_FORMAT_BIT(mla_bf16) |
                             KVS_FORMAT_BIT(mla_fp16) | KVS_FORMAT_BIT(mla_fp32) | KVS_FORMAT_BIT(kv_bf16) |
                             KVS_FORMAT_BIT(kv_fp16);
    const uint32_t type = value_of(a->view.format), bytes = kvs_value_bytes(a->dst_type);
    const uint64_t row = (uint64_t)a->width * (type == 0 ? 1 : kvs_value_bytes(type));
    kvs_status s;

    if (a->width != 320 && a->width != 512 && a->width != 576)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "width: %" PRIu32 " is none of 320, 512, 576", a->width);
    s = kvs_view_check(&a->view, formats, row, err);
    if (s != KVS_OK)
        return s;
    if (row > a->view.row_bytes)
        return kvs_fail(err, KVS_E_INVALID, "width: %" PRIu32 " values need %" PRIu64 " bytes of a row of %" PRIu32,
                        a->width, row, a->view.row_bytes);
    if (bytes == 0 || (type != 0 && a->dst_type != type))
        return kvs_fail(err, KVS_E_UNSUPPORTED, "dst_type: %" PRIu32 " cannot be made of format %" PRIu32, a->dst_type,
                        a->view.format);
    if (type == 0 && (a->scale == NULL || (uintptr_t)a->scale % sizeof *a->scale != 0))
        return kvs_fail(err, KVS_E_INVALID, "scale: %p holds no fp32", (const void *)a->scale);
    s = kvs_gather_list_check(&a->list, err);
    if (s == KVS_OK)
        s = kvs_rows_check("dst", a->dst, a->list.n_rows, a->dst_stride, (uint64_t)a->width * bytes, bytes, err);
    if (s == KVS_OK)
        *ret_type = type;
    return s;
}

static void widen(const kvs_gather_dequant_args *a, uint32_t type, const uint8_t *row, uint8_t *dst)
{
    if (type != 0) {
        memcpy(dst, row, (size_t)a->width * kvs_value_bytes(type));
        return;
    }
    for (uint32_t i = 0; i < a->width; i++)
        kvs_value_put(dst, a->dst_type, i, kvs_e4m3_dequantise(row[i], *a->scale));
}

kvs_status kvs_gather_dequant(const kvs_gather_dequant_args *a, uint32_t *ret_bad, kvs_err *err)
{
    uint32_t bad = 0, type = 0;
    kvs_status s = kvs_gather_dequant_check(a, &type, err);

    if (s != KVS_OK)
        return s;
    for (uint32_t r = 0; r < a->list.n_rows; r++) {
        kvs_view_place at;
        kvs_gather_found found = kvs_gather_find(&a->list, &a->view, r, KVS_SITE_GATHER_DEQUANT, &at);

        bad += found == KVS_GATHER_BAD;
        if (found == KVS_GATHER_TOKEN)
            widen(a, type, kvs_view_row(&a->view, at.page, at.token, KVS_SITE_GATHER_DEQUANT),
                  a->dst + r * a->dst_stride);
    }
    *ret_bad = bad;
    return KVS_OK;
}
