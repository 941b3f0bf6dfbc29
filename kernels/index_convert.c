#include "kernels/index_convert.h"

#include <inttypes.h>

#include "kernels/view_check.h"

static kvs_status array_check(const char *name, const void *at, uint64_t n, uint64_t stride, uint64_t width,
                              uint64_t bytes, kvs_err *err)
{
    uint64_t pitch;

    if (__builtin_mul_overflow(stride, bytes, &pitch))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %" PRIu64 " entries from list to list exceed the address space", name,
                        stride);
    return kvs_rows_check(name, (const uint8_t *)at, width > 0 ? n : 0, pitch, width * bytes, bytes, err);
}

static kvs_status out_check(const kvs_index_convert_args *a, kvs_err *err)
{
    if ((a->logical == NULL) == (a->physical == NULL) && (uint64_t)a->n_tokens * a->topk > 0)
        return kvs_fail(err, KVS_E_INVALID, "logical, physical: %s of them is given",
                        a->logical == NULL ? "neither" : "each");
    if (a->physical == NULL && a->workspace != NULL)
        return kvs_fail(err, KVS_E_INVALID, "workspace: its rows are physical, not logical");
    if (a->physical != NULL && kvs_physical_rows_a_block(&a->view) == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED,
                        "view block_stride: %" PRIu64 " is no whole number of rows of %" PRIu32 " bytes",
                        a->view.block_stride, a->view.row_bytes);
    if (a->physical != NULL)
        return array_check("physical", a->physical, a->n_tokens, a->out_stride, a->topk, sizeof *a->physical, err);
    return array_check("logical", a->logical, a->n_tokens, a->out_stride, a->topk, sizeof *a->logical, err);
}

kvs_status kvs_index_convert_check(const kvs_index_convert_args *a, kvs_err *err)
{
    const uint64_t n = a->topk > 0 ? a->n_tokens : 0;
    kvs_status s = kvs_view_check(&a->view, UINT64_MAX, 0, err);

    if (s == KVS_OK)
        s = array_check("request", a->request, n, 1, 1, sizeof *a->request, err);
    if (s == KVS_OK)
        s = array_check("tokens", a->tokens, n, a->token_stride, a->topk, sizeof *a->tokens, err);
    if (s == KVS_OK)
        s = array_check("block_table", a->block_table, a->n_requests, a->table_stride, a->table_width,
                        sizeof *a->block_table, err);
    if (s == KVS_OK && a->workspace != NULL)
        s = array_check("workspace", a->workspace, n, 1, 1, sizeof *a->workspace, err);
    return s == KVS_OK ? out_check(a, err) : s;
}

/* One list; returns how many ids have no place. */
static uint32_t convert(const kvs_index_convert_args *a, uint32_t t)
{
    const int64_t row = a->workspace != NULL ? a->workspace[t] : -1;
    uint32_t bad = 0;

    for (uint32_t i = 0; i < a->topk; i++) {
        const int32_t id = a->tokens[t * a->token_stride + i];
        const kvs_logical_index none = {-1}, at = id < 0 || row >= 0 ? none : kvs_index_convert_one(a, t, id);
        kvs_physical_row physical = {-1};

        if (id >= 0 && row >= 0)
            physical.at = row + id;
        else if (a->physical != NULL)
            physical = kvs_physical_of_logical(&a->view, at);
        if (a->physical != NULL)
            a->physical[t * a->out_stride + i] = physical;
        else
            a->logical[t * a->out_stride + i] = at;
        bad += id >= 0 && row < 0 && at.at < 0;
    }
    return bad;
}

kvs_status kvs_index_convert(const kvs_index_convert_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_index_convert_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t t = 0; t < a->n_tokens; t++)
        bad += convert(a, t);
    *ret_bad = bad;
    return KVS_OK;
}
