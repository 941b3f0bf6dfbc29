#ifndef KVS_DAEMON_NOTIFY_H
#define KVS_DAEMON_NOTIFY_H

/* Notify: what the service manager is told, and the sockets that it hands over.
 *
 * Knows systemd's notification and socket-activation protocols.  Does not know what the daemon does.
 * Main thread only.  Without a service manager every call does nothing.  Owns nothing; notify_sockets gives
 * the descriptors away. */

void notify_ready(void);
void notify_stopping(void);
/* Reload: begins with the time by which the manager orders reloads; notify_ready ends it. */
void notify_reloading(void);
__attribute__((format(printf, 1, 2))) void notify_status(const char *fmt, ...);

/* The passed listening sockets named "client" and "admin" (FileDescriptorName=), or -1.  They are stream
 * sockets that listen, close-on-exec; any other descriptor passed is closed and counted in *ret_strangers. */
void notify_sockets(int *ret_client, int *ret_admin, unsigned *ret_strangers);

#endif
