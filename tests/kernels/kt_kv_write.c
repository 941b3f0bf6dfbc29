/* kv_write: keys and values of several heads into pages of any order: NHD, HND, K and V interleaved. */
#include <math.h>
#include <string.h>

#include "kernels/kv_write.h"
#include "proto/layout.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_writes.h"

enum order { NHD, HND, INTERLEAVED };

/* The geometry of a case, chosen in `fit` and needed in `make`: it travels in the shape's planes and here. */
typedef struct geometry {
    uint32_t n_heads, k_dim, v_dim, k_format, v_format, order;
} geometry;
static geometry now;
static const geometry *forced; /* by a fixed case; NULL: any */

static uint32_t value_of(uint32_t format)
{
    return format == KVS_FORMAT_kv_fp8 ? 1 : 2;
}

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    return kt_shape_random(k, KVS_FORMAT_kv_bf16, 16, max_bytes / 16);
}

static uint64_t up(uint64_t n, uint64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Row pitch, head pitch and page of one side. */
static void fit_plane(kt *k, kt_plane *p, uint32_t format, uint32_t tokens, uint32_t dim)
{
    const uint64_t row = (uint64_t)dim * value_of(format);

    p->format = format;
    p->row_bytes = (uint32_t)up(now.order == NHD ? row * now.n_heads : row, 16) + 16 * (uint32_t)rnd_below(&k->r, 2);
    p->page_bytes = (uint64_t)p->row_bytes * tokens * (now.order == NHD ? 1 : now.n_heads) + 16 * rnd_below(&k->r, 3);
}

/* Heads and dims of any size, K and V in two planes with nothing in common, or side by side in one. */
static void fit(kt *k, kt_shape *s)
{
    static const uint32_t heads[] = {1, 2, 3, 8}, dims[] = {64, 80, 128, 256, 8, 33, 1},
                          formats[] = {KVS_FORMAT_kv_bf16, KVS_FORMAT_kv_fp16, KVS_FORMAT_kv_fp8};
    const bool copies = kt_chance(k, 2);

    now.n_heads = KT_PICK(k, heads);
    now.k_dim = KT_PICK(k, dims);
    now.v_dim = kt_chance(k, 2) ? now.k_dim : KT_PICK(k, dims);
    now.k_format = copies ? formats[rnd_below(&k->r, 2)] : KVS_FORMAT_kv_fp8;
    now.v_format = kt_chance(k, 2) ? now.k_format : KVS_FORMAT_kv_fp8;
    now.order = (uint32_t)rnd_below(&k->r, 3);
    if (forced != NULL)
        now = *forced;
    if (now.order == INTERLEAVED) { /* the V view begins inside the K view's rows: at a multiple of 16 */
        now.v_dim = now.k_dim = (uint32_t)up(now.k_dim, 16);
        now.v_format = now.k_format;
    }
    s->n_planes = now.order == INTERLEAVED ? 1 : 2;
    fit_plane(k, &s->plane[0], now.k_format, s->tokens, now.order == INTERLEAVED ? 2 * now.k_dim : now.k_dim);
    if (s->n_planes == 2)
        fit_plane(k, &s->plane[1], now.v_format, s->tokens, now.v_dim);
}

/* Source rows [n][heads][dim], heads apart by a pitch of their own. */
static kvs_strided source(kt *k, kt_write *w, uint32_t dim, uint32_t type, const float *scale, uint32_t n_scales,
                          uint64_t *ret_host)
{
    const uint32_t bytes = kvs_value_bytes(type);
    const uint64_t head = up((uint64_t)dim * bytes, kt_chance(k, 2) ? 16 : bytes) + bytes * 8 * rnd_below(&k->r, 2);
    const kt_source s = kt_source_make(k, w->n, head * (now.n_heads - 1) + (uint64_t)dim * bytes, bytes);

    for (uint32_t t = 0; t < w->n; t++)
        for (uint32_t h = 0; h < now.n_heads; h++)
            if (kt_chance(k, 3))
                kt_values_near(k, s.host + t * s.stride + h * head, type, dim, scale[n_scales > 1 ? h : 0]);
            else
                kt_values_fill(k, s.host + t * s.stride + h * head, type, dim);
    *ret_host = (uint64_t)(uintptr_t)s.host;
    return (kvs_strided){kt_source_put(k, &s), s.stride, head};
}

static const float *scales(kt *k, uint32_t n, uint64_t *ret_host)
{
    float *s = kt_host(k, n * sizeof *s);

    for (uint32_t i = 0; i < n; i++)
        s[i] = (float)(0.01 + rnd_real(&k->r) * rnd_real(&k->r));
    if (kt_chance(k, 8)) /* any scale at all: tiny, huge, none */
        rnd_bytes(&k->r, s, n * sizeof *s);
    *ret_host = (uint64_t)(uintptr_t)s;
    return kt_in(k, s, n * sizeof *s);
}

static void make(kt *k, kt_write *w)
{
    const kt_shape *s = &w->pool.shape;
    const bool both_fp8 = now.k_format == KVS_FORMAT_kv_fp8 && now.v_format == KVS_FORMAT_kv_fp8;
    const uint32_t type = both_fp8                             ? KVS_VALUE_BF16 + (uint32_t)rnd_below(&k->r, 3)
                          : now.k_format == KVS_FORMAT_kv_fp16 ? KVS_VALUE_FP16
                                                               : KVS_VALUE_BF16;
    kvs_kv_write_args *a = kt_host(k, sizeof *a);
    const uint32_t n_scales = (a->head_scales = kt_chance(k, 2)) ? now.n_heads : 1;

    a->k.view = w->view;
    a->v.view = s->n_planes == 2 ? kt_view(k, &w->pool, s->layer, 1) : w->view;
    if (s->n_planes == 1) {
        const uint64_t side = (uint64_t)now.k_dim * value_of(now.k_format);

        a->v.view.base += side;
        a->v.view.page_bytes -= side;
        kt_mutate(k, &a->v.view, kt_plane_offset(&w->pool, s->layer, 0) + side);
    }
    a->k.head_stride =
        now.order == NHD ? (uint64_t)now.k_dim * value_of(now.k_format) : (uint64_t)s->plane[0].row_bytes * s->tokens;
    a->v.head_stride = now.order == NHD ? (uint64_t)now.v_dim * value_of(now.v_format)
                                        : (uint64_t)s->plane[s->n_planes - 1].row_bytes * s->tokens;
    a->k.dim = now.k_dim;
    a->v.dim = now.v_dim;
    a->k.scale = scales(k, n_scales, &w->extra[2]);
    a->v.scale = scales(k, n_scales, &w->extra[3]);
    a->k.src = source(k, w, now.k_dim, type, (const float *)(uintptr_t)w->extra[2], n_scales, &w->extra[0]);
    a->v.src = source(k, w, now.v_dim, type, (const float *)(uintptr_t)w->extra[3], n_scales, &w->extra[1]);
    a->slot_mapping = w->dev_slots;
    a->n_tokens = w->n;
    a->n_heads = now.n_heads;
    a->src_type = type;
    w->args = a;
}

/* One side of a token, head by head. */
static void expect_side(const kvs_kv_write_args *a, const kvs_kv_side *d, const uint8_t *src, const float *scale,
                        uint8_t *row, uint32_t token)
{
    for (uint32_t h = 0; h < a->n_heads; h++) {
        const uint8_t *from = src + token * d->src.token_stride + h * d->src.head_stride;
        uint8_t *to = row + h * d->head_stride;

        if (d->view.format != KVS_FORMAT_kv_fp8)
            memcpy(to, from, 2ull * d->dim);
        for (uint32_t i = 0; d->view.format == KVS_FORMAT_kv_fp8 && i < d->dim; i++)
            to[i] = kt_quantised(kt_value(from, a->src_type, i), scale[a->head_scales ? h : 0]);
    }
}

static void expect(const kt_write *w, uint32_t token, uint64_t block, uint32_t at)
{
    const kvs_kv_write_args *a = w->args;
    const kt_shape *s = &w->pool.shape;
    uint8_t *k_row = kt_row(&w->pool, s->layer, 0, block, at),
            *v_row = s->n_planes == 2 ? kt_row(&w->pool, s->layer, 1, block, at)
                                      : k_row + (uint64_t)a->k.dim * value_of(a->k.view.format);

    expect_side(a, &a->k, (const uint8_t *)(uintptr_t)w->extra[0], (const float *)(uintptr_t)w->extra[2], k_row, token);
    expect_side(a, &a->v, (const uint8_t *)(uintptr_t)w->extra[1], (const float *)(uintptr_t)w->extra[3], v_row, token);
}

static kvs_status launch(kt *k, void *write, kvs_err *err)
{
    kt_write *w = write;

    return KT_RUN(k, err, kvs_kv_write(w->args, w->word, err), kvs_kv_write_cuda(w->args, w->word, k->stream, err));
}

static const kt_write_op op = {.shape = shape,
                               .fit = fit,
                               .format = KVS_FORMAT_kv_bf16,
                               .row_bytes = 16,
                               .make = make,
                               .expect = expect,
                               .launch = launch};
KT_WRITE_CASES(op)

/* An engine's own test: 8 heads of 64, 80 and 256 values, 8, 16 and 32 tokens a page, tokens or heads first, on the
 * middle one of three layers; fp8 with one scale or one a head. */
static bool reshape(kt *k, uint32_t format)
{
    static const uint32_t dims[] = {64, 80, 256}, tokens[] = {8, 16, 32};
    bool good = true;

    for (uint32_t i = 0; i < 3 * 3 * 2 && good; i++) {
        const geometry g = {8, dims[i % 3], dims[i % 3], format, format, i / 9};
        kt_shape s = kt_shape_plain(format, 16, tokens[i / 3 % 3], 9);

        s.n_layers = 3;
        s.layer = 1;
        forced = &g;
        good = kt_write_shape(k, &op, &s, 42, false);
        forced = NULL;
    }
    return good;
}

static bool reshape_bf16(kt *k)
{
    return reshape(k, KVS_FORMAT_kv_bf16);
}

static bool reshape_fp16(kt *k)
{
    return reshape(k, KVS_FORMAT_kv_fp16);
}

static bool reshape_fp8(kt *k)
{
    return reshape(k, KVS_FORMAT_kv_fp8);
}

/* Quotients on the edge between two e4m3, for every fraction that a 16-bit value can have: a kernel that does not
 * divide but multiplies must round as if it did.  A head has a scale that puts one value on an edge, or a few units beside it. */
enum { EDGE_HEADS = 1024, EDGE_DIM = 32, EDGE_UNITS = 7, EDGES = 16 };

static bool edges(kt *k, uint32_t type)
{
    const uint32_t fractions = type == KVS_VALUE_BF16 ? 128 : 1024, n_cases = fractions * EDGES * EDGE_UNITS;
    const uint64_t row = EDGE_HEADS * EDGE_DIM;
    const int64_t slot = 0;
    uint8_t *x = kt_host(k, 2 * row), *dev_x = kt_alloc(k, 2 * row);
    float *scale = kt_host(k, EDGE_HEADS * sizeof *scale), *dev_scale = kt_alloc(k, EDGE_HEADS * sizeof *scale);
    kt_buf page = kt_buf_make(k, "page", 2 * row);
    kvs_view v = {page.dev, row, row, 1, 1, (uint32_t)row, KVS_FORMAT_kv_fp8};
    kvs_kv_side side = {v, EDGE_DIM, {dev_x, 2 * row, 2 * EDGE_DIM}, dev_scale, EDGE_DIM};
    kt_write w = {.word = kt_word(k)};
    kvs_kv_write_args a = {side, side, kt_in(k, &slot, sizeof slot), 1, EDGE_HEADS, type, 1};

    a.v.view.base += row;
    w.args = &a;
    for (uint32_t first = 0; first < n_cases; first += EDGE_HEADS) {
        kvs_err err = {.msg = ""};

        for (uint32_t h = 0; h < EDGE_HEADS; h++) {
            const uint32_t i = (first + h) % n_cases;
            const double value = 1 + (double)(i / (EDGES * EDGE_UNITS)) / fractions,
                         edge = 1 + (i / EDGE_UNITS % EDGES) / 16.0;
            uint32_t bits;

            scale[h] = (float)(value / edge);
            memcpy(&bits, &scale[h], sizeof bits);
            bits += i % EDGE_UNITS - EDGE_UNITS / 2;
            memcpy(&scale[h], &bits, sizeof bits);
            for (uint32_t e = 0; e < EDGE_DIM; e++) /* the same edge of other powers of two */
                kt_value_set(x + 2ull * h * EDGE_DIM, type, e,
                             (float)ldexp(e % 2 ? value : -value, (int)(e % 20) - 11));
            for (uint32_t e = 0; e < EDGE_DIM; e++)
                page.want[h * EDGE_DIM + e] = page.want[row + h * EDGE_DIM + e] =
                    kt_quantised(kt_value(x + 2ull * h * EDGE_DIM, type, e), scale[h]);
        }
        kt_put(k, dev_x, x, 2 * row);
        kt_put(k, dev_scale, scale, EDGE_HEADS * sizeof *scale);
        if (launch(k, &w, &err) != KVS_OK)
            return kt_fail(k, "%s", err.msg);
        if (!kt_same(k, &page))
            return false;
    }
    return true;
}

static bool edges_bf16(kt *k)
{
    return edges(k, KVS_VALUE_BF16);
}

static bool edges_fp16(kt *k)
{
    return edges(k, KVS_VALUE_FP16);
}

static const kt_fixed fixed[] = {KT_WRITE_FIXED,
                                 {"every bf16 on every edge of e4m3", edges_bf16, true},
                                 {"every fp16 on every edge of e4m3", edges_fp16, true},
                                 {"reshape_and_cache_flash, bf16", reshape_bf16, false},
                                 {"reshape_and_cache_flash, fp16", reshape_fp16, false},
                                 {"reshape_and_cache_flash, fp8", reshape_fp8, false}};

const kt_op kt_op_kv_write = {.name = "kv_write",
                              .equality = "byte-equal",
                              .fixed = fixed,
                              .n_fixed = sizeof fixed / sizeof *fixed,
                              .random = random_shape,
                              .n_cpu = 300,
                              .n_cuda = 600,
                              .n_subset = 12};
