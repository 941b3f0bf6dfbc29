/* MLA attention: dense decode by block tables and sparse decode by token lists, in every format. */
#include "tests/kernels/kb_ops.h"

#ifdef KVS_CUDA
#include <stdio.h>

#include "kernels/kernels_cuda.h"
#include "kernels/mla_sparse.h"
#include "kernels/view_check.h"
#include "proto/layout.h"
#include "tests/gpu/fill_cuda.h"

enum { TURNS = 6, ROW = 1152, LATENT_BYTES = 1024, MAX_LISTS = 128 };

/* One call's operands; the lists of each turn are its own. */
typedef struct attend {
    uint32_t format;
    kvs_mla_decode_args dense;
    kvs_mla_sparse_args sparse;
    const int32_t *list[TURNS];
    uint8_t *workspace;
    uint64_t workspace_bytes;
} attend;

static kvs_status run_dense(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    attend *x = args;
    kvs_mla_decode_result r;

    x->dense.view = kb_view(b, x->format, kb_layer(turn), strided);
    x->dense.block_table = x->list[turn];
    return kvs_mla_decode_cuda(&x->dense, x->workspace, x->workspace_bytes, NULL, &r, b->stream, err);
}

static kvs_status run_sparse(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    attend *x = args;
    kvs_mla_decode_result r;

    x->sparse.view = kb_view(b, x->format, kb_layer(turn), strided);
    x->sparse.indices = (const kvs_logical_index *)(const void *)x->list[turn];
    return kvs_mla_sparse_cuda(&x->sparse, x->workspace, x->workspace_bytes, NULL, &r, b->stream, err);
}

/* Numbers that attention is done with: neither NaN nor infinite. */
static void fill_pool(kb *b, uint32_t format)
{
    if (!fill_cuda_pages(b->pool, (uint64_t)kb_n_blocks(b, format) * KB_LAYERS, kb_page_bytes(format), format,
                         KB_TOKENS))
        kb_die("filling the pool with %s failed", kvs_format_name(format));
}

static kvs_strided rows(kb *b, uint64_t n_tokens, uint32_t h_q, uint64_t bytes)
{
    return (kvs_strided){kb_alloc(b, n_tokens * h_q * bytes), h_q * bytes, bytes};
}

/* Queries [n_tokens][h_q][576] bf16. */
static void queries(kb *b, uint64_t n_tokens, uint32_t h_q, uint64_t nope_bytes, kvs_strided *q_nope, kvs_strided *q_pe)
{
    *q_nope = rows(b, n_tokens, h_q, ROW);
    *q_pe = *q_nope;
    q_pe->base += nope_bytes;
    if (!fill_cuda_bf16(q_nope->base, n_tokens * h_q * ROW / 2, 2))
        kb_die("filling queries failed");
}

static void dense(kb *b, uint32_t format, uint32_t n, uint32_t len, uint32_t h_q, uint32_t s_q)
{
    const uint32_t width = len / KB_TOKENS, token = kvs_format_token_bytes(format).row;
    const uint64_t n_rows = (uint64_t)n * s_q * h_q;
    const float one = 1;
    int32_t lens[MAX_LISTS];
    attend x = {.format = format};
    kb_work w = {.op = "mla_decode", .call = run_dense, .args = &x, .turns = TURNS};

    for (uint32_t i = 0; i < n; i++)
        lens[i] = (int32_t)len;
    x.dense = (kvs_mla_decode_args){.n_seqs = n,
                                    .table_width = width,
                                    .table_stride = width,
                                    .s_q = s_q,
                                    .h_q = h_q,
                                    .sm_scale = 0.04167f,
                                    .kv_scale = kb_in(b, &one, sizeof one),
                                    .seq_len = kb_in(b, lens, n * sizeof *lens),
                                    .out = rows(b, (uint64_t)n * s_q, h_q, LATENT_BYTES),
                                    .lse = rows(b, (uint64_t)n * s_q, h_q, sizeof(float))};
    queries(b, (uint64_t)n * s_q, h_q, LATENT_BYTES, &x.dense.q_nope, &x.dense.q_pe);
    for (uint32_t i = 0; i < TURNS; i++)
        x.list[i] = kb_ids(b, n * width, kb_n_blocks(b, format));
    x.dense.view = kb_view(b, format, 0, true);
    x.workspace_bytes = kvs_mla_decode_cuda_workspace(&x.dense);
    x.workspace = kb_alloc(b, x.workspace_bytes + 16);
    w.bytes = (uint64_t)n * len * token + n_rows * (ROW + LATENT_BYTES + sizeof(float));
    w.flop = 2.0 * (576 + 512) * (double)n_rows * len;
    (void)snprintf(w.shape, sizeof w.shape, "%s %u x %u, h %u, s_q %u", kvs_format_name(format), n, len, h_q, s_q);
    kb_measure(b, &w);
}

static void sparse(kb *b, uint32_t format, uint32_t n, uint32_t topk, uint32_t h_q)
{
    const kvs_token_bytes token = kvs_format_token_bytes(format);
    const uint32_t dims = format == KVS_FORMAT_fp8_ds_mla ? 576 : 512;
    const uint64_t n_rows = (uint64_t)n * h_q;
    attend x = {.format = format};
    kb_work w = {.op = "mla_sparse", .call = run_sparse, .args = &x, .turns = TURNS};

    x.sparse = (kvs_mla_sparse_args){.n_seqs = n,
                                     .s_q = 1,
                                     .topk = topk,
                                     .index_stride = topk,
                                     .h_q = h_q,
                                     .sm_scale = 0.04167f,
                                     .out = rows(b, n, h_q, LATENT_BYTES),
                                     .lse = rows(b, n, h_q, sizeof(float))};
    queries(b, n, h_q, (dims - KVS_MLA_ROPE) * 2, &x.sparse.q_nope, &x.sparse.q_pe);
    for (uint32_t i = 0; i < TURNS; i++)
        x.list[i] = kb_ids(b, n * topk, kb_n_blocks(b, format) * KB_TOKENS);
    x.sparse.view = kb_view(b, format, 0, true);
    x.workspace_bytes = kvs_mla_sparse_cuda_workspace(&x.sparse);
    x.workspace = kb_alloc(b, x.workspace_bytes + 16);
    w.bytes = (uint64_t)n * topk * (token.row + token.tail) + n_rows * (2 * dims + LATENT_BYTES + sizeof(float));
    w.flop = 2.0 * (dims + 512) * (double)n_rows * topk;
    (void)snprintf(w.shape, sizeof w.shape, "%s %u x %u, h %u", kvs_format_name(format), n, topk, h_q);
    kb_measure(b, &w);
}

static void run_decode(kb *b)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp8, KVS_FORMAT_fp8_ds_mla};
    static const uint32_t shapes[][4] = {{128, 4096, 16, 1}, {128, 4096, 128, 1}, {128, 4096, 16, 2},
                                         {8, 8192, 16, 1},   {8, 8192, 128, 1},   {1, 65536, 128, 1}};

    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        fill_pool(b, formats[f]);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            dense(b, formats[f], shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
    }
}

static void run_lists(kb *b)
{
    static const uint32_t formats[] = {KVS_FORMAT_fp8_ds_mla, KVS_FORMAT_fp8_blk584, KVS_FORMAT_fp8_blk528};
    static const uint32_t shapes[][3] = {
        {128, 2048, 16}, {128, 2048, 64}, {128, 2048, 128}, {16, 2048, 128}, {1, 2048, 128}};

    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        fill_pool(b, formats[f]);
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            sparse(b, formats[f], shapes[i][0], shapes[i][1], shapes[i][2]);
    }
}
#else
static void run_decode(kb *b)
{
    (void)b;
}

static void run_lists(kb *b)
{
    (void)b;
}
#endif

const kb_op kb_op_mla_decode = {"mla_decode", run_decode};
const kb_op kb_op_mla_sparse = {"mla_sparse", run_lists};
