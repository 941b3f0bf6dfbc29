#include "daemon/directory_impl.h"

#include <stdlib.h>

/* Adoption: the pool says which rows came back, the table which namespaces they name. */

static bool find_tenant(const directory *d, const char *name, uint32_t *ret)
{
    char *end;
    unsigned long n;

    if (d->tenant_find != NULL)
        return d->tenant_find(d->ud, name, ret);
    n = strtoul(name, &end, 10);
    *ret = (uint32_t)n;
    return name[0] != '\0' && *end == '\0' && n <= UINT32_MAX;
}

static bool is_there(const directory *d, const ns_entry *n)
{
    for (uint32_t i = 0; i < d->n_ns; i++) {
        const ns_entry *x = d->ns[i];

        if (x != NULL && x->pub.tenant == n->pub.tenant && x->canon_len == n->canon_len &&
            memcmp(x->canon, n->canon, n->canon_len) == 0)
            return true;
    }
    return false;
}

/* One that is not what it says, or nobody's any more, is left out: its blocks are released, then it is dropped. */
static kvs_status adopt_ns(directory *d, uint32_t number, kvs_err *err)
{
    table_ns kept;
    ns_entry *n;
    uint32_t tenant;
    kvs_status s;

    if (pool_get_ns(d->pool, number, &kept) != TABLE_GOOD || !find_tenant(d, kept.tenant, &tenant) ||
        tenant >= d->n_tenants)
        return KVS_OK;
    if ((s = directory_ns_reserve(d, number, tenant, kept.canon_len, err)) != KVS_OK)
        return s == KVS_E_LIMIT ? KVS_OK : s; /* there are more tenants now, and a smaller part for each */
    s = directory_ns_create(d, &n, tenant, kept.canon, kept.canon_len, err);
    if (s != KVS_OK)
        return s == KVS_E_NO_MEMORY ? s : KVS_OK;
    if (memcmp(n->pub.digest, kept.digest, sizeof kept.digest) != 0 || is_there(d, n))
        directory_ns_destroy(n);
    else
        directory_ns_set(d, number, n);
    return KVS_OK;
}

/* ---- rows ---- */

static uint64_t n_ready(const pool *p)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < pool_n_layouts(p); i++) {
        pool_layout_info l;

        pool_layout_get(p, i, &l);
        n += l.n_ready;
    }
    return n;
}

/* Depth and slot of every ready row, so that sorting gives the deepest first. */
static uint64_t list_rows(const directory *d, uint64_t *ret)
{
    uint64_t n = 0;

    for (uint32_t e = 0; e < pool_n_extents(d->pool); e++) {
        pool_slot first;

        if (pool_extent_layout(d->pool, e, &first, NULL, NULL) == POOL_NONE)
            continue;
        for (uint32_t i = 0; i < pool_extent_used(d->pool, e); i++) {
            const pool_row *r = pool_row_of(d->pool, first + i);

            if (r->state == POOL_READY)
                ret[n++] = (uint64_t)~r->depth << 32 | (first + i);
        }
    }
    return n;
}

static int compare_rows(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static bool adopt_row(directory *d, pool_slot s)
{
    const pool_row *r = pool_row_of(d->pool, s);
    uint32_t layout = pool_layout_of(d->pool, s);
    slot_info *i;

    if (r->ns >= d->n_ns || d->ns[r->ns] == NULL || d->ns[r->ns]->pub.layout != layout ||
        directory_find(d, r->ns, r->key) != POOL_NONE)
        return false;
    if (key_table_insert(&d->table, directory_hash(d, r->ns, r->key), s) != KVS_OK)
        return false;
    i = sparse_touch(&d->infos, s);
    *i = (slot_info){.stamp = ++d->stamp, .flags = SLOT_UNVERIFIED};
    extent_of(d, s)->last = d->stamp;
    directory_charge(d, s);
    d->ops->insert(d->evict, slot_order(d, s), s, d->stamp);
    directory_became_ready(d, s);
    d->stats.evictable++;
    d->stats.unverified++;
    d->stats.adopted++;
    d->ns[r->ns]->pub.counts.adopted++;
    return true;
}

static kvs_status adopt_rows(directory *d, kvs_err *err)
{
    uint64_t n = n_ready(d->pool), *rows = malloc((size_t)n * sizeof *rows + 1);

    if (rows == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "directory: no memory for %llu blocks to adopt", (unsigned long long)n);
    n = list_rows(d, rows);
    qsort(rows, (size_t)n, sizeof *rows, compare_rows);
    for (uint64_t i = 0; i < n; i++) {
        pool_slot s = (pool_slot)rows[i];

        if (adopt_row(d, s))
            continue;
        pool_release(d->pool, s);
        d->stats.refused++;
    }
    free(rows);
    return KVS_OK;
}

/* ---- all of it ---- */

/* Numbers would run out over many lives: those without a block can be given anew. */
static void drop_empty(directory *d)
{
    for (uint32_t i = 0; i < TABLE_MAX_NS; i++) {
        const ns_entry *n = i < d->n_ns ? d->ns[i] : NULL;
        table_ns kept;

        if (n != NULL && n->pub.n_ready > 0)
            continue;
        if (n != NULL)
            directory_ns_unset(d, i);
        if (pool_get_ns(d->pool, i, &kept) != TABLE_VOID)
            pool_drop_ns(d->pool, i);
    }
    while (d->n_ns > 0 && d->ns[d->n_ns - 1] == NULL)
        d->n_ns--;
}

kvs_status directory_adopt(directory *d, kvs_err *err)
{
    const pool_adoption *a = pool_adopted(d->pool);
    kvs_status s = KVS_OK;

    if (!a->adopted)
        return KVS_OK;
    for (uint32_t i = 0; i < TABLE_MAX_NS && s == KVS_OK; i++)
        s = adopt_ns(d, i, err);
    if (s == KVS_OK)
        s = adopt_rows(d, err);
    if (s != KVS_OK)
        return s;
    d->stats.refused += a->torn + a->no_sum;
    drop_empty(d);
    return KVS_OK;
}
