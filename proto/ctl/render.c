#include "proto/ctl/render.h"

#include <stdbool.h>
#include <string.h>

#include "config/json.h"
#include "proto/text.h"

enum { INDENT = 2, CELL_BYTES = 160, JOINED_BYTES = 32, MAX_COLUMNS = 64 };

const char *render_bytes(char *buf, size_t cap, double bytes)
{
    static const char *const UNITS[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t u = 0;

    while (bytes >= 1024 && u + 1 < sizeof UNITS / sizeof *UNITS) {
        bytes /= 1024;
        u++;
    }
    (void)snprintf(buf, cap, u == 0 ? "%.0f %s" : "%.2f %s", bytes, UNITS[u]);
    return buf;
}

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), t = strlen(tail);

    return n >= t && strcmp(s + n - t, tail) == 0;
}

static bool is_leaf(const json_node *n)
{
    json_type t = json_type_of(n);

    return t != JSON_OBJECT && t != JSON_ARRAY;
}

static bool joined(char out[CELL_BYTES], const json_node *n);

/* A value in one cell. */
static void cell(char out[CELL_BYTES], const json_node *n, const char *key)
{
    int64_t whole;
    char size[32];

    out[0] = '\0';
    switch (json_type_of(n)) {
    case JSON_NULL:
        (void)snprintf(out, CELL_BYTES, "-");
        break;
    case JSON_BOOL:
        (void)snprintf(out, CELL_BYTES, "%s", json_bool(n) ? "yes" : "no");
        break;
    case JSON_NUMBER:
        if (!json_whole(n, &whole))
            (void)snprintf(out, CELL_BYTES, "%.4g", json_number(n));
        else if (ends_with(key, "bytes") && whole >= 1024)
            (void)snprintf(out, CELL_BYTES, "%lld (%s)", (long long)whole,
                           render_bytes(size, sizeof size, (double)whole));
        else
            (void)snprintf(out, CELL_BYTES, "%lld", (long long)whole);
        break;
    case JSON_STRING:
        (void)snprintf(out, CELL_BYTES, "%s", json_string(n));
        text_tame(out);
        break;
    case JSON_ARRAY:
        if (json_size(n) > 0)
            (void)snprintf(out, CELL_BYTES, "[%zu]", json_size(n));
        break;
    case JSON_OBJECT:
        if (!joined(out, n))
            (void)snprintf(out, CELL_BYTES, "{%zu}", json_size(n));
        break;
    }
}

/* An empty text is not to be taken for a value that is not there. */
static void filled_cell(char out[CELL_BYTES], const json_node *n, const char *key)
{
    cell(out, n, key);
    if (out[0] == '\0')
        (void)snprintf(out, CELL_BYTES, "-");
}

/* "mla_bf16=61,indexer_fp8=61": an object of few short values.  False: it is not one. */
static bool joined(char out[CELL_BYTES], const json_node *n)
{
    char one[CELL_BYTES];
    size_t at = 0;

    out[0] = '\0';
    for (const json_node *m = json_first(n); m != NULL; m = json_next(m)) {
        if (!is_leaf(m))
            return false;
        filled_cell(one, m, json_key(m));
        if (at + strlen(json_key(m)) + strlen(one) + 2 > JOINED_BYTES)
            return false;
        at += (size_t)snprintf(out + at, CELL_BYTES - at, "%s%s=%s", at > 0 ? "," : "", json_key(m), one);
    }
    return true;
}

static void pad(FILE *to, int n)
{
    (void)fprintf(to, "%*s", n, "");
}

static void object(FILE *to, const json_node *n, int indent);

static bool is_table(const json_node *n)
{
    return json_type_of(n) == JSON_ARRAY && json_first(n) != NULL && json_type_of(json_first(n)) == JSON_OBJECT;
}

static void column_text(char out[CELL_BYTES], const json_node *row, const char *key)
{
    const json_node *v = row != NULL && json_type_of(row) == JSON_OBJECT ? json_member(row, key) : NULL;

    out[0] = '\0';
    if (v != NULL)
        filled_cell(out, v, key);
}

/* Some row has an object there that is no cell. */
static bool is_wide(const json_node *rows, const char *key)
{
    char text[CELL_BYTES];

    for (const json_node *row = json_first(rows); row != NULL; row = json_next(row)) {
        const json_node *v = json_member(row, key);

        if (v != NULL && json_type_of(v) == JSON_OBJECT && !joined(text, v))
            return true;
    }
    return false;
}

/* Of one array of objects or, with `sub`, of that member of each, behind the row's first column. */
typedef struct grid {
    const json_node *rows;
    const char *sub; /* NULL: the rows themselves */
    const char *keys[MAX_COLUMNS];
    size_t width[MAX_COLUMNS], n;
} grid;

static void grid_add(grid *g, const char *key)
{
    for (size_t i = 0; i < g->n; i++)
        if (strcmp(g->keys[i], key) == 0)
            return;
    if (g->n == MAX_COLUMNS)
        return;
    g->keys[g->n] = key;
    g->width[g->n++] = strlen(key);
}

static void grid_text(char out[CELL_BYTES], const grid *g, const json_node *row, size_t i)
{
    column_text(out, g->sub != NULL && i > 0 ? json_member(row, g->sub) : row, g->keys[i]);
}

/* Columns are the keys of the first row, of which every row of one answer has the same; with `sub` those of all rows. */
static void grid_open(grid *g, const json_node *rows, const char *sub)
{
    const json_node *row = json_first(rows), *part;
    char text[CELL_BYTES];

    *g = (grid){.rows = rows, .sub = sub};
    if (sub != NULL)
        grid_add(g, json_key(json_first(row)));
    for (const json_node *m = sub == NULL ? json_first(row) : NULL; m != NULL; m = json_next(m))
        if (!is_wide(rows, json_key(m)))
            grid_add(g, json_key(m));
    for (const json_node *r = sub != NULL ? row : NULL; r != NULL; r = json_next(r))
        if ((part = json_member(r, sub)) != NULL && json_type_of(part) == JSON_OBJECT)
            for (const json_node *m = json_first(part); m != NULL; m = json_next(m))
                grid_add(g, json_key(m));
    for (; row != NULL; row = json_next(row))
        for (size_t i = 0; i < g->n; i++) {
            grid_text(text, g, row, i);
            g->width[i] = strlen(text) > g->width[i] ? strlen(text) : g->width[i];
        }
}

static void grid_cell(FILE *to, const grid *g, size_t i, const char *text)
{
    (void)fprintf(to, "%-*s%s", i + 1 < g->n ? (int)g->width[i] : 0, text, i + 1 < g->n ? "  " : "\n");
}

static void grid_print(FILE *to, const grid *g, int indent)
{
    char text[CELL_BYTES];

    pad(to, indent);
    for (size_t i = 0; i < g->n; i++)
        grid_cell(to, g, i, g->keys[i]);
    for (const json_node *row = json_first(g->rows); row != NULL; row = json_next(row)) {
        pad(to, indent);
        for (size_t i = 0; i < g->n; i++) {
            grid_text(text, g, row, i);
            grid_cell(to, g, i, text);
        }
    }
}

/* Objects in the rows that are too much for a cell follow, a table each. */
static void table(FILE *to, const json_node *rows, int indent)
{
    grid g;

    grid_open(&g, rows, NULL);
    if (g.n > 0)
        grid_print(to, &g, indent);
    for (const json_node *m = json_first(json_first(rows)); m != NULL; m = json_next(m)) {
        if (json_type_of(m) != JSON_OBJECT || !is_wide(rows, json_key(m)))
            continue;
        pad(to, indent);
        (void)fprintf(to, "%s\n", json_key(m));
        grid_open(&g, rows, json_key(m));
        grid_print(to, &g, indent + INDENT);
    }
}

static void member(FILE *to, const json_node *m, int indent, size_t width, bool of_bytes)
{
    const char *key = json_key(m);
    char text[CELL_BYTES];

    pad(to, indent);
    if (is_leaf(m)) {
        filled_cell(text, m, of_bytes && json_type_of(m) == JSON_NUMBER ? "bytes" : key);
        (void)fprintf(to, "%-*s  %s\n", (int)width, key, text);
    } else if (json_type_of(m) == JSON_OBJECT) {
        (void)fprintf(to, "%s\n", key);
        object(to, m, indent + INDENT);
    } else if (is_table(m)) {
        (void)fprintf(to, "%s\n", key);
        table(to, m, indent + INDENT);
    } else {
        (void)fprintf(to, "%-*s  %s", (int)width, key, json_first(m) == NULL ? "none" : "");
        for (const json_node *i = json_first(m); i != NULL; i = json_next(i)) {
            cell(text, i, key);
            (void)fprintf(to, "%s%s", text, json_next(i) != NULL ? " " : "");
        }
        (void)fprintf(to, "\n");
    }
}

static bool is_one_line(const json_node *m)
{
    return json_type_of(m) != JSON_OBJECT && !is_table(m);
}

/* "pool_bytes": {"arena": n}: what holds for the object's name holds for its members. */
static void object(FILE *to, const json_node *n, int indent)
{
    size_t width = 0;

    for (const json_node *m = json_first(n); m != NULL; m = json_next(m))
        if (is_one_line(m) && strlen(json_key(m)) > width)
            width = strlen(json_key(m));
    for (const json_node *m = json_first(n); m != NULL; m = json_next(m))
        member(to, m, indent, width, json_key(n) != NULL && ends_with(json_key(n), "bytes"));
}

kvs_status render_json(FILE *to, const char *text, size_t len, kvs_err *err)
{
    json *doc = NULL;
    kvs_status s = json_parse(text, len, &doc, err);
    char one[CELL_BYTES];

    if (s != KVS_OK)
        return s;
    if (json_type_of(json_root(doc)) == JSON_OBJECT) {
        object(to, json_root(doc), 0);
    } else if (is_table(json_root(doc))) {
        table(to, json_root(doc), 0);
    } else {
        filled_cell(one, json_root(doc), "");
        (void)fprintf(to, "%s\n", one);
    }
    json_destroy(doc);
    return KVS_OK;
}
