#include "daemon/notify.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

#include "daemon/persist.h"

void notify_open(notify *n)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t len = path != NULL ? strlen(path) : 0;

    *n = (notify){.fd = -1};
    if (len < 2 || len >= sizeof a.sun_path || (path[0] != '/' && path[0] != '@'))
        return;
    memcpy(a.sun_path, path, len);
    if (path[0] == '@')
        a.sun_path[0] = '\0';
    n->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (n->fd >= 0 &&
        connect(n->fd, (const struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) != 0)
        notify_close(n);
}

void notify_close(notify *n)
{
    if (n->fd >= 0)
        (void)close(n->fd);
    n->fd = -1;
    n->late[0] = '\0';
    n->n_keep = 0;
}

static bool send_keep(const notify *n, const notify_keep *k)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
    char text[NOTIFY_BYTES];
    struct iovec v = {.iov_base = text};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    struct cmsghdr *c;

    v.iov_len =
        (size_t)snprintf(text, sizeof text, "%s\nFDNAME=%s", k->fd < 0 ? "FDSTOREREMOVE=1" : "FDSTORE=1", k->name);
    if (k->fd >= 0) {
        m.msg_control = control;
        m.msg_controllen = sizeof control;
        c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(c), &k->fd, sizeof k->fd);
    }
    return sendmsg(n->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 || errno != EAGAIN;
}

static bool send_kept(notify *n)
{
    unsigned sent = 0;

    while (sent < n->n_keep && send_keep(n, &n->keep[sent]))
        sent++;
    n->n_keep -= sent;
    memmove(n->keep, n->keep + sent, n->n_keep * sizeof n->keep[0]);
    return n->n_keep == 0;
}

void notify_store(notify *n, const char *name, int fd)
{
    if (n->fd < 0 || n->n_keep + 2 > NOTIFY_MAX_KEPT)
        return;
    n->keep[n->n_keep++] = (notify_keep){name, -1};
    if (fd >= 0)
        n->keep[n->n_keep++] = (notify_keep){name, fd};
    (void)notify_retry(n);
}

bool notify_retry(notify *n)
{
    if (n->fd < 0)
        return false;
    if (!send_kept(n))
        return true;
    if (n->late[0] == '\0')
        return false;
    if (send(n->fd, n->late, strlen(n->late), MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EAGAIN)
        return true;
    n->late[0] = '\0';
    return false;
}

void notify_ready(notify *n, const char *status)
{
    (void)snprintf(n->late, sizeof n->late, "READY=1\nSTATUS=%s", status);
    (void)notify_retry(n);
}

void notify_stopping(notify *n, const char *status)
{
    (void)snprintf(n->late, sizeof n->late, "STOPPING=1\nSTATUS=%s", status);
    (void)notify_retry(n);
}

void notify_reloading(notify *n)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    (void)snprintf(n->late, sizeof n->late, "RELOADING=1\nMONOTONIC_USEC=%llu",
                   (unsigned long long)t.tv_sec * 1000000ULL + (unsigned long long)t.tv_nsec / 1000);
    (void)notify_retry(n);
}

void notify_status(notify *n, const char *status)
{
    if (n->late[0] != '\0' || n->n_keep > 0)
        return; /* a state that waits is worth more */
    (void)snprintf(n->late, sizeof n->late, "STATUS=%s", status);
    (void)notify_retry(n);
}

void notify_alive(notify *n)
{
    static const char TEXT[] = "WATCHDOG=1";

    if (n->fd >= 0)
        (void)send(n->fd, TEXT, sizeof TEXT - 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

uint64_t notify_watchdog_us(void)
{
    uint64_t us = 0;

    return sd_watchdog_enabled(0, &us) > 0 ? us : 0;
}

static bool is_memory(const char *name)
{
    return strcmp(name, PERSIST_ARENA) == 0 || strcmp(name, PERSIST_TABLE) == 0;
}

static void free_names(char **names, int n)
{
    for (int i = 0; i < n && names != NULL; i++)
        free(names[i]);
    free(names);
}

void notify_memory(int *ret_arena, int *ret_table)
{
    char **names = NULL;
    int n = sd_listen_fds_with_names(0, &names);

    *ret_arena = *ret_table = -1;
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        const char *name = names != NULL && names[i] != NULL ? names[i] : "";
        int *place = strcmp(name, PERSIST_ARENA) == 0 ? ret_arena : ret_table;
        struct stat st;

        if (!is_memory(name))
            continue;
        if (*place < 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
            *place = fd;
        else
            (void)close(fd);
    }
    free_names(names, n);
}

static int *place_of(const char *name, const char *const *names, int *fds, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        if (strcmp(name, names[i]) == 0)
            return &fds[i];
    return NULL;
}

void notify_sockets(const char *const *names, int *ret_fds, unsigned n, unsigned *ret_strangers)
{
    char **given = NULL;
    int n_given = sd_listen_fds_with_names(1, &given);

    for (unsigned i = 0; i < n; i++)
        ret_fds[i] = -1;
    *ret_strangers = 0;
    for (int i = 0; i < n_given; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        const char *name = given != NULL && given[i] != NULL ? given[i] : "";
        int *place = place_of(name, names, ret_fds, n);

        if (is_memory(name))
            continue;
        if (place != NULL && *place < 0 && sd_is_socket_unix(fd, SOCK_STREAM, 1, NULL, 0) > 0) {
            *place = fd;
        } else {
            (void)close(fd);
            ++*ret_strangers;
        }
    }
    free_names(given, n_given);
}
