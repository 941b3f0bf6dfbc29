#include "daemon/pool_impl.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#define MIB(n) ((uint64_t)(n) << 20)
#define ULL(n) ((unsigned long long)(n))

/* ---- create and destroy ---- */

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

/* ---- lists of extents ---- */

static void list_push(pool *p, uint32_t *head, uint32_t e)
{
    p->extents[e].prev = POOL_NONE;
    p->extents[e].next = *head;
    if (*head != POOL_NONE)
        p->extents[*head].prev = e;
    *head = e;
}

static void list_remove(pool *p, uint32_t *head, uint32_t e)
{
    extent *x = &p->extents[e];

    if (x->prev != POOL_NONE)
        p->extents[x->prev].next = x->next;
    else
        *head = x->next;
    if (x->next != POOL_NONE)
        p->extents[x->next].prev = x->prev;
}

/* ---- pieces ---- */

static uint32_t next_piece_extents(const pool *p)
{
    uint64_t n = (p->n_usable == 0 ? MIB(256) : MIB(1024)) / p->extent_bytes;
    uint32_t left = p->n_limit > p->n_usable ? p->n_limit - p->n_usable : 0;

    if (n == 0)
        n = 1;
    return n < left ? (uint32_t)n : left;
}

bool pool_next_piece(const pool *p, void **ret_address, uint64_t *ret_bytes)
{
    if (p->stopped || p->n_usable >= p->n_limit)
        return false;
    *ret_address = p->arena + p->extent_bytes * p->n_usable;
    *ret_bytes = p->extent_bytes * next_piece_extents(p);
    return true;
}

void pool_piece_usable(pool *p)
{
    uint32_t n = next_piece_extents(p);

    assert(!p->stopped && n > 0);
    for (uint32_t i = n; i-- > 0;) { /* so that the lowest is taken first */
        uint32_t e = p->n_usable + i;
        extent *x = &p->extents[e];

        if (x->layout == POOL_NONE) {
            list_push(p, &p->unassigned, e);
            p->n_unassigned++;
            continue;
        }
        x->pending = false;
        p->n_early--;
        if (extent_can_give(x))
            list_push(p, &p->layouts[x->layout].avail, e);
    }
    p->n_usable += n;
}

void pool_piece_failed(pool *p)
{
    p->stopped = true;
}

int pool_arena_fd(const pool *p)
{
    return p->memory->arena_fd;
}

int pool_table_fd(const pool *p)
{
    return p->memory->table_fd;
}

uint64_t pool_extent_bytes(const pool *p)
{
    return p->extent_bytes;
}

/* ---- layouts ---- */

static uint64_t layout_cap(const pool *p, const layout *l)
{
    uint64_t n = p->stopped && p->n_usable < p->n_limit ? p->n_usable : p->n_limit;
    uint64_t all = n * l->per_extent;

    return p->max_slots != 0 && p->max_slots < all ? p->max_slots : all;
}

static kvs_status check_layout(const pool *p, uint64_t slot_bytes, kvs_err *err)
{
    uint64_t all;

    if (slot_bytes < POOL_SLOT_MIN_BYTES)
        return kvs_fail(err, KVS_E_LIMIT, "block: %llu bytes are below %d", ULL(slot_bytes), POOL_SLOT_MIN_BYTES);
    if (slot_bytes % 16 != 0)
        return kvs_fail(err, KVS_E_LIMIT, "block: %llu bytes are no multiple of 16", ULL(slot_bytes));
    if (slot_bytes > p->extent_bytes)
        return kvs_fail(err, KVS_E_LIMIT, "block: %llu bytes do not fit an extent of %llu bytes (pool of %llu)",
                        ULL(slot_bytes), ULL(p->extent_bytes), ULL(p->extent_bytes * p->n_limit));
    all = p->extent_bytes / slot_bytes * p->n_limit;
    if (p->max_slots > all)
        return kvs_fail(err, KVS_E_LIMIT, "pool.max_slots: %lu blocks of %llu bytes wanted, the pool holds %llu",
                        (unsigned long)p->max_slots, ULL(slot_bytes), ULL(all));
    if (p->n_layouts == POOL_MAX_LAYOUTS)
        return kvs_fail(err, KVS_E_LIMIT, "layouts: %lu are open, at most %d may be", (unsigned long)p->n_layouts,
                        POOL_MAX_LAYOUTS);
    return KVS_OK;
}

bool pool_layout_find(const pool *p, const uint8_t digest[32], uint64_t slot_bytes, uint32_t *ret)
{
    for (uint32_t i = 0; i < p->n_layouts; i++)
        if (memcmp(p->layouts[i].digest, digest, 32) == 0 && p->layouts[i].slot_bytes == slot_bytes) {
            *ret = i;
            return true;
        }
    return false;
}

/* A place in the table that no layout of ours has.  There are as many as layouts may be. */
static uint32_t free_record(const pool *p)
{
    uint8_t used[POOL_MAX_LAYOUTS] = {0};
    uint32_t i = 0;

    for (uint32_t l = 0; l < p->n_layouts; l++)
        used[p->layouts[l].record] = 1;
    while (used[i])
        i++;
    return i;
}

kvs_status pool_layout_open(pool *p, const uint8_t digest[32], uint64_t slot_bytes, uint32_t *ret, kvs_err *err)
{
    kvs_status s;
    layout *l;

    if (pool_layout_find(p, digest, slot_bytes, ret))
        return KVS_OK;
    if ((s = check_layout(p, slot_bytes, err)) != KVS_OK)
        return s;
    l = &p->layouts[p->n_layouts];
    memset(l, 0, sizeof *l);
    l->record = free_record(p);
    table_put_layout(&p->table, l->record, digest, slot_bytes);
    memcpy(l->digest, digest, 32);
    l->slot_bytes = slot_bytes;
    l->per_extent = (uint32_t)(p->extent_bytes / slot_bytes);
    l->avail = POOL_NONE;
    *ret = p->n_layouts++;
    return KVS_OK;
}

uint32_t pool_n_layouts(const pool *p)
{
    return p->n_layouts;
}

void pool_layout_get(const pool *p, uint32_t layout_id, pool_layout_info *ret)
{
    const layout *l = &p->layouts[layout_id];

    assert(layout_id < p->n_layouts);
    *ret = (pool_layout_info){
        .slot_bytes = l->slot_bytes,
        .n_extents = l->n_extents,
        .n_slots = l->n_slots,
        .n_free = l->n[POOL_FREE],
        .n_writing = l->n[POOL_WRITING],
        .n_ready = l->n[POOL_READY],
        .n_draining = l->n[POOL_DRAINING],
        .n_quarantined = l->n[POOL_QUARANTINED],
        .cap = layout_cap(p, l),
    };
}

/* ---- binding ---- */

static void extent_bind(pool *p, uint32_t e, uint32_t layout_id)
{
    layout *l = &p->layouts[layout_id];
    extent *x = &p->extents[e];
    uint64_t n = l->per_extent;

    list_remove(p, &p->unassigned, e);
    p->n_unassigned--;
    /* From here on a row of it is read as one of this layout; all of them are free. */
    if (p->max_slots != 0 && n > p->max_slots - l->n_slots)
        n = p->max_slots - l->n_slots;
    table_put_extent(&p->table, e, l->record, (uint32_t)n);
    *x = (extent){.layout = layout_id, .n_slots = (uint32_t)n, .free_head = POOL_NONE};
    x->n[POOL_FREE] = (uint32_t)n;
    l->n_extents++;
    l->n_slots += n;
    l->n[POOL_FREE] += n;
    p->waste += p->extent_bytes - n * l->slot_bytes;
    list_push(p, &l->avail, e);
}

/* It is nobody's, and usable: to be taken again, if the pool may still have it. */
static void give_extent(pool *p, uint32_t e)
{
    if (e >= p->n_limit) {
        p->extents[e].retired = true;
        p->n_retired++;
        return;
    }
    list_push(p, &p->unassigned, e);
    p->n_unassigned++;
}

/* A closing extent whose slots are all free belongs to nobody again. */
static void extent_unbind_if_empty(pool *p, uint32_t e)
{
    extent *x = &p->extents[e];
    layout *l = &p->layouts[x->layout];

    if (!x->closing || x->n[POOL_FREE] != x->n_slots)
        return;
    l->n_slots -= x->n_slots;
    l->n[POOL_FREE] -= x->n_slots;
    p->waste -= p->extent_bytes - x->n_slots * l->slot_bytes;
    table_put_extent(&p->table, e, TABLE_NONE, 0);
    if (x->pending) {
        p->n_early--; /* unassigned once its piece is usable */
        *x = (extent){.layout = POOL_NONE};
        return;
    }
    *x = (extent){.layout = POOL_NONE};
    give_extent(p, e);
}

bool extent_can_give(const extent *x)
{
    return !x->closing && !x->pending && (x->free_head != POOL_NONE || x->n_used < x->n_slots);
}

void pool_extent_close(pool *p, uint32_t e)
{
    extent *x = &p->extents[e];

    assert(e < p->n_extents && x->layout != POOL_NONE);
    if (x->closing)
        return;
    if (extent_can_give(x))
        list_remove(p, &p->layouts[x->layout].avail, e);
    p->layouts[x->layout].n_extents--;
    x->closing = true;
    extent_unbind_if_empty(p, e);
}

/* ---- another size ---- */

kvs_status pool_resize(pool *p, uint64_t max_bytes, kvs_err *err)
{
    uint64_t n = max_bytes / p->extent_bytes;
    uint32_t was = p->n_limit;

    if (n < 1 || n > p->n_extents)
        return kvs_fail(err, KVS_E_LIMIT,
                        "pool.max_bytes: %llu bytes are outside %llu..%llu, an extent and what was reserved",
                        ULL(max_bytes), ULL(p->extent_bytes), ULL(pool_reserved(p)));
    p->n_limit = (uint32_t)n;
    for (uint32_t e = p->n_limit; e < was && e < p->n_usable; e++)
        if (p->extents[e].layout == POOL_NONE) {
            list_remove(p, &p->unassigned, e);
            p->n_unassigned--;
            give_extent(p, e);
        }
    for (uint32_t e = p->n_limit; e > was; e--) /* so that the lowest is taken first */
        if (p->extents[e - 1].retired) {
            p->extents[e - 1].retired = false;
            p->n_retired--;
            give_extent(p, e - 1);
        }
    return KVS_OK;
}

uint64_t pool_reserved(const pool *p)
{
    return p->n_extents * p->extent_bytes;
}

uint32_t pool_n_allowed(const pool *p)
{
    return p->n_limit;
}

bool pool_drop_piece(pool *p, uint64_t piece_bytes, void **ret_address)
{
    uint32_t n = (uint32_t)(piece_bytes / p->extent_bytes), first = p->n_usable - n;

    assert(n <= p->n_usable);
    if (first < p->n_limit)
        return false;
    for (uint32_t e = first; e < p->n_usable; e++)
        if (!p->extents[e].retired)
            return false;
    for (uint32_t e = first; e < p->n_usable; e++)
        p->extents[e].retired = false;
    p->n_usable -= n;
    p->n_retired -= n;
    *ret_address = p->arena + p->extent_bytes * first;
    return true;
}

/* ---- slots ---- */

static uint64_t pair(uint32_t low, uint32_t high)
{
    return (uint64_t)high << 32 | low;
}

uint32_t row_check(const pool_row *r, pool_slot s)
{
    return (uint32_t)XXH3_64bits_withSeed(r, offsetof(pool_row, word), pair(s, r->ns));
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pool_row.word");

static uint64_t word_of(enum pool_state state, uint32_t ns, uint32_t check)
{
    return (uint64_t)check << 32 | (uint64_t)ns << 16 | (uint64_t)state;
}

void row_set_state(pool *p, pool_slot s, enum pool_state to, uint32_t check)
{
    pool_row *r = row_at(p, s);

    table_store(&p->table, &r->word, word_of(to, to == POOL_WRITING ? 0 : r->ns, check));
}

/* The one place where a slot changes its state. */
static void slot_become(pool *p, pool_slot s, enum pool_state to)
{
    const pool_row *r = row_at(p, s);
    extent *x = &p->extents[s / p->rows_per_extent];
    layout *l = &p->layouts[x->layout];

    x->n[r->state]--;
    l->n[r->state]--;
    x->n[to]++;
    l->n[to]++;
    row_set_state(p, s, to, to == POOL_READY ? row_check(r, s) : 0);
}

static uint32_t slot_state(const pool *p, pool_slot s)
{
    return row_at(p, s)->state;
}

static void store_key(const pool *p, pool_row *r, const uint8_t key[32])
{
    for (size_t i = 0; i < sizeof r->key; i += 8) {
        uint64_t w;

        memcpy(&w, key + i, sizeof w);
        table_store(&p->table, r->key + i, w);
    }
}

/* A new life: writing, with nothing of the one before but its key, which nobody reads. */
static void row_begin(pool *p, pool_slot s)
{
    pool_row *r = row_at(p, s);

    slot_become(p, s, POOL_WRITING);
    table_store(&p->table, &r->checksum, 0);
    table_store(&p->table, &r->gen, pair(r->gen + 1, 0));
    table_store(&p->table, &r->parent, pair(POOL_NONE, 0));
}

/* On a tmpfs that is full the first touch of a page would kill us. */
static bool row_is_there(pool *p, pool_slot s)
{
    uint64_t at = (uint64_t)s * sizeof(pool_row);

    if (!p->memory->bounded || sparse_touched(&p->table.rows, s))
        return true;
    return persist_reserve(p->memory, table_rows_offset() + at, sizeof(pool_row), NULL) == KVS_OK;
}

kvs_status pool_take(pool *p, uint32_t layout_id, pool_slot *ret)
{
    layout *l = &p->layouts[layout_id];
    uint32_t e = l->avail, index;
    pool_slot s;
    extent *x;

    assert(layout_id < p->n_layouts);
    if (e == POOL_NONE) {
        if (p->unassigned == POOL_NONE || (p->max_slots != 0 && l->n_slots >= p->max_slots))
            return KVS_E_NO_SPACE;
        e = p->unassigned;
        extent_bind(p, e, layout_id);
    }
    x = &p->extents[e];
    index = x->free_head;
    s = e * p->rows_per_extent + (index != POOL_NONE ? index : x->n_used);
    if (!row_is_there(p, s))
        return KVS_E_NO_SPACE;
    if (index != POOL_NONE)
        x->free_head = *(uint32_t *)sparse_at(&p->links, s);
    else
        x->n_used++;
    if (!extent_can_give(x))
        list_remove(p, &l->avail, e);
    (void)sparse_touch(&p->table.rows, s);
    assert(slot_state(p, s) == POOL_FREE);
    row_begin(p, s);
    *ret = s;
    return KVS_OK;
}

void pool_name(pool *p, pool_slot s, uint32_t ns, const uint8_t key[32], uint32_t depth)
{
    pool_row *r = row_at(p, s);

    assert(r->state == POOL_WRITING && ns < TABLE_MAX_NS);
    store_key(p, r, key);
    table_store(&p->table, &r->gen, pair(r->gen, depth));
    table_store(&p->table, &r->word, word_of(POOL_WRITING, ns, 0));
}

void pool_set_parent(pool *p, pool_slot s, pool_slot parent)
{
    pool_row *r = row_at(p, s);
    uint32_t gen = row_at(p, parent)->gen;

    if (r->parent != parent || r->parent_gen != gen)
        table_store(&p->table, &r->parent, pair(parent, gen));
}

void pool_commit(pool *p, pool_slot s, uint64_t checksum)
{
    assert(slot_state(p, s) == POOL_WRITING);
    table_store(&p->table, &row_at(p, s)->checksum, checksum);
    slot_become(p, s, POOL_READY);
}

void pool_drain(pool *p, pool_slot s)
{
    assert(slot_state(p, s) == POOL_READY);
    slot_become(p, s, POOL_DRAINING);
}

void pool_quarantine(pool *p, pool_slot s)
{
    uint32_t st = slot_state(p, s);

    assert(st == POOL_WRITING || st == POOL_READY || st == POOL_DRAINING);
    (void)st;
    slot_become(p, s, POOL_QUARANTINED);
}

void pool_release(pool *p, pool_slot s)
{
    uint32_t e = s / p->rows_per_extent;
    extent *x = &p->extents[e];
    bool could_give = extent_can_give(x);
    uint32_t *link;

    assert(slot_state(p, s) != POOL_FREE);
    slot_become(p, s, POOL_FREE);
    if (x->n[POOL_FREE] == x->n_slots) { /* empty: it begins anew, so that blocks that come together lie side by side */
        x->free_head = POOL_NONE;
        x->n_used = 0;
    } else {
        link = sparse_touch(&p->links, s);
        *link = x->free_head;
        x->free_head = s % p->rows_per_extent;
    }
    if (x->closing)
        extent_unbind_if_empty(p, e);
    else if (!could_give && extent_can_give(x)) /* not while its piece is to come */
        list_push(p, &p->layouts[x->layout].avail, e);
}

const pool_row *pool_row_of(const pool *p, pool_slot s)
{
    return s < pool_max_rows(p) ? row_at(p, s) : NULL;
}

uint8_t *pool_address(const pool *p, pool_slot s)
{
    uint32_t e = s / p->rows_per_extent;
    const layout *l = &p->layouts[p->extents[e].layout];

    return p->arena + e * p->extent_bytes + (s % p->rows_per_extent) * l->slot_bytes;
}

uint32_t pool_layout_of(const pool *p, pool_slot s)
{
    return p->extents[s / p->rows_per_extent].layout;
}

uint32_t pool_max_rows(const pool *p)
{
    return p->n_extents * p->rows_per_extent;
}

/* ---- extents ---- */

uint32_t pool_n_extents(const pool *p)
{
    return p->n_extents;
}

uint32_t pool_extent_of(const pool *p, pool_slot s)
{
    return s / p->rows_per_extent;
}

uint32_t pool_extent_layout(const pool *p, uint32_t e, pool_slot *ret_first, uint32_t *ret_n, bool *ret_closing)
{
    const extent *x = &p->extents[e];

    assert(e < p->n_extents);
    if (ret_first != NULL)
        *ret_first = e * p->rows_per_extent;
    if (ret_n != NULL)
        *ret_n = x->n_slots;
    if (ret_closing != NULL)
        *ret_closing = x->closing;
    return x->layout;
}

uint32_t pool_extent_used(const pool *p, uint32_t e)
{
    assert(e < p->n_extents);
    return p->extents[e].n_used;
}

bool pool_extent_usable(const pool *p, uint32_t e)
{
    return e < p->n_usable;
}

/* ---- namespaces ---- */

kvs_status pool_put_ns(pool *p, uint32_t number, const table_ns *ns, kvs_err *err)
{
    return table_put_ns(&p->table, number, ns, err);
}

enum table_found pool_get_ns(const pool *p, uint32_t number, table_ns *ret)
{
    return p->adoption.adopted ? table_get_ns(&p->table, number, ret) : TABLE_VOID;
}

void pool_drop_ns(pool *p, uint32_t number)
{
    table_drop_ns(&p->table, number);
    table_trim(&p->table);
}

/* ---- sums ---- */

void pool_get_bytes(const pool *p, pool_bytes *ret)
{
    uint32_t had = p->n_usable + p->n_early;

    *ret = (pool_bytes){
        .arena = (uint64_t)(p->n_usable - p->n_retired + p->n_early) * p->extent_bytes,
        .unassigned = p->n_unassigned * p->extent_bytes,
        .waste = p->waste,
        .max = (uint64_t)(p->stopped && had < p->n_limit ? had : p->n_limit) * p->extent_bytes,
        .giving_up = p->n_usable > p->n_limit ? (p->n_usable - p->n_limit - p->n_retired) * p->extent_bytes : 0,
    };
    for (uint32_t i = 0; i < p->n_layouts; i++) {
        const layout *l = &p->layouts[i];

        ret->free += l->n[POOL_FREE] * l->slot_bytes;
        ret->writing += l->n[POOL_WRITING] * l->slot_bytes;
        ret->ready += l->n[POOL_READY] * l->slot_bytes;
        ret->draining += l->n[POOL_DRAINING] * l->slot_bytes;
        ret->quarantined += l->n[POOL_QUARANTINED] * l->slot_bytes;
    }
}

uint64_t pool_metadata_bytes(const pool *p)
{
    return sizeof *p + p->n_extents * sizeof *p->extents + sparse_resident(&p->table.rows) + sparse_resident(&p->links);
}

/* ---- check ---- */

static kvs_status differs(kvs_err *err, const char *what, uint64_t at, uint64_t found, uint64_t counted)
{
    return kvs_fail(err, KVS_E_CORRUPT, "pool: %s of %llu: %llu found, %llu on the books", what, ULL(at), ULL(found),
                    ULL(counted));
}

static kvs_status check_free_list(const pool *p, uint32_t e, kvs_err *err)
{
    const extent *x = &p->extents[e];
    uint32_t n = x->n_slots - x->n_used;

    for (uint32_t i = x->free_head; i != POOL_NONE; n++) {
        pool_slot s = e * p->rows_per_extent + i;

        if (i >= x->n_used || n >= x->n_slots || slot_state(p, s) != POOL_FREE)
            return differs(err, "free list of extent", e, i, x->n_used);
        i = *(const uint32_t *)sparse_at(&p->links, s);
    }
    return n == x->n[POOL_FREE] ? KVS_OK : differs(err, "free list length of extent", e, n, x->n[POOL_FREE]);
}

static kvs_status check_extent(const pool *p, uint32_t e, layout *sums, kvs_err *err)
{
    const extent *x = &p->extents[e];
    uint32_t n[N_STATES] = {0};

    if (x->layout >= p->n_layouts || x->n_used > x->n_slots || x->n_slots > p->layouts[x->layout].per_extent)
        return differs(err, "shape of extent", e, x->n_used, x->n_slots);
    for (uint32_t i = 0; i < x->n_used; i++) {
        uint32_t st = slot_state(p, e * p->rows_per_extent + i);

        if (st >= N_STATES)
            return differs(err, "state of row", e * p->rows_per_extent + i, st, N_STATES);
        n[st]++;
    }
    n[POOL_FREE] += x->n_slots - x->n_used;
    for (uint32_t st = 0; st < N_STATES; st++) {
        if (n[st] != x->n[st])
            return differs(err, "states of extent", e, n[st], x->n[st]);
        sums[x->layout].n[st] += n[st];
    }
    sums[x->layout].n_extents += !x->closing;
    sums[x->layout].n_slots += x->n_slots;
    sums[x->layout].avail += extent_can_give(x);
    return check_free_list(p, e, err);
}

static kvs_status check_layout_sums(const pool *p, uint32_t i, const layout *sum, kvs_err *err)
{
    const layout *l = &p->layouts[i];
    uint32_t n_avail = 0;

    if (sum->n_extents != l->n_extents)
        return differs(err, "extents of layout", i, sum->n_extents, l->n_extents);
    if (sum->n_slots != l->n_slots || (p->max_slots != 0 && l->n_slots > p->max_slots))
        return differs(err, "slots of layout", i, sum->n_slots, l->n_slots);
    for (uint32_t st = 0; st < N_STATES; st++)
        if (sum->n[st] != l->n[st])
            return differs(err, "states of layout", i, sum->n[st], l->n[st]);
    for (uint32_t e = l->avail; e != POOL_NONE && n_avail <= sum->avail; e = p->extents[e].next) {
        if (p->extents[e].layout != i || !extent_can_give(&p->extents[e]))
            return differs(err, "extent in the list of layout", i, e, p->extents[e].layout);
        n_avail++;
    }
    return n_avail == sum->avail ? KVS_OK : differs(err, "extents with room of layout", i, n_avail, sum->avail);
}

static kvs_status check_law(const pool *p, uint64_t unassigned, kvs_err *err)
{
    pool_bytes b;
    uint64_t sum;

    pool_get_bytes(p, &b);
    if (unassigned * p->extent_bytes != b.unassigned)
        return differs(err, "unassigned bytes", 0, unassigned * p->extent_bytes, b.unassigned);
    sum = b.unassigned + b.waste + b.free + b.writing + b.ready + b.draining + b.quarantined;
    return sum == b.arena ? KVS_OK : differs(err, "sum of bytes", 0, sum, b.arena);
}

kvs_status pool_check(const pool *p, kvs_err *err)
{
    layout *sums = calloc(POOL_MAX_LAYOUTS, sizeof *sums);
    uint64_t unassigned = 0;
    kvs_status s = KVS_OK;

    if (sums == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pool: no memory to check it");
    for (uint32_t e = 0; e < p->n_extents && s == KVS_OK; e++) {
        if (p->extents[e].layout != POOL_NONE)
            s = check_extent(p, e, sums, err);
        else
            unassigned += e < p->n_usable && !p->extents[e].retired;
    }
    for (uint32_t i = 0; i < p->n_layouts && s == KVS_OK; i++)
        s = check_layout_sums(p, i, &sums[i], err);
    if (s == KVS_OK)
        s = check_law(p, unassigned, err);
    free(sums);
    return s;
}
