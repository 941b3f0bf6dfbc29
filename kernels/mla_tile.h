#ifndef KVS_KERNELS_MLA_TILE_H
#define KVS_KERNELS_MLA_TILE_H

/* The arithmetic of MLA decode in C: a group of query rows against a tile of 16 tokens, online softmax in
 * fp32.
 *
 * Knows numbers.  Does not know block tables, lengths or strides: mla_walk.c asks for those.
 * Any thread; a group is one call's own scratch.
 *
 * Every sum has one order, written down here: a score is (even-numbered products, ascending) + (odd-numbered
 * ones), the products of a row's values are added token by token, the weights of a tile by a fixed tree.
 * Vector width only decides how many of those chains run side by side, so all variants give the same bits. */

#include <stddef.h>
#include <stdint.h>

#include "kernels/mla.h"

enum { MLA_TILE = 16, MLA_GROUP = 64, MLA_ROW = KVS_MLA_LATENT + KVS_MLA_ROPE, MLA_VECTOR_BYTES = 64 };

/* All arrays start at multiples of 64 bytes; rows from n_rows up to the next multiple of 4 hold zeros in q.
 */
typedef struct mla_group {
    _Alignas(MLA_VECTOR_BYTES) float q[MLA_GROUP][MLA_ROW];
    float acc[MLA_GROUP][KVS_MLA_LATENT]; /* of this part, not yet divided by sum */
    float run[MLA_GROUP][KVS_MLA_LATENT]; /* merged over the parts before */
    float score[MLA_GROUP][MLA_TILE];     /* then weights */
    float tile[MLA_TILE][MLA_ROW];
    float tile_t[MLA_ROW][MLA_TILE]; /* transposed: a lane is a token */
    float max[MLA_GROUP], sum[MLA_GROUP], rescale[MLA_GROUP];
    float run_lse[MLA_GROUP];
    uint32_t visible[MLA_GROUP];   /* leading tokens of the tile that the row sees */
    const uint8_t *src[MLA_TILE];  /* rows of the cache; NULL: the token is skipped */
    const uint8_t *tail[MLA_TILE]; /* their scales, for block-wise formats */
    uint32_t n_rows, n_tokens;
    uint32_t format; /* of the rows; all but mla_bf16 and mla_fp16 go through mla_record.h */
    uint32_t is_fp16;
    float sm_scale;
} mla_group;

typedef struct mla_tile_variant {
    const char *name;
    void (*step)(mla_group *g); /* take src[0..n_tokens) into max, sum and acc */
} mla_tile_variant;

/* Those that this machine can run, the fastest first; the last one runs everywhere. */
size_t mla_tile_variants(const mla_tile_variant **ret);

#endif
