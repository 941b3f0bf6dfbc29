#include "daemon/load.h"

#include <stdlib.h>

/* LOADs of the same blocks onto two devices: who finds whom, and how long an answer is held back.
 *
 * A LOAD that might have a twin waits on its tenant's list `lone` while its job is queued or runs.  A second one with the same
 * namespace and blocks, onto another device that exchange is allowed with, takes it off: they are each other's `other`.
 * When the first job of the two is back, the other one may still read from its slots: it is held back, until the other's job is back
 * too, or until its time is over, its deadline at the latest; then its gate is closed, and it waits for reads that have begun and no
 * more.  A failed, stopped or answered one is not worth waiting for, nor is one that will not read: the gate is closed at once.
 *
 *   lone --twin found--> paired --job back--> held --other's job back, or gate closed and last read over--> finished
 *     `--job back--> finished     `--job back, and free already (twin_is_free)--------------------------------^ */

enum {
    LOOKED_AT = 256,             /* lone ones, the latest: a client may have thousands that wait for their counters */
    CLOSED_US = 200,             /* to look again after */
    HELD_US = 1000,              /* at most, and for ... */
    HELD_BYTES_OF_A_US = 100000, /* ... each of these of the blocks: some four times what an exchange takes */
};

static void list_put(load **list, load *l)
{
    l->next = *list;
    if (l->next != NULL)
        l->next->link = &l->next;
    l->link = list;
    *list = l;
}

static void list_cut(load *l)
{
    if (l->link == NULL)
        return;
    *l->link = l->next;
    if (l->next != NULL)
        l->next->link = l->link;
    l->link = NULL;
}

/* ---- finding one ---- */

bool load_twin_is_likely(const load *l)
{
    return l->n >= TWIN_MIN_BLOCKS && l->job.map->cross_layer && l->request->peer->core->may_exchange[l->device];
}

/* Worth it: none of the blocks is to be looked at first. */
static bool may_share(const load *l)
{
    if (l->job.n_items < TWIN_MIN_BLOCKS)
        return false;
    for (uint32_t k = 0; k < l->job.n_items; k++)
        if (l->job.items[k].verify)
            return false;
    return true;
}

/* Of the blocks: it is compared before they are. */
static uint64_t sum_blocks(const load *l)
{
    uint64_t sum = l->request->peer->core->seed;

    for (uint32_t k = 0; k < l->job.n_items; k++)
        sum = (sum ^ (uintptr_t)l->job.items[k].host) * UINT64_C(0x9e3779b97f4a7c15) ^ sum >> 29;
    return sum;
}

static bool reach_each_other(const load *a, const load *b)
{
    const device_mem *of_a = a->seat->region->mem, *of_b = b->seat->region->mem;

    return of_a->dev->ops->mem_reached(of_a, of_b) && of_b->dev->ops->mem_reached(of_b, of_a);
}

static bool are_twins(core *c, const load *a, const load *b)
{
    if (a->blocks != b->blocks || a->ns != b->ns || a->job.n_items != b->job.n_items ||
        !c->exchanges[a->device][b->device].on)
        return false;
    for (uint32_t k = 0; k < a->job.n_items; k++)
        if (a->job.items[k].host != b->job.items[k].host)
            return false;
    return reach_each_other(a, b);
}

static void place(load *l, unsigned side)
{
    const region_plane *p = &l->job.map->planes[0];

    l->job.side = side;
    for (uint32_t k = 0; k < l->job.n_items; k++)
        twin_place(l->job.twin, side, k, p->base + (uint64_t)l->job.items[k].slot * p->stride);
}

/* Side 1 of the first one that fits and has not ended. */
static bool join(load *l)
{
    peer *p = l->request->peer;
    uint32_t n = 0;

    for (load *o = p->core->tenants[p->tenant].lone; o != NULL && n < LOOKED_AT; o = o->next, n++) {
        if (!are_twins(p->core, l, o))
            continue;
        l->job.twin = o->job.twin;
        place(l, 1);
        if (!twin_join(o->job.twin)) /* its job is on its way back */
            continue;
        twin_ref(l->job.twin);
        list_cut(o);
        l->other = o;
        o->other = l;
        return true;
    }
    l->job.twin = NULL;
    return false;
}

void load_twin_find(load *l)
{
    core *c = l->request->peer->core;
    uint64_t chunk;

    if (!may_share(l))
        return;
    l->blocks = sum_blocks(l);
    l->job.order = request_alloc(l->request, 2 * (uint64_t)l->job.n_items, sizeof(*l->job.order));
    if (l->job.order == NULL || join(l))
        return;
    chunk = (uint64_t)c->config->mover_batch_bytes / l->job.map->slot_bytes;
    l->job.twin = twin_create(l->job.n_items, chunk < l->job.n_items ? (uint32_t)chunk : l->job.n_items);
    if (l->job.twin == NULL)
        return; /* no memory: it goes its way alone */
    place(l, 0);
    list_put(&c->tenants[l->request->peer->tenant].lone, l);
}

/* ---- the end ---- */

static void finish(load *l)
{
    list_cut(l);
    if (l->other != NULL)
        l->other->other = NULL;
    l->other = NULL;
    twin_unref(l->job.twin);
    load_finish(l);
}

static bool is_held(const load *l)
{
    return l->back && l->link != NULL;
}

/* Let nobody in any more.  If it is held it ends when the next tick, or a later one, sees that it is free. */
static void close_gate(load *l)
{
    twin_close(l->job.twin, l->job.side);
    l->is_closed = true;
    l->request->peer->core->held_due_us = 0;
}

/* Is the other one about to take what it misses from here?  Not if it has not begun: it may wait for anything.  Nor if it misses
 * nothing, or cannot read from here. */
static bool is_waited_for(const load *l)
{
    const request *r = l->request;

    return l->job.job.status == KVS_OK && !r->answered && !r->cancelled && !r->peer->gone && !r->peer->core->draining &&
           twin_may_read(l->job.twin, 1 - l->job.side);
}

/* The clock of the core may be old: the next tick, which is due at once, says until when. */
static void hold(load *l)
{
    core *c = l->request->peer->core;

    list_put(&c->held, l);
    c->held_due_us = 0;
    if (!is_waited_for(l))
        close_gate(l);
}

void load_twin_back(load *l)
{
    load *o = l->other;

    l->back = true;
    if (l->job.twin == NULL) {
        load_finish(l);
        return;
    }
    twin_back(l->job.twin, l->job.side);
    if (!twin_is_free(l->job.twin, l->job.side)) {
        hold(l);
        return;
    }
    finish(l);
    if (o != NULL && is_held(o)) /* it waited for this one */
        finish(o);
}

void load_twin_stop(load *l, bool dropped)
{
    if (l->job.twin == NULL)
        return;
    if (dropped && !l->back)
        list_cut(l);
    if (dropped || is_held(l))
        close_gate(l);
}

/* Its blocks are there: no deadline may pass only because of the other one. */
static uint64_t hold_until(const load *l, uint64_t now_us)
{
    uint64_t until = now_us + HELD_US + l->job.n_items * l->job.map->slot_bytes / HELD_BYTES_OF_A_US;

    return until < l->request->deadline_us ? until : l->request->deadline_us;
}

/* When to look at it again; it is not free. */
static uint64_t look_again(load *l, uint64_t now_us)
{
    if (l->held_until_us == 0)
        l->held_until_us = hold_until(l, now_us);
    if (l->held_until_us <= now_us && !l->is_closed)
        close_gate(l);
    return l->is_closed ? now_us + CLOSED_US : l->held_until_us;
}

void load_twin_tick(core *c)
{
    uint64_t due = UINT64_MAX;

    for (load *l = c->held, *next; l != NULL; l = next) {
        uint64_t at = look_again(l, c->now_us);

        next = l->next;
        if (twin_is_free(l->job.twin, l->job.side))
            finish(l);
        else if (at < due)
            due = at;
    }
    c->held_due_us = due;
}
