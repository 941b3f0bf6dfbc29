#include <inttypes.h>
#include <string.h>

#include "config/config.h"
#include "config/json.h"
#include "config/option.h"
#include "config/tenants.h"

/* Calls `begin` before the first option of a section and json_end behind its last. */
static void each_section(json_writer *w, const config *c, void (*begin)(json_writer *w, const char *section),
                         void (*put)(json_writer *w, const config *c, const option *o), void (*end)(json_writer *w))
{
    for (size_t i = 0; i < N_OPTIONS; i++) {
        const option *o = &OPTIONS[i];
        char section[OPTION_TEXT_BYTES];

        (void)snprintf(section, sizeof section, "%.*s", (int)option_section_bytes(o), o->key);
        if (i == 0 || !option_same_section(o - 1, o))
            begin(w, section);
        put(w, c, o);
        if (i + 1 == N_OPTIONS || !option_same_section(o, o + 1))
            end(w);
    }
}

static kvs_status finish(json_writer *w, FILE *to)
{
    size_t len;
    const char *text = json_text(w, &len);
    kvs_status st = text == NULL ? KVS_E_NO_MEMORY : KVS_OK;

    if (text != NULL)
        json_pretty(text, len, to);
    json_writer_destroy(w);
    return st == KVS_OK && ferror(to) ? KVS_E_SYS : st;
}

/* ---- values ---- */

static void put_uids(json_writer *w, const char *key, const config_uids *u)
{
    json_begin_array(w, key);
    for (uint32_t i = 0; i < u->n; i++)
        json_put_u64(w, NULL, u->uid[i]);
    json_end(w);
}

/* The words of those bits of `flags` that are set. */
static void put_words(json_writer *w, const char *key, const option *o, int64_t flags)
{
    char text[CONFIG_WORD_BYTES];
    const char *choice;
    size_t len;

    json_begin_array(w, key);
    for (size_t i = 0; (choice = option_choice(o, i, &len)) != NULL; i++) {
        (void)snprintf(text, sizeof text, "%.*s", (int)len, choice);
        if ((flags >> i & 1) != 0)
            json_put_string(w, NULL, text);
    }
    json_end(w);
}

static void put_value(json_writer *w, const char *key, const void *base, const option *o)
{
    char text[OPTION_TEXT_BYTES];

    if (o->kind == OPTION_UIDS)
        put_uids(w, key, option_uids(base, o));
    else if (o->kind == OPTION_FLAGS)
        put_words(w, key, o, option_number(base, o));
    else if (o->kind == OPTION_BOOL)
        json_put_bool(w, key, option_number(base, o) != 0);
    else if (o->kind == OPTION_INT || (o->kind == OPTION_SIZE && option_number(base, o) % 1024 != 0) ||
             (o->kind == OPTION_SIZE && option_number(base, o) == 0))
        json_put_i64(w, key, option_number(base, o));
    else
        json_put_string(w, key, option_format(text, base, o));
}

static void put_option(json_writer *w, const config *c, const option *o)
{
    put_value(w, option_name(o), c, o);
}

static void put_tenants(json_writer *w, const config *c)
{
    json_begin_array(w, "tenants");
    for (uint32_t i = 0; i < c->n_tenants; i++) {
        const config_tenant *t = &c->tenants[i];

        if (t->gone || tenant_is_plain(t))
            continue;
        json_begin_object(w, NULL);
        for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
            if (tenant_has(t, o))
                put_value(w, option_name(o), t, o);
        json_end(w);
    }
    json_end(w);
}

kvs_status config_print(const config *c, FILE *to)
{
    json_writer *w = json_writer_create();

    if (w == NULL)
        return KVS_E_NO_MEMORY;
    json_begin_object(w, NULL);
    each_section(w, c, json_begin_object, put_option, json_end);
    put_tenants(w, c);
    json_end(w);
    return finish(w, to);
}

/* ---- the README table ---- */

static void print_range(const option *o, FILE *to)
{
    char lo[OPTION_TEXT_BYTES], hi[OPTION_TEXT_BYTES];
    const char *choice;
    size_t len;

    switch (o->kind) {
    case OPTION_SIZE:
        option_format_size(lo, o->min);
        option_format_size(hi, o->max);
        fprintf(to, "%s..%s", lo, hi);
        return;
    case OPTION_INT:
        fprintf(to, "%" PRId64 "..%" PRId64, o->min, o->max);
        return;
    case OPTION_WORD:
    case OPTION_FLAGS:
        for (size_t i = 0; (choice = option_choice(o, i, &len)) != NULL; i++)
            fprintf(to, "%s`%.*s`", i > 0 ? ", " : "", (int)len, choice);
        return;
    case OPTION_BOOL:
        fputs("`true`, `false`", to);
        return;
    case OPTION_MODE:
        fputs("`\"0000\"`..`\"0777\"`", to);
        return;
    case OPTION_PATH:
        fprintf(to, "%sabsolute, 1..%d bytes", o->min == 0 ? "none, or " : "", (int)OPTION_PATH_MAX);
        return;
    case OPTION_NAME:
        fprintf(to, "1..%" PRId64 " of `a-z0-9_-`, the first a letter", o->max);
        return;
    case OPTION_UIDS:
        fprintf(to, "0..%d users, each a name or %" PRId64 "..%" PRId64, CONFIG_MAX_UIDS, o->min, o->max);
        return;
    }
}

static void print_row(const option *o, const void *base, const char *prefix, FILE *to)
{
    static const char *const KINDS[] = {"size", "integer", "boolean", "path",          "word",
                                        "mode", "name",    "users",   "array of words"};
    char text[OPTION_TEXT_BYTES];
    const char *def = option_format(text, base, o);

    fprintf(to, "| `%s%s` | %s | ", prefix, *prefix != '\0' ? option_name(o) : o->key, KINDS[o->kind]);
    fprintf(to, *def != '\0' ? "`%s` | " : o->min == 0 ? "%snone | " : "%srequired | ", def);
    print_range(o, to);
    fprintf(to, " | %s | %s | %s |\n", o->unit, o->reloadable ? "yes" : "restart", o->help);
}

kvs_status config_print_table(FILE *to)
{
    config_tenant t;
    config c;

    config_default(&c);
    t = c.tenants[0];
    t.name[0] = '\0';
    fputs("| key | type | default | range | unit | reload | meaning |\n|---|---|---|---|---|---|---|\n", to);
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++)
        print_row(o, &c, "", to);
    for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
        print_row(o, &t, "tenants[].", to);
    return ferror(to) ? KVS_E_SYS : KVS_OK;
}

/* ---- the schema ---- */

static void put_range(json_writer *w, const option *o)
{
    json_put_string(w, "type", "integer");
    json_put_i64(w, "minimum", o->min);
    json_put_i64(w, "maximum", o->max);
}

static void put_string_rule(json_writer *w, const char *pattern)
{
    json_put_string(w, "type", "string");
    json_put_string(w, "pattern", pattern);
}

static void put_choices(json_writer *w, const option *o)
{
    char text[CONFIG_WORD_BYTES];
    const char *choice;
    size_t len;

    json_begin_array(w, "enum");
    for (size_t i = 0; (choice = option_choice(o, i, &len)) != NULL; i++) {
        (void)snprintf(text, sizeof text, "%.*s", (int)len, choice);
        json_put_string(w, NULL, text);
    }
    json_end(w);
}

static void put_size_forms(json_writer *w, const option *o)
{
    json_begin_array(w, "anyOf");
    json_begin_object(w, NULL);
    put_range(w, o);
    json_end(w);
    json_begin_object(w, NULL);
    put_string_rule(w, "^(0|[1-9][0-9]*)(B|KiB|MiB|GiB|TiB)?$"); /* the range of a string is the program's to check */
    json_end(w);
    json_end(w);
}

static void put_user_forms(json_writer *w, const option *o)
{
    json_begin_array(w, "oneOf");
    json_begin_object(w, NULL);
    put_range(w, o);
    json_end(w);
    json_begin_object(w, NULL);
    put_string_rule(w, "^[^:]+$");
    json_end(w);
    json_end(w);
}

static void put_list_rule(json_writer *w, const option *o)
{
    json_put_string(w, "type", "array");
    json_put_bool(w, "uniqueItems", true);
    if (o->kind == OPTION_UIDS)
        json_put_i64(w, "maxItems", CONFIG_MAX_UIDS);
    json_begin_object(w, "items");
    if (o->kind == OPTION_UIDS)
        put_user_forms(w, o);
    else
        put_choices(w, o);
    json_end(w);
}

static void put_rule(json_writer *w, const option *o)
{
    switch (o->kind) {
    case OPTION_SIZE:
        put_size_forms(w, o);
        return;
    case OPTION_INT:
        put_range(w, o);
        return;
    case OPTION_BOOL:
        json_put_string(w, "type", "boolean");
        return;
    case OPTION_PATH:
        put_string_rule(w, o->min == 0 ? "^(/(.*[^/]))?$" : "^/(.*[^/])$");
        json_put_i64(w, "maxLength", OPTION_PATH_MAX);
        return;
    case OPTION_WORD:
        put_choices(w, o);
        return;
    case OPTION_MODE:
        put_string_rule(w, "^0?[0-7]{3}$");
        return;
    case OPTION_NAME:
        put_string_rule(w, "^[a-z][a-z0-9_-]*$");
        json_put_i64(w, "maxLength", o->max);
        return;
    case OPTION_UIDS:
    case OPTION_FLAGS:
        put_list_rule(w, o);
        return;
    }
}

static void put_any_schema(json_writer *w, const void *base, const option *o)
{
    char text[512];

    (void)snprintf(text, sizeof text, "%s%s%s%s (%s)", o->help, *o->unit != '\0' ? " [" : "", o->unit,
                   *o->unit != '\0' ? "]" : "", o->reloadable ? "taken over by a reload" : "needs a restart");
    json_begin_object(w, option_name(o));
    json_put_string(w, "description", text);
    put_rule(w, o);
    if (base != NULL)
        put_value(w, "default", base, o);
    json_end(w);
}

static void put_option_schema(json_writer *w, const config *c, const option *o)
{
    put_any_schema(w, c, o);
}

static void begin_closed_object(json_writer *w, const char *key)
{
    json_begin_object(w, key);
    json_put_string(w, "type", "object");
    json_put_bool(w, "additionalProperties", false);
    json_begin_object(w, "properties");
}

static void end_closed_object(json_writer *w)
{
    json_end(w);
    json_end(w);
}

static void put_tenants_schema(json_writer *w, const config *c)
{
    json_begin_object(w, "tenants");
    json_put_string(w, "description", "who comes in by which socket, and what they may do and use");
    json_put_string(w, "type", "array");
    json_put_i64(w, "maxItems", CONFIG_MAX_TENANTS);
    begin_closed_object(w, "items");
    for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
        put_any_schema(w, o->kind == OPTION_NAME || o->kind == OPTION_PATH ? NULL : &c->tenants[0], o);
    json_end(w);
    json_begin_array(w, "required");
    json_put_string(w, NULL, "name");
    json_end(w);
    json_end(w);
    json_end(w);
}

kvs_status config_print_schema(FILE *to)
{
    json_writer *w = json_writer_create();
    config c;

    if (w == NULL)
        return KVS_E_NO_MEMORY;
    config_default(&c);
    json_begin_object(w, NULL);
    json_put_string(w, "$schema", "https://json-schema.org/draft/2020-12/schema");
    json_put_string(w, "title", "kvstrided configuration");
    json_put_string(w, "type", "object");
    json_put_bool(w, "additionalProperties", false);
    json_begin_object(w, "properties");
    json_begin_object(w, "$schema");
    json_put_string(w, "type", "string");
    json_put_string(w, "description", "where this schema lies, for an editor; the daemon does not look");
    json_end(w);
    each_section(w, &c, begin_closed_object, put_option_schema, end_closed_object);
    put_tenants_schema(w, &c);
    json_end(w);
    json_end(w);
    return finish(w, to);
}

/* ---- what a reload would change ---- */

size_t config_changed(const config *from, const config *to, config_on_change *on_change, void *ud)
{
    char old_buf[OPTION_TEXT_BYTES], new_buf[OPTION_TEXT_BYTES];
    size_t n = 0;

    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++) {
        if (option_equal(from, to, o))
            continue;
        n++;
        if (on_change != NULL)
            on_change(ud, &(config_change){o->key, o->reloadable, option_format(old_buf, from, o),
                                           option_format(new_buf, to, o)});
    }
    return n + tenants_changed(from, to, on_change, ud);
}

void config_take_reloadable(config *live, const config *fresh)
{
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++)
        if (o->reloadable)
            option_copy(live, fresh, o);
    tenants_take_reloadable(live, fresh);
}
