#include "daemon/twin.h"

#include <stdatomic.h>
#include <stdlib.h>

enum { OPEN, TAKEN, LANDED = TAKEN + 2 }; /* TAKEN + side, LANDED + side */
enum { ALONE, JOINED, OVER };
#define CLOSED (UINT32_C(1) << 31)

typedef struct side {
    _Atomic uint32_t gate; /* reads from its places that are going on; CLOSED */
    _Atomic bool ended, begun;
    _Atomic bool sated; /* it begins no more reads from the other's places */
    const uint8_t **at; /* [n] */
    /* The thread's own. */
    bool *has; /* [n]: taken by this side, from wherever */
    uint32_t left;
    /* Places in this side's order and in the other's, and a block: what is before them need not be looked at. */
    uint32_t own_at, other_at, any_at;
    uint32_t open_at, landed_at; /* where the next round begins, for blocks that have come back out of turn */
    bool keeps_off;              /* takes nothing from the twin */
} side;

struct twin {
    uint32_t refs; /* the loop's */
    uint32_t n, chunk;
    _Atomic uint32_t who; /* ALONE, JOINED, OVER */
    _Atomic uint32_t open;
    _Atomic bool untidy; /* some block went back to OPEN behind a side that has passed it */
    side sides[2];
    _Atomic uint8_t state[];
};

twin *twin_create(uint32_t n, uint32_t chunk)
{
    twin *t = calloc(1, sizeof *t + n);
    bool good = t != NULL;

    for (unsigned s = 0; s < 2 && good; s++) {
        side *x = &t->sides[s];

        x->at = calloc(n, sizeof *x->at);
        x->has = calloc(n, sizeof *x->has);
        x->left = n;
        good = x->at != NULL && x->has != NULL;
    }
    if (t == NULL)
        return NULL;
    t->refs = 1;
    t->n = n;
    t->chunk = chunk > 0 ? chunk : 1;
    atomic_init(&t->open, n);
    if (!good) {
        twin_unref(t);
        return NULL;
    }
    return t;
}

void twin_ref(twin *t)
{
    t->refs++;
}

void twin_unref(twin *t)
{
    if (t == NULL || --t->refs > 0)
        return;
    for (unsigned s = 0; s < 2; s++) {
        free(t->sides[s].at);
        free(t->sides[s].has);
    }
    free(t);
}

void twin_place(twin *t, unsigned s, uint32_t block, const uint8_t *at)
{
    t->sides[s].at[block] = at;
}

static bool change_who(twin *t, uint32_t to)
{
    uint32_t seen = ALONE;

    return atomic_compare_exchange_strong(&t->who, &seen, to);
}

bool twin_join(twin *t)
{
    return change_who(t, JOINED);
}

/* ---- the gate ---- */

static bool enter(side *of)
{
    uint32_t seen = atomic_load(&of->gate);

    while (!(seen & CLOSED))
        if (atomic_compare_exchange_weak(&of->gate, &seen, seen + 1))
            return true;
    return false;
}

void twin_read_over(twin *t, unsigned s)
{
    (void)atomic_fetch_sub(&t->sides[1 - s].gate, 1);
}

void twin_close(twin *t, unsigned s)
{
    (void)atomic_fetch_or(&t->sides[s].gate, CLOSED);
}

/* First: whoever is sated has entered for the last time before. */
bool twin_is_free(const twin *t, unsigned s)
{
    bool sated = atomic_load(&t->sides[1 - s].sated);
    uint32_t gate = atomic_load(&t->sides[s].gate);

    return atomic_load(&t->who) != JOINED || atomic_load(&t->sides[1 - s].ended) || gate == CLOSED ||
           (sated && gate == 0);
}

void twin_back(twin *t, unsigned s)
{
    atomic_store(&t->sides[s].ended, true);
}

bool twin_may_read(const twin *t, unsigned s)
{
    return atomic_load(&t->sides[s].begun) && !atomic_load(&t->sides[s].sated);
}

bool twin_end(twin *t, unsigned s)
{
    atomic_store(&t->sides[s].ended, true);
    return (s == 0 && change_who(t, OVER)) || twin_is_free(t, s);
}

/* ---- blocks ---- */

/* The i-th block in the order of a side.  From the back the last chunk is the short one, at the front. */
static uint32_t block_of(const twin *t, unsigned s, uint32_t i)
{
    uint32_t end = t->n - i / t->chunk * t->chunk;

    if (s == 0)
        return i;
    return (end < t->chunk ? 0 : end - t->chunk) + i % t->chunk;
}

static void note(twin *t, unsigned s, uint32_t block)
{
    side *x = &t->sides[s];

    x->has[block] = true;
    if (--x->left == 0)
        atomic_store(&x->sated, true);
    if (!atomic_load_explicit(&x->begun, memory_order_relaxed))
        atomic_store(&x->begun, true);
}

static bool claim(twin *t, unsigned s, uint32_t block)
{
    uint8_t seen = OPEN;

    if (!atomic_compare_exchange_strong(&t->state[block], &seen, (uint8_t)(TAKEN + s)))
        return false;
    (void)atomic_fetch_sub(&t->open, 1);
    return true;
}

static bool take_open(twin *t, unsigned s, uint32_t block)
{
    return !t->sides[s].has[block] && claim(t, s, block);
}

static void keep_off(side *x)
{
    x->keeps_off = true;
    atomic_store(&x->sated, true);
}

/* True: it is there, and the read from it has begun. */
static bool take_landed(twin *t, unsigned s, uint32_t block)
{
    side *x = &t->sides[s];

    if (x->has[block] || x->keeps_off || atomic_load(&t->state[block]) != LANDED + 1 - s)
        return false;
    if (!enter(&t->sides[1 - s]))
        keep_off(x);
    return !x->keeps_off;
}

/* One that can be taken, wherever: once around from *at, which is left behind it.  What has come back together is found together,
 * so that many blocks cost no more than a few rounds. */
static bool once_around(twin *t, unsigned s, bool (*take)(twin *t, unsigned s, uint32_t block), uint32_t *at,
                        uint32_t *ret)
{
    for (uint32_t i = 0; i < t->n; i++) {
        *ret = *at;
        *at = *at + 1 < t->n ? *at + 1 : 0;
        if (take(t, s, *ret))
            return true;
    }
    return false;
}

/* Along this side's order; what the other has taken is passed for good. */
static bool next_open(twin *t, unsigned s, uint32_t *ret)
{
    side *x = &t->sides[s];

    for (; x->own_at < t->n; x->own_at++) {
        *ret = block_of(t, s, x->own_at);
        if (take_open(t, s, *ret))
            return true;
    }
    return atomic_load(&t->untidy) && atomic_load(&t->open) > 0 && once_around(t, s, take_open, &x->open_at, ret);
}

/* Along the other's order, up to what it has not landed. */
static bool next_landed(twin *t, unsigned s, uint32_t *ret)
{
    side *x = &t->sides[s];

    for (; x->other_at < t->n && !x->keeps_off; x->other_at++) {
        *ret = block_of(t, 1 - s, x->other_at);
        if (take_landed(t, s, *ret))
            return true;
        if (!x->has[*ret])
            break;
    }
    return !x->keeps_off && atomic_load(&t->untidy) && once_around(t, s, take_landed, &x->landed_at, ret);
}

static bool next_any(twin *t, unsigned s, uint32_t *ret)
{
    side *x = &t->sides[s];

    for (; x->any_at < t->n; x->any_at++)
        if (!x->has[x->any_at]) {
            *ret = x->any_at++;
            (void)claim(t, s, *ret);
            return true;
        }
    return false;
}

bool twin_take(twin *t, unsigned s, twin_from from, uint32_t *ret_block, const uint8_t **ret_at)
{
    bool found = false;

    if (t->sides[s].left > 0 && from == TWIN_FROM_HOST)
        found = next_open(t, s, ret_block);
    else if (t->sides[s].left > 0 && from == TWIN_FROM_TWIN)
        found = next_landed(t, s, ret_block);
    else if (t->sides[s].left > 0)
        found = next_any(t, s, ret_block);
    if (!found)
        return false;
    note(t, s, *ret_block);
    *ret_at = from == TWIN_FROM_TWIN ? t->sides[1 - s].at[*ret_block] : NULL;
    return true;
}

void twin_landed(twin *t, unsigned s, uint32_t block)
{
    uint8_t seen = (uint8_t)(TAKEN + s);

    /* Else it was taken anyway, and is the other's. */
    (void)atomic_compare_exchange_strong(&t->state[block], &seen, (uint8_t)(LANDED + s));
}

void twin_failed(twin *t, unsigned s, uint32_t block)
{
    uint8_t seen = (uint8_t)(TAKEN + s);

    if (!atomic_compare_exchange_strong(&t->state[block], &seen, OPEN))
        return;
    (void)atomic_fetch_add(&t->open, 1);
    atomic_store(&t->untidy, true);
}

void twin_again(twin *t, unsigned s, uint32_t block)
{
    side *x = &t->sides[s];

    x->has[block] = false;
    x->left++;
    x->any_at = block < x->any_at ? block : x->any_at;
    keep_off(x);
}

uint32_t twin_missing(const twin *t, unsigned s)
{
    return t->sides[s].left;
}

uint32_t twin_open(const twin *t)
{
    return atomic_load_explicit(&t->open, memory_order_relaxed);
}

bool twin_may_hope(const twin *t, unsigned s)
{
    return !t->sides[s].keeps_off && !atomic_load(&t->sides[1 - s].ended);
}
