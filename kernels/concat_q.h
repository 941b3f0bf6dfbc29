#ifndef KVS_KERNELS_CONCAT_Q_H
#define KVS_KERNELS_CONCAT_Q_H

/* Queries of MLA put together: the latent part of each head, then its rope part.
 *
 * Knows strides.  Knows no views.  Any thread; all memory is the caller's. */

#include "kernels/view.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* For each token t and head h, 2-byte values of any type:
 *   nope  [n_tokens][n_heads][512], pe [n_tokens][n_heads][64], out [n_tokens][n_heads][576]; strides multiples of 2
 *         bytes
 * out[t][h] = nope[t][h] then pe[t][h], bit for bit.  Rows are counted in 64 bits: n_tokens * n_heads may exceed 2^32.
 * E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_concat_q_args {
    kvs_strided nope, pe, out;
    uint32_t n_tokens, n_heads; /* n_heads from 1 up */
} kvs_concat_q_args;
kvs_status kvs_concat_q(const kvs_concat_q_args *a, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing. */
kvs_status kvs_concat_q_cuda(const kvs_concat_q_args *a, struct CUstream_st *stream, kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_concat_q_check(const kvs_concat_q_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
