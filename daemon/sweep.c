/* Sweeps: what a RESET or a large DROP takes away goes a part in each turn of the loop, so that everybody else is answered in
 * between.  A block that goes takes 0.2 to 2 us, by what the caches hold of it. */
#include "daemon/core.h"

static bool is_in_scope(const core *c, const sweep *w, const region *g)
{
    const directory_ns *n = directory_namespace(c->dir, g->ns);

    return n && n->gone == w->keys.gone && tenant_may(w->keys.tenant, g->tenant) &&
           (w->keys.ns == WIRE_NONE32 || g->ns == w->keys.ns);
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

static bool step_regions(const core *c, sweep *w, uint32_t *budget)
{
    for (; w->region; w->region = w->region->next, w->at = 0) {
        if (*budget == 0 || (is_in_scope(c, w, w->region) && forget(w, w->region, budget)))
            return true;
        *budget -= *budget > 0;
    }
    return false;
}

void core_sweep_regions(const core *c, sweep *w)
{
    uint32_t budget;

    do
        budget = UINT32_MAX;
    while (step_regions(c, w, &budget));
}

/* Blocks first: a copy that has ended when theirs are gone brings no key of them to a device any more. */
static bool step(core *c, sweep *w)
{
    uint32_t budget = SWEEP_STEP;

    if (w->named)
        return step_regions(c, w, &budget);
    if (!w->begun)
        directory_reset_begin(c->dir, &w->keys);
    w->begun = true;
    if (!w->keys.over) {
        if (directory_reset_step(c->dir, &w->keys, &budget))
            return true;
        w->region = c->regions;
    }
    return step_regions(c, w, &budget);
}

/* ---- turns ---- */

static uint32_t owner_of(const sweep *w)
{
    if (w->keys.gone)
        return SWEEP_GONE;
    return w->keys.tenant < CONFIG_MAX_TENANTS ? w->keys.tenant : SWEEP_OPERATORS;
}

void core_sweep(core *c, sweep *w)
{
    sweep_line *l = &c->sweeps[owner_of(w)];

    if (!l->first)
        l->end = &l->first;
    w->next = NULL;
    *l->end = w;
    l->end = &w->next;
    c->n_sweeps++;
}

static uint32_t next_owner(const core *c)
{
    uint32_t i = c->swept;

    do
        i = (i + 1) % SWEEP_OWNERS;
    while (!c->sweeps[i].first && i != c->swept);
    return i;
}

sweep *core_next_sweep(const core *c)
{
    return c->n_sweeps > 0 ? c->sweeps[next_owner(c)].first : NULL;
}

/* In turn, by owners and then among those of one: one of few blocks does not wait for the end of one of many, nor one tenant, or
 * an operator, for all that another one wants. */
void core_sweep_step(core *c)
{
    sweep *w = core_next_sweep(c);

    if (!w)
        return;
    c->swept = owner_of(w);
    c->sweeps[c->swept].first = w->next;
    c->n_sweeps--;
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
    for (uint32_t i = 0; i < SWEEP_OWNERS && c->n_sweeps > 0; i++)
        for (sweep *w = c->sweeps[i].first; w; w = w->next)
            if (w->region == g) {
                w->region = g->next;
                w->at = 0;
            }
}
