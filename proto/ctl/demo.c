/* The whole idea in a minute: a daemon, two engine processes, one pool.
 *
 *   engine A: writes the latents of a prompt through a slot mapping, decodes first, middle and last layer, is judged by
 *             an fp64 reference, stores the blocks -- and is killed with SIGKILL.  Whatever is decoded over the socket is
 *             decoded in the engine's own process as well, on the same slots: the bits are equal.
 *   engine B: finds the prefix, loads it into other slots, decodes the same layers and must get the same bits -- also
 *             after a restart of the daemon, of blocks that have stayed on the device.
 *   replay:   a generated trace of chats, every loaded byte verified.
 *
 * The two engines are forked from this process and report through one shared page range; everything else they do goes
 * over the socket, or to memory that came over it, as it would from any program. */
#include "proto/ctl/ctl.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config/json.h"
#include "kernels/client_cuda.h"
#include "kernels/mla_oracle.h"
#include "kernels/numeric.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/in_process.h"
#include "proto/ctl/private.h"
#include "proto/ctl/render.h"
#include "proto/ctl/replay.h"

enum {
    LAYERS = 61, /* DeepSeek-V3 */
    PAGE_TOKENS = 64,
    LATENT = KVS_MLA_LATENT,
    ROPE = KVS_MLA_ROPE,
    ROW = (LATENT + ROPE) * 2, /* bytes of a token in one layer */
    BLOCKS = 5,
    PROMPT = (BLOCKS - 1) * PAGE_TOKENS + 40, /* tokens: the last block is not full */
    HEADS = 128,
    SLOTS = 16,
    JUDGED = 3, /* layers */
    OUT_BYTES = HEADS * LATENT * 2,
    LSE_BYTES = HEADS * 4,
    COPY_ROUNDS = 15,
    CALL_MS = 30000,
};
static const uint32_t JUDGED_LAYERS[JUDGED] = {0, LAYERS / 2, LAYERS - 1};

/* What the engines tell their parent. */
typedef struct board {
    /* 1: engine A has stored everything and waits to be killed; 2: engine B wants a restart; 3: it has had it */
    _Atomic int stage;
    bool on_gpu;
    char failure[200];
    oracle_verdict verdict[JUDGED];
    uint8_t out[JUDGED][OUT_BYTES], lse[JUDGED][LSE_BYTES];
    uint32_t n_in_process, kernel; /* decodes in both ways with equal bits; by which kernel (enum kvs_kernel_id) */
    uint32_t hits;
    uint64_t moved_bytes;
    double store_gbs, load_gbs, memcpy_gbs, load_ratio;
} board;

typedef struct engine {
    const char *socket;
    board *b;
    kvs_client *client;
    kvs_ns *ns;
    kvs_region *region, *scratch;
    uint8_t *slots_at, *scratch_at; /* scratch_at: on a GPU a host copy of the region, see push and pull */
    uint8_t *scratch_dev;           /* NULL: host memory is the region itself */
    uint8_t *image;                 /* BLOCKS blocks of host memory */
    client_cuda_lane *lane;
    in_process *here;
    uint64_t slot_bytes;
    kvs_slot slots[SLOTS];
    uint8_t keys[BLOCKS][KVS_KEY_BYTES];
    kvs_plane planes[LAYERS];
    kvs_namespace desc; /* of ns */
} engine;

/* The scratch region: rows of every layer, then one layer's queries, output and LSE, and those of this process. */
enum {
    ROWS_BYTES = LAYERS * PROMPT * ROW,
    Q_NOPE_AT = ROWS_BYTES,
    Q_PE_AT = Q_NOPE_AT + HEADS * LATENT * 2,
    OUT_AT = Q_PE_AT + HEADS * ROPE * 2,
    LSE_AT = OUT_AT + OUT_BYTES,
    HERE_OUT_AT = LSE_AT + LSE_BYTES,
    HERE_LSE_AT = HERE_OUT_AT + OUT_BYTES,
    SCRATCH_BYTES = HERE_LSE_AT + LSE_BYTES,
};

static uint64_t next(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

/* About normal (a sum of four uniforms), as bf16. */
static void fill_normal(uint8_t *at, size_t n, float scale, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        uint16_t bits;

        for (int k = 0; k < 4; k++)
            sum += (float)(next(&seed) >> 40) / 8388608.0f - 1.0f;
        bits = kvs_f32_to_bf16(sum * scale * 0.866f);
        memcpy(at + i * 2, &bits, 2);
    }
}

/* ---- device memory, if it is any ---- */

/* Part of the scratch region, from the host's copy to the device, and back. */
static kvs_status push(engine *e, uint64_t at, uint64_t n, kvs_err *err)
{
    return e->scratch_dev != NULL ? client_cuda_copy(e->lane, e->scratch_dev + at, e->scratch_at + at, n, err) : KVS_OK;
}

static kvs_status pull(engine *e, uint64_t at, uint64_t n, kvs_err *err)
{
    return e->scratch_dev != NULL ? client_cuda_copy(e->lane, e->scratch_at + at, e->scratch_dev + at, n, err) : KVS_OK;
}

static kvs_status move(engine *e, void *dst, const void *src, uint64_t n, kvs_err *err)
{
    if (e->lane != NULL)
        return client_cuda_copy(e->lane, dst, src, n, err);
    memcpy(dst, src, n);
    return KVS_OK;
}

static uint8_t *block_at(const engine *e, uint32_t i)
{
    return e->slots_at + e->slots[i].slot * e->slot_bytes;
}

/* What was in the slots before must not matter: NaN in bf16. */
static kvs_status wipe_slots(engine *e, kvs_err *err)
{
    kvs_status s = KVS_OK;

    memset(e->image, 0xff, e->slot_bytes);
    for (uint32_t i = 0; i < SLOTS && s == KVS_OK; i++)
        s = move(e, block_at(e, i), e->image, e->slot_bytes, err);
    return s;
}

/* Host memory to copy from and to; pinned, where there is a GPU. */
static kvs_status open_memory(engine *e, void *scratch, kvs_err *err)
{
    kvs_region_info info;
    void *image = NULL, *copy = scratch;
    kvs_status s = KVS_OK;

    kvs_region_get(e->scratch, &info);
    if (info.memory == KVS_MEMORY_CUDA_VMM) {
        e->b->on_gpu = true;
        e->scratch_dev = scratch;
        s = client_cuda_lane_open(&e->lane, err);
        if (s == KVS_OK)
            s = client_cuda_host(e->lane, SCRATCH_BYTES, &copy, err);
        if (s == KVS_OK)
            s = client_cuda_host(e->lane, BLOCKS * e->slot_bytes, &image, err);
    } else {
        image = malloc(BLOCKS * e->slot_bytes);
        if (image == NULL)
            s = kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %d blocks", BLOCKS);
    }
    e->scratch_at = copy;
    e->image = image;
    return s;
}

static kvs_status engine_open(engine *e, kvs_err *err)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_region_info info;
    void *at = NULL;
    uint64_t bytes;
    uint32_t tokens[PAGE_TOKENS];
    uint8_t parent[KVS_KEY_BYTES] = {0};
    kvs_status s;

    o.path = e->socket;
    o.name = "demo engine";
    o.timeout_ms = CALL_MS;
    if ((s = kvs_connect(&e->client, &o, err)) != KVS_OK)
        return s;
    if ((s = kvs_namespace_mla("deepseek-v3", "demo", KVS_FORMAT_mla_bf16, LAYERS, PAGE_TOKENS, e->planes, &e->desc,
                               err)) != KVS_OK)
        return s;
    if ((s = kvs_open(e->client, &e->desc, &e->ns, 0, err)) != KVS_OK)
        return s;
    if ((s = kvs_region_create(e->ns, 0, SLOTS, &e->region, 0, err)) != KVS_OK)
        return s;
    if ((s = kvs_region_map(e->region, &at, &bytes, err)) != KVS_OK)
        return s;
    e->slots_at = at;
    kvs_region_get(e->region, &info);
    e->slot_bytes = info.slot_stride;
    if ((s = kvs_scratch_create(e->client, 0, SCRATCH_BYTES, &e->scratch, 0, err)) != KVS_OK)
        return s;
    if ((s = kvs_region_map(e->scratch, &at, &bytes, err)) != KVS_OK)
        return s;
    if ((s = open_memory(e, at, err)) != KVS_OK)
        return s;
    if ((s = in_process_open(&e->here, e->client, e->region, err)) != KVS_OK)
        return s;
    if ((s = kvs_slot_take(e->region, SLOTS, e->slots, 0, err)) != KVS_OK)
        return s;
    for (uint32_t b = 0; b < BLOCKS && s == KVS_OK; b++) {
        for (uint32_t t = 0; t < PAGE_TOKENS; t++)
            tokens[t] = b * PAGE_TOKENS + t;
        s = kvs_key_derive(parent, "", "", tokens, PAGE_TOKENS, e->keys[b], err);
        memcpy(parent, e->keys[b], sizeof parent);
    }
    return s;
}

/* The decode that came over the socket, now in this process, to another place: the bits must be the same. */
static kvs_status decode_here(engine *e, const kvs_decode_args *over, kvs_err *err)
{
    const kvs_call_result *there = &over->results[0];
    kvs_call_result here = {KVS_OK, 0, 0, 0};
    kvs_decode_call call = over->calls[0];
    kvs_decode_args a = *over;
    kvs_status s;

    call.out.offset = HERE_OUT_AT;
    call.lse.offset = HERE_LSE_AT;
    a.calls = &call;
    a.results = &here;
    if ((s = in_process_decode(e->here, &e->desc, &a, err)) != KVS_OK)
        return s;
    if ((s = pull(e, HERE_OUT_AT, OUT_BYTES + LSE_BYTES, err)) != KVS_OK)
        return s;
    if (here.kernel != there->kernel || here.parts != there->parts || here.bad != there->bad)
        return kvs_fail(err, KVS_E_CORRUPT,
                        "layer %u: kernel %u, %u parts in-process, kernel %u, %u parts over the socket", call.plane,
                        here.kernel, here.parts, there->kernel, there->parts);
    if (memcmp(e->scratch_at + HERE_OUT_AT, e->scratch_at + OUT_AT, OUT_BYTES) != 0 ||
        memcmp(e->scratch_at + HERE_LSE_AT, e->scratch_at + LSE_AT, LSE_BYTES) != 0)
        return kvs_fail(err, KVS_E_CORRUPT, "layer %u: in-process, not the bits that came over the socket", call.plane);
    e->b->kernel = here.kernel;
    e->b->n_in_process++;
    return KVS_OK;
}

/* One query of HEADS heads over the prompt in layer JUDGED_LAYERS[j], in blocks slots[first..]. */
static kvs_status decode(engine *e, uint32_t j, uint32_t first, kvs_err *err)
{
    int32_t len = PROMPT, table[BLOCKS];
    kvs_status s;
    kvs_call_result result = {KVS_OK, 0, 0, 0};
    kvs_decode_call call = {.plane = JUDGED_LAYERS[j], .parts = 4, .scratch = e->scratch};
    kvs_decode_args a = {.ns = e->ns, .region = e->region, .n_seqs = 1, .table_width = BLOCKS, .s_q = 1, .h_q = HEADS};

    for (uint32_t b = 0; b < BLOCKS; b++)
        table[b] = (int32_t)e->slots[first + b].slot;
    call.sm_scale = 1.0f / sqrtf(192.0f);
    call.q_nope = (kvs_operand){Q_NOPE_AT, HEADS * LATENT * 2, LATENT * 2};
    call.q_pe = (kvs_operand){Q_PE_AT, HEADS * ROPE * 2, ROPE * 2};
    call.out = (kvs_operand){OUT_AT, OUT_BYTES, LATENT * 2};
    call.lse = (kvs_operand){LSE_AT, LSE_BYTES, 4};
    a.seq_len = &len;
    a.block_table = table;
    a.n_calls = 1;
    a.calls = &call;
    a.results = &result;
    fill_normal(e->scratch_at + Q_NOPE_AT, HEADS * (LATENT + ROPE), 0.5f, 1000 + j);
    memset(e->scratch_at + OUT_AT, 0xff, SCRATCH_BYTES - OUT_AT);
    if ((s = push(e, Q_NOPE_AT, SCRATCH_BYTES - Q_NOPE_AT, err)) != KVS_OK)
        return s;
    if ((s = kvs_decode(&a, CALL_MS, err)) != KVS_OK)
        return s;
    if ((s = pull(e, OUT_AT, OUT_BYTES + LSE_BYTES, err)) != KVS_OK)
        return s;
    return decode_here(e, &a, err);
}

/* Judge what lies in the scratch region by the rows as they were before they went through the pool. */
static kvs_status judge(engine *e, uint32_t j, kvs_err *err)
{
    static double out[HEADS * LATENT], lse[HEADS];
    static uint8_t rows[BLOCKS * PAGE_TOKENS * ROW];
    int32_t len = PROMPT, table[BLOCKS];
    char text[ORACLE_TEXT_BYTES];
    kvs_mla_decode_args a = {.n_seqs = 1, .table_width = BLOCKS, .table_stride = BLOCKS, .s_q = 1, .h_q = HEADS};

    memcpy(rows, e->scratch_at + (uint64_t)JUDGED_LAYERS[j] * PROMPT * ROW, (size_t)PROMPT * ROW);
    for (int32_t b = 0; b < BLOCKS; b++)
        table[b] = b;
    a.view = (kvs_view){rows, (uint64_t)PAGE_TOKENS * ROW, (uint64_t)PAGE_TOKENS * ROW, BLOCKS, PAGE_TOKENS,
                        ROW,  KVS_FORMAT_mla_bf16};
    a.q_nope = (kvs_strided){e->scratch_at + Q_NOPE_AT, HEADS * LATENT * 2, LATENT * 2};
    a.q_pe = (kvs_strided){e->scratch_at + Q_PE_AT, HEADS * ROPE * 2, ROPE * 2};
    a.out = (kvs_strided){e->scratch_at + OUT_AT, OUT_BYTES, LATENT * 2};
    a.lse = (kvs_strided){e->scratch_at + LSE_AT, LSE_BYTES, 4};
    a.seq_len = &len;
    a.block_table = table;
    a.parts = 4;
    a.sm_scale = 1.0f / sqrtf(192.0f);
    (void)oracle_mla_decode(&a, out, lse);
    e->b->verdict[j] = oracle_compare(&a, out, lse);
    if (!oracle_accepts(&e->b->verdict[j], text))
        return kvs_fail(err, KVS_E_CORRUPT, "layer %u: %s", JUDGED_LAYERS[j], text);
    return KVS_OK;
}

static kvs_status write_prompt(engine *e, uint32_t first, kvs_err *err)
{
    static kvs_write_call calls[LAYERS];
    static kvs_call_result results[LAYERS];
    static int64_t mapping[PROMPT];
    kvs_write_args a = {.ns = e->ns, .region = e->region, .n_tokens = PROMPT, .n_calls = LAYERS};

    kvs_status s = wipe_slots(e, err);

    if (s != KVS_OK)
        return s;
    fill_normal(e->scratch_at, ROWS_BYTES / 2, 1.0f, 42);
    if ((s = push(e, 0, ROWS_BYTES, err)) != KVS_OK)
        return s;
    for (uint32_t t = 0; t < PROMPT; t++)
        mapping[t] = (int64_t)e->slots[first + t / PAGE_TOKENS].slot * PAGE_TOKENS + t % PAGE_TOKENS;
    for (uint32_t l = 0; l < LAYERS; l++) {
        uint64_t at = (uint64_t)l * PROMPT * ROW;

        calls[l] = (kvs_write_call){.plane = l,
                                    .scratch = e->scratch,
                                    .kv_c_offset = at,
                                    .kv_c_stride = ROW,
                                    .k_pe_offset = at + LATENT * 2,
                                    .k_pe_stride = ROW};
    }
    a.slot_mapping = mapping;
    a.calls = calls;
    a.results = results;
    return kvs_write(&a, CALL_MS, err);
}

static kvs_status store(engine *e, uint32_t first, kvs_err *err)
{
    kvs_status results[BLOCKS];
    kvs_store_args a = {.ns = e->ns, .region = e->region, .n = BLOCKS};

    a.keys = e->keys[0];
    a.slots = e->slots + first;
    a.results = results;
    return kvs_store(&a, CALL_MS, err);
}

static kvs_status load(engine *e, uint32_t first, kvs_err *err)
{
    kvs_load_result results[BLOCKS];
    kvs_load_args a = {.ns = e->ns, .region = e->region, .n = BLOCKS};

    a.keys = e->keys[0];
    a.slots = e->slots + first;
    a.results = results;
    return kvs_load(&a, CALL_MS, err);
}

/* Loads of the prompt's blocks, in turn with one plain copy of as many bytes; the ratio is of each pair of neighbours.
 * Into the first slots: those of the decodes come behind them. */
static kvs_status measure(engine *e, kvs_err *err)
{
    double copy[COPY_ROUNDS], loads[COPY_ROUNDS], ratio[COPY_ROUNDS];
    uint64_t bytes = BLOCKS * e->slot_bytes, at;
    kvs_status s = KVS_OK;

    memset(e->image, 1, bytes);
    for (int r = 0; r < COPY_ROUNDS && s == KVS_OK; r++) {
        at = clock_ns();
        s = move(e, e->slots_at, e->image, bytes, err);
        copy[r] = (double)bytes / (double)(clock_ns() - at);
        if (s != KVS_OK)
            return s;
        at = clock_ns();
        s = load(e, 0, err);
        loads[r] = (double)bytes / (double)(clock_ns() - at);
        ratio[r] = loads[r] / copy[r];
    }
    if (s != KVS_OK)
        return s;
    e->b->memcpy_gbs = clock_percentile(copy, COPY_ROUNDS, 50);
    e->b->load_gbs = clock_percentile(loads, COPY_ROUNDS, 50);
    e->b->load_ratio = clock_percentile(ratio, COPY_ROUNDS, 50);
    e->b->moved_bytes += COPY_ROUNDS * bytes;
    return KVS_OK;
}

/* Decode all layers again: the bits must be those of engine A. */
static kvs_status decode_same(engine *e, uint32_t first, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (uint32_t j = 0; j < JUDGED && s == KVS_OK; j++) {
        s = decode(e, j, first, err);
        if (s == KVS_OK && (memcmp(e->b->out[j], e->scratch_at + OUT_AT, OUT_BYTES) != 0 ||
                            memcmp(e->b->lse[j], e->scratch_at + LSE_AT, LSE_BYTES) != 0))
            return kvs_fail(err, KVS_E_CORRUPT, "layer %u: not the bits that engine A got", JUDGED_LAYERS[j]);
    }
    return s;
}

/* The daemon goes and comes back; its device memory has stayed, for we hold it.  Every byte is compared. */
static kvs_status outlive_daemon(engine *e, uint32_t first, kvs_err *err)
{
    uint64_t bytes = BLOCKS * e->slot_bytes, generation = kvs_generation(e->client);
    uint8_t *before = malloc(bytes);
    struct timespec step = {0, 10000000};
    kvs_region_info info;
    kvs_status s = KVS_OK;

    if (before == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %d blocks", BLOCKS);
    for (uint32_t b = 0; b < BLOCKS && s == KVS_OK; b++)
        s = move(e, e->image + b * e->slot_bytes, block_at(e, first + b), e->slot_bytes, err);
    memcpy(before, e->image, bytes);
    atomic_store(&e->b->stage, 2);
    while (s == KVS_OK && atomic_load(&e->b->stage) == 2)
        (void)nanosleep(&step, NULL);
    if (s == KVS_OK)
        s = kvs_wait_up(e->client, generation, CALL_MS, err);
    kvs_region_get(e->region, &info);
    if (s == KVS_OK && info.state != KVS_OK)
        s = kvs_fail(err, info.state, "the region was not taken back: %s", kvs_status_name(info.state));
    for (uint32_t b = 0; b < BLOCKS && s == KVS_OK; b++)
        s = move(e, e->image + b * e->slot_bytes, block_at(e, first + b), e->slot_bytes, err);
    if (s == KVS_OK && memcmp(before, e->image, bytes) != 0)
        s = kvs_fail(err, KVS_E_CORRUPT, "device blocks have changed over the restart");
    free(before);
    return s == KVS_OK ? decode_same(e, first, err) : s;
}

static kvs_status engine_a(engine *e, kvs_err *err)
{
    const uint32_t first = 3; /* no block of ours is slot 0: there every stride looks right */
    kvs_status s = engine_open(e, err);
    uint64_t at;

    if (s == KVS_OK)
        s = write_prompt(e, first, err);
    for (uint32_t j = 0; j < JUDGED && s == KVS_OK; j++) {
        s = decode(e, j, first, err);
        if (s != KVS_OK)
            return s;
        memcpy(e->b->out[j], e->scratch_at + OUT_AT, OUT_BYTES);
        memcpy(e->b->lse[j], e->scratch_at + LSE_AT, LSE_BYTES);
        s = judge(e, j, err);
    }
    at = clock_ns();
    if (s == KVS_OK)
        s = store(e, first, err);
    e->b->store_gbs = (double)(BLOCKS * e->slot_bytes) / (double)(clock_ns() - at);
    e->b->moved_bytes += BLOCKS * e->slot_bytes;
    return s;
}

static kvs_status engine_b(engine *e, kvs_err *err)
{
    const uint32_t first = 9; /* other slots than engine A's */
    kvs_status s = engine_open(e, err);

    if (s == KVS_OK)
        s = kvs_lookup(e->ns, e->keys[0], BLOCKS, &e->b->hits, NULL, 0, err);
    if (s == KVS_OK && e->b->hits != BLOCKS)
        return kvs_fail(err, KVS_E_NOT_FOUND, "%u of %d blocks were found", e->b->hits, BLOCKS);
    if (s == KVS_OK)
        s = wipe_slots(e, err);
    if (s == KVS_OK)
        s = load(e, first, err);
    e->b->moved_bytes += BLOCKS * e->slot_bytes;
    if (s == KVS_OK)
        s = decode_same(e, first, err);
    if (s == KVS_OK)
        s = measure(e, err);
    return s == KVS_OK ? outlive_daemon(e, first, err) : s;
}

/* Fork an engine.  A stays until it is killed; B ends by itself. */
static pid_t start_engine(board *b, const char *socket, bool is_a)
{
    pid_t parent = getpid(), pid;

    (void)fflush(NULL);
    pid = fork();
    if (pid == 0) {
        static engine e;
        kvs_err err = {0};
        kvs_status s;

        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* A would wait for ever to be killed */
        if (getppid() != parent)
            _exit(1);
        e.socket = socket;
        e.b = b;
        s = is_a ? engine_a(&e, &err) : engine_b(&e, &err);
        if (s != KVS_OK) {
            (void)snprintf(b->failure, sizeof b->failure, "engine %c: %.150s", is_a ? 'A' : 'B',
                           err.msg[0] ? err.msg : kvs_status_text(s));
            _exit(1);
        }
        if (is_a) {
            atomic_store(&b->stage, 1);
            for (;;)
                (void)pause();
        }
        _exit(0);
    }
    return pid;
}

/* Wait until A has stored its blocks, then kill -9.  False: it ended before, or took more than a minute. */
static bool kill_engine_a(board *b, pid_t pid)
{
    struct timespec step = {0, 10000000};

    for (int i = 0; i < 6000; i++) {
        if (atomic_load(&b->stage) == 1) {
            (void)kill(pid, SIGKILL);
            (void)waitpid(pid, NULL, 0);
            return true;
        }
        if (waitpid(pid, NULL, WNOHANG) == pid)
            return false;
        (void)nanosleep(&step, NULL);
    }
    (void)snprintf(b->failure, sizeof b->failure, "engine A: not done after 60 s");
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    return false;
}

/* ---- what people see ---- */

/* A line as it happens; nothing with --json. */
__attribute__((format(printf, 2, 3))) static void say(const ctl *c, const char *fmt, ...)
{
    va_list ap;

    if (c->json)
        return;
    va_start(ap, fmt);
    (void)vprintf(fmt, ap);
    va_end(ap);
    (void)fflush(stdout);
}

static const char *ok(void)
{
    return isatty(STDOUT_FILENO) ? "\033[32mok\033[0m" : "ok";
}

static const char *kernel_name(const board *b)
{
    return b->kernel == KVS_KERNEL_MLA_DECODE_MMA ? "CUDA" : "C";
}

static const char *const SETTINGS[] = {"pool.max_bytes=384MiB", "pool.extent_bytes=64MiB"};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

/* Engine B: until it ends.  In the middle of it the daemon is restarted.  False: it failed. */
static bool serve_engine_b(board *b, pid_t pid, private_daemon *d)
{
    struct timespec step = {0, 10000000};
    kvs_err err = {.msg = ""};
    int status = 0;

    while (atomic_load(&b->stage) != 2) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return false; /* before it came to that */
        (void)nanosleep(&step, NULL);
    }
    if (private_restart(d, SETTINGS, N_SETTINGS, &err) != KVS_OK) {
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, NULL, 0);
        (void)snprintf(b->failure, sizeof b->failure, "restart: %.180s", err.msg);
        return false;
    }
    atomic_store(&b->stage, 3);
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool engines(const ctl *c, board *b, private_daemon *d)
{
    const char *socket = d->socket;
    pid_t pid = start_engine(b, socket, true);

    say(c, "engine A   writes %d tokens x %d layers, decodes layers %u, %u and %u, stores %d blocks\n", PROMPT, LAYERS,
        JUDGED_LAYERS[0], JUDGED_LAYERS[1], JUDGED_LAYERS[2], BLOCKS);
    if (pid < 0 || !kill_engine_a(b, pid))
        return false;
    for (uint32_t j = 0; j < JUDGED; j++)
        say(c, "  %s  layer %-2u against fp64: cosine distance %.1e, error %.3f of RMS, LSE %.1e\n", ok(),
            JUDGED_LAYERS[j], b->verdict[j].cosine, b->verdict[j].max_error, b->verdict[j].lse);
    say(c, "  %s  layers %u, %u and %u in-process, by the same %s kernel: the same bits as over the socket\n", ok(),
        JUDGED_LAYERS[0], JUDGED_LAYERS[1], JUDGED_LAYERS[2], kernel_name(b));
    say(c, "  %s  killed with SIGKILL\nengine B   looks the prefix up, loads it into other slots, decodes\n", ok());
    pid = start_engine(b, socket, false);
    if (pid < 0 || !serve_engine_b(b, pid, d))
        return false;
    say(c, "  %s  %u of %d blocks found\n  %s  layers %u, %u and %u: the same bits as engine A\n", ok(), b->hits,
        BLOCKS, ok(), JUDGED_LAYERS[0], JUDGED_LAYERS[1], JUDGED_LAYERS[2]);
    say(c, "  %s  a restart of the daemon: the blocks stayed on the device, every byte and all decoded bits the same\n",
        ok());
    return true;
}

static oracle_verdict worst(const board *b)
{
    oracle_verdict w = {0};

    for (uint32_t j = 0; j < JUDGED; j++) {
        w.cosine = fmax(w.cosine, b->verdict[j].cosine);
        w.max_error = fmax(w.max_error, b->verdict[j].max_error);
        w.lse = fmax(w.lse, b->verdict[j].lse);
    }
    return w;
}

static double hit_rate(const replay_result *r)
{
    return r->blocks ? (double)r->hit_blocks / (double)r->blocks : NAN;
}

static int put_summary(const board *b, const replay_result *r, double seconds)
{
    json_writer *w = json_writer_create();
    oracle_verdict v = worst(b);

    json_begin_object(w, NULL);
    json_put_bool(w, "verified", true);
    json_put_u64(w, "hits", b->hits);
    json_put_u64(w, "moved_bytes", b->moved_bytes);
    json_put_double(w, "store_gb_per_s", b->store_gbs);
    json_put_double(w, "load_gb_per_s", b->load_gbs);
    json_put_double(w, "memcpy_gb_per_s", b->memcpy_gbs);
    json_put_double(w, "load_ratio", b->load_ratio);
    json_put_double(w, "decode_cosine_distance", v.cosine);
    json_put_double(w, "decode_error_rms", v.max_error);
    json_put_double(w, "decode_lse_error", v.lse);
    json_put_string(w, "decode_kernel", kernel_name(b));
    json_put_u64(w, "decodes_in_process", b->n_in_process);
    json_put_u64(w, "replay_requests", r->requests);
    json_put_double(w, "replay_hit_rate", hit_rate(r));
    json_put_u64(w, "replay_mismatches", r->mismatches);
    json_put_double(w, "seconds", seconds);
    json_end(w);
    return ctl_put(w, CTL_OK);
}

static void print_summary(const board *b, const replay_result *r, double seconds)
{
    oracle_verdict v = worst(b);
    char size[32];

    (void)printf("\n  %-26s  %d layers x %d tokens, %s, one copy\n", "a block", LAYERS, PAGE_TOKENS,
                 render_bytes(size, sizeof size, (double)LAYERS * PAGE_TOKENS * ROW));
    (void)printf("  %-26s  %u of %d blocks\n", "found after kill -9", b->hits, BLOCKS);
    (void)printf("  %-26s  cosine distance %.1e, error %.3f of RMS, LSE %.1e\n", "decode, the worst", v.cosine,
                 v.max_error, v.lse);
    (void)printf("  %-26s  %s\n", "moved, region and pool", render_bytes(size, sizeof size, (double)b->moved_bytes));
    (void)printf("  %-26s  %.2f GB/s, %.2f of %s (%.2f GB/s)\n", "LOAD, median", b->load_gbs, b->load_ratio,
                 b->on_gpu ? "one raw copy of pinned memory" : "memcpy on one thread", b->memcpy_gbs);
    (void)printf("  %-26s  %.2f GB/s, into memory not yet touched\n", "the first STORE", b->store_gbs);
    (void)printf("  %-26s  %" PRIu64 " requests, hit rate %.3f, %s loaded\n", "replay", r->requests, hit_rate(r),
                 render_bytes(size, sizeof size, (double)r->loaded_bytes));
    (void)printf("  %-26s  %.1f s\n", "all in", seconds);
    (void)printf("\nEverything was verified.  Where to go next: a small client (README.md), 'kvstridectl --help',\n"
                 "the protocol (proto/PROTOCOL.md), and 'make bench' for figures beside plain ones.\n");
}

/* What the daemon says that it works on. */
static const char *device_of(const private_daemon *d)
{
    static char name[96];
    kvs_report_args a = KVS_REPORT_SUMMARY;
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *c = NULL;
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;

    (void)snprintf(name, sizeof name, "unknown");
    o.path = d->socket;
    if (kvs_connect(&c, &o, NULL) == KVS_OK && kvs_report_alloc(c, &a, &text, &len, 0, NULL) == KVS_OK &&
        json_parse(text, len, &doc, NULL) == KVS_OK) {
        const json_node *kind = json_member(json_root(doc), "device");
        const json_node *card = json_member(json_root(doc), "device_name");

        if (kind != NULL)
            (void)snprintf(name, sizeof name, "%.20s%s%.64s", json_string(kind),
                           card != NULL && json_string(card)[0] != '\0' ? ", " : "",
                           card != NULL ? json_string(card) : "");
    }
    json_destroy(doc);
    kvs_free(text);
    kvs_close(c);
    return name;
}

static kvs_status replay(const char *socket, replay_result *ret, kvs_err *err)
{
    trace t;
    replay_config r = {.socket = socket, .t = &t, .layers = LAYERS, .tokens = 4, .clients = 2};
    kvs_status s = trace_generate(&t, 200, 24, 2026, err);

    if (s != KVS_OK)
        return s;
    s = replay_run(&r, ret, err);
    trace_free(&t);
    return s;
}

int ctl_demo(const ctl *c)
{
    private_daemon d = {0};
    replay_result r = {0};
    kvs_err err = {0};
    uint64_t begin = clock_ns();
    int code = CTL_FAILED;
    double seconds;
    kvs_status s;
    board *b = mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (b == MAP_FAILED)
        return ctl_fail(c, "demo", KVS_E_NO_MEMORY, NULL);
    s = private_start(&d, SETTINGS, N_SETTINGS, &err);
    if (s != KVS_OK) {
        code = ctl_fail(c, "demo", s, &err);
        goto end;
    }
    say(c, "kvstrided  %s on the %s device, private, a pool of 384 MiB\n", KVS_VERSION, device_of(&d));
    if (!engines(c, b, &d)) {
        (void)kvs_fail(&err, KVS_E_CORRUPT, "%s", b->failure[0] ? b->failure : "an engine died");
        (void)ctl_fail(c, "demo", KVS_E_CORRUPT, &err);
        goto end;
    }
    say(c, "replay     a generated trace of chats, 2 clients at a time\n");
    s = replay(d.socket, &r, &err);
    if (s != KVS_OK || r.mismatches != 0 || r.hit_blocks == 0) {
        if (s == KVS_OK)
            (void)kvs_fail(&err, KVS_E_CORRUPT, "replay: %" PRIu64 " mismatches, %" PRIu64 " hits", r.mismatches,
                           r.hit_blocks);
        (void)ctl_fail(c, "demo", KVS_E_CORRUPT, &err);
        goto end;
    }
    say(c, "  %s  %" PRIu64 " blocks loaded, every byte as it was stored\n", ok(), r.hit_blocks);
    seconds = (double)(clock_ns() - begin) / 1e9;
    code = CTL_OK;
    if (c->json)
        code = put_summary(b, &r, seconds);
    else
        print_summary(b, &r, seconds);
end:
    private_stop(&d);
    (void)munmap(b, sizeof *b);
    return code;
}
