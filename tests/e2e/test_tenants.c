/* Two tenants of the real daemon, on two sockets, as two real users. */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/persist.h"
#include "proto/client/kvstride.h"
#include "proto/ctl/clock.h"
#include "tests/support/daemon_fixture.h"
#include "tests/support/raw_client.h"

enum { BLUE = 70001, RED = 70002, NOBODY_HERE = 70003, GREEN = 70004, TOKENS = 16, LAYERS = 16, SLOTS = 8, MINE = 4 };
#define SLOT_BYTES (TOKENS * LAYERS * 1152) /* 294,912 */

/* In a child process there is no test runner: it says why and ends. */
#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            (void)fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #cond, err.msg);                              \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

static kvs_err err;
static daemon_fixture d;
static char blue[128], red[128];

/* What the first child leaves for the second to try. */
typedef struct loot {
    uint32_t ns;
    uint8_t token[16];
    kvs_lease lease;
} loot;
static loot *shared;

typedef struct engine {
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region;
    kvs_slot slots[SLOTS];
    uint8_t *base;
    kvs_region_info info;
} engine;

static kvs_status open_client(kvs_client **ret, const char *path)
{
    kvs_options o = KVS_OPTIONS_INIT;

    o.path = path;
    o.timeout_ms = 10000;
    return kvs_connect(ret, &o, &err);
}

static kvs_status open_model(kvs_client *c, kvs_ns **ret)
{
    static kvs_plane planes[LAYERS];
    kvs_namespace desc;
    kvs_status s = kvs_namespace_mla("m", "r", KVS_FORMAT_mla_bf16, LAYERS, TOKENS, planes, &desc, &err);

    return s == KVS_OK ? kvs_open(c, &desc, ret, 0, &err) : s;
}

static void engine_open(engine *e, const char *path)
{
    uint64_t bytes;
    void *base;

    *e = (engine){0};
    CHECK(open_client(&e->c, path) == KVS_OK);
    CHECK(open_model(e->c, &e->ns) == KVS_OK);
    CHECK(kvs_region_create(e->ns, 0, SLOTS, &e->region, 0, &err) == KVS_OK);
    CHECK(kvs_region_map(e->region, &base, &bytes, &err) == KVS_OK);
    e->base = base;
    kvs_region_get(e->region, &e->info);
    CHECK(kvs_slot_take(e->region, 1, e->slots, 0, &err) == KVS_OK);
}

static void key_of(uint8_t key[32], uint32_t id)
{
    memset(key, 0x5a, 32);
    memcpy(key, &id, sizeof id);
}

static kvs_status store_one(engine *e, uint32_t id)
{
    kvs_status result = KVS_OK, s;
    uint8_t key[32];
    kvs_store_args a = {.ns = e->ns, .region = e->region, .n = 1, .keys = key, .slots = e->slots, .results = &result};

    key_of(key, id);
    memset(e->base + e->slots[0].slot * e->info.slot_stride, (int)(id & 0xff), SLOT_BYTES);
    s = kvs_store(&a, 0, &err);
    return s == KVS_E_PARTIAL ? result : s;
}

static kvs_status load_one(engine *e, uint32_t id)
{
    uint8_t key[32], *at = e->base + e->slots[0].slot * e->info.slot_stride;
    kvs_load_result result = {0};
    kvs_load_args a = {.ns = e->ns, .region = e->region, .n = 1, .keys = key, .slots = e->slots, .results = &result};
    kvs_status s;

    key_of(key, id);
    memset(at, 0xee, SLOT_BYTES);
    s = kvs_load(&a, 0, &err);
    for (uint32_t i = 0; s == KVS_OK && i < SLOT_BYTES; i++)
        CHECK(at[i] == (uint8_t)id);
    return s == KVS_E_PARTIAL ? result.status : s;
}

static uint32_t hits(kvs_ns *ns, uint32_t first, uint32_t n)
{
    uint32_t sum = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint8_t key[32], state = 9;
        uint32_t hit = 0;

        key_of(key, first + i);
        CHECK(kvs_lookup(ns, key, 1, &hit, &state, 0, &err) == KVS_OK);
        CHECK(hit == (state == KVS_KEY_READY));
        sum += hit;
    }
    return sum;
}

/* ---- processes ---- */

typedef struct child {
    pid_t pid;
    int said, go; /* pipes from it and to it */
} child;

static int said_fd, go_fd; /* the child's own ends */

/* Between two steps of a child: the parent goes on, and says when. */
static void pause_child(void)
{
    char b = 'x';

    CHECK(write(said_fd, &b, 1) == 1);
    CHECK(read(go_fd, &b, 1) == 1);
}

static child start_child(uid_t uid, void (*f)(void))
{
    int said[2], go[2];
    child c = {0};

    cr_assert(pipe(said) == 0 && pipe(go) == 0);
    c.pid = fork();
    cr_assert_geq(c.pid, 0);
    if (c.pid == 0) {
        (void)alarm(30);
        said_fd = said[1];
        go_fd = go[0];
        (void)close(said[0]);
        (void)close(go[1]);
        CHECK(setgid(uid) == 0 && setuid(uid) == 0);
        f();
        _exit(0);
    }
    (void)close(said[1]);
    (void)close(go[0]);
    c.said = said[0];
    c.go = go[1];
    return c;
}

static void wait_pause(const child *c)
{
    char b;

    cr_assert_eq(read(c->said, &b, 1), 1, "the child has ended");
}

static void finish_child(child *c)
{
    int status = -1;

    (void)!write(c->go, "x", 1);
    cr_assert_eq(waitpid(c->pid, &status, 0), c->pid);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status 0x%x", (unsigned)status);
    (void)close(c->said);
    (void)close(c->go);
}

static void run_child(uid_t uid, void (*f)(void))
{
    child c = start_child(uid, f);

    finish_child(&c);
}

static void configure(char *text, size_t cap, const char *of_blue, const char *of_red)
{
    (void)snprintf(text, cap,
                   "{\"pool\": {\"max_bytes\": \"8MiB\", \"extent_bytes\": \"8MiB\"}, \"device\": {\"kind\": \"cpu\"},"
                   "\"tenants\": [{\"name\": \"blue\", \"path\": \"%s\", \"mode\": \"0666\", \"uids\": [%d]%s},"
                   "{\"name\": \"red\", \"path\": \"%s\", \"mode\": \"0666\", \"uids\": [%d]%s}]}",
                   blue, BLUE, of_blue, red, RED, of_red);
}

static void begin(const char *of_blue, const char *of_red)
{
    char text[2048];

    if (getuid() != 0)
        cr_skip_test("needs root to become two other users");
    (void)signal(SIGPIPE, SIG_IGN);
    daemon_init(&d);
    (void)snprintf(blue, sizeof blue, "%s/blue.sock", d.dir);
    (void)snprintf(red, sizeof red, "%s/red.sock", d.dir);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    cr_assert_neq(shared, MAP_FAILED);
    cr_assert_eq(chmod(d.dir, 0755), 0);
    configure(text, sizeof text, of_blue, of_red);
    cr_assert(daemon_start(&d, text));
}

static void end(void)
{
    kvs_report_args a = {.section = KVS_SECTION_FSCK, .ns = KVS_ALL};
    kvs_client *admin = NULL;
    char *text = NULL;
    size_t len;

    cr_assert_eq(open_client(&admin, d.admin), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_report_alloc(admin, &a, &text, &len, 0, &err), KVS_OK);
    cr_assert_not_null(strstr(text, "\"ok\":true"), "%s", text);
    kvs_free(text);
    kvs_close(admin);
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    daemon_fini(&d);
    (void)munmap(shared, sizeof *shared);
}

/* ---- who comes in ---- */

static void comes_in_by_blue_only(void)
{
    kvs_client *c = NULL;

    CHECK(open_client(&c, blue) == KVS_OK);
    kvs_close(c);
    CHECK(open_client(&c, red) == KVS_E_DENIED);
    CHECK(strstr(err.msg, "uid 70001 is not in tenants.red.uids") != NULL);
    CHECK(open_client(&c, d.admin) != KVS_OK);
}

static void comes_in_nowhere(void)
{
    kvs_client *c = NULL;

    CHECK(open_client(&c, blue) == KVS_E_DENIED);
    CHECK(open_client(&c, red) == KVS_E_DENIED);
}

Test(tenants_e2e, a_user_comes_in_by_its_own_socket_only)
{
    begin("", "");
    run_child(BLUE, comes_in_by_blue_only);
    cr_assert_eq(daemon_log_count(&d, "client_denied reason=uid socket=red uid=70001"), 1);
    run_child(NOBODY_HERE, comes_in_nowhere);
    cr_assert_eq(daemon_log_count(&d, "client_denied"), 3, "one line each");
    cr_assert_eq(daemon_log_count(&d, "client_dropped"), 0);
    end();
}

/* Those who may not come in are told so and do not take the places of those who may. */
static void holds_many_connections(void)
{
    raw_client c[64];

    for (unsigned i = 0; i < 64; i++)
        CHECK(raw_connect(&c[i], blue)); /* and says nothing */
    pause_child();
}

static void comes_in_by_blue(void)
{
    kvs_client *c = NULL;

    CHECK(open_client(&c, blue) == KVS_OK);
    kvs_close(c);
}

Test(tenants_e2e, strangers_do_not_take_the_places_of_a_tenant)
{
    child stranger;

    begin("", "");
    stranger = start_child(NOBODY_HERE, holds_many_connections);
    wait_pause(&stranger);
    run_child(BLUE, comes_in_by_blue);
    finish_child(&stranger);
    end();
}

/* ---- reading, mapping, finding ---- */

static void stores_and_keeps(void)
{
    engine e;
    kvs_ns_info info;
    uint8_t keys[MINE * 32];
    kvs_reserve_args r = {.ns = &e.ns, .n_ns = 1, .n = MINE, .keys = keys, .max_loads = 9, .ttl_ms = 60000};

    engine_open(&e, blue);
    for (uint32_t i = 0; i < MINE; i++) {
        CHECK(store_one(&e, i + 1) == KVS_OK);
        key_of(keys + (size_t)i * 32, i + 1);
    }
    kvs_ns_get(e.ns, &info);
    shared->ns = info.id;
    memcpy(shared->token, e.info.token, sizeof shared->token);
    CHECK(kvs_reserve(&r, &shared->lease, 0, &err) == KVS_OK && shared->lease.n_leased == MINE);
    pause_child();
    CHECK(hits(e.ns, 1, MINE) == MINE);
    CHECK(kvs_release(e.c, &shared->lease, 0, &err) == KVS_OK);
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(load_one(&e, i + 1) == KVS_OK);
    kvs_close(e.c);
}

/* Of another's namespace and of one that nobody has, the daemon says the same. */
static void looks_the_same_as_unknown(kvs_client *c, uint32_t foreign)
{
    char text[2][KVS_ERR_MSG_BYTES], number[16];
    uint32_t ids[2] = {foreign, 4000}, hit;
    uint8_t key[32];
    kvs_ns *ns;

    key_of(key, 1);
    for (int i = 0; i < 2; i++) {
        char *at;

        CHECK(kvs_open_id(c, ids[i], &ns, &err) == KVS_OK);
        CHECK(kvs_lookup(ns, key, 1, &hit, NULL, 0, &err) == KVS_E_NOT_FOUND);
        (void)snprintf(text[i], sizeof text[i], "%s", err.msg);
        (void)snprintf(number, sizeof number, " %u ", ids[i]);
        CHECK((at = strstr(text[i], number)) != NULL);
        memmove(at, at + strlen(number), strlen(at + strlen(number)) + 1);
        CHECK(kvs_pin(ns, key, 1, NULL, 0, &err) == KVS_E_NOT_FOUND);
        CHECK(kvs_drop(ns, key, 1, NULL, 0, &err) == KVS_E_NOT_FOUND);
        CHECK(kvs_reset(c, ns, 0, NULL, 0, &err) == KVS_E_NOT_FOUND);
    }
    CHECK(strcmp(text[0], text[1]) == 0);
}

static void tries_the_tokens(engine *e)
{
    uint8_t other[16] = {1, 2, 3};
    kvs_region *r = NULL;
    kvs_load_result result;
    kvs_load_args a = {
        .ns = e->ns, .region = e->region, .n = 1, .lease = &shared->lease, .slots = e->slots, .results = &result};

    CHECK(kvs_region_attach(e->c, e->ns, shared->token, &r, 0, &err) == KVS_E_NOT_FOUND);
    CHECK(kvs_region_attach(e->c, e->ns, other, &r, 0, &err) == KVS_E_NOT_FOUND);
    CHECK(kvs_load(&a, 0, &err) == KVS_E_NOT_FOUND);
    CHECK(kvs_release(e->c, &shared->lease, 0, &err) == KVS_E_NOT_FOUND);
}

static void tries_everything(void)
{
    static const uint32_t SECTIONS[] = {KVS_SECTION_CLIENTS,    KVS_SECTION_LEASES, KVS_SECTION_KEYS,
                                        KVS_SECTION_NAMESPACES, KVS_SECTION_FSCK,   KVS_SECTION_TENANTS};
    kvs_report_args summary = {.section = KVS_SECTION_SUMMARY, .ns = KVS_ALL};
    kvs_reset_result reset;
    kvs_event events[16];
    uint32_t n = 0;
    uint64_t lost = 0;
    char *text = NULL;
    size_t len;
    engine e;

    engine_open(&e, red);
    CHECK(kvs_watch(e.c, UINT32_C(1) << KVS_EVENT_STORED, 0, &err) == KVS_OK);
    CHECK(hits(e.ns, 1, MINE) == 0);
    CHECK(load_one(&e, 1) == KVS_E_NOT_FOUND);
    looks_the_same_as_unknown(e.c, shared->ns);
    tries_the_tokens(&e);
    for (size_t i = 0; i < sizeof SECTIONS / sizeof SECTIONS[0]; i++) {
        kvs_report_args a = {.section = SECTIONS[i], .ns = KVS_ALL};

        CHECK(kvs_report_alloc(e.c, &a, &text, &len, 0, &err) == KVS_E_DENIED);
    }
    CHECK(kvs_report_alloc(e.c, &summary, &text, &len, 0, &err) == KVS_OK);
    CHECK(strstr(text, "\"tenant\":\"red\"") != NULL && strstr(text, "\"stored\":0") != NULL);
    CHECK(strstr(text, "blue") == NULL && strstr(text, "\"pool\"") == NULL);
    kvs_free(text);
    /* A key that the other has is stored anew: nothing says that it was there. */
    CHECK(store_one(&e, 1) == KVS_OK);
    CHECK(hits(e.ns, 1, MINE) == 1);
    CHECK(kvs_reset(e.c, NULL, KVS_RESET_PINNED, &reset, 0, &err) == KVS_OK);
    CHECK(reset.dropped == 1 && reset.leases == 0);
    CHECK(kvs_events(e.c, events, 16, &n, &lost, 1000, &err) == KVS_OK);
    for (uint32_t i = 0; i < n; i++)
        CHECK(events[i].ns != shared->ns);
    kvs_close(e.c);
}

Test(tenants_e2e, one_can_neither_find_nor_read_nor_map_nor_drop_what_the_other_has)
{
    child keeper;

    begin("", "");
    keeper = start_child(BLUE, stores_and_keeps);
    wait_pause(&keeper);
    run_child(RED, tries_everything);
    finish_child(&keeper);
    end();
}

/* ---- space ---- */

static void stores_its_floor(void)
{
    engine e;

    engine_open(&e, blue);
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(store_one(&e, i + 1) == KVS_OK);
    pause_child();
    CHECK(hits(e.ns, 1, MINE) == MINE);
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(load_one(&e, i + 1) == KVS_OK);
    /* And more than that, though the other has filled the pool. */
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(store_one(&e, 100 + i) == KVS_OK);
    kvs_close(e.c);
}

static void stores_all_it_can(void)
{
    engine e;

    engine_open(&e, red);
    for (uint32_t i = 0; i < 120; i++)
        CHECK(store_one(&e, 1000 + i) == KVS_OK);
    shared->ns = hits(e.ns, 1000, 120);
    kvs_close(e.c);
}

Test(tenants_e2e, one_does_not_evict_the_other_below_its_floor)
{
    child keeper;

    begin(", \"floor_bytes\": 1179648", ""); /* MINE blocks */
    keeper = start_child(BLUE, stores_its_floor);
    wait_pause(&keeper);
    run_child(RED, stores_all_it_can);
    cr_assert_eq(shared->ns, (8 << 20) / SLOT_BYTES - MINE, "all of the pool but that floor");
    finish_child(&keeper);
    end();
}

Test(tenants_e2e, one_does_not_have_more_than_its_quota)
{
    child keeper;

    begin("", ", \"quota_bytes\": 2949120"); /* 10 blocks */
    keeper = start_child(BLUE, stores_its_floor);
    wait_pause(&keeper);
    run_child(RED, stores_all_it_can);
    cr_assert_eq(shared->ns, 10);
    finish_child(&keeper);
    end();
}

/* ---- ops ---- */

static void may_look_but_not_reset(void)
{
    uint8_t key[32];
    engine e;

    engine_open(&e, blue);
    key_of(key, 1);
    CHECK(store_one(&e, 1) == KVS_OK);
    CHECK(kvs_pin(e.ns, key, 1, NULL, 0, &err) == KVS_E_DENIED);
    CHECK(strstr(err.msg, "PIN is not allowed to tenant blue") != NULL);
    CHECK(kvs_drop(e.ns, key, 1, NULL, 0, &err) == KVS_E_DENIED);
    CHECK(kvs_reset(e.c, NULL, 0, NULL, 0, &err) == KVS_E_DENIED);
    CHECK(kvs_ping(e.c, 0, &err) == KVS_OK);
    kvs_close(e.c);
}

Test(tenants_e2e, a_tenant_may_ask_only_for_what_it_was_allowed)
{
    begin(", \"ops\": [\"cache\"]", "");
    run_child(BLUE, may_look_but_not_reset);
    end();
}

/* ---- reload ---- */

/* The text of the answer, or the reason in err. */
static kvs_status ask_reload(bool dry_run, char *buf, size_t cap)
{
    kvs_client *admin = NULL;
    char *text = NULL;
    kvs_status s;

    cr_assert_eq(open_client(&admin, d.admin), KVS_OK, "%s", err.msg);
    s = kvs_reload_alloc(admin, dry_run, &text, NULL, 0, &err);
    if (s == KVS_OK)
        (void)snprintf(buf, cap, "%s", text);
    kvs_free(text);
    kvs_close(admin);
    return s;
}

static bool status_says(uint32_t section, const char *text)
{
    kvs_report_args a = {.section = section, .ns = KVS_ALL};
    kvs_client *admin = NULL;
    char *all = NULL;
    bool found;

    cr_assert_eq(open_client(&admin, d.admin), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_report_alloc(admin, &a, &all, NULL, 0, &err), KVS_OK, "%s", err.msg);
    found = strstr(all, text) != NULL;
    if (!found)
        (void)snprintf(err.msg, sizeof err.msg, "%.180s", all);
    kvs_free(all);
    kvs_close(admin);
    return found;
}

/* Soon: who has just left is counted until its end has been seen. */
static void status_has(uint32_t section, const char *text)
{
    const uint64_t end = clock_ns() + 5000000000u;
    bool says;

    do
        says = status_says(section, text);
    while (!says && clock_ns() < end && usleep(5000) == 0);
    cr_assert(says, "%s is not in %s", text, err.msg);
}

static void reconfigure(const char *of_blue, const char *of_red)
{
    char text[2048];

    configure(text, sizeof text, of_blue, of_red);
    daemon_configure(&d, text);
}

/* A tenant in a file; two at a time. */
static const char *entry(int which, const char *name, int uid, const char *more)
{
    static char text[2][512];

    (void)snprintf(text[which], sizeof text[which],
                   "{\"name\": \"%s\", \"path\": \"%s/%s.sock\", \"mode\": \"0666\", \"uids\": [%d]%s}", name, d.dir,
                   name, uid, more);
    return text[which];
}

__attribute__((format(printf, 1, 2))) static void of_tenants(const char *fmt, ...)
{
    char text[4096] = "{\"pool\": {\"max_bytes\": \"8MiB\", \"extent_bytes\": \"8MiB\"}, \"device\": {\"kind\": "
                      "\"cpu\"}, \"tenants\": [";
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(text + strlen(text), sizeof text - strlen(text) - 2, fmt, ap);
    va_end(ap);
    (void)strcat(text, "]}");
    daemon_configure(&d, text);
}

static void stores_past_a_quota_that_comes(void)
{
    engine e;

    engine_open(&e, red);
    for (uint32_t i = 0; i < 20; i++)
        CHECK(store_one(&e, 1000 + i) == KVS_OK);
    CHECK(hits(e.ns, 1000, 20) == 20);
    pause_child();
    CHECK(store_one(&e, 2000) == KVS_OK);
    CHECK(hits(e.ns, 1000, 20) == 4 && hits(e.ns, 2000, 1) == 1);
    kvs_close(e.c);
}

Test(tenants_e2e, a_reload_changes_a_quota_while_clients_work)
{
    char text[4096];
    child worker;

    begin("", "");
    worker = start_child(RED, stores_past_a_quota_that_comes);
    wait_pause(&worker);
    reconfigure("", ", \"quota_bytes\": 1474560"); /* 5 blocks */
    cr_assert_eq(ask_reload(true, text, sizeof text), KVS_OK, "%s", err.msg);
    cr_assert_not_null(
        strstr(text, "\"applied\":[{\"key\":\"tenants.red.quota_bytes\",\"from\":\"0\",\"to\":\"1440KiB\"}]"), "%s",
        text);
    status_has(KVS_SECTION_TENANTS, "\"tenant\":\"red\",\"clients\":1,\"used_bytes\":5898240,\"quota_bytes\":null");
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    status_has(KVS_SECTION_TENANTS, "\"used_bytes\":1474560,\"quota_bytes\":1474560");
    status_has(KVS_SECTION_SUMMARY, "\"reloads\":1,\"reloads_failed\":0,\"reload_error\":null");
    finish_child(&worker);
    end();
}

Test(tenants_e2e, a_bad_file_changes_nothing_and_is_counted)
{
    char text[4096];

    begin("", ", \"quota_bytes\": 2949120");
    reconfigure("", ", \"quota_bytes\": 4096, \"floor_bytes\": 8192");
    cr_assert_eq(ask_reload(true, text, sizeof text), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg, "tenants.red.floor_bytes: 8KiB is more than its quota_bytes, 4KiB"), "%s",
                       err.msg);
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_E_CONFIG);
    cr_assert_eq(daemon_log_count(&d, "reload_refused"), 1);
    status_has(KVS_SECTION_TENANTS, "\"quota_bytes\":2949120");
    status_has(KVS_SECTION_SUMMARY, "\"reloads\":1,\"reloads_failed\":1,\"reload_error\":\"");
    daemon_configure(&d, "{");
    cr_assert_eq(kill(d.pid, SIGHUP), 0);
    cr_assert(daemon_wait_log(&d, "reload_refused", 2, 5000));
    status_has(KVS_SECTION_SUMMARY, "\"reloads\":2,\"reloads_failed\":2");
    end();
}

static void is_thrown_out(void)
{
    raw_client c;

    CHECK(raw_connect(&c, blue) && raw_hello(&c));
    pause_child();
    CHECK(raw_wait_end(&c, 5000));
    CHECK(raw_connect(&c, blue) && !raw_hello(&c));
}

Test(tenants_e2e, a_user_taken_off_the_list_goes)
{
    char text[4096];
    child user;

    begin("", "");
    user = start_child(BLUE, is_thrown_out);
    wait_pause(&user);
    of_tenants("%s", entry(0, "blue", NOBODY_HERE, ""));
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    cr_assert_not_null(strstr(text, "{\"key\":\"tenants.blue.uids\",\"from\":\"[70001]\",\"to\":\"[70003]\"}"), "%s",
                       text);
    finish_child(&user);
    end();
}

/* ---- tenants come and go ---- */

static char green[128];

static void stores_for_later(void)
{
    engine e;

    engine_open(&e, blue);
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(store_one(&e, i + 1) == KVS_OK);
    kvs_close(e.c);
}

static void finds_what_it_stored(void)
{
    engine e;

    engine_open(&e, blue);
    CHECK(hits(e.ns, 1, MINE) == MINE);
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(load_one(&e, i + 1) == KVS_OK);
    kvs_close(e.c);
}

static void has_much_and_is_removed(void)
{
    kvs_mark never = {4, 0, 10};
    kvs_load_result result = {0};
    uint8_t keys[MINE * 32];
    kvs_load_args a = {.n = 1, .keys = keys, .after = &never, .results = &result};
    kvs_reserve_args r = {.n_ns = 1, .n = MINE, .keys = keys, .max_loads = 9, .ttl_ms = 60000};
    kvs_lease lease;
    kvs_request *q = NULL;
    engine e;

    engine_open(&e, red);
    for (uint32_t i = 0; i < MINE; i++) {
        CHECK(store_one(&e, i + 1) == KVS_OK);
        key_of(keys + (size_t)i * 32, i + 1);
    }
    CHECK(kvs_pin(e.ns, keys, 2, NULL, 0, &err) == KVS_OK);
    r.ns = &e.ns;
    CHECK(kvs_reserve(&r, &lease, 0, &err) == KVS_OK && lease.n_leased == MINE);
    a.ns = e.ns;
    a.region = e.region;
    a.slots = e.slots;
    CHECK(kvs_submit_load(&a, &q, 20000, &err) == KVS_OK);
    pause_child();
    /* What waited is answered, not cut off; then the daemon is away, and stays so. */
    CHECK(kvs_wait(q, 5000, &err) == KVS_OK && result.status == KVS_E_CANCELLED);
    CHECK(kvs_ping(e.c, 500, &err) == KVS_E_AWAY);
    kvs_close(e.c);
}

static void is_new_here(void)
{
    engine e;

    engine_open(&e, green);
    CHECK(hits(e.ns, 1, MINE) == 0);
    CHECK(store_one(&e, 7) == KVS_OK);
    CHECK(load_one(&e, 7) == KVS_OK);
    kvs_close(e.c);
}

static void comes_back_to_nothing(void)
{
    engine e;

    engine_open(&e, red);
    CHECK(hits(e.ns, 1, MINE) == 0);
    CHECK(store_one(&e, 1) == KVS_OK);
    kvs_close(e.c);
}

static bool is_there(const char *path, const char *suffix)
{
    char name[160];

    (void)snprintf(name, sizeof name, "%s%s", path, suffix);
    return access(name, F_OK) == 0;
}

static void begin_with_three_paths(void)
{
    begin("", "");
    (void)snprintf(green, sizeof green, "%s/green.sock", d.dir);
}

Test(tenants_e2e, a_reload_lets_a_new_tenant_in_and_puts_another_out_with_all_it_had)
{
    char text[4096];
    child old;

    begin_with_three_paths();
    old = start_child(RED, has_much_and_is_removed);
    wait_pause(&old);
    run_child(BLUE, stores_for_later);
    of_tenants("%s,%s", entry(0, "green", GREEN, ", \"quota_bytes\": 2949120"), entry(1, "blue", BLUE, ""));
    cr_assert_eq(ask_reload(true, text, sizeof text), KVS_OK, "%s", err.msg);
    cr_assert_not_null(strstr(text, "\"needs_restart\":[]"), "%s", text);
    cr_assert(is_there(red, "") && !is_there(green, ""), "a dry run opens and closes nothing");
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    cr_assert_not_null(strstr(text, "{\"key\":\"tenants.red\",\"from\":\"there\",\"to\":\"gone\"}"), "%s", text);
    cr_assert_not_null(strstr(text, "{\"key\":\"tenants.green\",\"from\":\"not there\",\"to\":\"there\"}"), "%s", text);
    cr_assert(!is_there(red, "") && !is_there(red, ".lock") && is_there(green, ""));
    run_child(GREEN, is_new_here);
    finish_child(&old);
    run_child(BLUE, finds_what_it_stored);
    cr_assert(daemon_wait_log(&d, "client_dropped reason=tenant_removed", 1, 5000));
    cr_assert_eq(daemon_log_count(&d, "tenant_emptied tenant=red blocks=4 unfinished=0 leases=1"), 1);
    status_has(KVS_SECTION_TENANTS, "\"tenant\":\"red\",\"clients\":0,\"used_bytes\":0,\"quota_bytes\":null,"
                                    "\"floor_bytes\":0,\"pinned_bytes\":0,\"leased_bytes\":0,\"region_bytes\":0");
    status_has(KVS_SECTION_TENANTS, "\"removed\":true");
    reconfigure("", "");
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    cr_assert(is_there(red, "") && !is_there(green, ""));
    run_child(RED, comes_back_to_nothing);
    end();
    cr_assert(!is_there(red, "") && !is_there(green, ""));
}

/* Whatever becomes of the others, this one works. */
static void works_on(void)
{
    engine e;
    char go = 0;

    engine_open(&e, blue);
    (void)fcntl(go_fd, F_SETFL, O_NONBLOCK);
    CHECK(write(said_fd, "x", 1) == 1);
    for (uint32_t i = 0; read(go_fd, &go, 1) != 1; i = (i + 1) % 8) {
        kvs_status s = store_one(&e, i + 1);

        CHECK(s == KVS_OK || s == KVS_E_EXISTS);
        CHECK(load_one(&e, i + 1) == KVS_OK);
    }
    kvs_close(e.c);
}

/* This one is put out again and again, in the middle of whatever it does, and comes back. */
static void comes_and_goes(void)
{
    char go = 0;

    (void)fcntl(go_fd, F_SETFL, O_NONBLOCK);
    CHECK(write(said_fd, "x", 1) == 1);
    for (uint32_t i = 0; read(go_fd, &go, 1) != 1; i++) {
        kvs_options o = KVS_OPTIONS_INIT;
        kvs_region *region = NULL;
        kvs_slot slots[4];
        kvs_client *c;
        kvs_ns *ns;
        uint8_t keys[4 * 32];
        bool good;

        o.path = red;
        o.timeout_ms = 200;
        good = kvs_connect(&c, &o, NULL) == KVS_OK;
        if (!good)
            continue;
        good = open_model(c, &ns) == KVS_OK && kvs_region_create(ns, 0, 4, &region, 500, NULL) == KVS_OK &&
               kvs_slot_take(region, 4, slots, 500, NULL) == KVS_OK;
        for (uint32_t k = 0; good && k < 40; k++) {
            kvs_store_args a = {.ns = ns, .region = region, .n = 4, .keys = keys, .slots = slots};
            kvs_status results[4];

            for (uint32_t n = 0; n < 4; n++)
                key_of(keys + (size_t)n * 32, 4 * k + n);
            a.results = results;
            good = kvs_store(&a, 500, NULL) == KVS_OK && kvs_pin(ns, keys, 1, NULL, 500, NULL) == KVS_OK;
        }
        kvs_close(c);
    }
}

Test(tenants_e2e, others_come_and_go_under_load_and_leave_nothing)
{
    enum { ROUNDS = 60 };
    static const char FLOOR[] = ", \"floor_bytes\": 2359296"; /* the eight blocks that it uses */
    char text[4096];
    child worker, guest;
    unsigned fds;

    begin_with_three_paths();
    of_tenants("%s", entry(1, "blue", BLUE, FLOOR));
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    fds = daemon_fds(&d);
    worker = start_child(BLUE, works_on);
    guest = start_child(RED, comes_and_goes);
    wait_pause(&worker);
    wait_pause(&guest);
    for (unsigned i = 0; i < ROUNDS; i++) {
        if (i % 2 == 0)
            of_tenants("%s,%s", entry(0, "red", RED, i % 4 == 0 ? "" : ", \"quota_bytes\": 2949120"),
                       entry(1, "blue", BLUE, FLOOR));
        else
            of_tenants("%s", entry(1, "blue", BLUE, FLOOR));
        cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
        cr_assert_eq(is_there(red, ""), i % 2 == 0);
        (void)usleep(i % 2 == 0 ? 20000 : 2000); /* some work gets done */
    }
    finish_child(&worker);
    finish_child(&guest);
    cr_assert(daemon_wait_fds(&d, fds, 5000), "descriptors are left");
    cr_assert_gt(daemon_log_count(&d, "tenant_emptied tenant=red"), 0, "the guest never had anything");
    status_has(KVS_SECTION_TENANTS, "\"tenant\":\"red\",\"clients\":0,\"used_bytes\":0,");
    end();
}

Test(tenants_e2e, a_new_tenant_without_a_free_path_is_refused_with_all_that_came_with_it)
{
    static const struct {
        const char *path, *says;
    } BAD[] = {
        {"/nonexistent-folder/x.sock", "tenants.bad.path: "},
        {"%s/config.json", "the path exists and is no socket"},
        {"%s/red.sock", "is that of tenant red until another reload has taken it out"},
    };
    char text[4096], path[160], more[256];

    begin_with_three_paths();
    for (size_t i = 0; i < 2 * sizeof BAD / sizeof BAD[0]; i++) {
        bool dry_run = i % 2 == 0;

        (void)snprintf(path, sizeof path, BAD[i / 2].path, d.dir);
        (void)snprintf(more, sizeof more, "{\"name\": \"bad\", \"path\": \"%s\"}", path);
        of_tenants("%s,%s,%s", entry(0, "green", GREEN, ""), more,
                   entry(1, "blue", BLUE, ", \"quota_bytes\": 4194304"));
        cr_assert_neq(ask_reload(dry_run, text, sizeof text), KVS_OK, "%s", text);
        cr_assert_not_null(strstr(err.msg, BAD[i / 2].says), "%s", err.msg);
        cr_assert(is_there(red, "") && !is_there(green, "") && !is_there(green, ".lock"), "as before");
        cr_assert_not(status_says(KVS_SECTION_TENANTS, "\"quota_bytes\":4194304"));
    }
    run_child(RED, comes_back_to_nothing);
    end();
}

/* ---- drain ---- */

static void works_until_drained(void)
{
    kvs_client *other = NULL;
    engine e;

    engine_open(&e, red);
    CHECK(store_one(&e, 1) == KVS_OK);
    pause_child();
    CHECK(store_one(&e, 2) == KVS_E_STATE);
    CHECK(strstr(err.msg, "the operator has drained the daemon") != NULL);
    CHECK(open_client(&other, red) == KVS_OK);
    CHECK(kvs_ping(other, 0, &err) == KVS_OK);
    kvs_close(other);
    CHECK(kvs_slot_drop(e.region, e.slots, 1, NULL, NULL, 0, &err) == KVS_OK);
    pause_child();
    CHECK(kvs_slot_take(e.region, 1, e.slots, 0, &err) == KVS_OK);
    CHECK(load_one(&e, 1) == KVS_OK);
    kvs_close(e.c);
}

static void drain(bool on)
{
    kvs_client *admin = NULL;
    kvs_health_info h;

    cr_assert_eq(open_client(&admin, d.admin), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_drain(admin, on, 0, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_health(admin, &h, 0, &err), KVS_OK);
    cr_assert_eq(h.state, on ? KVS_HEALTH_DRAINING : KVS_HEALTH_OK);
    kvs_close(admin);
}

Test(tenants_e2e, a_drained_daemon_takes_no_work_until_told_so)
{
    child worker;

    begin("", "");
    worker = start_child(RED, works_until_drained);
    wait_pause(&worker);
    drain(true);
    status_has(KVS_SECTION_SUMMARY, "\"drained\":true");
    cr_assert_eq(write(worker.go, "x", 1), 1);
    wait_pause(&worker);
    drain(false);
    finish_child(&worker);
    end();
}

static void asks_for_what_operators_do(void)
{
    kvs_client *c = NULL;
    char *text = NULL;

    CHECK(open_client(&c, blue) == KVS_OK);
    CHECK(kvs_reload_alloc(c, true, &text, NULL, 0, &err) == KVS_E_DENIED);
    CHECK(kvs_drain(c, true, 0, &err) == KVS_E_DENIED);
    CHECK(kvs_ping(c, 0, &err) == KVS_OK);
    kvs_close(c);
}

Test(tenants_e2e, admin_verbs_are_refused_on_a_tenants_socket)
{
    begin("", "");
    run_child(BLUE, asks_for_what_operators_do);
    end();
}

/* ---- the pool gets another size ---- */

static void fills_pools_of_three_sizes(void)
{
    engine e;

    engine_open(&e, red);
    for (uint32_t i = 0; i < 200; i++)
        CHECK(store_one(&e, 1000 + i) == KVS_OK);
    CHECK(hits(e.ns, 1000, 200) == 3 * 14); /* of 4 MiB, 14 an extent */
    pause_child();
    for (uint32_t i = 0; i < 200; i++)
        CHECK(store_one(&e, 2000 + i) == KVS_OK);
    CHECK(hits(e.ns, 2000, 200) == 12 * 14);
    pause_child();
    CHECK(hits(e.ns, 2000, 200) == 2 * 14);
    for (uint32_t i = 0; i < 200; i++)
        CHECK(store_one(&e, 3000 + i) == KVS_OK);
    CHECK(hits(e.ns, 3000, 200) == 2 * 14);
    CHECK(load_one(&e, 3199) == KVS_OK);
    kvs_close(e.c);
}

static void pool_of(const char *bytes, const char *of_blue)
{
    char text[2048], both[2048], *at;

    configure(both, sizeof both, of_blue, "");
    at = strstr(both, "\"tenants\"");
    (void)snprintf(
        text, sizeof text,
        "{\"pool\": {\"max_bytes\": \"%s\", \"extent_bytes\": \"4MiB\"}, \"device\": {\"kind\": \"cpu\"}, %s", bytes,
        at);
    daemon_configure(&d, text);
}

Test(tenants_e2e, a_reload_makes_the_pool_larger_and_smaller_under_a_client)
{
    char text[4096];
    child worker;

    begin("", "");
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    pool_of("12MiB", "");
    daemon_spawn(&d, NULL);
    cr_assert(daemon_wait_notified(&d, "READY=1", 10000));
    worker = start_child(RED, fills_pools_of_three_sizes);
    wait_pause(&worker);
    pool_of("64MiB", "");
    cr_assert_eq(ask_reload(true, text, sizeof text), KVS_E_CONFIG);
    cr_assert_str_eq(err.msg,
                     "pool.max_bytes: 64MiB needs a restart; 4MiB to 48MiB can be had without: from an extent to "
                     "what was reserved. A larger pool.reserve_bytes at the next start makes room for more");
    pool_of("48MiB", "");
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    cr_assert_not_null(strstr(text, "\"key\":\"pool.max_bytes\",\"from\":\"12MiB\",\"to\":\"48MiB\""), "%s", text);
    while (daemon_alive(&d) && !status_says(KVS_SECTION_SUMMARY, "\"arena_bytes\":50331648"))
        ;
    cr_assert_eq(write(worker.go, "x", 1), 1);
    wait_pause(&worker);
    pool_of("8MiB", "");
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "%s", err.msg);
    while (daemon_alive(&d) && !status_says(KVS_SECTION_SUMMARY, "\"giving_up_bytes\":0,\"arena_bytes\":8388608"))
        ;
    finish_child(&worker);
    cr_assert(daemon_wait_log(&d, "arena_piece_dropped bytes=37748736", 1, 5000));
    end();
}

static void fills_the_pool(void)
{
    engine e;

    engine_open(&e, red);
    for (uint32_t i = 0; i < 14; i++)
        CHECK(store_one(&e, 1000 + i) == KVS_OK); /* the lowest extent */
    kvs_close(e.c);
}

static void keeps_its_floor_over_a_shrink(void)
{
    engine e;

    engine_open(&e, blue);
    for (uint32_t i = 0; i < MINE; i++)
        CHECK(store_one(&e, i + 1) == KVS_OK);
    pause_child();
    CHECK(hits(e.ns, 1, MINE) == MINE);
    kvs_close(e.c);
}

Test(tenants_e2e, a_reload_makes_no_pool_that_takes_a_tenant_below_its_floor)
{
    char text[4096];
    child keeper;

    begin("", "");
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    pool_of("8MiB", ", \"floor_bytes\": 1179648"); /* MINE blocks */
    daemon_spawn(&d, NULL);
    cr_assert(daemon_wait_notified(&d, "READY=1", 10000));
    run_child(RED, fills_the_pool);
    keeper = start_child(BLUE, keeps_its_floor_over_a_shrink);
    wait_pause(&keeper);
    pool_of("4MiB", ", \"floor_bytes\": 1179648");
    cr_assert_eq(ask_reload(true, text, sizeof text), KVS_E_CONFIG);
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg,
                              "pool.max_bytes: 4194304 bytes would leave tenant blue 0 bytes, of 1179648 now and a "
                              "floor of 1179648: lower its floor_bytes first"),
                       "%s", err.msg);
    finish_child(&keeper);
    pool_of("4MiB", "");
    cr_assert_eq(ask_reload(false, text, sizeof text), KVS_OK, "without the floor: %s", err.msg);
    while (daemon_alive(&d) && !status_says(KVS_SECTION_SUMMARY, "\"giving_up_bytes\":0,\"arena_bytes\":4194304"))
        ;
    end();
}

/* ---- restart ---- */

static void finds_nothing(void)
{
    engine e;

    engine_open(&e, red);
    CHECK(hits(e.ns, 1, MINE) == 0);
    kvs_close(e.c);
}

/* Blue is tenant 1 before, and 2 after: what outlives the process must name it, and not its number. */
Test(tenants_e2e, blocks_are_their_tenants_after_a_restart_that_numbers_them_anew)
{
    static const char FORM[] = "{\"pool\": {\"max_bytes\": \"8MiB\", \"extent_bytes\": \"8MiB\", \"path\": \"%s\"},"
                               "\"device\": {\"kind\": \"cpu\"}, \"tenants\": [%s{\"name\": \"blue\", \"path\": \"%s\","
                               "\"mode\": \"0666\", \"uids\": [%d]}%s]}";
    char text[2048], entry[512], pool[] = "/dev/shm/kvs-tenants-XXXXXX", file[64];

    begin("", "");
    cr_assert_eq(daemon_stop(&d, SIGTERM), 0);
    cr_assert_not_null(mkdtemp(pool));
    (void)snprintf(entry, sizeof entry, "{\"name\": \"red\", \"path\": \"%s\", \"mode\": \"0666\", \"uids\": [%d]}",
                   red, RED);
    (void)snprintf(text, sizeof text, FORM, pool, "", blue, BLUE, "");
    cr_assert(daemon_start(&d, text));
    run_child(BLUE, stores_for_later);
    cr_assert_eq(daemon_stop(&d, SIGKILL), 128 + SIGKILL);
    (void)strcat(entry, ",");
    (void)snprintf(text, sizeof text, FORM, pool, entry, blue, BLUE, "");
    cr_assert(daemon_start(&d, text));
    run_child(RED, finds_nothing);
    run_child(BLUE, finds_what_it_stored);
    status_has(KVS_SECTION_TENANTS, "\"tenant\":\"blue\",\"clients\":0,\"used_bytes\":1179648");
    end();
    for (int i = 0; i < 2; i++) {
        (void)snprintf(file, sizeof file, "%s/%s", pool, i == 0 ? PERSIST_ARENA : PERSIST_TABLE);
        cr_assert_eq(unlink(file), 0);
    }
    cr_assert_eq(rmdir(pool), 0);
}
