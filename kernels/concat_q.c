#include "kernels/concat_q.h"

#include <string.h>

#include "kernels/view_check.h"

enum { NOPE_BYTES = 1024, PE_BYTES = 128 };

kvs_status kvs_concat_q_check(const kvs_concat_q_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("n_heads", a->n_heads, 1, UINT32_MAX, err);

    if (s == KVS_OK)
        s = kvs_strided_check("nope", &a->nope, a->n_tokens, a->n_heads, NOPE_BYTES, 2, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("pe", &a->pe, a->n_tokens, a->n_heads, PE_BYTES, 2, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, a->n_tokens, a->n_heads, NOPE_BYTES + PE_BYTES, 2, true, err);
    return s;
}

kvs_status kvs_concat_q(const kvs_concat_q_args *a, kvs_err *err)
{
    kvs_status s = kvs_concat_q_check(a, err);

    for (uint64_t t = 0; s == KVS_OK && t < a->n_tokens; t++)
        for (uint64_t h = 0; h < a->n_heads; h++) {
            uint8_t *out = a->out.base + t * a->out.token_stride + h * a->out.head_stride;

            memcpy(out, a->nope.base + t * a->nope.token_stride + h * a->nope.head_stride, NOPE_BYTES);
            memcpy(out + NOPE_BYTES, a->pe.base + t * a->pe.token_stride + h * a->pe.head_stride, PE_BYTES);
        }
    return s;
}
