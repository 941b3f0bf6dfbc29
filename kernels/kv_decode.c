/* Walk of decode with heads of keys and values: sequences, key-value heads, parts, tiles; the rows of a group are the query
 * heads that share a key-value head, of all s_q positions. */
#include "kernels/kv_decode.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/attend.h"
#include "kernels/mla_check.h"
#include "proto/layout.h"

enum {
    TOKENS_A_PART = 1024, /* of parts == 0 */
    MAX_AUTO_PARTS = 64,
    ALIGN = 16,
};

typedef struct walk {
    const kvs_kv_decode_args *a;
    attend_group g;
    attend_type cache, query;
    uint32_t parts, group;
} walk;

/* ---- arguments ---- */

static kvs_status dim_check(const char *name, uint32_t d, kvs_err *err)
{
    if (d < KVS_ATTEND_MIN_DIM || d > KVS_ATTEND_MAX_DIM || d % KVS_ATTEND_DIM_STEP != 0)
        return kvs_fail(err, KVS_E_INVALID, "%s: %" PRIu32 " is not a multiple of %d in %d..%d", name, d,
                        (int)KVS_ATTEND_DIM_STEP, (int)KVS_ATTEND_MIN_DIM, (int)KVS_ATTEND_MAX_DIM);
    return KVS_OK;
}

static kvs_status heads_check(const kvs_kv_decode_args *a, kvs_err *err)
{
    if (a->h_kv < 1 || a->h_q < 1 || a->h_q > KVS_ATTEND_MAX_HEADS || a->h_q % a->h_kv != 0 ||
        a->h_q / a->h_kv > KVS_ATTEND_MAX_GROUP)
        return kvs_fail(err, KVS_E_INVALID,
                        "heads: %" PRIu32 " of queries are not 1..%d times %" PRIu32 " of keys, or more than %d",
                        a->h_q, (int)KVS_ATTEND_MAX_GROUP, a->h_kv, (int)KVS_ATTEND_MAX_HEADS);
    return KVS_OK;
}

static kvs_status number_check(const char *name, float x, float min, kvs_err *err)
{
    if (!isfinite(x) || x < min)
        return kvs_fail(err, KVS_E_INVALID, "%s: %g is not finite, or below %g", name, (double)x, (double)min);
    return KVS_OK;
}

static kvs_status numbers_check(const kvs_kv_decode_args *a, kvs_err *err)
{
    kvs_status s = number_check("sm_scale", a->sm_scale, -HUGE_VALF, err);

    if (s == KVS_OK)
        s = number_check("logit_cap", a->logit_cap, 0.0f, err);
    if (s == KVS_OK && a->k.format == KVS_FORMAT_kv_fp8)
        s = number_check("k_scale", a->k_scale, -HUGE_VALF, err);
    if (s == KVS_OK && a->k.format == KVS_FORMAT_kv_fp8)
        s = number_check("v_scale", a->v_scale, -HUGE_VALF, err);
    return s;
}

static kvs_status shape_check(const kvs_kv_decode_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("s_q", a->s_q, 1, KVS_MLA_MAX_SQ, err);

    if (s == KVS_OK)
        s = heads_check(a, err);
    if (s == KVS_OK)
        s = dim_check("d_qk", a->d_qk, err);
    if (s == KVS_OK)
        s = dim_check("d_v", a->d_v, err);
    if (s == KVS_OK)
        s = kvs_range_check("parts", a->parts, 0, KVS_MLA_MAX_PARTS, err);
    if (s == KVS_OK)
        s = kvs_range_check("fixed_split", a->fixed_split, 0, 1, err);
    if (s == KVS_OK)
        s = kvs_range_check("q_fp16", a->q_fp16, 0, 1, err);
    return s == KVS_OK ? numbers_check(a, err) : s;
}

static uint64_t value_bytes(const kvs_kv_decode_args *a)
{
    return a->k.format == KVS_FORMAT_kv_fp8 ? 1 : 2;
}

/* Rows of all heads of a token, as far as they reach from the row's start. */
static kvs_status cache_check(const char *name, const kvs_view *v, uint64_t head, uint32_t h_kv, uint64_t bytes,
                              kvs_err *err)
{
    uint64_t reach;

    if (head % ALIGN != 0 || (h_kv > 1 && head < bytes))
        return kvs_fail(err, KVS_E_INVALID,
                        "%s: %" PRIu64 " bytes from head to head are not a multiple of %d from %" PRIu64, name, head,
                        (int)ALIGN, bytes);
    if (v->row_bytes < bytes)
        return kvs_fail(err, KVS_E_INVALID, "%s: row_bytes %" PRIu32 " is below the %" PRIu64 " of one head", name,
                        v->row_bytes, bytes);
    if (__builtin_mul_overflow((uint64_t)(h_kv - 1), head, &reach) || __builtin_add_overflow(reach, bytes, &reach))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu32 " heads, %" PRIu64 " bytes apart, exceed the address space",
                        name, h_kv, head);
    return kvs_view_check(v, KVS_FORMAT_BIT(kv_bf16) | KVS_FORMAT_BIT(kv_fp16) | KVS_FORMAT_BIT(kv_fp8), reach, err);
}

static kvs_status caches_check(const kvs_kv_decode_args *a, kvs_err *err)
{
    kvs_status s = cache_check("k", &a->k, a->k_head, a->h_kv, a->d_qk * value_bytes(a), err);

    if (s == KVS_OK)
        s = cache_check("v", &a->v, a->v_head, a->h_kv, a->d_v * value_bytes(a), err);
    if (s == KVS_OK && (a->k.format != a->v.format || a->k.tokens_per_block != a->v.tokens_per_block))
        s = kvs_fail(err, KVS_E_INVALID,
                     "v: format %" PRIu32 " and %" PRIu32 " tokens a block, %" PRIu32 " and %" PRIu32 " in k",
                     a->v.format, a->v.tokens_per_block, a->k.format, a->k.tokens_per_block);
    return s;
}

kvs_status kvs_kv_decode_check(const kvs_kv_decode_args *a, kvs_err *err)
{
    const uint64_t n = (uint64_t)a->n_seqs * a->s_q;
    kvs_status s = shape_check(a, err);

    if (s == KVS_OK)
        s = caches_check(a, err);
    if (s == KVS_OK)
        s = kvs_tables_check(a->seq_len, a->block_table, a->table_stride, a->table_width, a->n_seqs, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q", &a->q, n, a->h_q, (uint64_t)a->d_qk * 2, 2, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, n, a->h_q, (uint64_t)a->d_v * 2, 2, true, err);
    if (s == KVS_OK)
        s = kvs_strided_check("lse", &a->lse, n, a->h_q, sizeof(float), sizeof(float), true, err);
    return s;
}

/* ---- walk ---- */

uint64_t kvs_kv_decode_workspace(const kvs_kv_decode_args *a)
{
    if (shape_check(a, NULL) != KVS_OK)
        return 0;
    return attend_bytes(a->s_q * (a->h_q / a->h_kv), a->d_qk, a->d_v);
}

static int64_t length_of(const kvs_kv_decode_args *a, uint32_t seq, uint64_t *bad)
{
    int32_t len = a->seq_len[seq];

    if (len >= 0 && len <= KVS_ATTEND_MAX_TOKENS && (uint64_t)len <= (uint64_t)a->table_width * a->k.tokens_per_block)
        return len;
    ++*bad;
    return 0;
}

/* First token that any query of the sequence sees. */
static int64_t span_begin(const kvs_kv_decode_args *a, int64_t len)
{
    int64_t first = len - a->s_q + 1 - (int64_t)a->window;

    return a->window > 0 && first > 0 ? first : 0;
}

static int is_good_block(const kvs_kv_decode_args *a, int32_t block)
{
    return block >= 0 && (uint32_t)block < a->k.n_blocks && (uint32_t)block < a->v.n_blocks;
}

static uint32_t choose_parts(const kvs_kv_decode_args *a)
{
    uint64_t longest = a->fixed_split ? (uint64_t)a->table_width * a->k.tokens_per_block : 0, parts, ignored = 0;

    if (a->parts > 0)
        return a->parts;
    for (uint32_t i = 0; i < a->n_seqs && !a->fixed_split; i++) {
        uint64_t len = (uint64_t)length_of(a, i, &ignored);

        longest = len > longest ? len : longest;
    }
    if (a->window > 0 && longest > (uint64_t)a->window + a->s_q - 1)
        longest = (uint64_t)a->window + a->s_q - 1;
    parts = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;
    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? MAX_AUTO_PARTS : (uint32_t)parts;
}

static const uint8_t *operand(const kvs_strided *o, uint64_t token, uint64_t head)
{
    return o->base + token * o->token_stride + head * o->head_stride;
}

/* Row r of a group: position r / group, head r % group of the key-value head's. */
static void group_open(walk *w, uint32_t seq, uint32_t kv_head, int64_t len, void *workspace)
{
    const kvs_kv_decode_args *a = w->a;
    attend_group *g = &w->g;

    attend_open(g, workspace, a->s_q * w->group, a->d_qk, a->d_v);
    for (uint32_t r = 0; r < g->n_rows; r++) {
        uint32_t j = r / w->group;
        int64_t to = len - a->s_q + j + 1;

        g->to[r] = to > 0 ? to : 0;
        g->from[r] = a->window > 0 ? to - (int64_t)a->window : 0;
        attend_load(g->q + (size_t)r * a->d_qk,
                    operand(&a->q, (uint64_t)seq * a->s_q + j, kv_head * w->group + r % w->group), a->d_qk, w->query);
    }
}

static void group_store(walk *w, uint32_t seq, uint32_t kv_head)
{
    const kvs_kv_decode_args *a = w->a;
    attend_group *g = &w->g;
    float scale = a->v.format == KVS_FORMAT_kv_fp8 ? a->v_scale : 1.0f;

    for (uint32_t r = 0; r < g->n_rows; r++) {
        uint64_t token = (uint64_t)seq * a->s_q + r / w->group, head = kv_head * w->group + r % w->group;
        float *run = g->run + (size_t)r * a->d_v;

        for (uint32_t i = 0; i < a->d_v; i++)
            run[i] *= scale;
        attend_store(a->out.base + token * a->out.token_stride + head * a->out.head_stride, run, a->d_v, w->query);
        memcpy(a->lse.base + token * a->lse.token_stride + head * a->lse.head_stride, &g->run_lse[r], sizeof(float));
    }
}

static void tile_run(walk *w, uint32_t seq, uint32_t kv_head, int64_t t0, uint32_t n)
{
    const kvs_kv_decode_args *a = w->a;
    attend_group *g = &w->g;

    for (uint32_t i = 0; i < n; i++) {
        kvs_view_place at = kvs_view_split(&a->k, (uint64_t)t0 + i, KVS_SITE_KV_DECODE_KEY);
        int32_t block = a->block_table[seq * a->table_stride + at.page];

        g->has[i] = (uint8_t)is_good_block(a, block);
        if (!g->has[i])
            continue;
        attend_load(g->k + (size_t)i * a->d_qk,
                    kvs_view_row(&a->k, (uint32_t)block, at.token, KVS_SITE_KV_DECODE_KEY) + kv_head * a->k_head,
                    a->d_qk, w->cache);
        attend_load(g->v + (size_t)i * a->d_v,
                    kvs_view_row(&a->v, (uint32_t)block, at.token, KVS_SITE_KV_DECODE_VALUE) + kv_head * a->v_head,
                    a->d_v, w->cache);
    }
    attend_tile(g, t0, n);
}

/* Tiles start where the part starts, wherever pages begin. */
static void head_run(walk *w, uint32_t seq, uint32_t kv_head, int64_t len, void *workspace)
{
    int64_t begin = span_begin(w->a, len), range = (len - begin + w->parts - 1) / w->parts;

    group_open(w, seq, kv_head, len, workspace);
    for (; begin < len; begin += range) {
        int64_t end = begin + range < len ? begin + range : len;

        attend_part_begin(&w->g);
        for (int64_t t0 = begin; t0 < end; t0 += ATTEND_TILE)
            tile_run(w, seq, kv_head, t0, end - t0 < ATTEND_TILE ? (uint32_t)(end - t0) : ATTEND_TILE);
        attend_part_end(&w->g);
    }
    group_store(w, seq, kv_head);
}

/* Table entries of tokens that some query sees. */
static uint64_t count_bad(const kvs_kv_decode_args *a, uint32_t seq, int64_t len)
{
    uint64_t bad = 0, tokens = a->k.tokens_per_block;

    for (uint64_t p = (uint64_t)span_begin(a, len) / tokens; p * tokens < (uint64_t)len; p++)
        bad += !is_good_block(a, a->block_table[seq * a->table_stride + p]);
    return bad;
}

kvs_status kvs_kv_decode(const kvs_kv_decode_args *a, void *workspace, uint64_t workspace_bytes,
                         kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_status s = kvs_kv_decode_check(a, err);
    walk w = {.a = a};
    uint64_t bad = 0;

    if (s != KVS_OK)
        return s;
    if (workspace == NULL || workspace_bytes < kvs_kv_decode_workspace(a))
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " are needed", workspace_bytes,
                        workspace, kvs_kv_decode_workspace(a));
    w.parts = choose_parts(a);
    w.group = a->h_q / a->h_kv;
    w.cache = a->k.format == KVS_FORMAT_kv_fp8    ? ATTEND_E4M3
              : a->k.format == KVS_FORMAT_kv_fp16 ? ATTEND_FP16
                                                  : ATTEND_BF16;
    w.query = w.cache != ATTEND_E4M3 ? w.cache : a->q_fp16 ? ATTEND_FP16 : ATTEND_BF16;
    w.g.scale = w.cache == ATTEND_E4M3 ? a->sm_scale * a->k_scale : a->sm_scale;
    w.g.cap = a->logit_cap;
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        int64_t len = length_of(a, i, &bad);

        bad += count_bad(a, i, len);
        for (uint32_t h = 0; h < a->h_kv; h++)
            head_run(&w, i, h, len, workspace);
    }
    *ret = (kvs_mla_decode_result){w.parts, KVS_KERNEL_KV_DECODE_C, bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad};
    return KVS_OK;
}
