/* mla_write and mla_write_layers: rows of new tokens into views, in every format. */
#include <string.h>

#include "kernels/kernels_cuda.h"
#include "proto/layout.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_pool.h"

enum { LATENT = 512, ROPE = 64, TILE = 128 };

/* A pool, and what goes into n_layers of its layers from `layer` on. */
typedef struct problem {
    kt_pool pool;
    kvs_mla_write_layers_args args; /* of one layer for mla_write */
    bool layers;
    uint32_t type;
    uint8_t *kv, *pe; /* the test's copies */
    float *scale;
    int64_t *slots;
    uint32_t n_lists; /* of slots: one for all layers, or one each */
    uint32_t bad;     /* that must be counted */
    uint32_t *word;
    kvs_mla_write_args one;
} problem;

/* --- what must come out ------------------------------------------------------------------------------------------- */

static void expect_record(uint8_t *row, const uint8_t *kv, const uint8_t *pe)
{
    for (uint32_t tile = 0; tile < LATENT / TILE; tile++) {
        float amax = 0, scale;

        for (uint32_t i = 0; i < TILE; i++) {
            double x = kt_value(kv, KVS_VALUE_BF16, tile * TILE + i);

            x = x < 0 ? -x : x;
            if (x > (double)amax) /* not so for a NaN */
                amax = (float)x;
        }
        scale = amax / 448.0f;
        if (scale < 1.17549435e-38f)
            scale = 1.17549435e-38f;
        for (uint32_t i = 0; i < TILE; i++)
            row[tile * TILE + i] = kt_quantised(kt_value(kv, KVS_VALUE_BF16, tile * TILE + i), scale);
        memcpy(row + LATENT + tile * sizeof scale, &scale, sizeof scale);
    }
    memcpy(row + 528, pe, 128);
}

static void expect_row(const problem *w, uint8_t *row, uint32_t layer, const uint8_t *kv, const uint8_t *pe)
{
    const uint32_t size = kvs_value_bytes(w->type);

    switch (w->pool.shape.plane[0].format) {
    case KVS_FORMAT_fp8_ds_mla:
        expect_record(row, kv, pe);
        break;
    case KVS_FORMAT_mla_fp8:
        for (uint32_t i = 0; i < LATENT + ROPE; i++)
            row[i] = kt_quantised(i < LATENT ? kt_value(kv, w->type, i) : kt_value(pe, w->type, i - LATENT),
                                  w->scale[layer]);
        break;
    default:
        memcpy(row, kv, (size_t)LATENT * size);
        memcpy(row + (size_t)LATENT * size, pe, (size_t)ROPE * size);
    }
}

static void expect(problem *w)
{
    const kt_shape *s = &w->pool.shape;
    const kvs_mla_write_layers_args *a = &w->args;

    for (uint32_t l = 0; l < a->n_layers; l++)
        for (uint32_t t = 0; t < a->n_tokens; t++) {
            const int64_t slot = w->slots[(w->n_lists > 1 ? l : 0) * (uint64_t)a->n_tokens + t];

            if (kt_slot_good(&w->pool, slot))
                expect_row(w,
                           kt_row(&w->pool, s->layer + l, 0, (uint64_t)slot / s->tokens,
                                  (uint32_t)((uint64_t)slot % s->tokens)),
                           l, w->kv + l * a->kv_c_layer_stride + t * a->kv_c_stride,
                           w->pe + l * a->k_pe_layer_stride + t * a->k_pe_stride);
        }
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *w = args;

    if (w->layers)
        return KT_RUN(k, err, kvs_mla_write_layers(&w->args, w->word, err),
                      kvs_mla_write_layers_cuda(&w->args, w->word, k->stream, err));
    return KT_RUN(k, err, kvs_mla_write(&w->one, w->word, err), kvs_mla_write_cuda(&w->one, w->word, k->stream, err));
}

/* Rows of any alignment that is one of their values; garbage between them. */
static uint8_t *make_rows(kt *k, uint32_t type, uint32_t n_values, uint64_t n, uint64_t *ret_pitch, uint8_t **ret_dev)
{
    const uint64_t size = kvs_value_bytes(type), odd = size * rnd_below(&k->r, 8),
                   pitch = n_values * size + (kt_chance(k, 2) ? odd : 16), bytes = pitch * n + odd;
    uint8_t *rows = kt_host(k, bytes);

    rnd_bytes(&k->r, rows, bytes);
    for (uint64_t t = 0; t < n; t++)
        kt_values_fill(k, rows + odd + t * pitch, type, n_values);
    *ret_pitch = pitch;
    *ret_dev = (uint8_t *)kt_in(k, rows, bytes) + odd;
    return rows + odd;
}

static void make_slots(kt *k, problem *w, bool with_bad)
{
    const uint32_t n = w->args.n_tokens;

    w->bad = 0;
    for (uint32_t l = 0; l < w->n_lists; l++) {
        uint32_t bad = 0;

        memcpy(w->slots + (uint64_t)l * n, kt_slots(k, &w->pool, n, with_bad, &bad), n * sizeof *w->slots);
        w->bad += bad * (w->n_lists == 1 ? w->args.n_layers : 1);
    }
}

/* n_layers 0: mla_write into s->layer.  Else mla_write_layers from there on. */
static void make(kt *k, problem *w, const kt_shape *s, uint32_t type, uint32_t n, uint32_t n_layers, bool with_bad)
{
    const uint32_t layers = n_layers > 0 ? n_layers : 1;
    kvs_mla_write_layers_args *a = &w->args;
    uint8_t **base = kt_host(k, layers * sizeof *base), *dev_kv, *dev_pe;
    uint64_t kv_pitch, pe_pitch;

    *w = (problem){.pool = kt_pool_make(k, s), .layers = n_layers > 0, .type = type, .word = kt_word(k)};
    w->n_lists = layers > 1 && kt_chance(k, 2) ? layers : 1;
    w->kv = make_rows(k, type, LATENT, (uint64_t)n * layers, &kv_pitch, &dev_kv);
    w->pe = make_rows(k, type, ROPE, (uint64_t)n * layers, &pe_pitch, &dev_pe);
    w->scale = kt_host(k, layers * sizeof *w->scale);
    w->slots = kt_host(k, (uint64_t)w->n_lists * n * sizeof *w->slots + 8);
    for (uint32_t l = 0; l < layers; l++) {
        w->scale[l] = (float)(rnd_real(&k->r) * 0.2 + 0.3);
        base[l] = kt_view(k, &w->pool, s->layer + l, 0).base;
    }
    *a = (kvs_mla_write_layers_args){.view = kt_view(k, &w->pool, s->layer, 0),
                                     .base = base,
                                     .kv_c = dev_kv,
                                     .k_pe = dev_pe,
                                     .kv_c_stride = kv_pitch,
                                     .k_pe_stride = pe_pitch,
                                     .kv_c_layer_stride = kv_pitch * n,
                                     .k_pe_layer_stride = pe_pitch * n,
                                     .n_tokens = n,
                                     .src_type = s->plane[0].format != KVS_FORMAT_mla_fp8 && kt_chance(k, 2) ? 0 : type,
                                     .n_layers = layers,
                                     .slot_layer_stride = w->n_lists > 1 ? n : 0,
                                     .scale = kt_in(k, w->scale, layers * sizeof *w->scale)};
    make_slots(k, w, with_bad);
    a->slot_mapping = kt_in(k, w->slots, (uint64_t)w->n_lists * n * sizeof *w->slots);
    w->one = (kvs_mla_write_args){a->view,         a->kv_c,     a->k_pe,     a->kv_c_stride, a->k_pe_stride,
                                  a->slot_mapping, a->n_tokens, a->src_type, a->scale,       NULL};
}

static bool written(kt *k, problem *w)
{
    const uint32_t bad = kt_word_value(k, w->word);

    expect(w);
    if (bad != w->bad)
        return kt_fail(k, "%u bad slots counted, not %u", bad, w->bad);
    return kt_same(k, &w->pool.buf);
}

static bool run(kt *k, problem *w)
{
    kvs_err err = {.msg = ""};

    kt_upload(k, &w->pool.buf);
    if (launch(k, w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return written(k, w);
}

static const struct {
    uint32_t format, type;
} KINDS[] = {{KVS_FORMAT_mla_bf16, KVS_VALUE_BF16},  {KVS_FORMAT_mla_fp16, KVS_VALUE_FP16},
             {KVS_FORMAT_mla_fp32, KVS_VALUE_FP32},  {KVS_FORMAT_mla_fp8, KVS_VALUE_BF16},
             {KVS_FORMAT_mla_fp8, KVS_VALUE_FP16},   {KVS_FORMAT_mla_fp8, KVS_VALUE_FP32},
             {KVS_FORMAT_fp8_ds_mla, KVS_VALUE_BF16}};
enum { N_KINDS = sizeof KINDS / sizeof *KINDS };

/* --- cases -------------------------------------------------------------------------------------------------------- */

static bool random_shape(kt *k)
{
    const uint32_t kind = (uint32_t)rnd_below(&k->r, N_KINDS);
    const kt_shape s = kt_shape_random(k, KINDS[kind].format, 0, k->where == KT_CPU ? 1 << 20 : 8 << 20);
    problem w;

    make(k, &w, &s, KINDS[kind].type, (uint32_t)rnd_below(&k->r, k->where == KT_CPU ? 80 : 300), 0, kt_chance(k, 2));
    return run(k, &w);
}

static bool random_layers(kt *k)
{
    const uint32_t kind = (uint32_t)rnd_below(&k->r, N_KINDS);
    kt_shape s = kt_shape_random(k, KINDS[kind].format, 0, k->where == KT_CPU ? 1 << 20 : 8 << 20);
    const uint32_t n = (uint32_t)rnd_below(&k->r, k->where == KT_CPU && s.n_layers > 5 ? 8 : 60);
    problem w;

    if (kt_chance(k, 2))
        s.layer = 0;
    make(k, &w, &s, KINDS[kind].type, n, s.n_layers - s.layer, kt_chance(k, 2));
    return run(k, &w);
}

/* Every format into the first, a middle and the last layer of few and of many. */
static bool every_layer(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61};

    for (uint32_t i = 0; i < 3 * 3 * N_KINDS; i++) {
        const uint32_t n = layers[i % 3], at = i / 3 % 3, kind = i / 9;
        kt_shape s = kt_shape_plain(KINDS[kind].format, 0, 4, 3);
        problem w;

        s.n_layers = n;
        s.layer = at == 0 ? 0 : at == 1 ? n / 2 : n - 1;
        make(k, &w, &s, KINDS[kind].type, 9, 0, true);
        if (!run(k, &w))
            return false;
        kt_case_end(k);
    }
    return true;
}

static bool all_61_layers(kt *k)
{
    for (uint32_t kind = 0; kind < N_KINDS; kind++) {
        kt_shape s = kt_shape_plain(KINDS[kind].format, 0, 4, 3);
        problem w;

        s.n_layers = 61;
        s.descending = kind % 2 == 1;
        make(k, &w, &s, KINDS[kind].type, 7, 61, true);
        if (!run(k, &w))
            return false;
        kt_case_end(k);
    }
    return true;
}

static bool beyond_4_gib(kt *k)
{
    const kt_shape s = kt_shape_far(KVS_FORMAT_mla_bf16, 0, 64);
    problem w;

    make(k, &w, &s, KVS_VALUE_BF16, 200, 0, true);
    return run(k, &w);
}

static bool layers_beyond_4_gib(kt *k)
{
    kt_shape s = kt_shape_far(KVS_FORMAT_fp8_ds_mla, 0, 64);
    problem w;

    s.layer = 30;
    make(k, &w, &s, KVS_VALUE_BF16, 70, 31, true);
    return run(k, &w);
}

static bool no_tokens(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 3);
    problem w;

    make(k, &w, &s, KVS_VALUE_BF16, 0, 0, false);
    return run(k, &w);
}

static bool no_tokens_in_layers(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 3);
    problem w;

    make(k, &w, &s, KVS_VALUE_BF16, 0, 1, false);
    if (!run(k, &w))
        return false;
    w.args.n_layers = 0;
    w.args.base = NULL;
    return run(k, &w);
}

static bool no_blocks(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 1);
    problem w;

    make(k, &w, &s, KVS_VALUE_BF16, 5, 0, false);
    w.one.view.n_blocks = 0;
    w.pool.shape.n_blocks = 0;
    w.bad = 5;
    return run(k, &w);
}

/* Captured with one list of slots, replayed with others. */
static bool replays(kt *k, uint32_t n_layers)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 9);
    kt_graph g;
    problem w;

    s.n_layers = 3;
    s.layer = n_layers > 0 ? 0 : 2;
    make(k, &w, &s, KVS_VALUE_BF16, 50, n_layers, false);
    kt_upload(k, &w.pool.buf);
    if (!kt_graph_make(k, launch, &w, &g))
        return false;
    for (int round = 0; round < 4; round++) {
        make_slots(k, &w, round > 0);
        kt_put(k, (void *)(uintptr_t)w.args.slot_mapping, w.slots, (uint64_t)w.n_lists * 50 * sizeof *w.slots);
        if (!kt_graph_run(k, &g) || !written(k, &w))
            return false;
    }
    return true;
}

static bool replayed(kt *k)
{
    return replays(k, 0);
}

static bool layers_replayed(kt *k)
{
    return replays(k, 3);
}

/* The same 64 tokens many times over: one result. */
static bool again_and_again(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_fp8_ds_mla, 0, 16, 5);
    problem w;
    kvs_err err = {.msg = ""};

    make(k, &w, &s, KVS_VALUE_BF16, 64, 0, false);
    kt_upload(k, &w.pool.buf);
    expect(&w);
    for (int i = 0; i < 20; i++)
        if (launch(k, &w, &err) != KVS_OK || !kt_same(k, &w.pool.buf))
            return kt_fail(k, "run %d: %s", i, err.msg);
    return true;
}

/* Rows of zeros, of -0.0, of zeros and one value of 1e-30: the scale is finite, zeros stay zeros. */
static bool zero_rows(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_fp8_ds_mla, 0, 16, 5);
    problem w;
    uint16_t *x;

    make(k, &w, &s, KVS_VALUE_BF16, 66, 0, false);
    for (uint32_t t = 0; t < 66; t++) {
        x = (uint16_t *)(void *)(w.kv + t * w.args.kv_c_stride);
        for (uint32_t i = 0; i < LATENT; i++)
            x[i] = t == 65 ? 0x8000 : 0;
        if (t == 64)
            x[200] = 0x0DA2;
    }
    kt_put(k, (void *)(uintptr_t)w.args.kv_c, w.kv, 65 * w.args.kv_c_stride + LATENT * sizeof *x);
    if (!run(k, &w))
        return false;
    for (uint32_t t = 0; t < 66; t++) {
        const uint8_t *row = kt_row(&w.pool, 0, 0, (uint64_t)w.slots[t] / 16, (uint32_t)(w.slots[t] % 16));
        float scale;

        for (uint32_t tile = 0; tile < 4; tile++) {
            memcpy(&scale, row + LATENT + tile * sizeof scale, sizeof scale);
            if (!(scale > 0 && scale < 1e-30f))
                return kt_fail(k, "row %u: scale %g", t, (double)scale);
        }
        for (uint32_t i = 0; i < LATENT; i++)
            if (row[i] != (t == 65 ? 0x80 : t == 64 && i == 200 ? 0x7E : 0))
                return kt_fail(k, "row %u: byte %u is %02x", t, i, row[i]);
    }
    return true;
}

static bool refused(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 3);
    uint8_t *odd[2];
    problem w;
    kvs_err err = {.msg = ""};

    s.n_layers = 2;
    make(k, &w, &s, KVS_VALUE_BF16, 5, 2, false);
    kt_upload(k, &w.pool.buf);
    memcpy(odd, w.args.base, sizeof odd);
    odd[1] += 8;
    w.args.base = odd;
    if (launch(k, &w, &err) != KVS_E_INVALID)
        return kt_fail(k, "a base that is no multiple of 16 was taken");
    w.args.n_layers = KVS_MLA_MAX_LAYERS + 1;
    if (launch(k, &w, &err) != KVS_E_INVALID)
        return kt_fail(k, "%u layers were taken", w.args.n_layers);
    return kt_same(k, &w.pool.buf);
}

static const kt_fixed write_fixed[] = {{"every format in every layer of 1, 3 and 61", every_layer, false},
                                       {"beyond 4 GiB", beyond_4_gib, true},
                                       {"no tokens", no_tokens, false},
                                       {"no blocks", no_blocks, false},
                                       {"replayed with other slots", replayed, false},
                                       {"again and again", again_and_again, false},
                                       {"rows of zeros and of one tiny value", zero_rows, false}};

const kt_op kt_op_mla_write = {.name = "mla_write",
                               .equality = "byte-equal",
                               .fixed = write_fixed,
                               .n_fixed = sizeof write_fixed / sizeof *write_fixed,
                               .random = random_shape,
                               .n_cpu = 120,
                               .n_cuda = 700,
                               .n_subset = 12};

static const kt_fixed layers_fixed[] = {{"all 61 layers in every format", all_61_layers, false},
                                        {"beyond 4 GiB", layers_beyond_4_gib, true},
                                        {"no tokens", no_tokens_in_layers, false},
                                        {"replayed with other slots", layers_replayed, false},
                                        {"what cannot be addressed is refused", refused, false}};

const kt_op kt_op_mla_write_layers = {.name = "mla_write_layers",
                                      .equality = "byte-equal",
                                      .fixed = layers_fixed,
                                      .n_fixed = sizeof layers_fixed / sizeof *layers_fixed,
                                      .random = random_layers,
                                      .n_cpu = 50,
                                      .n_cuda = 400,
                                      .n_subset = 8};
