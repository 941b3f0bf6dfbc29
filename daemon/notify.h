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
#include <stdint.h>

enum { NOTIFY_BYTES = 512, NOTIFY_RETRY_MS = 100, NOTIFY_MAX_KEPT = 4 };

typedef struct notify_keep { /* a descriptor on its way to the manager's store */
    const char *name;
    int fd; /* borrowed; -1: what the store has under that name is removed */
} notify_keep;

typedef struct notify {
    int fd; /* -1: nobody to tell */
    notify_keep keep[NOTIFY_MAX_KEPT];
    unsigned n_keep;         /* that wait, in order, before everything else */
    char late[NOTIFY_BYTES]; /* "": nothing waits */
} notify;

void notify_open(notify *n);
void notify_close(notify *n);

void notify_ready(notify *n, const char *status);
void notify_stopping(notify *n, const char *status);
/* Reload: carries the time by which the manager orders reloads; notify_ready ends it. */
void notify_reloading(notify *n);
void notify_status(notify *n, const char *status);
/* A sign of life, for WatchdogSec=.  Not kept if the manager does not read: the next one is as good. */
void notify_alive(notify *n);
/* How often the manager wants signs of life, in microseconds; 0: not at all. */
uint64_t notify_watchdog_us(void);

/* Give the manager a descriptor that shall outlive this process (the next life finds it in notify_memory), in place of what
 * it has under this name.  fd -1: only forget that.  The name is borrowed for ever. */
void notify_store(notify *n, const char *name, int fd);

/* True while something waits: call again in NOTIFY_RETRY_MS. */
bool notify_retry(notify *n);

/* The passed listening sockets by name (FileDescriptorName=): ret_fds[i] is that of names[i], or -1.  They are stream
 * sockets that listen, close-on-exec; any other descriptor passed is closed and counted in *ret_strangers. */
void notify_sockets(const char *const *names, int *ret_fds, unsigned n, unsigned *ret_strangers);

/* The regular files passed under the names that notify_store was given (two of daemon/persist.h), or -1; the caller's,
 * close-on-exec.  Call it before notify_sockets, which leaves those names alone. */
void notify_memory(int *ret_arena, int *ret_table);

#endif
