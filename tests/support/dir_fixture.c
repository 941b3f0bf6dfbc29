#include "tests/support/dir_fixture.h"

#include <criterion/criterion.h>
#include <string.h>

#include "proto/layout.h"

static void on_event(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32])
{
    fixture *f = ud;

    f->last[f->n_events++ % 64] =
        (fixture_event){.type = type, .cause = cause, .ns = ns, .depth = depth, .id = fixture_id(key)};
}

static uint64_t n_victims, n_touches;

static void counted_touch(evict *e, uint32_t layout, pool_slot s, uint64_t stamp)
{
    n_touches++;
    evict_lru.touch(e, layout, s, stamp);
}

static pool_slot counted_victim(const evict *e, uint32_t layout, pool_slot after, uint64_t *ret_stamp)
{
    n_victims++;
    return evict_lru.victim(e, layout, after, ret_stamp);
}

static void init(fixture *f, const pool_config *c, uint32_t n_tenants, const evict_ops *policy)
{
    kvs_err err = {0};
    uint64_t bytes;
    void *at;
    directory_config dc;

    memset(f, 0, sizeof *f);
    cr_assert_eq(pool_create(&f->pool, c, &err), KVS_OK, "%s", err.msg);
    while (pool_next_piece(f->pool, &at, &bytes))
        pool_piece_usable(f->pool);
    dc = (directory_config){
        .pool = f->pool, .evict = policy, .n_tenants = n_tenants, .hash_seed = 0x5eed, .on_event = on_event, .ud = f};
    cr_assert_eq(directory_create(&f->dir, &dc, &err), KVS_OK, "%s", err.msg);
    f->ns = fixture_open(f, n_tenants > 1, "model", 2);
}

void fixture_init_with(fixture *f, const pool_config *c)
{
    init(f, c, FIXTURE_TENANTS, &evict_lru);
}

void fixture_init_counted(fixture *f, const pool_config *c)
{
    static evict_ops counted;

    counted = evict_lru;
    counted.victim = counted_victim;
    counted.touch = counted_touch;
    n_victims = n_touches = 0;
    init(f, c, FIXTURE_TENANTS, &counted);
}

uint64_t fixture_victims(void)
{
    return n_victims;
}

uint64_t fixture_touches(void)
{
    return n_touches;
}

static pool_config blocks(uint32_t n_blocks, uint32_t per_extent)
{
    uint64_t extent = ((uint64_t)per_extent * FIXTURE_SLOT_BYTES + 4095) & ~UINT64_C(4095);
    uint32_t n_extents = (n_blocks + per_extent - 1) / per_extent + 1; /* rounding up may let one more fit in each */

    return (pool_config){.max_bytes = extent * n_extents, .extent_bytes = extent, .max_slots = n_blocks};
}

void fixture_init(fixture *f, uint32_t n_blocks, uint32_t per_extent)
{
    pool_config c = blocks(n_blocks, per_extent);

    init(f, &c, FIXTURE_TENANTS, &evict_lru);
}

void fixture_init_alone(fixture *f, uint32_t n_blocks, uint32_t per_extent)
{
    pool_config c = blocks(n_blocks, per_extent);

    init(f, &c, 1, &evict_lru);
}

void fixture_fini(fixture *f)
{
    fixture_check(f);
    directory_destroy(f->dir);
    pool_destroy(f->pool);
}

uint32_t fixture_open(fixture *f, uint32_t tenant, const char *model, uint32_t layers)
{
    static kvs_plane planes[KVS_MAX_PLANES];
    static uint8_t canon[128 * 1024];
    kvs_namespace desc;
    kvs_err err = {0};
    size_t len = 0;
    uint32_t ns = 0;

    cr_assert_eq(kvs_namespace_mla(model, "w", KVS_FORMAT_mla_bf16, layers, 1, planes, &desc, &err), KVS_OK, "%s",
                 err.msg);
    cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(directory_open(f->dir, tenant, canon, len, &ns, &err), KVS_OK, "%s", err.msg);
    return ns;
}

void fixture_key(uint64_t id, uint8_t key[32])
{
    uint64_t x = id;

    for (int i = 0; i < 4; i++) {
        memcpy(key + i * 8, &x, 8);
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    }
}

uint64_t fixture_id(const uint8_t key[32])
{
    uint64_t id;

    memcpy(&id, key, 8);
    return id;
}

const uint8_t *fixture_keys(uint64_t first, uint32_t n)
{
    static uint8_t keys[FIXTURE_MAX_LIST][32];

    cr_assert(n <= FIXTURE_MAX_LIST);
    for (uint32_t i = 0; i < n; i++)
        fixture_key(first + i, keys[i]);
    return keys[0];
}

void fixture_admit(fixture *f, uint32_t ns, uint64_t first, uint32_t n, uint32_t first_depth, uint64_t parent)
{
    uint8_t above[32] = {0};

    if (parent != 0)
        fixture_key(parent, above);
    directory_admit(f->dir, ns, first_depth, above, fixture_keys(first, n), n, f->status, f->slot);
}

uint32_t fixture_store(fixture *f, uint32_t ns, uint64_t first, uint32_t n, uint32_t first_depth, uint64_t parent)
{
    uint32_t stored = 0;

    fixture_admit(f, ns, first, n, first_depth, parent);
    for (uint32_t i = 0; i < n; i++)
        if (f->status[i] == KVS_OK) {
            cr_assert_eq(directory_commit(f->dir, f->slot[i], first + i), KVS_OK);
            stored++;
        }
    return stored;
}

uint32_t fixture_lookup(fixture *f, uint32_t ns, uint64_t first, uint32_t n)
{
    return directory_lookup(f->dir, ns, fixture_keys(first, n), n, NULL);
}

bool fixture_has(fixture *f, uint32_t ns, uint64_t id)
{
    return fixture_lookup(f, ns, id, 1) == 1;
}

kvs_status fixture_hold(fixture *f, uint32_t ns, uint64_t id, pool_slot *ret)
{
    kvs_status s;

    directory_hold(f->dir, ns, fixture_keys(id, 1), 1, &s, ret);
    return s;
}

kvs_status fixture_load(fixture *f, uint32_t ns, uint64_t id)
{
    pool_slot slot;
    kvs_status s = fixture_hold(f, ns, id, &slot);

    if (s == KVS_OK)
        directory_unhold(f->dir, slot);
    return s;
}

kvs_status fixture_reserve(fixture *f, uint32_t ns, uint64_t first, uint32_t n, uint64_t owner, uint32_t ttl_ms,
                           directory_lease *ret)
{
    return directory_reserve(f->dir, directory_namespace(f->dir, ns)->tenant, owner, &ns, 1, fixture_keys(first, n), n,
                             1, ttl_ms, f->now_us, UINT64_MAX, ret, NULL);
}

directory_stats fixture_stats(const fixture *f)
{
    directory_stats st;

    directory_get_stats(f->dir, f->now_us, &st);
    return st;
}

void fixture_check(const fixture *f)
{
    kvs_err err = {0};

    cr_assert_eq(directory_check(f->dir, &err), KVS_OK, "%s", err.msg);
}

void fixture_reset(directory *d, uint32_t tenant, uint32_t ns, bool pinned_too, directory_reset_result *ret)
{
    directory_sweep w = {.tenant = tenant, .ns = ns, .pinned_too = pinned_too};
    uint32_t budget = UINT32_MAX;

    directory_reset_begin(d, &w);
    while (directory_reset_step(d, &w, &budget))
        ;
    directory_reset_end(d, &w);
    *ret = w.sum;
}
