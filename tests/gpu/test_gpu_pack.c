/* Client pack and calls on streams against the real daemon on a GPU: bytes, order, and ends. */
#include "tests/gpu/gpu.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/client/kvstride_pack.h"
#include "proto/ctl/pattern.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/random.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

enum { LAYERS = 61, BLOCKS = 48, CALL_MS = 60000, COUNTER = 20, STREAM_COUNTER = 40, STREAM_COUNTERS = 4 };

static daemon_fixture served;
static bool has_daemon;

static bool start_daemon(void)
{
    if (!has_daemon) {
        daemon_init(&served);
        has_daemon = true;
        daemon_configure(&served, "{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"2GiB\"}}");
    }
    return served.pid != 0 || daemon_start(&served, NULL) ? true : GPU_FAIL("the daemon does not start");
}

static bool cuda_ok(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? true : GPU_FAIL("%s: %s", what, cudaGetErrorString(e));
}

/* ---- an engine with a tensor a layer ---- */

typedef struct engine {
    kvs_client *client;
    kvs_ns *ns;
    kvs_pack *pack;
    kvs_plane planes[LAYERS];
    kvs_pack_plane tensors[LAYERS];
    uint32_t n_planes;
    uint8_t *memory; /* device */
    uint64_t bytes;
    cudaStream_t stream;
    kvs_stream *ks;
    uint8_t keys[BLOCKS][KVS_KEY_BYTES];
    uint32_t blocks[BLOCKS];
    kvs_status results[BLOCKS];
} engine;

/* MLA planes, and between them indexer planes with pages of another size. */
static void model(engine *e, uint32_t tokens, bool mixed, kvs_namespace *desc)
{
    *desc = (kvs_namespace){.model = "pack", .tokens_per_block = tokens, .n_planes = LAYERS, .planes = e->planes};
    e->n_planes = LAYERS;
    for (uint32_t i = 0; i < LAYERS; i++) {
        bool indexer = mixed && i % 2 == 1;
        uint32_t row = indexer ? 132 : 1152;

        e->planes[i] = (kvs_plane){.layer = mixed ? i / 2 : i,
                                   .format = indexer ? KVS_FORMAT_indexer_fp8 : KVS_FORMAT_mla_bf16,
                                   .row_bytes = row,
                                   .page_bytes = (uint64_t)tokens * row};
        (void)snprintf(e->planes[i].name, sizeof e->planes[i].name, "%s", indexer ? "indexer" : "latent");
    }
}

/* Descending layers, gaps between pages and tensors. */
static bool tensors(engine *e)
{
    uint64_t at = 4096, start[LAYERS];

    for (uint32_t k = e->n_planes; k-- > 0;) {
        e->tensors[k].stride = e->planes[k].page_bytes + 16 * (k % 3);
        start[k] = at;
        at += e->tensors[k].stride * BLOCKS + 1024;
    }
    e->bytes = at;
    if (!cuda_ok(cudaMalloc((void **)&e->memory, at), "cudaMalloc"))
        return false;
    for (uint32_t k = 0; k < e->n_planes; k++)
        e->tensors[k].base = e->memory + start[k];
    return true;
}

static kvs_pack_args args_of(const engine *e)
{
    return (kvs_pack_args){.ns = e->ns,
                           .n_planes = e->n_planes,
                           .planes = e->tensors,
                           .n_blocks = BLOCKS,
                           .first_counter = COUNTER,
                           .chunk = 5,
                           .n_staging = 12};
}

static bool engine_open(engine *e, uint32_t tokens, bool mixed)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    kvs_pack_args a;
    kvs_err err = {.msg = ""};

    if (!start_daemon())
        return false;
    model(e, tokens, mixed, &desc);
    o.path = served.socket;
    o.timeout_ms = CALL_MS;
    o.backoff_min_ms = 5;
    o.backoff_max_ms = 50;
    if (!tensors(e) || !cuda_ok(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking), "stream"))
        return false;
    if (kvs_connect(&e->client, &o, &err) != KVS_OK || kvs_open(e->client, &desc, &e->ns, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    a = args_of(e);
    if (kvs_pack_open(e->client, &a, &e->pack, 0, &err) != KVS_OK ||
        kvs_stream_open(e->client, e->stream, STREAM_COUNTER, STREAM_COUNTERS, &e->ks, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return true;
}

static void engine_close(engine *e)
{
    kvs_close(e->client);
    (void)cudaStreamDestroy(e->stream);
    (void)cudaFree(e->memory);
}

/* Keys id.. in blocks at, at + step, ... */
static kvs_pack_move move_of(engine *e, uint64_t id, uint32_t n, uint32_t at, uint32_t step)
{
    for (uint32_t i = 0; i < n; i++) {
        pattern_key(id + i, e->keys[i]);
        e->blocks[i] = (at + i * step) % BLOCKS;
    }
    return (kvs_pack_move){.n = n, .keys = e->keys[0], .blocks = e->blocks, .results = e->results};
}

static kvs_status start(engine *e, const kvs_pack_move *m, bool load, kvs_request **ret, kvs_err *err)
{
    return load ? kvs_pack_load(e->pack, m, ret, CALL_MS, err) : kvs_pack_store(e->pack, m, ret, CALL_MS, err);
}

static kvs_status finish(kvs_request *r, kvs_err *err)
{
    kvs_status s = kvs_wait(r, CALL_MS, err);

    return s == KVS_OK ? kvs_request_end(r, err) : s;
}

static kvs_status run(engine *e, const kvs_pack_move *m, bool load, kvs_err *err)
{
    kvs_request *r = NULL;
    kvs_status s = start(e, m, load, &r, err);

    return s == KVS_OK ? finish(r, err) : s;
}

/* ---- every byte ---- */

static uint64_t page_at(const engine *e, uint32_t plane, uint32_t block)
{
    return (uint64_t)((uint8_t *)e->tensors[plane].base - e->memory) + block * e->tensors[plane].stride;
}

static bool there_and_back(uint32_t tokens, bool mixed, uint32_t n)
{
    engine e = {0};
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("pack", tokens + n);
    kvs_pack_move m;
    uint8_t *image, *want, *got;

    if (!engine_open(&e, tokens, mixed))
        return false;
    image = malloc(e.bytes);
    want = malloc(e.bytes);
    got = malloc(e.bytes);
    if (image == NULL || want == NULL || got == NULL)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, image, e.bytes);
    if (!cuda_ok(cudaMemcpy(e.memory, image, e.bytes, cudaMemcpyDefault), "upload"))
        return false;
    m = move_of(&e, 1000 * tokens + n, n, 1, 5);
    if (run(&e, &m, false, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!cuda_ok(cudaMemcpy(got, e.memory, e.bytes, cudaMemcpyDefault), "fetch"))
        return false;
    if (memcmp(got, image, e.bytes) != 0)
        return GPU_FAIL("the store has changed the tensors");
    memset(want, 0xc5, e.bytes);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t p = 0; p < e.n_planes; p++)
            memcpy(want + page_at(&e, p, (BLOCKS - 1 + i * 7) % BLOCKS), image + page_at(&e, p, e.blocks[i]),
                   e.planes[p].page_bytes);
    if (!cuda_ok(cudaMemset(e.memory, 0xc5, e.bytes), "wipe"))
        return false;
    m = move_of(&e, 1000 * tokens + n, n, BLOCKS - 1, 7);
    if (run(&e, &m, true, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!cuda_ok(cudaMemcpy(got, e.memory, e.bytes, cudaMemcpyDefault), "fetch"))
        return false;
    for (uint64_t i = 0; i < e.bytes; i++)
        if (got[i] != want[i])
            return GPU_FAIL("byte %" PRIu64 " of %" PRIu64 " is %02x, not %02x", i, e.bytes, got[i], want[i]);
    engine_close(&e);
    free(image);
    free(want);
    free(got);
    return true;
}

static bool round_trips(device *d)
{
    (void)d;
    for (int i = 0; i < (gpu_subset() ? 1 : 3); i++)
        if (!there_and_back(i == 1 ? 16 : 64, i == 2, gpu_subset() ? 7 : BLOCKS))
            return GPU_FAIL("case %d", i);
    return there_and_back(16, true, 1);
}

/* ---- order ---- */

static void CUDART_CB sleep_on_stream(void *ms)
{
    struct timespec t = {.tv_nsec = (long)(intptr_t)ms * 1000000};

    (void)nanosleep(&t, NULL);
}

/* Blocks (of all planes) whose pages are `value` all over. */
static bool count_pure(engine *e, uint32_t n, uint8_t value, uint32_t *ret)
{
    uint8_t *got = malloc(e->bytes);

    *ret = 0;
    if (got == NULL || !cuda_ok(cudaMemcpy(got, e->memory, e->bytes, cudaMemcpyDefault), "fetch"))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        bool pure = true;

        for (uint32_t p = 0; p < e->n_planes; p++) {
            const uint8_t *page = got + page_at(e, p, e->blocks[i]);

            pure = pure && page[0] == value && memcmp(page, page + 1, e->planes[p].page_bytes - 1) == 0;
        }
        *ret += pure;
    }
    free(got);
    return true;
}

/* Under a sanitizer, which makes every launch wait for what other streams do, the kernel that a waiting stream waits for would
 * never run: not by a stream there. */
enum order { BY_STREAM, BY_LIBRARY, NOT_AT_ALL, ORDERS };

static void set_order(const engine *e, enum order o, kvs_pack_move *m)
{
    m->stream = o == BY_STREAM ? e->ks : NULL;
    m->flags = o == NOT_AT_ALL ? KVS_PACK_NO_WAIT : 0;
}

/* A producer that is late: does the store take the old bytes, or wait? */
static bool produce(engine *e, enum order o, uint64_t id, uint8_t value, uint32_t *ret_pure)
{
    kvs_pack_move m = move_of(e, id, BLOCKS, 0, 1);
    kvs_err err = {.msg = ""};
    kvs_request *r;

    if (!cuda_ok(cudaMemset(e->memory, 0, e->bytes), "memset") || !cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    (void)cudaLaunchHostFunc(e->stream, sleep_on_stream, (void *)(intptr_t)30);
    (void)cudaMemsetAsync(e->memory, value, e->bytes, e->stream);
    set_order(e, o, &m);
    if (start(e, &m, false, &r, &err) != KVS_OK || finish(r, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!cuda_ok(cudaStreamSynchronize(e->stream), "synchronise") ||
        !cuda_ok(cudaMemset(e->memory, 0, e->bytes), "memset") || !cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    if (run(e, &m, true, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    return count_pure(e, BLOCKS, value, ret_pure);
}

/* A reset of the pages that is late, and a reader right behind the load: the reader must see what was loaded. */
static bool consume(engine *e, enum order o, uint64_t id, uint8_t value, uint32_t *ret_pure)
{
    kvs_pack_move m = move_of(e, id, BLOCKS, 0, 1);
    kvs_err err = {.msg = ""};
    kvs_request *r;
    void *copy;

    if (!cuda_ok(cudaMemset(e->memory, value, e->bytes), "memset") || !cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    if (run(e, &m, false, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!cuda_ok(cudaMalloc(&copy, e->bytes), "cudaMalloc"))
        return false;
    (void)cudaLaunchHostFunc(e->stream, sleep_on_stream, (void *)(intptr_t)10);
    (void)cudaMemsetAsync(e->memory, 0, e->bytes, e->stream);
    set_order(e, o, &m);
    if (start(e, &m, true, &r, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (o == BY_LIBRARY && finish(r, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    (void)cudaMemcpyAsync(copy, e->memory, e->bytes, cudaMemcpyDefault, e->stream);
    if (o != BY_LIBRARY && finish(r, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!cuda_ok(cudaStreamSynchronize(e->stream), "synchronise") ||
        !cuda_ok(cudaMemcpy(e->memory, copy, e->bytes, cudaMemcpyDefault), "copy back"))
        return false;
    (void)cudaFree(copy);
    return count_pure(e, BLOCKS, value, ret_pure);
}

static bool order(device *d)
{
    static const char *const NAME[ORDERS] = {"by a stream", "by the library", "not at all"};
    uint32_t rounds = gpu_subset() ? 1 : 5, pure, corrupt = 0;
    engine e = {0};

    (void)d;
    if (!engine_open(&e, 64, false))
        return false;
    for (uint32_t i = 0; i < rounds; i++)
        for (int o = gpu_subset() ? BY_LIBRARY : BY_STREAM; o < ORDERS; o++)
            for (int load = 0; load < 2; load++) {
                uint64_t id = 1000000 + ((i * ORDERS + (uint64_t)o) * 2 + (uint64_t)load) * 100;
                uint8_t value = (uint8_t)(1 + i * 6 + (uint32_t)o * 2 + (uint32_t)load);

                if (!(load ? consume : produce)(&e, (enum order)o, id, value, &pure))
                    return GPU_FAIL("round %u, %s", i, NAME[o]);
                if (o != NOT_AT_ALL && pure != BLOCKS)
                    return GPU_FAIL("round %u, ordered %s: %u of %d blocks are right", i, NAME[o], pure, (int)BLOCKS);
                corrupt += o == NOT_AT_ALL && pure != BLOCKS;
            }
    engine_close(&e);
    (void)printf("      without order %u of %u moves were wrong, with it none\n", corrupt, rounds * 2);
    return corrupt == rounds * 2 || gpu_subset() ? true
                                                 : GPU_FAIL("the control runs are right: the test proves nothing");
}

/* ---- LOAD and STORE of daemon slots on a stream ---- */

enum { SLOTS = 24 };

typedef struct slots {
    kvs_region *region;
    kvs_slot at[SLOTS];
    uint8_t *base;
    uint64_t bytes;
    kvs_status stored[SLOTS];
    kvs_load_result loaded[SLOTS];
} slots;

static bool slots_open(engine *e, slots *x)
{
    kvs_err err = {.msg = ""};
    void *base;

    if (kvs_region_create(e->ns, 0, SLOTS, &x->region, 0, &err) != KVS_OK ||
        kvs_region_map(x->region, &base, &x->bytes, &err) != KVS_OK ||
        kvs_slot_take(x->region, SLOTS, x->at, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    x->base = base;
    return true;
}

static void name_keys(engine *e, uint64_t id)
{
    for (uint32_t i = 0; i < SLOTS; i++)
        pattern_key(id + i, e->keys[i]);
}

static bool all_is(const slots *x, uint64_t bytes, uint8_t value, bool *ret)
{
    uint8_t *got = malloc(bytes);

    if (got == NULL || !cuda_ok(cudaMemcpy(got, x->base, bytes, cudaMemcpyDefault), "fetch"))
        return false;
    *ret = got[0] == value && memcmp(got, got + 1, bytes - 1) == 0;
    free(got);
    return true;
}

/* fill, STORE, wipe, LOAD, copy: all given at once to one stream, nothing waited for but the store's answer. */
static bool stream_round(engine *e, slots *x, bool ordered, uint64_t id, uint8_t value, bool *ret_right)
{
    const kvs_mark now = KVS_MARK_NOW;
    kvs_ns_info info;
    kvs_store_args st = {.ns = e->ns, .region = x->region, .n = SLOTS, .keys = e->keys[0], .slots = x->at};
    kvs_load_args ld = {.ns = e->ns, .region = x->region, .n = SLOTS, .keys = e->keys[0], .slots = x->at};
    kvs_request *r;
    kvs_err err = {.msg = ""};
    uint64_t bytes;

    kvs_ns_get(e->ns, &info);
    bytes = SLOTS * info.slot_bytes;
    name_keys(e, id);
    st.results = x->stored;
    ld.results = x->loaded;
    st.stream = ld.stream = ordered ? e->ks : NULL;
    st.after = ld.after = ordered ? NULL : &now;
    (void)cudaLaunchHostFunc(e->stream, sleep_on_stream, (void *)(intptr_t)20);
    (void)cudaMemsetAsync(x->base, value, bytes, e->stream);
    if (kvs_store(&st, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    (void)cudaLaunchHostFunc(e->stream, sleep_on_stream, (void *)(intptr_t)5);
    (void)cudaMemsetAsync(x->base, 0, bytes, e->stream);
    if (kvs_submit_load(&ld, &r, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    (void)cudaMemcpyAsync(e->memory, x->base, bytes, cudaMemcpyDefault, e->stream);
    if (finish(r, &err) != KVS_OK || !cuda_ok(cudaStreamSynchronize(e->stream), "synchronise"))
        return GPU_FAIL("load: %s", err.msg);
    (void)cudaMemcpy(x->base, e->memory, bytes, cudaMemcpyDefault);
    return all_is(x, bytes, value, ret_right);
}

static bool streams(device *d)
{
    uint32_t rounds = gpu_subset() ? 2 : 10, corrupt = 0;
    engine e = {0};
    slots x = {0};
    bool right;

    (void)d;
    if (!engine_open(&e, 64, false) || !slots_open(&e, &x))
        return false;
    for (uint32_t i = 0; i < rounds; i++) {
        if (!stream_round(&e, &x, true, 2000000 + i * 100, (uint8_t)(1 + i), &right))
            return false;
        if (!right)
            return GPU_FAIL("round %u: wrong bytes behind the stream", i);
        if (!stream_round(&e, &x, false, 3000000 + i * 100, (uint8_t)(101 + i), &right))
            return false;
        corrupt += !right;
    }
    engine_close(&e);
    (void)printf("      without the stream %u of %u rounds were wrong, with it none\n", corrupt, rounds);
    return corrupt == rounds || gpu_subset() ? true : GPU_FAIL("the control runs are right: the test proves nothing");
}

/* Many loads on one stream: more than it has counters are refused, and the stream goes on behind each. */
static bool many_loads(engine *e, slots *x)
{
    kvs_request *r[STREAM_COUNTERS], *more;
    kvs_load_args a[STREAM_COUNTERS + 1];
    kvs_err err = {.msg = ""};

    (void)cudaLaunchHostFunc(e->stream, sleep_on_stream, (void *)(intptr_t)30);
    for (uint32_t i = 0; i <= STREAM_COUNTERS; i++)
        a[i] = (kvs_load_args){.ns = e->ns,
                               .region = x->region,
                               .n = 1,
                               .keys = e->keys[i],
                               .slots = &x->at[i],
                               .results = &x->loaded[i],
                               .stream = e->ks};
    for (uint32_t i = 0; i < STREAM_COUNTERS; i++)
        if (kvs_submit_load(&a[i], &r[i], CALL_MS, &err) != KVS_OK)
            return GPU_FAIL("load %u: %s", i, err.msg);
    if (kvs_submit_load(&a[STREAM_COUNTERS], &more, CALL_MS, &err) != KVS_E_BUSY)
        return GPU_FAIL("one load more than counters is not refused");
    for (uint32_t i = 0; i < STREAM_COUNTERS; i++)
        if (finish(r[i], &err) != KVS_OK)
            return GPU_FAIL("load %u: %s", i, err.msg);
    return cuda_ok(cudaStreamSynchronize(e->stream), "synchronise");
}

static bool counters(device *d)
{
    kvs_mark mark = {.counter = 256, .value = 1};
    kvs_store_args a = {.n = SLOTS};
    engine e = {0};
    slots x = {0};
    kvs_err err = {.msg = ""};

    (void)d;
    if (!engine_open(&e, 16, false) || !slots_open(&e, &x))
        return false;
    name_keys(&e, 4000000);
    a = (kvs_store_args){
        .ns = e.ns, .region = x.region, .n = SLOTS, .keys = e.keys[0], .slots = x.at, .results = x.stored};
    if (kvs_store(&a, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    for (uint32_t round = 0; round < 5; round++)
        if (!many_loads(&e, &x))
            return GPU_FAIL("round %u", round);
    if (kvs_stream_wait(e.ks, 0, mark, &err) != KVS_E_RANGE)
        return GPU_FAIL("counter 256 is not refused");
    if (kvs_stream_signal(e.ks, &mark, &err) != KVS_OK ||
        kvs_slot_drop(x.region, x.at, 1, &mark, NULL, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("drop after a signal: %s", err.msg);
    engine_close(&e);
    return true;
}

static bool refused(kvs_status got, kvs_status want, const kvs_err *err, const char *says)
{
    if (got != want || strstr(err->msg, says) == NULL)
        return GPU_FAIL("%s (%s), not %s with \"%s\"", kvs_status_name(got), err->msg, kvs_status_name(want), says);
    return true;
}

static bool refuse_captured(engine *e, slots *x)
{
    kvs_pack_move m = move_of(e, 5000000, 2, 0, 1);
    kvs_load_args a = {.ns = e->ns,
                       .region = x->region,
                       .n = 1,
                       .keys = e->keys[0],
                       .slots = x->at,
                       .results = x->loaded,
                       .stream = e->ks};
    kvs_mark mark = {.counter = 1, .value = 1};
    kvs_request *r;
    kvs_err err = {.msg = ""};
    cudaGraph_t graph;
    bool good;

    if (!cuda_ok(cudaStreamBeginCapture(e->stream, cudaStreamCaptureModeRelaxed), "capture"))
        return false;
    m.stream = e->ks;
    good = refused(kvs_stream_signal(e->ks, &mark, &err), KVS_E_STATE, &err, "captured") &&
           refused(kvs_stream_wait(e->ks, 0, mark, &err), KVS_E_STATE, &err, "captured") &&
           refused(kvs_load(&a, CALL_MS, &err), KVS_E_STATE, &err, "captured") &&
           refused(start(e, &m, true, &r, &err), KVS_E_STATE, &err, "captured") &&
           refused(start(e, &m, false, &r, &err), KVS_E_STATE, &err, "captured");
    if (!cuda_ok(cudaStreamEndCapture(e->stream, &graph), "the capture was broken"))
        return false;
    (void)cudaGraphDestroy(graph);
    return good;
}

static bool refuse(device *d)
{
    engine e = {0};
    slots x = {0};
    kvs_pack_args a;
    kvs_stream *again;
    kvs_pack *p;
    kvs_err err = {.msg = ""};
    void *host = malloc(1 << 20);

    (void)d;
    if (!engine_open(&e, 64, false) || !slots_open(&e, &x) || !refuse_captured(&e, &x))
        return false;
    a = args_of(&e);
    a.first_counter = 100;
    a.n_blocks = BLOCKS * 100;
    if (!refused(kvs_pack_open(e.client, &a, &p, 0, &err), KVS_E_RANGE, &err, "no memory at"))
        return false;
    a.n_blocks = 1;
    e.tensors[3].base = (void *)(((uintptr_t)host + 15) / 16 * 16);
    if (!refused(kvs_pack_open(e.client, &a, &p, 0, &err), KVS_E_RANGE, &err, "planes[3].base"))
        return false;
    if (!refused(kvs_stream_open(e.client, e.stream, STREAM_COUNTER + STREAM_COUNTERS - 1, 4, &again, &err), KVS_E_BUSY,
                 &err, "in use"))
        return false;
    if (!refused(kvs_stream_open(e.client, e.stream, 250, 7, &again, &err), KVS_E_RANGE, &err, "outside"))
        return false;
    engine_close(&e);
    free(host);
    return cuda_ok(cudaDeviceSynchronize(), "the device afterwards");
}

/* ---- the daemon dies under a waiting stream ---- */

static bool outlive(device *d)
{
    engine e = {0};
    slots x = {0};
    kvs_load_args a = {.n = SLOTS};
    kvs_pack_move m;
    kvs_request *load, *packed;
    kvs_err err = {.msg = ""};

    (void)d;
    if (!engine_open(&e, 64, false) || !slots_open(&e, &x))
        return false;
    for (int round = 0; round < (gpu_subset() ? 1 : 3); round++) {
        uint64_t generation = kvs_generation(e.client);
        double at;

        name_keys(&e, 6000000);
        a = (kvs_load_args){.ns = e.ns,
                            .region = x.region,
                            .n = 1,
                            .keys = e.keys[0],
                            .slots = x.at,
                            .results = x.loaded,
                            .stream = e.ks};
        (void)kill(served.pid, SIGSTOP); /* it has what it was sent, and answers none of it */
        if (kvs_submit_load(&a, &load, CALL_MS, &err) != KVS_OK)
            return GPU_FAIL("load: %s", err.msg);
        m = move_of(&e, 6000100, BLOCKS, 0, 1);
        m.stream = e.ks;
        if (start(&e, &m, true, &packed, &err) != KVS_OK)
            return GPU_FAIL("pack: %s", err.msg);
        if (cudaStreamQuery(e.stream) != cudaErrorNotReady)
            return GPU_FAIL("the stream does not wait");
        at = gpu_seconds();
        (void)daemon_stop(&served, SIGKILL);
        served.pid = 0;
        if (!cuda_ok(cudaStreamSynchronize(e.stream), "the stream afterwards"))
            return false;
        at = gpu_seconds() - at;
        if (finish(load, &err) != KVS_E_AWAY || x.loaded[0].status != KVS_E_AWAY)
            return GPU_FAIL("load: %s", err.msg);
        if (finish(packed, &err) != KVS_E_AWAY || e.results[0] != KVS_E_AWAY)
            return GPU_FAIL("pack: %s", err.msg);
        (void)printf("      the stream went on %.1f ms after the kill\n", at * 1e3);
        if (!start_daemon() || kvs_wait_up(e.client, generation, CALL_MS, &err) != KVS_OK)
            return GPU_FAIL("reconnect: %s", err.msg);
        m = move_of(&e, 6100000, BLOCKS, 0, 1);
        m.stream = e.ks;
        if (run(&e, &m, false, &err) != KVS_OK || run(&e, &m, true, &err) != KVS_OK)
            return GPU_FAIL("after the restart: %s", err.msg);
        if (!cuda_ok(cudaStreamSynchronize(e.stream), "the stream after the restart"))
            return false;
    }
    engine_close(&e);
    return true;
}

static const gpu_test TESTS[] = {
    {"pack: every byte there and back, pages of 72 and 18 KiB, planes of two kinds", round_trips},
    {"pack: order with an engine's stream, by a stream, by the library, not at all", order},
    {"stream: store, wipe, load and copy in one row without waiting", streams},
    {"stream: a counter for each load, and no more", counters},
    {"pack, stream: refuse captured streams and memory that is not there", refuse},
    {"pack, stream: go on when the daemon dies, and with the next one", outlive},
};

int main(int argc, char **argv)
{
    int rc = gpu_run(TESTS, sizeof TESTS / sizeof *TESTS, argc, argv);

    if (has_daemon)
        daemon_fini(&served);
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
    static const gpu_test TESTS[] = {{"pack on a GPU", none}};

    return gpu_run(TESTS, 1, argc, argv);
}
#endif
