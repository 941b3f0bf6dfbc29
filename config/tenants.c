#include "config/tenants.h"

#include <inttypes.h>
#include <string.h>

#include "config/value.h"

static void fill_default(config_tenant *t)
{
    memset(t, 0, sizeof *t);
    for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
        option_set_default(t, o);
}

void tenants_default(config *c)
{
    memset(c->tenants, 0, sizeof c->tenants);
    c->n_tenants = 1;
    fill_default(&c->tenants[0]);
    (void)snprintf(c->tenants[0].name, CONFIG_NAME_BYTES, "default");
}

/* Whose name it is or was. */
static uint32_t find_name(const config *c, const char *name)
{
    for (uint32_t i = 0; i < c->n_tenants; i++)
        if (strcmp(c->tenants[i].name, name) == 0)
            return i;
    return CONFIG_MAX_TENANTS;
}

uint32_t config_find_tenant(const config *c, const char *name)
{
    uint32_t i = find_name(c, name);

    return i < CONFIG_MAX_TENANTS && !c->tenants[i].gone ? i : CONFIG_MAX_TENANTS;
}

static bool is_first(const config_tenant *t)
{
    return strcmp(t->name, "default") == 0;
}

bool tenant_has(const config_tenant *t, const option *o)
{
    return !is_first(t) || (strcmp(o->key, "tenants.path") != 0 && strcmp(o->key, "tenants.mode") != 0);
}

bool tenant_is_plain(const config_tenant *t)
{
    config_tenant plain;

    if (!is_first(t))
        return false;
    fill_default(&plain);
    for (const option *o = TENANT_OPTIONS + 1; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
        if (!option_equal(t, &plain, o))
            return false;
    return true;
}

/* ---- reading ---- */

static const option *find_option(const char *name)
{
    for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
        if (strcmp(option_name(o), name) == 0)
            return o;
    return NULL;
}

/* The message without its "tenants", which the caller writes with the number of the entry. */
static const char *behind_section(const char *msg)
{
    return strncmp(msg, "tenants.", 8) == 0 ? msg + 7 : msg;
}

static kvs_status unknown_key(const char *key, kvs_err *err)
{
    size_t best = OPTION_MEANT + 1;
    const char *meant = NULL;
    char shown[JSON_QUOTED_BYTES];

    for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++) {
        size_t d = option_distance(key, option_name(o));

        if (d < best) {
            best = d;
            meant = option_name(o);
        }
    }
    (void)json_quote(shown, key);
    if (meant == NULL)
        return kvs_fail(err, KVS_E_CONFIG, ": %s: unknown key", shown);
    return kvs_fail(err, KVS_E_CONFIG, ": %s: unknown key; did you mean \"%s\"?", shown, meant);
}

static kvs_status set_key(config_tenant *t, const json_node *n, kvs_err *err)
{
    const option *o = find_option(json_key(n));

    if (o == NULL)
        return unknown_key(json_key(n), err);
    if (!tenant_has(t, o))
        return kvs_fail(err, KVS_E_CONFIG, "%s: \"default\" comes in by socket.path and has none", o->key);
    return value_set(t, o, n, err);
}

/* The name first: other rules depend on it. */
static kvs_status read_entry(config_tenant *t, const json_node *entry, kvs_err *err)
{
    const json_node *name;
    kvs_status st;

    fill_default(t);
    if (json_type_of(entry) != JSON_OBJECT)
        return kvs_fail(err, KVS_E_CONFIG, ": expected an object with a tenant's keys, found %s",
                        json_type_name(json_type_of(entry)));
    name = json_member(entry, "name");
    if (name == NULL)
        return kvs_fail(err, KVS_E_CONFIG, ".name: is missing");
    st = value_set(t, &TENANT_OPTIONS[0], name, err);
    for (const json_node *n = json_first(entry); n != NULL && st == KVS_OK; n = json_next(n))
        st = set_key(t, n, err);
    if (st == KVS_OK && !is_first(t) && t->path[0] == '\0')
        return kvs_fail(err, KVS_E_CONFIG, ".path: is missing; a tenant comes in by a socket of its own");
    return st;
}

static kvs_status add_entry(config *c, const config_tenant *t, bool *had_default, kvs_err *err)
{
    if (is_first(t) && !*had_default) {
        *had_default = true;
        c->tenants[0] = *t;
        return KVS_OK;
    }
    if (config_find_tenant(c, t->name) < CONFIG_MAX_TENANTS)
        return kvs_fail(err, KVS_E_CONFIG, ".name: \"%s\" is there already", t->name);
    if (c->n_tenants == CONFIG_MAX_TENANTS)
        return kvs_fail(err, KVS_E_CONFIG, ": one too many; at most %d may be, with \"default\"", CONFIG_MAX_TENANTS);
    c->tenants[c->n_tenants++] = *t;
    return KVS_OK;
}

kvs_status tenants_set(config *c, const json_node *array, kvs_err *err)
{
    bool had_default = false;
    unsigned i = 0;
    kvs_err why;

    if (json_type_of(array) != JSON_ARRAY)
        return kvs_fail(err, KVS_E_CONFIG, "tenants: expected an array of objects, found %s",
                        json_type_name(json_type_of(array)));
    tenants_default(c);
    for (const json_node *n = json_first(array); n != NULL; n = json_next(n), i++) {
        config_tenant t;
        kvs_status st = read_entry(&t, n, &why);

        if (st == KVS_OK)
            st = add_entry(c, &t, &had_default, &why);
        if (st != KVS_OK)
            return kvs_fail(err, st, "tenants[%u]%.*s", i, KVS_ERR_MSG_BYTES - 32, behind_section(why.msg));
    }
    return KVS_OK;
}

/* ---- rules ---- */

/* Words that mean something else where a tenant's name stands: other sockets' FileDescriptorName, and nobody. */
static bool is_reserved(const char *name)
{
    return strcmp(name, "admin") == 0 || strcmp(name, "client") == 0 || strcmp(name, "metrics") == 0;
}

static kvs_status check_path(const config *c, uint32_t i, kvs_err *err)
{
    const config_tenant *t = &c->tenants[i];
    const char *other = NULL;

    if (config_same_path(t->path, c->socket_path))
        other = "socket.path";
    else if (config_same_path(t->path, c->metrics_path))
        other = "metrics.path";
    else if (config_same_path(t->path, c->admin_path))
        other = "admin.path";
    for (uint32_t k = 1; k < i && other == NULL; k++)
        if (!c->tenants[k].gone && config_same_path(t->path, c->tenants[k].path))
            other = c->tenants[k].name;
    if (other != NULL)
        return kvs_fail(err, KVS_E_CONFIG, "tenants.%s.path: the same as that of %s, %s; they must differ", t->name,
                        other, t->path);
    return KVS_OK;
}

static kvs_status check_one(const config *c, uint32_t i, kvs_err *err)
{
    const config_tenant *t = &c->tenants[i];
    char floor[OPTION_TEXT_BYTES], quota[OPTION_TEXT_BYTES];

    if (is_reserved(t->name))
        return kvs_fail(
            err, KVS_E_CONFIG,
            "tenants.%s: no tenant may have this name: admin, client and metrics are the daemon's own sockets",
            t->name);
    if (t->quota_bytes != 0 && t->quota_bytes < t->floor_bytes)
        return kvs_fail(err, KVS_E_CONFIG, "tenants.%s.floor_bytes: %s is more than its quota_bytes, %s", t->name,
                        option_say_size(floor, t->floor_bytes), option_say_size(quota, t->quota_bytes));
    return i > 0 ? check_path(c, i, err) : KVS_OK;
}

kvs_status tenants_check(const config *c, kvs_err *err)
{
    char sum[OPTION_TEXT_BYTES], pool[OPTION_TEXT_BYTES];
    int64_t floors = 0;
    kvs_status st = KVS_OK;

    for (uint32_t i = 0; i < c->n_tenants && st == KVS_OK; i++) {
        st = c->tenants[i].gone ? KVS_OK : check_one(c, i, err);
        floors += c->tenants[i].floor_bytes; /* 64 of at most 4 TiB */
    }
    if (st == KVS_OK && floors > c->pool_max_bytes)
        st = kvs_fail(err, KVS_E_CONFIG, "tenants: floor_bytes of all are %s, more than pool.max_bytes, %s",
                      option_say_size(sum, floors), option_say_size(pool, c->pool_max_bytes));
    return st;
}

/* ---- reload ---- */

static size_t tell(const char *name, const char *key, bool reloadable, const char *from, const char *to,
                   config_on_change *on_change, void *ud)
{
    char full[CONFIG_NAME_BYTES + CONFIG_WORD_BYTES];

    (void)snprintf(full, sizeof full, "tenants.%s%s%s", name, *key != '\0' ? "." : "", key);
    if (on_change != NULL)
        on_change(ud, &(config_change){full, reloadable, from, to});
    return 1;
}

static size_t one_changed(const config_tenant *a, const config_tenant *b, config_on_change *on_change, void *ud)
{
    char from[OPTION_TEXT_BYTES], to[OPTION_TEXT_BYTES];
    size_t n = 0;

    for (const option *o = TENANT_OPTIONS; o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
        if (!option_equal(a, b, o))
            n += tell(a->name, option_name(o), o->reloadable, option_format(from, a, o), option_format(to, b, o),
                      on_change, ud);
    return n;
}

/* The number that a new tenant would get in `live`, of which *n are given away: its own of before, or the next. */
static uint32_t number_for(const config *live, const char *name, uint32_t *n)
{
    uint32_t i = find_name(live, name);

    return i < CONFIG_MAX_TENANTS || *n == CONFIG_MAX_TENANTS ? i : (*n)++;
}

size_t tenants_changed(const config *from, const config *to, config_on_change *on_change, void *ud)
{
    uint32_t numbers = from->n_tenants;
    size_t n = 0;

    for (uint32_t i = 0; i < from->n_tenants; i++) {
        uint32_t k = config_find_tenant(to, from->tenants[i].name);

        if (from->tenants[i].gone)
            continue;
        n += k < CONFIG_MAX_TENANTS ? one_changed(&from->tenants[i], &to->tenants[k], on_change, ud)
                                    : tell(from->tenants[i].name, "", true, "there", "gone", on_change, ud);
    }
    for (uint32_t k = 0; k < to->n_tenants; k++) {
        const config_tenant *t = &to->tenants[k];

        if (!t->gone && config_find_tenant(from, t->name) == CONFIG_MAX_TENANTS)
            n += tell(t->name, "", number_for(from, t->name, &numbers) < CONFIG_MAX_TENANTS, "not there", "there",
                      on_change, ud);
    }
    return n;
}

static void take_out(config_tenant *t)
{
    char name[CONFIG_NAME_BYTES];

    memcpy(name, t->name, sizeof name);
    fill_default(t);
    memcpy(t->name, name, sizeof name);
    t->gone = true;
}

void tenants_take_reloadable(config *live, const config *fresh)
{
    for (uint32_t i = 0; i < live->n_tenants; i++) {
        uint32_t k = config_find_tenant(fresh, live->tenants[i].name);

        for (const option *o = TENANT_OPTIONS; k < CONFIG_MAX_TENANTS && o < TENANT_OPTIONS + N_TENANT_OPTIONS; o++)
            if (o->reloadable)
                option_copy(&live->tenants[i], &fresh->tenants[k], o);
        if (k == CONFIG_MAX_TENANTS)
            take_out(&live->tenants[i]);
    }
    for (uint32_t k = 0; k < fresh->n_tenants; k++) {
        if (fresh->tenants[k].gone || config_find_tenant(live, fresh->tenants[k].name) < CONFIG_MAX_TENANTS)
            continue;
        uint32_t i = number_for(live, fresh->tenants[k].name, &live->n_tenants);

        if (i < CONFIG_MAX_TENANTS)
            live->tenants[i] = fresh->tenants[k];
    }
}
