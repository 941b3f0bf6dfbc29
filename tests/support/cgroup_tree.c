#include "tests/support/cgroup_tree.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

char cgroup_tree[64], cgroup_membership[64];
static char root[] = "/tmp/kvs-groups-XXXXXX";

void cgroup_tree_init(void)
{
    cr_assert_not_null(mkdtemp(root));
    (void)snprintf(cgroup_tree, sizeof cgroup_tree, "%s/tree", root);
    (void)snprintf(cgroup_membership, sizeof cgroup_membership, "%s/self", root);
    cr_assert_eq(mkdir(cgroup_tree, 0700), 0);
}

void cgroup_tree_fini(void)
{
    char command[96];

    (void)snprintf(command, sizeof command, "rm -r %s", root);
    cr_assert_eq(system(command), 0);
}

void cgroup_tree_put(const char *path, const char *text)
{
    char whole[256];
    FILE *f;

    (void)snprintf(whole, sizeof whole, "%s/%s", root, path);
    f = fopen(whole, "w");
    cr_assert_not_null(f, "%s", whole);
    (void)fputs(text, f);
    cr_assert_eq(fclose(f), 0);
}

void cgroup_tree_make(const char *path)
{
    char whole[256];

    (void)snprintf(whole, sizeof whole, "%s/tree/%s", root, path);
    cr_assert_eq(mkdir(whole, 0700), 0);
}
