#include "kernels/mla_check.h"

#include <inttypes.h>
#include <math.h>

enum { VALUE = 2 };

#define FORMATS                                                                                                        \
    (KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16) | KVS_FORMAT_BIT(mla_fp8) | KVS_FORMAT_BIT(fp8_ds_mla))

static kvs_status shape_check(const kvs_mla_decode_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("s_q", a->s_q, 1, KVS_MLA_MAX_SQ, err);

    if (s == KVS_OK)
        s = kvs_range_check("h_q", a->h_q, 1, KVS_MLA_MAX_HEADS, err);
    if (s == KVS_OK)
        s = kvs_range_check("parts", a->parts, 0, KVS_MLA_MAX_PARTS, err);
    if (s == KVS_OK)
        s = kvs_range_check("fixed_split", a->fixed_split, 0, 1, err);
    if (s == KVS_OK && !isfinite(a->sm_scale))
        s = kvs_fail(err, KVS_E_INVALID, "sm_scale: %g is not finite", (double)a->sm_scale);
    if (s == KVS_OK && a->view.format == KVS_FORMAT_mla_fp8 &&
        (a->kv_scale == NULL || (uintptr_t)a->kv_scale % sizeof *a->kv_scale != 0))
        s = kvs_fail(err, KVS_E_INVALID, "kv_scale: %p holds no scale of an mla_fp8 view", (const void *)a->kv_scale);
    return s;
}

kvs_status kvs_tables_check(const int32_t *seq_len, const int32_t *block_table, uint64_t table_stride,
                            uint32_t table_width, uint32_t n_seqs, kvs_err *err)
{
    uint64_t pitch;

    if (n_seqs > 0 && (seq_len == NULL || (uintptr_t)seq_len % sizeof *seq_len != 0))
        return kvs_fail(err, KVS_E_INVALID, "seq_len: %p does not hold %" PRIu32 " lengths", (const void *)seq_len,
                        n_seqs);
    if (__builtin_mul_overflow(table_stride, sizeof *block_table, &pitch))
        return kvs_fail(err, KVS_E_LIMIT, "table_stride: %" PRIu64 " entries exceed the address space", table_stride);
    if (table_width == 0)
        return KVS_OK; /* nothing is ever read */
    return kvs_rows_check("block_table", (const uint8_t *)block_table, n_seqs, pitch,
                          table_width * (uint64_t)sizeof *block_table, sizeof *block_table, err);
}

kvs_status kvs_mla_decode_check(const kvs_mla_decode_args *a, kvs_err *err)
{
    const uint64_t latent = (uint64_t)KVS_MLA_LATENT * VALUE, rope = (uint64_t)KVS_MLA_ROPE * VALUE;
    const uint64_t n_rows = (uint64_t)a->n_seqs * a->s_q;
    kvs_status s = kvs_view_check(&a->view, FORMATS, 0, err);

    if (s == KVS_OK)
        s = shape_check(a, err);
    if (s == KVS_OK)
        s = kvs_tables_check(a->seq_len, a->block_table, a->table_stride, a->table_width, a->n_seqs, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q_nope", &a->q_nope, n_rows, a->h_q, latent, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q_pe", &a->q_pe, n_rows, a->h_q, rope, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, n_rows, a->h_q, latent, VALUE, true, err);
    if (s == KVS_OK)
        s = kvs_strided_check("lse", &a->lse, n_rows, a->h_q, sizeof(float), sizeof(float), true, err);
    return s;
}
