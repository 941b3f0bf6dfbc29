#include "proto/ctl/bench_list.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "proto/cpus.h"
#include "proto/ctl/clock.h"

bench_figure *bench_add(bench_list *l, const char *unit, bool at_least, double target, const char *fmt, ...)
{
    bench_figure *f = &l->figures[l->n < BENCH_FIGURES ? l->n++ : BENCH_FIGURES - 1];
    va_list ap;

    *f = (bench_figure){.unit = unit,
                        .plain_is = "",
                        .value_is = "",
                        .judged_is = "",
                        .value = NAN,
                        .p99 = NAN,
                        .plain = NAN,
                        .plain_p99 = NAN,
                        .judged = NAN,
                        .low = NAN,
                        .high = NAN,
                        .target = target,
                        .at_least = at_least};
    va_start(ap, fmt);
    (void)vsnprintf(f->name, sizeof f->name, fmt, ap);
    va_end(ap);
    return f;
}

bench_point *bench_add_point(bench_list *l)
{
    bench_point *p = &l->points[l->n_points < BENCH_POINTS ? l->n_points++ : BENCH_POINTS - 1];

    *p = (bench_point){.path = "", .way = ""};
    return p;
}

void bench_judge(bench_figure *f, double *rounds, size_t n)
{
    f->judged = clock_percentile(rounds, n, 50);
    f->low = clock_percentile(rounds, n, 25);
    f->high = clock_percentile(rounds, n, 75);
}

bool bench_met(const bench_figure *f)
{
    double judged = isnan(f->judged) ? f->value : f->judged;

    if (isnan(f->target))
        return true;
    return f->at_least ? judged >= f->target : judged <= f->target;
}

/* ---- text ---- */

/* A number, or nothing. */
static const char *cell(char buf[16], double v)
{
    (void)snprintf(buf, 16, fabs(v) < 1000 ? "%.2f" : "%.0f", v);
    return isnan(v) ? "" : buf;
}

static void print_figure(const bench_figure *f, FILE *to)
{
    char t[7][16], target[32] = "";

    if (!isnan(f->target))
        (void)snprintf(target, sizeof target, "%s %g", f->at_least ? ">=" : "<=", f->target);
    (void)fprintf(to, "%-76s %9s %9s %-8s %9s %9s  %-20s %7s %7s %7s  %s%s\n", f->name, cell(t[0], f->value),
                  cell(t[1], f->p99), f->unit, cell(t[2], f->plain), cell(t[3], f->plain_p99), f->plain_is,
                  cell(t[4], f->judged), cell(t[5], f->low), cell(t[6], f->high), target,
                  bench_met(f) ? "" : "  MISSED");
}

static void print_points(const bench_list *l, FILE *to)
{
    (void)fprintf(to, "\n%-38s %-6s %10s %10s %7s %8s %8s %8s  %s\n", "blocks through the socket, by piece", "way",
                  "piece", "block", "blocks", "GB/s", "raw", "fraction", "quartiles");
    for (uint32_t i = 0; i < l->n_points; i++) {
        const bench_point *p = &l->points[i];

        (void)fprintf(to, "%-38s %-6s %10" PRIu64 " %10" PRIu64 " %7" PRIu32 " %8.2f %8.2f %8.3f  %.3f..%.3f\n",
                      p->path, p->way, p->piece_bytes, p->block_bytes, p->n_blocks, p->gbs, p->raw, p->fraction, p->low,
                      p->high);
    }
}

void bench_print(const bench_list *l, FILE *to)
{
    (void)fprintf(to, "%-76s %9s %9s %-8s %9s %9s  %-20s %7s %15s  %s\n", "", "median", "p99", "", "plain", "p99",
                  "plain is", "ratio", "its quartiles", "target");
    for (uint32_t i = 0; i < l->n; i++)
        print_figure(&l->figures[i], to);
    if (l->n_points > 0)
        print_points(l, to);
    (void)fprintf(
        to,
        "(the ratio is the median of the ratios of each round, both taken in turn%s;\n"
        " of round trips and lookups: client on one CPU, both servers on another)\n",
        l->card[0] != '\0' ? "; of a latency above a raw copy it is the difference in us, of pinning the value" : "");
}

/* ---- JSON ---- */

static void put_figure(const bench_figure *f, json_writer *w)
{
    json_begin_object(w, NULL);
    json_put_string(w, "name", f->name);
    json_put_string(w, "unit", f->unit);
    json_put_double(w, "value", f->value); /* what is not there is null */
    json_put_double(w, "p99", f->p99);
    json_put_double(w, "plain", f->plain);
    json_put_double(w, "plain_p99", f->plain_p99);
    json_put_string(w, "plain_is", f->plain_is);
    if (f->value_is[0] != '\0')
        json_put_string(w, "value_is", f->value_is);
    json_put_double(w, "ratio", f->judged);
    if (f->judged_is[0] != '\0')
        json_put_string(w, "ratio_is", f->judged_is);
    json_put_double(w, "ratio_low", f->low);
    json_put_double(w, "ratio_high", f->high);
    json_put_string(w, "target_is", isnan(f->target) ? "none" : f->at_least ? "at least" : "at most");
    json_put_double(w, "target", f->target);
    json_put_bool(w, "met", bench_met(f));
    json_end(w);
}

static void put_point(const bench_point *p, json_writer *w)
{
    json_begin_object(w, NULL);
    json_put_string(w, "path", p->path);
    json_put_string(w, "way", p->way);
    json_put_u64(w, "piece_bytes", p->piece_bytes);
    json_put_u64(w, "block_bytes", p->block_bytes);
    json_put_u64(w, "blocks", p->n_blocks);
    json_put_double(w, "gbs", p->gbs);
    json_put_double(w, "raw_gbs", p->raw);
    json_put_double(w, "fraction", p->fraction);
    json_put_double(w, "fraction_low", p->low);
    json_put_double(w, "fraction_high", p->high);
    json_end(w);
}

void bench_put(const bench_list *l, json_writer *w)
{
    json_put_string(w, "version", KVS_VERSION);
    if (l->card[0] != '\0')
        json_put_string(w, "gpu", l->card);
    json_put_i64(w, "cores", cpus_usable());
    json_begin_array(w, "figures");
    for (uint32_t i = 0; i < l->n; i++)
        put_figure(&l->figures[i], w);
    json_end(w);
    if (l->n_points == 0)
        return;
    json_begin_array(w, "sweep");
    for (uint32_t i = 0; i < l->n_points; i++)
        put_point(&l->points[i], w);
    json_end(w);
}
