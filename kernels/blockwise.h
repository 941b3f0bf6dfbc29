#ifndef KVS_KERNELS_BLOCKWISE_H
#define KVS_KERNELS_BLOCKWISE_H

/* Sparse-attention records whose pages are block-wise: write them, gather them as bf16.
 *
 *   fp8_blk584 page:  | token 0: 448 e4m3, 64 bf16 | 1 | ... | P-1 | token 0: 7 ue8m0, 0 | 1 | ... | P-1 | to 576 |
 *   fp8_blk528 page:  | token 0: 512 e4m3          | 1 | ... | P-1 | token 0: 16 ue8m0   | 1 | ... | P-1 | to 512 |
 *                     ^ view.row_bytes apart                       ^ tokens_per_block * view.row_bytes
 *
 * A token is 512 values; tiles of 64 (584) or 32 (528) of them share a scale, a power of two; of the 584 the last 64,
 * the rope part, are not quantised.  Bytes a token are no pitch: nothing here multiplies by 584 or 528.
 *
 * Knows views, gather lists and the pages above.  Any thread; all memory is the caller's. */

#include "kernels/gather.h"
#include "kernels/value.h"
#include "proto/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_BLOCKWISE_VALUES = 512, KVS_BLOCKWISE_MAX_TAIL = 16 };

typedef struct kvs_blockwise_shape {
    uint32_t quantised; /* values 0..quantised-1 are e4m3, those behind them bf16 */
    uint32_t tile;      /* values with one scale */
    uint32_t tail;      /* bytes of a token's scales; those behind the last scale are 0 */
} kvs_blockwise_shape;

static inline KVS_HD kvs_blockwise_shape kvs_blockwise_shape_of(uint32_t format)
{
    const kvs_blockwise_shape blk584 = {448, 64, 8}, blk528 = {512, 32, 16};

    return format == KVS_FORMAT_fp8_blk584 ? blk584 : blk528;
}

/* Scale of a tile whose greatest magnitude, a bf16, is amax: ceil(log2(max(amax, 1e-4) / 448)) + 127.  448 is
 * 1.75 * 2^8: beyond a fraction of 1.75 the exponent is one more, and no bf16 is so near to it that the division would
 * round over it.  1e-4 has 105.  Infinity gives 255, NaN to every reader. */
static inline KVS_HD uint8_t kvs_blockwise_code(float amax)
{
    const uint32_t bits = kvs_f32_bits(amax), code = ((bits + 0x1FFFFFu) >> 23) - 8u;

    if (amax < 1e-4f)
        return 105;
    return (uint8_t)(bits >= 0x7F800000u ? 255u : code);
}

/* Quantise rows of 512 values and write them with their scales through a slot mapping.
 *   view          fp8_blk584 or fp8_blk528; page_bytes a multiple of 576 or 512; padding is not touched
 *   x             [n_tokens] rows of 512 values of x_type (KVS_VALUE_BF16 or _FP32), x_stride bytes apart, multiples
 *                 of a value
 *   slot_mapping  [n_tokens] block * tokens_per_block + offset; negative: the token is skipped
 *   ret_bad       slots >= n_blocks * tokens_per_block: skipped and counted here
 * Each value is rounded to bf16 first; then code = kvs_blockwise_code(max |x| of the tile) and
 * byte = e4m3(x * 2^(127 - code)): to nearest, ties to even, saturating; a NaN is 0x7F and does not count for the
 * maximum.  Duplicate slots: the last token wins.
 * E_UNSUPPORTED: format or type.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_blockwise_write_args {
    kvs_view view;
    const uint8_t *x;
    uint64_t x_stride;
    const int64_t *slot_mapping;
    uint32_t n_tokens, x_type;
} kvs_blockwise_write_args;
kvs_status kvs_blockwise_write(const kvs_blockwise_write_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.  ret_bad: one word of
 * device memory, set by the call; NULL: not counted.  Two tokens with one slot: tiles may be of either, each with its
 * own scale. */
kvs_status kvs_blockwise_write_cuda(const kvs_blockwise_write_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                    kvs_err *err);

/* Tokens of paged sequences as dense rows of 512 bf16.
 *   view     fp8_blk584 or fp8_blk528; page_bytes a multiple of 576 or 512
 *   list     which token goes where (gather.h)
 *   dst      [list.n_rows] rows of 512 bf16, dst_stride bytes apart; multiples of 2
 *   ret_bad  rows that the tables gave no place for: left as they are and counted here
 * dst[r][i] = bf16(fp32(e4m3[i]) * 2^(code - 127)): one product, one rounding; rope values bit for bit.  A NaN is
 * 0x7FFF.
 * E_UNSUPPORTED: the format.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_blockwise_gather_args {
    kvs_view view;
    kvs_gather_list list;
    uint8_t *dst;
    uint64_t dst_stride;
} kvs_blockwise_gather_args;
kvs_status kvs_blockwise_gather(const kvs_blockwise_gather_args *a, uint32_t *ret_bad, kvs_err *err);
kvs_status kvs_blockwise_gather_cuda(const kvs_blockwise_gather_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                     kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_blockwise_view_check(const kvs_view *v, kvs_err *err);
kvs_status kvs_blockwise_write_check(const kvs_blockwise_write_args *a, kvs_err *err);
kvs_status kvs_blockwise_gather_check(const kvs_blockwise_gather_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
