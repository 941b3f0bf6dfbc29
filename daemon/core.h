#ifndef KVS_DAEMON_CORE_H
#define KVS_DAEMON_CORE_H

/* The inside of the request layer, shared by request.c, core.c, peer.c, the op_*.c files and those named below; nobody
 * else includes it.
 *
 * Knows everything request.h hides.  Loop thread only.
 * Ownership: a request belongs to its peer from admission to request_end; memory got by request_alloc goes
 * with it.
 *
 *   NEW --handler refuses or answers at once----------------------------> answered, ended (inside
 * peer_request)
 *    `---handler submits jobs--> OUT --jobs back--> answered, ended
 *                                 `--deadline--> answered E_DEADLINE, still OUT --jobs back--> ended
 *
 * A request that is OUT keeps its credit, its slots' uses and its place in the table until its jobs are back,
 * answered or not.  CANCELs wait on the target's list and are answered by its end. */

#include "daemon/calibration.h"
#include "daemon/decoder.h"
#include "daemon/directory.h"
#include "daemon/exchange.h"
#include "daemon/metrics.h"
#include "daemon/mover.h"
#include "daemon/pinner.h"
#include "daemon/pool.h"
#include "daemon/region.h"
#include "daemon/request.h"
#include "daemon/tenant.h"
#include "proto/wire.h"

enum {
    CORE_ADMIN_PLACES = 8,
    CORE_CONTROL_CREDIT = 16,
    CORE_MAX_REGIONS = 256, /* of one peer */
    CORE_MAX_PING = 64,
    CORE_LEAST_PART = 4096, /* bytes of requests that every client may have, whatever the others have */
    CORE_MAX_GROUP = 64,    /* namespaces of one RESERVE */
    CORE_MAX_PAGE = 4096,   /* keys of one STATUS reply */
    CORE_EVENT_BATCH = 256, /* events of one frame */
    CORE_EVENT_FRAMES = 64, /* made for all watchers in one turn: a few ms */
    CORE_EVENTS = 1 << 15,  /* that wait for later turns: more than the keys of a request of 1 MiB */
    CORE_STUCK_US = 10 * 1000 * 1000,
    PEER_BUCKETS = 256,
    CORE_TOKEN_BUCKETS = 4096,
    REPLY_SLACK_BYTES = 1024, /* of a reply's memory, not worth a copy */
    REPLY_HEAD_BYTES = WIRE_HEADER_BYTES + 8 + KVS_ERR_MSG_BYTES,
};

typedef struct request request;

/* ---- ops ---- */
enum op_who { OP_CLIENT = 1, OP_ADMIN = 2, OP_ANY = 3 };
enum op_credit { CREDIT_NONE, CREDIT_DATA, CREDIT_CONTROL };
enum op_flags {
    OP_WHEN_LOST = 1,     /* answered when the device is lost */
    OP_WHEN_DRAINING = 2, /* answered while the daemon drains */
    OP_TAKES_FDS = 4,
    OP_WHEN_PAUSED = 8, /* answered while the operator has drained the daemon: looks, lets go, takes nothing */
};

typedef struct op_row {
    uint16_t op;
    uint8_t who, credit, flags;
    uint8_t group;        /* enum config_ops that a tenant must have been allowed; 0: none */
    uint32_t fixed_bytes; /* of the request body; less is refused before the handler runs */
    uint32_t reply_bytes; /* room for the reply's fixed part, reserved at admission; arrays: request_room */
    /* Refuse (status and err), or fill request_out and return KVS_OK / E_PARTIAL, or set r->out and submit
     * jobs. */
    kvs_status (*run)(request *r, wire_in *in, kvs_err *err);
    /* Signal every valid counter that the body names: the request was refused.  NULL: names none. */
    void (*refused)(peer *p, wire_in *in, kvs_status s);
} op_row;

const op_row *op_find(uint16_t op); /* NULL: not an op that a client may send */

/* ---- requests ---- */
typedef struct request_chunk {
    struct request_chunk *next;
    _Alignas(max_align_t) uint8_t bytes[];
} request_chunk;

typedef struct request_ops {
    /* Drop what waits; running: stop what runs as well.  True: nothing has started nor ever will.  More than once is
     * fine. */
    bool (*stop)(request *r, bool running);
    /* The deadline has passed: add what is known of each item to request_out, and signal what will never run.
     * untouched: as stop said. */
    void (*overdue)(request *r, bool untouched);
} request_ops;

struct request {
    peer *peer;
    const op_row *row;
    uint64_t id, deadline_us; /* absolute */
    uint64_t came_ns;         /* for the latency, on the real clock */
    uint64_t cost_bytes;      /* drawn on the peer's credit */
    uint64_t held_bytes;      /* memory: chunks and reply */
    uint64_t lacked_bytes;    /* that limits.memory_bytes did not let it have; 0: it had all */
    reply *reply;             /* reserved; NULL once sent */
    size_t room;              /* payload bytes it can take */
    wire_out payload;
    frame *frame; /* during peer_request only */
    bool out, answered, cancelled;
    kvs_status outcome; /* of the jobs, for CANCEL */
    const request_ops *ops;
    void *ext; /* the op's own, from request_alloc */
    request_chunk *chunks;
    request *prev, *next; /* the peer's list */
    request *chain;       /* the peer's table of ids */
    request *cancels;     /* CANCELs that wait for this one, by next_cancel */
    request *next_cancel;
    size_t due_at; /* place in the core's heap plus one; 0: none */
};

/* Zeroed memory that lives as long as the request; NULL: E_NO_MEMORY, which becomes E_BUSY where it was limits.memory_bytes.
 * n * size is checked. */
void *request_alloc(request *r, uint64_t n, size_t size);
/* Make sure that the reply can take `bytes` of payload; E_NO_MEMORY.  Before any effect. */
kvs_status request_room(request *r, uint64_t bytes, kvs_err *err);
/* Draw `bytes` on the peer's credit: E_BUSY if too much is in flight, E_LIMIT if it could never be admitted.
 */
kvs_status request_charge(request *r, uint64_t bytes, kvs_err *err);
wire_out *request_out(request *r); /* the reply's payload so far; filled before the answer */
/* Send the one reply: status, message, payload.  err may be NULL (no message). */
void request_answer(request *r, kvs_status s, const kvs_err *err);
/* Add a descriptor to the reply; taken, also on failure. */
kvs_status request_add_fd(request *r, int fd, kvs_err *err);
/* From now on the request is out: watched by its deadline.  `ops` is used until request_end. */
kvs_status request_go(request *r, const request_ops *ops, kvs_err *err);
/* Its jobs are back and it was answered: credit back, CANCELs answered, memory freed. */
void request_end(request *r);
/* The body must have been read to its end. */
kvs_status request_parsed(const wire_in *in, kvs_err *err);
/* The descriptors of the frame become the caller's. */
int request_take_fd(request *r, uint32_t i);

/* ---- counters ---- */
kvs_status counter_check_after(uint32_t counter, uint64_t value, kvs_err *err);
kvs_status counter_check_signal(uint32_t counter, uint64_t value, kvs_err *err);
/* Signal if counter and value are valid; for requests that never became a job. */
void counter_signal(peer *p, uint32_t counter, uint64_t value, kvs_status s);
void job_fill(job *j, peer *p, uint32_t after, uint64_t after_value, uint32_t signal, uint64_t signal_value);

/* ---- peers ---- */
struct peer {
    core *core;
    const peer_ops *ops;
    void *ud;
    peer_info info;
    uint32_t tenant; /* TENANT_ADMIN on the admin socket */
    uint64_t conn_id;
    peer *prev, *next;
    bool hello, gone, closing; /* closing: its seats are being left */
    uint8_t name[WIRE_MAX_NAME + 1];
    uint32_t name_len;
    uint8_t *counters;
    request *requests; /* all that are out */
    request *table[PEER_BUCKETS];
    uint32_t n_in_flight, n_data, n_control, n_out;
    uint64_t bytes_in_flight, import_bytes;
    uint64_t request_bytes; /* memory that its requests hold */
    region_seat *seats;
    uint32_t n_seats, n_making; /* regions; those that are being made have no seat yet */
    uint32_t n_tasks;           /* tasks on the pinner that belong to it */
    uint32_t watch_mask;
    uint64_t watch_id, watch_seq, watch_lost;
    uint64_t watch_from; /* number of the first event behind the WATCH */
};

request *peer_find(const peer *p, uint64_t id);
void peer_drained(peer *p); /* a request ended or a task came back: go on with peer_gone if it was the last */
/* Namespace `ns`, if this peer may name it; E_NOT_FOUND else, whether or not it exists. */
kvs_status peer_ns(const peer *p, uint32_t ns, const directory_ns **ret, kvs_err *err);
kvs_status peer_seat(const peer *p, uint32_t region, region_seat **ret, kvs_err *err);
/* The same, of slots of namespace ns. */
kvs_status peer_slots(const peer *p, uint32_t region, uint32_t ns, region_seat **ret, kvs_err *err);
/* May the peer have `bytes` of device memory, of which `had` are charged already?  E_LIMIT names the limit. */
kvs_status peer_check_bytes(const peer *p, bool imported, uint64_t had, uint64_t bytes, kvs_err *err);
/* May its tenant's regions keep `n` more descriptors?  E_LIMIT. */
kvs_status peer_check_fds(const peer *p, uint32_t n, kvs_err *err);
uint64_t peer_import_room(const peer *p);
void peer_add_seat(peer *p, region_seat *s);

/* ---- regions in the core ---- */
/* Closes device memory on the pinner.  Made before the memory is, so that giving it back cannot fail. */
typedef struct closer {
    pinner_task task;
    core *core;
    peer *peer; /* whose peer_gone waits for it */
    device_mem *mem;
    region *region; /* or NULL; destroyed with it: to free the books of a million slots takes milliseconds */
    uint64_t bytes; /* charged: to the core, or to the peer if imported, and to the tenant */
    uint32_t n_fds; /* charged to the tenant */
    uint32_t tenant;
    bool imported;
    void (*after)(void *ud); /* or NULL */
    void *ud;
} closer;

closer *closer_create(peer *p, bool imported, uint64_t bytes); /* charges the bytes; NULL: E_NO_MEMORY */
void closer_run(closer *x, peer *p, void (*after)(void *ud), void *ud);
void closer_charge(closer *x, uint64_t bytes); /* in place of what it was charged before */
void closer_charge_fds(closer *x, uint32_t n);
void closer_cancel(closer *x); /* there is no memory to close: the charge goes back */

/* Leave: the last seat takes the region off the list and closes it on the pinner.  `after` (or NULL) is
 * called with ud when its memory is gone, at once if others are still seated. */
void core_leave(peer *p, region_seat *s, void (*after)(void *ud), void *ud);
void core_add_region(core *c, region *g);    /* it gets its number, above 0 */
void core_remove_region(core *c, region *g); /* off the list; not destroyed */
/* The tenant's region with this token; NULL: none. */
region *core_find_token(const core *c, uint32_t tenant, const uint8_t token[WIRE_TOKEN_BYTES]);

/* ---- the core ---- */
typedef struct core_event {
    uint32_t type, cause, ns, depth, tenant;
    uint8_t key[32];
} core_event;

typedef struct core_piece {
    void *address;
    uint64_t bytes;
} core_piece;

/* A RESET on its way, a DROP of many keys from many regions, or the emptying of a tenant that a reload has taken out.  In the
 * memory of its request or tenant. */
typedef struct sweep {
    struct sweep *next;   /* the core's list */
    directory_sweep keys; /* in host memory; of a DROP only whose and of which namespace */
    /* Of a DROP: [n_named] keys, which are gone from host memory, and what became of each.  NULL: all keys. */
    const uint8_t *named;
    kvs_status *results;
    uint32_t n_named;
    region *region; /* when host memory is over: the next one to look at, from this slot, or key of `named`, on */
    uint32_t at;
    bool begun;   /* something may be gone */
    bool stopped; /* the rest is to stay */
    void (*on_end)(core *c, struct sweep *w);
    void *ud;
} sweep;

/* Whose sweeps take turns: those of each tenant, of operators, and of what tenants that are gone have left. */
enum { SWEEP_OPERATORS = CONFIG_MAX_TENANTS, SWEEP_GONE, SWEEP_OWNERS };

typedef struct sweep_line {
    sweep *first, **end; /* end: of no meaning while there is no first */
} sweep_line;

typedef struct core_tenant {
    sweep emptying; /* on_end NULL: it is not on its way */
    bool left_more; /* since it began */
    uint32_t n_clients;
    uint64_t region_bytes, import_bytes; /* charged */
    uint32_t region_fds;                 /* that its regions keep, imports included */
    struct load *lone;                   /* LOADs that one onto another device may join: load_twin.c */
} core_tenant;

/* A device and the threads that serve it.  A region lies on one device, and so does every job. */
typedef struct core_device {
    device *dev;   /* borrowed */
    char name[16]; /* "cpu", "cuda"; of several: "cuda0", "cuda1" */
    device_about about;
    calibration calibration; /* of the copies that load and store make */
    mover *load, *store;
    decoder *decoder; /* the workers are NULL once the core has stopped */
} core_device;

struct core {
    const config *config; /* borrowed; a reload changes it */
    core_device devices[WIRE_MAX_DEVICES];
    uint32_t n_devices; /* 1.. */
    work_sink sink;
    pool *pool;
    directory *dir;
    pinner *pinner;
    uint8_t boot_id[16];
    uint64_t seed, now_us, start_us;
    bool draining, stopped, step_due, old_config;
    bool paused; /* drained by the operator */
    core_operator operator;
    uint64_t n_reloads, n_reloads_failed;
    kvs_err reload_err; /* of the latest reload, or of the start, if that was refused */
    kvs_status lost;
    peer *peers;
    uint32_t n_clients, n_admins;
    uint32_t n_present;                      /* tenants with clients */
    core_tenant tenants[CONFIG_MAX_TENANTS]; /* those that are gone, too: of their last clients */
    uint64_t next_conn_id;
    region *regions, *tokens[CORE_TOKEN_BUCKETS]; /* tokens: those that have one, by it */
    uint32_t next_region, n_regions;
    bool numbers_come_again; /* next_region has passed its end */
    uint64_t region_bytes;   /* daemon regions, those being made and unmapped included */
    uint64_t import_bytes;   /* of all peers */
    uint64_t request_bytes;  /* memory that requests hold, of all peers */
    uint32_t n_requests;     /* out */
    uint32_t client_fds;     /* descriptors that are kept for clients are below this */
    uint32_t n_tasks;        /* on the pinner, but for the arena's growth */
    request **due;           /* heap by deadline */
    size_t n_due, cap_due;
    uint64_t lease_due_us;
    exchange_reach reach[WIRE_MAX_DEVICES][WIRE_MAX_DEVICES];
    exchange exchanges[WIRE_MAX_DEVICES][WIRE_MAX_DEVICES]; /* [i][i] is none */
    bool may_exchange[WIRE_MAX_DEVICES];                    /* with any other */
    sweep_line sweeps[SWEEP_OWNERS];                        /* the next one to go on first */
    uint32_t n_sweeps, swept;                               /* swept: the latest owner that had a turn */
    struct load *held;                                      /* load_twin.c */
    uint64_t held_due_us;                                   /* to look at those that are held */
    const persist *memory;                                  /* borrowed; NULL: the pool's own */
    pinner_task grow;
    core_piece growing, *pieces; /* registered */
    int32_t numa_node;           /* that new pieces come from; KVS_NODE_ANY */
    bool node_is_asked_for;      /* by the configuration, which the pinner's thread may not read */
    uint32_t n_pieces;
    bool is_growing, grow_failed;
    bool growing_is_new; /* nothing in it is of an earlier life */
    pinner_task drop;    /* of a piece above the pool's size */
    core_piece dropping;
    bool is_dropping, shrinks; /* shrinks: pieces may be left to drop */
    bool resize_due;           /* the config has another size than the pool */
    kvs_err grow_err;
    core_event events[CORE_EVENTS]; /* a ring; the pages come with the first burst */
    uint32_t first_event, n_events, n_watchers;
    uint64_t n_told; /* events before the first one here */
    metrics_counts counts;
    const metrics_edge *edge; /* borrowed, or NULL */
};

/* The device of a region, and its workers. */
core_device *core_device_of(core *c, const region *g);
/* health.c */
void core_get_work(const core *c, uint32_t i, metrics_work *ret);
void core_get_all_work(const core *c, metrics_work *ret); /* sums; the oldest of all */

/* events.c.  Every way into the core from outside ends with core_rest: events go out, of very many for many watchers the
 * rest in later turns. */
void core_on_event(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32]);
void core_rest(core *c);

/* growth.c */
device *core_host(const core *c); /* which registers host memory: once is good for all devices */
void core_grow(core *c);          /* by the next piece, if there is one and nothing else is under way */
void core_grow_again(core *c);    /* after a failure, what core_grow then does */
void core_resize(core *c);        /* towards the size that the configuration has now, likewise */

/* links.c */
void core_introduce_devices(core *c); /* to one another, before any memory is made */
void core_set_movers(core *c);
void core_log_links(const core *c);
void core_share_link(const core *c, uint32_t tenant, uint32_t share);
void core_present(core *c, uint32_t by); /* one more tenant has clients now, or one less */

/* sweep.c */
enum { SWEEP_STEP = 1024 };            /* slots that one turn looks at, or searches, of all sweeps together */
void core_sweep(core *c, sweep *w);    /* by later steps, until on_end */
void core_sweep_step(core *c);         /* one of them, a part */
sweep *core_next_sweep(const core *c); /* the one whose turn is next; NULL: there is none */
void core_sweep_regions(const core *c, sweep *w); /* from w->region on, all at once */
void core_sweeps_pass(core *c, const region *g);  /* it is about to leave the list */

/* deadlines.c */
kvs_status core_due_add(core *c, request *r);
void core_due_remove(core *c, request *r);
void core_due_run(core *c); /* those that have passed */

void core_note_status(core *c, kvs_status s); /* E_DEVICE_LOST is remembered */
/* Run `t` on the pinner; after core_stop in place, its on_done posted to the sink. */
void core_task(core *c, pinner_task *t, bool urgent);
uint32_t core_max_keys(const core *c);

void load_twin_tick(core *c); /* LOADs that are held back for their twins */

/* ---- op handlers, by file ---- */
/* clang-format off */
#define OP_HANDLERS(X) \
    X(hello) X(open) X(region_create) X(region_attach) X(region_import) X(region_close) X(lookup) X(reserve) \
    X(release) X(load) X(store) X(slot_take) X(slot_drop) X(write) X(decode) X(extend) \
    X(pin) X(unpin) X(drop) X(reset) X(cancel) X(status) X(health) X(watch) \
    X(ping) X(reload) X(drain)
/* clang-format on */
#define OP_DECLARE(name) kvs_status op_##name(request *r, wire_in *in, kvs_err *err);
OP_HANDLERS(OP_DECLARE)
void refused_load(peer *p, wire_in *in, kvs_status s);
void refused_store(peer *p, wire_in *in, kvs_status s);
void refused_write(peer *p, wire_in *in, kvs_status s);
void refused_decode(peer *p, wire_in *in, kvs_status s);
void refused_extend(peer *p, wire_in *in, kvs_status s);

/* The texts of STATUS; op_admin.c asks, status_text.c writes. */
struct json_writer;
void status_text(const core *c, const wire_status_req *q, struct json_writer *w);
void status_put_health(const core *c, struct json_writer *w);
void status_put_limits(const config *cfg, struct json_writer *w);
void tenants_text(const core *c, struct json_writer *w); /* a member "tenants" */
/* The summary for a client beside whom there are other tenants: nothing of theirs is in it. */
void tenant_summary_text(const core *c, uint32_t tenant, struct json_writer *w);

#endif
