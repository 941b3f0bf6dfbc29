#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/options.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"

/* Under AddressSanitizer freed memory is kept on purpose: its growth says nothing. */
#if defined(__SANITIZE_ADDRESS__)
enum { HOLDS_FREED = 1 };
#else
enum { HOLDS_FREED = 0 };
#endif

/* A daemon, and a client that behaves: whatever others do, it is answered. */
static daemon_fixture d;
static raw_client good;

static void join(raw_client *c)
{
    cr_assert(raw_connect(c, d.socket));
    cr_assert(raw_hello(c));
}

static const char CONFIG[] = "{\"pool\": {\"max_bytes\": \"16MiB\"},"
                             " \"limits\": {\"frame_timeout_ms\": 300, \"write_timeout_ms\": 300}}";

static void init(void)
{
    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    join(&good);
}

static void fini(void)
{
    cr_assert(raw_ping(&good, 77), "the client that behaves is served to the end");
    raw_close(&good);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    cr_assert_eq(daemon_log_count(&d, "handles_leaked"), 0);
    daemon_fini(&d);
}

TestSuite(badinput, .init = init, .fini = fini);

/* ---- frames ---- */
typedef struct raw_case {
    const char *name;
    uint8_t bytes[64];
    size_t len;
} raw_case;

static void header_case(raw_case *c, const char *name, size_t len, size_t at, uint32_t value, size_t width)
{
    c->name = name;
    c->len = len;
    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 3}, c->bytes);
    memcpy(c->bytes + at, &value, width);
}

Test(badinput, broken_frames_cost_their_sender_the_connection_and_nobody_else)
{
    unsigned before = daemon_fds(&d);
    raw_case cases[8] = {0};
    char number[32];

    cases[0] = (raw_case){"garbage", "\x01\x02GET / HTTP/1.1 and then some more text", 45};
    header_case(&cases[1], "wrong magic", 32, 0, 0x3153564c, 4);
    header_case(&cases[2], "a body of 4 GiB less one", 32, 16, 0xffffffff, 4);
    header_case(&cases[3], "a body one byte too long", 32, 16, (1 << 20) + 1, 4);
    header_case(&cases[4], "a length with the top bit", 32, 16, 0x80000000, 4);
    header_case(&cases[5], "65 descriptors", 32, 20, 65, 2);
    header_case(&cases[6], "a descriptor that did not come", 32, 20, 1, 2);
    header_case(&cases[7], "reserved bytes", 32, 22, 1, 2);
    for (size_t i = 0; i < 8; i++) {
        raw_client c;

        join(&c);
        cr_assert(raw_write(&c, cases[i].bytes, cases[i].len, NULL, 0));
        cr_assert(raw_wait_end(&c, 5000), "%s", cases[i].name);
        raw_close(&c);
        cr_assert(daemon_wait_log(&d, "client_dropped", (unsigned)i + 1, 5000), "%s", cases[i].name);
        (void)snprintf(number, sizeof number, " conn=%zu uid=", i + 2); /* "good" came first */
        cr_assert_eq(daemon_log_count(&d, number), 1, "%s: not the number that HELLO told", cases[i].name);
        cr_assert(raw_ping(&good, 2));
    }
    cr_assert_eq(daemon_log_count(&d, "client_dropped"), 8, "one line each");
    cr_assert(daemon_wait_fds(&d, before, 5000));
}

Test(badinput, refusals_are_replies)
{
    static const uint16_t OPS[] = {0, WIRE_EVENT, 27, 999, 0xffff, WIRE_EXTEND};
    raw_client c;
    frame f;

    join(&c);
    for (unsigned i = 0; i < sizeof OPS / sizeof OPS[0]; i++) {
        cr_assert(raw_send(&c, OPS[i], 100 + i, NULL, 0, NULL, 0));
        cr_assert(raw_recv(&c, &f, 5000), "op %u", OPS[i]);
        cr_assert_eq(f.head.id, 100 + i);
        cr_assert_neq(f.head.status, KVS_OK, "op %u", OPS[i]);
    }
    cr_assert(raw_ping(&c, 5));
    raw_close(&c);
}

Test(badinput, bodies_of_every_wrong_length_are_refused_by_every_op)
{
    uint8_t zeros[256] = {0};
    raw_client c;
    frame f;

    for (uint16_t op = WIRE_HELLO; op < WIRE_EVENT; op++) {
        join(&c);
        for (uint32_t len = 0; len <= 256; len += len < 16 ? 1 : 12) {
            if (!raw_send(&c, op, len + 10, zeros, len, NULL, 0) || !raw_recv(&c, &f, 5000)) {
                cr_assert(c.ended, "op %u with %u bytes got no answer", op, len);
                break; /* a connection may be the price */
            }
            cr_assert_eq(f.head.id, len + 10);
            for (unsigned i = 0; i < f.head.n_fds; i++)
                (void)close(f.fds[i]);
        }
        raw_close(&c);
    }
}

Test(badinput, nothing_but_hello_is_answered_before_hello)
{
    raw_client c;
    frame f;

    cr_assert(raw_connect(&c, d.socket));
    cr_assert(raw_send(&c, WIRE_PING, 4, NULL, 0, NULL, 0));
    cr_assert(!raw_recv(&c, &f, 5000) || f.head.status != KVS_OK);
    raw_close(&c);
}

static uint64_t next_random(uint64_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return *s;
}

Test(badinput, mutated_frames_end_in_a_reply_or_a_close)
{
    uint64_t seed = 0x9e3779b97f4a7c15;

    for (unsigned round = 0; round < 300; round++) {
        uint8_t bytes[8 * 96] = {0};
        size_t len = 0;
        raw_client c;

        join(&c);
        for (unsigned i = 0; i < 8; i++) {
            uint32_t body = (uint32_t)(next_random(&seed) % 8) * 8;

            wire_header_encode(&(wire_header){.op = (uint16_t)(next_random(&seed) % 28), .id = i + 2, .body_len = body},
                               bytes + len);
            for (uint32_t b = 0; b < body; b++)
                bytes[len + 32 + b] = (uint8_t)(next_random(&seed) % 4 ? 0 : next_random(&seed));
            len += 32 + body;
        }
        for (unsigned i = 0; i < round % 4; i++)
            bytes[next_random(&seed) % len] ^= (uint8_t)(1u << next_random(&seed) % 8);
        (void)raw_write(&c, bytes, len - next_random(&seed) % 2 * (next_random(&seed) % len), NULL, 0);
        (void)shutdown(c.fd, SHUT_WR);
        cr_assert(raw_wait_end(&c, 5000), "round %u", round);
        raw_close(&c);
    }
}

Test(badinput, any_split_of_the_stream_gives_the_same_replies)
{
    uint8_t bytes[5 * 40] = {0};

    for (unsigned i = 0; i < 5; i++)
        wire_header_encode(&(wire_header){.op = WIRE_PING, .id = i, .body_len = 8}, bytes + i * 40);
    for (size_t step = 1; step <= sizeof bytes; step += step < 8 ? 1 : 23) {
        raw_client c;
        frame f;

        join(&c);
        for (size_t at = 0; at < sizeof bytes; at += step)
            cr_assert(raw_write(&c, bytes + at, at + step < sizeof bytes ? step : sizeof bytes - at, NULL, 0));
        for (unsigned i = 0; i < 5; i++) {
            cr_assert(raw_recv(&c, &f, 5000), "step %zu", step);
            cr_assert_eq(f.head.id, i);
        }
        raw_close(&c);
    }
}

/* ---- descriptors ---- */
Test(badinput, ten_thousand_pings_with_a_descriptor_leave_none_behind)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    unsigned before = daemon_fds(&d), sent = 0, ended = 0;
    raw_client c;
    frame f;

    join(&c);
    while (sent < 10000) {
        if (c.ended || !raw_send(&c, WIRE_PING, sent, NULL, 0, &fd, 1)) { /* it may see a fault in that */
            raw_close(&c);
            join(&c);
            cr_assert_lt(ended++, 10001);
        }
        sent++;
        if (sent % 16 == 0)
            for (unsigned i = 0; i < 16 && raw_recv(&c, &f, 5000); i++)
                ;
    }
    cr_assert_leq(daemon_fds(&d), before + 8, "while it is connected");
    raw_close(&c);
    (void)close(fd);
    cr_assert(daemon_wait_fds(&d, before, 5000));
}

Test(badinput, descriptors_without_their_frame_leave_none_behind)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    unsigned before = daemon_fds(&d);
    uint8_t head[WIRE_HEADER_BYTES];

    wire_header_encode(&(wire_header){.op = WIRE_REGION_IMPORT, .id = 3, .body_len = 200, .n_fds = 1}, head);
    for (unsigned i = 0; i < 500; i++) {
        raw_client c;

        cr_assert(raw_connect(&c, d.socket));
        cr_assert(raw_write(&c, head, i % 2 ? sizeof head : 5, &fd, 1));
        raw_close(&c);
    }
    (void)close(fd);
    cr_assert(daemon_wait_fds(&d, before, 10000));
}

/* Symptom: 200 clients that had once sent a frame of 1 MiB held 200 MB while they were idle. */
Test(badinput, clients_that_sent_a_large_frame_once_hold_no_memory_for_it)
{
    enum { N = 40, BYTES = 1 << 20 };
    uint8_t *body = calloc(1, BYTES);
    uint64_t before = daemon_private_kib(&d);
    raw_client c[N];
    frame f;

    cr_assert_not_null(body);
    for (unsigned i = 0; i < N; i++) {
        join(&c[i]);
        cr_assert(raw_send(&c[i], WIRE_LOOKUP, 2, body, BYTES, NULL, 0));
        cr_assert(raw_recv(&c[i], &f, 5000));
        cr_assert_neq(f.head.status, KVS_OK);
    }
    cr_assert(raw_ping(&good, 3));
    if (!HOLDS_FREED)
        cr_assert_leq(daemon_private_kib(&d), before + 16384);
    for (unsigned i = 0; i < N; i++)
        raw_close(&c[i]);
    free(body);
}

/* ---- time ---- */
Test(badinput, a_frame_left_unfinished_is_dropped_after_its_time)
{
    raw_client idle, half;

    join(&half);
    cr_assert(raw_connect(&idle, d.socket));
    cr_assert(raw_write(&half, "KVS", 3, NULL, 0));
    cr_assert(raw_wait_end(&half, 5000));
    cr_assert(raw_wait_end(&idle, 5000));
    cr_assert_eq(daemon_log_count(&d, "reason=unfinished_frame"), 1);
    cr_assert_eq(daemon_log_count(&d, "reason=no_hello"), 1);
    raw_close(&half);
    raw_close(&idle);
}

Test(badinput, a_client_that_stops_reading_is_dropped_after_its_time)
{
    uint8_t body[WIRE_status_req_BYTES] = {0};
    uint64_t before = daemon_private_kib(&d);
    raw_client c;

    join(&c);
    (void)fcntl(c.fd, F_SETFL, O_NONBLOCK);
    for (unsigned i = 0; i < 100000 && daemon_log_count(&d, "reason=reads_nothing") == 0; i++)
        if (!raw_send(&c, WIRE_STATUS, i, body, sizeof body, NULL, 0))
            cr_assert(raw_ping(&good, i)); /* full: now it does nothing but wait */
    cr_assert_eq(daemon_log_count(&d, "reason=reads_nothing"), 1);
    cr_assert_leq(daemon_private_kib(&d), before + 40000);
    raw_close(&c);
}

/* ---- ends ---- */
Test(badinput, half_closed_clients_get_every_reply_and_then_the_end)
{
    raw_client c;
    frame f;

    join(&c);
    for (unsigned i = 0; i < 10; i++)
        cr_assert(raw_send(&c, WIRE_PING, i, NULL, 0, NULL, 0));
    (void)shutdown(c.fd, SHUT_WR);
    for (unsigned i = 0; i < 10; i++) {
        cr_assert(raw_recv(&c, &f, 5000));
        cr_assert_eq(f.head.id, i);
    }
    cr_assert(raw_wait_end(&c, 5000));
    raw_close(&c);
}

Test(badinput, clients_that_send_and_leave_at_once_do_no_harm)
{
    unsigned before = daemon_fds(&d);
    uint64_t memory = 0;

    for (unsigned round = 0; round < 1000; round++) {
        uint8_t pings[100 * WIRE_HEADER_BYTES];
        raw_client c;

        for (unsigned i = 0; i < 100; i++)
            wire_header_encode(&(wire_header){.op = i ? WIRE_PING : WIRE_HEALTH, .id = i},
                               pings + i * WIRE_HEADER_BYTES);
        cr_assert(raw_connect(&c, d.socket));
        (void)raw_write(&c, pings, sizeof pings, NULL, 0);
        raw_close(&c);
        if (round == 200)
            memory = daemon_private_kib(&d);
    }
    cr_assert(daemon_wait_fds(&d, before, 10000));
    if (!HOLDS_FREED)
        cr_assert_leq(daemon_private_kib(&d), memory + 4096);
}

/* A process that is killed in the middle of a frame. */
static void kill_a_client_mid_frame(unsigned bytes)
{
    uint8_t head[WIRE_HEADER_BYTES + 16] = {0};
    int told[2];
    char b;
    pid_t pid;

    cr_assert_eq(pipe(told), 0);
    pid = fork();
    if (pid == 0) {
        raw_client c;

        if (!raw_connect(&c, d.socket) || !raw_hello(&c))
            _exit(1);
        wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 2, .body_len = 16}, head);
        (void)raw_write(&c, head, bytes, NULL, 0);
        (void)!write(told[1], "x", 1);
        (void)pause();
        _exit(0);
    }
    (void)close(told[1]);
    cr_assert_eq(read(told[0], &b, 1), 1);
    (void)close(told[0]);
    (void)kill(pid, SIGKILL);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
}

Test(badinput, clients_killed_mid_frame_leave_nothing)
{
    unsigned before = daemon_fds(&d);

    for (unsigned bytes = 1; bytes < 48; bytes += 5)
        kill_a_client_mid_frame(bytes);
    cr_assert(daemon_wait_fds(&d, before, 1000), "back within a second");
}

/* ---- places ---- */
Test(few_descriptors, do_not_stop_those_who_are_in)
{
    raw_client in[6], out[200];
    unsigned n_ended = 0;
    uint64_t cpu, start;

    daemon_init(&d);
    d.max_fds = 64;
    cr_assert(daemon_start(&d, CONFIG));
    cr_assert_eq(daemon_log_count(&d, "warn few_descriptors limit=64 max_clients=256 tenants=1 "), 1,
                 "before any comes");
    for (unsigned i = 0; i < 6; i++)
        join(&in[i]);
    cpu = daemon_cpu_ms(&d);
    start = raw_now_ms();
    for (unsigned i = 0; i < 200; i++)
        cr_assert(raw_connect(&out[i], d.socket));
    while (raw_now_ms() < start + 1000)
        for (unsigned i = 0; i < 6; i++) {
            cr_assert(raw_ping(&in[i], i));
            (void)usleep(5000);
        }
    cr_assert_leq(daemon_cpu_ms(&d) - cpu, 250);
    for (unsigned i = 0; i < 200; i++) {
        n_ended += raw_wait_end(&out[i], 1);
        raw_close(&out[i]);
    }
    cr_assert_gt(n_ended, 50, "%u of those who came too late were told so quickly", n_ended);
    cr_assert_leq(daemon_log_count(&d, "clients_refused"), 8);
    for (unsigned tries = 0;; tries++) {
        bool ok = raw_connect(&out[0], d.socket) && raw_hello(&out[0]);

        raw_close(&out[0]);
        if (ok)
            break;
        cr_assert_lt(tries, 100, "normal again after the flood");
        (void)usleep(20000);
    }
    for (unsigned i = 0; i < 6; i++)
        raw_close(&in[i]);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    daemon_fini(&d);
}

/* Symptom: clients that had all descriptors kept the operator out, who alone could have seen whose they are. */
Test(few_descriptors, do_not_keep_the_operator_out)
{
    raw_client in[64], operator;
    unsigned n = 0;

    daemon_init(&d);
    d.max_fds = 64;
    cr_assert(daemon_start(&d, CONFIG));
    while (raw_connect(&in[n], d.socket) && raw_hello(&in[n]))
        cr_assert_lt(++n, 64);
    raw_close(&in[n]);
    cr_assert_gt(n, 10);
    cr_assert(daemon_wait_log(&d, "clients_refused reason=descriptors socket=default", 1, 5000));
    cr_assert(raw_connect(&operator, d.admin) && raw_hello(&operator));
    raw_close(&operator);
    while (n > 0)
        raw_close(&in[--n]);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    daemon_fini(&d);
}

/* A place is free when the daemon's loop has turned, a moment after its last holder saw the end. */
static bool find_place(raw_client *c)
{
    for (int i = 0; i < 200; i++) {
        if (raw_connect(c, d.socket) && raw_hello(c))
            return true;
        raw_close(c);
        (void)usleep(10000);
    }
    return false;
}

Test(idle_clients, do_not_keep_the_operator_out)
{
    raw_client idle[32], late, admin;

    daemon_init(&d);
    cr_assert(daemon_start(&d, "{\"pool\": {\"max_bytes\": \"16MiB\"},"
                               " \"limits\": {\"max_clients\": 32, \"frame_timeout_ms\": 400}}"));
    for (unsigned i = 0; i < 32; i++) {
        cr_assert(raw_connect(&idle[i], d.socket));
        cr_assert(raw_write(&idle[i], "KVS", 3, NULL, 0));
    }
    cr_assert(raw_connect(&admin, d.admin));
    cr_assert(raw_hello(&admin), "at once");
    cr_assert(raw_connect(&late, d.socket));
    cr_assert(!raw_hello(&late), "no place, and told so");
    raw_close(&late);
    for (unsigned i = 0; i < 32; i++) {
        cr_assert(raw_wait_end(&idle[i], 5000));
        raw_close(&idle[i]);
    }
    cr_assert(find_place(&late));
    raw_close(&late);
    raw_close(&admin);
    cr_assert_eq(daemon_stop(&d, SIGTERM), EXIT_CODE_OK);
    daemon_fini(&d);
}
