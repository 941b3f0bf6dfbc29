#ifndef KVS_CTL_BENCH_USER_H
#define KVS_CTL_BENCH_USER_H

/* Bench user: a client of a private daemon with blocks on the GPU, and what bench asks of it.
 *
 * Knows libkvstride and client_cuda.  Does not know figures or clocks.
 * One thread a user.  Owns its connection, its regions and its pinned memory. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/client_cuda.h"
#include "proto/client/kvstride.h"

/* A client with a region of private slots, and a copy of them in pinned host memory for the raw copies. */
typedef struct bench_user {
    kvs_client *client;
    kvs_ns *ns;
    kvs_region *region, *scratch; /* scratch: under an imported region */
    uint8_t *base;
    uint64_t slot_bytes;
    uint32_t n;
    kvs_slot *slots;
    uint8_t *keys;     /* of blocks named_id.. */
    uint64_t named_id; /* plus one; 0: none yet */
    kvs_status *stored;
    kvs_load_result *loaded;
    client_cuda_lane *lane;
    void *pinned;
} bench_user;

/* n blocks of mla_bf16.  pages: one tensor a layer, in memory that is handed in as an engine's own. */
kvs_status bench_user_open(bench_user *u, const char *socket, uint32_t layers, uint32_t tokens, uint32_t n, bool pages,
                           kvs_err *err);
void bench_user_close(bench_user *u); /* any number of times, from zeros on */
/* An engine knows its keys: they are made outside the clock. */
void bench_user_name(bench_user *u, uint64_t first_id);
kvs_status bench_user_store(bench_user *u, uint64_t first_id, kvs_err *err); /* all n blocks */
kvs_status bench_user_load(bench_user *u, uint64_t first_id, uint32_t n, kvs_err *err);
/* The first `bytes` of its blocks, in one copy, from or to pinned memory of its own. */
kvs_status bench_user_raw(bench_user *u, bool load, uint64_t bytes, kvs_err *err);

#endif
