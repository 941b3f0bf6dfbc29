/* kernels-bench: attention with heads of keys and values, MLA extend, ragged MHA. */
#include "tests/kernels/kb_ops.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/kv_decode.h"
#include "kernels/mha_ragged.h"
#include "kernels/mla_extend.h"
#include "proto/layout.h"
#include "tests/gpu/fill_cuda.h"

enum { TURNS = 4, PLANES = 2 * KB_LAYERS };

/* Dense rows of `bytes`, for h heads of a token. */
static kvs_strided dense(uint8_t *base, uint32_t h, uint64_t bytes)
{
    return (kvs_strided){base, h * bytes, bytes};
}

static const int32_t *equal_lengths(kb *b, uint32_t n, uint32_t len)
{
    int32_t *lens = malloc(n * sizeof *lens), *dev;

    if (lens == NULL)
        kb_die("no memory");
    for (uint32_t i = 0; i < n; i++)
        lens[i] = (int32_t)len;
    dev = kb_in(b, lens, n * sizeof *lens);
    free(lens);
    return dev;
}

/* 0, each, 2 * each, ... */
static const int32_t *equal_starts(kb *b, uint32_t n, uint32_t each)
{
    int32_t *starts = malloc((n + 1) * sizeof *starts), *dev;

    if (starts == NULL)
        kb_die("no memory");
    for (uint32_t i = 0; i <= n; i++)
        starts[i] = (int32_t)(i * each);
    dev = kb_in(b, starts, (n + 1) * sizeof *starts);
    free(starts);
    return dev;
}

/* --- kv_decode ---------------------------------------------------------------------------------------------------- */

typedef struct kv {
    kvs_kv_decode_args a;
    uint32_t format, d;
    const int32_t *table[TURNS];
    void *workspace;
    uint64_t workspace_bytes;
} kv;

static uint64_t kv_page(const kv *w)
{
    return (uint64_t)KB_TOKENS * w->a.h_kv * w->d * (w->format == KVS_FORMAT_kv_fp8 ? 1 : 2);
}

static uint32_t kv_blocks(const kb *b, const kv *w)
{
    return (uint32_t)(b->pool_bytes / (kv_page(w) * PLANES));
}

/* The pool as 61 layers of keys and values. */
static kvs_view kv_view(const kb *b, const kv *w, uint32_t plane, bool strided)
{
    const uint64_t page = kv_page(w);
    const uint32_t n = kv_blocks(b, w);

    return (kvs_view){.base = b->pool + (strided ? plane : (uint64_t)plane * n) * page,
                      .block_stride = strided ? PLANES * page : page,
                      .page_bytes = page,
                      .n_blocks = n,
                      .tokens_per_block = KB_TOKENS,
                      .row_bytes = (uint32_t)(page / KB_TOKENS),
                      .format = w->format};
}

static kvs_status call_kv(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    kv *w = args;
    kvs_mla_decode_result ignored;

    w->a.k = kv_view(b, w, 2 * kb_layer(turn), strided);
    w->a.v = kv_view(b, w, 2 * kb_layer(turn) + 1, strided);
    w->a.block_table = w->table[turn];
    return kvs_kv_decode_cuda(&w->a, w->workspace, w->workspace_bytes, NULL, &ignored, b->stream, err);
}

static void measure_kv(kb *b, uint32_t format, uint32_t n, uint32_t len, uint32_t h_kv, uint32_t group, uint32_t d)
{
    const uint32_t h_q = h_kv * group, pages = (len + KB_TOKENS - 1) / KB_TOKENS;
    kv w = {.format = format, .d = d};
    kb_work work = {.op = "kv_decode", .call = call_kv, .args = &w, .turns = TURNS};

    w.a = (kvs_kv_decode_args){.n_seqs = n,
                               .table_width = pages,
                               .table_stride = pages,
                               .s_q = 1,
                               .h_q = h_q,
                               .h_kv = h_kv,
                               .d_qk = d,
                               .d_v = d,
                               .sm_scale = 0.08F,
                               .k_scale = 1,
                               .v_scale = 1};
    w.a.k_head = w.a.v_head = kv_page(&w) / KB_TOKENS / h_kv;
    w.a.q = dense(kb_random(b, (uint64_t)n * h_q * d * 2), h_q, d * 2);
    w.a.out = dense(kb_alloc(b, (uint64_t)n * h_q * d * 2), h_q, d * 2);
    w.a.lse = dense(kb_alloc(b, (uint64_t)n * h_q * 4), h_q, 4);
    w.a.seq_len = equal_lengths(b, n, len);
    for (uint32_t i = 0; i < TURNS; i++)
        w.table[i] = kb_ids(b, n * pages, kv_blocks(b, &w));
    w.a.k = kv_view(b, &w, 0, true);
    w.workspace_bytes = kvs_kv_decode_cuda_workspace(&w.a);
    w.workspace = kb_alloc(b, w.workspace_bytes + 16);
    work.bytes = (uint64_t)n * (len * (2 * kv_page(&w) / KB_TOKENS) + h_q * (4 * d + 4));
    work.flop = 4.0 * n * len * h_q * d;
    (void)snprintf(work.shape, sizeof work.shape, "%s %u x %u, h %u x %u, d %u", kvs_format_name(format), n, len, h_kv,
                   group, d);
    kb_measure(b, &work);
}

/* Numbers that attention is done with in all of the pool: as pages of MLA, bf16 or e4m3 or both. */
static void fill_pool(kb *b, uint32_t format)
{
    if (!fill_cuda_pages(b->pool, (uint64_t)kb_n_blocks(b, format) * KB_LAYERS, kb_page_bytes(format), format,
                         KB_TOKENS))
        kb_die("filling the pool with %s failed", kvs_format_name(format));
}

static void run_kv(kb *b)
{
    static const uint32_t shapes[][5] = {
        {64, 4096, 8, 4, 128}, {64, 4096, 8, 8, 128}, {32, 2048, 32, 1, 128}, {8, 8192, 8, 4, 128},
        {1, 65536, 8, 8, 128}, {64, 4096, 8, 4, 64},  {32, 4096, 4, 8, 256},
    };

    for (uint32_t f = 0; f < 2; f++) {
        fill_pool(b, f == 0 ? KVS_FORMAT_mla_bf16 : KVS_FORMAT_mla_fp8);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            measure_kv(b, f == 0 ? KVS_FORMAT_kv_bf16 : KVS_FORMAT_kv_fp8, shapes[i][0], shapes[i][1], shapes[i][2],
                       shapes[i][3], shapes[i][4]);
    }
}

/* --- mla_extend --------------------------------------------------------------------------------------------------- */

typedef struct extend {
    kvs_mla_extend_args a;
    uint32_t format;
    const int32_t *table[TURNS];
    void *workspace;
    uint64_t workspace_bytes;
} extend;

static kvs_status call_extend(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    extend *w = args;
    kvs_mla_decode_result ignored;

    w->a.view = kb_view(b, w->format, kb_layer(turn), strided);
    w->a.block_table = w->table[turn];
    return kvs_mla_extend_cuda(&w->a, w->workspace, w->workspace_bytes, NULL, &ignored, b->stream, err);
}

static void measure_extend(kb *b, uint32_t format, uint32_t n, uint32_t queries, uint32_t len, uint32_t h)
{
    const uint32_t pages = (len + KB_TOKENS - 1) / KB_TOKENS;
    const uint64_t T = (uint64_t)n * queries, row = kvs_format_row_bytes(format);
    const float scale = 1;
    extend w = {.format = format};
    kb_work work = {.op = "mla_extend", .call = call_extend, .args = &w, .turns = TURNS};
    uint8_t *q = kb_random(b, T * h * 1152);

    w.a = (kvs_mla_extend_args){.n_seqs = n,
                                .n_tokens = (uint32_t)T,
                                .table_width = pages,
                                .table_stride = pages,
                                .h_q = h,
                                .sm_scale = 0.04167F,
                                .kv_scale = kb_in(b, &scale, sizeof scale)};
    w.a.q_nope = dense(q, h, 1152);
    w.a.q_pe = dense(q + 1024, h, 1152);
    w.a.out = dense(kb_alloc(b, T * h * 1024), h, 1024);
    w.a.lse = dense(kb_alloc(b, T * h * 4), h, 4);
    w.a.q_start = equal_starts(b, n, queries);
    w.a.seq_len = equal_lengths(b, n, len);
    for (uint32_t i = 0; i < TURNS; i++)
        w.table[i] = kb_ids(b, n * pages, kb_n_blocks(b, format));
    w.a.view = kb_view(b, format, 0, true);
    w.workspace_bytes = kvs_mla_extend_cuda_workspace(&w.a);
    w.workspace = kb_alloc(b, w.workspace_bytes + 16);
    work.bytes = n * len * row + T * h * (1152 + 1024 + 4);
    work.flop = 2.0 * (576 + 512) * (double)T * h * (len - (queries - 1) / 2.0);
    (void)snprintf(work.shape, sizeof work.shape, "%s %u x %u of %u, h %u", kvs_format_name(format), n, queries, len,
                   h);
    kb_measure(b, &work);
}

static void run_extend(kb *b)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_fp8_ds_mla};

    for (uint32_t f = 0; f < 2; f++) {
        fill_pool(b, formats[f]);
        measure_extend(b, formats[f], 8, 256, 4096, 16);
        measure_extend(b, formats[f], 8, 64, 4096, 128);
        measure_extend(b, formats[f], 1, 512, 8192, 128);
        measure_extend(b, formats[f], 128, 2, 4096, 16);
    }
}

/* --- mha_ragged --------------------------------------------------------------------------------------------------- */

static kvs_status call_mha(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    (void)turn;
    (void)strided;
    return kvs_mha_ragged_cuda(args, NULL, b->stream, err);
}

static void measure_mha(kb *b, uint32_t n, uint32_t queries, uint32_t keys, uint32_t h, uint32_t causal)
{
    const uint64_t n_q = (uint64_t)n * queries, n_k = (uint64_t)n * keys;
    kvs_mha_ragged_args a = {.n_seqs = n,
                             .n_q = (uint32_t)n_q,
                             .n_k = (uint32_t)n_k,
                             .h = h,
                             .d_qk = 192,
                             .d_v = 128,
                             .causal = causal,
                             .sm_scale = 0.0721688F};
    kb_work work = {.op = "mha_ragged", .call = call_mha, .args = &a, .turns = TURNS, .no_view = true};

    a.q = dense(kb_random(b, n_q * h * 384), h, 384);
    a.k = dense(kb_random(b, n_k * h * 384), h, 384);
    a.v = dense(kb_random(b, n_k * h * 256), h, 256);
    a.out = dense(kb_alloc(b, n_q * h * 256), h, 256);
    a.lse = dense(kb_alloc(b, n_q * h * 4), h, 4);
    a.q_start = equal_starts(b, n, queries);
    a.k_start = equal_starts(b, n, keys);
    work.bytes = n_q * h * (384 + 256 + 4) + n_k * h * 640;
    work.flop = 2.0 * (192 + 128) * (double)n_q * h * (causal ? keys - (queries - 1) / 2.0 : keys);
    (void)snprintf(work.shape, sizeof work.shape, "%u x %u of %u, h %u%s", n, queries, keys, h,
                   causal ? ", causal" : "");
    kb_measure(b, &work);
}

static void run_mha(kb *b)
{
    measure_mha(b, 4, 1024, 4096, 16, 0);
    measure_mha(b, 4, 1024, 4096, 16, 1);
    measure_mha(b, 1, 2048, 8192, 128, 0);
}
#else
static void run_kv(kb *b)
{
    (void)b;
}

static void run_extend(kb *b)
{
    (void)b;
}

static void run_mha(kb *b)
{
    (void)b;
}
#endif

const kb_op kb_op_kv_decode = {"kv_decode", run_kv};
const kb_op kb_op_mla_extend = {"mla_extend", run_extend};
const kb_op kb_op_mha_ragged = {"mha_ragged", run_mha};
