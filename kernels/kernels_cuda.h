#ifndef KVS_KERNELS_KERNELS_CUDA_H
#define KVS_KERNELS_KERNELS_CUDA_H

/* The kernels for engines that launch in their own process: C, with the caller's stream.
 *
 * Knows views, strides and streams.  Knows no keys, sockets or devices by name: it uses the thread's current one.
 * Any thread.  All memory is the caller's and lives until the stream has passed the call.  Nothing here waits,
 * allocates or synchronises, and the shape of a launch depends on n_seqs, h_q, s_q, tokens_per_block, format,
 * table_width and parts alone: a call may be captured in a CUDA graph and replayed with new contents.
 *
 * Argument structs are those of mla.h with every pointer in device memory (or in mapped host memory); plain
 * integers and views travel by value; `stop` is not looked at.  Errors: those of the C functions, found before anything is queued;
 * E_DEVICE or E_DEVICE_LOST from the launch itself. */

#include <stdint.h>

#include "kernels/mla.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st; /* cudaStream_t and CUstream are pointers to this */

/* Load every kernel and allow it the shared memory it wants, on the current device.  Once a process and device,
 * before the first call below: a kernel that is loaded at its first launch waits for work that may wait for it. */
kvs_status kvs_kernels_init(kvs_err *err);

/* kvs_mla_write and kvs_mla_write_layers, one launch each.  ret_bad: one word of device memory, set by the call; NULL:
 * not counted.  Two tokens with one slot: the row holds a mixture of both. */
kvs_status kvs_mla_write_cuda(const kvs_mla_write_args *a, uint32_t *ret_bad, struct CUstream_st *stream, kvs_err *err);
kvs_status kvs_mla_write_layers_cuda(const kvs_mla_write_layers_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                     kvs_err *err);

/* kvs_mla_decode by tensor cores.  parts == 0 is resolved by kvs_mla_decode_cuda_parts, never from seq_len.
 * workspace: device memory, 16-byte aligned.  ret_bad as above; ret->bad is left 0.  A value that is not finite in a
 * token that only a later query of the same sequence sees can reach the earlier ones, as 0 * NaN. */
uint32_t kvs_mla_decode_cuda_parts(const kvs_mla_decode_args *a);
uint64_t kvs_mla_decode_cuda_workspace(const kvs_mla_decode_args *a); /* 0: none needed, or shapes that are refused */
kvs_status kvs_mla_decode_cuda(const kvs_mla_decode_args *a, void *workspace, uint64_t workspace_bytes,
                               uint32_t *ret_bad, kvs_mla_decode_result *ret, struct CUstream_st *stream, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
