#ifndef KVS_TESTS_MLA_CASE_H
#define KVS_TESTS_MLA_CASE_H

/* A decode problem of any shape: pool, view, tables, queries, outputs with guards.  The data depend on the
 * seed, the sequence and the token alone, so that two cases that differ in their layout must give the same
 * bits.  Every byte that no kernel may use is a NaN pattern.
 *
 * Knows kernels/mla.h.  Any thread; mla_case owns its memory. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/mla.h"

enum { MLA_CASE_MAX_SEQS = 16, MLA_CASE_GUARD = 4096 };

typedef struct mla_shape {
    uint64_t seed;
    uint32_t format;            /* 0 = mla_bf16; not the block-wise ones */
    uint32_t n_layers, layer;   /* n_layers 0 = 1 */
    uint32_t tokens_per_block;  /* 0 = 16 */
    uint32_t row_pad, page_pad; /* bytes after each row and page, multiples of 16 */
    uint64_t slot_pad;          /* bytes after each slot, multiple of 16 */
    uint32_t n_seqs, s_q, h_q;  /* 0 = 1 */
    uint32_t parts, fixed_split;
    uint32_t spare_blocks; /* that no sequence uses */
    uint32_t table_spare;  /* columns past the longest length, filled with garbage */
    uint32_t operand_pad;  /* elements between the rows of q, out and lse */
    bool block_order;      /* blocks in table order, not shuffled */
    double q_scale;        /* 0 = 1 */
    int32_t len[MLA_CASE_MAX_SEQS];
} mla_shape;

typedef struct mla_case {
    mla_shape shape;
    kvs_mla_decode_args args;
    uint8_t *pool;
    uint64_t pool_bytes, out_bytes, lse_bytes, workspace_bytes;
    uint8_t *q_nope, *q_pe;
    uint8_t *out, *lse, *workspace; /* with a guard before and behind */
    uint8_t *untouched_out, *untouched_lse;
    int32_t *lens, *table;
    kvs_mla_decode_result result;
} mla_case;

/* false: out of memory. */
bool mla_case_init(mla_case *c, const mla_shape *s);
void mla_case_fini(mla_case *c);

/* Row of the cache that holds a token of a sequence, and the query rows. */
uint8_t *mla_case_row(const mla_case *c, uint32_t seq, uint32_t token);
void mla_case_put(const mla_case *c, uint8_t *row, uint32_t i, double value); /* 16-bit formats */

/* Fill outputs and workspace with NaN and random guards, then decode. */
kvs_status mla_case_run(mla_case *c, kvs_err *err);
/* Nothing but the rows of out and lse, and the inside of the workspace, was written by the last run. */
bool mla_case_guards_hold(const mla_case *c);

/* Outputs of the last runs are equal bit for bit (same T and h_q). */
bool mla_case_same_bits(const mla_case *a, const mla_case *b);
uint64_t mla_case_hash(const mla_case *c);

#endif
