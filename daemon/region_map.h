#ifndef KVS_DAEMON_REGION_MAP_H
#define KVS_DAEMON_REGION_MAP_H

/* Region map: where each plane of each slot of a device region lies.
 *
 * Knows addresses and pitches that were checked when the region was made.  Does not know who holds what.
 * Immutable after creation: any thread may read it while the region is referenced.  Borrows the memory it
 * points to. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/view.h"

typedef struct region_plane {
    uint8_t *base;         /* page of slot 0 */
    uint64_t stride;       /* bytes from slot to slot */
    uint64_t page_bytes;   /* moved and stored, scales and padding included */
    uint64_t block_offset; /* where the page lies inside a block */
    uint32_t row_bytes;
    uint32_t format;
} region_plane;

typedef struct region_map {
    uint64_t slot_bytes;
    uint32_t n_slots, n_planes, tokens_per_block;
    bool cross_layer; /* slots are contiguous blocks: planes[0].base + slot * stride, slot_bytes long: one
                         copy a block */
    region_plane planes[];
} region_map;

static inline kvs_view region_map_view(const region_map *m, uint32_t plane)
{
    const region_plane *p = &m->planes[plane];
    kvs_view v = {p->base, p->stride, p->page_bytes, m->n_slots, m->tokens_per_block, p->row_bytes, p->format};

    return v;
}

#endif
