/* blockwise_gather: pages of 584 and 528 bytes a token into bf16. */
#include <string.h>

#include "kernels/blockwise.h"
#include "proto/layout.h"
#include "tests/kernels/kt_gathers.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    return kt_shape_random(k, kt_chance(k, 2) ? KVS_FORMAT_fp8_blk584 : KVS_FORMAT_fp8_blk528, 0, max_bytes);
}

static void fit(kt_shape *s)
{
    const uint64_t unit = s->plane[0].format == KVS_FORMAT_fp8_blk584 ? 576 : 512;

    s->plane[0].page_bytes = (s->plane[0].page_bytes + unit - 1) / unit * unit;
}

static void make(kt *k, kt_gather *g)
{
    kvs_blockwise_gather_args *a = kt_host(k, sizeof *a);

    g->out[g->n_out++] = kt_rows_make(k, "dst", g->list.args.n_rows, 1024, 2);
    *a = (kvs_blockwise_gather_args){
        .view = g->view, .list = g->list.args, .dst = kt_rows_dev(&g->out[0]), .dst_stride = g->out[0].stride};
    g->args = a;
}

static void expect(const kt_gather *g, uint32_t row, kt_place at)
{
    const kt_shape *s = &g->pool.shape;
    const bool v4 = s->plane[0].format == KVS_FORMAT_fp8_blk584;
    const uint32_t quantised = v4 ? 448 : 512, tile = v4 ? 64 : 32, tail = v4 ? 8 : 16;
    const uint8_t *page = kt_page(&g->pool, s->layer, 0, at.block),
                  *from = page + (uint64_t)at.at * s->plane[0].row_bytes,
                  *codes = page + (uint64_t)s->tokens * s->plane[0].row_bytes + (uint64_t)at.at * tail;
    uint8_t *to = kt_rows_want(&g->out[0], row);

    for (uint32_t i = 0; i < quantised; i++)
        kt_value_set(to, KVS_VALUE_BF16, i, kt_dequantised(from[i], (float)kt_ue8m0_value(codes[i / tile])));
    memcpy(to + quantised * 2ull, from + quantised, (512 - quantised) * 2ull);
}

static kvs_status launch(kt *k, void *gather, kvs_err *err)
{
    kt_gather *g = gather;

    return KT_RUN(k, err, kvs_blockwise_gather(g->args, g->word, err),
                  kvs_blockwise_gather_cuda(g->args, g->word, k->stream, err));
}

static const kt_gather_op op = {
    .shape = shape, .fit = fit, .format = KVS_FORMAT_fp8_blk584, .make = make, .expect = expect, .launch = launch};
KT_GATHER_CASES(op)

static bool unpadded_pages_are_refused(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_fp8_blk584, 0, 64, 3);
    kvs_err err = {.msg = ""};
    kt_gather g = {.word = kt_word(k)};

    g.pool = kt_pool_make(k, &s);
    g.list = kt_list_make(k, &g.pool, 1, 20, false);
    g.view = kt_view(k, &g.pool, 0, 0);
    make(k, &g);
    kt_upload(k, &g.pool.buf);
    kt_upload(k, &g.out[0].buf);
    if (launch(k, &g, &err) != KVS_E_INVALID || strstr(err.msg, "37376 is not a multiple of 576") == NULL)
        return kt_fail(k, "a page of 37376 bytes: %s", err.msg);
    return kt_same(k, &g.out[0].buf);
}

static const kt_fixed fixed[] = {KT_GATHER_FIXED, {"unpadded pages are refused", unpadded_pages_are_refused, false}};

const kt_op kt_op_blockwise_gather = {.name = "blockwise_gather",
                                      .equality = "byte-equal",
                                      .fixed = fixed,
                                      .n_fixed = sizeof fixed / sizeof *fixed,
                                      .random = random_shape,
                                      .n_cpu = 200,
                                      .n_cuda = 600,
                                      .n_subset = 12};
