/* Replies: from checked bytes into the caller's arrays.  Every number of the daemon is compared with what was asked for
 * before it is used. */
#include "proto/client/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- no reply ---- */

static void spread_load(kvs_request *r, kvs_status s)
{
    kvs_load_result *p = r->items;

    for (uint32_t i = 0; p != NULL && i < r->n; i++)
        p[i] = (kvs_load_result){s, 0, {KVS_SLOT_ANY, 0}};
}

static void spread_calls(kvs_request *r, kvs_status s)
{
    kvs_call_result *p = r->items;

    for (uint32_t i = 0; p != NULL && i < r->n; i++)
        p[i] = (kvs_call_result){s, 0, 0, 0};
}

static void spread_statuses(kvs_request *r, kvs_status s)
{
    kvs_status *p = r->items;

    for (uint32_t i = 0; p != NULL && i < r->n; i++)
        p[i] = s;
}

void answer_spread(kvs_request *r, kvs_status s)
{
    switch (r->op) {
    case WIRE_LOOKUP: /* unknown is a miss */
        if (r->ret != NULL)
            *(uint32_t *)r->ret = 0;
        if (r->items != NULL)
            memset(r->items, KVS_KEY_ABSENT, r->n);
        break;
    case WIRE_RESERVE:
        if (r->ret != NULL)
            memset(r->ret, 0, sizeof(kvs_lease));
        break;
    case WIRE_LOAD:
        spread_load(r, s);
        break;
    case WIRE_WRITE:
    case WIRE_DECODE:
    case WIRE_EXTEND:
        spread_calls(r, s);
        break;
    case WIRE_STORE:
    case WIRE_SLOT_DROP:
    case WIRE_PIN:
    case WIRE_UNPIN:
    case WIRE_DROP:
        spread_statuses(r, s);
        break;
    default:
        break;
    }
}

/* ---- one decoder a kind of reply; false: malformed ---- */

static bool decode_open(kvs_request *r, wire_in *in)
{
    kvs_ns *ns = r->ns;
    wire_open_rep v;

    wire_get_open_rep(in, &v);
    if (!wire_in_done(in) || v.slot_bytes != ns->info.slot_bytes || memcmp(v.digest, ns->info.digest, 32) != 0)
        return false;
    atomic_store(&ns->id, v.ns);
    ns->info.id = v.ns;
    ns->next = r->c->namespaces;
    r->c->namespaces = ns;
    return true;
}

static bool decode_region(kvs_request *r, wire_in *in, frame *f)
{
    kvs_client *c = r->c;
    wire_region_rep v;
    kvs_status s;

    wire_get_region_rep(in, &v);
    if (!wire_in_done(in) || v.n_entries != 0)
        return false;
    s = region_adopt(r->region, &v, f, &r->err);
    if (s == KVS_E_PROTO)
        return false;
    if (s != KVS_OK) { /* ours to refuse: short of memory.  The daemon must not keep it. */
        flight fl = {.op = r->op};

        *in = (wire_in){.base = f->body, .len = f->head.body_len};
        (void)reply_head(f, in, NULL);
        return answer_orphan(c, &fl, KVS_OK, in);
    }
    r->region->next = c->regions;
    c->regions = r->region;
    return true;
}

static bool decode_lookup(kvs_request *r, wire_in *in)
{
    const uint8_t *states;
    wire_lookup_rep v;

    wire_get_lookup_rep(in, &v);
    states = v.n_keys == r->n ? wire_get_array(in, v.n_keys, 1) : NULL;
    if (states == NULL || !wire_in_done(in) || v.n_hits > r->n)
        return false;
    for (uint32_t i = 0; i < r->n; i++)
        if (states[i] > WIRE_KEY_READY || (i < v.n_hits && states[i] != WIRE_KEY_READY))
            return false;
    *(uint32_t *)r->ret = v.n_hits;
    if (r->items != NULL)
        memcpy(r->items, states, r->n);
    return true;
}

static bool decode_reserve(kvs_request *r, wire_in *in)
{
    kvs_lease *l = r->ret;
    wire_reserve_rep v;

    wire_get_reserve_rep(in, &v);
    if (!wire_in_done(in) || v.n_leased > r->n)
        return false;
    memcpy(l->id, v.lease, sizeof l->id);
    l->n_leased = v.n_leased;
    l->ttl_ms = v.ttl_ms;
    l->bytes = v.bytes;
    return true;
}

static kvs_load_result load_result_at(const uint8_t *items, uint32_t i)
{
    wire_in one = {.base = items + (size_t)i * WIRE_load_result_BYTES, .len = WIRE_load_result_BYTES};
    wire_load_result v;

    wire_get_load_result(&one, &v);
    return (kvs_load_result){(kvs_status)v.status, v.flags, {v.slot, v.gen}};
}

static bool decode_load(kvs_request *r, wire_in *in)
{
    const kvs_load_args *a = r->args;
    kvs_load_result *ret = r->items;
    const uint8_t *items;
    wire_load_rep v;

    wire_get_load_rep(in, &v);
    items = v.n == r->n && v.n_ok <= v.n ? wire_get_array(in, v.n, WIRE_load_result_BYTES) : NULL;
    if (items == NULL || !wire_in_done(in))
        return false;
    for (uint32_t i = 0; i < r->n; i++) {
        kvs_load_result one = load_result_at(items, i);

        if (one.status == KVS_OK && one.slot.slot >= a->region->info.n_slots)
            return false;
    }
    for (uint32_t i = 0; i < r->n; i++) {
        ret[i] = load_result_at(items, i);
        r->runs_on |= ret[i].status == KVS_E_BUSY;
        if (ret[i].status == KVS_OK && (ret[i].flags & WIRE_LOADED_SHARED))
            region_track(a->region, ret[i].slot, true, a->keys != NULL ? a->keys + (size_t)i * WIRE_KEY_BYTES : NULL,
                         a->first_depth + i);
    }
    return true;
}

/* STORE, SLOT_DROP, PIN, UNPIN, DROP. */
static bool decode_keys(kvs_request *r, wire_in *in)
{
    kvs_status *ret = r->items;
    const uint8_t *items;
    wire_key_rep v;

    wire_get_key_rep(in, &v);
    items = v.n == r->n && v.n_ok <= v.n ? wire_get_array(in, v.n, 4) : NULL;
    if (items == NULL || !wire_in_done(in))
        return false;
    for (uint32_t i = 0; i < r->n; i++) {
        kvs_status s = (kvs_status)wire_at_u32(items, i);

        if (ret != NULL)
            ret[i] = s;
        r->runs_on |= s == KVS_E_BUSY && r->op == WIRE_STORE;
        if (s != KVS_OK)
            continue;
        if (r->op == WIRE_SLOT_DROP) {
            region_untrack(r->region, ((const kvs_slot *)r->args)[i]);
        } else if (r->op == WIRE_STORE) {
            const kvs_store_args *a = r->args;

            if (a->flags & KVS_STORE_KEEP)
                region_track(a->region, a->slots[i], true, a->keys + (size_t)i * WIRE_KEY_BYTES, a->first_depth + i);
        }
    }
    return true;
}

static bool decode_slot_take(kvs_request *r, wire_in *in)
{
    kvs_slot *ret = r->items;
    const uint8_t *items;
    wire_slot_take_rep v;

    wire_get_slot_take_rep(in, &v);
    items = v.n == r->n ? wire_get_array(in, v.n, WIRE_slot_ref_BYTES) : NULL;
    if (items == NULL || !wire_in_done(in))
        return false;
    for (uint32_t i = 0; i < r->n; i++)
        if (wire_at_u32(items, 2 * (size_t)i) >= r->region->info.n_slots)
            return false;
    for (uint32_t i = 0; i < r->n; i++) {
        ret[i] = (kvs_slot){wire_at_u32(items, 2 * (size_t)i), wire_at_u32(items, 2 * (size_t)i + 1)};
        region_track(r->region, ret[i], false, NULL, 0);
    }
    return true;
}

static bool decode_calls(kvs_request *r, wire_in *in)
{
    kvs_call_result *ret = r->items;
    const uint8_t *items;
    wire_call_rep v;

    wire_get_call_rep(in, &v);
    items = v.n_calls == r->n && v.n_ok <= v.n_calls ? wire_get_array(in, v.n_calls, WIRE_call_result_BYTES) : NULL;
    if (items == NULL || !wire_in_done(in))
        return false;
    for (uint32_t i = 0; i < r->n; i++) {
        size_t at = (size_t)i * (WIRE_call_result_BYTES / 4);

        ret[i] = (kvs_call_result){(kvs_status)wire_at_u32(items, at), wire_at_u32(items, at + 1),
                                   wire_at_u32(items, at + 2), wire_at_u32(items, at + 3)};
        r->runs_on |= ret[i].status == KVS_E_BUSY;
    }
    return true;
}

static bool decode_reset(kvs_request *r, wire_in *in)
{
    kvs_reset_result *ret = r->ret;
    wire_reset_rep v;

    wire_get_reset_rep(in, &v);
    if (!wire_in_done(in))
        return false;
    if (ret != NULL)
        *ret = (kvs_reset_result){v.dropped, v.aborted, v.kept, v.leases};
    return true;
}

static bool decode_cancel(kvs_request *r, wire_in *in)
{
    wire_cancel_rep v;

    wire_get_cancel_rep(in, &v);
    if (!wire_in_done(in) || v.outcome > WIRE_CANCEL_FINISHED)
        return false;
    if (r->ret != NULL)
        *(uint32_t *)r->ret = v.outcome;
    return true;
}

/* The text into memory of its own: *ret is a char *, items a size_t for its length. */
static bool decode_status(kvs_request *r, wire_in *in)
{
    const uint8_t *text;
    wire_status_rep v;
    char *copy;

    wire_get_status_rep(in, &v);
    text = wire_get_array(in, v.text_len, 1);
    if (text == NULL || !wire_in_done(in) || memchr(text, 0, v.text_len) != NULL)
        return false;
    copy = malloc((size_t)v.text_len + 1);
    if (copy == NULL) {
        (void)kvs_fail(&r->err, KVS_E_NO_MEMORY, "report: no memory for %u bytes", v.text_len);
        return true;
    }
    memcpy(copy, text, v.text_len);
    copy[v.text_len] = '\0';
    *(char **)r->ret = copy;
    *(size_t *)r->items = v.text_len;
    return true;
}

static bool decode_health(kvs_request *r, wire_in *in)
{
    kvs_health_info *ret = r->ret;
    wire_health_rep v;

    wire_get_health_rep(in, &v);
    if (!wire_in_done(in))
        return false;
    ret->state = v.state;
    ret->reasons = v.reasons;
    ret->uptime_us = v.uptime_us;
    memcpy(ret->boot_id, v.boot_id, sizeof ret->boot_id);
    return true;
}

/* Here, and not by the caller when it wakes up: the connection may be another one by then, which nobody has told. */
static bool decode_watch(kvs_request *r, wire_in *in)
{
    if (!wire_in_done(in))
        return false;
    r->c->watch_mask = *(const uint32_t *)r->args;
    return true;
}

static bool decode_ping(kvs_request *r, wire_in *in)
{
    return wire_get_u64(in) == r->cookie && wire_in_done(in);
}

static bool decode_ok(kvs_request *r, wire_in *in, frame *f)
{
    bool has_fds = r->op == WIRE_REGION_CREATE || r->op == WIRE_REGION_ATTACH;

    if (f->head.n_fds > 0 && !has_fds)
        return false;
    switch (r->op) {
    case WIRE_OPEN:
        return decode_open(r, in);
    case WIRE_REGION_CREATE:
    case WIRE_REGION_ATTACH:
    case WIRE_REGION_IMPORT:
        return decode_region(r, in, f);
    case WIRE_LOOKUP:
        return decode_lookup(r, in);
    case WIRE_RESERVE:
        return decode_reserve(r, in);
    case WIRE_LOAD:
        return decode_load(r, in);
    case WIRE_STORE:
    case WIRE_SLOT_DROP:
    case WIRE_PIN:
    case WIRE_UNPIN:
    case WIRE_DROP:
        return decode_keys(r, in);
    case WIRE_SLOT_TAKE:
        return decode_slot_take(r, in);
    case WIRE_WRITE:
    case WIRE_DECODE:
    case WIRE_EXTEND:
        return decode_calls(r, in);
    case WIRE_RESET:
        return decode_reset(r, in);
    case WIRE_CANCEL:
        return decode_cancel(r, in);
    case WIRE_STATUS:
    case WIRE_RELOAD:
        return decode_status(r, in);
    case WIRE_HEALTH:
        return decode_health(r, in);
    case WIRE_PING:
        return decode_ping(r, in);
    case WIRE_WATCH:
        return decode_watch(r, in);
    default: /* RELEASE, REGION_CLOSE, DRAIN: nothing but the head */
        return wire_in_done(in);
    }
}

/* Refusals of these ops may carry a status for each key. */
static bool has_items(uint16_t op)
{
    return op == WIRE_LOAD || op == WIRE_STORE || op == WIRE_SLOT_DROP || op == WIRE_PIN || op == WIRE_UNPIN ||
           op == WIRE_DROP || op == WIRE_WRITE || op == WIRE_DECODE || op == WIRE_EXTEND;
}

static kvs_status status_of_item(const kvs_request *r, uint32_t i)
{
    kvs_status s;

    if (r->op == WIRE_LOAD)
        return ((const kvs_load_result *)r->items)[i].status;
    if (r->op == WIRE_WRITE || r->op == WIRE_DECODE || r->op == WIRE_EXTEND)
        return ((const kvs_call_result *)r->items)[i].status;
    s = ((const kvs_status *)r->items)[i];
    return r->op == WIRE_STORE && s == KVS_E_EXISTS ? KVS_OK : s;
}

void answer_tell_partial(kvs_err *err, const char *what, uint32_t failed, uint32_t n, uint32_t first, kvs_status why)
{
    (void)snprintf(err->msg, sizeof err->msg, "%s: %u of %u failed, the first is [%u]: %s", what, failed, n, first,
                   kvs_status_text(why));
}

/* What the daemon says of an E_PARTIAL is in the items: the message is how many, and the first. */
static void tell_partial(kvs_request *r)
{
    uint32_t failed = 0, first = 0;

    if (r->items == NULL || !has_items(r->op) || r->err.msg[0] != '\0')
        return;
    for (uint32_t i = r->n; i-- > 0;)
        if (status_of_item(r, i) != KVS_OK) {
            failed++;
            first = i;
        }
    if (failed > 0)
        answer_tell_partial(&r->err, wire_op_name(r->op), failed, r->n, first, status_of_item(r, first));
}

bool answer_decode(kvs_request *r, kvs_status s, wire_in *in, frame *f)
{
    bool ok;

    if (s == KVS_OK || s == KVS_E_PARTIAL) {
        ok = decode_ok(r, in, f);
        if (ok && s == KVS_E_PARTIAL)
            tell_partial(r);
        return ok;
    }
    if (in->pos < in->len && has_items(r->op))
        return decode_ok(r, in, f);
    answer_spread(r, s);
    return wire_in_done(in) && f->head.n_fds == 0;
}

/* ---- replies that nobody waits for ---- */

static void give_back_slots(kvs_client *c, uint32_t region, const kvs_slot *slots, uint32_t n)
{
    wire_slot_drop_req q = {.region = region, .n = n, .after_counter = WIRE_NONE32};
    wire_out o = {.cap = WIRE_slot_drop_req_BYTES + (size_t)n * WIRE_slot_ref_BYTES};

    o.base = n > 0 ? malloc(o.cap) : NULL;
    if (o.base == NULL)
        return;
    wire_put_slot_drop_req(&o, &q);
    for (uint32_t i = 0; i < n; i++) {
        wire_put_u32(&o, slots[i].slot);
        wire_put_u32(&o, slots[i].gen);
    }
    chore_add(c, WIRE_SLOT_DROP, &o);
    free(o.base);
}

static bool orphan_slots(kvs_client *c, const flight *fl, wire_in *in)
{
    bool is_load = fl->op == WIRE_LOAD;
    uint32_t n = wire_get_u32(in), k = 0;
    const uint8_t *items;
    kvs_slot *slots;

    (void)wire_get_u32(in);
    items = wire_get_array(in, n, is_load ? WIRE_load_result_BYTES : WIRE_slot_ref_BYTES);
    if (items == NULL || !wire_in_done(in))
        return false;
    slots = n > 0 ? calloc(n, sizeof *slots) : NULL;
    if (slots == NULL)
        return true;
    for (uint32_t i = 0; i < n; i++) {
        kvs_load_result one = {KVS_OK, WIRE_LOADED_SHARED, {0, 0}};

        if (is_load)
            one = load_result_at(items, i);
        else
            one.slot = (kvs_slot){wire_at_u32(items, 2 * (size_t)i), wire_at_u32(items, 2 * (size_t)i + 1)};
        if (one.status == KVS_OK && (one.flags & WIRE_LOADED_SHARED))
            slots[k++] = one.slot;
    }
    give_back_slots(c, fl->region_id, slots, k);
    free(slots);
    return true;
}

static bool orphan_lease(kvs_client *c, wire_in *in)
{
    uint8_t body[WIRE_release_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_release_req q;
    wire_reserve_rep v;

    wire_get_reserve_rep(in, &v);
    if (!wire_in_done(in))
        return false;
    memcpy(q.lease, v.lease, sizeof q.lease);
    wire_put_release_req(&o, &q);
    if (v.n_leased > 0)
        chore_add(c, WIRE_RELEASE, &o);
    return true;
}

static bool orphan_region(kvs_client *c, wire_in *in)
{
    uint8_t body[WIRE_region_close_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_region_close_req q = {0};
    wire_region_rep v;

    wire_get_region_rep(in, &v);
    if (in->bad)
        return false;
    q.region = v.region;
    wire_put_region_close_req(&o, &q);
    chore_add(c, WIRE_REGION_CLOSE, &o);
    return true;
}

bool answer_orphan(kvs_client *c, const flight *fl, kvs_status s, wire_in *in)
{
    if (s != KVS_OK && s != KVS_E_PARTIAL)
        return true;
    switch (fl->op) {
    case WIRE_SLOT_TAKE:
        return orphan_slots(c, fl, in);
    case WIRE_LOAD:
        return !fl->chosen || orphan_slots(c, fl, in);
    case WIRE_RESERVE:
        return orphan_lease(c, in);
    case WIRE_REGION_CREATE:
    case WIRE_REGION_ATTACH:
    case WIRE_REGION_IMPORT:
        return orphan_region(c, in);
    default:
        return true;
    }
}

/* ---- events ---- */

bool event_take(kvs_client *c, wire_in *in)
{
    const uint8_t *items;
    wire_event v;

    wire_get_event(in, &v);
    items = wire_get_array(in, v.n, WIRE_event_item_BYTES);
    if (items == NULL || !wire_in_done(in))
        return false;
    if (v.lost > c->events_lost_seen) /* the daemon's count grows over the connection */
        c->events_lost += v.lost - c->events_lost_seen;
    c->events_lost_seen = v.lost;
    for (uint32_t i = 0; c->events != NULL && i < v.n; i++) {
        wire_in one = {.base = items + (size_t)i * WIRE_event_item_BYTES, .len = WIRE_event_item_BYTES};
        kvs_event *e = &c->events[(c->events_first + c->events_n) % CLIENT_EVENTS];
        wire_event_item w;

        wire_get_event_item(&one, &w);
        *e = (kvs_event){.type = w.type, .ns = w.ns, .depth = w.depth, .cause = w.cause};
        memcpy(e->key, w.key, sizeof e->key);
        if (c->events_n < CLIENT_EVENTS) {
            c->events_n++;
        } else { /* the oldest goes */
            c->events_first = (c->events_first + 1) % CLIENT_EVENTS;
            c->events_lost++;
        }
    }
    client_wake_general(c);
    return true;
}
