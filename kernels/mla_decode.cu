/* MLA decode on a GPU: launches of the kernels of mla_mma.cuh with s_q queries a sequence. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/kernels_cuda.h"
#include "kernels/mla_check.h"
#include "kernels/mla_mma.cuh"
#include "proto/layout.h"

using namespace kvs_mla;

namespace
{

/* Two m16 tiles a block where rows and shared memory allow. */
uint32_t rows_a_block(const kvs_mla_decode_args *a)
{
    int device = 0, bytes = 0;

    if (a->s_q * a->h_q <= 16 || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
        return 16;
    return bytes >= wide_shape::BYTES ? 32 : 16;
}

/* Blocks that run at once: what parts should fill. */
uint64_t resident_blocks(uint32_t rows)
{
    int device = 0, processors = 0;

    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return 1;
    return (uint64_t)processors * (rows == 16 ? 2 : 1);
}

uint64_t partials(const kvs_mla_decode_args *a, uint32_t parts)
{
    return parts > 1 ? (uint64_t)a->n_seqs * a->s_q * a->h_q * parts : 0;
}

template <typename shape, bool FP16> cudaError_t kernel_init()
{
    int device = 0, bytes = 0;
    cudaFuncAttributes attributes;
    cudaError_t e = cudaGetDevice(&device);

    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, decode_kernel<shape, FP16, false>);
    if (e == cudaSuccess && bytes >= shape::BYTES)
        e = cudaFuncSetAttribute(decode_kernel<shape, FP16, false>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shape::BYTES);
    return e;
}

template <bool FP16> cudaError_t launch(const decode_params &p, uint32_t rows, uint64_t blocks, cudaStream_t stream)
{
    cudaError_t e;

    if (rows == wide_shape::ROWS)
        decode_kernel<wide_shape, FP16, false><<<(unsigned)blocks, THREADS, wide_shape::BYTES, stream>>>(p);
    else
        decode_kernel<small_shape, FP16, false><<<(unsigned)blocks, THREADS, small_shape::BYTES, stream>>>(p);
    e = cudaGetLastError();
    if (e != cudaSuccess || p.parts == 1)
        return e;
    merge_kernel<FP16, false><<<p.n_tokens * p.a.h_q, MERGE_THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

extern "C" kvs_status kvs_mla_decode_cuda_init(kvs_err *err)
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
        e = cudaFuncGetAttributes(&attributes, merge_kernel<false, false>);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, merge_kernel<true, false>);
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(mla_decode)", e);
}

extern "C" uint32_t kvs_mla_decode_cuda_parts(const kvs_mla_decode_args *a)
{
    uint64_t longest = (uint64_t)a->table_width * a->view.tokens_per_block, parts, most, blocks;
    uint32_t rows = rows_a_block(a);

    if (a->parts > 0)
        return a->parts;
    if (a->fixed_split)
        parts = (longest + TOKENS_A_FIXED_PART - 1) / TOKENS_A_FIXED_PART;
    else {
        blocks = (uint64_t)a->n_seqs * ((a->s_q * a->h_q + rows - 1) / rows);
        most = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;
        parts = blocks > 0 ? resident_blocks(rows) / blocks : 1;
        parts = parts < most ? parts : most;
    }
    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? (uint32_t)MAX_AUTO_PARTS : (uint32_t)parts;
}

extern "C" uint64_t kvs_mla_decode_cuda_workspace(const kvs_mla_decode_args *a)
{
    if (a->s_q < 1 || a->s_q > KVS_MLA_MAX_SQ || a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS ||
        a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return partials(a, kvs_mla_decode_cuda_parts(a)) * (LATENT + 1) * sizeof(float);
}

extern "C" kvs_status kvs_mla_decode_cuda(const kvs_mla_decode_args *a, void *workspace, uint64_t workspace_bytes,
                                          uint32_t *ret_bad, kvs_mla_decode_result *ret, CUstream_st *stream,
                                          kvs_err *err)
{
    kvs_status s = kvs_mla_decode_check(a, err);
    decode_params p = {};
    uint32_t rows = rows_a_block(a);
    uint64_t blocks, need = kvs_mla_decode_cuda_workspace(a);
    cudaError_t e = cudaSuccess;

    if (s != KVS_OK)
        return s;
    if (need > 0 &&
        (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0 || workspace_bytes < need))
        return kvs_fail(err, KVS_E_LIMIT,
                        "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " at a multiple of 16 are needed",
                        workspace_bytes, workspace, need);
    p.a = *a;
    p.n_tokens = a->n_seqs * a->s_q;
    p.site = KVS_SITE_MLA_DECODE;
    p.row_blocks = (a->s_q * a->h_q + rows - 1) / rows;
    p.parts = kvs_mla_decode_cuda_parts(a);
    p.step_pages = TILE / kvs_view_tokens(&a->view, KVS_SITE_MLA_DECODE);
    p.step_tokens = TILE % kvs_view_tokens(&a->view, KVS_SITE_MLA_DECODE);
    p.bad = ret_bad;
    p.part_out = static_cast<float *>(workspace);
    p.part_lse = p.part_out + partials(a, p.parts) * LATENT;
    p.scale_log2 = a->sm_scale * 1.44269504f;
    p.q_aligned = is_aligned(a->q_nope, 16) && is_aligned(a->q_pe, 16);
    p.out_aligned = is_aligned(a->out, 8);
    blocks = (uint64_t)a->n_seqs * p.row_blocks * p.parts;
    if (blocks > INT32_MAX || (uint64_t)a->n_seqs * a->s_q * a->h_q > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT,
                        "decode: %" PRIu32 " sequences of %" PRIu32 " rows and %" PRIu32
                        " parts need more than %d thread blocks",
                        a->n_seqs, a->s_q * a->h_q, p.parts, INT32_MAX);
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && blocks > 0)
        e = a->view.format == KVS_FORMAT_mla_fp16 ? launch<true>(p, rows, blocks, stream)
                                                  : launch<false>(p, rows, blocks, stream);
    if (e != cudaSuccess)
        return kvs_cuda_fail(err, "mla_decode launch", e);
    *ret = kvs_mla_decode_result{p.parts, KVS_KERNEL_MLA_DECODE_MMA, 0};
    return KVS_OK;
}
