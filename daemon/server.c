#include "daemon/server.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/conn.h"
#include "daemon/listen.h"
#include "daemon/log.h"
#include "daemon/tenant.h"

enum {
    ACCEPT_BATCH = 16, /* let in before others have their turn */
    SHED_BATCH = 128,  /* turned away every SERVER_BACKOFF_MS: a full backlog is gone within a second */
    REFUSED_LINE_US = 1000000,
};

typedef struct listener {
    server *server;
    listen_socket socket;
    uv_poll_t poll;
    uv_timer_t backoff;
    bool is_admin, polling;
    uint32_t tenant;                   /* of those who come in here; the admin socket has none */
    const char *refused_why;           /* the latest reason */
    uint64_t refused, refused_line_us; /* since the last line about it; when that was */
} listener;

struct server {
    server_config cfg;
    conn_host host;
    listener *listeners; /* [n_listeners]: the admin's, then one a tenant, in their order */
    unsigned n_listeners;
    uv_prepare_t prepare;
    uv_idle_t no_wait; /* while active, the loop only looks and does not wait */
    uv_timer_t timer;
    uint64_t armed_us; /* what the timer is set to; UINT64_MAX: not */
    unsigned n_handles;
    int spare_fd;       /* given up to accept, and turn away, one more when descriptors have run out */
    int max_fd;         /* connections stay below: existing clients and the core need some, too */
    uid_t overflow_uid; /* what the kernel says of users that do not exist here */
};

/* ---- who may come in ---- */
static uid_t read_overflow_uid(void)
{
    FILE *f = fopen("/proc/sys/kernel/overflowuid", "re");
    unsigned uid = 65534;

    if (f != NULL) {
        if (fscanf(f, "%u", &uid) != 1)
            uid = 65534;
        (void)fclose(f);
    }
    return (uid_t)uid;
}

static int read_max_fd(void)
{
    struct rlimit lim;
    rlim_t reserve;

    if (getrlimit(RLIMIT_NOFILE, &lim) != 0 || lim.rlim_cur > INT32_MAX)
        return INT32_MAX;
    reserve = lim.rlim_cur / 8 < 64 ? lim.rlim_cur / 8 : 64;
    return (int)(lim.rlim_cur - reserve);
}

static const char *name_of(const listener *l)
{
    return l->is_admin ? "admin" : tenant_name(l->server->cfg.config, l->tenant);
}

/* NULL, or why this peer may not: a word for the log, and *ret_text for the peer. */
static const char *is_stranger(const server *s, const listener *l, const peer_info *p, const char **ret_text)
{
    if (l->is_admin && p->uid != 0 && p->uid != geteuid()) {
        *ret_text = "the admin socket is for root and for the user that the daemon runs as";
        return "uid";
    }
    if (p->uid == s->overflow_uid && p->uid != geteuid()) {
        *ret_text = "your user is not known in the daemon's user namespace";
        return "unmapped_uid";
    }
    if (!l->is_admin && !tenant_lets_in(s->cfg.config, l->tenant, p->uid)) {
        *ret_text = "your user is not among the tenant's uids";
        return "uid";
    }
    return NULL;
}

static const char *is_full(const server *s, const listener *l, int fd)
{
    if (fd >= s->max_fd)
        return "descriptors";
    if (l->is_admin ? s->host.n_admins >= SERVER_ADMIN_PLACES
                    : s->host.n_tenant[l->tenant] >= (uint64_t)s->cfg.config->max_clients)
        return "max_clients";
    return NULL;
}

static void count_refused(const listener *l, const char *why)
{
    if (l->server->cfg.edge != NULL)
        metrics_count(&l->server->cfg.edge->refused, why, 1);
}

static void refuse(listener *l, const char *why)
{
    const conn_host *h = &l->server->host;
    uint64_t now = conn_now_us();

    count_refused(l, why);
    l->refused++;
    l->refused_why = why;
    if (l->refused_line_us != 0 && now - l->refused_line_us < REFUSED_LINE_US)
        return;
    log_event(LOG_LEVEL_WARN, "clients_refused", " reason=%s socket=%s n=%llu places=%lld taken=%u", why, name_of(l),
              (unsigned long long)l->refused,
              l->is_admin ? (long long)SERVER_ADMIN_PLACES : (long long)l->server->cfg.config->max_clients,
              l->is_admin ? h->n_admins : h->n_tenant[l->tenant]);
    l->refused_line_us = now;
    l->refused = 0;
}

/* Takes fd.  False: places have run out. */
static bool admit(listener *l, int fd)
{
    server *s = l->server;
    peer_info info = {.is_admin = l->is_admin, .tenant = l->tenant};
    struct ucred cred;
    socklen_t len = sizeof cred;
    const char *why;
    kvs_err err;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0) {
        (void)close(fd);
        return true;
    }
    info.uid = cred.uid;
    info.pid = cred.pid;
    why = is_stranger(s, l, &info, &info.denied);
    if (why != NULL) {
        count_refused(l, why);
        log_event(LOG_LEVEL_WARN, "client_denied", " reason=%s socket=%s uid=%u pid=%d", why, name_of(l),
                  (unsigned)info.uid, (int)info.pid);
    }
    if (why != NULL && (s->host.n_strangers >= SERVER_STRANGER_PLACES || fd >= s->max_fd)) {
        (void)close(fd);
        return true;
    }
    why = why == NULL ? is_full(s, l, fd) : NULL;
    if (why != NULL) {
        (void)close(fd);
        refuse(l, why);
        return false;
    }
    if (conn_open(&s->host, fd, &info, &err) != KVS_OK) {
        refuse(l, kvs_status_name(err.status));
        return false;
    }
    return true;
}

/* ---- accepting ---- */
static void on_listen(uv_poll_t *h, int status, int events);

static void listener_poll(listener *l)
{
    if (l->socket.fd < 0 || l->polling)
        return;
    l->polling = uv_poll_start(&l->poll, UV_READABLE, on_listen) == 0;
}

static void on_backoff(uv_timer_t *h)
{
    listener_poll(h->data);
}

/* A listening socket stays readable while we cannot accept: looking again at once would only burn a core. */
static void back_off(listener *l)
{
    (void)uv_poll_stop(&l->poll);
    l->polling = false;
    (void)uv_timer_start(&l->backoff, on_backoff, SERVER_BACKOFF_MS, 0);
}

/* No descriptor is left: with the spare one, tell those who wait that they wait in vain. */
static void shed(listener *l)
{
    server *s = l->server;

    for (int i = 0; i < SHED_BATCH && s->spare_fd >= 0; i++) {
        int fd;

        (void)close(s->spare_fd);
        fd = accept4(l->socket.fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            (void)close(fd);
        s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            break;
        refuse(l, "descriptors");
    }
    if (s->spare_fd < 0)
        s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

enum accepted { ACCEPTED, TURNED_AWAY, NOBODY_WAITS }; /* ACCEPTED: or the peer has thought better of it */

static enum accepted accept_one(listener *l)
{
    int fd = accept4(l->socket.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd >= 0)
        return admit(l, fd) ? ACCEPTED : TURNED_AWAY;
    if (errno == EINTR || errno == ECONNABORTED || errno == EPERM || errno == EPROTO)
        return ACCEPTED;
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        return NOBODY_WAITS;
    if (errno == EMFILE || errno == ENFILE)
        shed(l);
    else
        log_event(LOG_LEVEL_WARN, "accept_failed", " socket=%s err=\"%s\"", name_of(l), strerror(errno));
    back_off(l);
    return NOBODY_WAITS;
}

static void on_listen(uv_poll_t *h, int status, int events)
{
    enum accepted got = ACCEPTED;
    listener *l = h->data;
    int n_away = 0;

    (void)events;
    if (status < 0) {
        l->polling = false;
        return;
    }
    for (int n = 0; n < ACCEPT_BATCH && n_away < SHED_BATCH && got != NOBODY_WAITS;) {
        got = accept_one(l);
        n += got == ACCEPTED;
        n_away += got == TURNED_AWAY;
    }
    if (n_away > 0)
        back_off(l);
}

/* ---- the turn ---- */
static void on_timer(uv_timer_t *h)
{
    server *s = h->data;
    uint64_t now = conn_now_us();

    s->armed_us = UINT64_MAX;
    (void)core_tick(s->host.core, now);
    conns_check(&s->host, now);
}

/* One timer for everything that has a time; none while nothing has. */
static void arm(server *s)
{
    uint64_t due = core_next_due(s->host.core), now;

    if (s->host.due_us < due)
        due = s->host.due_us;
    if (due == s->armed_us)
        return;
    s->armed_us = due;
    if (due == UINT64_MAX) {
        (void)uv_timer_stop(&s->timer);
        return;
    }
    uv_update_time(s->cfg.loop);
    now = conn_now_us();
    (void)uv_timer_start(&s->timer, on_timer, due <= now ? 0 : (due - now) / 1000 + 1, 0);
}

static void on_no_wait(uv_idle_t *h)
{
    (void)h;
}

static void on_prepare(uv_prepare_t *h)
{
    server *s = h->data;

    (void)conns_turn(&s->host);
    if (s->cfg.on_turn != NULL)
        s->cfg.on_turn(s->cfg.ud);
    arm(s);
    if (s->host.later != NULL)
        (void)uv_idle_start(&s->no_wait, on_no_wait);
    else
        (void)uv_idle_stop(&s->no_wait);
}

/* ---- life ---- */
static kvs_status open_listener(server *s, unsigned which, int fd, const char *path, mode_t mode, kvs_err *err)
{
    listener *l = &s->listeners[which];

    l->is_admin = which == 0;
    l->tenant = which > 0 ? which - 1 : 0;
    if (fd < 0)
        return listen_open(&l->socket, path, mode, err);
    listen_inherit(&l->socket, fd);
    return KVS_OK;
}

/* Of one tenant's listener; its descriptor, if it was handed over, is taken whatever happens. */
static kvs_status open_tenant(server *s, uint32_t t, int fd, kvs_err *err)
{
    const config *c = s->cfg.config;
    const config_tenant *x = &c->tenants[t];

    if (t == TENANT_DEFAULT)
        return open_listener(s, t + 1, fd, c->socket_path, (mode_t)c->socket_mode, err);
    return open_listener(s, t + 1, fd, x->path, (mode_t)x->mode, err);
}

static kvs_status open_listeners(server *s, kvs_err *err)
{
    const server_config *c = &s->cfg;
    kvs_status st = KVS_OK;

    for (uint32_t t = 0; t < c->config->n_tenants; t++) {
        int fd = c->tenant_fds != NULL ? c->tenant_fds[t] : -1;

        if (st == KVS_OK)
            st = open_tenant(s, t, fd, err);
        else if (fd >= 0)
            (void)close(fd);
    }
    if (st == KVS_OK)
        return open_listener(s, 0, c->admin_fd, c->config->admin_path, 0600, err);
    if (c->admin_fd >= 0)
        (void)close(c->admin_fd);
    return st;
}

static server *server_new(const server_config *c)
{
    server *s = calloc(1, sizeof *s);

    if (s == NULL)
        return NULL;
    s->n_listeners = c->config->n_tenants + 1;
    s->listeners = calloc(s->n_listeners, sizeof *s->listeners);
    if (s->listeners == NULL) {
        free(s);
        return NULL;
    }
    s->cfg = *c;
    s->armed_us = UINT64_MAX;
    s->overflow_uid = read_overflow_uid();
    s->max_fd = read_max_fd();
    s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (unsigned i = 0; i < s->n_listeners; i++) {
        s->listeners[i].server = s;
        s->listeners[i].socket = (listen_socket){.fd = -1, .lock_fd = -1};
    }
    return s;
}

static void close_given(const server_config *c)
{
    for (uint32_t t = 0; c->tenant_fds != NULL && t < c->config->n_tenants; t++)
        if (c->tenant_fds[t] >= 0)
            (void)close(c->tenant_fds[t]);
    if (c->admin_fd >= 0)
        (void)close(c->admin_fd);
}

kvs_status server_create(server **ret, const server_config *c, kvs_err *err)
{
    server *s = server_new(c);
    kvs_status st;

    if (s == NULL) {
        close_given(c);
        return kvs_fail(err, KVS_E_NO_MEMORY, "server: out of memory");
    }
    st = open_listeners(s, err);
    s->cfg.tenant_fds = NULL; /* was borrowed */
    if (st != KVS_OK) {
        server_close(s);
        return st;
    }
    *ret = s;
    return KVS_OK;
}

static kvs_status start_listener(server *s, listener *l, kvs_err *err)
{
    int rc = uv_poll_init(s->cfg.loop, &l->poll, l->socket.fd);

    if (rc != 0)
        return kvs_fail(err, KVS_E_SYS, "listening socket: %s", uv_strerror(rc));
    l->poll.data = l;
    (void)uv_timer_init(s->cfg.loop, &l->backoff);
    l->backoff.data = l;
    s->n_handles += 2;
    listener_poll(l);
    return KVS_OK;
}

kvs_status server_start(server *s, core *c, mailbox *m, kvs_err *err)
{
    conn_host_init(&s->host, s->cfg.loop, c, m, s->cfg.config);
    s->host.edge = s->cfg.edge;
    (void)uv_timer_init(s->cfg.loop, &s->timer);
    (void)uv_prepare_init(s->cfg.loop, &s->prepare);
    (void)uv_idle_init(s->cfg.loop, &s->no_wait);
    s->timer.data = s->prepare.data = s->no_wait.data = s;
    s->n_handles += 3;
    (void)uv_prepare_start(&s->prepare, on_prepare);
    for (unsigned i = 0; i < s->n_listeners; i++) {
        kvs_status st = start_listener(s, &s->listeners[i], err);

        if (st != KVS_OK)
            return st;
    }
    return KVS_OK;
}

void server_recheck(server *s)
{
    conns_recheck(&s->host);
}

void server_stop_listening(server *s)
{
    for (unsigned i = 0; i < s->n_listeners; i++) {
        listener *l = &s->listeners[i];

        if (l->backoff.data != NULL) {
            (void)uv_timer_stop(&l->backoff);
            (void)uv_poll_stop(&l->poll);
        }
        l->polling = false;
        listen_stop(&l->socket);
    }
}

bool server_is_flushed(const server *s)
{
    return conns_flushed(&s->host);
}

void server_close_clients(server *s)
{
    conns_close(&s->host);
}

bool server_is_empty(const server *s)
{
    return conns_gone(&s->host);
}

static void finish(server *s)
{
    for (unsigned i = 0; i < s->n_listeners; i++)
        listen_close(&s->listeners[i].socket);
    if (s->spare_fd >= 0)
        (void)close(s->spare_fd);
    free(s->listeners);
    free(s);
}

static void on_closed(uv_handle_t *h)
{
    server *s = h->data;

    if (--s->n_handles == 0)
        finish(s);
}

static void close_handle(server *s, uv_handle_t *h)
{
    if (h->data == NULL)
        return; /* never begun */
    h->data = s;
    uv_close(h, on_closed);
}

void server_close(server *s)
{
    if (s == NULL)
        return;
    if (s->n_handles == 0) {
        finish(s);
        return;
    }
    server_stop_listening(s);
    for (unsigned i = 0; i < s->n_listeners; i++) {
        close_handle(s, (uv_handle_t *)&s->listeners[i].poll);
        close_handle(s, (uv_handle_t *)&s->listeners[i].backoff);
    }
    close_handle(s, (uv_handle_t *)&s->timer);
    close_handle(s, (uv_handle_t *)&s->prepare);
    close_handle(s, (uv_handle_t *)&s->no_wait);
}
