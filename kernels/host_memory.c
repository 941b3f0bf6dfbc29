#include "kernels/host_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CGROUP_ROOT "/sys/fs/cgroup"
enum { GROUP_BYTES = 128 }; /* of a name that is shown */

/* The number behind `key` in a file of "key number" lines; an empty key takes the first line. */
static bool number_in(const char *path, const char *key, uint64_t *ret)
{
    char line[256];
    bool found = false;
    FILE *f = fopen(path, "re");

    if (f == NULL)
        return false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        char *end;

        if (strncmp(line, key, strlen(key)) != 0)
            continue;
        errno = 0;
        *ret = strtoull(line + strlen(key), &end, 10);
        found = errno == 0 && end != line + strlen(key);
    }
    (void)fclose(f);
    return found;
}

/* Room in one group: its limit less what is charged, where clean file pages do not count. */
static uint64_t group_room(const char *dir)
{
    char path[PATH_MAX + 32];
    uint64_t max, used, reclaimable = 0;

    (void)snprintf(path, sizeof path, "%s/memory.max", dir);
    if (!number_in(path, "", &max))
        return UINT64_MAX; /* "max", or no such controller */
    (void)snprintf(path, sizeof path, "%s/memory.current", dir);
    if (!number_in(path, "", &used))
        return UINT64_MAX;
    (void)snprintf(path, sizeof path, "%s/memory.stat", dir);
    (void)number_in(path, "inactive_file ", &reclaimable);
    used -= reclaimable < used ? reclaimable : used;
    return used < max ? max - used : 0;
}

/* The tightest group's room, and its folder below the root; "" where none has a limit. */
static uint64_t groups_room(char tightest[GROUP_BYTES])
{
    char line[PATH_MAX], dir[PATH_MAX + sizeof CGROUP_ROOT];
    uint64_t room = UINT64_MAX;
    bool found = false;
    FILE *f = fopen("/proc/self/cgroup", "re");

    tightest[0] = '\0';
    if (f == NULL)
        return UINT64_MAX;
    while (!found && fgets(line, sizeof line, f) != NULL)
        found = strncmp(line, "0::/", 4) == 0;
    (void)fclose(f);
    if (!found)
        return UINT64_MAX;
    line[strcspn(line, "\n")] = 0;
    (void)snprintf(dir, sizeof dir, "%s%s", CGROUP_ROOT, line + 3);
    while (strlen(dir) > strlen(CGROUP_ROOT)) { /* the root has no limit file */
        uint64_t here = group_room(dir);

        if (here < room) {
            room = here;
            (void)snprintf(tightest, GROUP_BYTES, "%.100s", dir + strlen(CGROUP_ROOT));
        }
        *strrchr(dir, '/') = 0;
    }
    return room;
}

/* group: whose limit it is; "": the machine's. */
static uint64_t available(char group[GROUP_BYTES])
{
    uint64_t system_kib, groups = groups_room(group);

    if (!number_in("/proc/meminfo", "MemAvailable:", &system_kib) || system_kib > UINT64_MAX / 1024)
        return groups;
    if (system_kib * 1024 >= groups)
        return groups;
    group[0] = '\0';
    return system_kib * 1024;
}

uint64_t kvs_host_available(void)
{
    char group[GROUP_BYTES];

    return available(group);
}

kvs_status kvs_host_want(const char *what, uint64_t bytes, kvs_err *err)
{
    char group[GROUP_BYTES];
    uint64_t room = available(group);

    if (bytes <= room)
        return KVS_OK;
    if (group[0] != '\0')
        return kvs_fail(err, KVS_E_NO_SPACE,
                        "%s: %" PRIu64 " bytes wanted, %" PRIu64 " are available in control group %.60s: raise its "
                        "MemoryMax= or ask for less",
                        what, bytes, room, group);
    return kvs_fail(err, KVS_E_NO_SPACE,
                    "%s: %" PRIu64 " bytes wanted, %" PRIu64 " are available on this machine: ask for less, or end "
                    "what else takes memory",
                    what, bytes, room);
}
