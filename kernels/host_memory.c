#include "kernels/host_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cgroup.h"

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

/* [a group of the newer kind, of the older one] */
static const struct {
    const char *max, *used, *reclaimable;
} files[2] = {{"memory.max", "memory.current", "inactive_file "},
              {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}};

static bool number_of(const char *dir, const char *name, const char *key, uint64_t *ret)
{
    char path[PATH_MAX + 32];

    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    return number_in(path, key, ret);
}

/* Room in one group: its limit less what is charged, where clean file pages do not count.  "max", or no such controller:
 * UINT64_MAX. */
static uint64_t group_room(const char *dir)
{
    uint64_t max, used, reclaimable = 0;

    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        if (!number_of(dir, files[i].max, "", &max) || !number_of(dir, files[i].used, "", &used))
            continue;
        (void)number_of(dir, "memory.stat", files[i].reclaimable, &reclaimable);
        used -= reclaimable < used ? reclaimable : used;
        return used < max ? max - used : 0;
    }
    return UINT64_MAX;
}

typedef struct tightest {
    uint64_t room;
    size_t root; /* bytes of the tree's path */
    char *ret;   /* its folder below that */
} tightest;

static void look_at_group(void *ud, const char *dir)
{
    uint64_t here = group_room(dir);
    tightest *t = ud;

    if (here >= t->room)
        return;
    t->room = here;
    (void)snprintf(t->ret, KVS_GROUP_BYTES, "%.100s", dir[t->root] != '\0' ? dir + t->root : "/");
}

uint64_t kvs_host_groups_room(const char *membership, const char *tree, char ret_tightest[KVS_GROUP_BYTES])
{
    tightest t = {UINT64_MAX, strlen(tree), ret_tightest};

    ret_tightest[0] = '\0';
    cgroup_each(membership, tree, "memory", look_at_group, &t);
    return t.room;
}

static void look_at_limit(void *ud, const char *dir)
{
    uint64_t max, *least = ud;

    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++)
        if (number_of(dir, files[i].max, "", &max) && max < *least)
            *least = max;
}

uint64_t kvs_host_groups_limit(const char *membership, const char *tree)
{
    uint64_t least = UINT64_MAX;

    cgroup_each(membership, tree, "memory", look_at_limit, &least);
    return least;
}

uint64_t kvs_host_total(void)
{
    uint64_t system_kib, groups = kvs_host_groups_limit(CGROUP_MEMBERSHIP, CGROUP_TREE);

    if (!number_in("/proc/meminfo", "MemTotal:", &system_kib) || system_kib > UINT64_MAX / 1024)
        return groups;
    return system_kib * 1024 < groups ? system_kib * 1024 : groups;
}

/* group: whose limit it is; "": the machine's. */
static uint64_t available(char group[KVS_GROUP_BYTES])
{
    uint64_t system_kib, groups = kvs_host_groups_room(CGROUP_MEMBERSHIP, CGROUP_TREE, group);

    if (!number_in("/proc/meminfo", "MemAvailable:", &system_kib) || system_kib > UINT64_MAX / 1024)
        return groups;
    if (system_kib * 1024 >= groups)
        return groups;
    group[0] = '\0';
    return system_kib * 1024;
}

uint64_t kvs_host_available(void)
{
    char group[KVS_GROUP_BYTES];

    return available(group);
}

uint64_t kvs_host_spare(uint64_t room)
{
    if (room == UINT64_MAX)
        return room;
    return room > KVS_HOST_KEPT ? room - KVS_HOST_KEPT : 0;
}

kvs_status kvs_host_want(const char *what, uint64_t bytes, kvs_err *err)
{
    char group[KVS_GROUP_BYTES];
    uint64_t room = available(group);

    if (bytes <= kvs_host_spare(room))
        return KVS_OK;
    if (group[0] != '\0')
        return kvs_fail(err, KVS_E_NO_SPACE,
                        "%s: %" PRIu64 " bytes wanted, %" PRIu64 " are available in control group %.60s, less %" PRIu64
                        " for the daemon itself: raise its MemoryMax= or ask for less",
                        what, bytes, room, group, KVS_HOST_KEPT);
    return kvs_fail(err, KVS_E_NO_SPACE,
                    "%s: %" PRIu64 " bytes wanted, %" PRIu64 " are available on this machine, less %" PRIu64
                    " for the daemon itself: ask for less, or end what else takes memory",
                    what, bytes, room, KVS_HOST_KEPT);
}
