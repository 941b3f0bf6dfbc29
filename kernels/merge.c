#include "kernels/merge.h"

#include <math.h>
#include <string.h>

#include "kernels/mla.h"
#include "kernels/view_check.h"

/* Exact for sum == 1: a state that is merged with an empty one keeps its bits. */
static float lse_of(const kvs_merge_weights *w)
{
    return w->sum == 1 ? w->m : w->m + (float)log((double)w->sum);
}

void kvs_merge_states(float *dst, float *dst_lse, const float *src, float src_lse, uint32_t n)
{
    const kvs_merge_weights w = kvs_merge_weigh(*dst_lse, src_lse);

    *dst_lse = lse_of(&w);
    if (!w.uses_prefix && !w.uses_suffix)
        memset(dst, 0, (size_t)n * sizeof *dst);
    else if (!w.uses_prefix)
        memmove(dst, src, (size_t)n * sizeof *dst);
    else if (w.uses_suffix)
        for (uint32_t i = 0; i < n; i++)
            dst[i] = dst[i] * w.prefix + src[i] * w.suffix;
}

static kvs_status types_check(const kvs_merge_args *a, kvs_err *err)
{
    if (kvs_value_bytes(a->out_type) == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "out_type: %u is no type", a->out_type);
    if (kvs_value_bytes(a->src_type) == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "src_type: %u is no type", a->src_type);
    return KVS_OK;
}

kvs_status kvs_merge_check(const kvs_merge_args *a, kvs_err *err)
{
    const uint64_t out = kvs_value_bytes(a->out_type), src = kvs_value_bytes(a->src_type), lse = sizeof(float);
    kvs_status s = types_check(a, err);

    if (s == KVS_OK)
        s = kvs_range_check("n_heads", a->n_heads, 1, KVS_MLA_MAX_HEADS, err);
    if (s == KVS_OK)
        s = kvs_range_check("dim", a->dim, 1, KVS_MERGE_MAX_DIM, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, a->n_tokens, a->n_heads, a->dim * out, out, true, err);
    if (s == KVS_OK && a->out_lse.base != NULL)
        s = kvs_strided_check("out_lse", &a->out_lse, a->n_tokens, a->n_heads, lse, lse, true, err);
    if (s == KVS_OK && a->n_context > 0)
        s = kvs_strided_check("prefix", &a->prefix, a->n_tokens, a->n_heads, a->dim * src, src, false, err);
    if (s == KVS_OK && a->n_context > 0)
        s = kvs_strided_check("prefix_lse", &a->prefix_lse, a->n_tokens, a->n_heads, lse, lse, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("suffix", &a->suffix, a->n_tokens, a->n_heads, a->dim * src, src, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("suffix_lse", &a->suffix_lse, a->n_tokens, a->n_heads, lse, lse, false, err);
    return s;
}

static uint8_t *at(const kvs_strided *o, uint64_t t, uint64_t h)
{
    return o->base + t * o->token_stride + h * o->head_stride;
}

static float lse_at(const kvs_strided *o, uint64_t t, uint64_t h)
{
    return kvs_value_get(at(o, t, h), KVS_VALUE_FP32, 0);
}

static void merge_row(const kvs_merge_args *a, uint64_t t, uint64_t h)
{
    const int has_prefix = t < a->n_context;
    const uint8_t *suffix = at(&a->suffix, t, h), *prefix = has_prefix ? at(&a->prefix, t, h) : suffix;
    const kvs_merge_weights w =
        kvs_merge_weigh(has_prefix ? lse_at(&a->prefix_lse, t, h) : -INFINITY, lse_at(&a->suffix_lse, t, h));
    uint8_t *out = at(&a->out, t, h);

    for (uint32_t i = 0; i < a->dim; i++) {
        float f = 0;

        if (w.uses_prefix && w.uses_suffix)
            f = kvs_value_get(prefix, a->src_type, i) * w.prefix + kvs_value_get(suffix, a->src_type, i) * w.suffix;
        else if (w.uses_prefix || w.uses_suffix)
            f = kvs_value_get(w.uses_prefix ? prefix : suffix, a->src_type, i);
        kvs_value_put(out, a->out_type, i, f);
    }
    if (a->out_lse.base != NULL)
        kvs_value_put(at(&a->out_lse, t, h), KVS_VALUE_FP32, 0, lse_of(&w));
}

kvs_status kvs_merge(const kvs_merge_args *a, kvs_err *err)
{
    kvs_status s = kvs_merge_check(a, err);

    for (uint64_t t = 0; s == KVS_OK && t < a->n_tokens; t++)
        for (uint64_t h = 0; h < a->n_heads; h++)
            merge_row(a, t, h);
    return s;
}
