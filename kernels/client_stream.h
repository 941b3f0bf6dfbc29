#ifndef KVS_KERNELS_CLIENT_STREAM_H
#define KVS_KERNELS_CLIENT_STREAM_H

/* Streams of a client's program: they write and wait for 64-bit words of host memory, and can be waited for.
 *
 * Knows the driver (client_driver.h).  Does not know counters, connections or requests.  A stream is a CUstream or
 * cudaStream_t; NULL is the default stream of the calling thread's context.  A stream that is being captured into a graph is
 * refused with E_STATE: a graph would write the same value again each time that it runs.
 * Threads: any; the thread's current context is as it was when a call returns.  A call may wait while the stream's queue is
 * full.
 * Ownership: words and marks are the caller's until close; the host memory is the caller's, and outlives them.
 * Every call: E_UNSUPPORTED without a driver, E_DEVICE and the driver's own word for it. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Host memory that the GPUs of this process can reach. */
typedef struct client_words client_words;
/* base: whole pages, mapped, `bytes` of them.  stream: its context must be alive now, others may use the words too. */
kvs_status client_words_open(client_words **ret, void *base, uint64_t bytes, void *stream, kvs_err *err);
/* No stream may have a call on them before it.  NULL is fine. */
void client_words_close(client_words *w);
/* The same where a stream may still come to them: the memory stays registered for as long as the process lives. */
void client_words_forget(client_words *w);

/* When the stream has got here, and everything before can be seen by the CPU and other devices: words[offset] = value. */
kvs_status client_stream_write(client_words *w, void *stream, uint64_t offset, uint64_t value, kvs_err *err);
/* The stream stays here until words[offset] - value, as a signed number, is 0 or more. */
kvs_status client_stream_wait(client_words *w, void *stream, uint64_t offset, uint64_t value, kvs_err *err);

/* E_STATE: it is being captured. */
kvs_status client_stream_check(void *stream, kvs_err *err);
/* Wait until the stream has done what it has been given so far.  False: not in time, or it is broken. */
bool client_stream_drain(void *stream, uint32_t timeout_ms);
/* Wait until every GPU that this process has a primary context on has done what it has been given so far.  A process that
 * has not touched a driver returns at once, and still has not. */
kvs_status client_stream_settle(kvs_err *err);

/* A place in a stream. */
typedef struct client_mark client_mark;
kvs_status client_mark_open(client_mark **ret, void *stream, kvs_err *err);
void client_mark_close(client_mark *m); /* NULL is fine; who waits for it goes on waiting */

#ifdef __cplusplus
}
#endif
#endif
