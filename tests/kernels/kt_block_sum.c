/* block_sum: against the formula as its header gives it, one word after the other. */
#include <string.h>

#include "kernels/block_sum.h"
#include "proto/layout.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"

typedef struct problem {
    kt_pool pool;
    kvs_block_sum_args args;
    kt_buf sums;
    uint64_t offset; /* of what is summed, in a slot of buf.want */
    int32_t *ids;
    uint32_t *word, bad;
} problem;

static uint64_t by_the_formula(const uint8_t *p, uint64_t bytes)
{
    const uint64_t g = UINT64_C(0x9E3779B97F4A7C15);
    uint64_t sum = 0, h;

    for (uint64_t i = 0; i < (bytes + 7) / 8; i++) {
        uint64_t w = 0, x;

        for (uint64_t b = 0; b < 8 && 8 * i + b < bytes; b++)
            w += (uint64_t)p[8 * i + b] << (8 * b);
        x = w ^ ((i + 1) * g);
        sum += (x % 4294967296) * (x / 4294967296) + x;
    }
    h = sum ^ (bytes * g);
    h ^= h >> 33;
    h *= UINT64_C(0xFF51AFD7ED558CCD);
    h ^= h >> 33;
    h *= UINT64_C(0xC4CEB9FE1A85EC53);
    return h ^ (h >> 33);
}

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *w = args;

    return KT_RUN(k, err, kvs_block_sum(&w->args, w->word, err), kvs_block_sum_cuda(&w->args, w->word, k->stream, err));
}

static void make_ids(kt *k, problem *w, uint32_t n, bool with_bad)
{
    w->bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        w->ids[i] = (int32_t)kt_block(k, &w->pool);
        if (with_bad && kt_chance(k, 6))
            w->ids[i] = kt_chance(k, 2) ? -1 : INT32_MIN;
        else if (with_bad && kt_chance(k, 6)) {
            w->ids[i] = kt_chance(k, 2) ? INT32_MAX : (int32_t)w->pool.shape.n_blocks;
            w->bad++;
        }
    }
}

static void make(kt *k, problem *w, const kt_shape *s, bool whole, uint32_t n, bool with_bad)
{
    kvs_view v;

    *w = (problem){.pool = kt_pool_make(k, s), .word = kt_word(k), .ids = kt_host(k, 4 * (uint64_t)n + 4)};
    v = kt_view(k, &w->pool, s->layer, 0);
    w->offset = kt_plane_offset(&w->pool, s->layer, 0);
    w->sums = kt_buf_make(k, "sums", 8 * (uint64_t)n + 32);
    if (whole) {
        w->offset = 0;
        v.base = w->pool.buf.dev + s->front;
        v.page_bytes = w->pool.slot_bytes;
        kt_mutate(k, &v, 0);
    } else if (kt_chance(k, 2)) /* a length of no round number */
        v.page_bytes -= rnd_below(&k->r, v.page_bytes < 40 ? v.page_bytes : 40);
    make_ids(k, w, n, with_bad);
    w->args = (kvs_block_sum_args){v, kt_in(k, w->ids, 4 * (uint64_t)n), (uint64_t *)(void *)(w->sums.dev + 16), n};
}

static bool summed(kt *k, problem *w)
{
    const uint32_t bad = kt_word_value(k, w->word);
    const uint8_t *slots = w->pool.buf.want + w->pool.shape.front + w->offset;

    for (uint32_t i = 0; i < w->args.n; i++) {
        uint64_t sum = 0;

        if (w->ids[i] >= 0 && (uint32_t)w->ids[i] < w->pool.shape.n_blocks)
            sum = by_the_formula(slots + (uint64_t)w->ids[i] * w->pool.slot_bytes, w->args.view.page_bytes);
        memcpy(w->sums.want + 16 + 8 * (uint64_t)i, &sum, sizeof sum);
    }
    if (bad != w->bad)
        return kt_fail(k, "%u bad ids counted, not %u", bad, w->bad);
    return kt_same(k, &w->sums) && kt_same(k, &w->pool.buf);
}

static bool run(kt *k, problem *w)
{
    kvs_err err = {.msg = ""};

    kt_upload(k, &w->pool.buf);
    kt_upload(k, &w->sums);
    if (launch(k, w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return summed(k, w);
}

static bool random_shape(kt *k)
{
    const kt_shape s = kt_shape_random(k, kt_chance(k, 2) ? KVS_FORMAT_mla_bf16 : KVS_FORMAT_fp8_ds_mla, 0,
                                       k->where == KT_CPU ? 1 << 20 : 16 << 20);
    problem w;

    make(k, &w, &s, kt_chance(k, 3), (uint32_t)rnd_below(&k->r, 6), kt_chance(k, 2));
    return run(k, &w);
}

static bool beyond_4_gib(kt *k)
{
    const kt_shape s = kt_shape_far(KVS_FORMAT_mla_bf16, 0, 64);
    problem w;

    make(k, &w, &s, false, 20, true);
    return run(k, &w);
}

/* Every length around the units that the code works in. */
static bool every_length(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 3);
    problem w;

    s.n_layers = 2;
    s.layer = 1;
    make(k, &w, &s, false, 3, false);
    for (uint64_t bytes = 0; bytes < 300; bytes++) {
        w.args.view.page_bytes = bytes;
        if (!run(k, &w))
            return kt_fail(k, "%u bytes", (unsigned)bytes);
    }
    return true;
}

/* So many that each is summed at one go, and some of them long. */
static bool many(kt *k)
{
    for (uint32_t tokens = 1; tokens <= 64; tokens *= 64) {
        kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, tokens, 7);
        problem w;

        s.n_layers = 2;
        s.layer = 1;
        make(k, &w, &s, false, k->where == KT_CPU ? 40 : 1500, true);
        if (!run(k, &w))
            return false;
    }
    return true;
}

static bool replayed(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 12);
    kt_graph g;
    problem w;

    s.n_layers = 3;
    s.layer = 1;
    make(k, &w, &s, false, 9, false);
    kt_upload(k, &w.pool.buf);
    kt_upload(k, &w.sums);
    if (!kt_graph_make(k, launch, &w, &g))
        return false;
    for (int round = 0; round < 4; round++) {
        make_ids(k, &w, 9, round > 0);
        kt_put(k, (void *)(uintptr_t)w.args.blocks, w.ids, 36);
        if (!kt_graph_run(k, &g) || !summed(k, &w))
            return false;
    }
    return true;
}

static bool nothing(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 4);
    problem w;

    make(k, &w, &s, false, 0, false);
    if (!run(k, &w))
        return false;
    make(k, &w, &s, false, 3, false);
    w.args.view.n_blocks = w.pool.shape.n_blocks = 0;
    w.bad = 3;
    return run(k, &w);
}

static const kt_fixed fixed[] = {{"beyond 4 GiB", beyond_4_gib, true},
                                 {"every length", every_length, false},
                                 {"many blocks", many, false},
                                 {"replayed with other blocks", replayed, false},
                                 {"no ids, no blocks", nothing, false}};

const kt_op kt_op_block_sum = {.name = "block_sum",
                               .equality = "equal",
                               .fixed = fixed,
                               .n_fixed = sizeof fixed / sizeof *fixed,
                               .random = random_shape,
                               .n_cpu = 150,
                               .n_cuda = 600,
                               .n_subset = 10};
