#include "tests/gpu/fill_cuda.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "proto/layout.h"

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

/* A byte of a page whose bytes are spread evenly over the numbers that a format has there, near 1; no NaN. */
__device__ uint8_t page_byte(uint32_t format, uint32_t tokens, uint64_t at, uint32_t x)
{
    uint8_t e4m3 = (uint8_t)((x & 0x80) | (0x28 + (x & 15))), bf16 = (uint8_t)(at % 2 ? 0x3F | (x & 0x80) : x);
    uint64_t in_row;

    switch (format) {
    case KVS_FORMAT_mla_fp8:
        return e4m3;
    case KVS_FORMAT_fp8_ds_mla:
        in_row = at % 656;
        if (in_row >= 512 && in_row < 528)
            return in_row % 4 == 3 ? 0x3F : in_row % 4 == 2 ? 0x80 : 0; /* 1.0f */
        return in_row < 512 ? e4m3 : bf16;
    case KVS_FORMAT_fp8_blk584:
        in_row = at % 576;
        return at >= tokens * 576ull ? 127 : in_row < 448 ? e4m3 : bf16;
    case KVS_FORMAT_fp8_blk528:
        return at >= tokens * 512ull ? 127 : e4m3;
    default:
        return bf16;
    }
}

__global__ void fill_page(uint8_t *p, uint64_t n, uint64_t page_bytes, uint32_t format, uint32_t tokens)
{
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x) {
        uint64_t x = i * 0x9E3779B97F4A7C15ull;

        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
        p[i] = page_byte(format, tokens, i % page_bytes, (uint32_t)(x >> 40));
    }
}

} // namespace

extern "C" bool fill_cuda_pages(void *p, uint64_t n_pages, uint64_t page_bytes, uint32_t format, uint32_t tokens)
{
    fill_page<<<16384, 256>>>(static_cast<uint8_t *>(p), n_pages * page_bytes, page_bytes, format, tokens);
    return cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}

extern "C" bool fill_cuda_bf16(void *p, uint64_t n, uint64_t seed)
{
    fill<<<4096, 256>>>(static_cast<__nv_bfloat16 *>(p), n, seed);
    return cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}
