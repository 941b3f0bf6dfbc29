#include "kernels/gather_upconvert.h"

#include <string.h>

#include "kernels/value.h"
#include "kernels/view_check.h"

enum { LATENT = 512, TILE = 128, SCALES = LATENT, ROPE = SCALES + 16, ROPE_BYTES = 128, VALUE = 2 };

kvs_status kvs_gather_upconvert_check(const kvs_gather_upconvert_args *a, kvs_err *err)
{
    kvs_status s = kvs_view_check(&a->view, KVS_FORMAT_BIT(fp8_ds_mla), 0, err);

    if (s == KVS_OK)
        s = kvs_gather_list_check(&a->list, err);
    if (s == KVS_OK)
        s = kvs_rows_check("dst", a->dst, a->list.n_rows, a->dst_stride, (uint64_t)KVS_UPCONVERT_VALUES * VALUE, VALUE,
                           err);
    return s;
}

static void upconvert(const uint8_t *record, uint8_t *dst)
{
    for (uint32_t i = 0; i < LATENT; i++)
        kvs_value_put(dst, KVS_VALUE_BF16, i,
                      kvs_e4m3_dequantise(record[i], kvs_value_get(record + SCALES, KVS_VALUE_FP32, i / TILE)));
    memcpy(dst + (size_t)LATENT * VALUE, record + ROPE, ROPE_BYTES);
}

kvs_status kvs_gather_upconvert(const kvs_gather_upconvert_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_gather_upconvert_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t r = 0; r < a->list.n_rows; r++) {
        kvs_view_place at;
        kvs_gather_found found = kvs_gather_find(&a->list, &a->view, r, KVS_SITE_GATHER_UPCONVERT, &at);

        bad += found == KVS_GATHER_BAD;
        if (found == KVS_GATHER_TOKEN)
            upconvert(kvs_view_row(&a->view, at.page, at.token, KVS_SITE_GATHER_UPCONVERT), a->dst + r * a->dst_stride);
    }
    *ret_bad = bad;
    return KVS_OK;
}
