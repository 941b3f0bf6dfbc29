#include <string.h>

#include "kernels/mla_check.h"

enum { LATENT_BYTES = KVS_MLA_LATENT * 2, ROPE_BYTES = KVS_MLA_ROPE * 2 };

static kvs_status write_check(const kvs_mla_write_args *a, kvs_err *err)
{
    kvs_status s = kvs_view_check(&a->view, KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16), 0, err);

    if (s == KVS_OK)
        s = kvs_rows_check("kv_c", a->kv_c, a->n_tokens, a->kv_c_stride, LATENT_BYTES, 2, err);
    if (s == KVS_OK)
        s = kvs_rows_check("k_pe", a->k_pe, a->n_tokens, a->k_pe_stride, ROPE_BYTES, 2, err);
    if (s == KVS_OK && a->n_tokens > 0 &&
        (a->slot_mapping == NULL || (uintptr_t)a->slot_mapping % sizeof *a->slot_mapping != 0))
        s = kvs_fail(err, KVS_E_INVALID, "slot_mapping: %p does not hold %lu slots", (const void *)a->slot_mapping,
                     (unsigned long)a->n_tokens);
    return s;
}

kvs_status kvs_mla_write(const kvs_mla_write_args *a, uint32_t *ret_bad, kvs_err *err)
{
    const uint64_t n_slots = (uint64_t)a->view.n_blocks * a->view.tokens_per_block;
    kvs_status s = write_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t t = 0; t < a->n_tokens; t++) {
        int64_t slot = a->slot_mapping[t];
        kvs_view_place at;
        uint8_t *row;

        if (slot < 0)
            continue;
        if ((uint64_t)slot >= n_slots) {
            bad++;
            continue;
        }
        at = kvs_view_split(&a->view, (uint64_t)slot, KVS_SITE_MLA_WRITE);
        row = kvs_view_row(&a->view, at.page, at.token, KVS_SITE_MLA_WRITE);
        memcpy(row, a->kv_c + t * a->kv_c_stride, LATENT_BYTES);
        memcpy(row + LATENT_BYTES, a->k_pe + t * a->k_pe_stride, ROPE_BYTES);
    }
    *ret_bad = bad;
    return KVS_OK;
}
