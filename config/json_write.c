#include "config/json.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    WRITER_DEPTH = 32, /* what json_parse accepts */
    SHOWN_BYTES = 48   /* of a quoted text, about */
};

struct json_writer {
    char *text; /* zero-terminated once anything is in it */
    size_t len, cap;
    unsigned depth;            /* open containers */
    bool object[WRITER_DEPTH]; /* the n-th open container is an object */
    bool filled;               /* the innermost container has an item: the next one needs a comma */
    bool failed;               /* memory ran out: everything from here on is ignored */
};

json_writer *json_writer_create(void)
{
    return calloc(1, sizeof(json_writer));
}

void json_writer_destroy(json_writer *w)
{
    if (w == NULL)
        return;
    free(w->text);
    free(w);
}

static void put(json_writer *w, const char *bytes, size_t n)
{
    size_t cap;
    char *more;

    if (w == NULL || w->failed)
        return;
    if (w->cap - w->len <= n) { /* the final zero needs room too */
        cap = (w->len + n + 1) * 2;
        more = realloc(w->text, cap);
        w->failed = more == NULL;
        if (w->failed)
            return;
        w->text = more;
        w->cap = cap;
    }
    memcpy(w->text + w->len, bytes, n);
    w->len += n;
    w->text[w->len] = '\0';
}

static void put_text(json_writer *w, const char *s)
{
    put(w, s, strlen(s));
}

static void put_escape(json_writer *w, unsigned char c)
{
    static const char SHORT[] = "\"\\\b\f\n\r\t", LETTER[] = "\"\\bfnrt";
    const char *at = strchr(SHORT, c);
    char text[8];

    if (at != NULL)
        (void)snprintf(text, sizeof text, "\\%c", LETTER[at - SHORT]);
    else
        (void)snprintf(text, sizeof text, "\\u%04x", c);
    put_text(w, text);
}

/* Leading bytes of which each is a character that stands for itself. */
static size_t plain_bytes(const unsigned char *p, size_t n)
{
    size_t i = 0;

    while (i < n && p[i] >= 0x20 && p[i] < 0x7f && p[i] != '"' && p[i] != '\\')
        i++;
    return i;
}

static void put_quoted(json_writer *w, const char *v)
{
    const unsigned char *p = (const unsigned char *)v;
    size_t n, left = strlen(v);

    put_text(w, "\"");
    for (; left > 0; p += n, left -= n) {
        n = plain_bytes(p, left);
        if (n > 0) {
            put(w, (const char *)p, n);
            continue;
        }
        n = json_utf8_bytes(p, left);
        if (n == 0) {
            put_text(w, "\xEF\xBF\xBD"); /* U+FFFD stands for one byte that is no text */
            n = 1;
        } else if (*p < 0x20 || *p == 0x7F || *p == '"' || *p == '\\') {
            put_escape(w, *p);
        } else if (*p == 0xC2 && p[1] < 0xA0) {
            put_escape(w, p[1]); /* U+0080 to U+009F: a terminal may obey them, too */
        } else {
            put(w, (const char *)p, n);
        }
    }
    put_text(w, "\"");
}

/* What stands before every value: a comma, and in an object the key. */
static void put_lead(json_writer *w, const char *key)
{
    if (w == NULL)
        return;
    assert(w->depth == 0 || w->object[w->depth - 1] == (key != NULL));
    if (w->filled)
        put_text(w, ",");
    w->filled = true;
    if (key == NULL)
        return;
    put_quoted(w, key);
    put_text(w, ":");
}

static void begin(json_writer *w, const char *key, bool object)
{
    if (w == NULL)
        return;
    assert(w->depth < WRITER_DEPTH);
    put_lead(w, key);
    put_text(w, object ? "{" : "[");
    w->object[w->depth++] = object;
    w->filled = false;
}

void json_begin_object(json_writer *w, const char *key)
{
    begin(w, key, true);
}

void json_begin_array(json_writer *w, const char *key)
{
    begin(w, key, false);
}

void json_end(json_writer *w)
{
    if (w == NULL)
        return;
    assert(w->depth > 0);
    put_text(w, w->object[--w->depth] ? "}" : "]");
    w->filled = true;
}

void json_put_u64(json_writer *w, const char *key, uint64_t v)
{
    char text[20];
    size_t at = sizeof text;

    put_lead(w, key);
    do
        text[--at] = (char)('0' + v % 10);
    while ((v /= 10) != 0);
    put(w, text + at, sizeof text - at);
}

void json_put_i64(json_writer *w, const char *key, int64_t v)
{
    char text[24];

    put_lead(w, key);
    (void)snprintf(text, sizeof text, "%" PRId64, v);
    put_text(w, text);
}

/* The shortest of two forms that reads back as the same double. */
void json_put_double(json_writer *w, const char *key, double v)
{
    char text[40], *comma;

    if (!isfinite(v)) {
        json_put_null(w, key);
        return;
    }
    put_lead(w, key);
    (void)snprintf(text, sizeof text, "%.15g", v);
    if (strtod(text, NULL) != v)
        (void)snprintf(text, sizeof text, "%.17g", v);
    comma = strchr(text, ','); /* the decimal point of some locales */
    if (comma != NULL)
        *comma = '.';
    put_text(w, text);
}

void json_put_bool(json_writer *w, const char *key, bool v)
{
    put_lead(w, key);
    put_text(w, v ? "true" : "false");
}

void json_put_null(json_writer *w, const char *key)
{
    put_lead(w, key);
    put_text(w, "null");
}

void json_put_string(json_writer *w, const char *key, const char *v)
{
    put_lead(w, key);
    put_quoted(w, v);
}

void json_put_hex(json_writer *w, const char *key, const uint8_t *bytes, size_t n)
{
    static const char DIGITS[] = "0123456789abcdef";
    char text[64];

    put_lead(w, key);
    put_text(w, "\"");
    for (size_t i = 0, at = 0; i < n; i++) {
        text[at++] = DIGITS[bytes[i] >> 4];
        text[at++] = DIGITS[bytes[i] & 15];
        if (at == sizeof text || i + 1 == n) {
            put(w, text, at);
            at = 0;
        }
    }
    put_text(w, "\"");
}

const char *json_text(const json_writer *w, size_t *ret_len)
{
    if (w == NULL || w->failed || w->depth > 0 || w->len == 0)
        return NULL;
    if (ret_len != NULL)
        *ret_len = w->len;
    return w->text;
}

/* ---- for people ---- */

const char *json_quote(char buf[JSON_QUOTED_BYTES], const char *text)
{
    size_t n = 0, bytes;
    const unsigned char *p = (const unsigned char *)text;

    buf[n++] = '"';
    for (; *p != '\0' && n < SHOWN_BYTES; p += bytes) {
        bytes = json_utf8_bytes(p, strlen((const char *)p));
        if (bytes == 0) { /* no text: at least show that there was something */
            buf[n++] = '?';
            bytes = 1;
        } else if (*p < 0x20 || *p == 0x7F) {
            n += (size_t)snprintf(buf + n, JSON_QUOTED_BYTES - n, "\\u%04x", *p);
        } else if (*p == '"' || *p == '\\') {
            buf[n++] = '\\';
            buf[n++] = (char)*p;
        } else {
            memcpy(buf + n, p, bytes);
            n += bytes;
        }
    }
    (void)snprintf(buf + n, JSON_QUOTED_BYTES - n, "%s\"", *p != '\0' ? "..." : "");
    return buf;
}

static void print_break(FILE *to, int depth)
{
    fprintf(to, "\n%*s", depth * 2, "");
}

/* The bytes of the string at `at`, both quotes included. */
static size_t string_bytes(const char *text, size_t len, size_t at)
{
    size_t i = at + 1;

    while (i < len && text[i] != '"')
        i += text[i] == '\\' ? 2 : 1;
    return (i < len ? i + 1 : len) - at;
}

void json_pretty(const char *text, size_t len, FILE *to)
{
    int depth = 0;
    size_t n;

    for (size_t i = 0; i < len; i += n) {
        char c = text[i], next = i + 1 < len ? text[i + 1] : '\0';

        n = c == '"' ? string_bytes(text, len, i) : 1;
        if (c == ' ' || c == '\t' || c == '\r' || c == '\n')
            continue;
        if (c == '}' || c == ']')
            print_break(to, --depth);
        (void)fwrite(text + i, 1, n, to);
        if ((c == '{' || c == '[') && (next == '}' || next == ']'))
            n += fwrite(&next, 1, 1, to);
        else if (c == '{' || c == '[')
            print_break(to, ++depth);
        else if (c == ',')
            print_break(to, depth);
        else if (c == ':')
            fputc(' ', to);
    }
    fputc('\n', to);
}
