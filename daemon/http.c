#include "daemon/http.h"

#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/beat.h"
#include "daemon/listen.h"
#include "daemon/log.h"
#include "daemon/metrics_text.h"
#include "daemon/thread.h"

enum { N_DOORS = 3, BACKLOG = 64, MEMORY_LIMIT = 8192 };

typedef struct door {
    struct http *http;
    struct MHD_Daemon *mhd;
    int fd; /* listening; -1: none */
    bool tcp;
} door;

typedef struct place {
    int fd; /* -1: free */
    uint64_t since_us;
} place;

struct http {
    listen_socket socket;
    door doors[N_DOORS];
    uint32_t n_doors;
    board *board;
    pthread_mutex_t lock; /* of places and said */
    place places[N_DOORS * HTTP_PLACES];
    char said[128]; /* the library's latest complaint: it gives its reasons by the log only */
};

/* ---- sockets ---- */

static kvs_status open_tcp(http *h, const struct sockaddr *a, socklen_t len, const char *name, bool optional,
                           kvs_err *err)
{
    const int on = 1;
    kvs_status s;
    int fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd >= 0) {
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (a->sa_family == AF_INET6)
            (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
        if (bind(fd, a, len) == 0 && listen(fd, BACKLOG) == 0) {
            h->doors[h->n_doors++] = (door){.http = h, .fd = fd, .tcp = true};
            return KVS_OK;
        }
    }
    if (optional && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL)) {
        if (fd >= 0)
            (void)close(fd);
        return KVS_OK;
    }
    s = kvs_fail(err, errno == EADDRINUSE ? KVS_E_BUSY : KVS_E_SYS, "metrics.port: %s: %s", name, strerror(errno));
    if (fd >= 0)
        (void)close(fd);
    return s;
}

static void close_tcp(http *h)
{
    while (h->n_doors > 0 && h->doors[h->n_doors - 1].tcp)
        (void)close(h->doors[--h->n_doors].fd);
}

kvs_status http_open_port(http *h, uint16_t port, kvs_err *err)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    char name[32];
    kvs_status s;

    if (port == 0)
        return KVS_OK;
    (void)snprintf(name, sizeof name, "127.0.0.1:%u", port);
    s = open_tcp(h, (const struct sockaddr *)&v4, sizeof v4, name, false, err);
    (void)snprintf(name, sizeof name, "[::1]:%u", port);
    if (s == KVS_OK)
        s = open_tcp(h, (const struct sockaddr *)&v6, sizeof v6, name, true, err);
    if (s != KVS_OK)
        close_tcp(h);
    return s;
}

kvs_status http_open(http **ret, const char *path, mode_t mode, kvs_err *err)
{
    http *h = calloc(1, sizeof *h);
    kvs_status s;

    if (h == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "metrics: out of memory");
    (void)pthread_mutex_init(&h->lock, NULL);
    for (size_t i = 0; i < sizeof h->places / sizeof h->places[0]; i++)
        h->places[i].fd = -1;
    h->socket = (listen_socket){.fd = -1, .lock_fd = -1};
    s = listen_open(&h->socket, path, mode, err);
    if (s != KVS_OK) {
        http_stop(h);
        return s;
    }
    h->doors[h->n_doors++] = (door){.http = h, .fd = h->socket.fd};
    *ret = h;
    return KVS_OK;
}

/* ---- connections that have had their time ---- */

static void on_connection(void *ud, struct MHD_Connection *c, void **ctx, enum MHD_ConnectionNotificationCode code)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    http *h = ((door *)ud)->http;

    (void)ctx;
    (void)pthread_mutex_lock(&h->lock);
    for (size_t i = 0; i < sizeof h->places / sizeof h->places[0]; i++) {
        place *p = &h->places[i];

        if (code == MHD_CONNECTION_NOTIFY_STARTED && p->fd < 0) {
            *p = (place){info->connect_fd, thread_now_us()};
            break;
        }
        if (code == MHD_CONNECTION_NOTIFY_CLOSED && p->fd == info->connect_fd) {
            p->fd = -1;
            break;
        }
    }
    (void)pthread_mutex_unlock(&h->lock);
}

void http_check(http *h, uint64_t whole_us)
{
    uint64_t now = thread_now_us();

    if (pthread_mutex_trylock(&h->lock) != 0)
        return;
    for (size_t i = 0; i < sizeof h->places / sizeof h->places[0]; i++)
        if (h->places[i].fd >= 0 && now - h->places[i].since_us >= whole_us)
            (void)shutdown(h->places[i].fd, SHUT_RDWR); /* its thread closes it, and tells */
    (void)pthread_mutex_unlock(&h->lock);
}

/* ---- answers ---- */

typedef struct answer {
    unsigned code;
    const char *type;
    char *text; /* owned, or NULL: no memory for it */
    size_t len;
} answer;

static void say(answer *a, unsigned code, const char *text)
{
    a->code = code;
    a->type = "text/plain; charset=utf-8";
    a->text = strdup(text);
    a->len = strlen(text);
}

static void answer_health(const http *h, answer *a)
{
    uint64_t age = board_turn_age_us(h->board);
    beat_age hung = beat_oldest(BEAT_RUNNING);
    char text[96];

    if (age <= HTTP_ALIVE_US && hung.us <= HTTP_HUNG_US) {
        say(a, MHD_HTTP_OK, "ok\n");
        return;
    }
    if (age <= HTTP_ALIVE_US)
        (void)snprintf(text, sizeof text, "thread %s hangs for %" PRIu64 " s\n", hung.name, hung.us / 1000000);
    else
        (void)snprintf(text, sizeof text, "the loop has not turned for %" PRIu64 ".%" PRIu64 " s\n", age / 1000000,
                       age % 1000000 / 100000);
    say(a, MHD_HTTP_SERVICE_UNAVAILABLE, text);
}

static void answer_ready(const metrics_snapshot *s, answer *a)
{
    const char *why = NULL;

    if (s->device_lost)
        why = "the device is lost\n";
    else if (s->draining)
        why = "draining\n";
    else if (!s->ready)
        why = "starting: no memory is usable yet\n";
    else if (s->age_us > HTTP_ALIVE_US)
        why = "the loop does not answer\n";
    say(a, why == NULL ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, why == NULL ? "ready\n" : why);
}

static void answer_json(const metrics_snapshot *s, answer *a)
{
    json_writer *w = json_writer_create();
    const char *text;

    metrics_json(s, w);
    text = json_text(w, &a->len);
    a->text = text != NULL ? strdup(text) : NULL;
    json_writer_destroy(w);
}

enum page { PAGE_METRICS, PAGE_JSON, PAGE_READY, PAGE_STATUS, PAGE_HEALTH, N_PAGES };
static const struct {
    const char *path, *type;
} PAGES[N_PAGES] = {
    [PAGE_METRICS] = {"/metrics", "text/plain; version=0.0.4; charset=utf-8"},
    [PAGE_JSON] = {"/metrics.json", "application/json"},
    [PAGE_READY] = {"/readyz", NULL},
    [PAGE_STATUS] = {"/", "text/html; charset=utf-8"},
    [PAGE_HEALTH] = {"/healthz", NULL},
};

static void answer_page(const http *h, enum page page, answer *a)
{
    metrics_snapshot *s;

    if (page == PAGE_HEALTH) { /* asks nothing of the loop: it may be the one that hangs */
        answer_health(h, a);
        return;
    }
    s = malloc(sizeof *s);
    if (s == NULL)
        return;
    board_read(h->board, HTTP_WAIT_US, s);
    *a = (answer){.code = MHD_HTTP_OK, .type = PAGES[page].type};
    if (page == PAGE_METRICS && metrics_text(s, &a->text, &a->len) != KVS_OK)
        a->text = NULL;
    if (page == PAGE_STATUS && metrics_page(s, &a->text, &a->len) != KVS_OK)
        a->text = NULL;
    if (page == PAGE_JSON)
        answer_json(s, a);
    if (page == PAGE_READY)
        answer_ready(s, a);
    free(s);
}

/* A page of another site, open in a browser here, may reach a loopback port under a name of its own: only ours. */
static bool names_loopback(struct MHD_Connection *c)
{
    static const char *const NAMES[] = {"localhost", "127.0.0.1", "[::1]"};
    const char *host = MHD_lookup_connection_value(c, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);

    if (host == NULL)
        return true; /* HTTP/1.0: no browser */
    for (size_t i = 0; i < sizeof NAMES / sizeof NAMES[0]; i++) {
        size_t n = strlen(NAMES[i]);

        if (strncasecmp(host, NAMES[i], n) == 0 && (host[n] == '\0' || host[n] == ':'))
            return true;
    }
    return false;
}

static void find_answer(const door *d, struct MHD_Connection *c, const char *url, const char *method, answer *a)
{
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0) {
        say(a, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        return;
    }
    if (d->tcp && !names_loopback(c)) {
        say(a, MHD_HTTP_FORBIDDEN, "Host: not a name of the loopback\n");
        return;
    }
    for (int p = 0; p < N_PAGES; p++)
        if (strcmp(url, PAGES[p].path) == 0) {
            answer_page(d->http, p, a);
            return;
        }
    say(a, MHD_HTTP_NOT_FOUND, "there are /, /metrics, /metrics.json, /healthz, /readyz\n");
}

static enum MHD_Result on_request(void *ud, struct MHD_Connection *c, const char *url, const char *method,
                                  const char *version, const char *upload, size_t *upload_len, void **ctx)
{
    answer a = {.code = MHD_HTTP_INTERNAL_SERVER_ERROR};
    struct MHD_Response *r;
    enum MHD_Result sent;

    (void)version;
    (void)upload;
    (void)upload_len;
    (void)ctx;
    find_answer(ud, c, url, method, &a);
    if (a.text == NULL)
        return MHD_NO; /* out of memory: the connection ends */
    r = MHD_create_response_from_buffer(a.len, a.text, MHD_RESPMEM_MUST_FREE);
    if (r == NULL) {
        free(a.text);
        return MHD_NO;
    }
    (void)MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, a.type);
    (void)MHD_add_response_header(r, MHD_HTTP_HEADER_CONNECTION, "close");
    (void)MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
    (void)MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    (void)MHD_add_response_header(r, "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'");
    if (a.code == MHD_HTTP_METHOD_NOT_ALLOWED)
        (void)MHD_add_response_header(r, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    sent = MHD_queue_response(c, a.code, r);
    MHD_destroy_response(r);
    return sent;
}

__attribute__((format(printf, 2, 0))) static void on_log(void *ud, const char *fmt, va_list ap)
{
    http *h = ud;
    char text[256], quoted[512];

    (void)vsnprintf(text, sizeof text, fmt, ap);
    text[strcspn(text, "\n")] = '\0';
    (void)pthread_mutex_lock(&h->lock);
    (void)snprintf(h->said, sizeof h->said, "%.127s", text);
    (void)pthread_mutex_unlock(&h->lock);
    log_event(LOG_LEVEL_DEBUG, "http", " msg=%s", log_quote(quoted, sizeof quoted, text, strlen(text)));
}

/* ---- life ---- */

static kvs_status start_door(door *d, kvs_err *err)
{
    sigset_t all, before;

    (void)sigfillset(&all); /* the new thread inherits it: signals belong to the loop */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    d->mhd = MHD_start_daemon(MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_ERROR_LOG, 0, NULL, NULL,
                              on_request, d, MHD_OPTION_EXTERNAL_LOGGER, on_log, d->http, MHD_OPTION_LISTEN_SOCKET,
                              d->fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned)HTTP_PLACES, MHD_OPTION_CONNECTION_TIMEOUT,
                              (unsigned)HTTP_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MEMORY_LIMIT,
                              MHD_OPTION_NOTIFY_CONNECTION, on_connection, d, MHD_OPTION_END);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (d->mhd != NULL)
        return KVS_OK;
    (void)pthread_mutex_lock(&d->http->lock);
    (void)kvs_fail(err, KVS_E_SYS, "metrics: the HTTP server does not start: %s",
                   d->http->said[0] != '\0' ? d->http->said : "its library does not say why");
    (void)pthread_mutex_unlock(&d->http->lock);
    return KVS_E_SYS;
}

kvs_status http_start(http *h, board *b, kvs_err *err)
{
    kvs_status s = KVS_OK;

    h->board = b;
    for (uint32_t i = 0; i < h->n_doors && s == KVS_OK; i++)
        s = start_door(&h->doors[i], err);
    return s;
}

void http_stop(http *h)
{
    if (h == NULL)
        return;
    for (uint32_t i = 0; i < h->n_doors; i++) {
        door *d = &h->doors[i];

        if (d->mhd != NULL) {
            (void)MHD_quiesce_daemon(d->mhd); /* the listening socket stays ours */
            MHD_stop_daemon(d->mhd);
        }
    }
    close_tcp(h);
    listen_close(&h->socket);
    (void)pthread_mutex_destroy(&h->lock);
    free(h);
}
