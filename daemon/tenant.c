#include "daemon/tenant.h"

const char *tenant_name(const config *c, uint32_t tenant)
{
    if (tenant < c->n_tenants)
        return c->tenants[tenant].name;
    return tenant == TENANT_ADMIN ? "admin" : "unknown";
}

bool tenant_find(const config *c, const char *name, uint32_t *ret)
{
    uint32_t t = config_find_tenant(c, name);

    if (t == CONFIG_MAX_TENANTS)
        return false;
    *ret = t;
    return true;
}

bool tenant_may(uint32_t tenant, uint32_t owner)
{
    return tenant == TENANT_ADMIN || tenant == owner;
}

bool tenant_is_gone(const config *c, uint32_t tenant)
{
    return tenant < c->n_tenants && c->tenants[tenant].gone;
}

bool tenant_lets_in(const config *c, uint32_t tenant, uid_t uid)
{
    const config_uids *u = &c->tenants[tenant].uids;

    for (uint32_t i = 0; i < u->n; i++)
        if (u->uid[i] == uid)
            return true;
    return u->n == 0;
}

bool tenant_may_ask(const config *c, uint32_t tenant, uint32_t group)
{
    return group == 0 || ((uint64_t)c->tenants[tenant].ops & group) != 0;
}

/* Divide first: a pool of some TiB times 100 would still fit, but nothing here should depend on that. */
static uint64_t percent(uint64_t bytes, int64_t n)
{
    return bytes / 100 * (uint64_t)n + bytes % 100 * (uint64_t)n / 100;
}

uint64_t tenant_lease_bytes(const config *c, uint32_t tenant, uint64_t pool_bytes)
{
    const config_tenant *t = &c->tenants[tenant < c->n_tenants ? tenant : 0];
    uint64_t quota = (uint64_t)t->quota_bytes, all, own;

    if (tenant == TENANT_ADMIN)
        return 0;
    all = percent(pool_bytes, c->lease_max_percent);
    own = percent(quota != 0 && quota < pool_bytes ? quota : pool_bytes, t->lease_max_percent);
    return own < all ? own : all;
}
