#include "kernels/mla_walk.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/numeric.h"
#include "proto/layout.h"

enum {
    TOKENS_A_PART = 1024, /* of parts == 0 */
    MAX_AUTO_PARTS = 64,
};

uint64_t mla_walk_workspace(void)
{
    return sizeof(mla_group) + MLA_VECTOR_BYTES - 1; /* parts are merged as they come; the rest is for alignment */
}

kvs_status mla_walk_open(mla_walk *w, void *workspace, uint64_t workspace_bytes, kvs_err *err)
{
    const mla_tile_variant *variants;

    if (workspace == NULL || workspace_bytes < mla_walk_workspace())
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes at %p, %" PRIu64 " are needed", workspace_bytes,
                        workspace, mla_walk_workspace());
    w->g = (mla_group *)(((uintptr_t)workspace + MLA_VECTOR_BYTES - 1) & ~(uintptr_t)(MLA_VECTOR_BYTES - 1));
    w->g->format = w->format;
    w->g->is_fp16 = w->format == KVS_FORMAT_mla_fp16;
    w->g->sm_scale = w->score_scale;
    (void)mla_tile_variants(&variants);
    w->step = variants[0].step;
    return KVS_OK;
}

uint32_t mla_walk_parts(uint64_t longest)
{
    uint64_t parts = (longest + TOKENS_A_PART - 1) / TOKENS_A_PART;

    return parts < 1 ? 1 : parts > MAX_AUTO_PARTS ? MAX_AUTO_PARTS : (uint32_t)parts;
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

/* Rows first..first + n_rows of the s_q * h_q rows of a unit, head running fastest. */
static void group_open(const mla_walk *w, uint32_t unit, uint32_t first, uint32_t n_rows)
{
    mla_group *g = w->g;

    g->n_rows = n_rows;
    for (uint32_t r = 0; r < n_rows; r++) {
        uint64_t token = (uint64_t)unit * w->s_q + (first + r) / w->h_q, head = (first + r) % w->h_q;

        load_values(g->q[r], at(&w->q_nope, token, head), w->nope, g->is_fp16);
        load_values(g->q[r] + w->nope, at(&w->q_pe, token, head), KVS_MLA_ROPE, g->is_fp16);
        memset(g->q[r] + w->nope + KVS_MLA_ROPE, 0, (KVS_MLA_LATENT - w->nope) * sizeof(float));
        memset(g->run[r], 0, sizeof g->run[r]);
        g->run_lse[r] = -INFINITY;
    }
    for (uint32_t r = n_rows; r % 4 != 0; r++)
        memset(g->q[r], 0, sizeof g->q[r]);
}

/* What the scale of the values and the sink leave of a row: scale * e^lse / (e^lse + e^sink). */
static float out_factor(const mla_walk *w, uint64_t head, float lse)
{
    float x, e;

    if (w->sink == NULL)
        return w->out_scale;
    x = w->sink[head] - lse;
    e = kvs_exp_nonpos(x > 0.0f ? -x : x);
    return w->out_scale * (x > 0.0f ? e / (1.0f + e) : 1.0f / (1.0f + e));
}

static void group_store(const mla_walk *w, uint32_t unit, uint32_t first)
{
    mla_group *g = w->g;

    for (uint32_t r = 0; r < g->n_rows; r++) {
        uint64_t token = (uint64_t)unit * w->s_q + (first + r) / w->h_q, head = (first + r) % w->h_q;

        if (g->run_lse[r] != -INFINITY && (w->sink != NULL || w->out_scale != 1.0f)) {
            float factor = out_factor(w, head, g->run_lse[r]);

            for (uint32_t i = 0; i < KVS_MLA_LATENT; i++)
                g->run[r][i] *= factor;
        }
        store_values(at(&w->out, token, head), g->run[r], KVS_MLA_LATENT, g->is_fp16);
        memcpy(at(&w->lse, token, head), &g->run_lse[r], sizeof(float));
    }
}

/* How many of the unit's tokens row r of the group sees. */
static uint64_t seen_by(const mla_walk *w, uint32_t first, uint32_t r, uint64_t len)
{
    uint64_t hidden = w->s_q - 1 - (first + r) / w->h_q;

    return len > hidden ? len - hidden : 0;
}

static void tile_run(const mla_walk *w, uint32_t unit, uint32_t first, uint64_t len, uint64_t t0, uint64_t end)
{
    mla_group *g = w->g;

    g->n_tokens = end - t0 < MLA_TILE ? (uint32_t)(end - t0) : MLA_TILE;
    for (uint32_t i = 0; i < MLA_TILE; i++)
        g->src[i] = i < g->n_tokens ? w->row(w->of, unit, t0 + i, &g->tail[i]) : NULL;
    for (uint32_t r = 0; r < g->n_rows; r++) {
        uint64_t seen = seen_by(w, first, r, len);

        seen = seen > t0 ? seen - t0 : 0;
        g->visible[r] = seen < g->n_tokens ? (uint32_t)seen : g->n_tokens;
    }
    w->step(g);
}

/* Tokens begin..end of the unit, then into the running state.  False: stopped. */
static bool part_run(const mla_walk *w, uint32_t unit, uint32_t first, uint64_t len, uint64_t begin, uint64_t end)
{
    mla_group *g = w->g;

    for (uint32_t r = 0; r < g->n_rows; r++) {
        memset(g->acc[r], 0, sizeof g->acc[r]);
        g->max[r] = -INFINITY;
        g->sum[r] = 0.0f;
    }
    for (uint64_t t0 = begin; t0 < end; t0 += MLA_TILE) {
        if (kvs_is_stopped(w->stop))
            return false;
        tile_run(w, unit, first, len, t0, end);
    }
    for (uint32_t r = 0; r < g->n_rows; r++) {
        if (g->sum[r] == 0.0f)
            continue; /* saw nothing */
        for (uint32_t i = 0; i < KVS_MLA_LATENT; i++)
            g->acc[r][i] /= g->sum[r];
        kvs_merge_states(g->run[r], &g->run_lse[r], g->acc[r], g->max[r] + (float)log((double)g->sum[r]),
                         KVS_MLA_LATENT);
    }
    return true;
}

bool mla_walk_unit(const mla_walk *w, uint32_t unit, uint64_t len)
{
    uint64_t range = (len + w->parts - 1) / w->parts;
    uint32_t rows = w->s_q * w->h_q;

    for (uint32_t first = 0; first < rows; first += MLA_GROUP) {
        uint32_t n_rows = rows - first < MLA_GROUP ? rows - first : MLA_GROUP;
        uint64_t seen = seen_by(w, first, n_rows - 1, len); /* the last row sees the most */

        if (kvs_is_stopped(w->stop))
            return false;
        group_open(w, unit, first, n_rows);
        for (uint64_t begin = 0; begin < seen; begin += range) {
            uint64_t end = begin + range;

            if (!part_run(w, unit, first, len, begin, end < seen ? end : seen))
                return false;
        }
        group_store(w, unit, first);
    }
    return true;
}
