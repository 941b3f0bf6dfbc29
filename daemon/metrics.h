#ifndef KVS_DAEMON_METRICS_H
#define KVS_DAEMON_METRICS_H

/* Metrics: what is counted, and the picture of it that other threads may look at.
 *
 * Knows numbers and their names.  Does not know sockets, HTTP or text.  Counts belong to the loop thread, which adds to
 * plain integers; a snapshot is a plain value of whoever holds it, without pointers into anything.
 *
 *   request, conn, server, main --add--> counts, edge --metrics_fill (loop)--> snapshot --board--> text, JSON, page
 *
 * No count is ever taken back, and none belongs to a connection: the work of clients that have left stays in. */

#include <stdbool.h>
#include <stdint.h>

#include "daemon/decoder.h"
#include "daemon/directory.h"
#include "daemon/mover.h"
#include "daemon/pool.h"
#include "proto/status.h"
#include "proto/wire.h"

enum {
    METRICS_OPS = 29,      /* by number; 0: what is no op */
    METRICS_STATUSES = 24, /* by number */
    METRICS_BUCKETS = 25,  /* the i-th: at most 2^i us; from 1 us to 16.8 s */
    METRICS_NAMES = 16,    /* different names of one family of counts, with "other" */
    METRICS_LAYOUTS = 32,  /* besides "other" */
    METRICS_TENANTS = 64,  /* besides "other" */
    METRICS_NAME_BYTES = 64,
};

/* ---- time from a request's arrival to its reply, by kind of op ---- */
enum metrics_class {
    METRICS_LOOKUP, /* LOOKUP, RESERVE, RELEASE */
    METRICS_LOAD,
    METRICS_STORE,
    METRICS_COMPUTE, /* WRITE, DECODE, EXTEND */
    METRICS_REGION,  /* REGION_*, SLOT_* */
    METRICS_CONTROL, /* the others */
    METRICS_CLASSES,
};
enum metrics_class metrics_class_of(uint16_t op);
const char *metrics_class_name(enum metrics_class c); /* "lookup" */

typedef struct histogram {
    uint64_t n[METRICS_BUCKETS + 1]; /* the last: longer than the last bucket's end */
    uint64_t sum_ns;
} histogram;
void histogram_add(histogram *h, uint64_t ns);
uint64_t histogram_count(const histogram *h);
uint64_t histogram_end_us(uint32_t bucket); /* of one below METRICS_BUCKETS */
/* End in us of the bucket that holds the `percent`-th percentile; 0: empty; UINT64_MAX: beyond the last. */
uint64_t histogram_percentile_us(const histogram *h, double percent);

/* ---- counts of the core ---- */
typedef struct metrics_counts {
    uint64_t received, in_flight, answered;     /* requests; received = answered + in_flight */
    uint64_t by[METRICS_OPS][METRICS_STATUSES]; /* answered */
    histogram latency[METRICS_CLASSES];
    uint64_t lookup_keys;   /* asked for by LOOKUP */
    uint64_t no_copy_loads; /* blocks answered from the device */
    uint64_t lost_blocks;   /* found unreadable and dropped */
} metrics_counts;

void metrics_received(metrics_counts *m);
/* One request was answered, `ns` after it came. */
void metrics_answered(metrics_counts *m, uint16_t op, kvs_status s, uint64_t ns);

/* ---- counts by a name, a literal; more names than fit are "other" ---- */
typedef struct metrics_names {
    struct {
        const char *name; /* NULL: unused, as all behind it */
        uint64_t n;
    } of[METRICS_NAMES];
} metrics_names;
void metrics_count(metrics_names *m, const char *name, uint64_t n); /* n = 0: so that it is there to be seen */

/* ---- counts around the core: connections and the process; owned by main ---- */
typedef struct metrics_edge {
    uint64_t start_unix_s;
    uint64_t accepted_clients, accepted_admins;
    metrics_names refused; /* not let in, by reason */
    metrics_names dropped; /* disconnected for a fault, by reason */
    metrics_names reloads; /* by result */
} metrics_edge;
void metrics_edge_init(metrics_edge *e);

/* ---- the picture ---- */
enum metrics_rule {                        /* every one of them must be 0 */
                    METRICS_RULE_ARENA,    /* bytes: sum of the states - arena */
                    METRICS_RULE_LAYOUTS,  /* bytes: of all layouts' slots - those of the pool's states */
                    METRICS_RULE_RESIDENT, /* blocks: adopted + stored - removed - resident */
                    METRICS_RULE_LOOKUPS,  /* keys: asked for - hits - misses */
                    METRICS_RULE_TENANTS,  /* every count, and the bytes charged, summed over tenants - that of all */
                    METRICS_RULE_REQUESTS, /* received - answered - in flight */
                    METRICS_RULE_REPLIES,  /* answered by op and status - answered */
                    METRICS_RULE_LATENCY,  /* timed - answered */
                    METRICS_RULES,
};
const char *metrics_rule_name(enum metrics_rule r);

enum { METRICS_SLOT_STATES = 5 }; /* by enum pool_state */

typedef struct metrics_layout {
    uint32_t id; /* POOL_NONE: all the others */
    uint64_t slots[METRICS_SLOT_STATES], bytes[METRICS_SLOT_STATES];
} metrics_layout;

typedef struct metrics_tenant {
    uint32_t id;                   /* of the row that is "other": meaningless */
    char name[METRICS_NAME_BYTES]; /* UTF-8 or not: whoever prints it sees to that */
    uint64_t namespaces, ready_blocks, ready_bytes, leased_bytes, pinned_bytes;
    uint64_t used_bytes, quota_bytes, floor_bytes; /* charged, whatever its state; quota: 0 = none */
    uint64_t clients, for_others; /* for_others: evicted for another tenant's store, of those evicted */
    directory_counts counts;
} metrics_tenant;

typedef struct metrics_work { /* of a device's workers, or of all devices' */
    mover_stats load, store;
    decoder_stats compute;
} metrics_work;

typedef struct metrics_device {
    char name[16]; /* "cuda0" */
    metrics_work work;
} metrics_device;

typedef struct metrics_snapshot {
    uint64_t seq;      /* counts the pictures taken; 0: none */
    uint64_t taken_us; /* on the loop's clock */
    uint64_t age_us;   /* of this copy, when it was handed out */
    uint64_t fill_ns;  /* time of the loop that all pictures before this one took */
    uint64_t uptime_us;
    uint8_t boot_id[16];
    char device[16];                 /* kind of all devices */
    uint32_t health, reasons;        /* enum wire_health, enum health_reason */
    uint64_t running_us, in_call_us; /* the longest that a worker has been in our code, or in a call */
    bool ready, draining, device_lost, growing, piece_failed;
    uint32_t n_pieces, n_namespaces, n_regions, n_clients, n_admins, n_requests;
    pool_bytes pool;
    uint64_t region_bytes, max_region_bytes, import_bytes, request_bytes;
    directory_stats dir;
    metrics_counts counts;
    metrics_edge edge;
    uint32_t n_devices; /* 1.. */
    metrics_device devices[WIRE_MAX_DEVICES];
    metrics_work work;             /* of all of them */
    uint32_t n_layouts, n_tenants; /* rows below; one of "other" besides where more exist */
    metrics_layout layouts[METRICS_LAYOUTS + 1];
    metrics_tenant tenants[METRICS_TENANTS + 1];
    uint64_t log_lines[4], log_left_out; /* error, warn, info, debug */
    int64_t error[METRICS_RULES];
} metrics_snapshot;

/* Sums compared: fills `error` from the rest. */
void metrics_check(metrics_snapshot *s);

/* Loop thread: everything but seq and fill_ns.  Takes a time that depends on layouts and namespaces, not on keys, leases
 * or clients. */
struct core;
void metrics_fill(const struct core *c, uint64_t now_us, metrics_snapshot *ret);

#endif
