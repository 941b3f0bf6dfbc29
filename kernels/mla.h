#ifndef KVS_KERNELS_MLA_H
#define KVS_KERNELS_MLA_H

/* MLA on a view: write rows of new tokens, decode attention over them.  C reference implementations; the CUDA ones sit
 * beside them (mla_write.cu, mla_decode.cu) behind the same argument structs.
 *
 * Knows views and strides.  Knows no keys, sockets or threads.  Any thread; all memory is the caller's.
 *
 * Geometry: latent R = 512 values, rope D = 64 values, a row is latent then rope. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/value.h"
#include "kernels/view.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    KVS_MLA_LATENT = 512,
    KVS_MLA_ROPE = 64,
    KVS_MLA_MAX_PARTS = 256,
    KVS_MLA_MAX_HEADS = 128,
    KVS_MLA_MAX_SQ = 8,
    KVS_MLA_MAX_LAYERS = 256
};

/* Ids echoed in replies: equal lengths, parts and kernel id give equal bits. */
enum kvs_kernel_id {
    KVS_KERNEL_MLA_DECODE_C = 1,
    KVS_KERNEL_MLA_DECODE_MMA = 2, /* CUDA, mma.sync */
    KVS_KERNEL_MLA_SPARSE_C = 3,
    KVS_KERNEL_MLA_SPARSE_MMA = 4,
    KVS_KERNEL_MLA_EXTEND_C = 5,
    KVS_KERNEL_MLA_EXTEND_MMA = 6,
    KVS_KERNEL_KV_DECODE_C = 7,
    KVS_KERNEL_KV_DECODE_MMA = 8
};

/* Write n_tokens rows through a slot mapping.
 *   view          mla_bf16, mla_fp16, mla_fp32, mla_fp8 or fp8_ds_mla; written in place, nothing but the named rows is
 *                 touched
 *   kv_c          [n_tokens] rows of 512 values of src_type, kv_c_stride bytes apart; aligned to one value
 *   k_pe          [n_tokens] rows of 64 values, k_pe_stride bytes apart
 *   slot_mapping  [n_tokens] block * tokens_per_block + offset; negative: the token is skipped
 *   src_type      enum kvs_value: mla_fp8 takes every one, the others that of the format (fp8_ds_mla: bf16), which 0
 *                 stands for
 *   scale         mla_fp8: one fp32; else not looked at
 *   stop          a flag that another thread may set to end the call early, in C; or NULL
 *   ret_bad       slots >= n_blocks * tokens_per_block: skipped and counted here
 * x = kv_c[t], then k_pe[t]; view.row(slot) =
 *   mla_bf16, mla_fp16, mla_fp32   x[0..576), bit for bit
 *   mla_fp8                        e4m3(x[i] / scale): one division in fp32, to nearest even, saturating; NaN is 0x7F
 *   fp8_ds_mla                     512 e4m3(x[i] / s[i / 128]), then s[0..4) in fp32, then the 64 rope values bit for
 *                                  bit, where s = max(amax of the 128 values / 448, 2^-126); a NaN is not in the amax
 * Duplicate slots: the last token wins.
 * E_UNSUPPORTED: another format or type.  E_INVALID: a stride below the row, no scale (checked before any byte is
 * written).  E_CANCELLED: stopped. */
typedef struct kvs_mla_write_args {
    kvs_view view;
    const uint8_t *kv_c, *k_pe;
    uint64_t kv_c_stride, k_pe_stride;
    const int64_t *slot_mapping;
    uint32_t n_tokens, src_type;
    const float *scale;
    const bool *stop;
} kvs_mla_write_args;
kvs_status kvs_mla_write(const kvs_mla_write_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same for all layers of a model at once.  Layers share strides, format and bounds; each has a base, rows, slots
 * and a scale of its own.
 *   view               of every layer; its base is not looked at
 *   base               [n_layers] first byte of page 0 of each layer.  Host memory on every device, read before the
 *                      call returns: what cannot be addressed is refused
 *   kv_c, k_pe         [n_layers][n_tokens] rows, *_layer_stride bytes from layer to layer (0: the same rows)
 *   slot_mapping       [n_layers][n_tokens], slot_layer_stride entries from layer to layer (0: one list for all)
 *   scale              mla_fp8: [n_layers] fp32
 *   ret_bad            over all layers */
typedef struct kvs_mla_write_layers_args {
    kvs_view view;
    uint8_t *const *base;
    const uint8_t *kv_c, *k_pe;
    uint64_t kv_c_stride, k_pe_stride, kv_c_layer_stride, k_pe_layer_stride;
    const int64_t *slot_mapping;
    uint64_t slot_layer_stride;
    uint32_t n_tokens, src_type, n_layers; /* n_layers: 0..KVS_MLA_MAX_LAYERS */
    const float *scale;
} kvs_mla_write_layers_args;
kvs_status kvs_mla_write_layers(const kvs_mla_write_layers_args *a, uint32_t *ret_bad, kvs_err *err);

/* Attention of T = n_seqs * s_q query rows over paged latents (absorbed form: K = row[0..576), V = row[0..512)).
 *   view          mla_bf16, mla_fp16, mla_fp8 or fp8_ds_mla
 *   q_nope        [T][h_q][512] fp16 for mla_fp16, else bf16; row of sequence i, position j is i * s_q + j
 *   q_pe          [T][h_q][64] likewise
 *   seq_len       [n_seqs] tokens in the cache, the s_q new ones included; negative or too long counts as bad
 *   block_table   [n_seqs][table_width] int32; entries past ceil(len / P) are never read
 *   sm_scale      multiplies q.k; finite
 *   kv_scale      mla_fp8: one fp32, what a stored 1.0 stands for; else not looked at
 *   parts         1..256: the tokens of a sequence are cut into this many equal ranges of ceil(len / parts), merged in
 *                 increasing order; 0 = chosen from the longest length (fixed_split: from table_width, so that the
 *                 result of a row does not depend on its neighbours)
 *   out           [T][h_q][512] of the queries' type: softmax(sm_scale q.k) v
 *   lse           [T][h_q] fp32, natural log of the sum of exponents
 *   stop          a flag that another thread may set to end the call early, in C; or NULL
 * k and v of mla_fp8 are kv_scale times e4m3: the bytes are widened exactly, kv_scale goes into sm_scale and the
 * output.  Those of fp8_ds_mla are e4m3 times the fp32 scale of their 128 values, and 64 bf16.
 * Query j of s_q sees tokens 0 .. len - s_q + j (causal).  A query that sees nothing: out 0, lse -inf.
 * A table entry outside 0..n_blocks-1 is skipped with its tokens and counted in ret_bad; so is a bad length (as 0).
 * Accumulates in fp32 with a fixed order: equal inputs, parts and kernel id give equal bits whatever the strides, the
 * neighbours and the padding rows.  Errors are found before anything is written: E_UNSUPPORTED, E_INVALID, E_LIMIT; but
 * E_CANCELLED, stopped. */
typedef struct kvs_mla_decode_args {
    kvs_view view;
    kvs_strided q_nope, q_pe, out, lse;
    const int32_t *seq_len;
    const int32_t *block_table;
    uint64_t table_stride; /* elements from row to row, >= table_width */
    uint32_t n_seqs, table_width, s_q, h_q, parts;
    uint32_t fixed_split; /* 0 or 1 */
    float sm_scale;
    const float *kv_scale;
    const bool *stop;
} kvs_mla_decode_args;

typedef struct kvs_mla_decode_result {
    uint32_t parts;  /* as used */
    uint32_t kernel; /* enum kvs_kernel_id */
    uint32_t bad;    /* lengths and table entries that were skipped */
} kvs_mla_decode_result;

/* Bytes of scratch that kvs_mla_decode needs for these shapes (partial results of all parts); 0 for refused shapes. */
uint64_t kvs_mla_decode_workspace(const kvs_mla_decode_args *a);
kvs_status kvs_mla_decode(const kvs_mla_decode_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err);

/* Merge partial state (src) into (dst): natural-log LSE, both fp32.  Two empty states stay empty (0, -inf). */
void kvs_merge_states(float *dst, float *dst_lse, const float *src, float src_lse, uint32_t n);

#ifdef __cplusplus
}
#endif
#endif
