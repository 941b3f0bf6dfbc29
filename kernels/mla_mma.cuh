/* MLA attention on a GPU, the portable path: mma.sync and cp.async, sm_80 and newer.  The kernels of mla_decode.cu (s_q
 * queries a sequence) and mla_extend.cu (as many as q_start says).
 *
 * A thread block takes 16 or 32 query rows (head fastest, then position) against one part of one sequence:
 *
 *   stages (2 or 3) of 32 tokens x 576 values, 16-byte chunks swizzled by the row so that ldmatrix has no conflicts
 *     |  scores: 4 warp pairs take 144 dimensions each, a warp of a pair 16 tokens; Q stays in registers
 *   S [4][rows][32] fp32, added in one order
 *     |  softmax: 16 or 8 threads a row, base 2
 *   P [rows][32] in the view's type
 *     |  values: a warp takes all rows and 64 dimensions; fp32 accumulators stay in registers
 *   out, or a partial result a part that merge_kernel joins in increasing order
 *
 * What a row adds up, and in which order, depends on its tokens, its length and parts: not on strides, pages,
 * neighbours or the other rows of its block.  A token that may not be read has zeros in its place and a weight of 0. */
#ifndef KVS_KERNELS_MLA_MMA_CUH
#define KVS_KERNELS_MLA_MMA_CUH

#include <cinttypes>
#include <cmath>

#include "kernels/mla.h"
#include "kernels/mma.cuh"

namespace kvs_mla
{

using namespace kvs_mma;

enum {
    THREADS = 256,
    TILE = 32, /* tokens of a stage */
    VALUE = 2, /* bytes */
    LATENT = KVS_MLA_LATENT,
    ROW = KVS_MLA_LATENT + KVS_MLA_ROPE,
    ROW_BYTES = ROW * VALUE,
    CHUNKS = ROW_BYTES / CHUNK,
    LOADERS = THREADS / TILE, /* threads a row of a stage */
    LATENT_CHUNKS = LATENT * VALUE / CHUNK,
    SLICES = 4, /* of the 576 dimensions, for the scores */
    STEPS = ROW / 16 / SLICES,
    STAGE_BYTES = TILE * ROW_BYTES,
    VALUE_TILES = LATENT / 8 / (THREADS / 32), /* n8 tiles of a warp */
    S_PITCH = 40,                              /* floats: 8 rows apart are different banks */
    P_PITCH = 40,                              /* values: likewise for ldmatrix */
    MERGE_THREADS = 128,
    TOKENS_A_FIXED_PART = 1024,
    TOKENS_A_PART = 128, /* less is not worth a block */
    MAX_AUTO_PARTS = 64,
};

/* LSE of a row that no sequence has: bytes of 0xFF, a NaN that arithmetic does not make. */
enum : uint32_t { NOBODY = 0xFFFFFFFFu };

struct decode_params {
    kvs_mla_decode_args a;      /* RAGGED: s_q counts for nothing */
    const int32_t *q_start;     /* RAGGED: [n_seqs + 1] queries of sequence i are q_start[i] .. q_start[i + 1] */
    float *part_out, *part_lse; /* [n_rows][parts][512], [..][parts]; used if parts > 1 */
    uint32_t *bad;
    kvs_site site;
    float scale_log2;
    uint32_t n_tokens;                /* queries of all sequences; n_rows is n_tokens * h_q */
    uint32_t row_blocks, parts;       /* row_blocks: of a sequence; RAGGED: of all */
    uint32_t step_pages, step_tokens; /* from a tile to the next: TILE over and modulo tokens_per_block */
    uint32_t q_aligned;               /* q_nope and q_pe: bases and strides are multiples of 16 */
    uint32_t out_aligned;             /* out: of 8 */
};

/* MT: m16 tiles of query rows.  One tile a block leaves room for a second block, which works while the first one waits.
 * Two tiles do not: that block has a stage more, and scores the next tile while it weighs this one. */
template <int MT> struct tile_shape {
    enum {
        BLOCKS_A_PROCESSOR = MT == 1 ? 2 : 1,
        ROWS = 16 * MT,
        ROW_TILES = MT,
        AHEAD = MT == 1 ? 0 : 1, /* tiles scored before this one is weighed */
        STAGES = 2 + AHEAD,
        THREADS_A_ROW = THREADS / ROWS,
        TOKENS_A_THREAD = TILE / THREADS_A_ROW,
        S_FLOATS = SLICES * ROWS * S_PITCH,
        S_AT = STAGES * STAGE_BYTES,
        P_AT = S_AT + (1 + AHEAD) * S_FLOATS * 4,
        SCALE_AT = P_AT + ROWS * P_PITCH * VALUE,
        SUM_AT = SCALE_AT + ROWS * 4,
        VALID_AT = SUM_AT + ROWS * 4,
        BYTES = VALID_AT + STAGES * TILE,
    };
};
typedef tile_shape<1> small_shape;
typedef tile_shape<2> wide_shape;

/* What a block works on. */
struct job {
    uint32_t seq, part, first, n_rows; /* rows first .. first + n_rows of the sequence's s_q * h_q */
    uint32_t token, s_q;               /* queries token .. token + s_q are the sequence's */
    uint32_t len, begin, end;          /* tokens begin .. end */
    bool counts;                       /* this block sees every token: it counts the bad ones */
};

__device__ __forceinline__ uint32_t seen_by(const decode_params &p, const job &j, uint32_t row)
{
    uint32_t hidden = j.s_q - 1 - row / p.a.h_q;

    return j.len > hidden ? j.len - hidden : 0;
}

/* Sequence and part of this thread block; returns which block of the sequence's rows it is. */
template <int ROWS> __device__ __forceinline__ uint32_t find_rows(const decode_params &p, job &j)
{
    uint32_t rest = blockIdx.x / p.row_blocks;

    j.part = rest % p.parts;
    j.seq = rest / p.parts;
    j.s_q = p.a.s_q;
    j.token = j.seq * p.a.s_q;
    return blockIdx.x % p.row_blocks;
}

/* Row blocks of sequence i begin at (rows before it) / ROWS + i: room for all, found by halving, and a launch depends on
 * totals alone.  A sequence whose queries are not a range of the tokens gets none; q_start may hold anything. */
template <int ROWS> __device__ __forceinline__ uint32_t find_ragged_rows(const decode_params &p, job &j)
{
    uint32_t block = blockIdx.x % p.row_blocks;
    uint32_t low = 0, high = p.a.n_seqs; /* sequence `low` begins at or before `block`, `high` behind it */
    int32_t begin, end;

    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        uint32_t before = min((uint32_t)max(p.q_start[middle], 0), p.n_tokens);

        if ((uint64_t)before * p.a.h_q / ROWS + middle <= block)
            low = middle;
        else
            high = middle;
    }
    begin = p.q_start[low];
    end = p.q_start[low + 1];
    if (begin < 0 || end < begin || (uint32_t)end > p.n_tokens)
        end = begin = 0;
    j.part = blockIdx.x / p.row_blocks;
    j.seq = low;
    j.s_q = (uint32_t)(end - begin);
    j.token = (uint32_t)begin;
    return block - (uint32_t)((uint64_t)j.token * p.a.h_q / ROWS) - low;
}

/* Ranges of queries that no block will find. */
__device__ __forceinline__ void count_bad_ranges(const decode_params &p)
{
    for (uint32_t i = threadIdx.x; i < p.a.n_seqs; i += THREADS)
        if (p.q_start[i] < 0 || p.q_start[i + 1] < p.q_start[i] || (uint32_t)p.q_start[i + 1] > p.n_tokens)
            atomicAdd(p.bad, 1u);
}

template <int ROWS, bool RAGGED> __device__ __forceinline__ job find_job(const decode_params &p)
{
    uint32_t range, seen, rows, row_block;
    int32_t told;
    bool good;
    job j;

    row_block = RAGGED ? find_ragged_rows<ROWS>(p, j) : find_rows<ROWS>(p, j);
    if (RAGGED && blockIdx.x == 0 && p.bad != nullptr)
        count_bad_ranges(p);
    rows = j.s_q * p.a.h_q;
    j.begin = j.end = j.n_rows = 0;
    if (RAGGED && row_block >= (rows + ROWS - 1) / ROWS)
        return j; /* a block too many, or a sequence without queries */
    j.first = row_block * ROWS;
    j.n_rows = min((uint32_t)ROWS, rows - j.first);
    j.counts = j.first + j.n_rows == rows && p.bad != nullptr;
    told = p.a.seq_len[j.seq];
    good = told >= 0 && (uint64_t)told <= (uint64_t)p.a.table_width * p.a.view.tokens_per_block;
    if (!good && j.counts && j.part == 0 && threadIdx.x == 0)
        atomicAdd(p.bad, 1u);
    j.len = good ? (uint32_t)told : 0;
    range = j.len / p.parts + (j.len % p.parts != 0);
    seen = seen_by(p, j, j.first + j.n_rows - 1);
    j.begin = j.part * range;
    j.end = min(j.begin + range, seen);
    return j;
}

/* What a loading thread does for a tile: a row of it.  The table is read a tile ahead, so that nobody waits for it, and
 * the place in the table moves on by additions: a division a tile would cost a tenth of the time. */
struct load_plan {
    uint32_t t, page, offset; /* token of the sequence; page of the table, token of the page */
    int32_t block;            /* as the table has it */
};

__device__ __forceinline__ void read_table(const decode_params &p, const job &j, load_plan &l)
{
    if (l.t < j.end)
        l.block = p.a.block_table[j.seq * p.a.table_stride + l.page];
}

__device__ __forceinline__ load_plan first_load(const decode_params &p, const job &j, uint32_t tid)
{
    uint32_t t = j.begin + tid / LOADERS;
    kvs_view_place at = kvs_view_split(&p.a.view, t, p.site);
    load_plan l = {t, (uint32_t)at.page, at.token, -1};

    read_table(p, j, l);
    return l;
}

__device__ __forceinline__ void next_load(const decode_params &p, const job &j, load_plan &l)
{
    l.t += TILE;
    l.page += p.step_pages;
    l.offset += p.step_tokens;
    if (l.offset >= kvs_view_tokens(&p.a.view, p.site)) {
        l.offset -= kvs_view_tokens(&p.a.view, p.site);
        l.page++;
    }
    read_table(p, j, l);
}

/* The planned tile into `stage`: LOADERS threads a row. */
__device__ __forceinline__ void load_tile(const decode_params &p, const job &j, const load_plan &l, uint32_t tid,
                                          uint8_t *stage, uint8_t *valid)
{
    static_assert(LOADERS % 8 == 0 && CHUNKS % LOADERS == 0, "a step of LOADERS chunks leaves the swizzle alone");
    uint32_t r = tid / LOADERS, c = tid % LOADERS;
    uint32_t dst = shared_address(stage + r * ROW_BYTES + (c ^ (r & 7)) * CHUNK);
    bool wanted = l.t < j.end, ok = wanted && l.block >= 0 && (uint32_t)l.block < p.a.view.n_blocks;
    const uint8_t *src =
        (ok ? kvs_view_row(&p.a.view, (uint32_t)l.block, l.offset, p.site) : p.a.view.base) + c * CHUNK;

    if (wanted && !ok && j.counts && l.offset == 0 && c == 0)
        atomicAdd(p.bad, 1u);
    if (c == 0)
        valid[r] = ok;
#pragma unroll
    for (int k = 0; k < CHUNKS; k += LOADERS)
        copy_async(dst + k * CHUNK, src + k * CHUNK, ok);
}

/* Query rows into shared memory as a tile, then each warp's slice of dimensions into its registers. */
template <typename shape>
__device__ __forceinline__ void load_queries(const decode_params &p, const job &j, uint8_t *tile,
                                             uint32_t q[shape::ROW_TILES][STEPS][4])
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, slice = warp / 2;

    for (uint32_t i = threadIdx.x; i < shape::ROWS * CHUNKS; i += THREADS) {
        uint32_t r = i / CHUNKS, c = i % CHUNKS, row = j.first + r;
        uint4 v = make_uint4(0, 0, 0, 0);

        if (r < j.n_rows) {
            uint64_t token = j.token + row / p.a.h_q, head = row % p.a.h_q;

            v = c < LATENT_CHUNKS
                    ? load_values(operand_row(p.a.q_nope, token, head) + c * CHUNK, p.q_aligned)
                    : load_values(operand_row(p.a.q_pe, token, head) + (c - LATENT_CHUNKS) * CHUNK, p.q_aligned);
        }
        *reinterpret_cast<uint4 *>(tile + r * ROW_BYTES + (c ^ (r & 7)) * CHUNK) = v;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < shape::ROW_TILES; m++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t r = m * 16 + lane % 16;
            uint32_t c = 8 * s + 2 * slice + lane / 16;

            load_matrices(q[m][s], shared_address(tile + r * ROW_BYTES + (c ^ (r & 7)) * CHUNK));
        }
    __syncthreads();
}

/* Scores of this warp's rows and half the tile, over its dimensions. */
template <typename shape, bool FP16>
__device__ __forceinline__ void score_tile(const uint8_t *stage, const uint32_t q[shape::ROW_TILES][STEPS][4],
                                           float *scores, uint32_t tid)
{
    uint32_t lane = tid % 32, warp = tid / 32, half = warp % 2;
    uint32_t slice = warp / 2;
    uint32_t token = half * 16 + lane % 8 + lane / 16 * 8, high = lane / 8 % 2, x = lane % 8;
    uint32_t row = shared_address(stage + token * ROW_BYTES) + ((2 * slice + high) ^ x) * CHUNK;
    float acc[shape::ROW_TILES][2][4] = {};

#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        uint32_t k[4];

        load_matrices(k, row + s * 8 * CHUNK);
#pragma unroll
        for (int m = 0; m < shape::ROW_TILES; m++) {
            multiply_add<FP16>(acc[m][0], q[m][s], k[0], k[1]);
            multiply_add<FP16>(acc[m][1], q[m][s], k[2], k[3]);
        }
    }
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

/* The running state of a row, in base 2, held by each of the threads that share the row. */
struct row_state {
    float max, sum;
};

/* Neighbours that are read at once. */
template <typename T, int N> struct alignas(sizeof(T) * N) token_run {
    T at[N];
};

template <typename shape, bool FP16>
__device__ __forceinline__ void weigh_tile(const float *scores, const uint8_t *valid, uint32_t visible,
                                           float scale_log2, row_state &state, uint8_t *weights, float *rescale,
                                           uint32_t tid)
{
    uint32_t row = tid / shape::THREADS_A_ROW, lane = tid % shape::THREADS_A_ROW;
    uint32_t first = lane * shape::TOKENS_A_THREAD;
    float s[shape::TOKENS_A_THREAD], top = -INFINITY, sum = 0, scale, zero;
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
#pragma unroll
    for (int i = 0; i < shape::TOKENS_A_THREAD; i += 2)
        *reinterpret_cast<uint32_t *>(weights + (row * P_PITCH + first + i) * VALUE) = pack<FP16>(s[i], s[i + 1]);
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
    uint32_t row = shared_address(stage + token * ROW_BYTES);

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

            load_matrices_transposed(v, row + k * 16 * ROW_BYTES + ((warp * VALUE_TILES + n + high) ^ x) * CHUNK);
#pragma unroll
            for (int m = 0; m < shape::ROW_TILES; m++) {
                multiply_add<FP16>(acc.at[m][n], w[m], v[0], v[1]);
                multiply_add<FP16>(acc.at[m][n + 1], w[m], v[2], v[3]);
            }
        }
    }
}

__device__ __forceinline__ uint64_t partial_at(const decode_params &p, const job &j, uint32_t r)
{
    return ((uint64_t)j.token * p.a.h_q + j.first + r) * p.parts + j.part;
}

__device__ __forceinline__ void put_lse(const decode_params &p, const job &j, uint32_t r, float lse)
{
    uint32_t row = j.first + r;

    if (p.parts > 1)
        p.part_lse[partial_at(p, j, r)] = lse;
    else
        *reinterpret_cast<float *>(operand_row(p.a.lse, j.token + row / p.a.h_q, row % p.a.h_q)) = lse;
}

/* Dimensions d and d + 1 of row r, already divided by its sum. */
template <bool FP16>
__device__ __forceinline__ void put_values(const decode_params &p, const job &j, uint32_t r, uint32_t d, float v0,
                                           float v1)
{
    uint32_t row = j.first + r;

    if (p.parts > 1)
        *reinterpret_cast<float2 *>(p.part_out + partial_at(p, j, r) * LATENT + d) = make_float2(v0, v1);
    else
        store_pair(operand_row(p.a.out, j.token + row / p.a.h_q, row % p.a.h_q) + d * VALUE, pack<FP16>(v0, v1),
                   p.out_aligned);
}

/* A part without tokens: its LSE says so, and merging does not look at its values. */
template <bool FP16> __device__ __forceinline__ void put_nothing(const decode_params &p, const job &j)
{
    for (uint32_t r = threadIdx.x; r < j.n_rows; r += THREADS)
        put_lse(p, j, r, -INFINITY);
    if (p.parts > 1)
        return;
    for (uint32_t i = threadIdx.x; i < j.n_rows * LATENT / 2; i += THREADS)
        put_values<FP16>(p, j, i / (LATENT / 2), i % (LATENT / 2) * 2, 0, 0);
}

template <typename shape, bool FP16>
__device__ __forceinline__ void put_results(const decode_params &p, const job &j, const float *sums,
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

/* Where everything lies in a block's shared memory. */
template <typename shape> struct shared_parts {
    uint8_t *stages, *weights, *valid;
    float *scores, *rescale, *sums;

    __device__ __forceinline__ explicit shared_parts(uint8_t *base)
        : stages(base), weights(base + shape::P_AT), valid(base + shape::VALID_AT),
          scores(reinterpret_cast<float *>(base + shape::S_AT)),
          rescale(reinterpret_cast<float *>(base + shape::SCALE_AT)),
          sums(reinterpret_cast<float *>(base + shape::SUM_AT))
    {
    }
    __device__ __forceinline__ uint8_t *stage(uint32_t i) const
    {
        return stages + i * STAGE_BYTES;
    }
    __device__ __forceinline__ uint8_t *valid_of(uint32_t i) const
    {
        return valid + i * TILE;
    }
    __device__ __forceinline__ float *scores_of(uint32_t tile) const
    {
        return scores + tile % (1 + shape::AHEAD) * shape::S_FLOATS;
    }
};

/* Load tile `i` as planned into stage `s`, then plan the one behind it. */
template <typename shape>
__device__ __forceinline__ void load_next(const decode_params &p, const job &j, uint32_t i, uint32_t s, load_plan &plan,
                                          uint32_t tid, const shared_parts<shape> &at)
{
    if (j.begin + i * TILE < j.end)
        load_tile(p, j, plan, tid, at.stage(s), at.valid_of(s));
    copy_commit(); /* also an empty group: the waits count groups */
    next_load(p, j, plan);
}

template <typename shape, bool FP16, bool RAGGED>
__global__ void __launch_bounds__(THREADS, shape::BLOCKS_A_PROCESSOR)
    decode_kernel(const __grid_constant__ decode_params p)
{
    extern __shared__ __align__(128) uint8_t shared[];
    const shared_parts<shape> at(shared);
    const job j = find_job<shape::ROWS, RAGGED>(p);
    const uint32_t tid = thread_index(), row = tid / shape::THREADS_A_ROW;
    uint32_t q[shape::ROW_TILES][STEPS][4], n_tiles, seen;
    sums_of<shape> acc = {};
    row_state state = {-INFINITY, 0};
    load_plan plan;

    if (j.begin >= j.end) {
        put_nothing<FP16>(p, j);
        return;
    }
    plan = first_load(p, j, tid);
    load_queries<shape>(p, j, at.stage(shape::STAGES - 1), q);
    seen = row < j.n_rows ? min(seen_by(p, j, j.first + row), j.end) : 0;
    n_tiles = (j.end - j.begin + TILE - 1) / TILE;
    for (uint32_t i = 0; i < shape::STAGES - 1; i++)
        load_next<shape>(p, j, i, i, plan, tid, at);
    if (shape::AHEAD) {
        copy_wait<shape::STAGES - 2>();
        __syncthreads();
        score_tile<shape, FP16>(at.stage(0), q, at.scores_of(0), tid);
    }
    for (uint32_t i = 0, now = 0; i < n_tiles; i++) { /* stage `now` holds tile i */
        uint32_t t0 = j.begin + i * TILE, visible = seen > t0 ? seen - t0 : 0;
        uint32_t after = now + 1 == shape::STAGES ? 0 : now + 1, before = now == 0 ? shape::STAGES - 1 : now - 1;
        uint32_t next = i + shape::AHEAD, next_stage = shape::AHEAD ? after : now;
        /* Of two warps that share a scheduler, one begins with what the other one ends with. */
        bool score_first = !shape::AHEAD || tid >= THREADS / 2;

        copy_wait<0>();
        __syncthreads(); /* tile `next` has come, tile i is scored if it was scored ahead, tile i - 1 is done with */
        load_next<shape>(p, j, i + shape::STAGES - 1, before, plan, tid, at);
        if (score_first && next < n_tiles)
            score_tile<shape, FP16>(at.stage(next_stage), q, at.scores_of(next), tid);
        if (!shape::AHEAD)
            __syncthreads();
        weigh_tile<shape, FP16>(at.scores_of(i), at.valid_of(now), visible, p.scale_log2, state, at.weights, at.rescale,
                                tid);
        if (!score_first && next < n_tiles)
            score_tile<shape, FP16>(at.stage(next_stage), q, at.scores_of(next), tid);
        __syncthreads(); /* all weights of tile i are there */
        add_values<shape, FP16>(at.stage(now), at.weights, at.rescale, acc, tid);
        now = after;
    }
    if (tid % shape::THREADS_A_ROW == 0) {
        at.sums[row] = state.sum;
        if (row < j.n_rows)
            put_lse(p, j, row, state.sum == 0 ? -INFINITY : (state.max + log2f(state.sum)) * 0.693147181f);
    }
    __syncthreads();
    put_results<shape, FP16>(p, j, at.sums, acc);
}

/* One block a row: the weight of each part from its LSE, then the parts in increasing order.  A part without tokens is
 * not read: nothing was written there.  RAGGED: a row of no sequence is left alone. */
template <bool FP16, bool RAGGED>
__global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const __grid_constant__ decode_params p)
{
    __shared__ float weights[KVS_MLA_MAX_PARTS];
    uint32_t d = threadIdx.x * 4;
    uint64_t token = blockIdx.x / p.a.h_q, head = blockIdx.x % p.a.h_q, at = (uint64_t)blockIdx.x * p.parts;
    uint8_t *out = operand_row(p.a.out, token, head) + d * VALUE;
    float top = -INFINITY, sum = 0, v[4] = {0, 0, 0, 0};

    for (uint32_t i = threadIdx.x; i < p.parts; i += MERGE_THREADS)
        weights[i] = p.part_lse[at + i];
    __syncthreads();
    if (RAGGED && __float_as_uint(weights[0]) == NOBODY)
        return;
    for (uint32_t i = 0; i < p.parts; i++)
        top = fmaxf(top, weights[i]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.parts; i += MERGE_THREADS)
        weights[i] = weights[i] == -INFINITY ? 0 : expf(weights[i] - top);
    __syncthreads();
#pragma unroll 8
    for (uint32_t i = 0; i < p.parts; i++) {
        float w = weights[i];
        float4 x = make_float4(0, 0, 0, 0);

        if (w != 0)
            x = *reinterpret_cast<const float4 *>(p.part_out + (at + i) * LATENT + d);
        sum += w;
        v[0] += w * x.x;
        v[1] += w * x.y;
        v[2] += w * x.z;
        v[3] += w * x.w;
    }
    if (sum != 0)
        for (int i = 0; i < 4; i++)
            v[i] /= sum;
    store_pair(out, pack<FP16>(v[0], v[1]), p.out_aligned);
    store_pair(out + 4, pack<FP16>(v[2], v[3]), p.out_aligned);
    if (threadIdx.x == 0)
        *reinterpret_cast<float *>(operand_row(p.a.lse, token, head)) = sum == 0 ? -INFINITY : top + logf(sum);
}

} // namespace kvs_mla
#endif
