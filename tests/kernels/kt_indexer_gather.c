/* indexer_gather: keys and scales bit for bit, from the two arrays of a page. */
#include <string.h>

#include "kernels/indexer.h"
#include "proto/layout.h"
#include "tests/kernels/kt_gathers.h"
#include "tests/kernels/kt_ops.h"

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    return kt_shape_random(k, KVS_FORMAT_indexer_fp8, 0, max_bytes);
}

static void make(kt *k, kt_gather *g)
{
    kvs_indexer_gather_args *a = kt_host(k, sizeof *a);

    g->out[g->n_out++] = kt_rows_make(k, "keys", g->list.args.n_rows, 128, kt_chance(k, 3) ? 1 : 16);
    g->out[g->n_out++] = kt_rows_make(k, "scales", g->list.args.n_rows, 4, 4);
    *a = (kvs_indexer_gather_args){.view = g->view,
                                   .list = g->list.args,
                                   .k = kt_rows_dev(&g->out[0]),
                                   .scale = kt_rows_dev(&g->out[1]),
                                   .k_stride = g->out[0].stride,
                                   .scale_stride = g->out[1].stride};
    g->args = a;
}

static void expect(const kt_gather *g, uint32_t row, kt_place at)
{
    const kt_shape *s = &g->pool.shape;
    const uint8_t *page = kt_page(&g->pool, s->layer, 0, at.block);

    memcpy(kt_rows_want(&g->out[0], row), page + (uint64_t)at.at * s->plane[0].row_bytes, 128);
    memcpy(kt_rows_want(&g->out[1], row), page + (uint64_t)s->tokens * s->plane[0].row_bytes + at.at * 4ull, 4);
}

static kvs_status launch(kt *k, void *gather, kvs_err *err)
{
    kt_gather *g = gather;

    return KT_RUN(k, err, kvs_indexer_gather(g->args, g->word, err),
                  kvs_indexer_gather_cuda(g->args, g->word, k->stream, err));
}

static const kt_gather_op op = {
    .shape = shape, .format = KVS_FORMAT_indexer_fp8, .make = make, .expect = expect, .launch = launch};
KT_GATHER_CASES(op)

static const kt_fixed fixed[] = {KT_GATHER_FIXED};

const kt_op kt_op_indexer_gather = {.name = "indexer_gather",
                                    .equality = "byte-equal",
                                    .fixed = fixed,
                                    .n_fixed = sizeof fixed / sizeof *fixed,
                                    .random = random_shape,
                                    .n_cpu = 300,
                                    .n_cuda = 1500,
                                    .n_subset = 12};
