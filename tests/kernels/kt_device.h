#ifndef KVS_TESTS_KERNELS_KT_DEVICE_H
#define KVS_TESTS_KERNELS_KT_DEVICE_H

/* What kt.c asks of CUDA.  Without CUDA in the build kt_cuda_open says so, and nothing else is called.
 *
 * Single thread.  Every failure but that of kt_cuda_open ends the program. */

#include "tests/kernels/kt.h"

bool kt_cuda_open(kt *k, char *why, size_t cap);
void kt_cuda_close(kt *k);
void *kt_cuda_alloc(uint64_t bytes);
void kt_cuda_free(void *p);
void kt_cuda_fill(void *p, int byte, uint64_t bytes);
void kt_cuda_put(void *dev, const void *host, uint64_t bytes);
void kt_cuda_get(const kt *k, void *host, const void *dev, uint64_t bytes);
kvs_status kt_cuda_wait(const kt *k, kvs_err *err);
void kt_cuda_capture_begin(const kt *k);
void *kt_cuda_capture_end(const kt *k, bool keep);
void kt_cuda_replay(const kt *k, void *exec);
void kt_cuda_graph_free(void *exec);

/* Print and leave: exit status 3. */
__attribute__((noreturn, format(printf, 1, 2))) void kt_die(const char *fmt, ...);

#endif
