/* kernels-bench: writes, copies, sums and merges. */
#include "tests/kernels/kb_ops.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdio.h>

#include "kernels/block_copy.h"
#include "kernels/block_sum.h"
#include "kernels/kernels_cuda.h"
#include "kernels/merge.h"
#include "proto/layout.h"

enum { TURNS = 8 };

/* --- mla_write ---------------------------------------------------------------------------------------------------- */

typedef struct write {
    kvs_mla_write_args a;
    uint32_t format;
    int64_t *slots[TURNS];
} write;

static kvs_status call_write(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    write *w = args;

    w->a.view = kb_view(b, w->format, kb_layer(turn), strided);
    w->a.slot_mapping = w->slots[turn];
    return kvs_mla_write_cuda(&w->a, NULL, b->stream, err);
}

static const struct {
    uint32_t format, type;
    const char *name;
} KINDS[] = {{KVS_FORMAT_mla_bf16, KVS_VALUE_BF16, "mla_bf16"},
             {KVS_FORMAT_mla_fp32, KVS_VALUE_FP32, "mla_fp32"},
             {KVS_FORMAT_mla_fp8, KVS_VALUE_BF16, "mla_fp8 of bf16"},
             {KVS_FORMAT_fp8_ds_mla, KVS_VALUE_BF16, "fp8_ds_mla"}};
enum { N_KINDS = sizeof KINDS / sizeof *KINDS };

static void run_write(kb *b)
{
    static const uint32_t tokens[] = {128, 8192, 131072};
    const float one = 1;

    for (uint32_t i = 0; i < N_KINDS * 3; i++) {
        const uint32_t format = KINDS[i / 3].format, n = tokens[i % 3], src = 576 * kvs_value_bytes(KINDS[i / 3].type);
        write w = {.format = format};
        kb_work work = {.op = "mla_write", .call = call_write, .args = &w, .turns = TURNS};

        w.a.kv_c = kb_alloc(b, (uint64_t)n * src);
        w.a.k_pe = w.a.kv_c + src / 9 * 8;
        w.a.kv_c_stride = w.a.k_pe_stride = src;
        w.a.n_tokens = n;
        w.a.src_type = KINDS[i / 3].type;
        w.a.scale = kb_in(b, &one, sizeof one);
        for (int turn = 0; turn < TURNS; turn++)
            w.slots[turn] = kb_slots(b, n, (uint64_t)kb_n_blocks(b, format) * KB_TOKENS);
        work.bytes = (uint64_t)n * (src + kvs_format_row_bytes(format) + sizeof(int64_t));
        (void)snprintf(work.shape, sizeof work.shape, "%s, %u tokens", KINDS[i / 3].name, n);
        kb_measure(b, &work);
    }
}

const kb_op kb_op_mla_write = {"mla_write", run_write};

/* --- mla_write_layers --------------------------------------------------------------------------------------------- */

typedef struct layers {
    kvs_mla_write_layers_args a;
    uint32_t format;
    uint8_t *base[KB_LAYERS];
    int64_t *slots[TURNS];
} layers;

static kvs_status call_layers(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    layers *w = args;

    w->a.view = kb_view(b, w->format, 0, strided);
    for (uint32_t l = 0; l < KB_LAYERS; l++)
        w->base[l] = kb_view(b, w->format, l, strided).base;
    w->a.base = w->base;
    w->a.slot_mapping = w->slots[turn];
    return kvs_mla_write_layers_cuda(&w->a, NULL, b->stream, err);
}

static void run_layers(kb *b)
{
    static const uint32_t tokens[] = {16, 2048};

    for (uint32_t i = 0; i < N_KINDS * 2; i++) {
        const uint32_t format = KINDS[i / 2].format, n = tokens[i % 2], src = 576 * kvs_value_bytes(KINDS[i / 2].type);
        layers w = {.format = format};
        kb_work work = {.op = "mla_write_layers", .call = call_layers, .args = &w, .turns = 4};

        w.a.kv_c = kb_alloc(b, (uint64_t)KB_LAYERS * n * src);
        w.a.k_pe = w.a.kv_c + src / 9 * 8;
        w.a.kv_c_stride = w.a.k_pe_stride = src;
        w.a.kv_c_layer_stride = w.a.k_pe_layer_stride = (uint64_t)n * src;
        w.a.n_tokens = n;
        w.a.n_layers = KB_LAYERS;
        w.a.src_type = KINDS[i / 2].type;
        w.a.scale = kb_alloc(b, KB_LAYERS * sizeof(float));
        for (int turn = 0; turn < 4; turn++)
            w.slots[turn] = kb_slots(b, n, (uint64_t)kb_n_blocks(b, format) * KB_TOKENS);
        work.bytes = (uint64_t)KB_LAYERS * n * (src + kvs_format_row_bytes(format) + sizeof(int64_t));
        (void)snprintf(work.shape, sizeof work.shape, "%s, %u tokens x 61", KINDS[i / 2].name, n);
        kb_measure(b, &work);
    }
}

const kb_op kb_op_mla_write_layers = {"mla_write_layers", run_layers};

/* --- block_copy --------------------------------------------------------------------------------------------------- */

typedef struct blocks {
    uint32_t n;
    bool slots; /* whole ones, or pages of a layer */
    int32_t *ids[TURNS];
    uint64_t *sums;
} blocks;

/* Whole slots are one run of bytes in either layout. */
static kvs_view blocks_view(const kb *b, const blocks *w, uint32_t turn, bool strided)
{
    kvs_view v = kb_view(b, KVS_FORMAT_mla_bf16, w->slots ? 0 : kb_layer(turn), strided || w->slots);

    if (w->slots)
        v.page_bytes = v.block_stride;
    return v;
}

static kvs_status call_copy(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    const blocks *w = args;
    const kvs_view v = blocks_view(b, w, turn, strided);
    const kvs_block_copy_args a = {v, v, w->ids[turn], w->n};

    return kvs_block_copy_cuda(&a, NULL, b->stream, err);
}

static kvs_status call_sum(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    const blocks *w = args;
    const kvs_block_sum_args a = {blocks_view(b, w, turn, strided), w->ids[turn], w->sums, w->n};

    return kvs_block_sum_cuda(&a, NULL, b->stream, err);
}

static void run_blocks(kb *b, const char *op, kb_call call, uint32_t a_block)
{
    static const uint32_t pages[] = {16, 1024, 4096}, slots[] = {4, 64, 512};

    for (uint32_t i = 0; i < 6; i++) {
        blocks w = {.n = i < 3 ? pages[i] : slots[i - 3], .slots = i >= 3};
        kb_work work = {.op = op, .call = call, .args = &w, .turns = TURNS, .no_view = w.slots};
        const uint64_t page = kb_page_bytes(KVS_FORMAT_mla_bf16);

        for (int turn = 0; turn < TURNS; turn++)
            w.ids[turn] = kb_ids(b, a_block * w.n, kb_n_blocks(b, KVS_FORMAT_mla_bf16));
        w.sums = kb_alloc(b, w.n * sizeof *w.sums);
        work.bytes = a_block * w.n * (w.slots ? page * KB_LAYERS : page);
        (void)snprintf(work.shape, sizeof work.shape, "%u %s", w.n, w.slots ? "slots of 4.5 MB" : "pages of 72 KiB");
        kb_measure(b, &work);
    }
}

static void run_copy(kb *b)
{
    run_blocks(b, "block_copy", call_copy, 2);
}

static void run_sum(kb *b)
{
    run_blocks(b, "block_sum", call_sum, 1);
}

const kb_op kb_op_block_copy = {"block_copy", run_copy};
const kb_op kb_op_block_sum = {"block_sum", run_sum};

/* --- merge -------------------------------------------------------------------------------------------------------- */

static kvs_status call_merge(kb *b, void *args, uint32_t turn, bool strided, kvs_err *err)
{
    (void)turn;
    (void)strided;
    return kvs_merge_cuda(args, b->stream, err);
}

static void run_merge(kb *b)
{
    static const uint32_t types[][2] = {{KVS_VALUE_FP32, KVS_VALUE_BF16}, {KVS_VALUE_BF16, KVS_VALUE_BF16}};

    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t n = 4096, heads = 128, dim = 512, src = dim * kvs_value_bytes(types[i][0]), out = dim * 2;
        kvs_merge_args a = {.n_tokens = n,
                            .n_heads = heads,
                            .dim = dim,
                            .n_context = n,
                            .src_type = types[i][0],
                            .out_type = types[i][1]};
        kb_work work = {.op = "merge", .call = call_merge, .args = &a, .turns = 2, .no_view = true};

        a.out = (kvs_strided){b->pool, (uint64_t)heads * out, out};
        a.prefix = (kvs_strided){b->pool + (UINT64_C(2) << 30), (uint64_t)heads * src, src};
        a.suffix = (kvs_strided){b->pool + (UINT64_C(4) << 30), (uint64_t)heads * src, src};
        a.prefix_lse = (kvs_strided){kb_alloc(b, (uint64_t)n * heads * 4), heads * UINT64_C(4), 4};
        a.suffix_lse = (kvs_strided){kb_alloc(b, (uint64_t)n * heads * 4), heads * UINT64_C(4), 4};
        a.out_lse = (kvs_strided){kb_alloc(b, (uint64_t)n * heads * 4), heads * UINT64_C(4), 4};
        work.bytes = (uint64_t)n * heads * (2 * src + out + 12);
        (void)snprintf(work.shape, sizeof work.shape, "%u tokens x %u heads, %s to bf16", n, heads,
                       i == 0 ? "fp32" : "bf16");
        kb_measure(b, &work);
    }
}

const kb_op kb_op_merge = {"merge", run_merge};
#endif
