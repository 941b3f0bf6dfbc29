#ifndef KVS_DAEMON_NOTIFY_H
#define KVS_DAEMON_NOTIFY_H

/* Notify: what the service manager is told, and the sockets that it hands over.
 *
 * Knows systemd's notification and socket-activation protocols.  Does not know what the daemon does.
 * Main thread only.  Without a service manager every call does nothing.
 * A notify owns its socket; notify_sockets gives the descriptors away.
 *
 * Nothing here blocks: a manager that does not read must not stop the daemon.  What does not fit its queue waits, the
 * latest state in place of earlier ones, until notify_retry gets it through. */

#include <stdbool.h>

enum { NOTIFY_BYTES = 256, NOTIFY_RETRY_MS = 100 };

typedef struct notify {
    int fd;                  /* -1: nobody to tell */
    char late[NOTIFY_BYTES]; /* "": nothing waits */
} notify;

void notify_open(notify *n);
void notify_close(notify *n);

void notify_ready(notify *n, const char *status);
void notify_stopping(notify *n, const char *status);
/* Reload: carries the time by which the manager orders reloads; notify_ready ends it. */
void notify_reloading(notify *n);
void notify_status(notify *n, const char *status);

/* True while something waits: call again in NOTIFY_RETRY_MS. */
bool notify_retry(notify *n);

/* The passed listening sockets by name (FileDescriptorName=): ret_fds[i] is that of names[i], or -1.  They are stream
 * sockets that listen, close-on-exec; any other descriptor passed is closed and counted in *ret_strangers. */
void notify_sockets(const char *const *names, int *ret_fds, unsigned n, unsigned *ret_strangers);

#endif
