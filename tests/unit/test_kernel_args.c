#include <criterion/criterion.h>

#include <string.h>

#include "kernels/blockwise.h"
#include "kernels/cache_gather.h"
#include "kernels/gather_dequant.h"
#include "kernels/gather_upconvert.h"
#include "kernels/indexer.h"
#include "kernels/kv_write.h"
#include "proto/layout.h"

/* Arguments that no kernel takes, for the operations that move and quantise rows: refused with a text that names the
 * field, by the one check that both sides call, and before a byte is written.  What they do with good ones is
 * kernels-test's. */

enum { TOKENS = 16, BLOCKS = 3, ROWS = 4 };

static uint8_t memory[1 << 20] __attribute__((aligned(256)));
static uint8_t before[1 << 20];
static uint8_t dst[ROWS * 4096] __attribute__((aligned(256)));
static int32_t starts[3] = {0, 2, 4}, table[2 * BLOCKS];
static int64_t slots[ROWS];
static float one = 1.0f;

static kvs_view view_of(uint32_t format, uint32_t row, uint32_t page)
{
    return (kvs_view){.base = memory,
                      .block_stride = 65536,
                      .page_bytes = page,
                      .n_blocks = BLOCKS,
                      .tokens_per_block = TOKENS,
                      .row_bytes = row,
                      .format = format};
}

static kvs_gather_list list_of(void)
{
    return (kvs_gather_list){.row_starts = starts,
                             .block_table = table,
                             .table_stride = BLOCKS,
                             .n_seqs = 2,
                             .table_width = BLOCKS,
                             .n_rows = ROWS};
}

/* SPOIL(run, good, change, status, text): `run` refuses `good` with one change, and takes it without. */
#define SPOIL(run, good, change, want, text)                                                                           \
    do {                                                                                                               \
        __typeof__(good) a = (good);                                                                                   \
        kvs_err err = {KVS_OK, ""};                                                                                    \
        uint32_t n_bad = 77;                                                                                           \
                                                                                                                       \
        cr_assert_eq(run(&a, &n_bad, NULL), KVS_OK);                                                                   \
        memcpy(before, memory, sizeof memory);                                                                         \
        n_bad = 77;                                                                                                    \
        change;                                                                                                        \
        cr_assert_eq(run(&a, &n_bad, &err), want, "%s: %s", #change, err.msg);                                         \
        cr_assert(strstr(err.msg, text) != NULL, "'%s' does not say '%s'", err.msg, text);                             \
        cr_assert_eq(n_bad, 77);                                                                                       \
        cr_assert_eq(memcmp(before, memory, sizeof memory), 0);                                                        \
    } while (0)

/* What is wrong with a list is wrong with every gather's. */
#define SPOIL_LIST(run, good)                                                                                          \
    do {                                                                                                               \
        SPOIL(run, good, a.list.open_end = 2, KVS_E_INVALID, "open_end: 2");                                           \
        SPOIL(run, good, a.list.row_starts = NULL, KVS_E_INVALID, "row_starts: no memory for 3 rows");                 \
        SPOIL(run, good, a.list.row_starts = (const int32_t *)(const void *)(memory + 2), KVS_E_INVALID,               \
              "row_starts: base");                                                                                     \
        SPOIL(run, good, a.list.first_token = (const int32_t *)(const void *)(memory + 2), KVS_E_INVALID,              \
              "first_token: base");                                                                                    \
        SPOIL(run, good, a.list.block_table = NULL, KVS_E_INVALID, "block_table: no memory for 2 rows");               \
        SPOIL(run, good, a.list.table_stride = 2, KVS_E_INVALID, "block_table stride: 8 is below the 12 bytes");       \
        SPOIL(run, good, a.list.table_stride = UINT64_MAX / 2, KVS_E_LIMIT, "table_stride");                           \
        SPOIL(run, good, a.list.n_rows = UINT32_C(1) << 31, KVS_E_LIMIT, "n_rows: 2147483648");                        \
        SPOIL(run, good, a.view.block_stride = 8, KVS_E_INVALID, "block_stride: 8");                                   \
    } while (0)

#define SPOIL_SLOTS(run, good)                                                                                         \
    do {                                                                                                               \
        SPOIL(run, good, a.slot_mapping = NULL, KVS_E_INVALID, "slot_mapping: no memory for 4 rows");                  \
        SPOIL(run, good, a.slot_mapping = (const int64_t *)(const void *)(memory + 4), KVS_E_INVALID,                  \
              "slot_mapping: base");                                                                                   \
    } while (0)

Test(kernel_args, cache_gather)
{
    kvs_cache_gather_args good = {.view = view_of(KVS_FORMAT_mla_bf16, 1152, TOKENS * 1152),
                                  .list = list_of(),
                                  .dst = dst,
                                  .dst_stride = 1152,
                                  .entry_bytes = 1152};
    kvs_cache_gather_args none = good;
    uint32_t bad = 77;

    SPOIL_LIST(kvs_cache_gather, good);
    SPOIL(kvs_cache_gather, good, a.view.format = KVS_FORMAT_indexer_fp8, KVS_E_UNSUPPORTED, "(indexer_fp8)");
    SPOIL(kvs_cache_gather, good, a.view.format = KVS_FORMAT_fp8_blk584, KVS_E_UNSUPPORTED, "(fp8_blk584)");
    SPOIL(kvs_cache_gather, good, a.view.format = 0, KVS_E_UNSUPPORTED, "format: 0");
    SPOIL(kvs_cache_gather, good, a.view.format = 63, KVS_E_UNSUPPORTED, "format: 63");
    SPOIL(kvs_cache_gather, good, a.entry_bytes = 0, KVS_E_INVALID, "entry_bytes: 0");
    SPOIL(kvs_cache_gather, good, a.entry_bytes = 1153, KVS_E_INVALID, "entry_bytes: 1153");
    SPOIL(kvs_cache_gather, good, a.dst_stride = 1151, KVS_E_INVALID, "dst stride: 1151");
    SPOIL(kvs_cache_gather, good, a.dst = NULL, KVS_E_INVALID, "dst: no memory");
    none.list = (kvs_gather_list){0}; /* of nothing, nothing is asked */
    cr_assert_eq(kvs_cache_gather(&none, &bad, NULL), KVS_OK);
    cr_assert_eq(bad, 0);
}

Test(kernel_args, gather_dequant)
{
    kvs_gather_dequant_args good = {.view = view_of(KVS_FORMAT_mla_fp8, 576, TOKENS * 576),
                                    .list = list_of(),
                                    .scale = &one,
                                    .dst = dst,
                                    .dst_stride = 1152,
                                    .width = 576,
                                    .dst_type = KVS_VALUE_BF16};
    kvs_gather_dequant_args copy = good;

    copy.view = view_of(KVS_FORMAT_mla_bf16, 1152, TOKENS * 1152);
    copy.scale = NULL; /* not looked at */
    SPOIL_LIST(kvs_gather_dequant, good);
    SPOIL(kvs_gather_dequant, good, a.width = 128, KVS_E_UNSUPPORTED, "width: 128 is none of 320, 512, 576");
    SPOIL(kvs_gather_dequant, good, a.view.format = KVS_FORMAT_fp8_ds_mla, KVS_E_UNSUPPORTED, "(fp8_ds_mla)");
    SPOIL(kvs_gather_dequant, good, a.scale = NULL, KVS_E_INVALID, "scale");
    SPOIL(kvs_gather_dequant, good, a.scale = (const float *)(const void *)(memory + 2), KVS_E_INVALID, "scale");
    SPOIL(kvs_gather_dequant, good, a.dst_type = 0, KVS_E_UNSUPPORTED, "dst_type: 0");
    SPOIL(kvs_gather_dequant, good, a.dst_type = 4, KVS_E_UNSUPPORTED, "dst_type: 4");
    SPOIL(kvs_gather_dequant, good, a.dst_type = KVS_VALUE_FP32, KVS_E_INVALID, "dst stride: 1152 is below the 2304");
    SPOIL(kvs_gather_dequant, good, a.dst++, KVS_E_INVALID, "dst: base");
    SPOIL(kvs_gather_dequant, good, (a.view.format = KVS_FORMAT_kv_fp8, a.view.row_bytes = 512), KVS_E_INVALID,
          "width: 576 values need 576 bytes of a row of 512");
    SPOIL(kvs_gather_dequant, copy, a.dst_type = KVS_VALUE_FP16, KVS_E_UNSUPPORTED, "dst_type: 2");
}

Test(kernel_args, gather_upconvert)
{
    kvs_gather_upconvert_args good = {
        .view = view_of(KVS_FORMAT_fp8_ds_mla, 656, TOKENS * 656), .list = list_of(), .dst = dst, .dst_stride = 1152};

    SPOIL_LIST(kvs_gather_upconvert, good);
    SPOIL(kvs_gather_upconvert, good, a.view.format = KVS_FORMAT_mla_fp8, KVS_E_UNSUPPORTED, "(mla_fp8)");
    SPOIL(kvs_gather_upconvert, good, a.dst_stride = 1150, KVS_E_INVALID, "dst stride: 1150");
    SPOIL(kvs_gather_upconvert, good, a.dst++, KVS_E_INVALID, "dst: base");
}

Test(kernel_args, indexer_gather)
{
    kvs_indexer_gather_args good = {.view = view_of(KVS_FORMAT_indexer_fp8, 128, TOKENS * 132),
                                    .list = list_of(),
                                    .k = dst,
                                    .scale = dst + 1024,
                                    .k_stride = 128,
                                    .scale_stride = 4};

    SPOIL_LIST(kvs_indexer_gather, good);
    SPOIL(kvs_indexer_gather, good, a.view.format = KVS_FORMAT_mla_fp8, KVS_E_UNSUPPORTED, "(mla_fp8)");
    SPOIL(kvs_indexer_gather, good, a.view.page_bytes = TOKENS * 128, KVS_E_INVALID, "page_bytes: 2048");
    SPOIL(kvs_indexer_gather, good, a.k_stride = 127, KVS_E_INVALID, "k stride: 127");
    SPOIL(kvs_indexer_gather, good, a.scale_stride = 6, KVS_E_INVALID, "scale: base");
    SPOIL(kvs_indexer_gather, good, a.scale = NULL, KVS_E_INVALID, "scale: no memory");
}

Test(kernel_args, indexer_write)
{
    kvs_indexer_write_args good = {.view = view_of(KVS_FORMAT_indexer_fp8, 128, TOKENS * 132),
                                   .k = dst,
                                   .k_stride = 256,
                                   .slot_mapping = slots,
                                   .n_tokens = ROWS,
                                   .k_type = KVS_VALUE_BF16};

    SPOIL_SLOTS(kvs_indexer_write, good);
    SPOIL(kvs_indexer_write, good, a.view.format = KVS_FORMAT_mla_fp8, KVS_E_UNSUPPORTED, "(mla_fp8)");
    SPOIL(kvs_indexer_write, good, a.k_type = KVS_VALUE_FP32, KVS_E_UNSUPPORTED, "k_type: 3");
    SPOIL(kvs_indexer_write, good, a.scale_kind = 2, KVS_E_INVALID, "scale_kind: 2");
    SPOIL(kvs_indexer_write, good, a.k_stride = 254, KVS_E_INVALID, "k stride: 254");
    SPOIL(kvs_indexer_write, good, a.k++, KVS_E_INVALID, "k: base");
}

Test(kernel_args, blockwise)
{
    kvs_blockwise_write_args good = {.view = view_of(KVS_FORMAT_fp8_blk584, 576, 17 * 576),
                                     .x = dst,
                                     .x_stride = 2048,
                                     .slot_mapping = slots,
                                     .n_tokens = ROWS,
                                     .x_type = KVS_VALUE_FP32};
    kvs_blockwise_gather_args read = {
        .view = view_of(KVS_FORMAT_fp8_blk528, 512, 17 * 512), .list = list_of(), .dst = dst, .dst_stride = 1024};

    SPOIL_SLOTS(kvs_blockwise_write, good);
    SPOIL(kvs_blockwise_write, good, a.view.format = KVS_FORMAT_mla_fp8, KVS_E_UNSUPPORTED, "(mla_fp8)");
    SPOIL(kvs_blockwise_write, good, a.view.page_bytes += 16, KVS_E_INVALID, "9808 is not a multiple of 576");
    SPOIL(kvs_blockwise_write, good, a.view.row_bytes = 560, KVS_E_INVALID, "row_bytes: 560");
    SPOIL(kvs_blockwise_write, good, a.x_type = KVS_VALUE_FP16, KVS_E_UNSUPPORTED, "x_type: 2");
    SPOIL(kvs_blockwise_write, good, a.x_stride = 2044, KVS_E_INVALID, "x stride: 2044");
    SPOIL(kvs_blockwise_write, good, a.x += 2, KVS_E_INVALID, "x: base");
    SPOIL_LIST(kvs_blockwise_gather, read);
    SPOIL(kvs_blockwise_gather, read, a.view.page_bytes += 16, KVS_E_INVALID, "8720 is not a multiple of 512");
    SPOIL(kvs_blockwise_gather, read, a.view.format = KVS_FORMAT_fp8_ds_mla, KVS_E_UNSUPPORTED, "(fp8_ds_mla)");
    SPOIL(kvs_blockwise_gather, read, a.dst_stride = 1022, KVS_E_INVALID, "dst stride: 1022");
}

/* 2 heads of 64 values: NHD, K and V of a token one behind the other in a page. */
static kvs_kv_side side(uint32_t format, uint32_t value)
{
    return (kvs_kv_side){.view = view_of(format, 2 * 64 * value, TOKENS * 2 * 64 * value),
                         .head_stride = 64 * value,
                         .src = {dst, 512, 256},
                         .scale = &one,
                         .dim = 64};
}

Test(kernel_args, kv_write)
{
    kvs_kv_write_args good = {.k = side(KVS_FORMAT_kv_fp8, 1),
                              .v = side(KVS_FORMAT_kv_bf16, 2),
                              .slot_mapping = slots,
                              .n_tokens = ROWS,
                              .n_heads = 2,
                              .src_type = KVS_VALUE_BF16};

    good.v.view.base += 32768;
    SPOIL_SLOTS(kvs_kv_write, good);
    SPOIL(kvs_kv_write, good, a.n_heads = 0, KVS_E_INVALID, "n_heads: 0");
    SPOIL(kvs_kv_write, good, a.n_heads = 1025, KVS_E_INVALID, "n_heads: 1025");
    SPOIL(kvs_kv_write, good, a.head_scales = 2, KVS_E_INVALID, "head_scales: 2");
    SPOIL(kvs_kv_write, good, a.k.dim = 0, KVS_E_INVALID, "dim: 0");
    SPOIL(kvs_kv_write, good, a.v.dim = 1025, KVS_E_INVALID, "dim: 1025");
    SPOIL(kvs_kv_write, good, a.k.view.format = KVS_FORMAT_mla_fp8, KVS_E_UNSUPPORTED, "(mla_fp8)");
    SPOIL(kvs_kv_write, good, a.src_type = 0, KVS_E_UNSUPPORTED, "k: src_type 0");
    SPOIL(kvs_kv_write, good, a.src_type = KVS_VALUE_FP16, KVS_E_UNSUPPORTED, "v: src_type 2 does not go into kv_bf16");
    SPOIL(kvs_kv_write, good, a.k.scale = NULL, KVS_E_INVALID, "scale: no memory for 1");
    SPOIL(kvs_kv_write, good, (a.k.scale = NULL, a.head_scales = 1), KVS_E_INVALID, "scale: no memory for 2");
    SPOIL(kvs_kv_write, good, a.v.head_stride = 129, KVS_E_INVALID, "v head_stride: 129");
    SPOIL(kvs_kv_write, good, a.v.head_stride = UINT64_C(1) << 40, KVS_E_INVALID, "v head_stride");
    SPOIL(kvs_kv_write, good, a.v.head_stride = 64, KVS_E_INVALID, "v: heads of 128 bytes overlap");
    SPOIL(kvs_kv_write, good, a.v.head_stride = 256, KVS_E_INVALID, "v: heads of 128 bytes overlap");
    SPOIL(kvs_kv_write, good, a.v.view.row_bytes = 128, KVS_E_INVALID, "v: heads of 128 bytes overlap");
    SPOIL(kvs_kv_write, good, a.v.view.page_bytes -= 16, KVS_E_INVALID, "page_bytes: 4080");
    SPOIL(kvs_kv_write, good, a.v.head_stride = 65536, KVS_E_INVALID, "page_bytes");
    SPOIL(kvs_kv_write, good, a.v.src.head_stride = 126, KVS_E_INVALID, "v stride: 126");
    SPOIL(kvs_kv_write, good, a.k.src.base++, KVS_E_INVALID, "k: base");
    SPOIL(kvs_kv_write, good, a.v.view.n_blocks = 2, KVS_E_INVALID, "k has 3 blocks of 16 tokens, v 2 of 16");
    SPOIL(kvs_kv_write, good, (a.v.view.tokens_per_block = 8), KVS_E_INVALID, "k has 3 blocks of 16 tokens, v 3 of 8");
}
