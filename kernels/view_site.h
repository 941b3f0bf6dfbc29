#ifndef KVS_KERNELS_VIEW_SITE_H
#define KVS_KERNELS_VIEW_SITE_H

/* Every place in kernels/ that turns a block id into an address, by name, and the ways in which such places go wrong.
 *
 * The C reference and the CUDA kernel of an operation share their sites.  In the mutation build (-DKVS_MUTATION, tests
 * only) a view can carry one site and the mistakes that this site then makes; everywhere else a site costs nothing.
 * Knows names.  Any thread; plain values. */

enum kvs_mutant {
    KVS_MUTANT_PACKED = 1,    /* block_stride taken to be page_bytes */
    KVS_MUTANT_PRODUCT32 = 2, /* block * block_stride in 32 bits */
    KVS_MUTANT_TOKENS = 4,    /* tokens of a page taken to be block_stride / row_bytes */
    KVS_MUTANT_BASE = 8,      /* the plane's offset in its block forgotten */
    KVS_MUTANT_LENGTH = 16,   /* bytes of a page taken to be block_stride */

    KVS_MUTANT_ADDRESS = KVS_MUTANT_PACKED | KVS_MUTANT_PRODUCT32 | KVS_MUTANT_BASE,
    KVS_MUTANT_ROWS = KVS_MUTANT_ADDRESS | KVS_MUTANT_TOKENS,
    KVS_MUTANT_PAGES = KVS_MUTANT_ADDRESS | KVS_MUTANT_LENGTH
};

/* X(name, operation of kernels-test, mistakes that the site can make): one that works by tokens asks for no length, one
 * that moves whole pages splits no tokens. */
#define KVS_SITE_MAP(X)                                                                                                \
    X(MLA_WRITE, "mla_write", KVS_MUTANT_ROWS)                                                                         \
    X(MLA_WRITE_LAYERS, "mla_write_layers", KVS_MUTANT_ROWS)                                                           \
    X(MLA_DECODE, "mla_decode", KVS_MUTANT_ROWS)                                                                       \
    X(MLA_DECODE_FP8, "mla_decode", KVS_MUTANT_ROWS)                                                                   \
    X(MLA_SPARSE, "mla_sparse", KVS_MUTANT_ROWS)                                                                       \
    X(MLA_SPARSE_SCALE, "mla_sparse", KVS_MUTANT_ROWS)                                                                 \
    X(CACHE_GATHER, "cache_gather", KVS_MUTANT_ROWS)                                                                   \
    X(GATHER_DEQUANT, "gather_dequant", KVS_MUTANT_ROWS)                                                               \
    X(GATHER_UPCONVERT, "gather_upconvert", KVS_MUTANT_ROWS)                                                           \
    X(INDEXER_WRITE_KEY, "indexer_write", KVS_MUTANT_ROWS)                                                             \
    X(INDEXER_WRITE_SCALE, "indexer_write", KVS_MUTANT_ROWS)                                                           \
    X(INDEXER_GATHER_KEY, "indexer_gather", KVS_MUTANT_ROWS)                                                           \
    X(INDEXER_GATHER_SCALE, "indexer_gather", KVS_MUTANT_ROWS)                                                         \
    X(BLOCKWISE_WRITE_DATA, "blockwise_write", KVS_MUTANT_ROWS)                                                        \
    X(BLOCKWISE_WRITE_SCALE, "blockwise_write", KVS_MUTANT_ROWS)                                                       \
    X(BLOCKWISE_GATHER_DATA, "blockwise_gather", KVS_MUTANT_ROWS)                                                      \
    X(BLOCKWISE_GATHER_SCALE, "blockwise_gather", KVS_MUTANT_ROWS)                                                     \
    X(KV_WRITE_KEY, "kv_write", KVS_MUTANT_ROWS)                                                                       \
    X(KV_WRITE_VALUE, "kv_write", KVS_MUTANT_ROWS)                                                                     \
    X(MLA_EXTEND, "mla_extend", KVS_MUTANT_ROWS)                                                                       \
    X(KV_DECODE_KEY, "kv_decode", KVS_MUTANT_ROWS)                                                                     \
    X(KV_DECODE_VALUE, "kv_decode", KVS_MUTANT_ADDRESS)                                                                \
    X(BLOCK_COPY_SOURCE, "block_copy", KVS_MUTANT_PAGES)                                                               \
    X(BLOCK_COPY_TARGET, "block_copy", KVS_MUTANT_ADDRESS)                                                             \
    X(BLOCK_SUM, "block_sum", KVS_MUTANT_PAGES)                                                                        \
    X(INDEX_CONVERT, "index_convert", KVS_MUTANT_TOKENS)

typedef enum kvs_site {
    KVS_SITE_NONE = 0, /* tests and tools */
#define X(name, operation, mutants) KVS_SITE_##name,
    KVS_SITE_MAP(X)
#undef X
        KVS_SITES
} kvs_site;

#endif
