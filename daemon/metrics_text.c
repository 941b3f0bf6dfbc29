#include "daemon/metrics_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/metrics_list.h"

/* ---- Prometheus ---- */

typedef struct text {
    FILE *to;
    const char *name; /* of the family */
} text;

static const char *type_name(enum metric_type t)
{
    static const char *const NAMES[] = {"counter", "gauge", "histogram"};

    return NAMES[t];
}

static void text_family(void *ud, const char *name, enum metric_type type, const char *help)
{
    text *t = ud;

    t->name = name;
    (void)fprintf(t->to, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type_name(type));
}

/* What is no UTF-8 becomes U+FFFD, byte by byte: one odd name must not cost the whole scrape. */
static void put_label_value(FILE *to, const char *value)
{
    size_t left = strlen(value), n;

    for (const char *p = value; left > 0; p += n, left -= n) {
        n = json_utf8_bytes((const unsigned char *)p, left);
        if (n == 0) {
            (void)fputs("\xEF\xBF\xBD", to);
            n = 1;
        } else if (*p == '\n') {
            (void)fputs("\\n", to);
        } else {
            if (*p == '\\' || *p == '"')
                (void)fputc('\\', to);
            (void)fwrite(p, 1, n, to);
        }
    }
}

static void put_value(FILE *to, metric_value v)
{
    switch (v.kind) {
    case METRIC_WHOLE:
        (void)fprintf(to, "%" PRIu64, v.u);
        break;
    case METRIC_SIGNED:
        (void)fprintf(to, "%" PRId64, v.i);
        break;
    case METRIC_MICROS:
        (void)fprintf(to, "%" PRIu64 ".%06" PRIu64, v.u / 1000000, v.u % 1000000);
        break;
    case METRIC_NANOS:
        (void)fprintf(to, "%" PRIu64 ".%09" PRIu64, v.u / 1000000000, v.u % 1000000000);
        break;
    }
}

static void text_sample(void *ud, const char *suffix, const metric_label *labels, uint32_t n, metric_value v)
{
    const text *t = ud;

    (void)fprintf(t->to, "%s%s", t->name, suffix);
    for (uint32_t i = 0; i < n; i++) {
        (void)fprintf(t->to, "%c%s=\"", i == 0 ? '{' : ',', labels[i].name);
        put_label_value(t->to, labels[i].value);
        (void)fputc('"', t->to);
    }
    (void)fputs(n > 0 ? "} " : " ", t->to);
    put_value(t->to, v);
    (void)fputc('\n', t->to);
}

kvs_status metrics_text(const metrics_snapshot *s, char **ret, size_t *ret_len)
{
    static const metrics_visitor VISITOR = {text_family, text_sample};
    text t = {NULL, ""};
    char *made = NULL;
    bool good;

    t.to = open_memstream(&made, ret_len);
    if (t.to == NULL)
        return KVS_E_NO_MEMORY;
    metrics_walk(s, &VISITOR, &t);
    good = !ferror(t.to);
    if (fclose(t.to) != 0 || !good) {
        free(made);
        return KVS_E_NO_MEMORY;
    }
    *ret = made;
    return KVS_OK;
}

/* ---- JSON ---- */

typedef struct document {
    json_writer *w;
    bool in_family;
} document;

static void end_family(document *d)
{
    if (!d->in_family)
        return;
    json_end(d->w);
    json_end(d->w);
    d->in_family = false;
}

static void json_family(void *ud, const char *name, enum metric_type type, const char *help)
{
    document *d = ud;

    end_family(d);
    json_begin_object(d->w, NULL);
    json_put_string(d->w, "name", name);
    json_put_string(d->w, "type", type_name(type));
    json_put_string(d->w, "help", help);
    json_begin_array(d->w, "samples");
    d->in_family = true;
}

static void json_sample(void *ud, const char *suffix, const metric_label *labels, uint32_t n, metric_value v)
{
    const document *d = ud;

    json_begin_object(d->w, NULL);
    if (suffix[0] != '\0')
        json_put_string(d->w, "suffix", suffix);
    json_begin_object(d->w, "labels");
    for (uint32_t i = 0; i < n; i++)
        json_put_string(d->w, labels[i].name, labels[i].value);
    json_end(d->w);
    switch (v.kind) {
    case METRIC_WHOLE:
        json_put_u64(d->w, "value", v.u);
        break;
    case METRIC_SIGNED:
        json_put_i64(d->w, "value", v.i);
        break;
    case METRIC_MICROS:
        json_put_double(d->w, "value", (double)v.u / 1e6);
        break;
    case METRIC_NANOS:
        json_put_double(d->w, "value", (double)v.u / 1e9);
        break;
    }
    json_end(d->w);
}

void metrics_json(const metrics_snapshot *s, json_writer *w)
{
    static const metrics_visitor VISITOR = {json_family, json_sample};
    document d = {w, false};

    json_begin_object(w, NULL);
    json_begin_array(w, "families");
    metrics_walk(s, &VISITOR, &d);
    end_family(&d);
    json_end(w);
    json_end(w);
}
