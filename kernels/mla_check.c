#include "kernels/mla_check.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>

#include "proto/layout.h"

enum { ALIGN = 16, VALUE = 2, ROW = (KVS_MLA_LATENT + KVS_MLA_ROPE) * VALUE };

/* Bytes from `base` to the end of the last of n rows; false if that end has no address. */
static bool extent_fits(const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes, uint64_t *ret)
{
    uint64_t span, end;

    if (n == 0) {
        *ret = 0;
        return true;
    }
    if (__builtin_mul_overflow(n - 1, stride, &span) || __builtin_add_overflow(span, row_bytes, &span) ||
        __builtin_add_overflow(span, (uint64_t)(uintptr_t)base, &end) || end > (uint64_t)INTPTR_MAX)
        return false;
    *ret = span;
    return true;
}

static kvs_status view_fields_check(const kvs_view *v, kvs_err *err)
{
    if (v->format != KVS_FORMAT_mla_bf16 && v->format != KVS_FORMAT_mla_fp16)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "view format: %" PRIu32 " is neither mla_bf16 (%d) nor mla_fp16 (%d)",
                        v->format, (int)KVS_FORMAT_mla_bf16, (int)KVS_FORMAT_mla_fp16);
    if (v->tokens_per_block < 1 || v->tokens_per_block > KVS_MAX_TOKENS_PER_BLOCK)
        return kvs_fail(err, KVS_E_INVALID, "view tokens_per_block: %" PRIu32 " is outside 1..%d", v->tokens_per_block,
                        (int)KVS_MAX_TOKENS_PER_BLOCK);
    if (v->row_bytes < ROW || v->row_bytes % ALIGN != 0)
        return kvs_fail(err, KVS_E_INVALID, "view row_bytes: %" PRIu32 " is not a multiple of %d from %d up",
                        v->row_bytes, (int)ALIGN, (int)ROW);
    if (v->block_stride % ALIGN != 0 || v->block_stride >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_INVALID, "view block_stride: %" PRIu64 " is not a multiple of %d below %" PRIu64,
                        v->block_stride, (int)ALIGN, (uint64_t)KVS_MAX_OFFSET);
    return KVS_OK;
}

kvs_status kvs_mla_view_check(const kvs_view *v, kvs_err *err)
{
    kvs_status s = view_fields_check(v, err);
    uint64_t rows, span;

    if (s != KVS_OK)
        return s;
    /* The last row of a page may end early: its pitch is not part of it. */
    rows = (uint64_t)(v->tokens_per_block - 1) * v->row_bytes + ROW;
    if (v->page_bytes < rows)
        return kvs_fail(err, KVS_E_INVALID, "view page_bytes: %" PRIu64 " is below the %" PRIu64 " of %" PRIu32 " rows",
                        v->page_bytes, rows, v->tokens_per_block);
    if (v->n_blocks > 1 && v->block_stride < v->page_bytes)
        return kvs_fail(err, KVS_E_INVALID, "view block_stride: %" PRIu64 " is below page_bytes %" PRIu64,
                        v->block_stride, v->page_bytes);
    if (v->n_blocks > 0 && (v->base == NULL || (uintptr_t)v->base % ALIGN != 0))
        return kvs_fail(err, KVS_E_INVALID, "view base: %p is not a multiple of %d", (void *)v->base, (int)ALIGN);
    if (!extent_fits(v->base, v->n_blocks, v->block_stride, v->page_bytes, &span))
        return kvs_fail(err, KVS_E_LIMIT, "view: %" PRIu32 " blocks, %" PRIu64 " bytes apart, exceed the address space",
                        v->n_blocks, v->block_stride);
    return KVS_OK;
}

kvs_status kvs_mla_rows_check(const char *name, const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes,
                              uint64_t align, kvs_err *err)
{
    uint64_t span;

    if (stride < row_bytes)
        return kvs_fail(err, KVS_E_INVALID, "%s stride: %" PRIu64 " is below the %" PRIu64 " bytes of a row", name,
                        stride, row_bytes);
    if (stride % align != 0 || (uintptr_t)base % align != 0)
        return kvs_fail(err, KVS_E_INVALID, "%s: base %p and stride %" PRIu64 " must be multiples of %" PRIu64, name,
                        (const void *)base, stride, align);
    if (n > 0 && base == NULL)
        return kvs_fail(err, KVS_E_INVALID, "%s: no memory for %" PRIu64 " rows", name, n);
    if (!extent_fits(base, n, stride, row_bytes, &span))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu64 " rows, %" PRIu64 " bytes apart, exceed the address space",
                        name, n, stride);
    return KVS_OK;
}

/* [T][h] rows.  `apart`: rows are written, so no two may share a byte: one dimension lies inside a step of
 * the other. */
static kvs_status operand_check(const char *name, const kvs_strided *o, const kvs_mla_decode_args *a, uint64_t row,
                                uint64_t align, bool apart, kvs_err *err)
{
    uint64_t n_rows = (uint64_t)a->n_seqs * a->s_q, span, inner;
    kvs_status s = kvs_mla_rows_check(name, o->base, n_rows, o->token_stride, row, align, err);

    if (s == KVS_OK)
        s = kvs_mla_rows_check(name, o->base, n_rows > 0 ? a->h_q : 0, o->head_stride, row, align, err);
    if (s != KVS_OK || n_rows == 0)
        return s;
    inner = (uint64_t)(a->h_q - 1) * o->head_stride + row; /* both fit: checked above */
    if (!extent_fits(o->base, n_rows, o->token_stride, inner, &span))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu64 " x %" PRIu32 " rows exceed the address space", name, n_rows,
                        a->h_q);
    if (apart && n_rows > 1 && a->h_q > 1 && o->token_stride < inner &&
        o->head_stride < (n_rows - 1) * o->token_stride + row)
        return kvs_fail(err, KVS_E_INVALID,
                        "%s: rows overlap with token_stride %" PRIu64 " and head_stride %" PRIu64 " of %" PRIu64
                        " x %" PRIu32 " rows",
                        name, o->token_stride, o->head_stride, n_rows, a->h_q);
    return KVS_OK;
}

static kvs_status range_check(const char *name, uint64_t value, uint64_t min, uint64_t max, kvs_err *err)
{
    if (value < min || value > max)
        return kvs_fail(err, KVS_E_INVALID, "%s: %" PRIu64 " is outside %" PRIu64 "..%" PRIu64, name, value, min, max);
    return KVS_OK;
}

static kvs_status shape_check(const kvs_mla_decode_args *a, kvs_err *err)
{
    kvs_status s = range_check("s_q", a->s_q, 1, KVS_MLA_MAX_SQ, err);

    if (s == KVS_OK)
        s = range_check("h_q", a->h_q, 1, KVS_MLA_MAX_HEADS, err);
    if (s == KVS_OK)
        s = range_check("parts", a->parts, 0, KVS_MLA_MAX_PARTS, err);
    if (s == KVS_OK)
        s = range_check("fixed_split", a->fixed_split, 0, 1, err);
    if (s == KVS_OK && !isfinite(a->sm_scale))
        s = kvs_fail(err, KVS_E_INVALID, "sm_scale: %g is not finite", (double)a->sm_scale);
    return s;
}

static kvs_status table_check(const kvs_mla_decode_args *a, kvs_err *err)
{
    uint64_t pitch;

    if (a->n_seqs > 0 && (a->seq_len == NULL || (uintptr_t)a->seq_len % sizeof *a->seq_len != 0))
        return kvs_fail(err, KVS_E_INVALID, "seq_len: %p does not hold %" PRIu32 " lengths", (const void *)a->seq_len,
                        a->n_seqs);
    if (__builtin_mul_overflow(a->table_stride, sizeof *a->block_table, &pitch))
        return kvs_fail(err, KVS_E_LIMIT, "table_stride: %" PRIu64 " entries exceed the address space",
                        a->table_stride);
    if (a->table_width == 0)
        return KVS_OK; /* nothing is ever read */
    return kvs_mla_rows_check("block_table", (const uint8_t *)a->block_table, a->n_seqs, pitch,
                              a->table_width * (uint64_t)sizeof *a->block_table, sizeof *a->block_table, err);
}

kvs_status kvs_mla_decode_check(const kvs_mla_decode_args *a, kvs_err *err)
{
    const uint64_t latent = (uint64_t)KVS_MLA_LATENT * VALUE, rope = (uint64_t)KVS_MLA_ROPE * VALUE;
    kvs_status s = kvs_mla_view_check(&a->view, err);

    if (s == KVS_OK)
        s = shape_check(a, err);
    if (s == KVS_OK)
        s = table_check(a, err);
    if (s == KVS_OK)
        s = operand_check("q_nope", &a->q_nope, a, latent, VALUE, false, err);
    if (s == KVS_OK)
        s = operand_check("q_pe", &a->q_pe, a, rope, VALUE, false, err);
    if (s == KVS_OK)
        s = operand_check("out", &a->out, a, latent, VALUE, true, err);
    if (s == KVS_OK)
        s = operand_check("lse", &a->lse, a, sizeof(float), sizeof(float), true, err);
    return s;
}
