#ifndef KVS_CTL_CTL_H
#define KVS_CTL_CTL_H

/* kvstridectl: one command a run, against a daemon's admin socket or a private daemon of its own.
 *
 * Knows libkvstride, exit codes and how answers look.  Does not know the wire or the daemon's inside.
 * One thread, but for the clients of replay and the flood of bench.  Options are parsed once by main.c; commands read
 * them.  Texts in `ctl` are argv's. */

#include <stdbool.h>
#include <stdint.h>

#include "config/json.h"
#include "proto/client/kvstride.h"
#include "proto/status.h"

#define CTL_ADMIN_SOCKET "/run/kvstrided/admin.sock"

/* Exit codes; --help lists them. */
enum ctl_exit {
    CTL_OK = 0,
    CTL_FAILED = 1,      /* it was done, and the result is bad: a mismatch, degraded health, a failed fsck */
    CTL_USAGE = 2,       /* wrong words on the command line, or a file named there is no good */
    CTL_UNREACHABLE = 3, /* no daemon, no permission, no answer in time */
    CTL_REFUSED = 4,     /* the daemon said no */
    CTL_UNABLE = 5,      /* no daemon was asked, and this machine cannot: it has no GPU */
};

#define CTL_NO_NS UINT64_MAX

/* The command line.  Numbers that were not given are 0, but where it says otherwise. */
typedef struct ctl {
    bool json, quiet, pinned, dry_run, off, quick;
    const char *socket, *trace, *svg, *engine, *folder; /* NULL: not given */
    uint64_t limit;                                     /* never "not given": main.c has its default */
    uint64_t ns;                                        /* CTL_NO_NS: not given */
    uint64_t timeout_ms, blocks, layers, tokens, clients, seconds, interval, gpu;
    char **args; /* words behind the command */
    int n_args;
} ctl;

typedef struct ctl_command {
    const char *name, *args, *help;
    const char *options; /* those it takes besides what every command takes, separated by spaces */
    const char *more;    /* of its own --help: what it needs, what it prints; "" */
    int max_args;
    int (*run)(const ctl *c); /* the exit code; says on stderr why it is not CTL_OK */
} ctl_command;

int ctl_status(const ctl *c);
int ctl_stats(const ctl *c);
int ctl_ping(const ctl *c);
int ctl_health(const ctl *c);
int ctl_ls(const ctl *c);
int ctl_leases(const ctl *c);
int ctl_clients(const ctl *c);
int ctl_namespaces(const ctl *c);
int ctl_fsck(const ctl *c);
int ctl_tenants(const ctl *c);
int ctl_reload(const ctl *c);
int ctl_drain(const ctl *c);
int ctl_watch(const ctl *c);
int ctl_reset(const ctl *c);
int ctl_drop(const ctl *c);
int ctl_replay(const ctl *c);
int ctl_bench(const ctl *c);
int ctl_calibrate(const ctl *c);
int ctl_demo(const ctl *c);

/* ---- what commands share (ctl.c) ---- */

/* "kvstridectl: what: why" on stderr, {"error": why, ...} on stdout with --json, and the exit code that fits. */
int ctl_fail(const ctl *c, const char *what, kvs_status s, const kvs_err *err);
/* The same, with a code of the caller's. */
int ctl_fail_as(const ctl *c, const char *what, kvs_status s, const kvs_err *err, int code);

/* Wrong words: "kvstridectl: ..." and where to read on, on stderr.  CTL_USAGE.  That is the help of the command that was set,
 * by its name with a space behind it, borrowed for good. */
void ctl_set_command(const char *name_and_space);
__attribute__((format(printf, 1, 2))) int ctl_usage(const char *fmt, ...);

/* Was `name` probably meant by `word`, and more so than the one whose distance *best is (SIZE_MAX: none)?  Then *best is its own. */
bool ctl_is_meant(const char *word, const char *name, size_t *best);

/* Connect to c->socket, $KVSTRIDE_ADMIN_SOCKET or the default.  NULL: *ret_exit is the exit code, and all has been said. */
kvs_client *ctl_connect(const ctl *c, int *ret_exit);

/* Print a finished document on a line of its own and end the writer (NULL: it could not be made).  Returns `code`, or
 * CTL_FAILED if memory ran out. */
int ctl_put(json_writer *w, int code);

/* True once nobody reads standard output any more: a closed pipe. */
bool ctl_reader_gone(void);

#endif
