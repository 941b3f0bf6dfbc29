#include "daemon/core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/json.h"
#include "daemon/metrics_text.h"
#include "daemon/report.h"
#include "proto/backend.h"

/* The JSON texts of STATUS.  Numbers are whole unless the key says otherwise; ratios are null at 0/0. */

/* ---- summary ---- */

static void put_adoption(const pool_adoption *a, json_writer *w)
{
    json_put_u64(w, "lives", a->boots);
    json_put_bool(w, "warm", a->adopted);
    json_put_string(w, "table_refused", a->why);
    json_put_u64(w, "adopted_unfinished", a->freed);
    json_put_u64(w, "adopted_torn", a->torn);
    json_put_u64(w, "adopted_no_checksum", a->no_sum);
}

static void put_pool(const core *c, json_writer *w)
{
    pool_bytes b;

    pool_get_bytes(c->pool, &b);
    json_begin_object(w, "pool");
    json_put_u64(w, "max_bytes", b.max);
    json_put_u64(w, "reserved_bytes", pool_reserved(c->pool));
    json_put_u64(w, "giving_up_bytes", b.giving_up);
    json_put_u64(w, "arena_bytes", b.arena);
    json_put_u64(w, "unassigned_bytes", b.unassigned);
    json_put_u64(w, "waste_bytes", b.waste);
    json_put_u64(w, "free_bytes", b.free);
    json_put_u64(w, "writing_bytes", b.writing);
    json_put_u64(w, "ready_bytes", b.ready);
    json_put_u64(w, "draining_bytes", b.draining);
    json_put_u64(w, "quarantined_bytes", b.quarantined);
    json_put_u64(w, "extent_bytes", pool_extent_bytes(c->pool));
    json_put_u64(w, "metadata_bytes", pool_metadata_bytes(c->pool));
    json_put_u64(w, "pieces_usable", c->n_pieces);
    json_put_bool(w, "growing", c->is_growing);
    json_put_bool(w, "piece_failed", c->grow_failed);
    put_adoption(pool_adopted(c->pool), w);
    json_end(w);
}

static void put_layouts(const core *c, json_writer *w)
{
    json_begin_array(w, "layouts");
    for (uint32_t i = 0; i < pool_n_layouts(c->pool); i++) {
        pool_layout_info l;

        pool_layout_get(c->pool, i, &l);
        json_begin_object(w, NULL);
        json_put_u64(w, "slot_bytes", l.slot_bytes);
        json_put_u64(w, "extents", l.n_extents);
        json_put_u64(w, "slots", l.n_slots);
        json_put_u64(w, "free", l.n_free);
        json_put_u64(w, "writing", l.n_writing);
        json_put_u64(w, "ready", l.n_ready);
        json_put_u64(w, "draining", l.n_draining);
        json_put_u64(w, "quarantined", l.n_quarantined);
        json_put_u64(w, "cap", l.cap);
        json_end(w);
    }
    json_end(w);
}

static void put_directory(const core *c, json_writer *w)
{
    directory_stats d;

    directory_get_stats(c->dir, c->now_us, &d);
    json_begin_object(w, "directory");
    json_put_u64(w, "namespaces", directory_n_namespaces(c->dir));
    json_put_u64(w, "ready", d.n_ready);
    json_put_u64(w, "pinned", d.n_pinned);
    json_put_u64(w, "leased", d.n_leased);
    json_put_u64(w, "held", d.n_held);
    json_put_u64(w, "leases", d.n_leases);
    json_put_u64(w, "leased_bytes", d.leased_bytes);
    json_put_u64(w, "pinned_bytes", d.pinned_bytes);
    json_put_u64(w, "evictable", d.evictable);
    json_put_u64(w, "hits", d.hits);
    json_put_u64(w, "misses", d.misses);
    json_put_double(w, "hit_rate", (double)d.hits / (double)(d.hits + d.misses)); /* 0/0: null */
    json_put_u64(w, "stored", d.stored);
    json_put_u64(w, "exists", d.exists);
    json_put_u64(w, "evicted", d.evicted);
    json_put_u64(w, "dropped", d.dropped);
    json_put_u64(w, "rebound", d.rebound);
    json_put_u64(w, "no_space", d.no_space);
    json_put_u64(w, "adopted", d.adopted);
    json_put_u64(w, "refused", d.refused);
    json_put_u64(w, "unverified", d.unverified);
    json_put_u64(w, "oldest_lease_us", d.oldest_lease_us);
    json_put_u64(w, "metadata_bytes", d.metadata_bytes);
    json_end(w);
}

static void put_mover(const mover_stats *s, const char *name, json_writer *w)
{
    json_begin_object(w, name);
    json_put_u64(w, "jobs", s->jobs);
    json_put_u64(w, "blocks", s->blocks);
    json_put_u64(w, "bytes", s->bytes);
    json_put_double(w, "gb", (double)s->bytes / 1e9);
    json_put_u64(w, "kernel_bytes", s->kernel_bytes);
    json_put_u64(w, "device_sum_bytes", s->device_sum_bytes);
    json_put_u64(w, "exchange_bytes", s->path[MOVER_EXCHANGE].bytes);
    json_put_u64(w, "exchange_failed", s->exchange_failed);
    json_put_u64(w, "busy_us", s->busy_us);
    json_put_u64(w, "failed", s->failed);
    json_put_u64(w, "queued", s->queued);
    json_put_u64(w, "oldest_us", s->oldest_us);
    json_end(w);
}

static void put_calibration(const core *c, const core_device *d, json_writer *w)
{
    const calibration *x = &d->calibration;

    json_begin_object(w, "calibration");
    json_put_string(w, "path", c->config->mover_path);
    json_put_string(w, "decides", calibration_source(x, c->config, d->dev));
    json_put_string(w, "why_not_table", x->why);
    if (x->is_measured) {
        json_begin_object(w, "table");
        copy_table_put(&x->table, w);
        json_end(w);
    } else {
        json_put_null(w, "table");
    }
    json_end(w);
}

static void put_work(const metrics_work *x, json_writer *w)
{
    const decoder_stats *s = &x->compute;

    put_mover(&x->load, "load", w);
    put_mover(&x->store, "store", w);
    json_begin_object(w, "decode");
    json_put_u64(w, "jobs", s->jobs);
    json_put_u64(w, "calls", s->calls);
    json_put_u64(w, "busy_us", s->busy_us);
    json_put_u64(w, "failed", s->failed);
    json_put_u64(w, "queued", s->queued);
    json_put_u64(w, "oldest_us", s->oldest_us);
    json_end(w);
}

void status_put_limits(const config *cfg, json_writer *w)
{
    json_begin_object(w, "limits");
    json_put_i64(w, "max_clients", cfg->max_clients);
    json_put_i64(w, "max_body_bytes", cfg->max_body_bytes);
    json_put_i64(w, "credit_requests", cfg->credit_requests);
    json_put_i64(w, "memory_bytes", cfg->memory_bytes);
    json_put_i64(w, "credit_bytes", cfg->credit_bytes);
    json_put_i64(w, "max_region_bytes", cfg->device_max_region_bytes);
    json_put_i64(w, "max_import_bytes", cfg->device_max_import_bytes);
    json_put_i64(w, "lease_max_ms", cfg->lease_max_ms);
    json_put_i64(w, "lease_max_percent", cfg->lease_max_percent);
    json_end(w);
}

void status_put_health(const core *c, json_writer *w)
{
    static const char *const names[] = {"ok", "starting", "degraded", "draining"};
    char why[REPORT_BYTES];
    uint32_t reasons = 0;

    json_put_string(w, "health", names[core_health(c, &reasons)]);
    json_put_u64(w, "health_reasons", reasons);
    report_reasons(why, sizeof why, reasons);
    json_put_string(w, "health_why", why);
}

static void put_about(const device_about *a, json_writer *w)
{
    json_put_string(w, "device_name", a->name);
    json_put_hex(w, "device_uuid", a->uuid, sizeof(a->uuid));
    json_put_u64(w, "device_bytes", a->total_bytes);
    json_put_u64(w, "device_idle_bytes", a->idle_bytes);
}

static uint64_t region_bytes_of(const core *c, uint32_t i)
{
    uint64_t bytes = 0;

    for (const region *g = c->regions; g; g = g->next)
        bytes += g->device == i && !g->imported ? g->bytes : 0;
    return bytes;
}

/* With which others LOADs are shared. */
static void put_exchanges(const core *c, uint32_t i, json_writer *w)
{
    json_begin_array(w, "exchange");
    for (uint32_t j = 0; j < c->n_devices; j++) {
        const exchange *x = &c->exchanges[i][j];

        if (i == j)
            continue;
        json_begin_object(w, NULL);
        json_put_u64(w, "device", j);
        json_put_bool(w, "on", x->on);
        json_put_double(w, "gbs", x->gbs);
        json_put_string(w, "why_not", x->why);
        json_end(w);
    }
    json_end(w);
}

/* Each device by its number, which REGION_CREATE and the like take. */
static void put_devices(const core *c, json_writer *w)
{
    json_begin_array(w, "devices");
    for (uint32_t i = 0; i < c->n_devices; i++) {
        metrics_work x;

        core_get_work(c, i, &x);
        json_begin_object(w, NULL);
        json_put_u64(w, "device", i);
        json_put_string(w, "name", c->devices[i].name);
        put_about(&c->devices[i].about, w);
        json_put_u64(w, "region_bytes", region_bytes_of(c, i));
        put_work(&x, w);
        put_calibration(c, &c->devices[i], w);
        put_exchanges(c, i, w);
        json_end(w);
    }
    json_end(w);
}

static void put_summary(const core *c, json_writer *w)
{
    metrics_work all;

    json_put_string(w, "version", KVS_VERSION);
    json_put_hex(w, "boot_id", c->boot_id, sizeof(c->boot_id));
    json_put_u64(w, "uptime_us", c->now_us - c->start_us);
    json_put_i64(w, "pid", getpid());
    json_put_string(w, "device", c->devices[0].dev->ops->name);
    put_about(&c->devices[0].about, w);
    status_put_health(c, w);
    put_pool(c, w);
    put_layouts(c, w);
    put_directory(c, w);
    core_get_all_work(c, &all);
    put_work(&all, w);
    put_devices(c, w);
    json_put_u64(w, "regions", c->n_regions);
    json_put_u64(w, "region_bytes", c->region_bytes);
    json_put_u64(w, "clients", c->n_clients);
    json_put_u64(w, "admins", c->n_admins);
    json_put_u64(w, "in_flight", c->n_requests);
    json_put_u64(w, "request_bytes", c->request_bytes);
    json_put_u64(w, "answered", c->counts.answered);
    json_put_bool(w, "drained", c->paused);
    json_put_u64(w, "reloads", c->n_reloads);
    json_put_u64(w, "reloads_failed", c->n_reloads_failed);
    if (c->reload_err.status != KVS_OK)
        json_put_string(w, "reload_error", c->reload_err.msg);
    else
        json_put_null(w, "reload_error");
    status_put_limits(c->config, w);
}

/* ---- clients ---- */

/* Whose kernels take an engine region's strides, and on whose word. */
static void put_backend(const region *g, json_writer *w)
{
    const char *name = kvs_backend_name(g->backend & ~KVS_BACKEND_OVERRIDE);

    if (name)
        json_put_string(w, "backend", name);
    else
        json_put_null(w, "backend");
    json_put_bool(w, "backend_override", (g->backend & KVS_BACKEND_OVERRIDE) != 0);
}

static void put_seats(const peer *p, json_writer *w)
{
    json_begin_array(w, "regions");
    for (const region_seat *s = p->seats; s; s = s->next) {
        const region *g = s->region;

        json_begin_object(w, NULL);
        json_put_u64(w, "region", g->id);
        json_put_string(w, "kind", g->imported ? "imported" : g->map ? "slots" : "scratch");
        json_put_u64(w, "bytes", g->bytes);
        json_put_u64(w, "slots", g->n_slots);
        json_put_u64(w, "free", g->n_free);
        json_put_u64(w, "cached", g->n_cached);
        put_backend(g, w);
        json_put_u64(w, "private", s->n_private);
        json_put_u64(w, "held", s->n_held);
        json_end(w);
    }
    json_end(w);
}

static void put_client(const core *c, const peer *p, json_writer *w)
{
    json_begin_object(w, NULL);
    json_put_u64(w, "conn_id", p->conn_id);
    json_put_string(w, "name", (const char *)p->name);
    json_put_u64(w, "uid", p->info.uid);
    json_put_i64(w, "pid", p->info.pid);
    json_put_string(w, "tenant", tenant_name(c->config, p->tenant));
    json_put_bool(w, "leaving", p->gone);
    json_put_u64(w, "in_flight", p->n_in_flight);
    json_put_u64(w, "bytes_in_flight", p->bytes_in_flight);
    json_put_u64(w, "leases", directory_n_leases(c->dir, p->conn_id));
    json_put_u64(w, "out_bytes", p->gone ? 0 : p->ops->out_bytes(p->ud));
    json_put_u64(w, "import_bytes", p->import_bytes);
    put_seats(p, w);
    json_end(w);
}

static void put_clients(const core *c, json_writer *w)
{
    json_begin_array(w, "clients");
    for (const peer *p = c->peers; p; p = p->next)
        put_client(c, p, w);
    json_end(w);
}

/* ---- leases, keys, namespaces ---- */

typedef struct lease_list {
    const config *config;
    json_writer *w;
} lease_list;

static void put_lease(void *ud, const directory_lease_info *l)
{
    lease_list *list = ud;
    json_writer *w = list->w;

    json_begin_object(w, NULL);
    json_put_hex(w, "lease", l->id, sizeof(l->id));
    json_put_u64(w, "conn_id", l->owner);
    json_put_string(w, "tenant", tenant_name(list->config, l->tenant));
    json_put_u64(w, "blocks", l->n_leased);
    json_put_u64(w, "namespaces", l->n_ns);
    json_put_u64(w, "loads_left", l->loads_left);
    json_put_u64(w, "bytes", l->bytes);
    json_put_u64(w, "age_us", l->age_us);
    json_put_u64(w, "left_us", l->left_us);
    json_end(w);
}

static void put_key(void *ud, const directory_key_info *k)
{
    static const char *const states[] = {"free", "writing", "ready", "draining", "quarantined"};
    json_writer *w = ud;
    char checksum[17];

    (void)snprintf(checksum, sizeof(checksum), "%016llx", (unsigned long long)k->checksum);
    json_begin_object(w, NULL);
    json_put_hex(w, "key", k->key, sizeof(k->key));
    json_put_u64(w, "ns", k->ns);
    json_put_u64(w, "depth", k->depth);
    json_put_string(w, "state", k->state < 5 ? states[k->state] : "unknown");
    json_put_u64(w, "slot", k->slot);
    json_put_u64(w, "gen", k->gen);
    json_put_u64(w, "holds", k->holds);
    json_put_u64(w, "leases", k->leases);
    json_put_bool(w, "pinned", k->pinned);
    json_put_string(w, "checksum", checksum); /* 64 bits do not fit a JSON number */
    json_end(w);
}

static void put_keys(const core *c, const wire_status_req *q, json_writer *w)
{
    uint32_t limit = q->limit == 0 || q->limit > CORE_MAX_PAGE ? CORE_MAX_PAGE : q->limit;
    uint64_t next;

    json_begin_array(w, "keys");
    next = directory_each_key(c->dir, q->ns, q->cursor, limit, put_key, w);
    json_end(w);
    if (next == UINT64_MAX)
        json_put_null(w, "next");
    else
        json_put_u64(w, "next", next);
}

/* "61 x mla_bf16" or, of mixed planes, each format once with its count. */
static void put_formats(const kvs_namespace *n, json_writer *w)
{
    uint32_t count[16] = {0};

    for (uint32_t p = 0; p < n->n_planes; p++)
        if (n->planes[p].format < 16)
            count[n->planes[p].format]++;
    json_begin_object(w, "formats");
    for (uint32_t f = 0; f < 16; f++)
        if (count[f] > 0)
            json_put_u64(w, kvs_format_name(f), count[f]);
    json_end(w);
}

static void put_namespace(const config *cfg, uint32_t id, const directory_ns *n, json_writer *w)
{
    json_begin_object(w, NULL);
    json_put_u64(w, "ns", id);
    json_put_string(w, "tenant", tenant_name(cfg, n->tenant));
    json_put_string(w, "model", n->desc.model);
    json_put_string(w, "weights", n->desc.weights);
    json_put_u64(w, "tokens_per_block", n->desc.tokens_per_block);
    json_put_u64(w, "planes", n->desc.n_planes);
    put_formats(&n->desc, w);
    json_put_u64(w, "slot_bytes", n->slot_bytes);
    json_put_u64(w, "layout", n->layout);
    json_put_hex(w, "digest", n->digest, sizeof(n->digest));
    json_put_u64(w, "ready", n->n_ready);
    json_end(w);
}

static void put_namespaces(const core *c, json_writer *w)
{
    json_begin_array(w, "namespaces");
    for (uint32_t i = 0; i < directory_n_namespaces(c->dir); i++) {
        const directory_ns *n = directory_namespace(c->dir, i);

        if (n && !n->gone)
            put_namespace(c->config, i, n, w);
    }
    json_end(w);
}

/* ---- fsck ---- */

static void put_fsck(const core *c, json_writer *w)
{
    kvs_err err = {0};
    pool_bytes b;
    kvs_status s = directory_check(c->dir, &err);

    for (const region *g = c->regions; s == KVS_OK && g; g = g->next)
        s = region_check(g, &err);
    pool_get_bytes(c->pool, &b);
    json_put_bool(w, "ok", s == KVS_OK);
    if (s == KVS_OK)
        json_put_null(w, "problem");
    else
        json_put_string(w, "problem", err.msg);
    json_put_u64(w, "sum", b.unassigned + b.waste + b.free + b.writing + b.ready + b.draining + b.quarantined);
    put_pool(c, w);
    put_layouts(c, w);
    put_directory(c, w);
}

static void put_metrics(const core *c, json_writer *w)
{
    metrics_snapshot *s = calloc(1, sizeof(*s));

    if (!s) { /* an open container: json_text gives NULL, and the request is refused for want of memory */
        json_begin_object(w, NULL);
        return;
    }
    metrics_fill(c, c->now_us, s);
    metrics_json(s, w);
    free(s);
}

void status_text(const core *c, const wire_status_req *q, json_writer *w)
{
    lease_list list = {c->config, w};

    if (q->section == WIRE_SECTION_METRICS) {
        put_metrics(c, w);
        return;
    }
    json_begin_object(w, NULL);
    switch ((enum wire_section)q->section) {
    case WIRE_SECTION_SUMMARY:
        put_summary(c, w);
        break;
    case WIRE_SECTION_CLIENTS:
        put_clients(c, w);
        break;
    case WIRE_SECTION_LEASES:
        json_begin_array(w, "leases");
        directory_each_lease(c->dir, c->now_us, put_lease, &list);
        json_end(w);
        break;
    case WIRE_SECTION_KEYS:
        put_keys(c, q, w);
        break;
    case WIRE_SECTION_NAMESPACES:
        put_namespaces(c, w);
        break;
    case WIRE_SECTION_FSCK:
        put_fsck(c, w);
        break;
    case WIRE_SECTION_METRICS:
    case WIRE_SECTION_TENANTS:
        tenants_text(c, w);
        break;
    }
    json_end(w);
}
