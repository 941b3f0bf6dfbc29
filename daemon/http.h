#ifndef KVS_DAEMON_HTTP_H
#define KVS_DAEMON_HTTP_H

/* HTTP: metrics, health and a status page, for whoever can open the socket.  Only GET and HEAD, nothing changes anything.
 *
 * Knows paths, answers and limits.  Does not know what the numbers mean, or the loop.
 * Threads: open and open_port on the main thread before any other exists; start, check, stop on the loop; answers on threads of
 * libmicrohttpd, one a socket, which the loop never waits for except in stop.
 * Owns its sockets and threads; borrows the board.
 *
 *   GET /metrics       Prometheus text 0.0.4        GET /healthz   200 while loop and workers turn, else 503
 *   GET /metrics.json  the same as JSON             GET /readyz    200 while requests are served, else 503 and why
 *   GET /              a page for people
 *
 * One answer a connection.  At most HTTP_PLACES connections a socket, each for HTTP_WHOLE_US in all; others wait in the
 * backlog. */

#include <stdint.h>
#include <sys/types.h>

#include "daemon/board.h"
#include "proto/status.h"

enum {
    HTTP_PLACES = 16,
    HTTP_IDLE_S = 5,          /* without a byte */
    HTTP_WHOLE_US = 30000000, /* however slowly the bytes go */
    HTTP_WAIT_US = 500000,    /* for the loop's numbers; then the latest ones are shown, with their age */
    HTTP_ALIVE_US = 5000000,  /* a loop that has not turned for so long is not alive */
    HTTP_HUNG_US = 15000000,  /* nor is a daemon with a worker in its own code for so long; in a device's call it is */
};

typedef struct http http;

/* Bind the UNIX socket.  Failures: see listen_open. */
kvs_status http_open(http **ret, const char *path, mode_t mode, kvs_err *err);
/* Bind `port` on 127.0.0.1 and ::1 besides, before http_start; 0: none.  Both or neither: after a failure (E_BUSY: taken;
 * E_SYS) the UNIX socket serves alone. */
kvs_status http_open_port(http *h, uint16_t port, kvs_err *err);
kvs_status http_start(http *h, board *b, kvs_err *err);
/* Every few seconds, with HTTP_WHOLE_US: ends connections that have had their time.  Never blocks. */
void http_check(http *h, uint64_t whole_us);
void http_stop(http *h); /* after board_close; NULL is fine */

#endif
