#ifndef KVS_PROTO_FRAME_H
#define KVS_PROTO_FRAME_H

/* Frame reader: turns bytes and descriptors, in whatever pieces they arrive, into whole frames.  No I/O.
 *
 * Knows the header and its limits.  Does not know sockets, ops or bodies.  One thread at a time.
 * Owns its buffers and every descriptor it was given until a frame takes it; frame_reader_fini closes the rest.
 *
 *      frame_want: where?  -> recvmsg -> frame_got: n bytes and these fds -> frame_next, until it says no
 *
 * The same file serves the daemon's connection, the blocking client and the fuzzer. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"
#include "proto/wire.h"

/* Most requests are smaller than this; a larger frame makes the buffer grow once. */
enum { FRAME_START_BYTES = 16384 };

typedef struct frame_span {
    uint8_t *base;
    size_t len;
} frame_span;

typedef struct frame {
    wire_header head;
    const uint8_t *body;   /* [head.body_len], borrowed until the next frame_want */
    int fds[WIRE_MAX_FDS]; /* [head.n_fds]; the caller takes them: it must close those it does not want */
} frame;

typedef struct frame_reader {
    uint32_t body_max;
    uint8_t *
        buf; /* starts small, FRAME_START_BYTES; grows to one frame of at most body_max after its header has been checked */
    size_t cap, start, end;
    int fds[WIRE_MAX_FDS]; /* arrived, not yet claimed by a frame; oldest first */
    size_t n_fds;
    kvs_status broken;        /* final */
    void (*close_fd)(int fd); /* set after the init by who may not wait for a close; NULL: close() */
} frame_reader;

void frame_reader_init(frame_reader *r, uint32_t body_max);
void frame_reader_fini(frame_reader *r); /* any number of times; closes unclaimed descriptors */

/* Room for the next bytes.  Take every whole frame first: len is 0 when the buffer is full of them, when memory ran out
 * and when the reader is broken, never otherwise.  While an unfinished frame's descriptors wait, or it is a large
 * one, it is just what that frame still needs: never read more than is offered. */
frame_span frame_want(frame_reader *r);

/* Bytes that the buffer will have after the next frame_want: more than now if a large frame's header is there. */
size_t frame_need(const frame_reader *r);

/* `n` bytes have arrived at frame_want's place, and `n_fds` descriptors with them, which the reader owns from here on,
 * also on failure.  E_PROTO / E_LIMIT are final: sync is lost, every queued descriptor has been closed. */
kvs_status frame_got(frame_reader *r, size_t n, const int *fds, size_t n_fds, kvs_err *err);

/* The next whole frame, if there is one: true and *ret, or false.  A frame whose descriptors did not all arrive, or
 * descriptors that no frame claims, break the reader: then it answers false and r->broken says why. */
bool frame_next(frame_reader *r, frame *ret, kvs_err *err);

/* Nothing more is to come for now: what a large frame made the buffer grow to is given back, unless bytes wait in it. */
void frame_reader_rest(frame_reader *r);

/* True when bytes of an unfinished frame are waiting: the time-out for half-sent frames runs. */
bool frame_is_partial(const frame_reader *r);

#endif
