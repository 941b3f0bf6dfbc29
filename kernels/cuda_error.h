#ifndef KVS_KERNELS_CUDA_ERROR_H
#define KVS_KERNELS_CUDA_ERROR_H

/* What a CUDA error number means for the caller: try less, ask differently, or the context is gone.
 *
 * Knows the numbers of the runtime and of the driver, which are the same where both have one.  Any thread.  Owns
 * nothing. */

#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* KVS_OK for 0.  E_NO_SPACE: out of memory.  E_DEVICE: a refusal that leaves the context as it was.  E_UNSUPPORTED:
 * no driver, no device, too old.  Anything else is E_DEVICE_LOST: an unknown number is no reason to go on. */
kvs_status kvs_cuda_status(int error);

/* Record "call: name: text" for a CUDA error that is not 0, take it off the runtime's last-error slot and return its
 * status. */
kvs_status kvs_cuda_fail(kvs_err *err, const char *call, int error);

/* "what, value": the same with the amount that was asked for. */
kvs_status kvs_cuda_fail_bytes(kvs_err *err, const char *call, unsigned long long bytes, int error);

/* A GPU's UUID as nvidia-smi and CUDA_VISIBLE_DEVICES write it: "GPU-" and 8-4-4-4-12 hexadecimal digits. */
enum { KVS_UUID_TEXT_BYTES = 41 };
void kvs_cuda_uuid_text(const uint8_t uuid[16], char ret[KVS_UUID_TEXT_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
