#ifndef KVS_KERNELS_CUDA_KERNELS_H
#define KVS_KERNELS_CUDA_KERNELS_H

/* One entry a kernel file, called by kvs_kernels_init.
 *
 * Knows names only.  Any thread, on its current device.  Owns nothing. */

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

kvs_status kvs_mla_write_cuda_init(kvs_err *err);
kvs_status kvs_mla_decode_cuda_init(kvs_err *err);
kvs_status kvs_cache_gather_cuda_init(kvs_err *err);
kvs_status kvs_gather_dequant_cuda_init(kvs_err *err);
kvs_status kvs_gather_upconvert_cuda_init(kvs_err *err);
kvs_status kvs_indexer_write_cuda_init(kvs_err *err);
kvs_status kvs_indexer_gather_cuda_init(kvs_err *err);
kvs_status kvs_blockwise_write_cuda_init(kvs_err *err);
kvs_status kvs_blockwise_gather_cuda_init(kvs_err *err);
kvs_status kvs_kv_write_cuda_init(kvs_err *err);
kvs_status kvs_page_copy_cuda_init(kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
