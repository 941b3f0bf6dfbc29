#ifndef KVS_KERNELS_MERGE_H
#define KVS_KERNELS_MERGE_H

/* Merge of two partial attention states: what was seen of a prefix, and what was seen of a suffix.
 *
 * Knows strides and value types.  Knows no views.  Any thread; all memory is the caller's. */

#include "kernels/value.h"
#include "kernels/view.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

enum { KVS_MERGE_MAX_DIM = 1024 };

/* For each token t and head h, vectors of `dim` values and the natural logarithms of their sums:
 *
 *   m = max(lp, ls), a = e^(lp - m), b = e^(ls - m)
 *   out = prefix * (a / (a + b)) + suffix * (b / (a + b)), in fp32, one rounding each;  out_lse = m + ln(a + b)
 *
 *   out, prefix, suffix              [n_tokens][n_heads][dim]; out of out_type, the others of src_type (enum kvs_value)
 *   out_lse, prefix_lse, suffix_lse  [n_tokens][n_heads] fp32; out_lse.base NULL: not wanted
 *   n_context                        tokens from here on have no prefix: their suffix is copied, their prefix is not
 * read An infinite lse of either sign is a state without tokens: its vector is not read, the other one is copied bit
 * for bit (rounded to out_type).  Both empty: out 0, out_lse -inf, however many states that were empty come together.
 * out may be prefix or suffix itself, of the same type and with the same strides, and out_lse theirs.
 * E_UNSUPPORTED: a type.  E_INVALID, E_LIMIT: found before anything is written. */
typedef struct kvs_merge_args {
    kvs_strided out, out_lse, prefix, prefix_lse, suffix, suffix_lse;
    uint32_t n_tokens, n_heads, dim; /* n_heads 1..128, dim 1..1024 */
    uint32_t n_context;
    uint32_t out_type, src_type;
} kvs_merge_args;
kvs_status kvs_merge(const kvs_merge_args *a, kvs_err *err);

/* The same on a GPU, with the same bits of `out` (an lse may differ in its last place): every pointer is device memory;
 * queued on `stream`, waits for nothing. */
kvs_status kvs_merge_cuda(const kvs_merge_args *a, struct CUstream_st *stream, kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_merge_check(const kvs_merge_args *a, kvs_err *err);

/* How two states are weighed; all that the C function and the kernel do with an lse but the logarithm. */
typedef struct kvs_merge_weights {
    float m, sum; /* out_lse = m + ln(sum); m -inf: both are empty */
    float prefix, suffix;
    int uses_prefix, uses_suffix; /* 0: that vector is not read */
} kvs_merge_weights;

static inline KVS_HD int kvs_lse_is_empty(float lse)
{
    return (kvs_f32_bits(lse) & 0x7FFFFFFFu) == 0x7F800000u;
}

static inline KVS_HD kvs_merge_weights kvs_merge_weigh(float prefix, float suffix)
{
    const kvs_merge_weights none = {kvs_f32_from_bits(0xFF800000u), 1, 0, 0, 0, 0};
    const kvs_merge_weights only_prefix = {prefix, 1, 1, 0, 1, 0}, only_suffix = {suffix, 1, 0, 1, 0, 1};
    kvs_merge_weights w = {prefix > suffix ? prefix : suffix, 0, 0, 0, 1, 1};
    float a, b;

    if (kvs_lse_is_empty(prefix))
        return kvs_lse_is_empty(suffix) ? none : only_suffix;
    if (kvs_lse_is_empty(suffix))
        return only_prefix;
    a = kvs_exp_nonpos(prefix - w.m);
    b = kvs_exp_nonpos(suffix - w.m);
    w.sum = a + b;
    w.prefix = a / w.sum;
    w.suffix = b / w.sum;
    return w;
}

#ifdef __cplusplus
}
#endif
#endif
