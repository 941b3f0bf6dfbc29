/* gather_upconvert: 656-byte records into bf16. */
#include <string.h>

#include "kernels/gather_upconvert.h"
#include "kernels/value.h"
#include "proto/layout.h"
#include "tests/kernels/kt_gathers.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    return kt_shape_random(k, KVS_FORMAT_fp8_ds_mla, 0, max_bytes);
}

/* Scales of random bits would be out of reach of bf16 as a rule: make most of them tame. */
static void tame_scales(kt *k, const kt_gather *g)
{
    for (uint32_t r = 0; r < g->list.args.n_rows; r++)
        for (int i = 0; g->list.want[r].token && !kt_chance(k, 4) && i < 4; i++) {
            const float scale = (float)rnd_normal(&k->r);

            memcpy(kt_row(&g->pool, g->pool.shape.layer, 0, g->list.want[r].block, g->list.want[r].at) + 512 + i * 4,
                   &scale, sizeof scale);
        }
}

static void make(kt *k, kt_gather *g)
{
    kvs_gather_upconvert_args *a = kt_host(k, sizeof *a);

    g->out[g->n_out++] = kt_rows_make(k, "dst", g->list.args.n_rows, 1152, 2);
    *a = (kvs_gather_upconvert_args){
        .view = g->view, .list = g->list.args, .dst = kt_rows_dev(&g->out[0]), .dst_stride = g->out[0].stride};
    g->args = a;
    tame_scales(k, g);
}

static void expect(const kt_gather *g, uint32_t row, kt_place at)
{
    const uint8_t *from = kt_row(&g->pool, g->pool.shape.layer, 0, at.block, at.at);
    uint8_t *to = kt_rows_want(&g->out[0], row);

    for (uint32_t i = 0; i < 512; i++) {
        float scale;

        memcpy(&scale, from + 512 + i / 128 * 4, sizeof scale);
        kt_value_set(to, KVS_VALUE_BF16, i, kt_dequantised(from[i], scale));
    }
    memcpy(to + 1024, from + 528, 128);
}

static kvs_status launch(kt *k, void *gather, kvs_err *err)
{
    kt_gather *g = gather;

    return KT_RUN(k, err, kvs_gather_upconvert(g->args, g->word, err),
                  kvs_gather_upconvert_cuda(g->args, g->word, k->stream, err));
}

static const kt_gather_op op = {
    .shape = shape, .format = KVS_FORMAT_fp8_ds_mla, .make = make, .expect = expect, .launch = launch};
KT_GATHER_CASES(op)

static const kt_fixed fixed[] = {KT_GATHER_FIXED};

const kt_op kt_op_gather_upconvert = {.name = "gather_upconvert",
                                      .equality = "byte-equal",
                                      .fixed = fixed,
                                      .n_fixed = sizeof fixed / sizeof *fixed,
                                      .random = random_shape,
                                      .n_cpu = 200,
                                      .n_cuda = 600,
                                      .n_subset = 12};
