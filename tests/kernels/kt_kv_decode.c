/* kv_decode: heads of keys and values in two views, against fp64, and bit for bit between layouts. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels_cuda.h"
#include "kernels/kv_decode.h"
#include "proto/layout.h"
#include "tests/kernels/kt_attend.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"

enum { MAX_SEQS = 16, KEY, VALUE };

typedef struct shape {
    uint64_t seed;
    uint32_t format; /* kv_* */
    uint32_t n_seqs, s_q, h_kv, group, d_qk, d_v, window, parts, fixed_split, q_fp16;
    uint32_t table_spare, operand_pad; /* columns; values between rows of operands */
    bool heads_outside;                /* a page is [head][token], not [token][head] */
    float cap, k_scale, v_scale;
    double q_scale;
    int32_t len[MAX_SEQS];
    kt_shape pool, v_pool; /* v_pool.tokens 0: values lie in `pool` too */
} shape;

typedef struct side { /* keys, or values */
    kt_pool *pool;
    uint32_t plane, layer, d;
    uint64_t head; /* stride */
} side;

typedef struct problem {
    shape s;
    kt_pool pools[2];
    side k, v;
    kvs_kv_decode_args args;
    int32_t *lens, *table; /* the test's copies */
    uint8_t *q;
    kt_buf out, lse;
    void *workspace;
    uint64_t workspace_bytes;
    uint32_t *word;
    kvs_mla_decode_result result;
} problem;

static kt_type cache_type(const shape *s)
{
    return s->format == KVS_FORMAT_kv_fp8 ? KT_E4M3 : s->format == KVS_FORMAT_kv_fp16 ? KT_FP16 : KT_BF16;
}

static kt_type query_type(const shape *s)
{
    return cache_type(s) != KT_E4M3 ? cache_type(s) : s->q_fp16 ? KT_FP16 : KT_BF16;
}

static uint64_t n_tokens(const shape *s)
{
    return (uint64_t)s->n_seqs * s->s_q;
}

static uint32_t n_heads(const shape *s)
{
    return s->h_kv * s->group;
}

/* ---- layout ---- */

/* Row pitch of a plane with all heads inside the token, to choose a shape of the pool with. */
static uint32_t whole_row(const shape *s, uint32_t d)
{
    return s->h_kv * d * kt_type_bytes(cache_type(s));
}

/* The plane as it is: heads outside the tokens make rows of one head, and pages of as many lists of tokens. */
static void shape_plane(const shape *s, kt_shape *pool, uint32_t plane, uint32_t d, uint64_t *ret_head)
{
    const uint32_t bytes = d * kt_type_bytes(cache_type(s));
    kt_plane *l = &pool->plane[plane];

    *ret_head = bytes;
    if (!s->heads_outside)
        return;
    l->row_bytes = bytes + l->row_bytes - whole_row(s, d); /* with its padding */
    *ret_head = (uint64_t)pool->tokens * l->row_bytes + (l->page_bytes % 48);
    l->page_bytes = s->h_kv * *ret_head;
}

static void make_pools(kt *k, problem *p)
{
    shape *s = &p->s;
    const bool both = s->v_pool.tokens == 0;
    kt_shape *v = both ? &s->pool : &s->v_pool;

    p->k = (side){&p->pools[0], 0, s->pool.layer, s->d_qk, 0};
    p->v = (side){&p->pools[both ? 0 : 1], both ? kt_shape_add(v, s->format, whole_row(s, s->d_v)) : 0, v->layer,
                  s->d_v, 0};
    shape_plane(s, &s->pool, 0, s->d_qk, &p->k.head);
    shape_plane(s, v, p->v.plane, s->d_v, &p->v.head);
    p->pools[0] = kt_pool_make(k, &s->pool);
    if (!both)
        p->pools[1] = kt_pool_make(k, v);
}

static uint32_t n_blocks(const problem *p)
{
    const uint32_t a = p->k.pool->shape.n_blocks, b = p->v.pool->shape.n_blocks;

    return a < b ? a : b;
}

static uint32_t pages_of(const shape *s, int32_t len)
{
    return len <= 0 ? 0 : ((uint32_t)len + s->pool.tokens - 1) / s->pool.tokens;
}

/* Different blocks for all pages, in any order; garbage behind them. */
static void make_table(kt *k, problem *p)
{
    const shape *s = &p->s;
    const kt_pool *pool = p->k.pool;
    const uint32_t n = pool->shape.far ? KT_FAR_IDS : n_blocks(p);
    uint32_t *order = kt_host(k, (n + 1) * sizeof *order), width = 0, next = 0;
    uint64_t stride;

    for (uint32_t i = 0; i < n; i++)
        order[i] = pool->shape.far ? pool->far_id[i] : i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t at = (uint32_t)rnd_below(&k->r, i), other = order[i - 1];

        order[i - 1] = order[at];
        order[at] = other;
    }
    for (uint32_t i = 0; i < s->n_seqs; i++)
        width = pages_of(s, s->len[i]) > width ? pages_of(s, s->len[i]) : width;
    p->args.table_width = width + s->table_spare;
    p->args.table_stride = stride = p->args.table_width + 3;
    p->table = kt_host(k, (s->n_seqs * stride + 1) * sizeof *p->table);
    p->lens = kt_host(k, (s->n_seqs + 1) * sizeof *p->lens);
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        p->lens[i] = s->len[i];
        for (uint64_t page = 0; page < stride; page++)
            p->table[i * stride + page] =
                page < pages_of(s, s->len[i]) ? (int32_t)order[next++ % n] : (int32_t)(uint32_t)rnd_u64(&k->r);
    }
}

/* ---- data: of seed, sequence, token and head alone ---- */

static uint8_t *head_at(const problem *p, const side *d, int32_t block, uint32_t token, uint32_t head)
{
    (void)p;
    return kt_row(d->pool, d->layer, d->plane, (uint64_t)block, token) + head * d->head;
}

static void fill_caches(problem *p)
{
    const shape *s = &p->s;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (int32_t t = 0; t < s->len[i]; t++) {
            const int32_t block = p->table[i * p->args.table_stride + (uint32_t)t / s->pool.tokens];
            const uint32_t token = (uint32_t)t % s->pool.tokens;

            for (uint32_t h = 0; h < s->h_kv; h++) {
                kt_attend_fill(kt_stream(s->seed, KEY, (uint64_t)i << 32 | (uint32_t)t, h), cache_type(s),
                               head_at(p, &p->k, block, token, h), s->d_qk, 1);
                kt_attend_fill(kt_stream(s->seed, VALUE, (uint64_t)i << 32 | (uint32_t)t, h), cache_type(s),
                               head_at(p, &p->v, block, token, h), s->d_v, 1);
            }
        }
}

static void make_operands(kt *k, problem *p)
{
    const shape *s = &p->s;
    const uint64_t pad = 2 * (uint64_t)s->operand_pad, T = n_tokens(s), h = n_heads(s);
    kvs_kv_decode_args *a = &p->args;

    a->q = (kvs_strided){NULL, (s->d_qk * 2 + pad) * h + pad, s->d_qk * 2 + pad};
    a->out = (kvs_strided){NULL, (s->d_v * 2 + pad) * h + pad, s->d_v * 2 + pad};
    a->lse = (kvs_strided){NULL, (4 + 2 * pad) * h + 2 * pad, 4 + 2 * pad};
    p->q = kt_host(k, a->q.token_stride * T + 1);
    rnd_bytes(&k->r, p->q, a->q.token_stride * T);
    for (uint64_t t = 0; t < T; t++)
        for (uint64_t i = 0; i < h; i++)
            kt_attend_fill(kt_stream(s->seed, 7, t, i), query_type(s),
                           p->q + t * a->q.token_stride + i * a->q.head_stride, s->d_qk, s->q_scale);
    p->out = kt_buf_make(k, "out", a->out.token_stride * T);
    p->lse = kt_buf_make(k, "lse", a->lse.token_stride * T);
    a->q.base = kt_in(k, p->q, a->q.token_stride * T);
    a->out.base = p->out.dev;
    a->lse.base = p->lse.dev;
}

static void upload(kt *k, problem *p)
{
    kt_upload(k, &p->pools[0].buf);
    if (p->v.pool != p->k.pool)
        kt_upload(k, &p->pools[1].buf);
    kt_put(k, (void *)(uintptr_t)p->args.seq_len, p->lens, p->s.n_seqs * sizeof *p->lens);
    kt_put(k, (void *)(uintptr_t)p->args.block_table, p->table, p->s.n_seqs * p->args.table_stride * sizeof *p->table);
    kt_upload(k, &p->out);
    kt_upload(k, &p->lse);
}

static void make(kt *k, problem *p, const shape *s)
{
    *p = (problem){.s = *s, .word = kt_word(k)};
    make_pools(k, p);
    s = &p->s;
    p->args = (kvs_kv_decode_args){.n_seqs = s->n_seqs,
                                   .s_q = s->s_q,
                                   .h_q = n_heads(s),
                                   .h_kv = s->h_kv,
                                   .d_qk = s->d_qk,
                                   .d_v = s->d_v,
                                   .window = s->window,
                                   .parts = s->parts,
                                   .fixed_split = s->fixed_split,
                                   .q_fp16 = s->q_fp16,
                                   .sm_scale = 0.0883883f,
                                   .logit_cap = s->cap,
                                   .k_scale = s->k_scale,
                                   .v_scale = s->v_scale,
                                   .k_head = p->k.head,
                                   .v_head = p->v.head};
    make_table(k, p);
    fill_caches(p);
    make_operands(k, p);
    p->args.k = kt_view(k, p->k.pool, p->k.layer, p->k.plane);
    p->args.v = kt_view(k, p->v.pool, p->v.layer, p->v.plane);
    p->args.seq_len = kt_in(k, p->lens, s->n_seqs * sizeof *p->lens);
    p->args.block_table = kt_in(k, p->table, s->n_seqs * p->args.table_stride * sizeof *p->table);
#ifdef KVS_CUDA
    p->workspace_bytes =
        k->where == KT_CUDA ? kvs_kv_decode_cuda_workspace(&p->args) : kvs_kv_decode_workspace(&p->args);
#else
    p->workspace_bytes = kvs_kv_decode_workspace(&p->args);
#endif
    p->workspace = kt_alloc(k, p->workspace_bytes + 1);
}

/* ---- running ---- */

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *p = args;
    kvs_status s =
        KT_RUN(k, err, kvs_kv_decode(&p->args, p->workspace, p->workspace_bytes, &p->result, err),
               kvs_kv_decode_cuda(&p->args, p->workspace, p->workspace_bytes, p->word, &p->result, k->stream, err));

    if (s == KVS_OK && k->where == KT_CPU)
        kt_put(k, p->word, &p->result.bad, sizeof p->result.bad);
    return s;
}

/* First token that any query of a sequence sees. */
static int64_t span_begin(const shape *s, int64_t len)
{
    const int64_t first = len - s->s_q + 1 - (int64_t)s->window;

    return s->window > 0 && first > 0 ? first : 0;
}

static bool is_length(const problem *p, int64_t len)
{
    return len >= 0 && len <= (int64_t)p->args.table_width * p->s.pool.tokens;
}

static bool is_block(const problem *p, int32_t block)
{
    return block >= 0 && (uint32_t)block < n_blocks(p);
}

static uint32_t expected_bad(const problem *p)
{
    const int64_t tokens = p->s.pool.tokens;
    uint32_t bad = 0;

    for (uint32_t i = 0; i < p->s.n_seqs; i++) {
        if (!is_length(p, p->lens[i])) {
            bad++;
            continue;
        }
        for (int64_t page = span_begin(&p->s, p->lens[i]) / tokens; page * tokens < p->lens[i]; page++)
            bad += !is_block(p, p->table[i * p->args.table_stride + (uint64_t)page]);
    }
    return bad;
}

/* What the oracle needs: every token's address, here or on the GPU, every row's queries and range. */
static kt_attention question(kt *k, const problem *p, bool on_gpu)
{
    const shape *s = &p->s;
    const uint32_t rows = (uint32_t)n_tokens(s) * n_heads(s);
    const bool fp8 = s->format == KVS_FORMAT_kv_fp8;
    const uint8_t **ks, **vs;
    kt_query *query = kt_host(k, (rows + 1) * sizeof *query);
    double *q = kt_host(k, ((uint64_t)rows * s->d_qk + 1) * sizeof *q);
    uint64_t n = 0, at = 0;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        n += is_length(p, p->lens[i]) ? (uint64_t)p->lens[i] : 0;
    ks = kt_host(k, (n + 1) * sizeof *ks);
    vs = kt_host(k, (n + 1) * sizeof *vs);
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const int64_t len = is_length(p, p->lens[i]) ? p->lens[i] : 0;

        for (uint32_t j = 0; j < s->s_q; j++)
            for (uint32_t h = 0; h < n_heads(s); h++) {
                const uint64_t token = (uint64_t)i * s->s_q + j, r = token * n_heads(s) + h;
                const int64_t to = len - s->s_q + j + 1, from = s->window > 0 ? to - (int64_t)s->window : 0;
                const uint8_t *row = p->q + token * p->args.q.token_stride + h * p->args.q.head_stride;

                query[r] = (kt_query){at + (uint64_t)(from > 0 ? from : 0), at + (uint64_t)(to > 0 ? to : 0),
                                      h / s->group * p->k.head, h / s->group * p->v.head};
                if (to <= 0)
                    query[r].from = query[r].to = at;
                for (uint32_t d = 0; d < s->d_qk; d++)
                    q[r * s->d_qk + d] = kt_attend_value(query_type(s), row, d);
            }
        for (int64_t t = 0; t < len; t++, at++) {
            const int32_t block = p->table[i * p->args.table_stride + (uint64_t)t / s->pool.tokens];
            const uint32_t token = (uint32_t)((uint64_t)t % s->pool.tokens);

            if (!is_block(p, block))
                continue;
            ks[at] = head_at(p, &p->k, block, token, 0);
            vs[at] = head_at(p, &p->v, block, token, 0);
            if (on_gpu) {
                ks[at] = p->k.pool->buf.dev + (ks[at] - p->k.pool->buf.want);
                vs[at] = p->v.pool->buf.dev + (vs[at] - p->v.pool->buf.want);
            }
        }
    }
    return (kt_attention){.cache = cache_type(s),
                          .n_rows = rows,
                          .d_qk = s->d_qk,
                          .d_v = s->d_v,
                          .scale = (double)p->args.sm_scale * (fp8 ? (double)s->k_scale : 1),
                          .cap = (double)s->cap,
                          .v_scale = fp8 ? (double)s->v_scale : 1,
                          .rows = query,
                          .q = q,
                          .k = ks,
                          .v = vs,
                          .n_tokens = n};
}

/* Results of a run, row by row; what lies between the rows must be as before. */
static bool collect(kt *k, problem *p, const uint8_t **out_at, const uint8_t **lse_at)
{
    const shape *s = &p->s;
    uint8_t *out = kt_read(k, &p->out), *lse = kt_read(k, &p->lse);

    for (uint64_t t = 0; t < n_tokens(s); t++)
        for (uint64_t h = 0; h < n_heads(s); h++) {
            const uint64_t o = t * p->args.out.token_stride + h * p->args.out.head_stride,
                           l = t * p->args.lse.token_stride + h * p->args.lse.head_stride;

            memcpy(p->out.want + o, out + o, s->d_v * 2);
            memcpy(p->lse.want + l, lse + l, sizeof(float));
            out_at[t * n_heads(s) + h] = out + o;
            lse_at[t * n_heads(s) + h] = lse + l;
        }
    return kt_same(k, &p->out) && kt_same(k, &p->lse);
}

/* Everything about the last run of p. */
static bool judged(kt *k, problem *p)
{
    const shape *s = &p->s;
    const uint64_t rows = n_tokens(s) * n_heads(s);
    const uint8_t **out_at = kt_host(k, (rows + 1) * sizeof *out_at),
                  **lse_at = kt_host(k, (rows + 1) * sizeof *lse_at);
    double *out = kt_host(k, (rows * s->d_v + 1) * sizeof *out), *lse = kt_host(k, (rows + 1) * sizeof *lse);
    const uint32_t bad = kt_word_value(k, p->word), want_bad = expected_bad(p);
    kt_attention a = question(k, p, false);

    if (bad != want_bad)
        return kt_fail(k, "%u bad entries counted, not %u", bad, want_bad);
    if (!collect(k, p, out_at, lse_at) || !kt_same(k, &p->pools[0].buf))
        return false;
    if (k->where == KT_CUDA && kt_attend_is_big(&a)) {
        a = question(k, p, true);
        kt_attend_cuda(k, &a, out, lse);
    } else
        kt_attend(k, &a, out, lse);
    return kt_judge(k, &a, query_type(s), out_at, lse_at, out, lse);
}

static bool say(kt *k, const shape *s)
{
    if (k->quiet)
        return false;
    (void)printf(
        "      format %u seqs %u s_q %u heads %u x %u d %u %u window %u cap %g parts %u fixed %u page %u layers "
        "%u/%u %s%s, lengths",
        s->format, s->n_seqs, s->s_q, s->h_kv, s->group, s->d_qk, s->d_v, s->window, (double)s->cap, s->parts,
        s->fixed_split, s->pool.tokens, s->pool.layer, s->pool.n_layers,
        s->heads_outside ? "heads outside" : "heads inside", s->v_pool.tokens > 0 ? ", two pools" : "");
    for (uint32_t i = 0; i < s->n_seqs; i++)
        (void)printf(" %d", s->len[i]);
    (void)printf("\n");
    return false;
}

static bool run_judged(kt *k, problem *p)
{
    kvs_err err = {.msg = ""};

    upload(k, p);
    if (launch(k, p, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return judged(k, p) || say(k, &p->s);
}

/* The rows of two problems with equal n_seqs, s_q, heads and d_v, from row `first` of the first one on. */
static bool same_rows(kt *k, problem *a, uint64_t first, problem *b)
{
    const shape *s = &b->s;
    const uint8_t *x = kt_read(k, &a->out), *y = kt_read(k, &b->out), *u = kt_read(k, &a->lse),
                  *v = kt_read(k, &b->lse);

    for (uint64_t t = 0; t < n_tokens(s); t++)
        for (uint64_t h = 0; h < n_heads(s); h++)
            if (memcmp(x + (first + t) * a->args.out.token_stride + h * a->args.out.head_stride,
                       y + t * b->args.out.token_stride + h * b->args.out.head_stride, s->d_v * 2) != 0 ||
                memcmp(u + (first + t) * a->args.lse.token_stride + h * a->args.lse.head_stride,
                       v + t * b->args.lse.token_stride + h * b->args.lse.head_stride, sizeof(float)) != 0)
                return kt_fail(k, "token %" PRIu64 ", head %" PRIu64 ": other bits", t, h);
    return true;
}

static uint32_t all_pages(const shape *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        n += pages_of(s, s->len[i]);
    return n;
}

/* The same problem without layers, padding and gaps. */
static shape contiguous(const shape *s)
{
    shape plain = *s;

    plain.pool = kt_shape_plain(s->format, whole_row(s, s->d_qk), s->pool.tokens, all_pages(s) + 1);
    plain.v_pool = kt_shape_plain(s->format, whole_row(s, s->d_v), s->pool.tokens, all_pages(s) + 1);
    plain.heads_outside = false;
    plain.operand_pad = 0;
    return plain;
}

static bool same_in_both_layouts(kt *k, const shape *s)
{
    const shape flat = contiguous(s);
    problem *p = kt_host(k, 2 * sizeof *p);
    kvs_err err = {.msg = ""};

    make(k, &p[0], s);
    if (!run_judged(k, &p[0]))
        return false;
    make(k, &p[1], &flat);
    upload(k, &p[1]);
    if (launch(k, &p[1], &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return same_rows(k, &p[0], 0, &p[1]) || say(k, s);
}

/* ---- shapes ---- */

static shape basic(uint64_t seed, uint32_t tokens)
{
    shape s = {.seed = seed,
               .format = KVS_FORMAT_kv_bf16,
               .n_seqs = 1,
               .s_q = 1,
               .h_kv = 2,
               .group = 4,
               .d_qk = 128,
               .d_v = 128,
               .parts = 2,
               .table_spare = 2,
               .k_scale = 0.5f,
               .v_scale = 0.25f,
               .q_scale = 1};

    s.pool.tokens = tokens;
    return s;
}

/* A pool for the lengths of s: `layers` of which it uses `layer`. */
static void put_in_layers(shape *s, uint32_t layers, uint32_t layer)
{
    s->pool = kt_shape_plain(s->format, whole_row(s, s->d_qk), s->pool.tokens, all_pages(s) + 2);
    s->pool.n_layers = layers;
    s->pool.layer = layer;
    s->pool.slot_pad = 48;
}

static void random_pools(kt *k, shape *s)
{
    const uint64_t most = k->where == KT_CPU ? 1 << 19 : 2 << 20;

    s->pool = kt_shape_random(k, s->format, whole_row(s, s->d_qk), most);
    if (kt_chance(k, 2)) {
        s->v_pool = kt_shape_random(k, s->format, whole_row(s, s->d_v), most);
        s->pool.tokens = s->v_pool.tokens = s->pool.tokens < s->v_pool.tokens ? s->pool.tokens : s->v_pool.tokens;
    }
}

static bool random_shape(kt *k)
{
    static const uint32_t formats[] = {KVS_FORMAT_kv_bf16, KVS_FORMAT_kv_fp16, KVS_FORMAT_kv_fp8},
                          kv_heads[] = {1, 1, 2, 2, 3, 4, 8}, groups[] = {1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 32},
                          dims[] = {64, 64, 80, 96, 128, 128, 144, 192, 208, 256},
                          parts[] = {0, 0, 1, 1, 2, 3, 4, 8, 64, 256}, windows[] = {1, 2, 7, 16, 30, 64, 1000};
    shape s = {.seed = rnd_u64(&k->r) % 1000000,
               .format = KT_PICK(k, formats),
               .n_seqs = 1 + (uint32_t)rnd_below(&k->r, 4),
               .s_q = kt_chance(k, 2) ? 1 : 1 + (uint32_t)rnd_below(&k->r, 8),
               .h_kv = KT_PICK(k, kv_heads),
               .group = KT_PICK(k, groups),
               .d_qk = KT_PICK(k, dims),
               .d_v = KT_PICK(k, dims),
               .window = kt_chance(k, 3) ? KT_PICK(k, windows) : 0,
               .parts = KT_PICK(k, parts),
               .fixed_split = kt_chance(k, 4),
               .q_fp16 = kt_chance(k, 2),
               .table_spare = (uint32_t)rnd_below(&k->r, 6),
               .operand_pad = (uint32_t)rnd_below(&k->r, 10),
               .heads_outside = kt_chance(k, 3),
               .cap = kt_chance(k, 3) ? 3 + (float)rnd_below(&k->r, 40) : 0,
               .k_scale = 0.25f + (float)rnd_below(&k->r, 8) / 8,
               .v_scale = 0.01f * (float)(1 + rnd_below(&k->r, 300)),
               .q_scale = kt_chance(k, 3) ? 4 : 1};
    uint32_t longest = k->where == KT_CPU ? 90 : 400;

    while (k->where == KT_CPU && s.s_q * s.h_kv * s.group > 64)
        s.group > 1 ? (s.group /= 2) : s.s_q > 1 ? (s.s_q /= 2) : (s.h_kv /= 2);
    random_pools(k, &s);
    for (uint32_t i = 0; i < s.n_seqs; i++)
        s.len[i] = (int32_t)rnd_below(&k->r, kt_chance(k, 4) ? 2 * s.pool.tokens + 2 : longest);
    s.pool.n_blocks = s.pool.n_blocks > all_pages(&s) ? s.pool.n_blocks : all_pages(&s) + 1;
    if (s.v_pool.tokens > 0)
        s.v_pool.n_blocks = all_pages(&s) + 1 + (uint32_t)rnd_below(&k->r, 3);
    return same_in_both_layouts(k, &s);
}

static bool around_pages(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61}, pages[] = {1, 16, 64};

    for (uint32_t i = 0; i < 9; i++) {
        const int32_t page = (int32_t)pages[i % 3];
        const uint32_t n = layers[i / 3];
        shape s = basic(i, pages[i % 3]);

        s.n_seqs = 6;
        s.s_q = 1 + i % 3;
        s.parts = 1 + i % 4;
        s.h_kv = 1 + i % 2;
        s.d_qk = i % 2 ? 64 : 128;
        s.d_v = 64;
        s.format = i % 3 == 2 ? KVS_FORMAT_kv_fp8 : KVS_FORMAT_kv_bf16;
        s.len[1] = 1;
        s.len[2] = page - 1;
        s.len[3] = page;
        s.len[4] = page + 1;
        s.len[5] = 2 * page + 7;
        put_in_layers(&s, n, i % 3 == 0 ? 0 : i % 3 == 1 ? n / 2 : n - 1);
        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

static bool bad_entries(kt *k)
{
    for (uint32_t window = 0; window < 60; window += 20) {
        problem *p = kt_host(k, sizeof *p);
        shape s = basic(16 + window, 16);

        s.n_seqs = 5;
        s.s_q = 2;
        s.parts = 3;
        s.window = window;
        s.len[0] = 70;
        s.len[1] = 33;
        s.len[2] = 16;
        s.len[3] = 50;
        s.len[4] = 64;
        put_in_layers(&s, 3, 1);
        make(k, p, &s);
        p->table[0] = -1;
        p->table[3] = (int32_t)s.pool.n_blocks;
        p->table[p->args.table_stride + 2] = INT_MIN;
        p->table[2 * p->args.table_stride] = INT_MAX; /* the whole of the third sequence */
        p->lens[3] = -5;
        p->lens[4] = (int32_t)(p->args.table_width * 16 + 1);
        if (!run_judged(k, p))
            return false;
    }
    return true;
}

static bool beyond_4_gib(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(15, 64);

    s.n_seqs = 3;
    s.d_qk = 64;
    s.d_v = 80;
    s.len[0] = 3 * 64;
    s.len[1] = 3 * 64 - 1;
    s.len[2] = 2 * 64;
    s.pool = kt_shape_far(s.format, whole_row(&s, s.d_qk), 64);
    make(k, p, &s);
    return run_judged(k, p);
}

static bool more_parts_than_tokens(kt *k)
{
    shape s = basic(21, 16);

    s.n_seqs = 4;
    s.parts = 256;
    s.s_q = 3;
    s.len[0] = 3;
    s.len[1] = 100;
    s.len[3] = 1;
    put_in_layers(&s, 3, 2);
    return same_in_both_layouts(k, &s);
}

static bool windows_and_caps(kt *k)
{
    static const uint32_t windows[] = {0, 1, 5, 16, 17, 40, 1u << 31};
    static const float caps[] = {0, 5, 50};

    for (uint32_t i = 0; i < 21; i++) {
        shape s = basic(100 + i, 16);

        s.n_seqs = 3;
        s.s_q = i % 2 ? 4 : 1;
        s.q_scale = 4;
        s.window = windows[i % 7];
        s.cap = caps[i / 7];
        s.len[0] = 100;
        s.len[1] = 17;
        s.len[2] = 3;
        put_in_layers(&s, 3, 1);
        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

/* With fixed_split a row has the same bits whoever else is in the batch. */
static bool alone_as_in_company(kt *k)
{
    problem *p = kt_host(k, 2 * sizeof *p);
    shape s = basic(31, 16), one;

    s.n_seqs = 3;
    s.fixed_split = 1;
    s.parts = 0;
    s.len[0] = 100;
    s.len[1] = 1900;
    s.len[2] = 7;
    put_in_layers(&s, 1, 0);
    one = s;
    one.n_seqs = 1;
    one.table_spare = s.table_spare + pages_of(&s, 1900) - pages_of(&s, 100);
    put_in_layers(&one, 3, 1);
    make(k, &p[0], &s);
    make(k, &p[1], &one);
    return run_judged(k, &p[0]) && run_judged(k, &p[1]) && same_rows(k, &p[0], 0, &p[1]);
}

/* Captured with some lengths and tables, replayed with others. */
static bool replayed_with_other_lengths(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(41, 16);
    kt_graph g;

    s.n_seqs = 4;
    s.parts = 3;
    for (uint32_t i = 0; i < 4; i++)
        s.len[i] = 60 + (int32_t)i;
    put_in_layers(&s, 3, 1);
    make(k, p, &s);
    upload(k, p);
    if (!kt_graph_make(k, launch, p, &g))
        return false;
    for (uint32_t round = 0; round < 5; round++) {
        const uint32_t a = round % 4, b = (round + 1) % 4;

        p->lens[a] = (int32_t)(13 * round);
        p->lens[b] = 60;
        for (uint32_t page = 0; page < 4 && round > 0; page++) { /* the sequences change their pages */
            int32_t *x = &p->table[a * p->args.table_stride + page], *y = &p->table[b * p->args.table_stride + page],
                    z = *x;

            *x = *y;
            *y = z;
        }
        upload(k, p);
        if (!kt_graph_run(k, &g) || !judged(k, p))
            return false;
    }
    return true;
}

static bool nothing_to_do(kt *k)
{
    problem *p = kt_host(k, 2 * sizeof *p);
    shape s = basic(51, 16);
    kvs_err err = {.msg = ""};

    s.n_seqs = 2;
    put_in_layers(&s, 1, 0);
    make(k, &p[0], &s);
    if (!run_judged(k, &p[0])) /* lengths of 0 */
        return false;
    s.n_seqs = 0;
    make(k, &p[1], &s);
    upload(k, &p[1]);
    return launch(k, &p[1], &err) == KVS_OK || kt_fail(k, "%s", err.msg);
}

static bool refusals(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(61, 16);

    s.len[0] = 20;
    put_in_layers(&s, 1, 0);
    make(k, p, &s);
    for (int i = 0; i < 14; i++) {
        const kvs_kv_decode_args good = p->args;
        kvs_err err = {.msg = ""};
        kvs_status got;

        switch (i) {
        case 0:
            p->args.d_qk = 72;
            break;
        case 1:
            p->args.d_v = 272;
            break;
        case 2:
            p->args.h_q = 7;
            break;
        case 3:
            p->args.h_q = 33 * p->args.h_kv;
            break;
        case 4:
            p->args.s_q = 9;
            break;
        case 5:
            p->args.v.tokens_per_block = 8;
            break;
        case 6:
            p->args.v.format = KVS_FORMAT_kv_fp16;
            break;
        case 7:
            p->args.k_head = 8;
            break;
        case 8:
            p->args.logit_cap = -1;
            break;
        case 9:
            p->args.parts = 257;
            break;
        case 10:
            p->args.k.page_bytes -= 16;
            break;
        case 11:
            p->args.k.format = p->args.v.format = KVS_FORMAT_mla_bf16;
            break;
        case 12:
            p->args.out.head_stride = 64;
            break;
        case 13:
            p->args.v.row_bytes = 64;
            break;
        }
        got = launch(k, p, &err);
        if (got != (i == 11 ? KVS_E_UNSUPPORTED : KVS_E_INVALID) || err.msg[0] == 0)
            return kt_fail(k, "refusal %d: status %d, \"%s\"", i, (int)got, err.msg);
        p->args = good;
    }
    return run_judged(k, p);
}

/* The shapes of the Triton test of the same name: 8 splits, lengths of about 1024, pages of 1 and 16. */
static bool decode_attention(kt *k)
{
    static const uint32_t dims[] = {128, 192};

    for (uint32_t i = 0; i < 8; i++) {
        shape s = basic(200 + i, i % 2 ? 16 : 1);

        if (k->where == KT_CPU && i % 4 != 1)
            continue;
        s.n_seqs = i % 4 / 2 ? 5 : 3;
        s.h_kv = i / 4 ? 8 : 32;
        s.group = 32 / s.h_kv;
        s.d_qk = dims[i / 2 % 2];
        s.parts = 8;
        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] = i % 2 ? 1027 : 1025;
        put_in_layers(&s, 1, 0);
        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

static bool decode_attention_fp8(kt *k)
{
    for (uint32_t i = 0; i < 4; i++) {
        shape s = basic(220 + i, i % 2 ? 16 : 1);

        if (k->where == KT_CPU && i != 1)
            continue;
        s.format = KVS_FORMAT_kv_fp8;
        s.n_seqs = 3;
        s.h_kv = i / 2 ? 8 : 32;
        s.group = 32 / s.h_kv;
        s.parts = 8;
        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] = 1025;
        put_in_layers(&s, 1, 0);
        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

static bool decode_attention_cross_layer_view(kt *k)
{
    for (uint32_t i = 0; i < 2; i++) {
        shape s = basic(230 + i, 16);

        s.n_seqs = 3;
        s.h_kv = i ? 32 : 8;
        s.group = 32 / s.h_kv;
        s.parts = 8;
        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] = k->where == KT_CPU ? 103 : 1027;
        put_in_layers(&s, 3, 1);
        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

/* Long, with the GPU's oracle, which itself is compared with the other one. */
static bool oracles_agree(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(71, 16);
    double *out[2], *lse[2];
    kt_attention a;
    uint64_t rows;

    if (k->where == KT_CPU)
        return true;
    s.n_seqs = 2;
    s.s_q = 2;
    s.cap = 20;
    s.window = 50;
    s.format = KVS_FORMAT_kv_fp8;
    s.len[0] = 90;
    s.len[1] = 33;
    put_in_layers(&s, 3, 1);
    make(k, p, &s);
    p->table[1] = -1;
    upload(k, p);
    rows = n_tokens(&s) * n_heads(&s);
    for (int i = 0; i < 2; i++) {
        out[i] = kt_host(k, rows * s.d_v * sizeof(double));
        lse[i] = kt_host(k, rows * sizeof(double));
    }
    a = question(k, p, false);
    kt_attend(k, &a, out[0], lse[0]);
    a = question(k, p, true);
    kt_attend_cuda(k, &a, out[1], lse[1]);
    for (uint64_t i = 0; i < rows * s.d_v; i++)
        if (!(out[0][i] - out[1][i] < 1e-12 && out[1][i] - out[0][i] < 1e-12))
            return kt_fail(k, "value %" PRIu64 ": %g and %g", i, out[0][i], out[1][i]);
    return true;
}

static bool long_sequences(kt *k)
{
    for (uint32_t i = 0; i < 4; i++) {
        problem *p = kt_host(k, sizeof *p);
        shape s = basic(80 + i, 64);

        if (k->where == KT_CPU && i > 0)
            return true;
        s.format = i == 1 ? KVS_FORMAT_kv_fp8 : i == 2 ? KVS_FORMAT_kv_fp16 : KVS_FORMAT_kv_bf16;
        s.n_seqs = 4;
        s.s_q = i == 3 ? 4 : 1;
        s.parts = i == 2 ? 1 : 0;
        s.group = i == 3 ? 8 : 4;
        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] = k->where == KT_CPU ? 700 + 9 * (int32_t)n : 16000 + 1000 * (int32_t)n + 13;
        put_in_layers(&s, 1, 0);
        make(k, p, &s);
        if (!run_judged(k, p))
            return false;
    }
    return true;
}

static const kt_fixed fixed[] = {{"lengths around a page in layers of 1, 3 and 61", around_pages, false},
                                 {"bad entries and lengths", bad_entries, false},
                                 {"beyond 4 GiB", beyond_4_gib, true},
                                 {"more parts than tokens", more_parts_than_tokens, false},
                                 {"windows and caps", windows_and_caps, true},
                                 {"alone as in company", alone_as_in_company, true},
                                 {"replayed with other lengths", replayed_with_other_lengths, false},
                                 {"nothing to do", nothing_to_do, false},
                                 {"refusals", refusals, false},
                                 {"decode_attention", decode_attention, true},
                                 {"decode_attention_fp8", decode_attention_fp8, true},
                                 {"decode_attention_cross_layer_view", decode_attention_cross_layer_view, true},
                                 {"both oracles agree", oracles_agree, true},
                                 {"long sequences", long_sequences, true}};

const kt_op kt_op_kv_decode = {.name = "kv_decode",
                               .equality = "row RMS",
                               .fixed = fixed,
                               .n_fixed = sizeof fixed / sizeof *fixed,
                               .random = random_shape,
                               .n_cpu = 60,
                               .n_cuda = 400,
                               .n_subset = 8};
