/* Pace: when the answer to a LOAD or STORE is due, so that its waiter is awake by then.
 *
 * A thread that sleeps is back some 50 us after its answer, which a block of a few MB (100 us on its way) would feel.  How
 * long requests of each size class took is remembered; around the time when the next one is due its waiter polls instead of
 * sleeping, for half a millisecond at most, and only where there are processors enough.  A wrong guess costs that, and
 * nothing else. */
#include "proto/client/internal.h"
#include "proto/cpus.h"

enum { EARLY_NS = 50000, LATE_NS = 80000, AT_MOST_NS = 500000, MIN_CPUS = 4 };

void pace_init(pace *p)
{
    *p = (pace){.active = cpus_usable() >= MIN_CPUS};
}

/* Requests whose bytes have the same leading bit. */
static double *class_of(pace *p, uint16_t op, uint64_t bytes)
{
    return &p->ns_a_byte[op == WIRE_STORE][63 - __builtin_clzll(bytes | 1)];
}

static bool is_paced(const pace *p, uint16_t op, uint64_t bytes)
{
    return p->active && bytes > 0 && (op == WIRE_LOAD || op == WIRE_STORE);
}

void pace_begin(pace *p, kvs_request *r, uint64_t bytes, int64_t now)
{
    double expected;

    r->paced_bytes = is_paced(p, r->op, bytes) ? bytes : 0;
    r->sent_ns = now;
    r->due_from = r->due_to = 0;
    if (r->paced_bytes == 0)
        return;
    expected = *class_of(p, r->op, bytes) * (double)bytes;
    if (expected <= 0 || expected > 1e10)
        return;
    r->due_from = now + (int64_t)(expected * 0.99) - EARLY_NS;
    r->due_to = now + (int64_t)(expected * 1.01) + LATE_NS;
    if (r->due_to - r->due_from > AT_MOST_NS)
        r->due_to = r->due_from + AT_MOST_NS;
}

void pace_end(pace *p, const kvs_request *r, int64_t now)
{
    double took, *known;

    if (r->paced_bytes == 0 || r->status != KVS_OK || now <= r->sent_ns)
        return;
    known = class_of(p, r->op, r->paced_bytes);
    took = (double)(now - r->sent_ns) / (double)r->paced_bytes;
    /* A quick one shows what can be; slow ones may have had company. */
    *known = *known <= 0 || took < *known ? took : *known + (took - *known) / 8;
}
