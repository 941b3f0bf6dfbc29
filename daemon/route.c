#include "daemon/route.h"

#include <math.h>
#include <string.h>

enum {
    DEFAULT_BLOCKS = 16,        /* eight of an H200 come as close to its link as a kernel can */
    SHORTER_THAN = 48 << 10,    /* without a table: shorter pieces are worth a kernel */
    JUDGED_BYTES = 1 << 20,     /* a smaller batch says little about a rate */
    FIRST_PAUSE_US = 50 * 1000, /* away from a busy GPU: one batch of 300 us in it costs others 0.6 % at most */
    LONGEST_PAUSE_US = 1600 * 1000,
    SUMS_A_US = 1000000, /* bytes */
    LATE_CALLS = 2,
    CALM_CALLS = 8,
};
#define LEAST_LEFT 0.9  /* of a busy process's speed, else the kernel is no choice beside it */
#define BUSY_BELOW 0.65 /* of what is expected: two directions at once leave nine tenths, another process half */

static const device_how BY_ENGINE = {DEVICE_BY_ENGINE, 0};

static device_how kernel_of(const config *c, uint32_t n_blocks)
{
    return (device_how){DEVICE_BY_KERNEL, c->mover_kernel_blocks > 0 ? (uint32_t)c->mover_kernel_blocks : n_blocks};
}

static route_rule rule_of(const config *c, const copy_row *r)
{
    route_rule x = {.idle = BY_ENGINE, .busy = BY_ENGINE, .expected = r->kernel};

    if (r->kernel > r->engine)
        x.idle = kernel_of(c, r->kernel_blocks);
    if (r->beside_kernel > r->beside_engine && r->left_by_kernel >= LEAST_LEFT)
        x.busy = kernel_of(c, r->kernel_blocks);
    return x;
}

static void from_table(route_rules *ret, const config *c, const copy_table *t, int dir)
{
    ret->n = t->n[dir];
    for (uint32_t i = 0; i < ret->n; i++) {
        const copy_row *r = &t->rows[dir][i];

        ret->rules[i] = rule_of(c, r);
        /* What lies between two rows goes with the nearer one, as sizes are counted: by factors. */
        ret->rules[i].below =
            i + 1 < ret->n ? (uint64_t)sqrt((double)r->piece_bytes * (double)r[1].piece_bytes) + 1 : UINT64_MAX;
    }
}

void route_rules_make(route_rules *ret, const config *c, const copy_table *table, int dir, bool by_kernel)
{
    *ret = (route_rules){0};
    if (!by_kernel || strcmp(c->mover_path, "engine") == 0)
        return;
    if (strcmp(c->mover_path, "kernel") == 0) {
        device_how all = kernel_of(c, DEFAULT_BLOCKS);

        ret->rules[ret->n++] = (route_rule){.below = UINT64_MAX, .idle = all, .busy = all};
    } else if (table != NULL) {
        from_table(ret, c, table, dir);
    } else {
        ret->rules[ret->n++] =
            (route_rule){.below = SHORTER_THAN, .idle = kernel_of(c, DEFAULT_BLOCKS), .busy = BY_ENGINE};
    }
}

static const route_rule *find(const route_rules *r, uint64_t piece_bytes)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (piece_bytes < r->rules[i].below)
            return &r->rules[i];
    return NULL;
}

bool route_is_busy(const route *p, uint64_t now_us)
{
    return now_us < p->busy_until_us;
}

device_how route_choose(const route *p, const route_rules *r, uint64_t piece_bytes, uint64_t now_us)
{
    const route_rule *x = find(r, piece_bytes);

    if (x == NULL)
        return BY_ENGINE;
    return route_is_busy(p, now_us) ? x->busy : x->idle;
}

/* Stay away for a while, if it is not known yet. */
static void is_late(route *p, uint64_t now_us)
{
    if (route_is_busy(p, now_us))
        return; /* it was on its way already */
    p->pause_us = p->pause_us == 0 ? FIRST_PAUSE_US : p->pause_us * 2;
    p->pause_us = p->pause_us < LONGEST_PAUSE_US ? p->pause_us : LONGEST_PAUSE_US;
    p->busy_until_us = now_us + p->pause_us;
}

void route_saw_sums(route *p, uint64_t most_us, uint64_t bytes, uint64_t us, uint64_t now_us)
{
    if (us <= most_us + bytes / SUMS_A_US) {
        p->n_late = 0;
        p->n_in_time += !route_is_calm(p);
        if (route_is_calm(p))
            p->pause_us = 0;
        return;
    }
    p->n_in_time = 0;
    p->n_late++;
    if (p->n_late < LATE_CALLS && us != UINT64_MAX)
        return;
    p->n_late = 0;
    is_late(p, now_us);
}

bool route_is_calm(const route *p)
{
    return p->n_in_time >= CALM_CALLS;
}

void route_saw(route *p, const route_rules *r, device_how how, uint64_t piece_bytes, uint64_t bytes, uint64_t us,
               uint64_t now_us)
{
    const route_rule *x = find(r, piece_bytes);
    double rate, expected;

    if (how.means != DEVICE_BY_KERNEL || x == NULL || bytes < JUDGED_BYTES || us == 0)
        return;
    rate = (double)bytes / (double)us / 1e3;
    if (rate > p->best)
        p->best = rate;
    expected = x->expected > 0 ? x->expected : p->best;
    if (rate >= expected * BUSY_BELOW)
        p->pause_us = 0;
    else
        is_late(p, now_us);
}
