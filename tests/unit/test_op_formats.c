#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "kernels/mla_oracle.h"
#include "tests/support/mla_token.h"

/* WRITE and DECODE of formats with scales, through frames: what was written is what is attended to. */

enum { TOKENS = 4, N_TOKENS = 11, HEADS = 3, SCRATCH = 1 << 20, PLANES = 4, WIDTH = 3 };
enum { Q_NOPE = 0, Q_PE = 65536, OUT = 131072, LSE = 196608, KV_C = 262144, K_PE = 524288 };
enum { FP8, DS, FP32, INDEXER };
static const uint32_t formats[PLANES] = {KVS_FORMAT_mla_fp8, KVS_FORMAT_fp8_ds_mla, KVS_FORMAT_mla_fp32,
                                         KVS_FORMAT_indexer_fp8};
#define KV_SCALE 0.0137f

typedef struct world {
    fx f;
    fx_client c;
    uint32_t ns;
    uint64_t slot_bytes, offset[PLANES];
    fx_region g, s;
    wire_slot_ref slots[WIDTH];
} world;

static uint32_t open_ns(world *w)
{
    kvs_plane planes[PLANES] = {{"latent", 0, formats[FP8], 576, 0, 2304},
                                {"latent", 1, formats[DS], 656, 0, 2624},
                                {"latent", 2, formats[FP32], 2304, 0, 9216},
                                {"indexer", 0, formats[INDEXER], 132, 0, 528}};
    kvs_namespace ns = {.model = "m", .tokens_per_block = TOKENS, .n_planes = PLANES, .planes = planes};
    fx_body *b = fx_new();
    wire_open_rep rep;
    fx_answer a;
    size_t len = 0;
    kvs_err err = {.msg = ""};

    cr_assert_eq(kvs_namespace_encode(&ns, b->bytes, sizeof(b->bytes), &len, &err), KVS_OK, "%s", err.msg);
    b->out.len = len;
    a = fx_call(&w->c, WIRE_OPEN, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_open_rep(&a.in, &rep);
    fx_done(&a);
    w->slot_bytes = rep.slot_bytes;
    for (uint32_t p = 0; p < PLANES; p++)
        w->offset[p] = kvs_namespace_plane_offset(&ns, p);
    return rep.ns;
}

static void start(world *w)
{
    fx_config(&w->f);
    fx_open(&w->f);
    fx_client_open(&w->c, &w->f);
    w->ns = open_ns(w);
    w->g = fx_slots(&w->c, w->ns, 5);
    w->s = fx_scratch(&w->c, SCRATCH);
    fx_take(&w->c, &w->g, WIDTH, w->slots);
}

static void stop(world *w)
{
    fx_unmap(&w->g);
    fx_unmap(&w->s);
    fx_gone(&w->c);
    fx_close(&w->f);
}

/* All tokens of the sequence in one WRITE of one plane; the rows lie in scratch, `value` bytes a value. */
static fx_body *write_body(const world *w, uint32_t plane, uint32_t src_type, uint32_t value, float kv_scale)
{
    fx_body *b = fx_new();

    wire_put_write_req(&b->out, &(wire_write_req){.ns = w->ns,
                                                  .region = w->g.id,
                                                  .n_tokens = N_TOKENS,
                                                  .n_calls = 1,
                                                  .after_counter = WIRE_NONE32,
                                                  .signal_counter = WIRE_NONE32});
    wire_put_write_call(&b->out, &(wire_write_call){.plane = plane,
                                                    .scratch = w->s.id,
                                                    .kv_c_offset = KV_C,
                                                    .kv_c_stride = 512 * value,
                                                    .k_pe_offset = K_PE,
                                                    .k_pe_stride = 64 * value,
                                                    .src_type = src_type,
                                                    .kv_scale = kv_scale});
    for (uint32_t t = 0; t < N_TOKENS; t++)
        wire_put_u64(&b->out, w->slots[t / TOKENS].slot * TOKENS + t % TOKENS);
    return b;
}

static fx_body *decode_body(const world *w, uint32_t plane, float kv_scale, uint32_t reserved)
{
    fx_body *b = fx_new();

    wire_put_decode_req(
        &b->out,
        &(wire_decode_req){
            .ns = w->ns, .region = w->g.id, .n_seqs = 1, .table_width = WIDTH, .s_q = 1, .h_q = HEADS, .n_calls = 1});
    wire_put_decode_call(&b->out, &(wire_decode_call){.plane = plane,
                                                      .scratch = w->s.id,
                                                      .parts = 2,
                                                      .sm_scale = 0.04f,
                                                      .after_counter = WIRE_NONE32,
                                                      .signal_counter = WIRE_NONE32,
                                                      .q_nope_offset = Q_NOPE,
                                                      .q_nope_token = HEADS * 1024,
                                                      .q_nope_head = 1024,
                                                      .q_pe_offset = Q_PE,
                                                      .q_pe_token = HEADS * 128,
                                                      .q_pe_head = 128,
                                                      .out_offset = OUT,
                                                      .out_token = HEADS * 1024,
                                                      .out_head = 1024,
                                                      .lse_offset = LSE,
                                                      .lse_token = HEADS * 4,
                                                      .lse_head = 4,
                                                      .kv_scale = kv_scale,
                                                      .reserved = reserved});
    wire_put_u32(&b->out, N_TOKENS);
    wire_put_pad8(&b->out);
    for (int i = 0; i < WIDTH; i++)
        wire_put_u32(&b->out, w->slots[i].slot);
    wire_put_pad8(&b->out);
    return b;
}

static void fill_scratch(const world *w, bool is_fp32)
{
    rnd r = {7};

    memset(w->s.base, 0xff, SCRATCH);
    mla_token_put_values(&r, KVS_FORMAT_mla_bf16, w->s.base + Q_NOPE, HEADS * 512, 1);
    mla_token_put_values(&r, KVS_FORMAT_mla_bf16, w->s.base + Q_PE, HEADS * 64, 1);
    for (uint32_t i = 0; i < N_TOKENS * 576; i++) {
        uint8_t *at = i < N_TOKENS * 512 ? w->s.base + KV_C : w->s.base + K_PE;
        uint32_t k = i < N_TOKENS * 512 ? i : i - N_TOKENS * 512, u;
        float v = (float)rnd_normal(&r);

        memcpy(&u, &v, sizeof u);
        if (is_fp32)
            memcpy(at + 4 * (uint64_t)k, &v, 4);
        else
            memcpy(at + 2 * (uint64_t)k, (uint8_t *)&u + 2, 2);
    }
}

/* The value that was written, in fp64. */
static double source(const world *w, bool is_fp32, uint32_t t, uint32_t i)
{
    const uint8_t *at = i < 512 ? w->s.base + KV_C : w->s.base + K_PE;
    uint32_t k = i < 512 ? t * 512 + i : t * 64 + i - 512, u = 0;
    float v;

    if (is_fp32)
        memcpy(&u, at + 4 * (uint64_t)k, 4);
    else
        memcpy((uint8_t *)&u + 2, at + 2 * (uint64_t)k, 2);
    memcpy(&v, &u, sizeof v);
    return (double)v;
}

/* Against the values that were written, and within what their rounding to e4m3 leaves. */
static void check_rows(const world *w, uint32_t plane, bool is_fp32)
{
    for (uint32_t t = 0; t < N_TOKENS; t++) {
        const uint8_t *row = w->g.base + w->slots[t / TOKENS].slot * w->slot_bytes + w->offset[plane] +
                             t % TOKENS * mla_token_row_bytes(formats[plane]);

        for (uint32_t i = 0; i < 512; i++) {
            float scale = KV_SCALE;
            double want = source(w, is_fp32, t, i), got;

            if (plane == DS)
                memcpy(&scale, row + 512 + i / 128 * 4, 4);
            got = oracle_e4m3(row[i]) * (double)scale;
            cr_assert(fabs(got - want) <= fabs(want) / 16 + (double)scale / 512, "token %u, value %u: %g, not %g", t, i,
                      got, want);
        }
    }
}

/* The answer's rows against fp64 over the bytes of the region. */
static void check_attention(const world *w, uint32_t plane)
{
    const int32_t len = N_TOKENS,
                  table[WIDTH] = {(int32_t)w->slots[0].slot, (int32_t)w->slots[1].slot, (int32_t)w->slots[2].slot};
    const float scale = KV_SCALE;
    kvs_mla_decode_args a = {.view = {.base = w->g.base + w->offset[plane],
                                      .block_stride = w->slot_bytes,
                                      .n_blocks = 5,
                                      .tokens_per_block = TOKENS,
                                      .row_bytes = mla_token_row_bytes(formats[plane]),
                                      .format = formats[plane]},
                             .q_nope = {w->s.base + Q_NOPE, HEADS * 1024, 1024},
                             .q_pe = {w->s.base + Q_PE, HEADS * 128, 128},
                             .out = {w->s.base + OUT, HEADS * 1024, 1024},
                             .lse = {w->s.base + LSE, HEADS * 4, 4},
                             .seq_len = &len,
                             .block_table = table,
                             .table_stride = WIDTH,
                             .n_seqs = 1,
                             .table_width = WIDTH,
                             .s_q = 1,
                             .h_q = HEADS,
                             .sm_scale = 0.04f,
                             .kv_scale = &scale};
    char text[ORACLE_TEXT_BYTES];

    cr_assert(oracle_judge(&a, text), "plane %u: %s", plane, text);
}

static void write_and_attend(world *w, uint32_t plane, bool is_fp32, uint32_t src_type)
{
    const float scale = plane == FP8 ? KV_SCALE : 0;
    wire_call_rep rep;
    fx_answer a;

    fill_scratch(w, is_fp32);
    a = fx_call(&w->c, WIRE_WRITE, write_body(w, plane, src_type, is_fp32 ? 4 : 2, scale));
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    fx_done(&a);
    check_rows(w, plane, is_fp32);
    a = fx_call(&w->c, WIRE_DECODE, decode_body(w, plane, scale, 0));
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_call_rep(&a.in, &rep);
    cr_assert_eq(rep.n_ok, 1);
    fx_done(&a);
    check_attention(w, plane);
}

Test(op_formats, what_was_written_in_fp8_is_attended_to)
{
    world w;

    start(&w);
    memset(w.g.base, 0xff, w.g.bytes);
    write_and_attend(&w, FP8, false, 0);
    write_and_attend(&w, FP8, true, KVS_VALUE_FP32);
    write_and_attend(&w, DS, false, 0);
    write_and_attend(&w, DS, false, KVS_VALUE_BF16);
    stop(&w);
}

static void refused(world *w, uint16_t op, fx_body *b, kvs_status right, const char *text)
{
    fx_answer a = fx_call(&w->c, op, b);

    cr_assert_eq(a.status, right, "%s: %s", text, a.msg);
    cr_assert(strstr(a.msg, text), "%s: %s", text, a.msg);
    fx_done(&a);
}

Test(op_formats, a_scale_or_a_type_that_does_not_fit_the_plane_is_refused)
{
    world w;

    start(&w);
    fill_scratch(&w, false);
    refused(&w, WIRE_WRITE, write_body(&w, FP8, 0, 2, 0), KVS_E_INVALID, "kv_scale: 0 ");
    refused(&w, WIRE_WRITE, write_body(&w, FP8, 0, 2, -1), KVS_E_INVALID, "kv_scale: -1 ");
    refused(&w, WIRE_WRITE, write_body(&w, FP8, 0, 2, NAN), KVS_E_INVALID, "kv_scale");
    refused(&w, WIRE_WRITE, write_body(&w, DS, 0, 2, 1), KVS_E_INVALID, "fp8_ds_mla and no scale");
    refused(&w, WIRE_WRITE, write_body(&w, DS, KVS_VALUE_FP32, 4, 0), KVS_E_UNSUPPORTED, "src_type: 3");
    refused(&w, WIRE_WRITE, write_body(&w, DS, KVS_VALUE_FP16, 2, 0), KVS_E_UNSUPPORTED, "src_type: 2");
    refused(&w, WIRE_WRITE, write_body(&w, FP8, 9, 2, 1), KVS_E_UNSUPPORTED, "src_type: 9");
    refused(&w, WIRE_WRITE, write_body(&w, FP32, 0, 2, 0), KVS_E_INVALID, "below rows of 2048 and 256");
    refused(&w, WIRE_WRITE, write_body(&w, INDEXER, 0, 2, 0), KVS_E_UNSUPPORTED, "indexer_fp8 has no kernel here");
    refused(&w, WIRE_DECODE, decode_body(&w, FP8, 0, 0), KVS_E_INVALID, "kv_scale: 0 ");
    refused(&w, WIRE_DECODE, decode_body(&w, FP8, INFINITY, 0), KVS_E_INVALID, "kv_scale: inf");
    refused(&w, WIRE_DECODE, decode_body(&w, DS, 1, 0), KVS_E_INVALID, "and no scale");
    refused(&w, WIRE_DECODE, decode_body(&w, DS, 0, 1), KVS_E_INVALID, "reserved: 1");
    refused(&w, WIRE_DECODE, decode_body(&w, FP32, 0, 0), KVS_E_UNSUPPORTED, "mla_fp32 has no kernel here");
    refused(&w, WIRE_DECODE, decode_body(&w, INDEXER, 0, 0), KVS_E_UNSUPPORTED, "indexer_fp8 has no kernel here");
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, FP32, 0, 4, 0)), KVS_OK);
    stop(&w);
}
