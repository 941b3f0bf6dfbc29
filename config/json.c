#include "config/json.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Reading is done twice.  The scanner below accepts exactly RFC 8259 within our limits and knows positions;
 * cJSON then builds the tree.  cJSON alone takes 0123, 5., raw control characters, bytes behind the value and
 * bad UTF-8, and makes infinity of 1e999.  What only the decoded tree shows (duplicate keys, overflow) is
 * checked last, with positions from the marks: one for every key and number, in the order of the text, which
 * is also the order of a walk of the tree. */

enum {
    MAX_DEPTH = 32,
    MAX_NUMBER = 63 /* cJSON cuts a longer number in two */
};

typedef struct mark {
    size_t at;  /* of the key or number, in bytes from the start of the text */
    bool whole; /* a number whose digits say a whole value of at most 2^53 in magnitude */
} mark;

typedef struct scan {
    const char *text;
    size_t len, at;
    mark *marks;
    size_t n_marks, cap_marks;
    kvs_err *err;
} scan;

struct json {
    cJSON *root;
};

struct json_node { /* never defined by cJSON: a json_node is a cJSON under another name */
    cJSON item;
};

/* ---- positions ---- */

/* Lines end with \n; columns count characters, so that they agree with an editor. */
__attribute__((format(printf, 3, 4))) static kvs_status fail_at(const scan *s, size_t at, const char *fmt, ...)
{
    char msg[KVS_ERR_MSG_BYTES];
    size_t line = 1, column = 1;
    va_list ap;

    for (size_t i = 0; i < at && i < s->len; i++) {
        if (s->text[i] == '\n') {
            line++;
            column = 1;
        } else if (((unsigned char)s->text[i] & 0xC0) != 0x80) {
            column++;
        }
    }
    va_start(ap, fmt);
    (void)vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    return kvs_fail(s->err, KVS_E_CONFIG, "line %zu, column %zu: %.200s", line, column, msg);
}
#ifdef __clang_analyzer__ /* as in proto/status.h */
#define fail_at(s, at, ...) ((fail_at)((s), (at), __VA_ARGS__), KVS_E_CONFIG)
#endif

static kvs_status fail_here(const scan *s, const char *expected)
{
    unsigned char c;

    if (s->at == s->len)
        return fail_at(s, s->at, "expected %s, found the end", expected);
    c = (unsigned char)s->text[s->at];
    if (c == 0)
        return fail_at(s, s->at, "expected %s, found a zero byte (is the text UTF-16? it must be UTF-8)", expected);
    if (c == '/' || c == '#')
        return fail_at(s, s->at, "expected %s, found '%c' (JSON has no comments)", expected, c);
    if (c == '\'')
        return fail_at(s, s->at, "expected %s, found a single quote (JSON strings need double quotes)", expected);
    if (c > ' ' && c < 0x7F)
        return fail_at(s, s->at, "expected %s, found '%c'", expected, c);
    return fail_at(s, s->at, "expected %s, found byte 0x%02x", expected, c);
}

static kvs_status add_mark(scan *s, size_t at, bool whole)
{
    if (s->n_marks == s->cap_marks) {
        size_t cap = s->cap_marks == 0 ? 64 : s->cap_marks * 2;
        mark *more = realloc(s->marks, cap * sizeof *more);

        if (more == NULL)
            return kvs_fail(s->err, KVS_E_NO_MEMORY, "out of memory while reading %zu bytes of JSON", s->len);
        s->marks = more;
        s->cap_marks = cap;
    }
    s->marks[s->n_marks++] = (mark){.at = at, .whole = whole};
    return KVS_OK;
}

/* ---- characters ---- */

size_t json_utf8_bytes(const unsigned char *p, size_t n)
{
    static const uint32_t LEAST[5] = {0, 0, 0x80, 0x800, 0x10000};
    size_t bytes;
    uint32_t c;

    if (p[0] < 0x80)
        return 1;
    bytes = p[0] >= 0xF0 ? 4 : p[0] >= 0xE0 ? 3 : 2;
    if (p[0] < 0xC2 || p[0] > 0xF4 || bytes > n)
        return 0;
    c = p[0] & (0x7Fu >> bytes);
    for (size_t i = 1; i < bytes; i++) {
        if ((p[i] & 0xC0) != 0x80)
            return 0;
        c = c << 6 | (p[i] & 0x3Fu);
    }
    return c < LEAST[bytes] || c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF) ? 0 : bytes;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static char peek(const scan *s)
{
    return s->at < s->len ? s->text[s->at] : '\0';
}

static void skip_space(scan *s)
{
    while (s->at < s->len && strchr(" \t\r\n", s->text[s->at]) != NULL && s->text[s->at] != '\0')
        s->at++;
}

/* ---- strings ---- */

/* Four hex digits behind \u; -1 if they are not there. */
static int32_t hex4(const scan *s, size_t at)
{
    int32_t v = 0;

    if (s->len - at < 4)
        return -1;
    for (size_t i = at; i < at + 4; i++) {
        char c = s->text[i];

        if (is_digit(c))
            v = v * 16 + (c - '0');
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            v = v * 16 + ((c | 0x20) - 'a' + 10);
        else
            return -1;
    }
    return v;
}

/* s->at is behind the backslash and the u. */
static kvs_status scan_unicode(scan *s)
{
    size_t start = s->at - 2;
    int32_t low, v = hex4(s, s->at);

    if (v < 0)
        return fail_at(s, start, "expected four hex digits after \\u");
    if (v == 0)
        return fail_at(s, start, "\\u0000 is not allowed in a string");
    s->at += 4;
    if (v < 0xD800 || v > 0xDFFF)
        return KVS_OK;
    low = -1;
    if (v <= 0xDBFF && s->len - s->at >= 6 && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u')
        low = hex4(s, s->at + 2);
    if (low < 0xDC00 || low > 0xDFFF)
        return fail_at(s, start, "half of a surrogate pair");
    s->at += 6;
    return KVS_OK;
}

static kvs_status scan_escape(scan *s)
{
    char c;

    s->at++;
    c = peek(s);
    if (c == '\0' || strchr("\"\\/bfnrtu", c) == NULL)
        return fail_at(s, s->at - 1, "unknown escape in a string");
    s->at++;
    return c == 'u' ? scan_unicode(s) : KVS_OK;
}

/* s->at is at the opening quote. */
static kvs_status scan_string(scan *s)
{
    size_t start = s->at++, n;
    kvs_status st;

    for (;;) {
        if (s->at == s->len)
            return fail_at(s, start, "this string has no end");
        if (s->text[s->at] == '"') {
            s->at++;
            return KVS_OK;
        }
        if (s->text[s->at] == '\\') {
            st = scan_escape(s);
            if (st != KVS_OK)
                return st;
            continue;
        }
        if ((unsigned char)s->text[s->at] < 0x20)
            return fail_at(s, s->at, "control character 0x%02x in a string (or its closing quote is missing)",
                           (unsigned char)s->text[s->at]);
        n = json_utf8_bytes((const unsigned char *)s->text + s->at, s->len - s->at);
        if (n == 0)
            return fail_at(s, s->at, "byte 0x%02x is not valid UTF-8", (unsigned char)s->text[s->at]);
        s->at += n;
    }
}

/* ---- numbers ---- */

/* Does this number (valid, at most MAX_NUMBER bytes) say a whole value of at most 2^53?  Asked of its digits,
 * since the double of 9007199254740993 or of 0.99999999999999999999 says something else than the user wrote.
 */
static bool is_whole(const char *p, const char *end)
{
    char digits[MAX_NUMBER + 1];
    size_t n = 0;
    long stated, exponent = 0;
    uint64_t v = 0;
    bool in_fraction = false;

    for (; p < end && *p != 'e' && *p != 'E'; p++) {
        if (*p == '.')
            in_fraction = true;
        if (!is_digit(*p))
            continue;
        if (in_fraction)
            exponent--;
        if (n > 0 || *p != '0')
            digits[n++] = *p;
    }
    if (n == 0)
        return true; /* zero, whatever its exponent */
    if (p < end) {
        char text[MAX_NUMBER + 1] = {0};

        memcpy(text, p + 1, (size_t)(end - p - 1));
        stated = strtol(text, NULL, 10); /* saturates: up to 60 digits fit here */
        exponent += stated > 1000 ? 1000 : stated < -1000 ? -1000 : stated;
    }
    for (; n > 1 && digits[n - 1] == '0'; n--)
        exponent++;
    if (exponent < 0 || exponent > 15 || n + (size_t)exponent > 16)
        return false;
    for (size_t i = 0; i < n + (size_t)exponent; i++)
        v = v * 10 + (i < n ? (uint64_t)(digits[i] - '0') : 0);
    return v <= UINT64_C(1) << 53;
}

static kvs_status scan_digits(scan *s)
{
    if (!is_digit(peek(s)))
        return fail_here(s, "a digit");
    while (is_digit(peek(s)))
        s->at++;
    return KVS_OK;
}

static kvs_status scan_number(scan *s)
{
    size_t start = s->at;
    kvs_status st;

    if (peek(s) == '-')
        s->at++;
    if (peek(s) == '0' && s->at + 1 < s->len && is_digit(s->text[s->at + 1]))
        return fail_at(s, start, "a number must not begin with 0");
    st = scan_digits(s);
    if (st == KVS_OK && peek(s) == '.') {
        s->at++;
        st = scan_digits(s);
    }
    if (st == KVS_OK && (peek(s) == 'e' || peek(s) == 'E')) {
        s->at++;
        if (peek(s) == '+' || peek(s) == '-')
            s->at++;
        st = scan_digits(s);
    }
    if (st != KVS_OK)
        return st;
    if (s->at - start > MAX_NUMBER)
        return fail_at(s, start, "a number of %zu characters; at most %d are allowed", s->at - start, (int)MAX_NUMBER);
    return add_mark(s, start, is_whole(s->text + start, s->text + s->at));
}

/* ---- values ---- */

static kvs_status scan_value(scan *s, int depth);

static kvs_status scan_word(scan *s, const char *word)
{
    size_t n = strlen(word);

    if (s->len - s->at < n || memcmp(s->text + s->at, word, n) != 0)
        return fail_here(s, "a value");
    s->at += n;
    return KVS_OK;
}

static kvs_status scan_member(scan *s, int depth)
{
    kvs_status st;

    if (peek(s) != '"')
        return fail_here(s, "a key in double quotes");
    st = add_mark(s, s->at, false);
    if (st == KVS_OK)
        st = scan_string(s);
    if (st != KVS_OK)
        return st;
    skip_space(s);
    if (peek(s) != ':')
        return fail_here(s, "':'");
    s->at++;
    return scan_value(s, depth);
}

/* An object (close is '}') or an array (']'); s->at is at the opening bracket. */
static kvs_status scan_items(scan *s, char close, int depth)
{
    const char *more = close == '}' ? "',' or '}'" : "',' or ']'";
    kvs_status st;
    size_t comma;

    if (depth == MAX_DEPTH)
        return fail_at(s, s->at, "nested more than %d deep", (int)MAX_DEPTH);
    s->at++;
    skip_space(s);
    while (peek(s) != close) {
        st = close == '}' ? scan_member(s, depth + 1) : scan_value(s, depth + 1);
        if (st != KVS_OK)
            return st;
        skip_space(s);
        if (peek(s) == close)
            break;
        if (peek(s) != ',')
            return fail_here(s, more);
        comma = s->at++;
        skip_space(s);
        if (peek(s) == close)
            return fail_at(s, comma, "a comma before '%c' is not allowed", close);
    }
    s->at++;
    return KVS_OK;
}

static kvs_status scan_value(scan *s, int depth)
{
    skip_space(s);
    switch (peek(s)) {
    case '{':
        return scan_items(s, '}', depth);
    case '[':
        return scan_items(s, ']', depth);
    case '"':
        return scan_string(s);
    case 't':
        return scan_word(s, "true");
    case 'f':
        return scan_word(s, "false");
    case 'n':
        return scan_word(s, "null");
    default:
        if (peek(s) == '-' || is_digit(peek(s)))
            return scan_number(s);
        return fail_here(s, "a value");
    }
}

static kvs_status scan_document(scan *s)
{
    kvs_status st;

    if (s->len >= 2 && (memcmp(s->text, "\xFF\xFE", 2) == 0 || memcmp(s->text, "\xFE\xFF", 2) == 0))
        return fail_at(s, 0, "the text is UTF-16; it must be UTF-8");
    skip_space(s);
    if (s->at == s->len)
        return fail_at(s, 0, "the text is empty");
    st = scan_value(s, 0);
    if (st != KVS_OK)
        return st;
    skip_space(s);
    return s->at == s->len ? KVS_OK : fail_here(s, "the end of the text");
}

/* ---- the tree ---- */

typedef struct member {
    const char *key;
    size_t mark;
} member;

static int ascii_lower(char c)
{
    return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : (unsigned char)c;
}

static int compare_keys(const char *a, const char *b)
{
    for (; *a != '\0' && ascii_lower(*a) == ascii_lower(*b); a++, b++)
        ;
    return ascii_lower(*a) - ascii_lower(*b);
}

static int compare_members(const void *a, const void *b)
{
    const member *x = a, *y = b;
    int by_key = compare_keys(x->key, y->key);

    return by_key != 0 ? by_key : x->mark < y->mark ? -1 : x->mark > y->mark;
}

/* Sorted, equal keys are neighbours: a hostile object of 100,000 keys costs no square. */
static kvs_status check_unique(const scan *s, member *m, size_t n)
{
    char key[JSON_QUOTED_BYTES], other[JSON_QUOTED_BYTES];

    qsort(m, n, sizeof *m, compare_members);
    for (size_t i = 1; i < n; i++) {
        size_t at = s->marks[m[i].mark].at;

        if (compare_keys(m[i - 1].key, m[i].key) != 0)
            continue;
        (void)json_quote(key, m[i].key);
        if (strcmp(m[i - 1].key, m[i].key) == 0)
            return fail_at(s, at, "key %s is given twice", key);
        return fail_at(s, at, "key %s is given twice, also as %s", key, json_quote(other, m[i - 1].key));
    }
    return KVS_OK;
}

/* NOLINTBEGIN(clang-analyzer-core.*): the analyzer thinks the scanner may have seen fewer values than cJSON */
/* cJSON's integer field saturates at 2^31, so nobody may read it as a value; it carries the mark's `whole`
 * instead. */
static kvs_status check_number(const scan *s, cJSON *item, size_t at)
{
    const mark *m = &s->marks[at]; /* the scanner saw every value that cJSON saw */
    char key[JSON_QUOTED_BYTES];

    if (!isfinite(item->valuedouble) && item->string == NULL)
        return fail_at(s, m->at, "number is too large for a double");
    if (!isfinite(item->valuedouble))
        return fail_at(s, m->at, "%s: number is too large for a double", json_quote(key, item->string));
    item->valueint = m->whole;
    return KVS_OK;
}
/* NOLINTEND(clang-analyzer-core.*) */

/* *next: index of the next mark.  Depth is bounded by the scanner. */
static kvs_status check_tree(const scan *s, cJSON *item, size_t *next)
{
    size_t n = 0;
    member *members = NULL;
    kvs_status st = KVS_OK;

    if (cJSON_IsNumber(item))
        return check_number(s, item, (*next)++);
    if (cJSON_IsObject(item) && item->child != NULL) {
        members = calloc((size_t)cJSON_GetArraySize(item), sizeof *members);
        if (members == NULL)
            return kvs_fail(s->err, KVS_E_NO_MEMORY, "out of memory while reading %zu bytes of JSON", s->len);
    }
    for (cJSON *child = item->child; child != NULL && st == KVS_OK; child = child->next) {
        if (members != NULL)
            members[n++] = (member){.key = child->string, .mark = (*next)++};
        st = check_tree(s, child, next);
    }
    if (st == KVS_OK && members != NULL)
        st = check_unique(s, members, n);
    free(members);
    return st;
}

kvs_status json_parse(const char *text, size_t len, json **ret, kvs_err *err)
{
    scan s = {.text = text, .len = len, .err = err};
    json *j = NULL;
    size_t next = 0;
    kvs_status st;

    if (len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { /* columns do not count the mark */
        s.text += 3;
        s.len -= 3;
    }
    st = scan_document(&s);
    if (st != KVS_OK)
        goto fail;
    j = calloc(1, sizeof *j);
    if (j != NULL)
        j->root = cJSON_ParseWithLengthOpts(s.text, s.len, NULL, false);
    if (j == NULL || j->root == NULL) { /* the scanner let it pass, so only memory can be missing */
        st = kvs_fail(err, KVS_E_NO_MEMORY, "out of memory while reading %zu bytes of JSON", len);
        goto fail;
    }
    st = check_tree(&s, j->root, &next);
    if (st != KVS_OK)
        goto fail;
    assert(next == s.n_marks);
    free(s.marks);
    *ret = j;
    return KVS_OK;
fail:
    free(s.marks);
    json_destroy(j);
    return st;
}

void json_destroy(json *j)
{
    if (j == NULL)
        return;
    cJSON_Delete(j->root);
    free(j);
}

/* ---- reading the tree ---- */

const json_node *json_root(const json *j)
{
    return (const json_node *)j->root;
}

json_type json_type_of(const json_node *n)
{
    switch (n->item.type & 0xFF) {
    case cJSON_False:
    case cJSON_True:
        return JSON_BOOL;
    case cJSON_Number:
        return JSON_NUMBER;
    case cJSON_String:
        return JSON_STRING;
    case cJSON_Array:
        return JSON_ARRAY;
    case cJSON_Object:
        return JSON_OBJECT;
    default:
        return JSON_NULL;
    }
}

const char *json_type_name(json_type t)
{
    static const char *const NAMES[] = {
        [JSON_NULL] = "null",       [JSON_BOOL] = "a boolean", [JSON_NUMBER] = "a number",
        [JSON_STRING] = "a string", [JSON_ARRAY] = "an array", [JSON_OBJECT] = "an object",
    };

    return NAMES[t];
}

const char *json_key(const json_node *n)
{
    return n->item.string;
}

const json_node *json_member(const json_node *object, const char *key)
{
    if (json_type_of(object) != JSON_OBJECT)
        return NULL;
    return (const json_node *)cJSON_GetObjectItemCaseSensitive(&object->item, key);
}

const json_node *json_first(const json_node *container)
{
    return (const json_node *)container->item.child;
}

const json_node *json_next(const json_node *n)
{
    return (const json_node *)n->item.next;
}

size_t json_size(const json_node *container)
{
    return (size_t)cJSON_GetArraySize(&container->item);
}

bool json_bool(const json_node *n)
{
    return cJSON_IsTrue(&n->item);
}

const char *json_string(const json_node *n)
{
    return json_type_of(n) == JSON_STRING ? n->item.valuestring : NULL;
}

double json_number(const json_node *n)
{
    return json_type_of(n) == JSON_NUMBER ? n->item.valuedouble : 0;
}

bool json_whole(const json_node *n, int64_t *ret)
{
    if (json_type_of(n) != JSON_NUMBER || n->item.valueint == 0)
        return false;
    *ret = (int64_t)n->item.valuedouble; /* exact: at most 2^53 */
    return true;
}
