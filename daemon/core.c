#include "daemon/core.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/beat.h"
#include "daemon/log.h"
#include "kernels/host_node.h"

/* ---- deadlines: a binary heap, the earliest first; due_at is the place in it plus one ---- */

static void heap_put(core *c, size_t i, request *r)
{
    c->due[i] = r;
    r->due_at = i + 1;
}

static void heap_up(core *c, size_t i, request *r)
{
    while (i > 0 && c->due[(i - 1) / 2]->deadline_us > r->deadline_us) {
        heap_put(c, i, c->due[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    heap_put(c, i, r);
}

static void heap_down(core *c, size_t i, request *r)
{
    for (;;) {
        size_t k = 2 * i + 1;

        if (k + 1 < c->n_due && c->due[k + 1]->deadline_us < c->due[k]->deadline_us)
            k++;
        if (k >= c->n_due || c->due[k]->deadline_us >= r->deadline_us)
            break;
        heap_put(c, i, c->due[k]);
        i = k;
    }
    heap_put(c, i, r);
}

kvs_status core_due_add(core *c, request *r)
{
    if (c->n_due == c->cap_due) {
        size_t cap = c->cap_due ? c->cap_due * 2 : 64;
        request **due = realloc(c->due, cap * sizeof(request *));

        if (!due)
            return KVS_E_NO_MEMORY;
        c->due = due;
        c->cap_due = cap;
    }
    heap_up(c, c->n_due++, r);
    return KVS_OK;
}

void core_due_remove(core *c, request *r)
{
    size_t i = r->due_at;
    request *last;

    if (i == 0)
        return;
    r->due_at = 0;
    last = c->due[--c->n_due];
    if (last == r)
        return;
    heap_up(c, i - 1, last);
    heap_down(c, last->due_at - 1, last);
}

static void run_overdue(request *r)
{
    bool untouched = r->ops->stop(r, true);
    kvs_err err;

    (void)kvs_fail(&err, KVS_E_DEADLINE, "deadline: passed %s",
                   untouched ? "before anything was touched" : "while it was running; CANCEL says when it has stopped");
    r->ops->overdue(r, untouched);
    request_answer(r, KVS_E_DEADLINE, &err);
}

/* ---- the arena grows in the background ---- */

/* One registration is good for all devices. */
static device *host_of(const core *c)
{
    return c->devices[0].dev;
}

static void grow_run(pinner_task *t)
{
    core *c = (core *)(void *)((uint8_t *)t - offsetof(core, grow));
    device *dev = host_of(c);

    c->grow_err.status = kvs_host_node_place(c->growing.address, c->growing.bytes, c->numa_node, &c->grow_err);
    if (!c->node_is_asked_for) /* a container that forbids it is no fault */
        c->grow_err.status = KVS_OK;
    if (c->grow_err.status == KVS_OK)
        c->grow_err.status = dev->ops->host_register(dev, c->growing.address, c->growing.bytes, &c->grow_err);
}

static void grow_next(core *c);
static void resize_next(core *c);

static void grow_failed(core *c)
{
    core_note_status(c, c->grow_err.status);
    if (c->grow_err.status == KVS_E_NO_SPACE) /* the device sees that pages are missing, not why */
        (void)persist_room(c->memory, c->growing.bytes, &c->grow_err);
    c->grow_failed = true;
    pool_piece_failed(c->pool);
    log_event(LOG_LEVEL_ERROR, "arena_piece_failed", " bytes=%" PRIu64 " piece=%u reason=\"%s\"", c->growing.bytes,
              c->n_pieces, c->grow_err.msg);
}

static void grow_done(work *w)
{
    core *c = (core *)(void *)((uint8_t *)w - offsetof(core, grow));
    core_piece *pieces;

    c->is_growing = false;
    if (c->grow_err.status != KVS_OK) {
        grow_failed(c);
        resize_next(c);
        return;
    }
    pieces = realloc(c->pieces, (c->n_pieces + 1) * sizeof(*pieces));
    if (!pieces) {
        host_of(c)->ops->host_unregister(host_of(c), c->growing.address, c->growing.bytes);
        (void)kvs_fail(&c->grow_err, KVS_E_NO_MEMORY, "list of pieces: out of memory");
        grow_failed(c);
        return;
    }
    c->pieces = pieces;
    c->pieces[c->n_pieces++] = c->growing;
    pool_piece_usable(c->pool);
    resize_next(c);
    grow_next(c);
}

static void grow_next(core *c)
{
    if (c->stopped || c->is_growing || c->is_dropping || c->grow_failed ||
        !pool_next_piece(c->pool, &c->growing.address, &c->growing.bytes))
        return;
    c->is_growing = true;
    c->grow_err = (kvs_err){0};
    c->grow.run = grow_run;
    c->grow.work.on_done = grow_done;
    pinner_submit(c->pinner, &c->grow, false);
}

/* ---- the pool gets another size ---- */

static void drop_run(pinner_task *t)
{
    core *c = (core *)(void *)((uint8_t *)t - offsetof(core, drop));
    uint8_t *base = c->pieces[0].address; /* the first piece is the start of the arena, and is never dropped */

    host_of(c)->ops->host_unregister(host_of(c), c->dropping.address, c->dropping.bytes);
    (void)fallocate(pool_arena_fd(c->pool), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    (uint8_t *)c->dropping.address - base, (off_t)c->dropping.bytes);
}

static void drop_done(work *w)
{
    core *c = (core *)(void *)((uint8_t *)w - offsetof(core, drop));

    c->is_dropping = false;
    log_event(LOG_LEVEL_INFO, "arena_piece_dropped", " bytes=%" PRIu64 " pieces=%u", c->dropping.bytes, c->n_pieces);
    resize_next(c);
    grow_next(c);
}

/* Give back the last piece, once nothing of it is in use. */
static void drop_next(core *c)
{
    pool_bytes b;

    if (c->n_pieces < 2)
        return;
    pool_get_bytes(c->pool, &b);
    c->dropping = c->pieces[c->n_pieces - 1];
    if (!pool_drop_piece(c->pool, c->dropping.bytes, &c->dropping.address)) {
        c->shrinks = b.giving_up > 0;
        return;
    }
    c->n_pieces--;
    c->is_dropping = true;
    c->drop.run = drop_run;
    c->drop.work.on_done = drop_done;
    pinner_submit(c->pinner, &c->drop, false);
}

static void resize_next(core *c)
{
    kvs_err err;

    if (c->is_growing || c->is_dropping || c->stopped)
        return; /* what ends then comes here again */
    if (c->resize_due) {
        c->resize_due = false;
        if (pool_resize(c->pool, (uint64_t)c->config->pool_max_bytes, &err) != KVS_OK) {
            log_event(LOG_LEVEL_ERROR, "pool_not_resized", " reason=\"%s\"", err.msg); /* see core_check_config */
            return;
        }
        directory_resized(c->dir);
        c->shrinks = c->step_due = true;
    }
    if (c->shrinks)
        drop_next(c);
}

/* Smaller, it must leave the tenants what they were promised. */
static kvs_status check_floors(const core *c, const config *next, kvs_err *err)
{
    const char *names[CONFIG_MAX_TENANTS];
    uint64_t floors[CONFIG_MAX_TENANTS];

    for (uint32_t t = 0; t < next->n_tenants; t++) {
        names[t] = next->tenants[t].name;
        floors[t] = (uint64_t)next->tenants[t].floor_bytes;
    }
    return directory_check_size(c->dir, (uint64_t)next->pool_max_bytes, names, floors, err);
}

kvs_status core_check_config(const core *c, const config *next, kvs_err *err)
{
    uint64_t most = pool_reserved(c->pool), least = pool_extent_bytes(c->pool), want = (uint64_t)next->pool_max_bytes;

    if (want == (uint64_t)c->config->pool_max_bytes)
        return KVS_OK;
    if (want < least || want > most)
        return kvs_fail(err, KVS_E_CONFIG,
                        "pool.max_bytes: %" PRIu64 " bytes take a restart; %" PRIu64 "..%" PRIu64
                        " do not (an extent, and what was reserved: pool.reserve_bytes)",
                        want, least, most);
    return check_floors(c, next, err);
}

/* ---- life ---- */

static void on_event(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32])
{
    core *c = ud;
    core_event *e;

    if (c->n_watchers == 0)
        return;
    if (c->n_events == CORE_EVENT_BATCH)
        core_rest(c);
    e = &c->events[c->n_events++];
    *e = (core_event){.type = type, .cause = cause, .ns = ns, .depth = depth};
    if (key)
        memcpy(e->key, key, sizeof(e->key));
}

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
                           .on_event = on_event,
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

static void share_link(const core *c, uint32_t tenant, uint32_t share)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        mover_share(c->devices[i].load, tenant, share);
        mover_share(c->devices[i].store, tenant, share);
        decoder_share(c->devices[i].decoder, tenant, share);
    }
}

void core_present(core *c, uint32_t by)
{
    c->n_present += by;
    for (uint32_t i = 0; i < c->n_devices && !c->stopped; i++) {
        mover_alone(c->devices[i].load, c->n_present < 2);
        mover_alone(c->devices[i].store, c->n_present < 2);
    }
}

/* What the configuration and the card's table say of copies. */
static void set_mover(const core *c, const core_device *d, int dir)
{
    const copy_table *table = d->calibration.is_measured ? &d->calibration.table : NULL;
    mover_settings s = {.batch_bytes = (uint64_t)c->config->mover_batch_bytes};

    route_rules_make(&s.rules, c->config, table, dir, d->dev->ops->copies_by_kernel);
    mover_set(dir == 0 ? d->load : d->store, &s);
}

static exchange_end end_of(const core *c, uint32_t i)
{
    return (exchange_end){&c->devices[i].calibration, &c->devices[i].about};
}

/* Which devices may load the same blocks together. */
static void set_exchanges(core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        c->may_exchange[i] = false;
        for (uint32_t j = 0; j < c->n_devices; j++) {
            if (i == j)
                continue;
            exchange_decide(&c->exchanges[i][j], c->config, end_of(c, i), end_of(c, j), c->reach[i][j]);
            c->may_exchange[i] = c->may_exchange[i] || c->exchanges[i][j].on;
        }
    }
}

/* Both ways or not at all. */
static exchange_reach introduce(device *a, device *b)
{
    bool reach = a->ops->reaches && a->ops->reaches(a, b) && b->ops->reaches && b->ops->reaches(b, a);

    return reach ? EXCHANGE_REACH : EXCHANGE_OUT_OF_REACH;
}

/* Before any memory is made. */
static void introduce_devices(core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++)
        calibration_read(&c->devices[i].calibration, c->config, c->devices[i].dev);
    for (uint32_t i = 0; i < c->n_devices; i++)
        for (uint32_t j = i + 1; j < c->n_devices; j++)
            if (exchange_is_wanted(c->config, end_of(c, i), end_of(c, j)))
                c->reach[i][j] = c->reach[j][i] = introduce(c->devices[i].dev, c->devices[j].dev);
}

static void set_movers(core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        calibration_read(&c->devices[i].calibration, c->config, c->devices[i].dev);
        set_mover(c, &c->devices[i], 0);
        set_mover(c, &c->devices[i], 1);
    }
    set_exchanges(c);
}

static void log_exchanges(const core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++)
        for (uint32_t j = i + 1; j < c->n_devices; j++)
            log_event(LOG_LEVEL_INFO, "exchange", " devices=%s,%s on=%d gbs=%.1f,%.1f reason=\"%s\"",
                      c->devices[i].name, c->devices[j].name, c->exchanges[i][j].on, c->exchanges[i][j].gbs,
                      c->exchanges[j][i].gbs, c->exchanges[i][j].why);
}

static void log_calibration(const core *c)
{
    for (uint32_t i = 0; i < c->n_devices; i++) {
        const core_device *d = &c->devices[i];
        const calibration *x = &d->calibration;
        char why[2 * KVS_ERR_MSG_BYTES];

        if (d->dev->ops->copies_by_kernel)
            log_event(LOG_LEVEL_INFO, "calibration", " device=%s decides=%s date=%s reason=%s", d->name,
                      calibration_source(x, c->config, d->dev), x->is_measured ? x->table.date : "-",
                      log_quote(why, sizeof(why), x->why, strlen(x->why)));
    }
}

static void limit_tenants(core *c)
{
    for (uint32_t t = 0; t < c->config->n_tenants; t++) {
        const config_tenant *x = &c->config->tenants[t];

        directory_limit_tenant(c->dir, t, (uint64_t)x->quota_bytes, (uint64_t)x->floor_bytes);
        share_link(c, t, (uint32_t)x->link_share);
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

/* Nobody can ask for these blocks any more: they go, pinned or leased or not.  What is being copied goes when that ends. */
static void empty_gone_tenants(core *c)
{
    for (uint32_t t = 0; t < c->config->n_tenants; t++) {
        directory_reset_result r;
        directory_tenant x;

        directory_get_tenant(c->dir, t, &x);
        if (!c->config->tenants[t].gone || (x.used_bytes == 0 && x.n_leases == 0))
            continue;
        directory_reset(c->dir, t, WIRE_NONE32, true, &r);
        log_event(LOG_LEVEL_INFO, "tenant_emptied",
                  " tenant=%s blocks=%" PRIu64 " unfinished=%" PRIu64 " leases=%" PRIu64, tenant_name(c->config, t),
                  r.dropped, r.aborted, r.leases);
    }
    core_rest(c);
}

void core_configured(core *c)
{
    directory_add_tenants(c->dir, c->config->n_tenants);
    limit_tenants(c);
    set_movers(c);
    log_calibration(c);
    log_exchanges(c);
    empty_gone_tenants(c);
    c->step_due = true; /* somebody may be above a quota now */
    c->resize_due = true;
    resize_next(c);
    grow_next(c);
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
    introduce_devices(c);
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
    set_movers(c);
    log_calibration(c);
    log_exchanges(c);
    c->step_due = pool_adopted(c->pool)->adopted; /* what came back may be above a quota that was lowered meanwhile */
    grow_next(c);
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
        host_of(c)->ops->host_unregister(host_of(c), c->pieces[i].address, c->pieces[i].bytes);
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
    return b.arena < b.max && !c->grow_failed;
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

    if (c->step_due)
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
    while (c->n_due > 0 && c->due[0]->deadline_us <= now_us)
        run_overdue(c->due[0]);
    if (c->lease_due_us <= now_us)
        c->lease_due_us = directory_expire(c->dir, now_us);
    if (c->step_due)
        c->step_due = directory_step(c->dir);
    core_rest(c);
    return core_next_due(c);
}

void core_get_work(const core *c, uint32_t i, metrics_work *ret)
{
    const core_device *d = &c->devices[i];

    *ret = (metrics_work){0};
    if (d->load)
        mover_get_stats(d->load, &ret->load);
    if (d->store)
        mover_get_stats(d->store, &ret->store);
    if (d->decoder)
        decoder_get_stats(d->decoder, &ret->compute);
}

static uint64_t longest(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void add_moved(mover_stats *to, const mover_stats *s)
{
    to->jobs += s->jobs;
    to->blocks += s->blocks;
    to->bytes += s->bytes;
    to->kernel_bytes += s->kernel_bytes;
    to->exchange_failed += s->exchange_failed;
    to->busy_us += s->busy_us;
    to->failed += s->failed;
    to->queued += s->queued;
    to->oldest_us = longest(to->oldest_us, s->oldest_us);
    for (uint32_t p = 0; p < MOVER_PATHS; p++) {
        to->path[p].blocks += s->path[p].blocks;
        to->path[p].bytes += s->path[p].bytes;
        to->path[p].busy_us += s->path[p].busy_us;
    }
}

void core_get_all_work(const core *c, metrics_work *ret)
{
    *ret = (metrics_work){0};
    for (uint32_t i = 0; i < c->n_devices; i++) {
        metrics_work w;

        core_get_work(c, i, &w);
        add_moved(&ret->load, &w.load);
        add_moved(&ret->store, &w.store);
        ret->compute.jobs += w.compute.jobs;
        ret->compute.calls += w.compute.calls;
        ret->compute.busy_us += w.compute.busy_us;
        ret->compute.failed += w.compute.failed;
        ret->compute.queued += w.compute.queued;
        ret->compute.oldest_us = longest(ret->compute.oldest_us, w.compute.oldest_us);
    }
}

static bool is_stuck(const core *c)
{
    metrics_work w;

    core_get_all_work(c, &w);
    if (longest(longest(w.load.oldest_us, w.store.oldest_us), w.compute.oldest_us) > CORE_STUCK_US)
        return true;
    return beat_oldest(BEAT_IN_CALL).us > CORE_STUCK_US; /* the pinner's, too */
}

uint32_t core_health(const core *c, uint32_t *ret_reasons)
{
    uint32_t why = 0;

    why |= core_is_ready(c) ? 0 : HEALTH_NO_PIECE;
    why |= c->grow_failed ? HEALTH_PIECE_FAILED : 0;
    why |= is_stuck(c) ? HEALTH_STUCK : 0;
    why |= c->lost != KVS_OK ? HEALTH_DEVICE_LOST : 0;
    why |= c->draining || c->paused ? HEALTH_DRAINS : 0;
    why |= c->old_config ? HEALTH_OLD_CONFIG : 0;
    *ret_reasons = why;
    if (why & HEALTH_DRAINS)
        return WIRE_HEALTH_DRAINING;
    if (why & (HEALTH_PIECE_FAILED | HEALTH_STUCK | HEALTH_DEVICE_LOST | HEALTH_OLD_CONFIG))
        return WIRE_HEALTH_DEGRADED;
    return why ? WIRE_HEALTH_STARTING : WIRE_HEALTH_OK;
}

/* ---- events ---- */

static bool is_for(const peer *p, const core_event *e)
{
    const directory_ns *n;

    if (!(p->watch_mask & (UINT32_C(1) << e->type)))
        return false;
    if (p->tenant == TENANT_ADMIN)
        return true;
    n = directory_namespace(p->core->dir, e->ns);
    return n && tenant_may(p->tenant, n->tenant);
}

static reply *event_frame(const peer *p, uint32_t n)
{
    const core *c = p->core;
    size_t room = WIRE_event_BYTES + (size_t)n * WIRE_event_item_BYTES;
    reply *x = malloc(sizeof(*x) + WIRE_HEADER_BYTES + room);
    wire_event head = {.seq = p->watch_seq + 1, .lost = p->watch_lost, .n = n};
    wire_header h = {.op = WIRE_EVENT, .id = p->watch_id, .body_len = (uint32_t)room};
    wire_out o;

    if (!x)
        return NULL;
    *x = (reply){.len = WIRE_HEADER_BYTES + room};
    o = (wire_out){x->bytes + WIRE_HEADER_BYTES, 0, room, false};
    wire_header_encode(&h, x->bytes);
    wire_put_event(&o, &head);
    for (uint32_t i = 0; i < c->n_events; i++) {
        const core_event *e = &c->events[i];
        wire_event_item item = {.type = e->type, .ns = e->ns, .depth = e->depth, .cause = e->cause};

        if (!is_for(p, e))
            continue;
        memcpy(item.key, e->key, sizeof(item.key));
        wire_put_event_item(&o, &item);
    }
    return x;
}

static void send_events(peer *p)
{
    uint32_t n = 0;
    reply *x = NULL;

    for (uint32_t i = 0; i < p->core->n_events; i++)
        n += is_for(p, &p->core->events[i]);
    if (n == 0)
        return;
    if (p->ops->out_bytes(p->ud) < (uint64_t)p->core->config->out_high_bytes)
        x = event_frame(p, n);
    if (!x) {
        p->watch_lost += n;
        return;
    }
    p->watch_seq++;
    p->ops->send(p->ud, x);
}

void core_rest(core *c)
{
    if (c->shrinks)
        resize_next(c);
    if (c->n_events == 0)
        return;
    for (peer *p = c->peers; p; p = p->next)
        if (p->watch_mask && !p->gone)
            send_events(p);
    c->n_events = 0;
}
