#include "tests/gpu/oracle_cuda.h"

#include <cmath>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "proto/layout.h"

namespace
{

enum { THREADS = 128, LATENT = KVS_MLA_LATENT, ROW = KVS_MLA_LATENT + KVS_MLA_ROPE };

__device__ double value(uint32_t format, const uint8_t *row, int i)
{
    uint16_t bits = reinterpret_cast<const uint16_t *>(row)[i];

    return format == KVS_FORMAT_mla_fp16 ? (double)__half2float(__ushort_as_half(bits))
                                         : (double)__uint_as_float((uint32_t)bits << 16);
}

__device__ const uint8_t *row_of(const kvs_mla_decode_args &a, uint32_t seq, uint32_t token)
{
    uint32_t tokens = a.view.tokens_per_block;
    int32_t block = a.block_table[seq * a.table_stride + token / tokens];

    if (block < 0 || (uint32_t)block >= a.view.n_blocks)
        return nullptr;
    return a.view.base + (uint64_t)block * a.view.block_stride + (uint64_t)(token % tokens) * a.view.row_bytes;
}

/* One block a query row.  Scores of all its tokens, then their maximum and sum, then the values: the definition. */
__global__ void oracle_kernel(kvs_mla_decode_args a, double *all_scores, uint32_t max_len, double *out, double *lse)
{
    __shared__ double q[ROW], top, sum;
    uint32_t token = blockIdx.x / a.h_q, head = blockIdx.x % a.h_q, seq = token / a.s_q;
    uint32_t hidden = a.s_q - 1 - token % a.s_q;
    int32_t told = a.seq_len[seq];
    bool good = told >= 0 && (uint64_t)told <= (uint64_t)a.table_width * a.view.tokens_per_block;
    uint32_t len = good ? (uint32_t)told : 0, seen = len > hidden ? len - hidden : 0;
    double *scores = all_scores + (uint64_t)blockIdx.x * max_len;
    const uint8_t *nope = a.q_nope.base + token * a.q_nope.token_stride + head * a.q_nope.head_stride;
    const uint8_t *pe = a.q_pe.base + token * a.q_pe.token_stride + head * a.q_pe.head_stride;

    for (int i = threadIdx.x; i < ROW; i += THREADS)
        q[i] = i < LATENT ? value(a.view.format, nope, i) : value(a.view.format, pe, i - LATENT);
    __syncthreads();
    for (uint32_t t = threadIdx.x; t < seen; t += THREADS) {
        const uint8_t *row = row_of(a, seq, t);
        double s = 0;

        for (int i = 0; row != nullptr && i < ROW; i++)
            s += q[i] * value(a.view.format, row, i);
        scores[t] = row != nullptr ? s * (double)a.sm_scale : -INFINITY;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        top = -INFINITY;
        for (uint32_t t = 0; t < seen; t++)
            top = fmax(top, scores[t]);
        sum = 0;
        for (uint32_t t = 0; t < seen && top != -INFINITY; t++)
            sum += exp(scores[t] - top);
        lse[blockIdx.x] = top == -INFINITY ? -INFINITY : top + log(sum);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < LATENT; d += THREADS) {
        double v = 0;

        for (uint32_t t = 0; t < seen; t++)
            if (scores[t] != -INFINITY)
                v += exp(scores[t] - top) * value(a.view.format, row_of(a, seq, t), d);
        out[(uint64_t)blockIdx.x * LATENT + d] = sum > 0 ? v / sum : 0;
    }
}

} // namespace

extern "C" bool oracle_cuda_decode(const kvs_mla_decode_args *a, uint32_t max_len, double *out, double *lse)
{
    uint64_t rows = (uint64_t)a->n_seqs * a->s_q * a->h_q;
    double *scores = nullptr, *dev_out = nullptr, *dev_lse = nullptr;
    bool good = rows == 0 || (cudaMalloc(&scores, (rows * max_len + 1) * sizeof *scores) == cudaSuccess &&
                              cudaMalloc(&dev_out, rows * LATENT * sizeof *out) == cudaSuccess &&
                              cudaMalloc(&dev_lse, rows * sizeof *lse) == cudaSuccess);

    if (good && rows > 0) {
        oracle_kernel<<<(unsigned)rows, THREADS>>>(*a, scores, max_len, dev_out, dev_lse);
        good = cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess &&
               cudaMemcpy(out, dev_out, rows * LATENT * sizeof *out, cudaMemcpyDeviceToHost) == cudaSuccess &&
               cudaMemcpy(lse, dev_lse, rows * sizeof *lse, cudaMemcpyDeviceToHost) == cudaSuccess;
    }
    (void)cudaFree(scores);
    (void)cudaFree(dev_out);
    (void)cudaFree(dev_lse);
    return good;
}
