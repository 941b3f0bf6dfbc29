#include "config/option.h"

#include <inttypes.h>
#include <string.h>

#define AT(f)                             offsetof(config, f)
#define ROW_SIZE(f, k, d, lo, hi, r, h)   {k, OPTION_SIZE, AT(f), d, lo, hi, NULL, "bytes", NULL, r, h},
#define ROW_INT(f, k, d, lo, hi, u, r, h) {k, OPTION_INT, AT(f), d, lo, hi, NULL, u, NULL, r, h},
#define ROW_BOOL(f, k, d, r, h)           {k, OPTION_BOOL, AT(f), d, 0, 1, NULL, "", NULL, r, h},
#define ROW_PATH(f, k, d, r, h)           {k, OPTION_PATH, AT(f), 0, sizeof(d) > 1, OPTION_PATH_MAX, d, "", NULL, r, h},
#define ROW_WORD(f, k, d, c, r, h)        {k, OPTION_WORD, AT(f), 0, 0, 0, d, "", c, r, h},
#define ROW_MODE(f, k, d, r, h)           {k, OPTION_MODE, AT(f), d, 0, 0777, NULL, "", NULL, r, h},

const option OPTIONS[] = {CONFIG_OPTIONS(ROW_SIZE, ROW_INT, ROW_BOOL, ROW_PATH, ROW_WORD, ROW_MODE)};
const size_t N_OPTIONS = sizeof OPTIONS / sizeof *OPTIONS;

int64_t option_number(const config *c, const option *o)
{
    const char *at = (const char *)c + o->offset;
    int64_t v;
    bool b;

    if (o->kind == OPTION_BOOL) {
        memcpy(&b, at, sizeof b);
        return b;
    }
    memcpy(&v, at, sizeof v);
    return v;
}

const char *option_string(const config *c, const option *o)
{
    return (const char *)c + o->offset;
}

void option_set_number(config *c, const option *o, int64_t v)
{
    char *at = (char *)c + o->offset;
    bool b = v != 0;

    if (o->kind == OPTION_BOOL)
        memcpy(at, &b, sizeof b);
    else
        memcpy(at, &v, sizeof v);
}

void option_set_string(config *c, const option *o, const char *v)
{
    size_t cap = o->kind == OPTION_PATH ? CONFIG_PATH_BYTES : CONFIG_WORD_BYTES;

    (void)snprintf((char *)c + o->offset, cap, "%s", v);
}

const char *option_name(const option *o)
{
    return o->key + option_section_bytes(o) + 1;
}

size_t option_section_bytes(const option *o)
{
    return strcspn(o->key, ".");
}

bool option_same_section(const option *a, const option *b)
{
    size_t n = option_section_bytes(a);

    return n == option_section_bytes(b) && memcmp(a->key, b->key, n) == 0;
}

void option_format_size(char buf[OPTION_TEXT_BYTES], int64_t bytes)
{
    static const char *const UNITS[] = {"", "KiB", "MiB", "GiB", "TiB"};
    unsigned u = 0;

    for (; bytes != 0 && bytes % 1024 == 0 && u < 4; u++)
        bytes /= 1024;
    (void)snprintf(buf, OPTION_TEXT_BYTES, "%" PRId64 "%s", bytes, UNITS[u]);
}

const char *option_format(char buf[OPTION_TEXT_BYTES], const config *c, const option *o)
{
    switch (o->kind) {
    case OPTION_SIZE:
        option_format_size(buf, option_number(c, o));
        return buf;
    case OPTION_INT:
        (void)snprintf(buf, OPTION_TEXT_BYTES, "%" PRId64, option_number(c, o));
        return buf;
    case OPTION_MODE:
        (void)snprintf(buf, OPTION_TEXT_BYTES, "%04" PRIo64, option_number(c, o));
        return buf;
    case OPTION_BOOL:
        return option_number(c, o) != 0 ? "true" : "false";
    case OPTION_PATH:
    case OPTION_WORD:
        break;
    }
    return option_string(c, o);
}

const char *option_choice(const option *o, size_t n, size_t *ret_len)
{
    const char *at = o->choices;

    for (; n > 0; n--) {
        at = strchr(at, '|');
        if (at == NULL)
            return NULL;
        at++;
    }
    *ret_len = strcspn(at, "|");
    return at;
}
