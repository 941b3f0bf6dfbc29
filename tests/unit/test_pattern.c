/* Content made from keys: what must not look right does not. */
#include <criterion/criterion.h>
#include <string.h>

#include "proto/ctl/pattern.h"

enum { BYTES = 4096, WORD = 8 };

static uint8_t a[BYTES + 64], b[BYTES + 64], key_a[32], key_b[32];

static void fill(void)
{
    pattern_key(1, key_a);
    pattern_key(2, key_b);
    pattern_fill(key_a, a, BYTES);
    pattern_fill(key_b, b, BYTES);
}

TestSuite(pattern, .init = fill);

Test(pattern, accepts_what_it_made_and_nothing_less)
{
    cr_assert_eq(pattern_verify(key_a, a, BYTES), BYTES);
    cr_assert_eq(pattern_verify(key_b, b, BYTES), BYTES);
    cr_assert_eq(pattern_verify(key_a, a, 0), 0);
    for (uint64_t at = 0; at < BYTES; at += 511)
        for (unsigned bit = 0; bit < 8; bit++) {
            a[at] ^= (uint8_t)(1u << bit);
            cr_assert_eq(pattern_verify(key_a, a, BYTES), at / WORD * WORD, "bit %u of byte %zu", bit, (size_t)at);
            a[at] ^= (uint8_t)(1u << bit);
        }
}

Test(pattern, shows_a_swap_of_blocks)
{
    cr_assert_eq(pattern_verify(key_a, b, BYTES), 0);
    cr_assert_eq(pattern_verify(key_b, a, BYTES), 0);
}

Test(pattern, shows_a_shift_by_any_number_of_bytes)
{
    static uint8_t shifted[BYTES + 128];

    for (size_t by = 1; by <= 64; by++) {
        memset(shifted, 0, sizeof shifted);
        memcpy(shifted + by, a, BYTES);
        cr_assert_lt(pattern_verify(key_a, shifted, BYTES), BYTES, "shifted by %zu", by);
        cr_assert_lt(pattern_verify(key_a, a + by, BYTES - by / WORD * WORD - WORD), WORD, "early by %zu", by);
    }
}

Test(pattern, shows_a_mixture_where_it_begins)
{
    for (size_t at = WORD; at < BYTES; at += 24 * WORD) {
        fill();
        memcpy(a + at, b + at, WORD); /* one word of the other block, at its own place */
        cr_assert_eq(pattern_verify(key_a, a, BYTES), at);
    }
}

Test(pattern, shows_words_of_the_block_itself_in_the_wrong_place)
{
    memcpy(a + 80, a + 160, WORD);
    cr_assert_eq(pattern_verify(key_a, a, BYTES), 80);
}

Test(pattern, shows_a_copy_that_never_happened)
{
    static const uint8_t was_there[] = {0x00, 0xa5, 0xff};

    for (size_t i = 0; i < sizeof was_there; i++) {
        memset(a, was_there[i], BYTES);
        cr_assert_eq(pattern_verify(key_a, a, BYTES), 0);
        fill();
        memset(a + BYTES - WORD, was_there[i], WORD); /* all but the last word was copied */
        cr_assert_eq(pattern_verify(key_a, a, BYTES), BYTES - WORD);
    }
}

Test(pattern, gives_different_keys_and_the_same_ones_again)
{
    enum { N = 2000 };
    static uint8_t keys[N][32];
    uint8_t again[32];

    for (uint32_t i = 0; i < N; i++)
        pattern_key(i, keys[i]);
    for (uint32_t i = 0; i < N; i++) {
        pattern_key(i, again);
        cr_assert_eq(memcmp(again, keys[i], 32), 0);
        for (uint32_t k = 0; k < i; k++)
            cr_assert_neq(memcmp(keys[i], keys[k], 32), 0, "ids %u and %u", i, k);
    }
}

Test(pattern, differs_between_keys_of_one_bit)
{
    for (unsigned i = 0; i < 256; i++) {
        memcpy(key_b, key_a, 32);
        key_b[i / 8] ^= (uint8_t)(1u << i % 8);
        cr_assert_eq(pattern_verify(key_b, a, BYTES), 0, "bit %u of the key", i);
    }
}
