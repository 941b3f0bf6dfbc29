#include "tests/kernels/kt_attend.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "tests/kernels/kt_device.h"
#include "tests/kernels/kt_numbers.h"

enum { BIG_FLOP = 1000000 /* the other oracle is worth its launch */ };

/* Sign, exponent, fraction: the types differ in the widths. */
typedef struct fields {
    int bytes, fraction_bits, exponent_bits, bias;
} fields;

static fields fields_of(kt_type type)
{
    static const fields all[] = {[KT_BF16] = {2, 7, 8, 127}, [KT_FP16] = {2, 10, 5, 15}, [KT_E4M3] = {1, 3, 4, 7}};

    return all[type];
}

uint32_t kt_type_bytes(kt_type type)
{
    return (uint32_t)fields_of(type).bytes;
}

static double value_of(kt_type type, uint16_t bits)
{
    return type == KT_BF16 ? kt_bf16_value(bits) : type == KT_FP16 ? kt_fp16_value(bits) : kt_e4m3_value((uint8_t)bits);
}

/* Values of all bits of a type, made at its first use. */
static const double *values_of(kt_type type)
{
    static double all[3][65536];
    static bool made[3];
    const uint32_t n = 1u << 8 * kt_type_bytes(type);

    for (uint32_t i = 0; !made[type] && i < n; i++)
        all[type][i] = value_of(type, (uint16_t)i);
    made[type] = true;
    return all[type];
}

static inline uint32_t bits_at(const uint8_t *p, uint32_t bytes, uint64_t i)
{
    uint16_t half;

    if (bytes == 1)
        return p[i];
    memcpy(&half, p + 2 * i, sizeof half); /* little-endian, as all that we run on */
    return half;
}

double kt_attend_value(kt_type type, const uint8_t *p, uint64_t i)
{
    return values_of(type)[bits_at(p, kt_type_bytes(type), i)];
}

rnd kt_stream(uint64_t seed, uint64_t kind, uint64_t i, uint64_t j)
{
    rnd r = {seed * 1000003 + kind};

    r.state = rnd_u64(&r) ^ (i * UINT64_C(0x9E3779B97F4A7C15) + j);
    r.state = rnd_u64(&r);
    return r;
}

/* Any bits, with the exponent moved to where numbers near 1 are: all fractions, signs and some small numbers.  16 random
 * bits a value. */
void kt_attend_fill(rnd r, kt_type type, uint8_t *p, uint32_t n, double scale)
{
    const fields f = fields_of(type);
    const uint32_t up = (uint32_t)(f.bias + (int)lround(log2(scale))), fractions = (1u << f.fraction_bits) - 1;

    for (uint32_t i = 0; i < n;) {
        uint64_t x = rnd_u64(&r);

        for (uint32_t k = 0; k < 4 && i < n; k++, i++, x >>= 16) {
            const uint32_t rest = (uint32_t)(x & 0xFFFF) >> (f.fraction_bits + 1);
            /* 1..2 with a chance of 1/2, then ever smaller: variance near 1. */
            const uint32_t down = (uint32_t)__builtin_ctz(rest | 1u << 5);
            const uint16_t bits = (uint16_t)((x >> f.fraction_bits & 1) << (f.fraction_bits + f.exponent_bits) |
                                             (up - down) << f.fraction_bits | (x & fractions));

            if (f.bytes == 1)
                p[i] = (uint8_t)bits;
            else
                memcpy(p + 2 * (uint64_t)i, &bits, sizeof bits);
        }
    }
}

bool kt_attend_is_big(const kt_attention *a)
{
    uint64_t flop = 0;

    for (uint32_t r = 0; r < a->n_rows; r++)
        flop += (a->rows[r].to - a->rows[r].from) * 2 * (a->d_qk + a->d_v);
    return flop > BIG_FLOP;
}

/* One row over its tokens: the plain definition of softmax. */
static void attend_row(const kt_attention *a, const double *values, uint32_t r, double *weights, double *out,
                       double *lse)
{
    const kt_query *row = &a->rows[r];
    const double *q = a->q + (uint64_t)r * a->d_qk;
    const uint32_t bytes = kt_type_bytes(a->cache);
    double max = -(double)INFINITY, sum = 0;

    memset(out, 0, a->d_v * sizeof *out);
    *lse = -(double)INFINITY;
    for (uint64_t t = row->from; t < row->to; t++) {
        double s = 0;

        if (a->k[t] == NULL)
            continue;
        for (uint32_t i = 0; i < a->d_qk; i++) {
            s += q[i] * values[bits_at(a->k[t] + row->k_off, bytes, i)];
        }
        s *= a->scale;
        weights[t - row->from] = a->cap > 0 ? a->cap * tanh(s / a->cap) : s;
        max = fmax(max, weights[t - row->from]);
    }
    if (max == -(double)INFINITY)
        return;
    for (uint64_t t = row->from; t < row->to; t++) {
        double w;

        if (a->k[t] == NULL)
            continue;
        w = exp(weights[t - row->from] - max);
        sum += w;
        for (uint32_t i = 0; i < a->d_v; i++) {
            out[i] += w * values[bits_at(a->v[t] + row->v_off, bytes, i)];
        }
    }
    for (uint32_t i = 0; i < a->d_v; i++)
        out[i] *= a->v_scale / sum;
    *lse = max + log(sum);
}

void kt_attend(kt *k, const kt_attention *a, double *out, double *lse)
{
    double *weights = kt_host(k, (a->n_tokens + 1) * sizeof *weights);

    for (uint32_t r = 0; r < a->n_rows; r++)
        attend_row(a, values_of(a->cache), r, weights, out + (uint64_t)r * a->d_v, lse + r);
}

void kt_attend_cuda(kt *k, const kt_attention *a, double *out, double *lse)
{
#ifdef KVS_CUDA
    const uint64_t values = (uint64_t)a->n_rows * a->d_v, scores = (uint64_t)a->n_rows * a->n_tokens;
    double *dev_out = kt_alloc(k, (values + 1) * sizeof *out), *dev_lse = kt_alloc(k, (a->n_rows + 1) * sizeof *lse);
    kt_attention dev = *a;

    if (a->n_rows == 0)
        return;
    dev.rows = kt_in(k, a->rows, a->n_rows * sizeof *a->rows);
    dev.q = kt_in(k, a->q, (uint64_t)a->n_rows * a->d_qk * sizeof *a->q);
    dev.k = kt_in(k, (const void *)a->k, a->n_tokens * sizeof *a->k);
    dev.v = kt_in(k, (const void *)a->v, a->n_tokens * sizeof *a->v);
    if (!kt_attend_launch(&dev, kt_alloc(k, (scores + 1) * sizeof(double)), dev_out, dev_lse, k->stream))
        kt_die("the oracle's launch was refused");
    kt_get(k, out, dev_out, values * sizeof *out);
    kt_get(k, lse, dev_lse, a->n_rows * sizeof *lse);
#else
    (void)k, (void)a, (void)out, (void)lse;
    kt_die("built without CUDA");
#endif
}

typedef struct verdict {
    double cosine, error, lse;
} verdict;

/* false: empty here and not there, or not finite. */
static bool compare_row(const kt_attention *a, kt_type type, const uint8_t *got, float got_lse, const double *want,
                        double want_lse, verdict *v)
{
    double gg = 0, ww = 0, gw = 0, error = 0;

    for (uint32_t i = 0; i < a->d_v; i++) {
        const double g = kt_attend_value(type, got, i);

        gg += g * g;
        ww += want[i] * want[i];
        gw += g * want[i];
        error = fmax(error, fabs(g - want[i]));
    }
    if (want_lse == -(double)INFINITY)
        return gg == 0 && got_lse == -INFINITY;
    if (!isfinite(gg) || !isfinite(got_lse) || ww == 0)
        return false;
    *v = (verdict){gg > 0 ? 1 - gw / sqrt(gg * ww) : 1, error / sqrt(ww / a->d_v), fabs((double)got_lse - want_lse)};
    return true;
}

bool kt_judge(kt *k, const kt_attention *a, kt_type type, const uint8_t *const *out_at, const uint8_t *const *lse_at,
              const double *out, const double *lse)
{
    const double most = a->cache == KT_E4M3 ? 1e-4 : 1e-5;

    for (uint32_t r = 0; r < a->n_rows; r++) {
        verdict v = {0, 0, 0};
        float got;
        bool sane;

        memcpy(&got, lse_at[r], sizeof got);
        sane = compare_row(a, type, out_at[r], got, out + (uint64_t)r * a->d_v, lse[r], &v);
        if (!sane || v.cosine >= most || v.error > 0.03 || v.lse > 1e-3)
            return kt_fail(k,
                           "row %u, tokens %" PRIu64 "..%" PRIu64 ": %s, cosine %.2e (< %.0e), error %.4f of RMS "
                           "(<= 0.03), lse %.2e (<= 1e-3): %g, not %g",
                           r, a->rows[r].from, a->rows[r].to, sane ? "differs" : "empty or not finite", v.cosine, most,
                           v.error, v.lse, (double)got, lse[r]);
        kt_error(k, v.error);
    }
    return true;
}
