#ifndef KVS_KERNELS_INDEXER_H
#define KVS_KERNELS_INDEXER_H

/* Keys of the sparse indexer: quantise and cache them, gather them again.
 *
 *   page of indexer_fp8:  | token 0: 128 e4m3 | token 1 | ... | P-1 | scale of token 0: fp32 | 1 | ... | P-1 |
 *                         ^ view.row_bytes apart               ^ tokens_per_block * view.row_bytes, 4 bytes apart
 *
 * Knows views, gather lists and the page above.  Any thread; all memory is the caller's. */

#include "kernels/gather.h"
#include "kernels/value.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_INDEXER_DIMS = 128, KVS_INDEXER_SCALE_BYTES = 4 };
enum kvs_indexer_scale { KVS_INDEXER_SCALE_FP32 = 0, KVS_INDEXER_SCALE_UE8M0 = 1 /* a power of two, stored as fp32 */ };

/* Scale of a key whose greatest magnitude, of a bf16 or fp16, is amax: max(amax, 1e-4) / 448, for ue8m0 2^ceil(log2)
 * of that.  448 is 1.75 * 2^8: beyond a fraction of 1.75 the power is one more, and no value of 16 bits is so near to
 * it that the division would round over it.  Infinity stays. */
static inline KVS_HD float kvs_indexer_scale(float amax, uint32_t kind)
{
    const float least = amax > 1e-4f ? amax : 1e-4f;

    if (kind != KVS_INDEXER_SCALE_UE8M0 || kvs_f32_bits(amax) >= 0x7F800000u)
        return least / 448.0f;
    return kvs_f32_from_bits(((kvs_f32_bits(least) + 0x1FFFFFu) & 0x7F800000u) - (8u << 23));
}

/* Quantise rows of 128 values and write them with their scales through a slot mapping.
 *   view          indexer_fp8; nothing but the named keys and scales is touched
 *   k             [n_tokens] rows of 128 values of k_type (KVS_VALUE_BF16 or _FP16), k_stride bytes apart; multiples
 *                 of 2
 *   slot_mapping  [>= n_tokens] block * tokens_per_block + offset; negative: the token is skipped.  The rows of k say
 *                 how many tokens there are: entries behind them are never read
 *   scale_kind    enum kvs_indexer_scale
 *   ret_bad       slots >= n_blocks * tokens_per_block: skipped and counted here
 * scale = kvs_indexer_scale(max |k[t][i]|) and
 * key[i] = e4m3(k[t][i] / scale): to nearest, ties to even, saturating; a NaN is 0x7F
 * and does not count for the maximum.  Duplicate slots: the last token wins.
 * E_UNSUPPORTED: format or type.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_indexer_write_args {
    kvs_view view;
    const uint8_t *k;
    uint64_t k_stride;
    const int64_t *slot_mapping;
    uint32_t n_tokens, k_type, scale_kind;
} kvs_indexer_write_args;
kvs_status kvs_indexer_write(const kvs_indexer_write_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.  ret_bad: one word of
 * device memory, set by the call; NULL: not counted.  Two tokens with one slot: the key may be of one and the scale of
 * the other. */
kvs_status kvs_indexer_write_cuda(const kvs_indexer_write_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                  kvs_err *err);

/* Keys and scales of paged sequences into dense arrays, bit for bit.
 *   view     indexer_fp8
 *   list     which token goes where (gather.h); n_rows may be an upper bound
 *   k        [list.n_rows] rows of 128 e4m3, k_stride bytes apart; any alignment
 *   scale    [list.n_rows] fp32, scale_stride bytes apart; multiples of 4
 *   ret_bad  rows that the tables gave no place for: left as they are, key and scale, and counted here
 * E_UNSUPPORTED: the format.  E_INVALID, E_LIMIT: found before any byte is written. */
typedef struct kvs_indexer_gather_args {
    kvs_view view;
    kvs_gather_list list;
    uint8_t *k, *scale;
    uint64_t k_stride, scale_stride;
} kvs_indexer_gather_args;
kvs_status kvs_indexer_gather(const kvs_indexer_gather_args *a, uint32_t *ret_bad, kvs_err *err);
kvs_status kvs_indexer_gather_cuda(const kvs_indexer_gather_args *a, uint32_t *ret_bad, struct CUstream_st *stream,
                                   kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_indexer_write_check(const kvs_indexer_write_args *a, kvs_err *err);
kvs_status kvs_indexer_gather_check(const kvs_indexer_gather_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
