/* merge: against fp64, and on CUDA bit for bit against the C function. */
#include <math.h>
#include <string.h>

#include "kernels/merge.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"

/* [n_tokens][n_heads] rows in memory of random bytes, so that what lies between them is looked at. */
typedef struct operand {
    kt_buf buf;
    kvs_strided dev, want;
} operand;

typedef struct problem {
    kvs_merge_args args;
    operand out, out_lse, prefix, prefix_lse, suffix, suffix_lse;
} problem;

static operand make_operand(kt *k, const char *name, const kvs_merge_args *a, uint64_t row, uint64_t value)
{
    const uint64_t pad = kt_chance(k, 2) ? 0 : value * rnd_below(&k->r, 9), head = row + pad;
    const bool heads_outside = kt_chance(k, 4);
    const uint64_t front = kt_chance(k, 2) ? 0 : value * (1 + rnd_below(&k->r, 7));
    operand o;

    o.dev.head_stride = heads_outside ? head * (a->n_tokens > 0 ? a->n_tokens : 1) + pad : head;
    o.dev.token_stride = heads_outside ? head : head * a->n_heads + pad;
    o.buf = kt_buf_make(k, name, front + (head + pad) * ((uint64_t)a->n_tokens + 1) * (a->n_heads + 1));
    o.want = o.dev;
    o.dev.base = o.buf.dev + front;
    o.want.base = o.buf.want + front;
    return o;
}

static uint8_t *at(const kvs_strided *o, uint64_t t, uint64_t h)
{
    return o->base + t * o->token_stride + h * o->head_stride;
}

static float lse_at(const kvs_strided *o, uint64_t t, uint64_t h)
{
    float f;

    memcpy(&f, at(o, t, h), sizeof f);
    return f;
}

/* What a decode leaves: vectors of size 1, sums of any size, states without tokens (whose vectors stay garbage). */
static void fill_states(kt *k, const kvs_merge_args *a, const operand *v, const operand *l)
{
    for (uint64_t t = 0; t < a->n_tokens; t++)
        for (uint64_t h = 0; h < a->n_heads; h++) {
            float lse = (float)(rnd_normal(&k->r) * 8);

            if (kt_chance(k, 5))
                lse = kt_chance(k, 2) ? -INFINITY : INFINITY;
            else if (kt_chance(k, 8))
                lse = kt_chance(k, 2) ? 3e38f : -500;
            memcpy(at(&l->want, t, h), &lse, sizeof lse);
            if (!isinf(lse))
                for (uint32_t i = 0; i < a->dim; i++)
                    kt_value_set(at(&v->want, t, h), a->src_type, i, (float)rnd_normal(&k->r));
        }
}

static void make(kt *k, problem *w, uint32_t n_tokens, uint32_t n_heads, uint32_t dim, uint32_t src, uint32_t out)
{
    kvs_merge_args *a = &w->args;
    const uint64_t s = kvs_value_bytes(src), o = kvs_value_bytes(out);

    *a = (kvs_merge_args){.n_tokens = n_tokens,
                          .n_heads = n_heads,
                          .dim = dim,
                          .src_type = src,
                          .out_type = out,
                          .n_context = kt_chance(k, 2) ? n_tokens + 3 : (uint32_t)rnd_below(&k->r, n_tokens + 1)};
    w->out = make_operand(k, "out", a, dim * o, o);
    w->out_lse = make_operand(k, "out_lse", a, 4, 4);
    w->prefix = make_operand(k, "prefix", a, dim * s, s);
    w->prefix_lse = make_operand(k, "prefix_lse", a, 4, 4);
    w->suffix = make_operand(k, "suffix", a, dim * s, s);
    w->suffix_lse = make_operand(k, "suffix_lse", a, 4, 4);
    fill_states(k, a, &w->prefix, &w->prefix_lse);
    fill_states(k, a, &w->suffix, &w->suffix_lse);
    a->out = w->out.dev;
    a->out_lse = w->out_lse.dev;
    a->prefix = w->prefix.dev;
    a->prefix_lse = w->prefix_lse.dev;
    a->suffix = w->suffix.dev;
    a->suffix_lse = w->suffix_lse.dev;
}

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *w = args;

    return KT_RUN(k, err, kvs_merge(&w->args, err), kvs_merge_cuda(&w->args, k->stream, err));
}

static double rounding(uint32_t type)
{
    return type == KVS_VALUE_BF16 ? 0x1p-8 : type == KVS_VALUE_FP16 ? 0x1p-11 : 0x1p-22;
}

/* One row in fp64; the bits that came out are then what must stay everywhere else. */
static bool row_is_right(kt *k, problem *w, uint64_t t, uint64_t h, uint8_t *got, const uint8_t *got_lse)
{
    const kvs_merge_args *a = &w->args;
    const bool has_prefix = t < a->n_context;
    const float lp = has_prefix ? lse_at(&w->prefix_lse.want, t, h) : -INFINITY, ls = lse_at(&w->suffix_lse.want, t, h);
    const bool p = !isinf(lp), s = !isinf(ls);
    const double m = !p   ? (double)ls
                     : !s ? (double)lp
                          : fmax((double)lp, (double)ls),
                 ep = p ? exp((double)lp - m) : 0, es = s ? exp((double)ls - m) : 0;
    float lse;

    memcpy(&lse, got_lse, sizeof lse);
    if (!p && !s ? lse != -INFINITY : !(fabs((double)lse - (m + log(ep + es))) <= 1e-6 * fmax(1.0, fabs(m))))
        return kt_fail(k, "token %u, head %u: lse %g", (unsigned)t, (unsigned)h, (double)lse);
    for (uint32_t i = 0; i < a->dim; i++) {
        const double x = p ? kt_value(at(&w->prefix.want, t, h), a->src_type, i) : 0,
                     y = s ? kt_value(at(&w->suffix.want, t, h), a->src_type, i) : 0,
                     want = !p && !s ? 0 : (x * ep + y * es) / (ep + es), g = kt_value(got, a->out_type, i),
                     size = fmax(fabs(x), fabs(y));
        uint8_t copy[4];

        if (!p != !s) { /* a copy: the one rounding to the type of the output */
            kt_value_set(copy, a->out_type, 0, (float)want);
            if (memcmp(copy, got + (uint64_t)i * kvs_value_bytes(a->out_type), kvs_value_bytes(a->out_type)) != 0)
                return kt_fail(k, "token %u, head %u, value %u: %g is not a copy", (unsigned)t, (unsigned)h, i, g);
        }
        /* The least step of fp16 is 2^-24. */
        if (!(fabs(g - want) <= rounding(a->out_type) * size + 1e-6 * size + (a->out_type == KVS_VALUE_FP16) * 0x1p-25))
            return kt_fail(k, "token %u, head %u, value %u: %g, not %g", (unsigned)t, (unsigned)h, i, g, want);
        kt_error(k, size >= 0x1p-14 ? fabs(g - want) / size : 0); /* not of subnormal halves */
    }
    return true;
}

/* Every row, and nothing beside the rows. */
static bool merged(kt *k, problem *w)
{
    const kvs_merge_args *a = &w->args;
    const uint8_t *out = kt_read(k, &w->out.buf), *out_lse = kt_read(k, &w->out_lse.buf);
    const uint64_t row = (uint64_t)a->dim * kvs_value_bytes(a->out_type);

    for (uint64_t t = 0; t < a->n_tokens; t++)
        for (uint64_t h = 0; h < a->n_heads; h++) {
            uint8_t *want = at(&w->out.want, t, h), *want_lse = at(&w->out_lse.want, t, h);

            memcpy(want, out + (want - w->out.buf.want), row);
            memcpy(want_lse, out_lse + (want_lse - w->out_lse.buf.want), sizeof(float));
            if (!row_is_right(k, w, t, h, want, want_lse))
                return false;
        }
    return kt_same(k, &w->out.buf) && kt_same(k, &w->out_lse.buf) && kt_same(k, &w->prefix.buf) &&
           kt_same(k, &w->suffix.buf);
}

/* CUDA: the vectors of the C function, bit for bit; an lse within one unit of its last place. */
static bool as_in_c(kt *k, problem *w)
{
    kvs_merge_args a = w->args;
    kvs_err err = {.msg = ""};
    uint8_t *row = kt_host(k, (uint64_t)a.dim * 4);

    a.prefix = w->prefix.want;
    a.prefix_lse = w->prefix_lse.want;
    a.suffix = w->suffix.want;
    a.suffix_lse = w->suffix_lse.want;
    a.n_tokens = 1;
    a.n_heads = 1;
    for (uint64_t t = 0; t < w->args.n_tokens; t++)
        for (uint64_t h = 0; h < w->args.n_heads; h++) {
            const uint64_t bytes = (uint64_t)a.dim * kvs_value_bytes(a.out_type);
            float lse = 0, got = lse_at(&w->out_lse.want, t, h);

            a.n_context = t < w->args.n_context;
            a.prefix.base = at(&w->prefix.want, t, h);
            a.prefix_lse.base = at(&w->prefix_lse.want, t, h);
            a.suffix.base = at(&w->suffix.want, t, h);
            a.suffix_lse.base = at(&w->suffix_lse.want, t, h);
            a.out = (kvs_strided){row, bytes, bytes};
            a.out_lse = (kvs_strided){(uint8_t *)&lse, 4, 4};
            if (kvs_merge(&a, &err) != KVS_OK)
                return kt_fail(k, "%s", err.msg);
            if (memcmp(row, at(&w->out.want, t, h), bytes) != 0)
                return kt_fail(k, "token %u, head %u: other bits than the C function", (unsigned)t, (unsigned)h);
            if (lse != got && !(fabsf(lse - got) <= fabsf(lse) * 0x1p-23f))
                return kt_fail(k, "token %u, head %u: lse %a, in C %a", (unsigned)t, (unsigned)h, (double)got,
                               (double)lse);
        }
    return true;
}

static bool run(kt *k, problem *w)
{
    kvs_err err = {.msg = ""};
    operand *const all[] = {&w->out, &w->out_lse, &w->prefix, &w->prefix_lse, &w->suffix, &w->suffix_lse};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        kt_upload(k, &all[i]->buf);
    if (launch(k, w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return merged(k, w) && (k->where == KT_CPU || as_in_c(k, w));
}

static bool random_shape(kt *k)
{
    static const uint32_t dims[] = {1, 7, 64, 128, 128, 256, 512, 512, 513, 1024}, heads[] = {1, 2, 5, 16, 128};
    problem w;

    make(k, &w, (uint32_t)rnd_below(&k->r, 12), KT_PICK(k, heads), KT_PICK(k, dims), 1 + (uint32_t)rnd_below(&k->r, 3),
         1 + (uint32_t)rnd_below(&k->r, 3));
    return run(k, &w);
}

static bool in_place(kt *k)
{
    for (int into_suffix = 0; into_suffix < 2; into_suffix++) {
        problem w;
        operand *o, *l;
        uint8_t *before, *lse_before;
        kvs_err err = {.msg = ""};

        make(k, &w, 9, 16, 512, KVS_VALUE_FP32, KVS_VALUE_FP32);
        o = into_suffix ? &w.suffix : &w.prefix;
        l = into_suffix ? &w.suffix_lse : &w.prefix_lse;
        w.args.n_context = 9;
        kt_upload(k, &w.out.buf);
        kt_upload(k, &w.out_lse.buf);
        if (!run(k, &w)) /* apart first */
            return false;
        kt_upload(k, &o->buf);
        kt_upload(k, &l->buf);
        w.args.out = o->dev;
        w.args.out_lse = l->dev;
        if (launch(k, &w, &err) != KVS_OK)
            return kt_fail(k, "%s", err.msg);
        before = kt_read(k, &o->buf);
        lse_before = kt_read(k, &l->buf);
        for (uint64_t t = 0; t < 9; t++)
            for (uint64_t h = 0; h < 16; h++)
                if (memcmp(before + (at(&o->want, t, h) - o->buf.want), at(&w.out.want, t, h), 2048) != 0 ||
                    memcmp(lse_before + (at(&l->want, t, h) - l->buf.want), at(&w.out_lse.want, t, h), 4) != 0)
                    return kt_fail(k, "in place, token %u, head %u: other bits", (unsigned)t, (unsigned)h);
    }
    return true;
}

static bool no_lse_wanted(kt *k)
{
    problem w;
    kvs_err err = {.msg = ""};

    make(k, &w, 3, 4, 128, KVS_VALUE_BF16, KVS_VALUE_BF16);
    w.args.out_lse.base = NULL;
    kt_upload(k, &w.out_lse.buf);
    kt_upload(k, &w.suffix.buf);
    kt_upload(k, &w.suffix_lse.buf);
    kt_upload(k, &w.prefix.buf);
    kt_upload(k, &w.prefix_lse.buf);
    if (launch(k, &w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return kt_same(k, &w.out_lse.buf);
}

/* Without a prefix its pointers are not looked at. */
static bool no_context(kt *k)
{
    problem w;

    make(k, &w, 5, 4, 512, KVS_VALUE_FP32, KVS_VALUE_BF16);
    w.args.n_context = 0;
    w.args.prefix = w.args.prefix_lse = (kvs_strided){NULL, 0, 0};
    return run(k, &w);
}

static const kt_fixed fixed[] = {
    {"in place", in_place, false}, {"no lse wanted", no_lse_wanted, false}, {"no prefix", no_context, false}};

const kt_op kt_op_merge = {.name = "merge",
                           .equality = "of the greater value",
                           .fixed = fixed,
                           .n_fixed = sizeof fixed / sizeof *fixed,
                           .random = random_shape,
                           .n_cpu = 50,
                           .n_cuda = 500,
                           .n_subset = 10};
