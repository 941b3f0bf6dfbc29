#ifndef KVS_TESTS_SUPPORT_STORM_H
#define KVS_TESTS_SUPPORT_STORM_H

/* A storm: engine processes that do random things to a real daemon, are killed and stopped at random points, and compare
 * every byte that they load with what was stored.
 *
 * Knows libkvstride.  Does not know the daemon's inside: its books are read as an operator would.
 * Threads: one; engines are processes of their own.  Ownership: the daemon is the caller's. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/support/daemon_fixture.h"

enum { STORM_MAX_LAYOUTS = 4 };

typedef struct storm_plan {
    uint64_t seed, ops;    /* ops: of all engines together */
    uint32_t engines;      /* at a time */
    uint32_t threads;      /* of an engine, on one handle; 0: one */
    uint32_t layouts;      /* 1..STORM_MAX_LAYOUTS, of different slot sizes */
    uint32_t chains;       /* of 8 keys each, in every layout */
    uint32_t kills;        /* engines that end by SIGKILL, a third of them after a while of SIGSTOP */
    uint32_t daemon_kills; /* the daemon is killed, or asked to end, and started again so often */
    uint32_t pauses;       /* the daemon is stopped for some milliseconds so often: deadlines pass, replies come late */
    bool hostile;          /* every second engine scribbles over what it shares with the daemon */
} storm_plan;

typedef struct storm_result {
    uint64_t ops, loads, stores, kills; /* loads and stores: blocks; loads were compared */
    char why[512];                      /* of the first failure */
} storm_result;

/* Run it; when it returns no engine is left.  False: ret->why says what went wrong. */
bool storm_run(daemon_fixture *d, const storm_plan *p, storm_result *ret);

/* Read a number of a report section ("pool.free_bytes"; arrays count their elements, true is 1); -1: not there. */
double storm_number(const daemon_fixture *d, uint32_t section, const char *path);
/* Wait until the daemon has no client and nothing in flight, and look for what they should not have left: private slots,
 * leases, holds, regions, half-written blocks, wrong sums.  Then reset everything and look again. */
bool storm_left_nothing(const daemon_fixture *d, char *why, size_t cap);
/* Store new keys into the empty pool until every slot that one layout can have is taken, and find and compare all. */
bool storm_refill(const daemon_fixture *d, uint32_t layout, uint32_t n_slots, char *why, size_t cap);
uint64_t storm_slot_bytes(uint32_t layout);
/* Mappings of memfds in the daemon: counter pages and regions, those that clients brought or asked for. */
unsigned storm_mappings(const daemon_fixture *d);
/* Wait until it has at most n of them. */
bool storm_wait_mappings(const daemon_fixture *d, unsigned n);

#endif
