#include "daemon/options.h"

#include <criterion/criterion.h>
#include <string.h>
#include <unistd.h>

static char *word(const char *text)
{
    static char words[64][64];
    static unsigned n;
    char *w = words[n++ % 64];

    (void)snprintf(w, sizeof words[0], "%s", text);
    return w;
}

static kvs_status parse(options *o, char **args, kvs_err *err)
{
    char *argv[16] = {word("kvstrided")};
    int n = 1;

    for (; args[n - 1] != NULL; n++)
        argv[n] = args[n - 1];
    return options_parse(o, n, argv, err);
}

#define ARGS(...) ((char *[]){__VA_ARGS__, NULL})
/* Storage that lives as long as the test: an options borrows its words. */
#define A(s) word(s)

Test(options, overrides_keys_of_every_kind)
{
    static config c;
    options o;
    kvs_err err = {0};

    cr_assert_eq(
        parse(&o,
              ARGS(A("--set"), A("pool.max_bytes=64MiB"), A("--socket"), A("/tmp/a.sock"),
                   A("--admin-socket=/tmp/b.sock"), A("--set=pool.checksum=false"), A("--set"),
                   A("limits.max_clients=7"), A("--set"), A("log.level=debug"), A("--set"), A("socket.mode=0600")),
              &err),
        KVS_OK, "%s", err.msg);
    o.config_path = NULL;
    cr_assert_eq(options_config(&o, &c, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(c.pool_max_bytes, 64 << 20);
    cr_assert_str_eq(c.socket_path, "/tmp/a.sock");
    cr_assert_str_eq(c.admin_path, "/tmp/b.sock");
    cr_assert(!c.pool_checksum);
    cr_assert_eq(c.max_clients, 7);
    cr_assert_str_eq(c.log_level, "debug");
    cr_assert_eq(c.socket_mode, 0600);
}

Test(options, lets_the_last_override_of_a_key_win)
{
    static config c;
    options o;
    kvs_err err = {0};

    cr_assert_eq(parse(&o,
                       ARGS(A("--set"), A("limits.max_clients=7"), A("--set"), A("deadline.max_ms=9000"), A("--set"),
                            A("limits.max_clients=8"), A("--set"), A("deadline.default_ms=8000")),
                       &err),
                 KVS_OK);
    o.config_path = NULL;
    cr_assert_eq(options_config(&o, &c, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(c.max_clients, 8);
    cr_assert_eq(c.default_deadline_ms, 8000);
}

static const struct {
    const char *set, *says;
} BAD_SETS[] = {
    {"limits.max_clients=0", "limits.max_clients"},
    {"limits.max_clients=many", "limits.max_clients"},
    {"limits.max_clients=", "limits.max_clients"},
    {"limits.max_client=3", "max_client"},
    {"pool.max_bytes=64GB", "pool.max_bytes"},
    {"pool.checksum=yes", "pool.checksum"},
    {"nonsense=1", "nonsense"},
    {"a.b.c=1", "a"},
};

Test(options, refuses_a_bad_override_by_its_key_and_changes_nothing)
{
    for (size_t i = 0; i < sizeof BAD_SETS / sizeof BAD_SETS[0]; i++) {
        static config c, untouched;
        char set[64];
        options o;
        kvs_err err = {0};

        (void)snprintf(set, sizeof set, "%s", BAD_SETS[i].set);
        memset(&c, 0x5a, sizeof c);
        untouched = c;
        cr_assert_eq(parse(&o, ARGS(A("--set"), set), &err), KVS_OK);
        o.config_path = NULL;
        cr_assert_eq(options_config(&o, &c, &err), KVS_E_CONFIG, "%s", set);
        cr_assert_not_null(strstr(err.msg, BAD_SETS[i].says), "%s: %s", set, err.msg);
        cr_assert_not_null(strstr(err.msg, "command line"), "%s", err.msg);
        cr_assert_eq(memcmp(&c, &untouched, sizeof c), 0);
    }
}

Test(options, refuses_usage_errors)
{
    options o;
    kvs_err err;

    cr_assert_eq(parse(&o, ARGS(A("--frobnicate")), &err), KVS_E_INVALID);
    cr_assert_not_null(strstr(err.msg, "--frobnicate"), "%s", err.msg);
    cr_assert_eq(parse(&o, ARGS(A("--config")), &err), KVS_E_INVALID);
    cr_assert_not_null(strstr(err.msg, "--config"), "%s", err.msg);
    cr_assert_eq(parse(&o, ARGS(A("--set"), A("nothing")), &err), KVS_E_INVALID);
    cr_assert_eq(parse(&o, ARGS(A("--set"), A("=3")), &err), KVS_E_INVALID);
    cr_assert_eq(parse(&o, ARGS(A("--set"), A("tenants=[]")), &err), KVS_E_INVALID);
    cr_assert_str_eq(err.msg, "--set tenants=[]: tenants are read from the file only");
    cr_assert_eq(parse(&o, ARGS(A("--set"), A("tenants[0].name=a")), &err), KVS_E_INVALID);
    cr_assert_eq(parse(&o, ARGS(A("stray")), &err), KVS_E_INVALID);
    cr_assert_eq(parse(&o, ARGS(A("-z")), &err), KVS_E_INVALID);
}

Test(options, knows_every_action)
{
    static const struct {
        const char *word;
        options_action action;
    } WORDS[] = {{"--check-config", OPTIONS_CHECK},
                 {"--print-config", OPTIONS_PRINT_CONFIG},
                 {"--print-schema", OPTIONS_PRINT_SCHEMA},
                 {"--print-table", OPTIONS_PRINT_TABLE},
                 {"--version", OPTIONS_VERSION},
                 {"--help", OPTIONS_HELP},
                 {"-h", OPTIONS_HELP}};

    for (size_t i = 0; i < sizeof WORDS / sizeof WORDS[0]; i++) {
        char name[32];
        options o;

        (void)snprintf(name, sizeof name, "%s", WORDS[i].word);
        cr_assert_eq(parse(&o, ARGS(name), NULL), KVS_OK);
        cr_assert_eq(o.action, WORDS[i].action);
    }
}

Test(options, reloads_what_may_change_and_names_what_waits)
{
    static config live, fresh;
    char changed[256], kept[256];

    config_default(&live);
    fresh = live;
    fresh.max_clients = 9;
    (void)snprintf(fresh.log_level, sizeof fresh.log_level, "debug");
    fresh.pool_max_slots = 2;
    (void)snprintf(fresh.socket_path, sizeof fresh.socket_path, "/tmp/other.sock");
    cr_assert_eq(options_reload(&live, &fresh, changed, kept, sizeof changed, NULL), KVS_OK);
    cr_assert_str_eq(changed, "limits.max_clients,log.level");
    cr_assert_str_eq(kept, "socket.path,pool.max_slots");
    cr_assert_eq(live.max_clients, 9);
    cr_assert_str_eq(live.log_level, "debug");
    cr_assert_eq(live.pool_max_slots, 0);
}

Test(options, reloads_nothing_that_breaks_a_rule)
{
    static config live, fresh;
    char changed[256], kept[256];
    kvs_err err = {0};

    config_default(&live);
    fresh = live;
    fresh.max_clients = 9;
    fresh.default_deadline_ms = fresh.max_deadline_ms + 1;
    cr_assert_eq(options_reload(&live, &fresh, changed, kept, sizeof changed, &err), KVS_E_CONFIG);
    cr_assert_eq(live.max_clients, 256);
}
