#include "daemon/core.h"

#include <stdio.h>
#include <string.h>

#include "daemon/beat.h"
#include "daemon/log.h"

static void put_layout(metrics_layout *row, const pool_layout_info *l)
{
    const uint64_t slots[METRICS_SLOT_STATES] = {l->n_free, l->n_writing, l->n_ready, l->n_draining, l->n_quarantined};

    for (uint32_t i = 0; i < METRICS_SLOT_STATES; i++) {
        row->slots[i] += slots[i];
        row->bytes[i] += slots[i] * l->slot_bytes;
    }
}

static void put_layouts(const core *c, metrics_snapshot *s)
{
    uint32_t n = pool_n_layouts(c->pool);

    s->n_layouts = n < METRICS_LAYOUTS ? n : METRICS_LAYOUTS + (n > METRICS_LAYOUTS);
    for (uint32_t i = 0; i < s->n_layouts; i++)
        s->layouts[i] = (metrics_layout){.id = i < METRICS_LAYOUTS ? i : POOL_NONE};
    for (uint32_t i = 0; i < n; i++) {
        pool_layout_info l;

        pool_layout_get(c->pool, i, &l);
        put_layout(&s->layouts[i < METRICS_LAYOUTS ? i : METRICS_LAYOUTS], &l);
    }
}

/* The tenant's row, the one of "other" if there are too many. */
static metrics_tenant *row_of(const core *c, metrics_snapshot *s, uint32_t tenant)
{
    metrics_tenant *row = s->tenants;

    while (row < s->tenants + s->n_tenants && (row->id != tenant || row == s->tenants + METRICS_TENANTS))
        row++;
    if (row < s->tenants + s->n_tenants)
        return row;
    if (s->n_tenants > METRICS_TENANTS)
        return s->tenants + METRICS_TENANTS;
    *row = (metrics_tenant){.id = tenant};
    (void)snprintf(row->name, sizeof row->name, "%s",
                   s->n_tenants < METRICS_TENANTS ? tenant_name(c->config, tenant) : "other");
    s->n_tenants++;
    return row;
}

static void put_namespace(metrics_tenant *t, const directory_ns *n)
{
    t->namespaces += !n->gone;
    t->ready_blocks += n->n_ready;
    t->ready_bytes += n->n_ready * n->slot_bytes;
    t->leased_bytes += n->n_leased * n->slot_bytes;
    t->pinned_bytes += n->n_pinned * n->slot_bytes;
    t->counts.hits += n->counts.hits;
    t->counts.misses += n->counts.misses;
    t->counts.stored += n->counts.stored;
    t->counts.adopted += n->counts.adopted;
    t->counts.exists += n->counts.exists;
    t->counts.no_space += n->counts.no_space;
    t->counts.evicted += n->counts.evicted;
    t->counts.dropped += n->counts.dropped;
    t->counts.rebound += n->counts.rebound;
}

static void put_account(const core *c, uint32_t tenant, metrics_tenant *t)
{
    directory_tenant d;

    directory_get_tenant(c->dir, tenant, &d);
    t->used_bytes += d.used_bytes;
    t->for_others += d.for_others;
    t->quota_bytes += (uint64_t)c->config->tenants[tenant].quota_bytes;
    t->floor_bytes += (uint64_t)c->config->tenants[tenant].floor_bytes;
    t->clients += c->tenants[tenant].n_clients;
}

static void put_tenants(const core *c, metrics_snapshot *s)
{
    s->n_tenants = 0;
    for (uint32_t i = 0; i < c->config->n_tenants; i++)
        put_account(c, i, row_of(c, s, i));
    for (uint32_t i = 0; i < s->n_namespaces; i++) {
        const directory_ns *n = directory_namespace(c->dir, i);

        if (n)
            put_namespace(row_of(c, s, n->tenant), n);
    }
}

static void put_workers(const core *c, metrics_snapshot *s)
{
    s->n_devices = c->n_devices;
    for (uint32_t i = 0; i < c->n_devices; i++) {
        memcpy(s->devices[i].name, c->devices[i].name, sizeof(s->devices[i].name));
        core_get_work(c, i, &s->devices[i].work);
    }
    core_get_all_work(c, &s->work);
}

void metrics_fill(const core *c, uint64_t now_us, metrics_snapshot *s)
{
    s->taken_us = now_us;
    s->uptime_us = now_us - c->start_us;
    memcpy(s->boot_id, c->boot_id, sizeof(s->boot_id));
    (void)snprintf(s->device, sizeof(s->device), "%s", c->devices[0].dev->ops->name);
    s->health = core_health(c, &s->reasons);
    s->running_us = beat_oldest(BEAT_RUNNING).us;
    s->in_call_us = beat_oldest(BEAT_IN_CALL).us;
    s->draining = c->draining || c->paused; /* the end, or the operator: either way clients are turned down */
    s->ready = core_is_ready(c) && !s->draining && c->lost == KVS_OK;
    s->device_lost = c->lost != KVS_OK;
    s->growing = c->is_growing;
    s->piece_failed = c->grow_failed;
    s->n_pieces = c->n_pieces;
    s->n_namespaces = directory_n_namespaces(c->dir);
    s->n_regions = c->n_regions;
    s->n_clients = c->n_clients;
    s->n_admins = c->n_admins;
    s->n_requests = c->n_requests;
    s->request_bytes = c->request_bytes;
    s->region_bytes = c->region_bytes;
    s->max_region_bytes = (uint64_t)c->config->device_max_region_bytes;
    s->import_bytes = c->import_bytes;
    pool_get_bytes(c->pool, &s->pool);
    directory_get_stats(c->dir, now_us, &s->dir);
    s->counts = c->counts;
    if (c->edge)
        s->edge = *c->edge;
    else
        metrics_edge_init(&s->edge);
    put_workers(c, s);
    put_layouts(c, s);
    put_tenants(c, s);
    log_get_counts(s->log_lines, &s->log_left_out);
    metrics_check(s);
}
