#include <criterion/criterion.h>

#include <string.h>

#include "proto/backend.h"

/* The counterparts of an engine's test_kv_cache_layout: what each backend says of its stride order. */

static void expect_order(uint32_t backend, bool blocks_first)
{
    const uint32_t identity[] = {0, 1, 2, 3}, swapped[] = {1, 0, 2, 3};
    uint32_t order[4] = {9, 9, 9, 9};

    cr_assert_eq(kvs_backend_stride_order(backend, true, order), 4);
    cr_assert_eq(memcmp(order, blocks_first ? swapped : identity, sizeof order), 0, "%s",
                 kvs_backend_name(backend) ? kvs_backend_name(backend) : "?");
    order[3] = 9;
    cr_assert_eq(kvs_backend_stride_order(backend, false, order), 3);
    cr_assert_eq(memcmp(order, identity, 3 * sizeof *order), 0);
    cr_assert_eq(order[3], 9);
}

Test(backend, mla_common_backend_rejects_cross_layer)
{
    const char *names[] = {"MLA_COMMON", "ROCM_AITER_MLA", "FLASHMLA_SPARSE", "XPU_MLA", "triton_mla", "", NULL};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        cr_assert_eq(kvs_backend_parse(names[i]), KVS_BACKEND_OTHER);
        expect_order(kvs_backend_parse(names[i]), false);
    }
    expect_order(KVS_BACKEND_OTHER + 1, false);
    expect_order(UINT32_MAX, false);
}

Test(backend, verified_mla_backends_support_cross_layer)
{
    const char *names[] = {"TRITON_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA"};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const uint32_t backend = kvs_backend_parse(names[i]);

        cr_assert_eq(backend, i + 1);
        cr_assert_str_eq(kvs_backend_name(backend), names[i]);
        expect_order(backend, true);
    }
}

Test(backend, deepseek_v32_indexer_rejects_cross_layer)
{
    cr_assert_eq(kvs_backend_parse("DEEPSEEK_V32_INDEXER"), KVS_BACKEND_DEEPSEEK_V32_INDEXER);
    expect_order(KVS_BACKEND_DEEPSEEK_V32_INDEXER, false);
}

/* Three layers of latent and indexer planes: pages of 73,728 and 8,448 bytes, blocks of 246,528. */
enum { LATENT = 73728, INDEXER = 8448, BLOCK = 3 * (LATENT + INDEXER), WHOLE = 6 };

static kvs_plane planes[6];
static kvs_namespace ns;

static void setup(void)
{
    for (uint32_t i = 0; i < 6; i++) {
        planes[i] = (kvs_plane){.layer = i / 2, .format = i % 2 ? KVS_FORMAT_indexer_fp8 : KVS_FORMAT_mla_bf16};
        (void)strcpy(planes[i].name, i % 2 ? "indexer" : "latent");
        planes[i].row_bytes = i % 2 ? 132 : 1152;
        planes[i].page_bytes = i % 2 ? INDEXER : LATENT;
    }
    ns = (kvs_namespace){.model = "m", .tokens_per_block = 64, .n_planes = 6, .planes = planes};
}

static kvs_status check(uint32_t owner, uint32_t plane, uint64_t stride, const char *text)
{
    kvs_err err = {.msg = ""};
    kvs_status s = kvs_backend_check(owner, &ns, plane, 9, stride, &err);

    cr_assert(s == KVS_OK ? err.msg[0] == 0 : strstr(err.msg, text) != NULL, "'%s' does not say '%s'", err.msg, text);
    return s;
}

Test(backend, one_tensor_a_layer_is_for_everyone, .init = setup)
{
    for (uint32_t backend = 0; backend <= KVS_BACKEND_OTHER; backend++)
        for (uint32_t plane = 0; plane < 6; plane++)
            cr_assert_eq(check(backend, plane, planes[plane].page_bytes, ""), KVS_OK);
}

Test(backend, a_cross_layer_view_is_for_those_that_were_verified, .init = setup)
{
    for (uint32_t backend = 0; backend <= KVS_BACKEND_OTHER; backend++) {
        const bool verified = backend <= KVS_BACKEND_FLASHINFER_MLA;

        cr_assert_eq(check(backend, 2, BLOCK, "plane latent of layer 1: stride 246528, page 73728"),
                     verified ? KVS_OK : KVS_E_UNSUPPORTED);
        cr_assert_eq(check(backend, 2, LATENT + 16, "stride 73744, page 73728"), verified ? KVS_OK : KVS_E_UNSUPPORTED);
    }
    (void)check(KVS_BACKEND_OTHER, 2, BLOCK, "backend OTHER: ");
}

Test(backend, the_indexer_keeps_its_own_plane_whoever_attends, .init = setup)
{
    for (uint32_t backend = 1; backend <= KVS_BACKEND_OTHER; backend++) {
        cr_assert_eq(check(backend, 3, BLOCK, "backend DEEPSEEK_V32_INDEXER: plane indexer of layer 1: "),
                     KVS_E_UNSUPPORTED);
        cr_assert_eq(check(backend, WHOLE, BLOCK, "backend "), KVS_E_UNSUPPORTED);
    }
    cr_assert_eq(check(0, 3, BLOCK, ""), KVS_OK);
    (void)check(KVS_BACKEND_FLASHMLA, WHOLE, BLOCK, "backend DEEPSEEK_V32_INDEXER: plane indexer of layer 0: ");
}

Test(backend, whole_blocks_of_verified_planes_are_in_order, .init = setup)
{
    for (uint32_t i = 0; i < 6; i++)
        planes[i].format = KVS_FORMAT_mla_bf16;
    cr_assert_eq(check(KVS_BACKEND_FLASHMLA, WHOLE, BLOCK, ""), KVS_OK);
    cr_assert_eq(check(KVS_BACKEND_OTHER, WHOLE, BLOCK, "plane latent of layer 0"), KVS_E_UNSUPPORTED);
    ns.n_planes = 1; /* of one plane they are one tensor a layer */
    cr_assert_eq(kvs_backend_check(KVS_BACKEND_OTHER, &ns, 1, 9, LATENT, NULL), KVS_OK);
    cr_assert_eq(kvs_backend_check(KVS_BACKEND_OTHER, &ns, 1, 9, LATENT + 16, NULL), KVS_E_UNSUPPORTED);
}

Test(backend, an_override_and_a_single_block_are_taken, .init = setup)
{
    cr_assert_eq(check(KVS_BACKEND_OTHER | KVS_BACKEND_OVERRIDE, 2, BLOCK, ""), KVS_OK);
    cr_assert_eq(check(KVS_BACKEND_DEEPSEEK_V32_INDEXER | KVS_BACKEND_OVERRIDE, WHOLE, BLOCK, ""), KVS_OK);
    cr_assert_eq(kvs_backend_check(KVS_BACKEND_OTHER, &ns, 2, 1, BLOCK, NULL), KVS_OK);
}

Test(backend, numbers_that_are_none_are_refused, .init = setup)
{
    cr_assert_eq(check(KVS_BACKEND_OTHER + 1, 2, LATENT, "backend: 8 is outside 1..7"), KVS_E_INVALID);
    cr_assert_eq(check(KVS_BACKEND_OVERRIDE, 2, LATENT, "backend: 0 is outside 1..7"), KVS_E_INVALID);
    cr_assert_eq(check(UINT32_MAX, 2, LATENT, "backend: 2147483647"), KVS_E_INVALID);
    cr_assert_null(kvs_backend_name(0));
    cr_assert_null(kvs_backend_name(KVS_BACKEND_OTHER + 1));
}
