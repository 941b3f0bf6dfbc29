/* Pace: when the answer to a LOAD or STORE is due, so that its waiter is awake by then.
 *
 * A thread that sleeps is back some 50 us after its answer, which a block of a few MB (100 us on its way) would feel.  How
 * long the latest requests of each size class took is remembered, each by itself: alone on the link they take 16 ms, say, and
 * beside others 18, and hardly ever 17.  Around each of these times the next one's waiter polls instead of sleeping, for a
 * quarter of a millisecond at most, and only where there are processors enough.  A wrong guess costs that, and nothing else. */
#include "proto/client/internal.h"
#include "proto/cpus.h"

enum {
    MIN_CPUS = 4,
    EARLY_NS = 100000, /* a timer may come that much too late */
    LATE_NS = 30000,
    AT_MOST_NS = 250000, /* of polling around one time */
    SHORT_NS = 150000,   /* to sleep for less is not to sleep at all */
};

void pace_init(pace *p)
{
    *p = (pace){.active = cpus_usable() >= MIN_CPUS};
}

/* Requests whose bytes have the same leading bit. */
static pace_class *class_of(pace *p, uint16_t op, uint64_t bytes)
{
    return &p->classes[op == WIRE_STORE][63 - __builtin_clzll(bytes | 1)];
}

static bool is_paced(const pace *p, uint16_t op, uint64_t bytes)
{
    return p->active && bytes > 0 && (op == WIRE_LOAD || op == WIRE_STORE);
}

/* In rising order; how many. */
static uint32_t sort_latest(const pace_class *k, double ret[PACE_KEPT])
{
    uint32_t n = k->n < PACE_KEPT ? k->n : PACE_KEPT;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;

        for (; at > 0 && ret[at - 1] > k->ns_a_byte[i]; at--)
            ret[at] = ret[at - 1];
        ret[at] = k->ns_a_byte[i];
    }
    return n;
}

/* Be awake around `ns` after now; times come in rising order. */
static void add(due *d, int64_t now, int64_t ns)
{
    int64_t early = EARLY_NS + ns / 256, late = LATE_NS + ns / 512;
    int64_t from = early < AT_MOST_NS * 3 / 4 ? ns - early : ns - AT_MOST_NS * 3 / 4;
    int64_t to = ns + (late < AT_MOST_NS / 4 ? late : AT_MOST_NS / 4);

    from = now + (from < SHORT_NS ? 0 : from);
    to += now;
    if (d->n > 0 && from <= d->at[d->n - 1].to) {
        d->at[d->n - 1].to = to;
    } else {
        d->at[d->n].from = from;
        d->at[d->n++].to = to;
    }
}

void pace_begin(pace *p, kvs_request *r, uint64_t bytes, int64_t now)
{
    double latest[PACE_KEPT];
    uint32_t n;

    r->paced_bytes = is_paced(p, r->op, bytes) ? bytes : 0;
    r->sent_ns = now;
    r->due.n = 0;
    if (r->paced_bytes == 0)
        return;
    n = sort_latest(class_of(p, r->op, bytes), latest);
    for (uint32_t i = 0; i < n; i++)
        if (latest[i] * (double)bytes < 1e10)
            add(&r->due, now, (int64_t)(latest[i] * (double)bytes));
}

void pace_end(pace *p, const kvs_request *r, int64_t now)
{
    pace_class *k;

    if (r->paced_bytes == 0 || r->status != KVS_OK || now <= r->sent_ns)
        return;
    k = class_of(p, r->op, r->paced_bytes);
    k->ns_a_byte[k->n++ % PACE_KEPT] = (double)(now - r->sent_ns) / (double)r->paced_bytes;
}
