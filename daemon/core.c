#include "daemon/core.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/log.h"
#include "daemon/process.h"
#include "kernels/host_node.h"

static kvs_status make_random(void *to, size_t n, kvs_err *err)
{
    if (getrandom(to, n, 0) != (ssize_t)n)
        return kvs_fail(err, KVS_E_SYS, "getrandom: no %zu random bytes", n);
    return KVS_OK;
}

static const char *name_of_tenant(void *ud, uint32_t tenant)
{
    const core *c = ud;

    return tenant_name(c->config, tenant);
}

static bool find_tenant(void *ud, const char *name, uint32_t *ret)
{
    const core *c = ud;

    return tenant_find(c->config, name, ret);
}

/* One line says what came back, and one what did not and why. */
static void log_adoption(const core *c)
{
    const pool_adoption *a = pool_adopted(c->pool);
    directory_stats d;
    pool_bytes b;
    char why[2 * KVS_ERR_MSG_BYTES];

    if (a->why[0] != '\0')
        log_event(LOG_LEVEL_WARN, "table_refused", " reason=%s effect=\"starts cold in the same memory\"",
                  log_quote(why, sizeof(why), a->why, strlen(a->why)));
    if (!a->adopted)
        return;
    directory_get_stats(c->dir, c->now_us, &d);
    pool_get_bytes(c->pool, &b);
    log_event(LOG_LEVEL_INFO, "table_adopted",
              " blocks=%" PRIu64 " bytes=%" PRIu64 " unfinished=%" PRIu64 " refused=%" PRIu64 " lives=%" PRIu64,
              d.adopted, b.ready, a->freed, d.refused, a->boots);
    if (d.refused > 0)
        log_event(LOG_LEVEL_WARN, "blocks_refused",
                  " torn=%" PRIu64 " without_checksum=%" PRIu64 " without_namespace=%" PRIu64, a->torn, a->no_sum,
                  d.refused - a->torn - a->no_sum);
}

static uint64_t reserve_bytes(const config *c)
{
    return c->pool_reserve_bytes != 0 ? (uint64_t)c->pool_reserve_bytes : 4 * (uint64_t)c->pool_max_bytes;
}

static kvs_status make_pool(core *c, persist *memory, kvs_err *err)
{
    pool_config pc = {.max_bytes = (uint64_t)c->config->pool_max_bytes,
                      .extent_bytes = (uint64_t)c->config->pool_extent_bytes,
                      .max_slots = (uint32_t)c->config->pool_max_slots,
                      .reserve_bytes = reserve_bytes(c->config),
                      .memory = memory};
    directory_config dc = {.evict = &evict_lru,
                           .n_tenants = c->config->n_tenants,
                           .max_tenants = CONFIG_MAX_TENANTS,
                           .hash_seed = c->seed,
                           .on_event = core_on_event,
                           .ud = c,
                           .tenant_name = name_of_tenant,
                           .tenant_find = find_tenant};
    kvs_status s = pool_create(&c->pool, &pc, err);

    if (s != KVS_OK)
        return s;
    dc.pool = c->pool;
    s = directory_create(&c->dir, &dc, err);
    if (s == KVS_OK)
        log_adoption(c);
    return s;
}

static kvs_status make_workers(core *c, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < c->n_devices && s == KVS_OK; i++) {
        core_device *d = &c->devices[i];

        s = mover_create(&d->load, d->dev, DEVICE_LOAD, c->sink, err);
        if (s == KVS_OK)
            s = mover_create(&d->store, d->dev, DEVICE_STORE, c->sink, err);
        if (s == KVS_OK)
            s = decoder_create(&d->decoder, d->dev, c->sink, err);
    }
    return s == KVS_OK ? pinner_create(&c->pinner, c->sink, err) : s;
}

static void limit_tenants(core *c)
{
    for (uint32_t t = 0; t < c->config->n_tenants; t++) {
        const config_tenant *x = &c->config->tenants[t];

        directory_limit_tenant(c->dir, t, (uint64_t)x->quota_bytes, (uint64_t)x->floor_bytes);
        core_share_link(c, t, (uint32_t)x->link_share);
    }
}

void core_set_operator(core *c, const core_operator *o)
{
    c->operator= * o;
}

void core_reloaded(core *c, kvs_status s, const kvs_err *err)
{
    c->n_reloads++;
    c->n_reloads_failed += s != KVS_OK;
    c->reload_err = s != KVS_OK ? *err : (kvs_err){0};
}

static void on_emptied(core *c, sweep *w);

static void begin_emptying(core *c, uint32_t t, uint64_t leases)
{
    sweep *w = &c->tenants[t].emptying;

    c->tenants[t].left_more = false;
    *w = (sweep){.keys = {.tenant = t, .ns = WIRE_NONE32, .pinned_too = true, .gone = true}, .on_end = on_emptied};
    w->keys.sum.leases = leases;
    core_sweep(c, w);
}

static void on_emptied(core *c, sweep *w)
{
    const directory_reset_result *r = &w->keys.sum;
    uint32_t t = w->keys.tenant;

    w->on_end = NULL;
    log_event(LOG_LEVEL_INFO, "tenant_emptied", " tenant=%s blocks=%" PRIu64 " unfinished=%" PRIu64 " leases=%" PRIu64,
              tenant_name(c->config, t), r->dropped, r->aborted, r->leases);
    if (c->tenants[t].left_more)
        begin_emptying(c, t, 0);
}

/* Nobody can ask for these blocks any more, not even a tenant of that name that comes back: they go, pinned or leased or not.
 * What is being copied goes when that ends. */
static void empty_gone_tenants(core *c)
{
    for (uint32_t t = 0; t < c->config->n_tenants; t++) {
        directory_tenant x;
        uint64_t leases;

        if (!c->config->tenants[t].gone)
            continue;
        directory_get_tenant(c->dir, t, &x);
        leases = directory_leave(c->dir, t);
        if (c->tenants[t].emptying.on_end)
            c->tenants[t].left_more = c->tenants[t].left_more || x.n_namespaces > 0;
        else if (x.used_bytes > 0 || leases > 0)
            begin_emptying(c, t, leases);
    }
}

void core_configured(core *c)
{
    directory_add_tenants(c->dir, c->config->n_tenants);
    limit_tenants(c);
    core_set_movers(c);
    core_log_links(c);
    empty_gone_tenants(c);
    c->step_due = true; /* somebody may be above a quota now */
    c->resize_due = true;
    core_grow_again(c);
    core_resize(c);
    core_grow(c);
}

/* One that was asked for must be there; the device's own is only advice. */
static kvs_status check_node(const config *cfg, kvs_err *err)
{
    kvs_err why = {0};
    kvs_status s = kvs_host_node_check((int32_t)cfg->pool_numa_node, &why);

    return s == KVS_OK ? s : kvs_fail(err, s, "pool.numa_node: %s", why.msg);
}

kvs_status core_create(core **ret, const config *cfg, device *dev, work_sink sink, uint64_t now_us, kvs_err *err)
{
    return core_create_on(ret, cfg, &dev, 1, sink, NULL, now_us, err);
}

/* Cards on several nodes: none of them is the right one. */
static int32_t node_of_pool(const core *c)
{
    int32_t node = KVS_NODE_ANY;

    if (c->config->pool_numa_node >= 0)
        return (int32_t)c->config->pool_numa_node;
    for (uint32_t i = 0; i < c->n_devices; i++) {
        const core_device *d = &c->devices[i];
        int32_t its = d->dev->ops->about ? d->about.numa_node : KVS_NODE_ANY;

        if (i > 0 && its != node)
            return KVS_NODE_ANY;
        node = its;
    }
    return node;
}

static kvs_status take_devices(core *c, device *const *devs, uint32_t n, kvs_err *err)
{
    if (n < 1 || n > WIRE_MAX_DEVICES)
        return kvs_fail(err, KVS_E_LIMIT, "devices: %u is outside 1..%d", n, WIRE_MAX_DEVICES);
    for (uint32_t i = 0; i < n; i++) {
        core_device *d = &c->devices[i];

        d->dev = devs[i];
        if (d->dev->ops->about)
            d->dev->ops->about(d->dev, &d->about);
        (void)snprintf(d->name, sizeof(d->name), n > 1 ? "%.12s%u" : "%.12s", devs[i]->ops->name, i);
    }
    c->n_devices = n;
    core_introduce_devices(c);
    c->numa_node = node_of_pool(c);
    c->node_is_asked_for = c->config->pool_numa_node >= 0;
    return KVS_OK;
}

core_device *core_device_of(core *c, const region *g)
{
    return &c->devices[g->device];
}

kvs_status core_create_on(core **ret, const config *cfg, device *const *devs, uint32_t n_devs, work_sink sink,
                          persist *memory, uint64_t now_us, kvs_err *err)
{
    core *c = calloc(1, sizeof(*c));
    kvs_status s;

    if (!c)
        return kvs_fail(err, KVS_E_NO_MEMORY, "core: out of memory");
    c->config = cfg;
    c->memory = memory;
    c->sink = sink;
    c->now_us = c->start_us = now_us;
    c->client_fds = process_client_fds();
    c->lease_due_us = c->held_due_us = UINT64_MAX;
    c->next_region = 1;
    c->next_conn_id = 1;
    s = check_node(cfg, err);
    if (s == KVS_OK)
        s = take_devices(c, devs, n_devs, err);
    if (s == KVS_OK)
        s = make_random(c->boot_id, sizeof(c->boot_id), err);
    if (s == KVS_OK)
        s = make_random(&c->seed, sizeof(c->seed), err);
    if (s == KVS_OK)
        s = make_pool(c, memory, err);
    if (s == KVS_OK)
        s = make_workers(c, err);
    if (s != KVS_OK) {
        core_stop(c);
        core_destroy(c);
        return s;
    }
    limit_tenants(c);
    core_set_movers(c);
    core_log_links(c);
    c->step_due = pool_adopted(c->pool)->adopted; /* what came back may be above a quota that was lowered meanwhile */
    core_grow(c);
    *ret = c;
    return KVS_OK;
}

void core_stop(core *c)
{
    c->stopped = true;
    /* The pinner first: it may hold what a mover's job still reads only if a peer was not waited for, and
     * none is. */
    for (uint32_t i = 0; i < c->n_devices; i++) {
        core_device *d = &c->devices[i];

        if (d->load)
            mover_destroy(d->load);
        if (d->store)
            mover_destroy(d->store);
        if (d->decoder)
            decoder_destroy(d->decoder);
        d->load = d->store = NULL;
        d->decoder = NULL;
    }
    if (c->pinner)
        pinner_destroy(c->pinner);
    c->pinner = NULL;
}

void core_destroy(core *c)
{
    if (!c)
        return;
    for (uint32_t i = 0; i < c->n_pieces; i++)
        core_host(c)->ops->host_unregister(core_host(c), c->pieces[i].address, c->pieces[i].bytes);
    if (c->dir)
        directory_destroy(c->dir);
    if (c->pool)
        pool_destroy(c->pool);
    free(c->pieces);
    free(c->due);
    free(c);
}

void core_set_edge(core *c, const struct metrics_edge *e)
{
    c->edge = e;
}

/* A job that waits for a counter could wait for as long as its client likes: what has not begun is given up now. */
void core_drain(core *c)
{
    c->draining = true;
    for (peer *p = c->peers; p; p = p->next)
        peer_dismiss(p);
}

bool core_is_idle(const core *c)
{
    return c->n_requests == 0 && c->n_tasks == 0;
}

bool core_is_ready(const core *c)
{
    return c->n_pieces > 0;
}

bool core_get_growth(const core *c, uint64_t *ret_usable, uint64_t *ret_max)
{
    pool_bytes b;

    pool_get_bytes(c->pool, &b);
    *ret_usable = b.arena;
    *ret_max = b.max;
    return c->resize_due || (b.arena < b.max && !c->grow_failed);
}

bool core_has_size(const core *c)
{
    pool_bytes b;

    pool_get_bytes(c->pool, &b); /* its max is less once a piece has failed */
    return !c->resize_due && b.arena >= pool_n_allowed(c->pool) * pool_extent_bytes(c->pool);
}

void core_set_old_config(core *c, const char *why)
{
    c->old_config = why != NULL;
    if (why != NULL)
        (void)kvs_fail(&c->reload_err, KVS_E_CONFIG, "%s", why);
}

kvs_status core_start_failure(const core *c, kvs_err *err)
{
    if (!c->grow_failed || c->n_pieces > 0)
        return KVS_OK;
    return kvs_fail(err, c->grow_err.status, "pool.max_bytes: not even the first %" PRIu64 " bytes of %lld: %s",
                    c->growing.bytes, (long long)c->config->pool_max_bytes, c->grow_err.msg);
}

kvs_status core_lost(const core *c)
{
    return c->lost;
}

void core_note_status(core *c, kvs_status s)
{
    if (s != KVS_E_DEVICE_LOST || c->lost != KVS_OK)
        return;
    c->lost = KVS_E_DEVICE_LOST;
    log_event(LOG_LEVEL_ERROR, "device_lost", " device=%s devices=%u requests=%u", c->devices[0].dev->ops->name,
              c->n_devices, c->n_requests);
}

void core_task(core *c, pinner_task *t, bool urgent)
{
    if (!c->stopped) {
        pinner_submit(c->pinner, t, urgent);
        return;
    }
    t->run(t);
    c->sink.post(c->sink.ud, &t->work);
}

/* Keys of one request: what fits a body of STORE, the widest item. */
uint32_t core_max_keys(const core *c)
{
    return (uint32_t)(((uint64_t)c->config->max_body_bytes - WIRE_store_req_BYTES) /
                      (WIRE_KEY_BYTES + WIRE_slot_ref_BYTES));
}

/* ---- time ---- */

uint64_t core_next_due(const core *c)
{
    uint64_t due = c->lease_due_us;

    if (c->step_due || c->n_sweeps > 0)
        return c->now_us;
    if (c->n_due > 0 && c->due[0]->deadline_us < due)
        due = c->due[0]->deadline_us;
    return c->held_due_us < due ? c->held_due_us : due;
}

uint64_t core_tick(core *c, uint64_t now_us)
{
    c->now_us = now_us;
    if (c->held_due_us <= now_us)
        load_twin_tick(c); /* first: one that is free by now is not overdue */
    core_due_run(c);
    if (c->lease_due_us <= now_us)
        c->lease_due_us = directory_expire(c->dir, now_us);
    core_sweep_step(c);
    if (c->step_due)
        c->step_due = directory_step(c->dir);
    core_rest(c);
    return core_next_due(c);
}
