#include "config/users.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/json.h"

static const char PASSWD[] = "/etc/passwd";

/* NAME:PASSWORD:NUMBER:...  False: another's line, or none that makes sense. */
static bool is_line_of(const char *line, const char *name, uint32_t *ret)
{
    size_t len = strlen(name);
    const char *number;
    char *end;
    unsigned long long uid;

    if (len == 0 || strncmp(line, name, len) != 0 || line[len] != ':')
        return false;
    number = strchr(line + len + 1, ':');
    if (number == NULL || number[1] < '0' || number[1] > '9')
        return false;
    errno = 0;
    uid = strtoull(number + 1, &end, 10);
    if (errno != 0 || *end != ':' || uid > UINT32_MAX)
        return false;
    *ret = (uint32_t)uid;
    return true;
}

kvs_status users_find(const char *name, uint32_t *ret, kvs_err *err)
{
    char shown[JSON_QUOTED_BYTES], *line = NULL;
    FILE *f = fopen(PASSWD, "re");
    bool found = false;
    size_t cap = 0;

    if (f == NULL)
        return kvs_fail(err, KVS_E_CONFIG, "user %s: %s: %s", json_quote(shown, name), PASSWD, strerror(errno));
    while (!found && getline(&line, &cap, f) >= 0)
        found = is_line_of(line, name, ret);
    free(line);
    (void)fclose(f);
    if (!found)
        return kvs_fail(err, KVS_E_CONFIG, "user %s is not in %s; %s", json_quote(shown, name), PASSWD,
                        name[0] != '\0' && strspn(name, "0123456789") == strlen(name)
                            ? "a number goes without quotes"
                            : "one of another directory is given by number");
    return KVS_OK;
}
