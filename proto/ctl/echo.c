#include "proto/ctl/echo.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void serve(int fd)
{
    uint8_t buf[4096];
    struct epoll_event ev = {.events = EPOLLIN}, got;
    int ep = epoll_create1(EPOLL_CLOEXEC);

    if (ep < 0 || epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev) != 0)
        _exit(1);
    for (;;) {
        ssize_t n;

        if (epoll_wait(ep, &got, 1, -1) != 1)
            continue;
        n = recv(fd, buf, sizeof buf, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            _exit(0);
        if (n > 0 && send(fd, buf, (size_t)n, MSG_NOSIGNAL) != n)
            _exit(1);
    }
}

kvs_status echo_start(echo *e, kvs_err *err)
{
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return kvs_fail(err, KVS_E_SYS, "socketpair: %s", strerror(errno));
    (void)fflush(NULL);
    e->pid = fork();
    if (e->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)close(pair[0]);
        serve(pair[1]);
    }
    (void)close(pair[1]);
    e->fd = pair[0];
    if (e->pid > 0)
        return KVS_OK;
    (void)close(pair[0]);
    e->pid = 0;
    return kvs_fail(err, KVS_E_SYS, "fork: %s", strerror(errno));
}

int echo_trip(const echo *e)
{
    uint8_t buf[ECHO_BYTES] = {0};
    ssize_t got = 0, n;

    if (send(e->fd, buf, sizeof buf, MSG_NOSIGNAL) != (ssize_t)sizeof buf)
        return 0;
    while (got < (ssize_t)sizeof buf) {
        n = recv(e->fd, buf + got, sizeof buf - (size_t)got, 0);
        if (n <= 0 && errno != EINTR)
            return 0;
        got += n > 0 ? n : 0;
    }
    return 1;
}

void echo_stop(echo *e)
{
    if (e->pid > 0) {
        (void)close(e->fd);
        (void)waitpid(e->pid, NULL, 0);
        e->pid = 0;
    }
}
