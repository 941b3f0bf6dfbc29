#ifndef KVSTRIDE_PACK_H
#define KVSTRIDE_PACK_H

/* Client pack: STORE and LOAD for engines with one tensor a layer, at the speed of whole blocks.
 *
 * The pages of a block lie far apart in such an engine, and small copies keep a link half idle.  So this library gathers
 * them into contiguous staging slots of the daemon, on a stream of the lowest priority in the engine's own process, and the
 * daemon moves whole slots; loads go the other way.  Chunks of blocks are on their way at the same time:
 *
 *   tensors --gather--> staging slots --STORE--> host        while one chunk is moved, the next is gathered
 *   tensors <-scatter-- staging slots <--LOAD--- host        while one chunk is scattered, the next is moved
 *
 * On a daemon without GPU the tensors are ordinary memory, and a CPU gathers.
 *
 * Knows tensors and staging slots.  Does not know what the keys mean.
 * Threads: any, as in kvstride.h; a pack has one thread of its own for each direction.
 * Ownership: a pack is its opener's until kvs_pack_close, and so is a request until kvs_request_end.  The tensors must
 * outlive the pack.  Arguments are copied, but for `results`, which is borrowed until kvs_request_end.
 *
 * What a dying engine leaves behind: staging slots that go with its connection, and no key without its bytes.  After a
 * restart of the daemon the pack gets itself new staging slots at the next request, on the GPU where the first ones were; if the
 * daemon has none there any more, E_NOT_FOUND or E_STALE. */

#include "kvstride.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvs_pack kvs_pack;

/* One tensor: page of block i at base + i * stride, as many bytes as the namespace's plane has. */
typedef struct kvs_pack_plane {
    void *
        base; /* device memory of the GPU that the staging slots are on (host memory on a cpu daemon); multiple of 16 */
    uint64_t stride; /* bytes; multiple of 16 below 2^40, at least a page */
} kvs_pack_plane;

/* The last three are knobs for engines other than those that the library's own choice was measured beside, which fill an H200
 * all the time; tests/gpu/bench_pack compares settings.  All that they change is speed and memory.
 *
 *   chunk      Where an engine fills the GPU a copy begins when one of its kernels ends, and costs it something whatever its
 *              size: with 32 MiB for 64 a compute-bound engine lost up to 5 % of its speed, not 1..2 %.  A smaller chunk takes
 *              less memory.
 *   n_staging  While the link has one chunk, the next ones wait for a kernel's end and are copied: with four they are ready in
 *              time behind kernels of 0.6 ms; with three, stores of short pages beside a memory-bound engine had 0.90 of the
 *              link for 0.92; with a single one the link has nothing to do during copies.
 *   ctas       As many as there are multiprocessors leave each the same part of the engine's work.  With 64 of 132 the others
 *              wait for those, and a compute-bound engine lost 3 %; 16 take so long that any lost 6 %.  More gain nothing. */
typedef struct kvs_pack_args {
    kvs_ns *ns;      /* of kvs_open */
    uint32_t device; /* the daemon's */
    uint32_t n_planes;
    const kvs_pack_plane *planes; /* [n_planes] in the namespace's order, whatever their order in memory */
    uint32_t n_blocks;            /* in each tensor: ids 0..n_blocks-1 */
    uint32_t first_counter;       /* this entry of the counter page and the next are the pack's own (GPU) */
    uint32_t chunk;               /* blocks that are copied together, 1..256; 0: about 64 MiB of them */
    uint32_t n_staging;           /* slots for each direction, at least a chunk; 0: four chunks */
    uint32_t ctas;                /* thread blocks of a copy, 1..1024; 0: as many as the GPU has multiprocessors */
    uint32_t reserved;            /* 0 */
} kvs_pack_args;

/* E_RANGE: a plane runs over the end of its memory, is on another GPU, or a number above is out of its range; E_INVALID;
 * E_UNSUPPORTED: GPU slots, but no driver here or a build without nvcc; E_NO_SPACE: no room for the staging slots. */
KVS_API kvs_status kvs_pack_open(kvs_client *c, const kvs_pack_args *a, kvs_pack **ret, uint32_t timeout_ms,
                                 kvs_err *err);
/* Cancels what is left, waits for copies under way, gives the staging slots back.  NULL is fine. */
KVS_API void kvs_pack_close(kvs_pack *p);

typedef struct kvs_pack_move {
    uint32_t n;             /* blocks */
    uint32_t first_depth;   /* store: of keys[0] in its prefix */
    const uint8_t *parent;  /* store: [32] key at depth first_depth - 1, as in kvs_store_args */
    const uint8_t *keys;    /* [n][32] */
    const uint32_t *blocks; /* [n] ids in the tensors; of a load all different */
    kvs_stream *stream;     /* pages are touched when it has got here; what is launched on it after a load runs when the
                               load has ended, well or badly.  NULL: the library waits for the GPU first */
    uint32_t flags;         /* enum kvs_pack_flags */
    uint32_t reserved;      /* 0 */
    kvs_status *results;    /* [n] or NULL, out; E_EXISTS of a store is as good as KVS_OK */
} kvs_pack_move;
enum kvs_pack_flags { KVS_PACK_NO_WAIT = 1 /* without a stream: nothing on the GPU touches these pages any more */ };

/* Begin; *ret is answered, waited for, cancelled and ended like any kvs_submit_* request.  Its pages may be written again
 * (store) or hold the blocks (load) when it is answered; a block whose result is not KVS_OK is partly loaded at worst.
 * E_RANGE: a block id; E_INVALID: one twice in a load; E_STATE: the stream is being captured. */
KVS_API kvs_status kvs_pack_store(kvs_pack *p, const kvs_pack_move *m, kvs_request **ret, uint32_t timeout_ms,
                                  kvs_err *err);
KVS_API kvs_status kvs_pack_load(kvs_pack *p, const kvs_pack_move *m, kvs_request **ret, uint32_t timeout_ms,
                                 kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
