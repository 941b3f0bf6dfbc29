#include "kernels/cache_gather.h"

#include <inttypes.h>
#include <string.h>

#include "kernels/view_check.h"

kvs_status kvs_cache_gather_check(const kvs_cache_gather_args *a, kvs_err *err)
{
    const uint64_t any = ~(KVS_FORMAT_BIT(indexer_fp8) | KVS_FORMAT_BIT(fp8_blk584) | KVS_FORMAT_BIT(fp8_blk528));
    kvs_status s = kvs_view_check(&a->view, any, a->entry_bytes, err);

    if (s == KVS_OK && kvs_format_name(a->view.format) == NULL)
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "view format: %" PRIu32 " is none", a->view.format);
    if (s == KVS_OK)
        s = kvs_range_check("entry_bytes", a->entry_bytes, 1, a->view.row_bytes, err);
    if (s == KVS_OK)
        s = kvs_gather_list_check(&a->list, err);
    if (s == KVS_OK)
        s = kvs_rows_check("dst", a->dst, a->list.n_rows, a->dst_stride, a->entry_bytes, 1, err);
    return s;
}

kvs_status kvs_cache_gather(const kvs_cache_gather_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_cache_gather_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t r = 0; r < a->list.n_rows; r++) {
        kvs_view_place at;
        kvs_gather_found found = kvs_gather_find(&a->list, &a->view, r, KVS_SITE_CACHE_GATHER, &at);

        bad += found == KVS_GATHER_BAD;
        if (found == KVS_GATHER_TOKEN)
            memcpy(a->dst + r * a->dst_stride, kvs_view_row(&a->view, at.page, at.token, KVS_SITE_CACHE_GATHER),
                   a->entry_bytes);
    }
    *ret_bad = bad;
    return KVS_OK;
}
