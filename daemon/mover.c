#include "daemon/mover.h"

#include <inttypes.h>
#include <stdlib.h>

#include <xxhash.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
/* The same sums from the widest vectors of this machine: the plain build of the library knows SSE2 only,
 * which costs a third of a copy's speed. */
#include <xxh_x86dispatch.h>
#endif

#include "daemon/beat.h"
#include "daemon/worker.h"

enum { BATCH_COPIES = 256, SHARED_BLOCKS = 2 };
#define BATCH_BYTES (UINT64_C(16) << 20)

struct mover {
    worker *worker;
    device *dev;
    device_queue *queue;
    device_dir dir;
    bool lost; /* the thread's: the device has said so once */
    _Atomic uint64_t blocks, bytes;
    device_copy copies[BATCH_COPIES];
};

typedef struct run {
    mover *m;
    mover_job *j;
    mover_place at;
    size_t n;        /* copies in this batch */
    size_t n_before; /* of these, before the item at hand */
    uint64_t bytes;  /* of this batch */
    uint32_t most;   /* blocks that it may touch */
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
    r->at = (mover_place){.item = r->at.item + 1};
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
    sum = XXH3_64bits(it->host, r->j->map->slot_bytes);
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
    uint32_t n_items = 0;

    r->n = 0;
    r->bytes = 0;
    for (; r->at.item < r->j->n_items && r->bytes < BATCH_BYTES && n_items < r->most; n_items++) {
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

static kvs_status copy_batch(run *r, kvs_err *err)
{
    const device_ops *ops = r->m->dev->ops;
    uint64_t mark;
    kvs_status s;

    if (r->n == 0)
        return KVS_OK;
    beat_mark(BEAT_IN_CALL);
    s = ops->copy(r->m->queue, r->m->copies, r->n, &mark, err);
    if (s == KVS_OK)
        s = ops->wait(r->m->queue, mark, err);
    beat_mark(BEAT_RUNNING);
    return s;
}

/* What the batch did for one of its items; whole: its last byte was in there.  The sum is taken over what the
 * arena holds, not over the device's side: a client may write there meanwhile. */
static void settle_item(run *r, mover_item *it, bool whole, kvs_status s)
{
    if (it->status != KVS_E_CANCELLED)
        return;              /* left out: corrupt, or failed before */
    beat_mark(BEAT_RUNNING); /* a batch of many long sums is no hang */
    if (s != KVS_OK) {
        it->status = KVS_E_DEVICE;
        return;
    }
    if (!whole)
        return;
    if (r->m->dir == DEVICE_STORE && r->j->checksum)
        it->checksum = XXH3_64bits(it->host, r->j->map->slot_bytes);
    it->status = KVS_OK;
    (void)atomic_fetch_add_explicit(&r->m->blocks, 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&r->m->bytes, r->j->map->slot_bytes, memory_order_relaxed);
}

/* The batch that began at `from` is over. */
static void settle(run *r, mover_place from, kvs_status s)
{
    for (uint32_t i = from.item; i < r->at.item; i++)
        settle_item(r, &r->j->items[i], true, s);
    if (r->at.item < r->j->n_items && (r->at.plane > 0 || r->at.offset > 0))
        settle_item(r, &r->j->items[r->at.item], false, s);
}

static void fail_all(mover *m, mover_job *j, const kvs_err *err)
{
    m->lost = true;
    for (uint32_t i = 0; i < j->n_items; i++)
        j->items[i].status = KVS_E_DEVICE_LOST;
    job_note(&j->job, KVS_E_DEVICE_LOST, err);
}

/* One batch.  True: that was the last of the job. */
static bool run_batch(run *r)
{
    job *j = &r->j->job;
    mover_place from = r->at;
    kvs_err err = {.status = KVS_OK};
    kvs_status s;

    if (from.item >= r->j->n_items)
        return true;
    if (atomic_load_explicit(&j->stop, memory_order_relaxed)) {
        job_note(j,
                 kvs_fail(&err, KVS_E_CANCELLED, "stopped at item %" PRIu32 " of %" PRIu32, from.item, r->j->n_items),
                 &err);
        return true;
    }
    fill(r);
    s = copy_batch(r, &err);
    if (s == KVS_E_DEVICE_LOST) {
        fail_all(r->m, r->j, &err);
        return true;
    }
    if (s != KVS_OK)
        job_note(j, KVS_E_DEVICE, &err);
    settle(r, from, s);
    return r->at.item >= r->j->n_items;
}

static bool mover_turn(void *ud, job *j, bool shared, uint64_t *ret_bytes)
{
    mover *m = ud;
    mover_job *x = (mover_job *)(void *)j;
    run r = {.m = m, .j = x, .at = x->at, .most = shared ? SHARED_BLOCKS : UINT32_MAX};
    bool ended;
    kvs_err err;

    if (m->lost) {
        (void)kvs_fail(&err, KVS_E_DEVICE_LOST, "device %s was lost before", m->dev->ops->name);
        fail_all(m, x, &err);
        return true;
    }
    ended = run_batch(&r);
    x->at = r.at;
    *ret_bytes = r.bytes;
    return ended;
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

static const worker_ops load_ops = {"kvs-load", mover_start, mover_turn, mover_stop};
static const worker_ops store_ops = {"kvs-store", mover_start, mover_turn, mover_stop};

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
    (void)XXH3_64bits(m->copies, sizeof m->copies);
    m->dev = dev;
    m->dir = dir;
    s = worker_create(&m->worker, dir == DEVICE_LOAD ? &load_ops : &store_ops, m, sink, err);
    if (s != KVS_OK) {
        free(m);
        return s;
    }
    *ret = m;
    return KVS_OK;
}

void mover_submit(mover *m, mover_job *j)
{
    j->at = (mover_place){0};
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

void mover_share(mover *m, uint32_t tenant, uint32_t share)
{
    worker_share(m->worker, tenant, share);
}

void mover_destroy(mover *m)
{
    if (m == NULL)
        return;
    worker_destroy(m->worker);
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
