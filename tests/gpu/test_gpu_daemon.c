/* The real daemon on a GPU: bytes there and back through the socket, whatever the memory is made of; clients that die or
 * stop; engine streams ordered by counters; device blocks over a restart.
 *
 * "-client KIND SOCKET" makes this program a client that is to be killed or stopped: a process that has used CUDA cannot
 * fork one. */
#include "tests/gpu/gpu_engine.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/ctl/pattern.h"
#include "tests/support/random.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

/* ---- daemon regions ---- */

static bool round_trip(device *d)
{
    enum { SLOTS = 1000, BLOCKS = MANY };
    uint32_t n_slots = gpu_subset() ? 250 : SLOTS, n = gpu_subset() ? 20 : BLOCKS;
    engine e;
    kvs_err err = {.msg = ""};
    kvs_region *region;
    kvs_region_info info;
    kvs_slot *taken = calloc(n_slots, sizeof *taken), from[BLOCKS], to[BLOCKS];
    rnd r = rnd_open("round_trip", 31);
    void *base;
    uint64_t bytes, bad = 0;
    uint8_t *want, *got;

    (void)d;
    if (taken == NULL || !engine_begin(&e, DEEP))
        return false;
    if (kvs_region_create(e.ns, 0, n_slots, &region, 0, &err) != KVS_OK ||
        kvs_region_map(region, &base, &bytes, &err) != KVS_OK ||
        kvs_slot_take(region, n_slots, taken, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    kvs_region_get(region, &info);
    if (info.memory != KVS_MEMORY_CUDA_VMM || info.n_fds < 2 || bytes < n_slots * e.slot_bytes)
        return GPU_FAIL("memory %u in %u pieces of %" PRIu64 " bytes", info.memory, info.n_fds, bytes);
    /* First and last slot, and one across each seam. */
    for (uint32_t i = 0; i < n; i++) {
        from[i] = taken[(uint64_t)i * (n_slots - 1) / (n - 1)];
        to[i] = taken[(uint64_t)(n - 1 - i) * (n_slots - 1) / (n - 1)];
    }
    from[1] = taken[GiB / e.slot_bytes];
    want = malloc(n * e.slot_bytes);
    got = malloc(e.slot_bytes);
    if (want == NULL || got == NULL)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, want, n * e.slot_bytes);
    for (uint32_t i = 0; i < n; i++)
        if (!to_device((uint8_t *)base + from[i].slot * e.slot_bytes, want + i * e.slot_bytes, e.slot_bytes))
            return false;
    if (engine_store(&e, region, 1000, from, n, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!cuda_ok(cudaMemset(base, 0xff, n_slots * e.slot_bytes), "memset") ||
        !cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    if (engine_load(&e, region, 1000, to, n, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    for (uint32_t i = 0; i < n; i++) {
        if (!cuda_ok(cudaMemcpy(got, (uint8_t *)base + to[i].slot * e.slot_bytes, e.slot_bytes, cudaMemcpyDeviceToHost),
                     "copy from the device"))
            return false;
        bad += memcmp(got, want + i * e.slot_bytes, e.slot_bytes) != 0;
    }
    kvs_close(e.client);
    free(taken);
    free(want);
    free(got);
    return bad == 0 ? true : GPU_FAIL("%" PRIu64 " of %u blocks are wrong", bad, n);
}

/* ---- engine regions ---- */

typedef struct geometry {
    bool per_layer; /* planes in descending layer order, gaps between pages and between planes */
    uint32_t slots, layers;
    uint64_t base, page_pitch, plane_pitch;
} geometry;

static uint64_t geometry_bytes(const geometry *g)
{
    return g->base + (g->per_layer ? g->layers * g->plane_pitch : g->slots * g->page_pitch) + 4096;
}

/* Offset of a slot's page of a layer. */
static uint64_t page_at(const geometry *g, uint32_t slot, uint32_t layer)
{
    if (g->per_layer)
        return g->base + (g->layers - 1 - layer) * g->plane_pitch + slot * g->page_pitch;
    return g->base + slot * g->page_pitch + (uint64_t)layer * PAGE;
}

/* Store all slots but some, wipe the pages, load them the other way round, and look at every byte: pages, gaps, ends. */
static bool try_import(engine *e, kvs_region *region, const geometry *g, uint8_t *memory, uint64_t id)
{
    enum { N = 6 };
    const uint32_t at[N] = {0, g->slots - 1, 3, 7, 1, 5};
    uint64_t bytes = geometry_bytes(g);
    uint8_t *image = malloc(bytes), *want = malloc(bytes), *got = malloc(bytes);
    kvs_slot from[N], to[N];
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("import", id);

    if (image == NULL || want == NULL || got == NULL)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, image, bytes);
    memcpy(want, image, bytes);
    for (uint32_t i = 0; i < N; i++) {
        from[i] = (kvs_slot){at[i], 0};
        to[i] = (kvs_slot){at[(i + 1) % N], 0};
        for (uint32_t l = 0; l < g->layers; l++)
            memcpy(want + page_at(g, to[i].slot, l), image + page_at(g, from[i].slot, l), PAGE);
    }
    if (!to_device(memory, image, bytes))
        return false;
    if (engine_store(e, region, id, from, N, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t l = 0; l < g->layers; l++)
            if (!cuda_ok(cudaMemset(memory + page_at(g, at[i], l), 0x5a, PAGE), "memset"))
                return false;
    (void)cudaDeviceSynchronize();
    if (engine_load(e, region, id, to, N, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!cuda_ok(cudaMemcpy(got, memory, bytes, cudaMemcpyDeviceToHost), "copy from the device"))
        return false;
    for (uint64_t i = 0; i < bytes; i++)
        if (got[i] != want[i])
            return GPU_FAIL("byte %" PRIu64 " of %" PRIu64 " is %02x, not %02x", i, bytes, got[i], want[i]);
    free(image);
    free(want);
    free(got);
    return true;
}

static void fill_maps(const geometry *g, kvs_plane_map *maps, uint32_t *ret_n)
{
    *ret_n = g->per_layer ? g->layers : 1;
    for (uint32_t l = 0; l < *ret_n; l++)
        maps[l] = (kvs_plane_map){.fd = 0, .base = page_at(g, 0, l), .stride = g->page_pitch};
}

static const geometry GEOMETRIES[] = {
    {false, 9, FLAT, 512, FLAT *PAGE + 4096, 0},
    {true, 9, FLAT, 272, PAGE + 64, 9 * (PAGE + 64) + 4112},
    {false, 9, DEEP, 0, DEEP *PAGE, 0},
    {true, 9, DEEP, 16, PAGE, 9 * PAGE + 16},
};
enum { N_GEOMETRIES = sizeof GEOMETRIES / sizeof *GEOMETRIES };

static bool import_ipc(device *d)
{
    for (uint32_t i = 0; i < N_GEOMETRIES; i++) {
        const geometry *g = &GEOMETRIES[i];
        kvs_plane_map maps[DEEP];
        kvs_ipc ipc;
        kvs_import in = {.n_slots = g->slots, .memory = KVS_MEMORY_CUDA_IPC, .maps = maps, .n_ipc = 1, .ipc = &ipc};
        kvs_region *region, *again;
        kvs_err err = {.msg = ""};
        engine e;
        void *p;

        if (!engine_begin(&e, g->layers) || !cuda_ok(cudaMalloc(&p, geometry_bytes(g)), "cudaMalloc") ||
            !ipc_handle(d, p, &ipc))
            return false;
        fill_maps(g, maps, &in.n_maps);
        if (kvs_region_import(e.ns, &in, &region, 0, &err) != KVS_OK ||
            kvs_region_import(e.ns, &in, &again, 0, &err) != KVS_OK) /* opened once, counted */
            return GPU_FAIL("case %u: %s", i, err.msg);
        if (kvs_region_close(again, 0, &err) != KVS_OK)
            return GPU_FAIL("case %u: %s", i, err.msg);
        if (!try_import(&e, region, g, p, 2000 + i * 100))
            return GPU_FAIL("case %u", i);
        kvs_close(e.client);
        (void)cudaFree(p);
    }
    return true;
}

/* Two pieces, and a plane that runs over the seam. */
static bool import_vmm(device *d)
{
    for (uint32_t i = 0; i < N_GEOMETRIES; i++) {
        geometry g = GEOMETRIES[i];
        uint64_t seam = GiB - 4 * (uint64_t)g.layers * PAGE / 16 * 16;
        kvs_plane_map maps[DEEP];
        int fds[2];
        kvs_import in = {.n_slots = g.slots, .memory = KVS_MEMORY_CUDA_VMM, .n_fds = 2, .fds = fds, .maps = maps};
        kvs_region *region;
        kvs_err err = {.msg = ""};
        device_mem *mem;
        uint64_t bytes;
        engine e;

        if (d->ops->mem_create(d, GiB + 128 * MiB, &mem, &err) != KVS_OK)
            return GPU_FAIL("%s", err.msg);
        fds[0] = d->ops->mem_fd(mem, 0);
        fds[1] = d->ops->mem_fd(mem, 1);
        if (!engine_begin(&e, g.layers))
            return false;
        fill_maps(&g, maps, &in.n_maps);
        for (uint32_t m = 0; m < in.n_maps; m++)
            maps[m].base += seam;
        if (kvs_region_import(e.ns, &in, &region, 0, &err) != KVS_OK)
            return GPU_FAIL("case %u: %s", i, err.msg);
        if (!try_import(&e, region, &g, d->ops->mem_base(mem, 0, &bytes) + seam, 3000 + i * 100))
            return GPU_FAIL("case %u", i);
        kvs_close(e.client);
        d->ops->mem_close(mem);
    }
    return true;
}

static bool refused(engine *e, const kvs_import *in, kvs_status want, const char *says)
{
    kvs_region *region;
    kvs_err err = {.msg = ""};
    kvs_status s = kvs_region_import(e->ns, in, &region, 0, &err);

    return s == want && strstr(err.msg, says) != NULL
               ? true
               : GPU_FAIL("%s instead of %s, and \"%s\" has no \"%s\"", kvs_status_name(s), kvs_status_name(want),
                          err.msg, says);
}

static bool refuse_imports(device *d)
{
    kvs_plane_map map = {.stride = FLAT * PAGE};
    kvs_ipc good, other, torn;
    int fd[1];
    kvs_import ipc = {.n_slots = 4, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &good};
    kvs_import vmm = {.n_slots = 4, .memory = KVS_MEMORY_CUDA_VMM, .n_maps = 1, .maps = &map, .n_fds = 1, .fds = fd};
    device_mem *mem;
    engine e;
    void *p;
    bool fine;

    if (!engine_begin(&e, FLAT) || !cuda_ok(cudaMalloc(&p, 4 * FLAT * PAGE), "cudaMalloc") ||
        !ipc_handle(d, p, &good) || d->ops->mem_create(d, 2 * MiB, &mem, NULL) != KVS_OK)
        return false;
    fd[0] = d->ops->mem_fd(mem, 0);
    ipc.n_slots = 64; /* the driver rounds an allocation up to 2 MiB, and no further */
    fine = refused(&e, &ipc, KVS_E_RANGE, "end behind the memory");
    ipc.n_slots = 4;
    other = torn = good;
    other.uuid[0] ^= 1;
    ipc.ipc = &other;
    fine = refused(&e, &ipc, KVS_E_INVALID, "UUID") && fine;
    memset(torn.handle, 0x77, 64);
    ipc.ipc = &torn;
    fine = refused(&e, &ipc, KVS_E_INVALID, "does not open it") && fine;
    vmm.n_slots = 6;
    fine = refused(&e, &vmm, KVS_E_RANGE, "end behind the memory") && fine;
    if (kvs_memfd_create("none", 4 * MiB, fd, NULL) != KVS_OK)
        return GPU_FAIL("memfd");
    fine = refused(&e, &vmm, KVS_E_INVALID, "not device memory") && fine;
    vmm.memory = KVS_MEMORY_MEMFD;
    fine = refused(&e, &vmm, KVS_E_UNSUPPORTED, "memory: kind 0") && fine;
    (void)close(fd[0]);
    d->ops->mem_close(mem);
    kvs_close(e.client);
    (void)cudaFree(p);
    return fine && daemon_alive(&engine_daemon) ? true : GPU_FAIL("a refusal is wrong, or the daemon died");
}

/* ---- clients that die or stop ---- */

/* Maps a daemon region, imports memory of its own, and moves blocks until it is killed. */
static int client_busy(const char *socket)
{
    kvs_plane_map map = {.stride = FLAT * PAGE};
    kvs_ipc ipc;
    kvs_import in = {.n_slots = 16, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
    kvs_slot slots[16], mine[16];
    struct cudaDeviceProp prop;
    kvs_region *region, *own;
    kvs_err err = {.msg = ""};
    cudaIpcMemHandle_t h;
    uint64_t bytes, id = (uint64_t)getpid() << 20;
    void *p, *base;
    engine e;

    if (!engine_open(&e, socket, FLAT) || cudaGetDeviceProperties(&prop, 0) != cudaSuccess ||
        cudaMalloc(&p, 16 * FLAT * PAGE) != cudaSuccess || cudaIpcGetMemHandle(&h, p) != cudaSuccess)
        return 1;
    memcpy(ipc.uuid, prop.uuid.bytes, 16);
    memcpy(ipc.handle, &h, 64);
    if (kvs_region_create(e.ns, 0, 64, &region, 0, &err) != KVS_OK ||
        kvs_region_map(region, &base, &bytes, &err) != KVS_OK ||
        kvs_region_import(e.ns, &in, &own, 0, &err) != KVS_OK || kvs_slot_take(region, 16, slots, 0, &err) != KVS_OK) {
        (void)printf("client: %s\n", err.msg);
        return 1;
    }
    for (uint32_t i = 0; i < 16; i++)
        mine[i] = (kvs_slot){i, 0};
    (void)cudaMemset(base, 1, 16 * FLAT * PAGE);
    for (;; id += 16) {
        (void)engine_store(&e, own, id, mine, 16, NULL, NULL);
        (void)engine_load(&e, region, id, slots, 16, NULL);
    }
}

/* Asks for a load after a counter that it never raises. */
static int client_stopped(const char *socket)
{
    uint8_t key[KVS_KEY_BYTES] = {7};
    kvs_mark after = {.counter = 3, .value = 9};
    kvs_slot slot;
    kvs_load_result result;
    kvs_load_args a = {.n = 1, .keys = key, .slots = &slot, .after = &after, .results = &result};
    kvs_request *q;
    kvs_err err = {.msg = ""};
    engine e;

    if (!engine_open(&e, socket, FLAT))
        return 1;
    pattern_key(50, key);
    a.ns = e.ns;
    if (kvs_region_create(e.ns, 0, 4, &a.region, 0, &err) != KVS_OK ||
        kvs_slot_take(a.region, 1, &slot, 0, &err) != KVS_OK || kvs_submit_load(&a, &q, CALL_MS, &err) != KVS_OK) {
        (void)printf("client: %s\n", err.msg);
        return 1;
    }
    (void)kvs_ping(e.client, 0, NULL);
    (void)raise(SIGSTOP);
    return 0;
}

/* True once as much is free as before, within `ms`. */
static bool wait_free(device *d, uint64_t want, int ms, double *ret_s)
{
    double began = gpu_seconds();

    while (free_bytes(d) < want && gpu_seconds() - began < ms / 1e3)
        nap_ms(5);
    *ret_s = gpu_seconds() - began;
    return free_bytes(d) >= want;
}

static bool survive_kills(device *d)
{
    enum { AT_ONCE = 8, WARM = 8 };
    uint32_t n = gpu_subset() ? 16 : 200;
    rnd r = rnd_open("kills", 5);
    uint64_t before = 0;
    double longest = 0, s;
    engine e;

    if (!engine_begin(&e, FLAT))
        return false;
    for (uint32_t done = 0; done < n + WARM; done += AT_ONCE) {
        pid_t pids[AT_ONCE];

        if (done == WARM) /* what the first ones made the drivers keep is no drift */
            before = free_bytes(d);
        for (uint32_t i = 0; i < AT_ONCE; i++)
            pids[i] = spawn_client("busy");
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            nap_ms(i == 0 ? 900 + (long)rnd_below(&r, 400) : (long)rnd_below(&r, 60));
            if (waitpid(pids[i], NULL, WNOHANG) != 0)
                return GPU_FAIL("a client ended by itself");
            (void)kill(pids[i], SIGKILL);
        }
        for (uint32_t i = 0; i < AT_ONCE; i++)
            (void)waitpid(pids[i], NULL, 0);
        if (done < WARM)
            nap_ms(1000);
        else if (!wait_free(d, before, 3000, &s))
            return GPU_FAIL("after %u kills %" PRIu64 " bytes of device memory are missing", done + AT_ONCE - WARM,
                            before - free_bytes(d));
        else if (s > longest)
            longest = s;
    }
    (void)printf("      %u kills, no drift; the longest until all memory was back: %.0f ms\n", n, longest * 1e3);
    if (!daemon_alive(&engine_daemon) || kvs_ping(e.client, 0, NULL) != KVS_OK)
        return GPU_FAIL("the daemon does not answer");
    kvs_close(e.client);
    return longest < 1.0 ? true : GPU_FAIL("it took %.2f s", longest);
}

static bool ignore_stopped(device *d)
{
    engine e;
    kvs_region *region;
    kvs_slot slot;
    kvs_err err = {.msg = ""};
    double worst = 0;
    int status = 0;
    pid_t pid;

    (void)d;
    if (!engine_begin(&e, FLAT))
        return false;
    if (kvs_region_create(e.ns, 0, 4, &region, 0, &err) != KVS_OK ||
        kvs_slot_take(region, 1, &slot, 0, &err) != KVS_OK ||
        engine_store(&e, region, 50, &slot, 1, NULL, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    pid = spawn_client("stopped");
    if (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status))
        return GPU_FAIL("the other client did not stop, but ended with %x", (unsigned)status);
    for (int i = 0; i < 100; i++) {
        double at = gpu_seconds();

        if (engine_load(&e, region, 50, &slot, 1, &err) != KVS_OK)
            return GPU_FAIL("%s", err.msg);
        at = gpu_seconds() - at;
        worst = at > worst ? at : worst;
    }
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    kvs_close(e.client);
    (void)printf("      the slowest of 100 loads beside it: %.0f us\n", worst * 1e6);
    return worst < 0.2 ? true : GPU_FAIL("a load took %.3f s", worst);
}

/* ---- streams and counters ---- */

/* A producer that is late: does the store take the old bytes, or wait? */
static bool produce(racer *x, bool ordered, uint64_t id, uint8_t value, uint32_t *ret_pure)
{
    kvs_mark after = {.counter = 1, .value = id};
    kvs_err err = {.msg = ""};

    if (!set_device(x->base, 0, x->bytes) || !racer_sleep(x, 30) ||
        !cuda_ok(cudaMemsetAsync(x->base, value, x->bytes, x->stream), "memset") || !racer_raise(x, 1, id))
        return false;
    if (engine_store(&x->e, x->region, id, x->slots, RACE_BLOCKS, ordered ? &after : &engine_now, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!racer_synchronise(x) || !set_device(x->base, 0, x->bytes))
        return false;
    if (engine_load(&x->e, x->region, id, x->slots, RACE_BLOCKS, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!racer_fetch(x, x->base))
        return false;
    *ret_pure = racer_pure(x, value);
    return true;
}

static bool order_producer(device *d)
{
    uint32_t rounds = gpu_subset() ? 2 : 10, pure, corrupt = 0;
    racer x = {0};

    (void)d;
    if (!racer_open(&x))
        return false;
    for (uint32_t i = 0; i < rounds; i++) {
        if (!produce(&x, true, 10000 + i * 1000, (uint8_t)(1 + i), &pure))
            return false;
        if (pure != RACE_BLOCKS)
            return GPU_FAIL("round %u: %u of %d blocks are the producer's", i, pure, (int)RACE_BLOCKS);
        if (!produce(&x, false, 10500 + i * 1000, (uint8_t)(101 + i), &pure))
            return false;
        corrupt += pure != RACE_BLOCKS;
    }
    racer_close(&x);
    (void)printf("      without the counter %u of %u rounds stored old bytes, with it none\n", corrupt, rounds);
    return corrupt > 0 || gpu_subset() ? true : GPU_FAIL("the control runs are right: the test proves nothing");
}

/* A reader on a stream right behind the request: old bytes, or does it wait for the signal? */
static bool consume(racer *x, bool ordered, uint64_t id, uint64_t value, uint32_t *ret_pure)
{
    static flight f;
    kvs_mark signal = {.counter = 2, .value = value};
    kvs_err err = {.msg = ""};
    void *copy;
    bool good;

    if (!cuda_ok(cudaMalloc(&copy, x->bytes), "cudaMalloc") || !set_device(x->base, 0, x->bytes) ||
        !flight_load(&f, &x->e, x->region, id, x->slots, RACE_BLOCKS, &engine_now, &signal) ||
        (ordered && !racer_await(x, 2, value)))
        return false;
    (void)cudaMemcpyAsync(copy, x->base, x->bytes, cudaMemcpyDeviceToDevice, x->stream);
    good = racer_synchronise(x) && racer_fetch(x, copy);
    if (flight_end(&f, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    (void)cudaFree(copy);
    *ret_pure = racer_pure(x, 0x42);
    return good;
}

static bool order_reader(device *d)
{
    uint32_t rounds = gpu_subset() ? 2 : 10, pure, corrupt = 0;
    const uint64_t id = 60000;
    kvs_err err = {.msg = ""};
    racer x = {0};

    (void)d;
    if (!racer_open(&x))
        return false;
    if (!cuda_ok(cudaMemset(x.base, 0x42, RACE_BLOCKS * x.e.slot_bytes), "memset") ||
        !cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    if (engine_store(&x.e, x.region, id, x.slots, RACE_BLOCKS, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    for (uint32_t i = 0; i < rounds; i++) {
        if (!consume(&x, true, id, 2 * i + 1, &pure))
            return false;
        if (pure != RACE_BLOCKS)
            return GPU_FAIL("round %u: %u of %d blocks had come", i, pure, (int)RACE_BLOCKS);
        if (!consume(&x, false, id, 2 * i + 2, &pure))
            return false;
        corrupt += pure != RACE_BLOCKS;
    }
    racer_close(&x);
    (void)printf("      without the counter %u of %u rounds read old bytes, with it none\n", corrupt, rounds);
    return corrupt > 0 || gpu_subset() ? true : GPU_FAIL("the control runs are right: the test proves nothing");
}

/* ---- restart, idle use ---- */

static bool keep_over_restart(device *d)
{
    enum { N = 8 };
    engine e;
    kvs_region *region;
    kvs_region_info info;
    kvs_slot slots[N];
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("restart", 77);
    uint64_t bytes, generation, size;
    uint8_t *want, *got;
    void *base;

    (void)d;
    if (!engine_begin(&e, FLAT))
        return false;
    size = N * e.slot_bytes;
    want = malloc(size);
    got = malloc(size);
    if (want == NULL || got == NULL || kvs_region_create(e.ns, 0, N, &region, 0, &err) != KVS_OK ||
        kvs_region_map(region, &base, &bytes, &err) != KVS_OK || kvs_slot_take(region, N, slots, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    rnd_bytes(&r, want, size);
    if (!to_device(base, want, size))
        return false;
    generation = kvs_generation(e.client);
    (void)daemon_stop(&engine_daemon, SIGKILL);
    if (!engine_start_daemon() || kvs_wait_up(e.client, generation, CALL_MS, &err) != KVS_OK)
        return GPU_FAIL("after the restart: %s", err.msg);
    kvs_region_get(region, &info);
    if (info.state != KVS_OK)
        return GPU_FAIL("the region was not taken back: %s", kvs_status_name(info.state));
    /* The new daemon reads what the old one's memory holds, and writes where we look. */
    if (engine_store(&e, region, 70000, slots, N, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    if (!cuda_ok(cudaMemset(base, 0, size), "memset") || !cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    if (engine_load(&e, region, 70000, slots, N, &err) != KVS_OK)
        return GPU_FAIL("load: %s", err.msg);
    if (!cuda_ok(cudaMemcpy(got, base, size, cudaMemcpyDeviceToHost), "fetch") || memcmp(got, want, size) != 0)
        return GPU_FAIL("other bytes than before the restart");
    kvs_close(e.client);
    free(want);
    free(got);
    return true;
}

static bool stay_small(device *d)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    char *text = NULL;
    const char *at;
    unsigned long long idle = 0;
    size_t len;
    engine e;

    (void)d;
    if (!engine_begin(&e, FLAT) || kvs_report_alloc(e.client, &a, &text, &len, 0, NULL) != KVS_OK)
        return GPU_FAIL("no status");
    at = strstr(text, "\"device_idle_bytes\":");
    if (strstr(text, "cuda") == NULL || at == NULL || sscanf(at + 20, "%llu", &idle) != 1)
        return GPU_FAIL("%s", text);
    (void)printf("      an idle daemon has %llu MiB of device memory\n", idle >> 20);
    kvs_free(text);
    kvs_close(e.client);
    /* A sanitizer has its own there as well. */
    return idle > 0 && (idle <= 600 * MiB || gpu_subset()) ? true : GPU_FAIL("%llu bytes", idle);
}

static const gpu_test tests[] = {
    {"status shows the idle daemon's device memory", stay_small},
    {"blocks come back from a daemon region larger than 4 GiB", round_trip},
    {"blocks come back from imported allocations, gaps untouched", import_ipc},
    {"blocks come back from imported VMM memory across a seam", import_vmm},
    {"imports that do not fit are refused with the reason", refuse_imports},
    {"a store waits for the counter of a late producer", order_producer},
    {"a stream that waits for the signal reads what was loaded", order_reader},
    {"a stopped client with an unreached counter delays nobody", ignore_stopped},
    {"device blocks survive a restart of the daemon", keep_over_restart},
    {"200 clients are killed and no device memory is lost", survive_kills},
};

int main(int argc, char **argv)
{
    int code;

    if (argc == 4 && strcmp(argv[1], "-client") == 0)
        return strcmp(argv[2], "busy") == 0 ? client_busy(argv[3]) : client_stopped(argv[3]);
    engine_opens_twice();
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
    static const gpu_test tests[] = {{"the daemon on a GPU", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
