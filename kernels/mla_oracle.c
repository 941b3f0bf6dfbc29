#include "kernels/mla_oracle.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/layout.h"

enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, MAX_ROW = LATENT + ROPE };

/* Both formats: sign, exponent, fraction; they differ in the widths only. */
typedef struct half_shape {
    int fraction_bits, bias, exponent_max;
} half_shape;

static half_shape shape_of(uint32_t format)
{
    return format == KVS_FORMAT_mla_fp16 ? (half_shape){10, 15, 31} : (half_shape){7, 127, 255};
}

double oracle_value(uint32_t format, uint16_t bits)
{
    half_shape f = shape_of(format);
    int exponent = (bits & 0x7FFF) >> f.fraction_bits, fraction = bits & ((1 << f.fraction_bits) - 1);
    double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;

    if (exponent == f.exponent_max)
        return fraction != 0 ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - f.bias - f.fraction_bits);
    return sign * ldexp(fraction + (1 << f.fraction_bits), exponent - f.bias - f.fraction_bits);
}

/* Walk up to the two neighbours of the value by halving the interval of magnitudes: slow and hard to get
 * wrong. */
uint16_t oracle_bits(uint32_t format, double value)
{
    half_shape f = shape_of(format);
    uint16_t sign = signbit(value) != 0 ? 0x8000 : 0, low = 0, inf = (uint16_t)(f.exponent_max << f.fraction_bits);
    uint16_t high = inf;
    double v = fabs(value), vlow, vhigh;

    if (isnan(value))
        return (uint16_t)(sign | inf | 1u << (f.fraction_bits - 1));
    while (high - low > 1) {
        uint16_t middle = (uint16_t)((low + high) / 2);

        if (oracle_value(format, middle) <= v)
            low = middle;
        else
            high = middle;
    }
    vlow = oracle_value(format, low);
    /* Infinity stands where the next number would be. */
    vhigh = high == inf ? ldexp(1.0, f.exponent_max - f.bias) : oracle_value(format, high);
    if (v - vlow > vhigh - v || (v - vlow == vhigh - v && (low & 1) != 0))
        low = high;
    return sign | low;
}

double oracle_e4m3(uint8_t bits)
{
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    double sign = (bits & 0x80) != 0 ? -1.0 : 1.0;

    if ((bits & 0x7F) == 0x7F)
        return (double)NAN;
    return exponent == 0 ? sign * ldexp(fraction, -9) : sign * ldexp(8 + fraction, exponent - 10);
}

/* 2^(code - 127). */
static double power_of_two(uint8_t code)
{
    return code == 255 ? (double)NAN : ldexp(1, code - 127);
}

/* What queries and results are made of. */
static uint32_t query_format(uint32_t format)
{
    return format == KVS_FORMAT_mla_fp16 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16;
}

static double value_at(uint32_t format, const uint8_t *row, int i)
{
    uint16_t bits;

    memcpy(&bits, row + 2 * i, sizeof bits);
    return oracle_value(query_format(format), bits);
}

static const uint8_t *operand(const kvs_strided *o, uint64_t token, uint64_t head)
{
    return o->base + token * o->token_stride + head * o->head_stride;
}

/* --- rows of the cache --- */

/* All that one answer needs; tables make it fast. */
typedef struct oracle {
    kvs_view view;
    double sm_scale, kv_scale;
    const float *sink;
    double *halves;    /* values of all 16-bit patterns */
    double bytes[256]; /* of e4m3 */
    double *rows;      /* [longest][MAX_ROW] of the unit at hand */
    bool *there;       /* [longest] */
    double *weights;   /* [longest] */
} oracle;

/* Bytes of a token in the second array of a page. */
static uint64_t tail_bytes(uint32_t format)
{
    return format == KVS_FORMAT_fp8_blk584 ? 8 : format == KVS_FORMAT_fp8_blk528 ? 16 : 0;
}

static double half_at(const oracle *o, const uint8_t *p)
{
    uint16_t bits;

    memcpy(&bits, p, sizeof bits);
    return o->halves[bits];
}

/* Value i of a token, one value at a time, as mla.h and mla_sparse.h have the formats. */
static double value_of(const oracle *o, const uint8_t *row, const uint8_t *tail, int i)
{
    float scale;

    switch (o->view.format) {
    case KVS_FORMAT_mla_fp8:
        return o->bytes[row[i]] * o->kv_scale;
    case KVS_FORMAT_fp8_ds_mla:
        if (i >= 512)
            return half_at(o, row + 528 + 2 * (i - 512));
        memcpy(&scale, row + 512 + i / 128 * 4, sizeof scale);
        return o->bytes[row[i]] * (double)scale;
    case KVS_FORMAT_fp8_blk584:
        return i < 448 ? o->bytes[row[i]] * power_of_two(tail[i / 64]) : half_at(o, row + 448 + 2 * (i - 448));
    case KVS_FORMAT_fp8_blk528:
        return o->bytes[row[i]] * power_of_two(tail[i / 32]);
    default:
        return half_at(o, row + 2 * i);
    }
}

static int dims_of(uint32_t format)
{
    return tail_bytes(format) > 0 ? LATENT : MAX_ROW;
}

/* Token `token` of block `block` becomes token t of the unit; a block outside the view: no token. */
static void take_token(const oracle *o, uint64_t t, int64_t block, uint64_t token)
{
    const uint8_t *page, *row, *tail;

    o->there[t] = block >= 0 && block < (int64_t)o->view.n_blocks;
    if (!o->there[t])
        return;
    page = o->view.base + (uint64_t)block * o->view.block_stride;
    row = page + token * o->view.row_bytes;
    tail = page + (uint64_t)o->view.tokens_per_block * o->view.row_bytes + token * tail_bytes(o->view.format);
    for (int i = 0; i < dims_of(o->view.format); i++)
        o->rows[t * MAX_ROW + (uint64_t)i] = value_of(o, row, tail, i);
}

static void oracle_open(oracle *o, const kvs_view *v, uint64_t longest)
{
    o->view = *v;
    o->halves = malloc(65536 * sizeof *o->halves);
    o->rows = malloc((longest + 1) * MAX_ROW * sizeof *o->rows);
    o->there = malloc((longest + 1) * sizeof *o->there);
    o->weights = malloc((longest + 1) * sizeof *o->weights);
    if (o->halves == NULL || o->rows == NULL || o->there == NULL || o->weights == NULL)
        abort(); /* no test can go on */
    for (uint32_t i = 0; i < 65536; i++)
        o->halves[i] = oracle_value(query_format(v->format), (uint16_t)i);
    for (uint32_t i = 0; i < 256; i++)
        o->bytes[i] = oracle_e4m3((uint8_t)i);
}

static void oracle_close(oracle *o)
{
    free(o->halves);
    free(o->rows);
    free(o->there);
    free(o->weights);
}

/* --- attention --- */

/* One query row over the unit's first `seen` tokens: the plain definition of softmax, then what the sink leaves. */
static void attend(const oracle *o, uint64_t seen, const double *q, uint32_t head, double *out, double *lse)
{
    const int dims = dims_of(o->view.format);
    double max = -(double)INFINITY, sum = 0, *weights = o->weights;

    memset(out, 0, LATENT * sizeof *out);
    for (uint64_t t = 0; t < seen; t++) {
        const double *row = o->rows + t * MAX_ROW;

        if (!o->there[t])
            continue;
        weights[t] = 0;
        for (int i = 0; i < dims; i++)
            weights[t] += q[i] * row[i];
        weights[t] *= o->sm_scale;
        max = fmax(max, weights[t]);
    }
    *lse = -(double)INFINITY;
    if (max == -(double)INFINITY)
        return;
    for (uint64_t t = 0; t < seen; t++) {
        const double *row = o->rows + t * MAX_ROW;

        if (!o->there[t])
            continue;
        weights[t] = exp(weights[t] - max);
        sum += weights[t];
        for (int i = 0; i < LATENT; i++)
            out[i] += weights[t] * row[i];
    }
    *lse = max + log(sum);
    for (int i = 0; i < LATENT; i++)
        out[i] /= sum * (o->sink != NULL ? 1 + exp((double)o->sink[head] - *lse) : 1);
}

static void read_query(uint32_t format, const uint8_t *nope, const uint8_t *pe, double q[MAX_ROW])
{
    const int n = dims_of(format) - ROPE;

    for (int i = 0; i < n; i++)
        q[i] = value_at(format, nope, i);
    for (int i = 0; i < ROPE; i++)
        q[n + i] = value_at(format, pe, i);
}

/* Tokens of a sequence into the oracle; returns how many, and counts what is bad. */
static uint64_t take_sequence(const oracle *o, const kvs_mla_decode_args *a, uint32_t seq, uint32_t *bad)
{
    int64_t len = a->seq_len[seq], page = a->view.tokens_per_block, most = a->table_width * page;

    if (len < 0 || len > most) {
        ++*bad;
        return 0;
    }
    for (int64_t t = 0; t < len; t++) {
        take_token(o, (uint64_t)t, a->block_table[seq * a->table_stride + (uint64_t)(t / page)], (uint64_t)(t % page));
        *bad += t % page == 0 && !o->there[t];
    }
    return (uint64_t)len;
}

uint32_t oracle_mla_decode(const kvs_mla_decode_args *a, double *out, double *lse)
{
    oracle o = {.sm_scale = (double)a->sm_scale, .kv_scale = a->kv_scale != NULL ? (double)*a->kv_scale : 1};
    uint64_t longest = 0;
    uint32_t bad = 0;

    for (uint32_t seq = 0; seq < a->n_seqs; seq++)
        if (a->seq_len[seq] > 0 && (uint64_t)a->seq_len[seq] <= (uint64_t)a->table_width * a->view.tokens_per_block &&
            (uint64_t)a->seq_len[seq] > longest)
            longest = (uint64_t)a->seq_len[seq];
    oracle_open(&o, &a->view, longest);
    for (uint32_t seq = 0; seq < a->n_seqs; seq++) {
        int64_t len = (int64_t)take_sequence(&o, a, seq, &bad);

        for (uint32_t j = 0; j < a->s_q; j++)
            for (uint32_t h = 0; h < a->h_q; h++) {
                uint64_t token = (uint64_t)seq * a->s_q + j, row = token * a->h_q + h;
                int64_t seen = len - a->s_q + j + 1;
                double q[MAX_ROW];

                read_query(a->view.format, operand(&a->q_nope, token, h), operand(&a->q_pe, token, h), q);
                attend(&o, seen > 0 ? (uint64_t)seen : 0, q, h, out + row * LATENT, lse + row);
            }
    }
    oracle_close(&o);
    return bad;
}

uint32_t oracle_mla_sparse(const kvs_mla_sparse_args *a, double *out, double *lse)
{
    oracle o = {.sm_scale = (double)a->sm_scale, .sink = a->sink};
    uint32_t bad = 0;

    oracle_open(&o, &a->view, a->topk);
    for (uint64_t token = 0; token < (uint64_t)a->n_seqs * a->s_q; token++) {
        int64_t len = a->topk_length != NULL ? a->topk_length[token / a->s_q] : (int64_t)a->topk;
        bool good = len >= 0 && len <= a->topk;

        bad += !good && token % a->s_q == 0;
        for (int64_t t = 0; good && t < len; t++) {
            int64_t index = a->indices[token * a->index_stride + (uint64_t)t].at, page = a->view.tokens_per_block;

            take_token(&o, (uint64_t)t, index < 0 ? -1 : index / page, index < 0 ? 0 : (uint64_t)(index % page));
            bad += index != -1 && !o.there[t];
        }
        for (uint32_t h = 0; h < a->h_q; h++) {
            uint64_t row = token * a->h_q + h;
            double q[MAX_ROW];

            read_query(a->view.format, operand(&a->q_nope, token, h), operand(&a->q_pe, token, h), q);
            attend(&o, good ? (uint64_t)len : 0, q, h, out + row * LATENT, lse + row);
        }
    }
    oracle_close(&o);
    return bad;
}

/* --- the judge --- */

static void compare_row(uint32_t format, const uint8_t *got, float got_lse, const double *want, double want_lse,
                        oracle_verdict *v)
{
    double gg = 0, ww = 0, gw = 0, error = 0;

    for (int i = 0; i < LATENT; i++) {
        double g = value_at(format, got, i);

        gg += g * g;
        ww += want[i] * want[i];
        gw += g * want[i];
        error = fmax(error, fabs(g - want[i]));
    }
    if (want_lse == -(double)INFINITY) {
        v->wrong += gg != 0 || got_lse != -INFINITY;
        return;
    }
    if (!isfinite(gg) || !isfinite(got_lse)) {
        v->wrong++;
        return;
    }
    v->lse = fmax(v->lse, fabs((double)got_lse - want_lse));
    if (ww == 0)
        v->wrong += gg != 0;
    else {
        v->cosine = fmax(v->cosine, gg > 0 ? 1 - gw / sqrt(gg * ww) : 1);
        v->max_error = fmax(v->max_error, error / sqrt(ww / LATENT));
    }
}

oracle_verdict oracle_compare_rows(uint32_t format, const kvs_strided *got, const kvs_strided *got_lse,
                                   uint64_t n_tokens, uint32_t h_q, const double *out, const double *lse)
{
    bool is_16_bit = format == KVS_FORMAT_mla_bf16 || format == KVS_FORMAT_mla_fp16;
    oracle_verdict v = {.cosine_limit = is_16_bit ? 1e-5 : 1e-4};

    for (uint64_t token = 0; token < n_tokens; token++)
        for (uint32_t h = 0; h < h_q; h++) {
            uint64_t row = token * h_q + h;
            float one;

            memcpy(&one, operand(got_lse, token, h), sizeof one);
            compare_row(format, operand(got, token, h), one, out + row * LATENT, lse[row], &v);
        }
    return v;
}

oracle_verdict oracle_compare(const kvs_mla_decode_args *a, const double *out, const double *lse)
{
    return oracle_compare_rows(a->view.format, &a->out, &a->lse, (uint64_t)a->n_seqs * a->s_q, a->h_q, out, lse);
}

bool oracle_accepts(const oracle_verdict *v, char text[ORACLE_TEXT_BYTES])
{
    (void)snprintf(text, ORACLE_TEXT_BYTES,
                   "cosine %.2e (< %.0e), error %.4f of RMS (<= 0.03), lse %.2e (<= 1e-3), "
                   "%" PRIu64 " rows wrong",
                   v->cosine, v->cosine_limit, v->max_error, v->lse, v->wrong);
    return v->cosine < v->cosine_limit && v->max_error <= 0.03 && v->lse <= 1e-3 && v->wrong == 0;
}

bool oracle_judge(const kvs_mla_decode_args *a, char text[ORACLE_TEXT_BYTES])
{
    size_t rows = (size_t)a->n_seqs * a->s_q * a->h_q;
    double *out = malloc((rows + 1) * KVS_MLA_LATENT * sizeof *out), *lse = malloc((rows + 1) * sizeof *lse);
    bool good = false;

    (void)snprintf(text, ORACLE_TEXT_BYTES, "no memory for %zu rows", rows);
    if (out != NULL && lse != NULL) {
        oracle_verdict v;

        (void)oracle_mla_decode(a, out, lse);
        v = oracle_compare(a, out, lse);
        good = oracle_accepts(&v, text);
    }
    free(out);
    free(lse);
    return good;
}
