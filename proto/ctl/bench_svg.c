/* The plot of a bench: on the left the sweep, fraction of the raw copy over the size of a piece; on the right every ratio
 * that has a target, with its quartiles and the target as a tick.  Colours of middle lightness on no background: they are
 * read on white and on black. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/ctl/bench_list.h"

enum {
    LEFT = 70,
    TOP = 60,
    PLOT_WIDTH = 560,
    PLOT_HEIGHT = 380,
    LEGEND_TOP = TOP + PLOT_HEIGHT + 70,
    BARS_LEFT = LEFT + PLOT_WIDTH + 510,
    BARS_WIDTH = 260,
    ROW = 20,
    MAX_SERIES = 24,
};
#define INK      "#808080"
#define FINE     "#80808040"
#define LOG_LOW  12.0 /* 4 KiB */
#define LOG_HIGH 24.2 /* above 16 MiB */
#define TALLEST  1.1  /* fraction at the plot's top */

static const char *const COLOURS[] = {"#3b82f6", "#e5701a", "#12a150", "#c2410c", "#9353d3", "#0e9aa7", "#d6336c"};
enum { N_COLOURS = sizeof COLOURS / sizeof *COLOURS };

/* One path in one direction: a line of the plot. */
typedef struct series {
    const char *path, *way;
    int colour; /* of the path */
} series;

static int find_series(const bench_list *l, series *s)
{
    int n = 0, paths = 0;

    for (uint32_t i = 0; i < l->n_points; i++) {
        const bench_point *p = &l->points[i];
        int at = 0, colour = -1;

        while (at < n && (strcmp(s[at].path, p->path) != 0 || strcmp(s[at].way, p->way) != 0))
            at++;
        if (at < n || n == MAX_SERIES)
            continue;
        for (int k = 0; k < n; k++)
            if (strcmp(s[k].path, p->path) == 0)
                colour = s[k].colour;
        if (colour < 0)
            colour = paths++ % N_COLOURS;
        s[n++] = (series){p->path, p->way, colour};
    }
    return n;
}

/* Text with what XML wants spelled out. */
static void put_text(FILE *to, double x, double y, const char *attributes, const char *text)
{
    (void)fprintf(to, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    for (; *text != '\0'; text++)
        if (*text == '<' || *text == '>' || *text == '&')
            (void)fputs(*text == '<' ? "&lt;" : *text == '>' ? "&gt;" : "&amp;", to);
        else
            (void)fputc(*text, to);
    (void)fputs("</text>\n", to);
}

static void put_line(FILE *to, double x1, double y1, double x2, double y2, const char *attributes)
{
    (void)fprintf(to, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2, attributes);
}

/* ---- the sweep ---- */

static double x_of(uint64_t bytes)
{
    return LEFT + (log2((double)bytes) - LOG_LOW) / (LOG_HIGH - LOG_LOW) * PLOT_WIDTH;
}

static double y_of(double fraction)
{
    double f = fraction < 0 ? 0 : fraction > TALLEST ? TALLEST : fraction;

    return TOP + (1 - f / TALLEST) * PLOT_HEIGHT;
}

static void put_axes(FILE *to)
{
    static const char *const SIZES[] = {"4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB"};
    char label[16];

    for (int i = 0; i <= 10; i += 2) {
        double y = y_of(i / 10.0);

        put_line(to, LEFT, y, LEFT + PLOT_WIDTH, y, i == 0 ? "stroke=\"" INK "\"" : "stroke=\"" FINE "\"");
        (void)snprintf(label, sizeof label, "%.1f", i / 10.0);
        put_text(to, LEFT - 8, y + 4, "text-anchor=\"end\"", label);
    }
    for (int i = 0; i < 7; i++) {
        double x = x_of(UINT64_C(4096) << (2 * i));

        put_line(to, x, TOP, x, TOP + PLOT_HEIGHT, "stroke=\"" FINE "\"");
        put_text(to, x, TOP + PLOT_HEIGHT + 18, "text-anchor=\"middle\"", SIZES[i]);
    }
    put_text(to, LEFT + PLOT_WIDTH / 2.0, TOP + PLOT_HEIGHT + 40, "text-anchor=\"middle\"",
             "bytes of one piece: a block, or a page of one layer");
    (void)fprintf(to,
                  "<text transform=\"translate(20 %.1f) rotate(-90)\" text-anchor=\"middle\">fraction of one large raw "
                  "copy of the same run</text>\n",
                  TOP + PLOT_HEIGHT / 2.0);
}

static const char *dash_of(const char *way)
{
    return strcmp(way, "STORE") == 0 ? "none" : strcmp(way, "LOAD") == 0 ? "7 4" : "2 3";
}

static void put_series(FILE *to, const bench_list *l, const series *s)
{
    const char *colour = COLOURS[s->colour];
    bool first = true;

    (void)fprintf(to, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\" points=\"",
                  colour, dash_of(s->way));
    for (uint32_t i = 0; i < l->n_points; i++) {
        const bench_point *p = &l->points[i];

        if (strcmp(p->path, s->path) == 0 && strcmp(p->way, s->way) == 0) {
            (void)fprintf(to, "%s%.1f,%.1f", first ? "" : " ", x_of(p->piece_bytes), y_of(p->fraction));
            first = false;
        }
    }
    (void)fputs("\"/>\n", to);
    for (uint32_t i = 0; i < l->n_points; i++) {
        const bench_point *p = &l->points[i];
        char look[96];

        if (strcmp(p->path, s->path) != 0 || strcmp(p->way, s->way) != 0)
            continue;
        (void)snprintf(look, sizeof look, "stroke=\"%s\"", colour);
        put_line(to, x_of(p->piece_bytes), y_of(p->low), x_of(p->piece_bytes), y_of(p->high), look);
        (void)fprintf(to,
                      "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"><title>%s, %s, %" PRIu64
                      " bytes a piece: %.2f GB/s, %.3f of raw</title></circle>\n",
                      x_of(p->piece_bytes), y_of(p->fraction), colour, p->path, p->way, p->piece_bytes, p->gbs,
                      p->fraction);
    }
}

/* A row a path: its directions, then its name. */
static void put_legend(FILE *to, const series *s, int n)
{
    for (int i = 0; i < n; i++) {
        const bool is_store = strcmp(s[i].way, "STORE") == 0;
        double x = LEFT + (is_store ? 0 : strcmp(s[i].way, "LOAD") == 0 ? 95 : 190);
        double y = LEGEND_TOP + s[i].colour * 20.0;
        char look[96];

        (void)snprintf(look, sizeof look, "stroke=\"%s\" stroke-width=\"2\" stroke-dasharray=\"%s\"",
                       COLOURS[s[i].colour], dash_of(s[i].way));
        put_line(to, x, y - 4, x + 30, y - 4, look);
        put_text(to, x + 36, y, "", s[i].way);
        if (is_store)
            put_text(to, LEFT + 290, y, "", s[i].path);
    }
}

/* ---- the ratios ---- */

static double bar_of(double ratio)
{
    return BARS_LEFT + (ratio > 1.2 ? 1.2 : ratio < 0 ? 0 : ratio) / 1.2 * BARS_WIDTH;
}

static bool is_ratio(const bench_figure *f)
{
    return !isnan(f->judged) && !isnan(f->target) && f->target <= 1.2;
}

static int put_bars(FILE *to, const bench_list *l)
{
    int row = 0;

    for (uint32_t i = 0; i < l->n; i++) {
        const bench_figure *f = &l->figures[i];
        double y = TOP + row * ROW;
        const char *name = strncmp(f->name, "GPU: ", 5) == 0 ? f->name + 5 : f->name;
        char value[352];

        if (!is_ratio(f))
            continue;
        put_text(to, BARS_LEFT - 8, y + 4, "text-anchor=\"end\"", name);
        (void)fprintf(to, "<rect x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"10\" fill=\"%s\"/>\n", BARS_LEFT, y - 5,
                      bar_of(f->judged) - BARS_LEFT, bench_met(f) ? COLOURS[0] : COLOURS[1]);
        put_line(to, bar_of(f->low), y, bar_of(f->high), y, "stroke=\"" INK "\" stroke-width=\"3\"");
        put_line(to, bar_of(f->target), y - 8, bar_of(f->target), y + 8, "stroke=\"" INK "\" stroke-width=\"2\"");
        (void)snprintf(value, sizeof value, "%.3f %s %g", f->judged, f->at_least ? ">=" : "<=", f->target);
        put_text(to, BARS_LEFT + BARS_WIDTH + 12, y + 4, "", value);
        row++;
    }
    return row;
}

static void put_all(FILE *to, const bench_list *l)
{
    series s[MAX_SERIES];
    const int n = find_series(l, s);
    int rows = 0;
    double height;

    for (uint32_t i = 0; i < l->n; i++)
        rows += is_ratio(&l->figures[i]);
    height = LEGEND_TOP + 7 * 20;
    if (TOP + rows * ROW + 40 > height)
        height = TOP + rows * ROW + 40;
    (void)fprintf(to,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %.0f\" font-family=\"sans-serif\" "
                  "font-size=\"12\" fill=\"" INK "\">\n<title>kvstridectl bench</title>\n",
                  BARS_LEFT + BARS_WIDTH + 120, height);
    put_text(to, LEFT, 28, "font-size=\"15\" font-weight=\"bold\"", l->card[0] != '\0' ? l->card : "no GPU: no sweep");
    put_text(to, BARS_LEFT, 28, "font-size=\"15\" font-weight=\"bold\" text-anchor=\"middle\"",
             "ratios with quartiles, targets as ticks; orange: missed");
    if (n > 0)
        put_axes(to);
    for (int i = 0; i < n; i++)
        put_series(to, l, &s[i]);
    put_legend(to, s, n);
    (void)put_bars(to, l);
    (void)fputs("</svg>\n", to);
}

kvs_status bench_svg_try(const char *path, kvs_err *err)
{
    FILE *f = fopen(path, "ae");

    if (f == NULL || fclose(f) != 0)
        return kvs_fail(err, KVS_E_SYS, "%.150s: %s", path, strerror(errno));
    return KVS_OK;
}

kvs_status bench_svg(const bench_list *l, const char *path, kvs_err *err)
{
    FILE *f = fopen(path, "we");
    bool good;

    if (f == NULL)
        return kvs_fail(err, KVS_E_SYS, "%.150s: %s", path, strerror(errno));
    put_all(f, l);
    good = ferror(f) == 0;
    if (fclose(f) != 0 || !good)
        return kvs_fail(err, KVS_E_SYS, "%.150s: %s", path, strerror(errno));
    return KVS_OK;
}
