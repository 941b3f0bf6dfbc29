/* Extents of the pool: pieces give them, layouts have them, and another size takes them away. */
#include "daemon/pool_impl.h"

#include <assert.h>
#include <string.h>

/* ---- lists of extents ---- */

void extents_push(pool *p, uint32_t *head, uint32_t e)
{
    p->extents[e].prev = POOL_NONE;
    p->extents[e].next = *head;
    if (*head != POOL_NONE)
        p->extents[*head].prev = e;
    *head = e;
}

void extents_remove(pool *p, uint32_t *head, uint32_t e)
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
            extents_push(p, &p->unassigned, e);
            p->n_unassigned++;
            continue;
        }
        x->pending = false;
        p->n_early--;
        if (extent_can_give(x))
            extents_push(p, &p->layouts[x->layout].avail, e);
    }
    p->n_usable += n;
}

bool pool_piece_is_new(const pool *p)
{
    for (uint32_t e = p->n_usable; e < p->n_usable + next_piece_extents(p); e++)
        if (p->extents[e].layout != POOL_NONE)
            return false;
    return true;
}

void pool_piece_failed(pool *p)
{
    p->stopped = true;
}

void pool_piece_again(pool *p)
{
    p->stopped = false;
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
        return kvs_fail(err, KVS_E_LIMIT,
                        "block: %llu bytes do not fit an extent of %llu bytes (pool.extent_bytes, of a pool of %llu)",
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

void extent_bind(pool *p, uint32_t e, uint32_t layout_id)
{
    layout *l = &p->layouts[layout_id];
    extent *x = &p->extents[e];
    uint64_t n = l->per_extent;

    extents_remove(p, &p->unassigned, e);
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
    extents_push(p, &l->avail, e);
}

/* It is nobody's, and usable: to be taken again, if the pool may still have it. */
static void give_extent(pool *p, uint32_t e)
{
    if (e >= p->n_limit) {
        p->extents[e].retired = true;
        p->n_retired++;
        return;
    }
    extents_push(p, &p->unassigned, e);
    p->n_unassigned++;
}

void extent_unbind_if_empty(pool *p, uint32_t e)
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
        extents_remove(p, &p->layouts[x->layout].avail, e);
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
            extents_remove(p, &p->unassigned, e);
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

/* ---- asked of an extent ---- */

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
