#include "daemon/mover_impl.h"

#include "daemon/beat.h"
#include "daemon/thread.h"

/* Shorter blocks come in batches of very many, of which processors sum each at once. */
#define DEVICE_SUM_LEAST (UINT64_C(64) << 10)

_Static_assert(MOVER_NO_SUM == SUMS_NONE, "a sum that was not begun is none");
_Static_assert((int)SUMS_PARTS <= (int)DEVICE_SUM_PARTS, "one block fits a call");

static bool is_summed(const mover_run *r)
{
    return r->m->dir == DEVICE_STORE && r->j->checksum;
}

/* ---- by the device ---- */

bool mover_may_ask_device(const mover_run *r)
{
    const region_map *map = r->j->map;

    return is_summed(r) && r->m->dev->ops->sum != NULL && r->m->now.sums_us > 0 && map->cross_layer &&
           map->slot_bytes >= DEVICE_SUM_LEAST &&
           kvs_part_sum_fits(map->slot_bytes, sums_part_bytes(map->slot_bytes)) &&
           (((uintptr_t)map->planes[0].base | map->planes[0].stride) & 15) == 0 &&
           !route_is_busy(&r->m->route, thread_now_us());
}

/* The sums of items [n], as many as a call takes. */
static kvs_status sum_items(mover *m, const region_map *map, mover_item *const *items, uint32_t n, kvs_err *err)
{
    const uint64_t bytes = map->slot_bytes, began = thread_now_us();
    const uint32_t n_parts = sums_n_parts(bytes);
    device_sums s = {m->sum_blocks, n, bytes, sums_part_bytes(bytes), m->sum_parts};
    kvs_status st;
    uint64_t now;

    for (uint32_t i = 0; i < n; i++)
        m->sum_blocks[i] = map->planes[0].base + (uint64_t)items[i]->slot * map->planes[0].stride;
    beat_mark(BEAT_IN_CALL);
    st = m->dev->ops->sum(m->queue, &s, err);
    beat_mark(BEAT_RUNNING);
    now = thread_now_us();
    route_saw_sums(&m->route, m->now.sums_us, n * bytes, st == KVS_OK ? now - began : UINT64_MAX, now);
    if (st != KVS_OK)
        return st;
    for (uint32_t i = 0; i < n; i++)
        items[i]->checksum = sums_join(m->sum_parts + (uint64_t)i * n_parts, n_parts);
    (void)atomic_fetch_add_explicit(&m->device_sum_bytes, n * bytes, memory_order_relaxed);
    return KVS_OK;
}

/* The next items of the batch that processors have not begun and nothing has failed. */
static uint32_t next_items(mover_run *r, const mover_batch *b, uint32_t *at, mover_item *ret[DEVICE_SUM_BLOCKS])
{
    const uint32_t fit = DEVICE_SUM_PARTS / sums_n_parts(r->j->map->slot_bytes);
    uint32_t n = 0;

    for (; *at < b->to.item && n < fit && n < DEVICE_SUM_BLOCKS; (*at)++)
        if (r->j->items[*at].status == KVS_E_CANCELLED)
            ret[n++] = &r->j->items[*at];
    return n;
}

void mover_ask_device(mover_run *r, mover_batch *b)
{
    uint32_t n, at = b->from.item + (r->j->open_sum != MOVER_NO_SUM); /* that one goes on as it was begun */
    mover_item *items[DEVICE_SUM_BLOCKS];

    if (!mover_may_ask_device(r))
        return;
    b->summed = true;
    while (b->summed && (n = next_items(r, b, &at, items)) > 0) {
        kvs_err err;
        kvs_status s = sum_items(r->m, r->j->map, items, n, &err);

        b->summed = s == KVS_OK;
        if (s == KVS_E_DEVICE_LOST) {
            b->status = s;
            b->err = err;
        }
    }
}

/* ---- by processors ---- */

/* The first `bytes` of a block are there. */
static void reach(mover_run *r, mover_item *it, uint64_t bytes)
{
    mover_job *j = r->j;
    bool whole = bytes == j->map->slot_bytes;

    if (r->m->sums != NULL && j->open_sum == MOVER_NO_SUM)
        j->open_sum = sums_begin(r->m->sums, it->host, j->map->slot_bytes, &it->checksum);
    if (j->open_sum != MOVER_NO_SUM)
        sums_reach(r->m->sums, j->open_sum, bytes);
    else if (whole) /* nobody else has room for it: very many jobs were overtaken with a block half there */
        it->checksum = sums_one(it->host, bytes);
    if (whole)
        j->open_sum = MOVER_NO_SUM;
}

void mover_sum_item(mover_run *r, const mover_batch *b, mover_item *it, uint64_t bytes)
{
    if (is_summed(r) && (!b->summed || r->j->open_sum != MOVER_NO_SUM))
        reach(r, it, bytes);
}

void mover_drop_open_sum(mover_run *r)
{
    if (r->j->open_sum != MOVER_NO_SUM)
        sums_forget(r->m->sums, r->j->open_sum);
    r->j->open_sum = MOVER_NO_SUM;
}

void mover_finish_sums(mover_run *r)
{
    mover_drop_open_sum(r);
    if (r->m->sums != NULL)
        sums_finish(r->m->sums);
}
