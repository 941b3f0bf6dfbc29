/* The end of MLA attention in parts, and how launches are cut. */
#include <cinttypes>
#include <cmath>
#include <cstdlib>

#include "kernels/mla_launch.cuh"
#include "kernels/mla_mma.cuh"

namespace
{

enum {
    JOIN_THREADS = 128,
    TOKENS_A_FIXED_PART = 1024,
    TOKENS_A_PART = 128, /* less is not worth a block */
    MAX_AUTO_PARTS = 64,
    LEAST_SHARED = 101376, /* bytes of a thread block: sm_86 and sm_89 */
};

/* What scales and the sink leave of a row whose exponents sum up to e^top * sum. */
__device__ float out_factor(const attend_params &p, uint32_t head, float top, float sum)
{
    float scale = p.kv_scale != nullptr ? *p.kv_scale : 1;

    return p.sink == nullptr ? scale : scale / (1 + expf(p.sink[head] - (top + logf(sum))));
}

/* One block a row: the weight of each part from its LSE, then the parts in increasing order.  A part without tokens is
 * not read: nothing was written there.  A row of no sequence is left alone. */
template <bool FP16>
__global__ void __launch_bounds__(JOIN_THREADS) join_kernel(const __grid_constant__ attend_params p)
{
    __shared__ float weights[KVS_MLA_MAX_PARTS];
    uint32_t seq = blockIdx.x / p.rows, row = blockIdx.x % p.rows, d = threadIdx.x * 4;
    uint64_t token = (uint64_t)seq * p.s_q + row / p.h_q, head = row % p.h_q, at = (uint64_t)blockIdx.x * p.parts;
    uint8_t *out = operand_row(p.out, token, head) + d * VALUE;
    float top = -INFINITY, sum = 0, v[4] = {0, 0, 0, 0};

    for (uint32_t i = threadIdx.x; i < p.parts; i += JOIN_THREADS)
        weights[i] = p.part_lse[at + i];
    __syncthreads();
    if (p.q_start != nullptr && __float_as_uint(weights[0]) == MLA_NOBODY)
        return;
    for (uint32_t i = 0; i < p.parts; i++)
        top = fmaxf(top, weights[i]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.parts; i += JOIN_THREADS)
        weights[i] = weights[i] == -INFINITY ? 0 : expf(weights[i] - top);
    __syncthreads();
#pragma unroll 8
    for (uint32_t i = 0; i < p.parts; i++) {
        float w = weights[i];
        float4 x = make_float4(0, 0, 0, 0);

        if (w != 0)
            x = *reinterpret_cast<const float4 *>(p.part_out + (at + i) * LATENT + d);
        sum += w;
        v[0] += w * x.x;
        v[1] += w * x.y;
        v[2] += w * x.z;
        v[3] += w * x.w;
    }
    if (sum != 0)
        for (int i = 0; i < 4; i++)
            v[i] = v[i] / sum * out_factor(p, (uint32_t)head, top, sum);
    store_pair(out, pack<FP16>(v[0], v[1]), p.out_aligned);
    store_pair(out + 4, pack<FP16>(v[2], v[3]), p.out_aligned);
    if (threadIdx.x == 0)
        *reinterpret_cast<float *>(operand_row(p.lse, token, head)) = sum == 0 ? -INFINITY : top + logf(sum);
}

/* Blocks that run at once: what parts should fill. */
uint64_t resident_blocks(uint32_t rows_a_block)
{
    int device = 0, processors = 0;

    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return 1;
    return (uint64_t)processors * (rows_a_block == 16 ? 2 : 1);
}

} // namespace

static_assert(LEAST_SHARED == 99 * 1024, "what the smallest cards of the portable path have");

bool mla_has_shared(int bytes, int blocks)
{
    int device = 0, a_block = 0, in_all = 0, reserved = 0;

#ifdef KVS_MUTATION /* a build for tests: it takes the kernels that the smallest cards take, or cards with so much */
    const char *told = getenv("KVS_SHARED_BYTES");

    if (bytes > (told != nullptr ? atoi(told) : LEAST_SHARED))
        return false;
#endif
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&a_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&in_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device) == cudaSuccess &&
           bytes <= a_block && (int64_t)blocks * (bytes + reserved) <= in_all;
}

uint32_t mla_rows_a_block(uint32_t rows, int wide_bytes)
{
    return rows > 16 && mla_has_shared(wide_bytes, 1) ? 32 : 16;
}

uint32_t mla_auto_parts(uint64_t n_units, uint32_t rows, uint32_t rows_a_block, uint64_t longest, bool fixed)
{
    uint64_t parts, most, blocks;

    if (fixed)
        parts = (longest + TOKENS_A_FIXED_PART - 1) / TOKENS_A_FIXED_PART;
    else {
        blocks = n_units * ((rows + rows_a_block - 1) / rows_a_block);
        most = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;
        parts = blocks > 0 ? resident_blocks(rows_a_block) / blocks : 1;
        parts = parts < most ? parts : most;
    }
    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? (uint32_t)MAX_AUTO_PARTS : (uint32_t)parts;
}

uint64_t mla_partials(uint64_t n_units, uint32_t rows, uint32_t parts)
{
    return parts > 1 ? n_units * rows * parts : 0;
}

uint64_t mla_workspace(uint64_t partials)
{
    return partials * (LATENT + 1) * sizeof(float);
}

kvs_status mla_launch_fill(attend_params *p, uint32_t rows_a_block, void *workspace, uint64_t workspace_bytes,
                           uint64_t *ret_blocks, kvs_err *err)
{
    uint64_t partials, need, blocks, row_blocks;

    p->rows = p->s_q * p->h_q;
    partials = mla_partials(p->n_units, p->rows, p->parts);
    need = mla_workspace(partials);
    if (need > 0 &&
        (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0 || workspace_bytes < need))
        return kvs_fail(err, KVS_E_LIMIT,
                        "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " at a multiple of 16 are needed",
                        workspace_bytes, workspace, need);
    row_blocks = p->q_start != nullptr ? (uint64_t)p->n_units * p->rows / rows_a_block + p->n_seqs
                                       : (p->rows + rows_a_block - 1) / rows_a_block;
    p->row_blocks = (uint32_t)row_blocks;
    p->part_out = static_cast<float *>(workspace);
    p->part_lse = p->part_out + partials * LATENT;
    p->q_aligned = is_aligned(p->q_nope, 16) && is_aligned(p->q_pe, 16);
    p->out_aligned = is_aligned(p->out, 8);
    blocks = (p->q_start != nullptr ? 1 : (uint64_t)p->n_units) * row_blocks * p->parts;
    if (blocks > INT32_MAX || row_blocks > INT32_MAX || (uint64_t)p->n_units * p->rows > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT,
                        "attention: %" PRIu32 " lists of %" PRIu32 " rows and %" PRIu32
                        " parts need more than %d thread blocks",
                        p->n_units, p->rows, p->parts, INT32_MAX);
    *ret_blocks = blocks;
    return KVS_OK;
}

cudaError_t mla_join_init()
{
    cudaFuncAttributes attributes;
    cudaError_t e = cudaFuncGetAttributes(&attributes, join_kernel<false>);

    return e == cudaSuccess ? cudaFuncGetAttributes(&attributes, join_kernel<true>) : e;
}

cudaError_t mla_join_launch(const attend_params &p, bool is_fp16, cudaStream_t stream)
{
    if (p.n_units == 0)
        return cudaSuccess;
    if (is_fp16)
        join_kernel<true><<<p.n_units * p.rows, JOIN_THREADS, 0, stream>>>(p);
    else
        join_kernel<false><<<p.n_units * p.rows, JOIN_THREADS, 0, stream>>>(p);
    return cudaGetLastError();
}
