/* cache_gather: rows bit for bit. */
#include <string.h>

#include "kernels/cache_gather.h"
#include "proto/layout.h"
#include "tests/kernels/kt_gathers.h"
#include "tests/kernels/kt_ops.h"

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16,   KVS_FORMAT_mla_fp8, KVS_FORMAT_mla_fp32,
                                       KVS_FORMAT_fp8_ds_mla, KVS_FORMAT_kv_bf16, KVS_FORMAT_raw};
    const uint32_t format = KT_PICK(k, formats);

    return kt_shape_random(k, format, kvs_format_row_bytes(format) ? 0 : 16 * (1 + (uint32_t)rnd_below(&k->r, 70)),
                           max_bytes);
}

static void make(kt *k, kt_gather *g)
{
    const uint32_t pitch = g->view.row_bytes, align = kt_chance(k, 3) ? 1 : kt_chance(k, 2) ? 4 : 16;
    kvs_cache_gather_args *a = kt_host(k, sizeof *a);
    uint32_t entry = kt_chance(k, 2) ? pitch : 1 + (uint32_t)rnd_below(&k->r, pitch);

    if (kvs_format_row_bytes(g->view.format) > 0) /* the last row of a page may end where its values do */
        entry = kvs_format_row_bytes(g->view.format);
    if (kt_chance(k, 2))
        entry = (entry + align - 1) / align * align;
    g->out[g->n_out++] = kt_rows_make(k, "dst", g->list.args.n_rows, entry, align);
    *a = (kvs_cache_gather_args){.view = g->view,
                                 .list = g->list.args,
                                 .dst = kt_rows_dev(&g->out[0]),
                                 .dst_stride = g->out[0].stride,
                                 .entry_bytes = entry};
    g->args = a;
}

static void expect(const kt_gather *g, uint32_t row, kt_place at)
{
    const kvs_cache_gather_args *a = g->args;

    memcpy(kt_rows_want(&g->out[0], row), kt_row(&g->pool, g->pool.shape.layer, 0, at.block, at.at), a->entry_bytes);
}

static kvs_status launch(kt *k, void *gather, kvs_err *err)
{
    kt_gather *g = gather;

    return KT_RUN(k, err, kvs_cache_gather(g->args, g->word, err),
                  kvs_cache_gather_cuda(g->args, g->word, k->stream, err));
}

static const kt_gather_op op = {
    .shape = shape, .format = KVS_FORMAT_mla_bf16, .make = make, .expect = expect, .launch = launch};
KT_GATHER_CASES(op)

/* An engine's own tests, on the middle one of three layers. */
static kt_shape middle_layer(uint32_t format, uint32_t tokens, uint32_t n_blocks)
{
    kt_shape s = kt_shape_plain(format, 0, tokens, n_blocks);

    s.n_layers = 3;
    s.layer = 1;
    return s;
}

static bool cp_gather_cache_mla(kt *k)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16, KVS_FORMAT_mla_fp32,
                                       KVS_FORMAT_mla_fp8};

    for (int i = 0; i < 4; i++) {
        const kt_shape s = middle_layer(formats[i], 16, 128);

        if (!kt_gather_shape(k, &op, &s, 8, 512, false))
            return false;
    }
    return true;
}

/* First tokens beyond the width of the table, and ids outside the pool: nothing is read there. */
static bool gather_cache_oob(kt *k)
{
    const kt_shape s = middle_layer(KVS_FORMAT_mla_bf16, 16, 32);

    for (int i = 0; i < 8; i++)
        if (!kt_gather_shape(k, &op, &s, 4, 64, true))
            return false;
    return true;
}

static const kt_fixed fixed[] = {
    KT_GATHER_FIXED, {"cp_gather_cache_mla", cp_gather_cache_mla, true}, {"gather_cache_oob", gather_cache_oob, false}};

const kt_op kt_op_cache_gather = {.name = "cache_gather",
                                  .equality = "byte-equal",
                                  .fixed = fixed,
                                  .n_fixed = sizeof fixed / sizeof *fixed,
                                  .random = random_shape,
                                  .n_cpu = 300,
                                  .n_cuda = 1500,
                                  .n_subset = 12};
