#ifndef KVS_DAEMON_OPTIONS_H
#define KVS_DAEMON_OPTIONS_H

/* Options: the daemon's command line, and the configuration that file and command line make together.
 *
 * Knows the command line and the option table's kinds.  Does not know what a value is used for.  Main thread
 * only. Borrows argv; the holder owns configurations. */

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "config/config.h"

enum { OPTIONS_MAX_SETS = 64 };
#define OPTIONS_DEFAULT_CONFIG "/etc/kvstrided/kvstrided.json"

/* The daemon's exit codes (sysexits.h where there is one). */
enum exit_code {
    EXIT_CODE_OK = 0,
    EXIT_CODE_USAGE = 64,  /* command line */
    EXIT_CODE_DEVICE = 70, /* device lost, or an internal fault: memory of the device is gone, a restart heals */
    EXIT_CODE_SYSTEM = 71, /* sockets, memory, threads: a later start may work */
    EXIT_CODE_BUSY = 75,   /* another daemon has the socket */
    EXIT_CODE_CONFIG = 78, /* permanent until somebody edits something */
};

typedef enum options_action {
    OPTIONS_RUN,
    OPTIONS_CHECK,
    OPTIONS_PRINT_CONFIG,
    OPTIONS_PRINT_SCHEMA,
    OPTIONS_PRINT_TABLE,
    OPTIONS_VERSION,
    OPTIONS_HELP,
} options_action;

typedef struct options {
    options_action action;
    const char *config_path;   /* NULL: built-in defaults */
    bool named;                /* by --config */
    const char *accepted_path; /* the copy to fall back on; NULL: none is kept */
    unsigned n_sets;
    struct options_set {
        const char *key; /* of `key_len` bytes */
        size_t key_len;
        const char *value;
    } sets[OPTIONS_MAX_SETS]; /* the last one of a key wins */
} options;

/* E_INVALID: a usage error, which err explains.  config_path is the default file where that exists. */
kvs_status options_parse(options *ret, int argc, char **argv, kvs_err *err);
void options_help(FILE *to);

/* Defaults, then the file, then the sets.  *ret is written only on KVS_OK. */
kvs_status options_config(const options *o, config *ret, kvs_err *err);

/* Take over from `fresh` what may change while the daemon runs, all of it or (E_CONFIG) nothing.  The texts
 * list keys: what changed, and what differs but waits for a restart. */
kvs_status options_reload(config *live, const config *fresh, char *ret_changed, char *ret_kept, size_t cap,
                          kvs_err *err);

#endif
