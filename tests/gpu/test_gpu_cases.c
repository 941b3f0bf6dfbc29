/* Field cases about data, each by its number: what went wrong elsewhere, tried on the real daemon with a GPU.  What a case asks of a second GPU is not tried here, and its name says so.
 *
 * "-client KIND SOCKET" makes this program a client that is to be killed. */
#include "tests/gpu/gpu_engine.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/pattern.h"
#include "tests/gpu/race_cuda.h"
#include "tests/support/random.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

/* ---- 002: a load over a block that is still being read ---- */

typedef struct reader {
    racer x;
    uint64_t *sum; /* device */
    uint64_t words, key;
} reader;

static uint64_t sum_of(const reader *r, uint8_t value)
{
    return r->words * (UINT64_C(0x0101010101010101) * value);
}

static bool read_sum(reader *r, uint64_t *ret)
{
    return racer_synchronise(&r->x) && from_device(ret, r->sum, sizeof *ret);
}

/* ret_old: the reader saw the old content.  ret_new: the block ends as what was loaded. */
static bool overwrite(reader *r, bool ordered, uint64_t round, bool *ret_old, bool *ret_new)
{
    const uint8_t old = (uint8_t)(1 + round % 50);
    kvs_mark after = {.counter = 1, .value = round};
    static flight f;
    kvs_err err = {.msg = ""};
    uint64_t seen;

    if (!set_device(r->x.base, old, r->x.bytes) || !race_cuda_sum(r->x.base, r->x.bytes, 10, r->sum, r->x.stream) ||
        !racer_raise(&r->x, 1, round) ||
        !flight_load(&f, &r->x.e, r->x.region, r->key, r->x.slots, RACE_BLOCKS, ordered ? &after : &engine_now, NULL))
        return false;
    if (flight_end(&f, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!read_sum(r, &seen))
        return false;
    *ret_old = seen == sum_of(r, old);
    if (!race_cuda_sum(r->x.base, r->x.bytes, 0, r->sum, r->x.stream) || !read_sum(r, &seen))
        return false;
    *ret_new = seen == sum_of(r, 0x42);
    return true;
}

static bool case_002(device *d)
{
    uint32_t rounds = gpu_subset() ? 3 : 200, controls = gpu_subset() ? 1 : 20, corrupt = 0;
    uint64_t at = 0, seen;
    bool saw_old, is_new;
    kvs_err err = {.msg = ""};
    reader r = {.key = 100000};
    void *p;

    (void)d;
    if (!racer_open(&r.x) || !cuda_ok(cudaMalloc(&p, 8), "cudaMalloc"))
        return false;
    r.sum = p;
    r.words = r.x.bytes / 8;
    if (!set_device(r.x.base, 0x42, r.x.bytes) || !race_cuda_sum(r.x.base, r.x.bytes, 0, r.sum, r.x.stream) ||
        !read_sum(&r, &seen) || seen != sum_of(&r, 0x42))
        return GPU_FAIL("the reader itself is wrong");
    if (engine_store(&r.x.e, r.x.region, r.key, r.x.slots, RACE_BLOCKS, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    for (uint32_t i = 0; i < rounds; i++) {
        if (!overwrite(&r, true, ++at, &saw_old, &is_new))
            return false;
        if (!saw_old || !is_new)
            return GPU_FAIL("round %u: the reader saw %s, the blocks end as %s", i, saw_old ? "the old" : "other bytes",
                            is_new ? "loaded" : "something else");
    }
    for (uint32_t i = 0; i < controls; i++) {
        if (!overwrite(&r, false, ++at, &saw_old, &is_new))
            return false;
        corrupt += !saw_old;
    }
    (void)cudaFree(p);
    racer_close(&r.x);
    (void)printf("      %u rounds right; without the counter %u of %u readers saw other bytes\n", rounds, corrupt,
                 controls);
    return corrupt > 0 || gpu_subset() || GPU_FAIL("the control runs are right: the test proves nothing");
}

/* A memset right behind a store of the same blocks: the stored bytes are the old ones if the stream waits for the signal. */
static bool scrub(racer *x, bool ordered, uint64_t id, uint64_t value, uint32_t *ret_pure)
{
    static flight f;
    kvs_mark signal = {.counter = 5, .value = value};
    kvs_err err = {.msg = ""};

    if (!set_device(x->base, 0x37, x->bytes) ||
        !flight_store(&f, &x->e, x->region, id, x->slots, RACE_BLOCKS, &engine_now))
        return false;
    f.store.signal = NULL;
    (void)flight_end(&f, NULL); /* warm: the blocks' slots are chosen and touched */
    if (kvs_drop(x->e.ns, f.keys[0], RACE_BLOCKS, NULL, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("drop: %s", err.msg);
    f.store.signal = &signal;
    if (kvs_submit_store(&f.store, &f.request, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (ordered && !racer_await(x, 5, value))
        return false;
    if (!cuda_ok(cudaMemsetAsync(x->base, 0x99, x->bytes, x->stream), "memset") || !racer_synchronise(x))
        return false;
    if (flight_end(&f, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (engine_load(&x->e, x->region, id, x->slots, RACE_BLOCKS, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!racer_fetch(x, x->base))
        return false;
    *ret_pure = racer_pure(x, 0x37);
    return true;
}

static bool case_memset(device *d)
{
    uint32_t rounds = gpu_subset() ? 2 : 10, corrupt = 0, pure;
    racer x;

    (void)d;
    if (!racer_open(&x))
        return false;
    for (uint32_t i = 0; i < rounds; i++) {
        if (!scrub(&x, true, 110000 + 100 * i, 2 * i + 1, &pure))
            return false;
        if (pure != RACE_BLOCKS)
            return GPU_FAIL("round %u: %u of %d blocks are as they were", i, pure, (int)RACE_BLOCKS);
        if (!scrub(&x, false, 115000 + 100 * i, 2 * i + 2, &pure))
            return false;
        corrupt += pure != RACE_BLOCKS;
    }
    racer_close(&x);
    (void)printf("      without the signal %u of %u stores took the memset's bytes, with it none\n", corrupt, rounds);
    return corrupt > 0 || gpu_subset() || GPU_FAIL("the control runs are right: the test proves nothing");
}

/* ---- 004: cancelled, then used again ---- */

enum { AHEAD = 6 }; /* stores of RACE_BLOCKS in front of the one that is cancelled: some 16 ms */

/* A store of one block that waits behind others; it is cancelled (or, to compare, not) and its slot written at once.
 * ret_hit: the key is there; ret_right: with the old bytes. */
static bool reuse(racer *x, bool cancel, uint64_t id, long wait_us, uint32_t *ret_outcome, bool *ret_hit,
                  bool *ret_right)
{
    static flight ahead[AHEAD], one;
    const kvs_slot b = x->slots[RACE_BLOCKS - 1];
    uint8_t *at = x->base + b.slot * x->e.slot_bytes;
    kvs_err err = {.msg = ""};
    uint32_t hits = 0;

    if (!set_device(at, 0x11, x->e.slot_bytes))
        return false;
    for (int i = 0; i < AHEAD; i++)
        if (!flight_store(&ahead[i], &x->e, x->region, id + 100 * (uint64_t)(i + 1), x->slots, RACE_BLOCKS - 1,
                          &engine_now))
            return false;
    if (!flight_store(&one, &x->e, x->region, id, &b, 1, &engine_now))
        return false;
    (void)usleep((useconds_t)wait_us);
    *ret_outcome = KVS_CANCEL_FINISHED;
    if (cancel && kvs_cancel(one.request, ret_outcome, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("cancel: %s", err.msg);
    if (!set_device(at, 0x99, x->e.slot_bytes))
        return false;
    (void)flight_end(&one, NULL);
    for (int i = 0; i < AHEAD; i++)
        if (flight_end(&ahead[i], &err) != KVS_OK)
            return GPU_FAIL("store ahead: %s", err.msg);
    if (kvs_lookup(x->e.ns, one.keys[0], 1, &hits, NULL, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("lookup: %s", err.msg);
    *ret_hit = hits == 1;
    *ret_right = false;
    if (hits == 0)
        return true;
    if (engine_load(&x->e, x->region, id, &b, 1, &err) != KVS_OK || !from_device(x->seen, at, x->e.slot_bytes))
        return GPU_FAIL("load: %s", err.msg);
    *ret_right = x->seen[0] == 0x11 && memcmp(x->seen, x->seen + 1, x->e.slot_bytes - 1) == 0;
    return true;
}

static bool case_004(device *d)
{
    uint32_t rounds = gpu_subset() ? 3 : 100, controls = gpu_subset() ? 1 : 10, stopped = 0, corrupt = 0, outcome;
    rnd r = rnd_open("case 004", 4);
    bool hit, right;
    racer x;

    (void)d;
    if (!racer_open(&x))
        return false;
    for (uint32_t i = 0; i < rounds; i++) {
        if (!reuse(&x, true, 200000 + 1000 * i, (long)rnd_below(&r, 20000), &outcome, &hit, &right))
            return false;
        stopped += outcome == KVS_CANCEL_STOPPED;
        if (hit && !right)
            return GPU_FAIL("round %u: the key is there with other bytes", i);
        if (outcome == KVS_CANCEL_STOPPED && hit)
            return GPU_FAIL("round %u: the key of a store that was stopped is there", i);
    }
    for (uint32_t i = 0; i < controls; i++) {
        if (!reuse(&x, false, 400000 + 1000 * i, 0, &outcome, &hit, &right))
            return false;
        corrupt += hit && !right;
    }
    racer_close(&x);
    (void)printf("      %u of %u stores were stopped; without CANCEL %u of %u keys had other bytes\n", stopped, rounds,
                 corrupt, controls);
    return (stopped > 0 && corrupt > 0) || gpu_subset() || GPU_FAIL("the test proves nothing");
}

/* ---- 023, 025: the device's own calls ---- */

typedef struct lane {
    device *d;
    device_queue *q;
    device_mem *mem;
    uint8_t *host, *dev;
    uint64_t bytes;
} lane;

static bool lane_open(lane *l, device *d, uint64_t bytes)
{
    kvs_err err = {.msg = ""};
    uint64_t n;

    *l = (lane){.d = d, .bytes = bytes};
    l->host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (l->host == MAP_FAILED)
        return GPU_FAIL("mmap");
    if (d->ops->host_register(d, l->host, bytes, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_LOAD, &l->q, &err) != KVS_OK ||
        d->ops->mem_create(d, bytes, &l->mem, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    l->dev = d->ops->mem_base(l->mem, 0, &n);
    return true;
}

static void lane_close(lane *l)
{
    l->d->ops->queue_close(l->q);
    l->d->ops->mem_close(l->mem);
    l->d->ops->host_unregister(l->d, l->host, l->bytes);
    (void)munmap(l->host, l->bytes);
}

/* No copies, one, two; entries without bytes alone and among others. */
static bool odd_counts(lane *l, device_how how)
{
    static const size_t sizes[][3] = {{0, 0, 0}, {4096, 0, 0}, {4096, 4096, 0}, {0, 4096, 0}, {0, 0, 0}, {16, 0, 48}};
    static const size_t counts[] = {0, 1, 2, 3, 3, 3};
    const device_ops *ops = l->d->ops;
    kvs_err err = {.msg = ""};
    uint8_t got[3 * 4096];

    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        device_copy c[3];
        uint64_t mark = 0;

        memset(l->host, (int)(0x10 + i), sizeof got);
        if (!set_device(l->dev, 0, sizeof got))
            return false;
        for (size_t k = 0; k < 3; k++)
            c[k] = sizes[i][k] > 0 ? (device_copy){l->dev + k * 4096, l->host + k * 4096, sizes[i][k]}
                                   : (device_copy){NULL, NULL, 0};
        if (ops->copy(l->q, c, counts[i], how, &mark, &err) != KVS_OK || ops->wait(l->q, mark, &err) != KVS_OK)
            return GPU_FAIL("case %zu: %s", i, err.msg);
        if (!from_device(got, l->dev, sizeof got))
            return false;
        for (size_t k = 0; k < 3; k++)
            for (size_t b = 0; b < 4096; b++)
                if (got[k * 4096 + b] != (b < sizes[i][k] && k < counts[i] ? 0x10 + i : 0))
                    return GPU_FAIL("case %zu: byte %zu of entry %zu is %02x", i, b, k, got[k * 4096 + b]);
    }
    return true;
}

static const device_how HOWS[] = {{DEVICE_BY_ENGINE, 0}, {DEVICE_BY_KERNEL, 8}};

static bool case_023(device *d)
{
    lane l;

    if (!lane_open(&l, d, 4 * MiB))
        return false;
    for (int h = 0; h < 2; h++)
        if (!odd_counts(&l, HOWS[h]))
            return GPU_FAIL("by %s", h == 0 ? "engine" : "kernel");
    lane_close(&l);
    return true;
}

/* The stream is busy for 200 ms; 50 batches are queued behind that from one array of descriptors, each written over as
 * soon as the call is back. */
enum { BATCHES = 50, EACH = 4, SMALL = 4096 };

static bool behind_a_stall(device *d, device_how how)
{
    uint64_t big = gpu_subset() ? 16 * MiB : 512 * MiB, at = big, mark = 0;
    double began, queued;
    device_copy c[EACH];
    kvs_err err = {.msg = ""};
    uint8_t *got = malloc(BATCHES * EACH * SMALL);
    rnd r = rnd_open("case 025", 25);
    lane l;

    if (got == NULL || !lane_open(&l, d, big + 4 * MiB))
        return false;
    rnd_bytes(&r, l.host + at, BATCHES * EACH * SMALL);
    began = gpu_seconds();
    for (int i = 0; i < 20; i++)
        if (d->ops->copy(l.q, &(device_copy){l.dev, l.host, big}, 1, HOWS[0], &mark, &err) != KVS_OK)
            return GPU_FAIL("%s", err.msg);
    for (uint64_t b = 0; b < BATCHES; b++) {
        for (uint64_t i = 0; i < EACH; i++) {
            uint64_t n = (b * EACH + i) * SMALL;

            c[i] = (device_copy){l.dev + at + BATCHES * EACH * SMALL - SMALL - n, l.host + at + n, SMALL};
        }
        if (d->ops->copy(l.q, c, EACH, how, &mark, &err) != KVS_OK)
            return GPU_FAIL("%s", err.msg);
        memset(c, 0xee, sizeof c);
    }
    queued = gpu_seconds() - began;
    if (d->ops->wait(l.q, mark, &err) != KVS_OK || !from_device(got, l.dev + at, BATCHES * EACH * SMALL))
        return GPU_FAIL("%s", err.msg);
    (void)printf("      queued in %.1f ms, done after %.1f ms\n", queued * 1e3, (gpu_seconds() - began) * 1e3);
    for (uint64_t n = 0; n < BATCHES * EACH; n++)
        if (memcmp(got + n * SMALL, l.host + at + (BATCHES * EACH - 1 - n) * SMALL, SMALL) != 0)
            return GPU_FAIL("piece %" PRIu64 " has other bytes", n);
    lane_close(&l);
    free(got);
    return true;
}

static bool case_025(device *d)
{
    return (behind_a_stall(d, HOWS[0]) || GPU_FAIL("by engine")) &&
           (behind_a_stall(d, HOWS[1]) || GPU_FAIL("by kernel"));
}

/* ---- 024: very many pieces in one request ---- */

static asker health;

enum { TINY_BLOCKS = 1024, TINY_PAGE = 1152 };

typedef struct tiny {
    engine e;
    kvs_region *region;
    uint8_t *memory;
    uint8_t (*keys)[KVS_KEY_BYTES];
    kvs_slot *from, *to;
    kvs_status *stored;
    kvs_load_result *loaded;
} tiny;

static bool tiny_open(tiny *t, device *d)
{
    kvs_plane_map maps[DEEP];
    kvs_ipc ipc;
    kvs_import in = {
        .n_slots = TINY_BLOCKS, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = DEEP, .maps = maps, .n_ipc = 1, .ipc = &ipc};
    kvs_err err = {.msg = ""};
    void *p;

    t->keys = malloc(sizeof *t->keys * TINY_BLOCKS);
    t->from = calloc(TINY_BLOCKS, sizeof *t->from);
    t->to = calloc(TINY_BLOCKS, sizeof *t->to);
    t->stored = calloc(TINY_BLOCKS, sizeof *t->stored);
    t->loaded = calloc(TINY_BLOCKS, sizeof *t->loaded);
    if (t->keys == NULL || t->from == NULL || t->to == NULL || t->stored == NULL || t->loaded == NULL ||
        !engine_start_daemon() || !engine_open_tokens(&t->e, engine_daemon.socket, DEEP, 1) ||
        !cuda_ok(cudaMalloc(&p, (size_t)DEEP * TINY_BLOCKS * TINY_PAGE), "cudaMalloc") || !ipc_handle(d, p, &ipc))
        return false;
    t->memory = p;
    for (uint64_t l = 0; l < DEEP; l++)
        maps[l] = (kvs_plane_map){.base = l * TINY_BLOCKS * TINY_PAGE, .stride = TINY_PAGE};
    for (uint32_t i = 0; i < TINY_BLOCKS; i++) {
        t->from[i] = (kvs_slot){i, 0};
        t->to[i] = (kvs_slot){(i * 37 + 11) % TINY_BLOCKS, 0};
    }
    return kvs_region_import(t->e.ns, &in, &t->region, 0, &err) == KVS_OK || GPU_FAIL("%s", err.msg);
}

static void tiny_close(tiny *t)
{
    kvs_close(t->e.client);
    (void)cudaFree(t->memory);
    free(t->keys);
    free(t->from);
    free(t->to);
    free(t->stored);
    free(t->loaded);
}

static bool tiny_round(tiny *t, uint64_t round, uint8_t *image, uint8_t *got)
{
    kvs_store_args s = {.ns = t->e.ns,
                        .region = t->region,
                        .n = TINY_BLOCKS,
                        .keys = t->keys[0],
                        .slots = t->from,
                        .results = t->stored};
    kvs_load_args l = {
        .ns = t->e.ns, .region = t->region, .n = TINY_BLOCKS, .keys = t->keys[0], .slots = t->to, .results = t->loaded};
    const uint64_t plane = (uint64_t)TINY_BLOCKS * TINY_PAGE, bytes = DEEP * plane;
    rnd r = rnd_open("case 024", round);
    kvs_err err = {.msg = ""};

    rnd_bytes(&r, image, bytes);
    for (uint32_t i = 0; i < TINY_BLOCKS; i++)
        pattern_key(600000 + round * TINY_BLOCKS + i, t->keys[i]);
    if (!to_device(t->memory, image, bytes))
        return false;
    if (kvs_store(&s, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!set_device(t->memory, 0, bytes))
        return false;
    if (kvs_load(&l, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!from_device(got, t->memory, bytes))
        return false;
    for (uint64_t p = 0; p < DEEP; p++)
        for (uint32_t i = 0; i < TINY_BLOCKS; i++)
            if (memcmp(got + p * plane + (uint64_t)t->to[i].slot * TINY_PAGE,
                       image + p * plane + (uint64_t)i * TINY_PAGE, TINY_PAGE) != 0)
                return GPU_FAIL("round %" PRIu64 ": layer %" PRIu64 " of block %u has other bytes", round, p, i);
    return true;
}

static bool case_024(device *d)
{
    const uint64_t bytes = (uint64_t)DEEP * TINY_BLOCKS * TINY_PAGE;
    uint8_t *image = malloc(bytes), *got = malloc(bytes);
    uint32_t rounds = gpu_subset() ? 1 : 20;
    tiny t = {.region = NULL};
    bool good = image != NULL && got != NULL && tiny_open(&t, d) && asker_start(&health, 5);

    if (!good)
        return false;
    for (uint64_t i = 0; i < rounds && good; i++)
        good = tiny_round(&t, i, image, got);
    good = asker_end(&health, "62,464 pieces a request", gpu_subset() ? 2000 : 100, gpu_subset() ? 5000 : 100) && good;
    tiny_close(&t);
    free(image);
    free(got);
    return good;
}

/* ---- 035, 042: replicas, restarts ---- */

static bool case_035(device *d)
{
    enum { N = 32 };
    engine rank[2];
    kvs_region *region[2];
    kvs_slot slots[2][N];
    uint8_t *base[2], *want, *got;
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("case 035", 35);
    static flight f;
    uint64_t bytes;

    (void)d;
    for (int i = 0; i < 2; i++)
        if (!engine_begin(&rank[i], FLAT) || !engine_region(&rank[i], N, &region[i], slots[i], &base[i]))
            return false;
    bytes = N * rank[0].slot_bytes;
    want = malloc(bytes);
    got = malloc(bytes);
    if (want == NULL || got == NULL)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, want, bytes);
    if (!to_device(base[0], want, bytes))
        return false;
    if (engine_store(&rank[0], region[0], 700000, slots[0], N, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    for (int i = 0; i < 2; i++) {
        if (!set_device(base[i], 0x63, bytes))
            return false;
        if (engine_load(&rank[i], region[i], 700000, slots[i], N, &err) != KVS_OK)
            return GPU_FAIL("rank %d: %s", i, err.msg);
        if (!from_device(got, base[i], bytes) || memcmp(got, want, bytes) != 0)
            return GPU_FAIL("rank %d has other bytes", i);
    }
    /* One block for both: the other rank's store moves nothing. */
    if (!flight_store(&f, &rank[1], region[1], 700000, slots[1], N, NULL))
        return false;
    (void)flight_end(&f, NULL);
    for (int i = 0; i < N; i++)
        if (f.stored[i] != KVS_E_EXISTS)
            return GPU_FAIL("block %d is stored twice: %s", i, kvs_status_name(f.stored[i]));
    kvs_close(rank[0].client);
    if (!set_device(base[1], 0, bytes) || engine_load(&rank[1], region[1], 700000, slots[1], N, &err) != KVS_OK ||
        !from_device(got, base[1], bytes) || memcmp(got, want, bytes) != 0)
        return GPU_FAIL("without rank 0: %s", err.msg);
    kvs_close(rank[1].client);
    free(want);
    free(got);
    return true;
}

/* After a restart the library's own thread, which has never used the GPU, registers again; the first call of the
 * program's thread works. */
static bool case_042(device *d)
{
    enum { N = 4 };
    kvs_plane_map map = {.stride = FLAT * PAGE};
    kvs_ipc ipc;
    kvs_import in = {.n_slots = N, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
    kvs_region *region, *own;
    kvs_region_info info[2];
    kvs_slot slots[N], mine[N];
    kvs_err err = {.msg = ""};
    uint64_t generation;
    uint8_t *base;
    engine e;
    void *p;

    if (!engine_begin(&e, FLAT) || !engine_region(&e, N, &region, slots, &base) ||
        !cuda_ok(cudaMalloc(&p, N * FLAT * PAGE), "cudaMalloc") || !ipc_handle(d, p, &ipc))
        return false;
    if (kvs_region_import(e.ns, &in, &own, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    for (uint32_t i = 0; i < N; i++)
        mine[i] = (kvs_slot){i, 0};
    generation = kvs_generation(e.client);
    (void)daemon_stop(&engine_daemon, SIGKILL);
    if (!engine_start_daemon())
        return false;
    nap_ms(gpu_subset() ? 8000 : 3000); /* nothing from this thread */
    kvs_region_get(region, &info[0]);
    kvs_region_get(own, &info[1]);
    if (kvs_generation(e.client) != generation + 1 || info[0].state != KVS_OK || info[1].state != KVS_OK)
        return GPU_FAIL("generation %" PRIu64 " after %" PRIu64 ", regions: %s, %s", kvs_generation(e.client),
                        generation, kvs_status_name(info[0].state), kvs_status_name(info[1].state));
    if (engine_store(&e, region, 710000, slots, N, NULL, &err) != KVS_OK ||
        engine_load(&e, own, 710000, mine, N, &err) != KVS_OK)
        return GPU_FAIL("the first calls: %s", err.msg);
    kvs_close(e.client);
    (void)cudaFree(p);
    return true;
}

/* ---- 036: strides ---- */

static bool compare_slices(engine *e, kvs_region *region, uint8_t *memory, const kvs_plane_map *maps, uint64_t bytes,
                           uint64_t id)
{
    enum { N = 16, LAYERS = 4 };
    uint8_t *image = malloc(bytes), *got = malloc(bytes);
    kvs_slot slots[N];
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("case 036", id);
    uint64_t wrong = 0;

    if (image == NULL || got == NULL)
        return GPU_FAIL("no memory");
    memset(image, 0xA5, bytes);
    for (uint32_t i = 0; i < N; i++) {
        slots[i] = (kvs_slot){i, 0};
        for (uint32_t l = 0; l < LAYERS; l++)
            rnd_bytes(&r, image + maps[l].base + i * maps[l].stride, PAGE);
    }
    if (!to_device(memory, image, bytes))
        return false;
    if (engine_store(e, region, id, slots, N, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t l = 0; l < LAYERS; l++)
            if (!set_device(memory + maps[l].base + i * maps[l].stride, 0, PAGE))
                return false;
    if (engine_load(e, region, id, slots, N, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!from_device(got, memory, bytes))
        return false;
    for (uint64_t i = 0; i < bytes; i++)
        wrong += got[i] != image[i];
    free(image);
    free(got);
    return wrong == 0 || GPU_FAIL("%" PRIu64 " bytes of blocks or canaries are wrong", wrong);
}

static bool case_036(device *d)
{
    enum { N = 16, LAYERS = 4 };
    const uint64_t stride = PAGE + 4096, plane = N * stride, bytes = LAYERS * plane;

    for (int descending = 0; descending < 2; descending++) {
        kvs_plane_map maps[LAYERS];
        kvs_ipc ipc;
        kvs_import in = {
            .n_slots = N, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = LAYERS, .maps = maps, .n_ipc = 1, .ipc = &ipc};
        kvs_region *region;
        kvs_err err = {.msg = ""};
        engine e;
        void *p;

        for (uint32_t l = 0; l < LAYERS; l++)
            maps[l] = (kvs_plane_map){.base = (descending ? LAYERS - 1 - l : l) * plane, .stride = stride};
        if (!engine_begin(&e, LAYERS) || !cuda_ok(cudaMalloc(&p, bytes), "cudaMalloc") || !ipc_handle(d, p, &ipc))
            return false;
        if (kvs_region_import(e.ns, &in, &region, 0, &err) != KVS_OK)
            return GPU_FAIL("%s", err.msg);
        if (!compare_slices(&e, region, p, maps, bytes, 720000 + 100 * (uint64_t)descending))
            return GPU_FAIL("layers %s", descending ? "descending" : "ascending");
        kvs_close(e.client);
        (void)cudaFree(p);
    }
    return true;
}

/* ---- 044: nobody waits for somebody else's driver calls ---- */

enum { OWNED = 24, OWNED_BYTES = 64 << 20 };

/* Many imports of its own memory, busy until it is killed. */
static int client_owner(const char *socket)
{
    kvs_plane_map map = {.stride = FLAT * PAGE};
    kvs_region *region[OWNED];
    kvs_slot slots[16];
    kvs_err err = {.msg = ""};
    engine e;

    if (!engine_open(&e, socket, FLAT))
        return 1;
    for (int i = 0; i < OWNED; i++) {
        kvs_ipc ipc;
        kvs_import in = {
            .n_slots = 16, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
        void *p;

        if (!cuda_ok(cudaMalloc(&p, OWNED_BYTES), "cudaMalloc") || !own_ipc_handle(p, &ipc) ||
            kvs_region_import(e.ns, &in, &region[i], 0, &err) != KVS_OK) {
            (void)printf("client: %s\n", err.msg);
            return 1;
        }
    }
    for (uint32_t i = 0; i < 16; i++)
        slots[i] = (kvs_slot){i, 0};
    (void)printf("      ready\n");
    (void)fflush(stdout);
    for (uint64_t id = (uint64_t)getpid() << 20;; id += 16)
        (void)engine_store(&e, region[id / 16 % OWNED], id, slots, 16, NULL, NULL);
}

static bool timed_calls(engine *e, device *d, kvs_region *region, const kvs_slot *slot, uint64_t id,
                        double *ret_most_ms)
{
    kvs_plane_map map = {.stride = FLAT * PAGE};
    kvs_ipc ipc;
    kvs_import in = {.n_slots = 4, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
    kvs_health_info h;
    kvs_region *own;
    kvs_err err = {.msg = ""};
    kvs_status s = KVS_OK;
    void *p;

    if (!cuda_ok(cudaMalloc(&p, 4 * FLAT * PAGE), "cudaMalloc") || !ipc_handle(d, p, &ipc))
        return false;
    for (int i = 0; i < 5 && s == KVS_OK; i++) {
        uint64_t at = clock_ns();
        double ms;

        s = i == 0   ? kvs_health(e->client, &h, CALL_MS, &err)
            : i == 1 ? kvs_region_import(e->ns, &in, &own, 0, &err)
            : i == 2 ? engine_store(e, region, id, slot, 1, NULL, &err)
            : i == 3 ? engine_load(e, region, id, slot, 1, &err)
                     : kvs_region_close(own, 0, &err);
        ms = (double)(clock_ns() - at) / 1e6;
        *ret_most_ms = ms > *ret_most_ms ? ms : *ret_most_ms;
    }
    (void)cudaFree(p);
    return s == KVS_OK || GPU_FAIL("%s", err.msg);
}

static bool case_044(device *d)
{
    int times = gpu_subset() ? 1 : 5;
    double most = 0;
    kvs_region *region;
    kvs_slot slots[4];
    uint64_t before;
    uint8_t *base;
    engine e;

    if (!engine_begin(&e, FLAT) || !engine_region(&e, 4, &region, slots, &base))
        return false;
    before = free_bytes(d);
    for (int i = 0; i < times; i++) {
        pid_t pid = spawn_client("owner");
        double until = gpu_seconds() + (gpu_subset() ? 60 : 20), killed;

        while (free_bytes(d) + (uint64_t)OWNED * OWNED_BYTES > before && gpu_seconds() < until)
            nap_ms(20);
        nap_ms(300); /* its imports */
        if (waitpid(pid, NULL, WNOHANG) != 0)
            return GPU_FAIL("the client ended by itself");
        (void)kill(pid, SIGKILL);
        killed = gpu_seconds();
        for (uint64_t k = 0; gpu_seconds() - killed < 1.0; k++)
            if (!timed_calls(&e, d, region, slots, 740000 + 10000 * (uint64_t)i + k, &most))
                return false;
        (void)waitpid(pid, NULL, 0);
    }
    kvs_close(e.client);
    (void)printf("      the slowest call of another client in the second after the kill: %.1f ms\n", most);
    return most < (gpu_subset() ? 5000 : 200) || GPU_FAIL("more than 200 ms");
}

static const gpu_test tests[] = {
    {"case 002: a load waits for the kernel that reads the block", case_002},
    {"case 002: a memset waits for the store of the block", case_memset},
    {"case 004: a block is used again after CANCEL", case_004},
    {"case 023: no copies, one, and copies without bytes", case_023},
    {"case 024: 62,464 pieces in one request", case_024},
    {"case 025: descriptors are written over behind the call", case_025},
    {"case 035: one rank stores, both load (on one GPU)", case_035},
    {"case 036: strides with gaps, layers up and down", case_036},
    {"case 042: a thread without a context registers again", case_042},
    {"case 044: a dead client's memory holds up nobody", case_044},
};

int main(int argc, char **argv)
{
    int code;

    if (argc == 4 && strcmp(argv[1], "-client") == 0)
        return client_owner(argv[3]);
    code = gpu_run(tests, sizeof tests / sizeof *tests, argc, argv);
    engine_end_daemon(code != 0);
    return code;
}
#else
static bool none(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    static const gpu_test tests[] = {{"field cases on a GPU", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
