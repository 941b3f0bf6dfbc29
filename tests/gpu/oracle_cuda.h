#ifndef KVS_TESTS_GPU_ORACLE_CUDA_H
#define KVS_TESTS_GPU_ORACLE_CUDA_H

/* The fp64 oracle of kernels/mla_oracle.h once more, for shapes that take a processor too long.  A test compares
 * the two.
 *
 * Knows kernels/mla.h.  Shares no code with the kernels.  Waits for the GPU; device memory is the caller's. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/mla_sparse.h"

#ifdef __cplusplus
extern "C" {
#endif

/* a: pointers to device memory.  max_len: no length is above it.  out [T][h_q][512] and lse [T][h_q] go to the host.
 * false: a CUDA call failed, or no memory. */
bool oracle_cuda_decode(const kvs_mla_decode_args *a, uint32_t max_len, double *out, double *lse);
bool oracle_cuda_sparse(const kvs_mla_sparse_args *a, double *out, double *lse);

#ifdef __cplusplus
}
#endif
#endif
