#include "proto/cpus.h"

#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "proto/cgroup.h"

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
    cpus = strtod(period, NULL) > 0 ? strtod(quota, NULL) / strtod(period, NULL) : 0;
    if (!(cpus > 0 && cpus <= MOST_CPUS)) /* "max", -1, or no number at all */
        return UINT_MAX;
    return cpus < 1 ? 1 : (unsigned)cpus;
}

static void look_at_group(void *ud, const char *dir)
{
    unsigned *least = ud, n = quota_of(dir);

    *least = n < *least ? n : *least;
}

unsigned cpus_granted(const char *membership, const char *tree)
{
    unsigned least = UINT_MAX;

    cgroup_each(membership, tree, "cpu", look_at_group, &least);
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
    unsigned here = by_affinity(), granted = cpus_granted(CGROUP_MEMBERSHIP, CGROUP_TREE);

    return granted < here ? granted : here;
}
