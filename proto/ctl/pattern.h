#ifndef KVS_CTL_PATTERN_H
#define KVS_CTL_PATTERN_H

/* Pattern: block content made from a key, so that a shift, a swap or a mixture of blocks shows in the first
 * wrong word.
 *
 * Knows 64-bit words.  Does not know layouts, clients or sockets.  Any thread; the memory is the caller's.
 * Word i of a block is splitmix64(fold(key) + i * an odd constant): words differ within a block and between
 * blocks. */

#include <stddef.h>
#include <stdint.h>

/* The key of trace block `id` of a run: 32 bytes that look like a hash. */
void pattern_key(uint64_t id, uint8_t ret_key[32]);

/* Fill `bytes` (a multiple of 8) at `p`. */
void pattern_fill(const uint8_t key[32], void *p, uint64_t bytes);

/* Offset of the first wrong byte's word, or `bytes` if every byte is right. */
uint64_t pattern_verify(const uint8_t key[32], const void *p, uint64_t bytes);

#endif
