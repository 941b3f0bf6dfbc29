#ifndef KVS_KERNELS_BLOCK_SUM_H
#define KVS_KERNELS_BLOCK_SUM_H

/* A checksum of a block that a GPU and a processor make at the speed of their memory, and of which both make the same.
 *
 * The bytes are little-endian 64-bit words w[0..n), the last one filled up with zeros.  With G = 0x9E3779B97F4A7C15 and
 * all arithmetic modulo 2^64:
 *
 *   x[i]  = w[i] ^ (i + 1) * G                    the place goes in: swapped words give another sum
 *   sum   = sum over i of low32(x[i]) * high32(x[i]) + x[i]
 *   block = finish(sum ^ bytes * G)               finish: the mixer of MurmurHash3, a bijection
 *
 * A term is (low + 2^32) * (high + 1) - 2^32, so a change within one half of a word always changes the sum; any other
 * change goes unseen with a chance of about 2^-64.  Addition commutes: words may be taken in any order, by any number
 * of lanes.  Against mistakes, not against attackers.
 *
 * Knows views.  Any thread; all memory is the caller's. */

#include "kernels/view.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;

#define KVS_SUM_STEP UINT64_C(0x9E3779B97F4A7C15)

/* Term of word w at place i. */
static inline KVS_HD uint64_t kvs_sum_term(uint64_t w, uint64_t i)
{
    const uint64_t x = w ^ (i + 1) * KVS_SUM_STEP;

    return (x & 0xFFFFFFFFu) * (x >> 32) + x;
}

static inline KVS_HD uint64_t kvs_sum_finish(uint64_t sum, uint64_t bytes)
{
    uint64_t h = sum ^ bytes * KVS_SUM_STEP;

    h = (h ^ h >> 33) * UINT64_C(0xFF51AFD7ED558CCD);
    h = (h ^ h >> 33) * UINT64_C(0xC4CEB9FE1A85EC53);
    return h ^ h >> 33;
}

/* Of any bytes, by one thread of a processor. */
uint64_t kvs_sum(const void *p, uint64_t bytes);

/* Sums of blocks.
 *   view      of any format; page_bytes of each block are summed (a whole slot: base at slot 0, page_bytes the slot)
 *   blocks    [n] int32 ids; negative: skipped
 *   sums      [n] uint64; 0 for a block that was skipped
 *   ret_bad   ids that are not below n_blocks: skipped and counted here */
typedef struct kvs_block_sum_args {
    kvs_view view;
    const int32_t *blocks;
    uint64_t *sums;
    uint32_t n;
} kvs_block_sum_args;
kvs_status kvs_block_sum(const kvs_block_sum_args *a, uint32_t *ret_bad, kvs_err *err);

/* The same on a GPU: every pointer is device memory; queued on `stream`, waits for nothing.  ret_bad: one word of
 * device memory, set by the call; NULL: not counted. */
kvs_status kvs_block_sum_cuda(const kvs_block_sum_args *a, uint32_t *ret_bad, struct CUstream_st *stream, kvs_err *err);

/* What both sides check before they touch memory. */
kvs_status kvs_block_sum_check(const kvs_block_sum_args *a, kvs_err *err);

/* The ways in which kvs_sum can be computed here, the one in use first; all give the same. */
typedef struct kvs_sum_variant {
    const char *name;
    uint64_t (*words)(const uint8_t *p, uint64_t n_words); /* sum of the terms */
} kvs_sum_variant;
uint32_t kvs_sum_variants(const kvs_sum_variant **ret);

#ifdef __cplusplus
}
#endif
#endif
