#include "kernels/client_cuda.h"
#include "proto/ctl/replay.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/json.h"
#include "proto/client/kvstride.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/ctl.h"
#include "proto/ctl/pattern.h"
#include "proto/ctl/private.h"
#include "proto/ctl/progress.h"
#include "proto/ctl/render.h"

enum { MAX_CHUNK = 64, CALL_MS = 60000, POISON = 0xa5 };
/* Region memory of one client; large blocks move fewer at a time. */
static const uint64_t CHUNK_BYTES = UINT64_C(64) << 20;

typedef struct shared {
    const replay_config *config;
    _Atomic uint32_t next; /* request */
    _Atomic bool failed;
} shared;

typedef struct player {
    shared *all;
    kvs_client *client;
    kvs_ns *ns;
    kvs_region *region;
    uint8_t *base;
    client_cuda_lane *lane; /* base is a GPU's; NULL: host memory */
    void *image;            /* with a lane: one block of host memory */
    uint64_t stride, slot_bytes;
    uint32_t chunk; /* blocks that move at a time */
    kvs_slot slots[MAX_CHUNK];
    uint8_t *keys; /* [longest][32] */
    replay_result sum;
    bool draws; /* the one that shows progress */
    kvs_status status;
    kvs_err err;
} player;

static uint8_t *slot_address(const player *p, uint32_t i)
{
    return p->base + (uint64_t)p->slots[i].slot * p->stride;
}

/* Where a block is made or looked at: in its slot, or in host memory beside a GPU. */
static uint8_t *desk(const player *p, uint32_t i)
{
    return p->lane != NULL ? p->image : slot_address(p, i);
}

static kvs_status put_out(player *p, uint32_t i)
{
    return p->lane != NULL ? client_cuda_copy(p->lane, slot_address(p, i), p->image, p->slot_bytes, &p->err) : KVS_OK;
}

static kvs_status take_in(player *p, uint32_t i)
{
    return p->lane != NULL ? client_cuda_copy(p->lane, p->image, slot_address(p, i), p->slot_bytes, &p->err) : KVS_OK;
}

/* keys[first .. first + n): into the slots, each byte checked.  Returns how many leading ones were there. */
static kvs_status load_chunk(player *p, uint32_t first, uint32_t n, uint32_t *ret_loaded)
{
    kvs_load_result results[MAX_CHUNK];
    kvs_load_args a = {.ns = p->ns, .region = p->region, .n = n, .first_depth = first};
    kvs_status s;

    a.keys = p->keys + (size_t)first * KVS_KEY_BYTES;
    a.slots = p->slots;
    a.results = results;
    for (uint32_t i = 0; i < n; i++) {
        (void)memset(desk(p, i), POISON, p->slot_bytes);
        s = put_out(p, i);
        if (s != KVS_OK)
            return s;
    }
    s = kvs_load(&a, CALL_MS, &p->err);
    if (s != KVS_OK && s != KVS_E_PARTIAL)
        return s;
    *ret_loaded = n;
    for (uint32_t i = n; i-- > 0;) {
        const uint8_t *key = a.keys + (size_t)i * KVS_KEY_BYTES;

        if (results[i].status != KVS_OK) {
            p->sum.gone++;
            *ret_loaded = i;
            continue;
        }
        p->sum.loaded_bytes += p->slot_bytes;
        s = take_in(p, i);
        if (s != KVS_OK)
            return s;
        if (pattern_verify(key, desk(p, i), p->slot_bytes) != p->slot_bytes)
            p->sum.mismatches++;
    }
    return KVS_OK;
}

static kvs_status store_chunk(player *p, uint32_t first, uint32_t n)
{
    kvs_status results[MAX_CHUNK], s;
    kvs_store_args a = {.ns = p->ns, .region = p->region, .n = n, .first_depth = first};

    a.keys = p->keys + (size_t)first * KVS_KEY_BYTES;
    a.parent = first > 0 ? a.keys - KVS_KEY_BYTES : NULL;
    a.slots = p->slots;
    a.results = results;
    for (uint32_t i = 0; i < n; i++) {
        pattern_fill(a.keys + (size_t)i * KVS_KEY_BYTES, desk(p, i), p->slot_bytes);
        s = put_out(p, i);
        if (s != KVS_OK)
            return s;
    }
    s = kvs_store(&a, CALL_MS, &p->err);
    if (s != KVS_OK && s != KVS_E_PARTIAL)
        return s;
    for (uint32_t i = 0; i < n; i++) {
        if (results[i] == KVS_OK)
            p->sum.stored_bytes += p->slot_bytes;
        else if (results[i] != KVS_E_EXISTS && results[i] != KVS_E_BUSY) /* BUSY: another client is storing it */
            p->sum.not_stored++;
    }
    return KVS_OK;
}

static kvs_status play_request(player *p, uint32_t r)
{
    const trace *t = p->all->config->t;
    uint32_t n = (uint32_t)(t->start[r + 1] - t->start[r]), hits = 0, have;
    kvs_status s;

    for (uint32_t i = 0; i < n; i++)
        pattern_key(t->ids[t->start[r] + i], p->keys + (size_t)i * KVS_KEY_BYTES);
    p->sum.requests++;
    p->sum.blocks += n;
    if (n == 0)
        return KVS_OK;
    s = kvs_lookup(p->ns, p->keys, n, &hits, NULL, CALL_MS, &p->err);
    if (s != KVS_OK)
        return s;
    have = hits;
    for (uint32_t end = hits; end > 0;) { /* deepest chunk first */
        uint32_t first = end - (end % p->chunk ? end % p->chunk : p->chunk), loaded = 0;

        s = load_chunk(p, first, end - first, &loaded);
        if (s != KVS_OK)
            return s;
        if (loaded < end - first)
            have = first + loaded;
        end = first;
    }
    p->sum.hit_blocks += have;
    for (uint32_t first = have; first < n && s == KVS_OK; first += p->chunk)
        s = store_chunk(p, first, n - first < p->chunk ? n - first : p->chunk);
    return s;
}

/* Bytes of a block of the replay's namespace: each layer's page is rounded up to 16. */
static uint64_t block_bytes(const replay_config *r)
{
    return (uint64_t)r->layers * ((r->tokens * UINT64_C(1152) + 15) / 16 * 16);
}

static uint32_t chunk_of(const replay_config *r)
{
    uint64_t n = CHUNK_BYTES / block_bytes(r);

    return n == 0 ? 1 : n < MAX_CHUNK ? (uint32_t)n : MAX_CHUNK;
}

static kvs_status player_open(player *p)
{
    const replay_config *r = p->all->config;
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_plane *planes = calloc(r->layers, sizeof *planes);
    kvs_namespace desc;
    kvs_region_info info;
    kvs_ns_info ns;
    void *base = NULL;
    uint64_t bytes = 0;
    kvs_status s;

    p->keys = malloc((size_t)(r->t->longest ? r->t->longest : 1) * KVS_KEY_BYTES);
    if (planes == NULL || p->keys == NULL) {
        free(planes);
        return kvs_fail(&p->err, KVS_E_NO_MEMORY, "no memory for %u layers or %u keys", r->layers, r->t->longest);
    }
    p->chunk = chunk_of(r);
    o.path = r->socket;
    o.name = "kvstridectl replay";
    s = kvs_connect(&p->client, &o, &p->err);
    if (s == KVS_OK)
        s = kvs_namespace_mla("replay", "", KVS_FORMAT_mla_bf16, r->layers, r->tokens, planes, &desc, &p->err);
    if (s == KVS_OK)
        s = kvs_open(p->client, &desc, &p->ns, 0, &p->err);
    if (s == KVS_OK)
        s = kvs_region_create(p->ns, 0, p->chunk, &p->region, 0, &p->err);
    if (s == KVS_OK)
        s = kvs_region_map(p->region, &base, &bytes, &p->err);
    if (s == KVS_OK)
        s = kvs_slot_take(p->region, p->chunk, p->slots, 0, &p->err);
    free(planes);
    if (s != KVS_OK)
        return s;
    kvs_region_get(p->region, &info);
    kvs_ns_get(p->ns, &ns);
    p->base = base;
    p->stride = info.slot_stride;
    p->slot_bytes = ns.slot_bytes;
    if (info.memory != KVS_MEMORY_CUDA_VMM)
        return KVS_OK;
    s = client_cuda_lane_open(&p->lane, &p->err);
    return s == KVS_OK ? client_cuda_host(p->lane, p->slot_bytes, &p->image, &p->err) : s;
}

static void *player_main(void *arg)
{
    player *p = arg;
    const trace *t = p->all->config->t;

    p->status = player_open(p);
    while (p->status == KVS_OK && !atomic_load(&p->all->failed)) {
        uint32_t r = atomic_fetch_add(&p->all->next, 1);

        if (r >= t->n_requests)
            break;
        p->status = play_request(p, r);
        if (p->draws)
            progress_show("replay", r + 1, t->n_requests);
    }
    if (p->status != KVS_OK)
        atomic_store(&p->all->failed, true);
    client_cuda_lane_close(p->lane);
    kvs_close(p->client);
    free(p->keys);
    return NULL;
}

static void add(replay_result *to, const replay_result *r)
{
    to->requests += r->requests;
    to->blocks += r->blocks;
    to->hit_blocks += r->hit_blocks;
    to->loaded_bytes += r->loaded_bytes;
    to->stored_bytes += r->stored_bytes;
    to->mismatches += r->mismatches;
    to->gone += r->gone;
    to->not_stored += r->not_stored;
}

kvs_status replay_run(const replay_config *r, replay_result *ret, kvs_err *err)
{
    shared all = {.config = r};
    player *players = calloc(r->clients, sizeof *players);
    pthread_t *threads = calloc(r->clients, sizeof *threads);
    uint32_t started = 0;
    uint64_t begin = clock_ns();
    kvs_status s = KVS_OK;

    *ret = (replay_result){0};
    if (players == NULL || threads == NULL) {
        s = kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %u clients", r->clients);
        goto end;
    }
    for (; started < r->clients; started++) {
        players[started].all = &all;
        players[started].draws = r->progress && started == 0;
        if (pthread_create(&threads[started], NULL, player_main, &players[started]) != 0) {
            s = kvs_fail(err, KVS_E_SYS, "cannot start thread %u", started);
            atomic_store(&all.failed, true);
            break;
        }
    }
    for (uint32_t i = 0; i < started; i++) {
        (void)pthread_join(threads[i], NULL);
        add(ret, &players[i].sum);
        if (players[i].status != KVS_OK && s == KVS_OK)
            s = kvs_fail(err, players[i].status, "%s",
                         players[i].err.msg[0] ? players[i].err.msg : kvs_status_text(players[i].status));
    }
    ret->seconds = (double)(clock_ns() - begin) / 1e9;
end:
    if (r->progress)
        progress_end();
    free(players);
    free(threads);
    return s;
}

kvs_status replay_pool_size(uint64_t n, uint64_t slot_bytes, uint64_t *ret_max, uint64_t *ret_extent, kvs_err *err)
{
    const uint64_t page = 4096, most = UINT64_C(1) << 42;
    uint64_t extent = UINT64_C(256) << 20, per_extent;

    if (slot_bytes > UINT64_C(1) << 30)
        return kvs_fail(err, KVS_E_CONFIG, "a block of %" PRIu64 " bytes is above 1073741824", slot_bytes);
    if (slot_bytes > extent)
        extent = UINT64_C(1) << 30;
    if (n <= extent / slot_bytes)
        extent = (n * slot_bytes + page - 1) / page * page;
    per_extent = extent / slot_bytes;
    if ((n + per_extent - 1) / per_extent > most / extent)
        return kvs_fail(err, KVS_E_CONFIG, "%" PRIu64 " blocks of %" PRIu64 " bytes are more than %" PRIu64 " bytes", n,
                        slot_bytes, most);
    *ret_extent = extent;
    *ret_max = (n + per_extent - 1) / per_extent * extent;
    return KVS_OK;
}

static int put_result(const ctl *c, const replay_result *r, int code)
{
    json_writer *w = json_writer_create();

    json_begin_object(w, NULL);
    json_put_string(w, "trace", c->trace);
    if (c->blocks != 0)
        json_put_u64(w, "capacity", c->blocks);
    json_put_u64(w, "clients", c->clients ? c->clients : 1);
    json_put_u64(w, "requests", r->requests);
    json_put_u64(w, "blocks", r->blocks);
    json_put_u64(w, "hit_blocks", r->hit_blocks);
    if (r->blocks != 0)
        json_put_double(w, "hit_rate", (double)r->hit_blocks / (double)r->blocks);
    else
        json_put_null(w, "hit_rate");
    json_put_u64(w, "loaded_bytes", r->loaded_bytes);
    json_put_u64(w, "stored_bytes", r->stored_bytes);
    json_put_u64(w, "mismatches", r->mismatches);
    json_put_u64(w, "gone", r->gone);
    json_put_u64(w, "not_stored", r->not_stored);
    json_put_double(w, "seconds", r->seconds);
    json_end(w);
    return ctl_put(w, code);
}

static void print_text(const replay_result *r)
{
    char loaded[32], stored[32];

    (void)printf("requests      %" PRIu64 "\nblocks        %" PRIu64 "\nhit_blocks    %" PRIu64 "\n", r->requests,
                 r->blocks, r->hit_blocks);
    (void)printf("hit_rate      %.4f\n", r->blocks ? (double)r->hit_blocks / (double)r->blocks : 0.0);
    (void)printf("loaded_bytes  %" PRIu64 " (%s)\nstored_bytes  %" PRIu64 " (%s)\n", r->loaded_bytes,
                 render_bytes(loaded, sizeof loaded, (double)r->loaded_bytes), r->stored_bytes,
                 render_bytes(stored, sizeof stored, (double)r->stored_bytes));
    (void)printf("mismatches    %" PRIu64 "\n", r->mismatches);
    if (r->gone != 0)
        (void)printf("gone          %" PRIu64 " (hits that other clients' stores evicted before the load)\n", r->gone);
    if (r->not_stored != 0)
        (void)printf("not_stored    %" PRIu64 " (no space)\n", r->not_stored);
    (void)printf("seconds       %.2f\n", r->seconds);
}

/* A private daemon of exactly `blocks` blocks. */
static kvs_status start(const ctl *c, const replay_config *r, private_daemon *d, kvs_err *err)
{
    char max[64], extent[64], slots[64], region[64];
    const char *settings[] = {max, extent, slots, region};
    uint64_t slot_bytes = block_bytes(r), max_bytes, extent_bytes;
    kvs_status s = replay_pool_size(c->blocks, slot_bytes, &max_bytes, &extent_bytes, err);

    if (s != KVS_OK)
        return s;
    (void)snprintf(max, sizeof max, "pool.max_bytes=%" PRIu64, max_bytes);
    (void)snprintf(extent, sizeof extent, "pool.extent_bytes=%" PRIu64, extent_bytes);
    (void)snprintf(slots, sizeof slots, "pool.max_slots=%" PRIu64, c->blocks);
    (void)snprintf(region, sizeof region, "device.max_region_bytes=%" PRIu64,
                   (chunk_of(r) * slot_bytes + 4096) * r->clients + 4096);
    return private_start(d, settings, 4, err);
}

int ctl_replay(const ctl *c)
{
    private_daemon d = {0};
    trace t = {0};
    replay_config r = {
        .t = &t, .layers = c->layers ? (uint32_t)c->layers : 2, .tokens = c->tokens ? (uint32_t)c->tokens : 1};
    replay_result sum;
    kvs_err err = {0};
    kvs_status s;
    int code = CTL_OK;

    r.clients = c->clients ? (uint32_t)c->clients : 1;
    r.progress = progress_wanted(c->quiet);
    if (c->trace == NULL || (c->socket == NULL) == (c->blocks == 0)) {
        return ctl_usage(
            "replay needs --trace FILE and either --blocks N (private daemon) or --socket PATH (running one)");
    }
    s = trace_read(&t, c->trace, &err);
    if (s != KVS_OK)
        return ctl_fail(c, "replay", s, &err);
    r.socket = c->socket;
    if (c->socket == NULL) {
        s = start(c, &r, &d, &err);
        r.socket = d.socket;
    }
    if (s == KVS_OK)
        s = replay_run(&r, &sum, &err);
    if (s != KVS_OK) {
        code = ctl_fail(c, "replay", s, &err);
    } else {
        code = sum.mismatches == 0 ? CTL_OK : CTL_FAILED;
        if (c->json)
            code = put_result(c, &sum, code);
        else
            print_text(&sum);
    }
    private_stop(&d);
    trace_free(&t);
    return code;
}
