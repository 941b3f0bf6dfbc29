#ifndef KVSTRIDE_H
#define KVSTRIDE_H

/* libkvstride: an engine's door to kvstrided, the KV-cache daemon of this host.
 *
 * Knows one daemon socket, and what must be told again when the daemon comes back.  Needs no CUDA: descriptors of device
 * memory pass through it, and are mapped by a driver that is looked for only when somebody asks for that.
 *
 * Threads: every call may be made from any thread, at the same time, on one handle, but kvs_close (last) and, for one
 * region or request, its close or end.  The library has one thread of its own for each handle; it sleeps until the daemon
 * goes away.  After fork() the child must not use the handle: calls answer E_STATE (kvs_server_get: zeros),
 * kvs_close frees the child's copy.
 *
 * Ownership: what a call returns as ret_* of an opaque type is the caller's until the close, end or free named beside it.
 * Arguments are borrowed for the call; those of kvs_submit_* until kvs_request_end.
 *
 * NULL: kvs_err may always be, an array of no elements too, and else what says so below.  Any other is E_INVALID, the message names
 * it ("store: keys is NULL"), and nothing is sent.  Calls without a status answer zeros, -1, or true (kvs_done).
 *
 * Time: timeout_ms of 0 means the handle's default.  No call blocks past it, whatever the daemon does, but for what a GPU takes
 * (see "order with a GPU's streams"), and none raises SIGPIPE or ends the process.  The daemon is given a little less, so that
 * its own answer usually comes first.
 *
 * Errors of every call: E_AWAY (no daemon now; the handle goes on by itself), E_DEADLINE (no answer in time: see
 * kvs_settle), E_BUSY (no credit or no answer), E_PROTO (the daemon sent nonsense; it was hung up on), E_LIMIT,
 * E_NO_MEMORY, E_STATE (handle of a parent process), E_STALE (handle the daemon no longer takes), and what the daemon says.
 *
 *          kvs_connect                      daemon dies                      daemon is back
 *   (none) -----------> connected -----------------------> miss-only -----------------------> connected
 *                                all requests: E_AWAY       lookup: 0 hits       namespaces, regions, watch registered
 *                                all counters: abort value  others: E_AWAY       again; kvs_generation has grown
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/backend.h"
#include "proto/layout.h"
#include "proto/status.h"

#define KVS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvs_client kvs_client;
typedef struct kvs_ns kvs_ns;
typedef struct kvs_region kvs_region;
typedef struct kvs_request kvs_request;
typedef struct kvs_stream kvs_stream;

#define KVS_DEFAULT_SOCKET "/run/kvstrided/kvstrided.sock"
enum {
    KVS_KEY_BYTES = 32,
    KVS_SOCKET_PATH_MAX = 107, /* bytes; a longer path is refused, never cut */
    KVS_REGION_MAX_FDS = 64,
    KVS_MAX_DEVICES = 16, /* of one daemon */
};
#define KVS_ALL        UINT32_C(0xffffffff) /* every namespace */
#define KVS_SLOT_ANY   UINT32_C(0xffffffff) /* the daemon chooses */
#define KVS_DEVICE_ANY UINT32_C(0xffffffff) /* of an import: the device that the memory is on */

/* ---- connection ---------------------------------------------------------------------------------------------- */

enum kvs_connect_flags {
    KVS_CONNECT_LAZY = 1, /* an absent daemon is no error: start in miss-only mode and connect in the background */
};

typedef struct kvs_options {
    size_t size;                 /* of this struct: set by KVS_OPTIONS_INIT */
    const char *path;            /* NULL: $KVSTRIDE_SOCKET, else KVS_DEFAULT_SOCKET; 1..107 bytes */
    const char *name;            /* shown to the operator; NULL: none; at most 64 bytes of UTF-8 text */
    uint32_t timeout_ms;         /* of calls that give 0; 0: 30,000 */
    uint32_t connect_timeout_ms; /* of kvs_connect and of each step of a reconnect; 0: 5,000 */
    uint32_t backoff_min_ms;     /* first pause before reconnecting, with jitter; 0: 50 */
    uint32_t backoff_max_ms;     /* pauses double up to this; 0: 2,000 */
    uint32_t flags;              /* enum kvs_connect_flags */
    uint32_t reserved;           /* 0 */
} kvs_options;
#define KVS_OPTIONS_INIT                                                                                               \
    {                                                                                                                  \
        sizeof(kvs_options), NULL, NULL, 0, 0, 0, 0, 0, 0                                                              \
    }

/* Connect and say HELLO.  o may be NULL.  E_LIMIT: path too long; E_AWAY: nothing listens; E_BUSY: the backlog stayed
 * full, or no answer came, until the timeout; E_DENIED; E_VERSION; E_SYS (descriptor limit and the like). */
KVS_API kvs_status kvs_connect(kvs_client **ret, const kvs_options *o, kvs_err *err);

/* Hang up and free the handle with all its namespaces, regions (unmapped), requests, streams and packs, these two as their own
 * close does.  NULL is fine.  No other call on the handle may be running or follow. */
KVS_API void kvs_close(kvs_client *c);

typedef struct kvs_server {
    uint64_t generation; /* 1 for the first connection, + 1 for each later one; 0: never connected */
    uint64_t conn_id;    /* the daemon's number for this connection */
    uint8_t boot_id[16]; /* of the daemon's life */
    uint32_t version, is_admin, n_counters, max_body, max_keys;
    uint32_t credit_requests, control_requests;
    uint64_t credit_bytes; /* block bytes of LOAD and STORE in flight */
    uint64_t default_deadline_us, max_deadline_us;
    bool up;                                  /* false: miss-only mode; the rest is of the last connection */
    uint32_t n_devices;                       /* numbers 0..n_devices-1 name them in the calls below */
    uint8_t device_uuid[KVS_MAX_DEVICES][16]; /* of a GPU as CUDA has it; zeros: the cpu device */
} kvs_server;

KVS_API void kvs_server_get(kvs_client *c, kvs_server *ret);
/* The daemon's number of the GPU with this UUID: ordinals differ from process to process (CUDA_VISIBLE_DEVICES), UUIDs do
 * not.  E_NOT_FOUND: the daemon does not serve it; E_AWAY: never connected. */
KVS_API kvs_status kvs_device_find(kvs_client *c, const uint8_t uuid[16], uint32_t *ret, kvs_err *err);
KVS_API uint64_t kvs_generation(kvs_client *c);
/* Wait until connected with a generation above `after` (0: any). */
KVS_API kvs_status kvs_wait_up(kvs_client *c, uint64_t after, uint32_t timeout_ms, kvs_err *err);

KVS_API kvs_status kvs_ping(kvs_client *c, uint32_t timeout_ms, kvs_err *err);

/* ---- namespaces: live as long as the client ------------------------------------------------------------------- */

/* The same description twice gives the same handle.  A new one takes the daemon: E_AWAY without it, with KVS_CONNECT_LAZY as
 * well; kvs_wait_up says when to open it. */
KVS_API kvs_status kvs_open(kvs_client *c, const kvs_namespace *ns, kvs_ns **ret, uint32_t timeout_ms, kvs_err *err);
/* A namespace by the number that a status report shows (admin tools).  Not renewed: E_STALE after a restart. */
KVS_API kvs_status kvs_open_id(kvs_client *c, uint32_t id, kvs_ns **ret, kvs_err *err);

typedef struct kvs_ns_info {
    uint32_t id; /* of this connection */
    uint32_t n_planes, tokens_per_block;
    uint64_t slot_bytes; /* bytes of one block; 0 for kvs_open_id */
    uint8_t digest[KVS_DIGEST_BYTES];
} kvs_ns_info;
KVS_API void kvs_ns_get(kvs_ns *ns, kvs_ns_info *ret);

/* ---- regions --------------------------------------------------------------------------------------------------- */

enum kvs_region_kind { KVS_REGION_SLOTS = 0, KVS_REGION_SCRATCH = 1, KVS_REGION_IMPORT = 2 };
enum kvs_memory { KVS_MEMORY_MEMFD = 0, KVS_MEMORY_CUDA_IPC = 1, KVS_MEMORY_CUDA_VMM = 2 };

/* n_slots blocks of ns on `device`, allocated by the daemon. */
KVS_API kvs_status kvs_region_create(kvs_ns *ns, uint32_t device, uint32_t n_slots, kvs_region **ret,
                                     uint32_t timeout_ms, kvs_err *err);
/* `bytes` of plain memory on `device`, for queries, outputs and new rows. */
KVS_API kvs_status kvs_scratch_create(kvs_client *c, uint32_t device, uint64_t bytes, kvs_region **ret,
                                      uint32_t timeout_ms, kvs_err *err);
/* A region that another connection of this tenant made, by its token.  ns: its namespace, NULL for scratch. */
KVS_API kvs_status kvs_region_attach(kvs_client *c, kvs_ns *ns, const uint8_t token[16], kvs_region **ret,
                                     uint32_t timeout_ms, kvs_err *err);

/* backend: who attends to this memory (enum kvs_backend), perhaps with KVS_BACKEND_OVERRIDE; 0: code of your own that
 * takes every stride as it is given. */
typedef struct kvs_plane_map {
    uint32_t fd; /* index into fds */
    uint32_t backend;
    uint64_t base;   /* bytes from the start of the memory to slot 0; multiple of 16 */
    uint64_t stride; /* bytes from slot to slot; multiple of 16 below 2^40 */
} kvs_plane_map;

/* A whole CUDA allocation: of its base address, whatever the address of the tensor in it. */
typedef struct kvs_ipc {
    uint8_t uuid[16];   /* of the GPU (cudaDeviceProp.uuid) */
    uint8_t handle[64]; /* cudaIpcMemHandle_t */
} kvs_ipc;

typedef struct kvs_import {
    uint32_t device; /* number, or KVS_DEVICE_ANY */
    uint32_t n_slots;
    uint32_t memory; /* enum kvs_memory */
    uint32_t n_fds;  /* 1..64; 0 with CUDA IPC handles */
    const int *fds;  /* [n_fds]; duplicated, the originals stay the caller's.  memfds: sealed against shrinking,
                        allocated in full (kvs_memfd_create makes such) */
    uint32_t n_maps; /* 1: whole blocks, contiguous; else one a plane, in plane order */
    const kvs_plane_map *maps; /* [n_maps] */
    uint32_t n_ipc;            /* KVS_MEMORY_CUDA_IPC: 1..64, and n_fds 0; maps[].fd is an index into ipc then */
    const kvs_ipc *ipc;        /* [n_ipc] */
} kvs_import;

/* What kvs_import wants to know of GPU memory that this process got by cudaMalloc: the handle of the whole allocation that p
 * lies in, where p is in it (the least that each map's base is), and the allocation's bytes.  E_INVALID: memory that has no
 * such handle (host, managed, of a stream-ordered pool, mapped); the message says which and what to use instead.
 * E_UNSUPPORTED: no driver here. */
KVS_API kvs_status kvs_ipc_of(const void *p, kvs_ipc *ret, uint64_t *ret_offset, uint64_t *ret_bytes, kvs_err *err);

/* The engine's own KV memory as a region of ns: a contract over addresses, nothing is copied.  E_UNSUPPORTED: among others a
 * cross-layer view for a backend that was not verified with one (proto/backend.h); give it one tensor a layer. */
KVS_API kvs_status kvs_region_import(kvs_ns *ns, const kvs_import *in, kvs_region **ret, uint32_t timeout_ms,
                                     kvs_err *err);
/* Free the handle and its mapping; the daemon is told if it is there.  E_BUSY: a request still uses the region, perhaps one
 * that timed out or was ended unanswered; the region is as it was, so cancel or kvs_settle and close it again.  Whatever
 * else is returned, it is gone. */
KVS_API kvs_status kvs_region_close(kvs_region *r, uint32_t timeout_ms, kvs_err *err);

typedef struct kvs_region_info {
    uint32_t kind;               /* enum kvs_region_kind */
    uint32_t id;                 /* of this connection */
    uint32_t device;             /* as asked for; attached by token: 0 */
    uint32_t n_slots;            /* 0: scratch */
    uint64_t slot_stride, bytes; /* in all */
    uint64_t piece_bytes;        /* of every descriptor but the last */
    uint32_t n_fds;
    uint8_t token[16]; /* give it to your other processes; zeros for imports */
    kvs_status state;  /* KVS_OK, or why the daemon no longer takes it; E_INVALID: there is no region (NULL) */
    uint32_t memory;   /* enum kvs_memory: MEMFD on the cpu device, CUDA_VMM on a GPU; of an import as it was given */
} kvs_region_info;
KVS_API void kvs_region_get(kvs_region *r, kvs_region_info *ret);
/* Descriptor of piece i, borrowed until the region is closed; -1 if there is none. */
KVS_API int kvs_region_fd(kvs_region *r, uint32_t i);
/* Address of the whole region, read and write, mapped at the first call and valid until kvs_region_close, whatever becomes
 * of the daemon.  On a GPU it is a device pointer, valid in the primary context of that GPU; the driver is looked for at
 * that moment.  E_UNSUPPORTED: no driver here, or an import (its memory is yours already).  Slot i is at
 * base + i * slot_stride.  ret_bytes may be NULL. */
KVS_API kvs_status kvs_region_map(kvs_region *r, void **ret, uint64_t *ret_bytes, kvs_err *err);

/* A memfd as kvs_region_import wants it: `bytes` allocated, sealed.  E_NO_SPACE, E_SYS. */
KVS_API kvs_status kvs_memfd_create(const char *name, uint64_t bytes, int *ret_fd, kvs_err *err);

/* ---- counters and marks ---------------------------------------------------------------------------------------- */

/* One page a connection: the first half is written by the client, the second by the daemon.  An entry is 16 bytes: value,
 * then error word (a kvs_status, 0 = clean).  Values only grow and stay below 2^62.
 * When the daemon goes, every entry of its half gets error word E_AWAY, then the value KVS_COUNTER_ABORT, so that nothing
 * that waits for ">=" hangs.  A new connection has a new page; the client half's values are carried over.  Pages of the
 * last 16 connections stay mapped. */
#define KVS_COUNTER_ABORT  INT64_MAX
#define KVS_COUNTER_DAEMON UINT32_C(0x80000000) /* in kvs_mark.counter: wait for an entry of the daemon's half */

typedef struct kvs_counter_entry {
    uint64_t value, error;
} kvs_counter_entry;

typedef struct kvs_counters {
    uint64_t generation;
    uint32_t n;                /* entries in each half */
    kvs_counter_entry *client; /* [n] written here: release stores, or a device stream */
    kvs_counter_entry *daemon; /* [n] read here: acquire loads, or a device stream's wait */
} kvs_counters;

typedef struct kvs_mark {
    uint32_t counter;  /* 0..n-1 */
    uint32_t reserved; /* 0 */
    uint64_t value;
} kvs_mark;

KVS_API kvs_status kvs_counter_page(kvs_client *c, kvs_counters *ret, kvs_err *err);
/* Client half of the current page, with release order.  E_RANGE: counter, or a value of 2^62 and more. */
KVS_API kvs_status kvs_counter_set(kvs_client *c, uint32_t counter, uint64_t value, kvs_err *err);
/* Wait until the daemon's half has reached `value`; polls with growing pauses.  generation: of the request that signals it
 * (kvs_generation; 0 = now): E_AWAY if that connection is gone.  Else the error word, KVS_OK if it is clean. */
KVS_API kvs_status kvs_counter_wait(kvs_client *c, uint64_t generation, kvs_mark mark, uint32_t timeout_ms,
                                    kvs_err *err);

/* A mark that is reached already: nothing is waited for. */
#define KVS_MARK_NOW                                                                                                   \
    {                                                                                                                  \
        0, 0, 0                                                                                                        \
    }

/* ---- order with a GPU's streams ----------------------------------------------------------------------------------- */
/* A request that names slots of GPU memory must not overtake what this process has given its GPU: a kernel that still fills
 * the slots, or reads them.  Three ways, the first is what happens by itself:
 *   neither `after` nor a stream: the library waits for the GPU (all work of the primary contexts of this process) before it
 *                                 sends.  KVS_MARK_NOW as `after` says that you have done so, or need not.
 *   a stream:                     the request is sent at once and begins when the stream has got there.
 *   `after`:                      a counter that you raise, kvs_stream_signal for one.
 * A failed wait (E_DEVICE, E_STATE: a stream is being captured) sends nothing.  A wait for the GPU takes as long as the GPU does:
 * no driver's call has a deadline, and the first way waits for all that its streams wait for.  The request's own time begins
 * when that is over.  The second and third wait for nothing but room in the stream's queue. */

/* A CUDA stream (CUstream or cudaStream_t; NULL: the default stream of the calling thread's context) with entries
 * first_counter..first_counter + n_counters - 1 of both halves of the counter page, which are its own from now on: of the
 * client's half the first, of the daemon's one for each LOAD in flight.  The stream stays the caller's and must live until
 * kvs_stream_close.  E_UNSUPPORTED: no driver here; E_RANGE; E_BUSY: another stream has one of these entries; E_STATE: it is
 * being captured into a graph. */
KVS_API kvs_status kvs_stream_open(kvs_client *c, void *cuda_stream, uint32_t first_counter, uint32_t n_counters,
                                   kvs_stream **ret, kvs_err *err);
/* Waits up to two seconds for the stream to get past its waits.  NULL is fine; kvs_close does it for what is left. */
KVS_API void kvs_stream_close(kvs_stream *s);
/* When the stream gets here it raises its counter, with everything before visible: *ret is the mark for `after`.  Of the
 * connection of kvs_generation: after a reconnect signal again.  E_STATE: the stream is being captured; E_AWAY. */
KVS_API kvs_status kvs_stream_signal(kvs_stream *s, kvs_mark *ret, kvs_err *err);
/* The stream waits here until entry mark.counter of the daemon's half has reached mark.value, which a request of
 * `generation` (0: now) signals.  It goes on when the job has failed too, and when the daemon goes: look at the request's
 * status.  E_AWAY: that connection is gone, and the stream does not wait. */
KVS_API kvs_status kvs_stream_wait(kvs_stream *s, uint64_t generation, kvs_mark mark, kvs_err *err);

/* ---- finding --------------------------------------------------------------------------------------------------- */
/* keys are n * 32 bytes in prefix order, everywhere. */

enum kvs_key_state { KVS_KEY_ABSENT = 0, KVS_KEY_WRITING = 1, KVS_KEY_READY = 2 };

/* Leading resident keys, and the state of each: states [n] or NULL.  Without a daemon: KVS_OK and 0 hits. */
KVS_API kvs_status kvs_lookup(kvs_ns *ns, const uint8_t *keys, uint32_t n, uint32_t *ret_hits, uint8_t *states,
                              uint32_t timeout_ms, kvs_err *err);

typedef struct kvs_lease {
    uint8_t id[16];
    uint32_t n_leased; /* leading keys held, the same number in every namespace; 0: there is no lease */
    uint32_t ttl_ms;   /* granted */
    uint64_t bytes;
} kvs_lease;

typedef struct kvs_reserve_args {
    kvs_ns *const *ns; /* [n_ns] shards of one model: one decision for all */
    uint32_t n_ns;     /* 1.. */
    uint32_t n;        /* n x n_ns at most 262,144 */
    const uint8_t *keys;
    uint32_t max_loads; /* how many LOADs may use it; 1.. */
    uint32_t ttl_ms;    /* 0, or longer than the daemon grants: the longest that it does (lease.max_ms) */
} kvs_reserve_args;
KVS_API kvs_status kvs_reserve(const kvs_reserve_args *a, kvs_lease *ret_lease, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_release(kvs_client *c, const kvs_lease *lease, uint32_t timeout_ms, kvs_err *err);

/* ---- moving ---------------------------------------------------------------------------------------------------- */

typedef struct kvs_slot {
    uint32_t slot; /* or KVS_SLOT_ANY in a load */
    uint32_t gen;
} kvs_slot;

enum kvs_load_result_flags { KVS_LOADED_SHARED = 1, KVS_LOADED_NO_COPY = 2 };
typedef struct kvs_load_result {
    kvs_status status;
    uint32_t flags;
    kvs_slot slot; /* where the block is; if SHARED, a hold that kvs_slot_drop ends */
} kvs_load_result;

typedef struct kvs_load_args {
    kvs_ns *ns;
    kvs_region *region;
    uint32_t n;
    uint32_t first_depth;     /* blocks of the prefix before keys[0]; only told again after a restart */
    const uint8_t *keys;      /* [n][32]; with a lease only told again after a restart, NULL: those holds end with it */
    const kvs_lease *lease;   /* NULL: by keys */
    uint32_t lease_first;     /* first of the n leased blocks */
    uint32_t reserved;        /* 0 */
    const kvs_slot *slots;    /* [n]; NULL: the daemon chooses all of them */
    const kvs_mark *after;    /* nothing is touched before it is reached; NULL: see "order with a GPU's streams" */
    const kvs_mark *signal;   /* advanced when the bytes are there, or with the error; NULL: none */
    kvs_load_result *results; /* [n], out: written whatever happens (a local E_DEADLINE: E_BUSY each) */
    kvs_stream
        *stream; /* NULL: none.  Else after and signal are NULL: the load begins when the stream has got here, and
                           what is launched on it from now on runs when the load has ended, well or badly.  E_BUSY: all of
                           the stream's counters are in use */
} kvs_load_args;
/* E_PARTIAL: see the results.  Ranks on several GPUs that need the same blocks (MLA under tensor parallelism) ask for the same
 * keys in the same order, 8 or more at a time and at about the same time: then two of them share the way from the host. */
KVS_API kvs_status kvs_load(const kvs_load_args *a, uint32_t timeout_ms, kvs_err *err);

enum kvs_store_flags { KVS_STORE_KEEP = 1 /* the block stays on the device, shared, and held by you */ };
typedef struct kvs_store_args {
    kvs_ns *ns;
    kvs_region *region;
    uint32_t n;
    uint32_t first_depth;  /* of keys[0] in its prefix */
    const uint8_t *parent; /* [32] key at depth first_depth - 1, whose chain the store renews; 32 zeros where you do not
                              know it: nothing above is renewed then.  NULL or zeros if first_depth is 0, else E_INVALID */
    const uint8_t *keys;
    const kvs_slot *slots;          /* [n] */
    uint32_t flags;                 /* enum kvs_store_flags */
    uint32_t reserved;              /* 0 */
    const kvs_mark *after, *signal; /* NULL: as in kvs_load_args */
    kvs_status *results; /* [n] or NULL, out.  E_EXISTS: is stored already, nothing was moved: as good as KVS_OK */
    kvs_stream
        *stream; /* NULL: none.  Else after is NULL: the store begins when the stream has got here.  The stream does
                            not wait for it: fill the slots again when it is answered, or have it signal and wait for that */
} kvs_store_args;
KVS_API kvs_status kvs_store(const kvs_store_args *a, uint32_t timeout_ms, kvs_err *err);

/* n private slots to fill: all or none. */
KVS_API kvs_status kvs_slot_take(kvs_region *r, uint32_t n, kvs_slot *ret, uint32_t timeout_ms, kvs_err *err);
/* End of use, once `after` is reached (NULL: when the GPU is done with them).  results [n] or NULL.  E_AWAY: somebody may read
 * them still, so they are offered to the daemon when it is back; drop them then. */
KVS_API kvs_status kvs_slot_drop(kvs_region *r, const kvs_slot *slots, uint32_t n, const kvs_mark *after,
                                 kvs_status *results, uint32_t timeout_ms, kvs_err *err);

/* ---- computing ------------------------------------------------------------------------------------------------- */

typedef struct kvs_call_result {
    kvs_status status;
    uint32_t parts, kernel; /* decode, extend: as used; equal lengths, parts and kernel give equal bits */
    uint32_t bad;           /* ids, slots and lengths that were skipped */
} kvs_call_result;

enum kvs_source_type { KVS_SOURCE_PLANE = 0, KVS_SOURCE_BF16 = 1, KVS_SOURCE_FP16 = 2, KVS_SOURCE_FP32 = 3 };

typedef struct kvs_write_call {
    uint32_t plane;      /* mla_bf16, mla_fp16, mla_fp32, mla_fp8 or fp8_ds_mla */
    kvs_region *scratch; /* holds the rows: kv_c [n_tokens][512], k_pe [n_tokens][64] */
    uint64_t kv_c_offset, kv_c_stride, k_pe_offset, k_pe_stride; /* bytes */
    uint32_t src_type; /* enum kvs_source_type; 0: the plane's own, bf16 for fp8.  Another one only for mla_fp8 */
    float kv_scale;    /* mla_fp8: what a stored 1.0 stands for; finite and above 0.  Else 0 */
} kvs_write_call;

typedef struct kvs_write_args {
    kvs_ns *ns;
    kvs_region *region;
    uint32_t n_tokens, n_calls;
    const int64_t *slot_mapping;    /* [n_tokens] slot * tokens_per_block + row; negative: skip */
    const kvs_write_call *calls;    /* [n_calls] */
    const kvs_mark *after, *signal; /* NULL: as in kvs_load_args */
    kvs_call_result *results;       /* [n_calls], out */
} kvs_write_args;
KVS_API kvs_status kvs_write(const kvs_write_args *a, uint32_t timeout_ms, kvs_err *err);

typedef struct kvs_operand {
    uint64_t offset;      /* into the scratch region, bytes */
    uint64_t token, head; /* strides, bytes */
} kvs_operand;

typedef struct kvs_decode_call {
    uint32_t plane;
    uint32_t parts; /* 0: chosen; 1..256 */
    kvs_region *scratch;
    float sm_scale;
    float kv_scale;           /* mla_fp8: as in kvs_write_call.  Else 0 */
    kvs_operand q_nope, q_pe; /* in:  [T][h_q][512], [T][h_q][64], T = n_seqs * s_q (decode) or n_tokens (extend) */
    kvs_operand out, lse;     /* out: [T][h_q][512], fp32 [T][h_q] */
    const kvs_mark *after, *signal; /* NULL: as in kvs_load_args */
} kvs_decode_call;

enum kvs_decode_flags { KVS_DECODE_FIXED_SPLIT = 1 /* a row's bits do not depend on its neighbours */ };
typedef struct kvs_decode_args {
    kvs_ns *ns;
    kvs_region *region;
    uint32_t n_seqs, table_width, s_q, h_q;
    uint32_t n_calls;
    uint32_t flags;               /* enum kvs_decode_flags */
    const int32_t *seq_len;       /* [n_seqs] tokens, the s_q new ones included */
    const int32_t *block_table;   /* [n_seqs][table_width] slots */
    const kvs_decode_call *calls; /* [n_calls] */
    kvs_call_result *results;     /* [n_calls], out */
} kvs_decode_args;
KVS_API kvs_status kvs_decode(const kvs_decode_args *a, uint32_t timeout_ms, kvs_err *err);

/* As kvs_decode, with as many queries for each sequence as it brings: those of a prompt behind its cached prefix, whose own
 * rows are written first.  Query j of the s of a sequence sees its first seq_len - s + j + 1 tokens. */
typedef struct kvs_extend_args {
    kvs_ns *ns;
    kvs_region *region;
    uint32_t n_seqs, table_width, n_tokens, h_q;
    uint32_t n_calls;
    uint32_t flags;               /* enum kvs_decode_flags */
    const int32_t *q_start;       /* [n_seqs + 1] query tokens q_start[i] .. q_start[i + 1] - 1 are sequence i's */
    const int32_t *seq_len;       /* [n_seqs] tokens, those of the queries included */
    const int32_t *block_table;   /* [n_seqs][table_width] slots */
    const kvs_decode_call *calls; /* [n_calls], operands of n_tokens query tokens */
    kvs_call_result *results;     /* [n_calls], out */
} kvs_extend_args;
KVS_API kvs_status kvs_extend(const kvs_extend_args *a, uint32_t timeout_ms, kvs_err *err);

/* ---- residency: results [n] or NULL ------------------------------------------------------------------------------ */

KVS_API kvs_status kvs_pin(kvs_ns *ns, const uint8_t *keys, uint32_t n, kvs_status *results, uint32_t timeout_ms,
                           kvs_err *err);
KVS_API kvs_status kvs_unpin(kvs_ns *ns, const uint8_t *keys, uint32_t n, kvs_status *results, uint32_t timeout_ms,
                             kvs_err *err);
KVS_API kvs_status kvs_drop(kvs_ns *ns, const uint8_t *keys, uint32_t n, kvs_status *results, uint32_t timeout_ms,
                            kvs_err *err);

enum kvs_reset_flags { KVS_RESET_PINNED = 1 };
typedef struct kvs_reset_result {
    uint64_t dropped, aborted, kept, leases;
} kvs_reset_result;
/* ns NULL: every namespace of the tenant (admin socket: of all tenants).  Others are served meanwhile: what they store before it
 * returns goes or stays.  ret may be NULL. */
KVS_API kvs_status kvs_reset(kvs_client *c, kvs_ns *ns, uint32_t flags, kvs_reset_result *ret, uint32_t timeout_ms,
                             kvs_err *err);

/* ---- watching --------------------------------------------------------------------------------------------------- */

enum kvs_section {
    KVS_SECTION_SUMMARY = 0, /* on any socket; the others on the admin socket only */
    KVS_SECTION_CLIENTS = 1,
    KVS_SECTION_LEASES = 2,
    KVS_SECTION_KEYS = 3, /* paged by cursor and limit */
    KVS_SECTION_NAMESPACES = 4,
    KVS_SECTION_FSCK = 5,
    KVS_SECTION_TENANTS = 6,
    KVS_SECTION_METRICS = 7, /* what GET /metrics.json gives */
};
typedef struct kvs_report_args {
    uint32_t section, limit; /* limit 0: the daemon's default */
    uint32_t ns;             /* number of a namespace, or KVS_ALL */
    uint32_t reserved;       /* 0 */
    uint64_t cursor;         /* 0: from the start */
} kvs_report_args;
#define KVS_REPORT_SUMMARY                                                                                             \
    {                                                                                                                  \
        KVS_SECTION_SUMMARY, 0, KVS_ALL, 0, 0                                                                          \
    }
/* JSON text, zero-terminated, into buf [cap]; *ret_len without the zero.  E_LIMIT: it does not fit, *ret_len is set.
 * ret_len may be NULL. */
KVS_API kvs_status kvs_report(kvs_client *c, const kvs_report_args *a, char *buf, size_t cap, size_t *ret_len,
                              uint32_t timeout_ms, kvs_err *err);
/* The same in memory of its own: kvs_free.  ret_len may be NULL. */
KVS_API kvs_status kvs_report_alloc(kvs_client *c, const kvs_report_args *a, char **ret, size_t *ret_len,
                                    uint32_t timeout_ms, kvs_err *err);
KVS_API void kvs_free(void *p);

enum kvs_health_state { KVS_HEALTH_OK = 0, KVS_HEALTH_STARTING = 1, KVS_HEALTH_DEGRADED = 2, KVS_HEALTH_DRAINING = 3 };
enum kvs_health_reason {                              /* bits; ignore those that you do not know */
                         KVS_REASON_NO_PIECE = 1,     /* no memory of the pool is usable yet */
                         KVS_REASON_PIECE_FAILED = 2, /* the pool could not grow to its full size */
                         KVS_REASON_STUCK = 4,        /* a call of the device or the system takes more than 10 s */
                         KVS_REASON_DEVICE_LOST = 8,
                         KVS_REASON_DRAINS = 16, /* no new work is taken: the daemon is about to end, or drained */
                         KVS_REASON_OLD_CONFIG =
                             32, /* the configuration was refused, the last accepted one is in use */
};
typedef struct kvs_health_info {
    uint32_t state;   /* enum kvs_health_state */
    uint32_t reasons; /* why it is not ok: bits of enum kvs_health_reason; 0 if ok */
    uint64_t uptime_us;
    uint8_t boot_id[16];
} kvs_health_info;
/* Read the daemon's configuration file again (admin socket only).  The text says what applies at once and what waits for a
 * restart; kvs_free; ret_len may be NULL.  E_CONFIG and the reason: nothing was changed.  dry_run: nothing is changed anyway. */
KVS_API kvs_status kvs_reload_alloc(kvs_client *c, bool dry_run, char **ret, size_t *ret_len, uint32_t timeout_ms,
                                    kvs_err *err);
/* Take no new work (on), or take it again (admin socket only).  What is in flight ends as ever. */
KVS_API kvs_status kvs_drain(kvs_client *c, bool on, uint32_t timeout_ms, kvs_err *err);

KVS_API kvs_status kvs_health(kvs_client *c, kvs_health_info *ret, uint32_t timeout_ms, kvs_err *err);

enum kvs_event_type { KVS_EVENT_STORED = 0, KVS_EVENT_REMOVED = 1, KVS_EVENT_RESET = 2 };
typedef struct kvs_event {
    uint32_t type, ns, depth, cause;
    uint8_t key[KVS_KEY_BYTES];
} kvs_event;
/* Ask for events: mask of 1 << type; 0 ends it.  Renewed after a restart (which counts as one lost event). */
KVS_API kvs_status kvs_watch(kvs_client *c, uint32_t mask, uint32_t timeout_ms, kvs_err *err);
/* Up to cap events; waits for the first.  *ret_lost: events that were dropped since the last call, here or there.
 * E_DEADLINE: none came.  ret_lost may be NULL.  Events are kept (the newest 4,096) only while somebody calls into the handle. */
KVS_API kvs_status kvs_events(kvs_client *c, kvs_event *ret, uint32_t cap, uint32_t *ret_n, uint64_t *ret_lost,
                              uint32_t timeout_ms, kvs_err *err);

/* ---- pipelined use ---------------------------------------------------------------------------------------------- */
/* kvs_submit_x sends and returns; answers come in any order.  timeout_ms is the request's deadline at the daemon, and how
 * long the call may wait for credit.  All arrays and structs of the arguments must live until kvs_request_end.
 * A request belongs to one thread at a time. */

KVS_API kvs_status kvs_submit_ping(kvs_client *c, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_lookup(kvs_ns *ns, const uint8_t *keys, uint32_t n, uint32_t *ret_hits, uint8_t *states,
                                     kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_reserve(const kvs_reserve_args *a, kvs_lease *ret_lease, kvs_request **ret,
                                      uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_load(const kvs_load_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_store(const kvs_store_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_slot_drop(kvs_region *r, const kvs_slot *slots, uint32_t n, const kvs_mark *after,
                                        kvs_status *results, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_write(const kvs_write_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_decode(const kvs_decode_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);
KVS_API kvs_status kvs_submit_extend(const kvs_extend_args *a, kvs_request **ret, uint32_t timeout_ms, kvs_err *err);

/* The caller's own number for a request; 0 at first. */
KVS_API void kvs_request_set_tag(kvs_request *r, uint64_t tag);
KVS_API uint64_t kvs_request_tag(const kvs_request *r);

/* KVS_OK: it is answered (kvs_request_end says how).  E_DEADLINE: not yet; it stays in flight. */
KVS_API kvs_status kvs_wait(kvs_request *r, uint32_t timeout_ms, kvs_err *err);
/* True if it is answered.  Never waits; takes in what has arrived. */
KVS_API bool kvs_done(kvs_request *r);
/* Up to cap answered requests that no kvs_poll has returned yet, in the order of their answers.  Waits up to timeout_ms for
 * the first; here 0 means not at all.  Returns how many.  They are still to be ended. */
KVS_API uint32_t kvs_poll(kvs_client *c, kvs_request **ret, uint32_t cap, uint32_t timeout_ms);

/* Ask the daemon to stop it; returns when it has stopped and is answered.  ret_outcome may be NULL. */
enum kvs_cancel_outcome { KVS_CANCEL_GONE = 0, KVS_CANCEL_STOPPED = 1, KVS_CANCEL_FINISHED = 2 };
KVS_API kvs_status kvs_cancel(kvs_request *r, uint32_t *ret_outcome, uint32_t timeout_ms, kvs_err *err);

/* The request's final status, and the end of it; NULL is fine (KVS_OK).  Unanswered: E_BUSY; it is cancelled, its results
 * are never written, and its memory stays the daemon's until kvs_settle. */
KVS_API kvs_status kvs_request_end(kvs_request *r, kvs_err *err);

/* Wait until every request that timed out, or was ended unanswered, is answered or its connection gone: from then on the
 * daemon does not touch the slots that those requests named. */
KVS_API kvs_status kvs_settle(kvs_client *c, uint32_t timeout_ms, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
