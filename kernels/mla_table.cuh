#ifndef KVS_KERNELS_MLA_TABLE_CUH
#define KVS_KERNELS_MLA_TABLE_CUH

/* Where the tokens of a sequence lie, for kernels that follow a block table: what a thread block works on, and the walk
 * of a loading thread from tile to tile.
 *
 * Knows lengths, tables and parts.  Does not know what a row holds. */

#include "kernels/mla_mma.cuh"

namespace
{

__device__ __forceinline__ uint32_t seen_by(const attend_params &p, const job &j, uint32_t row)
{
    uint32_t hidden = j.s_q - 1 - row / p.h_q;

    return j.len > hidden ? j.len - hidden : 0;
}

/* Sequence and part of this thread block; returns which block of the sequence's rows it is. */
__device__ __forceinline__ uint32_t find_rows(const attend_params &p, job &j)
{
    uint32_t rest = blockIdx.x / p.row_blocks;

    j.part = rest % p.parts;
    j.seq = rest / p.parts;
    j.s_q = p.s_q;
    j.token = j.seq * p.s_q;
    return blockIdx.x % p.row_blocks;
}

__device__ __forceinline__ bool is_range(const attend_params &p, uint32_t seq)
{
    int32_t begin = p.q_start[seq], end = p.q_start[seq + 1];

    return begin >= 0 && end >= begin && (uint32_t)end <= p.n_units;
}

/* The same for ragged queries.  Row blocks of sequence i begin at (rows before it) / ROWS + i: room for all, found by
 * halving, and a launch depends on totals alone.  A sequence whose queries are no range of the tokens gets none; q_start
 * may hold anything. */
template <int ROWS> __device__ __forceinline__ uint32_t find_ragged_rows(const attend_params &p, job &j)
{
    uint32_t block = blockIdx.x % p.row_blocks;
    uint32_t low = 0, high = p.n_seqs; /* sequence `low` begins at or before `block`, `high` behind it */
    bool good;

    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        uint32_t before = min((uint32_t)max(p.q_start[middle], 0), p.n_units);

        if ((uint64_t)before * p.h_q / ROWS + middle <= block)
            low = middle;
        else
            high = middle;
    }
    good = is_range(p, low);
    j.part = blockIdx.x / p.row_blocks;
    j.seq = low;
    j.token = good ? (uint32_t)p.q_start[low] : 0;
    j.s_q = good ? (uint32_t)(p.q_start[low + 1] - p.q_start[low]) : 0;
    return block - (uint32_t)((uint64_t)j.token * p.h_q / ROWS) - low;
}

/* Ranges of queries that no block will find. */
__device__ __forceinline__ void count_bad_ranges(const attend_params &p)
{
    for (uint32_t i = threadIdx.x; i < p.n_seqs; i += THREADS)
        if (!is_range(p, i))
            atomicAdd(p.bad, 1u);
}

template <int ROWS> __device__ __forceinline__ job find_job(const attend_params &p)
{
    uint32_t row_block, rows, range, seen;
    int32_t told;
    bool good;
    job j;

    row_block = p.q_start != nullptr ? find_ragged_rows<ROWS>(p, j) : find_rows(p, j);
    if (p.q_start != nullptr && blockIdx.x == 0 && p.bad != nullptr)
        count_bad_ranges(p);
    rows = j.s_q * p.h_q;
    j.begin = j.end = j.n_rows = 0;
    if (row_block >= (rows + ROWS - 1) / ROWS)
        return j; /* a block too many, or a sequence without queries */
    j.first = row_block * ROWS;
    j.n_rows = min((uint32_t)ROWS, rows - j.first);
    j.counts = j.first + j.n_rows == rows && p.bad != nullptr;
    told = p.length[j.seq];
    good = told >= 0 && (uint64_t)told <= (uint64_t)p.list_width * p.view.tokens_per_block;
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

__device__ __forceinline__ void read_table(const attend_params &p, const job &j, load_plan &l)
{
    if (l.t < j.end)
        l.block = p.list[j.seq * p.list_stride + l.page];
}

__device__ __forceinline__ load_plan first_load(const attend_params &p, const job &j, uint32_t tid)
{
    uint32_t t = j.begin + tid / LOADERS;
    kvs_view_place at = kvs_view_split(&p.view, t, p.site);
    load_plan l = {t, (uint32_t)at.page, at.token, -1};

    read_table(p, j, l);
    return l;
}

__device__ __forceinline__ void next_load(const attend_params &p, const job &j, load_plan &l)
{
    l.t += TILE;
    l.page += p.step_pages;
    l.offset += p.step_tokens;
    if (l.offset >= kvs_view_tokens(&p.view, p.site)) {
        l.offset -= kvs_view_tokens(&p.view, p.site);
        l.page++;
    }
    read_table(p, j, l);
}

} // namespace

#endif
