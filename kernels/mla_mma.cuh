#ifndef KVS_KERNELS_MLA_MMA_CUH
#define KVS_KERNELS_MLA_MMA_CUH

/* Pieces of MLA attention by tensor cores that every kernel of the family is put together from: a group of query rows
 * in registers against a tile of 32 tokens that lies in shared memory as 16-bit values, wherever it came from.
 *
 *   tile [32][dims] 16-bit, 16-byte chunks swizzled by the row so that ldmatrix has no conflicts
 *     |  scores: 4 warp pairs take dims / 4 dimensions each, a warp of a pair 16 tokens; Q stays in registers
 *   S [4][rows][32] fp32, added in one order
 *     |  softmax: 16 or 8 threads a row, base 2
 *   P [rows][32] in the queries' type
 *     |  values: a warp takes all rows and 64 dimensions; fp32 accumulators stay in registers
 *   out, or a partial result a part that mla_join.cu joins in increasing order
 *
 * Knows tiles, rows and parts.  Does not know where tokens lie: the kernels load them.  mma.sync and cp.async: sm_80 and
 * newer.  Thread blocks of 256. */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/mla_launch.cuh"
#include "kernels/mma.cuh"

namespace
{

using namespace kvs_mma;

enum {
    THREADS = 256,
    TILE = 32, /* tokens of a tile */
    VALUE = 2, /* bytes */
    LATENT = KVS_MLA_LATENT,
    LOADERS = THREADS / TILE,                  /* threads a row of a tile */
    SLICES = 4,                                /* of the dimensions, for the scores */
    VALUE_TILES = LATENT / 8 / (THREADS / 32), /* n8 tiles of a warp */
    S_PITCH = 40,                              /* floats: 8 rows apart are different banks */
    P_PITCH = 40,                              /* values: likewise for ldmatrix */
};

/* MT m16 tiles of query rows of DIMS values, of which the last ROPE come from q_pe. */
template <int MT, int DIMS_> struct row_shape {
    enum {
        ROWS = 16 * MT,
        ROW_TILES = MT,
        DIMS = DIMS_,
        ROW_BYTES = DIMS * VALUE,
        CHUNKS = ROW_BYTES / CHUNK,
        NOPE_CHUNKS = (DIMS - KVS_MLA_ROPE) * VALUE / CHUNK,
        STEPS = DIMS / 16 / SLICES,
        TILE_BYTES = TILE * ROW_BYTES,
        THREADS_A_ROW = THREADS / ROWS,
        TOKENS_A_THREAD = TILE / THREADS_A_ROW,
        S_FLOATS = SLICES * ROWS * S_PITCH,
        P_BYTES = ROWS * P_PITCH * VALUE,
    };
};

/* What a block works on. */
struct job {
    uint32_t seq, part, first, n_rows; /* rows first .. first + n_rows of the unit's s_q * h_q */
    uint32_t token, s_q;               /* query tokens token .. token + s_q are the unit's */
    uint32_t len, begin, end;          /* tokens begin .. end */
    bool counts;                       /* this block sees every token: it counts the bad ones */
};

/* Query rows into shared memory as a tile, then each warp's slice of dimensions into its registers. */
template <typename shape>
__device__ __forceinline__ void load_queries(const attend_params &p, const job &j, uint8_t *tile,
                                             uint32_t q[shape::ROW_TILES][shape::STEPS][4])
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp / 2;

    for (uint32_t i = threadIdx.x; i < shape::ROWS * shape::CHUNKS; i += THREADS) {
        uint32_t r = i / shape::CHUNKS, c = i % shape::CHUNKS, row = j.first + r;
        uint4 v = make_uint4(0, 0, 0, 0);

        if (r < j.n_rows) {
            uint64_t token = (uint64_t)j.token + row / p.h_q, head = row % p.h_q;

            v = c < shape::NOPE_CHUNKS
                    ? load_values(operand_row(p.q_nope, token, head) + c * CHUNK, p.q_aligned)
                    : load_values(operand_row(p.q_pe, token, head) + (c - shape::NOPE_CHUNKS) * CHUNK, p.q_aligned);
        }
        *reinterpret_cast<uint4 *>(tile + r * shape::ROW_BYTES + (c ^ (r & 7)) * CHUNK) = v;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < shape::ROW_TILES; m++)
#pragma unroll
        for (int s = 0; s < shape::STEPS; s++) {
            uint32_t r = m * 16 + lane % 16;
            uint32_t c = 8 * s + 2 * slice + lane / 16;

            load_matrices(q[m][s], shared_address(tile + r * shape::ROW_BYTES + (c ^ (r & 7)) * CHUNK));
        }
    __syncthreads();
}

/* Sums of this warp's rows, half the tile and its dimensions. */
template <typename shape>
__device__ __forceinline__ void put_scores(const float acc[shape::ROW_TILES][2][4], float *scores, uint32_t tid)
{
    uint32_t lane = tid % 32, warp = tid / 32, half = warp % 2, slice = warp / 2;

#pragma unroll
    for (int m = 0; m < shape::ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint32_t r = slice * shape::ROWS + m * 16 + lane / 4;
            float *at = scores + r * S_PITCH + half * 16 + n * 8 + lane % 4 * 2;

            *reinterpret_cast<float2 *>(at) = make_float2(acc[m][n][0], acc[m][n][1]);
            *reinterpret_cast<float2 *>(at + 8 * S_PITCH) = make_float2(acc[m][n][2], acc[m][n][3]);
        }
}

/* Scores of this warp's rows and half the tile, over its dimensions. */
template <typename shape, bool FP16>
__device__ __forceinline__ void score_tile(const uint8_t *stage, const uint32_t q[shape::ROW_TILES][shape::STEPS][4],
                                           float *scores, uint32_t tid)
{
    uint32_t lane = tid % 32, warp = tid / 32, half = warp % 2;
    uint32_t slice = warp / 2;
    uint32_t token = half * 16 + lane % 8 + lane / 16 * 8, high = lane / 8 % 2, x = lane % 8;
    uint32_t row = shared_address(stage + token * shape::ROW_BYTES) + ((2 * slice + high) ^ x) * CHUNK;
    float acc[shape::ROW_TILES][2][4] = {};

#pragma unroll
    for (int s = 0; s < shape::STEPS; s++) {
        uint32_t k[4];

        load_matrices(k, row + s * 8 * CHUNK);
#pragma unroll
        for (int m = 0; m < shape::ROW_TILES; m++) {
            multiply_add<FP16>(acc[m][0], q[m][s], k[0], k[1]);
            multiply_add<FP16>(acc[m][1], q[m][s], k[2], k[3]);
        }
    }
    put_scores<shape>(acc, scores, tid);
}

/* The running state of a row, in base 2, held by each of the threads that share the row. */
struct row_state {
    float max, sum;
};

/* Neighbours that are read at once. */
template <typename T, int N> struct alignas(sizeof(T) * N) token_run {
    T at[N];
};

/* Scores to weights 2^(score - max) of this thread's tokens, with the running maximum and sum. */
template <typename shape>
__device__ __forceinline__ void soften_tile(const float *scores, const uint8_t *valid, uint32_t visible,
                                            float scale_log2, row_state &state, float s[shape::TOKENS_A_THREAD],
                                            float *rescale, uint32_t tid)
{
    uint32_t row = tid / shape::THREADS_A_ROW, lane = tid % shape::THREADS_A_ROW;
    uint32_t first = lane * shape::TOKENS_A_THREAD;
    float top = -INFINITY, sum = 0, scale, zero;
    token_run<float, shape::TOKENS_A_THREAD> part[SLICES];
    token_run<uint8_t, shape::TOKENS_A_THREAD> may;

#pragma unroll
    for (int i = 0; i < SLICES; i++)
        part[i] = *reinterpret_cast<const token_run<float, shape::TOKENS_A_THREAD> *>(
            scores + (i * shape::ROWS + row) * S_PITCH + first);
    may = *reinterpret_cast<const token_run<uint8_t, shape::TOKENS_A_THREAD> *>(valid + first);
#pragma unroll
    for (int i = 0; i < shape::TOKENS_A_THREAD; i++) {
        float v = ((part[0].at[i] + part[1].at[i]) + (part[2].at[i] + part[3].at[i])) * scale_log2;

        s[i] = first + i < visible && may.at[i] ? v : -INFINITY;
        top = fmaxf(top, s[i]);
    }
#pragma unroll
    for (int i = shape::THREADS_A_ROW / 2; i > 0; i /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, i));
    top = fmaxf(state.max, top);
    zero = top == -INFINITY ? 0.0f : top; /* nothing seen so far: all weights are 2^-inf */
    scale = exp2_fast(state.max - zero);
#pragma unroll
    for (int i = 0; i < shape::TOKENS_A_THREAD; i++) {
        s[i] = exp2_fast(s[i] - zero);
        sum += s[i];
    }
#pragma unroll
    for (int i = shape::THREADS_A_ROW / 2; i > 0; i /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, i);
    state.max = top;
    state.sum = state.sum * scale + sum;
    if (lane == 0)
        rescale[row] = scale;
}

template <typename shape, bool FP16>
__device__ __forceinline__ void put_weights(const float s[shape::TOKENS_A_THREAD], uint8_t *weights, uint32_t tid)
{
    uint32_t row = tid / shape::THREADS_A_ROW, first = tid % shape::THREADS_A_ROW * shape::TOKENS_A_THREAD;

#pragma unroll
    for (int i = 0; i < shape::TOKENS_A_THREAD; i += 2)
        *reinterpret_cast<uint32_t *>(weights + (row * P_PITCH + first + i) * VALUE) = pack<FP16>(s[i], s[i + 1]);
}

template <typename shape, bool FP16>
__device__ __forceinline__ void weigh_tile(const float *scores, const uint8_t *valid, uint32_t visible,
                                           float scale_log2, row_state &state, uint8_t *weights, float *rescale,
                                           uint32_t tid)
{
    float s[shape::TOKENS_A_THREAD];

    soften_tile<shape>(scores, valid, visible, scale_log2, state, s, rescale, tid);
    put_weights<shape, FP16>(s, weights, tid);
}

/* The sums of a warp: all rows, VALUE_TILES * 8 dimensions. */
template <typename shape> struct sums_of {
    float at[shape::ROW_TILES][VALUE_TILES][4];
};

/* acc = acc * rescale + weights . values */
template <typename shape, bool FP16>
__device__ __forceinline__ void add_values(const uint8_t *stage, const uint8_t *weights, const float *rescale,
                                           sums_of<shape> &acc, uint32_t tid)
{
    uint32_t lane = tid % 32, warp = tid / 32;
    uint32_t token = lane % 8 + lane / 8 % 2 * 8, high = lane / 16, x = lane % 8;
    uint32_t row = shared_address(stage + token * shape::ROW_BYTES);

#pragma unroll
    for (int m = 0; m < shape::ROW_TILES; m++) {
        float upper = rescale[m * 16 + lane / 4], lower = rescale[m * 16 + lane / 4 + 8];

        if (!__any_sync(0xFFFFFFFFu, upper != 1 || lower != 1))
            continue; /* no new maximum, as in most tiles: times one changes nothing */
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n++) {
            acc.at[m][n][0] *= upper;
            acc.at[m][n][1] *= upper;
            acc.at[m][n][2] *= lower;
            acc.at[m][n][3] *= lower;
        }
    }
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        uint32_t w[shape::ROW_TILES][4];

#pragma unroll
        for (int m = 0; m < shape::ROW_TILES; m++)
            load_matrices(w[m],
                          shared_address(weights + ((m * 16 + lane % 16) * P_PITCH + k * 16 + lane / 16 * 8) * VALUE));
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n += 2) {
            uint32_t v[4];

            load_matrices_transposed(v,
                                     row + k * 16 * shape::ROW_BYTES + ((warp * VALUE_TILES + n + high) ^ x) * CHUNK);
#pragma unroll
            for (int m = 0; m < shape::ROW_TILES; m++) {
                multiply_add<FP16>(acc.at[m][n], w[m], v[0], v[1]);
                multiply_add<FP16>(acc.at[m][n + 1], w[m], v[2], v[3]);
            }
        }
    }
}

__device__ __forceinline__ uint64_t partial_at(const attend_params &p, const job &j, uint32_t r)
{
    return ((uint64_t)j.token * p.h_q + j.first + r) * p.parts + j.part;
}

__device__ __forceinline__ void put_lse(const attend_params &p, const job &j, uint32_t r, float lse)
{
    uint32_t row = j.first + r;

    if (p.parts > 1)
        p.part_lse[partial_at(p, j, r)] = lse;
    else
        *reinterpret_cast<float *>(operand_row(p.lse, (uint64_t)j.token + row / p.h_q, row % p.h_q)) = lse;
}

/* Dimensions d and d + 1 of row r, already divided by its sum. */
template <bool FP16>
__device__ __forceinline__ void put_values(const attend_params &p, const job &j, uint32_t r, uint32_t d, float v0,
                                           float v1)
{
    uint32_t row = j.first + r;

    if (p.parts > 1)
        *reinterpret_cast<float2 *>(p.part_out + partial_at(p, j, r) * LATENT + d) = make_float2(v0, v1);
    else
        store_pair(operand_row(p.out, (uint64_t)j.token + row / p.h_q, row % p.h_q) + d * VALUE, pack<FP16>(v0, v1),
                   p.out_aligned);
}

/* A part without tokens: its LSE says so, and merging does not look at its values. */
template <bool FP16> __device__ __forceinline__ void put_nothing(const attend_params &p, const job &j)
{
    for (uint32_t r = threadIdx.x; r < j.n_rows; r += THREADS)
        put_lse(p, j, r, -INFINITY);
    if (p.parts > 1)
        return;
    for (uint32_t i = threadIdx.x; i < j.n_rows * LATENT / 2; i += THREADS)
        put_values<FP16>(p, j, i / (LATENT / 2), i % (LATENT / 2) * 2, 0, 0);
}

template <typename shape, bool FP16>
__device__ __forceinline__ void put_results(const attend_params &p, const job &j, const float *sums,
                                            const sums_of<shape> &acc)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

#pragma unroll
    for (int m = 0; m < shape::ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t r = m * 16 + h * 8 + lane / 4;
            bool nothing = sums[r] == 0;
            float factor = 1 / sums[r];

            if (r >= j.n_rows)
                continue;
#pragma unroll
            for (int n = 0; n < VALUE_TILES; n++)
                put_values<FP16>(p, j, r, (warp * VALUE_TILES + n) * 8 + lane % 4 * 2,
                                 nothing ? 0 : acc.at[m][n][2 * h] * factor,
                                 nothing ? 0 : acc.at[m][n][2 * h + 1] * factor);
        }
}

} // namespace

#endif
