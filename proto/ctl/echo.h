#ifndef KVS_CTL_ECHO_H
#define KVS_CTL_ECHO_H

/* Echo: the plainest server there is, to measure a round trip against: a process with an epoll loop on a UNIX socket that
 * sends back what it read.
 *
 * One thread.  Owns its process and its end of the socket. */

#include <stdint.h>
#include <sys/types.h>

#include "proto/status.h"

enum { ECHO_BYTES = 40 }; /* of a PING reply: header and message head */

typedef struct echo {
    pid_t pid;
    int fd;
} echo;

kvs_status echo_start(echo *e, kvs_err *err);
/* One round trip of ECHO_BYTES; false if the server is gone. */
int echo_trip(const echo *e);
void echo_stop(echo *e);

#endif
