/* Health: what the workers are at, and whether all is well. */
#include "daemon/beat.h"
#include "daemon/core.h"

void core_get_work(const core *c, uint32_t i, metrics_work *ret)
{
    const core_device *d = &c->devices[i];

    *ret = (metrics_work){0};
    if (d->load)
        mover_get_stats(d->load, &ret->load);
    if (d->store)
        mover_get_stats(d->store, &ret->store);
    if (d->decoder)
        decoder_get_stats(d->decoder, &ret->compute);
}

static uint64_t longest(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static void add_moved(mover_stats *to, const mover_stats *s)
{
    to->jobs += s->jobs;
    to->blocks += s->blocks;
    to->bytes += s->bytes;
    to->kernel_bytes += s->kernel_bytes;
    to->device_sum_bytes += s->device_sum_bytes;
    to->exchange_failed += s->exchange_failed;
    to->busy_us += s->busy_us;
    to->failed += s->failed;
    to->queued += s->queued;
    to->oldest_us = longest(to->oldest_us, s->oldest_us);
    for (uint32_t p = 0; p < MOVER_PATHS; p++) {
        to->path[p].blocks += s->path[p].blocks;
        to->path[p].bytes += s->path[p].bytes;
        to->path[p].busy_us += s->path[p].busy_us;
    }
}

void core_get_all_work(const core *c, metrics_work *ret)
{
    *ret = (metrics_work){0};
    for (uint32_t i = 0; i < c->n_devices; i++) {
        metrics_work w;

        core_get_work(c, i, &w);
        add_moved(&ret->load, &w.load);
        add_moved(&ret->store, &w.store);
        ret->compute.jobs += w.compute.jobs;
        ret->compute.calls += w.compute.calls;
        ret->compute.busy_us += w.compute.busy_us;
        ret->compute.failed += w.compute.failed;
        ret->compute.queued += w.compute.queued;
        ret->compute.oldest_us = longest(ret->compute.oldest_us, w.compute.oldest_us);
    }
}

static bool is_stuck(const core *c)
{
    metrics_work w;

    core_get_all_work(c, &w);
    if (longest(longest(w.load.oldest_us, w.store.oldest_us), w.compute.oldest_us) > CORE_STUCK_US)
        return true;
    return beat_oldest(BEAT_IN_CALL).us > CORE_STUCK_US; /* the pinner's, too */
}

uint32_t core_health(const core *c, uint32_t *ret_reasons)
{
    uint32_t why = 0;

    why |= core_is_ready(c) ? 0 : HEALTH_NO_PIECE;
    why |= c->grow_failed ? HEALTH_PIECE_FAILED : 0;
    why |= is_stuck(c) ? HEALTH_STUCK : 0;
    why |= c->lost != KVS_OK ? HEALTH_DEVICE_LOST : 0;
    why |= c->draining || c->paused ? HEALTH_DRAINS : 0;
    why |= c->old_config ? HEALTH_OLD_CONFIG : 0;
    *ret_reasons = why;
    if (why & HEALTH_DRAINS)
        return WIRE_HEALTH_DRAINING;
    if (why & (HEALTH_PIECE_FAILED | HEALTH_STUCK | HEALTH_DEVICE_LOST | HEALTH_OLD_CONFIG))
        return WIRE_HEALTH_DEGRADED;
    return why ? WIRE_HEALTH_STARTING : WIRE_HEALTH_OK;
}
