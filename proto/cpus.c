#include "proto/cpus.h"

#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_PATH = 4096, MOST_CPUS = 65536 };

/* The words of a short file.  False: it is not there. */
static bool read_words(const char *dir, const char *name, char first[32], char second[32])
{
    char path[MAX_PATH];
    FILE *f;
    int n;

    if ((size_t)snprintf(path, sizeof path, "%s/%s", dir, name) >= sizeof path || (f = fopen(path, "re")) == NULL)
        return false;
    n = fscanf(f, "%31s %31s", first, second);
    (void)fclose(f);
    return n >= 1;
}

/* What one group says, in whole CPUs; less than one is still one. */
static unsigned quota_of(const char *dir)
{
    char quota[32] = "", period[32] = "", rest[32];
    double cpus;

    if (!read_words(dir, "cpu.max", quota, period) &&
        !(read_words(dir, "cpu.cfs_quota_us", quota, rest) && read_words(dir, "cpu.cfs_period_us", period, rest)))
        return UINT_MAX;
    cpus = strtod(period, NULL) > 0 ? strtod(quota, NULL) / strtod(period, NULL) : 0; /* "max", -1: no limit */
    if (cpus <= 0 || cpus > MOST_CPUS)
        return UINT_MAX;
    return cpus < 1 ? 1 : (unsigned)cpus;
}

/* Of the group and of all around it, up to where the hierarchy is mounted. */
static unsigned quota_above(const char *tree, const char *group)
{
    char dir[MAX_PATH];
    size_t root = strlen(tree);
    unsigned least = UINT_MAX;

    if ((size_t)snprintf(dir, sizeof dir, "%s%s", tree, group) >= sizeof dir)
        return UINT_MAX;
    for (;;) {
        unsigned n = quota_of(dir);
        char *slash = strrchr(dir, '/');

        least = n < least ? n : least;
        if (slash == NULL || (size_t)(slash - dir) < root)
            return least;
        *slash = '\0';
    }
}

/* Is `cpu` one of the controllers, "cpu,cpuacct" say? */
static bool has_cpu(const char *controllers)
{
    const char *at = controllers;

    for (size_t n; *at != '\0'; at += n + (at[n] == ',')) {
        n = strcspn(at, ",");
        if (n == 3 && memcmp(at, "cpu", 3) == 0)
            return true;
    }
    return false;
}

/* A line is number:controllers:group; no controllers: it is the one hierarchy of the newer kind. */
static unsigned granted_by(char *line, const char *tree)
{
    char *controllers = strchr(line, ':'), *group = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
    char older[MAX_PATH];

    if (group == NULL)
        return UINT_MAX;
    *group++ = '\0';
    group[strcspn(group, "\n")] = '\0';
    controllers++;
    if (controllers[0] == '\0')
        return quota_above(tree, group);
    if (!has_cpu(controllers) || (size_t)snprintf(older, sizeof older, "%s/cpu", tree) >= sizeof older)
        return UINT_MAX;
    return quota_above(older, group);
}

unsigned cpus_granted(const char *membership, const char *tree)
{
    FILE *f = fopen(membership, "re");
    unsigned least = UINT_MAX;
    char line[MAX_PATH];

    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        unsigned n = granted_by(line, tree);

        least = n < least ? n : least;
    }
    if (f != NULL)
        (void)fclose(f);
    return least;
}

/* As many as the machine has where the kernel does not say; a mask that is too small for it is made larger. */
static unsigned by_affinity(void)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned n = online > 0 ? (unsigned)online : 1;

    for (int most = CPU_SETSIZE; most <= MOST_CPUS; most *= 4) {
        size_t bytes = CPU_ALLOC_SIZE(most);
        cpu_set_t *set = CPU_ALLOC(most);
        bool ok = set != NULL && sched_getaffinity(0, bytes, set) == 0;

        if (ok)
            n = (unsigned)CPU_COUNT_S(bytes, set);
        CPU_FREE(set);
        if (ok)
            break;
    }
    return n > 0 ? n : 1;
}

unsigned cpus_usable(void)
{
    unsigned here = by_affinity(), granted = cpus_granted("/proc/self/cgroup", "/sys/fs/cgroup");

    return granted < here ? granted : here;
}
