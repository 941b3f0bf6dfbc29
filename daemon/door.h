#ifndef KVS_DAEMON_DOOR_H
#define KVS_DAEMON_DOOR_H

/* Door: who may come in by which listening socket.
 *
 * Knows users, tenants and the operator.  Does not know sockets, places or requests.  Any thread; plain values. */

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "config/config.h"

typedef struct door {
    bool is_admin;   /* the operator's; else a tenant's */
    uint32_t tenant; /* of those who come in here; the admin socket has none */
} door;

/* What the kernel says of users that do not exist in this user namespace. */
uid_t door_overflow_uid(void);

/* NULL, or why this user may not come in: a word for the log, and a text for the peer in ret_text, cut to `cap` bytes. */
const char *door_refuses(const config *c, door d, uid_t uid, uid_t overflow_uid, char *ret_text, size_t cap);

#endif
