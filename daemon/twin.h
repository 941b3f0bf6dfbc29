#ifndef KVS_DAEMON_TWIN_H
#define KVS_DAEMON_TWIN_H

/* Twin: two LOADs of the same blocks onto two devices that reach each other's memory.  Each loads about half over its own
 * link; the other half it copies from the other device, which is several times as fast.
 *
 * Knows, for each block, who has taken it and where it has landed.  Does not know jobs, requests, devices or bytes.
 * Threads: create, place, join, close, is_free, left, ref and unref on the loop; the others on the mover's thread of that side.
 * Ownership: counted, one reference a LOAD.  The places of a side are only borrowed, see below.
 *
 *   side 0 goes on from the front --->      <--- side 1 from the back, in chunks, upwards within a chunk
 *
 *   OPEN --one of them takes it--> TAKEN --its copy is done--> LANDED: the other one takes it from there
 *     ^----------------its copy has failed--'
 *
 * Nobody waits for the other side for long: it may have other tenants to serve, or be lost.  What it has taken and not landed
 * is loaded over the own link after a moment (TWIN_PATIENCE_US).  Side 0 is there before it is known whether anyone joins.
 *
 * While one side reads from the other's places these must stay as they are.  So each read is counted at the gate of the side
 * that it is from, and the LOAD of that side, though all its blocks are there, is not answered before it is free: the other
 * side has ended; or it begins no more reads, because it has taken all that it misses or keeps off, or because the gate is closed,
 * and the last one is over. */

#include <stdbool.h>
#include <stdint.h>

enum { TWIN_MIN_BLOCKS = 8, TWIN_PATIENCE_US = 500 };

typedef struct twin twin;

/* From where a side takes its next block. */
typedef enum twin_from {
    TWIN_FROM_HOST, /* a block that nobody has taken */
    TWIN_FROM_TWIN, /* one that has landed at the other's */
    TWIN_ANYWAY,    /* from the host, whoever has taken it */
} twin_from;

/* Of n blocks, in chunks of `chunk`; NULL: no memory. */
twin *twin_create(uint32_t n, uint32_t chunk);
void twin_ref(twin *t);
void twin_unref(twin *t); /* NULL is fine */

/* Side `side` puts block `block` to `at`, as the other side's device sees it.  All of them before it is submitted. */
void twin_place(twin *t, unsigned side, uint32_t block, const uint8_t *at);
/* Side 1 is there, its places are set.  False: side 0 has ended. */
bool twin_join(twin *t);

/* Nobody begins another read from this side's places. */
void twin_close(twin *t, unsigned side);
/* No read from this side's places is going on, nor will there be one. */
bool twin_is_free(const twin *t, unsigned side);
void twin_back(twin *t, unsigned side);           /* its job is back: it reads nothing any more */
bool twin_may_read(const twin *t, unsigned side); /* it has taken a block, and may begin reads */

/* ---- on the mover's thread of `side` ---- */
/* The next block for this side to copy, and where it is if it comes from the twin: that read has begun, and twin_read_over ends
 * it.  False: there is none of that kind now. */
bool twin_take(twin *t, unsigned side, twin_from from, uint32_t *ret_block, const uint8_t **ret_at);
void twin_read_over(twin *t, unsigned side);
/* The copy of a block that was taken from the host is there, or has failed. */
void twin_landed(twin *t, unsigned side, uint32_t block);
void twin_failed(twin *t, unsigned side, uint32_t block);
/* Its copy from the twin has failed: this side takes it again, from the host, and nothing more from the twin. */
void twin_again(twin *t, unsigned side, uint32_t block);
uint32_t twin_missing(const twin *t, unsigned side); /* blocks that this side has not taken yet */
uint32_t twin_open(const twin *t);                   /* about how many nobody has taken */
/* What is left, and cannot be taken, is about to land at the other's. */
bool twin_may_hope(const twin *t, unsigned side);
/* The job of this side has ended.  True: it is free, see above, and stays so. */
bool twin_end(twin *t, unsigned side);

#endif
