/* Commands that show and change a running daemon. */
#include "proto/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/json.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/render.h"

int ctl_fail(const ctl *c, const char *what, kvs_status s, const kvs_err *err)
{
    const char *why = err != NULL && err->msg[0] != '\0' ? err->msg : kvs_status_text(s);
    int code = CTL_REFUSED;

    if (s == KVS_E_AWAY || s == KVS_E_DEADLINE || s == KVS_E_BUSY || s == KVS_E_SYS || s == KVS_E_VERSION ||
        s == KVS_E_PROTO)
        code = CTL_UNREACHABLE;
    else if (s == KVS_E_CONFIG || s == KVS_E_INVALID)
        code = CTL_USAGE;
    if (c->json) {
        json_writer *w = json_writer_create();

        json_begin_object(w, NULL);
        json_put_string(w, "error", why);
        json_put_string(w, "status", kvs_status_name(s));
        json_put_string(w, "what", what);
        json_end(w);
        if (json_text(w, NULL) != NULL)
            (void)printf("%s\n", json_text(w, NULL));
        json_writer_destroy(w);
    }
    (void)fprintf(stderr, "kvstridectl: %s: %s\n", what, why);
    return code;
}

kvs_client *ctl_connect(const ctl *c, const char *fallback, int *ret_exit)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *client = NULL;
    kvs_err err = {0};
    kvs_status s;

    o.path = c->socket != NULL ? c->socket : fallback;
    if (o.path == NULL)
        o.path = getenv("KVSTRIDE_ADMIN_SOCKET");
    if (o.path == NULL)
        o.path = CTL_ADMIN_SOCKET;
    o.name = "kvstridectl";
    o.timeout_ms = c->timeout_ms;
    o.connect_timeout_ms = c->timeout_ms;
    s = kvs_connect(&client, &o, &err);
    if (s == KVS_OK)
        return client;
    *ret_exit = ctl_fail(c, o.path, s, &err);
    /* Whatever kept us from talking: the daemon was not reached, unless it answered with a refusal. */
    if (*ret_exit == CTL_USAGE && s != KVS_E_INVALID)
        *ret_exit = CTL_UNREACHABLE;
    if (s == KVS_E_LIMIT)
        *ret_exit = CTL_USAGE;
    return NULL;
}

static int print(const ctl *c, const char *what, const char *text, size_t len)
{
    kvs_err err = {0};
    kvs_status s = KVS_OK;

    if (c->json)
        (void)printf("%s\n", text);
    else
        s = render_json(stdout, text, len, &err);
    return s == KVS_OK ? CTL_OK : ctl_fail(c, what, KVS_E_PROTO, &err);
}

/* One section as it is. */
static int report(const ctl *c, const char *what, uint32_t section)
{
    kvs_report_args a = {.section = section, .limit = 0, .ns = KVS_ALL};
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, NULL, &code);
    char *text = NULL;
    size_t len = 0;
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_report_alloc(client, &a, &text, &len, 0, &err);
    if (s != KVS_OK)
        code = ctl_fail(c, what, s, &err);
    else
        code = print(c, what, text, len);
    kvs_free(text);
    kvs_close(client);
    return code;
}

int ctl_status(const ctl *c)
{
    return report(c, "status", KVS_SECTION_SUMMARY);
}

int ctl_leases(const ctl *c)
{
    return report(c, "leases", KVS_SECTION_LEASES);
}

int ctl_clients(const ctl *c)
{
    return report(c, "clients", KVS_SECTION_CLIENTS);
}

int ctl_namespaces(const ctl *c)
{
    return report(c, "namespaces", KVS_SECTION_NAMESPACES);
}

int ctl_ping(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, NULL, &code);
    kvs_err err = {0};
    uint64_t at;
    double us;
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_ping(client, 0, &err); /* the first one warms the way */
    at = clock_ns();
    if (s == KVS_OK)
        s = kvs_ping(client, 0, &err);
    us = (double)(clock_ns() - at) / 1e3;
    if (s != KVS_OK)
        code = ctl_fail(c, "ping", s, &err);
    else if (c->json)
        (void)printf("{\"ok\":true,\"us\":%.1f}\n", us);
    else
        (void)printf("ok  %.1f us\n", us);
    kvs_close(client);
    return code;
}

int ctl_health(const ctl *c)
{
    static const char *const NAMES[] = {"ok", "starting", "degraded", "draining"};
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, NULL, &code);
    kvs_health_info h = {0};
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_health(client, &h, 0, &err);
    if (s != KVS_OK) {
        code = ctl_fail(c, "health", s, &err);
    } else {
        const char *name = h.state < sizeof NAMES / sizeof *NAMES ? NAMES[h.state] : "unknown";

        if (c->json)
            (void)printf("{\"state\":\"%s\",\"reasons\":%" PRIu32 ",\"uptime_us\":%" PRIu64 "}\n", name, h.reasons,
                         h.uptime_us);
        else
            (void)printf("%s  up %.0f s%s\n", name, (double)h.uptime_us / 1e6,
                         h.reasons != 0 ? "  (kvstridectl status says why)" : "");
        code = h.state == KVS_HEALTH_OK ? CTL_OK : CTL_FAILED;
    }
    kvs_close(client);
    return code;
}

/* Print one page of the list; *ret_next is where the next one starts, UINT64_MAX at the end. */
static kvs_status print_page(const ctl *c, const char *text, size_t len, bool first, uint64_t *ret_next,
                             uint64_t *count, kvs_err *err)
{
    json *doc = NULL;
    const json_node *keys, *next;
    int64_t cursor = 0;
    kvs_status s = json_parse(text, len, &doc, err);

    if (s != KVS_OK)
        return s;
    keys = json_member(json_root(doc), "keys");
    next = json_member(json_root(doc), "next");
    *ret_next = next != NULL && json_whole(next, &cursor) ? (uint64_t)cursor : UINT64_MAX;
    if (first && !c->json)
        (void)printf("%-64s  %5s  %6s  %-11s  %5s  %6s  %s\n", "key", "ns", "depth", "state", "holds", "leases",
                     "pinned");
    for (const json_node *k = keys != NULL ? json_first(keys) : NULL; k != NULL; k = json_next(k)) {
        const char *hex = json_member(k, "key") != NULL ? json_string(json_member(k, "key")) : "?";
        const char *state = json_member(k, "state") != NULL ? json_string(json_member(k, "state")) : "?";
        int64_t ns = 0, depth = 0, holds = 0, leases = 0;
        bool pinned = json_member(k, "pinned") != NULL && json_bool(json_member(k, "pinned"));

        if (*count >= c->limit)
            break;
        ++*count;
        (void)(json_member(k, "ns") != NULL && json_whole(json_member(k, "ns"), &ns));
        (void)(json_member(k, "depth") != NULL && json_whole(json_member(k, "depth"), &depth));
        (void)(json_member(k, "holds") != NULL && json_whole(json_member(k, "holds"), &holds));
        (void)(json_member(k, "leases") != NULL && json_whole(json_member(k, "leases"), &leases));
        if (c->json)
            (void)printf("%s{\"key\":\"%s\",\"ns\":%" PRId64 ",\"depth\":%" PRId64
                         ",\"state\":\"%s\",\"holds\":%" PRId64 ",\"leases\":%" PRId64 ",\"pinned\":%s}",
                         *count > 1 ? "," : "", hex, ns, depth, state, holds, leases, pinned ? "true" : "false");
        else
            (void)printf("%-64s  %5" PRId64 "  %6" PRId64 "  %-11s  %5" PRId64 "  %6" PRId64 "  %s\n", hex, ns, depth,
                         state, holds, leases, pinned ? "yes" : "no");
    }
    json_destroy(doc);
    return KVS_OK;
}

int ctl_ls(const ctl *in)
{
    ctl c = *in;
    kvs_report_args a = {.section = KVS_SECTION_KEYS, .ns = in->has_ns ? (uint32_t)in->ns : KVS_ALL};
    uint64_t count = 0;
    int code = CTL_OK;
    kvs_client *client;
    kvs_err err = {0};
    kvs_status s = KVS_OK;
    bool first = true;

    if (c.limit == UINT64_MAX)
        c.limit = 1000;
    else if (c.limit == 0)
        c.limit = UINT64_MAX;
    client = ctl_connect(&c, NULL, &code);
    if (client == NULL)
        return code;
    if (c.json)
        (void)printf("[");
    while (s == KVS_OK && a.cursor != UINT64_MAX && count < c.limit) {
        char *text = NULL;
        size_t len = 0;

        s = kvs_report_alloc(client, &a, &text, &len, 0, &err);
        if (s == KVS_OK)
            s = print_page(&c, text, len, first, &a.cursor, &count, &err);
        first = false;
        kvs_free(text);
    }
    if (c.json)
        (void)printf("]\n");
    if (s != KVS_OK)
        code = ctl_fail(in, "ls", s, &err);
    else if (a.cursor != UINT64_MAX && !c.json)
        (void)printf("(the first %" PRIu64 "; --limit 0 shows all)\n", count);
    kvs_close(client);
    return code;
}

int ctl_fsck(const ctl *c)
{
    kvs_report_args a = {.section = KVS_SECTION_FSCK, .ns = KVS_ALL};
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, NULL, &code);
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_report_alloc(client, &a, &text, &len, 0, &err);
    if (s == KVS_OK)
        s = json_parse(text, len, &doc, &err);
    if (s != KVS_OK) {
        code = ctl_fail(c, "fsck", s, &err);
    } else {
        const json_node *ok = json_member(json_root(doc), "ok");

        code = print(c, "fsck", text, len);
        if (code == CTL_OK && (ok == NULL || json_type_of(ok) != JSON_BOOL || !json_bool(ok)))
            code = CTL_FAILED;
    }
    json_destroy(doc);
    kvs_free(text);
    kvs_close(client);
    return code;
}

static const char *hex_of(char out[65], const uint8_t key[32])
{
    for (int i = 0; i < 32; i++)
        (void)snprintf(out + 2 * i, 3, "%02x", key[i]);
    return out;
}

/* 64 hex digits. */
static bool key_of(const char *text, uint8_t ret[32])
{
    if (strlen(text) != 64 || strspn(text, "0123456789abcdefABCDEF") != 64)
        return false;
    for (int i = 0; i < 32; i++) {
        char two[3] = {text[2 * i], text[2 * i + 1], '\0'};

        ret[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    return true;
}

int ctl_watch(const ctl *c)
{
    static const char *const TYPES[] = {"stored", "removed", "reset"};
    static const char *const CAUSES[] = {"", "evicted", "dropped", "rebound"};
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, NULL, &code);
    uint64_t until = c->seconds != 0 ? clock_ns() + c->seconds * 1000000000u : UINT64_MAX, lost;
    kvs_event events[64];
    kvs_err err = {0};
    kvs_status s;
    char hex[65];

    if (client == NULL)
        return code;
    s = kvs_watch(client, 7, 0, &err);
    while (s == KVS_OK && clock_ns() < until) {
        uint32_t n = 0;
        kvs_status got = kvs_events(client, events, 64, &n, &lost, 200, &err);

        if (got != KVS_OK && got != KVS_E_DEADLINE)
            s = got;
        for (uint32_t i = 0; i < n; i++) {
            const kvs_event *e = &events[i];
            const char *type = e->type < 3 ? TYPES[e->type] : "?", *cause = e->cause < 4 ? CAUSES[e->cause] : "?";

            if (c->json)
                (void)printf("{\"event\":\"%s\",\"cause\":\"%s\",\"ns\":%" PRIu32 ",\"depth\":%" PRIu32
                             ",\"key\":\"%s\"}\n",
                             type, cause, e->ns, e->depth, hex_of(hex, e->key));
            else
                (void)printf("%-8s %-8s ns %-4" PRIu32 " depth %-6" PRIu32 " %s\n", type, cause, e->ns, e->depth,
                             hex_of(hex, e->key));
        }
        if (got == KVS_OK && lost != 0)
            (void)fprintf(stderr, "kvstridectl: %" PRIu64 " events were lost\n", lost);
        if (fflush(stdout) != 0)
            break;
    }
    if (s != KVS_OK)
        code = ctl_fail(c, "watch", s, &err);
    kvs_close(client);
    return code;
}

int ctl_drop(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client;
    kvs_ns *ns = NULL;
    kvs_err err = {0};
    kvs_status s;

    if (!c->has_ns || c->n_args == 0) {
        (void)fprintf(stderr, "kvstridectl: drop needs --ns N and at least one key (see 'ls')\n");
        return CTL_USAGE;
    }
    for (int i = 0; i < c->n_args; i++) {
        uint8_t key[32];

        if (!key_of(c->args[i], key)) {
            (void)fprintf(stderr, "kvstridectl: '%.80s' is not a key of 64 hex digits\n", c->args[i]);
            return CTL_USAGE;
        }
    }
    client = ctl_connect(c, NULL, &code);
    if (client == NULL)
        return code;
    s = kvs_open_id(client, (uint32_t)c->ns, &ns, &err);
    if (s != KVS_OK)
        code = ctl_fail(c, "drop", s, &err);
    for (int i = 0; i < c->n_args && s == KVS_OK; i++) {
        kvs_status result = KVS_OK;
        uint8_t key[32];

        (void)key_of(c->args[i], key);
        s = kvs_drop(ns, key, 1, &result, 0, &err);
        if (s != KVS_OK && s != KVS_E_PARTIAL) {
            code = ctl_fail(c, "drop", s, &err);
            break;
        }
        s = KVS_OK;
        if (result != KVS_OK)
            code = CTL_REFUSED;
        if (c->json)
            (void)printf("{\"key\":\"%s\",\"status\":\"%s\"}\n", c->args[i], kvs_status_name(result));
        else
            (void)printf("%s  %s\n", c->args[i], result == KVS_OK ? "dropped" : kvs_status_text(result));
    }
    kvs_close(client);
    return code;
}

int ctl_reset(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, NULL, &code);
    kvs_ns *ns = NULL;
    kvs_reset_result r = {0};
    kvs_err err = {0};
    kvs_status s = KVS_OK;

    if (client == NULL)
        return code;
    if (c->has_ns)
        s = kvs_open_id(client, (uint32_t)c->ns, &ns, &err);
    if (s == KVS_OK)
        s = kvs_reset(client, ns, c->pinned ? KVS_RESET_PINNED : 0, &r, 0, &err);
    if (s != KVS_OK && s != KVS_E_PARTIAL) {
        code = ctl_fail(c, "reset", s, &err);
    } else {
        if (c->json)
            (void)printf("{\"dropped\":%" PRIu64 ",\"aborted\":%" PRIu64 ",\"kept\":%" PRIu64 ",\"leases\":%" PRIu64
                         "}\n",
                         r.dropped, r.aborted, r.kept, r.leases);
        else
            (void)printf("dropped %" PRIu64 ", aborted %" PRIu64 " being written, ended %" PRIu64
                         " leases, kept %" PRIu64 " pinned%s\n",
                         r.dropped, r.aborted, r.leases, r.kept, r.kept ? " (--pinned drops them too)" : "");
        code = r.kept == 0 ? CTL_OK : CTL_REFUSED;
    }
    kvs_close(client);
    return code;
}
