/* MLA decode on a GPU, the portable path: mma.sync and cp.async, sm_80 and newer.  Rows of 16-bit values by a block table
 * come straight into the tiles that mla_mma.cuh works on; rows of fp8 take the way of mla_quantised.cuh.
 *
 * What a row adds up, and in which order, depends on its tokens, its length and parts: not on strides, pages,
 * neighbours or the other rows of its block.  A token that may not be read has zeros in its place and a weight of 0. */
#include <cinttypes>
#include <cmath>

#include <cuda_runtime.h>

#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/kernels_cuda.h"
#include "kernels/mla_check.h"
#include "kernels/mla_launch.cuh"
#include "kernels/mla_mma.cuh"
#include "kernels/mla_table.cuh"
#include "proto/layout.h"

namespace
{

/* MT: m16 tiles of query rows.  One tile a block leaves room for a second block, which works while the first one waits.
 * Two tiles do not: that block has a stage more, and scores the next tile while it weighs this one.  Where there is shared
 * memory for yet another, tiles come in time more often: 3 % on an H200, where a fifth brings nothing. */
template <int MT, int STAGES_> struct tile_shape : row_shape<MT, LATENT + KVS_MLA_ROPE> {
    typedef row_shape<MT, LATENT + KVS_MLA_ROPE> base;
    enum {
        BLOCKS_A_PROCESSOR = MT == 1 ? 2 : 1,
        AHEAD = MT == 1 ? 0 : 1, /* tiles scored before this one is weighed */
        STAGES = STAGES_,
        S_AT = STAGES * base::TILE_BYTES,
        P_AT = S_AT + (1 + AHEAD) * base::S_FLOATS * 4,
        SCALE_AT = P_AT + base::P_BYTES,
        SUM_AT = SCALE_AT + base::ROWS * 4,
        VALID_AT = SUM_AT + base::ROWS * 4,
        BYTES = VALID_AT + STAGES * TILE,
    };
};
typedef tile_shape<1, 2> small_shape;
typedef tile_shape<2, 3> wide_shape;
typedef tile_shape<2, 4> deep_shape;

/* The planned tile into `stage`: LOADERS threads a row. */
template <typename shape>
__device__ __forceinline__ void load_tile(const attend_params &p, const job &j, const load_plan &l, uint32_t tid,
                                          uint8_t *stage, uint8_t *valid)
{
    static_assert(LOADERS % 8 == 0 && shape::CHUNKS % LOADERS == 0,
                  "a step of LOADERS chunks leaves the swizzle alone");
    uint32_t r = tid / LOADERS, c = tid % LOADERS;
    uint32_t dst = shared_address(stage + r * shape::ROW_BYTES + (c ^ (r & 7)) * CHUNK);
    bool wanted = l.t < j.end, ok = wanted && l.block >= 0 && (uint32_t)l.block < p.view.n_blocks;
    const uint8_t *src = (ok ? kvs_view_row(&p.view, (uint32_t)l.block, l.offset, p.site) : p.view.base) + c * CHUNK;

    if (wanted && !ok && j.counts && l.offset == 0 && c == 0)
        atomicAdd(p.bad, 1u);
    if (c == 0)
        valid[r] = ok;
#pragma unroll
    for (int k = 0; k < shape::CHUNKS; k += LOADERS)
        copy_async(dst + k * CHUNK, src + k * CHUNK, ok);
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
        return stages + i * shape::TILE_BYTES;
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
__device__ __forceinline__ void load_next(const attend_params &p, const job &j, uint32_t i, uint32_t s, load_plan &plan,
                                          uint32_t tid, const shared_parts<shape> &at)
{
    if (j.begin + i * TILE < j.end)
        load_tile<shape>(p, j, plan, tid, at.stage(s), at.valid_of(s));
    copy_commit(); /* also an empty group: the waits count groups */
    next_load(p, j, plan);
}

template <typename shape, bool FP16>
__global__ void __launch_bounds__(THREADS, shape::BLOCKS_A_PROCESSOR)
    decode_kernel(const __grid_constant__ attend_params p)
{
    extern __shared__ __align__(128) uint8_t shared[];
    const shared_parts<shape> at(shared);
    const job j = find_job<shape::ROWS>(p);
    const uint32_t tid = thread_index(), row = tid / shape::THREADS_A_ROW;
    uint32_t q[shape::ROW_TILES][shape::STEPS][4], n_tiles, seen;
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

        copy_wait<shape::STAGES - 2 - shape::AHEAD>();
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

template <typename shape, bool FP16> cudaError_t kernel_init()
{
    int device = 0, bytes = 0;
    cudaFuncAttributes attributes;
    cudaError_t e = cudaGetDevice(&device);

    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, decode_kernel<shape, FP16>);
    if (e == cudaSuccess && bytes >= shape::BYTES)
        e = cudaFuncSetAttribute(decode_kernel<shape, FP16>, cudaFuncAttributeMaxDynamicSharedMemorySize, shape::BYTES);
    return e;
}

template <bool FP16> cudaError_t launch(const attend_params &p, uint32_t rows, uint64_t blocks, cudaStream_t stream)
{
    if (rows == wide_shape::ROWS && mla_has_shared(deep_shape::BYTES, 1))
        decode_kernel<deep_shape, FP16><<<(unsigned)blocks, THREADS, deep_shape::BYTES, stream>>>(p);
    else if (rows == wide_shape::ROWS)
        decode_kernel<wide_shape, FP16><<<(unsigned)blocks, THREADS, wide_shape::BYTES, stream>>>(p);
    else
        decode_kernel<small_shape, FP16><<<(unsigned)blocks, THREADS, small_shape::BYTES, stream>>>(p);
    return cudaGetLastError();
}

bool is_16_bit(uint32_t format)
{
    return format == KVS_FORMAT_mla_bf16 || format == KVS_FORMAT_mla_fp16;
}

uint32_t rows_a_block(const kvs_mla_decode_args *a)
{
    return mla_rows_a_block(a->s_q * a->h_q, mla_dense_wide_bytes(a->view.format));
}

attend_params params_of(const kvs_mla_decode_args *a, uint32_t *ret_bad)
{
    const kvs_site site = is_16_bit(a->view.format) ? KVS_SITE_MLA_DECODE : KVS_SITE_MLA_DECODE_FP8;
    attend_params p = {};

    p.view = a->view;
    p.site = site;
    p.q_nope = a->q_nope;
    p.q_pe = a->q_pe;
    p.out = a->out;
    p.lse = a->lse;
    p.length = a->seq_len;
    p.list = a->block_table;
    p.list_stride = a->table_stride;
    p.list_width = a->table_width;
    p.n_units = a->n_seqs;
    p.s_q = a->s_q;
    p.h_q = a->h_q;
    p.units_a_length = 1;
    p.parts = kvs_mla_decode_cuda_parts(a);
    p.step_pages = TILE / kvs_view_tokens(&a->view, site);
    p.step_tokens = TILE % kvs_view_tokens(&a->view, site);
    p.bad = ret_bad;
    p.scale_log2 = a->sm_scale * 1.44269504f;
    p.kv_scale = a->view.format == KVS_FORMAT_mla_fp8 ? a->kv_scale : nullptr;
    return p;
}

} // namespace

int mla_dense_wide_bytes(uint32_t format)
{
    return is_16_bit(format) ? (int)wide_shape::BYTES : mla_decode_fp8_wide_bytes();
}

cudaError_t mla_dense_launch(const attend_params &p, uint32_t rows, uint64_t blocks, cudaStream_t stream)
{
    const bool is_fp16 = p.view.format == KVS_FORMAT_mla_fp16;
    cudaError_t e;

    if (is_fp16)
        e = launch<true>(p, rows, blocks, stream);
    else if (p.view.format == KVS_FORMAT_mla_bf16)
        e = launch<false>(p, rows, blocks, stream);
    else
        e = mla_decode_fp8_launch(p, rows, blocks, stream);
    return e != cudaSuccess || p.parts == 1 ? e : mla_join_launch(p, is_fp16, stream);
}

extern "C" kvs_status kvs_mla_decode_cuda_init(kvs_err *err)
{
    cudaError_t e = kernel_init<small_shape, false>();

    if (e == cudaSuccess)
        e = kernel_init<small_shape, true>();
    if (e == cudaSuccess)
        e = kernel_init<wide_shape, false>();
    if (e == cudaSuccess)
        e = kernel_init<wide_shape, true>();
    if (e == cudaSuccess)
        e = kernel_init<deep_shape, false>();
    if (e == cudaSuccess)
        e = kernel_init<deep_shape, true>();
    if (e == cudaSuccess)
        e = mla_decode_fp8_init();
    if (e == cudaSuccess)
        e = mla_join_init();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(mla_decode)", e);
}

extern "C" uint32_t kvs_mla_decode_cuda_parts(const kvs_mla_decode_args *a)
{
    uint64_t longest = (uint64_t)a->table_width * a->view.tokens_per_block;

    if (a->parts > 0)
        return a->parts;
    return mla_auto_parts(a->n_seqs, a->s_q * a->h_q, rows_a_block(a), longest, a->fixed_split != 0);
}

extern "C" uint64_t kvs_mla_decode_cuda_workspace(const kvs_mla_decode_args *a)
{
    if (a->s_q < 1 || a->s_q > KVS_MLA_MAX_SQ || a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS ||
        a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return mla_workspace(mla_partials(a->n_seqs, a->s_q * a->h_q, kvs_mla_decode_cuda_parts(a)));
}

extern "C" kvs_status kvs_mla_decode_cuda(const kvs_mla_decode_args *a, void *workspace, uint64_t workspace_bytes,
                                          uint32_t *ret_bad, kvs_mla_decode_result *ret, CUstream_st *stream,
                                          kvs_err *err)
{
    kvs_status s = kvs_mla_decode_check(a, err);
    attend_params p;
    uint64_t blocks = 0;
    cudaError_t e = cudaSuccess;

    if (s != KVS_OK)
        return s;
    p = params_of(a, ret_bad);
    s = mla_launch_fill(&p, rows_a_block(a), workspace, workspace_bytes, &blocks, err);
    if (s != KVS_OK)
        return s;
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && blocks > 0)
        e = mla_dense_launch(p, rows_a_block(a), blocks, stream);
    if (e != cudaSuccess)
        return kvs_cuda_fail(err, "mla_decode launch", e);
    *ret = kvs_mla_decode_result{p.parts, KVS_KERNEL_MLA_DECODE_MMA, 0};
    return KVS_OK;
}
