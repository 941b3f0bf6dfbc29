#ifndef KVS_DAEMON_REQUEST_H
#define KVS_DAEMON_REQUEST_H

/* Request layer: every op of the protocol between a frame that arrived and the reply that leaves.
 *
 * Knows ops, clients' rights, regions, leases, credit, deadlines.  Does not know sockets, libuv or how bytes
 * are copied. Time comes in as now_us, so that tests run it under a simulated clock.  Loop thread only.
 *
 *   conn --peer_request--> admit (limits, credit, reply space) --> directory / pool --> mover | decoder |
 * pinner conn <--peer_ops.send-- exactly one reply a request         <-- on_done (by the work_sink)
 *
 * Ownership: the core owns pool, directory, workers, regions and peers; it borrows the devices and the config.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "config/config.h"
#include "daemon/persist.h"
#include "daemon/work.h"
#include "kernels/device.h"
#include "proto/frame.h"
#include "proto/status.h"

/* ---- replies ---- */
typedef struct reply {
    struct reply *next; /* the sender's queue */
    size_t len, sent;   /* bytes: header and body */
    size_t held;        /* bytes that its memory takes */
    uint32_t n_fds;
    int *fds; /* [n_fds], owned: closed and freed with the reply */
    uint8_t bytes[];
} reply;
void reply_destroy(reply *r); /* NULL is fine */

/* ---- the core ---- */
typedef struct core core;

/* boot_id is made here.  Starts the worker threads and the background growth of the arena.  sink: where their
 * completions go; the loop must run each work's on_done. */
kvs_status core_create(core **ret, const config *c, device *dev, work_sink sink, uint64_t now_us, kvs_err *err);
/* The same on n_devs devices (1..WIRE_MAX_DEVICES, all of one kind, so that host memory which the first one has registered
 * is fit for all), in memory that may hold an earlier life's blocks; borrowed until core_destroy.  NULL: new memory. */
kvs_status core_create_on(core **ret, const config *c, device *const *devs, uint32_t n_devs, work_sink sink,
                          persist *memory, uint64_t now_us, kvs_err *err);
/* What RELOAD asks of the process that reads the configuration file.  dry_run: say what would change, change nothing.  The
 * answer is a whole JSON object; w NULL: none is wanted.  On failure everything is as it was.  NULL: there is no file. */
struct json_writer;
typedef struct core_operator {
    kvs_status (*reload)(void *ud, bool dry_run, struct json_writer *w, kvs_err *err);
    void *ud;
} core_operator;
void core_set_operator(core *c, const core_operator *o);
/* Of every reload, whoever asked for it: counted in STATUS. */
void core_reloaded(core *c, kvs_status s, const kvs_err *err);

/* May these values be taken over while the core lives?  E_CONFIG: the pool cannot have that size without a restart,
 * or without taking a tenant what its floor keeps. */
kvs_status core_check_config(const core *c, const config *next, kvs_err *err);
/* The config has changed (a reload): take over what is kept elsewhere.  Its tenants are the same ones in the same order, new
 * ones behind them.  Of those that are gone every block, pin and lease is dropped; their peers are the server's to close. */
void core_configured(core *c);
/* Everything is refused with E_STATE from now on, but CANCEL, HEALTH and STATUS.  Jobs that have not begun are answered
 * E_CANCELLED, those that run go on to their end. */
void core_drain(core *c);
bool core_is_idle(const core *c);  /* no request in flight, no region being unmapped */
bool core_is_ready(const core *c); /* the first piece is usable */
/* How far the arena has grown: bytes that are usable, and how many were asked for.  False: it grows no further. */
bool core_get_growth(const core *c, uint64_t *ret_usable, uint64_t *ret_max);
bool core_has_size(const core *c); /* all that the configuration asks for now is there */
/* The process runs an older configuration than the file's, which is broken (why; NULL: it is mended): HEALTH says so. */
void core_set_old_config(core *c, const char *why);
/* HEALTH's state (enum wire_health), and why: bits of health_reason. */
uint32_t core_health(const core *c, uint32_t *ret_reasons);
/* KVS_OK, or why no piece will ever be usable: the process must end. */
kvs_status core_start_failure(const core *c, kvs_err *err);
kvs_status core_lost(const core *c); /* E_DEVICE_LOST once the device is; the process must end non-zero */
/* Joins the workers.  All peers must be gone.  Completions still posted must be run by the caller before
 * this: core_stop joins and posts, then the caller drains the sink, then core_destroy frees. */
void core_stop(core *c);
void core_destroy(core *c);

/* Counts of main's, to be shown beside those of the core; borrowed. */
struct metrics_edge;
void core_set_edge(core *c, const struct metrics_edge *e);

/* Run what is due (deadlines, leases, growth).  Returns when to call next, UINT64_MAX: only after other
 * events. */
uint64_t core_tick(core *c, uint64_t now_us);
uint64_t core_next_due(const core *c); /* cheap; may have moved after any call into the core */

/* Reasons in HEALTH's reply, bits.  They decide its state in this order: draining, degraded, starting, ok. */
enum health_reason {
    HEALTH_NO_PIECE = 1,     /* starting: no piece of the arena is usable yet */
    HEALTH_PIECE_FAILED = 2, /* degraded: a piece could not be allocated or registered; the pool is smaller */
    HEALTH_STUCK = 4,        /* degraded: the device or the system has been busy with one call for more than 10 s */
    HEALTH_DEVICE_LOST = 8,  /* degraded: nothing but HEALTH is answered; the process is about to end */
    HEALTH_DRAINS = 16,      /* draining: the daemon is about to end, or the operator drained it */
    HEALTH_OLD_CONFIG = 32,  /* degraded: the configuration was refused, the last accepted one is in use */
};

/* ---- a connection, as the request layer sees it ---- */
typedef struct peer peer;

typedef struct peer_ops {
    void (*send)(void *ud, reply *r);    /* takes ownership; never calls back into the peer */
    size_t (*out_bytes)(const void *ud); /* that replies take which are queued, not yet sent */
    bool (*is_behind)(const void *ud);   /* it does not read what it was sent: events are left out */
    void (*closed)(void *ud);            /* peer_gone has finished: nothing of the client is left; ud may go */
} peer_ops;

enum { PEER_DENIED_BYTES = 96 };

typedef struct peer_info {
    uid_t uid;
    pid_t pid;     /* 0 if another PID namespace */
    bool is_admin; /* came in by the admin socket */
    uint32_t tenant;
    char denied[PEER_DENIED_BYTES]; /* why not: its HELLO is answered E_DENIED, and then it goes; "": it may come in */
} peer_info;

/* E_LIMIT: too many clients.  The peer answers nothing but HELLO until HELLO. */
kvs_status peer_create(peer **ret, core *c, const peer_ops *ops, void *ud, const peer_info *info, uint64_t now_us,
                       kvs_err *err);
/* One whole frame; its descriptors are the peer's from here on.  A failure (E_PROTO, ...) means: close the
 * connection. A refusal is a reply and returns KVS_OK. */
kvs_status peer_request(peer *p, frame *f, uint64_t now_us, kvs_err *err);
uint32_t peer_in_flight(const peer *p); /* requests that have no reply yet */
bool peer_said_hello(const peer *p);
uint64_t peer_conn_id(const peer *p); /* 1.., what HELLO told the client and what lists and the log call it */
/* It is to be closed soon: jobs that have not begun are answered E_CANCELLED, those that run go on to their end. */
void peer_dismiss(peer *p);
/* The connection is gone: jobs that wait are dropped, those that run are waited for, then regions are
 * unmapped on the pinner, leases, holds and half-written blocks go; then ops->closed.  Call once; no other
 * call after it. */
void peer_gone(peer *p, uint64_t now_us);

#endif
