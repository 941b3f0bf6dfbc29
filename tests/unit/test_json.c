#include "config/json.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- helpers ---- */

static void accept(const char *text, size_t len)
{
    kvs_err err = {0};
    json *j = NULL;

    cr_assert_eq(json_parse(text, len, &j, &err), KVS_OK, "%s: %s", text, err.msg);
    json_destroy(j);
}

/* `says` is part of the message. */
static void refuse(const char *text, size_t len, const char *says)
{
    kvs_err err = {0};
    json *j = NULL;

    cr_assert_eq(json_parse(text, len, &j, &err), KVS_E_CONFIG, "accepted: %s", text);
    cr_assert_null(j);
    cr_assert_not_null(strstr(err.msg, says), "%s: \"%s\" does not say \"%s\"", text, err.msg, says);
    cr_assert_not_null(strstr(err.msg, "line "), "%s", err.msg);
    cr_assert_null(strchr(err.msg, '\n'), "%s", err.msg);
}

static void accept_all(const char *const *texts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        accept(texts[i], strlen(texts[i]));
}

typedef struct bad {
    const char *text, *says;
} bad;

static void refuse_all(const bad *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        refuse(b[i].text, strlen(b[i].text), b[i].says);
}

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* ---- numbers ---- */

Test(json, accepts_only_numbers_that_json_allows)
{
    static const char *const GOOD[] = {"0", "-0", "10", "-1.5", "1e3", "1E+3", "1e-3", "0.0", "1e308"};
    static const bad BAD[] = {
        {"01", "must not begin with 0"},
        {"[0123]", "must not begin with 0"},
        {"-01", "must not begin with 0"},
        {"5.", "expected a digit"},
        {"[5.]", "expected a digit, found ']'"},
        {".5", "expected a value, found '.'"},
        {"+1", "expected a value, found '+'"},
        {"1e", "expected a digit"},
        {"1e+", "expected a digit"},
        {"-", "expected a digit"},
        {"0x10", "found 'x'"},
        {"NaN", "expected a value"},
        {"Infinity", "expected a value"},
        {"-Infinity", "expected a digit, found 'I'"},
        {"nul", "expected a value"},
        {"True", "expected a value"},
        {"1e999", "too large for a double"},
        {"-1e999", "too large for a double"},
        {"{\"a\": [1, 2,\n {\"big\": 1e400}]}", "line 2, column 10: \"big\": number is too large"},
    };

    accept_all(GOOD, COUNT(GOOD));
    refuse_all(BAD, COUNT(BAD));
}

Test(json, refuses_a_number_that_cjson_would_cut_in_two)
{
    char text[80];

    memset(text, '1', sizeof text);
    accept(text, 63);
    refuse(text, 64, "a number of 64 characters");
}

Test(json, takes_a_number_as_whole_by_its_digits_and_not_by_its_double)
{
    static const struct {
        const char *text;
        bool whole;
        int64_t value;
    } ROWS[] = {
        {"0", true, 0},
        {"-0", true, 0},
        {"0e99999999999999999999", true, 0},
        {"0.000", true, 0},
        {"2147483647", true, 2147483647},
        {"2147483648", true, 2147483648},
        {"4294967296", true, 4294967296},
        {"68719476736", true, 68719476736},
        {"-68719476736", true, -68719476736},
        {"9007199254740992", true, INT64_C(9007199254740992)},
        {"9007199254740993", false, 0},
        {"-9007199254740993", false, 0},
        {"1e3", true, 1000},
        {"1.5e1", true, 15},
        {"1.50e1", true, 15},
        {"1000e-3", true, 1},
        {"12345678901234567890", false, 0},
        {"1e16", false, 0},
        {"1e300", false, 0},
        {"1.5", false, 0},
        {"1e-3", false, 0},
        {"1e-400", false, 0},
        {"1e-99999999999999999999", false, 0},
        {"0.99999999999999999999", false, 0},
        {"1.00000000000000000001", false, 0},
    };

    for (size_t i = 0; i < COUNT(ROWS); i++) {
        int64_t v = 77;
        json *j = NULL;

        cr_assert_eq(json_parse(ROWS[i].text, strlen(ROWS[i].text), &j, NULL), KVS_OK, "%s", ROWS[i].text);
        cr_assert_eq(json_whole(json_root(j), &v), ROWS[i].whole, "%s", ROWS[i].text);
        cr_assert_eq(v, ROWS[i].whole ? ROWS[i].value : 77, "%s", ROWS[i].text);
        json_destroy(j);
    }
}

/* ---- strings and keys ---- */

Test(json, accepts_only_strings_that_json_allows)
{
    static const char *const GOOD[] = {"\"\"", "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\u0041\\uD83D\\uDE00\"",
                                       "\"gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80\"", "\"\x7F\""};
    static const bad BAD[] = {
        {"\"\\u0000\"", "\\u0000 is not allowed"},
        {"{\"a\\u0000b\": 1}", "\\u0000 is not allowed"},
        {"\"\\ud83d\"", "surrogate"},
        {"\"\\ud83dx\"", "surrogate"},
        {"\"\\ud83d\\u0041\"", "surrogate"},
        {"\"\\ude00\"", "surrogate"},
        {"\"\\u12\"", "four hex digits"},
        {"\"\\u12g4\"", "four hex digits"},
        {"\"\\x41\"", "unknown escape"},
        {"\"\\", "unknown escape"},
        {"\"abc", "line 1, column 1: this string has no end"},
        {"\"a\nb\"", "control character 0x0a"},
        {"\"\x80\"", "byte 0x80 is not valid UTF-8"},
        {"\"\xC0\xAF\"", "not valid UTF-8"},
        {"\"\xE0\x80\xAF\"", "not valid UTF-8"},
        {"\"\xED\xA0\x80\"", "not valid UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "not valid UTF-8"},
        {"\"\xF5\x80\x80\x80\"", "not valid UTF-8"},
        {"\"\xE2\x82\"", "not valid UTF-8"},
    };

    accept_all(GOOD, COUNT(GOOD));
    refuse_all(BAD, COUNT(BAD));
}

Test(json, refuses_duplicate_keys_also_under_another_case)
{
    static const char *const GOOD[] = {"{\"a\": {\"b\": 1}, \"b\": {\"b\": 2}}", "[{\"a\": 1}, {\"a\": 1}]"};
    static const bad BAD[] = {
        {"{\"a\": 1, \"a\": 1}", "line 1, column 10: key \"a\" is given twice"},
        {"{\"Max\": 1,\n \"max\": 2}", "line 2, column 2: key \"max\" is given twice, also as \"Max\""},
        {"{\"a\": 1, \"b\": 2, \"\\u0061\": 3}", "line 1, column 18: key \"a\" is given twice"},
        {"{\"x\": [1, {\"c\": 1, \"d\": {}, \"C\": 2}]}", "key \"C\" is given twice, also as \"c\""},
        {"{\"\": 1, \"\": 2}", "is given twice"},
        {"{\"a\\nb\": 1, \"A\\nb\": 2}", "key \"A\\u000ab\" is given twice, also as \"a\\u000ab\""},
    };

    accept_all(GOOD, COUNT(GOOD));
    refuse_all(BAD, COUNT(BAD));
}

Test(json, finds_a_duplicate_among_many_keys_without_comparing_all_pairs)
{
    enum { KEYS = 100000, KEY_BYTES = 12 };
    char *text = malloc(KEYS * (size_t)KEY_BYTES + 64);
    size_t n = 0;

    cr_assert_not_null(text);
    text[n++] = '{';
    for (int i = 0; i < KEYS; i++)
        n += (size_t)sprintf(text + n, "\"k%06d\":1,", i);
    n += (size_t)sprintf(text + n, "\"K000007\":1}");
    refuse(text, n, "key \"K000007\" is given twice, also as \"k000007\"");
    free(text);
}

/* ---- structure ---- */

Test(json, refuses_more_than_32_levels)
{
    char text[80];

    memset(text, '[', 33);
    memset(text + 33, ']', 33);
    accept(text + 1, 64);
    refuse(text, 66, "line 1, column 33: nested more than 32 deep");
    memset(text, '[', sizeof text);
    refuse(text, sizeof text, "nested more than 32 deep");
}

Test(json, does_not_ignore_what_follows_the_document)
{
    static const bad BAD[] = {
        {"{}}", "line 1, column 3: expected the end of the text, found '}'"},
        {"{} xyz", "line 1, column 4: expected the end of the text, found 'x'"},
        {"{}\n{}", "line 2, column 1: expected the end of the text, found '{'"},
        {"{}\v", "found byte 0x0b"},
    };
    size_t len = 2 + (1 << 20);
    char *zeros = calloc(1, len);

    refuse_all(BAD, COUNT(BAD));
    accept("{}\n \t\r\n", 7);
    cr_assert_not_null(zeros);
    zeros[0] = '{';
    zeros[1] = '}';
    refuse(zeros, len, "found a zero byte");
    free(zeros);
}

Test(json, empty_and_blank_text_has_a_position)
{
    refuse("", 0, "line 1, column 1: the text is empty");
    refuse(NULL, 0, "the text is empty");
    refuse("  \n ", 4, "the text is empty");
    refuse("\xEF\xBB\xBF", 3, "the text is empty");
    refuse("\xEF\xBB", 2, "found byte 0xef");
}

Test(json, skips_a_byte_order_mark_and_reads_crlf)
{
    static const char *const GOOD[] = {"\xEF\xBB\xBF{}", "{\r\n\"a\": 1\r\n}\r\n", "{\"a\": 1}"};

    accept_all(GOOD, COUNT(GOOD));
    refuse("\xEF\xBB\xBF{x", 5, "line 1, column 2");
    refuse("{}\xEF\xBB\xBF", 5, "found byte 0xef");
}

Test(json, names_utf16_instead_of_a_strange_byte)
{
    refuse("\xFF\xFE{\0}\0", 6, "UTF-16");
    refuse("\xFE\xFF\0{\0}", 6, "UTF-16");
    refuse("{\0}\0", 4, "UTF-16");
}

Test(json, says_what_hand_edits_get_wrong_and_where)
{
    static const bad BAD[] = {
        {"{\n// why\n}", "line 2, column 1: expected a key in double quotes, found '/' (JSON has no comments)"},
        {"{\"a\": 1, # why\n}", "found '#' (JSON has no comments)"},
        {"{\"a\": 1,\n}", "line 1, column 8: a comma before '}' is not allowed"},
        {"[1, ]", "line 1, column 3: a comma before ']' is not allowed"},
        {"{'a': 1}", "line 1, column 2: expected a key in double quotes, found a single quote"},
        {"{a: 1}", "expected a key in double quotes, found 'a'"},
        {"{\"a\" 1}", "expected ':', found '1'"},
        {"{\"a\": 1 \"b\": 2}", "expected ',' or '}', found '\"'"},
        {"[1 2]", "expected ',' or ']', found '2'"},
        {"{\"a\": 1", "expected ',' or '}', found the end"},
        {"{\"a\":", "expected a value, found the end"},
        {"[1}", "expected ',' or ']', found '}'"},
        {"{,}", "expected a key"},
        {"\"\xC3\xA4\" x", "line 1, column 5"},
    };

    refuse_all(BAD, COUNT(BAD));
}

Test(json, reads_back_what_the_text_says)
{
    static const char TEXT[] =
        "{\"s\": \"a\\u00e4\", \"n\": -2.5, \"t\": true, \"f\": false, \"z\": null, \"a\": [1, 2, 3]}";
    json *j = NULL;
    const json_node *root, *a;
    int64_t v;

    cr_assert_eq(json_parse(TEXT, sizeof TEXT - 1, &j, NULL), KVS_OK);
    root = json_root(j);
    cr_assert_eq(json_type_of(root), JSON_OBJECT);
    cr_assert_eq(json_size(root), 6);
    cr_assert_str_eq(json_string(json_member(root, "s")), "a\xC3\xA4");
    cr_assert_eq(json_number(json_member(root, "n")), -2.5);
    cr_assert(json_bool(json_member(root, "t")));
    cr_assert_not(json_bool(json_member(root, "f")));
    cr_assert_eq(json_type_of(json_member(root, "z")), JSON_NULL);
    cr_assert_null(json_member(root, "S"));
    cr_assert_null(json_member(json_member(root, "n"), "s"));
    a = json_member(root, "a");
    cr_assert_str_eq(json_key(a), "a");
    cr_assert_null(json_next(a));
    cr_assert_null(json_string(a));
    cr_assert_not(json_whole(json_member(root, "s"), &v));
    cr_assert(json_whole(json_next(json_first(a)), &v));
    cr_assert_eq(v, 2);
    cr_assert_null(json_key(json_first(a)));
    cr_assert_str_eq(json_type_name(JSON_ARRAY), "an array");
    json_destroy(j);
    json_destroy(NULL);
}

/* ---- writing ---- */

Test(json, writes_what_it_reads)
{
    json_writer *w = json_writer_create();
    const char *text;
    size_t len;

    json_begin_object(w, NULL);
    json_put_u64(w, "max", UINT64_MAX);
    json_put_i64(w, "min", INT64_MIN);
    json_put_bool(w, "yes", true);
    json_put_null(w, "none");
    json_begin_array(w, "list");
    json_put_i64(w, NULL, 1);
    json_begin_object(w, NULL);
    json_end(w);
    json_begin_array(w, NULL);
    json_end(w);
    json_end(w);
    json_put_hex(w, "key", (const uint8_t *)"\x00\xAB\xFF", 3);
    cr_assert_null(json_text(w, &len), "an open object is no text");
    json_end(w);
    text = json_text(w, &len);
    cr_assert_str_eq(text, "{\"max\":18446744073709551615,\"min\":-9223372036854775808,\"yes\":true,\"none\":null,"
                           "\"list\":[1,{},[]],\"key\":\"00abff\"}");
    cr_assert_eq(len, strlen(text));
    accept(text, len);
    json_writer_destroy(w);
    json_writer_destroy(NULL);
}

Test(json, writes_whole_numbers_and_hex_of_any_length)
{
    json_writer *w = json_writer_create();
    uint8_t bytes[40];

    for (int i = 0; i < 40; i++)
        bytes[i] = (uint8_t)(i * 5);
    json_begin_array(w, NULL);
    json_put_u64(w, NULL, 0);
    json_put_u64(w, NULL, 10);
    json_put_hex(w, NULL, bytes, 0);
    json_put_hex(w, NULL, bytes, 32);
    json_put_hex(w, NULL, bytes, 40);
    json_end(w);
    cr_assert_str_eq(json_text(w, NULL),
                     "[0,10,\"\",\"00050a0f14191e23282d32373c41464b50555a5f64696e73787d82878c91969b\","
                     "\"00050a0f14191e23282d32373c41464b50555a5f64696e73787d82878c91969ba0a5aaafb4b9bec3\"]");
    json_writer_destroy(w);
}

static double seconds_to_write(const char *text)
{
    struct timespec from, to;
    json_writer *w = json_writer_create();

    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    json_begin_array(w, NULL);
    for (int i = 0; i < 1000; i++)
        json_put_string(w, NULL, text);
    json_end(w);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    cr_assert_not_null(json_text(w, NULL));
    json_writer_destroy(w);
    return (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) * 1e-9;
}

/* A list of 65,536 leases is written while everybody waits. */
Test(json, writes_plain_text_by_the_run_and_not_by_the_character)
{
    static char plain[8193], other[8193];

    memset(plain, 'x', 8192);
    for (int i = 0; i < 8192; i += 2)
        memcpy(other + i, "\xC3\xA9", 2);
    (void)seconds_to_write(plain); /* memory is there from now on */
    cr_assert_lt(seconds_to_write(plain), seconds_to_write(other) / 2);
}

Test(json, writes_numbers_that_are_not_finite_as_null)
{
    json_writer *w = json_writer_create();

    json_begin_array(w, NULL);
    json_put_double(w, NULL, NAN);
    json_put_double(w, NULL, INFINITY);
    json_put_double(w, NULL, -INFINITY);
    json_put_double(w, NULL, 0.1);
    json_put_double(w, NULL, 1.0 / 3);
    json_put_double(w, NULL, 1e300);
    json_end(w);
    cr_assert_str_eq(json_text(w, NULL), "[null,null,null,0.1,0.33333333333333331,1e+300]");
    json_writer_destroy(w);
}

Test(json, escapes_every_string_so_that_it_reads_back)
{
    json_writer *w = json_writer_create();
    char all[128];
    const char *text;
    size_t len;
    json *j = NULL;

    for (int i = 1; i < 128; i++)
        all[i - 1] = (char)i;
    all[127] = '\0';
    json_begin_object(w, NULL);
    json_put_string(w, "k\"\n", all);
    json_put_string(w, "bad",
                    "a\x80"
                    "b\xC3");
    json_end(w);
    text = json_text(w, &len);
    cr_assert_null(strchr(text, '\n'));
    cr_assert_eq(json_parse(text, len, &j, NULL), KVS_OK);
    cr_assert_str_eq(json_string(json_member(json_root(j), "k\"\n")), all);
    cr_assert_str_eq(json_string(json_member(json_root(j), "bad")), "a\xEF\xBF\xBD"
                                                                    "b\xEF\xBF\xBD");
    json_destroy(j);
    json_writer_destroy(w);
}

Test(json, quotes_a_text_for_a_message_as_one_short_line)
{
    char buf[JSON_QUOTED_BYTES], text[512];
    const unsigned char *p = (const unsigned char *)buf;
    size_t n;

    cr_assert_str_eq(json_quote(buf, "a\"b\\\n\x7F\xC3\xA4"), "\"a\\\"b\\\\\\u000a\\u007f\xC3\xA4\"");
    cr_assert_str_eq(json_quote(buf, ""), "\"\"");
    cr_assert_str_eq(json_quote(buf, "a\x80z"), "\"a?z\"");
    for (size_t i = 0; i + 4 < sizeof text; i += 4)
        memcpy(text + i, "\xF0\x9F\x98\x80", 5);
    cr_assert_str_eq(buf + strlen(json_quote(buf, text)) - 4, "...\"");
    for (; *p != '\0'; p += n) { /* no character is cut in two */
        n = json_utf8_bytes(p, strlen((const char *)p));
        cr_assert_gt(n, 0);
    }
}

Test(json, pretty_text_keeps_strings_and_parses_back)
{
    static const char TEXT[] = "{\"a,{\\\"\":[1,{}],\"b\":\"x:y}\",\"c\":[]}";
    char *out = NULL;
    size_t len = 0;
    FILE *to = open_memstream(&out, &len);

    json_pretty(TEXT, sizeof TEXT - 1, to);
    fclose(to);
    cr_assert_str_eq(out, "{\n  \"a,{\\\"\": [\n    1,\n    {}\n  ],\n  \"b\": \"x:y}\",\n  \"c\": []\n}\n");
    accept(out, len);
    free(out);
}

Test(json, a_writer_that_could_not_be_made_is_one_that_has_failed)
{
    json_begin_object(NULL, NULL);
    json_put_u64(NULL, "n", 1);
    json_put_string(NULL, "s", "x");
    json_put_hex(NULL, "h", (const uint8_t *)"x", 1);
    json_begin_array(NULL, "a");
    json_end(NULL);
    json_end(NULL);
    cr_assert_null(json_text(NULL, NULL));
    json_writer_destroy(NULL);
}
