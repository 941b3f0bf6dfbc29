#ifndef KVS_TESTS_SUPPORT_LOOP_FIXTURE_H
#define KVS_TESTS_SUPPORT_LOOP_FIXTURE_H

/* A loop that runs until something has come true, and that ends without a handle left.
 *
 * Knows libuv.  Does not know the daemon.  One thread.  The loop is the caller's storage. */

#include <stdbool.h>
#include <uv.h>

/* Run until done(ud) is true; false after timeout_ms. */
bool loop_until(uv_loop_t *loop, bool (*done)(void *ud), void *ud, unsigned timeout_ms);

/* Run until every closing handle is closed, then close the loop; false if a handle is left. */
bool loop_end(uv_loop_t *loop);

/* Entries of /proc/PID/fd; pid 0: of this process. */
unsigned count_fds(int pid);

#endif
