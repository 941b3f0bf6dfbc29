#ifndef KVS_TESTS_GPU_BUSY_CUDA_H
#define KVS_TESTS_GPU_BUSY_CUDA_H

/* An engine that is at work: kernels back to back on a stream of its own, which either compute or read and write memory, and
 * count how far they are.
 *
 * Knows the CUDA runtime.  Threads: busy_start and busy_stop on one; busy_progress on any.  Owns its memory and thread. */

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum busy_kind {
    BUSY_COMPUTE, /* arithmetic in registers, an SM full of them: nothing else fits in beside it */
    BUSY_MEMORY,  /* copies from device memory to device memory */
} busy_kind;

typedef struct busy busy;
/* priority: of its stream, 0 (the default and the lowest) or below.  false: a CUDA call failed. */
bool busy_start(busy **ret, busy_kind kind, int priority);
/* Kernels that have ended. */
uint64_t busy_progress(const busy *b);
void busy_stop(busy *b); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
