/* Commands that ask a running daemon one question. */
#include "proto/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "config/json.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/render.h"
#include "proto/text.h"

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
    kvs_client *client = ctl_connect(c, &code);
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

int ctl_tenants(const ctl *c)
{
    return report(c, "tenants", KVS_SECTION_TENANTS);
}

int ctl_reload(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    char *text = NULL;
    size_t len = 0;
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_reload_alloc(client, c->dry_run, &text, &len, 0, &err);
    code = s == KVS_OK ? print(c, "reload", text, len) : ctl_fail(c, "reload", s, &err);
    if (s != KVS_OK && s != KVS_E_AWAY && s != KVS_E_DEADLINE && s != KVS_E_PROTO)
        code = CTL_REFUSED; /* the daemon's answer about its file, be it E_CONFIG or a path that is E_BUSY or E_SYS */
    kvs_free(text);
    kvs_close(client);
    return code;
}

static int put_drained(bool drained)
{
    json_writer *w = json_writer_create();

    json_begin_object(w, NULL);
    json_put_bool(w, "drained", drained);
    json_end(w);
    return ctl_put(w, CTL_OK);
}

int ctl_drain(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_drain(client, !c->off, 0, &err);
    if (s != KVS_OK)
        code = ctl_fail(c, "drain", s, &err);
    else if (c->json)
        code = put_drained(!c->off);
    else
        (void)printf("%s\n", c->off ? "taking work" : "drained: no new work is taken");
    kvs_close(client);
    return code;
}

static int put_ping(double us)
{
    json_writer *w = json_writer_create();

    json_begin_object(w, NULL);
    json_put_bool(w, "ok", true);
    json_put_double(w, "us", us);
    json_end(w);
    return ctl_put(w, CTL_OK);
}

int ctl_ping(const ctl *c)
{
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
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
        code = put_ping(us);
    else
        (void)printf("ok  %.1f us\n", us);
    kvs_close(client);
    return code;
}

/* The daemon's own words of why it is not well, but for one whose device is lost: it answers HEALTH only. */
static void ask_why(kvs_client *client, const kvs_health_info *h, char *buf, size_t cap)
{
    const kvs_report_args a = KVS_REPORT_SUMMARY;
    const json_node *why, *file;
    char *text = NULL;
    size_t len = 0;
    json *doc = NULL;

    (void)snprintf(buf, cap, "%s", (h->reasons & KVS_REASON_DEVICE_LOST) != 0 ? "the device is lost" : "");
    if (h->reasons == 0 || kvs_report_alloc(client, &a, &text, &len, 0, NULL) != KVS_OK)
        return;
    if (json_parse(text, len, &doc, NULL) == KVS_OK) {
        why = json_member(json_root(doc), "health_why");
        file = (h->reasons & KVS_REASON_OLD_CONFIG) != 0 ? json_member(json_root(doc), "reload_error") : NULL;
        if (why != NULL && json_type_of(why) == JSON_STRING)
            (void)snprintf(buf, cap, "%s", json_string(why));
        if (buf[0] != '\0' && file != NULL && json_type_of(file) == JSON_STRING)
            (void)snprintf(buf + strlen(buf), cap - strlen(buf), " (%s)", json_string(file));
    }
    json_destroy(doc);
    kvs_free(text);
}

static int put_health(const char *state, const kvs_health_info *h, const char *why, int code)
{
    json_writer *w = json_writer_create();

    json_begin_object(w, NULL);
    json_put_string(w, "state", state);
    json_put_u64(w, "reasons", h->reasons);
    json_put_string(w, "why", why);
    json_put_u64(w, "uptime_us", h->uptime_us);
    json_put_hex(w, "boot_id", h->boot_id, sizeof h->boot_id);
    json_end(w);
    return ctl_put(w, code);
}

int ctl_health(const ctl *c)
{
    static const char *const STATES[] = {"ok", "starting", "degraded", "draining"};
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
    kvs_health_info h = {0};
    char why[512];
    kvs_err err = {0};
    kvs_status s;

    if (client == NULL)
        return code;
    s = kvs_health(client, &h, 0, &err);
    if (s != KVS_OK) {
        code = ctl_fail(c, "health", s, &err);
    } else {
        const char *state = h.state < sizeof STATES / sizeof *STATES ? STATES[h.state] : "unknown";

        code = h.state == KVS_HEALTH_OK ? CTL_OK : CTL_FAILED;
        ask_why(client, &h, why, sizeof why);
        if (c->json) {
            code = put_health(state, &h, why, code);
        } else {
            text_tame(why);
            (void)printf("%s  up %.0f s%s%s\n", state, (double)h.uptime_us / 1e6, why[0] != '\0' ? "  " : "", why);
        }
    }
    kvs_close(client);
    return code;
}

int ctl_fsck(const ctl *c)
{
    kvs_report_args a = {.section = KVS_SECTION_FSCK, .ns = KVS_ALL};
    int code = CTL_OK;
    kvs_client *client = ctl_connect(c, &code);
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
