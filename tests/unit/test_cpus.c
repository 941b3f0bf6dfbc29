#include "proto/cpus.h"

#include <criterion/criterion.h>
#include <limits.h>
#include <sched.h>

#include "tests/support/cgroup_tree.h"

TestSuite(cpus, .init = cgroup_tree_init, .fini = cgroup_tree_fini);

Test(cpus, without_a_quota_nothing_is_said)
{
    static const char *const odd[] = {
        "",       "\n",           "nan 100000\n", "inf 100000\n", "100000 nan\n", "100000 inf\n",
        "1000\n", "100000 0\n",   "100000 -1\n",  "-1 100000\n",  "0 100000\n",   "99999999999999999999999999 1\n",
        "max\n",  "max max max\n"};

    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX, "no such file");
    cgroup_tree_put("self", "0::/a\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX, "no such group");
    cgroup_tree_make("a");
    cgroup_tree_put("tree/a/cpu.max", "max 100000\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX);
    cgroup_tree_put("tree/a/cpu.max", "nonsense\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX);
    cgroup_tree_put("self", "no colons\n0:one\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX);
    cgroup_tree_put("self", "0::/a\n");
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        cgroup_tree_put("tree/a/cpu.max", odd[i]);
        cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX, "\"%s\"", odd[i]);
    }
    cgroup_tree_put("self", "0::/../../../..\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX);
}

Test(cpus, the_tightest_of_all_groups_around_counts)
{
    cgroup_tree_make("a");
    cgroup_tree_make("a/b");
    cgroup_tree_put("self", "0::/a/b\n");
    cgroup_tree_put("tree/a/b/cpu.max", "800000 100000\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), 8);
    cgroup_tree_put("tree/a/cpu.max", "350000 100000\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), 3, "whole ones");
    cgroup_tree_put("tree/cpu.max", "50000 100000\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), 1, "in a container the mounted root is a group as well");
}

Test(cpus, quotas_of_the_older_kind)
{
    cgroup_tree_make("cpu");
    cgroup_tree_make("cpu/a");
    cgroup_tree_put("self", "12:cpuset:/\n4:cpu,cpuacct:/a\n1:name=systemd:/\n0::/\n");
    cgroup_tree_put("tree/cpu/a/cpu.cfs_period_us", "100000\n");
    cgroup_tree_put("tree/cpu/a/cpu.cfs_quota_us", "-1\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX);
    cgroup_tree_put("tree/cpu/a/cpu.cfs_quota_us", "400000\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), 4);
    cgroup_tree_put("self", "4:cpuset,cpuacct:/a\n");
    cr_assert_eq(cpus_granted(cgroup_membership, cgroup_tree), UINT_MAX, "not the controller that counts");
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
