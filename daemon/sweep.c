/* Sweeps: what a RESET takes away goes a part in each turn of the loop, so that everybody else is answered in between. */
#include "daemon/core.h"

/* Slots that one turn looks at, of all sweeps together.  A block that goes takes 0.2 to 2 us, by what the caches hold of it. */
enum { SWEEP_STEP = 1024 };

static bool is_in_scope(const sweep *w, const region *g)
{
    return tenant_may(w->keys.tenant, g->tenant) && (w->keys.ns == WIRE_NONE32 || g->ns == w->keys.ns);
}

/* Blocks first: a copy that has ended when theirs are gone brings no key of them to a device any more. */
static bool step(core *c, sweep *w)
{
    uint32_t budget = SWEEP_STEP;

    if (!w->begun)
        directory_reset_begin(c->dir, &w->keys);
    w->begun = true;
    if (!w->keys.over) {
        if (directory_reset_step(c->dir, &w->keys, &budget))
            return true;
        w->region = c->regions;
    }
    for (; w->region; w->region = w->region->next, w->slot = 0) {
        if (budget == 0 || (is_in_scope(w, w->region) && region_forget_some(w->region, &w->slot, &budget)))
            return true;
        budget -= budget > 0;
    }
    return false;
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
    if (w->begun)
        directory_reset_end(c->dir, &w->keys);
    c->step_due = true; /* the table may be smaller now */
    w->on_end(c, w);
}

void core_sweeps_pass(core *c, const region *g)
{
    for (sweep *w = c->sweeps; w; w = w->next)
        if (w->region == g) {
            w->region = g->next;
            w->slot = 0;
        }
}
