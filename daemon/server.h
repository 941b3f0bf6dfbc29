#ifndef KVS_DAEMON_SERVER_H
#define KVS_DAEMON_SERVER_H

/* Server: the listening sockets, one a tenant and the admin's, who may come in, and the turn of the loop.
 *
 * Knows sockets, peers' uids, places and the clock of the core.  Does not know requests or signals.  Loop
 * thread only. Owns its sockets, handles and connections; borrows loop, config, core and mailbox.
 *
 *   each turn, before the loop waits:  connections go on -> on_turn -> one timer armed for the core and all
 * time-outs */

#include <stdbool.h>
#include <uv.h>

#include "config/config.h"
#include "daemon/mailbox.h"
#include "daemon/metrics.h"
#include "daemon/request.h"

enum {
    SERVER_ADMIN_PLACES = 8,
    SERVER_STRANGER_PLACES = 16, /* peers that may not come in and are being told so; more are closed at once */
    SERVER_BACKOFF_MS = 100,
};

typedef struct server server;

typedef struct server_config {
    uv_loop_t *loop;
    const config *config;      /* limits are read at every use: a reload may change them */
    int admin_fd;              /* listening socket of the service manager, taken also on failure; -1: bind the path */
    metrics_edge *edge;        /* or NULL */
    const int *tenant_fds;     /* the same, one a tenant of the config; borrowed by server_create; NULL: bind all */
    void (*on_turn)(void *ud); /* may be NULL */
    void *ud;
} server_config;

/* Bind and listen, but serve nobody yet.  Before any thread exists.  Failures: see listen_open. */
kvs_status server_create(server **ret, const server_config *c, kvs_err *err);
kvs_status server_start(server *s, core *c, mailbox *m, kvs_err *err);

/* A reload: open the sockets of the tenants that are new in `next`, or (dry_run) only say whether that would work.  On
 * failure, which names the tenant, nothing is left behind.  The config must then become `next`. */
kvs_status server_prepare(server *s, const config *next, bool dry_run, kvs_err *err);
/* The config has become that: new tenants may come in, and who may no longer goes.  The socket of a tenant that is gone is
 * closed and its file removed; one of the service manager stays, and whoever comes there is told so. */
void server_configured(server *s);

void server_stop_listening(server *s);   /* also removes the sockets' files; the locks stay */
bool server_is_flushed(const server *s); /* every reply made so far is sent */
void server_close_clients(server *s);
bool server_is_empty(const server *s); /* nothing is left of any client */

/* Freed when the loop has closed its handles.  Clients must be gone. */
void server_close(server *s); /* NULL is fine */

#endif
