/* The directory against a production trace: what a correct LRU hits is known (see the table below). */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/dir_fixture.h"

typedef struct trace {
    uint32_t *ids; /* all requests' ids, one after the other */
    size_t *start; /* [n + 1] */
    size_t n;
} trace;

static const char *trace_path(void)
{
    const char *path = getenv("KVS_TRACE");

    return path != NULL && *path != '\0' ? path : "../shared/data/conversation_trace.jsonl";
}

static void add_request(trace *t, const char *line, size_t *cap_ids)
{
    const char *p = strstr(line, "\"hash_ids\"");
    size_t at = t->start[t->n];

    cr_assert_not_null(p, "request %zu names no hash_ids", t->n);
    p = strchr(p, '[');
    cr_assert_not_null(p);
    while (*p != ']') {
        char *end;

        if (at == *cap_ids) {
            *cap_ids *= 2;
            t->ids = realloc(t->ids, *cap_ids * sizeof *t->ids);
            cr_assert_not_null(t->ids);
        }
        t->ids[at] = (uint32_t)strtoul(p + 1, &end, 10);
        if (end != p + 1)
            at++;
        p = end + strspn(end, " ");
        cr_assert(*p == ',' || *p == ']', "request %zu: odd list", t->n);
    }
    t->start[++t->n] = at;
}

static bool read_trace(trace *t)
{
    FILE *f = fopen(trace_path(), "r");
    size_t cap_ids = 1 << 19, cap = 1 << 16, size = 0;
    char *line = NULL;

    if (f == NULL)
        return false;
    *t = (trace){.ids = malloc(cap_ids * sizeof *t->ids), .start = calloc(cap, sizeof *t->start)};
    cr_assert(t->ids != NULL && t->start != NULL);
    while (getline(&line, &size, f) > 0) {
        cr_assert(t->n + 1 < cap);
        add_request(t, line, &cap_ids);
    }
    free(line);
    (void)fclose(f);
    return true;
}

static uint64_t play_request(fixture *f, const uint32_t *ids, uint32_t n)
{
    static uint8_t keys[FIXTURE_MAX_LIST][32];
    static const uint8_t none[32];
    uint32_t hits;

    cr_assert(n <= FIXTURE_MAX_LIST);
    for (uint32_t i = 0; i < n; i++)
        fixture_key((uint64_t)ids[i] + 1, keys[i]);
    hits = directory_lookup(f->dir, f->ns, keys[0], n, NULL);
    directory_hold(f->dir, f->ns, keys[0], hits, f->status, f->slot);
    for (uint32_t i = 0; i < hits; i++) {
        cr_assert_eq(f->status[i], KVS_OK, "a leading hit can be loaded");
        directory_unhold(f->dir, f->slot[i]);
    }
    if (hits == n)
        return hits;
    directory_admit(f->dir, f->ns, hits, hits > 0 ? keys[hits - 1] : none, keys[hits], n - hits, f->status, f->slot);
    for (uint32_t i = 0; i < n - hits; i++)
        if (f->status[i] == KVS_OK)
            cr_assert_eq(directory_commit(f->dir, f->slot[i], 0), KVS_OK);
    return hits;
}

static double play(const trace *t, uint32_t blocks)
{
    static fixture f;
    uint64_t hits = 0;

    fixture_init(&f, blocks, 1000);
    for (size_t i = 0; i < t->n; i++)
        hits += play_request(&f, t->ids + t->start[i], (uint32_t)(t->start[i + 1] - t->start[i]));
    cr_assert_leq(fixture_stats(&f).n_ready, blocks);
    fixture_fini(&f);
    return (double)hits / (double)t->start[t->n];
}

Test(trace, hits_as_often_as_a_correct_lru)
{
    static const struct {
        uint32_t blocks;
        double rate;
    } want[] = {{50000, 0.3546}, {30000, 0.3257}, {10000, 0.2116}, {3000, 0.0653}, {1000, 0.0445}};
    trace t;

    if (!read_trace(&t))
        cr_skip_test("no trace at %s; KVS_TRACE names another place", trace_path());
    cr_assert_eq(t.start[t.n], 288500, "this is another trace");
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        double rate = play(&t, want[i].blocks);

        cr_expect(rate > want[i].rate - 0.002 && rate < want[i].rate + 0.002, "%u blocks: %.4f, not %.4f",
                  want[i].blocks, rate, want[i].rate);
    }
    free(t.ids);
    free(t.start);
}
