#include "daemon/directory_impl.h"

#include <assert.h>
#include <stdlib.h>

/* ---- what each pays for ---- */

static uint32_t *share_of(const directory *d, uint32_t extent, uint32_t tenant)
{
    return sparse_at(&d->shares, (uint64_t)extent * d->max_tenants + tenant);
}

void directory_charge(directory *d, pool_slot s)
{
    uint32_t ns = pool_row_of(d->pool, s)->ns, e = pool_extent_of(d->pool, s), t = tenant_of(d, ns);

    d->tenants[t].pub.used_bytes += d->ns[ns]->pub.slot_bytes;
    d->ns[ns]->n_taken++;
    d->n_charged++;
    ++*(uint32_t *)sparse_touch(&d->shares, (uint64_t)e * d->max_tenants + t);
}

void directory_free_slot(directory *d, pool_slot s)
{
    uint32_t ns = pool_row_of(d->pool, s)->ns, t = tenant_of(d, ns);
    uint64_t bytes = d->ns[ns]->pub.slot_bytes;
    uint32_t e = pool_extent_of(d->pool, s);
    uint32_t *share = share_of(d, e, t);

    assert(*share > 0 && d->tenants[t].pub.used_bytes >= bytes);
    --*share;
    d->ns[ns]->n_taken--;
    d->tenants[t].pub.used_bytes -= bytes;
    if (d->extents[e].leaving)
        d->tenants[t].leaving -= bytes;
    pool_release(d->pool, s);
    if (d->extents[e].leaving)
        d->extents[e].leaving = pool_extent_layout(d->pool, e, NULL, NULL, NULL) != POOL_NONE;
}

void directory_close_extent(directory *d, uint32_t extent)
{
    pool_layout_info info;

    pool_layout_get(d->pool, pool_extent_layout(d->pool, extent, NULL, NULL, NULL), &info);
    for (uint32_t t = 0; t < d->n_tenants; t++)
        d->tenants[t].leaving += *share_of(d, extent, t) * info.slot_bytes;
    pool_extent_close(d->pool, extent);
    d->extents[extent].leaving = pool_extent_layout(d->pool, extent, NULL, NULL, NULL) != POOL_NONE;
}

/* ---- floors ---- */

static uint64_t staying(const tenant_entry *t)
{
    return t->pub.used_bytes - t->leaving;
}

bool directory_has_part(const directory *d, uint32_t extent, uint32_t tenant)
{
    return tenant == WIRE_NONE32 || *share_of(d, extent, tenant) > 0;
}

bool directory_may_shrink(const directory *d, uint32_t tenant, uint64_t bytes)
{
    const tenant_entry *t = &d->tenants[tenant];

    return bytes == 0 || t->pub.floor_bytes == 0 || (staying(t) >= bytes && staying(t) - bytes >= t->pub.floor_bytes);
}

bool directory_is_poor(const directory *d, uint32_t tenant, uint64_t bytes)
{
    const tenant_entry *t = &d->tenants[tenant];

    return t->pub.floor_bytes != 0 && staying(t) + bytes <= t->pub.floor_bytes;
}

bool directory_may_lose_shares(const directory *d, uint32_t extent, uint64_t slot_bytes, uint32_t taker)
{
    for (uint32_t t = 0; d->has_floors && t < d->n_tenants; t++)
        if (t != taker && !directory_may_shrink(d, t, *share_of(d, extent, t) * slot_bytes))
            return false;
    return true;
}

uint64_t directory_most_pinned(const directory *d, uint32_t tenant)
{
    uint64_t kept = 0;
    pool_bytes b;

    if (!d->has_floors)
        return UINT64_MAX;
    for (uint32_t t = 0; t < d->n_tenants; t++) {
        const directory_tenant *x = &d->tenants[t].pub;

        if (t != tenant) /* what it pinned above its floor is as little there for the others as its floor is */
            kept += x->pinned_bytes > x->floor_bytes ? x->pinned_bytes : x->floor_bytes;
    }
    pool_get_bytes(d->pool, &b);
    return b.max > kept ? b.max - kept : 0;
}

kvs_status directory_check_size(const directory *d, uint64_t max_bytes, const char *const *names,
                                const uint64_t *floors, kvs_err *err)
{
    uint32_t from = (uint32_t)(max_bytes / pool_extent_bytes(d->pool)), n = pool_n_extents(d->pool);

    for (uint32_t t = 0; t < d->n_tenants; t++) {
        uint64_t goes = 0, stays = staying(&d->tenants[t]);

        for (uint32_t e = from; e < n && floors[t] != 0; e++) {
            pool_layout_info info;
            uint32_t l = pool_extent_layout(d->pool, e, NULL, NULL, NULL);

            if (l == POOL_NONE || d->extents[e].leaving)
                continue;
            pool_layout_get(d->pool, l, &info);
            goes += *share_of(d, e, t) * info.slot_bytes;
        }
        if (goes > 0 && stays - goes < floors[t])
            return kvs_fail(
                err, KVS_E_CONFIG,
                "pool.max_bytes: %llu bytes would leave tenant %s %llu bytes, of %llu now and a floor of %llu: "
                "lower its floor_bytes first",
                (unsigned long long)max_bytes, names[t], (unsigned long long)(stays - goes), (unsigned long long)stays,
                (unsigned long long)floors[t]);
    }
    return KVS_OK;
}

/* ---- limits and numbers ---- */

void directory_add_tenants(directory *d, uint32_t n_tenants)
{
    assert(n_tenants <= d->max_tenants);
    d->n_tenants = n_tenants > d->n_tenants ? n_tenants : d->n_tenants;
}

void directory_limit_tenant(directory *d, uint32_t tenant, uint64_t quota_bytes, uint64_t floor_bytes)
{
    directory_tenant *t = &d->tenants[tenant].pub;

    assert(tenant < d->n_tenants);
    t->quota_bytes = quota_bytes != 0 ? quota_bytes : UINT64_MAX;
    t->floor_bytes = floor_bytes;
    d->over_quota = d->over_quota || t->used_bytes > t->quota_bytes;
    d->has_floors = false;
    for (uint32_t i = 0; i < d->n_tenants; i++)
        d->has_floors = d->has_floors || d->tenants[i].pub.floor_bytes != 0;
}

void directory_get_tenant(const directory *d, uint32_t tenant, directory_tenant *ret)
{
    *ret = d->tenants[tenant].pub;
}

/* ---- check ---- */

static kvs_status differs(kvs_err *err, const char *what, uint64_t at, uint64_t found, uint64_t counted)
{
    return kvs_fail(err, KVS_E_CORRUPT, "directory: %s of %llu: %llu found, %llu on the books", what,
                    (unsigned long long)at, (unsigned long long)found, (unsigned long long)counted);
}

/* Adds what the extent's rows say to sums[t].used_bytes and .leaving, and to taken[ns]; seen: scratch, [n_tenants]. */
static kvs_status recount_extent(const directory *d, uint32_t e, tenant_entry *sums, uint64_t *taken, uint32_t *seen,
                                 kvs_err *err)
{
    bool leaving = d->extents[e].leaving;
    pool_slot first;

    (void)pool_extent_layout(d->pool, e, &first, NULL, NULL);
    memset(seen, 0, d->n_tenants * sizeof *seen);
    for (uint32_t i = 0; i < pool_extent_used(d->pool, e); i++) {
        const pool_row *r = pool_row_of(d->pool, first + i);

        if (r->state == POOL_FREE)
            continue;
        if (r->ns >= d->n_ns || d->ns[r->ns] == NULL)
            return differs(err, "namespace of row", first + i, r->ns, d->n_ns);
        seen[tenant_of(d, r->ns)]++;
        taken[r->ns]++;
        sums[tenant_of(d, r->ns)].pub.used_bytes += d->ns[r->ns]->pub.slot_bytes;
        sums[tenant_of(d, r->ns)].leaving += leaving ? d->ns[r->ns]->pub.slot_bytes : 0;
    }
    for (uint32_t t = 0; t < d->n_tenants; t++)
        if (seen[t] != *share_of(d, e, t))
            return differs(err, "tenant's slots in extent", e, seen[t], *share_of(d, e, t));
    return KVS_OK;
}

static kvs_status check_sums(const directory *d, const tenant_entry *sums, kvs_err *err)
{
    uint64_t all = 0, taken;
    pool_bytes b;

    for (uint32_t t = 0; t < d->n_tenants; t++) {
        const tenant_entry *x = &d->tenants[t];

        if (sums[t].pub.used_bytes != x->pub.used_bytes || sums[t].leaving != x->leaving)
            return differs(err, "bytes of tenant", t, sums[t].pub.used_bytes + sums[t].leaving,
                           x->pub.used_bytes + x->leaving);
        if (sums[t].pub.pinned_bytes != x->pub.pinned_bytes || sums[t].pub.leased_bytes != x->pub.leased_bytes)
            return differs(err, "pinned and leased bytes of tenant", t,
                           sums[t].pub.pinned_bytes + sums[t].pub.leased_bytes,
                           x->pub.pinned_bytes + x->pub.leased_bytes);
        if (sums[t].pub.n_ready != x->pub.n_ready)
            return differs(err, "ready blocks of tenant", t, sums[t].pub.n_ready, x->pub.n_ready);
        all += x->pub.used_bytes;
    }
    pool_get_bytes(d->pool, &b);
    taken = b.writing + b.ready + b.draining + b.quarantined;
    return all == taken ? KVS_OK : differs(err, "bytes of all tenants", 0, taken, all);
}

kvs_status directory_check_tenants(const directory *d, kvs_err *err)
{
    tenant_entry *sums = calloc(d->n_tenants, sizeof *sums);
    uint64_t *taken = calloc((size_t)d->n_ns + 1, sizeof *taken);
    uint32_t *seen = calloc(d->n_tenants, sizeof *seen);
    kvs_status s = sums != NULL && taken != NULL && seen != NULL
                       ? KVS_OK
                       : kvs_fail(err, KVS_E_NO_MEMORY, "directory: no memory to check it");

    for (uint32_t e = 0; e < pool_n_extents(d->pool) && s == KVS_OK; e++)
        s = recount_extent(d, e, sums, taken, seen, err);
    for (uint32_t i = 0; i < d->n_ns && s == KVS_OK; i++) {
        if (d->ns[i] == NULL)
            continue;
        if (taken[i] != d->ns[i]->n_taken)
            s = differs(err, "slots of namespace", i, taken[i], d->ns[i]->n_taken);
        sums[tenant_of(d, i)].pub.n_ready += d->ns[i]->pub.n_ready;
        sums[tenant_of(d, i)].pub.pinned_bytes += d->ns[i]->pub.n_pinned * d->ns[i]->pub.slot_bytes;
        sums[tenant_of(d, i)].pub.leased_bytes += d->ns[i]->pub.n_leased * d->ns[i]->pub.slot_bytes;
    }
    if (s == KVS_OK)
        s = check_sums(d, sums, err);
    free(seen);
    free(taken);
    free(sums);
    return s;
}
