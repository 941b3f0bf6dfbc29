#include "daemon/http.h"

#include <criterion/criterion.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/thread.h"
#include "tests/support/prom.h"

/* A loop that answers at once, on the thread that asks, or never. */
typedef struct fake_loop {
    bool hangs;
    unsigned asked;
    metrics_snapshot now; /* what it says */
} fake_loop;

static fake_loop loop;
static board *b;
static http *h;
static char dir[64], path[96];

static void post(void *ud, work *w)
{
    fake_loop *l = ud;

    l->asked++;
    if (!l->hangs)
        w->on_done(w);
}

static void fill(void *ud, metrics_snapshot *s)
{
    const fake_loop *l = ud;

    *s = l->now;
    s->taken_us = thread_now_us();
}

static void begin(void)
{
    kvs_err err;

    loop = (fake_loop){.now = {.ready = true, .device = "cpu"}};
    metrics_edge_init(&loop.now.edge);
    (void)snprintf(dir, sizeof dir, "/tmp/kvs-http-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    (void)snprintf(path, sizeof path, "%s/m", dir);
    cr_assert_eq(http_open(&h, path, 0660, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(board_create(&b, (work_sink){post, &loop, NULL}, fill, &loop, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(http_start(h, b, &err), KVS_OK, "%s", err.msg);
}

static void end(void)
{
    char command[128];

    board_close(b);
    http_stop(h);
    board_destroy(b);
    cr_assert_neq(access(path, F_OK), 0, "the socket's file is left");
    (void)snprintf(command, sizeof command, "rm -r %s", dir);
    cr_assert_eq(system(command), 0);
}

TestSuite(http, .init = begin, .fini = end);

static void expect(const char *what, int code, const char *body)
{
    int got;
    char *text = http_get(path, what, &got);

    cr_assert_not_null(text, "%s: no answer", what);
    cr_assert_eq(got, code, "%s: %d %s", what, got, text);
    cr_assert_not_null(strstr(text, body), "%s: %s", what, text);
    free(text);
}

Test(http, serves_its_pages_and_nothing_else)
{
    struct stat st;
    prom p;

    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(st.st_mode & 07777, 0660);
    cr_assert(prom_scrape(&p, path), "%s", p.why);
    cr_assert_eq(prom_get(&p, "kvstride_ready", NULL, NULL), 1);
    prom_free(&p);
    expect("/metrics.json", 200, "{\"families\":[");
    expect("/", 200, "<title>kvstrided</title>");
    expect("/healthz", 200, "ok");
    expect("/readyz", 200, "ready");
    expect("/metrics/", 404, "/metrics");
    expect("/../metrics", 404, "there are");
    expect("/metrics?x=1", 200, "kvstride_ready 1");
}

Test(http, refuses_methods_that_could_change_something)
{
    static const char *const METHODS[] = {"POST", "PUT", "DELETE", "PATCH", "OPTIONS", "X"};

    for (size_t i = 0; i < sizeof METHODS / sizeof METHODS[0]; i++) {
        char request[256], *text;
        int n = snprintf(request, sizeof request, "%s /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd",
                         METHODS[i]);

        text = http_say(path, request, (size_t)n);
        cr_assert_not_null(text, "%s", METHODS[i]);
        cr_assert_not_null(strstr(text, "HTTP/1.1 405 "), "%s: %s", METHODS[i], text);
        cr_assert_not_null(strstr(text, "Allow: GET, HEAD"), "%s: %s", METHODS[i], text);
        free(text);
    }
}

Test(http, answers_head_without_a_body_and_old_clients_too)
{
    static const char HEAD[] = "HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", OLD[] = "GET /healthz HTTP/1.0\r\n\r\n";
    char *text = http_say(path, HEAD, sizeof HEAD - 1);

    cr_assert_not_null(strstr(text, "HTTP/1.1 200 "), "%s", text);
    cr_assert_null(strstr(text, "kvstride_"), "%s", text);
    free(text);
    text = http_say(path, OLD, sizeof OLD - 1);
    cr_assert_not_null(strstr(text, " 200 "), "%s", text);
    free(text);
}

Test(http, survives_requests_that_are_none)
{
    static char big[100000];
    static const char *const BAD[] = {"\r\n\r\n\r\n",
                                      "GET\r\n\r\n",
                                      "\x16\x03\x01\x02",
                                      "GET / HTTP/9.9\r\n\r\n",
                                      "GET /\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
                                      "KVS1"};

    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);

        (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
        cr_assert_eq(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
        cr_assert_gt(send(fd, BAD[i], strlen(BAD[i]), MSG_NOSIGNAL), 0);
        (void)close(fd);
        expect("/healthz", 200, "ok");
    }
    memset(big, 'a', sizeof big);
    memcpy(big, "GET /", 5);
    free(http_say(path, big, sizeof big));
    expect("/healthz", 200, "ok");
}

Test(http, shows_the_latest_numbers_with_their_age_when_the_loop_hangs)
{
    uint64_t began;
    prom p;

    cr_assert(prom_scrape(&p, path), "%s", p.why);
    cr_assert_lt(prom_get(&p, "kvstride_snapshot_age_seconds", NULL, NULL), 0.2);
    prom_free(&p);
    loop.hangs = true;
    loop.now.n_clients = 7; /* never seen */
    for (int i = 0; i < 2; i++) {
        began = thread_now_us();
        cr_assert(prom_scrape(&p, path), "%s", p.why);
        cr_assert_lt(thread_now_us() - began, 3 * HTTP_WAIT_US);
        cr_assert_geq(prom_get(&p, "kvstride_snapshot_age_seconds", NULL, NULL), HTTP_WAIT_US / 1e6);
        cr_assert_eq(prom_get(&p, "kvstride_clients", "socket=\"client\"", NULL), 0);
        prom_free(&p);
    }
    cr_assert_eq(loop.asked, 2, "one question is on its way at a time");
}

Test(http, tells_a_loop_that_does_not_turn_from_one_that_is_idle)
{
    expect("/healthz", 200, "ok");
    loop.hangs = true;
    expect("/healthz", 200, "ok"); /* it turned a moment ago */
    board_turned(b, thread_now_us() - HTTP_ALIVE_US - 1500000);
    expect("/healthz", 503, "the loop has not turned for 6.5 s");
    board_turned(b, thread_now_us());
    expect("/healthz", 200, "ok");
}

Test(http, is_healthy_but_not_ready_while_it_starts_drains_or_has_lost_its_device)
{
    loop.now.ready = false;
    expect("/readyz", 503, "starting");
    expect("/healthz", 200, "ok");
    loop.now.draining = true;
    expect("/readyz", 503, "draining");
    expect("/healthz", 200, "ok");
    loop.now.device_lost = true;
    expect("/readyz", 503, "device is lost");
    expect("/healthz", 200, "ok");
}

/* ---- many and slow ---- */

static int dial(void)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    cr_assert_eq(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static bool hears(int fd, int timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};

    return poll(&p, 1, timeout_ms) == 1;
}

Test(http, lets_no_more_in_than_there_are_places_and_makes_room_of_those_who_are_slow)
{
    static const char ASK[] = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";
    int slow[HTTP_PLACES], late;
    char text[512];
    ssize_t n;

    for (int i = 0; i < HTTP_PLACES; i++) {
        slow[i] = dial();
        cr_assert_eq(send(slow[i], "GET /", 5, MSG_NOSIGNAL), 5);
    }
    late = dial();
    cr_assert_eq(send(late, ASK, sizeof ASK - 1, MSG_NOSIGNAL), (ssize_t)sizeof ASK - 1);
    cr_assert_not(hears(late, 300), "it is the one too many");
    http_check(h, HTTP_WHOLE_US);
    cr_assert_not(hears(late, 100), "they have not had their time");
    for (int i = 0; i < 100 && !hears(late, 100); i++)
        http_check(h, 0); /* their time is up */
    n = recv(late, text, sizeof text - 1, 0);
    cr_assert_gt(n, 0);
    text[n] = '\0';
    cr_assert_not_null(strstr(text, " 200 "), "%s", text);
    for (int i = 0; i < HTTP_PLACES; i++)
        (void)close(slow[i]);
    (void)close(late);
}

Test(http, is_not_held_up_by_a_reader_that_does_not_read)
{
    static const char ASK[] = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    int deaf[HTTP_PLACES / 2];

    for (int i = 0; i < HTTP_PLACES / 2; i++) {
        int small = 1;

        deaf[i] = dial();
        (void)setsockopt(deaf[i], SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        cr_assert_eq(send(deaf[i], ASK, sizeof ASK - 1, MSG_NOSIGNAL), (ssize_t)sizeof ASK - 1);
    }
    for (int i = 0; i < 20; i++)
        expect("/metrics", 200, "kvstride_ready 1");
    for (int i = 0; i < HTTP_PLACES / 2; i++)
        (void)close(deaf[i]);
}

Test(http_start, says_why_there_is_no_server)
{
    struct rlimit all, few;
    kvs_err err;
    int next;

    begin();
    http_stop(h);
    cr_assert_eq(http_open(&h, path, 0660, &err), KVS_OK, "%s", err.msg);
    next = dup(STDIN_FILENO);
    (void)close(next);
    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &all), 0);
    few = (struct rlimit){(rlim_t)next, all.rlim_max};
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
    cr_assert_eq(http_start(h, b, &err), KVS_E_SYS);
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &all), 0);
    cr_assert_not_null(strstr(err.msg, "does not start: "), "%s", err.msg);
    cr_assert_not_null(strstr(err.msg, "Too many open files"), "%s", err.msg);
    end();
}

/* One that was free a moment ago. */
static uint16_t free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t len = sizeof a;

    cr_assert_eq(bind(fd, (const struct sockaddr *)&a, len), 0);
    cr_assert_eq(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    (void)close(fd);
    return ntohs(a.sin_port);
}

/* Taken on ::1 only: 127.0.0.1 is given back too, and the UNIX socket answers. */
Test(http_port, is_had_on_both_addresses_or_neither)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0), four;
    socklen_t len = sizeof v6;
    kvs_err err;

    if (fd < 0 || bind(fd, (const struct sockaddr *)&v6, sizeof v6) != 0)
        cr_skip_test("no ::1 here");
    cr_assert(listen(fd, 1) == 0 && getsockname(fd, (struct sockaddr *)&v6, &len) == 0);
    begin();
    http_stop(h);
    cr_assert_eq(http_open(&h, path, 0600, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(http_open_port(h, ntohs(v6.sin6_port), &err), KVS_E_BUSY);
    cr_assert_not_null(strstr(err.msg, "metrics.port: [::1]:"), "%s", err.msg);
    cr_assert_eq(http_start(h, b, &err), KVS_OK, "%s", err.msg);
    expect("/readyz", 200, "ready");
    four = socket(AF_INET, SOCK_STREAM, 0);
    v4.sin_port = v6.sin6_port;
    cr_assert_neq(connect(four, (const struct sockaddr *)&v4, sizeof v4), 0, "127.0.0.1 answers");
    (void)close(four);
    (void)close(fd);
    end();
}

Test(http_port, is_on_the_loopback_only_and_answers_to_its_names_only)
{
    static const struct {
        const char *host;
        int code;
    } ROWS[] = {{"localhost", 200},    {"127.0.0.1:80", 200},   {"LOCALHOST:1", 200},           {"[::1]:9", 200},
                {"evil.example", 403}, {"127.0.0.1.evil", 403}, {"localhost.evil.example", 403}};
    char command[256], out[96];
    kvs_err err;
    http *other = NULL;
    FILE *f;

    uint16_t port = free_port();

    begin();
    http_stop(h);
    cr_assert_eq(http_open(&h, path, 0600, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(http_open_port(h, port, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(http_start(h, b, &err), KVS_OK, "%s", err.msg);
    (void)snprintf(out, sizeof out, "%s/n", dir);
    cr_assert_eq(http_open(&other, out, 0600, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(http_open_port(other, port, &err), KVS_E_BUSY);
    (void)snprintf(command, sizeof command, "metrics.port: 127.0.0.1:%u: Address already in use", port);
    cr_assert_str_eq(err.msg, command);
    http_stop(other);
    cr_assert_neq(access(out, F_OK), 0, "the socket's file is left");
    /* Every address that is listened on, from the kernel. */
    (void)snprintf(command, sizeof command,
                   "cat /proc/self/net/tcp /proc/self/net/tcp6 | awk '$2 ~ /:%04X$/ && $4 == \"0A\" {print $2}'", port);
    f = popen(command, "r");
    for (unsigned n = 0; fgets(command, sizeof command, f) != NULL; n++)
        cr_assert(strncmp(command, "0100007F:", 9) == 0 ||
                      strncmp(command, "00000000000000000000000001000000:", 33) == 0,
                  "listens on %s", command);
    (void)pclose(f);
    for (size_t i = 0; i < sizeof ROWS / sizeof ROWS[0]; i++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
        int fd = socket(AF_INET, SOCK_STREAM, 0), code = 0, n;
        char text[1024] = "";

        cr_assert_eq(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
        n = snprintf(text, sizeof text, "GET /readyz HTTP/1.1\r\nHost: %s\r\n\r\n", ROWS[i].host);
        cr_assert_eq(send(fd, text, (size_t)n, 0), n);
        cr_assert_gt(recv(fd, text, sizeof text - 1, 0), 0);
        cr_assert_eq(sscanf(text, "HTTP/1.1 %d", &code), 1);
        cr_assert_eq(code, ROWS[i].code, "%s: %d", ROWS[i].host, code);
        (void)close(fd);
    }
    end();
}
