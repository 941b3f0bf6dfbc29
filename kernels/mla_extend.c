#include "kernels/mla_extend.h"

#include <inttypes.h>
#include <math.h>

#include "kernels/mla_check.h"
#include "kernels/mla_walk.h"

enum { VALUE = 2 };

/* One sequence, or none, as decode knows it. */
static kvs_mla_decode_args decode_args(const kvs_mla_extend_args *a)
{
    return (kvs_mla_decode_args){.view = a->view,
                                 .q_nope = a->q_nope,
                                 .q_pe = a->q_pe,
                                 .out = a->out,
                                 .lse = a->lse,
                                 .seq_len = a->seq_len,
                                 .block_table = a->block_table,
                                 .table_stride = a->table_stride,
                                 .n_seqs = a->n_seqs,
                                 .table_width = a->table_width,
                                 .s_q = 1,
                                 .h_q = a->h_q,
                                 .parts = a->parts,
                                 .fixed_split = a->fixed_split,
                                 .sm_scale = a->sm_scale};
}

static kvs_status shape_check(const kvs_mla_extend_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("h_q", a->h_q, 1, KVS_MLA_MAX_HEADS, err);

    if (s == KVS_OK)
        s = kvs_range_check("n_tokens", a->n_tokens, 0, INT32_MAX, err);
    if (s == KVS_OK)
        s = kvs_range_check("parts", a->parts, 0, KVS_MLA_MAX_PARTS, err);
    if (s == KVS_OK)
        s = kvs_range_check("fixed_split", a->fixed_split, 0, 1, err);
    if (s == KVS_OK && !isfinite(a->sm_scale))
        s = kvs_fail(err, KVS_E_INVALID, "sm_scale: %g is not finite", (double)a->sm_scale);
    if (s == KVS_OK && a->n_seqs > 0 && (a->q_start == NULL || (uintptr_t)a->q_start % sizeof *a->q_start != 0))
        s = kvs_fail(err, KVS_E_INVALID, "q_start: %p does not hold the bounds of %" PRIu32 " sequences",
                     (const void *)a->q_start, a->n_seqs);
    return s;
}

kvs_status kvs_mla_extend_check(const kvs_mla_extend_args *a, kvs_err *err)
{
    const uint64_t latent = (uint64_t)KVS_MLA_LATENT * VALUE, rope = (uint64_t)KVS_MLA_ROPE * VALUE;
    kvs_status s = kvs_view_check(&a->view, KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16), 0, err);

    if (s == KVS_OK)
        s = shape_check(a, err);
    if (s == KVS_OK)
        s = kvs_tables_check(a->seq_len, a->block_table, a->table_stride, a->table_width, a->n_seqs, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q_nope", &a->q_nope, a->n_tokens, a->h_q, latent, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q_pe", &a->q_pe, a->n_tokens, a->h_q, rope, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, a->n_tokens, a->h_q, latent, VALUE, true, err);
    if (s == KVS_OK)
        s = kvs_strided_check("lse", &a->lse, a->n_tokens, a->h_q, sizeof(float), sizeof(float), true, err);
    return s;
}

uint64_t kvs_mla_extend_workspace(const kvs_mla_extend_args *a)
{
    kvs_mla_decode_args d = decode_args(a);

    return kvs_mla_decode_workspace(&d);
}

static kvs_strided from_token(const kvs_strided *o, uint64_t token)
{
    return (kvs_strided){o->base + token * o->token_stride, o->token_stride, o->head_stride};
}

static int is_range(const kvs_mla_extend_args *a, uint32_t seq)
{
    int32_t begin = a->q_start[seq], end = a->q_start[seq + 1];

    return begin >= 0 && end >= begin && (uint32_t)end <= a->n_tokens;
}

/* Queries begin .. begin + s of one sequence: a decode with s_q = s. */
static uint32_t sequence_run(const kvs_mla_extend_args *a, uint32_t parts, uint32_t seq, void *workspace)
{
    kvs_mla_decode_args d = decode_args(a);
    uint64_t begin;

    if (!is_range(a, seq))
        return 1;
    begin = (uint64_t)a->q_start[seq];
    d.s_q = (uint32_t)(a->q_start[seq + 1] - a->q_start[seq]);
    if (d.s_q == 0)
        return 0;
    d.q_nope = from_token(&a->q_nope, begin);
    d.q_pe = from_token(&a->q_pe, begin);
    d.out = from_token(&a->out, begin);
    d.lse = from_token(&a->lse, begin);
    d.seq_len += seq;
    if (d.table_width > 0)
        d.block_table += seq * a->table_stride;
    d.n_seqs = 1;
    return mla_walk_run(&d, parts, KVS_SITE_MLA_EXTEND, workspace);
}

kvs_status kvs_mla_extend(const kvs_mla_extend_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_mla_decode_args d = decode_args(a);
    kvs_status s = kvs_mla_extend_check(a, err);
    uint32_t parts;
    uint64_t bad = 0;

    if (s != KVS_OK)
        return s;
    if (workspace == NULL || workspace_bytes < kvs_mla_extend_workspace(a))
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " are needed", workspace_bytes,
                        workspace, kvs_mla_extend_workspace(a));
    parts = mla_walk_parts(&d);
    for (uint32_t i = 0; i < a->n_seqs; i++)
        bad += sequence_run(a, parts, i, workspace);
    *ret = (kvs_mla_decode_result){parts, KVS_KERNEL_MLA_EXTEND_C, bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad};
    return KVS_OK;
}
