#include "daemon/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config/json.h"

/* ---- the option table, seen as keys and kinds ---- */
enum kind { KIND_SIZE, KIND_INT, KIND_BOOL, KIND_PATH, KIND_WORD, KIND_MODE };

typedef struct key_row {
    const char *key;
    enum kind kind;
} key_row;

#define ROW_SIZE(f, k, d, lo, hi, r, h)   {k, KIND_SIZE},
#define ROW_INT(f, k, d, lo, hi, u, r, h) {k, KIND_INT},
#define ROW_BOOL(f, k, d, r, h)           {k, KIND_BOOL},
#define ROW_PATH(f, k, d, r, h)           {k, KIND_PATH},
#define ROW_WORD(f, k, d, c, r, h)        {k, KIND_WORD},
#define ROW_MODE(f, k, d, r, h)           {k, KIND_MODE},
static const key_row KEYS[] = {CONFIG_OPTIONS(ROW_SIZE, ROW_INT, ROW_BOOL, ROW_PATH, ROW_WORD, ROW_MODE)};
enum { N_KEYS = sizeof KEYS / sizeof KEYS[0] };

static const key_row *find_key(const char *key, size_t len)
{
    for (size_t i = 0; i < N_KEYS; i++)
        if (strlen(KEYS[i].key) == len && memcmp(KEYS[i].key, key, len) == 0)
            return &KEYS[i];
    return NULL;
}

/* ---- command line ---- */
enum { OPT_CONFIG = 256, OPT_ACCEPTED, OPT_SOCKET, OPT_ADMIN, OPT_SET, OPT_ACTION };

static const struct option LONG[] = {
    {"config", required_argument, NULL, OPT_CONFIG},
    {"accepted", required_argument, NULL, OPT_ACCEPTED},
    {"socket", required_argument, NULL, OPT_SOCKET},
    {"admin-socket", required_argument, NULL, OPT_ADMIN},
    {"set", required_argument, NULL, OPT_SET},
    {"check-config", no_argument, NULL, OPT_ACTION + OPTIONS_CHECK},
    {"print-config", no_argument, NULL, OPT_ACTION + OPTIONS_PRINT_CONFIG},
    {"print-schema", no_argument, NULL, OPT_ACTION + OPTIONS_PRINT_SCHEMA},
    {"print-table", no_argument, NULL, OPT_ACTION + OPTIONS_PRINT_TABLE},
    {"version", no_argument, NULL, OPT_ACTION + OPTIONS_VERSION},
    {"help", no_argument, NULL, OPT_ACTION + OPTIONS_HELP},
    {NULL, 0, NULL, 0},
};

void options_help(FILE *to)
{
    (void)fputs("Usage: kvstrided [OPTION]...\n"
                "KV-cache daemon: holds the cache of this host's models in one pool and serves engines over a\n"
                "UNIX socket.  Runs in the foreground, logs to stderr.\n"
                "\n"
                "Configuration:\n"
                "  --config FILE         JSON file; default " OPTIONS_DEFAULT_CONFIG "\n"
                "                        where that exists, else built-in defaults\n"
                "  --accepted FILE       keep the values in use in FILE; when the configuration is refused at\n"
                "                        start, run with those instead of not at all, and be degraded\n"
                "  --set KEY=VALUE       override one key, as in --set pool.max_bytes=64GiB; may be repeated,\n"
                "                        the last one of a key wins\n"
                "  --socket PATH         the same as --set socket.path=PATH\n"
                "  --admin-socket PATH   the same as --set admin.path=PATH\n"
                "\n"
                "Print and exit:\n"
                "  --check-config        say whether the configuration is good\n"
                "  --print-config        the effective configuration, as a file for --config\n"
                "  --print-schema        JSON schema of the configuration\n"
                "  --print-table         every key with default, range and meaning, in Markdown\n"
                "  --version\n"
                "  --help, -h\n"
                "\n"
                "Signals:\n"
                "  TERM, INT   stop: copies in flight may finish for drain.timeout_ms; a second one: at once\n"
                "  HUP         read the file again; keys that need a restart keep their value, and a bad file\n"
                "              changes nothing\n"
                "\n"
                "Exit codes:\n"
                "  0   stopped as asked, or printed\n"
                "  64  usage\n"
                "  70  device lost or internal fault: start it again\n"
                "  71  system: sockets, memory, threads\n"
                "  75  another daemon is running at the same socket\n"
                "  78  configuration: starting again will not help\n",
                to);
}

static kvs_status add_set(options *o, const char *key, size_t key_len, const char *value, kvs_err *err)
{
    if (o->n_sets == OPTIONS_MAX_SETS)
        return kvs_fail(err, KVS_E_INVALID, "more than %d overrides", OPTIONS_MAX_SETS);
    o->sets[o->n_sets++] = (struct options_set){key, key_len, value};
    return KVS_OK;
}

static kvs_status add_set_text(options *o, const char *text, kvs_err *err)
{
    const char *eq = strchr(text, '=');

    if (eq == NULL || eq == text)
        return kvs_fail(err, KVS_E_INVALID, "--set %.100s: want KEY=VALUE", text);
    if (strncmp(text, "tenants", 7) == 0 && strchr("=.[", text[7]) != NULL)
        return kvs_fail(err, KVS_E_INVALID, "--set %.100s: tenants are read from the file only", text);
    return add_set(o, text, (size_t)(eq - text), eq + 1, err);
}

static kvs_status take_option(options *o, int opt, const char *word, kvs_err *err)
{
    switch (opt) {
    case OPT_CONFIG:
        o->config_path = optarg;
        o->named = true;
        return KVS_OK;
    case OPT_ACCEPTED:
        o->accepted_path = optarg;
        return KVS_OK;
    case OPT_SOCKET:
        return add_set(o, "socket.path", strlen("socket.path"), optarg, err);
    case OPT_ADMIN:
        return add_set(o, "admin.path", strlen("admin.path"), optarg, err);
    case OPT_SET:
        return add_set_text(o, optarg, err);
    case ':':
        return kvs_fail(err, KVS_E_INVALID, "%.100s: needs a value", word);
    case 'h':
        o->action = OPTIONS_HELP;
        return KVS_OK;
    case '?':
        return kvs_fail(err, KVS_E_INVALID, "%.100s: no such option, or an ambiguous one", word);
    default:
        o->action = (options_action)(opt - OPT_ACTION);
        return KVS_OK;
    }
}

kvs_status options_parse(options *ret, int argc, char **argv, kvs_err *err)
{
    int opt;

    *ret = (options){.action = OPTIONS_RUN};
    optind = 0; /* begin anew, also when called twice */
    opterr = 0;
    while ((opt = getopt_long(argc, argv, "+:h", LONG, NULL)) != -1) {
        kvs_status s = take_option(ret, opt, argv[optind > 0 ? optind - 1 : 0], err);

        if (s != KVS_OK)
            return s;
    }
    if (optind < argc)
        return kvs_fail(err, KVS_E_INVALID, "%.100s: unexpected argument", argv[optind]);
    if (!ret->named && access(OPTIONS_DEFAULT_CONFIG, F_OK) == 0)
        ret->config_path = OPTIONS_DEFAULT_CONFIG;
    return KVS_OK;
}

/* ---- overrides as a configuration of their own ---- */
static size_t group_len(const struct options_set *s)
{
    const char *dot = memchr(s->key, '.', s->key_len);

    return dot != NULL ? (size_t)(dot - s->key) : 0;
}

static bool same_group(const struct options_set *a, const struct options_set *b)
{
    size_t n = group_len(a);

    return n == group_len(b) && memcmp(a->key, b->key, n) == 0;
}

static bool is_overridden(const options *o, unsigned i)
{
    for (unsigned k = i + 1; k < o->n_sets; k++)
        if (o->sets[k].key_len == o->sets[i].key_len && memcmp(o->sets[k].key, o->sets[i].key, o->sets[i].key_len) == 0)
            return true;
    return false;
}

/* A value of the type that the table wants, so far as the text is one; else a string, which config_parse
 * refuses by name. */
static void put_value(json_writer *w, const struct options_set *s, const char *name)
{
    const key_row *row = find_key(s->key, s->key_len);
    char *end;

    if (row != NULL && row->kind == KIND_INT) {
        long long v;

        errno = 0;
        v = strtoll(s->value, &end, 10);
        if (errno == 0 && end != s->value && *end == '\0') {
            json_put_i64(w, name, v);
            return;
        }
    }
    if (row != NULL && row->kind == KIND_BOOL && (!strcmp(s->value, "true") || !strcmp(s->value, "false"))) {
        json_put_bool(w, name, s->value[0] == 't');
        return;
    }
    json_put_string(w, name, s->value);
}

static void put_set(json_writer *w, const struct options_set *s)
{
    size_t skip = group_len(s) > 0 ? group_len(s) + 1 : 0;
    char name[CONFIG_WORD_BYTES];

    (void)snprintf(name, sizeof name, "%.*s", (int)(s->key_len - skip), s->key + skip);
    put_value(w, s, name);
}

static void put_group(json_writer *w, const options *o, unsigned first)
{
    const struct options_set *s = &o->sets[first];
    char group[CONFIG_WORD_BYTES];

    for (unsigned i = 0; i < first; i++)
        if (same_group(&o->sets[i], s))
            return; /* written with the first of it */
    (void)snprintf(group, sizeof group, "%.*s", (int)group_len(s), s->key);
    if (group[0] != '\0')
        json_begin_object(w, group);
    for (unsigned i = first; i < o->n_sets; i++)
        if (same_group(&o->sets[i], s) && !is_overridden(o, i))
            put_set(w, &o->sets[i]);
    if (group[0] != '\0')
        json_end(w);
}

static kvs_status apply_sets(const options *o, config *c, kvs_err *err)
{
    json_writer *w;
    const char *text;
    size_t len;
    kvs_status s;

    if (o->n_sets == 0)
        return KVS_OK;
    w = json_writer_create();
    if (w == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "command line: out of memory");
    json_begin_object(w, NULL);
    for (unsigned i = 0; i < o->n_sets; i++)
        put_group(w, o, i);
    json_end(w);
    text = json_text(w, &len);
    s = text != NULL ? config_parse(c, text, len, err) : kvs_fail(err, KVS_E_NO_MEMORY, "command line: out of memory");
    json_writer_destroy(w);
    return s;
}

kvs_status options_config(const options *o, config *ret, kvs_err *err)
{
    config *c = malloc(sizeof *c);
    kvs_err why;
    kvs_status s = KVS_OK;

    if (c == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "configuration: out of memory");
    config_default(c);
    if (o->config_path != NULL)
        s = config_load(c, o->config_path, err);
    if (s == KVS_OK) {
        s = apply_sets(o, c, &why);
        if (s != KVS_OK)
            (void)kvs_fail(err, s, "command line: %.200s", why.msg);
    }
    if (s == KVS_OK)
        *ret = *c;
    free(c);
    return s;
}

/* ---- reload ---- */
typedef struct key_lists {
    char *changed, *kept;
    size_t cap;
} key_lists;

static void append_key(void *ud, const config_change *x)
{
    const key_lists *l = ud;
    char *list = x->reloadable ? l->changed : l->kept;
    size_t len = strlen(list);

    (void)snprintf(list + len, l->cap - len, "%s%s", len > 0 ? "," : "", x->key);
}

kvs_status options_reload(config *live, const config *fresh, char *ret_changed, char *ret_kept, size_t cap,
                          kvs_err *err)
{
    key_lists lists = {ret_changed, ret_kept, cap};
    config *c = malloc(sizeof *c);
    kvs_status s;

    if (c == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "configuration: out of memory");
    *c = *live;
    ret_changed[0] = ret_kept[0] = '\0';
    (void)config_changed(live, fresh, append_key, &lists);
    config_take_reloadable(c, fresh);
    s = config_check(c, err); /* the mixture may break a rule that both halves keep */
    if (s == KVS_OK)
        *live = *c;
    free(c);
    return s;
}
