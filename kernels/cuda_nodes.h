#ifndef KVS_KERNELS_CUDA_NODES_H
#define KVS_KERNELS_CUDA_NODES_H

/* Why a GPU that is in the machine cannot be used: which of the driver's device nodes this process may not open.  CUDA
 * itself says "no device" or "unknown error" for all of them.
 *
 * Knows the driver's names in /dev and /proc, and what a service manager or a container does to them.  Knows no CUDA.
 * Takes nothing.  Any thread. */

#include <stddef.h>

/* One sentence about the first obstacle that is found below `root` ("" for this machine) and its usual cause; "" if there
 * is none, or if there is no driver to look for.  Returns ret. */
const char *kvs_cuda_nodes_explain(const char *root, char *ret, size_t cap);

#endif
