#ifndef KVS_TESTS_SUPPORT_ECHO_SERVER_H
#define KVS_TESTS_SUPPORT_ECHO_SERVER_H

/* Echo server: the least that a single-threaded epoll server does for a frame, as a yardstick for round
 * trips.
 *
 * Knows fixed-size frames on UNIX sockets.  Does not know the daemon.  One thread a process.
 * echo_start forks; the caller ends the process with echo_stop. */

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Serve connections of a listening socket for ever: every frame of `frame_bytes` (at most 65,536) comes back.
 * Returns only on a failure of its own, as an exit status. */
int echo_server_main(int listen_fd, size_t frame_bytes);

/* A process that serves at `path`; it listens when this returns.  -1: failed. */
pid_t echo_start(const char *path, size_t frame_bytes);
void echo_stop(pid_t pid, const char *path);
int echo_connect(const char *path); /* blocking socket; -1: failed */

/* Nanoseconds of one round trip each, one after the other.  False: the other side is gone. */
_Bool echo_measure(int fd, size_t frame_bytes, uint64_t *samples, size_t n);

/* Sorts; per_mille 500 is the median. */
uint64_t echo_quantile(uint64_t *samples, size_t n, unsigned per_mille);

#endif
