#include "proto/ctl/ctl.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/option.h"
#include "proto/text.h"

enum { DEFAULT_MS = 5000 };

static int exit_of(kvs_status s)
{
    switch (s) {
    case KVS_OK:
        return CTL_OK;
    case KVS_E_CONFIG:
        return CTL_USAGE;
    case KVS_E_CORRUPT:
    case KVS_E_NO_MEMORY:
        return CTL_FAILED;
    case KVS_E_AWAY:
    case KVS_E_DEADLINE:
    case KVS_E_BUSY:
    case KVS_E_SYS:
    case KVS_E_VERSION:
    case KVS_E_PROTO:
        return CTL_UNREACHABLE;
    default:
        return CTL_REFUSED;
    }
}

int ctl_fail_as(const ctl *c, const char *what, kvs_status s, const kvs_err *err, int code)
{
    const char *why = err != NULL && err->msg[0] != '\0' ? err->msg : kvs_status_text(s);
    char text[KVS_ERR_MSG_BYTES];

    if (c->json) {
        json_writer *w = json_writer_create();

        json_begin_object(w, NULL);
        json_put_string(w, "error", why);
        json_put_string(w, "status", kvs_status_name(s));
        json_put_string(w, "what", what);
        json_end(w);
        (void)ctl_put(w, code);
    }
    (void)snprintf(text, sizeof text, "%s", why);
    text_tame(text); /* it names paths and words, which may hold anything */
    (void)fprintf(stderr, "kvstridectl: %s: %s\n", what, text);
    return code;
}

/* The file system said no, not the daemon. */
static bool is_barred(const char *path, kvs_status s)
{
    return s == KVS_E_DENIED && path != NULL && access(path, W_OK) != 0;
}

/* What helps, behind what is wrong. */
static void add_hint(kvs_err *err, const char *hint)
{
    size_t n = strlen(err->msg);

    (void)snprintf(err->msg + n, sizeof err->msg - n, "; %s", hint);
}

static bool among_engines; /* the socket that ctl_connect found is one of theirs */

int ctl_fail(const ctl *c, const char *what, kvs_status s, const kvs_err *err)
{
    const char *hint = NULL;
    kvs_err more;

    if (s == KVS_E_DENIED && among_engines)
        hint = "--socket or $KVSTRIDE_ADMIN_SOCKET names the admin socket, by default " CTL_ADMIN_SOCKET;
    else if (s == KVS_E_AWAY)
        hint = "is kvstrided running?";
    if (hint != NULL && err != NULL && err->msg[0] != '\0') {
        more = *err;
        add_hint(&more, hint);
        err = &more;
    }
    return ctl_fail_as(c, what, s, err, is_barred(c->socket, s) ? CTL_UNREACHABLE : exit_of(s));
}

static const char *spoken_of = ""; /* the command's name and a space */

void ctl_set_command(const char *name_and_space)
{
    spoken_of = name_and_space;
}

int ctl_usage(const char *fmt, ...)
{
    char text[1024];
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    text_tame(text); /* words that were not typed may hold anything */
    (void)fprintf(stderr, "kvstridectl: %s\nTry 'kvstridectl %s--help'.\n", text, spoken_of);
    return CTL_USAGE;
}

bool ctl_is_meant(const char *word, const char *name, size_t *best)
{
    size_t d = option_distance(word, name);

    if (d > OPTION_MEANT || d >= strlen(name) || d >= *best)
        return false;
    *best = d;
    return true;
}

kvs_client *ctl_connect(const ctl *c, int *ret_exit)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_client *client = NULL;
    kvs_server server;
    kvs_err err = {0};
    bool by_default;
    kvs_status s;

    o.path = c->socket != NULL ? c->socket : getenv("KVSTRIDE_ADMIN_SOCKET");
    by_default = o.path == NULL;
    if (by_default)
        o.path = CTL_ADMIN_SOCKET;
    o.name = "kvstridectl";
    o.timeout_ms = c->timeout_ms != 0 ? (uint32_t)c->timeout_ms : DEFAULT_MS;
    o.connect_timeout_ms = o.timeout_ms;
    s = kvs_connect(&client, &o, &err);
    if (s == KVS_OK) {
        kvs_server_get(client, &server);
        among_engines = !server.is_admin;
        return client;
    }
    *ret_exit = exit_of(s);
    if (s == KVS_E_LIMIT || s == KVS_E_INVALID)
        *ret_exit = CTL_USAGE; /* the path is none */
    else if (is_barred(o.path, s))
        *ret_exit = CTL_UNREACHABLE;
    if (is_barred(o.path, s))
        add_hint(&err, "an admin socket is for root and the daemon's own user");
    else if (s == KVS_E_AWAY)
        add_hint(&err, by_default ? "is kvstrided running?  --socket or $KVSTRIDE_ADMIN_SOCKET names another one"
                                  : "is kvstrided running?");
    (void)ctl_fail_as(c, "connect", s, &err, *ret_exit);
    return NULL;
}

int ctl_put(json_writer *w, int code)
{
    const char *text = json_text(w, NULL);

    if (text == NULL) {
        (void)fprintf(stderr, "kvstridectl: no memory for the answer\n");
        code = CTL_FAILED;
    } else {
        (void)printf("%s\n", text);
    }
    json_writer_destroy(w);
    return code;
}

bool ctl_reader_gone(void)
{
    struct pollfd p = {.fd = STDOUT_FILENO};

    return poll(&p, 1, 0) == 1 && (p.revents & POLLERR) != 0;
}
