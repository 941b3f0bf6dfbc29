/* WRITE, DECODE and EXTEND over the socket, on a region and a scratch region of the daemon's GPU: bytes of the C reference,
 * the bits of a decode in this process, and what an fp64 oracle says.
 *
 * Planes of three formats with room behind their rows; shuffled slots above 0; random bytes all around, looked at again. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/mla.h"
#include "kernels/mla_oracle.h"
#include "proto/ctl/in_process.h"
#include "tests/gpu/gpu_engine.h"
#include "tests/support/random.h"

enum { PAGE_TOKENS = 16, PLANES = 3, SLOTS = 12, SEQS = 2, WIDTH = 4, S_Q = 2, HEADS = 20, MAX_T = 11, NONE = -1 };
enum { LATENT = KVS_MLA_LATENT, ROPE = KVS_MLA_ROPE, GAP = 32 };
enum {
    LATENT_HEAD = LATENT * 2 + GAP,
    LATENT_TOKEN = HEADS * LATENT_HEAD + GAP,
    ROPE_HEAD = ROPE * 2 + GAP,
    ROPE_TOKEN = HEADS * ROPE_HEAD + GAP,
    LSE_TOKEN = HEADS * 4 + GAP,
    ROW = (LATENT + ROPE) * 2,
    ROWS = SLOTS * PAGE_TOKENS,
    KV_AT = 64,
    Q_NOPE_AT = KV_AT + ROWS * ROW,
    Q_PE_AT = Q_NOPE_AT + MAX_T * LATENT_TOKEN,
    OUT_AT = Q_PE_AT + MAX_T * ROPE_TOKEN,
    LSE_AT = OUT_AT + MAX_T * LATENT_TOKEN,
    SCRATCH_BYTES = LSE_AT + MAX_T * LSE_TOKEN + 4096,
};

static const uint32_t FORMAT[PLANES] = {KVS_FORMAT_mla_fp8, KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp16};
static const int32_t LENGTHS[SEQS] = {3 * PAGE_TOKENS + 5, PAGE_TOKENS + 9};
static const int32_t TABLE[SEQS * WIDTH] = {9, 2, 11,   5,
                                            7, 4, NONE, SLOTS + 90}; /* what is behind a length is not read */
static const int32_t Q_START[SEQS + 1] = {1, 4, MAX_T};              /* token 0 is padding */

typedef struct desk {
    kvs_client *client;
    kvs_plane planes[PLANES];
    kvs_namespace desc;
    kvs_ns *ns;
    kvs_region *region, *scratch;
    kvs_region_info info;
    in_process *here;
    uint8_t *slots_at, *scratch_at; /* on the GPU */
    uint8_t *slots, *paper, *seen;  /* what must be there; seen: what is */
    uint64_t bytes;
} desk;

static uint32_t source_of(uint32_t plane)
{
    return FORMAT[plane] == KVS_FORMAT_mla_fp16 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16;
}

static float scale_of(uint32_t plane)
{
    return FORMAT[plane] == KVS_FORMAT_mla_fp8 ? 0.0625f : 0;
}

static void put(uint8_t *at, uint32_t n, uint32_t format, rnd *r)
{
    for (uint32_t i = 0; i < n; i++) {
        uint16_t bits = oracle_bits(format, rnd_normal(r));

        memcpy(at + 2 * (uint64_t)i, &bits, sizeof bits);
    }
}

static bool desk_open(desk *k)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_err err = {.msg = ""};
    kvs_slot slots[SLOTS];
    void *at[2] = {NULL, NULL};
    uint64_t n = 0;
    rnd r = rnd_open("calls", 31);

    *k = (desk){.client = NULL};
    if (!engine_start_daemon())
        return false;
    o.path = engine_daemon.socket;
    o.timeout_ms = CALL_MS;
    k->desc =
        (kvs_namespace){.model = "calls", .tokens_per_block = PAGE_TOKENS, .n_planes = PLANES, .planes = k->planes};
    for (uint32_t p = 0; p < PLANES; p++) {
        k->planes[p] = (kvs_plane){.name = "latent", .layer = p, .format = FORMAT[p]};
        k->planes[p].row_bytes = kvs_format_row_bytes(FORMAT[p]);
        k->planes[p].page_bytes = (uint64_t)PAGE_TOKENS * k->planes[p].row_bytes + p * 64;
    }
    if (kvs_connect(&k->client, &o, &err) != KVS_OK || kvs_open(k->client, &k->desc, &k->ns, 0, &err) != KVS_OK ||
        kvs_region_create(k->ns, 0, SLOTS, &k->region, 0, &err) != KVS_OK ||
        kvs_scratch_create(k->client, 0, SCRATCH_BYTES, &k->scratch, 0, &err) != KVS_OK ||
        kvs_slot_take(k->region, SLOTS, slots, 0, &err) != KVS_OK ||
        kvs_region_map(k->scratch, &at[1], &n, &err) != KVS_OK ||
        kvs_region_map(k->region, &at[0], &k->bytes, &err) != KVS_OK ||
        in_process_open(&k->here, k->client, k->region, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    kvs_region_get(k->region, &k->info);
    k->slots_at = at[0];
    k->scratch_at = at[1];
    k->slots = malloc(k->bytes);
    k->paper = malloc(SCRATCH_BYTES);
    k->seen = malloc(k->bytes > SCRATCH_BYTES ? k->bytes : SCRATCH_BYTES);
    if (k->slots == NULL || k->paper == NULL || k->seen == NULL)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, k->slots, k->bytes);
    rnd_bytes(&r, k->paper, SCRATCH_BYTES);
    return to_device(k->slots_at, k->slots, k->bytes);
}

static void desk_close(desk *k)
{
    in_process_close(k->here);
    if (k->client != NULL)
        kvs_close(k->client);
    free(k->slots);
    free(k->paper);
    free(k->seen);
}

/* The slots, and the scratch region before its outputs, are what they must be. */
static bool untouched(desk *k, const char *what)
{
    if (!from_device(k->seen, k->slots_at, k->bytes))
        return false;
    for (uint64_t i = 0; i < k->bytes; i++)
        if (k->seen[i] != k->slots[i])
            return GPU_FAIL("%s: byte %" PRIu64 " of slot %" PRIu64 " is %#x, not %#x", what, i % k->info.slot_stride,
                            i / k->info.slot_stride, k->seen[i], k->slots[i]);
    if (!from_device(k->seen, k->scratch_at, SCRATCH_BYTES))
        return false;
    return memcmp(k->seen, k->paper, OUT_AT) == 0 || GPU_FAIL("%s: an input in the scratch region has changed", what);
}

static kvs_view view_of(const desk *k, uint32_t plane)
{
    return (kvs_view){.base = k->slots + kvs_namespace_plane_offset(&k->desc, plane),
                      .block_stride = k->info.slot_stride,
                      .page_bytes = k->planes[plane].page_bytes,
                      .n_blocks = SLOTS,
                      .tokens_per_block = PAGE_TOKENS,
                      .row_bytes = k->planes[plane].row_bytes,
                      .format = FORMAT[plane]};
}

/* ---- WRITE: every row of slots 1.., in a shuffled order, one skipped ---- */

static uint32_t shuffled_rows(int64_t *ret)
{
    uint32_t n = 0;

    for (uint32_t i = PAGE_TOKENS; i < ROWS; i++) /* slot 0 stays as it is */
        ret[n++] = PAGE_TOKENS + (i - PAGE_TOKENS) * 7 % (ROWS - PAGE_TOKENS);
    ret[1] = -5; /* of slot 1, which no table names */
    return n;
}

static bool write_plane(desk *k, uint32_t plane, rnd *r)
{
    int64_t mapping[ROWS];
    uint32_t n = shuffled_rows(mapping), bad = 0;
    float scale = scale_of(plane);
    kvs_call_result ret = {0};
    kvs_err err = {.msg = ""};
    kvs_write_call call = {.plane = plane,
                           .scratch = k->scratch,
                           .kv_c_offset = KV_AT,
                           .kv_c_stride = ROW,
                           .k_pe_offset = KV_AT + LATENT * 2,
                           .k_pe_stride = ROW,
                           .kv_scale = scale};
    kvs_write_args a = {.ns = k->ns, .region = k->region, .n_tokens = n, .n_calls = 1};
    kvs_mla_write_args want = {.view = view_of(k, plane),
                               .kv_c = k->paper + KV_AT,
                               .k_pe = k->paper + KV_AT + LATENT * 2,
                               .kv_c_stride = ROW,
                               .k_pe_stride = ROW,
                               .slot_mapping = mapping,
                               .n_tokens = n,
                               .src_type = FORMAT[plane] == KVS_FORMAT_mla_fp8 ? KVS_VALUE_BF16 : 0,
                               .scale = &scale};

    a.slot_mapping = mapping;
    a.calls = &call;
    a.results = &ret;
    put(k->paper + KV_AT, ROWS * (LATENT + ROPE), source_of(plane), r);
    if (!to_device(k->scratch_at, k->paper, SCRATCH_BYTES))
        return false;
    if (kvs_write(&a, CALL_MS, &err) != KVS_OK || kvs_mla_write(&want, &bad, &err) != KVS_OK)
        return GPU_FAIL("plane %u: %s", plane, err.msg);
    if (ret.bad != 0 || bad != 0)
        return GPU_FAIL("plane %u: %u bad slots, the reference has %u, there is none", plane, ret.bad, bad);
    mapping[5] = ROWS; /* no row: refused before anything is written */
    if (kvs_write(&a, CALL_MS, &err) != KVS_E_RANGE || strstr(err.msg, "slot_mapping[5]: 192") == NULL)
        return GPU_FAIL("plane %u: a slot that is none: %s", plane, err.msg);
    return untouched(k, "write");
}

/* ---- DECODE and EXTEND ---- */

static kvs_decode_call call_of(const desk *k, uint32_t plane)
{
    kvs_decode_call c = {.plane = plane, .parts = plane, .scratch = k->scratch, .sm_scale = 0.04f};

    c.kv_scale = scale_of(plane);
    c.q_nope = (kvs_operand){Q_NOPE_AT, LATENT_TOKEN, LATENT_HEAD};
    c.q_pe = (kvs_operand){Q_PE_AT, ROPE_TOKEN, ROPE_HEAD};
    c.out = (kvs_operand){OUT_AT, LATENT_TOKEN, LATENT_HEAD};
    c.lse = (kvs_operand){LSE_AT, LSE_TOKEN, 4};
    return c;
}

static bool ask(desk *k, uint32_t plane, rnd *r)
{
    for (uint32_t i = 0; i < MAX_T * HEADS; i++) {
        put(k->paper + Q_NOPE_AT + i / HEADS * LATENT_TOKEN + i % HEADS * LATENT_HEAD, LATENT, source_of(plane), r);
        put(k->paper + Q_PE_AT + i / HEADS * ROPE_TOKEN + i % HEADS * ROPE_HEAD, ROPE, source_of(plane), r);
    }
    return to_device(k->scratch_at, k->paper, SCRATCH_BYTES);
}

/* What query t sees: its sequence and how many tokens. */
typedef struct sight {
    uint32_t first, n; /* of the queries that have one */
    int32_t len[MAX_T], table[MAX_T * WIDTH];
} sight;

static void sees(sight *s, uint32_t t, uint32_t seq, int32_t len)
{
    s->len[t] = len;
    memcpy(&s->table[(size_t)t * WIDTH], &TABLE[(size_t)seq * WIDTH], WIDTH * sizeof TABLE[0]);
}

/* The outputs in `seen` beside those of the oracle: a sequence of its own for every query. */
static bool judged(desk *k, uint32_t plane, const sight *s, const char *what)
{
    const uint64_t rows = (uint64_t)s->n * HEADS;
    double *out = malloc(rows * LATENT * sizeof *out), *lse = malloc(rows * sizeof *lse);
    float scale = scale_of(plane);
    char text[ORACLE_TEXT_BYTES] = "no memory";
    kvs_mla_decode_args a = {.view = view_of(k, plane),
                             .seq_len = s->len + s->first,
                             .block_table = s->table + (size_t)s->first * WIDTH,
                             .table_stride = WIDTH,
                             .n_seqs = s->n,
                             .table_width = WIDTH,
                             .s_q = 1,
                             .h_q = HEADS,
                             .sm_scale = 0.04f,
                             .kv_scale = &scale};
    kvs_strided got = {k->seen + OUT_AT + (uint64_t)s->first * LATENT_TOKEN, LATENT_TOKEN, LATENT_HEAD},
                got_lse = {k->seen + LSE_AT + (uint64_t)s->first * LSE_TOKEN, LSE_TOKEN, 4};
    bool good = false;

    a.q_nope = (kvs_strided){k->paper + Q_NOPE_AT + (uint64_t)s->first * LATENT_TOKEN, LATENT_TOKEN, LATENT_HEAD};
    a.q_pe = (kvs_strided){k->paper + Q_PE_AT + (uint64_t)s->first * ROPE_TOKEN, ROPE_TOKEN, ROPE_HEAD};
    if (out != NULL && lse != NULL) {
        oracle_verdict v;

        (void)oracle_mla_decode(&a, out, lse);
        v = oracle_compare_rows(FORMAT[plane], &got, &got_lse, s->n, HEADS, out, lse);
        good = oracle_accepts(&v, text);
    }
    free(out);
    free(lse);
    return good || GPU_FAIL("%s of plane %u: %s", what, plane, text);
}

static bool decode_plane(desk *k, uint32_t plane, rnd *r)
{
    kvs_decode_call call = call_of(k, plane);
    kvs_call_result there = {0}, mine = {0};
    kvs_err err = {.msg = ""};
    kvs_decode_args a = {.ns = k->ns,
                         .region = k->region,
                         .n_seqs = SEQS,
                         .table_width = WIDTH,
                         .s_q = S_Q,
                         .h_q = HEADS,
                         .n_calls = 1,
                         .seq_len = LENGTHS,
                         .block_table = TABLE,
                         .calls = &call};
    uint8_t *first = malloc(SCRATCH_BYTES);
    sight s = {.n = SEQS * S_Q};
    bool good = first != NULL && ask(k, plane, r);

    for (uint32_t t = 0; t < s.n; t++)
        sees(&s, t, t / S_Q, LENGTHS[t / S_Q] - S_Q + (int32_t)(t % S_Q) + 1);
    a.results = &there;
    if (good && kvs_decode(&a, CALL_MS, &err) != KVS_OK)
        good = GPU_FAIL("decode of plane %u: %s", plane, err.msg);
    good = good && untouched(k, "decode") && judged(k, plane, &s, "decode");
    if (good)
        memcpy(first, k->seen, SCRATCH_BYTES);
    good = good && to_device(k->scratch_at, k->paper, SCRATCH_BYTES);
    a.results = &mine;
    if (good && in_process_decode(k->here, &k->desc, &a, &err) != KVS_OK)
        good = GPU_FAIL("decode of plane %u in this process: %s", plane, err.msg);
    good = good && from_device(k->seen, k->scratch_at, SCRATCH_BYTES);
    if (good && memcmp(k->seen, first, SCRATCH_BYTES) != 0)
        good = GPU_FAIL("plane %u: other bits in this process", plane);
    if (good && (there.kernel != KVS_KERNEL_MLA_DECODE_MMA || mine.kernel != there.kernel || mine.parts != there.parts))
        good = GPU_FAIL("plane %u: kernels %u and %u, parts %u and %u", plane, there.kernel, mine.kernel, there.parts,
                        mine.parts);
    free(first);
    return good;
}

static bool extend_plane(desk *k, uint32_t plane, rnd *r)
{
    kvs_decode_call call = call_of(k, plane);
    kvs_call_result ret = {0};
    kvs_err err = {.msg = ""};
    kvs_extend_args a = {.ns = k->ns,
                         .region = k->region,
                         .n_seqs = SEQS,
                         .table_width = WIDTH,
                         .n_tokens = MAX_T,
                         .h_q = HEADS,
                         .n_calls = 1,
                         .q_start = Q_START,
                         .seq_len = LENGTHS,
                         .block_table = TABLE,
                         .calls = &call};
    sight s = {.first = (uint32_t)Q_START[0], .n = (uint32_t)(Q_START[SEQS] - Q_START[0])};

    a.results = &ret;
    for (uint32_t i = 0; i < SEQS; i++)
        for (int32_t t = Q_START[i]; t < Q_START[i + 1]; t++)
            sees(&s, (uint32_t)t, i, LENGTHS[i] - (Q_START[i + 1] - t) + 1);
    if (!ask(k, plane, r))
        return false;
    if (kvs_extend(&a, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("extend of plane %u: %s", plane, err.msg);
    if (ret.kernel != KVS_KERNEL_MLA_EXTEND_MMA || ret.bad != 0)
        return GPU_FAIL("extend of plane %u: kernel %u, %u bad", plane, ret.kernel, ret.bad);
    if (!untouched(k, "extend") || !judged(k, plane, &s, "extend"))
        return false;
    return memcmp(k->seen + OUT_AT, k->paper + OUT_AT, LATENT_TOKEN) == 0 ||
           GPU_FAIL("extend of plane %u: the padding query was written", plane);
}

/* ---- the tests ---- */

static bool each_plane(bool (*run)(desk *k, uint32_t plane, rnd *r))
{
    rnd r = rnd_open("planes", 5);
    desk k;
    bool good = desk_open(&k);

    for (uint32_t p = 0; p < PLANES && good; p++)
        good = write_plane(&k, p, &r);
    for (uint32_t p = 0; p < PLANES && good && run != NULL; p++)
        good = run(&k, p, &r);
    desk_close(&k);
    return good;
}

static bool write_rows(device *d)
{
    (void)d;
    return each_plane(NULL);
}

static bool decode(device *d)
{
    (void)d;
    return each_plane(decode_plane);
}

static bool extend(device *d)
{
    (void)d;
    return each_plane(extend_plane);
}

static const gpu_test tests[] = {
    {"WRITE: the bytes of the C reference, and nothing beside them", write_rows},
    {"DECODE: within the oracle's limits, with the bits of a decode in this process", decode},
    {"EXTEND: ragged queries behind a prefix, within the oracle's limits", extend},
};

int main(int argc, char **argv)
{
    int rc = gpu_run(tests, sizeof tests / sizeof tests[0], argc, argv);

    engine_end_daemon(rc != 0);
    return rc;
}
#else
static bool none(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    static const gpu_test tests[] = {{"calls over the socket", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
