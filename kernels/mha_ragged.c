#include "kernels/mha_ragged.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/attend.h"
#include "kernels/kv_decode.h"
#include "kernels/view_check.h"

enum { GROUP = 64 /* queries that share the tiles */, VALUE = 2, ALIGN = 16 };

/* ---- arguments ---- */

static kvs_status dim_check(const char *name, uint32_t d, uint32_t max, kvs_err *err)
{
    if (d < KVS_ATTEND_MIN_DIM || d > max || d % KVS_ATTEND_DIM_STEP != 0)
        return kvs_fail(err, KVS_E_INVALID, "%s: %" PRIu32 " is not a multiple of %d in %d..%" PRIu32, name, d,
                        (int)KVS_ATTEND_DIM_STEP, (int)KVS_ATTEND_MIN_DIM, max);
    return KVS_OK;
}

static kvs_status shape_check(const kvs_mha_ragged_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("h", a->h, 1, KVS_ATTEND_MAX_HEADS, err);

    if (s == KVS_OK)
        s = dim_check("d_qk", a->d_qk, KVS_ATTEND_MAX_DIM, err);
    if (s == KVS_OK)
        s = dim_check("d_v", a->d_v, KVS_MHA_MAX_V, err);
    if (s == KVS_OK)
        s = kvs_range_check("n_q", a->n_q, 0, KVS_ATTEND_MAX_TOKENS, err);
    if (s == KVS_OK)
        s = kvs_range_check("n_k", a->n_k, 0, KVS_ATTEND_MAX_TOKENS, err);
    if (s == KVS_OK)
        s = kvs_range_check("causal", a->causal, 0, 1, err);
    if (s == KVS_OK)
        s = kvs_range_check("is_fp16", a->is_fp16, 0, 1, err);
    if (s == KVS_OK && !isfinite(a->sm_scale))
        s = kvs_fail(err, KVS_E_INVALID, "sm_scale: %g is not finite", (double)a->sm_scale);
    return s;
}

static kvs_status bounds_check(const char *name, const int32_t *start, uint32_t n_seqs, kvs_err *err)
{
    if (n_seqs > 0 && (start == NULL || (uintptr_t)start % sizeof *start != 0))
        return kvs_fail(err, KVS_E_INVALID, "%s: %p does not hold the bounds of %" PRIu32 " sequences", name,
                        (const void *)start, n_seqs);
    return KVS_OK;
}

kvs_status kvs_mha_ragged_check(const kvs_mha_ragged_args *a, kvs_err *err)
{
    const uint64_t qk = (uint64_t)a->d_qk * VALUE, v = (uint64_t)a->d_v * VALUE;
    kvs_status s = shape_check(a, err);

    if (s == KVS_OK)
        s = bounds_check("q_start", a->q_start, a->n_seqs, err);
    if (s == KVS_OK)
        s = bounds_check("k_start", a->k_start, a->n_seqs, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q", &a->q, a->n_q, a->h, qk, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("k", &a->k, a->n_k, a->h, qk, ALIGN, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("v", &a->v, a->n_k, a->h, v, ALIGN, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, a->n_q, a->h, v, VALUE, true, err);
    if (s == KVS_OK)
        s = kvs_strided_check("lse", &a->lse, a->n_q, a->h, sizeof(float), sizeof(float), true, err);
    return s;
}

uint64_t kvs_mha_ragged_workspace(const kvs_mha_ragged_args *a)
{
    return shape_check(a, NULL) == KVS_OK ? attend_bytes(GROUP, a->d_qk, a->d_v) : 0;
}

/* ---- walk ---- */

typedef struct range {
    uint64_t begin, n;
} range;

static range range_of(const int32_t *start, uint32_t seq, uint32_t most, uint64_t *bad)
{
    int32_t begin = start[seq], end = start[seq + 1];

    if (begin >= 0 && end >= begin && (uint32_t)end <= most)
        return (range){(uint64_t)begin, (uint64_t)(end - begin)};
    ++*bad;
    return (range){0, 0};
}

static uint8_t *row_of(const kvs_strided *o, uint64_t token, uint64_t head)
{
    return o->base + token * o->token_stride + head * o->head_stride;
}

/* Queries first .. first + g->n_rows of the sequence against its keys. */
static void group_run(const kvs_mha_ragged_args *a, attend_group *g, range q, range k, uint64_t first, uint32_t head)
{
    attend_type type = a->is_fp16 ? ATTEND_FP16 : ATTEND_BF16;

    for (uint32_t r = 0; r < g->n_rows; r++) {
        int64_t to = a->causal ? (int64_t)(k.n + first + r + 1) - (int64_t)q.n : (int64_t)k.n;

        attend_load(g->q + (size_t)r * a->d_qk, row_of(&a->q, q.begin + first + r, head), a->d_qk, type);
        g->from[r] = 0;
        g->to[r] = to > 0 ? to : 0;
    }
    attend_part_begin(g);
    for (uint64_t t0 = 0; t0 < k.n; t0 += ATTEND_TILE) {
        uint32_t n = k.n - t0 < ATTEND_TILE ? (uint32_t)(k.n - t0) : ATTEND_TILE;

        for (uint32_t t = 0; t < n; t++) {
            attend_load(g->k + (size_t)t * a->d_qk, row_of(&a->k, k.begin + t0 + t, head), a->d_qk, type);
            attend_load(g->v + (size_t)t * a->d_v, row_of(&a->v, k.begin + t0 + t, head), a->d_v, type);
            g->has[t] = 1;
        }
        attend_tile(g, (int64_t)t0, n);
    }
    attend_part_end(g);
    for (uint32_t r = 0; r < g->n_rows; r++) {
        attend_store(row_of(&a->out, q.begin + first + r, head), g->run + (size_t)r * a->d_v, a->d_v, type);
        memcpy(row_of(&a->lse, q.begin + first + r, head), &g->run_lse[r], sizeof(float));
    }
}

kvs_status kvs_mha_ragged(const kvs_mha_ragged_args *a, void *workspace, uint64_t workspace_bytes, uint32_t *ret_bad,
                          kvs_err *err)
{
    kvs_status s = kvs_mha_ragged_check(a, err);
    attend_group g = {.scale = a->sm_scale};
    uint64_t bad = 0;

    if (s != KVS_OK)
        return s;
    if (workspace == NULL || workspace_bytes < kvs_mha_ragged_workspace(a))
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " are needed", workspace_bytes,
                        workspace, kvs_mha_ragged_workspace(a));
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        range q = range_of(a->q_start, i, a->n_q, &bad), k = range_of(a->k_start, i, a->n_k, &bad);

        for (uint32_t h = 0; h < a->h; h++)
            for (uint64_t first = 0; first < q.n; first += GROUP) {
                attend_open(&g, workspace, q.n - first < GROUP ? (uint32_t)(q.n - first) : GROUP, a->d_qk, a->d_v);
                group_run(a, &g, q, k, first, h);
            }
    }
    *ret_bad = bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad;
    return KVS_OK;
}
