#ifndef KVS_TESTS_CGROUP_TREE_H
#define KVS_TESTS_CGROUP_TREE_H

/* A control group hierarchy of plain files, for what reads one: a folder of its own with tree/ and the file `self`.
 *
 * Knows no controllers.  Single thread; the folder is there from init to fini.  Failures are Criterion assertions. */

extern char cgroup_tree[64], cgroup_membership[64]; /* paths of tree/ and of self */

void cgroup_tree_init(void);
void cgroup_tree_fini(void);
void cgroup_tree_put(const char *path, const char *text); /* a file, by its path below the folder */
void cgroup_tree_make(const char *path);                  /* a group, by its path below tree/ */

#endif
