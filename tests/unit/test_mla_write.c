#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "kernels/mla.h"
#include "proto/layout.h"
#include "tests/support/random.h"

enum { LATENT = 1024, ROPE = 128, ROW = LATENT + ROPE, MAX_TOKENS = 256 };

/* A pool of random bytes, its copy, and rows to write. */
typedef struct fixture {
    kvs_mla_write_args args;
    uint8_t *pool, *copy, *rows;
    uint64_t pool_bytes;
    int64_t slots[MAX_TOKENS];
    rnd r;
} fixture;

static void fixture_init(fixture *f, uint32_t n_layers, uint32_t layer, uint32_t n_blocks, uint32_t tokens,
                         uint64_t slot_pad)
{
    uint64_t page = (uint64_t)tokens * ROW, slot = page * n_layers + slot_pad;
    uint32_t pitch = LATENT + 6, rope_pitch = ROPE + 10;

    f->r = (rnd){layer + n_layers};
    f->pool_bytes = slot * n_blocks;
    f->pool = aligned_alloc(16, f->pool_bytes);
    f->copy = malloc(f->pool_bytes);
    f->rows = malloc(MAX_TOKENS * (pitch + rope_pitch));
    cr_assert(f->pool != NULL && f->copy != NULL && f->rows != NULL);
    rnd_bytes(&f->r, f->pool, f->pool_bytes);
    rnd_bytes(&f->r, f->rows, MAX_TOKENS * (pitch + rope_pitch));
    memcpy(f->copy, f->pool, f->pool_bytes);
    f->args = (kvs_mla_write_args){{f->pool + layer * page, slot, page, n_blocks, tokens, ROW, KVS_FORMAT_mla_bf16},
                                   f->rows,
                                   f->rows + MAX_TOKENS * pitch,
                                   pitch,
                                   rope_pitch,
                                   f->slots,
                                   0,
                                   0,
                                   NULL,
                                   NULL};
}

static void fixture_fini(fixture *f)
{
    free(f->pool);
    free(f->copy);
    free(f->rows);
}

/* Write by hand into the copy, in token order, and compare all bytes of the pool. */
static void expect_pool(fixture *f)
{
    const kvs_mla_write_args *a = &f->args;
    uint64_t offset = (uint64_t)(a->view.base - f->pool), n = (uint64_t)a->view.n_blocks * a->view.tokens_per_block;

    for (uint32_t t = 0; t < a->n_tokens; t++) {
        uint64_t s = (uint64_t)a->slot_mapping[t];
        uint8_t *to;

        if (a->slot_mapping[t] < 0 || s >= n)
            continue;
        to = f->copy + offset + s / a->view.tokens_per_block * a->view.block_stride +
             s % a->view.tokens_per_block * a->view.row_bytes;
        memcpy(to, a->kv_c + t * a->kv_c_stride, LATENT);
        memcpy(to + LATENT, a->k_pe + t * a->k_pe_stride, ROPE);
    }
    cr_assert_eq(memcmp(f->pool, f->copy, f->pool_bytes), 0);
}

static void write_random(uint32_t n_layers, uint32_t layer, uint32_t tokens, uint64_t slot_pad)
{
    fixture f;
    uint32_t bad = 77;

    fixture_init(&f, n_layers, layer, 32, tokens, slot_pad);
    for (uint32_t t = 0; t < MAX_TOKENS; t++)
        f.slots[t] = (int64_t)rnd_below(&f.r, (uint64_t)32 * tokens);
    f.args.n_tokens = MAX_TOKENS;
    cr_assert_eq(kvs_mla_write(&f.args, &bad, NULL), KVS_OK);
    cr_assert_eq(bad, 0);
    expect_pool(&f);
    fixture_fini(&f);
}

Test(mla_write, writes_the_named_rows_and_nothing_else_in_any_layer)
{
    write_random(1, 0, 16, 0);
    for (uint32_t layer = 0; layer < 3; layer++)
        write_random(3, layer, 16, 208);
    write_random(61, 0, 1, 0);
    write_random(61, 30, 2, 48);
    write_random(61, 60, 4, 4096 + 16);
}

Test(mla_write, writes_pages_of_any_size)
{
    const uint32_t sizes[] = {1, 5, 16, 64, 256};

    for (int i = 0; i < 5; i++)
        write_random(2, 1, sizes[i], 16);
}

Test(mla_write, skips_negative_slots_and_counts_those_past_the_end)
{
    const int64_t slots[] = {5,      -1,         7,         INT64_MIN,           0,
                             4 * 16, 4 * 16 - 1, INT64_MAX, -(INT64_C(1) << 31), INT64_C(1) << 32};
    fixture f;
    uint32_t bad = 77;

    fixture_init(&f, 3, 1, 4, 16, 0);
    memcpy(f.slots, slots, sizeof slots);
    f.args.n_tokens = sizeof slots / sizeof slots[0];
    cr_assert_eq(kvs_mla_write(&f.args, &bad, NULL), KVS_OK);
    cr_assert_eq(bad, 3);
    expect_pool(&f);
    fixture_fini(&f);
}

Test(mla_write, the_last_of_two_tokens_for_a_slot_wins)
{
    fixture f;
    uint32_t bad;

    fixture_init(&f, 3, 2, 4, 16, 0);
    for (int i = 0; i < 8; i++)
        f.slots[i] = 33 + i % 2;
    f.args.n_tokens = 8;
    cr_assert_eq(kvs_mla_write(&f.args, &bad, NULL), KVS_OK);
    expect_pool(&f);
    cr_assert_eq(memcmp(kvs_view_row(&f.args.view, 2, 2, KVS_SITE_NONE), f.args.kv_c + 7 * f.args.kv_c_stride, LATENT),
                 0);
    fixture_fini(&f);
}

Test(mla_write, writes_nothing_for_no_tokens)
{
    fixture f;
    uint32_t bad = 77;

    fixture_init(&f, 1, 0, 4, 16, 0);
    f.args.kv_c = f.args.k_pe = NULL;
    f.args.slot_mapping = NULL;
    cr_assert_eq(kvs_mla_write(&f.args, &bad, NULL), KVS_OK);
    cr_assert_eq(bad, 0);
    expect_pool(&f);
    fixture_fini(&f);
}

/* One field is spoilt: refused with the status, a text that names it, and no byte changed. */
static void refuses(const kvs_mla_write_args *a, fixture *f, kvs_status status, const char *text)
{
    kvs_err err = {KVS_OK, ""};
    uint32_t bad = 77;

    cr_assert_eq(kvs_mla_write(a, &bad, &err), status, "%s", err.msg);
    cr_assert(strstr(err.msg, text) != NULL, "'%s' does not say '%s'", err.msg, text);
    cr_assert_eq(bad, 77);
    cr_assert_eq(memcmp(f->pool, f->copy, f->pool_bytes), 0);
}

Test(mla_write, refuses_bad_arguments_before_any_byte_is_written)
{
    fixture f;
    kvs_mla_write_args a;

    fixture_init(&f, 3, 1, 4, 16, 0);
    f.args.n_tokens = 4;
    for (int i = 0; i < 4; i++)
        f.slots[i] = i;
    a = f.args;
    a.kv_c_stride = LATENT - 2;
    refuses(&a, &f, KVS_E_INVALID, "kv_c stride: 1022");
    a = f.args;
    a.k_pe_stride = 0;
    refuses(&a, &f, KVS_E_INVALID, "k_pe stride: 0");
    a = f.args;
    a.kv_c_stride = LATENT + 1;
    refuses(&a, &f, KVS_E_INVALID, "kv_c");
    a = f.args;
    a.kv_c_stride = UINT64_MAX - 1;
    refuses(&a, &f, KVS_E_LIMIT, "kv_c");
    a = f.args;
    a.k_pe++;
    refuses(&a, &f, KVS_E_INVALID, "k_pe");
    a = f.args;
    a.kv_c = NULL;
    refuses(&a, &f, KVS_E_INVALID, "kv_c");
    a = f.args;
    a.slot_mapping = NULL;
    refuses(&a, &f, KVS_E_INVALID, "slot_mapping");
    a = f.args;
    a.view.format = KVS_FORMAT_indexer_fp8;
    refuses(&a, &f, KVS_E_UNSUPPORTED, "format: 5");
    a.view.format = KVS_FORMAT_mla_fp8;
    refuses(&a, &f, KVS_E_UNSUPPORTED, "src_type: 0");
    a.src_type = KVS_VALUE_BF16;
    refuses(&a, &f, KVS_E_INVALID, "scale");
    a.view.format = KVS_FORMAT_fp8_ds_mla;
    a.src_type = KVS_VALUE_FP16;
    refuses(&a, &f, KVS_E_UNSUPPORTED, "src_type: 2 cannot be written as fp8_ds_mla");
    a = f.args;
    a.view.block_stride += 2;
    refuses(&a, &f, KVS_E_INVALID, "block_stride");
    fixture_fini(&f);
}
