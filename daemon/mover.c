#include "daemon/mover.h"

#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/sums.h"
#include "daemon/worker.h"

enum { BATCH_COPIES = 256, MAX_DEPTH = 4, SUM_THREADS = 12 };
#define BATCH_BYTES (UINT64_C(16) << 20)

struct mover {
    worker *worker;
    device *dev;
    device_queue *queue;
    device_dir dir;
    bool lost;      /* the thread's: the device has said so once */
    uint32_t depth; /* batches that are kept queued */
    sums *sums;     /* NULL: the device is no faster than one thread's sums */
    _Atomic uint64_t blocks, bytes;
    device_copy copies[BATCH_COPIES];
};

/* Where a job stands: the next byte to be queued is byte `offset` of plane `plane` of item `item`. */
typedef struct place {
    uint32_t item, plane;
    uint64_t offset;
} place;

/* A batch that the device has, or has refused. */
typedef struct batch {
    place from, to;
    uint64_t mark;
    bool queued;
    kvs_status status;
    kvs_err err;
} batch;

typedef struct run {
    mover *m;
    mover_job *j;
    place at;
    batch flying[MAX_DEPTH]; /* the oldest first */
    uint32_t n_flying;
    bool stopped;
    size_t n;        /* copies in this batch */
    size_t n_before; /* of these, before the item at hand */
    uint64_t bytes;  /* of this batch */
} run;

static uint32_t planes(const region_map *map)
{
    return map->cross_layer ? 1 : map->n_planes;
}

static uint64_t piece_bytes(const region_map *map, uint32_t plane)
{
    return map->cross_layer ? map->slot_bytes : map->planes[plane].page_bytes;
}

static uint64_t piece_offset(const region_map *map, uint32_t plane)
{
    return map->cross_layer ? 0 : map->planes[plane].block_offset;
}

/* Queue `bytes` more, as part of the block's last copy where both sides go on from it.  Never as part of
 * another block's: the two may lie in two pieces of the arena, and a driver refuses a copy across two
 * registrations. */
static bool add_copy(run *r, uint8_t *host, uint8_t *dev, uint64_t bytes)
{
    bool load = r->m->dir == DEVICE_LOAD;
    device_copy c = {load ? dev : host, load ? host : dev, bytes};
    device_copy *last = r->n > r->n_before ? &r->m->copies[r->n - 1] : NULL;

    if (last != NULL && (uint8_t *)last->dst + last->bytes == c.dst &&
        (const uint8_t *)last->src + last->bytes == c.src)
        last->bytes += bytes;
    else if (r->n < BATCH_COPIES)
        r->m->copies[r->n++] = c;
    else
        return false;
    r->bytes += bytes;
    return true;
}

static void next_item(run *r)
{
    r->at = (place){.item = r->at.item + 1};
}

/* The rest of the item's pages, as far as they fit.  Returns true if all of them did. */
static bool fill_item(run *r, const mover_item *it)
{
    const region_map *map = r->j->map;

    for (; r->at.plane < planes(map); r->at.plane++, r->at.offset = 0) {
        const region_plane *p = &map->planes[r->at.plane];
        uint64_t size = piece_bytes(map, r->at.plane), room = BATCH_BYTES - r->bytes;
        uint64_t left = size - r->at.offset, n = left < room ? left : room;
        uint8_t *host = it->host + piece_offset(map, r->at.plane) + r->at.offset;
        uint8_t *dev = p->base + (uint64_t)it->slot * p->stride + r->at.offset;

        if (n > 0 && !add_copy(r, host, dev, n))
            return false;
        r->at.offset += n;
        if (n < left)
            return false;
    }
    return true;
}

static bool verified(run *r, mover_item *it)
{
    uint64_t sum;
    kvs_err err;

    if (!it->verify || r->m->dir != DEVICE_LOAD)
        return true;
    sum = sums_one(it->host, r->j->map->slot_bytes);
    if (sum == it->checksum)
        return true;
    it->status = kvs_fail(&err, KVS_E_CORRUPT, "item %" PRIu32 ": checksum is %016" PRIx64 ", stored with %016" PRIx64,
                          (uint32_t)(it - r->j->items), sum, it->checksum);
    job_note(&r->j->job, it->status, &err);
    return false;
}

/* Collect the next batch.  Items that failed in an earlier one are left out. */
static void fill(run *r)
{
    r->n = 0;
    r->bytes = 0;
    while (r->at.item < r->j->n_items && r->bytes < BATCH_BYTES) {
        mover_item *it = &r->j->items[r->at.item];
        bool fresh = r->at.plane == 0 && r->at.offset == 0;

        /* Not behind other items of this batch: summing takes long, and they could be on their way. */
        if (fresh && r->n > 0 && it->verify && r->m->dir == DEVICE_LOAD)
            return;
        r->n_before = r->n;
        if (it->status == KVS_E_CANCELLED && (!fresh || verified(r, it)) && !fill_item(r, it))
            return;
        next_item(r);
    }
}

static void submit(run *r)
{
    const device_ops *ops = r->m->dev->ops;
    batch *b = &r->flying[r->n_flying++];

    *b = (batch){.from = r->at};
    fill(r);
    b->to = r->at;
    if (r->n > 0)
        b->status = ops->copy(r->m->queue, r->m->copies, r->n, &b->mark, &b->err);
    b->queued = r->n > 0 && b->status == KVS_OK;
}

/* What the batch did for one of its items; whole: its last byte was in there.  True: it is all there. */
static bool settle_item(mover_item *it, bool whole, kvs_status s)
{
    if (it->status != KVS_E_CANCELLED)
        return false; /* left out: corrupt, or failed before */
    if (s != KVS_OK)
        it->status = KVS_E_DEVICE;
    return s == KVS_OK && whole;
}

/* A block is there.  Its sum is taken over what the arena holds, not over the device's side: a client may write there
 * meanwhile. */
static void finish_item(run *r, mover_item *it)
{
    mover *m = r->m;

    if (m->dir == DEVICE_STORE && r->j->checksum && m->sums != NULL)
        sums_put(m->sums, it->host, r->j->map->slot_bytes, &it->checksum);
    else if (m->dir == DEVICE_STORE && r->j->checksum)
        it->checksum = sums_one(it->host, r->j->map->slot_bytes);
    it->status = KVS_OK;
    (void)atomic_fetch_add_explicit(&m->blocks, 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&m->bytes, r->j->map->slot_bytes, memory_order_relaxed);
}

/* A batch is over. */
static void settle(run *r, const batch *b)
{
    for (uint32_t i = b->from.item; i < b->to.item; i++)
        if (settle_item(&r->j->items[i], true, b->status))
            finish_item(r, &r->j->items[i]);
    if (b->to.item < r->j->n_items && (b->to.plane > 0 || b->to.offset > 0))
        (void)settle_item(&r->j->items[b->to.item], false, b->status);
}

static void fail_all(mover *m, mover_job *j, const kvs_err *err)
{
    m->lost = true;
    for (uint32_t i = 0; i < j->n_items; i++)
        j->items[i].status = KVS_E_DEVICE_LOST;
    job_note(&j->job, KVS_E_DEVICE_LOST, err);
}

static bool may_submit(run *r)
{
    job *j = &r->j->job;
    kvs_err err;

    if (r->stopped || r->at.item >= r->j->n_items || r->n_flying >= r->m->depth)
        return false;
    if (!atomic_load_explicit(&j->stop, memory_order_relaxed))
        return true;
    r->stopped = true;
    job_note(j, kvs_fail(&err, KVS_E_CANCELLED, "stopped at item %" PRIu32 " of %" PRIu32, r->at.item, r->j->n_items),
             &err);
    return false;
}

/* The oldest batch leaves the device. */
static batch land(run *r)
{
    batch b = r->flying[0];

    for (uint32_t i = 1; i < r->n_flying; i++)
        r->flying[i - 1] = r->flying[i];
    r->n_flying--;
    if (b.queued)
        b.status = r->m->dev->ops->wait(r->m->queue, b.mark, &b.err);
    return b;
}

/* The device goes on with the next batch while the blocks of the last one are settled. */
static void run_batches(run *r)
{
    for (;;) {
        batch b;

        while (may_submit(r))
            submit(r);
        if (r->n_flying == 0)
            return;
        b = land(r);
        if (b.status == KVS_E_DEVICE_LOST) {
            fail_all(r->m, r->j, &b.err);
            return;
        }
        if (b.status != KVS_OK)
            job_note(&r->j->job, KVS_E_DEVICE, &b.err);
        settle(r, &b);
    }
}

static void mover_run(void *ud, job *j)
{
    mover *m = ud;
    run r = {.m = m, .j = (mover_job *)(void *)j};
    kvs_err err;

    if (m->lost) {
        (void)kvs_fail(&err, KVS_E_DEVICE_LOST, "device %s was lost before", m->dev->ops->name);
        fail_all(m, r.j, &err);
        return;
    }
    run_batches(&r);
    if (m->sums != NULL)
        sums_finish(m->sums);
}

static kvs_status mover_start(void *ud, kvs_err *err)
{
    mover *m = ud;

    return m->dev->ops->queue_open(m->dev, m->dir, &m->queue, err);
}

static void mover_stop(void *ud)
{
    mover *m = ud;

    m->dev->ops->queue_close(m->queue);
}

static const worker_ops load_ops = {"kvs-load", mover_start, mover_run, mover_stop};
static const worker_ops store_ops = {"kvs-store", mover_start, mover_run, mover_stop};

/* Beside the mover's own thread; a core is left to the loop. */
static unsigned sum_threads(void)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);

    return cpus > 2 ? (unsigned)(cpus - 2 < SUM_THREADS ? cpus - 2 : SUM_THREADS) : 1;
}

kvs_status mover_create(mover **ret, device *dev, device_dir dir, work_sink sink, kvs_err *err)
{
    mover *m;
    kvs_status s;

    if (dir != DEVICE_LOAD && dir != DEVICE_STORE)
        return kvs_fail(err, KVS_E_INVALID, "mover: direction %d is neither load nor store", (int)dir);
    m = calloc(1, sizeof *m);
    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "mover: no memory");
    /* The library looks at the processor once, at its first sum, and without a lock: not in several threads.
     */
    (void)sums_one(m->copies, sizeof m->copies);
    m->dev = dev;
    m->dir = dir;
    m->depth = dev->ops->depth < 1 ? 1 : dev->ops->depth > MAX_DEPTH ? MAX_DEPTH : dev->ops->depth;
    s = m->depth > 1 && dir == DEVICE_STORE ? sums_create(&m->sums, sum_threads(), err) : KVS_OK;
    if (s == KVS_OK)
        s = worker_create(&m->worker, dir == DEVICE_LOAD ? &load_ops : &store_ops, m, sink, err);
    if (s != KVS_OK) {
        sums_destroy(m->sums);
        free(m);
        return s;
    }
    *ret = m;
    return KVS_OK;
}

void mover_submit(mover *m, mover_job *j)
{
    /* What no batch has reached is cancelled: true of a dropped job and of the rest of a stopped one. */
    for (uint32_t i = 0; i < j->n_items; i++) {
        j->items[i].status = KVS_E_CANCELLED;
        if (m->dir == DEVICE_STORE)
            j->items[i].checksum = 0;
    }
    worker_submit(m->worker, &j->job);
}

void mover_kick(mover *m)
{
    worker_kick(m->worker);
}

void mover_destroy(mover *m)
{
    if (m == NULL)
        return;
    worker_destroy(m->worker);
    sums_destroy(m->sums);
    free(m);
}

void mover_get_stats(const mover *m, mover_stats *ret)
{
    worker_stats w;

    worker_get_stats(m->worker, &w);
    *ret = (mover_stats){.jobs = w.jobs,
                         .blocks = atomic_load_explicit(&m->blocks, memory_order_relaxed),
                         .bytes = atomic_load_explicit(&m->bytes, memory_order_relaxed),
                         .busy_us = w.busy_us,
                         .failed = w.failed,
                         .queued = w.queued,
                         .oldest_us = w.oldest_us};
}
