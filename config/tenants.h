#ifndef KVS_CONFIG_TENANTS_H
#define KVS_CONFIG_TENANTS_H

/* The array `tenants`: entries of the tenant table, their rules, and what differs between two of them.
 *
 * Knows names, numbers and sums of tenants.  Does not know other sections' meaning or files.  Any thread; keeps nothing.
 * Internal to config/. */

#include "config/json.h"
#include "config/option.h"

void tenants_default(config *c); /* "default" alone */
/* The whole array takes the place of what was there.  E_CONFIG names entry and key; *c is then spoilt. */
kvs_status tenants_set(config *c, const json_node *array, kvs_err *err);
kvs_status tenants_check(const config *c, kvs_err *err);
size_t tenants_changed(const config *from, const config *to, config_on_change *on_change, void *ud);
void tenants_take_reloadable(config *live, const config *fresh);

/* May the entry have this key?  "default" has no path and mode of its own. */
bool tenant_has(const config_tenant *t, const option *o);
/* "default" as nobody has configured it: not worth an entry. */
bool tenant_is_plain(const config_tenant *t);

/* config.c: do two absolute paths spell the same name?  Empty parts and those of one dot do not count; nothing is looked up. */
bool config_same_path(const char *a, const char *b);

#endif
