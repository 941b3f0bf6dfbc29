#include "daemon/pool_impl.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Taking over an earlier life's blocks.  Everything is looked at before anything is changed; and each change (a row freed,
 * an extent without blocks unbound) leaves a table that the next life could adopt as well. */

static bool refuse(pool *p, const char *what, uint64_t at, uint64_t found, uint64_t wanted)
{
    (void)snprintf(p->adoption.why, sizeof p->adoption.why, "%s of %llu: found %llu, wanted %llu", what, ULL(at),
                   ULL(found), ULL(wanted));
    return false;
}

/* ---- layouts ---- */

/* The layout of a record, added if it is new; POOL_NONE: its record is bad, or its blocks do not fit an extent. */
static uint32_t adopt_layout(pool *p, uint32_t record)
{
    layout *l = &p->layouts[p->n_layouts];

    for (uint32_t i = 0; i < p->n_layouts; i++)
        if (p->layouts[i].record == record)
            return i;
    memset(l, 0, sizeof *l);
    if (table_get_layout(&p->table, record, l->digest, &l->slot_bytes) != TABLE_GOOD)
        return POOL_NONE;
    if (l->slot_bytes < POOL_SLOT_MIN_BYTES || l->slot_bytes % 16 != 0 || l->slot_bytes > p->extent_bytes)
        return POOL_NONE;
    l->record = record;
    l->per_extent = (uint32_t)(p->extent_bytes / l->slot_bytes);
    l->avail = POOL_NONE;
    return p->n_layouts++;
}

/* Read all bindings; the layouts that they name are in the books afterwards. */
static bool read_bindings(pool *p)
{
    for (uint32_t e = 0; e < p->n_adoptable; e++) {
        extent *x = &p->extents[e];
        uint32_t record = 0, n_slots = 0;
        enum table_found found = table_get_extent(&p->table, e, &record, &n_slots);

        if (found == TABLE_VOID)
            continue;
        if (found == TABLE_BAD)
            return refuse(p, "checksum of the binding of extent", e, 0, 1);
        x->layout = adopt_layout(p, record);
        if (x->layout == POOL_NONE)
            return refuse(p, "layout of extent", e, record, p->extent_bytes);
        if (n_slots == 0 || n_slots > p->layouts[x->layout].per_extent)
            return refuse(p, "slots of extent", e, n_slots, p->layouts[x->layout].per_extent);
        x->n_slots = n_slots;
    }
    return true;
}

/* ---- rows ---- */

static bool keep_row(pool *p, pool_slot s, const pool_row *r)
{
    if (r->state != POOL_READY) {
        p->adoption.freed += r->state != POOL_FREE;
        return false;
    }
    if (r->check != row_check(r, s))
        p->adoption.torn++;
    else if (r->checksum == 0)
        p->adoption.no_sum++;
    else
        return true;
    return false;
}

/* Rows [from, to) of an extent: memory that was written at some time.  `bound`: they may hold blocks. */
static void scan_rows(pool *p, uint32_t e, uint32_t from, uint32_t to, bool bound)
{
    extent *x = &p->extents[e];

    for (uint32_t i = from; i < to; i++) {
        pool_slot s = e * p->rows_per_extent + i;
        const pool_row *r = sparse_touch(&p->table.rows, s);

        if (r->gen == 0 && r->state == POOL_FREE)
            continue; /* never taken */
        if (i < x->n_slots)
            x->n_used = i + 1;
        if (bound && keep_row(p, s, r))
            x->n[POOL_READY]++;
        else if (r->state != POOL_FREE)
            row_set_state(p, s, POOL_FREE, 0);
    }
}

/* Only pages that the file has: reading another would make it cost memory. */
static void scan_extent(pool *p, uint32_t e, uint32_t from, uint32_t to, bool bound)
{
    const uint64_t row = sizeof(pool_row), base = table_rows_offset() + (uint64_t)e * p->rows_per_extent * row;
    const uint64_t end = base + to * row;
    uint64_t at = base + from * row;

    while (at < end) {
        off_t data = lseek(p->memory->table_fd, (off_t)at, SEEK_DATA), hole;

        if (data < 0 || (uint64_t)data >= end)
            return;
        if ((uint64_t)data > at)
            at = (uint64_t)data;
        hole = lseek(p->memory->table_fd, (off_t)at, SEEK_HOLE);
        data = (off_t)at;
        at = hole > data && (uint64_t)hole < end ? (uint64_t)hole : end;
        scan_rows(p, e, (uint32_t)(((uint64_t)data - base) / row), (uint32_t)((at - base + row - 1) / row), bound);
    }
}

/* The slots below n_used that hold nothing, the lowest first in line. */
static void list_free(pool *p, uint32_t e)
{
    extent *x = &p->extents[e];

    x->free_head = POOL_NONE;
    for (uint32_t i = x->n_used; i-- > 0;) {
        pool_slot s = e * p->rows_per_extent + i;

        if (sparse_touched(&p->table.rows, s) && row_at(p, s)->state == POOL_READY)
            continue;
        *(uint32_t *)sparse_touch(&p->links, s) = x->free_head;
        x->free_head = i;
    }
}

/* An extent of nobody, or one that a smaller pool no longer has: all its rows are free, before it is bound anew and
 * before a block's parent is looked for there. */
static void clear_extent(pool *p, uint32_t e)
{
    scan_extent(p, e, 0, p->rows_per_extent, false);
    p->extents[e] = (extent){.layout = POOL_NONE};
}

static void adopt_extent(pool *p, uint32_t e)
{
    extent *x = &p->extents[e];
    layout *l = &p->layouts[x->layout];

    scan_extent(p, e, 0, x->n_slots, e < p->n_limit);
    scan_extent(p, e, x->n_slots, p->rows_per_extent, false); /* those are nobody's */
    if (x->n[POOL_READY] == 0) {
        table_put_extent(&p->table, e, TABLE_NONE, 0);
        *x = (extent){.layout = POOL_NONE};
        return;
    }
    list_free(p, e);
    x->n[POOL_FREE] = x->n_slots - x->n[POOL_READY];
    x->pending = true;
    p->n_early++;
    l->n_extents++;
    l->n_slots += x->n_slots;
    l->n[POOL_READY] += x->n[POOL_READY];
    l->n[POOL_FREE] += x->n[POOL_FREE];
    p->waste += p->extent_bytes - x->n_slots * l->slot_bytes;
    p->adoption.ready += x->n[POOL_READY];
}

/* Extents that the earlier life did not have: whatever their rows say. */
static void clear_rest(pool *p)
{
    const uint64_t bytes = (uint64_t)p->rows_per_extent * sizeof(pool_row);

    for (uint64_t e = p->n_adoptable; e < p->n_extents; e++) {
        off_t data = lseek(p->memory->table_fd, (off_t)(table_rows_offset() + e * bytes), SEEK_DATA);

        if (data < 0)
            return;
        e = ((uint64_t)data - table_rows_offset()) / bytes;
        if (e < p->n_extents)
            clear_extent(p, (uint32_t)e);
    }
}

void pool_adopt(pool *p)
{
    if (!read_bindings(p)) {
        for (uint32_t e = 0; e < p->n_extents; e++)
            p->extents[e] = (extent){.layout = POOL_NONE};
        p->n_layouts = 0;
        return;
    }
    for (uint32_t e = 0; e < p->n_adoptable; e++)
        if (p->extents[e].layout != POOL_NONE)
            adopt_extent(p, e);
        else
            clear_extent(p, e);
    clear_rest(p);
    p->adoption.adopted = true;
}
