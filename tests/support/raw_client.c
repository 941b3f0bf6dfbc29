#include "tests/support/raw_client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { BODY_MAX = 64 << 20, MAX_RIGHTS = 253 };

uint64_t raw_now_ms(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void raw_init(raw_client *c, int fd)
{
    *c = (raw_client){.fd = fd};
    frame_reader_init(&c->reader, BODY_MAX);
}

void raw_close(raw_client *c)
{
    if (c->fd >= 0)
        (void)close(c->fd);
    c->fd = -1;
    frame_reader_fini(&c->reader);
}

bool raw_connect(raw_client *c, const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    raw_init(c, fd);
    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    return fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof a) == 0;
}

bool raw_write(raw_client *c, const void *bytes, size_t len, const int *fds, size_t n_fds)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int) * MAX_RIGHTS)];
    } control;
    const char *p = bytes;

    memset(&control, 0, sizeof control);
    while (len > 0) {
        struct iovec iov = {(void *)(uintptr_t)p, len};
        struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
        ssize_t n;

        if (n_fds > 0) {
            m.msg_control = &control;
            m.msg_controllen = CMSG_SPACE(sizeof(int) * n_fds);
            control.head.cmsg_level = SOL_SOCKET;
            control.head.cmsg_type = SCM_RIGHTS;
            control.head.cmsg_len = CMSG_LEN(sizeof(int) * n_fds);
            memcpy(CMSG_DATA(&control.head), fds, sizeof(int) * n_fds);
        }
        n = sendmsg(c->fd, &m, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return false;
        n_fds = 0;
        p += n;
        len -= (size_t)n;
    }
    return true;
}

bool raw_send(raw_client *c, uint16_t op, uint64_t id, const void *body, uint32_t len, const int *fds, uint16_t n_fds)
{
    wire_header h = {.op = op, .id = id, .body_len = len, .n_fds = n_fds};
    uint8_t *buf = malloc(WIRE_HEADER_BYTES + (size_t)len);
    bool ok;

    if (buf == NULL)
        return false;
    wire_header_encode(&h, buf);
    if (len > 0)
        memcpy(buf + WIRE_HEADER_BYTES, body, len);
    ok = raw_write(c, buf, WIRE_HEADER_BYTES + (size_t)len, fds, n_fds);
    free(buf);
    return ok;
}

/* One read without waiting; false if there was nothing. */
static bool take_in(raw_client *c)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
    } control;
    frame_span want = frame_want(&c->reader);
    struct iovec iov = {want.base, want.len};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int fds[WIRE_MAX_FDS];
    size_t n_fds = 0;
    ssize_t n = recvmsg(c->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0) {
        c->ended = true;
        return false;
    }
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&m); h != NULL; h = CMSG_NXTHDR(&m, h)) {
        n_fds = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(h), n_fds * sizeof(int));
    }
    if (frame_got(&c->reader, (size_t)n, fds, n_fds, NULL) != KVS_OK)
        c->ended = true;
    return true;
}

bool raw_poll(raw_client *c, frame *ret)
{
    while (!frame_next(&c->reader, ret, NULL))
        if (c->ended || !take_in(c))
            return false;
    return true;
}

bool raw_recv(raw_client *c, frame *ret, int timeout_ms)
{
    uint64_t end = raw_now_ms() + (uint64_t)timeout_ms;

    while (!raw_poll(c, ret)) {
        struct pollfd p = {.fd = c->fd, .events = POLLIN};
        uint64_t now = raw_now_ms();

        if (c->ended || now >= end)
            return false;
        (void)poll(&p, 1, (int)(end - now));
    }
    return true;
}

bool raw_wait_end(raw_client *c, int timeout_ms)
{
    uint64_t end = raw_now_ms() + (uint64_t)timeout_ms;
    frame f;

    while (!c->ended && raw_now_ms() < end)
        if (raw_recv(c, &f, (int)(end - raw_now_ms())))
            for (unsigned i = 0; i < f.head.n_fds; i++)
                (void)close(f.fds[i]);
    return c->ended;
}

bool raw_hello(raw_client *c)
{
    uint8_t body[WIRE_hello_req_BYTES + 8];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_hello_req h = {.version_min = WIRE_VERSION, .version_max = WIRE_VERSION, .name_len = 3};
    frame f;

    wire_put_hello_req(&o, &h);
    wire_put_bytes(&o, "raw", 3);
    wire_put_pad8(&o);
    if (!raw_send(c, WIRE_HELLO, 1, body, (uint32_t)o.len, NULL, 0) || !raw_recv(c, &f, 5000))
        return false;
    for (unsigned i = 0; i < f.head.n_fds; i++)
        (void)close(f.fds[i]);
    return f.head.op == WIRE_HELLO && f.head.status == KVS_OK && f.head.id == 1;
}

bool raw_ping(raw_client *c, uint64_t id)
{
    frame f;

    return raw_send(c, WIRE_PING, id, "12345678", 8, NULL, 0) && raw_recv(c, &f, 5000) && f.head.op == WIRE_PING &&
           f.head.status == KVS_OK && f.head.id == id && f.head.n_fds == 0;
}
