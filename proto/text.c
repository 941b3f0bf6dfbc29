#include "proto/text.h"

#include <stdbool.h>
#include <string.h>

/* Bytes of the code point that begins with this one, or 0: none does. */
static size_t utf8_bytes(uint8_t first)
{
    return first < 0x80 ? 1 : (first & 0xe0) == 0xc0 ? 2 : (first & 0xf0) == 0xe0 ? 3 : (first & 0xf8) == 0xf0 ? 4 : 0;
}

/* Length of the code point at `p` (1..4), or 0: not UTF-8 (also overlong, surrogate, too high) or a control
 * character. */
static size_t utf8_step(const uint8_t *p, size_t n)
{
    static const uint32_t LEAST[] = {0, 0, 0x80, 0x800, 0x10000};
    size_t len = utf8_bytes(p[0]);
    uint32_t c;

    if (len == 0 || len > n)
        return 0;
    c = len == 1 ? p[0] : p[0] & (0x7fU >> len);
    for (size_t k = 1; k < len; k++) {
        if ((p[k] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (p[k] & 0x3f);
    }
    if (c < LEAST[len] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
        return 0;
    return c < 0x20 || (c >= 0x7f && c <= 0x9f) ? 0 : len;
}

kvs_status text_check(const char *what, const uint8_t *text, size_t len, kvs_err *err)
{
    for (size_t i = 0, step; i < len; i += step) {
        step = utf8_step(text + i, len - i);
        if (step == 0)
            return kvs_fail(err, KVS_E_INVALID, "%s: byte %zu (0x%02x) is not UTF-8 text without control characters",
                            what, i, text[i]);
    }
    return KVS_OK;
}

/* Are the `n` bytes up to the end the first ones of a longer code point? */
static bool is_cut(const uint8_t *p, size_t n)
{
    if (utf8_bytes(p[0]) <= n)
        return false;
    for (size_t k = 1; k < n; k++)
        if ((p[k] & 0xc0) != 0x80)
            return false;
    return true;
}

void text_tame(char *text)
{
    uint8_t *p = (uint8_t *)text;
    size_t left = strlen(text), step;

    for (; left > 0; p += step, left -= step) {
        step = utf8_step(p, left);
        if (step > 0)
            continue;
        *p = is_cut(p, left) ? '\0' : '?';
        if (*p == '\0')
            return;
        step = 1;
    }
}
