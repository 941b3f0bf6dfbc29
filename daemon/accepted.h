#ifndef KVS_DAEMON_ACCEPTED_H
#define KVS_DAEMON_ACCEPTED_H

/* Accepted: the configuration that is kept for the day on which the file is broken.
 *
 *   start:   file good -> use it.  File refused -> use the copy, say so, be degraded.  No good copy -> refuse to start
 *            file good, but the last start with these values failed -> the copy, as above
 *   failed:  before it was ready, with values that are not the copy's: noted beside it (COPY.failed: the reason, the values)
 *   ready, and after each reload that was accepted, as soon as the pool has the size that it asks for: the values in use
 *            are the new copy, and the note goes
 *
 * Knows the command line and files.  Does not know what a value is used for or who is told.  Main thread only.
 * Owns nothing. */

#include <stdbool.h>

#include "daemon/options.h"

/* File and command line, or else (where --accepted names a copy) the copy and the command line: then *ret_old is true
 * and *why, which may not be NULL, says what is wrong with the file or with its last start.  A failure is the file's. */
kvs_status accepted_config(const options *o, config *ret, bool *ret_old, kvs_err *why);

/* `c`, which is good as a file, did not come up.  True: noted, and the next start will use the copy. */
bool accepted_failed(const options *o, const config *c, const kvs_err *why);

/* Write `c` to the copy, whole or not at all; nothing where no copy is named.  E_SYS, E_NO_MEMORY. */
kvs_status accepted_save(const options *o, const config *c, kvs_err *err);

#endif
