#include "daemon/directory_impl.h"

#include <assert.h>

/* One call of directory_admit. */
typedef struct admission {
    uint32_t ns, layout;
    uint64_t base;      /* stamps from here on belong to this call: such blocks are not evicted for it */
    pool_slot passed;   /* the search for victims goes on behind this one */
    bool foreign_known; /* the two below are valid */
    uint32_t foreign;   /* coldest extent of another layout, or POOL_NONE */
    uint64_t foreign_last;
    uint32_t n_chain; /* ancestors in directory.chain */
    uint32_t n_early; /* adopted blocks that the search has passed */
    bool full;        /* no space was found once: deeper keys are not tried */
} admission;

/* ---- going away ---- */

static void forget_key(directory *d, pool_slot s, const pool_row *r)
{
    slot_info *i = info_of(d, s);

    key_table_remove(&d->table, directory_hash(d, r->ns, r->key), s);
    if ((i->flags & SLOT_PARKED) == 0)
        d->ops->remove(d->evict, pool_layout_of(d->pool, s), s);
    i->flags |= SLOT_PARKED;
}

static void release_slot(directory *d, pool_slot s)
{
    extent_of(d, s)->n_busy--;
    pool_release(d->pool, s);
}

void directory_take_away(directory *d, pool_slot s, uint32_t cause)
{
    const pool_row *r = pool_row_of(d->pool, s);
    slot_info *i = info_of(d, s);

    assert(r->state == POOL_READY && i->leases == 0 && (i->flags & SLOT_PINNED) == 0);
    forget_key(d, s, r);
    d->ns[r->ns]->pub.n_ready--;
    d->stats.n_ready--;
    d->stats.evicted += cause == WIRE_CAUSE_EVICTED;
    d->stats.dropped += cause == WIRE_CAUSE_DROPPED;
    d->stats.rebound += cause == WIRE_CAUSE_REBOUND;
    extent_of(d, s)->n_ready--;
    if (cause != WIRE_CAUSE_NONE)
        directory_emit(d, WIRE_EVENT_REMOVED, cause, r);
    else
        d->stats.dropped++;   /* by a reset that is told as one event */
    directory_verified(d, s); /* nobody will ask any more */
    if (i->holds > 0) {
        pool_drain(d->pool, s); /* busy before and after */
        return;
    }
    d->stats.evictable--;
    pool_release(d->pool, s);
}

void directory_doom(directory *d, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s);

    assert(r->state == POOL_WRITING && (info_of(d, s)->flags & SLOT_DOOMED) == 0);
    forget_key(d, s, r);
    info_of(d, s)->flags |= SLOT_DOOMED;
}

void directory_empty_rows(directory *d, uint32_t extent, uint32_t from, uint32_t to)
{
    pool_slot first;

    (void)pool_extent_layout(d->pool, extent, &first, NULL, NULL);
    /* The last block that goes unbinds the extent: ask again each time. */
    for (uint32_t i = from; i < to && i < pool_extent_used(d->pool, extent); i++) {
        pool_slot s = first + i;

        if (pool_row_of(d->pool, s)->state == POOL_READY && !info_is_busy(info_of(d, s)))
            directory_take_away(d, s, WIRE_CAUSE_REBOUND);
    }
}

/* ---- making room ---- */

/* Adopted blocks come before their piece of the arena is usable: to evict them would make no room. */
static bool may_give(const directory *d, pool_slot s)
{
    return pool_extent_usable(d->pool, pool_extent_of(d->pool, s));
}

/* The coldest block of the layout that may go and is no part of this call. */
static pool_slot own_victim(directory *d, admission *a, uint64_t *ret_stamp)
{
    for (;;) {
        pool_slot s = d->ops->victim(d->evict, a->layout, a->passed, ret_stamp);
        slot_info *i;

        if (s == POOL_NONE)
            return POOL_NONE;
        i = info_of(d, s);
        if (i->stamp >= a->base || (!may_give(d, s) && ++a->n_early <= EARLY_MAX)) {
            a->passed = s;
        } else if (a->n_early > EARLY_MAX) {
            return POOL_NONE;
        } else if (pool_row_of(d->pool, s)->state != POOL_READY || info_is_busy(i)) {
            d->ops->remove(d->evict, a->layout, s);
            i->flags |= SLOT_PARKED;
        } else if (directory_is_closing(d, s)) {
            directory_take_away(d, s, WIRE_CAUSE_REBOUND); /* it goes anyway, and leaves no slot for us */
        } else {
            return s;
        }
    }
}

static bool may_lose_extent(const directory *d, uint32_t extent, uint32_t taker, bool taker_has_none)
{
    pool_layout_info info;
    bool closing;
    uint32_t layout = pool_extent_layout(d->pool, extent, NULL, NULL, &closing);

    if (layout == POOL_NONE || layout == taker || closing || d->extents[extent].n_busy > 0 ||
        !pool_extent_usable(d->pool, extent))
        return false;
    pool_layout_get(d->pool, layout, &info);
    return info.n_extents > 1 || taker_has_none || info.n_free == info.n_slots;
}

static void find_foreign(directory *d, admission *a, bool taker_has_none)
{
    uint32_t n = pool_n_layouts(d->pool) > 1 ? pool_n_extents(d->pool) : 0;

    a->foreign_known = true;
    a->foreign = POOL_NONE;
    for (uint32_t e = 0; e < n; e++) {
        uint64_t last = d->extents[e].n_ready == 0 ? 0 : d->extents[e].last;

        if ((a->foreign == POOL_NONE || last < a->foreign_last) && may_lose_extent(d, e, a->layout, taker_has_none)) {
            a->foreign = e;
            a->foreign_last = last;
        }
    }
}

/* Take an extent from another layout.  A large one is emptied by directory_step and helps later requests
 * only. */
static void rebind(directory *d, admission *a)
{
    uint32_t e = a->foreign, used = pool_extent_used(d->pool, e);
    bool large = d->extents[e].n_ready > EMPTY_AT_ONCE;

    a->foreign_known = false;
    pool_extent_close(d->pool, e);
    if (large) {
        d->emptying = e;
        d->empty_at = 0;
    } else {
        directory_empty_rows(d, e, 0, used);
    }
}

static bool may_grow(const directory *d, const admission *a, bool *ret_has_none)
{
    pool_layout_info info;

    pool_layout_get(d->pool, a->layout, &info);
    *ret_has_none = info.n_extents == 0;
    return info.n_slots < info.cap && d->emptying == POOL_NONE;
}

static kvs_status take_slot(directory *d, admission *a, pool_slot *ret)
{
    while (pool_take(d->pool, a->layout, ret) != KVS_OK) {
        uint64_t stamp = a->base;
        pool_slot victim = own_victim(d, a, &stamp);
        bool has_none;

        if (victim == POOL_NONE)
            stamp = a->base;
        if (may_grow(d, a, &has_none)) {
            if (!a->foreign_known)
                find_foreign(d, a, has_none);
            if (a->foreign != POOL_NONE && a->foreign_last < stamp) {
                rebind(d, a);
                continue;
            }
        }
        if (victim == POOL_NONE)
            return KVS_E_NO_SPACE;
        directory_take_away(d, victim, WIRE_CAUSE_EVICTED);
    }
    return KVS_OK;
}

/* ---- admission ---- */

static bool is_living(const pool_row *r, uint32_t ns)
{
    return (r->state == POOL_READY || r->state == POOL_WRITING) && r->ns == ns;
}

/* The block before s in its chain, or POOL_NONE.  Depth falls with every step, so no row can lead in a
 * circle. */
static pool_slot parent_of(const directory *d, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s), *p;

    if (r->parent == POOL_NONE || (p = pool_row_of(d->pool, r->parent)) == NULL)
        return POOL_NONE;
    if (p->gen != r->parent_gen || p->depth >= r->depth || !is_living(p, r->ns))
        return POOL_NONE;
    return (info_of(d, r->parent)->flags & SLOT_DOOMED) == 0 ? r->parent : POOL_NONE;
}

/* Also for a block that was there: its former parent may have been evicted and stored again elsewhere. */
static void set_parent(const directory *d, pool_slot s, pool_slot parent)
{
    if (s != POOL_NONE && parent != POOL_NONE && pool_row_of(d->pool, parent)->depth < pool_row_of(d->pool, s)->depth)
        pool_set_parent(d->pool, s, parent);
}

/* Mark what is there already of the list and of the chain above it, so that it is not evicted for the rest.
 */
static void protect(directory *d, admission *a, pool_slot top, const pool_slot *slot, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (slot[i] != POOL_NONE)
            info_of(d, slot[i])->stamp = a->base;
    for (uint32_t i = 0; i < CHAIN_MAX && top != POOL_NONE; i++, top = parent_of(d, top)) {
        if (info_of(d, top)->stamp >= a->base)
            continue; /* it is in the list */
        info_of(d, top)->stamp = a->base;
        d->chain[a->n_chain++] = top;
    }
}

static kvs_status admit_new(directory *d, admission *a, uint32_t depth, const uint8_t *key, pool_slot *ret)
{
    kvs_status s = a->full ? KVS_E_NO_SPACE : take_slot(d, a, ret);
    slot_info *i;

    if (s != KVS_OK) {
        a->full = true;
        d->stats.no_space++;
        return s;
    }
    i = sparse_touch(&d->infos, *ret);
    pool_name(d->pool, *ret, a->ns, key, depth);
    s = key_table_insert(&d->table, directory_hash(d, a->ns, key), *ret);
    if (s != KVS_OK) {
        pool_release(d->pool, *ret);
        *ret = POOL_NONE;
        return s;
    }
    *i = (slot_info){.stamp = a->base, .flags = SLOT_PARKED};
    extent_of(d, *ret)->n_busy++;
    return KVS_OK;
}

/* Status of key i; slot[i] was found, or is found now if an earlier one of the list is the same. */
static kvs_status admit_one(directory *d, admission *a, uint32_t depth, const uint8_t *key, pool_slot *slot)
{
    if (*slot == POOL_NONE)
        *slot = directory_find(d, a->ns, key);
    if (*slot == POOL_NONE)
        return admit_new(d, a, depth, key, slot);
    if (pool_row_of(d->pool, *slot)->state != POOL_READY)
        return KVS_E_BUSY;
    d->stats.exists++;
    return KVS_E_EXISTS;
}

/* The list and then the chain above it, deepest block first: the head ends as the most recent. */
static void renew(directory *d, const admission *a, const pool_slot *slot, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;)
        if (slot[i] != POOL_NONE)
            directory_touch(d, slot[i], ++d->stamp);
    for (uint32_t i = 0; i < a->n_chain; i++)
        directory_touch(d, d->chain[i], ++d->stamp);
}

static uint32_t depth_at(uint32_t first, uint32_t i)
{
    return first > UINT32_MAX - i ? UINT32_MAX : first + i;
}

void directory_admit(directory *d, uint32_t ns, uint32_t first_depth, const uint8_t parent[32], const uint8_t *keys,
                     uint32_t n, kvs_status *status, pool_slot *slot)
{
    admission a = {
        .ns = ns, .layout = d->ns[ns]->pub.layout, .base = d->stamp + 1, .passed = POOL_NONE, .foreign = POOL_NONE};
    pool_slot before = first_depth > 0 ? directory_find(d, ns, parent) : POOL_NONE;

    for (uint32_t at = 0; at < n; at += BATCH)
        directory_find_batch(d, ns, keys + (size_t)at * 32, n - at < BATCH ? n - at : BATCH, slot + at);
    /* A client that does not name the parent is helped by what the row remembers. */
    protect(d, &a, before == POOL_NONE && n > 0 && slot[0] != POOL_NONE ? parent_of(d, slot[0]) : before, slot, n);
    for (uint32_t i = 0; i < n; i++) {
        status[i] = admit_one(d, &a, depth_at(first_depth, i), keys + (size_t)i * 32, &slot[i]);
        set_parent(d, slot[i], before);
        before = slot[i];
    }
    renew(d, &a, slot, n);
    for (uint32_t i = 0; i < n; i++)
        if (status[i] != KVS_OK)
            slot[i] = POOL_NONE;
}

/* ---- the end of a write ---- */

void directory_became_ready(directory *d, pool_slot s)
{
    extent_of(d, s)->n_ready++;
    d->ns[pool_row_of(d->pool, s)->ns]->pub.n_ready++;
    d->stats.n_ready++;
}

kvs_status directory_commit(directory *d, pool_slot s, uint64_t checksum)
{
    const pool_row *r = pool_row_of(d->pool, s);
    slot_info *i = info_of(d, s);

    assert(r->state == POOL_WRITING);
    if ((i->flags & SLOT_DOOMED) != 0) {
        release_slot(d, s);
        return KVS_E_CANCELLED;
    }
    pool_commit(d->pool, s, checksum);
    directory_became_ready(d, s);
    d->stats.stored++;
    directory_emit(d, WIRE_EVENT_STORED, WIRE_CAUSE_NONE, r);
    directory_change_end(d, s, true); /* writing was busy, ready is not */
    return KVS_OK;
}

void directory_abort(directory *d, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s);

    assert(r->state == POOL_WRITING);
    if ((info_of(d, s)->flags & SLOT_DOOMED) == 0)
        forget_key(d, s, r);
    release_slot(d, s);
}

void directory_suspect(directory *d, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s);

    if (r->state != POOL_WRITING)
        return; /* somebody may still read it: its hold stays until directory_settle */
    if ((info_of(d, s)->flags & SLOT_DOOMED) == 0)
        forget_key(d, s, r);
    pool_quarantine(d->pool, s);
}

void directory_settle(directory *d, pool_slot s)
{
    if (pool_row_of(d->pool, s)->state == POOL_QUARANTINED)
        release_slot(d, s);
    else
        directory_unhold(d, s);
}

bool directory_step(directory *d)
{
    if (d->emptying != POOL_NONE) {
        uint32_t e = d->emptying, from = d->empty_at;
        bool closing;

        /* It may have become empty by other means, and have another layout by now. */
        (void)pool_extent_layout(d->pool, e, NULL, NULL, &closing);
        if (closing)
            directory_empty_rows(d, e, from, from + EMPTY_STEP);
        d->empty_at = from + EMPTY_STEP;
        if (!closing || d->empty_at >= pool_extent_used(d->pool, e))
            d->emptying = POOL_NONE; /* blocks that are busy now go when they no longer are */
    }
    return key_table_step(&d->table, EMPTY_STEP) || d->emptying != POOL_NONE;
}
