/* Attention with heads of keys and values on a GPU, the portable path: mma.sync and cp.async, sm_80 and newer.  The kernels
 * of kv_decode.cu (pages) and mha_ragged.cu (gathered rows).
 *
 * A thread block of four warps takes 16 or 64 query rows that read one key-value head, against one part of one sequence:
 *
 *   stages of 64 tokens of K and V, rows padded by 16 bytes so that ldmatrix has no conflicts; a warp loads 16 of them
 *     |  fp8: multiplied as fp16, which holds every e4m3; queries too, each row by a power of two near 1.  16 rows: widened
 *     |  in registers, where a fragment's places are given to dimensions that lie side by side; 64 rows: into one tile more
 *   16 rows: a warp takes the 16 tokens that it loaded and waits for nobody; the four results are joined at the end
 *   64 rows: a warp takes 16 rows and all 64 tokens
 *     |  scores, weights and sums stay in registers; softmax in base 2
 *   out, or a partial result a part that merge_kernel joins in increasing order
 *
 * What a row adds up, and in which order, depends on its tokens, its length, parts and shapes: not on strides, pages,
 * neighbours or the other rows of its block.  A token that may not be read has zeros in its place and a weight of 0.
 *
 * Knows numbers and tiles.  Where tokens lie is the `problem`'s matter, a type with
 *   find_job<ROWS>(p)        what this thread block works on
 *   plan first(p, j, t)      a lane's knowledge of its token t, and next(p, j, plan) of the token TILE further
 *   good(p, j, plan)         it may be read
 *   anywhere(p)              some address: nothing is read there
 *   place(p, j, plan, &k, &v)  its rows, if it may be read */
#ifndef KVS_KERNELS_ATTEND_CUH
#define KVS_KERNELS_ATTEND_CUH

#include <cinttypes>
#include <cmath>

#include "kernels/mma.cuh"
#include "kernels/numeric.h"

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

/* ---- loading ---- */

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

/* ---- a tile ---- */

/* What a warp holds: 16 rows, of which a thread has two, and d_v dimensions in DV. */
template <int DV> struct state_of {
    float acc[DV / 8][4];
    float max[2], sum[2]; /* sum: this thread's share */
};

/* NT * 8 tokens from `k` on; q: this warp's 16 rows. */
template <int NT, bool FP16>
__device__ __forceinline__ void score(float s[NT][4], const uint8_t *q, const uint8_t *k, uint32_t pitch, uint32_t d)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t q_at = shared_address(q) + lane % 16 * pitch + lane / 16 * CHUNK;
    uint32_t k_at = shared_address(k) + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * CHUNK;

#pragma unroll
    for (int n = 0; n < NT; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < d; i += 16, q_at += 2 * CHUNK, k_at += 2 * CHUNK) {
        uint32_t x[4];

        load_matrices(x, q_at);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t y[4];

            load_matrices(y, k_at + n * 8 * pitch);
            multiply_add<FP16>(s[n], x, y[0], y[1]);
            multiply_add<FP16>(s[n + 1], x, y[2], y[3]);
        }
    }
}

/* The same from raw e4m3.  A thread's two registers of a fragment want dimensions 2i, 2i + 1 and 2i + 8, 2i + 9 of its token,
 * i = lane % 4; which dimensions these are is all the same as long as the queries agree, so it takes 4i .. 4i + 3, one
 * word of the row. */
template <int NT>
__device__ __forceinline__ void score_pairs(float s[NT][4], const uint8_t *q, const uint8_t *k, uint32_t q_pitch,
                                            uint32_t k_pitch, uint32_t d)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t q_at = shared_address(q) + lane % 16 * q_pitch + lane / 16 * CHUNK;
    const uint8_t *at = k + lane / 4 * k_pitch + lane % 4 * 4;

#pragma unroll
    for (int n = 0; n < NT; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < d; i += 16, q_at += 2 * CHUNK, at += 16) {
        uint32_t x[4];

        load_matrices(x, q_at);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint2 y = widen(*reinterpret_cast<const uint32_t *>(at + n * 8 * k_pitch));

            multiply_add<true>(s[n], x, y.x, y.y);
        }
    }
}

/* cap * tanh(x / cap), in base 2 behind it. */
__device__ __forceinline__ float capped(const attend_params &a, float x, float unit)
{
    float y = x * unit * a.scale * a.inverse_cap, e = exp2_fast(-2.88539008f * fabsf(y));

    return copysignf(__fdividef(1 - e, 1 + e), y) * a.scale_log2;
}

/* Scores to weights, with the running maximum and sum, and the sums so far brought to the new maximum.  t0: first of this
 * warp's tokens; mask: which of the 64 behind t0 there are; from, to: what the thread's two rows see; unit: what their scores are to be multiplied by first. */
template <int NT, int DV>
__device__ __forceinline__ void weigh(const attend_params &a, float s[NT][4], state_of<DV> &state, int32_t t0,
                                      uint64_t mask, const int32_t from[2], const int32_t to[2], const float unit[2])
{
    const uint32_t pair = threadIdx.x % 4 * 2;
    const bool whole =
        mask == ~UINT64_C(0) >> (64 - NT * 8) && t0 >= max(from[0], from[1]) && t0 + NT * 8 <= min(to[0], to[1]);
    float top[2], zero[2], scale[2];

#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[n][i] = a.cap > 0 ? capped(a, s[n][i], unit[i / 2]) : s[n][i] * (unit[i / 2] * a.scale_log2);
    if (!whole)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t at = n * 8 + pair + i % 2;
                int32_t t = t0 + (int32_t)at;

                if (t < from[i / 2] || t >= to[i / 2] || (mask >> at & 1) == 0)
                    s[n][i] = -INFINITY;
            }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = state.max[h];
#pragma unroll
        for (int n = 0; n < NT; n++)
            top[h] = fmaxf(top[h], fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 2));
        zero[h] = top[h] == -INFINITY ? 0.0f : top[h]; /* nothing seen so far: all weights are 2^-inf */
        scale[h] = exp2_fast(state.max[h] - zero[h]);
        state.max[h] = top[h];
        state.sum[h] *= scale[h];
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                s[n][2 * h + i] = exp2_fast(s[n][2 * h + i] - zero[h]);
                state.sum[h] += s[n][2 * h + i];
            }
    }
    if (!__any_sync(0xFFFFFFFFu, scale[0] != 1 || scale[1] != 1))
        return; /* no new maximum, as in most tiles: times one changes nothing */
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            state.acc[n][i] *= scale[i / 2];
}

/* acc += weights . values of NT * 8 tokens from `v` on. */
template <int NT, int DV, bool FP16>
__device__ __forceinline__ void add_values(const float s[NT][4], state_of<DV> &state, const uint8_t *v, uint32_t pitch,
                                           uint32_t d)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t v_at = shared_address(v) + (lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * CHUNK;

#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t w[4] = {pack<FP16>(s[2 * k][0], s[2 * k][1]), pack<FP16>(s[2 * k][2], s[2 * k][3]),
                         pack<FP16>(s[2 * k + 1][0], s[2 * k + 1][1]), pack<FP16>(s[2 * k + 1][2], s[2 * k + 1][3])};

#pragma unroll
        for (int n = 0; n < DV / 8; n += 2) {
            uint32_t x[4];

            if (n * 8 >= (int)d)
                continue;
            load_matrices_transposed(x, v_at + k * 16 * pitch + n * CHUNK);
            multiply_add<FP16>(state.acc[n], w, x[0], x[1]);
            multiply_add<FP16>(state.acc[n + 1], w, x[2], x[3]);
        }
    }
}

/* The same from raw e4m3.  A matrix of byte pairs comes with two dimensions of two tokens in each register: the even
 * dimensions of 16 go to one tile of results, the odd ones to the next. */
template <int NT, int DV>
__device__ __forceinline__ void add_value_pairs(const float s[NT][4], state_of<DV> &state, const uint8_t *v,
                                                uint32_t pitch, uint32_t d)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t v_at = shared_address(v) + (lane % 8 + lane / 8 % 2 * 8) * pitch + lane / 16 * CHUNK;

#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t w[4] = {pack<true>(s[2 * k][0], s[2 * k][1]), pack<true>(s[2 * k][2], s[2 * k][3]),
                         pack<true>(s[2 * k + 1][0], s[2 * k + 1][1]), pack<true>(s[2 * k + 1][2], s[2 * k + 1][3])};

#pragma unroll
        for (int c = 0; c < DV / 16; c += 2) {
            uint32_t x[4];

            if (c * 16 >= (int)d)
                continue;
            load_matrices_transposed(x, v_at + k * 16 * pitch + c * CHUNK); /* the last may reach into the padding */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint2 first = widen(__byte_perm(x[2 * i], 0, 0x3120)),
                      second = widen(__byte_perm(x[2 * i + 1], 0, 0x3120));

                multiply_add<true>(state.acc[2 * (c + i)], w, first.x, second.x);
                multiply_add<true>(state.acc[2 * (c + i) + 1], w, first.y, second.y);
            }
        }
    }
}

/* ---- results ---- */

__device__ __forceinline__ void put_lse(const attend_params &a, const job &j, uint32_t r, float lse)
{
    uint64_t token = j.token + (j.first + r) / a.group, head = j.head + (j.first + r) % a.group;

    if (a.parts > 1)
        a.part_lse[(token * a.h_q + head) * a.parts + j.part] = lse;
    else
        *reinterpret_cast<float *>(operand_row(a.lse, token, head)) = lse;
}

/* Dimensions d and d + 1 of row r, already divided by its sum. */
template <bool FP16>
__device__ __forceinline__ void put_values(const attend_params &a, const job &j, uint32_t r, uint32_t d, float v0,
                                           float v1)
{
    uint64_t token = j.token + (j.first + r) / a.group, head = j.head + (j.first + r) % a.group;

    if (a.parts > 1)
        *reinterpret_cast<float2 *>(a.part_out + ((token * a.h_q + head) * a.parts + j.part) * a.d_v + d) =
            make_float2(v0, v1);
    else
        store_pair(operand_row(a.out, token, head) + d * 2, pack<FP16>(v0 * a.out_scale, v1 * a.out_scale),
                   a.out_aligned);
}

/* A part without tokens: its LSE says so, and merging does not look at its values. */
template <bool FP16> __device__ __forceinline__ void put_nothing(const attend_params &a, const job &j)
{
    for (uint32_t r = threadIdx.x; r < j.n_rows; r += THREADS)
        put_lse(a, j, r, -INFINITY);
    if (a.parts > 1)
        return;
    for (uint32_t i = threadIdx.x; i < j.n_rows * a.d_v / 2; i += THREADS)
        put_values<FP16>(a, j, i / (a.d_v / 2), i % (a.d_v / 2) * 2, 0, 0);
}

__device__ __forceinline__ float lse_of(float max, float sum)
{
    return sum == 0 ? -INFINITY : (max + log2f(sum)) * 0.693147181f;
}

/* Each warp has rows of its own. */
template <int DV, bool FP16>
__device__ __forceinline__ void put_rows(const attend_params &a, const job &j, const state_of<DV> &state)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t r = warp * 16 + h * 8 + lane / 4;
        float factor = state.sum[h] == 0 ? 0 : 1 / state.sum[h];

        if (r >= j.n_rows)
            continue;
        if (lane % 4 == 0)
            put_lse(a, j, r, lse_of(state.max[h], state.sum[h]));
#pragma unroll
        for (int n = 0; n < DV / 8; n++)
            if (n * 8 < (int)a.d_v)
                put_values<FP16>(a, j, r, n * 8 + lane % 4 * 2, state.sum[h] == 0 ? 0 : state.acc[n][2 * h] * factor,
                                 state.sum[h] == 0 ? 0 : state.acc[n][2 * h + 1] * factor);
    }
}

/* All warps have the same 16 rows: their sums, through shared memory, in the order of the warps. */
template <int DV, bool FP16, bool PAIRED>
__device__ __forceinline__ void join_rows(const attend_params &a, const job &j, const state_of<DV> &state,
                                          float *shared)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *sums = shared, *maxs = sums + WARPS * 16, *values = maxs + WARPS * 16; /* [WARPS][16], .. [d_v] */

    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t r = warp * 16 + h * 8 + lane / 4;

        if (lane % 4 == 0) {
            sums[r] = state.sum[h];
            maxs[r] = state.max[h];
        }
#pragma unroll
        for (int n = 0; n < DV / 8; n += 2) {
            if (n * 8 >= (int)a.d_v)
                continue;
            if (PAIRED)
                *reinterpret_cast<float4 *>(values + r * a.d_v + n * 8 + lane % 4 * 4) = make_float4(
                    state.acc[n][2 * h], state.acc[n + 1][2 * h], state.acc[n][2 * h + 1], state.acc[n + 1][2 * h + 1]);
            else
#pragma unroll
                for (int i = n; i < n + 2; i++)
                    *reinterpret_cast<float2 *>(values + r * a.d_v + i * 8 + lane % 4 * 2) =
                        make_float2(state.acc[i][2 * h], state.acc[i][2 * h + 1]);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < j.n_rows * (a.d_v / 2); i += THREADS) {
        uint32_t r = i / (a.d_v / 2), d = i % (a.d_v / 2) * 2;
        float top = -INFINITY, sum = 0, v0 = 0, v1 = 0, zero, factor;

#pragma unroll
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, maxs[w * 16 + r]);
        zero = top == -INFINITY ? 0 : top;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float scale = exp2_fast(maxs[w * 16 + r] - zero);
            float2 x = *reinterpret_cast<const float2 *>(values + (w * 16 + r) * a.d_v + d);

            sum += sums[w * 16 + r] * scale;
            v0 += x.x * scale;
            v1 += x.y * scale;
        }
        factor = sum == 0 ? 0 : 1 / sum;
        put_values<FP16>(a, j, r, d, sum == 0 ? 0 : v0 * factor, sum == 0 ? 0 : v1 * factor);
        if (d == 0)
            put_lse(a, j, r, lse_of(top, sum));
    }
}

/* ---- kernels ---- */

/* All that read a tile of one another: the whole block, or a warp for itself. */
template <bool ALONE> __device__ __forceinline__ void meet()
{
    if (ALONE)
        __syncwarp();
    else
        __syncthreads();
}

__device__ __forceinline__ void wait_but(uint32_t groups)
{
    if (groups == 0)
        copy_wait<0>();
    else if (groups == 1)
        copy_wait<1>();
    else
        copy_wait<2>();
}

/* Blocks of a processor that registers leave room for. */
constexpr int resident(int rows, int dims, bool fp8)
{
    return dims == 256 ? 2 : dims == 128 && !(fp8 && rows == 16) ? 3 : 4;
}

/* ROWS: 16 or 64.  DV: d_v rounded up to 64, 128 or 256. */
template <typename problem, int ROWS, int DV, bool FP16, bool FP8>
__global__ void __launch_bounds__(THREADS, resident(ROWS, DV, FP8)) attend_kernel(const __grid_constant__ problem p)
{
    extern __shared__ __align__(128) uint8_t shared[];
    constexpr bool ALONE = ROWS == 16;
    constexpr bool PAIRED = FP8 && ALONE;
    constexpr int NT = ALONE ? LOAD / 8 : TILE / 8;
    const attend_params &a = p.attend;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, tokens_at = ALONE ? warp * LOAD : 0;
    const uint32_t row = (ALONE ? 0 : warp * 16) + lane / 4;
    const shared_layout<FP8> at(ROWS, a.d_qk, a.d_v);
    const job j = p.template find_job<ROWS>();
    uint32_t *masks = reinterpret_cast<uint32_t *>(shared + at.masks_at);
    float *units = reinterpret_cast<float *>(shared + at.units_at), unit[2] = {1, 1};
    int32_t from[2], to[2], n_tiles;
    state_of<DV> state;
    typename problem::plan l;

    if (j.begin >= j.end) {
        put_nothing<FP16>(a, j);
        return;
    }
    l = p.first(j, j.begin + (int32_t)(warp * LOAD + lane % LOAD));
    n_tiles = (j.end - j.begin + TILE - 1) / TILE;
    for (int32_t i = 0; i < (int32_t)a.stages - 1; i++) {
        if (i < n_tiles)
            load_tile<problem, DV, FP8>(p, a, j, l, at, shared + at.stages_at + i * at.stage_bytes, masks + i * WARPS);
        copy_commit(); /* also an empty group: the waits count groups */
        p.next(j, l);
    }
    if (FP8)
        load_queries_halved<ROWS, FP16, PAIRED>(a, j, shared + at.q_at, at.k_pitch, units);
    else
        load_queries<ROWS>(a, j, shared + at.q_at, at.k_pitch);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t r = row + h * 8;

        to[h] = min(seen_to(a, j, j.first + r), j.end); /* rows that there are not are not stored */
        from[h] = j.window > 0 ? seen_to(a, j, j.first + r) - j.window : INT32_MIN;
        state.max[h] = -INFINITY;
        state.sum[h] = 0;
    }
#pragma unroll
    for (int n = 0; n < DV / 8; n++)
        state.acc[n][0] = state.acc[n][1] = state.acc[n][2] = state.acc[n][3] = 0;
    __syncthreads(); /* the queries are there */
    if (FP8) {
        unit[0] = units[row];
        unit[1] = units[row + 8];
    }
    for (int32_t i = 0, now = 0, next = (int32_t)a.stages - 1; i < n_tiles; i++) {
        uint8_t *stage = shared + at.stages_at + now * at.stage_bytes;
        uint8_t *tile = FP8 && !PAIRED ? shared + at.tile_at : stage;
        const uint32_t *has = masks + now * WARPS;
        int32_t t0 = j.begin + i * TILE + (int32_t)tokens_at;
        float s[NT][4];
        uint64_t mask;

        meet<ALONE>(); /* tile i - 1 is done with */
        if (i + (int32_t)a.stages - 1 < n_tiles)
            load_tile<problem, DV, FP8>(p, a, j, l, at, shared + at.stages_at + next * at.stage_bytes,
                                        masks + next * WARPS);
        copy_commit();
        p.next(j, l);
        wait_but(a.stages - 1);
        if (FP8 && !PAIRED)
            widen_tile<FP8>(a, at, stage, tile);
        meet<ALONE>(); /* tile i has come */
        mask =
            ALONE ? (uint64_t)has[warp] : (uint64_t)(has[0] | has[1] << 16) | (uint64_t)(has[2] | has[3] << 16) << 32;
        if (PAIRED)
            score_pairs<NT>(s, shared + at.q_at, tile + tokens_at * at.raw_k, at.k_pitch, at.raw_k, a.d_qk);
        else
            score<NT, FP16 || FP8>(s, shared + at.q_at + (ALONE ? 0 : warp * 16 * at.k_pitch),
                                   tile + tokens_at * at.k_pitch, at.k_pitch, a.d_qk);
        weigh<NT, DV>(a, s, state, t0, mask, from, to, unit);
        if (PAIRED)
            add_value_pairs<NT, DV>(s, state, tile + TILE * at.raw_k + tokens_at * at.raw_v, at.raw_v, a.d_v);
        else
            add_values<NT, DV, FP16 || FP8>(s, state, tile + TILE * at.k_pitch + tokens_at * at.v_pitch, at.v_pitch,
                                            a.d_v);
        now = now + 1 == (int32_t)a.stages ? 0 : now + 1;
        next = next + 1 == (int32_t)a.stages ? 0 : next + 1;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        state.sum[h] += __shfl_xor_sync(0xFFFFFFFFu, state.sum[h], 1);
        state.sum[h] += __shfl_xor_sync(0xFFFFFFFFu, state.sum[h], 2);
    }
    copy_wait<0>();
    if (ALONE)
        join_rows<DV, FP16, PAIRED>(a, j, state, reinterpret_cast<float *>(shared + at.tile_at));
    else
        put_rows<DV, FP16>(a, j, state);
}

/* One block a row: the weight of each part from its LSE, then the parts in increasing order.  A part without tokens is not
 * read: nothing was written there. */
template <bool FP16>
__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const __grid_constant__ attend_params a)
{
    __shared__ float weights[MAX_PARTS];
    uint64_t token = blockIdx.x / a.h_q, head = blockIdx.x % a.h_q, at = (uint64_t)blockIdx.x * a.parts;
    float top = -INFINITY, sum = 0;

    for (uint32_t i = threadIdx.x; i < a.parts; i += MERGE_THREADS)
        weights[i] = a.part_lse[at + i];
    __syncthreads();
    for (uint32_t i = 0; i < a.parts; i++)
        top = fmaxf(top, weights[i]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < a.parts; i += MERGE_THREADS)
        weights[i] = weights[i] == -INFINITY ? 0 : expf(weights[i] - top);
    __syncthreads();
    for (uint32_t i = 0; i < a.parts; i++)
        sum += weights[i];
    for (uint32_t d = threadIdx.x * 2; d < a.d_v; d += 2 * MERGE_THREADS) {
        float v0 = 0, v1 = 0;

#pragma unroll 8
        for (uint32_t i = 0; i < a.parts; i++) {
            float2 x = make_float2(0, 0);

            if (weights[i] != 0)
                x = *reinterpret_cast<const float2 *>(a.part_out + (at + i) * a.d_v + d);
            v0 += weights[i] * x.x;
            v1 += weights[i] * x.y;
        }
        if (sum != 0) {
            v0 /= sum;
            v1 /= sum;
        }
        store_pair(operand_row(a.out, token, head) + d * 2, pack<FP16>(v0 * a.out_scale, v1 * a.out_scale),
                   a.out_aligned);
    }
    if (threadIdx.x == 0)
        *reinterpret_cast<float *>(operand_row(a.lse, token, head)) = sum == 0 ? -INFINITY : top + logf(sum);
}

} // namespace kvs_attend
#endif
