#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/core.h"

/* Admission, replies, and the ops that move no blocks. */

Test(request, nothing_but_hello_is_answered_before_hello)
{
    fx f;
    fx_client c;
    fx_answer a;

    fx_config(&f);
    fx_open(&f);
    fx_connect(&c, &f, false);
    for (int i = 0; i < 3; i++) {
        a = fx_call(&c, i == 0 ? WIRE_PING : i == 1 ? 999 : 0, fx_new());
        cr_assert_eq(a.status, KVS_E_STATE);
        cr_assert(strstr(a.msg, "before HELLO"));
        cr_assert(!peer_said_hello(c.peer));
        fx_done(&a);
    }
    fx_gone(&c);
    fx_close(&f);
}

static fx_body *hello_body(uint16_t min, uint16_t max, uint32_t name_len)
{
    fx_body *b = fx_new();

    wire_put_hello_req(&b->out, &(wire_hello_req){.version_min = min, .version_max = max, .name_len = name_len});
    for (uint32_t i = 0; i < name_len; i++)
        wire_put_u8(&b->out, 'x');
    wire_put_pad8(&b->out);
    return b;
}

Test(request, hello_grants_once_and_refuses_other_versions_and_long_names)
{
    fx f;
    fx_client c;

    fx_config(&f);
    fx_open(&f);
    fx_connect(&c, &f, false);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(2, 9, 0)), KVS_E_VERSION);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(0, 1, 0)), KVS_E_INVALID);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(2, 1, 0)), KVS_E_INVALID);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(1, 1, 65)), KVS_E_LIMIT);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(1, 3, 64)), KVS_OK);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(1, 1, 0)), KVS_E_STATE);
    fx_gone(&c);
    fx_close(&f);
}

/* Symptom: a client named itself with a newline, and the lists of an operator had a line too many. */
Test(request, a_name_that_is_no_text_is_refused)
{
    static const char *const bad[] = {"a\nb",
                                      "\x7f",
                                      "\xc2\x9b"
                                      "0m",
                                      "\xc3",
                                      "\xc0\xaf",
                                      "\xed\xa0\x80",
                                      "\xff"};
    fx f;
    fx_client c;
    wire_hello_req q = {.version_min = 1, .version_max = 1};

    fx_config(&f);
    fx_open(&f);
    fx_connect(&c, &f, false);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        fx_body *b = fx_new();

        q.name_len = (uint32_t)strlen(bad[i]);
        wire_put_hello_req(&b->out, &q);
        wire_put_bytes(&b->out, bad[i], q.name_len);
        wire_put_pad8(&b->out);
        cr_assert_eq(fx_status(&c, WIRE_HELLO, b), KVS_E_INVALID, "case %d", (int)i);
    }
    fx_gone(&c);
    fx_close(&f);
}

Test(request, the_counter_page_is_sealed_and_zero)
{
    fx f;
    fx_client c;
    fx_answer a;
    uint8_t page[WIRE_COUNTER_PAGE_BYTES], zero[WIRE_COUNTER_PAGE_BYTES] = {0};

    fx_config(&f);
    fx_open(&f);
    fx_connect(&c, &f, false);
    a = fx_call(&c, WIRE_HELLO, hello_body(1, 1, 0));
    cr_assert_eq(a.reply->n_fds, 1);
    cr_assert_eq(fcntl(a.reply->fds[0], F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    cr_assert_eq(pread(a.reply->fds[0], page, sizeof(page), 0), (ssize_t)sizeof(page));
    cr_assert_eq(memcmp(page, zero, sizeof(page)), 0);
    fx_done(&a);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, unknown_ops_are_unsupported)
{
    fx f;
    fx_client c;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    cr_assert_eq(fx_status(&c, 999, fx_new()), KVS_E_UNSUPPORTED);
    cr_assert_eq(fx_status(&c, 0, fx_new()), KVS_E_UNSUPPORTED);
    cr_assert_eq(fx_status(&c, WIRE_EVENT, fx_new()), KVS_E_UNSUPPORTED);
    cr_assert_eq(fx_status(&c, WIRE_EXTEND, fx_new()), KVS_E_PROTO, "a body without its head");
    fx_gone(&c);
    fx_close(&f);
}

/* Symptom: descriptors that nobody claimed were queued until the connection closed. */
Test(request, descriptors_with_an_op_that_takes_none_are_closed)
{
    fx f;
    fx_client c;
    int before;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    before = fx_count_fds();
    for (int i = 0; i < 1000; i++) {
        int fd = memfd_create("x", MFD_CLOEXEC);
        uint64_t id = c.next_id++;
        fx_answer a;

        cr_assert_eq(fx_send_frame(&c, WIRE_PING, id, 0, fx_new(), &fd, 1), KVS_OK);
        a = fx_wait(&c, id);
        cr_assert_eq(a.status, KVS_E_PROTO);
        fx_done(&a);
    }
    cr_assert_eq(fx_count_fds(), before);
    fx_gone(&c);
    fx_close(&f);
}

/* Every op with bodies that are cut off, too long or absurd: one refusal each, never more. */
Test(request, a_body_that_does_not_add_up_is_refused_and_the_connection_lives)
{
    fx f;
    fx_client c;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    for (uint16_t op = WIRE_OPEN; op <= WIRE_PING; op++) {
        for (uint32_t len = 1; len < 256; len += 7) {
            fx_body *b = fx_new();
            fx_answer a;

            for (uint32_t i = 0; i < len; i++)
                wire_put_u8(&b->out, 0xff);
            a = fx_call(&c, op, b);
            cr_assert(a.status != KVS_OK || (op == WIRE_PING && len <= 64) || (op == WIRE_CANCEL && len == 8),
                      "%s of %u bytes", wire_op_name(op), len);
            cr_assert(a.status == KVS_OK || a.msg[0] != 0, "a refusal says why");
            fx_done(&a);
        }
    }
    cr_assert_eq(c.first, NULL, "one reply each");
    cr_assert_eq(fx_status(&c, WIRE_PING, fx_new()), KVS_OK);
    fx_gone(&c);
    fx_close(&f);
}

/* Symptom: count times size wrapped 32 bits, and the product passed the check. */
/* Symptom: it was told that an array or its padding does not fit. */
Test(request, padding_that_is_not_zero_is_called_so)
{
    wire_hello_req q = {.version_min = 1, .version_max = 1, .name_len = 3};
    fx f;
    fx_client c;
    fx_answer a;
    fx_body *b = fx_new();

    fx_config(&f);
    fx_open(&f);
    fx_connect(&c, &f, false);
    wire_put_hello_req(&b->out, &q);
    wire_put_bytes(&b->out, "abc\0\0\0\0x", 8);
    a = fx_call(&c, WIRE_HELLO, b);
    cr_assert_eq(a.status, KVS_E_PROTO);
    cr_assert_str_eq(a.msg, "body: the padding that ends at byte 32 is not zero");
    fx_done(&a);
    b = fx_new();
    wire_put_hello_req(&b->out, &q);
    wire_put_bytes(&b->out, "abc", 3);
    a = fx_call(&c, WIRE_HELLO, b);
    cr_assert_eq(a.status, KVS_E_PROTO);
    cr_assert_str_eq(a.msg, "body: an array or its padding does not fit the 27 bytes sent");
    fx_done(&a);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, counts_that_wrap_are_malformed)
{
    fx f;
    fx_client c;
    fx_body *b;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    b = fx_new();
    wire_put_lookup_req(&b->out, &(wire_lookup_req){0, 0x08000001});
    for (int i = 0; i < 4; i++)
        wire_put_u64(&b->out, 1);
    cr_assert_eq(fx_status(&c, WIRE_LOOKUP, b), KVS_E_PROTO);
    b = fx_new();
    wire_put_decode_req(&b->out,
                        &(wire_decode_req){.n_seqs = 0x80000000, .table_width = 0x80000000, .s_q = 1, .h_q = 1});
    cr_assert_eq(fx_status(&c, WIRE_DECODE, b), KVS_E_PROTO);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, an_id_in_flight_is_refused_and_its_first_owner_answered)
{
    fx f;
    fx_client c;
    fx_region g;
    wire_slot_ref slot;
    fx_move m;
    uint64_t id;
    fx_answer a;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    m = (fx_move){.ns = fx_ns(&c, "m"), .n = 1, .first = 1, .slots = &slot, .after_counter = 1, .after_value = 1};
    g = fx_slots(&c, m.ns, 2);
    m.region = g.id;
    fx_take(&c, &g, 1, &slot);
    id = fx_send(&c, WIRE_STORE, fx_store_body(&m));
    cr_assert_eq(fx_send_frame(&c, WIRE_PING, id, 0, fx_new(), NULL, 0), KVS_OK);
    a = fx_wait(&c, id);
    cr_assert_eq(a.head.op, WIRE_PING);
    cr_assert_eq(a.status, KVS_E_INVALID);
    fx_done(&a);
    fx_raise(&c, 0, 1);
    a = fx_wait(&c, id);
    cr_assert_eq(a.head.op, WIRE_STORE);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    fx_unmap(&g);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, credit_is_counted_and_control_requests_have_their_own)
{
    fx f;
    fx_client c;
    fx_region g;
    wire_slot_ref slot[3];
    fx_move m;
    uint64_t id[2];
    fx_answer a;

    fx_config(&f);
    f.cfg.credit_requests = 2;
    fx_open(&f);
    fx_client_open(&c, &f);
    m = (fx_move){.ns = fx_ns(&c, "m"), .n = 1, .after_counter = 1, .after_value = 1};
    g = fx_slots(&c, m.ns, 4);
    m.region = g.id;
    fx_take(&c, &g, 3, slot);
    for (int i = 0; i < 2; i++) {
        m.first = i + 1;
        m.slots = &slot[i];
        id[i] = fx_send(&c, WIRE_STORE, fx_store_body(&m));
    }
    m.first = 3;
    m.slots = &slot[2];
    m.signal_counter = 1;
    m.signal_value = 9;
    a = fx_call(&c, WIRE_STORE, fx_store_body(&m));
    cr_assert_eq(a.status, KVS_E_BUSY);
    fx_done(&a);
    cr_assert_eq(fx_counter(&c, 0), 9, "refused, but signalled");
    cr_assert_eq(fx_counter_error(&c, 0), KVS_E_BUSY);
    cr_assert_eq(fx_status(&c, WIRE_PING, fx_new()), KVS_OK);
    cr_assert_eq(fx_status(&c, WIRE_HEALTH, fx_new()), KVS_OK);
    fx_raise(&c, 0, 1);
    for (int i = 0; i < 2; i++) {
        a = fx_wait(&c, id[i]);
        cr_assert_eq(a.status, KVS_OK);
        fx_done(&a);
    }
    cr_assert_eq(fx_store(&c, &m, NULL), KVS_OK);
    fx_unmap(&g);
    fx_gone(&c);
    fx_close(&f);
}

/* Symptom: clients with as many requests in flight as their credit allows held memory without a bound for all of them, until the
 * kernel ended the daemon. */
Test(request, who_holds_more_than_an_equal_part_is_refused_more)
{
    enum { MOST = 60 };
    fx f;
    fx_client greedy, modest;
    fx_region g[2];
    wire_slot_ref slot[MOST + 1], other;
    fx_move m, n;
    uint64_t id[MOST], one, each = 0;
    int in_flight = 0;
    fx_answer a;

    fx_config(&f);
    f.cfg.memory_bytes = 40000;
    fx_open(&f);
    fx_client_open(&greedy, &f);
    fx_client_open(&modest, &f);
    m = (fx_move){.ns = fx_ns(&greedy, "m"), .n = 1, .after_counter = 1, .after_value = 1};
    n = (fx_move){.ns = fx_ns(&modest, "m"), .n = 1, .first = 1000, .after_counter = 1, .after_value = 1};
    g[0] = fx_slots(&greedy, m.ns, MOST + 1);
    g[1] = fx_slots(&modest, n.ns, 1);
    m.region = g[0].id;
    n.region = g[1].id;
    fx_take(&greedy, &g[0], MOST + 1, slot);
    fx_take(&modest, &g[1], 1, &other);
    n.slots = &other;
    while (f.core->request_bytes + each <= 40000) {
        cr_assert_lt(in_flight, MOST, "%llu bytes", (unsigned long long)f.core->request_bytes);
        m.first = (uint64_t)in_flight + 1;
        m.slots = &slot[in_flight];
        id[in_flight++] = fx_send(&greedy, WIRE_STORE, fx_store_body(&m));
        each = f.core->request_bytes / (uint64_t)in_flight;
    }
    m.first = MOST + 1;
    m.slots = &slot[in_flight];
    a = fx_call(&greedy, WIRE_STORE, fx_store_body(&m));
    cr_assert_eq(a.status, KVS_E_BUSY);
    cr_assert_not_null(strstr(a.msg, "limits.memory_bytes: requests in flight hold "), "%s", a.msg);
    fx_done(&a);
    cr_assert_eq(fx_status(&greedy, WIRE_HEALTH, fx_new()), KVS_OK);
    one = fx_send(&modest, WIRE_STORE, fx_store_body(&n)); /* it is none of the others' fault */
    fx_raise(&modest, 0, 1);
    a = fx_wait(&modest, one);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    fx_raise(&greedy, 0, 1);
    for (int i = 0; i < in_flight; i++) {
        a = fx_wait(&greedy, id[i]);
        cr_assert_eq(a.status, KVS_OK);
        fx_done(&a);
    }
    cr_assert_eq(f.core->request_bytes, 0, "%llu bytes", (unsigned long long)f.core->request_bytes);
    cr_assert_eq(fx_store(&greedy, &m, NULL), KVS_OK);
    fx_unmap(&g[0]);
    fx_unmap(&g[1]);
    fx_gone(&greedy);
    fx_gone(&modest);
    fx_close(&f);
}

/* A LOAD of KEYS, of which one is there, that waits for `value`. */
static uint64_t send_large_load(fx_client *c, const fx_region *g, uint32_t ns, uint64_t value)
{
    enum { KEYS = 100 };

    return fx_send(c, WIRE_LOAD,
                   fx_load_body(&(fx_move){
                       .ns = ns, .region = g->id, .n = KEYS, .first = 1, .after_counter = 1, .after_value = value}));
}

/* Symptom: 200 clients with one LOAD of 20,000 keys each in flight, under limits.memory_bytes of 16 MiB: 560 MB.  The limit was
 * looked at before a request had taken any memory, and never again. */
Test(request, a_large_request_of_each_client_is_within_the_memory_too)
{
    enum { N = 12, MOST = 60000 };
    fx f;
    fx_client c[N];
    fx_region g[N];
    fx_move m = {.n = 1, .first = 1};
    wire_slot_ref slot;
    uint32_t n_busy = 0;

    fx_config(&f);
    f.cfg.memory_bytes = MOST;
    fx_open(&f);
    for (int i = 0; i < N; i++) {
        fx_client_open(&c[i], &f);
        m.ns = fx_ns(&c[i], "m");
        g[i] = fx_slots(&c[i], m.ns, 2);
    }
    fx_take(&c[0], &g[0], 1, &slot);
    m.region = g[0].id;
    m.slots = &slot;
    cr_assert_eq(fx_store(&c[0], &m, NULL), KVS_OK);
    for (int i = 0; i < N; i++) {
        uint64_t id = send_large_load(&c[i], &g[i], m.ns, 1);
        fx_answer a;

        cr_assert_leq(f.core->request_bytes, MOST, "%llu bytes", (unsigned long long)f.core->request_bytes);
        if (!fx_has_reply(&c[i], id))
            continue;
        a = fx_wait(&c[i], id);
        cr_assert_eq(a.status, KVS_E_BUSY, "%s", a.msg);
        cr_assert_not_null(strstr(a.msg, "limits.memory_bytes: requests in flight hold "), "%s", a.msg);
        fx_done(&a);
        n_busy++;
    }
    cr_assert_gt(n_busy, 0);
    cr_assert_lt(n_busy, N);
    for (int i = 0; i < N; i++) {
        fx_unmap(&g[i]);
        fx_gone(&c[i]);
    }
    cr_assert_eq(f.core->request_bytes, 0, "%llu bytes", (unsigned long long)f.core->request_bytes);
    fx_close(&f);
}

Test(request, one_that_could_never_have_its_memory_is_told_so)
{
    fx f;
    fx_client c;
    fx_region g;
    uint32_t ns;
    fx_answer a;

    fx_config(&f);
    f.cfg.memory_bytes = 10000;
    fx_open(&f);
    fx_client_open(&c, &f);
    ns = fx_ns(&c, "m");
    g = fx_slots(&c, ns, 2);
    a = fx_wait(&c, send_large_load(&c, &g, ns, 1));
    cr_assert_eq(a.status, KVS_E_LIMIT, "%s", a.msg);
    cr_assert_not_null(strstr(a.msg, "limits.memory_bytes: the request takes "), "%s", a.msg);
    fx_done(&a);
    a = fx_call(&c, WIRE_LOOKUP, fx_keys_body(ns, 1, 12000)); /* its memory is the reply's */
    cr_assert_eq(a.status, KVS_E_LIMIT, "%s", a.msg);
    fx_done(&a);
    cr_assert_eq(f.core->request_bytes, 0);
    cr_assert_eq(fx_lookup(&c, ns, 1, 8000), 0);
    fx_unmap(&g);
    fx_gone(&c);
    fx_close(&f);
}

/* What its end needs must not fail: the limit is for those that begin. */
Test(request, the_memory_limit_is_for_requests_that_begin)
{
    fx f;
    fx_client c;
    frame begins = {0};
    request r = {.row = op_find(WIRE_LOAD), .frame = &begins};

    fx_config(&f);
    f.cfg.memory_bytes = 10000;
    fx_open(&f);
    fx_client_open(&c, &f);
    r.peer = c.peer;
    cr_assert_null(request_alloc(&r, 2500, 4));
    cr_assert_eq(r.lacked_bytes, 10000 + sizeof(request_chunk));
    cr_assert_eq(f.core->request_bytes, 0);
    r.frame = NULL;
    cr_assert_not_null(request_alloc(&r, 2500, 4));
    cr_assert_eq(f.core->request_bytes, r.held_bytes);
    f.core->request_bytes -= r.held_bytes;
    free(r.chunks);
    fx_gone(&c);
    fx_close(&f);
}

/* Symptom: refusals that nobody read kept the room that their answers would have needed. */
Test(request, a_refusal_keeps_no_room_for_what_it_does_not_say)
{
    enum { KEYS = 5000 };
    static wire_slot_ref nowhere[KEYS];
    fx f;
    fx_client c;
    fx_region g;
    fx_move m = {.n = KEYS, .slots = nowhere};
    fx_answer a;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    m.ns = fx_ns(&c, "m");
    g = fx_slots(&c, m.ns, 2);
    m.region = g.id;
    a = fx_call(&c, WIRE_STORE, fx_store_body(&m));
    cr_assert_neq(a.status, KVS_OK);
    cr_assert_lt(a.reply->len, 400);
    cr_assert_leq(a.reply->held, 2 * (sizeof(reply) + a.reply->len) + REPLY_SLACK_BYTES);
    fx_done(&a);
    a = fx_call(&c, WIRE_LOOKUP, fx_keys_body(m.ns, 1, KEYS)); /* what is said is there */
    cr_assert_eq(a.status, KVS_OK);
    cr_assert_geq(a.reply->held, sizeof(reply) + a.reply->len);
    fx_done(&a);
    fx_unmap(&g);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, places_are_counted_for_clients_and_admins_apart)
{
    fx f;
    fx_client c[2], admin[8];
    peer *extra = NULL;
    peer_info info = {0};
    peer_ops none = {0};
    kvs_err err;

    fx_config(&f);
    f.cfg.max_clients = 2;
    fx_open(&f);
    for (int i = 0; i < 2; i++)
        fx_client_open(&c[i], &f);
    cr_assert_eq(peer_create(&extra, f.core, &none, NULL, &info, 0, &err), KVS_E_LIMIT);
    for (int i = 0; i < 8; i++)
        fx_admin_open(&admin[i], &f);
    info.is_admin = true;
    cr_assert_eq(peer_create(&extra, f.core, &none, NULL, &info, 0, &err), KVS_E_LIMIT);
    fx_gone(&c[0]);
    fx_client_open(&c[0], &f);
    for (int i = 0; i < 2; i++)
        fx_gone(&c[i]);
    for (int i = 0; i < 8; i++)
        fx_gone(&admin[i]);
    fx_close(&f);
}

Test(request, the_admin_socket_moves_no_blocks_and_clients_see_the_summary_only)
{
    fx f;
    fx_client c, admin;
    fx_answer a;
    fx_body *b;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    fx_admin_open(&admin, &f);
    cr_assert_eq(fx_status(&admin, WIRE_LOAD, fx_load_body(&(fx_move){0})), KVS_E_DENIED);
    a = fx_call(&admin, WIRE_OPEN, fx_new());
    cr_assert_eq(a.status, KVS_E_DENIED);
    cr_assert_str_eq(a.msg,
                     "op: this is the admin socket; OPEN is for engines, by socket.path or the path of a tenant");
    fx_done(&a);
    b = fx_new();
    wire_put_status_req(&b->out, &(wire_status_req){.section = WIRE_SECTION_METRICS, .ns = WIRE_NONE32});
    a = fx_call(&c, WIRE_STATUS, b);
    cr_assert_str_eq(a.msg, "section: metrics is for the admin socket; this is that of tenant default");
    fx_done(&a);
    a = fx_call(&c, WIRE_RELOAD, fx_new());
    cr_assert_str_eq(a.msg, "op: RELOAD is for the admin socket; this is that of tenant default");
    fx_done(&a);
    for (uint32_t section = 0; section <= WIRE_SECTION_METRICS + 1; section++) {
        b = fx_new();
        wire_put_status_req(&b->out, &(wire_status_req){.section = section, .ns = WIRE_NONE32});
        cr_assert_eq(fx_status(&c, WIRE_STATUS, b), section == 0                      ? KVS_OK
                                                    : section <= WIRE_SECTION_METRICS ? KVS_E_DENIED
                                                                                      : KVS_E_INVALID);
    }
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_CLIENTS, "clients"), 2);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_NAMESPACES, "namespaces"), 0);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_KEYS, "keys"), 0);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_gone(&c);
    fx_gone(&admin);
    fx_close(&f);
}

/* Symptom: ratios at zero traffic were "nan", which is not JSON. */
Test(request, status_right_after_the_start_is_json_with_null_for_no_ratio)
{
    fx f;
    fx_client admin;

    fx_config(&f);
    fx_open_starting(&f);
    fx_admin_open(&admin, &f);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "directory.hit_rate"), -1);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "directory.hits"), 0);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "pool.max_bytes"), 1 << 20);
    fx_gone(&admin);
    fx_close(&f);
}

static wire_health_rep health(fx_client *c)
{
    fx_answer a = fx_call(c, WIRE_HEALTH, fx_new());
    wire_health_rep h;

    cr_assert_eq(a.status, KVS_OK);
    wire_get_health_rep(&a.in, &h);
    fx_done(&a);
    return h;
}

Test(request, health_goes_from_starting_to_ok_to_draining)
{
    fx f;
    fx_client c;

    fx_config(&f);
    fx_open_starting(&f);
    fx_connect(&c, &f, false);
    cr_assert_eq(fx_status(&c, WIRE_HELLO, hello_body(1, 1, 0)), KVS_OK);
    cr_assert_eq(health(&c).state, WIRE_HEALTH_STARTING);
    cr_assert_eq(health(&c).reasons, HEALTH_NO_PIECE);
    while (!core_is_ready(f.core))
        fx_run(&f, 1);
    cr_assert_eq(health(&c).state, WIRE_HEALTH_OK);
    fx_advance(&f, 5000);
    cr_assert_eq(health(&c).uptime_us, 5000);
    core_drain(f.core);
    cr_assert_eq(health(&c).state, WIRE_HEALTH_DRAINING);
    cr_assert_eq(fx_status(&c, WIRE_PING, fx_new()), KVS_E_STATE);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, a_piece_that_cannot_be_registered_degrades_and_stores_find_no_space)
{
    fx f;
    fx_client c;
    fx_region g;
    wire_slot_ref slot;
    device *inner = NULL;
    uint32_t status;

    fx_config(&f);
    f.fds_before = fx_count_fds();
    sink_init(&f.sink);
    cr_assert_eq(device_cpu_open(&inner, NULL), KVS_OK);
    cr_assert_eq(fault_device_open(inner, &f.dev, NULL), KVS_OK);
    fault_device_plan(f.dev, &(fault_plan){FAULT_HOST_REGISTER, FAULT_FAIL, 1, 0, KVS_E_NO_SPACE, 0});
    cr_assert_eq(core_create(&f.core, &f.cfg, f.dev, sink_face(&f.sink), 0, NULL), KVS_OK);
    fx_run(&f, 1);
    fx_client_open(&c, &f);
    cr_assert_eq(health(&c).state, WIRE_HEALTH_DEGRADED);
    cr_assert(health(&c).reasons & HEALTH_PIECE_FAILED);
    g = fx_slots(&c, fx_ns(&c, "m"), 2);
    fx_take(&c, &g, 1, &slot);
    cr_assert_eq(fx_store(&c, &(fx_move){.region = g.id, .n = 1, .first = 1, .slots = &slot}, &status), KVS_E_PARTIAL);
    cr_assert_eq(status, KVS_E_NO_SPACE);
    fx_unmap(&g);
    fx_gone(&c);
    fx_close(&f);
}

static device_ops half_ops;
static bool half_only;

/* Registers all, or takes half of the memory and then finds that there is no more. */
static kvs_status register_half(device *d, void *p, uint64_t bytes, kvs_err *err)
{
    (void)d;
    memset(p, 1, half_only ? bytes / 2 : bytes);
    return half_only ? kvs_fail(err, KVS_E_NO_SPACE, "no more memory") : KVS_OK;
}

/* What the arena takes, in KiB. */
static long long arena_kib(const fx *f)
{
    struct stat st;

    cr_assert_eq(fstat(pool_arena_fd(f->core->pool), &st), 0);
    return (long long)st.st_blocks / 2;
}

/* Symptom: a piece that could not be made kept what it had got, so that others had nothing, and was never tried again. */
Test(request, a_piece_that_cannot_be_made_gives_its_memory_back_and_a_reload_tries_again)
{
    fx f;
    device *dev = NULL;

    fx_config(&f);
    f.cfg.pool_reserve_bytes = CONFIG_MIB(4);
    f.fds_before = fx_count_fds();
    sink_init(&f.sink);
    cr_assert_eq(device_cpu_open(&dev, NULL), KVS_OK);
    half_ops = *dev->ops;
    half_ops.host_register = register_half;
    dev->ops = &half_ops;
    f.dev = dev;
    cr_assert_eq(core_create(&f.core, &f.cfg, dev, sink_face(&f.sink), 0, NULL), KVS_OK);
    fx_run(&f, 1);
    cr_assert_eq(arena_kib(&f), 1024);
    half_only = true;
    f.cfg.pool_max_bytes = CONFIG_MIB(3);
    core_configured(f.core);
    fx_run(&f, 1);
    cr_assert(f.core->grow_failed);
    cr_assert_eq(arena_kib(&f), 1024);
    half_only = false;
    core_configured(f.core);
    fx_run(&f, 1);
    cr_assert(!f.core->grow_failed);
    cr_assert_eq(arena_kib(&f), 3072);
    fx_close(&f);
}

/* Symptom: with the size that was asked for meanwhile it was degraded for good, though it had it. */
Test(request, a_piece_that_cannot_be_made_is_no_fault_of_the_size_that_came_meanwhile)
{
    fx f;
    device *dev = NULL;
    uint32_t why;

    fx_config(&f);
    f.cfg.pool_reserve_bytes = CONFIG_MIB(4);
    f.fds_before = fx_count_fds();
    sink_init(&f.sink);
    cr_assert_eq(device_cpu_open(&dev, NULL), KVS_OK);
    half_ops = *dev->ops;
    half_ops.host_register = register_half;
    dev->ops = &half_ops;
    f.dev = dev;
    cr_assert_eq(core_create(&f.core, &f.cfg, dev, sink_face(&f.sink), 0, NULL), KVS_OK);
    fx_run(&f, 1);
    half_only = true;
    f.cfg.pool_max_bytes = CONFIG_MIB(3);
    core_configured(f.core);
    f.cfg.pool_max_bytes = CONFIG_MIB(1);
    core_configured(f.core);
    fx_run(&f, 1);
    cr_assert_eq(core_health(f.core, &why), WIRE_HEALTH_OK);
    cr_assert_eq(arena_kib(&f), 1024);
    half_only = false;
    fx_close(&f);
}

Test(request, ping_echoes_up_to_64_bytes)
{
    fx f;
    fx_client c;
    fx_answer a;
    fx_body *b;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    for (uint32_t n = 0; n <= 65; n += 13) {
        b = fx_new();
        for (uint32_t i = 0; i < n; i++)
            wire_put_u8(&b->out, (uint8_t)(i + 1));
        a = fx_call(&c, WIRE_PING, b);
        cr_assert_eq(a.status, n <= 64 ? KVS_OK : KVS_E_LIMIT);
        for (uint32_t i = 0; n <= 64 && i < n; i++)
            cr_assert_eq(wire_get_u8(&a.in), i + 1);
        cr_assert(wire_in_done(&a.in));
        fx_done(&a);
    }
    fx_gone(&c);
    fx_close(&f);
}

static fx_body *watch_body(uint32_t mask)
{
    fx_body *b = fx_new();

    wire_put_watch_req(&b->out, &(wire_watch_req){mask, 0});
    return b;
}

/* Each event frame is a call of the system, and wakes somebody up. */
Test(request, events_of_a_burst_go_to_many_watchers_in_parts)
{
    enum { KEYS = 600, WATCHERS = 100, FRAMES = (KEYS + CORE_EVENT_BATCH - 1) / CORE_EVENT_BATCH };
    fx f;
    fx_client c, late, w[WATCHERS];
    fx_region g;
    wire_slot_ref one, slot[KEYS];
    uint64_t watch[WATCHERS], late_watch;
    fx_answer a;
    uint32_t ns;

    fx_config(&f);
    f.cfg.max_clients = WATCHERS + 2;
    f.cfg.pool_max_bytes = 16 << 20;
    fx_open(&f);
    fx_client_open(&c, &f);
    fx_client_open(&late, &f);
    ns = fx_ns(&c, "m");
    g = fx_slots(&c, ns, 1);
    fx_take(&c, &g, 1, &one);
    for (int i = 0; i < KEYS; i++)
        slot[i] = one;
    cr_assert_eq(fx_store(&c, &(fx_move){.ns = ns, .region = g.id, .n = KEYS, .first = 1, .slots = slot}, NULL),
                 KVS_OK);
    for (int i = 0; i < WATCHERS; i++) {
        fx_client_open(&w[i], &f);
        watch[i] = fx_send(&w[i], WIRE_WATCH, watch_body(7));
        a = fx_wait(&w[i], watch[i]);
        fx_done(&a);
    }
    cr_assert_eq(fx_status(&c, WIRE_DROP, fx_keys_body(ns, 1, KEYS)), KVS_OK);
    for (int i = 0; i < WATCHERS; i++) {
        a = fx_wait(&w[i], watch[i]);
        fx_done(&a);
        cr_assert_not(fx_has_reply(&w[i], watch[i]), "one frame each, then others have a turn");
    }
    cr_assert_leq(core_next_due(f.core), f.now_us, "and it goes on at once");
    late_watch = fx_send(&late, WIRE_WATCH, watch_body(7)); /* and another part goes out behind it */
    a = fx_wait(&late, late_watch);
    fx_done(&a);
    for (int k = 0; k < FRAMES; k++)
        fx_advance(&f, 0);
    for (int i = 0; i < WATCHERS; i++) {
        uint32_t n = 0;

        for (uint64_t seq = 2; seq <= FRAMES; seq++) {
            wire_event e;

            a = fx_wait(&w[i], watch[i]);
            wire_get_event(&a.in, &e);
            cr_assert(e.seq == seq && e.lost == 0);
            n += e.n;
            fx_done(&a);
        }
        cr_assert_eq(n, KEYS - CORE_EVENT_BATCH);
        fx_gone(&w[i]);
    }
    cr_assert_not(fx_has_reply(&late, late_watch), "what was before it is not told");
    fx_unmap(&g);
    fx_gone(&c);
    fx_gone(&late);
    fx_close(&f);
}

Test(request, watchers_see_stores_and_resets_and_learn_what_they_lost)
{
    fx f;
    fx_client c, w;
    fx_region g;
    wire_slot_ref slot[3];
    fx_move m;
    fx_answer a;
    wire_event e;
    wire_event_item item;
    uint8_t key[32];
    uint64_t watch;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    fx_client_open(&w, &f);
    cr_assert_eq(fx_status(&w, WIRE_WATCH, watch_body(8)), KVS_E_INVALID);
    watch = fx_send(&w, WIRE_WATCH, watch_body(7));
    a = fx_wait(&w, watch);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    m = (fx_move){.ns = fx_ns(&c, "m"), .n = 1, .first = 1, .slots = slot};
    g = fx_slots(&c, m.ns, 4);
    m.region = g.id;
    fx_take(&c, &g, 3, slot);
    cr_assert_eq(fx_store(&c, &m, NULL), KVS_OK);
    a = fx_wait(&w, watch);
    cr_assert_eq(a.head.op, WIRE_EVENT);
    wire_get_event(&a.in, &e);
    wire_get_event_item(&a.in, &item);
    cr_assert(wire_in_done(&a.in));
    fx_key(key, 1);
    cr_assert_eq(e.seq, 1);
    cr_assert_eq(e.n, 1);
    cr_assert_eq(item.type, WIRE_EVENT_STORED);
    cr_assert_eq(memcmp(item.key, key, 32), 0);
    fx_done(&a);
    w.out_bytes = 2 << 20; /* it reads nothing */
    m.first = 2;
    m.slots = &slot[1];
    cr_assert_eq(fx_store(&c, &m, NULL), KVS_OK);
    cr_assert(!fx_has_reply(&w, watch));
    w.out_bytes = 0;
    m.first = 3;
    m.slots = &slot[2];
    cr_assert_eq(fx_store(&c, &m, NULL), KVS_OK);
    a = fx_wait(&w, watch);
    wire_get_event(&a.in, &e);
    cr_assert_eq(e.seq, 2);
    cr_assert_eq(e.lost, 1);
    fx_done(&a);
    cr_assert_eq(fx_status(&w, WIRE_WATCH, watch_body(0)), KVS_OK);
    m.first = 4;
    cr_assert_eq(fx_store(&c, &m, NULL), KVS_OK);
    cr_assert_eq(w.first, NULL);
    fx_unmap(&g);
    fx_gone(&c);
    fx_gone(&w);
    fx_close(&f);
}

/* PROTOCOL.md says which socket takes which operation. */
Test(request, the_sockets_of_an_operation_are_those_of_the_page)
{
    FILE *f = fopen("proto/PROTOCOL.md", "r");
    char line[512], name[32], socket[16];
    unsigned op, n = 0;

    cr_assert_not_null(f);
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, "| %u | `%31[A-Z_]` | %*[^|]| %15[a-z-] |", &op, name, socket) != 3)
            continue;
        if (op == WIRE_EVENT) {
            cr_assert_null(op_find(WIRE_EVENT));
            continue;
        }
        cr_assert_not_null(op_find((uint16_t)op), "%s", name);
        cr_assert_eq(op_find((uint16_t)op)->who,
                     strcmp(socket, "client") == 0  ? OP_CLIENT
                     : strcmp(socket, "admin") == 0 ? OP_ADMIN
                                                    : OP_ANY,
                     "%s", name);
        cr_assert(strcmp(socket, "client") == 0 || strcmp(socket, "admin") == 0 || strcmp(socket, "both") == 0,
                  "%s: %s", name, socket);
        n++;
    }
    (void)fclose(f);
    cr_assert_eq(n, WIRE_DRAIN - 1, "every operation once, but for EVENT");
}

static fx_body *cancel_body(uint64_t target)
{
    fx_body *b = fx_new();

    wire_put_cancel_req(&b->out, &(wire_cancel_req){target});
    return b;
}

Test(request, a_cancel_cannot_name_itself)
{
    fx f;
    fx_client c;
    uint64_t id;
    fx_answer a;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    id = c.next_id;
    a = fx_call(&c, WIRE_CANCEL, cancel_body(id));
    cr_assert_eq(a.status, KVS_E_INVALID);
    fx_done(&a);
    cr_assert_eq(fx_status(&c, WIRE_CANCEL, cancel_body(12345)), KVS_OK);
    fx_gone(&c);
    fx_close(&f);
}

Test(request, a_region_that_is_made_too_late_is_closed_again)
{
    fx f;
    fx_client c, admin;
    fx_body *b = fx_new();
    uint64_t id;
    fx_answer a;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    fx_admin_open(&admin, &f);
    fault_device_plan(f.dev, &(fault_plan){FAULT_MEM_CREATE, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    wire_put_region_create_req(
        &b->out, &(wire_region_create_req){.ns = WIRE_NONE32, .kind = WIRE_REGION_SCRATCH, .bytes = 4096});
    id = fx_send_deadline(&c, WIRE_REGION_CREATE, 1000, b);
    fault_device_await_held(f.dev, 1);
    cr_assert_eq(core_next_due(f.core), f.now_us + 1000);
    fx_advance(&f, 1000);
    a = fx_wait(&c, id);
    cr_assert_eq(a.status, KVS_E_DEADLINE);
    fx_done(&a);
    fault_device_release(f.dev);
    while (!core_is_idle(f.core))
        fx_run(&f, 1);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "regions"), 0);
    fx_gone(&c);
    fx_gone(&admin);
    fx_close(&f);
}

Test(request, deadlines_fire_in_their_own_order)
{
    fx f;
    fx_client c;
    fx_region g;
    wire_slot_ref slot[8];
    uint64_t id[8];
    fx_move m;

    fx_config(&f);
    fx_open(&f);
    fx_client_open(&c, &f);
    m = (fx_move){.ns = fx_ns(&c, "m"), .n = 1, .after_counter = 1, .after_value = 1};
    g = fx_slots(&c, m.ns, 8);
    m.region = g.id;
    fx_take(&c, &g, 8, slot);
    for (uint64_t i = 0; i < 8; i++) {
        m.first = i + 1;
        m.slots = &slot[i];
        id[i] = fx_send_deadline(&c, WIRE_STORE, 1000 * (1 + (i * 5) % 8), fx_store_body(&m));
    }
    for (uint64_t step = 1; step <= 8; step++) {
        fx_advance(&f, 1000);
        for (uint64_t i = 0; i < 8; i++)
            cr_assert_eq(fx_has_reply(&c, id[i]), 1 + (i * 5) % 8 <= step, "request %d at %d ms", (int)i, (int)step);
    }
    cr_assert_eq(core_next_due(f.core) > f.now_us, true);
    fx_unmap(&g);
    fx_gone(&c);
    fx_close(&f);
}
