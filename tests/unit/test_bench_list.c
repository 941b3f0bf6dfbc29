/* How the results of a bench are judged and written. */
#include "proto/ctl/bench_list.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/json.h"

static bench_list list;

static void add(const char *name, double target, bool at_least, double judged)
{
    bench_figure *f = bench_add(&list, "GB/s", at_least, target, "%s", name);
    double rounds[5] = {judged + 0.02, judged - 0.01, judged, judged + 0.01, judged - 0.02};

    f->value = 50;
    bench_judge(f, rounds, 5);
}

static void add_point(const char *path, const char *way, uint64_t piece, double fraction)
{
    bench_point *p = bench_add_point(&list);

    *p = (bench_point){.path = path,
                       .way = way,
                       .piece_bytes = piece,
                       .block_bytes = piece,
                       .n_blocks = 7,
                       .gbs = 55 * fraction,
                       .raw = 55,
                       .fraction = fraction,
                       .low = fraction - 0.02,
                       .high = fraction + 0.02};
}

static void setup(void)
{
    list = (bench_list){.card = "A card <of> the & test"};
    add("GPU: LOAD of blocks", 0.98, true, 0.985);
    list.figures[0].value_is = "bytes over time";
    add("GPU: STORE of blocks", 0.98, true, 0.9);
    add("GPU: a latency beside a flood", 1, false, 0.8);
    add("no target", NAN, true, 3);
    bench_add(&list, "bytes", false, 160, "a slot")->value = 150;
    for (int i = 0; i < 6; i++) {
        static const char *const ways[] = {"STORE", "LOAD", "both"};

        for (int w = 0; w < 3; w++) {
            add_point("daemon slots, whole blocks", ways[w], UINT64_C(4096) << (2 * i), 0.4 + 0.1 * i - 0.02 * w);
            add_point("engine memory, one tensor a layer", ways[w], UINT64_C(4096) << (2 * i), 0.1 + 0.15 * i);
        }
    }
}

TestSuite(bench_list, .init = setup);

Test(bench_list, judges_by_the_median_and_gives_the_quartiles)
{
    cr_assert_float_eq(list.figures[0].judged, 0.985, 1e-9);
    cr_assert_float_eq(list.figures[0].low, 0.975, 1e-9);
    cr_assert_float_eq(list.figures[0].high, 0.995, 1e-9);
    cr_assert(bench_met(&list.figures[0]));
    cr_assert_not(bench_met(&list.figures[1]));
    cr_assert(bench_met(&list.figures[2]));
    cr_assert(bench_met(&list.figures[3]), "without a target nothing is missed");
    cr_assert(bench_met(&list.figures[4]), "a value without a ratio is judged itself");
    list.figures[4].value = 161;
    cr_assert_not(bench_met(&list.figures[4]));
}

Test(bench_list, a_full_list_keeps_its_size)
{
    for (int i = 0; i < 2 * BENCH_FIGURES; i++) {
        (void)bench_add(&list, "us", true, 1, "figure %d", i);
        (void)bench_add_point(&list);
    }
    cr_assert_eq(list.n, BENCH_FIGURES);
    cr_assert_eq(list.n_points, BENCH_POINTS);
    cr_assert_str_eq(list.figures[BENCH_FIGURES - 1].name, "figure 191");
}

Test(bench_list, json_has_every_figure_and_point_and_null_for_what_is_not_there)
{
    json_writer *w = json_writer_create();
    const char *text;
    size_t len = 0;
    json *doc = NULL;
    const json_node *figures, *first;
    kvs_err err;

    json_begin_object(w, NULL);
    bench_put(&list, w);
    json_end(w);
    text = json_text(w, &len);
    cr_assert_not_null(text);
    cr_assert_eq(json_parse(text, len, &doc, &err), KVS_OK, "%s", err.msg);
    figures = json_member(json_root(doc), "figures");
    cr_assert_not_null(figures);
    first = json_first(figures);
    cr_assert_not_null(first);
    cr_assert_str_eq(json_string(json_member(first, "name")), "GPU: LOAD of blocks");
    cr_assert_eq(json_type_of(json_member(first, "p99")), JSON_NULL);
    cr_assert_float_eq(json_number(json_member(first, "ratio_low")), 0.975, 1e-9);
    cr_assert_str_eq(json_string(json_member(first, "value_is")), "bytes over time");
    cr_assert_null(json_member(json_next(first), "value_is"));
    cr_assert_not_null(json_member(json_root(doc), "sweep"));
    cr_assert_not_null(strstr(text, "\"target_is\":\"none\""));
    json_destroy(doc);
    json_writer_destroy(w);
}

static unsigned count(const char *text, const char *what)
{
    unsigned n = 0;

    for (const char *p = text; (p = strstr(p, what)) != NULL; p++)
        n++;
    return n;
}

Test(bench_list, the_plot_has_a_line_a_series_a_bar_a_ratio_and_no_broken_numbers)
{
    static char text[1 << 17];
    char path[] = "/tmp/kvs-bench-XXXXXX";
    int fd = mkstemp(path);
    kvs_err err = {.msg = ""};
    FILE *f;

    cr_assert(fd >= 0);
    (void)close(fd);
    cr_assert_eq(bench_svg(&list, path, &err), KVS_OK, "%s", err.msg);
    f = fopen(path, "re");
    cr_assert_not_null(f);
    cr_assert_gt(fread(text, 1, sizeof text - 1, f), 1000);
    (void)fclose(f);
    if (getenv("KVS_KEEP_SVG") == NULL)
        (void)unlink(path);
    else
        (void)printf("%s\n", path);
    cr_assert_eq(count(text, "<polyline"), 6);
    cr_assert_eq(count(text, "<circle"), 36);
    cr_assert_eq(count(text, "<rect"), 3, "the figures with a ratio and a target");
    cr_assert_not_null(strstr(text, "A card &lt;of&gt; the &amp; test"));
    cr_assert_null(strstr(text, "<of>"));
    cr_assert_null(strstr(text, "nan"));
    cr_assert_null(strstr(text, "inf\""));
    cr_assert_eq(count(text, "<text"), count(text, "</text>"));
    cr_assert_eq(bench_svg(&list, "/nonexistent/x.svg", &err), KVS_E_SYS);
    cr_assert_not_null(strstr(err.msg, "/nonexistent/x.svg"));
    cr_assert_eq(bench_svg(&list, "/dev/full", &err), KVS_E_SYS);
    cr_assert_not_null(strstr(err.msg, "No space left"), "%s", err.msg);
}

Test(bench_list, the_table_says_what_was_missed)
{
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);

    cr_assert_not_null(f);
    bench_print(&list, f);
    (void)fclose(f);
    cr_assert_eq(count(text, "MISSED"), 1);
    cr_assert_not_null(strstr(text, "quartiles"));
    free(text);
}
