#include "kernels/host_memory.h"

#include <criterion/criterion.h>

#include "tests/support/cgroup_tree.h"

/* Of control groups of both kinds, in a tree of our own. */

static char tightest[KVS_GROUP_BYTES];

TestSuite(host_memory, .init = cgroup_tree_init, .fini = cgroup_tree_fini);

static uint64_t room(void)
{
    return kvs_host_groups_room(cgroup_membership, cgroup_tree, tightest);
}

Test(host_memory, without_a_limit_there_is_room_for_all)
{
    cr_assert_eq(room(), UINT64_MAX, "no such file");
    cgroup_tree_put("self", "0::/a\n");
    cgroup_tree_make("a");
    cgroup_tree_put("tree/a/memory.current", "5000\n");
    cr_assert_eq(room(), UINT64_MAX, "no such controller");
    cgroup_tree_put("tree/a/memory.max", "max\n");
    cr_assert_eq(room(), UINT64_MAX);
    cgroup_tree_put("tree/a/memory.max", "nonsense\n");
    cr_assert_eq(room(), UINT64_MAX);
    cgroup_tree_put("tree/a/memory.max", "99999999999999999999999\n");
    cr_assert_eq(room(), UINT64_MAX);
    cr_assert_str_eq(tightest, "");
}

Test(host_memory, the_tightest_of_all_groups_around_counts)
{
    cgroup_tree_make("a");
    cgroup_tree_make("a/b");
    cgroup_tree_put("self", "0::/a/b\n");
    cgroup_tree_put("tree/a/b/memory.max", "9000\n");
    cgroup_tree_put("tree/a/b/memory.current", "5000\n");
    cr_assert_eq(room(), 4000);
    cr_assert_str_eq(tightest, "/a/b");
    cgroup_tree_put("tree/a/b/memory.stat", "anon 1\ninactive_file 600\n");
    cr_assert_eq(room(), 4600, "clean file pages go when they must");
    cgroup_tree_put("tree/a/memory.max", "6000\n");
    cgroup_tree_put("tree/a/memory.current", "5500\n");
    cr_assert_eq(room(), 500);
    cr_assert_str_eq(tightest, "/a");
    cgroup_tree_put("tree/memory.max", "6000\n");
    cgroup_tree_put("tree/memory.current", "7000\n");
    cr_assert_eq(room(), 0, "in a container the mounted root is a group as well");
    cr_assert_str_eq(tightest, "/");
}

/* Symptom: the kernel killed the daemon at its start, where a container of the older kind had less memory than the pool. */
Test(host_memory, limits_of_the_older_kind)
{
    cgroup_tree_make("memory");
    cgroup_tree_make("memory/a");
    cgroup_tree_put("self", "12:cpuset:/\n4:hugetlb,memory:/a\n1:name=systemd:/\n0::/\n");
    cgroup_tree_put("tree/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
    cgroup_tree_put("tree/memory/a/memory.usage_in_bytes", "4096\n");
    cr_assert_gt(room(), UINT64_C(1) << 60);
    cgroup_tree_put("tree/memory/a/memory.limit_in_bytes", "10000\n");
    cgroup_tree_put("tree/memory/a/memory.stat", "inactive_file 7\ntotal_inactive_file 96\n");
    cr_assert_eq(room(), 6000);
    cr_assert_str_eq(tightest, "/memory/a");
    cgroup_tree_put("self", "4:cpuset,memoryless:/a\n");
    cr_assert_eq(room(), UINT64_MAX, "not the controller that counts");
}

Test(host_memory, the_lowest_limit_is_all_there_can_be)
{
    cgroup_tree_make("a");
    cgroup_tree_make("a/b");
    cgroup_tree_put("self", "0::/a/b\n");
    cr_assert_eq(kvs_host_groups_limit(cgroup_membership, cgroup_tree), UINT64_MAX);
    cgroup_tree_put("tree/a/b/memory.max", "max\n");
    cgroup_tree_put("tree/a/memory.max", "7000\n");
    cr_assert_eq(kvs_host_groups_limit(cgroup_membership, cgroup_tree), 7000, "whatever is used of it");
    cgroup_tree_put("tree/a/b/memory.max", "9000\n");
    cr_assert_eq(kvs_host_groups_limit(cgroup_membership, cgroup_tree), 7000);
    cr_assert_gt(kvs_host_total(), kvs_host_available());
}

/* Symptom: regions of 1 MiB filled the daemon's control group to its last byte; sixty idle connections later the kernel
 * killed the daemon. */
Test(host_memory, some_is_kept_for_what_nobody_asks_for)
{
    cr_assert_eq(kvs_host_spare(UINT64_MAX), UINT64_MAX, "no limit");
    cr_assert_eq(kvs_host_spare(KVS_HOST_KEPT + 4096), 4096);
    cr_assert_eq(kvs_host_spare(KVS_HOST_KEPT), 0);
    cr_assert_eq(kvs_host_spare(4096), 0);
    cr_assert_eq(kvs_host_want("pool", 0, NULL), KVS_OK);
}
