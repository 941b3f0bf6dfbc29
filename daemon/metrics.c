#include "daemon/metrics.h"

#include <string.h>
#include <time.h>

#define OP_FITS(name, value)           _Static_assert((value) < METRICS_OPS, "METRICS_OPS: " #name);
#define STATUS_FITS(name, value, text) _Static_assert((value) < METRICS_STATUSES, "METRICS_STATUSES: " #name);
WIRE_OP_MAP(OP_FITS)
KVS_STATUS_MAP(STATUS_FITS)

/* ---- histograms ---- */

uint64_t histogram_end_us(uint32_t bucket)
{
    return UINT64_C(1) << bucket;
}

void histogram_add(histogram *h, uint64_t ns)
{
    uint64_t us = ns / 1000 + (ns % 1000 != 0); /* up: an end belongs to its bucket */
    uint32_t i = us <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(us - 1);

    h->n[i < METRICS_BUCKETS ? i : METRICS_BUCKETS]++;
    h->sum_ns += ns;
}

uint64_t histogram_count(const histogram *h)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i <= METRICS_BUCKETS; i++)
        n += h->n[i];
    return n;
}

uint64_t histogram_percentile_us(const histogram *h, double percent)
{
    uint64_t n = histogram_count(h), seen = 0;

    if (n == 0)
        return 0;
    for (uint32_t i = 0; i < METRICS_BUCKETS; i++) {
        seen += h->n[i];
        if ((double)seen * 100 >= percent * (double)n)
            return histogram_end_us(i);
    }
    return UINT64_MAX;
}

/* ---- requests ---- */

enum metrics_class metrics_class_of(uint16_t op)
{
    switch (op) {
    case WIRE_LOOKUP:
    case WIRE_RESERVE:
    case WIRE_RELEASE:
        return METRICS_LOOKUP;
    case WIRE_LOAD:
        return METRICS_LOAD;
    case WIRE_STORE:
        return METRICS_STORE;
    case WIRE_WRITE:
    case WIRE_DECODE:
    case WIRE_EXTEND:
        return METRICS_COMPUTE;
    case WIRE_REGION_CREATE:
    case WIRE_REGION_ATTACH:
    case WIRE_REGION_IMPORT:
    case WIRE_REGION_CLOSE:
    case WIRE_SLOT_TAKE:
    case WIRE_SLOT_DROP:
        return METRICS_REGION;
    default:
        return METRICS_CONTROL;
    }
}

const char *metrics_class_name(enum metrics_class c)
{
    static const char *const NAMES[METRICS_CLASSES] = {"lookup", "load", "store", "compute", "region", "control"};

    return NAMES[c];
}

void metrics_received(metrics_counts *m)
{
    m->received++;
    m->in_flight++;
}

void metrics_answered(metrics_counts *m, uint16_t op, kvs_status s, uint64_t ns)
{
    m->in_flight--;
    m->answered++;
    m->by[wire_op_name(op) != NULL ? op : 0][(uint32_t)s < METRICS_STATUSES ? s : KVS_E_INVALID]++;
    histogram_add(&m->latency[metrics_class_of(op)], ns);
}

/* ---- names ---- */

void metrics_count(metrics_names *m, const char *name, uint64_t n)
{
    uint32_t i = 0;

    while (m->of[i].name != NULL && strcmp(m->of[i].name, name) != 0 && i + 1 < METRICS_NAMES)
        i++;
    if (m->of[i].name == NULL)
        m->of[i].name = i + 1 < METRICS_NAMES ? name : "other";
    m->of[i].n += n;
}

void metrics_edge_init(metrics_edge *e)
{
    static const char *const REFUSED[] = {"max_clients", "descriptors", "uid", "unmapped_uid", "tenant_removed"};
    static const char *const DROPPED[] = {"protocol",          "cut_frame",        "lost_descriptors", "unsent_replies",
                                          "no_hello",          "unfinished_frame", "reads_nothing",    "out_of_memory",
                                          "no_longer_allowed", "tenant_removed",   "stalled_frame"};
    static const char *const RELOADS[] = {"applied", "refused", "ignored"};

    *e = (metrics_edge){.start_unix_s = (uint64_t)time(NULL)};
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++)
        metrics_count(&e->refused, REFUSED[i], 0);
    for (size_t i = 0; i < sizeof DROPPED / sizeof DROPPED[0]; i++)
        metrics_count(&e->dropped, DROPPED[i], 0);
    for (size_t i = 0; i < sizeof RELOADS / sizeof RELOADS[0]; i++)
        metrics_count(&e->reloads, RELOADS[i], 0);
}

/* ---- sums that must agree ---- */

const char *metrics_rule_name(enum metrics_rule r)
{
    static const char *const NAMES[METRICS_RULES] = {"arena",   "layouts",  "resident", "lookups",
                                                     "tenants", "requests", "replies",  "latency"};

    return NAMES[r];
}

static int64_t minus(uint64_t a, uint64_t b)
{
    return (int64_t)(a - b);
}

static uint64_t apart(uint64_t a, uint64_t b)
{
    return a > b ? a - b : b - a;
}

static int64_t check_layouts(const metrics_snapshot *s)
{
    const uint64_t of_pool[METRICS_SLOT_STATES] = {s->pool.free, s->pool.writing, s->pool.ready, s->pool.draining,
                                                   s->pool.quarantined};
    uint64_t off = 0;

    for (uint32_t i = 0; i < METRICS_SLOT_STATES; i++) {
        uint64_t sum = 0;

        for (uint32_t l = 0; l < s->n_layouts; l++)
            sum += s->layouts[l].bytes[i];
        off += apart(sum, of_pool[i]);
    }
    return (int64_t)off;
}

/* What they are charged for, and their counts.  Errors are added up, so that no two can cancel each other out. */
static int64_t check_tenants(const metrics_snapshot *s)
{
    const pool_bytes *b = &s->pool;
    directory_stats sum = {0};
    uint64_t used = 0;

    for (uint32_t i = 0; i < s->n_tenants; i++) {
        const metrics_tenant *t = &s->tenants[i];

        used += t->used_bytes;
        sum.n_ready += t->ready_blocks;
        sum.leased_bytes += t->leased_bytes;
        sum.pinned_bytes += t->pinned_bytes;
        sum.hits += t->counts.hits;
        sum.misses += t->counts.misses;
        sum.stored += t->counts.stored;
        sum.adopted += t->counts.adopted;
        sum.exists += t->counts.exists;
        sum.no_space += t->counts.no_space;
        sum.evicted += t->counts.evicted;
        sum.dropped += t->counts.dropped;
        sum.rebound += t->counts.rebound;
    }
    return (int64_t)(apart(used, b->writing + b->ready + b->draining + b->quarantined) +
                     apart(sum.n_ready, s->dir.n_ready) + apart(sum.leased_bytes, s->dir.leased_bytes) +
                     apart(sum.pinned_bytes, s->dir.pinned_bytes) + apart(sum.hits, s->dir.hits) +
                     apart(sum.misses, s->dir.misses) + apart(sum.stored, s->dir.stored) +
                     apart(sum.adopted, s->dir.adopted) + apart(sum.exists, s->dir.exists) +
                     apart(sum.no_space, s->dir.no_space) + apart(sum.evicted, s->dir.evicted) +
                     apart(sum.dropped, s->dir.dropped) + apart(sum.rebound, s->dir.rebound));
}

void metrics_check(metrics_snapshot *s)
{
    const pool_bytes *b = &s->pool;
    const directory_stats *d = &s->dir;
    const metrics_counts *m = &s->counts;
    uint64_t replies = 0, timed = 0;

    for (uint32_t op = 0; op < METRICS_OPS; op++)
        for (uint32_t st = 0; st < METRICS_STATUSES; st++)
            replies += m->by[op][st];
    for (uint32_t i = 0; i < METRICS_CLASSES; i++)
        timed += histogram_count(&m->latency[i]);
    s->error[METRICS_RULE_ARENA] =
        minus(b->unassigned + b->waste + b->free + b->writing + b->ready + b->draining + b->quarantined, b->arena);
    s->error[METRICS_RULE_LAYOUTS] = check_layouts(s);
    s->error[METRICS_RULE_RESIDENT] = minus(d->adopted + d->stored, d->evicted + d->dropped + d->rebound + d->n_ready);
    s->error[METRICS_RULE_LOOKUPS] = minus(m->lookup_keys, d->hits + d->misses);
    s->error[METRICS_RULE_TENANTS] = check_tenants(s);
    s->error[METRICS_RULE_REQUESTS] = minus(m->received, m->answered + m->in_flight);
    s->error[METRICS_RULE_REPLIES] = minus(replies, m->answered);
    s->error[METRICS_RULE_LATENCY] = minus(timed, m->answered);
}
