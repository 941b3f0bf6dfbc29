#include "daemon/directory_impl.h"

#include <assert.h>

/* ---- going away ---- */

static void forget_key(directory *d, pool_slot s, const pool_row *r)
{
    slot_info *i = info_of(d, s);

    key_table_remove(&d->table, directory_hash(d, r->ns, r->key), s);
    if ((i->flags & SLOT_PARKED) == 0)
        d->ops->remove(d->evict, slot_order(d, s), s);
    i->flags |= SLOT_PARKED;
}

static void release_slot(directory *d, pool_slot s)
{
    extent_of(d, s)->n_busy--;
    directory_free_slot(d, s);
}

/* NONE: by a reset that is told as one event. */
static void count_removed(directory *d, directory_counts *of_ns, uint32_t cause)
{
    if (cause == WIRE_CAUSE_EVICTED) {
        d->stats.evicted++;
        of_ns->evicted++;
    } else if (cause == WIRE_CAUSE_REBOUND) {
        d->stats.rebound++;
        of_ns->rebound++;
    } else {
        d->stats.dropped++;
        of_ns->dropped++;
    }
}

void directory_take_away(directory *d, pool_slot s, uint32_t cause)
{
    const pool_row *r = pool_row_of(d->pool, s);
    slot_info *i = info_of(d, s);

    assert(r->state == POOL_READY && i->leases == 0 && (i->flags & SLOT_PINNED) == 0);
    forget_key(d, s, r);
    d->ns[r->ns]->pub.n_ready--;
    payer_of(d, s)->pub.n_ready--;
    d->stats.n_ready--;
    count_removed(d, &d->ns[r->ns]->pub.counts, cause);
    payer_of(d, s)->pub.evicted += cause == WIRE_CAUSE_EVICTED || cause == WIRE_CAUSE_REBOUND;
    extent_of(d, s)->n_ready--;
    if (cause != WIRE_CAUSE_NONE)
        directory_emit(d, WIRE_EVENT_REMOVED, cause, r);
    directory_verified(d, s); /* nobody will ask any more */
    if (i->holds > 0) {
        pool_drain(d->pool, s); /* busy before and after */
        return;
    }
    d->stats.evictable--;
    directory_free_slot(d, s);
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

/* The coldest block of the layout and tenant that may go and is no part of this call. */
static pool_slot victim_of(directory *d, admission *a, uint32_t layout, uint32_t tenant, uint64_t *ret_stamp)
{
    bool own = layout == a->layout && tenant == a->tenant; /* only here are blocks of this call */
    uint32_t order = order_of(d, layout, tenant);
    pool_slot passed = own ? a->passed : POOL_NONE;

    for (;;) {
        pool_slot s = d->ops->victim(d->evict, order, passed, ret_stamp);
        slot_info *i;
        bool early;

        if (s == POOL_NONE)
            return POOL_NONE;
        i = info_of(d, s);
        early = !a->for_quota && !may_give(d, s);
        if ((own && i->stamp >= a->kept_from) || early) {
            a->n_early += early;
            if (a->n_early > EARLY_MAX && early)
                return POOL_NONE;
            passed = s;
            if (own) /* nothing of this call goes before its end: the next search need not look at it again */
                a->passed = s;
        } else if (pool_row_of(d->pool, s)->state != POOL_READY || info_is_busy(i)) {
            d->ops->remove(d->evict, order, s);
            i->flags |= SLOT_PARKED;
        } else if (directory_is_closing(d, s)) {
            directory_take_away(d, s, WIRE_CAUSE_REBOUND); /* it goes anyway, and leaves no slot for us */
        } else {
            return s;
        }
    }
}

/* The coldest of all tenants who keep their floor without it.  A tenant below its own floor looks at itself last. */
static pool_slot coldest_victim(directory *d, admission *a, bool poor, uint64_t *ret_stamp)
{
    pool_slot best = POOL_NONE;

    for (uint32_t t = 0; t < d->n_tenants; t++) {
        uint64_t stamp = 0;
        pool_slot s;

        if (t == a->tenant ? poor : !directory_may_shrink(d, t, a->slot_bytes))
            continue;
        s = victim_of(d, a, a->layout, t, &stamp);
        if (s == POOL_NONE || (best != POOL_NONE && stamp >= *ret_stamp))
            continue;
        best = s;
        *ret_stamp = stamp;
    }
    return best;
}

/* The tenant's coldest block of whatever layout. */
static pool_slot coldest_of_tenant(directory *d, admission *a, uint32_t tenant)
{
    pool_slot best = POOL_NONE;
    uint64_t best_stamp = 0;

    for (uint32_t l = 0; l < pool_n_layouts(d->pool); l++) {
        uint64_t stamp = 0;
        pool_slot s = victim_of(d, a, l, tenant, &stamp);

        if (s == POOL_NONE || (best != POOL_NONE && stamp >= best_stamp))
            continue;
        best = s;
        best_stamp = stamp;
    }
    return best;
}

/* One block more must fit the quota. */
static bool keep_quota(directory *d, admission *a)
{
    const directory_tenant *t = &d->tenants[a->tenant].pub;

    while (a->slot_bytes > t->quota_bytes || t->used_bytes > t->quota_bytes - a->slot_bytes) {
        pool_slot victim = POOL_NONE;

        a->for_quota = true;
        if (a->slot_bytes <= t->quota_bytes)
            victim = coldest_of_tenant(d, a, a->tenant);
        a->for_quota = false;
        if (victim == POOL_NONE)
            return false;
        directory_take_away(d, victim, WIRE_CAUSE_EVICTED);
    }
    return true;
}

bool directory_trim(directory *d, uint32_t most)
{
    admission nobody = {.layout = POOL_NONE,
                        .tenant = POOL_NONE,
                        .base = UINT64_MAX,
                        .kept_from = UINT64_MAX,
                        .passed = POOL_NONE,
                        .for_quota = true};
    bool more = false;

    for (uint32_t t = 0; t < d->n_tenants; t++) {
        const directory_tenant *x = &d->tenants[t].pub;

        while (x->used_bytes > x->quota_bytes && most > 0) {
            pool_slot victim = coldest_of_tenant(d, &nobody, t);

            if (victim == POOL_NONE)
                break; /* what is in use now is looked at again when its tenant stores */
            directory_take_away(d, victim, WIRE_CAUSE_EVICTED);
            most--;
        }
        more = more || (x->used_bytes > x->quota_bytes && most == 0);
    }
    return more;
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

static uint64_t layout_bytes(const directory *d, uint32_t extent)
{
    pool_layout_info info;

    pool_layout_get(d->pool, pool_extent_layout(d->pool, extent, NULL, NULL, NULL), &info);
    return info.slot_bytes;
}

/* Is the one that was found still the one to take?  What went for this list meanwhile may be all that a tenant could spare. */
static bool is_foreign_known(const directory *d, const admission *a)
{
    return a->foreign_known && (a->foreign == POOL_NONE ||
                                directory_may_lose_shares(d, a->foreign, layout_bytes(d, a->foreign), a->tenant));
}

static void find_foreign(directory *d, admission *a, bool taker_has_none)
{
    uint32_t n = pool_n_layouts(d->pool) > 1 ? pool_n_extents(d->pool) : 0;

    a->foreign_known = true;
    a->foreign = POOL_NONE;
    for (uint32_t e = 0; e < n; e++) {
        uint64_t last = d->extents[e].n_ready == 0 ? 0 : d->extents[e].last;

        if ((a->foreign == POOL_NONE || last < a->foreign_last) && may_lose_extent(d, e, a->layout, taker_has_none) &&
            directory_may_lose_shares(d, e, layout_bytes(d, e), a->tenant)) {
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
    directory_close_extent(d, e);
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

static void evict_for(directory *d, const admission *a, pool_slot victim)
{
    tenant_entry *t = payer_of(d, victim);

    t->pub.for_others += t != &d->tenants[a->tenant];
    directory_take_away(d, victim, WIRE_CAUSE_EVICTED);
}

static kvs_status take_slot(directory *d, admission *a, pool_slot *ret)
{
    if (!keep_quota(d, a))
        return KVS_E_NO_SPACE;
    while (pool_take(d->pool, a->layout, ret) != KVS_OK) {
        bool poor = directory_is_poor(d, a->tenant, a->slot_bytes), has_none;
        uint64_t stamp = a->base;
        pool_slot victim = coldest_victim(d, a, poor, &stamp);

        if (victim == POOL_NONE)
            stamp = a->base;
        if (may_grow(d, a, &has_none)) {
            if (!is_foreign_known(d, a))
                find_foreign(d, a, has_none);
            if (a->foreign != POOL_NONE && a->foreign_last < stamp) {
                rebind(d, a);
                continue;
            }
        }
        if (victim == POOL_NONE && poor)
            victim = victim_of(d, a, a->layout, a->tenant, &stamp);
        if (victim == POOL_NONE)
            return KVS_E_NO_SPACE;
        evict_for(d, a, victim);
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

    if (r->parent == POOL_NONE || (p = pool_row_written(d->pool, r->parent)) == NULL)
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

static renewed_chain *chain_at(const directory *d, pool_slot bottom)
{
    return &d->chains[bottom * UINT32_C(0x9e3779b9) >> 16 & (CHAINS - 1)];
}

/* The chain with this bottom, if it needs no renewal for n blocks more.  The namespace must have so many others that none of
 * the chain is among the coldest: then it makes no difference. */
static renewed_chain *find_renewed(const directory *d, const admission *a, pool_slot bottom)
{
    renewed_chain *c = chain_at(d, bottom);

    if (bottom == POOL_NONE || c->bottom != bottom || c->gen != pool_row_of(d->pool, bottom)->gen || c->n < CHAIN_LONG)
        return NULL;
    if (a->n_keys > c->n / CHAIN_PART || c->added + a->n_keys > c->n / CHAIN_PART || d->stamp - c->at > c->n / 2 ||
        d->ns[a->ns]->pub.n_ready / 2 < c->n)
        return NULL;
    return c;
}

static void remember(directory *d, pool_slot bottom, const renewed_chain *c)
{
    renewed_chain *to;

    if (bottom == POOL_NONE)
        return;
    to = chain_at(d, bottom);
    *to = *c;
    to->bottom = bottom;
    to->gen = pool_row_of(d->pool, bottom)->gen;
}

/* The chain above the list is not evicted for the rest of it, and will be renewed. */
static void protect_chain(directory *d, admission *a)
{
    pool_slot top = a->top;

    a->was = NULL;
    a->kept_from = a->base;
    for (uint32_t i = 0; i < CHAIN_MAX && top != POOL_NONE; i++, top = parent_of(d, top)) {
        if (info_of(d, top)->stamp >= a->base)
            continue; /* it is in the list */
        info_of(d, top)->stamp = a->base;
        d->chain[a->n_chain++] = top;
    }
}

/* Mark what is there already of the list and of the chain above it, so that it is not evicted for the rest. */
static void protect(directory *d, admission *a, const pool_slot *slot, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (slot[i] != POOL_NONE)
            info_of(d, slot[i])->stamp = a->base;
    a->was = find_renewed(d, a, a->top);
    if (a->was != NULL)
        a->kept_from = a->was->from;
    else
        protect_chain(d, a);
}

static kvs_status admit_new(directory *d, admission *a, uint32_t depth, const uint8_t *key, pool_slot *ret)
{
    kvs_status s = a->full ? KVS_E_NO_SPACE : take_slot(d, a, ret);
    slot_info *i;

    if (s != KVS_OK && a->was != NULL) { /* others are as warm as the chain, and may go: now they are told apart */
        protect_chain(d, a);
        a->passed = POOL_NONE;
        s = take_slot(d, a, ret);
    }
    if (s != KVS_OK) {
        a->full = true;
        d->stats.no_space++;
        d->ns[a->ns]->pub.counts.no_space++;
        d->tenants[a->tenant].pub.no_space++;
        return s;
    }
    i = sparse_touch(&d->infos, *ret);
    pool_name(d->pool, *ret, a->ns, key, depth);
    directory_charge(d, *ret);
    s = key_table_insert(&d->table, directory_hash(d, a->ns, key), *ret);
    if (s != KVS_OK) {
        directory_free_slot(d, *ret);
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
    d->ns[a->ns]->pub.counts.exists++;
    return KVS_E_EXISTS;
}

/* The list and then the chain above it, deepest block first: the head ends as the most recent. */
static void renew(directory *d, const admission *a, const pool_slot *slot, uint32_t n)
{
    renewed_chain c = {.n = a->n_chain + n, .from = d->stamp + 1};

    directory_renew(d, slot, n);
    for (uint32_t i = 0; i < a->n_chain; i++)
        directory_touch(d, d->chain[i], ++d->stamp);
    c.at = d->stamp;
    if (a->was != NULL) {
        a->was->added += n;
        c = *a->was;
    }
    if (c.n < CHAIN_LONG)
        return;
    remember(d, a->top, &c);
    remember(d, a->before, &c);
}

static uint32_t depth_at(uint32_t first, uint32_t i)
{
    return first > UINT32_MAX - i ? UINT32_MAX : first + i;
}

void directory_admit_begin(directory *d, uint32_t ns, uint32_t first_depth, const uint8_t parent[32],
                           const uint8_t *keys, uint32_t n_keys, kvs_status *status, pool_slot *slot)
{
    const directory_ns *n = &d->ns[ns]->pub;
    pool_slot before = first_depth > 0 ? directory_find(d, ns, parent) : POOL_NONE;
    admission *a = &d->admission;

    *a = (admission){.ns = ns,
                     .layout = n->layout,
                     .tenant = n->tenant,
                     .slot_bytes = n->slot_bytes,
                     .base = d->stamp + 1,
                     .kept_from = d->stamp + 1,
                     .passed = POOL_NONE,
                     .foreign = POOL_NONE,
                     .first_depth = first_depth,
                     .before = before,
                     .keys = keys,
                     .n_keys = n_keys,
                     .status = status,
                     .slot = slot};
    for (uint32_t at = 0; at < n_keys; at += BATCH)
        directory_find_batch(d, ns, keys + (size_t)at * 32, n_keys - at < BATCH ? n_keys - at : BATCH, slot + at);
    /* A client that does not name the parent is helped by what the row remembers. */
    a->top = before == POOL_NONE && n_keys > 0 && slot[0] != POOL_NONE ? parent_of(d, slot[0]) : before;
    protect(d, a, slot, n_keys);
}

void directory_admit_next(directory *d, uint32_t n)
{
    admission *a = &d->admission;

    assert(n <= a->n_keys - a->n_done);
    for (; n > 0; n--, a->n_done++) {
        uint32_t i = a->n_done;

        a->status[i] = admit_one(d, a, depth_at(a->first_depth, i), a->keys + (size_t)i * 32, &a->slot[i]);
        set_parent(d, a->slot[i], a->before);
        a->before = a->slot[i];
    }
}

void directory_admit_end(directory *d)
{
    const admission *a = &d->admission;

    assert(a->n_done == a->n_keys);
    renew(d, a, a->slot, a->n_keys);
    for (uint32_t i = 0; i < a->n_keys; i++)
        if (a->status[i] != KVS_OK)
            a->slot[i] = POOL_NONE;
}

void directory_admit(directory *d, uint32_t ns, uint32_t first_depth, const uint8_t parent[32], const uint8_t *keys,
                     uint32_t n_keys, kvs_status *status, pool_slot *slot)
{
    directory_admit_begin(d, ns, first_depth, parent, keys, n_keys, status, slot);
    directory_admit_next(d, n_keys);
    directory_admit_end(d);
}

/* ---- the end of a write ---- */

void directory_became_ready(directory *d, pool_slot s)
{
    extent_of(d, s)->n_ready++;
    d->ns[pool_row_of(d->pool, s)->ns]->pub.n_ready++;
    payer_of(d, s)->pub.n_ready++;
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
    d->ns[r->ns]->pub.counts.stored++;
    d->tenants[d->ns[r->ns]->pub.tenant].pub.stored++;
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

void directory_resized(directory *d)
{
    uint32_t from = pool_n_allowed(d->pool);
    bool closing;

    for (uint32_t e = from; e < pool_n_extents(d->pool); e++)
        if (pool_extent_layout(d->pool, e, NULL, NULL, &closing) != POOL_NONE && !closing)
            directory_close_extent(d, e);
    /* All that are closing: if the pool is larger again, those that were to be given up are wanted back empty. */
    d->give_up = d->give_at = 0;
}

static bool is_closing_extent(const directory *d, uint32_t e)
{
    bool closing = false;

    return pool_extent_layout(d->pool, e, NULL, NULL, &closing) != POOL_NONE && closing;
}

/* A few thousand rows of one extent that is closing.  What is busy goes when it no longer is. */
static void give_up_some(directory *d)
{
    uint32_t n = pool_n_extents(d->pool), e = d->give_up;

    while (e < n && (!is_closing_extent(d, e) || d->give_at >= pool_extent_used(d->pool, e))) {
        e++;
        d->give_at = 0;
    }
    d->give_up = e < n ? e : POOL_NONE;
    if (e == n)
        return;
    directory_empty_rows(d, e, d->give_at, d->give_at + EMPTY_STEP);
    d->give_at += EMPTY_STEP;
}

bool directory_step(directory *d)
{
    if (directory_has_dead_leases(d))
        (void)directory_expire(d, 0);
    if (d->give_up != POOL_NONE)
        give_up_some(d);
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
    d->over_quota = d->over_quota && directory_trim(d, EMPTY_STEP);
    return directory_has_dead_leases(d) || key_table_step(&d->table, EMPTY_STEP) || d->emptying != POOL_NONE ||
           d->over_quota || d->give_up != POOL_NONE;
}
