#include "kernels/block_copy.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/view_check.h"

kvs_status kvs_block_copy_check(const kvs_block_copy_args *a, kvs_err *err)
{
    kvs_status s = kvs_pages_check(&a->from, err);

    if (s == KVS_OK)
        s = kvs_pages_check(&a->to, err);
    if (s == KVS_OK && a->from.page_bytes != a->to.page_bytes)
        s = kvs_fail(err, KVS_E_INVALID, "page_bytes: %" PRIu64 " to copy, %" PRIu64 " to hold them",
                     a->from.page_bytes, a->to.page_bytes);
    if (s == KVS_OK)
        s = kvs_rows_check("pairs", (const uint8_t *)a->pairs, a->n_pairs, 2 * sizeof *a->pairs, 2 * sizeof *a->pairs,
                           sizeof *a->pairs, err);
    return s;
}

kvs_status kvs_block_copy(const kvs_block_copy_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_block_copy_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint64_t i = 0; i < a->n_pairs; i++) {
        const int32_t from = a->pairs[2 * i], to = a->pairs[2 * i + 1];

        if (from < 0 || to < 0)
            continue;
        if ((uint32_t)from >= a->from.n_blocks || (uint32_t)to >= a->to.n_blocks) {
            bad++;
            continue;
        }
        memmove(kvs_view_page(&a->to, (uint32_t)to, KVS_SITE_BLOCK_COPY_TARGET),
                kvs_view_page(&a->from, (uint32_t)from, KVS_SITE_BLOCK_COPY_SOURCE),
                kvs_view_length(&a->from, KVS_SITE_BLOCK_COPY_SOURCE));
    }
    *ret_bad = bad;
    return KVS_OK;
}
