/* Case 079: daemon and client see other GPUs, or the same ones under other numbers (CUDA_VISIBLE_DEVICES).  What is meant
 * is found by UUID, and what the daemon does not have is refused with both UUIDs.
 *
 * "-client KIND SOCKET" makes this program a client; CUDA reads the variable once, so each view is a process of its own.
 * With one GPU the tests of two are left out, which is said. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "kernels/cuda_error.h"
#include "proto/ctl/pattern.h"
#include "tests/gpu/gpu_engine.h"

enum { BLOCKS = 6, ID = 7900 };

static bool uuid_of(int ordinal, uint8_t ret[16])
{
    struct cudaDeviceProp p;

    if (!cuda_ok(cudaGetDeviceProperties(&p, ordinal), "cudaGetDeviceProperties"))
        return false;
    memcpy(ret, p.uuid.bytes, 16);
    return true;
}

static uint32_t n_gpus(void)
{
    uint32_t n = 0;

    return device_cuda_count(&n, NULL) == KVS_OK ? n : 0;
}

/* ---- the client: its GPU 0 is the one that it was left with ---- */

static bool same_blocks(const uint8_t *base, const kvs_slot *slots, uint64_t bytes, uint8_t *host)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint8_t key[KVS_KEY_BYTES];

        pattern_key(ID + i, key);
        if (!from_device(host, base + slots[i].slot * bytes, bytes))
            return false;
        if (pattern_verify(key, host, bytes) != bytes)
            return GPU_FAIL("block %u is not what was stored", i);
    }
    return true;
}

/* Slots of r, whose memory begins at base. */
static bool there_and_back(engine *e, kvs_region *r, const kvs_slot *slots, uint8_t *base)
{
    uint8_t *host = malloc(e->slot_bytes);
    kvs_err err = {.msg = ""};
    bool good = host != NULL;

    for (uint32_t i = 0; i < BLOCKS && good; i++) {
        uint8_t key[KVS_KEY_BYTES];

        pattern_key(ID + i, key);
        pattern_fill(key, host, e->slot_bytes);
        good = to_device(base + slots[i].slot * e->slot_bytes, host, e->slot_bytes);
    }
    if (good && engine_store(e, r, ID, slots, BLOCKS, NULL, &err) != KVS_OK)
        good = GPU_FAIL("store: %s", err.msg);
    good = good && set_device(base, 0x66, (BLOCKS + 1) * e->slot_bytes);
    if (good && engine_load(e, r, ID, slots, BLOCKS, &err) != KVS_OK)
        good = GPU_FAIL("load: %s", err.msg);
    good = good && same_blocks(base, slots, e->slot_bytes, host);
    free(host);
    return good;
}

static kvs_status import(engine *e, uint32_t number, void **ret_at, kvs_region **ret, kvs_err *err)
{
    kvs_plane_map map = {.stride = e->slot_bytes};
    kvs_ipc ipc;
    kvs_import in = {.device = number,
                     .n_slots = BLOCKS + 1,
                     .memory = KVS_MEMORY_CUDA_IPC,
                     .n_maps = 1,
                     .maps = &map,
                     .n_ipc = 1,
                     .ipc = &ipc};

    if (!cuda_ok(cudaMalloc(ret_at, (BLOCKS + 1) * e->slot_bytes), "cudaMalloc") || !own_ipc_handle(*ret_at, &ipc))
        return kvs_fail(err, KVS_E_SYS, "no memory to import");
    return kvs_region_import(e->ns, &in, ret, 0, err);
}

/* The memory that it allocates is taken for what it is, by number and without one; so is a region that it asks for. */
static bool served(engine *e, const uint8_t uuid[16])
{
    struct cudaPointerAttributes about;
    kvs_slot slots[BLOCKS];
    kvs_err err = {.msg = ""};
    kvs_region *r[3];
    uint32_t number = 0;
    uint8_t *base = NULL;
    uint64_t bytes;
    void *at[2], *own;

    for (uint32_t i = 0; i < BLOCKS; i++)
        slots[i] = (kvs_slot){.slot = i + 1}; /* of what is imported */
    if (kvs_device_find(e->client, uuid, &number, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    (void)printf("      the client's GPU 0 is the daemon's %u\n", number);
    if (import(e, number, &at[0], &r[0], &err) != KVS_OK || import(e, KVS_DEVICE_ANY, &at[1], &r[1], &err) != KVS_OK ||
        kvs_region_create(e->ns, number, BLOCKS + 1, &r[2], 0, &err) != KVS_OK ||
        kvs_region_map(r[2], &own, &bytes, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    if (!cuda_ok(cudaPointerGetAttributes(&about, own), "cudaPointerGetAttributes"))
        return false;
    if (about.device != 0)
        return GPU_FAIL("the region is on GPU %d of the client, which has 0 only", about.device);
    base = own;
    for (uint32_t i = 0; i < 2; i++)
        if (!there_and_back(e, r[i], slots, at[i]))
            return GPU_FAIL("import %u", i);
    if (kvs_slot_take(r[2], BLOCKS, slots, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return there_and_back(e, r[2], slots, base);
}

/* The daemon does not have this client's GPU: nothing is taken for another one. */
static bool turned_away(engine *e, const uint8_t uuid[16])
{
    char own[KVS_UUID_TEXT_BYTES], its[KVS_UUID_TEXT_BYTES];
    kvs_err err = {.msg = ""};
    kvs_server server;
    kvs_region *r;
    uint32_t number;
    void *at;

    kvs_server_get(e->client, &server);
    kvs_cuda_uuid_text(uuid, own);
    kvs_cuda_uuid_text(server.device_uuid[0], its);
    if (kvs_device_find(e->client, uuid, &number, &err) != KVS_E_NOT_FOUND)
        return GPU_FAIL("the daemon has a GPU that it cannot see");
    for (int i = 0; i < 2; i++) {
        kvs_status s = import(e, i == 0 ? 0 : KVS_DEVICE_ANY, &at, &r, &err);

        if (s != KVS_E_INVALID || strstr(err.msg, own) == NULL || strstr(err.msg, its) == NULL)
            return GPU_FAIL("%s: \"%s\" does not name %s and %s", kvs_status_name(s), err.msg, own, its);
    }
    (void)printf("      refused: %s\n", err.msg);
    return true;
}

/* The daemon's region on this client's last GPU, the only one that it uses: a context on another one, of which each takes
 * hundreds of MiB, would be the library's. */
static bool uses_one(engine *e)
{
    PFN_cuDevicePrimaryCtxGetState_v7000 state;
    enum cudaDriverEntryPointQueryResult q;
    int mine = (int)n_gpus() - 1;
    kvs_err err = {.msg = ""};
    kvs_slot slots[BLOCKS];
    kvs_region *r;
    uint8_t uuid[16];
    uint32_t number;
    uint64_t bytes;
    void *f, *base;

    if (!cuda_ok(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &f, 7000, cudaEnableDefault, &q),
                 "driver") ||
        f == NULL || !uuid_of(mine, uuid) || !cuda_ok(cudaSetDevice(mine), "cudaSetDevice"))
        return false;
    memcpy(&state, &f, sizeof state);
    if (kvs_device_find(e->client, uuid, &number, &err) != KVS_OK ||
        kvs_region_create(e->ns, number, BLOCKS + 1, &r, 0, &err) != KVS_OK ||
        kvs_region_map(r, &base, &bytes, &err) != KVS_OK || kvs_slot_take(r, BLOCKS, slots, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    if (!there_and_back(e, r, slots, base))
        return false;
    for (int i = 0; i <= mine; i++) {
        unsigned flags;
        int active = -1;

        if (state(i, &flags, &active) != CUDA_SUCCESS || active != (i == mine))
            return GPU_FAIL("GPU %d: the context's state is %d", i, active);
    }
    return true;
}

static int client(const char *kind, const char *socket)
{
    uint8_t uuid[16];
    engine e;
    bool good;

    if (strcmp(kind, "alone") == 0) {
        good = engine_open(&e, socket, FLAT) && uses_one(&e);
        (void)fflush(stdout);
        kvs_close(e.client);
        return good ? 0 : 1;
    }
    if (n_gpus() != 1 || !uuid_of(0, uuid) || !engine_open(&e, socket, FLAT))
        return 1;
    good = strcmp(kind, "served") == 0 ? served(&e, uuid) : turned_away(&e, uuid);
    (void)fflush(stdout);
    kvs_close(e.client);
    return good ? 0 : 1;
}

/* ---- the tests ---- */

static bool show_only(int ordinal)
{
    char text[KVS_UUID_TEXT_BYTES];
    uint8_t uuid[16];

    if (!uuid_of(ordinal, uuid))
        return false;
    kvs_cuda_uuid_text(uuid, text);
    return setenv("CUDA_VISIBLE_DEVICES", text, 1) == 0;
}

static void show_as_before(const char *before)
{
    if (before != NULL)
        (void)setenv("CUDA_VISIBLE_DEVICES", before, 1);
    else
        (void)unsetenv("CUDA_VISIBLE_DEVICES");
}

/* The daemon sees GPU `daemons` only (-1: as this process), the client the last one, or `all`. */
static bool run_client(int daemons, const char *kind, bool all)
{
    const char *now = getenv("CUDA_VISIBLE_DEVICES");
    char *before = now != NULL ? strdup(now) : NULL;
    int status = -1;
    pid_t pid = -1;
    bool good;

    engine_end_daemon(false);
    good = (daemons < 0 || show_only(daemons)) && engine_start_daemon() && (all || show_only((int)n_gpus() - 1));
    (void)fflush(stdout);
    if (good)
        pid = spawn_client(kind);
    good = good && pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
    show_as_before(before);
    free(before);
    return good || GPU_FAIL("the client ended with status %#x", (unsigned)status);
}

static bool other_numbers(device *d)
{
    (void)d;
    return run_client(-1, "served", false);
}

static bool daemon_with_one(device *d)
{
    (void)d;
    return run_client((int)n_gpus() - 1, "served", false);
}

static bool other_gpus(device *d)
{
    (void)d;
    return run_client(0, "away", false);
}

static bool no_context_elsewhere(device *d)
{
    (void)d;
    return run_client(-1, "alone", true);
}

static const gpu_test tests[] = {
    {"a client that uses the last GPU has no context on another", no_context_elsewhere},
    {"case 079: the client sees the last GPU only, the daemon all of them", other_numbers},
    {"case 079: both see the last GPU only", daemon_with_one},
    {"case 079: the client's GPU is not the daemon's", other_gpus},
};

int main(int argc, char **argv)
{
    int code;

    if (argc == 4 && strcmp(argv[1], "-client") == 0)
        return client(argv[2], argv[3]);
    code = gpu_run(tests, n_gpus() < 2 ? 3 : sizeof tests / sizeof *tests, argc, argv);
    if (n_gpus() == 1)
        (void)printf("      two GPUs: not here\n");
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
    static const gpu_test tests[] = {{"GPUs by UUID", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
