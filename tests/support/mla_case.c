#include "tests/support/mla_case.h"

#include <stdlib.h>
#include <string.h>

#include "proto/layout.h"
#include "kernels/mla_oracle.h"
#include "tests/support/mla_token.h"
#include "tests/support/random.h"

enum { VALUE = 2, LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE };

static uint32_t or_else(uint32_t value, uint32_t standard)
{
    return value != 0 ? value : standard;
}

static void fill_shape(mla_shape *s)
{
    s->format = or_else(s->format, KVS_FORMAT_mla_bf16);
    s->n_layers = or_else(s->n_layers, 1);
    s->tokens_per_block = or_else(s->tokens_per_block, 16);
    s->n_seqs = or_else(s->n_seqs, 1);
    s->s_q = or_else(s->s_q, 1);
    s->h_q = or_else(s->h_q, 1);
    s->q_scale = s->q_scale > 0 ? s->q_scale : 1;
}

static uint32_t pages_of(const mla_shape *s, uint32_t seq)
{
    int32_t len = s->len[seq];

    return len <= 0 ? 0 : ((uint32_t)len + s->tokens_per_block - 1) / s->tokens_per_block;
}

void mla_case_put(const mla_case *c, uint8_t *row, uint32_t i, double value)
{
    uint16_t bits = oracle_bits(c->shape.format, value);

    memcpy(row + (uint64_t)i * VALUE, &bits, sizeof bits);
}

uint8_t *mla_case_row(const mla_case *c, uint32_t seq, uint32_t token)
{
    const kvs_view *v = &c->args.view;
    int32_t block = c->table[seq * c->args.table_stride + token / v->tokens_per_block];

    /* Not kvs_view_row: the data must not follow a mistake of what is tested. */
    return v->base + (uint64_t)block * v->block_stride + (uint64_t)(token % v->tokens_per_block) * v->row_bytes;
}

static rnd stream(const mla_case *c, uint64_t kind, uint64_t i, uint64_t j)
{
    rnd r = {c->shape.seed * 1000003 + kind};

    r.state = rnd_u64(&r) ^ (i * UINT64_C(0x9E3779B97F4A7C15) + j);
    r.state = rnd_u64(&r);
    return r;
}

static bool pool_init(mla_case *c, uint32_t n_blocks)
{
    const mla_shape *s = &c->shape;
    uint32_t pitch = mla_token_row_bytes(s->format) + s->row_pad;
    uint64_t page = (uint64_t)s->tokens_per_block * pitch + s->page_pad, slot = page * s->n_layers + s->slot_pad;

    c->pool_bytes = slot * n_blocks;
    c->pool = aligned_alloc(16, c->pool_bytes + 16);
    if (c->pool == NULL)
        return false;
    memset(c->pool, 0xFF, c->pool_bytes + 16);
    c->args.view = (kvs_view){c->pool + page * s->layer, slot, page, n_blocks, s->tokens_per_block, pitch, s->format};
    return true;
}

static bool tables_init(mla_case *c, uint32_t n_blocks)
{
    const mla_shape *s = &c->shape;
    rnd r = stream(c, 1, n_blocks, s->n_layers);
    uint32_t width = 0, next = 0;
    int32_t *order = malloc((n_blocks + 1) * sizeof *order);

    for (uint32_t i = 0; i < s->n_seqs; i++)
        width = pages_of(s, i) > width ? pages_of(s, i) : width;
    c->args.table_width = width + s->table_spare;
    c->args.table_stride = c->args.table_width + 3;
    c->lens = malloc(s->n_seqs * sizeof *c->lens);
    c->table = malloc(s->n_seqs * c->args.table_stride * sizeof *c->table);
    if (order == NULL || c->lens == NULL || c->table == NULL) {
        free(order);
        return false;
    }
    for (uint32_t b = 0; b < n_blocks; b++) {
        uint32_t at = s->block_order ? b : (uint32_t)rnd_below(&r, b + 1);

        order[b] = (int32_t)b;
        order[b] = order[at];
        order[at] = (int32_t)b;
    }
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        c->lens[i] = s->len[i];
        for (uint64_t p = 0; p < c->args.table_stride; p++)
            c->table[i * c->args.table_stride + p] =
                p < pages_of(s, i) ? order[next++] : (int32_t)(uint32_t)rnd_u64(&r);
    }
    free(order);
    c->args.seq_len = c->lens;
    c->args.block_table = c->table;
    return true;
}

static bool operands_init(mla_case *c)
{
    const mla_shape *s = &c->shape;
    kvs_mla_decode_args *a = &c->args;
    uint64_t n = (uint64_t)s->n_seqs * s->s_q, pad = (uint64_t)s->operand_pad * VALUE;
    uint64_t latent = LATENT * VALUE + pad, rope = ROPE * VALUE + pad, one = sizeof(float) * (1 + s->operand_pad);

    a->q_nope = (kvs_strided){NULL, latent * s->h_q + pad, latent};
    a->q_pe = (kvs_strided){NULL, rope * s->h_q + pad, rope};
    a->out = a->q_nope;
    a->lse = (kvs_strided){NULL, one * s->h_q, one};
    c->out_bytes = a->out.token_stride * n;
    c->lse_bytes = a->lse.token_stride * n;
    c->workspace_bytes = kvs_mla_decode_workspace(a);
    c->q_nope = malloc(a->q_nope.token_stride * n);
    c->q_pe = malloc(a->q_pe.token_stride * n);
    c->out = malloc(c->out_bytes + 2 * MLA_CASE_GUARD);
    c->lse = malloc(c->lse_bytes + 2 * MLA_CASE_GUARD);
    c->workspace = malloc(c->workspace_bytes + 2 * MLA_CASE_GUARD);
    c->untouched_out = malloc(c->out_bytes + 2 * MLA_CASE_GUARD);
    c->untouched_lse = malloc(c->lse_bytes + 2 * MLA_CASE_GUARD);
    if (c->q_nope == NULL || c->q_pe == NULL || c->out == NULL || c->lse == NULL || c->workspace == NULL ||
        c->untouched_out == NULL || c->untouched_lse == NULL)
        return false;
    memset(c->q_nope, 0xFF, a->q_nope.token_stride * n);
    memset(c->q_pe, 0xFF, a->q_pe.token_stride * n);
    a->q_nope.base = c->q_nope;
    a->q_pe.base = c->q_pe;
    a->out.base = c->out + MLA_CASE_GUARD;
    a->lse.base = c->lse + MLA_CASE_GUARD;
    return true;
}

static void data_init(mla_case *c)
{
    const mla_shape *s = &c->shape;
    const kvs_mla_decode_args *a = &c->args;
    const uint32_t query = s->format == KVS_FORMAT_mla_fp16 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16;

    for (uint32_t i = 0; i < s->n_seqs; i++)
        for (int32_t t = 0; t < s->len[i]; t++) {
            rnd r = stream(c, 2, i, (uint64_t)t);

            mla_token_put(&r, s->format, mla_case_row(c, i, (uint32_t)t), NULL);
        }
    for (uint64_t t = 0; t < (uint64_t)s->n_seqs * s->s_q; t++)
        for (uint64_t h = 0; h < s->h_q; h++) {
            rnd nope = stream(c, 3, t, h), pe = stream(c, 4, t, h);

            mla_token_put_values(&nope, query, c->q_nope + t * a->q_nope.token_stride + h * a->q_nope.head_stride,
                                 LATENT, s->q_scale);
            mla_token_put_values(&pe, query, c->q_pe + t * a->q_pe.token_stride + h * a->q_pe.head_stride, ROPE,
                                 s->q_scale);
        }
}

bool mla_case_init(mla_case *c, const mla_shape *s)
{
    static const float kv_scale = MLA_TOKEN_KV_SCALE;
    uint32_t n_blocks;

    *c = (mla_case){.shape = *s};
    fill_shape(&c->shape);
    s = &c->shape;
    n_blocks = s->spare_blocks;
    for (uint32_t i = 0; i < s->n_seqs; i++)
        n_blocks += pages_of(s, i);
    c->args = (kvs_mla_decode_args){.n_seqs = s->n_seqs,
                                    .s_q = s->s_q,
                                    .h_q = s->h_q,
                                    .parts = s->parts,
                                    .fixed_split = s->fixed_split,
                                    .sm_scale = 0.04167f, /* 1 / sqrt(576) */
                                    .kv_scale = &kv_scale};
    if (!pool_init(c, n_blocks) || !tables_init(c, n_blocks) || !operands_init(c)) {
        mla_case_fini(c);
        return false;
    }
    data_init(c);
    return true;
}

void mla_case_fini(mla_case *c)
{
    free(c->pool);
    free(c->q_nope);
    free(c->q_pe);
    free(c->out);
    free(c->lse);
    free(c->workspace);
    free(c->untouched_out);
    free(c->untouched_lse);
    free(c->lens);
    free(c->table);
    *c = (mla_case){.pool = NULL};
}

kvs_status mla_case_run(mla_case *c, kvs_err *err)
{
    rnd r = stream(c, 5, 0, 0);

    rnd_bytes(&r, c->untouched_out, c->out_bytes + 2 * MLA_CASE_GUARD);
    rnd_bytes(&r, c->untouched_lse, c->lse_bytes + 2 * MLA_CASE_GUARD);
    memcpy(c->out, c->untouched_out, c->out_bytes + 2 * MLA_CASE_GUARD);
    memcpy(c->lse, c->untouched_lse, c->lse_bytes + 2 * MLA_CASE_GUARD);
    memset(c->workspace, 0xFF, c->workspace_bytes + 2 * MLA_CASE_GUARD);
    return kvs_mla_decode(&c->args, c->workspace + MLA_CASE_GUARD, c->workspace_bytes, &c->result, err);
}

static bool all_ff(const uint8_t *p)
{
    for (int i = 0; i < MLA_CASE_GUARD; i++)
        if (p[i] != 0xFF)
            return false;
    return true;
}

/* `bytes` at `got` are as they were but for the rows of `o`. */
static bool only_rows_changed(const mla_case *c, const kvs_strided *o, uint64_t row, const uint8_t *got,
                              const uint8_t *before, uint64_t bytes)
{
    uint64_t n = (uint64_t)c->shape.n_seqs * c->shape.s_q;
    uint8_t *expected = malloc(bytes);
    bool same = false;

    if (expected == NULL)
        return false;
    memcpy(expected, before, bytes);
    for (uint64_t t = 0; t < n; t++)
        for (uint64_t h = 0; h < c->shape.h_q; h++) {
            uint64_t at = MLA_CASE_GUARD + t * o->token_stride + h * o->head_stride;

            memcpy(expected + at, got + at, row);
        }
    same = memcmp(expected, got, bytes) == 0;
    free(expected);
    return same;
}

bool mla_case_guards_hold(const mla_case *c)
{
    return all_ff(c->workspace) && all_ff(c->workspace + MLA_CASE_GUARD + c->workspace_bytes) &&
           only_rows_changed(c, &c->args.out, LATENT * VALUE, c->out, c->untouched_out,
                             c->out_bytes + 2 * MLA_CASE_GUARD) &&
           only_rows_changed(c, &c->args.lse, sizeof(float), c->lse, c->untouched_lse,
                             c->lse_bytes + 2 * MLA_CASE_GUARD);
}

static const uint8_t *row_at(const kvs_strided *o, uint64_t t, uint64_t h)
{
    return o->base + t * o->token_stride + h * o->head_stride;
}

bool mla_case_same_bits(const mla_case *a, const mla_case *b)
{
    for (uint64_t t = 0; t < (uint64_t)a->shape.n_seqs * a->shape.s_q; t++)
        for (uint64_t h = 0; h < a->shape.h_q; h++)
            if (memcmp(row_at(&a->args.out, t, h), row_at(&b->args.out, t, h), LATENT * VALUE) != 0 ||
                memcmp(row_at(&a->args.lse, t, h), row_at(&b->args.lse, t, h), sizeof(float)) != 0)
                return false;
    return true;
}

static uint64_t mix(uint64_t hash, const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ p[i]) * UINT64_C(0x100000001B3);
    return hash;
}

uint64_t mla_case_hash(const mla_case *c)
{
    uint64_t hash = UINT64_C(0xCBF29CE484222325);

    for (uint64_t t = 0; t < (uint64_t)c->shape.n_seqs * c->shape.s_q; t++)
        for (uint64_t h = 0; h < c->shape.h_q; h++) {
            hash = mix(hash, row_at(&c->args.out, t, h), LATENT * VALUE);
            hash = mix(hash, row_at(&c->args.lse, t, h), sizeof(float));
        }
    return hash;
}
