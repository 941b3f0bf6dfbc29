/* Sparse MLA decode on a GPU: rows by a list of token indices, widened to bf16 in shared memory (mla_quantised.cuh).
 *
 * A thread block takes 16 or 32 heads of one query token against one part of its list.  Indices are read a tile ahead;
 * what a row adds up depends on its list, its length and parts alone. */
#include <cinttypes>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/mla_launch.cuh"
#include "kernels/mla_quantised.cuh"
#include "kernels/mla_sparse.h"

namespace
{

/* The tokens of a list, an entry of each tile for this thread. */
struct list_source {
    uint32_t t;
    int32_t index; /* as the list has it */
    bool counts;

    template <int ROWS> static __device__ __forceinline__ job find_job(const attend_params &p)
    {
        uint32_t row_block = blockIdx.x % p.row_blocks, rest = blockIdx.x / p.row_blocks, range;
        job j;

        j.part = rest % p.parts;
        j.seq = rest / p.parts;
        j.token = j.seq;
        j.s_q = 1;
        j.first = row_block * ROWS;
        j.n_rows = min((uint32_t)ROWS, p.rows - j.first);
        j.counts = row_block == p.row_blocks - 1 && p.bad != nullptr;
        j.len = p.list_width;
        if (p.length != nullptr) {
            int32_t told = p.length[j.seq / p.units_a_length];
            bool good = told >= 0 && (uint32_t)told <= p.list_width;

            if (!good && j.counts && j.part == 0 && j.seq % p.units_a_length == 0 && threadIdx.x == 0)
                atomicAdd(p.bad, 1u);
            j.len = good ? (uint32_t)told : 0;
        }
        range = j.len / p.parts + (j.len % p.parts != 0);
        j.begin = j.part * range;
        j.end = min(j.begin + range, j.len);
        return j;
    }
    static __device__ __forceinline__ uint32_t seen_by(const attend_params &, const job &j, uint32_t)
    {
        return j.end;
    }
    __device__ __forceinline__ list_source(const attend_params &p, const job &j, uint32_t tid)
        : t(j.begin + tid / LOADERS), index(-1), counts(j.counts && tid % LOADERS == 0)
    {
        read(p, j);
    }
    __device__ __forceinline__ void read(const attend_params &p, const job &j)
    {
        index = t < j.end ? p.list[j.seq * p.list_stride + t] : -1;
    }
    __device__ __forceinline__ record_place place(const attend_params &p, const job &) const
    {
        kvs_view_place at;

        if (index < 0 || (uint32_t)index >= p.n_indices) {
            if (index != -1 && counts)
                atomicAdd(p.bad, 1u);
            return {nullptr, nullptr};
        }
        at = kvs_view_split(&p.view, (uint32_t)index, KVS_SITE_MLA_SPARSE);
        return {kvs_view_row(&p.view, at.page, at.token, KVS_SITE_MLA_SPARSE), tail_of(p)};
    }
    __device__ __forceinline__ const uint8_t *tail_of(const attend_params &p) const
    {
        uint32_t bytes = p.view.format == KVS_FORMAT_fp8_blk584 ? 8 : 16;
        kvs_view_place at;

        if (p.view.format == KVS_FORMAT_fp8_ds_mla)
            return nullptr;
        at = kvs_view_split(&p.view, (uint32_t)index, KVS_SITE_MLA_SPARSE_SCALE);
        return kvs_view_tail(&p.view, at.page, at.token, bytes, KVS_SITE_MLA_SPARSE_SCALE);
    }
    __device__ __forceinline__ void next(const attend_params &p, const job &j)
    {
        t += TILE;
        read(p, j);
    }
};

cudaError_t launch(const attend_params &p, uint32_t rows, uint64_t blocks, cudaStream_t stream)
{
    cudaError_t e;

    if (p.view.format == KVS_FORMAT_fp8_ds_mla)
        e = quantised_launch<KVS_FORMAT_fp8_ds_mla, list_source>(p, rows, blocks, stream);
    else if (p.view.format == KVS_FORMAT_fp8_blk584)
        e = quantised_launch<KVS_FORMAT_fp8_blk584, list_source>(p, rows, blocks, stream);
    else
        e = quantised_launch<KVS_FORMAT_fp8_blk528, list_source>(p, rows, blocks, stream);
    return e != cudaSuccess || p.parts == 1 ? e : mla_join_launch(p, false, stream);
}

/* One answer for all formats: the largest shape. */
uint32_t rows_a_block(const kvs_mla_sparse_args *a)
{
    return mla_rows_a_block(a->h_q, quantised_shape<WIDE, record<KVS_FORMAT_fp8_ds_mla>>::BYTES);
}

attend_params params_of(const kvs_mla_sparse_args *a, uint32_t *ret_bad)
{
    const uint64_t n_indices = kvs_logical_indices(&a->view);
    attend_params p = {};

    p.view = a->view;
    p.q_nope = a->q_nope;
    p.q_pe = a->q_pe;
    p.out = a->out;
    p.lse = a->lse;
    p.length = a->topk_length;
    p.list = reinterpret_cast<const int32_t *>(a->indices);
    p.list_stride = a->index_stride;
    p.list_width = a->topk;
    p.n_units = a->n_seqs * a->s_q;
    p.s_q = 1;
    p.h_q = a->h_q;
    p.units_a_length = a->s_q;
    p.n_indices = n_indices > INT32_MAX ? (uint32_t)INT32_MAX + 1 : (uint32_t)n_indices;
    p.parts = kvs_mla_sparse_cuda_parts(a);
    p.bad = ret_bad;
    p.sink = a->sink;
    p.scale_log2 = a->sm_scale * 1.44269504f;
    return p;
}

} // namespace

extern "C" kvs_status kvs_mla_sparse_cuda_init(kvs_err *err)
{
    cudaError_t e = quantised_init_all<KVS_FORMAT_fp8_ds_mla, list_source>();

    if (e == cudaSuccess)
        e = quantised_init_all<KVS_FORMAT_fp8_blk584, list_source>();
    if (e == cudaSuccess)
        e = quantised_init_all<KVS_FORMAT_fp8_blk528, list_source>();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(mla_sparse)", e);
}

extern "C" uint32_t kvs_mla_sparse_cuda_parts(const kvs_mla_sparse_args *a)
{
    if (a->parts > 0)
        return a->parts;
    return mla_auto_parts((uint64_t)a->n_seqs * a->s_q, a->h_q, rows_a_block(a), a->topk, a->fixed_split != 0);
}

extern "C" uint64_t kvs_mla_sparse_cuda_workspace(const kvs_mla_sparse_args *a)
{
    if (a->s_q < 1 || (uint64_t)a->n_seqs * a->s_q > INT32_MAX || a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS ||
        a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return mla_workspace(mla_partials((uint64_t)a->n_seqs * a->s_q, a->h_q, kvs_mla_sparse_cuda_parts(a)));
}

extern "C" kvs_status kvs_mla_sparse_cuda(const kvs_mla_sparse_args *a, void *workspace, uint64_t workspace_bytes,
                                          uint32_t *ret_bad, kvs_mla_decode_result *ret, CUstream_st *stream,
                                          kvs_err *err)
{
    kvs_status s = kvs_mla_sparse_check(a, err);
    attend_params p;
    uint64_t blocks = 0;
    cudaError_t e = cudaSuccess;

    if (s != KVS_OK)
        return s;
    p = params_of(a, ret_bad);
    s = mla_launch_fill(&p, rows_a_block(a), workspace, workspace_bytes, &blocks, err);
    if (s != KVS_OK)
        return s;
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && blocks > 0)
        e = launch(p, rows_a_block(a), blocks, stream);
    if (e != cudaSuccess)
        return kvs_cuda_fail(err, "mla_sparse launch", e);
    *ret = kvs_mla_decode_result{p.parts, KVS_KERNEL_MLA_SPARSE_MMA, 0};
    return KVS_OK;
}
