#ifndef KVS_TESTS_GPU_FILL_CUDA_H
#define KVS_TESTS_GPU_FILL_CUDA_H

/* Random numbers made on the GPU, for benches whose data would take a processor minutes.
 *
 * Knows bf16 and the pages of MLA formats.  Device memory is the caller's; waits for the GPU. */

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* n values of bf16, evenly spread over -1.7..1.7 (variance 1). */
bool fill_cuda_bf16(void *p, uint64_t n, uint64_t seed);
/* Pages without padding between rows, of an MLA format: numbers near 1, scales of 1. */
bool fill_cuda_pages(void *p, uint64_t n_pages, uint64_t page_bytes, uint32_t format, uint32_t tokens);

#ifdef __cplusplus
}
#endif
#endif
