#ifndef KVS_DAEMON_SOCKIO_H
#define KVS_DAEMON_SOCKIO_H

/* Socket I/O: bytes with descriptors, one system call at a time.
 *
 * Knows recvmsg, sendmsg and their control messages.  Does not know the loop, frames or connections.  Any
 * thread. Descriptors that sockio_receive returns are the caller's; replies stay the caller's. */

#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "daemon/request.h"

enum {
    SOCKIO_MAX_FDS =
        253, /* the kernel's limit of one message.  The frame reader has a tighter one; but what did not fit here
                             the kernel would close, on this thread */
    SOCKIO_CONTROL_BYTES = CMSG_SPACE(sizeof(int) * SOCKIO_MAX_FDS) + CMSG_SPACE(sizeof(struct ucred)),
};

/* One read: bytes at base, and every descriptor of every control message (close-on-exec).  0: end of stream.
 * -1 and errno, also EBADMSG when descriptors were lost on the way (too many, or no place for them here);
 * then what arrived has been closed. */
ssize_t sockio_receive(int fd, void *base, size_t len, int fds[SOCKIO_MAX_FDS], size_t *ret_n_fds);

/* One write of the list's first replies.  Descriptors travel with the first byte of a message, so a reply
 * that has some begins one.  -1 and errno; never a signal. */
ssize_t sockio_send(int fd, const reply *first);

/* Nobody holds the other end any more. */
bool sockio_is_hung_up(int fd);

/* A descriptor of the process that connected, or -1: dead, or in a PID namespace that we do not see. */
int sockio_peer_process(int fd, pid_t pid);

/* The end of a client's connection.  Descriptors that it sent and nobody has read are not closed with it, which may take long,
 * but by disposal. */
void sockio_close(int fd);

#endif
