#include "kernels/mla_extend.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

#include "kernels/mla_check.h"
#include "kernels/mla_walk.h"

enum { VALUE = 2 };

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
    kvs_status s = kvs_view_check(&a->view,
                                  KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16) | KVS_FORMAT_BIT(mla_fp8) |
                                      KVS_FORMAT_BIT(fp8_ds_mla),
                                  0, err);

    if (s == KVS_OK)
        s = shape_check(a, err);
    if (s == KVS_OK && a->view.format == KVS_FORMAT_mla_fp8 && a->kv_scale == NULL)
        s = kvs_fail(err, KVS_E_INVALID, "kv_scale: mla_fp8 has one");
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
    if (a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS || a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return mla_walk_workspace();
}

static bool is_range(const kvs_mla_extend_args *a, uint32_t seq)
{
    int32_t begin = a->q_start[seq], end = a->q_start[seq + 1];

    return begin >= 0 && end >= begin && (uint32_t)end <= a->n_tokens;
}

static bool is_good_length(const kvs_mla_extend_args *a, int32_t len)
{
    return len >= 0 && (uint64_t)len <= (uint64_t)a->table_width * a->view.tokens_per_block;
}

static bool is_good_block(const kvs_mla_extend_args *a, int32_t block)
{
    return block >= 0 && (uint32_t)block < a->view.n_blocks;
}

static int32_t block_of(const kvs_mla_extend_args *a, uint32_t seq, uint64_t page)
{
    return a->block_table[seq * a->table_stride + page];
}

static uint32_t choose_parts(const kvs_mla_extend_args *a)
{
    uint64_t longest = a->fixed_split ? (uint64_t)a->table_width * a->view.tokens_per_block : 0;

    if (a->parts > 0)
        return a->parts;
    for (uint32_t i = 0; i < a->n_seqs && !a->fixed_split; i++)
        if (is_good_length(a, a->seq_len[i]) && (uint64_t)a->seq_len[i] > longest)
            longest = (uint64_t)a->seq_len[i];
    return mla_walk_parts(longest);
}

/* A sequence as the walk asks for it: its only unit. */
typedef struct sequence {
    const kvs_mla_extend_args *a;
    uint32_t seq;
} sequence;

static const uint8_t *row_by_table(const void *of, uint32_t unit, uint64_t t, const uint8_t **ret_tail)
{
    const sequence *s = of;
    kvs_view_place at = kvs_view_split(&s->a->view, t, KVS_SITE_MLA_EXTEND);
    int32_t block = block_of(s->a, s->seq, at.page);

    (void)unit;
    *ret_tail = NULL;
    return is_good_block(s->a, block) ? kvs_view_row(&s->a->view, (uint32_t)block, at.token, KVS_SITE_MLA_EXTEND)
                                      : NULL;
}

static kvs_strided from_token(const kvs_strided *o, uint64_t token)
{
    return (kvs_strided){o->base + token * o->token_stride, o->token_stride, o->head_stride};
}

/* False: stopped.  *bad grows by the entries that were. */
static bool sequence_run(const kvs_mla_extend_args *a, mla_walk *w, uint32_t seq, uint64_t *bad)
{
    const sequence of = {a, seq};
    const uint64_t tokens = a->view.tokens_per_block;
    uint64_t begin, len;

    if (!is_range(a, seq)) {
        (*bad)++;
        return true;
    }
    w->s_q = (uint32_t)(a->q_start[seq + 1] - a->q_start[seq]);
    if (w->s_q == 0)
        return true;
    begin = (uint64_t)a->q_start[seq];
    len = is_good_length(a, a->seq_len[seq]) ? (uint64_t)a->seq_len[seq] : 0;
    w->q_nope = from_token(&a->q_nope, begin);
    w->q_pe = from_token(&a->q_pe, begin);
    w->out = from_token(&a->out, begin);
    w->lse = from_token(&a->lse, begin);
    w->of = &of;
    if (!mla_walk_unit(w, 0, len))
        return false;
    for (uint64_t page = 0; page * tokens < len; page++)
        *bad += !is_good_block(a, block_of(a, seq, page));
    *bad += !is_good_length(a, a->seq_len[seq]);
    return true;
}

kvs_status kvs_mla_extend(const kvs_mla_extend_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_status s = kvs_mla_extend_check(a, err);
    uint64_t bad = 0;
    float kv_scale;
    mla_walk w;

    if (s != KVS_OK)
        return s;
    kv_scale = a->view.format == KVS_FORMAT_mla_fp8 ? *a->kv_scale : 1.0f;
    w = (mla_walk){.format = a->view.format,
                   .nope = KVS_MLA_LATENT,
                   .h_q = a->h_q,
                   .parts = choose_parts(a),
                   .score_scale = a->sm_scale * kv_scale,
                   .out_scale = kv_scale,
                   .row = row_by_table,
                   .stop = a->stop};
    s = mla_walk_open(&w, workspace, workspace_bytes, err);
    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        if (!sequence_run(a, &w, i, &bad))
            return kvs_fail(err, KVS_E_CANCELLED, "stopped at sequence %" PRIu32 " of %" PRIu32, i, a->n_seqs);
    *ret = (kvs_mla_decode_result){w.parts, KVS_KERNEL_MLA_EXTEND_C, bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad};
    return KVS_OK;
}
