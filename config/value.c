#include "config/value.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- words for messages ---- */

static const char *show(char buf[JSON_QUOTED_BYTES], const json_node *n)
{
    switch (json_type_of(n)) {
    case JSON_STRING:
        return json_quote(buf, json_string(n));
    case JSON_NUMBER:
        (void)snprintf(buf, JSON_QUOTED_BYTES, "%.15g", json_number(n));
        if (strtod(buf, NULL) != json_number(n))
            (void)snprintf(buf, JSON_QUOTED_BYTES, "%.17g", json_number(n));
        return buf;
    case JSON_BOOL:
        return json_bool(n) ? "true" : "false";
    case JSON_NULL:
    case JSON_ARRAY:
    case JSON_OBJECT:
        break;
    }
    return json_type_name(json_type_of(n));
}

static kvs_status wrong_type(const option *o, const json_node *v, const char *expected, kvs_err *err)
{
    char text[JSON_QUOTED_BYTES];
    json_type t = json_type_of(v);
    bool has_value = t == JSON_STRING || t == JSON_NUMBER || t == JSON_BOOL;

    return kvs_fail(err, KVS_E_CONFIG, "%s: expected %s, found %s%s%s", o->key, expected, json_type_name(t),
                    has_value ? ", " : "", has_value ? show(text, v) : "");
}

static kvs_status out_of_range(const option *o, const char *value, kvs_err *err)
{
    char lo[OPTION_TEXT_BYTES], hi[OPTION_TEXT_BYTES];

    if (o->kind != OPTION_SIZE)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s is outside %" PRId64 "..%" PRId64 "%s%s", o->key, value, o->min,
                        o->max, *o->unit != '\0' ? " " : "", o->unit);
    option_format_size(lo, o->min);
    option_format_size(hi, o->max);
    return kvs_fail(err, KVS_E_CONFIG, "%s: %s is outside %" PRId64 "..%" PRId64 " bytes (%s..%s)", o->key, value,
                    o->min, o->max, lo, hi);
}

/* ---- one value ---- */

/* Digits at *p as a number, *p behind them; false if it does not fit. */
static bool take_digits(const char **p, int64_t *ret)
{
    int64_t v = 0;

    for (; **p >= '0' && **p <= '9'; (*p)++) {
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, **p - '0', &v))
            return false;
    }
    *ret = v;
    return true;
}

kvs_status config_size_parse(const char *text, int64_t *ret, kvs_err *err)
{
    static const char *const UNITS[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    const char *p = text;
    char shown[JSON_QUOTED_BYTES];
    int64_t v;
    unsigned u = 0;

    (void)json_quote(shown, text);
    if (*p < '0' || *p > '9' || (*p == '0' && p[1] >= '0' && p[1] <= '9'))
        return kvs_fail(err, KVS_E_CONFIG, "%s: a size is a whole number and a unit, as in \"64GiB\"", shown);
    if (!take_digits(&p, &v))
        return kvs_fail(err, KVS_E_CONFIG, "%s: more than 2^63 - 1 bytes", shown);
    while (*p != '\0' && u < 5 && strcmp(p, UNITS[u]) != 0)
        u++;
    if (u == 5)
        return kvs_fail(err, KVS_E_CONFIG,
                        "%s: the unit must be B, KiB, MiB, GiB or TiB (powers of 1024), directly behind a whole number",
                        shown);
    if (__builtin_mul_overflow(v, INT64_C(1) << (10 * u), &v))
        return kvs_fail(err, KVS_E_CONFIG, "%s: more than 2^63 - 1 bytes", shown);
    *ret = v;
    return KVS_OK;
}

static kvs_status set_number(config *c, const option *o, const json_node *v, kvs_err *err)
{
    char text[JSON_QUOTED_BYTES];
    double d = json_number(v);
    int64_t i;

    (void)show(text, v);
    if (!json_whole(v, &i)) {
        if (d == floor(d) && (d < (double)o->min || d > (double)o->max))
            return out_of_range(o, text, err);
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s is not a whole number as written", o->key, text);
    }
    if (i < o->min || i > o->max)
        return out_of_range(o, text, err);
    option_set_number(c, o, i);
    return KVS_OK;
}

static kvs_status set_size(config *c, const option *o, const json_node *v, kvs_err *err)
{
    char text[JSON_QUOTED_BYTES];
    int64_t i;
    kvs_err why;

    if (json_type_of(v) == JSON_NUMBER)
        return set_number(c, o, v, err);
    if (json_type_of(v) != JSON_STRING)
        return wrong_type(o, v, "a size (bytes, or a string such as \"64GiB\")", err);
    if (config_size_parse(json_string(v), &i, &why) != KVS_OK)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s", o->key, why.msg);
    if (i < o->min || i > o->max)
        return out_of_range(o, show(text, v), err);
    option_set_number(c, o, i);
    return KVS_OK;
}

static kvs_status set_int(config *c, const option *o, const json_node *v, kvs_err *err)
{
    return json_type_of(v) == JSON_NUMBER ? set_number(c, o, v, err) : wrong_type(o, v, "a whole number", err);
}

static kvs_status set_bool(config *c, const option *o, const json_node *v, kvs_err *err)
{
    if (json_type_of(v) != JSON_BOOL)
        return wrong_type(o, v, "true or false", err);
    option_set_number(c, o, json_bool(v));
    return KVS_OK;
}

static kvs_status set_path(config *c, const option *o, const json_node *v, kvs_err *err)
{
    const char *text = json_string(v);
    char shown[JSON_QUOTED_BYTES];
    size_t len;

    if (text == NULL)
        return wrong_type(o, v, "a path", err);
    (void)json_quote(shown, text);
    len = strlen(text);
    if (len == 0 && o->def_text[0] == '\0') { /* none is a choice */
        option_set_string(c, o, text);
        return KVS_OK;
    }
    if (len < 1 || len > OPTION_PATH_MAX)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s has %zu bytes; a path has 1..%d", o->key, shown, len,
                        (int)OPTION_PATH_MAX);
    if (text[0] == '@')
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s is an abstract name, which has no file mode; give a path", o->key,
                        shown);
    if (text[0] != '/')
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s is not absolute; a path begins with /", o->key, shown);
    if (text[len - 1] == '/')
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s names a directory; a path must not end with /", o->key, shown);
    option_set_string(c, o, text);
    return KVS_OK;
}

static kvs_status set_word(config *c, const option *o, const json_node *v, kvs_err *err)
{
    const char *text = json_string(v), *choice;
    char shown[JSON_QUOTED_BYTES];
    size_t len;

    if (text == NULL)
        return wrong_type(o, v, "a string", err);
    for (size_t i = 0; (choice = option_choice(o, i, &len)) != NULL; i++) {
        if (strlen(text) != len || memcmp(text, choice, len) != 0)
            continue;
        option_set_string(c, o, text);
        return KVS_OK;
    }
    return kvs_fail(err, KVS_E_CONFIG, "%s: %s is not one of %s", o->key, json_quote(shown, text), o->choices);
}

static kvs_status set_mode(config *c, const option *o, const json_node *v, kvs_err *err)
{
    const char *text = json_string(v);
    char shown[JSON_QUOTED_BYTES];
    size_t len;

    if (text == NULL)
        return wrong_type(o, v, "a file mode as a string such as \"0660\"", err);
    len = strlen(text);
    if (len < 3 || len > 4 || strspn(text, "01234567") != len || (len == 4 && text[0] != '0'))
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s is not an octal file mode in \"0000\"..\"0777\"", o->key,
                        json_quote(shown, text));
    option_set_number(c, o, strtol(text, NULL, 8));
    return KVS_OK;
}

kvs_status value_set(config *c, const option *o, const json_node *v, kvs_err *err)
{
    switch (o->kind) {
    case OPTION_SIZE:
        return set_size(c, o, v, err);
    case OPTION_INT:
        return set_int(c, o, v, err);
    case OPTION_BOOL:
        return set_bool(c, o, v, err);
    case OPTION_PATH:
        return set_path(c, o, v, err);
    case OPTION_WORD:
        return set_word(c, o, v, err);
    case OPTION_MODE:
        return set_mode(c, o, v, err);
    }
    return kvs_fail(err, KVS_E_CONFIG, "%s: unknown kind of option", o->key);
}
