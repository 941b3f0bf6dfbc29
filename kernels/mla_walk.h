#ifndef KVS_KERNELS_MLA_WALK_H
#define KVS_KERNELS_MLA_WALK_H

/* Walk of MLA attention in C: groups of query rows, parts, tiles, for whoever can say where a token lies.
 *
 *   unit:  |<- ceil(len / parts) ->|          |    part of the last range    |
 *   part:  | 16 tokens | 16 tokens | .. | rest |   tiles start where the part starts, wherever pages begin
 *
 * A query row meets the same tokens in the same tiles whatever the strides, the page size and the other rows
 * are: that is why its bits depend on its tokens, its length, parts and the kernel id alone.
 *
 * Knows queries, lengths and parts.  Does not know block tables or index lists.  Any thread; a walk and its scratch belong
 * to one call. */

#include "kernels/mla_tile.h"
#include "kernels/stop.h"

/* A unit is a sequence of s_q query tokens that see it causally, or one query token with a list of its own. */
typedef struct mla_walk {
    kvs_strided q_nope, q_pe, out, lse;
    uint32_t format; /* of the rows */
    uint32_t nope;   /* values of a q_nope row: 512 or 448 */
    uint32_t s_q, h_q, parts;
    float score_scale, out_scale;
    const float *sink; /* [h_q] or NULL */
    /* Row of token t of a unit, and its entry behind the page's rows if the format has one; NULL: the token is skipped. */
    const uint8_t *(*row)(const void *of, uint32_t unit, uint64_t t, const uint8_t **ret_tail);
    const void *of;
    const bool *stop; /* kernels/stop.h */
    mla_group *g;
    void (*step)(mla_group *g);
} mla_walk;

/* Bytes that mla_walk_open wants. */
uint64_t mla_walk_workspace(void);

/* Set g and step; everything else is set.  E_LIMIT: the workspace is too small. */
kvs_status mla_walk_open(mla_walk *w, void *workspace, uint64_t workspace_bytes, kvs_err *err);

/* All query rows of a unit of len tokens, into out and lse.  False: it was stopped before. */
bool mla_walk_unit(const mla_walk *w, uint32_t unit, uint64_t len);

/* Parts of parts == 0 for the longest length. */
uint32_t mla_walk_parts(uint64_t longest);

#endif
