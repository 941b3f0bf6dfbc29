#ifndef KVS_CTL_IN_PROCESS_H
#define KVS_CTL_IN_PROCESS_H

/* The other way to the kernels: not over the socket but here, in the engine's own process, on the memory of the daemon
 * that is mapped into it.
 *
 * Knows the client library and the table of device functions.  Does not know what is in the slots.
 * One thread.  Owns the device and its queue; regions stay the caller's, and so does their mapping. */

#include "proto/client/kvstride.h"
#include "proto/layout.h"
#include "proto/status.h"

typedef struct in_process in_process;

/* On the device of `region`, one that the daemon made for this connection: the cpu, or the GPU with the UUID that the
 * daemon told.  A GPU does not survive a fork: open it behind one.  E_UNSUPPORTED: an import, or no driver here;
 * E_NOT_FOUND: this process does not see that GPU. */
kvs_status in_process_open(in_process **ret, kvs_client *c, kvs_region *region, kvs_err *err);
void in_process_close(in_process *p); /* NULL is fine */

/* As kvs_decode with the same arguments, results included, and finished on return.  desc: of a->ns.  What the daemon
 * does besides is left out: whose a slot is and the bounds of the scratch region are not checked, marks are not looked
 * at. */
kvs_status in_process_decode(in_process *p, const kvs_namespace *desc, const kvs_decode_args *a, kvs_err *err);

#endif
