#include "kernels/page_copy.h"

#include <stddef.h>

uint32_t kvs_page_copy_plan(kvs_page_piece *pieces, uint32_t n)
{
    uint64_t tiles = 0;

    for (uint32_t i = 0; i < n; i++) {
        kvs_page_piece *p = &pieces[i];

        if ((((uintptr_t)p->dst | (uintptr_t)p->src | p->bytes) & 15) != 0 || p->bytes > KVS_PAGE_COPY_MAX_BYTES)
            return 0;
        p->first_tile = (uint32_t)tiles;
        tiles += (p->bytes + KVS_PAGE_COPY_TILE - 1) / KVS_PAGE_COPY_TILE;
    }
    return tiles <= UINT32_MAX / 2 ? (uint32_t)tiles : 0;
}
