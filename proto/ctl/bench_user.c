#include "proto/ctl/bench_user.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/ctl/pattern.h"

const kvs_mark bench_now = KVS_MARK_NOW;

void bench_user_close(bench_user *u)
{
    kvs_close(u->client);
    engine_cuda_close(u->engine);
    free(u->slots);
    free(u->keys);
    free(u->stored);
    free(u->loaded);
    *u = (bench_user){0};
}

static kvs_status take_memory(bench_user *u, uint32_t n, kvs_err *err)
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

static kvs_status daemon_slots(bench_user *u, kvs_err *err)
{
    kvs_status s = kvs_region_create(u->ns, 0, u->n, &u->region, BENCH_CALL_MS, err);

    return s == KVS_OK ? kvs_slot_take(u->region, u->n, u->slots, BENCH_CALL_MS, err) : s;
}

/* Pages of one tensor a layer, or whole blocks, one after the other in one allocation. */
static kvs_status own_slots(bench_user *u, const bench_shape *x, kvs_err *err)
{
    kvs_plane_map maps[BENCH_MAX_LAYERS];
    kvs_ipc ipc;
    kvs_import in = {.n_slots = x->n, .memory = KVS_MEMORY_CUDA_IPC, .maps = maps, .n_ipc = 1, .ipc = &ipc};
    const uint64_t page = u->slot_bytes / x->layers;
    void *base;
    kvs_status s = engine_cuda_open(&u->engine, err);

    in.n_maps = x->place == BENCH_PAGES ? x->layers : 1;
    for (uint32_t l = 0; l < in.n_maps; l++)
        maps[l] = (kvs_plane_map){.base = l * page * x->n, .stride = u->slot_bytes / (in.n_maps > 1 ? x->layers : 1)};
    for (uint32_t i = 0; i < x->n; i++)
        u->slots[i] = (kvs_slot){i, 0};
    if (s == KVS_OK)
        s = engine_cuda_alloc(u->engine, x->n * u->slot_bytes, &base, ipc.uuid, ipc.handle, err);
    return s == KVS_OK ? kvs_region_import(u->ns, &in, &u->region, BENCH_CALL_MS, err) : s;
}

kvs_status bench_user_open(bench_user *u, const char *socket, const bench_shape *x, kvs_err *err)
{
    kvs_plane planes[BENCH_MAX_LAYERS];
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_namespace desc;
    kvs_ns_info info;
    kvs_status s = take_memory(u, x->n, err);

    o.path = socket;
    o.name = "kvstridectl bench";
    if (s == KVS_OK)
        s = kvs_connect(&u->client, &o, err);
    if (s == KVS_OK)
        s = kvs_namespace_mla("bench", "", KVS_FORMAT_mla_bf16, x->layers, x->tokens, planes, &desc, err);
    if (s == KVS_OK)
        s = kvs_open(u->client, &desc, &u->ns, BENCH_CALL_MS, err);
    if (s != KVS_OK)
        return s;
    kvs_ns_get(u->ns, &info);
    u->slot_bytes = info.slot_bytes;
    return x->place == BENCH_DAEMON ? daemon_slots(u, err) : own_slots(u, x, err);
}

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
    a.after = &bench_now;
    a.keys = u->keys;
    return kvs_store(&a, BENCH_CALL_MS, err);
}

kvs_status bench_user_load(bench_user *u, uint64_t first_id, uint32_t n, kvs_err *err)
{
    kvs_load_args a = {.ns = u->ns, .region = u->region, .n = n, .slots = u->slots, .results = u->loaded};

    bench_user_name(u, first_id);
    a.after = &bench_now;
    a.keys = u->keys;
    return kvs_load(&a, BENCH_CALL_MS, err);
}

/* ---- raw copies ---- */

void bench_raw_close(bench_raw *r)
{
    client_cuda_lane_close(r->lane[0]);
    client_cuda_lane_close(r->lane[1]);
    engine_cuda_close(r->engine);
    *r = (bench_raw){0};
}

kvs_status bench_raw_open(bench_raw *r, kvs_err *err)
{
    uint8_t uuid[16], handle[64];
    kvs_status s = engine_cuda_open(&r->engine, err);

    for (int i = 0; i < 2 && s == KVS_OK; i++) {
        s = client_cuda_lane_open(&r->lane[i], err);
        if (s == KVS_OK)
            s = client_cuda_host(r->lane[i], BENCH_RAW_BYTES, &r->pinned[i], err);
        if (s == KVS_OK)
            s = engine_cuda_alloc(r->engine, BENCH_RAW_BYTES, &r->device[i], uuid, handle, err);
    }
    return s;
}

kvs_status bench_raw_copy(bench_raw *r, int lane, bool load, uint64_t bytes, kvs_err *err)
{
    return load ? client_cuda_copy(r->lane[lane], r->device[lane], r->pinned[lane], bytes, err)
                : client_cuda_copy(r->lane[lane], r->pinned[lane], r->device[lane], bytes, err);
}
