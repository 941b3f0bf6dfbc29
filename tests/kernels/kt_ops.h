#ifndef KVS_TESTS_KERNELS_KT_OPS_H
#define KVS_TESTS_KERNELS_KT_OPS_H

/* The operations that kernels-test knows, each with a file kt_NAME.c that defines kt_op_NAME.
 *
 * Knows names.  Any thread; constant data. */

#include "tests/kernels/kt.h"

#define KT_OP_MAP(X)                                                                                                   \
    X(mla_write)                                                                                                       \
    X(mla_write_layers)                                                                                                \
    X(mla_decode)                                                                                                      \
    X(mla_sparse)                                                                                                      \
    X(cache_gather)                                                                                                    \
    X(gather_dequant)                                                                                                  \
    X(gather_upconvert)                                                                                                \
    X(indexer_gather)                                                                                                  \
    X(blockwise_gather)                                                                                                \
    X(indexer_write)                                                                                                   \
    X(blockwise_write)                                                                                                 \
    X(kv_write)                                                                                                        \
    X(kv_decode)                                                                                                       \
    X(mla_extend)                                                                                                      \
    X(mha_ragged)                                                                                                      \
    X(block_copy)                                                                                                      \
    X(block_sum)                                                                                                       \
    X(merge)                                                                                                           \
    X(concat_q)                                                                                                        \
    X(index_convert)

#define X(name) extern const kt_op kt_op_##name;
KT_OP_MAP(X)
#undef X

/* In the mutation build: start this program once for each site and mistake.  Returns main's status. */
int kt_mutants(const char *program, const char *device, const char *only_op);

#endif
