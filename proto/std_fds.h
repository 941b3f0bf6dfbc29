#ifndef KVS_PROTO_STD_FDS_H
#define KVS_PROTO_STD_FDS_H

/* Descriptors 0, 1 and 2 of a program that was started without some of them: the next socket or file would become one, and
 * what is meant for people would go there.
 *
 * Knows /dev/null.  Does not know who prints what.  First thing in main, before there are threads. */

/* What is not there is /dev/null from then on.  A standard output that was not there still cannot be written (EBADF), so that
 * output that nobody gets is a failure, as on a full disk. */
void std_fds_fill(void);

#endif
