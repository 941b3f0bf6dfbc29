#ifndef KVS_KERNELS_PART_SUM_H
#define KVS_KERNELS_PART_SUM_H

/* Part sums: XXH3-64 of equal parts of blocks in device memory, by a GPU that holds the bytes anyway.
 *
 * Knows addresses and lengths.  Does not know what a sum is for; its reference is libxxhash.
 * Threads: any; the stream decides the order.
 * Ownership: what is pointed to stays as it is until the stream has passed the launch.
 *
 * Source of the function: xxHash's specification of XXH3 (64 bits, seed 0, default secret), for inputs of more than 240 bytes.
 * Its accumulators are sums over the stripes of 1 KiB and are mixed behind each: so a warp adds up many KiB at once, and one
 * after the other only mixes them. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_PART_SUM_BLOCKS = 256 /* of a call: they travel as a kernel's parameters */, KVS_PART_SUM_SHORTEST = 241 };

static inline uint64_t kvs_part_sum_parts(uint64_t bytes, uint64_t part_bytes)
{
    return bytes / part_bytes + (bytes % part_bytes != 0);
}

/* Can the kernel sum blocks of `bytes` in parts of part_bytes?  Multiples of 16, and no part shorter than
 * KVS_PART_SUM_SHORTEST, the last one included. */
static inline bool kvs_part_sum_fits(uint64_t bytes, uint64_t part_bytes)
{
    if (bytes == 0 || part_bytes < KVS_PART_SUM_SHORTEST || (bytes | part_bytes) % 16 != 0)
        return false;
    return bytes % part_bytes == 0 || bytes % part_bytes >= KVS_PART_SUM_SHORTEST;
}

/* parts[i * n_parts + k] = XXH3-64 of blocks[i][k * part_bytes .. min((k + 1) * part_bytes, bytes)), n_parts as
 * kvs_part_sum_parts says.  blocks [n]: device memory, multiples of 16, the array the host's and read before the call returns;
 * n: 1..KVS_PART_SUM_BLOCKS; parts: pinned host memory or device memory.  Does not wait.
 * E_INVALID: n, bytes or part_bytes, or the address of a block; E_DEVICE: the launch was refused. */
kvs_status kvs_part_sum_cuda(const void *const *blocks, uint32_t n, uint64_t bytes, uint64_t part_bytes,
                             uint64_t *parts, struct CUstream_st *stream, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
