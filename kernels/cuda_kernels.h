#ifndef KVS_KERNELS_CUDA_KERNELS_H
#define KVS_KERNELS_CUDA_KERNELS_H

/* One entry a kernel file, called by kvs_kernels_init.
 *
 * Knows names only.  Any thread, on its current device.  Owns nothing. */

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every .cu file of kernels/ that has kernels to launch. */
#define KVS_CUDA_KERNEL_MAP(X)                                                                                         \
    X(mla_write)                                                                                                       \
    X(mla_sparse)                                                                                                      \
    X(mla_decode)                                                                                                      \
    X(cache_gather)                                                                                                    \
    X(gather_dequant)                                                                                                  \
    X(gather_upconvert)                                                                                                \
    X(indexer_write)                                                                                                   \
    X(indexer_gather)                                                                                                  \
    X(blockwise_write)                                                                                                 \
    X(blockwise_gather)                                                                                                \
    X(kv_write)                                                                                                        \
    X(kv_decode)                                                                                                       \
    X(mha_ragged)                                                                                                      \
    X(block_copy)                                                                                                      \
    X(block_sum)                                                                                                       \
    X(merge)                                                                                                           \
    X(concat_q)                                                                                                        \
    X(index_convert)                                                                                                   \
    X(page_copy)                                                                                                       \
    X(part_sum)

/* kvs_NAME_cuda_init: load the kernels of NAME.cu and allow them the shared memory that they want. */
#define X(name) kvs_status kvs_##name##_cuda_init(kvs_err *err);
KVS_CUDA_KERNEL_MAP(X)
#undef X

#ifdef __cplusplus
}
#endif
#endif
