/* indexer_write: keys of 128 values and their scales into the two arrays of a page. */
#include <math.h>
#include <string.h>

#include "kernels/indexer.h"
#include "proto/layout.h"
#include "tests/kernels/kt_numbers.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_writes.h"

static kt_shape shape(kt *k, uint64_t max_bytes)
{
    return kt_shape_random(k, KVS_FORMAT_indexer_fp8, 0, max_bytes);
}

static void make(kt *k, kt_write *w)
{
    const uint32_t type = kt_chance(k, 3) ? KVS_VALUE_FP16 : KVS_VALUE_BF16;
    const kt_source s = kt_source_make(k, w->n, 256, 2);
    kvs_indexer_write_args *a = kt_host(k, sizeof *a);

    for (uint32_t t = 0; t < w->n; t++)
        kt_values_fill(k, s.host + t * s.stride, type, 128);
    w->rows = s.host;
    *a = (kvs_indexer_write_args){.view = w->view,
                                  .k = kt_source_put(k, &s),
                                  .k_stride = s.stride,
                                  .slot_mapping = w->dev_slots,
                                  .n_tokens = w->n,
                                  .k_type = type,
                                  .scale_kind = kt_chance(k, 2) ? KVS_INDEXER_SCALE_UE8M0 : KVS_INDEXER_SCALE_FP32};
    w->args = a;
}

/* max(amax, 1e-4) / 448, and for ue8m0 the next power of two by the library's logarithm. */
static float scale_of(const kvs_indexer_write_args *a, const uint8_t *row)
{
    double amax = 0;
    float s;

    for (uint32_t i = 0; i < 128; i++)
        amax = fmax(amax, fabs(kt_value(row, a->k_type, i)));
    s = fmaxf((float)amax, 1e-4f) / 448.0f;
    return a->scale_kind == KVS_INDEXER_SCALE_UE8M0 ? exp2f(ceilf(log2f(s))) : s;
}

static void expect(const kt_write *w, uint32_t token, uint64_t block, uint32_t at)
{
    const kvs_indexer_write_args *a = w->args;
    const kt_shape *s = &w->pool.shape;
    const uint8_t *row = w->rows + token * a->k_stride;
    uint8_t *page = kt_page(&w->pool, s->layer, 0, block);
    const float scale = scale_of(a, row);

    for (uint32_t i = 0; i < 128; i++)
        page[(uint64_t)at * s->plane[0].row_bytes + i] = kt_quantised(kt_value(row, a->k_type, i), scale);
    memcpy(page + (uint64_t)s->tokens * s->plane[0].row_bytes + at * 4ull, &scale, sizeof scale);
}

static kvs_status launch(kt *k, void *write, kvs_err *err)
{
    kt_write *w = write;

    return KT_RUN(k, err, kvs_indexer_write(w->args, w->word, err),
                  kvs_indexer_write_cuda(w->args, w->word, k->stream, err));
}

static const kt_write_op op = {
    .shape = shape, .format = KVS_FORMAT_indexer_fp8, .make = make, .expect = expect, .launch = launch};
KT_WRITE_CASES(op)

/* Every finite bf16 and fp16 as the maximum of a key: the exponent's bits round up as the library's logarithm does. */
static bool every_maximum(kt *k)
{
    static const uint32_t types[] = {KVS_VALUE_BF16, KVS_VALUE_FP16};

    for (int t = 0; t < 2; t++)
        for (uint32_t h = 0; h < (types[t] == KVS_VALUE_BF16 ? 0x7F80u : 0x7C00u); h++) {
            const uint16_t half = (uint16_t)h;
            const float amax = (float)kt_value((const uint8_t *)&half, types[t], 0), s = fmaxf(amax, 1e-4f) / 448.0f,
                        got = kvs_indexer_scale(amax, KVS_INDEXER_SCALE_UE8M0), want = exp2f(ceilf(log2f(s)));

            if (got != want)
                return kt_fail(k, "maximum %a: scale %a, not %a", (double)amax, (double)got, (double)want);
        }
    return true;
}

/* An engine's own test: 100 tokens into 16 blocks of 64 tokens, the middle one of three layers, random neighbours. */
static bool indexer_k_quant_and_cache(kt *k)
{
    kt_shape s = kt_shape_plain(KVS_FORMAT_indexer_fp8, 0, 64, 16);

    s.n_layers = 3;
    s.layer = 1;
    for (int i = 0; i < 4; i++) /* both kinds of scale */
        if (!kt_write_shape(k, &op, &s, 100, false))
            return false;
    return true;
}

static const kt_fixed fixed[] = {KT_WRITE_FIXED,
                                 {"indexer_k_quant_and_cache on a cross-layer view", indexer_k_quant_and_cache, false},
                                 {"every 16-bit maximum", every_maximum, false}};

const kt_op kt_op_indexer_write = {.name = "indexer_write",
                                   .equality = "byte-equal",
                                   .fixed = fixed,
                                   .n_fixed = sizeof fixed / sizeof *fixed,
                                   .random = random_shape,
                                   .n_cpu = 300,
                                   .n_cuda = 800,
                                   .n_subset = 12};
