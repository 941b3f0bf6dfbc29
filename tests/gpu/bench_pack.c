/* bench_pack: client pack beside an engine that is at work, in the engine's own process.
 *
 *   bench_pack [72|18] [on|off] [CHUNK [CTAS [STAGING]]]   pages in KiB, checksums (both of each if not given), kvs_pack_args
 * Each line: how much of one raw copy of the same run the whole way through the daemon reaches, and how fast the engine is
 * meanwhile, of its speed alone. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/client/kvstride_pack.h"
#include "proto/ctl/pattern.h"
#include "tests/gpu/gpu.h"
#include "tests/support/daemon_fixture.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

#include "tests/gpu/busy_cuda.h"

enum { LAYERS = 61, REPEAT = 9, CALL_MS = 60000 };
#define TOTAL_BYTES (UINT64_C(900) << 20)

typedef struct engine {
    kvs_client *client;
    kvs_ns *ns;
    kvs_pack *pack;
    kvs_plane planes[LAYERS];
    uint8_t *memory, *pinned;
    uint64_t slot_bytes;
    uint32_t n;
    uint8_t *keys;
    uint32_t *blocks;
    kvs_status *results;
    cudaStream_t raw;
} engine;

static bool fail(const char *what)
{
    (void)printf("bench_pack: %s\n", what);
    return false;
}

static bool engine_memory(engine *e)
{
    e->keys = malloc((size_t)e->n * KVS_KEY_BYTES);
    e->blocks = malloc(e->n * sizeof *e->blocks);
    e->results = malloc(e->n * sizeof *e->results);
    if (e->keys == NULL || e->blocks == NULL || e->results == NULL)
        return false;
    for (uint32_t i = 0; i < e->n; i++)
        e->blocks[i] = (uint32_t)((uint64_t)i * 7919 % e->n);
    return cudaMalloc((void **)&e->memory, e->n * e->slot_bytes) == cudaSuccess &&
           cudaHostAlloc((void **)&e->pinned, e->n * e->slot_bytes, 0) == cudaSuccess &&
           cudaMemset(e->memory, 1, e->n * e->slot_bytes) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess &&
           cudaStreamCreateWithFlags(&e->raw, cudaStreamNonBlocking) == cudaSuccess;
}

static bool engine_open(engine *e, const char *socket, uint32_t tokens, const kvs_pack_args *more)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_pack_plane tensors[LAYERS];
    kvs_namespace desc;
    kvs_ns_info info;
    kvs_pack_args a = *more;
    kvs_err err = {.msg = ""};

    o.path = socket;
    if (kvs_connect(&e->client, &o, &err) != KVS_OK ||
        kvs_namespace_mla("bench", "", KVS_FORMAT_mla_bf16, LAYERS, tokens, e->planes, &desc, &err) != KVS_OK ||
        kvs_open(e->client, &desc, &e->ns, 0, &err) != KVS_OK)
        return fail(err.msg);
    kvs_ns_get(e->ns, &info);
    e->slot_bytes = info.slot_bytes;
    e->n = (uint32_t)(TOTAL_BYTES / e->slot_bytes / 8 * 8);
    if (!engine_memory(e))
        return fail("no memory");
    for (uint32_t l = 0; l < LAYERS; l++)
        tensors[l] = (kvs_pack_plane){e->memory + (uint64_t)(LAYERS - 1 - l) * e->n * e->planes[l].page_bytes,
                                      e->planes[l].page_bytes};
    a.ns = e->ns;
    a.n_planes = LAYERS;
    a.planes = tensors;
    a.n_blocks = e->n;
    return kvs_pack_open(e->client, &a, &e->pack, 0, &err) == KVS_OK ? true : fail(err.msg);
}

static void engine_close(engine *e)
{
    kvs_close(e->client);
    (void)cudaStreamDestroy(e->raw);
    (void)cudaFree(e->memory);
    (void)cudaFreeHost(e->pinned);
    free(e->keys);
    free(e->blocks);
    free(e->results);
    *e = (engine){0};
}

/* ---- one measured step ---- */

typedef struct figure {
    double seconds, engine; /* engine: kernels a second meanwhile */
} figure;

static double kernels(const busy *b)
{
    return b != NULL ? (double)busy_progress(b) : 0;
}

static bool move(engine *e, const busy *b, bool load, figure *ret)
{
    kvs_pack_move m = {
        .n = e->n, .keys = e->keys, .blocks = e->blocks, .results = e->results, .flags = KVS_PACK_NO_WAIT};
    kvs_err err = {.msg = ""};
    kvs_request *r;
    double at = gpu_seconds(), k = kernels(b);
    kvs_status s =
        load ? kvs_pack_load(e->pack, &m, &r, CALL_MS, &err) : kvs_pack_store(e->pack, &m, &r, CALL_MS, &err);

    if (s == KVS_OK)
        s = kvs_wait(r, CALL_MS, &err);
    ret->seconds = gpu_seconds() - at;
    ret->engine = (kernels(b) - k) / ret->seconds;
    if (s == KVS_OK)
        s = kvs_request_end(r, &err);
    return s == KVS_OK ? true : fail(err.msg);
}

static bool copy_raw(engine *e, const busy *b, bool load, figure *ret)
{
    uint64_t bytes = e->n * e->slot_bytes;
    double at = gpu_seconds(), k = kernels(b);

    if (cudaMemcpyAsync(load ? e->memory : e->pinned, load ? e->pinned : e->memory, bytes, cudaMemcpyDefault, e->raw) !=
            cudaSuccess ||
        cudaStreamSynchronize(e->raw) != cudaSuccess)
        return fail("the raw copy failed");
    ret->seconds = gpu_seconds() - at;
    ret->engine = (kernels(b) - k) / ret->seconds;
    return true;
}

static double speed_alone(const busy *b)
{
    struct timespec nap = {.tv_nsec = 150000000};
    double at = gpu_seconds(), k = kernels(b);

    (void)nanosleep(&nap, NULL);
    return (kernels(b) - k) / (gpu_seconds() - at);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, REPEAT, sizeof *v, by_value);
    return v[REPEAT / 2];
}

/* Stores and loads in turn, each after a raw copy of as many bytes; the engine goes on meanwhile. */
static bool measure(engine *e, const char *how, const busy *b)
{
    double raw[2][REPEAT], took[2][REPEAT], beside_raw[2][REPEAT], beside[2][REPEAT];
    double gb = (double)(e->n * e->slot_bytes) / 1e9, alone = b != NULL ? speed_alone(b) : 0;
    kvs_err err = {.msg = ""};

    for (int i = -2; i < REPEAT; i++) {
        figure plain[2], f[2];

        for (uint32_t k = 0; k < e->n; k++)
            pattern_key((uint64_t)(i + 2) * 100000 + k, e->keys + (size_t)k * KVS_KEY_BYTES);
        if (kvs_reset(e->client, e->ns, 0, NULL, CALL_MS, &err) != KVS_OK)
            return fail(err.msg);
        for (int load = 0; load < 2; load++)
            if (!copy_raw(e, b, load, &plain[load]) || !move(e, b, load, &f[load]))
                return false;
        for (int load = 0; load < 2 && i >= 0; load++) {
            raw[load][i] = plain[load].seconds;
            took[load][i] = f[load].seconds;
            beside_raw[load][i] = plain[load].engine;
            beside[load][i] = f[load].engine;
        }
    }
    for (int load = 0; load < 2; load++) {
        double r = median(raw[load]), t = median(took[load]);

        (void)printf("  %-22s %-5s %6.2f GB/s  %.3f of raw %6.2f", how, load ? "load" : "store", gb / t, r / t, gb / r);
        if (b != NULL)
            (void)printf("  engine at %.3f (beside raw copies %.3f)", median(beside[load]) / alone,
                         median(beside_raw[load]) / alone);
        (void)printf("\n");
    }
    return true;
}

static bool measure_all(engine *e)
{
    static const struct {
        const char *how;
        busy_kind kind;
        int priority;
    } ENGINES[] = {
        {"engine computes", BUSY_COMPUTE, 0},
        {"engine moves memory", BUSY_MEMORY, 0},
        {"computes, priority -1", BUSY_COMPUTE, -1},
        {"memory, priority -1", BUSY_MEMORY, -1},
    };
    bool good = measure(e, "engine idle", NULL);

    for (unsigned i = 0; i < sizeof ENGINES / sizeof *ENGINES && good; i++) {
        busy *b = NULL;

        good = busy_start(&b, ENGINES[i].kind, ENGINES[i].priority) && measure(e, ENGINES[i].how, b);
        busy_stop(b);
    }
    return good;
}

static bool run(uint32_t tokens, bool checksum, const kvs_pack_args *more)
{
    daemon_fixture d;
    engine e = {0};
    bool good;

    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    daemon_init(&d);
    daemon_configure(&d, checksum
                             ? "{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"2GiB\"}}"
                             : "{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"2GiB\", \"checksum\": "
                               "false}}");
    good = daemon_start(&d, NULL) && engine_open(&e, d.socket, tokens, more);
    if (good) {
        (void)printf("%u blocks of %d pages of %" PRIu64 " bytes, checksums %s, chunk %u, slots %u\n", e.n, LAYERS,
                     e.planes[0].page_bytes, checksum ? "on" : "off", more->chunk, more->n_staging);
        good = measure_all(&e);
    }
    engine_close(&e);
    daemon_fini(&d);
    return good;
}

static uint32_t number(int argc, char **argv, int i)
{
    return argc > i ? (uint32_t)strtoul(argv[i], NULL, 10) : 0;
}

int main(int argc, char **argv)
{
    const char *page = argc > 1 ? argv[1] : "", *sums = argc > 2 ? argv[2] : "";
    kvs_pack_args more = {
        .chunk = number(argc, argv, 3), .ctas = number(argc, argv, 4), .n_staging = number(argc, argv, 5)};
    bool good = true;
    int n = 0;

    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        (void)printf("SKIP: no GPU\n");
        return 0;
    }
    for (int i = 0; i < 4 && good; i++) {
        bool small = i >= 2, checksum = i % 2 == 0;

        if ((page[0] != '\0' && (strcmp(page, "18") == 0) != small) ||
            (sums[0] != '\0' && (strcmp(sums, "on") == 0) != checksum))
            continue;
        good = run(small ? 16 : 64, checksum, &more);
    }
    return good ? 0 : 1;
}

#else

int main(void)
{
    (void)printf("SKIP: this build has no CUDA\n");
    return 0;
}
#endif
