/* mla_decode: against fp64, and bit for bit between layouts.  test_mla_decode.c and test_gpu_kernels.c look at much
 * more of it; here it runs as every other operation does. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/mla_oracle.h"
#include "proto/layout.h"
#include "tests/gpu/gpu_case.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"
#include "tests/support/mla_case.h"

enum { TEXT = 300 };

static bool is_big(const mla_case *c)
{
    uint64_t tokens = 0;

    for (uint32_t i = 0; i < c->args.n_seqs; i++)
        tokens += c->lens[i] > 0 ? (uint64_t)c->lens[i] : 0;
    return tokens * c->args.s_q * c->args.h_q * 2176 > 50000000;
}

/* Run `c` on `view`, which lies where the operation runs (NULL: upload the case's own pool); results are back in c. */
static bool run_case(kt *k, mla_case *c, const kvs_view *view)
{
    char text[TEXT] = "setting up";
    bool good;

    if (view == NULL)
        kt_mutate(k, &c->args.view, (uint64_t)(c->args.view.base - c->pool));
    if (k->where == KT_CPU) {
        kvs_err err = {.msg = ""};

        if (view != NULL)
            c->args.view = *view;
        if (mla_case_run(c, &err) != KVS_OK)
            return kt_fail(k, "%s", err.msg);
        return mla_case_guards_hold(c) || kt_fail(k, "something beside the results was written");
    }
#ifdef KVS_CUDA
    {
        gpu_case g;

        good = gpu_case_init(&g, c);
        if (good && view != NULL)
            g.args.view = *view;
        good = good && gpu_case_run(&g, text, sizeof text);
        /* Above 50 MFLOP: by the oracle of the GPU, which a test of its own compares with that of the processor. */
        if (good && view == NULL && is_big(c))
            good = gpu_case_judge(&g, text, sizeof text);
        c->result = g.result;
        gpu_case_fini(&g);
    }
#else
    good = false;
#endif
    return good || kt_fail(k, "%s", text);
}

/* Against the oracle of the cpu: c->args.view is host memory. */
static bool judge(kt *k, const mla_case *c)
{
    const size_t rows = (size_t)c->args.n_seqs * c->args.s_q * c->args.h_q;
    double *out = kt_host(k, (rows + 1) * KVS_MLA_LATENT * sizeof *out), *lse = kt_host(k, (rows + 1) * sizeof *lse);
    uint32_t bad;
    oracle_verdict v;
    char text[ORACLE_TEXT_BYTES];

    if (k->where == KT_CUDA && is_big(c))
        return c->result.bad == 0 || kt_fail(k, "%u bad entries", c->result.bad); /* the rest by run_case */
    bad = oracle_mla_decode(&c->args, out, lse);
    v = oracle_compare(&c->args, out, lse);
    if (!oracle_accepts(&v, text))
        return kt_fail(k, "%s", text);
    if (bad != c->result.bad)
        return kt_fail(k, "%u bad entries counted, not %u", c->result.bad, bad);
    kt_error(k, v.max_error);
    return true;
}

static bool open_case(kt *k, mla_case *c, const mla_shape *s)
{
    return mla_case_init(c, s) || kt_fail(k, "no memory");
}

static mla_shape contiguous(const mla_shape *s)
{
    mla_shape plain = *s;

    plain.n_layers = 1;
    plain.layer = 0;
    plain.row_pad = plain.page_pad = 0;
    plain.slot_pad = 0;
    plain.spare_blocks = plain.table_spare = plain.operand_pad = 0;
    plain.block_order = true;
    return plain;
}

static bool same_in_both_layouts(kt *k, const mla_shape *s)
{
    const mla_shape plain = contiguous(s);
    mla_case a, b;
    bool good;

    if (!open_case(k, &a, s))
        return false;
    good = run_case(k, &a, NULL) && judge(k, &a);
    /* The number of parts that 0 stands for depends on the width of the table, which differs. */
    if (good && s->parts > 0) {
        good = open_case(k, &b, &plain);
        if (good) {
            good = run_case(k, &b, NULL);
            if (good && !mla_case_same_bits(&a, &b))
                good = kt_fail(k, "other bits than from a contiguous cache");
            mla_case_fini(&b);
        }
    }
    mla_case_fini(&a);
    return good;
}

static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16, KVS_FORMAT_mla_fp8, KVS_FORMAT_fp8_ds_mla};

static bool random_shape(kt *k)
{
    static const uint32_t heads[] = {1, 2, 3, 5, 8, 16, 17}, pages[] = {1, 2, 3, 16, 17, 32, 64, 256};
    static const uint32_t layers[] = {1, 2, 3, 5}, parts[] = {0, 1, 2, 3, 4, 8, 64, 256}, many[] = {32, 33, 64, 128};
    mla_shape s = {.seed = rnd_u64(&k->r) % 1000000,
                   .format = KT_PICK(k, formats),
                   .n_layers = KT_PICK(k, layers),
                   .tokens_per_block = KT_PICK(k, pages),
                   .row_pad = 16 * (uint32_t)rnd_below(&k->r, 3),
                   .page_pad = 16 * (uint32_t)rnd_below(&k->r, 3),
                   .slot_pad = 16 * rnd_below(&k->r, 100),
                   .n_seqs = 1 + (uint32_t)rnd_below(&k->r, 4),
                   .s_q = kt_chance(k, 2) ? 1 : 1 + (uint32_t)rnd_below(&k->r, 8),
                   .h_q = KT_PICK(k, heads),
                   .parts = KT_PICK(k, parts),
                   .fixed_split = kt_chance(k, 4),
                   .spare_blocks = (uint32_t)rnd_below(&k->r, 10),
                   .table_spare = (uint32_t)rnd_below(&k->r, 6),
                   .operand_pad = (uint32_t)rnd_below(&k->r, 10),
                   .q_scale = kt_chance(k, 3) ? 4 : 1};

    if (k->where == KT_CUDA && kt_chance(k, 3))
        s.h_q = KT_PICK(k, many);
    s.layer = (uint32_t)rnd_below(&k->r, s.n_layers);
    for (uint32_t i = 0; i < s.n_seqs; i++)
        s.len[i] = (int32_t)rnd_below(&k->r, kt_chance(k, 4) ? 6 : 120);
    return same_in_both_layouts(k, &s);
}

static bool around_pages(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61}, pages[] = {1, 16, 64};

    for (uint32_t i = 0; i < 18; i++) {
        const int32_t page = (int32_t)pages[i % 3];
        const mla_shape s = {.seed = i,
                             .format = i < 9 ? formats[i % 2] : formats[2 + i % 2],
                             .n_layers = layers[i / 3 % 3],
                             .layer = i % 3 == 0   ? 0
                                      : i % 3 == 1 ? layers[i / 3 % 3] / 2
                                                   : layers[i / 3 % 3] - 1,
                             .tokens_per_block = pages[i % 3],
                             .n_seqs = 6,
                             .h_q = 3,
                             .s_q = 1 + i % 3,
                             .parts = 1 + i % 4,
                             .slot_pad = 16 * (uint64_t)i,
                             .spare_blocks = 5,
                             .table_spare = 3,
                             .len = {0, 1, page - 1, page, page + 1, 2 * page + 7}};

        if (!same_in_both_layouts(k, &s))
            return false;
    }
    return true;
}

/* Shapes that other kernels' tests take, on a view of the middle one of 3 layers; `here` a processor gets less. */
static const struct {
    const char *name;
    uint32_t format, page, h_q, n_seqs, parts;
    int32_t len;
    bool varlen;
} UPSTREAM[] = {{"FlashMLA dense decode", KVS_FORMAT_mla_bf16, 64, 128, 4, 1, 1024, false},
                {"FlashMLA dense decode, fp8", KVS_FORMAT_mla_fp8, 64, 128, 4, 1, 1024, false},
                {"FlashInfer MLA dense", KVS_FORMAT_mla_bf16, 64, 128, 4, 0, 1024, true},
                {"FlashInfer MLA dense, fp8", KVS_FORMAT_mla_fp8, 32, 128, 4, 0, 1024, true},
                {"FlashAttention MLA dense", KVS_FORMAT_mla_bf16, 64, 16, 4, 1, 1024, true},
                {"CUTLASS MLA decode, cross-layer", KVS_FORMAT_mla_bf16, 64, 128, 4, 1, 512, false},
                {"CUTLASS MLA decode", KVS_FORMAT_mla_bf16, 64, 16, 8, 0, 4096, true},
                {"CUTLASS MLA decode", KVS_FORMAT_mla_fp16, 64, 64, 4, 0, 1024, true},
                {"CUTLASS MLA decode", KVS_FORMAT_mla_fp8, 64, 32, 4, 0, 8192, true},
                {"Triton decode, cross-layer", KVS_FORMAT_mla_bf16, 16, 16, 3, 8, 1027, false},
                {"Triton decode, page 1", KVS_FORMAT_mla_bf16, 1, 32, 3, 8, 1025, false},
                {"Triton decode, fp8", KVS_FORMAT_mla_fp8, 16, 32, 3, 8, 1025, false},
                {"fp8_ds_mla, dense", KVS_FORMAT_fp8_ds_mla, 64, 128, 4, 4, 1024, true}};

static bool upstream_shapes(kt *k)
{
    const bool here = k->where == KT_CPU;

    for (size_t i = 0; i < sizeof UPSTREAM / sizeof *UPSTREAM; i++) {
        mla_shape s = {.seed = i,
                       .format = UPSTREAM[i].format,
                       .n_layers = 3,
                       .layer = 1,
                       .tokens_per_block = UPSTREAM[i].page,
                       .n_seqs = UPSTREAM[i].n_seqs,
                       .h_q = here ? UPSTREAM[i].h_q / 16 : UPSTREAM[i].h_q,
                       .parts = UPSTREAM[i].parts,
                       .spare_blocks = 3};

        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] =
                (here ? UPSTREAM[i].len / 16 : UPSTREAM[i].len) - (UPSTREAM[i].varlen ? (int32_t)n * 61 % 200 : 0);
        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] = s.len[n] > 0 ? s.len[n] : 1;
        if (!same_in_both_layouts(k, &s))
            return kt_fail(k, "%s", UPSTREAM[i].name);
    }
    return true;
}

static bool bad_entries_of(kt *k, uint32_t format)
{
    const mla_shape s = {.seed = 16,
                         .format = format,
                         .n_layers = 3,
                         .layer = 1,
                         .h_q = 4,
                         .s_q = 2,
                         .n_seqs = 4,
                         .parts = 3,
                         .spare_blocks = 2,
                         .len = {70, 33, 16, 50}};
    mla_case c;
    bool good;

    if (!open_case(k, &c, &s))
        return false;
    c.table[0] = -1;
    c.table[3] = (int32_t)c.args.view.n_blocks;
    c.table[c.args.table_stride + 2] = INT32_MIN;
    c.table[2 * c.args.table_stride] = INT32_MAX; /* the whole of the third sequence */
    c.lens[3] = -5;
    good = run_case(k, &c, NULL) && judge(k, &c);
    mla_case_fini(&c);
    return good;
}

static bool bad_entries(kt *k)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (!bad_entries_of(k, formats[i]))
            return false;
    return true;
}

/* The pages of a near case in blocks far apart: the same bits. */
static bool far_pages_of(kt *k, uint32_t format)
{
    const mla_shape s = {.seed = 15,
                         .format = format,
                         .tokens_per_block = 64,
                         .n_seqs = 4,
                         .h_q = 2,
                         .parts = 2,
                         .len = {64, 64, 64, 64}};
    const kt_shape shape = kt_shape_far(format, 0, 64);
    kt_pool pool = kt_pool_make(k, &shape);
    kvs_view view = kt_view(k, &pool, pool.shape.layer, 0);
    mla_case near, far;
    bool good = open_case(k, &near, &s) && open_case(k, &far, &s);

    if (!good)
        return false;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t id = pool.far_id[KT_FAR_IDS - 1 - i];

        memcpy(kt_page(&pool, pool.shape.layer, 0, id), mla_case_row(&near, i, 0), near.args.view.page_bytes);
        far.table[i * far.args.table_stride] = (int32_t)id;
    }
    kt_upload(k, &pool.buf);
    good = run_case(k, &near, NULL) && judge(k, &near) && run_case(k, &far, &view) &&
           (far.result.bad == 0 || kt_fail(k, "%u bad entries", far.result.bad)) &&
           (mla_case_same_bits(&near, &far) || kt_fail(k, "other bits than nearby")) && kt_same(k, &pool.buf);
    mla_case_fini(&near);
    mla_case_fini(&far);
    return good;
}

static bool beyond_4_gib(kt *k)
{
    return far_pages_of(k, KVS_FORMAT_mla_bf16);
}

static bool fp8_beyond_4_gib(kt *k)
{
    return far_pages_of(k, KVS_FORMAT_fp8_ds_mla);
}

static const kt_fixed fixed[] = {{"lengths around a page in layers of 1, 3 and 61", around_pages, false},
                                 {"bad entries and lengths", bad_entries, false},
                                 {"shapes of other kernels' tests", upstream_shapes, true},
                                 {"beyond 4 GiB", beyond_4_gib, true},
                                 {"fp8 beyond 4 GiB", fp8_beyond_4_gib, true}};

const kt_op kt_op_mla_decode = {.name = "mla_decode",
                                .equality = "row RMS",
                                .fixed = fixed,
                                .n_fixed = sizeof fixed / sizeof *fixed,
                                .random = random_shape,
                                .n_cpu = 60,
                                .n_cuda = 600,
                                .n_subset = 5};
