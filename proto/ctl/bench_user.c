#include "proto/ctl/bench_user.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/ctl/pattern.h"

enum { MAX_LAYERS = 61, CALL_MS = 60000 };

void bench_user_close(bench_user *u)
{
    client_cuda_lane_close(u->lane);
    kvs_close(u->client);
    free(u->slots);
    free(u->keys);
    free(u->stored);
    free(u->loaded);
    *u = (bench_user){0};
}

static kvs_status user_memory(bench_user *u, uint32_t n, kvs_err *err)
{
    u->n = n;
    u->slots = calloc(n, sizeof *u->slots);
    u->keys = malloc((size_t)n * KVS_KEY_BYTES);
    u->stored = calloc(n, sizeof *u->stored);
    u->loaded = calloc(n, sizeof *u->loaded);
    if (u->slots == NULL || u->keys == NULL || u->stored == NULL || u->loaded == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %" PRIu32 " blocks", n);
    return KVS_OK;
}

/* Blocks as an engine with one tensor a layer has them: plain device memory, handed back in as the engine's own. */
static kvs_status import_pages(bench_user *u, uint32_t layers, uint32_t n, kvs_err *err)
{
    kvs_plane_map maps[MAX_LAYERS];
    int fds[16];
    kvs_import in = {.n_slots = n, .memory = KVS_MEMORY_CUDA_VMM, .n_maps = layers, .maps = maps, .fds = fds};
    kvs_region_info info;
    uint64_t page = u->slot_bytes / layers;
    kvs_status s = kvs_scratch_create(u->client, 0, u->slot_bytes * n, &u->scratch, CALL_MS, err);

    if (s != KVS_OK)
        return s;
    kvs_region_get(u->scratch, &info);
    if (info.n_fds > sizeof fds / sizeof *fds)
        return kvs_fail(err, KVS_E_LIMIT, "%u descriptors are too many", (unsigned)info.n_fds);
    in.n_fds = info.n_fds;
    for (uint32_t i = 0; i < info.n_fds; i++)
        fds[i] = kvs_region_fd(u->scratch, i);
    for (uint32_t l = 0; l < layers; l++)
        maps[l] = (kvs_plane_map){.base = (uint64_t)l * n * page, .stride = page};
    for (uint32_t i = 0; i < n; i++)
        u->slots[i] = (kvs_slot){i, 0};
    return kvs_region_import(u->ns, &in, &u->region, CALL_MS, err);
}

kvs_status bench_user_open(bench_user *u, const char *socket, uint32_t layers, uint32_t tokens, uint32_t n, bool pages,
                           kvs_err *err)
{
    static kvs_plane planes[MAX_LAYERS];
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    kvs_ns_info info = {0};
    void *base = NULL;
    uint64_t bytes;
    kvs_status s = user_memory(u, n, err);

    o.path = socket;
    o.name = "kvstridectl bench";
    if (s == KVS_OK)
        s = kvs_connect(&u->client, &o, err);
    if (s == KVS_OK)
        s = kvs_namespace_mla("bench", "", KVS_FORMAT_mla_bf16, layers, tokens, planes, &desc, err);
    if (s == KVS_OK)
        s = kvs_open(u->client, &desc, &u->ns, CALL_MS, err);
    if (s != KVS_OK)
        return s;
    kvs_ns_get(u->ns, &info);
    u->slot_bytes = info.slot_bytes;
    s = pages ? import_pages(u, layers, n, err) : kvs_region_create(u->ns, 0, n, &u->region, CALL_MS, err);
    if (s == KVS_OK)
        s = kvs_region_map(pages ? u->scratch : u->region, &base, &bytes, err);
    if (s == KVS_OK && !pages)
        s = kvs_slot_take(u->region, n, u->slots, CALL_MS, err);
    if (s == KVS_OK)
        s = client_cuda_lane_open(&u->lane, err);
    u->base = base;
    return s == KVS_OK ? client_cuda_host(u->lane, n * u->slot_bytes, &u->pinned, err) : s;
}

/* ---- the two directions, through the socket and raw ---- */

void bench_user_name(bench_user *u, uint64_t first_id)
{
    if (u->named_id == first_id + 1)
        return;
    u->named_id = first_id + 1;
    for (uint32_t i = 0; i < u->n; i++)
        pattern_key(first_id + i, u->keys + (size_t)i * KVS_KEY_BYTES);
}

kvs_status bench_user_store(bench_user *u, uint64_t first_id, kvs_err *err)
{
    kvs_store_args a = {.ns = u->ns, .region = u->region, .n = u->n, .slots = u->slots, .results = u->stored};

    bench_user_name(u, first_id);
    a.keys = u->keys;
    return kvs_store(&a, CALL_MS, err);
}

kvs_status bench_user_load(bench_user *u, uint64_t first_id, uint32_t n, kvs_err *err)
{
    kvs_load_args a = {.ns = u->ns, .region = u->region, .n = n, .slots = u->slots, .results = u->loaded};

    bench_user_name(u, first_id);
    a.keys = u->keys;
    return kvs_load(&a, CALL_MS, err);
}

kvs_status bench_user_raw(bench_user *u, bool load, uint64_t bytes, kvs_err *err)
{
    return load ? client_cuda_copy(u->lane, u->base, u->pinned, bytes, err)
                : client_cuda_copy(u->lane, u->pinned, u->base, bytes, err);
}
