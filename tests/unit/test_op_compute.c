#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

/* WRITE, DECODE and EXTEND, through frames. */

enum { HEADS = 2, SEQS = 2, WIDTH = 3, SCRATCH = 1 << 20 };
enum { Q_NOPE = 0, Q_PE = 65536, OUT = 131072, LSE = 196608, KV_C = 262144, K_PE = 524288 };

typedef struct world {
    fx f;
    fx_client c;
    uint32_t ns;
    fx_region g, s;
    wire_slot_ref slots[4];
} world;

static void start(world *w)
{
    fx_config(&w->f);
    fx_open(&w->f);
    fx_client_open(&w->c, &w->f);
    w->ns = fx_ns(&w->c, "m");
    w->g = fx_slots(&w->c, w->ns, 6);
    w->s = fx_scratch(&w->c, SCRATCH);
    fx_take(&w->c, &w->g, 4, w->slots);
}

static void stop(world *w)
{
    fx_unmap(&w->g);
    fx_unmap(&w->s);
    fx_gone(&w->c);
    fx_close(&w->f);
}

static uint16_t bf16(float v)
{
    uint32_t u;

    memcpy(&u, &v, 4);
    return (uint16_t)(u >> 16);
}

static float from_bf16(const uint8_t *p)
{
    uint32_t u = (uint32_t)(p[0] | p[1] << 8) << 16;
    float v;

    memcpy(&v, &u, 4);
    return v;
}

static void fill(uint8_t *at, uint64_t n, float v)
{
    uint16_t x = bf16(v);

    for (uint64_t i = 0; i < n; i++)
        memcpy(at + 2 * i, &x, 2);
}

typedef struct write_case {
    uint32_t plane, n_tokens, signal; /* signal: counter plus one */
    const int64_t *mapping;
    uint64_t kv_c, kv_c_stride, k_pe_stride; /* k_pe_stride 0: 128 */
    uint32_t src_type;
    float kv_scale;
} write_case;

static fx_body *write_body(const world *w, const write_case *x)
{
    fx_body *b = fx_new();

    wire_put_write_req(&b->out, &(wire_write_req){.ns = w->ns,
                                                  .region = w->g.id,
                                                  .n_tokens = x->n_tokens,
                                                  .n_calls = 1,
                                                  .after_counter = WIRE_NONE32,
                                                  .signal_counter = x->signal - 1,
                                                  .signal_value = 1});
    wire_put_write_call(&b->out,
                        &(wire_write_call){x->plane, w->s.id, x->kv_c, x->kv_c_stride, K_PE,
                                           x->k_pe_stride > 0 ? x->k_pe_stride : 128, x->src_type, x->kv_scale});
    for (uint32_t i = 0; i < x->n_tokens; i++)
        wire_put_u64(&b->out, (uint64_t)x->mapping[i]);
    return b;
}

Test(op_compute, write_puts_rows_where_the_mapping_says_and_nowhere_else)
{
    world w;
    int64_t mapping[3];
    write_case x = {.plane = 1, .n_tokens = 3, .signal = 4, .mapping = mapping, .kv_c = KV_C, .kv_c_stride = 1024};
    fx_answer a;
    wire_call_rep rep;
    wire_call_result r;

    start(&w);
    memset(w.g.base, 0x5a, w.g.bytes);
    for (int t = 0; t < 3; t++) {
        fill(w.s.base + KV_C + t * 1024, 512, 1.0f + t);
        fill(w.s.base + K_PE + t * 128, 64, -1.0f - t);
    }
    mapping[0] = w.slots[1].slot * FX_TOKENS + 3;
    mapping[1] = -1;
    mapping[2] = w.slots[0].slot * FX_TOKENS;
    a = fx_call(&w.c, WIRE_WRITE, write_body(&w, &x));
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_call_rep(&a.in, &rep);
    wire_get_call_result(&a.in, &r);
    cr_assert_eq(rep.n_ok, 1);
    cr_assert_eq(r.bad, 0);
    fx_done(&a);
    cr_assert_eq(fx_counter(&w.c, 3), 1);
    cr_assert_eq(fx_counter_error(&w.c, 3), 0);
    for (uint64_t i = 0; i < w.g.bytes; i++) {
        uint64_t block = i / FX_SLOT, in = i % FX_SLOT, row = in >= FX_PAGE ? (in - FX_PAGE) / 1152 : 99;
        int64_t at = (int64_t)(block * FX_TOKENS + row);
        bool named = row < FX_TOKENS && block < 6 && (at == mapping[0] || at == mapping[2]);

        if (!named)
            cr_assert_eq(w.g.base[i], 0x5a, "byte %d", (int)i);
    }
    cr_assert_eq(from_bf16(w.g.base + w.slots[1].slot * FX_SLOT + FX_PAGE + 3 * 1152), 1.0f);
    cr_assert_eq(from_bf16(w.g.base + w.slots[0].slot * FX_SLOT + FX_PAGE + 1024), -3.0f);
    stop(&w);
}

Test(op_compute, a_write_out_of_range_or_into_a_foreign_slot_starts_nothing)
{
    world w;
    int64_t mapping[2] = {0, 6 * FX_TOKENS};
    write_case x = {.n_tokens = 2, .signal = 1, .mapping = mapping, .kv_c = KV_C, .kv_c_stride = 1024};
    fx_answer a;

    start(&w);
    mapping[0] = w.slots[0].slot * FX_TOKENS;
    a = fx_call(&w.c, WIRE_WRITE, write_body(&w, &x));
    cr_assert_eq(a.status, KVS_E_RANGE);
    cr_assert(strstr(a.msg, "slot_mapping[1]"), "%s", a.msg);
    fx_done(&a);
    cr_assert_eq(fx_counter(&w.c, 0), 1);
    cr_assert_eq(fx_counter_error(&w.c, 0), KVS_E_RANGE);
    for (uint32_t s = 0; s < 6; s++) { /* one that was not taken */
        bool mine = false;

        for (int i = 0; i < 4; i++)
            mine = mine || w.slots[i].slot == s;
        if (!mine)
            mapping[1] = s * FX_TOKENS;
    }
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_STATE);
    mapping[1] = -1;
    x.kv_c_stride = 1022;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_INVALID);
    x.kv_c_stride = 1024;
    x.kv_c = SCRATCH - 1024;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_RANGE);
    x.kv_c = UINT64_MAX - 1023;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_RANGE, "an end that wraps");
    x.kv_c = KV_C;
    x.kv_c_stride = UINT64_MAX - 1;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_RANGE);
    x.kv_c_stride = 1024;
    x.plane = FX_LAYERS;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_RANGE);
    x.plane = 0;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_OK);
    x.kv_c_stride = 1;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_INVALID);
    x.n_tokens = 1;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_OK, "one row has no stride");
    x.n_tokens = 0;
    cr_assert_eq(fx_status(&w.c, WIRE_WRITE, write_body(&w, &x)), KVS_E_LIMIT);
    stop(&w);
}

typedef struct decode_case {
    uint32_t n_calls;
    int32_t len[SEQS], table[SEQS][WIDTH];
    float sm_scale;
    uint32_t parts;
    uint64_t out, out_token, out_head;
    uint32_t after; /* counter plus one, of the first call */
} decode_case;

static fx_body *decode_body(const world *w, const decode_case *x)
{
    fx_body *b = fx_new();

    wire_put_decode_req(&b->out, &(wire_decode_req){.ns = w->ns,
                                                    .region = w->g.id,
                                                    .n_seqs = SEQS,
                                                    .table_width = WIDTH,
                                                    .s_q = 1,
                                                    .h_q = HEADS,
                                                    .n_calls = x->n_calls});
    for (uint32_t i = 0; i < x->n_calls; i++)
        wire_put_decode_call(&b->out, &(wire_decode_call){.plane = i,
                                                          .scratch = w->s.id,
                                                          .parts = x->parts,
                                                          .sm_scale = x->sm_scale,
                                                          .after_counter = i == 0 ? x->after - 1 : WIRE_NONE32,
                                                          .after_value = 1,
                                                          .signal_counter = 10 + i,
                                                          .signal_value = 1,
                                                          .q_nope_offset = Q_NOPE,
                                                          .q_nope_token = HEADS * 1024,
                                                          .q_nope_head = 1024,
                                                          .q_pe_offset = Q_PE,
                                                          .q_pe_token = HEADS * 128,
                                                          .q_pe_head = 128,
                                                          .out_offset = x->out + i * 8192,
                                                          .out_token = x->out_token,
                                                          .out_head = x->out_head,
                                                          .lse_offset = LSE + i * 64,
                                                          .lse_token = HEADS * 4,
                                                          .lse_head = 4});
    for (int i = 0; i < SEQS; i++)
        wire_put_u32(&b->out, (uint32_t)x->len[i]);
    wire_put_pad8(&b->out);
    for (int i = 0; i < SEQS * WIDTH; i++)
        wire_put_u32(&b->out, (uint32_t)x->table[i / WIDTH][i % WIDTH]);
    wire_put_pad8(&b->out);
    return b;
}

static decode_case good_case(const world *w)
{
    decode_case x = {
        .n_calls = 2, .len = {6, 0}, .sm_scale = 0.5f, .out = OUT, .out_token = HEADS * 1024, .out_head = 1024};

    x.table[0][0] = (int32_t)w->slots[2].slot;
    x.table[0][1] = (int32_t)w->slots[0].slot;
    x.table[0][2] = -7; /* past the length: never read */
    for (int k = 0; k < WIDTH; k++)
        x.table[1][k] = INT32_MIN;
    return x;
}

/* Equal rows: the output is that row whatever the weights, and LSE is the logit plus ln(length). */
Test(op_compute, decode_of_equal_rows_gives_the_row_and_its_lse)
{
    world w;
    decode_case x;
    fx_answer a;
    wire_call_rep rep;
    wire_call_result r;
    float lse;

    start(&w);
    x = good_case(&w);
    for (int s = 0; s < 6; s++)
        for (int p = 0; p < FX_LAYERS; p++)
            fill(w.g.base + s * FX_SLOT + p * FX_PAGE, FX_PAGE / 2, 0.25f + (float)p);
    memset(w.s.base, 0xff, SCRATCH);
    fill(w.s.base + Q_NOPE, SEQS * HEADS * 512, 0.125f);
    fill(w.s.base + Q_PE, SEQS * HEADS * 64, 0.0f);
    a = fx_call(&w.c, WIRE_DECODE, decode_body(&w, &x));
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_call_rep(&a.in, &rep);
    cr_assert_eq(rep.n_ok, 2);
    for (int i = 0; i < 2; i++) {
        double v = 0.25 + i;

        wire_get_call_result(&a.in, &r);
        cr_assert_eq(r.status, KVS_OK);
        cr_assert_eq(r.kernel, KVS_KERNEL_MLA_DECODE_C);
        cr_assert_geq(r.parts, 1);
        for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < 512; d++)
                cr_assert_eq(from_bf16(w.s.base + OUT + i * 8192 + h * 1024 + d * 2), (float)v);
        memcpy(&lse, w.s.base + LSE + i * 64, 4);
        cr_assert_float_eq(lse, 0.5 * 512 * 0.125 * v + log(6), 1e-3);
        cr_assert_eq(from_bf16(w.s.base + OUT + i * 8192 + HEADS * 1024), 0.0f, "the empty one");
        memcpy(&lse, w.s.base + LSE + i * 64 + HEADS * 4, 4);
        cr_assert(isinf(lse) && lse < 0);
        cr_assert_eq(fx_counter(&w.c, 10 + (uint32_t)i), 1);
        cr_assert_eq(fx_counter_error(&w.c, 10 + (uint32_t)i), 0);
    }
    fx_done(&a);
    stop(&w);
}

typedef struct bad_decode {
    const char *what;
    int32_t len, entry;
    uint32_t n_calls, parts;
    float sm_scale;
    uint64_t out, out_token, out_head;
    kvs_status right;
} bad_decode;

static const bad_decode bad_decodes[] = {
    {"length -1", -1, 0, 1, 0, 1, OUT, 2048, 1024, KVS_E_RANGE},
    {"length above the table", WIDTH *FX_TOKENS + 1, 0, 1, 0, 1, OUT, 2048, 1024, KVS_E_RANGE},
    {"entry -1", 5, -1, 1, 0, 1, OUT, 2048, 1024, KVS_E_RANGE},
    {"entry past the region", 5, 6, 1, 0, 1, OUT, 2048, 1024, KVS_E_RANGE},
    {"257 parts", 5, 0, 1, 257, 1, OUT, 2048, 1024, KVS_E_LIMIT},
    {"scale of NaN", 5, 0, 1, 0, NAN, OUT, 2048, 1024, KVS_E_INVALID},
    {"odd offset", 5, 0, 1, 0, 1, OUT + 1, 2048, 1024, KVS_E_INVALID},
    {"output behind scratch", 5, 0, 1, 0, 1, SCRATCH - 1024, 2048, 1024, KVS_E_RANGE},
    {"output that wraps", 5, 0, 1, 0, 1, OUT, UINT64_MAX - 1, 1024, KVS_E_RANGE},
    {"a plane too many", 5, 0, 3, 0, 1, OUT, 2048, 1024, KVS_E_RANGE},
    {"no calls", 5, 0, 0, 0, 1, OUT, 2048, 1024, KVS_E_LIMIT},
    {"heads in one place", 5, 0, 1, 0, 1, OUT, 2048, 0, KVS_E_INVALID},
    {"heads over the next row", 5, 0, 2, 0, 1, OUT, 1024, 1024, KVS_E_INVALID},
    {"rows in one place", 5, 0, 2, 0, 1, OUT, 0, 1024, KVS_E_INVALID},
};

Test(op_compute, a_decode_with_a_bad_argument_starts_nothing_and_signals_every_call)
{
    world w;

    start(&w);
    for (size_t i = 0; i < sizeof(bad_decodes) / sizeof(bad_decodes[0]); i++) {
        const bad_decode *b = &bad_decodes[i];
        decode_case x = good_case(&w);
        fx_answer a;

        x.n_calls = b->n_calls;
        x.len[0] = b->len;
        x.parts = b->parts;
        x.sm_scale = b->sm_scale;
        x.out = b->out;
        x.out_token = b->out_token;
        x.out_head = b->out_head;
        if (b->entry != 0)
            x.table[0][1] = b->entry;
        memset(w.c.counters, 0, WIRE_COUNTER_PAGE_BYTES);
        a = fx_call(&w.c, WIRE_DECODE, decode_body(&w, &x));
        cr_assert_eq(a.status, b->right, "%s: %s %s", b->what, kvs_status_name(a.status), a.msg);
        fx_done(&a);
        for (uint32_t k = 0; k < b->n_calls; k++) {
            cr_assert_eq(fx_counter(&w.c, 10 + k), 1, "%s", b->what);
            cr_assert_eq(fx_counter_error(&w.c, 10 + k), b->right, "%s", b->what);
        }
    }
    stop(&w);
}

Test(op_compute, a_decode_reads_no_slot_that_the_caller_does_not_hold)
{
    world w;
    decode_case x;
    fx_body *b = fx_new();

    start(&w);
    x = good_case(&w);
    wire_put_slot_drop_req(&b->out, &(wire_slot_drop_req){.region = w.g.id, .n = 1, .after_counter = WIRE_NONE32});
    wire_put_slot_ref(&b->out, &w.slots[0]);
    cr_assert_eq(fx_status(&w.c, WIRE_SLOT_DROP, b), KVS_OK);
    cr_assert_eq(fx_status(&w.c, WIRE_DECODE, decode_body(&w, &x)), KVS_E_STATE);
    x.len[0] = FX_TOKENS; /* the other slot is not needed */
    cr_assert_eq(fx_status(&w.c, WIRE_DECODE, decode_body(&w, &x)), KVS_OK);
    stop(&w);
}

Test(op_compute, a_step_cancelled_half_way_says_which_calls_ran)
{
    world w;
    decode_case x;
    uint64_t id, cancel;
    fx_body *b = fx_new();
    wire_call_rep rep;
    wire_call_result r;
    fx_answer a;

    start(&w);
    x = good_case(&w);
    x.after = 1; /* the first call waits, the second runs */
    id = fx_send(&w.c, WIRE_DECODE, decode_body(&w, &x));
    while (fx_counter(&w.c, 11) != 1)
        fx_run(&w.f, 1);
    wire_put_cancel_req(&b->out, &(wire_cancel_req){id});
    cancel = fx_send(&w.c, WIRE_CANCEL, b);
    a = fx_wait(&w.c, cancel);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_E_CANCELLED);
    wire_get_call_rep(&a.in, &rep);
    wire_get_call_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_E_CANCELLED);
    wire_get_call_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_OK);
    fx_done(&a);
    cr_assert_eq(fx_counter_error(&w.c, 10), KVS_E_CANCELLED);
    cr_assert_eq(fx_counter_error(&w.c, 11), 0);
    stop(&w);
}

/* ---- EXTEND: three queries of the first sequence, one of the second, one that is nobody's ---- */

enum { QUERIES = 5 };

typedef struct extend_case {
    uint32_t n_calls, n_tokens;
    int32_t start[SEQS + 1], len[SEQS], table[SEQS][WIDTH];
    uint32_t parts, flags;
    float sm_scale;
    uint64_t out;
    uint32_t after; /* counter plus one, of the first call */
} extend_case;

static fx_body *extend_body(const world *w, const extend_case *x)
{
    fx_body *b = fx_new();

    wire_put_extend_req(&b->out, &(wire_extend_req){.ns = w->ns,
                                                    .region = w->g.id,
                                                    .n_seqs = SEQS,
                                                    .table_width = WIDTH,
                                                    .n_tokens = x->n_tokens,
                                                    .h_q = HEADS,
                                                    .n_calls = x->n_calls,
                                                    .flags = x->flags});
    for (uint32_t i = 0; i < x->n_calls; i++)
        wire_put_decode_call(&b->out, &(wire_decode_call){.plane = i,
                                                          .scratch = w->s.id,
                                                          .parts = x->parts,
                                                          .sm_scale = x->sm_scale,
                                                          .after_counter = i == 0 ? x->after - 1 : WIRE_NONE32,
                                                          .after_value = 1,
                                                          .signal_counter = 10 + i,
                                                          .signal_value = 1,
                                                          .q_nope_offset = Q_NOPE,
                                                          .q_nope_token = HEADS * 1024,
                                                          .q_nope_head = 1024,
                                                          .q_pe_offset = Q_PE,
                                                          .q_pe_token = HEADS * 128,
                                                          .q_pe_head = 128,
                                                          .out_offset = x->out + i * 16384,
                                                          .out_token = HEADS * 1024,
                                                          .out_head = 1024,
                                                          .lse_offset = LSE + i * 64,
                                                          .lse_token = HEADS * 4,
                                                          .lse_head = 4});
    for (int i = 0; i <= SEQS; i++)
        wire_put_u32(&b->out, (uint32_t)x->start[i]);
    wire_put_pad8(&b->out);
    for (int i = 0; i < SEQS; i++)
        wire_put_u32(&b->out, (uint32_t)x->len[i]);
    wire_put_pad8(&b->out);
    for (int i = 0; i < SEQS * WIDTH; i++)
        wire_put_u32(&b->out, (uint32_t)x->table[i / WIDTH][i % WIDTH]);
    wire_put_pad8(&b->out);
    return b;
}

static extend_case good_extend(const world *w)
{
    extend_case x = {
        .n_calls = 2, .n_tokens = QUERIES, .start = {0, 3, 4}, .len = {6, 0}, .sm_scale = 0.5f, .out = OUT};

    x.table[0][0] = (int32_t)w->slots[2].slot;
    x.table[0][1] = (int32_t)w->slots[0].slot;
    x.table[0][2] = -7; /* past the length: never read */
    for (int k = 0; k < WIDTH; k++)
        x.table[1][k] = INT32_MIN;
    return x;
}

/* Query `t` of a plane whose rows are all v. */
static void check_extended(const world *w, int plane, int t, double v, int seen)
{
    float lse;

    for (int h = 0; h < HEADS; h++) {
        const uint8_t *out = w->s.base + OUT + plane * 16384 + (t * HEADS + h) * 1024;

        for (int d = 0; d < 512; d++)
            cr_assert_eq(from_bf16(out + d * 2), seen > 0 ? (float)v : 0.0f, "plane %d, query %d", plane, t);
        memcpy(&lse, w->s.base + LSE + plane * 64 + (t * HEADS + h) * 4, 4);
        if (seen > 0)
            cr_assert_float_eq(lse, 0.5 * 512 * 0.125 * v + log(seen), 1e-3, "query %d: %g", t, (double)lse);
        else
            cr_assert(isinf(lse) && lse < 0);
    }
}

Test(op_compute, extend_shows_each_query_the_tokens_up_to_its_own)
{
    world w;
    extend_case x;
    fx_answer a;
    wire_call_rep rep;
    wire_call_result r;

    start(&w);
    x = good_extend(&w);
    for (int s = 0; s < 6; s++)
        for (int p = 0; p < FX_LAYERS; p++)
            fill(w.g.base + s * FX_SLOT + p * FX_PAGE, FX_PAGE / 2, 0.25f + (float)p);
    memset(w.s.base, 0xff, SCRATCH); /* NaN: what is nobody's must not be read, nor written */
    fill(w.s.base + Q_NOPE, 4 * HEADS * 512, 0.125f);
    fill(w.s.base + Q_PE, 4 * HEADS * 64, 0.0f);
    a = fx_call(&w.c, WIRE_EXTEND, extend_body(&w, &x));
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_call_rep(&a.in, &rep);
    cr_assert_eq(rep.n_ok, 2);
    for (int i = 0; i < 2; i++) {
        wire_get_call_result(&a.in, &r);
        cr_assert_eq(r.status, KVS_OK);
        cr_assert_eq(r.kernel, KVS_KERNEL_MLA_EXTEND_C);
        for (int t = 0; t < 3; t++)
            check_extended(&w, i, t, 0.25 + i, 4 + t);
        check_extended(&w, i, 3, 0, 0);
        for (int k = 0; k < HEADS * 1024; k++)
            cr_assert_eq(w.s.base[OUT + i * 16384 + 4 * HEADS * 1024 + k], 0xff, "a query of nobody's");
        cr_assert_eq(fx_counter(&w.c, 10 + (uint32_t)i), 1);
        cr_assert_eq(fx_counter_error(&w.c, 10 + (uint32_t)i), 0);
    }
    fx_done(&a);
    stop(&w);
}

/* The rows of the suffix are on their way when its queries are sent: a counter between them. */
Test(op_compute, an_extend_waits_for_the_write_of_its_own_rows)
{
    world w;
    extend_case x;
    int64_t mapping[3];
    write_case rows = {.n_tokens = 3, .signal = 4, .mapping = mapping, .kv_c = KV_C, .kv_c_stride = 1024};
    uint64_t write, extend;
    fx_answer a;

    start(&w);
    x = good_extend(&w);
    x.n_calls = 1;
    x.after = WIRE_COUNTER_DAEMON + 4;
    for (int s = 0; s < 6; s++)
        fill(w.g.base + s * FX_SLOT, FX_PAGE / 2, 0.25f);
    for (int i = 0; i < 3; i++) { /* tokens 3, 4, 5 */
        int64_t t = 3 + i;

        mapping[i] = x.table[0][t / FX_TOKENS] * (int64_t)FX_TOKENS + t % FX_TOKENS;
        fill(w.g.base + mapping[i] / FX_TOKENS * FX_SLOT + mapping[i] % FX_TOKENS * 1152, 576, NAN);
    }
    fill(w.s.base + KV_C, 3 * 512, 0.25f);
    fill(w.s.base + K_PE, 3 * 64, 0.25f);
    fill(w.s.base + Q_NOPE, 4 * HEADS * 512, 0.125f);
    fill(w.s.base + Q_PE, 4 * HEADS * 64, 0.0f);
    extend = fx_send(&w.c, WIRE_EXTEND, extend_body(&w, &x));
    write = fx_send(&w.c, WIRE_WRITE, write_body(&w, &rows));
    a = fx_wait(&w.c, write);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    fx_done(&a);
    a = fx_wait(&w.c, extend);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    fx_done(&a);
    for (int t = 0; t < 3; t++)
        check_extended(&w, 0, t, 0.25, 4 + t);
    stop(&w);
}

typedef struct bad_extend {
    const char *what;
    uint32_t n_tokens, n_calls;
    int32_t start[SEQS + 1];
    uint32_t parts, flags;
    uint64_t out;
    kvs_status right;
} bad_extend;

static const bad_extend bad_extends[] = {
    {"starts that fall", QUERIES, 1, {0, 3, 2}, 0, 0, OUT, KVS_E_RANGE},
    {"a start below 0", QUERIES, 1, {-1, 3, 4}, 0, 0, OUT, KVS_E_RANGE},
    {"an end beyond the tokens", QUERIES, 1, {0, 3, QUERIES + 1}, 0, 0, OUT, KVS_E_RANGE},
    {"no tokens", 0, 1, {0, 0, 0}, 0, 0, OUT, KVS_E_LIMIT},
    {"no calls", QUERIES, 0, {0, 3, 4}, 0, 0, OUT, KVS_E_LIMIT},
    {"257 parts", QUERIES, 1, {0, 3, 4}, 257, 0, OUT, KVS_E_LIMIT},
    {"an unknown flag", QUERIES, 1, {0, 3, 4}, 0, 2, OUT, KVS_E_INVALID},
    {"output behind scratch", QUERIES, 1, {0, 3, 4}, 0, 0, SCRATCH - 1024, KVS_E_RANGE},
    {"queries behind scratch", SCRATCH / 1024, 1, {0, 3, 4}, 0, 0, OUT, KVS_E_RANGE},
    {"a plane too many", QUERIES, 3, {0, 3, 4}, 0, 0, OUT, KVS_E_RANGE},
};

Test(op_compute, an_extend_with_a_bad_argument_starts_nothing_and_signals_every_call)
{
    world w;

    start(&w);
    for (size_t i = 0; i < sizeof(bad_extends) / sizeof(bad_extends[0]); i++) {
        const bad_extend *b = &bad_extends[i];
        extend_case x = good_extend(&w);
        fx_answer a;

        x.n_tokens = b->n_tokens;
        x.n_calls = b->n_calls;
        x.parts = b->parts;
        x.flags = b->flags;
        x.out = b->out;
        memcpy(x.start, b->start, sizeof x.start);
        memset(w.c.counters, 0, WIRE_COUNTER_PAGE_BYTES);
        a = fx_call(&w.c, WIRE_EXTEND, extend_body(&w, &x));
        cr_assert_eq(a.status, b->right, "%s: %s %s", b->what, kvs_status_name(a.status), a.msg);
        fx_done(&a);
        for (uint32_t k = 0; k < b->n_calls; k++) {
            cr_assert_eq(fx_counter(&w.c, 10 + k), 1, "%s", b->what);
            cr_assert_eq(fx_counter_error(&w.c, 10 + k), b->right, "%s", b->what);
        }
    }
    stop(&w);
}

Test(op_compute, an_extend_that_fails_on_the_device_says_which_call)
{
    world w;
    extend_case x;
    wire_call_rep rep;
    wire_call_result r;
    fx_answer a;

    start(&w);
    x = good_extend(&w);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_MLA_EXTEND, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    a = fx_call(&w.c, WIRE_EXTEND, extend_body(&w, &x));
    cr_assert_eq(a.status, KVS_E_PARTIAL);
    wire_get_call_rep(&a.in, &rep);
    cr_assert_eq(rep.n_ok, 1);
    wire_get_call_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_E_DEVICE);
    wire_get_call_result(&a.in, &r);
    cr_assert_eq(r.status, KVS_OK);
    fx_done(&a);
    cr_assert_eq(fx_counter_error(&w.c, 10), KVS_E_DEVICE);
    cr_assert_eq(fx_counter_error(&w.c, 11), 0);
    stop(&w);
}

/* Symptom: a store that waited for a failed write published the half-written block. */
Test(op_compute, a_store_behind_a_failed_write_publishes_nothing)
{
    world w;
    int64_t mapping[1];
    write_case x = {.n_tokens = 1, .signal = 1, .mapping = mapping, .kv_c = KV_C, .kv_c_stride = 1024};
    fx_move m;
    uint64_t write, store;
    fx_answer a;

    start(&w);
    mapping[0] = w.slots[0].slot * FX_TOKENS;
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_MLA_WRITE, FAULT_FAIL, 1, 1, KVS_E_DEVICE, 0});
    write = fx_send(&w.c, WIRE_WRITE, write_body(&w, &x));
    m = (fx_move){.ns = w.ns, .region = w.g.id, .n = 1, .first = 1, .slots = w.slots, .after_value = 1};
    m.after_counter = WIRE_COUNTER_DAEMON + 1;
    store = fx_send(&w.c, WIRE_STORE, fx_store_body(&m));
    a = fx_wait(&w.c, write);
    cr_assert_eq(a.status, KVS_E_PARTIAL);
    fx_done(&a);
    a = fx_wait(&w.c, store);
    cr_assert_eq(a.status, KVS_E_PARTIAL);
    fx_done(&a);
    cr_assert_eq(fx_lookup(&w.c, w.ns, 1, 1), 0);
    stop(&w);
}

/* Symptom: a kernel that did not end was to be seen in no number, and the daemon called itself well. */
Test(op_compute, a_kernel_that_does_not_end_shows_its_age)
{
    world w;
    int64_t mapping[1];
    write_case x = {.n_tokens = 1, .signal = 1, .mapping = mapping, .kv_c = KV_C, .kv_c_stride = 1024};
    fx_client admin;
    uint64_t id;
    fx_answer a;

    start(&w);
    fx_admin_open(&admin, &w.f);
    mapping[0] = w.slots[0].slot * FX_TOKENS;
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "decode.oldest_us"), 0);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_WAIT, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    id = fx_send(&w.c, WIRE_WRITE, write_body(&w, &x));
    fault_device_await_held(w.f.dev, 1);
    cr_assert_gt(fx_number(&admin, WIRE_SECTION_SUMMARY, "decode.oldest_us"), 0);
    fault_device_release(w.f.dev);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    fx_done(&a);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "decode.oldest_us"), 0);
    fx_gone(&admin);
    stop(&w);
}
