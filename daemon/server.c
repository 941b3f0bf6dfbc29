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
#include "daemon/door.h"
#include "daemon/listen.h"
#include "daemon/log.h"
#include "daemon/process.h"
#include "daemon/sockio.h"
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
    unsigned n_handles;  /* not yet closed by the loop */
    bool polling, fresh; /* fresh: prepared for a tenant that is not in force yet */
    door door;
    const char *refused_why;           /* the latest reason */
    uint64_t refused, refused_line_us; /* since the last line about it; when that was */
} listener;

struct server {
    server_config cfg;
    conn_host host;
    listener *listeners[CONFIG_MAX_TENANTS + 1]; /* the admin's, then that of each tenant, if it has one */
    uv_prepare_t prepare;
    uv_idle_t no_wait; /* while active, the loop only looks and does not wait */
    uv_timer_t timer;
    uint64_t armed_us; /* what the timer is set to; UINT64_MAX: not */
    unsigned n_handles;
    int spare_fd;       /* given up to accept, and turn away, one more when descriptors have run out */
    int max_fd;         /* clients stay below: see process_client_fds */
    uid_t overflow_uid; /* what the kernel says of users that do not exist here */
};

/* ---- who may come in ---- */
static const char *name_of(const listener *l)
{
    return l->door.is_admin ? "admin" : tenant_name(l->server->cfg.config, l->door.tenant);
}

static const char *is_full(const server *s, const listener *l, int fd)
{
    if (fd >= s->max_fd && !l->door.is_admin) /* the operator must see who has them all */
        return "descriptors";
    if (l->door.is_admin ? s->host.n_admins >= SERVER_ADMIN_PLACES
                         : s->host.n_tenant[l->door.tenant] >= (uint64_t)s->cfg.config->max_clients)
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
              l->door.is_admin ? (long long)SERVER_ADMIN_PLACES : (long long)l->server->cfg.config->max_clients,
              l->door.is_admin ? h->n_admins : h->n_tenant[l->door.tenant]);
    l->refused_line_us = now;
    l->refused = 0;
}

/* Takes fd.  False: places have run out. */
static bool admit(listener *l, int fd)
{
    server *s = l->server;
    peer_info info = {.is_admin = l->door.is_admin, .tenant = l->door.tenant};
    struct ucred cred;
    socklen_t len = sizeof cred;
    const char *why;
    kvs_err err;

    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) != 0) {
        sockio_close(fd);
        return true;
    }
    info.uid = cred.uid;
    info.pid = cred.pid;
    why = door_refuses(s->cfg.config, l->door, info.uid, s->overflow_uid, info.denied, sizeof info.denied);
    if (why != NULL) {
        count_refused(l, why);
        log_event(LOG_LEVEL_WARN, "client_denied", " reason=%s socket=%s uid=%u pid=%d", why, name_of(l),
                  (unsigned)info.uid, (int)info.pid);
    }
    if (why != NULL && (s->host.n_strangers >= SERVER_STRANGER_PLACES || fd >= s->max_fd)) {
        sockio_close(fd);
        return true;
    }
    why = why == NULL ? is_full(s, l, fd) : NULL;
    if (why != NULL) {
        sockio_close(fd);
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
            sockio_close(fd);
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

/* ---- listeners ---- */
static bool is_inherited(const listener *l)
{
    return l->socket.inherited;
}

/* fd: of the service manager, taken whatever happens; -1: bind the path. */
static kvs_status open_listener(server *s, unsigned which, int fd, const char *path, mode_t mode, kvs_err *err)
{
    listener *l = calloc(1, sizeof *l);
    kvs_status st = KVS_OK;

    if (l == NULL) {
        if (fd >= 0)
            (void)close(fd);
        return kvs_fail(err, KVS_E_NO_MEMORY, "listening socket: out of memory");
    }
    l->server = s;
    l->door = (door){which == 0, which > 0 ? which - 1 : 0};
    if (fd >= 0)
        listen_inherit(&l->socket, fd);
    else
        st = listen_open(&l->socket, path, mode, err);
    if (st != KVS_OK) {
        free(l);
        return st;
    }
    s->listeners[which] = l;
    return KVS_OK;
}

/* Handles, but nobody is let in yet. */
static kvs_status start_listener(server *s, listener *l, kvs_err *err)
{
    int rc = uv_poll_init(s->cfg.loop, &l->poll, l->socket.fd);

    if (rc != 0)
        return kvs_fail(err, KVS_E_SYS, "listening socket: %s", uv_strerror(rc));
    l->poll.data = l;
    (void)uv_timer_init(s->cfg.loop, &l->backoff);
    l->backoff.data = l;
    l->n_handles = 2;
    s->n_handles += 2;
    return KVS_OK;
}

static void stop_listener(listener *l)
{
    if (l->n_handles > 0) {
        (void)uv_timer_stop(&l->backoff);
        (void)uv_poll_stop(&l->poll);
    }
    l->polling = false;
    listen_stop(&l->socket);
}

static void finish(server *s);

static void handle_closed(server *s)
{
    if (--s->n_handles == 0)
        finish(s);
}

static void free_listener(listener *l)
{
    listen_close(&l->socket);
    free(l);
}

static void on_listener_closed(uv_handle_t *h)
{
    listener *l = h->data;
    server *s = l->server;

    if (--l->n_handles == 0)
        free_listener(l);
    handle_closed(s);
}

/* Its path may be bound again at once. */
static void close_listener(server *s, unsigned which)
{
    listener *l = s->listeners[which];

    if (l == NULL)
        return;
    s->listeners[which] = NULL;
    if (l->n_handles == 0) {
        free_listener(l);
        return;
    }
    stop_listener(l);
    listen_close(&l->socket);
    uv_close((uv_handle_t *)&l->poll, on_listener_closed);
    uv_close((uv_handle_t *)&l->backoff, on_listener_closed);
}

/* ---- a reload ---- */
/* Of a tenant that has no socket yet: is it one of those that we hold now? */
static kvs_status check_free(const server *s, const char *path, kvs_err *err)
{
    for (unsigned i = 0; i <= CONFIG_MAX_TENANTS; i++)
        if (s->listeners[i] != NULL && strcmp(s->listeners[i]->socket.path, path) == 0)
            return kvs_fail(err, KVS_E_BUSY, "%s is that of tenant %s until another reload has taken it out", path,
                            name_of(s->listeners[i]));
    return KVS_OK;
}

static kvs_status prepare_tenant(server *s, uint32_t t, const config_tenant *x, bool dry_run, kvs_err *err)
{
    kvs_err why = {0};
    kvs_status st = check_free(s, x->path, &why);
    bool is_ours = st != KVS_OK;

    if (st == KVS_OK)
        st = listen_check(x->path, &why);
    if (st == KVS_OK && !dry_run)
        st = open_listener(s, t + 1, -1, x->path, (mode_t)x->mode, &why);
    if (st == KVS_OK && !dry_run) {
        s->listeners[t + 1]->fresh = true;
        st = start_listener(s, s->listeners[t + 1], &why);
    }
    if (st != KVS_OK)
        return kvs_fail(err, st, "tenants.%s.path: %s%s", x->name, why.msg,
                        st == KVS_E_BUSY && !is_ours ? " (a socket unit hands it over at a restart)" : "");
    return st;
}

kvs_status server_prepare(server *s, const config *next, bool dry_run, kvs_err *err)
{
    kvs_status st = KVS_OK;

    for (uint32_t t = 1; t < next->n_tenants && st == KVS_OK; t++)
        if (!next->tenants[t].gone && s->listeners[t + 1] == NULL)
            st = prepare_tenant(s, t, &next->tenants[t], dry_run, err);
    for (unsigned i = 0; i <= CONFIG_MAX_TENANTS && st != KVS_OK; i++)
        if (s->listeners[i] != NULL && s->listeners[i]->fresh)
            close_listener(s, i);
    return st;
}

void server_configured(server *s)
{
    for (uint32_t t = 0; t < CONFIG_MAX_TENANTS; t++) {
        listener *l = s->listeners[t + 1];

        if (l == NULL)
            continue;
        l->fresh = false;
        if (tenant_is_gone(s->cfg.config, t) && !is_inherited(l)) /* else whoever comes there is told that it is gone */
            close_listener(s, t + 1);
        else
            listener_poll(l);
    }
    conns_recheck(&s->host);
}

/* ---- life ---- */
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

/* Better known before the first one is turned away. */
static void warn_of_few_descriptors(const server *s)
{
    const config *c = s->cfg.config;
    struct rlimit lim;

    if ((uint64_t)s->max_fd >= (uint64_t)c->max_clients * c->n_tenants || getrlimit(RLIMIT_NOFILE, &lim) != 0)
        return;
    log_event(LOG_LEVEL_WARN, "few_descriptors",
              " limit=%llu max_clients=%lld tenants=%u hint=\"LimitNOFILE= in the unit, or ulimit -n\"",
              (unsigned long long)lim.rlim_cur, (long long)c->max_clients, c->n_tenants);
}

static server *server_new(const server_config *c)
{
    server *s = calloc(1, sizeof *s);

    if (s == NULL)
        return NULL;
    s->cfg = *c;
    s->armed_us = UINT64_MAX;
    s->overflow_uid = door_overflow_uid();
    s->max_fd = (int)process_client_fds();
    s->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    warn_of_few_descriptors(s);
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
    for (unsigned i = 0; i <= CONFIG_MAX_TENANTS; i++) {
        kvs_status st = s->listeners[i] != NULL ? start_listener(s, s->listeners[i], err) : KVS_OK;

        if (st != KVS_OK)
            return st;
        if (s->listeners[i] != NULL)
            listener_poll(s->listeners[i]);
    }
    return KVS_OK;
}

void server_stop_listening(server *s)
{
    for (unsigned i = 0; i <= CONFIG_MAX_TENANTS; i++)
        if (s->listeners[i] != NULL)
            stop_listener(s->listeners[i]);
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
    if (s->spare_fd >= 0)
        (void)close(s->spare_fd);
    free(s);
}

static void on_closed(uv_handle_t *h)
{
    handle_closed(h->data);
}

void server_close(server *s)
{
    bool begun;

    if (s == NULL)
        return;
    begun = s->n_handles > 0;
    for (unsigned i = 0; i <= CONFIG_MAX_TENANTS; i++)
        close_listener(s, i);
    if (!begun) {
        finish(s);
        return;
    }
    uv_close((uv_handle_t *)&s->timer, on_closed);
    uv_close((uv_handle_t *)&s->prepare, on_closed);
    uv_close((uv_handle_t *)&s->no_wait, on_closed);
}
