#ifndef KVS_KERNELS_MLA_LAUNCH_CUH
#define KVS_KERNELS_MLA_LAUNCH_CUH

/* What the launchers of the MLA attention kernels share: the arguments that travel by value, how work is cut, and the
 * kernel that joins parts.
 *
 * Knows shapes.  Does not know formats.  Any thread, on its current device; nothing here waits or allocates. */

#include <cuda_runtime.h>

#include "kernels/mla.h"

/* kvs_mla_decode_args and kvs_mla_sparse_args in the terms of a kernel.  A unit is a sequence (dense) or a query token
 * (sparse): what thread blocks are counted over. */
struct attend_params {
    kvs_view view;
    kvs_strided q_nope, q_pe, out, lse;
    const int32_t *length; /* of a unit; NULL: list_width each (sparse) */
    /* Extend: queries of sequence i are q_start[i] .. q_start[i + 1], and a unit is a query token but for `length` and
     * `list`, which the n_seqs sequences have.  NULL: a unit has s_q queries. */
    const int32_t *q_start;
    uint32_t n_seqs;
    kvs_site site;         /* of dense kernels */
    const int32_t *list;   /* [n_units] block tables, or token indices */
    uint64_t list_stride;  /* elements from one to the next */
    float *part_out;       /* [n_units * rows][parts][512]; used if parts > 1 */
    float *part_lse;       /* [n_units * rows][parts] */
    uint32_t *bad;         /* counted here, unless NULL */
    const float *kv_scale; /* of keys, values and so of the result; NULL: 1 */
    const float *sink;     /* [h_q] or NULL */
    uint32_t list_width;   /* elements of a list */
    uint32_t n_units;
    uint32_t s_q, h_q, rows; /* query positions of a unit (sparse: 1), heads; rows = s_q * h_q */
    uint32_t units_a_length; /* units that share an entry of `length` */
    uint32_t n_indices;      /* sparse: an index from here on is bad */
    uint32_t row_blocks;     /* thread blocks that the rows of a unit take; extend: that all rows take at most */
    uint32_t parts;
    uint32_t step_pages, step_tokens; /* dense: from a tile to the next, over and modulo tokens_per_block */
    float scale_log2;                 /* of q.k */
    uint32_t q_aligned;               /* q_nope and q_pe: bases and strides are multiples of 16 */
    uint32_t out_aligned;             /* out: of 8 */
};

/* May a thread block have that many bytes of shared memory, and a processor `blocks` such blocks at once? */
bool mla_has_shared(int bytes, int blocks);

/* 32 rows a thread block where there are as many and `wide_bytes` of shared memory may be had, else 16. */
uint32_t mla_rows_a_block(uint32_t rows, int wide_bytes);

/* Parts where the caller leaves the choice: enough to fill the card, for units of at most `longest` tokens; `fixed`:
 * from `longest` alone. */
uint32_t mla_auto_parts(uint64_t n_units, uint32_t rows, uint32_t rows_a_block, uint64_t longest, bool fixed);

/* Rows of partial results, and the bytes that they take. */
uint64_t mla_partials(uint64_t n_units, uint32_t rows, uint32_t parts);
uint64_t mla_workspace(uint64_t partials);

/* Fields that follow from the others: rows, row_blocks, partial results in `workspace`, alignments.  E_LIMIT: the
 * workspace is too small, or the launch would be too large. */
kvs_status mla_launch_fill(attend_params *p, uint32_t rows_a_block, void *workspace, uint64_t workspace_bytes,
                           uint64_t *ret_blocks, kvs_err *err);

/* Join the parts of every row into out and lse, in increasing order. */
cudaError_t mla_join_init();
cudaError_t mla_join_launch(const attend_params &p, bool is_fp16, cudaStream_t stream);

/* LSE of a row that no sequence has (extend): bytes of 0xFF, a NaN that arithmetic does not make. */
enum : uint32_t { MLA_NOBODY = 0xFFFFFFFFu };

/* mla_decode.cu: dense attention of the view's format, and the join of its parts. */
int mla_dense_wide_bytes(uint32_t format);
cudaError_t mla_dense_launch(const attend_params &p, uint32_t rows_a_block, uint64_t blocks, cudaStream_t stream);

/* mla_decode_fp8.cu */
cudaError_t mla_decode_fp8_init();
int mla_decode_fp8_wide_bytes();
cudaError_t mla_decode_fp8_launch(const attend_params &p, uint32_t rows_a_block, uint64_t blocks, cudaStream_t stream);

#endif
