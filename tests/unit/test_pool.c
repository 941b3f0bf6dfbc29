#include "daemon/pool.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/config.h"
#include "config/option.h"

static pool *make(uint64_t max, uint64_t extent, uint32_t max_slots)
{
    kvs_err err = {0};
    pool *p = NULL;
    uint64_t bytes;
    void *at;

    cr_assert_eq(
        pool_create(&p, &(pool_config){.max_bytes = max, .extent_bytes = extent, .max_slots = max_slots}, &err), KVS_OK,
        "%s", err.msg);
    while (pool_next_piece(p, &at, &bytes))
        pool_piece_usable(p);
    return p;
}

static uint32_t open_layout(pool *p, uint8_t name, uint64_t slot_bytes)
{
    uint8_t digest[32] = {name};
    kvs_err err = {0};
    uint32_t l = 0;

    cr_assert_eq(pool_layout_open(p, digest, slot_bytes, &l, &err), KVS_OK, "%s", err.msg);
    return l;
}

static void check(const pool *p)
{
    kvs_err err = {0};

    cr_assert_eq(pool_check(p, &err), KVS_OK, "%s", err.msg);
}

static void finish(pool *p)
{
    check(p);
    pool_destroy(p);
}

static kvs_status try_create(uint64_t max, uint64_t extent, char msg[KVS_ERR_MSG_BYTES])
{
    kvs_err err = {0};
    pool *p = NULL;
    kvs_status s = pool_create(&p, &(pool_config){.max_bytes = max, .extent_bytes = extent, .max_slots = 0}, &err);

    memcpy(msg, err.msg, KVS_ERR_MSG_BYTES);
    pool_destroy(p);
    return s;
}

Test(pool, refuses_a_size_that_holds_no_extent)
{
    char msg[KVS_ERR_MSG_BYTES];

    cr_assert_eq(try_create(0, 0, msg), KVS_E_LIMIT);
    cr_assert_eq(try_create(4095, 0, msg), KVS_E_LIMIT);
    cr_assert(strstr(msg, "4095") != NULL, "%s", msg);
    cr_assert_eq(try_create(8192, 12288, msg), KVS_E_LIMIT);
    cr_assert(strstr(msg, "8192") != NULL && strstr(msg, "12288") != NULL, "%s", msg);
    cr_assert_eq(try_create(UINT64_C(1) << 42, 0, msg), KVS_E_LIMIT);
    cr_assert_eq(try_create(UINT64_MAX, 0, msg), KVS_E_LIMIT);
    cr_assert_eq(try_create(UINT64_MAX, UINT64_MAX, msg), KVS_E_LIMIT);
}

Test(pool, takes_extents_that_cover_the_size)
{
    pool *p = make(UINT64_C(115) << 20, 0, 0);

    cr_assert_eq(pool_n_extents(p), 1, "no half of it is cut off");
    cr_assert_eq(pool_extent_bytes(p), UINT64_C(115) << 20);
    finish(p);
    p = make(UINT64_C(1) << 30, 0, 0);
    cr_assert_eq(pool_n_extents(p), 8);
    cr_assert_eq(pool_extent_bytes(p), UINT64_C(128) << 20);
    finish(p);
}

/* Case 143: a pool that holds no block. */
Test(pool, refuses_a_block_larger_than_the_pool_with_both_numbers)
{
    const uint64_t block = 294912;
    uint64_t sizes[] = {block - 4096, block, block + 4096};
    uint8_t digest[32] = {1};

    for (int i = 0; i < 3; i++) {
        pool *p = make(sizes[i], 0, 0);
        kvs_err err = {0};
        uint32_t l;
        pool_slot s;
        kvs_status st = pool_layout_open(p, digest, block, &l, &err);

        cr_assert_eq(st, i == 0 ? KVS_E_LIMIT : KVS_OK);
        if (i == 0) {
            cr_assert(strstr(err.msg, "294912") != NULL && strstr(err.msg, "290816") != NULL, "%s", err.msg);
        } else {
            cr_assert_eq(pool_take(p, l, &s), KVS_OK);
            memset(pool_address(p, s), 0xab, block);
            cr_assert_eq(pool_take(p, l, &s), KVS_E_NO_SPACE);
        }
        finish(p);
    }
}

Test(pool, refuses_odd_and_tiny_blocks_and_too_many_layouts)
{
    pool *p = make(1 << 20, 0, 0);
    uint8_t digest[32] = {0};
    kvs_err err = {0};
    uint32_t l;

    cr_assert_eq(pool_layout_open(p, digest, 1008, &l, NULL), KVS_E_LIMIT);
    cr_assert_eq(pool_layout_open(p, digest, 1032, &l, NULL), KVS_E_LIMIT);
    cr_assert_eq(pool_layout_open(p, digest, UINT64_MAX - 15, &l, &err), KVS_E_LIMIT);
    cr_assert_not_null(strstr(err.msg, "pool.extent_bytes"), "what to change: %s", err.msg);
    for (int i = 0; i < POOL_MAX_LAYOUTS; i++)
        cr_assert_eq(open_layout(p, (uint8_t)i, 1024), (uint32_t)i);
    cr_assert_eq(open_layout(p, 7, 1024), 7, "the same one again");
    cr_assert_eq(pool_layout_open(p, digest, 2048, &l, NULL), KVS_E_LIMIT);
    finish(p);
}

Test(pool, keeps_the_law_through_every_transition)
{
    pool *p = make(64 << 10, 16 << 10, 0);
    uint32_t l = open_layout(p, 1, 3072); /* 5 an extent, 1,024 bytes wasted */
    pool_slot s[4];
    pool_bytes b;

    for (int i = 0; i < 4; i++) {
        cr_assert_eq(pool_take(p, l, &s[i]), KVS_OK);
        check(p);
    }
    pool_commit(p, s[0], 1);
    pool_commit(p, s[1], 2);
    pool_drain(p, s[1]);
    pool_quarantine(p, s[2]);
    check(p);
    pool_get_bytes(p, &b);
    cr_assert_eq(b.arena, 64 << 10);
    cr_assert_eq(b.max, 64 << 10);
    cr_assert_eq(b.unassigned, 48 << 10);
    cr_assert_eq(b.waste, 1024);
    cr_assert_eq(b.ready, 3072);
    cr_assert_eq(b.draining, 3072);
    cr_assert_eq(b.quarantined, 3072);
    cr_assert_eq(b.writing, 3072);
    cr_assert_eq(b.free, 3072);
    for (int i = 0; i < 4; i++) {
        pool_release(p, s[i]);
        check(p);
    }
    finish(p);
}

Test(pool, gives_each_life_of_a_slot_a_clean_row_and_a_new_generation)
{
    pool *p = make(4096, 4096, 0);
    uint32_t l = open_layout(p, 1, 4096), gen;
    const pool_row *r;
    uint8_t key[32];
    pool_slot s;

    cr_assert_eq(pool_take(p, l, &s), KVS_OK);
    r = pool_row_of(p, s);
    cr_assert_eq(r->state, POOL_WRITING);
    gen = r->gen;
    memset(key, 0xff, sizeof key);
    pool_name(p, s, 9, key, 9);
    cr_assert(memcmp(r->key, key, 32) == 0 && r->ns == 9 && r->depth == 9 && r->gen == gen);
    pool_commit(p, s, 77);
    cr_assert_eq(r->checksum, 77);
    cr_assert_eq(r->state, POOL_READY);
    pool_release(p, s);
    cr_assert_eq(r->state, POOL_FREE);
    cr_assert_eq(pool_take(p, l, &s), KVS_OK);
    cr_assert_eq(r->gen, gen + 1);
    cr_assert_eq(r->ns | r->depth | r->checksum, 0);
    cr_assert_eq(r->parent, POOL_NONE);
    cr_assert_null(pool_row_of(p, POOL_NONE));
    finish(p);
}

/* However its slots became free: what is stored together after a reset lies side by side, and goes in one copy. */
Test(pool, gives_the_slots_of_an_empty_extent_in_order)
{
    enum { N = 16 };
    pool *p = make(N * 4096, N * 4096, 0);
    uint32_t l = open_layout(p, 1, 4096);
    pool_slot s[N];

    for (int life = 0; life < 3; life++) {
        for (uint32_t i = 0; i < N; i++) {
            cr_assert_eq(pool_take(p, l, &s[i]), KVS_OK);
            cr_assert_eq(s[i], i, "life %d", life);
        }
        for (uint32_t i = 0; i < N; i++)
            pool_release(p, s[life == 0 ? i : N - 1 - i]);
        check(p);
    }
    cr_assert_eq(pool_take(p, l, &s[0]), KVS_OK);
    cr_assert_eq(pool_take(p, l, &s[1]), KVS_OK);
    pool_release(p, s[0]);
    cr_assert_eq(pool_take(p, l, &s[0]), KVS_OK);
    cr_assert_eq(s[0], 0);
    pool_release(p, s[0]);
    pool_release(p, s[1]);
    finish(p);
}

Test(pool, never_gives_two_slots_the_same_bytes)
{
    pool *p = make(64 << 10, 16 << 10, 0);
    uint32_t a = open_layout(p, 1, 3072), b = open_layout(p, 2, 5008);
    pool_slot s[64];
    uint32_t n = 0;

    for (int i = 0; i < 64; i++) {
        if (pool_take(p, i & 1 ? a : b, &s[n]) != KVS_OK)
            continue;
        memset(pool_address(p, s[n]), (int)n, i & 1 ? 3072 : 5008);
        n++;
    }
    cr_assert_eq(n, 2 * 5 + 2 * 3);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = pool_layout_of(p, s[i]) == a ? 3072 : 5008;

        for (uint64_t k = 0; k < bytes; k++)
            cr_assert_eq(pool_address(p, s[i])[k], i);
    }
    finish(p);
}

/* The state before each piece is usable: nothing can be taken from it. */
Test(pool, grows_piece_by_piece_and_stops_at_a_failure)
{
    pool *p = NULL;
    pool_layout_info info;
    pool_slot s;
    uint64_t bytes;
    uint32_t l;
    void *at, *second;
    pool_bytes b;

    cr_assert_eq(
        pool_create(&p,
                    &(pool_config){.max_bytes = UINT64_C(3) << 30, .extent_bytes = UINT64_C(64) << 20, .max_slots = 0},
                    NULL),
        KVS_OK);
    l = open_layout(p, 1, 1 << 20);
    cr_assert_eq(pool_take(p, l, &s), KVS_E_NO_SPACE);
    cr_assert(pool_next_piece(p, &at, &bytes));
    cr_assert_eq(bytes, UINT64_C(256) << 20);
    pool_piece_usable(p);
    check(p);
    cr_assert(pool_next_piece(p, &second, &bytes));
    cr_assert_eq((uint8_t *)second - (uint8_t *)at, 256 << 20);
    cr_assert_eq(bytes, UINT64_C(1) << 30);
    for (int i = 0; i < 256; i++)
        cr_assert_eq(pool_take(p, l, &s), KVS_OK);
    cr_assert_eq(pool_take(p, l, &s), KVS_E_NO_SPACE);
    pool_piece_usable(p);
    cr_assert_eq(pool_take(p, l, &s), KVS_OK);
    pool_piece_failed(p);
    cr_assert_not(pool_next_piece(p, &at, &bytes));
    pool_get_bytes(p, &b);
    cr_assert_eq(b.arena, (UINT64_C(1) << 30) + (256 << 20));
    cr_assert_eq(b.max, b.arena);
    pool_layout_get(p, l, &info);
    cr_assert_eq(info.cap, 1280);
    finish(p);
}

static uint32_t take_all(pool *p, uint32_t l, pool_slot *s, uint32_t cap)
{
    uint32_t n = 0;

    while (n < cap && pool_take(p, l, &s[n]) == KVS_OK)
        n++;
    return n;
}

Test(pool, holds_exactly_max_slots_of_each_layout)
{
    pool_slot s[64];
    kvs_err err = {0};
    uint8_t digest[32] = {3};
    uint32_t l;
    pool_layout_info info;

    for (uint32_t cap = 1; cap <= 15; cap++) {
        pool *p = make(64 << 10, 16 << 10, cap); /* 4 extents */
        uint32_t a = open_layout(p, 1, 4096);

        cr_assert_eq(take_all(p, a, s, 64), cap);
        check(p);
        for (uint32_t i = 0; i < cap; i++)
            pool_release(p, s[i]);
        cr_assert_eq(take_all(p, a, s, 64), cap);
        pool_layout_get(p, a, &info);
        cr_assert_eq(info.cap, cap);
        finish(p);
    }
    pool *p = make(64 << 10, 16 << 10, 17);
    cr_assert_eq(pool_layout_open(p, digest, 4096, &l, &err), KVS_E_LIMIT);
    cr_assert(strstr(err.msg, "17") != NULL && strstr(err.msg, "16") != NULL, "%s", err.msg);
    finish(p);
}

Test(pool, rebinds_an_extent_only_when_its_last_slot_is_free)
{
    pool *p = make(16 << 10, 16 << 10, 0);
    uint32_t a = open_layout(p, 1, 4096), b = open_layout(p, 2, 8192), n;
    pool_slot s[8], first, other;
    bool closing;

    cr_assert_eq(take_all(p, a, s, 8), 4);
    pool_commit(p, s[3], 0);
    pool_release(p, s[0]);
    pool_extent_close(p, 0);
    check(p);
    cr_assert_eq(pool_take(p, a, &other), KVS_E_NO_SPACE, "closing extents give nothing");
    cr_assert_eq(pool_take(p, b, &other), KVS_E_NO_SPACE);
    pool_release(p, s[1]);
    pool_release(p, s[2]);
    cr_assert_eq(pool_extent_layout(p, 0, &first, &n, &closing), a);
    cr_assert(closing);
    pool_release(p, s[3]);
    check(p);
    cr_assert_eq(pool_extent_layout(p, 0, &first, &n, &closing), POOL_NONE);
    cr_assert_eq(take_all(p, b, s, 8), 2);
    finish(p);
}

Test(pool, seals_its_memory_against_shrinking)
{
    pool *p = make(1 << 20, 0, 0);
    int fds[] = {pool_arena_fd(p), pool_table_fd(p)};

    for (int i = 0; i < 2; i++) {
        cr_assert_eq(fcntl(fds[i], F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_SEAL), F_SEAL_SHRINK | F_SEAL_SEAL);
        cr_assert_eq(ftruncate(fds[i], 0), -1);
        cr_assert_eq(errno, EPERM);
        cr_assert(fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
    }
    finish(p);
}

/* A pool of 1 TiB may exist on any machine: only what is used costs memory. */
Test(pool, costs_memory_only_for_rows_that_were_taken)
{
    pool *p = make(UINT64_C(1) << 40, 0, 0);
    uint32_t l = open_layout(p, 1, 4497408);
    struct stat st;
    pool_slot s;

    for (int i = 0; i < 200; i++)
        cr_assert_eq(pool_take(p, l, &s), KVS_OK);
    check(p);
    cr_assert_eq(fstat(pool_table_fd(p), &st), 0);
    cr_assert_leq(st.st_blocks * 512, 64 << 10);
    cr_assert_eq(fstat(pool_arena_fd(p), &st), 0);
    cr_assert_eq(st.st_blocks, 0);
    cr_assert_leq(pool_metadata_bytes(p), 8 << 20);
    finish(p);
}

Test(pool, says_what_failed_when_it_cannot_be_made)
{
    struct rlimit none = {0, 0}, old;
    kvs_err err = {0};
    pool *p = NULL;

    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &old), 0);
    none.rlim_max = old.rlim_max;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
    cr_expect_eq(pool_create(&p, &(pool_config){.max_bytes = 1 << 20, .extent_bytes = 0, .max_slots = 0}, &err),
                 KVS_E_SYS);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &old), 0);
    cr_assert(strstr(err.msg, "memfd_create") != NULL, "%s", err.msg);
    cr_assert_null(p);
}

#ifndef __SANITIZE_ADDRESS__
Test(pool, survives_missing_address_space)
{
    struct rlimit old, tight;

    cr_assert_eq(getrlimit(RLIMIT_AS, &old), 0);
    /* From far too little to just too little: each of its mappings fails once. */
    for (uint64_t mib = 64; mib <= 1024 + 128; mib += 32) {
        kvs_err err = {0};
        pool *p = NULL;
        kvs_status s;

        tight = (struct rlimit){mib << 20, old.rlim_max};
        cr_assert_eq(setrlimit(RLIMIT_AS, &tight), 0);
        s = pool_create(&p, &(pool_config){.max_bytes = UINT64_C(1) << 30, .extent_bytes = 0, .max_slots = 0}, &err);
        cr_assert_eq(setrlimit(RLIMIT_AS, &old), 0);
        cr_assert(s == KVS_OK || s == KVS_E_NO_MEMORY, "%s", err.msg);
        if (mib <= 1024)
            cr_assert_eq(s, KVS_E_NO_MEMORY);
        pool_destroy(p);
    }
}
#endif

static uint64_t next_random(uint64_t *x)
{
    *x = *x * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return *x >> 33;
}

/* One random step; live[] are the taken slots. */
static void random_step(pool *p, const uint32_t *layouts, pool_slot *live, uint32_t *n, uint64_t *x)
{
    uint32_t k = *n > 0 ? (uint32_t)(next_random(x) % *n) : 0;
    const pool_row *r = *n > 0 ? pool_row_of(p, live[k]) : NULL;
    uint64_t what = next_random(x) % 16;

    if (what < 7 || r == NULL) {
        if (pool_take(p, layouts[next_random(x) % 3], &live[*n]) == KVS_OK)
            ++*n;
    } else if (what < 10 && r->state == POOL_WRITING) {
        pool_commit(p, live[k], *x);
    } else if (what == 10 && r->state == POOL_READY) {
        pool_drain(p, live[k]);
    } else if (what == 11 && r->state != POOL_QUARANTINED) {
        pool_quarantine(p, live[k]);
    } else if (what == 12) {
        pool_extent_close(p, pool_extent_of(p, live[k]));
    } else if (what > 12) {
        pool_release(p, live[k]);
        live[k] = live[--*n];
    }
}

Test(pool, keeps_its_books_through_random_transitions)
{
    static pool_slot live[4096];

    for (uint64_t seed = 1; seed <= 5; seed++) {
        pool *p = make(1 << 20, 64 << 10, seed == 5 ? 31 : 0);
        uint32_t layouts[] = {open_layout(p, 1, 1024), open_layout(p, 2, 3008), open_layout(p, 3, 20480)};
        uint32_t n = 0;
        uint64_t x = seed;
        pool_bytes b;

        for (int i = 0; i < 20000; i++) {
            random_step(p, layouts, live, &n, &x);
            if (i % 64 == 0)
                check(p);
        }
        while (n > 0)
            pool_release(p, live[--n]);
        for (uint32_t e = 0; e < pool_n_extents(p); e++)
            if (pool_extent_layout(p, e, NULL, NULL, NULL) != POOL_NONE)
                pool_extent_close(p, e);
        pool_get_bytes(p, &b);
        cr_assert_eq(b.unassigned, b.arena, "seed %lu: all of it comes back", (unsigned long)seed);
        finish(p);
    }
}

Test(pool, refuses_extents_so_small_that_their_list_alone_would_eat_the_memory)
{
    kvs_err err = {0};
    pool *p = NULL;

    cr_assert_eq(pool_create(&p, &(pool_config){.max_bytes = CONFIG_GIB(4095), .extent_bytes = 4096}, &err),
                 KVS_E_LIMIT);
    cr_assert_not_null(strstr(err.msg, "at most 1048576"), "%s", err.msg);
}

/* Address space only: no page of it is touched. */
Test(pool, holds_as_much_as_the_configuration_allows)
{
    static const uint64_t EXTENTS[] = {0, CONFIG_MIB(4), CONFIG_GIB(1)};
    kvs_err err = {0};

    for (size_t i = 0; i < sizeof EXTENTS / sizeof *EXTENTS; i++) {
        pool_config c = {.max_bytes = 0, .extent_bytes = EXTENTS[i]};
        pool_bytes b;
        pool *p;

        for (size_t k = 0; k < N_OPTIONS; k++)
            if (strcmp(OPTIONS[k].key, "pool.max_bytes") == 0)
                c.max_bytes = (uint64_t)OPTIONS[k].max;
        cr_assert_eq(pool_create(&p, &c, &err), KVS_OK, "%s", err.msg);
        pool_get_bytes(p, &b);
        cr_assert_gt(b.max, c.max_bytes - CONFIG_GIB(1));
        pool_destroy(p);
    }
}
