/* The pool begins, in new memory or in that of an earlier life, and ends. */
#include "daemon/pool_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* An eighth of the pool within 64..256 MiB; then as much more as spreads the remainder, so that little is cut
 * off. */
static uint64_t default_extent_bytes(uint64_t max_bytes)
{
    uint64_t want = max_bytes / 8;

    if (want < MIB(64))
        want = MIB(64);
    if (want > MIB(256))
        want = MIB(256);
    return want >= max_bytes ? max_bytes : max_bytes / (max_bytes / want);
}

static uint32_t reserved_extents(const pool_config *c, uint64_t extent_bytes, uint64_t rows, uint64_t at_least)
{
    uint64_t n = c->reserve_bytes / extent_bytes;

    if (n > MAX_EXTENTS)
        n = MAX_EXTENTS;
    if (n > (POOL_NONE - 1) / rows)
        n = (POOL_NONE - 1) / rows;
    return (uint32_t)(n > at_least ? n : at_least);
}

static kvs_status choose_sizes(pool *p, const pool_config *c, kvs_err *err)
{
    uint64_t bytes = c->extent_bytes != 0 ? c->extent_bytes : default_extent_bytes(c->max_bytes);
    uint64_t n, rows;

    bytes &= ~UINT64_C(4095);
    if (bytes == 0 || c->max_bytes < bytes)
        return kvs_fail(err, KVS_E_LIMIT, "pool.max_bytes: %llu bytes hold no extent of %llu bytes (at least 4096)",
                        ULL(c->max_bytes), ULL(bytes));
    n = c->max_bytes / bytes;
    rows = bytes / POOL_SLOT_MIN_BYTES; /* of an extent */
    if (n > MAX_EXTENTS)
        return kvs_fail(err, KVS_E_LIMIT, "pool.extent_bytes: %llu bytes make %llu extents of %llu, at most %d may be",
                        ULL(bytes), ULL(n), ULL(c->max_bytes), MAX_EXTENTS);
    if (rows > POOL_NONE - 1 || n > (POOL_NONE - 1) / rows)
        return kvs_fail(err, KVS_E_LIMIT, "pool.max_bytes: %llu needs slot numbers above %lu; it must be below 4 TiB",
                        ULL(c->max_bytes), (unsigned long)(POOL_NONE - 1));
    p->extent_bytes = bytes;
    p->rows_per_extent = (uint32_t)rows;
    p->n_limit = (uint32_t)n;
    p->n_extents = reserved_extents(c, bytes, rows, n);
    p->max_slots = c->max_slots;
    return KVS_OK;
}

static table_geometry geometry_of(const pool *p)
{
    return (table_geometry){.extent_bytes = p->extent_bytes,
                            .n_extents = p->n_extents,
                            .max_slots = p->max_slots,
                            .row_bytes = sizeof(pool_row),
                            .rows_per_extent = p->rows_per_extent};
}

/* The sizes are chosen: is the earlier life's table of the same shape, or of one that only grew? */
static bool fits(const pool *p, const table_geometry *had, char why[KVS_ERR_MSG_BYTES])
{
    const struct {
        const char *what;
        uint64_t found, wanted;
    } same[] = {{"row bytes", had->row_bytes, sizeof(pool_row)},
                {"extent bytes", had->extent_bytes, p->extent_bytes},
                {"max_slots", had->max_slots, p->max_slots},
                {"extents", had->n_extents, had->n_extents <= p->n_extents ? had->n_extents : p->n_extents}};

    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++)
        if (same[i].found != same[i].wanted) {
            (void)snprintf(why, KVS_ERR_MSG_BYTES, "%s: found %llu, wanted %llu", same[i].what, ULL(same[i].found),
                           ULL(same[i].wanted));
            return false;
        }
    return true;
}

/* With no size of extents asked for, the one that the blocks are in will do.  A pool that is smaller now keeps it, too. */
static void keep_extent_size(pool_config *c, const table_geometry *had)
{
    if (c->extent_bytes == 0 && had->extent_bytes != 0 && had->extent_bytes <= c->max_bytes &&
        c->max_bytes / had->extent_bytes <= MAX_EXTENTS)
        c->extent_bytes = had->extent_bytes;
}

static kvs_status map_arena(pool *p, kvs_err *err)
{
    uint64_t bytes = p->extent_bytes * p->n_extents;
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, p->memory->arena_fd, 0);

    if (m == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, "arena: cannot map %llu bytes: %s", ULL(bytes), strerror(errno));
    p->arena = m;
    if (madvise(m, bytes, MADV_DONTDUMP) != 0)
        return kvs_fail(err, KVS_E_SYS, "arena: MADV_DONTDUMP: %s", strerror(errno));
    return KVS_OK;
}

/* The table and the arena, empty: what was in them is given back or used again before anything new is taken. */
static kvs_status map_memory(pool *p, bool keep, kvs_err *err)
{
    table_geometry g = geometry_of(p);
    kvs_status s = persist_fit(p->memory, p->extent_bytes * p->n_extents, table_bytes(&g), keep, err);

    if (s == KVS_OK)
        s = table_open(&p->table, p->memory, &g, keep, err);
    return s;
}

static kvs_status open_memory(pool *p, const pool_config *config, kvs_err *err)
{
    pool_config c = *config;
    table_geometry had = {0};
    bool keep;
    kvs_status s;

    if (c.memory == NULL && (s = persist_open(&p->own, "", -1, -1, err)) != KVS_OK)
        return s;
    p->memory = c.memory != NULL ? c.memory : &p->own;
    keep = table_peek(p->memory, &had, p->adoption.why);
    if (keep)
        keep_extent_size(&c, &had);
    if ((s = choose_sizes(p, &c, err)) != KVS_OK)
        return s;
    if (keep && had.extent_bytes == p->extent_bytes && had.n_extents > p->n_extents)
        p->n_extents = had.n_extents; /* a pool that is smaller now keeps what lies within its size */
    keep = keep && fits(p, &had, p->adoption.why);
    if ((s = map_memory(p, keep, err)) != KVS_OK || !keep)
        return s;
    p->n_adoptable = had.n_extents;
    return KVS_OK;
}

/* The table does not verify: begin anew in the same memory. */
static kvs_status begin_anew(pool *p, kvs_err *err)
{
    table_close(&p->table);
    return map_memory(p, false, err);
}

static kvs_status make_books(pool *p, kvs_err *err)
{
    p->extents = calloc(p->n_extents, sizeof *p->extents);
    if (p->extents == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pool: no memory for %lu extents", (unsigned long)p->n_extents);
    for (uint32_t e = 0; e < p->n_extents; e++)
        p->extents[e].layout = POOL_NONE;
    return sparse_init(&p->links, -1, pool_max_rows(p), sizeof(uint32_t), err);
}

/* Memory that an earlier life had and this one may not use. */
static void give_back_above(const pool *p)
{
    off_t from = (off_t)(p->n_limit * p->extent_bytes), end = (off_t)pool_reserved(p);

    if (from < end)
        (void)fallocate(p->memory->arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, end - from);
}

kvs_status pool_create(pool **ret, const pool_config *c, kvs_err *err)
{
    pool *p = calloc(1, sizeof *p);
    kvs_status s;

    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pool: no memory for %zu bytes", sizeof *p);
    p->own.arena_fd = p->own.table_fd = -1;
    p->unassigned = POOL_NONE;
    p->table.on_store = c->on_store;
    p->table.ud = c->ud;
    s = open_memory(p, c, err);
    if (s == KVS_OK)
        s = map_arena(p, err);
    if (s == KVS_OK)
        s = make_books(p, err);
    if (s == KVS_OK && p->n_adoptable > 0) {
        pool_adopt(p);
        if (!p->adoption.adopted)
            s = begin_anew(p, err);
    }
    if (s != KVS_OK) {
        pool_destroy(p);
        return s;
    }
    give_back_above(p);
    p->adoption.boots = p->table.head.boots;
    *ret = p;
    return KVS_OK;
}

void pool_destroy(pool *p)
{
    if (p == NULL)
        return;
    table_close(&p->table);
    sparse_fini(&p->links);
    if (p->arena != NULL)
        (void)munmap(p->arena, p->extent_bytes * p->n_extents);
    persist_close(&p->own);
    free(p->extents);
    free(p);
}

const pool_adoption *pool_adopted(const pool *p)
{
    return &p->adoption;
}

int pool_arena_fd(const pool *p)
{
    return p->memory->arena_fd;
}

int pool_table_fd(const pool *p)
{
    return p->memory->table_fd;
}
