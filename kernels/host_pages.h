#ifndef KVS_KERNELS_HOST_PAGES_H
#define KVS_KERNELS_HOST_PAGES_H

/* Pages of host memory: allocated and mapped before somebody needs them, which is most of what pinning costs.
 *
 * Knows mincore and madvise, and what to do where a kernel lacks them.  Does not know devices.  Any thread; keeps nothing.
 * p..p + bytes need not be aligned; whole pages count. */

#include <stdint.h>

#include "proto/status.h"

/* Bytes of it that have no memory yet.  What cannot be told counts as present. */
uint64_t kvs_pages_absent(const void *p, uint64_t bytes);

/* Give memory to all that has none, and map all of it, for writing, without changing what is in it.  E_NO_SPACE: the machine
 * does not have so much, or not any more; E_INVALID: no range. */
kvs_status kvs_pages_make(void *p, uint64_t bytes, kvs_err *err);

/* Map what has memory already, as after a restart; nothing is allocated.  Stops at the first stretch where something is
 * absent, or that is no memory at all.  Returns how far it came: bytes from p on, at most `bytes`. */
uint64_t kvs_pages_map(void *p, uint64_t bytes);

#endif
