#include "daemon/core.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/disposal.h"
#include "daemon/thread.h"

/*      op, handler, who, credit, flags, group of ops, fixed part of the request and of the reply, signals when refused */
#define ROW(OP, name, who, credit, flags, group, req, rep, refused)                                                    \
    {                                                                                                                  \
        WIRE_##OP, who, credit, flags, group, req, rep, op_##name, refused                                             \
    }
/* G_BLOCKS: what both kinds of work begin with. */
enum {
    G_BLOCKS = CONFIG_OPS_CACHE | CONFIG_OPS_COMPUTE,
    G_CACHE = CONFIG_OPS_CACHE,
    G_COMPUTE = CONFIG_OPS_COMPUTE,
    G_PIN = CONFIG_OPS_PIN,
    G_RESET = CONFIG_OPS_RESET
};
static const op_row rows[] = {
    ROW(HELLO, hello, OP_ANY, CREDIT_NONE, OP_WHEN_PAUSED, 0, WIRE_hello_req_BYTES, WIRE_hello_rep_BYTES, NULL),
    ROW(OPEN, open, OP_CLIENT, CREDIT_DATA, 0, G_BLOCKS, 0, WIRE_open_rep_BYTES, NULL),
    ROW(REGION_CREATE, region_create, OP_CLIENT, CREDIT_DATA, 0, G_BLOCKS, WIRE_region_create_req_BYTES,
        WIRE_region_rep_BYTES, NULL),
    ROW(REGION_ATTACH, region_attach, OP_CLIENT, CREDIT_DATA, OP_TAKES_FDS, G_BLOCKS, WIRE_region_attach_req_BYTES,
        WIRE_region_rep_BYTES, NULL),
    ROW(REGION_IMPORT, region_import, OP_CLIENT, CREDIT_DATA, OP_TAKES_FDS, G_BLOCKS, WIRE_region_import_req_BYTES,
        WIRE_region_rep_BYTES, NULL),
    ROW(REGION_CLOSE, region_close, OP_CLIENT, CREDIT_DATA, OP_WHEN_PAUSED, G_BLOCKS, WIRE_region_close_req_BYTES, 0,
        NULL),
    ROW(LOOKUP, lookup, OP_ANY, CREDIT_DATA, 0, G_CACHE, WIRE_lookup_req_BYTES, WIRE_lookup_rep_BYTES, NULL),
    ROW(RESERVE, reserve, OP_CLIENT, CREDIT_DATA, 0, G_CACHE, WIRE_reserve_req_BYTES, WIRE_reserve_rep_BYTES, NULL),
    ROW(RELEASE, release, OP_CLIENT, CREDIT_DATA, OP_WHEN_PAUSED, G_CACHE, WIRE_release_req_BYTES, 0, NULL),
    ROW(LOAD, load, OP_CLIENT, CREDIT_DATA, 0, G_CACHE, WIRE_load_req_BYTES, WIRE_load_rep_BYTES, refused_load),
    ROW(STORE, store, OP_CLIENT, CREDIT_DATA, 0, G_CACHE, WIRE_store_req_BYTES, WIRE_key_rep_BYTES, refused_store),
    ROW(SLOT_TAKE, slot_take, OP_CLIENT, CREDIT_DATA, 0, G_BLOCKS, WIRE_slot_take_req_BYTES, WIRE_slot_take_rep_BYTES,
        NULL),
    ROW(SLOT_DROP, slot_drop, OP_CLIENT, CREDIT_DATA, OP_WHEN_PAUSED, G_BLOCKS, WIRE_slot_drop_req_BYTES,
        WIRE_key_rep_BYTES, NULL),
    ROW(WRITE, write, OP_CLIENT, CREDIT_DATA, 0, G_COMPUTE, WIRE_write_req_BYTES, WIRE_call_rep_BYTES, refused_write),
    ROW(DECODE, decode, OP_CLIENT, CREDIT_DATA, 0, G_COMPUTE, WIRE_decode_req_BYTES, WIRE_call_rep_BYTES,
        refused_decode),
    ROW(EXTEND, extend, OP_CLIENT, CREDIT_DATA, 0, G_COMPUTE, WIRE_extend_req_BYTES, WIRE_call_rep_BYTES,
        refused_extend),
    ROW(PIN, pin, OP_ANY, CREDIT_DATA, 0, G_PIN, WIRE_keys_req_BYTES, WIRE_key_rep_BYTES, NULL),
    ROW(UNPIN, unpin, OP_ANY, CREDIT_DATA, 0, G_PIN, WIRE_keys_req_BYTES, WIRE_key_rep_BYTES, NULL),
    ROW(DROP, drop, OP_ANY, CREDIT_DATA, 0, G_RESET, WIRE_keys_req_BYTES, WIRE_key_rep_BYTES, NULL),
    ROW(RESET, reset, OP_ANY, CREDIT_DATA, 0, G_RESET, WIRE_reset_req_BYTES, WIRE_reset_rep_BYTES, NULL),
    ROW(CANCEL, cancel, OP_ANY, CREDIT_CONTROL, OP_WHEN_DRAINING, 0, WIRE_cancel_req_BYTES, WIRE_cancel_rep_BYTES,
        NULL),
    ROW(STATUS, status, OP_ANY, CREDIT_DATA, OP_WHEN_DRAINING, 0, WIRE_status_req_BYTES, WIRE_status_rep_BYTES, NULL),
    ROW(HEALTH, health, OP_ANY, CREDIT_CONTROL, OP_WHEN_DRAINING | OP_WHEN_LOST, 0, 0, WIRE_health_rep_BYTES, NULL),
    ROW(WATCH, watch, OP_ANY, CREDIT_DATA, OP_WHEN_PAUSED, G_CACHE, WIRE_watch_req_BYTES, 0, NULL),
    ROW(PING, ping, OP_ANY, CREDIT_CONTROL, OP_WHEN_PAUSED, 0, 0, CORE_MAX_PING, NULL),
    ROW(RELOAD, reload, OP_ADMIN, CREDIT_CONTROL, 0, 0, WIRE_reload_req_BYTES, WIRE_status_rep_BYTES, NULL),
    ROW(DRAIN, drain, OP_ADMIN, CREDIT_CONTROL, 0, 0, WIRE_drain_req_BYTES, 0, NULL),
};
#undef ROW

const op_row *op_find(uint16_t op)
{
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (rows[i].op == op)
            return &rows[i];
    return NULL;
}

/* ---- memory ---- */

/* A client alone cannot take what all need: who holds no more than an equal part goes on.  A request that is under way gets
 * what its end needs. */
static kvs_status check_memory(const request *r, uint64_t more, kvs_err *err)
{
    const peer *p = r->peer;
    const core *c = p->core;
    const uint64_t most = (uint64_t)c->config->memory_bytes, clients = c->n_clients > 0 ? c->n_clients : 1;
    const uint64_t part = most / clients > CORE_LEAST_PART ? most / clients : CORE_LEAST_PART;

    if (!r->frame || r->row->credit != CREDIT_DATA || p->info.is_admin)
        return KVS_OK;
    if (r->held_bytes + more > most)
        return kvs_fail(err, KVS_E_LIMIT,
                        "limits.memory_bytes: the request takes %" PRIu64 " bytes or more, above %" PRIu64,
                        r->held_bytes + more, most);
    if (c->request_bytes + more <= most || p->request_bytes + more <= part)
        return KVS_OK;
    return kvs_fail(err, KVS_E_BUSY,
                    "limits.memory_bytes: requests in flight hold %" PRIu64 " bytes, %" PRIu64
                    " of them this client's; %" PRIu64 " more are above %" PRIu64 " for %" PRIu64 " clients",
                    c->request_bytes, p->request_bytes, more, most, clients);
}

/* Until it leaves its peer. */
static void hold(request *r, uint64_t bytes)
{
    r->held_bytes += bytes;
    r->peer->request_bytes += bytes;
    r->peer->core->request_bytes += bytes;
}

void *request_alloc(request *r, uint64_t n, size_t size)
{
    request_chunk *c;

    if (n > SIZE_MAX / 2 / size)
        return NULL;
    if (check_memory(r, sizeof(*c) + n * size, NULL) != KVS_OK) {
        r->lacked_bytes = sizeof(*c) + n * size;
        return NULL;
    }
    c = calloc(1, sizeof(*c) + (size_t)n * size);
    if (!c)
        return NULL;
    hold(r, sizeof(*c) + n * size);
    c->next = r->chunks;
    r->chunks = c;
    return c->bytes;
}

void reply_destroy(reply *r)
{
    if (!r)
        return;
    for (uint32_t i = 0; i < r->n_fds; i++)
        close(r->fds[i]);
    free(r->fds);
    free(r);
}

static kvs_status reserve(request *r, uint64_t payload, kvs_err *err)
{
    const uint64_t more = payload + 8 > r->room ? payload + 8 - r->room : 0;
    kvs_status s;
    reply *x;

    if (payload > UINT32_MAX / 2)
        return kvs_fail(err, KVS_E_LIMIT, "reply of %" PRIu64 " bytes is too long for a frame", payload);
    s = check_memory(r, more, err);
    if (s != KVS_OK)
        return s;
    /* The message's padding and that of the payload are 7 bytes each at most. */
    x = realloc(r->reply, sizeof(*x) + REPLY_HEAD_BYTES + payload + 16);
    if (!x)
        return kvs_fail(err, KVS_E_NO_MEMORY, "reply of %" PRIu64 " bytes: out of memory", payload);
    if (!r->reply)
        *x = (reply){0};
    x->held = sizeof(*x) + REPLY_HEAD_BYTES + payload + 16;
    r->reply = x;
    hold(r, more);
    r->room = payload + 8;
    /* The payload is written behind the longest message and moved up when the message is known. */
    r->payload.base = x->bytes + REPLY_HEAD_BYTES;
    r->payload.cap = r->room;
    return KVS_OK;
}

kvs_status request_room(request *r, uint64_t bytes, kvs_err *err)
{
    return bytes + 8 <= r->room ? KVS_OK : reserve(r, bytes, err);
}

wire_out *request_out(request *r)
{
    return &r->payload;
}

kvs_status request_add_fd(request *r, int fd, kvs_err *err)
{
    int *fds = realloc(r->reply->fds, (r->reply->n_fds + 1) * sizeof(int));

    if (!fds) {
        close(fd);
        return kvs_fail(err, KVS_E_NO_MEMORY, "descriptor %u of a reply: out of memory", r->reply->n_fds);
    }
    r->reply->fds = fds;
    fds[r->reply->n_fds++] = fd;
    return KVS_OK;
}

int request_take_fd(request *r, uint32_t i)
{
    int fd = r->frame->fds[i];

    r->frame->fds[i] = -1;
    return fd;
}

kvs_status request_parsed(const wire_in *in, kvs_err *err)
{
    if (wire_in_done(in))
        return KVS_OK;
    if (in->bad_pad)
        return kvs_fail(err, KVS_E_PROTO, "body: the padding that ends at byte %zu is not zero", in->pos);
    if (in->bad)
        return kvs_fail(err, KVS_E_PROTO, "body: an array or its padding does not fit the %zu bytes sent", in->len);
    return kvs_fail(err, KVS_E_PROTO, "body: %zu bytes are left over behind %zu", in->len - in->pos, in->pos);
}

/* ---- credit ---- */

kvs_status request_charge(request *r, uint64_t bytes, kvs_err *err)
{
    peer *p = r->peer;
    uint64_t most = (uint64_t)p->core->config->credit_bytes;

    if (bytes > most)
        return kvs_fail(err, KVS_E_LIMIT,
                        "request: %" PRIu64 " bytes are above the credit of %" PRIu64 " (limits.credit_bytes)", bytes,
                        most);
    if (bytes > most - (p->bytes_in_flight < most ? p->bytes_in_flight : most))
        return kvs_fail(err, KVS_E_BUSY, "credit: %" PRIu64 " bytes in flight and %" PRIu64 " more are above %" PRIu64,
                        p->bytes_in_flight, bytes, most);
    r->cost_bytes += bytes;
    p->bytes_in_flight += bytes;
    return KVS_OK;
}

static kvs_status draw_place(const request *r, kvs_err *err)
{
    const peer *p = r->peer;
    uint64_t most = (uint64_t)p->core->config->credit_requests;

    if (r->row->credit == CREDIT_DATA && p->n_data > most)
        return kvs_fail(err, KVS_E_BUSY, "credit: %u requests are in flight, %" PRIu64 " were granted", p->n_data - 1,
                        most);
    if (r->row->credit == CREDIT_CONTROL && p->n_control > CORE_CONTROL_CREDIT)
        return kvs_fail(err, KVS_E_BUSY, "credit: %u control requests are in flight, %d were granted", p->n_control - 1,
                        CORE_CONTROL_CREDIT);
    return KVS_OK;
}

/* ---- the table ---- */

static request **bucket_of(peer *p, uint64_t id)
{
    return &p->table[((id ^ p->core->seed) * UINT64_C(0x9e3779b97f4a7c15)) >> 56];
}

request *peer_find(const peer *p, uint64_t id)
{
    request *r = p->table[((id ^ p->core->seed) * UINT64_C(0x9e3779b97f4a7c15)) >> 56];

    while (r && r->id != id)
        r = r->chain;
    return r;
}

static void enter(request *r)
{
    peer *p = r->peer;
    request **b = bucket_of(p, r->id);

    r->chain = *b;
    *b = r;
    r->next = p->requests;
    if (r->next)
        r->next->prev = r;
    p->requests = r;
    p->n_in_flight++;
    p->n_out++;
    p->core->n_requests++;
    p->n_data += r->row->credit == CREDIT_DATA;
    p->n_control += r->row->credit == CREDIT_CONTROL;
}

static void leave(request *r)
{
    peer *p = r->peer;
    request **b = bucket_of(p, r->id);

    while (*b != r)
        b = &(*b)->chain;
    *b = r->chain;
    *(r->prev ? &r->prev->next : &p->requests) = r->next;
    if (r->next)
        r->next->prev = r->prev;
    p->n_out--;
    p->core->n_requests--;
    p->n_data -= r->row->credit == CREDIT_DATA;
    p->n_control -= r->row->credit == CREDIT_CONTROL;
    p->bytes_in_flight -= r->cost_bytes;
    p->request_bytes -= r->held_bytes;
    p->core->request_bytes -= r->held_bytes;
}

static void request_free(request *r)
{
    while (r->chunks) {
        request_chunk *next = r->chunks->next;

        free(r->chunks);
        r->chunks = next;
    }
    reply_destroy(r->reply);
    free(r);
}

/* ---- answers ---- */

/* Header, message, payload: the payload moves up behind the message's padding. */
static void finish_reply(reply *x, uint16_t op, uint64_t id, kvs_status s, const char *msg, const wire_out *payload)
{
    size_t msg_len = strnlen(msg, KVS_ERR_MSG_BYTES - 1);
    wire_out o = {x->bytes + WIRE_HEADER_BYTES, 0, 8 + KVS_ERR_MSG_BYTES, false};
    wire_header h = {.op = op, .status = (uint16_t)s, .id = id, .n_fds = (uint16_t)x->n_fds};

    wire_put_u32(&o, (uint32_t)msg_len);
    wire_put_u32(&o, 0);
    wire_put_bytes(&o, msg, msg_len);
    wire_put_pad8(&o);
    if (payload->len > 0)
        memmove(o.base + o.len, payload->base, payload->len);
    h.body_len = (uint32_t)(o.len + payload->len);
    wire_header_encode(&h, x->bytes);
    x->len = WIRE_HEADER_BYTES + h.body_len;
}

/* Room that was not needed is not kept until the client reads. */
static reply *fit(reply *x)
{
    const size_t need = sizeof(*x) + x->len;
    reply *y = x->held > 2 * need + REPLY_SLACK_BYTES ? malloc(need) : NULL;

    if (!y)
        return x;
    memcpy(y, x, need);
    y->held = need;
    free(x);
    return y;
}

static void drop_fds(reply *x)
{
    while (x->n_fds > 0)
        close(x->fds[--x->n_fds]);
}

static void send_or_drop(peer *p, reply *x)
{
    if (p->gone)
        reply_destroy(x);
    else
        p->ops->send(p->ud, x);
}

void request_answer(request *r, kvs_status s, const kvs_err *err)
{
    reply *x = r->reply;

    r->reply = NULL;
    r->answered = true;
    r->peer->n_in_flight--;
    metrics_answered(&r->peer->core->counts, r->row->op, s, thread_now_ns() - r->came_ns);
    core_due_remove(r->peer->core, r);
    if (s != KVS_OK && s != KVS_E_PARTIAL)
        drop_fds(x);
    finish_reply(x, r->row->op, r->id, s, err && s != KVS_OK && s != KVS_E_PARTIAL ? err->msg : "", &r->payload);
    send_or_drop(r->peer, fit(x));
}

/* A refusal of something that never became a request.  E_NO_MEMORY ends the connection: no reply can be made, and the
 * end counts as the answer. */
static kvs_status refuse(peer *p, const wire_header *h, uint64_t came_ns, kvs_status s, kvs_err *err)
{
    reply *x = malloc(sizeof(*x) + REPLY_HEAD_BYTES);
    wire_out none = {0};

    metrics_answered(&p->core->counts, h->op, s, thread_now_ns() - came_ns);
    if (!x)
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for the refusal of request %" PRIu64, h->id);
    *x = (reply){.held = sizeof(*x) + REPLY_HEAD_BYTES};
    finish_reply(x, h->op, h->id, s, err->msg, &none);
    send_or_drop(p, x);
    return KVS_OK;
}

kvs_status request_go(request *r, const request_ops *ops, kvs_err *err)
{
    kvs_status s = core_due_add(r->peer->core, r);

    if (s != KVS_OK)
        return kvs_fail(err, s, "request: no memory for its deadline");
    r->ops = ops;
    r->out = true;
    return KVS_OK;
}

static void answer_cancels(request *r)
{
    while (r->cancels) {
        request *c = r->cancels;
        wire_cancel_rep rep = {0};

        r->cancels = c->next_cancel;
        rep.outcome = r->outcome == KVS_OK || r->outcome == KVS_E_PARTIAL ? WIRE_CANCEL_FINISHED : WIRE_CANCEL_STOPPED;
        wire_put_cancel_rep(request_out(c), &rep);
        request_answer(c, KVS_OK, NULL);
        request_end(c);
    }
}

void request_end(request *r)
{
    peer *p = r->peer;

    core_due_remove(p->core, r);
    answer_cancels(r);
    leave(r);
    request_free(r);
    if (p->gone)
        peer_drained(p);
}

/* ---- counters ---- */

static bool is_after(uint32_t counter)
{
    return (counter & ~WIRE_COUNTER_DAEMON) < WIRE_COUNTERS;
}

kvs_status counter_check_after(uint32_t counter, uint64_t value, kvs_err *err)
{
    if (counter == WIRE_NONE32)
        return KVS_OK;
    if (!is_after(counter))
        return kvs_fail(err, KVS_E_RANGE, "after_counter: %u is not below %d", counter, WIRE_COUNTERS);
    if (value > WIRE_COUNTER_MAX)
        return kvs_fail(err, KVS_E_RANGE, "after_value: %" PRIu64 " is not below 2^62", value);
    return KVS_OK;
}

kvs_status counter_check_signal(uint32_t counter, uint64_t value, kvs_err *err)
{
    if (counter == WIRE_NONE32)
        return KVS_OK;
    if (counter >= WIRE_COUNTERS)
        return kvs_fail(err, KVS_E_RANGE, "signal_counter: %u is not below %d", counter, WIRE_COUNTERS);
    if (value > WIRE_COUNTER_MAX)
        return kvs_fail(err, KVS_E_RANGE, "signal_value: %" PRIu64 " is not below 2^62", value);
    return KVS_OK;
}

void job_fill(job *j, peer *p, uint32_t after, uint64_t after_value, uint32_t signal, uint64_t signal_value)
{
    j->tenant = p->tenant;
    j->counters = p->counters;
    j->after_counter = after;
    j->after_value = after_value;
    j->signal_counter = signal;
    j->signal_value = signal_value;
}

void counter_signal(peer *p, uint32_t counter, uint64_t value, kvs_status s)
{
    job j;

    if (counter >= WIRE_COUNTERS || value > WIRE_COUNTER_MAX)
        return;
    job_init(&j, NULL);
    job_fill(&j, p, WIRE_NONE32, 0, counter, value);
    job_signal(&j, s);
}

/* ---- admission ---- */

static kvs_status check_peer(const peer *p, const op_row *row, const wire_header *h, kvs_err *err)
{
    const config *cfg = p->core->config;

    if (p->info.is_admin && !(row->who & OP_ADMIN))
        return kvs_fail(err, KVS_E_DENIED,
                        "op: this is the admin socket; %s is for engines, by socket.path or the path of a tenant",
                        wire_op_name(row->op));
    if (!p->info.is_admin && !(row->who & OP_CLIENT))
        return kvs_fail(err, KVS_E_DENIED, "op: %s is for the admin socket; this is that of tenant %s",
                        wire_op_name(row->op), tenant_name(cfg, p->tenant));
    if (!p->info.is_admin && !tenant_may_ask(cfg, p->tenant, row->group))
        return kvs_fail(err, KVS_E_DENIED, "op: %s is not allowed to tenant %s", wire_op_name(row->op),
                        tenant_name(cfg, p->tenant));
    if (h->n_fds > 0 && !(row->flags & OP_TAKES_FDS))
        return kvs_fail(err, KVS_E_PROTO, "n_fds: %u descriptors came with %s, which takes none", h->n_fds,
                        wire_op_name(row->op));
    if (peer_find(p, h->id))
        return kvs_fail(err, KVS_E_INVALID, "id: %" PRIu64 " is still in use by an earlier request", h->id);
    return KVS_OK;
}

static kvs_status check_core(const peer *p, const op_row *row, kvs_err *err)
{
    const core *c = p->core;

    if (c->lost != KVS_OK && !(row->flags & OP_WHEN_LOST))
        return kvs_fail(err, c->lost, "%s", kvs_status_text(c->lost));
    if (c->paused && !p->info.is_admin && !(row->flags & (OP_WHEN_PAUSED | OP_WHEN_DRAINING)))
        return kvs_fail(err, KVS_E_STATE, "the operator has drained the daemon: it takes no new work");
    if (c->draining && !(row->flags & OP_WHEN_DRAINING))
        return kvs_fail(err, KVS_E_STATE, "the daemon is shutting down");
    return KVS_OK;
}

static uint64_t deadline_of(const core *c, uint64_t asked_us)
{
    uint64_t most = (uint64_t)c->config->max_deadline_ms * 1000;

    if (asked_us == 0)
        asked_us = (uint64_t)c->config->default_deadline_ms * 1000;
    return c->now_us + (asked_us < most ? asked_us : most);
}

static kvs_status request_new(peer *p, const op_row *row, frame *f, uint64_t came_ns, request **ret, kvs_err *err)
{
    request *r = calloc(1, sizeof(*r));
    kvs_status s;

    if (!r)
        return kvs_fail(err, KVS_E_NO_MEMORY, "request %" PRIu64 ": out of memory", f->head.id);
    r->peer = p;
    r->row = row;
    r->id = f->head.id;
    r->came_ns = came_ns;
    r->frame = f;
    r->deadline_us = deadline_of(p->core, f->head.deadline_us);
    s = reserve(r, row->reply_bytes, err);
    if (s != KVS_OK) {
        free(r);
        return s;
    }
    enter(r);
    hold(r, sizeof(*r));
    *ret = r;
    return KVS_OK;
}

static void signal_refusal(peer *p, const op_row *row, const frame *f, kvs_status s)
{
    wire_in in = {.base = f->body, .len = f->head.body_len};

    if (row->refused && p->counters && f->head.body_len >= row->fixed_bytes)
        row->refused(p, &in, s);
}

static kvs_status run(request *r, const frame *f, kvs_err *err)
{
    wire_in in = {.base = f->body, .len = f->head.body_len};
    kvs_status s = draw_place(r, err);

    if (s != KVS_OK)
        return s;
    if (f->head.body_len < r->row->fixed_bytes)
        return kvs_fail(err, KVS_E_PROTO, "body_len: %u is below the %u bytes of %s", f->head.body_len,
                        r->row->fixed_bytes, wire_op_name(r->row->op));
    s = r->row->run(r, &in, err);
    if (s == KVS_E_NO_MEMORY && r->lacked_bytes > 0) {
        kvs_status why = check_memory(r, r->lacked_bytes, err);

        return why != KVS_OK ? why : s;
    }
    return s;
}

/* Run one request whose peer may send it; a failure is a refusal. */
static kvs_status serve(peer *p, const op_row *row, frame *f, uint64_t came_ns, kvs_err *err)
{
    request *r = NULL;
    kvs_status s = request_new(p, row, f, came_ns, &r, err);

    if (s != KVS_OK)
        return s;
    s = run(r, f, err);
    r->frame = NULL;
    if (r->out)
        return KVS_OK;
    if (s != KVS_OK && s != KVS_E_PARTIAL) {
        signal_refusal(p, row, f, s);
        r->payload.len = 0;
    }
    request_answer(r, s, err);
    request_end(r);
    return KVS_OK;
}

static void close_rest(frame *f)
{
    for (uint32_t i = 0; i < f->head.n_fds; i++)
        if (f->fds[i] >= 0)
            disposal_close(f->fds[i]);
    f->head.n_fds = 0;
}

/* A stranger: told so once, whatever it asks for, and then closed. */
static kvs_status turn_away(peer *p, frame *f, uint64_t came_ns, kvs_err *err)
{
    (void)kvs_fail(err, KVS_E_DENIED, "%s", p->info.denied);
    if (refuse(p, &f->head, came_ns, KVS_E_DENIED, err) != KVS_OK)
        return KVS_E_NO_MEMORY;
    return KVS_E_DENIED;
}

static kvs_status dispatch(peer *p, frame *f, kvs_err *err)
{
    const op_row *row = op_find(f->head.op);
    uint64_t came_ns = thread_now_ns();
    kvs_status s;

    metrics_received(&p->core->counts);
    if (p->info.denied[0] != '\0')
        return turn_away(p, f, came_ns, err);
    if (!p->hello && f->head.op != WIRE_HELLO) {
        (void)kvs_fail(err, KVS_E_STATE, "op: %u (%s) before HELLO", f->head.op, row ? wire_op_name(row->op) : "none");
        return refuse(p, &f->head, came_ns, KVS_E_STATE, err);
    }
    if (!row) {
        (void)kvs_fail(err, KVS_E_UNSUPPORTED, "op: %u is no operation of this daemon", f->head.op);
        return refuse(p, &f->head, came_ns, KVS_E_UNSUPPORTED, err);
    }
    s = check_peer(p, row, &f->head, err);
    if (s == KVS_OK)
        s = check_core(p, row, err);
    if (s == KVS_OK)
        s = serve(p, row, f, came_ns, err);
    if (s == KVS_OK)
        return s;
    signal_refusal(p, row, f, s);
    return refuse(p, &f->head, came_ns, s, err);
}

kvs_status peer_request(peer *p, frame *f, uint64_t now_us, kvs_err *err)
{
    kvs_err own = {0};
    kvs_status s;

    p->core->now_us = now_us;
    s = dispatch(p, f, &own);
    close_rest(f);
    core_rest(p->core);
    if (s != KVS_OK && err)
        *err = own;
    return s;
}
