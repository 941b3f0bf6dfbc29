/* Commands over the blocks of a running daemon: ls, watch, drop, reset. */
#include "proto/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/json.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/render.h"
#include "proto/layout.h"
#include "proto/text.h"

enum { PAGE_KEYS = 4096, DROP_KEYS = 1024, EVENTS = 64, WATCH_STEP_MS = 200, RESET_MS = 60000 };

/* ---- ls ---- */

typedef struct listing {
    const ctl *c;
    uint64_t shown, left; /* left: how many may still be shown */
    bool more;            /* one that may not was seen */
} listing;

static const char *text_of(const json_node *row, const char *key)
{
    const json_node *m = json_member(row, key);

    return m != NULL && json_type_of(m) == JSON_STRING ? json_string(m) : "?";
}

static int64_t number_of(const json_node *row, const char *key)
{
    const json_node *m = json_member(row, key);
    int64_t v = 0;

    return m != NULL && json_whole(m, &v) ? v : 0;
}

static bool flag_of(const json_node *row, const char *key)
{
    const json_node *m = json_member(row, key);

    return m != NULL && json_type_of(m) == JSON_BOOL && json_bool(m);
}

/* The daemon's row as it is: a new member shows by itself. */
static kvs_status put_row(const json_node *row, const char *before, kvs_err *err)
{
    json_writer *w = json_writer_create();
    const char *text;

    json_begin_object(w, NULL);
    for (const json_node *m = json_first(row); m != NULL; m = json_next(m)) {
        const char *key = json_key(m);

        if (json_type_of(m) == JSON_STRING)
            json_put_string(w, key, json_string(m));
        else if (json_type_of(m) == JSON_BOOL)
            json_put_bool(w, key, json_bool(m));
        else if (json_type_of(m) == JSON_NUMBER)
            json_put_i64(w, key, number_of(row, key));
    }
    json_end(w);
    text = json_text(w, NULL);
    if (text != NULL)
        (void)printf("%s%s", before, text);
    json_writer_destroy(w);
    return text != NULL ? KVS_OK : kvs_fail(err, KVS_E_NO_MEMORY, "no memory for a line");
}

/* Once, above the first row: a listing that was refused has none. */
static void show_titles(const listing *l)
{
    if (l->shown == 0)
        (void)printf("%-64s  %5s  %6s  %-11s  %5s  %6s  %s\n", "key", "ns", "depth", "state", "holds", "leases",
                     "pinned");
}

static kvs_status show_row(listing *l, const json_node *row, kvs_err *err)
{
    kvs_status s = KVS_OK;

    if (l->left == 0) {
        l->more = true;
        return KVS_OK;
    }
    if (!l->c->json)
        show_titles(l);
    if (l->c->json) /* brackets and commas by hand: a pool may hold millions, one line is in memory at a time */
        s = put_row(row, l->shown > 0 ? ",\n" : "[", err);
    else
        (void)printf("%-64s  %5" PRId64 "  %6" PRId64 "  %-11s  %5" PRId64 "  %6" PRId64 "  %s\n", text_of(row, "key"),
                     number_of(row, "ns"), number_of(row, "depth"), text_of(row, "state"), number_of(row, "holds"),
                     number_of(row, "leases"), flag_of(row, "pinned") ? "yes" : "no");
    l->shown++;
    l->left--;
    return s;
}

/* Show one page; *cursor becomes where the next one starts, UINT64_MAX at the end. */
static kvs_status show_page(listing *l, kvs_client *client, uint64_t *cursor, kvs_err *err)
{
    kvs_report_args a = {.section = KVS_SECTION_KEYS, .cursor = *cursor};
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;
    const json_node *keys, *next;
    kvs_status s;

    a.ns = l->c->ns == CTL_NO_NS ? KVS_ALL : (uint32_t)l->c->ns;
    a.limit = l->left < PAGE_KEYS ? (uint32_t)l->left + 1 : PAGE_KEYS; /* one more tells whether there are more */
    s = kvs_report_alloc(client, &a, &text, &len, 0, err);
    if (s == KVS_OK && json_parse(text, len, &doc, err) != KVS_OK)
        s = KVS_E_PROTO;
    kvs_free(text);
    if (s != KVS_OK)
        return s;
    keys = json_type_of(json_root(doc)) == JSON_OBJECT ? json_member(json_root(doc), "keys") : NULL;
    next = keys != NULL ? json_member(json_root(doc), "next") : NULL;
    *cursor =
        next != NULL && json_type_of(next) == JSON_NUMBER ? (uint64_t)number_of(json_root(doc), "next") : UINT64_MAX;
    if (keys == NULL || json_type_of(keys) != JSON_ARRAY)
        s = kvs_fail(err, KVS_E_PROTO, "the daemon's answer has no list of keys");
    for (const json_node *k = s == KVS_OK ? json_first(keys) : NULL; k != NULL && s == KVS_OK && !l->more;
         k = json_next(k))
        s = show_row(l, k, err);
    json_destroy(doc);
    return s;
}

int ctl_ls(const ctl *c)
{
    listing l = {.c = c, .left = c->limit != 0 ? c->limit : UINT64_MAX};
    ctl plain = *c;
    uint64_t cursor = 0;
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    do
        s = show_page(&l, client, &cursor, &err);
    while (s == KVS_OK && cursor != UINT64_MAX && !l.more && !ferror(stdout));
    if (c->json && (s == KVS_OK || l.shown > 0))
        (void)printf("%s]\n", l.shown == 0 ? "[" : "");
    if (!c->json && s == KVS_OK && l.shown == 0)
        (void)printf("none\n");
    plain.json = c->json && l.shown == 0; /* a list that has begun is the document */
    if (s != KVS_OK)
        code = ctl_fail(&plain, "ls", s, &err);
    else if (l.more)
        (void)fprintf(stderr, "kvstridectl: the first %" PRIu64 " only; --limit 0 shows all\n", l.shown);
    kvs_close(client);
    return code;
}

/* ---- watch ---- */

static const char *hex_of(char out[2 * KVS_KEY_BYTES + 1], const uint8_t key[KVS_KEY_BYTES])
{
    for (int i = 0; i < KVS_KEY_BYTES; i++)
        (void)snprintf(out + 2 * i, 3, "%02x", key[i]);
    return out;
}

static int show_event(const ctl *c, const kvs_event *e)
{
    static const char *const TYPES[] = {"stored", "removed", "reset"};
    static const char *const CAUSES[] = {"", "evicted", "dropped", "rebound"};
    const char *type = e->type < 3 ? TYPES[e->type] : "?", *cause = e->cause < 4 ? CAUSES[e->cause] : "?";
    char hex[2 * KVS_KEY_BYTES + 1];
    json_writer *w;

    if (!c->json) {
        (void)printf("%-8s %-8s ns %-4" PRIu32 " depth %-6" PRIu32 " %s\n", type, cause, e->ns, e->depth,
                     hex_of(hex, e->key));
        return CTL_OK;
    }
    w = json_writer_create();
    json_begin_object(w, NULL);
    json_put_string(w, "event", type);
    json_put_string(w, "cause", cause);
    json_put_u64(w, "ns", e->ns);
    json_put_u64(w, "depth", e->depth);
    json_put_hex(w, "key", e->key, sizeof e->key);
    json_end(w);
    return ctl_put(w, CTL_OK);
}

int ctl_watch(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    uint64_t until = c->seconds != 0 ? clock_ns() + c->seconds * 1000000000u : UINT64_MAX, lost;
    kvs_event events[EVENTS];
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_watch(client, 7, 0, &err);
    if (s == KVS_OK && !c->quiet)
        (void)fprintf(stderr, "kvstridectl: watching\n");
    while (s == KVS_OK && code == CTL_OK && clock_ns() < until && !ctl_reader_gone()) {
        uint32_t n = 0;

        s = kvs_events(client, events, EVENTS, &n, &lost, WATCH_STEP_MS, &err);
        s = s == KVS_E_DEADLINE ? KVS_OK : s;
        for (uint32_t i = 0; i < n && code == CTL_OK; i++)
            code = show_event(c, &events[i]);
        if (s == KVS_OK && lost != 0)
            (void)fprintf(stderr, "kvstridectl: %" PRIu64 " events or more were lost\n", lost);
        if (fflush(stdout) != 0)
            break;
    }
    if (s != KVS_OK)
        code = ctl_fail(c, "watch", s, &err);
    kvs_close(client);
    return code;
}

/* ---- drop ---- */

/* 64 hex digits. */
static bool key_of(const char *text, uint8_t ret[KVS_KEY_BYTES])
{
    if (strlen(text) != 2 * KVS_KEY_BYTES || strspn(text, "0123456789abcdefABCDEF") != 2 * KVS_KEY_BYTES)
        return false;
    for (int i = 0; i < KVS_KEY_BYTES; i++) {
        char two[3] = {text[2 * i], text[2 * i + 1], '\0'};

        ret[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    return true;
}

static kvs_status drop_all(kvs_client *client, const ctl *c, const uint8_t *keys, kvs_status *results, kvs_err *err)
{
    uint32_t n = (uint32_t)c->n_args;
    kvs_ns *ns = NULL;
    kvs_status s = kvs_open_id(client, (uint32_t)c->ns, &ns, err);

    for (uint32_t i = 0; i < n && s == KVS_OK; i += DROP_KEYS) {
        s = kvs_drop(ns, keys + (size_t)i * KVS_KEY_BYTES, n - i < DROP_KEYS ? n - i : DROP_KEYS, results + i, 0, err);
        s = s == KVS_E_PARTIAL ? KVS_OK : s;
    }
    return s;
}

static const char *drop_text(kvs_status s)
{
    return s == KVS_OK ? "dropped" : s == KVS_E_BUSY ? "kept: leased or pinned" : kvs_status_text(s);
}

static int show_dropped(const ctl *c, const kvs_status *results)
{
    json_writer *w = c->json ? json_writer_create() : NULL;
    int code = CTL_OK;

    if (c->json)
        json_begin_array(w, NULL);
    for (int i = 0; i < c->n_args; i++) {
        if (results[i] != KVS_OK)
            code = CTL_REFUSED;
        if (!c->json) {
            (void)printf("%s  %s\n", c->args[i], drop_text(results[i]));
            continue;
        }
        json_begin_object(w, NULL);
        json_put_string(w, "key", c->args[i]);
        json_put_string(w, "status", kvs_status_name(results[i]));
        json_end(w);
    }
    if (!c->json)
        return code;
    json_end(w);
    return ctl_put(w, code);
}

int ctl_drop(const ctl *c)
{
    uint8_t *keys;
    kvs_status *results, s;
    int code = CTL_OK;
    kvs_client *client = NULL;
    kvs_err err = {0};

    if (c->ns == CTL_NO_NS || c->n_args == 0)
        return ctl_usage("drop needs --ns N and at least one key (see 'ls')");
    keys = malloc((size_t)c->n_args * KVS_KEY_BYTES);
    results = calloc((size_t)c->n_args, sizeof *results);
    if (keys == NULL || results == NULL) {
        code = ctl_fail(c, "drop", KVS_E_NO_MEMORY, NULL);
        goto end;
    }
    for (int i = 0; i < c->n_args; i++)
        if (!key_of(c->args[i], keys + (size_t)i * KVS_KEY_BYTES)) {
            code = ctl_usage("'%.80s' is not a key of 64 hex digits", c->args[i]);
            goto end;
        }
    client = ctl_connect(c, &code);
    if (client == NULL)
        goto end;
    s = drop_all(client, c, keys, results, &err);
    code = s == KVS_OK ? show_dropped(c, results) : ctl_fail(c, "drop", s, &err);
end:
    kvs_close(client);
    free(keys);
    free(results);
    return code;
}

/* ---- reset ---- */

/* The list of namespaces, and in it the one with that number; NULL if there is none.  *ret_doc is the caller's. */
static const json_node *find_ns(kvs_client *client, uint64_t number, json **ret_doc)
{
    kvs_report_args a = {.section = KVS_SECTION_NAMESPACES, .ns = KVS_ALL};
    const json_node *list, *row = NULL;
    char *text = NULL;
    size_t len = 0;

    if (kvs_report_alloc(client, &a, &text, &len, 0, NULL) == KVS_OK &&
        json_parse(text, len, ret_doc, NULL) == KVS_OK) {
        list = json_member(json_root(*ret_doc), "namespaces");
        row = list != NULL && json_type_of(list) == JSON_ARRAY ? json_first(list) : NULL;
    }
    while (row != NULL && number_of(row, "ns") != (int64_t)number)
        row = json_next(row);
    kvs_free(text);
    return row;
}

/* Numbers are given anew in each life of a daemon: say whose blocks they were. */
static int show_reset(const ctl *c, const json_node *ns, const kvs_reset_result *r)
{
    int code = r->kept == 0 ? CTL_OK : CTL_REFUSED;
    json_writer *w;

    if (!c->json) {
        char tenant[KVS_TAG_BYTES], model[KVS_TAG_BYTES];

        (void)snprintf(tenant, sizeof tenant, "%s", ns != NULL ? text_of(ns, "tenant") : "");
        (void)snprintf(model, sizeof model, "%s", ns != NULL ? text_of(ns, "model") : "");
        text_tame(tenant);
        text_tame(model);
        if (ns != NULL)
            (void)printf("namespace %" PRIu64 ", tenant %s, model %s: ", c->ns, tenant, model);
        (void)printf("dropped %" PRIu64 ", aborted %" PRIu64 " being written, ended %" PRIu64 " leases, kept %" PRIu64
                     " pinned%s\n",
                     r->dropped, r->aborted, r->leases, r->kept, r->kept ? " (--pinned drops them too)" : "");
        return code;
    }
    w = json_writer_create();
    json_begin_object(w, NULL);
    if (ns != NULL) {
        json_put_u64(w, "ns", c->ns);
        json_put_string(w, "tenant", text_of(ns, "tenant"));
        json_put_string(w, "model", text_of(ns, "model"));
    }
    json_put_u64(w, "dropped", r->dropped);
    json_put_u64(w, "aborted", r->aborted);
    json_put_u64(w, "kept", r->kept);
    json_put_u64(w, "leases", r->leases);
    json_end(w);
    return ctl_put(w, code);
}

int ctl_reset(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    kvs_ns *ns = NULL;
    const json_node *row = NULL;
    json *doc = NULL;
    kvs_reset_result r = {0};
    kvs_err err = {0};
    kvs_status s = KVS_OK;

    if (client == NULL)
        return code;
    if (c->ns != CTL_NO_NS) {
        row = find_ns(client, c->ns, &doc);
        s = kvs_open_id(client, (uint32_t)c->ns, &ns, &err);
    }
    if (s == KVS_OK)
        s = kvs_reset(client, ns, c->pinned ? KVS_RESET_PINNED : 0, &r,
                      c->timeout_ms != 0 ? (uint32_t)c->timeout_ms : RESET_MS, &err);
    code = s == KVS_OK || s == KVS_E_PARTIAL ? show_reset(c, row, &r) : ctl_fail(c, "reset", s, &err);
    json_destroy(doc);
    kvs_close(client);
    return code;
}
