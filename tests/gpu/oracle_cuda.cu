#include "tests/gpu/oracle_cuda.h"

#include <cmath>

#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "proto/layout.h"

namespace
{

enum { THREADS = 128, LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, MAX_ROW = LATENT + ROPE };

/* A dense or a sparse problem. */
struct problem {
    kvs_view view;
    kvs_strided q_nope, q_pe;
    const int32_t *length, *list;
    uint64_t list_stride;
    uint32_t list_width, s_q, h_q;
    bool sparse;
    const float *sink;
    double sm_scale, kv_scale;
};

__device__ double half_value(uint32_t format, const uint8_t *row, int i)
{
    uint16_t bits = reinterpret_cast<const uint16_t *>(row)[i];

    return format == KVS_FORMAT_mla_fp16 ? (double)__half2float(__ushort_as_half(bits))
                                         : (double)__uint_as_float((uint32_t)bits << 16);
}

__device__ double byte_value(uint8_t bits)
{
    return (double)__half2float(__half(__nv_cvt_fp8_to_halfraw(bits, __NV_E4M3)));
}

__device__ double power_of_two(uint8_t code)
{
    return code == 255 ? (double)NAN : ldexp(1.0, code - 127);
}

struct place {
    const uint8_t *row, *tail;
};

/* Value i of a token, by its format. */
__device__ double value(const problem &p, place at, int i)
{
    const uint8_t *row = at.row;

    switch (p.view.format) {
    case KVS_FORMAT_mla_fp8:
        return byte_value(row[i]) * p.kv_scale;
    case KVS_FORMAT_fp8_ds_mla:
        return i < 512 ? byte_value(row[i]) * (double)reinterpret_cast<const float *>(row + 512)[i / 128]
                       : half_value(p.view.format, row + 528, i - 512);
    case KVS_FORMAT_fp8_blk584:
        return i < 448 ? byte_value(row[i]) * power_of_two(at.tail[i / 64])
                       : half_value(p.view.format, row + 448, i - 448);
    case KVS_FORMAT_fp8_blk528:
        return byte_value(row[i]) * power_of_two(at.tail[i / 32]);
    default:
        return half_value(p.view.format, row, i);
    }
}

__device__ int tail_bytes(uint32_t format)
{
    return format == KVS_FORMAT_fp8_blk584 ? 8 : format == KVS_FORMAT_fp8_blk528 ? 16 : 0;
}

/* Token t that query token `token` looks at; no row: none. */
__device__ place place_of(const problem &p, uint32_t token, uint32_t t)
{
    uint64_t tokens = p.view.tokens_per_block, offset;
    int64_t block;
    const uint8_t *page;

    if (p.sparse) {
        int64_t index = p.list[token * p.list_stride + t];

        block = index < 0 ? -1 : index / (int64_t)tokens;
        offset = index < 0 ? 0 : index % tokens;
    } else {
        block = p.list[token / p.s_q * p.list_stride + t / tokens];
        offset = t % tokens;
    }
    if (block < 0 || block >= (int64_t)p.view.n_blocks)
        return {nullptr, nullptr};
    page = p.view.base + (uint64_t)block * p.view.block_stride;
    return {page + offset * p.view.row_bytes,
            page + tokens * p.view.row_bytes + offset * (uint64_t)tail_bytes(p.view.format)};
}

__device__ uint32_t tokens_seen(const problem &p, uint32_t token)
{
    int64_t told, most = (int64_t)p.list_width * (p.sparse ? 1 : p.view.tokens_per_block);
    uint32_t hidden = p.sparse ? 0 : p.s_q - 1 - token % p.s_q, len;

    told = p.length != nullptr ? p.length[token / p.s_q] : most;
    len = told >= 0 && told <= most ? (uint32_t)told : 0;
    return len > hidden ? len - hidden : 0;
}

/* One block a query row.  Scores of all its tokens, then their maximum and sum, then the values: the definition. */
__global__ void oracle_kernel(problem p, double *all_scores, uint32_t max_len, double *out, double *lse)
{
    __shared__ double q[MAX_ROW], top, sum;
    uint32_t token = blockIdx.x / p.h_q, head = blockIdx.x % p.h_q, seen = tokens_seen(p, token);
    int dims = tail_bytes(p.view.format) > 0 ? LATENT : MAX_ROW, nope_dims = dims - ROPE;
    double *scores = all_scores + (uint64_t)blockIdx.x * max_len;
    const uint8_t *nope = p.q_nope.base + token * p.q_nope.token_stride + head * p.q_nope.head_stride;
    const uint8_t *pe = p.q_pe.base + token * p.q_pe.token_stride + head * p.q_pe.head_stride;

    for (int i = threadIdx.x; i < dims; i += THREADS)
        q[i] = i < nope_dims ? half_value(p.view.format, nope, i) : half_value(p.view.format, pe, i - nope_dims);
    __syncthreads();
    for (uint32_t t = threadIdx.x; t < seen; t += THREADS) {
        place at = place_of(p, token, t);
        double s = 0;

        for (int i = 0; at.row != nullptr && i < dims; i++)
            s += q[i] * value(p, at, i);
        scores[t] = at.row != nullptr ? s * p.sm_scale : -INFINITY;
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
        double v = 0, share = p.sink != nullptr ? 1 + exp((double)p.sink[head] - (top + log(sum))) : 1;

        for (uint32_t t = 0; t < seen; t++)
            if (scores[t] != -INFINITY)
                v += exp(scores[t] - top) * value(p, place_of(p, token, t), d);
        out[(uint64_t)blockIdx.x * LATENT + d] = sum > 0 ? v / (sum * share) : 0;
    }
}

bool run(const problem &p, uint64_t rows, uint32_t max_len, double *out, double *lse)
{
    double *scores = nullptr, *dev_out = nullptr, *dev_lse = nullptr;
    bool good = rows == 0 || (cudaMalloc(&scores, (rows * max_len + 1) * sizeof *scores) == cudaSuccess &&
                              cudaMalloc(&dev_out, rows * LATENT * sizeof *out) == cudaSuccess &&
                              cudaMalloc(&dev_lse, rows * sizeof *lse) == cudaSuccess);

    if (good && rows > 0) {
        oracle_kernel<<<(unsigned)rows, THREADS>>>(p, scores, max_len, dev_out, dev_lse);
        good = cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess &&
               cudaMemcpy(out, dev_out, rows * LATENT * sizeof *out, cudaMemcpyDeviceToHost) == cudaSuccess &&
               cudaMemcpy(lse, dev_lse, rows * sizeof *lse, cudaMemcpyDeviceToHost) == cudaSuccess;
    }
    (void)cudaFree(scores);
    (void)cudaFree(dev_out);
    (void)cudaFree(dev_lse);
    return good;
}

} // namespace

extern "C" bool oracle_cuda_decode(const kvs_mla_decode_args *a, uint32_t max_len, double *out, double *lse)
{
    problem p = {};

    p.view = a->view;
    p.q_nope = a->q_nope;
    p.q_pe = a->q_pe;
    p.length = a->seq_len;
    p.list = a->block_table;
    p.list_stride = a->table_stride;
    p.list_width = a->table_width;
    p.s_q = a->s_q;
    p.h_q = a->h_q;
    p.sm_scale = a->sm_scale;
    p.kv_scale = 1;
    if (a->view.format == KVS_FORMAT_mla_fp8) {
        float scale;

        if (cudaMemcpy(&scale, a->kv_scale, sizeof scale, cudaMemcpyDeviceToHost) != cudaSuccess)
            return false;
        p.kv_scale = scale;
    }
    return run(p, (uint64_t)a->n_seqs * a->s_q * a->h_q, max_len, out, lse);
}

extern "C" bool oracle_cuda_sparse(const kvs_mla_sparse_args *a, double *out, double *lse)
{
    problem p = {};

    p.view = a->view;
    p.q_nope = a->q_nope;
    p.q_pe = a->q_pe;
    p.length = a->topk_length;
    p.list = reinterpret_cast<const int32_t *>(a->indices);
    p.list_stride = a->index_stride;
    p.list_width = a->topk;
    p.s_q = a->s_q;
    p.h_q = a->h_q;
    p.sparse = true;
    p.sink = a->sink;
    p.sm_scale = a->sm_scale;
    return run(p, (uint64_t)a->n_seqs * a->s_q * a->h_q, a->topk, out, lse);
}
