#ifndef KVS_KERNELS_MLA_QUANTISED_CUH
#define KVS_KERNELS_MLA_QUANTISED_CUH

/* MLA attention over rows of a quantised format: bytes come to shared memory as they lie in the cache, and are widened
 * to bf16 there, once a tile; from then on it is mla_mma.cuh's arithmetic.
 *
 *   raw stages (1 or 2) of 32 rows, scales behind each row
 *     |  widen: e4m3 to bf16, exact
 *   tiles (1 to 3) of 32 x dims bf16
 *
 * Widening never rounds, so scales are put where they do no harm:
 *   mla_fp8       one scale: into the softmax scale and the output
 *   fp8_ds_mla    any fp32 for 128 values: the scores of each 128 are scaled in fp32 before they are added up, and each
 *                 128 columns of the output have weights of their own, scaled before they are rounded
 *   block-wise    powers of two: times the value, exact but at the ends of the range
 * Where rows lie is said by a source: a block table (mla_decode_fp8.cu) or a list of token indices (mla_sparse.cu).
 *
 * Knows formats and tiles.  A row that may not be read has zeros in its place, scales included, and a weight of 0. */

#include "kernels/mla_formats.cuh"
#include "kernels/mla_mma.cuh"

namespace
{

/* What a thread block is like.  All do the same sums in the same order.
 *   SMALL   16 query rows, one tile: widened, scored, weighed and added up in turn.  Two blocks a processor; fits every
 *           card
 *   PAIRED  16 query rows, two tiles: one is scored while the one before is added up, one is weighed while the next one
 *           is widened.  Two blocks a processor, on cards with 228 KB for them
 *   WIDE    32 query rows, three tiles: a block alone scores the next tile, and widens the one behind it, while it weighs
 *           this one */
enum block_kind { SMALL, PAIRED, WIDE };

template <int KIND, typename format> struct quantised_shape : row_shape<KIND == WIDE ? 2 : 1, format::DIMS> {
    typedef row_shape<KIND == WIDE ? 2 : 1, format::DIMS> base;
    enum {
        AHEAD = KIND == WIDE ? 1 : 0, /* tiles whose scores are kept beside those of this one */
        TILES = KIND == WIDE     ? 3
                : KIND == PAIRED ? 2
                                 : 1,
        RAW_STAGES = KIND == PAIRED ? 1 : 2,
        FLAGS = 8,  /* tiles whose `valid` is kept: more than are under way */
        SCALES = 4, /* likewise of scales, from widening on */
        SCALE_FLOATS = format::GROUPS * TILE,
        RAW_PITCH = (format::ROW + format::TAIL + CHUNK - 1) / CHUNK * CHUNK,
        RAW_BYTES = TILE * RAW_PITCH,
        RAW_AT = TILES * base::TILE_BYTES,
        S_AT = RAW_AT + RAW_STAGES * RAW_BYTES,
        P_AT = S_AT + (1 + AHEAD) * base::S_FLOATS * 4,
        RESCALE_AT = P_AT + (format::GROUPS > 0 ? format::GROUPS : 1) * base::P_BYTES,
        SUM_AT = RESCALE_AT + base::ROWS * 4,
        SCALE_AT = SUM_AT + base::ROWS * 4,
        VALID_AT = SCALE_AT + SCALES * SCALE_FLOATS * 4,
        BYTES = VALID_AT + FLAGS * TILE,
    };
};

/* Where everything lies in a block's shared memory. */
template <typename shape> struct quantised_parts {
    uint8_t *base, *weights;
    float *rescale, *sums;

    __device__ __forceinline__ explicit quantised_parts(uint8_t *shared)
        : base(shared), weights(shared + shape::P_AT), rescale(reinterpret_cast<float *>(shared + shape::RESCALE_AT)),
          sums(reinterpret_cast<float *>(shared + shape::SUM_AT))
    {
    }
    __device__ __forceinline__ uint8_t *tile(uint32_t i) const
    {
        return base + (shape::TILES == 1 ? 0 : i % shape::TILES) * shape::TILE_BYTES;
    }
    __device__ __forceinline__ uint8_t *raw(uint32_t i) const
    {
        return base + shape::RAW_AT + i % shape::RAW_STAGES * shape::RAW_BYTES;
    }
    __device__ __forceinline__ uint8_t *valid(uint32_t i) const
    {
        return base + shape::VALID_AT + i % shape::FLAGS * TILE;
    }
    __device__ __forceinline__ float *scales(uint32_t i) const
    {
        return reinterpret_cast<float *>(base + shape::SCALE_AT) + i % shape::SCALES * shape::SCALE_FLOATS;
    }
    __device__ __forceinline__ float *scores(uint32_t i) const
    {
        return reinterpret_cast<float *>(base + shape::S_AT) + i % (1 + shape::AHEAD) * shape::S_FLOATS;
    }
};

/* A row of the cache: its bytes and its entry in the page's tail.  NULL: no row. */
struct record_place {
    const uint8_t *row, *tail;
};

/* 8 bytes, or 8 zeros. */
__device__ __forceinline__ void copy_async_8(uint32_t dst, const uint8_t *src, bool ok)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(ok ? 8 : 0) : "memory");
}

/* One row of a tile by LOADERS threads. */
template <typename shape, typename format>
__device__ __forceinline__ void load_record(const attend_params &p, record_place from, uint32_t tid, uint8_t *raw)
{
    uint32_t r = tid / LOADERS, c = tid % LOADERS, dst = shared_address(raw + r * shape::RAW_PITCH);
    bool ok = from.row != nullptr;
    const uint8_t *row = ok ? from.row : p.view.base, *tail = ok ? from.tail : p.view.base;

#pragma unroll
    for (uint32_t k = 0; k < format::ROW / CHUNK; k += LOADERS)
        if (k + LOADERS <= format::ROW / CHUNK || c < format::ROW / CHUNK - k)
            copy_async(dst + (k + c) * CHUNK, row + (k + c) * CHUNK, ok);
    if (format::TAIL == 8 && c == LOADERS - 1)
        copy_async_8(dst + format::ROW, tail, ok);
    if (format::TAIL == 16 && c == LOADERS - 1)
        copy_async(dst + format::ROW, tail, ok);
}

/* One row on its way to the L2 cache, by LOADERS threads: where a row is asked for late, it is to be near. */
template <typename format> __device__ __forceinline__ void prefetch_record(record_place from, uint32_t tid)
{
    enum { LINE = 128 };

    if (from.row != nullptr)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from.row + min(tid % LOADERS * LINE, (uint32_t)format::ROW - 1)));
}

/* All threads: raw rows to a tile, and their scales to [GROUPS][32]. */
template <typename shape, typename format>
__device__ __forceinline__ void widen_tile(const uint8_t *raw, uint8_t *tile, float *scales, uint32_t tid)
{
    if (format::GROUPS > 0 && tid < format::GROUPS * TILE)
        scales[tid] = reinterpret_cast<const float *>(raw + tid % TILE * shape::RAW_PITCH + 512)[tid / TILE];
    /* 64 chunks of a row side by side, 4 rows at once: reads and writes without conflicts. */
    uint32_t c = tid % 64, first = tid / 64;

#pragma unroll
    for (uint32_t k = 0; k < TILE; k += 4) {
        uint32_t r = first + k;

        *reinterpret_cast<uint4 *>(tile + r * shape::ROW_BYTES + (c ^ (r & 7)) * CHUNK) =
            format::chunk(raw + r * shape::RAW_PITCH, c);
    }
    if (shape::CHUNKS > 64) { /* the other 8 */
        uint32_t r = tid / 8;

        c = 64 + tid % 8;
        *reinterpret_cast<uint4 *>(tile + r * shape::ROW_BYTES + (c ^ (r & 7)) * CHUNK) =
            format::chunk(raw + r * shape::RAW_PITCH, c);
    }
}

/* As score_tile, for groups of 128 dimensions with a scale each. */
template <typename shape>
__device__ __forceinline__ void score_groups(const uint8_t *tile, const uint32_t q[shape::ROW_TILES][shape::STEPS][4],
                                             const float *scales, float *scores, uint32_t tid)
{
    enum { STEPS_A_GROUP = 2, GROUPS = 4 };
    static_assert(shape::STEPS == GROUPS * STEPS_A_GROUP + 1, "four groups of latents, then rope");
    uint32_t lane = tid % 32, warp = tid / 32, half = warp % 2, slice = warp / 2;
    uint32_t token = half * 16 + lane % 8 + lane / 16 * 8, high = lane / 8 % 2, x = lane % 8;
    uint32_t row = shared_address(tile + token * shape::ROW_BYTES) + ((2 * slice + high) ^ x) * CHUNK;
    uint32_t column = half * 16 + lane % 4 * 2; /* token of the first of this thread's sums */
    float acc[shape::ROW_TILES][2][4] = {};
    uint32_t k[4];

#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float part[shape::ROW_TILES][2][4] = {};

#pragma unroll
        for (int s = g * STEPS_A_GROUP; s < (g + 1) * STEPS_A_GROUP; s++) {
            load_matrices(k, row + s * 8 * CHUNK);
#pragma unroll
            for (int m = 0; m < shape::ROW_TILES; m++) {
                multiply_add<false>(part[m][0], q[m][s], k[0], k[1]);
                multiply_add<false>(part[m][1], q[m][s], k[2], k[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 scale = *reinterpret_cast<const float2 *>(scales + g * TILE + column + n * 8);

#pragma unroll
            for (int m = 0; m < shape::ROW_TILES; m++) {
                acc[m][n][0] += part[m][n][0] * scale.x;
                acc[m][n][1] += part[m][n][1] * scale.y;
                acc[m][n][2] += part[m][n][2] * scale.x;
                acc[m][n][3] += part[m][n][3] * scale.y;
            }
        }
    }
    load_matrices(k, row + GROUPS * STEPS_A_GROUP * 8 * CHUNK);
#pragma unroll
    for (int m = 0; m < shape::ROW_TILES; m++) {
        multiply_add<false>(acc[m][0], q[m][GROUPS * STEPS_A_GROUP], k[0], k[1]);
        multiply_add<false>(acc[m][1], q[m][GROUPS * STEPS_A_GROUP], k[2], k[3]);
    }
    put_scores<shape>(acc, scores, tid);
}

template <typename shape, typename format>
__device__ __forceinline__ void score_quantised(const quantised_parts<shape> &at, uint32_t i,
                                                const uint32_t q[shape::ROW_TILES][shape::STEPS][4], uint32_t tid)
{
    if constexpr (format::GROUPS > 0)
        score_groups<shape>(at.tile(i), q, at.scales(i), at.scores(i), tid);
    else
        score_tile<shape, false>(at.tile(i), q, at.scores(i), tid);
}

/* Weights of a tile: one set, or one for each group, times its scale. */
template <typename shape, typename format>
__device__ __forceinline__ void weigh_quantised(const quantised_parts<shape> &at, uint32_t i, uint32_t visible,
                                                float scale_log2, row_state &state, uint32_t tid)
{
    uint32_t first = tid % shape::THREADS_A_ROW * shape::TOKENS_A_THREAD;
    float w[shape::TOKENS_A_THREAD];

    soften_tile<shape>(at.scores(i), at.valid(i), visible, scale_log2, state, w, at.rescale, tid);
    if constexpr (format::GROUPS == 0)
        put_weights<shape, false>(w, at.weights, tid);
    else {
#pragma unroll
        for (int g = 0; g < format::GROUPS; g++) {
            token_run<float, shape::TOKENS_A_THREAD> scale =
                *reinterpret_cast<const token_run<float, shape::TOKENS_A_THREAD> *>(at.scales(i) + g * TILE + first);
            float scaled[shape::TOKENS_A_THREAD];

#pragma unroll
            for (int k = 0; k < shape::TOKENS_A_THREAD; k++)
                scaled[k] = w[k] * scale.at[k];
            put_weights<shape, false>(scaled, at.weights + g * shape::P_BYTES, tid);
        }
    }
}

template <typename shape, typename format>
__device__ __forceinline__ void add_quantised(const quantised_parts<shape> &at, uint32_t i, sums_of<shape> &acc,
                                              uint32_t tid)
{
    static_assert(format::GROUPS == 0 || THREADS / 32 == 2 * format::GROUPS, "two warps a group of 128 dimensions");
    const uint8_t *weights = at.weights + (format::GROUPS > 0 ? tid / 64 * shape::P_BYTES : 0);

    add_values<shape, false>(at.tile(i), weights, at.rescale, acc, tid);
}

__device__ __forceinline__ float kv_scale_of(const attend_params &p)
{
    return p.kv_scale != nullptr ? *p.kv_scale : 1;
}

/* What the scale of the values and the sink leave of a row: scale * e^lse / (e^lse + e^sink); lse2 is in base 2. */
__device__ __forceinline__ float out_factor(const attend_params &p, uint32_t head, float lse2)
{
    return kv_scale_of(p) / (p.sink != nullptr ? 1 + exp2f(p.sink[head] * 1.44269504f - lse2) : 1);
}

template <typename shape, typename format, typename source>
__device__ __forceinline__ void load_next(const attend_params &p, const job &j, uint32_t i, source &from, uint32_t tid,
                                          const quantised_parts<shape> &at)
{
    if (j.begin + i * TILE < j.end) {
        record_place place = from.place(p, j);

        if (tid % LOADERS == 0)
            at.valid(i)[tid / LOADERS] = place.row != nullptr;
        load_record<shape, format>(p, place, tid, at.raw(i));
    }
    copy_commit(); /* also an empty group: the waits count groups */
    from.next(p, j);
}

/* Scores, weights and values of all tiles, one after the other. */
template <typename shape, typename format, typename source>
__device__ __forceinline__ void attend_in_turn(const attend_params &p, const job &j, source &from, uint32_t tid,
                                               const quantised_parts<shape> &at,
                                               const uint32_t q[shape::ROW_TILES][shape::STEPS][4], uint32_t seen,
                                               row_state &state, sums_of<shape> &acc)
{
    uint32_t n_tiles = (j.end - j.begin + TILE - 1) / TILE;
    float scale_log2 = p.scale_log2 * kv_scale_of(p);

    load_next<shape, format>(p, j, 0, from, tid, at);
    load_next<shape, format>(p, j, 1, from, tid, at);
    for (uint32_t i = 0; i < n_tiles; i++) {
        uint32_t t0 = j.begin + i * TILE;

        copy_wait<1>();
        __syncthreads(); /* raw rows of tile i have come, tile i - 1 is done with */
        widen_tile<shape, format>(at.raw(i), at.tile(i), at.scales(i), tid);
        __syncthreads();
        load_next<shape, format>(p, j, i + 2, from, tid, at);
        score_quantised<shape, format>(at, i, q, tid);
        __syncthreads();
        weigh_quantised<shape, format>(at, i, seen > t0 ? seen - t0 : 0, scale_log2, state, tid);
        __syncthreads();
        add_quantised<shape, format>(at, i, acc, tid);
    }
}

/* With tile i scored while tile i - 1 is added up, and tile i + 1 widened while tile i is weighed.  There is room for one
 * tile of raw rows, which come while tiles are scored: from the L2 cache, where they were told to be two tiles before. */
template <typename shape, typename format, typename source>
__device__ __forceinline__ void attend_in_pairs(const attend_params &p, const job &j, source &from, uint32_t tid,
                                                const quantised_parts<shape> &at,
                                                const uint32_t q[shape::ROW_TILES][shape::STEPS][4], uint32_t seen,
                                                row_state &state, sums_of<shape> &acc)
{
    uint32_t n_tiles = (j.end - j.begin + TILE - 1) / TILE;
    float scale_log2 = p.scale_log2 * kv_scale_of(p);
    /* Of two warps that share a scheduler, one begins with what the other one ends with. */
    bool first_half = tid < THREADS / 2;
    source later = from;

    later.counts = false;
    load_next<shape, format>(p, j, 0, from, tid, at);
    for (int i = 0; i < 2; i++) {
        later.next(p, j);
        prefetch_record<format>(later.place(p, j), tid);
    }
    copy_wait<0>();
    __syncthreads();
    widen_tile<shape, format>(at.raw(0), at.tile(0), at.scales(0), tid);
    __syncthreads();
    load_next<shape, format>(p, j, 1, from, tid, at);
    for (uint32_t i = 0; i < n_tiles; i++) {
        uint32_t t0 = j.begin + i * TILE, visible = seen > t0 ? seen - t0 : 0;

        later.next(p, j);
        prefetch_record<format>(later.place(p, j), tid);
        if (first_half && i > 0)
            add_quantised<shape, format>(at, i - 1, acc, tid);
        score_quantised<shape, format>(at, i, q, tid);
        if (!first_half && i > 0)
            add_quantised<shape, format>(at, i - 1, acc, tid);
        copy_wait<0>();
        __syncthreads(); /* tile i is scored, tile i - 1 done with, the raw rows of tile i + 1 have come */
        if (!first_half && i + 1 < n_tiles)
            widen_tile<shape, format>(at.raw(i + 1), at.tile(i + 1), at.scales(i + 1), tid);
        weigh_quantised<shape, format>(at, i, visible, scale_log2, state, tid);
        if (first_half && i + 1 < n_tiles)
            widen_tile<shape, format>(at.raw(i + 1), at.tile(i + 1), at.scales(i + 1), tid);
        __syncthreads(); /* all weights of tile i are there, tile i + 1 is whole */
        load_next<shape, format>(p, j, i + 2, from, tid, at);
    }
    add_quantised<shape, format>(at, n_tiles - 1, acc, tid);
}

/* With tile i + 1 scored and tile i + 2 widened while tile i is weighed. */
template <typename shape, typename format, typename source>
__device__ __forceinline__ void
attend_ahead(const attend_params &p, const job &j, source &from, uint32_t tid, const quantised_parts<shape> &at,
             const uint32_t q[shape::ROW_TILES][shape::STEPS][4], uint32_t seen, row_state &state, sums_of<shape> &acc)
{
    uint32_t n_tiles = (j.end - j.begin + TILE - 1) / TILE;
    /* Of two warps that share a scheduler, one begins with what the other one ends with. */
    bool score_first = tid >= THREADS / 2;
    float scale_log2 = p.scale_log2 * kv_scale_of(p);

    load_next<shape, format>(p, j, 0, from, tid, at);
    load_next<shape, format>(p, j, 1, from, tid, at);
    for (uint32_t i = 0; i < 2; i++) {
        copy_wait<1>();
        __syncthreads();
        if (i < n_tiles)
            widen_tile<shape, format>(at.raw(i), at.tile(i), at.scales(i), tid);
        __syncthreads();
        load_next<shape, format>(p, j, i + 2, from, tid, at);
    }
    score_quantised<shape, format>(at, 0, q, tid);
    for (uint32_t i = 0; i < n_tiles; i++) {
        uint32_t t0 = j.begin + i * TILE, visible = seen > t0 ? seen - t0 : 0;

        copy_wait<1>();
        __syncthreads(); /* raw rows of tile i + 2 have come, tile i is scored, tile i - 1 is done with */
        if (score_first && i + 1 < n_tiles)
            score_quantised<shape, format>(at, i + 1, q, tid);
        if (score_first && i + 2 < n_tiles)
            widen_tile<shape, format>(at.raw(i + 2), at.tile(i + 2), at.scales(i + 2), tid);
        weigh_quantised<shape, format>(at, i, visible, scale_log2, state, tid);
        if (!score_first && i + 2 < n_tiles)
            widen_tile<shape, format>(at.raw(i + 2), at.tile(i + 2), at.scales(i + 2), tid);
        if (!score_first && i + 1 < n_tiles)
            score_quantised<shape, format>(at, i + 1, q, tid);
        __syncthreads(); /* all weights of tile i are there, the raw rows of tile i + 2 are not needed any more */
        load_next<shape, format>(p, j, i + 4, from, tid, at);
        add_quantised<shape, format>(at, i, acc, tid);
    }
}

template <int KIND, uint32_t FORMAT, typename source>
__global__ void __launch_bounds__(THREADS, KIND == WIDE ? 1 : 2)
    quantised_kernel(const __grid_constant__ attend_params p)
{
    typedef record<FORMAT> format;
    typedef quantised_shape<KIND, format> shape;
    extern __shared__ __align__(128) uint8_t shared[];
    const quantised_parts<shape> at(shared);
    const job j = source::template find_job<shape::ROWS>(p);
    const uint32_t tid = thread_index(), row = tid / shape::THREADS_A_ROW;
    uint32_t q[shape::ROW_TILES][shape::STEPS][4], seen;
    sums_of<shape> acc = {};
    row_state state = {-INFINITY, 0};

    if (j.begin >= j.end) {
        put_nothing<false>(p, j);
        return;
    }
    source from(p, j, tid);
    load_queries<shape>(p, j, at.tile(0), q);
    seen = row < j.n_rows ? source::seen_by(p, j, j.first + row) : 0;
    if constexpr (KIND == WIDE)
        attend_ahead<shape, format>(p, j, from, tid, at, q, seen, state, acc);
    else if constexpr (KIND == PAIRED)
        attend_in_pairs<shape, format>(p, j, from, tid, at, q, seen, state, acc);
    else
        attend_in_turn<shape, format>(p, j, from, tid, at, q, seen, state, acc);
    if (tid % shape::THREADS_A_ROW == 0) {
        float lse2 = state.sum == 0 ? -INFINITY : state.max + log2f(state.sum);
        float factor = p.parts > 1 || row >= j.n_rows ? 1 : out_factor(p, (j.first + row) % p.h_q, lse2);

        at.sums[row] = state.sum == 0 ? 0 : state.sum / factor;
        if (row < j.n_rows)
            put_lse(p, j, row, lse2 * 0.693147181f);
    }
    __syncthreads();
    put_results<shape, false>(p, j, at.sums, acc);
}

template <int KIND, uint32_t FORMAT, typename source> cudaError_t quantised_init()
{
    enum { BYTES = quantised_shape<KIND, record<FORMAT>>::BYTES };
    cudaFuncAttributes attributes;
    cudaError_t e = cudaFuncGetAttributes(&attributes, quantised_kernel<KIND, FORMAT, source>);

    if (e == cudaSuccess && mla_has_shared(BYTES, 1))
        e = cudaFuncSetAttribute(quantised_kernel<KIND, FORMAT, source>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 BYTES);
    return e;
}

/* All kinds of a format. */
template <uint32_t FORMAT, typename source> cudaError_t quantised_init_all()
{
    cudaError_t e = quantised_init<SMALL, FORMAT, source>();

    if (e == cudaSuccess)
        e = quantised_init<PAIRED, FORMAT, source>();
    return e == cudaSuccess ? quantised_init<WIDE, FORMAT, source>() : e;
}

/* rows: of a block, 16 or 32. */
template <uint32_t FORMAT, typename source>
cudaError_t quantised_launch(const attend_params &p, uint32_t rows, uint64_t blocks, cudaStream_t stream)
{
    typedef record<FORMAT> format;
    enum { PAIR = quantised_shape<PAIRED, format>::BYTES };
    static_assert(quantised_shape<SMALL, format>::BYTES <= 99 * 1024, "fits every card of the portable path");
    const unsigned n = (unsigned)blocks;

    if (rows == 32)
        quantised_kernel<WIDE, FORMAT, source><<<n, THREADS, quantised_shape<WIDE, format>::BYTES, stream>>>(p);
    else if (mla_has_shared(PAIR, 2))
        quantised_kernel<PAIRED, FORMAT, source><<<n, THREADS, PAIR, stream>>>(p);
    else
        quantised_kernel<SMALL, FORMAT, source><<<n, THREADS, quantised_shape<SMALL, format>::BYTES, stream>>>(p);
    return cudaGetLastError();
}

} // namespace

#endif
