#include "daemon/directory_impl.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/random.h>

enum {
    FIRST_BUCKETS = 64,
    END_STEP = DIRECTORY_MAX_RESERVED, /* blocks of leases that end at a time: some milliseconds */
    END_OF_ONE = 4,                    /* blocks that the end of a lease counts for besides */
};

/* ---- the set: a heap by end, so that one long lease hides no shorter one, a hash by id, and one by owner ---- */

static void heap_put(lease_set *s, uint32_t at, lease *l)
{
    s->heap[at] = l;
    l->heap_at = at;
}

static void heap_sift(lease_set *s, uint32_t at)
{
    lease *l = s->heap[at];

    while (at > 0 && l->ends_us < s->heap[(at - 1) / 2]->ends_us) {
        heap_put(s, at, s->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        uint32_t child = 2 * at + 1;

        if (child + 1 < s->n && s->heap[child + 1]->ends_us < s->heap[child]->ends_us)
            child++;
        if (child >= s->n || s->heap[child]->ends_us >= l->ends_us)
            break;
        heap_put(s, at, s->heap[child]);
        at = child;
    }
    heap_put(s, at, l);
}

/* Ids are random: any of their bytes are a hash. */
static lease **bucket_of(const lease_set *s, const uint8_t id[16])
{
    uint32_t h;

    memcpy(&h, id, sizeof h);
    return &s->buckets[h & (s->n_buckets - 1)];
}

static lease *set_find(const lease_set *s, const uint8_t id[16])
{
    if (s->n == 0)
        return NULL;
    for (lease *l = *bucket_of(s, id); l != NULL; l = l->next)
        if (memcmp(l->id, id, 16) == 0)
            return l;
    return NULL;
}

/* Owners are numbers that count up. */
static lease **owner_bucket(const lease_set *s, uint64_t owner)
{
    return &s->owners[owner & (s->n_buckets - 1)];
}

/* Where the pointer to the owner's first lease is, or would be. */
static lease **find_owner(const lease_set *s, uint64_t owner)
{
    lease **at = owner_bucket(s, owner);

    while (*at != NULL && (*at)->owner != owner)
        at = &(*at)->next_owner;
    return at;
}

static void owner_add(const lease_set *s, lease *l)
{
    lease **at = find_owner(s, l->owner), *first = *at;

    l->next_owner = l->same = NULL;
    l->link = NULL;
    if (first == NULL) {
        *at = l;
        return;
    }
    l->link = &first->same;
    l->same = first->same;
    if (l->same != NULL)
        l->same->link = &l->same;
    first->same = l;
}

static void owner_remove(const lease_set *s, lease *l)
{
    lease **at = l->link == NULL ? find_owner(s, l->owner) : l->link, *next = l->same;

    if (l->link == NULL && next != NULL)
        next->next_owner = l->next_owner; /* it is the first one now */
    *at = l->link == NULL && next == NULL ? l->next_owner : next;
    if (next != NULL)
        next->link = l->link;
}

static uint64_t n_slots(const lease *l)
{
    return (uint64_t)l->n_ns * l->n_leased;
}

static uint64_t lease_memory(const lease *l)
{
    return sizeof *l + n_slots(l) * sizeof l->slots[0] + l->n_ns * sizeof l->ns[0];
}

/* Room for one more in all of them. */
static kvs_status set_reserve(lease_set *s)
{
    uint32_t cap = s->cap == 0 ? FIRST_BUCKETS : s->cap * 2;
    lease **heap, **buckets, *firsts = NULL;

    if (s->n < s->cap)
        return KVS_OK;
    heap = realloc(s->heap, cap * sizeof *heap);
    if (heap == NULL)
        return KVS_E_NO_MEMORY;
    s->heap = heap;
    buckets = calloc(2 * (size_t)cap, sizeof *buckets);
    if (buckets == NULL)
        return KVS_E_NO_MEMORY; /* the heap is larger than it says: harmless */
    for (uint32_t i = 0; i < s->n_buckets; i++)
        for (lease *l = s->owners[i], *next; l != NULL; l = next) {
            next = l->next_owner;
            l->next_owner = firsts;
            firsts = l;
        }
    free(s->buckets);
    s->buckets = buckets;
    s->owners = buckets + cap;
    s->n_buckets = s->cap = cap;
    for (uint32_t i = 0; i < s->n; i++) {
        lease **b = bucket_of(s, s->heap[i]->id);

        s->heap[i]->next = *b;
        *b = s->heap[i];
    }
    for (lease *l = firsts, *next; l != NULL; l = next) {
        lease **b = owner_bucket(s, l->owner);

        next = l->next_owner;
        l->next_owner = *b;
        *b = l;
    }
    return KVS_OK;
}

static void set_add(lease_set *s, lease *l)
{
    lease **b = bucket_of(s, l->id);

    l->next = *b;
    *b = l;
    heap_put(s, s->n++, l);
    heap_sift(s, s->n - 1);
    l->older = s->newest;
    *(s->newest != NULL ? &s->newest->newer : &s->oldest) = l;
    s->newest = l;
    owner_add(s, l);
    s->memory += lease_memory(l);
}

static void set_remove(lease_set *s, lease *l)
{
    lease **b = bucket_of(s, l->id);
    uint32_t at = l->heap_at;

    while (*b != l)
        b = &(*b)->next;
    *b = l->next;
    s->n--;
    if (at != s->n) {
        heap_put(s, at, s->heap[s->n]);
        heap_sift(s, at);
    }
    *(l->older != NULL ? &l->older->newer : &s->oldest) = l->newer;
    *(l->newer != NULL ? &l->newer->older : &s->newest) = l->older;
    owner_remove(s, l);
    s->memory -= lease_memory(l);
}

/* ---- leasing slots ---- */

/* n: the entry of its namespace, which the caller knows, so that no row is read. */
static bool lease_slot(directory *d, pool_slot s, ns_entry *n)
{
    slot_info *i = info_of(d, s);
    bool was = directory_change_begin(d, s);

    if (i->leases == SLOT_COUNT_MAX)
        return false;
    if (i->leases++ == 0) {
        n->pub.n_leased++;
        d->stats.n_leased++;
        d->stats.leased_bytes += n->pub.slot_bytes;
        d->tenants[n->pub.tenant].pub.leased_bytes += n->pub.slot_bytes;
    }
    directory_changed(d, s, was, true);
    return true;
}

static void unlease_slot(directory *d, pool_slot s, ns_entry *n)
{
    slot_info *i = info_of(d, s);

    assert(i->leases > 0);
    if (--i->leases > 0)
        return;
    n->pub.n_leased--;
    d->stats.n_leased--;
    d->stats.leased_bytes -= n->pub.slot_bytes;
    d->tenants[n->pub.tenant].pub.leased_bytes -= n->pub.slot_bytes;
    directory_changed(d, s, true, i->holds != 0 || (i->flags & SLOT_PINNED) != 0);
}

/* The first n of the lease's slots. */
static void unlease(directory *d, const lease *l, uint64_t n)
{
    for (uint32_t i = 0; i < l->n_ns && n > 0; i++) {
        const pool_slot *slot = l->slots + (size_t)i * l->n_leased;
        ns_entry *ns = d->ns[l->ns[i]];

        for (uint32_t k = 0; k < l->n_leased && n > 0; k++, n--)
            unlease_slot(d, slot[k], ns);
    }
}

/* What the lease names, counted with its tenant and namespaces; by: 1, or all ones to take it back. */
static void count_named(directory *d, const lease *l, uint32_t by)
{
    d->tenants[l->tenant].pub.n_leases += by == 1 ? 1 : UINT64_MAX;
    d->tenants[l->tenant].n_named += by == 1 ? n_slots(l) : -n_slots(l);
    for (uint32_t i = 0; i < l->n_ns; i++)
        d->ns[l->ns[i]]->n_named += by;
}

/* Shallow blocks first: the deepest is put back last, at the cold end. */
static void lease_end(directory *d, lease *l)
{
    set_remove(&d->leases, l);
    count_named(d, l, UINT32_MAX);
    unlease(d, l, n_slots(l));
    free(l);
}

/* Now, or where that would be too much at a time, soon. */
static void lease_end_within(directory *d, lease *l, uint64_t *budget)
{
    uint64_t cost = n_slots(l) + END_OF_ONE;

    if (cost > *budget) {
        *budget = 0;
        l->dead = true;
        l->ends_us = 0;
        heap_sift(&d->leases, l->heap_at);
        return;
    }
    *budget -= cost;
    lease_end(d, l);
}

bool directory_has_dead_leases(const directory *d)
{
    return d->leases.n > 0 && d->leases.heap[0]->dead;
}

void directory_leases_fini(directory *d)
{
    for (uint32_t i = 0; i < d->leases.n; i++)
        free(d->leases.heap[i]);
    free(d->leases.heap);
    free(d->leases.buckets);
    d->leases = (lease_set){0};
}

/* ---- reserve ---- */

/* What a RESERVE names, and what was found of it so far. */
typedef struct leasing {
    uint32_t tenant, n_ns, n_keys;
    const uint32_t *ns;
    const uint8_t *keys;
    uint64_t max_bytes; /* that the tenant may hold */
    uint64_t more;      /* bytes that it does not hold yet */
    uint32_t n_found;   /* leading keys that can be leased in every namespace */
    pool_slot *slots;   /* [n_ns][n_keys], of each the first n_found */
} leasing;

/* How many leading ones can be leased: ready, and in no extent that is being given away. */
static uint32_t leading(const directory *d, const pool_slot *slot, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (slot[i] == POOL_NONE || pool_row_of(d->pool, slot[i])->state != POOL_READY ||
            directory_is_closing(d, slot[i]))
            return i;
        __builtin_prefetch(info_of(d, slot[i]));
    }
    return n;
}

/* Of the next n keys. */
static uint32_t find_some(const directory *d, const leasing *w, uint32_t n)
{
    for (uint32_t i = 0; i < w->n_ns && n > 0; i++) {
        pool_slot *slot = w->slots + (size_t)i * w->n_keys + w->n_found;

        directory_find_batch(d, w->ns[i], w->keys + (size_t)w->n_found * 32, n, slot);
        n = leading(d, slot, n);
    }
    return n;
}

static void add_found(const directory *d, leasing *w, uint32_t n)
{
    for (uint32_t i = 0; i < w->n_ns; i++) {
        const pool_slot *slot = w->slots + (size_t)i * w->n_keys + w->n_found;
        uint64_t bytes = d->ns[w->ns[i]]->pub.slot_bytes;

        for (uint32_t k = 0; k < n; k++)
            w->more += info_of(d, slot[k])->leases == 0 ? bytes : 0;
    }
    w->n_found += n;
}

static kvs_status check_namespaces(const directory *d, uint32_t tenant, const uint32_t *ns, uint32_t n_ns, kvs_err *err)
{
    if (n_ns == 0)
        return kvs_fail(err, KVS_E_INVALID, "n_ns: a lease needs at least one namespace");
    for (uint32_t i = 0; i < n_ns; i++)
        if (ns[i] >= d->n_ns || d->ns[ns[i]] == NULL || d->ns[ns[i]]->pub.tenant != tenant)
            return kvs_fail(err, KVS_E_NOT_FOUND, "ns: there is no namespace %lu", (unsigned long)ns[i]);
    if (d->tenants[tenant].pub.n_leases >= LEASE_MAX / d->n_tenants)
        return kvs_fail(err, KVS_E_LIMIT, "leases: %lu are held, at most %lu may be",
                        (unsigned long)d->tenants[tenant].pub.n_leases, (unsigned long)(LEASE_MAX / d->n_tenants));
    return KVS_OK;
}

static kvs_status lease_all(directory *d, const lease *l, kvs_err *err)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < l->n_ns; i++) {
        ns_entry *ns = d->ns[l->ns[i]];

        for (uint32_t k = 0; k < l->n_leased; k++, n++) {
            if (lease_slot(d, l->slots[n], ns))
                continue;
            unlease(d, l, n);
            return kvs_fail(err, KVS_E_BUSY, "leases: a block already has %d", SLOT_COUNT_MAX);
        }
    }
    return KVS_OK;
}

/* Not all zeros (which says "no lease"), and not one that is in use. */
static kvs_status make_id(const lease_set *s, uint8_t id[16], kvs_err *err)
{
    static const uint8_t zeros[16];

    do {
        if (getrandom(id, 16, 0) != 16)
            return kvs_fail(err, KVS_E_SYS, "lease: getrandom failed");
    } while (memcmp(id, zeros, 16) == 0 || set_find(s, id) != NULL);
    return KVS_OK;
}

/* May the tenant have what was found so far? */
static kvs_status check_cap(const directory *d, const leasing *w, kvs_err *err)
{
    uint64_t held = directory_tenant_leased(d, w->tenant), n = (uint64_t)w->n_ns * w->n_found;
    uint64_t named = d->tenants[w->tenant].n_named, most = LEASED_MAX / d->n_tenants;

    if (named + n > most)
        return kvs_fail(err, KVS_E_LIMIT,
                        "leases: %llu blocks are named by this tenant's, at least %llu more make over %llu",
                        (unsigned long long)named, (unsigned long long)n, (unsigned long long)most);
    if (w->more > 0 && (held > w->max_bytes || w->more > w->max_bytes - held))
        return kvs_fail(err, KVS_E_LIMIT,
                        "leases: at least %llu bytes wanted, the tenant holds %llu of %llu (lease.max_percent of the "
                        "pool, or its own lease_max_percent)",
                        (unsigned long long)w->more, (unsigned long long)held, (unsigned long long)w->max_bytes);
    return KVS_OK;
}

static bool is_any_swept(const directory *d, const leasing *w)
{
    for (uint32_t i = 0; i < w->n_ns; i++)
        if (directory_is_swept(d, w->ns[i]))
            return true;
    return false;
}

/* Some keys of every namespace at a time: what one of them lacks, or what is above a limit, ends the search there, so that
 * a refusal costs no more than the limit. */
static kvs_status find_all(const directory *d, leasing *w, kvs_err *err)
{
    uint32_t n = is_any_swept(d, w) ? 0 : w->n_keys, got = 1;

    while (w->n_found < n && got > 0) {
        uint32_t m = n - w->n_found < BATCH ? n - w->n_found : BATCH;
        kvs_status s;

        got = find_some(d, w, m);
        add_found(d, w, got);
        s = check_cap(d, w, err);
        if (s != KVS_OK)
            return s;
        n = got < m ? w->n_found : n;
    }
    return KVS_OK;
}

/* What was found, in no more memory than it needs; slots[n_ns][n_keys] become [n_ns][n_found].  Takes l, also on failure. */
static lease *pack(const directory *d, lease *l, const leasing *w)
{
    lease *fit;

    for (uint32_t i = 1; i < w->n_ns; i++)
        memmove(l->slots + (size_t)i * w->n_found, l->slots + (size_t)i * w->n_keys, w->n_found * sizeof l->slots[0]);
    l->n_leased = w->n_found;
    fit = realloc(l, lease_memory(l));
    l = fit != NULL ? fit : l;
    l->ns = l->slots + n_slots(l);
    memcpy(l->ns, w->ns, w->n_ns * sizeof *w->ns);
    for (uint32_t i = 0; i < w->n_ns; i++)
        l->bytes += d->ns[w->ns[i]]->pub.slot_bytes * l->n_leased;
    return l;
}

/* NULL in *ret: nothing can be leased. */
static kvs_status lease_create(directory *d, leasing *w, lease **ret, kvs_err *err)
{
    uint64_t most = (uint64_t)w->n_ns * w->n_keys;
    lease *l = NULL;
    kvs_status s;

    if (most > DIRECTORY_MAX_RESERVED)
        return kvs_fail(err, KVS_E_LIMIT, "n_ns x n_keys: %lu x %lu is above %d", (unsigned long)w->n_ns,
                        (unsigned long)w->n_keys, DIRECTORY_MAX_RESERVED);
    if (set_reserve(&d->leases) == KVS_OK)
        l = malloc(sizeof *l + most * sizeof l->slots[0] + w->n_ns * sizeof l->ns[0]);
    if (l == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "lease: no memory for %lu keys in %lu namespaces",
                        (unsigned long)w->n_keys, (unsigned long)w->n_ns);
    *l = (lease){.n_ns = w->n_ns, .tenant = w->tenant};
    w->slots = l->slots;
    s = find_all(d, w, err);
    if (s != KVS_OK || w->n_found == 0) {
        free(l);
        l = NULL;
    }
    *ret = l != NULL ? pack(d, l, w) : NULL;
    return s;
}

kvs_status directory_reserve(directory *d, uint32_t tenant, uint64_t owner, const uint32_t *ns, uint32_t n_ns,
                             const uint8_t *keys, uint32_t n_keys, uint32_t max_loads, uint32_t ttl_ms, uint64_t now_us,
                             uint64_t max_bytes, directory_lease *ret, kvs_err *err)
{
    leasing w = {.tenant = tenant, .n_ns = n_ns, .n_keys = n_keys, .ns = ns, .keys = keys, .max_bytes = max_bytes};
    kvs_status s = check_namespaces(d, tenant, ns, n_ns, err);
    lease *l = NULL;

    if (s == KVS_OK)
        s = lease_create(d, &w, &l, err);
    if (s != KVS_OK)
        return s;
    if (l == NULL) {
        *ret = (directory_lease){.ttl_ms = ttl_ms};
        return KVS_OK;
    }
    l->owner = owner;
    l->loads_left = max_loads;
    l->created_us = now_us;
    l->ends_us = now_us + ttl_ms * UINT64_C(1000);
    if ((s = make_id(&d->leases, l->id, err)) != KVS_OK || (s = lease_all(d, l, err)) != KVS_OK) {
        free(l);
        return s;
    }
    set_add(&d->leases, l);
    count_named(d, l, 1);
    *ret = (directory_lease){.n_leased = l->n_leased, .ttl_ms = ttl_ms, .bytes = l->bytes};
    memcpy(ret->id, l->id, 16);
    return KVS_OK;
}

/* ---- use ---- */

static lease *lease_of_tenant(const directory *d, uint32_t tenant, const uint8_t id[16])
{
    lease *l = set_find(&d->leases, id);

    return l != NULL && l->tenant == tenant && !l->dead ? l : NULL;
}

static kvs_status no_lease(kvs_err *err)
{
    return kvs_fail(err, KVS_E_NOT_FOUND,
                    "lease: there is none with this id; it was released, has run out or was reset");
}

static kvs_status hold_range(directory *d, const pool_slot *from, uint32_t n, pool_slot *slot, kvs_err *err)
{
    for (uint32_t i = 0; i < n; i++) {
        if (directory_hold_one(d, from[i])) {
            slot[i] = from[i];
            continue;
        }
        while (i-- > 0)
            directory_unhold(d, from[i]);
        return kvs_fail(err, KVS_E_BUSY, "holds: a block already has %d", SLOT_COUNT_MAX);
    }
    for (uint32_t i = n; i-- > 0;)
        directory_touch(d, slot[i], ++d->stamp);
    return KVS_OK;
}

kvs_status directory_lease_hold(directory *d, uint32_t tenant, const uint8_t id[16], uint32_t ns, uint32_t first,
                                uint32_t n, pool_slot *slot, kvs_err *err)
{
    lease *l = lease_of_tenant(d, tenant, id);
    uint32_t at = 0;
    kvs_status s;

    if (l == NULL)
        return no_lease(err);
    while (at < l->n_ns && l->ns[at] != ns)
        at++;
    if (at == l->n_ns)
        return kvs_fail(err, KVS_E_NOT_FOUND, "lease: it holds nothing of namespace %lu", (unsigned long)ns);
    if (first > l->n_leased || n > l->n_leased - first)
        return kvs_fail(err, KVS_E_RANGE, "lease: blocks %lu + %lu wanted, it holds %lu", (unsigned long)first,
                        (unsigned long)n, (unsigned long)l->n_leased);
    if (l->loads_left == 0)
        return kvs_fail(err, KVS_E_STATE, "lease: its loads are used up");
    s = hold_range(d, l->slots + (size_t)at * l->n_leased + first, n, slot, err);
    if (s == KVS_OK)
        l->loads_left--;
    return s;
}

kvs_status directory_release(directory *d, uint32_t tenant, const uint8_t id[16], kvs_err *err)
{
    lease *l = lease_of_tenant(d, tenant, id);

    if (l == NULL)
        return no_lease(err);
    lease_end(d, l);
    return KVS_OK;
}

/* ---- the end ---- */

bool directory_owner_gone(directory *d, uint64_t owner)
{
    uint64_t budget = END_STEP;

    for (lease *l = d->leases.n > 0 ? *find_owner(&d->leases, owner) : NULL, *next; l != NULL; l = next) {
        next = l->same;
        lease_end_within(d, l, &budget);
    }
    return directory_has_dead_leases(d);
}

uint64_t directory_expire(directory *d, uint64_t now_us)
{
    uint64_t n = 0;

    while (d->leases.n > 0 && d->leases.heap[0]->ends_us <= now_us) {
        if (n > 0 && n + n_slots(d->leases.heap[0]) > END_STEP)
            return now_us;
        n += n_slots(d->leases.heap[0]) + END_OF_ONE;
        lease_end(d, d->leases.heap[0]);
    }
    return d->leases.n > 0 ? d->leases.heap[0]->ends_us : UINT64_MAX;
}

/* How many of the namespaces that it names are in scope. */
static uint32_t n_in_scope(const lease *l, uint32_t tenant, uint32_t ns)
{
    uint32_t n = 0;

    if (tenant != WIRE_NONE32 && l->tenant != tenant)
        return 0;
    for (uint32_t i = 0; i < l->n_ns; i++)
        n += ns == WIRE_NONE32 || l->ns[i] == ns;
    return n;
}

/* The same of all leases. */
static uint64_t all_in_scope(const directory *d, uint32_t tenant, uint32_t ns)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < d->n_ns; i++)
        if (d->ns[i] != NULL && (ns == WIRE_NONE32 || ns == i) &&
            (tenant == WIRE_NONE32 || tenant == d->ns[i]->pub.tenant))
            n += d->ns[i]->n_named;
    return n;
}

uint64_t directory_end_leases(directory *d, uint32_t tenant, uint32_t ns)
{
    uint64_t left = all_in_scope(d, tenant, ns), budget = END_STEP, n = 0;
    lease *ending = NULL;

    /* First all, then end them: each end changes the list.  Who has none, or only new ones, does not pay for the others'. */
    for (lease *l = d->leases.newest; l != NULL && left > 0; l = l->older) {
        uint32_t named = n_in_scope(l, tenant, ns);

        left -= named;
        if (named == 0 || l->dead)
            continue;
        l->ending = ending;
        ending = l;
    }
    for (; ending != NULL; n++) {
        lease *l = ending;

        ending = l->ending;
        lease_end_within(d, l, &budget);
    }
    return n;
}

/* ---- watching ---- */

uint64_t directory_tenant_leased(const directory *d, uint32_t tenant)
{
    return d->tenants[tenant].pub.leased_bytes;
}

uint64_t directory_n_leases(const directory *d, uint64_t owner)
{
    uint64_t n = 0;

    for (const lease *l = d->leases.n > 0 ? *find_owner(&d->leases, owner) : NULL; l != NULL; l = l->same)
        n++;
    return n;
}

void directory_each_lease(const directory *d, uint64_t now_us, void (*f)(void *ud, const directory_lease_info *l),
                          void *ud)
{
    for (uint32_t i = 0; i < d->leases.n; i++) {
        const lease *l = d->leases.heap[i];
        directory_lease_info info = {
            .owner = l->owner,
            .bytes = l->bytes,
            .age_us = now_us > l->created_us ? now_us - l->created_us : 0,
            .left_us = l->ends_us > now_us ? l->ends_us - now_us : 0,
            .tenant = l->tenant,
            .n_leased = l->n_leased,
            .n_ns = l->n_ns,
            .loads_left = l->loads_left,
        };

        memcpy(info.id, l->id, 16);
        f(ud, &info);
    }
}
