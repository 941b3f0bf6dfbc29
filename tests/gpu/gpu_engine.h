#ifndef KVS_TESTS_GPU_GPU_ENGINE_H
#define KVS_TESTS_GPU_GPU_ENGINE_H

/* What the GPU tests of the real daemon share: one daemon for the program, an engine (a client with a namespace of MLA
 * blocks), blocks there and back, a stream that writes and waits for counters, and clients in processes of their own.
 *
 * Knows libkvstride, CUDA and the daemon fixture.  Does not know what a test is about.  Single thread, but for store and
 * load with room of their own.  The daemon is the program's until engine_end_daemon. */

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "kernels/device_cuda.h"
#include "proto/client/kvstride.h"
#include "tests/gpu/gpu.h"
#include "tests/support/daemon_fixture.h"

enum { TOKENS = 64, PAGE = TOKENS * 1152, DEEP = 61, FLAT = 5, CALL_MS = 60000, MANY = 200 };
#define MiB (UINT64_C(1) << 20)
#define GiB (UINT64_C(1) << 30)

/* The program's daemon; it is started by the first engine_begin, and again after it was stopped. */
extern daemon_fixture engine_daemon;
bool engine_start_daemon(void);
/* The next one that is started has these members of "mover"; one that runs is taken away. */
void engine_set_mover(const char *json);
/* For a program whose daemon opens an allocation by its IPC handle more than once: a sanitizer's memcheck forgets the allocation
 * when it is closed once, and takes every kernel that reads it for an error.  In the subset processors make the checksums then. */
void engine_opens_twice(void);
void engine_set_checksum(bool on); /* likewise, its pool.checksum: true at first */
/* Takes it away; with `show`, prints what it has logged. */
void engine_end_daemon(bool show);

typedef struct engine {
    kvs_client *client;
    kvs_ns *ns;
    kvs_plane planes[DEEP];
    uint32_t layers;
    uint64_t slot_bytes;
} engine;

bool engine_open(engine *e, const char *socket, uint32_t layers);
/* The same with another number of tokens a block. */
bool engine_open_tokens(engine *e, const char *socket, uint32_t layers, uint32_t tokens);
bool engine_begin(engine *e, uint32_t layers); /* with the program's daemon */

/* A daemon region of n private slots, mapped. */
bool engine_region(engine *e, uint32_t n, kvs_region **ret, kvs_slot *ret_slots, uint8_t **ret_base);

/* Store blocks of `slots` under keys id.., or load them; at most MANY.  after: NULL or a mark. */
kvs_status engine_store(engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n, const kvs_mark *after,
                        kvs_err *err);
kvs_status engine_load(engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n, kvs_err *err);

/* For control runs: begin at once, whatever the GPU is doing.  Without any mark the library waits for the GPU. */
extern const kvs_mark engine_now;

/* A request in flight with the room that it needs. */
typedef struct flight {
    kvs_request *request;
    uint8_t keys[MANY][KVS_KEY_BYTES];
    kvs_slot slots[MANY];
    kvs_status stored[MANY];
    kvs_load_result loaded[MANY];
    kvs_store_args store;
    kvs_load_args load;
} flight;

bool flight_store(flight *f, engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n,
                  const kvs_mark *after);
bool flight_load(flight *f, engine *e, kvs_region *r, uint64_t id, const kvs_slot *slots, uint32_t n,
                 const kvs_mark *after, const kvs_mark *signal);
kvs_status flight_end(flight *f, kvs_err *err); /* waits for it */

void nap_ms(long ms);
uint64_t free_bytes(device *d); /* of the GPU's memory */
bool cuda_ok(int error, const char *what);
bool to_device(void *dst, const void *src, uint64_t n);
bool from_device(void *dst, const void *src, uint64_t n);
bool set_device(void *dst, int value, uint64_t n); /* and wait */
bool ipc_handle(device *d, void *p, kvs_ipc *ret); /* of the allocation that begins at p */
bool own_ipc_handle(void *p, kvs_ipc *ret);        /* the same without a device of ours */

/* This program once more, as "-client KIND SOCKET". */
pid_t spawn_client(const char *kind);

/* ---- somebody who asks for the daemon's health all the time ---- */

enum { MAX_ASKED = 100000 };

typedef struct asker {
    kvs_client *client;
    pthread_t thread;
    _Atomic bool stop;
    long pause_ms;
    double us[MAX_ASKED];
    uint32_t n;
    kvs_status status;
} asker;

bool asker_start(asker *a, long pause_ms);
/* Ends it.  False: a call failed, or the p99 or the slowest of all is above its limit. */
bool asker_end(asker *a, const char *while_what, double p99_ms, double most_ms);

/* ---- streams and counters ---- */

enum { RACE_BLOCKS = 32 };

/* An engine with RACE_BLOCKS slots, a stream, and the counter page as the device sees it. */
typedef struct racer {
    engine e;
    kvs_region *region;
    kvs_slot slots[RACE_BLOCKS];
    uint8_t *base;
    uint64_t bytes; /* of the slots */
    uint8_t *seen;  /* [bytes] host */
    void *stream;   /* cudaStream_t */
    kvs_counters page;
} racer;

bool racer_open(racer *x);
void racer_close(racer *x);
bool racer_fetch(racer *x, const void *from);                 /* into seen */
uint32_t racer_pure(const racer *x, uint8_t value);           /* blocks in seen that are `value` all over */
bool racer_raise(racer *x, uint32_t counter, uint64_t value); /* by the stream, in its order */
bool racer_await(racer *x, uint32_t counter, uint64_t value); /* the stream waits for the daemon's half */
bool racer_sleep(racer *x, long ms);                          /* the stream stands still */
bool racer_synchronise(racer *x);

#endif
