#ifndef KVS_KERNELS_MHA_RAGGED_H
#define KVS_KERNELS_MHA_RAGGED_H

/* Attention of ragged queries over keys and values that lie side by side: MLA's other form, with a prefix that was gathered
 * and projected up (192 and 128 dimensions), or any MHA without pages.  C reference here, CUDA in mha_ragged.cu.
 *
 * Knows strides.  Knows no pages: nothing here turns a block id into an address.  Any thread; all memory is the caller's. */

#include <stdint.h>

#include "kernels/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_MHA_MAX_V = 128 };

/* Sequence i has queries q_start[i] .. q_start[i + 1] - 1 and keys k_start[i] .. k_start[i + 1] - 1.
 *   q             [n_q][h][d_qk] fp16 or bf16 (is_fp16)
 *   k             [n_k][h][d_qk]; base and strides multiples of 16
 *   v             [n_k][h][d_v]; likewise
 *   q_start, k_start   [n_seqs + 1] int32, never falling, 0 .. n_q and 0 .. n_k; queries of no sequence are not written
 *   d_qk          64..256, d_v 64..128; multiples of 16
 *   causal        0: every query sees all keys of its sequence.  1: of s queries and n keys, query j sees keys
 *                 0 .. n - s + j, so that the last query sees all
 *   sm_scale      multiplies q.k; finite
 *   out           [n_q][h][d_v] of q's type: softmax(sm_scale q.k) v
 *   lse           [n_q][h] fp32, natural log of the sum of exponents: for kvs_merge_states
 * A query that sees nothing: out 0, lse -inf.  A range that is none (falling, or beyond n_q or n_k) counts as bad: of
 * queries, they are skipped; of keys, there are none.
 * Accumulates in fp32 with a fixed order: equal inputs give equal bits whatever the strides and the neighbours.  Errors are
 * found before anything is written: E_INVALID, E_LIMIT. */
typedef struct kvs_mha_ragged_args {
    kvs_strided q, k, v, out, lse;
    const int32_t *q_start, *k_start;
    uint32_t n_seqs, n_q, n_k, h, d_qk, d_v;
    uint32_t causal, is_fp16; /* 0 or 1 */
    float sm_scale;
} kvs_mha_ragged_args;

uint64_t kvs_mha_ragged_workspace(const kvs_mha_ragged_args *a); /* of the C function; 0 for refused shapes */
kvs_status kvs_mha_ragged(const kvs_mha_ragged_args *a, void *workspace, uint64_t workspace_bytes, uint32_t *ret_bad,
                          kvs_err *err);

/* All of the arguments but the workspace; reads none of the arrays. */
kvs_status kvs_mha_ragged_check(const kvs_mha_ragged_args *a, kvs_err *err);

/* The same by tensor cores; every pointer in device memory, no workspace; the launch depends on n_seqs, n_q, h and
 * dimensions alone.  ret_bad: one word, or NULL.  Where q_start falls, no more is promised of the outputs than that nothing
 * else is written and that ret_bad is not 0. */
kvs_status kvs_mha_ragged_cuda(const kvs_mha_ragged_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                               kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
