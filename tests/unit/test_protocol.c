#include "proto/backend.h"
#include "proto/layout.h"
#include "proto/wire.h"

#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* PROTOCOL.md is the contract, so it is compared with the code: every table with the X-macros, every dump
 * with what the codec writes.  KVS_REWRITE=1 in the environment writes the dumps of this program into the
 * page instead. */

#define PAGE "proto/PROTOCOL.md"

enum { EXAMPLE_MAX = 1024, PAGE_MAX = 1 << 20 };

/* ---- the examples: one session, see "A worked session" ---- */

typedef struct example {
    uint8_t bytes[EXAMPLE_MAX];
    wire_out o; /* a frame's body, or bytes of their own */
    wire_header head;
    bool is_frame;
} example;

static wire_out *begin(example *e, uint16_t op, uint64_t id)
{
    e->is_frame = true;
    e->head = (wire_header){.op = op, .id = id};
    e->o = (wire_out){.base = e->bytes + WIRE_HEADER_BYTES, .cap = sizeof e->bytes - WIRE_HEADER_BYTES};
    return &e->o;
}

static wire_out *answer(example *e, uint16_t op, uint64_t id, kvs_status s, const char *msg)
{
    wire_out *o = begin(e, op, id);

    e->head.status = (uint16_t)s;
    wire_put_u32(o, (uint32_t)strlen(msg));
    wire_put_u32(o, 0);
    wire_put_bytes(o, msg, strlen(msg));
    wire_put_pad8(o);
    return o;
}

static wire_out *answer_ok(example *e, uint16_t op, uint64_t id)
{
    return answer(e, op, id, KVS_OK, "");
}

static const uint8_t BOOT[16] = {0xb0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const uint8_t TOKEN[16] = {0x70, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const uint8_t LEASE[16] = {0x1e, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const uint64_t DEADLINE_US = 2000000;

static void derive(uint8_t ret[32], const uint8_t parent[32], const char *salt, const char *adapter, uint32_t first)
{
    uint32_t tokens[4] = {first, first + 1, first + 2, first + 3};

    cr_assert_eq(kvs_key_derive(parent, salt, adapter, tokens, 4, ret, NULL), KVS_OK);
}

static void first_key(uint8_t ret[32])
{
    uint8_t zero[32] = {0};

    derive(ret, zero, "", "", 1);
}

static void put_keys(wire_out *o, int n)
{
    uint8_t key[32];

    first_key(key);
    wire_put_bytes(o, key, 32);
    if (n > 1) {
        derive(key, key, "", "", 5);
        wire_put_bytes(o, key, 32);
    }
    if (n > 2) {
        derive(key, key, "", "", 9);
        wire_put_bytes(o, key, 32);
    }
}

static void put_slots(wire_out *o, uint32_t first, uint32_t n, uint32_t gen)
{
    for (uint32_t i = 0; i < n; i++)
        wire_put_slot_ref(o, &(wire_slot_ref){first == WIRE_NONE32 ? first : first + i, gen});
}

static void put_statuses(wire_out *o, uint32_t n, const uint32_t *status)
{
    wire_key_rep rep = {.n = n};

    for (uint32_t i = 0; i < n; i++)
        rep.n_ok += status[i] == KVS_OK;
    wire_put_key_rep(o, &rep);
    for (uint32_t i = 0; i < n; i++)
        wire_put_u32(o, status[i]);
    wire_put_pad8(o);
}

static kvs_namespace tiny(kvs_plane planes[2])
{
    kvs_namespace ns;

    cr_assert_eq(kvs_namespace_mla("tiny", "rev1", KVS_FORMAT_mla_bf16, 2, 4, planes, &ns, NULL), KVS_OK);
    return ns;
}

static void put_namespace(wire_out *o)
{
    kvs_plane planes[2];
    kvs_namespace ns = tiny(planes);
    size_t len = 0;

    cr_assert_eq(kvs_namespace_encode(&ns, o->base + o->len, o->cap - o->len, &len, NULL), KVS_OK);
    o->len += len;
}

static void put_region(wire_out *o, uint32_t n_pieces, uint32_t n_entries, bool has_token)
{
    wire_region_rep rep = {.region = 5,
                           .n_slots = 4,
                           .slot_stride = 9216,
                           .bytes = 36864,
                           .piece_bytes = 36864,
                           .n_pieces = n_pieces,
                           .n_entries = n_entries};

    if (has_token)
        memcpy(rep.token, TOKEN, sizeof TOKEN);
    wire_put_region_rep(o, &rep);
}

static void ex_hello_req(example *e)
{
    wire_out *o = begin(e, WIRE_HELLO, 1);

    e->head.deadline_us = DEADLINE_US;
    wire_put_hello_req(o, &(wire_hello_req){1, 1, 4242, 0, 7, 0});
    wire_put_bytes(o, "example", 7);
    wire_put_pad8(o);
}

static void ex_hello_rep(example *e)
{
    wire_hello_rep rep = {.version = 1,
                          .n_counters = 256,
                          .conn_id = 12,
                          .max_body = 1 << 20,
                          .max_keys = 26212, /* of the default max_body */
                          .credit_requests = 256,
                          .control_requests = 16,
                          .credit_bytes = UINT64_C(4) << 30,
                          .default_deadline_us = 30000000,
                          .max_deadline_us = 600000000};

    memcpy(rep.boot_id, BOOT, sizeof BOOT);
    wire_put_hello_rep(answer_ok(e, WIRE_HELLO, 1), &rep);
    e->head.n_fds = 1;
}

static void ex_open_req(example *e)
{
    put_namespace(begin(e, WIRE_OPEN, 2));
}

static void ex_open_rep(example *e)
{
    wire_open_rep rep = {.ns = 3, .slot_bytes = 9216};
    kvs_plane planes[2];
    kvs_namespace ns = tiny(planes);

    cr_assert_eq(kvs_namespace_digest(&ns, rep.digest, NULL), KVS_OK);
    wire_put_open_rep(answer_ok(e, WIRE_OPEN, 2), &rep);
}

static void ex_region_create_req(example *e)
{
    wire_put_region_create_req(begin(e, WIRE_REGION_CREATE, 3),
                               &(wire_region_create_req){3, WIRE_REGION_SLOTS, 0, 4, 0});
}

static void ex_region_create_rep(example *e)
{
    put_region(answer_ok(e, WIRE_REGION_CREATE, 3), 1, 0, true);
    e->head.n_fds = 1;
}

static void ex_region_attach_req(example *e)
{
    wire_region_attach_req q = {.ns = 3, .kind = WIRE_REGION_SLOTS, .mode = WIRE_ATTACH_TOKEN};

    memcpy(q.token, TOKEN, sizeof TOKEN);
    wire_put_region_attach_req(begin(e, WIRE_REGION_ATTACH, 8), &q);
}

static void ex_region_attach_rep(example *e)
{
    put_region(answer_ok(e, WIRE_REGION_ATTACH, 8), 1, 0, true);
    e->head.n_fds = 1;
}

static void ex_region_reoffer_req(example *e)
{
    wire_region_attach_req q = {
        .ns = 3, .kind = WIRE_REGION_SLOTS, .n_slots = 4, .bytes = 36864, .mode = WIRE_ATTACH_REOFFER, .n_entries = 2};
    wire_region_entry shared = {.slot = 2, .gen = 7001, .flags = WIRE_ENTRY_SHARED};
    wire_out *o = begin(e, WIRE_REGION_ATTACH, 9);

    e->head.n_fds = 1;
    memcpy(q.token, TOKEN, sizeof TOKEN);
    first_key(shared.key);
    wire_put_region_attach_req(o, &q);
    wire_put_region_entry(o, &(wire_region_entry){.slot = 0, .gen = 7001});
    wire_put_region_entry(o, &shared);
}

static void ex_region_reoffer_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_REGION_ATTACH, 9);

    e->head.n_fds = 1;
    put_region(o, 1, 2, true);
    wire_put_u32(o, KVS_OK);
    wire_put_u32(o, KVS_OK);
}

static void ex_region_import_req(example *e)
{
    wire_out *o = begin(e, WIRE_REGION_IMPORT, 10);

    e->head.n_fds = 1;
    wire_put_region_import_req(o, &(wire_region_import_req){3, 0, 4, WIRE_MEMORY_MEMFD, 2, 0});
    wire_put_plane_map(o, &(wire_plane_map){0, 0, 0, 4608});
    wire_put_plane_map(o, &(wire_plane_map){0, 0, 18432, 4608});
}

static void ex_region_import_rep(example *e)
{
    wire_put_region_rep(answer_ok(e, WIRE_REGION_IMPORT, 10),
                        &(wire_region_rep){.region = 6, .n_slots = 4, .bytes = 36864});
}

static void ex_region_close_req(example *e)
{
    wire_put_region_close_req(begin(e, WIRE_REGION_CLOSE, 11), &(wire_region_close_req){6, 0});
}

static void ex_region_close_rep(example *e)
{
    answer_ok(e, WIRE_REGION_CLOSE, 11);
}

static void ex_lookup_req(example *e)
{
    wire_out *o = begin(e, WIRE_LOOKUP, 6);

    wire_put_lookup_req(o, &(wire_lookup_req){3, 3});
    put_keys(o, 3);
}

static void ex_lookup_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_LOOKUP, 6);

    wire_put_lookup_rep(o, &(wire_lookup_rep){2, 3});
    wire_put_u8(o, WIRE_KEY_READY);
    wire_put_u8(o, WIRE_KEY_READY);
    wire_put_u8(o, WIRE_KEY_ABSENT);
    wire_put_pad8(o);
}

static void ex_reserve_req(example *e)
{
    wire_out *o = begin(e, WIRE_RESERVE, 12);

    wire_put_reserve_req(o, &(wire_reserve_req){1, 2, 4, 5000});
    wire_put_u32(o, 3);
    wire_put_pad8(o);
    put_keys(o, 2);
}

static void ex_reserve_rep(example *e)
{
    wire_reserve_rep rep = {.n_leased = 2, .ttl_ms = 5000, .bytes = 18432};

    memcpy(rep.lease, LEASE, sizeof LEASE);
    wire_put_reserve_rep(answer_ok(e, WIRE_RESERVE, 12), &rep);
}

static void ex_release_req(example *e)
{
    wire_release_req q;

    memcpy(q.lease, LEASE, sizeof LEASE);
    wire_put_release_req(begin(e, WIRE_RELEASE, 13), &q);
}

static void ex_release_rep(example *e)
{
    answer_ok(e, WIRE_RELEASE, 13);
}

static void ex_load_req(example *e)
{
    wire_out *o = begin(e, WIRE_LOAD, 7);

    wire_put_load_req(
        o, &(wire_load_req){
               .ns = 3, .region = 5, .n = 2, .after_counter = WIRE_NONE32, .signal_counter = 1, .signal_value = 1});
    put_keys(o, 2);
    put_slots(o, WIRE_NONE32, 2, 0);
}

static void ex_load_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_LOAD, 7);

    wire_put_load_rep(o, &(wire_load_rep){2, 2});
    wire_put_load_result(o, &(wire_load_result){KVS_OK, WIRE_LOADED_SHARED, 2, 7001});
    wire_put_load_result(o, &(wire_load_result){KVS_OK, WIRE_LOADED_SHARED, 3, 7001});
}

static void ex_refusal(example *e)
{
    answer(e, WIRE_LOAD, 7, KVS_E_NOT_FOUND, "region: 9 is not known");
}

static void ex_store_req(example *e)
{
    wire_out *o = begin(e, WIRE_STORE, 5);

    wire_put_store_req(o, &(wire_store_req){.ns = 3,
                                            .region = 5,
                                            .n = 2,
                                            .after_counter = 0,
                                            .signal_counter = 0,
                                            .after_value = 1,
                                            .signal_value = 1});
    put_keys(o, 2);
    put_slots(o, 0, 2, 7001);
}

static void ex_store_rep(example *e)
{
    put_statuses(answer_ok(e, WIRE_STORE, 5), 2, (const uint32_t[]){KVS_OK, KVS_OK});
}

static void ex_slot_take_req(example *e)
{
    wire_put_slot_take_req(begin(e, WIRE_SLOT_TAKE, 4), &(wire_slot_take_req){5, 2});
}

static void ex_slot_take_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_SLOT_TAKE, 4);

    wire_put_slot_take_rep(o, &(wire_slot_take_rep){2, 0});
    put_slots(o, 0, 2, 7001);
}

static void ex_slot_drop_req(example *e)
{
    wire_out *o = begin(e, WIRE_SLOT_DROP, 14);

    wire_put_slot_drop_req(o, &(wire_slot_drop_req){5, 2, WIRE_NONE32, 0, 0});
    put_slots(o, 2, 2, 7001);
}

static void ex_slot_drop_rep(example *e)
{
    put_statuses(answer_ok(e, WIRE_SLOT_DROP, 14), 2, (const uint32_t[]){KVS_OK, KVS_OK});
}

static void ex_write_req(example *e)
{
    wire_out *o = begin(e, WIRE_WRITE, 15);

    wire_put_write_req(o, &(wire_write_req){3, 5, 2, 1, 0, 2, 2, 1});
    wire_put_write_call(o, &(wire_write_call){1, 7, 0, 1024, 2048, 128, 0, 0});
    wire_put_u64(o, 6);                     /* slot 1, place 2 */
    wire_put_u64(o, (uint64_t)INT64_C(-1)); /* skipped */
}

static void ex_write_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_WRITE, 15);

    wire_put_call_rep(o, &(wire_call_rep){1, 1});
    wire_put_call_result(o, &(wire_call_result){KVS_OK, 0, 0, 0});
}

static void ex_decode_req(example *e)
{
    wire_decode_call c = {.plane = 1,
                          .scratch = 7,
                          .sm_scale = 0.125F,
                          .after_counter = WIRE_NONE32,
                          .signal_counter = 3,
                          .signal_value = 1,
                          .q_nope_offset = 4096,
                          .q_nope_token = 2048,
                          .q_nope_head = 1024,
                          .q_pe_offset = 6144,
                          .q_pe_token = 256,
                          .q_pe_head = 128,
                          .out_offset = 8192,
                          .out_token = 2048,
                          .out_head = 1024,
                          .lse_offset = 10240,
                          .lse_token = 8,
                          .lse_head = 4};
    wire_out *o = begin(e, WIRE_DECODE, 16);

    wire_put_decode_req(o, &(wire_decode_req){3, 5, 1, 2, 1, 2, 1, 0});
    wire_put_decode_call(o, &c);
    wire_put_u32(o, 7); /* tokens: all of slot 0, three of slot 1 */
    wire_put_pad8(o);
    wire_put_u32(o, 0);
    wire_put_u32(o, 1);
}

static void ex_decode_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_DECODE, 16);

    wire_put_call_rep(o, &(wire_call_rep){1, 1});
    wire_put_call_result(o, &(wire_call_result){KVS_OK, 1, 1, 0});
}

static void ex_extend_req(example *e)
{
    wire_decode_call c = {.plane = 1,
                          .scratch = 7,
                          .sm_scale = 0.125F,
                          .after_counter = 3,
                          .after_value = 1,
                          .signal_counter = WIRE_NONE32,
                          .q_nope_offset = 4096,
                          .q_nope_token = 1024,
                          .q_nope_head = 1024,
                          .q_pe_offset = 7168,
                          .q_pe_token = 128,
                          .q_pe_head = 128,
                          .out_offset = 8192,
                          .out_token = 1024,
                          .out_head = 1024,
                          .lse_offset = 11264,
                          .lse_token = 4,
                          .lse_head = 4};
    wire_out *o = begin(e, WIRE_EXTEND, 17);

    wire_put_extend_req(o, &(wire_extend_req){3, 5, 2, 2, 3, 1, 1, 0});
    wire_put_decode_call(o, &c);
    wire_put_u32(o, 0); /* two queries of the first sequence, one of the second */
    wire_put_u32(o, 2);
    wire_put_u32(o, 3);
    wire_put_pad8(o);
    wire_put_u32(o, 7);
    wire_put_u32(o, 4);
    wire_put_u32(o, 0);
    wire_put_u32(o, 1);
    wire_put_u32(o, 2);
    wire_put_u32(o, 0);
}

static void ex_extend_rep(example *e)
{
    wire_out *o = answer_ok(e, WIRE_EXTEND, 17);

    wire_put_call_rep(o, &(wire_call_rep){1, 1});
    wire_put_call_result(o, &(wire_call_result){KVS_OK, 1, 3, 0});
}

static void keys_req(example *e, uint16_t op, uint64_t id, uint32_t n)
{
    wire_out *o = begin(e, op, id);

    wire_put_keys_req(o, &(wire_keys_req){3, n});
    put_keys(o, (int)n);
}

static void ex_pin_req(example *e)
{
    keys_req(e, WIRE_PIN, 18, 1);
}

static void ex_pin_rep(example *e)
{
    put_statuses(answer_ok(e, WIRE_PIN, 18), 1, (const uint32_t[]){KVS_OK});
}

static void ex_unpin_req(example *e)
{
    keys_req(e, WIRE_UNPIN, 19, 1);
}

static void ex_unpin_rep(example *e)
{
    put_statuses(answer_ok(e, WIRE_UNPIN, 19), 1, (const uint32_t[]){KVS_OK});
}

static void ex_drop_req(example *e)
{
    keys_req(e, WIRE_DROP, 20, 3);
}

static void ex_drop_rep(example *e)
{
    put_statuses(answer(e, WIRE_DROP, 20, KVS_E_PARTIAL, ""), 3,
                 (const uint32_t[]){KVS_E_BUSY, KVS_OK, KVS_E_NOT_FOUND});
}

static void ex_reset_req(example *e)
{
    wire_put_reset_req(begin(e, WIRE_RESET, 21), &(wire_reset_req){3, WIRE_RESET_PINNED});
}

static void ex_reset_rep(example *e)
{
    wire_put_reset_rep(answer_ok(e, WIRE_RESET, 21), &(wire_reset_rep){.dropped = 1});
}

static void ex_cancel_req(example *e)
{
    wire_put_cancel_req(begin(e, WIRE_CANCEL, 22), &(wire_cancel_req){16});
}

static void ex_cancel_rep(example *e)
{
    wire_put_cancel_rep(answer_ok(e, WIRE_CANCEL, 22), &(wire_cancel_rep){WIRE_CANCEL_STOPPED, 0});
}

static void ex_status_req(example *e)
{
    wire_put_status_req(begin(e, WIRE_STATUS, 23), &(wire_status_req){.ns = WIRE_NONE32});
}

static void ex_status_rep(example *e)
{
    static const char text[] = "{\"version\":\"0.1.0\"}";
    wire_out *o = answer_ok(e, WIRE_STATUS, 23);

    wire_put_status_rep(o, &(wire_status_rep){sizeof text - 1, 0});
    wire_put_bytes(o, text, sizeof text - 1);
    wire_put_pad8(o);
}

static void ex_health_req(example *e)
{
    begin(e, WIRE_HEALTH, 24);
}

static void ex_health_rep(example *e)
{
    wire_health_rep rep = {.state = WIRE_HEALTH_OK, .uptime_us = 61000000};

    memcpy(rep.boot_id, BOOT, sizeof BOOT);
    wire_put_health_rep(answer_ok(e, WIRE_HEALTH, 24), &rep);
}

static void ex_watch_req(example *e)
{
    wire_put_watch_req(begin(e, WIRE_WATCH, 25),
                       &(wire_watch_req){1 << WIRE_EVENT_STORED | 1 << WIRE_EVENT_REMOVED, 0});
}

static void ex_watch_rep(example *e)
{
    answer_ok(e, WIRE_WATCH, 25);
}

static void ex_event(example *e)
{
    wire_event_item item = {WIRE_EVENT_REMOVED, 3, 0, WIRE_CAUSE_EVICTED, {0}};
    wire_out *o = begin(e, WIRE_EVENT, 25);

    first_key(item.key);
    wire_put_event(o, &(wire_event){1, 0, 1, 0});
    wire_put_event_item(o, &item);
}

static void ex_reload_req(example *e)
{
    wire_put_reload_req(begin(e, WIRE_RELOAD, 27), &(wire_reload_req){WIRE_RELOAD_DRY_RUN, 0});
}

static void ex_reload_rep(example *e)
{
    static const char text[] = "{\"dry_run\":true}";
    wire_out *o = answer_ok(e, WIRE_RELOAD, 27);

    wire_put_status_rep(o, &(wire_status_rep){sizeof text - 1, 0});
    wire_put_bytes(o, text, sizeof text - 1);
    wire_put_pad8(o);
}

static void ex_drain_req(example *e)
{
    wire_put_drain_req(begin(e, WIRE_DRAIN, 28), &(wire_drain_req){1, 0});
}

static void ex_drain_rep(example *e)
{
    answer_ok(e, WIRE_DRAIN, 28);
}

static void ex_ping_req(example *e)
{
    wire_put_bytes(begin(e, WIRE_PING, 26), "hello", 5);
}

static void ex_ping_rep(example *e)
{
    wire_put_bytes(answer_ok(e, WIRE_PING, 26), "hello", 5);
}

/* ---- test vectors: bytes that are no frames ---- */

static wire_out *plain(example *e)
{
    e->o = (wire_out){.base = e->bytes, .cap = sizeof e->bytes};
    return &e->o;
}

static void ex_namespace(example *e)
{
    put_namespace(plain(e));
}

static void put_digest(example *e, const kvs_namespace *ns)
{
    uint8_t digest[32];

    cr_assert_eq(kvs_namespace_digest(ns, digest, NULL), KVS_OK);
    wire_put_bytes(plain(e), digest, 32);
}

static void ex_namespace_digest(example *e)
{
    kvs_plane planes[2];
    kvs_namespace ns = tiny(planes);

    put_digest(e, &ns);
}

static void ex_deepseek_digest(example *e)
{
    kvs_plane planes[61];
    kvs_namespace ns;

    cr_assert_eq(kvs_namespace_mla("deepseek-v3", "", KVS_FORMAT_mla_bf16, 61, 64, planes, &ns, NULL), KVS_OK);
    put_digest(e, &ns);
}

static void put_derived(example *e, const char *salt, const char *adapter)
{
    uint8_t key[32] = {0};

    derive(key, key, salt, adapter, 1);
    wire_put_bytes(plain(e), key, 32);
}

static void ex_key_first(example *e)
{
    put_derived(e, "", "");
}

static void ex_key_second(example *e)
{
    uint8_t key[32];

    first_key(key);
    derive(key, key, "", "", 5);
    wire_put_bytes(plain(e), key, 32);
}

static void ex_key_salt(example *e)
{
    put_derived(e, "X", "");
}

static void ex_key_adapter(example *e)
{
    put_derived(e, "", "X");
}

/* The formatter would indent each line of this list further than the one before. */
/* clang-format off */
#define EXAMPLES(X)                                                                                          \
    X(refusal)                                                                                               \
    X(hello_req) X(hello_rep) X(open_req) X(open_rep) X(region_create_req) X(region_create_rep)              \
        X(region_attach_req) X(region_attach_rep) X(region_reoffer_req) X(region_reoffer_rep)                \
            X(region_import_req) X(region_import_rep) X(region_close_req) X(region_close_rep) X(lookup_req)  \
                X(lookup_rep) X(reserve_req) X(reserve_rep) X(release_req) X(release_rep) X(load_req)        \
                    X(load_rep) X(store_req) X(store_rep) X(slot_take_req) X(slot_take_rep) X(slot_drop_req) \
                        X(slot_drop_rep) X(write_req) X(write_rep) X(decode_req) X(decode_rep) X(extend_req) \
                            X(extend_rep) X(pin_req) X(pin_rep) X(unpin_req) X(unpin_rep) X(drop_req)        \
                                X(drop_rep) X(reset_req) X(reset_rep) X(cancel_req) X(cancel_rep)            \
                                    X(status_req) X(status_rep) X(health_req) X(health_rep) X(watch_req)     \
                                        X(watch_rep) X(event) X(ping_req) X(ping_rep) X(reload_req) X(reload_rep) X(drain_req) X(drain_rep) X(namespace)           \
                                            X(namespace_digest) X(deepseek_digest) X(key_first)              \
                                                X(key_second) X(key_salt) X(key_adapter)
/* clang-format on */

static const struct {
    const char *name;
    void (*make)(example *e);
} EXAMPLE[] = {
#define X(name) {#name, ex_##name},
    EXAMPLES(X)
#undef X
};
enum { N_EXAMPLES = sizeof EXAMPLE / sizeof *EXAMPLE };

static size_t example_bytes(size_t i, example *e)
{
    memset(e, 0, sizeof *e);
    EXAMPLE[i].make(e);
    cr_assert_not(e->o.full, "%s is too long", EXAMPLE[i].name);
    if (!e->is_frame)
        return e->o.len;
    e->head.body_len = (uint32_t)e->o.len;
    wire_header_encode(&e->head, e->bytes);
    return WIRE_HEADER_BYTES + e->o.len;
}

/* ---- the page ---- */

typedef struct text {
    char *base;
    size_t len;
} text;

__attribute__((format(printf, 2, 3))) static void add(text *t, const char *fmt, ...)
{
    va_list ap;
    int n;

    va_start(ap, fmt);
    n = vsnprintf(t->base + t->len, PAGE_MAX - t->len, fmt, ap);
    va_end(ap);
    cr_assert(n >= 0 && (size_t)n < PAGE_MAX - t->len, "the page has outgrown PAGE_MAX");
    t->len += (size_t)n;
}

static char *page(void)
{
    FILE *f = fopen(PAGE, "r");
    char *p = calloc(1, PAGE_MAX);
    size_t n;

    cr_assert_not_null(f, PAGE " cannot be read: run the test at the top of the tree");
    cr_assert_not_null(p);
    n = fread(p, 1, PAGE_MAX - 1, f);
    cr_assert(n > 0 && n < PAGE_MAX - 1);
    fclose(f);
    return p;
}

static void add_dump(text *t, size_t i)
{
    static example e;
    size_t n = example_bytes(i, &e);

    for (size_t at = 0; at < n; at += 16) {
        add(t, "%04zx ", at);
        for (size_t k = at; k < n && k < at + 16; k++)
            add(t, "%s%02x", k == at + 8 ? "  " : " ", e.bytes[k]);
        add(t, "\n");
    }
}

/* The page with every dump as the codec writes it.  seen[i]: how often example i is there. */
static text regenerate(const char *from, unsigned seen[N_EXAMPLES])
{
    text t = {calloc(1, PAGE_MAX), 0};

    cr_assert_not_null(t.base);
    while (*from != 0) {
        size_t len = strcspn(from, "\n");
        char name[64] = "";

        add(&t, "%.*s\n", (int)len, from);
        if (sscanf(from, "```hex %63[a-z0-9_]", name) == 1) {
            const char *end = strstr(from + len, "\n```");
            size_t i = 0;

            while (i < N_EXAMPLES && strcmp(EXAMPLE[i].name, name) != 0)
                i++;
            cr_assert(i < N_EXAMPLES, "%s: no such example", name);
            cr_assert_not_null(end);
            seen[i]++;
            add_dump(&t, i);
            add(&t, "```\n");
            from = end + 1;
            len = strcspn(from, "\n");
        }
        from += len;
        from += *from == '\n';
    }
    return t;
}

Test(protocol, dumps_are_what_the_codec_writes)
{
    unsigned seen[N_EXAMPLES] = {0};
    char *old = page();
    text new = regenerate(old, seen);

    if (getenv("KVS_REWRITE") != NULL) {
        FILE *f = fopen(PAGE, "w");

        cr_assert_not_null(f);
        cr_assert_eq(fwrite(new.base, 1, new.len, f), new.len);
        cr_assert_eq(fclose(f), 0);
        free(old);
        old = page();
    }
    for (size_t at = 0, line = 1; at <= new.len; at++) {
        cr_assert_eq(old[at], new.base[at], PAGE ":%zu: the dump differs; KVS_REWRITE=1 writes it anew", line);
        line += new.base[at] == '\n';
    }
    for (size_t i = 0; i < N_EXAMPLES; i++)
        cr_assert_eq(seen[i], 1, "%s is %u times in the page", EXAMPLE[i].name, seen[i]);
    free(old);
    free(new.base);
}

/* ---- field tables: offset, size, type and name as in proto/wire.h, and something in the other columns ----
 */

static const char *expect_row(const char *row, const char *body, unsigned at, unsigned size, const char *type,
                              const char *name)
{
    char want[160];
    size_t len = strcspn(row, "\n"), bars = 0;

    (void)snprintf(want, sizeof want, "| %u | %u | %s | `%s` | ", at, size, type, name);
    cr_assert_eq(strncmp(row, want, strlen(want)), 0, "%s: want \"%s\", found \"%.*s\"", body, want, (int)len, row);
    for (size_t i = 0; i < len; i++)
        bars += row[i] == '|';
    cr_assert_eq(bars, 8, "%s.%s: %zu columns, not 7", body, name, bars - 1);
    cr_assert_null(memmem(row, len, "|  |", 4), "%s.%s: an empty column", body, name);
    return row + len + 1;
}

static const char *expect_table(const char *p, const char *body, unsigned bytes)
{
    char title[80];
    const char *row;

    (void)snprintf(title, sizeof title, "\n**`%s`**, %u bytes:\n\n| offset |", body, bytes);
    row = strstr(p, title);
    cr_assert_not_null(row, "no table of %s with %u bytes", body, bytes);
    row = strchr(row + strlen(title), '\n') + 1; /* behind the column names */
    return strchr(row, '\n') + 1;                /* behind the rule below them */
}

#define EXPECT_FIELD(type, name)                                                                                       \
    row = expect_row(row, table, at, WIRE_SIZE_##type, #type, #name);                                                  \
    at += WIRE_SIZE_##type;
#define EXPECT_BODY(body)                                                                                              \
    static void expect_##body(const char *p)                                                                           \
    {                                                                                                                  \
        const char *table = #body, *row = expect_table(p, table, WIRE_##body##_BYTES);                                 \
        unsigned at = 0;                                                                                               \
                                                                                                                       \
        WIRE_##body(EXPECT_FIELD) cr_assert_neq(*row, '|', "%s has a row too many", table);                            \
        cr_assert_eq(at, WIRE_##body##_BYTES);                                                                         \
    }
WIRE_BODY_MAP(EXPECT_BODY)

Test(protocol, field_tables_are_those_of_the_code)
{
    char *p = page();

#define X(body) expect_##body(p);
    WIRE_BODY_MAP(X)
#undef X
    free(p);
}

Test(protocol, header_table_is_that_of_the_code)
{
#define WIRE_header(F)                                                                                                 \
    F(u32, magic)                                                                                                      \
    F(u16, op) F(u16, status) F(u64, id) F(u32, body_len) F(u16, n_fds) F(u16, reserved) F(u64, deadline_us)
    char *p = page();
    const char *table = "header", *row = expect_table(p, table, WIRE_HEADER_BYTES);
    unsigned at = 0;

    WIRE_header(EXPECT_FIELD);
    cr_assert_eq(at, WIRE_HEADER_BYTES);
    cr_assert_neq(*row, '|');
    free(p);
}

static void expect_text(const char *p, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void expect_text(const char *p, const char *fmt, ...)
{
    char want[200];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(want, sizeof want, fmt, ap);
    va_end(ap);
    cr_assert_not_null(strstr(p, want), "the page lacks \"%s\"", want);
}

Test(protocol, operations_statuses_and_formats_are_those_of_the_code)
{
    char *p = page();

#define X(name, value) expect_text(p, "\n| %d | `%s` | ", value, #name);
    WIRE_OP_MAP(X)
#undef X
#define X(name, value, meaning) expect_text(p, "\n| %d | `%s` | %s |\n", value, #name, meaning);
    KVS_STATUS_MAP(X)
#undef X
#define X(name, id, row)                                                                                               \
    if ((row) != 0)                                                                                                    \
        expect_text(p, "\n| %d | `%s` | %d | ", id, #name, row);                                                       \
    else                                                                                                               \
        expect_text(p, "\n| %d | `%s` | yours | ", id, #name);
    KVS_FORMAT_MAP(X)
#undef X
#define X(name, number, order)                                                                                         \
    expect_text(p, "\n| %d | `%s` | %s first | ", number, #name,                                                       \
                KVS_ORDER_##order == KVS_ORDER_BLOCKS_FIRST ? "blocks" : "layers");
    KVS_BACKEND_MAP(X)
#undef X
    free(p);
}

Test(protocol, limits_are_those_of_the_code)
{
    char *p = page();

    expect_text(p, "\n| header | %d bytes |\n", WIRE_HEADER_BYTES);
    expect_text(p, "\n| descriptors of one frame | %d |\n", WIRE_MAX_FDS);
    expect_text(p, "\n| client name | %d bytes |\n", WIRE_MAX_NAME);
    expect_text(p, "\n| message of a reply | %d bytes |\n", KVS_ERR_MSG_BYTES - 1);
    expect_text(p, "\n| counters | %d in each half; values below 2^62 |\n", WIRE_COUNTERS);
    expect_text(p, "\n| tokens of a block | %d |\n", KVS_MAX_TOKENS_PER_BLOCK);
    expect_text(p, "\n| planes of a block | %d |\n", KVS_MAX_PLANES);
    expect_text(p, "\n| model and weights tag | %d bytes each |\n", KVS_TAG_BYTES - 1);
    expect_text(p, "\n| plane name | %d bytes |\n", KVS_PLANE_NAME_BYTES - 1);
    free(p);
}

/* The enums that the field tables spell out. */
Test(protocol, enums_have_the_numbers_that_the_page_gives)
{
    cr_assert_eq(WIRE_REGION_SLOTS * 10 + WIRE_REGION_SCRATCH, 1);
    cr_assert_eq(WIRE_MEMORY_MEMFD * 100 + WIRE_MEMORY_CUDA_IPC * 10 + WIRE_MEMORY_CUDA_VMM, 12);
    cr_assert_eq(WIRE_ATTACH_TOKEN * 10 + WIRE_ATTACH_REOFFER, 1);
    cr_assert_eq(WIRE_ENTRY_SHARED, 1);
    cr_assert_eq(WIRE_KEY_ABSENT * 100 + WIRE_KEY_WRITING * 10 + WIRE_KEY_READY, 12);
    cr_assert_eq(WIRE_LOAD_BY_LEASE, 1);
    cr_assert_eq(WIRE_LOADED_SHARED * 10 + WIRE_LOADED_NO_COPY, 12);
    cr_assert_eq(WIRE_STORE_KEEP, 1);
    cr_assert_eq(WIRE_DECODE_FIXED_SPLIT, 1);
    cr_assert_eq(WIRE_RESET_PINNED, 1);
    cr_assert_eq(WIRE_CANCEL_GONE * 100 + WIRE_CANCEL_STOPPED * 10 + WIRE_CANCEL_FINISHED, 12);
    cr_assert_eq(WIRE_SECTION_CLIENTS * 100 + WIRE_SECTION_LEASES * 10 + WIRE_SECTION_KEYS, 123);
    cr_assert_eq(WIRE_SECTION_SUMMARY * 100 + WIRE_SECTION_NAMESPACES * 10 + WIRE_SECTION_FSCK, 45);
    cr_assert_eq(WIRE_SECTION_METRICS, 7);
    cr_assert_eq(WIRE_HEALTH_OK * 1000 + WIRE_HEALTH_STARTING * 100 + WIRE_HEALTH_DEGRADED * 10 + WIRE_HEALTH_DRAINING,
                 123);
    cr_assert_eq(WIRE_EVENT_STORED * 100 + WIRE_EVENT_REMOVED * 10 + WIRE_EVENT_RESET, 12);
    cr_assert_eq(WIRE_CAUSE_NONE * 1000 + WIRE_CAUSE_EVICTED * 100 + WIRE_CAUSE_DROPPED * 10 + WIRE_CAUSE_REBOUND, 123);
    cr_assert_eq(WIRE_COUNTER_DAEMON, 0x80000000U);
    cr_assert_eq(WIRE_COUNTER_PAGE_BYTES, 2 * WIRE_COUNTER_HALF_BYTES);
    cr_assert_eq(WIRE_COUNTER_HALF_BYTES, 16 * WIRE_COUNTERS);
    cr_assert_eq(KVS_SHARD_REPLICATED * 100 + KVS_SHARD_HEADS * 10 + KVS_SHARD_LAYERS, 12);
}
