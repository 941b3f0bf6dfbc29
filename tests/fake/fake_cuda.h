#ifndef KVS_TESTS_FAKE_CUDA_H
#define KVS_TESTS_FAKE_CUDA_H

/* A CUDA driver of a few lines, for machines without one: streams are threads, device memory is ordinary memory, the packing
 * kernel is done in C.  A test that links it (a library named libcuda.so.1) has it found by libkvstride as the driver.
 *
 * Knows what kernels/client_driver.h asks for, and no more.  Calls fail where a test says so, and streams stand still where
 * it says so: what a race leaves to chance on a GPU is certain here.
 * Threads: any.  Ownership: streams and memory are the test's. */

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

/* The n-th call of this name from now on (1: the next one) fails with `code`; n 0: none does any more. */
FAKE_API void fake_cuda_fail(const char *call, uint32_t n, int code);
FAKE_API uint32_t fake_cuda_calls(const char *call); /* so far */
/* Calls of this name stay inside until *gate is not 0; NULL: none does any more. */
FAKE_API void fake_cuda_stall(const char *call, atomic_int *gate);
/* How many GPUs there are (1..16), and the one on which all memory is and which has a context already: 1 and 0 at first. */
FAKE_API void fake_cuda_gpus(int n, int home);
FAKE_API uint32_t fake_cuda_contexts(int gpu); /* asked for so far */

FAKE_API void *fake_cuda_memory(uint64_t bytes); /* device memory */
FAKE_API void fake_cuda_memory_free(void *p);
FAKE_API void *fake_cuda_stream(void);
FAKE_API void fake_cuda_stream_free(void *stream); /* waits for it */
FAKE_API void fake_cuda_capture(void *stream, bool on);
FAKE_API bool fake_cuda_idle(void *stream);

/* The stream stays here until *gate is not 0. */
FAKE_API void fake_cuda_hold(void *stream, atomic_int *gate);
FAKE_API void fake_cuda_fill(void *stream, void *p, int value, uint64_t bytes);
FAKE_API void fake_cuda_copy(void *stream, void *dst, const void *src, uint64_t bytes);

#endif
