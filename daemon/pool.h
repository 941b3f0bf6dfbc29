#ifndef KVS_DAEMON_POOL_H
#define KVS_DAEMON_POOL_H

/* Pool: the host arena, cut into extents, cut into slots; and the slot table beside it.
 *
 * Knows bytes, extents, layouts as slot sizes, slot states.  Does not know namespaces' meaning, keys' use, eviction,
 * sockets or devices; never touches a byte of the arena.  Loop thread only (pool_address from any thread while the slot
 * is taken).
 * Owns or borrows two memories: the arena (max_bytes of address space, usable piece by piece) and the slot table
 * (daemon/table.h), which may hold the blocks of an earlier life.
 *
 *   arena:   | piece 0 (<= 256 MiB)  | piece 1 (<= 1 GiB) ...            a piece is a whole number of extents
 *            | extent | extent | ... | extent | ...                      an extent belongs to one layout at a time
 *   extent:  | slot | slot | ... | waste |                               floor(extent_bytes / slot_bytes) slots
 *
 *   slot:    free --pool_take--> writing --pool_commit--> ready --pool_release--> free
 *                                   |                        `--pool_drain--> draining --pool_release--> free
 *                                   `--pool_release--> free      (any of them) --pool_quarantine--> quarantined
 *   extent:  pending (piece not usable yet) -> unassigned -> bound -> closing (no takes, emptied) -> unassigned
 *            adopted with blocks in it: bound at once; nothing is taken from it until its piece is usable
 *
 * Conservation, in bytes, true after every call:
 *   unassigned + waste + free + writing + ready + draining + quarantined = arena (the usable pieces, and the
 *   extents that were adopted before their piece is usable) */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/persist.h"
#include "daemon/table.h"
#include "proto/status.h"

enum { POOL_SLOT_MIN_BYTES = 1024, POOL_MAX_LAYOUTS = TABLE_MAX_LAYOUTS };
#define POOL_NONE UINT32_C(0xffffffff)

typedef struct pool pool;
typedef uint32_t pool_slot; /* extent * (extent_bytes / 1024) + index; the row number of the slot table */

enum pool_state { /* the numbers are in the slot table: append only */
                  POOL_FREE = 0,
                  POOL_WRITING = 1,
                  POOL_READY = 2,
                  POOL_DRAINING = 3,    /* no longer found; somebody still reads it */
                  POOL_QUARANTINED = 4, /* the hardware may still touch it */
};

/* One row of the slot table, 64 bytes, in memory that outlives the process; written by the pool only, in stores of 8 bytes,
 * in this order: state = writing before any byte moves; the rest; checksum; state = ready with `check` last.  Freed by
 * state = free first.  The parent is a hint that changes while the row is ready: one store, seen through by its
 * generation, and not part of the check. */
typedef struct pool_row {
    uint8_t key[32];
    uint64_t checksum; /* of the block; 0: none was made */
    uint32_t gen;      /* counts the lives of this slot */
    uint32_t depth;    /* position in its prefix chain */
    union {
        struct {
            uint8_t state; /* enum pool_state */
            uint8_t reserved;
            uint16_t ns;    /* daemon/directory's number */
            uint32_t check; /* of key, checksum, gen, depth, ns and the slot's number, while it is ready */
        };
        uint64_t word;
    };
    uint32_t parent; /* pool_slot of the block before it, or POOL_NONE */
    uint32_t parent_gen;
} pool_row;
_Static_assert(sizeof(pool_row) == 64, "slot table row");

typedef struct pool_config {
    uint64_t max_bytes;    /* rounded down to whole extents; at least one slot must fit */
    uint64_t extent_bytes; /* 0 = max_bytes / 8 within 64..256 MiB (at most max_bytes), enlarged so that the extents
                            * cover max_bytes; rounded down to 4 KiB; at most 2^20 extents */
    uint32_t max_slots;    /* of each layout; 0 = no cap */
    uint64_t
        reserve_bytes; /* address space, for max_bytes to grow into while the pool lives; 0, or less than max_bytes:
                             * that much; cut to what the numbers of slots and extents allow */
    persist *memory;   /* borrowed until pool_destroy; NULL: memfds of its own.  What an earlier life left in it is
                            * adopted, with that life's extent size if extent_bytes is 0 and max_bytes did not shrink */
    void (*on_store)(void *ud); /* for tests: before each store to the table; NULL */
    void *ud;
} pool_config;

/* What became of an earlier life's blocks when the pool was made. */
typedef struct pool_adoption {
    bool adopted;    /* the table was taken over; ready rows are the directory's to find or release */
    uint64_t ready;  /* rows that came back */
    uint64_t freed;  /* that were being written, drained or quarantined */
    uint64_t torn;   /* ready, but their check does not match */
    uint64_t no_sum; /* ready, but stored without a checksum: nobody could tell whether the bytes are right */
    uint64_t boots;  /* lives that had this table, with this one */
    char why[KVS_ERR_MSG_BYTES]; /* "" or why the table was refused: what, found, wanted */
} pool_adoption;

typedef struct pool_bytes { /* the conservation law's terms, and subsets kept by the directory */
    uint64_t arena, unassigned, waste, free, writing, ready, draining, quarantined;
    uint64_t max;       /* arena once every piece is usable */
    uint64_t giving_up; /* part of arena: above max, in extents that are not empty yet */
} pool_bytes;

typedef struct pool_layout_info {
    uint64_t slot_bytes;
    uint32_t n_extents; /* without those that are closing; the slots below are with them */
    uint64_t n_slots, n_free, n_writing, n_ready, n_draining, n_quarantined;
    uint64_t cap; /* most slots it can ever have: max_slots, or what the whole arena holds */
} pool_layout_info;

kvs_status pool_create(pool **ret, const pool_config *c, kvs_err *err);
void pool_destroy(pool *p); /* NULL is fine */

/* ---- pieces: made usable in the background ---- */
/* The next piece that is not usable yet: address and size, to be allocated and registered by the pinner.  False: all. */
bool pool_next_piece(const pool *p, void **ret_address, uint64_t *ret_bytes);
void pool_piece_usable(pool *p);       /* the piece that pool_next_piece named */
bool pool_piece_is_new(const pool *p); /* no extent of it has blocks of an earlier life */
void pool_piece_failed(pool *p);       /* it is left out, with all behind it, until ... */
void pool_piece_again(pool *p);        /* ... it may be tried again */
/* The pool's new size, at most pool_reserved: more pieces may come, or extents from the end on are given up: nothing more is
 * taken from them, and the caller closes those that are bound.  Not between pool_next_piece and its end.  E_LIMIT. */
kvs_status pool_resize(pool *p, uint64_t max_bytes, kvs_err *err);
uint64_t pool_reserved(const pool *p);  /* bytes */
uint32_t pool_n_allowed(const pool *p); /* extents from this one on are to be emptied */
/* The last piece, of so many bytes, if nothing of it is in use or allowed any more: it is no part of the pool from now on,
 * and its address and size are returned to be unregistered and given back. */
bool pool_drop_piece(pool *p, uint64_t piece_bytes, void **ret_address);
int pool_arena_fd(const pool *p); /* borrowed */
int pool_table_fd(const pool *p); /* borrowed */
uint64_t pool_extent_bytes(const pool *p);
const pool_adoption *pool_adopted(const pool *p);

/* ---- layouts ---- */
/* Find or add the layout with this digest.  E_LIMIT with both numbers: slot larger than an extent, smaller than
 * POOL_SLOT_MIN_BYTES, not a multiple of 16, or max_slots of it do not fit the pool. */
kvs_status pool_layout_open(pool *p, const uint8_t digest[32], uint64_t slot_bytes, uint32_t *ret, kvs_err *err);
bool pool_layout_find(const pool *p, const uint8_t digest[32], uint64_t slot_bytes, uint32_t *ret);
uint32_t pool_n_layouts(const pool *p);
void pool_layout_get(const pool *p, uint32_t layout, pool_layout_info *ret);

/* ---- slots ---- */
/* A free slot of the layout, binding an unassigned extent if need be; now POOL_WRITING, gen counted up, ns, depth
 * and checksum zero, the key not yet told.  E_NO_SPACE: nothing free; the caller evicts from this layout or closes an extent of another. */
kvs_status pool_take(pool *p, uint32_t layout, pool_slot *ret);
/* What a slot in state writing will hold. */
void pool_name(pool *p, pool_slot s, uint32_t ns, const uint8_t key[32], uint32_t depth);
void pool_set_parent(pool *p, pool_slot s, pool_slot parent);
void pool_commit(pool *p, pool_slot s, uint64_t checksum); /* writing -> ready */
void pool_drain(pool *p, pool_slot s);                     /* ready -> draining */
void pool_release(pool *p, pool_slot s);                   /* writing, ready, draining or quarantined -> free */
void pool_quarantine(pool *p, pool_slot s);                /* writing, ready or draining -> quarantined */
const pool_row *pool_row_of(const pool *p, pool_slot s);   /* never NULL for a slot that pool_take gave out */
/* The same of any number, as an earlier life may have left it in a row: NULL if no row was ever written there. */
const pool_row *pool_row_written(const pool *p, pool_slot s);
uint8_t *pool_address(const pool *p, pool_slot s);
uint32_t pool_layout_of(const pool *p, pool_slot s);
uint32_t pool_max_rows(const pool *p); /* slots are below this */

/* ---- extents ---- */
uint32_t pool_n_extents(const pool *p);
uint32_t pool_extent_of(const pool *p, pool_slot s);
/* Layout of an extent, or POOL_NONE; its slots are first .. first + n - 1. */
uint32_t pool_extent_layout(const pool *p, uint32_t extent, pool_slot *ret_first, uint32_t *ret_n, bool *ret_closing);
/* Slots first .. first + this - 1 may be taken or have been; the rows behind them were not touched, and reading one
 * would make it cost memory. */
uint32_t pool_extent_used(const pool *p, uint32_t extent);
bool pool_extent_usable(const pool *p, uint32_t extent); /* else a slot that becomes free in it cannot be taken yet */
void pool_extent_close(pool *p, uint32_t extent); /* no more takes from it; unassigned as soon as its slots are free */

/* ---- namespaces in the table: the directory's, kept beside the rows that name them ---- */
kvs_status pool_put_ns(pool *p, uint32_t number, const table_ns *ns, kvs_err *err);
enum table_found pool_get_ns(const pool *p, uint32_t number, table_ns *ret);
void pool_drop_ns(pool *p, uint32_t number);

void pool_get_bytes(const pool *p, pool_bytes *ret);
uint64_t pool_metadata_bytes(const pool *p); /* resident bookkeeping for the rows in bound extents */
/* Recount everything from the slot table and compare with the running sums.  E_CORRUPT says what differs. */
kvs_status pool_check(const pool *p, kvs_err *err);

#endif
