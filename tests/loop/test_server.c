#include "daemon/server.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "daemon/conn.h"
#include "daemon/listen.h"
#include "daemon/log.h"
#include "tests/loop/fake_core.h"
#include "tests/support/loop_fixture.h"
#include "tests/support/raw_client.h"

static uv_loop_t loop;
static mailbox *mail;
static core the_core;
static config cfg;
static server *srv;
static char dir[64];
static uint32_t n_turns;

static void on_turn(void *ud)
{
    (void)ud;
    n_turns++;
}

static void begin(void)
{
    server_config c = {.loop = &loop, .config = &cfg, .admin_fd = -1, .on_turn = on_turn};
    kvs_err err = {0};

    log_open(LOG_LEVEL_ERROR, false);
    (void)snprintf(dir, sizeof dir, "/tmp/kvs-server-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    config_default(&cfg);
    (void)snprintf(cfg.socket_path, sizeof cfg.socket_path, "%s/s", dir);
    (void)snprintf(cfg.admin_path, sizeof cfg.admin_path, "%s/a", dir);
    the_core.due_us = UINT64_MAX;
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&mail, &loop, NULL), KVS_OK);
    cr_assert_eq(server_create(&srv, &c, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(server_start(srv, &the_core, mail, &err), KVS_OK, "%s", err.msg);
}

static bool is_empty(void *ud)
{
    (void)ud;
    return server_is_empty(srv);
}

static void end(void)
{
    server_close_clients(srv);
    cr_assert(loop_until(&loop, is_empty, NULL, 5000));
    server_close(srv);
    mailbox_close(mail);
    cr_assert(loop_end(&loop));
    cr_assert_eq(the_core.n_peers, 0);
    cr_assert_eq(rmdir(dir), 0, "a socket or lock is left");
}

/* A fresh client each; true once HELLO is answered, false if the server closed it. */
static bool try_hello(void *ud)
{
    frame f;

    return raw_poll(ud, &f) || ((raw_client *)ud)->ended;
}

static bool join(raw_client *c, const char *path)
{
    if (!raw_connect(c, path) || !raw_send(c, WIRE_HELLO, 1, NULL, 0, NULL, 0))
        return false;
    cr_assert(loop_until(&loop, try_hello, c, 5000));
    return !c->ended;
}

static bool ping(raw_client *c)
{
    return raw_send(c, WIRE_PING, 1, NULL, 0, NULL, 0) && loop_until(&loop, try_hello, c, 5000) && !c->ended;
}

Test(server, listens_with_the_configured_modes)
{
    struct stat st;

    (void)umask(0);
    begin();
    cr_assert_eq(stat(cfg.socket_path, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0660);
    cr_assert_eq(stat(cfg.admin_path, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0600);
    end();
}

Test(server, tells_the_request_layer_by_which_door_a_client_came)
{
    raw_client c, a;

    begin();
    cr_assert(join(&c, cfg.socket_path));
    cr_assert(!the_core.peers->info.is_admin);
    cr_assert(join(&a, cfg.admin_path));
    cr_assert(the_core.peers->info.is_admin);
    cr_assert_eq(the_core.peers->info.uid, getuid());
    cr_assert_eq(the_core.peers->info.pid, getpid());
    raw_close(&c);
    raw_close(&a);
    end();
}

Test(server, turns_clients_away_at_the_limit_but_not_the_operator)
{
    raw_client c[4], admin[SERVER_ADMIN_PLACES + 1];

    begin();
    cfg.max_clients = 3;
    for (unsigned i = 0; i < 3; i++)
        cr_assert(join(&c[i], cfg.socket_path));
    cr_assert(!join(&c[3], cfg.socket_path));
    raw_close(&c[3]);
    for (unsigned i = 0; i < SERVER_ADMIN_PLACES; i++)
        cr_assert(join(&admin[i], cfg.admin_path));
    cr_assert(!join(&admin[SERVER_ADMIN_PLACES], cfg.admin_path));
    raw_close(&c[0]);
    cr_assert(join(&c[0], cfg.socket_path), "a free place is given away");
    for (unsigned i = 0; i < 3; i++)
        raw_close(&c[i]);
    for (unsigned i = 0; i <= SERVER_ADMIN_PLACES; i++)
        raw_close(&admin[i]);
    end();
}

static void set_fd_limit(rlim_t n)
{
    struct rlimit lim;

    cr_assert_eq(getrlimit(RLIMIT_NOFILE, &lim), 0);
    lim.rlim_cur = n;
    cr_assert_eq(setrlimit(RLIMIT_NOFILE, &lim), 0);
}

static bool never(void *ud)
{
    (void)ud;
    return false;
}

/* Connect n times from another process, hold the connections until the pipe is closed. */
static pid_t flood(unsigned n, int hold[2])
{
    pid_t pid = fork();
    char b;

    if (pid != 0)
        return pid;
    (void)close(hold[1]);
    set_fd_limit(1024);
    for (unsigned i = 0; i < n; i++) {
        raw_client c;

        if (!raw_connect(&c, cfg.socket_path))
            _exit(1);
    }
    _exit(read(hold[0], &b, 1) == 1);
}

Test(server, does_not_spin_when_descriptors_have_run_out)
{
    struct rusage before, after;
    raw_client c, late;
    int hold[2];
    uint64_t cpu_us, flood_ended;
    pid_t pid;

    set_fd_limit(48);
    begin();
    cr_assert(join(&c, cfg.socket_path));
    cr_assert_eq(pipe(hold), 0);
    pid = flood(200, hold);
    (void)getrusage(RUSAGE_SELF, &before);
    n_turns = 0;
    (void)loop_until(&loop, never, NULL, 600);
    (void)getrusage(RUSAGE_SELF, &after);
    cpu_us =
        (uint64_t)(after.ru_utime.tv_sec - before.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_stime.tv_sec) *
            1000000 +
        (uint64_t)(after.ru_utime.tv_usec - before.ru_utime.tv_usec + after.ru_stime.tv_usec - before.ru_stime.tv_usec);
    cr_assert_lt(cpu_us, 120000, "%d us of CPU in 600 ms", (int)cpu_us);
    cr_assert(ping(&c), "a client from before works on");
    (void)close(hold[1]);
    cr_assert_eq(waitpid(pid, NULL, 0), pid);
    flood_ended = conn_now_us();
    while (!join(&late, cfg.socket_path)) {
        raw_close(&late);
        cr_assert_lt(conn_now_us() - flood_ended, 1000000, "within a second of the flood everything is normal");
    }
    raw_close(&c);
    raw_close(&late);
    (void)close(hold[0]);
    end();
}

Test(server, works_with_no_descriptor_left_at_all)
{
    raw_client c;
    int spare[64], n = 0;
    pid_t pid;
    int hold[2];

    set_fd_limit(64);
    begin();
    cr_assert(join(&c, cfg.socket_path));
    cr_assert_eq(pipe(hold), 0);
    while (n < 64 && (spare[n] = dup(0)) >= 0)
        n++;
    pid = fork();
    if (pid == 0) { /* turned away at once, by the spare descriptor */
        raw_client turned;

        for (int i = 0; i < n; i++)
            (void)close(spare[i]);
        if (!raw_connect(&turned, cfg.socket_path))
            _exit(1);
        _exit(!raw_wait_end(&turned, 3000));
    }
    (void)loop_until(&loop, never, NULL, 200);
    {
        int status = -1;

        cr_assert_eq(waitpid(pid, &status, 0), pid);
        cr_assert_eq(status, 0);
    }
    cr_assert(ping(&c));
    while (n > 0)
        (void)close(spare[--n]);
    (void)close(hold[0]);
    (void)close(hold[1]);
    raw_close(&c);
    end();
}

/* A process with another uid tries; exit status 0: it was let in. */
static int hello_as(uid_t uid, const char *path)
{
    pid_t pid = fork();
    int status = -1;

    if (pid == 0) {
        raw_client c;

        if (setuid(uid) != 0 || !raw_connect(&c, path))
            _exit(2);
        _exit(!raw_hello(&c));
    }
    for (unsigned i = 0; i < 1000 && waitpid(pid, &status, WNOHANG) == 0; i++)
        (void)loop_until(&loop, never, NULL, 5);
    return WEXITSTATUS(status);
}

Test(server, lets_by_uid_in_whom_the_door_is_for)
{
    if (getuid() != 0)
        cr_skip_test("needs root to become others");
    begin();
    cr_assert_eq(chmod(dir, 0755), 0);
    cr_assert_eq(chmod(cfg.socket_path, 0666), 0);
    cr_assert_eq(chmod(cfg.admin_path, 0666), 0); /* even if somebody opened it */
    cr_assert_eq(hello_as(1234, cfg.socket_path), 0);
    cr_assert_eq(hello_as(1234, cfg.admin_path), 1);
    cr_assert_eq(hello_as(65534, cfg.socket_path), 1, "the uid of users that are not mapped here");
    cr_assert_eq(hello_as(0, cfg.admin_path), 0);
    end();
}

static void on_time(uv_timer_t *t)
{
    *(bool *)t->data = true;
}

Test(server, sleeps_while_nothing_happens)
{
    bool over = false;
    raw_client c;
    uv_timer_t t;

    begin();
    cr_assert(join(&c, cfg.socket_path));
    (void)uv_timer_init(&loop, &t);
    t.data = &over;
    (void)uv_timer_start(&t, on_time, 400, 0);
    n_turns = 0;
    while (!over)
        (void)uv_run(&loop, UV_RUN_ONCE);
    cr_assert_leq(n_turns, 3, "%u turns in 400 ms", n_turns);
    uv_close((uv_handle_t *)&t, NULL);
    raw_close(&c);
    end();
}

static bool has_ticked(void *ud)
{
    (void)ud;
    return the_core.n_ticks > 0;
}

Test(server, calls_the_core_when_its_time_has_come)
{
    uint64_t start = conn_now_us();

    begin();
    the_core.due_us = start + 50000;
    cr_assert(loop_until(&loop, has_ticked, NULL, 5000));
    cr_assert_geq(conn_now_us() - start, 49000);
    cr_assert_leq(the_core.n_ticks, 2);
    end();
}

Test(server, refuses_to_start_beside_a_live_one_and_leaves_it_alone)
{
    server_config c = {.loop = &loop, .config = &cfg, .admin_fd = -1};
    server *second = NULL;
    raw_client client;

    begin();
    cr_assert_eq(server_create(&second, &c, NULL), KVS_E_BUSY);
    cr_assert_null(second);
    cr_assert(join(&client, cfg.socket_path));
    raw_close(&client);
    end();
}

Test(server, frees_the_path_as_soon_as_it_stops_listening)
{
    raw_client c, late;

    begin();
    cr_assert(join(&c, cfg.socket_path));
    server_stop_listening(srv);
    cr_assert(!raw_connect(&late, cfg.socket_path));
    raw_close(&late);
    cr_assert(ping(&c), "who is in stays in");
    raw_close(&c);
    end();
}

/* ---- a reload ---- */

static void add_tenant(config *c, const char *name)
{
    config_tenant *t = &c->tenants[c->n_tenants++];

    *t = c->tenants[0];
    (void)snprintf(t->name, sizeof t->name, "%s", name);
    (void)snprintf(t->path, sizeof t->path, "%s/%s", dir, name);
    t->mode = 0640;
}

static void take_over(const config *next)
{
    kvs_err err = {0};

    cr_assert_eq(server_prepare(srv, next, false, &err), KVS_OK, "%s", err.msg);
    cfg = *next;
    server_configured(srv);
}

static bool has_ended(void *ud)
{
    raw_client *c = ud;
    frame f;

    (void)raw_poll(c, &f);
    return c->ended;
}

Test(server, opens_and_closes_the_sockets_of_tenants_on_the_way)
{
    static config next, two;
    raw_client c, stays;
    char path[128];
    struct stat st;

    begin();
    cr_assert(join(&stays, cfg.socket_path));
    next = cfg;
    add_tenant(&next, "red");
    (void)snprintf(path, sizeof path, "%s", next.tenants[1].path);
    cr_assert_eq(server_prepare(srv, &next, true, NULL), KVS_OK);
    cr_assert_neq(stat(path, &st), 0, "a dry run makes nothing");
    take_over(&next);
    cr_assert_eq(stat(path, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0640);
    cr_assert(join(&c, path));
    cr_assert_eq(the_core.peers->info.tenant, 1);
    two = next;
    two.tenants[1].gone = true;
    take_over(&two);
    cr_assert_neq(stat(path, &st), 0);
    cr_assert(the_core.peers->dismissed);
    cr_assert(loop_until(&loop, has_ended, &c, 5000), "its client is told to go");
    raw_close(&c);
    cr_assert(ping(&stays));
    take_over(&next); /* and back, at once */
    cr_assert(join(&c, path));
    raw_close(&c);
    take_over(&two);
    raw_close(&stays);
    end();
}

/* What was asked before is answered before the end; what comes later is not read. */
Test(server, a_client_whose_tenant_goes_gets_its_replies_first)
{
    static config next;
    raw_client c;
    frame f;

    begin();
    next = cfg;
    add_tenant(&next, "red");
    take_over(&next);
    cr_assert(join(&c, next.tenants[1].path));
    cr_assert(raw_send(&c, WIRE_LOOKUP, 9, NULL, 0, NULL, 0));
    while (the_core.peers->n_waiting == 0)
        (void)uv_run(&loop, UV_RUN_ONCE);
    next.tenants[1].gone = true;
    take_over(&next);
    cr_assert(raw_send(&c, WIRE_PING, 10, NULL, 0, NULL, 0));
    (void)loop_until(&loop, never, NULL, 20);
    cr_assert(!has_ended(&c));
    cr_assert_eq(the_core.n_requests, 2, "HELLO and LOOKUP");
    fake_release(&the_core);
    cr_assert(loop_until(&loop, try_hello, &c, 5000));
    cr_assert(!c.ended || raw_poll(&c, &f), "the reply came first");
    cr_assert(loop_until(&loop, has_ended, &c, 5000));
    raw_close(&c);
    end();
}

Test(server, a_socket_of_the_service_manager_outlives_its_tenant_and_tells_who_comes)
{
    static config next;
    int fds[2] = {-1, -1};
    listen_socket given;
    raw_client c;

    log_open(LOG_LEVEL_ERROR, false);
    (void)snprintf(dir, sizeof dir, "/tmp/kvs-server-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    config_default(&cfg);
    (void)snprintf(cfg.socket_path, sizeof cfg.socket_path, "%s/s", dir);
    (void)snprintf(cfg.admin_path, sizeof cfg.admin_path, "%s/a", dir);
    add_tenant(&cfg, "red");
    the_core.due_us = UINT64_MAX;
    cr_assert_eq(listen_open(&given, cfg.tenants[1].path, 0600, NULL), KVS_OK);
    fds[1] = dup(given.fd);
    cr_assert_eq(uv_loop_init(&loop), 0);
    cr_assert_eq(mailbox_create(&mail, &loop, NULL), KVS_OK);
    cr_assert_eq(
        server_create(&srv, &(server_config){.loop = &loop, .config = &cfg, .admin_fd = -1, .tenant_fds = fds}, NULL),
        KVS_OK);
    cr_assert_eq(server_start(srv, &the_core, mail, NULL), KVS_OK);
    cr_assert(join(&c, given.path));
    raw_close(&c);
    next = cfg;
    next.tenants[1].gone = true;
    take_over(&next);
    cr_assert(raw_connect(&c, given.path) && raw_send(&c, WIRE_HELLO, 1, NULL, 0, NULL, 0));
    cr_assert(loop_until(&loop, try_hello, &c, 5000));
    cr_assert_eq(the_core.n_peers == 0 || the_core.peers->info.denied[0] != '\0', 1);
    cr_assert(loop_until(&loop, has_ended, &c, 5000));
    raw_close(&c);
    next.tenants[1].gone = false;
    take_over(&next);
    cr_assert(join(&c, given.path));
    raw_close(&c);
    listen_close(&given);
    end();
}

Test(server, what_was_prepared_for_nothing_is_closed_again)
{
    static config next;
    kvs_err err = {0};
    struct stat st;

    begin();
    next = cfg;
    add_tenant(&next, "red");
    add_tenant(&next, "none/blue");
    cr_assert_eq(server_prepare(srv, &next, false, &err), KVS_E_SYS);
    cr_assert_not_null(strstr(err.msg, "tenants.none/blue.path: "), "%s", err.msg);
    cr_assert_neq(stat(next.tenants[1].path, &st), 0);
    (void)snprintf(next.tenants[2].path, sizeof next.tenants[2].path, "%s/s", dir);
    cr_assert_eq(server_prepare(srv, &next, false, &err), KVS_E_BUSY);
    cr_assert_not_null(strstr(err.msg, "is that of tenant default"), "%s", err.msg);
    cr_assert_null(strstr(err.msg, "socket unit"), "it is ours: %s", err.msg);
    end();
}

/* A name and a path as long as they may be. */
static config_tenant *add_long_tenant(config *c, const char *folder)
{
    config_tenant *t = &c->tenants[c->n_tenants];

    add_tenant(c, "n");
    memset(t->name, 'n', sizeof t->name - 1);
    t->name[sizeof t->name - 1] = '\0';
    memset(t->path, 'x', LISTEN_PATH_MAX);
    memcpy(t->path, folder, strlen(folder));
    t->path[strlen(folder)] = '/';
    t->path[LISTEN_PATH_MAX] = '\0';
    return t;
}

/* Symptom: "make it (systemd-tmpfiles --create does, for th". */
Test(server, says_to_its_end_why_a_tenant_cannot_have_its_socket)
{
    static config next;
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), more[8], n = 0;
    const config_tenant *t;
    kvs_err err = {0};
    char says[512];

    begin();
    next = cfg;
    t = add_long_tenant(&next, "/nodir");
    cr_assert_eq(server_prepare(srv, &next, false, &err), KVS_E_SYS);
    (void)snprintf(says, sizeof says,
                   "tenants.%s.path: folder of socket %s: No such file or directory; make it, and let user %u make "
                   "files in it",
                   t->name, t->path, (unsigned)geteuid());
    cr_assert_str_eq(err.msg, says);
    next = cfg;
    t = add_long_tenant(&next, dir);
    memcpy(a.sun_path, t->path, strlen(t->path));
    cr_assert(bind(fd, (const struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 0) == 0);
    do
        more[n] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    while (connect(more[n++], (const struct sockaddr *)&a, sizeof a) == 0 && n < 8);
    cr_assert_eq(server_prepare(srv, &next, false, &err), KVS_E_BUSY);
    (void)snprintf(says, sizeof says,
                   "tenants.%s.path: socket %s: another program is listening there, backlog full (a socket unit hands "
                   "it over at a restart)",
                   t->name, t->path);
    cr_assert_str_eq(err.msg, says);
    while (n > 0)
        (void)close(more[--n]);
    (void)close(fd);
    cr_assert_eq(unlink(t->path), 0);
    end();
}
