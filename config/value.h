#ifndef KVS_CONFIG_VALUE_H
#define KVS_CONFIG_VALUE_H

/* One value of the file: from JSON into its field, checked against its row of the option table.
 *
 * Knows types, units and ranges, and how to name a bad value.  Does not know sections, files or rules between
 * keys.  Any thread; keeps nothing.  Internal to config/. */

#include "config/json.h"
#include "config/option.h"

/* E_CONFIG names the key, the value and what is allowed; *base is then untouched. */
kvs_status value_set(void *base, const option *o, const json_node *v, kvs_err *err);

#endif
