#include <criterion/criterion.h>

#include <string.h>

#include "kernels/view_check.h"

enum { MLA = 1 << KVS_FORMAT_mla_bf16 | 1 << KVS_FORMAT_mla_fp16 };

static uint8_t page[64 * 1152] __attribute__((aligned(16)));

static kvs_view good_view(void)
{
    return (kvs_view){page, sizeof page, sizeof page, 1, 64, 1152, KVS_FORMAT_mla_bf16};
}

static kvs_status check(const kvs_view *v, const char *text)
{
    kvs_err err = {KVS_OK, ""};
    kvs_status s = kvs_view_check(v, MLA, 0, &err);

    cr_assert(s == KVS_OK || strstr(err.msg, text) != NULL, "'%s' does not say '%s'", err.msg, text);
    return s;
}

Test(view, finds_a_row_in_an_inner_layer)
{
    /* The worked address of a pool of three layers, layer 1, slot id 70 at 64 tokens a page. */
    kvs_view v = {NULL, 221184, 73728, 2, 64, 1152, KVS_FORMAT_mla_bf16};

    v.base = (uint8_t *)(uintptr_t)0x1000; /* only computed with */
    cr_assert_eq((uintptr_t)kvs_view_row(&v, 1, 6, KVS_SITE_NONE) - (uintptr_t)v.base, 221184 + 6 * 1152);
}

Test(view, addresses_beyond_32_bits)
{
    kvs_view v = {NULL, UINT64_C(4497408), 73728, 1u << 31, 64, 1152, KVS_FORMAT_mla_bf16};

    v.base = (uint8_t *)(uintptr_t)0x1000;
    cr_assert_eq((uintptr_t)kvs_view_row(&v, 955, 63, KVS_SITE_NONE), 0x1000 + UINT64_C(955) * 4497408 + 63 * 1152);
    cr_assert_eq((uintptr_t)kvs_view_row(&v, (1u << 31) - 1, 0, KVS_SITE_NONE),
                 0x1000 + ((UINT64_C(1) << 31) - 1) * 4497408);
}

Test(view, accepts_what_is_in_order)
{
    kvs_view v = good_view();

    cr_assert_eq(check(&v, ""), KVS_OK);
    v.format = KVS_FORMAT_mla_fp16;
    cr_assert_eq(check(&v, ""), KVS_OK);
    v.n_blocks = 0;
    v.base = NULL;
    cr_assert_eq(check(&v, ""), KVS_OK);
}

Test(view, refuses_other_formats)
{
    kvs_view v = good_view();

    for (uint32_t f = 0; f < 12; f++) {
        v.format = f;
        cr_assert_eq(check(&v, "format"),
                     f == KVS_FORMAT_mla_bf16 || f == KVS_FORMAT_mla_fp16 ? KVS_OK : KVS_E_UNSUPPORTED);
    }
}

Test(view, refuses_rows_that_do_not_fit)
{
    kvs_view v = good_view();

    v.row_bytes = 1136;
    cr_assert_eq(check(&v, "row_bytes: 1136"), KVS_E_INVALID);
    v = good_view();
    v.row_bytes = 1160;
    cr_assert_eq(check(&v, "row_bytes: 1160"), KVS_E_INVALID);
    v = good_view();
    v.page_bytes -= 16;
    cr_assert_eq(check(&v, "page_bytes"), KVS_E_INVALID);
    v = good_view();
    v.tokens_per_block = 0;
    cr_assert_eq(check(&v, "tokens_per_block: 0"), KVS_E_INVALID);
    v.tokens_per_block = 4097;
    cr_assert_eq(check(&v, "tokens_per_block: 4097"), KVS_E_INVALID);
}

Test(view, refuses_strides_and_bases_that_no_kernel_takes)
{
    kvs_view v = good_view();

    v.block_stride += 8;
    cr_assert_eq(check(&v, "block_stride"), KVS_E_INVALID);
    v.block_stride = UINT64_C(1) << 40;
    cr_assert_eq(check(&v, "block_stride"), KVS_E_INVALID);
    v = good_view();
    v.n_blocks = 2;
    v.block_stride -= 16;
    cr_assert_eq(check(&v, "below page_bytes"), KVS_E_INVALID);
    v = good_view();
    v.base += 2;
    cr_assert_eq(check(&v, "base"), KVS_E_INVALID);
    v.base = NULL;
    cr_assert_eq(check(&v, "base"), KVS_E_INVALID);
}

Test(view, refuses_products_that_wrap)
{
    kvs_view v = good_view();

    v.n_blocks = UINT32_MAX; /* times 2^40 is above 2^64 */
    v.block_stride = (UINT64_C(1) << 40) - 16;
    cr_assert_eq(check(&v, "address space"), KVS_E_LIMIT);
    v.n_blocks = 1;
    v.page_bytes = UINT64_MAX - 100;
    cr_assert_eq(check(&v, "address space"), KVS_E_LIMIT);
}

/* Bytes of a token times tokens is what a page of the format must hold, no more and no less. */
Test(view, knows_the_page_of_every_format)
{
    static uint8_t memory[16 * 2304] __attribute__((aligned(16)));

#define X(name, id, bytes)                                                                                             \
    {                                                                                                                  \
        const kvs_token_bytes t = kvs_format_token_bytes(id);                                                          \
        kvs_view v = {memory, 65536, UINT64_C(16) * (bytes), 2, 16, t.row, id};                                        \
        kvs_err err = {KVS_OK, ""};                                                                                    \
        cr_assert_eq(t.row + t.tail, bytes);                                                                           \
        if ((bytes) != 0) {                                                                                            \
            cr_assert_eq(kvs_view_check(&v, UINT64_C(1) << (id), 0, &err), KVS_OK, #name ": %s", err.msg);             \
            v.page_bytes--;                                                                                            \
            cr_assert_eq(kvs_view_check(&v, UINT64_C(1) << (id), 0, &err), KVS_E_INVALID);                             \
            v.page_bytes++;                                                                                            \
            v.row_bytes -= 16;                                                                                         \
            cr_assert_eq(kvs_view_check(&v, UINT64_C(1) << (id), 0, &err), KVS_E_INVALID);                             \
        }                                                                                                              \
    }
    KVS_FORMAT_MAP(X)
#undef X
    cr_assert_eq(kvs_format_token_bytes(0).row, 0);
    cr_assert_eq(kvs_format_token_bytes(99).row, 0);
}

Test(view, finds_the_tail_behind_the_rows)
{
    /* The worked address of an indexer page: three layers, layer 1, slot id 70 at 64 tokens a page. */
    uint8_t *pool = (uint8_t *)(uintptr_t)4096;
    const kvs_view v = {pool + 8448, 25344, 8448, 2, 64, 128, KVS_FORMAT_indexer_fp8};

    cr_assert_eq(kvs_view_row(&v, 1, 6, KVS_SITE_NONE) - pool, 34560);
    cr_assert_eq(kvs_view_tail(&v, 1, 6, 4, KVS_SITE_NONE) - pool, 42008);
}

Test(view, takes_the_rows_of_the_caller_where_the_format_leaves_them_open)
{
    kvs_view v = {page, sizeof page, sizeof page, 1, 64, 256, KVS_FORMAT_kv_bf16};
    const uint64_t set = KVS_FORMAT_BIT(kv_bf16);
    kvs_err err;

    cr_assert_eq(kvs_view_check(&v, set, 256, &err), KVS_OK);
    cr_assert_eq(kvs_view_check(&v, set, sizeof page - 63 * 256, &err), KVS_OK); /* heads outermost */
    cr_assert_eq(kvs_view_check(&v, set, sizeof page - 63 * 256 + 1, &err), KVS_E_INVALID);
    cr_assert_eq(kvs_view_check(&v, set, UINT64_MAX, &err), KVS_E_LIMIT);
    v.row_bytes = 0;
    cr_assert_eq(kvs_view_check(&v, set, 256, &err), KVS_E_INVALID);
}
