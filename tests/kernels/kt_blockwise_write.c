/* blockwise_write: pages of 584 and 528 bytes a token from bf16 or fp32. */
#include <math.h>
#include <string.h>

#include "kernels/blockwise.h"
#include "proto/layout.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_writes.h"

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    return kt_shape_random(k, kt_chance(k, 2) ? KVS_FORMAT_fp8_blk584 : KVS_FORMAT_fp8_blk528, 0, max_bytes);
}

/* Pages are padded; the fixed shapes are of either format. */
static void fit(kt *k, kt_shape *s)
{
    kt_plane *p = &s->plane[0];
    uint64_t unit;

    if (p->format == KVS_FORMAT_fp8_blk584 && p->row_bytes == 576 && kt_chance(k, 3)) {
        p->format =
            KVS_FORMAT_fp8_blk528; /* 512 + 16 bytes fit where 576 + 8 do; the pitch may be longer than the row */
        p->page_bytes = s->tokens * (576ull + 16);
    }
    unit = p->format == KVS_FORMAT_fp8_blk584 ? 576 : 512;
    p->page_bytes = (p->page_bytes + unit - 1) / unit * unit;
}

static void make(kt *k, kt_write *w)
{
    const uint32_t type = kt_chance(k, 2) ? KVS_VALUE_FP32 : KVS_VALUE_BF16, bytes = kvs_value_bytes(type);
    const kt_source s = kt_source_make(k, w->n, 512ull * bytes, bytes);
    kvs_blockwise_write_args *a = kt_host(k, sizeof *a);

    for (uint32_t t = 0; t < w->n; t++)
        for (uint32_t i = 0; i < 512; i += 32)
            kt_values_fill(k, s.host + t * s.stride + (uint64_t)i * bytes, type, 32);
    w->rows = s.host;
    *a = (kvs_blockwise_write_args){.view = w->view,
                                    .x = kt_source_put(k, &s),
                                    .x_stride = s.stride,
                                    .slot_mapping = w->dev_slots,
                                    .n_tokens = w->n,
                                    .x_type = type};
    w->args = a;
}

/* Value `i` in bf16: its bits, as they came or rounded. */
static uint16_t bf16_of(const kvs_blockwise_write_args *a, const uint8_t *row, uint32_t i)
{
    uint16_t half;
    uint32_t whole;
    float f;

    if (a->x_type == KVS_VALUE_BF16) {
        memcpy(&half, row + 2ull * i, sizeof half);
        return half;
    }
    memcpy(&f, row + 4ull * i, sizeof f);
    memcpy(&whole, &f, sizeof whole);
    return isnan(f) ? (uint16_t)(whole >> 16 | 0x40) : kt_bf16_of(f); /* a NaN keeps its sign and payload */
}

static void expect(const kt_write *w, uint32_t token, uint64_t block, uint32_t at)
{
    const kvs_blockwise_write_args *a = w->args;
    const kt_shape *s = &w->pool.shape;
    const bool v4 = s->plane[0].format == KVS_FORMAT_fp8_blk584;
    const uint32_t quantised = v4 ? 448 : 512, tile = v4 ? 64 : 32, tail = v4 ? 8 : 16;
    const uint8_t *row = w->rows + token * a->x_stride;
    uint8_t *page = kt_page(&w->pool, s->layer, 0, block), *to = page + (uint64_t)at * s->plane[0].row_bytes,
            *codes = page + (uint64_t)s->tokens * s->plane[0].row_bytes + (uint64_t)at * tail;

    memset(codes, 0, tail);
    for (uint32_t first = 0; first < quantised; first += tile) {
        double amax = 0;
        int e;

        for (uint32_t i = first; i < first + tile; i++)
            amax = fmax(amax, fabs(kt_bf16_value(bf16_of(a, row, i))));
        e = isinf(amax) ? 128 : (int)ceilf(log2f(fmaxf((float)amax, 1e-4f) / 448.0f));
        codes[first / tile] = (uint8_t)(e + 127 < 0 ? 0 : e + 127 > 255 ? 255 : e + 127);
        /* A tile with an infinity is NaN to its readers: its bytes are of 2^-127, the least factor there is. */
        for (uint32_t i = first; i < first + tile; i++)
            to[i] = kt_e4m3_of((float)ldexp(kt_bf16_value(bf16_of(a, row, i)), e == 128 ? -127 : -e));
    }
    for (uint32_t i = quantised; i < 512; i++) {
        const uint16_t half = bf16_of(a, row, i);

        memcpy(to + quantised + 2ull * (i - quantised), &half, sizeof half);
    }
}

static kvs_status launch(kt *k, void *write, kvs_err *err)
{
    kt_write *w = write;

    return KT_RUN(k, err, kvs_blockwise_write(w->args, w->word, err),
                  kvs_blockwise_write_cuda(w->args, w->word, k->stream, err));
}

static const kt_write_op op = {
    .shape = shape, .fit = fit, .format = KVS_FORMAT_fp8_blk584, .make = make, .expect = expect, .launch = launch};
KT_WRITE_CASES(op)

/* The floor of 1e-4: zeros and less get code 105, 2^-22. */
static bool zeros_have_the_floors_scale(kt *k)
{
    const float tiny[] = {0.0f, 1e-5f, 9.9e-5f};

    for (int i = 0; i < 3; i++)
        if (kvs_blockwise_code(tiny[i]) != 105)
            return kt_fail(k, "maximum %g: code %u", (double)tiny[i], kvs_blockwise_code(tiny[i]));
    if (kvs_blockwise_code(448) != 127 || kvs_blockwise_code(450) != 128 || kvs_blockwise_code(224) != 126)
        return kt_fail(k, "448, 450, 224: codes %u %u %u", kvs_blockwise_code(448), kvs_blockwise_code(450),
                       kvs_blockwise_code(224));
    return true;
}

static const kt_fixed fixed[] = {KT_WRITE_FIXED, {"zeros have the floor's scale", zeros_have_the_floors_scale, false}};

const kt_op kt_op_blockwise_write = {.name = "blockwise_write",
                                     .equality = "byte-equal",
                                     .fixed = fixed,
                                     .n_fixed = sizeof fixed / sizeof *fixed,
                                     .random = random_shape,
                                     .n_cpu = 200,
                                     .n_cuda = 400,
                                     .n_subset = 12};
