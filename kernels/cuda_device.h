#ifndef KVS_KERNELS_CUDA_DEVICE_H
#define KVS_KERNELS_CUDA_DEVICE_H

/* Inside of the cuda device: what device_cuda.c, cuda_memory.c and cuda_queue.c share.
 *
 * Knows CUDA.  Included by those files only.  Threads and ownership as in device_cuda.h. */

#ifdef KVS_CUDA
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda_driver.h"
#include "kernels/device_cuda.h"

enum { CUDA_MAX_READERS = 16 };

typedef struct cuda_device {
    device base;
    int ordinal;
    uint8_t uuid[16];
    uint64_t granularity;
    cuda_driver driver;
    device_about about;
    _Atomic bool lost;
    pthread_t
        ahead; /* maps ahead_at.. while has_ahead, and then says how far; of the thread that registers host memory */
    bool has_ahead;
    uint8_t *ahead_at;
    uint64_t ahead_bytes;
    int readers[CUDA_MAX_READERS]; /* other GPUs that shall read memory of this one; complete before there is any */
    uint32_t n_readers;
} cuda_device;

/* Make `d` the thread's device.  E_DEVICE_LOST if it was lost before. */
kvs_status cuda_enter(cuda_device *d, kvs_err *err);
/* kvs_cuda_fail, and remember a loss. */
kvs_status cuda_failed(cuda_device *d, kvs_err *err, const char *call, int error);
kvs_status cuda_failed_bytes(cuda_device *d, kvs_err *err, const char *call, uint64_t bytes, int error);

/* Device memory in use by everybody, asked of the management library, which needs no context; 0: not known. */
uint64_t cuda_used_bytes(int ordinal);

kvs_status cuda_mem_create(device *d, uint64_t bytes, device_mem **ret, kvs_err *err);
kvs_status cuda_mem_import(device *d, const device_import *in, device_mem **ret, kvs_err *err);
void cuda_mem_close(device_mem *m);
uint32_t cuda_mem_pieces(const device_mem *m);
uint8_t *cuda_mem_base(const device_mem *m, uint32_t piece, uint64_t *ret_bytes);
int cuda_mem_fd(const device_mem *m, uint32_t piece);
bool cuda_mem_reached(const device_mem *m, const device_mem *to);

bool cuda_reaches(device *d, device *other);
/* Let the readers of `d` read mapped memory of it, to write it they have no reason.  ret_has[i]: the i-th may. */
void cuda_grant(const cuda_device *d, CUdeviceptr at, uint64_t bytes, bool ret_has[CUDA_MAX_READERS]);

kvs_status cuda_queue_open(device *d, device_dir dir, device_queue **ret, kvs_err *err);
void cuda_queue_close(device_queue *q);
kvs_status cuda_queue_copy(device_queue *q, const device_copy *c, size_t n, device_how how, uint64_t *ret_mark,
                           kvs_err *err);
kvs_status cuda_queue_sum(device_queue *q, const device_sums *s, kvs_err *err);
kvs_status cuda_queue_mla_write(device_queue *q, const kvs_mla_write_args *a, uint32_t *ret_bad, uint64_t *ret_mark,
                                kvs_err *err);
kvs_status cuda_queue_mla_decode(device_queue *q, const kvs_mla_decode_args *a, kvs_mla_decode_result *ret,
                                 uint64_t *ret_mark, kvs_err *err);
kvs_status cuda_queue_mla_extend(device_queue *q, const kvs_mla_extend_args *a, kvs_mla_decode_result *ret,
                                 uint64_t *ret_mark, kvs_err *err);
kvs_status cuda_queue_wait(device_queue *q, uint64_t mark, kvs_err *err);
#endif

#endif
