#include "daemon/core.h"

#include <inttypes.h>
#include <string.h>

/* STORE: device slots into host blocks, after a counter; published by the loop when the bytes are there. */

typedef struct store_item {
    kvs_status status;
    uint32_t slot, gen;
    bool copies; /* part of the job; host is in state writing */
    pool_slot host;
} store_item;

typedef struct store {
    mover_job job; /* first */
    request *request;
    region_seat *seat; /* until it is settled: then it may be closed while the job is on its way back */
    mover *mover;      /* of the region's device */
    uint32_t ns, n, first_depth;
    bool keep, settled, suspect;
    bool refilled; /* it waits for no job of ours: what is in the slots is what the client put there */
    uint8_t *keys; /* [n][32] */
    store_item *items;
    uint32_t *of;       /* [job.n_items] */
    kvs_status *status; /* [n], while it is admitted; and the slots */
    pool_slot *host;
} store;

/* ---- the end of a job ---- */

/* The block becomes visible, or its slot goes back. */
static kvs_status publish(store *x, store_item *it, const mover_item *m, bool started)
{
    core *c = x->request->peer->core;

    if (c->lost != KVS_OK) { /* nobody knows what the device still does: never reused */
        if (!x->suspect)
            directory_suspect(c->dir, it->host);
        return c->lost;
    }
    if (x->suspect) {
        directory_settle(c->dir, it->host);
        return m->status == KVS_OK ? KVS_E_CANCELLED : m->status;
    }
    if (m->status == KVS_OK && !x->seat->region->use[it->slot].bad && started)
        return directory_commit(c->dir, it->host, m->checksum);
    directory_abort(c->dir, it->host);
    return m->status == KVS_OK ? KVS_E_STATE : m->status;
}

static bool is_stored(kvs_status s)
{
    return s == KVS_OK || s == KVS_E_EXISTS;
}

/* Only a key that can be found now: a RESET may have taken one away that was there at admission.  And no slot that is about to
 * have other bytes: its client has not waited for them. */
static void keep(store *x, uint32_t i)
{
    core *c = x->request->peer->core;
    const store_item *it = &x->items[i];
    const region_use *use = &x->seat->region->use[it->slot];
    const uint8_t *key = x->keys + (size_t)i * WIRE_KEY_BYTES;

    if (!is_stored(it->status) || use->bad || use->loading || use->writes > 0)
        return;
    if (directory_state(c->dir, x->ns, key) == WIRE_KEY_READY)
        (void)region_share(x->seat, it->slot, key, x->first_depth + i);
}

/* Once: when the job was dropped, or when it is back. */
static void settle(store *x, bool started)
{
    core *c = x->request->peer->core;
    region *g;

    if (x->settled)
        return;
    x->settled = true;
    g = x->seat->region;
    for (uint32_t k = 0; k < x->job.n_items; k++)
        core_note_status(c, x->job.items[k].status);
    for (uint32_t k = 0; k < x->job.n_items; k++) {
        store_item *it = &x->items[x->of[k]];

        it->status = publish(x, it, &x->job.items[k], started);
    }
    for (uint32_t i = 0; i < x->n; i++) {
        g->use[x->items[i].slot].stores--;
        if (x->keep && started && c->lost == KVS_OK && !x->request->answered)
            keep(x, i);
        region_rest(g, x->items[i].slot);
    }
    x->seat->users--;
    x->seat = NULL;
    c->step_due = true;
}

static bool store_stop(request *r, bool running)
{
    store *x = r->ext;
    bool dropped = mover_drop(x->mover, &x->job);

    if (dropped)
        settle(x, false);
    else if (running)
        atomic_store(&x->job.job.stop, true);
    mover_kick(x->mover);
    return dropped;
}

static void put_items(const store *x, wire_out *o)
{
    wire_key_rep rep = {.n = x->n};

    o->len = WIRE_key_rep_BYTES;
    for (uint32_t i = 0; i < x->n; i++) {
        rep.n_ok += is_stored(x->items[i].status);
        wire_put_u32(o, x->items[i].status);
    }
    wire_put_pad8(o);
    wire_put_key_rep(&(wire_out){o->base, 0, WIRE_key_rep_BYTES, false}, &rep);
}

static void store_overdue(request *r, bool untouched)
{
    store *x = r->ext;

    for (uint32_t i = 0; i < x->n; i++) {
        store_item *it = &x->items[i];

        if (it->copies && !untouched)
            directory_suspect(r->peer->core->dir, it->host);
        if (it->copies)
            it->status = untouched ? KVS_E_DEADLINE : KVS_E_BUSY;
    }
    x->suspect = !untouched;
    if (untouched)
        job_signal(&x->job.job, KVS_E_DEADLINE);
    put_items(x, request_out(r));
}

static const request_ops store_ops = {store_stop, store_overdue};

static void store_done(work *w)
{
    store *x = (store *)(void *)w;
    request *r = x->request;
    core *c = r->peer->core;
    job *j = &x->job.job;
    kvs_status s = j->status;
    uint32_t n_ok = 0;

    core_note_status(c, s);
    settle(x, true);
    for (uint32_t i = 0; i < x->n; i++)
        n_ok += is_stored(x->items[i].status);
    if (c->lost != KVS_OK)
        s = c->lost;
    else if (s != KVS_E_CANCELLED)
        s = n_ok == x->n ? KVS_OK : KVS_E_PARTIAL;
    r->outcome = s;
    job_signal(j, r->answered ? KVS_E_DEADLINE : s);
    if (!r->answered) {
        put_items(x, request_out(r));
        request_answer(r, s, &j->err);
    }
    request_end(r);
    core_rest(c);
}

/* ---- admission ---- */

static kvs_status check_store(peer *p, const wire_store_req *q, const directory_ns **ns, region_seat **seat,
                              kvs_err *err)
{
    static const uint8_t no_parent[WIRE_KEY_BYTES];
    kvs_status s = counter_check_after(q->after_counter, q->after_value, err);

    if (s == KVS_OK)
        s = counter_check_signal(q->signal_counter, q->signal_value, err);
    if (s == KVS_OK && q->reserved != 0)
        s = kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", q->reserved);
    if (s == KVS_OK && (q->flags & ~(uint32_t)WIRE_STORE_KEEP) != 0)
        s = kvs_fail(err, KVS_E_INVALID, "flags: 0x%x has unknown bits, known are 0x%x", q->flags, WIRE_STORE_KEEP);
    if (s == KVS_OK && q->n > core_max_keys(p->core))
        s = kvs_fail(err, KVS_E_LIMIT, "n: %u is above %u", q->n, core_max_keys(p->core));
    if (s == KVS_OK && q->first_depth > INT32_MAX)
        s = kvs_fail(err, KVS_E_RANGE, "first_depth: %u is above %d", q->first_depth, INT32_MAX);
    if (s == KVS_OK && q->first_depth == 0 && memcmp(q->parent, no_parent, sizeof(no_parent)) != 0)
        s = kvs_fail(err, KVS_E_INVALID, "parent: is not zeros, but first_depth is 0");
    if (s == KVS_OK)
        s = peer_ns(p, q->ns, ns, err);
    if (s == KVS_OK)
        s = peer_slots(p, q->region, q->ns, seat, err);
    if (s == KVS_OK && (q->flags & WIRE_STORE_KEEP) && (*seat)->region->imported)
        s = kvs_fail(err, KVS_E_INVALID, "flags: region %u is the engine's own and keeps no blocks", q->region);
    return s;
}

static kvs_status read_slots(store *x, const uint8_t *refs, kvs_err *err)
{
    for (uint32_t i = 0; i < x->n; i++) {
        store_item *it = &x->items[i];
        kvs_status s;

        it->slot = wire_at_u32(refs, 2 * (size_t)i);
        it->gen = wire_at_u32(refs, 2 * (size_t)i + 1);
        s = region_may_store(x->seat, it->slot, it->gen, x->refilled);
        if (s != KVS_OK)
            return kvs_fail(err, s, "slot[%u]: %u (generation %u) of %u slots: %s", i, it->slot, it->gen,
                            x->seat->region->n_slots, kvs_status_text(s));
    }
    return KVS_OK;
}

static kvs_status make_store(request *r, const wire_store_req *q, region_seat *seat, const uint8_t *keys, store **ret,
                             kvs_err *err)
{
    store *x = request_alloc(r, 1, sizeof(*x));

    if (!x)
        return kvs_fail(err, KVS_E_NO_MEMORY, "store: out of memory");
    x->request = r;
    x->seat = seat;
    x->mover = core_device_of(r->peer->core, seat->region)->store;
    x->ns = q->ns;
    x->n = q->n;
    x->first_depth = q->first_depth;
    x->keep = (q->flags & WIRE_STORE_KEEP) != 0;
    x->refilled = q->after_counter == WIRE_NONE32 || !(q->after_counter & WIRE_COUNTER_DAEMON);
    x->keys = request_alloc(r, (uint64_t)q->n + 1, WIRE_KEY_BYTES);
    x->items = request_alloc(r, (uint64_t)q->n + 1, sizeof(x->items[0]));
    x->of = request_alloc(r, (uint64_t)q->n + 1, sizeof(x->of[0]));
    x->job.items = request_alloc(r, (uint64_t)q->n + 1, sizeof(x->job.items[0]));
    x->status = request_alloc(r, (uint64_t)q->n + 1, sizeof(x->status[0]));
    x->host = request_alloc(r, (uint64_t)q->n + 1, sizeof(x->host[0]));
    if (!x->keys || !x->items || !x->of || !x->job.items || !x->status || !x->host)
        return kvs_fail(err, KVS_E_NO_MEMORY, "store of %u blocks: out of memory", q->n);
    if (q->n > 0)
        memcpy(x->keys, keys, (size_t)q->n * WIRE_KEY_BYTES);
    r->ext = x;
    *ret = x;
    return request_room(r, WIRE_key_rep_BYTES + (uint64_t)q->n * 4, err);
}

/* Key i was admitted, or not. */
static void add_item(store *x, uint32_t i)
{
    core *c = x->request->peer->core;
    store_item *it = &x->items[i];
    region_use *use = &x->seat->region->use[it->slot];
    uint32_t k;

    it->status = x->status[i];
    it->copies = it->status == KVS_OK;
    it->host = it->copies ? x->host[i] : POOL_NONE;
    use->stores++;
    if (x->refilled && !use->loading)
        use->bad = false;
    if (!it->copies)
        return;
    k = x->job.n_items++;
    x->of[k] = i;
    x->job.items[k] = (mover_item){.host = pool_address(c->pool, it->host),
                                   .slot = it->slot,
                                   .run = pool_extent_of(c->pool, it->host) + 1}; /* it lies in one piece */
}

/* The first blocks are on their way while we look at the others. */
static void admit(store *x, const wire_store_req *q)
{
    core *c = x->request->peer->core;

    job_init(&x->job.job, store_done);
    job_fill(&x->job.job, x->request->peer, q->after_counter, q->after_value, q->signal_counter, q->signal_value);
    x->job.map = x->seat->region->map;
    x->job.imported = x->seat->region->imported;
    x->job.checksum = c->config->pool_checksum;
    x->seat->users++;
    directory_admit_begin(c->dir, q->ns, q->first_depth, q->parent, x->keys, x->n, x->status, x->host);
    mover_begin(x->mover, &x->job, x->n);
    for (uint32_t at = 0, n; at < x->n; at += n) {
        n = mover_part(&x->job, x->n - at);
        directory_admit_next(c->dir, n);
        for (uint32_t i = at; i < at + n; i++)
            add_item(x, i);
        mover_add(x->mover, &x->job);
    }
    directory_admit_end(c->dir);
    c->step_due = true;
    mover_complete(x->mover, &x->job);
}

kvs_status op_store(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns = NULL;
    region_seat *seat = NULL;
    const uint8_t *keys, *refs;
    wire_store_req q;
    store *x = NULL;
    kvs_status s;

    wire_get_store_req(in, &q);
    keys = wire_get_array(in, q.n, WIRE_KEY_BYTES);
    refs = wire_get_array(in, q.n, WIRE_slot_ref_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_store(r->peer, &q, &ns, &seat, err);
    if (s == KVS_OK)
        mover_expect(core_device_of(r->peer->core, seat->region)->store); /* it wakes up while we look at keys */
    if (s == KVS_OK)
        s = request_charge(r, (uint64_t)q.n * ns->slot_bytes, err);
    if (s == KVS_OK)
        s = make_store(r, &q, seat, keys, &x, err);
    if (s == KVS_OK)
        s = read_slots(x, refs, err);
    if (s == KVS_OK)
        s = request_go(r, &store_ops, err);
    if (s != KVS_OK)
        return s;
    admit(x, &q);
    return KVS_OK;
}

void refused_store(peer *p, wire_in *in, kvs_status s)
{
    wire_store_req q;

    wire_get_store_req(in, &q);
    counter_signal(p, q.signal_counter, q.signal_value, s);
}
