#include "tests/support/prom.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "config/json.h"

/* ---- HTTP ---- */

static int dial(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = 20};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    if (fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof a) == 0) {
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        return fd;
    }
    if (fd >= 0)
        (void)close(fd);
    return -1;
}

char *http_say(const char *socket, const char *request, size_t len)
{
    size_t cap = 1 << 16, n = 0;
    char *text = malloc(cap);
    int fd = dial(socket);
    ssize_t got = -1;

    if (fd < 0 || text == NULL) {
        free(text);
        return NULL;
    }
    if (send(fd, request, len, MSG_NOSIGNAL) >= 0)
        while ((got = recv(fd, text + n, cap - n - 1, 0)) > 0) {
            n += (size_t)got;
            if (cap - n < 4096)
                text = realloc(text, cap *= 2);
            if (text == NULL)
                abort();
        }
    (void)close(fd);
    text[n] = '\0';
    if (n > 0)
        return text;
    free(text);
    return NULL;
}

char *http_get(const char *socket, const char *path, int *ret_code)
{
    char request[256], *all, *body;
    int n = snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n", path);

    *ret_code = 0;
    all = http_say(socket, request, (size_t)n);
    body = all != NULL ? strstr(all, "\r\n\r\n") : NULL;
    if (body == NULL || sscanf(all, "HTTP/1.1 %d ", ret_code) != 1) {
        free(all);
        return NULL;
    }
    body += 4;
    memmove(all, body, strlen(body) + 1);
    return all;
}

/* ---- the format ---- */

typedef struct reader {
    prom *p;
    size_t cap;
    char family[128], type[16];
    char seen[512][96]; /* families that were begun */
    size_t n_seen;
} reader;

__attribute__((format(printf, 2, 3))) static bool no(prom *p, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    (void)vsnprintf(p->why, sizeof p->why, fmt, ap);
    va_end(ap);
    return false;
}

static size_t name_length(const char *s, bool metric)
{
    size_t n = 0;

    if (isdigit((unsigned char)s[0]))
        return 0;
    while (isalnum((unsigned char)s[n]) || s[n] == '_' || (metric && s[n] == ':'))
        n++;
    return n;
}

static bool is_utf8(const char *s, size_t left)
{
    for (size_t n; left > 0; s += n, left -= n)
        if ((n = json_utf8_bytes((const unsigned char *)s, left)) == 0)
            return false;
    return true;
}

/* # HELP name text, # TYPE name type */
static bool take_comment(reader *r, const char *line)
{
    char word[8], name[96], rest[256];

    if (sscanf(line, "# %7s %95s %255[^\n]", word, name, rest) != 3)
        return no(r->p, "comment: %.80s", line);
    if (strcmp(word, "HELP") == 0) {
        for (size_t i = 0; i < r->n_seen; i++)
            if (strcmp(r->seen[i], name) == 0)
                return no(r->p, "family %s twice", name);
        if (r->n_seen == 512 || name_length(name, true) != strlen(name))
            return no(r->p, "family %s", name);
        (void)snprintf(r->seen[r->n_seen++], 96, "%s", name);
        (void)snprintf(r->family, sizeof r->family, "%s", name);
        r->type[0] = '\0';
        return true;
    }
    if (strcmp(word, "TYPE") != 0 || strcmp(name, r->family) != 0 || r->type[0] != '\0')
        return no(r->p, "%s of %s behind that of %s", word, name, r->family);
    if (strcmp(rest, "counter") != 0 && strcmp(rest, "gauge") != 0 && strcmp(rest, "histogram") != 0)
        return no(r->p, "type %s", rest);
    (void)snprintf(r->type, sizeof r->type, "%.15s", rest);
    if ((strcmp(rest, "counter") == 0) != (strlen(name) > 6 && strcmp(name + strlen(name) - 6, "_total") == 0))
        return no(r->p, "%s is a %s", name, rest);
    return true;
}

/* Behind '{'; the length up to '}', 0: bad. */
static size_t labels_length(const char *s)
{
    const char *p = s;

    for (;;) {
        size_t n = name_length(p, false);

        if (n == 0 || p[n] != '=' || p[n + 1] != '"')
            return 0;
        for (p += n + 2; *p != '"'; p++) {
            if (*p == '\0' || (*p == '\\' && strchr("\\\"n", p[1]) == NULL))
                return 0;
            p += *p == '\\';
        }
        p++;
        if (*p == '}')
            return (size_t)(p - s);
        if (*p++ != ',')
            return 0;
    }
}

static bool belongs(const reader *r, const char *name)
{
    size_t n = strlen(r->family);

    if (strncmp(name, r->family, n) != 0)
        return false;
    if (strcmp(r->type, "histogram") != 0)
        return name[n] == '\0';
    return strcmp(name + n, "_bucket") == 0 || strcmp(name + n, "_sum") == 0 || strcmp(name + n, "_count") == 0;
}

static bool take_sample(reader *r, const char *line)
{
    prom *p = r->p;
    prom_sample s = {0};
    size_t n = name_length(line, true), labels = 0;
    const char *at = line + n;
    char *end;

    if (n == 0 || n >= sizeof s.name)
        return no(p, "name: %.80s", line);
    memcpy(s.name, line, n);
    if (*at == '{') {
        labels = labels_length(at + 1);
        if (labels == 0 || labels >= sizeof s.labels)
            return no(p, "labels: %.80s", line);
        memcpy(s.labels, at + 1, labels);
        at += labels + 2;
    }
    if (*at++ != ' ' || isspace((unsigned char)*at))
        return no(p, "value: %.80s", line);
    s.value = strtod(at, &end);
    if (end == at || *end != '\0' || !isfinite(s.value))
        return no(p, "value: %.80s", line);
    if (r->type[0] == '\0' || !belongs(r, s.name))
        return no(p, "sample of %s in family %s", s.name, r->family);
    for (size_t i = 0; i < p->n; i++)
        if (strcmp(p->samples[i].name, s.name) == 0 && strcmp(p->samples[i].labels, s.labels) == 0)
            return no(p, "series twice: %s{%s}", s.name, s.labels);
    if (p->n == r->cap)
        p->samples = realloc(p->samples, (r->cap = r->cap * 2 + 64) * sizeof *p->samples);
    if (p->samples == NULL)
        abort();
    p->samples[p->n++] = s;
    return true;
}

/* Buckets of one series are neighbours: each at least the one before, the last +Inf, and _count the same. */
static bool check_buckets(prom *p)
{
    double last = -1, inf = -1;

    for (size_t i = 0; i < p->n; i++) {
        const prom_sample *s = &p->samples[i];
        size_t n = strlen(s->name);

        if (n > 7 && strcmp(s->name + n - 7, "_bucket") == 0) {
            if (last > s->value)
                return no(p, "bucket %s{%s} shrinks", s->name, s->labels);
            inf = strstr(s->labels, "le=\"+Inf\"") != NULL ? s->value : -1;
            last = inf >= 0 ? -1 : s->value;
        } else if (n > 6 && strcmp(s->name + n - 6, "_count") == 0 && s->value != inf) {
            return no(p, "%s{%s} is %f, its last bucket %f", s->name, s->labels, s->value, inf);
        }
    }
    return last < 0 || no(p, "buckets without +Inf");
}

bool prom_parse(prom *ret, const char *text)
{
    reader *r = calloc(1, sizeof *r);
    char *copy = strdup(text), *save = NULL;
    bool good = true;

    *ret = (prom){.bytes = strlen(text)};
    if (r == NULL || copy == NULL)
        abort();
    r->p = ret;
    if (ret->bytes == 0 || text[ret->bytes - 1] != '\n')
        good = no(ret, "the last line does not end");
    else if (!is_utf8(text, ret->bytes))
        good = no(ret, "not UTF-8");
    for (char *line = strtok_r(copy, "\n", &save); good && line != NULL; line = strtok_r(NULL, "\n", &save))
        good = line[0] == '#' ? take_comment(r, line) : take_sample(r, line);
    good = good && check_buckets(ret);
    free(copy);
    free(r);
    return good;
}

void prom_free(prom *p)
{
    free(p->samples);
    *p = (prom){0};
}

double prom_get(const prom *p, const char *name, const char *label, const char *label2)
{
    bool found = false;
    double sum = 0;

    for (size_t i = 0; i < p->n; i++) {
        const prom_sample *s = &p->samples[i];

        if (strcmp(s->name, name) != 0 || (label != NULL && strstr(s->labels, label) == NULL) ||
            (label2 != NULL && strstr(s->labels, label2) == NULL))
            continue;
        found = true;
        sum += s->value;
    }
    return found ? sum : -1;
}

bool prom_scrape(prom *p, const char *socket)
{
    int code;
    char *text = http_get(socket, "/metrics", &code);
    bool good;

    if (text == NULL || code != 200) {
        *p = (prom){0};
        free(text);
        return no(p, "no answer, or %d", code);
    }
    good = prom_parse(p, text);
    free(text);
    return good;
}
