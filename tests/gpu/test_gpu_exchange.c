/* Two GPUs load the same blocks: each half over its own link, the rest from the other one.  Every byte is compared.
 *
 * With one GPU all tests are passed over.  "-client KIND SOCKET" makes this program a client that is to be
 * killed. */
#include "tests/gpu/gpu_rank.h"

#ifdef KVS_CUDA
#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/pattern.h"
#include "tests/support/random.h"

enum { GPUS = RANK_GPUS, ROUNDS = 7, SOME = 60, PITCH_GAP = 4096 };

static void shuffle(kvs_slot *slots, uint32_t n, rnd *r)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t k = (uint32_t)rnd_below(r, i);
        kvs_slot x = slots[i - 1];

        slots[i - 1] = slots[k];
        slots[k] = x;
    }
}

/* Blocks that came from the other GPU so far, of both. */
static double exchanged(const rank *x)
{
    static const char NAME[] = "\"exchange_bytes\":";
    kvs_report_args a = KVS_REPORT_SUMMARY;
    const char *at;
    char *text = NULL;
    size_t len = 0;
    double bytes = 0;

    if (kvs_report_alloc(x->e.client, &a, &text, &len, CALL_MS, NULL) != KVS_OK)
        return -1;
    at = strstr(text, "\"devices\""); /* the sums follow behind, or come before */
    for (int i = 0; i < 2 * GPUS && at != NULL; i++) {
        at = strstr(at, NAME);
        bytes += at != NULL ? strtod(at + sizeof NAME - 1, NULL) : 0;
        at = at != NULL ? at + 1 : NULL;
    }
    kvs_free(text);
    return bytes / (double)x->e.slot_bytes;
}

static bool store(rank *x, uint32_t n, uint64_t id)
{
    kvs_err err = {.msg = ""};
    uint8_t *host = malloc(x->e.slot_bytes);
    bool good = host != NULL && rank_fill(x, n, id, host);

    free(host);
    if (good && engine_store(&x->e, x->region, id, x->slots, n, NULL, &err) != KVS_OK)
        good = GPU_FAIL("store: %s", err.msg);
    return good;
}

/* Both load n blocks, `ids` apart, the second `us` later.  GB/s of both together, 0: failed. */
static double both_load(rank x[GPUS], flight *f, uint32_t n, const uint64_t id[GPUS], int first, uint64_t us)
{
    uint64_t began = clock_ns(), next = began;
    kvs_err err = {.msg = ""};

    for (int k = 0; k < GPUS; k++, next += us * 1000) {
        int i = k == 0 ? first : 1 - first;

        while (clock_ns() < next)
            ;
        if (!flight_load(&f[i], &x[i].e, x[i].region, id[i], x[i].slots, n, &engine_now, NULL))
            return 0;
    }
    for (int i = 0; i < GPUS; i++)
        if (flight_end(&f[i], &err) != KVS_OK) {
            (void)GPU_FAIL("GPU %d: %s", i, err.msg);
            return 0;
        }
    return (double)GPUS * n * (double)x[0].e.slot_bytes / (double)(clock_ns() - began);
}

static int by_size(const void *a, const void *b)
{
    double d = *(const double *)a - *(const double *)b;

    return d < 0 ? -1 : d > 0;
}

static double median(double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_size);
    return v[ROUNDS / 2];
}

static bool begin(rank x[GPUS], uint32_t layers)
{
    engine_set_mover("{\"exchange\": \"on\"}");
    return rank_open_both(x, layers);
}

/* ---- fast ---- */

static bool speed(device *d)
{
    const uint64_t same[GPUS] = {1000, 1000}, others[GPUS] = {1000, 1000 + MANY};
    rnd order = rnd_open("exchange", 1);
    double two[ROUNDS], one[ROUNDS], shared[ROUNDS], full, alone, half, before;
    rank x[GPUS];
    flight *f = calloc(GPUS, sizeof *f);
    uint8_t *host = NULL;
    kvs_err err = {.msg = ""};
    bool good = f != NULL && begin(x, DEEP);

    (void)d;
    host = good ? malloc(x[0].e.slot_bytes) : NULL;
    good = good && host != NULL && store(&x[0], MANY, same[0]) && store(&x[1], MANY, others[1]);
    for (int i = 0; i < GPUS && good; i++)
        shuffle(x[i].slots, MANY, &order);
    before = good ? exchanged(&x[0]) : 0;
    for (int r = -2; r < ROUNDS && good; r++) {
        double v[3];
        uint64_t at;

        v[0] = both_load(x, f, MANY, others, r & 1, 0);
        at = clock_ns();
        good = flight_load(&f[0], &x[0].e, x[0].region, same[0], x[0].slots, MANY, &engine_now, NULL) &&
               flight_end(&f[0], &err) == KVS_OK;
        v[1] = (double)MANY * (double)x[0].e.slot_bytes / (double)(clock_ns() - at);
        v[2] = both_load(x, f, MANY, same, r & 1, 0);
        good = good && v[0] > 0 && v[2] > 0;
        if (r < 0)
            continue;
        two[r] = v[0];
        one[r] = v[1];
        shared[r] = v[2];
    }
    if (good) {
        full = median(two);
        alone = median(one);
        half = median(shared);
        (void)printf("      %d blocks onto each GPU: two full loads at once %.1f GB/s (one alone %.1f), shared %.1f: "
                     "%.2f times as "
                     "fast; %.0f of %d blocks came from the other GPU\n",
                     MANY, full, alone, half, half / full, exchanged(&x[0]) - before, (ROUNDS + 2) * GPUS * MANY);
        good = half >= 1.6 * full || GPU_FAIL("not 1.6 times as fast");
    }
    for (int i = 0; i < GPUS && good; i++)
        good = rank_wipe(&x[i], MANY);
    good = good && both_load(x, f, MANY, same, 0, 0) > 0;
    for (int i = 0; i < GPUS && good; i++)
        good = rank_holds(&x[i], MANY, same[0], host);
    rank_close(&x[0]);
    rank_close(&x[1]);
    free(host);
    free(f);
    return good;
}

/* ---- right ---- */

static bool arrivals(device *d)
{
    static const uint64_t LATER_US[] = {0, 100, 500, 1000, 2000, 4000, 4800, 5200, 8000};
    const uint64_t id[GPUS] = {5000, 5000};
    rnd order = rnd_open("exchange", 2);
    rank x[GPUS];
    flight *f = calloc(GPUS, sizeof *f);
    uint8_t *host = NULL;
    bool good = f != NULL && begin(x, DEEP);

    (void)d;
    host = good ? malloc(x[0].e.slot_bytes) : NULL;
    good = good && host != NULL && store(&x[0], SOME, id[0]);
    for (uint32_t k = 0; k < 2 * sizeof LATER_US / sizeof *LATER_US && good; k++) {
        double before = exchanged(&x[0]), gbs;

        for (int i = 0; i < GPUS && good; i++) {
            shuffle(x[i].slots, MANY, &order);
            good = rank_wipe(&x[i], MANY);
        }
        gbs = good ? both_load(x, f, SOME, id, (int)(k & 1), LATER_US[k / 2]) : 0;
        (void)printf("      GPU %u %" PRIu64 " us later: %.1f GB/s, %.0f blocks exchanged\n", 1 - (k & 1),
                     LATER_US[k / 2], gbs, exchanged(&x[0]) - before);
        for (int i = 0; i < GPUS && good; i++)
            good = gbs > 0 && rank_holds(&x[i], SOME, id[0], host);
    }
    rank_close(&x[0]);
    rank_close(&x[1]);
    free(host);
    free(f);
    return good;
}

/* An engine's own memory on GPU i, slots of whole blocks with gaps between them. */
typedef struct own {
    kvs_region *region;
    uint8_t *at;
    uint64_t pitch, bytes;
    device_mem *mem; /* VMM */
    device *dev;
} own;

static bool own_open(own *o, rank *x, bool vmm)
{
    kvs_plane_map map = {0};
    kvs_ipc ipc;
    kvs_import in = {.device = KVS_DEVICE_ANY, .n_slots = SOME, .maps = &map, .n_maps = 1};
    kvs_err err = {.msg = ""};
    struct cudaDeviceProp prop;
    uint64_t had;
    void *p = NULL;
    int fd;

    *o = (own){.pitch = x->e.slot_bytes + PITCH_GAP};
    o->bytes = SOME * o->pitch;
    map.stride = o->pitch;
    if (vmm) {
        if (device_cuda_open(&o->dev, (uint32_t)x->ordinal, &err) != KVS_OK ||
            o->dev->ops->mem_create(o->dev, o->bytes, &o->mem, &err) != KVS_OK)
            return GPU_FAIL("%s", err.msg);
        o->at = o->dev->ops->mem_base(o->mem, 0, &had);
        fd = o->dev->ops->mem_fd(o->mem, 0);
        in.memory = KVS_MEMORY_CUDA_VMM;
        in.n_fds = 1;
        in.fds = &fd;
    } else {
        if (!rank_use(x) || !cuda_ok(cudaMalloc(&p, o->bytes), "cudaMalloc") || !own_ipc_handle(p, &ipc) ||
            !cuda_ok(cudaGetDeviceProperties(&prop, x->ordinal), "cudaGetDeviceProperties"))
            return false;
        memcpy(ipc.uuid, prop.uuid.bytes, 16);
        o->at = p;
        in.memory = KVS_MEMORY_CUDA_IPC;
        in.n_ipc = 1;
        in.ipc = &ipc;
    }
    if (kvs_region_import(x->e.ns, &in, &o->region, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return rank_use(x) && set_device(o->at, 0x77, o->bytes);
}

static void own_close(own *o, const rank *x)
{
    (void)rank_use(x);
    if (o->mem != NULL)
        o->dev->ops->mem_close(o->mem);
    else
        (void)cudaFree(o->at);
    if (o->dev != NULL)
        o->dev->ops->close(o->dev);
}

static bool own_holds(const own *o, const rank *x, const kvs_slot *slots, uint64_t id, uint8_t *host)
{
    for (uint32_t k = 0; k < SOME; k++) {
        uint8_t key[KVS_KEY_BYTES];

        pattern_key(id + k, key);
        if (!rank_use(x) || !from_device(host, o->at + slots[k].slot * o->pitch, o->pitch) ||
            pattern_verify(key, host, x->e.slot_bytes) != x->e.slot_bytes)
            return GPU_FAIL("GPU %d: block %u is not what was stored", x->ordinal, k);
        for (uint64_t b = x->e.slot_bytes; b < o->pitch; b++)
            if (host[b] != 0x77)
                return GPU_FAIL("GPU %d: the gap behind slot %u was written", x->ordinal, slots[k].slot);
    }
    return true;
}

static bool with_gaps(bool vmm)
{
    rnd order = rnd_open("exchange", 3);
    rank x[GPUS];
    own o[GPUS] = {0};
    kvs_slot slots[GPUS][SOME];
    flight *f = calloc(GPUS, sizeof *f);
    uint8_t *host = NULL;
    kvs_err err = {.msg = ""};
    bool good = f != NULL && begin(x, DEEP);
    double before, rate = 0;

    host = good ? malloc(x[0].e.slot_bytes + PITCH_GAP) : NULL;
    good = good && host != NULL && store(&x[0], SOME, 7000);
    for (int i = 0; i < GPUS && good; i++)
        good = own_open(&o[i], &x[i], vmm);
    before = good ? exchanged(&x[0]) : 0;
    for (uint64_t r = 0; r < 3 && good; r++) {
        uint64_t began;

        for (int i = 0; i < GPUS; i++) {
            for (uint32_t k = 0; k < SOME; k++)
                slots[i][k] = (kvs_slot){k, 0};
            shuffle(slots[i], SOME, &order);
            good = good && rank_use(&x[i]) && set_device(o[i].at, 0x77, o[i].bytes);
        }
        began = clock_ns();
        for (int i = 0; i < GPUS; i++)
            good = good && flight_load(&f[i], &x[i].e, o[i].region, 7000, slots[i], SOME, &engine_now, NULL);
        for (int i = 0; i < GPUS && good; i++)
            good = flight_end(&f[i], &err) == KVS_OK || GPU_FAIL("GPU %d: %s", i, err.msg);
        rate = (double)GPUS * SOME * (double)x[0].e.slot_bytes / (double)(clock_ns() - began);
        for (int i = 0; i < GPUS && good; i++)
            good = own_holds(&o[i], &x[i], slots[i], 7000, host);
    }
    before = good ? exchanged(&x[0]) - before : 0;
    if (good)
        (void)printf("      %d blocks onto each GPU: %.1f GB/s, %.0f of %d exchanged\n", SOME, rate, before,
                     3 * GPUS * SOME);
    if (good && (before > 0) != vmm)
        good = GPU_FAIL("%.0f blocks were exchanged", before);
    for (int i = 0; i < GPUS; i++) {
        kvs_close(x[i].e.client);
        x[i].e.client = NULL;
        own_close(&o[i], &x[i]);
        rank_close(&x[i]);
    }
    free(host);
    free(f);
    return good;
}

static bool gaps_vmm(device *d)
{
    (void)d;
    return with_gaps(true);
}

static bool gaps_ipc(device *d)
{
    (void)d;
    return with_gaps(false);
}

/* ---- killed ---- */

enum { KILL_ID = 9000 };

/* Loads the same blocks onto GPU 1 for ever. */
static int client_loads(const char *socket)
{
    rank x;
    kvs_err err = {.msg = ""};

    if (!rank_join(&x, socket, 1, DEEP))
        return 1;
    while (engine_load(&x.e, x.region, KILL_ID, x.slots, MANY, &err) == KVS_OK)
        ;
    (void)printf("client: %s\n", err.msg);
    return 1;
}

/* Load, and kill the other one meanwhile. */
static bool load_and_kill(rank *x, flight *f, pid_t pid, uint64_t after_us)
{
    kvs_err err = {.msg = ""};
    uint64_t began = clock_ns();

    if (!flight_load(f, &x->e, x->region, KILL_ID, x->slots, MANY, &engine_now, NULL))
        return false;
    while (clock_ns() - began < after_us * 1000)
        ;
    (void)kill(pid, SIGKILL);
    return flight_end(f, &err) == KVS_OK || GPU_FAIL("load beside a client that is killed: %s", err.msg);
}

/* KVS_EXCHANGE_KILLS: how many; 3 unless told otherwise. */
static bool killed(device *d)
{
    const char *text = getenv("KVS_EXCHANGE_KILLS");
    const uint32_t kills = text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 3;
    flight *f = calloc(1, sizeof *f);
    rank x;
    uint8_t *host = NULL;
    kvs_err err = {.msg = ""};
    bool good;
    double before;

    (void)d;
    engine_set_mover("{\"exchange\": \"on\"}");
    good = f != NULL && rank_open(&x, 0, DEEP) && store(&x, MANY, KILL_ID);
    host = good ? malloc(x.e.slot_bytes) : NULL;
    before = good ? exchanged(&x) : 0;
    for (uint32_t k = 0; k < kills && good; k++) {
        pid_t pid = spawn_client("loads");
        double seen = exchanged(&x), end = gpu_seconds() + 20;

        while (good && exchanged(&x) < seen + MANY && gpu_seconds() < end) /* until it has come */
            good = engine_load(&x.e, x.region, KILL_ID, x.slots, MANY, &err) == KVS_OK || GPU_FAIL("load: %s", err.msg);
        good = good && rank_wipe(&x, MANY);
        good = good && load_and_kill(&x, f, pid, 500 + k * 1500 % 5500);
        (void)kill(pid, SIGKILL);
        (void)waitpid(pid, NULL, 0);
        good = good && rank_holds(&x, MANY, KILL_ID, host);
    }
    if (good)
        (void)printf("      %u clients killed; %.0f blocks exchanged\n", kills, exchanged(&x) - before);
    rank_close(&x);
    free(host);
    free(f);
    return good;
}

/* ---- where it pays ---- */

/* kvstridectl calibrate of one GPU, to its end. */
static bool calibrate(const char *folder, uint32_t gpu)
{
    char path[4096], number[16];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 16);
    const char *argv[] = {"kvstridectl", "calibrate", "--quiet", "--folder", folder, "--gpu", number, NULL};
    int status = -1;
    pid_t pid;

    path[n > 0 ? n : 0] = '\0';
    for (int up = 0; up < 3 && strrchr(path, '/') != NULL; up++)
        *strrchr(path, '/') = '\0';
    (void)strcat(path, "/kvstridectl");
    (void)snprintf(number, sizeof number, "%u", gpu);
    (void)fflush(NULL);
    pid = fork();
    if (pid == 0) {
        (void)execv(path, (char *const *)(uintptr_t)argv);
        _exit(127);
    }
    (void)waitpid(pid, &status, 0);
    return status == 0 || GPU_FAIL("kvstridectl calibrate --gpu %u: status %d", gpu, status);
}

static void remove_folder(const char *folder)
{
    DIR *dir = opendir(folder);
    struct dirent *e;

    while (dir != NULL && (e = readdir(dir)) != NULL)
        (void)unlinkat(dirfd(dir), e->d_name, 0); /* files only */
    if (dir != NULL)
        (void)closedir(dir);
    (void)rmdir(folder);
}

/* Blocks that come from the other GPU when both load the same, under "auto" and the tables in that folder. */
static bool auto_exchanges(const char *folder, double *ret)
{
    const uint64_t id[GPUS] = {3000, 3000};
    static char mover[256]; /* it is read at each start of a daemon */
    rank x[GPUS] = {0};
    flight *f = calloc(GPUS, sizeof *f);
    uint8_t *host = NULL;
    bool good;

    (void)snprintf(mover, sizeof mover, "{\"calibration\": \"%s\"}", folder);
    engine_set_mover(mover);
    good = f != NULL && rank_open_both(x, DEEP);
    host = good ? malloc(x[0].e.slot_bytes) : NULL;
    good = good && host != NULL && store(&x[0], SOME, id[0]) && rank_wipe(&x[0], SOME) && rank_wipe(&x[1], SOME);
    good = good && both_load(x, f, SOME, id, 0, 0) > 0;
    for (int i = 0; i < GPUS && good; i++)
        good = rank_holds(&x[i], SOME, id[0], host);
    *ret = good ? exchanged(&x[0]) : 0;
    rank_close(&x[0]);
    rank_close(&x[1]);
    engine_end_daemon(!good);
    free(host);
    free(f);
    return good;
}

/* Measured here, and whether the copies bring what was there; between the two GPUs of one host it has paid so far. */
static bool calibrated(device *d)
{
    char folder[] = "/tmp/kvs-calibration-XXXXXX";
    double without = 0, with = 0;
    bool good = mkdtemp(folder) != NULL && auto_exchanges(folder, &without);

    (void)d;
    if (good && without != 0)
        good = GPU_FAIL("%.0f blocks were exchanged without a measurement", without);
    for (uint32_t i = 0; i < GPUS && good; i++)
        good = calibrate(folder, i);
    good = good && auto_exchanges(folder, &with);
    if (good && with <= 0)
        good = GPU_FAIL("no block was exchanged behind a calibration");
    if (good)
        (void)printf("      exchange \"auto\": none before kvstridectl calibrate, %.0f of %d blocks behind it\n", with,
                     GPUS * SOME);
    engine_set_mover("{}");
    remove_folder(folder);
    return good;
}

static const gpu_test tests[] = {
    {"the same blocks onto two GPUs, 1.6 times as fast as two full loads at once", speed},
    {"both have every byte, whoever comes first and by how much", arrivals},
    {"imported VMM memory with gaps is exchanged", gaps_vmm},
    {"imported allocations with gaps are not: each goes over its own link", gaps_ipc},
    {"a client killed in the middle leaves the other one right", killed},
    {"by itself where kvstridectl calibrate has seen a gain, and not before", calibrated},
};

int main(int argc, char **argv)
{
    size_t n = sizeof tests / sizeof *tests;
    int code;

    if (argc == 4 && strcmp(argv[1], "-client") == 0)
        return client_loads(argv[3]);
    if (rank_n_gpus() == 1) {
        (void)printf("SKIP: two GPUs are not here\n0 passed, 0 failed, %zu skipped\n", n);
        return 0;
    }
    code = gpu_run(tests, n, argc, argv);
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
    static const gpu_test tests[] = {{"exchange", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
