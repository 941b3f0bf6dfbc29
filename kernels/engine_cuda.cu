/* The kinds of work of a stand-in engine. */
#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/engine_cuda.h"

namespace
{

enum { THREADS = 256, CTAS = 132 * 8, CHAINS = 8, COMPUTE_LAUNCHES = 16, MEMORY_LAUNCHES = 4 };
enum { ROUNDS = 4096, SHORT_ROUNDS = 512 }; /* 280 us and 35 us of an H200 */

/* Eight chains a thread: the arithmetic pipes are full, memory is not touched. */
__global__ void __launch_bounds__(THREADS) compute(float *out, int rounds)
{
    float x[CHAINS];

    for (int i = 0; i < CHAINS; i++)
        x[i] = (float)(threadIdx.x + i);
    for (int r = 0; r < rounds; r++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++)
            x[i] = __fmaf_rn(x[i], 0.999f, 0.5f);
    for (int i = 1; i < CHAINS; i++)
        x[0] += x[i];
    if (x[0] == -1.0f) /* never, which the compiler cannot know */
        *out = x[0];
}

__global__ void __launch_bounds__(THREADS) stream(uint4 *to, const uint4 *from, uint64_t n)
{
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += (uint64_t)gridDim.x * THREADS)
        to[i] = from[i];
}

} // namespace

extern "C" kvs_status engine_cuda_launch(enum engine_cuda_work work, void *buffer, uint64_t bytes,
                                         struct CUstream_st *s, kvs_err *err)
{
    const int launches[ENGINE_CUDA_WORKS] = {COMPUTE_LAUNCHES, MEMORY_LAUNCHES, 1};
    uint64_t half = bytes / 2 / sizeof(uint4);
    cudaError_t e;

    for (int i = 0; i < launches[work]; i++) {
        if (work != ENGINE_CUDA_MEMORY)
            compute<<<CTAS, THREADS, 0, s>>>(static_cast<float *>(buffer),
                                             work == ENGINE_CUDA_COMPUTE ? ROUNDS : SHORT_ROUNDS);
        else
            stream<<<CTAS, THREADS, 0, s>>>(static_cast<uint4 *>(buffer) + half, static_cast<const uint4 *>(buffer),
                                            half);
    }
    e = cudaGetLastError();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "a step of the engine", e);
}
