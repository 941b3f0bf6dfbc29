/* MLA write on a GPU: a thread moves 16 bytes of a row; 72 of them make a row.
 *
 * A row of the cache starts at a multiple of 16 whatever the view is; the sources may start at any value, so they
 * are read value by value unless base and pitch are multiples of 16 too. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/kernels_cuda.h"
#include "kernels/mla_check.h"

namespace
{

enum { LATENT_BYTES = KVS_MLA_LATENT * 2, ROPE_BYTES = KVS_MLA_ROPE * 2, CHUNK = 16, THREADS = 288 };
enum { CHUNKS = (LATENT_BYTES + ROPE_BYTES) / CHUNK, LATENT_CHUNKS = LATENT_BYTES / CHUNK };

struct write_params {
    kvs_mla_write_args a;
    uint32_t *bad;
    uint32_t latent_aligned, rope_aligned;
};

__device__ uint4 read_chunk(const uint8_t *src, uint32_t aligned)
{
    union {
        uint4 whole;
        uint16_t value[CHUNK / 2];
    } u;

    if (aligned)
        return *reinterpret_cast<const uint4 *>(src);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++)
        u.value[i] = reinterpret_cast<const uint16_t *>(src)[i];
    return u.whole;
}

__global__ void __launch_bounds__(THREADS) write_kernel(const __grid_constant__ write_params p)
{
    uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x, t = i / CHUNKS;
    uint32_t c = (uint32_t)(i % CHUNKS);
    int64_t slot;
    kvs_view_place at;
    uint8_t *row;

    if (t >= p.a.n_tokens)
        return;
    slot = p.a.slot_mapping[t];
    if (slot < 0)
        return;
    if ((uint64_t)slot >= (uint64_t)p.a.view.n_blocks * p.a.view.tokens_per_block) {
        if (c == 0 && p.bad != nullptr)
            atomicAdd(p.bad, 1u);
        return;
    }
    at = kvs_view_split(&p.a.view, (uint64_t)slot, KVS_SITE_MLA_WRITE);
    row = kvs_view_row(&p.a.view, at.page, at.token, KVS_SITE_MLA_WRITE);
    *reinterpret_cast<uint4 *>(row + c * CHUNK) =
        c < LATENT_CHUNKS ? read_chunk(p.a.kv_c + t * p.a.kv_c_stride + c * CHUNK, p.latent_aligned)
                          : read_chunk(p.a.k_pe + t * p.a.k_pe_stride + (c - LATENT_CHUNKS) * CHUNK, p.rope_aligned);
}

bool aligned16(const uint8_t *base, uint64_t stride)
{
    return (reinterpret_cast<uintptr_t>(base) | stride) % CHUNK == 0;
}

kvs_status write_check(const kvs_mla_write_args *a, kvs_err *err)
{
    kvs_status s = kvs_view_check(&a->view, KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16), 0, err);

    if (s == KVS_OK)
        s = kvs_rows_check("kv_c", a->kv_c, a->n_tokens, a->kv_c_stride, LATENT_BYTES, 2, err);
    if (s == KVS_OK)
        s = kvs_rows_check("k_pe", a->k_pe, a->n_tokens, a->k_pe_stride, ROPE_BYTES, 2, err);
    if (s == KVS_OK)
        s = kvs_rows_check("slot_mapping", reinterpret_cast<const uint8_t *>(a->slot_mapping), a->n_tokens,
                           sizeof *a->slot_mapping, sizeof *a->slot_mapping, sizeof *a->slot_mapping, err);
    return s;
}

} // namespace

extern "C" kvs_status kvs_mla_write_cuda_init(kvs_err *err)
{
    cudaFuncAttributes attributes;
    cudaError_t e = cudaFuncGetAttributes(&attributes, write_kernel);

    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(mla_write)", e);
}

extern "C" kvs_status kvs_mla_write_cuda(const kvs_mla_write_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                         kvs_err *err)
{
    kvs_status s = write_check(a, err);
    write_params p = {*a, ret_bad, aligned16(a->kv_c, a->kv_c_stride), aligned16(a->k_pe, a->k_pe_stride)};
    uint64_t blocks = ((uint64_t)a->n_tokens * CHUNKS + THREADS - 1) / THREADS;
    cudaError_t e;

    if (s != KVS_OK)
        return s;
    if (blocks > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT, "n_tokens: %" PRIu32 " need more than %d thread blocks", a->n_tokens,
                        INT32_MAX);
    if (ret_bad != nullptr) {
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
        if (e != cudaSuccess)
            return kvs_cuda_fail(err, "cudaMemsetAsync", e);
    }
    if (blocks == 0)
        return KVS_OK;
    write_kernel<<<(unsigned)blocks, THREADS, 0, stream>>>(p);
    e = cudaGetLastError();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "mla_write launch", e);
}
