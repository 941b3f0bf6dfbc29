/* Decode with heads of keys and values on a GPU: pages and launches for the kernels of attend.cuh. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/attend.cuh"
#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/kv_decode.h"
#include "kernels/mla_check.h"
#include "proto/layout.h"

using namespace kvs_attend;

namespace
{

enum {
    SMALL_ROWS =
        16, /* of a block; 64 if there are more than FEW_ROWS: reading keys twice is quicker than half a block */
    WIDE_ROWS = 64,
    FEW_ROWS = 32,
    TOKENS_A_FIXED_PART = 1024,
    TOKENS_A_PART = 256, /* less is not worth a block */
    MAX_AUTO_PARTS = 64,
    WAVES = 2, /* of thread blocks that auto parts aim at: the last one may be short */
    MAX_STAGES = 2,
    MOST_RESIDENT = 4, /* blocks of a processor, for their registers */
    RESERVED = 1024,   /* bytes of shared memory that the system takes of each block */
};

struct paged {
    attend_params attend;
    kvs_view k, v;
    uint64_t k_head, v_head;
    const int32_t *seq_len, *block_table;
    uint64_t table_stride;
    uint32_t *bad;
    uint32_t n_blocks; /* that both views have */
    uint32_t table_width, s_q, h_kv, window, row_blocks;
    uint32_t step_pages, step_tokens; /* from a tile to the next: TILE over and modulo tokens_per_block */

    /* A lane's token; the lanes of the second half have those of the first. */
    struct plan {
        int32_t t;
        uint32_t page, offset;
        int32_t block; /* as the table has it */
    };

    template <int ROWS> __device__ __forceinline__ job find_job() const;
    __device__ __forceinline__ plan first(const job &j, int32_t t) const;
    __device__ __forceinline__ void next(const job &j, plan &l) const;
    __device__ __forceinline__ bool good(const job &j, const plan &l) const;
    __device__ __forceinline__ void place(const job &j, const plan &l, const uint8_t **ret_k,
                                          const uint8_t **ret_v) const;
    __device__ __forceinline__ const uint8_t *anywhere() const
    {
        return k.base;
    }
    __device__ __forceinline__ void read_table(const job &j, plan &l) const
    {
        if (l.t < j.end)
            l.block = block_table[j.seq * table_stride + l.page];
    }
    __device__ __forceinline__ bool is_block(int32_t block) const
    {
        return block >= 0 && (uint32_t)block < n_blocks;
    }
};

template <int ROWS> __device__ __forceinline__ job paged::find_job() const
{
    uint32_t row_block = blockIdx.x % row_blocks, rest = blockIdx.x / row_blocks, n_rows = s_q * attend.group;
    int32_t told, len, span, range;
    bool good;
    job j;

    j.kv_head = rest % h_kv;
    rest /= h_kv;
    j.part = rest % attend.parts;
    j.seq = rest / attend.parts;
    j.token = j.seq * s_q;
    j.head = j.kv_head * attend.group;
    j.first = row_block * ROWS;
    j.n_rows = min((uint32_t)ROWS, n_rows - j.first);
    j.counts = j.first + j.n_rows == n_rows && j.kv_head == 0 && bad != nullptr;
    told = seq_len[j.seq];
    good = told >= 0 && told <= KVS_ATTEND_MAX_TOKENS && (uint64_t)told <= (uint64_t)table_width * k.tokens_per_block;
    if (!good && j.counts && j.part == 0 && threadIdx.x == 0)
        atomicAdd(bad, 1u);
    len = good ? told : 0;
    j.horizon = len - (int32_t)s_q + 1;
    j.step = 1;
    j.window = (int32_t)window;
    span = window > 0 ? max(0, j.horizon - (int32_t)window) : 0;
    range = (len - span) / (int32_t)attend.parts + ((len - span) % (int32_t)attend.parts != 0);
    /* In 64 bits: parts beyond the last token may begin beyond 2^31. */
    j.begin = (int32_t)min((int64_t)span + (int64_t)j.part * range, (int64_t)len);
    j.end = (int32_t)min((int64_t)j.begin + range, (int64_t)max(0, seen_to(attend, j, j.first + j.n_rows - 1)));
    return j;
}

/* The table is read a tile ahead, so that nobody waits for it, and the place in it moves on by additions. */
__device__ __forceinline__ paged::plan paged::first(const job &j, int32_t t) const
{
    kvs_view_place at = kvs_view_split(&k, (uint64_t)t, KVS_SITE_KV_DECODE_KEY);
    plan l = {t, (uint32_t)at.page, at.token, -1};

    read_table(j, l);
    return l;
}

__device__ __forceinline__ void paged::next(const job &j, plan &l) const
{
    l.t += min(TILE, INT32_MAX - l.t);
    l.page += step_pages;
    l.offset += step_tokens;
    if (l.offset >= kvs_view_tokens(&k, KVS_SITE_KV_DECODE_KEY)) {
        l.offset -= kvs_view_tokens(&k, KVS_SITE_KV_DECODE_KEY);
        l.page++;
    }
    read_table(j, l);
}

/* Whether this lane's token may be read.  The first of a page, or of all that are looked at, counts it if it is bad. */
__device__ __forceinline__ bool paged::good(const job &j, const plan &l) const
{
    bool wanted = l.t < j.end, ok = wanted && is_block(l.block);

    if (wanted && !ok && j.counts && threadIdx.x % 32 < LOAD && (l.offset == 0 || (j.part == 0 && l.t == j.begin)))
        atomicAdd(bad, 1u);
    return ok;
}

__device__ __forceinline__ void paged::place(const job &j, const plan &l, const uint8_t **ret_k,
                                             const uint8_t **ret_v) const
{
    *ret_k = kvs_view_row(&k, (uint32_t)l.block, l.offset, KVS_SITE_KV_DECODE_KEY) + j.kv_head * k_head;
    *ret_v = kvs_view_row(&v, (uint32_t)l.block, l.offset, KVS_SITE_KV_DECODE_VALUE) + j.kv_head * v_head;
}

/* ---- launches ---- */

uint32_t rows_of(const kvs_kv_decode_args *a)
{
    return a->s_q * (a->h_q / a->h_kv);
}

uint32_t rows_a_block(const kvs_kv_decode_args *a)
{
    return rows_of(a) <= FEW_ROWS ? SMALL_ROWS : WIDE_ROWS;
}

uint32_t row_blocks(const kvs_kv_decode_args *a)
{
    return (rows_of(a) + rows_a_block(a) - 1) / rows_a_block(a);
}

bool is_fp8(const kvs_kv_decode_args *a)
{
    return a->k.format == KVS_FORMAT_kv_fp8;
}

int attribute(cudaDeviceAttr what)
{
    int device = 0, value = 0;

    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&value, what, device) == cudaSuccess ? value
                                                                                                                : 0;
}

uint32_t shared_bytes(const kvs_kv_decode_args *a, uint32_t stages)
{
    return is_fp8(a) ? shared_layout<true>(rows_a_block(a), a->d_qk, a->d_v).bytes(stages, a->d_v)
                     : shared_layout<false>(rows_a_block(a), a->d_qk, a->d_v).bytes(stages, a->d_v);
}

uint64_t partials(const kvs_kv_decode_args *a, uint32_t parts)
{
    return parts > 1 ? (uint64_t)a->n_seqs * a->s_q * a->h_q * parts : 0;
}

/* Blocks that run at once, by shared memory. */
uint64_t resident_blocks(const kvs_kv_decode_args *a)
{
    const uint64_t room = (uint64_t)attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                   each = (uint64_t)shared_bytes(a, MAX_STAGES) + RESERVED;
    uint64_t n = room / each;

    n = n < 1 ? 1 : n > MOST_RESIDENT ? (uint64_t)MOST_RESIDENT : n;
    return n * (uint64_t)attribute(cudaDevAttrMultiProcessorCount);
}

typedef void (*kernel)(paged);

template <int ROWS, int DV> kernel pick_type(bool fp16, bool fp8)
{
    return fp8 ? (fp16 ? attend_kernel<paged, ROWS, DV, true, true> : attend_kernel<paged, ROWS, DV, false, true>)
               : (fp16 ? attend_kernel<paged, ROWS, DV, true, false> : attend_kernel<paged, ROWS, DV, false, false>);
}

template <int ROWS> kernel pick_dim(uint32_t d_v, bool fp16, bool fp8)
{
    return d_v <= 64    ? pick_type<ROWS, 64>(fp16, fp8)
           : d_v <= 128 ? pick_type<ROWS, 128>(fp16, fp8)
                        : pick_type<ROWS, 256>(fp16, fp8);
}

kernel pick(uint32_t rows, uint32_t d_v, bool fp16, bool fp8)
{
    return rows == SMALL_ROWS ? pick_dim<SMALL_ROWS>(d_v, fp16, fp8) : pick_dim<WIDE_ROWS>(d_v, fp16, fp8);
}

bool is_fp16(const kvs_kv_decode_args *a)
{
    return is_fp8(a) ? a->q_fp16 != 0 : a->k.format == KVS_FORMAT_kv_fp16;
}

/* Two stages, unless there is no room. */
kvs_status choose_stages(const kvs_kv_decode_args *a, uint32_t *ret, kvs_err *err)
{
    uint32_t most = (uint32_t)attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), stages = MAX_STAGES;

    while (stages > 1 && shared_bytes(a, stages) > most)
        stages--;
    if (shared_bytes(a, stages) > most)
        return kvs_fail(err, KVS_E_UNSUPPORTED,
                        "dimensions: %" PRIu32 " and %" PRIu32 " need %" PRIu32
                        " bytes of shared memory, the device has %" PRIu32,
                        a->d_qk, a->d_v, shared_bytes(a, stages), most);
    *ret = stages;
    return KVS_OK;
}

paged params(const kvs_kv_decode_args *a, uint32_t parts, uint32_t stages, void *workspace)
{
    uint32_t tokens = kvs_view_tokens(&a->k, KVS_SITE_KV_DECODE_KEY);
    float scale = is_fp8(a) ? a->sm_scale * a->k_scale : a->sm_scale;
    paged p = {};

    p.attend.q = a->q;
    p.attend.out = a->out;
    p.attend.lse = a->lse;
    p.attend.part_out = static_cast<float *>(workspace);
    p.attend.part_lse = p.attend.part_out + partials(a, parts) * a->d_v;
    p.attend.d_qk = a->d_qk;
    p.attend.d_v = a->d_v;
    p.attend.h_q = a->h_q;
    p.attend.group = a->h_q / a->h_kv;
    p.attend.parts = parts;
    p.attend.stages = stages;
    p.attend.cap = a->logit_cap;
    p.attend.scale = scale;
    p.attend.scale_log2 = (a->logit_cap > 0 ? a->logit_cap : scale) * 1.44269504f;
    p.attend.inverse_cap = a->logit_cap > 0 ? 1 / a->logit_cap : 0;
    p.attend.out_scale = is_fp8(a) ? a->v_scale : 1;
    p.attend.q_aligned = is_aligned(a->q, 16);
    p.attend.out_aligned = is_aligned(a->out, 4);
    p.k = a->k;
    p.v = a->v;
    p.k_head = a->k_head;
    p.v_head = a->v_head;
    p.seq_len = a->seq_len;
    p.block_table = a->block_table;
    p.table_stride = a->table_stride;
    p.n_blocks = a->k.n_blocks < a->v.n_blocks ? a->k.n_blocks : a->v.n_blocks;
    p.table_width = a->table_width;
    p.s_q = a->s_q;
    p.h_kv = a->h_kv;
    p.window =
        a->window < KVS_ATTEND_MAX_TOKENS ? a->window : (uint32_t)KVS_ATTEND_MAX_TOKENS; /* more is no window at all */
    p.row_blocks = row_blocks(a);
    p.step_pages = TILE / tokens;
    p.step_tokens = TILE % tokens;
    return p;
}

} // namespace

extern "C" kvs_status kvs_kv_decode_cuda_init(kvs_err *err)
{
    const uint32_t dims[] = {64, 128, 256}, rows[] = {SMALL_ROWS, WIDE_ROWS};
    int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    cudaFuncAttributes attributes;
    cudaError_t e = cudaSuccess;

    for (int i = 0; i < 24 && e == cudaSuccess; i++) {
        kernel f = pick(rows[i / 12], dims[i % 3], i / 3 % 2 != 0, i / 6 % 2 != 0);

        e = cudaFuncGetAttributes(&attributes, f);
        if (e == cudaSuccess)
            e = cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, merge_kernel<false>);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, merge_kernel<true>);
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(kv_decode)", e);
}

extern "C" uint32_t kvs_kv_decode_cuda_parts(const kvs_kv_decode_args *a)
{
    uint64_t longest = (uint64_t)a->table_width * a->k.tokens_per_block, parts, most, blocks;

    if (a->parts > 0)
        return a->parts;
    if (a->window > 0 && longest > (uint64_t)a->window + a->s_q - 1)
        longest = (uint64_t)a->window + a->s_q - 1;
    if (a->fixed_split)
        parts = (longest + TOKENS_A_FIXED_PART - 1) / TOKENS_A_FIXED_PART;
    else {
        blocks = (uint64_t)a->n_seqs * a->h_kv * row_blocks(a);
        most = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;
        parts = blocks > 0 ? (resident_blocks(a) * WAVES + blocks - 1) / blocks : 1;
        parts = parts < most ? parts : most;
    }
    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? (uint32_t)MAX_AUTO_PARTS : (uint32_t)parts;
}

extern "C" uint64_t kvs_kv_decode_cuda_workspace(const kvs_kv_decode_args *a)
{
    if (kvs_kv_decode_workspace(a) == 0)
        return 0; /* shapes that are refused */
    return partials(a, kvs_kv_decode_cuda_parts(a)) * (a->d_v + 1) * sizeof(float);
}

extern "C" kvs_status kvs_kv_decode_cuda(const kvs_kv_decode_args *a, void *workspace, uint64_t workspace_bytes,
                                         uint32_t *ret_bad, kvs_mla_decode_result *ret, CUstream_st *stream,
                                         kvs_err *err)
{
    kvs_status s = kvs_kv_decode_check(a, err);
    uint32_t stages = 0, parts;
    uint64_t blocks, need;
    cudaError_t e = cudaSuccess;
    paged p;

    if (s == KVS_OK)
        s = choose_stages(a, &stages, err);
    if (s != KVS_OK)
        return s;
    parts = kvs_kv_decode_cuda_parts(a);
    need = kvs_kv_decode_cuda_workspace(a);
    if (need > 0 &&
        (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 16 != 0 || workspace_bytes < need))
        return kvs_fail(err, KVS_E_LIMIT,
                        "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " at a multiple of 16 are needed",
                        workspace_bytes, workspace, need);
    blocks = (uint64_t)a->n_seqs * a->h_kv * row_blocks(a) * parts;
    if (blocks > INT32_MAX || (uint64_t)a->n_seqs * a->s_q * a->h_q > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT,
                        "decode: %" PRIu32 " sequences of %" PRIu32 " x %" PRIu32 " rows and %" PRIu32
                        " parts need more than %d thread blocks",
                        a->n_seqs, a->s_q, a->h_q, parts, INT32_MAX);
    p = params(a, parts, stages, workspace);
    p.bad = ret_bad;
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && blocks > 0) {
        pick(rows_a_block(a), a->d_v, is_fp16(a),
             is_fp8(a))<<<(unsigned)blocks, THREADS, shared_bytes(a, stages), stream>>>(p);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess && blocks > 0 && parts > 1) {
        unsigned rows = a->n_seqs * a->s_q * a->h_q;

        if (is_fp16(a))
            merge_kernel<true><<<rows, MERGE_THREADS, 0, stream>>>(p.attend);
        else
            merge_kernel<false><<<rows, MERGE_THREADS, 0, stream>>>(p.attend);
        e = cudaGetLastError();
    }
    if (e != cudaSuccess)
        return kvs_cuda_fail(err, "kv_decode launch", e);
    *ret = kvs_mla_decode_result{parts, KVS_KERNEL_KV_DECODE_MMA, 0};
    return KVS_OK;
}
