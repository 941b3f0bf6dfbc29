#ifndef KVS_KERNELS_MLA_TABLE_CUH
#define KVS_KERNELS_MLA_TABLE_CUH

/* Where the tokens of a sequence lie, for kernels that follow a block table: what a thread block works on, and the walk
 * of a loading thread from tile to tile.
 *
 * Knows lengths, tables and parts.  Does not know what a row holds. */

#include "kernels/mla_mma.cuh"

namespace
{

__device__ __forceinline__ uint32_t seen_by(const attend_params &p, uint32_t row, uint32_t len)
{
    uint32_t hidden = p.s_q - 1 - row / p.h_q;

    return len > hidden ? len - hidden : 0;
}

template <int ROWS> __device__ __forceinline__ job find_job(const attend_params &p)
{
    uint32_t row_block = blockIdx.x % p.row_blocks, rest = blockIdx.x / p.row_blocks, range, seen;
    int32_t told;
    bool good;
    job j;

    j.part = rest % p.parts;
    j.seq = rest / p.parts;
    j.first = row_block * ROWS;
    j.n_rows = min((uint32_t)ROWS, p.rows - j.first);
    j.counts = row_block == p.row_blocks - 1 && p.bad != nullptr;
    told = p.length[j.seq];
    good = told >= 0 && (uint64_t)told <= (uint64_t)p.list_width * p.view.tokens_per_block;
    if (!good && j.counts && j.part == 0 && threadIdx.x == 0)
        atomicAdd(p.bad, 1u);
    j.len = good ? (uint32_t)told : 0;
    range = j.len / p.parts + (j.len % p.parts != 0);
    seen = seen_by(p, j.first + j.n_rows - 1, j.len);
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

__device__ __forceinline__ void read_table(const attend_params &p, const job &j, load_plan &l)
{
    if (l.t < j.end)
        l.block = p.list[j.seq * p.list_stride + l.page];
}

__device__ __forceinline__ load_plan first_load(const attend_params &p, const job &j, uint32_t tid, kvs_site site)
{
    uint32_t t = j.begin + tid / LOADERS;
    kvs_view_place at = kvs_view_split(&p.view, t, site);
    load_plan l = {t, (uint32_t)at.page, at.token, -1};

    read_table(p, j, l);
    return l;
}

__device__ __forceinline__ void next_load(const attend_params &p, const job &j, load_plan &l, kvs_site site)
{
    l.t += TILE;
    l.page += p.step_pages;
    l.offset += p.step_tokens;
    if (l.offset >= kvs_view_tokens(&p.view, site)) {
        l.offset -= kvs_view_tokens(&p.view, site);
        l.page++;
    }
    read_table(p, j, l);
}

} // namespace

#endif
