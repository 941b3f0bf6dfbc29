#ifndef KVS_DAEMON_DIRECTORY_H
#define KVS_DAEMON_DIRECTORY_H

/* Directory: which key of which namespace is in which slot, who holds it, what goes next.
 *
 * Knows namespaces, keys, prefix depth, leases, pins, holds, and asks the pool for slots and the policy for victims.
 * Does not know sockets, requests, devices or time (the caller passes now_us).  Loop thread only.  Each `ns` argument is a
 * number that directory_open gave, and the caller has checked that it is its tenant's.
 * Owns its tables and the leases; borrows the pool.
 *
 *   absent --admitted--> writing --commit--> ready --evicted / dropped / reset--> absent
 *                           `-- abort, doomed by RESET or DROP --> absent
 *
 * A key is found only when its bytes are there.  A held slot (load in flight, lease, pin) is never evicted.  A RESET or
 * DROP of a slot that a copy is reading takes its key away at once and its memory when the copy has ended (draining).
 * Recency: LOAD and STORE renew the blocks they name, deepest first, and a STORE renews its chain up to the head through
 * the rows' parents (a long chain that grows bit by bit not each time: directory_impl.h); LOOKUP and RESERVE renew nothing.
 * Slots are counted per block: at most 65,535 holds and leases each; one more is E_BUSY.
 *
 * Tenants: a slot is charged to its namespace's tenant from admission until it is free again, so that
 *   sum over tenants of used = writing + ready + draining + quarantined of the pool.
 * A store that would pass its tenant's quota evicts that tenant's coldest blocks first, of whatever layout.  Where space is
 * short otherwise, the coldest block goes of all tenants that stay at or above their floor without it; a tenant below its
 * own floor takes from the others before it takes from itself.  Namespaces, new layouts and leases are shared out evenly:
 * none can use up what the others need. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/evict.h"
#include "daemon/pool.h"
#include "proto/layout.h"
#include "proto/status.h"
#include "proto/wire.h"

typedef struct directory directory;

typedef struct directory_config {
    pool *pool; /* borrowed */
    const evict_ops *evict;
    uint32_t n_tenants;   /* tenants are below this; 0 stands for 1 */
    uint32_t max_tenants; /* how many there may ever be; 0: no more than now */
    uint64_t hash_seed;   /* random: a client must not be able to choose collisions */
    /* Called for each block that appears or goes; may be NULL; must not call back. */
    void (*on_event)(void *ud, uint32_t type, uint32_t cause, uint32_t ns, uint32_t depth, const uint8_t key[32]);
    void *ud;
    /* A tenant's name outlives the process, its number does not.  Both may be NULL: then the name is the number. */
    const char *(*tenant_name)(void *ud, uint32_t tenant); /* at most TABLE_TENANT_BYTES - 1 bytes */
    bool (*tenant_find)(void *ud, const char *name, uint32_t *ret);
} directory_config;

/* Blocks that the pool adopted are found from now on, or released: of a tenant that is no more, of a description that does
 * not verify, or twice.  They are unverified until a load has seen their checksum to be right.  Deeper ones are colder. */
kvs_status directory_create(directory **ret, const directory_config *c, kvs_err *err);
void directory_destroy(directory *d); /* NULL is fine; the pool stays */

/* ---- tenants ---- */
/* There are so many now, at most max_tenants; never fewer.  Each may then have a smaller part of what all share; who has
 * more already keeps it. */
void directory_add_tenants(directory *d, uint32_t n_tenants);
/* May change at any time; what is above a smaller quota goes by directory_step.  quota_bytes 0: none. */
void directory_limit_tenant(directory *d, uint32_t tenant, uint64_t quota_bytes, uint64_t floor_bytes);
typedef struct directory_tenant {
    uint64_t quota_bytes, floor_bytes; /* quota: UINT64_MAX if there is none */
    uint64_t used_bytes, pinned_bytes, leased_bytes;
    uint64_t n_ready, n_namespaces, n_leases;
    /* since the start, in blocks; evicted: of its own by anybody's store, of these for_others: by another tenant's */
    uint64_t hits, misses, stored, evicted, for_others, no_space;
} directory_tenant;
void directory_get_tenant(const directory *d, uint32_t tenant, directory_tenant *ret);

/* ---- namespaces: numbers are never reused while the daemon lives ---- */
enum {
    DIRECTORY_MAX_NAMESPACES = TABLE_MAX_NS,
    /* Keys times namespaces of one directory_reserve, each of which is a search: 16,384 blocks, a million tokens by 64, of 16
     * shards. */
    DIRECTORY_MAX_RESERVED = 1 << 18,
};
/* Since the start, in blocks.  hits: leading ready keys of LOOKUP lists, misses: the others. */
typedef struct directory_counts {
    uint64_t hits, misses, stored, exists, no_space;
    uint64_t adopted;                   /* from an earlier life */
    uint64_t evicted, dropped, rebound; /* what went, by cause; dropped: by DROP or RESET, or unreadable */
} directory_counts;
typedef struct directory_ns {
    uint32_t tenant, layout;
    bool gone; /* its tenant has left: nobody may name it, and its blocks are on their way out */
    uint64_t slot_bytes;
    kvs_namespace desc; /* planes owned by the directory */
    uint8_t digest[32];
    uint64_t n_ready, n_pinned, n_leased;
    directory_counts counts;
} directory_ns;
/* Find or add by tenant and whole canonical description (compared, not only its digest). */
kvs_status directory_open(directory *d, uint32_t tenant, const uint8_t *canon, size_t len, uint32_t *ret, kvs_err *err);
/* The tenant has no namespace any more: an OPEN of the same description makes another one, and no later life adopts a block of
 * these.  Their leases end here; a sweep of what is gone takes the blocks away.  Returns the leases that ended. */
uint64_t directory_leave(directory *d, uint32_t tenant);
const directory_ns *directory_namespace(const directory *d, uint32_t ns); /* NULL: no such number */
uint32_t directory_n_namespaces(const directory *d); /* numbers are below it; some may be nobody's */

/* ---- finding ---- */
/* keys: [n][32].  states: [n] enum wire_key_state, or NULL.  Returns the number of leading READY ones.  Prefetches. */
uint32_t directory_lookup(directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, uint8_t *states);

/* The same of one key, and no lookup: it counts as neither hit nor miss. */
enum wire_key_state directory_state(const directory *d, uint32_t ns, const uint8_t key[32]);

/* ---- reading: hold, copy, let go ---- */
/* Hold each ready key; status[i] KVS_OK and slot[i], or E_NOT_FOUND / E_BUSY (writing).  Renews recency. */
void directory_hold(directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, kvs_status *status, pool_slot *slot);
/* The same in parts: some keys after others, and in the end recency of all of them (slot POOL_NONE: left out) at once, so
 * that the first is the most recent one. */
void directory_hold_some(directory *d, uint32_t ns, const uint8_t *keys, uint32_t n, kvs_status *status,
                         pool_slot *slot);
void directory_renew(directory *d, const pool_slot *slot, uint32_t n);
void directory_unhold(directory *d, pool_slot s);
/* An adopted block whose checksum nobody has looked at yet; the load that holds it must, and says so if it was right. */
bool directory_is_unverified(const directory *d, pool_slot s);
void directory_verified(directory *d, pool_slot s);

/* ---- writing ---- */
/* Admit keys at depth first_depth + i.  status[i]: KVS_OK and slot[i] in state writing, held for the copy;
 * E_EXISTS (ready; renewed); E_BUSY (another store is writing it, or the same key twice in this list);
 * E_NO_SPACE.  Residents of the list are renewed before anything is evicted for the others, and deeper keys are given up
 * first when space runs out: the statuses that are OK form what can be found later. */
void directory_admit(directory *d, uint32_t ns, uint32_t first_depth, const uint8_t parent[32], const uint8_t *keys,
                     uint32_t n, kvs_status *status, pool_slot *slot);
/* The same in parts, for who can begin with the first keys while the others are still looked at: begin, all n in order by
 * next, end.  status[i] and slot[i] (valid if that is KVS_OK) are there after the next that i was part of.  No other call
 * that changes the directory comes in between. */
void directory_admit_begin(directory *d, uint32_t ns, uint32_t first_depth, const uint8_t parent[32],
                           const uint8_t *keys, uint32_t n, kvs_status *status, pool_slot *slot);
void directory_admit_next(directory *d, uint32_t n);
void directory_admit_end(directory *d);
/* The bytes are there: visible from now on.  E_CANCELLED: a RESET or DROP came meanwhile; the slot is freed. */
kvs_status directory_commit(directory *d, pool_slot s, uint64_t checksum);
void directory_abort(directory *d, pool_slot s); /* writing -> absent, slot freed */
/* Writing or held slot whose copy did not end in time: its key (if writing) goes now; its memory is quarantined until
 * directory_settle says that the hardware has stopped.  A slot that was only read keeps its key, for its bytes are right,
 * and keeps this hold until directory_settle: do not call directory_unhold for it. */
void directory_suspect(directory *d, pool_slot s);
void directory_settle(directory *d, pool_slot s);

/* ---- leases ---- */
typedef struct directory_lease {
    uint8_t id[16];
    uint32_t n_leased; /* leading keys of each namespace that it holds */
    uint32_t ttl_ms;   /* granted */
    uint64_t bytes;
} directory_lease;
/* Hold the leading ready keys, the same number in every namespace (one decision: the minimum).  owner: the connection.
 * E_LIMIT: keys times namespaces are above DIRECTORY_MAX_RESERVED, max_bytes of the tenant would be passed (counting what it
 * holds), or its part of the blocks that all leases may name.  It costs a search for each key and namespace, up to the first
 * key that one of them lacks, or that a limit is passed with.  n_leased may be 0: then no lease is made and the id is zeros. */
kvs_status directory_reserve(directory *d, uint32_t tenant, uint64_t owner, const uint32_t *ns, uint32_t n_ns,
                             const uint8_t *keys, uint32_t n_keys, uint32_t max_loads, uint32_t ttl_ms, uint64_t now_us,
                             uint64_t max_bytes, directory_lease *ret, kvs_err *err);
/* Hold blocks first .. first + n - 1 of the lease in `ns` for a load; uses one of its loads.  E_NOT_FOUND, E_RANGE,
 * E_STATE (loads used up). */
kvs_status directory_lease_hold(directory *d, uint32_t tenant, const uint8_t id[16], uint32_t ns, uint32_t first,
                                uint32_t n, pool_slot *slot, kvs_err *err);
kvs_status directory_release(directory *d, uint32_t tenant, const uint8_t id[16], kvs_err *err);
/* Its leases are over.  True: they name so many blocks that directory_step has to let some of these go. */
bool directory_owner_gone(directory *d, uint64_t owner);
/* End leases that have run out; returns the next end in us, UINT64_MAX if there is none, now_us if some are left that have. */
uint64_t directory_expire(directory *d, uint64_t now_us);

/* ---- residency ---- */
/* OK also if it was; E_NOT_FOUND; E_NO_SPACE: with one more pin the others could no longer have their floors; E_BUSY: its
 * extent is being given away, and only a lease keeps it. */
kvs_status directory_pin(directory *d, uint32_t ns, const uint8_t key[32]);
kvs_status directory_unpin(directory *d, uint32_t ns, const uint8_t key[32]);
/* E_BUSY: leased, or pinned; a key being written is doomed (OK), one being read goes now and its memory later. */
kvs_status directory_drop(directory *d, uint32_t ns, const uint8_t key[32]);
/* Take every key of ns (WIRE_NONE32: all of the tenant; tenant WIRE_NONE32: everybody's) away: ready, leased (their leases
 * end), being written (aborted), and pinned ones only if told so.  In parts, with whatever other calls between them: begin,
 * step until it says that no more is left, end; or end at once, when the rest is to stay.  A block that was there at the
 * beginning is gone when the last step has been made; one that was admitted since is gone or not.  From begin to end nothing
 * of it can be leased. */
typedef struct directory_reset_result {
    uint64_t dropped, aborted, kept, leases;
} directory_reset_result;
typedef struct directory_sweep { /* the caller's memory, from begin to end */
    uint32_t tenant, ns;         /* filled before the begin, with the next one; the rest is zero then */
    bool pinned_too;
    bool gone;                  /* of namespaces that were left, and of no other; else of the others */
    directory_reset_result sum; /* so far */
    bool over;                  /* the last step was made */
    /* the directory's */
    uint32_t extent, row; /* what comes next: the row within the extent */
    uint64_t left;        /* slots in scope that are still to be come by, at most */
    uint64_t charged;     /* directory.n_charged when `left` was right */
} directory_sweep;
void directory_reset_begin(directory *d, directory_sweep *w);
/* Look at slots and take them off *budget until that is 0.  True: there are more. */
bool directory_reset_step(directory *d, directory_sweep *w, uint32_t *budget);
/* Tells on_event once a namespace (RESET) if all of it went, or went untold; else it was once a block (REMOVED). */
void directory_reset_end(directory *d, const directory_sweep *w);

/* ---- watching ---- */
typedef struct directory_stats {
    uint64_t n_ready, n_pinned, n_leased, n_held, n_leases, leased_bytes, pinned_bytes, evictable;
    /* directory_counts of all namespaces, summed by themselves */
    uint64_t hits, misses, stored, exists, evicted, dropped, rebound, no_space;
    uint64_t adopted, refused; /* blocks of an earlier life that came back, and that could not */
    uint64_t unverified;       /* adopted, resident, and not loaded yet */
    uint64_t oldest_lease_us;  /* age; 0 if none */
    uint64_t metadata_bytes;   /* directory, policy and pool, resident */
} directory_stats;
void directory_get_stats(const directory *d, uint64_t now_us, directory_stats *ret);
uint64_t directory_tenant_leased(const directory *d, uint32_t tenant); /* bytes */
uint64_t directory_n_leases(const directory *d, uint64_t owner);

typedef struct directory_lease_info {
    uint8_t id[16];
    uint64_t owner, bytes, age_us, left_us;
    uint32_t tenant, n_leased, n_ns, loads_left;
} directory_lease_info;
void directory_each_lease(const directory *d, uint64_t now_us, void (*f)(void *ud, const directory_lease_info *l),
                          void *ud);

typedef struct directory_key_info {
    uint8_t key[32];
    uint32_t ns, depth, gen, state;
    uint32_t holds, leases;
    bool pinned;
    uint64_t checksum;
    pool_slot slot;
} directory_key_info;
/* Up to `limit` taken slots from row `cursor` on, visiting at most 65,536 rows; returns the next cursor, UINT64_MAX at
 * the end.  ns: WIRE_NONE32 = all. */
uint64_t directory_each_key(const directory *d, uint32_t ns, uint64_t cursor, uint32_t limit,
                            void (*f)(void *ud, const directory_key_info *k), void *ud);

/* May the pool have that size?  E_CONFIG: it would take a tenant blocks that its floor keeps.  names, floors:
 * [n_tenants], as they are to be then. */
kvs_status directory_check_size(const directory *d, uint64_t max_bytes, const char *const *names,
                                const uint64_t *floors, kvs_err *err);
/* The pool has got another size: what is above it is closed now, and emptied by directory_step and as it is let go. */
void directory_resized(directory *d);

/* Work that may be spread: closing extents are emptied a few thousand slots at a time.  True: call again soon. */
bool directory_step(directory *d);

/* Recount everything and compare: pool_check, every key findable at its slot, holds, leases and pins as counted. */
kvs_status directory_check(const directory *d, kvs_err *err);

#endif
