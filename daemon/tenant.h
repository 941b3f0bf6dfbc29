#ifndef KVS_DAEMON_TENANT_H
#define KVS_DAEMON_TENANT_H

/* Tenant: who pays and who may.  The listening socket decides it, a client never names it.
 *
 * Knows tenants' numbers, names and limits as the configuration has them.  Does not know connections, keys or ops.
 * Any thread; plain values.
 *
 * A tenant's number is its place in config.tenants; 0 is "default", the clients of socket.path.  Numbers are this
 * process's own: what outlives it names tenants by their names.  The admin socket is no tenant: it owns nothing and may
 * name everything. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "config/config.h"

enum { TENANT_DEFAULT = 0 };
#define TENANT_ADMIN UINT32_C(0xffffffff) /* "everybody's" where the directory asks for a tenant */

const char *tenant_name(const config *c, uint32_t tenant);
/* The tenant of an earlier life's name; false: there is none of that name any more. */
bool tenant_find(const config *c, const char *name, uint32_t *ret);

/* May a peer of `tenant` name what belongs to `owner`? */
bool tenant_may(uint32_t tenant, uint32_t owner);

/* Has a reload taken it out?  Nobody comes in any more. */
bool tenant_is_gone(const config *c, uint32_t tenant);
/* May this user come in by the tenant's socket?  Without a list the file mode alone decides. */
bool tenant_lets_in(const config *c, uint32_t tenant, uid_t uid);

/* May its clients ask for ops of this group (enum config_ops; 0: an op that everybody may)? */
bool tenant_may_ask(const config *c, uint32_t tenant, uint32_t group);

/* Bytes that all leases of the tenant together may hold, of a pool of `pool_bytes`. */
uint64_t tenant_lease_bytes(const config *c, uint32_t tenant, uint64_t pool_bytes);

#endif
