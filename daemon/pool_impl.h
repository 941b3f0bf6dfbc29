#ifndef KVS_DAEMON_POOL_IMPL_H
#define KVS_DAEMON_POOL_IMPL_H

/* What the files of the pool share: pool_open.c (begin and end), pool_adopt.c (the blocks of an earlier life), pool_extent.c
 * (pieces, layouts, extents), pool.c (slots), pool_check.c (recount).
 *
 * Knows the same as daemon/pool.h.  Nobody else includes it.  Loop thread only. */

#include "daemon/pool.h"

#include "daemon/sparse.h"

#define MIB(n) ((uint64_t)(n) << 20)
#define ULL(n) ((unsigned long long)(n))

enum {
    N_STATES = POOL_QUARANTINED + 1,
    MAX_EXTENTS = TABLE_MAX_EXTENTS, /* each costs memory whether or not it is used */
};

typedef struct extent {
    uint32_t layout; /* POOL_NONE: unassigned, or not usable yet */
    uint32_t n_slots;
    uint32_t n_used;      /* slots from here on were never taken since the extent was bound: their rows are untouched */
    uint32_t free_head;   /* of the slots below n_used that are free, by index; POOL_NONE */
    uint32_t prev, next;  /* of the layout's extents that can give a slot, or of the unassigned ones */
    uint32_t n[N_STATES]; /* slots in each state */
    bool closing;
    bool pending; /* adopted, and its piece is not usable yet */
    bool retired; /* of a usable piece, above the limit, and nobody's: part of no sum */
} extent;

typedef struct layout {
    uint8_t digest[32];
    uint64_t slot_bytes;
    uint32_t record; /* its place in the table */
    uint32_t per_extent;
    uint32_t n_extents; /* that are not closing */
    uint32_t avail;     /* extents with a free slot, POOL_NONE */
    uint64_t n_slots;
    uint64_t n[N_STATES];
} layout;

struct pool {
    persist *memory, own; /* memory is &own where nobody else's was given */
    uint8_t *arena;
    slot_table table;
    sparse links; /* u32: next free index of the same extent */
    uint64_t extent_bytes;
    uint32_t rows_per_extent, n_extents, max_slots;
    uint32_t n_limit;   /* extents that may be used at present, of the n_extents that there is address space for */
    uint32_t n_usable;  /* extents of the pieces that are usable: the leading ones */
    uint32_t n_retired; /* of these */
    uint32_t n_early;   /* adopted ones behind those */
    bool stopped;       /* a piece failed: no more growth for now */
    uint32_t unassigned, n_unassigned;
    uint64_t waste;
    extent *extents; /* [n_extents] */
    pool_adoption adoption;
    uint32_t n_adoptable; /* extents of the earlier life's table */
    uint32_t n_layouts;
    layout layouts[POOL_MAX_LAYOUTS];
};

static inline pool_row *row_at(const pool *p, pool_slot s)
{
    return sparse_at(&p->table.rows, s);
}

static inline uint32_t slot_state(const pool *p, pool_slot s)
{
    return row_at(p, s)->state;
}

/* pool_extent.c */
/* Into and out of a list of extents, by its head. */
void extents_push(pool *p, uint32_t *head, uint32_t e);
void extents_remove(pool *p, uint32_t *head, uint32_t e);
bool extent_can_give(const extent *x);
void extent_bind(pool *p, uint32_t e, uint32_t layout_id); /* an unassigned one becomes the layout's */
/* A closing extent whose slots are all free belongs to nobody again. */
void extent_unbind_if_empty(pool *p, uint32_t e);

/* pool.c */
uint32_t row_check(const pool_row *r, pool_slot s); /* of a row as it is */
void row_set_state(pool *p, pool_slot s, enum pool_state to, uint32_t check);

/* pool_adopt.c */
/* Take over what the table says, or set adoption.why: then nothing was touched. */
void pool_adopt(pool *p);

#endif
