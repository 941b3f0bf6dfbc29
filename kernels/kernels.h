#ifndef KVS_KERNELS_KERNELS_H
#define KVS_KERNELS_KERNELS_H

/* Every operation on the cache, for programs that have the memory themselves: installed as <kvstride/kernels.h>,
 * library kvstride-kernels (pkg-config).
 *
 * Each comes twice with one struct of arguments: kvs_OP in C on the host's memory, and kvs_OP_cuda on device memory and
 * the caller's stream.  A library that was built without CUDA has the first ones only.
 * A view (view.h) says where a plane of a block is; nothing else here knows an address.
 *
 * Any thread.  All memory is the caller's.  Nothing waits, allocates or synchronises; a CUDA call may be captured in a
 * graph.  Call kvs_kernels_init once a process and device before the first CUDA call. */

#include "kernels/block_copy.h"
#include "kernels/block_sum.h"
#include "kernels/blockwise.h"
#include "kernels/cache_gather.h"
#include "kernels/concat_q.h"
#include "kernels/gather_dequant.h"
#include "kernels/gather_upconvert.h"
#include "kernels/index.h"
#include "kernels/index_convert.h"
#include "kernels/indexer.h"
#include "kernels/kernels_cuda.h"
#include "kernels/kv_decode.h"
#include "kernels/kv_write.h"
#include "kernels/merge.h"
#include "kernels/mha_ragged.h"
#include "kernels/mla.h"
#include "kernels/mla_extend.h"
#include "kernels/mla_sparse.h"
#include "kernels/view.h"
#include "proto/layout.h"
#include "proto/status.h"

#endif
