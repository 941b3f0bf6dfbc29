#include "daemon/request.h"

#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "tests/support/sink.h"

/* A client that sends anything: [op u8][length u8 x 8][body] ... to a daemon on the cpu device.  Each request gets one
 * reply, and when the client is gone nothing is left of it. */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct client {
    peer *peer;
    uint64_t n_replies;
    bool closed;
} client;

static void on_send(void *ud, reply *r)
{
    client *c = ud;
    wire_header h;

    if (wire_header_decode(r->bytes, UINT32_MAX, &h, NULL) != KVS_OK || r->len != WIRE_HEADER_BYTES + h.body_len)
        abort();
    c->n_replies += h.op != WIRE_EVENT;
    reply_destroy(r);
}

static size_t on_out_bytes(const void *ud)
{
    (void)ud;
    return 0;
}

static void on_closed(void *ud)
{
    ((client *)ud)->closed = true;
}

static const peer_ops ops = {on_send, on_out_bytes, on_closed};
static config cfg;
static sink posts;
static core *daemon_core;
static uint64_t now_us = 1000000;

static void start(void)
{
    device *dev = NULL;

    config_default(&cfg);
    cfg.pool_max_bytes = CONFIG_MIB(1);
    cfg.device_max_region_bytes = CONFIG_MIB(1);
    sink_init(&posts);
    if (device_cpu_open(&dev, NULL) != KVS_OK ||
        core_create(&daemon_core, &cfg, dev, sink_face(&posts), now_us, NULL) != KVS_OK)
        abort();
    while (!core_is_ready(daemon_core))
        (void)sink_run_until(&posts, posts.done + 1);
}

static void send_frame(client *c, uint16_t op, uint64_t id, const uint8_t *body, size_t len)
{
    frame f = {.head = {.op = op, .id = id, .body_len = (uint32_t)len}};
    uint8_t *copy = malloc(len + 1);

    if (!copy)
        abort();
    if (len > 0)
        memcpy(copy, body, len);
    f.body = copy;
    if (peer_request(c->peer, &f, now_us, NULL) != KVS_OK)
        abort();
    free(copy);
    while (posts.done < sink_posted(&posts))
        (void)sink_run_until(&posts, posts.done + 1);
}

static void finish(client *c, uint64_t sent)
{
    now_us += 60000000; /* past every deadline and lease */
    (void)core_tick(daemon_core, now_us);
    while (peer_in_flight(c->peer) > 0)
        if (!sink_run_until(&posts, posts.done + 1))
            abort();
    if (c->n_replies != sent)
        abort();
    peer_gone(c->peer, now_us);
    while (!c->closed)
        if (!sink_run_until(&posts, posts.done + 1))
            abort();
    if (!core_is_idle(daemon_core))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t hello[24] = {1, 0, 1, 0};
    peer_info info = {0};
    client c = {0};
    uint64_t sent = 1;
    uint16_t op;

    if (!daemon_core)
        start();
    if (size > 0 && data[0] & 1)
        info.is_admin = true;
    if (peer_create(&c.peer, daemon_core, &ops, &c, &info, now_us, NULL) != KVS_OK)
        abort();
    send_frame(&c, WIRE_HELLO, 1, hello, sizeof(hello));
    for (size_t at = 1; at + 2 <= size;) {
        size_t len = (size_t)data[at + 1] * 8;

        if (len > size - at - 2)
            len = size - at - 2;
        /* Not EVENT's own number: its refusal would look like an event. */
        op = data[at] % (WIRE_EVENT + 1);
        send_frame(&c, op == WIRE_EVENT ? 999 : op, ++sent, data + at + 2, len);
        at += 2 + len;
    }
    finish(&c, sent);
    return 0;
}
