#include "proto/layout.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static kvs_plane planes[KVS_MAX_PLANES + 1];
static uint8_t canon[65536];

static kvs_namespace small(void)
{
    kvs_namespace ns;
    kvs_err err = {0};

    cr_assert_eq(kvs_namespace_mla("tiny", "rev1", KVS_FORMAT_mla_bf16, 2, 4, planes, &ns, &err), KVS_OK, "%s",
                 err.msg);
    return ns;
}

static const char *hex(const uint8_t d[32])
{
    static char text[65];

    for (size_t i = 0; i < 32; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", d[i]);
    return text;
}

static void expect_refused(const kvs_namespace *ns, kvs_status want, const char *msg)
{
    kvs_err err = {0};
    uint8_t digest[32];
    size_t len = 0;

    cr_assert_eq(kvs_namespace_check(ns, &err), want, "%s, not: %s", err.msg, msg);
    cr_assert_eq(err.status, want);
    cr_assert_str_eq(err.msg, msg);
    cr_assert_eq(kvs_namespace_encode(ns, canon, sizeof canon, &len, NULL), want);
    cr_assert_eq(kvs_namespace_digest(ns, digest, NULL), want);
}

Test(layout, parses_every_format_name_and_knows_its_row)
{
    uint32_t got = 0;

#define X(name, id, row)                                                                                               \
    cr_assert_eq(kvs_format_parse(#name, &got, NULL), KVS_OK);                                                         \
    cr_assert_eq(got, id);                                                                                             \
    cr_assert_str_eq(kvs_format_name(id), #name);                                                                      \
    cr_assert_eq(kvs_format_row_bytes(id), row);
    KVS_FORMAT_MAP(X)
#undef X
    cr_assert_null(kvs_format_name(0));
    cr_assert_null(kvs_format_name(13));
    cr_assert_eq(kvs_format_row_bytes(13), 0);
}

Test(layout, aliases_of_engines_name_the_same_format)
{
    static const struct {
        const char *name;
        uint32_t format;
    } ALIAS[] = {{"bf16", KVS_FORMAT_mla_bf16},    {"bfloat16", KVS_FORMAT_mla_bf16}, {"fp16", KVS_FORMAT_mla_fp16},
                 {"float16", KVS_FORMAT_mla_fp16}, {"half", KVS_FORMAT_mla_fp16},     {"fp8", KVS_FORMAT_mla_fp8}};

    for (size_t i = 0; i < sizeof ALIAS / sizeof *ALIAS; i++) {
        uint32_t got = 0;

        cr_assert_eq(kvs_format_parse(ALIAS[i].name, &got, NULL), KVS_OK);
        cr_assert_eq(got, ALIAS[i].format, "%s", ALIAS[i].name);
    }
}

Test(layout, refuses_auto_and_unknown_format_names)
{
    static const char *const BAD[] = {"auto", "", "MLA_BF16", "bf16 ", "fp4", "kv"};
    kvs_err err = {0};
    uint32_t got = 77;

    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        cr_assert_eq(kvs_format_parse(BAD[i], &got, &err), KVS_E_UNSUPPORTED);
        cr_assert_not_null(strstr(err.msg, BAD[i]));
        cr_assert_eq(got, 77);
    }
    cr_assert_eq(kvs_format_parse(NULL, &got, &err), KVS_E_UNSUPPORTED);
}

Test(layout, offsets_of_deepseek_geometry)
{
    kvs_namespace ns;

    cr_assert_eq(kvs_namespace_mla("deepseek-v3", "", KVS_FORMAT_mla_bf16, 61, 64, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_slot_bytes(&ns), 4497408);
    cr_assert_eq(kvs_namespace_plane_offset(&ns, 0), 0);
    cr_assert_eq(kvs_namespace_plane_offset(&ns, 30), 30 * 73728);
    cr_assert_eq(kvs_namespace_plane_offset(&ns, 60), 60 * 73728);
    cr_assert_eq(kvs_namespace_plane_offset(&ns, 61), 4497408);
    cr_assert_eq(kvs_namespace_plane_offset(&ns, UINT32_MAX), 4497408);
}

Test(layout, sums_and_products_are_64_bits_wide)
{
    kvs_namespace ns = small();

    ns.tokens_per_block = 4096;
    ns.n_planes = 200;
    for (uint32_t p = 0; p < ns.n_planes; p++)
        planes[p] = (kvs_plane){"k", p, KVS_FORMAT_kv_bf16, 1048576, 0, UINT64_C(4096) << 20};
    cr_assert_eq(kvs_namespace_check(&ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_plane_offset(&ns, 199), UINT64_C(199) << 32);
    ns.n_planes = 256;
    for (uint32_t p = 200; p < ns.n_planes; p++)
        planes[p] = planes[0];
    expect_refused(&ns, KVS_E_LIMIT, "slot_bytes: 1099511627776 in 256 planes is not below 1099511627776");
    planes[0].row_bytes = UINT32_MAX;
    expect_refused(&ns, KVS_E_INVALID,
                   "plane 0 page_bytes: 4294967296 is below 4096 tokens x 4294967295 bytes = 17592186040320");
}

Test(layout, mla_helper_fills_one_plane_a_layer)
{
    kvs_namespace ns = small();

    cr_assert_eq(ns.n_planes, 2);
    cr_assert_eq(ns.shard, KVS_SHARD_REPLICATED);
    cr_assert_str_eq(ns.planes[1].name, "latent");
    cr_assert_eq(ns.planes[1].layer, 1);
    cr_assert_eq(ns.planes[1].page_bytes, 4608);
    cr_assert_eq(kvs_namespace_mla("m", NULL, KVS_FORMAT_fp8_ds_mla, 1, 1, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(ns.planes[0].page_bytes, 656);
    cr_assert_str_eq(ns.weights, "");
    cr_assert_eq(kvs_namespace_mla("m", NULL, KVS_FORMAT_fp8_blk584, 1, 3, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(ns.planes[0].page_bytes, 2304); /* 1752, rounded up to 576 */
    cr_assert_eq(kvs_namespace_mla("m", NULL, KVS_FORMAT_fp8_blk584, 1, 64, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(ns.planes[0].page_bytes, 37440);
    cr_assert_eq(kvs_namespace_mla("m", NULL, KVS_FORMAT_fp8_blk528, 1, 64, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(ns.planes[0].page_bytes, 33792);
    planes[0].page_bytes = 33808;
    expect_refused(&ns, KVS_E_INVALID, "plane 0 page_bytes: 33808 is not a multiple of 512");
}

Test(layout, mla_helper_refuses_what_is_not_mla)
{
    kvs_namespace ns = small();
    char tag[300];
    kvs_err err = {0};

    memset(tag, 'm', sizeof tag - 1);
    tag[sizeof tag - 1] = 0;
    cr_assert_eq(kvs_namespace_mla("m", "", KVS_FORMAT_kv_bf16, 2, 4, planes, &ns, &err), KVS_E_UNSUPPORTED);
    cr_assert_str_eq(err.msg, "format: 6 is not one of MLA");
    cr_assert_eq(kvs_namespace_mla("m", "", 0, 2, 4, planes, &ns, NULL), KVS_E_UNSUPPORTED);
    cr_assert_eq(kvs_namespace_mla("m", "", 1, 0, 4, planes, &ns, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "n_planes: 0 is outside 1..1024");
    cr_assert_eq(kvs_namespace_mla("m", "", 1, 1025, 4, planes, &ns, NULL), KVS_E_LIMIT);
    cr_assert_eq(kvs_namespace_mla("m", "", 1, 1, 4097, planes, &ns, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "tokens_per_block: 4097 is outside 1..4096");
    cr_assert_eq(kvs_namespace_mla(tag, "", 1, 1, 4, planes, &ns, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "model: at least 256 bytes are outside 1..255");
    cr_assert_eq(kvs_namespace_mla("m", tag, 1, 1, 4, planes, &ns, &err), KVS_E_LIMIT);
    cr_assert_eq(kvs_namespace_mla(NULL, "", 1, 1, 4, planes, &ns, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "model: 0 bytes are outside 1..255");
    cr_assert_str_eq(ns.model, "tiny"); /* untouched by all of these */
}

Test(layout, refusals_name_field_value_and_limit)
{
    kvs_namespace ok = small(), ns;
    kvs_plane good = planes[1];

#define REFUSED(change, status, msg)                                                                                   \
    ns = ok;                                                                                                           \
    planes[1] = good;                                                                                                  \
    change;                                                                                                            \
    expect_refused(&ns, status, msg)

    REFUSED(ns.tokens_per_block = 0, KVS_E_LIMIT, "tokens_per_block: 0 is outside 1..4096");
    REFUSED(ns.n_planes = 0, KVS_E_LIMIT, "n_planes: 0 is outside 1..1024");
    REFUSED(ns.n_planes = UINT32_MAX, KVS_E_LIMIT, "n_planes: 4294967295 is outside 1..1024");
    REFUSED(ns.planes = NULL, KVS_E_INVALID, "planes: none given where n_planes is 2");
    REFUSED(ns.model[0] = 0, KVS_E_LIMIT, "model: 0 bytes are outside 1..255");
    REFUSED(ns.shard = 3, KVS_E_INVALID, "shard: kind 3 is outside 0..2");
    REFUSED(ns.shard_n = 8, KVS_E_INVALID, "shard: replicated has [0,0)/0, not [0,0)/8");
    REFUSED(ns.shard = 1, KVS_E_INVALID, "shard: heads [0,0)/0 is not a range with a < b <= n");
    REFUSED((ns.shard = 2, ns.shard_b = 9, ns.shard_n = 8), KVS_E_INVALID,
            "shard: layers [0,9)/8 is not a range with a < b <= n");
    REFUSED(planes[1].name[0] = 0, KVS_E_LIMIT, "plane 1 name: 0 bytes are outside 1..23");
    REFUSED(memset(planes[1].name, 'x', 24), KVS_E_LIMIT, "plane 1 name: at least 24 bytes are outside 1..23");
    REFUSED(planes[1].name[2] = 'T', KVS_E_INVALID, "plane 1 name: byte 2 (0x54) is outside [a-z0-9_]");
    REFUSED(planes[1].format = 99, KVS_E_UNSUPPORTED, "plane 1 format: 99 is not known");
    REFUSED(planes[1].row_bytes = 1150, KVS_E_INVALID, "plane 1 row_bytes: 1150 where mla_bf16 has 1152");
    REFUSED((planes[1].format = KVS_FORMAT_raw, planes[1].row_bytes = 0), KVS_E_INVALID,
            "plane 1 row_bytes: 0 where raw has at least 1");
    REFUSED(planes[1].reserved = 5, KVS_E_INVALID, "plane 1 reserved: 5 is not 0");
    REFUSED(planes[1].page_bytes = 4616, KVS_E_INVALID, "plane 1 page_bytes: 4616 is not a multiple of 16");
    REFUSED(planes[1].page_bytes = 4592, KVS_E_INVALID,
            "plane 1 page_bytes: 4592 is below 4 tokens x 1152 bytes = 4608");
    REFUSED(planes[1].page_bytes = UINT64_MAX - 15, KVS_E_LIMIT,
            "plane 1 page_bytes: 18446744073709551600 is not below 1099511627776");
#undef REFUSED
}

Test(layout, accepts_the_edges)
{
    kvs_namespace ns = small();

    memset(ns.model, 'm', 255);
    memset(ns.weights, 'w', 255);
    ns.shard = KVS_SHARD_HEADS;
    ns.shard_b = ns.shard_n = 1;
    memset(planes[0].name, 'z', 23);
    cr_assert_eq(kvs_namespace_check(&ns, NULL), KVS_OK);
    planes[0].page_bytes = (UINT64_C(1) << 40) - 4608 - 16;
    cr_assert_eq(kvs_namespace_check(&ns, NULL), KVS_OK);
    planes[0].page_bytes += 16;
    cr_assert_eq(kvs_namespace_check(&ns, NULL), KVS_E_LIMIT);
}

Test(layout, tags_are_utf8_without_control_characters)
{
    static const char *const GOOD[] = {
        "a",        "mod\xc3\xa8le", "\xe6\xa8\xa1\xe5\x9e\x8b", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf",
        "\xc2\xa0", "a/b c~"};
    static const char *const BAD[] = {"\x1f",
                                      "\x7f",
                                      "a\nb",
                                      "\xc2\x80",
                                      "\xc2\x9f",
                                      "\x80",
                                      "\xc0\xaf",
                                      "\xc1\xbf",
                                      "\xe0\x80\xaf",
                                      "\xed\xa0\x80",
                                      "\xf0\x80\x80\xaf",
                                      "\xf4\x90\x80\x80",
                                      "\xf8\x88\x80\x80\x80",
                                      "\xff",
                                      "\xc3",
                                      "\xe6\xa8",
                                      "\xc3(",
                                      "\xf0\x9f\x98"};
    kvs_namespace ns = small();
    kvs_err err;

    for (size_t i = 0; i < sizeof GOOD / sizeof *GOOD; i++) {
        strcpy(ns.weights, GOOD[i]);
        cr_assert_eq(kvs_namespace_check(&ns, NULL), KVS_OK, "good %zu", i);
    }
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        strcpy(ns.weights, BAD[i]);
        cr_assert_eq(kvs_namespace_check(&ns, &err), KVS_E_INVALID, "bad %zu", i);
    }
    strcpy(ns.weights, "ab\x07");
    expect_refused(&ns, KVS_E_INVALID, "weights: byte 2 (0x07) is not UTF-8 text without control characters");
}

Test(layout, digests_equal_those_of_another_implementation)
{
    kvs_namespace ns = small();
    uint8_t d[32];

    /* Computed once with hashlib from the text of PROTOCOL.md. */
    cr_assert_eq(kvs_namespace_digest(&ns, d, NULL), KVS_OK);
    cr_assert_str_eq(hex(d), "aca2e571ec32f10f38fbe6bf79505b8b8115575066ea981e7203ca1af0894de8");
    cr_assert_eq(kvs_namespace_mla("deepseek-v3", "", KVS_FORMAT_mla_bf16, 61, 64, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_digest(&ns, d, NULL), KVS_OK);
    cr_assert_str_eq(hex(d), "3eaf09844d8bfe029abf017a545ccc5806a364023306bb0639498f08f22b2364");
    ns = (kvs_namespace){.model = "mod\xc3\xa8le",
                         .weights = "fp8 rope=yarn",
                         .shard = KVS_SHARD_HEADS,
                         .shard_a = 8,
                         .shard_b = 16,
                         .shard_n = 128,
                         .tokens_per_block = 16,
                         .n_planes = 3,
                         .planes = planes};
    planes[0] = (kvs_plane){"k", 0, KVS_FORMAT_kv_bf16, 2048, 0, 32768};
    planes[1] = (kvs_plane){"v", 0, KVS_FORMAT_kv_bf16, 2048, 0, 32768};
    planes[2] = (kvs_plane){"indexer", 0, KVS_FORMAT_indexer_fp8, 132, 0, 2112};
    cr_assert_eq(kvs_namespace_digest(&ns, d, NULL), KVS_OK);
    cr_assert_str_eq(hex(d), "46763d048bbb92ff08c732928b4a38c149a6929d898af9d1cb2dbb8c78d080be");
}

Test(layout, bytes_behind_the_closing_zero_do_not_count)
{
    kvs_namespace ns = small();
    uint8_t a[32], b[32];

    cr_assert_eq(kvs_namespace_digest(&ns, a, NULL), KVS_OK);
    memset(ns.model + 5, 'x', 100);
    memset(planes[0].name + 7, 'x', 17);
    cr_assert_eq(kvs_namespace_digest(&ns, b, NULL), KVS_OK);
    cr_assert_eq(memcmp(a, b, 32), 0);
}

Test(layout, every_field_changes_the_digest)
{
    kvs_namespace ok = small(), ns;
    kvs_plane good = planes[1];
    uint8_t seen[16][32];
    size_t n = 0;

#define ADD(change)                                                                                                    \
    ns = ok;                                                                                                           \
    planes[1] = good;                                                                                                  \
    change;                                                                                                            \
    cr_assert_eq(kvs_namespace_digest(&ns, seen[n++], NULL), KVS_OK)

    ADD((void)0);
    ADD(strcpy(ns.model, "tinyr"); strcpy(ns.weights, "ev1")); /* a shifted border between the tags */
    ADD(strcpy(ns.weights, ""));
    ADD(ns.tokens_per_block = 3);
    ADD(ns.n_planes = 1);
    ADD(ns.shard = 1; ns.shard_b = 1; ns.shard_n = 2);
    ADD(ns.shard = 2; ns.shard_b = 1; ns.shard_n = 2);
    ADD(ns.shard = 1; ns.shard_a = 1; ns.shard_b = 2; ns.shard_n = 2);
    ADD(ns.shard = 1; ns.shard_b = 1; ns.shard_n = 3);
    ADD(planes[1].name[0] = 'b');
    ADD(planes[1].layer = 2);
    ADD(planes[1].format = KVS_FORMAT_mla_fp16);
    ADD(planes[1].page_bytes += 16);
#undef ADD
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < i; k++)
            cr_assert_neq(memcmp(seen[i], seen[k], 32), 0, "%zu and %zu are the same", i, k);
}

Test(layout, decodes_what_it_encodes)
{
    static kvs_plane back[8];
    kvs_namespace ns = small(), got;
    static uint8_t again[4096];
    size_t len = 0, len_again = 0;
    kvs_err err = {0};

    ns.shard = KVS_SHARD_LAYERS;
    ns.shard_a = 3;
    ns.shard_b = ns.shard_n = 5;
    planes[0].format = KVS_FORMAT_raw;
    planes[0].row_bytes = 7;
    cr_assert_eq(kvs_namespace_encode(&ns, canon, sizeof canon, &len, NULL), KVS_OK);
    cr_assert_eq(len, 152);
    cr_assert_eq(kvs_namespace_decode(canon, len, back, 8, &got, &err), KVS_OK, "%s", err.msg);
    cr_assert_str_eq(got.model, "tiny");
    cr_assert_eq(got.shard_a, 3);
    cr_assert_eq(memcmp(back, planes, 2 * sizeof *back), 0);
    cr_assert_eq(kvs_namespace_encode(&got, again, sizeof again, &len_again, NULL), KVS_OK);
    cr_assert_eq(len_again, len);
    cr_assert_eq(memcmp(again, canon, len), 0);
}

Test(layout, encode_tells_the_length_that_it_needs)
{
    kvs_namespace ns = small();
    size_t len = 0;
    kvs_err err = {0};

    cr_assert_eq(kvs_namespace_encode(&ns, canon, 151, &len, &err), KVS_E_LIMIT);
    cr_assert_eq(len, 152);
    cr_assert_str_eq(err.msg, "canonical description: 152 bytes do not fit 151");
    len = 0;
    cr_assert_eq(kvs_namespace_encode(&ns, NULL, 0, &len, NULL), KVS_E_LIMIT);
    cr_assert_eq(len, 152);
    cr_assert_eq(kvs_namespace_encode(&ns, canon, 152, &len, NULL), KVS_OK);
}

/* Whatever is accepted must encode to the same bytes: then there is one spelling. */
Test(layout, no_changed_byte_is_a_second_spelling)
{
    static kvs_plane back[8];
    static uint8_t again[4096];
    kvs_namespace ns = small(), got;
    size_t len = 0, n, accepted = 0;

    cr_assert_eq(kvs_namespace_encode(&ns, canon, sizeof canon, &len, NULL), KVS_OK);
    for (size_t i = 0; i < len; i++) {
        uint8_t good = canon[i];

        for (unsigned v = 0; v < 256; v++) {
            canon[i] = (uint8_t)v;
            if (kvs_namespace_decode(canon, len, back, 8, &got, NULL) != KVS_OK)
                continue;
            accepted++;
            cr_assert_eq(kvs_namespace_encode(&got, again, sizeof again, &n, NULL), KVS_OK);
            cr_assert(n == len && memcmp(again, canon, len) == 0, "byte %zu = %u", i, v);
        }
        canon[i] = good;
    }
    cr_assert_gt(accepted, len);
}

Test(layout, decode_refuses_every_cut_and_every_tail)
{
    static kvs_plane back[8];
    kvs_namespace ns = small(), got = {0};
    size_t len = 0;

    cr_assert_eq(kvs_namespace_encode(&ns, canon, sizeof canon, &len, NULL), KVS_OK);
    for (size_t n = 0; n < len; n++) {
        uint8_t *cut = malloc(n + 1); /* of its own, so that a sanitizer sees a read too far */

        cr_assert_not_null(cut);
        memcpy(cut, canon, n);
        cr_assert_eq(kvs_namespace_decode(cut, n, back, 8, &got, NULL), KVS_E_PROTO, "%zu bytes", n);
        free(cut);
    }
    memset(canon + len, 0, 64);
    cr_assert_eq(kvs_namespace_decode(canon, len + 8, back, 8, &got, NULL), KVS_E_PROTO);
    cr_assert_eq(kvs_namespace_decode(canon, len + 48, back, 8, &got, NULL), KVS_E_PROTO);
    cr_assert_eq(got.n_planes, 0);
}

Test(layout, decode_says_what_is_wrong)
{
    static const struct {
        size_t at;
        uint8_t value;
        kvs_status status;
        const char *msg;
    } BAD[] = {
        {0, 'X', KVS_E_PROTO, "canonical description: 152 bytes that do not start with \"KVNS\""},
        {4, 2, KVS_E_UNSUPPORTED, "canonical description: version 2 is not 1"},
        {9, 0xff, KVS_E_LIMIT, "tokens_per_block: 65284 is outside 1..4096"},
        {13, 5, KVS_E_LIMIT, "n_planes: 1282 is outside 1..1024"},
        {12, 9, KVS_E_LIMIT, "n_planes: 9 is above 8"},
        {12, 3, KVS_E_PROTO, "canonical description: 96 bytes of planes where 3 planes take 144"},
        {33, 1, KVS_E_LIMIT, "canonical description: tags of 260 and 4 bytes, limit 255"},
        {44, 1, KVS_E_PROTO, "canonical description: tags are cut off or not spelled canonically"},
        {41, 0, KVS_E_PROTO, "canonical description: tags are cut off or not spelled canonically"},
        {79, 1, KVS_E_PROTO, "canonical description: a plane name is not padded with zeros"},
        {93, 1, KVS_E_INVALID, "plane 0 reserved: 256 is not 0"},
    };
    static kvs_plane back[8];
    kvs_namespace ns = small(), got;
    size_t len = 0;

    cr_assert_eq(kvs_namespace_encode(&ns, canon, sizeof canon, &len, NULL), KVS_OK);
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        uint8_t good = canon[BAD[i].at];
        kvs_err err = {0};

        canon[BAD[i].at] = BAD[i].value;
        cr_assert_eq(kvs_namespace_decode(canon, len, back, 8, &got, &err), BAD[i].status, "row %zu: %s", i, err.msg);
        cr_assert_str_eq(err.msg, BAD[i].msg);
        canon[BAD[i].at] = good;
    }
}

Test(layout, salt_and_adapter_never_share_a_key)
{
    static const struct {
        const char *salt, *adapter;
    } PAIR[] = {{"X", ""}, {"", "X"}, {"X", "X"}, {"ab", "c"}, {"a", "bc"}, {"", ""}, {"abc", ""}, {"", "abc"}};
    static const uint32_t tokens[] = {1, 2, 3, 4};
    enum { N = sizeof PAIR / sizeof *PAIR };
    uint8_t parent[32] = {0}, key[N][32];

    for (size_t i = 0; i < N; i++)
        cr_assert_eq(kvs_key_derive(parent, PAIR[i].salt, PAIR[i].adapter, tokens, 4, key[i], NULL), KVS_OK);
    for (size_t i = 0; i < N; i++)
        for (size_t k = 0; k < i; k++)
            cr_assert_neq(memcmp(key[i], key[k], 32), 0, "%zu and %zu are the same", i, k);
}

Test(layout, keys_equal_those_of_another_implementation)
{
    static const uint32_t first[] = {1, 2, 3, 4}, second[] = {5, 6, 7, UINT32_MAX};
    uint8_t zero[32] = {0}, key[32];

    cr_assert_eq(kvs_key_derive(zero, "", NULL, first, 4, key, NULL), KVS_OK);
    cr_assert_str_eq(hex(key), "206d60a7c4aee6af0520c74260e35e4f063c9d83176329bccebea4b17d4bb015");
    cr_assert_eq(kvs_key_derive(zero, "X", "", first, 4, key, NULL), KVS_OK);
    cr_assert_str_eq(hex(key), "fdbcf78660ac35a563f8889b600d744bd4c102ac8094bc936e8ec9776415da81");
    cr_assert_eq(kvs_key_derive(key, "X", "", second, 4, key, NULL), KVS_OK); /* in place */
    cr_assert_str_eq(hex(key), "ed396cda7e931165c1bf729cd9856316561ca8b9bf90c8afeb479ed01c65b44b");
}

Test(layout, key_takes_the_tokens_of_one_block)
{
    static uint32_t tokens[KVS_MAX_TOKENS_PER_BLOCK + 1];
    uint8_t parent[32] = {0}, a[32], b[32];
    kvs_err err = {0};

    cr_assert_eq(kvs_key_derive(parent, "", "", tokens, 0, a, &err), KVS_E_LIMIT);
    cr_assert_str_eq(err.msg, "n_tokens: 0 is outside 1..4096");
    cr_assert_eq(kvs_key_derive(parent, "", "", tokens, 4097, a, NULL), KVS_E_LIMIT);
    cr_assert_eq(kvs_key_derive(parent, "", "", tokens, 4096, a, NULL), KVS_OK);
    cr_assert_eq(kvs_key_derive(parent, "", "", tokens, 4095, b, NULL), KVS_OK);
    cr_assert_neq(memcmp(a, b, 32), 0);
}

static void is_named(kvs_status s, const kvs_err *err, const char *want)
{
    cr_assert_eq(s, KVS_E_INVALID, "%s: %s", want, kvs_status_name(s));
    cr_assert_str_eq(err->msg, want);
}

Test(layout, refuses_a_null_by_its_name)
{
    kvs_namespace ns;
    uint32_t tokens[4] = {1, 2, 3, 4};
    uint8_t key[32] = {0};
    kvs_err err = {0};
    size_t len;

    cr_assert_eq(kvs_namespace_mla("m", NULL, KVS_FORMAT_mla_bf16, 1, 4, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_encode(&ns, canon, sizeof canon, &len, NULL), KVS_OK);
    cr_assert_eq(kvs_key_derive(key, NULL, NULL, tokens, 4, key, NULL), KVS_OK);
    is_named(kvs_format_parse("bf16", NULL, &err), &err, "format_parse: ret is NULL");
    is_named(kvs_namespace_mla("m", "", KVS_FORMAT_mla_bf16, 1, 4, NULL, &ns, &err), &err,
             "namespace_mla: planes is NULL");
    is_named(kvs_namespace_mla("m", "", KVS_FORMAT_mla_bf16, 1, 4, planes, NULL, &err), &err,
             "namespace_mla: ret is NULL");
    is_named(kvs_namespace_check(NULL, &err), &err, "namespace: ns is NULL");
    is_named(kvs_namespace_encode(NULL, canon, sizeof canon, &len, &err), &err, "namespace: ns is NULL");
    is_named(kvs_namespace_encode(&ns, NULL, sizeof canon, &len, &err), &err, "namespace_encode: buf is NULL");
    is_named(kvs_namespace_encode(&ns, canon, sizeof canon, NULL, &err), &err, "namespace_encode: ret_len is NULL");
    is_named(kvs_namespace_decode(NULL, len, planes, 1, &ns, &err), &err, "namespace_decode: buf is NULL");
    is_named(kvs_namespace_decode(canon, len, NULL, 1, &ns, &err), &err, "namespace_decode: planes is NULL");
    is_named(kvs_namespace_decode(canon, len, planes, 1, NULL, &err), &err, "namespace_decode: ret is NULL");
    is_named(kvs_namespace_digest(NULL, key, &err), &err, "namespace: ns is NULL");
    is_named(kvs_namespace_digest(&ns, NULL, &err), &err, "namespace_digest: ret is NULL");
    is_named(kvs_key_derive(NULL, "", "", tokens, 4, key, &err), &err, "key_derive: parent is NULL");
    is_named(kvs_key_derive(key, "", "", NULL, 4, key, &err), &err, "key_derive: tokens is NULL");
    is_named(kvs_key_derive(key, "", "", tokens, 4, NULL, &err), &err, "key_derive: ret is NULL");
}
