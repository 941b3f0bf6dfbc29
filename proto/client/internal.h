#ifndef KVS_CLIENT_INTERNAL_H
#define KVS_CLIENT_INTERNAL_H

/* What the files of libkvstride share: the handle, requests in flight, and who may do what when.
 *
 * Knows the wire and the public types.  Does not know what a caller does with the results.
 *
 * Threads: `mu` guards everything that has no other rule beside it.  Two roles are handed around under it:
 *   reading  one thread at a time reads the socket: any caller that waits, or the keeper at the end of a connection.  It
 *            puts answers where they belong and wakes their owners; when it leaves, another waiter takes over.
 *   sending  one thread at a time puts a frame on the socket, whole.
 * The keeper (the handle's own thread) sleeps until the peer hangs up, and is the only one that opens or closes sockets.
 *
 * Ownership: the client owns all; requests of kvs_submit_* belong to their caller until kvs_request_end. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/client_cuda.h"
#include "kernels/client_memory.h"
#include "kernels/client_stream.h"
#include "proto/client/kvstride.h"
#include "proto/client/kvstride_pack.h"
#include "proto/frame.h"
#include "proto/given.h"
#include "proto/wire.h"

enum {
    CLIENT_REPLY_MAX = 64 << 20, /* largest reply body that is believed */
    CLIENT_EVENTS = 4096,
    CLIENT_PAGES = 16,
    CLIENT_SMALL_FRAME = 512, /* frames up to this need no allocation */
    CLIENT_FLIGHT_BITS = 20,  /* of an id: the place in the table; the rest counts up */
};

/* ---- time and sockets: link.c ---- */
int64_t clock_ns(void); /* monotonic */
int64_t deadline_in(uint32_t ms);
/* Wait on up to two descriptors until the deadline; 0 = time is up.  EINTR is waited through. */
struct pollfd;
int poll_until(struct pollfd *p, unsigned n, int64_t deadline);

/* A connection that one thread has to itself, until it is published. */
typedef struct wire_link {
    int fd;
    int cancel_fd; /* readable: give up with E_CANCELLED; -1: none */
    uint64_t next_id;
    frame_reader reader;
} wire_link;
kvs_status link_open(wire_link *l, const char *path, int cancel_fd, int64_t deadline, kvs_err *err);
void link_close(wire_link *l); /* any number of times */
typedef struct link_frame {
    uint16_t op;
    const uint8_t *body;
    size_t len;
    const int *fds;
    uint32_t n_fds;
} link_frame;
/* Send one request and read its one reply.  *ret borrows from the link; its descriptors are the caller's. */
kvs_status link_exchange(wire_link *l, const link_frame *q, int64_t deadline, frame *ret, kvs_err *err);
/* One sendmsg: bytes taken, or -errno. */
long link_send(int fd, const uint8_t *p, size_t n, const int *fds, uint32_t n_fds);
/* One recvmsg.  E_BUSY: nothing there; E_AWAY: end of file. */
kvs_status link_recv(int fd, frame_reader *r, kvs_err *err);
void frame_close_fds(frame *f); /* those not yet taken (taken: -1) */
/* Head of a reply body: its message into err (if err is not NULL), the rest left in *in.  False: malformed. */
bool reply_head(const frame *f, wire_in *in, kvs_err *err);

/* ---- requests ---- */
enum request_state { REQUEST_NEW, REQUEST_FLYING, REQUEST_DONE };

/* When the answer to a request is likely to come: a waiter does not sleep then. */
enum { PACE_KEPT = 4 };
typedef struct due {
    uint32_t n;
    struct {
        int64_t from, to;
    } at[PACE_KEPT]; /* in order, apart from one another */
} due;

struct kvs_request {
    kvs_client *c;
    struct kvs_request *next_done, *prev, *next; /* queue of kvs_poll; list of all that the caller has */
    uint64_t id, tag, cookie;
    enum request_state state;
    bool pipelined, queued;
    bool runs_on; /* the reply says of an item that the hardware is still at it */
    uint16_t op;
    kvs_status status;
    kvs_err err;
    uint32_t n;            /* items asked for */
    kvs_ns *ns;            /* OPEN, CREATE, ATTACH, IMPORT; tracking */
    kvs_region *region;    /* whose slots the reply speaks of, or which it makes */
    void *items;           /* [n] results, by op; may be NULL */
    void *ret;             /* single result, by op */
    const void *args;      /* the caller's struct: keys and slots for tracking */
    bool is_pack;          /* many requests in one: pack.c answers it */
    struct pack_job *pack; /* while it is under way */
    uint64_t paced_bytes;  /* that it moves, if its end is guessed at */
    int64_t sent_ns;
    struct due due;
};

/* ---- when an answer is due: pace.c.  mu is held. ---- */
typedef struct pace_class { /* how long the latest ones took */
    double ns_a_byte[PACE_KEPT];
    uint32_t n; /* ever */
} pace_class;
typedef struct pace {
    bool active;
    pace_class classes[2][64]; /* LOAD, STORE; by the leading bit of their bytes */
} pace;
void pace_init(pace *p);
/* It is sent now: fills in r->due. */
void pace_begin(pace *p, kvs_request *r, uint64_t bytes, int64_t now);
void pace_end(pace *p, const kvs_request *r, int64_t now); /* answered, with its status */

/* One line of the table of requests in flight.  r NULL: nobody waits for it any more. */
typedef struct flight {
    kvs_request *r;
    uint64_t id, cost;
    uint32_t next_free, region_id;
    uint64_t target; /* CANCEL: whom */
    uint32_t entry;  /* of the daemon's half, that a stream waits for: not to be used again before the line is free */
    uint16_t op;
    bool used, control, chosen;
    bool cancelled; /* a CANCEL of it is on its way: a late E_DEADLINE is not the end yet */
    bool settling;  /* answered E_DEADLINE while the hardware runs on: its credit and slots come back with the CANCEL */
} flight;

/* A request being built. */
typedef struct call {
    kvs_client *c;
    kvs_request *r;
    wire_out out;   /* the body */
    uint8_t *frame; /* header and body */
    uint64_t generation, cost, target;
    int64_t deadline;
    const int *fds;
    uint32_t n_fds, region_id;
    uint32_t entry; /* a stream waits for it already; WIRE_NONE32: none */
    uint64_t entry_value;
    bool control, chosen, nobody; /* nobody: sent for its effect, its reply is an orphan from the start */
    uint8_t small[CLIENT_SMALL_FRAME];
} call;

/* Get ready: a body of at most body_cap bytes for request *r, which is reset.  E_AWAY, E_LIMIT, E_NO_MEMORY, E_STATE. */
kvs_status call_begin(call *k, kvs_client *c, kvs_request *r, uint16_t op, uint64_t body_cap, uint32_t timeout_ms,
                      kvs_err *err);
/* Send, wait until the deadline, end; *k is used up. */
kvs_status call_run(call *k, kvs_err *err);
/* Send; the request is alive from here on.  *k is used up. */
kvs_status call_submit(call *k, kvs_err *err);
kvs_status call_post(call *k); /* send for its effect; for `nobody` */
void call_drop(call *k);       /* built, but not to be sent */
kvs_status call_ns(call *k, kvs_ns *ns, uint32_t *ret, kvs_err *err);
kvs_status call_region(call *k, kvs_region *r, uint32_t *ret, kvs_err *err);
kvs_status request_create(kvs_request **ret, kvs_client *c, kvs_err *err);
kvs_status request_new(kvs_request **ret, kvs_err *err); /* not a client's yet: free, or request_enlist */
void request_enlist(kvs_request *r, kvs_client *c);
void request_destroy(kvs_request *r);

/* answers.c: put a reply where it belongs.  mu is held.  False: malformed. */
bool answer_decode(kvs_request *r, kvs_status s, wire_in *in, frame *f);
/* The message of an E_PARTIAL: how many failed, and the first of them. */
void answer_tell_partial(kvs_err *err, const char *what, uint32_t failed, uint32_t n, uint32_t first, kvs_status why);
/* No reply: give each result the status. */
void answer_spread(kvs_request *r, kvs_status s);
/* A reply that nobody waits for: what it gave us is given back, by a chore.  False: malformed. */
bool answer_orphan(kvs_client *c, const flight *fl, kvs_status s, wire_in *in);
bool event_take(kvs_client *c, wire_in *in);

/* ---- the handle ---- */
typedef struct waiter {
    struct waiter *prev, *next;
    const kvs_request *r; /* NULL: waits for something else than one reply */
    bool may_lead;
    pthread_cond_t cond;
} waiter;

typedef struct counter_page {
    struct counter_page *next; /* of those that were put aside */
    uint8_t *base;             /* WIRE_COUNTER_PAGE_BYTES, mapped */
    client_words *words;       /* as streams see it; NULL: none has asked.  Such a page is kept to the end */
    uint64_t generation;
    uint32_t n;
} counter_page;

typedef struct chore {
    struct chore *next;
    uint64_t generation;
    uint16_t op;
    uint32_t len;
    uint8_t body[];
} chore;

struct kvs_ns {
    kvs_client *c;
    kvs_ns *next;
    _Atomic uint32_t id, status; /* written under mu */
    uint32_t new_id, new_status; /* keeper, while it registers */
    bool by_id;
    kvs_ns_info info;
    size_t desc_len, canon_len; /* of the description; padded, as OPEN sends it */
    uint8_t canon[];
};

typedef struct track { /* a slot of a daemon region that this client holds */
    uint32_t gen, holds, depth;
    bool shared, known; /* known: key is set */
    bool lost;          /* gen is of an earlier life: E_STALE */
    uint8_t key[WIRE_KEY_BYTES];
} track;

struct kvs_region {
    kvs_client *c;
    kvs_region *next;
    kvs_ns *ns; /* NULL: scratch */
    _Atomic uint32_t id, status;
    uint32_t new_id, new_status;
    bool dead; /* closed while the keeper was registering it */
    kvs_region_info info;
    int fds[WIRE_MAX_FDS];
    void *base;
    client_cuda_map *on_gpu; /* what base lies in; NULL: host memory */
    track *track;            /* [info.n_slots] of a daemon region; NULL: scratch, import */
    uint32_t memory, n_maps;
    kvs_plane_map *maps; /* [n_maps] import */
    kvs_ipc *ipc;        /* [n_ipc] import */
    uint32_t n_ipc;
};

enum link_state { LINK_DOWN, LINK_UP };

struct kvs_client {
    /* fixed after kvs_connect */
    char path[KVS_SOCKET_PATH_MAX + 1];
    char name[WIRE_MAX_NAME + 1];
    uint32_t timeout_ms, connect_timeout_ms, backoff_min_ms, backoff_max_ms;
    uint32_t *alive; /* 1; reads as 0 in a forked child: the page is wiped there */
    int wake_fd;     /* eventfd: the keeper is wanted */
    int poke_fd;     /* eventfd: the reader shall look up, something has happened that did not come by the socket */
    pthread_t keeper;
    bool has_keeper;
    pthread_condattr_t condattr;
    pthread_mutex_t mu;

    enum link_state state;
    int fd; /* open while UP, and until the keeper has seen the end */
    bool reading, sending, closing, registering;
    frame_reader reader; /* the reader's */
    uint8_t *out;        /* the sender's: rest of a frame whose caller ran out of time */
    size_t out_len, out_sent;
    kvs_server server;
    int64_t up_since;
    char why[KVS_ERR_MSG_BYTES]; /* the last connection ended */

    waiter *waiters;
    flight *table;
    uint32_t table_n, free_head;
    uint64_t seq;
    uint32_t data_used, control_used, orphans;
    uint64_t bytes_used;
    pace pace;

    kvs_request *all, *done_head, *done_tail;
    kvs_ns *namespaces;
    kvs_region *regions;
    chore *chores, *last_chore;
    uint32_t n_chores;
    counter_page pages[CLIENT_PAGES];
    uint32_t n_pages; /* ever; the current one is pages[(n_pages - 1) % CLIENT_PAGES] */
    counter_page *aside;
    kvs_pack *packs;
    uint32_t packing; /* jobs of packs that were ended unanswered and still run */
    bool pages_stuck; /* a stream may still wait on one: they are never unmapped */
    kvs_stream *streams;
    bool entry_used[WIRE_COUNTERS]; /* of the daemon's half: a stream waits for it */
    pthread_mutex_t
        gpu_mu; /* held around calls of a driver, by which pages and regions are mapped; mu is taken inside */

    uint32_t watch_mask;
    kvs_event *events; /* [CLIENT_EVENTS] ring */
    uint32_t events_first, events_n;
    uint64_t events_lost, events_lost_peer, events_lost_seen;
};

/* flight.c.  mu is held in all of these. */
/* Do something useful until something may have changed: read the socket, or sleep while another does.  False: the
 * deadline had passed already. */
bool client_turn(kvs_client *c, const kvs_request *r, int64_t deadline);
/* The same for a waiter whose wish may come true without the socket: it looks up ten times a second while it reads. */
bool client_turn_for_any(kvs_client *c, int64_t deadline);
void client_read_once(kvs_client *c); /* take in what is there, if nobody reads */
void client_take_read(kvs_client *c); /* what has been read already: no poll tells of it.  Nobody reads */
void client_leave(kvs_client *c);     /* done waiting: let another waiter read; unlocks mu */
void client_wake_general(kvs_client *c);
__attribute__((format(printf, 2, 3))) void client_lost(kvs_client *c, const char *fmt, ...);
void client_complete(kvs_client *c, kvs_request *r, kvs_status s);
void client_abandon(kvs_client *c, kvs_request *r);  /* FLYING only: results are never written from here on */
bool client_is_settling(kvs_client *c, uint64_t id); /* answered, but the hardware runs on */
bool client_is_child(const kvs_client *c);
/* E_STATE in a child of fork, before anything of the parent's is locked: who held the lock may not be there to let it go. */
kvs_status client_check_own(const kvs_client *c, kvs_err *err);
bool client_region_in_flight(const kvs_client *c, const kvs_region *r); /* a reply is due that speaks of it */
void client_wake_keeper(kvs_client *c);
void client_poke(kvs_client *c);
kvs_status client_table(kvs_client *c, uint32_t n, kvs_err *err); /* nothing may be in flight */

/* keeper.c */
kvs_status keeper_attempt(kvs_client *c, kvs_err *err); /* connect, HELLO, register all, publish; mu not held */
void *keeper_main(void *client);
/* mu held.  Sent as soon as there is credit, however long that takes; lost with the connection, or when memory is short. */
void chore_add(kvs_client *c, uint16_t op, const wire_out *body);
void chores_free(kvs_client *c);

/* region.c */
kvs_status region_adopt(kvs_region *r, const wire_region_rep *rep, frame *f, kvs_err *err); /* checks, takes fds */
size_t region_attach_body(const kvs_region *r, uint32_t ns, uint8_t *buf, size_t cap);      /* mode 1; length */
uint32_t region_n_entries(const kvs_region *r);
uint64_t region_import_bytes(const kvs_region *r); /* of that body */
size_t region_import_body(const kvs_region *r, uint32_t ns, uint32_t device, uint8_t *buf, size_t cap);
void region_entries_done(kvs_region *r, const uint8_t *status); /* [entries] of the reply, in order; NULL: all lost */
void region_destroy(kvs_region *r);
void region_track(kvs_region *r, kvs_slot s, bool shared, const uint8_t *key, uint32_t depth);
void region_untrack(kvs_region *r, kvs_slot s);
bool region_slot_is_lost(const kvs_region *r, kvs_slot s); /* mu held */

/* counter.c */
kvs_status counters_map(int fd, uint32_t n, counter_page *ret, kvs_err *err);
void counters_publish(kvs_client *c, const counter_page *p); /* mu held */
void counters_abort(kvs_client *c);                          /* mu held */
void counters_unmap(counter_page *p);
void counters_fini(kvs_client *c);
counter_page *counters_page_of(kvs_client *c, uint64_t generation); /* mu held; 0: the current one; NULL: gone */
/* The daemon will not raise the entry: say why and raise it here.  mu held. */
void counters_release(kvs_client *c, uint64_t generation, uint32_t entry, uint64_t value, kvs_status why);

/* client.c */
int client_thread(pthread_t *ret, const char *name, void *(*run)(void *ud),
                  void *ud); /* 0 or errno; takes no signals */
/* Wait until nothing of an answered request goes on.  E_DEADLINE: not yet. */
kvs_status request_settle(kvs_request *r, uint32_t timeout_ms);

/* ops.c.  Of a STORE: the key of the block before the first one, if it has any. */
kvs_status parent_check(uint32_t first_depth, const uint8_t *parent, kvs_err *err);
/* kvs_submit_store and kvs_submit_load of requests that kvs_poll never shows, on the connection of `generation` or not
 * at all (E_AWAY): what they wait for is reached on no other. */
kvs_status store_submit_hidden(const kvs_store_args *a, uint64_t generation, kvs_request **ret, uint32_t timeout_ms,
                               kvs_err *err);
kvs_status load_submit_hidden(const kvs_load_args *a, uint64_t generation, kvs_request **ret, uint32_t timeout_ms,
                              kvs_err *err);

/* pack.c.  mu is held in the first two. */
void pack_abandon(kvs_client *c, kvs_request *r); /* under way: its results are never written from here on */
void pack_cancel(kvs_request *r);
void packs_close(kvs_client *c, bool child); /* child: of a fork, which has no threads of ours */

/* stream.c */
/* A request on a stream, between call_begin and its submit: it begins when the stream has got here.  join: the stream goes
 * on when it has ended, by ret_signal; call_drop lets it go on if the request is never sent. */
kvs_status stream_enter(call *k, kvs_stream *s, bool join, kvs_mark *ret_after, kvs_mark *ret_signal, kvs_err *err);
/* Without mark and stream: wait for the GPU, if the region is on one. */
kvs_status stream_settle(const kvs_region *r, const kvs_mark *after, const kvs_stream *s, kvs_err *err);
void *stream_cuda(const kvs_stream *s);
kvs_client *stream_client(const kvs_stream *s);
/* The stream waits for an entry of the daemon's half that this library raises, by stream_unjoin.  E_AWAY: the connection of
 * `generation` is gone, and the stream does not wait. */
kvs_status stream_join(kvs_stream *s, uint64_t generation, kvs_mark *ret, kvs_err *err);
void stream_unjoin(kvs_client *c, uint64_t generation, kvs_mark mark, kvs_status why); /* mu is held */
void streams_close(kvs_client *c, bool drain);

/* checks a descriptor of the daemon: a memfd of at least `bytes` that cannot shrink */
kvs_status memfd_check(int fd, uint64_t bytes, kvs_err *err);

#endif
