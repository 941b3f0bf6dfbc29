#include "daemon/evict.h"

#include <stdlib.h>

#include "daemon/sparse.h"

/* Least recently used: one list a layout, cold end first.  The stamps fall towards the cold end, but for the
 * blocks that came back from a hold and found no place near by. */

enum { REENTRY_STEPS = 64 }; /* how far a block that comes back looks for its place by stamp */

typedef struct node {
    uint32_t warmer, colder; /* POOL_NONE at the ends */
    uint64_t stamp;
} node;

typedef struct ends {
    uint32_t warm, cold;
} ends;

struct evict {
    sparse nodes;
    uint32_t n_layouts;
    ends ends[]; /* [n_layouts] */
};

static node *node_of(const evict *e, pool_slot s)
{
    return sparse_at(&e->nodes, s);
}

static void lru_destroy(evict *e)
{
    if (e == NULL)
        return;
    sparse_fini(&e->nodes);
    free(e);
}

static kvs_status lru_create(evict **ret, uint32_t max_rows, uint32_t n_layouts)
{
    evict *e = calloc(1, sizeof *e + n_layouts * sizeof e->ends[0]);
    kvs_status s;

    if (e == NULL)
        return KVS_E_NO_MEMORY;
    e->n_layouts = n_layouts;
    for (uint32_t i = 0; i < n_layouts; i++)
        e->ends[i].warm = e->ends[i].cold = POOL_NONE;
    s = sparse_init(&e->nodes, -1, max_rows, sizeof(node), NULL);
    if (s != KVS_OK) {
        lru_destroy(e);
        return s;
    }
    *ret = e;
    return KVS_OK;
}

/* Link s in so that `colder` is its cold neighbour; POOL_NONE: s becomes the cold end. */
static void link_above(evict *e, uint32_t layout, pool_slot s, uint32_t colder)
{
    ends *x = &e->ends[layout];
    node *n = node_of(e, s);

    n->colder = colder;
    n->warmer = colder == POOL_NONE ? x->cold : node_of(e, colder)->warmer;
    if (colder == POOL_NONE)
        x->cold = s;
    else
        node_of(e, colder)->warmer = s;
    if (n->warmer == POOL_NONE)
        x->warm = s;
    else
        node_of(e, n->warmer)->colder = s;
}

static void lru_remove(evict *e, uint32_t layout, pool_slot s)
{
    ends *x = &e->ends[layout];
    const node *n = node_of(e, s);

    if (n->warmer == POOL_NONE)
        x->warm = n->colder;
    else
        node_of(e, n->warmer)->colder = n->colder;
    if (n->colder == POOL_NONE)
        x->cold = n->warmer;
    else
        node_of(e, n->colder)->warmer = n->warmer;
}

/* A new block is the warmest.  One that was taken out while it was held comes back near the cold end, where
 * it was: held blocks are taken out only when they stand next in line. */
static void lru_insert(evict *e, uint32_t layout, pool_slot s, uint64_t stamp)
{
    ends *x = &e->ends[layout];
    node *n = sparse_touch(&e->nodes, s);
    uint32_t colder = POOL_NONE, at = x->cold;

    n->stamp = stamp;
    if (x->warm == POOL_NONE || stamp >= node_of(e, x->warm)->stamp) {
        link_above(e, layout, s, x->warm);
        return;
    }
    for (int i = 0; i < REENTRY_STEPS && node_of(e, at)->stamp < stamp; i++) {
        colder = at;
        at = node_of(e, at)->warmer;
    }
    link_above(e, layout, s, colder);
}

static void lru_touch(evict *e, uint32_t layout, pool_slot s, uint64_t stamp)
{
    node_of(e, s)->stamp = stamp;
    if (e->ends[layout].warm == s)
        return;
    lru_remove(e, layout, s);
    link_above(e, layout, s, e->ends[layout].warm);
}

static pool_slot lru_victim(const evict *e, uint32_t layout, pool_slot after, uint64_t *ret_stamp)
{
    pool_slot s = after == POOL_NONE ? e->ends[layout].cold : node_of(e, after)->warmer;

    if (s != POOL_NONE)
        *ret_stamp = node_of(e, s)->stamp;
    return s;
}

static uint64_t lru_bytes(const evict *e)
{
    return sizeof *e + e->n_layouts * sizeof e->ends[0] + sparse_resident(&e->nodes);
}

const evict_ops evict_lru = {
    .name = "lru",
    .create = lru_create,
    .destroy = lru_destroy,
    .insert = lru_insert,
    .touch = lru_touch,
    .remove = lru_remove,
    .victim = lru_victim,
    .bytes = lru_bytes,
};
