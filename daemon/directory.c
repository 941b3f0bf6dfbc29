#include "daemon/directory_impl.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

/* ---- create and destroy ---- */

kvs_status directory_create(directory **ret, const directory_config *c, kvs_err *err)
{
    directory *d = calloc(1, sizeof *d);
    kvs_status s = KVS_E_NO_MEMORY;

    if (d == NULL)
        return kvs_fail(err, s, "directory: no memory");
    d->pool = c->pool;
    d->ops = c->evict;
    d->hash_seed = c->hash_seed;
    d->on_event = c->on_event;
    d->ud = c->ud;
    d->tenant_name = c->tenant_name;
    d->tenant_find = c->tenant_find;
    d->emptying = d->give_up = POOL_NONE;
    d->n_tenants = c->n_tenants > 0 ? c->n_tenants : 1;
    d->max_tenants = c->max_tenants > d->n_tenants ? c->max_tenants : d->n_tenants;
    d->extents = calloc(pool_n_extents(c->pool), sizeof *d->extents);
    d->tenants = calloc(d->max_tenants, sizeof *d->tenants);
    d->chain = malloc(CHAIN_MAX * sizeof *d->chain);
    d->chains = calloc(CHAINS, sizeof *d->chains);
    if (d->extents == NULL || d->tenants == NULL || d->chain == NULL || d->chains == NULL ||
        key_table_init(&d->table) != KVS_OK)
        goto fail;
    if ((s = sparse_init(&d->infos, -1, pool_max_rows(c->pool), sizeof(slot_info), err)) != KVS_OK)
        goto fail;
    if ((s = sparse_init(&d->shares, -1, (uint64_t)pool_n_extents(c->pool) * d->max_tenants, sizeof(uint32_t), err)) !=
        KVS_OK)
        goto fail;
    if ((s = d->ops->create(&d->evict, pool_max_rows(c->pool), POOL_MAX_LAYOUTS * d->max_tenants)) != KVS_OK)
        goto fail;
    for (uint32_t t = 0; t < d->max_tenants; t++)
        d->tenants[t].pub.quota_bytes = UINT64_MAX;
    if ((s = directory_adopt(d, err)) != KVS_OK)
        goto fail;
    *ret = d;
    return KVS_OK;
fail:
    directory_destroy(d);
    return kvs_fail(err, s, "directory: no memory for %lu slots", (unsigned long)pool_max_rows(c->pool));
}

void directory_ns_destroy(ns_entry *n)
{
    if (n == NULL)
        return;
    free(n->canon);
    free(n->planes);
    free(n);
}

void directory_destroy(directory *d)
{
    if (d == NULL)
        return;
    directory_leases_fini(d);
    for (uint32_t i = 0; i < d->n_ns; i++)
        directory_ns_destroy(d->ns[i]);
    free(d->ns);
    if (d->evict != NULL)
        d->ops->destroy(d->evict);
    sparse_fini(&d->infos);
    sparse_fini(&d->shares);
    key_table_fini(&d->table);
    free(d->extents);
    free(d->tenants);
    free(d->chain);
    free(d->chains);
    free(d);
}

/* ---- namespaces ---- */

/* What the blocks look like, whoever they belong to: the digest of the same description with everything else
 * blanked. Models of one shape share extents. */
static kvs_status layout_digest(const kvs_namespace *desc, uint8_t ret[32], kvs_err *err)
{
    kvs_namespace shape = *desc;

    memset(shape.model, 0, sizeof shape.model);
    memset(shape.weights, 0, sizeof shape.weights);
    memcpy(shape.model, "layout", 6);
    shape.shard = KVS_SHARD_REPLICATED;
    shape.shard_a = shape.shard_b = shape.shard_n = 0;
    return kvs_namespace_digest(&shape, ret, err);
}

/* A layout is for all, but each tenant may only bring so many new ones. */
static kvs_status open_layout(directory *d, uint32_t tenant, const uint8_t digest[32], uint64_t slot_bytes,
                              uint32_t *ret, kvs_err *err)
{
    uint32_t before = pool_n_layouts(d->pool), most = POOL_MAX_LAYOUTS / d->n_tenants;
    tenant_entry *t = &d->tenants[tenant];
    kvs_status s;

    if (pool_layout_find(d->pool, digest, slot_bytes, ret))
        return KVS_OK;
    if (t->n_layouts >= most && d->n_tenants > 1)
        return kvs_fail(err, KVS_E_LIMIT, "layouts: this tenant has opened %lu, at most %lu may be",
                        (unsigned long)t->n_layouts, (unsigned long)most);
    s = pool_layout_open(d->pool, digest, slot_bytes, ret, err);
    t->n_layouts += pool_n_layouts(d->pool) - before;
    return s;
}

kvs_status directory_ns_create(directory *d, ns_entry **ret, uint32_t tenant, const uint8_t *canon, size_t len,
                               kvs_err *err)
{
    ns_entry *n = calloc(1, sizeof *n);
    uint8_t digest[32];
    kvs_plane *fit;
    kvs_status s = KVS_E_NO_MEMORY;

    if (n == NULL || (n->canon = malloc(len)) == NULL ||
        (n->planes = calloc(KVS_MAX_PLANES, sizeof *n->planes)) == NULL) {
        (void)kvs_fail(err, s, "namespace: no memory for its description of %zu bytes", len);
        goto fail;
    }
    memcpy(n->canon, canon, len);
    n->canon_len = len;
    s = kvs_namespace_decode(canon, len, n->planes, KVS_MAX_PLANES, &n->pub.desc, err);
    if (s != KVS_OK)
        goto fail;
    fit = realloc(n->planes, n->pub.desc.n_planes * sizeof *fit);
    if (fit != NULL)
        n->planes = fit;
    n->pub.desc.planes = n->planes;
    n->pub.tenant = tenant;
    n->pub.slot_bytes = kvs_namespace_slot_bytes(&n->pub.desc);
    if ((s = kvs_namespace_digest(&n->pub.desc, n->pub.digest, err)) != KVS_OK ||
        (s = layout_digest(&n->pub.desc, digest, err)) != KVS_OK ||
        (s = open_layout(d, tenant, digest, n->pub.slot_bytes, &n->pub.layout, err)) != KVS_OK)
        goto fail;
    *ret = n;
    return KVS_OK;
fail:
    directory_ns_destroy(n);
    return s;
}

/* As with the numbers: what one tenant describes must leave room for the others. */
static kvs_status check_text(const directory *d, uint32_t tenant, size_t canon_len, kvs_err *err)
{
    uint64_t most = TABLE_TEXTS_BYTES / d->n_tenants, used = d->tenants[tenant].text_bytes;

    if (d->n_tenants < 2 || used + table_ns_bytes(canon_len) <= most)
        return KVS_OK;
    return kvs_fail(err, KVS_E_LIMIT, "namespaces: %llu bytes of descriptions are kept, %zu more make over %llu",
                    (unsigned long long)used, canon_len, (unsigned long long)most);
}

kvs_status directory_ns_reserve(directory *d, uint32_t number, uint32_t tenant, size_t canon_len, kvs_err *err)
{
    uint32_t cap = d->cap_ns == 0 ? 16 : d->cap_ns * 2, most = DIRECTORY_MAX_NAMESPACES / d->n_tenants;
    uint64_t n = d->tenants[tenant].pub.n_namespaces;
    ns_entry **ns;

    if (number >= DIRECTORY_MAX_NAMESPACES)
        return kvs_fail(err, KVS_E_LIMIT, "namespaces: all %d numbers of this life of the daemon are given away",
                        (int)DIRECTORY_MAX_NAMESPACES);
    if (n >= most)
        return kvs_fail(err, KVS_E_LIMIT, "namespaces: %lu are open, at most %lu may be", (unsigned long)n,
                        (unsigned long)most);
    if (check_text(d, tenant, canon_len, err) != KVS_OK)
        return KVS_E_LIMIT;
    if (number < d->cap_ns)
        return KVS_OK;
    while (cap <= number)
        cap *= 2;
    ns = realloc(d->ns, cap * sizeof *ns);
    if (ns == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "namespaces: no memory for %lu", (unsigned long)cap);
    memset(ns + d->cap_ns, 0, (cap - d->cap_ns) * sizeof *ns);
    d->ns = ns;
    d->cap_ns = cap;
    return KVS_OK;
}

static uint64_t ns_memory(const ns_entry *n)
{
    return sizeof *n + n->canon_len + n->pub.desc.n_planes * sizeof *n->planes;
}

/* It takes nothing of what its tenant may have. */
static void uncount_ns(directory *d, const ns_entry *n)
{
    d->tenants[n->pub.tenant].text_bytes -= table_ns_bytes(n->canon_len);
    d->tenants[n->pub.tenant].pub.n_namespaces--;
}

void directory_ns_unset(directory *d, uint32_t number)
{
    ns_entry *n = d->ns[number];

    d->ns_memory -= ns_memory(n);
    uncount_ns(d, n);
    d->ns[number] = NULL;
    directory_ns_destroy(n);
}

uint64_t directory_leave(directory *d, uint32_t tenant)
{
    for (uint32_t i = 0; i < d->n_ns; i++) {
        ns_entry *n = d->ns[i];

        if (n == NULL || n->pub.tenant != tenant || n->pub.gone)
            continue;
        uncount_ns(d, n);
        n->pub.gone = true;
        pool_drop_ns(d->pool, i);
    }
    return directory_end_leases(d, tenant, WIRE_NONE32);
}

void directory_ns_set(directory *d, uint32_t number, ns_entry *n)
{
    d->ns_memory += ns_memory(n);
    d->tenants[n->pub.tenant].text_bytes += table_ns_bytes(n->canon_len);
    d->ns[number] = n;
    d->tenants[n->pub.tenant].pub.n_namespaces++;
    if (number >= d->n_ns)
        d->n_ns = number + 1;
}

/* It must be in the table before a row can name it. */
static kvs_status keep_ns(directory *d, uint32_t number, const ns_entry *n, kvs_err *err)
{
    table_ns kept = {.canon = n->canon, .canon_len = n->canon_len};

    if (d->tenant_name != NULL)
        (void)snprintf(kept.tenant, sizeof kept.tenant, "%s", d->tenant_name(d->ud, n->pub.tenant));
    else
        (void)snprintf(kept.tenant, sizeof kept.tenant, "%lu", (unsigned long)n->pub.tenant);
    memcpy(kept.digest, n->pub.digest, sizeof kept.digest);
    return pool_put_ns(d->pool, number, &kept, err);
}

kvs_status directory_open(directory *d, uint32_t tenant, const uint8_t *canon, size_t len, uint32_t *ret, kvs_err *err)
{
    uint32_t number = d->n_ns;
    kvs_status s;
    ns_entry *n;

    for (uint32_t i = d->n_ns; i-- > 0;) {
        n = d->ns[i];
        if (n == NULL) {
            number = i; /* of an earlier life, and never told to anybody in this one */
        } else if (n->pub.tenant == tenant && !n->pub.gone && n->canon_len == len &&
                   memcmp(n->canon, canon, len) == 0) {
            *ret = i;
            return KVS_OK;
        }
    }
    if (len == 0)
        return kvs_fail(err, KVS_E_PROTO, "namespace: its description is empty");
    if (tenant >= d->n_tenants)
        return kvs_fail(err, KVS_E_DENIED, "namespace: there is no tenant %lu", (unsigned long)tenant);
    if ((s = directory_ns_reserve(d, number, tenant, len, err)) != KVS_OK ||
        (s = directory_ns_create(d, &n, tenant, canon, len, err)) != KVS_OK)
        return s;
    if ((s = keep_ns(d, number, n, err)) != KVS_OK) {
        directory_ns_destroy(n);
        return s;
    }
    directory_ns_set(d, number, n);
    *ret = number;
    return KVS_OK;
}

const directory_ns *directory_namespace(const directory *d, uint32_t ns)
{
    return ns < d->n_ns && d->ns[ns] != NULL ? &d->ns[ns]->pub : NULL;
}

uint32_t directory_n_namespaces(const directory *d)
{
    return d->n_ns;
}

/* ---- finding ---- */

uint32_t directory_hash(const directory *d, uint32_t ns, const uint8_t key[32])
{
    return (uint32_t)(XXH3_64bits_withSeed(key, 32, d->hash_seed + ns * UINT64_C(0x9e3779b97f4a7c15)) >> 32);
}

typedef struct wanted {
    const pool *pool;
    const uint8_t *key;
    uint32_t ns;
} wanted;

static bool row_is_wanted(const void *ud, uint32_t row)
{
    const wanted *w = ud;
    const pool_row *r = pool_row_of(w->pool, row);

    return r->ns == w->ns && memcmp(r->key, w->key, 32) == 0;
}

static pool_slot find_hashed(const directory *d, uint32_t ns, const uint8_t *key, uint32_t hash)
{
    wanted w = {.pool = d->pool, .key = key, .ns = ns};

    return key_table_find(&d->table, hash, row_is_wanted, &w);
}

pool_slot directory_find(const directory *d, uint32_t ns, const uint8_t key[32])
{
    return find_hashed(d, ns, key, directory_hash(d, ns, key));
}

void directory_find_batch(const directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, pool_slot *ret)
{
    uint32_t hash[BATCH];
    pool_slot guess[BATCH]; /* the first one with this hash, nearly always the right one; POOL_NONE: there is none */

    assert(n <= BATCH);
    for (uint32_t i = 0; i < n; i++) {
        hash[i] = directory_hash(d, ns, keys + (size_t)i * 32);
        key_table_prefetch(&d->table, hash[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        guess[i] = key_table_guess(&d->table, hash[i]);
        if (guess[i] != POOL_NONE)
            __builtin_prefetch(pool_row_of(d->pool, guess[i]));
    }
    for (uint32_t i = 0; i < n; i++) {
        wanted w = {.pool = d->pool, .key = keys + (size_t)i * 32, .ns = ns};

        ret[i] = guess[i] == POOL_NONE || row_is_wanted(&w, guess[i]) ? guess[i] : find_hashed(d, ns, w.key, hash[i]);
    }
}

static uint8_t key_state(const directory *d, pool_slot s)
{
    if (s == POOL_NONE)
        return WIRE_KEY_ABSENT;
    return pool_row_of(d->pool, s)->state == POOL_READY ? WIRE_KEY_READY : WIRE_KEY_WRITING;
}

uint32_t directory_lookup(directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, uint8_t *states)
{
    pool_slot slot[BATCH];
    uint32_t hits = 0;
    bool leading = true;

    for (uint32_t at = 0; at < n && (leading || states != NULL); at += BATCH) {
        uint32_t m = n - at < BATCH ? n - at : BATCH;

        directory_find_batch(d, ns, keys + (size_t)at * 32, m, slot);
        for (uint32_t i = 0; i < m; i++) {
            uint8_t state = key_state(d, slot[i]);

            leading = leading && state == WIRE_KEY_READY;
            hits += leading;
            if (states != NULL)
                states[at + i] = state;
        }
    }
    d->stats.hits += hits;
    d->stats.misses += n - hits;
    d->ns[ns]->pub.counts.hits += hits;
    d->ns[ns]->pub.counts.misses += n - hits;
    d->tenants[tenant_of(d, ns)].pub.hits += hits;
    d->tenants[tenant_of(d, ns)].pub.misses += n - hits;
    return hits;
}

enum wire_key_state directory_state(const directory *d, uint32_t ns, const uint8_t key[32])
{
    return (enum wire_key_state)key_state(d, directory_find(d, ns, key));
}

/* ---- use ---- */

void directory_touch(directory *d, pool_slot s, uint64_t stamp)
{
    slot_info *i = info_of(d, s);

    i->stamp = stamp;
    extent_of(d, s)->last = stamp;
    if ((i->flags & SLOT_PARKED) != 0)
        d->ops->insert(d->evict, slot_order(d, s), s, stamp);
    else
        d->ops->touch(d->evict, slot_order(d, s), s, stamp);
    i->flags &= (uint8_t)~SLOT_PARKED;
}

bool directory_is_closing(const directory *d, pool_slot s)
{
    bool closing;

    (void)pool_extent_layout(d->pool, pool_extent_of(d->pool, s), NULL, NULL, &closing);
    return closing;
}

bool directory_change_begin(const directory *d, pool_slot s)
{
    return info_is_busy(info_of(d, s));
}

void directory_changed(directory *d, pool_slot s, bool was_busy, bool busy)
{
    slot_info *i;

    if (busy == was_busy)
        return;
    if (busy) {
        extent_of(d, s)->n_busy++;
        d->stats.evictable--;
        return;
    }
    extent_of(d, s)->n_busy--;
    d->stats.evictable++;
    i = info_of(d, s);
    if (directory_is_closing(d, s)) {
        directory_take_away(d, s, WIRE_CAUSE_REBOUND);
    } else if ((i->flags & SLOT_PARKED) != 0) {
        i->flags &= (uint8_t)~SLOT_PARKED;
        d->ops->insert(d->evict, slot_order(d, s), s, i->stamp);
    }
}

void directory_change_end(directory *d, pool_slot s, bool was_busy)
{
    directory_changed(d, s, was_busy, info_is_busy(info_of(d, s)));
}

/* ---- reading ---- */

bool directory_hold_one(directory *d, pool_slot s)
{
    slot_info *i = info_of(d, s);
    bool was = directory_change_begin(d, s);

    if (i->holds == SLOT_COUNT_MAX)
        return false;
    d->stats.n_held += i->holds++ == 0;
    directory_change_end(d, s, was);
    return true;
}

void directory_hold_some(directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, kvs_status *status,
                         pool_slot *slot)
{
    for (uint32_t at = 0; at < n; at += BATCH)
        directory_find_batch(d, ns, keys + (size_t)at * 32, n - at < BATCH ? n - at : BATCH, slot + at);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t state = key_state(d, slot[i]);

        if (state == WIRE_KEY_ABSENT)
            status[i] = KVS_E_NOT_FOUND;
        else if (state == WIRE_KEY_WRITING || !directory_hold_one(d, slot[i]))
            status[i] = KVS_E_BUSY;
        else
            status[i] = KVS_OK;
        if (status[i] != KVS_OK)
            slot[i] = POOL_NONE;
    }
}

void directory_renew(directory *d, const pool_slot *slot, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;)
        if (slot[i] != POOL_NONE)
            directory_touch(d, slot[i], ++d->stamp);
}

void directory_hold(directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, kvs_status *status, pool_slot *slot)
{
    directory_hold_some(d, ns, keys, n, status, slot);
    directory_renew(d, slot, n);
}

void directory_unhold(directory *d, pool_slot s)
{
    slot_info *i = info_of(d, s);
    bool was = true;

    assert(i->holds > 0);
    i->holds--;
    d->stats.n_held -= i->holds == 0;
    if (pool_row_of(d->pool, s)->state == POOL_READY) {
        directory_change_end(d, s, was);
    } else if (i->holds == 0) { /* draining: this was the last reader */
        extent_of(d, s)->n_busy--;
        directory_free_slot(d, s);
    }
}

bool directory_is_unverified(const directory *d, pool_slot s)
{
    return (info_of(d, s)->flags & SLOT_UNVERIFIED) != 0;
}

void directory_verified(directory *d, pool_slot s)
{
    slot_info *i = info_of(d, s);

    if ((i->flags & SLOT_UNVERIFIED) == 0)
        return;
    i->flags &= (uint8_t)~SLOT_UNVERIFIED;
    d->stats.unverified--;
}
