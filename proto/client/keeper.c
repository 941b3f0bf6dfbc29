/* The keeper: sees the end of a connection, connects again, and tells the new daemon what the old one knew.
 *
 *   UP: asleep (hang-up or chores) --hang-up--> last replies are read --> DOWN: roles given back, socket closed
 *   ^--- published <-- namespaces, regions, watch registered <-- HELLO <-- connect <-- pause with jitter --'
 */
#include "proto/client/internal.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STEADY_NS = 2000000000, CHORE_TIMEOUT_MS = 1000, CHORE_PAUSE_MS = 20, MAX_CHORES = 4096 };

/* ---- chores ---- */

/* Of CANCELs there are no more than lines in the table. */
static bool has_room(const kvs_client *c, uint16_t op)
{
    return c->n_chores < MAX_CHORES || op == WIRE_CANCEL;
}

void chore_add(kvs_client *c, uint16_t op, const wire_out *body)
{
    chore *h = body->full || !has_room(c, op) || c->state != LINK_UP ? NULL : malloc(sizeof *h + body->len);

    if (h == NULL)
        return; /* the daemon's own deadlines, or the end of the connection, clean up instead */
    h->next = NULL;
    h->generation = c->server.generation;
    h->op = op;
    h->len = (uint32_t)body->len;
    memcpy(h->body, body->base, body->len);
    *(c->chores != NULL ? &c->last_chore->next : &c->chores) = h;
    c->last_chore = h;
    c->n_chores++;
    client_wake_keeper(c);
}

void chores_free(kvs_client *c)
{
    while (c->chores != NULL) {
        chore *h = c->chores;

        c->chores = h->next;
        free(h);
    }
    c->n_chores = 0;
}

static bool has_credit(const kvs_client *c, const chore *h)
{
    if (h->op == WIRE_CANCEL)
        return c->control_used < c->server.control_requests;
    return c->data_used < c->server.credit_requests;
}

/* mu is held.  The first that need not wait, or the first; NULL: there is none. */
static chore *chore_take(kvs_client *c)
{
    chore *before = NULL, *h = c->chores;

    while (h != NULL && !has_credit(c, h)) {
        before = h;
        h = h->next;
    }
    if (h == NULL) {
        before = NULL;
        h = c->chores;
    }
    if (h == NULL)
        return NULL;
    *(before != NULL ? &before->next : &c->chores) = h->next;
    if (c->last_chore == h)
        c->last_chore = before;
    c->n_chores--;
    return h;
}

/* mu is held.  It could not be sent, but must be: what waits for its effect would wait for ever. */
static void chore_put_back(kvs_client *c, chore *h)
{
    if (c->state != LINK_UP || h->generation != c->server.generation) {
        free(h);
        return;
    }
    h->next = c->chores;
    c->last_chore = h->next != NULL ? c->last_chore : h;
    c->chores = h;
    c->n_chores++;
}

/* False: there was no credit in time, or the daemon does not read. */
static bool chore_run(kvs_client *c, const chore *h)
{
    kvs_request r = {0};
    kvs_status s;
    call k;

    if (call_begin(&k, c, &r, h->op, h->len, CHORE_TIMEOUT_MS, NULL) != KVS_OK)
        return true;
    memcpy(k.out.base, h->body, h->len);
    k.out.len = h->len;
    k.control = h->op == WIRE_CANCEL;
    if (k.control)
        k.target = wire_at_u64(h->body, 0);
    k.generation = h->generation; /* its ids mean nothing to another connection */
    s = call_post(&k);
    return s != KVS_E_BUSY && s != KVS_E_DEADLINE;
}

/* ---- a new connection ---- */

typedef struct fresh {
    wire_link link;
    wire_hello_rep hello;
    uint32_t n_devices;
    uint8_t uuid[WIRE_MAX_DEVICES][16];
    counter_page page;
    uint8_t *body; /* [hello.max_body] */
} fresh;

typedef struct answer {
    kvs_status status;
    frame f;
    wire_in in;
} answer;

/* One exchange.  The return value is about the connection, a->status what the daemon says. */
static kvs_status ask(kvs_client *c, fresh *n, const link_frame *q, answer *a, kvs_err *err)
{
    kvs_status s = link_exchange(&n->link, q, deadline_in(c->connect_timeout_ms), &a->f, err);

    if (s != KVS_OK)
        return s;
    a->status = (kvs_status)a->f.head.status;
    if (!reply_head(&a->f, &a->in, err)) {
        frame_close_fds(&a->f);
        return kvs_fail(err, KVS_E_PROTO, "%s: the daemon's reply is malformed", wire_op_name(q->op));
    }
    return KVS_OK;
}

/* A daemon that does not list its devices has one. */
static void get_devices(wire_in *in, fresh *n)
{
    wire_hello_devices d = {.n_devices = 1};

    if (n->hello.features & WIRE_FEATURE_DEVICES)
        wire_get_hello_devices(in, &d);
    n->n_devices = d.n_devices;
    if (d.n_devices < 1 || d.n_devices > WIRE_MAX_DEVICES)
        in->bad = true;
    for (uint32_t i = 0; !in->bad && (n->hello.features & WIRE_FEATURE_DEVICES) && i < d.n_devices; i++) {
        wire_device_entry e;

        wire_get_device_entry(in, &e);
        memcpy(n->uuid[i], e.uuid, sizeof n->uuid[i]);
    }
}

static kvs_status hello_check(const answer *a, fresh *n, kvs_err *err)
{
    wire_hello_rep *v = &n->hello;
    wire_in in = a->in;

    wire_get_hello_rep(&in, v);
    get_devices(&in, n);
    if (!wire_in_done(&in) || a->f.head.n_fds != 1)
        return kvs_fail(err, KVS_E_PROTO, "HELLO: the daemon's reply is malformed");
    if (v->version != WIRE_VERSION)
        return kvs_fail(err, KVS_E_VERSION, "HELLO: the daemon chose version %u, this library speaks %d", v->version,
                        WIRE_VERSION);
    if (v->n_counters == 0 || v->n_counters > WIRE_COUNTERS || v->credit_requests == 0 || v->control_requests == 0 ||
        v->max_body < WIRE_HEADER_BYTES)
        return kvs_fail(err, KVS_E_PROTO, "HELLO: limits that leave nothing to do (counters %u, credit %u, body %u)",
                        v->n_counters, v->credit_requests, v->max_body);
    return KVS_OK;
}

/* The daemon's own words are in *err already, if it has any. */
static kvs_status refused(kvs_status s, kvs_err *err)
{
    if (err->msg[0] == '\0')
        return kvs_fail(err, s, "HELLO refused: %s", kvs_status_text(s));
    err->status = s;
    return s;
}

static kvs_status hello(kvs_client *c, fresh *n, kvs_err *err)
{
    uint8_t body[WIRE_hello_req_BYTES + WIRE_MAX_NAME + 8];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_hello_req q = {.version_min = WIRE_VERSION,
                        .version_max = WIRE_VERSION,
                        .pid = (uint32_t)getpid(),
                        .features = WIRE_FEATURE_DEVICES,
                        .name_len = (uint32_t)strlen(c->name)};
    link_frame out = {.op = WIRE_HELLO, .body = body};
    answer a;
    kvs_status s;

    wire_put_hello_req(&o, &q);
    wire_put_bytes(&o, c->name, q.name_len);
    wire_put_pad8(&o);
    out.len = o.len;
    s = ask(c, n, &out, &a, err);
    if (s == KVS_E_BUSY) /* it accepts (or systemd does for it), and says nothing */
        return kvs_fail(err, s, "%s: no answer to HELLO within %u ms; the daemon is starting, stopped or busy", c->path,
                        c->connect_timeout_ms);
    if (s == KVS_E_AWAY)
        return kvs_fail(err, s,
                        "%s: closed before HELLO was answered: all places are taken (limits.max_clients), or the "
                        "daemon is ending",
                        c->path);
    if (s != KVS_OK)
        return s;
    if (a.status != KVS_OK)
        s = refused(a.status, err);
    else
        s = hello_check(&a, n, err);
    if (s == KVS_OK)
        s = counters_map(a.f.fds[0], n->hello.n_counters, &n->page, err);
    if (s == KVS_E_UNSUPPORTED)
        s = kvs_fail(err, KVS_E_PROTO, "HELLO: the counter page is no memfd");
    frame_close_fds(&a.f);
    return s;
}

static kvs_status reopen(kvs_client *c, fresh *n, kvs_ns *ns, kvs_err *err)
{
    link_frame q = {.op = WIRE_OPEN, .body = ns->canon, .len = ns->canon_len};
    wire_open_rep v;
    answer a;
    kvs_status s;

    ns->new_status = KVS_E_STALE;
    if (ns->by_id)
        return KVS_OK;
    s = ask(c, n, &q, &a, err);
    if (s != KVS_OK)
        return s;
    frame_close_fds(&a.f);
    if (a.status != KVS_OK)
        return KVS_OK;
    wire_get_open_rep(&a.in, &v);
    if (!wire_in_done(&a.in) || memcmp(v.digest, ns->info.digest, sizeof v.digest) != 0)
        return kvs_fail(err, KVS_E_PROTO, "OPEN: the daemon's reply is malformed");
    ns->new_id = v.ns;
    ns->new_status = KVS_OK;
    return KVS_OK;
}

/* The reply to a re-offer: same shape as before; its descriptors are our own memory again and are not needed. */
static kvs_status reregister_answer(kvs_region *r, answer *a, kvs_err *err)
{
    uint32_t entries = region_n_entries(r);
    const uint8_t *status = NULL;
    wire_region_rep v;

    frame_close_fds(&a->f);
    if (a->status != KVS_OK && a->status != KVS_E_PARTIAL) {
        region_entries_done(r, NULL);
        return KVS_OK;
    }
    wire_get_region_rep(&a->in, &v);
    if (r->info.kind != KVS_REGION_IMPORT && v.n_entries == entries)
        status = wire_get_array(&a->in, v.n_entries, 4);
    if (!wire_in_done(&a->in) || v.n_slots != r->info.n_slots ||
        (r->info.kind != KVS_REGION_IMPORT && (status == NULL || v.slot_stride != r->info.slot_stride)))
        return kvs_fail(err, KVS_E_PROTO, "REGION: the daemon's reply is malformed");
    region_entries_done(r, status);
    r->new_id = v.region;
    r->new_status = KVS_OK;
    return KVS_OK;
}

static kvs_status reregister(kvs_client *c, fresh *n, kvs_region *r, kvs_err *err)
{
    bool import = r->info.kind == KVS_REGION_IMPORT;
    link_frame q = {
        .op = import ? WIRE_REGION_IMPORT : WIRE_REGION_ATTACH, .body = n->body, .fds = r->fds, .n_fds = r->info.n_fds};
    uint32_t ns = r->ns != NULL ? r->ns->new_id : WIRE_NONE32;
    uint64_t need = WIRE_region_attach_req_BYTES + (uint64_t)region_n_entries(r) * WIRE_region_entry_BYTES;
    answer a;
    kvs_status s;

    r->new_status = KVS_E_STALE;
    if (import)
        need = region_import_bytes(r);
    if ((r->ns != NULL && r->ns->new_status != KVS_OK) || need > n->hello.max_body) {
        region_entries_done(r, NULL);
        return KVS_OK;
    }
    /* The memory says on which device it is: numbers may be others by now. */
    q.len = import ? region_import_body(r, ns, WIRE_NONE32, n->body, n->hello.max_body)
                   : region_attach_body(r, ns, n->body, n->hello.max_body);
    s = ask(c, n, &q, &a, err);
    return s == KVS_OK ? reregister_answer(r, &a, err) : s;
}

static kvs_status rewatch(kvs_client *c, fresh *n, kvs_err *err)
{
    uint8_t body[WIRE_watch_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_watch_req w = {.mask = c->watch_mask};
    link_frame q = {.op = WIRE_WATCH, .body = body, .len = sizeof body};
    answer a;
    kvs_status s;

    if (w.mask == 0)
        return KVS_OK;
    wire_put_watch_req(&o, &w);
    s = ask(c, n, &q, &a, err);
    if (s == KVS_OK)
        frame_close_fds(&a.f);
    return s;
}

static kvs_status register_all(kvs_client *c, fresh *n, kvs_err *err)
{
    kvs_status s = KVS_OK;

    n->body = malloc(n->hello.max_body);
    if (n->body == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "registering again: no memory");
    for (kvs_ns *ns = c->namespaces; ns != NULL && s == KVS_OK; ns = ns->next)
        s = reopen(c, n, ns, err);
    for (kvs_region *r = c->regions; r != NULL && s == KVS_OK; r = r->next)
        s = reregister(c, n, r, err);
    return s == KVS_OK ? rewatch(c, n, err) : s;
}

/* mu is held.  Regions that were closed while they were being registered; to be destroyed without it, for that may take a
 * driver. */
static kvs_region *bury_regions(kvs_client *c)
{
    kvs_region **p = &c->regions, *dead = NULL;

    while (*p != NULL) {
        kvs_region *r = *p;
        uint8_t body[WIRE_region_close_req_BYTES];
        wire_out o = {.base = body, .cap = sizeof body};
        wire_region_close_req q = {.region = r->new_id};

        if (!r->dead) {
            p = &r->next;
            continue;
        }
        *p = r->next;
        wire_put_region_close_req(&o, &q);
        if (c->state == LINK_UP && r->new_status == KVS_OK)
            chore_add(c, WIRE_REGION_CLOSE, &o);
        r->next = dead;
        dead = r;
    }
    return dead;
}

static void server_set(kvs_client *c, const fresh *n)
{
    const wire_hello_rep *v = &n->hello;

    c->server = (kvs_server){.generation = c->server.generation + 1,
                             .conn_id = v->conn_id,
                             .version = v->version,
                             .is_admin = v->is_admin,
                             .n_counters = v->n_counters,
                             .max_body = v->max_body,
                             .max_keys = v->max_keys,
                             .control_requests = v->control_requests,
                             .credit_requests = v->credit_requests,
                             .credit_bytes = v->credit_bytes,
                             .default_deadline_us = v->default_deadline_us,
                             .max_deadline_us = v->max_deadline_us,
                             .n_devices = n->n_devices,
                             .up = true};
    memcpy(c->server.device_uuid, n->uuid, sizeof c->server.device_uuid);
    memcpy(c->server.boot_id, v->boot_id, sizeof c->server.boot_id);
    if (c->server.credit_requests > 65536)
        c->server.credit_requests = 65536;
    if (c->server.control_requests > 4096)
        c->server.control_requests = 4096;
}

/* mu is held.  From here on everybody uses it. */
static kvs_status publish(kvs_client *c, fresh *n, kvs_err *err)
{
    kvs_server old = c->server;
    kvs_status s;

    server_set(c, n);
    s = client_table(c, c->server.credit_requests + c->server.control_requests, err);
    if (s != KVS_OK) {
        c->server = old;
        return s;
    }
    counters_abort(c); /* once more: a daemon that lived on may have written since */
    n->page.generation = c->server.generation;
    counters_publish(c, &n->page);
    n->page.base = NULL;
    for (kvs_ns *ns = c->namespaces; ns != NULL; ns = ns->next) {
        atomic_store(&ns->id, ns->new_id);
        atomic_store(&ns->status, ns->new_status);
    }
    for (kvs_region *r = c->regions; r != NULL; r = r->next) {
        atomic_store(&r->id, r->new_id);
        atomic_store(&r->status, r->new_status);
    }
    c->fd = n->link.fd;
    c->reader = n->link.reader;
    c->events_lost_seen = 0;
    c->up_since = clock_ns();
    c->state = LINK_UP;
    client_take_read(c); /* events behind the last reply */
    for (waiter *w = c->waiters; w != NULL; w = w->next)
        (void)pthread_cond_signal(&w->cond);
    return KVS_OK;
}

kvs_status keeper_attempt(kvs_client *c, kvs_err *err)
{
    kvs_region *dead;
    fresh n = {0};
    kvs_status s = link_open(&n.link, c->path, c->wake_fd, deadline_in(c->connect_timeout_ms), err);

    if (s != KVS_OK)
        return s;
    s = hello(c, &n, err);
    (void)pthread_mutex_lock(&c->mu);
    c->registering = true;
    (void)pthread_mutex_unlock(&c->mu);
    if (s == KVS_OK)
        s = register_all(c, &n, err);
    (void)pthread_mutex_lock(&c->mu);
    if (s == KVS_OK)
        s = publish(c, &n, err);
    c->registering = false;
    dead = bury_regions(c);
    (void)pthread_mutex_unlock(&c->mu);
    while (dead != NULL) {
        kvs_region *r = dead;

        dead = r->next;
        region_destroy(r);
    }
    free(n.body);
    if (s == KVS_OK)
        return s;
    if (n.page.base != NULL)
        counters_unmap(&n.page);
    link_close(&n.link);
    return s;
}

/* ---- the thread ---- */

static void drain_wake(kvs_client *c)
{
    uint64_t n;

    (void)!read(c->wake_fd, &n, sizeof n);
}

/* mu is held.  After one in vain others have the socket for a while. */
static void do_chore(kvs_client *c, chore *h, struct pollfd *hang_up)
{
    bool done;

    (void)pthread_mutex_unlock(&c->mu);
    done = chore_run(c, h);
    if (!done)
        (void)poll(hang_up, 1, CHORE_PAUSE_MS);
    (void)pthread_mutex_lock(&c->mu);
    if (done)
        free(h);
    else
        chore_put_back(c, h);
}

/* mu is held.  Sleeps until the peer hangs up or somebody has something to do; then reads the rest of what it said. */
static void keep_up(kvs_client *c)
{
    struct pollfd p[2] = {{.fd = c->fd, .events = POLLRDHUP}, {.fd = c->wake_fd, .events = POLLIN}};
    chore *h = chore_take(c);

    if (h != NULL) {
        do_chore(c, h, p);
        return;
    }
    (void)pthread_mutex_unlock(&c->mu);
    (void)poll(p, 2, -1);
    if (p[1].revents != 0)
        drain_wake(c);
    (void)pthread_mutex_lock(&c->mu);
    while (p[0].revents != 0 && c->state == LINK_UP && !c->closing)
        (void)client_turn(c, NULL, deadline_in(1000));
}

/* mu is held.  Nobody may use the socket any more before it is closed. */
static void let_go(kvs_client *c)
{
    while (c->reading || c->sending)
        (void)client_turn(c, NULL, deadline_in(1000));
    if (c->fd < 0)
        return;
    frame_reader_fini(&c->reader);
    (void)close(c->fd);
    c->fd = -1;
    free(c->out);
    c->out = NULL;
    c->out_len = c->out_sent = 0;
}

static uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

/* mu is held.  Pause, then one attempt. */
static void come_back(kvs_client *c, int64_t *pause, uint64_t *random)
{
    int64_t min = (int64_t)c->backoff_min_ms * 1000000, max = (int64_t)c->backoff_max_ms * 1000000;
    struct pollfd p = {.fd = c->wake_fd, .events = POLLIN};
    int64_t until;
    kvs_err err = {KVS_OK, ""};

    if (*pause == 0 || (c->up_since != 0 && clock_ns() - c->up_since > STEADY_NS))
        *pause = min;
    c->up_since = 0;
    until = clock_ns() + *pause + (int64_t)(next_random(random) % (uint64_t)(*pause / 2 + 1));
    *pause = *pause * 2 < max ? *pause * 2 : max;
    counters_abort(c);
    drain_wake(c); /* of the loss itself; who closes the handle waits for mu */
    (void)pthread_mutex_unlock(&c->mu);
    if (poll_until(&p, 1, until) > 0)
        drain_wake(c);
    else
        (void)keeper_attempt(c, &err);
    (void)pthread_mutex_lock(&c->mu);
    if (c->state != LINK_UP && err.msg[0] != '\0')
        (void)snprintf(c->why, sizeof c->why, "%s", err.msg);
}

void *keeper_main(void *client)
{
    kvs_client *c = client;
    uint64_t random = (uint64_t)clock_ns() ^ ((uint64_t)getpid() << 32) ^ (uint64_t)(uintptr_t)c;
    int64_t pause = 0;

    (void)pthread_mutex_lock(&c->mu);
    while (!c->closing) {
        if (c->state == LINK_UP) {
            keep_up(c);
        } else {
            let_go(c);
            come_back(c, &pause, &random);
        }
    }
    let_go(c);
    (void)pthread_mutex_unlock(&c->mu);
    return NULL;
}
