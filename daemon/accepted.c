#include "daemon/accepted.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

kvs_status accepted_config(const options *o, config *ret, bool *ret_old, kvs_err *why)
{
    options copy = *o;
    kvs_status s = options_config(o, ret, why);
    kvs_err err;

    *ret_old = false;
    if (s == KVS_OK || o->accepted_path == NULL || o->config_path == NULL)
        return s;
    copy.config_path = o->accepted_path;
    if (options_config(&copy, ret, &err) != KVS_OK)
        return s; /* a copy that is not there is the usual case; what matters is the file */
    *ret_old = true;
    return KVS_OK;
}

static kvs_status write_to(int fd, const config *c, kvs_err *err)
{
    FILE *f = fdopen(fd, "w");
    kvs_status s;

    if (f == NULL) {
        (void)close(fd);
        return kvs_fail(err, KVS_E_NO_MEMORY, "out of memory");
    }
    s = config_print(c, f);
    if (fclose(f) != 0 || s == KVS_E_SYS)
        return kvs_fail(err, KVS_E_SYS, "%s", strerror(errno));
    return s == KVS_OK ? s : kvs_fail(err, s, "out of memory");
}

kvs_status accepted_save(const options *o, const config *c, kvs_err *err)
{
    char fresh[PATH_MAX];
    kvs_err why = {0};
    kvs_status s;
    int fd, n;

    if (o->accepted_path == NULL)
        return KVS_OK;
    n = snprintf(fresh, sizeof fresh, "%s.new", o->accepted_path);
    if (n < 0 || (size_t)n >= sizeof fresh)
        return kvs_fail(err, KVS_E_LIMIT, "--accepted: a path of %d bytes, at most %zu", n, sizeof fresh - 1);
    /* Not of whoever may have put something there: a new file, or none. */
    (void)unlink(fresh);
    fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return kvs_fail(err, KVS_E_SYS, "%s: %s", fresh, strerror(errno));
    s = write_to(fd, c, &why);
    if (s == KVS_OK && rename(fresh, o->accepted_path) != 0)
        s = kvs_fail(&why, KVS_E_SYS, "%s", strerror(errno));
    if (s == KVS_OK)
        return s;
    (void)unlink(fresh);
    return kvs_fail(err, s, "%.100s: %.80s", o->accepted_path, why.msg);
}
