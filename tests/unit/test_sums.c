/* Sums by parts: what the sum of a block is, and that it does not depend on who took it when. */
#include "daemon/sums.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/cpus.h"
#include "tests/support/random.h"

/* With few processors nobody looks out for work without sleeping. */
static unsigned cpus = 2;

unsigned cpus_usable(void)
{
    return cpus;
}

enum { N_SIZES = 9, MANY = 700 };
static const uint64_t sizes[N_SIZES] = {1,
                                        4096,
                                        SUMS_PART - 1,
                                        SUMS_PART,
                                        SUMS_PART + 16,
                                        3 * SUMS_PART + 5,
                                        4497408,
                                        UINT64_C(64) * SUMS_PART,
                                        UINT64_C(65) * SUMS_PART + 77};

static uint8_t *bytes_of(uint64_t n, uint64_t seed)
{
    uint8_t *p = malloc(n);
    rnd r = {seed};

    cr_assert_not_null(p);
    rnd_bytes(&r, p, n);
    return p;
}

/* As the header says, in the plainest way. */
static uint64_t expected(const uint8_t *at, uint64_t n)
{
    uint64_t part = SUMS_PART, k = 0;
    uint8_t words[8 * 1024];

    if (n <= part)
        return XXH3_64bits(at, n);
    while ((n + part - 1) / part > SUMS_PARTS)
        part += SUMS_PART;
    for (uint64_t from = 0; from < n; from += part) {
        uint64_t s = XXH3_64bits(at + from, n - from < part ? n - from : part);

        for (int b = 0; b < 8; b++)
            words[k++] = (uint8_t)(s >> 8 * b);
    }
    return XXH3_64bits(words, k);
}

Test(sums, are_what_the_header_says)
{
    for (int i = 0; i < N_SIZES; i++) {
        uint8_t *p = bytes_of(sizes[i], (uint64_t)i + 1);

        cr_assert_eq(sums_one(p, sizes[i]), expected(p, sizes[i]), "%llu bytes", (unsigned long long)sizes[i]);
        free(p);
    }
}

Test(sums, see_one_changed_bit_anywhere)
{
    uint64_t n = 3 * SUMS_PART + 5, at[] = {0, SUMS_PART - 1, SUMS_PART, n - 1};
    uint8_t *p = bytes_of(n, 9);
    uint64_t before = sums_one(p, n);

    for (int i = 0; i < 4; i++) {
        p[at[i]] ^= 4;
        cr_assert_neq(sums_one(p, n), before);
        p[at[i]] ^= 4;
    }
    free(p);
}

static void while_it_comes_in(void)
{
    sums *s = NULL;

    cr_assert_eq(sums_create(&s, 3, NULL), KVS_OK);
    for (int i = 0; i < N_SIZES; i++) {
        uint8_t *p = bytes_of(sizes[i], 40 + (uint64_t)i), *arriving = calloc(1, sizes[i]);
        uint64_t got = 0, have = 0;
        rnd r = {5};
        uint32_t h;

        cr_assert_not_null(arriving);
        h = sums_begin(s, arriving, sizes[i], &got);
        while (have < sizes[i]) {
            uint64_t left = sizes[i] - have, n = 1 + rnd_below(&r, 2 * SUMS_PART);

            n = n < left ? n : left;
            memcpy(arriving + have, p + have, n); /* not before: a sum that looked too early is wrong */
            have += n;
            sums_reach(s, h, have);
        }
        sums_finish(s);
        cr_assert_eq(got, expected(p, sizes[i]), "%llu bytes", (unsigned long long)sizes[i]);
        free(p);
        free(arriving);
    }
    sums_destroy(s);
}

Test(sums, are_the_same_taken_by_threads_while_the_block_comes_in)
{
    while_it_comes_in();
    cpus = 16;
    while_it_comes_in();
}

Test(sums, of_more_blocks_than_places_are_all_taken)
{
    static uint64_t got[MANY];
    uint64_t n = 70000;
    uint8_t *p = bytes_of(n + MANY, 3);
    sums *s = NULL;

    cr_assert_eq(sums_create(&s, 2, NULL), KVS_OK);
    for (uint32_t i = 0; i < MANY; i++)
        sums_reach(s, sums_begin(s, p + i, n, &got[i]), n);
    sums_finish(s);
    for (uint32_t i = 0; i < MANY; i++)
        cr_assert_eq(got[i], XXH3_64bits(p + i, n), "block %u", i);
    sums_destroy(s);
    free(p);
}

/* Symptom: the owner waited for ever for a place that only it could have freed. */
Test(sums, say_when_every_place_is_taken_by_a_block_that_is_still_coming_in, .timeout = 30)
{
    static uint64_t got[SUMS_BLOCKS + 1];
    uint32_t handles[SUMS_BLOCKS];
    uint64_t n = 2 * SUMS_PART;
    uint8_t *p = bytes_of(n, 3);
    sums *s = NULL;

    cr_assert_eq(sums_create(&s, 2, NULL), KVS_OK);
    for (uint32_t i = 0; i < SUMS_BLOCKS; i++) {
        handles[i] = sums_begin(s, p, n, &got[i]);
        cr_assert_neq(handles[i], SUMS_NONE, "block %u", i);
        sums_reach(s, handles[i], i % 2 == 0 ? SUMS_PART : 1);
    }
    cr_assert_eq(sums_begin(s, p, n, &got[SUMS_BLOCKS]), SUMS_NONE);
    sums_reach(s, handles[7], n);
    sums_reach(s, sums_begin(s, p, n, &got[SUMS_BLOCKS]), n);
    for (uint32_t i = 0; i < SUMS_BLOCKS; i++)
        if (i != 7)
            sums_reach(s, handles[i], n);
    sums_finish(s);
    for (uint32_t i = 0; i <= SUMS_BLOCKS; i++)
        cr_assert_eq(got[i], expected(p, n), "block %u", i);
    sums_destroy(s);
    free(p);
}

Test(sums, leave_the_result_of_a_forgotten_block_alone_and_its_place_to_others)
{
    uint64_t n = 4 * SUMS_PART, got[2] = {7, 7};
    uint8_t *p = bytes_of(n, 3);
    sums *s = NULL;

    cr_assert_eq(sums_create(&s, 2, NULL), KVS_OK);
    for (int i = 0; i < MANY; i++) { /* more often than there are places */
        uint32_t h = sums_begin(s, p, n, &got[0]);

        if (i % 2 == 0)
            sums_reach(s, h, n / 2);
        sums_forget(s, h);
    }
    sums_reach(s, sums_begin(s, p, n, &got[1]), n);
    sums_finish(s);
    cr_assert_eq(got[0], 7);
    cr_assert_eq(got[1], expected(p, n));
    sums_destroy(s);
    free(p);
}

/* Blocks come in faster than they are taken, and then for a long time they do not. */
Test(sums, take_more_threads_when_they_are_late_and_less_when_they_no_longer_are)
{
    static uint64_t got[MANY];
    uint64_t n = UINT64_C(64) << 20;
    uint8_t *p = bytes_of(n, 5);
    sums *s = NULL;
    unsigned few;

    cr_assert_eq(sums_create(&s, 6, NULL), KVS_OK);
    few = sums_at_work(s);
    cr_assert_eq(few, 4);
    for (uint32_t i = 0; i < 200 && sums_at_work(s) < 6; i++) {
        sums_reach(s, sums_begin(s, p, n, &got[i]), n);
        (void)usleep(400);
    }
    cr_assert_eq(sums_at_work(s), 6);
    sums_finish(s);
    for (uint32_t i = 0; i < MANY && sums_at_work(s) > few; i++) {
        sums_reach(s, sums_begin(s, p, SUMS_PART, &got[0]), SUMS_PART);
        sums_finish(s);
    }
    cr_assert_eq(sums_at_work(s), few);
    for (int i = 0; i < MANY; i++) /* nobody is left sleeping who should be at work */
        sums_reach(s, sums_begin(s, p + i, SUMS_PART, &got[i]), SUMS_PART);
    sums_finish(s);
    for (int i = 0; i < MANY; i++)
        cr_assert_eq(got[i], sums_one(p + i, SUMS_PART));
    sums_destroy(s);
    free(p);
}

Test(sums, finish_does_not_wait_for_a_block_that_is_still_coming_in)
{
    uint64_t n = 2 * SUMS_PART, got[2] = {0, 0};
    uint8_t *p = bytes_of(n, 3);
    sums *s = NULL;
    uint32_t open;

    cr_assert_eq(sums_create(&s, 1, NULL), KVS_OK);
    open = sums_begin(s, p, n, &got[0]);
    sums_reach(s, open, SUMS_PART + 1);
    sums_reach(s, sums_begin(s, p, n, &got[1]), n);
    sums_finish(s);
    cr_assert_eq(got[0], 0);
    cr_assert_eq(got[1], expected(p, n));
    sums_reach(s, open, n);
    sums_finish(s);
    cr_assert_eq(got[0], got[1]);
    sums_destroy(s);
    free(p);
}
