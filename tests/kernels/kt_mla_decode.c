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

enum { TEXT = 300, VALUE = 2, PAGE = 64 * 1152 };

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
    const uint32_t bad = oracle_mla_decode(&c->args, out, lse);
    const oracle_verdict v = oracle_compare(&c->args, out, lse);
    char text[ORACLE_TEXT_BYTES];

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

static bool random_shape(kt *k)
{
    static const uint32_t heads[] = {1, 2, 3, 5, 8, 16, 17}, pages[] = {1, 2, 3, 16, 17, 32, 64, 256};
    static const uint32_t layers[] = {1, 2, 3, 5}, parts[] = {0, 1, 2, 3, 4, 8, 64, 256};
    mla_shape s = {.seed = rnd_u64(&k->r) % 1000000,
                   .format = kt_chance(k, 5) ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16,
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

    s.layer = (uint32_t)rnd_below(&k->r, s.n_layers);
    for (uint32_t i = 0; i < s.n_seqs; i++)
        s.len[i] = (int32_t)rnd_below(&k->r, kt_chance(k, 4) ? 6 : 120);
    return same_in_both_layouts(k, &s);
}

static bool around_pages(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61}, pages[] = {1, 16, 64};

    for (uint32_t i = 0; i < 9; i++) {
        const int32_t page = (int32_t)pages[i % 3];
        const mla_shape s = {.seed = i,
                             .n_layers = layers[i / 3],
                             .layer = i % 3 == 0   ? 0
                                      : i % 3 == 1 ? layers[i / 3] / 2
                                                   : layers[i / 3] - 1,
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

static bool bad_entries(kt *k)
{
    const mla_shape s = {.seed = 16,
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

/* The pages of a near case in blocks far apart: the same bits. */
static bool beyond_4_gib(kt *k)
{
    const mla_shape s = {
        .seed = 15, .tokens_per_block = 64, .n_seqs = 4, .h_q = 2, .parts = 2, .len = {64, 64, 64, 64}};
    const kt_shape shape = kt_shape_far(KVS_FORMAT_mla_bf16, 0, 64);
    kt_pool pool = kt_pool_make(k, &shape);
    kvs_view view = kt_view(k, &pool, pool.shape.layer, 0);
    mla_case near, far;
    bool good = open_case(k, &near, &s) && open_case(k, &far, &s);

    if (!good)
        return false;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t id = pool.far_id[KT_FAR_IDS - 1 - i];

        memcpy(kt_page(&pool, pool.shape.layer, 0, id), mla_case_row(&near, i, 0), PAGE);
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

static const kt_fixed fixed[] = {{"lengths around a page in layers of 1, 3 and 61", around_pages, false},
                                 {"bad entries and lengths", bad_entries, false},
                                 {"beyond 4 GiB", beyond_4_gib, true}};

const kt_op kt_op_mla_decode = {.name = "mla_decode",
                                .equality = "row RMS",
                                .fixed = fixed,
                                .n_fixed = sizeof fixed / sizeof *fixed,
                                .random = random_shape,
                                .n_cpu = 60,
                                .n_cuda = 600,
                                .n_subset = 5};
