#include <string.h>

#include "kernels/blockwise.h"
#include "kernels/view_check.h"

enum { VALUE = 2 };

kvs_status kvs_blockwise_gather_check(const kvs_blockwise_gather_args *a, kvs_err *err)
{
    kvs_status s = kvs_blockwise_view_check(&a->view, err);

    if (s == KVS_OK)
        s = kvs_gather_list_check(&a->list, err);
    if (s == KVS_OK)
        s = kvs_rows_check("dst", a->dst, a->list.n_rows, a->dst_stride, (uint64_t)KVS_BLOCKWISE_VALUES * VALUE, VALUE,
                           err);
    return s;
}

static void read_token(const kvs_blockwise_gather_args *a, kvs_view_place at, uint8_t *dst)
{
    const kvs_blockwise_shape shape = kvs_blockwise_shape_of(a->view.format);
    const uint8_t *row = kvs_view_row(&a->view, at.page, at.token, KVS_SITE_BLOCKWISE_GATHER_DATA);
    const uint8_t *code = kvs_view_tail(&a->view, at.page, at.token, shape.tail, KVS_SITE_BLOCKWISE_GATHER_SCALE);

    for (uint32_t i = 0; i < shape.quantised; i++)
        kvs_value_put(dst, KVS_VALUE_BF16, i, kvs_e4m3_dequantise(row[i], kvs_ue8m0_to_f32(code[i / shape.tile])));
    memcpy(dst + (size_t)shape.quantised * VALUE, row + shape.quantised,
           (size_t)(KVS_BLOCKWISE_VALUES - shape.quantised) * VALUE);
}

kvs_status kvs_blockwise_gather(const kvs_blockwise_gather_args *a, uint32_t *ret_bad, kvs_err *err)
{
    kvs_status s = kvs_blockwise_gather_check(a, err);
    uint32_t bad = 0;

    if (s != KVS_OK)
        return s;
    for (uint32_t r = 0; r < a->list.n_rows; r++) {
        kvs_view_place at;
        kvs_gather_found found = kvs_gather_find(&a->list, &a->view, r, KVS_SITE_BLOCKWISE_GATHER_DATA, &at);

        bad += found == KVS_GATHER_BAD;
        if (found == KVS_GATHER_TOKEN)
            read_token(a, at, a->dst + r * a->dst_stride);
    }
    *ret_bad = bad;
    return KVS_OK;
}
