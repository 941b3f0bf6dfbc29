#include "daemon/conn.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "daemon/disposal.h"
#include "daemon/log.h"
#include "proto/cpus.h"
#include "tests/loop/fake_core.h"
#include "tests/support/lingering.h"
#include "tests/support/loop_fixture.h"
#include "tests/support/raw_client.h"

/* What the server does for connections, and no more. */
typedef struct holder {
    uv_loop_t loop;
    uv_prepare_t prepare;
    uv_timer_t timer;
    uv_idle_t no_wait;
    mailbox *mailbox;
    core core;
    config config;
    conn_host host;
    uint32_t n_turns;
} holder;

static holder h;

static unsigned cpus = 16;

unsigned cpus_usable(void)
{
    return cpus;
}

static void on_idle(uv_idle_t *i)
{
    (void)i;
}

static void on_timer(uv_timer_t *t)
{
    (void)t;
    conns_check(&h.host, conn_now_us());
}

static void on_prepare(uv_prepare_t *p)
{
    (void)p;
    h.n_turns++;
    if (conns_turn(&h.host))
        (void)uv_idle_start(&h.no_wait, on_idle);
    else
        (void)uv_idle_stop(&h.no_wait);
}

static void begin(void)
{
    log_open(LOG_LEVEL_ERROR, false);
    memset(&h, 0, sizeof h);
    cr_assert_eq(uv_loop_init(&h.loop), 0);
    cr_assert_eq(mailbox_create(&h.mailbox, &h.loop, NULL), KVS_OK);
    config_default(&h.config);
    h.core.due_us = UINT64_MAX;
    conn_host_init(&h.host, &h.loop, &h.core, h.mailbox, &h.config);
    (void)uv_prepare_init(&h.loop, &h.prepare);
    (void)uv_prepare_start(&h.prepare, on_prepare);
    (void)uv_idle_init(&h.loop, &h.no_wait);
    (void)uv_timer_init(&h.loop, &h.timer);
    (void)uv_timer_start(&h.timer, on_timer, 5, 5);
}

static bool is_gone(void *ud)
{
    (void)ud;
    return conns_gone(&h.host);
}

/* Everything is closed and nothing is left: handles, connections, peers. */
static void end(void)
{
    conns_close(&h.host);
    fake_finish(&h.core);
    cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
    cr_assert_eq(h.core.n_peers, 0);
    cr_assert_eq(h.host.n_clients, 0);
    uv_close((uv_handle_t *)&h.prepare, NULL);
    uv_close((uv_handle_t *)&h.no_wait, NULL);
    uv_close((uv_handle_t *)&h.timer, NULL);
    mailbox_close(h.mailbox);
    cr_assert(loop_end(&h.loop));
}

static void join_as(raw_client *c, pid_t pid)
{
    peer_info info = {.uid = getuid(), .pid = pid};
    int fds[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    raw_init(c, fds[0]);
    cr_assert_eq(conn_open(&h.host, fds[1], &info, NULL), KVS_OK);
}

static bool try_recv(void *ud);

typedef struct wanted {
    raw_client *client;
    frame frame;
} wanted;

static bool try_recv(void *ud)
{
    wanted *w = ud;

    return raw_poll(w->client, &w->frame);
}

static bool recv_frame(raw_client *c, frame *ret)
{
    wanted w = {.client = c};
    bool ok = loop_until(&h.loop, try_recv, &w, 5000);

    *ret = w.frame;
    return ok;
}

static bool has_ended(void *ud)
{
    raw_client *c = ud;
    frame f;

    (void)raw_poll(c, &f);
    return c->ended;
}

static void say_hello(raw_client *c)
{
    frame f;

    cr_assert(raw_send(c, WIRE_HELLO, 1, NULL, 0, NULL, 0));
    cr_assert(recv_frame(c, &f));
    cr_assert_eq(f.head.op, WIRE_HELLO);
}

static void join_client(raw_client *c)
{
    join_as(c, 0);
    say_hello(c);
}

static void expect(raw_client *c, uint16_t op, uint64_t id)
{
    frame f;

    cr_assert(recv_frame(c, &f), "no reply to request %d", (int)id);
    cr_assert_eq(f.head.op, op);
    cr_assert_eq(f.head.id, id);
}

static unsigned fds_now(void)
{
    cr_assert(disposal_wait(5000));
    return count_fds(0);
}

Test(conn, answers_in_order_what_came_in_one_piece)
{
    uint8_t many[40 * WIRE_HEADER_BYTES];
    raw_client c;

    begin();
    join_client(&c);
    for (unsigned i = 0; i < 40; i++)
        wire_header_encode(&(wire_header){.op = WIRE_PING, .id = i}, many + i * WIRE_HEADER_BYTES);
    cr_assert(raw_write(&c, many, sizeof many, NULL, 0));
    for (unsigned i = 0; i < 40; i++)
        expect(&c, WIRE_PING, i);
    raw_close(&c);
    end();
}

Test(conn, answers_a_stream_of_single_bytes)
{
    uint8_t bytes[WIRE_HEADER_BYTES + 8] = {0};
    raw_client c;

    begin();
    join_client(&c);
    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 7, .body_len = 8}, bytes);
    for (size_t i = 0; i < sizeof bytes; i++) {
        cr_assert(raw_write(&c, bytes + i, 1, NULL, 0));
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    }
    expect(&c, WIRE_PING, 7);
    raw_close(&c);
    end();
}

Test(conn, gives_descriptors_to_their_frame_and_to_no_other)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    unsigned before;
    raw_client c;
    frame f;

    begin();
    join_client(&c);
    before = fds_now();
    cr_assert(raw_send(&c, WIRE_PING, 1, NULL, 0, NULL, 0));
    cr_assert(raw_send(&c, WIRE_HEALTH, 2, NULL, 0, (int[]){fd, fd}, 2));
    cr_assert(raw_send(&c, WIRE_HEALTH, 3, NULL, 0, NULL, 0));
    cr_assert(raw_send(&c, WIRE_PING, 4, NULL, 0, NULL, 0));
    for (unsigned id = 1; id <= 4; id++) {
        cr_assert(recv_frame(&c, &f));
        cr_assert_eq(f.head.id, id);
        cr_assert_eq(f.head.n_fds, id == 2 || id == 3, "reply %u has %u descriptors", id, f.head.n_fds);
        for (unsigned i = 0; i < f.head.n_fds; i++)
            cr_assert_eq(close(f.fds[i]), 0);
    }
    cr_assert_eq(h.core.n_fds, 2);
    cr_assert_eq(fds_now(), before);
    raw_close(&c);
    end();
    (void)close(fd);
}

Test(conn, closes_descriptors_that_no_frame_claims)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    unsigned before = 0;

    begin();
    for (unsigned i = 0; i < 20; i++) {
        uint8_t head[WIRE_HEADER_BYTES];
        raw_client c;

        join_client(&c);
        wire_header_encode(&(wire_header){.op = WIRE_PING, .body_len = 8, .n_fds = i % 2}, head);
        cr_assert(raw_write(&c, head, sizeof head, &fd, 1)); /* odd: half a frame that claims it */
        if (i % 2 == 0)
            cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
        raw_close(&c);
        cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
        if (i == 1)
            before = fds_now();
    }
    cr_assert_eq(fds_now(), before);
    end();
    (void)close(fd);
}

Test(conn, drops_a_client_that_sends_more_descriptors_than_a_frame_may_have)
{
    int fds[100];
    uint8_t head[WIRE_HEADER_BYTES];
    unsigned before;
    raw_client c, other;

    begin();
    join_client(&other);
    join_client(&c);
    before = fds_now();
    for (unsigned i = 0; i < 100; i++)
        fds[i] = STDERR_FILENO;
    wire_header_encode(&(wire_header){.op = WIRE_PING, .n_fds = 64}, head);
    cr_assert(raw_write(&c, head, sizeof head, fds, 100));
    cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
    cr_assert_eq(fds_now(), before - 1, "the connection's own descriptor is gone, and no other came");
    cr_assert(raw_send(&other, WIRE_PING, 2, NULL, 0, NULL, 0));
    expect(&other, WIRE_PING, 2);
    raw_close(&c);
    raw_close(&other);
    end();
}

/* What a client with a socket like this in its hands may do with it; then another one must be answered as ever. */
static void nobody_waits_for(void (*act)(raw_client *bad, int fd))
{
    raw_client bad, good;
    lingering l;
    uint64_t began;

    begin();
    join_client(&good);
    join_client(&bad);
    lingering_open(&l, 8);
    began = raw_now_ms();
    act(&bad, l.fd);
    (void)close(l.fd);
    for (unsigned i = 0; i < 5; i++)
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    cr_assert(raw_send(&good, WIRE_PING, 2, NULL, 0, NULL, 0));
    expect(&good, WIRE_PING, 2);
    cr_assert_lt(raw_now_ms() - began, 3000, "the loop stood still for the close of a client's socket");
    raw_close(&bad);
    raw_close(&good);
    end();
    lingering_end(&l);
    cr_assert(disposal_wait(3000));
}

static void send_unclaimed(raw_client *bad, int fd)
{
    uint8_t head[WIRE_HEADER_BYTES];

    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 2}, head);
    cr_assert(raw_write(bad, head, sizeof head, &fd, 1));
}

static void send_too_many(raw_client *bad, int fd)
{
    uint8_t head[WIRE_HEADER_BYTES];
    int fds[200];

    for (unsigned i = 0; i < 200; i++)
        fds[i] = i < 199 ? STDERR_FILENO : fd;
    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 2, .n_fds = 64}, head);
    cr_assert(raw_write(bad, head, sizeof head, fds, 200));
}

/* Behind bytes that make the daemon close the connection: nobody will ever read it. */
static void send_behind_garbage(raw_client *bad, int fd)
{
    static const uint8_t garbage[WIRE_HEADER_BYTES] = "GET / HTTP/1.1";

    cr_assert(raw_write(bad, garbage, sizeof garbage, (int[]){STDERR_FILENO}, 1));
    cr_assert(raw_write(bad, garbage, 1, &fd, 1));
}

Test(conn, does_not_wait_for_the_close_of_a_descriptor_that_no_frame_claims)
{
    nobody_waits_for(send_unclaimed);
}

Test(conn, does_not_wait_for_the_close_of_descriptors_that_are_too_many)
{
    nobody_waits_for(send_too_many);
}

Test(conn, does_not_wait_for_the_close_of_a_descriptor_that_nobody_reads)
{
    nobody_waits_for(send_behind_garbage);
}

Test(conn, drops_only_the_client_that_sent_garbage)
{
    raw_client bad, good;

    begin();
    join_client(&good);
    join_client(&bad);
    cr_assert(raw_write(&bad, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 36, NULL, 0));
    cr_assert(loop_until(&h.loop, has_ended, &bad, 5000));
    cr_assert_eq(h.host.n_dropped, 1);
    cr_assert(raw_send(&good, WIRE_PING, 2, NULL, 0, NULL, 0));
    expect(&good, WIRE_PING, 2);
    raw_close(&bad);
    raw_close(&good);
    end();
}

Test(conn, answers_what_came_before_the_garbage)
{
    uint8_t bytes[3 * WIRE_HEADER_BYTES];
    raw_client c;

    begin();
    join_client(&c);
    memset(bytes, 0x55, sizeof bytes);
    for (unsigned i = 0; i < 2; i++)
        wire_header_encode(&(wire_header){.op = WIRE_PING, .id = i}, bytes + i * WIRE_HEADER_BYTES);
    cr_assert(raw_write(&c, bytes, sizeof bytes, NULL, 0));
    expect(&c, WIRE_PING, 0);
    expect(&c, WIRE_PING, 1);
    cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
    raw_close(&c);
    end();
}

Test(conn, drops_a_client_whose_request_is_a_fault)
{
    raw_client c;

    begin();
    join_client(&c);
    cr_assert(raw_send(&c, WIRE_CANCEL, 1, NULL, 0, NULL, 0));
    cr_assert(raw_send(&c, WIRE_PING, 2, NULL, 0, NULL, 0));
    cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
    cr_assert_eq(h.core.n_requests, 2, "HELLO and the fault, nothing behind it");
    raw_close(&c);
    end();
}

Test(conn, sends_every_reply_to_a_half_closed_client_and_then_closes)
{
    raw_client c;

    begin();
    join_client(&c);
    for (unsigned i = 0; i < 10; i++)
        cr_assert(raw_send(&c, i % 2 ? WIRE_LOOKUP : WIRE_PING, i, NULL, 0, NULL, 0));
    cr_assert_eq(shutdown(c.fd, SHUT_WR), 0);
    for (unsigned i = 0; i < 10; i += 2)
        expect(&c, WIRE_PING, i);
    cr_assert(!has_ended(&c));
    fake_release(&h.core);
    for (unsigned i = 1; i < 10; i += 2)
        expect(&c, WIRE_LOOKUP, i);
    cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
    cr_assert_eq(h.host.n_dropped, 0);
    raw_close(&c);
    end();
}

static bool is_peer_gone(void *ud)
{
    (void)ud;
    return h.core.n_gone > 0;
}

Test(conn, notices_that_a_half_closed_client_has_gone)
{
    raw_client c;

    begin();
    join_client(&c);
    cr_assert(raw_send(&c, WIRE_LOOKUP, 1, NULL, 0, NULL, 0));
    cr_assert_eq(shutdown(c.fd, SHUT_WR), 0);
    (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    raw_close(&c);
    cr_assert(loop_until(&h.loop, is_peer_gone, NULL, 1000), "within a second");
    end();
}

Test(conn, takes_a_budget_of_frames_and_then_the_next_client_has_its_turn)
{
    uint8_t many[100 * WIRE_HEADER_BYTES];
    raw_client greedy, modest;
    wanted w = {.client = &modest};

    begin();
    h.config.request_budget = 4;
    join_client(&greedy);
    join_client(&modest);
    for (unsigned i = 0; i < 100; i++)
        wire_header_encode(&(wire_header){.op = WIRE_PING, .id = i}, many + i * WIRE_HEADER_BYTES);
    cr_assert(raw_write(&greedy, many, sizeof many, NULL, 0));
    cr_assert(raw_send(&modest, WIRE_PING, 7, NULL, 0, NULL, 0));
    h.core.n_requests = 0;
    cr_assert(loop_until(&h.loop, try_recv, &w, 5000));
    cr_assert_leq(h.core.n_requests, 13, "%u requests were handled before the second client's", h.core.n_requests);
    for (unsigned i = 0; i < 100; i++)
        expect(&greedy, WIRE_PING, i);
    raw_close(&greedy);
    raw_close(&modest);
    end();
}

/* A list of 26,000 keys takes milliseconds: 32 of them are a long time for who waits. */
Test(conn, has_its_turn_for_a_time_and_not_only_for_so_many_frames)
{
    enum { N = 30, US = 3000 };
    raw_client greedy, modest;
    wanted w = {.client = &modest};
    uint32_t us = US;

    begin();
    join_client(&greedy);
    join_client(&modest);
    for (unsigned i = 0; i < N; i++)
        cr_assert(raw_send(&greedy, WIRE_RESERVE, i, &us, sizeof us, NULL, 0));
    cr_assert(raw_send(&modest, WIRE_PING, 7, NULL, 0, NULL, 0));
    h.core.n_requests = 0;
    cr_assert(loop_until(&h.loop, try_recv, &w, 5000));
    cr_assert_leq(h.core.n_requests, 6, "%u requests were handled before the second client's", h.core.n_requests);
    for (unsigned i = 0; i < N; i++)
        expect(&greedy, WIRE_RESERVE, i);
    raw_close(&greedy);
    raw_close(&modest);
    end();
}

/* ---- tenants ---- */

enum { CROWD = 20, SLOW_US = 3000 };

static void join_tenant(raw_client *c, const peer_info *info)
{
    int fds[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    raw_init(c, fds[0]);
    cr_assert_eq(conn_open(&h.host, fds[1], info, NULL), KVS_OK);
    cr_assert(raw_send(c, WIRE_HELLO, 1, NULL, 0, NULL, 0));
    expect(c, WIRE_HELLO, 1);
}

static void send_slow(raw_client *c, unsigned n)
{
    uint32_t us = SLOW_US;

    for (unsigned i = 0; i < n; i++)
        cr_assert(raw_send(c, WIRE_RESERVE, i, &us, sizeof us, NULL, 0));
}

static void close_crowd(raw_client *crowd)
{
    for (int i = 0; i < CROWD; i++)
        raw_close(&crowd[i]);
}

/* Symptom: 200 clients of a tenant with requests of 20 ms each made a PING of another one wait for 4 s. */
Test(conn, a_tenant_of_many_clients_has_the_turn_of_one)
{
    static raw_client crowd[CROWD], other[2];
    const peer_info info[2] = {{.uid = getuid(), .tenant = 1}, {.uid = getuid(), .is_admin = true}};

    begin();
    for (int i = 0; i < CROWD; i++)
        join_client(&crowd[i]);
    for (int i = 0; i < 2; i++)
        join_tenant(&other[i], &info[i]);
    for (int i = 0; i < CROWD; i++)
        send_slow(&crowd[i], 3);
    for (int i = 0; i < 2; i++) {
        wanted w = {.client = &other[i]};

        cr_assert(raw_send(&other[i], WIRE_PING, 7, NULL, 0, NULL, 0));
        h.core.n_requests = 0;
        cr_assert(loop_until(&h.loop, try_recv, &w, 5000));
        cr_assert_leq(h.core.n_requests, 4, "%d: %u requests were handled before", i, h.core.n_requests);
    }
    close_crowd(crowd);
    for (int i = 0; i < 2; i++)
        raw_close(&other[i]);
    end();
}

static bool has_handled(void *ud)
{
    return h.core.n_requests >= *(const uint32_t *)ud;
}

/* Symptom: who could be written to as well was read from all the same, so that such clients had a turn each. */
Test(conn, a_tenant_whose_clients_read_slowly_has_the_turn_of_one_too)
{
    static raw_client crowd[CROWD], other;
    static uint8_t some[1 << 20];
    const peer_info info = {.uid = getuid(), .tenant = 1};
    uint32_t size = 600000, want = CROWD;
    wanted w = {.client = &other};

    begin();
    for (int i = 0; i < CROWD; i++)
        join_client(&crowd[i]);
    join_tenant(&other, &info);
    h.core.n_requests = 0;
    for (int i = 0; i < CROWD; i++)
        cr_assert(raw_send(&crowd[i], WIRE_STATUS, 100, &size, sizeof size, NULL, 0));
    cr_assert(loop_until(&h.loop, has_handled, &want, 5000));
    for (int i = 0; i < 5; i++)
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    for (int i = 0; i < CROWD; i++) {
        send_slow(&crowd[i], 3);
        cr_assert_gt(recv(crowd[i].fd, some, sizeof some, MSG_DONTWAIT), 0);
    }
    cr_assert(raw_send(&other, WIRE_PING, 7, NULL, 0, NULL, 0));
    h.core.n_requests = 0;
    cr_assert(loop_until(&h.loop, try_recv, &w, 5000));
    cr_assert_leq(h.core.n_requests, 5, "%u requests were handled before", h.core.n_requests);
    close_crowd(crowd);
    raw_close(&other);
    end();
}

Test(conn, the_clients_of_a_tenant_that_has_more_to_do_than_its_time_take_turns)
{
    enum { EACH = 4 };
    static raw_client crowd[CROWD];
    unsigned n[CROWD] = {0}, all = 0;

    begin();
    for (int i = 0; i < CROWD; i++)
        join_client(&crowd[i]);
    for (int i = 0; i < CROWD; i++)
        send_slow(&crowd[i], EACH);
    while (all < CROWD * EACH) {
        unsigned least = EACH, most = 0;

        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
        for (int i = 0; i < CROWD; i++) {
            frame f;

            for (; raw_poll(&crowd[i], &f); all++)
                n[i]++;
            least = n[i] < least ? n[i] : least;
            most = n[i] > most ? n[i] : most;
        }
        cr_assert_leq(most, least + 2, "one has %u answers, another one %u", most, least);
    }
    close_crowd(crowd);
    end();
}

/* Symptom: clients that had sent all of their requests were dropped, because the daemon had not come to read the rest. */
Test(conn, what_the_loop_has_not_read_is_not_unfinished)
{
    static raw_client crowd[CROWD];
    uint8_t ping[WIRE_HEADER_BYTES];
    raw_client c;
    int left = 1;

    begin();
    join_client(&c);
    for (int i = 0; i < CROWD; i++)
        join_client(&crowd[i]);
    h.config.frame_timeout_ms = 30;
    for (int i = 0; i < CROWD; i++)
        send_slow(&crowd[i], 10); /* 60 ms a turn of all of them */
    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 9}, ping);
    cr_assert(raw_write(&c, ping, 20, NULL, 0));
    while (left > 0) {
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
        cr_assert_eq(ioctl(c.fd, SIOCOUTQ, &left), 0);
    }
    cr_assert(raw_write(&c, ping + 20, sizeof ping - 20, NULL, 0));
    expect(&c, WIRE_PING, 9);
    cr_assert_eq(h.host.n_dropped, 0);
    close_crowd(crowd);
    raw_close(&c);
    end();
}

/* Symptom: each look that came while a byte of it was unread gave it all of its time again. */
Test(conn, a_frame_that_drips_beside_a_busy_crowd_is_unfinished_in_the_end)
{
    enum { GAP_MS = 20 };
    static raw_client crowd[CROWD];
    uint8_t ping[WIRE_HEADER_BYTES];
    raw_client c;

    begin();
    join_client(&c);
    for (int i = 0; i < CROWD; i++)
        join_client(&crowd[i]);
    h.config.frame_timeout_ms = 50;
    for (int i = 0; i < CROWD; i++)
        send_slow(&crowd[i], 30); /* 60 ms a turn of all of them, 1.8 s in all */
    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = 9}, ping);
    for (unsigned n = 0; n < 20 && h.host.n_dropped == 0; n++) {
        uint64_t until;
        int left = 1;

        cr_assert(raw_write(&c, ping + n, 1, NULL, 0));
        while (left > 0 && ioctl(c.fd, SIOCOUTQ, &left) == 0)
            (void)uv_run(&h.loop, UV_RUN_NOWAIT);
        for (until = raw_now_ms() + GAP_MS; raw_now_ms() < until && h.host.n_dropped == 0;)
            (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    }
    cr_assert_eq(h.host.n_dropped, 1);
    close_crowd(crowd);
    raw_close(&c);
    end();
}

static bool has_stopped_reading(void *ud)
{
    static uint32_t last, same;

    (void)ud;
    same = h.core.n_requests == last ? same + 1 : 0;
    last = h.core.n_requests;
    return same > 10;
}

Test(conn, stops_reading_while_replies_pile_up_and_loses_none)
{
    uint32_t size = 32768, sent = 0, stopped;
    raw_client c;
    frame f;

    begin();
    h.config.out_high_bytes = 65536;
    join_client(&c);
    for (; sent < 200; sent++)
        cr_assert(raw_send(&c, WIRE_STATUS, sent, &size, 4, NULL, 0));
    cr_assert(loop_until(&h.loop, has_stopped_reading, NULL, 5000));
    stopped = h.core.n_requests;
    cr_assert_lt(stopped, 100, "%u of 200 were handled although nothing is read", stopped);
    for (unsigned i = 0; i < sent; i++) {
        cr_assert(recv_frame(&c, &f));
        cr_assert_eq(f.head.id, i);
        cr_assert_eq(f.head.body_len, size);
    }
    cr_assert_eq(h.host.n_dropped, 0);
    raw_close(&c);
    end();
}

Test(conn, stops_reading_who_has_more_than_an_equal_part_of_what_all_leave_unread)
{
    uint32_t size = 32768, sent = 0, stopped;
    raw_client c, other;
    frame f;

    begin();
    h.config.memory_bytes = 4 * 32768;
    join_client(&c);
    join_client(&other);
    for (; sent < 200; sent++)
        cr_assert(raw_send(&c, WIRE_STATUS, sent, &size, 4, NULL, 0));
    cr_assert(loop_until(&h.loop, has_stopped_reading, NULL, 5000));
    stopped = h.core.n_requests;
    cr_assert_lt(stopped, 100, "%u of 200 were handled although nothing is read", stopped);
    cr_assert_lt(h.host.out_bytes, 6 * 32768);
    cr_assert(raw_send(&other, WIRE_STATUS, 7, &size, 4, NULL, 0));
    cr_assert(recv_frame(&other, &f), "the other one is served");
    for (unsigned i = 0; i < sent; i++) {
        cr_assert(recv_frame(&c, &f));
        cr_assert_eq(f.head.id, i);
    }
    cr_assert_eq(h.host.n_dropped, 0);
    cr_assert_eq(h.host.out_bytes, 0);
    raw_close(&other);
    raw_close(&c);
    end();
}

/* Symptom: 200 clients that sent PINGs and read nothing made 184 MB of replies under limits.memory_bytes of 16 MiB: a reply of 40
 * bytes takes ten times that. */
Test(conn, counts_what_unread_replies_take_not_what_they_say)
{
    uint32_t sent = 0, before;
    size_t unsent;
    int in_socket;
    raw_client c, other;
    const peer *p;
    frame f;

    begin();
    h.config.memory_bytes = 16384;
    join_client(&other);
    join_client(&c);
    before = h.core.n_requests;
    p = h.core.peers; /* the latest */
    cr_assert(!p->ops->is_behind(p->ud));
    (void)fcntl(c.fd, F_SETFL, O_NONBLOCK);
    while (raw_send(&c, WIRE_PING, sent, NULL, 0, NULL, 0)) {
        sent++;
        for (int i = 0; i < 2; i++)
            (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    }
    cr_assert_eq(ioctl(c.fd, FIONREAD, &in_socket), 0);
    unsent = h.core.n_requests - before - (size_t)in_socket / WIRE_HEADER_BYTES;
    cr_assert_gt(unsent, 0);
    cr_assert_geq(h.host.out_bytes, unsent * (sizeof(reply) + WIRE_HEADER_BYTES));
    cr_assert_leq(h.host.out_bytes, 16384 + sizeof(reply) + WIRE_HEADER_BYTES);
    cr_assert(p->ops->is_behind(p->ud), "events would be left out");
    (void)fcntl(c.fd, F_SETFL, 0);
    for (unsigned i = 0; i < sent; i++) {
        cr_assert(recv_frame(&c, &f), "reply %u: the pause is over once it reads", i);
        cr_assert_eq(f.head.id, i);
    }
    cr_assert_eq(h.host.out_bytes, 0);
    raw_close(&other);
    raw_close(&c);
    end();
}

enum { LARGE = 60000 };

/* A PING of `len` bytes of which `part` come, header included. */
static void send_some(raw_client *c, uint64_t id, uint32_t len, size_t part)
{
    static uint8_t bytes[WIRE_HEADER_BYTES + LARGE];

    wire_header_encode(&(wire_header){.op = WIRE_PING, .id = id, .body_len = len}, bytes);
    cr_assert(raw_write(c, bytes, part, NULL, 0));
}

static void send_part(raw_client *c, uint64_t id, size_t part)
{
    send_some(c, id, LARGE, part);
}

static void send_rest(raw_client *c, size_t part)
{
    static uint8_t zeros[WIRE_HEADER_BYTES + LARGE];

    cr_assert(raw_write(c, zeros, sizeof zeros - part, NULL, 0));
}

static bool is_partial_large(void *ud)
{
    (void)ud;
    return h.host.in_bytes >= LARGE - FRAME_START_BYTES;
}

static bool has_two_clients(void *ud)
{
    (void)ud;
    return h.host.n_clients == 2;
}

static bool has_waiting(void *ud)
{
    (void)ud;
    return h.host.waiting != NULL;
}

/* Symptom: large frames that were being read took limits.max_clients times limits.max_body_bytes, for each tenant. */
Test(conn, reads_large_frames_within_the_memory_and_lets_the_others_wait)
{
    raw_client first, second, third, fourth;

    begin();
    h.config.memory_bytes = 80000;
    h.config.frame_timeout_ms = 300;
    join_client(&first);
    join_client(&second);
    join_client(&third);
    join_client(&fourth);
    send_part(&first, 1, 20000);
    cr_assert(loop_until(&h.loop, is_partial_large, NULL, 5000));
    send_part(&second, 2, WIRE_HEADER_BYTES + LARGE);
    cr_assert(loop_until(&h.loop, has_waiting, NULL, 5000));
    send_part(&third, 3, 20000);
    cr_assert(raw_send(&fourth, WIRE_PING, 4, NULL, 0, NULL, 0));
    expect(&fourth, WIRE_PING, 4); /* a small one is no matter */
    cr_assert_leq(h.host.in_bytes, 80000);
    send_rest(&first, 20000);
    expect(&first, WIRE_PING, 1);
    expect(&second, WIRE_PING, 2); /* there is room now */
    send_rest(&third, 20000);
    expect(&third, WIRE_PING, 3);
    cr_assert_eq(h.host.n_dropped, 0);
    send_part(&first, 5, 20000); /* who never comes to the end is dropped, who waited for it is not */
    cr_assert(loop_until(&h.loop, is_partial_large, NULL, 5000));
    send_part(&second, 6, WIRE_HEADER_BYTES + LARGE);
    send_part(&third, 7, 20000);
    cr_assert(loop_until(&h.loop, has_waiting, NULL, 5000));
    raw_close(&third); /* and who goes away meanwhile is gone */
    expect(&second, WIRE_PING, 6);
    cr_assert(loop_until(&h.loop, has_ended, &first, 5000));
    cr_assert(loop_until(&h.loop, has_two_clients, NULL, 5000));
    cr_assert_eq(h.host.waiting, NULL);
    raw_close(&first);
    raw_close(&second);
    raw_close(&fourth);
    end();
    cr_assert_eq(h.host.in_bytes, 0);
}

/* Who waits for memory must hold none that others wait for: such as for an earlier frame, behind which the next one begins. */
Test(conn, large_frames_of_many_that_have_room_for_one_come_to_an_end)
{
    enum { N = 4, EACH = 4, FIRST = 30000 };
    raw_client c[N];

    begin();
    h.config.memory_bytes = 45000;
    for (int i = 0; i < N; i++)
        join_client(&c[i]);
    for (uint64_t k = 1; k <= EACH; k++) {
        const uint32_t len = k % 2 == 1 ? FIRST : LARGE;

        for (int i = 0; i < N; i++)
            send_some(&c[i], k, len, WIRE_HEADER_BYTES + len);
    }
    for (uint64_t k = 1; k <= EACH; k++)
        for (int i = 0; i < N; i++)
            expect(&c[i], WIRE_PING, k);
    cr_assert_eq(h.host.n_dropped, 0);
    for (int i = 0; i < N; i++)
        raw_close(&c[i]);
    end();
    cr_assert_eq(h.host.in_bytes, 0);
}

/* Clients that begin a large request and do not come to its end, in memory for a few of them. */
enum { N_STALLED = 24, STALLED_MEMORY = 200000 };

typedef struct crowd {
    raw_client good, bad[N_STALLED];
    bool drips, comes_back;
    uint64_t dripped_ms;
    uint32_t n_back;
} crowd;

static void begin_and_stall(raw_client *c)
{
    join_as(c, 0);
    cr_assert(raw_send(c, WIRE_HELLO, 1, NULL, 0, NULL, 0));
    send_part(c, 2, 40000);
}

static void go_on(crowd *w)
{
    const uint64_t now_ms = raw_now_ms();

    if (now_ms < w->dripped_ms + 20)
        return;
    w->dripped_ms = now_ms;
    for (int i = 0; i < N_STALLED; i++) {
        if (w->drips)
            (void)send(w->bad[i].fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (w->comes_back && has_ended(&w->bad[i])) {
            raw_close(&w->bad[i]);
            begin_and_stall(&w->bad[i]);
            w->n_back++;
        }
    }
}

static bool is_good_answered(void *ud)
{
    crowd *w = ud;
    wanted answer = {.client = &w->good};

    go_on(w);
    return try_recv(&answer) && answer.frame.head.id == 7;
}

static bool is_memory_taken(void *ud)
{
    (void)ud;
    return h.host.in_bytes + LARGE - FRAME_START_BYTES > STALLED_MEMORY && h.host.waiting != NULL;
}

static void is_served_beside(crowd *w)
{
    begin();
    h.config.memory_bytes = STALLED_MEMORY;
    join_client(&w->good);
    for (int i = 0; i < N_STALLED; i++)
        begin_and_stall(&w->bad[i]);
    cr_assert(loop_until(&h.loop, is_memory_taken, NULL, 5000));
    for (int i = 0; i < 10; i++)
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    for (int i = 0; i < 2; i++) {
        send_part(&w->good, 7, WIRE_HEADER_BYTES + LARGE);
        cr_assert(loop_until(&h.loop, is_good_answered, w, 3000), "those who stall have the memory");
    }
    cr_assert_gt(h.host.n_dropped, 0);
    cr_assert_leq(h.host.in_bytes, STALLED_MEMORY);
    for (int i = 0; i < N_STALLED; i++)
        raw_close(&w->bad[i]);
    raw_close(&w->good);
    end();
    cr_assert_eq(h.host.in_bytes, 0);
    cr_assert_eq(h.host.waiting, NULL);
}

/* Symptom: beside 40 clients that had stalled within a request of 1 MiB, under limits.memory_bytes of 16 MiB, the large request
 * of another one took two or three limits.frame_timeout_ms: those that were dropped left the memory to others that had stalled. */
Test(conn, serves_a_large_request_beside_many_that_stall)
{
    static crowd w;

    is_served_beside(&w);
}

Test(conn, serves_a_large_request_beside_many_that_drip_and_come_back)
{
    static crowd w = {.drips = true, .comes_back = true};

    is_served_beside(&w);
    cr_assert_gt(w.n_back, 0);
}

/* Symptom: 150 clients of one tenant that stalled in large requests made those of another tenant wait for seconds. */
Test(conn, serves_a_large_request_at_once_beside_another_tenant_that_stalls)
{
    static raw_client bad[N_STALLED], good[2];
    peer_info info = {.uid = getuid(), .tenant = 1};
    uint64_t began_ms;

    begin();
    h.config.memory_bytes = STALLED_MEMORY;
    h.config.n_tenants = 2;
    for (int i = 0; i < 2; i++) {
        int fds[2];

        cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        raw_init(&good[i], fds[0]);
        cr_assert_eq(conn_open(&h.host, fds[1], &info, NULL), KVS_OK);
        cr_assert(raw_send(&good[i], WIRE_HELLO, 1, NULL, 0, NULL, 0));
        expect(&good[i], WIRE_HELLO, 1);
    }
    for (int i = 0; i < N_STALLED; i++)
        begin_and_stall(&bad[i]);
    cr_assert(loop_until(&h.loop, has_waiting, NULL, 5000));
    for (int i = 0; i < 10; i++)
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    began_ms = raw_now_ms();
    for (uint64_t id = 2; id < 12; id++) {
        send_part(&good[id % 2], id, WIRE_HEADER_BYTES + LARGE);
        expect(&good[id % 2], WIRE_PING, id);
    }
    cr_assert_lt(raw_now_ms() - began_ms, 400, "it waits for the other tenant");
    cr_assert_eq(h.host.n_dropped, 0);
    send_part(&good[0], 20, 20000); /* in its tenant's part there is room for one: the next one waits for it */
    cr_assert(loop_until(&h.loop, is_partial_large, NULL, 5000));
    send_part(&good[1], 21, WIRE_HEADER_BYTES + LARGE);
    for (int i = 0; i < 20; i++)
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    cr_assert_leq(h.host.in_bytes, 2 * STALLED_MEMORY);
    send_rest(&good[0], 20000);
    expect(&good[0], WIRE_PING, 20);
    expect(&good[1], WIRE_PING, 21);
    for (int i = 0; i < N_STALLED; i++)
        raw_close(&bad[i]);
    for (int i = 0; i < 2; i++)
        raw_close(&good[i]);
    end();
    cr_assert_eq(h.host.in_bytes, 0);
    cr_assert_eq(h.host.n_tenants, 0);
    for (int t = 0; t <= CONFIG_MAX_TENANTS; t++)
        cr_assert(h.host.tenant_in_bytes[t] == 0 && h.host.tenant_waiting[t] == 0, "tenant %d", t);
}

static bool has_passed(void *ud)
{
    return raw_now_ms() >= *(uint64_t *)ud;
}

Test(conn, is_patient_with_a_large_request_while_nobody_waits_for_its_memory)
{
    uint64_t until_ms, began_ms;
    raw_client slow, other;

    begin();
    h.config.frame_timeout_ms = 1500;
    join_client(&slow);
    join_client(&other);
    send_part(&slow, 2, 20000);
    until_ms = raw_now_ms() + 800; /* longer than it would have if somebody waited */
    cr_assert(loop_until(&h.loop, has_passed, &until_ms, 5000));
    send_part(&other, 3, WIRE_HEADER_BYTES + LARGE);
    expect(&other, WIRE_PING, 3);
    send_rest(&slow, 20000);
    expect(&slow, WIRE_PING, 2);
    began_ms = raw_now_ms();
    send_part(&slow, 4, 20000);
    cr_assert(loop_until(&h.loop, has_ended, &slow, 5000));
    cr_assert_geq(raw_now_ms() - began_ms, 1500);
    cr_assert_eq(h.host.n_dropped, 1);
    raw_close(&slow);
    raw_close(&other);
    end();
}

enum { HUGE_BODY = 6 << 20, HUGE_STEP = 128 << 10 };

typedef struct steady {
    raw_client *client;
    size_t sent;
    uint64_t stepped_ms;
} steady;

static bool is_huge_sent(void *ud)
{
    static const uint8_t zeros[HUGE_STEP];
    steady *s = ud;
    size_t left = HUGE_BODY - s->sent;
    ssize_t n;

    if (raw_now_ms() < s->stepped_ms + 20)
        return false;
    s->stepped_ms = raw_now_ms();
    n = send(s->client->fd, zeros, left < HUGE_STEP ? left : HUGE_STEP, MSG_DONTWAIT | MSG_NOSIGNAL);
    s->sent += n > 0 ? (size_t)n : 0;
    return s->sent == HUGE_BODY;
}

/* It takes twice as long as who waits is patient with those that stall. */
Test(conn, lets_a_large_request_that_goes_on_come_to_its_end_whoever_waits)
{
    uint8_t head[WIRE_HEADER_BYTES];
    raw_client huge, other;
    steady s = {.client = &huge};

    begin();
    h.config.max_body_bytes = HUGE_BODY;
    h.config.memory_bytes = 100000;
    join_client(&huge);
    join_client(&other);
    wire_header_encode(&(wire_header){.op = WIRE_STATUS, .id = 2, .body_len = HUGE_BODY}, head);
    cr_assert(raw_write(&huge, head, sizeof head, NULL, 0));
    while (!is_partial_large(NULL)) {
        (void)is_huge_sent(&s);
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    }
    send_part(&other, 3, WIRE_HEADER_BYTES + LARGE);
    cr_assert(loop_until(&h.loop, has_waiting, NULL, 5000));
    cr_assert(loop_until(&h.loop, is_huge_sent, &s, 10000));
    expect(&huge, WIRE_STATUS, 2);
    expect(&other, WIRE_PING, 3);
    cr_assert_eq(h.host.n_dropped, 0);
    raw_close(&huge);
    raw_close(&other);
    end();
}

/* It reads no replies, so nothing more is asked of it; what it had asked is done with. */
Test(conn, holds_no_memory_for_a_large_request_that_was_taken_behind_unread_replies)
{
    raw_client c;

    begin();
    h.config.out_high_bytes = 4096;
    join_client(&c);
    for (uint64_t id = 2; h.host.out_bytes < 4096; id++) {
        cr_assert_lt(id, 100, "the socket takes all replies");
        send_part(&c, id, WIRE_HEADER_BYTES + LARGE);
        for (int i = 0; i < 10; i++)
            (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    }
    cr_assert_eq(h.host.in_bytes, 0);
    raw_close(&c);
    end();
}

/* Its replies may take long yet; what it had begun to ask is not read any more. */
Test(conn, holds_no_memory_for_a_request_that_a_tenant_now_gone_had_begun)
{
    raw_client first, second;

    begin();
    h.config.memory_bytes = 80000;
    join_client(&first);
    join_client(&second);
    cr_assert(raw_send(&first, WIRE_LOOKUP, 1, NULL, 0, NULL, 0));
    send_part(&first, 2, 20000);
    cr_assert(loop_until(&h.loop, is_partial_large, NULL, 5000));
    send_part(&second, 3, 20000);
    cr_assert(loop_until(&h.loop, has_waiting, NULL, 5000));
    h.config.tenants[0].gone = true;
    conns_recheck(&h.host);
    cr_assert_eq(h.host.waiting, NULL);
    cr_assert_eq(h.host.in_bytes, 0);
    fake_release(&h.core);
    expect(&first, WIRE_LOOKUP, 1);
    cr_assert(loop_until(&h.loop, has_ended, &first, 5000));
    cr_assert(loop_until(&h.loop, has_ended, &second, 5000));
    raw_close(&first);
    raw_close(&second);
    end();
}

Test(conn, drops_a_client_that_reads_nothing_for_too_long)
{
    uint32_t size = 1 << 20;
    raw_client c;

    begin();
    h.config.write_timeout_ms = 100;
    join_client(&c);
    cr_assert(raw_send(&c, WIRE_STATUS, 1, &size, 4, NULL, 0));
    cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
    cr_assert_eq(h.host.n_dropped, 1);
    raw_close(&c);
    end();
}

Test(conn, drops_a_client_whose_unsent_replies_pass_the_limit)
{
    uint32_t size = 400000;
    raw_client c;

    begin();
    h.config.out_high_bytes = h.config.out_max_bytes = 1000000;
    join_client(&c);
    for (unsigned i = 0; i < 4; i++)
        cr_assert(raw_send(&c, WIRE_STATUS, i, &size, 4, NULL, 0));
    cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
    cr_assert_eq(h.host.n_dropped, 1);
    raw_close(&c);
    end();
}

Test(conn, drops_a_client_that_never_says_hello)
{
    raw_client c;

    begin();
    h.config.frame_timeout_ms = 60;
    join_as(&c, 0);
    cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
    cr_assert_eq(h.host.n_dropped, 1);
    raw_close(&c);
    end();
}

Test(conn, drops_a_client_that_leaves_a_frame_unfinished)
{
    raw_client c;

    begin();
    join_client(&c);
    h.config.frame_timeout_ms = 60;
    cr_assert(raw_write(&c, "KVS", 3, NULL, 0));
    cr_assert(loop_until(&h.loop, has_ended, &c, 5000));
    cr_assert_eq(h.host.n_dropped, 1);
    raw_close(&c);
    end();
}

static void ping(raw_client *c)
{
    static uint64_t id = 100;
    frame f;

    cr_assert(raw_send(c, WIRE_PING, ++id, NULL, 0, NULL, 0));
    cr_assert(recv_frame(c, &f));
}

static bool looks_and_does_not_wait(void)
{
    (void)uv_run(&h.loop, UV_RUN_NOWAIT); /* what was due now is done */
    return uv_backend_timeout(&h.loop) == 0;
}

/* Ask until it was within the time of the last answer: this machine may have had other things to do. */
static void ask_quickly(raw_client *c)
{
    for (int i = 0; i < 100 && !looks_and_does_not_wait(); i++)
        ping(c);
}

Test(conn, stays_awake_for_a_client_that_asks_again_at_once_and_for_no_longer)
{
    raw_client c;

    begin();
    (void)uv_timer_stop(&h.timer);
    join_client(&c);
    say_hello(&c);
    usleep(2 * CONN_QUICK_US);
    ping(&c);
    cr_assert_not(looks_and_does_not_wait(), "its first question in a while");
    ask_quickly(&c);
    cr_assert(looks_and_does_not_wait());
    usleep(2 * CONN_QUICK_US);
    (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    cr_assert_not(looks_and_does_not_wait(), "it asks no more");
    ping(&c);
    cr_assert_not(looks_and_does_not_wait(), "nor is that soon after an answer");
    raw_close(&c);
    end();
}

/* One that watches once asked in quick succession; since then it only listens. */
Test(conn, does_not_stay_awake_for_events)
{
    raw_client c;
    frame f;

    begin();
    (void)uv_timer_stop(&h.timer);
    join_client(&c);
    say_hello(&c);
    ask_quickly(&c);
    cr_assert(looks_and_does_not_wait());
    for (int i = 0; i < 20; i++) {
        usleep(2 * CONN_QUICK_US);
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
        fake_reply(h.core.peers, WIRE_EVENT, 0, NULL, 0, false);
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
        cr_assert_not(looks_and_does_not_wait(), "after event %d", i);
        cr_assert(recv_frame(&c, &f));
    }
    raw_close(&c);
    end();
}

Test(conn, sleeps_between_quick_questions_where_processors_are_few)
{
    raw_client c;

    cpus = 2;
    begin();
    (void)uv_timer_stop(&h.timer);
    join_client(&c);
    say_hello(&c);
    for (int i = 0; i < 50; i++) {
        ping(&c);
        cr_assert_not(looks_and_does_not_wait());
    }
    raw_close(&c);
    end();
}

Test(conn, has_no_timer_for_a_client_that_is_idle)
{
    raw_client c;

    begin();
    join_client(&c);
    h.config.frame_timeout_ms = 60;
    cr_assert(raw_send(&c, WIRE_PING, 1, NULL, 0, NULL, 0));
    expect(&c, WIRE_PING, 1);
    h.host.due_us = 0;
    conns_check(&h.host, conn_now_us());
    cr_assert_eq(h.host.due_us, UINT64_MAX);
    raw_close(&c);
    end();
}

Test(conn, waits_for_what_a_gone_client_has_left_before_it_is_freed)
{
    raw_client c;

    begin();
    h.core.is_late = true;
    join_client(&c);
    cr_assert(raw_send(&c, WIRE_LOOKUP, 1, NULL, 0, NULL, 0));
    (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    raw_close(&c);
    cr_assert(loop_until(&h.loop, is_peer_gone, NULL, 5000));
    fake_release(&h.core); /* a reply for nobody */
    (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    cr_assert(!conns_gone(&h.host));
    cr_assert_eq(h.host.n_clients, 1, "its place is not free yet");
    fake_finish(&h.core);
    cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
    end();
}

/* A process that connects, leaves the socket to a child of its own, and ends when `go` is closed; the
 * grandchild ends when `stay` is. */
static pid_t connect_and_fork(const struct sockaddr_un *a, socklen_t len, int go[2], int stay[2])
{
    pid_t pid = fork();
    char b;
    int fd;

    if (pid != 0)
        return pid;
    (void)close(go[1]);
    (void)close(stay[1]);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (const struct sockaddr *)a, len) != 0)
        _exit(1);
    if (fork() == 0)
        _exit(read(stay[0], &b, 1) == 1);
    _exit(read(go[0], &b, 1) == 1);
}

Test(conn, ends_with_its_process_even_if_a_child_keeps_the_socket)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    socklen_t len = sizeof a.sun_family, cred_len = sizeof(struct ucred);
    int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), go[2], stay[2], fd;
    struct ucred cred;
    pid_t pid;

    begin();
    cr_assert_eq(bind(listening, (const struct sockaddr *)&a, len), 0); /* a name of the kernel's choice */
    cr_assert_eq(listen(listening, 1), 0);
    len = sizeof a;
    cr_assert_eq(getsockname(listening, (struct sockaddr *)&a, &len), 0);
    cr_assert_eq(pipe(go), 0);
    cr_assert_eq(pipe(stay), 0);
    pid = connect_and_fork(&a, len, go, stay);
    fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    cr_assert_geq(fd, 0);
    cr_assert_eq(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_len), 0);
    cr_assert_eq(cred.pid, pid);
    cr_assert_eq(conn_open(&h.host, fd, &(peer_info){.uid = cred.uid, .pid = cred.pid}, NULL), KVS_OK);
    (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    cr_assert_eq(h.core.n_gone, 0);
    (void)close(go[1]); /* it ends; the grandchild holds the socket on */
    cr_assert(loop_until(&h.loop, is_peer_gone, NULL, 5000));
    (void)close(stay[1]);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    end();
}

Test(conn, survives_clients_that_leave_with_replies_unread)
{
    unsigned before;

    begin();
    before = fds_now();
    for (unsigned i = 0; i < 2000; i++) {
        raw_client c;

        join_as(&c, i % 3 ? 0 : getpid());
        (void)raw_send(&c, WIRE_HELLO, 1, NULL, 0, NULL, 0);
        (void)raw_send(&c, WIRE_PING, 2, NULL, 0, NULL, 0);
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
        if (i % 2)
            (void)raw_send(&c, WIRE_PING, 3, NULL, 0, NULL, 0);
        raw_close(&c);
    }
    cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
    cr_assert_eq(h.core.n_gone, 2000);
    cr_assert_eq(fds_now(), before);
    end();
}

Test(conn, handles_what_was_sent_before_the_client_closed)
{
    raw_client c;

    begin();
    join_client(&c);
    cr_assert(raw_send(&c, WIRE_PING, 2, NULL, 0, NULL, 0));
    while (h.core.n_requests < 2)
        (void)uv_run(&h.loop, UV_RUN_NOWAIT);
    (void)uv_run(&h.loop, UV_RUN_NOWAIT); /* the reply is out, and stays unread: the close will be an error here */
    cr_assert(raw_send(&c, WIRE_PING, 3, NULL, 0, NULL, 0));
    raw_close(&c);
    cr_assert(loop_until(&h.loop, is_gone, NULL, 5000));
    cr_assert_eq(h.core.n_requests, 3);
    end();
}
