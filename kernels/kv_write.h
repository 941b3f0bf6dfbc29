#ifndef KVS_KERNELS_KV_WRITE_H
#define KVS_KERNELS_KV_WRITE_H

/* Reshape and cache: keys and values of GQA and MHA into their pages.
 *
 *   NHD:          row = token, heads inside it               row_bytes = heads * dim, head_stride = dim
 *   HND:          head after head, its tokens as rows        row_bytes = dim,         head_stride = tokens * dim
 *   interleaved:  K and V of a token side by side, HND       row_bytes = 2 * dim,     head_stride = tokens * 2 * dim,
 *                                                            the V view's base is the K view's + dim
 *                                                            (all in bytes)
 *
 * K and V are two views: neither's strides, dims or places are taken from the other.
 *
 * Knows views and formats.  Any thread; all memory is the caller's. */

#include "kernels/value.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_KV_MAX_DIM = 1024, KVS_KV_MAX_HEADS = 1024 };

/* One of the two: where it comes from and where it goes to. */
typedef struct kvs_kv_side {
    kvs_view view;        /* kv_bf16, kv_fp16 or kv_fp8; rows are tokens */
    uint64_t head_stride; /* bytes from head to head inside a page; multiple of a value of the cache */
    kvs_strided src;      /* [n_tokens][n_heads][dim] of src_type; multiples of a value */
    const float *scale;   /* kv_fp8: fp32, one, or one a head; else not looked at */
    uint32_t dim;         /* 1..1024 values */
} kvs_kv_side;

/* Write n_tokens keys and values through a slot mapping.
 *   src_type      enum kvs_value; kv_fp8 takes every type, kv_bf16 and kv_fp16 their own
 *   n_heads       1..1024 heads of K and of V
 *   head_scales   0: scale[0] for all heads; 1: scale[n_heads]
 *   slot_mapping  [n_tokens] block * tokens_per_block + offset; negative: the token is skipped.  Its length is the
 *                 number of tokens: key and value may have more rows
 *   ret_bad       slots >= n_blocks * tokens_per_block: skipped and counted here
 * page(block) + offset * row_bytes + h * head_stride = src[t][h], bit for bit, or e4m3(src / scale): one division in
 * fp32, to nearest, ties to even, saturating; a NaN is 0x7F.  Nothing else is touched.  Duplicate slots: the last
 * token wins.  The views have one n_blocks and one tokens_per_block, heads of a page do not overlap and end inside
 * page_bytes.
 * E_UNSUPPORTED: format or type.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_kv_write_args {
    kvs_kv_side k, v;
    const int64_t *slot_mapping;
    uint32_t n_tokens, n_heads, src_type, head_scales;
} kvs_kv_write_args;
kvs_status kvs_kv_write(const kvs_kv_write_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer, scales too, is device memory; queued on `stream`, waits for nothing.  ret_bad: one
 * word of device memory, set by the call; NULL: not counted.  Two tokens with one slot: it holds a mixture of both. */
kvs_status kvs_kv_write_cuda(const kvs_kv_write_args *a, uint32_t *ret_bad, struct CUstream_st *stream, kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_kv_write_check(const kvs_kv_write_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
