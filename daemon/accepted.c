#include "daemon/accepted.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NOTE_MAX = 1 << 20 }; /* bytes; as for a configuration */

static kvs_status name_beside(const options *o, const char *suffix, char *ret, kvs_err *err)
{
    int n = snprintf(ret, PATH_MAX, "%s%s", o->accepted_path, suffix);

    if (n < 0 || n >= PATH_MAX)
        return kvs_fail(err, KVS_E_LIMIT, "--accepted: a path of %d bytes, at most %d", n, PATH_MAX - 1);
    return KVS_OK;
}

static kvs_status load_copy(const options *o, config *ret)
{
    options copy = *o;
    kvs_err err;

    copy.config_path = o->accepted_path;
    return options_config(&copy, ret, &err); /* one that is not there is the usual case; what matters is the file */
}

/* The note's text; NULL: there is none. */
static char *read_note(const options *o, size_t *ret_len)
{
    char path[PATH_MAX], *text;
    ssize_t n = -1;
    int fd;

    if (name_beside(o, ".failed", path, NULL) != KVS_OK)
        return NULL;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    text = fd >= 0 ? malloc(NOTE_MAX) : NULL;
    if (text != NULL)
        n = read(fd, text, NOTE_MAX - 1);
    if (fd >= 0)
        (void)close(fd);
    if (n <= 0) {
        free(text);
        return NULL;
    }
    text[n] = '\0';
    *ret_len = (size_t)n;
    return text;
}

/* Did the last start with exactly these values fail?  Then *why says how. */
static bool has_failed(const options *o, const config *c, kvs_err *why)
{
    size_t len = 0;
    char *text = read_note(o, &len), *values = text != NULL ? strchr(text, '\n') : NULL;
    config *noted = malloc(sizeof *noted);
    bool same = false;
    kvs_err err;

    if (noted != NULL && values != NULL) {
        *values++ = '\0';
        config_default(noted);
        same = config_parse(noted, values, len - (size_t)(values - text), &err) == KVS_OK &&
               config_changed(noted, c, NULL, NULL) == 0;
    }
    if (same)
        (void)kvs_fail(why, KVS_E_CONFIG, "%.60s: the last start with it failed: %.110s", o->config_path, text);
    free(noted);
    free(text);
    return same;
}

kvs_status accepted_config(const options *o, config *ret, bool *ret_old, kvs_err *why)
{
    kvs_status s = options_config(o, ret, why);
    config *copy;

    *ret_old = false;
    if (o->accepted_path == NULL || o->config_path == NULL || (s == KVS_OK && !has_failed(o, ret, why)))
        return s;
    copy = malloc(sizeof *copy);
    if (copy != NULL && load_copy(o, copy) == KVS_OK) {
        *ret = *copy;
        *ret_old = true;
        s = KVS_OK;
    }
    free(copy);
    return s;
}

static kvs_status write_to(int fd, const char *head, const config *c, kvs_err *err)
{
    FILE *f = fdopen(fd, "w");
    kvs_status s;

    if (f == NULL) {
        (void)close(fd);
        return kvs_fail(err, KVS_E_NO_MEMORY, "out of memory");
    }
    if (head != NULL)
        (void)fprintf(f, "%s\n", head);
    s = config_print(c, f);
    if (fclose(f) != 0 || s == KVS_E_SYS)
        return kvs_fail(err, KVS_E_SYS, "%s", strerror(errno));
    return s == KVS_OK ? s : kvs_fail(err, s, "out of memory");
}

/* A new file in place of `path`, whole or not at all: `head` (or NULL) and the values. */
static kvs_status replace(const char *path, const char *head, const config *c, kvs_err *err)
{
    char fresh[PATH_MAX + 8];
    kvs_err why = {0};
    kvs_status s;
    int fd;

    (void)snprintf(fresh, sizeof fresh, "%s.new", path);
    /* Not of whoever may have put something there: a new file, or none. */
    (void)unlink(fresh);
    fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return kvs_fail(err, KVS_E_SYS, "%.120s: %s", fresh, strerror(errno));
    s = write_to(fd, head, c, &why);
    if (s == KVS_OK && rename(fresh, path) != 0)
        s = kvs_fail(&why, KVS_E_SYS, "%s", strerror(errno));
    if (s == KVS_OK)
        return s;
    (void)unlink(fresh);
    return kvs_fail(err, s, "%.100s: %.80s", path, why.msg);
}

bool accepted_failed(const options *o, const config *c, const kvs_err *why)
{
    char path[PATH_MAX], head[KVS_ERR_MSG_BYTES];
    config *copy;
    bool noted = false;

    if (o->accepted_path == NULL || o->config_path == NULL || name_beside(o, ".failed", path, NULL) != KVS_OK)
        return false;
    copy = malloc(sizeof *copy);
    if (copy != NULL && load_copy(o, copy) == KVS_OK && config_changed(copy, c, NULL, NULL) > 0) {
        (void)snprintf(head, sizeof head, "%s", why->msg);
        for (char *p = head; *p != '\0'; p++)
            *p = *p == '\n' ? ' ' : *p;
        noted = replace(path, head, c, NULL) == KVS_OK;
    }
    free(copy);
    return noted;
}

kvs_status accepted_save(const options *o, const config *c, kvs_err *err)
{
    char note[PATH_MAX];
    kvs_status s;

    if (o->accepted_path == NULL)
        return KVS_OK;
    s = name_beside(o, ".failed", note, err);
    if (s == KVS_OK)
        s = replace(o->accepted_path, NULL, c, err);
    if (s == KVS_OK)
        (void)unlink(note);
    return s;
}
