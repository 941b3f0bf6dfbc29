/* What of an earlier life is taken over, what is not, and what is said about it. */
#include "daemon/persist.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/dir_fixture.h"

enum { EXTENT = 16 << 10, PER_EXTENT = EXTENT / FIXTURE_SLOT_BYTES, EXTENTS = 4 };

static fixture f;
static persist memory;

static pool_config config_of(uint32_t extents)
{
    return (pool_config){.max_bytes = (uint64_t)extents * EXTENT, .extent_bytes = EXTENT, .memory = &memory};
}

/* A first life with blocks 1 .. n of one chain. */
static void live(uint32_t n)
{
    pool_config c = config_of(EXTENTS);

    cr_assert_eq(persist_open(&memory, "", -1, -1, NULL), KVS_OK);
    fixture_init_with(&f, &c);
    cr_assert_eq(fixture_store(&f, f.ns, 1, n, 0, 0), n);
}

static void again_with(const pool_config *c)
{
    directory_destroy(f.dir);
    pool_destroy(f.pool);
    memory.survived = true;
    fixture_init_with(&f, c);
}

static void again(void)
{
    pool_config c = config_of(EXTENTS);

    again_with(&c);
}

static void end(void)
{
    fixture_fini(&f);
    persist_close(&memory);
}

static const pool_adoption *adoption(void)
{
    return pool_adopted(f.pool);
}

static pool_row *row_of(uint64_t id)
{
    pool_slot s;

    cr_assert_eq(fixture_hold(&f, f.ns, id, &s), KVS_OK);
    directory_unhold(f.dir, s);
    return (pool_row *)(uintptr_t)pool_row_of(f.pool, s); /* as a wild pointer would */
}

static uint64_t table_kib(void)
{
    struct stat st;

    cr_assert_eq(fstat(memory.table_fd, &st), 0);
    return (uint64_t)st.st_blocks / 2;
}

Test(adopt, brings_back_blocks_unverified_until_a_load_has_seen_their_checksum)
{
    pool_slot s;

    live(5);
    again();
    cr_assert(adoption()->adopted && adoption()->ready == 5 && adoption()->boots == 2);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 6), 5);
    cr_assert_eq(fixture_stats(&f).adopted, 5);
    cr_assert_eq(fixture_stats(&f).unverified, 5);
    cr_assert_eq(fixture_hold(&f, f.ns, 2, &s), KVS_OK);
    cr_assert(directory_is_unverified(f.dir, s));
    directory_verified(f.dir, s);
    directory_verified(f.dir, s);
    cr_assert_not(directory_is_unverified(f.dir, s));
    directory_unhold(f.dir, s);
    fixture_check(&f);
    cr_assert_eq(fixture_stats(&f).unverified, 4);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(1, 1)), KVS_OK);
    cr_assert_eq(fixture_stats(&f).unverified, 3, "one that goes is not counted any more");
    again();
    cr_assert_eq(fixture_stats(&f).unverified, 4, "a new life trusts nobody");
    end();
}

Test(adopt, evicts_the_deepest_block_first)
{
    pool_config c = config_of(1);

    cr_assert_eq(persist_open(&memory, "", -1, -1, NULL), KVS_OK);
    fixture_init_with(&f, &c);
    cr_assert_eq(fixture_store(&f, f.ns, 1, PER_EXTENT, 0, 0), PER_EXTENT);
    again_with(&c);
    cr_assert_eq(fixture_store(&f, f.ns, 100, 2, 0, 0), 2);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, PER_EXTENT), PER_EXTENT - 2, "the head of the chain is still there");
    end();
}

Test(adopt, frees_what_was_being_written_or_drained)
{
    pool_slot s;

    live(3);
    cr_assert_eq(fixture_hold(&f, f.ns, 3, &s), KVS_OK);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(3, 1)), KVS_OK); /* drains */
    fixture_admit(&f, f.ns, 50, 2, 0, 0);
    again();
    cr_assert_eq(adoption()->freed, 3);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 2);
    cr_assert_not(fixture_has(&f, f.ns, 50));
    cr_assert_eq(fixture_store(&f, f.ns, 60, 3, 0, 0), 3);
    end();
}

Test(adopt, leaves_out_rows_that_are_torn_or_have_no_checksum)
{
    kvs_status st;
    pool_slot s;

    live(6);
    row_of(2)->key[7] ^= 1;
    row_of(3)->depth++;
    row_of(4)->checksum ^= 1;
    row_of(5)->parent = 12345678; /* a hint: it may be anything */
    directory_admit(f.dir, f.ns, 0, fixture_keys(0, 1), fixture_keys(70, 1), 1, &st, &s);
    cr_assert_eq(directory_commit(f.dir, s, 0), KVS_OK); /* pool.checksum = false */
    again();
    cr_assert_eq(adoption()->torn, 3);
    cr_assert_eq(adoption()->no_sum, 1);
    cr_assert_eq(fixture_stats(&f).refused, 4);
    cr_assert_eq(fixture_stats(&f).adopted, 3);
    cr_assert(fixture_has(&f, f.ns, 1) && fixture_has(&f, f.ns, 5) && fixture_has(&f, f.ns, 6));
    cr_assert_eq(fixture_store(&f, f.ns, 2, 3, 1, 1), 3);
    end();
}

Test(adopt, keeps_namespaces_and_layouts_apart_and_gives_empty_ones_numbers_to_others)
{
    uint32_t a, b, c;

    live(2);
    a = fixture_open(&f, 2, "model", 2);
    b = fixture_open(&f, 1, "empty", 2);
    c = fixture_open(&f, 1, "wide", 4);
    cr_assert_eq(fixture_store(&f, a, 1, 1, 0, 0), 1);
    cr_assert_eq(fixture_store(&f, c, 1, 2, 0, 0), 2);
    again();
    cr_assert_eq(f.ns, 0);
    cr_assert_null(directory_namespace(f.dir, b));
    cr_assert_eq(fixture_open(&f, 2, "model", 2), a);
    cr_assert_eq(fixture_open(&f, 1, "wide", 4), c);
    cr_assert_eq(fixture_open(&f, 1, "new", 2), b);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 2);
    cr_assert_eq(fixture_lookup(&f, a, 1, 3), 1);
    cr_assert_eq(fixture_lookup(&f, b, 1, 3), 0);
    cr_assert_eq(fixture_lookup(&f, c, 1, 3), 2);
    end();
}

Test(adopt, charges_each_tenant_for_what_came_back)
{
    directory_tenant one, two;

    live(2);
    cr_assert_eq(fixture_store(&f, fixture_open(&f, 2, "model", 2), 10, 3, 0, 0), 3);
    again();
    directory_get_tenant(f.dir, 1, &one);
    directory_get_tenant(f.dir, 2, &two);
    cr_assert_eq(one.used_bytes, 2 * FIXTURE_SLOT_BYTES);
    cr_assert_eq(two.used_bytes, 3 * FIXTURE_SLOT_BYTES);
    cr_assert_eq(two.n_namespaces, 1);
    directory_limit_tenant(f.dir, 2, 2 * FIXTURE_SLOT_BYTES, 0);
    while (directory_step(f.dir))
        ;
    directory_get_tenant(f.dir, 2, &two);
    cr_assert_eq(two.used_bytes, 2 * FIXTURE_SLOT_BYTES, "a quota that was lowered meanwhile holds");
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 2), 2);
    end();
}

static bool only_tenant_1(void *ud, const char *name, uint32_t *ret)
{
    (void)ud;
    *ret = 1;
    return strcmp(name, "1") == 0;
}

Test(adopt, releases_the_blocks_of_a_tenant_that_is_no_more)
{
    pool_config c = config_of(EXTENTS);
    directory_config dc = {.evict = &evict_lru, .n_tenants = 4, .tenant_find = only_tenant_1};
    pool_bytes b;

    live(2);
    cr_assert_eq(fixture_store(&f, fixture_open(&f, 2, "model", 2), 10, 3, 0, 0), 3);
    directory_destroy(f.dir);
    pool_destroy(f.pool);
    memory.survived = true;
    cr_assert_eq(pool_create(&f.pool, &c, NULL), KVS_OK);
    cr_assert_eq(pool_adopted(f.pool)->ready, 5);
    dc.pool = f.pool;
    cr_assert_eq(directory_create(&f.dir, &dc, NULL), KVS_OK);
    cr_assert_eq(fixture_stats(&f).adopted, 2);
    cr_assert_eq(fixture_stats(&f).refused, 3);
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.ready, 2 * FIXTURE_SLOT_BYTES);
    end();
}

/* Symptom: a crash before all of them were gone brought them back, to whoever had the tenant's name then. */
Test(adopt, brings_back_no_block_of_a_tenant_that_had_left)
{
    uint32_t ns;

    live(2);
    ns = fixture_open(&f, 2, "model", 2);
    cr_assert_eq(fixture_store(&f, ns, 10, 3, 0, 0), 3);
    cr_assert_eq(directory_leave(f.dir, 2), 0);
    fixture_check(&f);
    ns = fixture_open(&f, 2, "model", 2);
    cr_assert_not(fixture_has(&f, ns, 10));
    cr_assert_eq(fixture_store(&f, ns, 20, 2, 0, 0), 2);
    again();
    cr_assert_eq(fixture_stats(&f).refused, 3);
    ns = fixture_open(&f, 2, "model", 2);
    cr_assert_not(fixture_has(&f, ns, 10));
    cr_assert_eq(fixture_lookup(&f, ns, 20, 2), 2);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 2), 2);
    end();
}

/* Blocks are found before their memory is usable; nothing is taken from there, and none of them is evicted in vain. */
Test(adopt, serves_blocks_before_their_piece_is_usable_and_takes_no_slot_there)
{
    pool_config c = config_of(EXTENTS);
    directory_config dc = {.evict = &evict_lru, .n_tenants = 4};
    pool_bytes b;
    uint64_t bytes;
    void *at;

    live(3);
    directory_destroy(f.dir);
    pool_destroy(f.pool);
    memory.survived = true;
    cr_assert_eq(pool_create(&f.pool, &c, NULL), KVS_OK);
    dc.pool = f.pool;
    cr_assert_eq(directory_create(&f.dir, &dc, NULL), KVS_OK);
    f.ns = fixture_open(&f, 1, "model", 2);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 3);
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.arena, EXTENT);
    fixture_check(&f);
    cr_assert_eq(fixture_store(&f, f.ns, 20, 1, 0, 0), 0);
    cr_assert_eq(f.status[0], KVS_E_NO_SPACE);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 3), 3);
    cr_assert(pool_next_piece(f.pool, &at, &bytes));
    pool_piece_usable(f.pool);
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.arena, bytes);
    fixture_check(&f);
    cr_assert_eq(fixture_store(&f, f.ns, 20, PER_EXTENT * EXTENTS - 3, 0, 0), PER_EXTENT * EXTENTS - 3);
    end();
}

Test(adopt, gives_back_an_extent_that_is_emptied_before_its_piece_is_usable)
{
    pool_config c = config_of(EXTENTS);
    directory_config dc = {.evict = &evict_lru, .n_tenants = 4};
    directory_reset_result r;
    pool_bytes b;
    uint64_t bytes;
    void *at;

    live(3);
    directory_destroy(f.dir);
    pool_destroy(f.pool);
    memory.survived = true;
    cr_assert_eq(pool_create(&f.pool, &c, NULL), KVS_OK);
    dc.pool = f.pool;
    cr_assert_eq(directory_create(&f.dir, &dc, NULL), KVS_OK);
    f.ns = fixture_open(&f, 1, "model", 2);
    fixture_reset(f.dir, 1, f.ns, true, &r);
    pool_extent_close(f.pool, 0);
    fixture_check(&f);
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.arena, 0);
    while (pool_next_piece(f.pool, &at, &bytes))
        pool_piece_usable(f.pool);
    pool_get_bytes(f.pool, &b);
    cr_assert_eq(b.unassigned, EXTENT * EXTENTS);
    end();
}

Test(adopt, keeps_blocks_when_the_pool_grows)
{
    pool_config c = config_of(EXTENTS * 3);
    struct stat st;

    live(5);
    again_with(&c);
    cr_assert(adoption()->adopted, "%s", adoption()->why);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 5), 5);
    cr_assert_eq(fixture_store(&f, f.ns, 20, PER_EXTENT * EXTENTS * 3 - 5, 0, 0), PER_EXTENT * EXTENTS * 3 - 5);
    cr_assert_eq(fstat(memory.arena_fd, &st), 0);
    cr_assert_geq(st.st_size, EXTENT * EXTENTS * 3);
    c.extent_bytes = 0; /* its size is the one that the blocks are in */
    again_with(&c);
    cr_assert_eq(pool_extent_bytes(f.pool), EXTENT);
    cr_assert_eq(fixture_stats(&f).adopted, PER_EXTENT * EXTENTS * 3);
    end();
}

static void expect_cold(const char *why)
{
    cr_assert_not(adoption()->adopted);
    cr_assert(strstr(adoption()->why, why) != NULL, "\"%s\" is not in \"%s\"", why, adoption()->why);
    cr_assert_eq(fixture_stats(&f).n_ready, 0);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 2, 0, 0), 2);
    fixture_check(&f);
}

Test(adopt, keeps_what_lies_within_a_smaller_pool_and_gives_the_rest_back)
{
    enum { KEPT = PER_EXTENT * (EXTENTS - 2) };
    pool_config c = config_of(EXTENTS - 2);
    struct stat st;

    live(PER_EXTENT * EXTENTS);
    for (uint32_t i = 0; i < EXTENTS * EXTENT; i += 4096)
        cr_assert_eq(pwrite(memory.arena_fd, "x", 1, i), 1);
    again_with(&c);
    cr_assert(adoption()->adopted, "%s", adoption()->why);
    cr_assert_eq(fixture_stats(&f).n_ready, KEPT);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, PER_EXTENT * EXTENTS), KEPT);
    cr_assert_eq(fstat(memory.arena_fd, &st), 0);
    cr_assert_leq((uint64_t)st.st_blocks * 512, (EXTENTS - 2) * EXTENT);
    fixture_check(&f);
    again_with(&c);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, KEPT), KEPT);
    c = config_of(EXTENTS);
    again_with(&c);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, KEPT), KEPT, "and in one that is larger again");
    cr_assert_eq(fixture_stats(&f).n_ready, KEPT, "what was given up does not come back");
    end();
}

Test(adopt, uses_the_slots_that_a_smaller_pool_gave_up_when_it_has_grown_again)
{
    enum { KEPT = PER_EXTENT * (EXTENTS - 2), GIVEN_UP = PER_EXTENT * 2 };
    pool_config c = config_of(EXTENTS - 2);

    live(PER_EXTENT * EXTENTS);
    c.reserve_bytes = EXTENT * EXTENTS;
    again_with(&c);
    cr_assert_eq(fixture_stats(&f).n_ready, KEPT);
    cr_assert_eq(pool_resize(f.pool, EXTENT * EXTENTS, NULL), KVS_OK); /* by a reload */
    for (void *at; pool_next_piece(f.pool, &at, &(uint64_t){0});)
        pool_piece_usable(f.pool);
    cr_assert_eq(fixture_store(&f, f.ns, 100, GIVEN_UP, 0, 0), GIVEN_UP);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, KEPT), KEPT);
    again_with(&c);
    c = config_of(EXTENTS); /* by a restart */
    again_with(&c);
    cr_assert_eq(fixture_store(&f, f.ns, 200, GIVEN_UP, 0, 0), GIVEN_UP);
    end();
}

Test(adopt, finds_no_parent_in_what_a_smaller_pool_gave_up)
{
    enum { HEAD = 500, CHILD };
    pool_config c = config_of(EXTENTS - 2);
    const uint8_t *first;

    live(PER_EXTENT * (EXTENTS - 2));
    cr_assert_eq(fixture_store(&f, f.ns, HEAD, 1, 0, 0), 1); /* beyond what the next life has */
    first = fixture_keys(1, 1);
    cr_assert_eq(directory_drop(f.dir, f.ns, first), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, CHILD, 1, 1, HEAD), 1);
    again_with(&c);
    cr_assert_not(fixture_has(&f, f.ns, HEAD));
    cr_assert(fixture_has(&f, f.ns, CHILD));
    fixture_admit(&f, f.ns, CHILD, 1, 1, 0); /* renews the chain above, as far as the rows know it */
    cr_assert_eq(f.status[0], KVS_E_EXISTS);
    end();
}

/* As an earlier version of the daemon left it: the extent is nobody's, and its rows say that they hold blocks. */
Test(adopt, frees_the_rows_of_an_extent_that_is_nobodys)
{
    const uint64_t row = sizeof(pool_row), second = EXTENT / POOL_SLOT_MIN_BYTES;
    pool_row r;

    live(PER_EXTENT);
    cr_assert_eq(pread(memory.table_fd, &r, row, (off_t)table_rows_offset()), row);
    cr_assert_eq(r.state, POOL_READY);
    for (uint64_t i = second; i < second + PER_EXTENT; i++)
        cr_assert_eq(pwrite(memory.table_fd, &r, row, (off_t)(table_rows_offset() + i * row)), row);
    again();
    cr_assert_eq(fixture_stats(&f).n_ready, PER_EXTENT);
    cr_assert_eq(fixture_store(&f, f.ns, 100, PER_EXTENT, 0, 0), PER_EXTENT);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, PER_EXTENT), PER_EXTENT);
    end();
}

Test(adopt, keeps_the_size_of_extents_in_a_smaller_pool_that_asks_for_none)
{
    pool_config c = config_of(EXTENTS);

    c.reserve_bytes = 4 * c.max_bytes; /* as the daemon does where nothing is configured */
    cr_assert_eq(persist_open(&memory, "", -1, -1, NULL), KVS_OK);
    fixture_init_with(&f, &c);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 2, 0, 0), 2);
    c = (pool_config){.max_bytes = EXTENT * 3, .reserve_bytes = EXTENT * 12, .memory = &memory};
    again_with(&c);
    cr_assert(adoption()->adopted, "%s", adoption()->why);
    cr_assert_eq(pool_extent_bytes(f.pool), EXTENT);
    cr_assert_eq(fixture_lookup(&f, f.ns, 1, 2), 2);
    end();
}

Test(adopt, starts_cold_with_other_extents_or_another_cap)
{
    pool_config c = config_of(EXTENTS);

    live(2);
    c.extent_bytes = EXTENT / 2;
    again_with(&c);
    expect_cold("extent bytes: found 16384, wanted 8192");
    c.max_slots = 9;
    again_with(&c);
    expect_cold("max_slots: found 0, wanted 9");
    end();
}

/* The bytes of both heads at `at` become those. */
static void spoil_heads(uint32_t at, const void *bytes, size_t n)
{
    for (int i = 0; i < 2; i++)
        cr_assert_eq(pwrite(memory.table_fd, bytes, n, (off_t)(at + (uint32_t)i * 64)), (ssize_t)n);
}

Test(adopt, refuses_a_table_of_another_version_and_says_both)
{
    const uint32_t version = 7;

    live(2);
    again(); /* so that both heads are written */
    spoil_heads(8, &version, sizeof version);
    again();
    expect_cold("version: found 7, wanted 2");
    cr_assert_leq(table_kib(), 128, "the old table was given back");
    end();
}

Test(adopt, refuses_what_is_no_table)
{
    live(2);
    again();
    spoil_heads(0, "nonsense", 8);
    again();
    expect_cold("magic: found 0x65736e65736e6f6e");
    again();
    spoil_heads(32, "x", 1);
    again();
    expect_cold("checksum of the head");
    end();
}

Test(adopt, refuses_a_table_whose_bindings_do_not_verify)
{
    uint64_t v;

    live(2);
    cr_assert_eq(pread(memory.table_fd, &v, sizeof v, 64 << 10), (ssize_t)sizeof v);
    v ^= 1 << 20;
    cr_assert_eq(pwrite(memory.table_fd, &v, sizeof v, 64 << 10), (ssize_t)sizeof v);
    again();
    expect_cold("checksum of the binding of extent");
    cr_assert_eq(pwrite(memory.table_fd, "x", 1, 4096 + 4096 * 8), 1); /* the layout's digest */
    again();
    expect_cold("layout of extent");
    end();
}

Test(adopt, leaves_out_a_namespace_whose_text_does_not_verify)
{
    uint32_t a;

    live(2);
    a = fixture_open(&f, 2, "model", 2);
    cr_assert_eq(fixture_store(&f, a, 1, 3, 0, 0), 3);
    cr_assert_eq(pwrite(memory.table_fd, "x", 1, (64 << 10) + (8 << 20) + 60), 1); /* in the first text */
    again();
    cr_assert_eq(fixture_stats(&f).adopted, 3);
    cr_assert_eq(fixture_stats(&f).refused, 2);
    cr_assert_eq(fixture_lookup(&f, fixture_open(&f, 2, "model", 2), 1, 3), 3);
    end();
}

/* Of the longest descriptions there may be, as many as the table takes; the number of the last one. */
static uint32_t open_long_ones(uint32_t life, uint32_t *ret_n)
{
    static kvs_plane planes[KVS_MAX_PLANES];
    static uint8_t canon[65536];
    uint32_t ns = 0, n = 0;
    kvs_err err = {0};

    for (kvs_status s = KVS_OK; s == KVS_OK; n += s == KVS_OK) {
        kvs_namespace desc;
        size_t len = 0;
        char model[32];

        (void)snprintf(model, sizeof model, "life %u model %u", life, n);
        cr_assert_eq(kvs_namespace_mla(model, "w", KVS_FORMAT_mla_bf16, KVS_MAX_PLANES, 1, planes, &desc, NULL),
                     KVS_OK);
        cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, NULL), KVS_OK);
        s = directory_open(f.dir, 1, canon, len, &ns, &err);
    }
    cr_assert_eq(err.status, KVS_E_LIMIT, "%s", err.msg);
    *ret_n = n;
    return ns;
}

/* Of each life the last one lives on, so that what is in use lies behind all that is not. */
Test(adopt, has_room_again_for_the_descriptions_of_those_that_are_no_more)
{
    enum { LIVES = 7 };
    pool_config c = {.max_bytes = 4 << 20, .extent_bytes = 2 << 20, .memory = &memory};
    uint32_t n = 0, first = 0, last = 0;

    cr_assert_eq(persist_open(&memory, "", -1, -1, NULL), KVS_OK);
    fixture_init_with(&f, &c);
    for (uint32_t life = 1; life <= LIVES; life++) {
        uint32_t before = last;

        last = open_long_ones(life, &n);
        first = life == 1 ? n : first;
        cr_assert_geq(n, first - 2, "life %u: %u, at first %u", life, n, first);
        cr_assert_eq(fixture_store(&f, last, life, 1, 0, 0), 1);
        if (life > 1)
            cr_assert_eq(directory_drop(f.dir, before, fixture_keys(life - 1, 1)), KVS_OK);
        again_with(&c);
        cr_assert_eq(fixture_lookup(&f, last, life, 1), 1, "nothing was written over it");
    }
    end();
}

static void write_row(pool_slot s, const pool_row *r)
{
    cr_assert_eq(pwrite(memory.table_fd, r, sizeof *r, (off_t)(table_rows_offset() + (uint64_t)s * sizeof *r)),
                 (ssize_t)sizeof *r);
}

/* Rows that no slot of their extent has: no life of ours writes them, but they may say anything. */
Test(adopt, believes_no_row_behind_the_last_slot_of_an_extent)
{
    enum { BEHIND = PER_EXTENT + 1, LAST = EXTENT / POOL_SLOT_MIN_BYTES - 1 };
    pool_row head, child;
    uint32_t thin;

    live(2);
    head = *row_of(1);
    child = *row_of(2);
    child.parent = BEHIND;
    child.parent_gen = head.gen;
    write_row(1, &child);
    for (pool_slot s = BEHIND; s <= LAST; s++)
        write_row(s, &head);
    again();
    cr_assert_eq(fixture_stats(&f).n_ready, 2);
    fixture_admit(&f, f.ns, 2, 1, 1, 0); /* renews the chain above, as far as the rows know it */
    cr_assert_eq(f.status[0], KVS_E_EXISTS);
    fixture_check(&f);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(1, 1)), KVS_OK);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(2, 1)), KVS_OK);
    thin = fixture_open(&f, 1, "thin", 1); /* twice as many slots to an extent, when it gets this one */
    for (uint64_t id = 100; id < 100 + 8 * PER_EXTENT; id += 14)
        cr_assert_geq(fixture_store(&f, thin, id, 14, 0, 0), 8);
    fixture_check(&f);
    end();
}

Test(adopt, believes_no_row_behind_the_last_extent_of_the_earlier_life)
{
    pool_config c = config_of(2 * EXTENTS);
    pool_row head;

    live(1);
    head = *row_of(1);
    for (pool_slot s = EXTENTS * (EXTENT / POOL_SLOT_MIN_BYTES); s < 2 * EXTENTS * (EXTENT / POOL_SLOT_MIN_BYTES); s++)
        write_row(s, &head);
    again_with(&c);
    cr_assert_eq(fixture_stats(&f).n_ready, 1);
    cr_assert_eq(fixture_store(&f, f.ns, 100, 2 * EXTENTS * PER_EXTENT - 1, 0, 0), 2 * EXTENTS * PER_EXTENT - 1);
    cr_assert_eq(fixture_stats(&f).n_ready, 2 * EXTENTS * PER_EXTENT);
    end();
}

/* To read a row that was never written would make its page cost memory, and on a full tmpfs the process. */
Test(adopt, looks_for_no_parent_where_nothing_was_written)
{
    enum { MANY = 1024 };
    pool_config c = config_of(MANY);
    pool_row child;
    uint64_t before;

    cr_assert_eq(persist_open(&memory, "", -1, -1, NULL), KVS_OK);
    fixture_init_with(&f, &c);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 2, 0, 0), 2);
    child = *row_of(2);
    child.parent = MANY / 2 * (EXTENT / POOL_SLOT_MIN_BYTES);
    write_row(1, &child);
    again_with(&c);
    before = table_kib();
    fixture_admit(&f, f.ns, 2, 1, 1, 0);
    cr_assert_eq(f.status[0], KVS_E_EXISTS);
    cr_assert_eq(table_kib(), before);
    end();
}

/* Both memories are as large as the head says, and its sum is right: but slots have numbers of 32 bits. */
Test(adopt, refuses_a_table_of_more_slots_than_there_are_numbers)
{
    const uint64_t extent = 64 << 20, rows = extent / POOL_SLOT_MIN_BYTES;
    const uint32_t n_extents = (uint32_t)((UINT64_C(1) << 32) / rows) + 1;
    pool_config c = {.max_bytes = extent, .extent_bytes = extent, .memory = &memory};
    table_geometry g = {.extent_bytes = extent,
                        .n_extents = n_extents,
                        .row_bytes = sizeof(pool_row),
                        .rows_per_extent = (uint32_t)rows};
    slot_table t = {0};

    cr_assert_eq(persist_open(&memory, "", -1, -1, NULL), KVS_OK);
    cr_assert_eq(persist_fit(&memory, extent * n_extents, table_bytes(&g), false, NULL), KVS_OK);
    cr_assert_eq(table_open(&t, &memory, &g, false, NULL), KVS_OK);
    table_close(&t);
    memory.survived = true;
    fixture_init_with(&f, &c);
    cr_assert_not(adoption()->adopted);
    cr_assert_not_null(strstr(adoption()->why, "geometry: 65537 extents"), "%s", adoption()->why);
    cr_assert_eq(pool_max_rows(f.pool), rows);
    end();
}

Test(adopt, survives_any_one_wrong_byte_of_the_table)
{
    static uint8_t front[64 << 10], page[4096];
    uint64_t x = 3;

    live(PER_EXTENT * 2);
    for (int i = 0; i < 600; i++) {
        const bool rows = i % 2 == 0;
        off_t at, rows_at = (off_t)table_rows_offset();
        uint8_t old, bad;

        x = x * UINT64_C(6364136223846793005) + 1;
        at = rows ? rows_at + (off_t)((x >> 33) % 4096) : (off_t)((x >> 33) % (66 << 10));
        cr_assert_eq(pread(memory.table_fd, front, sizeof front, 0), (ssize_t)sizeof front);
        cr_assert_eq(pread(memory.table_fd, page, sizeof page, rows_at), (ssize_t)sizeof page);
        cr_assert_eq(pread(memory.table_fd, &old, 1, at), 1);
        bad = old ^ (uint8_t)(1u << (x >> 60 & 7));
        cr_assert_eq(pwrite(memory.table_fd, &bad, 1, at), 1);
        again();
        fixture_check(&f);
        cr_assert_leq(fixture_stats(&f).adopted, PER_EXTENT * 2);
        if (fixture_stats(&f).n_ready < PER_EXTENT * 2)
            (void)fixture_store(&f, f.ns, 1, PER_EXTENT * 2, 0, 0);
    }
    end();
}

/* A write to a page that a full tmpfs cannot give would be SIGBUS: it must be an ordinary lack of space. */
Test(adopt, lives_with_a_tmpfs_that_is_full)
{
    char dir[] = "/tmp/kvs-adopt-XXXXXX";
    pool_config c = {.max_bytes = 4 << 20, .extent_bytes = 1 << 20, .memory = &memory};
    uint32_t ns, stored = 0;
    kvs_err err = {0};

    cr_assert_not_null(mkdtemp(dir));
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("kvs", dir, "tmpfs", 0, "size=112k,mode=0700") != 0) {
        (void)rmdir(dir);
        cr_skip_test("needs root to mount a small tmpfs");
    }
    cr_assert_eq(persist_open(&memory, dir, -1, -1, &err), KVS_OK, "%s", err.msg);
    fixture_init_with(&f, &c);
    ns = fixture_open(&f, 1, "thin", 1);
    for (uint32_t i = 0; i < 4000; i++)
        stored += fixture_store(&f, ns, 1 + i, 1, 0, 0);
    cr_assert_gt(stored, 3000, "others made room");
    cr_assert_gt(fixture_stats(&f).n_ready, 100);
    cr_assert_lt(fixture_stats(&f).n_ready, 1000);
    for (uint32_t i = 0; i < 100 && err.status == KVS_OK; i++) {
        char name[16];
        kvs_plane planes[200];
        uint8_t canon[16384];
        kvs_namespace desc;
        size_t len = 0;

        (void)snprintf(name, sizeof name, "m%u", i);
        cr_assert_eq(kvs_namespace_mla(name, "w", KVS_FORMAT_mla_bf16, 200, 1, planes, &desc, NULL), KVS_OK);
        cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, NULL), KVS_OK);
        (void)directory_open(f.dir, 1, canon, len, &ns, &err);
    }
    cr_assert_eq(err.status, KVS_E_NO_SPACE, "%s", err.msg);
    end();
    cr_assert_eq(umount(dir), 0);
    cr_assert_eq(rmdir(dir), 0);
}

/* ---- the memories ---- */

static kvs_status open_in_child(const char *dir, char msg[KVS_ERR_MSG_BYTES])
{
    kvs_err err = {0};
    persist m;
    kvs_status s = persist_open(&m, dir, -1, -1, &err);

    memcpy(msg, err.msg, KVS_ERR_MSG_BYTES);
    if (s == KVS_OK)
        persist_close(&m);
    return s;
}

static void in_dir(const char *dir, const char *name, char ret[128])
{
    (void)snprintf(ret, 128, "%s/%s", dir, name);
}

Test(persist_open, lets_one_process_write)
{
    char dir[] = "/dev/shm/kvs-adopt-XXXXXX", path[128], msg[KVS_ERR_MSG_BYTES] = "", busy[KVS_ERR_MSG_BYTES];
    kvs_err err = {0};
    persist m;
    int status;
    pid_t pid;

    cr_assert_not_null(mkdtemp(dir));
    cr_assert_eq(persist_open(&m, dir, -1, -1, &err), KVS_OK, "%s", err.msg);
    cr_assert_not(m.survived);
    (void)snprintf(busy, sizeof busy,
                   "pool.path: %s/kvs-table: process %d writes it; each daemon needs a folder of its own", dir,
                   (int)getpid());
    pid = fork();
    if (pid == 0)
        _exit(open_in_child(dir, msg) == KVS_E_BUSY && strcmp(msg, busy) == 0 ? 0 : 1);
    cr_assert(waitpid(pid, &status, 0) == pid && status == 0, "a second writer was let in");
    persist_close(&m);
    cr_assert_eq(persist_open(&m, dir, -1, -1, &err), KVS_OK, "%s", err.msg);
    cr_assert(m.survived && m.bounded);
    persist_close(&m);
    in_dir(dir, "kvs-arena", path);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(persist_open(&m, dir, -1, -1, &err), KVS_OK);
    cr_assert_not(m.survived, "a table without its arena is worth nothing");
    persist_close(&m);
    cr_assert_eq(unlink(path), 0);
    in_dir(dir, "kvs-table", path);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(rmdir(dir), 0);
}

Test(persist_open, refuses_folders_and_files_that_are_not_as_they_must_be)
{
    char dir[] = "/dev/shm/kvs-adopt-XXXXXX", path[128], msg[KVS_ERR_MSG_BYTES];
    int fd;

    cr_assert_not_null(mkdtemp(dir));
    in_dir(dir, "kvs-table", path);
    cr_assert_eq(open_in_child("/proc", msg), KVS_E_CONFIG);
    cr_assert(strstr(msg, "tmpfs") != NULL, "%s", msg);
    cr_assert_eq(open_in_child("/nowhere/at/all", msg), KVS_E_CONFIG);
    cr_assert_eq(symlink("/etc/passwd", path), 0);
    cr_assert_eq(open_in_child(dir, msg), KVS_E_CONFIG);
    cr_assert_eq(unlink(path), 0);
    fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    cr_assert_eq(fchmod(fd, 0640), 0);
    cr_assert_eq(open_in_child(dir, msg), KVS_E_CONFIG);
    cr_assert(strstr(msg, "0640") != NULL, "%s", msg);
    cr_assert_eq(unlink(path), 0);
    (void)close(fd);
    cr_assert_eq(mkfifo(path, 0600), 0);
    cr_assert_eq(open_in_child(dir, msg), KVS_E_CONFIG);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(chmod(dir, 0777), 0);
    cr_assert_eq(open_in_child(dir, msg), KVS_E_CONFIG);
    cr_assert(strstr(msg, "0777") != NULL, "%s", msg);
    cr_assert_eq(rmdir(dir), 0);
}

Test(persist_open, says_who_must_own_the_folder)
{
    char dir[] = "/dev/shm/kvs-adopt-XXXXXX", path[128], msg[KVS_ERR_MSG_BYTES], says[KVS_ERR_MSG_BYTES], longest[108];
    const unsigned user = getuid() == 0 ? 65534 : getuid();

    memset(longest, 'x', sizeof longest - 1);
    memcpy(longest, "/dev/shm/", 9);
    longest[sizeof longest - 1] = '\0';
    cr_assert_eq(open_in_child(longest, msg), KVS_E_CONFIG);
    (void)snprintf(says, sizeof says,
                   "pool.path: %s: No such file or directory; make it, on a tmpfs, with mode 0700, for user %u to own",
                   longest, (unsigned)geteuid());
    cr_assert_str_eq(msg, says);
    cr_assert_not_null(mkdtemp(dir));
    in_dir(dir, "below", path);
    cr_assert_eq(mkdir(path, 0700), 0);
    cr_assert_eq(chmod(dir, 0), 0);
    if (getuid() == 0)
        cr_assert_eq(seteuid(user), 0);
    cr_assert_eq(open_in_child(path, msg), KVS_E_CONFIG);
    (void)snprintf(says, sizeof says,
                   "pool.path: %s: Permission denied; user %u must own it, and may enter all above it", path, user);
    cr_assert_str_eq(msg, says);
    cr_assert_eq(seteuid(getuid()), 0);
    cr_assert_eq(chmod(dir, 0555), 0);
    cr_assert_eq(seteuid(user), 0);
    cr_assert_eq(open_in_child(dir, msg), KVS_E_CONFIG);
    (void)snprintf(says, sizeof says,
                   "pool.path: %s/kvs-table: Permission denied; user %u must own the folder, and what is in it", dir,
                   user);
    cr_assert_str_eq(msg, says);
    cr_assert_eq(seteuid(getuid()), 0);
    cr_assert_eq(chmod(dir, 0700), 0);
    cr_assert_eq(rmdir(path), 0);
    cr_assert_eq(rmdir(dir), 0);
}

Test(persist_open, takes_back_memfds_and_nothing_else)
{
    int pipes[2], plain, arena, table;
    struct stat st;
    ino_t plain_ino;
    persist m, n;

    cr_assert_eq(persist_open(&m, "", -1, -1, NULL), KVS_OK);
    cr_assert(m.made[0] && m.made[1] && !m.survived);
    arena = dup(m.arena_fd);
    table = dup(m.table_fd);
    persist_close(&m);
    cr_assert_eq(persist_open(&m, "", arena, table, NULL), KVS_OK);
    cr_assert(m.survived && !m.made[0] && !m.made[1]);
    cr_assert_eq(m.arena_fd, arena);
    cr_assert_eq(pipe(pipes), 0);
    plain = memfd_create("plain", MFD_CLOEXEC);
    cr_assert_eq(fstat(plain, &st), 0);
    plain_ino = st.st_ino;
    cr_assert_eq(persist_open(&n, "", pipes[0], plain, NULL), KVS_OK);
    cr_assert(n.made[0] && n.made[1] && !n.survived);
    cr_assert_gt(strlen(n.note), 0);
    cr_assert(fstat(n.table_fd, &st) == 0 && st.st_ino != plain_ino, "closed, not used");
    persist_close(&n);
    persist_close(&m);
    (void)close(pipes[1]);
}
