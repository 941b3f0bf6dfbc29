/* gather_dequant: e4m3 with one scale into plain values, or plain values as they are. */
#include <string.h>

#include "kernels/gather_dequant.h"
#include "proto/layout.h"
#include "tests/kernels/kt_gathers.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"

typedef struct source {
    uint32_t format, row_bytes; /* 0: the format's own */
    uint32_t width, type;       /* 0: e4m3 */
} source;

static const source SOURCES[] = {{KVS_FORMAT_mla_fp8, 0, 576, 0},
                                 {KVS_FORMAT_kv_fp8, 320, 320, 0},
                                 {KVS_FORMAT_kv_fp8, 512, 512, 0},
                                 {KVS_FORMAT_mla_bf16, 0, 576, KVS_VALUE_BF16},
                                 {KVS_FORMAT_mla_fp16, 0, 512, KVS_VALUE_FP16},
                                 {KVS_FORMAT_mla_fp32, 0, 576, KVS_VALUE_FP32},
                                 {KVS_FORMAT_kv_bf16, 640, 320, KVS_VALUE_BF16}};
enum { N_SOURCES = sizeof SOURCES / sizeof *SOURCES };

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    const source *s = &SOURCES[kt_chance(k, 2) ? rnd_below(&k->r, 3) : rnd_below(&k->r, N_SOURCES)];

    return kt_shape_random(k, s->format, s->row_bytes, max_bytes);
}

static const source *source_of(const kt_gather *g)
{
    const source *s = SOURCES;

    /* The pitch of rows may be longer than they are, by less than the difference of two widths. */
    while (s->format != g->view.format || (s->format == KVS_FORMAT_kv_fp8 && s->row_bytes + 64 < g->view.row_bytes))
        s++;
    return s;
}

static void make(kt *k, kt_gather *g)
{
    const source *s = source_of(g);
    const uint32_t type = s->type != 0 ? s->type : KVS_VALUE_BF16 + (uint32_t)rnd_below(&k->r, 3),
                   bytes = kvs_value_bytes(type);
    kvs_gather_dequant_args *a = kt_host(k, sizeof *a);
    float scale = (float)(0.001 + rnd_real(&k->r) * rnd_real(&k->r));

    if (kt_chance(k, 10)) { /* products that overflow, that are subnormal, that are not numbers */
        const uint32_t bits = (uint32_t)rnd_u64(&k->r);

        memcpy(&scale, &bits, sizeof scale);
    }
    memcpy(&g->extra[0], &scale, sizeof scale);
    g->out[g->n_out++] = kt_rows_make(k, "dst", g->list.args.n_rows, (uint64_t)s->width * bytes, bytes);
    *a = (kvs_gather_dequant_args){.view = g->view,
                                   .list = g->list.args,
                                   .scale = s->type != 0 ? NULL : kt_in(k, &scale, sizeof scale),
                                   .dst = kt_rows_dev(&g->out[0]),
                                   .dst_stride = g->out[0].stride,
                                   .width = s->width,
                                   .dst_type = type};
    g->args = a;
}

static void expect(const kt_gather *g, uint32_t row, kt_place at)
{
    const uint8_t *from = kt_row(&g->pool, g->pool.shape.layer, 0, at.block, at.at);
    const kvs_gather_dequant_args *a = g->args;
    uint8_t *to = kt_rows_want(&g->out[0], row);
    float scale;

    memcpy(&scale, &g->extra[0], sizeof scale);
    if (source_of(g)->type != 0)
        memcpy(to, from, (size_t)a->width * kvs_value_bytes(a->dst_type));
    for (uint32_t i = 0; source_of(g)->type == 0 && i < a->width; i++)
        kt_value_set(to, a->dst_type, i, kt_dequantised(from[i], scale));
}

static kvs_status launch(kt *k, void *gather, kvs_err *err)
{
    kt_gather *g = gather;

    return KT_RUN(k, err, kvs_gather_dequant(g->args, g->word, err),
                  kvs_gather_dequant_cuda(g->args, g->word, k->stream, err));
}

static const kt_gather_op op = {
    .shape = shape, .format = KVS_FORMAT_mla_fp8, .make = make, .expect = expect, .launch = launch};
KT_GATHER_CASES(op)

/* An engine's own test: 576 values, 16 tokens a page, 8 sequences of up to 512, on the middle one of three layers. */
static bool gather_and_maybe_dequant_cache_mla(kt *k)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_fp8, KVS_FORMAT_mla_fp8, KVS_FORMAT_mla_bf16,
                                       KVS_FORMAT_mla_fp32};

    for (int i = 0; i < 4; i++) {
        kt_shape s = kt_shape_plain(formats[i], 0, 16, 128);

        s.n_layers = 3;
        s.layer = 1;
        if (!kt_gather_shape(k, &op, &s, 8, 512, false))
            return false;
    }
    return true;
}

static const kt_fixed fixed[] = {KT_GATHER_FIXED,
                                 {"gather_and_maybe_dequant_cache_mla", gather_and_maybe_dequant_cache_mla, true}};

const kt_op kt_op_gather_dequant = {.name = "gather_dequant",
                                    .equality = "byte-equal",
                                    .fixed = fixed,
                                    .n_fixed = sizeof fixed / sizeof *fixed,
                                    .random = random_shape,
                                    .n_cpu = 200,
                                    .n_cuda = 800,
                                    .n_subset = 12};
