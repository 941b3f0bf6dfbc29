#ifndef KVS_KERNELS_ENGINE_CUDA_H
#define KVS_KERNELS_ENGINE_CUDA_H

/* What stands in for an engine in measurements: memory on the first GPU that can be handed to a daemon, and a stream that is
 * kept busy with work of one kind.
 *
 * Knows CUDA; without it every call answers E_UNSUPPORTED.  Knows no daemon.  For tools: libkvstride does not have it.
 * Threads: one.  Memory is the engine's until engine_cuda_close. */

#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct engine_cuda engine_cuda;
struct CUstream_st;

enum engine_cuda_work {
    ENGINE_CUDA_COMPUTE, /* multiplications in registers, on every processor */
    ENGINE_CUDA_MEMORY,  /* one half of a large buffer copied to the other */
    ENGINE_CUDA_LATENCY, /* short kernels, each waited for before the next one is launched, some 20 us later */
    ENGINE_CUDA_WORKS,
};

kvs_status engine_cuda_open(engine_cuda **ret, kvs_err *err);
void engine_cuda_close(engine_cuda *e); /* NULL is fine */

/* A whole allocation, with its CUDA IPC handle and the GPU's UUID. */
kvs_status engine_cuda_alloc(engine_cuda *e, uint64_t bytes, void **ret, uint8_t ret_uuid[16], uint8_t ret_handle[64],
                             kvs_err *err);

/* Queue one more step of some milliseconds, wait for the one before it, and say how long that was on the GPU, from the end of
 * its predecessor to its own end.  The first call says 0.  So the GPU always has one queued.
 * ENGINE_CUDA_LATENCY: do one step, and say how long it took this thread. */
kvs_status engine_cuda_step(engine_cuda *e, enum engine_cuda_work work, double *ret_ms, kvs_err *err);

/* engine_cuda.cu: queue a step, of ENGINE_CUDA_LATENCY one kernel.  buffer: device, [bytes]. */
kvs_status engine_cuda_launch(enum engine_cuda_work work, void *buffer, uint64_t bytes, struct CUstream_st *stream,
                              kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
