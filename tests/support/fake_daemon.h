#ifndef KVS_TESTS_SUPPORT_FAKE_DAEMON_H
#define KVS_TESTS_SUPPORT_FAKE_DAEMON_H

/* A daemon of a few lines on a thread: answers well by default, and badly, late or never where a test says so.
 *
 * Knows the wire.  Does not know pools or devices: LOOKUP hits keys whose first byte is 1, everything else succeeds.
 * Threads: its own; `hook` runs on it.  Fields marked atomic may be read by the test at any time.
 * Ownership: the test's; fake_start to fake_stop, then it may be started again at the same path: a restart. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/frame.h"
#include "proto/wire.h"

enum { FAKE_CONNS = 16 };

typedef struct fake fake;
typedef struct fake_conn {
    int fd; /* -1: free */
    frame_reader reader;
    uint8_t *counters; /* mapped page of this connection */
} fake_conn;

/* True: the hook has dealt with the request.  It may take descriptors of *q by setting them to -1. */
typedef bool fake_hook(fake *f, fake_conn *c, frame *q);

struct fake {
    char path[108];
    int listener, wake;
    pthread_t thread;
    fake_conn conns[FAKE_CONNS];
    fake_hook *hook;
    void *ud;
    uint8_t boot;                               /* first byte of the boot id; + 1 with each start */
    uint32_t credit_requests, control_requests; /* 0: 64 and 8 */
    uint64_t credit_bytes;                      /* 0: 2^40 */
    uint32_t n_uuids;                           /* 0: HELLO lists no devices */
    uint8_t uuids[WIRE_MAX_DEVICES][16];
    uint32_t next_ns, next_region;
    uint8_t *last_page;         /* counters of the last connection that said HELLO */
    atomic_bool stopping, deaf; /* deaf: reads nothing */
    atomic_uint ops[32];        /* requests seen, by op */
    atomic_uint entries, fds;   /* of REGION_ATTACH and REGION_IMPORT */
    atomic_uint attempts;       /* connections accepted */
};

void fake_init(fake *f);  /* picks a path in a fresh temporary folder */
void fake_start(fake *f); /* ends the test if it cannot */
void fake_stop(fake *f);  /* like a kill: every connection ends, the socket file goes */
void fake_fini(fake *f);  /* removes the folder */

/* Answer q: `payload` behind an empty message. */
void fake_reply(fake_conn *c, const frame *q, kvs_status s, const void *payload, size_t len);
void fake_reply_fds(fake_conn *c, const frame *q, const void *payload, size_t len, const int *fds, uint32_t n_fds);
void fake_bytes(fake_conn *c, const void *p, size_t n);
bool fake_serve(fake *f, fake_conn *c, frame *q); /* the default answer */
void fake_drop(fake_conn *c);                     /* hang up */
int fake_memfd(uint64_t bytes, bool sealed);

#endif
