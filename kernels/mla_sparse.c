/* Sparse MLA decode: tokens of lists by logical indices, attended to by mla_walk.c. */
#include "kernels/mla_sparse.h"

#include <inttypes.h>
#include <stdbool.h>

#include "kernels/mla_record.h"
#include "kernels/mla_walk.h"
#include "kernels/view_check.h"

uint64_t kvs_mla_sparse_workspace(const kvs_mla_sparse_args *a)
{
    if (a->s_q < 1 || a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS || a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return mla_walk_workspace();
}

static bool is_good_length(const kvs_mla_sparse_args *a, uint32_t seq)
{
    return a->topk_length == NULL || (a->topk_length[seq] >= 0 && (uint32_t)a->topk_length[seq] <= a->topk);
}

static uint32_t length_of(const kvs_mla_sparse_args *a, uint32_t seq)
{
    if (!is_good_length(a, seq))
        return 0;
    return a->topk_length != NULL ? (uint32_t)a->topk_length[seq] : a->topk;
}

static uint32_t choose_parts(const kvs_mla_sparse_args *a)
{
    uint32_t longest = 0;

    if (a->parts > 0)
        return a->parts;
    for (uint32_t i = 0; i < a->n_seqs && !a->fixed_split; i++)
        longest = length_of(a, i) > longest ? length_of(a, i) : longest;
    return mla_walk_parts(a->fixed_split ? a->topk : longest);
}

static kvs_logical_index index_of(const kvs_mla_sparse_args *a, uint32_t token, uint64_t i)
{
    return a->indices[token * a->index_stride + i];
}

static uint32_t count_bad(const kvs_mla_sparse_args *a)
{
    uint64_t bad = 0;

    for (uint32_t seq = 0; seq < a->n_seqs; seq++) {
        bad += !is_good_length(a, seq);
        for (uint32_t j = 0; j < a->s_q; j++)
            for (uint32_t i = 0; i < length_of(a, seq); i++) {
                kvs_logical_index x = index_of(a, seq * a->s_q + j, i);

                bad += x.at != -1 && !kvs_logical_is_good(&a->view, x);
            }
    }
    return bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad;
}

static const uint8_t *row_by_index(const void *of, uint32_t token, uint64_t t, const uint8_t **ret_tail)
{
    const kvs_mla_sparse_args *a = of;
    const uint32_t tail = kvs_format_token_bytes(a->view.format).tail;
    kvs_logical_index x = index_of(a, token, t);
    kvs_view_place at;

    *ret_tail = NULL;
    if (!kvs_logical_is_good(&a->view, x))
        return NULL;
    if (tail > 0) {
        at = kvs_view_split(&a->view, (uint32_t)x.at, KVS_SITE_MLA_SPARSE_SCALE);
        *ret_tail = kvs_view_tail(&a->view, at.page, at.token, tail, KVS_SITE_MLA_SPARSE_SCALE);
    }
    at = kvs_view_split(&a->view, (uint32_t)x.at, KVS_SITE_MLA_SPARSE);
    return kvs_view_row(&a->view, at.page, at.token, KVS_SITE_MLA_SPARSE);
}

kvs_status kvs_mla_sparse(const kvs_mla_sparse_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_status s = kvs_mla_sparse_check(a, err);
    mla_walk w;

    if (s != KVS_OK)
        return s;
    w = (mla_walk){.q_nope = a->q_nope,
                   .q_pe = a->q_pe,
                   .out = a->out,
                   .lse = a->lse,
                   .format = a->view.format,
                   .nope = mla_record_dims(a->view.format) - KVS_MLA_ROPE,
                   .s_q = 1,
                   .h_q = a->h_q,
                   .parts = choose_parts(a),
                   .score_scale = a->sm_scale,
                   .out_scale = 1.0f,
                   .sink = a->sink,
                   .row = row_by_index,
                   .of = a};
    s = mla_walk_open(&w, workspace, workspace_bytes, err);
    if (s != KVS_OK)
        return s;
    for (uint32_t t = 0; t < a->n_seqs * a->s_q; t++)
        (void)mla_walk_unit(&w, t, length_of(a, t / a->s_q));
    *ret = (kvs_mla_decode_result){w.parts, KVS_KERNEL_MLA_SPARSE_C, count_bad(a)};
    return KVS_OK;
}
