#ifndef KVS_PROTO_BACKEND_H
#define KVS_PROTO_BACKEND_H

/* Attention backends of engines, and the order of layers and blocks in memory that each was verified with.
 *
 * A kernel that takes the distance of two blocks from its arguments works on a layer of a pool whose blocks hold all
 * layers; one that computes it from the shape reads another layer's bytes there, silently.  So a backend opts in, by
 * being in this table, after its kernels gave the same bits on such a view as on a tensor of its own.
 *
 *   layers first (identity):  | layer 0: block 0, 1, ... | layer 1: block 0, 1, ... |      one tensor a layer
 *   blocks first:             | block 0: layer 0, 1, ... | block 1: layer 0, 1, ... |      cross-layer
 *
 * Knows names, numbers and layouts.  Does not know regions or kernels.  Any thread; plain values. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/layout.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* part of libkvstride */

typedef enum kvs_stride_order { KVS_ORDER_LAYERS_FIRST, KVS_ORDER_BLOCKS_FIRST } kvs_stride_order;

/* X(name, number, verified order).  The numbers are protocol; append, never renumber.  A name is the engine's own. */
#define KVS_BACKEND_MAP(X)                                                                                             \
    X(TRITON_MLA, 1, BLOCKS_FIRST)                                                                                     \
    X(CUTLASS_MLA, 2, BLOCKS_FIRST)                                                                                    \
    X(FLASH_ATTN_MLA, 3, BLOCKS_FIRST)                                                                                 \
    X(FLASHMLA, 4, BLOCKS_FIRST)                                                                                       \
    X(FLASHINFER_MLA, 5, BLOCKS_FIRST)                                                                                 \
    X(DEEPSEEK_V32_INDEXER, 6, LAYERS_FIRST) /* the sparse indexer: its planes are its own, whoever attends */         \
    X(OTHER, 7, LAYERS_FIRST)                /* any other name: nothing was verified */

typedef enum kvs_backend {
    KVS_BACKEND_UNSAID = 0, /* the engine's own code, which promises to take every stride as it is given */
#define X(name, number, order) KVS_BACKEND_##name = (number),
    KVS_BACKEND_MAP(X)
#undef X
} kvs_backend;

/* Beside a backend's number: take the strides whether it was verified with them or not. */
#define KVS_BACKEND_OVERRIDE UINT32_C(0x80000000)

/* "TRITON_MLA" -> KVS_BACKEND_TRITON_MLA; KVS_BACKEND_OTHER for every name that is not in the table. */
uint32_t kvs_backend_parse(const char *name);
const char *kvs_backend_name(uint32_t backend); /* NULL for a number that is none, and for KVS_BACKEND_UNSAID */

/* What the backend was verified with; KVS_ORDER_LAYERS_FIRST for a number that is none. */
kvs_stride_order kvs_backend_order(uint32_t backend);

/* The same as a permutation of the dimensions (layer, block, token, content), outermost first, or of (block, token,
 * content): 0 1 2 3 is the identity, 1 0 2 3 is blocks before layers.  Returns how many there are. */
uint32_t kvs_backend_stride_order(uint32_t backend, bool with_layers, uint32_t ret[4]);

/* May n_slots blocks, `stride` bytes apart, be the memory of `owner` (a backend, perhaps with KVS_BACKEND_OVERRIDE)?
 *   plane  of ns, or ns->n_planes: whole blocks, all planes in one map
 * Blocks as close as pages are one tensor a layer: always.  Anything else is a cross-layer view: for a backend
 * verified with blocks first, and never for a plane of indexer_fp8, which belongs to the indexer.
 * E_UNSUPPORTED names plane, stride, page and backend; E_INVALID: a number that is none. */
kvs_status kvs_backend_check(uint32_t owner, const kvs_namespace *ns, uint32_t plane, uint32_t n_slots, uint64_t stride,
                             kvs_err *err);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
