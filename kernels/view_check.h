#ifndef KVS_KERNELS_VIEW_CHECK_H
#define KVS_KERNELS_VIEW_CHECK_H

/* What every kernel asks of its views and operands before it touches memory, whatever device it then runs on.
 *
 * Knows formats, pitches and bounds.  Reads no memory behind them.  Any thread; plain values. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/view.h"
#include "proto/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of one token in a page: `row` of its row, `tail` in the second array of a block-wise format, which starts at
 * tokens_per_block * view.row_bytes (kvs_view_tail).  `row` is 0 where the caller gives it (kv_*, raw). */
typedef struct kvs_token_bytes {
    uint32_t row, tail;
} kvs_token_bytes;

kvs_token_bytes kvs_format_token_bytes(uint32_t format); /* {0, 0} for a number that is none */

/* Sets of formats: what an operation takes. */
#define KVS_FORMAT_BIT(name) (UINT64_C(1) << KVS_FORMAT_##name)

/* v->format is in `formats` (else E_UNSUPPORTED); tokens_per_block 1..4096; base, block_stride and row_bytes multiples
 * of 16; a row holds the format's row, or `row_bytes` where the format leaves it open (a row of several heads may be
 * longer than the pitch, as with heads outermost: then it is what the caller reaches from a row's start); the page
 * holds its rows and its tail; pages do not overlap (all E_INVALID); the last byte has an address (E_LIMIT). */
kvs_status kvs_view_check(const kvs_view *v, uint64_t formats, uint64_t row_bytes, kvs_err *err);

/* For an operation on whole pages: the same without formats, rows and tokens. */
kvs_status kvs_pages_check(const kvs_view *v, kvs_err *err);

/* n rows of row_bytes, stride bytes apart: a base that is a multiple of `align`, stride >= row_bytes, addressable. */
kvs_status kvs_rows_check(const char *name, const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes,
                          uint64_t align, kvs_err *err);

/* [n_rows][n_heads] rows of `row` bytes.  `apart`: they are written, so no two may share a byte: one dimension lies
 * inside a step of the other. */
kvs_status kvs_strided_check(const char *name, const kvs_strided *o, uint64_t n_rows, uint32_t n_heads, uint64_t row,
                             uint64_t align, bool apart, kvs_err *err);

/* A number that must lie in min..max. */
kvs_status kvs_range_check(const char *name, uint64_t value, uint64_t min, uint64_t max, kvs_err *err);

/* Bytes from `base` to the end of the last of n rows; false if that end has no address. */
bool kvs_extent_fits(const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes, uint64_t *ret);

#ifdef __cplusplus
}
#endif
#endif
