#include "tests/support/echo_server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FRAME = 65536, BATCH = 64, BACKLOG = 64 };

typedef struct echo_client {
    int fd;
    size_t have;
    uint8_t buf[MAX_FRAME];
} echo_client;

/* Yardsticks are run with frames far smaller than a socket's buffer: a reply that does not fit at once ends
 * the client. */
static _Bool answer(echo_client *c, size_t frame_bytes)
{
    ssize_t n = recv(c->fd, c->buf + c->have, frame_bytes - c->have, 0);

    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    if (n <= 0)
        return 0;
    c->have += (size_t)n;
    if (c->have < frame_bytes)
        return 1;
    c->have = 0;
    return send(c->fd, c->buf, frame_bytes, MSG_NOSIGNAL) == (ssize_t)frame_bytes;
}

static void let_in(int ep, int listen_fd)
{
    echo_client *c = malloc(sizeof *c);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (c == NULL || fd < 0 || epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e) != 0) {
        if (fd >= 0)
            (void)close(fd);
        free(c);
        return;
    }
    c->fd = fd;
    c->have = 0;
}

int echo_server_main(int listen_fd, size_t frame_bytes)
{
    struct epoll_event ready[BATCH], listening = {.events = EPOLLIN};
    int ep = epoll_create1(EPOLL_CLOEXEC);

    if (ep < 0 || frame_bytes == 0 || frame_bytes > MAX_FRAME ||
        epoll_ctl(ep, EPOLL_CTL_ADD, listen_fd, &listening) != 0)
        return 1;
    for (;;) {
        int n = epoll_wait(ep, ready, BATCH, -1);

        if (n < 0 && errno != EINTR)
            return 1;
        for (int i = 0; i < n; i++) {
            echo_client *c = ready[i].data.ptr;

            if (c == NULL) {
                let_in(ep, listen_fd);
            } else if (!answer(c, frame_bytes)) {
                (void)close(c->fd);
                free(c);
            }
        }
    }
}

static socklen_t address(struct sockaddr_un *a, const char *path)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    (void)snprintf(a->sun_path, sizeof a->sun_path, "%s", path);
    return sizeof *a;
}

pid_t echo_start(const char *path, size_t frame_bytes)
{
    struct sockaddr_un a;
    socklen_t len = address(&a, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pid_t pid = -1;

    if (fd >= 0 && bind(fd, (const struct sockaddr *)&a, len) == 0 && listen(fd, BACKLOG) == 0)
        pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* not to outlive a bench that was interrupted */
        _exit(echo_server_main(fd, frame_bytes));
    }
    if (fd >= 0)
        (void)close(fd);
    return pid;
}

void echo_stop(pid_t pid, const char *path)
{
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    (void)unlink(path);
}

int echo_connect(const char *path)
{
    struct sockaddr_un a;
    socklen_t len = address(&a, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0 && connect(fd, (const struct sockaddr *)&a, len) != 0) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

static uint64_t now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

_Bool echo_measure(int fd, size_t frame_bytes, uint64_t *samples, size_t n)
{
    uint8_t buf[MAX_FRAME] = {0};

    for (size_t i = 0; i < n; i++) {
        uint64_t start = now_ns();
        size_t have = 0;

        if (send(fd, buf, frame_bytes, MSG_NOSIGNAL) != (ssize_t)frame_bytes)
            return 0;
        while (have < frame_bytes) {
            ssize_t got = recv(fd, buf + have, frame_bytes - have, 0);

            if (got <= 0)
                return 0;
            have += (size_t)got;
        }
        samples[i] = now_ns() - start;
    }
    return 1;
}

static int compare(const void *x, const void *y)
{
    uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;

    return (a > b) - (a < b);
}

uint64_t echo_quantile(uint64_t *samples, size_t n, unsigned per_mille)
{
    size_t i = n * per_mille / 1000;

    if (n == 0)
        return 0;
    qsort(samples, n, sizeof *samples, compare);
    return samples[i < n ? i : n - 1];
}
