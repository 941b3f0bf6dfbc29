#include <string.h>

#include "kernels/indexer.h"
#include "kernels/view_check.h"

kvs_status kvs_indexer_gather_check(const kvs_indexer_gather_args *a, kvs_err *err)
{
    kvs_status s = kvs_view_check(&a->view, KVS_FORMAT_BIT(indexer_fp8), 0, err);

    if (s == KVS_OK)
        s = kvs_gather_list_check(&a->list, err);
    if (s == KVS_OK)
        s = kvs_rows_check("k", a->k, a->list.n_rows, a->k_stride, KVS_INDEXER_DIMS, 1, err);
    if (s == KVS_OK)
        s = kvs_rows_check("scale", a->scale, a->list.n_rows, a->scale_stride, KVS_INDEXER_SCALE_BYTES,
                           KVS_INDEXER_SCALE_BYTES, err);
    return s;
}

kvs_status kvs_indexer_gather(const kvs_indexer_gather_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_indexer_gather_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t r = 0; r < a->list.n_rows; r++) {
        kvs_view_place at;
        kvs_gather_found found = kvs_gather_find(&a->list, &a->view, r, KVS_SITE_INDEXER_GATHER_KEY, &at);

        bad += found == KVS_GATHER_BAD;
        if (found != KVS_GATHER_TOKEN)
            continue;
        memcpy(a->k + r * a->k_stride, kvs_view_row(&a->view, at.page, at.token, KVS_SITE_INDEXER_GATHER_KEY),
               KVS_INDEXER_DIMS);
        memcpy(a->scale + r * a->scale_stride,
               kvs_view_tail(&a->view, at.page, at.token, KVS_INDEXER_SCALE_BYTES, KVS_SITE_INDEXER_GATHER_SCALE),
               KVS_INDEXER_SCALE_BYTES);
    }
    *ret_bad = bad;
    return KVS_OK;
}
