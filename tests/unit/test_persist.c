/* Blocks that outlive the process: crash points of the table's writer, and what is refused. */
#include "daemon/persist.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/directory.h"
#include "tests/support/dir_fixture.h"

/* ---- crash points ---- */

enum { POINTS = 10000, WORLDS = 10, SPACES = 6, IDS = 24, FLYING = 6, EXTENT = 16 << 10, EXTENTS = 5 };

enum what { ABSENT, PRESENT, EITHER /* a call that changes it has not returned */ };

typedef struct model {
    enum what what;
    uint32_t version; /* of the bytes */
} model;

typedef struct flying { /* admitted, not committed */
    pool_slot slot;
    uint32_t space, id;
} flying;

typedef struct world {
    persist memory;
    pool *pool;
    directory *dir;
    uint64_t x; /* random */
    uint32_t n_spaces, ns[SPACES];
    model blocks[SPACES][IDS];
    flying flying[FLYING];
    uint32_t n_flying;
    pool_slot held;
    bool closed; /* no points now */
} world;

/* The two memories as they are at a point, and what was found in them. */
typedef struct copy {
    persist memory;
    uint64_t points, adopted, present, nested;
} copy;

static world w;
static copy first, second;
static uint8_t canons[SPACES][512];
static size_t canon_lens[SPACES];

static uint64_t draw(uint64_t n)
{
    w.x = w.x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (w.x >> 33) % n;
}

static uint32_t tenant_of(uint32_t space)
{
    return 1 + space % 2;
}

static uint64_t bytes_of(uint32_t space)
{
    return space % 3 == 2 ? 2304 : 1152;
}

static void make_canons(void)
{
    for (uint32_t i = 0; i < SPACES; i++) {
        kvs_plane planes[2];
        kvs_namespace desc;
        char name[16];

        (void)snprintf(name, sizeof name, "model%u", i / 2);
        cr_assert_eq(kvs_namespace_mla(name, "w", KVS_FORMAT_mla_bf16, i % 3 == 2 ? 2 : 1, 1, planes, &desc, NULL),
                     KVS_OK);
        cr_assert_eq(kvs_namespace_encode(&desc, canons[i], sizeof canons[i], &canon_lens[i], NULL), KVS_OK);
    }
}

static void fill(uint8_t *p, uint32_t space, uint32_t id, uint32_t version, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++)
        p[i] = (uint8_t)(i * 7 + id * 31 + space * 101 + version * 57 + (i >> 8));
}

static void key_of(uint32_t space, uint32_t id, uint8_t key[32])
{
    fixture_key(1000 + id + (space % 2) * 7, key); /* the same keys in several namespaces */
}

static void on_removed(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32])
{
    (void)ud;
    (void)cause;
    (void)depth;
    for (uint32_t s = 0; type == WIRE_EVENT_REMOVED && s < w.n_spaces; s++)
        for (uint32_t id = 0; w.ns[s] == ns && id < IDS; id++) {
            uint8_t k[32];

            key_of(s, id, k);
            if (memcmp(k, key, 32) == 0)
                w.blocks[s][id].what = EITHER;
        }
}

static kvs_status create(const persist *m, void (*on_store)(void *ud), pool **p, directory **d, kvs_err *err)
{
    pool_config pc = {
        .max_bytes = EXTENT * EXTENTS, .extent_bytes = EXTENT, .memory = (persist *)(uintptr_t)m, .on_store = on_store};
    directory_config dc = {
        .evict = &evict_lru, .n_tenants = 4, .hash_seed = 5, .on_event = m == &w.memory ? on_removed : NULL};
    kvs_status s = pool_create(p, &pc, err);

    if (s != KVS_OK)
        return s;
    dc.pool = *p;
    s = directory_create(d, &dc, err);
    if (s != KVS_OK)
        pool_destroy(*p);
    return s;
}

/* ---- a copy of the memories, and its adoption ---- */

static void copy_file(int to, int from)
{
    static uint8_t buf[1 << 16];
    struct stat st;

    cr_assert_eq(fstat(from, &st), 0);
    cr_assert_eq(fallocate(to, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1 << 30), 0);
    cr_assert_eq(ftruncate(to, st.st_size), 0);
    for (off_t at = 0; (at = lseek(from, at, SEEK_DATA)) >= 0;) {
        off_t end = lseek(from, at, SEEK_HOLE);

        while (at < end) {
            ssize_t n = pread(from, buf, (size_t)(end - at) < sizeof buf ? (size_t)(end - at) : sizeof buf, at);

            cr_assert(n > 0 && pwrite(to, buf, (size_t)n, at) == n);
            at += n;
        }
    }
}

static void copy_memories(copy *c, const persist *from)
{
    if (c->memory.table_fd <= 0) {
        c->memory.arena_fd = memfd_create("arena copy", MFD_CLOEXEC);
        c->memory.table_fd = memfd_create("table copy", MFD_CLOEXEC);
        cr_assert(c->memory.arena_fd > 0 && c->memory.table_fd > 0);
    }
    c->memory.survived = true;
    copy_file(c->memory.arena_fd, from->arena_fd);
    copy_file(c->memory.table_fd, from->table_fd);
}

static void check_block(const pool *p, pool_slot slot, uint32_t space, uint32_t id, uint64_t point)
{
    static uint8_t want[2304];
    const uint8_t *have = pool_address(p, slot);

    fill(want, space, id, w.blocks[space][id].version, 0, bytes_of(space));
    cr_assert_eq(memcmp(have, want, bytes_of(space)), 0, "point %lu: wrong bytes of %u in %u", (unsigned long)point, id,
                 space);
    cr_assert_eq(XXH3_64bits(have, bytes_of(space)), pool_row_of(p, slot)->checksum);
}

/* How many of the model's blocks are there; each as it must be. */
static uint64_t check_space(const pool *p, directory *d, uint32_t space, copy *c)
{
    uint64_t n = 0;
    uint32_t ns;

    cr_assert_eq(directory_open(d, tenant_of(space), canons[space], canon_lens[space], &ns, NULL), KVS_OK);
    for (uint32_t id = 0; id < IDS; id++) {
        const model *b = &w.blocks[space][id];
        uint8_t key[32];
        pool_slot slot;
        kvs_status s;

        key_of(space, id, key);
        directory_hold(d, ns, key, 1, &s, &slot);
        cr_assert(s == KVS_OK || b->what != PRESENT, "point %lu: block %u of %u was acknowledged and is gone",
                  (unsigned long)c->points, id, space);
        cr_assert(s != KVS_OK || b->what != ABSENT, "point %lu: block %u of %u is back", (unsigned long)c->points, id,
                  space);
        c->present += b->what == PRESENT;
        if (s != KVS_OK)
            continue;
        n++;
        check_block(p, slot, space, id, c->points);
        directory_unhold(d, slot);
    }
    return n;
}

static void adopt_and_check(copy *c)
{
    kvs_err err = {0};
    directory_stats st;
    directory *d;
    uint64_t n = 0;
    pool *p;

    cr_assert_eq(create(&c->memory, NULL, &p, &d, &err), KVS_OK, "%s", err.msg);
    /* Only the first life of all finds no table: none had been made. */
    cr_assert(pool_adopted(p)->adopted || w.n_spaces == 0, "point %lu: %s", (unsigned long)c->points,
              pool_adopted(p)->why);
    cr_assert_eq(pool_adopted(p)->torn, 0);
    cr_assert_eq(directory_check(d, &err), KVS_OK, "point %lu: %s", (unsigned long)c->points, err.msg);
    directory_get_stats(d, 0, &st);
    cr_assert_eq(st.refused, 0, "point %lu: %lu rows had no namespace", (unsigned long)c->points,
                 (unsigned long)st.refused);
    for (uint32_t s = 0; s < w.n_spaces; s++)
        n += check_space(p, d, s, c);
    cr_assert_eq(st.adopted, n, "each adopted block has been looked at");
    cr_assert_eq(st.unverified, n);
    c->adopted += n;
    directory_destroy(d);
    pool_destroy(p);
}

/* The adopter is killed in turn, before its n-th store. */
static uint64_t stores_left;

static void on_nested_store(void *ud)
{
    (void)ud;
    if (stores_left > 0 && --stores_left == 0)
        copy_memories(&second, &first.memory);
}

static void adopt_and_crash(void)
{
    pool *p;
    directory *d;

    stores_left = 1 + first.points / 16 % 24;
    cr_assert_eq(create(&first.memory, on_nested_store, &p, &d, NULL), KVS_OK);
    directory_destroy(d);
    pool_destroy(p);
    if (stores_left > 0)
        return; /* it had fewer */
    first.nested++;
    second.points = first.points;
    adopt_and_check(&second);
}

static void point(void)
{
    if (w.closed || first.points >= POINTS)
        return;
    copy_memories(&first, &w.memory);
    if (++first.points % 16 == 0)
        adopt_and_crash();
    else
        adopt_and_check(&first);
}

static void on_store(void *ud)
{
    (void)ud;
    point();
}

/* ---- the writer ---- */

static void settle_removed(void)
{
    for (uint32_t s = 0; s < w.n_spaces; s++)
        for (uint32_t id = 0; id < IDS; id++)
            if (w.blocks[s][id].what == EITHER)
                w.blocks[s][id].what = ABSENT;
}

static void open_space(uint32_t space)
{
    if (space >= w.n_spaces)
        w.n_spaces = space + 1;
    cr_assert_eq(directory_open(w.dir, tenant_of(space), canons[space], canon_lens[space], &w.ns[space], NULL), KVS_OK);
}

static void usable(void)
{
    uint64_t bytes;
    void *at;

    while (pool_next_piece(w.pool, &at, &bytes))
        pool_piece_usable(w.pool);
}

/* A new life in the same memory; what was in flight is gone. */
static void restart(bool pieces)
{
    if (w.dir != NULL) {
        directory_destroy(w.dir);
        pool_destroy(w.pool);
        w.memory.survived = true;
    }
    w.n_flying = 0;
    w.held = POOL_NONE;
    cr_assert_eq(create(&w.memory, on_store, &w.pool, &w.dir, NULL), KVS_OK);
    for (uint32_t s = 0; s < w.n_spaces; s++)
        open_space(s);
    if (pieces)
        usable();
}

static void land(uint32_t i, bool good)
{
    flying f = w.flying[i];
    model *b = &w.blocks[f.space][f.id];
    uint8_t *at = pool_address(w.pool, f.slot);
    uint64_t n = bytes_of(f.space);

    w.flying[i] = w.flying[--w.n_flying];
    b->version++;
    fill(at, f.space, f.id, b->version, 0, n / 2);
    if (draw(4) == 0)
        point(); /* half of it */
    fill(at, f.space, f.id, b->version, n / 2, n);
    if (!good) {
        directory_abort(w.dir, f.slot);
        return;
    }
    b->what = EITHER;
    if (directory_commit(w.dir, f.slot, XXH3_64bits(at, n)) == KVS_OK)
        b->what = PRESENT;
}

static void store(void)
{
    uint32_t space = (uint32_t)draw(SPACES), id = (uint32_t)draw(IDS - 3), n = 1 + (uint32_t)draw(3);
    uint8_t keys[3][32], parent[32];
    kvs_status status[3];
    pool_slot slot[3];

    if (n > FLYING - w.n_flying)
        n = FLYING - w.n_flying;
    open_space(space);
    for (uint32_t i = 0; i < n; i++)
        key_of(space, id + i, keys[i]);
    key_of(space, id > 0 ? id - 1 : 0, parent);
    directory_admit(w.dir, w.ns[space], id, parent, keys[0], n, status, slot);
    for (uint32_t i = 0; i < n; i++)
        if (status[i] == KVS_OK)
            w.flying[w.n_flying++] = (flying){slot[i], space, id + i};
    while (w.n_flying > draw(FLYING))
        land((uint32_t)draw(w.n_flying), draw(8) != 0);
}

/* A reader that makes a drop drain. */
static void hold(void)
{
    uint32_t space = (uint32_t)draw(w.n_spaces);
    uint8_t key[32];
    kvs_status s;

    if (w.held != POOL_NONE) {
        directory_unhold(w.dir, w.held);
        w.held = POOL_NONE;
        return;
    }
    key_of(space, (uint32_t)draw(IDS), key);
    directory_hold(w.dir, w.ns[space], key, 1, &s, &w.held);
}

static bool is_flying(uint32_t space, uint32_t id)
{
    for (uint32_t i = 0; i < w.n_flying; i++)
        if (w.flying[i].space == space && w.flying[i].id == id)
            return true;
    return false;
}

static void drop(void)
{
    uint32_t space = (uint32_t)draw(w.n_spaces), id = (uint32_t)draw(IDS);
    uint8_t key[32];

    key_of(space, id, key);
    if (!is_flying(space, id))
        (void)directory_drop(w.dir, w.ns[space], key);
}

static void reset(void)
{
    uint32_t space = (uint32_t)draw(w.n_spaces);
    directory_reset_result r;

    if (w.n_flying > 0)
        return;
    for (uint32_t id = 0; id < IDS; id++)
        w.blocks[space][id].what = w.blocks[space][id].what == PRESENT ? EITHER : ABSENT;
    fixture_reset(w.dir, tenant_of(space), w.ns[space], true, &r);
}

static void step(void)
{
    uint64_t what = draw(32);

    if (what < 2)
        restart(draw(2) != 0);
    else if (what < 24 || w.n_spaces == 0)
        store();
    else if (what < 26)
        hold();
    else if (what < 29)
        drop();
    else if (what < 30)
        usable();
    else if (what < 31)
        while (directory_step(w.dir))
            ;
    else
        reset();
    settle_removed();
}

static void run_world(uint64_t seed)
{
    memset(&w, 0, sizeof w);
    w.x = seed;
    w.held = POOL_NONE;
    cr_assert_eq(persist_open(&w.memory, "", -1, -1, NULL), KVS_OK);
    restart(true);
    while (first.points < POINTS / WORLDS * seed)
        step();
    w.closed = true;
    cr_assert_eq(directory_check(w.dir, NULL), KVS_OK);
    directory_destroy(w.dir);
    pool_destroy(w.pool);
    persist_close(&w.memory);
}

Test(persist, finds_every_acknowledged_block_and_no_wrong_one_after_a_crash_at_any_store)
{
    make_canons();
    for (uint64_t seed = 1; seed <= WORLDS; seed++)
        run_world(seed);
    cr_assert_eq(first.points, POINTS);
    cr_assert_gt(first.adopted, POINTS); /* else nothing was proven */
    cr_assert_gt(first.nested, 100);
    (void)fprintf(stderr,
                  "persist: %lu crash points, %lu blocks adopted, %lu of them due, %lu crashes of the adopter\n",
                  (unsigned long)first.points, (unsigned long)first.adopted, (unsigned long)first.present,
                  (unsigned long)first.nested);
}
