#ifndef KVS_CTL_BENCH_LIST_H
#define KVS_CTL_BENCH_LIST_H

/* The results of kvstridectl bench: figures with their targets, and a sweep over piece sizes for the plot.
 *
 * Knows how they are written: a table, JSON, an SVG plot.  Does not know how they came about.
 * One thread.  Plain values; texts are borrowed for good (literals), but for names. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "config/json.h"
#include "proto/status.h"

enum { BENCH_FIGURES = 96, BENCH_POINTS = 96, BENCH_NAME_BYTES = 88 };

/* What is not there is NAN.  Of several rounds everything is the median; low and high are the quartiles of `judged`. */
typedef struct bench_figure {
    char name[BENCH_NAME_BYTES];
    const char *unit, *plain_is;
    const char *value_is; /* what each round gives; "": one measured time, or bytes over it */
    double value, p99, plain, plain_p99;
    double judged, low, high; /* a ratio, or what judged_is says; NAN: the value itself is judged */
    const char *judged_is;    /* "": a ratio */
    double target;            /* NAN: there is none */
    bool at_least;
} bench_figure;

/* How fast pieces of one size go one way. */
typedef struct bench_point {
    const char *path, *way; /* "engine pages"; "STORE", "LOAD", "both" */
    uint64_t piece_bytes, block_bytes;
    uint32_t n_blocks;
    double gbs, raw, fraction, low, high; /* fraction: of the raw copy of the same round */
} bench_point;

typedef struct bench_list {
    char card[64]; /* "": no GPU */
    bench_figure figures[BENCH_FIGURES];
    bench_point points[BENCH_POINTS];
    uint32_t n, n_points;
} bench_list;

/* One more, at the end; a full list overwrites its last entry.  All numbers but the target are NAN. */
bench_figure *bench_add(bench_list *l, const char *unit, bool at_least, double target, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
bench_point *bench_add_point(bench_list *l);

/* judged, low and high of n rounds; sorts them. */
void bench_judge(bench_figure *f, double *rounds, size_t n);

bool bench_met(const bench_figure *f); /* true where there is no target */

void bench_print(const bench_list *l, FILE *to);
void bench_put(const bench_list *l, json_writer *w); /* members of the object that is open */

/* bench_svg.c: readable on a light and on a dark page.  E_SYS names the file. */
kvs_status bench_svg(const bench_list *l, const char *path, kvs_err *err);
/* Could it be written?  Asked before minutes of measuring; changes nothing of a file that is there. */
kvs_status bench_svg_try(const char *path, kvs_err *err);

#endif
