#ifndef KVS_TESTS_SUPPORT_RAW_CLIENT_H
#define KVS_TESTS_SUPPORT_RAW_CLIENT_H

/* A client that may misbehave: frames and plain bytes on a socket, with descriptors, without any of the
 * library's care.
 *
 * Knows the frame header.  Does not know the daemon or the client library.  One thread.
 * Owns its socket and its reader; descriptors of a received frame are the caller's. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/frame.h"
#include "proto/wire.h"

typedef struct raw_client {
    int fd;
    bool ended; /* end of stream or an error was read */
    frame_reader reader;
} raw_client;

void raw_init(raw_client *c, int fd);
void raw_close(raw_client *c);                     /* any number of times */
bool raw_connect(raw_client *c, const char *path); /* blocking socket */

/* A frame in one message; waits until it is sent.  False: the other end is gone. */
bool raw_send(raw_client *c, uint16_t op, uint64_t id, const void *body, uint32_t len, const int *fds, uint16_t n_fds);
/* Any bytes, with any descriptors on the first one. */
bool raw_write(raw_client *c, const void *bytes, size_t len, const int *fds, size_t n_fds);

/* Take in what has arrived, without waiting; true if there is a whole frame. */
bool raw_poll(raw_client *c, frame *ret);
/* Wait for the next frame.  False: end of stream (c->ended), or the time is up. */
bool raw_recv(raw_client *c, frame *ret, int timeout_ms);
/* Wait for the end of the stream, dropping frames.  False: the time is up. */
bool raw_wait_end(raw_client *c, int timeout_ms);

/* HELLO and its reply; the counter page's descriptor is closed.  False: refused, or nothing came. */
bool raw_hello(raw_client *c);
/* PING with this body; true if the right reply came. */
bool raw_ping(raw_client *c, uint64_t id);

uint64_t raw_now_ms(void);

#endif
