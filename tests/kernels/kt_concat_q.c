/* concat_q: two strided operands into one, bit for bit. */
#include <string.h>

#include "kernels/concat_q.h"
#include "tests/kernels/kt_ops.h"

enum { NOPE = 1024, PE = 128 };

/* An operand of any pitches, heads inside tokens or tokens inside heads, in a buffer that is compared as a whole. */
typedef struct operand {
    kt_buf buf;
    uint64_t front;
    kvs_strided at;
} operand;

static operand operand_make(kt *k, const char *name, uint32_t n_tokens, uint32_t n_heads, uint64_t row)
{
    const uint64_t step = kt_chance(k, 2) ? 16 : 2, gap = step * rnd_below(&k->r, 5);
    operand o = {.front = step * rnd_below(&k->r, 9)};
    uint64_t bytes;

    if (kt_chance(k, 2)) {
        o.at.head_stride = row + gap;
        o.at.token_stride = n_heads * o.at.head_stride + step * rnd_below(&k->r, 5);
        bytes = n_tokens * o.at.token_stride;
    } else {
        o.at.token_stride = row + gap;
        o.at.head_stride = (n_tokens > 0 ? n_tokens : 1) * o.at.token_stride + step * rnd_below(&k->r, 5);
        bytes = n_heads * o.at.head_stride;
    }
    o.buf = kt_buf_make(k, name, o.front + bytes + 64);
    o.at.base = o.buf.dev + o.front;
    return o;
}

static uint8_t *want(const operand *o, uint64_t t, uint64_t h)
{
    return o->buf.want + o->front + t * o->at.token_stride + h * o->at.head_stride;
}

static kvs_status launch(kt *k, void *args, kvs_err *err)
{
    return KT_RUN(k, err, kvs_concat_q(args, err), kvs_concat_q_cuda(args, k->stream, err));
}

static bool concat(kt *k, uint32_t n_tokens, uint32_t n_heads)
{
    operand nope = operand_make(k, "nope", n_tokens, n_heads, NOPE), pe = operand_make(k, "pe", n_tokens, n_heads, PE),
            out = operand_make(k, "out", n_tokens, n_heads, NOPE + PE);
    kvs_concat_q_args a = {nope.at, pe.at, out.at, n_tokens, n_heads};
    kvs_err err = {.msg = ""};

    kt_upload(k, &nope.buf);
    kt_upload(k, &pe.buf);
    kt_upload(k, &out.buf);
    if (launch(k, &a, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    for (uint32_t t = 0; t < n_tokens; t++)
        for (uint32_t h = 0; h < n_heads; h++) {
            memcpy(want(&out, t, h), want(&nope, t, h), NOPE);
            memcpy(want(&out, t, h) + NOPE, want(&pe, t, h), PE);
        }
    return kt_same(k, &out.buf) && kt_same(k, &nope.buf) && kt_same(k, &pe.buf);
}

static bool random_shape(kt *k)
{
    return concat(k, (uint32_t)rnd_below(&k->r, 40), 1 + (uint32_t)rnd_below(&k->r, 20));
}

static bool head_counts(kt *k)
{
    static const uint32_t heads[] = {1, 16, 31, 33, 128};

    for (int i = 0; i < 5; i++)
        if (!concat(k, 3, heads[i]))
            return false;
    return concat(k, 0, 128);
}

/* Rows so far apart that the last ones lie beyond 2^32 bytes. */
static bool beyond_4_gib(kt *k)
{
    const uint64_t pitch = UINT64_C(0x40000100);
    kt_buf out = kt_buf_sparse(k, "out", 4 * pitch + 65536);
    operand nope = operand_make(k, "nope", 5, 2, NOPE), pe = operand_make(k, "pe", 5, 2, PE);
    kvs_concat_q_args a = {nope.at, pe.at, {out.dev, pitch, 1152}, 5, 2};
    kvs_err err = {.msg = ""};

    for (uint64_t t = 0; t < 5; t++) {
        kt_buf_window(k, &out, t * pitch, 4096);
        if (t * pitch >> 32 != 0)
            kt_buf_window(k, &out, (uint32_t)(t * pitch) + 8192, 4096);
    }
    kt_upload(k, &nope.buf);
    kt_upload(k, &pe.buf);
    kt_upload(k, &out);
    if (launch(k, &a, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    for (uint64_t t = 0; t < 5; t++)
        for (uint64_t h = 0; h < 2; h++) {
            memcpy(out.want + t * pitch + h * 1152, want(&nope, t, h), NOPE);
            memcpy(out.want + t * pitch + h * 1152 + NOPE, want(&pe, t, h), PE);
        }
    return kt_same(k, &out);
}

/* What the checks refuse. */
static bool refusals(kt *k)
{
    operand o = operand_make(k, "q", 2, 2, NOPE + PE);
    const kvs_concat_q_args good = {o.at, o.at, o.at, 2, 2};
    kvs_concat_q_args a = good;
    kvs_err err = {.msg = ""};

    a.n_heads = 0;
    if (launch(k, &a, &err) != KVS_E_INVALID || strstr(err.msg, "n_heads: 0") == NULL)
        return kt_fail(k, "no heads: %s", err.msg);
    a = good;
    a.out.head_stride = 1150;
    if (launch(k, &a, &err) != KVS_E_INVALID || strstr(err.msg, "out stride: 1150") == NULL)
        return kt_fail(k, "out: %s", err.msg);
    a = good;
    a.nope.base++;
    if (launch(k, &a, &err) != KVS_E_INVALID || strstr(err.msg, "nope: base") == NULL)
        return kt_fail(k, "nope: %s", err.msg);
    a = good;
    a.pe.token_stride = UINT64_MAX - 1;
    if (launch(k, &a, &err) != KVS_E_LIMIT || strstr(err.msg, "pe: ") == NULL)
        return kt_fail(k, "pe: %s", err.msg);
    return true;
}

static const kt_fixed fixed[] = {{"head counts", head_counts, false},
                                 {"beyond 4 GiB", beyond_4_gib, true},
                                 {"bad arguments are refused", refusals, false}};

const kt_op kt_op_concat_q = {.name = "concat_q",
                              .equality = "byte-equal",
                              .fixed = fixed,
                              .n_fixed = sizeof fixed / sizeof *fixed,
                              .random = random_shape,
                              .n_cpu = 100,
                              .n_cuda = 400,
                              .n_subset = 8};
