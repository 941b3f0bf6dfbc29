#ifndef KVS_CTL_CTL_H
#define KVS_CTL_CTL_H

/* kvstridectl: one command a run, against a daemon's admin socket or a private daemon of its own.
 *
 * Knows libkvstride, exit codes and how answers look.  Does not know the wire or the daemon's inside.
 * One thread, but for replay's clients.  Options are parsed once by main.c; commands read them. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/client/kvstride.h"
#include "proto/status.h"

/* Exit codes; --help lists them. */
enum ctl_exit {
    CTL_OK = 0,
    CTL_FAILED = 1,      /* it was done, and the result is bad: a mismatch, degraded health, a failed fsck */
    CTL_USAGE = 2,       /* wrong words on the command line */
    CTL_UNREACHABLE = 3, /* no daemon, no permission, no answer in time */
    CTL_REFUSED = 4,     /* the daemon said no */
};

typedef struct ctl {
    const char *socket; /* NULL: the command's default */
    bool json, quiet;
    uint32_t timeout_ms;
    /* options of commands; 0 or NULL: not given */
    const char *trace;
    uint64_t blocks, layers, tokens, clients, limit, ns, seconds, heads, seed;
    bool has_ns, pinned;
    char **args; /* words behind the command */
    int n_args;
} ctl;

typedef struct ctl_command {
    const char *name, *args, *help;
    const char *options; /* the long options it takes besides the common ones, separated by spaces */
    int max_args;
    int (*run)(const ctl *c);
} ctl_command;

extern const ctl_command CTL_COMMANDS[]; /* ends with a NULL name */

int ctl_status(const ctl *c);
int ctl_ping(const ctl *c);
int ctl_health(const ctl *c);
int ctl_ls(const ctl *c);
int ctl_leases(const ctl *c);
int ctl_clients(const ctl *c);
int ctl_namespaces(const ctl *c);
int ctl_fsck(const ctl *c);
int ctl_watch(const ctl *c);
int ctl_reset(const ctl *c);
int ctl_drop(const ctl *c);
int ctl_replay(const ctl *c);
int ctl_bench(const ctl *c);
int ctl_demo(const ctl *c);

/* "kvstridectl: what: why" on stderr (or {"error": ...} with --json), and the exit code that fits the status.
 */
int ctl_fail(const ctl *c, const char *what, kvs_status s, const kvs_err *err);

/* Connect to c->socket, or `fallback`.  On failure *ret_exit is the exit code and everything has been said.
 */
kvs_client *ctl_connect(const ctl *c, const char *fallback, int *ret_exit);

#define CTL_ADMIN_SOCKET "/run/kvstrided/admin.sock"

#endif
