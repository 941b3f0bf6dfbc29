#ifndef KVS_CTL_PRIVATE_H
#define KVS_CTL_PRIVATE_H

/* A private daemon: kvstrided started for one command, on sockets in a temporary folder, gone with it.
 *
 * Knows the program's name, its options and that HEALTH tells when it is ready.  Does not know what it is
 * used for. One thread.  Owns the process and the folder; private_stop takes both away, and the kernel ends
 * the daemon if this process dies first. */

#include <stdint.h>
#include <sys/types.h>

#include "proto/status.h"

typedef struct private_daemon {
    pid_t pid; /* 0: not running */
    char dir[64], socket[96], admin[96], log[96], config[96];
    char other[96]; /* of the tenant "other", where private_start_tenant made one */
} private_daemon;

/* settings: [n] "key=value" as kvstrided --set takes them.  Waits until the whole pool is usable, at most 60
 * s. E_AWAY: it did not come up, with the end of what it said. */
kvs_status private_start(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err);
/* The same with a second tenant. */
kvs_status private_start_tenant(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err);
/* End the process, kindly, and start another one on the same sockets.  After a failure it is stopped. */
kvs_status private_restart(private_daemon *d, const char *const *settings, uint32_t n, kvs_err *err);
void private_stop(private_daemon *d); /* any number of times */

#endif
