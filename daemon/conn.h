#ifndef KVS_DAEMON_CONN_H
#define KVS_DAEMON_CONN_H

/* Connections: bytes and descriptors between a socket and the request layer, and the end of each client.
 *
 * Knows sockets, frames, time-outs, back-pressure, a peer's process.  Does not know ops or bodies.  Loop
 * thread only. A conn owns its descriptor, its unsent replies and its peer; it frees itself when the request
 * layer has said that nothing of the client is left and the loop has closed its handles.  The host, which is
 * the server's, keeps the lists.
 *
 *   OPEN ---- end of stream ----> HALF (no more requests; replies go out) ---- all replied ----.
 *     |                             |                                                          v
 *     `--- fault, time-out, peer's process dead, loop ends --------------------------------> CLOSING --->
 * freed (peer_gone; then peer closed and handles closed)
 *
 * Fair: limits.request_budget frames, CONN_TURN_BYTES or CONN_TURN_US of one connection a turn of the loop, and CONN_TURN_US of
 * all that a tenant has; the rest on the next, who has waited longest first.  One request that takes longer is the last of its
 * tenant in that turn.
 *
 * Readers of large frames have memory within limits.memory_bytes, or an equal part of it each, or their tenants have.  Who comes
 * later waits in a queue, and is read no further; when that takes long, those are dropped that have memory and send nothing to
 * speak of.
 *
 * A client that asks again within CONN_QUICK_US of its answer finds the loop awake the next time: for as long after each of
 * its requests and answers, and not a moment longer, the loop looks instead of sleeping. */

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "config/config.h"
#include "daemon/mailbox.h"
#include "daemon/metrics.h"
#include "daemon/request.h"

enum { CONN_TURN_BYTES = 1 << 20, CONN_TURN_US = 2000, CONN_QUICK_US = 250 };

typedef struct conn conn;

typedef struct conn_host { /* filled by the holder, whose handles drive the three functions below */
    uv_loop_t *loop;
    core *core;
    mailbox *mailbox;
    const config *config; /* read at every use: a reload may change it */
    metrics_edge *edge;   /* or NULL */
    /* ---- kept by conn.c ---- */
    conn *all;   /* every connection that has memory */
    conn *later; /* those with something to do on the next turn, the longest first */
    conn **later_end;
    conn *waiting; /* those whose large frame is not read further, the longest first: others have the memory */
    conn **waiting_end;
    uint64_t look_us; /* not before it are readers looked at again that have memory for which others wait */
    uint64_t due_us;  /* when conns_check is due; UINT64_MAX: nobody waits for anything */
    /* Until freed: a client that comes back has left nothing behind.  Strangers are none of the others. */
    uint32_t n_clients, n_admins, n_strangers;
    uint32_t n_tenant[CONFIG_MAX_TENANTS];            /* clients of each */
    uint32_t n_tenants;                               /* that have some */
    uint32_t tenant_waiting[CONFIG_MAX_TENANTS + 1];  /* of each; the last: of none */
    uint64_t tenant_in_bytes[CONFIG_MAX_TENANTS + 1]; /* of in_bytes, likewise */
    uint64_t tenant_us[CONFIG_MAX_TENANTS + 1]; /* that this turn of the loop has had for each; strangers: the last */
    uint64_t n_dropped;                         /* for a fault */
    uint64_t out_bytes;                         /* that unsent replies of all take */
    uint64_t in_bytes;                          /* that their readers take for large frames */
} conn_host;

void conn_host_init(conn_host *h, uv_loop_t *loop, core *c, mailbox *m, const config *cfg);

/* Serve the connected socket `fd`, which is taken also on failure. */
kvs_status conn_open(conn_host *h, int fd, const peer_info *info, kvs_err *err);

/* Once each turn of the loop, right before it waits: go on with frames left over, send what was queued, close
 * what was condemned.  True: there is more to do at once, so the loop must not wait. */
bool conns_turn(conn_host *h);

/* Drop what waits for too long.  Call when due_us has come; sets the next due_us. */
void conns_check(conn_host *h, uint64_t now_us);

/* Tenants have changed (a reload): who may no longer come in goes on the next turn.  Those whose tenant is gone get the
 * replies that are still to come first; what they ask now is not read. */
void conns_recheck(conn_host *h);

bool conns_flushed(const conn_host *h); /* no reply is waiting to be sent */
void conns_close(conn_host *h);         /* all of them; no more replies */
bool conns_gone(const conn_host *h);    /* nothing is left of any */

uint64_t conn_now_us(void);

#endif
