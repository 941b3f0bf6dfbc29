#include "daemon/load.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/log.h"

/* LOAD: host blocks into device slots, after a counter.
 *
 * Each item goes one of three ways: refused on its own (status), answered from the device (the key is
 * attached to a slot of that region: a hold, no copy), or copied.  Copied ones are items of one mover job;
 * `of` leads back to the item. */

static const uint8_t *key_of(const load *l, uint32_t i)
{
    return l->keys + (size_t)i * WIRE_KEY_BYTES;
}

/* ---- the end of a job ---- */

/* A block that cannot be loaded would be found and tried again for ever.  If it was dropped meanwhile its key may be that of
 * another one. */
static void forget_block(const load *l, uint32_t i)
{
    core *c = l->request->peer->core;
    directory *d = c->dir;

    if (pool_row_of(c->pool, l->items[i].host)->state != POOL_READY)
        return;
    if (directory_drop(d, l->ns, key_of(l, i)) == KVS_E_BUSY) {
        (void)directory_unpin(d, l->ns, key_of(l, i));
        (void)directory_drop(d, l->ns, key_of(l, i));
    }
    c->counts.lost_blocks++;
    log_event(LOG_LEVEL_WARN, "block_lost", " ns=%u reason=%s", l->ns, kvs_status_name(l->items[i].status));
}

/* The slot that the daemon took gets its key; if another load was faster, its slot is given instead. */
static void share_chosen(load *l, load_item *it, const uint8_t *key)
{
    const pool_row *row = pool_row_of(l->request->peer->core->pool, it->host);
    region *g = l->seat->region;
    uint32_t other;

    if (row->state != POOL_READY) { /* a RESET or DROP came while it was copied */
        region_share_orphan(l->seat, it->slot, key, row->depth);
    } else if (!region_share(l->seat, it->slot, key, row->depth)) {
        other = region_find(g, key);
        (void)region_drop(l->seat, it->slot, g->slots[it->slot].gen);
        it->slot = other;
        it->flags |= WIRE_LOADED_NO_COPY; /* though one was made */
        region_hold(l->seat, other);
    }
    it->gen = g->slots[it->slot].gen;
    it->flags |= WIRE_LOADED_SHARED;
}

static void rest_slot(load *l, uint32_t i, bool wanted)
{
    load_item *it = &l->items[i];
    region *g = l->seat->region;
    uint32_t used = it->slot;

    if (it->chosen)
        region_named(g, used);
    g->use[used].loading = false;
    /* Also when nothing was copied: what is in the slot is not the block that a STORE behind this LOAD means. */
    g->use[used].bad = it->status != KVS_OK;
    if (it->chosen && it->status == KVS_OK && wanted)
        share_chosen(l, it, key_of(l, i));
    else if (it->chosen)
        (void)region_drop(l->seat, used, g->slots[used].gen);
    region_rest(g, used);
}

static void rest_host(load *l, load_item *it)
{
    core *c = l->request->peer->core;

    if (!it->has_host)
        return;
    it->has_host = false;
    if (l->suspect)
        directory_settle(c->dir, it->host);
    else
        directory_unhold(c->dir, it->host);
}

/* Give back what the job used.  Once: when it was dropped, or when it is back. */
static void settle(load *l, bool wanted)
{
    core *c = l->request->peer->core;

    if (l->settled)
        return;
    l->settled = true;
    for (uint32_t k = 0; k < l->job.n_items; k++) {
        load_item *it = &l->items[l->of[k]];

        it->status = l->job.items[k].status;
        core_note_status(c, it->status);
        rest_slot(l, l->of[k], wanted && c->lost == KVS_OK);
        if (it->status == KVS_E_CORRUPT || it->status == KVS_E_DEVICE)
            forget_block(l, l->of[k]);
        else if (it->status == KVS_OK && l->job.items[k].verify)
            directory_verified(c->dir, it->host);
        rest_host(l, it);
    }
    l->seat->users--;
    l->seat = NULL;
    c->step_due = true;
}

/* What was found on the device is given up with the rest: no hold outlives a reply that does not name its slot. */
static void drop_found(load *l, kvs_status why)
{
    for (uint32_t i = 0; i < l->n; i++) {
        load_item *it = &l->items[i];

        if (!it->found)
            continue;
        (void)region_drop(l->seat, it->slot, it->gen); /* unless the client has done that meanwhile */
        it->found = false;
        it->status = why;
    }
}

static bool load_stop(request *r, bool running)
{
    load *l = r->ext;
    bool dropped = mover_drop(l->mover, &l->job);

    load_twin_stop(l, dropped);
    if (dropped) {
        drop_found(l, KVS_E_CANCELLED);
        settle(l, false);
    } else if (running) {
        atomic_store(&l->job.job.stop, true);
    }
    mover_kick(l->mover);
    return dropped;
}

static uint32_t put_items(const load *l, wire_out *o)
{
    wire_load_rep rep = {.n = l->n};

    o->len = WIRE_load_rep_BYTES;
    for (uint32_t i = 0; i < l->n; i++) {
        const load_item *it = &l->items[i];
        wire_load_result x = {it->status, it->flags, it->slot, it->gen};

        if (it->any && it->status != KVS_OK)
            x = (wire_load_result){it->status, 0, WIRE_NONE32, 0};
        rep.n_ok += it->status == KVS_OK;
        wire_put_load_result(o, &x);
    }
    wire_put_load_rep(&(wire_out){o->base, 0, WIRE_load_rep_BYTES, false}, &rep);
    return rep.n_ok;
}

static void load_overdue(request *r, bool untouched)
{
    load *l = r->ext;
    core *c = r->peer->core;

    for (uint32_t k = 0; !untouched && k < l->job.n_items; k++) {
        const load_item *it = &l->items[l->of[k]];

        l->seat->region->use[it->slot].suspect = true;
        directory_suspect(c->dir, it->host);
    }
    l->suspect = !untouched;
    drop_found(l, KVS_E_DEADLINE);
    for (uint32_t i = 0; i < l->n; i++)
        if (l->items[i].copies || l->items[i].status == KVS_E_CANCELLED)
            l->items[i].status = untouched ? KVS_E_DEADLINE : KVS_E_BUSY;
    if (untouched)
        job_signal(&l->job.job, KVS_E_DEADLINE);
    (void)put_items(l, request_out(r));
}

static const request_ops load_ops = {load_stop, load_overdue};

void load_finish(load *l)
{
    request *r = l->request;
    core *c = r->peer->core;
    job *j = &l->job.job;
    kvs_status s = j->status;
    uint32_t n_ok = 0;

    core_note_status(c, s);
    settle(l, !r->answered);
    for (uint32_t i = 0; i < l->n; i++)
        n_ok += l->items[i].status == KVS_OK;
    if (c->lost != KVS_OK)
        s = c->lost;
    else if (s != KVS_E_CANCELLED)
        s = n_ok == l->n ? KVS_OK : KVS_E_PARTIAL;
    r->outcome = s;
    job_signal(j, r->answered ? KVS_E_DEADLINE : s);
    if (!r->answered) {
        (void)put_items(l, request_out(r));
        request_answer(r, s, &j->err);
    }
    request_end(r);
    core_rest(c);
}

static void load_done(work *w)
{
    load_twin_back((load *)(void *)w);
}

/* ---- admission ---- */

static void resolve_chosen(load *l, uint32_t i)
{
    region *g = l->seat->region;
    load_item *it = &l->items[i];
    uint32_t at = region_find(g, key_of(l, i));

    it->chosen = at == REGION_NONE;
    if (at == REGION_NONE) {
        it->status = region_take_unnamed(l->seat, &at);
        if (it->status != KVS_OK) {
            it->chosen = false;
            return;
        }
        it->copies = true;
    } else {
        region_hold(l->seat, at);
        l->request->peer->core->counts.no_copy_loads++;
        it->found = true;
        it->flags = WIRE_LOADED_SHARED | WIRE_LOADED_NO_COPY;
        it->status = KVS_OK;
    }
    it->slot = at;
    it->gen = g->slots[at].gen;
}

static void resolve_slot(load *l, uint32_t i)
{
    region *g = l->seat->region;
    load_item *it = &l->items[i];
    bool absent = it->status != KVS_OK;

    if (it->slot == WIRE_NONE32) {
        /* What is not in host memory may still be on the device. */
        if (!absent || region_find(g, key_of(l, i)) != REGION_NONE)
            resolve_chosen(l, i);
    } else if (!absent) {
        it->status = region_may_load(l->seat, it->slot, it->gen);
        it->copies = it->status == KVS_OK;
    }
    if (it->copies)
        g->use[it->slot].loading = true;
}

/* A lease is held altogether or not at all. */
static kvs_status hold_lease(load *l, const wire_load_req *q, kvs_err *err)
{
    peer *p = l->request->peer;
    kvs_status s = directory_lease_hold(p->core->dir, p->tenant, q->lease, q->ns, q->lease_first, l->n, l->host, err);

    for (uint32_t i = 0; i < l->n && s == KVS_OK; i++)
        memcpy(l->keys + (size_t)i * WIRE_KEY_BYTES, pool_row_of(p->core->pool, l->host[i])->key, WIRE_KEY_BYTES);
    return s;
}

/* Blocks of an earlier life are looked at before their first use, always.  Those of this one once more at each load, unless
 * the device is faster than a processor can read: there it would cost six sevenths of the speed. */
static bool is_looked_at(core *c, const region *g, pool_slot host, const pool_row *row)
{
    bool again = c->config->pool_checksum && core_device_of(c, g)->dev->ops->depth < 2;

    return row->checksum != 0 && (again || directory_is_unverified(c->dir, host));
}

static void add_copy(load *l, uint32_t i)
{
    core *c = l->request->peer->core;
    const load_item *it = &l->items[i];
    const pool_row *row = pool_row_of(c->pool, it->host);
    uint32_t k = l->job.n_items++;

    l->of[k] = i;
    l->job.items[k] = (mover_item){.host = pool_address(c->pool, it->host),
                                   .slot = it->slot,
                                   .run = pool_extent_of(c->pool, it->host) + 1,
                                   .checksum = row->checksum,
                                   .verify = is_looked_at(c, l->seat->region, it->host, row)};
}

/* The next n keys: held, their slots found, and what is to be copied added to the job. */
static void admit_some(load *l, uint32_t from, uint32_t n)
{
    directory *d = l->request->peer->core->dir;

    if (!l->by_lease)
        directory_hold_some(d, l->ns, key_of(l, from), n, l->held + from, l->host + from);
    for (uint32_t i = from; i < from + n; i++) {
        load_item *it = &l->items[i];

        it->status = l->held[i];
        it->host = l->host[i];
        it->has_host = it->status == KVS_OK;
        resolve_slot(l, i);
        if (it->copies)
            add_copy(l, i);
    }
}

/* Slots that a client names are in range and named once; nothing has happened yet. */
static kvs_status read_slots(load *l, const uint8_t *refs, kvs_err *err)
{
    region *g = l->seat->region;

    region_mark_begin(g);
    for (uint32_t i = 0; i < l->n; i++) {
        load_item *it = &l->items[i];

        it->slot = wire_at_u32(refs, 2 * (size_t)i);
        it->gen = wire_at_u32(refs, 2 * (size_t)i + 1);
        it->any = it->slot == WIRE_NONE32;
        if (it->any && !g->slots)
            return kvs_fail(err, KVS_E_INVALID, "slot[%u]: none, but the daemon chooses in its own regions only", i);
        if (it->any && it->gen != 0)
            return kvs_fail(err, KVS_E_INVALID, "slot[%u]: none, but with generation %u, not 0", i, it->gen);
        if (it->any)
            continue;
        if (it->slot >= g->n_slots)
            return kvs_fail(err, KVS_E_RANGE, "slot[%u]: %u is not below %u", i, it->slot, g->n_slots);
        if (!region_mark(g, it->slot))
            return kvs_fail(err, KVS_E_INVALID, "slot[%u]: %u is named twice", i, it->slot);
    }
    return KVS_OK;
}

/* Without the flag a lease would be ignored: its sender thinks that it is used. */
static kvs_status check_no_lease(const wire_load_req *q, kvs_err *err)
{
    static const uint8_t none[WIRE_LEASE_BYTES];

    if (q->lease_first != 0)
        return kvs_fail(err, KVS_E_INVALID, "lease_first: %u is not 0 without flag %d", q->lease_first,
                        WIRE_LOAD_BY_LEASE);
    if (memcmp(q->lease, none, sizeof(none)) != 0)
        return kvs_fail(err, KVS_E_INVALID, "lease: is not zeros without flag %d", WIRE_LOAD_BY_LEASE);
    return KVS_OK;
}

static kvs_status check_load(peer *p, const wire_load_req *q, const directory_ns **ns, region_seat **seat, kvs_err *err)
{
    kvs_status s = counter_check_after(q->after_counter, q->after_value, err);

    if (s == KVS_OK)
        s = counter_check_signal(q->signal_counter, q->signal_value, err);
    if (s == KVS_OK && q->reserved != 0)
        s = kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", q->reserved);
    if (s == KVS_OK && !(q->flags & WIRE_LOAD_BY_LEASE))
        s = check_no_lease(q, err);
    if (s == KVS_OK && (q->flags & ~(uint32_t)WIRE_LOAD_BY_LEASE) != 0)
        s = kvs_fail(err, KVS_E_INVALID, "flags: 0x%x has unknown bits, known are 0x%x", q->flags, WIRE_LOAD_BY_LEASE);
    if (s == KVS_OK && q->n > core_max_keys(p->core))
        s = kvs_fail(err, KVS_E_LIMIT, "n: %u is above %u", q->n, core_max_keys(p->core));
    if (s == KVS_OK)
        s = peer_ns(p, q->ns, ns, err);
    if (s == KVS_OK)
        s = peer_slots(p, q->region, q->ns, seat, err);
    return s;
}

static kvs_status make_load(request *r, const wire_load_req *q, region_seat *seat, const uint8_t *keys, load **ret,
                            kvs_err *err)
{
    load *l = request_alloc(r, 1, sizeof(*l));

    if (!l)
        return kvs_fail(err, KVS_E_NO_MEMORY, "load: out of memory");
    l->request = r;
    l->seat = seat;
    l->device = seat->region->device;
    l->mover = core_device_of(r->peer->core, seat->region)->load;
    l->ns = q->ns;
    l->n = q->n;
    l->by_lease = (q->flags & WIRE_LOAD_BY_LEASE) != 0;
    l->items = request_alloc(r, (uint64_t)q->n + 1, sizeof(l->items[0]));
    l->of = request_alloc(r, (uint64_t)q->n + 1, sizeof(l->of[0]));
    l->job.items = request_alloc(r, (uint64_t)q->n + 1, sizeof(l->job.items[0]));
    l->keys = request_alloc(r, (uint64_t)q->n + 1, WIRE_KEY_BYTES);
    l->held = request_alloc(r, (uint64_t)q->n + 1, sizeof(l->held[0]));
    l->host = request_alloc(r, (uint64_t)q->n + 1, sizeof(l->host[0]));
    if (!l->items || !l->of || !l->job.items || !l->keys || !l->held || !l->host)
        return kvs_fail(err, KVS_E_NO_MEMORY, "load of %u blocks: out of memory", q->n);
    if (q->n > 0 && !l->by_lease)
        memcpy(l->keys, keys, (size_t)q->n * WIRE_KEY_BYTES);
    r->ext = l;
    *ret = l;
    return request_room(r, WIRE_load_rep_BYTES + (uint64_t)q->n * WIRE_load_result_BYTES, err);
}

/* Behind the last key: what is only held to be looked at is let go, when all are as recent as they shall be. */
static void admit_end(load *l)
{
    bool all = true;

    if (!l->by_lease)
        directory_renew(l->request->peer->core->dir, l->host, l->n);
    for (uint32_t i = 0; i < l->n; i++) {
        if (!l->items[i].copies)
            rest_host(l, &l->items[i]);
        all = all && l->items[i].status == KVS_OK;
    }
    l->job.job.signal_by_worker = all; /* else the loop adds the error word */
}

/* The first blocks are on their way while we look at the others; but who may have a twin must know them all. */
static void admit(load *l, const wire_load_req *q)
{
    job_init(&l->job.job, load_done);
    job_fill(&l->job.job, l->request->peer, q->after_counter, q->after_value, q->signal_counter, q->signal_value);
    l->job.map = l->seat->region->map;
    l->job.imported = l->seat->region->imported;
    l->seat->users++;
    if (load_twin_is_likely(l)) {
        admit_some(l, 0, l->n);
        admit_end(l);
        load_twin_find(l);
        mover_submit(l->mover, &l->job);
        return;
    }
    mover_begin(l->mover, &l->job, l->n);
    for (uint32_t at = 0, n; at < l->n; at += n) {
        n = mover_part(&l->job, l->n - at);
        admit_some(l, at, n);
        mover_add(l->mover, &l->job);
    }
    admit_end(l);
    mover_complete(l->mover, &l->job);
}

kvs_status op_load(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns = NULL;
    region_seat *seat = NULL;
    const uint8_t *keys = NULL, *refs;
    wire_load_req q;
    load *l = NULL;
    kvs_status s;

    wire_get_load_req(in, &q);
    if (!(q.flags & WIRE_LOAD_BY_LEASE))
        keys = wire_get_array(in, q.n, WIRE_KEY_BYTES);
    refs = wire_get_array(in, q.n, WIRE_slot_ref_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_load(r->peer, &q, &ns, &seat, err);
    if (s == KVS_OK)
        mover_expect(core_device_of(r->peer->core, seat->region)->load); /* it wakes up while we look at keys */
    if (s == KVS_OK)
        s = request_charge(r, (uint64_t)q.n * ns->slot_bytes, err);
    if (s == KVS_OK)
        s = make_load(r, &q, seat, keys, &l, err);
    if (s == KVS_OK)
        s = read_slots(l, refs, err);
    if (s == KVS_OK)
        s = request_go(r, &load_ops, err);
    if (s == KVS_OK && l->by_lease)
        s = hold_lease(l, &q, err);
    if (s != KVS_OK) {
        r->out = false; /* nothing was held: it is an ordinary refusal */
        return s;
    }
    admit(l, &q);
    return KVS_OK;
}

void refused_load(peer *p, wire_in *in, kvs_status s)
{
    wire_load_req q;

    wire_get_load_req(in, &q);
    counter_signal(p, q.signal_counter, q.signal_value, s);
}
