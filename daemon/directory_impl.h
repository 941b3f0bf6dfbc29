#ifndef KVS_DAEMON_DIRECTORY_IMPL_H
#define KVS_DAEMON_DIRECTORY_IMPL_H

/* What the files of the directory share: directory.c (namespaces, finding, reading), directory_store.c
 * (writing, making room), directory_adopt.c (the blocks of an earlier life), lease.c, residency.c (pins, drops, resets), directory_watch.c (numbers, listings,
 * check).
 *
 * Knows the same as daemon/directory.h.  Nobody else includes it.  Loop thread only.
 *
 * A slot is *busy* while it may not be evicted: writing, draining, quarantined, or ready with a hold, a lease
 * or a pin. Every ready slot that is not busy is in the policy's order.  A busy one is taken out of it when
 * it is the next in line (SLOT_PARKED), so that no search passes it twice, and goes back when it is no longer
 * busy. */

#include "daemon/directory.h"

#include <string.h>

#include "daemon/key_table.h"
#include "daemon/sparse.h"

enum {
    LEASE_MAX = 65536,      /* leases of everybody */
    LEASED_MAX = 1 << 24,   /* blocks that these name, each as often as it is named: 4 bytes and a step at the end */
    SLOT_COUNT_MAX = 65535, /* holds, and leases, of one slot */
    CHAIN_MAX = 65536,      /* ancestors that one STORE renews: a million tokens at 16 a block */
    CHAIN_LONG = 1024,      /* from so many ancestors on not every STORE renews them: see renewed_chain */
    CHAIN_PART = 16,        /* ... but one in so many of their number of blocks */
    CHAINS = 1024,          /* that are remembered; a power of two */
    EMPTY_AT_ONCE = 4096,   /* an extent with no more blocks than this is emptied within the request */
    EMPTY_STEP = 4096,      /* rows of a larger one that a step visits */
    EARLY_MAX = 16384,      /* adopted blocks without usable memory that one STORE passes in its search for victims */
    BATCH = 32,             /* keys whose memory is fetched ahead together */
};

enum slot_flags {
    SLOT_PINNED = 1,
    SLOT_DOOMED = 2,     /* writing; its key is gone, commit frees it */
    SLOT_PARKED = 4,     /* not in the policy's order */
    SLOT_UNVERIFIED = 8, /* ready or draining, adopted, never loaded */
};

typedef struct slot_info {
    uint64_t stamp; /* last use */
    uint16_t holds, leases;
    uint8_t flags;
    uint8_t reserved[3];
} slot_info;
_Static_assert(sizeof(slot_info) == 16, "part of the bytes a slot");

typedef struct extent_info {
    uint64_t last; /* last use of any block that is or was in it since it was bound */
    uint32_t n_busy, n_ready;
    bool leaving; /* closed by the directory: its blocks count in tenant_entry.leaving until it is nobody's */
} extent_info;

typedef struct ns_entry {
    directory_ns pub;
    uint8_t *canon;
    size_t canon_len;
    kvs_plane *planes;
    uint64_t n_taken;  /* slots: its blocks in whatever state */
    uint32_t n_named;  /* leases that name it */
    uint32_t n_sweeps; /* resets of it that are on their way */
    bool untold;       /* blocks went without an event, which the end of a reset will give */
} ns_entry;

typedef struct tenant_entry {
    directory_tenant pub; /* quota_bytes UINT64_MAX: none */
    uint64_t leaving;     /* part of used_bytes: in extents that are closing */
    uint64_t text_bytes;  /* of the table's room for descriptions */
    uint64_t n_named;     /* blocks in its leases, each as often as it is named */
    uint32_t n_layouts;   /* that it was the first to open */
    uint32_t n_sweeps;    /* resets of all that it has which are on their way */
} tenant_entry;

typedef struct lease {
    uint8_t id[16];
    uint64_t owner, created_us, ends_us, bytes;
    uint32_t tenant, n_ns, n_leased, loads_left;
    uint32_t heap_at;            /* place in directory.leases */
    bool dead;                   /* over for everybody, and first in the heap: directory_expire lets its blocks go */
    struct lease *next;          /* same bucket */
    struct lease *ending;        /* scratch: to be ended together */
    struct lease *next_owner;    /* same bucket of owners; only of the first one of an owner */
    struct lease *same, **link;  /* the next one of the owner, and what points to this one; NULL: it is the first */
    struct lease *older, *newer; /* all, in the order in which they were made */
    uint32_t *ns;                /* [n_ns], behind the slots */
    pool_slot slots[];           /* [n_ns][n_leased] */
} lease;

typedef struct lease_set {
    lease **heap; /* by ends_us, earliest first */
    uint32_t n, cap;
    lease **buckets; /* by id */
    lease **owners;  /* by owner, one of each */
    uint32_t n_buckets;
    lease *oldest, *newest;
    uint64_t memory;
} lease_set;

/* A long chain that a STORE has renewed.  While it grows by less than a part of itself, and not many blocks were used since,
 * all of it is as warm as it could be but for a little: the next STOREs below it leave it alone, so that a chain of n blocks
 * that comes block by block costs some n steps, and not n * n. */
typedef struct renewed_chain {
    pool_slot bottom; /* of it, with its generation */
    uint32_t gen;
    uint32_t n;     /* blocks when it was renewed */
    uint32_t added; /* below it since */
    uint64_t from;  /* stamp of the coldest then */
    uint64_t at;    /* directory.stamp then */
} renewed_chain;

/* One call of directory_admit, or its parts. */
typedef struct admission {
    uint32_t ns, layout, tenant;
    uint64_t slot_bytes;
    uint64_t base;      /* stamps from here on belong to this call */
    uint64_t kept_from; /* blocks with stamps from here on are not evicted for it; at most base */
    pool_slot top;      /* the first ancestor, or POOL_NONE */
    renewed_chain *was; /* its chain was renewed a short while ago; NULL: this call does it */
    pool_slot passed;   /* the search for victims of this layout and tenant goes on behind this one */
    bool foreign_known; /* the two below are valid */
    uint32_t foreign;   /* coldest extent of another layout, or POOL_NONE */
    uint64_t foreign_last;
    uint32_t n_chain; /* ancestors in directory.chain */
    uint32_t n_early; /* adopted blocks that the search has passed */
    bool for_quota;   /* the search is for bytes, wherever they are, and not for a slot */
    bool full;        /* no space was found once: deeper keys are not tried */
    /* the list, which is the caller's */
    uint32_t first_depth, n_keys, n_done;
    pool_slot before; /* the block before the next one */
    const uint8_t *keys;
    kvs_status *status;
    pool_slot *slot;
} admission;

struct directory {
    pool *pool;
    const evict_ops *ops;
    evict *evict;
    uint64_t hash_seed;
    void (*on_event)(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32]);
    const char *(*tenant_name)(void *ud, uint32_t tenant);
    bool (*tenant_find)(void *ud, const char *name, uint32_t *ret);
    void *ud;
    key_table table;
    sparse infos;         /* slot_info, by slot */
    extent_info *extents; /* [pool_n_extents] */
    uint32_t n_tenants, max_tenants;
    tenant_entry *tenants;       /* [max_tenants] */
    sparse shares;               /* u32, [pool_n_extents][max_tenants]: taken slots of the tenant in the extent */
    bool has_floors, over_quota; /* some tenant: has one; may be above its quota */
    ns_entry **ns;               /* [n_ns]; NULL: nobody's */
    uint32_t n_ns, cap_ns;
    uint32_t n_sweeps;  /* resets of everybody's blocks that are on their way */
    uint64_t n_charged; /* slots that were ever taken */
    lease_set leases;
    uint64_t stamp;    /* of the latest use */
    uint32_t emptying; /* extent that directory_step empties, or POOL_NONE */
    uint32_t empty_at; /* next row of it */
    uint32_t
        give_up; /* after a change of the pool's size: the next extent that directory_step looks at, or POOL_NONE */
    uint32_t give_at;      /* next row of it */
    admission admission;   /* the latest; of no use behind its end */
    pool_slot *chain;      /* [CHAIN_MAX], scratch of one admit */
    renewed_chain *chains; /* [CHAINS], by bottom */
    uint64_t ns_memory;
    /* n_ready .. evictable and the event counters are kept here; the rest is filled in by directory_get_stats
     */
    directory_stats stats;
};

static inline slot_info *info_of(const directory *d, pool_slot s)
{
    return sparse_at(&d->infos, s);
}

static inline extent_info *extent_of(const directory *d, pool_slot s)
{
    return &d->extents[pool_extent_of(d->pool, s)];
}

static inline bool info_is_busy(const slot_info *i)
{
    return i->holds != 0 || i->leases != 0 || (i->flags & SLOT_PINNED) != 0;
}

/* The policy keeps one order for each layout and tenant. */
static inline uint32_t order_of(const directory *d, uint32_t layout, uint32_t tenant)
{
    return layout * d->max_tenants + tenant;
}

static inline uint32_t tenant_of(const directory *d, uint32_t ns)
{
    return d->ns[ns]->pub.tenant;
}

static inline tenant_entry *payer_of(const directory *d, pool_slot s)
{
    return &d->tenants[tenant_of(d, pool_row_of(d->pool, s)->ns)];
}

static inline uint32_t slot_order(const directory *d, pool_slot s)
{
    return order_of(d, pool_layout_of(d->pool, s), tenant_of(d, pool_row_of(d->pool, s)->ns));
}

/* directory.c */
uint32_t directory_hash(const directory *d, uint32_t ns, const uint8_t key[32]);
pool_slot directory_find(const directory *d, uint32_t ns, const uint8_t key[32]); /* ready or writing; POOL_NONE */
/* The same for up to BATCH keys, fetching ahead. */
void directory_find_batch(const directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, pool_slot *ret);
void directory_touch(directory *d, pool_slot s, uint64_t stamp); /* stamp: larger than any before */
/* Between these two the holds, leases and pin of a ready slot may change; the end evicts a slot whose extent
 * waits for it, so it may be gone afterwards. */
bool directory_change_begin(const directory *d, pool_slot s);
void directory_change_end(directory *d, pool_slot s, bool was_busy);
/* The end, for who knows if it is busy now. */
void directory_changed(directory *d, pool_slot s, bool was_busy, bool busy);
bool directory_hold_one(directory *d, pool_slot s); /* ready; false: as many holds as can be counted */
bool directory_is_closing(const directory *d, pool_slot s);

kvs_status directory_ns_create(directory *d, ns_entry **ret, uint32_t tenant, const uint8_t *canon, size_t len,
                               kvs_err *err);
void directory_ns_destroy(ns_entry *n); /* NULL is fine */
/* Room in the list, and for a description of so many bytes. */
kvs_status directory_ns_reserve(directory *d, uint32_t number, uint32_t tenant, size_t canon_len, kvs_err *err);
void directory_ns_set(directory *d, uint32_t number, ns_entry *n); /* taken; room was reserved */
void directory_ns_unset(directory *d, uint32_t number);            /* and destroyed; it has no blocks */

/* directory_tenant.c */
void directory_charge(directory *d, pool_slot s);    /* its row names the namespace */
void directory_free_slot(directory *d, pool_slot s); /* uncharges it and gives it back to the pool */
void directory_close_extent(directory *d, uint32_t extent);
/* Has the extent blocks of the tenant?  WIRE_NONE32: anybody's, or none. */
bool directory_has_part(const directory *d, uint32_t extent, uint32_t tenant);
/* Does the tenant keep its floor without `bytes` more? */
bool directory_may_shrink(const directory *d, uint32_t tenant, uint64_t bytes);
bool directory_is_poor(const directory *d, uint32_t tenant,
                       uint64_t bytes); /* below its floor even with `bytes` more */
/* May the extent be taken from all who have blocks in it, but for `taker`? */
bool directory_may_lose_shares(const directory *d, uint32_t extent, uint64_t slot_bytes, uint32_t taker);
uint64_t directory_most_pinned(const directory *d, uint32_t tenant); /* bytes */
kvs_status directory_check_tenants(const directory *d, kvs_err *err);

/* directory_store.c */
/* Evict up to `most` blocks of tenants above their quota; false: none is any more, or nothing of it may go. */
bool directory_trim(directory *d, uint32_t most);
void directory_became_ready(directory *d, pool_slot s); /* counts a block that is in its slot and can be found */
/* Ready -> absent.  A slot with holds drains first; leases and the pin must be gone. */
void directory_take_away(directory *d, pool_slot s, uint32_t cause);
void directory_doom(directory *d, pool_slot s); /* writing: its key goes now */
void directory_empty_rows(directory *d, uint32_t extent, uint32_t from, uint32_t to);

/* directory_adopt.c */
kvs_status directory_adopt(directory *d, kvs_err *err); /* at the start: nothing is in it yet */

/* residency.c */
bool directory_is_swept(const directory *d, uint32_t ns); /* a reset of it is on its way */

/* lease.c */
void directory_leases_fini(directory *d);
/* Both WIRE_NONE32: all; how many.  Where they name very many blocks, directory_step lets some of these go. */
uint64_t directory_end_leases(directory *d, uint32_t tenant, uint32_t ns);
bool directory_has_dead_leases(const directory *d); /* it has not yet */

static inline void directory_emit(const directory *d, uint32_t type, uint32_t cause, const pool_row *r)
{
    if (d->on_event != NULL)
        d->on_event(d->ud, type, cause, r->ns, r->depth, r->key);
}

#endif
