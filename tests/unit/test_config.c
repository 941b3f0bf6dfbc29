#include "config/config.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/json.h"
#include "config/option.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* ---- helpers ---- */

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

/* Every word of `says`, separated by "&", is in the message; the config is as it was. */
static void refuse(const char *text, const char *says)
{
    kvs_err err = {0};
    config c, before;
    char words[KVS_ERR_MSG_BYTES], *rest = words;

    config_default(&before);
    cr_assert_eq(parse(&c, text, &err), KVS_E_CONFIG, "accepted: %s", text);
    cr_assert_eq(config_changed(&before, &c, NULL, NULL), 0, "%s", text);
    cr_assert_null(strchr(err.msg, '\n'));
    (void)snprintf(words, sizeof words, "%s", says);
    for (char *word = strsep(&rest, "&"); word != NULL; word = strsep(&rest, "&"))
        cr_assert_not_null(strstr(err.msg, word), "%s: \"%s\" does not say \"%s\"", text, err.msg, word);
}

typedef struct bad {
    const char *text, *says;
} bad;

static void refuse_all(const bad *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        refuse(b[i].text, b[i].says);
}

/* {"section": {"name": value}} */
static const char *document(char buf[8192], const option *o, const char *value)
{
    (void)snprintf(buf, 8192, "{\"%.*s\": {\"%s\": %s}}", (int)option_section_bytes(o), o->key, option_name(o), value);
    return buf;
}

static char *printed(kvs_status (*print)(FILE *to))
{
    char *text = NULL;
    size_t len = 0;
    FILE *to = open_memstream(&text, &len);

    cr_assert_eq(print(to), KVS_OK);
    fclose(to);
    return text;
}

static char *printed_config(const config *c)
{
    char *text = NULL;
    size_t len = 0;
    FILE *to = open_memstream(&text, &len);

    cr_assert_eq(config_print(c, to), KVS_OK);
    fclose(to);
    return text;
}

static char *read_all(const char *path)
{
    char *text = calloc(1, 1 << 20);
    FILE *from = fopen(path, "r");

    cr_assert_not_null(from, "%s: run the tests from the root of the tree", path);
    cr_assert_not_null(text);
    (void)fread(text, 1, (1 << 20) - 1, from);
    fclose(from);
    return text;
}

/* ---- numbers and sizes ---- */

Test(config, pool_size_above_2_31_is_exact)
{
    static const int64_t SIZES[] = {2147483647, 2147483648, 4294967296, 68719476736};
    char text[128];

    for (size_t i = 0; i < COUNT(SIZES); i++) {
        config c, back;
        char *shown;

        (void)snprintf(text, sizeof text, "{\"pool\": {\"max_bytes\": %lld}}", (long long)SIZES[i]);
        c = accept(text);
        cr_assert_eq(c.pool_max_bytes, SIZES[i]);
        shown = printed_config(&c);
        back = accept(shown);
        cr_assert_eq(back.pool_max_bytes, SIZES[i]);
        free(shown);
    }
}

Test(config, odd_numbers_are_refused_with_their_key)
{
    static const char *const NEVER[] = {"1e999",    "-1e999",           "-2",   "1.5", "0123", "5.", "1e-3", "NaN",
                                        "Infinity", "9007199254740993", "-0.5", "1e18"};
    char text[8192];

    for (size_t i = 0; i < N_OPTIONS; i++) {
        const option *o = &OPTIONS[i];

        if (o->kind != OPTION_SIZE && o->kind != OPTION_INT)
            continue;
        for (size_t j = 0; j < COUNT(NEVER); j++) {
            bool syntax = strpbrk(NEVER[j], "NI") != NULL || !strcmp(NEVER[j], "0123") || !strcmp(NEVER[j], "5.");

            refuse(document(text, o, NEVER[j]), syntax ? "line 1, column" : option_name(o));
        }
    }
    refuse("{\"pool\": {\"max_bytes\": 1.5}}", "pool.max_bytes: 1.5 is not a whole number");
    refuse("{\"limits\": {\"max_clients\": 0}}", "limits.max_clients: 0 is outside 1..65536 connections");
    refuse("{\"limits\": {\"max_clients\": 65537}}", "65537 is outside 1..65536");
    refuse("{\"pool\": {\"max_slots\": 0.99999999999999999999}}", "pool.max_slots&is not a whole number as written");
    cr_assert_eq(accept("{\"pool\": {\"max_slots\": -0}}").pool_max_slots, 0);
    cr_assert_eq(accept("{\"limits\": {\"max_clients\": 1e3}}").max_clients, 1000);
}

Test(config, range_ends_are_accepted_and_one_beyond_is_refused)
{
    char text[8192], value[32];

    for (size_t i = 0; i < N_OPTIONS; i++) {
        const option *o = &OPTIONS[i];
        int64_t ends[2] = {o->min - 1, o->max + 1};

        if (o->kind != OPTION_SIZE && o->kind != OPTION_INT)
            continue;
        for (size_t j = 0; j < 2; j++) {
            (void)snprintf(value, sizeof value, "%lld", (long long)ends[j]);
            refuse(document(text, o, value), o->key);
            refuse(document(text, o, value), "is outside");
            refuse(document(text, o, value), o->unit);
        }
    }
    cr_assert_eq(accept("{\"pool\": {\"max_bytes\": \"4095GiB\"}}").pool_max_bytes, CONFIG_GIB(4095));
    cr_assert_eq(accept("{\"pool\": {\"max_bytes\": 4096}}").pool_max_bytes, 4096);
    refuse("{\"pool\": {\"max_bytes\": \"4TiB\"}}", "\"4TiB\" is outside 4096..4396972769280 bytes (4KiB..4095GiB)");
}

Test(config, sizes_with_units_are_exact_or_refused)
{
    static const struct {
        const char *text;
        int64_t bytes; /* -1: refused */
        const char *says;
    } ROWS[] = {
        {"0", 0, NULL},
        {"4096", 4096, NULL},
        {"4096B", 4096, NULL},
        {"64KiB", CONFIG_KIB(64), NULL},
        {"3MiB", CONFIG_MIB(3), NULL},
        {"64GiB", CONFIG_GIB(64), NULL},
        {"8388607TiB", CONFIG_TIB(8388607), NULL},
        {"9223372036854775807", INT64_MAX, NULL},
        {"64GB", -1, "\"64GB\": the unit must be B, KiB, MiB, GiB or TiB"},
        {"64G", -1, "unit"},
        {"64g", -1, "unit"},
        {"64gib", -1, "unit"},
        {"64 GiB", -1, "unit"},
        {"64GiB ", -1, "unit"},
        {" 64GiB", -1, "whole number and a unit"},
        {" 64GiB ", -1, "whole number and a unit"},
        {"1.5GiB", -1, "whole number"},
        {"64Gi", -1, "unit"},
        {"64GiBB", -1, "unit"},
        {"GiB", -1, "whole number and a unit"},
        {"", -1, "whole number and a unit"},
        {"-1GiB", -1, "whole number and a unit"},
        {"+1GiB", -1, "whole number and a unit"},
        {"0x10", -1, "unit"},
        {"1e3", -1, "unit"},
        {"007", -1, "whole number and a unit"},
        {"8388608TiB", -1, "more than 2^63 - 1"},
        {"16777216TiB", -1, "more than 2^63 - 1"},
        {"9223372036854775808", -1, "more than 2^63 - 1"},
        {"18446744073709551616", -1, "more than 2^63 - 1"},
        {"9007199254740993KiB", -1, "more than 2^63 - 1"},
    };

    for (size_t i = 0; i < COUNT(ROWS); i++) {
        kvs_err err = {0};
        int64_t v = -1;
        kvs_status st = config_size_parse(ROWS[i].text, &v, &err);

        cr_assert_eq(st, ROWS[i].bytes < 0 ? KVS_E_CONFIG : KVS_OK, "%s: %s", ROWS[i].text, err.msg);
        cr_assert_eq(v, ROWS[i].bytes, "%s", ROWS[i].text);
        if (ROWS[i].says != NULL)
            cr_assert_not_null(strstr(err.msg, ROWS[i].says), "%s", err.msg);
    }
    refuse("{\"pool\": {\"max_bytes\": \"64GB\"}}", "pool.max_bytes: \"64GB\"&KiB, MiB, GiB or TiB");
    cr_assert_eq(accept("{\"pool\": {\"max_bytes\": \"64GiB\"}}").pool_max_bytes, CONFIG_GIB(64));
}

Test(config, pool_that_holds_no_block_is_refused)
{
    refuse("{\"pool\": {\"max_bytes\": 0}}", "pool.max_bytes: 0 is outside 4096..");
    refuse("{\"pool\": {\"max_bytes\": 4095}}", "pool.max_bytes: 4095 is outside 4096..");
    refuse("{\"pool\": {\"max_bytes\": \"0GiB\"}}", "pool.max_bytes: \"0GiB\" is outside 4096..");
    cr_assert_eq(accept("{\"pool\": {\"max_bytes\": 4096}}").pool_max_bytes, 4096);
    cr_assert_eq(accept("{\"pool\": {\"max_bytes\": 4097}}").pool_max_bytes, 4097);
}

/* ---- types and keys ---- */

Test(config, wrong_types_are_refused_for_every_key)
{
    static const struct {
        const char *value, *found;
        unsigned fits; /* kinds that take it */
    } ROWS[] = {
        {"null", "null", 0},
        {"true", "a boolean", 1u << OPTION_BOOL},
        {"\"true\"", "\"true\"", 0},
        {"\"1\"", "\"1\"", 0},
        {"1", "a number", 1u << OPTION_SIZE | 1u << OPTION_INT},
        {"0", "a number", 1u << OPTION_SIZE | 1u << OPTION_INT},
        {"[]", "an array", 0},
        {"[1]", "an array", 0},
        {"{}", "an object", 0},
        {"{\"a\": 1}", "an object", 0},
    };
    char text[8192];

    for (size_t i = 0; i < N_OPTIONS; i++) {
        for (size_t j = 0; j < COUNT(ROWS); j++) {
            bool text_of_size = OPTIONS[i].kind == OPTION_SIZE && ROWS[j].value[0] == '"';

            if (ROWS[j].fits >> OPTIONS[i].kind & 1)
                continue;
            if (text_of_size && strcmp(ROWS[j].value, "\"1\"") == 0)
                continue; /* a string of a size is documented */
            refuse(document(text, &OPTIONS[i], ROWS[j].value), OPTIONS[i].key);
            refuse(text, ROWS[j].found);
        }
    }
    refuse("{\"pool\": {\"checksum\": \"true\"}}", "pool.checksum: expected true or false, found a string, \"true\"");
    refuse("{\"pool\": {\"max_slots\": \"1\"}}", "pool.max_slots: expected a whole number, found a string");
    refuse("{\"socket\": {\"mode\": 432}}", "socket.mode: expected a file mode as a string&found a number, 432");
}

Test(config, wrong_type_of_root_or_section_is_refused)
{
    static const bad BAD[] = {
        {"[]", "expected one JSON object, found an array"},
        {"1", "found a number"},
        {"\"{}\"", "found a string"},
        {"null", "found null"},
        {"true", "found a boolean"},
        {"{\"pool\": 1}", "pool: expected an object with its keys, found a number"},
        {"{\"pool\": null}", "found null"},
        {"{\"pool\": [{}]}", "found an array"},
    };

    refuse_all(BAD, COUNT(BAD));
    (void)accept("{}");
    (void)accept("{\"pool\": {}}");
}

Test(config, unknown_key_is_never_ignored)
{
    static const bad BAD[] = {
        {"{\"host_pol\": 1}", "\"host_pol\": unknown key"},
        {"{\"pol\": {}}", "\"pol\": unknown key; did you mean \"pool\"?"},
        {"{\"Pool\": {}}", "\"Pool\": unknown key; did you mean \"pool\"?"},
        {"{\"pool\": {\"Max_Bytes\": 1}}", "\"Max_Bytes\" in \"pool\": unknown key; did you mean \"max_bytes\"?"},
        {"{\"pool\": {\"max_byte\": 1}}", "did you mean \"max_bytes\"?"},
        {"{\"pool\": {\"max\": 1}}", "\"max\" in \"pool\": unknown key; did you mean \"max_bytes\"?"},
        {"{\"pool\": {\"n_blocks\": 1}}", "\"n_blocks\" in \"pool\": unknown key"},
        {"{\"max_bytes\": 1}", "did you mean {\"pool\": {\"max_bytes\": ...}}?"},
        {"{\"pool.max_bytes\": 8192}", "did you mean {\"pool\": {\"max_bytes\": ...}}?"},
        {"{\"pool\": {\"pool.max_bytes\": 8192}}", "unknown key"},
        {"{\"\": {}}", "\"\": unknown key"},
        {"{\"_comment\": \"x\"}", "\"_comment\": unknown key"},
        {"{\"$Schema\": \"x\"}", "unknown key"},
        {"{\"pool\": {\"$schema\": \"x\"}}", "unknown key"},
        {"{\"a\\nb\": 1}", "\"a\\u000ab\": unknown key"},
        {"{\"pool\": {\"socket\": {}}}", "unknown key"},
    };

    refuse_all(BAD, COUNT(BAD));
}

Test(config, very_long_unknown_key_leaves_room_for_the_reason)
{
    char text[8192] = "{\"";

    memset(text + 2, 'k', 4000);
    (void)snprintf(text + 4002, 16, "\": 1}");
    refuse(text, "kkk...\": unknown key");
}

Test(config, two_keys_that_set_the_same_thing_are_refused)
{
    refuse("{\"pool\": {\"max_bytes\": 8192, \"max_bytes\": 8192}}",
           "line 1, column 30: key \"max_bytes\" is given twice");
    refuse("{\"pool\": {\"max_bytes\": 8192, \"MAX_BYTES\": 4096}}", "is given twice, also as \"max_bytes\"");
    refuse("{\"pool\": {\"max_bytes\": 8192}, \"pool\": {}}", "key \"pool\" is given twice");
}

Test(config, something_after_the_end_is_refused)
{
    static const bad BAD[] = {
        {"{\"pool\": {}}}", "line 1, column 13&end of the text"},
        {"{\"pool\": {}} xyz", "end of the text, found 'x'"},
        {"{}{}", "end of the text"},
    };

    refuse_all(BAD, COUNT(BAD));
    (void)accept("{}  \n\n");
}

Test(config, broken_value_leaves_every_key_as_it_was)
{
    kvs_err err = {0};
    config c, before;
    static const char TEXT[] = "{\"log\": {\"level\": \"debug\"}, \"pool\": {\"max_bytes\": 8192, \"max_slots\": -1}}";

    config_default(&c);
    c.max_clients = 7;
    before = c;
    cr_assert_eq(config_parse(&c, TEXT, sizeof TEXT - 1, &err), KVS_E_CONFIG);
    cr_assert_eq(memcmp(&c, &before, sizeof c), 0);
}

Test(config, later_parse_keeps_keys_that_it_does_not_name)
{
    config c = accept("{\"limits\": {\"max_clients\": 7}}");

    cr_assert_eq(config_parse(&c, "{\"pool\": {\"max_slots\": 9}}", 26, NULL), KVS_OK);
    cr_assert_eq(c.max_clients, 7);
    cr_assert_eq(c.pool_max_slots, 9);
}

/* ---- paths, words, modes ---- */

Test(config, socket_paths_are_absolute_and_fit_an_address)
{
    static const bad BAD[] = {
        {"{\"socket\": {\"path\": \"\"}}", "socket.path: \"\" has 0 bytes; a path has 1..107"},
        {"{\"socket\": {\"path\": \"run/x\"}}", "socket.path: \"run/x\" is not absolute"},
        {"{\"socket\": {\"path\": \"@kvs\"}}", "abstract name"},
        {"{\"socket\": {\"path\": \"\\u0000kvs\"}}", "\\u0000 is not allowed"},
        {"{\"socket\": {\"path\": \"/run/\"}}", "names a directory"},
        {"{\"admin\": {\"path\": \"/\"}}", "admin.path: \"/\" names a directory"},
    };
    char text[256], path[110];

    refuse_all(BAD, COUNT(BAD));
    memset(path, 'a', sizeof path);
    path[0] = '/';
    path[107] = '\0';
    (void)snprintf(text, sizeof text, "{\"socket\": {\"path\": \"%s\"}}", path);
    cr_assert_str_eq(accept(text).socket_path, path);
    path[107] = 'a';
    path[108] = '\0';
    (void)snprintf(text, sizeof text, "{\"socket\": {\"path\": \"%s\"}}", path);
    refuse(text, "has 108 bytes; a path has 1..107");
}

Test(config, words_come_from_their_choices)
{
    cr_assert_str_eq(accept("{\"device\": {\"kind\": \"cpu\"}}").device_kind, "cpu");
    cr_assert_str_eq(accept("{\"log\": {\"level\": \"debug\"}}").log_level, "debug");
    refuse("{\"log\": {\"level\": \"Debug\"}}", "log.level: \"Debug\" is not one of error|warn|info|debug");
    refuse("{\"log\": {\"level\": \"deb\"}}", "is not one of");
    refuse("{\"log\": {\"level\": \"debug|info\"}}", "is not one of");
    refuse("{\"log\": {\"level\": \"\"}}", "log.level: \"\" is not one of");
}

Test(config, modes_are_octal_strings)
{
    static const char *const BAD[] = {"\"\"",      "\"66\"",   "\"0680\"", "\"0o660\"",    "\"1777\"",
                                      "\"00660\"", "\"-660\"", "\" 660\"", "\"rw-rw----\""};
    char text[64];

    cr_assert_eq(accept("{\"socket\": {\"mode\": \"0600\"}}").socket_mode, 0600);
    cr_assert_eq(accept("{\"socket\": {\"mode\": \"777\"}}").socket_mode, 0777);
    for (size_t i = 0; i < COUNT(BAD); i++) {
        (void)snprintf(text, sizeof text, "{\"socket\": {\"mode\": %s}}", BAD[i]);
        refuse(text, "socket.mode&is not an octal file mode");
    }
}

/* ---- rules between keys ---- */

#define MORE(name) "{\"name\": \"" name "\", \"path\": \"/" name "\"}"
#define FOUR_MORE  MORE("b") "," MORE("c") "," MORE("d") "," MORE("e")

Test(config, keys_that_contradict_each_other_are_refused)
{
    static const bad BAD[] = {
        {"{\"deadline\": {\"max_ms\": 5}}", "deadline.default_ms: 30000 ms is more than deadline.max_ms, 5 ms"},
        {"{\"limits\": {\"out_high_bytes\": \"33MiB\"}}",
         "limits.out_high_bytes: 33MiB is more than limits.out_max_bytes, 32MiB"},
        {"{\"limits\": {\"out_high_bytes\": \"64KiB\", \"out_max_bytes\": \"64KiB\"}}",
         "limits.max_body_bytes&more than limits.out_max_bytes"},
        {"{\"limits\": {\"memory_bytes\": \"16MiB\", \"max_body_bytes\": \"2049KiB\"}}",
         "limits.memory_bytes: 16MiB is less than 8 times limits.max_body_bytes, 2049KiB"},
        {"{\"limits\": {\"memory_bytes\": \"16MiB\", \"max_body_bytes\": \"2MiB\"}, \"tenants\": [" FOUR_MORE "]}",
         "limits.memory_bytes: 16MiB is less than 10 times limits.max_body_bytes, 2MiB&twice for each tenant"},
        {"{\"pool\": {\"extent_bytes\": \"1GiB\", \"max_bytes\": \"1MiB\"}}", "pool.extent_bytes&pool.max_bytes"},
        {"{\"pool\": {\"extent_bytes\": 4095}}", "pool.extent_bytes: 4095 bytes; must be 0 or at least 4096"},
        {"{\"socket\": {\"path\": \"/a\"}, \"admin\": {\"path\": \"/a\"}}", "admin.path&socket.path"},
        {"{\"socket\": {\"path\": \"/a\\nb\"}, \"admin\": {\"path\": \"/a\\nb\"}}", "\"/a\\u000ab\""},
        {"{\"socket\": {\"path\": \"/a//b\"}, \"admin\": {\"path\": \"//a/b\"}}", "admin.path&socket.path"},
        {"{\"socket\": {\"path\": \"/a/s\"}, \"admin\": {\"path\": \"/a/./s\"}}", "admin.path&socket.path"},
        {"{\"socket\": {\"path\": \"/./a/.//./s\"}, \"admin\": {\"path\": \"/a/s/.\"}}", "admin.path&socket.path"},
        {"{\"socket\": {\"path\": \"/a/s\"}, \"metrics\": {\"path\": \"/a/s/././.\"}}", "metrics.path&socket.path"},
    };

    refuse_all(BAD, COUNT(BAD));
    (void)accept("{\"deadline\": {\"max_ms\": 30000}}");
    (void)accept("{\"limits\": {\"memory_bytes\": \"16MiB\", \"max_body_bytes\": \"2MiB\"}}");
    (void)accept("{\"limits\": {\"memory_bytes\": \"20MiB\", \"max_body_bytes\": \"2MiB\"}, \"tenants\": [" FOUR_MORE
                 "]}");
    (void)accept("{\"pool\": {\"extent_bytes\": \"1GiB\", \"max_bytes\": \"1GiB\"}}");
    (void)accept("{\"socket\": {\"path\": \"/a/b\"}, \"admin\": {\"path\": \"/a/bc\"}}");
    (void)accept("{\"socket\": {\"path\": \"/a/s\"}, \"admin\": {\"path\": \"/a/.s\"}}");
    (void)accept("{\"socket\": {\"path\": \"/a/s\"}, \"admin\": {\"path\": \"/a/s.\"}}");
    (void)accept("{\"socket\": {\"path\": \"/a/s\"}, \"admin\": {\"path\": \"/a./s\"}}");
    (void)accept("{\"socket\": {\"path\": \"/a/s\"}, \"admin\": {\"path\": \"/a/../s\"}}");
    (void)accept("{\"$schema\": \"/usr/share/doc/kvstride/examples/kvstrided.schema.json\"}");
    refuse("{\"$schema\": 7}", "$schema");
}

/* ---- files ---- */

typedef struct temp {
    char path[64];
} temp;

static temp temp_file(const void *bytes, size_t n)
{
    temp t = {"/tmp/kvs-config-XXXXXX"};
    int fd = mkstemp(t.path);

    cr_assert_geq(fd, 0);
    cr_assert_eq(write(fd, bytes, n), (ssize_t)n);
    close(fd);
    return t;
}

/* One line: the file's name, then the reason. */
static void refuse_file(const char *path, const char *says)
{
    kvs_err err = {0};
    config c, before;

    config_default(&c);
    before = c;
    cr_assert_eq(config_load(&c, path, &err), KVS_E_CONFIG, "accepted: %s", path);
    cr_assert_eq(strncmp(err.msg, path, strlen(path)), 0, "%s", err.msg);
    cr_assert_not_null(strstr(err.msg, says), "%s: %s", says, err.msg);
    cr_assert_null(strchr(err.msg, '\n'));
    cr_assert_eq(memcmp(&c, &before, sizeof c), 0);
}

static void refuse_bytes(const void *bytes, size_t n, const char *says)
{
    temp t = temp_file(bytes, n);

    refuse_file(t.path, says);
    unlink(t.path);
}

static void accept_bytes(const void *bytes, size_t n)
{
    temp t = temp_file(bytes, n);
    kvs_err err = {0};
    config c;

    config_default(&c);
    cr_assert_eq(config_load(&c, t.path, &err), KVS_OK, "%s", err.msg);
    unlink(t.path);
}

Test(config, empty_blank_and_foreign_files_give_one_line_with_their_name)
{
    refuse_bytes("", 0, "is empty; {} stands for the defaults");
    refuse_bytes("   \n", 4, "the text is empty");
    refuse_bytes("\xEF\xBB\xBF", 3, "the text is empty");
    refuse_bytes("\xFF\xFE{\0}\0", 6, "UTF-16");
    refuse_bytes("{\0}\0", 4, "UTF-16");
    refuse_bytes("{}\0", 3, "zero byte");
    accept_bytes("\xEF\xBB\xBF{}", 5);
    accept_bytes("{}", 2);
    accept_bytes("{\r\n}\r\n", 6);
}

Test(config, file_that_cannot_be_read_gives_one_line_with_its_name)
{
    temp t = temp_file("{}", 2);

    refuse_file("/tmp", "is a directory");
    refuse_file("/dev/null", "not a regular file");
    refuse_file("/tmp/kvs-no-such-directory/x.json", "No such file or directory");
    unlink(t.path);
    refuse_file(t.path, "No such file or directory");
    cr_assert_eq(mkfifo(t.path, 0600), 0);
    refuse_file(t.path, "not a regular file"); /* and does not wait for a writer */
    unlink(t.path);
}

Test(config, unreadable_file_gives_one_line_with_its_name)
{
    temp t = temp_file("{}", 2);

    cr_assert_eq(chmod(t.path, 0), 0);
    if (geteuid() == 0) /* root reads everything */
        cr_assert_eq(seteuid(65534), 0);
    refuse_file(t.path, "Permission denied");
    if (getuid() == 0)
        cr_assert_eq(seteuid(0), 0);
    unlink(t.path);
}

Test(config, file_of_more_than_1_mib_is_refused)
{
    size_t max = 1 << 20;
    char *text = malloc(max + 1);

    cr_assert_not_null(text);
    memset(text, ' ', max + 1);
    memcpy(text, "{}", 2);
    accept_bytes(text, max);
    refuse_bytes(text, max + 1, "is larger than 1048576 bytes");
    free(text);
}

Test(config, long_file_name_does_not_hide_the_reason)
{
    char path[600];
    kvs_err err = {0};
    config c;

    memset(path, 'p', sizeof path);
    for (size_t i = 0; i < sizeof path; i += 100)
        path[i] = '/';
    path[sizeof path - 1] = '\0';
    config_default(&c);
    cr_assert_eq(config_load(&c, path, &err), KVS_E_CONFIG);
    cr_assert_not_null(strstr(err.msg, "No such file or directory"), "%s", err.msg);
}

Test(config, comment_comma_and_single_quote_are_found_in_line_7)
{
    static const char *const LINE_7[] = {
        "    // big enough",
        "    \"max_slots\": 5,}",
        "    'max_slots': 5",
        "    \"max_slots\": 5 /* five */",
    };
    char text[1024], says[KVS_ERR_MSG_BYTES];

    for (size_t i = 0; i < COUNT(LINE_7); i++) {
        (void)snprintf(text, sizeof text,
                       "{\n  \"log\": {\n    \"level\": \"info\"\n  },\n\n  \"pool\": {\n%s\n  },\n  \"lease\": {\n"
                       "    \"max_ms\": 5\n  }\n}\n",
                       LINE_7[i]);
        (void)snprintf(says, sizeof says, ": line 7, column ");
        refuse_bytes(text, strlen(text), says);
    }
}

/* ---- printing ---- */

Test(config, printed_config_parses_back_to_the_same)
{
    config c = accept("{\"socket\": {\"path\": \"/tmp/a\\\"b\\\\c\\u0007 \\u00e4\", \"mode\": \"0007\"}, \"pool\": "
                      "{\"max_bytes\": 1234567, \"extent_bytes\": \"64KiB\", \"checksum\": false, \"max_slots\": "
                      "4294967294},"
                      "\"log\": {\"level\": \"warn\"}}");
    char *text = printed_config(&c);
    config back = accept(text);

    cr_assert_eq(config_changed(&c, &back, NULL, NULL), 0, "%s", text);
    cr_assert_str_eq(back.socket_path, "/tmp/a\"b\\c\a \xC3\xA4");
    free(text);
    config_default(&c);
    text = printed_config(&c);
    back = accept(text);
    cr_assert_eq(config_changed(&c, &back, NULL, NULL), 0);
    free(text);
}

Test(config, defaults_satisfy_their_own_table)
{
    kvs_err err = {0};
    char text[8192];
    config c;

    config_default(&c);
    cr_assert_eq(config_check(&c, &err), KVS_OK, "%s", err.msg);
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const option *o = &OPTIONS[i];
        char value[OPTION_TEXT_BYTES], quoted[OPTION_TEXT_BYTES + 2];
        const char *v = option_format(value, &c, o);

        (void)snprintf(quoted, sizeof quoted, o->kind == OPTION_INT || o->kind == OPTION_BOOL ? "%s" : "\"%s\"", v);
        (void)accept(document(text, o, quoted));
        cr_assert_neq(strncmp(o->key, "tenants.", 8), 0, "this section is the array's");
        for (size_t j = 0; j < i; j++)
            cr_assert_str_neq(o->key, OPTIONS[j].key);
        for (size_t j = 0; i > 0 && !option_same_section(o, o - 1) && j < i; j++)
            cr_assert_not(option_same_section(o, &OPTIONS[j]), "%s: a section lies in one piece", o->key);
    }
}

Test(config, shipped_file_is_valid_and_says_the_defaults)
{
    kvs_err err = {0};
    config c, plain;

    config_default(&plain);
    config_default(&c);
    cr_assert_eq(config_load(&c, "config/kvstrided.json", &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(config_changed(&plain, &c, NULL, NULL), 0);
}

Test(config, shipped_schema_is_the_printed_one)
{
    char *file = read_all("config/kvstrided.schema.json"), *now = printed(config_print_schema);

    cr_assert_str_eq(file, now, "print the schema again into config/kvstrided.schema.json");
    free(file);
    free(now);
}

/* Walk the schema as a validator would: every option is there with its limits, every object is closed. */
Test(config, schema_knows_every_key_and_closes_every_object)
{
    char *text = printed(config_print_schema);
    json *j = NULL;
    const json_node *root, *sections;
    size_t n = 0;

    cr_assert_eq(json_parse(text, strlen(text), &j, NULL), KVS_OK);
    root = json_root(j);
    cr_assert_not_null(strstr(json_string(json_member(root, "$schema")), "2020-12"));
    cr_assert_not(json_bool(json_member(root, "additionalProperties")));
    sections = json_member(root, "properties");
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const option *o = &OPTIONS[i];
        char section[64];
        const json_node *s, *p;
        int64_t v;

        (void)snprintf(section, sizeof section, "%.*s", (int)option_section_bytes(o), o->key);
        s = json_member(sections, section);
        cr_assert_eq(json_type_of(json_member(s, "additionalProperties")), JSON_BOOL);
        cr_assert_not(json_bool(json_member(s, "additionalProperties")));
        p = json_member(json_member(s, "properties"), option_name(o));
        cr_assert_not_null(p, "%s", o->key);
        cr_assert_not_null(json_member(p, "default"));
        if (o->kind == OPTION_SIZE)
            p = json_first(json_member(p, "anyOf"));
        if (o->kind == OPTION_SIZE || o->kind == OPTION_INT) {
            cr_assert(json_whole(json_member(p, "minimum"), &v) && v == o->min);
            cr_assert(json_whole(json_member(p, "maximum"), &v) && v == o->max);
        }
    }
    for (const json_node *s = json_first(sections); s != NULL; s = json_next(s))
        n += json_member(s, "properties") != NULL ? json_size(json_member(s, "properties")) : 0; /* an array: below */
    cr_assert_eq(n, N_OPTIONS);
    sections = json_member(json_member(sections, "tenants"), "items");
    cr_assert_not(json_bool(json_member(sections, "additionalProperties")));
    for (size_t i = 0; i < N_TENANT_OPTIONS; i++)
        cr_assert_not_null(json_member(json_member(sections, "properties"), option_name(&TENANT_OPTIONS[i])));
    cr_assert_eq(json_size(json_member(sections, "properties")), N_TENANT_OPTIONS);
    json_destroy(j);
    free(text);
}

Test(config, table_has_a_row_of_seven_columns_for_every_key)
{
    char *text = printed(config_print_table), *rest = text, *line;
    size_t rows = 0;

    while ((line = strsep(&rest, "\n")) != NULL && *line != '\0') {
        size_t bars = 0;

        for (const char *p = line; *p != '\0'; p++)
            bars += *p == '|';
        cr_assert_eq(bars, 8, "%s", line);
        if (rows >= 2) {
            bool common = rows - 2 < N_OPTIONS;
            char start[128];

            (void)snprintf(start, sizeof start, "| `%s%s` | ", common ? "" : "tenants[].",
                           common ? OPTIONS[rows - 2].key : option_name(&TENANT_OPTIONS[rows - 2 - N_OPTIONS]));
            cr_assert_eq(strncmp(line, start, strlen(start)), 0, "%s", line);
        }
        rows++;
    }
    cr_assert_eq(rows, N_OPTIONS + N_TENANT_OPTIONS + 2);
    free(text);
}

Test(config, printing_to_a_full_disk_is_an_error)
{
    config c;
    FILE *to = fopen("/dev/full", "w");

    config_default(&c);
    cr_assert_not_null(to);
    setbuf(to, NULL);
    cr_assert_eq(config_print(&c, to), KVS_E_SYS);
    cr_assert_eq(config_print_schema(to), KVS_E_SYS);
    cr_assert_eq(config_print_table(to), KVS_E_SYS);
    fclose(to);
}

/* ---- what a reload would change ---- */

typedef struct seen {
    size_t n;
    char text[512];
} seen;

static void on_change(void *ud, const config_change *ch)
{
    seen *s = ud;
    size_t at = strlen(s->text);

    s->n++;
    (void)snprintf(s->text + at, sizeof s->text - at, "%s %s->%s %s\n", ch->key, ch->from, ch->to,
                   ch->reloadable ? "reload" : "restart");
}

Test(config, changes_are_listed_with_both_values_and_what_they_need)
{
    config a, b = accept("{\"pool\": {\"max_bytes\": \"2GiB\", \"checksum\": false}, \"socket\": {\"mode\": \"0666\"},"
                         "\"log\": {\"level\": \"debug\"}, \"lease\": {\"max_percent\": 50}}");
    seen s = {0};

    config_default(&a);
    cr_assert_eq(config_changed(&a, &b, on_change, &s), 4);
    cr_assert_eq(s.n, 4);
    cr_assert_str_eq(s.text, "socket.mode 0660->0666 restart\npool.max_bytes 1GiB->2GiB reload\n"
                             "pool.checksum true->false reload\nlog.level info->debug reload\n");
    cr_assert_eq(config_changed(&a, &a, on_change, &s), 0);
    cr_assert_eq(s.n, 4);
}
