/* Walk of MLA decode: sequences, groups of query rows, parts, tiles.
 *
 *   sequence:  |<- ceil(len / parts) ->|          |    part of the last range    |
 *   part:      | 16 tokens | 16 tokens | .. | rest |   tiles start where the part starts, wherever pages
 * begin
 *
 * A query row meets the same tokens in the same tiles whatever the strides, the page size and the other rows
 * are: that is why its bits depend on its tokens, its length, parts and the kernel id alone. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/mla_check.h"
#include "kernels/mla_tile.h"
#include "kernels/mla_walk.h"
#include "kernels/numeric.h"
#include "proto/layout.h"

enum {
    TOKENS_A_PART = 1024, /* of parts == 0 */
    MAX_AUTO_PARTS = 64,
};

typedef struct walk {
    const kvs_mla_decode_args *a;
    mla_group *g;
    void (*step)(mla_group *g);
    uint32_t parts;
    kvs_site site;
} walk;

uint64_t kvs_mla_decode_workspace(const kvs_mla_decode_args *a)
{
    if (a->s_q < 1 || a->s_q > KVS_MLA_MAX_SQ || a->h_q < 1 || a->h_q > KVS_MLA_MAX_HEADS ||
        a->parts > KVS_MLA_MAX_PARTS)
        return 0;
    return sizeof(mla_group) + MLA_VECTOR_BYTES - 1; /* parts are merged as they come; the rest is for alignment */
}

static uint64_t pages_of(const kvs_mla_decode_args *a, uint64_t n_tokens)
{
    return (n_tokens + a->view.tokens_per_block - 1) / a->view.tokens_per_block;
}

static const int32_t *table_row(const kvs_mla_decode_args *a, uint32_t seq)
{
    return a->table_width > 0 ? a->block_table + seq * a->table_stride : NULL;
}

static int is_good_length(const kvs_mla_decode_args *a, int32_t len)
{
    return len >= 0 && (uint64_t)len <= (uint64_t)a->table_width * a->view.tokens_per_block;
}

static int is_good_block(const kvs_mla_decode_args *a, int32_t block)
{
    return block >= 0 && (uint32_t)block < a->view.n_blocks;
}

uint32_t mla_walk_parts(const kvs_mla_decode_args *a)
{
    uint64_t longest = a->fixed_split ? (uint64_t)a->table_width * a->view.tokens_per_block : 0, parts;

    if (a->parts > 0)
        return a->parts;
    for (uint32_t i = 0; i < a->n_seqs && !a->fixed_split; i++)
        if (is_good_length(a, a->seq_len[i]) && (uint64_t)a->seq_len[i] > longest)
            longest = (uint64_t)a->seq_len[i];
    parts = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;
    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? MAX_AUTO_PARTS : (uint32_t)parts;
}

/* Lengths and table entries that the walk will skip; stays at the largest number rather than wrapping. */
static uint32_t count_bad(const kvs_mla_decode_args *a)
{
    uint64_t bad = 0;

    for (uint32_t i = 0; i < a->n_seqs; i++) {
        const int32_t *row = table_row(a, i);
        uint64_t n = 0;

        if (is_good_length(a, a->seq_len[i]))
            n = pages_of(a, (uint64_t)a->seq_len[i]);
        else
            bad++;
        for (uint64_t p = 0; p < n; p++)
            bad += !is_good_block(a, row[p]);
    }
    return bad > UINT32_MAX ? UINT32_MAX : (uint32_t)bad;
}

static void load_values(float *dst, const uint8_t *src, uint32_t n, uint32_t is_fp16)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;

        memcpy(&h, src + 2 * (size_t)i, sizeof h);
        dst[i] = is_fp16 ? kvs_f16_to_f32(h) : kvs_bf16_to_f32(h);
    }
}

static void store_values(uint8_t *dst, const float *src, uint32_t n, uint32_t is_fp16)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h = is_fp16 ? kvs_f32_to_f16(src[i]) : kvs_f32_to_bf16(src[i]);

        memcpy(dst + 2 * (size_t)i, &h, sizeof h);
    }
}

static uint8_t *at(const kvs_strided *o, uint64_t token, uint64_t head)
{
    return o->base + token * o->token_stride + head * o->head_stride;
}

/* Rows first..first + n_rows of the s_q * h_q rows of sequence seq, head running fastest. */
static void group_open(const walk *w, uint32_t seq, uint32_t first, uint32_t n_rows)
{
    mla_group *g = w->g;

    g->n_rows = n_rows;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint64_t token = (uint64_t)seq * w->a->s_q + (first + r) / w->a->h_q, head = (first + r) % w->a->h_q;

        load_values(g->q[r], at(&w->a->q_nope, token, head), KVS_MLA_LATENT, g->is_fp16);
        load_values(g->q[r] + KVS_MLA_LATENT, at(&w->a->q_pe, token, head), KVS_MLA_ROPE, g->is_fp16);
        memset(g->run[r], 0, sizeof g->run[r]);
        g->run_lse[r] = -INFINITY;
    }
    for (uint32_t r = n_rows; r % 4 != 0; r++)
        memset(g->q[r], 0, sizeof g->q[r]);
}

static void group_store(const walk *w, uint32_t seq, uint32_t first)
{
    const mla_group *g = w->g;

    for (uint32_t r = 0; r < g->n_rows; r++) {
        uint64_t token = (uint64_t)seq * w->a->s_q + (first + r) / w->a->h_q, head = (first + r) % w->a->h_q;

        store_values(at(&w->a->out, token, head), g->run[r], KVS_MLA_LATENT, g->is_fp16);
        memcpy(at(&w->a->lse, token, head), &g->run_lse[r], sizeof(float));
    }
}

/* How many of the sequence's tokens row r of the group sees. */
static uint64_t seen_by(const walk *w, uint32_t first, uint32_t r, uint64_t len)
{
    uint64_t hidden = w->a->s_q - 1 - (first + r) / w->a->h_q;

    return len > hidden ? len - hidden : 0;
}

static void tile_run(const walk *w, uint32_t seq, uint32_t first, uint64_t len, uint64_t t0, uint64_t end)
{
    const kvs_view *v = &w->a->view;
    const int32_t *row = table_row(w->a, seq);
    mla_group *g = w->g;

    g->n_tokens = end - t0 < MLA_TILE ? (uint32_t)(end - t0) : MLA_TILE;
    for (uint32_t i = 0; i < MLA_TILE; i++) {
        uint64_t t = t0 + i;
        kvs_view_place at = kvs_view_split(v, t, w->site);
        int32_t block = i < g->n_tokens ? row[at.page] : -1;

        g->src[i] = is_good_block(w->a, block) ? kvs_view_row(v, (uint32_t)block, at.token, w->site) : NULL;
    }
    for (uint32_t r = 0; r < g->n_rows; r++) {
        uint64_t seen = seen_by(w, first, r, len);

        seen = seen > t0 ? seen - t0 : 0;
        g->visible[r] = seen < g->n_tokens ? (uint32_t)seen : g->n_tokens;
    }
    w->step(g);
}

/* Tokens begin..end of the sequence, then into the running state. */
static void part_run(const walk *w, uint32_t seq, uint32_t first, uint64_t len, uint64_t begin, uint64_t end)
{
    mla_group *g = w->g;

    for (uint32_t r = 0; r < g->n_rows; r++) {
        memset(g->acc[r], 0, sizeof g->acc[r]);
        g->max[r] = -INFINITY;
        g->sum[r] = 0.0f;
    }
    for (uint64_t t0 = begin; t0 < end; t0 += MLA_TILE)
        tile_run(w, seq, first, len, t0, end);
    for (uint32_t r = 0; r < g->n_rows; r++) {
        if (g->sum[r] == 0.0f)
            continue; /* saw nothing */
        for (uint32_t i = 0; i < KVS_MLA_LATENT; i++)
            g->acc[r][i] /= g->sum[r];
        kvs_merge_states(g->run[r], &g->run_lse[r], g->acc[r], g->max[r] + (float)log((double)g->sum[r]),
                         KVS_MLA_LATENT);
    }
}

static void sequence_run(const walk *w, uint32_t seq)
{
    int32_t told = w->a->seq_len[seq];
    uint64_t len = is_good_length(w->a, told) ? (uint64_t)told : 0;
    uint64_t range = (len + w->parts - 1) / w->parts;
    uint32_t rows = w->a->s_q * w->a->h_q;

    for (uint32_t first = 0; first < rows; first += MLA_GROUP) {
        uint32_t n_rows = rows - first < MLA_GROUP ? rows - first : MLA_GROUP;
        uint64_t seen = seen_by(w, first, n_rows - 1, len); /* the last row sees the most */

        group_open(w, seq, first, n_rows);
        for (uint64_t begin = 0; begin < seen; begin += range) {
            uint64_t end = begin + range;

            part_run(w, seq, first, len, begin, end < seen ? end : seen);
        }
        group_store(w, seq, first);
    }
}

uint32_t mla_walk_run(const kvs_mla_decode_args *a, uint32_t parts, kvs_site site, void *workspace)
{
    const mla_tile_variant *variants;
    walk w = {.a = a, .parts = parts, .site = site};

    w.g = (mla_group *)(((uintptr_t)workspace + MLA_VECTOR_BYTES - 1) & ~(uintptr_t)(MLA_VECTOR_BYTES - 1));
    w.g->is_fp16 = a->view.format == KVS_FORMAT_mla_fp16;
    w.g->sm_scale = a->sm_scale;
    (void)mla_tile_variants(&variants);
    w.step = variants[0].step;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        sequence_run(&w, i);
    return count_bad(a);
}

kvs_status kvs_mla_decode(const kvs_mla_decode_args *a, void *workspace, uint64_t workspace_bytes,
                          kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_status s = kvs_mla_decode_check(a, err);
    uint32_t parts;

    if (s != KVS_OK)
        return s;
    if (workspace == NULL || workspace_bytes < kvs_mla_decode_workspace(a))
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " are needed", workspace_bytes,
                        workspace, kvs_mla_decode_workspace(a));
    parts = mla_walk_parts(a);
    *ret =
        (kvs_mla_decode_result){parts, KVS_KERNEL_MLA_DECODE_C, mla_walk_run(a, parts, KVS_SITE_MLA_DECODE, workspace)};
    return KVS_OK;
}
