#ifndef KVS_PROTO_LAYOUT_H
#define KVS_PROTO_LAYOUT_H

/* Layouts and namespaces: how a model's KV looks, who may share it, and the one canonical way to write that down.
 *
 * Knows planes, formats, offsets and digests.  Does not know pools, sockets or devices.  Any thread; plain values.
 * NULL: err may be; a text that is missing is an empty one, salt and adapter for example; else E_INVALID, which names it.
 *
 * A block holds tokens_per_block tokens of every plane, the planes in list order, contiguous:
 *
 *   block: | plane 0: page_bytes | plane 1: page_bytes | ... | plane n-1 |      slot_bytes = sum of page_bytes
 *
 * Every page_bytes is a multiple of 16, so each page of a 16-byte-aligned slot is aligned.  Bytes per token never
 * identify a format: the format does. */

#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default) /* part of libkvstride */

/*      name           id  bytes a token: fixed, or 0 = the caller's row_bytes */
#define KVS_FORMAT_MAP(X)                                                                                              \
    X(mla_bf16, 1, 1152)   /* 512 latent + 64 rope, bf16 */                                                            \
    X(mla_fp16, 2, 1152)   /* the same in fp16 */                                                                      \
    X(mla_fp8, 3, 576)     /* e4m3, one scale a tensor */                                                              \
    X(fp8_ds_mla, 4, 656)  /* 512 e4m3 + 4 fp32 scales + 64 bf16 */                                                    \
    X(indexer_fp8, 5, 132) /* 128 e4m3 + fp32 scale, page block-wise: data rows, then scales */                        \
    X(kv_bf16, 6, 0)       /* K or V of GQA/MHA: heads x dim x 2 */                                                    \
    X(kv_fp16, 7, 0)                                                                                                   \
    X(kv_fp8, 8, 0)                                                                                                    \
    X(raw, 9, 0)           /* bytes; moved and stored, never computed on */                                            \
    X(mla_fp32, 10, 2304)  /* 512 latent + 64 rope, fp32; written and copied, never attended to */                     \
    X(fp8_blk584, 11, 584) /* 448 e4m3 + 64 bf16, then 7 ue8m0 + a zero byte; page block-wise */                       \
    X(fp8_blk528, 12, 528) /* 512 e4m3, then 16 ue8m0; page block-wise */

typedef enum kvs_format {
#define X(name, id, row) KVS_FORMAT_##name = (id),
    KVS_FORMAT_MAP(X)
#undef X
} kvs_format;

enum {
    KVS_PLANE_NAME_BYTES = 24, /* with the closing zero */
    KVS_TAG_BYTES = 256,       /* with the closing zero */
    KVS_MAX_PLANES = 1024,
    KVS_MAX_TOKENS_PER_BLOCK = 4096,
    KVS_DIGEST_BYTES = 32,
};
#define KVS_MAX_OFFSET (UINT64_C(1) << 40) /* plane offsets, page pitches and slot strides stay below */

typedef struct kvs_plane {
    char name[KVS_PLANE_NAME_BYTES]; /* [a-z0-9_]+, as "latent", "indexer", "k", "v" */
    uint32_t layer;
    uint32_t format;     /* kvs_format */
    uint32_t row_bytes;  /* bytes a token; the format's own, where that is fixed */
    uint32_t reserved;   /* 0 */
    uint64_t page_bytes; /* >= tokens_per_block * row_bytes, multiple of kvs_format_page_align */
} kvs_plane;

typedef enum kvs_shard_kind {
    KVS_SHARD_REPLICATED = 0, /* every rank holds the same bytes */
    KVS_SHARD_HEADS = 1,      /* heads [a,b) of n */
    KVS_SHARD_LAYERS = 2,     /* layers [a,b) of n */
} kvs_shard_kind;

/* What makes two caches the same.  The tenant is not in here: the socket decides it. */
typedef struct kvs_namespace {
    char model[KVS_TAG_BYTES];          /* 1..255 bytes of UTF-8 without control characters */
    char weights[KVS_TAG_BYTES];        /* revision, quantisation, RoPE and adapter settings; 0..255 bytes */
    uint32_t shard;                     /* kvs_shard_kind */
    uint32_t shard_a, shard_b, shard_n; /* 0,0,0 if replicated; else a < b <= n */
    uint32_t tokens_per_block;          /* 1..4096 */
    uint32_t n_planes;                  /* 1..1024 */
    const kvs_plane *planes;            /* [n_planes], the caller's */
} kvs_namespace;

/* "mla_bf16" -> id; also the documented aliases "bf16"/"bfloat16", "fp16"/"float16"/"half" and "fp8" of MLA geometry
 * (mla_bf16, mla_fp16, mla_fp8).  "auto" is refused: resolve it before you ask.  E_UNSUPPORTED names the value. */
kvs_status kvs_format_parse(const char *name, uint32_t *ret, kvs_err *err);
const char *kvs_format_name(uint32_t format);   /* NULL for a number that is none */
uint32_t kvs_format_row_bytes(uint32_t format); /* 0: not fixed by the format */
/* What page_bytes is a multiple of: 16; of the block-wise formats the row that hardware reads pages by, 576 and 512. */
uint32_t kvs_format_page_align(uint32_t format);

/* Check every rule above.  E_INVALID / E_LIMIT / E_UNSUPPORTED name field, value and limit. */
kvs_status kvs_namespace_check(const kvs_namespace *ns, kvs_err *err);

/* Bytes of a block; offset of plane `p` inside it (p == n_planes gives slot_bytes).  For a checked namespace. */
uint64_t kvs_namespace_slot_bytes(const kvs_namespace *ns);
uint64_t kvs_namespace_plane_offset(const kvs_namespace *ns, uint32_t p);

/* The canonical description (PROTOCOL.md, "Namespaces"): bytes that are equal exactly when two namespaces are.
 * Checks first.  *ret_len is the length, also when it is more than cap: then E_LIMIT and nothing useful is in buf. */
kvs_status kvs_namespace_encode(const kvs_namespace *ns, uint8_t *buf, size_t cap, size_t *ret_len, kvs_err *err);

/* Decode and check a canonical description; planes go to `planes` [cap_planes].  Any second spelling is E_PROTO. */
kvs_status kvs_namespace_decode(const uint8_t *buf, size_t len, kvs_plane *planes, uint32_t cap_planes,
                                kvs_namespace *ret, kvs_err *err);

/* SHA-256 of the canonical description. */
kvs_status kvs_namespace_digest(const kvs_namespace *ns, uint8_t ret[KVS_DIGEST_BYTES], kvs_err *err);

/* The common case: n_layers planes "latent", layer 0..n-1, of an MLA format, page = tokens_per_block * row bytes rounded
 * up to kvs_format_page_align.  `planes` [n_layers] is the caller's and must outlive `ret`. */
kvs_status kvs_namespace_mla(const char *model, const char *weights, uint32_t format, uint32_t n_layers,
                             uint32_t tokens_per_block, kvs_plane *planes, kvs_namespace *ret, kvs_err *err);

/* A helper for clients that have no block hash of their own: key of a block from its parent's key (32 zeros for the
 * first block), salt, adapter and tokens, SHA-256 over tagged, length-prefixed fields (PROTOCOL.md, "Keys"). */
kvs_status kvs_key_derive(const uint8_t parent[32], const char *salt, const char *adapter, const uint32_t *tokens,
                          uint32_t n_tokens, uint8_t ret[32], kvs_err *err);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
