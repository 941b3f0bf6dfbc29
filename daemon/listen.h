#ifndef KVS_DAEMON_LISTEN_H
#define KVS_DAEMON_LISTEN_H

/* Listening sockets: making, guarding and removing their files.
 *
 * Knows paths, modes, locks and who else may own a path.  Does not know the loop, clients or requests.
 * Any thread, one at a time for each path.
 * Owns the socket, the lock beside it and, while it is ours, the file.
 *
 *   PATH       the socket; created with its mode, never wider, not even for a moment
 *   PATH.lock  locked as long as a daemon lives: after SIGKILL the next one takes the stale socket over, but
 * never a live daemon's */

#include <stdbool.h>
#include <sys/types.h>

#include "proto/status.h"

enum { LISTEN_PATH_MAX = 107 }; /* bytes of a socket's path, by sockaddr_un */

typedef struct listen_socket {
    int fd, lock_fd; /* -1: none */
    bool inherited;  /* by socket activation: the file belongs to the service manager */
    dev_t dev;       /* of the file that we made */
    ino_t ino;
    char path[LISTEN_PATH_MAX + 1];
} listen_socket;

/* E_LIMIT: path too long.  E_INVALID: empty or an abstract name.  E_BUSY: another daemon is there (also when
 * its backlog is full).  E_EXISTS: something that is no socket is there; it stays.  E_SYS: the system call
 * and its error.  On failure nothing is left behind. */
kvs_status listen_open(listen_socket *ret, const char *path, mode_t mode, kvs_err *err);

/* Would listen_open work there now?  Changes nothing; a lock that another daemon has is not seen. */
kvs_status listen_check(const char *path, kvs_err *err);

/* A socket that somebody else bound; takes fd. */
void listen_inherit(listen_socket *ret, int fd);

/* Stop listening and remove the file, if it is still the one that we made.  The lock stays. */
void listen_stop(listen_socket *l);
/* listen_stop, and give the lock back.  Any number of times. */
void listen_close(listen_socket *l);

#endif
