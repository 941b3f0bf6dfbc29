/* Slots of the pool. */
#include "daemon/pool_impl.h"

#include <assert.h>
#include <string.h>
#include <xxhash.h>

/* ---- slots ---- */

static uint64_t pair(uint32_t low, uint32_t high)
{
    return (uint64_t)high << 32 | low;
}

uint32_t row_check(const pool_row *r, pool_slot s)
{
    return (uint32_t)XXH3_64bits_withSeed(r, offsetof(pool_row, word), pair(s, r->ns));
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pool_row.word");

static uint64_t word_of(enum pool_state state, uint32_t ns, uint32_t check)
{
    return (uint64_t)check << 32 | (uint64_t)ns << 16 | (uint64_t)state;
}

void row_set_state(pool *p, pool_slot s, enum pool_state to, uint32_t check)
{
    pool_row *r = row_at(p, s);

    table_store(&p->table, &r->word, word_of(to, to == POOL_WRITING ? 0 : r->ns, check));
}

/* The one place where a slot changes its state. */
static void slot_become(pool *p, pool_slot s, enum pool_state to)
{
    const pool_row *r = row_at(p, s);
    extent *x = &p->extents[s / p->rows_per_extent];
    layout *l = &p->layouts[x->layout];

    x->n[r->state]--;
    l->n[r->state]--;
    x->n[to]++;
    l->n[to]++;
    row_set_state(p, s, to, to == POOL_READY ? row_check(r, s) : 0);
}

static void store_key(const pool *p, pool_row *r, const uint8_t key[32])
{
    for (size_t i = 0; i < sizeof r->key; i += 8) {
        uint64_t w;

        memcpy(&w, key + i, sizeof w);
        table_store(&p->table, r->key + i, w);
    }
}

/* A new life: writing, with nothing of the one before but its key, which nobody reads. */
static void row_begin(pool *p, pool_slot s)
{
    pool_row *r = row_at(p, s);

    slot_become(p, s, POOL_WRITING);
    table_store(&p->table, &r->checksum, 0);
    table_store(&p->table, &r->gen, pair(r->gen + 1, 0));
    table_store(&p->table, &r->parent, pair(POOL_NONE, 0));
}

/* On a tmpfs that is full the first touch of a page would kill us. */
static bool row_is_there(pool *p, pool_slot s)
{
    uint64_t at = (uint64_t)s * sizeof(pool_row);

    if (!p->memory->bounded || sparse_touched(&p->table.rows, s))
        return true;
    return persist_reserve(p->memory, table_rows_offset() + at, sizeof(pool_row), NULL) == KVS_OK;
}

kvs_status pool_take(pool *p, uint32_t layout_id, pool_slot *ret)
{
    layout *l = &p->layouts[layout_id];
    uint32_t e = l->avail, index;
    pool_slot s;
    extent *x;

    assert(layout_id < p->n_layouts);
    if (e == POOL_NONE) {
        if (p->unassigned == POOL_NONE || (p->max_slots != 0 && l->n_slots >= p->max_slots))
            return KVS_E_NO_SPACE;
        e = p->unassigned;
        extent_bind(p, e, layout_id);
    }
    x = &p->extents[e];
    index = x->free_head;
    s = e * p->rows_per_extent + (index != POOL_NONE ? index : x->n_used);
    if (!row_is_there(p, s))
        return KVS_E_NO_SPACE;
    if (index != POOL_NONE)
        x->free_head = *(uint32_t *)sparse_at(&p->links, s);
    else
        x->n_used++;
    if (!extent_can_give(x))
        extents_remove(p, &l->avail, e);
    (void)sparse_touch(&p->table.rows, s);
    assert(slot_state(p, s) == POOL_FREE);
    row_begin(p, s);
    *ret = s;
    return KVS_OK;
}

void pool_name(pool *p, pool_slot s, uint32_t ns, const uint8_t key[32], uint32_t depth)
{
    pool_row *r = row_at(p, s);

    assert(r->state == POOL_WRITING && ns < TABLE_MAX_NS);
    store_key(p, r, key);
    table_store(&p->table, &r->gen, pair(r->gen, depth));
    table_store(&p->table, &r->word, word_of(POOL_WRITING, ns, 0));
}

void pool_set_parent(pool *p, pool_slot s, pool_slot parent)
{
    pool_row *r = row_at(p, s);
    uint32_t gen = row_at(p, parent)->gen;

    if (r->parent != parent || r->parent_gen != gen)
        table_store(&p->table, &r->parent, pair(parent, gen));
}

void pool_commit(pool *p, pool_slot s, uint64_t checksum)
{
    assert(slot_state(p, s) == POOL_WRITING);
    table_store(&p->table, &row_at(p, s)->checksum, checksum);
    slot_become(p, s, POOL_READY);
}

void pool_drain(pool *p, pool_slot s)
{
    assert(slot_state(p, s) == POOL_READY);
    slot_become(p, s, POOL_DRAINING);
}

void pool_quarantine(pool *p, pool_slot s)
{
    uint32_t st = slot_state(p, s);

    assert(st == POOL_WRITING || st == POOL_READY || st == POOL_DRAINING);
    (void)st;
    slot_become(p, s, POOL_QUARANTINED);
}

void pool_release(pool *p, pool_slot s)
{
    uint32_t e = s / p->rows_per_extent;
    extent *x = &p->extents[e];
    bool could_give = extent_can_give(x);
    uint32_t *link;

    assert(slot_state(p, s) != POOL_FREE);
    slot_become(p, s, POOL_FREE);
    if (x->n[POOL_FREE] == x->n_slots) { /* empty: it begins anew, so that blocks that come together lie side by side */
        x->free_head = POOL_NONE;
        x->n_used = 0;
    } else {
        link = sparse_touch(&p->links, s);
        *link = x->free_head;
        x->free_head = s % p->rows_per_extent;
    }
    if (x->closing)
        extent_unbind_if_empty(p, e);
    else if (!could_give && extent_can_give(x)) /* not while its piece is to come */
        extents_push(p, &p->layouts[x->layout].avail, e);
}

const pool_row *pool_row_of(const pool *p, pool_slot s)
{
    return s < pool_max_rows(p) ? row_at(p, s) : NULL;
}

const pool_row *pool_row_written(const pool *p, pool_slot s)
{
    return s < pool_max_rows(p) && sparse_touched(&p->table.rows, s) ? row_at(p, s) : NULL;
}

uint8_t *pool_address(const pool *p, pool_slot s)
{
    uint32_t e = s / p->rows_per_extent;
    const layout *l = &p->layouts[p->extents[e].layout];

    return p->arena + e * p->extent_bytes + (s % p->rows_per_extent) * l->slot_bytes;
}

uint32_t pool_layout_of(const pool *p, pool_slot s)
{
    return p->extents[s / p->rows_per_extent].layout;
}

uint32_t pool_max_rows(const pool *p)
{
    return p->n_extents * p->rows_per_extent;
}

/* ---- namespaces ---- */

kvs_status pool_put_ns(pool *p, uint32_t number, const table_ns *ns, kvs_err *err)
{
    return table_put_ns(&p->table, number, ns, err);
}

enum table_found pool_get_ns(const pool *p, uint32_t number, table_ns *ret)
{
    return p->adoption.adopted ? table_get_ns(&p->table, number, ret) : TABLE_VOID;
}

void pool_drop_ns(pool *p, uint32_t number)
{
    table_drop_ns(&p->table, number);
    table_trim(&p->table);
}

/* ---- sums ---- */

void pool_get_bytes(const pool *p, pool_bytes *ret)
{
    uint32_t had = p->n_usable + p->n_early;

    *ret = (pool_bytes){
        .arena = (uint64_t)(p->n_usable - p->n_retired + p->n_early) * p->extent_bytes,
        .unassigned = p->n_unassigned * p->extent_bytes,
        .waste = p->waste,
        .max = (uint64_t)(p->stopped && had < p->n_limit ? had : p->n_limit) * p->extent_bytes,
        .giving_up = p->n_usable > p->n_limit ? (p->n_usable - p->n_limit - p->n_retired) * p->extent_bytes : 0,
    };
    for (uint32_t i = 0; i < p->n_layouts; i++) {
        const layout *l = &p->layouts[i];

        ret->free += l->n[POOL_FREE] * l->slot_bytes;
        ret->writing += l->n[POOL_WRITING] * l->slot_bytes;
        ret->ready += l->n[POOL_READY] * l->slot_bytes;
        ret->draining += l->n[POOL_DRAINING] * l->slot_bytes;
        ret->quarantined += l->n[POOL_QUARANTINED] * l->slot_bytes;
    }
}

uint64_t pool_metadata_bytes(const pool *p)
{
    return sizeof *p + p->n_extents * sizeof *p->extents + sparse_resident(&p->table.rows) + sparse_resident(&p->links);
}
