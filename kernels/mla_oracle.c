#include "kernels/mla_oracle.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/layout.h"

enum { ROW = KVS_MLA_LATENT + KVS_MLA_ROPE };

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

static double value_at(uint32_t format, const uint8_t *row, int i)
{
    uint16_t bits;

    memcpy(&bits, row + 2 * i, sizeof bits);
    return oracle_value(format, bits);
}

static const uint8_t *row_of(const kvs_mla_decode_args *a, uint32_t seq, uint64_t token)
{
    int32_t block = a->block_table[seq * a->table_stride + token / a->view.tokens_per_block];

    if (block < 0 || (uint32_t)block >= a->view.n_blocks)
        return NULL;
    return a->view.base + (uint64_t)block * a->view.block_stride + token % a->view.tokens_per_block * a->view.row_bytes;
}

/* One query row over `seen` tokens: the plain definition of softmax.  values: of all 16-bit patterns. */
static void attend(const kvs_mla_decode_args *a, const double *values, double *weights, uint32_t seq, uint64_t seen,
                   const double *q, double *out, double *lse)
{
    double max = -(double)INFINITY, sum = 0;
    uint16_t bits[ROW];

    memset(out, 0, KVS_MLA_LATENT * sizeof *out);
    for (uint64_t t = 0; t < seen; t++) {
        weights[t] = -(double)INFINITY;
        if (row_of(a, seq, t) == NULL)
            continue;
        memcpy(bits, row_of(a, seq, t), sizeof bits);
        weights[t] = 0;
        for (int i = 0; i < ROW; i++)
            weights[t] += q[i] * values[bits[i]];
        weights[t] *= (double)a->sm_scale;
        max = fmax(max, weights[t]);
    }
    *lse = -(double)INFINITY;
    if (max == -(double)INFINITY)
        return;
    for (uint64_t t = 0; t < seen; t++) {
        if (row_of(a, seq, t) == NULL)
            continue;
        memcpy(bits, row_of(a, seq, t), sizeof bits);
        weights[t] = exp(weights[t] - max);
        sum += weights[t];
        for (int i = 0; i < KVS_MLA_LATENT; i++)
            out[i] += weights[t] * values[bits[i]];
    }
    for (int i = 0; i < KVS_MLA_LATENT; i++)
        out[i] /= sum;
    *lse = max + log(sum);
}

static uint64_t length_of(const kvs_mla_decode_args *a, uint32_t seq, uint32_t *bad)
{
    int64_t len = a->seq_len[seq], most = (int64_t)a->table_width * a->view.tokens_per_block;

    if (len < 0 || len > most) {
        ++*bad;
        return 0;
    }
    for (int64_t t = 0; t < len; t += a->view.tokens_per_block)
        *bad += row_of(a, seq, (uint64_t)t) == NULL;
    return (uint64_t)len;
}

static const uint8_t *operand(const kvs_strided *o, uint64_t token, uint64_t head)
{
    return o->base + token * o->token_stride + head * o->head_stride;
}

/* The query rows of one sequence. */
static void sequence(const kvs_mla_decode_args *a, const double *values, double *weights, uint32_t seq, uint64_t len,
                     double *out, double *lse)
{
    for (uint32_t j = 0; j < a->s_q; j++)
        for (uint32_t h = 0; h < a->h_q; h++) {
            uint64_t token = (uint64_t)seq * a->s_q + j, row = token * a->h_q + h;
            int64_t seen = (int64_t)len - a->s_q + j + 1;
            double q[ROW];

            for (int i = 0; i < KVS_MLA_LATENT; i++)
                q[i] = value_at(a->view.format, operand(&a->q_nope, token, h), i);
            for (int i = 0; i < KVS_MLA_ROPE; i++)
                q[KVS_MLA_LATENT + i] = value_at(a->view.format, operand(&a->q_pe, token, h), i);
            attend(a, values, weights, seq, seen > 0 ? (uint64_t)seen : 0, q, out + row * KVS_MLA_LATENT, lse + row);
        }
}

uint32_t oracle_mla_decode(const kvs_mla_decode_args *a, double *out, double *lse)
{
    double *values = malloc(65536 * sizeof *values);
    double *weights = malloc(((uint64_t)a->table_width * a->view.tokens_per_block + 1) * sizeof *weights);
    uint32_t bad = 0;

    if (values == NULL || weights == NULL)
        abort(); /* no test can go on */
    for (uint32_t i = 0; i < 65536; i++)
        values[i] = oracle_value(a->view.format, (uint16_t)i);
    for (uint32_t seq = 0; seq < a->n_seqs; seq++)
        sequence(a, values, weights, seq, length_of(a, seq, &bad), out, lse);
    free(values);
    free(weights);
    return bad;
}

static void compare_row(const kvs_mla_decode_args *a, const uint8_t *got, float got_lse, const double *want,
                        double want_lse, oracle_verdict *v)
{
    double gg = 0, ww = 0, gw = 0, error = 0;

    for (int i = 0; i < KVS_MLA_LATENT; i++) {
        double g = value_at(a->view.format, got, i);

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
        v->max_error = fmax(v->max_error, error / sqrt(ww / KVS_MLA_LATENT));
    }
}

oracle_verdict oracle_compare(const kvs_mla_decode_args *a, const double *out, const double *lse)
{
    oracle_verdict v = {0, 0, 0, 0};

    for (uint64_t token = 0; token < (uint64_t)a->n_seqs * a->s_q; token++)
        for (uint32_t h = 0; h < a->h_q; h++) {
            uint64_t row = token * a->h_q + h;
            float got_lse;

            memcpy(&got_lse, operand(&a->lse, token, h), sizeof got_lse);
            compare_row(a, operand(&a->out, token, h), got_lse, out + row * KVS_MLA_LATENT, lse[row], &v);
        }
    return v;
}

bool oracle_accepts(const oracle_verdict *v, char text[ORACLE_TEXT_BYTES])
{
    (void)snprintf(text, ORACLE_TEXT_BYTES,
                   "cosine %.2e (< 1e-5), error %.4f of RMS (<= 0.03), lse %.2e (<= 1e-3), "
                   "%" PRIu64 " rows wrong",
                   v->cosine, v->max_error, v->lse, v->wrong);
    return v->cosine < 1e-5 && v->max_error <= 0.03 && v->lse <= 1e-3 && v->wrong == 0;
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
