/* The daemon as a service on a GPU machine: the loss of its GPU, a warm restart, and hardening that hides what the driver
 * needs.  The last needs root, for mount namespaces; what cannot be made is said and not counted as tried. */
#include "tests/gpu/gpu_engine.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/pattern.h"
#include "tests/gpu/race_cuda.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

#include "daemon/options.h"

#ifndef PR_SET_MDWE
#define PR_SET_MDWE              65
#define PR_MDWE_REFUSE_EXEC_GAIN 1
#endif

static daemon_fixture served;
static int stored[2];

static void begin_service(const char *json)
{
    daemon_init(&served);
    stored[0] = stored[1] = -1;
    served.stored_fd = stored;
    daemon_configure(&served, json);
}

static void end_service(bool good)
{
    char line[1024];
    FILE *f = good ? NULL : fopen(served.log, "re");

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        (void)printf("      %s", line);
    if (f != NULL)
        (void)fclose(f);
    daemon_fini(&served);
    for (int i = 0; i < 2; i++)
        if (stored[i] >= 0)
            (void)close(stored[i]);
}

/* ---- an engine that knows its blocks by their sums ---- */

enum { N = 100 };

typedef struct filler {
    engine e;
    kvs_region *region;
    kvs_slot slots[N];
    uint8_t *base;
    uint64_t *sums; /* device [N] */
} filler;

static bool filler_open(filler *x)
{
    void *p;

    if (!engine_open(&x->e, served.socket, DEEP) || !engine_region(&x->e, N, &x->region, x->slots, &x->base) ||
        !cuda_ok(cudaMalloc(&p, N * sizeof *x->sums), "cudaMalloc"))
        return false;
    x->sums = p;
    return true;
}

static void filler_close(filler *x)
{
    (void)cudaFree(x->sums);
    kvs_close(x->e.client);
}

static int byte_of(uint64_t id)
{
    return (int)(id * 7 % 251);
}

/* N blocks from `id` on, each of one byte of its own. */
static bool store_blocks(filler *x, uint64_t id)
{
    kvs_err err = {.msg = ""};

    for (uint64_t i = 0; i < N; i++)
        if (!cuda_ok(cudaMemsetAsync(x->base + x->slots[i].slot * x->e.slot_bytes, byte_of(id + i), x->e.slot_bytes, 0),
                     "memset"))
            return false;
    if (!cuda_ok(cudaDeviceSynchronize(), "synchronise"))
        return false;
    return engine_store(&x->e, x->region, id, x->slots, N, NULL, &err) == KVS_OK || GPU_FAIL("store: %s", err.msg);
}

static bool load_blocks(filler *x, uint64_t id)
{
    kvs_err err = {.msg = ""};
    uint64_t sums[N];

    if (!set_device(x->base, 0xfe, N * x->e.slot_bytes))
        return false;
    if (engine_load(&x->e, x->region, id, x->slots, N, &err) != KVS_OK)
        return GPU_FAIL("load of blocks %" PRIu64 "..: %s", id, err.msg);
    for (uint64_t i = 0; i < N; i++)
        if (!race_cuda_sum(x->base + x->slots[i].slot * x->e.slot_bytes, x->e.slot_bytes, 0, x->sums + i, NULL))
            return GPU_FAIL("the sum of a block");
    if (!cuda_ok(cudaDeviceSynchronize(), "synchronise") || !from_device(sums, x->sums, sizeof sums))
        return false;
    for (uint64_t i = 0; i < N; i++)
        if (sums[i] != x->e.slot_bytes / 8 * (UINT64_C(0x0101010101010101) * (uint64_t)byte_of(id + i)))
            return GPU_FAIL("block %" PRIu64 " has other bytes", id + i);
    return true;
}

static bool has_grown(kvs_client *c, bool *ret)
{
    kvs_report_args a = KVS_REPORT_SUMMARY;
    char *text = NULL;
    size_t len;

    if (kvs_report_alloc(c, &a, &text, &len, 0, NULL) != KVS_OK)
        return GPU_FAIL("no status");
    *ret = strstr(text, "\"growing\":false") != NULL;
    kvs_free(text);
    return true;
}

static bool wait_grown(kvs_client *c)
{
    double end = gpu_seconds() + 120;
    bool grown = false;

    while (!grown && gpu_seconds() < end) {
        if (!has_grown(c, &grown))
            return false;
        nap_ms(5);
    }
    return grown || GPU_FAIL("the pool does not get its full size");
}

/* ---- the GPU is lost ---- */

static bool poison_path(char path[4096])
{
    ssize_t n = readlink("/proc/self/exe", path, 4000);

    if (n <= 0)
        return false;
    path[n] = '\0';
    for (int up = 0; up < 2; up++)
        *strrchr(path, '/') = '\0';
    (void)strcat(path, "/fault/poison.so");
    return access(path, R_OK) == 0;
}

static bool start_poisonable(const char *trigger)
{
    char path[4096];
    bool started;

    if (!poison_path(path))
        return GPU_FAIL("%s is not there", path);
    (void)setenv("LD_PRELOAD", path, 1);
    (void)setenv("KVS_POISON", trigger, 1);
    started = daemon_start(&served, NULL);
    (void)unsetenv("LD_PRELOAD");
    (void)unsetenv("KVS_POISON");
    return started || GPU_FAIL("the daemon does not start with %s", path);
}

static bool poison(const char *trigger, filler *x, int *ret_code)
{
    int fd = open(trigger, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    double began = gpu_seconds();
    kvs_status s = KVS_OK, first = KVS_OK;
    kvs_err err = {.msg = ""};

    if (fd < 0)
        return GPU_FAIL("%s", trigger);
    (void)close(fd);
    while (gpu_seconds() - began < 20 && first == KVS_OK) {
        s = engine_load(&x->e, x->region, 0, x->slots, N, &err);
        first = s;
    }
    *ret_code = daemon_wait(&served, 20000);
    (void)printf("      the first call that noticed: %s (%s); the daemon ended with %d after %.2f s\n",
                 kvs_status_name(first), err.msg, *ret_code, gpu_seconds() - began);
    return first != KVS_OK || GPU_FAIL("every load went well");
}

static bool lose_the_gpu(device *d)
{
    enum { BATCHES = 4 };
    char trigger[128];
    bool good;
    int code = 0;
    filler x;

    (void)d;
    begin_service("{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"3GiB\"}}");
    (void)snprintf(trigger, sizeof trigger, "%s/poison", served.dir);
    good = start_poisonable(trigger) && filler_open(&x) && wait_grown(x.e.client);
    for (uint64_t b = 0; b < BATCHES && good; b++)
        good = store_blocks(&x, b * N);
    good = good && poison(trigger, &x, &code);
    if (good && code != EXIT_CODE_DEVICE)
        good = GPU_FAIL("exit code %d, not %d", code, EXIT_CODE_DEVICE);
    if (good && daemon_log_count(&served, "device_lost") == 0)
        good = GPU_FAIL("nothing is said of the loss");
    if (good)
        filler_close(&x);
    /* The next life has the host memory. */
    if (good && !daemon_start(&served, NULL))
        good = GPU_FAIL("the daemon does not start again");
    good = good && filler_open(&x);
    for (uint64_t b = 0; b < BATCHES && good; b++)
        good = load_blocks(&x, b * N);
    if (good)
        filler_close(&x);
    end_service(good);
    return good;
}

/* ---- a warm restart ---- */

/* How long a start takes until READY, and from there until all is pinned, when nobody asks for anything. */
static bool time_pinning(double *ret_ready, double *ret_pinned)
{
    double began = gpu_seconds();
    bool good;
    engine e;

    if (!daemon_start(&served, NULL))
        return GPU_FAIL("the daemon does not start");
    *ret_ready = gpu_seconds() - began;
    began = gpu_seconds();
    good = engine_open(&e, served.socket, DEEP) && wait_grown(e.client);
    *ret_pinned = gpu_seconds() - began;
    if (good)
        kvs_close(e.client);
    return good;
}

/* Hits at both ends of the pool, from the daemon's first moment on. */
static bool time_hits(filler *x, uint64_t n_batches, double *ret_hits)
{
    double began = gpu_seconds();
    bool good = daemon_start(&served, NULL) || GPU_FAIL("the daemon does not start again");

    good = good && filler_open(x) && load_blocks(x, 0) && load_blocks(x, (n_batches - 1) * N);
    *ret_hits = gpu_seconds() - began;
    return good;
}

/* Bytes whose checksums the GPU has made: those are what the next life compares with the processors'. */
static bool summed_bytes(kvs_client *c, uint64_t *ret)
{
    static const char name[] = "\"device_sum_bytes\":";
    kvs_report_args a = KVS_REPORT_SUMMARY;
    const char *store = NULL, *at = NULL;
    char *text = NULL;
    size_t len;

    if (kvs_report_alloc(c, &a, &text, &len, 0, NULL) == KVS_OK)
        store = strstr(text, "\"store\":");
    if (store != NULL)
        at = strstr(store, name);
    if (at != NULL)
        *ret = strtoull(at + sizeof name - 1, NULL, 10);
    kvs_free(text);
    return at != NULL || GPU_FAIL("no status");
}

static bool fill(uint64_t gib, uint64_t *ret_batches)
{
    uint64_t summed = 0, all;
    bool good;
    filler x;

    if (!filler_open(&x))
        return false;
    *ret_batches = gib * GiB / x.e.slot_bytes / N * 9 / 10;
    good = true;
    for (uint64_t b = 0; b < *ret_batches && good; b++)
        good = store_blocks(&x, b * N);
    good = good && summed_bytes(x.e.client, &summed);
    all = *ret_batches * N * x.e.slot_bytes;
    (void)printf("      the GPU made the checksums of %.3f of what was stored\n", (double)summed / (double)all);
    if (good && !gpu_subset() && summed < all / 2) /* a sanitizer's kernels are late */
        good = GPU_FAIL("%" PRIu64 " bytes of %" PRIu64, summed, all);
    filler_close(&x);
    return good;
}

static bool restart_warm(device *d)
{
    const uint64_t gib = gpu_subset() ? 1 : 16;
    double ready[2] = {0, 0}, pinned[2] = {0, 0}, hits = 0;
    uint64_t n_batches = 0;
    char json[256];
    bool good;
    filler x;

    (void)d;
    (void)snprintf(json, sizeof json,
                   "{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"%" PRIu64 "GiB\"}}", gib);
    begin_service(json);
    good = time_pinning(&ready[0], &pinned[0]) && fill(gib, &n_batches);
    (void)daemon_stop(&served, SIGKILL);
    good = good && time_pinning(&ready[1], &pinned[1]);
    (void)daemon_stop(&served, SIGKILL);
    good = good && time_hits(&x, n_batches, &hits);
    for (uint64_t b = 0; b < n_batches && good; b++)
        good = load_blocks(&x, b * N);
    if (good)
        filler_close(&x);
    (void)printf("      %" PRIu64
                 " GiB: cold: ready after %.2f s, then %.0f ms a GiB; warm: ready after %.2f s, then %.0f ms a "
                 "GiB; 2 x %d hits at both ends %.2f s after a start; %" PRIu64 " blocks verified\n",
                 gib, ready[0], pinned[0] * 1e3 / (double)gib, ready[1], pinned[1] * 1e3 / (double)gib, (int)N, hits,
                 n_batches * N);
    if (good && !gpu_subset() && (hits > 2.0 || pinned[1] * 1e3 / (double)gib > 60))
        good = GPU_FAIL("hits within 2 s, and 60 ms a GiB, were promised");
    end_service(good);
    return good;
}

/* ---- 156, 158, 159, 160: hardening ---- */

enum { READY = 10, REFUSED = 11, CANNOT = 12 };

static bool bind_node(const char *dev, const char *name)
{
    char from[300], to[300];
    int fd;

    (void)snprintf(from, sizeof from, "/dev/%s", name);
    (void)snprintf(to, sizeof to, "%s/%s", dev, name);
    if (access(from, F_OK) != 0)
        return true;
    fd = open(to, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0)
        (void)close(fd);
    return fd >= 0 && mount(from, to, NULL, MS_BIND, NULL) == 0;
}

/* A /dev of these nodes and no others.  For root the driver's library would make them again. */
static bool dev_of(const char *const *names)
{
    char dev[] = "/tmp/kvs-dev-XXXXXX";

    if (prctl(PR_CAPBSET_DROP, CAP_MKNOD, 0, 0, 0) != 0 || mkdtemp(dev) == NULL ||
        mount("none", dev, "tmpfs", 0, "mode=755") != 0)
        return false;
    for (; *names != NULL; names++)
        if (!bind_node(dev, *names))
            return false;
    return mount(dev, "/dev", NULL, MS_BIND | MS_REC, NULL) == 0;
}

static bool hide_nothing(void)
{
    return true;
}

static bool hide_all_nodes(void)
{
    return dev_of((const char *const[]){"null", "zero", "full", "random", "urandom", NULL});
}

static bool hide_uvm(void)
{
    return dev_of((const char *const[]){"null", "zero", "full", "random", "urandom", "nvidiactl", "nvidia0", "nvidia1",
                                        "nvidia2", "nvidia3", NULL});
}

static bool hide_cards(void)
{
    return dev_of((const char *const[]){"null", "zero", "full", "random", "urandom", "nvidiactl", "nvidia-uvm",
                                        "nvidia-uvm-tools", NULL});
}

/* The node is there and may not be opened, as under a DeviceAllow= that lacks it. */
static bool forbid_uvm(void)
{
    return mount("/dev/nvidia-uvm", "/dev/nvidia-uvm", NULL, MS_BIND, NULL) == 0 &&
           mount(NULL, "/dev/nvidia-uvm", NULL, MS_BIND | MS_REMOUNT | MS_NODEV, NULL) == 0;
}

static bool replace_uvm(void)
{
    return mount("/dev/null", "/dev/nvidia-uvm", NULL, MS_BIND, NULL) == 0;
}

static bool forbid_new_code(void)
{
    return prctl(PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) == 0;
}

static bool read_only_proc(void)
{
    return mount("/proc", "/proc", NULL, MS_BIND | MS_REC, NULL) == 0 &&
           mount(NULL, "/proc", NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL) == 0;
}

static bool proc_of_processes(void)
{
    return mount("proc", "/proc", "proc", 0, "subset=pid") == 0;
}

static bool hide_driver_folder(void)
{
    return mount("none", "/proc/driver", "tmpfs", 0, NULL) == 0;
}

typedef struct hardening {
    const char *what, *says; /* of a daemon that does not start; NULL: anything */
    bool (*hide)(void);
    bool must_fail;
} hardening;

static const hardening HARDENINGS[] = {
    {"none, to compare", NULL, hide_nothing, false},
    {"156: no device nodes", "/dev/nvidiactl cannot be opened", hide_all_nodes, true},
    {"158: cards and control node, no uvm node", "/dev/nvidia-uvm cannot be opened", hide_uvm, true},
    {"158: the uvm node may not be opened", "/dev/nvidia-uvm cannot be opened", forbid_uvm, true},
    {"158: something else is in its place", "/dev/nvidia-uvm is another device", replace_uvm, true},
    {"158: control and uvm nodes, no card", "cannot be opened", hide_cards, true},
    {"159: no memory that is written and executed", "MemoryDenyWriteExecute", forbid_new_code, false},
    {"160: /proc is read-only", "/proc/self/comm cannot be written", read_only_proc, false},
    {"160: /proc has processes only", "is hidden", proc_of_processes, false},
    {"160: /proc/driver is empty", "is hidden", hide_driver_folder, false},
};

/* The last line of the log with `word`. */
static void show_line(const daemon_fixture *d, const char *word)
{
    char line[1024], last[1024] = "";
    FILE *f = fopen(d->log, "re");

    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strstr(line, word) != NULL)
            (void)snprintf(last, sizeof last, "%s", line);
    if (f != NULL)
        (void)fclose(f);
    (void)printf("        %s", last[0] != '\0' ? last : "it said nothing\n");
}

/* In a process of its own, whose view of the machine it changes. */
static int try_hardening(const hardening *h)
{
    char out[4096];
    daemon_fixture d;
    int code;

    daemon_init(&d); /* its folder, before anything is hidden */
    daemon_configure(&d, "{\"device\": {\"kind\": \"cuda\"}, \"pool\": {\"max_bytes\": \"64MiB\"}}");
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || !h->hide()) {
        (void)printf("        cannot be made here: %s\n", strerror(errno));
        daemon_fini(&d);
        return CANNOT;
    }
    daemon_spawn(&d, NULL);
    if (daemon_wait_notified(&d, "READY=1", 20000)) {
        code = daemon_stop(&d, SIGTERM) == 0 ? READY : 1;
    } else {
        code = daemon_wait(&d, 20000);
        show_line(&d, "start_failed");
        code = code > 0 && (h->says == NULL || daemon_log_count(&d, h->says) > 0) ? REFUSED : 2;
    }
    /* The file can be checked, device or not. */
    if (daemon_run(&d, (const char *[]){"--config", d.config, "--check-config", NULL}, out, sizeof out) != 0)
        code = 3;
    daemon_fini(&d);
    return code;
}

static bool harden(device *d)
{
    bool good = true;

    (void)d;
    for (size_t i = 0; i < sizeof HARDENINGS / sizeof *HARDENINGS; i++) {
        const hardening *h = &HARDENINGS[i];
        int status = 0, code;
        pid_t pid;

        (void)printf("      %s\n", h->what);
        (void)fflush(stdout);
        pid = fork();
        if (pid == 0) {
            code = try_hardening(h);
            (void)fflush(stdout);
            _exit(code);
        }
        (void)waitpid(pid, &status, 0);
        code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        (void)printf("        %s\n", code == READY     ? "it works"
                                     : code == REFUSED ? "it is refused with the reason"
                                     : code == CANNOT  ? "not tried"
                                     : code == 3       ? "--check-config fails"
                                                       : "it fails without the reason");
        if (code != CANNOT && code != REFUSED && (code != READY || h->must_fail))
            good = GPU_FAIL("%s: outcome %d", h->what, code);
    }
    return good;
}

static const gpu_test tests[] = {
    {"the GPU is lost: exit, and the next life has the host memory", lose_the_gpu},
    {"a warm restart of a large pool serves hits and pins again", restart_warm},
    {"cases 156, 158, 159, 160: hardening that hides the GPU is named", harden},
};

int main(int argc, char **argv)
{
    return gpu_run(tests, sizeof tests / sizeof *tests, argc, argv);
}
#else
static bool none(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    static const gpu_test tests[] = {{"the service on a GPU machine", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
