#ifndef KVS_KERNELS_HOST_MEMORY_H
#define KVS_KERNELS_HOST_MEMORY_H

/* How much memory this process can still get.
 *
 * tmpfs hands out pages until the kernel starts to kill; so whoever is about to allocate a lot asks here
 * first. Knows /proc and the cgroup tree.  Takes nothing.  Any thread; the number is a snapshot. */

#include <stdint.h>

#include "proto/status.h"

/* The smallest of: MemAvailable, and what is left below the memory limit of each control group (v2) that we
 * are in. UINT64_MAX where the system does not tell. */
uint64_t kvs_host_available(void);

/* E_NO_SPACE if `bytes` more for `what` are not available: both numbers, what sets the limit, and what to do. */
kvs_status kvs_host_want(const char *what, uint64_t bytes, kvs_err *err);

#endif
