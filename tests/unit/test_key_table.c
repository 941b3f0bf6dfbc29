#include "daemon/key_table.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* A row's hash is a mix of its number; a few hashes are made equal on purpose. */
static uint32_t hash_of(uint32_t row)
{
    uint64_t x = (row + UINT64_C(1)) * UINT64_C(0x9e3779b97f4a7c15);

    return row % 97 == 0 ? 0xffffffff : (uint32_t)(x >> 32);
}

static bool is_row(const void *ud, uint32_t row)
{
    return *(const uint32_t *)ud == row;
}

static bool has(const key_table *t, uint32_t row)
{
    return key_table_find(t, hash_of(row), is_row, &row) == row;
}

Test(key_table, finds_every_key_while_it_grows)
{
    enum { N = 100000 };
    key_table t;
    bool moving = false;

    cr_assert_eq(key_table_init(&t), KVS_OK);
    for (uint32_t row = 0; row < N; row++) {
        cr_assert_eq(key_table_insert(&t, row % 97 == 0 ? row : hash_of(row), row), KVS_OK);
        moving |= t.old.e != NULL;
        cr_assert_eq(key_table_count(&t), row + 1);
        cr_assert(row < 3 || row % 97 < 3 || has(&t, row - 1));
        if (row % 9973 == 0)
            for (uint32_t r = 1; r <= row; r++)
                cr_assert(r % 97 == 0 || has(&t, r), "row %u of %u", r, row);
    }
    cr_assert(moving, "growing is spread over calls");
    cr_assert_leq(key_table_bytes(&t), N * 32);
    key_table_fini(&t);
}

static uint64_t n_resident(const key_table_part *p)
{
    uint64_t bytes = sizeof(key_entry) << p->bits, n = 0;
    unsigned char *pages = malloc(bytes / 4096);

    cr_assert_eq(mincore(p->e, bytes, pages), 0);
    for (uint64_t i = 0; i < bytes / 4096; i++)
        n += pages[i] & 1;
    free(pages);
    return n;
}

/* Else the first keys of a table of 32 MiB cost a STORE of 26,000 of them 80 to 200 ms. */
Test(key_table, has_the_pages_of_a_larger_one_before_it_needs_them)
{
    enum { CAP = 1 << 20, N = CAP / 4 * 3 };
    key_table t;
    uint64_t before = 0, added = 0, now;

    cr_assert_eq(key_table_init(&t), KVS_OK);
    for (uint32_t row = 0; row < N; row++) {
        cr_assert_eq(key_table_insert(&t, hash_of(row), row), KVS_OK);
        if (row % 1024 != 0 || t.next.e == NULL)
            continue;
        now = n_resident(&t.next);
        added = now > before && now - before > added ? now - before : added;
        before = now;
    }
    cr_assert_eq(t.now.bits, 20);
    cr_assert_eq(n_resident(&t.next), (UINT64_C(16) << 20) / 4096);
    cr_assert_leq(added, 64, "a few at a time");
    cr_assert_eq(key_table_insert(&t, hash_of(N), N), KVS_OK);
    cr_assert_eq(t.now.bits, 21);
    cr_assert_null(t.next.e);
    for (uint32_t row = 0; row <= N; row++)
        cr_assert(has(&t, row));
    key_table_fini(&t);
}

Test(key_table, gives_a_larger_one_back_that_is_not_needed_after_all)
{
    enum { CAP = 1 << 16, N = CAP / 4 * 3 };
    key_table t;

    cr_assert_eq(key_table_init(&t), KVS_OK);
    for (uint32_t row = 0; row < N; row++)
        cr_assert_eq(key_table_insert(&t, hash_of(row), row), KVS_OK);
    cr_assert_not_null(t.next.e);
    cr_assert_gt(key_table_bytes(&t), sizeof(key_entry) << 16);
    for (uint32_t row = N; row-- > N / 2;)
        key_table_remove(&t, hash_of(row), row);
    cr_assert_null(t.next.e);
    cr_assert_eq(key_table_bytes(&t), sizeof(key_entry) << 16);
    for (uint32_t row = 0; row < N / 2; row++)
        cr_assert(has(&t, row));
    key_table_fini(&t);
}

Test(key_table, keeps_equal_hashes_apart_at_the_end_of_the_table)
{
    key_table t;

    cr_assert_eq(key_table_init(&t), KVS_OK);
    for (uint32_t row = 0; row < 30 * 97; row += 97)
        cr_assert_eq(key_table_insert(&t, hash_of(row), row), KVS_OK);
    for (uint32_t row = 0; row < 30 * 97; row += 97) {
        cr_assert(has(&t, row));
        if (row % 2 == 0)
            key_table_remove(&t, hash_of(row), row);
    }
    for (uint32_t row = 0; row < 30 * 97; row += 97)
        cr_assert_eq(has(&t, row), row % 2 != 0);
    key_table_fini(&t);
}

static uint64_t next_random(uint64_t *x)
{
    *x = *x * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return *x >> 33;
}

Test(key_table, agrees_with_a_plain_set_through_random_changes)
{
    enum { ROWS = 40000 };
    static uint8_t in[ROWS];

    for (uint64_t seed = 1; seed <= 3; seed++) {
        key_table t;
        uint64_t x = seed, n = 0;

        memset(in, 0, sizeof in);
        cr_assert_eq(key_table_init(&t), KVS_OK);
        for (uint32_t i = 0; i < 300000; i++) {
            /* The set waxes and wanes, so that the table grows and shrinks. */
            uint32_t row = (uint32_t)(next_random(&x) % (i / 50000 % 2 == 0 ? ROWS : 3000));
            bool add = next_random(&x) % 8 < (i / 50000 % 2 == 0 ? 7u : 1u);

            if (i % 50000 == 49999 && i / 50000 % 2 == 0)
                for (uint32_t r = 2000; r < ROWS; r++)
                    if (in[r]) {
                        key_table_remove(&t, hash_of(r) | 1, r);
                        in[r] = 0;
                        n--;
                    }
            if (in[row] != add) {
                if (add)
                    cr_assert_eq(key_table_insert(&t, hash_of(row) | 1, row), KVS_OK);
                else
                    key_table_remove(&t, hash_of(row) | 1, row);
                in[row] = add;
                n += add ? 1 : UINT64_MAX;
            }
            if (i % 7 == 0)
                cr_assert_eq(key_table_find(&t, hash_of(row) | 1, is_row, &row) == row, in[row]);
            if (i % 1000 == 0)
                (void)key_table_step(&t, 64);
            cr_assert_eq(key_table_count(&t), n);
        }
        for (uint32_t r = 0; r < ROWS; r++)
            cr_assert_eq(key_table_find(&t, hash_of(r) | 1, is_row, &r) == r, in[r], "seed %lu row %u",
                         (unsigned long)seed, r);
        key_table_fini(&t);
    }
}

Test(key_table, gives_memory_back_when_most_keys_are_gone)
{
    enum { N = 50000 };
    key_table t;
    uint64_t full;

    cr_assert_eq(key_table_init(&t), KVS_OK);
    for (uint32_t row = 0; row < N; row++)
        cr_assert_eq(key_table_insert(&t, row * 2654435761u, row), KVS_OK);
    full = key_table_bytes(&t);
    for (uint32_t row = 0; row < N; row++)
        key_table_remove(&t, row * 2654435761u, row);
    while (key_table_step(&t, 4096))
        ;
    cr_assert_lt(key_table_bytes(&t), full / 16);
    key_table_fini(&t);
}
