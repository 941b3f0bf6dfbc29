#include "config/config.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config/json.h"
#include "config/option.h"
#include "config/tenants.h"
#include "config/value.h"

enum {
    BODIES_IN_MEMORY = 8, /* the largest ones, at least */
    FILE_MAX = 1 << 20,   /* bytes; a config file is a few hundred */
    SHOWN_PATH = 100      /* of a file name, its end, so that the reason still fits behind it */
};

void config_default(config *c)
{
    memset(c, 0, sizeof *c);
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++)
        option_set_default(c, o);
    tenants_default(c);
}

/* ---- keys ---- */

/* The key that was probably meant by `key` inside `section` ("" = top level): misspelt, or left out of its
 * section. */
static const char *nearest_key(char buf[JSON_QUOTED_BYTES], const char *section, const char *key)
{
    size_t d, best = OPTION_MEANT + 1;
    const char *found = NULL;

    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++) {
        size_t n = option_section_bytes(o);
        char name[JSON_QUOTED_BYTES];

        if (*section == '\0')
            (void)snprintf(name, sizeof name, "%.*s", (int)n, o->key);
        else if (strlen(section) == n && memcmp(section, o->key, n) == 0)
            (void)snprintf(name, sizeof name, "%s", option_name(o));
        else
            continue;
        d = option_distance(key, name);
        if (d >= best)
            continue;
        best = d;
        found = memcpy(buf, name, sizeof name);
    }
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS && found == NULL; o++) {
        if (strcmp(key, option_name(o)) == 0 || strcmp(key, o->key) == 0)
            found = o->key;
    }
    return found;
}

static kvs_status unknown_key(const char *section, const char *key, kvs_err *err)
{
    char shown[JSON_QUOTED_BYTES], meant_buf[JSON_QUOTED_BYTES], where[JSON_QUOTED_BYTES] = "";
    const char *meant = nearest_key(meant_buf, section, key), *dot;

    if (*section != '\0')
        (void)snprintf(where, sizeof where, " in \"%s\"", section);
    (void)json_quote(shown, key);
    if (meant == NULL)
        return kvs_fail(err, KVS_E_CONFIG, "%s%s: unknown key", shown, where);
    dot = strchr(meant, '.');
    if (dot == NULL)
        return kvs_fail(err, KVS_E_CONFIG, "%s%s: unknown key; did you mean \"%s\"?", shown, where, meant);
    return kvs_fail(err, KVS_E_CONFIG, "%s%s: unknown key; did you mean {\"%.*s\": {\"%s\": ...}}?", shown, where,
                    (int)(dot - meant), meant, dot + 1);
}

static bool is_section(const char *key)
{
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++) {
        if (strlen(key) == option_section_bytes(o) && strncmp(key, o->key, strlen(key)) == 0)
            return true;
    }
    return false;
}

static const option *find_option(const char *section, const char *name)
{
    for (const option *o = OPTIONS; o < OPTIONS + N_OPTIONS; o++) {
        size_t n = option_section_bytes(o);

        if (strlen(section) == n && memcmp(section, o->key, n) == 0 && strcmp(name, option_name(o)) == 0)
            return o;
    }
    return NULL;
}

static kvs_status set_section(config *c, const json_node *section, kvs_err *err)
{
    const char *name = json_key(section);
    kvs_status st;

    if (strcmp(name, "tenants") == 0)
        return tenants_set(c, section, err);
    if (strcmp(name, "$schema") == 0 && json_type_of(section) == JSON_STRING) /* for editors */
        return KVS_OK;
    if (!is_section(name))
        return unknown_key("", name, err);
    if (json_type_of(section) != JSON_OBJECT)
        return kvs_fail(err, KVS_E_CONFIG, "%s: expected an object with its keys, found %s", name,
                        json_type_name(json_type_of(section)));
    for (const json_node *n = json_first(section); n != NULL; n = json_next(n)) {
        const option *o = find_option(name, json_key(n));

        st = o == NULL ? unknown_key(name, json_key(n), err) : value_set(c, o, n, err);
        if (st != KVS_OK)
            return st;
    }
    return KVS_OK;
}

/* ---- rules between keys ---- */

/* Past parts that name nothing: of "//", "/./" and a "/." at the end all but the slash before the next name. */
static const char *skip_nothing(const char *p)
{
    for (;;)
        if (p[0] == '/' && p[1] == '/')
            p++;
        else if (p[0] == '/' && p[1] == '.' && (p[2] == '/' || p[2] == '\0'))
            p += 2;
        else
            return p;
}

bool config_same_path(const char *a, const char *b)
{
    for (;;) {
        a = skip_nothing(a);
        b = skip_nothing(b);
        if (*a != *b || *a == '\0')
            return *a == *b;
        a++;
        b++;
    }
}

static kvs_status check_sizes(const char *low_key, int64_t low, const char *high_key, int64_t high, kvs_err *err)
{
    char l[OPTION_TEXT_BYTES], h[OPTION_TEXT_BYTES];

    if (low <= high)
        return KVS_OK;
    return kvs_fail(err, KVS_E_CONFIG, "%s: %s is more than %s, %s", low_key, option_say_size(l, low), high_key,
                    option_say_size(h, high));
}

static kvs_status check_paths(const config *c, kvs_err *err)
{
    const struct {
        const char *key, *path;
    } all[] = {{"socket.path", c->socket_path}, {"admin.path", c->admin_path}, {"metrics.path", c->metrics_path}};
    char shown[JSON_QUOTED_BYTES];

    for (size_t i = 1; i < sizeof all / sizeof all[0]; i++)
        for (size_t k = 0; k < i; k++)
            if (config_same_path(all[i].path, all[k].path))
                return kvs_fail(err, KVS_E_CONFIG, "%s: the same as %s, %s; they must differ", all[i].key, all[k].key,
                                json_quote(shown, all[i].path));
    return KVS_OK;
}

/* Each tenant has its part of it: the largest request must fit in, or it would be read only while others leave theirs unused. */
static kvs_status check_memory(const config *c, kvs_err *err)
{
    char memory[OPTION_TEXT_BYTES], body[OPTION_TEXT_BYTES];
    int64_t least = 0;

    for (uint32_t i = 0; i < c->n_tenants; i++)
        least += c->tenants[i].gone ? 0 : 2;
    least = least < BODIES_IN_MEMORY ? BODIES_IN_MEMORY : least;
    if (c->memory_bytes / c->max_body_bytes >= least)
        return KVS_OK;
    return kvs_fail(err, KVS_E_CONFIG,
                    "limits.memory_bytes: %s is less than %" PRId64
                    " times limits.max_body_bytes, %s (%d times, and twice for each tenant)",
                    option_say_size(memory, c->memory_bytes), least, option_say_size(body, c->max_body_bytes),
                    (int)BODIES_IN_MEMORY);
}

kvs_status config_check(const config *c, kvs_err *err)
{
    const int64_t extent = c->pool_extent_bytes;
    kvs_status st;

    if (c->default_deadline_ms > c->max_deadline_ms)
        return kvs_fail(err, KVS_E_CONFIG,
                        "deadline.default_ms: %" PRId64 " ms is more than deadline.max_ms, %" PRId64 " ms",
                        c->default_deadline_ms, c->max_deadline_ms);
    st = check_sizes("limits.out_high_bytes", c->out_high_bytes, "limits.out_max_bytes", c->out_max_bytes, err);
    if (st == KVS_OK)
        st = check_sizes("limits.max_body_bytes", c->max_body_bytes, "limits.out_max_bytes", c->out_max_bytes, err);
    if (st == KVS_OK)
        st = check_memory(c, err);
    if (st == KVS_OK)
        st = check_sizes("pool.extent_bytes", extent, "pool.max_bytes", c->pool_max_bytes, err);
    if (st == KVS_OK && c->pool_reserve_bytes != 0)
        st = check_sizes("pool.max_bytes", c->pool_max_bytes, "pool.reserve_bytes", c->pool_reserve_bytes, err);
    if (st == KVS_OK && extent != 0 && extent < CONFIG_KIB(4))
        st = kvs_fail(err, KVS_E_CONFIG, "pool.extent_bytes: %" PRId64 " bytes; must be 0 or at least 4096", extent);
    if (st == KVS_OK)
        st = check_paths(c, err);
    if (st == KVS_OK)
        st = tenants_check(c, err);
    return st;
}

/* ---- documents and files ---- */

kvs_status config_parse(config *c, const char *text, size_t len, kvs_err *err)
{
    config next = *c;
    const json_node *root;
    json *j;
    kvs_status st = json_parse(text, len, &j, err);

    if (st != KVS_OK)
        return st;
    root = json_root(j);
    if (json_type_of(root) != JSON_OBJECT)
        st = kvs_fail(err, KVS_E_CONFIG, "expected one JSON object, found %s", json_type_name(json_type_of(root)));
    for (const json_node *n = st == KVS_OK ? json_first(root) : NULL; n != NULL && st == KVS_OK; n = json_next(n))
        st = set_section(&next, n, err);
    json_destroy(j);
    if (st == KVS_OK)
        st = config_check(&next, err);
    if (st == KVS_OK)
        *c = next;
    return st;
}

/* At most `cap` bytes of a regular file.  *ret_len == cap: there may be more. */
static kvs_status read_file(const char *path, char *buf, size_t cap, size_t *ret_len, kvs_err *err)
{
    /* Not waiting: the name could be a pipe that nobody writes. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat sb;
    size_t len = 0;
    ssize_t n = 1;

    if (fd < 0)
        return kvs_fail(err, KVS_E_CONFIG, "cannot be opened: %s", strerror(errno));
    if (fstat(fd, &sb) != 0 || !S_ISREG(sb.st_mode)) {
        (void)close(fd);
        return kvs_fail(err, KVS_E_CONFIG, "is %s, not a regular file",
                        S_ISDIR(sb.st_mode) ? "a directory" : "special");
    }
    while (n > 0 && len < cap) {
        n = read(fd, buf + len, cap - len);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            len += (size_t)n;
    }
    if (n < 0)
        (void)kvs_fail(err, KVS_E_CONFIG, "cannot be read: %s", strerror(errno));
    (void)close(fd);
    *ret_len = len;
    return n < 0 ? KVS_E_CONFIG : KVS_OK;
}

static kvs_status load(config *c, const char *path, char *buf, kvs_err *err)
{
    size_t len = 0;
    kvs_status st = read_file(path, buf, FILE_MAX + 1, &len, err);

    if (st != KVS_OK)
        return st;
    if (len > FILE_MAX)
        return kvs_fail(err, KVS_E_CONFIG, "is larger than %d bytes", (int)FILE_MAX);
    if (len == 0)
        return kvs_fail(err, KVS_E_CONFIG, "is empty; {} stands for the defaults");
    return config_parse(c, buf, len, err);
}

kvs_status config_load(config *c, const char *path, kvs_err *err)
{
    size_t len = strlen(path), skip = len > SHOWN_PATH ? len - SHOWN_PATH : 0;
    kvs_err why = {0};
    char *buf = malloc(FILE_MAX + 1);
    kvs_status st;

    if (buf == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "out of memory: %d bytes to read a file", FILE_MAX + 1);
    st = load(c, path, buf, &why);
    free(buf);
    if (st != KVS_OK)
        return kvs_fail(err, st, "%s%s: %s", skip > 0 ? "..." : "", path + skip, why.msg);
    return KVS_OK;
}
