/* Queries put together on a GPU: a thread block takes ROWS (token, head) rows; ROWS of its threads find them, all of
 * them then move 16 bytes at a time. */
#include "kernels/concat_q.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { ROWS = 32, UNDER_WAY = 4, NOPE_BYTES = 1024, PE_BYTES = 128 };
enum { NOPE_UNITS = NOPE_BYTES / CHUNK, UNITS = NOPE_UNITS + PE_BYTES / CHUNK };

struct params {
    kvs_concat_q_args a;
    uint32_t nope_whole, pe_whole, out_whole; /* aligned to 16 bytes */
};

struct row {
    const uint8_t *nope, *pe;
    uint8_t *out; /* NULL: there is none */
};

__device__ inline row row_of(const kvs_concat_q_args &a, uint64_t i)
{
    const uint64_t t = i / a.n_heads, h = i % a.n_heads;

    if (t >= a.n_tokens)
        return {nullptr, nullptr, nullptr};
    return {a.nope.base + t * a.nope.token_stride + h * a.nope.head_stride,
            a.pe.base + t * a.pe.token_stride + h * a.pe.head_stride,
            a.out.base + t * a.out.token_stride + h * a.out.head_stride};
}

__global__ void __launch_bounds__(ROWS_THREADS) concat_kernel(const __grid_constant__ params p)
{
    __shared__ row rows[ROWS];

    if (threadIdx.x < ROWS)
        rows[threadIdx.x] = row_of(p.a, (uint64_t)blockIdx.x * ROWS + threadIdx.x);
    __syncthreads();
    for_units<UNDER_WAY, uint4>(
        ROWS * UNITS,
        [&](uint32_t i) {
            const row &r = rows[i / UNITS];
            const uint32_t u = i % UNITS;

            if (r.out == nullptr)
                return uint4{};
            return u < NOPE_UNITS ? load8<KVS_VALUE_BF16>(r.nope + u * CHUNK, p.nope_whole).low
                                  : load8<KVS_VALUE_BF16>(r.pe + (u - NOPE_UNITS) * CHUNK, p.pe_whole).low;
        },
        [&](uint32_t i, const uint4 &v) {
            if (rows[i / UNITS].out != nullptr)
                put16(rows[i / UNITS].out + i % UNITS * CHUNK, p.out_whole, v);
        });
}

bool whole(const kvs_strided &s)
{
    return aligned(s.base, s.token_stride | s.head_stride, CHUNK);
}

} // namespace

extern "C" kvs_status kvs_concat_q_cuda_init(kvs_err *err)
{
    return rows_load(concat_kernel, "cudaFuncGetAttributes(concat_q)", err);
}

extern "C" kvs_status kvs_concat_q_cuda(const kvs_concat_q_args *a, CUstream_st *stream, kvs_err *err)
{
    const params p = {*a, whole(a->nope), whole(a->pe), whole(a->out)};
    unsigned blocks = 0;
    kvs_status s = kvs_concat_q_check(a, err);

    if (s == KVS_OK)
        s = rows_begin((uint64_t)a->n_tokens * a->n_heads, ROWS, nullptr, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    concat_kernel<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("concat_q launch", err);
}
