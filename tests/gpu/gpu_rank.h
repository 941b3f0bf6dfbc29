#ifndef KVS_TESTS_GPU_GPU_RANK_H
#define KVS_TESTS_GPU_GPU_RANK_H

/* What the tests on two GPUs share: an engine on each of them, with slots, and memory to copy there without a daemon.
 *
 * Knows the program's daemon (gpu_engine.h) and CUDA.  Single thread. */

#include "tests/gpu/gpu_engine.h"

enum { RANK_GPUS = 2, RANK_RAW_MIB = 1024 };

/* An engine on one GPU. */
typedef struct rank {
    int ordinal; /* as this process counts */
    engine e;
    kvs_region *region;
    kvs_slot slots[MANY];
    uint8_t *base;
    void *host;   /* pinned, RANK_RAW_MIB */
    void *raw;    /* on the GPU, RANK_RAW_MIB */
    void *stream; /* cudaStream_t */
} rank;

uint32_t rank_n_gpus(void);
bool rank_use(const rank *x); /* its GPU is the thread's */
/* Its region lies on the GPU that this process calls `ordinal`, whatever the daemon calls it. */
bool rank_open(rank *x, int ordinal, uint32_t layers);
bool rank_join(rank *x, const char *socket, int ordinal, uint32_t layers); /* the same of a daemon that runs */
bool rank_open_both(rank x[RANK_GPUS], uint32_t layers);
void rank_close(rank *x);

/* The first n of its slots: the patterns of keys id.., by way of `host`, of a block's size; are they there; no, 0x99. */
bool rank_fill(rank *x, uint32_t n, uint64_t id, uint8_t *host);
bool rank_holds(rank *x, uint32_t n, uint64_t id, uint8_t *host);
bool rank_wipe(rank *x, uint32_t n);

#endif
