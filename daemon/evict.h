#ifndef KVS_DAEMON_EVICT_H
#define KVS_DAEMON_EVICT_H

/* Eviction policy behind four functions.
 *
 * Knows slots as numbers, layouts as numbers, depth.  Does not know keys, bytes, leases.  Loop thread only.
 * The directory calls insert / touch / remove; victim only proposes, and the directory asks again with the next candidate
 * when a slot is held. */

#include <stdint.h>

#include "daemon/pool.h"

typedef struct evict evict;

typedef struct evict_ops {
    const char *name;
    kvs_status (*create)(evict **ret, uint32_t max_rows, uint32_t n_layouts);
    void (*destroy)(evict *e);
    /* A block became resident / was used.  Calls come deepest block of a chain first, so that its head is the last. */
    void (*insert)(evict *e, uint32_t layout, pool_slot s, uint64_t stamp);
    void (*touch)(evict *e, uint32_t layout, pool_slot s, uint64_t stamp);
    void (*remove)(evict *e, uint32_t layout, pool_slot s);
    /* The best victim of the layout after `after` in the policy's order (POOL_NONE: the first); POOL_NONE: no more.
     * ret_stamp: its last use, so that layouts can be compared. */
    pool_slot (*victim)(const evict *e, uint32_t layout, pool_slot after, uint64_t *ret_stamp);
    uint64_t (*bytes)(const evict *e); /* resident bookkeeping */
} evict_ops;

extern const evict_ops evict_lru;

#endif
