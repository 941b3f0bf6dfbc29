/* The array `tenants`: what is accepted, refused by name, printed and reloaded. */
#include "config/config.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/option.h"
#include "config/tenants.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static kvs_status parse(config *c, const char *text, kvs_err *err)
{
    config_default(c);
    return config_parse(c, text, strlen(text), err);
}

static config accept(const char *text)
{
    kvs_err err = {0};
    config c;

    cr_assert_eq(parse(&c, text, &err), KVS_OK, "%s: %s", text, err.msg);
    return c;
}

static const char TWO[] = "{\"tenants\": [{\"name\": \"blue\", \"path\": \"/run/blue.sock\", \"mode\": \"0600\","
                          "\"uids\": [70000, 5, 7], \"ops\": [\"reset\", \"cache\"], \"quota_bytes\": \"64MiB\","
                          "\"floor_bytes\": \"8MiB\", \"region_bytes\": 4096, \"import_bytes\": \"1GiB\","
                          "\"lease_max_percent\": 20, \"link_share\": 300},"
                          "{\"name\": \"default\", \"floor_bytes\": \"1MiB\"}]}";

Test(tenants, without_an_array_there_is_the_default_one)
{
    config c = accept("{}");

    cr_assert_eq(c.n_tenants, 1);
    cr_assert_str_eq(c.tenants[0].name, "default");
    cr_assert_eq(c.tenants[0].ops, CONFIG_OPS_ALL);
    cr_assert_eq(c.tenants[0].quota_bytes, 0);
    cr_assert_eq(c.tenants[0].uids.n, 0);
    cr_assert_eq(c.tenants[0].link_share, 100);
}

Test(tenants, an_entry_is_read_and_default_stays_number_0)
{
    config c = accept(TWO);
    const config_tenant *t = &c.tenants[1];

    cr_assert_eq(c.n_tenants, 2);
    cr_assert_eq(config_find_tenant(&c, "blue"), 1);
    cr_assert_eq(config_find_tenant(&c, "default"), 0);
    cr_assert_eq(config_find_tenant(&c, "red"), CONFIG_MAX_TENANTS);
    cr_assert_eq(c.tenants[0].floor_bytes, 1 << 20);
    cr_assert_str_eq(t->path, "/run/blue.sock");
    cr_assert_eq(t->mode, 0600);
    cr_assert_eq(t->uids.n, 3);
    cr_assert(t->uids.uid[0] == 5 && t->uids.uid[1] == 7 && t->uids.uid[2] == 70000);
    cr_assert_eq(t->ops, CONFIG_OPS_CACHE | CONFIG_OPS_RESET);
    cr_assert_eq(t->quota_bytes, 64 << 20);
    cr_assert_eq(t->region_bytes, 4096);
    cr_assert_eq(t->import_bytes, 1 << 30);
    cr_assert_eq(t->lease_max_percent, 20);
    cr_assert_eq(t->link_share, 300);
}

static const struct {
    const char *entries, *says;
} BAD[] = {
    {"7", "tenants: expected an array of objects, found a number"},
    {"[7]", "tenants[0]: expected an object"},
    {"[{}]", "tenants[0].name: is missing"},
    {"[{\"name\": \"a\"}]", "tenants[0].path: is missing"},
    {"[{\"name\": 7}]", "tenants[0].name: expected a name"},
    {"[{\"name\": \"\"}]", "tenants[0].name: \"\" is no name"},
    {"[{\"name\": \"A\"}]", "is no name"},
    {"[{\"name\": \"a b\"}]", "is no name"},
    {"[{\"name\": \"a2345678901234567890123456789012\"}]", "is no name"},
    {"[{\"name\": \"admin\", \"path\": \"/a\"}]", "tenants.admin: no tenant may have this name"},
    {"[{\"name\": \"client\", \"path\": \"/a\"}]", "tenants.client: no tenant"},
    {"[{\"name\": \"default\", \"path\": \"/a\"}]", "tenants[0].path: \"default\" comes in by socket.path"},
    {"[{\"name\": \"default\", \"mode\": \"0600\"}]", "tenants[0].mode: \"default\" comes in"},
    {"[{\"name\": \"default\"}, {\"name\": \"default\"}]", "tenants[1].name: \"default\" is there already"},
    {"[{\"name\": \"a\", \"path\": \"/a\"}, {\"name\": \"a\", \"path\": \"/b\"}]", "tenants[1].name: \"a\" is there"},
    {"[{\"name\": \"a\", \"path\": \"/a\"}, {\"name\": \"b\", \"path\": \"//a\"}]",
     "tenants.b.path: the same as that of a"},
    {"[{\"name\": \"a\", \"path\": \"/x/a\"}, {\"name\": \"b\", \"path\": \"/x/./a\"}]",
     "tenants.b.path: the same as that of a"},
    {"[{\"name\": \"a\", \"path\": \"/run/./kvstrided/metrics.sock\"}]", "the same as that of metrics.path"},
    {"[{\"name\": \"a\", \"path\": \"/run/kvstrided/admin.sock\"}]", "the same as that of admin.path"},
    {"[{\"name\": \"a\", \"path\": \"/run/kvstrided/kvstrided.sock\"}]", "the same as that of socket.path"},
    {"[{\"name\": \"a\", \"path\": \"a\"}]", "tenants[0].path: \"a\" is not absolute"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"quota\": 1}]",
     "tenants[0]: \"quota\": unknown key; did you mean \"quota_bytes\"?"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uid\": [1]}]", "\"uid\": unknown key; did you mean \"uids\"?"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"bandwidth\": 1}]", "tenants[0]: \"bandwidth\": unknown key"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": 7}]", "tenants[0].uids: expected an array of user names or"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [null]}]", "tenants[0].uids: expected user names or numbers"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [\"nobody-here\"]}]",
     "tenants[0].uids: user \"nobody-here\" is not in /etc/passwd; one of another directory is given by number"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [\"\"]}]", "user \"\" is not in /etc/passwd"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [\"4000000\"]}]",
     "user \"4000000\" is not in /etc/passwd; a number goes without quotes"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [\"roo\"]}]", "user \"roo\" is not in"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [0, \"root\"]}]", "tenants[0].uids: user 0 is named twice"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [7, 7]}]", "tenants[0].uids: user 7 is named twice"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [-1]}]", "tenants[0].uids: -1 is outside 0..4294967294"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [4294967295]}]", "is outside 0..4294967294"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"uids\": [1.5]}]", "tenants[0].uids: 1.5 is outside"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"ops\": \"cache\"}]", "tenants[0].ops: expected an array of words"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"ops\": [\"caches\"]}]", "tenants[0].ops: \"caches\" is not one of cache|"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"ops\": [\"pin\", \"pin\"]}]", "tenants[0].ops: \"pin\" is named twice"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"ops\": [7]}]", "tenants[0].ops: 7 is not one of"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"link_share\": 0}]", "tenants[0].link_share: 0 is outside 1..10000"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"quota_bytes\": \"5TiB\"}]", "tenants[0].quota_bytes: \"5TiB\" is outside"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"quota_bytes\": 5, \"floor_bytes\": 6}]",
     "tenants.a.floor_bytes: 6 bytes is more than its quota_bytes, 5"},
    {"[{\"name\": \"a\", \"path\": \"/a\", \"floor_bytes\": \"600MiB\"}, {\"name\": \"default\", \"floor_bytes\": "
     "\"600MiB\"}]",
     "tenants: floor_bytes of all are 1200MiB, more than pool.max_bytes, 1GiB"},
};

Test(tenants, a_bad_entry_is_refused_by_number_key_and_value)
{
    for (size_t i = 0; i < COUNT(BAD); i++) {
        kvs_err err = {0};
        char text[1024];
        config c, before;

        config_default(&before);
        (void)snprintf(text, sizeof text, "{\"tenants\": %s}", BAD[i].entries);
        cr_assert_eq(parse(&c, text, &err), KVS_E_CONFIG, "accepted: %s", text);
        cr_assert_not_null(strstr(err.msg, BAD[i].says), "%s: \"%s\" does not say \"%s\"", text, err.msg, BAD[i].says);
        cr_assert_eq(memcmp(&c, &before, sizeof c), 0);
    }
}

Test(tenants, as_many_as_there_may_be_and_not_one_more)
{
    static char text[8192];

    for (int n = CONFIG_MAX_TENANTS - 1; n <= CONFIG_MAX_TENANTS; n++) {
        size_t len = (size_t)snprintf(text, sizeof text, "{\"tenants\": [");
        kvs_err err = {0};
        config c;

        for (int i = 0; i < n; i++)
            len += (size_t)snprintf(text + len, sizeof text - len, "%s{\"name\": \"t%d\", \"path\": \"/t%d\"}",
                                    i > 0 ? "," : "", i, i);
        (void)snprintf(text + len, sizeof text - len, "]}");
        cr_assert_eq(parse(&c, text, &err), n < CONFIG_MAX_TENANTS ? KVS_OK : KVS_E_CONFIG, "%s", err.msg);
        if (n == CONFIG_MAX_TENANTS)
            cr_assert_not_null(strstr(err.msg, "tenants[63]: one too many; at most 64"), "%s", err.msg);
    }
}

Test(tenants, printed_array_parses_back_to_the_same)
{
    config c = accept(TWO), back;
    char *text = NULL;
    size_t len;
    FILE *f = open_memstream(&text, &len);

    cr_assert_not_null(f);
    cr_assert_eq(config_print(&c, f), KVS_OK);
    fclose(f);
    back = accept(text);
    cr_assert_eq(config_changed(&c, &back, NULL, NULL), 0, "%s", text);
    cr_assert_not_null(strstr(text, "70000"));
    free(text);
}

typedef struct seen {
    size_t n;
    char text[1024];
} seen;

static void on_change(void *ud, const config_change *ch)
{
    seen *s = ud;
    size_t at = strlen(s->text);

    s->n++;
    (void)snprintf(s->text + at, sizeof s->text - at, "%s %s->%s %s\n", ch->key, ch->from, ch->to,
                   ch->reloadable ? "reload" : "restart");
}

Test(tenants, changes_are_found_by_name_in_whatever_order)
{
    config a = accept("{\"tenants\": [{\"name\": \"a\", \"path\": \"/a\"}, {\"name\": \"b\", \"path\": \"/b\"}]}");
    config b = accept("{\"tenants\": [{\"name\": \"c\", \"path\": \"/c\"}, {\"name\": \"b\", \"path\": \"/bb\", "
                      "\"uids\": [3], \"ops\": [\"pin\"], \"quota_bytes\": \"1MiB\"}]}");
    seen s = {0};

    cr_assert_eq(config_changed(&a, &b, on_change, &s), 6);
    cr_assert_str_eq(s.text, "tenants.a there->gone reload\n"
                             "tenants.b.path /b->/bb restart\n"
                             "tenants.b.uids []->[3] reload\n"
                             "tenants.b.ops [cache,compute,pin,reset]->[pin] reload\n"
                             "tenants.b.quota_bytes 0->1MiB reload\n"
                             "tenants.c not there->there reload\n");
}

Test(tenants, users_may_be_named_and_are_kept_as_numbers)
{
    config c = accept("{\"tenants\": [{\"name\": \"a\", \"path\": \"/a\", \"uids\": [7, \"root\"]}]}");

    cr_assert_eq(c.tenants[1].uids.n, 2);
    cr_assert(c.tenants[1].uids.uid[0] == 0 && c.tenants[1].uids.uid[1] == 7);
}

Test(tenants, a_reload_takes_limits_and_leaves_numbers_names_and_paths)
{
    config a = accept("{\"tenants\": [{\"name\": \"a\", \"path\": \"/a\"}, {\"name\": \"b\", \"path\": \"/b\"}]}");
    config b = accept("{\"tenants\": [{\"name\": \"b\", \"path\": \"/bb\", \"uids\": [3], \"floor_bytes\": 7}],"
                      "\"socket\": {\"mode\": \"0600\"}, \"log\": {\"level\": \"warn\"}}");

    config_take_reloadable(&a, &b);
    cr_assert_eq(a.n_tenants, 3);
    cr_assert_str_eq(a.tenants[2].path, "/b");
    cr_assert_eq(a.tenants[2].uids.n, 1);
    cr_assert_eq(a.tenants[2].floor_bytes, 7);
    cr_assert_eq(a.socket_mode, 0660);
    cr_assert_str_eq(a.log_level, "warn");
}

static config with(const char *names)
{
    char text[8192] = "{\"tenants\": [";

    for (const char *n = names; *n != '\0'; n++)
        (void)snprintf(text + strlen(text), sizeof text - strlen(text), "%s{\"name\": \"%c\", \"path\": \"/%c\"}",
                       n == names ? "" : ",", *n, *n);
    (void)strcat(text, "]}");
    return accept(text);
}

Test(tenants, one_that_a_reload_takes_out_keeps_its_number_and_nothing_else)
{
    static config live, fresh;
    char *text = NULL;
    size_t len;
    FILE *f;

    live = accept("{\"tenants\": [{\"name\": \"a\", \"path\": \"/a\", \"uids\": [3], \"floor_bytes\": \"1GiB\"},"
                  "{\"name\": \"b\", \"path\": \"/b\"}]}");
    fresh = accept("{\"tenants\": [{\"name\": \"b\", \"path\": \"/b\"}, {\"name\": \"c\", \"path\": \"/a\", "
                   "\"floor_bytes\": \"1GiB\"}]}");
    config_take_reloadable(&live, &fresh);
    cr_assert_eq(config_check(&live, NULL), KVS_OK, "path and floor of the one that is gone are free");
    cr_assert_eq(live.n_tenants, 4);
    cr_assert(live.tenants[1].gone && live.tenants[1].floor_bytes == 0 && live.tenants[1].uids.n == 0);
    cr_assert_str_eq(live.tenants[1].name, "a");
    cr_assert_eq(config_find_tenant(&live, "a"), CONFIG_MAX_TENANTS);
    cr_assert_eq(config_find_tenant(&live, "b"), 2);
    cr_assert_eq(config_find_tenant(&live, "c"), 3);
    cr_assert_eq(config_changed(&live, &fresh, NULL, NULL), 0, "now it is as the file says");
    f = open_memstream(&text, &len);
    cr_assert_not_null(f);
    cr_assert_eq(config_print(&live, f), KVS_OK);
    (void)fclose(f);
    cr_assert_null(strstr(text, "\"a\""), "%s", text);
    free(text);
    fresh = with("bac");
    config_take_reloadable(&live, &fresh);
    cr_assert_eq(live.n_tenants, 4);
    cr_assert_eq(config_find_tenant(&live, "a"), 1, "back under its number");
    cr_assert_str_eq(live.tenants[1].path, "/a");
}

/* More names than numbers in one life: what has no number left waits for a restart, and is said to. */
Test(tenants, names_beyond_the_last_number_wait_for_a_restart)
{
    static config live, fresh;
    static char text[8192];
    seen s = {0};

    (void)strcpy(text, "{\"tenants\": [");
    for (int n = 1; n < CONFIG_MAX_TENANTS - 1; n++)
        (void)snprintf(text + strlen(text), sizeof text - strlen(text), "%s{\"name\": \"t%d\", \"path\": \"/t%d\"}",
                       n == 1 ? "" : ",", n, n);
    (void)strcat(text, "]}");
    live = accept(text);
    cr_assert_eq(live.n_tenants, CONFIG_MAX_TENANTS - 1);
    fresh = with("xy");
    config_changed(&live, &fresh, on_change, &s);
    cr_assert_not_null(strstr(s.text, "tenants.t1 there->gone reload"));
    memset(&s, 0, sizeof s);
    config_take_reloadable(&live, &fresh);
    cr_assert_eq(config_find_tenant(&live, "x"), CONFIG_MAX_TENANTS - 1);
    cr_assert_eq(config_find_tenant(&live, "y"), CONFIG_MAX_TENANTS);
    cr_assert_eq(config_changed(&live, &fresh, on_change, &s), 1);
    cr_assert_str_eq(s.text, "tenants.y not there->there restart\n");
    fresh = with("y");
    (void)snprintf(fresh.tenants[1].name, sizeof fresh.tenants[1].name, "t5");
    cr_assert_eq(config_changed(&live, &fresh, NULL, NULL), 2, "t5 is back, x is gone");
    config_take_reloadable(&live, &fresh);
    cr_assert_eq(config_find_tenant(&live, "t5"), 5);
}
