/* Sockets: connect with a deadline, one sendmsg, one recvmsg, and a whole exchange for a thread that has the connection to
 * itself. */
#include "proto/client/internal.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

int64_t clock_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t deadline_in(uint32_t ms)
{
    return clock_ns() + (int64_t)ms * 1000000;
}

int poll_until(struct pollfd *p, unsigned n, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - clock_ns();
        struct timespec t;
        int got;

        if (left < 0)
            left = 0;
        t.tv_sec = left / 1000000000;
        t.tv_nsec = left % 1000000000;
        got = ppoll(p, n, &t, NULL);
        if (got >= 0)
            return got;
        if (errno != EINTR)
            return -errno;
    }
}

long link_send(int fd, const uint8_t *p, size_t n, const int *fds, uint32_t n_fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {(void *)(uintptr_t)p, n};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    ssize_t sent;

    if (n_fds > 0) {
        struct cmsghdr *h;

        memset(&control, 0, sizeof control);
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
        h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
        memcpy(CMSG_DATA(h), fds, n_fds * sizeof(int));
    }
    do
        sent = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? -errno : (long)sent;
}

/* Descriptors of a message, [WIRE_MAX_FDS]. */
static size_t take_fds(struct msghdr *m, int *fds)
{
    size_t n = 0;

    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h != NULL; h = CMSG_NXTHDR(m, h)) {
        size_t k;

        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        k = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < k; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
            if (n < WIRE_MAX_FDS)
                fds[n++] = fd;
            else
                (void)close(fd);
        }
    }
    return n;
}

kvs_status link_recv(int fd, frame_reader *r, kvs_err *err)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(WIRE_MAX_FDS * sizeof(int))];
    } control;
    frame_span span = frame_want(r);
    struct iovec iov = {span.base, span.len};
    struct msghdr m = {
        .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    int fds[WIRE_MAX_FDS];
    size_t n_fds;
    ssize_t n;

    if (span.len == 0)
        return kvs_fail(err, KVS_E_NO_MEMORY, "reply: no memory for it");
    do
        n = recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return KVS_E_BUSY;
    if (n < 0)
        return kvs_fail(err, KVS_E_AWAY, "connection to the daemon: %s", strerror(errno));
    if (n == 0)
        return kvs_fail(err, KVS_E_AWAY, "the daemon closed the connection");
    n_fds = take_fds(&m, fds);
    if (m.msg_flags & MSG_CTRUNC) {
        for (size_t i = 0; i < n_fds; i++)
            (void)close(fds[i]);
        return kvs_fail(err, KVS_E_LIMIT,
                        "descriptors from the daemon were cut off after %zu: more than %d, or this "
                        "process is at its limit of open files (RLIMIT_NOFILE)",
                        n_fds, WIRE_MAX_FDS);
    }
    return frame_got(r, (size_t)n, fds, n_fds, err);
}

void frame_close_fds(frame *f)
{
    for (unsigned i = 0; i < f->head.n_fds && i < WIRE_MAX_FDS; i++) {
        if (f->fds[i] >= 0)
            (void)close(f->fds[i]);
        f->fds[i] = -1;
    }
}

bool reply_head(const frame *f, wire_in *in, kvs_err *err)
{
    const uint8_t *text;
    uint32_t n;

    *in = (wire_in){.base = f->body, .len = f->head.body_len};
    if (in->len == 0) /* no message and nothing else: only a refusal may be that short, its reader decides */
        return true;
    n = wire_get_u32(in);
    if (wire_get_u32(in) != 0 || in->bad)
        return false;
    text = wire_get_array(in, n, 1);
    if (in->bad)
        return false;
    if (err == NULL)
        return true;
    if (n > sizeof err->msg - 1)
        n = sizeof err->msg - 1;
    for (uint32_t i = 0; i < n; i++)
        err->msg[i] = text[i] < 32 || text[i] == 127 ? '?' : (char)text[i]; /* it may go to a terminal */
    err->msg[n] = '\0';
    return true;
}

static kvs_status dial_failure(int e, const char *path, kvs_err *err)
{
    switch (e) {
    case ENOENT:
    case ECONNREFUSED:
        return kvs_fail(err, KVS_E_AWAY, "%s: nothing listens there (%s)", path, strerror(e));
    case EACCES:
    case EPERM:
        return kvs_fail(err, KVS_E_DENIED, "%s: %s", path, strerror(e));
    default:
        return kvs_fail(err, KVS_E_SYS, "connect to %s: %s", path, strerror(e));
    }
}

/* A full backlog answers EAGAIN at once and nothing can be polled for: try again, rarer and rarer. */
static kvs_status dial(wire_link *l, const char *path, int64_t deadline, kvs_err *err)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int64_t begin = clock_ns(), pause = 1000000;

    memcpy(a.sun_path, path, strlen(path));
    while (connect(l->fd, (struct sockaddr *)&a, sizeof a) != 0) {
        struct pollfd p = {.fd = l->cancel_fd, .events = POLLIN};
        int64_t now = clock_ns();

        if (errno == EINTR)
            continue;
        if (errno != EAGAIN)
            return dial_failure(errno, path, err);
        if (now >= deadline)
            return kvs_fail(err, KVS_E_BUSY, "%s: the backlog has been full for %lld ms; the daemon does not accept",
                            path, (long long)((now - begin) / 1000000));
        if (poll_until(&p, 1, now + pause < deadline ? now + pause : deadline) > 0)
            return kvs_fail(err, KVS_E_CANCELLED, "%s: connecting was given up", path);
        pause = pause < 16000000 ? pause * 2 : 20000000;
    }
    return KVS_OK;
}

kvs_status link_open(wire_link *l, const char *path, int cancel_fd, int64_t deadline, kvs_err *err)
{
    kvs_status s;

    memset(l, 0, sizeof *l);
    l->cancel_fd = cancel_fd;
    l->next_id = 1;
    frame_reader_init(&l->reader, CLIENT_REPLY_MAX);
    l->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (l->fd < 0)
        return kvs_fail(err, KVS_E_SYS, "socket: %s", strerror(errno));
    s = dial(l, path, deadline, err);
    if (s != KVS_OK)
        link_close(l);
    return s;
}

void link_close(wire_link *l)
{
    frame_reader_fini(&l->reader);
    if (l->fd >= 0)
        (void)close(l->fd);
    l->fd = -1;
}

/* KVS_OK: ready for `events`, or hung up: the call that follows will say. */
static kvs_status await(wire_link *l, short events, int64_t deadline, kvs_err *err)
{
    struct pollfd p[2] = {{.fd = l->fd, .events = events}, {.fd = l->cancel_fd, .events = POLLIN}};
    int got = poll_until(p, 2, deadline);

    if (got < 0)
        return kvs_fail(err, KVS_E_SYS, "poll: %s", strerror(-got));
    if (got == 0)
        return kvs_fail(err, KVS_E_BUSY, "the daemon did not answer in time");
    if (p[1].revents != 0)
        return kvs_fail(err, KVS_E_CANCELLED, "given up");
    return KVS_OK;
}

static kvs_status send_all(wire_link *l, const link_frame *q, int64_t deadline, kvs_err *err)
{
    uint8_t head[WIRE_HEADER_BYTES];
    wire_header h = {.op = q->op, .id = l->next_id, .body_len = (uint32_t)q->len, .n_fds = (uint16_t)q->n_fds};
    size_t total = sizeof head + q->len, sent = 0;

    h.deadline_us = (uint64_t)(deadline - clock_ns()) / 1000;
    if (deadline <= clock_ns())
        h.deadline_us = 1;
    wire_header_encode(&h, head);
    while (sent < total) {
        bool in_head = sent < sizeof head;
        const uint8_t *p = in_head ? head + sent : q->body + (sent - sizeof head);
        long n = link_send(l->fd, p, in_head ? sizeof head - sent : total - sent, q->fds, sent == 0 ? q->n_fds : 0);
        kvs_status s;

        if (n >= 0) {
            sent += (size_t)n;
            continue;
        }
        if (n == -ETOOMANYREFS)
            return kvs_fail(err, KVS_E_LIMIT, "too many descriptors are in flight (RLIMIT_NOFILE)");
        if (n == -EPIPE || n == -ECONNRESET) /* without a word: all its places are taken, or it is ending */
            return kvs_fail(err, KVS_E_AWAY, "the daemon closed the connection");
        if (n != -EAGAIN)
            return kvs_fail(err, KVS_E_AWAY, "send: %s", strerror((int)-n));
        s = await(l, POLLOUT, deadline, err);
        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

kvs_status link_exchange(wire_link *l, const link_frame *q, int64_t deadline, frame *ret, kvs_err *err)
{
    kvs_status s = send_all(l, q, deadline, err);

    while (s == KVS_OK) {
        if (frame_next(&l->reader, ret, err))
            break;
        if (l->reader.broken != KVS_OK)
            return l->reader.broken;
        s = link_recv(l->fd, &l->reader, err);
        if (s == KVS_E_BUSY)
            s = await(l, POLLIN, deadline, err);
    }
    if (s != KVS_OK)
        return s;
    if (ret->head.op != q->op || ret->head.id != l->next_id) {
        frame_close_fds(ret);
        return kvs_fail(err, KVS_E_PROTO, "reply: op %u id %llu where op %u id %llu was due", ret->head.op,
                        (unsigned long long)ret->head.id, q->op, (unsigned long long)l->next_id);
    }
    l->next_id++;
    return KVS_OK;
}
