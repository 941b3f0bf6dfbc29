/* Block sums on a GPU: a thread block sums one part of one block and adds it to the result, whatever the order; a
 * second kernel finishes what has come together.  Of many small blocks each is summed and finished by one thread block. */
#include "kernels/block_sum.h"

#include "kernels/cuda_kernels.h"
#include "kernels/rows.cuh"

namespace
{

using namespace kvs;

enum { UNDER_WAY = 8, PART = 2 * UNDER_WAY * ROWS_THREADS * CHUNK, WORD = 8 };

struct params {
    kvs_block_sum_args a;
    uint32_t *bad;
    uint32_t parts; /* of a block; 1: the thread block finishes the sum */
};

__device__ inline bool find_block(const params &p, uint32_t i, bool counts, const uint8_t **ret)
{
    const int32_t block = p.a.blocks[i];

    if (block < 0)
        return false;
    if ((uint32_t)block >= p.a.view.n_blocks) {
        if (counts && p.bad != nullptr)
            atomicAdd(p.bad, 1u);
        return false;
    }
    *ret = kvs_view_page(&p.a.view, (uint32_t)block, KVS_SITE_BLOCK_SUM);
    return true;
}

__device__ inline uint64_t chunk_terms(const uint4 &c, uint64_t word)
{
    return kvs_sum_term((uint64_t)c.y << 32 | c.x, word) + kvs_sum_term((uint64_t)c.w << 32 | c.z, word + 1);
}

/* Terms of whole chunks first..end by this thread. */
__device__ inline uint64_t sum_chunks(const uint4 *p, uint64_t first, uint64_t end)
{
    uint64_t sum = 0;

    for (uint64_t i = first + threadIdx.x; i < end; i += UNDER_WAY * ROWS_THREADS) {
        uint4 c[UNDER_WAY];

#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++)
            if (i + u * ROWS_THREADS < end)
                c[u] = __ldg(p + i + u * ROWS_THREADS);
#pragma unroll
        for (int u = 0; u < UNDER_WAY; u++)
            if (i + u * ROWS_THREADS < end)
                sum += chunk_terms(c[u], 2 * (i + u * ROWS_THREADS));
    }
    return sum;
}

/* The bytes after the last whole chunk: one or two words. */
__device__ inline uint64_t sum_rest(const uint8_t *block, uint64_t length)
{
    const uint64_t whole = length / CHUNK * CHUNK;
    uint64_t w[2] = {0, 0};

    for (uint64_t i = whole; i < length; i++)
        w[(i - whole) / WORD] |= (uint64_t)block[i] << 8 * (i % WORD);
    return (length > whole ? kvs_sum_term(w[0], whole / WORD) : 0) +
           (length > whole + WORD ? kvs_sum_term(w[1], whole / WORD + 1) : 0);
}

__device__ inline uint64_t sum_threads(uint64_t sum)
{
    __shared__ uint64_t warp[ROWS_THREADS / 32];

#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (threadIdx.x % 32 == 0)
        warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < ROWS_THREADS / 32; i++)
        sum += warp[i];
    return sum;
}

__global__ void __launch_bounds__(ROWS_THREADS) sum_kernel(const __grid_constant__ params p)
{
    const uint32_t i = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const uint64_t length = kvs_view_length(&p.a.view, KVS_SITE_BLOCK_SUM), chunks = length / CHUNK;
    const bool last = part + 1 == p.parts;
    const uint8_t *block;
    uint64_t sum, end = (uint64_t)(part + 1) * (PART / CHUNK);

    if (!find_block(p, i, part == 0 && threadIdx.x == 0, &block)) {
        if (p.parts == 1 && threadIdx.x == 0)
            p.a.sums[i] = 0;
        return;
    }
    if (last || end > chunks)
        end = chunks;
    sum = sum_chunks(reinterpret_cast<const uint4 *>(block), (uint64_t)part * (PART / CHUNK), end);
    if (last && threadIdx.x == 0)
        sum += sum_rest(block, length);
    sum = sum_threads(sum);
    if (threadIdx.x == 0 && p.parts == 1)
        p.a.sums[i] = kvs_sum_finish(sum, length);
    else if (threadIdx.x == 0)
        atomicAdd(reinterpret_cast<unsigned long long *>(p.a.sums + i), (unsigned long long)sum);
}

__global__ void __launch_bounds__(ROWS_THREADS) finish_kernel(const __grid_constant__ params p)
{
    const uint64_t i = (uint64_t)blockIdx.x * ROWS_THREADS + threadIdx.x;
    const uint8_t *block;

    if (i < p.a.n && find_block(p, (uint32_t)i, false, &block))
        p.a.sums[i] = kvs_sum_finish(p.a.sums[i], kvs_view_length(&p.a.view, KVS_SITE_BLOCK_SUM));
}

/* One part fills no GPU by itself: enough blocks must be there, and none so long that the last ones are waited for. */
uint32_t parts_of(const kvs_block_sum_args *a)
{
    enum { MANY = 1024, FEW_PARTS = 4 };
    const uint64_t parts = (a->view.page_bytes + PART - 1) / PART;

    return parts <= 1 || (a->n >= MANY && parts <= FEW_PARTS) ? 1 : (uint32_t)parts;
}

} // namespace

extern "C" kvs_status kvs_block_sum_cuda_init(kvs_err *err)
{
    const kvs_status s = rows_load(sum_kernel, "cudaFuncGetAttributes(block_sum)", err);

    return s == KVS_OK ? rows_load(finish_kernel, "cudaFuncGetAttributes(block_sum)", err) : s;
}

extern "C" kvs_status kvs_block_sum_cuda(const kvs_block_sum_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                         kvs_err *err)
{
    const params p = {*a, ret_bad, parts_of(a)};
    unsigned blocks = 0;
    kvs_status s = kvs_block_sum_check(a, err);
    cudaError_t e;

    if (s == KVS_OK)
        s = rows_begin((uint64_t)a->n * p.parts, 1, ret_bad, stream, &blocks, err);
    if (s != KVS_OK || blocks == 0)
        return s;
    if (p.parts > 1) {
        e = cudaMemsetAsync(a->sums, 0, a->n * sizeof *a->sums, stream);
        if (e != cudaSuccess)
            return kvs_cuda_fail(err, "cudaMemsetAsync", e);
    }
    sum_kernel<<<blocks, ROWS_THREADS, 0, stream>>>(p);
    if (p.parts > 1)
        finish_kernel<<<(a->n + ROWS_THREADS - 1) / ROWS_THREADS, ROWS_THREADS, 0, stream>>>(p);
    return rows_end("block_sum launch", err);
}
