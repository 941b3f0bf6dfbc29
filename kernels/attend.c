#include "kernels/attend.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "kernels/mla.h"
#include "kernels/numeric.h"

enum { ALIGN = 64 };

static uint64_t round_up(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

uint64_t attend_bytes(uint32_t max_rows, uint32_t d_qk, uint32_t d_v)
{
    uint64_t rows = max_rows;

    return ALIGN + round_up(rows * d_qk * sizeof(float)) + 2 * round_up(rows * d_v * sizeof(float)) +
           3 * round_up(rows * sizeof(float)) + 2 * round_up(rows * sizeof(int64_t)) +
           round_up((uint64_t)ATTEND_TILE * d_qk * sizeof(float)) +
           round_up((uint64_t)ATTEND_TILE * d_v * sizeof(float));
}

static void *take(uint8_t **at, uint64_t bytes)
{
    uint8_t *p = *at;

    *at += round_up(bytes);
    return p;
}

void attend_open(attend_group *g, void *memory, uint32_t n_rows, uint32_t d_qk, uint32_t d_v)
{
    uint8_t *at = (uint8_t *)(((uintptr_t)memory + ALIGN - 1) & ~(uintptr_t)(ALIGN - 1));
    uint64_t rows = n_rows;

    g->n_rows = n_rows;
    g->d_qk = d_qk;
    g->d_v = d_v;
    g->q = take(&at, rows * d_qk * sizeof(float));
    g->acc = take(&at, rows * d_v * sizeof(float));
    g->run = take(&at, rows * d_v * sizeof(float));
    g->max = take(&at, rows * sizeof(float));
    g->sum = take(&at, rows * sizeof(float));
    g->run_lse = take(&at, rows * sizeof(float));
    g->from = take(&at, rows * sizeof(int64_t));
    g->to = take(&at, rows * sizeof(int64_t));
    g->k = take(&at, (uint64_t)ATTEND_TILE * d_qk * sizeof(float));
    g->v = take(&at, (uint64_t)ATTEND_TILE * d_v * sizeof(float));
    for (uint64_t i = 0; i < rows * d_v; i++)
        g->run[i] = 0.0f;
    for (uint32_t r = 0; r < n_rows; r++)
        g->run_lse[r] = -INFINITY;
}

void attend_load(float *dst, const uint8_t *src, uint32_t n, attend_type type)
{
    uint16_t h;

    switch (type) {
    case ATTEND_E4M3:
        for (uint32_t i = 0; i < n; i++)
            dst[i] = kvs_e4m3_to_f32(src[i]);
        break;
    case ATTEND_FP16:
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&h, src + 2 * (size_t)i, sizeof h);
            dst[i] = kvs_f16_to_f32(h);
        }
        break;
    case ATTEND_BF16:
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&h, src + 2 * (size_t)i, sizeof h);
            dst[i] = kvs_bf16_to_f32(h);
        }
        break;
    }
}

void attend_store(uint8_t *dst, const float *src, uint32_t n, attend_type type)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h = type == ATTEND_FP16 ? kvs_f32_to_f16(src[i]) : kvs_f32_to_bf16(src[i]);

        memcpy(dst + 2 * (size_t)i, &h, sizeof h);
    }
}

void attend_part_begin(attend_group *g)
{
    memset(g->acc, 0, (size_t)g->n_rows * g->d_v * sizeof(float));
    for (uint32_t r = 0; r < g->n_rows; r++) {
        g->max[r] = -INFINITY;
        g->sum[r] = 0.0f;
    }
}

static float dot(const float *a, const float *b, uint32_t n)
{
    float s[ATTEND_CHAINS] = {0};

    for (uint32_t i = 0; i < n; i += ATTEND_CHAINS)
        for (uint32_t c = 0; c < ATTEND_CHAINS; c++)
            s[c] += a[i + c] * b[i + c];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* cap * tanh(x / cap), by the exponential that is the same everywhere. */
static float capped(float x, float cap)
{
    float y = x / cap, e = kvs_exp_nonpos(-2.0f * fabsf(y)), t = (1.0f - e) / (1.0f + e);

    return cap * (y < 0.0f ? -t : t);
}

/* Weights of tokens first .. last - 1 of the tile, none of the others: a value that is not finite behind a token that the
 * row may not see must not reach it, so such tokens are not multiplied by 0 but left out. */
static void row_step(attend_group *g, uint32_t r, uint32_t first, uint32_t last)
{
    float *acc = g->acc + (size_t)r * g->d_v, w[ATTEND_TILE], max = g->max[r], ref, rescale, sum = 0.0f;

    for (uint32_t t = first; t < last; t++) {
        w[t] = -INFINITY;
        if (!g->has[t])
            continue;
        w[t] = dot(g->q + (size_t)r * g->d_qk, g->k + (size_t)t * g->d_qk, g->d_qk) * g->scale;
        if (g->cap > 0.0f)
            w[t] = capped(w[t], g->cap);
        max = w[t] > max ? w[t] : max;
    }
    ref = max == -INFINITY ? 0.0f : max; /* nothing seen yet: weights of 0, not of inf - inf */
    rescale = kvs_exp_nonpos(g->max[r] - ref);
    for (uint32_t i = 0; i < g->d_v; i++)
        acc[i] *= rescale;
    for (uint32_t t = first; t < last; t++) {
        const float *v = g->v + (size_t)t * g->d_v;

        if (!g->has[t])
            continue;
        w[t] = kvs_exp_nonpos(w[t] - ref);
        sum += w[t];
        for (uint32_t i = 0; i < g->d_v; i++)
            acc[i] += w[t] * v[i];
    }
    g->sum[r] = g->sum[r] * rescale + sum;
    g->max[r] = max;
}

void attend_tile(attend_group *g, int64_t t0, uint32_t n)
{
    for (uint32_t r = 0; r < g->n_rows; r++) {
        int64_t first = g->from[r] - t0, last = g->to[r] - t0;

        first = first < 0 ? 0 : first;
        last = last > n ? n : last;
        if (first < last)
            row_step(g, r, (uint32_t)first, (uint32_t)last);
    }
}

void attend_part_end(attend_group *g)
{
    for (uint32_t r = 0; r < g->n_rows; r++) {
        float *acc = g->acc + (size_t)r * g->d_v;

        if (g->sum[r] == 0.0f)
            continue; /* saw nothing */
        for (uint32_t i = 0; i < g->d_v; i++)
            acc[i] /= g->sum[r];
        kvs_merge_states(g->run + (size_t)r * g->d_v, &g->run_lse[r], acc, g->max[r] + (float)log((double)g->sum[r]),
                         g->d_v);
    }
}
