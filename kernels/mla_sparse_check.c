#include <inttypes.h>
#include <math.h>

#include "kernels/mla_sparse.h"
#include "kernels/view_check.h"

enum { VALUE = 2 };

#define FORMATS (KVS_FORMAT_BIT(fp8_ds_mla) | KVS_FORMAT_BIT(fp8_blk584) | KVS_FORMAT_BIT(fp8_blk528))

static kvs_status shape_check(const kvs_mla_sparse_args *a, kvs_err *err)
{
    kvs_status s = kvs_range_check("s_q", a->s_q, 1, INT32_MAX, err);

    if (s == KVS_OK)
        s = kvs_range_check("n_seqs * s_q", (uint64_t)a->n_seqs * a->s_q, 0, INT32_MAX, err);
    if (s == KVS_OK)
        s = kvs_range_check("h_q", a->h_q, 1, KVS_MLA_MAX_HEADS, err);
    if (s == KVS_OK)
        s = kvs_range_check("topk", a->topk, 1, KVS_MLA_MAX_TOPK, err);
    if (s == KVS_OK)
        s = kvs_range_check("parts", a->parts, 0, KVS_MLA_MAX_PARTS, err);
    if (s == KVS_OK)
        s = kvs_range_check("fixed_split", a->fixed_split, 0, 1, err);
    if (s == KVS_OK && !isfinite(a->sm_scale))
        s = kvs_fail(err, KVS_E_INVALID, "sm_scale: %g is not finite", (double)a->sm_scale);
    return s;
}

static kvs_status lists_check(const kvs_mla_sparse_args *a, kvs_err *err)
{
    const uint64_t entry = sizeof *a->indices;
    uint64_t pitch;

    if ((uintptr_t)a->topk_length % sizeof *a->topk_length != 0)
        return kvs_fail(err, KVS_E_INVALID, "topk_length: %p is not a multiple of 4", (const void *)a->topk_length);
    if ((uintptr_t)a->sink % sizeof *a->sink != 0)
        return kvs_fail(err, KVS_E_INVALID, "sink: %p is not a multiple of 4", (const void *)a->sink);
    if (__builtin_mul_overflow(a->index_stride, entry, &pitch))
        return kvs_fail(err, KVS_E_LIMIT, "index_stride: %" PRIu64 " entries exceed the address space",
                        a->index_stride);
    return kvs_rows_check("indices", (const uint8_t *)a->indices, (uint64_t)a->n_seqs * a->s_q, pitch, a->topk * entry,
                          entry, err);
}

kvs_status kvs_mla_sparse_check(const kvs_mla_sparse_args *a, kvs_err *err)
{
    const uint64_t latent = (uint64_t)KVS_MLA_LATENT * VALUE, rope = (uint64_t)KVS_MLA_ROPE * VALUE;
    const uint64_t nope = a->view.format == KVS_FORMAT_fp8_ds_mla ? latent : latent - rope;
    const uint64_t n = (uint64_t)a->n_seqs * a->s_q;
    kvs_status s = kvs_view_check(&a->view, FORMATS, 0, err);

    if (s == KVS_OK)
        s = shape_check(a, err);
    if (s == KVS_OK)
        s = lists_check(a, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q_nope", &a->q_nope, n, a->h_q, nope, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("q_pe", &a->q_pe, n, a->h_q, rope, VALUE, false, err);
    if (s == KVS_OK)
        s = kvs_strided_check("out", &a->out, n, a->h_q, latent, VALUE, true, err);
    if (s == KVS_OK)
        s = kvs_strided_check("lse", &a->lse, n, a->h_q, sizeof(float), sizeof(float), true, err);
    return s;
}
