#include "daemon/mover_impl.h"

#include "daemon/thread.h"

/* With the block before it in the batch: as in may_join; addresses of the twin's device are in no arena. */
static bool may_join_taken(const mover_run *r, uint32_t block, bool pulled)
{
    const mover_job *j = r->j;
    uint32_t before = r->n > 0 ? j->order[r->at.item - 1] : block;

    return before + 1 == block && (pulled || (j->items[block].run != 0 && j->items[block].run == j->items[before].run));
}

static void fill_shared(mover_run *r, twin_from from)
{
    mover_job *j = r->j;
    const region_plane *p = &j->map->planes[0];
    uint64_t bytes = j->map->slot_bytes;
    bool pulled = from == TWIN_FROM_TWIN;
    const uint8_t *at = NULL;
    uint32_t block = 0;

    for (uint32_t n = 0; n < r->most && r->n < r->n_limit && (n == 0 || r->bytes + bytes <= r->limit); n++) {
        if (!twin_take(j->twin, j->side, from, &block, &at))
            return;
        r->n_before = may_join_taken(r, block, pulled) ? 0 : r->n;
        (void)mover_add_copy(r, pulled ? (uint8_t *)(uintptr_t)at : j->items[block].host,
                             p->base + (uint64_t)j->items[block].slot * p->stride, bytes);
        j->order[r->at.item] = block;
        mover_next_item(r);
    }
}

/* Half of what is open is the twin's.  Small batches at the end: what is on its way then is what the twin must wait for. */
static uint64_t size_shared(const mover_run *r, twin_from from)
{
    const mover_job *j = r->j;
    uint64_t most = r->m->now.batch_bytes, left = twin_open(j->twin) * j->map->slot_bytes / 4;
    uint64_t first = j->n_batches < MOVER_FULL_BATCHES ? MOVER_FIRST_BYTES << j->n_batches : most;

    if (from != TWIN_FROM_HOST)
        return most;
    most = first < most ? first : most;
    return left < most ? left : most;
}

static bool submit_kind(mover_run *r, twin_from from)
{
    bool pulled = from == TWIN_FROM_TWIN;
    mover_batch *b = mover_begin_batch(r);

    b->pulled = pulled;
    if (pulled)
        b->how = (device_how){DEVICE_FROM_PEER, 0};
    r->limit = size_shared(r, from);
    fill_shared(r, from);
    if (r->n == 0)
        return false;
    mover_send_batch(r, b);
    return true;
}

/* What is missing cannot be taken: is it about to land at the twin's?  That gets a moment, when nothing else is to be done. */
static bool may_hope(mover_job *j)
{
    uint64_t now = thread_now_us();

    if (!twin_may_hope(j->twin, j->side))
        return false;
    if (j->n_flying > 0)
        return true;
    if (j->hopes_since_us == 0)
        j->hopes_since_us = now;
    thread_relax();
    return now - j->hopes_since_us < TWIN_PATIENCE_US;
}

uint32_t mover_own_flying(const mover_job *j)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < j->n_flying; i++)
        n += !j->flying[i].pulled;
    return n;
}

/* The own link first: the batches from the twin go beside it. */
bool mover_submit_shared(mover_run *r, uint32_t depth)
{
    mover_job *j = r->j;
    uint32_t own = mover_own_flying(j), pulls = j->n_flying - own;

    if (own < depth && submit_kind(r, TWIN_FROM_HOST))
        return true;
    if (pulls == MOVER_MAX_PULLS)
        return false;
    if (submit_kind(r, TWIN_FROM_TWIN)) {
        j->hopes_since_us = 0;
        return true;
    }
    return own < depth && !may_hope(j) && submit_kind(r, TWIN_ANYWAY);
}

void mover_settle_shared(mover_run *r, const mover_batch *b)
{
    mover_job *j = r->j;

    if (b->pulled && b->status != KVS_OK)
        (void)atomic_fetch_add_explicit(&r->m->exchange_failed, 1, memory_order_relaxed);
    for (uint32_t i = b->from.item; i < b->to.item; i++) {
        uint32_t block = j->order[i];

        if (b->pulled)
            twin_read_over(j->twin, j->side);
        if (b->pulled && b->status != KVS_OK) {
            twin_again(j->twin, j->side, block);
            continue;
        }
        if (mover_settle_item(&j->items[block], true, b->status)) {
            mover_finish_item(r, &j->items[block]);
            r->n_pulled += b->pulled;
        }
        if (!b->pulled && b->status == KVS_OK)
            twin_landed(j->twin, j->side, block);
        else if (!b->pulled)
            twin_failed(j->twin, j->side, block);
    }
}

void mover_end_shared(mover_job *j)
{
    for (uint32_t i = 0; i < j->n_flying; i++)
        for (uint32_t k = j->flying[i].from.item; j->flying[i].pulled && k < j->flying[i].to.item; k++)
            twin_read_over(j->twin, j->side);
    j->n_flying = 0;
    if (!twin_end(j->twin, j->side))
        j->job.signal_by_worker = false;
}
