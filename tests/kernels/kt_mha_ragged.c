/* mha_ragged: ragged queries over rows that lie side by side, against fp64 and bit for bit between strides. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "kernels/kernels_cuda.h"
#include "kernels/mha_ragged.h"
#include "tests/kernels/kt_attend.h"
#include "tests/kernels/kt_ops.h"

enum { MAX_SEQS = 16 };

typedef struct shape {
    uint64_t seed;
    uint32_t is_fp16, n_seqs, h, d_qk, d_v, causal;
    uint32_t front, behind; /* rows of no sequence, before and after the others, of queries and of keys */
    uint32_t q_pad, k_pad;  /* values between rows; of keys and values in eights */
    double q_scale;
    int32_t n_q[MAX_SEQS], n_k[MAX_SEQS];
} shape;

typedef struct problem {
    shape s;
    kvs_mha_ragged_args args;
    int32_t *q_start, *k_start; /* the test's copies */
    uint8_t *q, *k, *v;
    kt_buf out, lse;
    void *workspace;
    uint64_t workspace_bytes;
    uint32_t *word;
} problem;

static kt_type type_of(const shape *s)
{
    return s->is_fp16 ? KT_FP16 : KT_BF16;
}

/* ---- making ---- */

static kvs_strided strided(uint32_t d, uint32_t h, uint64_t pad)
{
    return (kvs_strided){NULL, (d * 2 + pad) * h + pad, d * 2 + pad};
}

static uint8_t *row_of(uint8_t *base, const kvs_strided *o, uint64_t token, uint64_t head)
{
    return base + token * o->token_stride + head * o->head_stride;
}

/* Rows of all sequences, of seed, sequence, place and head alone; whatever is not theirs is random. */
static uint8_t *make_rows(kt *k, const shape *s, uint64_t kind, const kvs_strided *o, uint32_t d, const int32_t *start,
                          uint32_t n, double scale)
{
    uint8_t *rows = kt_host(k, o->token_stride * n + 1);

    rnd_bytes(&k->r, rows, o->token_stride * n);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (int32_t t = start[i]; t < start[i + 1]; t++)
            for (uint64_t h = 0; h < s->h; h++)
                kt_attend_fill(kt_stream(s->seed, kind, (uint64_t)i << 32 | (uint32_t)(t - start[i]), h), type_of(s),
                               row_of(rows, o, (uint64_t)t, h), d, scale);
    return rows;
}

static void upload(kt *k, problem *p)
{
    kt_put(k, (void *)(uintptr_t)p->args.q_start, p->q_start, (p->s.n_seqs + 1) * sizeof *p->q_start);
    kt_put(k, (void *)(uintptr_t)p->args.k_start, p->k_start, (p->s.n_seqs + 1) * sizeof *p->k_start);
    kt_upload(k, &p->out);
    kt_upload(k, &p->lse);
}

static void make(kt *k, problem *p, const shape *given)
{
    const shape *s = &p->s;
    kvs_mha_ragged_args *a = &p->args;

    *p = (problem){.s = *given, .word = kt_word(k)};
    *a = (kvs_mha_ragged_args){.q = strided(s->d_qk, s->h, 2 * (uint64_t)s->q_pad),
                               .k = strided(s->d_qk, s->h, 16 * (uint64_t)s->k_pad),
                               .v = strided(s->d_v, s->h, 16 * (uint64_t)s->k_pad),
                               .out = strided(s->d_v, s->h, 2 * (uint64_t)s->q_pad),
                               .lse = strided(2, s->h, 4 * (uint64_t)s->q_pad),
                               .n_seqs = s->n_seqs,
                               .h = s->h,
                               .d_qk = s->d_qk,
                               .d_v = s->d_v,
                               .causal = s->causal,
                               .is_fp16 = s->is_fp16,
                               .sm_scale = 0.0721688f}; /* 1 / sqrt(192) */
    p->q_start = kt_host(k, (s->n_seqs + 1) * sizeof *p->q_start);
    p->k_start = kt_host(k, (s->n_seqs + 1) * sizeof *p->k_start);
    p->q_start[0] = p->k_start[0] = (int32_t)s->front;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        p->q_start[i + 1] = p->q_start[i] + s->n_q[i];
        p->k_start[i + 1] = p->k_start[i] + s->n_k[i];
    }
    a->n_q = (uint32_t)p->q_start[s->n_seqs] + s->behind;
    a->n_k = (uint32_t)p->k_start[s->n_seqs] + s->behind;
    p->q = make_rows(k, s, 1, &a->q, s->d_qk, p->q_start, a->n_q, s->q_scale);
    p->k = make_rows(k, s, 2, &a->k, s->d_qk, p->k_start, a->n_k, 1);
    p->v = make_rows(k, s, 3, &a->v, s->d_v, p->k_start, a->n_k, 1);
    p->out = kt_buf_make(k, "out", a->out.token_stride * a->n_q);
    p->lse = kt_buf_make(k, "lse", a->lse.token_stride * a->n_q);
    a->q.base = kt_in(k, p->q, a->q.token_stride * a->n_q);
    a->k.base = kt_in(k, p->k, a->k.token_stride * a->n_k);
    a->v.base = kt_in(k, p->v, a->v.token_stride * a->n_k);
    a->out.base = p->out.dev;
    a->lse.base = p->lse.dev;
    a->q_start = kt_in(k, p->q_start, (s->n_seqs + 1) * sizeof *p->q_start);
    a->k_start = kt_in(k, p->k_start, (s->n_seqs + 1) * sizeof *p->k_start);
    p->workspace_bytes = kvs_mha_ragged_workspace(a);
    p->workspace = kt_alloc(k, k->where == KT_CPU ? p->workspace_bytes : 0);
}

/* ---- running ---- */

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *p = args;

    return KT_RUN(k, err, kvs_mha_ragged(&p->args, p->workspace, p->workspace_bytes, p->word, err),
                  kvs_mha_ragged_cuda(&p->args, p->word, k->stream, err));
}

static bool is_range(const int32_t *start, uint32_t i, uint32_t most)
{
    return start[i] >= 0 && start[i] <= start[i + 1] && (int64_t)start[i + 1] <= most;
}

static uint32_t n_in(const int32_t *start, uint32_t i, uint32_t most)
{
    return is_range(start, i, most) ? (uint32_t)(start[i + 1] - start[i]) : 0;
}

typedef struct answer {
    kt_attention a;
    const uint8_t **out_at, **lse_at;
    double *out, *lse;
} answer;

/* The list of the oracle is all of the keys. */
static void ask(kt *k, const problem *p, bool on_gpu, answer *x)
{
    const shape *s = &p->s;
    const kvs_mha_ragged_args *a = &p->args;
    const uint64_t most = (uint64_t)a->n_q * s->h + 1;
    kt_query *query = kt_host(k, most * sizeof *query);
    double *q = kt_host(k, most * s->d_qk * sizeof *q);
    const uint8_t **ks = kt_host(k, (a->n_k + 1) * sizeof *ks), **vs = kt_host(k, (a->n_k + 1) * sizeof *vs);
    uint32_t r = 0;

    for (uint64_t t = 0; t < a->n_k; t++) {
        ks[t] = (on_gpu ? a->k.base : p->k) + t * a->k.token_stride;
        vs[t] = (on_gpu ? a->v.base : p->v) + t * a->v.token_stride;
    }
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const uint32_t n_q = n_in(p->q_start, i, a->n_q), n_k = n_in(p->k_start, i, a->n_k);

        for (uint32_t j = 0; j < n_q; j++)
            for (uint32_t h = 0; h < s->h; h++, r++) {
                const int64_t seen = s->causal ? (int64_t)n_k - n_q + j + 1 : n_k;
                const uint64_t from = n_k > 0 ? (uint64_t)p->k_start[i] : 0;

                query[r] = (kt_query){from, from + (uint64_t)(seen > 0 ? seen : 0), h * a->k.head_stride,
                                      h * a->v.head_stride};
                for (uint32_t d = 0; d < s->d_qk; d++)
                    q[(uint64_t)r * s->d_qk + d] =
                        kt_attend_value(type_of(s), row_of(p->q, &a->q, (uint64_t)p->q_start[i] + j, h), d);
            }
    }
    x->a = (kt_attention){.cache = type_of(s),
                          .n_rows = r,
                          .d_qk = s->d_qk,
                          .d_v = s->d_v,
                          .scale = (double)a->sm_scale,
                          .v_scale = 1,
                          .rows = query,
                          .q = q,
                          .k = ks,
                          .v = vs,
                          .n_tokens = a->n_k};
}

static bool collect(kt *k, problem *p, answer *x)
{
    uint8_t *out = kt_read(k, &p->out), *lse = kt_read(k, &p->lse);
    uint32_t r = 0;

    for (uint32_t i = 0; i < p->s.n_seqs; i++)
        for (uint32_t j = 0; j < n_in(p->q_start, i, p->args.n_q); j++)
            for (uint32_t h = 0; h < p->s.h; h++, r++) {
                const uint64_t t = (uint64_t)p->q_start[i] + j;

                x->out_at[r] = row_of(out, &p->args.out, t, h);
                x->lse_at[r] = row_of(lse, &p->args.lse, t, h);
                memcpy(row_of(p->out.want, &p->args.out, t, h), x->out_at[r], p->s.d_v * 2);
                memcpy(row_of(p->lse.want, &p->args.lse, t, h), x->lse_at[r], sizeof(float));
            }
    return kt_same(k, &p->out) && kt_same(k, &p->lse);
}

static bool judged(kt *k, problem *p)
{
    const uint64_t most = (uint64_t)p->args.n_q * p->s.h + 1;
    answer x = {.out_at = kt_host(k, most * sizeof *x.out_at),
                .lse_at = kt_host(k, most * sizeof *x.lse_at),
                .out = kt_host(k, most * p->s.d_v * sizeof *x.out),
                .lse = kt_host(k, most * sizeof *x.lse)};
    uint32_t bad = kt_word_value(k, p->word), want_bad = 0;

    for (uint32_t i = 0; i < p->s.n_seqs; i++)
        want_bad += !is_range(p->q_start, i, p->args.n_q) + !is_range(p->k_start, i, p->args.n_k);
    if (bad != want_bad)
        return kt_fail(k, "%u bad ranges counted, not %u", bad, want_bad);
    if (!collect(k, p, &x))
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
    (void)printf("      fp16 %u heads %u d %u %u causal %u padding %u %u, queries of keys", s->is_fp16, s->h, s->d_qk,
                 s->d_v, s->causal, s->front, s->behind);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        (void)printf(" %d/%d", s->n_q[i], s->n_k[i]);
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

static bool same_with_other_strides(kt *k, const shape *s)
{
    problem *p = kt_host(k, 2 * sizeof *p);
    shape flat = *s;
    const uint8_t *x, *y, *u, *v;

    flat.q_pad = flat.k_pad = flat.front = flat.behind = 0;
    make(k, &p[0], s);
    make(k, &p[1], &flat);
    if (!run_judged(k, &p[0]) || !run_judged(k, &p[1]))
        return false;
    x = p[0].out.want; /* as collected */
    y = p[1].out.want;
    u = p[0].lse.want;
    v = p[1].lse.want;
    for (uint64_t t = 0; t < p[1].args.n_q; t++)
        for (uint64_t h = 0; h < s->h; h++)
            if (memcmp(x + (t + s->front) * p[0].args.out.token_stride + h * p[0].args.out.head_stride,
                       y + t * p[1].args.out.token_stride + h * p[1].args.out.head_stride, s->d_v * 2) != 0 ||
                memcmp(u + (t + s->front) * p[0].args.lse.token_stride + h * p[0].args.lse.head_stride,
                       v + t * p[1].args.lse.token_stride + h * p[1].args.lse.head_stride, sizeof(float)) != 0) {
                (void)kt_fail(k, "token %" PRIu64 ", head %" PRIu64 ": other bits with other strides", t, h);
                return say(k, s);
            }
    return true;
}

/* ---- shapes ---- */

static shape basic(uint64_t seed, uint32_t n_seqs)
{
    return (shape){.seed = seed, .n_seqs = n_seqs, .h = 2, .d_qk = 192, .d_v = 128, .causal = 1, .q_scale = 1};
}

static bool random_shape(kt *k)
{
    static const uint32_t heads[] = {1, 2, 3, 5}, dims[] = {64, 80, 128, 192, 192, 192, 256},
                          v_dims[] = {64, 80, 112, 128, 128, 128};
    shape s = {.seed = rnd_u64(&k->r) % 1000000,
               .is_fp16 = kt_chance(k, 2),
               .n_seqs = 1 + (uint32_t)rnd_below(&k->r, 5),
               .h = KT_PICK(k, heads),
               .d_qk = KT_PICK(k, dims),
               .d_v = KT_PICK(k, v_dims),
               .causal = kt_chance(k, 2),
               .front = kt_chance(k, 2) ? (uint32_t)rnd_below(&k->r, 90) : 0,
               .behind = kt_chance(k, 2) ? (uint32_t)rnd_below(&k->r, 90) : 0,
               .q_pad = (uint32_t)rnd_below(&k->r, 10),
               .k_pad = (uint32_t)rnd_below(&k->r, 3),
               .q_scale = kt_chance(k, 3) ? 4 : 1};
    const uint32_t most = k->where == KT_CPU ? 70 : 300;

    for (uint32_t i = 0; i < s.n_seqs; i++) {
        s.n_q[i] = kt_chance(k, 6) ? 0 : (int32_t)rnd_below(&k->r, kt_chance(k, 2) ? most : 5);
        s.n_k[i] = kt_chance(k, 6) ? 0 : (int32_t)rnd_below(&k->r, most);
    }
    return same_with_other_strides(k, &s);
}

static bool around_tiles(kt *k)
{
    static const int32_t n[] = {1, 15, 16, 17, 63, 64, 65, 127, 128, 129};

    for (uint32_t causal = 0; causal < 2; causal++) {
        shape s = basic(1 + causal, 10);

        s.causal = causal;
        s.h = 1;
        s.k_pad = causal;
        for (uint32_t i = 0; i < 10; i++) {
            s.n_q[i] = n[i];
            s.n_k[i] = n[(i + 3) % 10];
        }
        if (!same_with_other_strides(k, &s))
            return false;
    }
    return true;
}

static bool bad_ranges(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(5, 4);

    for (uint32_t i = 0; i < 4; i++)
        s.n_q[i] = s.n_k[i] = 9;
    s.behind = 4;
    make(k, p, &s);
    p->k_start[4] = INT_MAX; /* the last one has no keys */
    if (!run_judged(k, p))
        return false;
    p->k_start[0] = -1; /* nor has the first one */
    p->q_start[4] = INT_MAX;
    return run_judged(k, p);
}

static bool falling_starts(kt *k)
{
    static const int32_t starts[][5] = {{0, 18, 9, 27, 36}, {-7, 9, 18, 27, 36}, {INT_MAX, INT_MIN, 3, 2, 1}};
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(6, 4);
    kvs_err err = {.msg = ""};

    for (uint32_t i = 0; i < 4; i++)
        s.n_q[i] = s.n_k[i] = 9;
    s.q_pad = 3;
    make(k, p, &s);
    for (int i = 0; i < 3; i++) {
        const uint8_t *out, *lse;

        memcpy(p->q_start, starts[i], sizeof starts[i]);
        memcpy(p->k_start, starts[2 - i], sizeof starts[i]);
        upload(k, p);
        if (launch(k, p, &err) != KVS_OK)
            return kt_fail(k, "%s", err.msg);
        if (kt_word_value(k, p->word) == 0)
            return kt_fail(k, "starts %d: no bad range counted", i);
        out = kt_read(k, &p->out);
        lse = kt_read(k, &p->lse);
        for (uint64_t t = 0; t < p->args.n_q; t++)
            for (uint64_t h = 0; h < s.h; h++) { /* rows may hold anything; what lies between them may not change */
                const uint64_t o = t * p->args.out.token_stride + h * p->args.out.head_stride,
                               l = t * p->args.lse.token_stride + h * p->args.lse.head_stride;

                memcpy(p->out.want + o, out + o, s.d_v * 2);
                memcpy(p->lse.want + l, lse + l, sizeof(float));
            }
        if (!kt_same(k, &p->out) || !kt_same(k, &p->lse))
            return false;
    }
    return true;
}

static bool replayed_with_other_bounds(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(7, 4);
    kt_graph g;

    for (uint32_t i = 0; i < 4; i++)
        s.n_q[i] = s.n_k[i] = 70;
    make(k, p, &s);
    upload(k, p);
    if (!kt_graph_make(k, launch, p, &g))
        return false;
    for (int32_t round = 0; round < 4; round++) {
        for (int32_t i = 0; i < 4; i++) {
            p->q_start[i + 1] = p->q_start[i] + 10 * ((i + round) % 4) + i;
            p->k_start[i + 1] = p->k_start[i] + 70 - 20 * ((i + round) % 4);
        }
        upload(k, p);
        if (!kt_graph_run(k, &g) || !judged(k, p))
            return false;
    }
    return true;
}

/* A prefix in two halves and merged is the prefix in one. */
static bool halves_merge(kt *k)
{
    problem *p = kt_host(k, 3 * sizeof *p);
    shape s = basic(8, 1);

    s.h = 1;
    s.causal = 0;
    s.n_q[0] = 30;
    s.n_k[0] = 100;
    for (int i = 0; i < 3; i++) {
        make(k, &p[i], &s);
        if (i > 0) {
            p[i].k_start[0] = i == 1 ? 0 : 37;
            p[i].k_start[1] = i == 1 ? 37 : 100;
        }
        if (!run_judged(k, &p[i]))
            return false;
    }
    for (uint32_t t = 0; t < 30; t++) {
        float dst[128], src[128], whole_lse, dst_lse, src_lse;

        memcpy(&whole_lse, p[0].lse.want + 4 * t, 4);
        memcpy(&dst_lse, p[1].lse.want + 4 * t, 4);
        memcpy(&src_lse, p[2].lse.want + 4 * t, 4);
        for (uint32_t d = 0; d < 128; d++) {
            dst[d] = (float)kt_attend_value(KT_BF16, p[1].out.want + 256 * t, d);
            src[d] = (float)kt_attend_value(KT_BF16, p[2].out.want + 256 * t, d);
        }
        kvs_merge_states(dst, &dst_lse, src, src_lse, 128);
        if (!(dst_lse - whole_lse < 1e-4f && whole_lse - dst_lse < 1e-4f))
            return kt_fail(k, "row %u: lse %g merged, %g whole", t, (double)dst_lse, (double)whole_lse);
        for (uint32_t d = 0; d < 128; d++) {
            const double whole = kt_attend_value(KT_BF16, p[0].out.want + 256 * t, d), off = (double)dst[d] - whole;

            if (!(off < 0.02 && off > -0.02))
                return kt_fail(k, "row %u, %u: %g merged, %g whole", t, d, (double)dst[d], whole);
        }
    }
    return true;
}

static bool nothing_to_do(kt *k)
{
    problem *p = kt_host(k, 2 * sizeof *p);
    shape s = basic(9, 2);
    kvs_err err = {.msg = ""};

    make(k, &p[0], &s);
    if (!run_judged(k, &p[0]))
        return false;
    s.n_seqs = 0;
    s.behind = 3;
    make(k, &p[1], &s);
    upload(k, &p[1]);
    return launch(k, &p[1], &err) == KVS_OK || kt_fail(k, "%s", err.msg);
}

static bool refusals(kt *k)
{
    problem *p = kt_host(k, sizeof *p);
    shape s = basic(10, 1);

    s.n_q[0] = s.n_k[0] = 5;
    make(k, p, &s);
    for (int i = 0; i < 7; i++) {
        const kvs_mha_ragged_args good = p->args;
        kvs_err err = {.msg = ""};
        kvs_status got;

        switch (i) {
        case 0:
            p->args.d_qk = 200;
            break;
        case 1:
            p->args.d_v = 144;
            break;
        case 2:
            p->args.h = 0;
            break;
        case 3:
            p->args.causal = 2;
            break;
        case 4:
            p->args.k.base += 2;
            break;
        case 5:
            p->args.k_start = NULL;
            break;
        case 6:
            p->args.out.head_stride = 128;
            break;
        }
        got = launch(k, p, &err);
        if (got != KVS_E_INVALID || err.msg[0] == 0)
            return kt_fail(k, "refusal %d: status %d, \"%s\"", i, (int)got, err.msg);
        p->args = good;
    }
    return run_judged(k, p);
}

static bool long_prefixes(kt *k)
{
    for (uint32_t causal = 0; causal < 2; causal++) {
        problem *p = kt_host(k, sizeof *p);
        shape s = basic(20 + causal, 3);

        s.causal = causal;
        s.h = k->where == KT_CPU ? 1 : 16;
        for (int32_t i = 0; i < 3; i++) {
            s.n_q[i] = k->where == KT_CPU ? 70 : 200 + 50 * i;
            s.n_k[i] = k->where == KT_CPU ? 500 : 3000 + 501 * i;
        }
        make(k, p, &s);
        if (!run_judged(k, p))
            return false;
    }
    return true;
}

static const kt_fixed fixed[] = {{"around tiles", around_tiles, false},
                                 {"bad ranges", bad_ranges, false},
                                 {"falling starts", falling_starts, false},
                                 {"replayed with other bounds", replayed_with_other_bounds, false},
                                 {"halves merge", halves_merge, false},
                                 {"nothing to do", nothing_to_do, false},
                                 {"refusals", refusals, false},
                                 {"long prefixes", long_prefixes, true}};

const kt_op kt_op_mha_ragged = {.name = "mha_ragged",
                                .equality = "row RMS",
                                .fixed = fixed,
                                .n_fixed = sizeof fixed / sizeof *fixed,
                                .random = random_shape,
                                .n_cpu = 50,
                                .n_cuda = 300,
                                .n_subset = 8};
