#ifndef KVS_KERNELS_ATTEND_H
#define KVS_KERNELS_ATTEND_H

/* The arithmetic of attention with heads of their own (kv_decode.c, mha_ragged.c) in C: rows of queries of one key-value
 * head against tiles of 16 tokens, online softmax in fp32.
 *
 * Knows numbers.  Does not know tables, lengths or strides: its callers walk those.  Any thread; a group is one call's own
 * scratch.
 *
 * Every sum has one order: a score is 8 chains over the dimensions, added as a tree; the values of a row are added token by
 * token; the weights of a tile one after the other.  No libm but for one logarithm a row, and no instruction set of its own:
 * equal inputs give equal bits. */

#include <stdint.h>

enum { ATTEND_TILE = 16, ATTEND_MAX_DIM = 256, ATTEND_CHAINS = 8 };

/* What the 16-bit or 8-bit values are. */
typedef enum attend_type { ATTEND_BF16, ATTEND_FP16, ATTEND_E4M3 } attend_type;

typedef struct attend_group {
    uint32_t n_rows, d_qk, d_v;
    float scale, cap;           /* scores are scale * q.k; cap * tanh(scores / cap) if cap > 0 */
    float *q, *acc, *run;       /* [n_rows][d_qk], [n_rows][d_v]: of this part, of the parts before */
    float *max, *sum, *run_lse; /* [n_rows] */
    int64_t *from, *to;         /* [n_rows] tokens that the row sees: from .. to - 1, the caller's */
    float *k, *v;               /* [ATTEND_TILE][d_qk], [d_v] */
    uint8_t has[ATTEND_TILE];   /* tokens of the tile that may be looked at */
} attend_group;

uint64_t attend_bytes(uint32_t max_rows, uint32_t d_qk, uint32_t d_v);
/* Spread a group of n_rows over memory of attend_bytes at any address. */
void attend_open(attend_group *g, void *memory, uint32_t n_rows, uint32_t d_qk, uint32_t d_v);

void attend_load(float *dst, const uint8_t *src, uint32_t n, attend_type type);
void attend_store(uint8_t *dst, const float *src, uint32_t n, attend_type type); /* not E4M3 */

void attend_part_begin(attend_group *g);
/* Tokens t0 .. t0 + n - 1, which lie in k, v and has. */
void attend_tile(attend_group *g, int64_t t0, uint32_t n);
/* Divide by the sums and merge into `run`, in the order of the calls. */
void attend_part_end(attend_group *g);

#endif
