/* stats: the daemon's counters as a short table, or as rates, a line an interval. */
#include "proto/ctl/ctl.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "config/json.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/render.h"

enum { LINES_A_HEAD = 20 };

/* ---- finding numbers ---- */

static const char *text_of(const json_node *object, const char *key)
{
    const json_node *n = json_member(object, key);

    return n != NULL && json_type_of(n) == JSON_STRING ? json_string(n) : "";
}

static const json_node *samples_of(const json_node *root, const char *family)
{
    const json_node *all = json_member(root, "families");

    if (all == NULL || json_type_of(all) != JSON_ARRAY)
        return NULL;
    for (const json_node *f = json_first(all); f != NULL; f = json_next(f))
        if (strcmp(text_of(f, "name"), family) == 0)
            return json_member(f, "samples");
    return NULL;
}

static const json_node *first_sample(const json_node *root, const char *family)
{
    const json_node *samples = samples_of(root, family);

    return samples != NULL && json_type_of(samples) == JSON_ARRAY ? json_first(samples) : NULL;
}

static bool has_label(const json_node *sample, const char *label, const char *value)
{
    const json_node *labels = json_member(sample, "labels");

    return labels != NULL && json_type_of(labels) == JSON_OBJECT && strcmp(text_of(labels, label), value) == 0;
}

static double value_of(const json_node *sample)
{
    const json_node *v = json_member(sample, "value");

    return v != NULL && json_type_of(v) == JSON_NUMBER ? json_number(v) : 0;
}

/* The sum of a family's samples, of those with label=value if label is not NULL. */
static double sum(const json_node *root, const char *family, const char *label, const char *value)
{
    double n = 0;

    for (const json_node *s = first_sample(root, family); s != NULL; s = json_next(s))
        if (label == NULL || has_label(s, label, value))
            n += value_of(s);
    return n;
}

static double all(const json_node *root, const char *family)
{
    return sum(root, family, NULL, NULL);
}

/* Value of `label` of the first sample that is not 0; "?" if there is none. */
static const char *which(const json_node *root, const char *family, const char *label)
{
    for (const json_node *s = first_sample(root, family); s != NULL; s = json_next(s))
        if (value_of(s) != 0)
            return text_of(json_member(s, "labels"), label);
    return "?";
}

/* Seconds within which `percent` of a class were answered, by the end of their bucket; NAN: none were. */
static double within(const json_node *root, const char *class, double percent)
{
    const char *const family = "kvstride_request_duration_seconds";
    double count = 0;

    for (const json_node *s = first_sample(root, family); s != NULL; s = json_next(s))
        if (has_label(s, "class", class) && strcmp(text_of(s, "suffix"), "_count") == 0)
            count = value_of(s);
    if (count == 0)
        return NAN;
    for (const json_node *s = first_sample(root, family); s != NULL; s = json_next(s))
        if (has_label(s, "class", class) && strcmp(text_of(s, "suffix"), "_bucket") == 0 &&
            value_of(s) * 100 >= percent * count)
            return strtod(text_of(json_member(s, "labels"), "le"), NULL); /* "+Inf" is infinity */
    return NAN;
}

/* ---- a table ---- */

static const char *bytes(char buf[32], double n)
{
    return render_bytes(buf, 32, n);
}

static const char *duration(char buf[32], double s)
{
    if (isnan(s))
        (void)snprintf(buf, 32, "-");
    else if (isinf(s))
        (void)snprintf(buf, 32, "> 16 s");
    else if (s < 1e-3)
        (void)snprintf(buf, 32, "%.0f us", s * 1e6);
    else
        (void)snprintf(buf, 32, s < 1 ? "%.1f ms" : "%.1f s", s < 1 ? s * 1e3 : s);
    return buf;
}

/* "12.3 %", or "-" where nothing was asked. */
static const char *percent(char buf[32], double part, double of)
{
    (void)snprintf(buf, 32, of > 0 ? "%.1f %%" : "-", of > 0 ? 100 * part / of : 0);
    return buf;
}

static void print_copies(const json_node *r, const char *direction)
{
    double moved = sum(r, "kvstride_transfer_bytes_total", "direction", direction);
    double busy = sum(r, "kvstride_transfer_seconds_total", "direction", direction);
    char b[2][32], p[2][32];

    (void)printf("%-9s %.0f blocks, %s, %s/s while busy, %.0f queued; half within %s, 99 %% within %s\n", direction,
                 sum(r, "kvstride_transfer_blocks_total", "direction", direction), bytes(b[0], moved),
                 bytes(b[1], busy > 0 ? moved / busy : 0),
                 sum(r, "kvstride_transfer_queued_jobs", "direction", direction),
                 duration(p[0], within(r, direction, 50)), duration(p[1], within(r, direction, 99)));
}

static void print_table(const json_node *r)
{
    double hits = all(r, "kvstride_lookup_hits_total"), asked = all(r, "kvstride_lookup_keys_total");
    char b[4][32], t[32];

    (void)printf("daemon    %s, up %.0f s, device %s\n", which(r, "kvstride_health", "state"),
                 all(r, "kvstride_uptime_seconds"), which(r, "kvstride_build_info", "device"));
    (void)printf("pool      %s of %s usable; blocks %s, free %s, quarantined %s\n",
                 bytes(b[0], all(r, "kvstride_pool_arena_bytes")), bytes(b[1], all(r, "kvstride_pool_max_bytes")),
                 bytes(b[2], sum(r, "kvstride_pool_bytes", "state", "ready")),
                 bytes(b[3], sum(r, "kvstride_pool_bytes", "state", "free") +
                                 sum(r, "kvstride_pool_bytes", "state", "unassigned")),
                 bytes(t, sum(r, "kvstride_pool_bytes", "state", "quarantined")));
    (void)printf("blocks    %.0f resident; %.0f stored, %.0f evicted, %.0f dropped, %.0f rebound, %.0f without space\n",
                 all(r, "kvstride_resident_blocks"), all(r, "kvstride_blocks_stored_total"),
                 sum(r, "kvstride_blocks_removed_total", "cause", "evicted"),
                 sum(r, "kvstride_blocks_removed_total", "cause", "dropped"),
                 sum(r, "kvstride_blocks_removed_total", "cause", "rebound"), all(r, "kvstride_blocks_no_space_total"));
    (void)printf("lookups   %.0f keys, %.0f hits (%s)\n", asked, hits, percent(t, hits, asked));
    print_copies(r, "load");
    print_copies(r, "store");
    (void)printf("requests  %.0f answered, %.0f of them not OK, %.0f in flight\n", all(r, "kvstride_requests_total"),
                 all(r, "kvstride_requests_total") - sum(r, "kvstride_requests_total", "status", "OK"),
                 all(r, "kvstride_requests_in_flight"));
    (void)printf("holds     %.0f leases (oldest %s), %s leased, %s pinned\n", all(r, "kvstride_leases"),
                 duration(t, all(r, "kvstride_lease_oldest_seconds")), bytes(b[0], all(r, "kvstride_leased_bytes")),
                 bytes(b[1], all(r, "kvstride_pinned_bytes")));
    (void)printf("clients   %.0f now, %.0f accepted, %.0f refused, %.0f dropped for a fault\n",
                 sum(r, "kvstride_clients", "socket", "client"),
                 sum(r, "kvstride_clients_accepted_total", "socket", "client"),
                 all(r, "kvstride_clients_refused_total"), all(r, "kvstride_clients_dropped_total"));
    if (strcmp(which(r, "kvstride_conservation_error", "rule"), "?") != 0)
        (void)printf("SUMS THAT DO NOT AGREE: %s; run kvstridectl fsck\n",
                     which(r, "kvstride_conservation_error", "rule"));
}

/* ---- rates ---- */

typedef struct counts {
    double up_s, requests, load, load_bytes, store, store_bytes, hits, asked, evicted;
} counts;

static counts count(const json_node *r)
{
    return (counts){
        .up_s = all(r, "kvstride_uptime_seconds"),
        .requests = all(r, "kvstride_requests_total"),
        .load = sum(r, "kvstride_transfer_blocks_total", "direction", "load"),
        .load_bytes = sum(r, "kvstride_transfer_bytes_total", "direction", "load"),
        .store = sum(r, "kvstride_transfer_blocks_total", "direction", "store"),
        .store_bytes = sum(r, "kvstride_transfer_bytes_total", "direction", "store"),
        .hits = all(r, "kvstride_lookup_hits_total"),
        .asked = all(r, "kvstride_lookup_keys_total"),
        .evicted = sum(r, "kvstride_blocks_removed_total", "cause", "evicted"),
    };
}

static void print_rates(const json_node *r, const counts *was, const counts *is, unsigned line)
{
    double s = is->up_s - was->up_s;
    char hits[32];

    if (line % LINES_A_HEAD == 0)
        (void)printf("%10s %10s %10s %10s %10s %8s %9s %9s %8s\n", "requests/s", "load/s", "load MB/s", "store/s",
                     "store MB/s", "hits", "evicted/s", "in flight", "clients");
    (void)printf("%10.0f %10.0f %10.1f %10.0f %10.1f %8s %9.0f %9.0f %8.0f\n", (is->requests - was->requests) / s,
                 (is->load - was->load) / s, (is->load_bytes - was->load_bytes) / s / 1e6, (is->store - was->store) / s,
                 (is->store_bytes - was->store_bytes) / s / 1e6,
                 percent(hits, is->hits - was->hits, is->asked - was->asked), (is->evicted - was->evicted) / s,
                 all(r, "kvstride_requests_in_flight"), sum(r, "kvstride_clients", "socket", "client"));
}

/* ---- the command ---- */

typedef struct follow {
    const ctl *c;
    counts was;
    bool begun;
    unsigned lines;
} follow;

/* One answer: shown, or for rates compared with the one before. */
static kvs_status show(follow *f, const char *text, size_t len, kvs_err *err)
{
    json *doc = NULL;
    kvs_status s;
    counts is;

    if (f->c->json) {
        (void)printf("%s\n", text);
        return KVS_OK;
    }
    s = json_parse(text, len, &doc, err);
    if (s != KVS_OK)
        return KVS_E_PROTO;
    is = count(json_root(doc));
    if (f->c->interval == 0)
        print_table(json_root(doc));
    else if (f->begun && is.up_s > f->was.up_s) /* else it is another daemon's first */
        print_rates(json_root(doc), &f->was, &is, f->lines++);
    f->was = is;
    f->begun = true;
    json_destroy(doc);
    return KVS_OK;
}

static kvs_status ask(kvs_client *client, follow *f, kvs_err *err)
{
    kvs_report_args a = {.section = KVS_SECTION_METRICS, .ns = KVS_ALL};
    char *text = NULL;
    size_t len = 0;
    kvs_status s = kvs_report_alloc(client, &a, &text, &len, 0, err);

    if (s == KVS_OK)
        s = show(f, text, len, err);
    kvs_free(text);
    return s;
}

static int follow_stats(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    uint64_t end = c->seconds != 0 ? clock_ns() + c->seconds * 1000000000u : UINT64_MAX;
    follow f = {.c = c};
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = ask(client, &f, &err);
    while (s == KVS_OK && c->interval != 0 && clock_ns() < end && fflush(stdout) == 0 && !ctl_reader_gone()) {
        (void)nanosleep(&(struct timespec){.tv_sec = (time_t)c->interval}, NULL);
        s = ask(client, &f, &err);
    }
    if (s != KVS_OK)
        code = ctl_fail(c, "stats", s, &err);
    kvs_close(client);
    return code;
}

int ctl_stats(const ctl *c)
{
    if (c->seconds != 0 && c->interval == 0)
        return ctl_usage("stats: --seconds says when --interval N ends, and there is none");
    return follow_stats(c);
}
