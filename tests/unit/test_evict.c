#include "daemon/evict.h"

#include <criterion/criterion.h>
#include <stdint.h>

enum { ROWS = 4096 };

static evict *make(void)
{
    evict *e = NULL;

    cr_assert_eq(evict_lru.create(&e, ROWS, 4), KVS_OK);
    return e;
}

/* Cold end first. */
static void expect_order(const evict *e, uint32_t layout, const pool_slot *want, uint32_t n)
{
    pool_slot s = POOL_NONE;
    uint64_t stamp;

    for (uint32_t i = 0; i < n; i++) {
        s = evict_lru.victim(e, layout, s, &stamp);
        cr_assert_eq(s, want[i], "place %u: slot %u, not %u", i, s, want[i]);
    }
    cr_assert_eq(evict_lru.victim(e, layout, s, &stamp), POOL_NONE);
}

Test(evict, offers_nothing_when_nothing_is_there)
{
    evict *e = make();

    expect_order(e, 0, NULL, 0);
    evict_lru.destroy(e);
    evict_lru.destroy(NULL);
}

Test(evict, offers_the_longest_unused_first)
{
    evict *e = make();

    for (uint32_t s = 0; s < 4; s++)
        evict_lru.insert(e, 0, s, s + 1);
    expect_order(e, 0, (pool_slot[]){0, 1, 2, 3}, 4);
    evict_lru.touch(e, 0, 0, 5);
    evict_lru.touch(e, 0, 2, 6);
    evict_lru.touch(e, 0, 2, 7);
    expect_order(e, 0, (pool_slot[]){1, 3, 0, 2}, 4);
    evict_lru.remove(e, 0, 1);
    evict_lru.remove(e, 0, 2);
    evict_lru.remove(e, 0, 0);
    expect_order(e, 0, (pool_slot[]){3}, 1);
    evict_lru.remove(e, 0, 3);
    expect_order(e, 0, NULL, 0);
    evict_lru.destroy(e);
}

Test(evict, keeps_layouts_apart)
{
    evict *e = make();
    uint64_t stamp = 0;

    evict_lru.insert(e, 0, 10, 1);
    evict_lru.insert(e, 3, 11, 2);
    evict_lru.insert(e, 0, 12, 3);
    expect_order(e, 0, (pool_slot[]){10, 12}, 2);
    expect_order(e, 3, (pool_slot[]){11}, 1);
    cr_assert_eq(evict_lru.victim(e, 3, POOL_NONE, &stamp), 11);
    cr_assert_eq(stamp, 2);
    evict_lru.destroy(e);
}

/* What was taken out while it was held comes back to where its last use puts it, not as the newest. */
Test(evict, puts_a_returning_block_where_its_stamp_belongs)
{
    evict *e = make();

    for (uint32_t s = 0; s < 6; s++)
        evict_lru.insert(e, 0, s, 10 * (s + 1));
    evict_lru.remove(e, 0, 0);
    evict_lru.remove(e, 0, 1);
    evict_lru.remove(e, 0, 3);
    evict_lru.insert(e, 0, 1, 20);
    evict_lru.insert(e, 0, 0, 10);
    evict_lru.insert(e, 0, 3, 40);
    expect_order(e, 0, (pool_slot[]){0, 1, 2, 3, 4, 5}, 6);
    evict_lru.destroy(e);
}

static uint64_t next_random(uint64_t *x)
{
    *x = *x * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return *x >> 33;
}

/* Coldest slot of the layout by a plain search, or POOL_NONE. */
static pool_slot coldest(const uint64_t *stamp_of, const uint8_t *layout_of, uint32_t layout)
{
    pool_slot best = POOL_NONE;

    for (uint32_t s = 0; s < ROWS; s++)
        if (stamp_of[s] != 0 && layout_of[s] == layout && (best == POOL_NONE || stamp_of[s] < stamp_of[best]))
            best = s;
    return best;
}

Test(evict, agrees_with_a_plain_search_through_random_use)
{
    static uint64_t stamp_of[ROWS];
    static uint8_t layout_of[ROWS];

    for (uint64_t seed = 1; seed <= 3; seed++) {
        evict *e = make();
        uint64_t x = seed, got;

        for (uint64_t now = 1; now < 10000; now++) {
            pool_slot s = (pool_slot)(next_random(&x) % 512);

            if (stamp_of[s] == 0) {
                layout_of[s] = (uint8_t)(next_random(&x) % 4);
                evict_lru.insert(e, layout_of[s], s, stamp_of[s] = now);
            } else if (next_random(&x) % 3 == 0) {
                evict_lru.remove(e, layout_of[s], s);
                stamp_of[s] = 0;
            } else {
                evict_lru.touch(e, layout_of[s], s, stamp_of[s] = now);
            }
            if (now % 16 == 0)
                cr_assert_eq(evict_lru.victim(e, now / 16 % 4, POOL_NONE, &got),
                             coldest(stamp_of, layout_of, now / 16 % 4), "seed %lu step %lu", (unsigned long)seed,
                             (unsigned long)now);
        }
        for (uint32_t s = 0; s < ROWS; s++)
            stamp_of[s] = 0;
        evict_lru.destroy(e);
    }
}

Test(evict, costs_memory_only_for_slots_that_were_used)
{
    evict *e = NULL;

    cr_assert_eq(evict_lru.create(&e, POOL_NONE - 1, POOL_MAX_LAYOUTS), KVS_OK);
    evict_lru.insert(e, 0, POOL_NONE - 2, 1);
    cr_assert_leq(evict_lru.bytes(e), (4 << 10) + POOL_MAX_LAYOUTS * 16 + (UINT64_C(1) << 36) / 4096 / 8 + 256);
    evict_lru.destroy(e);
}
