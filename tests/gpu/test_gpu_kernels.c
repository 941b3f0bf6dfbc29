/* MLA write and decode on the GPU: byte for byte against the C reference, bit for bit between layouts, and within the
 * judge's limits of fp64. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "kernels/kernels_cuda.h"
#include "proto/layout.h"
#include "tests/gpu/gpu_case.h"
#include "tests/gpu/oracle_cuda.h"
#include "kernels/mla_oracle.h"
#include "tests/support/mla_token.h"
#include "tests/support/random.h"

enum { TEXT = 300, ROW = 1152 };
#define GiB (UINT64_C(1) << 30)

/* --- write ------------------------------------------------------------------------------------------------------- */

typedef struct write_case {
    kvs_mla_write_args args; /* host pointers */
    uint8_t *pool, *got;
    uint64_t pool_bytes, kv_bytes, pe_bytes;
    int64_t *slots;
    uint8_t *kv, *pe;
} write_case;

static void write_case_fini(write_case *w)
{
    free(w->pool);
    free(w->got);
    free(w->slots);
    free(w->kv);
    free(w->pe);
}

/* Random bytes everywhere: a row that was not written, or too much that was, cannot hide. */
static bool write_case_init(write_case *w, rnd *r, uint32_t layers, uint32_t layer)
{
    static const uint32_t pages[] = {1, 3, 16, 64};
    static const uint32_t kinds[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16, KVS_FORMAT_mla_fp8,
                                     KVS_FORMAT_fp8_ds_mla};
    static const float scale = 0.031f;
    const uint32_t format = kinds[rnd_below(r, 4)];
    uint32_t tokens = pages[rnd_below(r, 4)], n_blocks = 1 + (uint32_t)rnd_below(r, 9),
             pitch = mla_token_row_bytes(format) + 16 * (uint32_t)rnd_below(r, 3);
    uint32_t n = (uint32_t)rnd_below(r, 150), odd = 2 * (uint32_t)rnd_below(r, 8);
    uint64_t page = (uint64_t)tokens * pitch + 16 * rnd_below(r, 3), slot = page * layers + 16 * rnd_below(r, 5);
    uint64_t n_slots = (uint64_t)n_blocks * tokens;

    *w = (write_case){.pool_bytes = slot * n_blocks};
    w->args = (kvs_mla_write_args){.n_tokens = n,
                                   .src_type = format == KVS_FORMAT_mla_fp8 ? KVS_VALUE_BF16 : 0,
                                   .scale = &scale,
                                   .kv_c_stride = 1024 + (rnd_below(r, 2) ? odd : 16 * rnd_below(r, 4)),
                                   .k_pe_stride = 128 + (rnd_below(r, 2) ? odd : 16 * rnd_below(r, 4))};
    w->kv_bytes = w->args.kv_c_stride * n + 64;
    w->pe_bytes = w->args.k_pe_stride * n + 64;
    w->pool = malloc(w->pool_bytes);
    w->got = malloc(w->pool_bytes);
    w->slots = malloc((n + 1) * sizeof *w->slots);
    w->kv = malloc(w->kv_bytes);
    w->pe = malloc(w->pe_bytes);
    if (w->pool == NULL || w->got == NULL || w->slots == NULL || w->kv == NULL || w->pe == NULL)
        return false;
    rnd_bytes(r, w->pool, w->pool_bytes);
    rnd_bytes(r, w->kv, w->kv_bytes);
    rnd_bytes(r, w->pe, w->pe_bytes);
    for (uint32_t t = 0; t < n; t++) {
        static const int64_t strange[] = {-1, INT64_MIN, -77, INT64_MAX, 1ll << 40};
        uint64_t s = t == 0 ? 0 : t == 1 ? n_slots - 1 : rnd_below(r, n_slots);

        w->slots[t] = (int64_t)s;
        if (rnd_below(r, 6) == 0)
            w->slots[t] = strange[rnd_below(r, 5)];
        else if (rnd_below(r, 12) == 0)
            w->slots[t] = (int64_t)(n_slots + rnd_below(r, 3));
    }
    w->args.view = (kvs_view){w->pool + page * layer, slot, page, n_blocks, tokens, pitch, format};
    w->args.kv_c = w->kv + odd;
    w->args.k_pe = w->pe + odd;
    w->kv_bytes = w->kv_bytes > 0 ? w->kv_bytes : 1;
    w->args.slot_mapping = w->slots;
    return true;
}

/* Through a queue of the device: slots are the host's.  kernels-test looks at the call itself. */
static bool write_on_gpu(write_case *w, device_queue *q, uint32_t *bad, kvs_err *err)
{
    kvs_mla_write_args a = w->args;
    void *pool = NULL, *kv = NULL, *pe = NULL;
    uint64_t mark = 0;
    bool good = cudaMalloc(&pool, w->pool_bytes) == cudaSuccess && cudaMalloc(&kv, w->kv_bytes) == cudaSuccess &&
                cudaMalloc(&pe, w->pe_bytes) == cudaSuccess &&
                cudaMemcpy(pool, w->pool, w->pool_bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
                cudaMemcpy(kv, w->kv, w->kv_bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
                cudaMemcpy(pe, w->pe, w->pe_bytes, cudaMemcpyHostToDevice) == cudaSuccess &&
                cudaDeviceSynchronize() == cudaSuccess;

    a.view.base = (uint8_t *)pool + (w->args.view.base - w->pool);
    a.kv_c = (uint8_t *)kv + (w->args.kv_c - w->kv);
    a.k_pe = (uint8_t *)pe + (w->args.k_pe - w->pe);
    good =
        good && q->dev->ops->mla_write(q, &a, bad, &mark, err) == KVS_OK && q->dev->ops->wait(q, mark, err) == KVS_OK;
    good = good && cudaMemcpy(w->got, pool, w->pool_bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
    (void)cudaFree(pool);
    (void)cudaFree(kv);
    (void)cudaFree(pe);
    return good;
}

static bool write_and_compare(rnd *r, uint32_t layers, uint32_t layer, device_queue *q)
{
    write_case w;
    kvs_err err = {.msg = "setting up"};
    uint32_t bad = 99, bad_ref = 0;
    uint64_t seed = r->state;
    bool good = write_case_init(&w, r, layers, layer);

    if (!good || !write_on_gpu(&w, q, &bad, &err))
        good = GPU_FAIL("%s", err.msg);
    else if (kvs_mla_write(&w.args, &bad_ref, &err) != KVS_OK)
        good = GPU_FAIL("%s", err.msg);
    else if (memcmp(w.got, w.pool, w.pool_bytes) != 0 || bad != bad_ref)
        good = GPU_FAIL("state %" PRIu64 ", layer %u of %u: %u bad, %u expected, or bytes differ", seed, layer, layers,
                        bad, bad_ref);
    write_case_fini(&w);
    return good;
}

static bool write_by_the_device_lets_the_last_token_win(device *d)
{
    device_queue *q = NULL;
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("write by the device", 8);
    bool good = d->ops->queue_open(d, DEVICE_COMPUTE, &q, &err) == KVS_OK || GPU_FAIL("%s", err.msg);

    for (int round = 0; good && round < (gpu_subset() ? 3 : 60); round++)
        good = write_and_compare(&r, 3, 1, q);
    d->ops->queue_close(q);
    return good;
}

/* --- decode ------------------------------------------------------------------------------------------------------ */

static void say_shape(const mla_shape *s)
{
    (void)printf("      seed %" PRIu64 " format %u layers %u/%u page %u pads %u %u %" PRIu64
                 " seqs %u s_q %u h_q %u parts %u "
                 "fixed %u, lengths",
                 s->seed, s->format, s->layer, s->n_layers, s->tokens_per_block, s->row_pad, s->page_pad, s->slot_pad,
                 s->n_seqs, s->s_q, s->h_q, s->parts, s->fixed_split);
    for (uint32_t i = 0; i < s->n_seqs; i++)
        (void)printf(" %d", s->len[i]);
    (void)printf("\n");
}

/* Decode `s`; judged by the oracle if asked; outputs stay in *c, which the caller ends. */
static bool decode_shape(mla_case *c, const mla_shape *s, bool judge)
{
    char text[TEXT] = "no memory";
    gpu_case g;
    bool good = mla_case_init(c, s);

    if (!good)
        return GPU_FAIL("no memory");
    good = gpu_case_init(&g, c) && gpu_case_run(&g, text, sizeof text);
    if (good && judge)
        good = gpu_case_judge(&g, text, sizeof text);
    if (good && g.result.bad != 0) {
        (void)snprintf(text, sizeof text, "%u bad entries, none was expected", g.result.bad);
        good = false;
    }
    gpu_case_fini(&g);
    if (!good) {
        say_shape(&c->shape);
        return GPU_FAIL("%s", text);
    }
    return true;
}

/* The same problem without layers, pads, spare blocks and garbage. */
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

static bool same_bits_in_both_layouts(const mla_shape *s, bool judge)
{
    mla_shape plain = contiguous(s);
    mla_case a, b;
    bool good = decode_shape(&a, s, judge);

    if (good) {
        good = decode_shape(&b, &plain, false);
        if (good && !mla_case_same_bits(&a, &b)) {
            say_shape(s);
            good = GPU_FAIL("other bits than from a contiguous cache");
        }
        mla_case_fini(&b);
    }
    mla_case_fini(&a);
    return good;
}

static bool strided_equals_contiguous(device *d)
{
    static const uint32_t layers[] = {1, 3, 61}, pages[] = {1, 16, 64}, parts[] = {1, 3, 8};
    uint64_t seed = 1;

    (void)d;
    for (int l = 0; l < 3; l++)
        for (int p = 0; p < 3; p++)
            for (int at = 0; at < 3; at++) {
                int32_t page = (int32_t)pages[p];
                mla_shape s = {.seed = seed++,
                               .n_layers = layers[l],
                               .tokens_per_block = pages[p],
                               .n_seqs = 7,
                               .layer = at == 0   ? 0
                                        : at == 1 ? layers[l] / 2
                                                  : layers[l] - 1,
                               .h_q = at == 1 ? 40 : 16,
                               .s_q = 1 + (uint32_t)at,
                               .parts = parts[(l + p + at) % 3],
                               .slot_pad = 16 * (uint64_t)at,
                               .page_pad = at == 2 ? 48 : 0,
                               .row_pad = p == 1 ? 16 : 0,
                               .spare_blocks = 5,
                               .table_spare = 3,
                               .operand_pad = (uint32_t)at,
                               .len = {0, 1, page - 1, page, page + 1, 3 * page + 7, 5 * page}};

                if (gpu_subset() && (l == 2 || p == 0 || at == 0))
                    continue;
                if (!same_bits_in_both_layouts(&s, true))
                    return false;
            }
    return true;
}

static bool every_head_count_and_query_count(device *d)
{
    static const uint32_t heads[] = {1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 127, 128};
    uint64_t seed = 500;

    (void)d;
    for (size_t h = 0; h < sizeof heads / sizeof heads[0]; h++)
        for (uint32_t s_q = 1; s_q <= 8; s_q++) {
            mla_shape s = {.seed = seed++,
                           .format = h % 3 == 0   ? KVS_FORMAT_mla_bf16
                                     : h % 3 == 1 ? KVS_FORMAT_mla_fp8
                                                  : KVS_FORMAT_fp8_ds_mla,
                           .n_layers = 3,
                           .layer = 1,
                           .tokens_per_block = 64,
                           .n_seqs = 3,
                           .h_q = heads[h],
                           .s_q = s_q,
                           .parts = 1 + (uint32_t)(seed % 3),
                           .spare_blocks = 2,
                           .len = {(int32_t)s_q, 5, 131}};
            mla_case c;
            bool good;

            if (gpu_subset() && (h % 5 != 2 || s_q % 4 != 2))
                continue;
            good = decode_shape(&c, &s, true);
            mla_case_fini(&c);
            if (!good)
                return false;
        }
    return true;
}

static uint32_t pick(rnd *r, const uint32_t *from, size_t n)
{
    return from[rnd_below(r, n)];
}

static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_bf16,
                                   KVS_FORMAT_mla_fp16, KVS_FORMAT_mla_fp8,  KVS_FORMAT_fp8_ds_mla};

static mla_shape random_shape(rnd *r)
{
    static const uint32_t heads[] = {1, 2, 3, 8, 16, 16, 17, 32, 64, 100, 128, 128};
    static const uint32_t pages[] = {1, 2, 3, 16, 17, 32, 64, 64, 128, 256}, layers[] = {1, 2, 3, 5};
    static const uint32_t parts[] = {0, 1, 2, 3, 4, 5, 8, 8, 64, 256};
    mla_shape s = {.seed = rnd_u64(r) % 1000000};
    uint64_t longest = rnd_below(r, 10) == 0 ? 3000 : 400;

    s.format = pick(r, formats, sizeof formats / sizeof *formats);
    if (s.format == KVS_FORMAT_mla_fp16)
        longest = 150; /* slow to make */
    s.n_layers = pick(r, layers, 4);
    s.layer = (uint32_t)rnd_below(r, s.n_layers);
    s.tokens_per_block = pick(r, pages, 10);
    s.row_pad = 16 * (uint32_t)rnd_below(r, 3);
    s.page_pad = 16 * (uint32_t)rnd_below(r, 3);
    s.slot_pad = 16 * rnd_below(r, 100);
    s.n_seqs = 1 + (uint32_t)rnd_below(r, 6);
    s.s_q = rnd_below(r, 2) ? 1 : 1 + (uint32_t)rnd_below(r, 8);
    s.h_q = pick(r, heads, 12);
    s.parts = pick(r, parts, 10);
    s.fixed_split = rnd_below(r, 4) == 0;
    s.spare_blocks = (uint32_t)rnd_below(r, 10);
    s.table_spare = (uint32_t)rnd_below(r, 6);
    s.operand_pad = (uint32_t)rnd_below(r, 10);
    s.q_scale = rnd_below(r, 3) == 0 ? 4 : 1;
    for (uint32_t i = 0; i < s.n_seqs; i++)
        s.len[i] = (int32_t)rnd_below(r, rnd_below(r, 4) == 0 ? 6 : longest);
    return s;
}

static bool random_shapes_are_judged_by_fp64(device *d)
{
    rnd r = rnd_open("random shapes", 20);
    int n = gpu_subset() ? 20 : 400;

    (void)d;
    for (int i = 0; i < n; i++) {
        mla_shape s = random_shape(&r);
        mla_case c;
        bool good;

        if (i % 4 == 0 && s.parts > 0) {
            if (!same_bits_in_both_layouts(&s, true))
                return false;
            continue;
        }
        good = decode_shape(&c, &s, true);
        mla_case_fini(&c);
        if (!good)
            return false;
    }
    return true;
}

static bool the_two_oracles_agree_on(uint32_t format)
{
    mla_shape s = {.seed = 77,
                   .format = format,
                   .n_layers = 2,
                   .layer = 1,
                   .n_seqs = 4,
                   .s_q = 2,
                   .h_q = 3,
                   .spare_blocks = 2,
                   .len = {0, 1, 33, 100}};
    double out[2][4 * 2 * 3 * KVS_MLA_LATENT], lse[2][4 * 2 * 3];
    mla_case c;
    gpu_case g;
    bool good = mla_case_init(&c, &s) && gpu_case_init(&g, &c) && oracle_cuda_decode(&g.args, 100, out[0], lse[0]);

    if (!good)
        return GPU_FAIL("setting up");
    (void)oracle_mla_decode(&c.args, out[1], lse[1]);
    for (size_t i = 0; good && i < sizeof out[0] / sizeof(double); i++)
        good = fabs(out[0][i] - out[1][i]) <= 1e-9 || GPU_FAIL("value %zu: %g and %g", i, out[0][i], out[1][i]);
    for (size_t i = 0; good && i < sizeof lse[0] / sizeof(double); i++)
        good = lse[0][i] == lse[1][i] || fabs(lse[0][i] - lse[1][i]) <= 1e-9 ||
               GPU_FAIL("lse %zu: %g and %g", i, lse[0][i], lse[1][i]);
    gpu_case_fini(&g);
    mla_case_fini(&c);
    return good;
}

static bool the_two_oracles_agree(device *d)
{
    (void)d;
    for (size_t i = 2; i < sizeof formats / sizeof *formats; i++)
        if (!the_two_oracles_agree_on(formats[i]))
            return GPU_FAIL("format %u", formats[i]);
    return true;
}

static bool bad_ids_and_lengths_are_skipped_and_counted(device *d)
{
    rnd r = rnd_open("bad ids", 31);
    static const int32_t wrong[] = {-1, INT_MIN, INT_MAX, 1000000};

    (void)d;
    for (int round = 0; round < (gpu_subset() ? 3 : 40); round++) {
        mla_shape s = {.seed = (uint64_t)round,
                       .format = formats[round % 6],
                       .n_layers = 3,
                       .layer = (uint32_t)round % 3,
                       .tokens_per_block = round % 2 ? 16 : 5,
                       .n_seqs = 6,
                       .s_q = 1 + (uint32_t)round % 3,
                       .h_q = round % 4 == 0 ? 64 : 8,
                       .parts = (uint32_t)round % 5,
                       .spare_blocks = 3,
                       .len = {0, 40, 90, 17, 5, 33}};
        char text[TEXT] = "setting up";
        double *out = malloc(6 * 3 * 64 * KVS_MLA_LATENT * sizeof *out), *lse = malloc(6 * 3 * 64 * sizeof *lse);
        mla_case c;
        gpu_case g;
        uint32_t want;
        bool good = out != NULL && lse != NULL && mla_case_init(&c, &s);
        oracle_verdict v;

        if (!good)
            return GPU_FAIL("no memory");
        for (int k = 0; k < 9; k++)
            c.table[rnd_below(&r, 6) * c.args.table_stride + rnd_below(&r, c.args.table_width)] =
                rnd_below(&r, 3) == 0 ? (int32_t)c.args.view.n_blocks : wrong[rnd_below(&r, 4)];
        c.lens[rnd_below(&r, 6)] = rnd_below(&r, 2) ? -3 : INT_MAX;
        c.lens[0] = (int32_t)(c.args.table_width * c.args.view.tokens_per_block) + round % 2;
        for (uint32_t p = 0; p < c.args.table_width; p++)
            c.table[p] = p % 2 ? -7 : c.table[c.args.table_stride];
        good = gpu_case_init(&g, &c) && gpu_case_run(&g, text, sizeof text);
        want = oracle_mla_decode(&c.args, out, lse);
        if (good) {
            v = oracle_compare(&c.args, out, lse);
            good = oracle_accepts(&v, text);
        }
        if (good && g.result.bad != want) {
            (void)snprintf(text, sizeof text, "%u bad, %u expected", g.result.bad, want);
            good = false;
        }
        gpu_case_fini(&g);
        mla_case_fini(&c);
        free(out);
        free(lse);
        if (!good)
            return GPU_FAIL("round %d: %s", round, text);
    }
    return true;
}

static bool empty_sequences_give_zero_and_minus_infinity(device *d)
{
    (void)d;
    for (uint32_t parts = 1; parts <= 5; parts += 4) {
        mla_shape s = {
            .seed = 3, .n_seqs = 3, .s_q = 4, .h_q = 20, .parts = parts, .spare_blocks = 1, .len = {0, 2, 0}};
        mla_case c;
        bool good = decode_shape(&c, &s, true);

        for (uint64_t t = 0; good && t < 12; t++)
            for (uint64_t h = 0; good && h < 20; h++) {
                const uint8_t *out = c.args.out.base + t * c.args.out.token_stride + h * c.args.out.head_stride;
                float lse;

                memcpy(&lse, c.args.lse.base + t * c.args.lse.token_stride + h * c.args.lse.head_stride, 4);
                if (t == 6 || t == 7) /* the second sequence's last two queries see something */
                    continue;
                good = lse == -INFINITY || GPU_FAIL("token %" PRIu64 ": lse %g", t, (double)lse);
                for (int i = 0; good && i < 1024; i++)
                    good = out[i] == 0 || GPU_FAIL("token %" PRIu64 ": byte %d is %02x", t, i, out[i]);
            }
        mla_case_fini(&c);
        if (!good)
            return false;
    }
    return true;
}

static bool long_sequences(device *d)
{
    static const uint32_t parts[] = {1, 0, 7, 64};

    (void)d;
    for (int k = 0; k < 4; k++) {
        mla_shape s = {.seed = 40,
                       .format = k % 2 ? KVS_FORMAT_fp8_ds_mla : KVS_FORMAT_mla_bf16,
                       .n_layers = 1,
                       .tokens_per_block = 64,
                       .n_seqs = 2,
                       .h_q = k == 2 ? 128 : 16,
                       .s_q = 1,
                       .parts = parts[k],
                       .len = {70001, 4096}};
        mla_case c;
        bool good;

        if (gpu_subset())
            s.len[0] = 5000;
        good = decode_shape(&c, &s, true);
        mla_case_fini(&c);
        if (!good)
            return false;
    }
    return true;
}

/* Blocks 3 GiB apart, the view 1 GiB into the allocation: offsets beyond 2^32 bytes and 2^31 values, for both kernels. */
static bool far_offsets(device *d)
{
    enum { BLOCKS = 8 };
    const uint64_t stride = 3 * GiB, begin = GiB, bytes = begin + (BLOCKS - 1) * stride + 4 * 1024 * 1024;
    mla_shape s = {.seed = 90, .tokens_per_block = 64, .n_seqs = 2, .h_q = 33, .s_q = 1, .parts = 2, .len = {400, 64}};
    mla_case a, b;
    gpu_case g;
    char text[TEXT] = "setting up";
    uint8_t *pool = NULL;
    bool good = decode_shape(&a, &s, true) && mla_case_init(&b, &s) && gpu_case_init(&g, &b);

    (void)d;
    if (!good || b.args.view.n_blocks != BLOCKS)
        return GPU_FAIL("setting up, %u blocks", b.args.view.n_blocks);
    if (cudaMalloc((void **)&pool, bytes) != cudaSuccess || cudaMemset(pool, 0xFF, bytes) != cudaSuccess)
        return GPU_FAIL("no %" PRIu64 " bytes of device memory", bytes);
    for (uint32_t i = 0; good && i < BLOCKS; i++)
        good = cudaMemcpy(pool + begin + i * stride, b.args.view.base + i * b.args.view.block_stride,
                          b.args.view.page_bytes, cudaMemcpyHostToDevice) == cudaSuccess;
    g.args.view.base = pool + begin;
    g.args.view.block_stride = stride;
    good = good && gpu_case_run(&g, text, sizeof text) &&
           (mla_case_same_bits(&a, &b) || GPU_FAIL("other bits than nearby"));
    if (good) { /* and a row written into the last block */
        int64_t slot = 7 * 64 + 63, *dev_slot = NULL;
        uint8_t row[ROW], *dev_row = NULL;
        kvs_mla_write_args w = {.view = g.args.view, .kv_c_stride = ROW, .k_pe_stride = ROW, .n_tokens = 1};
        kvs_err err = {.msg = ""};

        for (int i = 0; i < ROW; i++)
            row[i] = (uint8_t)(i * 7);
        good = cudaMalloc((void **)&dev_slot, 8) == cudaSuccess && cudaMalloc((void **)&dev_row, ROW) == cudaSuccess &&
               cudaMemcpy(dev_slot, &slot, 8, cudaMemcpyHostToDevice) == cudaSuccess &&
               cudaMemcpy(dev_row, row, ROW, cudaMemcpyHostToDevice) == cudaSuccess;
        w.kv_c = dev_row;
        w.k_pe = dev_row + 1024;
        w.slot_mapping = dev_slot;
        good = good && kvs_mla_write_cuda(&w, NULL, NULL, &err) == KVS_OK && cudaDeviceSynchronize() == cudaSuccess;
        memset(row, 0, ROW);
        good =
            good && cudaMemcpy(row, pool + begin + 7 * stride + 63 * ROW, ROW, cudaMemcpyDeviceToHost) == cudaSuccess;
        for (int i = 0; good && i < ROW; i++)
            good = row[i] == (uint8_t)(i * 7) || GPU_FAIL("written byte %d is %02x", i, row[i]);
        (void)cudaFree(dev_slot);
        (void)cudaFree(dev_row);
    }
    (void)cudaFree(pool);
    gpu_case_fini(&g);
    mla_case_fini(&a);
    mla_case_fini(&b);
    return good || GPU_FAIL("%s", text);
}

static bool captured_graphs_take_new_lengths(device *d)
{
    (void)d;
    for (uint32_t parts = 0; parts <= 3; parts += 3) {
        mla_shape s = {.seed = 60,
                       .n_layers = 3,
                       .layer = 2,
                       .tokens_per_block = 16,
                       .n_seqs = 3,
                       .h_q = 16,
                       .s_q = 2,
                       .parts = parts,
                       .table_spare = 1,
                       .len = {100, 57, 9}};
        const int32_t shorter[3] = {31, 0, 100};
        cudaGraph_t graph = NULL;
        cudaGraphExec_t exec = NULL;
        char text[TEXT] = "setting up";
        kvs_err err = {.msg = ""};
        mla_case c, e;
        gpu_case g, plain;
        bool good = mla_case_init(&c, &s) && mla_case_init(&e, &s) && gpu_case_init(&g, &c) &&
                    gpu_case_init(&plain, &e) && gpu_case_prepare(&g) &&
                    cudaStreamBeginCapture(g.stream, cudaStreamCaptureModeGlobal) == cudaSuccess &&
                    gpu_case_launch(&g, &err) == KVS_OK && cudaStreamEndCapture(g.stream, &graph) == cudaSuccess &&
                    cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;

        for (int round = 0; good && round < 2; round++) {
            if (round == 1) { /* the first sequence's blocks serve the third one too: its own are too few */
                memcpy(c.lens, shorter, sizeof shorter);
                memcpy(e.lens, shorter, sizeof shorter);
                memcpy(c.table + 2 * c.args.table_stride, c.table, 7 * sizeof *c.table);
                memcpy(e.table + 2 * e.args.table_stride, e.table, 7 * sizeof *e.table);
                good =
                    cudaMemcpy(g.lens, c.lens, sizeof shorter, cudaMemcpyHostToDevice) == cudaSuccess &&
                    cudaMemcpy(plain.lens, e.lens, sizeof shorter, cudaMemcpyHostToDevice) == cudaSuccess &&
                    cudaMemcpy(g.table, c.table, 3 * c.args.table_stride * 4, cudaMemcpyHostToDevice) == cudaSuccess &&
                    cudaMemcpy(plain.table, e.table, 3 * e.args.table_stride * 4, cudaMemcpyHostToDevice) ==
                        cudaSuccess;
            }
            good = good && gpu_case_prepare(&g) && cudaGraphLaunch(exec, g.stream) == cudaSuccess &&
                   gpu_case_collect(&g) && gpu_case_run(&plain, text, sizeof text) &&
                   (mla_case_same_bits(&c, &e) || GPU_FAIL("replay %d: other bits than a launch", round)) &&
                   gpu_case_judge(&g, text, sizeof text) && mla_case_guards_hold(&c);
        }
        (void)cudaGraphExecDestroy(exec);
        (void)cudaGraphDestroy(graph);
        gpu_case_fini(&g);
        gpu_case_fini(&plain);
        mla_case_fini(&c);
        mla_case_fini(&e);
        if (!good)
            return GPU_FAIL("parts %u: %s %s", parts, text, err.msg);
    }
    return true;
}

static bool the_device_gives_the_same_bits(device *d)
{
    device_queue *q = NULL;
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("by the device", 71);
    bool good = d->ops->queue_open(d, DEVICE_COMPUTE, &q, &err) == KVS_OK || GPU_FAIL("%s", err.msg);

    for (int round = 0; good && round < (gpu_subset() ? 4 : 40); round++) {
        mla_shape s = random_shape(&r);
        char text[TEXT] = "setting up";
        mla_case a, b;
        gpu_case g, h;

        s.parts = s.parts > 0 ? s.parts : round % 2 == 0 ? 2 : 0;
        good = mla_case_init(&a, &s) && mla_case_init(&b, &s) && gpu_case_init(&g, &a) && gpu_case_init(&h, &b) &&
               gpu_case_prepare(&h) && gpu_case_run_on(&h, q, &err) == KVS_OK;
        if (good && (h.result.bad != 0 || h.result.kernel != KVS_KERNEL_MLA_DECODE_MMA))
            good = GPU_FAIL("%u bad, kernel %u", h.result.bad, h.result.kernel);
        good = good && gpu_case_collect(&h) && gpu_case_judge(&h, text, sizeof text);
        if (good && s.parts > 0)
            good = gpu_case_run(&g, text, sizeof text) && (mla_case_same_bits(&a, &b) || GPU_FAIL("other bits"));
        if (!good)
            say_shape(&s);
        gpu_case_fini(&g);
        gpu_case_fini(&h);
        mla_case_fini(&a);
        mla_case_fini(&b);
    }
    d->ops->queue_close(q);
    return good || GPU_FAIL("%s", err.msg);
}

/* The same problems as an extend: lengths, bounds and tables go through the queue's buffer. */
static bool the_device_extends(device *d)
{
    device_queue *q = NULL;
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("extend by the device", 72);
    bool good = d->ops->queue_open(d, DEVICE_COMPUTE, &q, &err) == KVS_OK || GPU_FAIL("%s", err.msg);

    for (int round = 0; good && round < (gpu_subset() ? 4 : 40); round++) {
        mla_shape s = random_shape(&r);
        char text[TEXT] = "setting up";
        mla_case c;
        gpu_case g;

        good = mla_case_init(&c, &s) && gpu_case_init(&g, &c) && gpu_case_prepare(&g) &&
               gpu_case_extend_on(&g, q, &err) == KVS_OK;
        if (good && (g.result.bad != 0 || g.result.kernel != KVS_KERNEL_MLA_EXTEND_MMA))
            good = GPU_FAIL("%u bad, kernel %u", g.result.bad, g.result.kernel);
        good = good && gpu_case_collect(&g) && gpu_case_judge(&g, text, sizeof text);
        if (!good) {
            say_shape(&s);
            (void)GPU_FAIL("%s", text);
        }
        gpu_case_fini(&g);
        mla_case_fini(&c);
    }
    d->ops->queue_close(q);
    return good || GPU_FAIL("%s", err.msg);
}

static bool repeated_launches_give_the_same_bits(device *d)
{
    mla_shape s = {.seed = 5,
                   .n_layers = 3,
                   .layer = 1,
                   .tokens_per_block = 64,
                   .n_seqs = 8,
                   .h_q = 128,
                   .s_q = 1,
                   .parts = 4,
                   .len = {1000, 1, 900, 64, 640, 333, 77, 1024}};
    char text[TEXT] = "setting up";
    mla_case c;
    gpu_case g;
    uint64_t first = 0;
    bool good = mla_case_init(&c, &s) && gpu_case_init(&g, &c);

    (void)d;
    for (int i = 0; good && i < (gpu_subset() ? 3 : 50); i++) {
        good = gpu_case_run(&g, text, sizeof text);
        first = i == 0 ? mla_case_hash(&c) : first;
        if (good && mla_case_hash(&c) != first)
            good = GPU_FAIL("run %d has other bits", i);
    }
    good = good && gpu_case_judge(&g, text, sizeof text);
    gpu_case_fini(&g);
    mla_case_fini(&c);
    return good || GPU_FAIL("%s", text);
}

static bool wrong_arguments_are_refused_before_a_launch(device *d)
{
    mla_shape s = {.seed = 1, .n_seqs = 1, .h_q = 4, .parts = 2, .len = {20}};
    kvs_err err = {.msg = ""};
    mla_case c;
    gpu_case g;
    kvs_mla_decode_result ret;
    bool good = mla_case_init(&c, &s) && gpu_case_init(&g, &c);
    kvs_mla_decode_args a;

    (void)d;
    if (!good)
        return GPU_FAIL("setting up");
    if (kvs_mla_decode_cuda(&g.args, g.workspace, g.workspace_bytes - 4, NULL, &ret, NULL, &err) != KVS_E_LIMIT)
        good = GPU_FAIL("a small workspace was taken");
    a = g.args;
    a.view.format = KVS_FORMAT_indexer_fp8;
    if (kvs_mla_decode_cuda(&a, g.workspace, g.workspace_bytes, NULL, &ret, NULL, &err) != KVS_E_UNSUPPORTED)
        good = GPU_FAIL("another format was taken");
    a = g.args;
    a.view.block_stride += 8;
    if (kvs_mla_decode_cuda(&a, g.workspace, g.workspace_bytes, NULL, &ret, NULL, &err) != KVS_E_INVALID)
        good = GPU_FAIL("a pitch of half a chunk was taken");
    a = g.args;
    a.h_q = 129;
    if (kvs_mla_decode_cuda(&a, g.workspace, g.workspace_bytes, NULL, &ret, NULL, &err) != KVS_E_INVALID)
        good = GPU_FAIL("129 heads were taken");
    gpu_case_fini(&g);
    mla_case_fini(&c);
    return good && (cudaDeviceSynchronize() == cudaSuccess || GPU_FAIL("the device has an error"));
}

static const gpu_test tests[] = {
    {"the_two_oracles_agree", the_two_oracles_agree},
    {"write_by_the_device_lets_the_last_token_win", write_by_the_device_lets_the_last_token_win},
    {"strided_equals_contiguous", strided_equals_contiguous},
    {"every_head_count_and_query_count", every_head_count_and_query_count},
    {"random_shapes_are_judged_by_fp64", random_shapes_are_judged_by_fp64},
    {"bad_ids_and_lengths_are_skipped_and_counted", bad_ids_and_lengths_are_skipped_and_counted},
    {"empty_sequences_give_zero_and_minus_infinity", empty_sequences_give_zero_and_minus_infinity},
    {"long_sequences", long_sequences},
    {"far_offsets", far_offsets},
    {"captured_graphs_take_new_lengths", captured_graphs_take_new_lengths},
    {"the_device_gives_the_same_bits", the_device_gives_the_same_bits},
    {"the_device_extends", the_device_extends},
    {"repeated_launches_give_the_same_bits", repeated_launches_give_the_same_bits},
    {"wrong_arguments_are_refused_before_a_launch", wrong_arguments_are_refused_before_a_launch},
};

int main(int argc, char **argv)
{
    return gpu_run(tests, sizeof tests / sizeof tests[0], argc, argv);
}
#else
static bool needs_cuda(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    const gpu_test tests[] = {{"needs_cuda", needs_cuda}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
