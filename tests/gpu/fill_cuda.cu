#include "tests/gpu/fill_cuda.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace
{

__global__ void fill(__nv_bfloat16 *p, uint64_t n, uint64_t seed)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t x = (i + seed) * 0x9E3779B97F4A7C15ull;

        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
        p[i] = __float2bfloat16(((float)(x >> 40) / 8388608.0f - 1.0f) * 1.7f);
    }
}

} // namespace

extern "C" bool fill_cuda_bf16(void *p, uint64_t n, uint64_t seed)
{
    fill<<<4096, 256>>>(static_cast<__nv_bfloat16 *>(p), n, seed);
    return cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}
