/* Requests in flight: credit, sending, and reading in turns.
 *
 *   call_begin -> (body is written) -> call_submit: wait for credit and for the socket, send -> FLYING
 *   any waiter reads: frame -> table by id -> answer_decode -> DONE, owner woken
 *   owner gives up -> the line in the table stays without owner (orphan) until its reply comes
 */
#include "proto/client/internal.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

enum { NO_LINE = UINT32_MAX };

bool client_is_child(const kvs_client *c)
{
    return *(volatile const uint32_t *)c->alive != 1;
}

kvs_status client_check_own(const kvs_client *c, kvs_err *err)
{
    return client_is_child(c)
               ? kvs_fail(err, KVS_E_STATE, "this handle belongs to the parent process; connect again after fork")
               : KVS_OK;
}

/* ---- the table ---- */

kvs_status client_table(kvs_client *c, uint32_t n, kvs_err *err)
{
    flight *t = calloc(n, sizeof *t);

    if (t == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "credit for %u requests: no memory for their table", n);
    free(c->table);
    c->table = t;
    c->table_n = n;
    for (uint32_t i = 0; i < n; i++)
        t[i].next_free = i + 1 < n ? i + 1 : (uint32_t)NO_LINE;
    c->free_head = 0;
    c->data_used = c->control_used = c->orphans = 0;
    c->bytes_used = 0;
    memset(c->entry_used, 0, sizeof c->entry_used);
    return KVS_OK;
}

static bool credit_is_free(const kvs_client *c, const call *k)
{
    if (c->free_head == NO_LINE)
        return false;
    if (k->control)
        return c->control_used < c->server.control_requests;
    return c->data_used < c->server.credit_requests && k->cost <= c->server.credit_bytes - c->bytes_used;
}

static flight *line_take(kvs_client *c, const call *k)
{
    uint32_t i = c->free_head;
    flight *fl = &c->table[i];

    c->free_head = fl->next_free;
    *fl = (flight){.r = k->nobody ? NULL : k->r,
                   .id = (++c->seq << CLIENT_FLIGHT_BITS) | i,
                   .cost = k->cost,
                   .region_id = k->region_id,
                   .entry = k->entry,
                   .op = k->r->op,
                   .used = true,
                   .control = k->control,
                   .chosen = k->chosen,
                   .target = k->target};
    if (k->control)
        c->control_used++;
    else
        c->data_used++;
    c->bytes_used += k->cost;
    c->orphans += k->nobody;
    return fl;
}

static void line_free(kvs_client *c, flight *fl)
{
    if (fl->control)
        c->control_used--;
    else
        c->data_used--;
    c->bytes_used -= fl->cost;
    if (fl->r == NULL)
        c->orphans--;
    if (fl->entry != WIRE_NONE32)
        c->entry_used[fl->entry] = false;
    fl->used = false;
    fl->next_free = c->free_head;
    c->free_head = (uint32_t)(fl - c->table);
}

static flight *line_find(kvs_client *c, uint64_t id)
{
    uint32_t i = (uint32_t)(id & ((1u << CLIENT_FLIGHT_BITS) - 1));

    return i < c->table_n && c->table[i].used && c->table[i].id == id ? &c->table[i] : NULL;
}

bool client_region_in_flight(const kvs_client *c, const kvs_region *r)
{
    bool found = false;

    for (uint32_t i = 0; i < c->table_n && !found; i++)
        found = c->table[i].used && c->table[i].r != NULL && c->table[i].r->region == r;
    return found;
}

/* ---- waking ---- */

static void wake(kvs_client *c, const kvs_request *r)
{
    for (waiter *w = c->waiters; w != NULL; w = w->next)
        if (w->r == r)
            (void)pthread_cond_signal(&w->cond);
}

void client_wake_general(kvs_client *c)
{
    wake(c, NULL);
}

void client_wake_keeper(kvs_client *c)
{
    uint64_t one = 1;

    (void)!write(c->wake_fd, &one, sizeof one);
}

void client_poke(kvs_client *c)
{
    uint64_t one = 1;

    if (c->reading)
        (void)!write(c->poke_fd, &one, sizeof one);
}

void client_complete(kvs_client *c, kvs_request *r, kvs_status s)
{
    r->status = s;
    r->err.status = s;
    r->state = REQUEST_DONE;
    pace_end(&c->pace, r, clock_ns());
    if (r->pipelined) {
        r->next_done = NULL;
        r->queued = true;
        if (c->done_tail != NULL)
            c->done_tail->next_done = r;
        else
            c->done_head = r;
        c->done_tail = r;
    }
    wake(c, r);
}

void client_lost(kvs_client *c, const char *fmt, ...)
{
    va_list ap;

    if (c->state != LINK_UP)
        return;
    va_start(ap, fmt);
    (void)vsnprintf(c->why, sizeof c->why, fmt, ap);
    va_end(ap);
    c->state = LINK_DOWN;
    c->server.up = false;
    (void)shutdown(c->fd, SHUT_RDWR);
    for (uint32_t i = 0; i < c->table_n; i++) {
        kvs_request *r = c->table[i].r;

        if (!c->table[i].used)
            continue;
        line_free(c, &c->table[i]);
        if (r == NULL)
            continue;
        (void)kvs_fail(&r->err, KVS_E_AWAY, "%s", c->why);
        answer_spread(r, KVS_E_AWAY);
        client_complete(c, r, KVS_E_AWAY);
    }
    counters_abort(c);
    chores_free(c);
    if (c->watch_mask != 0)
        c->events_lost++;
    for (waiter *w = c->waiters; w != NULL; w = w->next)
        (void)pthread_cond_signal(&w->cond);
    client_wake_keeper(c);
}

/* ---- reading in turns ---- */

/* Tell the daemon that nobody wants the answer; it may come late or never: nothing depends on it. */
static void cancel_quietly(kvs_client *c, flight *fl)
{
    uint8_t body[WIRE_cancel_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_cancel_req q = {.target = fl->id};

    fl->cancelled = true;
    wire_put_cancel_req(&o, &q);
    chore_add(c, WIRE_CANCEL, &o);
}

/* The reply is in.  A job that runs on past its deadline keeps its line, and so its credit, until its CANCEL is answered. */
static void line_answered(kvs_client *c, flight *fl, kvs_status s, bool runs_on)
{
    flight *target = fl->op == WIRE_CANCEL && fl->target != 0 ? line_find(c, fl->target) : NULL;

    if (target != NULL && target->settling)
        line_free(c, target);
    if (fl->r == NULL && fl->cancelled && s == KVS_E_DEADLINE) {
        fl->settling = true;
    } else if (runs_on) {
        fl->r = NULL;
        c->orphans++;
        fl->settling = true;
        cancel_quietly(c, fl);
    } else {
        line_free(c, fl);
    }
}

static void dispatch(kvs_client *c, frame *f)
{
    flight *fl = NULL, line;
    kvs_request *r;
    wire_in in;
    kvs_status s = (kvs_status)f->head.status;
    bool ok;

    if (f->head.op == WIRE_EVENT) {
        in = (wire_in){.base = f->body, .len = f->head.body_len}; /* no message head: it is no reply */
        if (!event_take(c, &in))
            client_lost(c, "the daemon sent a malformed event");
        frame_close_fds(f);
        return;
    }
    fl = line_find(c, f->head.id);
    if (fl == NULL || fl->op != f->head.op) {
        client_lost(c, "the daemon sent a reply (op %u, id %llu) that nothing asked for", f->head.op,
                    (unsigned long long)f->head.id);
        frame_close_fds(f);
        return;
    }
    if (fl->settling) {
        client_lost(c, "the daemon answered request %llu twice", (unsigned long long)f->head.id);
        frame_close_fds(f);
        return;
    }
    line = *fl;
    r = fl->r;
    ok = reply_head(f, &in, r != NULL ? &r->err : NULL);
    if (r == NULL) {
        ok = ok && answer_orphan(c, &line, s, &in);
    } else {
        ok = ok && answer_decode(r, s, &in, f);
        if (!ok) {
            s = kvs_fail(&r->err, KVS_E_PROTO, "%s: the daemon's reply is malformed", wire_op_name(r->op));
            answer_spread(r, s);
        } else if (r->err.status != KVS_OK) {
            s = r->err.status; /* well formed, but of no use here: the decoder has said why */
        }
        client_complete(c, r, s);
    }
    frame_close_fds(f);
    line_answered(c, fl, s, ok && r != NULL && s == KVS_E_DEADLINE && r->runs_on);
    if (!ok)
        client_lost(c, "the daemon sent a malformed reply to %s", wire_op_name(line.op));
    client_wake_general(c);
}

/* The sender's role is ours: push out what is left of an unfinished frame.  Bytes, or -errno. */
static long flush_out(kvs_client *c)
{
    long n = link_send(c->fd, c->out + c->out_sent, c->out_len - c->out_sent, NULL, 0);

    if (n > 0)
        c->out_sent += (size_t)n;
    if (c->out_sent == c->out_len)
        c->out_len = c->out_sent = 0;
    return n;
}

static void take_in(kvs_client *c, kvs_status s, kvs_err *err)
{
    kvs_err why = {KVS_OK, ""};
    frame f;

    while (c->state == LINK_UP && frame_next(&c->reader, &f, &why))
        dispatch(c, &f);
    c->reading = false;
    if (c->state != LINK_UP)
        client_wake_general(c); /* the keeper waits for the role to be free */
    else if (c->reader.broken != KVS_OK)
        client_lost(c, "%s", why.msg[0] != '\0' ? why.msg : err->msg);
    else if (s != KVS_OK && s != KVS_E_BUSY)
        client_lost(c, "%s", err->msg);
}

void client_take_read(kvs_client *c)
{
    kvs_err err = {KVS_OK, ""};

    take_in(c, KVS_E_BUSY, &err);
}

static void take_poke(kvs_client *c)
{
    uint64_t n;

    (void)!read(c->poke_fd, &n, sizeof n);
}

/* poll_until for a reader who does not sleep when the answer is due. */
static int poll_awake(struct pollfd *p, unsigned n, const due *d, int64_t deadline)
{
    int got = 0;

    for (uint32_t i = 0; i < d->n && got == 0 && d->at[i].to < deadline; i++)
        if (clock_ns() < d->at[i].to && (got = poll_until(p, n, d->at[i].from)) == 0)
            while (clock_ns() < d->at[i].to && (got = poll_until(p, n, 0)) == 0)
                ;
    return got != 0 ? got : poll_until(p, n, deadline);
}

/* Read once, as the only reader.  out_wanted: also come back when the socket takes bytes.  r: whose answer is wanted, or
 * NULL. */
static void lead(kvs_client *c, const kvs_request *r, bool out_wanted, int64_t deadline)
{
    const due when = r != NULL ? r->due : (due){.n = 0};
    bool flush = c->out_len > 0 && !c->sending;
    struct pollfd p[2] = {{.fd = c->fd, .events = POLLIN}, {.fd = c->poke_fd, .events = POLLIN}};
    kvs_err err = {KVS_OK, ""};
    kvs_status s = KVS_E_BUSY;

    c->reading = true;
    if (flush)
        c->sending = true;
    if (flush || out_wanted)
        p[0].events |= POLLOUT;
    (void)pthread_mutex_unlock(&c->mu);
    if (poll_awake(p, 2, &when, deadline) > 0) {
        if (p[1].revents != 0)
            take_poke(c);
        if (flush && (p[0].revents & POLLOUT))
            (void)flush_out(c); /* an error shows when the socket is read */
        if (p[0].revents & ~POLLOUT)
            s = link_recv(p[0].fd, &c->reader, &err);
    }
    (void)pthread_mutex_lock(&c->mu);
    if (flush) {
        c->sending = false;
        client_wake_general(c);
    }
    take_in(c, s, &err);
}

/* may_lead: will read if it is woken because nobody does. */
static void sleep_until(kvs_client *c, const kvs_request *r, bool may_lead, int64_t deadline)
{
    struct timespec t = {.tv_sec = deadline / 1000000000, .tv_nsec = deadline % 1000000000};
    waiter w = {.next = c->waiters, .r = r, .may_lead = may_lead};

    if (pthread_cond_init(&w.cond, &c->condattr) != 0)
        return;
    if (w.next != NULL)
        w.next->prev = &w;
    c->waiters = &w;
    (void)pthread_cond_timedwait(&w.cond, &c->mu, &t);
    if (w.prev != NULL)
        w.prev->next = w.next;
    else
        c->waiters = w.next;
    if (w.next != NULL)
        w.next->prev = w.prev;
    (void)pthread_cond_destroy(&w.cond);
}

bool client_turn(kvs_client *c, const kvs_request *r, int64_t deadline)
{
    if (clock_ns() >= deadline)
        return false;
    if (c->reading || c->state != LINK_UP)
        sleep_until(c, r, true, deadline);
    else
        lead(c, r, false, deadline);
    return true;
}

bool client_turn_for_any(kvs_client *c, int64_t deadline)
{
    int64_t now = clock_ns(), slice = now + 100000000;

    if (now >= deadline)
        return false;
    (void)client_turn(c, NULL, slice < deadline ? slice : deadline);
    return true;
}

void client_read_once(kvs_client *c)
{
    if (!c->reading && c->state == LINK_UP)
        lead(c, NULL, false, 0);
}

/* Whoever has read and does not go on to do so. */
static void pass_reading_on(kvs_client *c)
{
    waiter *w = c->reading || c->state != LINK_UP ? NULL : c->waiters;

    while (w != NULL && !w->may_lead)
        w = w->next;
    if (w != NULL)
        (void)pthread_cond_signal(&w->cond);
}

void client_leave(kvs_client *c)
{
    pass_reading_on(c);
    (void)pthread_mutex_unlock(&c->mu);
}

/* ---- sending ---- */

/* The socket is full.  Its peer may be waiting for us to read: do that if nobody does. */
static void await_writable(kvs_client *c, int64_t deadline)
{
    struct pollfd p = {.fd = c->fd, .events = POLLOUT};
    int64_t slice = clock_ns() + 10000000; /* the reader may leave meanwhile */

    if (deadline < slice)
        slice = deadline;
    (void)pthread_mutex_lock(&c->mu);
    if (!c->reading && c->state == LINK_UP) {
        lead(c, NULL, true, deadline);
        client_leave(c);
        return;
    }
    (void)pthread_mutex_unlock(&c->mu);
    (void)poll_until(&p, 1, slice);
}

/* The caller's time is up in the middle of a frame: whoever comes next finishes it. */
static kvs_status stash(kvs_client *c, const uint8_t *p, size_t n, kvs_err *err)
{
    free(c->out);
    c->out = malloc(n);
    if (c->out == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "rest of a frame: no memory for %zu bytes", n);
    memcpy(c->out, p, n);
    c->out_len = n;
    c->out_sent = 0;
    return KVS_OK;
}

static kvs_status pause_for_fds(int64_t deadline, kvs_err *err)
{
    int64_t until = clock_ns() + 5000000;

    if (until >= deadline)
        return kvs_fail(err, KVS_E_LIMIT,
                        "too many descriptors are in flight: the daemon does not read them and "
                        "RLIMIT_NOFILE is reached (ETOOMANYREFS)");
    (void)poll_until(NULL, 0, until);
    return KVS_OK;
}

/* Some of a frame, behind what is left of an earlier one.  Bytes, or -errno. */
static long push_some(kvs_client *c, const call *k, size_t total, size_t sent)
{
    long n = c->out_len > 0 ? flush_out(c) : 0;

    if (n < 0)
        return n; /* a connection that is gone is no socket that is full */
    if (c->out_len > 0)
        return -EAGAIN;
    return link_send(c->fd, k->frame + sent, total - sent, k->fds, sent == 0 ? k->n_fds : 0);
}

/* Put one frame on the socket.  The sending role is ours, mu is not held.  KVS_OK also if the rest was stashed.
 * *ret_sent tells whether the daemon may have seen any of it. */
static kvs_status push(kvs_client *c, const call *k, size_t total, size_t *ret_sent, kvs_err *err)
{
    size_t sent = 0;

    while (sent < total) {
        long n = push_some(c, k, total, sent);
        kvs_status s;

        *ret_sent = sent;
        if (n >= 0) {
            sent += (size_t)n;
        } else if (n == -ETOOMANYREFS) {
            s = pause_for_fds(k->deadline, err);
            if (s != KVS_OK)
                return s;
        } else if (n != -EAGAIN) {
            return kvs_fail(err, KVS_E_AWAY, "send: %s", strerror((int)-n));
        } else if (clock_ns() >= k->deadline) {
            if (sent > 0)
                return stash(c, k->frame + sent, total - sent, err);
            return kvs_fail(err, KVS_E_DEADLINE, "the daemon took no request in time; nothing was sent");
        } else {
            await_writable(c, k->deadline);
        }
    }
    return KVS_OK;
}

static kvs_status await_credit(kvs_client *c, const call *k, kvs_err *err)
{
    for (;;) {
        if (c->state != LINK_UP)
            return kvs_fail(err, KVS_E_AWAY, "%s", c->why);
        if (k->generation != c->server.generation)
            return kvs_fail(err, KVS_E_AWAY, "the connection was replaced while the request was made");
        if (!k->control && k->cost > c->server.credit_bytes)
            return kvs_fail(err, KVS_E_LIMIT, "%s: %llu bytes of blocks are more than the credit of %llu",
                            wire_op_name(k->r->op), (unsigned long long)k->cost,
                            (unsigned long long)c->server.credit_bytes);
        if (!c->sending && credit_is_free(c, k))
            return KVS_OK;
        if (clock_ns() < k->deadline) {
            if (c->sending) /* who sends also reads, if the socket is full */
                sleep_until(c, NULL, false, k->deadline);
            else
                (void)client_turn_for_any(c, k->deadline);
            continue;
        }
        if (credit_is_free(c, k))
            return kvs_fail(err, KVS_E_DEADLINE, "the daemon took no request in time; nothing was sent");
        return kvs_fail(err, KVS_E_BUSY, "no credit became free in time (%u of %u requests are in flight)",
                        k->control ? c->control_used : c->data_used,
                        k->control ? c->server.control_requests : c->server.credit_requests);
    }
}

/* Ours must not be the only deadline: what the daemon answers itself leaves nothing behind. */
static uint64_t peer_deadline_us(int64_t deadline)
{
    int64_t left = (deadline - clock_ns()) / 1000, margin = left / 8 < 2000 ? left / 8 : 2000;

    return left - margin > 0 ? (uint64_t)(left - margin) : 1;
}

/* mu is held, and again on return. */
static kvs_status submit_locked(call *k, kvs_err *err)
{
    kvs_client *c = k->c;
    size_t total = WIRE_HEADER_BYTES + k->out.len, sent = 0;
    wire_header h = {.op = k->r->op, .body_len = (uint32_t)k->out.len, .n_fds = (uint16_t)k->n_fds};
    kvs_status s = await_credit(c, k, err);
    uint32_t entry;
    uint64_t id;
    flight *fl;

    if (s != KVS_OK)
        return s;
    fl = line_take(c, k);
    entry = k->entry;
    k->entry = WIRE_NONE32; /* the line has it */
    id = h.id = k->r->id = fl->id;
    k->r->state = REQUEST_FLYING;
    pace_begin(&c->pace, k->r, k->cost, clock_ns());
    c->sending = true;
    h.deadline_us = peer_deadline_us(k->deadline);
    wire_header_encode(&h, k->frame);
    client_leave(c); /* it may have read until there was credit, and sending may take long */
    s = push(c, k, total, &sent, err);
    (void)pthread_mutex_lock(&c->mu);
    c->sending = false;
    client_wake_general(c);
    if (s == KVS_OK)
        return s;
    fl = line_find(c, id);                            /* none: it was answered, as the connection was lost meanwhile */
    if (s != KVS_E_AWAY && sent == 0 && fl != NULL) { /* nothing of it left us: as if it had never been */
        fl->entry = WIRE_NONE32;
        line_free(c, fl);
        k->entry = entry;
        k->r->state = REQUEST_NEW;
        return s;
    }
    client_lost(c, "%s", err != NULL ? err->msg : "the connection to the daemon broke");
    return KVS_OK; /* the request is answered: E_AWAY */
}

/* ---- calls ---- */

kvs_status call_begin(call *k, kvs_client *c, kvs_request *r, uint16_t op, uint64_t body_cap, uint32_t timeout_ms,
                      kvs_err *err)
{
    uint32_t max_body;
    kvs_status s;

    s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    k->c = c;
    k->r = r;
    k->cost = k->target = 0;
    k->fds = NULL;
    k->n_fds = k->region_id = 0;
    k->entry = WIRE_NONE32;
    k->control = k->chosen = k->nobody = false;
    k->deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    r->c = c;
    r->op = op;
    (void)pthread_mutex_lock(&c->mu);
    k->generation = c->server.generation;
    max_body = c->server.max_body;
    if (c->state != LINK_UP)
        s = kvs_fail(err, KVS_E_AWAY, "%s", c->why);
    (void)pthread_mutex_unlock(&c->mu);
    if (s != KVS_OK)
        return s;
    if (body_cap > max_body)
        return kvs_fail(err, KVS_E_LIMIT,
                        "%s: a body of %llu bytes is more than the daemon's limit of %u; send fewer items at a time",
                        wire_op_name(op), (unsigned long long)body_cap, max_body);
    k->frame = k->small;
    if (WIRE_HEADER_BYTES + body_cap > sizeof k->small)
        k->frame = malloc(WIRE_HEADER_BYTES + (size_t)body_cap);
    if (k->frame == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "%s: no memory for %llu bytes", wire_op_name(op),
                        (unsigned long long)body_cap);
    k->out = (wire_out){.base = k->frame + WIRE_HEADER_BYTES, .cap = (size_t)body_cap};
    return KVS_OK;
}

/* A stream waits for an answer that will never come. */
static void let_stream_go(call *k)
{
    kvs_client *c = k->c;

    (void)pthread_mutex_lock(&c->mu);
    stream_unjoin(c, k->generation, (kvs_mark){.counter = k->entry, .value = k->entry_value}, KVS_E_CANCELLED);
    (void)pthread_mutex_unlock(&c->mu);
    k->entry = WIRE_NONE32;
}

void call_drop(call *k)
{
    if (k->entry != WIRE_NONE32)
        let_stream_go(k);
    if (k->frame != k->small)
        free(k->frame);
    k->frame = k->small;
}

static kvs_status call_check(const call *k, kvs_err *err)
{
    return k->out.full ? kvs_fail(err, KVS_E_STATE, "%s: the body outgrew its own size", wire_op_name(k->r->op))
                       : KVS_OK;
}

kvs_status call_submit(call *k, kvs_err *err)
{
    kvs_err local = {KVS_OK, ""};
    kvs_status s = call_check(k, &local);

    if (s == KVS_OK) {
        (void)pthread_mutex_lock(&k->c->mu);
        s = submit_locked(k, &local);
        client_leave(k->c);
    }
    call_drop(k);
    return s == KVS_OK ? s : kvs_fail(err, s, "%s", local.msg);
}

kvs_status call_post(call *k)
{
    k->nobody = true;
    return call_submit(k, NULL);
}

void client_abandon(kvs_client *c, kvs_request *r)
{
    flight *fl = line_find(c, r->id);

    if (fl == NULL)
        return;
    fl->r = NULL;
    c->orphans++;
    if (!fl->control)
        cancel_quietly(c, fl);
}

bool client_is_settling(kvs_client *c, uint64_t id)
{
    const flight *fl = line_find(c, id);

    return c->state == LINK_UP && fl != NULL && fl->settling;
}

kvs_status call_run(call *k, kvs_err *err)
{
    kvs_client *c = k->c;
    kvs_request *r = k->r;
    kvs_err local = {KVS_OK, ""};
    kvs_status s = call_check(k, &local);

    (void)pthread_mutex_lock(&c->mu);
    if (s == KVS_OK)
        s = submit_locked(k, &local);
    if (s == KVS_OK) {
        while (r->state != REQUEST_DONE && client_turn(c, r, k->deadline))
            ;
        if (r->state == REQUEST_DONE) {
            s = r->status;
            local = r->err;
        } else {
            client_abandon(c, r);
            s = kvs_fail(&local, KVS_E_DEADLINE, "%s: no answer in time", wire_op_name(r->op));
            answer_spread(r, KVS_E_BUSY);
        }
    } else {
        answer_spread(r, s);
    }
    client_leave(c);
    call_drop(k);
    return s == KVS_OK ? s : kvs_fail(err, s, "%s", local.msg[0] != '\0' ? local.msg : kvs_status_text(s));
}

kvs_status request_new(kvs_request **ret, kvs_err *err)
{
    kvs_request *r = calloc(1, sizeof *r);

    if (r == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "request: no memory");
    r->pipelined = true;
    *ret = r;
    return KVS_OK;
}

void request_enlist(kvs_request *r, kvs_client *c)
{
    r->c = c;
    (void)pthread_mutex_lock(&c->mu);
    r->next = c->all;
    if (r->next != NULL)
        r->next->prev = r;
    c->all = r;
    (void)pthread_mutex_unlock(&c->mu);
}

kvs_status request_create(kvs_request **ret, kvs_client *c, kvs_err *err)
{
    kvs_status s = request_new(ret, err);

    if (s == KVS_OK)
        request_enlist(*ret, c);
    return s;
}

static void unqueue(kvs_client *c, kvs_request *r)
{
    kvs_request *prev = NULL;

    for (kvs_request *q = c->done_head; q != NULL; prev = q, q = q->next_done) {
        if (q != r)
            continue;
        if (prev != NULL)
            prev->next_done = r->next_done;
        else
            c->done_head = r->next_done;
        if (c->done_tail == r)
            c->done_tail = prev;
        break;
    }
    r->queued = false;
}

void request_destroy(kvs_request *r)
{
    kvs_client *c = r->c;

    (void)pthread_mutex_lock(&c->mu);
    if (r->queued)
        unqueue(c, r);
    if (r->prev != NULL)
        r->prev->next = r->next;
    else
        c->all = r->next;
    if (r->next != NULL)
        r->next->prev = r->prev;
    (void)pthread_mutex_unlock(&c->mu);
    free(r);
}
