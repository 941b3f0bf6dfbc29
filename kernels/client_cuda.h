#ifndef KVS_KERNELS_CLIENT_CUDA_H
#define KVS_KERNELS_CLIENT_CUDA_H

/* GPU memory of a daemon in a client's process: map it, and copy to and from it.
 *
 * Knows the driver, found by dlopen at the first call: a program that links this needs no CUDA, and one that runs without
 * a driver is told so by E_UNSUPPORTED.  Knows no regions, sockets or daemons.
 * Threads: any.  The thread's current context is as it was when a call returns.
 * Ownership: what *_map and *_open return is the caller's until unmap or close; nothing may use it any more then. */

#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n descriptors of VMM memory, all of piece_bytes but the last, side by side at *ret_base, read and write, in the primary
 * context of the GPU that they are on (which the CUDA runtime uses too).  The descriptors stay the caller's. */
typedef struct client_cuda_map client_cuda_map;
kvs_status client_cuda_map_fds(client_cuda_map **ret, const int *fds, uint32_t n, uint64_t piece_bytes, uint64_t bytes,
                               void **ret_base, kvs_err *err);
void client_cuda_unmap(client_cuda_map *m);            /* NULL is fine */
int client_cuda_map_ordinal(const client_cuda_map *m); /* the GPU, as this process counts them */

/* ---- for tools ---- */

/* A stream of its own on the first GPU.  One thread at a time. */
typedef struct client_cuda_lane client_cuda_lane;
kvs_status client_cuda_lane_open(client_cuda_lane **ret, kvs_err *err);
/* Any of the two may be device memory; returns when the bytes are there. */
kvs_status client_cuda_copy(client_cuda_lane *l, void *dst, const void *src, uint64_t bytes, kvs_err *err);
/* Pinned host memory; gone with the lane. */
kvs_status client_cuda_host(client_cuda_lane *l, uint64_t bytes, void **ret, kvs_err *err);
void client_cuda_lane_close(client_cuda_lane *l); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif
