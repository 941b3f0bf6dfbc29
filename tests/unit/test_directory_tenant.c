/* Tenants in the directory: quotas, floors, who is evicted for whom, and the sums. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "tests/support/dir_fixture.h"

enum { SLOT = FIXTURE_SLOT_BYTES, A = 1, B = 2 };

static directory_tenant tenant(const fixture *f, uint32_t t)
{
    directory_tenant x;

    directory_get_tenant(f->dir, t, &x);
    return x;
}

static uint32_t found(fixture *f, uint32_t ns, uint64_t first, uint32_t n)
{
    uint32_t sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += fixture_has(f, ns, first + i);
    return sum;
}

Test(tenant, pays_from_admission_until_the_slot_is_free)
{
    fixture f;
    pool_slot held;

    fixture_init(&f, 8, 8);
    fixture_admit(&f, f.ns, 1, 3, 0, 0);
    cr_assert_eq(tenant(&f, A).used_bytes, 3 * SLOT);
    directory_abort(f.dir, f.slot[2]);
    cr_assert_eq(tenant(&f, A).used_bytes, 2 * SLOT);
    cr_assert_eq(directory_commit(f.dir, f.slot[0], 0), KVS_OK);
    directory_suspect(f.dir, f.slot[1]);
    cr_assert_eq(tenant(&f, A).used_bytes, 2 * SLOT, "quarantined memory is still its");
    fixture_check(&f);
    directory_settle(f.dir, f.slot[1]);
    cr_assert_eq(tenant(&f, A).used_bytes, SLOT);
    cr_assert_eq(fixture_hold(&f, f.ns, 1, &held), KVS_OK);
    cr_assert_eq(directory_drop(f.dir, f.ns, fixture_keys(1, 1)), KVS_OK);
    cr_assert_eq(tenant(&f, A).used_bytes, SLOT, "draining, too");
    fixture_check(&f);
    directory_unhold(f.dir, held);
    cr_assert_eq(tenant(&f, A).used_bytes, 0);
    cr_assert_eq(tenant(&f, B).used_bytes, 0);
    fixture_fini(&f);
}

Test(tenant, above_its_quota_it_evicts_its_own_coldest_though_there_is_space)
{
    fixture f;
    uint32_t other;

    fixture_init(&f, 16, 16);
    other = fixture_open(&f, B, "model", 2);
    directory_limit_tenant(f.dir, A, 4 * SLOT, 0);
    cr_assert_eq(fixture_store(&f, other, 50, 1, 0, 0), 1);
    for (uint64_t id = 1; id <= 6; id++)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1, 0, 0), 1);
    cr_assert_eq(tenant(&f, A).used_bytes, 4 * SLOT);
    cr_assert_eq(found(&f, f.ns, 1, 2), 0);
    cr_assert_eq(found(&f, f.ns, 3, 4), 4);
    cr_assert(fixture_has(&f, other, 50));
    cr_assert_eq(tenant(&f, A).evicted, 2);
    cr_assert_eq(tenant(&f, A).for_others, 0);
    fixture_fini(&f);
}

Test(tenant, a_list_longer_than_the_quota_is_no_space_behind_it)
{
    fixture f;

    fixture_init(&f, 16, 16);
    directory_limit_tenant(f.dir, A, 4 * SLOT, 0);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 6, 0, 0), 4);
    cr_assert_eq(f.status[3], KVS_OK);
    cr_assert_eq(f.status[4], KVS_E_NO_SPACE);
    cr_assert_eq(f.status[5], KVS_E_NO_SPACE);
    cr_assert_gt(tenant(&f, A).no_space, 0);
    directory_limit_tenant(f.dir, A, SLOT - 1, 0);
    cr_assert_eq(fixture_store(&f, f.ns, 9, 1, 0, 0), 0, "not even one fits");
    fixture_fini(&f);
}

/* What the list itself holds lies at the cold end and may not go: it is passed once, and not for each new block again. */
Test(tenant, a_long_list_at_its_quota_passes_what_it_holds_once)
{
    enum { OLD = 1500, YOUNG = 1000, NEW = 900 };
    uint8_t keys[(OLD + NEW) * 32];
    uint64_t before;
    fixture f;

    fixture_init_counted(&f, &(pool_config){.max_bytes = 16 << 20, .extent_bytes = 16 << 20});
    directory_limit_tenant(f.dir, A, (OLD + YOUNG) * SLOT, 0);
    cr_assert_eq(fixture_store(&f, f.ns, 1, OLD, 0, 0), OLD);
    cr_assert_eq(fixture_store(&f, f.ns, 10000, YOUNG, 0, 0), YOUNG);
    memcpy(keys, fixture_keys(1, OLD), OLD * 32);
    memcpy(keys + OLD * 32, fixture_keys(20000, NEW), NEW * 32);
    before = fixture_victims();
    directory_admit(f.dir, f.ns, 0, keys, keys, OLD + NEW, f.status, f.slot);
    cr_assert_leq(fixture_victims() - before, OLD + 2 * NEW);
    for (uint32_t i = 0; i < OLD + NEW; i++)
        cr_assert_eq(f.status[i], i < OLD ? KVS_E_EXISTS : KVS_OK);
    for (uint32_t i = OLD; i < OLD + NEW; i++)
        cr_assert_eq(directory_commit(f.dir, f.slot[i], 0), KVS_OK);
    cr_assert_eq(found(&f, f.ns, 1, OLD), OLD);
    cr_assert_eq(found(&f, f.ns, 10000, YOUNG), YOUNG - NEW);
    fixture_fini(&f);
}

Test(tenant, what_is_pinned_or_held_counts_and_stays)
{
    fixture f;

    fixture_init(&f, 16, 16);
    directory_limit_tenant(f.dir, A, 2 * SLOT, 0);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 2, 0, 0), 2);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(1, 1)), KVS_OK);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(2, 1)), KVS_OK);
    cr_assert_eq(tenant(&f, A).pinned_bytes, 2 * SLOT);
    cr_assert_eq(fixture_store(&f, f.ns, 3, 1, 0, 0), 0);
    cr_assert_eq(f.status[0], KVS_E_NO_SPACE);
    cr_assert_eq(directory_unpin(f.dir, f.ns, fixture_keys(2, 1)), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 3, 1, 0, 0), 1);
    cr_assert(fixture_has(&f, f.ns, 1));
    fixture_fini(&f);
}

Test(tenant, quota_counts_blocks_of_every_layout_and_takes_the_coldest)
{
    fixture f;
    uint32_t wide;

    fixture_init_with(&f, &(pool_config){.max_bytes = 64 << 10, .extent_bytes = 16 << 10});
    wide = fixture_open(&f, A, "wide", 4);
    directory_limit_tenant(f.dir, A, 6 * SLOT, 0);
    cr_assert_eq(fixture_store(&f, wide, 1, 2, 0, 0), 2); /* 4 slots' worth */
    cr_assert_eq(fixture_store(&f, f.ns, 10, 2, 0, 0), 2);
    cr_assert_eq(fixture_load(&f, wide, 1), KVS_OK);
    cr_assert_eq(fixture_store(&f, f.ns, 20, 1, 0, 0), 1);
    cr_assert(fixture_has(&f, wide, 1));
    cr_assert_not(fixture_has(&f, wide, 2), "the coldest, of the other layout");
    cr_assert_eq(found(&f, f.ns, 10, 2), 2);
    fixture_fini(&f);
}

Test(tenant, nobody_evicts_another_below_its_floor)
{
    fixture f;
    uint32_t b;

    fixture_init(&f, 16, 16);
    b = fixture_open(&f, B, "model", 2);
    directory_limit_tenant(f.dir, B, 0, 4 * SLOT);
    cr_assert_eq(fixture_store(&f, b, 100, 6, 0, 0), 6); /* the coldest of all from now on */
    for (uint64_t id = 1; id <= 200; id++)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1, 0, 0), 1);
    cr_assert_eq(tenant(&f, B).used_bytes, 4 * SLOT);
    cr_assert_eq(found(&f, b, 100, 6), 4);
    cr_assert_eq(tenant(&f, B).for_others, 2);
    cr_assert_eq(tenant(&f, A).used_bytes, 12 * SLOT);
    fixture_fini(&f);
}

Test(tenant, nobody_evicts_another_below_its_floor_by_taking_its_extent)
{
    fixture f;
    uint32_t wide;

    fixture_init_with(&f, &(pool_config){.max_bytes = 64 << 10, .extent_bytes = 16 << 10});
    wide = fixture_open(&f, B, "wide", 4);
    directory_limit_tenant(f.dir, B, 0, 5 * 2 * SLOT);
    cr_assert_eq(fixture_store(&f, wide, 100, 12, 0, 0), 12); /* three a 16 KiB extent: the whole pool */
    cr_assert_eq(fixture_store(&f, f.ns, 1, 30, 0, 0), 14);   /* two extents of seven */
    cr_assert_eq(tenant(&f, B).used_bytes, 6 * 2 * SLOT, "5 must stay, 3 go at once");
    cr_assert_eq(tenant(&f, B).evicted, 6);
    fixture_fini(&f);
}

/* First block by block, then an extent: both count. */
Test(tenant, nobody_evicts_another_below_its_floor_in_two_ways)
{
    enum { THIN = 2304, THICK = 3456, PER = 16384 / THIN };
    uint32_t thick_a, thick_b, thin_b;
    fixture f;

    fixture_init_with(&f, &(pool_config){.max_bytes = 3 * 16384, .extent_bytes = 16384});
    thick_a = fixture_open(&f, A, "model", 3);
    thin_b = fixture_open(&f, B, "model", 2);
    thick_b = fixture_open(&f, B, "model", 3);
    cr_assert_eq(fixture_store(&f, f.ns, 1, PER, 0, 0), PER);
    cr_assert_eq(fixture_store(&f, thick_b, 1, 2, 0, 0), 2);
    cr_assert_eq(fixture_store(&f, thin_b, 1, 3, 0, 0), 3);
    cr_assert_eq(fixture_store(&f, thick_a, 1, 2, 0, 0), 2);
    for (uint64_t id = 1; id <= PER; id++)
        cr_assert_eq(fixture_load(&f, f.ns, id), KVS_OK);
    directory_limit_tenant(f.dir, B, 0, 3 * THIN);
    cr_assert_eq(fixture_store(&f, thick_a, 11, 3, 0, 0), 3);
    cr_assert_eq(tenant(&f, B).used_bytes, 3 * THIN);
    cr_assert_eq(found(&f, thick_b, 1, 2), 0);
    cr_assert_eq(found(&f, thin_b, 1, 3), 3);
    cr_assert_eq(found(&f, thick_a, 1, 2), 1, "its own instead");
    fixture_fini(&f);
}

Test(tenant, over_their_floors_the_coldest_goes_whosever_it_is)
{
    fixture f;
    uint32_t b;

    fixture_init(&f, 8, 8);
    b = fixture_open(&f, B, "model", 2);
    cr_assert_eq(fixture_store(&f, b, 100, 4, 0, 0), 4);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 4, 0, 0), 4);
    cr_assert_eq(fixture_store(&f, b, 200, 4, 0, 0), 4);
    cr_assert_eq(found(&f, b, 100, 4), 0, "its own were the coldest");
    cr_assert_eq(found(&f, f.ns, 1, 4), 4);
    cr_assert_eq(fixture_store(&f, b, 300, 4, 0, 0), 4);
    cr_assert_eq(found(&f, f.ns, 1, 4), 0, "then the other's");
    cr_assert_eq(tenant(&f, A).for_others, 4);
    fixture_fini(&f);
}

Test(tenant, below_its_floor_it_takes_from_the_others_first)
{
    fixture f;
    uint32_t b;

    fixture_init(&f, 8, 8);
    b = fixture_open(&f, B, "model", 2);
    directory_limit_tenant(f.dir, B, 0, 4 * SLOT);
    cr_assert_eq(fixture_store(&f, b, 100, 1, 0, 0), 1);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 7, 0, 0), 7);
    cr_assert_eq(fixture_store(&f, b, 101, 3, 0, 0), 3);
    cr_assert_eq(found(&f, b, 100, 4), 4, "the coldest block of all stayed");
    cr_assert_eq(tenant(&f, B).used_bytes, 4 * SLOT);
    fixture_fini(&f);
}

Test(tenant, may_not_pin_what_the_others_were_promised)
{
    fixture f;
    uint32_t b;
    kvs_status s = KVS_OK;
    uint64_t id;

    fixture_init_with(&f, &(pool_config){.max_bytes = 64 << 10, .extent_bytes = 64 << 10});
    b = fixture_open(&f, B, "model", 2);
    directory_limit_tenant(f.dir, B, 0, 32 << 10);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 28, 0, 0), 28);
    for (id = 1; id <= 28 && s == KVS_OK; id++)
        s = directory_pin(f.dir, f.ns, fixture_keys(id, 1));
    cr_assert_eq(s, KVS_E_NO_SPACE);
    cr_assert_leq(tenant(&f, A).pinned_bytes, 32 << 10);
    cr_assert_gt(tenant(&f, A).pinned_bytes, (32 << 10) - SLOT);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(1, 1)), KVS_OK, "it was pinned");
    cr_assert_eq(fixture_store(&f, b, 100, 13, 0, 0), 13, "B gets its floor whatever A does");
    fixture_fini(&f);
}

Test(tenant, several_together_may_not_pin_what_another_was_promised)
{
    enum { C = 3 };
    fixture f;
    uint32_t b, c;

    fixture_init_with(&f, &(pool_config){.max_bytes = 64 << 10, .extent_bytes = 64 << 10});
    b = fixture_open(&f, B, "model", 2);
    c = fixture_open(&f, C, "model", 2);
    directory_limit_tenant(f.dir, B, 0, 32 << 10);
    directory_limit_tenant(f.dir, A, 0, 4 * SLOT);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 8, 0, 0), 8);
    cr_assert_eq(fixture_store(&f, c, 101, 20, 0, 0), 20);
    for (uint64_t id = 1; id <= 8; id++)
        cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(id, 1)), KVS_OK);
    for (uint64_t id = 101; id <= 120; id++)
        cr_assert_eq(directory_pin(f.dir, c, fixture_keys(id, 1)), id <= 106 ? KVS_OK : KVS_E_NO_SPACE);
    cr_assert_leq(tenant(&f, A).pinned_bytes + tenant(&f, C).pinned_bytes, 32 << 10);
    cr_assert_eq(fixture_store(&f, b, 200, 14, 0, 0), 14, "B gets its floor whatever they do");
    cr_assert_eq(directory_unpin(f.dir, f.ns, fixture_keys(8, 1)), KVS_OK);
    cr_assert_eq(directory_pin(f.dir, c, fixture_keys(107, 1)), found(&f, c, 107, 1) ? KVS_OK : KVS_E_NOT_FOUND);
    fixture_fini(&f);
}

Test(tenant, a_smaller_quota_is_reached_step_by_step)
{
    fixture f;

    fixture_init(&f, 16, 16);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 10, 0, 0), 10);
    directory_limit_tenant(f.dir, A, 3 * SLOT, 0);
    while (directory_step(f.dir))
        ;
    cr_assert_eq(tenant(&f, A).used_bytes, 3 * SLOT);
    cr_assert_eq(found(&f, f.ns, 1, 3), 3, "the head of the chain stays");
    directory_limit_tenant(f.dir, A, 0, 0);
    cr_assert_eq(tenant(&f, A).quota_bytes, UINT64_MAX);
    cr_assert_eq(fixture_store(&f, f.ns, 4, 10, 3, 3), 10);
    fixture_fini(&f);
}

Test(tenant, cannot_use_up_the_namespaces_and_layouts_of_the_others)
{
    static kvs_plane planes[KVS_MAX_PLANES];
    static uint8_t canon[65536];
    kvs_status s = KVS_OK;
    kvs_err err = {0};
    fixture f;
    uint32_t n = 0;

    fixture_init_with(&f, &(pool_config){.max_bytes = 1 << 20, .extent_bytes = 1 << 20});
    for (uint32_t layers = 3; s == KVS_OK && layers < 400; layers++) {
        kvs_namespace desc;
        size_t len = 0;
        uint32_t ns;

        cr_assert_eq(kvs_namespace_mla("m", "w", KVS_FORMAT_mla_bf16, layers, 1, planes, &desc, &err), KVS_OK);
        cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, &err), KVS_OK);
        s = directory_open(f.dir, A, canon, len, &ns, &err);
        n += s == KVS_OK;
    }
    cr_assert_eq(s, KVS_E_LIMIT);
    cr_assert_eq(n, POOL_MAX_LAYOUTS / FIXTURE_TENANTS - 1, "with the fixture's own");
    (void)fixture_open(&f, B, "m", 401);
    (void)fixture_open(&f, A, "another model", 401); /* a layout that is there */
    for (s = KVS_OK, n = 0; s == KVS_OK && n < DIRECTORY_MAX_NAMESPACES; n++) {
        kvs_namespace desc;
        size_t len = 0;
        uint32_t ns;
        char model[16];

        (void)snprintf(model, sizeof model, "m%u", n);
        cr_assert_eq(kvs_namespace_mla(model, "w", KVS_FORMAT_mla_bf16, 2, 1, planes, &desc, &err), KVS_OK);
        cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, &err), KVS_OK);
        s = directory_open(f.dir, A, canon, len, &ns, &err);
    }
    cr_assert_eq(s, KVS_E_LIMIT);
    cr_assert_eq(tenant(&f, A).n_namespaces, DIRECTORY_MAX_NAMESPACES / FIXTURE_TENANTS);
    (void)fixture_open(&f, B, "b", 2);
    cr_assert_eq(directory_open(f.dir, FIXTURE_TENANTS, canon, 1, &n, &err), KVS_E_DENIED);
    fixture_fini(&f);
}

/* Descriptions are kept in one place: the longest there may be, as many as one tenant is let open. */
static uint32_t open_long_ones(fixture *f, uint32_t t)
{
    static kvs_plane planes[KVS_MAX_PLANES];
    static uint8_t canon[65536];
    kvs_status s = KVS_OK;
    kvs_err err = {0};
    uint32_t n = 0, ns;

    for (; s == KVS_OK; n += s == KVS_OK) {
        kvs_namespace desc;
        size_t len = 0;
        char model[16];

        (void)snprintf(model, sizeof model, "m%u", n);
        cr_assert_eq(kvs_namespace_mla(model, "w", KVS_FORMAT_mla_bf16, KVS_MAX_PLANES, 1, planes, &desc, &err),
                     KVS_OK);
        cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, &err), KVS_OK);
        s = directory_open(f->dir, t, canon, len, &ns, &err);
    }
    cr_assert_eq(s, KVS_E_LIMIT);
    cr_assert_not_null(strstr(err.msg, "namespaces: "), "%s", err.msg);
    return n;
}

Test(tenant, cannot_use_up_the_room_for_the_others_descriptions)
{
    fixture f;

    fixture_init_with(&f, &(pool_config){.max_bytes = 2 << 20, .extent_bytes = 2 << 20});
    for (uint32_t t = 0; t < FIXTURE_TENANTS; t++)
        cr_assert_gt(open_long_ones(&f, t), 300, "tenant %u", t);
    fixture_fini(&f);
}

/* ---- a pool of another size ---- */

enum { EXTENT = 16 << 10, PER_EXTENT = EXTENT / FIXTURE_SLOT_BYTES };

static void resize(fixture *f, uint32_t n_extents)
{
    kvs_err err = {0};
    uint64_t bytes;
    void *at;

    cr_assert_eq(pool_resize(f->pool, (uint64_t)n_extents * EXTENT, &err), KVS_OK, "%s", err.msg);
    directory_resized(f->dir);
    fixture_check(f);
    while (directory_step(f->dir))
        fixture_check(f);
    while (pool_next_piece(f->pool, &at, &bytes)) {
        pool_piece_usable(f->pool);
        fixture_check(f);
    }
}

static pool_bytes bytes_of(const fixture *f)
{
    pool_bytes b;

    pool_get_bytes(f->pool, &b);
    return b;
}

Test(resize, grows_into_what_was_reserved_and_no_further)
{
    fixture f;
    kvs_err err = {0};

    fixture_init_with(&f, &(pool_config){.max_bytes = 2 * EXTENT, .extent_bytes = EXTENT, .reserve_bytes = 8 * EXTENT});
    cr_assert_eq(pool_reserved(f.pool), 8 * EXTENT);
    cr_assert_eq(bytes_of(&f).max, 2 * EXTENT);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 8 * PER_EXTENT, 0, 0), 2 * PER_EXTENT);
    resize(&f, 8);
    cr_assert_eq(bytes_of(&f).arena, 8 * EXTENT);
    cr_assert_eq(fixture_store(&f, f.ns, 1000, 6 * PER_EXTENT, 0, 0), 6 * PER_EXTENT);
    cr_assert_eq(found(&f, f.ns, 1, 2 * PER_EXTENT), 2 * PER_EXTENT, "nothing had to go");
    cr_assert_eq(pool_resize(f.pool, 9 * EXTENT, &err), KVS_E_LIMIT);
    cr_assert_eq(pool_resize(f.pool, EXTENT - 1, &err), KVS_E_LIMIT);
    fixture_fini(&f);
}

Test(resize, shrinks_by_emptying_extents_from_the_end_and_keeps_the_others)
{
    fixture f;
    void *at = NULL;

    fixture_init_with(&f, &(pool_config){.max_bytes = 8 * EXTENT, .extent_bytes = EXTENT});
    cr_assert_eq(fixture_store(&f, f.ns, 1, 8 * PER_EXTENT, 0, 0), 8 * PER_EXTENT);
    resize(&f, 3);
    cr_assert_eq(bytes_of(&f).arena, 3 * EXTENT);
    cr_assert_eq(bytes_of(&f).max, 3 * EXTENT);
    cr_assert_eq(bytes_of(&f).giving_up, 0);
    cr_assert_eq(found(&f, f.ns, 1, 3 * PER_EXTENT), 3 * PER_EXTENT);
    cr_assert_eq(found(&f, f.ns, 1, 8 * PER_EXTENT), 3 * PER_EXTENT);
    cr_assert_not(pool_drop_piece(f.pool, 8 * EXTENT, &at), "the one piece is used in part");
    cr_assert(pool_drop_piece(f.pool, 5 * EXTENT, &at));
    fixture_check(&f);
    resize(&f, 8);
    cr_assert_eq(bytes_of(&f).arena, 8 * EXTENT, "and comes again");
    cr_assert_eq(fixture_store(&f, f.ns, 1000, 5 * PER_EXTENT, 0, 0), 5 * PER_EXTENT);
    fixture_fini(&f);
}

Test(resize, waits_for_what_is_held_or_pinned)
{
    fixture f;
    pool_slot held;
    void *at = NULL;

    fixture_init_with(&f, &(pool_config){.max_bytes = 4 * EXTENT, .extent_bytes = EXTENT});
    for (uint64_t id = 1; id <= 4 * PER_EXTENT; id++)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1, 0, 0), 1);
    cr_assert_eq(fixture_hold(&f, f.ns, 4 * PER_EXTENT, &held), KVS_OK);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(3 * PER_EXTENT, 1)), KVS_OK);
    resize(&f, 2);
    cr_assert_eq(bytes_of(&f).giving_up, 2 * EXTENT);
    cr_assert_eq(tenant(&f, A).used_bytes, (2 * PER_EXTENT + 2) * SLOT);
    cr_assert_not(pool_drop_piece(f.pool, 2 * EXTENT, &at));
    cr_assert_eq(fixture_store(&f, f.ns, 900, 1, 0, 0), 1, "by evicting, not from there");
    directory_unhold(f.dir, held);
    cr_assert_eq(bytes_of(&f).giving_up, EXTENT);
    cr_assert_eq(directory_unpin(f.dir, f.ns, fixture_keys(3 * PER_EXTENT, 1)), KVS_OK);
    cr_assert_eq(bytes_of(&f).giving_up, 0);
    cr_assert(pool_drop_piece(f.pool, 2 * EXTENT, &at));
    fixture_fini(&f);
}

Test(resize, a_reset_takes_pinned_and_leased_blocks_that_are_being_given_up)
{
    fixture f;
    directory_lease lease;
    directory_reset_result r;

    fixture_init_with(&f, &(pool_config){.max_bytes = 4 * EXTENT, .extent_bytes = EXTENT});
    cr_assert_eq(fixture_store(&f, f.ns, 1, 4 * PER_EXTENT, 0, 0), 4 * PER_EXTENT);
    for (uint64_t id = PER_EXTENT + 1; id <= 4 * PER_EXTENT; id += 2)
        cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(id, 1)), KVS_OK);
    cr_assert_eq(fixture_reserve(&f, f.ns, 1, 4 * PER_EXTENT, 7, 1000, &lease), KVS_OK);
    cr_assert_eq(lease.n_leased, 4 * PER_EXTENT);
    resize(&f, 1);
    cr_assert_eq(bytes_of(&f).giving_up, 3 * EXTENT);
    fixture_reset(f.dir, A, WIRE_NONE32, true, &r);
    cr_assert_eq(r.leases, 1);
    cr_assert_eq(r.kept, 0);
    fixture_check(&f);
    cr_assert_eq(bytes_of(&f).giving_up, 0);
    cr_assert_eq(tenant(&f, A).used_bytes, 0);
    cr_assert_eq(tenant(&f, A).pinned_bytes, 0);
    fixture_fini(&f);
}

Test(resize, a_pin_of_a_block_that_is_being_given_up_changes_nothing_where_it_must_stay)
{
    fixture f;
    directory_lease lease;

    fixture_init_with(&f, &(pool_config){.max_bytes = 2 * EXTENT, .extent_bytes = EXTENT});
    for (uint64_t id = 1; id <= 2 * PER_EXTENT; id++)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1, 0, 0), 1);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(2 * PER_EXTENT, 1)), KVS_OK);
    cr_assert_eq(fixture_reserve(&f, f.ns, 2 * PER_EXTENT - 1, 1, 7, 1000, &lease), KVS_OK);
    resize(&f, 1);
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(2 * PER_EXTENT, 1)), KVS_OK, "it is pinned");
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(2 * PER_EXTENT - 1, 1)), KVS_E_BUSY, "it is leased");
    cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(2 * PER_EXTENT - 2, 1)), KVS_E_NOT_FOUND);
    fixture_check(&f);
    cr_assert_eq(bytes_of(&f).giving_up, EXTENT);
    cr_assert_eq(directory_release(f.dir, A, lease.id, NULL), KVS_OK);
    cr_assert_eq(directory_unpin(f.dir, f.ns, fixture_keys(2 * PER_EXTENT, 1)), KVS_OK);
    cr_assert_eq(bytes_of(&f).giving_up, 0);
    fixture_fini(&f);
}

/* 98 blocks, 60 pinned, 20 being written: smaller than what is in use, then larger, then the pins go. */
Test(resize, below_what_is_pinned_it_converges_as_the_pins_go)
{
    enum { SIZE = 14, PINNED = 60, WRITING = 20 };
    static const uint32_t sizes[] = {SIZE / 2, 1, 2 * SIZE, 1};
    fixture f;

    fixture_init_with(
        &f, &(pool_config){.max_bytes = SIZE * EXTENT, .extent_bytes = EXTENT, .reserve_bytes = 2 * SIZE * EXTENT});
    for (uint64_t id = 1; id <= SIZE * PER_EXTENT - WRITING; id++)
        cr_assert_eq(fixture_store(&f, f.ns, id, 1, 0, 0), 1);
    for (uint64_t id = 1; id <= PINNED; id++)
        cr_assert_eq(directory_pin(f.dir, f.ns, fixture_keys(id, 1)), KVS_OK);
    fixture_admit(&f, f.ns, 1000, WRITING, 0, 0);
    cr_assert_eq(f.status[WRITING - 1], KVS_OK);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        resize(&f, sizes[i]);
        cr_assert_eq(bytes_of(&f).max, (uint64_t)sizes[i] * EXTENT);
        cr_assert_eq(found(&f, f.ns, 1, PINNED), PINNED);
    }
    for (uint32_t i = 0; i < WRITING; i++)
        cr_assert_eq(directory_commit(f.dir, f.slot[i], 0), KVS_OK, "what was admitted is finished");
    fixture_check(&f);
    cr_assert_gt(bytes_of(&f).giving_up, 0);
    for (uint64_t id = 1; id <= PINNED; id++)
        cr_assert_eq(directory_unpin(f.dir, f.ns, fixture_keys(id, 1)), KVS_OK);
    fixture_check(&f);
    cr_assert_eq(bytes_of(&f).giving_up, 0);
    cr_assert_eq(bytes_of(&f).arena, EXTENT);
    fixture_fini(&f);
}

Test(resize, is_refused_where_it_would_take_a_tenant_below_its_floor)
{
    const char *names[FIXTURE_TENANTS] = {"default", "a", "b", "c"};
    uint64_t floors[FIXTURE_TENANTS] = {0};
    kvs_err err = {0};
    uint32_t other;
    fixture f;

    fixture_init_with(&f, &(pool_config){.max_bytes = 4 * EXTENT, .extent_bytes = EXTENT});
    other = fixture_open(&f, B, "model", 2);
    cr_assert_eq(fixture_store(&f, f.ns, 1, 2 * PER_EXTENT, 0, 0), 2 * PER_EXTENT);
    cr_assert_eq(fixture_store(&f, other, 100, PER_EXTENT + 1, 0, 0), PER_EXTENT + 1); /* in extents 2 and 3 */
    cr_assert_eq(directory_check_size(f.dir, EXTENT, names, floors, &err), KVS_OK, "nobody has a floor");
    floors[B] = PER_EXTENT * SLOT;
    cr_assert_eq(directory_check_size(f.dir, 3 * EXTENT, names, floors, &err), KVS_OK, "one block of two extents");
    cr_assert_eq(directory_check_size(f.dir, 2 * EXTENT, names, floors, &err), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg, "would leave tenant b 0 bytes, of 18432 now and a floor of 16128"), "%s",
                       err.msg);
    floors[B] = (PER_EXTENT + 1) * SLOT;
    cr_assert_eq(directory_check_size(f.dir, 3 * EXTENT, names, floors, &err), KVS_E_CONFIG, "not even that one");
    floors[B] = 0;
    floors[A] = PER_EXTENT * SLOT;
    cr_assert_eq(directory_check_size(f.dir, EXTENT, names, floors, &err), KVS_OK);
    floors[A]++;
    cr_assert_eq(directory_check_size(f.dir, EXTENT, names, floors, &err), KVS_E_CONFIG);
    cr_assert_eq(directory_drop(f.dir, other, fixture_keys(100, 1)), KVS_OK);
    fixture_fini(&f);
}

Test(tenant, another_one_may_come_later)
{
    enum { MORE = 3 };
    static const pool_config pc = {.max_bytes = 4 * EXTENT, .extent_bytes = EXTENT};
    directory_config dc = {.evict = &evict_lru, .n_tenants = 2, .max_tenants = MORE};
    static uint8_t canon[65536];
    static kvs_plane planes[2];
    kvs_namespace desc;
    directory_tenant t;
    kvs_err err = {0};
    directory *dir;
    pool_slot slot;
    kvs_status s;
    size_t len = 0;
    uint32_t ns;
    uint64_t bytes;
    void *at;
    pool *p;

    cr_assert_eq(pool_create(&p, &pc, &err), KVS_OK, "%s", err.msg);
    while (pool_next_piece(p, &at, &bytes))
        pool_piece_usable(p);
    dc.pool = p;
    cr_assert_eq(directory_create(&dir, &dc, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_namespace_mla("m", "w", KVS_FORMAT_mla_bf16, 2, 1, planes, &desc, &err), KVS_OK);
    cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, &err), KVS_OK);
    cr_assert_eq(directory_open(dir, 0, canon, len, &ns, &err), KVS_OK);
    directory_admit(dir, ns, 0, NULL, fixture_keys(1, 1), 1, &s, &slot);
    cr_assert(s == KVS_OK && directory_commit(dir, slot, 0) == KVS_OK);
    cr_assert_eq(directory_open(dir, MORE - 1, canon, len, &ns, &err), KVS_E_DENIED);
    directory_add_tenants(dir, MORE);
    cr_assert_eq(directory_open(dir, MORE - 1, canon, len, &ns, &err), KVS_OK, "%s", err.msg);
    directory_admit(dir, ns, 0, NULL, fixture_keys(1, 1), 1, &s, &slot);
    cr_assert(s == KVS_OK && directory_commit(dir, slot, 0) == KVS_OK);
    directory_get_tenant(dir, MORE - 1, &t);
    cr_assert_eq(t.used_bytes, SLOT);
    directory_get_tenant(dir, 0, &t);
    cr_assert_eq(t.used_bytes, SLOT);
    cr_assert_eq(directory_check(dir, &err), KVS_OK, "%s", err.msg);
    directory_destroy(dir);
    pool_destroy(p);
}

Test(resize, larger_again_it_has_all_of_its_room_again)
{
    fixture f;

    fixture_init_with(&f, &(pool_config){.max_bytes = 4 * EXTENT, .extent_bytes = EXTENT});
    cr_assert_eq(fixture_store(&f, f.ns, 1, 4 * PER_EXTENT, 0, 0), 4 * PER_EXTENT);
    cr_assert_eq(pool_resize(f.pool, EXTENT, NULL), KVS_OK);
    directory_resized(f.dir); /* and before a step has emptied anything */
    resize(&f, 4);
    cr_assert_eq(bytes_of(&f).giving_up, 0);
    cr_assert_eq(fixture_store(&f, f.ns, 1000, 3 * PER_EXTENT, 0, 0), 3 * PER_EXTENT);
    cr_assert_eq(found(&f, f.ns, 1, PER_EXTENT), PER_EXTENT);
    fixture_fini(&f);
}

Test(resize, a_change_of_mind_leaves_the_books_right)
{
    fixture f;
    uint32_t size[] = {5, 1, 8, 2, 7, 3, 8, 1, 4};

    fixture_init_with(&f, &(pool_config){.max_bytes = 8 * EXTENT, .extent_bytes = EXTENT});
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        kvs_err err = {0};

        (void)fixture_store(&f, f.ns, 1 + 100 * i, 6 * PER_EXTENT, 0, 0);
        cr_assert_eq(pool_resize(f.pool, (uint64_t)size[i] * EXTENT, &err), KVS_OK);
        directory_resized(f.dir);
        (void)directory_step(f.dir);
        fixture_check(&f);
        (void)fixture_store(&f, f.ns, 5000 + 100 * i, 2 * PER_EXTENT, 0, 0);
        fixture_check(&f);
    }
    fixture_fini(&f);
}
