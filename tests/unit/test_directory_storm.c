/* Everything at once, at random: tenants with quotas and floors, three layouts, another size, restarts.  No model says what
 * must be there; after each step the books are recounted, and what tenants were promised is looked at. */
#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/persist.h"
#include "tests/support/dir_fixture.h"
#include "tests/support/random.h"

enum {
    EXTENT = 16 << 10,
    EXTENTS = 12,
    MOST_EXTENTS = 20,
    N_NS = 7,
    KEYS = 60, /* of each namespace */
    N_OPEN = 48,
    LIST = 12,
    SWEEPS = 3,
};

typedef struct copy {
    pool_slot slot;
    bool suspect;
} copy;

static struct storm {
    fixture f;
    persist memory;
    uint32_t ns[N_NS], n_extents;
    copy write[N_OPEN], read[N_OPEN];
    uint32_t n_write, n_read;
    uint8_t lease[N_OPEN][16];
    uint32_t lease_ns[N_OPEN], n_lease;
    directory_sweep sweep[SWEEPS];
    uint32_t n_sweep;
    uint64_t pieces[MOST_EXTENTS]; /* bytes of each */
    uint32_t n_pieces;
    directory_stats sums; /* of the lives that are over: whether anything happened */
} x;

static rnd random_numbers;

static uint32_t below(uint32_t n)
{
    return (uint32_t)rnd_below(&random_numbers, n);
}

static uint32_t tenant_of(uint32_t ns)
{
    return directory_namespace(x.f.dir, ns)->tenant;
}

static void open_all(void)
{
    static const uint32_t layers[N_NS] = {1, 2, 3, 1, 1, 3, 2}; /* numbers 0 and 4 are of one tenant and layout */

    for (uint32_t i = 0; i < N_NS; i++)
        x.ns[i] = fixture_open(&x.f, i % FIXTURE_TENANTS, i < FIXTURE_TENANTS ? "model" : "other", layers[i]);
}

static void on_event(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32])
{
    (void)ud;
    (void)type;
    (void)cause;
    (void)depth;
    (void)key;
    cr_assert_not_null(directory_namespace(x.f.dir, ns));
}

/* A life begins: with what the one before left, if there was one; its memory is not usable yet. */
static void begin_life(void)
{
    pool_config c = {.max_bytes = (uint64_t)x.n_extents * EXTENT,
                     .extent_bytes = EXTENT,
                     .reserve_bytes = MOST_EXTENTS * EXTENT,
                     .memory = &x.memory};
    directory_config d = {.evict = &evict_lru, .n_tenants = FIXTURE_TENANTS, .hash_seed = 7, .on_event = on_event};
    kvs_err err = {0};

    cr_assert_eq(pool_create(&x.f.pool, &c, &err), KVS_OK, "%s", err.msg);
    d.pool = x.f.pool;
    cr_assert_eq(directory_create(&x.f.dir, &d, &err), KVS_OK, "%s", err.msg);
    x.n_write = x.n_read = x.n_lease = x.n_pieces = x.n_sweep = 0;
    open_all();
    fixture_check(&x.f);
}

static void grow(void)
{
    uint64_t bytes;
    void *at;

    if (!pool_next_piece(x.f.pool, &at, &bytes))
        return;
    pool_piece_usable(x.f.pool);
    x.pieces[x.n_pieces++] = bytes;
}

static void end_life(void)
{
    const directory_stats st = fixture_stats(&x.f);

    x.sums.adopted += st.adopted;
    x.sums.evicted += st.evicted;
    x.sums.rebound += st.rebound;
    x.sums.dropped += st.dropped;
    x.sums.no_space += st.no_space;
    directory_destroy(x.f.dir);
    pool_destroy(x.f.pool);
    x.memory.survived = true;
}

/* ---- steps ---- */

static bool is_any_closing(void)
{
    bool any = false;

    for (uint32_t e = 0; e < pool_n_extents(x.f.pool); e++) {
        bool closing = false;

        any = any || (pool_extent_layout(x.f.pool, e, NULL, NULL, &closing) != POOL_NONE && closing);
    }
    return any;
}

static void is_in_use(void *ud, const directory_key_info *k)
{
    uint32_t e = pool_extent_of(x.f.pool, k->slot);
    bool closing = false;

    (void)ud;
    (void)pool_extent_layout(x.f.pool, e, NULL, NULL, &closing);
    cr_assert(k->state != POOL_READY || k->holds != 0 || k->leases != 0 || k->pinned || closing ||
                  !pool_extent_usable(x.f.pool, e),
              "slot %u could have gone", k->slot);
}

/* A tenant within its quota was refused: nothing of its own could have gone. */
static void check_refusal(uint32_t ns, uint32_t n)
{
    uint32_t other = ns == x.ns[0] ? x.ns[4] : ns == x.ns[4] ? x.ns[0] : WIRE_NONE32;
    const directory_ns *d = directory_namespace(x.f.dir, ns);
    directory_tenant t;

    directory_get_tenant(x.f.dir, d->tenant, &t);
    if (other == WIRE_NONE32 || x.f.status[n - 1] != KVS_E_NO_SPACE || t.used_bytes + d->slot_bytes > t.quota_bytes)
        return;
    cr_assert_eq(directory_each_key(x.f.dir, other, 0, UINT32_MAX, is_in_use, NULL), UINT64_MAX);
}

/* Nobody loses what its floor keeps to another's store, but for what is going anyway, and nobody gets above its quota by its
 * own. */
static void store_some(uint32_t ns)
{
    uint32_t first = below(KEYS), n = 1 + below(LIST), me = tenant_of(ns);
    directory_tenant before[FIXTURE_TENANTS], after;
    bool closing = is_any_closing();

    if (x.n_write + n > N_OPEN)
        return;
    for (uint32_t t = 0; t < FIXTURE_TENANTS; t++)
        directory_get_tenant(x.f.dir, t, &before[t]);
    fixture_admit(&x.f, ns, 1 + first, n, first, first);
    for (uint32_t i = 0; i < n; i++)
        if (x.f.status[i] == KVS_OK)
            x.write[x.n_write++] = (copy){.slot = x.f.slot[i]};
    for (uint32_t t = 0; t < FIXTURE_TENANTS; t++) {
        directory_get_tenant(x.f.dir, t, &after);
        if (t != me && !closing && after.used_bytes < before[t].used_bytes)
            cr_assert_geq(after.used_bytes, after.floor_bytes, "tenant %u had %lu", t,
                          (unsigned long)before[t].used_bytes);
        if (t == me && after.used_bytes > before[t].used_bytes)
            cr_assert_leq(after.used_bytes, after.quota_bytes);
    }
    check_refusal(ns, n);
}

static void end_write(void)
{
    uint32_t at = x.n_write > 0 ? below(x.n_write) : 0, how = below(8);
    copy *c = &x.write[at];

    if (x.n_write == 0)
        return;
    if (how == 0 && !c->suspect) {
        directory_suspect(x.f.dir, c->slot);
        c->suspect = true;
        return;
    }
    if (c->suspect)
        directory_settle(x.f.dir, c->slot);
    else if (how == 1)
        directory_abort(x.f.dir, c->slot);
    else
        (void)directory_commit(x.f.dir, c->slot, 1 + below(1000));
    *c = x.write[--x.n_write];
}

static void add_read(pool_slot s)
{
    x.read[x.n_read++] = (copy){.slot = s};
}

static void read_some(uint32_t ns)
{
    kvs_status status[LIST];
    pool_slot slot[LIST];
    uint32_t n = 1 + below(LIST);

    if (x.n_read + n > N_OPEN)
        return;
    directory_hold(x.f.dir, ns, fixture_keys(1 + below(KEYS), n), n, status, slot);
    for (uint32_t i = 0; i < n; i++)
        if (status[i] == KVS_OK)
            add_read(slot[i]);
}

static void end_read(void)
{
    uint32_t at = x.n_read > 0 ? below(x.n_read) : 0;
    copy *c = &x.read[at];

    if (x.n_read == 0)
        return;
    if (below(8) == 0 && !c->suspect) {
        directory_suspect(x.f.dir, c->slot);
        c->suspect = true;
        return;
    }
    if (below(4) == 0)
        directory_verified(x.f.dir, c->slot);
    if (c->suspect)
        directory_settle(x.f.dir, c->slot);
    else
        directory_unhold(x.f.dir, c->slot);
    *c = x.read[--x.n_read];
}

static void reserve_some(uint32_t i)
{
    directory_lease l;
    uint32_t ns[2] = {x.ns[i], x.ns[(i + FIXTURE_TENANTS) % N_NS]}, n_ns = tenant_of(ns[0]) == tenant_of(ns[1]) ? 2 : 1;

    if (ns[0] == ns[1] || x.n_lease == N_OPEN)
        return;
    if (directory_reserve(x.f.dir, tenant_of(ns[0]), below(3), ns, n_ns, fixture_keys(1 + below(KEYS), LIST), LIST,
                          1 + below(3), 1 + below(50), x.f.now_us, 256 << 10, &l, NULL) != KVS_OK ||
        l.n_leased == 0)
        return;
    memcpy(x.lease[x.n_lease], l.id, 16);
    x.lease_ns[x.n_lease++] = ns[below(n_ns)];
}

/* Used, or given back, though it may be gone; by the wrong tenant now and then. */
static void use_lease(void)
{
    uint32_t at = x.n_lease > 0 ? below(x.n_lease) : 0, t;
    pool_slot slot[LIST];
    uint32_t n = below(3);

    if (x.n_lease == 0 || x.n_read + n > N_OPEN)
        return;
    t = below(9) == 0 ? below(FIXTURE_TENANTS) : tenant_of(x.lease_ns[at]);
    if (below(2) == 0) {
        (void)directory_release(x.f.dir, t, x.lease[at], NULL);
        memcpy(x.lease[at], x.lease[--x.n_lease], 16);
        x.lease_ns[at] = x.lease_ns[x.n_lease];
    } else if (directory_lease_hold(x.f.dir, t, x.lease[at], x.lease_ns[at], below(3), n, slot, NULL) == KVS_OK) {
        for (uint32_t i = 0; i < n; i++)
            add_read(slot[i]);
    }
}

/* A new pin leaves the others what they pinned or were promised, whichever is more. */
static void pin_one(uint32_t ns, const uint8_t key[32])
{
    directory_tenant mine, other;
    uint64_t before, kept = 0, floors = 0;
    pool_bytes b;

    directory_get_tenant(x.f.dir, tenant_of(ns), &mine);
    before = mine.pinned_bytes;
    (void)directory_pin(x.f.dir, ns, key);
    directory_get_tenant(x.f.dir, tenant_of(ns), &mine);
    for (uint32_t t = 0; t < FIXTURE_TENANTS; t++) {
        directory_get_tenant(x.f.dir, t, &other);
        floors += other.floor_bytes;
        if (t != tenant_of(ns))
            kept += other.pinned_bytes > other.floor_bytes ? other.pinned_bytes : other.floor_bytes;
    }
    pool_get_bytes(x.f.pool, &b);
    if (mine.pinned_bytes > before && floors > 0)
        cr_assert_leq(mine.pinned_bytes + kept, b.max);
}

static void limit_one(void)
{
    uint64_t quota = below(3) == 0 ? 0 : (uint64_t)(1 + below(8)) * EXTENT;
    uint64_t floor = below(2) == 0 ? 0 : below(3) * (uint64_t)EXTENT;

    directory_limit_tenant(x.f.dir, below(FIXTURE_TENANTS), quota, quota != 0 && floor > quota ? quota : floor);
}

static void resize(void)
{
    x.n_extents = 3 + below(MOST_EXTENTS - 2);
    cr_assert_eq(pool_resize(x.f.pool, (uint64_t)x.n_extents * EXTENT, NULL), KVS_OK);
    directory_resized(x.f.dir);
}

static void drop_piece(void)
{
    void *at;

    if (x.n_pieces > 1 && pool_drop_piece(x.f.pool, x.pieces[x.n_pieces - 1], &at))
        x.n_pieces--;
}

static void reset_some(uint32_t ns)
{
    directory_reset_result r;
    uint32_t t = tenant_of(ns), how = below(6);

    fixture_reset(x.f.dir, how == 0 ? WIRE_NONE32 : t, how < 3 ? WIRE_NONE32 : ns, below(2) == 0, &r);
}

static void begin_sweep(uint32_t ns)
{
    uint32_t t = tenant_of(ns), how = below(6);
    directory_sweep *w = &x.sweep[x.n_sweep];

    if (x.n_sweep == SWEEPS)
        return;
    *w = (directory_sweep){
        .tenant = how == 0 ? WIRE_NONE32 : t, .ns = how < 3 ? WIRE_NONE32 : ns, .pinned_too = below(2) == 0};
    directory_reset_begin(x.f.dir, w);
    x.n_sweep++;
}

/* Some are given up in the middle. */
static void go_on_sweeping(void)
{
    uint32_t i = below(SWEEPS), budget = below(8);

    if (i >= x.n_sweep || (directory_reset_step(x.f.dir, &x.sweep[i], &budget) && below(20) > 0))
        return;
    directory_reset_end(x.f.dir, &x.sweep[i]);
    x.sweep[i] = x.sweep[--x.n_sweep];
}

static void one_step(void)
{
    uint32_t i = below(N_NS), ns = x.ns[i], how = below(100);
    const uint8_t *key = fixture_keys(1 + below(KEYS), 1);

    x.f.now_us += below(200);
    if (below(4) == 0)
        go_on_sweeping();
    if (how < 25)
        store_some(ns);
    else if (how < 45)
        end_write();
    else if (how < 55)
        read_some(ns);
    else if (how < 67)
        end_read();
    else if (how < 73)
        reserve_some(i);
    else if (how < 80)
        use_lease();
    else if (how < 83)
        pin_one(ns, key);
    else if (how < 90)
        (void)directory_unpin(x.f.dir, ns, key);
    else if (how < 92)
        (void)directory_drop(x.f.dir, ns, key);
    else if (how == 92 && below(3) == 0)
        reset_some(ns);
    else if (how == 92)
        begin_sweep(ns);
    else if (how == 93)
        limit_one();
    else if (how == 94 && below(3) == 0)
        resize();
    else if (how == 95)
        grow();
    else if (how == 96)
        (void)directory_expire(x.f.dir, x.f.now_us);
    else if (how == 97)
        directory_owner_gone(x.f.dir, below(3));
    else if (how == 98)
        (void)directory_step(x.f.dir);
    else
        drop_piece();
}

/* Nothing is in flight, leased or pinned any more: everything may go, and then all memory is there again. */
static void come_to_rest(void)
{
    directory_reset_result r;
    pool_bytes b;

    while (x.n_write > 0)
        end_write();
    while (x.n_read > 0)
        end_read();
    for (uint32_t t = 0; t < FIXTURE_TENANTS; t++)
        directory_limit_tenant(x.f.dir, t, 0, 0);
    while (x.n_sweep > 0)
        go_on_sweeping();
    fixture_reset(x.f.dir, WIRE_NONE32, WIRE_NONE32, true, &r);
    while (directory_step(x.f.dir))
        ;
    fixture_check(&x.f);
    pool_get_bytes(x.f.pool, &b);
    cr_assert_eq(b.unassigned + b.waste + b.free, b.arena);
    cr_assert_eq(b.giving_up, 0);
    for (uint32_t t = 0; t < FIXTURE_TENANTS; t++) {
        directory_tenant d;

        directory_get_tenant(x.f.dir, t, &d);
        cr_assert(d.used_bytes == 0 && d.pinned_bytes == 0 && d.leased_bytes == 0 && d.n_leases == 0 && d.n_ready == 0);
    }
    cr_assert_eq(fixture_stats(&x.f).n_held, 0);
}

Test(directory_storm, the_books_are_right_after_each_step_of_several_lives)
{
    enum { LIVES = 40, STEPS = 1200 };

    random_numbers = rnd_open("directory_storm", 1);
    x.n_extents = EXTENTS;
    cr_assert_eq(persist_open(&x.memory, "", -1, -1, NULL), KVS_OK);
    for (int life = 0; life < LIVES; life++) {
        begin_life();
        for (int i = 0; i < STEPS; i++) {
            one_step();
            fixture_check(&x.f);
        }
        if (life % 3 == 2)
            come_to_rest();
        end_life();
    }
    persist_close(&x.memory);
    cr_assert(x.sums.adopted > 50 && x.sums.evicted > 100 && x.sums.rebound > 100 && x.sums.dropped > 100 &&
                  x.sums.no_space > 100,
              "adopted %lu, evicted %lu, rebound %lu, dropped %lu, no space %lu", (unsigned long)x.sums.adopted,
              (unsigned long)x.sums.evicted, (unsigned long)x.sums.rebound, (unsigned long)x.sums.dropped,
              (unsigned long)x.sums.no_space);
}
