#ifndef KVS_KERNELS_GATHER_DEQUANT_H
#define KVS_KERNELS_GATHER_DEQUANT_H

/* Gather and dequantise: rows of paged sequences into dense rows of plain values.
 *
 * Knows views, gather lists and e4m3 with one scale a tensor.  Any thread; all memory is the caller's. */

#include "kernels/gather.h"
#include "kernels/value.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

/* Widen the first `width` values of a token's row into each destination row that has a token.
 *   view      mla_fp8 or kv_fp8: e4m3, dequantised; mla_bf16, mla_fp16, mla_fp32, kv_bf16, kv_fp16: copied, dst_type
 *             is then the cache's own.  Never fp8_ds_mla, whose rows are no plain e4m3 (kvs_gather_upconvert)
 *   list      which token goes where (gather.h)
 *   width     320, 512 or 576 values
 *   scale     one fp32, read for e4m3 only; may be NULL otherwise
 *   dst       [list.n_rows] rows of width values of dst_type (enum kvs_value), dst_stride bytes apart, multiples of a
 *             value
 *   ret_bad   rows that the tables gave no place for: left as they are and counted here
 * dst[r][i] = round(fp32(e4m3[i]) * scale): exact, one product in fp32, one rounding to dst_type.  A NaN is one of its
 * kind: 0x7FFFFFFF rounded.  Rows of padding are left as they are.
 * E_UNSUPPORTED: format, width or dst_type.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_gather_dequant_args {
    kvs_view view;
    kvs_gather_list list;
    const float *scale;
    uint8_t *dst;
    uint64_t dst_stride;
    uint32_t width, dst_type;
} kvs_gather_dequant_args;
kvs_status kvs_gather_dequant(const kvs_gather_dequant_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer, scale too, is device memory; queued on `stream`, waits for nothing.
 * ret_bad: one word of device memory, set by the call; NULL: not counted. */
kvs_status kvs_gather_dequant_cuda(const kvs_gather_dequant_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                   kvs_err *err);

/* What both sides check before they touch memory.  *ret_type: of the values in the cache, 0 = e4m3. */
kvs_status kvs_gather_dequant_check(const kvs_gather_dequant_args *a, uint32_t *ret_type, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
