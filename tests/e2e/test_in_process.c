/* The same decode over the socket and in this process, on memory of the real daemon: equal bits, as long as the memory is. */
#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>
#include <string.h>

#include "kernels/mla.h"
#include "kernels/numeric.h"
#include "proto/ctl/in_process.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/random.h"

#define OK(call) check((call), KVS_OK, #call)

enum { TOKENS = 16, PLANES = 3, SLOTS = 8, SEQS = 2, S_Q = 2, HEADS = 3, WIDTH = 3, CALL_MS = 20000 };
enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, ROWS = SEQS * S_Q, GAP = 16 };
/* Heads lie apart, tokens too. */
enum {
    LATENT_HEAD = LATENT * 2 + GAP,
    LATENT_TOKEN = HEADS * LATENT_HEAD + GAP,
    ROPE_HEAD = ROPE * 2 + GAP,
    ROPE_TOKEN = HEADS * ROPE_HEAD + GAP,
    LSE_TOKEN = HEADS * 4 + GAP,
    Q_NOPE_AT = 64,
    Q_PE_AT = Q_NOPE_AT + ROWS * LATENT_TOKEN,
    OUT_AT = Q_PE_AT + ROWS * ROPE_TOKEN,
    LSE_AT = OUT_AT + ROWS * LATENT_TOKEN,
    RESULT_BYTES = ROWS * (LATENT_TOKEN + LSE_TOKEN),
    SCRATCH_BYTES = OUT_AT + 2 * PLANES * RESULT_BYTES,
};

static const char CONFIG[] = "{\"pool\": {\"max_bytes\": \"16MiB\"}, \"device\": {\"kind\": \"cpu\"}}";
static const uint32_t FORMAT[PLANES] = {KVS_FORMAT_mla_fp8, KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16};
static const int32_t LENGTHS[SEQS] = {2 * TOKENS + 5, TOKENS + 1};
static const int32_t TABLE[SEQS * WIDTH] = {6, 1, 4, 3, 7, -1}; /* what is behind the second one's end is never read */

static daemon_fixture d;
static kvs_err err;
static kvs_client *client;
static kvs_plane planes[PLANES];
static kvs_namespace desc = {.model = "twice", .tokens_per_block = TOKENS, .n_planes = PLANES, .planes = planes};
static kvs_ns *ns;
static kvs_region *region, *scratch;
static kvs_region_info info;
static uint8_t *slots_at, *scratch_at;
static in_process *here;

static void check(kvs_status s, kvs_status want, const char *what)
{
    cr_assert_eq(s, want, "%s: %s (%s) where %s was due", what, kvs_status_name(s), s != KVS_OK ? err.msg : "",
                 kvs_status_name(want));
}

static void put(uint8_t *at, size_t n, uint32_t format, rnd *r)
{
    for (size_t i = 0; i < n; i++) {
        float x = (float)rnd_normal(r);
        uint16_t bits = format == KVS_FORMAT_mla_fp16 ? kvs_f32_to_f16(x) : kvs_f32_to_bf16(x);

        if (format == KVS_FORMAT_mla_fp8)
            at[i] = kvs_f32_to_e4m3(x);
        else
            memcpy(at + 2 * i, &bits, sizeof bits);
    }
}

static uint8_t *row_at(uint32_t plane, uint32_t slot, uint32_t token)
{
    return slots_at + slot * info.slot_stride + kvs_namespace_plane_offset(&desc, plane) +
           (uint64_t)token * planes[plane].row_bytes;
}

static void setup(void)
{
    rnd r = rnd_open("in_process", 11);
    uint64_t bytes = 0;
    void *at = NULL;
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_slot slots[SLOTS];

    daemon_init(&d);
    cr_assert(daemon_start(&d, CONFIG));
    o.path = d.socket;
    OK(kvs_connect(&client, &o, &err));
    for (uint32_t p = 0; p < PLANES; p++) {
        planes[p] = (kvs_plane){.name = "latent", .layer = p, .format = FORMAT[p]};
        planes[p].row_bytes = kvs_format_row_bytes(FORMAT[p]);
        planes[p].page_bytes = (uint64_t)TOKENS * planes[p].row_bytes + p * 64; /* pages with room behind their rows */
    }
    OK(kvs_open(client, &desc, &ns, CALL_MS, &err));
    OK(kvs_region_create(ns, 0, SLOTS, &region, CALL_MS, &err));
    OK(kvs_scratch_create(client, 0, SCRATCH_BYTES, &scratch, CALL_MS, &err));
    OK(kvs_region_map(region, &at, &bytes, &err));
    slots_at = at;
    OK(kvs_region_map(scratch, &at, &bytes, &err));
    scratch_at = at;
    kvs_region_get(region, &info);
    OK(kvs_slot_take(region, SLOTS, slots, CALL_MS, &err));
    for (uint32_t p = 0; p < PLANES; p++)
        for (uint32_t i = 0; i < SLOTS * TOKENS; i++)
            put(row_at(p, i / TOKENS, i % TOKENS), LATENT + ROPE, FORMAT[p], &r);
    memset(scratch_at, 0xff, SCRATCH_BYTES);
    OK(in_process_open(&here, client, region, &err));
}

static void teardown(void)
{
    in_process_close(here);
    kvs_close(client);
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    daemon_fini(&d);
}

/* Queries of the plane's type; call p puts its results into place 2p (over the socket) or 2p + 1. */
static kvs_decode_call call_of(uint32_t plane, bool local)
{
    kvs_decode_call c = {.plane = plane, .parts = plane + 1, .scratch = scratch};
    uint64_t at = (2 * plane + local) * RESULT_BYTES;
    rnd r = {.state = 77 + plane};

    for (uint32_t i = 0; i < ROWS * HEADS; i++) {
        put(scratch_at + Q_NOPE_AT + i / HEADS * LATENT_TOKEN + i % HEADS * LATENT_HEAD, LATENT,
            plane == 2 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16, &r);
        put(scratch_at + Q_PE_AT + i / HEADS * ROPE_TOKEN + i % HEADS * ROPE_HEAD, ROPE,
            plane == 2 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16, &r);
    }
    c.sm_scale = 0.07f;
    c.kv_scale = FORMAT[plane] == KVS_FORMAT_mla_fp8 ? 0.75f : 0;
    c.q_nope = (kvs_operand){Q_NOPE_AT, LATENT_TOKEN, LATENT_HEAD};
    c.q_pe = (kvs_operand){Q_PE_AT, ROPE_TOKEN, ROPE_HEAD};
    c.out = (kvs_operand){OUT_AT + at, LATENT_TOKEN, LATENT_HEAD};
    c.lse = (kvs_operand){LSE_AT + at, LSE_TOKEN, 4};
    return c;
}

static kvs_status decode(uint32_t plane, bool local, uint32_t flags, kvs_call_result *ret)
{
    kvs_decode_call c = call_of(plane, local);
    kvs_decode_args a = {.ns = ns,
                         .region = region,
                         .n_seqs = SEQS,
                         .table_width = WIDTH,
                         .s_q = S_Q,
                         .h_q = HEADS,
                         .n_calls = 1,
                         .flags = flags,
                         .seq_len = LENGTHS,
                         .block_table = TABLE,
                         .calls = &c,
                         .results = ret};

    return local ? in_process_decode(here, &desc, &a, &err) : kvs_decode(&a, CALL_MS, &err);
}

static const uint8_t *results_of(uint32_t plane, bool local)
{
    return scratch_at + OUT_AT + (2 * plane + local) * RESULT_BYTES;
}

static float lse_of(uint32_t plane, bool local)
{
    float x;

    memcpy(&x, results_of(plane, local) + ROWS * LATENT_TOKEN, sizeof x);
    return x;
}

static bool same(uint32_t plane)
{
    return memcmp(results_of(plane, false), results_of(plane, true), RESULT_BYTES) == 0;
}

Test(in_process, gives_the_bits_of_the_socket_for_every_plane, .init = setup, .fini = teardown)
{
    for (uint32_t p = 0; p < PLANES; p++) {
        kvs_call_result there = {0}, mine = {0};

        OK(decode(p, false, p == 1 ? KVS_DECODE_FIXED_SPLIT : 0, &there));
        OK(decode(p, true, p == 1 ? KVS_DECODE_FIXED_SPLIT : 0, &mine));
        cr_assert(isfinite(lse_of(p, true)), "plane %u: nothing was written", p);
        cr_assert(same(p), "plane %u: other bits", p);
        cr_assert_eq(mine.status, KVS_OK);
        cr_assert_eq(mine.kernel, there.kernel);
        cr_assert_eq(mine.parts, p + 1);
        cr_assert_eq(there.parts, p + 1);
        cr_assert_eq(mine.bad, 0);
    }
}

Test(in_process, reads_the_slots_themselves, .init = setup, .fini = teardown)
{
    for (uint32_t p = 0; p < PLANES; p++) {
        kvs_call_result r = {0};

        OK(decode(p, false, 0, &r));
        row_at(p, 4, 3)[planes[p].row_bytes / 2 - 1] ^= 0x80; /* a sign in a token of the first sequence */
        OK(decode(p, true, 0, &r));
        cr_assert(!same(p), "plane %u: a changed latent changes nothing", p);
        OK(decode(p, false, 0, &r));
        cr_assert(same(p), "plane %u: the daemon does not see what was changed", p);
    }
}

Test(in_process, counts_what_it_skips_and_refuses_what_is_no_plane, .init = setup, .fini = teardown)
{
    kvs_call_result r = {0};
    kvs_decode_call c = call_of(1, true);
    const int32_t table[SEQS * WIDTH] = {6, SLOTS, 4, 3, -7, 0};
    kvs_decode_args a = {
        .region = region, .n_seqs = SEQS, .table_width = WIDTH, .s_q = S_Q, .h_q = HEADS, .n_calls = 1};

    a.seq_len = LENGTHS;
    a.block_table = table;
    a.calls = &c;
    a.results = &r;
    OK(in_process_decode(here, &desc, &a, &err));
    cr_assert_eq(r.bad, 2, "%u", r.bad);
    c.plane = PLANES;
    check(in_process_decode(here, &desc, &a, &err), KVS_E_INVALID, "a plane that is none");
    cr_assert_eq(r.status, KVS_E_INVALID);
    cr_assert_not_null(strstr(err.msg, "plane: 3 is outside 0..2"), "%s", err.msg);
    c.plane = 1;
    a.s_q = KVS_MLA_MAX_SQ + 1;
    cr_assert_neq(in_process_decode(here, &desc, &a, &err), KVS_OK);
    in_process_close(NULL);
}
