#ifndef KVS_DAEMON_SPARSE_H
#define KVS_DAEMON_SPARSE_H

/* Sparse array: address space for every item there may ever be, memory only for the pages that were written.
 *
 * Knows item sizes and pages.  Does not know what an item is.  One thread at a time.
 * Owns its mapping; borrows the descriptor it maps, if any.
 *
 * Slot numbers leave gaps (an extent has a number for each KiB, and a block of 4 MiB uses one of 4,096 of
 * them), so a plain array by slot number would cost a thousand times what is used.  An item must be touched
 * before it is first written; an item that was never touched is zero, and reading it in a memfd would
 * allocate its page, so don't. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

enum { SPARSE_PAGE_SHIFT = 12 };

typedef struct sparse {
    uint8_t *base;
    uint64_t bytes; /* of the mapping */
    size_t item;
    uint8_t *seen; /* one bit a page */
    uint64_t n_pages;
} sparse;

/* fd: a file of at least n * item bytes to map, or -1 for private memory.  item divides the page size or is a
 * multiple of 8.  On failure nothing is held. */
kvs_status sparse_init(sparse *a, int fd, uint64_t n, size_t item, kvs_err *err);
/* The same with the items from byte `at` of the file on, a multiple of the page size. */
kvs_status sparse_init_at(sparse *a, int fd, uint64_t at, uint64_t n, size_t item, kvs_err *err);
void sparse_fini(sparse *a); /* zeros, and what sparse_init left behind on failure, are fine */

static inline void *sparse_at(const sparse *a, uint64_t index)
{
    return a->base + index * a->item;
}

static inline void sparse_touch_page(sparse *a, uint64_t page)
{
    uint8_t bit = (uint8_t)(1u << (page & 7));

    if ((a->seen[page >> 3] & bit) == 0) {
        a->seen[page >> 3] |= bit;
        a->n_pages++;
    }
}

/* Is the page of this item's first byte one that was written? */
static inline bool sparse_touched(const sparse *a, uint64_t index)
{
    uint64_t page = index * a->item >> SPARSE_PAGE_SHIFT;

    return (a->seen[page >> 3] & (1u << (page & 7))) != 0;
}

static inline void *sparse_touch(sparse *a, uint64_t index)
{
    uint64_t first = index * a->item, last = first + a->item - 1;

    sparse_touch_page(a, first >> SPARSE_PAGE_SHIFT);
    sparse_touch_page(a, last >> SPARSE_PAGE_SHIFT);
    return a->base + first;
}

/* Bytes that the array costs: whole pages, and the bits that count them. */
uint64_t sparse_resident(const sparse *a);

#endif
