#ifndef KVS_TESTS_KERNELS_KB_OPS_H
#define KVS_TESTS_KERNELS_KB_OPS_H

/* The operations that kernels-bench measures; each is kb_op_NAME of some kb_*.c.
 *
 * Knows names.  Constant data. */

#include "tests/kernels/kb.h"

#define KB_OP_MAP(X)                                                                                                   \
    X(mla_write)                                                                                                       \
    X(mla_write_layers)                                                                                                \
    X(mla_decode)                                                                                                      \
    X(mla_sparse)                                                                                                      \
    X(mla_extend)                                                                                                      \
    X(kv_decode)                                                                                                       \
    X(mha_ragged)                                                                                                      \
    X(block_copy)                                                                                                      \
    X(block_sum)                                                                                                       \
    X(merge)                                                                                                           \
    X(cache_gather)                                                                                                    \
    X(gather_dequant)                                                                                                  \
    X(gather_upconvert)                                                                                                \
    X(indexer_gather)                                                                                                  \
    X(blockwise_gather)                                                                                                \
    X(indexer_write)                                                                                                   \
    X(blockwise_write)                                                                                                 \
    X(kv_write)                                                                                                        \
    X(concat_q)                                                                                                        \
    X(index_convert)

#define X(name) extern const kb_op kb_op_##name;
KB_OP_MAP(X)
#undef X

#endif
