#ifndef KVS_DAEMON_REGION_H
#define KVS_DAEMON_REGION_H

/* Region: device memory as slots (made here, or an engine's own) or as scratch, and who uses which slot.
 *
 * Knows slot states, generations, keys attached to slots, uses by running jobs, plane maps and their bounds.
 * Does not know requests, sockets, the host pool; never touches a byte of the memory.  Loop thread only; a
 * region's map may be read by a worker while a job uses it. A region is counted over the peers attached to
 * it; the last one to leave hands its memory back to the caller, who closes it on a thread that may block.
 *
 *   free --take--> private (one owner) --share--> shared (key, n holds) --last hold gone--> cached,
 * evictable, LRU ^                `--- dropped while a job uses it --> dying --job back--> free          | ^
 * held again
 *    `---------------------------------------------------- evicted ------------------------'
 *   A shared slot whose key was reset or dropped is an orphan: held until the last hold ends, then freed.
 *   Engine regions (imported) have no states: their slots belong to the engine; only their uses are counted.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/region_map.h"
#include "kernels/device.h"
#include "proto/layout.h"
#include "proto/status.h"
#include "proto/wire.h"

enum { REGION_MAX_SLOTS = 1 << 20 };
#define REGION_NONE UINT32_C(0xffffffff)

enum region_slot_state { REGION_FREE, REGION_PRIVATE, REGION_SHARED, REGION_DYING };

typedef struct region region;
typedef struct region_seat region_seat;

typedef struct region_slot {
    uint8_t key[32];            /* shared only */
    region_seat *owner;         /* private only */
    uint32_t gen;               /* counts the lives of this slot; 0: the slot was never used, and all of it is zeros */
    uint32_t holds;             /* shared: of all seats together */
    uint32_t prev, next, chain; /* free list or LRU; hash chain of shared ones */
    uint32_t depth;
    uint8_t state;
    bool listed;  /* in the LRU */
    bool orphan;  /* shared, but its key was reset or dropped: no longer found, freed after the last hold */
    bool unnamed; /* private, but its owner has not been told of it: nothing that a client asks for may touch it */
} region_slot;

typedef struct region_use { /* by jobs in flight, anybody's */
    uint32_t stores, computes;
    uint32_t writes; /* of the computes */
    uint32_t mark;   /* == region.epoch: already named by the request being checked */
    bool loading;
    bool suspect; /* a job on it timed out and is not back: refuse everything */
    bool bad;     /* a job that wrote it failed: never a source for a key */
} region_use;

/* What one peer has of a region. */
struct region_seat {
    region *region;
    region_seat *next; /* the peer's list */
    uint32_t *holds;   /* [n_slots], shared slots; NULL for imported regions and scratch */
    uint32_t n_private, n_held;
    uint32_t users; /* requests of this peer that use the region */
};

struct region {
    region *prev, *next; /* the core's list */
    region *next_token;  /* the core's table of tokens */
    uint32_t id, tenant, ns, kind, n_slots;
    uint32_t device; /* the core's number of the one that it lies on */
    bool imported;
    uint32_t backend; /* imported: who attends to its first map, as the client said (proto/backend.h) */
    uint8_t token[WIRE_TOKEN_BYTES];
    uint64_t bytes, piece_bytes;
    uint32_t n_pieces;
    device_mem *mem;
    void *closer;       /* the core's: how to give mem back */
    uint8_t *base;      /* scratch and daemon regions */
    region_map *map;    /* NULL: scratch */
    region_use *use;    /* [n_slots] */
    region_slot *slots; /* [n_slots]; NULL: imported or scratch.  Its pages come with the first use of a slot */
    uint32_t first_gen; /* of slots that were never used: these are free, each between its neighbours in the list */
    uint32_t *buckets, bucket_mask;
    uint32_t free_head, lru_head, lru_tail; /* lru_head is the coldest */
    uint32_t n_free, n_cached, n_seats;
    uint32_t n_keys; /* that are found */
    uint32_t epoch;
    uint64_t seed;
};

/* ---- making ---- */
/* Slot geometry of a namespace at `base`, slots contiguous: a daemon region. */
kvs_status region_map_contiguous(const kvs_namespace *ns, uint8_t *base, uint32_t n_slots, region_map **ret,
                                 kvs_err *err);
/* Check an engine's plane maps before anything is opened: count, descriptor index, multiples of 16 below
 * 2^40, stride at least the page when n_slots > 1, no end that wraps, no descriptor without a map.  The message
 * names the map, value and limit.  joined: the pieces follow one another, a plane may run on into the next ones, and those
 * need no map of their own. */
kvs_status region_maps_check(const kvs_namespace *ns, uint32_t n_slots, const wire_plane_map *maps, uint32_t n_maps,
                             uint32_t n_fds, bool joined, kvs_err *err);
/* Then with the memory open: every plane lies inside its piece (or, joined, ends before the last one does), whose size is
 * asked of the device. */
kvs_status region_map_imported(const kvs_namespace *ns, uint32_t n_slots, const wire_plane_map *maps, uint32_t n_maps,
                               const device_mem *mem, bool joined, region_map **ret, kvs_err *err);

/* An empty region without memory; kind and slots as given, generations start at a random number. */
kvs_status region_create(region **ret, uint32_t kind, bool imported, uint32_t n_slots, uint64_t seed);
void region_destroy(region *g); /* NULL is fine; memory and map: the map is freed, mem must be closed already */

kvs_status region_sit(region *g, region_seat **ret);
/* The peer leaves: its private slots are freed, its holds end.  True: it was the last seat, and the region is only good for
 * region_destroy. */
bool region_leave(region_seat *s);

/* ---- slots ---- */
/* A slot for the seat: free, or the coldest cached one.  Private, new generation.  E_NO_SPACE. */
kvs_status region_take(region_seat *s, uint32_t *ret);
/* The same for a job whose end decides what becomes of it.  Until region_named it is not the client's, who may guess which one
 * it is: it can neither be dropped nor loaded into, stored or attended to. */
kvs_status region_take_unnamed(region_seat *s, uint32_t *ret);
void region_named(region *g, uint32_t slot);
/* Slots that region_take could give now. */
uint32_t region_available(const region *g);
/* Shared slot with this key, or REGION_NONE. */
uint32_t region_find(const region *g, const uint8_t key[32]);
void region_hold(region_seat *s, uint32_t slot); /* a shared slot */
/* Private to shared with one hold of its owner.  False: the key is attached to another slot, or the slot is
 * not the seat's any more; nothing happened. */
bool region_share(region_seat *s, uint32_t slot, const uint8_t key[32], uint32_t depth);
/* The same for a block whose key is gone already: held, but never found. */
void region_share_orphan(region_seat *s, uint32_t slot, const uint8_t key[32], uint32_t depth);
/* The key is reset or dropped: nobody finds it here any more; those who hold the slot keep it.  True: it was here. */
bool region_forget(region *g, const uint8_t key[32]);
/* The same of every key in the slots *from and above, until *budget, which each of them is taken off, is 0.  True: there are
 * more. */
bool region_forget_some(region *g, uint32_t *from, uint32_t *budget);
/* End of use: a private slot is freed (when its last job is back), of a shared one a hold ends.  E_RANGE,
 * E_STALE, E_STATE: not the seat's. */
kvs_status region_drop(region_seat *s, uint32_t slot, uint32_t gen);
/* After a restart: make a free slot what the client says it was. */
kvs_status region_readopt(region_seat *s, const wire_region_entry *e);

/* ---- may this seat use the slot?  OK, E_RANGE, E_STALE, E_STATE, E_BUSY ---- */
kvs_status region_may_load(const region_seat *s, uint32_t slot, uint32_t gen); /* private, nothing runs on it */
/* Private or held, and well defined; refilled: the client says that it filled the slot since a job failed to. */
kvs_status region_may_store(const region_seat *s, uint32_t slot, uint32_t gen, bool refilled);
kvs_status region_may_write(const region_seat *s, uint32_t slot); /* private, not being stored */
kvs_status region_may_read(const region_seat *s, uint32_t slot);  /* private or held */

/* First time that this slot is named since region_mark_begin? */
void region_mark_begin(region *g);
bool region_mark(region *g, uint32_t slot);

/* A job is no longer on the slot: free it if it is dying, list it if it is cached.  Call after changing
 * `use`. */
void region_rest(region *g, uint32_t slot);

/* Recount the lists and compare; E_CORRUPT says what differs. */
kvs_status region_check(const region *g, kvs_err *err);

#endif
