/* mla_write: rows of new tokens into a view. */
#include <string.h>

#include "kernels/kernels_cuda.h"
#include "proto/layout.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"

enum { LATENT = 1024, ROPE = 128 };

typedef struct problem {
    kt_pool pool;
    kvs_mla_write_args args;
    uint8_t *kv, *pe; /* the test's copies */
    int64_t *slots;
    uint32_t bad; /* that must be counted */
    uint32_t *word;
} problem;

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *w = args;

    return KT_RUN(k, err, kvs_mla_write(&w->args, w->word, err), kvs_mla_write_cuda(&w->args, w->word, k->stream, err));
}

static void make(kt *k, problem *w, const kt_shape *s, uint32_t n, bool with_bad)
{
    /* Sources of any alignment that is one of their values. */
    const uint64_t odd = 2 * rnd_below(&k->r, 8), kv_pitch = LATENT + (kt_chance(k, 2) ? odd : 16),
                   pe_pitch = ROPE + (kt_chance(k, 2) ? odd : 0);
    uint8_t *dev_kv, *dev_pe;

    *w = (problem){.pool = kt_pool_make(k, s), .word = kt_word(k)};
    w->slots = kt_slots(k, &w->pool, n, with_bad, &w->bad);
    w->kv = kt_host(k, kv_pitch * n + odd);
    w->pe = kt_host(k, pe_pitch * n + odd);
    rnd_bytes(&k->r, w->kv, kv_pitch * n + odd);
    rnd_bytes(&k->r, w->pe, pe_pitch * n + odd);
    dev_kv = kt_in(k, w->kv, kv_pitch * n + odd);
    dev_pe = kt_in(k, w->pe, pe_pitch * n + odd);
    w->kv += odd;
    w->pe += odd;
    w->args = (kvs_mla_write_args){.view = kt_view(k, &w->pool, s->layer, 0),
                                   .kv_c = dev_kv + odd,
                                   .k_pe = dev_pe + odd,
                                   .kv_c_stride = kv_pitch,
                                   .k_pe_stride = pe_pitch,
                                   .slot_mapping = kt_in(k, w->slots, n * sizeof *w->slots),
                                   .n_tokens = n};
}

/* What must be in the pool: token by token, by hand. */
static void expect(problem *w)
{
    const kt_shape *s = &w->pool.shape;

    for (uint32_t t = 0; t < w->args.n_tokens; t++)
        if (kt_slot_good(&w->pool, w->slots[t])) {
            uint8_t *row = kt_row(&w->pool, s->layer, 0, (uint64_t)w->slots[t] / s->tokens,
                                  (uint32_t)((uint64_t)w->slots[t] % s->tokens));

            memcpy(row, w->kv + t * w->args.kv_c_stride, LATENT);
            memcpy(row + LATENT, w->pe + t * w->args.k_pe_stride, ROPE);
        }
}

static bool written(kt *k, problem *w)
{
    const uint32_t bad = kt_word_value(k, w->word);

    expect(w);
    if (bad != w->bad)
        return kt_fail(k, "%u bad slots counted, not %u", bad, w->bad);
    return kt_same(k, &w->pool.buf);
}

static bool write_shape(kt *k, const kt_shape *s, uint32_t n, bool with_bad)
{
    problem w;
    kvs_err err = {.msg = ""};

    make(k, &w, s, n, with_bad);
    kt_upload(k, &w.pool.buf);
    if (launch(k, &w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return written(k, &w);
}

static uint32_t any_format(kt *k)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16};

    return KT_PICK(k, formats);
}

static bool random_shape(kt *k)
{
    const kt_shape s = kt_shape_random(k, any_format(k), 0, k->where == KT_CPU ? 1 << 20 : 8 << 20);

    return write_shape(k, &s, (uint32_t)rnd_below(&k->r, 300), kt_chance(k, 2));
}

static bool every_layer(kt *k)
{
    static const uint32_t layers[] = {1, 3, 61};

    for (int l = 0; l < 3; l++)
        for (int at = 0; at < 3; at++) {
            kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 4, 5);

            s.n_layers = layers[l];
            s.layer = at == 0 ? 0 : at == 1 ? layers[l] / 2 : layers[l] - 1;
            if (!write_shape(k, &s, 15, true))
                return false;
        }
    return true;
}

static bool beyond_4_gib(kt *k)
{
    const kt_shape s = kt_shape_far(KVS_FORMAT_mla_bf16, 0, 64);

    return write_shape(k, &s, 200, true);
}

static bool no_tokens(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 3);

    return write_shape(k, &s, 0, false);
}

static bool no_blocks(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 1);
    problem w;
    kvs_err err = {.msg = ""};

    make(k, &w, &s, 5, false);
    w.args.view.n_blocks = 0;
    w.pool.shape.n_blocks = 0;
    w.bad = 5;
    kt_upload(k, &w.pool.buf);
    if (launch(k, &w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return written(k, &w);
}

/* Captured with one list of slots, replayed with others. */
static bool replayed_with_other_slots(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 9);
    kt_graph g;
    problem w;

    s.n_layers = 3;
    s.layer = 2;
    make(k, &w, &s, 50, false);
    kt_upload(k, &w.pool.buf);
    if (!kt_graph_make(k, launch, &w, &g))
        return false;
    for (int round = 0; round < 4; round++) {
        w.slots = kt_slots(k, &w.pool, 50, round > 0, &w.bad);
        kt_put(k, (void *)(uintptr_t)w.args.slot_mapping, w.slots, 50 * sizeof *w.slots);
        if (!kt_graph_run(k, &g) || !written(k, &w))
            return false;
    }
    return true;
}

static const kt_fixed fixed[] = {{"every layer of 1, 3 and 61", every_layer, false},
                                 {"beyond 4 GiB", beyond_4_gib, true},
                                 {"no tokens", no_tokens, false},
                                 {"no blocks", no_blocks, false},
                                 {"replayed with other slots", replayed_with_other_slots, false}};

const kt_op kt_op_mla_write = {.name = "mla_write",
                               .equality = "byte-equal",
                               .fixed = fixed,
                               .n_fixed = sizeof fixed / sizeof *fixed,
                               .random = random_shape,
                               .n_cpu = 300,
                               .n_cuda = 2000,
                               .n_subset = 12};
