/* MLA extend on a GPU: launches of the dense kernels with as many queries a sequence as q_start says.
 *
 * The number of blocks is an upper bound that depends on totals alone; those that find no rows end at once. */
#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/mla_check.h"
#include "kernels/mla_extend.h"
#include "kernels/mla_launch.cuh"
#include "proto/layout.h"

namespace
{

enum { TILE = 32 /* tokens; of mla_mma.cuh */ };

/* As many rows a block as may be, whatever the queries are: a row's bits depend on that. */
uint32_t rows_a_block(const kvs_mla_extend_args *a)
{
    return mla_rows_a_block(UINT32_MAX, mla_dense_wide_bytes(a->view.format));
}

attend_params params_of(const kvs_mla_extend_args *a, uint32_t *ret_bad)
{
    const uint32_t tokens = kvs_view_tokens(&a->view, KVS_SITE_MLA_EXTEND);
    attend_params p = {};

    p.view = a->view;
    p.site = KVS_SITE_MLA_EXTEND;
    p.q_nope = a->q_nope;
    p.q_pe = a->q_pe;
    p.out = a->out;
    p.lse = a->lse;
    p.q_start = a->q_start;
    p.length = a->seq_len;
    p.list = a->block_table;
    p.list_stride = a->table_stride;
    p.list_width = a->table_width;
    p.n_seqs = a->n_seqs;
    p.n_units = a->n_tokens;
    p.s_q = 1;
    p.h_q = a->h_q;
    p.units_a_length = 1;
    p.parts = kvs_mla_extend_cuda_parts(a);
    p.step_pages = TILE / tokens;
    p.step_tokens = TILE % tokens;
    p.bad = ret_bad;
    p.scale_log2 = a->sm_scale * 1.44269504f;
    p.kv_scale = a->view.format == KVS_FORMAT_mla_fp8 ? a->kv_scale : nullptr;
    return p;
}

} // namespace

extern "C" uint32_t kvs_mla_extend_cuda_parts(const kvs_mla_extend_args *a)
{
    const uint64_t longest = (uint64_t)a->table_width * a->view.tokens_per_block, rows = (uint64_t)a->n_tokens * a->h_q;

    return a->parts > 0 ? a->parts
                        : mla_auto_parts(1, (uint32_t)(rows < INT32_MAX ? rows : INT32_MAX), rows_a_block(a), longest,
                                         a->fixed_split != 0);
}

extern "C" uint64_t kvs_mla_extend_cuda_workspace(const kvs_mla_extend_args *a)
{
    if (a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS || a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return mla_workspace(mla_partials(a->n_tokens, a->h_q, kvs_mla_extend_cuda_parts(a)));
}

extern "C" kvs_status kvs_mla_extend_cuda(const kvs_mla_extend_args *a, void *workspace, uint64_t workspace_bytes,
                                          uint32_t *ret_bad, kvs_mla_decode_result *ret, CUstream_st *stream,
                                          kvs_err *err)
{
    kvs_status s = kvs_mla_extend_check(a, err);
    cudaError_t e = cudaSuccess;
    uint64_t blocks = 0;
    attend_params p;

    if (s != KVS_OK)
        return s;
    p = params_of(a, ret_bad);
    s = mla_launch_fill(&p, rows_a_block(a), workspace, workspace_bytes, &blocks, err);
    if (s != KVS_OK)
        return s;
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && p.parts > 1 && a->n_tokens > 0) /* MLA_NOBODY */
        e = cudaMemsetAsync(p.part_lse, 0xFF, (uint64_t)a->n_tokens * a->h_q * p.parts * sizeof(float), stream);
    if (e == cudaSuccess && a->n_seqs > 0)
        e = mla_dense_launch(p, rows_a_block(a), blocks, stream);
    if (e != cudaSuccess)
        return kvs_cuda_fail(err, "mla_extend launch", e);
    *ret = kvs_mla_decode_result{p.parts, KVS_KERNEL_MLA_EXTEND_MMA, 0};
    return KVS_OK;
}
