/* MLA extend on a GPU: launches of the kernels of mla_mma.cuh with as many queries a sequence as q_start says.
 *
 * The number of blocks is an upper bound that depends on totals alone; those that find no rows end at once. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/mla_check.h"
#include "kernels/mla_extend.h"
#include "kernels/mla_mma.cuh"
#include "proto/layout.h"

using namespace kvs_mla;

namespace
{

/* Two m16 tiles a block where shared memory allows, whatever the queries are: a row's bits depend on that. */
bool is_wide()
{
    int device = 0, bytes = 0;

    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
           bytes >= wide_shape::BYTES;
}

uint64_t row_blocks(const kvs_mla_extend_args *a, bool wide)
{
    return (uint64_t)a->n_tokens * a->h_q / (wide ? (uint64_t)wide_shape::ROWS : (uint64_t)small_shape::ROWS) +
           a->n_seqs;
}

uint64_t resident_blocks(bool wide)
{
    int device = 0, processors = 0;

    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return 1;
    return (uint64_t)processors * (wide ? 1 : 2);
}

uint64_t partials(const kvs_mla_extend_args *a, uint32_t parts)
{
    return parts > 1 ? (uint64_t)a->n_tokens * a->h_q * parts : 0;
}

template <typename shape, bool FP16> cudaError_t kernel_init()
{
    int device = 0, bytes = 0;
    cudaFuncAttributes attributes;
    cudaError_t e = cudaGetDevice(&device);

    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, decode_kernel<shape, FP16, true>);
    if (e == cudaSuccess && bytes >= shape::BYTES)
        e = cudaFuncSetAttribute(decode_kernel<shape, FP16, true>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shape::BYTES);
    return e;
}

template <bool FP16> cudaError_t launch(const decode_params &p, bool wide, uint64_t blocks, cudaStream_t stream)
{
    uint64_t rows = (uint64_t)p.n_tokens * p.a.h_q;
    cudaError_t e = cudaSuccess;

    if (p.parts > 1)
        e = cudaMemsetAsync(p.part_lse, 0xFF, rows * p.parts * sizeof(float), stream); /* NOBODY */
    if (e != cudaSuccess)
        return e;
    if (wide)
        decode_kernel<wide_shape, FP16, true><<<(unsigned)blocks, THREADS, wide_shape::BYTES, stream>>>(p);
    else
        decode_kernel<small_shape, FP16, true><<<(unsigned)blocks, THREADS, small_shape::BYTES, stream>>>(p);
    e = cudaGetLastError();
    if (e != cudaSuccess || p.parts == 1 || rows == 0)
        return e;
    merge_kernel<FP16, true><<<(unsigned)rows, MERGE_THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

decode_params params(const kvs_mla_extend_args *a, bool wide, uint32_t parts, void *workspace)
{
    uint32_t tokens = kvs_view_tokens(&a->view, KVS_SITE_MLA_EXTEND);
    decode_params p = {};

    p.a.view = a->view;
    p.a.q_nope = a->q_nope;
    p.a.q_pe = a->q_pe;
    p.a.out = a->out;
    p.a.lse = a->lse;
    p.a.seq_len = a->seq_len;
    p.a.block_table = a->block_table;
    p.a.table_stride = a->table_stride;
    p.a.n_seqs = a->n_seqs;
    p.a.table_width = a->table_width;
    p.a.h_q = a->h_q;
    p.q_start = a->q_start;
    p.n_tokens = a->n_tokens;
    p.site = KVS_SITE_MLA_EXTEND;
    p.row_blocks = (uint32_t)row_blocks(a, wide);
    p.parts = parts;
    p.step_pages = TILE / tokens;
    p.step_tokens = TILE % tokens;
    p.part_out = static_cast<float *>(workspace);
    p.part_lse = p.part_out + partials(a, parts) * LATENT;
    p.scale_log2 = a->sm_scale * 1.44269504f;
    p.q_aligned = is_aligned(a->q_nope, 16) && is_aligned(a->q_pe, 16);
    p.out_aligned = is_aligned(a->out, 8);
    return p;
}

} // namespace

extern "C" kvs_status kvs_mla_extend_cuda_init(kvs_err *err)
{
    cudaFuncAttributes attributes;
    cudaError_t e = kernel_init<small_shape, false>();

    if (e == cudaSuccess)
        e = kernel_init<small_shape, true>();
    if (e == cudaSuccess)
        e = kernel_init<wide_shape, false>();
    if (e == cudaSuccess)
        e = kernel_init<wide_shape, true>();
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, merge_kernel<false, true>);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, merge_kernel<true, true>);
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(mla_extend)", e);
}

extern "C" uint32_t kvs_mla_extend_cuda_parts(const kvs_mla_extend_args *a)
{
    uint64_t longest = (uint64_t)a->table_width * a->view.tokens_per_block, parts, most, blocks;
    bool wide = is_wide();

    if (a->parts > 0)
        return a->parts;
    if (a->fixed_split)
        parts = (longest + TOKENS_A_FIXED_PART - 1) / TOKENS_A_FIXED_PART;
    else {
        blocks = row_blocks(a, wide);
        most = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;
        parts = blocks > 0 ? resident_blocks(wide) / blocks : 1;
        parts = parts < most ? parts : most;
    }
    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? (uint32_t)MAX_AUTO_PARTS : (uint32_t)parts;
}

extern "C" uint64_t kvs_mla_extend_cuda_workspace(const kvs_mla_extend_args *a)
{
    if (a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS || a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return partials(a, kvs_mla_extend_cuda_parts(a)) * (LATENT + 1) * sizeof(float);
}

extern "C" kvs_status kvs_mla_extend_cuda(const kvs_mla_extend_args *a, void *workspace, uint64_t workspace_bytes,
                                          uint32_t *ret_bad, kvs_mla_decode_result *ret, CUstream_st *stream,
                                          kvs_err *err)
{
    kvs_status s = kvs_mla_extend_check(a, err);
    bool wide = is_wide();
    uint64_t blocks, need;
    cudaError_t e = cudaSuccess;
    decode_params p;

    if (s != KVS_OK)
        return s;
    need = kvs_mla_extend_cuda_workspace(a);
    if (need > 0 &&
        (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0 || workspace_bytes < need))
        return kvs_fail(err, KVS_E_LIMIT,
                        "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " at a multiple of 16 are needed",
                        workspace_bytes, workspace, need);
    blocks = row_blocks(a, wide) * kvs_mla_extend_cuda_parts(a);
    if (blocks > INT32_MAX || (uint64_t)a->n_tokens * a->h_q > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT,
                        "extend: %" PRIu32 " tokens of %" PRIu32 " heads in %" PRIu32
                        " parts need more than %d thread blocks",
                        a->n_tokens, a->h_q, kvs_mla_extend_cuda_parts(a), INT32_MAX);
    p = params(a, wide, kvs_mla_extend_cuda_parts(a), workspace);
    p.bad = ret_bad;
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && a->n_seqs > 0)
        e = a->view.format == KVS_FORMAT_mla_fp16 ? launch<true>(p, wide, blocks, stream)
                                                  : launch<false>(p, wide, blocks, stream);
    if (e != cudaSuccess)
        return kvs_cuda_fail(err, "mla_extend launch", e);
    *ret = kvs_mla_decode_result{p.parts, KVS_KERNEL_MLA_EXTEND_MMA, 0};
    return KVS_OK;
}
