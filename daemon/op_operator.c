#include "daemon/core.h"

#include <inttypes.h>

#include "config/json.h"
#include "daemon/log.h"

/* What only the operator may ask for: RELOAD, DRAIN. */

static kvs_status put_text(request *r, const json_writer *w, kvs_err *err)
{
    wire_status_rep rep = {0};
    size_t len = 0;
    const char *text = json_text(w, &len);
    kvs_status s = text ? request_room(r, WIRE_status_rep_BYTES + (uint64_t)len, err)
                        : kvs_fail(err, KVS_E_NO_MEMORY, "reload: it was done, but there is no memory to say what");

    if (s != KVS_OK)
        return s;
    rep.text_len = (uint32_t)len;
    wire_put_status_rep(request_out(r), &rep);
    wire_put_bytes(request_out(r), text, len);
    wire_put_pad8(request_out(r));
    return KVS_OK;
}

kvs_status op_reload(request *r, wire_in *in, kvs_err *err)
{
    const core_operator *o = &r->peer->core->operator;
    wire_reload_req q;
    json_writer *w;
    kvs_status s;

    wire_get_reload_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK && ((q.flags & ~(uint32_t)WIRE_RELOAD_DRY_RUN) != 0 || q.reserved != 0))
        s = kvs_fail(err, KVS_E_INVALID, "flags, reserved: 0x%x and %u, known are 0x%x and 0", q.flags, q.reserved,
                     WIRE_RELOAD_DRY_RUN);
    if (s == KVS_OK && !o->reload)
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "reload: this daemon has no configuration file");
    if (s != KVS_OK)
        return s;
    w = json_writer_create();
    if (!w)
        return kvs_fail(err, KVS_E_NO_MEMORY, "reload: out of memory");
    s = o->reload(o->ud, (q.flags & WIRE_RELOAD_DRY_RUN) != 0, w, err);
    if (s == KVS_OK)
        s = put_text(r, w, err);
    json_writer_destroy(w);
    return s;
}

kvs_status op_drain(request *r, wire_in *in, kvs_err *err)
{
    wire_drain_req q;
    kvs_status s;

    wire_get_drain_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK && (q.on > 1 || q.reserved != 0))
        s = kvs_fail(err, KVS_E_INVALID, "on, reserved: %u and %u, must be 0 or 1 and 0", q.on, q.reserved);
    if (s != KVS_OK)
        return s;
    r->peer->core->paused = q.on == 1;
    log_event(LOG_LEVEL_INFO, "drain", " on=%u conn=%" PRIu64 " uid=%u pid=%d", q.on, r->peer->conn_id,
              (unsigned)r->peer->info.uid, (int)r->peer->info.pid);
    return KVS_OK;
}
