#include "config/copy_table.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE_BYTES = 64 << 10, MAX_BLOCKS = 1024, UUID_HEX = 32 };
#define MAX_PIECE_BYTES (1 << 30)
#define MAX_GBS         1e5

static const char *const DIRECTIONS[] = {"load", "store"};

typedef struct rate_field {
    const char *key;
    size_t at;
    double max;
} rate_field;

static const rate_field RATES[] = {
    {"engine", offsetof(copy_row, engine), MAX_GBS},
    {"kernel", offsetof(copy_row, kernel), MAX_GBS},
    {"beside_engine", offsetof(copy_row, beside_engine), MAX_GBS},
    {"beside_kernel", offsetof(copy_row, beside_kernel), MAX_GBS},
    {"left_by_engine", offsetof(copy_row, left_by_engine), 100},
    {"left_by_kernel", offsetof(copy_row, left_by_kernel), 100},
};
enum { N_RATES = sizeof RATES / sizeof *RATES };

/* ---- text ---- */

static double *rate_of(copy_row *r, size_t i)
{
    return (double *)(void *)((uint8_t *)r + RATES[i].at);
}

void copy_table_put(const copy_table *t, json_writer *w)
{
    json_put_u64(w, "format", COPY_TABLE_FORMAT);
    json_put_string(w, "card", t->card);
    json_put_hex(w, "uuid", t->uuid, sizeof t->uuid);
    json_put_u64(w, "driver_version", t->driver_version);
    json_put_string(w, "date", t->date);
    for (int d = 0; d < 2; d++) {
        json_begin_array(w, DIRECTIONS[d]);
        for (uint32_t i = 0; i < t->n[d]; i++) {
            copy_row r = t->rows[d][i];

            json_begin_object(w, NULL);
            json_put_u64(w, "piece_bytes", r.piece_bytes);
            json_put_u64(w, "kernel_blocks", r.kernel_blocks);
            for (size_t k = 0; k < N_RATES; k++)
                json_put_double(w, RATES[k].key, round(*rate_of(&r, k) * 1000) / 1000);
            json_end(w);
        }
        json_end(w);
    }
    json_begin_array(w, "peers");
    for (uint32_t i = 0; i < t->n_peers; i++) {
        json_begin_object(w, NULL);
        json_put_hex(w, "uuid", t->peers[i].uuid, sizeof t->peers[i].uuid);
        json_put_double(w, "gbs", round(t->peers[i].gbs * 1000) / 1000);
        json_end(w);
    }
    json_end(w);
}

double copy_table_link(const copy_table *t)
{
    return t->n[0] > 0 ? t->rows[0][t->n[0] - 1].engine : 0;
}

double copy_table_peer(const copy_table *t, const uint8_t uuid[16])
{
    for (uint32_t i = 0; i < t->n_peers; i++)
        if (memcmp(t->peers[i].uuid, uuid, sizeof t->peers[i].uuid) == 0)
            return t->peers[i].gbs;
    return 0;
}

/* ---- reading ---- */

static kvs_status want(const json_node *object, const char *key, json_type type, const json_node **ret, kvs_err *err)
{
    const json_node *n = json_member(object, key);

    if (n == NULL)
        return kvs_fail(err, KVS_E_CONFIG, "%s: is missing", key);
    if (json_type_of(n) != type)
        return kvs_fail(err, KVS_E_CONFIG, "%s: expected %s, found %s", key, json_type_name(type),
                        json_type_name(json_type_of(n)));
    *ret = n;
    return KVS_OK;
}

static kvs_status want_whole(const json_node *object, const char *key, int64_t min, int64_t max, int64_t *ret,
                             kvs_err *err)
{
    const json_node *n = NULL;
    kvs_status s = want(object, key, JSON_NUMBER, &n, err);

    if (s != KVS_OK)
        return s;
    if (!json_whole(n, ret) || *ret < min || *ret > max)
        return kvs_fail(err, KVS_E_CONFIG, "%s: %.17g is no whole number of %lld..%lld", key, json_number(n),
                        (long long)min, (long long)max);
    return KVS_OK;
}

static kvs_status want_text(const json_node *object, const char *key, char ret[COPY_TABLE_NAME_BYTES], kvs_err *err)
{
    const json_node *n = NULL;
    kvs_status s = want(object, key, JSON_STRING, &n, err);

    if (s == KVS_OK && strlen(json_string(n)) >= COPY_TABLE_NAME_BYTES)
        s = kvs_fail(err, KVS_E_CONFIG, "%s: is longer than %d bytes", key, COPY_TABLE_NAME_BYTES - 1);
    if (s == KVS_OK)
        (void)snprintf(ret, COPY_TABLE_NAME_BYTES, "%s", json_string(n));
    return s;
}

static kvs_status want_uuid(const json_node *object, uint8_t ret[16], kvs_err *err)
{
    const json_node *n = NULL;
    kvs_status s = want(object, "uuid", JSON_STRING, &n, err);
    const char *text;

    if (s != KVS_OK)
        return s;
    text = json_string(n);
    if (strlen(text) != UUID_HEX || strspn(text, "0123456789abcdef") != UUID_HEX)
        return kvs_fail(err, KVS_E_CONFIG, "uuid: expected %d digits of 0-9 a-f", UUID_HEX);
    for (int i = 0; i < 16; i++) {
        char two[3] = {text[2 * i], text[2 * i + 1], '\0'};

        ret[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    return KVS_OK;
}

static kvs_status want_row(const json_node *object, copy_row *ret, kvs_err *err)
{
    int64_t bytes = 0, blocks = 0;
    kvs_status s = json_type_of(object) == JSON_OBJECT
                       ? want_whole(object, "piece_bytes", 1, MAX_PIECE_BYTES, &bytes, err)
                       : kvs_fail(err, KVS_E_CONFIG, "row: expected an object");

    if (s == KVS_OK)
        s = want_whole(object, "kernel_blocks", 1, MAX_BLOCKS, &blocks, err);
    ret->piece_bytes = (uint64_t)bytes;
    ret->kernel_blocks = (uint32_t)blocks;
    for (size_t k = 0; k < N_RATES && s == KVS_OK; k++) {
        const json_node *n = NULL;
        double v;

        s = want(object, RATES[k].key, JSON_NUMBER, &n, err);
        v = s == KVS_OK ? json_number(n) : 0;
        if (s == KVS_OK && !(v >= 0 && v <= RATES[k].max))
            s = kvs_fail(err, KVS_E_CONFIG, "%s: %.17g is outside 0..%g", RATES[k].key, v, RATES[k].max);
        *rate_of(ret, k) = v;
    }
    return s;
}

static kvs_status want_rows(const json_node *root, int dir, copy_table *t, kvs_err *err)
{
    const json_node *list = NULL;
    kvs_status s = want(root, DIRECTIONS[dir], JSON_ARRAY, &list, err);
    uint64_t before = 0;

    if (s == KVS_OK && (json_size(list) == 0 || json_size(list) > COPY_TABLE_ROWS))
        s = kvs_fail(err, KVS_E_CONFIG, "%s: %zu rows are not 1..%d", DIRECTIONS[dir], json_size(list),
                     COPY_TABLE_ROWS);
    if (s != KVS_OK)
        return s;
    for (const json_node *n = json_first(list); n != NULL && s == KVS_OK; n = json_next(n)) {
        copy_row *r = &t->rows[dir][t->n[dir]++];

        s = want_row(n, r, err);
        if (s == KVS_OK && r->piece_bytes <= before)
            s = kvs_fail(err, KVS_E_CONFIG, "%s: rows are not in order of piece_bytes", DIRECTIONS[dir]);
        before = r->piece_bytes;
    }
    return s;
}

static kvs_status want_peer(const json_node *object, const copy_table *t, copy_peer *ret, kvs_err *err)
{
    const json_node *n = NULL;
    kvs_status s = json_type_of(object) == JSON_OBJECT ? want_uuid(object, ret->uuid, err)
                                                       : kvs_fail(err, KVS_E_CONFIG, "peer: expected an object");

    if (s == KVS_OK && memcmp(ret->uuid, t->uuid, sizeof t->uuid) == 0)
        s = kvs_fail(err, KVS_E_CONFIG, "peers: the card itself is among them");
    for (uint32_t i = 0; i < t->n_peers && s == KVS_OK; i++)
        if (memcmp(ret->uuid, t->peers[i].uuid, sizeof ret->uuid) == 0)
            s = kvs_fail(err, KVS_E_CONFIG, "peers: two have the same uuid");
    if (s == KVS_OK)
        s = want(object, "gbs", JSON_NUMBER, &n, err);
    if (s != KVS_OK)
        return s;
    ret->gbs = json_number(n);
    if (!(ret->gbs >= 0 && ret->gbs <= MAX_GBS))
        return kvs_fail(err, KVS_E_CONFIG, "gbs: %.17g is outside 0..%g", ret->gbs, MAX_GBS);
    return KVS_OK;
}

/* A table that was made before there were exchanges has none. */
static kvs_status want_peers(const json_node *root, copy_table *t, kvs_err *err)
{
    const json_node *list = NULL;
    kvs_status s;

    if (json_member(root, "peers") == NULL)
        return KVS_OK;
    s = want(root, "peers", JSON_ARRAY, &list, err);
    if (s == KVS_OK && json_size(list) > COPY_TABLE_PEERS)
        s = kvs_fail(err, KVS_E_CONFIG, "peers: %zu are more than %d", json_size(list), COPY_TABLE_PEERS);
    if (s != KVS_OK)
        return s;
    for (const json_node *n = json_first(list); n != NULL && s == KVS_OK; n = json_next(n), t->n_peers++)
        s = want_peer(n, t, &t->peers[t->n_peers], err);
    return s;
}

static kvs_status read_root(const json_node *root, copy_table *t, kvs_err *err)
{
    int64_t format = 0, driver = 0;
    kvs_status s;

    if (json_type_of(root) != JSON_OBJECT)
        return kvs_fail(err, KVS_E_CONFIG, "expected an object, found %s", json_type_name(json_type_of(root)));
    s = want_whole(root, "format", COPY_TABLE_FORMAT, COPY_TABLE_FORMAT, &format, err);
    if (s == KVS_OK)
        s = want_text(root, "card", t->card, err);
    if (s == KVS_OK)
        s = want_uuid(root, t->uuid, err);
    if (s == KVS_OK)
        s = want_whole(root, "driver_version", 0, INT32_MAX, &driver, err);
    t->driver_version = (uint32_t)driver;
    if (s == KVS_OK)
        s = want_text(root, "date", t->date, err);
    for (int d = 0; d < 2 && s == KVS_OK; d++)
        s = want_rows(root, d, t, err);
    return s == KVS_OK ? want_peers(root, t, err) : s;
}

kvs_status copy_table_parse(const char *text, size_t len, copy_table *ret, kvs_err *err)
{
    copy_table t = {.date = ""};
    json *doc = NULL;
    kvs_status s = json_parse(text, len, &doc, err);

    if (s == KVS_OK)
        s = read_root(json_root(doc), &t, err);
    json_destroy(doc);
    if (s == KVS_OK)
        *ret = t;
    return s;
}

/* ---- files ---- */

static kvs_status name_file(const char *folder, const uint8_t uuid[16], char path[PATH_MAX], kvs_err *err)
{
    char hex[UUID_HEX + 1];
    int n;

    for (int i = 0; i < 16; i++)
        (void)snprintf(hex + (size_t)i * 2, 3, "%02x", uuid[i]);
    n = snprintf(path, PATH_MAX - 8, "%s/copies-%s.json", folder, hex);
    return n > 0 && n < PATH_MAX - 8 ? KVS_OK : kvs_fail(err, KVS_E_LIMIT, "a path of %d bytes is too long", n);
}

static kvs_status read_file(const char *path, char **ret, size_t *ret_len, kvs_err *err)
{
    FILE *f = fopen(path, "re");
    char *text;

    if (f == NULL)
        return kvs_fail(err, errno == ENOENT ? KVS_E_NOT_FOUND : KVS_E_SYS, "%s", strerror(errno));
    text = malloc(MAX_FILE_BYTES);
    if (text == NULL) {
        (void)fclose(f);
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for it");
    }
    *ret_len = fread(text, 1, MAX_FILE_BYTES, f);
    (void)fclose(f);
    if (*ret_len == MAX_FILE_BYTES) {
        free(text);
        return kvs_fail(err, KVS_E_CONFIG, "is longer than %d bytes", MAX_FILE_BYTES - 1);
    }
    *ret = text;
    return KVS_OK;
}

kvs_status copy_table_read(const char *folder, const uint8_t uuid[16], copy_table *ret, kvs_err *err)
{
    char path[PATH_MAX], *text = NULL;
    kvs_err why = {0};
    copy_table t;
    size_t len = 0;
    kvs_status s = name_file(folder, uuid, path, err);

    if (s != KVS_OK)
        return s;
    s = read_file(path, &text, &len, &why);
    if (s == KVS_OK)
        s = copy_table_parse(text, len, &t, &why);
    free(text);
    if (s == KVS_OK && memcmp(t.uuid, uuid, 16) != 0)
        s = kvs_fail(&why, KVS_E_CONFIG, "uuid: is that of another card");
    if (s != KVS_OK)
        return kvs_fail(err, s, "%.100s: %.80s", path, why.msg);
    *ret = t;
    return KVS_OK;
}

static bool write_whole(int fd, const char *text, size_t len)
{
    FILE *f = fdopen(fd, "w");

    if (f == NULL) {
        (void)close(fd);
        return false;
    }
    json_pretty(text, len, f);
    return fclose(f) == 0;
}

kvs_status copy_table_write(const char *folder, const copy_table *t, kvs_err *err)
{
    char path[PATH_MAX], fresh[PATH_MAX];
    json_writer *w = json_writer_create();
    const char *text;
    size_t len = 0;
    kvs_status s = name_file(folder, t->uuid, path, err);
    int fd;

    if (s != KVS_OK) {
        json_writer_destroy(w);
        return s;
    }
    json_begin_object(w, NULL);
    copy_table_put(t, w);
    json_end(w);
    text = json_text(w, &len);
    if (text == NULL) {
        json_writer_destroy(w);
        return kvs_fail(err, KVS_E_NO_MEMORY, "copy table: out of memory");
    }
    (void)snprintf(fresh, sizeof fresh, "%.*s.new", PATH_MAX - 8, path);
    /* Not of whoever may have put something there: a new file, or none. */
    (void)unlink(fresh);
    fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0 || fchmod(fd, 0644) != 0 || !write_whole(fd, text, len) || rename(fresh, path) != 0) {
        s = kvs_fail(err, KVS_E_SYS, "%.100s: %s", fresh, strerror(errno));
        (void)unlink(fresh);
    }
    json_writer_destroy(w);
    return s;
}
