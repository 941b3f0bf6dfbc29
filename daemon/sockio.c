#include "daemon/sockio.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/disposal.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

enum { SEND_BATCH = 32, DRAIN_BYTES = 16384 };

/* What else may be there (credentials) carries no descriptors. */
static size_t take_fds(struct msghdr *m, int *fds)
{
    size_t n = 0;

    for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h != NULL; h = CMSG_NXTHDR(m, h)) {
        size_t k;

        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        k = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < k && n < SOCKIO_MAX_FDS; i++)
            memcpy(&fds[n++], CMSG_DATA(h) + i * sizeof(int), sizeof(int));
    }
    return n;
}

ssize_t sockio_receive(int fd, void *base, size_t len, int fds[SOCKIO_MAX_FDS], size_t *ret_n_fds)
{
    union { /* aligned for the header */
        struct cmsghdr head;
        char bytes[SOCKIO_CONTROL_BYTES];
    } control;
    struct iovec iov = {base, len};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;

    *ret_n_fds = 0;
    do
        n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return n;
    *ret_n_fds = take_fds(&m, fds);
    if ((m.msg_flags & MSG_CTRUNC) == 0 && (n > 0 || *ret_n_fds == 0))
        return n;
    while (*ret_n_fds > 0)
        disposal_close(fds[--*ret_n_fds]);
    errno = EBADMSG;
    return -1;
}

void sockio_close(int fd)
{
    uint8_t bytes[DRAIN_BYTES];
    int fds[SOCKIO_MAX_FDS];
    size_t n_fds;
    ssize_t n;

    (void)shutdown(fd,
                   SHUT_RDWR); /* from here on nothing more can arrive: what there is ends with the socket's buffer */
    do {
        n = sockio_receive(fd, bytes, sizeof bytes, fds, &n_fds);
        while (n_fds > 0)
            disposal_close(fds[--n_fds]);
    } while (n > 0 || (n < 0 && errno == EBADMSG));
    (void)close(fd);
}

static size_t gather(const reply *first, struct iovec *iov)
{
    size_t n = 0;

    for (const reply *r = first; r != NULL && n < SEND_BATCH; r = r->next) {
        if (n > 0 && r->n_fds > 0)
            break;
        iov[n].iov_base = (void *)(uintptr_t)(r->bytes + r->sent); /* sendmsg only reads */
        iov[n++].iov_len = r->len - r->sent;
    }
    return n;
}

ssize_t sockio_send(int fd, const reply *first)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
    } control;
    struct iovec iov[SEND_BATCH];
    struct msghdr m = {.msg_iov = iov, .msg_iovlen = gather(first, iov)};
    size_t fd_bytes = sizeof(int) * first->n_fds;
    ssize_t n;

    if (first->n_fds > 0 && first->n_fds <= WIRE_MAX_FDS && first->sent == 0) {
        memset(&control, 0, sizeof control);
        m.msg_control = &control;
        m.msg_controllen = CMSG_SPACE(fd_bytes);
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(fd_bytes);
        memcpy(CMSG_DATA(&control.head), first->fds, fd_bytes);
    }
    do
        n = sendmsg(fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n;
}

bool sockio_is_hung_up(int fd)
{
    struct pollfd p = {.fd = fd};

    return poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLERR)) != 0;
}

int sockio_peer_process(int fd, pid_t pid)
{
    socklen_t len = sizeof(int);
    int pid_fd = -1;

    if (pid <= 0)
        return -1;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pid_fd, &len) == 0)
        return pid_fd;
    if (errno != ENOPROTOOPT)
        return -1; /* dead already: its number may be another's by now */
    return (int)syscall(SYS_pidfd_open, pid, 0);
}
