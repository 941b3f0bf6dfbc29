/* Answers for people: golden texts; and the order statistics that bench prints. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/render.h"

static char shown[8192];

static kvs_status render(const char *json, kvs_err *err)
{
    char *text = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&text, &len);
    kvs_status s;

    cr_assert_not_null(f);
    s = render_json(f, json, strlen(json), err);
    cr_assert_eq(fclose(f), 0);
    cr_assert(len < sizeof shown);
    memcpy(shown, text, len + 1);
    free(text);
    return s;
}

#define SHOWS(json, text)                                                                                              \
    do {                                                                                                               \
        kvs_err err_ = {0};                                                                                            \
        cr_assert_eq(render((json), &err_), KVS_OK, "%s", err_.msg);                                                   \
        cr_assert_str_eq(shown, (text));                                                                               \
    } while (0)

Test(render, aligns_members_and_indents_objects)
{
    SHOWS(
        "{\"version\":\"0.1\",\"ok\":true,\"pool\":{\"max_bytes\":4497408,\"free\":3,\"hit_rate\":0.25,\"none\":null},"
        "\"clients\":2}",
        "version  0.1\n"
        "ok       yes\n"
        "pool\n"
        "  max_bytes  4497408 (4.29 MiB)\n"
        "  free       3\n"
        "  hit_rate   0.25\n"
        "  none       -\n"
        "clients  2\n");
}

Test(render, shows_an_array_of_objects_as_a_table)
{
    SHOWS("{\"layouts\":[{\"slot_bytes\":2304,\"name\":\"a\",\"on\":false},{\"slot_bytes\":16,\"name\":\"longer\"}]}",
          "layouts\n"
          "  slot_bytes       name    on\n"
          "  2304 (2.25 KiB)  a       no\n"
          "  16               longer  \n");
    SHOWS("[{\"n\":1,\"of\":[1,2],\"in\":{\"x\":1}}]", "n  of   in\n1  [2]  x=1\n");
}

/* Symptom: 'status' showed what decides how a GPU copies, and 'namespaces' the formats, as "{4}" and "{1}". */
Test(render, shows_objects_in_a_table_short_or_as_a_table_below)
{
    SHOWS(
        "{\"list\":[{\"ns\":0,\"text\":\"\",\"of\":{\"mla_bf16\":61,\"raw\":2}},{\"ns\":1,\"text\":\"b\",\"of\":{}}]}",
        "list\n"
        "  ns  text  of\n"
        "  0   -     mla_bf16=61,raw=2\n"
        "  1   b     -\n");
    SHOWS("{\"devices\":[{\"device\":0,\"way\":{\"path\":\"auto\",\"why_not_table\":\"a reason that is longer than a "
          "cell has room for\",\"table\":null},\"up\":true},{\"device\":1,\"way\":{\"path\":\"auto\","
          "\"why_not_table\":\"\",\"table\":{\"rows\":[1,2]}},\"up\":false}],\"n\":1}",
          "devices\n"
          "  device  up\n"
          "  0       yes\n"
          "  1       no\n"
          "  way\n"
          "    device  path  why_not_table                                     table\n"
          "    0       auto  a reason that is longer than a cell has room for  -\n"
          "    1       auto  -                                                 {1}\n"
          "n  1\n");
    SHOWS("[{\"n\":1,\"far\":{\"x\":[7]}},{\"n\":2,\"far\":{\"y\":5}},{\"n\":3}]",
          "n\n1\n2\n3\nfar\n  n  x    y\n  1  [1]  \n  2       5\n  3       \n");
}

Test(render, shows_plain_and_empty_arrays_on_their_line)
{
    SHOWS("{\"planes\":[1,\"b\",null],\"clients\":[],\"n\":1}", "planes   1 b -\nclients  none\nn        1\n");
    SHOWS("{\"list\":[{\"n\":1,\"of\":[]}]}", "list\n  n  of\n  1  -\n");
}

/* Symptom: 'status' ended some lines behind the name. */
Test(render, shows_an_empty_text_as_none)
{
    SHOWS("{\"device_name\":\"\",\"none\":null}", "device_name  -\nnone         -\n");
}

Test(render, shows_sizes_of_an_object_that_is_named_for_bytes)
{
    SHOWS("{\"pool_bytes\":{\"arena\":16777216,\"name\":\"x\"}}",
          "pool_bytes\n  arena  16777216 (16.00 MiB)\n  name   x\n");
}

Test(render, lets_no_client_write_to_the_terminal)
{
    SHOWS("{\"name\":\"a\\u001b[31mb\\u007f\\u009bc\\n\"}", "name  a?[31mb???c?\n");
    SHOWS("{\"name\":\"h\\u00e9\\u4e16\"}", "name  h\xc3\xa9\xe4\xb8\x96\n");
}

Test(render, cuts_long_texts_between_characters)
{
    char json[1024] = "{\"n\":\"";

    for (int i = 0; i < 200; i++)
        (void)strcat(json, "\xc3\xa9");
    (void)strcat(json, "\"}");
    cr_assert_eq(render(json, NULL), KVS_OK);
    cr_assert_eq(strlen(shown), 3 + 158 + 1, "79 whole characters of two bytes");
}

Test(render, shows_a_lone_value)
{
    SHOWS("17", "17\n");
    SHOWS("\"x\"", "x\n");
    SHOWS("{}", "");
}

Test(render, refuses_what_is_no_json)
{
    kvs_err err = {0};

    cr_assert_eq(render("{\"a\":", &err), KVS_E_CONFIG);
    cr_assert_str_not_empty(err.msg);
    cr_assert_str_empty(shown);
}

Test(render, says_sizes_with_a_fitting_unit)
{
    static const struct {
        double bytes;
        const char *text;
    } CASES[] = {{0, "0 B"},
                 {1023, "1023 B"},
                 {1024, "1.00 KiB"},
                 {4497408, "4.29 MiB"},
                 {1.5e9, "1.40 GiB"},
                 {1099511627776.0, "1.00 TiB"},
                 {1099511627776.0 * 5000, "5000.00 TiB"}};
    char buf[32];

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        cr_assert_str_eq(render_bytes(buf, sizeof buf, CASES[i].bytes), CASES[i].text);
}

Test(clock, percentile_is_a_sample_with_so_many_below_it)
{
    double ten[] = {7, 3, 9, 1, 5, 10, 2, 8, 4, 6}, one[] = {42}, hundred[100];

    cr_assert_eq(clock_percentile(ten, 10, 50), 6);
    cr_assert_eq(clock_percentile(ten, 10, 0), 1);
    cr_assert_eq(clock_percentile(ten, 10, 90), 10);
    cr_assert_eq(clock_percentile(ten, 10, 100), 10);
    for (int p = 0; p <= 100; p += 25)
        cr_assert_eq(clock_percentile(one, 1, p), 42);
    for (int i = 0; i < 100; i++)
        hundred[i] = 100 - i;
    cr_assert_eq(clock_percentile(hundred, 100, 99), 100);
    cr_assert_eq(clock_percentile(hundred, 100, 50), 51);
    cr_assert_eq(hundred[0], 1, "they are sorted afterwards");
}

Test(clock, never_goes_back)
{
    uint64_t last = clock_ns();

    for (int i = 0; i < 1000; i++) {
        uint64_t now = clock_ns();

        cr_assert_geq(now, last);
        last = now;
    }
}
