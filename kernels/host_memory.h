#ifndef KVS_KERNELS_HOST_MEMORY_H
#define KVS_KERNELS_HOST_MEMORY_H

/* How much memory this process can still get.
 *
 * tmpfs hands out pages until the kernel starts to kill; so whoever is about to allocate a lot asks here
 * first. Knows /proc and the cgroup tree.  Takes nothing.  Any thread; the number is a snapshot. */

#include <stdint.h>

#include "proto/status.h"

/* The smallest of: MemAvailable, and what is left below the memory limit of each control group that we are in.
 * UINT64_MAX where the system does not tell. */
uint64_t kvs_host_available(void);

/* The same if nothing else had any: the smallest of MemTotal and those limits. */
uint64_t kvs_host_total(void);

/* What is left below the limits of the groups that `membership` names, and of those around them; see proto/cgroup.h.
 * *ret_tightest: the one with the least, below `tree`; "" where none has a limit. */
enum { KVS_GROUP_BYTES = 128 };
uint64_t kvs_host_groups_room(const char *membership, const char *tree, char ret_tightest[KVS_GROUP_BYTES]);
/* The lowest of these limits; UINT64_MAX where there is none. */
uint64_t kvs_host_groups_limit(const char *membership, const char *tree);

/* What of `room` may be handed out: all but what this process keeps for what it cannot ask for, such as the pages, the
 * sockets and the buffers of clients that come later.  Without it regions fill a group to its last byte, and the next
 * connection has the kernel kill the daemon. */
#define KVS_HOST_KEPT (UINT64_C(16) << 20)
uint64_t kvs_host_spare(uint64_t room);

/* E_NO_SPACE if `bytes` more for `what` may not be handed out: both numbers, what sets the limit, and what to do. */
kvs_status kvs_host_want(const char *what, uint64_t bytes, kvs_err *err);

#endif
