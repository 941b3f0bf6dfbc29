#include "kernels/view_check.h"

#include <inttypes.h>

enum { ALIGN = 16 };

kvs_token_bytes kvs_format_token_bytes(uint32_t format)
{
    switch (format) {
    case KVS_FORMAT_indexer_fp8:
        return (kvs_token_bytes){128, 4};
    case KVS_FORMAT_fp8_blk584:
        return (kvs_token_bytes){576, 8};
    case KVS_FORMAT_fp8_blk528:
        return (kvs_token_bytes){512, 16};
    default:
        return (kvs_token_bytes){kvs_format_row_bytes(format), 0};
    }
}

bool kvs_extent_fits(const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes, uint64_t *ret)
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

kvs_status kvs_range_check(const char *name, uint64_t value, uint64_t min, uint64_t max, kvs_err *err)
{
    if (value < min || value > max)
        return kvs_fail(err, KVS_E_INVALID, "%s: %" PRIu64 " is outside %" PRIu64 "..%" PRIu64, name, value, min, max);
    return KVS_OK;
}

static kvs_status stride_check(const kvs_view *v, kvs_err *err)
{
    if (v->block_stride % ALIGN != 0 || v->block_stride >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_INVALID, "view block_stride: %" PRIu64 " is not a multiple of %d below %" PRIu64,
                        v->block_stride, (int)ALIGN, (uint64_t)KVS_MAX_OFFSET);
    return KVS_OK;
}

static kvs_status fields_check(const kvs_view *v, uint64_t formats, kvs_err *err)
{
    if (v->format >= 64 || (formats >> v->format & 1) == 0) {
        const char *name = kvs_format_name(v->format);

        return kvs_fail(err, KVS_E_UNSUPPORTED, "view format: %" PRIu32 " (%s) has no kernel here", v->format,
                        name != NULL ? name : "none");
    }
    if (v->tokens_per_block < 1 || v->tokens_per_block > KVS_MAX_TOKENS_PER_BLOCK)
        return kvs_fail(err, KVS_E_INVALID, "view tokens_per_block: %" PRIu32 " is outside 1..%d", v->tokens_per_block,
                        (int)KVS_MAX_TOKENS_PER_BLOCK);
    if (v->row_bytes == 0 || v->row_bytes % ALIGN != 0)
        return kvs_fail(err, KVS_E_INVALID, "view row_bytes: %" PRIu32 " is not a multiple of %d", v->row_bytes,
                        (int)ALIGN);
    return stride_check(v, err);
}

/* A page holds its rows, the last of which may end early (its pitch is not part of it), or whole rows and the tail. */
static kvs_status page_check(const kvs_view *v, uint64_t row, uint32_t tail, kvs_err *err)
{
    const uint64_t n = v->tokens_per_block;
    uint64_t need;

    if (__builtin_add_overflow((n - 1) * v->row_bytes, row, &need))
        return kvs_fail(err, KVS_E_LIMIT, "view: a row of %" PRIu64 " bytes exceeds the address space", row);
    if (tail > 0)
        need = n * ((uint64_t)v->row_bytes + tail);
    if (v->page_bytes < need)
        return kvs_fail(err, KVS_E_INVALID, "view page_bytes: %" PRIu64 " is below the %" PRIu64 " of %" PRIu32 " rows",
                        v->page_bytes, need, v->tokens_per_block);
    return KVS_OK;
}

/* Pages do not overlap, and there is memory for them. */
static kvs_status extent_check(const kvs_view *v, kvs_err *err)
{
    uint64_t span;

    if (v->n_blocks > 1 && v->block_stride < v->page_bytes)
        return kvs_fail(err, KVS_E_INVALID, "view block_stride: %" PRIu64 " is below page_bytes %" PRIu64,
                        v->block_stride, v->page_bytes);
    if (v->n_blocks > 0 && (v->base == NULL || (uintptr_t)v->base % ALIGN != 0))
        return kvs_fail(err, KVS_E_INVALID, "view base: %p is not a multiple of %d", (void *)v->base, (int)ALIGN);
    if (!kvs_extent_fits(v->base, v->n_blocks, v->block_stride, v->page_bytes, &span))
        return kvs_fail(err, KVS_E_LIMIT, "view: %" PRIu32 " blocks, %" PRIu64 " bytes apart, exceed the address space",
                        v->n_blocks, v->block_stride);
    return KVS_OK;
}

kvs_status kvs_view_check(const kvs_view *v, uint64_t formats, uint64_t row_bytes, kvs_err *err)
{
    const kvs_token_bytes token = kvs_format_token_bytes(v->format);
    kvs_status s = fields_check(v, formats, err);

    if (s != KVS_OK)
        return s;
    if (v->row_bytes < token.row)
        return kvs_fail(err, KVS_E_INVALID, "view row_bytes: %" PRIu32 " is below the %" PRIu32 " of a row",
                        v->row_bytes, token.row);
    s = page_check(v, token.row > 0 ? token.row : row_bytes, token.tail, err);
    if (s != KVS_OK)
        return s;
    return extent_check(v, err);
}

kvs_status kvs_pages_check(const kvs_view *v, kvs_err *err)
{
    kvs_status s = stride_check(v, err);

    return s == KVS_OK ? extent_check(v, err) : s;
}

kvs_status kvs_rows_check(const char *name, const uint8_t *base, uint64_t n, uint64_t stride, uint64_t row_bytes,
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
    if (!kvs_extent_fits(base, n, stride, row_bytes, &span))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu64 " rows, %" PRIu64 " bytes apart, exceed the address space",
                        name, n, stride);
    return KVS_OK;
}

kvs_status kvs_strided_check(const char *name, const kvs_strided *o, uint64_t n_rows, uint32_t n_heads, uint64_t row,
                             uint64_t align, bool apart, kvs_err *err)
{
    uint64_t span, inner;
    kvs_status s = kvs_rows_check(name, o->base, n_rows, o->token_stride, row, align, err);

    if (s == KVS_OK)
        s = kvs_rows_check(name, o->base, n_rows > 0 ? n_heads : 0, o->head_stride, row, align, err);
    if (s != KVS_OK || n_rows == 0 || n_heads == 0)
        return s;
    inner = (uint64_t)(n_heads - 1) * o->head_stride + row; /* both fit: checked above */
    if (!kvs_extent_fits(o->base, n_rows, o->token_stride, inner, &span))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu64 " x %" PRIu32 " rows exceed the address space", name, n_rows,
                        n_heads);
    if (apart && n_rows > 1 && n_heads > 1 && o->token_stride < inner &&
        o->head_stride < (n_rows - 1) * o->token_stride + row)
        return kvs_fail(err, KVS_E_INVALID,
                        "%s: rows overlap with token_stride %" PRIu64 " and head_stride %" PRIu64 " of %" PRIu64
                        " x %" PRIu32 " rows",
                        name, o->token_stride, o->head_stride, n_rows, n_heads);
    return KVS_OK;
}
