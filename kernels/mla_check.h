#ifndef KVS_KERNELS_MLA_CHECK_H
#define KVS_KERNELS_MLA_CHECK_H

/* Argument checks that every MLA kernel makes before it touches memory, whatever device it then runs on.
 *
 * Knows the rules of views and operands.  Reads no memory behind them.  Any thread; plain values. */

#include "kernels/mla.h"

#ifdef __cplusplus
extern "C" {
#endif

/* mla_bf16 or mla_fp16 (else E_UNSUPPORTED); base, pitches and row multiples of 16; a row holds 576 values; a
 * page holds its rows; pages do not overlap (all E_INVALID); the last byte has an address (E_LIMIT). */
kvs_status kvs_mla_view_check(const kvs_view *v, kvs_err *err);

/* n rows of row_bytes, stride bytes apart: a base that is a multiple of `align`, stride >= row_bytes,
 * addressable. */
kvs_status kvs_mla_rows_check(const char *name, const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes,
                              uint64_t align, kvs_err *err);

/* All of kvs_mla_decode's arguments but the workspace. */
kvs_status kvs_mla_decode_check(const kvs_mla_decode_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
