#ifndef KVS_DAEMON_DISPOSAL_H
#define KVS_DAEMON_DISPOSAL_H

/* Disposal: closes descriptors that came from clients, off the loop.
 *
 * A close can take as long as who made the file likes: a TCP socket lingers until its other end has read everything, a file
 * of a FUSE folder waits for its server, and the last descriptor of a large memfd frees its pages.  All three may be in the
 * client's own hands.
 *
 * Knows descriptors.  Does not know clients.
 * Threads: any may call.  Up to DISPOSAL_THREADS threads of its own close, each of them while there is something to close and a
 * moment longer, so that one close that never returns keeps none of the others waiting.
 * Owns every descriptor from disposal_close on.  One in a process; nothing to begin or to end. */

#include <stdbool.h>
#include <stdint.h>

enum { DISPOSAL_THREADS = 16 };

/* Takes fd.  Does not wait, unless there is neither memory nor a thread to be had. */
void disposal_close(int fd);

/* Wait until everything has been closed; false after timeout_ms. */
bool disposal_wait(uint32_t timeout_ms);

#endif
