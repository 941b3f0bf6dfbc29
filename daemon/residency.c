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

static bool in_sweep(const directory *d, const directory_sweep *w, uint32_t ns)
{
    return d->ns[ns] != NULL && d->ns[ns]->pub.gone == w->gone && (w->ns == WIRE_NONE32 || w->ns == ns) &&
           (w->tenant == WIRE_NONE32 || w->tenant == tenant_of(d, ns));
}

/* Where it is counted that the sweep is on its way. */
static uint32_t *count_of(directory *d, const directory_sweep *w)
{
    if (w->ns != WIRE_NONE32)
        return &d->ns[w->ns]->n_sweeps;
    return w->tenant != WIRE_NONE32 ? &d->tenants[w->tenant].n_sweeps : &d->n_sweeps;
}

bool directory_is_swept(const directory *d, uint32_t ns)
{
    return d->n_sweeps > 0 || d->tenants[tenant_of(d, ns)].n_sweeps > 0 || d->ns[ns]->n_sweeps > 0;
}

/* One event tells that a namespace was emptied, unless something of it stays. */
static bool is_told_at_once(const directory_sweep *w, const ns_entry *n)
{
    return w->pinned_too || n->pub.n_pinned == 0;
}

static void reset_slot(directory *d, directory_sweep *w, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s);
    uint8_t flags = info_of(d, s)->flags;
    ns_entry *n = d->ns[r->ns];

    if (r->state == POOL_WRITING && (flags & SLOT_DOOMED) == 0) {
        directory_doom(d, s);
        w->sum.aborted++;
    } else if (r->state == POOL_READY && (flags & SLOT_PINNED) != 0 && !w->pinned_too) {
        w->sum.kept++;
    } else if (r->state == POOL_READY) {
        bool at_once = is_told_at_once(w, n);

        set_pin(d, s, false);
        n->untold = n->untold || at_once;
        if (r->state == POOL_READY) /* else the pin was all that kept it: its extent is being given away */
            directory_take_away(d, s, at_once ? WIRE_CAUSE_NONE : WIRE_CAUSE_DROPPED);
        w->sum.dropped++;
    }
}

/* False: the budget did not reach to the extent's end. */
static bool reset_extent(directory *d, directory_sweep *w, uint32_t *budget)
{
    pool_slot first;

    (void)pool_extent_layout(d->pool, w->extent, &first, NULL, NULL);
    /* The last block that goes unbinds the extent: ask again each time. */
    for (; w->left > 0 && w->row < pool_extent_used(d->pool, w->extent); w->row++) {
        const pool_row *r;

        if (*budget == 0)
            return false;
        --*budget;
        r = pool_row_of(d->pool, first + w->row);
        if (r->state == POOL_FREE || !in_sweep(d, w, r->ns))
            continue;
        w->left--;
        if (r->state == POOL_READY || r->state == POOL_WRITING)
            reset_slot(d, w, first + w->row);
    }
    return true;
}

void directory_reset_begin(directory *d, directory_sweep *w)
{
    if (!w->gone) { /* what is gone nobody can lease, and its leases have ended */
        ++*count_of(d, w);
        w->sum.leases = directory_end_leases(d, w->tenant, w->ns);
    }
    w->charged = d->n_charged;
    for (uint32_t i = 0; i < d->n_ns; i++)
        if (in_sweep(d, w, i))
            w->left += d->ns[i]->n_taken;
}

static bool is_named(const directory *d, const directory_sweep *w)
{
    for (uint32_t i = 0; i < d->n_ns; i++)
        if (in_sweep(d, w, i) && d->ns[i]->n_named > 0)
            return true;
    return false;
}

/* Only where its blocks are, and until the last one: who has few does not pay for all that others have.  A block does not move,
 * so that each one which was there at the beginning lies ahead until it is come by; what was taken since may lie ahead, too. */
bool directory_reset_step(directory *d, directory_sweep *w, uint32_t *budget)
{
    uint32_t tenant = w->ns == WIRE_NONE32 ? w->tenant : tenant_of(d, w->ns);

    /* What dead leases name is leased until they are gone; no new one names any of it meanwhile. */
    if (directory_has_dead_leases(d) && is_named(d, w)) {
        (void)directory_expire(d, 0);
        return true;
    }
    w->left += d->n_charged - w->charged;
    w->charged = d->n_charged;
    for (; w->left > 0 && w->extent < pool_n_extents(d->pool); w->extent++, w->row = 0) {
        if (*budget == 0 || (directory_has_part(d, w->extent, tenant) && !reset_extent(d, w, budget)))
            return true;
        *budget -= *budget > 0;
    }
    w->over = true;
    return false;
}

void directory_reset_end(directory *d, const directory_sweep *w)
{
    static const uint8_t no_key[32];

    if (!w->gone)
        --*count_of(d, w);
    for (uint32_t i = 0; i < d->n_ns; i++) {
        ns_entry *n = d->ns[i];

        if (!in_sweep(d, w, i) || !(n->untold || (w->over && is_told_at_once(w, n))))
            continue;
        n->untold = false;
        if (d->on_event != NULL)
            d->on_event(d->ud, WIRE_EVENT_RESET, WIRE_CAUSE_NONE, i, 0, no_key);
    }
}
