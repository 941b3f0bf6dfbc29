/* mla_extend: ragged queries over cached prefixes, against fp64, against decode and bit for bit between layouts. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels_cuda.h"
#include "kernels/mla_extend.h"
#include "proto/layout.h"
#include "tests/kernels/kt_attend.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"

enum { MAX_SEQS = 16, LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, ROW = LATENT + ROPE };

typedef struct shape {
    uint64_t seed;
    uint32_t format; /* mla_bf16 or mla_fp16 */
    uint32_t n_seqs, h_q, parts, fixed_split;
    uint32_t front, behind;            /* query tokens of no sequence, before and after the others */
    uint32_t table_spare, operand_pad; /* columns; values between rows of operands */
    double q_scale;
    int32_t len[MAX_SEQS], s_q[MAX_SEQS];
    kt_shape pool;
} shape;

typedef struct problem {
    shape s;
    kt_pool pool;
    kvs_mla_extend_args args;
    int32_t *lens, *table, *start; /* the test's copies */
    uint8_t *q_nope, *q_pe;
    kt_buf out, lse;
    void *workspace;
    uint64_t workspace_bytes;
    uint32_t *word;
    kvs_mla_decode_result result;
} problem;

static kt_type type_of(const shape *s)
{
    return s->format == KVS_FORMAT_mla_fp16 ? KT_FP16 : KT_BF16;
}

static uint32_t pages_of(const shape *s, int32_t len)
{
    return len <= 0 ? 0 : ((uint32_t)len + s->pool.tokens - 1) / s->pool.tokens;
}

static uint32_t all_pages(const shape *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        n += pages_of(s, s->len[i]);
    return n;
}

/* ---- making ---- */

static void make_table(kt *k, problem *p)
{
    const shape *s = &p->s;
    const uint32_t n = p->pool.shape.far ? KT_FAR_IDS : p->pool.shape.n_blocks;
    uint32_t *order = kt_host(k, (n + 1) * sizeof *order), width = 0, next = 0;

    for (uint32_t i = 0; i < n; i++)
        order[i] = p->pool.shape.far ? p->pool.far_id[i] : i;
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t at = (uint32_t)rnd_below(&k->r, i), other = order[i - 1];

        order[i - 1] = order[at];
        order[at] = other;
    }
    for (uint32_t i = 0; i < s->n_seqs; i++)
        width = pages_of(s, s->len[i]) > width ? pages_of(s, s->len[i]) : width;
    p->args.table_width = width + s->table_spare;
    p->args.table_stride = p->args.table_width + 3;
    p->table = kt_host(k, (s->n_seqs * p->args.table_stride + 1) * sizeof *p->table);
    p->lens = kt_host(k, (s->n_seqs + 1) * sizeof *p->lens);
    p->start = kt_host(k, (s->n_seqs + 1) * sizeof *p->start);
    p->start[0] = (int32_t)s->front;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        p->lens[i] = s->len[i];
        p->start[i + 1] = p->start[i] + s->s_q[i];
        for (uint64_t page = 0; page < p->args.table_stride; page++)
            p->table[i * p->args.table_stride + page] =
                page < pages_of(s, s->len[i]) ? (int32_t)order[next++ % n] : (int32_t)(uint32_t)rnd_u64(&k->r);
    }
    p->args.n_tokens = (uint32_t)p->start[s->n_seqs] + s->behind;
}

static uint8_t *token_at(const problem *p, uint32_t seq, uint32_t t)
{
    const int32_t block = p->table[seq * p->args.table_stride + t / p->s.pool.tokens];

    if (block < 0 || (uint32_t)block >= p->pool.shape.n_blocks)
        return NULL;
    return kt_row(&p->pool, p->s.pool.layer, 0, (uint64_t)block, t % p->s.pool.tokens);
}

static void make_operands(kt *k, problem *p)
{
    const shape *s = &p->s;
    const uint64_t pad = 2 * (uint64_t)s->operand_pad, T = p->args.n_tokens, h = s->h_q;
    kvs_mla_extend_args *a = &p->args;

    a->q_nope = (kvs_strided){NULL, (LATENT * 2 + pad) * h + pad, LATENT * 2 + pad};
    a->q_pe = (kvs_strided){NULL, (ROPE * 2 + pad) * h + pad, ROPE * 2 + pad};
    a->out = a->q_nope;
    a->lse = (kvs_strided){NULL, (4 + 2 * pad) * h + 2 * pad, 4 + 2 * pad};
    p->q_nope = kt_host(k, a->q_nope.token_stride * T + 1);
    p->q_pe = kt_host(k, a->q_pe.token_stride * T + 1);
    rnd_bytes(&k->r, p->q_nope, a->q_nope.token_stride * T);
    rnd_bytes(&k->r, p->q_pe, a->q_pe.token_stride * T);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (uint32_t j = 0; j < (uint32_t)s->s_q[i]; j++)
            for (uint64_t x = 0; x < h; x++) {
                const uint64_t t = (uint64_t)p->start[i] + j;

                kt_attend_fill(kt_stream(s->seed, 7, (uint64_t)i << 32 | j, x), type_of(s),
                               p->q_nope + t * a->q_nope.token_stride + x * a->q_nope.head_stride, LATENT, s->q_scale);
                kt_attend_fill(kt_stream(s->seed, 8, (uint64_t)i << 32 | j, x), type_of(s),
                               p->q_pe + t * a->q_pe.token_stride + x * a->q_pe.head_stride, ROPE, s->q_scale);
            }
    p->out = kt_buf_make(k, "out", a->out.token_stride * T);
    p->lse = kt_buf_make(k, "lse", a->lse.token_stride * T);
    a->q_nope.base = kt_in(k, p->q_nope, a->q_nope.token_stride * T);
    a->q_pe.base = kt_in(k, p->q_pe, a->q_pe.token_stride * T);
    a->out.base = p->out.dev;
    a->lse.base = p->lse.dev;
}

static void upload(kt *k, problem *p)
{
    const uint32_t n = p->s.n_seqs;

    kt_upload(k, &p->pool.buf);
    kt_put(k, (void *)(uintptr_t)p->args.seq_len, p->lens, n * sizeof *p->lens);
    kt_put(k, (void *)(uintptr_t)p->args.q_start, p->start, (n + 1) * sizeof *p->start);
    kt_put(k, (void *)(uintptr_t)p->args.block_table, p->table, n * p->args.table_stride * sizeof *p->table);
    kt_upload(k, &p->out);
    kt_upload(k, &p->lse);
}

/* A token of the cache, of numbers near 1 in whatever format. */
static void fill_row(const problem *p, rnd r, uint8_t *row)
{
    const float scales[4] = {0.5f, 1.5f, 0.25f, 1};

    switch (p->s.format) {
    case KVS_FORMAT_mla_fp8:
        kt_attend_fill(r, KT_E4M3, row, ROW, 32);
        break;
    case KVS_FORMAT_fp8_ds_mla:
        kt_attend_fill(r, KT_E4M3, row, LATENT, 1);
        memcpy(row + LATENT, scales, sizeof scales);
        kt_attend_fill(r, KT_BF16, row + LATENT + sizeof scales, ROPE, 1);
        break;
    default:
        kt_attend_fill(r, type_of(&p->s), row, ROW, 1);
        break;
    }
}

static void make(kt *k, problem *p, const shape *s)
{
    *p = (problem){.s = *s, .word = kt_word(k), .pool = kt_pool_make(k, &s->pool)};
    s = &p->s;
    p->args = (kvs_mla_extend_args){.n_seqs = s->n_seqs,
                                    .h_q = s->h_q,
                                    .parts = s->parts,
                                    .fixed_split = s->fixed_split,
                                    .sm_scale = 0.04167f}; /* 1 / sqrt(576) */
    make_table(k, p);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (int32_t t = 0; t < s->len[i]; t++)
            fill_row(p, kt_stream(s->seed, 1, i, (uint64_t)t), token_at(p, i, (uint32_t)t));
    make_operands(k, p);
    p->args.view = kt_view(k, &p->pool, s->pool.layer, 0);
    p->args.seq_len = kt_in(k, p->lens, (s->n_seqs + 1) * sizeof *p->lens);
    p->args.q_start = kt_in(k, p->start, (s->n_seqs + 1) * sizeof *p->start);
    p->args.block_table = kt_in(k, p->table, (s->n_seqs * p->args.table_stride + 1) * sizeof *p->table);
#ifdef KVS_CUDA
    p->workspace_bytes =
        k->where == KT_CUDA ? kvs_mla_extend_cuda_workspace(&p->args) : kvs_mla_extend_workspace(&p->args);
#else
    p->workspace_bytes = kvs_mla_extend_workspace(&p->args);
#endif
    p->workspace = kt_alloc(k, p->workspace_bytes + 1);
}

/* ---- running ---- */

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *p = args;
    kvs_status s =
        KT_RUN(k, err, kvs_mla_extend(&p->args, p->workspace, p->workspace_bytes, &p->result, err),
               kvs_mla_extend_cuda(&p->args, p->workspace, p->workspace_bytes, p->word, &p->result, k->stream, err));

    if (s == KVS_OK && k->where == KT_CPU)
        kt_put(k, p->word, &p->result.bad, sizeof p->result.bad);
    return s;
}

static bool is_length(const problem *p, int64_t len)
{
    return len >= 0 && len <= (int64_t)p->args.table_width * p->s.pool.tokens;
}

/* Queries of a sequence; 0 if q_start names none. */
static uint32_t queries_of(const problem *p, uint32_t seq)
{
    const int64_t begin = p->start[seq], end = p->start[seq + 1];

    return begin >= 0 && end > begin && end <= p->args.n_tokens ? (uint32_t)(end - begin) : 0;
}

static uint32_t expected_bad(const problem *p)
{
    uint32_t bad = 0;

    for (uint32_t i = 0; i < p->s.n_seqs; i++) {
        if (p->start[i] != p->start[i + 1] && queries_of(p, i) == 0)
            bad++;
        if (queries_of(p, i) == 0)
            continue;
        bad += !is_length(p, p->lens[i]);
        for (int64_t t = 0; is_length(p, p->lens[i]) && t < p->lens[i]; t += p->s.pool.tokens)
            bad += token_at(p, i, (uint32_t)t) == NULL;
    }
    return bad;
}

typedef struct answer {
    kt_attention a;
    const uint8_t **out_at, **lse_at;
    double *out, *lse;
} answer;

static void ask_row(problem *p, answer *x, kt_query *query, double *q, uint32_t token, uint32_t head, uint64_t from,
                    uint64_t to)
{
    const uint32_t r = x->a.n_rows++;
    const uint8_t *nope = p->q_nope + token * p->args.q_nope.token_stride + head * p->args.q_nope.head_stride,
                  *pe = p->q_pe + token * p->args.q_pe.token_stride + head * p->args.q_pe.head_stride;

    query[r] = (kt_query){from, to, 0, 0};
    for (uint32_t d = 0; d < ROW; d++)
        q[(uint64_t)r * ROW + d] =
            d < LATENT ? kt_attend_value(type_of(&p->s), nope, d) : kt_attend_value(type_of(&p->s), pe, d - LATENT);
}

/* What the oracle needs, rows in the order of the tokens of the sequences. */
static void ask(kt *k, problem *p, bool on_gpu, answer *x)
{
    const shape *s = &p->s;
    const uint64_t most = (uint64_t)p->args.n_tokens * s->h_q + 1;
    kt_query *query = kt_host(k, most * sizeof *query);
    double *q = kt_host(k, most * ROW * sizeof *q);
    const uint8_t **rows;
    uint64_t n = 0, at = 0;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        n += is_length(p, p->lens[i]) ? (uint64_t)p->lens[i] : 0;
    rows = kt_host(k, (n + 1) * sizeof *rows);
    x->a = (kt_attention){.cache = type_of(s),
                          .d_qk = ROW,
                          .d_v = LATENT,
                          .scale = (double)p->args.sm_scale,
                          .v_scale = 1,
                          .rows = query,
                          .q = q,
                          .k = rows,
                          .v = rows,
                          .n_tokens = n};
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const int64_t len = is_length(p, p->lens[i]) ? p->lens[i] : 0;

        for (uint32_t j = 0; j < queries_of(p, i); j++)
            for (uint32_t h = 0; h < s->h_q; h++) {
                const int64_t seen = len - queries_of(p, i) + j + 1;

                ask_row(p, x, query, q, (uint32_t)p->start[i] + j, h, at, at + (uint64_t)(seen > 0 ? seen : 0));
            }
        for (int64_t t = 0; t < len; t++, at++) {
            rows[at] = token_at(p, i, (uint32_t)t);
            if (on_gpu && rows[at] != NULL)
                rows[at] = p->pool.buf.dev + (rows[at] - p->pool.buf.want);
        }
    }
}

/* Results of a run, row by row; what lies between the rows, and rows of no sequence, must be as before. */
static bool collect(kt *k, problem *p, answer *x)
{
    const uint8_t *out = kt_read(k, &p->out), *lse = kt_read(k, &p->lse);
    uint32_t r = 0;

    for (uint32_t i = 0; i < p->s.n_seqs; i++)
        for (uint32_t j = 0; j < queries_of(p, i); j++)
            for (uint32_t h = 0; h < p->s.h_q; h++, r++) {
                const uint64_t t = (uint64_t)p->start[i] + j,
                               o = t * p->args.out.token_stride + h * p->args.out.head_stride,
                               l = t * p->args.lse.token_stride + h * p->args.lse.head_stride;

                memcpy(p->out.want + o, out + o, LATENT * 2);
                memcpy(p->lse.want + l, lse + l, sizeof(float));
                x->out_at[r] = out + o;
                x->lse_at[r] = lse + l;
            }
    return kt_same(k, &p->out) && kt_same(k, &p->lse);
}

static bool judged(kt *k, problem *p)
{
    const uint64_t most = (uint64_t)p->args.n_tokens * p->s.h_q + 1;
    answer x = {.out_at = kt_host(k, most * sizeof *x.out_at),
                .lse_at = kt_host(k, most * sizeof *x.lse_at),
                .out = kt_host(k, most * LATENT * sizeof *x.out),
                .lse = kt_host(k, most * sizeof *x.lse)};
    const uint32_t bad = kt_word_value(k, p->word), want_bad = expected_bad(p);

    if (bad != want_bad)
        return kt_fail(k, "%u bad entries counted, not %u", bad, want_bad);
    if (!collect(k, p, &x) || !kt_same(k, &p->pool.buf))
        return false;
    ask(k, p, false, &x);
    if (k->where == KT_CUDA && kt_attend_is_big(&x.a)) {
        ask(k, p, true, &x);
        kt_attend_cuda(k, &x.a, x.out, x.lse);
    } else
        kt_attend(k, &x.a, x.out, x.lse);
    return kt_judge(k, &x.a, type_of(&p->s), x.out_at, x.lse_at, x.out, x.lse);
}

static bool say(kt *k, const shape *s)
{
    if (k->quiet)
        return false;
    (void)printf("      format %u heads %u parts %u fixed %u page %u layers %u/%u padding %u %u, queries of tokens",
                 s->format, s->h_q, s->parts, s->fixed_split, s->pool.tokens, s->pool.layer, s->pool.n_layers, s->front,
                 s->behind);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        (void)printf(" %d/%d", s->s_q[i], s->len[i]);
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

/* Queries of sequence i of `a` and of sequence j of `b`, which are as many. */
static bool same_rows(kt *k, problem *a, uint32_t i, problem *b, uint32_t j)
{
    const uint8_t *x = kt_read(k, &a->out), *y = kt_read(k, &b->out), *u = kt_read(k, &a->lse),
                  *v = kt_read(k, &b->lse);

    for (uint64_t n = 0; n < queries_of(a, i); n++)
        for (uint64_t h = 0; h < a->s.h_q; h++) {
            const uint64_t s = (uint64_t)a->start[i] + n, t = (uint64_t)b->start[j] + n;

            if (memcmp(x + s * a->args.out.token_stride + h * a->args.out.head_stride,
                       y + t * b->args.out.token_stride + h * b->args.out.head_stride, LATENT * 2) != 0 ||
                memcmp(u + s * a->args.lse.token_stride + h * a->args.lse.head_stride,
                       v + t * b->args.lse.token_stride + h * b->args.lse.head_stride, sizeof(float)) != 0)
                return kt_fail(k, "sequence %u, query %" PRIu64 ", head %" PRIu64 ": other bits", i, n, h);
        }
    return true;
}

static bool same_in_both_layouts(kt *k, const shape *s)
{
    shape flat = *s;
    problem *p = kt_host(k, 2 * sizeof *p);
    kvs_err err = {.msg = ""};

    flat.pool = kt_shape_plain(s->format, 0, s->pool.tokens, all_pages(s) + 1);
    flat.operand_pad = 0;
    make(k, &p[0], s);
    if (!run_judged(k, &p[0]))
        return false;
    make(k, &p[1], &flat);
    upload(k, &p[1]);
    if (launch(k, &p[1], &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        if (!same_rows(k, &p[0], i, &p[1], i))
            return say(k, s);
    return true;
}

/* ---- shapes ---- */

static shape basic(uint64_t seed, uint32_t tokens, uint32_t n_seqs)
{
    shape s = {.seed = seed,
               .format = KVS_FORMAT_mla_bf16,
               .n_seqs = n_seqs,
               .h_q = 3,
               .parts = 2,
               .table_spare = 2,
               .q_scale = 1};

    s.pool.tokens = tokens;
    return s;
}

static void put_in_layers(shape *s, uint32_t layers, uint32_t layer)
{
    s->pool = kt_shape_plain(s->format, 0, s->pool.tokens, all_pages(s) + 2);
    s->pool.n_layers = layers;
    s->pool.layer = layer;
    s->pool.slot_pad = 48;
}

static bool random_shape(kt *k)
{
    static const uint32_t heads[] = {1, 2, 3, 5, 8, 16, 17}, parts[] = {0, 0, 1, 1, 2, 3, 8, 64, 256};
    shape s = {.seed = rnd_u64(&k->r) % 1000000,
               .format = kt_chance(k, 3) ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16,
               .n_seqs = 1 + (uint32_t)rnd_below(&k->r, 6),
               .h_q = k->where == KT_CUDA && kt_chance(k, 6) ? 128 : KT_PICK(k, heads),
               .parts = KT_PICK(k, parts),
               .fixed_split = kt_chance(k, 4),
               .front = kt_chance(k, 3) ? (uint32_t)rnd_below(&k->r, 5) : 0,
               .behind = kt_chance(k, 2) ? (uint32_t)rnd_below(&k->r, 9) : 0,
               .table_spare = (uint32_t)rnd_below(&k->r, 6),
               .operand_pad = (uint32_t)rnd_below(&k->r, 10),
               .q_scale = kt_chance(k, 3) ? 4 : 1};
    const uint32_t longest = k->where == KT_CPU ? 60 : 300, most = k->where == KT_CPU ? 12 : 60;

    s.pool = kt_shape_random(k, s.format, 0, k->where == KT_CPU ? 1 << 19 : 4 << 20);
    for (uint32_t i = 0; i < s.n_seqs; i++) {
        s.len[i] = (int32_t)rnd_below(&k->r, kt_chance(k, 4) ? 2 * s.pool.tokens + 2 : longest);
        s.s_q[i] = kt_chance(k, 6) ? 0 : kt_chance(k, 4) ? 1 : (int32_t)rnd_below(&k->r, most);
        if (s.s_q[i] > s.len[i] && !kt_chance(k, 4)) /* else: more queries than tokens */
            s.s_q[i] = s.len[i];
    }
    s.pool.n_blocks = s.pool.n_blocks > all_pages(&s) ? s.pool.n_blocks : all_pages(&s) + 1;
    return same_in_both_layouts(k, &s);
}

static bool around_pages(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61}, pages[] = {1, 16, 64};

    for (uint32_t i = 0; i < 9; i++) {
        const int32_t page = (int32_t)pages[i % 3];
        const uint32_t n = layers[i / 3];
        shape s = basic(i, pages[i % 3], 6);
        const int32_t lens[] = {0, 1, page - 1, page, page + 1, 2 * page + 7};

        s.h_q = 1 + i % 3;
        s.parts = 1 + i % 4;
        for (uint32_t q = 0; q < 6; q++) {
            s.len[q] = lens[q];
            s.s_q[q] = lens[q] == 0 ? 1 : q == 5 ? 9 : lens[q] < 20 ? lens[q] : 5;
        }
        put_in_layers(&s, n, i % 3 == 0 ? 0 : i % 3 == 1 ? n / 2 : n - 1);
        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

static bool bad_entries(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(16, 16, 6);
    const int32_t lens[] = {70, 33, 16, 50, 64, 20}, queries[] = {9, 33, 4, 5, 3, 0};

    s.parts = 3;
    for (int i = 0; i < 6; i++) {
        s.len[i] = lens[i];
        s.s_q[i] = queries[i];
    }
    put_in_layers(&s, 3, 1);
    make(k, p, &s);
    p->table[0] = -1;
    p->table[3] = (int32_t)s.pool.n_blocks;
    p->table[p->args.table_stride + 2] = INT_MIN;
    p->table[2 * p->args.table_stride] = INT_MAX; /* the whole of the third sequence */
    p->lens[3] = -5;
    p->lens[4] = (int32_t)(p->args.table_width * 16 + 1);
    p->lens[5] = -1; /* without queries: not looked at */
    return run_judged(k, p);
}

/* A falling q_start: nothing but rows may be written, and it is told. */
static bool falling_starts(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(17, 16, 4);
    kvs_err err = {.msg = ""};

    for (uint32_t i = 0; i < 4; i++) {
        s.len[i] = 40;
        s.s_q[i] = 6;
    }
    put_in_layers(&s, 3, 1);
    make(k, p, &s);
    for (int i = 0; i < 4; i++) {
        static const int32_t starts[][5] = {
            {0, 12, 6, 18, 24}, {-7, 6, 12, 18, 24}, {0, 6, 12, 18, INT_MAX}, {INT_MAX, INT_MIN, 3, 2, 1}};
        const uint8_t *out, *lse;

        memcpy(p->start, starts[i], sizeof starts[i]);
        upload(k, p);
        if (launch(k, p, &err) != KVS_OK)
            return kt_fail(k, "%s", err.msg);
        if (kt_word_value(k, p->word) == 0)
            return kt_fail(k, "starts %d: no bad entry counted", i);
        out = kt_read(k, &p->out);
        lse = kt_read(k, &p->lse);
        for (uint64_t t = 0; t < p->args.n_tokens; t++)
            for (uint64_t h = 0; h < s.h_q; h++) {
                const uint64_t o = t * p->args.out.token_stride + h * p->args.out.head_stride,
                               l = t * p->args.lse.token_stride + h * p->args.lse.head_stride;

                memcpy(p->out.want + o, out + o, LATENT * 2);
                memcpy(p->lse.want + l, lse + l, sizeof(float));
            }
        if (!kt_same(k, &p->out) || !kt_same(k, &p->lse) || !kt_same(k, &p->pool.buf))
            return false;
    }
    return true;
}

static bool beyond_4_gib(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(15, 64, 3);
    const int32_t lens[] = {3 * 64, 3 * 64 - 1, 2 * 64};

    for (uint32_t i = 0; i < 3; i++) {
        s.len[i] = lens[i];
        s.s_q[i] = 7;
    }
    s.pool = kt_shape_far(s.format, 0, 64);
    make(k, p, &s);
    return run_judged(k, p);
}

/* As many queries for each sequence: the bits of decode, in every format that decode reads.  Those of fp8 are judged
 * there. */
static bool equal_queries_are_a_decode(kt *k, uint32_t format)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(23, 16, 4);
    const float kv_scale = 0.03f;
    kvs_mla_decode_args d;
    kvs_mla_decode_result result;
    kvs_err err = {.msg = ""};
    kt_buf out, lse;

    for (uint32_t i = 0; i < 4; i++) {
        s.len[i] = 30 * (int32_t)i + 1;
        s.s_q[i] = 4;
    }
    s.h_q = 16;
    s.format = format;
    put_in_layers(&s, 3, 1);
    make(k, p, &s);
    p->args.kv_scale = kt_in(k, &kv_scale, sizeof kv_scale);
    upload(k, p);
    if (launch(k, p, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    out = kt_buf_make(k, "out", p->out.bytes);
    lse = kt_buf_make(k, "lse", p->lse.bytes);
    memcpy(out.want, kt_read(k, &p->out), out.bytes);
    memcpy(lse.want, kt_read(k, &p->lse), lse.bytes);
    d = (kvs_mla_decode_args){.view = p->args.view,
                              .q_nope = p->args.q_nope,
                              .q_pe = p->args.q_pe,
                              .out = p->args.out,
                              .lse = p->args.lse,
                              .seq_len = p->args.seq_len,
                              .block_table = p->args.block_table,
                              .table_stride = p->args.table_stride,
                              .n_seqs = s.n_seqs,
                              .table_width = p->args.table_width,
                              .s_q = 4,
                              .h_q = s.h_q,
                              .parts = s.parts,
                              .sm_scale = p->args.sm_scale,
                              .kv_scale = p->args.kv_scale};
    d.out.base = out.dev;
    d.lse.base = lse.dev;
    if (KT_RUN(k, &err, kvs_mla_decode(&d, p->workspace, p->workspace_bytes, &result, &err),
               kvs_mla_decode_cuda(&d, p->workspace, p->workspace_bytes, NULL, &result, k->stream, &err)) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return kt_same(k, &out) && kt_same(k, &lse);
}

static bool every_format_as_in_decode(kt *k)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16, KVS_FORMAT_mla_fp8,
                                       KVS_FORMAT_fp8_ds_mla};

    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (!equal_queries_are_a_decode(k, formats[i])) {
            (void)kt_fail(k, "format %s", kvs_format_name(formats[i]));
            return false;
        }
    return true;
}

/* With fixed_split a row has the same bits whoever else is in the batch. */
static bool alone_as_in_company(kt *k)
{
    problem *p = kt_host(k, 2 * sizeof *p);
    shape s = basic(31, 16, 3), one;

    s.fixed_split = 1;
    s.parts = 0;
    s.front = 3;
    s.len[0] = 100;
    s.len[1] = 1300;
    s.len[2] = 7;
    s.s_q[0] = 11;
    s.s_q[1] = 2;
    s.s_q[2] = 7;
    put_in_layers(&s, 1, 0);
    one = s;
    one.n_seqs = 1;
    one.front = 0;
    one.table_spare = s.table_spare + pages_of(&s, 1300) - pages_of(&s, 100);
    put_in_layers(&one, 3, 1);
    make(k, &p[0], &s);
    make(k, &p[1], &one);
    return run_judged(k, &p[0]) && run_judged(k, &p[1]) && same_rows(k, &p[0], 0, &p[1], 0);
}

/* Captured with some queries, lengths and tables, replayed with others. */
static bool replayed_with_other_queries(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(41, 16, 4);
    kt_graph g;

    s.parts = 3;
    s.behind = 8;
    for (uint32_t i = 0; i < 4; i++) {
        s.len[i] = 60 + (int32_t)i;
        s.s_q[i] = 5;
    }
    put_in_layers(&s, 3, 1);
    make(k, p, &s);
    upload(k, p);
    if (!kt_graph_make(k, launch, p, &g))
        return false;
    for (uint32_t round = 0; round < 5; round++) {
        p->lens[round % 4] = (int32_t)(13 * round);
        for (uint32_t i = 0; i < 4; i++)
            p->start[i + 1] = p->start[i] + (int32_t)((i + round) % 4 == 0 ? 5 : (i + round) % 3);
        for (uint64_t t = 0; t < (uint64_t)p->args.n_tokens * s.h_q; t++) {
            kt_attend_fill(kt_stream(round, 9, t, 0), type_of(&s), p->q_nope + t * p->args.q_nope.head_stride, LATENT,
                           1);
            kt_attend_fill(kt_stream(round, 9, t, 1), type_of(&s), p->q_pe + t * p->args.q_pe.head_stride, ROPE, 1);
        }
        upload(k, p);
        kt_put(k, p->args.q_nope.base, p->q_nope, p->args.q_nope.token_stride * p->args.n_tokens);
        kt_put(k, p->args.q_pe.base, p->q_pe, p->args.q_pe.token_stride * p->args.n_tokens);
        if (!kt_graph_run(k, &g) || !judged(k, p))
            return false;
    }
    return true;
}

static bool nothing_to_do(kt *k)
{
    problem *p = kt_host(k, 3 * sizeof *p);
    shape s = basic(51, 16, 2);
    kvs_err err = {.msg = ""};

    s.len[0] = 20;
    s.len[1] = 3;
    put_in_layers(&s, 1, 0);
    make(k, &p[0], &s); /* no queries at all */
    if (!run_judged(k, &p[0]))
        return false;
    s.behind = 5; /* padding alone */
    make(k, &p[1], &s);
    if (!run_judged(k, &p[1]))
        return false;
    s.n_seqs = 0;
    make(k, &p[2], &s);
    upload(k, &p[2]);
    return launch(k, &p[2], &err) == KVS_OK || kt_fail(k, "%s", err.msg);
}

static bool refusals(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(61, 16, 1);

    s.len[0] = 20;
    s.s_q[0] = 3;
    put_in_layers(&s, 1, 0);
    make(k, p, &s);
    for (int i = 0; i < 8; i++) {
        const kvs_mla_extend_args good = p->args;
        kvs_err err = {.msg = ""};
        kvs_status got;

        switch (i) {
        case 0:
            p->args.h_q = 0;
            break;
        case 1:
            p->args.h_q = 129;
            break;
        case 2:
            p->args.parts = 257;
            break;
        case 3:
            p->args.q_start = NULL;
            break;
        case 4:
            p->args.view.format = KVS_FORMAT_kv_bf16;
            break;
        case 5:
            p->args.out.token_stride = 512;
            break;
        case 6:
            p->args.table_stride = 1;
            break;
        case 7:
            p->args.view.row_bytes = 1136;
            break;
        }
        got = launch(k, p, &err);
        if (got != (i == 4 ? KVS_E_UNSUPPORTED : KVS_E_INVALID) || err.msg[0] == 0)
            return kt_fail(k, "refusal %d: status %d, \"%s\"", i, (int)got, err.msg);
        p->args = good;
    }
    return run_judged(k, p);
}

/* A prompt's suffix behind a long prefix, many heads. */
static bool long_prefixes(kt *k)
{
    static const uint32_t heads[] = {16, 128, 40};

    for (uint32_t i = 0; i < 3; i++) {
        problem *p = kt_host(k, sizeof *p);
        shape s = basic(80 + i, 64, 3);

        if (k->where == KT_CPU && i > 0)
            return true;
        s.h_q = k->where == KT_CPU ? 2 : heads[i];
        s.parts = 0;
        s.front = i;
        for (uint32_t n = 0; n < 3; n++) {
            s.len[n] = k->where == KT_CPU ? 300 + 9 * (int32_t)n : 3000 + 1000 * (int32_t)n + 13;
            s.s_q[n] = k->where == KT_CPU ? 20 : 100 - 33 * (int32_t)n;
        }
        put_in_layers(&s, 1, 0);
        make(k, p, &s);
        if (!run_judged(k, p))
            return false;
    }
    return true;
}

static const kt_fixed fixed[] = {{"lengths around a page in layers of 1, 3 and 61", around_pages, false},
                                 {"bad entries and lengths", bad_entries, false},
                                 {"falling starts", falling_starts, false},
                                 {"beyond 4 GiB", beyond_4_gib, true},
                                 {"equal queries are a decode", every_format_as_in_decode, false},
                                 {"alone as in company", alone_as_in_company, true},
                                 {"replayed with other queries", replayed_with_other_queries, false},
                                 {"nothing to do", nothing_to_do, false},
                                 {"refusals", refusals, false},
                                 {"long prefixes", long_prefixes, true}};

const kt_op kt_op_mla_extend = {.name = "mla_extend",
                                .equality = "row RMS",
                                .fixed = fixed,
                                .n_fixed = sizeof fixed / sizeof *fixed,
                                .random = random_shape,
                                .n_cpu = 40,
                                .n_cuda = 300,
                                .n_subset = 6};
