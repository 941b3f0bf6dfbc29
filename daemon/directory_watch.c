#include "daemon/directory_impl.h"

#include <stdlib.h>

/* ---- numbers ---- */

static uint64_t directory_memory(const directory *d)
{
    return sizeof *d + pool_n_extents(d->pool) * sizeof *d->extents + CHAIN_MAX * sizeof *d->chain +
           CHAINS * sizeof *d->chains + sparse_resident(&d->infos) + sparse_resident(&d->shares) +
           d->max_tenants * sizeof *d->tenants + key_table_bytes(&d->table) + d->cap_ns * sizeof *d->ns + d->ns_memory +
           d->leases.cap * sizeof *d->leases.heap + 2 * (uint64_t)d->leases.n_buckets * sizeof *d->leases.buckets +
           d->leases.memory + d->ops->bytes(d->evict) + pool_metadata_bytes(d->pool);
}

void directory_get_stats(const directory *d, uint64_t now_us, directory_stats *ret)
{
    *ret = d->stats;
    ret->n_leases = d->leases.n;
    ret->oldest_lease_us = 0;
    if (d->leases.oldest != NULL && now_us > d->leases.oldest->created_us)
        ret->oldest_lease_us = now_us - d->leases.oldest->created_us;
    ret->metadata_bytes = directory_memory(d);
}

/* ---- listing ---- */

static directory_key_info key_info(const directory *d, pool_slot s, const pool_row *r)
{
    const slot_info *i = info_of(d, s);
    directory_key_info k = {
        .ns = r->ns,
        .depth = r->depth,
        .gen = r->gen,
        .state = r->state,
        .holds = i->holds,
        .leases = i->leases,
        .pinned = (i->flags & SLOT_PINNED) != 0,
        .checksum = r->checksum,
        .slot = s,
    };

    memcpy(k.key, r->key, 32);
    return k;
}

uint64_t directory_each_key(const directory *d, uint32_t ns, uint64_t cursor, uint32_t limit,
                            void (*f)(void *ud, const directory_key_info *k), void *ud)
{
    enum { VISIT = 65536 };
    uint64_t end = pool_max_rows(d->pool);
    uint32_t given = 0;

    for (uint32_t visited = 0; cursor < end && visited < VISIT && given < limit; visited++) {
        uint32_t e = pool_extent_of(d->pool, (pool_slot)cursor);
        pool_slot first;
        const pool_row *r;
        directory_key_info k;

        (void)pool_extent_layout(d->pool, e, &first, NULL, NULL);
        if (cursor - first >= pool_extent_used(d->pool, e)) {
            cursor = (uint64_t)first + pool_extent_bytes(d->pool) / POOL_SLOT_MIN_BYTES; /* the next extent's */
            continue;
        }
        r = pool_row_of(d->pool, (pool_slot)cursor);
        if (r->state != POOL_FREE && (ns == WIRE_NONE32 || ns == r->ns)) {
            k = key_info(d, (pool_slot)cursor, r);
            f(ud, &k);
            given++;
        }
        cursor++;
    }
    return cursor < end ? cursor : UINT64_MAX;
}

/* ---- check ---- */

typedef struct recount {
    sparse leases;    /* u16 by slot */
    uint64_t *ready;  /* by namespace */
    uint64_t *pinned; /* by namespace */
    uint64_t *leased; /* by namespace */
    uint64_t *named;  /* by namespace: leases */
    uint64_t n_found, n_held, evictable, in_order, unverified;
} recount;

static kvs_status differs(kvs_err *err, const char *what, uint64_t at, uint64_t found, uint64_t counted)
{
    return kvs_fail(err, KVS_E_CORRUPT, "directory: %s of %llu: %llu found, %llu on the books", what,
                    (unsigned long long)at, (unsigned long long)found, (unsigned long long)counted);
}

static kvs_status recount_leases(const directory *d, recount *c, kvs_err *err)
{
    uint64_t slots = 0;

    for (uint32_t i = 0; i < d->leases.n; i++) {
        const lease *l = d->leases.heap[i];

        if (l->heap_at != i || (i > 0 && d->leases.heap[(i - 1) / 2]->ends_us > l->ends_us))
            return differs(err, "place of lease", i, l->heap_at, i);
        for (uint64_t k = 0; k < (uint64_t)l->n_ns * l->n_leased; k++)
            ++*(uint16_t *)sparse_touch(&c->leases, l->slots[k]);
        for (uint32_t k = 0; k < l->n_ns; k++)
            c->named[l->ns[k]]++;
        slots += (uint64_t)l->n_ns * l->n_leased;
    }
    for (uint32_t t = 0; t < d->n_tenants; t++)
        slots -= d->tenants[t].n_named;
    return slots == 0 ? KVS_OK : differs(err, "blocks that leases name", 0, slots, 0);
}

/* A slot whose key can be asked for. */
static kvs_status check_findable(const directory *d, recount *c, pool_slot s, const pool_row *r, kvs_err *err)
{
    const slot_info *i = info_of(d, s);
    pool_slot found;

    if (r->ns >= d->n_ns || d->ns[r->ns] == NULL)
        return differs(err, "namespace of row", s, r->ns, d->n_ns);
    found = directory_find(d, r->ns, r->key);
    if (found != s)
        return differs(err, "place of the key in row", s, found, s);
    if (pool_layout_of(d->pool, s) != d->ns[r->ns]->pub.layout)
        return differs(err, "layout of row", s, pool_layout_of(d->pool, s), d->ns[r->ns]->pub.layout);
    c->n_found++;
    c->in_order += (i->flags & SLOT_PARKED) == 0;
    if (r->state != POOL_READY)
        return KVS_OK;
    c->ready[r->ns]++;
    c->pinned[r->ns] += (i->flags & SLOT_PINNED) != 0;
    c->leased[r->ns] += i->leases != 0;
    c->evictable += !info_is_busy(i);
    if (!info_is_busy(i) && (i->flags & SLOT_PARKED) != 0)
        return differs(err, "order of the idle row", s, 0, 1);
    return KVS_OK;
}

static kvs_status check_row(const directory *d, recount *c, pool_slot s, const pool_row *r, extent_info *sum,
                            kvs_err *err)
{
    const slot_info *i = info_of(d, s);
    uint16_t leases = *(const uint16_t *)sparse_at(&c->leases, s);
    bool ready = r->state == POOL_READY;
    bool reads = ready || r->state == POOL_DRAINING;

    if (leases != i->leases && (ready || leases != 0))
        return differs(err, "leases of row", s, leases, i->leases);
    if (r->state == POOL_DRAINING && i->holds == 0)
        return differs(err, "holds of the draining row", s, 0, 1);
    c->n_held += reads && i->holds > 0;
    c->unverified += ready && (i->flags & SLOT_UNVERIFIED) != 0;
    sum->n_ready += ready;
    sum->n_busy += !ready || info_is_busy(i);
    if (ready || (r->state == POOL_WRITING && (i->flags & SLOT_DOOMED) == 0))
        return check_findable(d, c, s, r, err);
    return KVS_OK;
}

static kvs_status check_rows(const directory *d, recount *c, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (uint32_t e = 0; e < pool_n_extents(d->pool); e++) {
        extent_info sum = {0};
        pool_slot first;

        (void)pool_extent_layout(d->pool, e, &first, NULL, NULL);
        for (uint32_t i = 0; i < pool_extent_used(d->pool, e) && s == KVS_OK; i++) {
            const pool_row *r = pool_row_of(d->pool, first + i);

            if (r->state != POOL_FREE)
                s = check_row(d, c, first + i, r, &sum, err);
        }
        if (s != KVS_OK)
            return s;
        if (sum.n_ready != d->extents[e].n_ready)
            return differs(err, "ready slots of extent", e, sum.n_ready, d->extents[e].n_ready);
        if (sum.n_busy != d->extents[e].n_busy)
            return differs(err, "busy slots of extent", e, sum.n_busy, d->extents[e].n_busy);
    }
    return KVS_OK;
}

static kvs_status check_sums(const directory *d, const recount *c, kvs_err *err)
{
    uint64_t ready = 0, pinned = 0, leased = 0, leased_bytes = 0, pinned_bytes = 0;
    const directory_stats *t = &d->stats;

    for (uint32_t i = 0; i < d->n_ns; i++) {
        const ns_entry *n = d->ns[i];

        if (n == NULL)
            continue;
        if (c->ready[i] != n->pub.n_ready)
            return differs(err, "ready slots of namespace", i, c->ready[i], n->pub.n_ready);
        if (c->pinned[i] != n->pub.n_pinned || c->leased[i] != n->pub.n_leased)
            return differs(err, "pins and leases of namespace", i, c->pinned[i] + c->leased[i],
                           n->pub.n_pinned + n->pub.n_leased);
        if (c->named[i] != n->n_named)
            return differs(err, "leases of namespace", i, c->named[i], n->n_named);
        ready += c->ready[i];
        pinned += c->pinned[i];
        leased += c->leased[i];
        leased_bytes += c->leased[i] * n->pub.slot_bytes;
        pinned_bytes += c->pinned[i] * n->pub.slot_bytes;
    }
    if (ready != t->n_ready || pinned != t->n_pinned || leased != t->n_leased)
        return differs(err, "ready, pinned and leased sums", 0, ready + pinned + leased,
                       t->n_ready + t->n_pinned + t->n_leased);
    if (leased_bytes != t->leased_bytes || pinned_bytes != t->pinned_bytes)
        return differs(err, "leased and pinned bytes", 0, leased_bytes + pinned_bytes,
                       t->leased_bytes + t->pinned_bytes);
    if (c->n_held != t->n_held)
        return differs(err, "held slots", 0, c->n_held, t->n_held);
    if (c->evictable != t->evictable)
        return differs(err, "evictable slots", 0, c->evictable, t->evictable);
    if (c->unverified != t->unverified)
        return differs(err, "unverified blocks", 0, c->unverified, t->unverified);
    if (c->n_found != key_table_count(&d->table))
        return differs(err, "keys", 0, c->n_found, key_table_count(&d->table));
    return KVS_OK;
}

/* Every slot in the policy's order is one whose key can be found, once. */
static kvs_status check_order(const directory *d, const recount *c, kvs_err *err)
{
    uint64_t n = 0, stamp;

    for (uint32_t l = 0; l < pool_n_layouts(d->pool) * d->max_tenants; l++)
        for (pool_slot s = d->ops->victim(d->evict, l, POOL_NONE, &stamp); s != POOL_NONE && n <= c->in_order; n++) {
            if (slot_order(d, s) != l || (info_of(d, s)->flags & SLOT_PARKED) != 0)
                return differs(err, "order of layout and tenant at row", s, l, slot_order(d, s));
            s = d->ops->victim(d->evict, l, s, &stamp);
        }
    return n == c->in_order ? KVS_OK : differs(err, "order", 0, n, c->in_order);
}

kvs_status directory_check(const directory *d, kvs_err *err)
{
    recount c = {0};
    uint64_t *sums = calloc((size_t)d->n_ns * 4 + 1, sizeof *sums);
    kvs_status s = pool_check(d->pool, err);

    if (s == KVS_OK && sums == NULL)
        s = kvs_fail(err, KVS_E_NO_MEMORY, "directory: no memory to check it");
    if (s == KVS_OK)
        s = sparse_init(&c.leases, -1, pool_max_rows(d->pool), sizeof(uint16_t), err);
    c.ready = sums;
    if (s == KVS_OK) {
        c.pinned = sums + d->n_ns;
        c.leased = c.pinned + d->n_ns;
        c.named = c.leased + d->n_ns;
        s = recount_leases(d, &c, err);
    }
    if (s == KVS_OK)
        s = check_rows(d, &c, err);
    if (s == KVS_OK)
        s = check_sums(d, &c, err);
    if (s == KVS_OK)
        s = check_order(d, &c, err);
    if (s == KVS_OK)
        s = directory_check_tenants(d, err);
    sparse_fini(&c.leases);
    free(sums);
    return s;
}
