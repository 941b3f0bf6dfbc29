#ifndef KVS_TESTS_GPU_RACE_CUDA_H
#define KVS_TESTS_GPU_RACE_CUDA_H

/* A slow reader: a kernel that stands still and then sums what it finds.
 *
 * Knows nothing of blocks.  Call it once before streams wait for anything: the first call loads it. */

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* *sum (device memory) becomes the sum of the 64-bit words of p [bytes], read `ms` after the kernel began. */
bool race_cuda_sum(const void *p, uint64_t bytes, uint32_t ms, uint64_t *sum, void *stream);

#ifdef __cplusplus
}
#endif
#endif
