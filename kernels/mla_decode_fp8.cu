/* MLA decode of mla_fp8 and fp8_ds_mla on a GPU: rows by a block table, widened to bf16 in shared memory. */
#include "kernels/mla_launch.cuh"
#include "kernels/mla_quantised.cuh"
#include "kernels/mla_table.cuh"

namespace
{

/* The rows of a sequence, a row of each tile for this thread. */
struct table_source {
    load_plan plan;
    bool counts;

    template <int ROWS> static __device__ __forceinline__ job find_job(const attend_params &p)
    {
        return ::find_job<ROWS>(p);
    }
    static __device__ __forceinline__ uint32_t seen_by(const attend_params &p, const job &j, uint32_t row)
    {
        return min(::seen_by(p, j, row), j.end);
    }
    __device__ __forceinline__ table_source(const attend_params &p, const job &j, uint32_t tid)
        : plan(first_load(p, j, tid)), counts(j.counts && tid % LOADERS == 0)
    {
    }
    __device__ __forceinline__ record_place place(const attend_params &p, const job &j) const
    {
        bool wanted = plan.t < j.end, ok = wanted && plan.block >= 0 && (uint32_t)plan.block < p.view.n_blocks;

        if (wanted && !ok && counts && plan.offset == 0)
            atomicAdd(p.bad, 1u);
        if (!ok)
            return {nullptr, nullptr};
        return {kvs_view_row(&p.view, (uint32_t)plan.block, plan.offset, p.site), nullptr};
    }
    __device__ __forceinline__ void next(const attend_params &p, const job &j)
    {
        next_load(p, j, plan);
    }
};

} // namespace

cudaError_t mla_decode_fp8_init()
{
    cudaError_t e = quantised_init_all<KVS_FORMAT_mla_fp8, table_source>();

    return e == cudaSuccess ? quantised_init_all<KVS_FORMAT_fp8_ds_mla, table_source>() : e;
}

int mla_decode_fp8_wide_bytes()
{
    return quantised_shape<WIDE, record<KVS_FORMAT_fp8_ds_mla>>::BYTES;
}

cudaError_t mla_decode_fp8_launch(const attend_params &p, uint32_t rows, uint64_t blocks, cudaStream_t stream)
{
    return p.view.format == KVS_FORMAT_mla_fp8
               ? quantised_launch<KVS_FORMAT_mla_fp8, table_source>(p, rows, blocks, stream)
               : quantised_launch<KVS_FORMAT_fp8_ds_mla, table_source>(p, rows, blocks, stream);
}
