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

#include "kernels/attend_tile.cuh"

namespace kvs_attend
{

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
