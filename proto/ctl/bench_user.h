#ifndef KVS_CTL_BENCH_USER_H
#define KVS_CTL_BENCH_USER_H

/* An engine of the GPU benches: blocks in memory of the daemon or of its own, stored and loaded through the socket; and the
 * raw copies of pinned memory that it is compared with.
 *
 * Knows libkvstride and client_cuda.  Does not know figures.
 * Threads: a user and a raw lane belong to one thread at a time.  Both own their memory until closed. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/client_cuda.h"
#include "kernels/engine_cuda.h"
#include "proto/client/kvstride.h"
#include "proto/client/kvstride_pack.h"

enum { BENCH_CALL_MS = 60000, BENCH_MAX_LAYERS = 256 };

enum bench_place {
    BENCH_DAEMON, /* slots of the daemon: whole blocks */
    BENCH_BLOCKS, /* the engine's own memory, whole blocks */
    BENCH_PAGES,  /* the engine's own memory, one tensor a layer: a piece for each page */
    BENCH_PACK,   /* the same, gathered into the daemon's slots and scattered from them by libkvstride */
};

/* A block of MLA rows, 1,152 bytes a token and layer. */
typedef struct bench_shape {
    enum bench_place place;
    uint32_t layers, tokens, n; /* n: blocks */
} bench_shape;

/* How a pack is opened; 0: as the library likes it. */
typedef struct bench_tune {
    uint64_t chunk_bytes; /* of blocks that are copied together */
    uint32_t chunks;      /* for which there are staging slots */
    uint32_t ctas;
} bench_tune;

typedef struct bench_user {
    bench_tune tune; /* set before it is opened */
    kvs_client *client;
    kvs_ns *ns;
    kvs_region *region; /* NULL with a pack */
    kvs_pack *pack;
    engine_cuda *engine; /* NULL: the slots are the daemon's */
    uint64_t slot_bytes;
    uint32_t n;
    kvs_slot *slots;   /* [n] */
    uint32_t *blocks;  /* [n] the same for a pack */
    uint8_t *keys;     /* [n][32] of blocks named_id.. */
    uint64_t named_id; /* plus one; 0: none yet */
    kvs_status *stored;
    kvs_load_result *loaded;
} bench_user;

/* Nothing on the GPU touches these slots meanwhile: what is measured must not wait for all that the GPU does. */
extern const kvs_mark bench_now;

/* Zero *u before, but for its tune.  Also after a failure it is to be closed. */
kvs_status bench_user_open(bench_user *u, const char *socket, const bench_shape *shape, kvs_err *err);
/* The same with slots of the daemon on its device `device`. */
kvs_status bench_user_open_on(bench_user *u, const char *socket, uint32_t device, const bench_shape *shape,
                              kvs_err *err);
void bench_user_close(bench_user *u);

/* Begin to store or load `n` slots from `first` on, under the keys that lie at the same places.  The arguments live here:
 * one such request for each `first` at a time. */
typedef struct bench_flight {
    kvs_request *request;
    kvs_store_args store;
    kvs_load_args load;
} bench_flight;
kvs_status bench_user_submit(bench_user *u, bench_flight *f, bool load, uint32_t first, uint32_t n, kvs_err *err);
kvs_status bench_user_end(bench_flight *f, kvs_err *err); /* waits for it; fine if there is none */

/* An engine knows its keys: they are made outside the clock. */
void bench_user_name(bench_user *u, uint64_t first_id);
kvs_status bench_user_store(bench_user *u, uint64_t first_id, kvs_err *err);
kvs_status bench_user_load(bench_user *u, uint64_t first_id, uint32_t n, kvs_err *err);

/* Two lanes of raw copies, for both directions at once. */
enum { BENCH_RAW_BYTES = 900 << 20 };
typedef struct bench_raw {
    client_cuda_lane *lane[2];
    void *pinned[2], *device[2];
    engine_cuda *engine;
} bench_raw;

kvs_status bench_raw_open(bench_raw *r, kvs_err *err); /* zero it before; close it also after a failure */
void bench_raw_close(bench_raw *r);
/* bytes: at most BENCH_RAW_BYTES, and one copy. */
kvs_status bench_raw_copy(bench_raw *r, int lane, bool load, uint64_t bytes, kvs_err *err);

#endif
