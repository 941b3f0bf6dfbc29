#ifndef KVS_DAEMON_TENANT_H
#define KVS_DAEMON_TENANT_H

/* Tenant: who pays and who may.  The listening socket decides it, a client never names it.
 *
 * Knows tenants' numbers, names and caps.  Does not know connections, keys or ops.  Any thread; plain values.
 *
 * The clients' socket is tenant 0, "default".  The admin socket is no tenant: it owns nothing and may name
 * everything. */

#include <stdbool.h>
#include <stdint.h>

#include "config/config.h"

enum { TENANT_DEFAULT = 0 };
#define TENANT_ADMIN UINT32_C(0xffffffff) /* "everybody's" where the directory asks for a tenant */

const char *tenant_name(uint32_t tenant);
/* The tenant of an earlier life's name; false: there is none of that name any more. */
bool tenant_find(const config *c, const char *name, uint32_t *ret);

/* May a peer of `tenant` name what belongs to `owner`? */
bool tenant_may(uint32_t tenant, uint32_t owner);

/* Bytes that all leases of the tenant together may hold, of a pool of `pool_bytes`. */
uint64_t tenant_lease_bytes(const config *c, uint32_t tenant, uint64_t pool_bytes);

#endif
