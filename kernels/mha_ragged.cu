/* Ragged MHA on a GPU: gathered rows and launches for the kernels of attend.cuh. */
#include <cinttypes>

#include <cuda_runtime.h>

#include "kernels/attend.cuh"
#include "kernels/cuda_error.h"
#include "kernels/cuda_kernels.h"
#include "kernels/mha_ragged.h"

using namespace kvs_attend;

namespace
{

enum { BLOCK_ROWS = 64, DV = KVS_MHA_MAX_V, MAX_STAGES = 2 };

struct gathered {
    attend_params attend;
    kvs_strided k, v;
    const int32_t *q_start, *k_start;
    uint32_t *bad;
    uint32_t n_seqs, n_q, n_k, h, causal, row_blocks;

    struct plan {
        int32_t t;
        uint32_t first; /* key of the sequence */
    };

    __device__ __forceinline__ bool is_range(const int32_t *start, uint32_t i, uint32_t most) const
    {
        return start[i] >= 0 && start[i + 1] >= start[i] && (uint32_t)start[i + 1] <= most;
    }
    __device__ __forceinline__ uint32_t find_sequence(uint32_t block) const;
    __device__ __forceinline__ void count_bad() const;
    template <int ROWS> __device__ __forceinline__ job find_job() const;
    __device__ __forceinline__ plan first(const job &j, int32_t t) const
    {
        return plan{t, (uint32_t)k_start[j.seq]};
    }
    __device__ __forceinline__ void next(const job &, plan &l) const
    {
        l.t += TILE;
    }
    __device__ __forceinline__ bool good(const job &j, const plan &l) const
    {
        return l.t < j.end;
    }
    __device__ __forceinline__ void place(const job &j, const plan &l, const uint8_t **ret_k,
                                          const uint8_t **ret_v) const
    {
        const uint64_t token = (uint64_t)l.first + (uint32_t)l.t;

        *ret_k = operand_row(k, token, j.head);
        *ret_v = operand_row(v, token, j.head);
    }
    __device__ __forceinline__ const uint8_t *anywhere() const
    {
        return k.base;
    }
};

/* Row blocks of sequence i begin at (queries before it) / BLOCK_ROWS + i: room for all, whatever the bounds are. */
__device__ __forceinline__ uint32_t gathered::find_sequence(uint32_t block) const
{
    uint32_t low = 0, high = n_seqs; /* sequence `low` begins at or before `block`, `high` behind it */

    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2, before = min((uint32_t)max(q_start[middle], 0), n_q);

        if (before / BLOCK_ROWS + middle <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ void gathered::count_bad() const
{
    for (uint32_t i = threadIdx.x; i < n_seqs; i += THREADS) {
        uint32_t n = !is_range(q_start, i, n_q) + !is_range(k_start, i, n_k);

        if (n > 0)
            atomicAdd(bad, n);
    }
}

template <int ROWS> __device__ __forceinline__ job gathered::find_job() const
{
    uint32_t block = blockIdx.x % row_blocks, n_rows, row_block;
    int32_t n_keys;
    job j = {};

    if (blockIdx.x == 0 && bad != nullptr)
        count_bad();
    j.seq = find_sequence(block);
    j.head = j.kv_head = blockIdx.x / row_blocks;
    if (!is_range(q_start, j.seq, n_q))
        return j;
    n_rows = (uint32_t)(q_start[j.seq + 1] - q_start[j.seq]);
    n_keys = is_range(k_start, j.seq, n_k) ? k_start[j.seq + 1] - k_start[j.seq] : 0;
    j.token = (uint32_t)q_start[j.seq];
    row_block = block - j.token / BLOCK_ROWS - j.seq;
    if (row_block >= (n_rows + ROWS - 1) / ROWS)
        return j; /* a block too many, or a sequence without queries */
    j.first = row_block * ROWS;
    j.n_rows = min((uint32_t)ROWS, n_rows - j.first);
    j.step = causal != 0;
    j.horizon = causal ? n_keys - (int32_t)n_rows + 1 : n_keys;
    j.end = max(0, seen_to(attend, j, j.first + j.n_rows - 1));
    return j;
}

template <bool FP16> cudaError_t kernel_init()
{
    int device = 0, most = 0;
    cudaFuncAttributes attributes;
    cudaError_t e = cudaGetDevice(&device);

    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&attributes, attend_kernel<gathered, BLOCK_ROWS, DV, FP16, false>);
    if (e == cudaSuccess)
        e = cudaFuncSetAttribute(attend_kernel<gathered, BLOCK_ROWS, DV, FP16, false>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    return e;
}

uint32_t shared_bytes(const kvs_mha_ragged_args *a, uint32_t stages)
{
    return shared_layout<false>(BLOCK_ROWS, a->d_qk, a->d_v).bytes(stages, a->d_v);
}

/* Two stages, unless there is no room. */
kvs_status choose_stages(const kvs_mha_ragged_args *a, uint32_t *ret, kvs_err *err)
{
    int device = 0, most = 0;
    uint32_t stages = MAX_STAGES;

    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
        most = 0;
    while (stages > 1 && shared_bytes(a, stages) > (uint32_t)most)
        stages--;
    if (shared_bytes(a, stages) > (uint32_t)most)
        return kvs_fail(err, KVS_E_UNSUPPORTED,
                        "dimensions: %" PRIu32 " and %" PRIu32 " need %" PRIu32
                        " bytes of shared memory, the device has %d",
                        a->d_qk, a->d_v, shared_bytes(a, stages), most);
    *ret = stages;
    return KVS_OK;
}

gathered params(const kvs_mha_ragged_args *a, uint32_t stages)
{
    gathered p = {};

    p.attend.q = a->q;
    p.attend.out = a->out;
    p.attend.lse = a->lse;
    p.attend.d_qk = a->d_qk;
    p.attend.d_v = a->d_v;
    p.attend.h_q = a->h;
    p.attend.group = 1;
    p.attend.parts = 1;
    p.attend.stages = stages;
    p.attend.scale = a->sm_scale;
    p.attend.scale_log2 = a->sm_scale * 1.44269504f;
    p.attend.out_scale = 1;
    p.attend.q_aligned = is_aligned(a->q, 16);
    p.attend.out_aligned = is_aligned(a->out, 4);
    p.k = a->k;
    p.v = a->v;
    p.q_start = a->q_start;
    p.k_start = a->k_start;
    p.n_seqs = a->n_seqs;
    p.n_q = a->n_q;
    p.n_k = a->n_k;
    p.h = a->h;
    p.causal = a->causal;
    return p;
}

} // namespace

extern "C" kvs_status kvs_mha_ragged_cuda_init(kvs_err *err)
{
    cudaError_t e = kernel_init<false>();

    if (e == cudaSuccess)
        e = kernel_init<true>();
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cudaFuncGetAttributes(mha_ragged)", e);
}

extern "C" kvs_status kvs_mha_ragged_cuda(const kvs_mha_ragged_args *a, uint32_t *ret_bad, CUstream_st *stream,
                                          kvs_err *err)
{
    uint64_t row_blocks = (uint64_t)a->n_q / BLOCK_ROWS + a->n_seqs, blocks;
    kvs_status s = kvs_mha_ragged_check(a, err);
    uint32_t stages = 0;
    cudaError_t e = cudaSuccess;
    gathered p;

    if (s == KVS_OK)
        s = choose_stages(a, &stages, err);
    if (s != KVS_OK)
        return s;
    blocks = row_blocks * a->h;
    if (row_blocks > INT32_MAX || blocks > INT32_MAX)
        return kvs_fail(err, KVS_E_LIMIT,
                        "mha: %" PRIu32 " queries of %" PRIu32 " heads in %" PRIu32
                        " sequences need more than %d thread blocks",
                        a->n_q, a->h, a->n_seqs, INT32_MAX);
    p = params(a, stages);
    p.bad = ret_bad;
    p.row_blocks = (uint32_t)row_blocks;
    if (ret_bad != nullptr)
        e = cudaMemsetAsync(ret_bad, 0, sizeof *ret_bad, stream);
    if (e == cudaSuccess && a->n_seqs > 0) {
        if (a->is_fp16)
            attend_kernel<gathered, BLOCK_ROWS, DV, true, false>
                <<<(unsigned)blocks, THREADS, shared_bytes(a, stages), stream>>>(p);
        else
            attend_kernel<gathered, BLOCK_ROWS, DV, false, false>
                <<<(unsigned)blocks, THREADS, shared_bytes(a, stages), stream>>>(p);
        e = cudaGetLastError();
    }
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "mha_ragged launch", e);
}
