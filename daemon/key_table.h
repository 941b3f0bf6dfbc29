#ifndef KVS_DAEMON_KEY_TABLE_H
#define KVS_DAEMON_KEY_TABLE_H

/* Key table: from a hash to the rows that have it.
 *
 * Knows 32-bit hashes and row numbers.  Does not know keys: whoever asks compares.  One thread at a time.
 * Owns its memory: 8 bytes an entry, filled between 3/8 and 3/4; while it changes its size, old and new stand
 * side by side and every insert and remove moves a few entries over, so that no call pays for all of them.  The pages of a
 * larger one are brought in before, a few at a time: hashes have no order, so that the first keys would touch all of them.
 *
 *   entry: | hash | row + 1 |     0 = empty; an entry sits at its home (the hash's top bits) or behind it,
 * wrapping, with no empty entry between: removal shifts back, there are no tombstones */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

#define KEY_TABLE_NONE UINT32_C(0xffffffff)

typedef struct key_entry {
    uint32_t hash, row1;
} key_entry;

typedef struct key_table_part {
    key_entry *e;
    uint64_t n;
    uint32_t bits; /* capacity is 1 << bits */
} key_table_part;

typedef struct key_table {
    key_table_part now, old; /* old.e is NULL unless entries are being moved */
    uint64_t cursor, left;   /* next entry of old to look at; how many still to look at */
    key_table_part next;     /* twice as large, still empty; next.e is NULL unless it will be needed soon */
    uint64_t ready;          /* bytes of it whose pages are there */
} key_table;

typedef bool (*key_table_match)(const void *ud, uint32_t row);

kvs_status key_table_init(key_table *t);
void key_table_fini(key_table *t); /* zeros are fine */

/* The caller knows that the key is not in.  E_NO_MEMORY: nothing changed. */
kvs_status key_table_insert(key_table *t, uint32_t hash, uint32_t row);
void key_table_remove(key_table *t, uint32_t hash, uint32_t row); /* it is in */
/* The row with this hash for which match says yes, or KEY_TABLE_NONE. */
uint32_t key_table_find(const key_table *t, uint32_t hash, key_table_match match, const void *ud);
/* Move up to about n entries.  True: there is more to move. */
bool key_table_step(key_table *t, uint32_t n);

static inline uint64_t key_table_count(const key_table *t)
{
    return t->now.n + t->old.n;
}

static inline uint64_t key_table_bytes(const key_table *t)
{
    return (sizeof(key_entry) << t->now.bits) + (t->old.e != NULL ? sizeof(key_entry) << t->old.bits : 0) + t->ready;
}

/* For lists of keys: first the entry, later (when it is in the cache) the row that it most likely names. */
void key_table_prefetch(const key_table *t, uint32_t hash);
uint32_t key_table_guess(const key_table *t, uint32_t hash);

#endif
