#ifndef KVS_TESTS_SUPPORT_LINGERING_H
#define KVS_TESTS_SUPPORT_LINGERING_H

/* A TCP connection on the loopback that is full, and whose end here lingers: who closes its last descriptor waits for as long
 * as it says.  What a client can send to make another process stand still.
 *
 * Knows sockets.  Does not know the daemon.  One thread.  fd is the caller's, the rest is freed by lingering_end. */

typedef struct lingering {
    int fd;
    int other; /* never read */
} lingering;

void lingering_open(lingering *l, int seconds); /* asserts */
void lingering_end(lingering *l);

#endif
