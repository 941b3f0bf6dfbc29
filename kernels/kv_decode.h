#ifndef KVS_KERNELS_KV_DECODE_H
#define KVS_KERNELS_KV_DECODE_H

/* Decode attention with heads of keys and values: GQA, and MHA, which is GQA with groups of one.  C reference here, CUDA in
 * kv_decode.cu.
 *
 * Knows views and strides.  Knows no keys, sockets or threads.  Any thread; all memory is the caller's. */

#include <stdint.h>

#include "kernels/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum {
    KVS_ATTEND_MIN_DIM = 64,
    KVS_ATTEND_MAX_DIM = 256,
    KVS_ATTEND_DIM_STEP = 16,
    KVS_ATTEND_MAX_GROUP = 32,
    KVS_ATTEND_MAX_HEADS = 1024,
    KVS_ATTEND_MAX_TOKENS = INT32_MAX - 255, /* of a sequence: room to count a tile further */
};

/* Attention of T = n_seqs * s_q query tokens over paged keys and values.
 *   k, v          views of one format: kv_bf16, kv_fp16 or kv_fp8.  Head h of a token is d values (d_qk or d_v) at
 *                 h * head stride from the token's row: heads inside a token (row_bytes >= h_kv * d) or tokens inside a head
 *                 (row_bytes = d of a token).  tokens_per_block must be equal; everything else is each view's own
 *   k_head, v_head   bytes from head to head; multiples of 16
 *   q             [T][h_q][d_qk]; row of sequence i, position j is i * s_q + j.  Head h reads key-value head h / (h_q / h_kv)
 *   out           [T][h_q][d_v]; both of the views' type, for kv_fp8 of the type that q_fp16 says
 *   lse           [T][h_q] fp32, natural log of the sum of exponents
 *   seq_len       [n_seqs] tokens in the cache, the s_q new ones included; negative or too long counts as bad
 *   block_table   [n_seqs][table_width] int32, one id for k and v; entries past ceil(len / P), or before every window, are
 *                 never read
 *   d_qk, d_v     64..256, multiples of 16, each its own;  h_q: 1..32 times h_kv
 *   k_scale, v_scale   kv_fp8: a value is its e4m3 times this, finite; else not looked at
 *   sm_scale      multiplies q.k; finite.  logit_cap: 0, or > 0: the score is cap * tanh(score / cap)
 *   window        0, or how many tokens a query sees at most, its own included
 *   parts         1..256: the tokens that any query of the sequence sees are cut into this many equal ranges, merged in
 *                 increasing order; 0 and fixed_split as in kvs_mla_decode
 * Query j of s_q has position p = len - s_q + j and sees tokens max(0, p - window + 1) .. p.  A query that sees nothing:
 * out 0, lse -inf.  A table entry that is no block of both views is skipped with its tokens and counted in ret->bad; so is a
 * bad length (as 0).
 * out = softmax(cap(sm_scale k_scale q.k)) v v_scale, accumulated in fp32 with a fixed order: equal inputs, parts and kernel
 * id give equal bits whatever the strides, the neighbours and the padding.  Errors are found before anything is written:
 * E_UNSUPPORTED, E_INVALID, E_LIMIT. */
typedef struct kvs_kv_decode_args {
    kvs_view k, v;
    uint64_t k_head, v_head;
    kvs_strided q, out, lse;
    const int32_t *seq_len;
    const int32_t *block_table;
    uint64_t table_stride; /* elements from row to row, >= table_width */
    uint32_t n_seqs, table_width, s_q, h_q, h_kv, d_qk, d_v, window, parts;
    uint32_t fixed_split, q_fp16; /* 0 or 1 */
    float sm_scale, logit_cap, k_scale, v_scale;
} kvs_kv_decode_args;

/* Bytes of scratch that kvs_kv_decode needs for these shapes; 0 for refused shapes. */
uint64_t kvs_kv_decode_workspace(const kvs_kv_decode_args *a);
kvs_status kvs_kv_decode(const kvs_kv_decode_args *a, void *workspace, uint64_t workspace_bytes,
                         kvs_mla_decode_result *ret, kvs_err *err);

/* All of the arguments but the workspace. */
kvs_status kvs_kv_decode_check(const kvs_kv_decode_args *a, kvs_err *err);

/* The same by tensor cores; every pointer in device memory.  Rules as for kvs_mla_decode_cuda: parts == 0 is resolved by
 * kvs_kv_decode_cuda_parts from sizes, workspace is 16-byte aligned, ret_bad may be NULL, a call may be captured.  A value
 * that is not finite in a token that another query of the same block of rows sees can reach a row as 0 * NaN. */
uint32_t kvs_kv_decode_cuda_parts(const kvs_kv_decode_args *a);
uint64_t kvs_kv_decode_cuda_workspace(const kvs_kv_decode_args *a);
kvs_status kvs_kv_decode_cuda(const kvs_kv_decode_args *a, void *workspace, uint64_t workspace_bytes, uint32_t *ret_bad,
                              kvs_mla_decode_result *ret, struct CUstream_st *stream, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
