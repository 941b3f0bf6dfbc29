#include <criterion/criterion.h>

#include <stdlib.h>
#include <string.h>

#include "kernels/block_sum.h"
#include "tests/support/random.h"

enum { BYTES = 1024 };

static void fill(uint8_t *p, size_t n, uint64_t seed)
{
    rnd r = {seed};

    rnd_bytes(&r, p, n);
}

/* Numbers that a change of the formula would change: they are stored somewhere. */
Test(block_sum, of_known_bytes)
{
    uint8_t p[19];

    for (uint8_t i = 0; i < sizeof p; i++)
        p[i] = i;
    cr_assert_eq(kvs_sum(p, 0), 0);
    cr_assert_eq(kvs_sum(p, 8), UINT64_C(0xc50887884d0419cd), "%#lx", kvs_sum(p, 8));
    cr_assert_eq(kvs_sum(p, 19), UINT64_C(0x9eda5cf230a39061), "%#lx", kvs_sum(p, 19));
}

Test(block_sum, every_variant_gives_the_same_for_every_length)
{
    const kvs_sum_variant *v;
    const uint32_t n = kvs_sum_variants(&v);
    static uint8_t p[BYTES * 8 + 8];

    fill(p, sizeof p, 5);
    for (uint64_t words = 0; words <= BYTES; words++)
        for (uint32_t i = 1; i < n; i++)
            cr_assert_eq(v[i].words(p + words % 8, words), v[0].words(p + words % 8, words), "%s, %lu words", v[i].name,
                         words);
    cr_assert_str_eq(v[n - 1].name, "plain");
}

Test(block_sum, sees_every_single_bit)
{
    uint8_t p[BYTES];
    uint64_t sum;

    fill(p, sizeof p, 6);
    memset(p + 512, 0, 128);
    memset(p + 640, 0xFF, 128);
    sum = kvs_sum(p, sizeof p);
    for (size_t bit = 0; bit < 8 * sizeof p; bit++) {
        p[bit / 8] ^= (uint8_t)(1 << bit % 8);
        cr_assert_neq(kvs_sum(p, sizeof p), sum, "bit %zu", bit);
        p[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    cr_assert_eq(kvs_sum(p, sizeof p), sum);
}

/* Any two words, the same bit of any two words, any two bytes. */
Test(block_sum, sees_what_changed_places)
{
    uint64_t w[48], sum;

    fill((uint8_t *)w, sizeof w, 7);
    sum = kvs_sum(w, sizeof w);
    for (int i = 0; i < 48; i++)
        for (int j = 0; j < i; j++) {
            uint64_t was[2] = {w[i], w[j]};

            w[i] = was[1];
            w[j] = was[0];
            cr_assert_neq(kvs_sum(w, sizeof w), sum, "words %d and %d", i, j);
            for (int bit = 0; bit < 64; bit++) {
                w[i] = was[0] ^ UINT64_C(1) << bit;
                w[j] = was[1] ^ UINT64_C(1) << bit;
                cr_assert_neq(kvs_sum(w, sizeof w), sum, "bit %d of %d and %d", bit, i, j);
            }
            w[i] = was[0];
            w[j] = was[1];
        }
}

Test(block_sum, zeros_of_two_lengths_differ)
{
    static uint8_t zero[4096];
    uint64_t seen[4097];

    for (uint64_t n = 0; n <= 4096; n++)
        seen[n] = kvs_sum(zero, n);
    for (uint64_t n = 1; n <= 4096; n++)
        for (uint64_t m = 0; m < n; m++)
            cr_assert_neq(seen[n], seen[m], "%lu and %lu", n, m);
}

/* A page that came one row late, or from the next layer. */
Test(block_sum, sees_a_shift)
{
    static uint8_t p[64 * 1152 + 1152];
    const uint64_t sum = (fill(p, sizeof p, 8), kvs_sum(p, 64 * 1152));

    for (uint64_t by = 1; by <= 1152; by++)
        cr_assert_neq(kvs_sum(p + by, 64 * 1152), sum, "%lu", by);
}

/* Bits of the sum of nearly equal blocks: each is set about half of the time. */
Test(block_sum, spreads_over_all_bits)
{
    enum { N = 4096 };
    uint32_t set[64] = {0};
    uint8_t p[256] = {0};

    for (uint32_t i = 0; i < N; i++) {
        uint64_t sum;

        memcpy(p + 96, &i, sizeof i);
        sum = kvs_sum(p, sizeof p);
        for (int bit = 0; bit < 64; bit++)
            set[bit] += sum >> bit & 1;
    }
    for (int bit = 0; bit < 64; bit++)
        cr_assert(set[bit] > N / 2 - 320 && set[bit] < N / 2 + 320, "bit %d: %u", bit, set[bit]);
}

Test(block_sum, refuses_what_has_no_memory)
{
    static uint8_t p[64] __attribute__((aligned(16)));
    const int32_t id = 0;
    uint64_t sum = 5;
    uint32_t bad;
    kvs_err err = {.msg = ""};
    kvs_block_sum_args a = {
        .view = {.base = p, .block_stride = 64, .page_bytes = 64, .n_blocks = 1}, .blocks = &id, .sums = &sum, .n = 1};

    a.view.base = NULL;
    cr_assert_eq(kvs_block_sum(&a, &bad, &err), KVS_E_INVALID);
    a.view.base = p;
    a.view.block_stride = 56;
    cr_assert_eq(kvs_block_sum(&a, &bad, &err), KVS_E_INVALID);
    a.view.block_stride = 64;
    a.blocks = NULL;
    cr_assert_eq(kvs_block_sum(&a, &bad, &err), KVS_E_INVALID);
    a.blocks = &id;
    a.sums = (uint64_t *)(void *)((uint8_t *)&sum + 4);
    cr_assert_eq(kvs_block_sum(&a, &bad, &err), KVS_E_INVALID);
    cr_assert_eq(sum, 5);
    a.sums = &sum;
    cr_assert_eq(kvs_block_sum(&a, &bad, &err), KVS_OK);
    cr_assert_eq(sum, kvs_sum(p, 64));
}
