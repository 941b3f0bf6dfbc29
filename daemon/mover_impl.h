#ifndef KVS_DAEMON_MOVER_IMPL_H
#define KVS_DAEMON_MOVER_IMPL_H

/* What the files of the mover share: mover.c (turns, batches, the ends of jobs), mover_shared.c (jobs that have a twin) and
 * mover_sums.c (checksums of stored blocks).
 *
 * Knows the same as daemon/mover.h.  Nobody else includes it.  The mover's thread, but for what mover.h says of others. */

#include "daemon/mover.h"

#include <pthread.h>

#include "daemon/sums.h"
#include "daemon/worker.h"

enum {
    MOVER_KERNEL_COPIES = 1024, /* of a batch */
    MOVER_FULL_BATCHES = 16,    /* of a job, from which on its batches are no shorter for being its first ones */
};
/* Where batches are queued ahead, a job begins and ends with small ones: the first is on its way at once, and not much is
 * left to do when the last has landed. */
#define MOVER_FIRST_BYTES (UINT64_C(4) << 20)

struct mover {
    worker *worker;
    work_sink sink;
    pthread_mutex_t lock; /* set */
    mover_settings set;
    mover_settings now; /* the thread's: for the turn at hand */
    route route;
    uint64_t landed_us; /* the latest batch */
    device *dev;
    device_queue *queue;
    device_dir dir;
    uint32_t depth; /* batches that are kept queued */
    sums *sums;     /* NULL: the device is no faster than one thread's sums */
    bool early;     /* jobs begin before all of their items are there */
    _Atomic bool alone;
    bool lost; /* the thread's: the device has said so once */
    _Atomic uint64_t blocks, bytes, kernel_bytes, device_sum_bytes, exchange_failed;
    struct {
        _Atomic uint64_t blocks, bytes, busy_us;
    } path[MOVER_PATHS];
    device_copy copies[MOVER_KERNEL_COPIES];
    const void *sum_blocks[DEVICE_SUM_BLOCKS];
    uint64_t sum_parts[DEVICE_SUM_PARTS];
};

typedef struct mover_run {
    mover *m;
    mover_job *j;
    uint32_t n_items; /* of the job, so far */
    bool open;        /* more may come */
    mover_place at;
    size_t n;        /* copies in this batch */
    size_t n_before; /* of these, before the item at hand */
    uint64_t bytes;  /* of this batch */
    uint64_t limit;  /* of bytes */
    size_t n_limit;  /* of copies */
    uint64_t turn_bytes;
    uint32_t most;     /* blocks that it may touch */
    uint64_t n_whole;  /* blocks copied whole so far */
    uint64_t n_pulled; /* of these, from a twin */
} mover_run;

/* ---- mover.c ---- */
/* Queue `bytes` more, as part of the last copy where both sides go on from it.  As part of another block's only if that is
 * of the same run: else the two may lie in two pieces of the arena, and a driver refuses a copy across two registrations. */
bool mover_add_copy(mover_run *r, uint8_t *host, uint8_t *dev, uint64_t bytes);
void mover_next_item(mover_run *r);
mover_batch *mover_begin_batch(mover_run *r);        /* it begins where the job is */
void mover_send_batch(mover_run *r, mover_batch *b); /* it is filled: off to the device */
/* What the batch did for one of its items; whole: its last byte was in there.  True: it is all there. */
bool mover_settle_item(mover_item *it, bool whole, kvs_status s);
void mover_finish_item(mover_run *r, mover_item *it);

/* ---- mover_shared.c: a job with a twin, whole blocks in the order in which they are taken ---- */
/* Queue the next batch, if there is one and room for it. */
bool mover_submit_shared(mover_run *r, uint32_t depth);
void mover_settle_shared(mover_run *r, const mover_batch *b); /* it is over */
uint32_t mover_own_flying(const mover_job *j);                /* batches on the own link */
/* The job is over, and with it what a lost device has left flying.  The loop holds its answer back while the twin reads. */
void mover_end_shared(mover_job *j);

/* ---- mover_sums.c: checksums of stored blocks, by the device where that costs nobody anything, else by processors ---- */
/* Blocks of the job are whole on the device, and nothing else runs there: or it would cost others more than it is worth. */
bool mover_may_ask_device(const mover_run *r);
/* Have the device sum the blocks that end with a batch, which is queued: over its own side, so that what goes wrong on the way
 * is found, too.  b->summed: it does; else processors shall. */
void mover_ask_device(mover_run *r, mover_batch *b);
/* The first `bytes` of a block have landed with this batch: processors take its sum, of what the arena holds, unless the device
 * has. */
void mover_sum_item(mover_run *r, const mover_batch *b, mover_item *it, uint64_t bytes);
void mover_drop_open_sum(mover_run *r);
/* A job has ended: nobody may read or write what is its submitter's again.  A block that a stop has cut, or a lost device, is
 * not summed further; those that are whole are, whatever has become of the others. */
void mover_finish_sums(mover_run *r);

#endif
