#include "daemon/tenant.h"

#include <string.h>

const char *tenant_name(uint32_t tenant)
{
    if (tenant == TENANT_DEFAULT)
        return "default";
    return tenant == TENANT_ADMIN ? "admin" : "unknown";
}

bool tenant_find(const config *c, const char *name, uint32_t *ret)
{
    (void)c;
    *ret = TENANT_DEFAULT;
    return strcmp(name, "default") == 0;
}

bool tenant_may(uint32_t tenant, uint32_t owner)
{
    return tenant == TENANT_ADMIN || tenant == owner;
}

uint64_t tenant_lease_bytes(const config *c, uint32_t tenant, uint64_t pool_bytes)
{
    if (tenant == TENANT_ADMIN)
        return 0;
    /* Divide first: a pool of some TiB times 100 would still fit, but nothing here should depend on that. */
    return pool_bytes / 100 * (uint64_t)c->lease_max_percent + pool_bytes % 100 * (uint64_t)c->lease_max_percent / 100;
}
