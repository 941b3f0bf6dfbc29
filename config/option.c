#include "config/option.h"

#include <inttypes.h>
#include <string.h>

#include "config/json.h"

#define AT(f)                             offsetof(config, f), sizeof(((config *)0)->f)
#define ROW_SIZE(f, k, d, lo, hi, r, h)   {k, OPTION_SIZE, AT(f), d, lo, hi, NULL, "bytes", NULL, r, h},
#define ROW_INT(f, k, d, lo, hi, u, r, h) {k, OPTION_INT, AT(f), d, lo, hi, NULL, u, NULL, r, h},
#define ROW_BOOL(f, k, d, r, h)           {k, OPTION_BOOL, AT(f), d, 0, 1, NULL, "", NULL, r, h},
#define ROW_PATH(f, k, d, r, h)           {k, OPTION_PATH, AT(f), 0, sizeof(d) > 1, OPTION_PATH_MAX, d, "", NULL, r, h},
#define ROW_WORD(f, k, d, c, r, h)        {k, OPTION_WORD, AT(f), 0, 0, 0, d, "", c, r, h},
#define ROW_MODE(f, k, d, r, h)           {k, OPTION_MODE, AT(f), d, 0, 0777, NULL, "", NULL, r, h},
#define ROW_NAME(f, k, r, h)              {k, OPTION_NAME, AT(f), 0, 1, CONFIG_NAME_BYTES - 1, "", "", NULL, r, h},
#define ROW_UIDS(f, k, r, h)              {k, OPTION_UIDS, AT(f), 0, 0, UINT32_MAX - 1, NULL, "", NULL, r, h},
#define ROW_FLAGS(f, k, d, c, r, h)       {k, OPTION_FLAGS, AT(f), d, 0, d, NULL, "", c, r, h},

const option OPTIONS[] = {CONFIG_OPTIONS(ROW_SIZE, ROW_INT, ROW_BOOL, ROW_PATH, ROW_WORD, ROW_MODE)};
const size_t N_OPTIONS = sizeof OPTIONS / sizeof *OPTIONS;

#undef AT
#define AT(f) offsetof(config_tenant, f), sizeof(((config_tenant *)0)->f)
const option TENANT_OPTIONS[] = {
    CONFIG_TENANT_OPTIONS(ROW_NAME, ROW_PATH, ROW_MODE, ROW_UIDS, ROW_FLAGS, ROW_SIZE, ROW_INT)};
const size_t N_TENANT_OPTIONS = sizeof TENANT_OPTIONS / sizeof *TENANT_OPTIONS;

int64_t option_number(const void *base, const option *o)
{
    const char *at = (const char *)base + o->offset;
    int64_t v;
    bool b;

    if (o->kind == OPTION_BOOL) {
        memcpy(&b, at, sizeof b);
        return b;
    }
    memcpy(&v, at, sizeof v);
    return v;
}

const char *option_string(const void *base, const option *o)
{
    return (const char *)base + o->offset;
}

const config_uids *option_uids(const void *base, const option *o)
{
    return (const void *)((const char *)base + o->offset);
}

void option_set_number(void *base, const option *o, int64_t v)
{
    char *at = (char *)base + o->offset;
    bool b = v != 0;

    if (o->kind == OPTION_BOOL)
        memcpy(at, &b, sizeof b);
    else
        memcpy(at, &v, sizeof v);
}

void option_set_string(void *base, const option *o, const char *v)
{
    (void)snprintf((char *)base + o->offset, o->bytes, "%s", v);
}

static bool is_text(const option *o)
{
    return o->kind == OPTION_PATH || o->kind == OPTION_WORD || o->kind == OPTION_NAME;
}

void option_set_default(void *base, const option *o)
{
    if (is_text(o))
        option_set_string(base, o, o->def_text);
    else if (o->kind == OPTION_UIDS)
        memset((char *)base + o->offset, 0, o->bytes);
    else
        option_set_number(base, o, o->def);
}

bool option_equal(const void *a, const void *b, const option *o)
{
    const char *x = (const char *)a + o->offset, *y = (const char *)b + o->offset;

    return is_text(o) ? strcmp(x, y) == 0 : memcmp(x, y, o->bytes) == 0; /* what is behind a text's end is not said */
}

void option_copy(void *to, const void *from, const option *o)
{
    memcpy((char *)to + o->offset, (const char *)from + o->offset, o->bytes);
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

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int lower(char c)
{
    return c >= 'A' && c <= 'Z' ? c + 32 : (unsigned char)c;
}

static size_t edits(const char *a, const char *b)
{
    size_t row[JSON_QUOTED_BYTES], na = strlen(a), nb = strlen(b);

    if (na >= JSON_QUOTED_BYTES || nb >= JSON_QUOTED_BYTES)
        return JSON_QUOTED_BYTES;
    for (size_t j = 0; j <= nb; j++)
        row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t replaced = diagonal + (lower(a[i - 1]) != lower(b[j - 1]));

            diagonal = row[j];
            row[j] = least(replaced, least(row[j], row[j - 1]) + 1);
        }
    }
    return row[nb];
}

size_t option_distance(const char *word, const char *name)
{
    size_t n = strlen(word);

    return n > 0 && strncmp(word, name, n) == 0 && name[n] == '_' ? 1 : edits(word, name);
}

void option_format_size(char buf[OPTION_TEXT_BYTES], int64_t bytes)
{
    static const char *const UNITS[] = {"", "KiB", "MiB", "GiB", "TiB"};
    unsigned u = 0;

    for (; bytes != 0 && bytes % 1024 == 0 && u < 4; u++)
        bytes /= 1024;
    (void)snprintf(buf, OPTION_TEXT_BYTES, "%" PRId64 "%s", bytes, UNITS[u]);
}

const char *option_say_size(char buf[OPTION_TEXT_BYTES], int64_t bytes)
{
    option_format_size(buf, bytes);
    if (strspn(buf, "0123456789") == strlen(buf))
        (void)strcat(buf, " bytes");
    return buf;
}

static void format_uids(char buf[OPTION_TEXT_BYTES], const config_uids *u)
{
    size_t len = (size_t)snprintf(buf, OPTION_TEXT_BYTES, "[");

    for (uint32_t i = 0; i < u->n; i++)
        len += (size_t)snprintf(buf + len, OPTION_TEXT_BYTES - len, "%s%" PRIu32, i > 0 ? "," : "", u->uid[i]);
    (void)snprintf(buf + len, OPTION_TEXT_BYTES - len, "]");
}

static void format_flags(char buf[OPTION_TEXT_BYTES], const option *o, int64_t flags)
{
    size_t len = (size_t)snprintf(buf, OPTION_TEXT_BYTES, "["), n, choice_len;
    const char *choice;

    for (n = 0; (choice = option_choice(o, n, &choice_len)) != NULL; n++)
        if ((flags >> n & 1) != 0)
            len += (size_t)snprintf(buf + len, OPTION_TEXT_BYTES - len, "%s%.*s", len > 1 ? "," : "", (int)choice_len,
                                    choice);
    (void)snprintf(buf + len, OPTION_TEXT_BYTES - len, "]");
}

const char *option_format(char buf[OPTION_TEXT_BYTES], const void *base, const option *o)
{
    switch (o->kind) {
    case OPTION_SIZE:
        option_format_size(buf, option_number(base, o));
        return buf;
    case OPTION_INT:
        (void)snprintf(buf, OPTION_TEXT_BYTES, "%" PRId64, option_number(base, o));
        return buf;
    case OPTION_MODE:
        (void)snprintf(buf, OPTION_TEXT_BYTES, "%04" PRIo64, option_number(base, o));
        return buf;
    case OPTION_BOOL:
        return option_number(base, o) != 0 ? "true" : "false";
    case OPTION_UIDS:
        format_uids(buf, option_uids(base, o));
        return buf;
    case OPTION_FLAGS:
        format_flags(buf, o, option_number(base, o));
        return buf;
    case OPTION_PATH:
    case OPTION_WORD:
    case OPTION_NAME:
        break;
    }
    return option_string(base, o);
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
