/* The operations: each builds one request body from its arguments; run and submit do the rest. */
#include "proto/client/internal.h"

#include <stdlib.h>
#include <string.h>

typedef kvs_status (*builder)(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err);

/* what: the name of the call, for an argument that is NULL. */
static kvs_status run(const char *what, builder build, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request r = {0};
    call k;
    kvs_status s = GIVEN(err, what, {"a", args});

    if (s == KVS_OK)
        s = build(&k, &r, args, timeout_ms, err);
    if (s == KVS_OK)
        return call_run(&k, err);
    answer_spread(&r, s);
    return s;
}

/* hidden_in: 0, or the only connection that a request may go to which kvs_poll never shows. */
static kvs_status submit_as(const char *what, uint64_t hidden_in, builder build, const void *args, kvs_request **ret,
                            uint32_t timeout_ms, kvs_err *err)
{
    kvs_request *r = NULL;
    call k;
    kvs_status s = GIVEN(err, what, {"a", args}, {"ret", ret});

    if (s == KVS_OK)
        s = request_new(&r, err);
    if (s != KVS_OK)
        return s;
    r->pipelined = hidden_in == 0;
    s = build(&k, r, args, timeout_ms, err);
    if (s == KVS_OK && hidden_in != 0 && k.generation != hidden_in) {
        call_drop(&k);
        s = kvs_fail(err, KVS_E_AWAY, "the connection was replaced while the request was made");
    }
    if (s != KVS_OK) {
        answer_spread(r, s);
        free(r);
        return s;
    }
    request_enlist(r, k.c);
    s = call_submit(&k, err);
    if (s != KVS_OK) {
        answer_spread(r, s);
        request_destroy(r);
        return s;
    }
    *ret = r;
    return KVS_OK;
}

static kvs_status submit(const char *what, builder build, const void *args, kvs_request **ret, uint32_t timeout_ms,
                         kvs_err *err)
{
    return submit_as(what, 0, build, args, ret, timeout_ms, err);
}

/* ---- handles in bodies: read after call_begin, which remembers the connection that their numbers must belong to ---- */

kvs_status call_ns(call *k, kvs_ns *ns, uint32_t *ret, kvs_err *err)
{
    kvs_status s = (kvs_status)atomic_load(&ns->status);

    if (ns->c != k->c)
        return kvs_fail(err, KVS_E_INVALID, "namespace of another handle");
    if (s != KVS_OK)
        return kvs_fail(err, s, "namespace: the restarted daemon does not know it");
    *ret = atomic_load(&ns->id);
    return KVS_OK;
}

kvs_status call_region(call *k, kvs_region *r, uint32_t *ret, kvs_err *err)
{
    kvs_status s = (kvs_status)atomic_load(&r->status);

    if (r->c != k->c)
        return kvs_fail(err, KVS_E_INVALID, "region of another handle");
    if (s != KVS_OK)
        return kvs_fail(err, s, "region: the restarted daemon did not take it back");
    *ret = atomic_load(&r->id);
    return KVS_OK;
}

static kvs_status call_place(call *k, kvs_ns *ns, kvs_region *region, uint32_t *ret_ns, uint32_t *ret_region,
                             kvs_err *err)
{
    kvs_status s = call_ns(k, ns, ret_ns, err);

    return s == KVS_OK ? call_region(k, region, ret_region, err) : s;
}

static kvs_status count_check(const char *what, uint32_t n, kvs_err *err)
{
    return n == 0 ? kvs_fail(err, KVS_E_INVALID, "%s: 0 of them", what) : KVS_OK;
}

static void put_mark(const kvs_mark *m, uint32_t *counter, uint64_t *value)
{
    *counter = m != NULL ? m->counter : WIRE_NONE32;
    *value = m != NULL ? m->value : 0;
}

static kvs_status mark_check(const kvs_mark *after, const kvs_mark *signal, kvs_err *err)
{
    if (after != NULL && (after->value > WIRE_COUNTER_MAX || (after->counter & ~KVS_COUNTER_DAEMON) >= WIRE_COUNTERS))
        return kvs_fail(err, KVS_E_RANGE, "after: counter %u, value %llu: outside 0..%d, 0..2^62-1",
                        after->counter & ~KVS_COUNTER_DAEMON, (unsigned long long)after->value, WIRE_COUNTERS - 1);
    if (signal != NULL && (signal->value > WIRE_COUNTER_MAX || signal->counter >= WIRE_COUNTERS))
        return kvs_fail(err, KVS_E_RANGE, "signal: counter %u, value %llu: outside 0..%d, 0..2^62-1", signal->counter,
                        (unsigned long long)signal->value, WIRE_COUNTERS - 1);
    return KVS_OK;
}

static uint64_t block_bytes(const kvs_ns *ns, uint32_t n)
{
    uint64_t one = ns->info.slot_bytes;

    return one != 0 && n > UINT64_MAX / one ? UINT64_MAX : n * one;
}

static void put_keys(wire_out *o, const uint8_t *keys, uint32_t n)
{
    wire_put_bytes(o, keys, (size_t)n * WIRE_KEY_BYTES);
}

static void put_slots(wire_out *o, const kvs_slot *slots, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        bool any = slots == NULL || slots[i].slot == KVS_SLOT_ANY;

        wire_put_u32(o, any ? KVS_SLOT_ANY : slots[i].slot);
        wire_put_u32(o, any ? 0 : slots[i].gen);
    }
}

/* Slots of a daemon that is gone, in a region that the new one took back without them.  Behind call_begin: of a later
 * connection than that one's the request is not, however long there was something to wait for. */
static kvs_status slots_check(kvs_region *r, const kvs_slot *slots, uint32_t n, kvs_err *err)
{
    kvs_status s = KVS_OK;

    (void)pthread_mutex_lock(&r->c->mu);
    for (uint32_t i = 0; i < n && s == KVS_OK; i++)
        if (region_slot_is_lost(r, slots[i]))
            s = kvs_fail(err, KVS_E_STALE, "slots[%u]: slot %u generation %u did not survive the daemon's restart", i,
                         slots[i].slot, slots[i].gen);
    (void)pthread_mutex_unlock(&r->c->mu);
    return s;
}

/* Built, or dropped with its reason. */
static kvs_status finish(call *k, kvs_status s)
{
    if (s != KVS_OK)
        call_drop(k);
    return s;
}

/* ---- ping, health ---- */

static kvs_status build_ping(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    kvs_client *c = *(kvs_client *const *)args;
    kvs_status s = GIVEN(err, "ping", {"c", c});

    if (s == KVS_OK)
        s = call_begin(k, c, r, WIRE_PING, 8, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    k->control = true;
    r->cookie = (uint64_t)k->deadline;
    wire_put_u64(&k->out, r->cookie);
    return KVS_OK;
}

kvs_status kvs_ping(kvs_client *c, uint32_t timeout_ms, kvs_err *err)
{
    return run("ping", build_ping, &c, timeout_ms, err);
}

kvs_status kvs_submit_ping(kvs_client *c, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return submit("ping", build_ping, &c, ret, timeout_ms, err);
}

kvs_status kvs_health(kvs_client *c, kvs_health_info *ret, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request r = {.ret = ret};
    call k;
    kvs_status s = GIVEN(err, "health", {"c", c}, {"ret", ret});

    if (s == KVS_OK)
        s = call_begin(&k, c, &r, WIRE_HEALTH, 0, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    k.control = true;
    return call_run(&k, err);
}

/* ---- namespaces ---- */

static kvs_status ns_create(kvs_client *c, const kvs_namespace *desc, kvs_ns **ret, kvs_err *err)
{
    size_t cap = 4096 + (size_t)desc->n_planes * 128, len; /* the canonical form is shorter: it has no C padding */
    kvs_status s = kvs_namespace_check(desc, err);
    kvs_ns *ns;

    if (s != KVS_OK)
        return s;
    ns = calloc(1, sizeof *ns + cap + 8);
    if (ns == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "namespace: no memory");
    s = kvs_namespace_encode(desc, ns->canon, cap, &len, err);
    if (s == KVS_OK)
        s = kvs_namespace_digest(desc, ns->info.digest, err);
    if (s != KVS_OK) {
        free(ns);
        return s;
    }
    ns->c = c;
    ns->desc_len = len;
    ns->canon_len = (len + 7) / 8 * 8;
    ns->info.n_planes = desc->n_planes;
    ns->info.tokens_per_block = desc->tokens_per_block;
    ns->info.slot_bytes = kvs_namespace_slot_bytes(desc);
    *ret = ns;
    return KVS_OK;
}

static kvs_ns *ns_find(kvs_client *c, const kvs_ns *like)
{
    kvs_ns *found = NULL;

    (void)pthread_mutex_lock(&c->mu);
    for (kvs_ns *ns = c->namespaces; ns != NULL && found == NULL; ns = ns->next)
        if (!ns->by_id && ns->canon_len == like->canon_len && memcmp(ns->canon, like->canon, ns->canon_len) == 0)
            found = ns;
    (void)pthread_mutex_unlock(&c->mu);
    return found;
}

kvs_status kvs_open(kvs_client *c, const kvs_namespace *desc, kvs_ns **ret, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request r = {0};
    kvs_ns *ns = NULL, *old;
    call k;
    kvs_status s = GIVEN(err, "open", {"c", c}, {"ns", desc}, {"ret", ret});

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s == KVS_OK)
        s = ns_create(c, desc, &ns, err);

    if (s != KVS_OK || ns == NULL)
        return s;
    old = ns_find(c, ns);
    if (old != NULL && atomic_load(&old->status) == KVS_OK) {
        free(ns);
        *ret = old;
        return KVS_OK;
    }
    r.ns = ns;
    s = call_begin(&k, c, &r, WIRE_OPEN, ns->canon_len, timeout_ms, err);
    if (s == KVS_OK) {
        wire_put_bytes(&k.out, ns->canon, ns->canon_len);
        s = call_run(&k, err);
    }
    if (s != KVS_OK)
        free(ns);
    else
        *ret = ns;
    return s;
}

kvs_status kvs_open_id(kvs_client *c, uint32_t id, kvs_ns **ret, kvs_err *err)
{
    kvs_status s = GIVEN(err, "open_id", {"c", c}, {"ret", ret});
    kvs_ns *ns;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    ns = calloc(1, sizeof *ns);
    if (ns == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "namespace: no memory");
    ns->c = c;
    ns->by_id = true;
    ns->info.id = id;
    atomic_store(&ns->id, id);
    (void)pthread_mutex_lock(&c->mu);
    if (c->registering || c->state != LINK_UP) {
        (void)pthread_mutex_unlock(&c->mu);
        free(ns);
        return kvs_fail(err, KVS_E_AWAY, "namespace %u: no daemon to know it", id);
    }
    ns->next = c->namespaces;
    c->namespaces = ns;
    (void)pthread_mutex_unlock(&c->mu);
    *ret = ns;
    return KVS_OK;
}

void kvs_ns_get(kvs_ns *ns, kvs_ns_info *ret)
{
    if (ret == NULL)
        return;
    if (ns == NULL) {
        *ret = (kvs_ns_info){0};
        return;
    }
    *ret = ns->info;
    ret->id = atomic_load(&ns->id);
}

/* ---- finding ---- */

typedef struct lookup_args {
    kvs_ns *ns;
    const uint8_t *keys;
    uint32_t n, *ret_hits;
    uint8_t *states;
} lookup_args;

static kvs_status build_lookup(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const lookup_args *a = args;
    wire_lookup_req q = {.n_keys = a->n};
    kvs_status s = GIVEN(err, "lookup", {"ns", a->ns}, {"keys", given_some(a->n, a->keys)}, {"ret_hits", a->ret_hits});

    r->op = WIRE_LOOKUP;
    r->ret = a->ret_hits;
    r->items = a->states;
    r->n = a->n;
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, WIRE_LOOKUP, WIRE_lookup_req_BYTES + (uint64_t)a->n * WIRE_KEY_BYTES, timeout_ms,
                       err);
    if (s != KVS_OK)
        return s;
    s = call_ns(k, a->ns, &q.ns, err);
    wire_put_lookup_req(&k->out, &q);
    put_keys(&k->out, a->keys, a->n);
    return finish(k, s);
}

kvs_status kvs_lookup(kvs_ns *ns, const uint8_t *keys, uint32_t n, uint32_t *ret_hits, uint8_t *states,
                      uint32_t timeout_ms, kvs_err *err)
{
    lookup_args a = {ns, keys, n, ret_hits, states};
    kvs_status s = run("lookup", build_lookup, &a, timeout_ms, err);

    return s == KVS_E_AWAY ? KVS_OK : s;
}

kvs_status kvs_submit_lookup(kvs_ns *ns, const uint8_t *keys, uint32_t n, uint32_t *ret_hits, uint8_t *states,
                             kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    lookup_args a = {ns, keys, n, ret_hits, states};

    return submit("lookup", build_lookup, &a, ret, timeout_ms, err);
}

typedef struct reserve_args {
    const kvs_reserve_args *a;
    kvs_lease *ret;
} reserve_args;

static kvs_status reserve_check(const kvs_reserve_args *a, kvs_err *err)
{
    kvs_status s = count_check("namespaces", a->n_ns, err);

    if (s == KVS_OK)
        s = GIVEN(err, "reserve", {"ns", a->ns}, {"keys", given_some(a->n, a->keys)});
    for (uint32_t i = 0; i < a->n_ns && s == KVS_OK; i++)
        if (a->ns[i] == NULL)
            s = kvs_fail(err, KVS_E_INVALID, "reserve: ns[%u] is NULL", i);
    return s;
}

static kvs_status build_reserve(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const reserve_args *both = args;
    const kvs_reserve_args *a = both->a;
    wire_reserve_req q;
    kvs_status s = GIVEN(err, "reserve", {"a", a}, {"ret_lease", both->ret});

    r->op = WIRE_RESERVE;
    r->ret = both->ret;
    if (s == KVS_OK)
        s = reserve_check(a, err);
    if (s == KVS_OK)
        s = call_begin(k, a->ns[0]->c, r, WIRE_RESERVE,
                       WIRE_reserve_req_BYTES + (uint64_t)a->n_ns * 4 + 8 + (uint64_t)a->n * WIRE_KEY_BYTES, timeout_ms,
                       err);
    if (s != KVS_OK)
        return s;
    r->n = a->n;
    q = (wire_reserve_req){a->n_ns, a->n, a->max_loads, a->ttl_ms};
    wire_put_reserve_req(&k->out, &q);
    for (uint32_t i = 0; i < a->n_ns && s == KVS_OK; i++) {
        uint32_t id = 0;

        s = call_ns(k, a->ns[i], &id, err);
        wire_put_u32(&k->out, id);
    }
    wire_put_pad8(&k->out);
    put_keys(&k->out, a->keys, a->n);
    return finish(k, s);
}

kvs_status kvs_reserve(const kvs_reserve_args *a, kvs_lease *ret_lease, uint32_t timeout_ms, kvs_err *err)
{
    reserve_args both = {a, ret_lease};

    return run("reserve", build_reserve, &both, timeout_ms, err);
}

kvs_status kvs_submit_reserve(const kvs_reserve_args *a, kvs_lease *ret_lease, kvs_request **ret, uint32_t timeout_ms,
                              kvs_err *err)
{
    reserve_args both = {a, ret_lease};

    return submit("reserve", build_reserve, &both, ret, timeout_ms, err);
}

kvs_status kvs_release(kvs_client *c, const kvs_lease *lease, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request r = {0};
    wire_release_req q;
    call k;
    kvs_status s = GIVEN(err, "release", {"c", c}, {"lease", lease});

    if (s == KVS_OK)
        s = call_begin(&k, c, &r, WIRE_RELEASE, WIRE_release_req_BYTES, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    memcpy(q.lease, lease->id, sizeof q.lease);
    wire_put_release_req(&k.out, &q);
    return call_run(&k, err);
}

/* ---- moving ---- */

static bool any_slot_is_free(const kvs_slot *slots, uint32_t n)
{
    for (uint32_t i = 0; slots != NULL && i < n; i++)
        if (slots[i].slot == KVS_SLOT_ANY)
            return true;
    return slots == NULL;
}

static kvs_status load_check(const kvs_load_args *a, kvs_err *err)
{
    const void *which = a->lease != NULL ? (const void *)a->lease : a->keys;
    kvs_status s = count_check("blocks", a->n, err);

    if (s == KVS_OK)
        s = GIVEN(err, "load", {"ns", a->ns}, {"region", a->region}, {"keys", which}, {"results", a->results});
    if (s == KVS_OK)
        s = client_check_own(a->ns->c, err);
    if (s == KVS_OK)
        s = mark_check(a->after, a->signal, err);
    if (s == KVS_OK && a->stream != NULL && (a->after != NULL || a->signal != NULL))
        s = kvs_fail(err, KVS_E_INVALID, "%s: not with a stream, which has its own", a->after ? "after" : "signal");
    if (s == KVS_OK && a->slots != NULL) /* what the daemon chooses nobody has touched */
        s = stream_settle(a->region, a->after, a->stream, err);
    return s;
}

static kvs_status load_marks(call *k, const kvs_load_args *a, wire_load_req *q, kvs_err *err)
{
    kvs_mark after, signal;

    put_mark(a->after, &q->after_counter, &q->after_value);
    put_mark(a->signal, &q->signal_counter, &q->signal_value);
    if (a->stream != NULL) {
        kvs_status s = stream_enter(k, a->stream, true, &after, &signal, err);

        if (s != KVS_OK)
            return s;
        put_mark(&after, &q->after_counter, &q->after_value);
        put_mark(&signal, &q->signal_counter, &q->signal_value);
    }
    return KVS_OK;
}

static void fill_load(const kvs_load_args *a, wire_load_req *q)
{
    q->n = a->n;
    q->flags = a->lease != NULL ? WIRE_LOAD_BY_LEASE : 0;
    if (a->lease != NULL)
        memcpy(q->lease, a->lease->id, sizeof q->lease);
    q->lease_first = a->lease_first;
}

static kvs_status build_load(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const kvs_load_args *a = args;
    bool by_lease = a->lease != NULL;
    wire_load_req q = {0};
    kvs_status s = load_check(a, err);

    r->op = WIRE_LOAD;
    r->items = a->results;
    r->n = a->n;
    r->args = a;
    r->region = a->region;
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, WIRE_LOAD,
                       WIRE_load_req_BYTES + (uint64_t)a->n * (WIRE_slot_ref_BYTES + (by_lease ? 0 : WIRE_KEY_BYTES)),
                       timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_place(k, a->ns, a->region, &q.ns, &q.region, err);
    if (s == KVS_OK && a->slots != NULL)
        s = slots_check(a->region, a->slots, a->n, err);
    if (s == KVS_OK)
        s = load_marks(k, a, &q, err);
    fill_load(a, &q);
    wire_put_load_req(&k->out, &q);
    if (!by_lease)
        put_keys(&k->out, a->keys, a->n);
    put_slots(&k->out, a->slots, a->n);
    k->cost = block_bytes(a->ns, a->n);
    k->chosen = any_slot_is_free(a->slots, a->n);
    k->region_id = q.region;
    return finish(k, s);
}

kvs_status kvs_load(const kvs_load_args *a, uint32_t timeout_ms, kvs_err *err)
{
    return run("load", build_load, a, timeout_ms, err);
}

kvs_status kvs_submit_load(const kvs_load_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return submit("load", build_load, a, ret, timeout_ms, err);
}

kvs_status load_submit_hidden(const kvs_load_args *a, uint64_t generation, kvs_request **ret, uint32_t timeout_ms,
                              kvs_err *err)
{
    return submit_as("load", generation, build_load, a, ret, timeout_ms, err);
}

/* As the daemon has it, so that a mistake is not hidden by what is sent in its place. */
kvs_status parent_check(uint32_t first_depth, const uint8_t *parent, kvs_err *err)
{
    static const uint8_t none[WIRE_KEY_BYTES];

    if (first_depth > 0 && parent == NULL)
        return kvs_fail(err, KVS_E_INVALID, "parent: none, but first_depth is %u; zeros if you do not know it",
                        first_depth);
    if (first_depth == 0 && parent != NULL && memcmp(parent, none, sizeof none) != 0)
        return kvs_fail(err, KVS_E_INVALID, "parent: is not zeros, but first_depth is 0");
    return KVS_OK;
}

static kvs_status store_check(const kvs_store_args *a, kvs_err *err)
{
    kvs_status s = count_check("blocks", a->n, err);

    if (s == KVS_OK)
        s = GIVEN(err, "store", {"ns", a->ns}, {"region", a->region}, {"keys", a->keys}, {"slots", a->slots});
    if (s == KVS_OK)
        s = client_check_own(a->ns->c, err);
    if (s == KVS_OK)
        s = mark_check(a->after, a->signal, err);
    if (s == KVS_OK)
        s = parent_check(a->first_depth, a->parent, err);
    if (s == KVS_OK && a->stream != NULL && a->after != NULL)
        s = kvs_fail(err, KVS_E_INVALID, "after: not with a stream, which has its own");
    return s == KVS_OK ? stream_settle(a->region, a->after, a->stream, err) : s;
}

static kvs_status build_store(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const kvs_store_args *a = args;
    wire_store_req q = {.n = a->n, .flags = a->flags, .first_depth = a->first_depth};
    kvs_mark on_stream = KVS_MARK_NOW;
    kvs_status s = store_check(a, err);

    r->op = WIRE_STORE;
    r->items = a->results;
    r->n = a->n;
    r->args = a;
    r->region = a->region;
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, WIRE_STORE,
                       WIRE_store_req_BYTES + (uint64_t)a->n * (WIRE_KEY_BYTES + WIRE_slot_ref_BYTES), timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_place(k, a->ns, a->region, &q.ns, &q.region, err);
    if (s == KVS_OK)
        s = slots_check(a->region, a->slots, a->n, err);
    put_mark(a->after, &q.after_counter, &q.after_value);
    put_mark(a->signal, &q.signal_counter, &q.signal_value);
    if (s == KVS_OK && a->stream != NULL) {
        s = stream_enter(k, a->stream, false, &on_stream, NULL, err);
        put_mark(&on_stream, &q.after_counter, &q.after_value);
    }
    if (a->first_depth > 0)
        memcpy(q.parent, a->parent, sizeof q.parent);
    wire_put_store_req(&k->out, &q);
    put_keys(&k->out, a->keys, a->n);
    put_slots(&k->out, a->slots, a->n);
    k->cost = block_bytes(a->ns, a->n);
    return finish(k, s);
}

kvs_status kvs_store(const kvs_store_args *a, uint32_t timeout_ms, kvs_err *err)
{
    return run("store", build_store, a, timeout_ms, err);
}

kvs_status kvs_submit_store(const kvs_store_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return submit("store", build_store, a, ret, timeout_ms, err);
}

kvs_status store_submit_hidden(const kvs_store_args *a, uint64_t generation, kvs_request **ret, uint32_t timeout_ms,
                               kvs_err *err)
{
    return submit_as("store", generation, build_store, a, ret, timeout_ms, err);
}

kvs_status kvs_slot_take(kvs_region *region, uint32_t n, kvs_slot *ret, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request r = {.n = n, .items = ret, .region = region};
    wire_slot_take_req q = {.n = n};
    call k;
    kvs_status s = count_check("slots", n, err);

    if (s == KVS_OK)
        s = GIVEN(err, "slot_take", {"r", region}, {"ret", ret});
    if (s == KVS_OK)
        s = call_begin(&k, region->c, &r, WIRE_SLOT_TAKE, WIRE_slot_take_req_BYTES, timeout_ms, err);
    if (s == KVS_OK)
        s = call_region(&k, region, &q.region, err);
    if (s != KVS_OK)
        return s;
    wire_put_slot_take_req(&k.out, &q);
    k.region_id = q.region;
    return call_run(&k, err);
}

typedef struct drop_args {
    kvs_region *region;
    const kvs_slot *slots;
    uint32_t n;
    const kvs_mark *after;
    kvs_status *results;
} drop_args;

static kvs_status build_slot_drop(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const drop_args *a = args;
    wire_slot_drop_req q = {.n = a->n};
    kvs_status s = count_check("slots", a->n, err);

    r->op = WIRE_SLOT_DROP;
    r->items = a->results;
    r->n = a->n;
    r->args = a->slots;
    r->region = a->region;
    if (s == KVS_OK)
        s = GIVEN(err, "slot_drop", {"r", a->region}, {"slots", a->slots});
    if (s == KVS_OK)
        s = client_check_own(a->region->c, err);
    if (s == KVS_OK)
        s = mark_check(a->after, NULL, err);
    if (s == KVS_OK)
        s = stream_settle(a->region, a->after, NULL, err);
    if (s == KVS_OK)
        s = call_begin(k, a->region->c, r, WIRE_SLOT_DROP,
                       WIRE_slot_drop_req_BYTES + (uint64_t)a->n * WIRE_slot_ref_BYTES, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_region(k, a->region, &q.region, err);
    if (s == KVS_OK)
        s = slots_check(a->region, a->slots, a->n, err);
    put_mark(a->after, &q.after_counter, &q.after_value);
    wire_put_slot_drop_req(&k->out, &q);
    put_slots(&k->out, a->slots, a->n);
    return finish(k, s);
}

kvs_status kvs_slot_drop(kvs_region *region, const kvs_slot *slots, uint32_t n, const kvs_mark *after,
                         kvs_status *results, uint32_t timeout_ms, kvs_err *err)
{
    drop_args a = {region, slots, n, after, results};

    return run("slot_drop", build_slot_drop, &a, timeout_ms, err);
}

kvs_status kvs_submit_slot_drop(kvs_region *region, const kvs_slot *slots, uint32_t n, const kvs_mark *after,
                                kvs_status *results, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    drop_args a = {region, slots, n, after, results};

    return submit("slot_drop", build_slot_drop, &a, ret, timeout_ms, err);
}

/* ---- computing ---- */

static kvs_status scratch_check(const char *what, uint32_t i, const kvs_region *scratch, kvs_err *err)
{
    return scratch == NULL ? kvs_fail(err, KVS_E_INVALID, "%s: calls[%u].scratch is NULL", what, i) : KVS_OK;
}

static kvs_status build_write(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const kvs_write_args *a = args;
    wire_write_req q = {.n_tokens = a->n_tokens, .n_calls = a->n_calls};
    kvs_status s = count_check("calls", a->n_calls, err);

    r->op = WIRE_WRITE;
    r->items = a->results;
    r->n = a->n_calls;
    if (s == KVS_OK)
        s = GIVEN(err, "write", {"ns", a->ns}, {"region", a->region}, {"calls", a->calls}, {"results", a->results},
                  {"slot_mapping", given_some(a->n_tokens, a->slot_mapping)});
    if (s == KVS_OK)
        s = client_check_own(a->ns->c, err);
    if (s == KVS_OK)
        s = mark_check(a->after, a->signal, err);
    if (s == KVS_OK)
        s = stream_settle(a->region, a->after, NULL, err);
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, WIRE_WRITE,
                       WIRE_write_req_BYTES + (uint64_t)a->n_calls * WIRE_write_call_BYTES + (uint64_t)a->n_tokens * 8,
                       timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_place(k, a->ns, a->region, &q.ns, &q.region, err);
    put_mark(a->after, &q.after_counter, &q.after_value);
    put_mark(a->signal, &q.signal_counter, &q.signal_value);
    wire_put_write_req(&k->out, &q);
    for (uint32_t i = 0; i < a->n_calls && s == KVS_OK; i++) {
        const kvs_write_call *from = &a->calls[i];
        wire_write_call to = {.plane = from->plane,
                              .kv_c_offset = from->kv_c_offset,
                              .kv_c_stride = from->kv_c_stride,
                              .k_pe_offset = from->k_pe_offset,
                              .k_pe_stride = from->k_pe_stride,
                              .src_type = from->src_type,
                              .kv_scale = from->kv_scale};

        s = scratch_check("write", i, from->scratch, err);
        if (s == KVS_OK)
            s = call_region(k, from->scratch, &to.scratch, err);
        wire_put_write_call(&k->out, &to);
    }
    for (uint32_t i = 0; i < a->n_tokens; i++)
        wire_put_u64(&k->out, (uint64_t)a->slot_mapping[i]);
    return finish(k, s);
}

kvs_status kvs_write(const kvs_write_args *a, uint32_t timeout_ms, kvs_err *err)
{
    return run("write", build_write, a, timeout_ms, err);
}

kvs_status kvs_submit_write(const kvs_write_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return submit("write", build_write, a, ret, timeout_ms, err);
}

static kvs_status put_decode_call(call *k, const char *what, uint32_t i, const kvs_decode_call *from, kvs_err *err)
{
    wire_decode_call to = {.plane = from->plane,
                           .parts = from->parts,
                           .sm_scale = from->sm_scale,
                           .kv_scale = from->kv_scale,
                           .q_nope_offset = from->q_nope.offset,
                           .q_nope_token = from->q_nope.token,
                           .q_nope_head = from->q_nope.head,
                           .q_pe_offset = from->q_pe.offset,
                           .q_pe_token = from->q_pe.token,
                           .q_pe_head = from->q_pe.head,
                           .out_offset = from->out.offset,
                           .out_token = from->out.token,
                           .out_head = from->out.head,
                           .lse_offset = from->lse.offset,
                           .lse_token = from->lse.token,
                           .lse_head = from->lse.head};
    kvs_status s = scratch_check(what, i, from->scratch, err);

    if (s == KVS_OK)
        s = mark_check(from->after, from->signal, err);
    if (s == KVS_OK)
        s = call_region(k, from->scratch, &to.scratch, err);
    put_mark(from->after, &to.after_counter, &to.after_value);
    put_mark(from->signal, &to.signal_counter, &to.signal_value);
    wire_put_decode_call(&k->out, &to);
    return s;
}

/* A mark, unless one of the calls has none. */
static const kvs_mark *any_after(const kvs_decode_call *calls, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        if (calls[i].after == NULL)
            return NULL;
    return calls[0].after;
}

static void put_i32s(wire_out *o, const int32_t *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        wire_put_u32(o, (uint32_t)p[i]);
    wire_put_pad8(o);
}

static kvs_status build_decode(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const kvs_decode_args *a = args;
    uint64_t cells = (uint64_t)a->n_seqs * a->table_width;
    wire_decode_req q = {.n_seqs = a->n_seqs,
                         .table_width = a->table_width,
                         .s_q = a->s_q,
                         .h_q = a->h_q,
                         .n_calls = a->n_calls,
                         .flags = a->flags};
    kvs_status s = count_check("calls", a->n_calls, err);

    r->op = WIRE_DECODE;
    r->items = a->results;
    r->n = a->n_calls;
    if (s == KVS_OK)
        s = GIVEN(err, "decode", {"ns", a->ns}, {"region", a->region}, {"calls", a->calls}, {"results", a->results},
                  {"seq_len", given_some(a->n_seqs, a->seq_len)}, {"block_table", given_some(cells, a->block_table)});
    if (s == KVS_OK)
        s = client_check_own(a->ns->c, err);
    if (s == KVS_OK && cells > UINT32_MAX)
        s = kvs_fail(err, KVS_E_LIMIT, "block_table: %u x %u entries", a->n_seqs, a->table_width);
    if (s == KVS_OK)
        s = stream_settle(a->region, any_after(a->calls, a->n_calls), NULL, err);
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, WIRE_DECODE,
                       WIRE_decode_req_BYTES + (uint64_t)a->n_calls * WIRE_decode_call_BYTES + (uint64_t)a->n_seqs * 4 +
                           cells * 4 + 16,
                       timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_place(k, a->ns, a->region, &q.ns, &q.region, err);
    wire_put_decode_req(&k->out, &q);
    for (uint32_t i = 0; i < a->n_calls && s == KVS_OK; i++)
        s = put_decode_call(k, "decode", i, &a->calls[i], err);
    put_i32s(&k->out, a->seq_len, a->n_seqs);
    put_i32s(&k->out, a->block_table, cells);
    return finish(k, s);
}

kvs_status kvs_decode(const kvs_decode_args *a, uint32_t timeout_ms, kvs_err *err)
{
    return run("decode", build_decode, a, timeout_ms, err);
}

kvs_status kvs_submit_decode(const kvs_decode_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return submit("decode", build_decode, a, ret, timeout_ms, err);
}

static kvs_status build_extend(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const kvs_extend_args *a = args;
    uint64_t cells = (uint64_t)a->n_seqs * a->table_width;
    wire_extend_req q = {.n_seqs = a->n_seqs,
                         .table_width = a->table_width,
                         .n_tokens = a->n_tokens,
                         .h_q = a->h_q,
                         .n_calls = a->n_calls,
                         .flags = a->flags};
    kvs_status s = count_check("calls", a->n_calls, err);

    r->op = WIRE_EXTEND;
    r->items = a->results;
    r->n = a->n_calls;
    if (s == KVS_OK)
        s = GIVEN(err, "extend", {"ns", a->ns}, {"region", a->region}, {"calls", a->calls}, {"results", a->results},
                  {"q_start", a->q_start}, {"seq_len", given_some(a->n_seqs, a->seq_len)},
                  {"block_table", given_some(cells, a->block_table)});
    if (s == KVS_OK)
        s = client_check_own(a->ns->c, err);
    if (s == KVS_OK && cells > UINT32_MAX)
        s = kvs_fail(err, KVS_E_LIMIT, "block_table: %u x %u entries", a->n_seqs, a->table_width);
    if (s == KVS_OK)
        s = stream_settle(a->region, any_after(a->calls, a->n_calls), NULL, err);
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, WIRE_EXTEND,
                       WIRE_extend_req_BYTES + (uint64_t)a->n_calls * WIRE_decode_call_BYTES +
                           ((uint64_t)a->n_seqs + 1) * 8 + cells * 4 + 24,
                       timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_place(k, a->ns, a->region, &q.ns, &q.region, err);
    wire_put_extend_req(&k->out, &q);
    for (uint32_t i = 0; i < a->n_calls && s == KVS_OK; i++)
        s = put_decode_call(k, "extend", i, &a->calls[i], err);
    put_i32s(&k->out, a->q_start, (uint64_t)a->n_seqs + 1);
    put_i32s(&k->out, a->seq_len, a->n_seqs);
    put_i32s(&k->out, a->block_table, cells);
    return finish(k, s);
}

kvs_status kvs_extend(const kvs_extend_args *a, uint32_t timeout_ms, kvs_err *err)
{
    return run("extend", build_extend, a, timeout_ms, err);
}

kvs_status kvs_submit_extend(const kvs_extend_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return submit("extend", build_extend, a, ret, timeout_ms, err);
}

/* ---- residency ---- */

typedef struct keys_args {
    const char *what;
    uint16_t op;
    kvs_ns *ns;
    const uint8_t *keys;
    uint32_t n;
    kvs_status *results;
} keys_args;

static kvs_status build_keys(call *k, kvs_request *r, const void *args, uint32_t timeout_ms, kvs_err *err)
{
    const keys_args *a = args;
    wire_keys_req q = {.n = a->n};
    kvs_status s = count_check("keys", a->n, err);

    r->op = a->op;
    r->items = a->results;
    r->n = a->n;
    if (s == KVS_OK)
        s = GIVEN(err, a->what, {"ns", a->ns}, {"keys", a->keys});
    if (s == KVS_OK)
        s = call_begin(k, a->ns->c, r, a->op, WIRE_keys_req_BYTES + (uint64_t)a->n * WIRE_KEY_BYTES, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    s = call_ns(k, a->ns, &q.ns, err);
    wire_put_keys_req(&k->out, &q);
    put_keys(&k->out, a->keys, a->n);
    return finish(k, s);
}

kvs_status kvs_pin(kvs_ns *ns, const uint8_t *keys, uint32_t n, kvs_status *results, uint32_t timeout_ms, kvs_err *err)
{
    keys_args a = {"pin", WIRE_PIN, ns, keys, n, results};

    return run(a.what, build_keys, &a, timeout_ms, err);
}

kvs_status kvs_unpin(kvs_ns *ns, const uint8_t *keys, uint32_t n, kvs_status *results, uint32_t timeout_ms,
                     kvs_err *err)
{
    keys_args a = {"unpin", WIRE_UNPIN, ns, keys, n, results};

    return run(a.what, build_keys, &a, timeout_ms, err);
}

kvs_status kvs_drop(kvs_ns *ns, const uint8_t *keys, uint32_t n, kvs_status *results, uint32_t timeout_ms, kvs_err *err)
{
    keys_args a = {"drop", WIRE_DROP, ns, keys, n, results};

    return run(a.what, build_keys, &a, timeout_ms, err);
}

kvs_status kvs_reset(kvs_client *c, kvs_ns *ns, uint32_t flags, kvs_reset_result *ret, uint32_t timeout_ms,
                     kvs_err *err)
{
    kvs_request r = {.ret = ret};
    wire_reset_req q = {.ns = WIRE_NONE32, .flags = flags};
    call k;
    kvs_status s = GIVEN(err, "reset", {"c", c});

    if (s == KVS_OK)
        s = call_begin(&k, c, &r, WIRE_RESET, WIRE_reset_req_BYTES, timeout_ms, err);
    if (s == KVS_OK && ns != NULL)
        s = call_ns(&k, ns, &q.ns, err);
    if (s != KVS_OK)
        return s;
    wire_put_reset_req(&k.out, &q);
    return call_run(&k, err);
}

/* ---- watching ---- */

/* Ask for a text that is the whole answer. */
static kvs_status run_text(call *k, char *const *text, const size_t *len, char **ret, size_t *ret_len, kvs_err *err)
{
    kvs_status s = call_run(k, err);

    if (s != KVS_OK)
        return s;
    *ret = *text;
    if (ret_len != NULL)
        *ret_len = *len;
    return KVS_OK;
}

kvs_status kvs_report_alloc(kvs_client *c, const kvs_report_args *a, char **ret, size_t *ret_len, uint32_t timeout_ms,
                            kvs_err *err)
{
    wire_status_req q;
    char *text = NULL;
    size_t len = 0;
    kvs_request r = {.ret = &text, .items = &len};
    call k;
    kvs_status s = GIVEN(err, "report", {"c", c}, {"a", a}, {"ret", ret});

    if (s == KVS_OK)
        s = call_begin(&k, c, &r, WIRE_STATUS, WIRE_status_req_BYTES, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    q = (wire_status_req){.section = a->section, .limit = a->limit, .ns = a->ns, .cursor = a->cursor};
    wire_put_status_req(&k.out, &q);
    return run_text(&k, &text, &len, ret, ret_len, err);
}

kvs_status kvs_reload_alloc(kvs_client *c, bool dry_run, char **ret, size_t *ret_len, uint32_t timeout_ms, kvs_err *err)
{
    wire_reload_req q = {.flags = dry_run ? WIRE_RELOAD_DRY_RUN : 0};
    char *text = NULL;
    size_t len = 0;
    kvs_request r = {.ret = &text, .items = &len};
    call k;
    kvs_status s = GIVEN(err, "reload", {"c", c}, {"ret", ret});

    if (s == KVS_OK)
        s = call_begin(&k, c, &r, WIRE_RELOAD, WIRE_reload_req_BYTES, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    k.control = true;
    wire_put_reload_req(&k.out, &q);
    return run_text(&k, &text, &len, ret, ret_len, err);
}

kvs_status kvs_drain(kvs_client *c, bool on, uint32_t timeout_ms, kvs_err *err)
{
    wire_drain_req q = {.on = on};
    kvs_request r = {0};
    call k;
    kvs_status s = GIVEN(err, "drain", {"c", c});

    if (s == KVS_OK)
        s = call_begin(&k, c, &r, WIRE_DRAIN, WIRE_drain_req_BYTES, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    k.control = true;
    wire_put_drain_req(&k.out, &q);
    return call_run(&k, err);
}

kvs_status kvs_report(kvs_client *c, const kvs_report_args *a, char *buf, size_t cap, size_t *ret_len,
                      uint32_t timeout_ms, kvs_err *err)
{
    char *text;
    size_t len;
    kvs_status s = GIVEN(err, "report", {"buf", given_some(cap, buf)});

    if (s == KVS_OK)
        s = kvs_report_alloc(c, a, &text, &len, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    if (ret_len != NULL)
        *ret_len = len;
    if (len + 1 > cap)
        s = kvs_fail(err, KVS_E_LIMIT, "report: %zu bytes with the zero are more than the buffer's %zu", len + 1, cap);
    else
        memcpy(buf, text, len + 1);
    free(text);
    return s;
}

kvs_status kvs_watch(kvs_client *c, uint32_t mask, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request r = {.args = &mask};
    wire_watch_req q = {.mask = mask};
    kvs_event *room;
    call k;
    kvs_status s = GIVEN(err, "watch", {"c", c});

    if (s != KVS_OK)
        return s;
    room = calloc(CLIENT_EVENTS, sizeof *room);
    if (room == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "events: no memory");
    s = call_begin(&k, c, &r, WIRE_WATCH, WIRE_watch_req_BYTES, timeout_ms, err);
    if (s != KVS_OK) {
        free(room);
        return s;
    }
    (void)pthread_mutex_lock(&c->mu);
    if (c->events == NULL) { /* before the first event can come */
        c->events = room;
        room = NULL;
    }
    (void)pthread_mutex_unlock(&c->mu);
    free(room);
    wire_put_watch_req(&k.out, &q);
    return call_run(&k, err);
}

kvs_status kvs_events(kvs_client *c, kvs_event *ret, uint32_t cap, uint32_t *ret_n, uint64_t *ret_lost,
                      uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = GIVEN(err, "events", {"c", c}, {"ret", given_some(cap, ret)}, {"ret_n", ret_n});
    int64_t deadline;
    uint32_t n = 0;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    (void)pthread_mutex_lock(&c->mu);
    while (c->events_n == 0 && client_turn(c, NULL, deadline))
        ;
    for (; n < cap && c->events_n > 0; n++) {
        ret[n] = c->events[c->events_first];
        c->events_first = (c->events_first + 1) % CLIENT_EVENTS;
        c->events_n--;
    }
    *ret_n = n;
    if (ret_lost != NULL)
        *ret_lost = c->events_lost;
    c->events_lost = 0;
    if (n == 0)
        s = kvs_fail(err, KVS_E_DEADLINE, "no event in time");
    client_leave(c);
    return s;
}
