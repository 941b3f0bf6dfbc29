/* The cuda device's memory, copies and marks: random bytes there and back, whatever the memory is made of. */
#include "tests/gpu/gpu.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/device_cuda.h"
#include "proto/wire.h"
#include "tests/support/random.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

enum { LAYERS = 61, PAGE = 73728, BLOCK = LAYERS * PAGE, BLOCKS = 200 };
#define MiB (UINT64_C(1) << 20)
#define GiB (UINT64_C(1) << 30)

static const device_how BY_ENGINE = {DEVICE_BY_ENGINE, 0};

typedef struct pair {
    device *d;
    device_queue *load, *store;
    uint8_t *host; /* registered */
    uint64_t host_bytes;
} pair;

static void *map_host(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

static bool pair_open(pair *p, device *d, uint64_t host_bytes)
{
    kvs_err err = {.msg = ""};

    *p = (pair){.d = d, .host = map_host(host_bytes), .host_bytes = host_bytes};
    if (p->host == NULL)
        return GPU_FAIL("mmap of %" PRIu64 " bytes", host_bytes);
    if (d->ops->host_register(d, p->host, host_bytes, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    if (d->ops->queue_open(d, DEVICE_LOAD, &p->load, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_STORE, &p->store, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return true;
}

static void pair_close(pair *p)
{
    p->d->ops->queue_close(p->load);
    p->d->ops->queue_close(p->store);
    if (p->host != NULL) {
        p->d->ops->host_unregister(p->d, p->host, p->host_bytes);
        (void)munmap(p->host, p->host_bytes);
    }
}

static bool copy_and_wait(device_queue *q, const device_copy *c, size_t n)
{
    const device_ops *ops = q->dev->ops;
    kvs_err err = {.msg = ""};
    uint64_t mark = 0;

    if (ops->copy(q, c, n, BY_ENGINE, &mark, &err) != KVS_OK || ops->wait(q, mark, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return true;
}

static uint64_t size_of(const device_mem *m)
{
    uint64_t sum = 0, bytes = 0;

    for (uint32_t i = 0; i < m->dev->ops->mem_pieces(m); i++)
        sum += m->dev->ops->mem_base(m, i, &bytes) != NULL ? bytes : 0;
    return sum;
}

static uint8_t *base_of(const device_mem *m)
{
    uint64_t bytes;

    return m->dev->ops->mem_base(m, 0, &bytes);
}

static device_mem *create(device *d, uint64_t bytes)
{
    device_mem *m = NULL;
    kvs_err err = {.msg = ""};

    if (d->ops->mem_create(d, bytes, &m, &err) != KVS_OK)
        (void)GPU_FAIL("%s", err.msg);
    return m;
}

/* --- one region of any kind, at `base` -------------------------------------------------------------------------- */

/* n distinct numbers below `below`; the first two are the ends. */
static void choose_slots(uint32_t *slots, uint32_t n, uint32_t below, rnd *r)
{
    bool *taken = calloc(below, sizeof *taken);

    for (uint32_t i = 0; taken != NULL && i < n; i++) {
        uint32_t s = i == 0 ? 0 : i == 1 ? below - 1 : (uint32_t)rnd_below(r, below);

        while (taken[s])
            s = (s + 1) % below;
        taken[s] = true;
        slots[i] = s;
    }
    free(taken);
}

typedef struct planes {
    uint8_t *base;
    uint64_t plane_stride, slot_stride, page;
    uint32_t n_planes, n_slots;
    bool descending;
} planes;

/* Copies of every page of every slot; the host side is block after block. */
static size_t list_copies(device_copy *c, const planes *g, const uint32_t *slots, uint32_t n, uint8_t *host, bool load)
{
    size_t k = 0;

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < g->n_planes; j++) {
            uint32_t p = g->descending ? g->n_planes - 1 - j : j;
            uint8_t *dev = g->base + p * g->plane_stride + slots[i] * g->slot_stride;
            uint8_t *at = host + ((uint64_t)i * g->n_planes + p) * g->page;

            c[k++] = load ? (device_copy){dev, at, g->page} : (device_copy){at, dev, g->page};
        }
    return k;
}

/* Is every byte of the region that no page of `slots` covers still 0xA5?  Looks at the gaps around each page. */
static bool canaries_hold(pair *p, const planes *g, const uint32_t *slots, uint32_t n, uint64_t bytes)
{
    enum { LOOK = 256 };
    uint64_t gap = g->slot_stride - g->page;
    uint64_t look = gap < LOOK ? gap : LOOK;
    device_copy *c = calloc((size_t)n * g->n_planes, sizeof *c);
    uint8_t *at = p->host;
    size_t k = 0;
    bool good = c != NULL;

    for (uint32_t i = 0; good && look > 0 && i < n; i++)
        for (uint32_t j = 0; j < g->n_planes; j++) {
            uint64_t from = j * g->plane_stride + slots[i] * g->slot_stride + g->page;

            if (from + look <= bytes) {
                c[k] = (device_copy){at + k * LOOK, g->base + from, look};
                k++;
            }
        }
    if (good && k > 0 && !copy_and_wait(p->store, c, k))
        good = false;
    for (size_t i = 0; good && i < k; i++)
        for (uint64_t b = 0; good && b < look; b++)
            if (at[i * LOOK + b] != 0xA5)
                good = GPU_FAIL("canary behind page %zu is %02x", i, at[i * LOOK + b]);
    free(c);
    return good;
}

static bool round_trip(pair *p, const planes *g, uint32_t n, uint64_t bytes, uint64_t seed)
{
    uint64_t total = (uint64_t)n * g->n_planes * g->page;
    device_copy *c = calloc((size_t)n * g->n_planes, sizeof *c);
    uint32_t *slots = calloc(n, sizeof *slots);
    uint8_t *want = malloc(total);
    rnd r = {seed};
    bool good = c != NULL && slots != NULL && want != NULL && total <= p->host_bytes;

    if (!good)
        (void)GPU_FAIL("no memory for %" PRIu64 " bytes", total);
    else {
        choose_slots(slots, n, g->n_slots, &r);
        rnd_bytes(&r, want, total);
        memcpy(p->host, want, total);
        good = copy_and_wait(p->load, c, list_copies(c, g, slots, n, p->host, true));
        memset(p->host, 0x5A, total);
        good = good && copy_and_wait(p->store, c, list_copies(c, g, slots, n, p->host, false));
        if (good && memcmp(p->host, want, total) != 0)
            good = GPU_FAIL("bytes differ");
        good = good && canaries_hold(p, g, slots, n, bytes);
    }
    free(c);
    free(slots);
    free(want);
    return good;
}

static bool fill_canaries(const planes *g, uint64_t bytes)
{
    return cudaMemset(g->base, 0xA5, bytes) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}

/* Cross-layer without and with gaps, one tensor a layer with gaps, layers descending; 1 to 200 blocks. */
static bool all_layouts(pair *p, uint8_t *base, uint64_t bytes, uint64_t seed)
{
    const uint32_t n_blocks[] = {1, 2, 61, BLOCKS};

    for (size_t k = gpu_subset() ? 1 : 0; k < (gpu_subset() ? 2 : 4); k++) {
        uint64_t gap = k % 2 == 0 ? 0 : 4096 + 16;
        planes cross = {base, 0, BLOCK + gap, BLOCK, 1, (uint32_t)(bytes / (BLOCK + gap)), false};
        uint64_t pitch = PAGE + 272, plane = bytes / LAYERS / 16 * 16;
        planes layers = {base, plane, pitch, PAGE, LAYERS, (uint32_t)(plane / pitch), k % 2 == 1};
        uint32_t n = n_blocks[k] < cross.n_slots ? n_blocks[k] : cross.n_slots;

        if (!fill_canaries(&cross, bytes) || !round_trip(p, &cross, n, bytes, seed + k))
            return GPU_FAIL("cross-layer, %u blocks", n);
        n = n_blocks[k] < layers.n_slots ? n_blocks[k] : layers.n_slots;
        if (!fill_canaries(&layers, bytes) || !round_trip(p, &layers, n, bytes, seed + 100 + k))
            return GPU_FAIL("one tensor a layer, %u blocks", n);
    }
    return true;
}

/* --- tests ------------------------------------------------------------------------------------------------------ */

static bool says_what_it_is(device *d)
{
    device_cuda_info i;
    kvs_err err = {.msg = ""};
    uint32_t ordinal = 99, n = 0;
    uint8_t other[16] = {1, 2, 3};

    if (device_cuda_get_info(d, &i, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    (void)printf("      %s, sm_%u, %u SMs, driver %u, %.1f of %.1f GiB free, NUMA node %d\n", i.name, i.capability,
                 i.n_processors, i.driver_version, (double)i.free_bytes / (double)GiB,
                 (double)i.total_bytes / (double)GiB, i.numa_node);
    if (device_cuda_find(i.uuid, &ordinal, &err) != KVS_OK || ordinal != 0)
        return GPU_FAIL("find: ordinal %u, %s", ordinal, err.msg);
    if (device_cuda_find(other, &ordinal, &err) != KVS_E_NOT_FOUND)
        return GPU_FAIL("a made-up UUID was found");
    if (device_cuda_count(&n, &err) != KVS_OK || n < 1)
        return GPU_FAIL("count: %u, %s", n, err.msg);
    return device_cuda_open(&d, n, &err) == KVS_E_UNSUPPORTED || GPU_FAIL("ordinal %u was opened", n);
}

static bool daemon_region_is_zero_and_round_trips(device *d)
{
    uint64_t bytes = gpu_subset() ? 3 * 64 * MiB : 5 * GiB + 3 * MiB, piece = 0;
    device_mem *m = create(d, bytes);
    pair p;
    bool good = pair_open(&p, d, gpu_subset() ? 128 * MiB : GiB) && m != NULL;
    uint64_t at[] = {0, bytes / 2 / 16 * 16, bytes - 4096};

    if (good && size_of(m) < bytes)
        good = GPU_FAIL("%" PRIu64 " bytes of %" PRIu64, size_of(m), bytes);
    for (uint32_t i = 0; good && i < d->ops->mem_pieces(m); i++)
        if (d->ops->mem_base(m, i, &piece) != base_of(m) + i * GiB || piece > GiB || d->ops->mem_fd(m, i) < 0)
            good = GPU_FAIL("piece %u: %" PRIu64 " bytes, descriptor %d", i, piece, d->ops->mem_fd(m, i));
    for (int i = 0; good && i < 3; i++) {
        device_copy c = {p.host, base_of(m) + at[i], 4096};

        memset(p.host, 0xFF, 4096);
        good = copy_and_wait(p.store, &c, 1);
        for (int b = 0; good && b < 4096; b++)
            good = p.host[b] == 0 || GPU_FAIL("byte %d is %02x", b, p.host[b]);
    }
    good = good && all_layouts(&p, base_of(m), bytes, 11);
    d->ops->mem_close(m);
    pair_close(&p);
    return good;
}

static device_mem *import_again(device *d, device_mem *m, kvs_err *err)
{
    device_cuda_info i;
    int fds[64];
    device_import in = {WIRE_MEMORY_CUDA_VMM, fds, d->ops->mem_pieces(m), 64 * GiB, NULL, 0, i.uuid};
    device_mem *ret = NULL;

    for (uint32_t k = 0; k < in.n_fds; k++)
        fds[k] = d->ops->mem_fd(m, k);
    if (device_cuda_get_info(d, &i, err) != KVS_OK || d->ops->mem_import(d, &in, &ret, err) != KVS_OK)
        return NULL;
    return ret;
}

static bool vmm_import_outlives_the_creator(device *d)
{
    uint64_t bytes = gpu_subset() ? 96 * MiB : 2 * GiB + 7 * 2 * MiB;
    device_mem *m = create(d, bytes), *again;
    kvs_err err = {.msg = ""};
    pair p;
    bool good = pair_open(&p, d, gpu_subset() ? 128 * MiB : GiB) && m != NULL;
    device_copy in, out;
    rnd r = {7};

    if (!good)
        return false;
    again = import_again(d, m, &err);
    if (again == NULL)
        return GPU_FAIL("%s", err.msg);
    if (size_of(again) != size_of(m) || base_of(again) == base_of(m))
        good = GPU_FAIL("%" PRIu64 " bytes were measured, %" PRIu64 " are there", size_of(again), size_of(m));
    rnd_bytes(&r, p.host, 2 * MiB);
    in = (device_copy){base_of(m) + bytes - 2 * MiB, p.host, 2 * MiB};
    out = (device_copy){p.host + 4 * MiB, base_of(again) + bytes - 2 * MiB, 2 * MiB};
    good = good && copy_and_wait(p.load, &in, 1);
    d->ops->mem_close(m);
    good = good && copy_and_wait(p.store, &out, 1);
    if (good && memcmp(p.host, p.host + 4 * MiB, 2 * MiB) != 0)
        good = GPU_FAIL("other bytes than the creator wrote");
    good = good && all_layouts(&p, base_of(again), bytes, 23);
    d->ops->mem_close(again);
    pair_close(&p);
    return good;
}

static bool refuses(device *d, const device_import *in, kvs_status want, const char *what)
{
    device_mem *m = NULL;
    kvs_err err = {.msg = ""};
    kvs_status s = d->ops->mem_import(d, in, &m, &err);

    (void)printf("      %s: %s: %s\n", what, kvs_status_name(s), err.msg);
    return (s == want && m == NULL) ||
           GPU_FAIL("%s: %s, %s was expected", what, kvs_status_name(s), kvs_status_name(want));
}

static bool imports_that_are_wrong_are_refused(device *d)
{
    static const uint8_t no_handle[1][64] = {{1, 2, 3}};
    const uint8_t other_uuid[16] = {0xEE};
    int memfd = memfd_create("x", MFD_CLOEXEC), null = open("/dev/null", O_RDWR | O_CLOEXEC), closed = 1000;
    device_mem *m = create(d, 32 * MiB);
    int fd = m != NULL ? d->ops->mem_fd(m, 0) : -1;
    device_import cases[] = {
        {WIRE_MEMORY_CUDA_VMM, &memfd, 1, GiB, NULL, 0, NULL},
        {WIRE_MEMORY_CUDA_VMM, &null, 1, GiB, NULL, 0, NULL},
        {WIRE_MEMORY_CUDA_VMM, &closed, 1, GiB, NULL, 0, NULL},
        {WIRE_MEMORY_CUDA_VMM, &fd, 1, 30 * MiB, NULL, 0, NULL},
        {WIRE_MEMORY_CUDA_VMM, &fd, 1, GiB, NULL, 0, other_uuid},
        {WIRE_MEMORY_CUDA_VMM, &fd, 0, GiB, NULL, 0, NULL},
        {WIRE_MEMORY_MEMFD, &memfd, 1, GiB, NULL, 0, NULL},
        {WIRE_MEMORY_CUDA_IPC, NULL, 0, GiB, no_handle, 1, NULL},
    };
    static const kvs_status want[] = {KVS_E_INVALID, KVS_E_INVALID, KVS_E_INVALID,     KVS_E_LIMIT,
                                      KVS_E_INVALID, KVS_E_LIMIT,   KVS_E_UNSUPPORTED, KVS_E_INVALID};
    static const char *const what[] = {
        "a memfd",       "/dev/null",         "a closed descriptor", "2 MiB above the limit", "another GPU's UUID",
        "no descriptor", "memory kind memfd", "a made-up handle"};
    bool good = m != NULL && ftruncate(memfd, 2 * MiB) == 0;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        good = refuses(d, &cases[i], want[i], what[i]) && good;
    d->ops->mem_close(m);
    (void)close(memfd);
    (void)close(null);
    m = create(d, 2 * MiB); /* still usable */
    good = good && m != NULL;
    d->ops->mem_close(m);
    return good;
}

/* The daemon is at its limit of open files: that is no reason to give up on the GPU. */
static bool without_descriptors_nothing_is_lost(device *d)
{
    struct rlimit had, tight;
    device_mem *m = create(d, 2 * MiB), *none = NULL;
    int fds[1], first;
    device_import in = {WIRE_MEMORY_CUDA_VMM, fds, 1, GiB, NULL, 0, NULL};
    kvs_err err = {.msg = ""};
    kvs_status made, imported;
    bool good = m != NULL && getrlimit(RLIMIT_NOFILE, &had) == 0;

    if (!good)
        return false;
    fds[0] = d->ops->mem_fd(m, 0);
    first = dup(fds[0]); /* all below it are taken */
    (void)close(first);
    tight = (struct rlimit){(rlim_t)first, had.rlim_max};
    good = setrlimit(RLIMIT_NOFILE, &tight) == 0;
    made = d->ops->mem_create(d, 2 * MiB, &none, &err);
    (void)printf("      made: %s: %s\n", kvs_status_name(made), err.msg);
    imported = d->ops->mem_import(d, &in, &none, &err);
    (void)printf("      imported: %s: %s\n", kvs_status_name(imported), err.msg);
    (void)setrlimit(RLIMIT_NOFILE, &had);
    if (made == KVS_OK || made == KVS_E_DEVICE_LOST || imported != KVS_E_SYS)
        good = GPU_FAIL("%s, %s", kvs_status_name(made), kvs_status_name(imported));
    d->ops->mem_close(m);
    m = create(d, 2 * MiB);
    good = good && m != NULL;
    d->ops->mem_close(m);
    return good;
}

/* What a wait has found not ready is no error of the launch that follows it. */
static bool a_wait_leaves_no_error_behind(device *d)
{
    device_mem *m = create(d, 64 * MiB);
    pair p;
    device_copy c;
    cudaError_t e;
    bool good = pair_open(&p, d, 64 * MiB) && m != NULL;

    if (!good)
        return false;
    c = (device_copy){base_of(m), p.host, 64 * MiB}; /* a millisecond or more: the first look comes too early */
    good = copy_and_wait(p.load, &c, 1);
    e = cudaPeekAtLastError();
    if (e != cudaSuccess)
        good = GPU_FAIL("%s", cudaGetErrorName(e));
    d->ops->mem_close(m);
    pair_close(&p);
    return good;
}

/* --- an engine process ------------------------------------------------------------------------------------------ */

enum { OWNED = 192 << 20, PATTERN = 0x3C };

typedef struct owned {
    cudaIpcMemHandle_t handle;
    int failed;
} owned;

/* The child: memory of its own, a handle to the parent; then does what it is told. */
static int own_memory(int fd)
{
    owned o = {.failed = 0};
    uint8_t *p = NULL;
    char word;

    o.failed = cudaMalloc((void **)&p, OWNED) != cudaSuccess || cudaMemset(p, PATTERN, OWNED) != cudaSuccess ||
               cudaDeviceSynchronize() != cudaSuccess || cudaIpcGetMemHandle(&o.handle, p) != cudaSuccess;
    if (write(fd, &o, sizeof o) != sizeof o)
        return 1;
    while (read(fd, &word, 1) == 1) { /* 'c': is every byte of the first MiB 0x77 now? */
        static uint8_t seen[1 << 20];
        char good = 1;

        if (cudaMemcpy(seen, p, sizeof seen, cudaMemcpyDeviceToHost) != cudaSuccess)
            good = 0;
        for (size_t i = 0; i < sizeof seen; i++)
            good = seen[i] == 0x77 ? good : 0;
        if (write(fd, &good, 1) != 1)
            return 1;
    }
    return 0;
}

static pid_t start_owner(int *ret_fd, owned *ret)
{
    int fds[2];
    char number[16];
    pid_t child;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0)
        return -1;
    (void)fcntl(fds[0], F_SETFD, FD_CLOEXEC);
    (void)snprintf(number, sizeof number, "%d", fds[1]);
    child = fork();
    if (child == 0) {
        (void)execl("/proc/self/exe", "owner", "--own-memory", number, (char *)NULL);
        _exit(127);
    }
    (void)close(fds[1]);
    *ret_fd = fds[0];
    if (child > 0 && read(fds[0], ret, sizeof *ret) != sizeof *ret)
        ret->failed = 1;
    return child;
}

static void end_owner(pid_t child, int fd, int signal_number)
{
    int status;

    if (signal_number != 0)
        (void)kill(child, signal_number);
    (void)close(fd);
    (void)waitpid(child, &status, 0);
}

static bool ipc_round_trip(device *d, pair *p, const owned *o, int fd)
{
    uint8_t handles[2][64];
    device_import in = {WIRE_MEMORY_CUDA_IPC, NULL, 0, GiB, (const uint8_t(*)[64])handles, 2, NULL};
    device_mem *m = NULL, *second = NULL;
    uint64_t bytes = 0, bytes2 = 0;
    kvs_err err = {.msg = ""};
    device_copy c;
    char word = 'c';
    bool good;

    memcpy(handles[0], &o->handle, 64);
    memcpy(handles[1], &o->handle, 64);
    if (d->ops->mem_import(d, &in, &m, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    in.n_ipc = 1;
    if (d->ops->mem_import(d, &in, &second, &err) != KVS_OK)
        return GPU_FAIL("a second time: %s", err.msg);
    good = d->ops->mem_base(m, 0, &bytes) == d->ops->mem_base(m, 1, &bytes2) && base_of(second) == base_of(m);
    if (!good || bytes != OWNED || bytes2 != OWNED)
        good = GPU_FAIL("%" PRIu64 " and %" PRIu64 " bytes, %d were allocated", bytes, bytes2, (int)OWNED);
    d->ops->mem_close(m); /* the other import still maps it */
    c = (device_copy){p->host, base_of(second) + OWNED - MiB, MiB};
    good = good && copy_and_wait(p->store, &c, 1);
    for (uint64_t i = 0; good && i < MiB; i++)
        good = p->host[i] == PATTERN || GPU_FAIL("byte %" PRIu64 " is %02x", i, p->host[i]);
    good = good && all_layouts(p, base_of(second), OWNED, 37);
    memset(p->host, 0x77, MiB);
    c = (device_copy){base_of(second), p->host, MiB};
    good = good && copy_and_wait(p->load, &c, 1);
    if (good && (write(fd, &word, 1) != 1 || read(fd, &word, 1) != 1 || word != 1))
        good = GPU_FAIL("the owner does not see what was written");
    d->ops->mem_close(second);
    return good;
}

static bool engine_memory_by_ipc_round_trips(device *d)
{
    owned o;
    int fd = -1;
    pair p;
    bool good = pair_open(&p, d, gpu_subset() ? 128 * MiB : GiB);
    pid_t child = start_owner(&fd, &o);

    if (child <= 0 || o.failed != 0)
        good = GPU_FAIL("the owner could not start");
    good = good && ipc_round_trip(d, &p, &o, fd);
    if (child > 0)
        end_owner(child, fd, 0);
    pair_close(&p);
    return good;
}

static bool a_killed_engine_leaves_the_device_well(device *d)
{
    device_cuda_info before, after;
    kvs_err err = {.msg = ""};
    pair p;
    bool good = pair_open(&p, d, 16 * MiB) && device_cuda_get_info(d, &before, &err) == KVS_OK;

    for (int i = 0; good && i < (gpu_subset() ? 1 : 3); i++) {
        owned o;
        int fd = -1;
        pid_t child = start_owner(&fd, &o);
        device_import in = {WIRE_MEMORY_CUDA_IPC, NULL, 0, GiB, (const uint8_t(*)[64]) & o.handle, 1, NULL};
        device_mem *m = NULL;
        device_copy c;

        if (child <= 0 || o.failed != 0)
            return GPU_FAIL("the owner could not start");
        if (d->ops->mem_import(d, &in, &m, &err) != KVS_OK)
            good = GPU_FAIL("%s", err.msg);
        end_owner(child, fd, SIGKILL);
        c = (device_copy){p.host, good ? base_of(m) : NULL, MiB};
        good = good && copy_and_wait(p.store, &c, 1) && (p.host[0] == PATTERN || GPU_FAIL("%02x", p.host[0]));
        d->ops->mem_close(m);
    }
    if (good && (device_cuda_get_info(d, &after, &err) != KVS_OK || after.free_bytes + 64 * MiB < before.free_bytes))
        good = GPU_FAIL("%" PRIu64 " bytes free before, %" PRIu64 " after", before.free_bytes, after.free_bytes);
    pair_close(&p);
    return good;
}

/* --- limits and errors ------------------------------------------------------------------------------------------ */

static bool memory_comes_back(device *d)
{
    device_cuda_info before, after;
    kvs_err err = {.msg = ""};
    device_mem *m = NULL;
    kvs_status s;

    if (device_cuda_get_info(d, &before, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    for (int i = 0; i < 10; i++) {
        m = create(d, gpu_subset() ? 64 * MiB : 3 * GiB / 2);
        if (m == NULL)
            return false;
        d->ops->mem_close(m);
    }
    s = gpu_subset() ? KVS_E_NO_SPACE : d->ops->mem_create(d, before.total_bytes + GiB, &m, &err);
    if (s != KVS_E_NO_SPACE)
        return GPU_FAIL("more than the GPU has: %s %s", kvs_status_name(s), err.msg);
    (void)printf("      %s\n", err.msg);
    if (d->ops->mem_create(d, 0, &m, &err) != KVS_E_INVALID)
        return GPU_FAIL("0 bytes were created");
    if (device_cuda_get_info(d, &after, &err) != KVS_OK || after.free_bytes + 32 * MiB < before.free_bytes)
        return GPU_FAIL("%" PRIu64 " bytes free before, %" PRIu64 " after", before.free_bytes, after.free_bytes);
    return true;
}

static bool a_bad_copy_is_an_error_and_no_more(device *d)
{
    device_mem *m = create(d, 8 * MiB);
    uint8_t *host = map_host(8 * MiB);
    kvs_err err = {.msg = ""};
    uint64_t mark = 0;
    pair p;
    bool good = pair_open(&p, d, 4 * MiB) && m != NULL && host != NULL;
    device_copy across[2], fine;
    kvs_status s;

    /* Two registrations side by side: one copy over the seam is what the driver refuses. */
    good = good && d->ops->host_register(d, host, 4 * MiB, &err) == KVS_OK &&
           d->ops->host_register(d, host + 4 * MiB, 4 * MiB, &err) == KVS_OK;
    if (!good)
        return GPU_FAIL("%s", err.msg);
    across[0] = (device_copy){base_of(m), host, MiB};
    across[1] = (device_copy){base_of(m), host + 3 * MiB, 2 * MiB};
    s = d->ops->copy(p.load, across, 2, BY_ENGINE, &mark, &err);
    (void)printf("      across two registrations: %s: %s\n", kvs_status_name(s), err.msg);
    if (s != KVS_E_DEVICE)
        good = GPU_FAIL("%s", kvs_status_name(s));
    s = d->ops->host_register(d, host, 4 * MiB, &err);
    (void)printf("      registered twice: %s: %s\n", kvs_status_name(s), err.msg);
    if (s != KVS_E_DEVICE)
        good = GPU_FAIL("%s", kvs_status_name(s));
    memset(host, 0x42, MiB);
    fine = (device_copy){base_of(m), host, MiB};
    good = good && copy_and_wait(p.load, &fine, 1);
    fine = (device_copy){p.host, base_of(m), MiB};
    good = good && copy_and_wait(p.store, &fine, 1) && (memcmp(host, p.host, MiB) == 0 || GPU_FAIL("bytes differ"));
    d->ops->host_unregister(d, host, 4 * MiB);
    d->ops->host_unregister(d, host + 4 * MiB, 4 * MiB);
    (void)munmap(host, 8 * MiB);
    d->ops->mem_close(m);
    pair_close(&p);
    return good;
}

static bool marks_are_numbers_in_order(device *d)
{
    enum { N = 300 };
    device_mem *m = create(d, 4 * MiB);
    uint64_t marks[N], extra = 0;
    kvs_err err = {.msg = ""};
    pair p;
    bool good = pair_open(&p, d, 4 * MiB) && m != NULL;

    for (uint32_t i = 0; good && i < N; i++) {
        device_copy c[3] = {{base_of(m) + i * 4096, p.host + i * 4096, 0}, /* nothing */
                            {base_of(m) + i * 4096, p.host + i * 4096, 2048},
                            {base_of(m) + i * 4096 + 2048, p.host + i * 4096 + 2048, 2048}};

        memset(p.host + i * 4096, (int)i, 4096);
        if (d->ops->copy(p.load, c, i % 5 == 0 ? 0 : 3, BY_ENGINE, &marks[i], &err) != KVS_OK)
            good = GPU_FAIL("%s", err.msg);
        if (i > 0 && marks[i] <= marks[i - 1])
            good = GPU_FAIL("mark %" PRIu64 " after %" PRIu64, marks[i], marks[i - 1]);
    }
    if (good && (d->ops->wait(p.load, marks[N - 1], &err) != KVS_OK || d->ops->wait(p.load, marks[3], &err) != KVS_OK))
        good = GPU_FAIL("%s", err.msg);
    if (good && d->ops->wait(p.load, marks[N - 1] + 1, &err) != KVS_E_INVALID)
        good = GPU_FAIL("a mark was reached that nobody gave out");
    if (good && (d->ops->copy(p.store, NULL, 0, BY_ENGINE, &extra, &err) != KVS_OK ||
                 d->ops->wait(p.store, extra, &err) != KVS_OK))
        good = GPU_FAIL("no copies at all: %s", err.msg);
    for (uint32_t i = 0; good && i < N; i++) {
        device_copy c = {p.host, base_of(m) + i * 4096, 4096};

        good = copy_and_wait(p.store, &c, 1) &&
               (i % 5 == 0 || (p.host[0] == (uint8_t)i && p.host[4095] == (uint8_t)i) || GPU_FAIL("mark %u", i));
    }
    d->ops->mem_close(m);
    pair_close(&p);
    return good;
}

typedef struct mover {
    device_queue *q;
    uint8_t *dev, *host;
    bool is_load, good;
} mover;

static void *move_all(void *arg)
{
    mover *m = arg;

    m->good = true;
    for (uint32_t round = 0; m->good && round < 8; round++) {
        device_copy c[16];

        for (uint32_t i = 0; i < 16; i++)
            c[i] = m->is_load ? (device_copy){m->dev + i * MiB, m->host + i * MiB, MiB}
                              : (device_copy){m->host + i * MiB, m->dev + i * MiB, MiB};
        m->good = copy_and_wait(m->q, c, 16);
    }
    return NULL;
}

static bool both_directions_run_in_threads_of_their_own(device *d)
{
    device_mem *m = create(d, 32 * MiB);
    pair p;
    bool good = pair_open(&p, d, 64 * MiB) && m != NULL;
    rnd r = {5};
    pthread_t thread;
    mover load, store;

    if (!good)
        return false;
    rnd_bytes(&r, p.host, 32 * MiB);
    load = (mover){p.load, base_of(m), p.host, true, false};
    store = (mover){p.store, base_of(m) + 16 * MiB, p.host + 48 * MiB, false, false};
    good = pthread_create(&thread, NULL, move_all, &store) == 0;
    (void)move_all(&load);
    (void)pthread_join(thread, NULL);
    good = good && load.good && store.good;
    store.dev = base_of(m);
    (void)move_all(&store);
    good = good && store.good && (memcmp(p.host, p.host + 48 * MiB, 16 * MiB) == 0 || GPU_FAIL("bytes differ"));
    d->ops->mem_close(m);
    pair_close(&p);
    return good;
}

static const gpu_test tests[] = {
    {"says_what_it_is", says_what_it_is},
    {"daemon_region_is_zero_and_round_trips", daemon_region_is_zero_and_round_trips},
    {"vmm_import_outlives_the_creator", vmm_import_outlives_the_creator},
    {"imports_that_are_wrong_are_refused", imports_that_are_wrong_are_refused},
    {"without_descriptors_nothing_is_lost", without_descriptors_nothing_is_lost},
    {"a_wait_leaves_no_error_behind", a_wait_leaves_no_error_behind},
    {"engine_memory_by_ipc_round_trips", engine_memory_by_ipc_round_trips},
    {"a_killed_engine_leaves_the_device_well", a_killed_engine_leaves_the_device_well},
    {"memory_comes_back", memory_comes_back},
    {"a_bad_copy_is_an_error_and_no_more", a_bad_copy_is_an_error_and_no_more},
    {"marks_are_numbers_in_order", marks_are_numbers_in_order},
    {"both_directions_run_in_threads_of_their_own", both_directions_run_in_threads_of_their_own},
};

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--own-memory") == 0)
        return own_memory(atoi(argv[2]));
    return gpu_run(tests, sizeof tests / sizeof tests[0], argc, argv);
}
#else
static bool needs_cuda(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    const gpu_test tests[] = {{"needs_cuda", needs_cuda}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
