/* The handle: options, connect, close, and what it says about itself; pipelined requests from outside. */
#include "proto/client/internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/text.h"

static kvs_status text_copy(char *to, size_t max, const char *what, const char *from, kvs_err *err)
{
    size_t n = strlen(from);

    if (n > max)
        return kvs_fail(err, KVS_E_LIMIT, "%s: %zu bytes are more than %zu", what, n, max);
    memcpy(to, from, n + 1);
    return KVS_OK;
}

/* A caller of an older library gives a shorter struct; one of a newer may give a longer one if the rest is zero. */
static kvs_status options_read(kvs_options *to, const kvs_options *from, kvs_err *err)
{
    const uint8_t *bytes = (const uint8_t *)from;

    memset(to, 0, sizeof *to);
    if (from == NULL)
        return KVS_OK;
    if (from->size < sizeof from->size)
        return kvs_fail(err, KVS_E_INVALID, "options.size: %zu; start from KVS_OPTIONS_INIT", from->size);
    for (size_t i = sizeof *to; i < from->size; i++)
        if (bytes[i] != 0)
            return kvs_fail(err, KVS_E_UNSUPPORTED, "options: byte %zu is set, this library knows %zu", i, sizeof *to);
    memcpy(to, from, from->size < sizeof *to ? from->size : sizeof *to);
    if ((to->flags & ~(uint32_t)KVS_CONNECT_LAZY) != 0)
        return kvs_fail(err, KVS_E_INVALID, "options.flags: 0x%x has bits that mean nothing", to->flags);
    if (to->reserved != 0)
        return kvs_fail(err, KVS_E_INVALID, "options.reserved: %u is not 0", to->reserved);
    return KVS_OK;
}

static kvs_status options_apply(kvs_client *c, const kvs_options *o, kvs_err *err)
{
    const char *path = o->path != NULL ? o->path : getenv("KVSTRIDE_SOCKET");
    kvs_status s;

    if (path == NULL || (o->path == NULL && path[0] == '\0'))
        path = KVS_DEFAULT_SOCKET;
    if (path[0] == '\0')
        return kvs_fail(err, KVS_E_INVALID, "socket path: empty");
    s = text_copy(c->path, KVS_SOCKET_PATH_MAX, "socket path", path, err);
    if (s == KVS_OK && o->name != NULL)
        s = text_copy(c->name, WIRE_MAX_NAME, "options.name", o->name, err);
    if (s == KVS_OK)
        s = text_check("options.name", (const uint8_t *)c->name, strlen(c->name), err);
    c->timeout_ms = o->timeout_ms != 0 ? o->timeout_ms : 30000;
    c->connect_timeout_ms = o->connect_timeout_ms != 0 ? o->connect_timeout_ms : 5000;
    c->backoff_min_ms = o->backoff_min_ms != 0 ? o->backoff_min_ms : 50;
    c->backoff_max_ms = o->backoff_max_ms != 0 ? o->backoff_max_ms : 2000;
    if (s == KVS_OK && c->backoff_min_ms > c->backoff_max_ms)
        s = kvs_fail(err, KVS_E_INVALID, "options.backoff_min_ms: %u is more than backoff_max_ms %u", c->backoff_min_ms,
                     c->backoff_max_ms);
    return s;
}

/* The mutex stays on a page of its own kind so that a child of fork can tell that it is one, without any global. */
static kvs_status alive_open(kvs_client *c, kvs_err *err)
{
    void *p = mmap(NULL, sizeof *c->alive, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        return kvs_fail(err, KVS_E_SYS, "mmap: %s", strerror(errno));
    (void)madvise(p, sizeof *c->alive, MADV_WIPEONFORK);
    c->alive = p;
    *c->alive = 1;
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    c->poke_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (c->wake_fd < 0 || c->poke_fd < 0)
        return kvs_fail(err, KVS_E_SYS, "eventfd: %s", strerror(errno));
    return KVS_OK;
}

/* Signals of the host program are not for our threads. */
int client_thread(pthread_t *ret, const char *name, void *(*run)(void *ud), void *ud)
{
    sigset_t all, old;
    int e;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &old);
    e = pthread_create(ret, NULL, run, ud);
    (void)pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e == 0)
        (void)pthread_setname_np(*ret, name);
    return e;
}

static kvs_status keeper_start(kvs_client *c, kvs_err *err)
{
    int e = client_thread(&c->keeper, "kvs-keeper", keeper_main, c);

    if (e != 0)
        return kvs_fail(err, KVS_E_SYS, "thread: %s", strerror(e));
    c->has_keeper = true;
    return KVS_OK;
}

static void locks_init(kvs_client *c)
{
    (void)pthread_mutex_init(&c->mu, NULL);
    (void)pthread_mutex_init(&c->gpu_mu, NULL);
    (void)pthread_condattr_init(&c->condattr);
    (void)pthread_condattr_setclock(&c->condattr, CLOCK_MONOTONIC);
}

kvs_status kvs_connect(kvs_client **ret, const kvs_options *o, kvs_err *err)
{
    kvs_err local = {KVS_OK, ""};
    kvs_options opts;
    kvs_client *c;
    kvs_status s = GIVEN(err, "connect", {"ret", ret});

    if (s == KVS_OK)
        s = options_read(&opts, o, err);
    if (s != KVS_OK)
        return s;
    c = calloc(1, sizeof *c);
    if (c == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "client: no memory");
    locks_init(c);
    c->fd = c->wake_fd = c->poke_fd = -1;
    pace_init(&c->pace);
    s = options_apply(c, &opts, &local);
    if (s == KVS_OK)
        s = alive_open(c, &local);
    if (s == KVS_OK) {
        s = keeper_attempt(c, &local);
        if (s != KVS_OK && (opts.flags & KVS_CONNECT_LAZY)) {
            (void)snprintf(c->why, sizeof c->why, "%s", local.msg);
            s = KVS_OK;
        }
    }
    if (s == KVS_OK)
        s = keeper_start(c, &local);
    if (s != KVS_OK) {
        kvs_close(c);
        return kvs_fail(err, s, "%s", local.msg);
    }
    *ret = c;
    return KVS_OK;
}

static void free_all(kvs_client *c)
{
    while (c->all != NULL) {
        kvs_request *r = c->all;

        c->all = r->next;
        free(r);
    }
    while (c->regions != NULL) {
        kvs_region *r = c->regions;

        c->regions = r->next;
        region_destroy(r);
    }
    while (c->namespaces != NULL) {
        kvs_ns *ns = c->namespaces;

        c->namespaces = ns->next;
        free(ns);
    }
    chores_free(c);
    counters_fini(c);
    free(c->events);
    free(c->table);
    free(c->out);
    if (c->wake_fd >= 0)
        (void)close(c->wake_fd);
    if (c->poke_fd >= 0)
        (void)close(c->poke_fd);
    if (c->fd >= 0) {
        frame_reader_fini(&c->reader);
        (void)close(c->fd);
    }
    if (c->alive != NULL)
        (void)munmap(c->alive, sizeof *c->alive);
    (void)pthread_condattr_destroy(&c->condattr);
    free(c);
}

void kvs_close(kvs_client *c)
{
    if (c == NULL)
        return;
    if (c->alive == NULL || !client_is_child(c)) { /* in a child: no thread to join, no socket to shut for the parent */
        (void)pthread_mutex_lock(&c->mu);
        c->closing = true;
        client_lost(c, "the handle is being closed");
        client_wake_keeper(c);
        (void)pthread_mutex_unlock(&c->mu);
        if (c->has_keeper)
            (void)pthread_join(c->keeper, NULL);
        packs_close(c, false);
        streams_close(c, true);
        (void)pthread_mutex_destroy(&c->gpu_mu);
        (void)pthread_mutex_destroy(&c->mu);
    } else {
        packs_close(c, true);
        streams_close(c, false);
    }
    free_all(c);
}

void kvs_server_get(kvs_client *c, kvs_server *ret)
{
    if (ret == NULL)
        return;
    if (c == NULL || client_is_child(c)) {
        *ret = (kvs_server){0};
        return;
    }
    (void)pthread_mutex_lock(&c->mu);
    *ret = c->server;
    (void)pthread_mutex_unlock(&c->mu);
}

kvs_status kvs_device_find(kvs_client *c, const uint8_t uuid[16], uint32_t *ret, kvs_err *err)
{
    kvs_server v;
    kvs_status s = GIVEN(err, "device_find", {"c", c}, {"uuid", uuid}, {"ret", ret});

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    kvs_server_get(c, &v);
    if (v.generation == 0)
        return kvs_fail(err, KVS_E_AWAY, "devices: never connected to a daemon");
    for (uint32_t i = 0; i < v.n_devices; i++)
        if (memcmp(v.device_uuid[i], uuid, sizeof v.device_uuid[i]) == 0) {
            *ret = i;
            return KVS_OK;
        }
    return kvs_fail(err, KVS_E_NOT_FOUND,
                    "devices: none of the daemon's %u has the UUID that begins with %02x%02x%02x%02x", v.n_devices,
                    uuid[0], uuid[1], uuid[2], uuid[3]);
}

uint64_t kvs_generation(kvs_client *c)
{
    kvs_server v;

    kvs_server_get(c, &v);
    return v.generation;
}

kvs_status kvs_wait_up(kvs_client *c, uint64_t after, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = GIVEN(err, "wait_up", {"c", c});
    int64_t deadline;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    (void)pthread_mutex_lock(&c->mu);
    while (c->state != LINK_UP || c->server.generation <= after) {
        if (client_turn(c, NULL, deadline))
            continue;
        s = kvs_fail(err, KVS_E_DEADLINE, "not connected in time: %s", c->why);
        break;
    }
    client_leave(c);
    return s;
}

void kvs_free(void *p)
{
    free(p);
}

/* ---- pipelined requests ---- */

void kvs_request_set_tag(kvs_request *r, uint64_t tag)
{
    if (r != NULL)
        r->tag = tag;
}

uint64_t kvs_request_tag(const kvs_request *r)
{
    return r != NULL ? r->tag : 0;
}

kvs_status kvs_wait(kvs_request *r, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = GIVEN(err, "wait", {"r", r});
    int64_t deadline;
    kvs_client *c;

    if (s == KVS_OK)
        s = client_check_own(r->c, err);
    if (s != KVS_OK)
        return s;
    c = r->c;
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    (void)pthread_mutex_lock(&c->mu);
    while (r->state != REQUEST_DONE && client_turn(c, r, deadline))
        ;
    if (r->state != REQUEST_DONE)
        s = kvs_fail(err, KVS_E_DEADLINE, "%s: not answered yet", wire_op_name(r->op));
    client_leave(c);
    return s;
}

bool kvs_done(kvs_request *r)
{
    bool done;

    if (r == NULL)
        return true; /* kvs_request_end takes it */
    if (client_is_child(r->c))
        return false;
    (void)pthread_mutex_lock(&r->c->mu);
    if (r->state != REQUEST_DONE)
        client_read_once(r->c);
    done = r->state == REQUEST_DONE;
    client_leave(r->c);
    return done;
}

uint32_t kvs_poll(kvs_client *c, kvs_request **ret, uint32_t cap, uint32_t timeout_ms)
{
    int64_t deadline = deadline_in(timeout_ms);
    uint32_t n = 0;

    if (c == NULL || (ret == NULL && cap > 0) || client_is_child(c))
        return 0;
    (void)pthread_mutex_lock(&c->mu);
    if (c->done_head == NULL)
        client_read_once(c);
    while (c->done_head == NULL && client_turn(c, NULL, deadline))
        ;
    while (n < cap && c->done_head != NULL) {
        kvs_request *r = c->done_head;

        c->done_head = r->next_done;
        if (c->done_head == NULL)
            c->done_tail = NULL;
        r->queued = false;
        ret[n++] = r;
    }
    client_leave(c);
    return n;
}

static kvs_status wait_settled(kvs_client *c, uint64_t id, int64_t deadline, kvs_err *err)
{
    kvs_status s = KVS_OK;

    (void)pthread_mutex_lock(&c->mu);
    while (s == KVS_OK && client_is_settling(c, id))
        if (!client_turn(c, NULL, deadline))
            s = kvs_fail(err, KVS_E_DEADLINE, "the daemon's hardware has not stopped in time");
    client_leave(c);
    return s;
}

kvs_status request_settle(kvs_request *r, uint32_t timeout_ms)
{
    return wait_settled(r->c, r->id, deadline_in(timeout_ms), NULL);
}

static kvs_status cancel_pack(kvs_request *r, uint32_t *ret_outcome, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = client_check_own(r->c, err);

    if (s != KVS_OK)
        return s;
    (void)pthread_mutex_lock(&r->c->mu);
    pack_cancel(r);
    (void)pthread_mutex_unlock(&r->c->mu);
    s = kvs_wait(r, timeout_ms, err);
    if (s == KVS_OK && ret_outcome != NULL)
        *ret_outcome = r->status == KVS_E_CANCELLED ? KVS_CANCEL_STOPPED : KVS_CANCEL_FINISHED;
    return s;
}

kvs_status kvs_cancel(kvs_request *r, uint32_t *ret_outcome, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request req = {0};
    uint32_t outcome = KVS_CANCEL_GONE;
    wire_cancel_req q;
    int64_t deadline;
    kvs_client *c;
    call k;
    kvs_status s = GIVEN(err, "cancel", {"r", r});

    if (s != KVS_OK)
        return s;
    c = r->c;
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    q = (wire_cancel_req){.target = r->id};
    if (r->is_pack)
        return cancel_pack(r, ret_outcome, timeout_ms, err);
    if (!kvs_done(r)) {
        s = call_begin(&k, c, &req, WIRE_CANCEL, WIRE_cancel_req_BYTES, timeout_ms, err);
        if (s != KVS_OK)
            return s;
        wire_put_cancel_req(&k.out, &q);
        k.control = true;
        k.target = r->id;
        req.ret = &outcome;
        s = call_run(&k, err);
    }
    if (s == KVS_OK)
        s = kvs_wait(r, timeout_ms, err); /* it was answered before the cancel was */
    if (s == KVS_OK)
        s = wait_settled(c, r->id, deadline, err);
    if (s == KVS_OK && ret_outcome != NULL)
        *ret_outcome = outcome;
    return s;
}

kvs_status kvs_request_end(kvs_request *r, kvs_err *err)
{
    kvs_status s;

    if (r == NULL)
        return KVS_OK;
    if (client_is_child(r->c))
        return kvs_fail(err, KVS_E_STATE, "this handle belongs to the parent process");
    (void)pthread_mutex_lock(&r->c->mu);
    if (r->state == REQUEST_FLYING && r->is_pack)
        pack_abandon(r->c, r);
    else if (r->state == REQUEST_FLYING)
        client_abandon(r->c, r);
    s = r->state == REQUEST_DONE ? r->status : KVS_E_BUSY;
    (void)pthread_mutex_unlock(&r->c->mu);
    if (s == KVS_E_AWAY && r->op == WIRE_LOOKUP)
        s = KVS_OK; /* miss-only: 0 hits are in its results */
    if (s == KVS_E_BUSY && r->err.msg[0] == '\0')
        (void)kvs_fail(err, s, "%s: ended before it was answered", wire_op_name(r->op));
    else if (s != KVS_OK)
        (void)kvs_fail(err, s, "%s", r->err.msg[0] != '\0' ? r->err.msg : kvs_status_text(s));
    request_destroy(r);
    return s;
}

kvs_status kvs_settle(kvs_client *c, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = GIVEN(err, "settle", {"c", c});
    int64_t deadline;

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : c->timeout_ms);
    (void)pthread_mutex_lock(&c->mu);
    while ((c->state == LINK_UP && c->orphans > 0) || c->packing > 0) {
        if (client_turn_for_any(c, deadline))
            continue;
        s = kvs_fail(err, KVS_E_DEADLINE, "%u requests that were given up are still unanswered",
                     c->orphans + c->packing);
        break;
    }
    client_leave(c);
    return s;
}
