#ifndef KVS_PROTO_CGROUP_H
#define KVS_PROTO_CGROUP_H

/* Control groups: which ones hold this process, and where their files lie.
 *
 * Knows both kinds of hierarchy.  Does not know what the files mean.  Any thread; reads one file. */

#define CGROUP_MEMBERSHIP "/proc/self/cgroup"
#define CGROUP_TREE       "/sys/fs/cgroup"

/* Calls `visit` with the folder of each group that `membership` names and that may limit what `controller` counts ("cpu",
 * "memory"): of the newer kind (TREE/GROUP) and of the older one (TREE/CONTROLLER/GROUP), each time the group itself and then
 * all around it, up to where the hierarchy is mounted, for in a container that is a group as well.  They need not exist. */
void cgroup_each(const char *membership, const char *tree, const char *controller,
                 void (*visit)(void *ud, const char *dir), void *ud);

#endif
