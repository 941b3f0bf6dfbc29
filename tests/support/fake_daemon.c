#include "tests/support/fake_daemon.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/layout.h"

enum { PIECE = 65536, MAX_REPLY = 1 << 20 };

static void die(const char *what)
{
    (void)fprintf(stderr, "fake daemon: %s: %s\n", what, strerror(errno));
    abort();
}

int fake_memfd(uint64_t bytes, bool sealed)
{
    int fd = memfd_create("fake", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        die("memfd");
    if (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
        die("seals");
    return fd;
}

void fake_bytes(fake_conn *c, const void *p, size_t n)
{
    const uint8_t *at = p;

    while (n > 0) {
        ssize_t k = send(c->fd, at, n, MSG_NOSIGNAL);

        if (k < 0)
            return;
        at += k;
        n -= (size_t)k;
    }
}

void fake_drop(fake_conn *c)
{
    if (c->fd >= 0)
        (void)close(c->fd);
    c->fd = -1;
    frame_reader_fini(&c->reader);
    if (c->counters != NULL)
        (void)munmap(c->counters, WIRE_COUNTER_PAGE_BYTES);
    c->counters = NULL;
}

static void send_frame(fake_conn *c, const frame *q, kvs_status s, const void *payload, size_t len, const int *fds,
                       uint32_t n_fds)
{
    size_t head = q->head.op == WIRE_EVENT ? 0 : 8; /* replies have a message head, events none */
    size_t total = WIRE_HEADER_BYTES + head + len;
    uint8_t *buf = calloc(1, total);
    wire_header h = {.op = q->head.op,
                     .status = (uint16_t)s,
                     .id = q->head.id,
                     .body_len = (uint32_t)(head + len),
                     .n_fds = (uint16_t)n_fds};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {buf, total};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t sent;

    if (buf == NULL)
        die("memory");
    wire_header_encode(&h, buf);
    if (len > 0)
        memcpy(buf + WIRE_HEADER_BYTES + head, payload, len);
    if (n_fds > 0) {
        struct cmsghdr *k;

        memset(&control, 0, sizeof control);
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        k = CMSG_FIRSTHDR(&m);
        k->cmsg_level = SOL_SOCKET;
        k->cmsg_type = SCM_RIGHTS;
        k->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(k), fds, n_fds * sizeof(int));
    }
    sent = sendmsg(c->fd, &m, MSG_NOSIGNAL);
    if (sent >= 0 && (size_t)sent < total)
        fake_bytes(c, buf + sent, total - (size_t)sent);
    free(buf);
}

void fake_reply(fake_conn *c, const frame *q, kvs_status s, const void *payload, size_t len)
{
    send_frame(c, q, s, payload, len, NULL, 0);
}

void fake_reply_fds(fake_conn *c, const frame *q, const void *payload, size_t len, const int *fds, uint32_t n_fds)
{
    send_frame(c, q, KVS_OK, payload, len, fds, n_fds);
}

/* ---- the default answers ---- */

static void serve_hello(fake *f, fake_conn *c, const frame *q)
{
    uint8_t body[WIRE_hello_rep_BYTES + WIRE_hello_devices_BYTES + WIRE_MAX_DEVICES * WIRE_device_entry_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_hello_devices d = {.n_devices = f->n_uuids};
    wire_hello_rep v = {.version = 1,
                        .features = f->n_uuids > 0 ? WIRE_FEATURE_DEVICES : 0,
                        .n_counters = WIRE_COUNTERS,
                        .conn_id = 7,
                        .max_body = 1 << 20,
                        .max_keys = 1 << 15,
                        .credit_requests = f->credit_requests ? f->credit_requests : 64,
                        .control_requests = f->control_requests ? f->control_requests : 8,
                        .credit_bytes = f->credit_bytes ? f->credit_bytes : UINT64_C(1) << 40,
                        .default_deadline_us = 30000000,
                        .max_deadline_us = 600000000};
    int fd = fake_memfd(WIRE_COUNTER_PAGE_BYTES, true);

    v.boot_id[0] = f->boot;
    c->counters = mmap(NULL, WIRE_COUNTER_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (c->counters == MAP_FAILED)
        die("mmap");
    f->last_page = c->counters;
    wire_put_hello_rep(&o, &v);
    if (f->n_uuids > 0)
        wire_put_hello_devices(&o, &d);
    for (uint32_t i = 0; i < f->n_uuids; i++) {
        wire_device_entry e;

        memcpy(e.uuid, f->uuids[i], sizeof e.uuid);
        wire_put_device_entry(&o, &e);
    }
    fake_reply_fds(c, q, body, o.len, &fd, 1);
    (void)close(fd);
}

static void serve_open(fake *f, fake_conn *c, const frame *q)
{
    static kvs_plane planes[KVS_MAX_PLANES];
    uint8_t body[WIRE_open_rep_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_open_rep v = {.ns = ++f->next_ns};
    kvs_namespace ns;
    kvs_err err;

    if (kvs_namespace_decode(q->body, q->head.body_len, planes, KVS_MAX_PLANES, &ns, &err) != KVS_OK ||
        kvs_namespace_digest(&ns, v.digest, &err) != KVS_OK) {
        fake_reply(c, q, KVS_E_PROTO, NULL, 0);
        return;
    }
    v.slot_bytes = kvs_namespace_slot_bytes(&ns);
    wire_put_open_rep(&o, &v);
    fake_reply(c, q, KVS_OK, body, o.len);
}

/* Slots of 4,096 bytes, pieces of 64 KiB. */
static void serve_region(fake *f, fake_conn *c, frame *q)
{
    uint8_t body[WIRE_region_rep_BYTES + 4 * 64] = {0};
    wire_out o = {.base = body, .cap = sizeof body};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_region_rep v = {.region = ++f->next_region, .slot_stride = 4096};
    wire_region_create_req a = {0};
    wire_region_attach_req b = {0};
    wire_region_import_req i = {0};
    int fds[WIRE_MAX_FDS];

    if (q->head.op == WIRE_REGION_CREATE) {
        wire_get_region_create_req(&in, &a);
        v.n_slots = a.n_slots;
        v.bytes = a.kind == WIRE_REGION_SLOTS ? (uint64_t)a.n_slots * 4096 : a.bytes;
        memset(v.token, 0x5a, sizeof v.token);
    } else if (q->head.op == WIRE_REGION_ATTACH) {
        wire_get_region_attach_req(&in, &b);
        v.n_slots = b.mode == WIRE_ATTACH_REOFFER ? b.n_slots : 8;
        v.bytes = b.mode == WIRE_ATTACH_REOFFER ? b.bytes : 8 * 4096;
        v.n_entries = b.n_entries;
        atomic_fetch_add(&f->entries, b.n_entries);
        memcpy(v.token, b.token, sizeof v.token);
    } else {
        wire_get_region_import_req(&in, &i);
        v.n_slots = i.n_slots;
        v.bytes = 4096;
    }
    if (v.n_slots == 0)
        v.slot_stride = 0;
    atomic_fetch_add(&f->fds, q->head.n_fds);
    v.piece_bytes = v.bytes < PIECE ? v.bytes : PIECE;
    if (q->head.op != WIRE_REGION_IMPORT)
        v.n_pieces = (uint32_t)((v.bytes + v.piece_bytes - 1) / v.piece_bytes);
    for (uint32_t k = 0; k < v.n_pieces; k++)
        fds[k] = fake_memfd(v.piece_bytes, true);
    wire_put_region_rep(&o, &v);
    o.len += ((size_t)v.n_entries * 4 + 7) / 8 * 8;
    fake_reply_fds(c, q, body, o.len, fds, v.n_pieces);
    for (uint32_t k = 0; k < v.n_pieces; k++)
        (void)close(fds[k]);
}

static void serve_lookup(fake_conn *c, const frame *q)
{
    uint8_t *body = calloc(1, MAX_REPLY);
    wire_out o = {.base = body, .cap = MAX_REPLY};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_lookup_req v;
    wire_lookup_rep r = {0};
    const uint8_t *keys;
    bool leading = true;

    wire_get_lookup_req(&in, &v);
    keys = wire_get_array(&in, v.n_keys, 32);
    r.n_keys = v.n_keys;
    for (uint32_t i = 0; i < v.n_keys; i++) {
        leading = leading && keys[(size_t)i * 32] == 1;
        r.n_hits += leading;
    }
    wire_put_lookup_rep(&o, &r);
    for (uint32_t i = 0; i < v.n_keys; i++)
        wire_put_u8(&o, keys[(size_t)i * 32] == 1 ? WIRE_KEY_READY : WIRE_KEY_ABSENT);
    wire_put_pad8(&o);
    fake_reply(c, q, KVS_OK, body, o.len);
    free(body);
}

static void serve_load(fake_conn *c, const frame *q)
{
    uint8_t *body = calloc(1, MAX_REPLY);
    wire_out o = {.base = body, .cap = MAX_REPLY};
    wire_in in = {.base = q->body, .len = q->head.body_len};
    wire_load_req v;
    wire_load_rep r;
    const uint8_t *slots;

    wire_get_load_req(&in, &v);
    if (!(v.flags & WIRE_LOAD_BY_LEASE))
        (void)wire_get_array(&in, v.n, 32);
    slots = wire_get_array(&in, v.n, WIRE_slot_ref_BYTES);
    r = (wire_load_rep){v.n, v.n};
    wire_put_load_rep(&o, &r);
    for (uint32_t i = 0; i < v.n; i++) {
        uint32_t slot = wire_at_u32(slots, 2 * (size_t)i);
        wire_load_result one = {KVS_OK, 0, slot, wire_at_u32(slots, 2 * (size_t)i + 1)};

        if (slot == WIRE_NONE32)
            one = (wire_load_result){KVS_OK, WIRE_LOADED_SHARED, i, 100 + i};
        wire_put_load_result(&o, &one);
    }
    fake_reply(c, q, KVS_OK, body, o.len);
    free(body);
}

static void serve_statuses(fake_conn *c, const frame *q, uint32_t n)
{
    uint8_t *body = calloc(1, MAX_REPLY);
    wire_out o = {.base = body, .cap = MAX_REPLY};
    wire_key_rep r = {n, n};

    wire_put_key_rep(&o, &r);
    for (uint32_t i = 0; i < n; i++)
        wire_put_u32(&o, KVS_OK);
    wire_put_pad8(&o);
    fake_reply(c, q, KVS_OK, body, o.len);
    free(body);
}

static void serve_take(fake_conn *c, const frame *q)
{
    uint8_t *body = calloc(1, MAX_REPLY);
    wire_out o = {.base = body, .cap = MAX_REPLY};
    uint32_t n = wire_at_u32(q->body, 1);

    wire_put_u32(&o, n);
    wire_put_u32(&o, 0);
    for (uint32_t i = 0; i < n; i++) {
        wire_put_u32(&o, i);
        wire_put_u32(&o, 10 + i);
    }
    fake_reply(c, q, KVS_OK, body, o.len);
    free(body);
}

static void serve_status(fake_conn *c, const frame *q)
{
    uint8_t body[32];
    wire_out o = {.base = body, .cap = sizeof body};

    wire_put_u32(&o, 12);
    wire_put_u32(&o, 0);
    wire_put_bytes(&o, "{\"fake\":  1}", 12);
    wire_put_pad8(&o);
    fake_reply(c, q, KVS_OK, body, o.len);
}

bool fake_serve(fake *f, fake_conn *c, frame *q)
{
    static const uint8_t zeros[64];

    switch (q->head.op) {
    case WIRE_HELLO:
        serve_hello(f, c, q);
        return true;
    case WIRE_OPEN:
        serve_open(f, c, q);
        return true;
    case WIRE_REGION_CREATE:
    case WIRE_REGION_ATTACH:
    case WIRE_REGION_IMPORT:
        serve_region(f, c, q);
        return true;
    case WIRE_LOOKUP:
        serve_lookup(c, q);
        return true;
    case WIRE_LOAD:
        serve_load(c, q);
        return true;
    case WIRE_STORE:
        serve_statuses(c, q, wire_at_u32(q->body, 2));
        return true;
    case WIRE_SLOT_DROP:
    case WIRE_PIN:
    case WIRE_UNPIN:
    case WIRE_DROP:
        serve_statuses(c, q, wire_at_u32(q->body, 1));
        return true;
    case WIRE_SLOT_TAKE:
        serve_take(c, q);
        return true;
    case WIRE_STATUS:
        serve_status(c, q);
        return true;
    case WIRE_RESET:
    case WIRE_HEALTH:
    case WIRE_RESERVE:
        fake_reply(c, q, KVS_OK, zeros, 32);
        return true;
    case WIRE_CANCEL:
        fake_reply(c, q, KVS_OK, zeros, WIRE_cancel_rep_BYTES);
        return true;
    case WIRE_PING:
        fake_reply(c, q, KVS_OK, q->body, q->head.body_len);
        return true;
    default:
        fake_reply(c, q, KVS_OK, NULL, 0);
        return true;
    }
}

/* ---- the thread ---- */

static void request(fake *f, fake_conn *c, frame *q)
{
    if (q->head.op < 32)
        atomic_fetch_add(&f->ops[q->head.op], 1);
    if (f->hook == NULL || !f->hook(f, c, q))
        (void)fake_serve(f, c, q);
    for (uint32_t i = 0; i < q->head.n_fds; i++)
        if (q->fds[i] >= 0)
            (void)close(q->fds[i]);
}

static void readable(fake *f, fake_conn *c)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
    } control;
    frame_span span = frame_want(&c->reader);
    struct iovec iov = {span.base, span.len};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(c->fd, &m, MSG_CMSG_CLOEXEC);
    int fds[WIRE_MAX_FDS];
    size_t n_fds = 0;
    frame q;

    for (struct cmsghdr *h = n > 0 ? CMSG_FIRSTHDR(&m) : NULL; h != NULL; h = CMSG_NXTHDR(&m, h)) {
        n_fds = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(h), n_fds * sizeof(int));
    }
    if (n <= 0 || frame_got(&c->reader, (size_t)n, fds, n_fds, NULL) != KVS_OK) {
        fake_drop(c);
        return;
    }
    while (c->fd >= 0 && frame_next(&c->reader, &q, NULL))
        request(f, c, &q);
}

static void accept_one(fake *f)
{
    int fd = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);

    atomic_fetch_add(&f->attempts, 1);
    for (int i = 0; fd >= 0 && i < FAKE_CONNS; i++) {
        if (f->conns[i].fd >= 0)
            continue;
        f->conns[i].fd = fd;
        frame_reader_init(&f->conns[i].reader, 1 << 20);
        return;
    }
    if (fd >= 0)
        (void)close(fd);
}

static void *fake_main(void *ud)
{
    fake *f = ud;

    while (!atomic_load(&f->stopping)) {
        struct pollfd p[FAKE_CONNS + 2];

        p[0] = (struct pollfd){.fd = f->wake, .events = POLLIN};
        p[1] = (struct pollfd){.fd = f->listener, .events = POLLIN};
        for (int i = 0; i < FAKE_CONNS; i++)
            p[i + 2] = (struct pollfd){.fd = atomic_load(&f->deaf) ? -1 : f->conns[i].fd, .events = POLLIN};
        if (poll(p, FAKE_CONNS + 2, atomic_load(&f->deaf) ? 5 : -1) <= 0)
            continue;
        for (int i = 0; i < FAKE_CONNS; i++)
            if (p[i + 2].revents != 0 && f->conns[i].fd >= 0)
                readable(f, &f->conns[i]);
        if (p[1].revents & POLLIN)
            accept_one(f);
    }
    for (int i = 0; i < FAKE_CONNS; i++)
        fake_drop(&f->conns[i]);
    return NULL;
}

void fake_init(fake *f)
{
    char folder[] = "/tmp/kvs-fake-XXXXXX";

    memset(f, 0, sizeof *f);
    if (mkdtemp(folder) == NULL)
        die("mkdtemp");
    (void)snprintf(f->path, sizeof f->path, "%s/sock", folder);
}

void fake_start(fake *f)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};

    memcpy(a.sun_path, f->path, strlen(f->path) + 1);
    f->boot++;
    f->next_ns = 40u * f->boot; /* other numbers in each life */
    f->next_region = 70u * f->boot;
    atomic_store(&f->stopping, false);
    for (int i = 0; i < FAKE_CONNS; i++)
        f->conns[i].fd = -1;
    f->wake = eventfd(0, EFD_CLOEXEC);
    f->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (f->wake < 0 || f->listener < 0 || bind(f->listener, (struct sockaddr *)&a, sizeof a) != 0 ||
        listen(f->listener, 16) != 0 || pthread_create(&f->thread, NULL, fake_main, f) != 0)
        die("start");
}

void fake_stop(fake *f)
{
    uint64_t one = 1;

    (void)unlink(f->path);
    atomic_store(&f->stopping, true);
    if (write(f->wake, &one, sizeof one) != sizeof one)
        die("wake");
    (void)pthread_join(f->thread, NULL);
    (void)close(f->wake);
    (void)close(f->listener);
}

void fake_fini(fake *f)
{
    *strrchr(f->path, '/') = '\0';
    (void)rmdir(f->path);
}
