#ifndef KVS_CONFIG_USERS_H
#define KVS_CONFIG_USERS_H

/* Users by name: the numbers that /etc/passwd gives them.
 *
 * Knows the format of that file.  Does not know NSS, and so no users of directory services: to ask one may take for ever,
 * and a reload is on the loop's thread.  Any thread; keeps nothing.  Internal to config/. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

/* E_CONFIG: there is no such user there, or no such file; err says what to write instead. */
kvs_status users_find(const char *name, uint32_t *ret, kvs_err *err);

#endif
