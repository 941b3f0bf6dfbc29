#include "daemon/metrics_list.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "daemon/request.h"

enum { WORD = 24 }; /* a number as text */

typedef struct walk {
    const metrics_visitor *v;
    void *ud;
    const char *device;
} walk;

static metric_value whole(uint64_t u)
{
    return (metric_value){.kind = METRIC_WHOLE, .u = u};
}

static metric_value micros(uint64_t u)
{
    return (metric_value){.kind = METRIC_MICROS, .u = u};
}

static metric_value nanos(uint64_t u)
{
    return (metric_value){.kind = METRIC_NANOS, .u = u};
}

static void gauge(const walk *w, const char *name, const char *help)
{
    w->v->family(w->ud, name, METRIC_GAUGE, help);
}

static void counter(const walk *w, const char *name, const char *help)
{
    w->v->family(w->ud, name, METRIC_COUNTER, help);
}

static void put(const walk *w, metric_value v)
{
    w->v->sample(w->ud, "", NULL, 0, v);
}

static void put1(const walk *w, const char *name, const char *value, metric_value v)
{
    const metric_label l[] = {{name, value}};

    w->v->sample(w->ud, "", l, 1, v);
}

static void put2(const walk *w, const char *name, const char *value, const char *name2, const char *value2,
                 metric_value v)
{
    const metric_label l[] = {{name, value}, {name2, value2}};

    w->v->sample(w->ud, "", l, 2, v);
}

static void gauge_of(const walk *w, const char *name, const char *help, metric_value v)
{
    gauge(w, name, help);
    put(w, v);
}

static void counter_of(const walk *w, const char *name, const char *help, metric_value v)
{
    counter(w, name, help);
    put(w, v);
}

/* ---- the process ---- */

static const char *const HEALTH[] = {"ok", "starting", "degraded", "draining"};

static void put_reasons(const walk *w, uint32_t reasons)
{
    static const char *const NAMES[] = {"no_piece", "piece_failed", "stuck", "device_lost", "drains", "old_config"};
    enum { N = sizeof NAMES / sizeof NAMES[0] };

    gauge(w, "kvstride_health_reason", "1 for each reason why the health is not ok.");
    for (uint32_t i = 0; i < N; i++)
        put1(w, "reason", NAMES[i], whole(reasons >> i & 1));
    put1(w, "reason", "other", whole(reasons >> N != 0));
}

static void walk_process(const walk *w, const metrics_snapshot *s)
{
    const metric_label build[] = {{"version", KVS_VERSION}, {"protocol", "1"}, {"device", s->device}};

    gauge(w, "kvstride_build_info", "1; the labels say what is running.");
    w->v->sample(w->ud, "", build, 3, whole(1));
    gauge_of(w, "kvstride_start_time_seconds", "Start of the daemon, in seconds since 1970.",
             whole(s->edge.start_unix_s));
    gauge_of(w, "kvstride_uptime_seconds", "Time since the start.", micros(s->uptime_us));
    gauge_of(w, "kvstride_snapshot_age_seconds", "How old these numbers are: large if the loop did not answer.",
             micros(s->age_us));
    counter_of(w, "kvstride_snapshots_total", "Pictures taken of these numbers.", whole(s->seq));
    counter_of(w, "kvstride_snapshot_seconds_total", "Time that the loop spent on taking them.", nanos(s->fill_ns));
    gauge(w, "kvstride_health", "1 for the state that the daemon is in.");
    for (uint32_t i = 0; i < sizeof HEALTH / sizeof HEALTH[0]; i++)
        put1(w, "state", HEALTH[i], whole(s->health == i));
    put_reasons(w, s->reasons);
    gauge_of(w, "kvstride_ready", "1 while requests are served: memory is usable, no drain, no lost device.",
             whole(s->ready));
    gauge(w, "kvstride_device_up", "0 once the device is lost.");
    put1(w, "device", w->device, whole(!s->device_lost));
    gauge(w, "kvstride_thread_busy_seconds",
          "Longest that a worker is at it: in our code, or in a call of the device.");
    put1(w, "in", "code", micros(s->running_us));
    put1(w, "in", "call", micros(s->in_call_us));
    gauge(w, "kvstride_conservation_error", "Sums that must agree, by rule: the difference, which must be 0.");
    for (uint32_t i = 0; i < METRICS_RULES; i++)
        put1(w, "rule", metrics_rule_name(i), (metric_value){.kind = METRIC_SIGNED, .i = s->error[i]});
}

/* ---- memory ---- */

static void walk_pool(const walk *w, const metrics_snapshot *s)
{
    const pool_bytes *b = &s->pool;

    gauge_of(w, "kvstride_pool_max_bytes", "Host memory of the pool once every piece is usable.", whole(b->max));
    gauge_of(w, "kvstride_pool_arena_bytes", "Host memory that is usable now: pinned pieces.", whole(b->arena));
    gauge_of(w, "kvstride_pool_pieces", "Pieces of the arena that are usable.", whole(s->n_pieces));
    gauge_of(w, "kvstride_pool_growing", "1 while a piece is being pinned.", whole(s->growing));
    gauge_of(w, "kvstride_pool_piece_failed", "1 if a piece could not be pinned: the pool stays smaller.",
             whole(s->piece_failed));
    gauge(w, "kvstride_pool_bytes", "The arena by state; the states add up to it.");
    put1(w, "state", "unassigned", whole(b->unassigned));
    put1(w, "state", "waste", whole(b->waste));
    put1(w, "state", "free", whole(b->free));
    put1(w, "state", "writing", whole(b->writing));
    put1(w, "state", "ready", whole(b->ready));
    put1(w, "state", "draining", whole(b->draining));
    put1(w, "state", "quarantined", whole(b->quarantined));
    gauge_of(w, "kvstride_metadata_bytes", "Bookkeeping: directory, policy and slot table.",
             whole(s->dir.metadata_bytes));
    gauge(w, "kvstride_tier_capacity_bytes", "Memory for blocks, by tier.");
    put1(w, "tier", "host", whole(b->arena));
    put1(w, "tier", "device", whole(s->max_region_bytes));
    gauge(w, "kvstride_tier_used_bytes", "Of these in use; device: regions that the daemon has made.");
    put1(w, "tier", "host", whole(b->writing + b->ready + b->draining + b->quarantined));
    put1(w, "tier", "device", whole(s->region_bytes));
    gauge_of(w, "kvstride_regions", "Regions of device memory, imported ones with them.", whole(s->n_regions));
    gauge_of(w, "kvstride_import_bytes", "Engine memory that is imported.", whole(s->import_bytes));
}

static void walk_layouts(const walk *w, const metrics_snapshot *s)
{
    static const char *const STATES[METRICS_SLOT_STATES] = {"free", "writing", "ready", "draining", "quarantined"};
    char names[METRICS_LAYOUTS + 1][WORD];

    for (uint32_t l = 0; l < s->n_layouts; l++)
        (void)snprintf(names[l], WORD, s->layouts[l].id == POOL_NONE ? "other" : "%" PRIu32, s->layouts[l].id);
    gauge(w, "kvstride_layout_slots", "Slots by layout and state.");
    for (uint32_t l = 0; l < s->n_layouts; l++)
        for (uint32_t i = 0; i < METRICS_SLOT_STATES; i++)
            put2(w, "layout", names[l], "state", STATES[i], whole(s->layouts[l].slots[i]));
    gauge(w, "kvstride_layout_bytes", "The same in bytes; layouts add up to kvstride_pool_bytes of that state.");
    for (uint32_t l = 0; l < s->n_layouts; l++)
        for (uint32_t i = 0; i < METRICS_SLOT_STATES; i++)
            put2(w, "layout", names[l], "state", STATES[i], whole(s->layouts[l].bytes[i]));
}

/* ---- blocks ---- */

static void walk_blocks(const walk *w, const metrics_snapshot *s)
{
    const directory_stats *d = &s->dir;

    gauge_of(w, "kvstride_resident_blocks", "Blocks that can be found.", whole(d->n_ready));
    gauge_of(w, "kvstride_unverified_blocks", "Of these adopted and not loaded yet: their checksum is seen then.",
             whole(d->unverified));
    gauge_of(w, "kvstride_evictable_blocks", "Of these not leased, pinned or being read.", whole(d->evictable));
    gauge_of(w, "kvstride_held_blocks", "Blocks that a load is reading.", whole(d->n_held));
    gauge_of(w, "kvstride_pinned_blocks", "Blocks that are pinned.", whole(d->n_pinned));
    gauge_of(w, "kvstride_pinned_bytes", "The same in bytes.", whole(d->pinned_bytes));
    gauge_of(w, "kvstride_leases", "Leases.", whole(d->n_leases));
    gauge_of(w, "kvstride_lease_oldest_seconds", "Age of the oldest lease; 0: there is none.",
             micros(d->oldest_lease_us));
    gauge_of(w, "kvstride_leased_blocks", "Blocks that are leased.", whole(d->n_leased));
    gauge_of(w, "kvstride_leased_bytes", "The same in bytes.", whole(d->leased_bytes));
    gauge_of(w, "kvstride_namespaces", "Namespaces that were opened.", whole(s->n_namespaces));
    counter_of(w, "kvstride_lookup_keys_total", "Keys that LOOKUP asked for: hits and misses.",
               whole(s->counts.lookup_keys));
    counter_of(w, "kvstride_blocks_not_adopted_total", "Blocks from before the restart that could not come back.",
               whole(d->refused));
    counter_of(w, "kvstride_loads_no_copy_total", "Blocks of LOAD that were on the device already.",
               whole(s->counts.no_copy_loads));
    counter_of(w, "kvstride_blocks_lost_total", "Blocks dropped because they could not be read back as stored.",
               whole(s->counts.lost_blocks));
}

typedef struct tenant_row { /* a family of a number that every tenant has */
    enum metric_type type;
    const char *name, *help;
    size_t at; /* of the number in a metrics_tenant */
} tenant_row;

#define AT(f) offsetof(metrics_tenant, f)
static const tenant_row TENANT_ROWS[] = {
    {METRIC_GAUGE, "kvstride_tenant_resident_blocks", "Blocks that can be found, by tenant.", AT(ready_blocks)},
    {METRIC_GAUGE, "kvstride_tenant_resident_bytes", "The same in bytes.", AT(ready_bytes)},
    {METRIC_GAUGE, "kvstride_tenant_used_bytes", "Bytes charged: blocks in any state until their slot is free again.",
     AT(used_bytes)},
    {METRIC_GAUGE, "kvstride_tenant_quota_bytes", "Most that may be charged; 0: no limit of its own.", AT(quota_bytes)},
    {METRIC_GAUGE, "kvstride_tenant_floor_bytes", "Others' stores leave it this much.", AT(floor_bytes)},
    {METRIC_GAUGE, "kvstride_tenant_clients", "Connections.", AT(clients)},
    {METRIC_GAUGE, "kvstride_tenant_leased_bytes", "Bytes of leased blocks.", AT(leased_bytes)},
    {METRIC_GAUGE, "kvstride_tenant_pinned_bytes", "Bytes of pinned blocks.", AT(pinned_bytes)},
    {METRIC_GAUGE, "kvstride_tenant_namespaces", "Namespaces that were opened.", AT(namespaces)},
    {METRIC_COUNTER, "kvstride_lookup_hits_total", "Leading keys of LOOKUP lists that were there.", AT(counts.hits)},
    {METRIC_COUNTER, "kvstride_lookup_misses_total", "The other keys of LOOKUP lists.", AT(counts.misses)},
    {METRIC_COUNTER, "kvstride_blocks_stored_total", "Blocks that became visible.", AT(counts.stored)},
    {METRIC_COUNTER, "kvstride_blocks_adopted_total", "Blocks that came back from before the restart.",
     AT(counts.adopted)},
    {METRIC_COUNTER, "kvstride_blocks_exists_total", "Blocks of STORE that were there already; nothing was moved.",
     AT(counts.exists)},
    {METRIC_COUNTER, "kvstride_blocks_evicted_for_others_total",
     "Blocks that went to make room for another tenant, of those evicted or rebound.", AT(for_others)},
    {METRIC_COUNTER, "kvstride_blocks_no_space_total", "Blocks of STORE for which there was no room.",
     AT(counts.no_space)},
};

static void put_tenants(const walk *w, const metrics_snapshot *s, const tenant_row *row)
{
    w->v->family(w->ud, row->name, row->type, row->help);
    for (uint32_t i = 0; i < s->n_tenants; i++) {
        uint64_t n;

        memcpy(&n, (const char *)&s->tenants[i] + row->at, sizeof n);
        put1(w, "tenant", s->tenants[i].name, whole(n));
    }
}

static void walk_tenants(const walk *w, const metrics_snapshot *s)
{
    for (size_t i = 0; i < sizeof TENANT_ROWS / sizeof TENANT_ROWS[0]; i++)
        put_tenants(w, s, &TENANT_ROWS[i]);
    counter(w, "kvstride_blocks_removed_total",
            "Blocks that went, by cause: evicted for others, dropped (DROP, RESET, unreadable), rebound to a layout.");
    for (uint32_t i = 0; i < s->n_tenants; i++) {
        const metrics_tenant *t = &s->tenants[i];

        put2(w, "tenant", t->name, "cause", "evicted", whole(t->counts.evicted));
        put2(w, "tenant", t->name, "cause", "dropped", whole(t->counts.dropped));
        put2(w, "tenant", t->name, "cause", "rebound", whole(t->counts.rebound));
    }
}

/* ---- workers ---- */

typedef uint64_t path_number(const mover_path_stats *p);

static uint64_t path_blocks(const mover_path_stats *p)
{
    return p->blocks;
}

static uint64_t path_bytes(const mover_path_stats *p)
{
    return p->bytes;
}

static uint64_t path_busy(const mover_path_stats *p)
{
    return p->busy_us;
}

static void put_paths(const walk *w, const metrics_snapshot *s, path_number *of, metric_value (*unit)(uint64_t))
{
    static const char *const PATHS[MOVER_PATHS] = {"daemon_region", "engine_blocks", "engine_pages", "exchange"};

    for (uint32_t i = 0; i < s->n_devices; i++)
        for (uint32_t d = 0; d < 2; d++)
            for (uint32_t p = 0; p < MOVER_PATHS; p++) {
                const metrics_work *x = &s->devices[i].work;
                const metric_label l[] = {
                    {"direction", d == 0 ? "load" : "store"}, {"path", PATHS[p]}, {"device", s->devices[i].name}};

                w->v->sample(w->ud, "", l, 3, unit(of(&(d == 0 ? &x->load : &x->store)->path[p])));
            }
}

typedef uint64_t mover_number(const mover_stats *m);

static uint64_t mover_jobs(const mover_stats *m)
{
    return m->jobs;
}

static uint64_t mover_failed(const mover_stats *m)
{
    return m->failed;
}

static uint64_t mover_queued(const mover_stats *m)
{
    return m->queued;
}

static uint64_t mover_oldest(const mover_stats *m)
{
    return m->oldest_us;
}

static void put_directions(const walk *w, const metrics_snapshot *s, mover_number *of, metric_value (*unit)(uint64_t))
{
    for (uint32_t i = 0; i < s->n_devices; i++) {
        const metrics_device *d = &s->devices[i];

        put2(w, "direction", "load", "device", d->name, unit(of(&d->work.load)));
        put2(w, "direction", "store", "device", d->name, unit(of(&d->work.store)));
    }
}

static void walk_workers(const walk *w, const metrics_snapshot *s)
{
    const decoder_stats *c = &s->work.compute;

    counter(w, "kvstride_transfer_blocks_total",
            "Blocks of which every byte was copied, by whichever path; counted when their job has ended, whatever "
            "became of "
            "the rest of it. Not those that a load found in place: kvstride_loads_no_copy_total.");
    put_paths(w, s, path_blocks, whole);
    counter(w, "kvstride_transfer_bytes_total", "The same in bytes.");
    put_paths(w, s, path_bytes, whole);
    counter(w, "kvstride_transfer_seconds_total", "Time spent on these jobs.");
    put_paths(w, s, path_busy, micros);
    counter(w, "kvstride_transfer_jobs_total", "Copy jobs that have run.");
    put_directions(w, s, mover_jobs, whole);
    counter(w, "kvstride_transfer_failed_jobs_total", "Of these failed.");
    put_directions(w, s, mover_failed, whole);
    gauge(w, "kvstride_transfer_queued_jobs", "Copy jobs that wait: for their turn or for a client's counter.");
    put_directions(w, s, mover_queued, whole);
    gauge(w, "kvstride_transfer_running_seconds", "Age of the copy job that is running; 0: none is.");
    put_directions(w, s, mover_oldest, micros);
    counter_of(w, "kvstride_compute_jobs_total", "WRITE, DECODE and EXTEND jobs that have run.", whole(c->jobs));
    counter_of(w, "kvstride_compute_calls_total", "Calls in them.", whole(c->calls));
    counter_of(w, "kvstride_compute_seconds_total", "Time spent on them.", micros(c->busy_us));
    counter_of(w, "kvstride_compute_failed_jobs_total", "Of these jobs failed.", whole(c->failed));
    gauge_of(w, "kvstride_compute_queued_jobs", "Jobs that wait.", whole(c->queued));
}

/* ---- requests ---- */

static void put_answers(const walk *w, uint16_t op, const uint64_t *by)
{
    const char *name = op == 0 ? "other" : wire_op_name(op);

    if (name == NULL)
        return;
    for (uint32_t s = 0; s < METRICS_STATUSES; s++)
        if (by[s] != 0 || s == KVS_OK) /* what happens never is no series: 600 of them are too many */
            put2(w, "op", name, "status", kvs_status_name((kvs_status)s), whole(by[s]));
}

static void put_histogram(const walk *w, const char *class, const histogram *h)
{
    uint64_t sum = 0;
    char end[WORD];
    metric_label l[] = {{"class", class}, {"le", end}};

    for (uint32_t i = 0; i < METRICS_BUCKETS; i++) {
        uint64_t us = histogram_end_us(i);

        sum += h->n[i];
        (void)snprintf(end, sizeof end, "%" PRIu64 ".%06" PRIu64, us / 1000000, us % 1000000);
        w->v->sample(w->ud, "_bucket", l, 2, whole(sum));
    }
    l[1].value = "+Inf";
    w->v->sample(w->ud, "_bucket", l, 2, whole(sum + h->n[METRICS_BUCKETS]));
    w->v->sample(w->ud, "_sum", l, 1, nanos(h->sum_ns));
    w->v->sample(w->ud, "_count", l, 1, whole(sum + h->n[METRICS_BUCKETS]));
}

static void walk_requests(const walk *w, const metrics_snapshot *s)
{
    const metrics_counts *m = &s->counts;

    counter_of(w, "kvstride_requests_received_total", "Requests that came: answered or in flight.", whole(m->received));
    gauge_of(w, "kvstride_requests_in_flight", "Requests without an answer so far.", whole(m->in_flight));
    gauge_of(w, "kvstride_requests_memory_bytes", "Memory that those in flight hold.", whole(s->request_bytes));
    counter(w, "kvstride_requests_total", "Requests answered, by op and status; E_PARTIAL: see the items.");
    for (uint32_t op = 0; op < METRICS_OPS; op++)
        put_answers(w, (uint16_t)op, m->by[op]);
    w->v->family(w->ud, "kvstride_request_duration_seconds", METRIC_HISTOGRAM,
                 "From the arrival of a request to its answer, waiting for the client's counter included.");
    for (uint32_t c = 0; c < METRICS_CLASSES; c++)
        put_histogram(w, metrics_class_name(c), &m->latency[c]);
}

/* ---- around ---- */

static void put_names(const walk *w, const char *label, const metrics_names *m)
{
    for (uint32_t i = 0; i < METRICS_NAMES && m->of[i].name != NULL; i++)
        put1(w, label, m->of[i].name, whole(m->of[i].n));
}

static void walk_edge(const walk *w, const metrics_snapshot *s)
{
    static const char *const LEVELS[] = {"error", "warn", "info", "debug"};

    gauge(w, "kvstride_clients", "Connections, by socket.");
    put1(w, "socket", "client", whole(s->n_clients));
    put1(w, "socket", "admin", whole(s->n_admins));
    counter(w, "kvstride_clients_accepted_total", "Connections that were let in.");
    put1(w, "socket", "client", whole(s->edge.accepted_clients));
    put1(w, "socket", "admin", whole(s->edge.accepted_admins));
    counter(w, "kvstride_clients_refused_total", "Connections that were not let in, by reason.");
    put_names(w, "reason", &s->edge.refused);
    counter(w, "kvstride_clients_dropped_total", "Connections that were ended for a fault of the client, by reason.");
    put_names(w, "reason", &s->edge.dropped);
    counter(w, "kvstride_reloads_total", "Reloads of the configuration, by result.");
    put_names(w, "result", &s->edge.reloads);
    counter(w, "kvstride_log_lines_total", "Log lines written, by level.");
    for (uint32_t i = 0; i < 4; i++)
        put1(w, "level", LEVELS[i], whole(s->log_lines[i]));
    counter_of(w, "kvstride_log_lines_left_out_total", "Log lines that the rate limit left out.",
               whole(s->log_left_out));
}

void metrics_walk(const metrics_snapshot *s, const metrics_visitor *v, void *ud)
{
    const walk w = {v, ud, s->device};

    walk_process(&w, s);
    walk_pool(&w, s);
    walk_layouts(&w, s);
    walk_blocks(&w, s);
    walk_tenants(&w, s);
    walk_workers(&w, s);
    walk_requests(&w, s);
    walk_edge(&w, s);
}
