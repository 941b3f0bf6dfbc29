/* Scores, weights and sums of a warp's rows against a tile that lies in shared memory, for attend.cuh.
 *
 * Knows fragments.  Does not know where tokens come from, nor what becomes of the sums.  Device code; for .cu files of this
 * folder only. */
#ifndef KVS_KERNELS_ATTEND_TILE_CUH
#define KVS_KERNELS_ATTEND_TILE_CUH

#include "kernels/attend_load.cuh"

namespace kvs_attend
{

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

} // namespace kvs_attend
#endif
