#include "proto/text.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static const char *tamed(const char *text)
{
    static char buf[64];

    (void)snprintf(buf, sizeof buf, "%s", text);
    text_tame(buf);
    return buf;
}

Test(text, tames_what_a_terminal_would_obey_and_leaves_the_rest)
{
    static const char *const CASES[][2] = {
        {"", ""},
        {"plain /path", "plain /path"},
        {"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"a\033[31mb", "a?[31mb"},
        {"a\nb\tc\x7f", "a?b?c?"},
        {"\xc2\x9b"
         "31m\xc2\xa0",
         "??31m\xc2\xa0"}, /* U+009B begins what ESC [ does; U+00A0 is a space */
        {"a\x9b"
         "b\xff"
         "c\xc0\x80"
         "d",
         "a?b?c??d"}, /* no UTF-8, and overlong */
        {"\xed\xa0\x80"
         "a",
         "???a"}, /* a surrogate */
        {"a\xe2\x82"
         "b",
         "a??b"},           /* half a character in the middle */
        {"a\xe2\x82", "a"}, /* cut by snprintf */
        {"a\xc3", "a"},
        {"a\x82", "a?"},
    };

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        cr_assert_str_eq(tamed(CASES[i][0]), CASES[i][1], "%zu: %s", i, tamed(CASES[i][0]));
}

Test(text, what_was_tamed_passes_the_check)
{
    for (unsigned a = 1; a < 256; a++)
        for (unsigned b = 1; b < 256; b++) {
            const char raw[] = {'x', (char)a, (char)b, 'y', (char)a, '\0'}, *text = tamed(raw);
            kvs_err err = {0};

            cr_assert_eq(text_check("text", (const uint8_t *)text, strlen(text), &err), KVS_OK, "%02x %02x: %s", a, b,
                         err.msg);
        }
}
