#ifndef KVS_KERNELS_CLIENT_MEMORY_H
#define KVS_KERNELS_CLIENT_MEMORY_H

/* GPU memory of a client's program, as another process can open it: the CUDA IPC handle of the allocation that an address
 * lies in, and where in it.
 *
 * Knows the driver (client_driver.h) and the kinds of memory that have no such handle.  Does not know regions.
 * Threads: any; the thread's current context is as it was when a call returns.  Owns nothing. */

#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* E_INVALID: memory of a kind that cannot be opened this way; the message names the kind and what to use instead.
 * E_UNSUPPORTED: no driver here.  E_DEVICE: the driver's own word. */
kvs_status client_memory_handle(const void *p, uint8_t ret_uuid[16], uint8_t ret_handle[64], uint64_t *ret_offset,
                                uint64_t *ret_bytes, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
