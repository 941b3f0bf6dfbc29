/* The request layer, with its real workers on the cpu device, against several clients' sequences of frames.
 *
 * The input is a script: each step builds a good frame from what earlier replies gave (namespaces, regions, slots, leases),
 * damages it or not, and hands it in; or runs completions, moves the clock, raises a counter, ends a client.  Checked: every
 * request gets one reply of its own op and id, every reply is well-formed, a client that is gone leaves nothing, sums and
 * descriptors come out even. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/disposal.h"
#include "daemon/log.h"
#include "daemon/metrics.h"
#include "daemon/request.h"
#include "proto/layout.h"
#include "tests/support/sink.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum {
    N_CLIENTS = 4, /* the last one came by the admin socket */
    ADMIN = N_CLIENTS - 1,
    MAX_STEPS = 300,
    MAX_BODY = 8192,
    MAX_ASKED = 512,
    POCKET = 8, /* things of one kind that are remembered */
    N_FILES = 6,
    REGION_BYTES = 65536,
};

#define MUST(x) ((x) ? (void)0 : fail(#x, __LINE__))

static void fail(const char *what, int line)
{
    (void)fprintf(stderr, "fuzz_core: line %d: not true: %s\n", line, what);
    abort();
}

typedef struct script {
    const uint8_t *p;
    size_t left;
} script;

typedef struct asked {
    uint64_t id;
    uint16_t op;
} asked;

typedef struct client {
    peer *peer; /* NULL: not connected */
    bool closed, is_admin;
    uint64_t next_id, fsck_id; /* of the STATUS that must be answered OK; 0: none */
    bool fsck_good;
    uint8_t *counters;
    asked asked[MAX_ASKED];
    size_t n_asked;
    uint32_t slots[POCKET], scratch[POCKET]; /* regions */
    wire_slot_ref refs[POCKET];
    unsigned n_slots, n_scratch, n_refs;
} client;

typedef struct world {
    sink sink;
    device *dev;
    config cfg;
    core *core;
    uint64_t now_us;
    client clients[N_CLIENTS];
    uint32_t ns[POCKET];
    uint8_t lease[POCKET][16], token[POCKET][16];
    unsigned n_ns, n_leases, n_tokens;
    int files[N_FILES]; /* to send along: good and bad ones */
} world;

static world w;

/* ---- reading the script ---- */
static uint8_t take(script *s)
{
    if (s->left == 0)
        return 0;
    s->left--;
    return *s->p++;
}

static uint32_t take16(script *s)
{
    uint32_t v = take(s);

    return v << 8 | take(s);
}

/* Mostly something small and plausible, sometimes an edge. */
static uint64_t number(script *s, uint64_t below)
{
    static const uint64_t EDGES[] = {
        0,         1,    UINT32_MAX, UINT32_MAX - 1, INT32_MAX,         UINT64_C(1) << 32, UINT64_MAX,
        INT64_MAX, 4096, 65536,      1048576,        UINT64_C(1) << 62, UINT64_C(1) << 40, 65535,
        255,       256};
    uint8_t b = take(s);

    return b < 240 ? b % below : EDGES[b & 15];
}

static uint32_t one_of(script *s, const uint32_t *list, unsigned n)
{
    uint8_t b = take(s);

    if (b >= 250 || n == 0)
        return b == 255 ? WIRE_NONE32 : b & 7;
    return list[b % (n < POCKET ? n : POCKET)];
}

static void one_key(script *s, wire_out *o)
{
    uint8_t key[32] = {0};

    key[0] = take(s) % 24;
    wire_put_bytes(o, key, sizeof key);
}

static void put_keys(script *s, wire_out *o, uint32_t n)
{
    for (uint32_t i = 0; i < n && i < 32; i++)
        one_key(s, o);
}

static void put_refs(script *s, const client *c, wire_out *o, uint32_t n)
{
    for (uint32_t i = 0; i < n && i < 32; i++) {
        uint8_t b = take(s);
        wire_slot_ref r = {WIRE_NONE32, 0};

        if (b < 128 && c->n_refs > 0)
            r = c->refs[b % (c->n_refs < POCKET ? c->n_refs : POCKET)];
        else if (b >= 192)
            r.slot = b & 15;
        wire_put_slot_ref(o, &r);
    }
}

/* ---- the reply side ---- */
static void remember(uint32_t *list, unsigned *n, uint32_t v)
{
    list[(*n)++ % POCKET] = v;
}

static void learn_region(client *c, wire_in *in)
{
    wire_region_rep rep;

    wire_get_region_rep(in, &rep);
    if (rep.n_slots > 0)
        remember(c->slots, &c->n_slots, rep.region);
    else
        remember(c->scratch, &c->n_scratch, rep.region);
    memcpy(w.token[w.n_tokens++ % POCKET], rep.token, 16);
}

static void learn_refs(client *c, uint16_t op, wire_in *in)
{
    uint32_t n = wire_get_u32(in);

    (void)wire_get_u32(in);
    for (uint32_t i = 0; i < n; i++) {
        wire_load_result r = {.status = KVS_OK};
        wire_slot_ref ref;

        if (op == WIRE_LOAD) {
            wire_get_load_result(in, &r);
            ref = (wire_slot_ref){r.slot, r.gen};
        } else {
            wire_get_slot_ref(in, &ref);
        }
        if (r.status == KVS_OK)
            c->refs[c->n_refs++ % POCKET] = ref;
    }
    MUST(wire_in_done(in));
}

static void learn(client *c, uint16_t op, uint32_t status, wire_in *in)
{
    wire_reserve_rep lease;
    wire_open_rep open;

    if (status != KVS_OK && status != KVS_E_PARTIAL)
        return;
    if (op == WIRE_OPEN) {
        wire_get_open_rep(in, &open);
        remember(w.ns, &w.n_ns, open.ns);
    } else if (op == WIRE_REGION_CREATE || op == WIRE_REGION_ATTACH || op == WIRE_REGION_IMPORT) {
        learn_region(c, in);
    } else if (op == WIRE_SLOT_TAKE || op == WIRE_LOAD) {
        learn_refs(c, op, in);
    } else if (op == WIRE_RESERVE) {
        wire_get_reserve_rep(in, &lease);
        memcpy(w.lease[w.n_leases++ % POCKET], lease.lease, 16);
    }
}

static void settle(client *c, const wire_header *h)
{
    for (size_t i = 0; i < c->n_asked; i++)
        if (c->asked[i].id == h->id && c->asked[i].op == h->op) {
            c->asked[i] = c->asked[--c->n_asked];
            return;
        }
    fail("a reply to something that was asked", h->op);
}

static void take_counters(client *c, reply *r)
{
    MUST(r->n_fds == 1 && c->counters == NULL);
    c->counters = mmap(NULL, WIRE_COUNTER_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, r->fds[0], 0);
    MUST(c->counters != MAP_FAILED);
}

static void on_send(void *ud, reply *r)
{
    wire_in in = {.base = r->bytes + WIRE_HEADER_BYTES, .len = r->len - WIRE_HEADER_BYTES};
    client *c = ud;
    wire_header h;
    uint32_t n;

    MUST(wire_header_decode(r->bytes, UINT32_MAX, &h, NULL) == KVS_OK);
    MUST(r->len == (size_t)WIRE_HEADER_BYTES + h.body_len && h.n_fds == r->n_fds);
    if (h.op != WIRE_EVENT || h.status != KVS_OK) { /* an EVENT that a client sent is refused like any unknown op */
        settle(c, &h);
        if (h.op == WIRE_STATUS && h.id == c->fsck_id)
            c->fsck_good = h.status == KVS_OK;
        n = wire_get_u32(&in);
        MUST(n < KVS_ERR_MSG_BYTES && wire_get_u32(&in) == 0);
        MUST(wire_get_array(&in, n, 1) != NULL && (n > 0 || h.status == KVS_OK || h.status == KVS_E_PARTIAL));
        if (h.op == WIRE_HELLO && h.status == KVS_OK)
            take_counters(c, r);
        learn(c, h.op, h.status, &in);
        MUST(!in.bad);
    }
    reply_destroy(r);
}

static size_t on_out_bytes(const void *ud)
{
    (void)ud;
    return 0;
}

static bool on_is_behind(const void *ud)
{
    (void)ud;
    return false;
}

static void on_closed(void *ud)
{
    ((client *)ud)->closed = true;
}

/* ---- clients ---- */
static void run_completions(void)
{
    MUST(sink_run_until(&w.sink, sink_posted(&w.sink)));
}

/* The tick that is due, or the next completion; false: there is none. */
static bool go_on(void)
{
    if (core_next_due(w.core) > w.now_us)
        return sink_run_until(&w.sink, w.sink.done + 1);
    (void)core_tick(w.core, w.now_us);
    return true;
}

static void leave(client *c)
{
    if (c->peer == NULL)
        return;
    peer_gone(c->peer, w.now_us);
    while (!c->closed)
        MUST(go_on());
    if (c->counters != NULL)
        (void)munmap(c->counters, WIRE_COUNTER_PAGE_BYTES);
    *c = (client){.is_admin = c->is_admin};
}

static void hand_in(client *c, frame *f)
{
    uint8_t *copy = malloc(f->head.body_len + 1); /* of just this size, so that reading past it shows */

    MUST(copy != NULL && c->n_asked < MAX_ASKED);
    memcpy(copy, f->body, f->head.body_len);
    f->body = copy;
    c->asked[c->n_asked++] = (asked){f->head.id, f->head.op};
    if (peer_request(c->peer, f, w.now_us, NULL) != KVS_OK)
        leave(c);
    memset(copy, 0xee, f->head.body_len);
    free(copy);
}

static void join(client *c, bool hello)
{
    static const peer_ops OPS = {on_send, on_out_bytes, on_is_behind, on_closed};
    peer_info info = {.uid = 1000, .pid = 42, .is_admin = c->is_admin};
    uint8_t body[WIRE_hello_req_BYTES];
    wire_out o = {body, 0, sizeof body, false};
    frame f = {.head = {.op = WIRE_HELLO, .id = 1, .body_len = sizeof body}, .body = body};

    c->next_id = 2;
    MUST(peer_create(&c->peer, w.core, &OPS, c, &info, w.now_us, NULL) == KVS_OK);
    wire_put_hello_req(&o, &(wire_hello_req){.version_min = 1, .version_max = 1});
    if (hello)
        hand_in(c, &f);
}

/* ---- good bodies ---- */
static void put_hello(script *s, wire_out *o)
{
    wire_hello_req q = {.version_min = 1, .version_max = (uint16_t)number(s, 3), .name_len = (uint32_t)number(s, 9)};

    wire_put_hello_req(o, &q);
    for (uint32_t i = 0; i < q.name_len && i < 64; i++)
        wire_put_u8(o, take(s));
    wire_put_pad8(o);
}

static void put_open(script *s, wire_out *o)
{
    static const uint32_t FORMATS[] = {KVS_FORMAT_mla_fp16, KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp8,
                                       KVS_FORMAT_fp8_ds_mla};
    kvs_plane planes[4];
    kvs_namespace ns;
    uint8_t b = take(s);
    char model[2] = {(char)('a' + (b >> 6)), 0};

    if (kvs_namespace_mla(model, "", FORMATS[(b & 1) | (b >> 6 & 2)], 1 + (b >> 1 & 1), 1 + (b >> 2 & 3), planes, &ns,
                          NULL) == KVS_OK)
        (void)kvs_namespace_encode(&ns, o->base, o->cap, &o->len, NULL);
}

static void put_attach(script *s, client *c, wire_out *o)
{
    wire_region_attach_req q = {.ns = one_of(s, w.ns, w.n_ns),
                                .kind = (uint32_t)number(s, 2),
                                .n_slots = (uint32_t)number(s, 5),
                                .bytes = number(s, 2) * REGION_BYTES,
                                .mode = (uint32_t)number(s, 2),
                                .n_entries = (uint32_t)number(s, 3)};

    (void)c;
    memcpy(q.token, w.token[take(s) % POCKET], 16);
    wire_put_region_attach_req(o, &q);
    for (uint32_t i = 0; i < q.n_entries && i < 4; i++) {
        wire_region_entry e = {
            .slot = (uint32_t)number(s, 5), .gen = (uint32_t)number(s, 9), .flags = (uint32_t)number(s, 2)};

        e.key[0] = e.flags ? take(s) % 24 : 0;
        wire_put_region_entry(o, &e);
    }
}

static void put_import(script *s, wire_out *o)
{
    wire_region_import_req q = {
        .ns = one_of(s, w.ns, w.n_ns), .n_slots = (uint32_t)number(s, 5), .n_maps = (uint32_t)number(s, 3)};

    wire_put_region_import_req(o, &q);
    for (uint32_t i = 0; i < q.n_maps && i < 4; i++)
        wire_put_plane_map(o, &(wire_plane_map){.fd = (uint32_t)number(s, 2),
                                                .backend = (uint32_t)number(s, 9),
                                                .base = number(s, 64) * 16,
                                                .stride = number(s, 16) * 1152});
}

static void put_load(script *s, const client *c, wire_out *o)
{
    wire_load_req q = {.ns = one_of(s, w.ns, w.n_ns),
                       .region = one_of(s, c->slots, c->n_slots),
                       .n = (uint32_t)number(s, 6),
                       .flags = (uint32_t)number(s, 2),
                       .after_counter = take(s) & 1 ? WIRE_NONE32 : (uint32_t)number(s, 3),
                       .signal_counter = (uint32_t)number(s, 3),
                       .after_value = number(s, 3),
                       .signal_value = number(s, 9)};

    if (q.flags != 0) { /* else they must be zeros */
        memcpy(q.lease, w.lease[take(s) % POCKET], 16);
        q.lease_first = (uint32_t)number(s, 3);
    }
    wire_put_load_req(o, &q);
    if (q.flags != WIRE_LOAD_BY_LEASE)
        put_keys(s, o, q.n);
    put_refs(s, c, o, q.n);
}

static void put_store(script *s, const client *c, wire_out *o)
{
    wire_store_req q = {.ns = one_of(s, w.ns, w.n_ns),
                        .region = one_of(s, c->slots, c->n_slots),
                        .n = (uint32_t)number(s, 6),
                        .flags = (uint32_t)number(s, 2),
                        .after_counter = take(s) & 1 ? WIRE_NONE32 : (uint32_t)number(s, 3),
                        .signal_counter = (uint32_t)number(s, 3),
                        .after_value = number(s, 3),
                        .signal_value = number(s, 9),
                        .first_depth = (uint32_t)number(s, 3)};

    q.parent[0] = q.first_depth ? take(s) % 24 : 0;
    wire_put_store_req(o, &q);
    put_keys(s, o, q.n);
    put_refs(s, c, o, q.n);
}

static void put_write(script *s, const client *c, wire_out *o)
{
    wire_write_req q = {.ns = one_of(s, w.ns, w.n_ns),
                        .region = one_of(s, c->slots, c->n_slots),
                        .n_tokens = (uint32_t)number(s, 5),
                        .n_calls = (uint32_t)number(s, 3),
                        .after_counter = WIRE_NONE32,
                        .signal_counter = (uint32_t)number(s, 3),
                        .signal_value = number(s, 9)};

    wire_put_write_req(o, &q);
    for (uint32_t i = 0; i < q.n_calls && i < 4; i++)
        wire_put_write_call(o, &(wire_write_call){.plane = (uint32_t)number(s, 2),
                                                  .scratch = one_of(s, c->scratch, c->n_scratch),
                                                  .kv_c_offset = number(s, 8) * 2,
                                                  .kv_c_stride = 1024 + number(s, 2) * 2,
                                                  .k_pe_offset = 8192 + number(s, 8) * 2,
                                                  .k_pe_stride = 128,
                                                  .src_type = (uint32_t)number(s, 16) / 12,
                                                  .kv_scale = number(s, 16) == 15 ? 0.5f : 0});
    for (uint32_t i = 0; i < q.n_tokens && i < 8; i++)
        wire_put_u64(o, number(s, 16));
}

static void put_calls(script *s, const client *c, wire_out *o, uint32_t n)
{
    for (uint32_t i = 0; i < n && i < 4; i++)
        wire_put_decode_call(o, &(wire_decode_call){.plane = (uint32_t)number(s, 2),
                                                    .scratch = one_of(s, c->scratch, c->n_scratch),
                                                    .parts = (uint32_t)number(s, 4),
                                                    .sm_scale = (float)number(s, 4) / 8,
                                                    .after_counter = take(s) & 1 ? WIRE_NONE32 : (uint32_t)number(s, 3),
                                                    .after_value = number(s, 3),
                                                    .signal_counter = (uint32_t)number(s, 3),
                                                    .signal_value = number(s, 9),
                                                    .q_nope_offset = number(s, 16) * 2,
                                                    .q_nope_token = 1024,
                                                    .q_nope_head = 1024,
                                                    .q_pe_offset = number(s, 16) * 2,
                                                    .q_pe_token = 128,
                                                    .q_pe_head = number(s, 3) * 64,
                                                    .out_offset = 32768 + number(s, 16) * 2,
                                                    .out_token = 4096,
                                                    .out_head = 1024,
                                                    .lse_offset = 60000 + number(s, 4) * 4,
                                                    .lse_token = 16,
                                                    .lse_head = 4,
                                                    .kv_scale = number(s, 16) == 15 ? 0.5f : 0,
                                                    .reserved = number(s, 16) == 15});
}

static void put_decode(script *s, const client *c, wire_out *o)
{
    wire_decode_req q = {.ns = one_of(s, w.ns, w.n_ns),
                         .region = one_of(s, c->slots, c->n_slots),
                         .n_seqs = (uint32_t)number(s, 4),
                         .table_width = (uint32_t)number(s, 4),
                         .s_q = (uint32_t)number(s, 3),
                         .h_q = (uint32_t)number(s, 4),
                         .n_calls = (uint32_t)number(s, 3),
                         .flags = (uint32_t)number(s, 2)};

    wire_put_decode_req(o, &q);
    put_calls(s, c, o, q.n_calls);
    for (uint32_t i = 0; i < q.n_seqs && i < 8; i++)
        wire_put_u32(o, (uint32_t)number(s, 13));
    wire_put_pad8(o);
    for (uint64_t i = 0; i < (uint64_t)q.n_seqs * q.table_width && i < 32; i++)
        wire_put_u32(o, (uint32_t)number(s, 5));
    wire_put_pad8(o);
}

static void put_extend(script *s, const client *c, wire_out *o)
{
    wire_extend_req q = {.ns = one_of(s, w.ns, w.n_ns),
                         .region = one_of(s, c->slots, c->n_slots),
                         .n_seqs = (uint32_t)number(s, 4),
                         .table_width = (uint32_t)number(s, 4),
                         .n_tokens = (uint32_t)number(s, 5),
                         .h_q = (uint32_t)number(s, 4),
                         .n_calls = (uint32_t)number(s, 3),
                         .flags = (uint32_t)number(s, 2)};
    uint32_t at = 0;

    wire_put_extend_req(o, &q);
    put_calls(s, c, o, q.n_calls);
    for (uint64_t i = 0; i <= q.n_seqs && i < 9; i++, at += (uint32_t)number(s, 3))
        wire_put_u32(o, at);
    wire_put_pad8(o);
    for (uint32_t i = 0; i < q.n_seqs && i < 8; i++)
        wire_put_u32(o, (uint32_t)number(s, 13));
    wire_put_pad8(o);
    for (uint64_t i = 0; i < (uint64_t)q.n_seqs * q.table_width && i < 32; i++)
        wire_put_u32(o, (uint32_t)number(s, 5));
    wire_put_pad8(o);
}

static void put_reserve(script *s, wire_out *o)
{
    wire_reserve_req q = {.n_ns = 1 + (uint32_t)number(s, 2),
                          .n_keys = (uint32_t)number(s, 6),
                          .max_loads = (uint32_t)number(s, 3),
                          .ttl_ms = (uint32_t)number(s, 200)};

    wire_put_reserve_req(o, &q);
    for (uint32_t i = 0; i < q.n_ns && i < 4; i++)
        wire_put_u32(o, one_of(s, w.ns, w.n_ns));
    wire_put_pad8(o);
    put_keys(s, o, q.n_keys);
}

static void put_slots(script *s, const client *c, uint16_t op, wire_out *o)
{
    uint32_t region = one_of(s, c->slots, c->n_slots), n = (uint32_t)number(s, 5);

    if (op == WIRE_SLOT_TAKE) {
        wire_put_slot_take_req(o, &(wire_slot_take_req){region, n});
        return;
    }
    wire_put_slot_drop_req(o,
                           &(wire_slot_drop_req){.region = region,
                                                 .n = n,
                                                 .after_value = number(s, 3),
                                                 .after_counter = take(s) & 1 ? WIRE_NONE32 : (uint32_t)number(s, 3)});
    put_refs(s, c, o, n);
}

static void put_many_keys(script *s, uint16_t op, wire_out *o)
{
    uint32_t n = (uint32_t)number(s, 7), ns = one_of(s, w.ns, w.n_ns);

    if (op == WIRE_LOOKUP)
        wire_put_lookup_req(o, &(wire_lookup_req){ns, n});
    else
        wire_put_keys_req(o, &(wire_keys_req){ns, n});
    put_keys(s, o, n);
}

static void put_create(script *s, wire_out *o)
{
    wire_region_create_req q = {.ns = one_of(s, w.ns, w.n_ns), .kind = (uint32_t)number(s, 2)};

    if (q.kind == WIRE_REGION_SLOTS)
        q.n_slots = (uint32_t)number(s, 6);
    else
        q = (wire_region_create_req){.ns = WIRE_NONE32, .kind = q.kind, .bytes = number(s, 3) * REGION_BYTES};
    wire_put_region_create_req(o, &q);
}

static void put_small(script *s, client *c, uint16_t op, wire_out *o)
{
    wire_release_req release;

    switch (op) {
    case WIRE_REGION_CLOSE:
        wire_put_region_close_req(o, &(wire_region_close_req){take(s) & 1 ? one_of(s, c->slots, c->n_slots)
                                                                          : one_of(s, c->scratch, c->n_scratch),
                                                              0});
        break;
    case WIRE_RELEASE:
        memcpy(release.lease, w.lease[take(s) % POCKET], 16);
        wire_put_release_req(o, &release);
        break;
    case WIRE_RESET:
        wire_put_reset_req(o, &(wire_reset_req){one_of(s, w.ns, w.n_ns), (uint32_t)number(s, 2)});
        break;
    case WIRE_CANCEL:
        wire_put_cancel_req(o, &(wire_cancel_req){c->next_id - number(s, 6)});
        break;
    case WIRE_STATUS:
        wire_put_status_req(o, &(wire_status_req){.section = (uint32_t)number(s, 6),
                                                  .limit = (uint32_t)number(s, 4),
                                                  .ns = one_of(s, w.ns, w.n_ns),
                                                  .cursor = number(s, 9)});
        break;
    case WIRE_WATCH:
        wire_put_watch_req(o, &(wire_watch_req){(uint32_t)number(s, 8), 0});
        break;
    default: /* HEALTH, PING and what is no op */
        for (unsigned n = take(s) % 9; op != WIRE_HEALTH && n > 0; n--)
            wire_put_u8(o, take(s));
    }
}

static void build(script *s, client *c, uint16_t op, wire_out *o)
{
    switch (op) {
    case WIRE_HELLO:
        put_hello(s, o);
        break;
    case WIRE_OPEN:
        put_open(s, o);
        break;
    case WIRE_REGION_CREATE:
        put_create(s, o);
        break;
    case WIRE_REGION_ATTACH:
        put_attach(s, c, o);
        break;
    case WIRE_REGION_IMPORT:
        put_import(s, o);
        break;
    case WIRE_LOAD:
        put_load(s, c, o);
        break;
    case WIRE_STORE:
        put_store(s, c, o);
        break;
    case WIRE_WRITE:
        put_write(s, c, o);
        break;
    case WIRE_DECODE:
        put_decode(s, c, o);
        break;
    case WIRE_EXTEND:
        put_extend(s, c, o);
        break;
    case WIRE_RESERVE:
        put_reserve(s, o);
        break;
    case WIRE_SLOT_TAKE:
    case WIRE_SLOT_DROP:
        put_slots(s, c, op, o);
        break;
    case WIRE_LOOKUP:
    case WIRE_PIN:
    case WIRE_UNPIN:
    case WIRE_DROP:
        put_many_keys(s, op, o);
        break;
    default:
        put_small(s, c, op, o);
    }
}

/* ---- steps ---- */
static void damage(script *s, wire_out *o)
{
    uint8_t how = take(s);

    for (unsigned n = how & 3; n > 0 && o->len > 0; n--)
        o->base[take16(s) % o->len] ^= (uint8_t)(1 + take(s) % 255);
    if (how & 4)
        o->len = take16(s) % (o->len + 1);
    else if (how & 8)
        for (unsigned n = take(s); n > 0; n--)
            wire_put_u8(o, how & 16 ? take(s) : 0);
}

static void add_files(script *s, frame *f, uint16_t op)
{
    bool wants = op == WIRE_REGION_IMPORT || op == WIRE_REGION_ATTACH;
    uint8_t b = take(s);

    if (!wants && b < 248)
        return;
    f->head.n_fds = b & 3;
    for (unsigned i = 0; i < f->head.n_fds; i++)
        MUST((f->fds[i] = dup(w.files[b & 64 ? take(s) % N_FILES : 0])) >= 0);
}

static void send_frame(script *s, client *c)
{
    /* What moves bytes comes more often than its share. */
    static const uint8_t OPS[] = {WIRE_OPEN,      WIRE_REGION_CREATE, WIRE_SLOT_TAKE, WIRE_STORE, WIRE_STORE,
                                  WIRE_LOAD,      WIRE_LOAD,          WIRE_DECODE,    WIRE_WRITE, WIRE_RESERVE,
                                  WIRE_SLOT_DROP, WIRE_CANCEL,        WIRE_EXTEND};
    static const uint64_t DEADLINES[] = {0, 0, 0, 1, 1000, UINT64_MAX};
    uint8_t bytes[MAX_BODY], b = take(s);
    wire_out o = {bytes, 0, sizeof bytes, false};
    uint16_t op = b < 96 ? OPS[b % sizeof OPS] : b < 250 ? (uint16_t)(1 + b % WIRE_EVENT) : (uint16_t)(b - 240);
    frame f = {.head = {.op = op, .deadline_us = DEADLINES[take(s) % 6]}, .body = bytes};

    if (c->peer == NULL)
        join(c, b != 77);
    if (c->n_asked == MAX_ASKED)
        return;
    build(s, c, op, &o);
    b = take(s);
    if (b >= 208)
        damage(s, &o);
    f.head.id = b == 1 ? c->next_id - 1 : c->next_id++;
    f.head.body_len = (uint32_t)o.len;
    add_files(s, &f, op);
    hand_in(c, &f);
}

static void step(script *s)
{
    uint8_t b = take(s);
    client *c = &w.clients[b & 3];

    if (b < 216) {
        send_frame(s, c);
    } else if (b < 228) {
        run_completions();
    } else if (b < 236) {
        w.now_us += UINT64_C(1) << (take(s) % 26);
        (void)core_tick(w.core, w.now_us);
    } else if (b < 240 && c->counters != NULL) {
        uint64_t v = take(s) % 4;

        __atomic_store_n((uint64_t *)(void *)(c->counters + take(s) % 3 * 16), v, __ATOMIC_RELEASE);
    } else if (b >= 250) {
        leave(c);
    }
    if (core_next_due(w.core) <= w.now_us)
        (void)core_tick(w.core, w.now_us);
}

/* ---- life ---- */
static unsigned open_descriptors(void)
{
    DIR *d;
    unsigned n = 0;

    MUST(disposal_wait(10000));
    d = opendir("/proc/self/fd");
    MUST(d != NULL);
    while (readdir(d) != NULL)
        n++;
    (void)closedir(d);
    return n;
}

static int memory_file(off_t bytes, bool filled, bool sealed)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    MUST(fd >= 0 && ftruncate(fd, bytes) == 0);
    MUST(!filled || fallocate(fd, 0, 0, bytes) == 0);
    MUST(!sealed || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return fd;
}

static void open_files(void)
{
    if (w.files[0] > 0)
        return;
    w.files[0] = memory_file(REGION_BYTES, true, true);
    w.files[1] = memory_file(4096, true, true);
    w.files[2] = memory_file(REGION_BYTES, true, false);
    w.files[3] = memory_file(REGION_BYTES, false, true);
    w.files[4] = open("/dev/null", O_RDWR | O_CLOEXEC);
    w.files[5] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    log_set_level(LOG_LEVEL_ERROR);
}

static void open_world(void)
{
    open_files();
    w.now_us = 1000000;
    w.n_ns = w.n_leases = w.n_tokens = 0;
    memset(w.clients, 0, sizeof w.clients);
    w.clients[ADMIN].is_admin = true;
    config_default(&w.cfg);
    w.cfg.pool_max_bytes = CONFIG_KIB(256);
    w.cfg.pool_extent_bytes = CONFIG_KIB(32);
    w.cfg.max_body_bytes = MAX_BODY;
    w.cfg.device_max_region_bytes = CONFIG_KIB(512);
    w.cfg.device_max_import_bytes = CONFIG_KIB(256);
    w.cfg.credit_requests = 64;
    sink_init(&w.sink);
    MUST(device_cpu_open(&w.dev, NULL) == KVS_OK);
    MUST(core_create(&w.core, &w.cfg, w.dev, sink_face(&w.sink), w.now_us, NULL) == KVS_OK);
    while (!core_is_ready(w.core))
        MUST(sink_run_until(&w.sink, w.sink.done + 1));
}

/* Every deadline passes, every job ends: then nothing may be owed to anybody. */
static void expect_all_answered(void)
{
    w.now_us += UINT64_C(3600) * 1000 * 1000;
    (void)core_tick(w.core, w.now_us);
    for (unsigned i = 0; i < N_CLIENTS; i++)
        while (w.clients[i].n_asked > 0)
            if (!go_on()) {
                (void)fprintf(stderr, "client %u: op %u, id %llu\n", i, w.clients[i].asked[0].op,
                              (unsigned long long)w.clients[i].asked[0].id);
                fail("every request is answered", 0);
            }
}

static void expect_even_sums(void)
{
    uint8_t bytes[WIRE_status_req_BYTES];
    wire_out o = {bytes, 0, sizeof bytes, false};
    frame f = {.head = {.op = WIRE_STATUS, .body_len = sizeof bytes}, .body = bytes};
    client *c = &w.clients[ADMIN];

    leave(c);
    join(c, true);
    f.head.id = c->next_id++;
    wire_put_status_req(&o, &(wire_status_req){.section = WIRE_SECTION_FSCK, .ns = WIRE_NONE32});
    c->fsck_id = f.head.id;
    hand_in(c, &f);
    MUST(c->fsck_good);
}

static void expect_even_counts(void)
{
    static metrics_snapshot s;

    metrics_fill(w.core, w.now_us, &s);
    for (int i = 0; i < METRICS_RULES; i++)
        MUST(s.error[i] == 0);
    MUST(s.counts.in_flight == 0 && s.import_bytes == 0);
}

static void close_world(void)
{
    expect_all_answered();
    expect_even_sums();
    for (unsigned i = 0; i < N_CLIENTS; i++)
        leave(&w.clients[i]);
    core_stop(w.core);
    run_completions();
    MUST(core_is_idle(w.core));
    expect_even_counts();
    core_destroy(w.core);
    w.dev->ops->close(w.dev);
    sink_fini(&w.sink);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    script s = {data, size};
    unsigned before;

    open_files();
    before = open_descriptors();
    open_world();
    for (unsigned n = 0; n < MAX_STEPS && s.left > 0; n++)
        step(&s);
    close_world();
    MUST(open_descriptors() == before);
    return 0;
}
