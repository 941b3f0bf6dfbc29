#include "kernels/indexer.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/view_check.h"

kvs_status kvs_indexer_write_check(const kvs_indexer_write_args *a, kvs_err *err)
{
    kvs_status s = kvs_view_check(&a->view, KVS_FORMAT_BIT(indexer_fp8), 0, err);

    if (s == KVS_OK && a->k_type != KVS_VALUE_BF16 && a->k_type != KVS_VALUE_FP16)
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "k_type: %" PRIu32 " is neither bf16 (%d) nor fp16 (%d)", a->k_type,
                     (int)KVS_VALUE_BF16, (int)KVS_VALUE_FP16);
    if (s == KVS_OK)
        s = kvs_range_check("scale_kind", a->scale_kind, KVS_INDEXER_SCALE_FP32, KVS_INDEXER_SCALE_UE8M0, err);
    if (s == KVS_OK)
        s = kvs_rows_check("k", a->k, a->n_tokens, a->k_stride, (uint64_t)KVS_INDEXER_DIMS * 2, 2, err);
    if (s == KVS_OK)
        s = kvs_rows_check("slot_mapping", (const uint8_t *)a->slot_mapping, a->n_tokens, sizeof *a->slot_mapping,
                           sizeof *a->slot_mapping, sizeof *a->slot_mapping, err);
    return s;
}

static void write_key(const kvs_indexer_write_args *a, uint32_t t, kvs_view_place at)
{
    const uint8_t *k = a->k + t * a->k_stride;
    uint8_t *key = kvs_view_row(&a->view, at.page, at.token, KVS_SITE_INDEXER_WRITE_KEY);
    float amax = 0, scale;

    for (uint32_t i = 0; i < KVS_INDEXER_DIMS; i++)
        amax = kvs_amax(amax, kvs_value_get(k, a->k_type, i));
    scale = kvs_indexer_scale(amax, a->scale_kind);
    for (uint32_t i = 0; i < KVS_INDEXER_DIMS; i++)
        key[i] = kvs_e4m3_quantise(kvs_value_get(k, a->k_type, i), scale);
    memcpy(kvs_view_tail(&a->view, at.page, at.token, KVS_INDEXER_SCALE_BYTES, KVS_SITE_INDEXER_WRITE_SCALE), &scale,
           sizeof scale);
}

kvs_status kvs_indexer_write(const kvs_indexer_write_args *a, uint32_t *ret_bad, kvs_err *err)
{
    const uint64_t n_slots = (uint64_t)a->view.n_blocks * a->view.tokens_per_block;
    kvs_status s = kvs_indexer_write_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t t = 0; t < a->n_tokens; t++) {
        int64_t slot = a->slot_mapping[t];

        if (slot >= 0 && (uint64_t)slot >= n_slots)
            bad++;
        else if (slot >= 0)
            write_key(a, t, kvs_view_split(&a->view, (uint64_t)slot, KVS_SITE_INDEXER_WRITE_KEY));
    }
    *ret_bad = bad;
    return KVS_OK;
}
