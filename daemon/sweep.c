/* Sweeps: what a RESET or a large DROP takes away goes a part in each turn of the loop, so that everybody else is answered in
 * between.  A block that goes takes 0.2 to 2 us, by what the caches hold of it. */
#include "daemon/core.h"

static bool is_in_scope(const sweep *w, const region *g)
{
    return tenant_may(w->keys.tenant, g->tenant) && (w->keys.ns == WIRE_NONE32 || g->ns == w->keys.ns);
}

/* What is in use in host memory stays on devices, too. */
static bool forget_named(sweep *w, region *g, uint32_t *budget)
{
    for (; g->n_keys > 0 && w->at < w->n_named; w->at++) {
        if (*budget == 0)
            return true;
        --*budget;
        if (w->results[w->at] != KVS_E_BUSY && region_forget(g, w->named + (size_t)w->at * WIRE_KEY_BYTES))
            w->results[w->at] = KVS_OK;
    }
    return false;
}

static bool forget(sweep *w, region *g, uint32_t *budget)
{
    return w->named ? forget_named(w, g, budget) : region_forget_some(g, &w->at, budget);
}

static bool step_regions(sweep *w, uint32_t *budget)
{
    for (; w->region; w->region = w->region->next, w->at = 0) {
        if (*budget == 0 || (is_in_scope(w, w->region) && forget(w, w->region, budget)))
            return true;
        *budget -= *budget > 0;
    }
    return false;
}

void core_sweep_regions(sweep *w)
{
    uint32_t budget;

    do
        budget = UINT32_MAX;
    while (step_regions(w, &budget));
}

/* Blocks first: a copy that has ended when theirs are gone brings no key of them to a device any more. */
static bool step(core *c, sweep *w)
{
    uint32_t budget = SWEEP_STEP;

    if (w->named)
        return step_regions(w, &budget);
    if (!w->begun)
        directory_reset_begin(c->dir, &w->keys);
    w->begun = true;
    if (!w->keys.over) {
        if (directory_reset_step(c->dir, &w->keys, &budget))
            return true;
        w->region = c->regions;
    }
    return step_regions(w, &budget);
}

void core_sweep(core *c, sweep *w)
{
    sweep **at = &c->sweeps;

    while (*at)
        at = &(*at)->next;
    w->next = NULL;
    *at = w;
}

/* In turn: one of few blocks does not wait for the end of one of many. */
void core_sweep_step(core *c)
{
    sweep *w = c->sweeps;

    if (!w)
        return;
    c->sweeps = w->next;
    if (!w->stopped && step(c, w)) {
        core_sweep(c, w);
        return;
    }
    if (w->begun && !w->named)
        directory_reset_end(c->dir, &w->keys);
    c->step_due = true; /* the table may be smaller now */
    w->on_end(c, w);
}

void core_sweeps_pass(core *c, const region *g)
{
    for (sweep *w = c->sweeps; w; w = w->next)
        if (w->region == g) {
            w->region = g->next;
            w->at = 0;
        }
}
