#include "daemon/notify.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <systemd/sd-daemon.h>
#include <time.h>
#include <unistd.h>

void notify_ready(void)
{
    (void)sd_notify(0, "READY=1");
}

void notify_stopping(void)
{
    (void)sd_notify(0, "STOPPING=1");
}

void notify_reloading(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    (void)sd_notifyf(0, "RELOADING=1\nMONOTONIC_USEC=%llu",
                     (unsigned long long)t.tv_sec * 1000000ULL + (unsigned long long)t.tv_nsec / 1000);
}

void notify_status(const char *fmt, ...)
{
    char text[256];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    (void)sd_notifyf(0, "STATUS=%s", text);
}

void notify_sockets(int *ret_client, int *ret_admin, unsigned *ret_strangers)
{
    char **names = NULL;
    int n = sd_listen_fds_with_names(1, &names);

    *ret_client = *ret_admin = -1;
    *ret_strangers = 0;
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        const char *name = names != NULL && names[i] != NULL ? names[i] : "";
        int *place = strcmp(name, "client") == 0 ? ret_client : strcmp(name, "admin") == 0 ? ret_admin : NULL;

        if (place != NULL && *place < 0 && sd_is_socket_unix(fd, SOCK_STREAM, 1, NULL, 0) > 0) {
            *place = fd;
        } else {
            (void)close(fd);
            ++*ret_strangers;
        }
    }
    for (int i = 0; i < n && names != NULL; i++)
        free(names[i]);
    free(names);
}
