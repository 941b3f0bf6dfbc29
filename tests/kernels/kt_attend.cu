#include "tests/kernels/kt_attend.h"

#include <cmath>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace
{

enum { THREADS = 128, MAX_DIM = 640 };

__device__ double value(kt_type type, const uint8_t *p, uint32_t i)
{
    if (type == KT_E4M3) {
        uint32_t bits = p[i], exponent = bits >> 3 & 15, fraction = bits & 7;
        double x = exponent == 0 ? ldexp((double)fraction, -9) : ldexp((double)(8 + fraction), (int)exponent - 10);

        return (bits & 0x7F) == 0x7F ? (double)NAN : (bits & 0x80) != 0 ? -x : x;
    }
    uint16_t bits = reinterpret_cast<const uint16_t *>(p)[i];

    return type == KT_FP16 ? (double)__half2float(__ushort_as_half(bits))
                           : (double)__uint_as_float((uint32_t)bits << 16);
}

/* A block a row.  Scores of all its tokens, then their maximum and sum, then the values: the definition. */
__global__ void attend(kt_attention a, double *all_scores, double *out, double *lse)
{
    __shared__ double q[MAX_DIM], top, sum;
    const uint64_t r = blockIdx.x;
    const kt_query row = a.rows[r];
    double *scores = all_scores + r * a.n_tokens;

    for (uint32_t i = threadIdx.x; i < a.d_qk; i += THREADS)
        q[i] = a.q[r * a.d_qk + i];
    __syncthreads();
    for (uint64_t t = row.from + threadIdx.x; t < row.to; t += THREADS) {
        double s = 0;

        for (uint32_t i = 0; a.k[t] != nullptr && i < a.d_qk; i++)
            s += q[i] * value(a.cache, a.k[t] + row.k_off, i);
        s *= a.scale;
        scores[t] = a.k[t] == nullptr ? -INFINITY : a.cap > 0 ? a.cap * tanh(s / a.cap) : s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        top = -INFINITY;
        sum = 0;
        for (uint64_t t = row.from; t < row.to; t++)
            top = fmax(top, scores[t]);
        for (uint64_t t = row.from; t < row.to && top != -INFINITY; t++)
            sum += exp(scores[t] - top);
        lse[r] = top == -INFINITY ? -INFINITY : top + log(sum);
    }
    __syncthreads();
    for (uint32_t d = threadIdx.x; d < a.d_v; d += THREADS) {
        double v = 0;

        for (uint64_t t = row.from; t < row.to; t++)
            if (scores[t] != -INFINITY)
                v += exp(scores[t] - top) * value(a.cache, a.v[t] + row.v_off, d);
        out[r * a.d_v + d] = sum > 0 ? v / sum * a.v_scale : 0;
    }
}

} // namespace

extern "C" bool kt_attend_launch(const kt_attention *a, double *scores, double *out, double *lse, CUstream_st *stream)
{
    if (a->d_qk > MAX_DIM)
        return false;
    attend<<<a->n_rows, THREADS, 0, stream>>>(*a, scores, out, lse);
    return cudaGetLastError() == cudaSuccess;
}
