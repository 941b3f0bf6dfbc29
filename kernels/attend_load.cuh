/* Rows of keys, values and queries into shared memory, for attend.cuh.
 *
 * Knows chunks, pitches and types.  Where tokens lie is the `problem`'s matter (attend.cuh).  Device code; for .cu files of
 * this folder only. */
#ifndef KVS_KERNELS_ATTEND_LOAD_CUH
#define KVS_KERNELS_ATTEND_LOAD_CUH

#include <cinttypes>
#include <cmath>

#include "kernels/mma.cuh"

namespace kvs_attend
{

using namespace kvs_mma;

enum {
    WARPS = 4,
    THREADS = WARPS * 32,
    TILE = 64,           /* tokens of a stage */
    LOAD = TILE / WARPS, /* that a warp loads */
    LOADERS = 8,         /* lanes that load a row */
    PAD = CHUNK,         /* bytes behind a 16-bit row in shared memory */
    MASKS = 4 * WARPS,   /* bytes of a stage's masks */
    MERGE_THREADS = 128,
    MAX_PARTS = KVS_MLA_MAX_PARTS,
    MAX_DIM = 256,
};

struct attend_params {
    kvs_strided q, out, lse;
    float *part_out, *part_lse; /* [tokens * h_q][parts][d_v], [..][parts]; used if parts > 1 */
    uint32_t d_qk, d_v, h_q, group, parts, stages;
    float scale;      /* with cap: to the score, which tanh takes */
    float scale_log2; /* from the score, or its capped form, to base 2 */
    float cap;        /* 0: none */
    float inverse_cap;
    float out_scale;
    uint32_t q_aligned, out_aligned;
};

/* What a block works on. */
struct job {
    uint32_t first, n_rows; /* rows of the sequence's; row r is query token + r / group, head + r % group */
    uint32_t token, head, seq, kv_head, part;
    int32_t begin, end;    /* tokens of this block */
    int32_t horizon, step; /* row r sees tokens below horizon + r / group * step */
    int32_t window;        /* and no more than that many; 0: all */
    bool counts;           /* this block sees every token: it counts the bad ones */
};

__device__ __forceinline__ int32_t seen_to(const attend_params &a, const job &j, uint32_t row)
{
    return j.horizon + (int32_t)(row / a.group) * j.step;
}

/* Where everything lies in a block's shared memory.  Pitches and sizes in bytes. */
template <bool FP8> struct shared_layout {
    uint32_t k_pitch, v_pitch, raw_k, raw_v, q_at, masks_at, units_at, tile_at, stages_at, stage_bytes;

    __host__ __device__ __forceinline__ shared_layout(uint32_t rows, uint32_t d_qk, uint32_t d_v)
    {
        k_pitch = d_qk * 2 + PAD;
        v_pitch = d_v * 2 + PAD;
        raw_k = FP8 ? d_qk + PAD : k_pitch;
        raw_v = FP8 ? d_v + PAD : v_pitch;
        q_at = 0;
        masks_at = rows * k_pitch;
        units_at = masks_at + 4 * MASKS;
        tile_at = units_at + (FP8 ? rows * 4 : 0);
        stages_at = tile_at + (FP8 && rows > 16 ? TILE * (k_pitch + v_pitch) : 0);
        stage_bytes = TILE * (raw_k + raw_v);
    }
    /* The results of the warps take the place of the tiles when those are done with. */
    __host__ __device__ __forceinline__ uint32_t bytes(uint32_t stages, uint32_t d_v) const
    {
        uint32_t tiles = stages_at + stages * stage_bytes, join = tile_at + WARPS * 16 * (d_v + 2) * 4;

        return tiles > join ? tiles : join;
    }
};

/* Two e4m3 in the low bytes as two fp16, exactly. */
__device__ __forceinline__ uint32_t widen_pair(uint32_t pair)
{
    uint32_t out;

#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((uint16_t)pair));
#else
    /* The fields are at hand; what is left is a product by 2^8, which also mends subnormals. */
    uint32_t wide = __byte_perm(pair, 0, 0x1404);

    asm("mul.rn.f16x2 %0, %1, %2;"
        : "=r"(out)
        : "r"((wide & 0x80008000u) | (wide & 0x7F007F00u) >> 1), "r"(0x5C005C00u));
    if ((pair & 0x7Fu) == 0x7Fu)
        out |= 0x7FFFu;
    if ((pair >> 8 & 0x7Fu) == 0x7Fu)
        out |= 0x7FFF0000u;
#endif
    return out;
}

__device__ __forceinline__ uint2 widen(uint32_t four)
{
    return make_uint2(widen_pair(four & 0xFFFFu), widen_pair(four >> 16));
}

/* This lane's chunks of one raw row into a row of the 16-bit tile. */
__device__ __forceinline__ void widen_row(const uint8_t *raw, uint8_t *row, uint32_t chunks, uint32_t lane)
{
    for (uint32_t c = lane % LOADERS; c < chunks; c += LOADERS) {
        uint4 in = *reinterpret_cast<const uint4 *>(raw + c * CHUNK);
        uint2 a = widen(in.x), b = widen(in.y), x = widen(in.z), y = widen(in.w);

        *reinterpret_cast<uint4 *>(row + c * 2 * CHUNK) = make_uint4(a.x, a.y, b.x, b.y);
        *reinterpret_cast<uint4 *>(row + c * 2 * CHUNK + CHUNK) = make_uint4(x.x, x.y, y.x, y.y);
    }
}

/* This lane's chunks of a row of at most MOST bytes. */
template <uint32_t MOST>
__device__ __forceinline__ void load_row(uint32_t dst, const uint8_t *src, uint32_t chunks, uint32_t lane, bool ok)
{
#pragma unroll
    for (uint32_t i = 0; i < MOST / CHUNK; i += LOADERS)
        if (i + lane % LOADERS < chunks)
            copy_async(dst + (i + lane % LOADERS) * CHUNK, src + (i + lane % LOADERS) * CHUNK, ok);
}

__device__ __forceinline__ const uint8_t *pointer_of(const uint8_t *p, uint32_t lane)
{
    return reinterpret_cast<const uint8_t *>(__shfl_sync(0xFFFFFFFFu, reinterpret_cast<unsigned long long>(p), lane));
}

/* This warp's 16 tokens of a tile into a stage, and which of them there are into its mask. */
template <typename problem, int DV, bool FP8>
__device__ __forceinline__ void load_tile(const problem &p, const attend_params &a, const job &j,
                                          const typename problem::plan &l, const shared_layout<FP8> &at, uint8_t *stage,
                                          uint32_t *masks)
{
    constexpr uint32_t VALUE = FP8 ? 1 : 2, VALUES = CHUNK / VALUE;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool good = p.good(j, l);
    const uint32_t mask = __ballot_sync(0xFFFFFFFFu, good) & 0xFFFFu;
    const uint32_t k_at = shared_address(stage) + warp * LOAD * at.raw_k;
    const uint32_t v_at = shared_address(stage) + TILE * at.raw_k + warp * LOAD * at.raw_v;
    const uint8_t *k = p.anywhere(), *v = k;

    if (lane == 0)
        masks[warp] = mask;
    if (good)
        p.place(j, l, &k, &v);
#pragma unroll
    for (uint32_t i = 0; i < LOAD; i += 32 / LOADERS) {
        uint32_t r = i + lane / LOADERS;
        bool ok = (mask >> r & 1) != 0;

        load_row<MAX_DIM * VALUE>(k_at + r * at.raw_k, pointer_of(k, r), a.d_qk / VALUES, lane, ok);
        load_row<DV * VALUE>(v_at + r * at.raw_v, pointer_of(v, r), a.d_v / VALUES, lane, ok);
    }
}

/* fp8: this warp's tokens, each lane what it loaded itself. */
template <bool FP8>
__device__ __forceinline__ void widen_tile(const attend_params &a, const shared_layout<FP8> &at, const uint8_t *stage,
                                           uint8_t *tile)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    for (uint32_t i = 0; i < LOAD; i += 32 / LOADERS) {
        uint32_t r = warp * LOAD + i + lane / LOADERS;

        widen_row(stage + r * at.raw_k, tile + r * at.k_pitch, a.d_qk / 16, lane);
        widen_row(stage + TILE * at.raw_k + r * at.raw_v, tile + TILE * at.k_pitch + r * at.v_pitch, a.d_v / 16, lane);
    }
}

/* Chunk c of row r of this block; zeros for a row that there is not. */
__device__ __forceinline__ uint4 query_chunk(const attend_params &a, const job &j, uint32_t r, uint32_t c)
{
    const uint32_t row = j.first + r;

    if (r >= j.n_rows)
        return make_uint4(0, 0, 0, 0);
    return load_values(operand_row(a.q, j.token + row / a.group, j.head + row % a.group) + c * CHUNK, a.q_aligned);
}

template <int ROWS>
__device__ __forceinline__ void load_queries(const attend_params &a, const job &j, uint8_t *q, uint32_t pitch)
{
    const uint32_t chunks = a.d_qk / 8;

    for (uint32_t i = threadIdx.x; i < ROWS * chunks; i += THREADS)
        *reinterpret_cast<uint4 *>(q + i / chunks * pitch + i % chunks * CHUNK) =
            query_chunk(a, j, i / chunks, i % chunks);
}

/* bf16 pairs to fp16 pairs, times a power of two. */
__device__ __forceinline__ uint32_t halves_of(uint32_t pair, float factor)
{
    return pack<true>(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xFFFF0000u) * factor);
}

/* Queries of either type as fp16.  A row of bf16, whose values may be beyond fp16's, is brought to a greatest value in
 * 1 .. 2 first; units[r] is the power of two that makes up for it.  With PAIRED, every 16 dimensions are stored in the
 * order of score_pairs. */
template <int ROWS, bool FP16, bool PAIRED>
__device__ __forceinline__ void load_queries_halved(const attend_params &a, const job &j, uint8_t *q, uint32_t pitch,
                                                    float *units)
{
    constexpr uint32_t SHARE = THREADS / ROWS; /* threads of a row: 8, or 2 */
    const uint32_t r = threadIdx.x / SHARE, lane = threadIdx.x % SHARE;
    float factor = 1;

    if (!FP16) {
        uint32_t top = 0; /* bits of a magnitude order as it does */

        for (uint32_t c = lane; c < a.d_qk / 8; c += SHARE) {
            uint4 v = query_chunk(a, j, r, c);
            uint32_t w[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
            for (int i = 0; i < 4; i++)
                top = max(top, max(w[i] << 16 & 0x7FFF0000u, w[i] & 0x7FFF0000u));
        }
#pragma unroll
        for (uint32_t i = SHARE / 2; i > 0; i /= 2)
            top = max(top, __shfl_xor_sync(0xFFFFFFFFu, top, i));
        top >>= 23; /* the exponent; 0 and infinities stay as they are */
        if (top > 0 && top < 254)
            factor = __uint_as_float((254 - top) << 23);
    }
    if (lane == 0)
        units[r] = 1 / factor;
    for (uint32_t c = lane; c < a.d_qk / 16; c += SHARE) {
        uint4 v = query_chunk(a, j, r, 2 * c), w = query_chunk(a, j, r, 2 * c + 1);
        uint4 *at = reinterpret_cast<uint4 *>(q + r * pitch + c * 2 * CHUNK);

        if (!FP16) {
            v = make_uint4(halves_of(v.x, factor), halves_of(v.y, factor), halves_of(v.z, factor),
                           halves_of(v.w, factor));
            w = make_uint4(halves_of(w.x, factor), halves_of(w.y, factor), halves_of(w.z, factor),
                           halves_of(w.w, factor));
        }
        at[0] = PAIRED ? make_uint4(v.x, v.z, w.x, w.z) : v;
        at[1] = PAIRED ? make_uint4(v.y, v.w, w.y, w.w) : w;
    }
}

} // namespace kvs_attend
#endif
