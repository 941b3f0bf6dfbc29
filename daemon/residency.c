#include "daemon/directory_impl.h"

/* ---- pins ---- */

static pool_slot find_ready(const directory *d, uint32_t ns, const uint8_t key[32])
{
    pool_slot s = directory_find(d, ns, key);

    return s != POOL_NONE && pool_row_of(d->pool, s)->state == POOL_READY ? s : POOL_NONE;
}

static void set_pin(directory *d, pool_slot s, bool pinned)
{
    slot_info *i = info_of(d, s);
    ns_entry *n = d->ns[pool_row_of(d->pool, s)->ns];
    bool was = directory_change_begin(d, s);

    if (pinned == ((i->flags & SLOT_PINNED) != 0))
        return;
    if (pinned) {
        i->flags |= SLOT_PINNED;
        n->pub.n_pinned++;
        d->stats.n_pinned++;
        d->stats.pinned_bytes += n->pub.slot_bytes;
        d->tenants[n->pub.tenant].pub.pinned_bytes += n->pub.slot_bytes;
    } else {
        i->flags &= (uint8_t)~SLOT_PINNED;
        n->pub.n_pinned--;
        d->stats.n_pinned--;
        d->stats.pinned_bytes -= n->pub.slot_bytes;
        d->tenants[n->pub.tenant].pub.pinned_bytes -= n->pub.slot_bytes;
    }
    directory_change_end(d, s, was);
}

/* Nobody may hold for good what the others were promised. */
static bool may_pin(const directory *d, uint32_t ns)
{
    uint64_t most = directory_most_pinned(d, tenant_of(d, ns)), bytes = d->ns[ns]->pub.slot_bytes;

    return bytes <= most && d->tenants[tenant_of(d, ns)].pub.pinned_bytes <= most - bytes;
}

kvs_status directory_pin(directory *d, uint32_t ns, const uint8_t key[32])
{
    pool_slot s = find_ready(d, ns, key);
    const slot_info *i;

    if (s == POOL_NONE)
        return KVS_E_NOT_FOUND;
    i = info_of(d, s);
    if ((i->flags & SLOT_PINNED) != 0)
        return KVS_OK;
    if (directory_is_closing(d, s) && i->leases != 0)
        return KVS_E_BUSY; /* it goes with its last lease */
    if (directory_is_closing(d, s)) {
        /* Its extent is being given away and a pin would stop that for ever: it goes now instead of a moment
         * later. */
        directory_take_away(d, s, WIRE_CAUSE_REBOUND);
        return KVS_E_NOT_FOUND;
    }
    if (!may_pin(d, ns))
        return KVS_E_NO_SPACE;
    set_pin(d, s, true);
    return KVS_OK;
}

kvs_status directory_unpin(directory *d, uint32_t ns, const uint8_t key[32])
{
    pool_slot s = find_ready(d, ns, key);

    if (s == POOL_NONE)
        return KVS_E_NOT_FOUND;
    set_pin(d, s, false);
    return KVS_OK;
}

/* ---- drop ---- */

kvs_status directory_drop(directory *d, uint32_t ns, const uint8_t key[32])
{
    pool_slot s = directory_find(d, ns, key);
    const slot_info *i;

    if (s == POOL_NONE)
        return KVS_E_NOT_FOUND;
    if (pool_row_of(d->pool, s)->state == POOL_WRITING) {
        directory_doom(d, s);
        return KVS_OK;
    }
    i = info_of(d, s);
    if (i->leases != 0 || (i->flags & SLOT_PINNED) != 0)
        return KVS_E_BUSY;
    directory_take_away(d, s, WIRE_CAUSE_DROPPED);
    return KVS_OK;
}

/* ---- reset ---- */

typedef struct sweep {
    uint32_t tenant, ns;
    bool pinned_too;
    uint64_t left; /* slots in scope that are still to be come by */
    directory_reset_result *sum;
} sweep;

static bool in_sweep(const directory *d, const sweep *w, uint32_t ns)
{
    return (w->ns == WIRE_NONE32 || w->ns == ns) && (w->tenant == WIRE_NONE32 || w->tenant == d->ns[ns]->pub.tenant);
}

/* One event tells that a namespace was emptied, unless something of it stays. */
static bool is_told_at_once(const directory *d, const sweep *w, uint32_t ns)
{
    return w->pinned_too || d->ns[ns]->pub.n_pinned == 0;
}

static void reset_slot(directory *d, const sweep *w, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s);
    uint8_t flags = info_of(d, s)->flags;

    if (r->state == POOL_WRITING && (flags & SLOT_DOOMED) == 0) {
        directory_doom(d, s);
        w->sum->aborted++;
    } else if (r->state == POOL_READY && (flags & SLOT_PINNED) != 0 && !w->pinned_too) {
        w->sum->kept++;
    } else if (r->state == POOL_READY) {
        set_pin(d, s, false);
        if (r->state == POOL_READY) /* else the pin was all that kept it: its extent is being given away */
            directory_take_away(d, s, is_told_at_once(d, w, r->ns) ? WIRE_CAUSE_NONE : WIRE_CAUSE_DROPPED);
        w->sum->dropped++;
    }
}

static void reset_extent(directory *d, sweep *w, uint32_t extent)
{
    pool_slot first;

    (void)pool_extent_layout(d->pool, extent, &first, NULL, NULL);
    for (uint32_t i = 0; w->left > 0 && i < pool_extent_used(d->pool, extent); i++) {
        const pool_row *r = pool_row_of(d->pool, first + i);

        if (r->state == POOL_FREE || !in_sweep(d, w, r->ns))
            continue;
        w->left--;
        if (r->state == POOL_READY || r->state == POOL_WRITING)
            reset_slot(d, w, first + i);
    }
}

/* Only where its blocks are, and until the last one: who has few does not pay for all that others have. */
static void reset_extents(directory *d, sweep *w)
{
    uint32_t tenant = w->ns == WIRE_NONE32 ? w->tenant : tenant_of(d, w->ns);

    for (uint32_t i = 0; i < d->n_ns; i++)
        if (d->ns[i] != NULL && in_sweep(d, w, i))
            w->left += d->ns[i]->n_taken;
    for (uint32_t e = 0; w->left > 0 && e < pool_n_extents(d->pool); e++)
        if (directory_has_part(d, e, tenant))
            reset_extent(d, w, e);
}

void directory_reset(directory *d, uint32_t tenant, uint32_t ns, bool pinned_too, directory_reset_result *ret)
{
    static const uint8_t no_key[32];
    sweep w = {.tenant = tenant, .ns = ns, .pinned_too = pinned_too, .sum = ret};

    *ret = (directory_reset_result){.leases = directory_end_leases(d, tenant, ns)};
    reset_extents(d, &w);
    for (uint32_t i = 0; i < d->n_ns && d->on_event != NULL; i++)
        if (d->ns[i] != NULL && in_sweep(d, &w, i) && is_told_at_once(d, &w, i))
            d->on_event(d->ud, WIRE_EVENT_RESET, WIRE_CAUSE_NONE, i, 0, no_key);
}
