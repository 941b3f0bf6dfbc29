/* The pool recounted: every sum on the books against the rows and the lists. */
#include "daemon/pool_impl.h"

#include <stdlib.h>

static kvs_status differs(kvs_err *err, const char *what, uint64_t at, uint64_t found, uint64_t counted)
{
    return kvs_fail(err, KVS_E_CORRUPT, "pool: %s of %llu: %llu found, %llu on the books", what, ULL(at), ULL(found),
                    ULL(counted));
}

static kvs_status check_free_list(const pool *p, uint32_t e, kvs_err *err)
{
    const extent *x = &p->extents[e];
    uint32_t n = x->n_slots - x->n_used;

    for (uint32_t i = x->free_head; i != POOL_NONE; n++) {
        pool_slot s = e * p->rows_per_extent + i;

        if (i >= x->n_used || n >= x->n_slots || slot_state(p, s) != POOL_FREE)
            return differs(err, "free list of extent", e, i, x->n_used);
        i = *(const uint32_t *)sparse_at(&p->links, s);
    }
    return n == x->n[POOL_FREE] ? KVS_OK : differs(err, "free list length of extent", e, n, x->n[POOL_FREE]);
}

static kvs_status check_extent(const pool *p, uint32_t e, layout *sums, kvs_err *err)
{
    const extent *x = &p->extents[e];
    uint32_t n[N_STATES] = {0};

    if (x->layout >= p->n_layouts || x->n_used > x->n_slots || x->n_slots > p->layouts[x->layout].per_extent)
        return differs(err, "shape of extent", e, x->n_used, x->n_slots);
    for (uint32_t i = 0; i < x->n_used; i++) {
        uint32_t st = slot_state(p, e * p->rows_per_extent + i);

        if (st >= N_STATES)
            return differs(err, "state of row", e * p->rows_per_extent + i, st, N_STATES);
        n[st]++;
    }
    n[POOL_FREE] += x->n_slots - x->n_used;
    for (uint32_t st = 0; st < N_STATES; st++) {
        if (n[st] != x->n[st])
            return differs(err, "states of extent", e, n[st], x->n[st]);
        sums[x->layout].n[st] += n[st];
    }
    sums[x->layout].n_extents += !x->closing;
    sums[x->layout].n_slots += x->n_slots;
    sums[x->layout].avail += extent_can_give(x);
    return check_free_list(p, e, err);
}

static kvs_status check_layout_sums(const pool *p, uint32_t i, const layout *sum, kvs_err *err)
{
    const layout *l = &p->layouts[i];
    uint32_t n_avail = 0;

    if (sum->n_extents != l->n_extents)
        return differs(err, "extents of layout", i, sum->n_extents, l->n_extents);
    if (sum->n_slots != l->n_slots || (p->max_slots != 0 && l->n_slots > p->max_slots))
        return differs(err, "slots of layout", i, sum->n_slots, l->n_slots);
    for (uint32_t st = 0; st < N_STATES; st++)
        if (sum->n[st] != l->n[st])
            return differs(err, "states of layout", i, sum->n[st], l->n[st]);
    for (uint32_t e = l->avail; e != POOL_NONE && n_avail <= sum->avail; e = p->extents[e].next) {
        if (p->extents[e].layout != i || !extent_can_give(&p->extents[e]))
            return differs(err, "extent in the list of layout", i, e, p->extents[e].layout);
        n_avail++;
    }
    return n_avail == sum->avail ? KVS_OK : differs(err, "extents with room of layout", i, n_avail, sum->avail);
}

static kvs_status check_law(const pool *p, uint64_t unassigned, kvs_err *err)
{
    pool_bytes b;
    uint64_t sum;

    pool_get_bytes(p, &b);
    if (unassigned * p->extent_bytes != b.unassigned)
        return differs(err, "unassigned bytes", 0, unassigned * p->extent_bytes, b.unassigned);
    sum = b.unassigned + b.waste + b.free + b.writing + b.ready + b.draining + b.quarantined;
    return sum == b.arena ? KVS_OK : differs(err, "sum of bytes", 0, sum, b.arena);
}

kvs_status pool_check(const pool *p, kvs_err *err)
{
    layout *sums = calloc(POOL_MAX_LAYOUTS, sizeof *sums);
    uint64_t unassigned = 0;
    kvs_status s = KVS_OK;

    if (sums == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pool: no memory to check it");
    for (uint32_t e = 0; e < p->n_extents && s == KVS_OK; e++) {
        if (p->extents[e].layout != POOL_NONE)
            s = check_extent(p, e, sums, err);
        else
            unassigned += e < p->n_usable && !p->extents[e].retired;
    }
    for (uint32_t i = 0; i < p->n_layouts && s == KVS_OK; i++)
        s = check_layout_sums(p, i, &sums[i], err);
    if (s == KVS_OK)
        s = check_law(p, unassigned, err);
    free(sums);
    return s;
}
