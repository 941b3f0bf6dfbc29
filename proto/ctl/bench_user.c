#include "proto/ctl/bench_user.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/ctl/pattern.h"

enum { MOST_CHUNK = 256 };

const kvs_mark bench_now = KVS_MARK_NOW;

void bench_user_close(bench_user *u)
{
    kvs_pack_close(u->pack);
    kvs_close(u->client);
    engine_cuda_close(u->engine);
    free(u->slots);
    free(u->blocks);
    free(u->keys);
    free(u->stored);
    free(u->loaded);
    *u = (bench_user){0};
}

static kvs_status take_memory(bench_user *u, uint32_t n, kvs_err *err)
{
    u->n = n;
    u->slots = calloc(n, sizeof *u->slots);
    u->blocks = calloc(n, sizeof *u->blocks);
    u->keys = malloc((size_t)n * KVS_KEY_BYTES);
    u->stored = calloc(n, sizeof *u->stored);
    u->loaded = calloc(n, sizeof *u->loaded);
    if (u->slots == NULL || u->blocks == NULL || u->keys == NULL || u->stored == NULL || u->loaded == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %" PRIu32 " blocks", n);
    return KVS_OK;
}

static kvs_status daemon_slots(bench_user *u, uint32_t on, kvs_err *err)
{
    kvs_status s = kvs_region_create(u->ns, on, u->n, &u->region, BENCH_CALL_MS, err);

    return s == KVS_OK ? kvs_slot_take(u->region, u->n, u->slots, BENCH_CALL_MS, err) : s;
}

static kvs_status import(bench_user *u, const bench_shape *x, kvs_ipc *ipc, kvs_err *err)
{
    const bool in_pages = x->place == BENCH_PAGES;
    const uint64_t page = u->slot_bytes / x->layers;
    kvs_plane_map maps[BENCH_MAX_LAYERS];
    kvs_import in = {.n_slots = x->n,
                     .memory = KVS_MEMORY_CUDA_IPC,
                     .n_maps = in_pages ? x->layers : 1,
                     .maps = maps,
                     .n_ipc = 1,
                     .ipc = ipc};

    for (uint32_t l = 0; l < in.n_maps; l++)
        maps[l] = (kvs_plane_map){.base = l * page * x->n, .stride = in_pages ? page : u->slot_bytes};
    return kvs_region_import(u->ns, &in, &u->region, BENCH_CALL_MS, err);
}

static kvs_status open_pack(bench_user *u, const bench_shape *x, uint8_t *base, kvs_err *err)
{
    const uint64_t page = u->slot_bytes / x->layers, fit = u->tune.chunk_bytes / u->slot_bytes;
    const uint32_t chunk = fit < MOST_CHUNK ? (uint32_t)fit : MOST_CHUNK;
    kvs_pack_plane planes[BENCH_MAX_LAYERS];
    kvs_pack_args a = {.ns = u->ns,
                       .n_planes = x->layers,
                       .planes = planes,
                       .n_blocks = x->n,
                       .chunk = chunk,
                       .n_staging = chunk * u->tune.chunks,
                       .ctas = u->tune.ctas};

    for (uint32_t l = 0; l < x->layers; l++)
        planes[l] = (kvs_pack_plane){.base = base + l * page * x->n, .stride = page};
    return kvs_pack_open(u->client, &a, &u->pack, BENCH_CALL_MS, err);
}

/* Pages of one tensor a layer, or whole blocks, one after the other in one allocation. */
static kvs_status own_slots(bench_user *u, const bench_shape *x, kvs_err *err)
{
    kvs_ipc ipc;
    void *base = NULL;
    kvs_status s = engine_cuda_open(&u->engine, err);

    for (uint32_t i = 0; i < x->n; i++) {
        u->slots[i] = (kvs_slot){i, 0};
        u->blocks[i] = i;
    }
    if (s == KVS_OK)
        s = engine_cuda_alloc(u->engine, x->n * u->slot_bytes, &base, ipc.uuid, ipc.handle, err);
    if (s != KVS_OK)
        return s;
    return x->place == BENCH_PACK ? open_pack(u, x, base, err) : import(u, x, &ipc, err);
}

kvs_status bench_user_open_on(bench_user *u, const char *socket, uint32_t device, const bench_shape *x, kvs_err *err)
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
    return x->place == BENCH_DAEMON ? daemon_slots(u, device, err) : own_slots(u, x, err);
}

kvs_status bench_user_open(bench_user *u, const char *socket, const bench_shape *x, kvs_err *err)
{
    return bench_user_open_on(u, socket, 0, x, err);
}

void bench_user_name(bench_user *u, uint64_t first_id)
{
    if (u->named_id == first_id + 1)
        return;
    u->named_id = first_id + 1;
    for (uint32_t i = 0; i < u->n; i++)
        pattern_key(first_id + i, u->keys + (size_t)i * KVS_KEY_BYTES);
}

static kvs_status submit_pack(bench_user *u, bench_flight *f, bool load, uint32_t first, uint32_t n, kvs_err *err)
{
    kvs_pack_move m = {.n = n,
                       .keys = u->keys + (size_t)first * KVS_KEY_BYTES,
                       .blocks = u->blocks + first,
                       .flags = KVS_PACK_NO_WAIT,
                       .results = u->stored + first};

    return load ? kvs_pack_load(u->pack, &m, &f->request, BENCH_CALL_MS, err)
                : kvs_pack_store(u->pack, &m, &f->request, BENCH_CALL_MS, err);
}

kvs_status bench_user_submit(bench_user *u, bench_flight *f, bool load, uint32_t first, uint32_t n, kvs_err *err)
{
    const uint8_t *keys = u->keys + (size_t)first * KVS_KEY_BYTES;

    f->request = NULL;
    if (u->pack != NULL)
        return submit_pack(u, f, load, first, n, err);
    if (load) {
        f->load = (kvs_load_args){.ns = u->ns,
                                  .region = u->region,
                                  .n = n,
                                  .keys = keys,
                                  .slots = u->slots + first,
                                  .after = &bench_now,
                                  .results = u->loaded + first};
        return kvs_submit_load(&f->load, &f->request, BENCH_CALL_MS, err);
    }
    f->store = (kvs_store_args){.ns = u->ns,
                                .region = u->region,
                                .n = n,
                                .keys = keys,
                                .slots = u->slots + first,
                                .after = &bench_now,
                                .results = u->stored + first};
    return kvs_submit_store(&f->store, &f->request, BENCH_CALL_MS, err);
}

kvs_status bench_user_end(bench_flight *f, kvs_err *err)
{
    kvs_status s, ended;

    if (f->request == NULL)
        return KVS_OK;
    s = kvs_wait(f->request, BENCH_CALL_MS, err);
    ended =
        kvs_request_end(f->request, s == KVS_OK ? err : NULL); /* unanswered: its arguments are the caller's again */
    f->request = NULL;
    return s == KVS_OK ? ended : s;
}

/* As kvs_store and kvs_load would. */
static kvs_status run(bench_user *u, bool load, uint64_t first_id, uint32_t n, kvs_err *err)
{
    bench_flight f;
    kvs_status s;

    bench_user_name(u, first_id);
    s = bench_user_submit(u, &f, load, 0, n, err);
    return s == KVS_OK ? bench_user_end(&f, err) : s;
}

kvs_status bench_user_store(bench_user *u, uint64_t first_id, kvs_err *err)
{
    return run(u, false, first_id, u->n, err);
}

kvs_status bench_user_load(bench_user *u, uint64_t first_id, uint32_t n, kvs_err *err)
{
    return run(u, true, first_id, n, err);
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
