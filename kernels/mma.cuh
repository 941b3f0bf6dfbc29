/* What attention kernels on mma.sync share: the instructions by name, and operand rows.  sm_80 and newer.
 *
 * Knows instructions.  Knows no formats, views or shapes.  Device code; for .cu files of this folder only. */
#ifndef KVS_KERNELS_MMA_CUH
#define KVS_KERNELS_MMA_CUH

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/mla.h"

namespace kvs_mma
{

enum { CHUNK = 16 /* bytes; ldmatrix reads rows of one chunk, cp.async moves one */ };

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void load_matrices(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

template <bool FP16>
__device__ __forceinline__ void multiply_add(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (FP16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* 16 bytes, or 16 zeros if not `ok`: src is not read then. */
__device__ __forceinline__ void copy_async(uint32_t dst, const uint8_t *src, bool ok)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(ok ? CHUNK : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <bool FP16> __device__ __forceinline__ uint32_t pack(float low, float high)
{
    uint32_t u;

    if (FP16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(u) : "f"(high), "f"(low));
    return u;
}

/* Kept in a register: reading it anew takes longer than it looks. */
__device__ __forceinline__ uint32_t thread_index()
{
    uint32_t i;

    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
    return i;
}

/* 2^x; below -126 it is 0, which also minus infinity gives. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two or four values of an output row, which may start at any value. */
__device__ __forceinline__ void store_pair(uint8_t *dst, uint32_t pair, uint32_t aligned)
{
    if (aligned) {
        *reinterpret_cast<uint32_t *>(dst) = pair;
        return;
    }
    reinterpret_cast<uint16_t *>(dst)[0] = (uint16_t)pair;
    reinterpret_cast<uint16_t *>(dst)[1] = (uint16_t)(pair >> 16);
}

__device__ __forceinline__ uint8_t *operand_row(const kvs_strided &o, uint64_t token, uint64_t head)
{
    return o.base + token * o.token_stride + head * o.head_stride;
}

/* A chunk of an operand that may start at any 2-byte value. */
__device__ __forceinline__ uint4 load_values(const uint8_t *src, uint32_t aligned)
{
    union {
        uint4 whole;
        uint16_t value[CHUNK / 2];
    } u;

    if (aligned)
        return *reinterpret_cast<const uint4 *>(src);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i++)
        u.value[i] = reinterpret_cast<const uint16_t *>(src)[i];
    return u.whole;
}

inline bool is_aligned(const kvs_strided &o, uint64_t n)
{
    return (reinterpret_cast<uintptr_t>(o.base) | o.token_stride | o.head_stride) % n == 0;
}

} // namespace kvs_mma
#endif
