#include "kernels/mla_check.h"

#include <inttypes.h>

/* Type of the rows that a format is made of; 0: any. */
static uint32_t type_of(uint32_t format)
{
    switch (format) {
    case KVS_FORMAT_mla_fp16:
        return KVS_VALUE_FP16;
    case KVS_FORMAT_mla_fp32:
        return KVS_VALUE_FP32;
    case KVS_FORMAT_mla_fp8:
        return 0;
    default:
        return KVS_VALUE_BF16;
    }
}

static kvs_status type_check(const kvs_mla_write_args *a, uint32_t *ret_type, kvs_err *err)
{
    const uint32_t own = type_of(a->view.format), type = a->src_type != 0 ? a->src_type : own;

    if (kvs_value_bytes(type) == 0 || (own != 0 && type != own))
        return kvs_fail(err, KVS_E_UNSUPPORTED, "src_type: %" PRIu32 " cannot be written as %s", a->src_type,
                        kvs_format_name(a->view.format));
    if (own == 0 && (a->scale == NULL || (uintptr_t)a->scale % sizeof *a->scale != 0))
        return kvs_fail(err, KVS_E_INVALID, "scale: %p holds no fp32", (const void *)a->scale);
    *ret_type = type;
    return KVS_OK;
}

kvs_status kvs_mla_write_check(const kvs_mla_write_args *a, uint32_t *ret_type, kvs_err *err)
{
    const uint64_t formats = KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16) | KVS_FORMAT_BIT(mla_fp32) |
                             KVS_FORMAT_BIT(mla_fp8) | KVS_FORMAT_BIT(fp8_ds_mla);
    kvs_status s = kvs_view_check(&a->view, formats, 0, err);
    uint32_t type = 0, value;

    if (s == KVS_OK)
        s = type_check(a, &type, err);
    value = kvs_value_bytes(type);
    if (s == KVS_OK)
        s = kvs_rows_check("kv_c", a->kv_c, a->n_tokens, a->kv_c_stride, (uint64_t)KVS_MLA_LATENT * value, value, err);
    if (s == KVS_OK)
        s = kvs_rows_check("k_pe", a->k_pe, a->n_tokens, a->k_pe_stride, (uint64_t)KVS_MLA_ROPE * value, value, err);
    if (s == KVS_OK)
        s = kvs_rows_check("slot_mapping", (const uint8_t *)a->slot_mapping, a->n_tokens, sizeof *a->slot_mapping,
                           sizeof *a->slot_mapping, sizeof *a->slot_mapping, err);
    if (s == KVS_OK)
        *ret_type = type;
    return s;
}

/* Without tokens there may be no memory. */
static const void *offset(const void *base, uint64_t bytes)
{
    return base != NULL ? (const uint8_t *)base + bytes : NULL;
}

kvs_mla_write_args kvs_mla_write_layer(const kvs_mla_write_layers_args *a, uint32_t layer)
{
    kvs_mla_write_args one = {.view = a->view,
                              .kv_c = offset(a->kv_c, layer * a->kv_c_layer_stride),
                              .k_pe = offset(a->k_pe, layer * a->k_pe_layer_stride),
                              .kv_c_stride = a->kv_c_stride,
                              .k_pe_stride = a->k_pe_stride,
                              .slot_mapping =
                                  offset(a->slot_mapping, layer * a->slot_layer_stride * sizeof *a->slot_mapping),
                              .n_tokens = a->n_tokens,
                              .src_type = a->src_type,
                              .scale = offset(a->scale, layer * sizeof *a->scale)};

    one.view.base = a->base[layer];
    return one;
}

/* Layers lie `stride` bytes apart; each is then checked alone. */
static kvs_status layers_check(const char *name, const void *base, uint64_t n, uint64_t stride, uint64_t align,
                               kvs_err *err)
{
    uint64_t span;

    if (stride % align != 0)
        return kvs_fail(err, KVS_E_INVALID, "%s layer stride: %" PRIu64 " is not a multiple of %" PRIu64, name, stride,
                        align);
    if (!kvs_extent_fits(base, n, stride, 0, &span))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu64 " layers, %" PRIu64 " bytes apart, exceed the address space",
                        name, n, stride);
    return KVS_OK;
}

kvs_status kvs_mla_write_layers_check(const kvs_mla_write_layers_args *a, uint32_t *ret_type, kvs_err *err)
{
    kvs_status s = kvs_range_check("n_layers", a->n_layers, 0, KVS_MLA_MAX_LAYERS, err);
    uint64_t slots;

    if (s != KVS_OK)
        return s;
    *ret_type = KVS_VALUE_BF16; /* no layer: nothing is read */
    if (a->n_layers > 0 && a->base == NULL)
        return kvs_fail(err, KVS_E_INVALID, "base: none for %" PRIu32 " layers", a->n_layers);
    if (__builtin_mul_overflow(a->slot_layer_stride, sizeof *a->slot_mapping, &slots))
        return kvs_fail(err, KVS_E_LIMIT, "slot_layer_stride: %" PRIu64 " entries exceed the address space",
                        a->slot_layer_stride);
    s = layers_check("kv_c", a->kv_c, a->n_layers, a->kv_c_layer_stride, 2, err);
    if (s == KVS_OK)
        s = layers_check("k_pe", a->k_pe, a->n_layers, a->k_pe_layer_stride, 2, err);
    if (s == KVS_OK)
        s = layers_check("slot_mapping", a->slot_mapping, a->n_layers, slots, sizeof *a->slot_mapping, err);
    for (uint32_t layer = 0; s == KVS_OK && layer < a->n_layers; layer++) {
        const kvs_mla_write_args one = kvs_mla_write_layer(a, layer); /* its alignment and its end */

        s = kvs_mla_write_check(&one, ret_type, err);
    }
    return s;
}
