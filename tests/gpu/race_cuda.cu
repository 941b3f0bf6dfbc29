#include "tests/gpu/race_cuda.h"

#include <cuda_runtime.h>

namespace
{

__device__ uint64_t now_ns()
{
    uint64_t t;

    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__global__ void sum_later(const uint64_t *p, uint64_t n, uint64_t ns, unsigned long long *sum)
{
    uint64_t end = now_ns() + ns, s = 0;

    while (now_ns() < end)
        __nanosleep(1000);
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
        s += __ldcg(p + i);
    atomicAdd(sum, s);
}

} // namespace

extern "C" bool race_cuda_sum(const void *p, uint64_t bytes, uint32_t ms, uint64_t *sum, void *stream)
{
    cudaStream_t s = static_cast<cudaStream_t>(stream);

    if (cudaMemsetAsync(sum, 0, sizeof *sum, s) != cudaSuccess)
        return false;
    sum_later<<<264, 512, 0, s>>>(static_cast<const uint64_t *>(p), bytes / 8, (uint64_t)ms * 1000000,
                                  reinterpret_cast<unsigned long long *>(sum));
    return cudaGetLastError() == cudaSuccess;
}
