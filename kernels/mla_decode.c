/* MLA decode: tokens of sequences by block tables, attended to by mla_walk.c. */
#include <inttypes.h>
#include <stdbool.h>

#include "kernels/mla_check.h"
#include "kernels/mla_walk.h"
#include "proto/layout.h"

uint64_t kvs_mla_decode_workspace(const kvs_mla_decode_args *a)
{
    if (a->s_q < 1 || a->s_q > KVS_MLA_MAX_SQ || a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS ||
        a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return mla_walk_workspace();
}

static uint64_t pages_of(const kvs_mla_decode_args *a, uint64_t n_tokens)
{
    return (n_tokens + a->view.tokens_per_block - 1) / a->view.tokens_per_block;
}

static const int32_t *table_row(const kvs_mla_decode_args *a, uint32_t seq)
{
    return a->table_width > 0 ? a->block_table + seq * a->table_stride : NULL;
}

static bool is_good_length(const kvs_mla_decode_args *a, int32_t len)
{
    return len >= 0 && (uint64_t)len <= (uint64_t)a->table_width * a->view.tokens_per_block;
}

static bool is_good_block(const kvs_mla_decode_args *a, int32_t block)
{
    return block >= 0 && (uint32_t)block < a->view.n_blocks;
}

static uint32_t choose_parts(const kvs_mla_decode_args *a)
{
    uint64_t longest = a->fixed_split ? (uint64_t)a->table_width * a->view.tokens_per_block : 0;

    if (a->parts > 0)
        return a->parts;
    for (uint32_t i = 0; i < a->n_seqs && !a->fixed_split; i++)
        if (is_good_length(a, a->seq_len[i]) && (uint64_t)a->seq_len[i] > longest)
            longest = (uint64_t)a->seq_len[i];
    return mla_walk_parts(longest);
}

/* Lengths and table entries that the walk will skip; stays at the largest number rather than wrapping. */
static uint32_t count_bad(const kvs_mla_decode_args *a)
{
    uint64_t bad = 0;

    for (uint32_t i = 0; i < a->n_seqs; i++) {
        const int32_t *row = table_row(a, i);
        uint64_t n = 0;

        if (is_good_length(a, a->seq_len[i]))
            n = pages_of(a, (uint64_t)a->seq_len[i]);
        else
            bad++;
        for (uint64_t p = 0; p < n; p++)
            bad += !is_good_block(a, row[p]);
    }
    return bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad;
}

static const uint8_t *row_by_table(const void *of, uint32_t seq, uint64_t t, const uint8_t **ret_tail)
{
    const kvs_mla_decode_args *a = of;
    const bool is_16_bit = a->view.format == KVS_FORMAT_mla_bf16 || a->view.format == KVS_FORMAT_mla_fp16;
    const kvs_site site = is_16_bit ? KVS_SITE_MLA_DECODE : KVS_SITE_MLA_DECODE_FP8;
    kvs_view_place at = kvs_view_split(&a->view, t, site);
    int32_t block = table_row(a, seq)[at.page];

    *ret_tail = NULL;
    return is_good_block(a, block) ? kvs_view_row(&a->view, (uint32_t)block, at.token, site) : NULL;
}

kvs_status kvs_mla_decode(const kvs_mla_decode_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_status s = kvs_mla_decode_check(a, err);
    float kv_scale;
    mla_walk w;

    if (s != KVS_OK)
        return s;
    kv_scale = a->view.format == KVS_FORMAT_mla_fp8 ? *a->kv_scale : 1.0f;
    w = (mla_walk){.q_nope = a->q_nope,
                   .q_pe = a->q_pe,
                   .out = a->out,
                   .lse = a->lse,
                   .format = a->view.format,
                   .nope = KVS_MLA_LATENT,
                   .s_q = a->s_q,
                   .h_q = a->h_q,
                   .parts = choose_parts(a),
                   .score_scale = a->sm_scale * kv_scale,
                   .out_scale = kv_scale,
                   .row = row_by_table,
                   .of = a,
                   .stop = a->stop};
    s = mla_walk_open(&w, workspace, workspace_bytes, err);
    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        if (!mla_walk_unit(&w, i, is_good_length(a, a->seq_len[i]) ? (uint64_t)a->seq_len[i] : 0))
            return kvs_fail(err, KVS_E_CANCELLED, "stopped at sequence %" PRIu32 " of %" PRIu32, i, a->n_seqs);
    *ret = (kvs_mla_decode_result){w.parts, KVS_KERNEL_MLA_DECODE_C, count_bad(a)};
    return KVS_OK;
}
