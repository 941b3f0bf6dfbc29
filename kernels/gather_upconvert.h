#ifndef KVS_KERNELS_GATHER_UPCONVERT_H
#define KVS_KERNELS_GATHER_UPCONVERT_H

/* Gather and upconvert: fp8_ds_mla records of paged sequences into dense bf16 rows, the workspace of a bf16 prefill.
 *
 * Knows views, gather lists and the 656-byte record.  Any thread; all memory is the caller's.
 *
 *   record:  512 e4m3 | 4 fp32 scales, one for 128 values | 64 bf16, kept as they are */

#include "kernels/gather.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_UPCONVERT_VALUES = 576 };

/* Write 576 bf16 values of a token into each destination row that has one.
 *   view     fp8_ds_mla
 *   list     which token goes where (gather.h); open_end with row_starts = workspace starts: the last request runs to
 *            n_rows
 *   dst      [list.n_rows] rows of 576 bf16, dst_stride bytes apart; multiples of 2
 *   ret_bad  rows that the tables gave no place for: left as they are and counted here
 * dst[r][i] = bf16(fp32(e4m3[i]) * scale[i / 128]) for i < 512: exact, one product, one rounding; then the rope part
 * bit for bit.  A NaN is 0x7FFF.  Rows of padding are left as they are.
 * E_UNSUPPORTED: the format.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_gather_upconvert_args {
    kvs_view view;
    kvs_gather_list list;
    uint8_t *dst;
    uint64_t dst_stride;
} kvs_gather_upconvert_args;
kvs_status kvs_gather_upconvert(const kvs_gather_upconvert_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.
 * ret_bad: one word of device memory, set by the call; NULL: not counted. */
kvs_status kvs_gather_upconvert_cuda(const kvs_gather_upconvert_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                     kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_gather_upconvert_check(const kvs_gather_upconvert_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
