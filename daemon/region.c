#include "daemon/region.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

#include "proto/backend.h"

/* ---- maps ---- */

static kvs_status map_new(const kvs_namespace *ns, uint32_t n_slots, region_map **ret, kvs_err *err)
{
    region_map *m = calloc(1, sizeof(*m) + (size_t)ns->n_planes * sizeof(m->planes[0]));

    if (!m)
        return kvs_fail(err, KVS_E_NO_MEMORY, "region map of %u planes", ns->n_planes);
    m->slot_bytes = kvs_namespace_slot_bytes(ns);
    m->n_slots = n_slots;
    m->n_planes = ns->n_planes;
    m->tokens_per_block = ns->tokens_per_block;
    for (uint32_t p = 0; p < ns->n_planes; p++) {
        m->planes[p].page_bytes = ns->planes[p].page_bytes;
        m->planes[p].block_offset = kvs_namespace_plane_offset(ns, p);
        m->planes[p].row_bytes = ns->planes[p].row_bytes;
        m->planes[p].format = ns->planes[p].format;
    }
    *ret = m;
    return KVS_OK;
}

static void map_cross_layer(region_map *m, uint8_t *base, uint64_t stride)
{
    m->cross_layer = true;
    for (uint32_t p = 0; p < m->n_planes; p++) {
        m->planes[p].base = base + m->planes[p].block_offset;
        m->planes[p].stride = stride;
    }
}

kvs_status region_map_contiguous(const kvs_namespace *ns, uint8_t *base, uint32_t n_slots, region_map **ret,
                                 kvs_err *err)
{
    region_map *m;
    kvs_status s = map_new(ns, n_slots, &m, err);

    if (s != KVS_OK)
        return s;
    map_cross_layer(m, base, m->slot_bytes);
    *ret = m;
    return KVS_OK;
}

/* Bytes that map `i` covers at each slot. */
static uint64_t map_page_bytes(const kvs_namespace *ns, uint32_t n_maps, uint32_t i)
{
    return n_maps == 1 ? kvs_namespace_slot_bytes(ns) : ns->planes[i].page_bytes;
}

/* base + (n - 1) * stride + page.  All three are below 2^60 by the checks before: nothing wraps in 128 bits,
 * and the caller compares with a 64-bit size. */
static unsigned __int128 map_end(const wire_plane_map *m, uint32_t n_slots, uint64_t page)
{
    return (unsigned __int128)m->base + (unsigned __int128)(n_slots - 1) * m->stride + page;
}

/* The kernels that attend to this memory were verified with its strides, or the client says that they take them. */
static kvs_status check_owner(const kvs_namespace *ns, uint32_t n_slots, const wire_plane_map *m, uint32_t n_maps,
                              uint32_t i, kvs_err *err)
{
    kvs_err why = {.msg = ""};
    kvs_status s = kvs_backend_check(m->backend, ns, n_maps == 1 ? ns->n_planes : i, n_slots, m->stride, &why);

    return s == KVS_OK ? s : kvs_fail(err, s, "map %u: %s", i, why.msg);
}

static kvs_status check_one_map(const kvs_namespace *ns, uint32_t n_slots, const wire_plane_map *m, uint32_t n_maps,
                                uint32_t i, uint32_t n_fds, kvs_err *err)
{
    uint64_t page = map_page_bytes(ns, n_maps, i);

    if (m->fd >= n_fds)
        return kvs_fail(err, KVS_E_RANGE, "map %u: fd: %u is not below the %u descriptors sent", i, m->fd, n_fds);
    if (m->base % 16 != 0 || m->base >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_INVALID, "map %u: base: %llu is not a multiple of 16 below 2^40", i,
                        (unsigned long long)m->base);
    if (m->stride % 16 != 0 || m->stride >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_INVALID, "map %u: stride: %llu is not a multiple of 16 below 2^40", i,
                        (unsigned long long)m->stride);
    if (n_slots > 1 && m->stride < page)
        return kvs_fail(err, KVS_E_INVALID, "map %u: stride: %llu is below the page of %llu bytes", i,
                        (unsigned long long)m->stride, (unsigned long long)page);
    if (map_end(m, n_slots, page) > INT64_MAX)
        return kvs_fail(err, KVS_E_RANGE, "map %u: base %llu + %u slots of stride %llu wraps", i,
                        (unsigned long long)m->base, n_slots, (unsigned long long)m->stride);
    return check_owner(ns, n_slots, m, n_maps, i, err);
}

kvs_status region_maps_check(const kvs_namespace *ns, uint32_t n_slots, const wire_plane_map *maps, uint32_t n_maps,
                             uint32_t n_fds, bool joined, kvs_err *err)
{
    uint64_t used = 0;

    if (n_slots < 1 || n_slots > REGION_MAX_SLOTS)
        return kvs_fail(err, KVS_E_RANGE, "n_slots: %u is outside 1..%d", n_slots, REGION_MAX_SLOTS);
    if (n_maps != 1 && n_maps != ns->n_planes)
        return kvs_fail(err, KVS_E_INVALID, "n_maps: %u is neither 1 (cross-layer) nor the %u planes", n_maps,
                        ns->n_planes);
    if (n_fds < 1 || n_fds > WIRE_MAX_FDS)
        return kvs_fail(err, KVS_E_INVALID, "n_fds: %u descriptors of an import are outside 1..%d", n_fds,
                        WIRE_MAX_FDS);
    for (uint32_t i = 0; i < n_maps; i++) {
        kvs_status s = check_one_map(ns, n_slots, &maps[i], n_maps, i, n_fds, err);

        if (s != KVS_OK)
            return s;
        used |= UINT64_C(1) << maps[i].fd;
    }
    for (uint32_t i = 0; i < n_fds && !joined; i++)
        if (!(used >> i & 1))
            return kvs_fail(err, KVS_E_INVALID, "fds: no map names descriptor %u of %u", i, n_fds);
    return KVS_OK;
}

/* Where piece `i` begins, and how much memory there is from there on.  NULL: no such piece. */
static uint8_t *piece_run(const device_mem *mem, uint32_t i, bool joined, uint64_t *ret_bytes)
{
    const device_ops *ops = mem->dev->ops;
    uint32_t n = ops->mem_pieces(mem);
    uint8_t *base = i < n ? ops->mem_base(mem, i, ret_bytes) : NULL;

    for (uint32_t k = i + 1; joined && base && k < n; k++) {
        uint64_t bytes = 0;

        if (ops->mem_base(mem, k, &bytes) != base + *ret_bytes)
            break;
        *ret_bytes += bytes;
    }
    return base;
}

kvs_status region_map_imported(const kvs_namespace *ns, uint32_t n_slots, const wire_plane_map *maps, uint32_t n_maps,
                               const device_mem *mem, bool joined, region_map **ret, kvs_err *err)
{
    region_map *m = NULL;
    kvs_status s = map_new(ns, n_slots, &m, err);

    for (uint32_t i = 0; s == KVS_OK && i < n_maps; i++) {
        uint64_t page = map_page_bytes(ns, n_maps, i), bytes = 0;
        uint8_t *base = piece_run(mem, maps[i].fd, joined, &bytes);

        if (!base || map_end(&maps[i], n_slots, page) > bytes) {
            s = kvs_fail(err, KVS_E_RANGE,
                         "map %u: base %llu + %u slots of stride %llu, page %llu end behind the memory of %llu bytes",
                         i, (unsigned long long)maps[i].base, n_slots, (unsigned long long)maps[i].stride,
                         (unsigned long long)page, (unsigned long long)bytes);
        } else if (n_maps == 1) {
            /* One slot has no pitch: any stride is right then, but the copy engine must not see a 0. */
            map_cross_layer(m, base + maps[i].base, n_slots > 1 ? maps[i].stride : m->slot_bytes);
        } else {
            m->planes[i].base = base + maps[i].base;
            m->planes[i].stride = n_slots > 1 ? maps[i].stride : page;
        }
    }
    if (s == KVS_OK) {
        *ret = m;
        return KVS_OK;
    }
    free(m);
    return s;
}

/* ---- the region ---- */

static uint32_t gen_of(const region *g, uint32_t slot)
{
    return g->slots[slot].gen == 0 ? g->first_gen : g->slots[slot].gen;
}

static uint32_t after(const region *g, uint32_t slot)
{
    uint32_t natural = slot + 1 < g->n_slots ? slot + 1 : REGION_NONE;

    return g->slots[slot].gen == 0 ? natural : g->slots[slot].next;
}

/* A million slots that nobody uses cost neither memory nor the time to fill it. */
static region_slot *touch(region *g, uint32_t slot)
{
    region_slot *x = &g->slots[slot];

    if (x->gen == 0) {
        x->prev = slot > 0 ? slot - 1 : REGION_NONE;
        x->next = after(g, slot);
        x->gen = g->first_gen;
    }
    return x;
}

static uint32_t pow2_at_least(uint32_t n)
{
    uint32_t p = 16;

    while (p < n)
        p *= 2;
    return p;
}

static kvs_status make_slots(region *g)
{
    uint32_t n_buckets = pow2_at_least(g->n_slots);

    if (getrandom(&g->first_gen, sizeof(g->first_gen), 0) != sizeof(g->first_gen))
        return KVS_E_SYS;
    g->slots = calloc(g->n_slots, sizeof(g->slots[0]));
    g->buckets = malloc(n_buckets * sizeof(g->buckets[0]));
    if (!g->slots || !g->buckets)
        return KVS_E_NO_MEMORY;
    memset(g->buckets, 0xff, n_buckets * sizeof(g->buckets[0]));
    g->bucket_mask = n_buckets - 1;
    /* Random, so that a reference from before a restart does not fit by accident; far from 0 and from the
     * end. */
    g->first_gen = (g->first_gen & 0x3fffffff) | 1;
    g->free_head = 0;
    g->n_free = g->n_slots;
    return KVS_OK;
}

kvs_status region_create(region **ret, uint32_t kind, bool imported, uint32_t n_slots, uint64_t seed)
{
    region *g = calloc(1, sizeof(*g));
    kvs_status s = KVS_OK;

    if (!g)
        return KVS_E_NO_MEMORY;
    g->kind = kind;
    g->imported = imported;
    g->n_slots = n_slots;
    g->seed = seed;
    g->free_head = g->lru_head = g->lru_tail = REGION_NONE;
    if (n_slots > 0) {
        g->use = calloc(n_slots, sizeof(g->use[0]));
        if (!g->use)
            s = KVS_E_NO_MEMORY;
    }
    if (s == KVS_OK && n_slots > 0 && !imported)
        s = make_slots(g);
    if (s != KVS_OK) {
        region_destroy(g);
        return s;
    }
    *ret = g;
    return KVS_OK;
}

void region_destroy(region *g)
{
    if (!g)
        return;
    free(g->map);
    free(g->use);
    free(g->slots);
    free(g->buckets);
    free(g);
}

kvs_status region_sit(region *g, region_seat **ret)
{
    region_seat *s = calloc(1, sizeof(*s));

    if (!s)
        return KVS_E_NO_MEMORY;
    if (g->slots) {
        s->holds = calloc(g->n_slots, sizeof(s->holds[0]));
        if (!s->holds) {
            free(s);
            return KVS_E_NO_MEMORY;
        }
    }
    s->region = g;
    g->n_seats++;
    *ret = s;
    return KVS_OK;
}

/* ---- lists ---- */

static uint32_t *bucket_of(const region *g, const uint8_t key[32])
{
    /* Of all its bytes: they are the client's, who may choose keys that begin alike. */
    return &g->buckets[XXH3_64bits_withSeed(key, 32, g->seed) & g->bucket_mask];
}

static void unlink_key(region *g, uint32_t slot)
{
    uint32_t *at = bucket_of(g, g->slots[slot].key);

    g->n_keys--;
    while (*at != slot)
        at = &g->slots[*at].chain;
    *at = g->slots[slot].chain;
}

static void lru_remove(region *g, uint32_t slot)
{
    region_slot *x = &g->slots[slot];

    if (!x->listed)
        return;
    *(x->prev == REGION_NONE ? &g->lru_head : &g->slots[x->prev].next) = x->next;
    *(x->next == REGION_NONE ? &g->lru_tail : &g->slots[x->next].prev) = x->prev;
    x->listed = false;
    g->n_cached--;
}

static void lru_append(region *g, uint32_t slot)
{
    region_slot *x = &g->slots[slot];

    x->prev = g->lru_tail;
    x->next = REGION_NONE;
    *(g->lru_tail == REGION_NONE ? &g->lru_head : &g->slots[g->lru_tail].next) = slot;
    g->lru_tail = slot;
    x->listed = true;
    g->n_cached++;
}

static void free_push(region *g, uint32_t slot)
{
    g->slots[slot].prev = REGION_NONE;
    g->slots[slot].next = g->free_head;
    if (g->free_head != REGION_NONE)
        touch(g, g->free_head)->prev = slot;
    g->free_head = slot;
    g->n_free++;
}

static void free_remove(region *g, uint32_t slot)
{
    region_slot *x = touch(g, slot);

    *(x->prev == REGION_NONE ? &g->free_head : &touch(g, x->prev)->next) = x->next;
    if (x->next != REGION_NONE)
        touch(g, x->next)->prev = x->prev;
    g->n_free--;
}

static bool is_used(const region_use *u)
{
    return u->loading || u->stores != 0 || u->computes != 0;
}

static void set_free(region *g, uint32_t slot)
{
    region_slot *x = &g->slots[slot];

    if (x->state == REGION_SHARED) {
        lru_remove(g, slot);
        if (!x->orphan)
            unlink_key(g, slot);
    }
    x->orphan = x->unnamed = false;
    x->state = REGION_FREE;
    x->owner = NULL;
    x->gen = x->gen == UINT32_MAX ? 1 : x->gen + 1;
    memset(x->key, 0, sizeof(x->key));
    g->use[slot].bad = false;
    free_push(g, slot);
}

void region_rest(region *g, uint32_t slot)
{
    region_slot *x;

    if (is_used(&g->use[slot]))
        return;
    g->use[slot].suspect = false;
    if (!g->slots)
        return;
    x = &g->slots[slot];
    if (x->state == REGION_DYING || (x->state == REGION_SHARED && x->orphan && x->holds == 0))
        set_free(g, slot);
    else if (x->state == REGION_SHARED && x->holds == 0 && !x->listed)
        lru_append(g, slot);
}

static void end_private(region *g, uint32_t slot)
{
    region_slot *x = &g->slots[slot];

    x->owner->n_private--;
    x->owner = NULL;
    x->state = REGION_DYING;
    region_rest(g, slot);
}

static void end_holds(region_seat *s, uint32_t slot, uint32_t n)
{
    region *g = s->region;

    s->holds[slot] -= n;
    s->n_held -= n;
    g->slots[slot].holds -= n;
    region_rest(g, slot);
}

bool region_leave(region_seat *s)
{
    region *g = s->region;

    for (uint32_t i = 0; g->n_seats > 1 && (s->n_private > 0 || s->n_held > 0) && i < g->n_slots; i++) {
        if (g->slots[i].state == REGION_PRIVATE && g->slots[i].owner == s)
            end_private(g, i);
        else if (s->holds[i] != 0)
            end_holds(s, i, s->holds[i]);
    }
    free(s->holds);
    free(s);
    return --g->n_seats == 0;
}

/* ---- slots ---- */

uint32_t region_available(const region *g)
{
    return g->n_free + g->n_cached;
}

kvs_status region_take(region_seat *s, uint32_t *ret)
{
    region *g = s->region;
    uint32_t slot;

    if (g->free_head == REGION_NONE && g->lru_head != REGION_NONE)
        set_free(g, g->lru_head);
    slot = g->free_head;
    if (slot == REGION_NONE)
        return KVS_E_NO_SPACE;
    free_remove(g, slot);
    g->slots[slot].state = REGION_PRIVATE;
    g->slots[slot].owner = s;
    s->n_private++;
    *ret = slot;
    return KVS_OK;
}

kvs_status region_take_unnamed(region_seat *s, uint32_t *ret)
{
    kvs_status st = region_take(s, ret);

    if (st == KVS_OK)
        s->region->slots[*ret].unnamed = true;
    return st;
}

void region_named(region *g, uint32_t slot)
{
    g->slots[slot].unnamed = false;
}

uint32_t region_find(const region *g, const uint8_t key[32])
{
    uint32_t slot = *bucket_of(g, key);

    while (slot != REGION_NONE && memcmp(g->slots[slot].key, key, 32) != 0)
        slot = g->slots[slot].chain;
    return slot;
}

void region_hold(region_seat *s, uint32_t slot)
{
    region_slot *x = &s->region->slots[slot];

    lru_remove(s->region, slot);
    x->holds++;
    s->holds[slot]++;
    s->n_held++;
}

void region_share_orphan(region_seat *s, uint32_t slot, const uint8_t key[32], uint32_t depth)
{
    region_slot *x = &s->region->slots[slot];

    s->n_private--;
    x->owner = NULL;
    x->state = REGION_SHARED;
    x->orphan = true;
    x->holds = 0;
    x->depth = depth;
    memcpy(x->key, key, sizeof(x->key));
    region_hold(s, slot);
}

bool region_share(region_seat *s, uint32_t slot, const uint8_t key[32], uint32_t depth)
{
    region *g = s->region;
    region_slot *x = &g->slots[slot];
    uint32_t *bucket = bucket_of(g, key);

    if (x->state != REGION_PRIVATE || x->owner != s || region_find(g, key) != REGION_NONE)
        return false;
    region_share_orphan(s, slot, key, depth);
    x->orphan = false;
    g->n_keys++;
    x->chain = *bucket;
    *bucket = slot;
    return true;
}

static void make_orphan(region *g, uint32_t slot)
{
    unlink_key(g, slot);
    lru_remove(g, slot);
    g->slots[slot].orphan = true;
    region_rest(g, slot);
}

bool region_forget(region *g, const uint8_t key[32])
{
    uint32_t slot = g->n_keys > 0 ? region_find(g, key) : REGION_NONE;

    if (slot == REGION_NONE)
        return false;
    make_orphan(g, slot);
    return true;
}

bool region_forget_some(region *g, uint32_t *from, uint32_t *budget)
{
    for (; g->n_keys > 0 && *from < g->n_slots; ++*from) { /* it is not slow where there is nothing to forget */
        if (*budget == 0)
            return true;
        --*budget;
        if (g->slots[*from].state == REGION_SHARED && !g->slots[*from].orphan)
            make_orphan(g, *from);
    }
    return false;
}

static kvs_status find_slot(const region_seat *s, uint32_t slot, const uint32_t *gen)
{
    const region *g = s->region;

    if (slot >= g->n_slots)
        return KVS_E_RANGE;
    if (g->slots && gen && gen_of(g, slot) != *gen)
        return KVS_E_STALE;
    return KVS_OK;
}

static bool owns(const region_seat *s, uint32_t slot)
{
    const region_slot *x = &s->region->slots[slot];

    return x->state == REGION_PRIVATE && x->owner == s && !x->unnamed;
}

kvs_status region_drop(region_seat *s, uint32_t slot, uint32_t gen)
{
    kvs_status st = find_slot(s, slot, &gen);

    if (st != KVS_OK)
        return st;
    if (!s->region->slots)
        return KVS_E_STATE;
    if (owns(s, slot))
        end_private(s->region, slot);
    else if (s->holds[slot] > 0)
        end_holds(s, slot, 1);
    else
        return KVS_E_STATE;
    return KVS_OK;
}

kvs_status region_readopt(region_seat *s, const wire_region_entry *e)
{
    region *g = s->region;
    bool shared = (e->flags & WIRE_ENTRY_SHARED) != 0;
    region_slot *x;

    if (e->slot >= g->n_slots || !g->slots)
        return KVS_E_RANGE;
    if ((e->flags & ~(uint32_t)WIRE_ENTRY_SHARED) != 0 || e->gen == 0)
        return KVS_E_INVALID;
    x = &g->slots[e->slot];
    if (x->state == REGION_SHARED && shared && memcmp(x->key, e->key, 32) == 0 && x->gen == e->gen) {
        region_hold(s, e->slot); /* another client re-offered it first */
        return KVS_OK;
    }
    if (x->state != REGION_FREE || is_used(&g->use[e->slot]))
        return KVS_E_BUSY;
    if (shared && region_find(g, e->key) != REGION_NONE)
        return KVS_E_EXISTS;
    free_remove(g, e->slot);
    x->gen = e->gen;
    x->state = REGION_PRIVATE;
    x->owner = s;
    s->n_private++;
    if (shared)
        region_share(s, e->slot, e->key, e->depth);
    return KVS_OK;
}

/* ---- rights ---- */

kvs_status region_may_load(const region_seat *s, uint32_t slot, uint32_t gen)
{
    kvs_status st = find_slot(s, slot, &gen);

    if (st != KVS_OK)
        return st;
    if (s->region->slots && !owns(s, slot))
        return KVS_E_STATE;
    return is_used(&s->region->use[slot]) ? KVS_E_BUSY : KVS_OK;
}

kvs_status region_may_store(const region_seat *s, uint32_t slot, uint32_t gen, bool refilled)
{
    kvs_status st = find_slot(s, slot, &gen);

    if (st != KVS_OK)
        return st;
    st = region_may_read(s, slot);
    if (st != KVS_OK)
        return st;
    return s->region->use[slot].bad && !refilled ? KVS_E_STATE : KVS_OK;
}

kvs_status region_may_write(const region_seat *s, uint32_t slot)
{
    kvs_status st = find_slot(s, slot, NULL);

    if (st != KVS_OK)
        return st;
    if (s->region->slots && !owns(s, slot))
        return KVS_E_STATE;
    return s->region->use[slot].suspect || s->region->use[slot].stores ? KVS_E_BUSY : KVS_OK;
}

kvs_status region_may_read(const region_seat *s, uint32_t slot)
{
    kvs_status st = find_slot(s, slot, NULL);

    if (st != KVS_OK)
        return st;
    if (s->region->slots && !owns(s, slot) && s->holds[slot] == 0)
        return KVS_E_STATE;
    return s->region->use[slot].suspect ? KVS_E_BUSY : KVS_OK;
}

void region_mark_begin(region *g)
{
    if (++g->epoch != 0)
        return;
    for (uint32_t i = 0; i < g->n_slots; i++) /* wrapped: forget marks of four billion requests ago */
        g->use[i].mark = 0;
    g->epoch = 1;
}

bool region_mark(region *g, uint32_t slot)
{
    bool first = g->use[slot].mark != g->epoch;

    g->use[slot].mark = g->epoch;
    return first;
}

/* ---- check ---- */

kvs_status region_check(const region *g, kvs_err *err)
{
    uint32_t n_free = 0, n_cached = 0, n_list = 0, n_keys = 0;

    for (uint32_t i = 0; g->slots && i < g->n_slots; i++) {
        const region_slot *x = &g->slots[i];

        n_free += x->state == REGION_FREE;
        n_cached += x->listed;
        n_keys += x->state == REGION_SHARED && !x->orphan;
        if (x->listed && (x->state != REGION_SHARED || x->holds != 0 || is_used(&g->use[i])))
            return kvs_fail(err, KVS_E_CORRUPT, "region %u slot %u: evictable, but in use", g->id, i);
        if (x->state == REGION_SHARED && !x->orphan && region_find(g, x->key) != i)
            return kvs_fail(err, KVS_E_CORRUPT, "region %u slot %u: its key is not found", g->id, i);
        if (x->state == REGION_FREE && is_used(&g->use[i]))
            return kvs_fail(err, KVS_E_CORRUPT, "region %u slot %u: free, but in use", g->id, i);
    }
    for (uint32_t i = g->free_head; g->slots && i != REGION_NONE && n_list <= g->n_slots; i = after(g, i))
        n_list++;
    if (n_keys != g->n_keys)
        return kvs_fail(err, KVS_E_CORRUPT, "region %u: %u keys, counted %u", g->id, n_keys, g->n_keys);
    if (n_free != g->n_free || n_list != g->n_free || n_cached != g->n_cached)
        return kvs_fail(err, KVS_E_CORRUPT, "region %u: %u free (listed %u, counted %u), %u cached (counted %u)", g->id,
                        n_free, n_list, g->n_free, n_cached, g->n_cached);
    return KVS_OK;
}
