/* kernels-bench: gathers, and writes that quantise. */
#include "tests/kernels/kb_ops.h"

#ifdef KVS_CUDA
#include <stdio.h>
#include <stdlib.h>

#include "kernels/blockwise.h"
#include "kernels/cache_gather.h"
#include "kernels/concat_q.h"
#include "kernels/gather_dequant.h"
#include "kernels/gather_upconvert.h"
#include "kernels/index_convert.h"
#include "kernels/indexer.h"
#include "kernels/kv_write.h"
#include "proto/layout.h"

enum { TURNS = 8, SEQUENCE = 4096 };
static const uint32_t N_ROWS[] = {8192, 131072, 524288};

/* --- gathers ------------------------------------------------------------------------------------------------------ */

typedef struct gather gather;
typedef kvs_status (*gather_launch)(kb *b, const gather *g, kvs_view v, kvs_gather_list l, kvs_err *err);

/* Sequences of 4,096 tokens on random pages, other ones each turn. */
struct gather {
    uint32_t format, n_rows, dst_type;
    gather_launch launch;
    int32_t *table[TURNS], *starts;
    float *scale;
    uint8_t *dst, *dst_scale;
};

static kvs_status call_gather(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    const gather *g = args;
    const kvs_gather_list l = {.row_starts = g->starts,
                               .block_table = g->table[turn],
                               .table_stride = SEQUENCE / KB_TOKENS,
                               .n_seqs = g->n_rows / SEQUENCE,
                               .table_width = SEQUENCE / KB_TOKENS,
                               .n_rows = g->n_rows};

    return g->launch(b, g, kb_view(b, g->format, kb_layer(turn), strided), l, err);
}

static void measure_gather(kb *b, gather *g, const char *op, const char *what, uint32_t token_bytes)
{
    int32_t starts[524288 / SEQUENCE + 1];
    kb_work work = {.op = op, .call = call_gather, .args = g, .turns = TURNS};

    for (uint32_t s = 0; s <= g->n_rows / SEQUENCE; s++)
        starts[s] = (int32_t)(s * SEQUENCE);
    g->starts = kb_in(b, starts, (g->n_rows / SEQUENCE + 1) * sizeof *starts);
    for (int turn = 0; turn < TURNS; turn++)
        g->table[turn] = kb_ids(b, g->n_rows / KB_TOKENS, kb_n_blocks(b, g->format));
    work.bytes = (uint64_t)g->n_rows * token_bytes;
    (void)snprintf(work.shape, sizeof work.shape, "%s, %u tokens", what, g->n_rows);
    kb_measure(b, &work);
}

static kvs_status launch_copy(kb *b, const gather *g, kvs_view v, kvs_gather_list l, kvs_err *err)
{
    const uint32_t entry = kvs_format_row_bytes(g->format);
    const kvs_cache_gather_args a = {v, l, g->dst, entry, entry};

    return kvs_cache_gather_cuda(&a, NULL, b->stream, err);
}

static void run_cache_gather(kb *b)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_fp8_ds_mla};

    for (uint32_t i = 0; i < 4; i++) {
        gather g = {.format = formats[i / 2], .n_rows = N_ROWS[i % 2], .launch = launch_copy};
        const uint32_t row = kvs_format_row_bytes(g.format);

        g.dst = kb_alloc(b, (uint64_t)g.n_rows * row);
        measure_gather(b, &g, "cache_gather", kvs_format_name(g.format), 2 * row);
    }
}

static kvs_status launch_dequant(kb *b, const gather *g, kvs_view v, kvs_gather_list l, kvs_err *err)
{
    const kvs_gather_dequant_args a = {v,   l,          g->scale, g->dst, UINT64_C(576) * kvs_value_bytes(g->dst_type),
                                       576, g->dst_type};

    return kvs_gather_dequant_cuda(&a, NULL, b->stream, err);
}

static void run_gather_dequant(kb *b)
{
    static const char *const names[] = {"to bf16", "to fp16", "to fp32"};
    const float one = 1;

    for (uint32_t i = 0; i < 6; i++) {
        gather g = {.format = KVS_FORMAT_mla_fp8,
                    .n_rows = N_ROWS[i % 2],
                    .dst_type = KVS_VALUE_BF16 + i / 2,
                    .launch = launch_dequant};
        const uint32_t row = 576 * kvs_value_bytes(g.dst_type);

        g.scale = kb_in(b, &one, sizeof one);
        g.dst = kb_alloc(b, (uint64_t)g.n_rows * row);
        measure_gather(b, &g, "gather_dequant", names[i / 2], 576 + row);
    }
}

static kvs_status launch_upconvert(kb *b, const gather *g, kvs_view v, kvs_gather_list l, kvs_err *err)
{
    const kvs_gather_upconvert_args a = {v, l, g->dst, 1152};

    return kvs_gather_upconvert_cuda(&a, NULL, b->stream, err);
}

static void run_gather_upconvert(kb *b)
{
    for (uint32_t i = 0; i < 2; i++) {
        gather g = {.format = KVS_FORMAT_fp8_ds_mla, .n_rows = N_ROWS[i], .launch = launch_upconvert};

        g.dst = kb_alloc(b, (uint64_t)g.n_rows * 1152);
        measure_gather(b, &g, "gather_upconvert", "fp8_ds_mla", 656 + 1152);
    }
}

static kvs_status launch_keys(kb *b, const gather *g, kvs_view v, kvs_gather_list l, kvs_err *err)
{
    const kvs_indexer_gather_args a = {v, l, g->dst, g->dst_scale, 128, 4};

    return kvs_indexer_gather_cuda(&a, NULL, b->stream, err);
}

static void run_indexer_gather(kb *b)
{
    for (uint32_t i = 0; i < 2; i++) {
        gather g = {.format = KVS_FORMAT_indexer_fp8, .n_rows = N_ROWS[2 * i], .launch = launch_keys};

        g.dst = kb_alloc(b, (uint64_t)g.n_rows * 128);
        g.dst_scale = kb_alloc(b, (uint64_t)g.n_rows * 4);
        measure_gather(b, &g, "indexer_gather", "indexer_fp8", 2 * 132);
    }
}

static kvs_status launch_blockwise(kb *b, const gather *g, kvs_view v, kvs_gather_list l, kvs_err *err)
{
    const kvs_blockwise_gather_args a = {v, l, g->dst, 1024};

    return kvs_blockwise_gather_cuda(&a, NULL, b->stream, err);
}

static void run_blockwise_gather(kb *b)
{
    static const uint32_t formats[] = {KVS_FORMAT_fp8_blk584, KVS_FORMAT_fp8_blk528};

    for (uint32_t i = 0; i < 4; i++) {
        gather g = {.format = formats[i / 2], .n_rows = N_ROWS[i % 2], .launch = launch_blockwise};

        g.dst = kb_alloc(b, (uint64_t)g.n_rows * 1024);
        measure_gather(b, &g, "blockwise_gather", kvs_format_name(g.format), kvs_format_row_bytes(g.format) + 1024);
    }
}

const kb_op kb_op_cache_gather = {"cache_gather", run_cache_gather};
const kb_op kb_op_gather_dequant = {"gather_dequant", run_gather_dequant};
const kb_op kb_op_gather_upconvert = {"gather_upconvert", run_gather_upconvert};
const kb_op kb_op_indexer_gather = {"indexer_gather", run_indexer_gather};
const kb_op kb_op_blockwise_gather = {"blockwise_gather", run_blockwise_gather};

/* --- writes ------------------------------------------------------------------------------------------------------- */

typedef struct keys {
    kvs_indexer_write_args a;
    int64_t *slots[TURNS];
} keys;

static kvs_status call_keys(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    keys *w = args;

    w->a.view = kb_view(b, KVS_FORMAT_indexer_fp8, kb_layer(turn), strided);
    w->a.slot_mapping = w->slots[turn];
    return kvs_indexer_write_cuda(&w->a, NULL, b->stream, err);
}

/* Slots of a prompt: whole pages, in any order. */
static int64_t *page_slots(kb *b, uint32_t n, uint32_t n_blocks)
{
    int64_t *host = malloc((size_t)n * sizeof *host), *dev;
    uint64_t *pages = kb_pick(b, (n + KB_TOKENS - 1) / KB_TOKENS, n_blocks);

    if (host == NULL)
        kb_die("no memory for %u tokens", n);
    for (uint32_t i = 0; i < n; i++)
        host[i] = (int64_t)(pages[i / KB_TOKENS] * KB_TOKENS + i % KB_TOKENS);
    dev = kb_in(b, host, (uint64_t)n * sizeof *host);
    free(host);
    free(pages);
    return dev;
}

/* Every token anywhere writes its scale, 4 bytes, into 32 of their own; those of a prompt share them. */
static void run_indexer_write(kb *b)
{
    const uint32_t n_blocks = kb_n_blocks(b, KVS_FORMAT_indexer_fp8);

    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t n = N_ROWS[i % 2 * 2];
        const bool prompt = i >= 4;
        keys w = {.a = {.k_stride = 256, .n_tokens = n, .k_type = KVS_VALUE_BF16, .scale_kind = i / 2 % 2}};
        kb_work work = {.op = "indexer_write", .call = call_keys, .args = &w, .turns = TURNS};

        w.a.k = kb_random(b, (uint64_t)n * 256);
        for (int turn = 0; turn < TURNS; turn++)
            w.slots[turn] = prompt ? page_slots(b, n, n_blocks) : kb_slots(b, n, (uint64_t)n_blocks * KB_TOKENS);
        work.bytes = (uint64_t)n * (256 + 132 + sizeof(int64_t));
        (void)snprintf(work.shape, sizeof work.shape, "%s, %u tokens%s", i / 2 % 2 == 0 ? "fp32" : "ue8m0", n,
                       prompt ? ", whole pages" : "");
        kb_measure(b, &work);
    }
}

typedef struct records {
    kvs_blockwise_write_args a;
    uint32_t format;
    int64_t *slots[TURNS];
} records;

static kvs_status call_records(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    records *w = args;

    w->a.view = kb_view(b, w->format, kb_layer(turn), strided);
    w->a.slot_mapping = w->slots[turn];
    return kvs_blockwise_write_cuda(&w->a, NULL, b->stream, err);
}

static void run_blockwise_write(kb *b)
{
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t n = N_ROWS[i % 2], type = i / 2 % 2 == 0 ? KVS_VALUE_BF16 : KVS_VALUE_FP32,
                       row = 512 * kvs_value_bytes(type);
        records w = {.format = i < 4 ? KVS_FORMAT_fp8_blk584 : KVS_FORMAT_fp8_blk528,
                     .a = {.x_stride = row, .n_tokens = n, .x_type = type}};
        kb_work work = {.op = "blockwise_write", .call = call_records, .args = &w, .turns = TURNS};

        w.a.x = kb_random(b, (uint64_t)n * row);
        for (int turn = 0; turn < TURNS; turn++)
            w.slots[turn] = kb_slots(b, n, (uint64_t)kb_n_blocks(b, w.format) * KB_TOKENS);
        work.bytes = (uint64_t)n * (row + kvs_format_row_bytes(w.format) + sizeof(int64_t));
        (void)snprintf(work.shape, sizeof work.shape, "%s of %s, %u tokens", kvs_format_name(w.format),
                       type == KVS_VALUE_BF16 ? "bf16" : "fp32", n);
        kb_measure(b, &work);
    }
}

/* K and V of 8 heads of 128 values, tokens first or heads first; K's page and V's are planes of one layer. */
enum { HEADS = 8, DIM = 128 };

typedef struct kv {
    kvs_kv_write_args a;
    uint32_t format, value;
    bool heads_first;
    int64_t *slots[TURNS];
} kv;

static uint32_t kv_blocks(const kb *b, const kv *w)
{
    return (uint32_t)(b->pool_bytes / (UINT64_C(2) * KB_LAYERS * KB_TOKENS * HEADS * DIM * w->value));
}

static kvs_view kv_view(const kb *b, const kv *w, uint32_t plane, bool strided)
{
    const uint64_t page = (uint64_t)KB_TOKENS * HEADS * DIM * w->value;
    const uint32_t n = kv_blocks(b, w);

    return (kvs_view){.base = b->pool + (strided ? plane : (uint64_t)plane * n) * page,
                      .block_stride = strided ? 2 * KB_LAYERS * page : page,
                      .page_bytes = page,
                      .n_blocks = n,
                      .tokens_per_block = KB_TOKENS,
                      .row_bytes = DIM * w->value * (w->heads_first ? 1 : HEADS),
                      .format = w->format};
}

static kvs_status call_kv(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    kv *w = args;

    w->a.k.view = kv_view(b, w, 2 * kb_layer(turn), strided);
    w->a.v.view = kv_view(b, w, 2 * kb_layer(turn) + 1, strided);
    w->a.slot_mapping = w->slots[turn];
    return kvs_kv_write_cuda(&w->a, NULL, b->stream, err);
}

static void run_kv_write(kb *b)
{
    const float one = 1;

    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t n = N_ROWS[i % 2];
        kv w = {.format = i < 4 ? KVS_FORMAT_kv_bf16 : KVS_FORMAT_kv_fp8,
                .value = i < 4 ? 2 : 1,
                .heads_first = i / 2 % 2 == 1,
                .a = {.n_tokens = n, .n_heads = HEADS, .src_type = KVS_VALUE_BF16}};
        kb_work work = {.op = "kv_write", .call = call_kv, .args = &w, .turns = TURNS};

        w.a.k.head_stride = w.a.v.head_stride = (uint64_t)DIM * w.value * (w.heads_first ? KB_TOKENS : 1);
        w.a.k.src = (kvs_strided){kb_random(b, (uint64_t)n * HEADS * DIM * 2), HEADS * DIM * 2, DIM * 2};
        w.a.v.src = (kvs_strided){kb_random(b, (uint64_t)n * HEADS * DIM * 2), HEADS * DIM * 2, DIM * 2};
        w.a.k.scale = w.a.v.scale = kb_in(b, &one, sizeof one);
        w.a.k.dim = w.a.v.dim = DIM;
        for (int turn = 0; turn < TURNS; turn++)
            w.slots[turn] = kb_slots(b, n, (uint64_t)kv_blocks(b, &w) * KB_TOKENS);
        work.bytes = (uint64_t)n * (UINT64_C(2) * HEADS * DIM * (2 + w.value) + sizeof(int64_t));
        (void)snprintf(work.shape, sizeof work.shape, "%s %s, %u tokens", kvs_format_name(w.format),
                       w.heads_first ? "heads first" : "tokens first", n);
        kb_measure(b, &work);
    }
}

const kb_op kb_op_indexer_write = {"indexer_write", run_indexer_write};
const kb_op kb_op_blockwise_write = {"blockwise_write", run_blockwise_write};
const kb_op kb_op_kv_write = {"kv_write", run_kv_write};

/* --- queries and indices ------------------------------------------------------------------------------------------ */

static kvs_status call_concat(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    (void)turn;
    (void)strided;
    return kvs_concat_q_cuda(args, b->stream, err);
}

static void run_concat_q(kb *b)
{
    static const uint32_t tokens[] = {128, 2048};

    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t n = tokens[i], heads = 128;
        kvs_concat_q_args a = {.n_tokens = (uint32_t)n, .n_heads = (uint32_t)heads};
        kb_work work = {.op = "concat_q", .call = call_concat, .args = &a, .turns = 2, .no_view = true};

        a.nope = (kvs_strided){kb_random(b, n * heads * 1024), heads * 1024, 1024};
        a.pe = (kvs_strided){kb_random(b, n * heads * 128), heads * 128, 128};
        a.out = (kvs_strided){kb_alloc(b, n * heads * 1152), heads * 1152, 1152};
        work.bytes = 2 * n * heads * 1152;
        (void)snprintf(work.shape, sizeof work.shape, "%u tokens x 128 heads", tokens[i]);
        kb_measure(b, &work);
    }
}

static kvs_status call_convert(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    kvs_index_convert_args *a = args;

    a->view = kb_view(b, KVS_FORMAT_fp8_ds_mla, kb_layer(turn), strided);
    return kvs_index_convert_cuda(a, NULL, b->stream, err);
}

/* Lists of 2,048 ids in requests of 4,096 tokens. */
static void run_index_convert(kb *b)
{
    static const uint32_t lists[] = {128, 8192};
    enum { TOPK = 2048 };

    for (uint32_t i = 0; i < 2; i++) {
        const uint64_t n = lists[i];
        kvs_index_convert_args a = {.token_stride = TOPK,
                                    .table_stride = SEQUENCE / KB_TOKENS,
                                    .out_stride = TOPK,
                                    .n_tokens = (uint32_t)n,
                                    .topk = TOPK,
                                    .n_requests = 1,
                                    .table_width = SEQUENCE / KB_TOKENS};
        kb_work work = {.op = "index_convert", .call = call_convert, .args = &a, .turns = 4};
        int32_t *host = malloc(n * TOPK * sizeof *host);

        if (host == NULL)
            kb_die("no memory for %u lists", lists[i]);
        for (uint64_t k = 0; k < n * TOPK; k++)
            host[k] = (int32_t)rnd_below(&b->r, SEQUENCE);
        a.tokens = kb_in(b, host, n * TOPK * sizeof *host);
        for (uint64_t k = 0; k < n; k++)
            host[k] = 0;
        a.request = kb_in(b, host, n * sizeof *host);
        free(host);
        a.block_table = kb_ids(b, SEQUENCE / KB_TOKENS, kb_n_blocks(b, KVS_FORMAT_fp8_ds_mla));
        a.physical = kb_alloc(b, n * TOPK * sizeof *a.physical);
        work.bytes = n * (TOPK * UINT64_C(12) + 4);
        (void)snprintf(work.shape, sizeof work.shape, "%u lists of %d to rows", lists[i], (int)TOPK);
        kb_measure(b, &work);
    }
}

const kb_op kb_op_concat_q = {"concat_q", run_concat_q};
const kb_op kb_op_index_convert = {"index_convert", run_index_convert};
#endif
