#ifndef KVS_KERNELS_MLA_EXTEND_H
#define KVS_KERNELS_MLA_EXTEND_H

/* MLA attention of ragged queries over cached prefixes: the suffix of a prompt behind what is cached, in the absorbed form
 * of kvs_mla_decode.  C reference here, CUDA in mla_extend.cu.
 *
 * Knows views and strides.  Knows no keys, sockets or threads.  Any thread; all memory is the caller's. */

#include <stdint.h>

#include "kernels/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* Attention of n_tokens query tokens of n_seqs sequences, each with as many queries as it brings.
 *   view          mla_bf16, mla_fp16, mla_fp8 or fp8_ds_mla
 *   q_nope        [n_tokens][h_q][512] fp16 for mla_fp16, else bf16
 *   q_pe          [n_tokens][h_q][64] likewise
 *   q_start       [n_seqs + 1] int32; queries of sequence i are q_start[i] .. q_start[i + 1] - 1: never falling, 0 ..
 *                 n_tokens.  Tokens in front of q_start[0] and from q_start[n_seqs] on are padding: nothing of them is
 *                 written
 *   seq_len       [n_seqs] tokens in the cache, the new ones included (write them first); negative or too long is bad
 *   block_table   [n_seqs][table_width] int32; entries past ceil(len / P) are never read
 *   sm_scale, kv_scale, parts, fixed_split   as in kvs_mla_decode; parts cuts all tokens of a sequence, seen or not
 *   out           [n_tokens][h_q][512] of the queries' type: softmax(sm_scale q.k) v
 *   lse           [n_tokens][h_q] fp32, natural log of the sum of exponents
 *   stop          a flag that another thread may set to end the call early, in C; or NULL
 * With s = q_start[i + 1] - q_start[i], query j of sequence i sees tokens 0 .. seq_len[i] - s + j (causal behind the
 * prefix).  A query that sees nothing: out 0, lse -inf.  A sequence without queries is not looked at.
 * A table entry outside 0..n_blocks-1 is skipped with its tokens and counted in ret->bad; so are a bad length (as 0) and
 * a q_start[i] .. q_start[i + 1] that is no such range (as without queries).
 * Equal inputs, parts and kernel id give equal bits whatever the strides, the neighbours and the padding.
 * Errors are found before anything is written: E_UNSUPPORTED, E_INVALID, E_LIMIT; but E_CANCELLED, stopped. */
typedef struct kvs_mla_extend_args {
    kvs_view view;
    kvs_strided q_nope, q_pe, out, lse;
    const int32_t *q_start, *seq_len;
    const int32_t *block_table;
    uint64_t table_stride; /* elements from row to row, >= table_width */
    uint32_t n_seqs, n_tokens, table_width, h_q, parts;
    uint32_t fixed_split; /* 0 or 1 */
    float sm_scale;
    const float *kv_scale;
    const bool *stop;
} kvs_mla_extend_args;

uint64_t kvs_mla_extend_workspace(const kvs_mla_extend_args *a); /* as kvs_mla_decode_workspace */
kvs_status kvs_mla_extend(const kvs_mla_extend_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err);

/* All of the arguments but the workspace; reads none of the arrays. */
kvs_status kvs_mla_extend_check(const kvs_mla_extend_args *a, kvs_err *err);

/* The same by tensor cores; every pointer in device memory.  As kvs_mla_decode_cuda, its launch rule included: with n_seqs
 * and n_tokens in the place of s_q.  Where q_start falls, no more is promised of the outputs than that nothing else is
 * written and that ret_bad is not 0. */
uint32_t kvs_mla_extend_cuda_parts(const kvs_mla_extend_args *a);
uint64_t kvs_mla_extend_cuda_workspace(const kvs_mla_extend_args *a);
kvs_status kvs_mla_extend_cuda(const kvs_mla_extend_args *a, void *workspace, uint64_t workspace_bytes,
                               uint32_t *ret_bad, kvs_mla_decode_result *ret, struct CUstream_st *stream, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
