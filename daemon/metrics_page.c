#include "daemon/metrics_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* One page without scripts or anything from elsewhere; it comes again every five seconds by itself. */

static const char HEAD[] =
    "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta http-equiv=\"refresh\" content=\"5\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\"><title>kvstrided</title><style>\n"
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em;color:#222}\n"
    "h1{font-size:1.5em;margin:0}h2{font-size:1.05em;margin:1.6em 0 .3em}.sub{color:#666}\n"
    "table{border-collapse:collapse;width:100%}th,td{text-align:right;padding:.2em .6em;border-bottom:1px solid "
    "#e4e4e4}\n"
    "th:first-child,td:first-child{text-align:left}th{color:#666;font-weight:500}td{font-variant-numeric:tabular-nums}"
    "\n"
    ".state{display:inline-block;padding:.1em .7em;border-radius:1em;color:#fff;background:#b36b00}\n"
    ".ok{background:#287a3c}.bad{background:#b3261e}.bar{display:flex;height:1.1em;background:#eee}\n"
    ".bar i{display:block}.ready{background:#287a3c}.busy{background:#c98500}.free{background:#cfe3d4}\n"
    ".quar{background:#b3261e}.waste{background:#9a9a9a}.key i{display:inline-block;width:.8em;height:.8em;margin:0 "
    ".3em 0 1em}\n"
    "</style></head><body>\n";

static void put_text(FILE *to, const char *s)
{
    for (; *s != '\0'; s++) {
        if (*s == '<' || *s == '>' || *s == '&' || *s == '"')
            (void)fprintf(to, "&#%d;", *s);
        else
            (void)fputc((unsigned char)*s >= 0x20 && (unsigned char)*s < 0x7f ? *s : '?', to);
    }
}

static const char *size(char buf[32], uint64_t bytes)
{
    static const char *const UNITS[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;

    for (; v >= 1024 && u < 4; u++)
        v /= 1024;
    (void)snprintf(buf, 32, u == 0 ? "%.0f %s" : "%.2f %s", v, UNITS[u]);
    return buf;
}

static const char *time_of(char buf[32], uint64_t us)
{
    if (us == UINT64_MAX)
        (void)snprintf(buf, 32, "&gt; 16 s");
    else if (us < 1000)
        (void)snprintf(buf, 32, "%" PRIu64 " us", us);
    else if (us < 1000000)
        (void)snprintf(buf, 32, "%.1f ms", (double)us / 1e3);
    else
        (void)snprintf(buf, 32, "%.1f s", (double)us / 1e6);
    return buf;
}

static void put_head(FILE *to, const metrics_snapshot *s)
{
    static const char *const STATES[] = {"ok", "starting", "degraded", "draining"};
    uint64_t up = s->uptime_us / 1000000;
    char age[32];
    bool broken = false;

    for (int i = 0; i < METRICS_RULES; i++)
        broken = broken || s->error[i] != 0;
    (void)fputs(HEAD, to);
    (void)fprintf(to, "<h1>kvstrided <span class=\"state %s\">%s</span></h1>\n",
                  s->health == WIRE_HEALTH_OK         ? "ok"
                  : s->health == WIRE_HEALTH_DEGRADED ? "bad"
                                                      : "",
                  STATES[s->health < 4 ? s->health : 2]);
    (void)fprintf(to, "<p class=\"sub\">version %s, device %s, up %" PRIu64 " d %02u:%02u:%02u, numbers %s old%s</p>\n",
                  KVS_VERSION, s->device, up / 86400, (unsigned)(up / 3600 % 24), (unsigned)(up / 60 % 60),
                  (unsigned)(up % 60), time_of(age, s->age_us),
                  broken ? ", <b>sums do not agree: see kvstride_conservation_error</b>" : ", all sums agree");
}

static void put_part(FILE *to, const char *class, uint64_t bytes, uint64_t of)
{
    if (bytes > 0 && of > 0)
        (void)fprintf(to, "<i class=\"%s\" style=\"width:%.3f%%\"></i>", class, 100.0 * (double)bytes / (double)of);
}

static void put_pool(FILE *to, const metrics_snapshot *s)
{
    const pool_bytes *b = &s->pool;
    char t[5][32];

    (void)fprintf(to, "<h2>Host memory: %s of %s usable%s</h2><div class=\"bar\">", size(t[0], b->arena),
                  size(t[1], b->max),
                  s->growing        ? ", pinning more"
                  : s->piece_failed ? ", a piece failed"
                                    : "");
    put_part(to, "ready", b->ready, b->max);
    put_part(to, "busy", b->writing + b->draining, b->max);
    put_part(to, "quar", b->quarantined, b->max);
    put_part(to, "waste", b->waste, b->max);
    put_part(to, "free", b->free + b->unassigned, b->max);
    (void)fprintf(
        to,
        "</div><p class=\"key sub\"><i class=\"ready\"></i>blocks %s<i class=\"busy\"></i>moving %s"
        "<i class=\"quar\"></i>quarantined %s<i class=\"waste\"></i>waste %s<i class=\"free\"></i>free %s</p>\n",
        size(t[0], b->ready), size(t[1], b->writing + b->draining), size(t[2], b->quarantined), size(t[3], b->waste),
        size(t[4], b->free + b->unassigned));
}

static void put_tenants(FILE *to, const metrics_snapshot *s)
{
    char t[32], rate[16];

    (void)fputs("<h2>Blocks</h2><table><tr><th>tenant<th>resident<th>bytes<th>stored<th>evicted<th>dropped"
                "<th>no space<th>keys looked up<th>hits</tr>\n",
                to);
    for (uint32_t i = 0; i < s->n_tenants; i++) {
        const metrics_tenant *n = &s->tenants[i];
        uint64_t asked = n->counts.hits + n->counts.misses;

        (void)snprintf(rate, sizeof rate, asked == 0 ? "-" : "%.1f %%",
                       asked == 0 ? 0 : 100.0 * (double)n->counts.hits / (double)asked);
        (void)fputs("<tr><td>", to);
        put_text(to, n->name);
        (void)fprintf(to,
                      "<td>%" PRIu64 "<td>%s<td>%" PRIu64 "<td>%" PRIu64 "<td>%" PRIu64 "<td>%" PRIu64 "<td>%" PRIu64
                      "<td>%s</tr>\n",
                      n->ready_blocks, size(t, n->ready_bytes), n->counts.stored, n->counts.evicted + n->counts.rebound,
                      n->counts.dropped, n->counts.no_space, asked, rate);
    }
    (void)fputs("</table>\n", to);
}

static void put_mover(FILE *to, const char *name, const mover_stats *m)
{
    char bytes[32], rate[32], run[32];

    (void)fprintf(to, "<tr><td>%s<td>%" PRIu64 "<td>%s<td>%s/s<td>%" PRIu64 "<td>%" PRIu64 "<td>%s</tr>\n", name,
                  m->blocks, size(bytes, m->bytes),
                  size(rate, m->busy_us == 0 ? 0 : (uint64_t)((double)m->bytes * 1e6 / (double)m->busy_us)), m->queued,
                  m->failed, time_of(run, m->oldest_us));
}

static void put_requests(FILE *to, const metrics_snapshot *s)
{
    char t[3][32];

    (void)fputs("<h2>Copies</h2><table><tr><th>direction<th>blocks<th>bytes<th>while busy<th>queued jobs<th>failed"
                "<th>running for</tr>\n",
                to);
    put_mover(to, "load", &s->work.load);
    put_mover(to, "store", &s->work.store);
    (void)fprintf(to,
                  "</table>\n<h2>Requests: %" PRIu64 " answered, %" PRIu64 " in flight</h2>"
                  "<table><tr><th>kind<th>answered<th>half within<th>99 %% within<th>99.9 %% within</tr>\n",
                  s->counts.answered, s->counts.in_flight);
    for (uint32_t i = 0; i < METRICS_CLASSES; i++) {
        const histogram *h = &s->counts.latency[i];
        uint64_t n = histogram_count(h);

        (void)fprintf(to, "<tr><td>%s<td>%" PRIu64, metrics_class_name(i), n);
        if (n == 0)
            (void)fputs("<td>-<td>-<td>-</tr>\n", to);
        else
            (void)fprintf(to, "<td>%s<td>%s<td>%s</tr>\n", time_of(t[0], histogram_percentile_us(h, 50)),
                          time_of(t[1], histogram_percentile_us(h, 99)),
                          time_of(t[2], histogram_percentile_us(h, 99.9)));
    }
    (void)fputs("</table>\n", to);
}

static void put_holds(FILE *to, const metrics_snapshot *s)
{
    char t[5][32];

    (void)fprintf(to,
                  "<h2>Holds</h2><table><tr><th>clients<th>leases<th>oldest<th>leased<th>pinned<th>device regions"
                  "<th>imported</tr>\n<tr><td>%" PRIu32 "<td>%" PRIu64 "<td>%s<td>%s<td>%s<td>%s<td>%s</tr></table>\n",
                  s->n_clients, s->dir.n_leases, time_of(t[0], s->dir.oldest_lease_us), size(t[1], s->dir.leased_bytes),
                  size(t[2], s->dir.pinned_bytes), size(t[3], s->region_bytes), size(t[4], s->import_bytes));
}

kvs_status metrics_page(const metrics_snapshot *s, char **ret, size_t *ret_len)
{
    char *made = NULL;
    FILE *to = open_memstream(&made, ret_len);
    bool good;

    if (to == NULL)
        return KVS_E_NO_MEMORY;
    put_head(to, s);
    put_pool(to, s);
    put_tenants(to, s);
    put_requests(to, s);
    put_holds(to, s);
    (void)fputs("<p class=\"sub\"><a href=\"/metrics\">/metrics</a> <a href=\"/metrics.json\">/metrics.json</a> "
                "<a href=\"/healthz\">/healthz</a> <a href=\"/readyz\">/readyz</a></p></body></html>\n",
                to);
    good = !ferror(to);
    if (fclose(to) != 0 || !good) {
        free(made);
        return KVS_E_NO_MEMORY;
    }
    *ret = made;
    return KVS_OK;
}
