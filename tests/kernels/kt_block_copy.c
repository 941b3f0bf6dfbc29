/* block_copy: pages of a layer, whole slots, and from one pool to another. */
#include <string.h>

#include "kernels/block_copy.h"
#include "proto/layout.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"

typedef struct problem {
    kt_pool pool;
    kvs_block_copy_args args;
    uint64_t offset; /* of what is copied, in a slot of buf.want */
    int32_t *pairs;
    uint32_t *word, bad;
} problem;

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    problem *w = args;

    return KT_RUN(k, err, kvs_block_copy(&w->args, w->word, err),
                  kvs_block_copy_cuda(&w->args, w->word, k->stream, err));
}

/* Pairs whose sources are no targets; ids of any kind among them. */
static void make_pairs(kt *k, problem *w, uint32_t n, bool with_bad)
{
    static const int32_t strange[] = {-1, INT32_MIN, -7};
    const kt_pool *p = &w->pool;
    const uint32_t n_here = p->shape.far ? KT_FAR_IDS : p->shape.n_blocks;
    uint32_t *order = kt_host(k, n_here * sizeof *order);

    for (uint32_t i = 0; i < n_here; i++) {
        const uint32_t at = (uint32_t)rnd_below(&k->r, i + 1);

        order[i] = order[at];
        order[at] = p->shape.far ? p->far_id[i] : i;
    }
    w->bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        int32_t *pair = w->pairs + 2 * (uint64_t)i;
        const uint32_t target = n_here / 2 + i;

        pair[0] = (int32_t)order[rnd_below(&k->r, n_here / 2)];
        pair[1] = target < n_here ? (int32_t)order[target] : -1;
        if (!with_bad || !kt_chance(k, 4))
            continue;
        if (kt_chance(k, 2))
            pair[rnd_below(&k->r, 2)] = strange[rnd_below(&k->r, 3)];
        else if (pair[1] >= 0) {
            pair[rnd_below(&k->r, 2)] = kt_chance(k, 2) ? INT32_MAX : (int32_t)p->shape.n_blocks;
            w->bad++;
        }
    }
}

static void make(kt *k, problem *w, const kt_shape *s, bool whole, uint32_t n, bool with_bad)
{
    kvs_view v;

    *w = (problem){.pool = kt_pool_make(k, s), .word = kt_word(k), .pairs = kt_host(k, 8 * (uint64_t)n + 8)};
    v = kt_view(k, &w->pool, s->layer, 0);
    w->offset = kt_plane_offset(&w->pool, s->layer, 0);
    if (whole) {
        w->offset = 0;
        v.base = w->pool.buf.dev + s->front;
        v.page_bytes = w->pool.slot_bytes - w->pool.shape.slot_pad;
        v.format = KVS_FORMAT_raw;
        kt_mutate(k, &v, 0);
    } else if (kt_chance(k, 4)) /* a length of no round number */
        v.page_bytes -= rnd_below(&k->r, 16);
    make_pairs(k, w, n, with_bad);
    w->args = (kvs_block_copy_args){v, v, kt_in(k, w->pairs, 8 * (uint64_t)n), n};
}

static bool copied(kt *k, problem *w)
{
    const uint32_t bad = kt_word_value(k, w->word), n_blocks = w->pool.shape.n_blocks;
    uint8_t *slots = w->pool.buf.want + w->pool.shape.front + w->offset;

    for (uint32_t i = 0; i < w->args.n_pairs; i++) {
        const int32_t from = w->pairs[2 * i], to = w->pairs[2 * i + 1];

        if (from >= 0 && to >= 0 && (uint32_t)from < n_blocks && (uint32_t)to < n_blocks)
            memcpy(slots + (uint64_t)to * w->pool.slot_bytes, slots + (uint64_t)from * w->pool.slot_bytes,
                   w->args.from.page_bytes);
    }
    if (bad != w->bad)
        return kt_fail(k, "%u bad pairs counted, not %u", bad, w->bad);
    return kt_same(k, &w->pool.buf);
}

static bool run(kt *k, problem *w)
{
    kvs_err err = {.msg = ""};

    kt_upload(k, &w->pool.buf);
    if (launch(k, w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return copied(k, w);
}

static bool random_shape(kt *k)
{
    const kt_shape s = kt_shape_random(k, kt_chance(k, 2) ? KVS_FORMAT_mla_bf16 : KVS_FORMAT_fp8_ds_mla, 0,
                                       k->where == KT_CPU ? 2 << 20 : 16 << 20);
    problem w;

    make(k, &w, &s, kt_chance(k, 3), (uint32_t)rnd_below(&k->r, s.n_blocks), kt_chance(k, 2));
    return run(k, &w);
}

static bool far(kt *k, bool whole)
{
    const kt_shape s = kt_shape_far(KVS_FORMAT_mla_bf16, 0, 64);
    problem w;

    make(k, &w, &s, whole, 4, false);
    return run(k, &w);
}

static bool far_pages(kt *k)
{
    return far(k, false);
}

static bool far_slots(kt *k)
{
    return far(k, true);
}

/* From a pool of one shape into another: two pitches. */
static bool other_pitch(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 6);
    problem w;
    kt_pool to;
    kvs_err err = {.msg = ""};

    s.n_layers = 3;
    s.layer = 1;
    make(k, &w, &s, false, 3, false);
    s.n_layers = 5;
    s.layer = 4;
    s.slot_pad = 48;
    to = kt_pool_make(k, &s);
    w.args.to = kt_view(k, &to, 4, 0);
    w.args.to.page_bytes = w.args.from.page_bytes;
    kt_upload(k, &w.pool.buf);
    kt_upload(k, &to.buf);
    if (launch(k, &w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    for (uint32_t i = 0; i < 3; i++)
        memcpy(kt_page(&to, 4, 0, (uint64_t)w.pairs[2 * i + 1]), kt_page(&w.pool, 1, 0, (uint64_t)w.pairs[2 * i]),
               w.args.from.page_bytes);
    return kt_same(k, &w.pool.buf) && kt_same(k, &to.buf);
}

static bool replayed(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 12);
    kt_graph g;
    problem w;

    s.n_layers = 3;
    s.layer = 1;
    make(k, &w, &s, false, 5, false);
    kt_upload(k, &w.pool.buf);
    if (!kt_graph_make(k, launch, &w, &g))
        return false;
    for (int round = 0; round < 4; round++) {
        make_pairs(k, &w, 5, round > 0);
        kt_put(k, (void *)(uintptr_t)w.args.pairs, w.pairs, 40);
        if (!kt_graph_run(k, &g) || !copied(k, &w))
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
    make(k, &w, &s, false, 2, false);
    w.args.from.n_blocks = w.args.to.n_blocks = w.pool.shape.n_blocks = 0;
    w.bad = 2;
    if (!run(k, &w))
        return false;
    make(k, &w, &s, false, 2, false);
    w.args.from.page_bytes = w.args.to.page_bytes = 0;
    return run(k, &w);
}

static bool refused(kt *k)
{
    const kt_shape s = kt_shape_plain(KVS_FORMAT_mla_bf16, 0, 16, 4);
    problem w;
    kvs_err err = {.msg = ""};

    make(k, &w, &s, false, 2, false);
    kt_upload(k, &w.pool.buf);
    w.args.to.page_bytes -= 16;
    if (launch(k, &w, &err) != KVS_E_INVALID)
        return kt_fail(k, "pages of two lengths were taken");
    w.args.to.page_bytes = w.args.from.page_bytes = w.args.to.block_stride + 16;
    if (launch(k, &w, &err) != KVS_E_INVALID)
        return kt_fail(k, "pages that overlap were taken");
    return kt_same(k, &w.pool.buf);
}

static const kt_fixed fixed[] = {{"pages beyond 4 GiB", far_pages, true},
                                 {"slots beyond 4 GiB", far_slots, true},
                                 {"into a pool of another pitch", other_pitch, false},
                                 {"replayed with other pairs", replayed, false},
                                 {"no pairs, no blocks, no bytes", nothing, false},
                                 {"what cannot be copied is refused", refused, false}};

const kt_op kt_op_block_copy = {.name = "block_copy",
                                .equality = "byte-equal",
                                .fixed = fixed,
                                .n_fixed = sizeof fixed / sizeof *fixed,
                                .random = random_shape,
                                .n_cpu = 200,
                                .n_cuda = 1000,
                                .n_subset = 12};
