#ifndef KVS_KERNELS_CLIENT_PACK_PARAMS_H
#define KVS_KERNELS_CLIENT_PACK_PARAMS_H

/* What the packing kernel is given: shared by the kernel and by the C code that launches it.
 *
 * Knows addresses and numbers; both sides are built for 64-bit little-endian machines with the same alignment. */

#include <stdint.h>

enum {
    CLIENT_PACK_PAIRS = 256, /* of one launch: parameters stay below 4 KiB */
    CLIENT_PACK_THREADS = 256,
    CLIENT_PACK_TILE = 4096, /* bytes of a page that a warp copies at a time ... */
    CLIENT_PACK_TILES = 4096 /* ... or more, if a page had more tiles than this: their numbers stay below 2^31 */
};

typedef struct client_pack_plane {
    uint64_t base;   /* device address of block 0's page; multiple of 16 */
    uint64_t stride; /* bytes from block to block; multiple of 16 */
    uint64_t offset; /* of the page in a slot; multiple of 16 */
    uint64_t bytes;  /* of the page; multiple of 16 */
} client_pack_plane;

typedef struct client_pack_pair {
    uint32_t block, slot;
} client_pack_pair;

typedef struct client_pack_params {
    const client_pack_plane *planes; /* device [n_planes] */
    uint64_t staging, slot_stride;   /* device address of slot 0; bytes from slot to slot */
    uint32_t n_planes, n_pairs;
    uint32_t gather;     /* 1: pages into slots; 0: slots into pages */
    uint32_t tiles;      /* of the longest page, 1..CLIENT_PACK_TILES */
    uint64_t tile_bytes; /* multiple of 16 */
    client_pack_pair pairs[CLIENT_PACK_PAIRS];
} client_pack_params;

#endif
