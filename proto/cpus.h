#ifndef KVS_PROTO_CPUS_H
#define KVS_PROTO_CPUS_H

/* CPUs: how many of them this process may use.
 *
 * Knows affinity and control groups.  Does not know what they are used for.  Any thread; reads a few files, so it is asked
 * once, at the start of whatever depends on it, and not on the daemon's loop while it serves. */

/* At least 1: by affinity, and of these no more than its control group is granted (cpu.max, or the quota of the older kind).
 * A host with many processors is no reason to keep the four busy that a container was given. */
unsigned cpus_usable(void);

/* Whole CPUs granted to the group that `membership` (/proc/self/cgroup) names, and to those around it, in the hierarchy
 * mounted at `tree` (/sys/fs/cgroup).  UINT_MAX: nothing is said about them. */
unsigned cpus_granted(const char *membership, const char *tree);

#endif
