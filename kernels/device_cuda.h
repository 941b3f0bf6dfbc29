#ifndef KVS_KERNELS_DEVICE_CUDA_H
#define KVS_KERNELS_DEVICE_CUDA_H

/* The cuda device behind device.h.  No CUDA type leaves it: a binary built without CUDA has the same functions, which
 * answer E_UNSUPPORTED with a sentence, and one built with it does so on a machine without a driver or a GPU.
 *
 * Knows device memory, streams and kernels.  Knows no keys or sockets.
 * Threads: as in device.h; functions may be called from any thread, each call says itself which GPU it means.
 * Ownership: the device must outlive its memory and its queues.
 *
 *   memory   daemon regions are VMM handles of at most 1 GiB, each exported as a descriptor, mapped side by side;
 *            imports are CUDA IPC handles (an allocation that is opened twice is mapped once) and VMM descriptors.
 *            The size of a piece is what the driver says, never what the client says.
 *   host     registered in place, after its pages were touched by several threads.  Once a process is enough for all
 *            its GPUs.  No copy may cross two registrations.
 *   queues   a non-blocking stream each; a mark is an event; wait() spins for some microseconds, then sleeps.
 *   errors   E_NO_SPACE and E_DEVICE leave the device usable; E_DEVICE_LOST is final for the device and all on it. */

#include <stdint.h>

#include "kernels/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct device_cuda_info {
    char name[64];
    uint8_t uuid[16];
    uint32_t ordinal; /* among those that this process sees (CUDA_VISIBLE_DEVICES) */
    uint32_t n_processors, capability, driver_version;
    uint64_t total_bytes, free_bytes; /* now */
    uint64_t granularity;             /* daemon regions and VMM imports are multiples of it */
    int32_t numa_node;                /* the host memory next to it; -1: not known */
} device_cuda_info;

/* How many GPUs this process sees.  E_UNSUPPORTED: none, and why. */
kvs_status device_cuda_count(uint32_t *ret, kvs_err *err);
/* Which of them has this UUID.  E_NOT_FOUND names it. */
kvs_status device_cuda_find(const uint8_t uuid[16], uint32_t *ret_ordinal, kvs_err *err);

/* Loads every kernel, so that no later launch waits for that.  E_UNSUPPORTED: no driver, no such GPU, a GPU that cannot
 * share its memory, or no kernel code for it in this build. */
kvs_status device_cuda_open(device **ret, uint32_t ordinal, kvs_err *err);

/* For a device that device_cuda_open made. */
kvs_status device_cuda_get_info(device *d, device_cuda_info *ret, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
