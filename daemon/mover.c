#include "daemon/mover_impl.h"

#include <inttypes.h>
#include <stdlib.h>

#include "daemon/beat.h"
#include "daemon/thread.h"
#include "proto/cpus.h"

enum {
    ENGINE_COPIES = 256, /* of a batch */
    SHARED_BLOCKS = 2,
    SUM_THREADS = 16, /* 4 to 8 GB/s each, from memory; a link has 55, and copies go on beside them */
};
#define LAST_BYTES  (UINT64_C(8) << 20) /* some 150 us, enough to have the loop awake in time */
#define PART_BYTES  (UINT64_C(8) << 20) /* that are looked up before the first of them are on their way */
#define LAST_SUMMED (UINT64_C(2) << 20)

/* What is there of the job now. */
static void look(mover_run *r)
{
    r->open = atomic_load_explicit(&r->j->open, memory_order_acquire); /* first: then the number is the last one */
    r->n_items = atomic_load_explicit(&r->j->n_ready, memory_order_acquire);
}

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

bool mover_add_copy(mover_run *r, uint8_t *host, uint8_t *dev, uint64_t bytes)
{
    bool load = r->m->dir == DEVICE_LOAD;
    device_copy c = {load ? dev : host, load ? host : dev, bytes};
    device_copy *last = r->n > r->n_before ? &r->m->copies[r->n - 1] : NULL;

    if (last != NULL && (uint8_t *)last->dst + last->bytes == c.dst &&
        (const uint8_t *)last->src + last->bytes == c.src)
        last->bytes += bytes;
    else if (r->n < r->n_limit)
        r->m->copies[r->n++] = c;
    else
        return false;
    r->bytes += bytes;
    return true;
}

void mover_next_item(mover_run *r)
{
    r->at = (mover_place){.item = r->at.item + 1};
}

/* The rest of the item's pages, as far as they fit.  Returns true if all of them did. */
static bool fill_item(mover_run *r, const mover_item *it)
{
    const region_map *map = r->j->map;

    for (; r->at.plane < planes(map); r->at.plane++, r->at.offset = 0) {
        const region_plane *p = &map->planes[r->at.plane];
        uint64_t size = piece_bytes(map, r->at.plane), room = r->limit - r->bytes;
        uint64_t left = size - r->at.offset, n = left < room ? left : room;
        uint8_t *host = it->host + piece_offset(map, r->at.plane) + r->at.offset;
        uint8_t *dev = p->base + (uint64_t)it->slot * p->stride + r->at.offset;

        if (n > 0 && !mover_add_copy(r, host, dev, n))
            return false;
        r->at.offset += n;
        if (n < left)
            return false;
    }
    return true;
}

static bool verified(mover_run *r, mover_item *it)
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

/* With the block before it: whole blocks only, for two planes may lie in two allocations. */
static bool may_join(const mover_run *r, const mover_item *it)
{
    return it->run != 0 && r->j->map->cross_layer && r->at.item > 0 && it[-1].run == it->run;
}

/* Collect the next batch.  Items that failed in an earlier one are left out. */
static void fill(mover_run *r)
{
    uint32_t n_items = 0;

    for (; r->at.item < r->n_items && r->bytes < r->limit && n_items < r->most; n_items++) {
        mover_item *it = &r->j->items[r->at.item];
        bool fresh = r->at.plane == 0 && r->at.offset == 0;

        /* Not behind other items of this batch: summing takes long, and they could be on their way. */
        if (fresh && r->n > 0 && it->verify && r->m->dir == DEVICE_LOAD)
            return;
        r->n_before = may_join(r, it) ? 0 : r->n;
        if (it->status == KVS_E_CANCELLED && (!fresh || verified(r, it)) && !fill_item(r, it))
            return;
        mover_next_item(r);
    }
}

static uint64_t nominal_piece(const region_map *map)
{
    return map->cross_layer || map->n_planes == 0 ? map->slot_bytes : map->slot_bytes / map->n_planes;
}

/* At most.  What processors sum while it comes in may not come in large lumps. */
static uint64_t full_batch(const mover_run *r, bool summed)
{
    bool alone = atomic_load_explicit(&r->m->alone, memory_order_relaxed);

    return r->m->now.batch_bytes * (alone && !summed ? MOVER_ALONE : 1);
}

/* Bytes of the next batch. */
static uint64_t size_batch(const mover_run *r)
{
    const mover_job *j = r->j;
    bool summed = r->m->sums != NULL && j->checksum && !(route_is_calm(&r->m->route) && mover_may_ask_device(r));
    uint64_t full = full_batch(r, summed), all = (r->open ? j->n_most : r->n_items) * j->map->slot_bytes;
    uint64_t left = all - j->queued_bytes, last = summed && all > LAST_BYTES ? LAST_SUMMED : LAST_BYTES;
    uint64_t first = j->n_batches < MOVER_FULL_BATCHES ? MOVER_FIRST_BYTES << j->n_batches : full;
    uint64_t most = first < full ? first : full;

    if (r->m->depth == 1)
        return r->m->now.batch_bytes;
    if (left <= last || left >= 2 * most)
        return left <= last && last < full ? last : most;
    left = (summed ? left / 2 : left - last) / 4096 * 4096; /* the fewer bytes come last, the sooner they are summed */
    left = left < most ? left : most;
    return left > last ? left : last < most ? last : most;
}

mover_batch *mover_begin_batch(mover_run *r)
{
    mover *m = r->m;
    mover_batch *b = &r->j->flying[r->j->n_flying];
    uint64_t now = thread_now_us();
    device_how how = route_choose(&m->route, &m->now.rules, nominal_piece(r->j->map), now);

    *b = (mover_batch){.from = r->at, .how = how, .queued_us = now};
    r->n_limit = how.means == DEVICE_BY_KERNEL ? MOVER_KERNEL_COPIES : ENGINE_COPIES;
    r->n = 0;
    r->bytes = 0;
    return b;
}

void mover_send_batch(mover_run *r, mover_batch *b)
{
    mover *m = r->m;

    r->j->n_flying++;
    b->to = r->at;
    b->bytes = r->bytes;
    r->j->queued_bytes += r->bytes;
    r->j->n_batches++;
    if (r->n == 0)
        return;
    beat_mark(BEAT_IN_CALL);
    b->status = m->dev->ops->copy(m->queue, m->copies, r->n, b->how, &b->mark, &b->err);
    beat_mark(BEAT_RUNNING);
    b->queued = b->status == KVS_OK;
}

static void submit(mover_run *r)
{
    mover_batch *b = mover_begin_batch(r);

    r->limit = size_batch(r);
    fill(r);
    mover_send_batch(r, b);
}

bool mover_settle_item(mover_item *it, bool whole, kvs_status s)
{
    if (it->status != KVS_E_CANCELLED)
        return false;        /* left out: corrupt, or failed before */
    beat_mark(BEAT_RUNNING); /* a batch of many long sums is no hang */
    if (s != KVS_OK)
        it->status = KVS_E_DEVICE;
    return s == KVS_OK && whole;
}

void mover_finish_item(mover_run *r, mover_item *it)
{
    mover *m = r->m;

    it->status = KVS_OK;
    r->n_whole++;
    (void)atomic_fetch_add_explicit(&m->blocks, 1, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&m->bytes, r->j->map->slot_bytes, memory_order_relaxed);
}

/* A batch is over. */
static void settle(mover_run *r, const mover_batch *b)
{
    mover_job *j = r->j;

    if (j->twin != NULL) {
        mover_settle_shared(r, b);
        return;
    }
    if (b->status != KVS_OK)
        mover_drop_open_sum(r);
    for (uint32_t i = b->from.item; i < b->to.item; i++)
        if (mover_settle_item(&j->items[i], true, b->status)) {
            mover_sum_item(r, b, &j->items[i], j->map->slot_bytes);
            mover_finish_item(r, &j->items[i]);
        }
    if (b->to.item >= r->n_items || (b->to.plane == 0 && b->to.offset == 0))
        return;
    (void)mover_settle_item(&j->items[b->to.item], false, b->status);
    if (j->items[b->to.item].status == KVS_E_CANCELLED && j->map->cross_layer)
        mover_sum_item(r, b, &j->items[b->to.item], b->to.offset);
}

/* True: the job ends by that. */
static bool fail_all(mover_run *r, const kvs_err *err)
{
    r->m->lost = true;
    for (uint32_t i = 0; i < r->n_items; i++)
        r->j->items[i].status = KVS_E_DEVICE_LOST;
    job_note(&r->j->job, KVS_E_DEVICE_LOST, err);
    return !r->open;
}

/* Items that are queued, or were. */
static uint32_t n_queued(const mover_run *r)
{
    return r->j->twin != NULL ? r->n_items - twin_missing(r->j->twin, r->j->side) : r->at.item;
}

/* Nothing of it is left to be queued. */
static bool all_queued(const mover_run *r)
{
    return n_queued(r) >= r->n_items;
}

/* Queue the next batch, if there is one and room for it. */
static bool submit_next(mover_run *r, uint32_t depth)
{
    if (all_queued(r) || atomic_load_explicit(&r->j->job.stop, memory_order_relaxed))
        return false;
    if (r->j->twin != NULL)
        return mover_submit_shared(r, depth);
    if (r->j->n_flying >= depth)
        return false;
    submit(r);
    return true;
}

/* How a kernel did: it began when it was queued, or when the batch before it had ended.  Where the device has made sums meanwhile,
 * their time has told. */
static void judge(mover *m, const mover_batch *b, uint64_t piece)
{
    uint64_t now = thread_now_us(), began = b->queued_us > m->landed_us ? b->queued_us : m->landed_us;

    (void)atomic_fetch_add_explicit(&m->kernel_bytes, b->bytes, memory_order_relaxed);
    if (!b->summed)
        route_saw(&m->route, &m->now.rules, b->how, piece, b->bytes, now - began, now);
}

/* The loop may as well be awake when what is left is short. */
static void announce_end(mover_run *r)
{
    mover_job *j = r->j;
    uint64_t flying = 0;

    for (uint32_t i = 0; i < j->n_flying; i++)
        flying += j->flying[i].bytes;
    if (j->announced || r->open || !all_queued(r) || flying > LAST_BYTES || r->m->depth == 1)
        return;
    j->announced = true;
    if (r->m->sink.soon != NULL)
        r->m->sink.soon(r->m->sink.ud);
}

/* The oldest batch leaves the device. */
static mover_batch land(mover_run *r)
{
    mover_job *j = r->j;
    mover_batch b = j->flying[0];

    for (uint32_t i = 1; i < j->n_flying; i++)
        j->flying[i - 1] = j->flying[i];
    j->n_flying--;
    if (!b.queued)
        return b;
    mover_ask_device(r, &b); /* what it has copied last; the sums take less than the copies do */
    if (b.status == KVS_E_DEVICE_LOST)
        return b;
    beat_mark(BEAT_IN_CALL);
    b.status = r->m->dev->ops->wait(r->m->queue, b.mark, &b.err);
    beat_mark(BEAT_RUNNING);
    if (b.how.means == DEVICE_BY_KERNEL && b.status == KVS_OK)
        judge(r->m, &b, nominal_piece(j->map));
    return b;
}

/* Nothing flies.  True: nothing will. */
static bool has_ended(const mover_run *r)
{
    job *j = &r->j->job;
    kvs_err err;

    if (r->open)
        return false;
    if (all_queued(r))
        return true;
    if (!atomic_load_explicit(&j->stop, memory_order_relaxed))
        return false;
    job_note(j, kvs_fail(&err, KVS_E_CANCELLED, "stopped at item %" PRIu32 " of %" PRIu32, n_queued(r), r->n_items),
             &err);
    return true;
}

/* The job at hand has nothing more for the link, or not now: so that the device goes on, the next one may use what is left of
 * the depth. */
static void queue_next(mover *m, uint32_t flying, uint32_t depth)
{
    mover_job *j = flying < depth ? (mover_job *)(void *)worker_next(m->worker) : NULL;
    mover_run r = {.m = m, .j = j, .most = UINT32_MAX};

    if (j == NULL)
        return;
    look(&r);
    if (j->n_batches == 0)
        j->n_batches = MOVER_FULL_BATCHES; /* nothing waits for its first bytes */
    r.at = j->at;
    while (!all_queued(&r) && (j->twin != NULL || !j->items[r.at.item].verify) && submit_next(&r, depth - flying))
        ; /* to verify takes long */
    j->at = r.at;
}

/* It has queued what it can; is there still a turn to come? */
static bool leaves_link(const mover_run *r)
{
    if (r->j->twin != NULL)
        return r->j->n_flying > 0 || !all_queued(r);
    return !r->open && all_queued(r) && r->j->n_flying > 0;
}

/* One batch lands, with others behind it so that the device goes on.  True: that was the last of the job. */
static bool run_batch(mover_run *r, uint32_t depth)
{
    mover_batch b;

    while (submit_next(r, depth))
        ;
    if (leaves_link(r))
        queue_next(r->m, mover_own_flying(r->j), depth);
    if (r->j->n_flying > 0) {
        announce_end(r);
        b = land(r);
        r->m->landed_us = thread_now_us();
        r->turn_bytes = b.bytes;
        if (b.status == KVS_E_DEVICE_LOST)
            return fail_all(r, &b.err);
        if (b.status != KVS_OK && !b.pulled) /* else it is made good from the host */
            job_note(&r->j->job, KVS_E_DEVICE, &b.err);
        settle(r, &b);
    }
    return r->j->n_flying == 0 && has_ended(r);
}

static void add_path(mover_run *r, enum mover_path p, uint64_t n_blocks, uint64_t busy_us)
{
    (void)atomic_fetch_add_explicit(&r->m->path[p].blocks, n_blocks, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&r->m->path[p].bytes, n_blocks * r->j->map->slot_bytes, memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&r->m->path[p].busy_us, busy_us, memory_order_relaxed);
}

static void count_path(mover_run *r, uint64_t busy_us)
{
    const mover_job *j = r->j;
    enum mover_path p = MOVER_DAEMON_REGION;
    uint64_t pulling_us = r->n_pulled > 0 ? busy_us * r->n_pulled / r->n_whole : 0;

    if (j->imported)
        p = j->map->cross_layer ? MOVER_ENGINE_BLOCKS : MOVER_ENGINE_PAGES;
    add_path(r, p, r->n_whole - r->n_pulled, busy_us - pulling_us);
    add_path(r, MOVER_EXCHANGE, r->n_pulled, pulling_us);
}

/* The device was lost in an earlier turn. */
static bool lose(mover_run *r)
{
    kvs_err err;

    (void)kvs_fail(&err, KVS_E_DEVICE_LOST, "device %s was lost before", r->m->dev->ops->name);
    return fail_all(r, &err);
}

static bool mover_turn(void *ud, job *j, bool shared, uint64_t *ret_bytes)
{
    mover *m = ud;
    mover_job *x = (mover_job *)(void *)j;
    mover_run r = {.m = m, .j = x, .at = x->at, .most = shared ? SHARED_BLOCKS : UINT32_MAX};
    uint64_t began = thread_now_us();
    bool ended;

    look(&r);
    (void)pthread_mutex_lock(&m->lock);
    m->now = m->set;
    (void)pthread_mutex_unlock(&m->lock);
    ended = m->lost ? lose(&r) : run_batch(&r, shared ? 1 : m->depth);
    if (ended)
        mover_finish_sums(&r); /* before the clock stops: the job is not over without them */
    count_path(&r, thread_now_us() - began);
    x->at = r.at;
    *ret_bytes = r.turn_bytes;
    if (ended && x->twin != NULL)
        mover_end_shared(x);
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

/* [queued ahead] */
static const worker_ops load_ops[2] = {{"kvs-load", mover_start, mover_turn, mover_stop, false},
                                       {"kvs-load", mover_start, mover_turn, mover_stop, true}};
static const worker_ops store_ops[2] = {{"kvs-store", mover_start, mover_turn, mover_stop, false},
                                        {"kvs-store", mover_start, mover_turn, mover_stop, true}};

/* At most: the movers, the loop and the clients need some, too. */
static unsigned sum_threads(void)
{
    unsigned cpus = cpus_usable(), most = cpus < 8 ? (cpus + 1) / 2 : cpus * 3 / 4;

    return most < SUM_THREADS ? most : SUM_THREADS;
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
    m->sink = sink;
    m->set = (mover_settings){.batch_bytes = MOVER_BATCH_BYTES, .sums_us = ROUTE_SUMS_US};
    (void)pthread_mutex_init(&m->lock, NULL);
    m->depth = dev->ops->depth < 1 ? 1 : dev->ops->depth > MOVER_MAX_DEPTH ? MOVER_MAX_DEPTH : dev->ops->depth;
    m->early = m->depth > 1 && thread_may_spin();
    s = m->depth > 1 && dir == DEVICE_STORE ? sums_create(&m->sums, sum_threads(), err) : KVS_OK;
    if (s == KVS_OK)
        s = worker_create(&m->worker, &(dir == DEVICE_LOAD ? load_ops : store_ops)[m->depth > 1], m, sink, err);
    if (s != KVS_OK) {
        sums_destroy(m->sums);
        (void)pthread_mutex_destroy(&m->lock);
        free(m);
        return s;
    }
    *ret = m;
    return KVS_OK;
}

/* Items behind the `from` that are there already. */
static void add_items(const mover *m, mover_job *j, uint32_t from)
{
    /* What no batch has reached is cancelled: true of a dropped job and of the rest of a stopped one. */
    for (uint32_t i = from; i < j->n_items; i++) {
        j->items[i].status = KVS_E_CANCELLED;
        if (m->dir == DEVICE_STORE)
            j->items[i].checksum = 0;
    }
    atomic_store_explicit(&j->n_ready, j->n_items, memory_order_release);
}

static void reset(const mover *m, mover_job *j, bool open)
{
    j->n_flying = 0;
    j->open_sum = MOVER_NO_SUM;
    j->queued_bytes = 0;
    j->n_batches = 0;
    j->announced = j->held_back = false;
    j->hopes_since_us = 0;
    j->at = (mover_place){0};
    add_items(m, j, 0);
    atomic_store_explicit(&j->open, open, memory_order_relaxed);
}

void mover_submit(mover *m, mover_job *j)
{
    reset(m, j, false);
    worker_submit(m->worker, &j->job);
}

void mover_begin(mover *m, mover_job *j, uint32_t n_most)
{
    reset(m, j, true);
    j->n_most = n_most;
    j->held_back = !m->early;
    if (m->early)
        worker_submit(m->worker, &j->job);
}

void mover_add(mover *m, mover_job *j)
{
    add_items(m, j, atomic_load_explicit(&j->n_ready, memory_order_relaxed));
}

uint32_t mover_part(const mover_job *j, uint32_t n_left)
{
    uint64_t first = j->map->slot_bytes == 0 ? n_left : PART_BYTES / j->map->slot_bytes;
    uint64_t n = j->n_items == 0 ? first : j->n_items * UINT64_C(3);

    return n == 0 ? n_left > 0 : n < n_left ? (uint32_t)n : n_left;
}

void mover_complete(mover *m, mover_job *j)
{
    bool submit = j->held_back; /* else the job may be over with the store below */

    mover_add(m, j);
    atomic_store_explicit(&j->open, false, memory_order_release);
    if (submit)
        worker_submit(m->worker, &j->job);
}

void mover_expect(mover *m)
{
    worker_expect(m->worker);
}

void mover_set(mover *m, const mover_settings *s)
{
    (void)pthread_mutex_lock(&m->lock);
    m->set = *s;
    (void)pthread_mutex_unlock(&m->lock);
}

void mover_alone(mover *m, bool alone)
{
    atomic_store_explicit(&m->alone, alone, memory_order_relaxed);
}

bool mover_drop(mover *m, mover_job *j)
{
    return worker_drop(m->worker, &j->job);
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
    sums_destroy(m->sums);
    (void)pthread_mutex_destroy(&m->lock);
    free(m);
}

void mover_get_stats(const mover *m, mover_stats *ret)
{
    worker_stats w;

    worker_get_stats(m->worker, &w);
    *ret = (mover_stats){.jobs = w.jobs,
                         .blocks = atomic_load_explicit(&m->blocks, memory_order_relaxed),
                         .bytes = atomic_load_explicit(&m->bytes, memory_order_relaxed),
                         .kernel_bytes = atomic_load_explicit(&m->kernel_bytes, memory_order_relaxed),
                         .device_sum_bytes = atomic_load_explicit(&m->device_sum_bytes, memory_order_relaxed),
                         .exchange_failed = atomic_load_explicit(&m->exchange_failed, memory_order_relaxed),
                         .busy_us = w.busy_us,
                         .failed = w.failed,
                         .queued = w.queued,
                         .oldest_us = w.oldest_us};
    for (int p = 0; p < MOVER_PATHS; p++)
        ret->path[p] = (mover_path_stats){
            .blocks = atomic_load_explicit(&m->path[p].blocks, memory_order_relaxed),
            .bytes = atomic_load_explicit(&m->path[p].bytes, memory_order_relaxed),
            .busy_us = atomic_load_explicit(&m->path[p].busy_us, memory_order_relaxed),
        };
}
