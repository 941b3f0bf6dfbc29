#include "kernels/gather.h"

#include <inttypes.h>

#include "kernels/view_check.h"

static kvs_status array_check(const char *name, const int32_t *at, uint64_t n, kvs_err *err)
{
    return kvs_rows_check(name, (const uint8_t *)at, n, sizeof *at, sizeof *at, sizeof *at, err);
}

kvs_status kvs_gather_list_check(const kvs_gather_list *g, kvs_err *err)
{
    kvs_status s;
    uint64_t pitch;

    if (g->open_end > 1)
        return kvs_fail(err, KVS_E_INVALID, "open_end: %" PRIu32 " is neither 0 nor 1", g->open_end);
    if (g->n_seqs == 0)
        return KVS_OK; /* nothing is ever read */
    if (g->n_rows > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT, "n_rows: %" PRIu32 " is above %d", g->n_rows, INT32_MAX);
    s = array_check("row_starts", g->row_starts, (uint64_t)g->n_seqs + !g->open_end, err);
    if (s == KVS_OK && g->first_token != NULL)
        s = array_check("first_token", g->first_token, g->n_seqs, err);
    if (s != KVS_OK || g->table_width == 0)
        return s;
    if (__builtin_mul_overflow(g->table_stride, sizeof *g->block_table, &pitch))
        return kvs_fail(err, KVS_E_LIMIT, "table_stride: %" PRIu64 " entries exceed the address space",
                        g->table_stride);
    return kvs_rows_check("block_table", (const uint8_t *)g->block_table, g->n_seqs, pitch,
                          g->table_width * (uint64_t)sizeof *g->block_table, sizeof *g->block_table, err);
}
