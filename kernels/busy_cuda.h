#ifndef KVS_KERNELS_BUSY_CUDA_H
#define KVS_KERNELS_BUSY_CUDA_H

/* Busy: attention over a paged cache again and again, as an engine at work: what copies beside it cost can be measured by how
 * much of its speed is left.
 *
 * Knows CUDA and the decode kernel.  Does not know who measures.
 * The calling thread, which it keeps.  Owns its memory while it runs. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One call: n_seqs queries of `heads` heads over blocks_a_seq blocks of 64 tokens each, out of `blocks` that there are. */
typedef struct busy_cuda_shape {
    uint32_t n_seqs, heads, blocks, blocks_a_seq;
} busy_cuda_shape;

/* Two calls are queued at any time, so that the GPU never waits for this process.  on_call: after each; false ends it.
 * E_UNSUPPORTED: no GPU, or a build without CUDA. */
kvs_status busy_cuda_run(uint32_t ordinal, const busy_cuda_shape *shape, bool (*on_call)(void *ud), void *ud,
                         kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
