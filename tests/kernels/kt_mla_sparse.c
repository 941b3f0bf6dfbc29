/* mla_sparse: attention by token lists, against fp64, and bit for bit between layouts. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/mla_oracle.h"
#include "kernels/mla_sparse.h"
#include "proto/layout.h"
#include "tests/gpu/oracle_cuda.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"
#include "tests/support/mla_token.h"

enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, VALUE = 2, MAX_HEADS = KVS_MLA_MAX_HEADS };

static const uint32_t formats[] = {KVS_FORMAT_fp8_ds_mla, KVS_FORMAT_fp8_blk584, KVS_FORMAT_fp8_blk528};

/* What a case asks for beside its pool. */
typedef struct ask {
    uint32_t n_seqs, s_q, h_q, topk, parts, fixed_split;
    bool lengths, sink;
    bool bad;  /* entries and lengths that must be skipped and counted */
    bool none; /* all indices -1 */
} ask;

typedef struct problem {
    kt_pool pool;
    kvs_mla_sparse_args args; /* of the operation */
    kvs_mla_sparse_args host; /* the test's copies, for the oracle */
    kt_buf out, lse;
    uint8_t *workspace;
    uint64_t workspace_bytes;
    uint32_t *word, bad;
    uint8_t *filled; /* [n_blocks * tokens] */
    kvs_mla_decode_result result;
} problem;

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *x = args;

    return KT_RUN(k, err, kvs_mla_sparse(&x->args, x->workspace, x->workspace_bytes, &x->result, err),
                  kvs_mla_sparse_cuda(&x->args, x->workspace, x->workspace_bytes, x->word, &x->result, k->stream, err));
}

/* --- making a problem --- */

/* Token `at` of the view gets values, once. */
static void fill_token(kt *k, problem *x, uint32_t at)
{
    const kt_shape *s = &x->pool.shape;
    uint8_t *page = kt_page(&x->pool, s->layer, 0, at / s->tokens);
    uint64_t tails = (uint64_t)s->tokens * s->plane[0].row_bytes;

    if (x->filled[at])
        return;
    x->filled[at] = 1;
    mla_token_put(&k->r, s->plane[0].format, kt_row(&x->pool, s->layer, 0, at / s->tokens, at % s->tokens),
                  page + tails + (uint64_t)(at % s->tokens) * mla_token_tail_bytes(s->plane[0].format));
}

static int32_t any_index(kt *k, const problem *x, const ask *a)
{
    static const int32_t strange[] = {INT32_MIN, INT32_MAX, -2, -65};
    const uint32_t tokens = x->pool.shape.tokens, n = x->pool.shape.n_blocks * tokens;

    if (a->none || kt_chance(k, 4))
        return -1;
    if (a->bad && kt_chance(k, 8))
        return kt_chance(k, 2) ? (int32_t)(n + rnd_below(&k->r, 3)) : strange[rnd_below(&k->r, 4)];
    if (kt_chance(k, 10)) /* the last row of the last page */
        return (int32_t)n - 1;
    return (int32_t)(kt_block(k, &x->pool) * tokens + rnd_below(&k->r, tokens));
}

/* Lists with gaps, duplicates and, if asked for, bad entries; what lies between two lists is never read. */
static void make_lists(kt *k, problem *x, const ask *a)
{
    const uint64_t pitch = a->topk + rnd_below(&k->r, 4), n = (uint64_t)a->n_seqs * a->s_q;
    int32_t *list = kt_host(k, (n * pitch + 1) * sizeof *list);

    memset(list, 0x7E, n * pitch * sizeof *list);
    for (uint64_t t = 0; t < n; t++)
        for (uint32_t i = 0; i < a->topk; i++) {
            int32_t *at = list + t * pitch + i;

            *at = i > 0 && kt_chance(k, 12) ? at[-1] : any_index(k, x, a);
            if (*at >= 0 && (uint32_t)*at < x->pool.shape.n_blocks * x->pool.shape.tokens)
                fill_token(k, x, (uint32_t)*at);
        }
    x->host.indices = (const kvs_logical_index *)(const void *)list;
    x->args.indices = kt_in(k, list, n * pitch * sizeof *list);
    x->host.index_stride = x->args.index_stride = pitch;
}

static void make_lengths(kt *k, problem *x, const ask *a)
{
    int32_t *lengths = kt_host(k, (a->n_seqs + 1) * sizeof *lengths);

    for (uint32_t i = 0; i < a->n_seqs; i++) {
        lengths[i] = (int32_t)rnd_below(&k->r, a->topk + 1);
        if (a->bad && kt_chance(k, 3))
            lengths[i] = kt_chance(k, 2) ? -3 : (int32_t)a->topk + 1;
    }
    x->host.topk_length = a->lengths ? lengths : NULL;
    x->args.topk_length = a->lengths ? kt_in(k, lengths, a->n_seqs * sizeof *lengths) : NULL;
}

static void make_sink(kt *k, problem *x, const ask *a)
{
    float *sink = kt_host(k, MAX_HEADS * sizeof *sink);

    for (uint32_t h = 0; h < a->h_q; h++)
        sink[h] = h % 7 == 5 ? -INFINITY : (float)(rnd_real(&k->r) * 9);
    x->host.sink = a->sink ? sink : NULL;
    x->args.sink = a->sink ? kt_in(k, sink, a->h_q * sizeof *sink) : NULL;
}

/* [T][h] rows, either dimension outside, with gaps. */
static kvs_strided any_strides(kt *k, uint64_t row, uint64_t unit, uint64_t n_tokens, uint32_t h_q, uint64_t *ret_bytes)
{
    const uint64_t inner = row + unit * rnd_below(&k->r, 9), gap = unit * rnd_below(&k->r, 5);
    const bool heads_outside = kt_chance(k, 4);
    const kvs_strided o = heads_outside ? (kvs_strided){NULL, inner, inner * n_tokens + gap}
                                        : (kvs_strided){NULL, inner * h_q + gap, inner};

    *ret_bytes = (heads_outside ? o.head_stride * h_q : o.token_stride * n_tokens) + 64;
    return o;
}

/* Queries; what lies between two of them is NaN. */
static void make_query(kt *k, const ask *a, uint32_t n_values, kvs_strided *ret_host, kvs_strided *ret_dev)
{
    const uint64_t n = (uint64_t)a->n_seqs * a->s_q, odd = kt_chance(k, 2) ? 0 : VALUE * rnd_below(&k->r, 8);
    uint64_t bytes;
    uint8_t *host, *dev;
    kvs_strided o = any_strides(k, (uint64_t)n_values * VALUE, VALUE, n, a->h_q, &bytes);

    host = kt_host(k, bytes);
    memset(host, 0xFF, bytes);
    for (uint64_t t = 0; t < n; t++)
        for (uint64_t h = 0; h < a->h_q; h++)
            mla_token_put_values(&k->r, KVS_FORMAT_mla_bf16, host + odd + t * o.token_stride + h * o.head_stride,
                                 n_values, 1);
    dev = kt_in(k, host, bytes);
    *ret_host = *ret_dev = o;
    ret_host->base = host + odd;
    ret_dev->base = dev + odd;
}

static void make_outputs(kt *k, problem *x, const ask *a)
{
    const uint64_t n = (uint64_t)a->n_seqs * a->s_q;
    uint64_t bytes;

    x->args.out = any_strides(k, LATENT * VALUE, VALUE, n, a->h_q, &bytes);
    x->out = kt_buf_make(k, "out", bytes);
    x->args.lse = any_strides(k, sizeof(float), sizeof(float), n, a->h_q, &bytes);
    x->lse = kt_buf_make(k, "lse", bytes);
    x->host.out = x->args.out;
    x->host.lse = x->args.lse;
    x->args.out.base = x->out.dev + 16;
    x->args.lse.base = x->lse.dev + 16;
    x->host.out.base = x->out.want + 16;
    x->host.lse.base = x->lse.want + 16;
    kt_upload(k, &x->out);
    kt_upload(k, &x->lse);
}

static void take_workspace(kt *k, problem *x)
{
    x->workspace_bytes = k->where == KT_CPU ? kvs_mla_sparse_workspace(&x->args) : 0;
#ifdef KVS_CUDA
    if (k->where == KT_CUDA)
        x->workspace_bytes = kvs_mla_sparse_cuda_workspace(&x->args);
#endif
    x->workspace = kt_alloc(k, x->workspace_bytes);
}

static void take_view(kt *k, problem *x, const kt_shape *s)
{
    x->args.view = kt_view(k, &x->pool, s->layer, 0);
    x->host.view = x->args.view;
    x->host.view.base = x->pool.buf.want + (x->args.view.base - x->pool.buf.dev);
}

static void make(kt *k, problem *x, const kt_shape *s, const ask *a)
{
    const bool wide = s->plane[0].format == KVS_FORMAT_fp8_ds_mla;

    *x = (problem){.pool = kt_pool_make(k, s), .word = kt_word(k)};
    x->args = (kvs_mla_sparse_args){.n_seqs = a->n_seqs,
                                    .s_q = a->s_q,
                                    .h_q = a->h_q,
                                    .topk = a->topk,
                                    .parts = a->parts,
                                    .fixed_split = a->fixed_split,
                                    .sm_scale = 0.04167f};
    x->host = x->args;
    x->filled = kt_host(k, (uint64_t)x->pool.shape.n_blocks * x->pool.shape.tokens);
    take_view(k, x, s);
    make_lists(k, x, a);
    make_lengths(k, x, a);
    make_sink(k, x, a);
    make_query(k, a, wide ? LATENT : LATENT - ROPE, &x->host.q_nope, &x->args.q_nope);
    make_query(k, a, ROPE, &x->host.q_pe, &x->args.q_pe);
    make_outputs(k, x, a);
    take_workspace(k, x);
    kt_upload(k, &x->pool.buf);
}

/* The same problem in one layer without pads, the blocks of a far pool side by side. */
static void make_contiguous(kt *k, problem *x, const problem *from, const ask *a)
{
    const kt_shape *f = &from->pool.shape;
    const uint32_t format = f->plane[0].format, n_blocks = f->far ? KT_FAR_IDS : f->n_blocks;
    const kt_shape s = kt_shape_plain(format, 0, f->tokens, n_blocks);
    const uint64_t n = (uint64_t)a->n_seqs * a->s_q, pitch = from->host.index_stride;
    int32_t *list = kt_host(k, (n * pitch + 1) * sizeof *list);

    *x = *from;
    x->pool = kt_pool_make(k, &s);
    for (uint32_t b = 0; b < n_blocks; b++) {
        const uint32_t id = f->far ? from->pool.far_id[b] : b, tail = mla_token_tail_bytes(format);

        for (uint32_t t = 0; t < s.tokens; t++) {
            memcpy(kt_row(&x->pool, 0, 0, b, t), kt_row(&from->pool, f->layer, 0, id, t), mla_token_row_bytes(format));
            memcpy(kt_page(&x->pool, 0, 0, b) + (uint64_t)s.tokens * s.plane[0].row_bytes + (uint64_t)t * tail,
                   kt_page(&from->pool, f->layer, 0, id) + (uint64_t)s.tokens * f->plane[0].row_bytes +
                       (uint64_t)t * tail,
                   tail);
        }
    }
    take_view(k, x, &s);
    memcpy(list, from->host.indices, n * pitch * sizeof *list);
    for (uint64_t i = 0; i < n * pitch && f->far; i++)
        for (uint32_t b = 0; b < KT_FAR_IDS; b++)
            if (list[i] >= 0 && (uint32_t)list[i] / f->tokens == from->pool.far_id[b]) {
                list[i] = (int32_t)(b * f->tokens + (uint32_t)list[i] % f->tokens);
                break;
            }
    x->host.indices = (const kvs_logical_index *)(const void *)list;
    x->args.indices = kt_in(k, list, n * pitch * sizeof *list);
    make_outputs(k, x, a);
    kt_upload(k, &x->pool.buf);
}

/* --- looking at results --- */

/* Rows that were written go into `want`; everything else must be as it was. */
static bool collect_rows(kt *k, kt_buf *b, const kvs_strided *o, const kvs_mla_sparse_args *a, uint64_t row)
{
    const uint8_t *got = kt_read(k, b);

    for (uint64_t t = 0; t < (uint64_t)a->n_seqs * a->s_q; t++)
        for (uint64_t h = 0; h < a->h_q; h++) {
            const uint64_t at = 16 + t * o->token_stride + h * o->head_stride;

            memcpy(b->want + at, got + at, row);
        }
    return kt_same(k, b);
}

static bool run(kt *k, problem *x)
{
    kvs_err err = {.msg = ""};

    if (launch(k, x, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    x->bad = k->where == KT_CPU ? x->result.bad : kt_word_value(k, x->word);
    return collect_rows(k, &x->out, &x->args.out, &x->args, LATENT * VALUE) &&
           collect_rows(k, &x->lse, &x->args.lse, &x->args, sizeof(float)) && kt_same(k, &x->pool.buf);
}

static bool judge_by(kt *k, const problem *x, const double *out, const double *lse)
{
    const kvs_mla_sparse_args *a = &x->host;
    const oracle_verdict v =
        oracle_compare_rows(a->view.format, &a->out, &a->lse, (uint64_t)a->n_seqs * a->s_q, a->h_q, out, lse);
    char text[ORACLE_TEXT_BYTES];

    if (!oracle_accepts(&v, text))
        return kt_fail(k, "format %u, %u x %u tokens, %u heads, topk %u, parts %u: %s", a->view.format, a->n_seqs,
                       a->s_q, a->h_q, a->topk, a->parts, text);
    kt_error(k, v.max_error);
    return true;
}

/* What ret_bad must be. */
static uint32_t count_bad(const kvs_mla_sparse_args *a)
{
    const int64_t n = (int64_t)a->view.n_blocks * a->view.tokens_per_block;
    uint32_t bad = 0;

    for (uint64_t t = 0; t < (uint64_t)a->n_seqs * a->s_q; t++) {
        int64_t len = a->topk_length != NULL ? a->topk_length[t / a->s_q] : (int64_t)a->topk;

        if (len < 0 || len > (int64_t)a->topk) {
            bad += t % a->s_q == 0;
            continue;
        }
        for (int64_t i = 0; i < len; i++) {
            int64_t at = a->indices[t * a->index_stride + (uint64_t)i].at;

            bad += at < -1 || at >= n;
        }
    }
    return bad;
}

/* By the oracle of the processor; above 50 MFLOP on a GPU, by one of a GPU. */
static bool judge(kt *k, const problem *x)
{
    const size_t rows = (size_t)x->host.n_seqs * x->host.s_q * x->host.h_q;
    double *out = kt_host(k, (rows + 1) * LATENT * sizeof *out), *lse = kt_host(k, (rows + 1) * sizeof *lse);
    const uint32_t bad = count_bad(&x->host);
    uint32_t counted = bad;

    if (x->bad != bad)
        return kt_fail(k, "%u bad entries counted, not %u", x->bad, bad);
#ifdef KVS_CUDA
    if (k->where == KT_CUDA && (uint64_t)rows * x->host.topk * 2176 > 50000000) {
        kvs_mla_sparse_args a = x->args;

        a.view = x->host.view; /* as it was before any mistake */
        a.view.base = x->args.view.base;
        if (!oracle_cuda_sparse(&a, out, lse))
            return kt_fail(k, "no oracle");
        return judge_by(k, x, out, lse);
    }
#endif
    counted = oracle_mla_sparse(&x->host, out, lse);
    if (counted != bad)
        return kt_fail(k, "the oracle counts %u bad entries, not %u", counted, bad);
    return judge_by(k, x, out, lse);
}

static const uint8_t *row_of(const kvs_strided *o, uint64_t t, uint64_t h)
{
    return o->base + t * o->token_stride + h * o->head_stride;
}

static bool same_bits(kt *k, const problem *x, const problem *y)
{
    const kvs_mla_sparse_args *a = &x->host, *b = &y->host;

    for (uint64_t t = 0; t < (uint64_t)a->n_seqs * a->s_q; t++)
        for (uint64_t h = 0; h < a->h_q; h++)
            if (memcmp(row_of(&a->out, t, h), row_of(&b->out, t, h), LATENT * VALUE) != 0 ||
                memcmp(row_of(&a->lse, t, h), row_of(&b->lse, t, h), sizeof(float)) != 0)
                return kt_fail(k, "token %" PRIu64 ", head %" PRIu64 ": other bits", t, h);
    return true;
}

static bool both_layouts(kt *k, const kt_shape *s, const ask *a)
{
    problem x, y;

    make(k, &x, s, a);
    if (!run(k, &x) || !judge(k, &x))
        return false;
    if (a->bad && x.pool.shape.far)
        return true; /* an entry that is bad there may be good nearby */
    make_contiguous(k, &y, &x, a);
    return run(k, &y) && same_bits(k, &x, &y);
}

/* --- cases --- */

static bool random_shape(kt *k)
{
    static const uint32_t heads[] = {1, 2, 3, 8, 16, 17, 20}, topks[] = {1, 5, 31, 32, 33, 64, 64, 100, 200};
    static const uint32_t parts[] = {0, 1, 1, 2, 3, 7, 64, 256}, many[] = {32, 33, 64, 128};
    const kt_shape s = kt_shape_random(k, KT_PICK(k, formats), 0, k->where == KT_CPU ? 1 << 20 : 8 << 20);
    ask a = {.n_seqs = 1 + (uint32_t)rnd_below(&k->r, 3),
             .s_q = kt_chance(k, 2) ? 1 : 1 + (uint32_t)rnd_below(&k->r, 4),
             .h_q = KT_PICK(k, heads),
             .topk = KT_PICK(k, topks),
             .parts = KT_PICK(k, parts),
             .fixed_split = kt_chance(k, 4),
             .lengths = kt_chance(k, 2),
             .sink = kt_chance(k, 2),
             .bad = kt_chance(k, 2)};

    if (k->where == KT_CUDA && kt_chance(k, 3))
        a.h_q = KT_PICK(k, many);
    return both_layouts(k, &s, &a);
}

static bool every_layer(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61};

    for (uint32_t i = 0; i < 9; i++) {
        kt_shape s = kt_shape_plain(formats[(i + i / 3) % 3], 0, 16, 4);
        const ask a = {.n_seqs = 2, .s_q = 2, .h_q = 3, .topk = 50, .parts = 1 + i % 4, .lengths = i % 2};

        s.n_layers = layers[i / 3];
        s.layer = i % 3 == 0 ? 0 : i % 3 == 1 ? s.n_layers / 2 : s.n_layers - 1;
        s.slot_pad = 16 * (uint64_t)i;
        if (!both_layouts(k, &s, &a))
            return false;
    }
    return true;
}

static bool far_blocks_of(kt *k, uint32_t format)
{
    const kt_shape s = kt_shape_far(format, 0, 64);
    const ask a = {.n_seqs = 2, .s_q = 2, .h_q = 4, .topk = 130, .parts = 2};

    return both_layouts(k, &s, &a);
}

static bool ds_mla_beyond_4_gib(kt *k)
{
    return far_blocks_of(k, KVS_FORMAT_fp8_ds_mla);
}

static bool blk584_beyond_4_gib(kt *k)
{
    return far_blocks_of(k, KVS_FORMAT_fp8_blk584);
}

/* Lists that say nothing at all, with and without a sink. */
static bool no_index_is_good(kt *k)
{
    for (uint32_t i = 0; i < 6; i++) {
        const kt_shape s = kt_shape_plain(formats[i % 3], 0, 16, 3);
        const ask a = {
            .n_seqs = 3, .s_q = 1, .h_q = 18, .topk = 70, .parts = 1 + i / 3 * 4, .sink = i % 2, .none = true};
        problem x;

        make(k, &x, &s, &a);
        if (!run(k, &x) || !judge(k, &x)) /* the oracle says 0 and -inf, and the judge takes nothing else */
            return false;
    }
    return true;
}

/* A view without blocks: every index is bad. */
static bool no_blocks(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_fp8_blk528, 0, 16, 1);
    const ask a = {.n_seqs = 1, .s_q = 2, .h_q = 2, .topk = 20};
    problem x;

    make(k, &x, &s, &a);
    x.args.view.n_blocks = x.host.view.n_blocks = 0;
    return run(k, &x) && judge(k, &x);
}

/* One token said 64 times counts 64 times: v is its value, lse its score plus log 64. */
static bool one_token_many_times(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_fp8_ds_mla, 0, 16, 2);
    const ask a = {.n_seqs = 1, .s_q = 1, .h_q = 2, .topk = 64, .parts = 2};
    problem x;
    int32_t list[64];
    float many[2], once[2];

    make(k, &x, &s, &a);
    fill_token(k, &x, 21);
    kt_upload(k, &x.pool.buf);
    for (uint32_t i = 0; i < 64; i++)
        list[i] = 21;
    x.args.indices = kt_in(k, list, sizeof list);
    x.host.indices = (const kvs_logical_index *)(const void *)list;
    if (!run(k, &x) || !judge(k, &x))
        return false;
    for (uint32_t h = 0; h < 2; h++)
        memcpy(&many[h], row_of(&x.host.lse, 0, h), sizeof many[h]);
    for (uint32_t i = 1; i < 64; i++)
        list[i] = -1;
    x.args.indices = kt_in(k, list, sizeof list);
    if (!run(k, &x) || !judge(k, &x))
        return false;
    for (uint32_t h = 0; h < 2; h++) {
        memcpy(&once[h], row_of(&x.host.lse, 0, h), sizeof once[h]);
        if (fabs((double)many[h] - once[h] - log(64)) > 1e-4)
            return kt_fail(k, "head %u: lse %g many times, %g once", h, (double)many[h], (double)once[h]);
    }
    return true;
}

/* A captured call takes the lists, lengths and sinks that are there when it is replayed. */
static bool replayed_with_other_lists(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_fp8_blk584, 0, 16, 4);
    const ask a = {.n_seqs = 2, .s_q = 1, .h_q = 5, .topk = 90, .parts = 3, .lengths = true, .sink = true};
    problem x, other;
    kt_graph g;

    make(k, &x, &s, &a);
    if (!kt_graph_make(k, launch, &x, &g))
        return false;
    for (int round = 0; round < 3; round++) {
        other = x;
        if (round > 0) { /* new contents behind the same pointers */
            make_lists(k, &other, &a);
            make_lengths(k, &other, &a);
            kt_upload(k, &other.pool.buf);
            x.host.indices = other.host.indices;
            x.host.topk_length = other.host.topk_length;
            if (other.host.index_stride != x.host.index_stride) {
                round--;
                continue;
            }
            kt_put(k, (void *)(uintptr_t)x.args.indices, x.host.indices,
                   a.n_seqs * x.host.index_stride * sizeof(int32_t));
            kt_put(k, (void *)(uintptr_t)x.args.topk_length, x.host.topk_length, a.n_seqs * sizeof(int32_t));
        }
        kt_put(k, x.word, "\377\377\377\377", 4);
        if (!kt_graph_run(k, &g))
            return false;
        x.bad = k->where == KT_CPU ? x.result.bad : kt_word_value(k, x.word);
        if (!collect_rows(k, &x.out, &x.args.out, &x.args, LATENT * VALUE) ||
            !collect_rows(k, &x.lse, &x.args.lse, &x.args, sizeof(float)) || !judge(k, &x))
            return false;
    }
    return true;
}

/* As large as they come. */
static bool long_lists(kt *k)
{
    static const uint32_t heads[] = {128, 16, 64};

    for (uint32_t i = 0; i < 3; i++) {
        const kt_shape s = kt_shape_plain(formats[i], 0, 64, 160);
        const bool here = k->where == KT_CPU;
        const ask a = {.n_seqs = 1,
                       .s_q = here ? 1 : 2,
                       .h_q = here ? 1 : heads[i],
                       .topk = KVS_MLA_MAX_TOPK,
                       .parts = i == 1 ? 0 : 1 + 100 * i,
                       .sink = i > 0};
        problem x;

        make(k, &x, &s, &a);
        if (!run(k, &x) || !judge(k, &x))
            return false;
    }
    return true;
}

/* Every head count that a thread block may be cut at; on a GPU only, a processor takes too long. */
static bool head_counts(kt *k)
{
    static const uint32_t heads[] = {15, 16, 17, 31, 32, 33, 64, 127, 128};
    const bool here = k->where == KT_CPU;

    for (uint32_t i = 0; i < 9; i++) {
        const kt_shape s = kt_shape_plain(formats[i % 3], 0, 64, 3);
        const ask a = {
            .n_seqs = 1, .s_q = 1, .h_q = heads[i], .topk = here ? 20 : 150, .parts = 1 + i % 3, .sink = true};

        if (!both_layouts(k, &s, &a))
            return false;
    }
    return true;
}

/* FlashMLA's sparse decode on a cross-layer view: 3 layers, the middle one, 32 blocks of 64, batch 2,
 * 128 heads, topk 128; and V4's records with a sink, pages of 256 as well. */
static bool flashmla_sparse_decode(kt *k)
{
    for (uint32_t i = 0; i < 4; i++) {
        kt_shape s = kt_shape_plain(formats[i % 3], 0, i == 3 ? 256 : 64, i == 3 ? 8 : 32);
        const ask a = {.n_seqs = 2, .s_q = 1, .h_q = 128, .topk = 128, .parts = 1, .sink = i > 0};

        s.n_layers = 3;
        s.layer = 1;
        if (!both_layouts(k, &s, &a))
            return false;
    }
    return true;
}

static const kt_fixed fixed[] = {{"layers of 1, 3 and 61", every_layer, false},
                                 {"no good index", no_index_is_good, false},
                                 {"no blocks", no_blocks, false},
                                 {"one token many times", one_token_many_times, false},
                                 {"replayed with other lists", replayed_with_other_lists, false},
                                 {"head counts", head_counts, false},
                                 {"FlashMLA sparse decode", flashmla_sparse_decode, false},
                                 {"32768 indices", long_lists, true},
                                 {"fp8_ds_mla beyond 4 GiB", ds_mla_beyond_4_gib, true},
                                 {"fp8_blk584 beyond 4 GiB", blk584_beyond_4_gib, true}};

const kt_op kt_op_mla_sparse = {.name = "mla_sparse",
                                .equality = "row RMS",
                                .fixed = fixed,
                                .n_fixed = sizeof fixed / sizeof *fixed,
                                .random = random_shape,
                                .n_cpu = 60,
                                .n_cuda = 600,
                                .n_subset = 5};
