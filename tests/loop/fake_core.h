#ifndef KVS_TESTS_LOOP_FAKE_CORE_H
#define KVS_TESTS_LOOP_FAKE_CORE_H

/* A request layer for tests of the connection and the server: it answers a few ops by simple rules, and
 * counts.
 *
 * Knows nothing that the real one knows.  Included by one file of a test program, whose definitions take the
 * place of those in the archive.  One thread.
 *
 *   PING    the body back           STATUS  a reply of as many bytes as the body's u32 says
 *   HEALTH  a reply with one descriptor (the body back, too)
 *   LOOKUP  answered later, by fake_release        WATCH   answered by a worker's completion (fake_post)
 *   RESERVE the loop is kept for as many us as the body's u32 says
 *   CANCEL  fails: the connection is at fault */

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/request.h"

struct core {
    work_sink sink;
    uint32_t n_peers, n_requests, n_fds, n_gone, n_ticks;
    uint64_t due_us;
    bool is_late; /* peer_gone ends only with fake_finish */
    peer *peers;
};

struct peer {
    core *core;
    const peer_ops *ops;
    void *ud;
    peer *next;
    peer_info info;
    uint64_t waiting[64]; /* ids of LOOKUPs */
    uint32_t n_waiting;
    bool hello, gone, dismissed;
};

void reply_destroy(reply *r)
{
    if (r == NULL)
        return;
    for (uint32_t i = 0; i < r->n_fds; i++)
        (void)close(r->fds[i]);
    free(r->fds);
    free(r);
}

static void fake_reply(peer *p, uint16_t op, uint64_t id, const uint8_t *body, uint32_t len, bool with_fd)
{
    wire_header h = {.op = op, .id = id, .body_len = len, .n_fds = with_fd};
    reply *r = calloc(1, sizeof *r + WIRE_HEADER_BYTES + len);

    h.status = p->info.denied[0] != '\0' ? KVS_E_DENIED : KVS_OK;
    if (r == NULL)
        abort();
    r->len = WIRE_HEADER_BYTES + len;
    r->held = sizeof *r + r->len;
    wire_header_encode(&h, r->bytes);
    if (body != NULL)
        memcpy(r->bytes + WIRE_HEADER_BYTES, body, len);
    if (with_fd) {
        r->fds = malloc(sizeof(int));
        r->n_fds = 1;
        r->fds[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    p->ops->send(p->ud, r);
}

kvs_status peer_create(peer **ret, core *c, const peer_ops *ops, void *ud, const peer_info *info, uint64_t now_us,
                       kvs_err *err)
{
    peer *p = calloc(1, sizeof *p);

    (void)now_us;
    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "fake");
    *p = (peer){.core = c, .ops = ops, .ud = ud, .info = *info, .next = c->peers};
    c->peers = p;
    c->n_peers++;
    *ret = p;
    return KVS_OK;
}

static void fake_work(uint32_t us)
{
    struct timespec begin, now;

    (void)clock_gettime(CLOCK_MONOTONIC, &begin);
    do
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000000 + (now.tv_nsec - begin.tv_nsec) / 1000 < us);
}

kvs_status peer_request(peer *p, frame *f, uint64_t now_us, kvs_err *err)
{
    (void)now_us;
    p->core->n_requests++;
    p->core->n_fds += f->head.n_fds;
    for (uint32_t i = 0; i < f->head.n_fds; i++)
        (void)close(f->fds[i]);
    if (p->info.denied[0] != '\0') {
        fake_reply(p, f->head.op, f->head.id, NULL, 0, false);
        return KVS_E_DENIED;
    }
    switch (f->head.op) {
    case WIRE_STATUS:
        fake_reply(p, f->head.op, f->head.id, NULL, wire_at_u32(f->body, 0), false);
        return KVS_OK;
    case WIRE_LOOKUP:
        p->waiting[p->n_waiting++ % 64] = f->head.id;
        return KVS_OK;
    case WIRE_RESERVE:
        fake_work(wire_at_u32(f->body, 0));
        break;
    case WIRE_CANCEL:
        return kvs_fail(err, KVS_E_PROTO, "fake fault \"quoted\"");
    case WIRE_HELLO:
        p->hello = true;
        break;
    default:
        break;
    }
    fake_reply(p, f->head.op, f->head.id, f->body, f->head.body_len, f->head.op == WIRE_HEALTH);
    return KVS_OK;
}

uint32_t peer_in_flight(const peer *p)
{
    return p->n_waiting;
}

bool peer_said_hello(const peer *p)
{
    return p->hello;
}

uint64_t peer_conn_id(const peer *p)
{
    (void)p;
    return 1;
}

static void fake_end(peer *p)
{
    for (peer **at = &p->core->peers; *at != NULL; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    p->core->n_peers--;
    p->ops->closed(p->ud);
    free(p);
}

void peer_gone(peer *p, uint64_t now_us)
{
    (void)now_us;
    if (p->gone)
        abort();
    p->gone = true;
    p->core->n_gone++;
    if (!p->core->is_late)
        fake_end(p);
}

/* What a late peer_gone promised. */
__attribute__((unused)) static void fake_finish(core *c)
{
    peer *next;

    for (peer *p = c->peers; p != NULL; p = next) {
        next = p->next;
        if (p->gone)
            fake_end(p);
    }
}

/* Answer the LOOKUPs that wait. */
__attribute__((unused)) static void fake_release(core *c)
{
    for (peer *p = c->peers; p != NULL; p = p->next) {
        uint32_t n = p->n_waiting;

        p->n_waiting = 0;
        for (uint32_t i = 0; i < n && !p->gone; i++)
            fake_reply(p, WIRE_LOOKUP, p->waiting[i % 64], NULL, 0, false);
    }
}

void peer_dismiss(peer *p)
{
    p->dismissed = true;
}

uint64_t core_tick(core *c, uint64_t now_us)
{
    c->n_ticks++;
    if (now_us >= c->due_us)
        c->due_us = UINT64_MAX;
    return c->due_us;
}

uint64_t core_next_due(const core *c)
{
    return c->due_us;
}

#endif
