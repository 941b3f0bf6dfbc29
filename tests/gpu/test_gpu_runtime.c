/* Field cases about the CUDA runtime, each by its number: handles, callbacks, hidden waits, placement, and memory that goes
 * away.
 *
 * "-client KIND SOCKET" makes this program a client of its own. */
#include "tests/gpu/gpu_engine.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/ctl/clock.h"
#include "tests/support/random.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

/* ---- 075: offsets ---- */

/* Four views of one allocation, each registered with its offset; a view that would run over the allocation's end, which is
 * what is left of an offset that was forgotten on one side, is refused. */
static bool case_075(device *d)
{
    enum { VIEWS = 4, N = 5 };
    const uint64_t view = 2 * MiB;
    kvs_ipc ipc;
    kvs_region *region[VIEWS], *none;
    kvs_slot slots[N];
    kvs_err err = {.msg = ""};
    uint8_t *want = malloc(view), *got = malloc(view), *p;
    void *memory;
    engine e;

    if (want == NULL || got == NULL || !engine_begin(&e, FLAT) ||
        !cuda_ok(cudaMalloc(&memory, VIEWS * view), "cudaMalloc") || !ipc_handle(d, memory, &ipc))
        return false;
    p = memory;
    for (uint64_t v = 0; v < VIEWS; v++) {
        kvs_plane_map map = {.base = v * view, .stride = FLAT * PAGE};
        kvs_import in = {
            .n_slots = N, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};

        if (kvs_region_import(e.ns, &in, &region[v], 0, &err) != KVS_OK)
            return GPU_FAIL("view %" PRIu64 ": %s", v, err.msg);
        if (!set_device(p + v * view, (int)(0x20 + v), view))
            return false;
        map.base += 3 * view + (uint64_t)FLAT * PAGE;
        if (v > 0 && kvs_region_import(e.ns, &in, &none, 0, &err) != KVS_E_RANGE)
            return GPU_FAIL("a view behind the end of the allocation was taken");
    }
    for (uint32_t i = 0; i < N; i++)
        slots[i] = (kvs_slot){i, 0};
    for (uint64_t v = 0; v < VIEWS; v++)
        if (engine_store(&e, region[v], 730000 + 100 * v, slots, N, NULL, &err) != KVS_OK)
            return GPU_FAIL("store: %s", err.msg);
    if (!set_device(p, 0, VIEWS * view))
        return false;
    for (uint64_t v = 0; v < VIEWS; v++) {
        if (engine_load(&e, region[v], 730000 + 100 * v, slots, N, &err) != KVS_OK)
            return GPU_FAIL("load: %s", err.msg);
        memset(want, 0, view);
        memset(want, (int)(0x20 + v), (size_t)N * FLAT * PAGE);
        if (!from_device(got, p + v * view, view) || memcmp(got, want, view) != 0)
            return GPU_FAIL("view %" PRIu64 " has other bytes", v);
    }
    kvs_close(e.client);
    (void)cudaFree(memory);
    free(want);
    free(got);
    return true;
}

/* ---- 078: memory without a handle ---- */

static bool has_no_handle(const void *p, const char *kind)
{
    kvs_err err = {.msg = ""};
    uint64_t offset, bytes;
    kvs_ipc ipc;
    kvs_status s = kvs_ipc_of(p, &ipc, &offset, &bytes, &err);

    (void)printf("      %s\n", err.msg);
    return (s == KVS_E_INVALID && strstr(err.msg, kind) != NULL) ||
           GPU_FAIL("%s, and nothing of \"%s\"", kvs_status_name(s), kind);
}

/* What is in a daemon's region here is mapped virtual memory. */
static bool no_handles(engine *e)
{
    kvs_region *region;
    kvs_slot slot;
    uint8_t *mapped;
    void *pooled, *managed, *pinned;
    bool good;

    if (!engine_region(e, 1, &region, &slot, &mapped) ||
        !cuda_ok(cudaMallocAsync(&pooled, MiB, 0), "cudaMallocAsync") ||
        !cuda_ok(cudaMallocManaged(&managed, MiB, cudaMemAttachGlobal), "cudaMallocManaged") ||
        !cuda_ok(cudaHostAlloc(&pinned, MiB, 0), "cudaHostAlloc"))
        return false;
    good = has_no_handle(NULL, "p is NULL");
    good = has_no_handle(&good, "ordinary host memory") && good;
    good = has_no_handle(pinned, "pinned host memory") && good;
    good = has_no_handle(managed, "managed memory") && good;
    good = has_no_handle(pooled, "cudaMallocAsync") && good;
    good = has_no_handle(mapped, "KVS_MEMORY_CUDA_VMM") && good;
    (void)cudaFreeAsync(pooled, 0);
    (void)cudaFree(managed);
    (void)cudaFreeHost(pinned);
    return good && cuda_ok(cudaDeviceSynchronize(), "synchronise");
}

/* Every kind that has no handle is named before the daemon hears of it; the one that has is imported as it is described,
 * from an address inside of the allocation. */
static bool case_078(device *d)
{
    enum { N = 4 };
    const uint64_t inside = 3 * MiB + 4096;
    kvs_plane_map map = {.stride = FLAT * PAGE};
    kvs_ipc ipc;
    kvs_import in = {.n_slots = N, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
    kvs_slot slots[N];
    kvs_region *own;
    kvs_err err = {.msg = ""};
    uint64_t bytes = 0;
    uint8_t *got = malloc(N * FLAT * PAGE);
    engine e;
    void *p;

    (void)d;
    if (got == NULL || !engine_begin(&e, FLAT) || !no_handles(&e) || !cuda_ok(cudaMalloc(&p, 8 * MiB), "cudaMalloc"))
        return false;
    if (kvs_ipc_of((uint8_t *)p + inside, &ipc, &map.base, &bytes, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    if (map.base != inside || bytes != 8 * MiB)
        return GPU_FAIL("byte %" PRIu64 " of %" PRIu64 " is said", map.base, bytes);
    if (kvs_region_import(e.ns, &in, &own, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    for (uint32_t i = 0; i < N; i++)
        slots[i] = (kvs_slot){i, 0};
    if (!set_device(p, 0x11, 8 * MiB) || !set_device((uint8_t *)p + inside, 0x22, N * FLAT * PAGE))
        return false;
    if (engine_store(&e, own, 735000, slots, N, NULL, &err) != KVS_OK || !set_device(p, 0, 8 * MiB) ||
        engine_load(&e, own, 735000, slots, N, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    if (!from_device(got, (uint8_t *)p + inside, N * FLAT * PAGE))
        return false;
    for (size_t i = 0; i < N * FLAT * PAGE; i++)
        if (got[i] != 0x22)
            return GPU_FAIL("byte %zu is %02x", i, got[i]);
    kvs_close(e.client);
    (void)cudaFree(p);
    free(got);
    return daemon_alive(&engine_daemon) || GPU_FAIL("the daemon died");
}

/* ---- 086, 088: nobody waits for callbacks, frees or full streams ---- */

static asker health;

/* Streams with callbacks that raise counters; threads that import, close and free; nobody stalls. */
enum { STREAMS = 8, IMPORTERS = 2 };

typedef struct stress {
    engine e;
    _Atomic bool stop;
    _Atomic uint64_t most_ns, n;
    _Atomic uint32_t failed;
    int number;
    device *d;
} stress;

static void note(stress *s, uint64_t began)
{
    uint64_t ns = clock_ns() - began, most = atomic_load(&s->most_ns);

    while (ns > most && !atomic_compare_exchange_weak(&s->most_ns, &most, ns))
        ;
    atomic_fetch_add(&s->n, 1);
}

typedef struct called {
    kvs_client *client;
    uint32_t counter;
    uint64_t value;
} called;

static void CUDART_CB raise_counter(void *arg)
{
    const called *c = arg;

    (void)kvs_counter_set(c->client, c->counter, c->value, NULL);
}

static void *stress_streams(void *arg)
{
    stress *s = arg;
    cudaStream_t streams[STREAMS];
    called calls[STREAMS];
    flight *f = calloc(STREAMS, sizeof *f);
    kvs_mark after[STREAMS];
    kvs_region *region;
    kvs_slot slots[STREAMS * 4];
    uint8_t *base;

    if (f == NULL || !engine_region(&s->e, STREAMS * 4, &region, slots, &base)) {
        atomic_fetch_add(&s->failed, 1);
        return NULL;
    }
    for (int i = 0; i < STREAMS; i++)
        (void)cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking);
    for (uint64_t value = 1; !atomic_load(&s->stop) && atomic_load(&s->failed) == 0; value++) {
        uint64_t began = clock_ns();

        for (uint32_t i = 0; i < STREAMS; i++) {
            calls[i] = (called){s->e.client, 10 + i, value};
            after[i] = (kvs_mark){.counter = 10 + i, .value = value};
            (void)cudaMemsetAsync(base + slots[4 * i].slot * s->e.slot_bytes, (int)value, s->e.slot_bytes, streams[i]);
            (void)cudaLaunchHostFunc(streams[i], raise_counter, &calls[i]);
            if (!flight_store(&f[i], &s->e, region, 800000 + value * 100 + 4 * i, &slots[4 * i], 4, &after[i]))
                atomic_fetch_add(&s->failed, 1);
        }
        for (uint32_t i = 0; i < STREAMS; i++)
            if (f[i].request != NULL && flight_end(&f[i], NULL) != KVS_OK)
                atomic_fetch_add(&s->failed, 1);
        note(s, began);
    }
    for (int i = 0; i < STREAMS; i++)
        (void)cudaStreamDestroy(streams[i]);
    free(f);
    return NULL;
}

static void *stress_imports(void *arg)
{
    stress *s = arg;
    kvs_plane_map map = {.stride = FLAT * PAGE};

    while (!atomic_load(&s->stop) && atomic_load(&s->failed) == 0) {
        kvs_ipc ipc;
        kvs_import in = {
            .n_slots = 4, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
        kvs_region *own = NULL;
        uint64_t began = clock_ns();
        void *p;

        if (cudaMalloc(&p, 4 * FLAT * PAGE) != cudaSuccess || !ipc_handle(s->d, p, &ipc) ||
            kvs_region_import(s->e.ns, &in, &own, 0, NULL) != KVS_OK || kvs_region_close(own, 0, NULL) != KVS_OK ||
            cudaFree(p) != cudaSuccess)
            atomic_fetch_add(&s->failed, 1);
        note(s, began);
    }
    return NULL;
}

static bool case_086(device *d)
{
    static stress s[1 + IMPORTERS];
    pthread_t t[1 + IMPORTERS];
    double seconds = gpu_subset() ? 3 : getenv("KVS_GPU_LONG") != NULL ? 60 : 6, most = 0;
    uint64_t n = 0;
    uint32_t failed = 0;

    for (int i = 0; i < 1 + IMPORTERS; i++) {
        s[i] = (stress){.number = i, .d = d};
        if (!engine_begin(&s[i].e, FLAT) ||
            pthread_create(&t[i], NULL, i == 0 ? stress_streams : stress_imports, &s[i]) != 0)
            return GPU_FAIL("thread %d", i);
    }
    nap_ms((long)(seconds * 1e3));
    for (int i = 0; i < 1 + IMPORTERS; i++)
        atomic_store(&s[i].stop, true);
    for (int i = 0; i < 1 + IMPORTERS; i++) {
        (void)pthread_join(t[i], NULL);
        most = (double)s[i].most_ns / 1e6 > most ? (double)s[i].most_ns / 1e6 : most;
        n += s[i].n;
        failed += s[i].failed;
        kvs_close(s[i].e.client);
    }
    (void)printf("      %" PRIu64 " rounds in %.0f s, the slowest %.1f ms\n", n, seconds, most);
    return (failed == 0 && n > 0 && most < (gpu_subset() ? 10000 : 1000)) || GPU_FAIL("%u failed", failed);
}

/* Loads for two seconds: of the pool into a daemon region, and into an engine's memory page by page. */
static bool busy_loads(engine *e, kvs_region *r, const kvs_slot *slots, uint32_t n, uint64_t id, double seconds)
{
    double until = gpu_seconds() + seconds;
    kvs_err err = {.msg = ""};

    while (gpu_seconds() < until)
        if (engine_load(e, r, id, slots, n, &err) != KVS_OK)
            return GPU_FAIL("load: %s", err.msg);
    return true;
}

static bool case_088(device *d)
{
    enum { N = 100 };
    const uint64_t pitch = PAGE + 64, plane = N * pitch;
    double seconds = gpu_subset() ? 0.5 : 2;
    kvs_plane_map maps[DEEP];
    kvs_ipc ipc;
    kvs_import in = {
        .n_slots = N, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = DEEP, .maps = maps, .n_ipc = 1, .ipc = &ipc};
    kvs_region *region, *own;
    kvs_slot slots[N], mine[N];
    kvs_err err = {.msg = ""};
    uint8_t *base;
    bool good;
    engine e;
    void *p;

    for (uint32_t l = 0; l < DEEP; l++)
        maps[l] = (kvs_plane_map){.base = l * plane, .stride = pitch};
    if (!engine_begin(&e, DEEP) || !engine_region(&e, N, &region, slots, &base) ||
        !cuda_ok(cudaMalloc(&p, DEEP * plane), "cudaMalloc") || !ipc_handle(d, p, &ipc))
        return false;
    if (kvs_region_import(e.ns, &in, &own, 0, &err) != KVS_OK ||
        engine_store(&e, region, 900000, slots, N, NULL, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    for (uint32_t i = 0; i < N; i++)
        mine[i] = (kvs_slot){i, 0};
    good = asker_start(&health, 10) && busy_loads(&e, region, slots, N, 900000, seconds);
    good = asker_end(&health, "whole blocks", gpu_subset() ? 2000 : 50, 5000) && good;
    good = good && asker_start(&health, 10) && busy_loads(&e, own, mine, N, 900000, seconds);
    good = good && asker_end(&health, "pages with gaps", gpu_subset() ? 2000 : 50, 5000);
    kvs_close(e.client);
    (void)cudaFree(p);
    return good;
}

/* ---- 089: where the pool's pages are ---- */

/* Pages of the daemon's arena on each node, from its numa_maps. */
static bool arena_pages(uint64_t pages[8], uint64_t *ret_all)
{
    char path[64], line[4096];
    FILE *f;

    (void)snprintf(path, sizeof path, "/proc/%d/numa_maps", (int)engine_daemon.pid);
    f = fopen(path, "re");
    if (f == NULL)
        return false;
    while (fgets(line, sizeof line, f) != NULL) {
        if (strstr(line, "kvs-arena") == NULL)
            continue;
        for (const char *p = line; (p = strstr(p, " N")) != NULL; p += 2) {
            unsigned long long n;
            unsigned node;

            if (sscanf(p, " N%u=%llu", &node, &n) == 2 && node < 8) {
                pages[node] += n;
                *ret_all += n;
            }
        }
    }
    (void)fclose(f);
    return *ret_all > 0;
}

static bool case_089(device *d)
{
    device_about about = {.numa_node = -1};
    uint64_t pages[8] = {0}, all = 0, most = 0;
    engine e;

    d->ops->about(d, &about);
    if (!engine_begin(&e, FLAT))
        return false;
    if (!arena_pages(pages, &all)) {
        (void)printf("      this kernel does not tell where pages are; the card is next to node %d\n",
                     (int)about.numa_node);
        kvs_close(e.client);
        return true;
    }
    for (int i = 0; i < 8; i++)
        most = pages[i] > most ? pages[i] : most;
    (void)printf("      %" PRIu64 " pages, on nodes 0 and 1: %" PRIu64 ", %" PRIu64 "; the card is next to node %d\n",
                 all, pages[0], pages[1], (int)about.numa_node);
    kvs_close(e.client);
    if (about.numa_node < 0 || about.numa_node >= 8)
        return most == all || GPU_FAIL("pages on several nodes");
    return pages[about.numa_node] * 100 >= all * 99 || GPU_FAIL("pages on another node");
}

/* ---- memory that goes away under a copy ---- */

/* Loads into memory of its own and frees that while the copies run; again and again.  0: all went well for it, 3: it was
 * told of errors and still lives. */
static int client_freer(const char *socket)
{
    enum { N = 60, TIMES = 10 };
    kvs_plane_map map = {.stride = (uint64_t)DEEP * PAGE};
    static flight f;
    kvs_err err = {.msg = ""};
    kvs_slot slots[N];
    int code = 0;
    engine e;

    if (!engine_open(&e, socket, DEEP))
        return 1;
    for (uint32_t i = 0; i < N; i++)
        slots[i] = (kvs_slot){i, 0};
    for (int i = 0; i < TIMES; i++) {
        kvs_ipc ipc;
        kvs_import in = {
            .n_slots = N, .memory = KVS_MEMORY_CUDA_IPC, .n_maps = 1, .maps = &map, .n_ipc = 1, .ipc = &ipc};
        kvs_region *own;
        void *p;

        if (!cuda_ok(cudaMalloc(&p, (size_t)N * DEEP * PAGE), "cudaMalloc") || !own_ipc_handle(p, &ipc))
            return 1;
        if (kvs_region_import(e.ns, &in, &own, 0, &err) != KVS_OK ||
            !flight_load(&f, &e, own, 950000, slots, N, NULL, NULL)) {
            (void)printf("client: %s\n", err.msg);
            return 1;
        }
        (void)usleep(500 + 400 * (unsigned)i); /* the whole copy takes 5 ms */
        if (cudaFree(p) != cudaSuccess)
            code = 3;
        if (flight_end(&f, NULL) != KVS_OK || kvs_region_close(own, 0, NULL) != KVS_OK)
            code = 3;
    }
    kvs_close(e.client);
    return code;
}

static bool case_freed(device *d)
{
    enum { N = 60, BESIDE = 4 };
    kvs_region *region;
    kvs_slot slots[N];
    uint8_t *base, *want, *got;
    uint64_t bytes, rounds = 0;
    kvs_err err = {.msg = ""};
    rnd r = rnd_open("freed", 9);
    int status = 0;
    engine e;
    pid_t pid;

    (void)d;
    if (!engine_begin(&e, DEEP) || !engine_region(&e, N, &region, slots, &base))
        return false;
    bytes = N * e.slot_bytes;
    want = malloc(bytes);
    got = malloc(bytes);
    if (want == NULL || got == NULL)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, want, bytes);
    if (!to_device(base, want, bytes) || engine_store(&e, region, 950000, slots, N, NULL, &err) != KVS_OK)
        return GPU_FAIL("store: %s", err.msg);
    pid = spawn_client("freer");
    do {
        if (!set_device(base, 0, BESIDE * e.slot_bytes))
            return false;
        if (engine_load(&e, region, 950000, slots, BESIDE, &err) != KVS_OK)
            return GPU_FAIL("beside it: %s", err.msg);
        if (!from_device(got, base, BESIDE * e.slot_bytes) || memcmp(got, want, BESIDE * e.slot_bytes) != 0)
            return GPU_FAIL("beside it other bytes were loaded");
        rounds++;
    } while (waitpid(pid, &status, WNOHANG) == 0);
    if (!daemon_alive(&engine_daemon) || kvs_ping(e.client, 0, &err) != KVS_OK)
        return GPU_FAIL("the daemon does not answer: %s", err.msg);
    kvs_close(e.client);
    free(want);
    free(got);
    (void)printf("      memory was freed under 10 copies; its owner ended with %s%d, %" PRIu64
                 " rounds of another client were right\n",
                 WIFSIGNALED(status) ? "signal " : "", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
                 rounds);
    return !WIFEXITED(status) || WEXITSTATUS(status) != 1 || GPU_FAIL("the client could not begin");
}

static const gpu_test tests[] = {
    {"case 075: pieces of one allocation by their offset", case_075},
    {"case 078: memory without a handle is named by its kind", case_078},
    {"case 086: callbacks, imports and frees at once", case_086},
    {"case 088: health beside full copy streams", case_088},
    {"case 089: the pool's pages are next to the card", case_089},
    {"memory freed under a copy harms its owner only", case_freed},
};

int main(int argc, char **argv)
{
    int code;

    if (argc == 4 && strcmp(argv[1], "-client") == 0)
        return client_freer(argv[3]);
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
    static const gpu_test tests[] = {{"field cases of the CUDA runtime", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
