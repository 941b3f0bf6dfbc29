#ifndef KVS_KERNELS_MLA_SPARSE_H
#define KVS_KERNELS_MLA_SPARSE_H

/* Sparse MLA decode: every query token attends to its own list of tokens.
 *
 * Knows views and index lists.  Knows no keys, sockets or threads.  Any thread; all memory is the caller's.
 *
 * Formats (proto/layout.h), and what is key and value of a token:
 *   fp8_ds_mla   d = 576: k = 512 e4m3 in tiles of 128, times their fp32 scale, then 64 bf16; v = k[0..512)
 *   fp8_blk584   d = 512: k = 448 e4m3 in tiles of 64, times their ue8m0 scale, then 64 bf16; v = k, rope and all
 *   fp8_blk528   d = 512: k = 512 e4m3 in tiles of 32, times their ue8m0 scale, rope quantised like the rest; v = k
 * The block-wise two keep rows of 576 and 512 bytes (view.row_bytes: or more) and behind a page's rows its scales, 8 and
 * 16 bytes a token: 7 codes and a byte that is not looked at, or 16 codes.  A query is d values: q_nope then q_pe. */

#include "kernels/index.h"
#include "kernels/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { KVS_MLA_MAX_TOPK = 32768 };

/* Attention of T = n_seqs * s_q query tokens.
 *   view          fp8_ds_mla, fp8_blk584 or fp8_blk528
 *   q_nope        [T][h_q][512] bf16; [T][h_q][448] for the block-wise formats
 *   q_pe          [T][h_q][64] bf16
 *   indices       [T][topk] logical; -1 anywhere: no token.  One that is named twice counts twice.  Not causal: the
 *                 list says what a token sees
 *   index_stride  entries from a list to the next, >= topk
 *   topk_length   [n_seqs] leading entries that count, for all s_q tokens; NULL: topk.  Below 0 or above topk is bad (0)
 *   topk          1..32768
 *   sink          [h_q] fp32 or NULL: out is multiplied by e^lse / (e^lse + e^sink); lse is not changed
 *   sm_scale      multiplies q.k; finite
 *   parts         1..256: a list is cut into this many equal ranges, merged in increasing order; 0 = chosen from the
 *                 longest length (fixed_split: from topk)
 *   out           [T][h_q][512] bf16
 *   lse           [T][h_q] fp32, natural log of the sum of exponents
 * A token without one good index: out 0, lse -inf, whatever the sink is.
 * An index that is neither -1 nor below n_blocks * tokens_per_block is skipped and counted in ret_bad, once in each list;
 * so is a bad length.  Errors are found before anything is written: E_UNSUPPORTED, E_INVALID, E_LIMIT. */
typedef struct kvs_mla_sparse_args {
    kvs_view view;
    kvs_strided q_nope, q_pe, out, lse;
    const kvs_logical_index *indices;
    uint64_t index_stride;
    const int32_t *topk_length;
    const float *sink;
    uint32_t n_seqs, s_q, h_q, topk, parts;
    uint32_t fixed_split; /* 0 or 1 */
    float sm_scale;
} kvs_mla_sparse_args;

/* As kvs_mla_decode_workspace and kvs_mla_decode. */
uint64_t kvs_mla_sparse_workspace(const kvs_mla_sparse_args *a);
kvs_status kvs_mla_sparse(const kvs_mla_sparse_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err);

/* All of kvs_mla_sparse's arguments but the workspace. */
kvs_status kvs_mla_sparse_check(const kvs_mla_sparse_args *a, kvs_err *err);

/* By tensor cores; as kvs_mla_decode_cuda (kernels_cuda.h): parts == 0 is resolved by the shapes, never from
 * topk_length; ret_bad is a word of device memory or NULL; ret->bad is left 0. */
struct CUstream_st;
uint32_t kvs_mla_sparse_cuda_parts(const kvs_mla_sparse_args *a);
uint64_t kvs_mla_sparse_cuda_workspace(const kvs_mla_sparse_args *a);
kvs_status kvs_mla_sparse_cuda(const kvs_mla_sparse_args *a, void *workspace, uint64_t workspace_bytes,
                               uint32_t *ret_bad, kvs_mla_decode_result *ret, struct CUstream_st *stream, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
