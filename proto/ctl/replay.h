#ifndef KVS_CTL_REPLAY_H
#define KVS_CTL_REPLAY_H

/* Replay: a prefix trace played against a daemon, every loaded byte verified.
 *
 * For each request, in file order: LOOKUP its whole list, LOAD the leading hits (deepest chunk first, so that
 * the head of the prefix ends as the most recent), STORE the rest.  Blocks are filled from their key
 * (pattern.h) and slots are overwritten before each load, so that a copy that did not happen shows.
 *
 * Knows libkvstride and traces.  One thread a client; the trace is shared, everything else is each client's
 * own. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/ctl/trace.h"
#include "proto/status.h"

typedef struct replay_config {
    const char *socket; /* clients' or admin socket of a daemon */
    const trace *t;
    uint32_t layers, tokens, clients;
    bool progress;
} replay_config;

typedef struct replay_result {
    uint64_t requests, blocks, hit_blocks;
    uint64_t loaded_bytes, stored_bytes;
    uint64_t mismatches; /* loaded blocks with a wrong byte */
    uint64_t gone;       /* hits that another client's stores evicted before the load */
    uint64_t not_stored; /* E_NO_SPACE or worse */
    double seconds;
} replay_result;

kvs_status replay_run(const replay_config *r, replay_result *ret, kvs_err *err);

/* Settings for a private daemon that holds exactly n blocks of slot_bytes: max_bytes and extent_bytes. */
kvs_status replay_pool_size(uint64_t n, uint64_t slot_bytes, uint64_t *ret_max, uint64_t *ret_extent, kvs_err *err);

#endif
