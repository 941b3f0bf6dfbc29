#include "daemon/metrics.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/metrics_text.h"
#include "tests/support/prom.h"

/* ---- histograms ---- */

Test(histogram, puts_the_end_of_a_bucket_into_it_and_one_more_into_the_next)
{
    for (uint32_t i = 0; i < METRICS_BUCKETS; i++) {
        histogram h = {0};
        uint64_t end_ns = histogram_end_us(i) * 1000;

        histogram_add(&h, end_ns);
        histogram_add(&h, end_ns + 1);
        cr_assert_eq(h.n[i], 1, "bucket %u", i);
        cr_assert_eq(h.n[i + 1], 1, "bucket %u", i + 1);
        cr_assert_eq(h.sum_ns, 2 * end_ns + 1);
        cr_assert_eq(histogram_count(&h), 2);
    }
}

Test(histogram, takes_the_shortest_and_the_longest_time)
{
    histogram h = {0};

    histogram_add(&h, 0);
    histogram_add(&h, 1);
    histogram_add(&h, UINT64_MAX / 2);
    cr_assert_eq(h.n[0], 2);
    cr_assert_eq(h.n[METRICS_BUCKETS], 1);
}

Test(histogram, tells_the_bucket_of_a_percentile)
{
    histogram h = {0};

    cr_assert_eq(histogram_percentile_us(&h, 50), 0);
    for (int i = 0; i < 99; i++)
        histogram_add(&h, 3000);
    histogram_add(&h, 900000);
    cr_assert_eq(histogram_percentile_us(&h, 50), 4);
    cr_assert_eq(histogram_percentile_us(&h, 99), 4);
    cr_assert_eq(histogram_percentile_us(&h, 99.9), 1024);
    histogram_add(&h, UINT64_C(60000000000));
    cr_assert_eq(histogram_percentile_us(&h, 100), UINT64_MAX);
}

/* ---- counts ---- */

Test(counts, of_requests_add_up_for_any_op_and_status)
{
    metrics_snapshot *s = calloc(1, sizeof *s);
    uint64_t n = 0;

    for (uint32_t op = 0; op < 70000; op += op < 40 ? 1 : 9973)
        for (uint32_t st = 0; st < 30; st++, n++) {
            metrics_received(&s->counts);
            metrics_answered(&s->counts, (uint16_t)op, (kvs_status)st, n);
        }
    metrics_received(&s->counts);
    metrics_check(s);
    cr_assert_eq(s->counts.answered, n);
    cr_assert_eq(s->counts.in_flight, 1);
    cr_assert_eq(s->error[METRICS_RULE_REQUESTS], 0);
    cr_assert_eq(s->error[METRICS_RULE_REPLIES], 0);
    cr_assert_eq(s->error[METRICS_RULE_LATENCY], 0);
    s->counts.by[WIRE_LOAD][KVS_OK]++;
    s->counts.received += 2;
    metrics_check(s);
    cr_assert_eq(s->error[METRICS_RULE_REPLIES], 1);
    cr_assert_eq(s->error[METRICS_RULE_REQUESTS], 2);
    free(s);
}

Test(counts, of_names_that_do_not_fit_are_other)
{
    static char names[40][8];
    metrics_names m = {0};
    uint64_t sum = 0;

    for (int i = 0; i < 40; i++) {
        (void)snprintf(names[i], sizeof names[i], "n%d", i);
        metrics_count(&m, names[i], 1);
        metrics_count(&m, "n0", 1);
    }
    for (int i = 0; i < METRICS_NAMES; i++)
        sum += m.of[i].n;
    cr_assert_eq(sum, 80);
    cr_assert_eq(m.of[0].n, 41);
    cr_assert_str_eq(m.of[METRICS_NAMES - 1].name, "other");
    cr_assert_eq(m.of[METRICS_NAMES - 1].n, 40 - (METRICS_NAMES - 1));
}

Test(counts, that_do_not_agree_are_told_and_do_not_cancel_out)
{
    metrics_snapshot *s = calloc(1, sizeof *s);

    s->n_tenants = 2;
    s->tenants[0].counts.hits = 3;
    s->dir.misses = 3; /* as many too few as too many */
    s->dir.stored = 10;
    s->dir.evicted = 2;
    s->dir.n_ready = 7;
    s->pool.arena = 100;
    s->pool.free = 90;
    metrics_check(s);
    cr_assert_geq(s->error[METRICS_RULE_TENANTS], 6);
    cr_assert_eq(s->error[METRICS_RULE_RESIDENT], 1);
    cr_assert_eq(s->error[METRICS_RULE_ARENA], -10);
    cr_assert_eq(s->error[METRICS_RULE_LAYOUTS], 90);
    cr_assert_eq(s->error[METRICS_RULE_LOOKUPS], -3);
    free(s);
}

/* ---- text ---- */

static metrics_snapshot *filled(void)
{
    metrics_snapshot *s = calloc(1, sizeof *s);

    cr_assert_not_null(s);
    metrics_edge_init(&s->edge);
    (void)snprintf(s->device, sizeof s->device, "cpu");
    s->n_devices = 1;
    (void)snprintf(s->devices[0].name, sizeof s->devices[0].name, "cpu");
    s->n_tenants = 1;
    (void)snprintf(s->tenants[0].name, METRICS_NAME_BYTES, "default");
    return s;
}

static char *text_of(const metrics_snapshot *s)
{
    char *text = NULL;
    size_t len;

    cr_assert_eq(metrics_text(s, &text, &len), KVS_OK);
    cr_assert_eq(strlen(text), len);
    return text;
}

static void expect_sample(const prom *p, const char *name, const char *labels, double value)
{
    for (size_t i = 0; i < p->n; i++)
        if (strcmp(p->samples[i].name, name) == 0 && strcmp(p->samples[i].labels, labels) == 0) {
            cr_assert_float_eq(p->samples[i].value, value, 1e-9, "%s{%s} is %f", name, labels, p->samples[i].value);
            return;
        }
    cr_assert(false, "no %s{%s}", name, labels);
}

Test(text, is_what_it_has_been)
{
    static const char *const LINES[] = {
        "# HELP kvstride_requests_in_flight Requests without an answer so far.\n"
        "# TYPE kvstride_requests_in_flight gauge\n"
        "kvstride_requests_in_flight 3\n",
        "# TYPE kvstride_transfer_seconds_total counter\n"
        "kvstride_transfer_seconds_total{direction=\"load\",path=\"daemon_region\",device=\"cpu\"} 1.500000\n",
        "kvstride_request_duration_seconds_bucket{class=\"load\",le=\"0.000001\"} 0\n"
        "kvstride_request_duration_seconds_bucket{class=\"load\",le=\"0.000002\"} 1\n",
        "kvstride_request_duration_seconds_bucket{class=\"load\",le=\"16.777216\"} 1\n"
        "kvstride_request_duration_seconds_bucket{class=\"load\",le=\"+Inf\"} 1\n"
        "kvstride_request_duration_seconds_sum{class=\"load\"} 0.000001500\n"
        "kvstride_request_duration_seconds_count{class=\"load\"} 1\n",
        "\nkvstride_requests_total{op=\"LOAD\",status=\"OK\"} 0\n"
        "kvstride_requests_total{op=\"LOAD\",status=\"E_CORRUPT\"} 1\n",
        "\nkvstride_conservation_error{rule=\"arena\"} -5\n",
        "\nkvstride_blocks_stored_total{tenant=\"default\"} 18446744073709551615\n",
    };
    metrics_snapshot *s = filled();
    char *text;

    s->counts.in_flight = 4;
    metrics_answered(&s->counts, WIRE_LOAD, KVS_E_CORRUPT, 1500);
    s->devices[0].work.load.path[MOVER_DAEMON_REGION].busy_us = 1500000;
    s->error[METRICS_RULE_ARENA] = -5;
    s->tenants[0].counts.stored = UINT64_MAX;
    text = text_of(s);
    for (size_t i = 0; i < sizeof LINES / sizeof LINES[0]; i++)
        cr_assert_not_null(strstr(text, LINES[i]), "missing: %s", LINES[i]);
    free(text);
    free(s);
}

Test(text, of_nothing_is_valid_and_has_no_number_that_is_none)
{
    metrics_snapshot *s = filled();
    char *text = text_of(s);
    prom p;

    cr_assert(prom_parse(&p, text), "%s", p.why);
    cr_assert_gt(p.n, 200);
    cr_assert_null(strstr(text, " nan"));
    cr_assert_null(strstr(text, " NaN"));
    prom_free(&p);
    free(text);
    free(s);
}

Test(text, escapes_quotes_backslashes_newlines_and_bytes_that_are_no_text)
{
    static const struct {
        const char *name, *written;
    } ROWS[] = {
        {"a\"b", "a\\\"b"},
        {"a\\b", "a\\\\b"},
        {"a\nb", "a\\nb"},
        {"{,}= #", "{,}= #"},
        {"", ""},
        {"\xF0\x9F\x98\x80 \xC3\xA4", "\xF0\x9F\x98\x80 \xC3\xA4"},
        {"\xFF\xC3", "\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\xED\xA0\x80", "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"},
        {"\\\"\n\\", "\\\\\\\"\\n\\\\"},
    };

    for (size_t i = 0; i < sizeof ROWS / sizeof ROWS[0]; i++) {
        metrics_snapshot *s = filled();
        char *text, labels[128];
        json_writer *w = json_writer_create();
        json *doc = NULL;
        const char *made;
        kvs_err err;
        size_t len;
        prom p;

        (void)snprintf(s->tenants[0].name, METRICS_NAME_BYTES, "%s", ROWS[i].name);
        s->tenants[0].counts.hits = 42;
        text = text_of(s);
        cr_assert(prom_parse(&p, text), "row %zu: %s", i, p.why);
        (void)snprintf(labels, sizeof labels, "tenant=\"%s\"", ROWS[i].written);
        expect_sample(&p, "kvstride_lookup_hits_total", labels, 42);
        metrics_json(s, w);
        made = json_text(w, &len);
        cr_assert_not_null(made);
        cr_assert_eq(json_parse(made, len, &doc, &err), KVS_OK, "row %zu: %s", i, err.msg);
        json_destroy(doc);
        json_writer_destroy(w);
        prom_free(&p);
        free(text);
        free(s);
    }
}

Test(text, grows_with_tenants_and_layouts_up_to_a_limit)
{
    metrics_snapshot *s = filled();
    char *text;
    prom p;

    s->n_tenants = METRICS_TENANTS + 1;
    s->n_layouts = METRICS_LAYOUTS + 1;
    for (uint32_t i = 0; i <= METRICS_TENANTS; i++)
        (void)snprintf(s->tenants[i].name, METRICS_NAME_BYTES, i == METRICS_TENANTS ? "other" : "tenant-%u", i);
    for (uint32_t i = 0; i <= METRICS_LAYOUTS; i++)
        s->layouts[i].id = i == METRICS_LAYOUTS ? POOL_NONE : i;
    for (uint32_t op = 0; op < METRICS_OPS; op++)
        for (uint32_t st = 0; st < METRICS_STATUSES; st++)
            s->counts.by[op][st] = UINT64_MAX;
    text = text_of(s);
    cr_assert(prom_parse(&p, text), "%s", p.why);
    expect_sample(&p, "kvstride_layout_slots", "layout=\"other\",state=\"ready\"", 0);
    cr_assert_leq(p.n, 3000);
    cr_assert_leq(p.bytes, 300000);
    prom_free(&p);
    free(text);
    free(s);
}

Test(json, says_what_the_text_says)
{
    metrics_snapshot *s = filled();
    json_writer *w = json_writer_create();
    char *text = text_of(s);
    const char *made;
    json *doc = NULL;
    size_t len, n = 0;
    prom p;

    cr_assert(prom_parse(&p, text), "%s", p.why);
    metrics_json(s, w);
    made = json_text(w, &len);
    cr_assert_eq(json_parse(made, len, &doc, NULL), KVS_OK);
    for (const json_node *f = json_first(json_member(json_root(doc), "families")); f != NULL; f = json_next(f))
        for (const json_node *x = json_first(json_member(f, "samples")); x != NULL; x = json_next(x)) {
            const json_node *suffix = json_member(x, "suffix");
            char name[160];

            (void)snprintf(name, sizeof name, "%s%s", json_string(json_member(f, "name")),
                           suffix != NULL ? json_string(suffix) : "");
            cr_assert_lt(n, p.n);
            cr_assert_str_eq(name, p.samples[n].name);
            cr_assert_float_eq(json_number(json_member(x, "value")), p.samples[n].value, 1e-9, "%s", name);
            n++;
        }
    cr_assert_eq(n, p.n);
    json_destroy(doc);
    json_writer_destroy(w);
    prom_free(&p);
    free(text);
    free(s);
}

Test(page, shows_names_as_text_and_needs_nothing_from_elsewhere)
{
    metrics_snapshot *s = filled();
    char *page = NULL;
    size_t len;

    (void)snprintf(s->tenants[0].name, METRICS_NAME_BYTES, "<script>&\"\x01");
    cr_assert_eq(metrics_page(s, &page, &len), KVS_OK);
    cr_assert_not_null(strstr(page, "&#60;script&#62;&#38;&#34;?"));
    cr_assert_null(strstr(page, "<script"));
    cr_assert_null(strstr(page, "http:"));
    cr_assert_null(strstr(page, "https:"));
    cr_assert_null(strstr(page, ">nan"));
    cr_assert_not_null(strstr(page, "all sums agree"));
    free(page);
    s->error[METRICS_RULE_LOOKUPS] = 1;
    cr_assert_eq(metrics_page(s, &page, &len), KVS_OK);
    cr_assert_not_null(strstr(page, "sums do not agree"));
    free(page);
    free(s);
}

/* ---- the strict reader itself ---- */

Test(reader, refuses_what_a_scraper_would_refuse)
{
    static const char *const BAD[] = {
        "",
        "a 1\n",                                                                           /* no TYPE */
        "# HELP a x\n# TYPE a gauge\na 1",                                                 /* no end of line */
        "# HELP a x\n# TYPE a gauge\na nan\n",                                             /* not a number */
        "# HELP a x\n# TYPE a gauge\na{b=\"c\"d\"} 1\n",                                   /* a quote */
        "# HELP a x\n# TYPE a gauge\na{b=\"c\\d\"} 1\n",                                   /* an escape that is none */
        "# HELP a x\n# TYPE a gauge\na{b=\"c\nd\"} 1\n",                                   /* a newline */
        "# HELP a x\n# TYPE a gauge\na{b=\"\xFF\"} 1\n",                                   /* no UTF-8 */
        "# HELP a x\n# TYPE a gauge\na 1\na 2\n",                                          /* twice */
        "# HELP a x\n# TYPE a counter\na 1\n",                                             /* a counter's name */
        "# HELP a x\n# TYPE a gauge\na 1\n# HELP b x\n# TYPE b gauge\nb 1\na{x=\"\"} 1\n", /* in two pieces */
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\na_count 1\n",
        "# HELP a x\n# TYPE a histogram\na_bucket{le=\"+Inf\"} 1\na_count 2\n",
    };
    prom p;

    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        cr_assert_not(prom_parse(&p, BAD[i]), "%s", BAD[i]);
        prom_free(&p);
    }
    cr_assert(prom_parse(&p, "# HELP a x\n# TYPE a gauge\na{b=\"c\\\"\\\\\\n\"} 1\n"), "%s", p.why);
    prom_free(&p);
}
