#include "proto/cpus.h"

#include <criterion/criterion.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/kvs-cpus-XXXXXX";
static char tree[64], membership[64];

static void setup(void)
{
    cr_assert_not_null(mkdtemp(root));
    (void)snprintf(tree, sizeof tree, "%s/tree", root);
    (void)snprintf(membership, sizeof membership, "%s/self", root);
    cr_assert_eq(mkdir(tree, 0700), 0);
}

static void teardown(void)
{
    char command[96];

    (void)snprintf(command, sizeof command, "rm -r %s", root);
    cr_assert_eq(system(command), 0);
}

TestSuite(cpus, .init = setup, .fini = teardown);

static void put(const char *path, const char *text)
{
    char whole[256];
    FILE *f;

    (void)snprintf(whole, sizeof whole, "%s/%s", root, path);
    f = fopen(whole, "w");
    cr_assert_not_null(f, "%s", whole);
    (void)fputs(text, f);
    cr_assert_eq(fclose(f), 0);
}

static void make(const char *path)
{
    char whole[256];

    (void)snprintf(whole, sizeof whole, "%s/tree/%s", root, path);
    cr_assert_eq(mkdir(whole, 0700), 0);
}

Test(cpus, without_a_quota_nothing_is_said)
{
    static const char *const odd[] = {
        "",       "\n",           "nan 100000\n", "inf 100000\n", "100000 nan\n", "100000 inf\n",
        "1000\n", "100000 0\n",   "100000 -1\n",  "-1 100000\n",  "0 100000\n",   "99999999999999999999999999 1\n",
        "max\n",  "max max max\n"};

    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX, "no such file");
    put("self", "0::/a\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX, "no such group");
    make("a");
    put("tree/a/cpu.max", "max 100000\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX);
    put("tree/a/cpu.max", "nonsense\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX);
    put("self", "no colons\n0:one\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX);
    put("self", "0::/a\n");
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        put("tree/a/cpu.max", odd[i]);
        cr_assert_eq(cpus_granted(membership, tree), UINT_MAX, "\"%s\"", odd[i]);
    }
    put("self", "0::/../../../..\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX);
}

Test(cpus, the_tightest_of_all_groups_around_counts)
{
    make("a");
    make("a/b");
    put("self", "0::/a/b\n");
    put("tree/a/b/cpu.max", "800000 100000\n");
    cr_assert_eq(cpus_granted(membership, tree), 8);
    put("tree/a/cpu.max", "350000 100000\n");
    cr_assert_eq(cpus_granted(membership, tree), 3, "whole ones");
    put("tree/cpu.max", "50000 100000\n");
    cr_assert_eq(cpus_granted(membership, tree), 1, "in a container the mounted root is a group as well");
}

Test(cpus, quotas_of_the_older_kind)
{
    make("cpu");
    make("cpu/a");
    put("self", "12:cpuset:/\n4:cpu,cpuacct:/a\n1:name=systemd:/\n0::/\n");
    put("tree/cpu/a/cpu.cfs_period_us", "100000\n");
    put("tree/cpu/a/cpu.cfs_quota_us", "-1\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX);
    put("tree/cpu/a/cpu.cfs_quota_us", "400000\n");
    cr_assert_eq(cpus_granted(membership, tree), 4);
    put("self", "4:cpuset,cpuacct:/a\n");
    cr_assert_eq(cpus_granted(membership, tree), UINT_MAX, "not the controller that counts");
}

Test(cpus, a_process_that_is_bound_to_one_has_one)
{
    unsigned before = cpus_usable();
    cpu_set_t all, one;
    int first = 0;

    cr_assert_geq(before, 1);
    cr_assert_eq(sched_getaffinity(0, sizeof all, &all), 0);
    cr_assert_leq(before, (unsigned)CPU_COUNT(&all));
    while (!CPU_ISSET(first, &all))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    cr_assert_eq(sched_setaffinity(0, sizeof one, &one), 0);
    cr_assert_eq(cpus_usable(), 1);
}
