#ifndef KVS_TESTS_SUPPORT_DIR_FIXTURE_H
#define KVS_TESTS_SUPPORT_DIR_FIXTURE_H

/* A pool and a directory without a daemon, and keys made from numbers.
 *
 * Knows the interfaces of pool and directory.  Does not know how a test judges.  One thread.
 * Owns both; fixture_fini checks the books a last time.  Failures are Criterion assertions. */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/directory.h"

enum { FIXTURE_SLOT_BYTES = 2304, FIXTURE_MAX_LIST = 4096, FIXTURE_TENANTS = 4 };

typedef struct fixture_event {
    uint32_t type, cause, ns, depth;
    uint64_t id; /* of the key */
} fixture_event;

typedef struct fixture {
    pool *pool;
    directory *dir;
    uint32_t ns; /* the first one: tenant 1, blocks of FIXTURE_SLOT_BYTES */
    uint64_t now_us;
    uint64_t n_events;
    fixture_event last[64]; /* event number n is at n % 64 */
    kvs_status status[FIXTURE_MAX_LIST];
    pool_slot slot[FIXTURE_MAX_LIST];
} fixture;

/* n_blocks slots in all, in extents of per_extent; every piece usable. */
void fixture_init(fixture *f, uint32_t n_blocks, uint32_t per_extent);
/* The same with one tenant, number 0, who owns the first namespace. */
void fixture_init_alone(fixture *f, uint32_t n_blocks, uint32_t per_extent);
void fixture_init_with(fixture *f, const pool_config *c);
/* The same with a policy that counts what it is asked: fixture_victims. */
void fixture_init_counted(fixture *f, const pool_config *c);
uint64_t fixture_victims(void); /* how often it proposed one since then */
uint64_t fixture_touches(void); /* how often a block was renewed */
void fixture_fini(fixture *f);

/* A namespace of `tenant` with `layers` x 1,152 bytes a block. */
uint32_t fixture_open(fixture *f, uint32_t tenant, const char *model, uint32_t layers);

void fixture_key(uint64_t id, uint8_t key[32]);
uint64_t fixture_id(const uint8_t key[32]);
/* n keys: ids first, first + 1, ...; valid until the next call */
const uint8_t *fixture_keys(uint64_t first, uint32_t n);

/* Admit n keys as the blocks first_depth .. of a chain whose block before is parent (0: none), into status
 * and slot. */
void fixture_admit(fixture *f, uint32_t ns, uint64_t first, uint32_t n, uint32_t first_depth, uint64_t parent);
/* The same, then commit those that were admitted; how many. */
uint32_t fixture_store(fixture *f, uint32_t ns, uint64_t first, uint32_t n, uint32_t first_depth, uint64_t parent);
uint32_t fixture_lookup(fixture *f, uint32_t ns, uint64_t first, uint32_t n);
bool fixture_has(fixture *f, uint32_t ns, uint64_t id);
/* Hold and let go: a load. */
kvs_status fixture_load(fixture *f, uint32_t ns, uint64_t id);
kvs_status fixture_hold(fixture *f, uint32_t ns, uint64_t id, pool_slot *ret);
kvs_status fixture_reserve(fixture *f, uint32_t ns, uint64_t first, uint32_t n, uint64_t owner, uint32_t ttl_ms,
                           directory_lease *ret);
/* A reset, all of its steps. */
void fixture_reset(directory *d, uint32_t tenant, uint32_t ns, bool pinned_too, directory_reset_result *ret);
directory_stats fixture_stats(const fixture *f);
void fixture_check(const fixture *f);

#endif
