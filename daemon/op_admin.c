#include "daemon/core.h"

#include <inttypes.h>
#include <string.h>

#include "config/json.h"

/* Watching and stopping: CANCEL, STATUS, HEALTH, WATCH, PING. */

/* ---- CANCEL ---- */

static const request_ops cancel_ops = {NULL, NULL};

static kvs_status answer_now(request *r, uint32_t outcome)
{
    wire_cancel_rep rep = {.outcome = outcome};

    wire_put_cancel_rep(request_out(r), &rep);
    return KVS_OK;
}

kvs_status op_cancel(request *r, wire_in *in, kvs_err *err)
{
    wire_cancel_req q;
    request *t;
    kvs_status s;

    wire_get_cancel_req(in, &q);
    s = request_parsed(in, err);
    if (s != KVS_OK)
        return s;
    t = peer_find(r->peer, q.target);
    if (!t)
        return answer_now(r, WIRE_CANCEL_GONE);
    if (t->row->op == WIRE_CANCEL)
        return kvs_fail(err, KVS_E_INVALID, "target: %" PRIu64 " is a CANCEL", q.target);
    /* No deadline: how long the hardware takes is what the client wants to know. */
    r->ops = &cancel_ops;
    r->out = true;
    r->next_cancel = t->cancels;
    t->cancels = r;
    t->cancelled = true;
    (void)t->ops->stop(t, true); /* answered when its jobs are back: they come as completions */
    return KVS_OK;
}

/* ---- STATUS ---- */

static const char *const SECTIONS[WIRE_SECTION_METRICS + 1] = {
    [WIRE_SECTION_SUMMARY] = "summary", [WIRE_SECTION_CLIENTS] = "clients",       [WIRE_SECTION_LEASES] = "leases",
    [WIRE_SECTION_KEYS] = "keys",       [WIRE_SECTION_NAMESPACES] = "namespaces", [WIRE_SECTION_FSCK] = "fsck",
    [WIRE_SECTION_TENANTS] = "tenants", [WIRE_SECTION_METRICS] = "metrics",
};

kvs_status op_status(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns;
    wire_status_req q;
    wire_status_rep rep = {0};
    json_writer *w;
    const char *text;
    size_t len = 0;
    kvs_status s;

    wire_get_status_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK && q.section > WIRE_SECTION_METRICS)
        s = kvs_fail(err, KVS_E_INVALID, "section: %u is above %d", q.section, WIRE_SECTION_METRICS);
    if (s == KVS_OK && q.reserved != 0)
        s = kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", q.reserved);
    if (s == KVS_OK && q.section != WIRE_SECTION_SUMMARY && !r->peer->info.is_admin)
        s = kvs_fail(err, KVS_E_DENIED, "section: %s is for the admin socket; this is that of tenant %s",
                     SECTIONS[q.section], tenant_name(r->peer->core->config, r->peer->tenant));
    if (s == KVS_OK && q.section == WIRE_SECTION_KEYS && q.ns != WIRE_NONE32)
        s = peer_ns(r->peer, q.ns, &ns, err);
    if (s != KVS_OK)
        return s;
    w = json_writer_create();
    if (!w)
        return kvs_fail(err, KVS_E_NO_MEMORY, "status: out of memory");
    if (r->peer->info.is_admin || r->peer->core->config->n_tenants == 1)
        status_text(r->peer->core, &q, w);
    else
        tenant_summary_text(r->peer->core, r->peer->tenant, w);
    text = json_text(w, &len);
    s = text ? request_room(r, WIRE_status_rep_BYTES + (uint64_t)len, err)
             : kvs_fail(err, KVS_E_NO_MEMORY, "status: out of memory");
    if (s == KVS_OK) {
        rep.text_len = (uint32_t)len;
        wire_put_status_rep(request_out(r), &rep);
        wire_put_bytes(request_out(r), text, len);
        wire_put_pad8(request_out(r));
    }
    json_writer_destroy(w);
    return s;
}

/* ---- HEALTH, WATCH, PING ---- */

kvs_status op_health(request *r, wire_in *in, kvs_err *err)
{
    const core *c = r->peer->core;
    wire_health_rep rep = {.uptime_us = c->now_us - c->start_us};
    kvs_status s = request_parsed(in, err);

    if (s != KVS_OK)
        return s;
    rep.state = core_health(c, &rep.reasons);
    memcpy(rep.boot_id, c->boot_id, sizeof(rep.boot_id));
    wire_put_health_rep(request_out(r), &rep);
    return KVS_OK;
}

kvs_status op_watch(request *r, wire_in *in, kvs_err *err)
{
    const uint32_t known = 1u << WIRE_EVENT_STORED | 1u << WIRE_EVENT_REMOVED | 1u << WIRE_EVENT_RESET;
    peer *p = r->peer;
    wire_watch_req q;
    kvs_status s;

    wire_get_watch_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK && (q.reserved != 0 || (q.mask & ~known) != 0))
        s = kvs_fail(err, KVS_E_INVALID, "mask, reserved: 0x%x and %u, known are 0x%x and 0", q.mask, q.reserved,
                     known);
    if (s != KVS_OK)
        return s;
    if (p->watch_mask == 0)
        p->watch_from = p->core->n_told + p->core->n_events;
    p->core->n_watchers += (q.mask != 0) - (uint32_t)(p->watch_mask != 0);
    p->watch_mask = q.mask;
    p->watch_id = r->id;
    p->watch_seq = p->watch_lost = 0;
    return KVS_OK;
}

kvs_status op_ping(request *r, wire_in *in, kvs_err *err)
{
    if (in->len > CORE_MAX_PING)
        return kvs_fail(err, KVS_E_LIMIT, "body_len: %zu is above the %d bytes of PING", in->len, CORE_MAX_PING);
    wire_put_bytes(request_out(r), in->base, in->len);
    return KVS_OK;
}
