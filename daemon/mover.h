#ifndef KVS_DAEMON_MOVER_H
#define KVS_DAEMON_MOVER_H

/* Mover: one thread a device and direction that copies blocks between host slots and device slots.
 *
 * Knows region maps, the device table and checksums.  Does not know keys, namespaces, sockets.
 * Threads: create, submit, kick, destroy on the loop thread; everything else on its own.
 * Ownership: a job, its items, map and counter page are borrowed from submit (or begin) to on_done.
 *
 * Jobs of one tenant run in submit order except those whose `after` is not reached; between tenants see worker.h: a turn is
 * one batch, and one of at most two blocks while others wait.  Items of a job are submitted to the
 * device in bounded batches (settings; at most 256 copies by engine, 1,024 by kernel), adjacent pages of a block merged.  job.stop is
 * looked at before each batch; a block that is cut there is E_CANCELLED.  A batch that fails costs the items
 * that had bytes in it; a lost device costs every item, and every later job without another device call.
 * A load with a twin (twin.h) takes its blocks in the order that the two of them make, whole ones; those that come from the
 * twin's device go in batches of their own, beside the others.  A failed one of these costs nothing: its blocks come from the host.
 * A job may begin while the loop still looks up its later items: begin, add ..., complete.  It ends after complete.
 * While the last batches of a job are on their way the first ones of the next are queued behind them, within the same
 * depth, if no other tenant has ready jobs: many jobs in a row keep the link as busy as one. */

#include <stdint.h>

#include "daemon/job.h"
#include "daemon/route.h"
#include "daemon/region_map.h"
#include "daemon/twin.h"
#include "kernels/device.h"

typedef struct mover mover;

/* 16 MiB reach 0.990 of the link, 64 MiB 0.997; more urgent work waits for the batches that the device has. */
enum { MOVER_MAX_DEPTH = 4, MOVER_BATCH_BYTES = 16 << 20, MOVER_ALONE = 4 /* times the size, where there is none */ };
enum { MOVER_MAX_PULLS = 2, MOVER_MAX_FLYING = MOVER_MAX_DEPTH + MOVER_MAX_PULLS }; /* pulls: batches from a twin */
#define MOVER_NO_SUM UINT32_MAX

typedef struct mover_item {
    uint8_t *host;     /* the block's slot in the arena */
    uint32_t slot;     /* in the region */
    uint32_t run;      /* not 0: blocks of one run that are neighbours on both sides may be copied as one */
    kvs_status status; /* out: OK, E_CORRUPT (verify failed), E_DEVICE, E_DEVICE_LOST, E_CANCELLED */
    /* Store: out, sums_one of the block as the device holds it, or as it has come into the arena: the same, unless its owner
     * writes to it meanwhile.  Load with verify: in, what it must be. */
    uint64_t checksum;
    bool verify; /* load: compare first; nothing is copied on a mismatch */
} mover_item;

typedef struct mover_place { /* the next byte to be queued is byte `offset` of plane `plane` of item `item` */
    uint32_t item, plane;
    uint64_t offset;
} mover_place;

typedef struct mover_batch { /* that the device has, or has refused */
    mover_place from, to;
    uint64_t mark, bytes, queued_us;
    device_how how;
    bool queued, pulled; /* pulled: from the twin */
    bool summed;         /* the device has the sums of the blocks that end in it */
    kvs_status status;
    kvs_err err;
} mover_batch;

typedef struct mover_job {
    job job;
    const region_map *map;
    mover_item *items;
    uint32_t n_items;         /* the loop's: it may add more between begin and complete */
    bool checksum;            /* store: compute it (else 0) */
    bool imported;            /* the slots are an engine's own: for the numbers only */
    _Atomic uint32_t n_ready; /* items that the mover may look at */
    _Atomic bool open;        /* there may be more */
    uint32_t n_most;          /* of items, while it is open */
    bool held_back;           /* until complete */
    twin *twin;               /* load: or NULL; then the map is cross-layer and nothing is to be verified */
    unsigned side;            /* of it */
    uint32_t *order; /* with a twin: [2 * n_items], the mover's: items as they were taken; places are in there then */
    /* The mover's: where the job stands, and its batches on the device, the oldest first. */
    mover_place at;
    mover_batch flying[MOVER_MAX_FLYING];
    uint32_t n_flying;
    uint64_t hopes_since_us; /* that the twin lands what is missing; 0: it does not */
    uint64_t queued_bytes;
    uint32_t n_batches; /* that were queued */
    bool announced;     /* that it is about to end */
    uint32_t open_sum;  /* of the block that has landed in part; MOVER_NO_SUM */
} mover_job;

/* By whose slots they are and how a block lies there. */
enum mover_path {
    MOVER_DAEMON_REGION, /* whole blocks in a region of the daemon */
    MOVER_ENGINE_BLOCKS, /* whole blocks in an engine's memory */
    MOVER_ENGINE_PAGES,  /* a piece for each plane, there */
    MOVER_EXCHANGE,      /* whole blocks that came from a twin's device, wherever they lie */
    MOVER_PATHS,
};

typedef struct mover_path_stats {
    uint64_t blocks, bytes, busy_us; /* of jobs that have ended: with the job's end all three are right together */
} mover_path_stats;

typedef struct mover_stats {                               /* read from any thread, each value by itself */
    uint64_t jobs, blocks, bytes, busy_us, failed, queued; /* as worker_stats; blocks and bytes: copied whole */
    uint64_t kernel_bytes;                                 /* of batches that a kernel has copied */
    uint64_t device_sum_bytes;                             /* whose checksums the device has made */
    uint64_t exchange_failed; /* batches from a twin; their blocks came from the host after all */
    uint64_t oldest_us;       /* age of the job that is being waited for by the device; 0 if idle */
    mover_path_stats path[MOVER_PATHS];
} mover_stats;

typedef struct mover_settings {
    uint64_t batch_bytes; /* at most, of one batch */
    uint64_t sums_us;     /* the device makes checksums while a call takes no longer (see route.h); 0: processors do */
    route_rules rules;
} mover_settings;

kvs_status mover_create(mover **ret, device *dev, device_dir dir, work_sink sink, kvs_err *err);
void mover_set(mover *m, const mover_settings *s); /* any thread; from the next turn on */
void mover_submit(mover *m, mover_job *j);
/* The same in parts, so that the first bytes are on their way while later items are looked up, for up to n_most items: those
 * that are there now, more with each add (which says that n_items has grown), and the end of adding.  Before complete nothing
 * is posted; the caller does not leave the loop meanwhile, for the mover looks out for what is to come. */
void mover_begin(mover *m, mover_job *j, uint32_t n_most);
void mover_add(mover *m, mover_job *j);
void mover_complete(mover *m, mover_job *j);
/* How many items to look up before the next add: of the first ones no more than keep the device busy for a moment. */
uint32_t mover_part(const mover_job *j, uint32_t n_left);
void mover_expect(mover *m);             /* a job comes within a moment: the thread may wake up meanwhile */
bool mover_drop(mover *m, mover_job *j); /* as worker_drop */
void mover_kick(mover *m);               /* after job.stop */
/* Whether no other tenant's work can come in between: then batches are longer.  Any thread; from the next turn on. */
void mover_alone(mover *m, bool alone);
void mover_share(mover *m, uint32_t tenant, uint32_t share); /* as worker_share */
void mover_destroy(mover *m); /* waits for what runs, drops what waits; every on_done has been posted when it returns */
void mover_get_stats(const mover *m, mover_stats *ret);

#endif
