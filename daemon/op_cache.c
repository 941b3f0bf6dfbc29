#include "daemon/core.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/log.h"

/* Keys and blocks: LOOKUP, RESERVE, RELEASE, LOAD, STORE, PIN, UNPIN, DROP, RESET. */

static kvs_status check_n_keys(const core *c, uint32_t n, kvs_err *err)
{
    if (n > core_max_keys(c))
        return kvs_fail(err, KVS_E_LIMIT, "n_keys: %u is above %u", n, core_max_keys(c));
    return KVS_OK;
}

/* ---- finding and leasing ---- */

kvs_status op_lookup(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns;
    wire_lookup_req q;
    wire_lookup_rep rep = {0};
    wire_out *o = request_out(r);
    const uint8_t *keys;
    uint8_t *states;
    kvs_status s;

    wire_get_lookup_req(in, &q);
    keys = wire_get_array(in, q.n_keys, WIRE_KEY_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_n_keys(r->peer->core, q.n_keys, err);
    if (s == KVS_OK)
        s = peer_ns(r->peer, q.ns, &ns, err);
    if (s == KVS_OK)
        s = request_room(r, WIRE_lookup_rep_BYTES + (uint64_t)q.n_keys, err);
    if (s != KVS_OK)
        return s;
    states = o->base + WIRE_lookup_rep_BYTES;
    memset(states, 0, q.n_keys);
    rep.n_keys = q.n_keys;
    r->peer->core->counts.lookup_keys += q.n_keys;
    rep.n_hits = directory_lookup(r->peer->core->dir, q.ns, keys, q.n_keys, states);
    wire_put_lookup_rep(o, &rep);
    o->len += q.n_keys; /* they were written in place */
    wire_put_pad8(o);
    return KVS_OK;
}

static kvs_status check_group(const peer *p, const uint8_t *list, uint32_t n, uint32_t *ret, kvs_err *err)
{
    for (uint32_t i = 0; i < n; i++) {
        const directory_ns *ns;
        kvs_status s;

        ret[i] = wire_at_u32(list, i);
        s = peer_ns(p, ret[i], &ns, err);
        if (s != KVS_OK)
            return s;
        for (uint32_t k = 0; k < i; k++)
            if (ret[k] == ret[i])
                return kvs_fail(err, KVS_E_INVALID, "ns[%u]: %u is named twice", i, ret[i]);
    }
    return KVS_OK;
}

static kvs_status check_reserve(const core *c, const wire_reserve_req *q, kvs_err *err)
{
    if (q->n_ns < 1 || q->n_ns > CORE_MAX_GROUP)
        return kvs_fail(err, KVS_E_LIMIT, "n_ns: %u is outside 1..%d", q->n_ns, CORE_MAX_GROUP);
    if (q->max_loads < 1)
        return kvs_fail(err, KVS_E_INVALID, "max_loads: 0 is below 1");
    return check_n_keys(c, q->n_keys, err);
}

static uint32_t cut_ttl(const core *c, uint32_t asked)
{
    uint32_t most = (uint32_t)c->config->lease_max_ms;

    return asked == 0 || asked > most ? most : asked;
}

kvs_status op_reserve(request *r, wire_in *in, kvs_err *err)
{
    peer *p = r->peer;
    core *c = p->core;
    uint32_t ns[CORE_MAX_GROUP];
    const uint8_t *list, *keys;
    directory_lease lease = {0};
    wire_reserve_req q;
    wire_reserve_rep rep = {0};
    pool_bytes bytes;
    kvs_status s;

    wire_get_reserve_req(in, &q);
    list = wire_get_array(in, q.n_ns, 4);
    keys = wire_get_array(in, q.n_keys, WIRE_KEY_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_reserve(c, &q, err);
    if (s == KVS_OK)
        s = check_group(p, list, q.n_ns, ns, err);
    if (s != KVS_OK)
        return s;
    pool_get_bytes(c->pool, &bytes);
    q.ttl_ms = cut_ttl(c, q.ttl_ms);
    s = directory_reserve(c->dir, p->tenant, p->conn_id, ns, q.n_ns, keys, q.n_keys, q.max_loads, q.ttl_ms, c->now_us,
                          tenant_lease_bytes(c->config, p->tenant, bytes.max), &lease, err);
    if (s != KVS_OK)
        return s;
    if (lease.n_leased > 0 && c->now_us + (uint64_t)lease.ttl_ms * 1000 < c->lease_due_us)
        c->lease_due_us = c->now_us + (uint64_t)lease.ttl_ms * 1000;
    memcpy(rep.lease, lease.id, sizeof(rep.lease));
    rep.n_leased = lease.n_leased;
    rep.ttl_ms = lease.n_leased > 0 ? lease.ttl_ms : 0;
    rep.bytes = lease.bytes;
    wire_put_reserve_rep(request_out(r), &rep);
    return KVS_OK;
}

kvs_status op_release(request *r, wire_in *in, kvs_err *err)
{
    wire_release_req q;
    kvs_status s;

    wire_get_release_req(in, &q);
    s = request_parsed(in, err);
    if (s != KVS_OK)
        return s;
    return directory_release(r->peer->core->dir, r->peer->tenant, q.lease, err);
}

/* ---- residency ---- */

/* What the operator takes out by hand is missed later, and then somebody asks the log.  Clients do it as part of their work. */
static enum log_level level_of(const request *r)
{
    return r->peer->info.is_admin ? LOG_LEVEL_INFO : LOG_LEVEL_DEBUG;
}

static const char *ns_word(char *buf, size_t cap, uint32_t ns)
{
    if (ns == WIRE_NONE32)
        return "all";
    (void)snprintf(buf, cap, "%" PRIu32, ns);
    return buf;
}

/* A request of keys: checked, and with room for the reply.  *ret_results: [q.n], the request's. */
static kvs_status take_keys(request *r, wire_in *in, wire_keys_req *q, const uint8_t **ret_keys,
                            kvs_status **ret_results, kvs_err *err)
{
    const directory_ns *ns;
    kvs_status s;

    wire_get_keys_req(in, q);
    *ret_keys = wire_get_array(in, q->n, WIRE_KEY_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_n_keys(r->peer->core, q->n, err);
    if (s == KVS_OK)
        s = peer_ns(r->peer, q->ns, &ns, err);
    if (s == KVS_OK)
        s = request_room(r, WIRE_key_rep_BYTES + (uint64_t)q->n * 4, err);
    if (s != KVS_OK)
        return s;
    *ret_results = request_alloc(r, q->n, sizeof(**ret_results));
    return *ret_results ? KVS_OK : kvs_fail(err, KVS_E_NO_MEMORY, "keys: out of memory");
}

static kvs_status put_results(request *r, const char *event, uint32_t ns, uint32_t n, const kvs_status *results)
{
    wire_key_rep rep = {.n = n};
    wire_out *o = request_out(r);

    for (uint32_t i = 0; i < n; i++)
        rep.n_ok += results[i] == KVS_OK;
    wire_put_key_rep(o, &rep);
    for (uint32_t i = 0; i < n; i++)
        wire_put_u32(o, results[i]);
    wire_put_pad8(o);
    r->peer->core->step_due = true;
    log_event(level_of(r), event, " ns=%" PRIu32 " keys=%u done=%u conn=%" PRIu64 " uid=%u pid=%d", ns, rep.n, rep.n_ok,
              r->peer->conn_id, (unsigned)r->peer->info.uid, (int)r->peer->info.pid);
    return rep.n_ok == n ? KVS_OK : KVS_E_PARTIAL;
}

static kvs_status each_key(request *r, wire_in *in, kvs_err *err, const char *event,
                           kvs_status (*f)(directory *d, uint32_t ns, const uint8_t key[32]))
{
    wire_keys_req q;
    const uint8_t *keys;
    kvs_status *results;
    kvs_status s = take_keys(r, in, &q, &keys, &results, err);

    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < q.n; i++)
        results[i] = f(r->peer->core->dir, q.ns, keys + (size_t)i * WIRE_KEY_BYTES);
    return put_results(r, event, q.ns, q.n, results);
}

kvs_status op_pin(request *r, wire_in *in, kvs_err *err)
{
    return each_key(r, in, err, "pin", directory_pin);
}

kvs_status op_unpin(request *r, wire_in *in, kvs_err *err)
{
    return each_key(r, in, err, "unpin", directory_unpin);
}

static void log_reset(const request *r, const sweep *w, const char *event)
{
    const directory_reset_result *x = &w->keys.sum;
    char word[16];

    log_event(level_of(r), event,
              " ns=%s dropped=%" PRIu64 " aborted=%" PRIu64 " kept=%" PRIu64 " leases=%" PRIu64 " conn=%" PRIu64
              " uid=%u pid=%d",
              ns_word(word, sizeof word, w->keys.ns), x->dropped, x->aborted, x->kept, x->leases, r->peer->conn_id,
              (unsigned)r->peer->info.uid, (int)r->peer->info.pid);
}

static void on_reset(core *c, sweep *w)
{
    request *r = w->ud;
    const directory_reset_result *x = &w->keys.sum;
    kvs_err err = {0};

    (void)c;
    log_reset(r, w, w->stopped ? "reset_stopped" : "reset");
    if (w->stopped) {
        r->outcome = kvs_fail(&err, KVS_E_CANCELLED, "reset: stopped %s",
                              w->begun ? "in the middle, some of the blocks are gone" : "before any block was gone");
    } else {
        wire_put_reset_rep(request_out(r), &(wire_reset_rep){x->dropped, x->aborted, x->kept, x->leases});
        /* What was kept is still served: "done" would be a lie. */
        r->outcome = x->kept == 0 ? KVS_OK : KVS_E_PARTIAL;
    }
    if (!r->answered) /* by its deadline, which stopped it */
        request_answer(r, r->outcome, &err);
    request_end(r);
}

/* It is the next step that ends it: who calls still looks at the request. */
static bool sweep_stop(request *r, bool running)
{
    sweep *w = r->ext;

    w->stopped = w->stopped || running || !w->begun;
    return !w->begun;
}

static void nothing_known(request *r, bool untouched)
{
    (void)r;
    (void)untouched;
}

static const request_ops sweep_ops = {sweep_stop, nothing_known};

kvs_status op_reset(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns;
    wire_reset_req q;
    sweep *w;
    kvs_status s;

    wire_get_reset_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK && (q.flags & ~(uint32_t)WIRE_RESET_PINNED) != 0)
        s = kvs_fail(err, KVS_E_INVALID, "flags: 0x%x has unknown bits, known are 0x%x", q.flags, WIRE_RESET_PINNED);
    if (s == KVS_OK && q.ns != WIRE_NONE32)
        s = peer_ns(r->peer, q.ns, &ns, err);
    if (s != KVS_OK)
        return s;
    w = request_alloc(r, 1, sizeof(*w));
    if (!w)
        return kvs_fail(err, KVS_E_NO_MEMORY, "reset: out of memory");
    s = request_go(r, &sweep_ops, err);
    if (s != KVS_OK)
        return s;
    r->ext = w;
    *w = (sweep){.keys = {.tenant = r->peer->tenant, .ns = q.ns, .pinned_too = (q.flags & WIRE_RESET_PINNED) != 0},
                 .on_end = on_reset,
                 .ud = r};
    core_sweep(r->peer->core, w);
    return KVS_OK;
}

/* ---- drop ---- */

static void on_dropped(core *c, sweep *w)
{
    request *r = w->ud;
    kvs_err err = {0};

    (void)c;
    if (w->stopped) {
        log_event(level_of(r), "drop_stopped", " ns=%" PRIu32 " keys=%u conn=%" PRIu64 " uid=%u pid=%d", w->keys.ns,
                  w->n_named, r->peer->conn_id, (unsigned)r->peer->info.uid, (int)r->peer->info.pid);
        r->outcome =
            kvs_fail(&err, KVS_E_CANCELLED, "drop: stopped in the middle, devices may still hold some of the blocks");
    } else {
        r->outcome = put_results(r, "drop", w->keys.ns, w->n_named, w->results);
    }
    if (!r->answered) /* by its deadline, which stopped it */
        request_answer(r, r->outcome, &err);
    request_end(r);
}

/* Searches that a DROP of n keys takes in regions. */
static uint64_t n_searches(const core *c, uint32_t ns, uint32_t n)
{
    uint64_t all = 0;

    for (const region *g = c->regions; g; g = g->next)
        all += g->ns == ns && g->n_keys > 0 ? n : 0;
    return all;
}

static kvs_status drop_later(request *r, sweep *w, kvs_err *err)
{
    uint8_t *keys = request_alloc(r, w->n_named, WIRE_KEY_BYTES);

    if (!keys)
        return kvs_fail(err, KVS_E_NO_MEMORY, "drop: out of memory");
    memcpy(keys, w->named, (size_t)w->n_named * WIRE_KEY_BYTES);
    w->named = keys;
    r->ext = w;
    return request_go(r, &sweep_ops, err);
}

/* From host memory at once; from regions later where that is many searches. */
kvs_status op_drop(request *r, wire_in *in, kvs_err *err)
{
    core *c = r->peer->core;
    wire_keys_req q;
    const uint8_t *keys;
    kvs_status *results;
    kvs_status s = take_keys(r, in, &q, &keys, &results, err);
    bool later;
    sweep *w;

    if (s != KVS_OK)
        return s;
    w = request_alloc(r, 1, sizeof(*w));
    if (!w)
        return kvs_fail(err, KVS_E_NO_MEMORY, "drop: out of memory");
    *w = (sweep){.keys = {.tenant = r->peer->tenant, .ns = q.ns},
                 .named = keys,
                 .results = results,
                 .n_named = q.n,
                 .region = c->regions,
                 .begun = true,
                 .on_end = on_dropped,
                 .ud = r};
    later = n_searches(c, q.ns, q.n) > SWEEP_STEP;
    if (later)
        s = drop_later(r, w, err);
    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < q.n; i++)
        results[i] = directory_drop(c->dir, q.ns, w->named + (size_t)i * WIRE_KEY_BYTES);
    if (later) {
        core_sweep(c, w);
        return KVS_OK;
    }
    core_sweep_regions(c, w);
    return put_results(r, "drop", q.ns, q.n, results);
}
