#ifndef KVS_DAEMON_TABLE_H
#define KVS_DAEMON_TABLE_H

/* Table: the file that says what is in the arena, so that another process can go on with it.
 *
 * Knows the file's format: heads, layouts, extents' bindings, namespaces; that rows come last, not what is in them.  Does
 * not know the arena, or what a namespace means.  Loop thread only.
 * Owns its mappings; borrows the memory.
 *
 *   0       64 KiB                      8 MiB + 64 KiB   72 MiB + 64 KiB
 *   | heads | ns index | layouts | ... | extents        | texts of namespaces | rows ...
 *     2 x 64  4096 x 8   256 x 64        2^20 x 8         64-byte grains
 *
 * A reader after a crash at any instruction sees each record as it was, as it is, or not at all.  Every write is a store of
 * 8 aligned bytes with release order, through table_store.  A head or a layout is void while its checksum is written (0
 * before the rest, the sum after it; the other head stays good meanwhile).  A binding is one store.  A namespace's text is
 * written where nothing points, then its index entry is one store.  What was stored is never lost with the process: the
 * memory is not its own. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/persist.h"
#include "daemon/sparse.h"
#include "proto/status.h"

enum {
    TABLE_VERSION = 2, /* 2: sums of blocks of more than 256 KiB are made by parts */
    TABLE_MAX_NS = 4096,
    TABLE_MAX_LAYOUTS = 256,
    TABLE_MAX_EXTENTS = 1 << 20,
    TABLE_TENANT_BYTES = 64, /* of a tenant's name, with the closing zero */
    TABLE_TEXTS_BYTES = 64 << 20,
};
#define TABLE_NONE UINT32_C(0xffffffff)

typedef struct table_geometry {
    uint64_t extent_bytes;
    uint32_t n_extents, max_slots, row_bytes, rows_per_extent;
} table_geometry;

typedef struct table_head { /* 64 bytes in the file */
    uint64_t magic;
    uint32_t version, row_bytes;
    uint64_t extent_bytes;
    uint32_t n_extents, max_slots;
    uint64_t boots, seq; /* lives that had this table; the newer of two heads has the larger seq */
    uint64_t reserved;
    uint64_t check;
} table_head;

typedef struct slot_table {
    persist *memory;
    uint8_t *front; /* everything but the rows */
    sparse rows;
    table_head head; /* as last written */
    uint32_t text_end;
    void (*on_store)(void *ud); /* for tests: called before each store; NULL */
    void *ud;
} slot_table;

/* One of the eight aligned bytes that a record is made of. */
typedef uint64_t __attribute__((may_alias)) table_word;
static inline void table_store(const slot_table *t, void *at, uint64_t v)
{
    if (__builtin_expect(t->on_store != NULL, 0))
        t->on_store(t->ud);
    __atomic_store_n((table_word *)at, v, __ATOMIC_RELEASE);
}

/* What the table of an earlier life says of itself: false and `why` (what, found, wanted) if it is none that this version
 * can read, or the memories are too small for it. */
bool table_peek(const persist *m, table_geometry *ret, char why[KVS_ERR_MSG_BYTES]);
uint64_t table_bytes(const table_geometry *g); /* of the whole file */

/* Map the file, which has the size for g, and write a new head: one more life.  keep: it is the table that table_peek saw;
 * else it is all zeros.  On failure nothing is held. */
kvs_status table_open(slot_table *t, persist *m, const table_geometry *g, bool keep, kvs_err *err);
void table_close(slot_table *t); /* zeros are fine */
uint64_t table_rows_offset(void);

enum table_found { TABLE_VOID = 0, TABLE_GOOD = 1, TABLE_BAD = 2 };

void table_put_layout(slot_table *t, uint32_t i, const uint8_t digest[32], uint64_t slot_bytes);
enum table_found table_get_layout(const slot_table *t, uint32_t i, uint8_t ret_digest[32], uint64_t *ret_slot_bytes);

/* layout: TABLE_NONE unbinds. */
void table_put_extent(slot_table *t, uint32_t extent, uint32_t layout, uint32_t n_slots);
enum table_found table_get_extent(const slot_table *t, uint32_t extent, uint32_t *ret_layout, uint32_t *ret_n_slots);

typedef struct table_ns {
    char tenant[TABLE_TENANT_BYTES];
    uint8_t digest[32];
    const uint8_t *canon; /* in the table, until it is dropped or closed */
    size_t canon_len;
} table_ns;
/* Bytes that a namespace takes of TABLE_TEXTS_BYTES, at most. */
uint64_t table_ns_bytes(size_t canon_len);
/* E_LIMIT: no room for more text; E_NO_SPACE. */
kvs_status table_put_ns(slot_table *t, uint32_t number, const table_ns *ns, kvs_err *err);
enum table_found table_get_ns(const slot_table *t, uint32_t number, table_ns *ret);
void table_drop_ns(slot_table *t, uint32_t number);
/* After drops at the start: room behind the last text is used again, what lies before it when that has been used up. */
void table_trim(slot_table *t);

#endif
