#ifndef KVS_CTL_TRACE_H
#define KVS_CTL_TRACE_H

/* Prefix traces: requests as lists of block ids, read from the JSON Lines form that the Mooncake traces use
 * ({"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [..]} a line), or
 * generated.
 *
 * Knows the file form.  Does not know keys, clients or the daemon.  Immutable once read: any thread may read
 * it. Owns its lists. */

#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

typedef struct trace {
    uint32_t n_requests, longest; /* longest: blocks of the longest request */
    uint64_t n_blocks;            /* references, in all */
    uint64_t *start;              /* [n_requests + 1] into ids */
    uint64_t *ids;                /* [n_blocks] */
} trace;

/* E_CONFIG names file, line and what is wrong with it. */
kvs_status trace_read(trace *ret, const char *path, kvs_err *err);

/* n requests of chats that share system prompts and grow turn by turn; the same seed gives the same trace. */
kvs_status trace_generate(trace *ret, uint32_t n_requests, uint32_t longest, uint64_t seed, kvs_err *err);

void trace_free(trace *t); /* any number of times */

#endif
