#ifndef KVS_PROTO_WIRE_H
#define KVS_PROTO_WIRE_H

/* The wire format as tables: header, operations, and the fixed part of every body.
 *
 * Knows bytes, offsets and their limits.  Does not know sockets, keys' meaning or the daemon; no I/O, no allocation.
 * Any thread.  Cursors borrow the caller's buffer.  Everything is little-endian, decoded by hand, never by cast.
 *
 * Frame header, 32 bytes, the same for requests, replies and events:
 *
 *   offset  size  field
 *   0       4     magic        0x3153564b, the bytes "KVS1"
 *   4       2     op           enum wire_op
 *   6       2     status       kvs_status; 0 in a request
 *   8       8     id           chosen by the client, echoed in the reply; unique among its requests in flight
 *   16      4     body_len     bytes of body behind this header
 *   20      2     n_fds        descriptors that travel with this frame's first byte
 *   22      2     reserved     0
 *   24      8     deadline_us  microseconds from receipt; 0 = the daemon's default.  0 in a reply
 *
 * A request body is its fixed part (tables below) followed by its arrays.  A reply body is
 * [u32 msg_len][u32 0][msg, zero-padded to a multiple of 8] and then, if the status is OK or E_PARTIAL (and wherever
 * a status for each key is known), the fixed part and arrays of the op's reply.  Every array starts at a multiple of 8
 * from the start of the body; padding bytes are 0 and are checked. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

enum {
    WIRE_MAGIC = 0x3153564b,
    WIRE_HEADER_BYTES = 32,
    WIRE_VERSION = 1, /* the only protocol version so far */
    WIRE_KEY_BYTES = 32,
    WIRE_LEASE_BYTES = 16,
    WIRE_TOKEN_BYTES = 16, /* names a daemon region among the connections of a tenant */
    WIRE_MAX_FDS = 64,     /* descriptors of one frame */
    WIRE_MAX_DEVICES = 16, /* of one daemon */
    WIRE_MAX_NAME = 64,    /* bytes of a client's name in HELLO */
    WIRE_NONE = -1,        /* as u32: no counter, no namespace, "the daemon chooses the slot" */
};
#define WIRE_NONE32 UINT32_C(0xffffffff)

/*      name           value  credit: what it draws on (D data, C control with credit of its own) */
#define WIRE_OP_MAP(X)                                                                                                 \
    X(HELLO, 1)                                                                                                        \
    X(OPEN, 2)                                                                                                         \
    X(REGION_CREATE, 3)                                                                                                \
    X(REGION_ATTACH, 4)                                                                                                \
    X(REGION_IMPORT, 5)                                                                                                \
    X(REGION_CLOSE, 6)                                                                                                 \
    X(LOOKUP, 7)                                                                                                       \
    X(RESERVE, 8)                                                                                                      \
    X(RELEASE, 9)                                                                                                      \
    X(LOAD, 10)                                                                                                        \
    X(STORE, 11)                                                                                                       \
    X(SLOT_TAKE, 12)                                                                                                   \
    X(SLOT_DROP, 13)                                                                                                   \
    X(WRITE, 14)                                                                                                       \
    X(DECODE, 15)                                                                                                      \
    X(EXTEND, 16)                                                                                                      \
    X(PIN, 17)                                                                                                         \
    X(UNPIN, 18)                                                                                                       \
    X(DROP, 19)                                                                                                        \
    X(RESET, 20)                                                                                                       \
    X(CANCEL, 21)                                                                                                      \
    X(STATUS, 22)                                                                                                      \
    X(HEALTH, 23)                                                                                                      \
    X(WATCH, 24)                                                                                                       \
    X(PING, 25)                                                                                                        \
    X(EVENT, 26) /* daemon to client only */                                                                           \
    X(RELOAD, 27)                                                                                                      \
    X(DRAIN, 28)

typedef enum wire_op {
#define X(name, value) WIRE_##name = (value),
    WIRE_OP_MAP(X)
#undef X
} wire_op;

/* "LOAD", or NULL for a number that is no op. */
const char *wire_op_name(uint16_t op);

typedef struct wire_header {
    uint16_t op;
    uint16_t status;
    uint64_t id;
    uint32_t body_len;
    uint16_t n_fds;
    uint64_t deadline_us;
} wire_header;

void wire_header_encode(const wire_header *h, uint8_t buf[WIRE_HEADER_BYTES]);

/* Decode and check.  E_PROTO: not ours, or reserved bytes set.  E_LIMIT: body_len > body_max or n_fds > WIRE_MAX_FDS.
 * *ret is written only on KVS_OK, so no length reaches an allocator before it has been checked. */
kvs_status wire_header_decode(const uint8_t buf[WIRE_HEADER_BYTES], uint32_t body_max, wire_header *ret, kvs_err *err);

/* ---- cursors ------------------------------------------------------------------------------------------------ */

/* Writes into a caller's buffer; a write past the end sets `full` and writes nothing, now and later. */
typedef struct wire_out {
    uint8_t *base;
    size_t len, cap;
    bool full;
} wire_out;

/* Reads from a caller's buffer; a read past the end, or padding that is not 0, sets `bad`, and yields zeros. */
typedef struct wire_in {
    const uint8_t *base;
    size_t pos, len;
    bool bad;
    bool bad_pad; /* it was the padding, up to `pos` */
} wire_in;

void wire_put_u8(wire_out *o, uint8_t v);
void wire_put_u16(wire_out *o, uint16_t v);
void wire_put_u32(wire_out *o, uint32_t v);
void wire_put_u64(wire_out *o, uint64_t v);
void wire_put_f32(wire_out *o, float v);
void wire_put_bytes(wire_out *o, const void *p, size_t n);
void wire_put_pad8(wire_out *o); /* zeros up to the next multiple of 8 from base */

uint8_t wire_get_u8(wire_in *i);
uint16_t wire_get_u16(wire_in *i);
uint32_t wire_get_u32(wire_in *i);
uint64_t wire_get_u64(wire_in *i);
float wire_get_f32(wire_in *i);
void wire_get_bytes(wire_in *i, void *p, size_t n);
void wire_get_pad8(wire_in *i);

/* `n` items of `item` bytes, borrowed in place, then padding to 8.  NULL and `bad` if they do not fit; the product is
 * checked in 64 bits first.  Elements are little-endian and maybe unaligned: read them with wire_at_u32/u64. */
const uint8_t *wire_get_array(wire_in *i, uint64_t n, size_t item);
uint32_t wire_at_u32(const uint8_t *array, size_t index); /* of an array of u32 */
uint64_t wire_at_u64(const uint8_t *array, size_t index);

/* True when everything was read, nothing was bad and nothing is left over. */
bool wire_in_done(const wire_in *i);

/* ---- fixed parts -------------------------------------------------------------------------------------------- */
/* Each table row is (type, name).  Types: u16 u32 u64 f32, b16 b32 (bytes).  No implicit padding: a table's fields are
 * laid out in order, and each is a multiple of 8 bytes long.  From each table come: struct wire_<name>,
 * wire_put_<name>(), wire_get_<name>() and WIRE_<name>_BYTES.  PROTOCOL.md gives unit, range and meaning of each field;
 * a test compares it with these tables. */

/* clang-format off */
#define WIRE_hello_req(F)                                                                                   \
    F(u16, version_min) F(u16, version_max) F(u32, pid) F(u64, features) F(u32, name_len) F(u32, reserved)
/* then name[name_len], padded */
#define WIRE_hello_rep(F)                                                                                   \
    F(u16, version)                                                                                                    \
    F(u16, is_admin)                                                                                                   \
    F(u32, n_counters)                                                                                                 \
    F(u64, features) F(b16, boot_id) F(u64, conn_id) F(u32, max_body) F(u32, max_keys) F(u32, credit_requests)         \
        F(u32, control_requests) F(u64, credit_bytes) F(u64, default_deadline_us) F(u64, max_deadline_us)
/* with WIRE_FEATURE_DEVICES: then hello_devices, and device_entry[n_devices].  One descriptor: the counter page */
#define WIRE_hello_devices(F) F(u32, n_devices) F(u32, reserved)
#define WIRE_device_entry(F)  F(b16, uuid)

/* OPEN request: the canonical namespace description (proto/layout.h) and nothing else, padded. */
#define WIRE_open_rep(F) F(u32, ns) F(u32, reserved) F(u64, slot_bytes) F(b32, digest)

/* kind: enum wire_region_kind.  slots: n_slots; scratch: bytes, and ns is WIRE_NONE32 */
#define WIRE_region_create_req(F) F(u32, ns) F(u32, kind) F(u32, device) F(u32, n_slots) F(u64, bytes)
#define WIRE_region_rep(F)                                                                                  \
    F(u32, region)                                                                                                     \
    F(u32, n_slots)                                                                                                    \
    F(u64, slot_stride) F(u64, bytes) F(u64, piece_bytes) F(u32, n_pieces) F(u32, n_entries) F(b16, token)
/* descriptors: one a piece (not for IMPORT); then status u32[n_entries] of REGION_ATTACH */
#define WIRE_region_attach_req(F)                                                                           \
    F(u32, ns) F(u32, kind) F(u32, device) F(u32, n_slots) F(u64, bytes) F(u32, mode) F(u32, n_entries) F(b16, token)
/* mode 0: token names a live region of this tenant, no descriptors.  mode 1: re-offer, one descriptor a piece;
 * then n_entries x region_entry: slots that the client still held */
#define WIRE_region_entry(F) F(u32, slot) F(u32, gen) F(u32, flags) F(u32, depth) F(b32, key)
#define WIRE_region_import_req(F)                                                                                      \
    F(u32, ns) F(u32, device) F(u32, n_slots) F(u32, memory) F(u32, n_maps) F(u32, n_ipc)
/* then n_maps x plane_map: 1 = cross-layer (base and stride of the slot), else one a plane, in plane order; then, if
 * memory is CUDA_IPC, n_ipc x ipc_handle instead of descriptors.  handle_low, handle_high: CUDA's 64 bytes.
 * backend: enum kvs_backend, perhaps with KVS_BACKEND_OVERRIDE (backend.h) */
#define WIRE_ipc_handle(F) F(b16, uuid) F(b32, handle_low) F(b32, handle_high)
#define WIRE_plane_map(F) F(u32, fd) F(u32, backend) F(u64, base) F(u64, stride)
#define WIRE_region_close_req(F) F(u32, region) F(u32, reserved)

#define WIRE_lookup_req(F) F(u32, ns) F(u32, n_keys) /* then key[n_keys] */
#define WIRE_lookup_rep(F) F(u32, n_hits) F(u32, n_keys) /* then state u8[n_keys], padded; enum wire_key_state */

#define WIRE_reserve_req(F) F(u32, n_ns) F(u32, n_keys) F(u32, max_loads) F(u32, ttl_ms) /* ns u32[], key[] */
#define WIRE_reserve_rep(F) F(b16, lease) F(u32, n_leased) F(u32, ttl_ms) F(u64, bytes)
#define WIRE_release_req(F) F(b16, lease)

/* flags: enum wire_load_flags.  then key[n] unless WIRE_LOAD_BY_LEASE; then slot_ref[n] */
#define WIRE_load_req(F)                                                                                    \
    F(u32, ns)                                                                                                         \
    F(u32, region)                                                                                                     \
    F(u32, n)                                                                                                          \
    F(u32, flags) F(u32, after_counter) F(u32, signal_counter) F(u64, after_value) F(u64, signal_value) F(b16, lease)  \
        F(u32, lease_first) F(u32, reserved)
#define WIRE_slot_ref(F) F(u32, slot) F(u32, gen)
#define WIRE_load_rep(F) F(u32, n) F(u32, n_ok) /* then n x load_result */
#define WIRE_load_result(F) F(u32, status) F(u32, flags) F(u32, slot) F(u32, gen)

/* flags: enum wire_store_flags.  then key[n], slot_ref[n].  parent: key at depth first_depth - 1, zeros if 0 */
#define WIRE_store_req(F)                                                                                   \
    F(u32, ns)                                                                                                         \
    F(u32, region)                                                                                                     \
    F(u32, n)                                                                                                          \
    F(u32, flags) F(u32, after_counter) F(u32, signal_counter) F(u64, after_value) F(u64, signal_value)                \
        F(u32, first_depth) F(u32, reserved) F(b32, parent)
#define WIRE_key_rep(F) F(u32, n) F(u32, n_ok) /* then status u32[n]: STORE, SLOT_DROP, PIN, UNPIN, DROP */

#define WIRE_slot_take_req(F) F(u32, region) F(u32, n)
#define WIRE_slot_take_rep(F) F(u32, n) F(u32, reserved) /* then slot_ref[n] */
#define WIRE_slot_drop_req(F) F(u32, region) F(u32, n) F(u32, after_counter) F(u32, reserved) F(u64, after_value)

/* then n_calls x write_call, slot_mapping i64[n_tokens] */
#define WIRE_write_req(F)                                                                                   \
    F(u32, ns)                                                                                                         \
    F(u32, region)                                                                                                     \
    F(u32, n_tokens)                                                                                                   \
    F(u32, n_calls) F(u32, after_counter) F(u32, signal_counter) F(u64, after_value) F(u64, signal_value)
#define WIRE_write_call(F)                                                                                  \
    F(u32, plane) F(u32, scratch) F(u64, kv_c_offset) F(u64, kv_c_stride) F(u64, k_pe_offset) F(u64, k_pe_stride)     \
        F(u32, src_type) F(f32, kv_scale)
#define WIRE_call_rep(F) F(u32, n_calls) F(u32, n_ok) /* then n_calls x call_result: WRITE, DECODE, EXTEND */
#define WIRE_call_result(F) F(u32, status) F(u32, parts) F(u32, kernel) F(u32, bad)

/* then n_calls x decode_call, seq_len i32[n_seqs] padded, block_table i32[n_seqs][table_width] padded */
#define WIRE_decode_req(F)                                                                                  \
    F(u32, ns) F(u32, region) F(u32, n_seqs) F(u32, table_width) F(u32, s_q) F(u32, h_q) F(u32, n_calls) F(u32, flags)
#define WIRE_decode_call(F)                                                                                 \
    F(u32, plane)                                                                                                      \
    F(u32, scratch)                                                                                                    \
    F(u32, parts)                                                                                                      \
    F(f32, sm_scale) F(u32, after_counter) F(u32, signal_counter) F(u64, after_value) F(u64, signal_value)             \
        F(u64, q_nope_offset) F(u64, q_nope_token) F(u64, q_nope_head) F(u64, q_pe_offset) F(u64, q_pe_token)          \
            F(u64, q_pe_head) F(u64, out_offset) F(u64, out_token) F(u64, out_head) F(u64, lse_offset)                 \
                F(u64, lse_token) F(u64, lse_head) F(f32, kv_scale) F(u32, reserved)
/* then n_calls x decode_call, q_start i32[n_seqs + 1], seq_len i32[n_seqs], block_table i32[n_seqs][table_width], each padded */
#define WIRE_extend_req(F)                                                                                  \
    F(u32, ns) F(u32, region) F(u32, n_seqs) F(u32, table_width) F(u32, n_tokens) F(u32, h_q) F(u32, n_calls) F(u32, flags)

#define WIRE_keys_req(F) F(u32, ns) F(u32, n) /* then key[n]: PIN, UNPIN, DROP */
#define WIRE_reset_req(F) F(u32, ns) F(u32, flags)
#define WIRE_reset_rep(F) F(u64, dropped) F(u64, aborted) F(u64, kept) F(u64, leases)
#define WIRE_cancel_req(F) F(u64, target)
#define WIRE_cancel_rep(F) F(u32, outcome) F(u32, reserved) /* enum wire_cancel_outcome */
#define WIRE_status_req(F) F(u32, section) F(u32, limit) F(u32, ns) F(u32, reserved) F(u64, cursor)
#define WIRE_status_rep(F) F(u32, text_len) F(u32, reserved) /* then JSON text, padded */
#define WIRE_health_rep(F) F(u32, state) F(u32, reasons) F(u64, uptime_us) F(b16, boot_id) /* enum wire_health */
#define WIRE_watch_req(F) F(u32, mask) F(u32, reserved)                                    /* 1 << enum wire_event */
/* EVENT frames carry the id of the WATCH, status 0, and this body without the message head of replies. */
#define WIRE_event(F) F(u64, seq) F(u64, lost) F(u32, n) F(u32, reserved)                  /* then n x event_item */
#define WIRE_event_item(F) F(u32, type) F(u32, ns) F(u32, depth) F(u32, cause) F(b32, key)
#define WIRE_reload_req(F) F(u32, flags) F(u32, reserved) /* enum wire_reload_flags; the reply is a status_rep */
#define WIRE_drain_req(F) F(u32, on) F(u32, reserved)
/* PING: a body of 0..64 bytes, returned behind the reply's message head. */

#define WIRE_BODY_MAP(X)                                                                                    \
    X(hello_req)                                                                                                       \
    X(hello_rep) X(hello_devices) X(device_entry)                                                                                                       \
    X(open_rep)                                                                                                        \
    X(region_create_req) X(region_rep) X(region_attach_req) X(region_entry) X(region_import_req) X(ipc_handle) X(plane_map)          \
        X(region_close_req) X(lookup_req) X(lookup_rep) X(reserve_req) X(reserve_rep) X(release_req) X(load_req)       \
            X(slot_ref) X(load_rep) X(load_result) X(store_req) X(key_rep) X(slot_take_req) X(slot_take_rep)           \
                X(slot_drop_req) X(write_req) X(write_call) X(call_rep) X(call_result) X(decode_req) X(decode_call) X(extend_req)    \
                    X(keys_req) X(reset_req) X(reset_rep) X(cancel_req) X(cancel_rep) X(status_req) X(status_rep)      \
                        X(health_rep) X(watch_req) X(event) X(event_item) X(reload_req) X(drain_req)

/* clang-format on */
#define WIRE_FIELD_u16(name) uint16_t name;
#define WIRE_FIELD_u32(name) uint32_t name;
#define WIRE_FIELD_u64(name) uint64_t name;
#define WIRE_FIELD_f32(name) float name;
#define WIRE_FIELD_b16(name) uint8_t name[16];
#define WIRE_FIELD_b32(name) uint8_t name[32];
#define WIRE_SIZE_u16        2
#define WIRE_SIZE_u32        4
#define WIRE_SIZE_u64        8
#define WIRE_SIZE_f32        4
#define WIRE_SIZE_b16        16
#define WIRE_SIZE_b32        32

#define WIRE_FIELD(type, name) WIRE_FIELD_##type(name)
#define WIRE_SIZE(type, name)  +WIRE_SIZE_##type
#define WIRE_DECLARE(body)                                                                                             \
    typedef struct wire_##body {                                                                                       \
        WIRE_##body(WIRE_FIELD)                                                                                        \
    } wire_##body;                                                                                                     \
    enum { WIRE_##body##_BYTES = 0 WIRE_##body(WIRE_SIZE) };                                                           \
    void wire_put_##body(wire_out *o, const wire_##body *v);                                                           \
    void wire_get_##body(wire_in *i, wire_##body *v);
WIRE_BODY_MAP(WIRE_DECLARE)

enum wire_feature {
    WIRE_FEATURE_CUDA = 1,    /* descriptors of regions are CUDA VMM handles */
    WIRE_FEATURE_DEVICES = 2, /* HELLO's reply lists the devices */
};
enum wire_region_kind { WIRE_REGION_SLOTS = 0, WIRE_REGION_SCRATCH = 1 };
enum wire_memory { WIRE_MEMORY_MEMFD = 0, WIRE_MEMORY_CUDA_IPC = 1, WIRE_MEMORY_CUDA_VMM = 2 };
enum wire_attach_mode { WIRE_ATTACH_TOKEN = 0, WIRE_ATTACH_REOFFER = 1 };
enum wire_entry_flags { WIRE_ENTRY_SHARED = 1 }; /* region_entry: key is attached; else private */
enum wire_key_state {
    WIRE_KEY_ABSENT = 0,
    WIRE_KEY_WRITING = 1, /* a STORE is on its way; not a hit */
    WIRE_KEY_READY = 2,   /* in host memory: a hit */
};
enum wire_load_flags { WIRE_LOAD_BY_LEASE = 1 };
enum wire_load_result_flags { WIRE_LOADED_SHARED = 1, WIRE_LOADED_NO_COPY = 2 };
enum wire_store_flags { WIRE_STORE_KEEP = 1 };
enum wire_decode_flags { WIRE_DECODE_FIXED_SPLIT = 1 };
enum wire_reset_flags { WIRE_RESET_PINNED = 1 }; /* drop pinned blocks too */
enum wire_cancel_outcome { WIRE_CANCEL_GONE = 0, WIRE_CANCEL_STOPPED = 1, WIRE_CANCEL_FINISHED = 2 };
enum wire_reload_flags { WIRE_RELOAD_DRY_RUN = 1 };
enum wire_section {
    WIRE_SECTION_SUMMARY = 0, /* any socket; the rest on the admin socket only */
    WIRE_SECTION_CLIENTS = 1,
    WIRE_SECTION_LEASES = 2,
    WIRE_SECTION_KEYS = 3, /* paged by cursor and limit */
    WIRE_SECTION_NAMESPACES = 4,
    WIRE_SECTION_FSCK = 5,
    WIRE_SECTION_TENANTS = 6,
    WIRE_SECTION_METRICS = 7,
};
enum wire_health { WIRE_HEALTH_OK = 0, WIRE_HEALTH_STARTING = 1, WIRE_HEALTH_DEGRADED = 2, WIRE_HEALTH_DRAINING = 3 };
enum wire_event_type { WIRE_EVENT_STORED = 0, WIRE_EVENT_REMOVED = 1, WIRE_EVENT_RESET = 2 };
enum wire_event_cause { WIRE_CAUSE_NONE = 0, WIRE_CAUSE_EVICTED = 1, WIRE_CAUSE_DROPPED = 2, WIRE_CAUSE_REBOUND = 3 };

/* The counter page: a sealed memfd of two 4,096-byte halves, 256 entries of 16 bytes each: u64 value at 0, u64 error
 * at 8.  First half: written by the client (after_counter 0..255).  Second half: written by the daemon
 * (signal_counter 0..255; as after_counter with WIRE_COUNTER_DAEMON set).  A failed job writes its status to the error
 * word, then advances the value; values only grow and stay below 2^62. */
enum { WIRE_COUNTERS = 256, WIRE_COUNTER_HALF_BYTES = 4096, WIRE_COUNTER_PAGE_BYTES = 8192 };
#define WIRE_COUNTER_DAEMON UINT32_C(0x80000000)
#define WIRE_COUNTER_MAX    ((UINT64_C(1) << 62) - 1)

#endif
