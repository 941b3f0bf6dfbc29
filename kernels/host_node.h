#ifndef KVS_KERNELS_HOST_NODE_H
#define KVS_KERNELS_HOST_NODE_H

/* From which memory node the pages of host memory come.  A pool on the wrong node has every copy cross the link between
 * the processors.
 *
 * Knows /sys and the kernel's memory policies.  Does not know devices.  Any thread; keeps nothing. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

enum { KVS_NODE_ANY = -1, KVS_NODES_MAX = 1024 };

/* Is there memory on this node?  E_CONFIG names the nodes that have some.  KVS_NODE_ANY is fine, and so is any number where
 * there is one node, or where the kernel knows none. */
kvs_status kvs_host_node_check(int32_t node, kvs_err *err);

/* Let those of the pages p..p + bytes that have no memory yet come from `node`, and from others only when it has none left.
 * p is aligned to a page.  Nothing happens for what kvs_host_node_check calls fine without such a node. */
kvs_status kvs_host_node_place(void *p, uint64_t bytes, int32_t node, kvs_err *err);

/* Of a list as the kernel writes them ("0-1,4"): is `node` in it, and how many are.  What is no list is an empty one. */
bool kvs_host_node_in(const char *list, int32_t node, uint32_t *ret_n);

#endif
