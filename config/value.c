#include "config/value.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/users.h"

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

static kvs_status set_number(void *base, const option *o, const json_node *v, kvs_err *err)
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
    option_set_number(base, o, i);
    return KVS_OK;
}

static kvs_status set_size(void *base, const option *o, const json_node *v, kvs_err *err)
{
    char text[JSON_QUOTED_BYTES];
    int64_t i;
    kvs_err why;

    if (json_type_of(v) == JSON_NUMBER)
        return set_number(base, o, v, err);
    if (json_type_of(v) != JSON_STRING)
        return wrong_type(o, v, "a size (bytes, or a string such as \"64GiB\")", err);
    if (config_size_parse(json_string(v), &i, &why) != KVS_OK)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s", o->key, why.msg);
    if (i < o->min || i > o->max)
        return out_of_range(o, show(text, v), err);
    option_set_number(base, o, i);
    return KVS_OK;
}

static kvs_status set_int(void *base, const option *o, const json_node *v, kvs_err *err)
{
    return json_type_of(v) == JSON_NUMBER ? set_number(base, o, v, err) : wrong_type(o, v, "a whole number", err);
}

static kvs_status set_bool(void *base, const option *o, const json_node *v, kvs_err *err)
{
    if (json_type_of(v) != JSON_BOOL)
        return wrong_type(o, v, "true or false", err);
    option_set_number(base, o, json_bool(v));
    return KVS_OK;
}

static kvs_status set_path(void *base, const option *o, const json_node *v, kvs_err *err)
{
    const char *text = json_string(v);
    char shown[JSON_QUOTED_BYTES];
    size_t len;

    if (text == NULL)
        return wrong_type(o, v, "a path", err);
    (void)json_quote(shown, text);
    len = strlen(text);
    if (len == 0 && o->min == 0) { /* none is a choice */
        option_set_string(base, o, text);
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
    option_set_string(base, o, text);
    return KVS_OK;
}

static kvs_status set_word(void *base, const option *o, const json_node *v, kvs_err *err)
{
    const char *text = json_string(v), *choice;
    char shown[JSON_QUOTED_BYTES];
    size_t len;

    if (text == NULL)
        return wrong_type(o, v, "a string", err);
    for (size_t i = 0; (choice = option_choice(o, i, &len)) != NULL; i++) {
        if (strlen(text) != len || memcmp(text, choice, len) != 0)
            continue;
        option_set_string(base, o, text);
        return KVS_OK;
    }
    return kvs_fail(err, KVS_E_CONFIG, "%s: %s is not one of %s", o->key, json_quote(shown, text), o->choices);
}

static kvs_status set_mode(void *base, const option *o, const json_node *v, kvs_err *err)
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
    option_set_number(base, o, strtol(text, NULL, 8));
    return KVS_OK;
}

static kvs_status set_name(void *base, const option *o, const json_node *v, kvs_err *err)
{
    const char *text = json_string(v);
    char shown[JSON_QUOTED_BYTES];
    size_t len;

    if (text == NULL)
        return wrong_type(o, v, "a name", err);
    len = strlen(text);
    if (len < 1 || (int64_t)len > o->max || text[0] < 'a' || text[0] > 'z' ||
        strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789_-") != len)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %s is no name: 1..%d of a-z, 0-9, _ and -, the first a letter", o->key,
                        json_quote(shown, text), (int)o->max);
    option_set_string(base, o, text);
    return KVS_OK;
}

/* Into its place: the same users are the same list, however they were written.  False: it is there already. */
static bool add_uid(config_uids *u, uint32_t uid)
{
    uint32_t at = u->n;

    for (; at > 0 && u->uid[at - 1] >= uid; at--)
        if (u->uid[at - 1] == uid)
            return false;
    memmove(&u->uid[at + 1], &u->uid[at], (u->n - at) * sizeof u->uid[0]);
    u->uid[at] = uid;
    u->n++;
    return true;
}

/* A number, or a name that has one here and now: what is kept, compared and printed is the number. */
static kvs_status take_user(const option *o, const json_node *n, uint32_t *ret, kvs_err *err)
{
    char text[JSON_QUOTED_BYTES];
    kvs_err why;
    int64_t uid;

    if (json_type_of(n) == JSON_STRING) {
        if (users_find(json_string(n), ret, &why) != KVS_OK)
            return kvs_fail(err, KVS_E_CONFIG, "%s: %s", o->key, why.msg);
        if (*ret > (uint64_t)o->max)
            return out_of_range(o, show(text, n), err);
        return KVS_OK;
    }
    if (json_type_of(n) != JSON_NUMBER)
        return wrong_type(o, n, "user names or numbers", err);
    if (!json_whole(n, &uid) || uid < o->min || uid > o->max)
        return out_of_range(o, show(text, n), err);
    *ret = (uint32_t)uid;
    return KVS_OK;
}

static kvs_status set_uids(void *base, const option *o, const json_node *v, kvs_err *err)
{
    config_uids u = {0};
    uint32_t uid = 0;

    if (json_type_of(v) != JSON_ARRAY)
        return wrong_type(o, v, "an array of user names or numbers", err);
    if (json_size(v) > CONFIG_MAX_UIDS)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %zu users, at most %d may be named", o->key, json_size(v),
                        CONFIG_MAX_UIDS);
    for (const json_node *n = json_first(v); n != NULL; n = json_next(n)) {
        kvs_status st = take_user(o, n, &uid, err);

        if (st != KVS_OK)
            return st;
        if (!add_uid(&u, uid))
            return kvs_fail(err, KVS_E_CONFIG, "%s: user %" PRIu32 " is named twice", o->key, uid);
    }
    memcpy((char *)base + o->offset, &u, sizeof u);
    return KVS_OK;
}

/* The bit of a word of the choices; 0: it is none. */
static int64_t flag_of(const option *o, const char *text)
{
    const char *choice;
    size_t len;

    for (size_t i = 0; text != NULL && (choice = option_choice(o, i, &len)) != NULL; i++)
        if (strlen(text) == len && memcmp(text, choice, len) == 0)
            return INT64_C(1) << i;
    return 0;
}

static kvs_status set_flags(void *base, const option *o, const json_node *v, kvs_err *err)
{
    char text[JSON_QUOTED_BYTES];
    int64_t flags = 0;

    if (json_type_of(v) != JSON_ARRAY)
        return wrong_type(o, v, "an array of words", err);
    for (const json_node *n = json_first(v); n != NULL; n = json_next(n)) {
        int64_t flag = flag_of(o, json_string(n));

        if (flag == 0 || (flags & flag) != 0)
            return kvs_fail(err, KVS_E_CONFIG, "%s: %s is %s %s", o->key, show(text, n),
                            flag == 0 ? "not one of" : "named twice of", o->choices);
        flags |= flag;
    }
    option_set_number(base, o, flags);
    return KVS_OK;
}

kvs_status value_set(void *base, const option *o, const json_node *v, kvs_err *err)
{
    switch (o->kind) {
    case OPTION_SIZE:
        return set_size(base, o, v, err);
    case OPTION_INT:
        return set_int(base, o, v, err);
    case OPTION_BOOL:
        return set_bool(base, o, v, err);
    case OPTION_PATH:
        return set_path(base, o, v, err);
    case OPTION_WORD:
        return set_word(base, o, v, err);
    case OPTION_MODE:
        return set_mode(base, o, v, err);
    case OPTION_NAME:
        return set_name(base, o, v, err);
    case OPTION_UIDS:
        return set_uids(base, o, v, err);
    case OPTION_FLAGS:
        return set_flags(base, o, v, err);
    }
    return kvs_fail(err, KVS_E_CONFIG, "%s: unknown kind of option", o->key);
}
