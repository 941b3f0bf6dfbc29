#include "daemon/core.h"

#include "config/json.h"

/* Tenants in STATUS: all of them for the operator, one for its own clients. */

static void put_limit(json_writer *w, const char *key, int64_t bytes)
{
    if (bytes == 0)
        json_put_null(w, key);
    else
        json_put_i64(w, key, bytes);
}

static void put_tenant(const core *c, uint32_t t, json_writer *w)
{
    const config_tenant *x = &c->config->tenants[t];
    const core_tenant *k = &c->tenants[t];
    directory_tenant d;

    directory_get_tenant(c->dir, t, &d);
    json_put_string(w, "tenant", x->name);
    json_put_u64(w, "clients", k->n_clients);
    json_put_u64(w, "used_bytes", d.used_bytes);
    put_limit(w, "quota_bytes", x->quota_bytes);
    json_put_i64(w, "floor_bytes", x->floor_bytes);
    json_put_u64(w, "pinned_bytes", d.pinned_bytes);
    json_put_u64(w, "leased_bytes", d.leased_bytes);
    json_put_u64(w, "region_bytes", k->region_bytes);
    put_limit(w, "max_region_bytes", x->region_bytes);
    json_put_u64(w, "import_bytes", k->import_bytes);
    put_limit(w, "max_import_bytes", x->import_bytes);
    json_put_i64(w, "link_share", x->link_share);
    json_put_u64(w, "namespaces", d.n_namespaces);
    json_put_u64(w, "ready", d.n_ready);
    json_put_u64(w, "leases", d.n_leases);
    json_put_u64(w, "hits", d.hits);
    json_put_u64(w, "misses", d.misses);
    json_put_u64(w, "stored", d.stored);
    json_put_u64(w, "evicted", d.evicted);
    json_put_u64(w, "no_space", d.no_space);
}

void tenants_text(const core *c, json_writer *w)
{
    json_begin_array(w, "tenants");
    for (uint32_t t = 0; t < c->config->n_tenants; t++) {
        directory_tenant d;

        directory_get_tenant(c->dir, t, &d);
        json_begin_object(w, NULL);
        put_tenant(c, t, w);
        json_put_u64(w, "evicted_for_others", d.for_others);
        json_put_string(w, "socket", t == TENANT_DEFAULT ? c->config->socket_path : c->config->tenants[t].path);
        json_put_bool(w, "removed", tenant_is_gone(c->config, t));
        json_end(w);
    }
    json_end(w);
}

void tenant_summary_text(const core *c, uint32_t tenant, json_writer *w)
{
    json_begin_object(w, NULL);
    json_put_string(w, "version", KVS_VERSION);
    json_put_hex(w, "boot_id", c->boot_id, sizeof(c->boot_id));
    json_put_u64(w, "uptime_us", c->now_us - c->start_us);
    json_put_string(w, "device", c->devices[0].dev->ops->name);
    status_put_health(c, w);
    put_tenant(c, tenant, w);
    status_put_limits(c->config, w);
    json_end(w);
}
